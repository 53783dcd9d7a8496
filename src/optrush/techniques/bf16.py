"""Weights, gradients and optimizer states in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optrush.ledger import Role, Rule, retype
from optrush.technique import Need, Numerics, Part, Setup, Technique

if TYPE_CHECKING:
    from optrush.job import Job


@dataclass(frozen=True)
class Bf16(Technique):
    """Everything in bfloat16, with no float32 copy of the weights.

    Freezes small updates: a weight moves only when its update exceeds about 1/256 of it, so at small learning rates
    most weights never move (Differs from stochastic rounding, which the ladder does not have yet). Check held-out
    loss before you trust it.

    Source: Kalamkar et al., https://arxiv.org/abs/1905.12322
    Memory: 8 bytes a parameter (2 weight, 2 gradient, 4 states) instead of 16.
    Work: products at the bf16 rate; half the bytes in every elementwise operator and in the optimizer.
    """

    name = "bf16"
    summary = "pure bf16 weights, gradients and states; freezes small updates (no stochastic rounding yet)"
    source = "https://arxiv.org/abs/1905.12322"
    numerics = Numerics.DIFFERENT_MATHS
    proof = "tests/techniques/test_bf16.py"
    verified_on = ("cpu", "gpu")
    claims = frozenset({Part.PRECISION})

    def needs(self, setup: Setup) -> Iterator[Need]:
        yield Need(
            setup.dtype == "float32",
            "`bf16` makes bf16 weights of float32 ones",
            f"`model.dtype: {setup.dtype}`",
            "leave one of the two out",
        )
        if setup.device.kind == "cuda":
            yield Need(
                setup.device.capability >= (8, 0),
                "`bf16` needs a device that multiplies in bf16",
                f"{setup.device.name}, capability {setup.device.capability}",
                "take --with amp:dtype=fp16",
            )

    def predict(self, setup: Setup) -> Iterator[Rule]:
        everything: dict[Role, float] = {"weight": 2, "gradient": 2, "state": 2, "product": 2, "residual": 2}
        yield retype(everything, "8 bytes a parameter, and 2 bytes a saved value")
        yield retype({"narrowing": 2, "widening": 2}, "norms and softmax still run in float32")

    def model(self, job: Job) -> int:
        import torch

        job.model.to(torch.bfloat16)  # still on meta; buffers are restored in their own dtype
        job.notes.append("bf16: small updates are rounded away; there is no float32 copy of the weights")
        return sum(1 for _ in job.model.parameters())
