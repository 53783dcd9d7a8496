"""Measure the batch and the learning rate of a run, in a process: `python -m optrush.benchmark.trial IN OUT`.

`batch`: the gradient noise scale. A gradient of B tokens is the whole data's gradient G plus noise of variance S / B.
Its squared norms at two sizes of B determine both; at B = S / |G|^2 noise and gradient are equal. Much smaller batches
waste steps, much larger ones waste tokens. Source: McCandlish, Kaplan, Amodei and the OpenAI Dota team, 2018,
https://arxiv.org/abs/1812.06162, appendix A.1.

`lr`: a race of rates on the same data with the same schedule. After a sixteenth, an eighth and three quarters of its
steps the half with the larger held-out loss is dropped, so that a race of eight takes a quarter of a grid's steps.
Source: successive halving, Jamieson and Talwalkar, 2016, https://arxiv.org/abs/1502.07943. Differs from the source: the
stops. The last two rates run long, because a large rate is ahead before the schedule falls, and a little behind after.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from optrush.benchmark.record import Keep, answer_request
from optrush.benchmark.worker import MetricLines
from optrush.config import Config, parse_config
from optrush.data.batch import Batch
from optrush.data.sampler import close_workers_after
from optrush.decide import decide
from optrush.errors import ConfigError
from optrush.files import regular
from optrush.trainer import distributed, dpo_reference
from optrush.trainer.build import build
from optrush.trainer.checkpoint import write_tensors
from optrush.trainer.run import batches, preflight
from optrush.trainer.trainer import RunPlan, Trainer, evaluate, set_step, train

FEWEST_DRAWS = 4
STOPS = (1 / 16, 1 / 8, 3 / 4)  # shares of a race's steps; each stop halves the rates
SHORTEST = 3  # steps to the first stop of a race


def answer_trial_request() -> None:
    """Answer one request: {"kind": "batch" or "lr", "run": YAML, "budget_s", "rates", "states": folder}."""

    def answer(request: dict[str, Any], keep: Keep) -> dict[str, Any]:
        until = time.monotonic() + request["budget_s"]
        config = parse_config(request["run"], "run", own=True)
        with distributed.leaving():
            trainer, plan = assemble(config)
            if request["kind"] == "batch":
                return noise_result(noise_draws(trainer, plan, until))
            return rate_race(trainer, plan, request["rates"], until, States(trainer, Path(request["states"])))

    answer_request(answer)


def assemble(config: Config) -> tuple[Trainer, RunPlan]:
    """Build the trainer of a run and run its largest step once."""
    resolved = decide(config)
    trainer = build(resolved)
    dpo_reference.fill_reference(trainer, resolved)
    length = config.train
    plan = RunPlan(trainer, trainer.stream.plan(None if length.steps else length.epochs, length.steps))
    if (refusal := preflight(trainer, plan)) is not None:
        raise refusal
    return trainer, plan


# --- training states on disk


class States:
    """Trained weights, optimizer states and states of techniques by name, in a folder of its own."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        folder.mkdir()
        self.trainer, self.folder, self.techniques = trainer, folder, dict[str, dict[str, Any]]()

    def _tensors(self) -> list[tuple[str, Tensor]]:
        states = self.trainer.optimizer.state()
        tensors = [(f"param/{t.name}", t.local) for t in self.trainer.trained]
        return tensors + [(f"state/{kind}/{n}", s) for n, by_kind in states.items() for kind, s in by_kind.items()]

    def save(self, name: str) -> None:
        """Store the trainer's current state."""
        self.forget(name)
        write_tensors(self.folder / name, self._tensors())
        self.techniques[name] = {kind: copy.deepcopy(state.save()) for kind, state in self.trainer.state.items()}

    def restore(self, name: str) -> None:
        """Restore a stored state."""
        with torch.no_grad(), safe_open(regular(self.folder / name), framework="pt") as saved:
            for key, tensor in self._tensors():
                tensor.copy_(saved.get_tensor(key))
        for technique, state in self.techniques[name].items():
            self.trainer.state[technique].load(copy.deepcopy(state))

    def forget(self, name: str) -> None:
        """Remove a state if it exists."""
        (self.folder / name).unlink(missing_ok=True)


# --- the gradient noise scale


class Draw(NamedTuple):
    """Squared gradient norms of one step: the mean over its micro-batches, and that of their sum."""

    step: int
    small: float
    big: float
    inverse: float  # mean of 1 / (terms of a micro-batch)
    terms: float  # in all micro-batches
    slots: int


def noise_draws(trainer: Trainer, plan: RunPlan, until: float) -> list[Draw]:
    """Train until the run or the time is over; return the norms of each step."""
    draws = list[Draw]()
    trainer.batches = batches(trainer, plan)
    with close_workers_after(trainer.batches):
        for step in plan.steps:
            if draws and time.monotonic() > until:
                break
            _draw(trainer, plan, step, draws)
    if len(draws) < FEWEST_DRAWS:
        found = f"{len(draws)} steps with finite gradients of two micro-batches or more"
        raise ConfigError("the gradient noise scale", found, "use more data, or a larger --budget")
    return draws


def _draw(trainer: Trainer, plan: RunPlan, step: int, draws: list[Draw]) -> None:
    """Run a step, and add its norms if they are finite."""
    window = [b for b in next(trainer.batches) if b.n_terms]
    set_step(trainer, step, plan.total)
    small = [_squared_norm(trainer, [b]) for b in window]
    big = _squared_norm(trainer, window)
    trainer.optimizer_step()
    values = (sum(small) / max(1, len(small)), big, sum(1 / b.n_terms for b in window) / max(1, len(window)))
    if len(window) > 1 and all(map(math.isfinite, values)):
        counts = sum(b.n_terms for b in window), sum(b.tokens.numel() for b in window)
        draws.append(Draw(step, *values, *counts))


def _squared_norm(trainer: Trainer, window: list[Batch]) -> float:
    trainer.forward_backward(window, sum(b.n_terms for b in window))
    return float((trainer.grad_norm() / trainer.scale).double().square().item())


def noise_scale(draws: Iterable[Draw]) -> tuple[float, float]:
    """Return (S, |G|^2), each the mean of unbiased estimates; S is in terms, such as target tokens.

    E |g|^2 = |G|^2 + S / terms, at the two sizes of each draw.
    """
    pairs = []
    for d in draws:
        noise = (d.small - d.big) / (d.inverse - 1 / d.terms)
        pairs.append((noise, d.big - noise / d.terms))
    return sum(s for s, _ in pairs) / len(pairs), sum(g for _, g in pairs) / len(pairs)


def noise_result(draws: Sequence[Draw]) -> dict[str, Any]:
    """Return S, |G|^2, batch slots per term, and the running estimate of S / |G|^2 in slots over the steps."""
    per_term = sum(d.slots for d in draws) / sum(d.terms for d in draws)
    running = []
    for n, d in enumerate(draws, 1):
        noise, squared = noise_scale(draws[:n])
        running.append([d.step, noise / squared * per_term if squared > 0 < noise else None])
    noise, squared = noise_scale(draws)
    return {"noise": noise, "squared": squared, "slots_per_term": per_term, "running": running}


# --- the race of learning rates


Leg = Callable[[float, int, int], float]  # (rate, steps done, step to stop at) -> held-out loss
Forget = Callable[[float], object]  # takes a dropped rate


def race(
    rates: Sequence[float], stops: Sequence[int], leg: Leg, forget: Forget = lambda rate: None
) -> list[dict[str, Any]]:
    """Race rates from stop to stop, dropping the half with the larger losses; return every leg, the winner's last.

    Args:
        forget: called with each rate that can no longer win.
    """
    alive, done, legs = list(rates), 0, list[dict[str, Any]]()
    for stop in stops:
        losses: dict[float, float] = {}
        for rate in alive:
            losses[rate] = leg(rate, done, stop)
            legs.append({"rate": rate, "step": stop, "loss": losses[rate] if math.isfinite(losses[rate]) else None})
            for other in sorted(losses, key=lambda r: losses[r])[len(alive) // 2 :]:
                forget(other)
        alive, done = sorted(alive, key=lambda r: losses[r])[: len(alive) // 2], stop
    best = next(run for run in reversed(legs) if run["rate"] == alive[0])
    return [*(run for run in legs if run is not best), best]


def rate_race(trainer: Trainer, plan: RunPlan, rates: Sequence[float], until: float, states: States) -> dict[str, Any]:
    """Race rates over the whole run, or over the steps that the time allows."""
    states.save("begin")
    steps = _race_steps(trainer, plan, rates, until, states)
    stops = [round(share * steps) for share in STOPS]
    out = set[float]()

    def leg(rate: float, done: int, stop: int) -> float:
        name = f"{rates.index(rate)}"
        states.restore(name if done else "begin")
        loss = train_leg(trainer, plan, rate, done, stop, steps)
        for other in out:
            states.forget(f"{rates.index(other)}")
        if stop != stops[-1]:
            states.save(name)
        return loss

    return {"legs": race(rates, stops, leg, out.add), "steps": steps}


def _race_steps(trainer: Trainer, plan: RunPlan, rates: Sequence[float], until: float, states: States) -> int:
    """Return the steps of a race: the whole run, or those the time allows, estimated from two steps and a saved state.

    Raises:
        ConfigError: the steps are too few.
    """
    start = time.monotonic()
    evaluate(trainer)
    eval_s = time.monotonic() - start
    train_leg(trainer, plan, trainer.config.optim.lr, 0, 2, plan.total)  # and an evaluation
    step_s = max(1e-6, (time.monotonic() - start - 2 * eval_s) / 2)
    start = time.monotonic()
    states.save("0")
    states.restore("begin")
    leg_s = eval_s + time.monotonic() - start
    left_s = until - time.monotonic() - (2 * len(rates) - 2) * leg_s
    most = len(rates) * STOPS[0]  # steps of a race over its schedule's steps
    for n in range(1, len(STOPS)):
        most += len(rates) / 2**n * (STOPS[n] - STOPS[n - 1])
    grain = round(1 / STOPS[0])
    steps = min(plan.total, int(left_s / (most * step_s))) // grain * grain
    if steps < SHORTEST * grain:
        asked, found = f"a race of {len(rates)} rates", f"time or data for at most {max(0, steps)} steps per rate"
        raise ConfigError(asked, found, f"raise --budget or add data: at least {SHORTEST * grain} are needed")
    return steps


def train_leg(trainer: Trainer, plan: RunPlan, rate: float, done: int, stop: int, steps: int) -> float:
    """Train from step `done` to `stop` of a schedule of `steps`, and return the held-out loss; infinite if it fails."""
    part = RunPlan(trainer, plan.length._replace(steps=stop), done)
    factor = rate / trainer.config.optim.lr

    def begin(step: int) -> None:
        set_step(trainer, step, steps)
        trainer.lr.mul_(factor)  # rates are proportional to `optim.lr`

    meter = MetricLines(trainer, stop)
    trainer.set_step, trainer.batches = begin, batches(trainer, part)
    trainer.stop.told = trainer.stop.agreed = 0  # an earlier rate may have failed
    with close_workers_after(trainer.batches):
        train(trainer, meter, part, lambda _: None)
    failed = meter.failure is not None or not meter.evals or not math.isfinite(meter.evals[-1])
    return math.inf if failed else meter.evals[-1]


if __name__ == "__main__":
    answer_trial_request()
