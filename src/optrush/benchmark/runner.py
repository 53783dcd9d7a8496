"""Run a ladder: every rung in fresh processes, with interleaved repeats, and a record of each, even of failures.

resolve and check all rungs -> one process per rung and repeat (A B C A B C) -> its result, rungs/NAME.json ->
records.jsonl, rewritten from all results after each process -> report.html.

Only rungs/ has the state of a bench: `resume` reads it and measures the missing results.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import math
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from optrush import hardware
from optrush.benchmark import ladder, record
from optrush.benchmark.ladder import Ladder, Longest, Rung
from optrush.benchmark.peer import Peer, worker_path
from optrush.benchmark.quality import QualityState, check_quality, print_quality
from optrush.benchmark.record import RECORDS, RUNGS, QualityRecord, Record, write_records
from optrush.benchmark.results import BenchState
from optrush.config import Config, dump_config, parse_config
from optrush.console import err
from optrush.decide import changed, decide
from optrush.errors import ConfigError, NeedsError, UserError
from optrush.files import open_to_append, read_text, refuse_links, write_whole
from optrush.hardware import GIB
from optrush.launch import FAILED_GRACE_S, rank_environments
from optrush.planner import calibration

STOPPED = 143  # the exit code of a bench that a signal stopped
COMMAND = [sys.executable, "-m", "optrush.benchmark.worker"]
QUIET = {"KINETO_LOG_LEVEL": "6"}  # else the profiler's log would appear as the error of a dead process
TAIL = 5  # lines of standard error in the error of a process without a result
LOCK = ".lock"
LATE = "still running"  # prefix of the error of a process stopped at its limit
FIRST, SLOWER = 10, 6  # limits: the first process in ladder limits, later ones in the slowest time so far
RUNS = "runs"  # folder of whole runs, one folder per rung and seed
TRIES = "tries"  # folder with results of a search for the longest row, one file per length
FULL = 0.995  # share of real tokens in the slots above which the table omits it


# --- progress on standard error: a bar on a terminal, one line per process, and the table at the end


class ProgressBoard:
    """The progress display of a bench; a context manager, so that the bar is removed."""

    def __init__(self) -> None:
        columns = (SpinnerColumn(), MofNCompleteColumn(), BarColumn(20), TextColumn("{task.description}", markup=False))
        self.progress = Progress(*columns, console=err, transient=True, disable=not sys.stderr.isatty())
        self.task = self.progress.add_task("", total=None)
        self.place, self.left = "", ""

    def __enter__(self) -> ProgressBoard:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def log(self, text: str) -> None:
        """Print a line."""
        err.print(text, markup=False)

    def begin(self, rung: int, of: int, name: str, repeat: int, repeats: int) -> None:
        """Show the start of a rung's process; numbers count from 1."""
        self.place = f"rung {rung}/{of} {name}, repeat {repeat}/{repeats}"
        done = (repeat - 1) * of + rung - 1
        self.progress.update(self.task, total=of * repeats, completed=done, description=self.place + self.left)

    def end(self, result: Mapping[str, Any], left_s: float) -> None:
        """Print the result of that process."""
        self.left = f"  ETA {left_s:.0f} s" if left_s > 0 else ""
        if "error" in result:
            outcome = "failed: " + result["error"].replace("\n", "; ")
        else:
            outcome = f"{median(result['tokens_per_s']):,.0f} tok/s, {result['peak_bytes'] / GIB:.1f} GiB"
            outcome = f"held-out loss {result['held_out']:.4f}, {outcome}" if "held_out" in result else outcome
        self.log(f"{self.place}: {outcome}{self.left}")


class PlannedRung(NamedTuple):
    """A rung with its plan, before measurement; None: no prediction, or not rejected."""

    rung: Rung
    tokens_per_s: float | None
    peak_bytes: int | None
    refused: str | None


def print_table(found: Sequence[Record | QualityRecord]) -> None:
    """Print each rung's figures, the ratio to its reference rung, and the reasons if it is red."""
    records = [r for r in found if isinstance(r, Record)]
    if run_records := [r for r in found if isinstance(r, QualityRecord)]:
        return print_quality(run_records)
    table = Table(box=None, pad_edge=False)
    table.add_column("rung")
    loose = any(r.fill is not None and r.fill < FULL for r in records)
    for heading in ("tokens/s", "x since", "peak GiB", "predicted", *(("real slots",) if loose else ())):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    if many := any(r.ranks > 1 for r in records):
        table.add_column("ranks", justify="right")
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
            *((str(r.ranks),) if many else ()),
        )
    err.print(table)
    for r in records:
        if "no proof: " in r.changes:
            err.print(f"{r.rung}: {r.changes[r.changes.index('no proof: ') :]}", markup=False)
        for reason in r.red:
            err.print(f"{r.rung}: {' '.join(reason.split())}", markup=False)


# --- a bench from start to end


def run_ladder(
    written: Ladder,
    config: Config,
    out: Path,
    board: ProgressBoard,
    *,
    repeats: int | None = None,
    cumulative_only: bool = False,
    limit_s: float | None = None,
    resume: bool = False,
    command: str = "",
    at_once: int = 1,
) -> list[Record | QualityRecord]:
    """Measure every rung and write `out`; a failed rung becomes a record with its error, and the others run.

    Args:
        repeats, limit_s: override the ladder's own.
        resume: continue in the folder of an earlier bench of the same rungs and the same code.
        command: the command line, for the records.
        at_once: whole runs of a seed at the same time, spread over the GPUs. Runs of the first seed have a GPU each,
            and give the speeds and times of the records.

    Raises:
        UserError: the ladder, the baseline or the folder must be changed; nothing was written.
    """
    rungs, state_of, exact = ladder.resolve_rungs(written, config, cumulative_only), BenchState, limit_s is not None
    if written.quality is not None:
        check_quality(rungs[0].config, written.quality)
        if at_once > 1 and (many := [r.name for r in rungs if r.ranks > 1]):
            found = f"`{many[0]}` has several ranks, which need all GPUs"
            raise ConfigError(f"--at-once {at_once}", found, "remove --at-once")
        state_of, exact = QualityState, True
        limit_s = limit_s or (written.limit_s if "limit_s" in written.model_fields_set else math.inf)
    elif at_once > 1:
        found = "the rungs are timed; each needs the machine alone"
        raise ConfigError(f"--at-once {at_once}", found, "remove it, or use a ladder with `quality`")
    state = state_of(
        written, rungs, out, repeats or written.times, limit_s or written.limit_s, command, record.source(),
        record.machine(), predict=predict_rung, exact_limit=exact,
        at_once=at_once,
    )  # fmt: skip
    return run_rungs(state, board, resume=resume)


def plan_rungs(
    written: Ladder, config: Config, board: ProgressBoard, *, repeats: int | None = None, cumulative_only: bool = False
) -> tuple[list[PlannedRung], int]:
    """Return the rungs that `run_ladder` would measure, and the repeats; measure and write nothing.

    Raises:
        UserError: the ladder or the baseline must be changed.
    """
    rungs = ladder.resolve_rungs(written, config, cumulative_only)
    times = repeats or written.times
    if written.quality is not None:
        check_quality(rungs[0].config, written.quality)
    state = BenchState(written, rungs, Path(), times, written.limit_s, "", {}, {}, predict=predict_rung)
    _refuse(state, board)
    planned = []
    for rung in state.rungs:
        if rung.name not in state.absent:
            plan = predict_rung(rung, rung.config)
            known = plan["predicted_tokens_per_s"], plan["predicted_peak_bytes"]
            planned.append(PlannedRung(rung, *known, state.refused.get(rung.name)))
    return planned, times


def run_rungs(state: BenchState, board: ProgressBoard, *, resume: bool) -> list[Record | QualityRecord]:
    """Measure the rungs of a bench; see `run_ladder`."""
    out = state.out
    _check_folder(state, resume)
    _refuse(state, board)
    calibration.for_device(hardware.first_device())  # reject a damaged file now; later it would only lose predictions
    if resume:
        _read_back(state)
    fresh = not out.exists()
    try:
        (out / RUNGS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(state.asked, f"{error.strerror}: {error.filename}", "use another folder") from None
    with lock_folder(out, state.asked):
        try:
            with stop_on_signals():
                _measure(state, board)
        except SystemExit:
            board.log(f"stopped; {state.again}")
            raise
        except UserError:
            if fresh:
                shutil.rmtree(out)
            raise
        finally:
            records = list(state.all_records())
            if records and out.is_dir():
                from optrush.report.bench import write_bench

                write_records(out, records)
                write_bench(out)
    return records


@contextmanager
def lock_folder(out: Path, asked: str) -> Iterator[None]:
    """Allow one bench at a time in a folder. The kernel drops the lock at any end of the process."""
    with open_to_append(out / LOCK) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(asked, "another bench or tune is using it", "wait, or use another folder") from None
        yield


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Make SIGTERM and Ctrl-C stop the bench and its process: results stay, and --resume continues."""

    def stop(*_: object) -> None:
        raise SystemExit(STOPPED)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_folder(state: BenchState, resume: bool) -> None:
    """Raise ConfigError if the folder cannot be used; write nothing."""
    out, asked = state.out, state.asked
    if out.exists() and not out.is_dir():
        raise ConfigError(asked, "it is a file", "use another folder")
    if not resume and out.is_dir() and any(out.iterdir()):
        found = "it has results of a bench" if (out / RUNGS).is_dir() else "the folder is not empty"
        raise ConfigError(asked, found, "resume it with --resume, or use another folder")
    if resume and not (out / RUNGS).is_dir():
        raise ConfigError(f"{asked} --resume", f"no {RUNGS}/ in it: nothing to resume", "remove --resume")
    refuse_links(out, asked, (LOCK, RUNGS, RUNS, TRIES, RECORDS, "report.html", "speed.png", "memory.png", "loss.png"))


def _refuse(state: BenchState, board: ProgressBoard) -> None:
    """Check every rung before anything is built; a rejected baseline ends the bench.

    A rung with unmet requirements gets a record with the reason. In a ladder, a rung with more ranks than GPUs, or
    without a technique that cannot be removed separately, is skipped and the reason is logged.
    """
    rungs = []
    for rung in state.rungs:
        try:
            _refuse_ranks(rung)
            resolved = decide(rung.config, ranks=1 if rung.peer else rung.ranks)  # another system shards on its own
            if rung.peer is not None:
                rung.peer.check(rung.config, resolved.env.device, rung.ranks)
        except UserError as error:
            if state.required(rung):
                raise
            if rung.mode == "without" and not isinstance(error, _TooFew):
                board.log(f"skipped: `{rung.name}`: {error.asked}: {error.found}")
                continue
            if isinstance(error, _TooFew) and state.leaves_out:
                state.absent[rung.name] = error.found
            else:
                state.refused[rung.name] = str(error)
        rungs.append(rung)
    state.rungs = rungs
    for absence in dict.fromkeys(state.absent.values()):
        names = ", ".join(f"`{name}`" for name, reason in state.absent.items() if reason == absence)
        board.log(f"skipped ({absence}): {names}")


class _TooFew(NeedsError):
    """The machine has fewer GPUs than a rung has ranks."""


def _refuse_ranks(rung: Rung) -> None:
    """Raise _TooFew if the machine has fewer GPUs than the rung has ranks; CPUs are shared."""
    devices = hardware.probe()
    if rung.ranks > len(devices) and devices and devices[0].kind == "cuda":
        found = f"this machine has {len(devices)} GPU{'s' * (len(devices) > 1)}"
        raise _TooFew(f"`{rung.name}` on {rung.ranks} ranks", found, "use a machine with more GPUs")


def _device_of(rung: Rung) -> hardware.Device:
    """Return this machine's device, with the link selected by the rung's NCCL variables."""
    device, _ = hardware.parse_hardware("auto")
    if device.kind != "cuda":
        return hardware.share_of_cpu(rung.ranks)
    return hardware.over(device, hardware.turned_to({**os.environ, **rung.env}))


def predict_rung(rung: Rung, config: Config) -> dict[str, Any]:
    """Return the plan's prediction; nulls without a plan, and for another system."""
    from optrush.planner.search import predict

    with suppress(UserError):
        if rung.peer is None:
            plan = predict(config, _device_of(rung), rung.ranks)
            return {
                "predicted_peak_bytes": plan.peak_bytes,
                "predicted_tokens_per_s": plan.tokens_per_s,
                "basis": plan.basis,
                "ceiling_s": dict(plan.ceiling_s),
            }
    return {"predicted_peak_bytes": None, "predicted_tokens_per_s": None, "basis": None}


def _read_back(state: BenchState) -> None:
    """Read the results of an earlier bench in the folder.

    Raises:
        ConfigError: its rungs or its code differ.
    """
    asked, do = f"{state.asked} --resume", "use another folder, or the options of that bench"
    known = {_file(state, rung, repeat): (rung, repeat) for rung in state.rungs for repeat in range(state.repeats)}
    files = {path.name: path for path in (state.out / RUNGS).glob("*.json")}
    if foreign := sorted(set(files) - set(known)):
        raise ConfigError(asked, f"{RUNGS}/{foreign[0]} belongs to no rung of this ladder", do)
    for name, (rung, repeat) in known.items():
        if name not in files:
            continue
        try:
            saved = json.loads(read_text(files[name]))
            digest, request, result = saved["digest"], saved["request"], saved["result"]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(asked, f"{RUNGS}/{name} is damaged", "delete it to measure again") from None
        if digest != state.source["digest"]:
            raise ConfigError(asked, "the package has changed", "use another folder")
        if request != _request(state, rung, repeat):
            raise ConfigError(asked, f"`{rung.name}` had another configuration", do)
        results = state.results.setdefault(rung.name, [])
        if len(results) == repeat:  # measure results after a gap again
            results.append(result)


def _measure(state: BenchState, board: ProgressBoard) -> None:
    """Run the missing processes."""
    start, ran = time.monotonic(), 0
    while left := state.missing():
        repeat = left[0][0]
        for rung, result in _results(state, repeat, [rung for n, rung in left if n == repeat], board):
            result["date"] = datetime.datetime.now().astimezone().isoformat("T", "seconds")
            if "refused" in result and state.required(rung) and not state.results:
                raise ConfigError(*result["refused"])  # every other rung would be rejected, too
            request = _request(state, rung, repeat)
            saved = {"rung": rung.name, "digest": state.source["digest"], "request": request, "result": result}
            write_whole(state.out / RUNGS / _file(state, rung, repeat), json.dumps(saved, indent=1))
            state.results.setdefault(rung.name, []).append(result)
            write_records(state.out, state.all_records())
            ran += 1
            board.end(result, (time.monotonic() - start) / ran * len(state.missing()))


def _results(
    state: BenchState, repeat: int, rungs: Sequence[Rung], board: ProgressBoard
) -> Iterator[tuple[Rung, dict[str, Any]]]:
    """Yield each rung with its result: one by one, or `at_once` whole runs at the same time."""
    here = [r.name for r in state.rungs if r.name not in state.absent]
    gpus: list[str] = []
    if state.at_once > 1:
        count = sum(d.kind == "cuda" for d in hardware.probe())
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = [gpu.strip() for gpu in named.split(",")][:count] if named else [str(n) for n in range(count)]
    width = min(state.at_once, max(1, len(gpus))) if repeat == 0 else state.at_once
    if width == 1:
        for rung in rungs:
            board.begin(here.index(rung.name) + 1, len(here), rung.name, repeat + 1, state.repeats)
            yield rung, _result(state, rung, repeat, board, {})
        return
    free: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()
    for n in range(width):
        free.put({"CUDA_VISIBLE_DEVICES": gpus[n % len(gpus)]} if gpus else {})

    def work(rung: Rung) -> tuple[Rung, dict[str, Any]]:
        environment = free.get()
        try:
            return rung, _result(state, rung, repeat, board, environment)
        finally:
            free.put(environment)

    pool = ThreadPoolExecutor(width)
    try:
        for done in as_completed([pool.submit(work, rung) for rung in rungs]):
            rung, result = done.result()
            board.begin(here.index(rung.name) + 1, len(here), rung.name, repeat + 1, state.repeats)
            yield rung, {**result, "beside": math.ceil(width / max(1, len(gpus))) - 1}
    finally:
        _stopping.set()
        pool.shutdown(cancel_futures=True)
        _stopping.clear()


def _request(state: BenchState, rung: Rung, repeat: int) -> dict[str, Any]:
    """Return the request of a process: the rung's run, with the proof on the baseline's documents or another system."""
    request: dict[str, Any] = {"run": dump_config(rung.config), "warmup": state.ladder.warmup}
    if rung.ranks > 1 or rung.env:
        request |= {"ranks": rung.ranks, "env": rung.env}
    if state.ladder.quality is not None:
        run = dump_config(changed(rung.config, {"seed": rung.config.seed + repeat}))
        return {**request, "run": run, "score": state.ladder.quality.score, "samples": state.ladder.quality.samples}
    if state.rehearses:
        request["rehearse"] = True
    if state.ladder.longest is not None:
        request["longest"] = state.ladder.longest.model_dump(by_alias=True)
    if rung.peer is not None:
        return {**request, "peer": {rung.peer.name: rung.peer.model_dump()}}
    baseline = dump_config(state.baseline(rung).config)
    return {**request, "baseline": baseline, "proof": state.ladder.proof.model_dump()}


def _result(
    state: BenchState, rung: Rung, repeat: int, board: ProgressBoard, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Return the result of one process, of a whole run, or the best of a search for the longest row."""
    span, request = state.ladder.longest, _request(state, rung, repeat)
    if state.ladder.quality is not None:
        folder = state.out / RUNS / Path(_file(state, rung, repeat)).stem
        run = rung.config.train
        length = f"{run.steps:,} steps" if run.steps else f"{run.epochs:g} epochs"
        board.log(f"{rung.name}, seed {rung.config.seed + repeat}: starts, {length} (optrush report {folder})")
        return _whole_run(state, rung, request, folder, environment)
    if span is None:
        return run_worker(request, time_limit(state), rung.peer)

    def attempt(seq: int) -> dict[str, Any]:
        unproved = {"steps": 0, "documents": 0}
        other = {**request, "run": dump_config(ladder.at_length(rung.config, seq)), "proof": unproved}
        result = _attempt(state, rung, other, seq)
        board.log(f"  rows of {seq:,} tokens: {'failed: ' + result['error'] if 'error' in result else 'trained'}")
        return result

    def fits(seq: int) -> bool | None:
        from optrush.planner.search import predict

        plan = predict(ladder.at_length(rung.config, seq), _device_of(rung), rung.ranks)
        return None if plan.capacity_bytes is None else plan.fits

    first = _attempt(state, rung, request, span.from_)
    return search_longest(span, longest_that_fits(span, fits), first, attempt)


def _whole_run(
    state: BenchState, rung: Rung, request: dict[str, Any], folder: Path, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Run to the end in a folder, without keeping checkpoints or model; return the result and the score."""
    shutil.rmtree(folder, ignore_errors=True)
    run = dump_config(changed(parse_config(request["run"], "run", own=True), {"output": str(folder)}))
    ask = {"run": run, "ranks": rung.ranks, "env": {**environment, **rung.env}}
    result = run_worker({**ask, "began": time.time()}, time_limit(state), module="optrush.benchmark.quality")
    if "error" not in result and request["score"] is not None:
        scoring = {"run": run, "samples": request["samples"], "env": ask["env"]}
        scored = run_worker(scoring, time_limit(state), module="optrush.benchmark.quality")
        result |= {key: value for key, value in scored.items() if key != "seconds"}
    for name in ("checkpoints", "model", "adapter"):
        shutil.rmtree(folder / name, ignore_errors=True)
    return result


def _attempt(state: BenchState, rung: Rung, request: dict[str, Any], seq: int) -> dict[str, Any]:
    """Run one length of a search; store the result in tries/, because a search takes long and can be interrupted."""
    repeat = len(state.results.get(rung.name, []))
    path = state.out / TRIES / _file(state, rung, repeat).replace(".json", f"-{seq}.json")
    key = {"digest": state.source["digest"], "request": request}
    with suppress(OSError, ValueError, KeyError, TypeError):  # missing or damaged: try again
        saved = json.loads(read_text(path))
        if {"digest": saved["digest"], "request": saved["request"]} == key:
            return dict(saved["result"])
    result = run_worker(request, time_limit(state))
    path.parent.mkdir(exist_ok=True)
    write_whole(path, json.dumps({**key, "result": result}, indent=1))
    return result


def time_limit(state: BenchState) -> float:
    """Return the time limit of a process in seconds: as given, else more if the machine has been slow.

    The first process has ten times the ladder's limit, the others at least six times the slowest time so far, so that a
    busy machine makes a bench long and not red.
    """
    if state.exact_limit:
        return state.limit_s
    took = [r.get("seconds", 0.0) for results in state.results.values() for r in results if "error" not in r]
    return max(state.limit_s, SLOWER * max(took)) if took else FIRST * state.limit_s


def _file(state: BenchState, rung: Rung, repeat: int) -> str:
    plain = re.sub(r"[^a-z0-9]+", "-", rung.name.lower()).strip("-")
    return f"{state.rungs.index(rung) + 1:02}-{plain}-{repeat + 1}.json"


# --- a fresh process for one rung, with a time limit


def run_worker(
    request: Mapping[str, Any], limit_s: float, peer: Peer | None = None, module: str | None = None
) -> dict[str, Any]:
    """Return the result of a rung's fresh processes: figures, or `error`.

    Args:
        request: `ranks` sets the number of processes; rank 0 writes the figures, another rank only its error.
        peer: another system, to run its worker instead of ours.
        module: the module to run instead of the worker of rungs.
    """
    start, ranks = time.monotonic(), request.get("ranks", 1)
    command, environment = COMMAND, {**QUIET, **os.environ, **request.get("env", {})}
    if module is not None:
        command = [sys.executable, "-m", module]
    if peer is not None:
        command = [sys.executable, "-m", peer.worker]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), worker_path(peer)]))
    with tempfile.TemporaryDirectory(prefix="optrush-bench-") as name:
        folder = Path(name)
        request_path = folder / "request.json"
        request_path.write_text(json.dumps({**request, "parent": os.getpid()}))
        results = [folder / ("result.json" if rank == 0 else f"result-{rank}.json") for rank in range(ranks)]
        logs = [folder / f"stderr-{rank}" for rank in range(ranks)]
        environments = [environment] if ranks == 1 else [{**environment, **env} for env in rank_environments(ranks)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for env, result_path, log in zip(environments, results, logs, strict=True):
                with log.open("wb") as stderr:
                    processes.append(
                        subprocess.Popen(
                            [*command, str(request_path), str(result_path)],
                            stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True, env=env,
                        )
                    )  # fmt: skip
            codes = _exit_codes(processes, limit_s)
        finally:
            for process in processes:
                with suppress(ProcessLookupError):  # the whole group, such as a compiler's processes
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        seconds = time.monotonic() - start
        late = f"{LATE} after {limit_s:g} s, and stopped (limit_s); raise --limit SECONDS, or --budget of tune"
        failed = next((r for r, code in enumerate(codes) if code), 0)  # the first failed rank, else rank 0
        code = codes[failed]
        end = late if code is None else cause_of_death(code, read_text(logs[failed], "utf-8", "replace"))
        answered = [json.loads(read_text(path)) for path in results if path.exists()]
        if wrong := [answer for answer in answered if "error" in answer]:
            return {**wrong[0], "seconds": seconds}
        if not results[0].exists() or (ranks > 1 and any(codes)):
            return {"error": end, "seconds": seconds}
        result: dict[str, Any] = {**answered[0], "seconds": seconds}
        if "parts_note" in result and (code is None or code < 0):  # its other figures are complete
            result["parts_note"] = end
        return result


_stopping = threading.Event()  # ends the threads of parallel runs, and with them their processes


def _exit_codes(processes: Sequence[subprocess.Popen[bytes]], limit_s: float) -> list[int | None]:
    """Return the exit code of each process; None if it did not end in time, or after another one's failure."""
    until = time.monotonic() + limit_s
    while any(p.poll() is None for p in processes) and time.monotonic() < until and not _stopping.is_set():
        if any(p.poll() for p in processes):
            until = min(until, time.monotonic() + FAILED_GRACE_S)
        time.sleep(0.05)
    return [p.poll() for p in processes]


def cause_of_death(code: int, stderr: str) -> str:
    """Describe why a process left no result, from its exit code and the last lines of its standard error."""
    last = " | ".join([line for line in stderr.splitlines() if line.strip()][-TAIL:])
    if code >= 0:
        return f"it ended without a result, exit code {code}: {last or 'standard error is empty'}"
    text = f"killed by signal {-code} ({signal.Signals(-code).name})"
    if -code == signal.SIGKILL:
        text += ", most likely out of host memory: the system kills the largest process"
    return text + (f": {last}" if last else "")


# --- the longest row that trains: lengths are tried one by one, each in a fresh process with one row per step
#
# The rung is first measured and proved at the shortest length, like any rung. Further lengths are tried without a
# proof, which would take longer than the training: first the plan's prediction, then growing steps around it, or
# doubling without a prediction; up while they train, down when memory is exhausted, until the shortest failed length is
# near the longest trained one. If the plan is right, two tries suffice.

GRAIN = 1024  # lengths are multiples of it, or of the largest divisor that it shares with the shortest
FARTHEST = 4.0  # the largest ratio of a length to the previous one
MEMORY = ("out of memory", "killed by signal 9")  # beginnings of the errors of exhausted memory, device or host


def search_longest(
    span: Longest, guess: int | None, first: dict[str, Any], attempt: Callable[[int], dict[str, Any]]
) -> dict[str, Any]:
    """Return the result of the longest trained row, with the proof of the shortest, and all tries.

    Args:
        guess: the first length; None: no prediction.
        first: the result at `span.from_`, with its proof.
        attempt: runs one process at a length.
    """
    best, reached, tries, ended = first, span.from_, [_try(span.from_, first)], None
    if "error" in first:
        return {**first, "tries": tries}
    lengths = _lengths(span, guess)
    with suppress(StopIteration):
        seq = next(lengths)
        while True:
            result = attempt(seq)
            tries.append(_try(seq, result))
            error = tries[-1]["error"]
            if error is None:
                best, reached = result, seq
            elif not str(error).startswith(MEMORY):
                ended = f"the search ended at rows of {seq:,} tokens: {error}"
                break
            seq = lengths.send(error is None)
    return {**best, "proof": first["proof"], "longest_seq": reached, "tries": tries, "ended": ended}


def _lengths(span: Longest, guess: int | None) -> Generator[int, bool]:
    """Yield the lengths to try; send back whether each trained. `span.from_` has trained."""
    grain = math.gcd(span.from_, GRAIN)
    low, high = span.from_, 0  # the longest trained, the shortest failed; 0: none
    stride = 2.0 if guess is None else span.factor

    def rounded(length: float) -> int:
        return int(length) // grain * grain

    top = max(low, rounded(span.to))
    target = min(top, rounded(guess or 0))
    while high > max(low * span.factor, low + grain) if high else top > low:
        if high:
            middle = max(math.sqrt(low * high), high / stride)
            seq = min(high - grain, max(low + grain, rounded(middle + grain - 1)))
        else:
            seq = target if target > low else min(top, max(low + grain, rounded(low * stride)))
        if high or target <= low:
            stride = min(stride * stride, FARTHEST)
        if (yield seq):
            low = seq
        else:
            high = seq


def longest_that_fits(span: Longest, fits: Callable[[int], bool | None]) -> int | None:
    """Return the longest row for which `fits`, the plan's answer, is True; None without a plan."""
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
    figures = {name: result.get(name) for name in ("peak_bytes", "host_peak_bytes", "seconds")}
    return {"seq": seq, "error": error, **figures}
