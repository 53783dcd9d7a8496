"""A record: what one rung of a ladder did, as one line of DIR/records.jsonl. Reports read nothing else. Pure.

A bench folder holds records.jsonl (rewritten whole after each process, so that a stopped climb leaves what it has),
rungs/*.json (what each process said, a file a rung and repeat), report.html and the charts.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import optrush
from optrush.errors import DataError
from optrush.files import write_whole
from optrush.technique import digest, library

RECORDS, RUNGS = "records.jsonl", "rungs"
Verdict = Literal["baseline", "faster", "slower", "smaller", "longer", "shorter", "noise", "red"]


@dataclass(frozen=True)
class Record:
    """Figures of a rung over all its repeats; where `error` is set there are none."""

    ladder: str
    rung: str
    case: str  # what the load is called: "1b-full-2048"; where nobody named it, "llama-3.2-1b, random tokens"
    mode: Literal["cumulative", "without"]  # "without": all of the last rung's techniques but one
    since: str | None  # the rung this one is compared with; None for the first
    changes: str  # what differs from `since`, for people
    device: str
    ranks: int
    seq: int  # T
    micro_tokens: int  # slots of a micro-batch
    verdict: Verdict
    red: list[str]  # reasons; empty if there are none
    config: dict[str, Any]  # the resolved run
    environment: dict[str, str]
    source: dict[str, Any]  # commit, clean, digest
    command: str
    date: str
    tokens_per_s: float | None = None  # median over all timed steps of all repeats
    tokens_per_s_iqr: list[float] | None = None  # first and third quartile
    repeats: list[float] = field(default_factory=list)  # the median of each repeat, in order
    step_s: list[list[float]] = field(default_factory=list)  # every timed step of every repeat
    peak_bytes: int | None = None  # the most over the repeats
    memory_kind: str | None = None  # cuda_allocated, rss
    predicted_peak_bytes: int | None = None
    predicted_tokens_per_s: float | None = None
    basis: str | None = None  # datasheet, calibrated
    ceiling_s: dict[str, float] = field(default_factory=dict)  # a step's seconds by part at the ceiling; computed
    parts_s: dict[str, float] = field(default_factory=dict)  # a step's seconds by part, and gaps, under the profiler
    parts_note: str | None = None  # why there are none
    mfu: float | None = None
    targets_per_s: float | None = None  # tokens that are learnt, median over the repeats
    fill: float | None = None  # real tokens / slots computed, over the timed steps
    data_wait: float | None = None  # share of a step that waited for data, median over the repeats
    losses: list[float | None] = field(default_factory=list)  # of the proof's steps; None: not finite
    grad_norms: list[float | None] = field(default_factory=list)
    proof: dict[str, Any] | None = None  # against, numerics, of, tolerance, worst, ok, cosine
    seen: dict[str, str] = field(default_factory=dict)  # what was trained: parameters, dtypes of weights and states
    host_peak_bytes: int | None = None  # resident set of the process, the most over the repeats
    longest_seq: int | None = None  # the longest row that trained; the figures are of it
    tries: list[dict[str, Any]] = field(default_factory=list)  # seq, error, peak_bytes, host_peak_bytes, seconds
    peer: str | None = None  # the name of another system
    error: str | None = None  # why the rung has no figure

    @classmethod
    def from_json(cls, line: str) -> Self:
        """A record from its line; keys that this version does not know are refused."""
        return cls(**json.loads(line))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), allow_nan=False)


def read(folder: Path) -> list[Record]:
    """The records of a bench folder, in the ladder's order.

    Raises:
        DataError: no records there, or a line that is none.
    """
    path = folder / RECORDS
    if not path.is_file():
        raise DataError(f"the records of {folder}", f"no {RECORDS}", "name a folder that `optrush bench` has written")
    found = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            found.append(Record.from_json(line))
        except (ValueError, TypeError) as error:
            raise DataError(f"{path}:{number}", f"no record: {error}", "climb again into another folder") from None
    return found


def write(folder: Path, records: Iterable[Record]) -> None:
    """All records of a folder, whole or not at all."""
    put(folder / RECORDS, "".join(r.to_json() + "\n" for r in records))


def put(path: Path, text: str) -> None:
    """Writes a small file whole or not at all: a killed climb leaves the old one or the new one."""
    write_whole(path, text)


# --- What a figure was made with: the machine, the versions, and the very code. Pure: asks no library to load itself.


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
