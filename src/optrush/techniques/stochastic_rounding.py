"""bfloat16 weights whose updates are rounded up or down at random, so that small ones count on average."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optrush.planner.baseline import rounded_update
from optrush.planner.ledger import Rule
from optrush.technique import Environment, Numerics, Part, Requirement, Technique, demand_triton

if TYPE_CHECKING:
    from optrush.trainer.trainer import Trainer


@dataclass(frozen=True)
class StochasticRounding(Technique):
    """A weight goes to one of its two neighbours in bfloat16, with the probability that keeps its expected value.

    Both moments are rounded so too: to the nearest, one with beta2 = 0.999 would never shrink. The random bits are a
    function of seed, name, count of updates and place in the whole parameter: the same on every rank, device and run.

    Source: https://arxiv.org/abs/2010.06192 (Zamirai et al.)
    Memory: none.
    Work: three hashes of 32 bits a weight, in the update's kernel; nothing more is read or written.
    """

    name = "stochastic-rounding"
    summary = "bf16 weights and moments rounded up or down at random, right on average"
    source = "https://arxiv.org/abs/2010.06192"
    numerics = Numerics.DIFFERENT_MATHS
    proof = "tests/techniques/test_stochastic_rounding.py"
    verified_on = ("cpu", "gpu")
    claims = frozenset({Part.ROUNDING})

    def needs(self, env: Environment) -> Iterator[Requirement]:
        yield Requirement(
            env.dtype == "bfloat16" or Part.WEIGHTS in env.claimed,
            "`stochastic-rounding` rounds bf16 weights",
            "weights in float32, which keep small updates",
            "add --with bf16, or leave it out",
        )

    def predict(self, env: Environment) -> Iterator[Rule]:
        if Part.WEIGHTS not in env.claimed:  # else their owner says it
            yield from rounded_update(env)

    @classmethod
    def variants(cls, setup: Environment) -> Iterator[dict[str, Any]]:
        yield from ()  # no faster and no smaller: nothing for a search

    def peft(self, trainer: Trainer) -> int:
        import torch

        demand_triton(self.name, trainer.env.device)
        trainer.rounding = "stochastic"
        return sum(p.dtype == torch.bfloat16 for p in trainer.model.parameters() if p.requires_grad)
