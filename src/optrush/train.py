"""The loop, one page, and what stands around it: when to evaluate, when to save, when to stop.

The loop never learns a technique's name: whatever a technique does, it did to the job's callables before step 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from optrush.data import sampler
from optrush.job import Job
from optrush.meter import Meter


@dataclass(frozen=True)
class Plan:
    """Which steps a run takes, and what follows each."""

    job: Job
    length: sampler.Plan
    done: int = 0  # steps that were completed before

    @property
    def total(self) -> int:
        return self.length.steps

    @property
    def steps(self) -> Iterator[int]:
        """Step numbers from 1; ends early, on the same step everywhere, when the ranks agreed to stop."""
        for n in range(self.done + 1, self.total + 1):
            yield n
            if self.job.stopped:
                return

    def evaluates(self, step: int) -> bool:
        if self.job.evaluation is None:
            return False
        return step == self.total or _due(step, self.job.run.train.eval_every, self.total)

    def saves(self, step: int) -> bool:
        if self.job.stopped:
            return self.job.stopped == 1  # a failed run leaves its last good checkpoint the newest
        return step == self.total or _due(step, self.job.run.train.save_every, self.total)


def train(job: Job, meter: Meter, plan: Plan, save: Callable[[int], None]) -> None:
    for step in plan.steps:  # ends early, on the same step everywhere
        with meter.waiting():
            batches = next(job.batches)  # this rank's micro-batches of one step
        terms = job.total(sum(b.n_terms for b in batches))  # over the data axes; a host integer
        job.begin(step)  # learning rate and random state are functions of the step
        loss = job.gradients(batches, terms)  # forward, backward, reduction
        norm, skipped = job.update()  # unscale, guard, clip, step, free
        meter.tick(step, batches, loss, norm, skipped)  # reads the device only when this step logs
        if plan.evaluates(step):
            with meter.aside():
                meter.evaluated(step, *evaluate(job))
        if plan.saves(step):
            with meter.aside():
                save(step)


class Evaluated(NamedTuple):
    """What an evaluation found, of all ranks."""

    loss: float  # mean over the held-out terms: target tokens, or pairs
    targets: int
    figures: dict[str, float]  # means over the terms, of what the objective says beside its loss


def evaluate(job: Job) -> Evaluated:
    """One pass over the held-out documents."""
    assert job.evaluation is not None
    for figure in job.figures.values():
        figure.zero_()
    loss, terms, targets = 0.0, 0, 0
    for batch in job.evaluation:
        loss += job.losses([batch]).item()
        terms += batch.n_terms
        targets += batch.n_targets
    terms, targets = job.total(terms), job.total(targets)
    figures = {name: job.share(figure.clone()).item() / terms for name, figure in job.figures.items()}
    return Evaluated(loss / terms, targets, figures)


def _due(step: int, every: float | None, total: int) -> bool:
    """Whether a cadence (below 1: a fraction of the run; else steps) falls on this step."""
    if every is None:
        return False
    return step % (max(1, round(every * total)) if every < 1 else int(every)) == 0
