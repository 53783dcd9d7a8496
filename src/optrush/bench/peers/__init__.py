"""The other systems, one a file; adding one is a file and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from optrush.bench.peer import Peer
from optrush.bench.peers.torchtitan import Torchtitan
from optrush.bench.peers.trainer import Trainer
from optrush.bench.peers.unsloth import Unsloth
from optrush.config import nearest
from optrush.errors import ConfigError

PEERS: tuple[type[Peer], ...] = (
    Trainer,
    Unsloth,
    Torchtitan,
)


def build(name: str, options: Mapping[str, Any]) -> Peer:
    """A system with its options.

    Raises:
        ConfigError: no such system or option, or a value of the wrong kind.
    """
    known = {p.name: p for p in PEERS}
    if name not in known:
        raise ConfigError(f"the system `{name}`", "no such system", nearest(name, known))
    fields = list(known[name].model_fields)
    for option in options:
        if option not in fields:
            raise ConfigError(f"`{name}: {option}`", "no such option", nearest(option, fields))
    try:
        return known[name](**options)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"`{name}: {where}`", f"{first['input']!r}", first["msg"]) from None
