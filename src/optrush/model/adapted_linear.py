"""A frozen linear with a low-rank sum beside it as one function, W x + U A x, both ways.

Kept for the backward pass: the input, A x, the small matrices, and what the weight is made of; no weight that was made
dense.

Legend: r rows of A; U is B with its factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from optrush.frozen import TILE, tiles
from optrush.kernels.products import By, low_rank
from optrush.kernels.room import Room
from optrush.model.quantised import Layout, unpacked


def dense(layout: Layout | None, parts: Sequence[Tensor], dtype: torch.dtype, use: str) -> Tensor:
    """The weight itself, or what a stored one stands for; `use`: see `quantised.dense`."""
    return parts[0] if layout is None else unpacked(parts, layout, dtype, use)


def weight_of(layout: Layout | None, parts: Sequence[Tensor], use: str, narrow: Tensor, dim: int, room: Room) -> Tensor:
    """As `dense`; where it shall have room, a stored one has it for `narrow` below it (0) or right of it (1)."""
    many = tiles(narrow.shape[dim])
    if layout is None or not (many and room.weight):
        return dense(layout, parts, narrow.dtype, use)
    wide = unpacked(parts, layout, narrow.dtype, use, (0, many) if dim else (many, TILE))
    return wide[:, :-many] if dim else wide[:-many, :-TILE]


def linear(
    x: Tensor, a: Tensor, u: Tensor, bias: Tensor | None, layout: Layout | None, parts: Sequence[Tensor], by: By,
    room: Room,
) -> Tensor:  # fmt: skip
    """x (..., D), A (r, D), U (rows, r), bias (rows,) or None, the weight's layout and parts -> (..., rows).

    All of one type; the weight has no gradient. by: who multiplies by the weight.
    """
    y: Tensor = _Linear.apply(x.flatten(0, -2), a, u, bias, layout, by, room, *parts)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], -1)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        """Not by name: see `quantised._Product`."""
        x, a, u, bias, layout, by, room, *parts = given
        ctx.layout, ctx.by, ctx.room = layout, by, room
        with torch.autocast(x.device.type, enabled=False):
            weight = weight_of(layout, parts, "forward", u, 1, room)
            y, z = low_rank(x, weight.t(), a.t(), u.t(), by, bias, roomy=room.weight, roomy_x=room.x)
        ctx.save_for_backward(x, z, a, u, *parts)
        return y

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        x, z, a, u, *parts = ctx.saved_tensors  # asked for once, as torch's checkpoints want it
        grad, d_x, d_bias = incoming[0], None, None  # (N, rows)
        with torch.autocast(grad.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                weight = weight_of(ctx.layout, parts, "backward", a, 0, ctx.room)
                d_x, d_z = low_rank(grad, weight, u, a, ctx.by, roomy=ctx.room.weight, roomy_x=ctx.room.grad)
            else:
                d_z = grad @ u  # (N, r)
            if ctx.needs_input_grad[3]:
                d_bias = grad.sum(0)
            d_a, d_u = d_z.t() @ x, grad.t() @ z
        return d_x, d_a, d_u, d_bias, None, None, None, *[None] * len(parts)
