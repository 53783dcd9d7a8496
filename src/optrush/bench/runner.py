"""A climb: every rung of a ladder in fresh processes, repeats interleaved, and a record of each, come what may.

resolve and check all rungs -> a process a rung and repeat (A B C A B C) -> rungs/NAME.json, what it said ->
records.jsonl, made anew from those after each process -> report.html.

What a climb has learnt lies in rungs/ alone: a climb that goes on reads it back, and asks for what is missing.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from optrush import hardware
from optrush.bench import ladder, peer_worker, record
from optrush.bench.ladder import Ladder, Longest, Rung
from optrush.bench.record import RUNGS, Record, put
from optrush.bench.results import Climb, baseline, make
from optrush.config import Config, dump_config
from optrush.console import err
from optrush.errors import ConfigError, UserError
from optrush.planner import calibration
from optrush.resolve import resolve

# --- A fresh process for one rung, with a time limit, and why it ended where it left no answer. Pure.


STOPPED = 143  # the exit code of a climb that a signal stopped
COMMAND = [sys.executable, "-m", "optrush.bench.worker"]
PEER = [sys.executable, "-m", "optrush.bench.peer_worker"]  # for a request with a `peer`
QUIET = {"KINETO_LOG_LEVEL": "6"}  # what the profiler says of itself would be taken for a process' last words
TAIL = 5  # lines of standard error that an unexplained death is given


def run_worker(request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """What a fresh process says to a request. However it ends, there is a result: figures, or `error`."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="optrush-bench-") as name:
        asked, answered, said = (Path(name) / part for part in ("request.json", "result.json", "stderr"))
        asked.write_text(json.dumps({**request, "parent": os.getpid()}))
        command = [*(PEER if "peer" in request else COMMAND), str(asked), str(answered)]
        with said.open("wb") as stderr:
            process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True, env={**QUIET, **os.environ}
            )
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)  # with all that it started, a compiler's processes for example
        seconds = time.monotonic() - begun
        late = f"still running after {limit_s:g} s, and stopped (limit_s)"
        end = late if code is None else death(code, said.read_text("utf-8", "replace"))
        if not answered.exists():
            return {"error": end, "seconds": seconds}
        result: dict[str, Any] = {**json.loads(answered.read_text("utf-8")), "seconds": seconds}
        if "parts_note" in result and (code is None or code < 0):  # its other figures are whole
            result["parts_note"] = end
        return result


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and its group, whatever is left of it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def death(code: int, said: str) -> str:
    """Why a process left without an answer, as far as its exit code and its last words tell."""
    last = " | ".join([line for line in said.splitlines() if line.strip()][-TAIL:])
    if code >= 0:
        return f"it left without a result, exit code {code}: {last or 'and said nothing'}"
    name = signal.Signals(-code).name
    text = f"killed by signal {-code} ({name})"
    if -code == signal.SIGKILL:
        text += ", most likely out of memory: that is how the system ends the largest process; nothing else was seen"
    return text + (f": {last}" if last else "")


@contextmanager
def stopping() -> Iterator[None]:
    """SIGTERM and Ctrl-C stop a climb, its process with it: what is measured stays, and --resume goes on."""

    def stop(*_: object) -> None:
        raise SystemExit(STOPPED)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- The longest row that trains: lengths are tried one by one, each in a fresh process with one row a step. Pure.
#
# The rung is first measured and proved at the shortest length, as any rung is. Then lengths are tried without a proof,
# which at such lengths would take longer than the training: from the plan's prediction, next to it and ever farther, or
# doubling where there is none; up while they train, down where memory ends, until the shortest that failed is near the
# longest that trained. So where the plan is right two are enough.


GRAIN = 1024  # lengths are multiples of it, or of what the shortest is a multiple of
FARTHEST = 4.0  # from a length to the next
MEMORY = ("out of memory", "killed by signal 9")  # how a result says that memory ended, on the device or the host


def search(
    span: Longest, guess: int | None, first: dict[str, Any], attempt: Callable[[int], dict[str, Any]]
) -> dict[str, Any]:
    """The result of the longest row that trained, with the proof of the shortest, and what was tried.

    Args:
        guess: where to begin; None: nothing is predicted.
        first: the result at `span.from_`, with its proof.
        attempt: one process at a length.
    """
    best, reached, tries = first, span.from_, [_try(span.from_, first)]
    if "error" in first:
        return {**first, "tries": tries}
    asking, ended = lengths(span, guess), None
    seq = next(asking, None)
    while seq is not None and ended is None:
        result = attempt(seq)
        tries.append(_try(seq, result))
        trained = tries[-1]["error"] is None
        if trained:
            best, reached = result, seq
        elif not str(tries[-1]["error"]).startswith(MEMORY):
            ended = f"the search ended at rows of {seq:,} tokens: {tries[-1]['error']}"
        try:
            seq = asking.send(trained)
        except StopIteration:
            seq = None
    return {**best, "proof": first["proof"], "longest_seq": reached, "tries": tries, "ended": ended}


def lengths(span: Longest, guess: int | None) -> Generator[int, bool]:
    """Lengths to try, sent whether each trained; `span.from_` has."""
    grain = math.gcd(span.from_, GRAIN)
    low, high, stride = span.from_, 0, 2.0 if guess is None else span.factor  # high 0: none has failed

    def whole(length: float) -> int:
        return int(length) // grain * grain

    top = max(low, whole(span.to))
    wanted = min(top, whole(guess or 0))
    while True:
        if high == 0:
            if low >= top:
                return
            seq = wanted if wanted > low else min(top, max(low + grain, whole(low * stride)))
            if wanted <= low:
                stride = min(stride * stride, FARTHEST)
        else:
            if high <= max(low * span.factor, low + grain):
                return
            seq = min(high - grain, max(low + grain, whole(max(math.sqrt(low * high), high / stride) + grain - 1)))
            stride = min(stride * stride, FARTHEST)
        if (yield seq):
            low = seq
        else:
            high = seq


def guess(span: Longest, fits: Callable[[int], bool | None]) -> int | None:
    """The longest row that the plan says fits; None: it says nothing.

    Args:
        fits: what it says of a length.
    """
    grain = math.gcd(span.from_, GRAIN)
    low, high = span.from_ // grain, span.to // grain
    try:
        if fits(low * grain) is None:
            return None
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle * grain) else (low, middle - 1)
    except UserError:
        return None
    return low * grain


def _try(seq: int, result: dict[str, Any]) -> dict[str, Any]:
    error = result.get("error")
    if error is None and None in result["losses"]:
        error = "a loss was not finite"
    return {
        "seq": seq, "error": error, "peak_bytes": result.get("peak_bytes"),
        "host_peak_bytes": result.get("host_peak_bytes"), "seconds": result.get("seconds"),
    }  # fmt: skip


TRIES = "tries"  # what a search for the longest row has asked, a file a length


class Show(Protocol):
    """Who tells people how far the climb is."""

    def says(self, text: str) -> None: ...

    def begins(self, rung: int, of: int, name: str, repeat: int, repeats: int) -> None: ...

    def ends(self, result: Mapping[str, Any], left_s: float) -> None: ...


def climb(
    climbed: Ladder,
    config: Config,
    out: Path,
    show: Show,
    *,
    repeats: int | None = None,
    cumulative_only: bool = False,
    limit_s: float | None = None,
    resume: bool = False,
    command: str = "",
) -> list[Record]:
    """Measures every rung and writes `out`; a rung that fails is a record with its error, and the others run.

    Args:
        repeats, limit_s: instead of the ladder's own.
        resume: go on in a folder that an earlier climb of the same rungs, by the same code, has left.
        command: the line that was typed, for the records.

    Raises:
        UserError: the ladder, the baseline or the folder must be changed; nothing was written.
    """
    rungs = ladder.rungs(climbed, config, cumulative_only)
    limit_s = limit_s or climbed.limit_s
    whole = Climb(climbed, rungs, out, repeats or climbed.repeats, limit_s, command, record.source(), record.machine())
    _look(out, resume)
    _prepare(whole, show)
    calibration.for_device(hardware.named("auto")[0])  # damaged, it is refused now, not a lack of predictions later
    whole.predict = _predict
    if resume:
        _read_back(whole)
    fresh = not out.exists()
    _make(out)
    with _alone(out):
        try:
            with stopping():
                _measure(whole, show)
        except SystemExit:
            show.says(f"stopped; go on with: --resume (--out {out})")
            raise
        except UserError:
            if fresh:
                shutil.rmtree(out)
            raise
        finally:
            if records := make(whole):
                _write(out, records)
    return records


def _write(out: Path, records: Sequence[Record]) -> None:
    from optrush.report.bench import write_bench

    if out.is_dir():
        record.write(out, records)
        write_bench(out)


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """One climb at a time in a folder. The kernel drops the lock when the process ends, however it ends."""
    with (out / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--out {out}", "another climb is at work there", "wait, or take another folder"
            ) from None
        yield


# --- before anything runs


def _look(out: Path, resume: bool) -> None:
    """Whether the folder may be climbed in; looks only."""
    asked = f"--out {out}"
    if out.exists() and not out.is_dir():
        raise ConfigError(asked, "a file lies there", "take another folder")
    if not resume and out.is_dir() and any(out.iterdir()):
        found = "a climb lies there" if (out / RUNGS).is_dir() else "the folder is not empty"
        raise ConfigError(asked, found, "go on with it: --resume; or take another folder")
    if resume and not (out / RUNGS).is_dir():
        raise ConfigError(f"{asked} --resume", f"no {RUNGS}/ there: nothing to go on with", "leave --resume out")


def _make(out: Path) -> None:
    try:
        (out / RUNGS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}", f"{error.strerror}: {error.filename}", "take another folder") from None


def _prepare(whole: Climb, show: Show) -> None:
    """Asks of every rung what can be refused before anything is built. The baseline must not be.

    A rung that asks for what is not here has a record that says so; a technique that cannot be taken away alone has
    no rung without it, and people are told why.
    """
    kept = []
    for rung in whole.rungs:
        try:
            prepared = resolve(rung.config, ranks=1)
            if rung.peer is not None:
                peer_worker.check(rung.peer, rung.config, prepared.env.device)
        except UserError as error:
            if rung is whole.rungs[0]:
                raise
            if rung.mode == "without":
                show.says(f"left out: `{rung.name}`, for {error.asked}: {error.found}")
                continue
            whole.refused[rung.name] = str(error)
        kept.append(rung)
    whole.rungs = kept


def _predict(rung: Rung, config: Config) -> dict[str, Any]:
    """What the plan says of a run; nulls where it cannot say anything, and of another system."""
    from optrush.planner.search import predict

    nothing = {"predicted_peak_bytes": None, "predicted_tokens_per_s": None, "basis": None}
    if rung.peer is not None:
        return nothing
    try:
        said = predict(config, ranks=1)
    except UserError:
        return nothing
    return {
        "predicted_peak_bytes": said.peak_bytes,
        "predicted_tokens_per_s": said.tokens_per_s,
        "basis": said.basis,
        "ceiling_s": dict(said.ceiling_s),
    }


def _fits(config: Config) -> bool | None:
    """Whether the plan says that a run fits; None where it knows no capacity."""
    from optrush.planner.search import predict

    said = predict(config, ranks=1)
    return None if said.capacity_bytes is None else said.fits


def _read_back(whole: Climb) -> None:
    """What an earlier climb has left in the folder, if it asked the same of the same code.

    Raises:
        ConfigError: it did not.
    """
    asked, do = f"--out {whole.out} --resume", "climb into another folder, or as that climb was asked to"
    known = {_file(whole, rung, repeat): (rung, repeat) for rung in whole.rungs for repeat in range(whole.repeats)}
    found = {path.name: path for path in (whole.out / RUNGS).glob("*.json")}
    if foreign := sorted(set(found) - set(known)):
        raise ConfigError(asked, f"{RUNGS}/{foreign[0]} is of no rung of this climb", do)
    for name, (rung, repeat) in known.items():
        if name not in found:
            continue
        try:
            said = json.loads(found[name].read_text("utf-8"))
            digest, request, result = said["digest"], said["request"], said["result"]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(asked, f"{RUNGS}/{name} is damaged", "delete it: it is measured again") from None
        if digest != whole.source["digest"]:
            raise ConfigError(asked, "the package has changed since", "climb into another folder")
        if request != _request(whole, rung):
            raise ConfigError(asked, f"`{rung.name}` was another configuration then", do)
        results = whole.results.setdefault(rung.name, [])
        if len(results) == repeat:  # what follows a gap is measured again
            results.append(result)


# --- the processes


def order(rungs: Sequence[Rung], repeats: int) -> Iterator[tuple[int, Rung]]:
    """(repeat, rung), interleaved, so that a device that grows warm or a busy host hits all rungs alike."""
    for repeat in range(repeats):
        for rung in rungs:
            yield repeat, rung


def _measure(whole: Climb, show: Show) -> None:
    """Runs what is missing. A rung that failed once is not tried again."""
    waiting = [(n, r) for n, r in order(whole.rungs, whole.repeats) if len(whole.results.get(r.name, [])) <= n]
    begun, ran = time.monotonic(), 0
    for place, (repeat, rung) in enumerate(waiting):
        if whole.error(rung):
            continue
        number = whole.rungs.index(rung) + 1
        show.begins(number, len(whole.rungs), rung.name, repeat + 1, whole.repeats)
        request = _request(whole, rung)
        result = {
            **_result(whole, rung, request, show),
            "date": datetime.datetime.now().astimezone().isoformat("T", "seconds"),
        }
        if "refused" in result and rung is whole.rungs[0] and not whole.results:
            raise ConfigError(*result["refused"])  # as no other rung would fare better
        said = {"rung": rung.name, "digest": whole.source["digest"], "request": request, "result": result}
        put(whole.out / RUNGS / _file(whole, rung, repeat), json.dumps(said, indent=1))
        whole.results.setdefault(rung.name, []).append(result)
        record.write(whole.out, make(whole))
        ran += 1
        left = sum(1 for _, r in waiting[place + 1 :] if not whole.error(r))
        show.ends(result, (time.monotonic() - begun) / ran * left)


def _result(whole: Climb, rung: Rung, request: dict[str, Any], show: Show) -> dict[str, Any]:
    """What one process says, or of a ladder of longest rows what the best of many does."""
    span = whole.ladder.longest
    if span is None:
        return run_worker(request, whole.limit_s)
    first = _tried(whole, rung, request, span.from_)

    def attempt(seq: int) -> dict[str, Any]:
        unproved = {"steps": 0, "documents": 0}
        asked = {**request, "run": dump_config(ladder.at_length(rung.config, seq)), "proof": unproved}
        result = _tried(whole, rung, asked, seq)
        show.says(f"  rows of {seq:,} tokens: {'failed: ' + result['error'] if 'error' in result else 'trained'}")
        return result

    begin = guess(span, lambda seq: _fits(ladder.at_length(rung.config, seq)))
    return search(span, begin, first, attempt)


def _tried(whole: Climb, rung: Rung, request: dict[str, Any], seq: int) -> dict[str, Any]:
    """One length of a search; kept in tries/, for a search takes long and may be stopped."""
    repeat = len(whole.results.get(rung.name, []))
    path = whole.out / TRIES / _file(whole, rung, repeat).replace(".json", f"-{seq}.json")
    asked = {"digest": whole.source["digest"], "request": request}
    with suppress(OSError, ValueError, KeyError, TypeError):  # not there, or damaged: it is tried again
        said = json.loads(path.read_text("utf-8"))
        if {"digest": said["digest"], "request": said["request"]} == asked:
            return dict(said["result"])
    result = run_worker(request, whole.limit_s)
    path.parent.mkdir(exist_ok=True)
    put(path, json.dumps({**asked, "result": result}, indent=1))
    return result


def _request(whole: Climb, rung: Rung) -> dict[str, Any]:
    """What a process is asked: the rung's run, and the proof on the baseline's documents; or who else trains it."""
    asked: dict[str, Any] = {"run": dump_config(rung.config), "warmup": whole.ladder.warmup}
    if whole.ladder.longest is not None:
        asked["longest"] = whole.ladder.longest.model_dump(by_alias=True)
    if rung.peer is not None:
        return {**asked, "peer": {rung.peer.name: rung.peer.model_dump()}}
    return {**asked, "baseline": dump_config(baseline(whole, rung).config), "proof": whole.ladder.proof.model_dump()}


def _file(whole: Climb, rung: Rung, repeat: int) -> str:
    plain = re.sub(r"[^a-z0-9]+", "-", rung.name.lower()).strip("-")
    return f"{whole.rungs.index(rung) + 1:02}-{plain}-{repeat + 1}.json"


# --- What people see of a climb, on standard error: a bar on a terminal, a line a process, and the table at the end.


GIB = 2**30
FULL = 0.995  # share of real tokens in the slots from which on nobody asks for it


class Board:
    """Told by `climb` how far it is; use it as a context, so that the bar is taken down."""

    def __init__(self) -> None:
        columns = (SpinnerColumn(), MofNCompleteColumn(), BarColumn(20), TextColumn("{task.description}", markup=False))
        self.progress = Progress(*columns, console=err, transient=True) if sys.stderr.isatty() else None
        self.task = None if self.progress is None else self.progress.add_task("", total=None)
        self.here, self.left = "", ""

    def __enter__(self) -> Board:
        if self.progress is not None:
            self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.progress is not None:
            self.progress.stop()

    def says(self, text: str) -> None:
        err.print(text, markup=False)

    def begins(self, rung: int, of: int, name: str, repeat: int, repeats: int) -> None:
        self.here = f"rung {rung}/{of} {name}, repeat {repeat}/{repeats}"
        if self.progress is not None and self.task is not None:
            done = (repeat - 1) * of + rung - 1
            self.progress.update(self.task, total=of * repeats, completed=done, description=self.here + self.left)

    def ends(self, result: Mapping[str, Any], left_s: float) -> None:
        self.left = f"  ETA {left_s:.0f} s" if left_s > 0 else ""
        if "error" in result:
            said = "failed: " + result["error"].replace("\n", "; ")
        else:
            said = f"{median(result['tokens_per_s']):,.0f} tok/s, {result['peak_bytes'] / GIB:.1f} GiB"
        err.print(f"{self.here}: {said}{self.left}", markup=False)


def show(records: Sequence[Record]) -> None:
    """The table: each rung's figures, and against the rung it came from; below it why a rung is red."""
    table = Table(box=None, pad_edge=False)
    table.add_column("rung")
    loose = any(r.fill is not None and r.fill < FULL for r in records)
    for heading in ("tokens/s", "x since", "peak GiB", "predicted", *(("real slots",) if loose else ())):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    speeds = {r.rung: r.tokens_per_s for r in records}
    for r in records:
        before = speeds.get(r.since or "")
        table.add_row(
            Text(r.rung),
            f"{r.tokens_per_s:,.0f}" if r.tokens_per_s else "-",
            f"{r.tokens_per_s / before:.2f}" if r.tokens_per_s and before else "",
            f"{r.peak_bytes / GIB:.2f}" if r.peak_bytes else "-",
            f"{r.predicted_peak_bytes / GIB:.2f}" if r.predicted_peak_bytes else "-",
            *((f"{r.fill:.1%}" if r.fill is not None else "-",) if loose else ()),
            r.verdict,
        )
    err.print(table)
    for r in records:
        if "no proof: " in r.changes:
            err.print(f"{r.rung}: {r.changes[r.changes.index('no proof: ') :]}", markup=False)
        for reason in r.red:
            err.print(f"{r.rung}: {' '.join(reason.split())}", markup=False)
