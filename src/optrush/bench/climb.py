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
import re
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from optrush import config
from optrush.bench import environment, ladder, record, stats
from optrush.bench.ladder import Ladder, Rung
from optrush.bench.process import run_worker, stopping
from optrush.bench.record import RUNGS, Record, Verdict, put
from optrush.bench.stats import Figures
from optrush.config import Run
from optrush.errors import ConfigError, UserError
from optrush.prepare import prepare
from optrush.techniques import ALL


class Show(Protocol):
    """Who tells people how far the climb is."""

    def says(self, text: str) -> None: ...

    def begins(self, rung: int, of: int, name: str, repeat: int, repeats: int) -> None: ...

    def ends(self, result: Mapping[str, Any], left_s: float) -> None: ...


@dataclass
class Climb:
    """What is known: the rungs, and what their processes have said so far."""

    ladder: Ladder
    rungs: list[Rung]
    out: Path
    repeats: int
    limit_s: float
    command: str
    source: dict[str, Any]
    machine: dict[str, str]
    refused: dict[str, str] = field(default_factory=dict)  # by rung: why it cannot even begin
    predicted: dict[str, dict[str, Any]] = field(default_factory=dict)
    results: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by rung, a result a repeat

    def error(self, rung: Rung) -> str | None:
        """Why the rung has no figures: refused, or one of its processes failed."""
        failed = (r["error"] for r in self.results.get(rung.name, []) if "error" in r)
        return self.refused.get(rung.name) or next(failed, None)

    def figures(self, rung: Rung) -> Figures | None:
        """What all repeats measured together, if the rung has figures."""
        results = self.results.get(rung.name)
        if self.error(rung) or not results:
            return None
        predicted = self.predicted[rung.name]
        return Figures(
            [r["tokens_per_s"] for r in results],
            max(r["peak_bytes"] for r in results),
            results[0]["memory_kind"],
            predicted["predicted_peak_bytes"],
            predicted["predicted_tokens_per_s"],
        )


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
    whole.predicted = {rung.name: _predict(rung.run) for rung in whole.rungs}
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
            prepare(rung.run, ranks=1)
        except UserError as error:
            if rung is whole.rungs[0]:
                raise
            if rung.mode == "without":
                show.says(f"left out: `{rung.name}`, for {error.asked}: {error.found}")
                continue
            whole.refused[rung.name] = str(error)
        kept.append(rung)
    whole.rungs = kept


def _predict(run: Run) -> dict[str, Any]:
    """What the plan says of a run; nulls where it cannot say anything."""
    from optrush.plan import predict

    try:
        said = predict(run, ranks=1)
    except UserError:
        return {"predicted_peak_bytes": None, "predicted_tokens_per_s": None, "basis": None}
    return {
        "predicted_peak_bytes": said.peak_bytes,
        "predicted_tokens_per_s": said.tokens_per_s,
        "basis": said.basis,
    }


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
            **run_worker(request, whole.limit_s),
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


def _request(whole: Climb, rung: Rung) -> dict[str, Any]:
    """What a process is asked: the rung's run, and the proof on the baseline's documents."""
    return {
        "run": config.dump(rung.run),
        "baseline": config.dump(whole.rungs[0].run),
        "warmup": whole.ladder.warmup,
        "proof": whole.ladder.proof.model_dump(),
    }


def _file(whole: Climb, rung: Rung, repeat: int) -> str:
    plain = re.sub(r"[^a-z0-9]+", "-", rung.name.lower()).strip("-")
    return f"{whole.rungs.index(rung) + 1:02}-{plain}-{repeat + 1}.json"


# --- the records


def make(whole: Climb) -> list[Record]:
    """Records of all rungs that have been tried or refused, in the ladder's order."""
    return [_record(whole, r) for r in whole.rungs if r.name in whole.results or r.name in whole.refused]


def _record(whole: Climb, rung: Rung) -> Record:
    """One rung against the one it comes from; where that has no figures, against what that one comes from."""
    error, after = whole.error(rung), whole.figures(rung)
    since = _since(whole, rung)
    before = None if since is None else whole.figures(since)
    results = whole.results.get(rung.name) or [{}]
    first = results[0]
    proof = None if error else _proof(whole, rung)
    bad = [] if error else _unsound(whole, rung)
    losses = first.get("proof", {}).get("losses", [])
    verdict: Verdict
    if after is None:
        verdict, red = "red", [f"failed: {error}"]
    else:
        verdict, red = stats.judge(
            after, before, next((b for b in (*bad, stats.wrong(proof, losses)) if b), None),
            only_load=since is not None and ladder.only_load(since.run, rung.run), alone=rung.mode == "without",
        )  # fmt: skip
    run = rung.run
    measured: dict[str, Any] = {}
    if after is not None:
        measured = {
            "tokens_per_s": after.tokens_per_s, "tokens_per_s_iqr": list(after.quartiles), "repeats": after.repeats,
            "step_s": [r["step_s"] for r in results], "peak_bytes": after.peak_bytes, "memory_kind": after.memory_kind,
            **{name: _middle([r.get(name) for r in results]) for name in ("mfu", "targets_per_s", "fill", "data_wait")},
            "losses": losses, "grad_norms": first["proof"]["grad_norms"],
        }  # fmt: skip
    changes = rung.changes if since is None or since.name == rung.since else ladder.differences(since.run, run)
    if note := first.get("proof", {}).get("note"):
        changes += f"; {note}"
    return Record(
        ladder=whole.ladder.name, rung=rung.name, case=ladder.case(run), mode=rung.mode,
        since=since.name if since else None, changes=changes, device=_device(whole, rung), ranks=1,
        seq=run.batch.seq, micro_tokens=int(run.batch.micro_tokens or run.batch.seq), verdict=verdict, red=red,
        config=run.model_dump(mode="json", by_alias=True, exclude_none=True),
        environment={**whole.machine, **first.get("environment", {})}, source=whole.source, command=whole.command,
        date=first.get("date", datetime.datetime.now().astimezone().isoformat("T", "seconds")),
        proof=proof, error=error, **measured, **whole.predicted[rung.name],
    )  # fmt: skip


def _since(whole: Climb, rung: Rung) -> Rung | None:
    """The nearest rung below that has figures."""
    by_name = {r.name: r for r in whole.rungs}
    below = rung.since
    while below is not None and whole.figures(by_name[below]) is None:
        below = by_name[below].since
    return None if below is None else by_name[below]


def _proof(whole: Climb, rung: Rung) -> dict[str, Any] | None:
    """Held against the first rung that has losses, which is the baseline unless that failed."""
    told = [r for r in whole.rungs if whole.figures(r) and whole.results[r.name][0]["proof"]["losses"]]
    if not told or told[0] is rung or rung not in told:
        return None
    allowed = stats.tolerances(told[0].run, rung.run, ALL)
    numerics = stats.weakest(told[0].run, rung.run, ALL).name
    wanted = _series(whole.results[told[0].name][0]["proof"])
    proofs = [stats.prove(_series(r["proof"]), wanted, allowed) for r in whole.results[rung.name]]
    worst = max(proofs, key=lambda p: math.inf if p["worst"] is None else p["worst"] / p["tolerance"])
    return {"against": told[0].name, "numerics": numerics, **worst}


def _series(proof: Mapping[str, Any]) -> dict[str, list[float | None]]:
    return {"losses": proof["losses"], "gradient norms": proof["grad_norms"]}


def _unsound(whole: Climb, rung: Rung) -> Iterator[str | None]:
    """What is wrong with a rung by itself, in any repeat."""
    allowed = stats.tolerances(rung.run, rung.run, ALL)
    for result in whole.results[rung.name]:
        yield stats.dead(result.get("losses", []), result.get("grad_norms", []))
        if result["proof"]["losses"]:
            yield stats.drifted(result["proof"], allowed)


def _device(whole: Climb, rung: Rung) -> str:
    """The device as the process named it; of a rung that never ran, what the others ran on."""
    for name in (rung.name, *whole.results):
        for result in whole.results.get(name, []):
            if "device" in result:
                return str(result["device"])
    return "unknown"


def _middle(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None
