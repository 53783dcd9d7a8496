"""What the processes of a climb have said, as records: each rung's figures, verdict and proof. Pure.

Results of a rung (a dict a repeat, as worker.py and peer_worker.py write them) -> Figures -> judged -> Record.
"""

from __future__ import annotations

import base64
import datetime
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from optrush.bench import ladder
from optrush.bench.ladder import Ladder, Rung
from optrush.bench.peer import UNCOMPARED
from optrush.bench.record import Record, Verdict
from optrush.config import Config, dump_config, parse_yaml
from optrush.technique import Numerics, Part, Technique, instantiate
from optrush.techniques import ALL

# --- What figures say: medians and their spread, whether a difference is more than noise, and when a rung is red. Pure.
#
# A rung is red where it is fast and wrong, slower than it may be, without the effect it was predicted to have, or
# failed. Red is a question to whoever reads, answered with the figures that raised it; it is never a matter of taste.


# How far losses and gradient norms may lie from the baseline's, relative to it, over the proof's steps; and the first
# gradient, by 1 - cosine of the angle.
# float32: rounding in another order. Measured on CPU over five steps: 1e-7 and 1e-6; the rest is room for large models.
# Products in bf16 or fp16: measured 4.4e-4 and 9e-3, gradients of random models of 16 and 32 blocks on a CPU 2e-4 to
# 1e-2, the more the deeper, of the 1B shape on a GPU 7e-4 to 1.1e-3. A wrong divisor moves a norm by its factor.
# Different maths: measured of pure bf16 1e-2 and 1e-1, nearly all from small updates that it rounds away. How much
# that is depends on the learning rate, so such a rung may lie between the baseline's way and standing still; but its
# loss must fall by a fair share of what the baseline's does.
FLOAT32 = {"losses": 1e-4, "gradient norms": 1e-3, "gradients": 1e-6}
LOWER = {"losses": 2e-3, "gradient norms": 3e-2, "gradients": 3e-2}
DIFFERENT = {"losses": 2e-2, "gradient norms": 1e-1}
LEARNT, PROGRESS = 0.5, "progress"

LEAST = 0.01  # medians nearer than this are equal, whatever their spread
SLOW = 0.8  # of the predicted ratio
SLOW_ONCE = 0.5  # the same with one repeat: one process cannot tell a slow technique from a slow moment of its host
SLOW_UNPREDICTED = 0.5
SMALLER_UNPREDICTED = 0.10  # so much less memory excuses a slow rung that nobody predicted
PROMISED_MEMORY = 0.10  # a predicted change of the peak that must show
PROMISED_SPEED = 1.3  # a predicted ratio of speeds that must show
SHOWN = 0.25  # of the promised change of the peak
SAME_MEMORY = {"cuda_allocated": 0.02, "rss": 0.05}  # peaks nearer than this are equal
LEAST_RSS = 64 * 2**20  # a resident set moves by less than this for reasons of its own


@dataclass(frozen=True)
class Figures:
    """What the repeats of one rung measured, and what was predicted (None: nothing was)."""

    speeds: list[list[float]]  # tokens/s of every timed step, a list a repeat
    peak_bytes: int
    memory_kind: str
    predicted_peak_bytes: int | None = None
    predicted_tokens_per_s: float | None = None

    @property
    def repeats(self) -> list[float]:
        return [statistics.median(speeds) for speeds in self.speeds]

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(v for speeds in self.speeds for v in speeds)

    @property
    def quartiles(self) -> tuple[float, float]:
        return quartiles([v for speeds in self.speeds for v in speeds])


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third quartile, of one value too."""
    if len(values) == 1:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def faster(a: Figures, b: Figures) -> bool:
    """Whether `a` is faster than `b` by more than noise.

    With several repeats of each: the slowest of `a` is faster than the fastest of `b`. With one: `a`'s first quartile
    lies above `b`'s third. Either way the medians are more than 1 % apart.
    """
    if a.tokens_per_s <= b.tokens_per_s * (1 + LEAST):
        return False
    if _once(a, b):
        return a.quartiles[0] > b.quartiles[1]
    return min(a.repeats) > max(b.repeats)


# --- the proof


def weakest(before: Config, after: Config, classes: Sequence[type[Technique]]) -> Numerics:
    """The weakest promise among the techniques in which two runs differ; of another implementation: the same maths."""
    differing = {
        n: o for config in (before, after) for n, o in config.with_.items() if before.with_.get(n) != after.with_.get(n)
    }
    found = [t.numerics for t in instantiate(classes, differing)]
    if before.model.implementation != after.model.implementation:
        found.append(Numerics.SAME_MATHS)
    return max(found, key=list(Numerics).index, default=Numerics.EXACT)


def tolerances(before: Config, after: Config, classes: Sequence[type[Technique]]) -> dict[str, float]:
    """By series: float32's where both runs multiply in float32 and promise the same maths, else wider ones."""
    if weakest(before, after, classes) is Numerics.DIFFERENT_MATHS:
        return DIFFERENT
    lower = any(
        config.model.dtype != "float32" or any(Part.PRECISION in t.claims for t in instantiate(classes, config.with_))
        for config in (before, after)
    )
    return LOWER if lower else FLOAT32


def prove(
    found: Mapping[str, Sequence[float | None]],
    baseline: Mapping[str, Sequence[float | None]],
    allowed: Mapping[str, float],
    cosine: float | None = None,
) -> dict[str, Any]:
    """The largest relative difference over the proof's steps, of the series that comes nearest to its tolerance.

    Args:
        found, baseline, allowed: by series, "losses" and "gradient norms"; None is a value that was not finite.
        cosine: of the angle between the first gradients, if it is known; different maths may turn them as it likes.

    Returns:
        {"of": series, "tolerance", "worst" (None: not finite), "ok"}.
    """
    rows = []
    for series in found:
        tolerance = allowed[series]
        still = baseline[series][0] if allowed is DIFFERENT else None
        worst = max(_apart(a, b, still) for a, b in zip(found[series], baseline[series], strict=True))
        rows.append((worst / tolerance, series, tolerance, worst))
    if cosine is not None and "gradients" in allowed:
        rows.append(((1 - cosine) / allowed["gradients"], "gradients", allowed["gradients"], 1 - cosine))
    if allowed is DIFFERENT:
        missing = 1 - _fallen(found["losses"], baseline["losses"])
        rows.append((missing / (1 - LEARNT), PROGRESS, 1 - LEARNT, missing))
    share, series, tolerance, worst = max(rows)
    return {
        "of": series,
        "tolerance": tolerance,
        "worst": worst if math.isfinite(worst) else None,
        "ok": share <= 1,
    }


def cosine(a: Mapping[str, str] | None, b: Mapping[str, str] | None) -> float | None:
    """Of the angle between two gradients, by their sketches (sketch.py).

    None where one is unknown, of other tensors, not finite, or zero.
    """
    if a is None or b is None or a["of"] != b["of"]:
        return None
    x, y = (np.frombuffer(base64.b64decode(s["sums"]), np.float32).astype(np.float64) for s in (a, b))
    with np.errstate(all="ignore"):
        found = float(x @ y / np.sqrt((x @ x) * (y @ y)))
    return found if np.isfinite(found) else None


def _fallen(found: Sequence[float | None], baseline: Sequence[float | None]) -> float:
    """The fall of the loss over the proof's steps, as a share of the baseline's; 1 where that does not fall."""
    ends = (found[0], found[-1], baseline[0], baseline[-1])
    first, last, first_wanted, last_wanted = (math.nan if v is None else v for v in ends)
    wanted = first_wanted - last_wanted
    return (first - last) / wanted if wanted > LEAST * abs(first_wanted) else 1.0


def _apart(value: float | None, wanted: float | None, still: float | None) -> float:
    """Relative difference to what the baseline has; nothing for a value between that and where it began (`still`)."""
    if value is None or wanted is None:
        return math.inf
    ends = (wanted, wanted if still is None else still)
    return max(min(ends) - value, value - max(ends), 0.0) / max(abs(wanted), 1e-12)


# --- red


def drifted(proof: Mapping[str, Any], allowed: Mapping[str, float], usual: float = 0.0) -> str | None:
    """The proof's first step, taken again after the timed steps, is not what it was.

    Args:
        usual: 1 - cosine of the angle with the baseline's. A maths that turns a gradient as far does so by chance, and
            kernels that add in another order each time draw that anew.
    """
    again = proof.get("again")
    if not again:
        return None
    for series, name in (("losses", "losses"), ("gradient norms", "grad_norms")):
        if _apart(again[name][0], proof[name][0], None) > allowed[series]:
            return f"wrong: after the timed steps its {series} are others than before, from the same start"
    angle = cosine(again.get("gradient"), proof.get("gradient"))
    if angle is not None and 1 - angle > max(usual, allowed.get("gradients", math.inf)):
        return "wrong: after the timed steps its gradients are others than before, from the same start"
    return None


def dead(losses: Sequence[float | None], norms: Sequence[float | None]) -> str | None:
    """A step of the timed run did not learn."""
    if any(v is None for v in (*losses, *norms)):
        return "wrong: a timed step's loss or gradient norm is not finite"
    if any(v == 0 for v in norms):
        return "wrong: a timed step has no gradient"
    return None


def wrong(proof: Mapping[str, Any] | None, losses: Sequence[float | None]) -> str | None:
    """It does not learn what the baseline learns."""
    if any(v is None for v in losses):
        return "wrong: a loss is not finite"
    if proof is None or proof["ok"]:
        return None
    if proof["worst"] is None:
        return f"wrong: {proof['of']} are not finite"
    if proof["of"] == PROGRESS:
        return (
            f"wrong: it learns less: its loss falls by {1 - proof['worst']:.0%} of what that of "
            f"`{proof['against']}` falls by, at this learning rate"
        )
    return (
        f"wrong: {proof['of']} lie {proof['worst']:.2g} (relative) from those of `{proof['against']}`, "
        f"allowed {proof['tolerance']:.0e}"
    )


def slow(after: Figures, before: Figures, alone: bool) -> str | None:
    """It is slower than the plan predicts, or than anybody would accept unasked.

    Args:
        alone: a technique was taken away: without a prediction, nobody knows how much slower that may be.
    """
    if not faster(before, after):
        return None
    ratio = after.tokens_per_s / before.tokens_per_s
    predicted = _ratio(after.predicted_tokens_per_s, before.predicted_tokens_per_s)
    if predicted is not None:
        if ratio < (SLOW_ONCE if _once(after, before) else SLOW) * min(1.0, predicted):
            return f"slower than it may be: {ratio:.2f}x of `since`, predicted {predicted:.2f}x"
        return None
    smaller = after.peak_bytes < before.peak_bytes * (1 - SMALLER_UNPREDICTED)
    if ratio < SLOW_UNPREDICTED and not smaller and not alone:
        return f"slower than it may be: {ratio:.2f}x of `since`, and no smaller"
    return None


def idle(after: Figures, before: Figures) -> str | None:
    """It was predicted to change memory or speed, and did not."""
    if after.predicted_peak_bytes is not None and before.predicted_peak_bytes is not None:
        promised = after.predicted_peak_bytes - before.predicted_peak_bytes
        measured = after.peak_bytes - before.peak_bytes
        large = abs(promised) > PROMISED_MEMORY * before.predicted_peak_bytes
        if large and after.memory_kind == "rss":
            large = abs(promised) > LEAST_RSS
        if large and measured / promised < SHOWN:
            return (
                f"no effect: the peak changed by {measured / 2**20:+,.0f} MiB, predicted {promised / 2**20:+,.0f} MiB"
            )
    predicted = _ratio(after.predicted_tokens_per_s, before.predicted_tokens_per_s)
    same = abs(after.peak_bytes - before.peak_bytes) <= SAME_MEMORY["cuda_allocated"] * before.peak_bytes
    told = after.memory_kind != "rss" or not _once(after, before)  # see SLOW_ONCE; a GPU has fewer such moments
    if told and predicted is not None and predicted > PROMISED_SPEED and same and not faster(after, before):
        ratio = after.tokens_per_s / before.tokens_per_s
        return f"no effect: {ratio:.2f}x of `since`, predicted {predicted:.2f}x, and the memory is the same"
    return None


def judge(
    after: Figures, before: Figures | None, first_red: str | None, *, only_load: bool, alone: bool
) -> tuple[Verdict, list[str]]:
    """The verdict of a rung that has figures, and the reasons where it is red.

    Args:
        before: of the rung it is compared with; None for the first.
        first_red: what `wrong` said.
        only_load: the two differ in T or sizes of batches only, which nobody can be blamed for.
        alone: a technique was taken away.
    """
    red = [first_red] if first_red else []
    if before is not None and not only_load:
        red += [said for said in (slow(after, before, alone), idle(after, before)) if said]
    if red:
        return "red", red
    if before is None:
        return "baseline", []
    if faster(after, before):
        return "faster", []
    if smaller(after, before):
        return "smaller", []
    return ("slower" if faster(before, after) else "noise"), []


def judge_longest(
    reached: int, after: Figures, before: tuple[int, Figures] | None, factor: float, red: str | None
) -> tuple[Verdict, list[str]]:
    """The verdict of a rung that looked for the longest row, which is known to a factor; of equal ones memory decides.

    Args:
        before: what the rung that it is compared with reached, and its figures there; None for the first.
    """
    if red:
        return "red", [red]
    if before is None:
        return "baseline", []
    reached_before, figures = before
    if reached > reached_before * factor:
        return "longer", []
    if reached_before > reached * factor:
        return "shorter", []
    return ("smaller" if reached == reached_before and smaller(after, figures) else "noise"), []


def smaller(a: Figures, b: Figures) -> bool:
    """Whether a's peak lies below b's by more than the peaks of equal runs differ."""
    return a.peak_bytes < b.peak_bytes * (1 - SAME_MEMORY[a.memory_kind])


def _once(a: Figures, b: Figures) -> bool:
    return min(len(a.speeds), len(b.speeds)) == 1


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


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
    predict: Callable[[Rung, Config], dict[str, Any]] = lambda rung, run: {}
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

    def run(self, rung: Rung) -> Config:
        """What the rung's figures are of: its run, or that with the longest row that trained."""
        found = next((r["longest_seq"] for r in self.counted(rung) if "longest_seq" in r), None)
        return rung.config if found is None else ladder.at_length(rung.config, found)

    def counted(self, rung: Rung) -> list[dict[str, Any]]:
        """The repeats that figures are made of: all, or those that reached no longer row than the others."""
        results = self.results.get(rung.name, [])
        seqs = [r["longest_seq"] for r in results if "longest_seq" in r]
        return [r for r in results if r.get("longest_seq") == min(seqs)] if seqs else results

    def plan(self, rung: Rung) -> dict[str, Any]:
        """What the plan says of that."""
        config = self.run(rung)
        place = (rung.name, config.batch.seq)
        if place not in self.predicted:
            self.predicted[place] = self.predict(rung, config)
        return self.predicted[place]


def baseline(whole: Climb, rung: Rung) -> Rung:
    """Whose documents the rung's proof is made of: the first of our own rungs on the same model."""
    m = rung.config.model
    same = (
        r for r in whole.rungs if (r.config.model.path, r.config.model.shape) == (m.path, m.shape) and r.peer is None
    )
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
    config = whole.run(rung)
    changes = (
        rung.changes if since is None or since.name == rung.since else ladder.differences(since.config, rung.config)
    )
    if note := first.get("proof", {}).get("note"):
        changes += f"; {note}"
    plan = whole.plan(rung)
    if whole.ladder.warmup == 0:
        changes += "; its speed is that of first steps, which compile"
        plan = {**plan, "predicted_tokens_per_s": None, "ceiling_s": {}}  # of steps that do not
    micro = first.get("micro_tokens", config.batch.micro_tokens)
    return Record(
        ladder=whole.ladder.name, rung=rung.name, case=rung.case, mode=rung.mode,
        since=since.name if since else None, changes=changes, device=_device(whole, rung), ranks=1,
        seq=config.batch.seq, micro_tokens=micro if isinstance(micro, int) else config.batch.seq,
        verdict=verdict, red=red,
        config={**parse_yaml(dump_config(config), "the run")[0], **_options(rung)},
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
        *_unsound(whole, rung), wrong(proof, first["proof"]["losses"]), *_turned(whole, rung), first.get("ended")
    ]  # fmt: skip
    if rung.peer is not None and since is None:
        bad.append(f"nothing to compare with: {rung.since} has no figures")
    if rung.peer is not None and since is not None:
        bad += unlike(first, whole.results[since.name][0], rung.peer.begins_alike)
    said = next((b for b in bad if b), None)
    before = None if since is None else whole.figures(since)
    if whole.ladder.longest is not None:
        longest_before = None if since is None or before is None else (whole.run(since).batch.seq, before)
        return judge_longest(whole.run(rung).batch.seq, after, longest_before, whole.ladder.longest.factor, said)
    same = rung.peer is not None or (since is not None and ladder.only_load(since.config, rung.config))
    return judge(after, before, said, only_load=same, alone=rung.mode == "without")


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
        if apart > LOWER["losses"]:
            yield (
                f"not the same work: its first loss is {pair[0]:.5g}, ours {pair[1]:.5g} from the same weights on the "
                f"same tokens; allowed {LOWER['losses']:.0e} (relative)"
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
    allowed = tolerances(told[0].config, rung.config, ALL)
    numerics = weakest(told[0].config, rung.config, ALL).name
    wanted = whole.results[told[0].name][0]["proof"]
    found = [r["proof"] for r in whole.results[rung.name]]
    angles = [cosine(f.get("gradient"), wanted.get("gradient")) for f in found]
    proofs = [prove(_series(f), _series(wanted), allowed, angle) for f, angle in zip(found, angles, strict=True)]
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
    promised = {r.name: tolerances(r.config, rung.config, ALL) for r in before}
    for result in whole.results[rung.name]:
        mine = result["proof"].get("gradient")
        angles = {n: cosine(mine, gradients[n]) for n, t in promised.items() if t is not DIFFERENT}
        name, angle = next(((n, a) for n, a in angles.items() if a is not None), ("", None))
        if angle is None:
            continue
        usual = cosine(gradients[name], gradients[told[0].name])
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
    allowed = tolerances(rung.config, rung.config, ALL)
    different = [r for r in _told(whole, rung)[:1] if tolerances(r.config, rung.config, ALL) is DIFFERENT]
    baselines = [whole.results[r.name][0]["proof"].get("gradient") for r in different]
    for result in whole.results[rung.name]:
        yield dead(result.get("losses", []), result.get("grad_norms", []))
        if (proof := result["proof"])["losses"]:
            angles = (cosine(proof.get("gradient"), gradient) for gradient in baselines)
            yield drifted(proof, allowed, max((1 - a for a in angles if a is not None), default=0.0))


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
