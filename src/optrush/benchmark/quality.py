"""Compare the training results of rungs: train each to its end with several seeds, and compare held-out losses.

Parent: `check_quality`, then a process for each rung and seed (runner.py) -> QualityState -> QualityRecords.
Process, `python -m optrush.benchmark.quality IN OUT`: `train_run` trains like `optrush train`; `score_run`, in a
separate process, generates answers with the trained model.

Comparing two rungs: runs of one seed have the same order of rows and the same held-out rows, so a seed's effect
on all rungs (the mean over rungs) is subtracted first. The remaining variance is pooled over the rungs, because three
seeds hardly determine it. A rung with more than `UNSTEADY` times the median variance keeps its own, and does not widen
the others'. The spread of a difference of two means is its standard error, sqrt((sum of both variances) / seeds); the
margin is the spread times Student's t at 95 %. A difference within the margin is `equal`. Source: randomized blocks,
Fisher, The Design of Experiments, 1935.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from optrush.benchmark.ladder import Quality, Rung, changes_since
from optrush.benchmark.record import Keep, QualityRecord, QualityVerdict, answer_request
from optrush.benchmark.results import BenchState, shared_facts
from optrush.config import Config, Sampling, parse_config
from optrush.console import err
from optrush.errors import ConfigError, DataError, RunError
from optrush.files import write_whole
from optrush.launch import launched
from optrush.objectives.rewards import last_number
from optrush.report.quality import columns

if TYPE_CHECKING:
    from optrush.generation import Prompt

UNSTEADY = 10.0  # times the median variance of the rungs
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # for 1 to 10 degrees of freedom
BATCHES = (64, 8, 1)  # prompts per batch; the next size if memory runs out

# --- the statistics


def student(freedom: int) -> float:
    """Return the two-sided 95 % quantile of Student's t; above 10 degrees of freedom by its series."""
    return T95[freedom - 1] if freedom <= len(T95) else 1.96 + 2.372 / freedom + 2.823 / freedom**2


def variances(values: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, int]]:
    """Return each rung's variance over seeds and its degrees of freedom, pooled as in the module's docstring.

    Args:
        values: by rung, one figure per seed; at least two rungs and two seeds, the same seeds in each.
    """
    table = np.array(list(values.values()), dtype=float)
    distances, freedom = table - table.mean(1, keepdims=True), table.shape[1] - 1
    each, steady = np.zeros(0), np.ones(len(table), dtype=bool)
    for _ in range(2):  # a seed's effect is the mean over the steady rungs, known after the first pass
        each = ((distances - distances[steady].mean(0)) ** 2).sum(1) / freedom
        steady = each <= UNSTEADY * np.median(each) if steady.all() else steady
    others = int(steady.sum()) - 1
    pooled = float(each[steady].sum()) / others, others * freedom
    rows = zip(values, each, steady, strict=True)
    return {name: pooled if is_steady else (float(v), freedom) for name, v, is_steady in rows}


def compare(values: Mapping[str, Sequence[float]], rung: str, since: str) -> tuple[float, float | None, float | None]:
    """Return the difference of two rungs' means, its spread and its margin; None with one seed."""
    rung_values, base = values[rung], values[since]
    difference = statistics.fmean(rung_values) - statistics.fmean(base)
    if len(rung_values) < 2:
        return difference, None, None
    known = variances(values)
    spread = math.sqrt((known[rung][0] + known[since][0]) / len(rung_values))
    return difference, spread, student(min(known[rung][1], known[since][1])) * spread


def judge_quality(difference: float, margin: float | None) -> QualityVerdict:
    """Return the verdict on a difference of held-out losses."""
    if margin is None:
        return "one seed"
    return "equal" if abs(difference) <= margin else "worse" if difference > 0 else "better"


# --- before anything runs


def check_quality(config: Config, quality: Quality) -> None:
    """Raise UserError if no rows are held out, or if they cannot be scored."""
    if config.data.eval is None:
        found = "no `data.eval`: rungs are compared by held-out loss"
        raise ConfigError("a ladder with `quality`", found, "add data.eval: FILE, or --set data.eval=0.05")
    if quality.score is not None:
        held_out_prompts(config, quality.samples)


def held_out_prompts(config: Config, samples: int) -> list[Prompt]:
    """Return the first held-out chats, each with the number of its reference answer.

    Raises:
        UserError: the held-out rows are not from a file, or a reference answer has no number.
    """
    from optrush.data import readers, schema
    from optrush.data.tokenize import cache_root
    from optrush.generation import prompt_of

    if not isinstance(config.data.eval, str):
        found = f"`data.eval: {config.data.eval}`, a fraction of the data, drawn anew by each seed"
        raise ConfigError("`quality.score: number`", found, "hold out a file: data.eval: FILE")
    files = readers.find_files(config.data.eval, cache_root(config.data.cache))
    rows = (row for file in files for row in readers.read_rows(file, config.data.reading))
    rules = schema.row_rules(config)
    prompts = [prompt_of(where, schema.parse_row(where, row, rules)) for where, row in islice(rows, samples)]
    for prompt in prompts:
        if prompt.reference is None or last_number(prompt.reference) is None:
            found = "no number in its reference answer"
            raise DataError(f"`quality.score: number` at {prompt.where}", found, "remove `score` from the ladder")
    return prompts


# --- the process of a run


def answer_quality_request() -> None:
    """Answer one request: {"run": YAML, "began": seconds since 1970} trains; with "samples" it scores that run."""

    def answer(request: dict[str, Any], keep: Keep) -> dict[str, Any]:
        config = parse_config(request["run"], "run", own=True)
        return score_run(config, request["samples"]) if "samples" in request else train_run(config, request["began"])

    answer_request(answer)


class _Clock:
    """Records the time of the held-out loss before step 1."""

    def __init__(self, began: float) -> None:
        self.began, self.start_s = began, 0.0

    def step(self, step: int, metrics: Mapping[str, Any]) -> None: ...
    def save(self, step: int, checkpoint: Path) -> None: ...
    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.start_s = self.start_s or time.time() - self.began


def train_run(config: Config, began: float) -> dict[str, Any]:
    """Train a run to its end and return its figures, from its metrics.jsonl."""
    from optrush.decide import decide
    from optrush.report.run import load_run
    from optrush.trainer import distributed
    from optrush.trainer.run import RunRequest, run

    clock, decided = _Clock(began), decide(config)
    with distributed.leaving():
        outcome = run(RunRequest(decided, callbacks=(clock,)))
    if outcome.code:
        raise RunError("the run", "a signal stopped it", "optrush bench ... --resume")
    if launched()[0]:
        return {}  # rank 0 has the figures
    log = load_run(Path(config.output))
    evals = [[m["step"], m["eval_loss"]] for m in log.evals]
    if any(loss is None for _, loss in evals):
        raise RunError("the run", "a held-out loss is not finite", "lower optim.lr")
    return {
        "held_out": evals[-1][1], "evals": evals, "eval_targets": log.evals[-1]["eval_target_tokens"],
        "tokens_per_s": [m["tokens_per_s"] for m in log.steps[1:] or log.steps],
        "peak_bytes": max(m["peak_bytes"] for m in log.steps), "memory_kind": log.steps[-1]["memory_kind"],
        "start_s": clock.start_s, "device": decided.env.device.name,
    }  # fmt: skip


def score_run(config: Config, samples: int) -> dict[str, Any]:
    """Return the percentage of correct greedy answers of a trained run; write them to its answers.jsonl."""
    from optrush.generation import find_model, generate_answers

    prompts, source = held_out_prompts(config, samples), find_model(config.output)
    for batch in BATCHES:
        try:
            texts = [a.text for a in generate_answers(source, prompts, Sampling(greedy=True), seed=0, batch=batch)]
            break
        except RunError:
            if batch == BATCHES[-1]:
                raise
    right = [last_number(text) == last_number(p.reference or "") for text, p in zip(texts, prompts, strict=True)]
    lines = [
        json.dumps({"prompt": p.shown(), "answer": text, "reference": p.reference, "right": is_right}) + "\n"
        for p, text, is_right in zip(prompts, texts, right, strict=True)
    ]
    write_whole(Path(config.output) / "answers.jsonl", "".join(lines))
    return {"score": 100 * statistics.fmean(right), "samples": len(right)}


# --- the records


class QualityState(BenchState):
    """The state of a bench of whole runs: a repeat is a seed."""

    def error(self, rung: Rung) -> str | None:
        """Return why the rung has no figures, such as an evaluation on different tokens from the first rung's."""
        results = self.results.get(rung.name, [])
        if (failed := super().error(rung)) or not results:
            return failed
        first = next(r.name for r in self.rungs if self.results.get(r.name) and not super(QualityState, self).error(r))
        for counted, expected in ((r["eval_targets"], s["eval_targets"]) for r, s in zip(results, self.results[first])):
            if counted != expected:
                return f"{counted:,} held-out target tokens, `{first}` has {expected:,}: the losses cannot be compared"
        return None

    def all_records(self) -> Sequence[QualityRecord]:
        """Build the records of all rungs that were tried or rejected, over their common seeds."""
        tried = [r for r in self.rungs if r.name in self.results or r.name in self.refused]
        sound = {r.name: self.results[r.name] for r in tried if self.error(r) is None}
        seeds = min(map(len, sound.values()), default=0)
        return [self._record(r, {name: figures[:seeds] for name, figures in sound.items()}) for r in tried]

    def _record(self, rung: Rung, sound: Mapping[str, Sequence[Mapping[str, Any]]]) -> QualityRecord:
        """Build the record of a rung; `sound`: the results of all rungs with figures."""
        common, plan = shared_facts(self, rung), self.plan(rung)
        common |= {key: plan[key] for key in ("predicted_tokens_per_s", "predicted_peak_bytes")}
        if rung.name not in sound:
            return QualityRecord(**common, since=rung.since, verdict="failed", error=self.error(rung))
        runs, since = sound[rung.name], self._compared(rung, sound)
        if since is not None and since != rung.since:
            other = next(r for r in self.rungs if r.name == since)
            common["changes"] = changes_since(other, rung.config, rung.ranks, rung.env)
        values = {key: [r[key] for r in runs] for key in ("held_out", "evals", "eval_targets")}
        alone = [r for r in runs if not r.get("beside")] or runs  # the others shared their GPU
        medians = {key: statistics.median(r[key] for r in alone) for key in ("start_s", "seconds")}
        figures: dict[str, Any] = {
            **values, **medians, "seeds": [rung.config.seed + n for n in range(len(runs))],
            "loss": statistics.fmean(values["held_out"]),
            "tokens_per_s": statistics.median(statistics.median(r["tokens_per_s"]) for r in alone),
            "peak_bytes": max(r["peak_bytes"] for r in runs), "memory_kind": runs[0]["memory_kind"],
        }  # fmt: skip
        if scored := "score" in runs[0]:
            scores = [r["score"] for r in runs]
            figures |= {"scores": scores, "score": statistics.fmean(scores), "samples": runs[0]["samples"]}
        if since is None:
            return QualityRecord(**common, **figures, since=None, verdict="first")
        names = ("difference", "spread", "margin")
        losses = {name: [r["held_out"] for r in results] for name, results in sound.items()}
        figures |= zip(names, compare(losses, rung.name, since), strict=True)
        if scored:
            rights = {name: [r["score"] for r in results] for name, results in sound.items()}
            figures |= zip((f"score_{name}" for name in names), compare(rights, rung.name, since), strict=True)
        verdict = judge_quality(figures["difference"], figures["margin"])
        return QualityRecord(**common, **figures, since=since, verdict=verdict)

    def _compared(self, rung: Rung, sound: Mapping[str, Any]) -> str | None:
        """Return the reference rung: `since`, else the nearest earlier or the first rung with figures."""
        by_name, below = {r.name: r for r in self.rungs}, rung.since
        while below is not None and below not in sound:
            below = by_name[below].since
        first = below or next(iter(sound))
        return None if first == rung.name else first


# --- the table


def print_quality(records: Sequence[QualityRecord]) -> None:
    """Print the table, and the errors of rungs without figures."""
    names = [[heading, *cells] for heading, cells in columns(records)]
    left, widths = ("rung", "verdict", "compared with"), [max(map(len, column)) for column in names]
    for row in zip(*names, strict=True):
        cells = (c.ljust(w) if n[0] in left else c.rjust(w) for c, w, n in zip(row, widths, names, strict=True))
        err.print("  ".join(cells).rstrip(), markup=False, soft_wrap=True)
    for r in records:
        if r.error is not None:
            err.print(f"{r.rung}: failed: {' '.join(r.error.split())}", markup=False)


if __name__ == "__main__":
    answer_quality_request()
