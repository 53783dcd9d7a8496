"""What this machine has and which techniques it can run: the facts of `optrush doctor`. Pure: never asks torch.

A technique is asked by its own `needs`, as a run would ask it; who acts in the compile stage also needs compilers.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import platform
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from optrush import hardware
from optrush.hardware import Device
from optrush.technique import COMPILERS, Need, Part, Setup, Technique, compilers, installed, library, missing
from optrush.techniques import ALL

REQUIRED = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic")
BESIDE = ("triton",)  # comes with torch where there is a GPU build of it


@dataclass(frozen=True)
class Processor:
    """The host: what the system says, and what a container leaves of it."""

    model: str
    cores: int  # that this process may use
    memory_bytes: int | None
    limit_bytes: int | None  # of a container; None: no limit below the memory


@dataclass(frozen=True)
class Standing:
    """How a technique stands here: `ok`, `ok` with several ranks, or `lacks` with what mends it."""

    name: str
    summary: str
    runs: bool
    several: bool  # it needs more than one rank
    lacks: tuple[Need, ...]
    options: tuple[tuple[str, tuple[Need, ...]], ...]  # of its options' other values: `impl=varlen`, and what it lacks


@dataclass(frozen=True)
class Machine:
    """Everything that `optrush doctor` shows."""

    devices: tuple[Device, ...]
    driver: str | None  # the newest CUDA that the driver runs
    processor: Processor
    folder: str
    free_bytes: int
    python: str
    packages: dict[str, str | None]
    compiler: str | None
    problems: tuple[Need, ...]
    techniques: tuple[Standing, ...]


def examine(classes: Sequence[type[Technique]] = ALL) -> Machine:
    """Looks at this machine."""
    devices = hardware.probe()
    packages = {name: library(name) for name in REQUIRED + BESIDE}
    folder = Path.cwd()
    return Machine(
        devices=tuple(devices),
        driver=_driver(),
        processor=_processor(),
        folder=str(folder),
        free_bytes=shutil.disk_usage(folder).free,
        python=platform.python_version(),
        packages=packages,
        compiler=installed(os.environ.get("CXX"), *COMPILERS),
        problems=tuple(problems(devices, packages)),
        techniques=tuple(standing(c, devices) for c in classes),
    )


def problems(devices: Sequence[Device], packages: dict[str, str | None]) -> Iterator[Need]:
    """What no technique needs in particular, and every run does."""
    for name in REQUIRED:
        if packages[name] is None:
            yield Need(False, f"the package {name}", "not installed", f"python -m pip install {name}")
    torch = packages["torch"]
    if devices and torch is not None and "+cpu" in torch:
        yield Need(
            False, f"torch on {devices[0].name}", f"torch {torch}, built without CUDA",
            "python -m pip uninstall torch, then install the build for CUDA: https://pytorch.org/get-started/locally",
        )  # fmt: skip
    if len({d.name for d in devices}) > 1:
        found = ", ".join(d.name for d in devices)
        yield Need(False, "devices of one kind", found, "choose with CUDA_VISIBLE_DEVICES")


def standing(cls: type[Technique], devices: Sequence[Device]) -> Standing:
    """Whether a technique can run here, with its defaults and with each other choice of its options."""
    device = devices[0] if devices else hardware.cpu()
    most = len(devices) or 2  # processes share a CPU, but not a GPU
    plain = cls(**cls.sample)
    lacks = lacking(plain, device, 1)
    several = bool(lacks) and most > 1 and not lacking(plain, device, most)
    options = []
    for name, value in choices(cls):
        other: Any = dataclasses.replace(plain, **{name: value})  # type: ignore[type-var]
        options.append((f"{name}={value}", tuple(lacking(other, device, most if several else 1))))
    return Standing(
        name=cls.name, summary=cls.summary, runs=several or not lacks, several=several, lacks=tuple(lacks),
        options=tuple(options),
    )  # fmt: skip


def choices(cls: type[Technique]) -> Iterator[tuple[str, Any]]:
    """(option, value) for every value but the default of the options that are a choice among names."""
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if get_origin(hints[field.name]) is Literal:
            yield from ((field.name, v) for v in get_args(hints[field.name]) if v != field.default)


def lacking(technique: Technique, device: Device, ranks: int) -> list[Need]:
    """What a technique lacks on a device, whatever else is in the run: the fewest unmet over the owners of parts."""
    # An ordinary run, and one of whole steps without clipping: what a technique asks of the model (blocks, dtype,
    # positions) or of the step is met, what it asks of the machine is what is left.
    plain = Setup(
        device=device, ranks=ranks, seq=2048, rows=8 * ranks, micro_rows=1, clip=1.0, dtype="float32", native=True,
        blocks=16,
    )  # fmt: skip
    owners = [frozenset[Part](), *(frozenset({p}) for p in Part), frozenset(Part)]
    runs = (plain, dataclasses.replace(plain, micro_rows=8, clip=None))
    setups = [dataclasses.replace(run, owned=owned | technique.claims) for run in runs for owned in owners]
    unmet = min(([n for n in technique.needs(s) if not n.met] for s in setups), key=len)
    unmet += missing(technique)
    if type(technique).compile is not Technique.compile:
        unmet += [n for n in compilers(device) if not n.met]
    return unmet


def _driver() -> str | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _processor() -> Processor:
    info = _text("/proc/cpuinfo")
    name = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    memory = hardware.cpu().memory_bytes
    limit = _text("/sys/fs/cgroup/memory.max").strip()
    limited = int(limit) if limit.isdigit() and (memory is None or int(limit) < memory) else None
    return Processor(name[1] if name else platform.machine(), len(os.sched_getaffinity(0)), memory, limited)


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
