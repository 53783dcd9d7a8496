"""RMSNorm with the addition before it: what a branch gave is added to the residual stream, and the sum normed.

    plain   torch, one operator at a time: the reference, which a compiler fuses
    fused   one kernel forward and one backward

The backward kernel reads each value once: it makes the gradient of the input, adds what reaches the stream past the
norm, and gathers the weight's gradient on the way. So the stream goes through the norm, `(x, h)` in and out, although
the norm does not change it: its gradient is added where the norm's is made.

float32 inside, rounded to the stream's type before the weight as the families do. Keeps the sum and 1 / rms (N,).
Source: Zhang and Sennrich 2019 (arXiv:1910.07467); one kernel each way as in Liger Kernel (arXiv:2410.10989).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from optrush.kernels.lora_matmul import copied_padded, empty_padded

Norm = Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]
"""(x (..., D), branch (..., D) or None, weight (D,), eps) -> x + branch (..., D), and that normed (..., D)"""


def plain(x: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `Norm` says."""
    x = x if branch is None else x + branch
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return x, weight * wide.to(x.dtype)


def fused(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, *, room: int = 0, back: int = 0
) -> tuple[Tensor, Tensor]:
    """As `Norm` says; under autocast what is normed has its type, for products alone read it.

    room, back: columns that are left (kernels/room.py) beside what is normed, and beside the branch's gradient.
    """
    kind = x.device.type
    dtype = torch.promote_types(x.dtype, weight.dtype)
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    if branch is None:
        normed: Tensor
        x, normed = _Norm.apply(x, weight, eps, dtype, room)  # type: ignore[no-untyped-call]
        return x, normed
    added: tuple[Tensor, Tensor] = _AddNorm.apply(x, branch, weight, eps, dtype, room, back)  # type: ignore[no-untyped-call]
    return added


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, room: int
    ) -> tuple[Tensor, Tensor]:
        normed, scale = norm(x, weight, eps, dtype, room)
        ctx.save_for_backward(x, weight, scale)
        return x.view_as(x), normed

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = norm_backward(*ctx.saved_tensors, *incoming, ctx.needs_input_grad[1], 0)
        return dx, dw if ctx.needs_input_grad[1] else None, None, None, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, room: int, back: int
    ) -> tuple[Tensor, Tensor]:
        total, normed, scale = add_norm(x, branch, weight, eps, dtype, room)
        ctx.save_for_backward(total, weight, scale)
        ctx.types, ctx.back = (x.dtype, branch.dtype), back
        return total, normed

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        first, second = ctx.types
        dx, dw = norm_backward(
            *ctx.saved_tensors, *incoming, ctx.needs_input_grad[2], ctx.back if first == second else 0
        )
        branch = dx if first == second else copied_padded(dx, ctx.back, second)
        return dx.to(first), branch, dw if ctx.needs_input_grad[2] else None, None, None, None, None


@torch.library.custom_op("optrush::norm", mutates_args=())
def norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, room: int = 0) -> tuple[Tensor, Tensor]:
    """x (..., D), weight (D,) -> normed (..., D) in a type and with room, 1 / rms (N,) in float32 at least."""
    if x.is_cuda:
        from optrush.kernels.rms_norm_triton import forward

        _, normed, scale = forward(x, None, weight, eps, dtype, room)
        return normed, scale
    wide = _wide(x)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return copied_padded((weight * (wide * scale).to(x.dtype)).to(dtype), room), scale.flatten()


@norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, room: int = 0) -> tuple[Tensor, Tensor]:
    return empty_padded(x, *x.shape, columns=room, dtype=dtype), _scales(x)


@torch.library.custom_op("optrush::add_norm", mutates_args=())
def add_norm(
    x: Tensor, branch: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, room: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """x, branch (..., D), weight (D,) -> their sum (..., D), as `norm` of it."""
    if x.is_cuda:
        from optrush.kernels.rms_norm_triton import forward

        return forward(x, branch, weight, eps, dtype, room)
    total = x + branch
    return total, *norm(total, weight, eps, dtype, room)


@add_norm.register_fake
def _(
    x: Tensor, branch: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, room: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    kind = torch.promote_types(x.dtype, branch.dtype)
    total = torch.empty_like(x, dtype=kind, memory_format=torch.contiguous_format)
    return total, empty_padded(x, *x.shape, columns=room, dtype=dtype), _scales(x)


@torch.library.custom_op("optrush::norm_backward", mutates_args=())
def norm_backward(
    x: Tensor, weight: Tensor, scale: Tensor, past: Tensor, grad: Tensor, learns: bool, room: int = 0
) -> tuple[Tensor, Tensor]:
    """Gradients of x (..., D), in its type, and of the weight (D,), or (0,) of one that does not learn.

    Args:
        x, scale: what was normed, 1 / rms (N,).
        past: gradient that reaches x past the norm (..., D).
        grad: of what is normed (..., D).
        room: columns that are left beside the gradient of x.
    """
    if x.is_cuda:
        from optrush.kernels.rms_norm_triton import backward

        return backward(x, weight, scale, past, grad, learns, room)
    scale = scale.view(*x.shape[:-1], 1)
    unit, inner = _wide(x) * scale, _wide(grad) * weight
    dx = scale * (inner - unit * (inner * unit).mean(-1, keepdim=True)) + past
    dw = (_wide(grad) * unit.to(x.dtype)).flatten(0, -2).sum(0) if learns else weight.new_empty(0)
    return copied_padded(dx.to(x.dtype), room), dw.to(weight.dtype)


@norm_backward.register_fake
def _(
    x: Tensor, weight: Tensor, scale: Tensor, past: Tensor, grad: Tensor, learns: bool, room: int = 0
) -> tuple[Tensor, Tensor]:
    return empty_padded(x, *x.shape, columns=room), weight.new_empty(len(weight) if learns else 0)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _scales(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-1].numel(), dtype=torch.promote_types(x.dtype, torch.float32))
