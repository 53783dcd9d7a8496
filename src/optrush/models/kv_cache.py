"""Cache keys and values of sequences in slots, so that the decoder continues many sequences one token at a time.

The cache uses the decoder's slots (`block.attention`, `block_call`): sampling runs the trained modules, weights and
adapters themselves, so nothing must be copied or synchronized. A prompt passes once, packed with others, and its keys
and values are written to every slot that continues it. On CUDA one kernel (kernels/decode_attention_triton.py) writes
and attends; elsewhere torch's attention reads a rectangle of the cache.

Shapes: S slots, C tokens per slot, K key/value heads, E head width, H query heads, N tokens of a packed pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optrush.data.batch import Documents
from optrush.errors import NeedsError
from optrush.models.decoder import Block, Decoder

BUCKET = 64  # a step reads a multiple of this number of tokens per slot: few shapes


@dataclass
class Step:
    """The current pass' writes and reads, for all layers.

    target: (M,) int64, positions in the cache, slot * C + position; slot S is never read.
    source: (M,) int64, each one's token of the pass, as an index over its rows; None: one token per slot.
    lengths: (S,) int64, tokens of each slot including this step's; None: the prompts attend among themselves.
    span: the longest slot's length, or more.
    """

    target: Tensor
    source: Tensor | None = None
    lengths: Tensor | None = None
    span: int = 0


class LayerCache:
    """The keys and values of one layer, and its attention while they are cached.

    A layer that reads an earlier layer's keys and values has none: `source` is that layer's cache.
    """

    inner: Any  # the block's own attention

    def __init__(self, cache: SlotCache, window: int | None, source: LayerCache | None = None) -> None:
        self.cache, self.window, self.source = cache, window, source
        self.keys: Tensor | None = None  # (S + 1, C, K, E), in the type that attention uses
        self.values: Tensor | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents, **masks: Any) -> Tensor:
        """Attend like `kernels.attention`: q (B, T, H, E), k and v (B, T, K, E) -> (B, T, H, E)."""
        step = self.cache.step
        if self.source is not None:
            return self._read(self.source, q, k, v, documents, masks)
        if self.keys is None or self.values is None:
            places = self.cache.slots + 1, self.cache.room
            self.keys, self.values = k.new_zeros(*places, *k.shape[2:]), v.new_zeros(*places, *v.shape[2:])
        if step.lengths is not None and self.cache.kernel is not None:
            return self._read(self, q, k, v, documents, masks)
        for kept, new in ((self.keys, k), (self.values, v)):
            flat = new.flatten(0, 1)
            kept.view(-1, *new.shape[2:])[step.target] = flat if step.source is None else flat[step.source]
        return self._read(self, q, k, v, documents, masks)

    def _read(
        self, of: LayerCache, q: Tensor, k: Tensor, v: Tensor, documents: Documents, masks: dict[str, Any]
    ) -> Tensor:
        step, slots, span = self.cache.step, self.cache.slots, self.cache.step.span
        if step.lengths is None:
            attended: Tensor = self.inner(q, k, v, documents, **masks)
            return attended
        assert of.keys is not None and of.values is not None
        if (kernel := self.cache.kernel) is not None:  # writes the new token, too; writing it twice is harmless
            window, sinks, cap = self.window or 0, masks.get("sinks"), masks.get("cap") or 0.0
            return kernel(q[:, 0], k[:, 0], v[:, 0], of.keys, of.values, step.lengths, sinks, window, cap)[:, None]
        masks["window"] = self.window  # a step's rows are shorter than any window
        return attend_slots(q, of.keys[:slots, :span], of.values[:slots, :span], step.lengths, **masks)


class SlotCache:
    """The layers' caches of a decoder: `slots` sequences of at most `room` tokens."""

    kernel: Callable[..., Tensor] | None = None  # for a step of one token per slot

    def __init__(self, model: Decoder, slots: int, room: int) -> None:
        """Raises NeedsError: a layer needs more state of a sequence than keys and values."""
        check_cacheable(model)
        self.slots, self.room = slots, -(-room // BUCKET) * BUCKET
        self.step = Step(torch.zeros(0, dtype=torch.int64))
        self.layers = list[LayerCache]()
        for block in (b for b in model.blocks.values() if isinstance(b, Block)):
            lender = None if block.source is None else self.layers[block.source]
            self.layers.append(LayerCache(self, block.window, lender))
        self.compiled: dict[nn.Module, Any] = {}
        if model.embedding.weight.is_cuda:
            from optrush.kernels.decode_attention_triton import decode_attention

            self.kernel = decode_attention

    @contextmanager
    def within(self, model: Decoder) -> Iterator[None]:
        """Let the decoder's blocks attend through the cache: uncompiled, without activation checkpointing.

        Sharded weights are not gathered either: `Trainer.whole_weights` has done that.
        """
        blocks = [block for block in model.blocks.values() if isinstance(block, Block)]
        before = [block.attention for block in blocks]
        with uncompiled(model) as self.compiled:
            for block, layer in zip(blocks, self.layers, strict=True):
                layer.inner, block.attention = block.attention, layer
            try:
                yield
            finally:
                for block, attention in zip(blocks, before, strict=True):
                    block.attention = attention

    @contextmanager
    def one_shape(self) -> Iterator[None]:
        """Run compiled parts compiled: with the kernel, every step of the slots has the same shape."""
        for module, call_impl in self.compiled.items():
            module._compiled_call_impl = call_impl if self.kernel else None
        try:
            yield
        finally:
            for module in self.compiled:
                module._compiled_call_impl = None


@contextmanager
def uncompiled(model: Any) -> Iterator[dict[nn.Module, Any]]:
    """Run a model as in evaluation: uncompiled, without activation checkpointing, its weights already gathered.

    Yields:
        The compiled call of each compiled module with unsharded weights.
    """
    cut = {m: m._compiled_call_impl for m in model.modules() if hasattr(m, "_get_fsdp_state")}
    compiled = {m: m._compiled_call_impl for m in model.modules() if m._compiled_call_impl is not None}
    kept = {m: call_impl for m, call_impl in compiled.items() if m not in cut}
    for module in cut:  # replaces the call of the module, with all its hooks
        module._compiled_call_impl = partial(_call_whole, module)
    call, training = model.block_call, model.training
    model.block_call = _call_block
    for module in kept:  # each prompt length would be compiled
        module._compiled_call_impl = None
    model.eval()
    try:
        yield kept
    finally:
        model.block_call = call
        for module, call_impl in (cut | compiled).items():
            module._compiled_call_impl = call_impl
        model.train(training)


def _call_block(block: Any, *args: Any, **kwargs: Any) -> Any:
    """Call our block without its hooks, or the forward function of a transformers block."""
    function = getattr(block, "_compiled_call_impl", None) or getattr(block, "forward", block)
    return function(*args, **kwargs)


def _call_whole(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a module with gathered weights and its hooks, except FSDP's, which order streams and free weights."""
    for hook in module._forward_pre_hooks.values():
        if not _is_of(hook, module._get_fsdp_state()):
            changed = hook(module, args)
            args = args if changed is None else changed if isinstance(changed, tuple) else (changed,)
    out = module.forward(*args, **kwargs)
    for hook in module._forward_hooks.values():
        if not _is_of(hook, module._get_fsdp_state()):
            changed = hook(module, args, out)
            out = out if changed is None else changed
    return out


def _is_of(hook: Any, state: object) -> bool:
    """Return whether a hook is a method of `state`, or wraps one, as in modules that are sharded together."""
    inner = getattr(hook, "__wrapped__", None)
    return getattr(hook, "__self__", None) is state or (inner is not None and _is_of(inner, state))


def check_cacheable(model: Any) -> None:
    """Raise NeedsError if a model cannot continue sequences from keys and values alone."""
    asked, do = "to sample from the model that is trained", "set model.implementation: transformers"
    if not isinstance(model, Decoder):
        raise NeedsError(asked, "it runs through transformers", "use a model of our own decoder")
    shape = model.shape
    if shape.delta is not None:
        raise NeedsError(asked, "delta-rule layers, whose state is not keys and values", do)
    if shape.chunks is not None:
        raise NeedsError(asked, "layers that attend within chunks", do)
    if model.head.scores:
        raise NeedsError(asked, "its head scores texts and predicts no tokens", "use a model with a vocabulary")


def attend_slots(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *, window: int | None = None, sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:  # fmt: skip
    """Attend from the last token of each slot: q (S, 1, H, E), k and v (S, span, K, E) -> (S, 1, H, E).

    lengths: (S,) tokens per slot, the last of which attends; 0: an empty slot, whose result is arbitrary.
    """
    place = torch.arange(k.shape[1], device=q.device)
    read = place < lengths[:, None].clamp_min(1)  # (S, span)
    if window is not None:
        read &= place >= (lengths[:, None] - window)
    mask = torch.zeros(read.shape, dtype=q.dtype, device=q.device).masked_fill_(~read, -torch.inf)[:, None, None]
    q, k, v = (x.transpose(1, 2) for x in (q, k.to(q.dtype), v.to(q.dtype)))  # (S, heads, tokens, E)
    if sinks is not None:  # one more key with the sink as its score and a value of zero
        S, H = q.shape[:2]
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        sink = sinks.to(q.dtype).view(1, H, 1, 1).expand(S, H, 1, 1)
        mask = torch.cat((mask.expand(S, H, 1, -1), sink), -1)
    if cap is not None:  # between matmul and softmax: no fused kernel supports it
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = torch.tanh((q @ k.mT).float() * q.shape[-1] ** -0.5 / cap) * cap + mask
        return (scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)
