"""The feed-forward part of frozen linears with its activation inside the products, their adapters in the same products.

A low-rank sum is more columns of a product: W x + U (A x) is [W | U] by [x | A x]. So the product that makes gate and
up, and writes their activation from its epilogue, adds the adapter's part too, and the one that makes the activation's
gradient sums over the down product and its adapter: nothing is read and written for adapters but narrow matrices.

Kept for the backward pass: gate and up, A x of each adapter, the small matrices, and the input where gate_up has an
adapter; not the activation, not what lies side by side, no weight that was made dense.

Legend: r rows of the A of one linear, 0 where no adapter acts; U is B with its factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optrush.frozen import tiles
from optrush.kernels.products import gradients, low_rank
from optrush.kernels.room import Room, joined
from optrush.kernels.swiglu_quack import gated, gated_backward
from optrush.model.adapted import Beside
from optrush.model.adapted_linear import dense, weight_of
from optrush.model.decoder import Linear
from optrush.model.quantised import Layout, Quantised


def fits(linear: nn.Module) -> bool:
    """Whether a linear is a frozen matrix, dense or stored, with a low-rank sum beside it or nothing."""
    if type(linear) is not Linear or linear.bias is not None:
        return False
    product, beside = linear.product, linear.adapter
    if beside is not None:
        if not isinstance(beside, Beside) or product != beside.product or beside.low_rank(torch.float32) is None:
            return False
        product = beside.inner
    if linear.stored is not None:
        return isinstance(linear.stored, Quantised) and product == linear.stored.product
    return product is F.linear and not linear.weight.requires_grad


def feed(x: Tensor, h: Tensor, gate_up: Linear, down: Linear) -> Tensor:
    """As `swiglu.Feed`, for linears that `fits` says are fit."""
    kind = h.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else h.dtype
    h = h.to(dtype)
    small = (*_low(h, gate_up), *_low(h, down))
    (layout1, *parts1), (layout2, *parts2) = _weight(gate_up, dtype), _weight(down, dtype)
    rooms = _room(gate_up), _room(down)
    out: Tensor = _Feed.apply(x, h, *small, layout1, layout2, *rooms, *parts1, *parts2)  # type: ignore[no-untyped-call]
    return out


def _room(linear: Linear) -> Room:
    return linear.adapter.room if isinstance(linear.adapter, Beside) else Room()


def _low(h: Tensor, linear: Linear) -> tuple[Tensor, Tensor]:
    """A (r, width) and U (rows, r) of what acts beside a linear now, in the type of h."""
    beside = linear.adapter
    if isinstance(beside, Beside) and beside.switch.on:
        low = beside.low_rank(h.dtype)
        assert low is not None
        return low
    return h.new_empty(0, linear.in_features), h.new_empty(linear.out_features, 0)


def _weight(linear: Linear, dtype: torch.dtype) -> tuple[Any, ...]:
    """What the weight is made of: its layout, or None and the weight itself."""
    if isinstance(linear.stored, Quantised):
        return linear.stored.layout, *linear.stored.parameters()
    # Cast out here, where autograd sees it: what moves saved tensors knows a parameter's copy by that.
    return None, linear.weight.to(dtype)


class _Feed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        """given: x and h (..., D), a1 (r, D), u1 (2 F, r), a2 (r, F), u2 (D, r), both layouts, both rooms, all parts
        -> (..., D).

        Not by name: see `quantised._Product`.
        """
        x, h, a1, u1, a2, u2, layout1, layout2, room1, room2, *parts = given
        ctx.layouts, ctx.rooms, rows, use = (layout1, layout2), (room1, room2), h.flatten(0, -2), "forward"
        with torch.autocast(h.device.type, enabled=False):
            first, second = _split(ctx.layouts, parts)
            z1 = rows @ a1.t()  # (N, r)
            upper, many = weight_of(layout1, first, use, u1, 1, room1), tiles(len(a2)) * room2.weight
            pairs, product = gated(rows, upper, z1, u1, room1.x, room1.weight, many)
            lower = weight_of(layout2, second, use, u2, 1, room2)
            out, z2 = low_rank(
                product, lower.t(), a2.t(), u2.t(), "quack", roomy=room2.weight, roomy_x=True
            )  # (N, D), (N, r)
        ctx.save_for_backward(h if len(a1) else None, z1, z2, pairs, a1, u1, a2, u2, *parts)
        total: Tensor = x + out.view_as(x)  # by the product it costs as much on 8B (LOG.md)
        return total

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        h, z1, z2, pairs, a1, u1, a2, u2, *parts = ctx.saved_tensors  # asked for once, as torch's checkpoints want it
        (layout1, layout2), (room1, room2) = ctx.layouts, ctx.rooms
        grad, use, d_h = incoming[0].flatten(0, -2).to(pairs.dtype), "backward", None  # (N, D)
        with torch.autocast(grad.device.type, enabled=False):
            first, second = _split(ctx.layouts, parts)
            d_z2 = grad @ u2  # (N, r)
            down = weight_of(layout2, second, use, a2, 0, room2)
            d_pairs, product = gated_backward(joined(grad, d_z2, 1), down, pairs, a2, room2.weight)  # (N, 2 F), (N, F)
            del down
            d_a2, d_u2, d_u1 = d_z2.t() @ product, grad.t() @ z2, d_pairs.t() @ z1
            if ctx.needs_input_grad[1] and len(a1) and room1.weight:
                d_h, d_z1 = gradients(d_pairs, weight_of(layout1, first, use, u1, 1, room1), u1, a1)
            elif ctx.needs_input_grad[1]:  # (N, D), (N, r)
                d_h, d_z1 = low_rank(d_pairs, dense(layout1, first, grad.dtype, use), u1, a1, "quack")
            else:
                d_z1 = d_pairs @ u1
            d_a1 = None if h is None else d_z1.t() @ h.flatten(0, -2)
        d_h = None if d_h is None else d_h.view(incoming[0].shape)
        return incoming[0], d_h, d_a1, d_u1, d_a2, d_u2, *[None] * (4 + len(parts))


def _split(layouts: Sequence[Layout | None], parts: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """What each of both weights is made of."""
    n = 1 if layouts[0] is None else layouts[0].parts * len(layouts[0].rows)
    return parts[:n], parts[n:]
