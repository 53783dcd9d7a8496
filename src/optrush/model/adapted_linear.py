"""A frozen linear with a low-rank sum beside it as one function: U A x, and W x added to it in place; both ways.

Kept for the backward pass: the input, A x, the small matrices, and what the weight is made of; no weight that was made
dense.

Legend: r rows of A; U is B with its factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optrush.kernels.products import By, add_product
from optrush.model.quantised import Layout, unpacked


def dense(layout: Layout | None, parts: Sequence[Tensor], dtype: torch.dtype, use: str) -> Tensor:
    """The weight itself, or what a stored one stands for; `use`: see `quantised.dense`."""
    return parts[0] if layout is None else unpacked(parts, layout, dtype, use)


def linear(
    x: Tensor, a: Tensor, u: Tensor, bias: Tensor | None, layout: Layout | None, parts: Sequence[Tensor], by: By
) -> Tensor:
    """x (..., D), A (r, D), U (rows, r), bias (rows,) or None, the weight's layout and parts -> (..., rows).

    All of one type; the weight has no gradient. by: who multiplies by the weight.
    """
    y: Tensor = _Linear.apply(x.flatten(0, -2), a, u, bias, layout, by, *parts)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], -1)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        """Not by name: see `quantised._Product`."""
        x, a, u, bias, layout, by, *parts = given
        ctx.layout, ctx.by = layout, by
        with torch.autocast(x.device.type, enabled=False):
            z = x @ a.t()
            y = F.linear(z, u, bias)
            add_product(y, x, dense(layout, parts, x.dtype, "forward").t(), by)
        ctx.save_for_backward(x, z, a, u, *parts)
        return y

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        x, z, a, u, *parts = ctx.saved_tensors  # asked for once, as torch's checkpoints want it
        grad, d_x, d_bias = incoming[0], None, None  # (N, rows)
        with torch.autocast(grad.device.type, enabled=False):
            d_z = grad @ u  # (N, r)
            if ctx.needs_input_grad[0]:
                d_x = d_z @ a
                add_product(d_x, grad, dense(ctx.layout, parts, grad.dtype, "backward"), ctx.by)
            if ctx.needs_input_grad[3]:
                d_bias = grad.sum(0)
            d_a, d_u = d_z.t() @ x, grad.t() @ z
        return d_x, d_a, d_u, d_bias, None, None, *[None] * len(parts)
