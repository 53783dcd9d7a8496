"""An exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from optrush.planner.ledger import Line, Rule, Tag, WorkItem, like, tagged
from optrush.technique import Environment, Numerics, Part, Requirement, Technique, Trainer

if TYPE_CHECKING:
    from torch import Tensor

    from optrush.optim.adamw import Optimizer

STATE = "ema"  # name of the state in checkpoints
MOST_OF_FIRST, LITTLE = 0.1, 0.01  # shares of the initial weights in the averages


@dataclass(frozen=True)
class Ema(Technique):
    """Averages the trained weights over steps: a = decay a + (1 - decay) w after each update; a starts as w.

    evaluate: compute eval losses, and so choose the best checkpoint, with the averages.
    export: write the averages to `model/`.

    Source: https://doi.org/10.1137/0330046 (Polyak and Juditsky 1992)
    Memory: 4 bytes per trained parameter, float32 whatever the weights' dtype; a copy of the weights in an evaluation.
    Work: 3 values read and written per trained parameter and step.
    Differs from the source: old weights count less, by powers of `decay`.
    """

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
    evaluate: bool = True
    export: bool = True

    name = "ema"
    summary = "moving average of the weights, used for evaluation and export"
    source = "https://doi.org/10.1137/0330046"
    numerics = Numerics.DIFFERENT_MATHS
    verified_on = ("cpu",)
    searched = False  # changes the weights
    averages = True

    def needs(self, env: Environment) -> Iterator[Requirement]:
        found = "a technique that updates weights outside the optimizer's step"
        yield Requirement(
            Part.UPDATE not in env.claimed, "`ema` follows each update", found, "leave one of the two out"
        )
        found, do = "a technique that keeps states elsewhere", "leave one of the two out"
        yield Requirement(Part.STATES not in env.claimed, "`ema` keeps averages with the weights", found, do)

    def predict(self, env: Environment) -> Iterator[Rule]:
        if (s := env.shape) is None:
            return
        reason = "an average of each trained weight, float32"
        parts: tuple[Tag, ...] = ("blocks", "embedding", "norm", "head")
        for part in parts[: 3 if s.tied else 4]:
            of: tuple[Tag, ...] = ("states", "averages", part)
            count = s.layers if part == "blocks" else 1
            yield like(f"states.{part}", Line(f"ema.{part}", reason, 0.5, "wide", "always", blocks=count, of=of))
        work = WorkItem("update.ema", "averages moved to the weights", "step", values=3.0, role="wide", of=("update",))
        yield like(tagged("weights"), work)

    def wrap_step(self, trainer: Trainer) -> int:
        if self.export:
            trainer.exported = f"state/{STATE}/"
        if trainer.optimizer is None:  # nothing is trained: a checkpoint is exported
            return 1
        averaged = Averaged(trainer.optimizer, trainer, self.decay)
        trainer.optimizer = averaged
        if self.export:
            trainer.put_averages = averaged.put
        if self.evaluate:
            trainer.evaluated_weights = averaged.instead
        trainer.notes.append(f"ema: {'the averages' if self.evaluate else 'the weights'} are evaluated")
        length = trainer.config.train
        steps = length.steps or trainer.stream.plan(length.epochs).steps
        if (first := self.decay**steps) > MOST_OF_FIRST:
            note = f"ema: after {steps} steps {first:.0%} of the averages are the weights before training"
            trainer.notes.append(f"{note}: decay={LITTLE ** (1 / steps):.3g} leaves {LITTLE:.0%}")
        return 1


class Averaged:
    """An optimizer, and averages of its parameters: one more state per parameter, with its number of steps."""

    def __init__(self, inner: Optimizer, trainer: Trainer, decay: float) -> None:
        import torch

        self.inner, self.trained, self.decay = inner, trainer.trained, decay
        self.reads_host, self.rounding = inner.reads_host, inner.rounding
        self.averages = [torch.zeros_like(t.local, dtype=torch.float32) for t in self.trained]
        self.begun = [torch.zeros((), device=t.local.device) for t in self.trained]  # 1: the average has started

    def step(self, lr: Tensor, grad_scale: Tensor, found_inf: Tensor, only: Sequence[int] | None = None) -> None:
        """Update once, like `Optimizer.step`, and update the averages."""
        chosen = range(len(self.trained)) if only is None else only
        for i in chosen:  # before the first update: the weights
            local, average = self.trained[i].local, self.averages[i]
            average.copy_(average.where(self.begun[i].bool(), local.float()).where(~found_inf.bool(), average))
        if only is None:
            self.inner.step(lr, grad_scale, found_inf)
        else:
            self.inner.step(lr, grad_scale, found_inf, only)
        kept = (~found_inf.bool()).float()
        for i in chosen:
            self.begun[i].copy_(self.begun[i].maximum(kept))
            self.averages[i].lerp_(self.trained[i].local.float(), (1 - self.decay) * kept)

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the inner optimizer's states, and the averages."""
        states = self.inner.state()
        entries = zip(self.trained, self.averages, self.begun, strict=True)
        return {t.name: {**states.get(t.name, {}), STATE: a, f"{STATE}_begun": begun} for t, a, begun in entries}

    def put(self) -> None:
        """Replace the weights by the averages permanently."""
        for t, average, begun in zip(self.trained, self.averages, self.begun, strict=True):
            t.local.copy_(average.to(t.local.dtype).where(begun.bool(), t.local))

    @contextmanager
    def instead(self) -> Iterator[None]:
        """Replace the weights by the averages within the context."""
        weights = [t.local.clone() for t in self.trained]
        self.put()
        try:
            yield
        finally:
            for t, weight in zip(self.trained, weights, strict=True):
                t.local.copy_(weight)
