"""The norms of a block in one kernel each way, the second one with the addition before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optrush.planner.ledger import Rule, live
from optrush.technique import Environment, Numerics, Requirement, Technique, demand_triton

if TYPE_CHECKING:
    from optrush.trainer.trainer import Trainer


@dataclass(frozen=True)
class FusedNorm(Technique):
    """A block's two norms, each in one kernel forward and one backward; the second adds attention's result first.

    The block's last addition stays where it is, and so does the norm before the head.

    Source: Hsu et al., https://arxiv.org/abs/2410.10989
    Memory: not compiled, 2 D float32 values a token and block less. Compiled, nothing less; and D values in the type of
        the stream instead of the products', where it is wider: the sum is kept, not what was added.
    Work: unchanged FLOPs; a norm reads and writes 4 D values a token forward with the addition, 2 D without, and 4 D
        backward, its weight's gradient and what reaches the stream past the norm included.
    Differs from the source: the stream goes through the norm, so that its two gradients meet in the backward kernel.
    """

    name = "fused-norm"
    summary = "a block's norms in one kernel each way, the addition before the second one included"
    source = "https://arxiv.org/abs/2410.10989"
    numerics = Numerics.SAME_MATHS
    proof = "tests/techniques/test_fused_norm.py"
    verified_on = ("cpu", "gpu")
    opaque = frozenset({"saved.normed"})

    def needs(self, env: Environment) -> Iterator[Requirement]:
        found = "the model runs through transformers, whose blocks have no such place"
        yield Requirement(env.native, "`fused-norm` needs the native implementation", found, "leave it out")

    def predict(self, env: Environment) -> Iterator[Rule]:
        why = "inside the kernel; made again in the backward pass"
        yield live("saved.widened", why, gone=True)
        yield live("saved.normalised", why, gone=True)
        yield live("saved.middle", "the sum is kept, in the stream's type", role="residual")
        yield live("saved.middle.wide", "in the sum", gone=True)

    @property
    def spacious(self) -> frozenset[str]:
        return frozenset({"normed"})

    @classmethod
    def variants(cls, setup: Environment) -> Iterator[dict[str, Any]]:
        yield from ()  # less than a percent in pure bf16, nothing or less elsewhere: a search cannot tell

    def recompute(self, trainer: Trainer) -> int:  # before anything compiles
        from optrush.kernels import rms_norm
        from optrush.models.decoder import Block, Decoder

        demand_triton(self.name, trainer.env.device)
        model = trainer.model
        assert isinstance(model, Decoder)
        norms = []
        for block in model.blocks.values():
            assert isinstance(block, Block)
            norms += [block.norm1, block.norm2]
        for each in norms:
            each.impl = rms_norm.fused_add_rms_norm
        return len(norms)
