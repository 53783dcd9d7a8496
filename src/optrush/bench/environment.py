"""What a figure was made with: the machine, the versions, and the very code. Pure: asks no library to load itself."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import optrush
from optrush.technique import digest, library

PATIENCE_S = 10.0  # for git and nvidia-smi: a slow disk or driver must not hold up a climb


def machine() -> dict[str, str]:
    """Versions, processor, and the GPU as its driver describes it; what cannot be found out is left out."""
    found = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _processor(),
        "threads": os.environ.get("OMP_NUM_THREADS") or str(os.cpu_count()),
        "optrush": optrush.__version__,
        **{name: library(name) for name in ("torch", "transformers", "triton")},
    }
    wanted = ("driver_version", "clocks.max.sm", "clocks.max.mem", "clocks.applications.graphics", "power.limit")
    said = _ask("nvidia-smi", f"--query-gpu={','.join(wanted)}", "--format=csv,noheader")
    for name, value in zip(wanted, (said or "").partition("\n")[0].split(",")):
        shown = "driver" if name == "driver_version" else f"gpu {name}"
        found[shown] = value.strip()
    return {name: value for name, value in found.items() if value and not value.startswith("[")}


def source() -> dict[str, Any]:
    """The package that runs: a digest of its files, and the commit, where it lies in a checkout of its own."""
    found: dict[str, Any] = {"commit": None, "clean": None, "digest": digest()}
    git = ("git", "-C", str(Path(optrush.__file__).parent))
    if _ask(*git, "ls-files", "--error-unmatch", "__init__.py") is not None:
        found["commit"] = _ask(*git, "rev-parse", "HEAD")
        status = _ask(*git, "status", "--porcelain")
        found["clean"] = None if status is None else not status
    return found


def _processor() -> str:
    """The processor's name as the kernel gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} threads" if names else platform.machine()


def _ask(*command: str) -> str | None:
    """What a program says, or None where it is not there, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
