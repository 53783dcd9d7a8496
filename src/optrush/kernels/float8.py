"""Linear layer with its three matmuls in 8-bit floats: inputs and weight e4m3 (4 exponent bits), gradients e5m2.

    y  = x @ w.T      dx = g @ w      dw = g.T @ x        x (M, K), w (N, K), g and y (M, N)

Each operand is scaled by one factor, the largest value of its type over the operand's largest value (dynamic, per
tensor), and rounded to 8 bits. The matmul sums in float32; its result is scaled back and rounded to the compute type. A
non-finite value makes the factor NaN or 0, and so every result NaN: the update's check for finite gradients detects
this.

On CUDA the matmuls are torch._scaled_mm, whose second operand is column-major: a row-major one is copied while it is
rounded. On a CPU the rounded operands are multiplied in float32: equal results, no faster. The backward pass saves x in
8 bits; the weight, which exists anyway, is rounded again.

Source: Micikevicius et al., https://arxiv.org/abs/2209.05433
Differs from the source: factors from the current tensor, not from its history.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optrush.kernels import compute_dtype

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
TINY = 1e-30  # keeps the factor of an all-zero operand finite


def float8_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute torch.nn.functional.linear of x (..., K), weight (N, K), bias (N,) or None, with 8-bit matmuls.

    The result (..., N) has the compute type; under autocast x and weight are cast first. The bias is added in that
    type.
    """
    dtype = compute_dtype(x)
    flat = x.reshape(-1, x.shape[-1]).to(dtype)
    y: Tensor = _Linear.apply(flat, weight.to(dtype))  # type: ignore[no-untyped-call]
    if bias is not None:
        y = y + bias.to(dtype)
    return y.view(*x.shape[:-1], weight.shape[0])


def rounded(t: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return t scaled and rounded to 8 bits, and the () float32 factor that scales it back."""
    most = torch.finfo(dtype).max
    factor = most / t.abs().amax().float().clamp_min(TINY)
    # Clamped, because a scaled value may round above the largest value, which is NaN in e4m3; a NaN stays NaN.
    return (t.float() * factor).clamp(-most, most).to(dtype), factor.reciprocal()


def multiply(a: Tensor, of_a: Tensor, b: Tensor, of_b: Tensor, into: torch.dtype, *, quick: bool) -> Tensor:
    """Compute (M, K) @ (K, N) -> (M, N): a row-major, b column-major, both in 8 bits.

    Args:
        of_a, of_b: () float32 factors of the sums. Two separate tensors: torch 2.11 cannot compile the matmul with
        factors that are views of one tensor.
        quick: Hopper's faster accumulation with fewer bits, good enough for a forward pass.
    """
    if a.is_cuda:
        y: Tensor = torch._scaled_mm(a, b, of_a, of_b, out_dtype=into, use_fast_accum=quick)
        return y
    with torch.autocast("cpu", enabled=False):  # autocast would multiply values up to 448 in a narrower type
        y = (a.float() @ b.float()) * (of_a * of_b)
    # No cast to its own type: compiled by torch 2.11, a Function that returns such a cast has gradients of zero.
    return y if into == y.dtype else y.to(into)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8, of_x = rounded(x, FORWARD)
        w8, of_w = rounded(weight, FORWARD)
        ctx.save_for_backward(x8, of_x, weight)
        return multiply(x8, of_x, w8.t(), of_w, x.dtype, quick=True)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x8, of_x, weight = ctx.saved_tensors
        g8, of_g = rounded(incoming[0], BACKWARD)
        into = incoming[0].dtype
        dx = dw = None
        if ctx.needs_input_grad[0]:
            w8, of_w = rounded(weight, FORWARD)
            dx = multiply(g8, of_g, _columns(w8), of_w, into, quick=False)
        if ctx.needs_input_grad[1]:
            dw = multiply(g8.t().contiguous(), of_g, _columns(x8), of_x, into, quick=False)
        return dx, dw


def _columns(t: Tensor) -> Tensor:
    """Return t in column-major layout."""
    return t.t().contiguous().t()
