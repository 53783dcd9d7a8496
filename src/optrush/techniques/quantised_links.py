"""Weights and gradients in 8 bits on the links between ranks (ZeRO++), under FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from optrush.planner.ledger import Line, Rule, WorkItem, like, live
from optrush.technique import Environment, Numerics, Part, Requirement, Technique, Trainer

if TYPE_CHECKING:
    from torch import Tensor

    from optrush.trainer.packed_links import PackedGather

CODE = 1 + 4 / 256  # bytes per value: a code, and a 256th of a float32 scale


@dataclass(frozen=True)
class QuantisedLinks(Technique):
    """Gathers the blocks' matrices as int8 codes with a scale per 256 values; optionally reduces gradients so.

    The trained shards stay exact; every rank multiplies by the same rounded weights. Norms, biases, adapters, embedding
    and head are sent unquantized, and so is everything in an evaluation. With `replicate` the sums of groups are
    exchanged unquantized.

    Source: Wang et al., ZeRO++, https://arxiv.org/abs/2306.10209
    Memory: a block's codes while they are gathered; with gradients a rank's sent and received codes.
    Work: 1 + 4/256 bytes per value of the blocks over the link instead of 2 or 4; every value is rounded once by its
        sender and dequantized by its receivers.
    Differs from the source: no second copy of weights within a host; gradients in 8 bits, and summed in one exchange.
    """

    weights: Literal["int8", "none"] = "int8"
    gradients: Literal["int8", "none"] = "none"

    name = "quantised-links"
    summary = "fsdp gathers weights, and optionally reduces gradients, in 8 bits (ZeRO++)"
    source = "https://arxiv.org/abs/2306.10209"
    numerics = Numerics.DIFFERENT_MATHS
    verified_on = ("cpu",)
    claims = frozenset({Part.LINKS})
    searched = False  # changes the computed values

    def needs(self, env: Environment) -> Iterator[Requirement]:
        met = self.weights != "none" or self.gradients != "none"
        asked, do = "`quantised-links: weights: none`", "take weights: int8 or gradients: int8, or leave it out"
        yield Requirement(met, asked, "gradients: none: nothing to compress", do)
        asked, do = "`quantised-links` quantizes the communication of fsdp", "take --with fsdp, or leave it out"
        yield Requirement(env.gradient_ranks > 1, asked, env.alone, "start it with --ranks 2 or torchrun, and fsdp")
        met = Part.DATA not in env.claimed or ("dp" in env.sharded and Part.UPDATE not in env.claimed)
        yield Requirement(met, asked, "a technique with its own collectives", do)
        yield Requirement(env.native, asked, "the model runs through transformers", "take model.implementation: native")
        yield env.needs_dense("`quantised-links` quantizes the matrices of dense blocks")
        found, do = "a technique that also shards matrices over other ranks", "leave one of the two out"
        yield Requirement(Part.TP not in env.claimed, "`quantised-links` quantizes whole rows", found, do)
        stored = any(linear.weight == "quantized" for linear in env.spec.linears.values())
        found, do = "frozen weights in 4 or 8 bits, which are sent quantized anyway", "leave one of the two out"
        yield Requirement(not stored, "`quantised-links` rounds dense weights", found, do)
        found, do = "adapters, whose gradients are small", "take gradients: none"
        met = self.gradients == "none" or Part.ADAPTERS not in env.claimed
        yield Requirement(met, "`quantised-links: gradients: int8` rounds gradients of matrices", found, do)

    def quality(self, env: Environment) -> str:
        return f"{' and '.join(self._packed)} in 8 bits on the link"

    @property
    def _packed(self) -> list[str]:
        return [name for name in ("weights", "gradients") if getattr(self, name) != "none"]

    def predict(self, env: Environment) -> Iterator[Rule]:
        """Yield the codes sent for the blocks, their buffers, and the operators that compute them."""
        each = 1.0 / env.blocks
        if self.weights != "none":
            reason = "matrices in codes, and a scale per 256 of them"
            yield live("gather.blocks", reason, role="code")
            yield live("gather.blocks.copied", f"{reason}, quantized and dequantized by several operators", times=4)
            for way in ("forward", "backward"):
                line = Line(f"gather.codes.{way}", "a block's received codes", each, "code", way)
                yield like("weights.blocks", line)
        if self.gradients != "none" and env.shape is not None:
            wide = 4.0 if env.dtype == "float32" and Part.WEIGHTS not in env.claimed else 2.0
            share = env.shape.block_parameters / env.shape.parameters
            reason = "gradients of blocks in codes, and a scale per 256 of them"
            yield live("reduce", reason, times=(share * CODE + (1 - share) * wide) / wide)
            yield like("gradients.blocks", Line("reduce.codes", "sent and received, 2", 2 * each, "code", "backward"))
            reason = "gradients quantized, dequantized and summed by several operators"
            yield like("gradients.blocks", WorkItem("reduced.rounded", reason, "step", values=12.0, role="wide"))

    def shard(self, trainer: Trainer) -> int:
        from torch.distributed.fsdp import FSDPModule

        from optrush.trainer.packed_links import PackedGather, PackedReduceScatter, shards_of

        mesh = trainer.world.shards()
        assert mesh is not None
        ranks, gathers = mesh.size(mesh.ndim - 1), []
        matrices = {linear.weight for _, linear in trainer.model.linears()}
        for block in trainer.model.blocks.values():
            assert isinstance(block, FSDPModule), "needs has seen that fsdp cuts the model"
            if self.weights != "none":
                gathers.append(gather := PackedGather(shards_of(block, matrices, ranks)))  # type: ignore[arg-type]
                block.set_custom_all_gather(gather)  # type: ignore[arg-type]
            if self.gradients != "none":
                learnt = shards_of(block, matrices, ranks, trained=True)  # type: ignore[arg-type]
                block.set_custom_reduce_scatter(PackedReduceScatter(learnt))  # type: ignore[arg-type]
        self._evaluate_exactly(trainer, gathers)
        return len(self._packed) * len(trainer.model.blocks)

    def _evaluate_exactly(self, trainer: Trainer, gathers: list[PackedGather]) -> None:
        """Gather unquantized weights in an evaluation, to evaluate the exported weights."""
        inner = trainer.eval_loss

        def exactly(batches: Any) -> Tensor:
            for gather in gathers:
                gather.exact = True
            try:
                return inner(batches)
            finally:
                for gather in gathers:
                    gather.exact = False

        trainer.eval_loss = exactly
