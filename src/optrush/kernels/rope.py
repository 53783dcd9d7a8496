"""Rotary positions: a block's query, key and value heads taken apart, queries and keys turned by their position.

    plain   torch, one operator at a time: the reference, which a compiler fuses in part
    fused   one kernel forward and one backward, which read and write every value once

The backward pass turns the gradients back and lays them together again: it wants cosines and sines, and nothing else.
float32 inside, one rounding at the end.
Source: Su et al. 2021 (arXiv:2104.09864); one kernel each way as in Liger Kernel (arXiv:2410.10989).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from optrush.kernels.lora_matmul import copied_padded, empty_padded

Heads = tuple[Tensor, Tensor, Tensor]  # q (B, T, H, E), k and v (B, T, K, E)
HeadNorm = Callable[[Tensor], Tensor]
Separate = Callable[[Tensor, Tensor, Tensor, HeadNorm | None, HeadNorm | None], Heads]
"""(qkv (B, T, K, H/K + 2, E), cos and sin (B, T, 1, E), norms of queries and keys or None) -> heads in qkv's type"""


def plain(qkv: Tensor, cos: Tensor, sin: Tensor, q_norm: HeadNorm | None, k_norm: HeadNorm | None) -> Heads:
    """As `Separate` says."""
    q = qkv[:, :, :, :-2].flatten(2, 3)  # (B, T, H, E)
    # v is copied out: as a view it would keep the whole of qkv alive until the backward pass.
    k, v = qkv[:, :, :, -2], qkv[:, :, :, -1].contiguous()  # (B, T, K, E)
    if q_norm is not None and k_norm is not None:
        q, k = q_norm(q), k_norm(k)
    return rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype), v


def fused(
    qkv: Tensor, cos: Tensor, sin: Tensor, q_norm: HeadNorm | None, k_norm: HeadNorm | None, *, back: int = 0
) -> Heads:
    """As `Separate` says, for heads without norms: these stand between the two things that the kernel does.

    back: columns that are left (kernels/room.py) beside a token's gradient.
    """
    assert q_norm is None and k_norm is None
    heads: Heads = _Rotation.apply(qkv, cos, sin, back)  # type: ignore[no-untyped-call]
    return heads


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, T, n, E) turned by its position; cos, sin (B, T, 1, E). Stays in x's type, which cos need not have."""
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, back: int) -> Heads:
        ctx.save_for_backward(cos, sin)
        ctx.back = back
        heads: Heads = rotation(qkv, cos, sin)
        return heads

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor, None, None, None]:
        return rotation_backward(*incoming, *ctx.saved_tensors, ctx.back), None, None, None


@torch.library.custom_op("optrush::rotation", mutates_args=())
def rotation(qkv: Tensor, cos: Tensor, sin: Tensor) -> Heads:
    """As `Separate` says."""
    if qkv.is_cuda:
        from optrush.kernels.rope_triton import forward

        return forward(qkv, cos, sin)
    q, k, v = plain(_wide(qkv), cos, sin, None, None)
    return q.to(qkv.dtype), k.to(qkv.dtype), v.to(qkv.dtype, copy=True)


@rotation.register_fake
def _(qkv: Tensor, cos: Tensor, sin: Tensor) -> Heads:
    B, T, K, group, E = qkv.shape
    q, k, v = (qkv.new_empty(B, T, n, E) for n in (K * (group - 2), K, K))
    return q, k, v


@torch.library.custom_op("optrush::rotation_backward", mutates_args=())
def rotation_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, room: int = 0) -> Tensor:
    """Gradients of q (B, T, H, E), k and v (B, T, K, E) -> of qkv (B, T, K, H/K + 2, E), in their type, with room."""
    if dq.is_cuda:
        from optrush.kernels.rope_triton import backward

        return backward(dq, dk, dv, cos, sin, _empty(dq, dk, room))
    # The transpose of a turn: each half's sine stands at the other half, with the other sign.
    back = -sin.roll(sin.shape[-1] // 2, -1)
    dq, dk = rotate(_wide(dq), cos, back), rotate(_wide(dk), cos, back)
    B, T, K, E = dk.shape
    dq = dq.view(B, T, K, dq.shape[2] // K, E)
    d_qkv = torch.cat((dq, dk[:, :, :, None], dv[:, :, :, None]), 3).to(dv.dtype)
    return copied_padded(d_qkv.flatten(2), room).view(d_qkv.shape)


@rotation_backward.register_fake
def _(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, room: int = 0) -> Tensor:
    return _empty(dq, dk, room)


def _empty(dq: Tensor, dk: Tensor, room: int) -> Tensor:
    """For the gradient of qkv."""
    B, T, K, E = dk.shape
    group = dq.shape[2] // K + 2
    return empty_padded(dq, B, T, K * group * E, columns=room).view(B, T, K, group, E)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
