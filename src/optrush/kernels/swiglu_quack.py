"""The feed-forward part with its activation inside the products, by QuACK; kernels/swiglu.py has the mathematics.

The product that makes gate and up also writes silu(gate) * up from its epilogue. In the backward pass the product that
makes the activation's gradient reads gate and up in its epilogue, and writes their gradients and the activation again:
the activation's gradient is never written. QuACK wants gate and up as alternating columns, which is how the rows of our
weight lie. The last product adds the stream to its sum before that is rounded, where it has the products' type.

bfloat16 or float16 on capability 9.0. Keeps the input, gate and up (N, 2 F).
Source: https://github.com/Dao-AILab/quack (gemm_interface.py, gemm_gated and gemm_dgated).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optrush.kernels.lora_matmul import beside, empty_padded, plus_product, summed


def feed(x: Tensor, h: Tensor, gate_up: nn.Module, down: nn.Module) -> Tensor:
    """As `swiglu.Feed`, for a `gate_up` and a `down` that are matrices and nothing else."""
    kind = h.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else h.dtype
    weights = gate_up.weight, down.weight
    # Cast out here, where autograd sees it: what moves saved tensors knows a parameter's copy by that.
    narrow = (t.to(dtype) for t in (h, *weights))
    wide = weights if gate_up.weight.dtype != dtype else ()  # the compiler wants no tensor twice
    out: Tensor = _Feed.apply(x, *narrow, *wide)  # type: ignore[no-untyped-call]
    return out


class _Feed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Tensor:
        """x, h (..., D), gate_up (2 F, D), down (D, F) in the type of h, and what both are casts of, if so -> (..., D).

        That has their gradients then, which are not rounded to the type of h on their way.
        """
        x, h, gate_up, down, *wide = given
        pairs, product = gated(h.flatten(0, -2), gate_up)
        ctx.save_for_backward(h, gate_up, down, pairs)
        ctx.wide = [w.dtype for w in wide]
        with torch.autocast(h.device.type, enabled=False):
            rows, same = x.flatten(0, -2), x.dtype == h.dtype
            out: Tensor = plus_product(rows, product, down.t()) if same else rows + F.linear(product, down)
            return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        h, gate_up, down, pairs = ctx.saved_tensors
        grad = incoming[0].flatten(0, -2).to(h.dtype)  # (N, D)
        with torch.autocast(h.device.type, enabled=False):
            d_pairs, product = gated_backward(grad, down, pairs)
            d_h = (d_pairs @ gate_up).view(h.shape)
            first, second = ctx.wide or (h.dtype, h.dtype)
            learnt = summed(d_pairs.t(), h.flatten(0, -2), first), summed(grad.t(), product, second)
            return incoming[0], d_h, *((None, None) if ctx.wide else ()), *learnt


WIDE = 4096  # values that are summed


@cache
def _tile(rows: int, columns: int, *, turns: bool) -> Any:
    """A kernel's tile. Two groups of warps take turns, so that one multiplies while the other writes, and two
    neighbours in a column of tiles read together; or both multiply one tile, and neighbours in a row read together.

    One object for all calls: QuACK knows a call again by it.
    """
    from quack.gemm_config import GemmConfig

    return GemmConfig(
        tile_m=rows,
        tile_n=columns,
        pingpong=turns,
        cluster_m=2 if turns else 1,
        cluster_n=1 if turns else 2,
        is_dynamic_persistent=False,
        device_capacity=9,
    )


@torch.library.custom_op("optrush::gated", mutates_args=(), device_types="cuda")
def gated(
    x: Tensor, weight: Tensor, z: Tensor | None = None, u: Tensor | None = None, roomy_x: bool = False,
    roomy: bool = False, room: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x (N, D) and z (N, r) beside it, weight (2 F, D) and u (2 F, r) -> gate and up (N, 2 F), silu(gate) * up (N, F).

    room: columns beside the latter.
    """
    from quack.gemm_interface import gemm_gated

    # The epilogue writes half as many values again as its tile has. Taken in turns, and by who is free, they pass while
    # others multiply: at the 1B shape 5 % less time by itself than larger tiles take. Where more is summed for each of
    # them these are faster: 0.3 % of an 8B step (docs/log).
    pairs, product = gemm_gated(
        beside(x, z, 1, roomy_x),
        beside(weight, u, 1, roomy).t(),
        activation="swiglu",
        postact_out=_product(x, weight, room),
        config=_tile(256, 192, turns=False) if weight.shape[1] >= WIDE else _tile(128, 192, turns=True),
        dynamic_scheduler=True,
    )
    return pairs, product


@gated.register_fake
def _(
    x: Tensor, weight: Tensor, z: Tensor | None = None, u: Tensor | None = None, roomy_x: bool = False,
    roomy: bool = False, room: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return x.new_empty(len(x), len(weight)), _product(x, weight, room)


def _product(x: Tensor, weight: Tensor, room: int) -> Tensor:
    return empty_padded(x, len(x), len(weight) // 2, columns=room)


@torch.library.custom_op("optrush::gated_backward", mutates_args=(), device_types="cuda")
def gated_backward(
    grad: Tensor, weight: Tensor, pairs: Tensor, below: Tensor | None = None, roomy: bool = False
) -> tuple[Tensor, Tensor]:
    """grad (N, D), weight (D, F) and rows below it, gate and up (N, 2 F) -> their gradients, the activation (N, F)."""
    from quack.gemm_interface import gemm_dgated

    # The epilogue moves five times as many values as its tile has. Taken in turns, and by who is free instead of in a
    # fixed order, they pass while others multiply: a quarter less time at the 1B shape (docs/log). Where more is summed
    # for each of them a larger tile is faster: 4 % at the 8B shape.
    d_pairs, product = gemm_dgated(
        grad.contiguous(),
        beside(weight, below, 0, roomy),
        pairs,
        activation="swiglu",
        config=_tile(128, 192 if weight.shape[0] >= WIDE else 128, turns=True),
        dynamic_scheduler=True,
    )
    return d_pairs, product


@gated_backward.register_fake
def _(
    grad: Tensor, weight: Tensor, pairs: Tensor, below: Tensor | None = None, roomy: bool = False
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(pairs), pairs.new_empty(len(pairs), pairs.shape[1] // 2)
