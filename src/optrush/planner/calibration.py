"""The calibration file: what `optrush calibrate` measured on a device, where it lies, whose it is. Pure.

One JSON file a device, version of torch and driver, in the `calibrations` folder of the user's cache. It names itself
what it was measured on, so a file that was measured elsewhere can be put there: then a plan for that device is based
on it. A file there that cannot be read is an error, whatever device it is of: nobody is told "calibrated" by chance.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import re
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from optrush import hardware
from optrush.errors import ConfigError
from optrush.hardware import Device

FORMAT: Final = 1
AGAIN = "delete it, and measure again: optrush calibrate"

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0)]
DType = Literal["float32", "bfloat16", "float16"]
_STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True)
class Product:
    """One matrix product of a linear: x (tokens, inputs), weight (outputs, inputs), y (tokens, outputs).

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
class Attention:
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


@dataclass(frozen=True, eq=False)  # by identity: a plan looks rates up by it, thousands of times
class Calibration:
    """Everything that was measured on one device, medians over the rounds."""

    __pydantic_config__ = _STRICT

    device: str  # as `called` names it
    torch: str
    driver: str | None  # None: a CPU
    date: str  # ISO 8601
    seconds: Rate  # that it was given
    threads: Count  # of the processor; on a GPU they only start operators
    float32: str  # torch's float32 matmul precision: "highest" is without TF32
    products: tuple[Product, ...]
    attention: tuple[Attention, ...]
    copy_bytes_s: Rate  # read and written in device memory
    to_device_bytes_s: Rate | None  # from pinned memory of the host; None on a CPU
    from_device_bytes_s: Rate | None
    launch_s: Rate  # the host's time to start one operator
    format: Literal[1] = FORMAT

    @property
    def source(self) -> str:
        """Where the rates come from, in a line."""
        driver = "" if self.driver is None else f", driver {self.driver}"
        return f"measured on {self.date[:10]} with torch {self.torch}{driver}"


_ADAPTER = TypeAdapter(Calibration)


def folder() -> Path:
    """Where calibrations lie: in `$OPTRUSH_CACHE`, or in the user's cache."""
    given = os.environ.get("OPTRUSH_CACHE")
    root = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "optrush"
    return root / "calibrations"


def path(c: Calibration) -> Path:
    """The file of a calibration; the next one of the same device, torch and driver replaces it."""
    key = (c.device, c.torch, c.driver or "")
    plain = re.sub(r"[^a-z0-9.]+", "-", " ".join(key).lower()).strip("-")
    return folder() / f"{plain[:80]}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:8]}.json"


def check(place: Path) -> None:
    """Makes the folder that a calibration will go to.

    Raises:
        ConfigError: it cannot be made, or nothing be written there.
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


def write(c: Calibration, file: Path) -> None:
    """Writes a calibration whole or not at all.

    Raises:
        ConfigError: it cannot be written there.
    """
    new = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        try:
            with new.open("w", encoding="utf-8") as opened:
                opened.write(json.dumps(asdict(c), indent=1, allow_nan=False) + "\n")
                opened.flush()
                os.fsync(opened.fileno())
            new.replace(file)
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritten(file, error) from None


def read(file: Path) -> Calibration:
    """A calibration from its file.

    Raises:
        ConfigError: it cannot be read, is of another format, or is none.
    """
    asked = f"the calibration {file}"
    try:
        text = file.read_bytes()
        said = json.loads(text)
    except OSError as error:
        raise ConfigError(asked, f"cannot be read: {error.strerror}", AGAIN) from None
    except (ValueError, RecursionError):
        raise ConfigError(asked, "damaged: not JSON", AGAIN) from None
    version = said.get("format") if isinstance(said, dict) else None
    if not isinstance(said, dict) or "launch_s" not in said:
        raise ConfigError(asked, "no calibration: another program's file", AGAIN)
    if version != FORMAT:
        raise ConfigError(asked, f"format {version!r}, where this version of optrush reads {FORMAT}", AGAIN)
    try:
        found = _ADAPTER.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(asked, f"damaged: `{where}`: {first['msg']}", AGAIN) from None
    for kind, held in (("products", found.products), ("attention", found.attention)):
        if {m.dtype == "float32" for m in held} != {True, False}:
            raise ConfigError(asked, f"damaged: `{kind}` lacks a type: float32, or one that is narrower", AGAIN)
    return found


def find(device: Device) -> Calibration | None:
    """The calibration of a device: that of this torch and this driver, else the newest; None: it has none.

    Raises:
        ConfigError: a file among the calibrations cannot be read.
    """
    files = sorted(folder().glob("*.json"))
    name = called(device) if files else ""
    held = [c for c in map(read, files) if c.device == name]
    return max(held, key=lambda c: (_is_here(c), c.date), default=None)


def stale(c: Calibration) -> str:
    """What is different now on the machine that it was measured on; empty: nothing, or the device is elsewhere."""
    if c.driver is not None and c.device not in {d.name for d in hardware.probe()}:
        return ""
    now = {"torch": (c.torch, torch_version()), "driver": (c.driver, None if c.driver is None else driver())}
    return ", ".join(f"{what} is {here} now" for what, (then, here) in now.items() if then != here)


def _is_here(c: Calibration) -> bool:
    return c.torch == torch_version() and c.driver == (None if c.driver is None else driver())


def called(device: Device) -> str:
    """A device's name in its calibration: the driver's for a GPU; for a CPU its model and the cores of this process."""
    return device.name if device.kind == "cuda" else _processor()


@cache
def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    cores = len(os.sched_getaffinity(0))
    return f"{name[1].strip() if name else platform.machine()}, {cores} core{'s' * (cores != 1)}"


def torch_version() -> str:
    """Of the torch that is installed, without importing it."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "not installed"


@cache
def driver() -> str:
    """The version of NVIDIA's driver, as its kernel module says."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text)
    return found[1] if found else "unknown"
