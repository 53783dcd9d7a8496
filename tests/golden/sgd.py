"""SGD as a technique of its own: one file, and one line in the tuple that is given to `prepare`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from optrush.technique import Numerics, Part, Technique

if TYPE_CHECKING:
    from torch import Tensor

    from optrush.trainer.trainer import Trainer


@dataclass(frozen=True)
class Sgd(Technique):
    """Momentum instead of AdamW.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.optim.SGD.html
    Memory: 4 bytes a parameter.
    Work: reads weight, gradient and momentum, writes weight and momentum.
    """

    momentum: float = 0.9

    name = "sgd"
    summary = "stochastic gradient descent with momentum"
    source = "https://docs.pytorch.org/docs/stable/generated/torch.optim.SGD.html"
    numerics = Numerics.DIFFERENT_MATHS
    proof = "tests/golden/test_golden.py"
    verified_on = ("cpu",)
    claims = frozenset({Part.OPTIMIZER})

    def optimizer(self, trainer: Trainer) -> int:
        trainer.optimizer = Momentum(trainer, self.momentum)
        return 1


class Momentum:
    """The optimizer's contract (optim/adamw.py), in plain operators."""

    reads_host = True

    def __init__(self, trainer: Trainer, momentum: float) -> None:
        self.trained, self.momentum = trainer.trained, momentum
        self.velocity = [t.local.new_zeros(t.local.shape) for t in trainer.trained]

    def step(self, lr: Tensor, grad_scale: Tensor, found_inf: Tensor) -> None:
        if found_inf.item():
            return
        for t, v in zip(self.trained, self.velocity):
            if t.grad is not None:
                v.mul_(self.momentum).add_(t.grad / grad_scale)
                t.local.sub_(lr * v)

    def state(self) -> dict[str, dict[str, Tensor]]:
        return {t.name: {"velocity": v} for t, v in zip(self.trained, self.velocity)}
