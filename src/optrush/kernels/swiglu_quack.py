"""Gated feed-forward with the activation in the matmuls' epilogues, by QuACK; swiglu.py has the mathematics.

The epilogue of the gate and up matmul also writes silu(gate) * up. In the backward pass the matmul for the activation's
gradient reads gate and up in its epilogue, and writes their gradients and the recomputed activation; it does not write
the activation's gradient. QuACK requires gate and up in alternating columns, the order of our weight's rows. The last
matmul adds the stream before rounding, if the stream has the matmul's type.

bfloat16 or float16 on capability 9.0. Saves the input, gate and up (N, 2 F).
Source: https://github.com/Dao-AILab/quack (gemm_interface.py, gemm_gated and gemm_dgated).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optrush.kernels import compute_dtype
from optrush.kernels.lora_matmul import concat_in_padding, empty_padded, matmul_to_dtype, plus_product


def quack_mlp(x: Tensor, h: Tensor, gate_up: nn.Module, down: nn.Module) -> Tensor:
    """Implement `swiglu.Mlp` for a `gate_up` and a `down` that are plain matrices."""
    dtype, weights = compute_dtype(h), (gate_up.weight, down.weight)
    # Cast outside the Function, in autograd's graph: activation offloading uses it to recognize a parameter's copy.
    narrow = (t.to(dtype) for t in (h, *weights))
    wide = weights if gate_up.weight.dtype != dtype else ()  # the compiler rejects a tensor passed twice
    out: Tensor = _Mlp.apply(x, *narrow, *wide)  # type: ignore[no-untyped-call]
    return out


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        """Take x, h (..., D), gate_up (2 F, D), down (D, F) in the type of h, and the weights before the cast, if any.

        Gradients then go to the uncast weights, without rounding to the type of h. Returns (..., D).
        """
        x, h, gate_up, down, *wide = inputs
        pairs, product = gated_matmul(h.flatten(0, -2), gate_up)
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
            d_pairs, product = gated_matmul_backward(grad, down, pairs)
            d_h = (d_pairs @ gate_up).view(h.shape)
            first, second = ctx.wide or (h.dtype, h.dtype)
            d_gate_up = matmul_to_dtype(d_pairs.t(), h.flatten(0, -2), first)
            d_down = matmul_to_dtype(grad.t(), product, second)
            return incoming[0], d_h, *((None, None) if ctx.wide else ()), d_gate_up, d_down


WIDE = 4096  # summation length of a matmul from which larger tiles are faster


@cache
def _tile(rows: int, columns: int, *, turns: bool) -> Any:
    """Return a kernel's tile configuration, one object for all calls, because QuACK's cache compares by identity.

    turns: two groups of warps alternate, one multiplies while the other writes, and two neighbors in a column of tiles
        share reads. Otherwise both multiply one tile, and neighbors in a row share reads.
    """
    from quack.gemm_config import GemmConfig

    return GemmConfig(
        tile_m=rows, tile_n=columns, pingpong=turns, cluster_m=2 if turns else 1, cluster_n=1 if turns else 2,
        is_dynamic_persistent=False, device_capacity=9,
    )  # fmt: skip


@torch.library.custom_op("optrush::gated", mutates_args=(), device_types="cuda")
def gated_matmul(
    x: Tensor, weight: Tensor, z: Tensor | None = None, u: Tensor | None = None, padded_x: bool = False,
    padded: bool = False, padding: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """[x (N, D) | z (N, r)] times [weight (2 F, D) | u (2 F, r)] -> gate and up (N, 2 F), silu(gate) * up (N, F).

    padding: columns of padding for the latter. padded_x, padded: whether x and weight have padding.
    """
    from quack.gemm_interface import gemm_gated

    # The epilogue writes 1.5 times its tile's values. With turns and dynamic scheduling it overlaps with other tiles'
    # matmuls: 5 % less time at the 1B shape than with larger tiles. With longer sums, larger tiles are faster: 0.3 % of
    # an 8B step (docs/log).
    config = _tile(256, 192, turns=False) if weight.shape[1] >= WIDE else _tile(128, 192, turns=True)
    pairs, product = gemm_gated(
        concat_in_padding(x, z, 1, padded_x), concat_in_padding(weight, u, 1, padded).t(), activation="swiglu",
        postact_out=_product(x, weight, padding), config=config, dynamic_scheduler=True,
    )  # fmt: skip
    return pairs, product


@gated_matmul.register_fake
def _(
    x: Tensor, weight: Tensor, z: Tensor | None = None, u: Tensor | None = None, padded_x: bool = False,
    padded: bool = False, padding: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return x.new_empty(len(x), len(weight)), _product(x, weight, padding)


def _product(x: Tensor, weight: Tensor, padding: int) -> Tensor:
    return empty_padded(x, len(x), len(weight) // 2, columns=padding)


@torch.library.custom_op("optrush::gated_backward", mutates_args=(), device_types="cuda")
def gated_matmul_backward(
    grad: Tensor, weight: Tensor, pairs: Tensor, below: Tensor | None = None, padded: bool = False
) -> tuple[Tensor, Tensor]:
    """grad (N, D), weight (D, F) over further rows `below`, gate and up (N, 2 F) -> gradients, activation (N, F)."""
    from quack.gemm_interface import gemm_dgated

    # The epilogue moves five times its tile's values. With turns and dynamic scheduling it overlaps with other tiles'
    # matmuls: a quarter less time at the 1B shape (docs/log). With longer sums, a larger tile is faster: 4 % at the 8B
    # shape.
    config = _tile(128, 192 if weight.shape[0] >= WIDE else 128, turns=True)
    d_pairs, product = gemm_dgated(
        grad.contiguous(), concat_in_padding(weight, below, 0, padded), pairs, activation="swiglu", config=config,
        dynamic_scheduler=True,
    )  # fmt: skip
    return d_pairs, product


@gated_matmul_backward.register_fake
def _(
    grad: Tensor, weight: Tensor, pairs: Tensor, below: Tensor | None = None, padded: bool = False
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(pairs), pairs.new_empty(len(pairs), pairs.shape[1] // 2)
