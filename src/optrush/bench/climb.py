"""A climb: every rung of a ladder in fresh processes, repeats interleaved, and a record of each, come what may.

resolve and check all rungs -> a process a rung and repeat (A B C A B C) -> rungs/NAME.json, what it said ->
records.jsonl, made anew from those after each process -> report.html.

What a climb has learnt lies in rungs/ alone: a climb that goes on reads it back, and asks for what is missing.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from optrush import config, hardware
from optrush.bench import environment, ladder, longest, peer_worker, record
from optrush.bench.ladder import Rung
from optrush.bench.made import Climb, baseline, make
from optrush.bench.process import run_worker, stopping
from optrush.bench.record import RUNGS, Record, put
from optrush.bench.written import Ladder
from optrush.config import Run
from optrush.errors import ConfigError, UserError
from optrush.planner import calibration
from optrush.resolve import prepare

TRIES = "tries"  # what a search for the longest row has asked, a file a length


class Show(Protocol):
    """Who tells people how far the climb is."""

    def says(self, text: str) -> None: ...

    def begins(self, rung: int, of: int, name: str, repeat: int, repeats: int) -> None: ...

    def ends(self, result: Mapping[str, Any], left_s: float) -> None: ...


def climb(
    climbed: Ladder,
    run: Run,
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
    rungs = ladder.rungs(climbed, run, cumulative_only)
    limit_s = limit_s or climbed.limit_s
    whole = Climb(
        climbed, rungs, out, repeats or climbed.repeats, limit_s, command, environment.source(), environment.machine()
    )
    _look(out, resume)
    _prepare(whole, show)
    calibration.find(hardware.named("auto")[0])  # damaged, it is refused now, not a lack of predictions later
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
    from optrush.bench.report import write_bench

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
            prepared = prepare(rung.run, ranks=1)
            if rung.peer is not None:
                peer_worker.check(rung.peer, rung.run, prepared.setup.device)
        except UserError as error:
            if rung is whole.rungs[0]:
                raise
            if rung.mode == "without":
                show.says(f"left out: `{rung.name}`, for {error.asked}: {error.found}")
                continue
            whole.refused[rung.name] = str(error)
        kept.append(rung)
    whole.rungs = kept


def _predict(rung: Rung, run: Run) -> dict[str, Any]:
    """What the plan says of a run; nulls where it cannot say anything, and of another system."""
    from optrush.planner.search import predict

    nothing = {"predicted_peak_bytes": None, "predicted_tokens_per_s": None, "basis": None}
    if rung.peer is not None:
        return nothing
    try:
        said = predict(run, ranks=1)
    except UserError:
        return nothing
    return {
        "predicted_peak_bytes": said.peak_bytes,
        "predicted_tokens_per_s": said.tokens_per_s,
        "basis": said.basis,
        "ceiling_s": dict(said.ceiling_s),
    }


def _fits(run: Run) -> bool | None:
    """Whether the plan says that a run fits; None where it knows no capacity."""
    from optrush.planner.search import predict

    said = predict(run, ranks=1)
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
        asked = {**request, "run": config.dump(ladder.at_length(rung.run, seq)), "proof": unproved}
        result = _tried(whole, rung, asked, seq)
        show.says(f"  rows of {seq:,} tokens: {'failed: ' + result['error'] if 'error' in result else 'trained'}")
        return result

    begin = longest.guess(span, lambda seq: _fits(ladder.at_length(rung.run, seq)))
    return longest.search(span, begin, first, attempt)


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
    asked: dict[str, Any] = {"run": config.dump(rung.run), "warmup": whole.ladder.warmup}
    if whole.ladder.longest is not None:
        asked["longest"] = whole.ladder.longest.model_dump(by_alias=True)
    if rung.peer is not None:
        return {**asked, "peer": {rung.peer.name: rung.peer.model_dump()}}
    return {**asked, "baseline": config.dump(baseline(whole, rung).run), "proof": whole.ladder.proof.model_dump()}


def _file(whole: Climb, rung: Rung, repeat: int) -> str:
    plain = re.sub(r"[^a-z0-9]+", "-", rung.name.lower()).strip("-")
    return f"{whole.rungs.index(rung) + 1:02}-{plain}-{repeat + 1}.json"
