"""Clips each gradient value to a range before the update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from optrush.technique import Numerics, Technique

if TYPE_CHECKING:
    from torch import Tensor

    from optrush.trainer.trainer import Trainer


@dataclass(frozen=True)
class ClipValues(Technique):
    """Clips each value of each gradient to [-limit, limit], before the norm is clipped.

    Source: Mikolov 2012, Statistical Language Models Based on Neural Networks, section 3.3:
        https://www.fit.vut.cz/study/phd-thesis/283/.en
    Memory: unchanged; gradients are clipped in place.
    Work: one pass over the gradients a step.
    """

    limit: Annotated[float, Field(gt=0)] = 1.0

    name = "clip-values"
    summary = "each gradient value clipped to a range"
    source = "https://www.fit.vut.cz/study/phd-thesis/283/.en"
    numerics = Numerics.DIFFERENT_MATHS
    proof = "tests/plugins/test_plugins.py"
    verified_on = ("cpu",)
    searched = False  # a matter of taste: a plan neither adds nor removes it

    def wrap_step(self, trainer: Trainer) -> int:
        inner = trainer.optimizer_step

        def step() -> tuple[Tensor, Tensor]:
            for trained in trainer.trained:
                if (gradient := trained.grad) is not None:
                    most = self.limit * trainer.scale.to(gradient.dtype)  # gradients have the loss scale in them
                    gradient.copy_(gradient.clamp(-most, most))
            return inner()

        trainer.optimizer_step = step
        return 1
