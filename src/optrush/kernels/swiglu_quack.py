"""The feed-forward part with its activation inside the products, by QuACK; kernels/swiglu.py has the mathematics.

The product that makes gate and up also writes silu(gate) * up from its epilogue. In the backward pass the product that
makes the activation's gradient reads gate and up in its epilogue, and writes their gradients and the activation again:
the activation's gradient is never written. QuACK wants gate and up as alternating columns, which is how the rows of our
weight lie.

bfloat16 or float16 on capability 9.0. Keeps the input, gate and up (N, 2 F).
Source: https://github.com/Dao-AILab/quack (gemm_interface.py, gemm_gated and gemm_dgated).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optrush.kernels.room import beside, empty_with_room


def feed(x: Tensor, gate_up: nn.Module, down: nn.Module) -> Tensor:
    """As `swiglu.gated`, for a `gate_up` and a `down` that are matrices and nothing else."""
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    # Cast out here, where autograd sees it: what moves saved tensors knows a parameter's copy by that.
    tensors = (t.to(dtype) for t in (x, gate_up.weight, down.weight))
    out: Tensor = _Feed.apply(*tensors)  # type: ignore[no-untyped-call]
    return out


class _Feed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """x (..., D), gate_up (2 F, D), down (D, F) -> (..., D)."""
        pairs, product = gated(x.flatten(0, -2), gate_up)
        ctx.save_for_backward(x, gate_up, down, pairs)
        with torch.autocast("cuda", enabled=False):
            return F.linear(product, down).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, gate_up, down, pairs = ctx.saved_tensors
        grad = incoming[0].flatten(0, -2)  # (N, D)
        with torch.autocast("cuda", enabled=False):
            d_pairs, product = gated_backward(grad, down, pairs)
            d_x = (d_pairs @ gate_up).view(x.shape)
            return d_x, d_pairs.t() @ x.flatten(0, -2), grad.t() @ product


WIDE = 4096  # values that are summed


@cache
def _tile(rows: int, columns: int, *, turns: bool = False, along: bool = True) -> Any:
    """A kernel's tile. turns: two groups of warps, of which one multiplies while the other writes what it has; along:
    two neighbours in a column of tiles read together, otherwise in a row.

    One object for all calls: QuACK knows a call again by it.
    """
    from quack.gemm_config import GemmConfig

    return GemmConfig(
        tile_m=rows,
        tile_n=columns,
        pingpong=turns,
        cluster_m=2 if along else 1,
        cluster_n=1 if along else 2,
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

    # Where more is summed, pairs of tiles that share a row, and taken by who is free, are 2 % faster by themselves.
    deep = weight.shape[1] >= WIDE
    pairs, product = gemm_gated(
        beside(x, z, 1, roomy_x),
        beside(weight, u, 1, roomy).t(),
        activation="swiglu",
        postact_out=_product(x, weight, room),
        config=_tile(256, 192, along=not deep),
        dynamic_scheduler=deep,
    )
    return pairs, product


@gated.register_fake
def _(
    x: Tensor, weight: Tensor, z: Tensor | None = None, u: Tensor | None = None, roomy_x: bool = False,
    roomy: bool = False, room: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return x.new_empty(len(x), len(weight)), _product(x, weight, room)


def _product(x: Tensor, weight: Tensor, room: int) -> Tensor:
    return empty_with_room(x, len(x), len(weight) // 2, columns=room)


@torch.library.custom_op("optrush::gated_backward", mutates_args=(), device_types="cuda")
def gated_backward(
    grad: Tensor, weight: Tensor, pairs: Tensor, below: Tensor | None = None, roomy: bool = False
) -> tuple[Tensor, Tensor]:
    """grad (N, D), weight (D, F) and rows below it, gate and up (N, 2 F) -> their gradients, the activation (N, F)."""
    from quack.gemm_interface import gemm_dgated

    # The epilogue moves five times as many values as its tile has. Taken in turns, and by who is free instead of in a
    # fixed order, they pass while others multiply: a quarter less time at the 1B shape (LOG.md). Where more is summed
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
