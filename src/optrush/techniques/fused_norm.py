"""The norm and the addition before it in one kernel each way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optrush.ledger import Rule, live
from optrush.technique import Need, Numerics, Setup, Technique, demand_triton

if TYPE_CHECKING:
    from optrush.job import Job


@dataclass(frozen=True)
class FusedNorm(Technique):
    """Adds what a branch gave to the residual stream and norms the sum, in one kernel each way.

    Source: Hsu et al., https://arxiv.org/abs/2410.10989
    Memory: not compiled, 4 D values a token and block less; compiled, nothing.
    Work: unchanged FLOPs; a norm reads and writes 4 D values a token forward with the addition, 2 D without, and 4 D
        backward, its weight's gradient and what reaches the stream past the norm included.
    Differs from the source: the stream goes through the norm, so that its two gradients meet in the backward kernel.
    """

    name = "fused-norm"
    summary = "addition to the residual stream and norm in one kernel each way"
    source = "https://arxiv.org/abs/2410.10989"
    numerics = Numerics.SAME_MATHS
    proof = "tests/techniques/test_fused_norm.py"
    verified_on = ("cpu",)

    def needs(self, setup: Setup) -> Iterator[Need]:
        found = "the model runs through transformers, whose blocks have no such place"
        yield Need(setup.native, "`fused-norm` needs the native implementation", found, "leave it out")

    def predict(self, setup: Setup) -> Iterator[Rule]:
        why = "inside the kernel; made again in the backward pass"
        yield live("saved.widened", why, gone=True)
        yield live("saved.normalised", why, gone=True)

    @classmethod
    def variants(cls, setup: Setup) -> Iterator[dict[str, Any]]:
        yield from ()  # not measured yet; whoever asks for it has it planned

    def recompute(self, job: Job) -> int:  # before anything compiles
        from optrush.kernels import norm
        from optrush.model.decoder import Block, Decoder

        demand_triton(self.name, job.setup.device)
        model = job.model
        assert isinstance(model, Decoder)
        norms = [model.norm]
        for block in model.blocks.values():
            assert isinstance(block, Block)
            norms += [block.norm1, block.norm2]
        for each in norms:
            each.kernel = norm.fused
        return len(norms)
