"""Rotary position embedding: split a block's query, key and value heads, and rotate queries and keys.

    split_and_rotate        torch, one operator at a time: the reference; a compiler fuses it in part
    fused_split_and_rotate  one kernel forward and one backward, which read and write every value once
    split_and_rotate_pairs  the reference for rotating neighbouring values of a head, as in Llama 4
    split_and_scale         no rotation: queries are multiplied by a number per position

The backward pass rotates the gradients back and joins them: it saves only cosines and sines.
float32 inside, one rounding at the end.
Source: Su et al. 2021 (arXiv:2104.09864); one kernel each way as in Liger Kernel (arXiv:2410.10989).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from optrush.kernels import widen
from optrush.kernels.lora_matmul import copied_padded, empty_padded

Heads = tuple[Tensor, Tensor, Tensor]  # q (B, T, H, E), k and v (B, T, K, E)
HeadNorm = Callable[[Tensor], Tensor]
SplitAndRotate = Callable[[Tensor, Tensor, Tensor, HeadNorm | None, HeadNorm | None], Heads]
"""(qkv (B, T, K, H/K + 2, E), cos and sin (B, T, 1, E), norms of queries and keys or None) -> heads in qkv's type"""


def split_and_rotate(qkv: Tensor, cos: Tensor, sin: Tensor, q_norm: HeadNorm | None, k_norm: HeadNorm | None) -> Heads:
    """Implement `SplitAndRotate` with torch operators."""
    q, k, v = _split(qkv, q_norm, k_norm)
    return rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype), v


def split_heads(qkv: Tensor, cos: Tensor, sin: Tensor, q_norm: HeadNorm | None, k_norm: HeadNorm | None) -> Heads:
    """Implement the signature of `SplitAndRotate` without a rotation."""
    q, k, v = _split(qkv, q_norm, k_norm)
    return q, k.contiguous(), v


def _split(qkv: Tensor, q_norm: HeadNorm | None = None, k_norm: HeadNorm | None = None) -> Heads:
    # Tensors saved for the backward pass are copied: views would keep all of qkv alive.
    q, k, v = qkv[:, :, :, :-2].flatten(2, 3), qkv[:, :, :, -2], qkv[:, :, :, -1].contiguous()
    if q_norm is None or k_norm is None:
        return q, k, v
    return q_norm(q.contiguous()), k_norm(k.contiguous()), v


def split_and_rotate_pairs(
    qkv: Tensor, cos: Tensor, sin: Tensor, q_norm: HeadNorm | None, k_norm: HeadNorm | None
) -> Heads:
    """Implement `SplitAndRotate` for neighbouring pairs, in the wider type of heads and cosines."""
    q, k, v = _split(qkv, q_norm, k_norm)
    return _rotate_pairs(q, cos, sin).to(v.dtype), _rotate_pairs(k, cos, sin).to(v.dtype), v


def split_and_scale(qkv: Tensor, cos: Tensor, sin: Tensor, q_norm: HeadNorm | None, k_norm: HeadNorm | None) -> Heads:
    """Implement the signature of `SplitAndRotate` without a rotation.

    Args:
        cos: (B, T, 1, 1), the factor of the queries.
    """
    q, k, v = _split(qkv)
    return (q * cos).to(v.dtype), k.contiguous(), v


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring values of x (B, T, n, E), or only the first; reads the first halves of cos and sin."""
    if (rotated := cos.shape[-1]) < x.shape[-1]:
        return torch.cat((_rotate_pairs(x[..., :rotated], cos, sin), x[..., rotated:]), -1)
    cos, sin = (t[..., : x.shape[-1] // 2] for t in (cos, sin))
    first, second = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack((first * cos - second * sin, first * sin + second * cos), -1).flatten(-2)


def fused_split_and_rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, q_norm: HeadNorm | None, k_norm: HeadNorm | None, *, grad_padding: int = 0
) -> Heads:
    """Implement `SplitAndRotate` with one kernel each way, for heads without norms: a norm would come in between.

    grad_padding: columns of padding (lora_matmul.py) for a token's gradient.
    """
    assert q_norm is None and k_norm is None
    heads: Heads = _Rotation.apply(qkv, cos, sin, grad_padding)  # type: ignore[no-untyped-call]
    return heads


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (B, T, n, E) by position; cos, sin (B, T, 1, E), of any type. Returns x's type.

    With fewer cosines than E, only that many first values of each head are rotated.
    """
    if (rotated := cos.shape[-1]) < x.shape[-1]:
        return torch.cat((rotate(x[..., :rotated], cos, sin), x[..., rotated:]), -1)
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, grad_padding: int) -> Heads:
        ctx.save_for_backward(cos, sin)
        ctx.grad_padding = grad_padding
        heads: Heads = rotation(qkv, cos, sin)
        return heads

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor, None, None, None]:
        return rotation_backward(*incoming, *ctx.saved_tensors, ctx.grad_padding), None, None, None


@torch.library.custom_op("optrush::rotation", mutates_args=())
def rotation(qkv: Tensor, cos: Tensor, sin: Tensor) -> Heads:
    """Implement `SplitAndRotate` without norms."""
    if qkv.is_cuda:
        from optrush.kernels.rope_triton import rope_forward

        return rope_forward(qkv, cos, sin)
    q, k, v = split_and_rotate(widen(qkv), cos, sin, None, None)
    return q.to(qkv.dtype), k.to(qkv.dtype), v.to(qkv.dtype, copy=True)


@rotation.register_fake
def _(qkv: Tensor, cos: Tensor, sin: Tensor) -> Heads:
    B, T, K, group, E = qkv.shape
    q, k, v = (qkv.new_empty(B, T, n, E) for n in (K * (group - 2), K, K))
    return q, k, v


@torch.library.custom_op("optrush::rotation_backward", mutates_args=())
def rotation_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, padding: int = 0) -> Tensor:
    """Gradients of q (B, T, H, E), k and v (B, T, K, E) -> of qkv (B, T, K, H/K + 2, E), in their type, padded."""
    if dq.is_cuda:
        from optrush.kernels.rope_triton import rope_backward

        return rope_backward(dq, dk, dv, cos, sin, _empty(dq, dk, padding))
    # The transpose of the rotation: the sine's halves swapped, with opposite sign.
    inverse = -sin.roll(sin.shape[-1] // 2, -1)
    dq, dk = rotate(widen(dq), cos, inverse), rotate(widen(dk), cos, inverse)
    B, T, K, E = dk.shape
    dq = dq.view(B, T, K, dq.shape[2] // K, E)
    d_qkv = torch.cat((dq, dk[:, :, :, None], dv[:, :, :, None]), 3).to(dv.dtype)
    return copied_padded(d_qkv.flatten(2), padding).view(d_qkv.shape)


@rotation_backward.register_fake
def _(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, padding: int = 0) -> Tensor:
    return _empty(dq, dk, padding)


def _empty(dq: Tensor, dk: Tensor, padding: int) -> Tensor:
    """Allocate the gradient of qkv."""
    B, T, K, E = dk.shape
    group = dq.shape[2] // K + 2
    return empty_padded(dq, B, T, K * group * E, columns=padding).view(B, T, K, group, E)
