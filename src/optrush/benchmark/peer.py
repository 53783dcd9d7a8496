"""Define the interface of another training system on a ladder, and find the packages that provide such systems. Pure.

A rung with `peer:` is trained by another system on the load of its reference rung, in a separate process. The systems
are not part of this package: a provider registers a tuple of Peer classes under the entry point `optrush.peers`; in a
checkout, benchmarks/peers is used without being installed.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

import optrush
from optrush.config import Config, accepted, nearest
from optrush.errors import ConfigError, NeedsError, one_line
from optrush.hardware import Device
from optrush.technique import Requirement

GROUP = "optrush.peers"
CHECKOUT = Path(optrush.__file__).parents[2] / "benchmarks"
RARE_SHARE = 1e-3  # a dtype with a smaller share of the values is not counted as a precision (`training_facts`)
UNCOMPARED = "not compared"


class Peer(BaseModel):
    """Base class of other training systems; the fields of a subclass are its options."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: ClassVar[str]
    # Module whose `main` trains one rung: `python -m WORKER REQUEST.json RESULT.json`, with the result of worker.py.
    worker: ClassVar[str]
    begins_alike: ClassVar[bool] = True  # with our initial weights; otherwise its losses are not compared with ours

    @property
    def title(self) -> str:
        """Format the name and the options, for reports."""
        raise AssertionError("each system defines it")

    def needs(self, config: Config, device: Device) -> Iterator[Requirement]:
        """Yield the requirements of a run; must not import the system."""
        raise AssertionError("each system defines it")

    def needs_ranks(self, config: Config, ranks: int) -> Iterator[Requirement]:
        """Yield the requirements for several processes that connect like torchrun's."""
        asked, found = f"the system `{self.name}`", f"a rung of {ranks} ranks"
        yield Requirement(ranks == 1, f"{asked} trains on one GPU", found, "set `ranks: 1` in the rung")

    def check(self, config: Config, device: Device, ranks: int = 1) -> None:
        """Raise NeedsError if the system cannot train the run on this machine."""
        for need in (*self.needs(config, device), *self.needs_ranks(config, ranks)):
            if not need.met:
                raise NeedsError(need.asked, need.found, need.do)


def find_peers(near: Path) -> dict[str, type[Peer]]:
    """Return the installed systems by name, else those of the folder `peers` in `near` or in a checkout's benchmarks.

    Args:
        near: folder of the ladder file.
    """
    provided = []
    for entry in entry_points(group=GROUP):
        try:
            provided.append(entry.load())
        except (Exception, SystemExit) as error:  # foreign code can raise anything
            found = f"{type(error).__name__}: {one_line(str(error))}"
            do = "uninstall that package, or report it to its authors"
            raise ConfigError(f"the systems `{entry.value}` of the entry point {GROUP}", found, do) from None
    for folder in (near / "peers", CHECKOUT / "peers"):
        if not provided and (folder / "optrush_peers").is_dir():
            sys.path.append(str(folder))
            provided = [importlib.import_module("optrush_peers").PEERS]
    return {peer.name: peer for peers in provided for peer in peers}


def build_peer(name: str, options: Mapping[str, Any], known: Mapping[str, type[Peer]]) -> Peer:
    """Build a system from its options.

    Raises:
        ConfigError: an unknown system or option, or a value of the wrong type.
    """
    if not known:
        missing = f"no package with the entry point `{GROUP}`, and no folder {CHECKOUT / 'peers'}"
        do = "python -m pip install ./benchmarks/peers in a checkout of optrush"
        raise ConfigError(f"the system `{name}`", missing, do)
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
        raise ConfigError(f"`{name}: {where}`", f"{first['input']!r}", accepted([first])) from None


def worker_path(peer: Peer) -> str:
    """Return the folder of the worker's module for PYTHONPATH: a checkout does not install it."""
    package = sys.modules[type(peer).__module__.partition(".")[0]]
    return str(Path(str(package.__file__)).parents[1])


def training_facts(count: int, weights: Iterable[Any], states: Iterable[Any]) -> dict[str, str]:
    """Return the facts that two systems must share, as text; under UNCOMPARED the dtypes of very few values.

    Args:
        count: number of trained values.
        states: tensors of the optimizer, including scales of quantized states; single values (step counts) are skipped.
    """
    facts, rare = {"trained parameters": f"{count:,}"}, list[str]()
    for name, tensors in (("weights", weights), ("optimizer states", states)):
        values = Counter[str]()
        for t in tensors:
            if getattr(t, "ndim", 0) > 0:
                values[str(t.dtype).removeprefix("torch.")] += t.numel()
        common = {dtype for dtype, n in values.items() if n >= RARE_SHARE * values.total()}
        facts[name] = ", ".join(sorted(common))
        rare += [f"{n:,} {dtype} {name}" for dtype, n in sorted(values.items()) if dtype not in common]
    return {**facts, **({UNCOMPARED: ", ".join(rare)} if rare else {})}
