"""Weights, gradients and optimizer states in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from optrush.planner.baseline import rounded_update
from optrush.planner.ledger import Role, Rule, retype
from optrush.technique import Environment, Numerics, Part, Requirement, Technique, demand_triton

if TYPE_CHECKING:
    from optrush.trainer.trainer import Trainer


@dataclass(frozen=True)
class Bf16(Technique):
    """Everything in bfloat16, with no float32 copy of the weights.

    Updated weights are rounded stochastically, unless another technique owns the rounding. To the `nearest`, a weight
    moves only when its update exceeds about 1/256 of it: at small learning rates most weights then never move.

    Source: Kalamkar et al., https://arxiv.org/abs/1905.12322
    Memory: 8 bytes a parameter (2 weight, 2 gradient, 4 states) instead of 16.
    Work: products at the bf16 rate; half the bytes in every elementwise operator and in the optimizer.
    Differs from the source: it keeps a float32 copy of the weights.
    """

    rounding: Literal["stochastic", "nearest"] = "stochastic"

    name = "bf16"
    summary = "pure bf16 weights, gradients and states, stochastic rounding of the weights"
    source = "https://arxiv.org/abs/1905.12322"
    numerics = Numerics.DIFFERENT_MATHS
    proof = "tests/techniques/test_bf16.py"
    verified_on = ("cpu", "gpu")
    claims = frozenset({Part.PRECISION, Part.WEIGHTS})

    def needs(self, env: Environment) -> Iterator[Requirement]:
        yield Requirement(
            env.dtype == "float32",
            "`bf16` makes bf16 weights of float32 ones",
            f"`model.dtype: {env.dtype}`",
            "leave one of the two out",
        )
        yield Requirement(
            self.rounding == "stochastic" or Part.ROUNDING not in env.claimed,
            f"`bf16:rounding={self.rounding}`",
            "another technique says how weights are rounded",
            "leave one of the two out",
        )
        if env.device.kind == "cuda":
            yield Requirement(
                env.device.capability >= (8, 0),
                "`bf16` needs a device that multiplies in bf16",
                f"{env.device.name}, capability {env.device.capability}",
                "take --with amp:dtype=fp16",
            )

    def predict(self, env: Environment) -> Iterator[Rule]:
        everything: dict[Role, float] = {"weight": 2, "gradient": 2, "state": 2, "product": 2, "residual": 2}
        yield retype(everything, "8 bytes a parameter, and 2 bytes a saved value")
        yield retype({"narrowing": 2, "widening": 2, "plain": 2.5}, "norms and softmax still run in float32")
        if self.rounding == "stochastic":  # or another that is not the nearest
            yield from rounded_update(env)

    def model(self, trainer: Trainer) -> int:
        import torch

        trainer.model.to(torch.bfloat16)  # still on meta; buffers are restored in their own dtype
        return sum(1 for _ in trainer.model.parameters())

    def peft(self, trainer: Trainer) -> int:
        if Part.ROUNDING in trainer.env.claimed:
            return 0
        trainer.rounding = self.rounding
        if self.rounding == "stochastic":
            demand_triton(self.name, trainer.env.device)
        return 1
