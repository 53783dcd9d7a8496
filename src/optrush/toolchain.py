"""What compiles code on this machine: asked in a stage, not among `needs`, for a plan may suppose another machine."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import optrush
from optrush.errors import NeedsError
from optrush.hardware import Device
from optrush.technique import Need, library

COMPILERS = ("g++", "clang++", "c++")
CC = ("gcc", "clang", "cc")
TRITON = (7, 0)  # the least capability that torch compiles for


def digest() -> str:
    """16 hexadecimal digits of all files of this package: what was measured or compiled with other code has others."""
    found = hashlib.sha256()
    for path in sorted(Path(optrush.__file__).parent.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def demand_triton(technique: str, device: Device) -> None:
    """For a stage: refuses a CUDA device for which this machine cannot build our Triton kernels; a CPU needs none.

    Raises:
        NeedsError: what is missing.
    """
    asked = f"`{technique}` runs a Triton kernel"
    if device.kind == "cuda" and library("triton") is None:
        raise NeedsError(asked, "triton is not installed", "python -m pip install triton")
    if device.kind == "cuda" and installed(os.environ.get("CC"), *CC) is None:
        raise NeedsError(asked, f"no C compiler: none of {', '.join(CC)}", "install gcc")


def compilers(device: Device) -> Iterator[Need]:
    """What torch.compile calls."""
    asked = f"torch.compile on {device.name if device.kind == 'cuda' else 'a CPU'}"
    if device.kind == "cuda":
        found = f"capability {device.capability[0]}.{device.capability[1]}"
        yield Need(device.capability >= TRITON, f"{asked}, from capability 7.0 on", found, "leave it out")
        yield Need(library("triton") is not None, asked, "triton is not installed", "python -m pip install triton")
        c = installed(os.environ.get("CC"), *CC)
        yield Need(c is not None, f"{asked} needs a C compiler", f"none of {', '.join(CC)}", "install gcc")
        return
    wanted = os.environ.get("CXX", COMPILERS[0])  # what torch calls; it looks for no other
    other = installed(*COMPILERS)
    do = f"export CXX={other}" if other else "install g++ (Debian and Ubuntu: apt-get install g++)"
    yield Need(installed(wanted) is not None, f"{asked} needs a C++ compiler", f"no {wanted} on the PATH", do)


def installed(*names: str | None) -> str | None:
    """The path of the first of these programs that is there."""
    return next((path for name in names if name and (path := shutil.which(name))), None)
