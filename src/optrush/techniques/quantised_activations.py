"""Activations in 8 bits between forward and backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from optrush.planner.ledger import WAYS, Line, Rule, WorkItem, add, launched, like, live, tagged
from optrush.technique import Environment, Numerics, Part, Requirement, Technique, Trainer

ONE = "leave one of the two out"


@dataclass(frozen=True)
class QuantisedActivations(Technique):
    """Rounds saved activations to int8 with a scale per 256 values; the forward pass uses the exact values.

    Tensors saved by attention, parameters, masks, statistics and small tensors are unchanged
    (models/activation_rounding.py). Gradients are those of the rounded values; the loss is unchanged.

    Source: Chakrabarti and Moseley, https://arxiv.org/abs/1901.07988; Chen et al., https://arxiv.org/abs/2104.14129
    Memory: per block 1 + 4/256 bytes per value instead of 4 or 2, and no float32 copies; attention's (H + 2 K) E values
        per token and its output are unchanged. One operator's inputs are dense in the backward pass.
    Work: saved values read and written once more each way, rounded to nearest by several operators.
    Differs from the sources: 8 bits for all tensors, no random rounding; attention is left out.
    """

    name = "quantised-activations"
    summary = "stores the blocks' saved activations in 8 bits until the backward pass"
    source = "https://arxiv.org/abs/1901.07988"
    numerics = Numerics.DIFFERENT_MATHS
    verified_on = ("cpu",)
    claims = frozenset({Part.ACTIVATION_STORAGE})
    searched = False  # changes the gradients

    def needs(self, env: Environment) -> Iterator[Requirement]:
        asked = "`quantised-activations` works on our own decoder"
        yield Requirement(env.native, asked, "the model runs through transformers", "take model.implementation: native")
        yield env.needs_dense("`quantised-activations` works on dense blocks")
        found, do = "compiled blocks, which mix statistics and values", "leave compile out, or take recompute"
        met = Part.COMPILED not in env.claimed
        yield Requirement(met, "`quantised-activations` rounds one operator's inputs at a time", found, do)
        found = "a technique that recomputes blocks from few saved values"
        met = Part.ACTIVATION_CHECKPOINTING not in env.claimed
        yield Requirement(met, "`quantised-activations` keeps a block's values rounded", found, ONE)
        float8 = any(linear.matmul == "float8" for linear in env.spec.linears.values())
        found = "float8 matmuls, whose inputs already have 8 bits"
        yield Requirement(not float8, "`quantised-activations` rounds to 8 bits", found, ONE)
        found = "fused-kernels:mlp=quack, which writes adapters into the padding of its inputs"
        met, do = env.spec.mlp != "quack", "take mlp=triton"
        yield Requirement(met, "`quantised-activations` stores values without padding", found, do)

    def quality(self, env: Environment) -> str:
        return "activations in 8 bits"

    def predict(self, env: Environment) -> Iterator[Rule]:
        """Yield codes for all lines of a block except attention's; float32 copies of narrower values are not saved."""
        reason = "kept in 8 bits, with a scale per 256 values"
        yield live("input", reason, role="code")
        yield live(tagged("saved", "per-token", no=("heads", "mask", "adapters", "widened")), reason, role="code")
        if Part.ATTENTION not in env.claimed:  # else a kernel saves its output
            yield live("saved.attended", reason, role="code")
        for copies in (tagged("widened"), "saved.middle.wide"):
            yield live(copies, "the copy is what is rounded", gone=True)
        if env.shape is None:
            return
        F, L = env.shape.ff_width, env.blocks
        reason = "one operator's inputs, dequantized, 2 F"
        yield add(Line("feed.again", reason, 2 * F, "product", "backward", True, side="feed", of=("mlp",)))
        for way, values in zip(WAYS, (28.0, 14.0), strict=True):  # all lines, per value of gate and up
            reason = "saved values quantized or dequantized by several operators"
            work = WorkItem(f"{way}.rounded", reason, "token", values=values, role="wide", of=(way,))
            yield like("saved.gate_up", work)
            launches = (16.0 if way == "forward" else 8.0) * 12 * L
            yield add(launched(way, "rounded.launches", "of 12 tensors per block", launches))

    def wrap_step(self, trainer: Trainer) -> int:
        import torch
        from torch import Tensor

        from optrush.models.activation_rounding import RoundedActivations
        from optrush.models.decoder import Decoder
        from optrush.peft.lora import Lora

        model = trainer.model
        assert isinstance(model, Decoder)
        low = frozenset(m.a.shape[0] for m in model.modules() if isinstance(m, Lora))
        kept = RoundedActivations(model.stream_ranks, low)
        inner, blocks = model.block_call, model.blocks.values()
        for block in blocks:
            block.attention = kept.exact(block.attention)  # type: ignore[assignment, arg-type]

        def through(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return inner(call, *args, **kwargs)
            x, *given = args
            with kept.block(call, x, [t for t in given if isinstance(t, Tensor)]):  # type: ignore[arg-type]
                return inner(call, *args, **kwargs)

        model.block_call = through
        return len(blocks)
