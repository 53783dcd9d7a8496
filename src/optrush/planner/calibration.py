"""Store and find the rates that `optrush calibrate` measured on a device. Pure.

One JSON file for each device, version of torch and driver, in the `calibrations` folder of the user's cache. The file
contains the name of its device, so that a file measured on another machine can be put there and plans for that device
use it. A file that cannot be read is an error, whatever its device: a plan never falls back to a datasheet silently.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import statistics
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from optrush import hardware
from optrush.errors import ConfigError
from optrush.files import parse_json, read_file, write_whole
from optrush.hardware import Device

FORMAT: Final = 1
AGAIN = "delete it, and measure again: optrush calibrate"

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0)]
DType = Literal["float32", "bfloat16", "float16"]
_STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True)
class ProductRate:
    """One matmul of a linear: x (tokens, inputs), weight (outputs, inputs), y (tokens, outputs).

    forward: y = x weight^T; input: the gradient of x; weight: the gradient of the weight. 2 tokens inputs outputs FLOPs
    each.
    """

    __pydantic_config__ = _STRICT

    part: str  # which linear of a model has this shape
    direction: Literal["forward", "input", "weight"]
    dtype: DType
    tokens: Count
    inputs: Count
    outputs: Count
    flop_s: Rate
    spread: Annotated[float, Field(ge=0)]  # (most - least) / median over the rounds


@dataclass(frozen=True)
class AttentionRate:
    """Causal attention over `rows` documents of `seq` tokens; FLOPs of the half before the diagonal only.

    2 rows seq^2 heads head_width forward, twice that backward.
    """

    __pydantic_config__ = _STRICT

    direction: Literal["forward", "backward"]
    dtype: DType
    rows: Count
    seq: Count
    heads: Count
    kv_heads: Count
    head_width: Count
    flop_s: Rate
    spread: Annotated[float, Field(ge=0)]


@dataclass(frozen=True)
class LinkRate:
    """One collective between the ranks of this machine, in bytes/s over each rank's link in one direction.

    With n ranks and s bytes in total, 2 s (n - 1) / n bytes for an all-reduce, s (n - 1) / n for the others.
    """

    __pydantic_config__ = _STRICT

    operation: Literal["all-reduce", "all-gather", "reduce-scatter"]
    ranks: Annotated[int, Field(ge=2)]
    bytes: Count  # in total
    bytes_s: Rate
    latency_s: Rate  # for a few bytes
    spread: Annotated[float, Field(ge=0)]


@dataclass(frozen=True, eq=False)  # by identity: a plan looks rates up by it, thousands of times
class Calibration:
    """The rates measured on one device, medians over the rounds."""

    __pydantic_config__ = _STRICT

    device: str  # from `device_name`
    torch: str
    driver: str | None  # None: a CPU
    date: str  # ISO 8601
    seconds: Rate  # time limit of the measurement
    threads: Count  # CPU threads; on a GPU they only start operators
    float32: str  # torch's float32 matmul precision: "highest" is without TF32
    products: tuple[ProductRate, ...]
    attention: tuple[AttentionRate, ...]
    copy_bytes_s: Rate  # read and written in device memory
    to_device_bytes_s: Rate | None  # from pinned memory of the host; None on a CPU
    from_device_bytes_s: Rate | None
    launch_s: Rate  # the host's time to start one operator
    links: tuple[LinkRate, ...] = ()  # for the number of ranks measured last
    format: Literal[1] = FORMAT

    @property
    def source(self) -> str:
        """A sentence on the source of the rates."""
        driver = "" if self.driver is None else f", driver {self.driver}"
        links = f", links of {self.links[0].ranks} ranks" if self.links else ""
        return f"measured on {self.date[:10]} with torch {self.torch}{driver}{links}"

    @property
    def link_bytes_s(self) -> float | None:
        """The rate of equal bytes of each collective in sequence; None: not measured."""
        return statistics.harmonic_mean([link.bytes_s for link in self.links]) if self.links else None


_ADAPTER = TypeAdapter(Calibration)


def folder() -> Path:
    """Return the folder of calibrations: in `$OPTRUSH_CACHE`, or in the user's cache."""
    cache = os.environ.get("OPTRUSH_CACHE")
    root = Path(cache) if cache else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "optrush"
    return root / "calibrations"


def path(c: Calibration) -> Path:
    """Return the file of a calibration, the same for all of one device, torch and driver."""
    key = (c.device, c.torch, c.driver or "")
    plain = re.sub(r"[^a-z0-9.]+", "-", " ".join(key).lower()).strip("-")
    return folder() / f"{plain[:80]}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:8]}.json"


def check_writable(place: Path) -> None:
    """Create a folder for calibrations.

    Raises:
        ConfigError: it cannot be created, or is not writable.
    """
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritten(place, error) from None
    if not os.access(place, os.W_OK | os.X_OK):
        raise _unwritten(place, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


def _unwritten(place: Path, error: OSError) -> ConfigError:
    do = "give a path that can be written ($OPTRUSH_CACHE is where calibrations are kept)"
    return ConfigError(f"to write the calibration {place}", f"{error.strerror}", do)


def write_calibration(c: Calibration, file: Path) -> None:
    """Write a calibration atomically.

    Raises:
        ConfigError: it cannot be written.
    """
    text = json.dumps(asdict(c), indent=1, allow_nan=False) + "\n"
    try:
        write_whole(file, text, file.with_name(f"{file.name}.{os.getpid()}.tmp"))
    except OSError as error:
        raise _unwritten(file, error) from None


def read_calibration(file: Path) -> Calibration:
    """Read a calibration from its file.

    Raises:
        ConfigError: it cannot be read, is of another format, or is not a calibration.
    """
    asked = f"the calibration {file}"
    try:
        text = read_file(file)
        tree = parse_json(text)
    except OSError as error:
        raise ConfigError(asked, f"cannot be read: {error.strerror}", AGAIN) from None
    except (ValueError, RecursionError):
        raise ConfigError(asked, "damaged: not JSON", AGAIN) from None
    if not isinstance(tree, dict) or "launch_s" not in tree:
        raise ConfigError(asked, "no calibration: another program's file", AGAIN)
    if tree.get("format") != FORMAT:
        raise ConfigError(asked, f"format {tree.get('format')!r}, where this version of optrush reads {FORMAT}", AGAIN)
    try:
        calibration = _ADAPTER.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(asked, f"damaged: `{where}`: {first['msg']}", AGAIN) from None
    for kind, measured in (("products", calibration.products), ("attention", calibration.attention)):
        if {m.dtype == "float32" for m in measured} != {True, False}:
            raise ConfigError(asked, f"damaged: `{kind}` lacks a type: float32, or one that is narrower", AGAIN)
    return calibration


def for_device(device: Device) -> Calibration | None:
    """Return a device's calibration for this torch and driver, else its newest; None: there is no calibration.

    Raises:
        ConfigError: a file among the calibrations cannot be read.
    """
    files = sorted(folder().glob("*.json"))
    name = device_name(device) if files else ""
    matching = [c for c in map(read_calibration, files) if c.device == name]
    return max(matching, key=lambda c: (_is_here(c), c.date), default=None)


def stale(c: Calibration) -> str:
    """Return the changes on this machine since the measurement; empty: none, or the device is not here."""
    if c.driver is not None and c.device not in {d.name for d in hardware.probe()}:
        return ""
    now = {"torch": (c.torch, torch_version()), "driver": (c.driver, None if c.driver is None else driver())}
    return ", ".join(f"{what} is {here} now" for what, (then, here) in now.items() if then != here)


def _is_here(c: Calibration) -> bool:
    return c.torch == torch_version() and c.driver == (None if c.driver is None else driver())


def device_name(device: Device) -> str:
    """Return a device's name in its calibration: the driver's for a GPU; for a CPU its model and the usable cores."""
    if device.kind == "cuda":
        return device.name
    model, cores = hardware.processor()
    return f"{model}, {cores} core{'s' * (cores != 1)}"


def torch_version() -> str:
    """Return the version of the installed torch, without importing it."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "not installed"


@cache
def driver() -> str:
    """Return the version of NVIDIA's driver, from its kernel module."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    version = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text)
    return version[1] if version else "unknown"
