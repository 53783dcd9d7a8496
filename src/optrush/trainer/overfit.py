"""Train repeatedly on the first N batches until their loss is near zero: `optrush train --overfit N`.

A model that cannot learn one batch will not learn a data set, and here the reason is easy to find: only the weights
change between steps. Uses the run's callables and learning rate (constant after the warm-up); writes no run files.
"""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise

import torch

from optrush import console
from optrush.config import Config
from optrush.data.batch import Batch
from optrush.data.sampler import close_workers_after
from optrush.decide import Decided, changed, refuse_sampled
from optrush.errors import ConfigError
from optrush.trainer import dpo_reference
from optrush.trainer.build import join_ranks
from optrush.trainer.run import RunRequest, batches, build_to_fit
from optrush.trainer.trainer import Trainer, set_step

STEPS = 200  # at most, by default
NEAR = 0.05  # a loss that counts as zero, in nats per target
CLOSE = 1.01  # up to this multiple of the lowest possible loss counts as reached
JUMPS = 0.3  # share of the rises in all changes of the loss
FLAT = 0.02  # of the total fall: the loss still falls if the last quarter fell by more
EVERY = 10  # steps between log lines

Windows = list[list[Batch]]  # this rank's micro-batches of each step


@dataclass(frozen=True)
class OverfitResult:
    """The report of `--overfit`; `cause` is None if the batches were learned."""

    reached: bool
    cause: str | None
    found: str
    do: str
    batches: int
    terms: float  # target tokens, or pairs
    steps: int
    first_loss: float | None
    loss: float | None  # None: not finite
    floor: float  # the lowest possible loss
    target: float
    lr: float
    seconds: float

    def text(self) -> str:
        """Return the result for people."""
        first, last = ("not finite" if x is None else f"{x:.4f}" for x in (self.first_loss, self.loss))
        what = f"{self.batches} batch{'es' * (self.batches != 1)}, {self.terms} terms of the loss"
        lines = [f"{what}: loss {first} -> {last} in {self.steps} steps, {self.seconds:.0f} s"]
        lines += [f"found: {self.found}"] if self.found else []
        lines += [f"do:    {self.do}"] if self.do else []
        return "\n".join(lines)


@dataclass(frozen=True)
class OverfitTrace:
    """Losses and gradient norms of the steps."""

    losses: list[float]  # mean of each pass over the batches, in training mode
    before: float  # the same in evaluation mode (no dropout): with the first weights
    after: float  # and with the last
    norms: list[float]  # of the gradient, per step
    rounds: bool  # bfloat16 weights are rounded to nearest
    lr: float
    steps: int


def run_overfit(resolved: Decided, count: int, most: int = STEPS) -> OverfitResult:
    """Train on the run's first `count` batches for at most `most` steps; every rank calls it.

    Raises:
        UserError: see `run`; or more batches than the run or the steps have.
    """
    refuse_sampled(resolved.config, f"--overfit {count}")
    if 2 * count > most:
        do = f"use fewer batches, or --overfit-steps {10 * count}"
        raise ConfigError(f"--overfit {count}", f"{most} steps, fewer than two passes over each batch", do)
    begun, optim = time.monotonic(), resolved.config.optim
    warmup = optim.warmup if optim.warmup < 1 else 0.03  # a full run's warm-up would be too long here
    constant = changed(resolved.config, {"optim.schedule": "constant", "optim.warmup": warmup})
    resolved = dataclasses.replace(resolved, config=constant)
    group = join_ranks(resolved)
    trainer, plan = build_to_fit(RunRequest(resolved), group, None, dpo_reference.zero_reference, first_steps=count)
    if plan.total < count:
        raise ConfigError(f"--overfit {count}", f"a run of {plan.total} steps", f"use at most --overfit {plan.total}")
    source = batches(trainer, plan)
    with close_workers_after(source):
        windows = list(islice(source, count))
    windows = dpo_reference.add_reference(trainer, windows)
    terms = [trainer.all_reduce_terms(sum(b.n_terms for b in window)) for window in windows]
    if trainer.world.rank == 0:
        console.say(trainer.describe())
    floor = lowest_loss(resolved.config)
    target = max(NEAR, CLOSE * floor)
    trace = OverfitTrace([math.nan], math.nan, math.nan, [], False, optim.lr, 0)
    if sum(terms):
        trace = _train(trainer, windows, terms, most, target)
        hint = None if min(trace.losses[-1], trace.after) <= target else likely_cause(trace)
    else:
        do = "look at the rows: optrush data show; longer rows (batch.seq), or another data.train_on"
        hint = ("no targets", "these batches have no target tokens", do)
    cause, found, do = hint or (None, "the model learns these batches", "")
    loss = trace.losses[-1]
    if hint is None and loss > target:
        found += f": {trace.after:.4f} in evaluation, {loss:.4f} in the last step, where dropout is on"
        loss = trace.after
    return OverfitResult(
        reached=hint is None, cause=cause, found=found, do=do, batches=count, terms=sum(terms), steps=trace.steps,
        first_loss=trace.before if math.isfinite(trace.before) else None, loss=loss if math.isfinite(loss) else None,
        floor=floor, target=target, lr=optim.lr, seconds=time.monotonic() - begun,
    )  # fmt: skip


def lowest_loss(config: Config) -> float:
    """Return the lowest possible mean loss without contradictory rows: for smoothed pairs the labels' entropy."""
    if config.dpo is None or config.dpo.loss != "sigmoid":
        return 0.0
    e = config.dpo.label_smoothing
    return -sum(p * math.log(p) for p in (e, 1 - e) if p)


def _train(trainer: Trainer, windows: Windows, terms: list[float], most: int, target: float) -> OverfitTrace:
    """Run the steps; their control flow is the same on every rank."""
    trainer.set_step = partial(set_step, trainer, steps=most)
    before = _eval_loss(trainer, windows, terms)
    losses, norms, bad, n = list[float](), list[float](), 0, 0
    while n + len(windows) <= most and bad < trainer.max_skipped_updates:
        total = 0.0
        for window, count in zip(windows, terms, strict=True):
            n += 1
            trainer.set_step(n)
            loss = trainer.forward_backward(window, count).item()
            norm, skipped = trainer.optimizer_step()
            bad = bad + 1 if bool(skipped) else 0
            total += loss * count
            norms.append(norm.item())
            if n % EVERY == 0 or n == 1:
                console.say(f"step {n}/{most}  loss {loss:.4f}  lr {trainer.lr.item():.2e}  norm {norms[-1]:.3g}")
        losses.append(total / sum(terms))
        if losses[-1] <= target:
            break
    rounds = trainer.rounding == "nearest" and any(t.local.dtype == torch.bfloat16 for t in trainer.trained)
    after = _eval_loss(trainer, windows, terms)
    return OverfitTrace(losses, before, after, norms, rounds, trainer.config.optim.lr, n)


def _eval_loss(trainer: Trainer, windows: Windows, terms: list[float]) -> float:
    return sum(trainer.eval_loss(window).item() for window in windows) / sum(terms)


def likely_cause(trace: OverfitTrace) -> tuple[str, str, str]:
    """Return the probable reason why the loss is not near zero: (cause, finding, remedy)."""
    losses, lr = trace.losses, trace.lr
    fall = f"{losses[0]:.4f} -> {losses[-1]:.4f}"
    if not math.isfinite(trace.before):
        do = "look for values that are not finite in the model's weights, or use another precision"
        return "not finite", f"the loss is {trace.before} before any weight has changed", do
    ups, downs = (sum(max(0.0, s * (b - a)) for a, b in pairwise(losses)) for s in (1, -1))
    rises = trace.after > (1 + FLAT) * trace.before
    jumps = rises or ups > max(FLAT * losses[0], JUMPS * (ups + downs))
    if jumps or not all(map(math.isfinite, (losses[-1], trace.after, trace.norms[-1]))):
        found = f"the loss jumps or is not finite after {trace.steps} steps: {fall}"
        return "lr too large", found, f"--set optim.lr={lr / 10:g}"
    if max(trace.norms) == 0:
        do = "check which parameters are trained, and whether the model's weights are all zero"
        return "no gradient", "the gradient is zero in every step: no trained weight changes the loss", do
    late = losses[max(0, min(len(losses) * 3 // 4, len(losses) - 2))] - losses[-1]
    if late > FLAT * (losses[0] - losses[-1]) or losses[0] - losses[-1] < FLAT * losses[0]:
        do = f"--set optim.lr={lr * 10:g}; or if it nearly converged, --overfit-steps {2 * trace.steps}"
        if trace.rounds:
            do = f"--with bf16:rounding=stochastic (bfloat16 rounds small updates away), or {do}"
        return "lr too small", f"the loss falls too slowly: {fall}", do
    do = "look at the rows (optrush data show): equal prompts with different answers cannot be learned; "
    return "stuck", f"the loss has stopped falling: {fall}", do + f"then another optim.lr, {lr / 10:g} or {lr * 10:g}"
