"""The attention kernel: the exact masked one, or one that never stores the scores."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from optrush.errors import NeedsError
from optrush.planner.ledger import Rule, add, live, saved, tagged
from optrush.technique import Environment, ModelSpec, Numerics, Part, Requirement, Technique, Trainer, library

WIDEST = 256  # largest head width of flash attention, as in kernels/attention.py
WIDE_TIMES = 8.0  # time of torch's kernel for wider heads over flash attention's, per token pair (Gemma 4 E4B, H200)


@dataclass(frozen=True)
class Attention(Technique):
    """Puts one kernel into every block's `attention` slot.

    masked: whole scores (B, H, T, T), float32 softmax; the baseline, exact, runs anywhere.
    sdpa: torch's scaled_dot_product_attention, which picks its fastest kernel; rows of one document need no mask,
        packed rows do.
    varlen: torch's FlashAttention over documents, no mask; bf16 or fp16 on CUDA. Layers with heads wider than its 256
        use sdpa, if other layers of the model have narrower ones (Gemma 4).
    cudnn: cuDNN's kernel, rows of one document only; bf16 or fp16 on CUDA.
    fa4: the package flash-attn-4, over documents or dense rows; bf16 or fp16, Hopper and later.
    delta: kernel of layers with a delta rule in place of attention: `fla`, the package flash-linear-attention (default
        on CUDA), or `plain`, torch's operators in chunks.

    Source: Dao, https://arxiv.org/abs/2307.08691
    Memory: masked saves about B*H*T*T*(4+2) bytes per block; the others B*T*H*E*2 and one number per row and head;
        sdpa on packed rows also its mask, B*T*T*2.
    Work: unchanged FLOPs for dense rows; varlen does only the sum of squared lengths.
    """

    impl: Literal["masked", "sdpa", "varlen", "cudnn", "fa4"] = "sdpa"
    delta: Literal["fla", "plain"] | None = None

    name = "attention"
    summary = "attention without stored scores: sdpa, varlen, cudnn, fa4; or the exact masked one"
    source = "https://arxiv.org/abs/2307.08691"
    numerics = Numerics.SAME_MATHS
    claims = frozenset({Part.ATTENTION})

    def describe(self, spec: ModelSpec) -> ModelSpec:
        return replace(spec, attention=self.impl)

    def needs(self, env: Environment) -> Iterator[Requirement]:
        yield from _kinds(env, self.impl)
        yield from self._delta_rule(env)
        if self.impl == "sdpa" and env.sdpa_obstacle is not None:
            yield Requirement(False, "`attention:impl=sdpa`", env.sdpa_obstacle, "take impl=masked")
        if self.impl in ("masked", "sdpa"):
            return
        asked = f"attention:impl={self.impl}"
        yield env.needs_gpu(asked, (8, 0) if self.impl == "varlen" else (9, 0))
        yield env.needs_half(f"`{asked}` needs matmuls in bf16 or fp16", "take impl=sdpa")
        found = "the model runs through transformers, which has masked and sdpa"
        yield Requirement(env.native, f"`{asked}` needs the native implementation", found, "take impl=sdpa")
        if self.impl == "cudnn":
            met, found = Part.PACKED_ROWS not in env.claimed, "a technique puts several documents into a row"
            yield Requirement(met, f"`{asked}` needs rows of one document", found, "take impl=varlen")

    def _delta_rule(self, env: Environment) -> Iterator[Requirement]:
        """Yield requirements of the delta rule's kernel, and of a model with such layers if it is set."""
        asked = f"`attention:delta={self.delta}`"
        if env.shape is None or env.shape.delta is None:
            found = "a model without layers of a delta rule in our own decoder"
            yield Requirement(self.delta is None, asked, found, "leave delta out")
        elif self._rule(env) == "fla":
            yield env.needs_gpu("attention:delta=fla")

    def _rule(self, env: Environment) -> str:
        return self.delta or ("fla" if env.device.kind == "cuda" else "plain")

    def predict(self, env: Environment) -> Iterator[Rule]:
        """Yield memory and work; with packed rows a mask costs whole scores, a kernel over documents their squares."""
        if env.shape is not None and env.shape.delta is not None and self._rule(env) == "fla":
            yield live("saved.rule.pairs", "the kernel keeps no T x T scores", gone=True)
        if self.impl == "masked":
            return
        s = env.shape
        sinks, window = s is not None and s.sinks, s is not None and s.window is not None and s.window < env.seq
        chunks = s is not None and s.chunks is not None and s.chunks.layers and s.chunks.size < env.seq
        masks = Part.PACKED_ROWS in env.claimed or sinks or window or chunks or env.mutual
        masked = self.impl == "sdpa" and masks
        wide = len(_wide(env)) if self.impl == "varlen" else 0
        spread = not masked and {"sdpa": _ungrouped(env), "varlen": _older_torch() or sinks}.get(self.impl, False)
        dense = spread and not env.native  # through transformers, torch then falls back to plain matmuls
        moved = tagged("scores", no=("heads",)) if dense else tagged("scores")
        yield live(moved, "scores stay on the chip; none are saved", gone=True)
        if masked:
            reason, values = (
                "the mask of rows with documents, a window, chunks, images or sinks, T per slot",
                env.blocks * env.seq,
            )
            if s is not None and sinks:
                reason, values = "the mask of each head, with its sink, H T per slot", values * s.heads
            yield add(saved("mask", reason, values, env.blocks, "mask"))
        elif wide and Part.PACKED_ROWS in env.claimed:
            reason = "the mask of rows with documents, T per slot, in layers with heads too wide for flash attention"
            yield add(saved("mask", reason, wide * env.seq, wide, "mask"))
        if masked:
            reason = "whole scores, masked ones included"
            yield live(tagged("attention"), reason, times=_slower(env, 1.0, 1.0), unit="masked")
        whole_rows = Part.PACKED_ROWS in env.claimed or sinks or chunks
        kept = 1.0 if spread or (masked and whole_rows) else _repeated(env, window) if self.impl == "sdpa" else 0.0
        kept = kept or (_repeated(env, False) if wide else 0.0)
        if kept < 1:
            yield live(
                "saved.spread",
                "the kernel groups the query heads itself",
                **({"values": kept} if kept else {"gone": True}),
            )
        if not masked:
            between = ", and so are pairs across documents" if env.span < env.seq else ""
            reason = f"the half behind the diagonal is skipped{between}"
            hopper = env.device.capability >= (9, 0)
            unit = {"varlen": "flash2", "fa4": "flash4"}.get(self.impl, "attention") if hopper else "attention"
            times = _slower(env, _pairs(env), 0.5 * env.span / env.seq) if wide else _pairs(env)
            yield live(tagged("attention"), reason, times=times, unit=unit)

    def packages(self) -> tuple[tuple[str, str], ...]:
        rule = (("flash-linear-attention", "fla"),) if self.delta == "fla" else ()
        return (*((("flash-attn-4", "kernels"),) if self.impl == "fa4" else ()), *rule)

    def compile_s(self, env: Environment) -> float:
        return 15.0 if self.impl == "fa4" else 0.0  # compiles its forward and backward kernels (H200)

    @classmethod
    def variants(cls, env: Environment) -> Iterator[dict[str, Any]]:
        yield {}
        yield {"impl": "varlen"}  # packed rows without a mask
        if env.shape is not None and env.shape.delta is not None and env.device.kind == "cuda":
            yield {"impl": "varlen", "delta": "plain"}  # without the package
        if (9, 0) <= env.device.capability < (12, 0):  # data-centre GPUs
            yield {"impl": "fa4"}

    def model(self, trainer: Trainer) -> int:
        if self.impl == "cudnn":
            trainer.model.supports_packing = False  # evaluation must not pack either
            trainer.notes.append("attention: evaluation uses one document per row (cudnn)")
        shape = trainer.env.shape
        if shape is not None and shape.delta is not None:
            rule = self._rule(trainer.env)
            if rule == "fla":
                check_package(trainer.env.device.capability)
            from optrush.models.decoder import Decoder

            assert isinstance(trainer.model, Decoder), "no other has such a shape"
            trainer.model.set_rule(rule)
        return trainer.model.set_attention(self.impl)


def check_package(capability: tuple[int, int]) -> None:
    """Check that flash-linear-attention is installed, and that its gradients are correct on this device.

    Triton 3.4 to 3.7.0 miscompiles the gradients of gated chunks for Hopper; with tilelang installed, the package
    computes them with that. Source: https://github.com/fla-org/flash-linear-attention/issues/640

    Raises:
        NeedsError: it is missing, or its gradients would be wrong.
    """
    found, do = "the package flash-linear-attention is not installed", "python -m pip install 'optrush[fla]'"
    if library("flash-linear-attention") is not None:
        triton = library("triton") or ""
        version = tuple(int(n) for n in re.findall(r"\d+", triton)[:3])
        if capability[0] != 9 or not (3, 4) <= version < (3, 7, 1) or library("tilelang") is not None:
            return
        found = f"triton {triton}, which compiles the gradients of flash-linear-attention incorrectly for Hopper"
        do = "python -m pip install tilelang, or take a torch with triton 3.7.1 or newer"
    raise NeedsError("a delta rule on CUDA", found, f"{do}, or take attention:delta=plain")


def _pairs(env: Environment) -> float:
    """Return the token pairs that a kernel computes without a mask, as a share of a row's whole scores."""
    plain = 0.5 * env.span / env.seq
    s = env.shape
    if s is not None and s.chunks is not None and s.chunks.size < env.span:
        share = len(s.chunks.layers) / env.blocks
        return share * 0.5 * s.chunks.size / env.seq + (1 - share) * plain
    if s is None or s.window is None or s.window >= env.span:
        return plain
    windowed = s.window * (1 - 0.5 * s.window / env.span) / env.seq
    share = len(s.window_layers) / env.blocks if s.window_layers else 1.0
    return share * windowed + (1 - share) * plain


def _kinds(env: Environment, impl: str) -> Iterator[Requirement]:
    """Yield requirements on the kernel: the model's windows, sinks and head widths."""
    asked, s = f"`attention:impl={impl}`", env.shape
    found = "bidirectional attention between image tokens"
    yield Requirement(impl in ("masked", "sdpa") or not env.mutual, asked, found, "take impl=sdpa")
    if s is not None and s.window is not None and s.window < env.seq:
        found = f"a sliding window of {s.window} tokens in some layers, and rows of {env.seq}"
        yield Requirement(impl != "cudnn", asked, found, "take impl=fa4, varlen or sdpa")
    if s is not None and s.chunks is not None and s.chunks.layers and s.chunks.size < env.seq:
        found = f"attention in chunks of {s.chunks.size} tokens in some layers, and rows of {env.seq}"
        yield Requirement(impl != "cudnn", asked, found, "take impl=varlen or sdpa")
    if s is not None and s.latent is not None:
        found = f"query and key heads of {s.head_width}, value heads of {s.latent.value}"
        yield Requirement(impl in ("masked", "sdpa", "varlen"), asked, found, "take impl=varlen or sdpa")
    if s is not None and s.sinks:
        # The package's own limit for gradients with sinks (flash_attn/cute/interface.py in 4.0.0b36).
        met = impl != "cudnn" and not (impl == "fa4" and env.device.capability >= (12, 0))
        found = "attention sinks in the model" + (f", on {env.device.name}" if impl == "fa4" else "")
        yield Requirement(met, asked, found, "take impl=varlen or sdpa")
    if s is not None and (widest := max(kind.head_width for kind in s.kinds)) > WIDEST:
        found = f"heads of {widest} values in some layers; its kernel supports up to {WIDEST}"
        some = impl == "varlen" and len(_wide(env)) < s.layers  # the narrower layers use it
        do = "take impl=varlen or sdpa" if min(kind.head_width for kind in s.kinds) <= WIDEST else "take impl=sdpa"
        yield Requirement(some or impl in ("masked", "sdpa"), asked, found, do)
    if s is not None and s.score_cap is not None:
        found = f"attn_logit_softcapping {s.score_cap:g}, scores bounded by a tanh, unsupported by fused kernels"
        yield Requirement(impl == "masked", asked, found, "leave attention out, or take impl=masked")


def _wide(env: Environment) -> list[int]:
    """Return the layers whose heads are too wide for flash attention."""
    kinds = {} if env.shape is None else env.shape.kinds
    return [layer for kind, layers in kinds.items() if kind.head_width > WIDEST for layer in layers]


def _slower(env: Environment, others: float, wide: float) -> float:
    """Return the attention work of all layers as a share of whole scores, with a slower kernel for wide heads.

    others, wide: that share for layers with narrow and with wide heads.
    """
    if env.shape is None or not _wide(env):
        return others
    flop = {kind: len(layers) * kind.heads * kind.head_width for kind, layers in env.shape.kinds.items()}
    share = sum(n for kind, n in flop.items() if kind.head_width > WIDEST) / sum(flop.values())
    return (1 - share) * others + share * wide * WIDE_TIMES


def _repeated(env: Environment, window: bool) -> float:
    """Return the share of repeated keys and values that `sdpa` saves: in layers with a mask, or with too wide heads."""
    if (s := env.shape) is None or not s.repeated or not env.native:
        return float(window)
    masked = frozenset(s.window_layers if window else ())
    kept = 0
    for kind, layers in s.kinds.items():
        many = len(layers) if kind.head_width > WIDEST else len(masked.intersection(layers))
        kept += many * (kind.heads - kind.kv_heads) * kind.head_width
    return kept / (s.repeated * s.layers)


def _ungrouped(env: Environment) -> bool:
    """Whether torch has no kernel here that groups query heads: on CUDA only flash attention groups, which `sdpa` uses
    in bf16; mixed precision is assumed to be bf16 if the device supports it."""
    half = env.dtype == "bfloat16" or (Part.PRECISION in env.claimed and env.device.capability >= (8, 0))
    return env.device.kind == "cuda" and env.spec.grouped_heads and not half


def _older_torch() -> bool:
    """Whether the installed torch, if any, is older than 2.12, whose `varlen` groups query heads."""
    version = library("torch")
    return version is not None and [int(number) for number in re.findall(r"\d+", version)[:2]] < [2, 12]
