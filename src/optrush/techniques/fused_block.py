"""The gated activation in one kernel, and made again in the backward pass instead of kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from optrush.errors import NeedsError
from optrush.ledger import Line, Rule, like, live
from optrush.technique import Need, Numerics, Part, Setup, Technique, compilers, demand, gpu

if TYPE_CHECKING:
    from optrush.job import Job


@dataclass(frozen=True)
class FusedBlock(Technique):
    """Makes silu(gate) * up in one kernel each way, and again in the backward pass instead of keeping it.

    triton: a kernel between the products. Backward it reads gate, up and the incoming gradient, and writes gradients
        of both and the activation itself, which the down product's weight gradient wants: so it was not kept.
    quack: the same in the epilogues of the products before and after, by the package quack-kernels; bf16 on Hopper.

    Source: Hsu et al., https://arxiv.org/abs/2410.10989
    Memory: B*T*F values a block less, of 2 (bf16) or 4 bytes.
    Work: unchanged FLOPs; triton reads and writes 3 F values a token and block forward, 6 F backward, quack F and 5 F.
    Differs from the source: gate and up lie as pairs in one matrix; the down product belongs to it.
    """

    impl: Literal["triton", "quack"] = "triton"

    name = "fused-block"
    summary = "the gated activation in one kernel or in the products, made again backward instead of kept"
    source = "https://arxiv.org/abs/2410.10989"
    numerics = Numerics.SAME_MATHS
    proof = "tests/techniques/test_fused_block.py"
    verified_on = ("cpu", "gpu")

    def needs(self, setup: Setup) -> Iterator[Need]:
        found = "the model runs through transformers, whose blocks have no such place"
        yield Need(setup.native, "`fused-block` needs the native implementation", found, "leave it out")
        if self.impl == "quack":
            asked, do = "fused-block:impl=quack", "take impl=triton"
            yield gpu(asked, setup, (9, 0))
            yield Need(setup.device.capability == (9, 0), f"`{asked}` needs Hopper", setup.device.name, do)
            half = setup.dtype == "bfloat16" or Part.PRECISION in setup.owned
            found = "weights and products in float32"
            yield Need(
                half, f"`{asked}` needs products in bf16 or fp16", found, f"add --with amp or --with bf16, or {do}"
            )
            found = "a technique that makes the products itself"
            yield Need(Part.LINEARS not in setup.owned, f"`{asked}` makes the products", found, do)

    def predict(self, setup: Setup) -> Iterator[Rule]:
        why = "made again from gate and up where the backward pass wants it"
        if Part.LINEARS not in setup.owned and not _again(setup):
            yield live("saved.product", why, gone=True)
        yield live("saved.gated", why, gone=True)
        why = "gradients of gate and up beside them, in one block's backward pass, 2 F"
        yield like("saved.product", Line("feed.gradients", why, 2.0 / setup.blocks, "product", "backward", True))

    def packages(self) -> tuple[tuple[str, str], ...]:
        return (("quack-kernels", "kernels"),) if self.impl == "quack" else ()

    @classmethod
    def variants(cls, setup: Setup) -> Iterator[dict[str, Any]]:
        yield {}
        if setup.device.capability == (9, 0):
            yield {"impl": "quack"}

    def recompute(self, job: Job) -> int:  # here it is settled what the linears are
        import torch.nn.functional as F

        from optrush.kernels import swiglu, swiglu_quack
        from optrush.model.decoder import Linear

        def plain(linear: object) -> bool:
            return type(linear) is Linear and linear.product is F.linear and linear.bias is None

        blocks = list(job.model.blocks.values())
        if self.impl == "quack":
            demand(self)
            if not all(plain(linear) for block in blocks for linear in (block.gate_up, block.down)):
                found = "linears that are more than matrices (a bias, an adapter)"
                raise NeedsError("`fused-block:impl=quack`", found, "take impl=triton")
            for block in blocks:
                block.feed = swiglu_quack.feed  # type: ignore[assignment]
            return len(blocks)
        if job.world.device.type == "cuda":
            for need in compilers(job.setup.device):
                if not need.met:
                    raise NeedsError(need.asked.replace("torch.compile", "`fused-block`"), need.found, need.do)
        matrices = [plain(block.down) and not _again(job.setup) for block in blocks]
        for block, matrix in zip(blocks, matrices, strict=True):
            block.feed = swiglu.fused if matrix else swiglu.activated  # type: ignore[assignment]
        if not all(matrices):
            job.notes.append("fused-block: `down` is more than a matrix or runs again, so its input is kept")
        return len(blocks)


def _again(setup: Setup) -> bool:
    """Blocks run again operator by operator, up to the last tensor that is wanted: the down product's input, not its
    output, as long as the two are no single operator."""
    return Part.SAVED in setup.owned and Part.COMPILED not in setup.owned
