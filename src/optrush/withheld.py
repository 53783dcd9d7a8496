"""What must never be written: passwords in a configuration, and the environment's secrets in somebody's message. Pure.

A run writes its configuration into run.yaml, into every checkpoint and to its tracker; so an address with a password
in it is refused, and the answer does not repeat it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from optrush.config import LOGIN, Run
from optrush.errors import ConfigError

_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_SHORTEST = 6  # a shorter value would be found in ordinary words


def refuse(run: Run) -> None:
    """Refuses a configuration that holds a password.

    Raises:
        ConfigError: naming the key, not the value.
    """
    for key, value in _texts(run.model_dump(mode="json", by_alias=True)):
        if LOGIN.search(value):
            do = "take it out; put it where the library that opens the address looks for it, such as its environment"
            raise ConfigError(f"`{key}`", "an address with a user or password in it, which a run would write down", do)


def scrubbed(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """A message of another's, without what the environment holds as secrets and without passwords in addresses."""
    for name, value in environment.items():
        if _NAME.search(name) and len(value) >= _SHORTEST:
            text = text.replace(value, "***")
    return LOGIN.sub("***@", text)


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from _texts(part, f"{key}.{name}" if key else name)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part, key)
