"""A block's heads taken apart and turned by their positions, in one kernel each way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optrush.technique import Environment, Numerics, Requirement, Technique, demand_triton

if TYPE_CHECKING:
    from optrush.trainer.trainer import Trainer


@dataclass(frozen=True)
class FusedRotation(Technique):
    """Queries, keys and values taken out of one product, queries and keys turned: one kernel forward, one backward.

    Models that norm their queries and keys (qwen3) are refused: the norms stand between the two.

    Source: Hsu et al., https://arxiv.org/abs/2410.10989
    Memory: unchanged: both ways keep cosines and sines, once for all blocks, and what attention keeps.
    Work: unchanged FLOPs; 2 (H + 2 K) E values read and written a token and block forward, and as many backward.
    Differs from the source: it reads and writes all heads at once, values too, for they lie together in one product.
    """

    name = "fused-rotation"
    summary = "queries, keys and values taken apart and turned by their positions in one kernel each way"
    source = "https://arxiv.org/abs/2410.10989"
    numerics = Numerics.SAME_MATHS
    proof = "tests/techniques/test_fused_rotation.py"
    verified_on = ("cpu", "gpu")

    def needs(self, env: Environment) -> Iterator[Requirement]:
        found = "the model runs through transformers, whose blocks have no such place"
        yield Requirement(env.native, "`fused-rotation` needs the native implementation", found, "leave it out")
        normed = env.shape is not None and env.shape.qk_norm
        found = "the model norms each of them first"
        yield Requirement(
            not normed, "`fused-rotation` turns queries and keys as the product makes them", found, "leave it out"
        )

    @property
    def spacious(self) -> frozenset[str]:
        return frozenset({"turned"})

    @classmethod
    def variants(cls, setup: Environment) -> Iterator[dict[str, Any]]:
        yield from ()  # less than a percent: a search cannot tell

    def recompute(self, trainer: Trainer) -> int:  # before anything compiles
        from optrush.kernels import rope
        from optrush.models.decoder import Block, Decoder

        demand_triton(self.name, trainer.env.device)
        assert isinstance(trainer.model, Decoder)
        for block in trainer.model.blocks.values():
            assert isinstance(block, Block)
            block.split_and_rope = rope.fused_split_and_rotate
        return len(trainer.model.blocks)
