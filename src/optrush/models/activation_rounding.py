"""Store activations saved for the backward pass in 8 bits.

A saved tensor becomes int8 codes and one float32 scale per 256 values (kernels/int8.py), and is freed as soon as the
forward pass no longer needs it. The backward pass restores it, in its type, for each operator that reads it. The
forward pass computes with the exact values, so the loss does not change.

Not rounded, because the backward pass would be wrong or nothing would be gained:

    parameters, their views and casts, and activations computed from adapters' parameters
    arguments of all blocks (angles, documents), integers, masks, 8-bit floats
    every tensor saved by attention: its statistics belong to exactly these queries, keys and outputs
    tensors with one value per token or head (statistics of norms), and small tensors

Source: Chakrabarti and Moseley, https://arxiv.org/abs/1901.07988; Chen et al., ActNN, https://arxiv.org/abs/2104.14129.
Differs from the sources: rounded to nearest; in 8 bits the error is at most 0.4 % of a block's largest value.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from optrush.kernels.int8 import dequantize_blocks, quantize_blocks
from optrush.models.activation_offload import of_parameter

SMALL = 4096  # tensors with fewer values are not rounded
ROUNDED = frozenset({torch.float32, torch.bfloat16, torch.float16})


@dataclass(frozen=True)
class Rounded:
    """A saved tensor as codes (n,) and scales of its values in order; its strides are not kept."""

    codes: Tensor
    scales: Tensor
    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, t: Tensor) -> Rounded:
        """Round a tensor."""
        codes, scales = quantize_blocks(t.reshape(-1))
        return cls(codes, scales, t.shape, t.dtype)

    def tensor(self) -> Tensor:
        """Return a new, dense tensor with the rounded values."""
        values = torch.empty(len(self.codes), dtype=self.dtype, device=self.codes.device)
        dequantize_blocks(self.codes, self.scales, values)
        return values.view(self.shape)


class _Pass:
    """The tensors saved so far by one forward pass through one block."""

    def __init__(self, block: nn.Module, tokens: frozenset[int], exact: list[Tensor], low: frozenset[int]) -> None:
        self.block, self.tokens, self.low = block, tokens, low
        self._kept: dict[int, weakref.ref[Any]] = {}  # storages that stay, by address
        self._rounded: dict[tuple[Any, ...], tuple[weakref.ref[Any], Rounded]] = {}
        self._weights: set[int] | None = None
        for t in exact:
            self.keep(t)

    def keep(self, t: Tensor) -> None:
        """Never round a tensor's storage."""
        storage = t.untyped_storage()
        self._kept[storage._cdata] = weakref.ref(storage)

    def save(self, t: Tensor) -> Tensor | Rounded:
        """Return autograd's stored form of a tensor."""
        if not self._is_activation(t):
            return t.detach()  # an output would refer to its own autograd node
        t = t.detach()
        storage = t.untyped_storage()
        # A freed storage's address may be reused by another storage: compare the weak reference, too.
        key = (storage._cdata, t.storage_offset(), *_layout(t))
        known = self._rounded.get(key)
        if known is None or known[0]() is None:
            known = self._rounded[key] = (weakref.ref(storage), Rounded.of(t))
        return replace(known[1], shape=t.shape)

    def end(self) -> None:
        """Drop references to saved tensors: only autograd keeps them."""
        self._rounded.clear()

    def _is_activation(self, t: Tensor) -> bool:
        if t.dtype not in ROUNDED or t.numel() < SMALL or t.dim() < 2 or t.shape[-1] == 1:
            return False
        if t.shape[0] not in self.tokens and (t.dim() == 2 or t.shape[0] * t.shape[1] not in self.tokens):
            return False
        if is_traceable_wrapper_subclass(t) or 0 in t.stride() or of_parameter(t):  # a wrapper's storage is elsewhere
            return False
        if t.shape[-1] in self.low and t.grad_fn is not None:
            return False
        at = t.untyped_storage()._cdata
        kept = self._kept.get(at)
        return (kept is None or kept() is None) and at not in self._storages_of_weights()

    def _storages_of_weights(self) -> set[int]:
        """Return the storages of the block's parameters, as gathered by sharding at save time."""
        if self._weights is None:
            held = (getattr(p, "_local_tensor", p) for p in self.block.parameters())
            self._weights = {p.untyped_storage()._cdata for p in held}
        return self._weights


def _layout(t: Tensor) -> tuple[Any, ...]:
    """Return dtype, sizes and strides of a tensor, equal for all views with the same order of values."""
    sizes: list[int] = []
    strides: list[int] = []
    for size, stride in zip(t.shape, t.stride(), strict=True):
        if size == 1:
            continue
        if sizes and strides[-1] == size * stride:
            sizes[-1], strides[-1] = sizes[-1] * size, stride
        else:
            sizes.append(size)
            strides.append(stride)
    return t.dtype, *sizes, *strides


class RoundedActivations:
    """Rounds the tensors saved by a decoder's blocks.

    Args:
        stream_ranks: ranks that shard T between the blocks; inside, each has all of it.
        low: adapters' ranks: a tensor of such a width with a gradient was computed from an adapter's parameters.
    """

    def __init__(self, stream_ranks: int, low: frozenset[int]) -> None:
        self.stream_ranks, self.low = stream_ranks, low
        self._pass: _Pass | None = None

    @contextmanager
    def block(self, block: nn.Module, x: Tensor, given: list[Tensor]) -> Iterator[None]:
        """Round within a block's forward pass; x: hidden states (B, T, D); given: the arguments of all blocks."""
        tokens = x.shape[0] * x.shape[1]
        self._pass = _Pass(block, frozenset({tokens, tokens * self.stream_ranks}), given, self.low)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pass.save, restored):
                yield
        finally:
            self._pass.end()
            self._pass = None

    def exact(self, attend: Callable[..., Any]) -> Callable[..., Any]:
        """Return attention with exact saved tensors, also for other users of the same tensors."""

        def attended(*args: Any, **kwargs: Any) -> Any:
            if self._pass is None:
                return attend(*args, **kwargs)
            with torch.autograd.graph.saved_tensors_hooks(self._keep, restored):
                return attend(*args, **kwargs)

        return attended

    def _keep(self, t: Tensor) -> Tensor:
        if self._pass is not None and not is_traceable_wrapper_subclass(t):
            self._pass.keep(t)
        return t.detach()


def restored(saved: Tensor | Rounded) -> Tensor:
    """Return the tensor from autograd's stored form."""
    return saved.tensor() if isinstance(saved, Rounded) else saved
