"""Update parameters in the backward pass, each as soon as its gradient is complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optrush.errors import NeedsError
from optrush.planner.optimizer import OptimizerSpec
from optrush.technique import RANK_PARTS, Environment, Numerics, Part, Requirement, Technique, Trainer

if TYPE_CHECKING:
    from torch import Tensor

    from optrush.data.batch import Batch


@dataclass(frozen=True)
class UpdateInBackward(Technique):
    """Steps a parameter when its gradient is complete, and frees the gradient.

    Without a global gradient norm beforehand there is no clipping, and a gradient that is not finite skips only its own
    parameter. (A loss that is not finite skips them all.) The step counts as skipped if any parameter was.

    Source: https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html
    Memory: the gradients of one block, and of the head or the embedding, instead of one per parameter.
    Work: unchanged; an optimizer of one launch takes one per parameter.
    Differs from the source: one optimizer for all parameters, called with the index to step; a bad gradient steps
        nothing.
    """

    name = "update-in-backward"
    summary = "updates each parameter in the backward pass and frees its gradient; no clipping"
    source = "https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html"
    numerics = Numerics.SAME_MATHS
    claims = frozenset({Part.UPDATE})
    searched = False  # no clipping
    last_resort = True

    def needs(self, env: Environment) -> Iterator[Requirement]:
        n = env.accumulation
        asked = "`update-in-backward` steps on the gradient of one micro-batch"
        do = f"set batch.micro_tokens to {env.rows // env.data_ranks * env.seq}, or batch.tokens lower"
        yield Requirement(n == 1, asked, f"{n} micro-batches per step", do)
        asked = "`update-in-backward` steps before the global gradient norm exists"
        yield Requirement(env.clip is None, asked, f"`optim.clip: {env.clip}`", "set optim.clip to null")
        found = "a technique that sums gradients over ranks, during or after the backward pass"
        met = not RANK_PARTS & env.claimed
        yield Requirement(met, "`update-in-backward` on one device", found, "leave one of the two out")

    def optimizer_spec(self, env: Environment) -> OptimizerSpec:
        return OptimizerSpec("freed as soon as its parameter is updated", in_backward=True)

    def wrap_step(self, trainer: Trainer) -> int:
        import torch

        if trainer.precision is torch.float16:
            found = "matmuls in fp16, whose loss scale needs skipping of whole updates"
            raise NeedsError("`update-in-backward` without a loss scale", found, "take bf16 matmuls, or leave it out")
        stepping = Stepping(trainer)
        trainer.loss, trainer.forward_backward = stepping.loss, stepping.gradients
        trainer.optimizer_step = stepping.update
        return len(trainer.trained)


class Stepping:
    """A `forward_backward` that updates, and an `optimizer_step` that returns norm and flag; no host read."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self._loss, self._gradients = trainer, trainer.loss, trainer.forward_backward
        self.armed = False  # only within a window do backward passes update
        self._begin()
        for i, t in enumerate(trainer.trained):
            t.parameter.register_post_accumulate_grad_hook(self._hook(i))  # type: ignore[no-untyped-call]

    def _begin(self) -> None:
        import torch

        device = self.trainer.world.device
        wide = torch.float32 if device.type == "cuda" else torch.float64
        self.squares = torch.zeros((), dtype=wide, device=device)  # of the gradients so far, scaled
        self.skipped = torch.zeros((), dtype=torch.bool, device=device)
        self.bad = torch.zeros((), dtype=torch.bool, device=device)  # the loss or its scaled value is not finite

    def loss(self, batch: Batch) -> Tensor:
        value = self._loss(batch)
        if self.armed:
            self.bad = ~(value.detach() * self.trainer.scale).isfinite()
        return value

    def gradients(self, batches: list[Batch], terms: float | Tensor) -> Tensor:
        assert len(batches) == 1, "one micro-batch per step: its gradients are the step's"
        self._begin()
        self.armed = True
        try:
            return self._gradients(batches, terms)
        finally:
            self.armed = False

    def update(self) -> tuple[Tensor, Tensor]:
        self.trainer.zero_grad()
        return (self.squares.sqrt() / self.trainer.scale).float(), self.skipped

    def _hook(self, i: int) -> Callable[[Tensor], None]:
        """Return a hook that updates parameter `i` as soon as its gradient is complete, and frees the gradient."""
        import torch

        trained = self.trainer.trained[i]

        @torch.no_grad()
        def step(_: Tensor) -> None:  # the gradient of a tied weight is the sum over both uses
            grad = trained.grad
            if not self.armed or grad is None:
                return
            squares = self._squares(grad)
            skip = self.bad | ~squares.isfinite()
            self.squares, self.skipped = self.squares + squares, self.skipped | skip
            self.trainer.optimizer.step(self.trainer.lr, self.trainer.scale, skip, only=[i])
            trained.parameter.grad = None

        return step

    def _squares(self, grad: Tensor) -> Tensor:
        """Return the sum of squares, computed like the norm of all gradients (`trainer.trainer`)."""
        import torch

        along = None if grad.is_cuda else -1
        norms: Tensor = torch.linalg.vector_norm(grad, dim=along, dtype=torch.float32)
        return norms.to(self.squares.dtype).square().sum()
