"""Turn the results of a ladder's processes into records: each rung's figures, proof and verdict. Pure.

Results of a rung (a dict per repeat, as written by worker.py) -> Figures -> proof -> verdict -> Record.

A rung is red if it is fast and wrong, slower than allowed, without the predicted effect, or failed. Each
reason is given with its figures.
"""

from __future__ import annotations

import base64
import datetime
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from optrush.benchmark import ladder
from optrush.benchmark.ladder import Ladder, Rung
from optrush.benchmark.peer import UNCOMPARED
from optrush.benchmark.record import QualityRecord, Record, Verdict
from optrush.config import Config, dump_config, parse_yaml
from optrush.decide import with_rate
from optrush.technique import ModelSpec, Numerics, Part, Technique, instantiate
from optrush.techniques import ALL

# Tolerances of the proof's steps: relative difference to the baseline for losses and gradient norms; for the first
# gradient, 1 - cosine of the angle.
# float32: rounding in another order. Measured on CPU over five steps: 1e-7 and 1e-6; the rest is room for large models.
# Matmuls in bf16 or fp16: measured 4.4e-4 and 9e-3; gradients of random models with 16 and 32 blocks on a CPU 2e-4 to
# 1e-2, increasing with depth; of the 1B shape on a GPU 7e-4 to 1.1e-3. A wrong divisor changes a norm by its factor.
# Different maths: measured for pure bf16 1e-2 and 1e-1, mostly from small updates that are rounded away. That depends
# on the learning rate, so the losses may be anywhere between the baseline's and no change at all; but the loss must
# fall by a fair share of the baseline's fall.
# Adapters next to matmuls in bf16 or fp16: their first outputs are smaller than the last place of the sum. Matmuls that
# add before rounding keep them, others lose them (docs/log/open.md). So if two runs differ in this, losses may differ
# by a share of their fall: measured 0.2 at a learning rate of 2e-4 (8B, an H200).
FLOAT32 = {"losses": 1e-4, "gradient norms": 1e-3, "gradients": 1e-6}
LOWER = {"losses": 2e-3, "gradient norms": 3e-2, "gradients": 3e-2}
ADAPTED, FALL_SHARE = {**LOWER}, 0.3
DIFFERENT = {"losses": 2e-2, "gradient norms": 1e-1}
LEARNT, PROGRESS = 0.5, "progress"

LEAST = 0.01  # medians nearer than this are equal at any spread
SLOW = 0.8  # share of the predicted ratio below which a rung is too slow
SLOW_ONCE = 0.5  # the same with one repeat: one process cannot tell a slow technique from a slow moment of the host
SLOW_UNPREDICTED = 0.5
SMALLER_UNPREDICTED = 0.10  # memory saving that excuses a slow rung without a prediction
PROMISED_MEMORY = 0.10  # a predicted change of the peak that must be measurable
PROMISED_SPEED = 1.3  # a predicted ratio of speeds that must be measurable
SHOWN = 0.25  # share of the predicted change of the peak that must be measured
SAME_MEMORY = {"cuda_allocated": 0.02, "rss": 0.05}  # peaks nearer than this are equal
LEAST_RSS = 64 * 2**20  # smaller changes of a resident set are noise

Series = Mapping[str, Sequence[float | None]]  # "losses" and "gradient norms" of the proof's steps; None: not finite


# --- figures and their spread


@dataclass(frozen=True)
class Figures:
    """The measurements of one rung's repeats, and the prediction (None: no prediction)."""

    speeds: list[list[float]]  # tokens/s of every timed step, one list per repeat
    peak_bytes: int
    memory_kind: str
    predicted_peak_bytes: int | None = None
    predicted_tokens_per_s: float | None = None

    @property
    def repeats(self) -> list[float]:
        """The median of each repeat."""
        return [statistics.median(speeds) for speeds in self.speeds]

    @property
    def tokens_per_s(self) -> float:
        """The median over all steps of all repeats."""
        return statistics.median(v for speeds in self.speeds for v in speeds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and the third quartile of all steps; works for a single step."""
        values = [v for speeds in self.speeds for v in speeds]
        if len(values) == 1:
            return values[0], values[0]
        first, _, third = statistics.quantiles(values, n=4, method="inclusive")
        return first, third


def faster(a: Figures, b: Figures) -> bool:
    """Return whether `a` is faster than `b` by more than noise.

    With several repeats of each, the slowest of `a` must be faster than the fastest of `b`; with one, `a`'s first
    quartile must be above `b`'s third. In both cases the medians must be more than 1 % apart.
    """
    if a.tokens_per_s <= b.tokens_per_s * (1 + LEAST):
        return False
    if _once(a, b):
        return a.quartiles[0] > b.quartiles[1]
    return min(a.repeats) > max(b.repeats)


def smaller(a: Figures, b: Figures) -> bool:
    """Return whether a's peak is below b's by more than the peaks of equal runs differ."""
    return a.peak_bytes < b.peak_bytes * (1 - SAME_MEMORY[a.memory_kind])


def _once(a: Figures, b: Figures) -> bool:
    return min(len(a.speeds), len(b.speeds)) == 1


def _predicted_ratio(after: Figures, before: Figures) -> float | None:
    a, b = after.predicted_tokens_per_s, before.predicted_tokens_per_s
    return None if a is None or b is None else a / b


# --- the proof that a rung learns like the baseline


def weakest(before: Config, after: Config, classes: Sequence[type[Technique]]) -> Numerics:
    """Return the weakest guarantee of the techniques that differ between two runs; across decoders, the same maths."""
    differing = {
        n: o for config in (before, after) for n, o in config.with_.items() if before.with_.get(n) != after.with_.get(n)
    }
    classes_of = [t.numerics for t in instantiate(classes, differing)]
    if before.model.implementation != after.model.implementation:
        classes_of.append(Numerics.SAME_MATHS)
    return max(classes_of, key=list(Numerics).index, default=Numerics.EXACT)


def tolerances(before: Config, after: Config, classes: Sequence[type[Technique]]) -> dict[str, float]:
    """Return tolerances by series: float32's if both runs have the same maths in float32, else wider ones."""
    if weakest(before, after, classes) is Numerics.DIFFERENT_MATHS:
        return DIFFERENT
    claims = [[t.claims for t in instantiate(classes, config.with_)] for config in (before, after)]
    lower = any(config.model.dtype != "float32" for config in (before, after))
    lower = lower or any(Part.PRECISION in claimed for each in claims for claimed in each)
    adapted = all(any(Part.ADAPTERS in claimed for claimed in each) for each in claims)
    first, second = (_described(config, classes).adds_unrounded for config in (before, after))
    return FLOAT32 if not lower else ADAPTED if adapted and first != second else LOWER


def _described(config: Config, classes: Sequence[type[Technique]]) -> ModelSpec:
    """Return the kernels that the configuration's techniques choose."""
    spec = ModelSpec()
    for technique in instantiate(classes, config.with_):
        spec = technique.describe(spec)
    return spec


def compare_series(
    measured: Series, baseline: Series, allowed: Mapping[str, float], cosine: float | None = None
) -> dict[str, Any]:
    """Return the largest relative difference over the proof's steps, for the series nearest to its tolerance.

    Args:
        allowed: tolerance by series.
        cosine: of the angle between the first gradients, if known; without a limit for different maths.

    Returns:
        {"of": series, "tolerance", "worst" (None: not finite), "ok"}.
    """
    rows = []
    for series in measured:
        tolerance = updated = allowed[series]
        if allowed is ADAPTED and series == "losses":  # steps after an update
            updated = max(tolerance, FALL_SHARE * max(_fall(measured[series]), _fall(baseline[series])))
        start = baseline[series][0] if allowed is DIFFERENT else None
        pairs = zip(measured[series], baseline[series], strict=True)
        first, *others = [_difference(value, expected, start) for value, expected in pairs]
        rows.append((first / tolerance, series, tolerance, first))
        rows += [(worst / updated, series, updated, worst) for worst in others]
    if cosine is not None and "gradients" in allowed:
        rows.append(((1 - cosine) / allowed["gradients"], "gradients", allowed["gradients"], 1 - cosine))
    if allowed is DIFFERENT:
        missing = 1 - _progress(measured["losses"], baseline["losses"])
        rows.append((missing / (1 - LEARNT), PROGRESS, 1 - LEARNT, missing))
    share, series, tolerance, worst = max(rows)
    return {"of": series, "tolerance": tolerance, "worst": worst if math.isfinite(worst) else None, "ok": share <= 1}


def cosine(a: Mapping[str, str] | None, b: Mapping[str, str] | None) -> float | None:
    """Return the cosine of the angle between two gradients, from their sketches (worker.sketch).

    None if one is unknown, not finite or zero, or if their tensors differ.
    """
    if a is None or b is None or a["of"] != b["of"]:
        return None
    x, y = (np.frombuffer(base64.b64decode(s["sums"]), np.float32).astype(np.float64) for s in (a, b))
    with np.errstate(all="ignore"):
        value = float(x @ y / np.sqrt((x @ x) * (y @ y)))
    return value if np.isfinite(value) else None


def _fall(losses: Sequence[float | None]) -> float:
    """Return the fall of the loss relative to the first; 0 if it does not fall."""
    first, last = losses[0], losses[-1]
    return 0.0 if not first or last is None or not math.isfinite(last) else max(0.0, (first - last) / abs(first))


def _progress(losses: Sequence[float | None], baseline: Sequence[float | None]) -> float:
    """Return the fall of the loss as a fraction of the baseline's; 1 if the baseline's does not fall."""
    ends = (losses[0], losses[-1], baseline[0], baseline[-1])
    first, last, first_expected, last_expected = (math.nan if v is None else v for v in ends)
    expected = first_expected - last_expected
    return (first - last) / expected if expected > LEAST * abs(first_expected) else 1.0


def _difference(value: float | None, expected: float | None, start: float | None = None) -> float:
    """Return the relative difference to the baseline's value; 0 for a value between it and the `start`."""
    if value is None or expected is None:
        return math.inf
    ends = (expected, expected if start is None else start)
    return max(min(ends) - value, value - max(ends), 0.0) / max(abs(expected), 1e-12)


# --- reasons for red


def drift_reason(proof: Mapping[str, Any], allowed: Mapping[str, float], usual: float = 0.0) -> str | None:
    """Return the reason if the proof's first step, repeated after the timed steps, has changed.

    Args:
        usual: 1 - cosine of the angle with the baseline's. Maths that turns a gradient by this angle does so at random,
            and nondeterministic kernels turn it differently each time.
    """
    again = proof.get("again")
    if not again:
        return None
    for series, name in (("losses", "losses"), ("gradient norms", "grad_norms")):
        if _difference(again[name][0], proof[name][0]) > allowed[series]:
            return f"wrong: after the timed steps its {series} differ from those before, from the same start"
    angle = cosine(again.get("gradient"), proof.get("gradient"))
    if angle is not None and 1 - angle > max(usual, allowed.get("gradients", math.inf)):
        return "wrong: after the timed steps its gradients differ from those before, from the same start"
    return None


def dead_step_reason(losses: Sequence[float | None], norms: Sequence[float | None]) -> str | None:
    """Return the reason if a timed step did not learn."""
    if any(v is None for v in (*losses, *norms)):
        return "wrong: a timed step's loss or gradient norm is not finite"
    if any(v == 0 for v in norms):
        return "wrong: a timed step has no gradient"
    return None


def mismatch_reason(proof: Mapping[str, Any] | None, losses: Sequence[float | None]) -> str | None:
    """Return the reason if the rung learns differently from the baseline."""
    if any(v is None for v in losses):
        return "wrong: a loss is not finite"
    if proof is None or proof["ok"]:
        return None
    if proof["worst"] is None:
        return f"wrong: {proof['of']} are not finite"
    if proof["of"] == PROGRESS:
        return (
            f"wrong: it learns less: its loss falls by {1 - proof['worst']:.0%} of the fall of "
            f"`{proof['against']}`, at this learning rate"
        )
    return (
        f"wrong: {proof['of']} differ by {proof['worst']:.2g} (relative) from `{proof['against']}`, "
        f"allowed {proof['tolerance']:.0e}"
    )


def slowdown_reason(after: Figures, before: Figures, alone: bool) -> str | None:
    """Return the reason if the rung is slower than predicted, or too slow to be accepted without a prediction.

    Args:
        alone: the rung removes a technique: without a prediction, any slowdown is allowed.
    """
    if not faster(before, after):
        return None
    ratio = after.tokens_per_s / before.tokens_per_s
    predicted = _predicted_ratio(after, before)
    if predicted is not None:
        if ratio < (SLOW_ONCE if _once(after, before) else SLOW) * min(1.0, predicted):
            return f"slower than it may be: {ratio:.2f}x of `since`, predicted {predicted:.2f}x"
        return None
    less = after.peak_bytes < before.peak_bytes * (1 - SMALLER_UNPREDICTED)
    if ratio < SLOW_UNPREDICTED and not less and not alone:
        return f"slower than it may be: {ratio:.2f}x of `since`, and no less memory"
    return None


def no_effect_reason(after: Figures, before: Figures) -> str | None:
    """Return the reason if a change of memory or speed was predicted, and not measured."""
    if after.predicted_peak_bytes is not None and before.predicted_peak_bytes is not None:
        promised = after.predicted_peak_bytes - before.predicted_peak_bytes
        measured = after.peak_bytes - before.peak_bytes
        large = abs(promised) > PROMISED_MEMORY * before.predicted_peak_bytes
        if after.memory_kind == "rss":
            large = large and abs(promised) > LEAST_RSS
        if large and measured / promised < SHOWN:
            change, expected = (f"{size / 2**20:+,.0f} MiB" for size in (measured, promised))
            return f"no effect: the peak changed by {change}, predicted {expected}"
    predicted = _predicted_ratio(after, before)
    same = abs(after.peak_bytes - before.peak_bytes) <= SAME_MEMORY["cuda_allocated"] * before.peak_bytes
    steady = after.memory_kind != "rss" or not _once(after, before)  # see SLOW_ONCE; a GPU has fewer slow moments
    if steady and predicted is not None and predicted > PROMISED_SPEED and same and not faster(after, before):
        ratio = after.tokens_per_s / before.tokens_per_s
        return f"no effect: {ratio:.2f}x of `since`, predicted {predicted:.2f}x, with the same memory"
    return None


def incomparable_reasons(theirs: Mapping[str, Any], ours: Mapping[str, Any], alike: bool) -> Iterator[str]:
    """Yield the reasons why two systems' figures cannot be compared.

    Args:
        theirs, ours: one result of each system.
        alike: both start from the same weights.
    """
    for name, value in ours.get("seen", {}).items():
        if name != UNCOMPARED and (other := theirs["seen"].get(name)) != value:
            yield f"not the same work: {name} {other or 'unknown'}, ours {value}"
    full = theirs["fill"] == ours.get("fill") == 1  # else the steps have different documents
    first, expected = (r["losses"][0] if r.get("losses") else None for r in (theirs, ours))
    if not alike or not full or first is None or expected is None:
        return
    if abs(first - expected) / abs(expected) > LOWER["losses"]:
        yield (
            f"not the same work: its first loss is {first:.5g}, ours {expected:.5g} from the same weights on the "
            f"same tokens; allowed {LOWER['losses']:.0e} (relative)"
        )


# --- verdicts


def judge(
    after: Figures, before: Figures | None, first_red: str | None, *, only_load: bool, alone: bool
) -> tuple[Verdict, list[str]]:
    """Return the verdict of a rung with figures, and the reasons if it is red.

    Args:
        before: figures of the reference rung; None for the first.
        first_red: a known reason.
        only_load: the two differ only in T or batch sizes: no speed is required.
        alone: the rung removes a technique.
    """
    red = [first_red] if first_red else []
    if before is not None and not only_load:
        red += [reason for reason in (slowdown_reason(after, before, alone), no_effect_reason(after, before)) if reason]
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
    """Return the verdict of a search for the longest row, which is known to a factor; memory decides between equals.

    Args:
        before: the longest row of the reference rung, and its figures there; None for the first.
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


# --- the state of a bench, and its records


@dataclass
class BenchState:
    """The rungs of a ladder, and the results of their processes so far."""

    ladder: Ladder
    rungs: list[Rung]
    out: Path
    repeats: int
    limit_s: float  # per process
    command: str
    source: dict[str, Any]
    machine: dict[str, str]
    exact_limit: bool = False  # the limit also holds on a slow machine
    at_once: int = 1  # whole runs at the same time
    rehearses: bool = False  # a process runs the largest step first, like a run
    refused: dict[str, str] = field(default_factory=dict)  # rung -> why it cannot start
    absent: dict[str, str] = field(default_factory=dict)  # rung -> why it is skipped without a record
    predict: Callable[[Rung, Config], dict[str, Any]] = lambda rung, run: {}
    predicted: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)  # (rung, T) -> prediction
    results: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # rung -> one result per repeat

    leaves_out: ClassVar[bool] = True  # skip rungs with more ranks than GPUs

    @property
    def asked(self) -> str:
        """The request in errors about the folder."""
        return f"--out {self.out}"

    @property
    def again(self) -> str:
        """Return the remedy that continues a stopped bench."""
        return f"continue with: --resume (--out {self.out})"

    def required(self, rung: Rung) -> bool:
        """Return whether the bench ends if the rung is rejected."""
        return rung is self.rungs[0]

    def missing(self) -> list[tuple[int, Rung]]:
        """Return (repeat, rung) of the pending processes in order, without failed rungs.

        Repeats are interleaved, so that a warm device or a busy host affects all rungs alike.
        """
        order = [(repeat, rung) for repeat in range(self.repeats) for rung in self.rungs]
        return [(n, r) for n, r in order if len(self.results.get(r.name, [])) <= n and not self.error(r)]

    def error(self, rung: Rung) -> str | None:
        """Return why the rung has no figures: it was rejected, or one of its processes failed."""
        failed = (r["error"] for r in self.results.get(rung.name, []) if "error" in r)
        return self.refused.get(rung.name) or self.absent.get(rung.name) or next(failed, None)

    def counted(self, rung: Rung) -> list[dict[str, Any]]:
        """Return the repeats that count: all, or in a search for the longest row those with the shortest row."""
        results = self.results.get(rung.name, [])
        seqs = [r["longest_seq"] for r in results if "longest_seq" in r]
        return [r for r in results if r.get("longest_seq") == min(seqs)] if seqs else results

    def config(self, rung: Rung) -> Config:
        """Return the configuration of the rung's figures: its own, or the one with the longest row that trained."""
        seq = next((r["longest_seq"] for r in self.counted(rung) if "longest_seq" in r), None)
        return rung.config if seq is None else ladder.at_length(rung.config, seq)

    def plan(self, rung: Rung) -> dict[str, Any]:
        """Return the prediction for that configuration."""
        config = self.config(rung)
        key = (rung.name, config.batch.seq)
        if key not in self.predicted:
            self.predicted[key] = self.predict(rung, config)
        return self.predicted[key]

    def figures(self, rung: Rung) -> Figures | None:
        """Return the combined measurements of all repeats, if the rung has figures."""
        if self.error(rung) or not self.results.get(rung.name):
            return None
        results, plan = self.counted(rung), self.plan(rung)
        return Figures(
            [r["tokens_per_s"] for r in results], max(r["peak_bytes"] for r in results), results[0]["memory_kind"],
            plan["predicted_peak_bytes"], plan["predicted_tokens_per_s"],
        )  # fmt: skip

    def baseline(self, rung: Rung) -> Rung:
        """Return the rung with the documents of the rung's proof: our first one on the same model."""
        m = rung.config.model
        ours = (r for r in self.rungs if r.peer is None)
        same = (r for r in ours if (r.config.model.path, r.config.model.shape) == (m.path, m.shape))
        return next(same, rung)

    def proved(self, rung: Rung) -> list[Rung]:
        """Return the rungs on its model with losses in the proof; the first one is the reference of the others."""
        same = [r for r in self.rungs if self.baseline(r) is self.baseline(rung)]
        return [r for r in same if self.figures(r) and self.proofs(r)[0]["losses"]]

    def proofs(self, rung: Rung) -> list[dict[str, Any]]:
        """Return the proof of each repeat."""
        return [r["proof"] for r in self.results[rung.name]]

    def since(self, rung: Rung) -> Rung | None:
        """Return the nearest earlier rung with figures; for another system only its reference rung."""
        by_name = {r.name: r for r in self.rungs}
        below = rung.since
        while below is not None and self.figures(by_name[below]) is None:
            below = None if rung.peer is not None else by_name[below].since
        return None if below is None else by_name[below]

    def records(self) -> list[Record]:
        """Build the records of all rungs that were tried or rejected, in the ladder's order."""
        return [_record(self, r) for r in self.rungs if r.name in self.results or r.name in self.refused]

    def all_records(self) -> Sequence[Record | QualityRecord]:
        """Return the records for records.jsonl."""
        return self.records()


def _record(state: BenchState, rung: Rung) -> Record:
    """Build the record of one rung, compared with `since`."""
    error, since, config = state.error(rung), state.since(rung), state.config(rung)
    first = (state.results.get(rung.name) or [{}])[0]
    proof = None if error else _proof(state, rung)
    verdict, red = _verdict(state, rung, since, proof)
    changes = rung.changes
    if since is not None and since.name != rung.since:
        changes = ladder.changes_since(since, rung.config, rung.ranks, rung.env)
    if note := first.get("proof", {}).get("note"):
        changes += f"; {note}"
    plan = state.plan(rung)
    if state.ladder.warmup == 0:
        changes += "; its speed includes compiling"
        plan = {**plan, "predicted_tokens_per_s": None, "ceiling_s": {}}  # predicted for compiled steps
    micro = first.get("micro_tokens", config.batch.micro_tokens)
    peer = {} if rung.peer is None else {"peer": {rung.peer.name: rung.peer.model_dump()}}
    facts = shared_facts(state, rung)
    return Record(
        **{**facts, "changes": changes, "config": {**facts["config"], **peer}}, mode=rung.mode,
        since=since.name if since else None, micro_tokens=micro if isinstance(micro, int) else config.batch.seq,
        verdict=verdict, red=red, proof=proof, error=error, **_measured(state, rung), **plan,
        tries=first.get("tries", []), peer=None if rung.peer is None else rung.peer.name,
    )  # fmt: skip


def shared_facts(state: BenchState, rung: Rung) -> dict[str, Any]:
    """Return the common fields of all records: rung, machine, code and time."""
    first, config = (state.results.get(rung.name) or [{}])[0], state.config(rung)
    # A rung that never ran gets the others' device.
    results = [r for name in (rung.name, *state.results) for r in state.results.get(name, [])]
    return {
        "ladder": state.ladder.name, "rung": rung.name, "case": rung.case, "changes": rung.changes,
        "device": next((str(r["device"]) for r in results if "device" in r), "unknown"), "ranks": rung.ranks,
        "seq": config.batch.seq, "config": parse_yaml(dump_config(with_rate(config)), "the run", own=True)[0],
        "environment": {**state.machine, **first.get("environment", {})}, "source": state.source,
        "command": state.command,
        "date": first.get("date", datetime.datetime.now().astimezone().isoformat("T", "seconds")),
    }  # fmt: skip


def _measured(state: BenchState, rung: Rung) -> dict[str, Any]:
    """Return the figures of a record, or an empty dict."""
    figures = state.figures(rung)
    if figures is None:
        return {}
    results = state.counted(rung)
    first, values = results[0], dict[str, Any]()
    for name in ("mfu", "targets_per_s", "fill", "data_wait"):
        known = [r[name] for r in results if r.get(name) is not None]
        values[name] = statistics.median(known) if known else None
    if profiled := [r["parts_s"] for r in results if r.get("parts_s")]:
        values["parts_s"] = {part: statistics.median(p[part] for p in profiled) for part in profiled[0]}
    else:
        values["parts_note"] = first.get("parts_note")
    return {
        "tokens_per_s": figures.tokens_per_s, "tokens_per_s_iqr": list(figures.quartiles), "repeats": figures.repeats,
        "step_s": [r["step_s"] for r in results], "peak_bytes": figures.peak_bytes,
        "memory_kind": figures.memory_kind, **values,
        "losses": first["losses"] if rung.peer else first["proof"]["losses"],
        "grad_norms": first["proof"]["grad_norms"], "seen": first.get("seen", {}),
        "host_peak_bytes": max((r["host_peak_bytes"] for r in results if r.get("host_peak_bytes")), default=None),
        "longest_seq": first.get("longest_seq"),
    }  # fmt: skip


def _verdict(
    state: BenchState, rung: Rung, since: Rung | None, proof: Mapping[str, Any] | None
) -> tuple[Verdict, list[str]]:
    """Return the verdict and the reasons for red; another system is never red for its speed."""
    after = state.figures(rung)
    if after is None:
        return "red", [f"failed: {state.error(rung)}"]
    before = None if since is None else state.figures(since)
    first = state.counted(rung)[0]
    reasons = [
        *_unsound(state, rung), mismatch_reason(proof, first["proof"]["losses"]), *_turned(state, rung),
        first.get("ended"),
    ]  # fmt: skip
    if rung.peer is not None and since is None:
        reasons.append(f"nothing to compare with: {rung.since} has no figures")
    if rung.peer is not None and since is not None:
        reasons += incomparable_reasons(first, state.results[since.name][0], rung.peer.begins_alike)
    red = next((reason for reason in reasons if reason), None)
    if state.ladder.longest is not None:
        pair = None if since is None or before is None else (state.config(since).batch.seq, before)
        return judge_longest(state.config(rung).batch.seq, after, pair, state.ladder.longest.factor, red)
    only_load = rung.peer is not None or (since is not None and ladder.only_load(since.config, rung.config))
    return judge(after, before, red, only_load=only_load, alone=rung.mode == "without")


def _proof(state: BenchState, rung: Rung) -> dict[str, Any] | None:
    """Compare with the first rung with losses on its model; the worst repeat counts."""
    proved = state.proved(rung)
    if rung not in proved[1:]:
        return None
    reference, expected = proved[0], state.proofs(proved[0])[0]
    allowed = tolerances(reference.config, rung.config, ALL)
    repeats = state.proofs(rung)
    angles = [cosine(p.get("gradient"), expected.get("gradient")) for p in repeats]
    proofs = [
        compare_series(_series(p), _series(expected), allowed, angle) for p, angle in zip(repeats, angles, strict=True)
    ]
    worst = max(proofs, key=lambda p: math.inf if p["worst"] is None else p["worst"] / p["tolerance"])
    known = [angle for angle in angles if angle is not None]
    numerics = weakest(reference.config, rung.config, ALL).name
    return {"against": reference.name, "numerics": numerics, **worst, "cosine": min(known, default=None)}


def _series(proof: Mapping[str, Any]) -> dict[str, list[float | None]]:
    return {"losses": proof["losses"], "gradient norms": proof["grad_norms"]}


def _unsound(state: BenchState, rung: Rung) -> Iterator[str | None]:
    """Yield a rung's own errors in any repeat."""
    allowed = tolerances(rung.config, rung.config, ALL)
    reference = state.proved(rung)[:1]
    different = [r for r in reference if tolerances(r.config, rung.config, ALL) is DIFFERENT]
    baselines = [state.proofs(r)[0].get("gradient") for r in different]
    for result in state.results[rung.name]:
        yield dead_step_reason(result.get("losses", []), result.get("grad_norms", []))
        if (proof := result["proof"])["losses"]:
            angles = (cosine(proof.get("gradient"), gradient) for gradient in baselines)
            yield drift_reason(proof, allowed, max((1 - a for a in angles if a is not None), default=0.0))


def _turned(state: BenchState, rung: Rung) -> Iterator[str]:
    """Yield an error if a gradient differs from the first rung's with the same maths.

    Different maths can turn a gradient; the angle is random and can change with other kernels, so at least twice the
    angle is allowed.
    """
    proved = state.proved(rung)
    if rung not in proved:
        return
    gradients = {r.name: state.proofs(r)[0].get("gradient") for r in proved}
    limits = {r.name: tolerances(r.config, rung.config, ALL) for r in proved[: proved.index(rung)]}
    for proof in state.proofs(rung):
        gradient = proof.get("gradient")
        angles = {n: cosine(gradient, gradients[n]) for n, limit in limits.items() if limit is not DIFFERENT}
        name, angle = next(((n, a) for n, a in angles.items() if a is not None), ("", None))
        if angle is None:
            continue
        usual = cosine(gradients[name], gradients[proved[0].name])
        allowed = max(limits[name]["gradients"], 0 if usual is None else 2 * (1 - usual))
        if 1 - angle > allowed:
            yield (
                f"wrong: its gradients differ by {1 - angle:.2g} (1 - cosine) from `{name}`, which "
                f"promises the same maths, allowed {allowed:.2g}"
            )
