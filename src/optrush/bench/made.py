"""What the processes of a climb have said, as records: each rung's figures, verdict and proof. Pure.

Results of a rung (a dict a repeat, as worker.py and peer_worker.py write them) -> Figures -> judged -> Record.
"""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optrush import config
from optrush.bench import ladder, stats
from optrush.bench.ladder import Rung
from optrush.bench.peer import UNCOMPARED
from optrush.bench.record import Record, Verdict
from optrush.bench.stats import Figures
from optrush.bench.written import Ladder
from optrush.config import Run
from optrush.techniques import ALL


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
    predict: Callable[[Rung, Run], dict[str, Any]] = lambda rung, run: {}
    predicted: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)  # by rung and T, what it said
    results: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by rung, a result a repeat

    def error(self, rung: Rung) -> str | None:
        """Why the rung has no figures: refused, or one of its processes failed."""
        failed = (r["error"] for r in self.results.get(rung.name, []) if "error" in r)
        return self.refused.get(rung.name) or next(failed, None)

    def figures(self, rung: Rung) -> Figures | None:
        """What all repeats measured together, if the rung has figures."""
        if self.error(rung) or not self.results.get(rung.name):
            return None
        results = self.counted(rung)
        predicted = self.plan(rung)
        return Figures(
            [r["tokens_per_s"] for r in results],
            max(r["peak_bytes"] for r in results),
            results[0]["memory_kind"],
            predicted["predicted_peak_bytes"],
            predicted["predicted_tokens_per_s"],
        )

    def run(self, rung: Rung) -> Run:
        """What the rung's figures are of: its run, or that with the longest row that trained."""
        found = next((r["longest_seq"] for r in self.counted(rung) if "longest_seq" in r), None)
        return rung.run if found is None else ladder.at_length(rung.run, found)

    def counted(self, rung: Rung) -> list[dict[str, Any]]:
        """The repeats that figures are made of: all, or those that reached no longer row than the others."""
        results = self.results.get(rung.name, [])
        seqs = [r["longest_seq"] for r in results if "longest_seq" in r]
        return [r for r in results if r.get("longest_seq") == min(seqs)] if seqs else results

    def plan(self, rung: Rung) -> dict[str, Any]:
        """What the plan says of that."""
        run = self.run(rung)
        place = (rung.name, run.batch.seq)
        if place not in self.predicted:
            self.predicted[place] = self.predict(rung, run)
        return self.predicted[place]


def baseline(whole: Climb, rung: Rung) -> Rung:
    """Whose documents the rung's proof is made of: the first of our own rungs on the same model."""
    m = rung.run.model
    same = (r for r in whole.rungs if (r.run.model.path, r.run.model.shape) == (m.path, m.shape) and r.peer is None)
    return next(same, rung)


def make(whole: Climb) -> list[Record]:
    """Records of all rungs that have been tried or refused, in the ladder's order."""
    return [_record(whole, r) for r in whole.rungs if r.name in whole.results or r.name in whole.refused]


def _record(whole: Climb, rung: Rung) -> Record:
    """One rung against the one it comes from; where that has no figures, against what that one comes from."""
    error, since = whole.error(rung), _since(whole, rung)
    results = whole.results.get(rung.name) or [{}]
    first = results[0]
    proof = None if error else _proof(whole, rung)
    verdict, red = _judged(whole, rung, since, proof)
    run = whole.run(rung)
    changes = rung.changes if since is None or since.name == rung.since else ladder.differences(since.run, rung.run)
    if note := first.get("proof", {}).get("note"):
        changes += f"; {note}"
    plan = whole.plan(rung)
    if whole.ladder.warmup == 0:
        changes += "; its speed is that of first steps, which compile"
        plan = {**plan, "predicted_tokens_per_s": None, "ceiling_s": {}}  # of steps that do not
    micro = first.get("micro_tokens", run.batch.micro_tokens)
    return Record(
        ladder=whole.ladder.name, rung=rung.name, case=rung.case, mode=rung.mode,
        since=since.name if since else None, changes=changes, device=_device(whole, rung), ranks=1,
        seq=run.batch.seq, micro_tokens=micro if isinstance(micro, int) else run.batch.seq, verdict=verdict, red=red,
        config={**config.document(config.dump(run), "the run")[0], **_options(rung)},
        environment={**whole.machine, **first.get("environment", {})}, source=whole.source, command=whole.command,
        date=first.get("date", datetime.datetime.now().astimezone().isoformat("T", "seconds")),
        proof=proof, error=error, **_measured(whole, rung), **plan, tries=first.get("tries", []),
        peer=None if rung.peer is None else rung.peer.name,
    )  # fmt: skip


def _options(rung: Rung) -> dict[str, Any]:
    """Another system's, beside the run that it was given."""
    return {} if rung.peer is None else {"peer": {rung.peer.name: rung.peer.model_dump()}}


def _measured(whole: Climb, rung: Rung) -> dict[str, Any]:
    """The figures of a record; nothing where there are none."""
    after = whole.figures(rung)
    if after is None:
        return {}
    results = whole.counted(rung)
    first = results[0]
    hosts = [r["host_peak_bytes"] for r in results if r.get("host_peak_bytes")]
    return {
        "tokens_per_s": after.tokens_per_s, "tokens_per_s_iqr": list(after.quartiles), "repeats": after.repeats,
        "step_s": [r["step_s"] for r in results], "peak_bytes": after.peak_bytes, "memory_kind": after.memory_kind,
        **{name: _middle([r.get(name) for r in results]) for name in ("mfu", "targets_per_s", "fill", "data_wait")},
        **_parts(results),
        "losses": first["losses"] if rung.peer else first["proof"]["losses"],
        "grad_norms": first["proof"]["grad_norms"], "seen": first.get("seen", {}),
        "host_peak_bytes": max(hosts, default=None), "longest_seq": first.get("longest_seq"),
    }  # fmt: skip


def _parts(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Seconds of a step by part, the median over the repeats that were profiled; or why none was."""
    seen = [r["parts_s"] for r in results if r.get("parts_s")]
    if not seen:
        return {"parts_note": results[0].get("parts_note")}
    return {"parts_s": {part: statistics.median(s[part] for s in seen) for part in seen[0]}}


def _judged(whole: Climb, rung: Rung, since: Rung | None, proof: Mapping[str, Any] | None) -> tuple[Verdict, list[str]]:
    """The verdict and what is red; another system is never blamed for its speed."""
    after = whole.figures(rung)
    if after is None:
        return "red", [f"failed: {whole.error(rung)}"]
    first = whole.counted(rung)[0]
    bad = [
        *_unsound(whole, rung), stats.wrong(proof, first["proof"]["losses"]), *_turned(whole, rung), first.get("ended")
    ]  # fmt: skip
    if rung.peer is not None and since is None:
        bad.append(f"nothing to compare with: {rung.since} has no figures")
    if rung.peer is not None and since is not None:
        bad += unlike(first, whole.results[since.name][0], rung.peer.begins_alike)
    said = next((b for b in bad if b), None)
    before = None if since is None else whole.figures(since)
    if whole.ladder.longest is not None:
        longest_before = None if since is None or before is None else (whole.run(since).batch.seq, before)
        return stats.judge_longest(whole.run(rung).batch.seq, after, longest_before, whole.ladder.longest.factor, said)
    same = rung.peer is not None or (since is not None and ladder.only_load(since.run, rung.run))
    return stats.judge(after, before, said, only_load=same, alone=rung.mode == "without")


def unlike(theirs: Mapping[str, Any], ours: Mapping[str, Any], alike: bool) -> Iterator[str]:
    """What keeps two systems' figures from being compared.

    Args:
        theirs, ours: a result of each.
        alike: both begin from the same weights.
    """
    for name, value in ours.get("seen", {}).items():
        if name != UNCOMPARED and (found := theirs["seen"].get(name)) != value:
            yield f"not the same work: {name} {found or 'unknown'}, ours {value}"
    whole = theirs["fill"] == ours.get("fill") == 1  # else the same documents lie in other steps
    pair = [r["losses"][0] if r.get("losses") else None for r in (theirs, ours)]
    if alike and whole and pair[0] is not None and pair[1] is not None:
        apart = abs(pair[0] - pair[1]) / abs(pair[1])
        if apart > stats.LOWER["losses"]:
            yield (
                f"not the same work: its first loss is {pair[0]:.5g}, ours {pair[1]:.5g} from the same weights on the "
                f"same tokens; allowed {stats.LOWER['losses']:.0e} (relative)"
            )


def _since(whole: Climb, rung: Rung) -> Rung | None:
    """The nearest rung below that has figures; of another system the very one it is held against."""
    by_name = {r.name: r for r in whole.rungs}
    below = rung.since
    while below is not None and whole.figures(by_name[below]) is None:
        below = None if rung.peer is not None else by_name[below].since
    return None if below is None else by_name[below]


def _told(whole: Climb, rung: Rung) -> list[Rung]:
    """The rungs on its model that have losses; the baseline is the first unless that failed."""
    same = [r for r in whole.rungs if baseline(whole, r) is baseline(whole, rung)]
    return [r for r in same if whole.figures(r) and whole.results[r.name][0]["proof"]["losses"]]


def _proof(whole: Climb, rung: Rung) -> dict[str, Any] | None:
    """Held against the first rung on its model that has losses."""
    told = _told(whole, rung)
    if not told or told[0] is rung or rung not in told:
        return None
    allowed = stats.tolerances(told[0].run, rung.run, ALL)
    numerics = stats.weakest(told[0].run, rung.run, ALL).name
    wanted = whole.results[told[0].name][0]["proof"]
    found = [r["proof"] for r in whole.results[rung.name]]
    angles = [stats.cosine(f.get("gradient"), wanted.get("gradient")) for f in found]
    proofs = [stats.prove(_series(f), _series(wanted), allowed, angle) for f, angle in zip(found, angles, strict=True)]
    worst = max(proofs, key=lambda p: math.inf if p["worst"] is None else p["worst"] / p["tolerance"])
    known = [angle for angle in angles if angle is not None]
    return {"against": told[0].name, "numerics": numerics, **worst, "cosine": min(known, default=None)}


def _turned(whole: Climb, rung: Rung) -> Iterator[str]:
    """Different maths than the first rung's may turn a gradient; the first rung of the same maths is held against.

    What that maths turns gradients by is chance, which other kernels may draw anew: twice as much is allowed, at least.
    """
    told = _told(whole, rung)
    if rung not in told:
        return
    gradients = {r.name: whole.results[r.name][0]["proof"].get("gradient") for r in told}
    before = told[: told.index(rung)]
    promised = {r.name: stats.tolerances(r.run, rung.run, ALL) for r in before}
    for result in whole.results[rung.name]:
        mine = result["proof"].get("gradient")
        angles = {n: stats.cosine(mine, gradients[n]) for n, t in promised.items() if t is not stats.DIFFERENT}
        name, angle = next(((n, a) for n, a in angles.items() if a is not None), ("", None))
        if angle is None:
            continue
        usual = stats.cosine(gradients[name], gradients[told[0].name])
        allowed = max(promised[name]["gradients"], 0 if usual is None else 2 * (1 - usual))
        if 1 - angle > allowed:
            yield (
                f"wrong: its gradients lie {1 - angle:.2g} (1 - cosine) from those of `{name}`, which "
                f"promises the same maths, allowed {allowed:.2g}"
            )


def _series(proof: Mapping[str, Any]) -> dict[str, list[float | None]]:
    return {"losses": proof["losses"], "gradient norms": proof["grad_norms"]}


def _unsound(whole: Climb, rung: Rung) -> Iterator[str | None]:
    """What is wrong with a rung by itself, in any repeat."""
    allowed = stats.tolerances(rung.run, rung.run, ALL)
    different = [r for r in _told(whole, rung)[:1] if stats.tolerances(r.run, rung.run, ALL) is stats.DIFFERENT]
    baselines = [whole.results[r.name][0]["proof"].get("gradient") for r in different]
    for result in whole.results[rung.name]:
        yield stats.dead(result.get("losses", []), result.get("grad_norms", []))
        if (proof := result["proof"])["losses"]:
            angles = (stats.cosine(proof.get("gradient"), gradient) for gradient in baselines)
            yield stats.drifted(proof, allowed, max((1 - a for a in angles if a is not None), default=0.0))


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
