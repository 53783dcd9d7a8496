"""RMSNorm with the addition before it: a branch's output is added to the residual stream, and the sum is normalized.

    add_rms_norm        torch, one operator at a time: the reference; a compiler fuses it
    fused_add_rms_norm  one kernel forward and one backward

The backward kernel reads each value once: it computes the gradient of the input, adds the residual stream's gradient,
and accumulates the weight's gradient. So the stream passes through the norm unchanged, `(x, h)` in and out: its
gradient is added where the norm's gradient is computed.

float32 inside, rounded to the stream's type before the weight, like the model families. Saves the sum and 1 / rms (N,).
Source: Zhang and Sennrich 2019 (arXiv:1910.07467); one kernel each way as in Liger Kernel (arXiv:2410.10989).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from optrush.kernels import compute_dtype, widen
from optrush.kernels.lora_matmul import copied_padded, empty_padded

Norm = Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]
"""(x (..., D), branch (..., D) or None, weight (D,), eps) -> x + branch (..., D), and their norm (..., D)"""


def unit(x: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) over the last dimension, float32 at least."""
    wide = widen(x)
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def add_rms_norm(x: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Implement `Norm` with torch operators."""
    x = x if branch is None else x + branch
    return x, weight * unit(x, eps).to(x.dtype)


def fused_add_rms_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, *, padding: int = 0, grad_padding: int = 0
) -> tuple[Tensor, Tensor]:
    """Implement `Norm` with one kernel each way; under autocast the normalized output has autocast's type.

    padding, grad_padding: columns of padding (lora_matmul.py) for the output, and for the branch's gradient.
    """
    on = torch.is_autocast_enabled(x.device.type)
    dtype = compute_dtype(x) if on else torch.promote_types(x.dtype, weight.dtype)
    if branch is None:
        normed: Tensor
        x, normed = _Norm.apply(x, weight, eps, dtype, padding)  # type: ignore[no-untyped-call]
        return x, normed
    added: tuple[Tensor, Tensor] = _AddNorm.apply(x, branch, weight, eps, dtype, padding, grad_padding)  # type: ignore[no-untyped-call]
    return added


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        x, weight, eps, dtype, padding = inputs
        normed, scale = norm(x, weight, eps, dtype, padding)
        ctx.save_for_backward(x, weight, scale)
        return x.view_as(x), normed

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = norm_backward(*ctx.saved_tensors, *incoming, ctx.needs_input_grad[1], 0)
        return dx, dw if ctx.needs_input_grad[1] else None, None, None, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        x, branch, weight, eps, dtype, padding, grad_padding = inputs
        total, normed, scale = add_norm(x, branch, weight, eps, dtype, padding)
        ctx.save_for_backward(total, weight, scale)
        ctx.types, ctx.grad_padding = (x.dtype, branch.dtype), grad_padding
        return total, normed

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        first, second = ctx.types
        padding = ctx.grad_padding if first == second else 0
        dx, dw = norm_backward(*ctx.saved_tensors, *incoming, ctx.needs_input_grad[2], padding)
        branch = dx if first == second else copied_padded(dx, ctx.grad_padding, second)
        return dx.to(first), branch, dw if ctx.needs_input_grad[2] else None, None, None, None, None


@torch.library.custom_op("optrush::norm", mutates_args=())
def norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, padding: int = 0) -> tuple[Tensor, Tensor]:
    """Return x (..., D) normalized with weight (D,), in `dtype` and padded, and 1 / rms (N,), at least float32."""
    if x.is_cuda:
        from optrush.kernels.rms_norm_triton import rms_norm_forward

        _, normed, scale = rms_norm_forward(x, None, weight, eps, dtype, padding)
        return normed, scale
    wide = widen(x)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return copied_padded((weight * (wide * scale).to(x.dtype)).to(dtype), padding), scale.flatten()


@norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, padding: int = 0) -> tuple[Tensor, Tensor]:
    return empty_padded(x, *x.shape, columns=padding, dtype=dtype), _scales(x)


@torch.library.custom_op("optrush::add_norm", mutates_args=())
def add_norm(
    x: Tensor, branch: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, padding: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """x, branch (..., D), weight (D,) -> their sum (..., D), and the sum's `norm`."""
    if x.is_cuda:
        from optrush.kernels.rms_norm_triton import rms_norm_forward

        return rms_norm_forward(x, branch, weight, eps, dtype, padding)
    total = x + branch
    return total, *norm(total, weight, eps, dtype, padding)


@add_norm.register_fake
def _(
    x: Tensor, branch: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, padding: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    kind = torch.promote_types(x.dtype, branch.dtype)
    total = torch.empty_like(x, dtype=kind, memory_format=torch.contiguous_format)
    return total, empty_padded(x, *x.shape, columns=padding, dtype=dtype), _scales(x)


@torch.library.custom_op("optrush::norm_backward", mutates_args=())
def norm_backward(
    x: Tensor, weight: Tensor, scale: Tensor, past: Tensor, grad: Tensor, needs_dw: bool, padding: int = 0
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of x (..., D), in its type and padded, and of the weight (D,); (0,) if it is frozen.

    x, scale: input of the norm, 1 / rms (N,); past: gradient of the residual stream; grad: gradient of the output.
    """
    if x.is_cuda:
        from optrush.kernels.rms_norm_triton import rms_norm_backward

        return rms_norm_backward(x, weight, scale, past, grad, needs_dw, padding)
    scale = scale.view(*x.shape[:-1], 1)
    unit, inner = widen(x) * scale, widen(grad) * weight
    dx = scale * (inner - unit * (inner * unit).mean(-1, keepdim=True)) + past
    dw = (widen(grad) * unit.to(x.dtype)).flatten(0, -2).sum(0) if needs_dw else weight.new_empty(0)
    return copied_padded(dx.to(x.dtype), padding), dw.to(weight.dtype)


@norm_backward.register_fake
def _(
    x: Tensor, weight: Tensor, scale: Tensor, past: Tensor, grad: Tensor, needs_dw: bool, padding: int = 0
) -> tuple[Tensor, Tensor]:
    return empty_padded(x, *x.shape, columns=padding), weight.new_empty(len(weight) if needs_dw else 0)


def _scales(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-1].numel(), dtype=torch.promote_types(x.dtype, torch.float32))
