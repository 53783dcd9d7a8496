"""bfloat16 weights with what rounding took from them beside them (Kahan summation)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optrush.planner.baseline import rounded_update
from optrush.planner.ledger import Line, Rule, Work, like
from optrush.technique import Environment, Numerics, Part, Requirement, Technique, demand_triton

if TYPE_CHECKING:
    from optrush.trainer.trainer import Trainer


@dataclass(frozen=True)
class Kahan(Technique):
    """A weight is the sum of two bfloat16: the one that the model computes with, and what rounding took from it.

    Source: https://arxiv.org/abs/2010.06192 (Zamirai et al.)
    Memory: 2 bytes a parameter.
    Work: 4 bytes a parameter more in the update, read and written.
    Differs from the source: the remainder, which is rounded too, and both moments are rounded stochastically, so that
        no update is too small to count.
    """

    name = "kahan"
    summary = "bf16 weights, and beside each what rounding took from it"
    source = "https://arxiv.org/abs/2010.06192"
    numerics = Numerics.DIFFERENT_MATHS
    proof = "tests/techniques/test_kahan.py"
    verified_on = ("cpu", "gpu")
    claims = frozenset({Part.ROUNDING, Part.KAHAN_BUFFER})

    def needs(self, env: Environment) -> Iterator[Requirement]:
        yield Requirement(
            env.dtype == "bfloat16" or Part.WEIGHTS in env.claimed,
            "`kahan` keeps what rounding takes from bf16 weights",
            "weights in float32, which keep small updates",
            "add --with bf16, or leave it out",
        )

    def predict(self, env: Environment) -> Iterator[Rule]:
        why = "what rounding took from each weight"
        yield like("weights.*", Line("states.compensation", why, 1.0, "weight", "always"))
        why = "the same read and written"
        yield like("weights.*", Work("update.compensation", why, "step", values=2.0, role="weight"))
        if Part.WEIGHTS not in env.claimed:  # else their owner says it
            yield from rounded_update(env)

    @classmethod
    def variants(cls, setup: Environment) -> Iterator[dict[str, Any]]:
        yield from ()  # no faster and larger: nothing for a search

    def peft(self, trainer: Trainer) -> int:
        import torch

        demand_triton(self.name, trainer.env.device)
        trainer.rounding = "kahan"
        return sum(p.dtype == torch.bfloat16 for p in trainer.model.parameters() if p.requires_grad)
