"""Define the record of a rung, one line of DIR/records.jsonl, and the facts about machine and code in it. Pure.

A bench folder holds records.jsonl (rewritten after each process, so that an interrupted bench keeps its measurements),
rungs/*.json (the result of each process, one file per rung and repeat), report.html and the charts. Reports read only
the records.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import optrush
from optrush.errors import DataError, RunError, UserError, exhausted
from optrush.files import read_text, write_whole
from optrush.launch import die_with_parent, launched
from optrush.technique import library, package_digest

RECORDS, RUNGS = "records.jsonl", "rungs"
COMMAND_TIMEOUT_S = 10.0  # for git and nvidia-smi: a slow disk or driver must not delay a bench
Verdict = Literal["baseline", "faster", "slower", "smaller", "longer", "shorter", "noise", "red"]
QualityVerdict = Literal["first", "better", "equal", "worse", "one seed", "failed"]
Keep = Callable[[dict[str, Any]], None]
R = TypeVar("R")


@dataclass(frozen=True)
class Record:
    """Figures of a rung over all its repeats; no figures if `error` is set."""

    ladder: str
    rung: str
    case: str  # name of the load: "1b-full-2048"; without a name "llama-3.2-1b, random tokens"
    mode: Literal["cumulative", "without"]  # "without": the last rung's techniques except one
    since: str | None  # the reference rung; None for the first
    changes: str  # differences from `since`, as text
    device: str
    ranks: int
    seq: int  # T
    micro_tokens: int  # slots per micro-batch
    verdict: Verdict
    red: list[str]  # reasons; may be empty
    config: dict[str, Any]  # the resolved run
    environment: dict[str, str]
    source: dict[str, Any]  # commit, clean, digest
    command: str
    date: str
    tokens_per_s: float | None = None  # median over all timed steps of all repeats
    tokens_per_s_iqr: list[float] | None = None  # first and third quartile
    repeats: list[float] = field(default_factory=list)  # the median of each repeat, in order
    step_s: list[list[float]] = field(default_factory=list)  # every timed step of every repeat
    peak_bytes: int | None = None  # maximum over the repeats
    memory_kind: str | None = None  # cuda_allocated, rss
    predicted_peak_bytes: int | None = None
    predicted_tokens_per_s: float | None = None
    basis: str | None = None  # datasheet, calibrated
    ceiling_s: dict[str, float] = field(default_factory=dict)  # seconds per step by part at the ceiling; computed
    parts_s: dict[str, float] = field(default_factory=dict)  # seconds per step by part, and gaps, under the profiler
    parts_note: str | None = None  # why `parts_s` is empty
    mfu: float | None = None
    targets_per_s: float | None = None  # target tokens, median over the repeats
    fill: float | None = None  # real tokens / slots computed, over the timed steps
    data_wait: float | None = None  # fraction of a step spent waiting for data, median over the repeats
    losses: list[float | None] = field(default_factory=list)  # of the proof's steps; None: not finite
    grad_norms: list[float | None] = field(default_factory=list)
    proof: dict[str, Any] | None = None  # against, numerics, of, tolerance, worst, ok, cosine
    seen: dict[str, str] = field(default_factory=dict)  # facts: parameters, dtypes of weights and states
    host_peak_bytes: int | None = None  # resident set of the process, maximum over the repeats
    longest_seq: int | None = None  # the longest row that trained, with these figures
    tries: list[dict[str, Any]] = field(default_factory=list)  # seq, error, peak_bytes, host_peak_bytes, seconds
    peer: str | None = None  # the name of another system
    error: str | None = None  # why the rung has no figures

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Parse a record; unknown keys raise TypeError."""
        return cls(**json.loads(line))

    def to_json(self) -> str:
        """Return the record as one line of JSON."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False)


@dataclass(frozen=True)
class QualityRecord:
    """Figures of a rung of whole runs, in lists with an entry per seed; no figures if `error` is set."""

    ladder: str
    rung: str
    case: str
    since: str | None  # the reference rung; None for the first
    changes: str
    device: str
    ranks: int
    seq: int
    verdict: QualityVerdict
    config: dict[str, Any]  # the run of the first seed
    environment: dict[str, str]
    source: dict[str, Any]
    command: str
    date: str
    predicted_tokens_per_s: float | None
    predicted_peak_bytes: int | None
    seeds: list[int] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)  # loss after the last step
    evals: list[list[list[float]]] = field(default_factory=list)  # [step, held-out loss] of every evaluation
    eval_targets: list[int] = field(default_factory=list)  # held-out target tokens
    loss: float | None = None  # mean of `held_out`
    difference: float | None = None  # `loss` minus that of `since`
    spread: float | None = None  # standard error of `difference`; None with one seed
    margin: float | None = None  # a larger difference is better or worse
    scores: list[float] = field(default_factory=list)  # percent of correct answers
    score: float | None = None  # mean of `scores`; then its difference, spread and margin
    score_difference: float | None = None
    score_spread: float | None = None
    score_margin: float | None = None
    samples: int | None = None  # answers per score
    tokens_per_s: float | None = None  # these three: medians over the seeds with their own GPU
    start_s: float | None = None  # from the command to the held-out loss before step 1
    seconds: float | None = None  # from the command to the end of the run
    peak_bytes: int | None = None
    memory_kind: str | None = None
    error: str | None = None

    def to_json(self) -> str:
        """Return the record as one line of JSON."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False)


def is_quality(folder: Path) -> bool:
    """Return whether a bench folder has the records of whole runs."""
    with (folder / RECORDS).open("rb") as file:
        return b'"held_out"' in file.readline()


def read_quality(folder: Path) -> list[QualityRecord]:
    """Read the records of whole runs; see `read_records`."""
    return _read(folder, lambda line: QualityRecord(**json.loads(line)))


def read_records(folder: Path) -> list[Record]:
    """Read the records of a bench folder, in the ladder's order.

    Raises:
        DataError: there is no records.jsonl, or a line is not a record.
    """
    return _read(folder, Record.from_json)


def _read(folder: Path, parse: Callable[[str], R]) -> list[R]:
    path = folder / RECORDS
    if not path.is_file():
        raise DataError(f"the records of {folder}", f"no {RECORDS}", "name a folder written by `optrush bench`")
    records = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        try:
            records.append(parse(line))
        except (ValueError, TypeError) as error:
            raise DataError(f"{path}:{number}", f"not a record: {error}", "run the ladder with another --out") from None
    return records


def write_records(folder: Path, records: Iterable[Record | QualityRecord]) -> None:
    """Write all records of a folder, atomically."""
    write_whole(folder / RECORDS, "".join(r.to_json() + "\n" for r in records))


def answer_request(measure: Callable[[dict[str, Any], Keep], dict[str, Any]]) -> None:
    """Run the process of one rung, `... REQUEST.json RESULT.json`, and exit with 0 if the result has figures.

    Args:
        measure: (request, keep) -> result; `keep` stores a result early, for a process that can be killed later.
    """
    request = json.loads(read_text(Path(sys.argv[1])))
    die_with_parent(request["parent"])
    start = time.monotonic()

    def keep(result: dict[str, Any]) -> None:
        result = {**result, "seconds": time.monotonic() - start}
        write_whole(Path(sys.argv[2]), json.dumps(result, allow_nan=False))

    try:
        result = measure(request, keep)
    except UserError as error:
        result = {"error": str(error), "refused": [error.asked, error.found, error.do]}
    except RunError as error:
        result = {"error": str(error)}
    except Exception as error:  # a rung can fail in any way; the ladder continues
        result = {"error": describe_error(error), "traceback": traceback.format_exc()}
    rank, ranks = launched()
    if rank == 0 or "error" in result:  # rank 0 has the figures
        keep(result)
    if ranks > 1:  # threads of the group's library can still run, and kill an exiting process by a signal
        sys.stderr.flush()
        os._exit("error" in result)
    sys.exit("error" in result)


def describe_error(error: Exception) -> str:
    """Return an unexpected error in one line, with its source location."""
    text = next(iter(str(error).splitlines()), "")
    if exhausted(error):
        return f"out of memory: {text or type(error).__name__}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text} ({Path(last.filename).name}:{last.lineno})"


def machine() -> dict[str, str]:
    """Return versions, the processor, and the GPU by its driver; without unknown facts."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    cpus = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    facts = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": f"{cpus[0]}, {len(cpus)} threads" if cpus else platform.machine(),
        "threads": os.environ.get("OMP_NUM_THREADS") or str(os.cpu_count()),
        "optrush": optrush.__version__,
        **{name: library(name) for name in ("torch", "transformers", "triton")},
    }
    fields = ("driver_version", "clocks.max.sm", "clocks.max.mem", "clocks.applications.graphics", "power.limit")
    output = _output_of("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    for name, value in zip(fields, (output or "").partition("\n")[0].split(",")):
        facts["driver" if name == "driver_version" else f"gpu {name}"] = value.strip()
    return {name: value for name, value in facts.items() if value and not value.startswith("[")}


def source() -> dict[str, Any]:
    """Return a digest of the running package's files, and the commit in a git checkout."""
    facts: dict[str, Any] = {"commit": None, "clean": None, "digest": package_digest()}
    git = ("git", "-C", str(Path(optrush.__file__).parent))
    if _output_of(*git, "ls-files", "--error-unmatch", "__init__.py") is not None:
        facts["commit"] = _output_of(*git, "rev-parse", "HEAD")
        status = _output_of(*git, "status", "--porcelain")
        facts["clean"] = None if status is None else not status
    return facts


def _output_of(*command: str) -> str | None:
    """Return a command's output; None if it is missing, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
