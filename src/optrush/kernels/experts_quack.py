"""Matmuls of routed experts by QuACK: groups of rows with separate matrices, and a layer of experts.

    grouped_quack  the matmul of each group of rows with its matrix, instead of torch's
    feed_quack     a layer of experts: from tokens and their experts to the weighted sums

The layer does not copy rows of tokens: the matmul of gate and up, and in the backward pass the matmuls for the
gradients of activation and weights, read tokens by index. Activations are fused into the epilogues, as in
swiglu_quack.py. The backward epilogue also multiplies by a row's weight, and sums that weight's gradient in float32.

Differs from models/experts.py: there the weight multiplies the input of `down`, here its output, when a token's rows
are summed. Both are the same function of tokens, weights and matrices, so all gradients are equal; the gradient of
`down` still uses the activation times its weight.

bfloat16 or float16 on capability 9.0. The host does not read the number of rows. Saves tokens (S, D), gate and up (S k,
2 F), and places and weights of rows; nothing else of this size.
Source: https://github.com/Dao-AILab/quack (gemm_interface.py: matmuls with variable row counts, and over summed rows).
Legend: S tokens, k experts per token, N experts, D width, F width of an expert.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from optrush.models.experts import Experts, Places

WIDE = 4096  # as in swiglu_quack.py


@cache
def _tile(columns: int = 192) -> Any:
    """Return a tile of 128 rows and these columns, for two alternating warp groups: one multiplies while one writes.

    One object for all calls, because QuACK's cache compares by identity. Matmuls that read rows by index allow no
    cluster along the columns.
    """
    from quack.gemm_config import GemmConfig

    return GemmConfig(
        tile_m=128, tile_n=columns, pingpong=True, cluster_m=2, cluster_n=1, is_dynamic_persistent=False,
        device_capacity=9,
    )  # fmt: skip


def _bounds(ends: Tensor) -> Tensor:
    return F.pad(ends, (1, 0))  # the start of each group, and the last end


# --- matmuls of groups of rows


@torch.library.custom_op("optrush::grouped_quack", mutates_args=())
def grouped_quack(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply x (rows, C) in groups by weight (N, C, R), with the groups' ends (N,) int32 -> (rows, R)."""
    from quack.gemm_interface import gemm_tuned

    out = x.new_empty(x.shape[0], weight.shape[2])
    if len(x):
        options = {"cu_seqlens_m": _bounds(ends), "config": _tile(), "dynamic_scheduler": False}
        gemm_tuned.fn(x.contiguous(), weight, out, **options)
    return out


@grouped_quack.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@torch.library.custom_op("optrush::sum_of_groups", mutates_args=())
def sum_of_groups(a: Tensor, b: Tensor, ends: Tensor, numbers: Tensor | None, transposed: bool) -> Tensor:
    """Sum a^T b over each group: a (rows, P), b (rows, Q), ends (N,) int32 -> (N, P, Q), or (N, Q, P) if transposed.

    Args:
        numbers: (rows,) int32 row indices of a, if a has other rows or another order.
    """
    from quack.gemm_interface import gemm_tuned

    P, Q = a.shape[1], b.shape[1]
    out = a.new_empty(len(ends), *((Q, P) if transposed else (P, Q)))
    if not len(b):
        return out.zero_()
    options = {"cu_seqlens_k": _bounds(ends), "A_idx": numbers, "config": _tile(), "dynamic_scheduler": False}
    gemm_tuned.fn(a.contiguous().t(), b.contiguous(), out.mT if transposed else out, **options)
    return out


@sum_of_groups.register_fake
def _(a: Tensor, b: Tensor, ends: Tensor, numbers: Tensor | None, transposed: bool) -> Tensor:
    P, Q = a.shape[1], b.shape[1]
    return a.new_empty(ends.shape[0], *((Q, P) if transposed else (P, Q)))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ends = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, ends)  # not needed for a frozen weight


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, ends = ctx.saved_tensors
    d_x = grouped_quack(grad, weight.mT, ends) if ctx.needs_input_grad[0] else None
    # As rows of outputs: the memory layout of the parameter behind the transposed weight.
    d_weight = sum_of_groups(grad, x, ends, None, False).mT if ctx.needs_input_grad[1] else None
    return d_x, d_weight, None


grouped_quack.register_autograd(_gradients, setup_context=_keep)


# --- operators of a layer, without autograd


@torch.library.custom_op("optrush::experts_gated", mutates_args=())
def gated_rows(x: Tensor, gate_up: Tensor, numbers: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """x (S, D) by `numbers` (rows,) int32, gate_up (N, 2 F, D) -> gate and up (rows, 2 F), the activation (rows, F)."""
    from quack.gemm_interface import gemm_gated

    pairs, product = gemm_gated(
        x.contiguous(), gate_up.mT, activation="swiglu", cu_seqlens_m=_bounds(ends), A_idx=numbers, config=_tile(),
        dynamic_scheduler=False,
    )  # fmt: skip
    return pairs, product


@gated_rows.register_fake
def _(x: Tensor, gate_up: Tensor, numbers: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    rows, wide = numbers.shape[0], gate_up.shape[1]
    return x.new_empty(rows, wide), x.new_empty(rows, wide // 2)


@torch.library.custom_op("optrush::experts_gated_backward", mutates_args=())
def gated_rows_backward(
    grad: Tensor, down: Tensor, pairs: Tensor, weight: Tensor, numbers: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate activation, down matmul and weights, given the gradient of the tokens' sums.

    Args:
        grad: (S, D), read by `numbers` (rows,) int32.
        down: (N, D, F).
        pairs: gate and up (rows, 2 F).
        weight: float32 (rows,).

    Returns:
        gradients of gate and up (rows, 2 F); activation times weight (rows, F); gradients of weights (rows,).
    """
    from quack.gemm_interface import gemm_dgated

    d_pairs, product, d_weight = gemm_dgated(
        grad.contiguous(), down, pairs, activation="swiglu", colvec_scale=weight, colvec_reduce=True,
        cu_seqlens_m=_bounds(ends), A_idx=numbers, config=_tile(192 if down.shape[1] >= WIDE else 128),
        dynamic_scheduler=False,
    )  # fmt: skip
    return d_pairs, product, d_weight


@gated_rows_backward.register_fake
def _(
    grad: Tensor, down: Tensor, pairs: Tensor, weight: Tensor, numbers: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(pairs), pairs.new_empty(pairs.shape[0], down.shape[2]), torch.empty_like(weight)


@torch.library.custom_op("optrush::experts_sum", mutates_args=())
def sum_of_rows(y: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """y (rows, D), places (S, k) of each token's rows, weights (S, k) float32 or None -> sums of k rows (S, D)."""
    if y.is_cuda:
        from optrush.kernels.experts_triton import launch_sum_of_rows

        return launch_sum_of_rows(y, places, weights)
    rows = y[places].to(torch.promote_types(y.dtype, torch.float32))
    return (rows if weights is None else rows * weights[..., None]).sum(1).to(y.dtype)


@sum_of_rows.register_fake
def _(y: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    return y.new_empty(places.shape[0], y.shape[1])


# --- a layer


def feed_quack(experts: Experts, x: Tensor, weights: Tensor, places: Places) -> Tensor:
    """Implement `Feed` for plain matrices, all of them on this rank, and the activation silu(gate) * up."""
    # Cast outside the Function, in autograd's graph: activation offloading uses it to recognize a parameter's copy.
    matrices = (experts.piece(experts.get_parameter(kind)).to(x.dtype) for kind in ("gate_up", "down"))
    numbers = (places.order // weights.shape[1]).int()
    rows = (numbers, places.order, places.inverse, places.ends)
    out: Tensor = _Layer.apply(x, weights, *matrices, *rows)  # type: ignore[no-untyped-call]
    return out


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        """Take x (S, D), weights (S, k), gate_up (N, 2 F, D), down (N, D, F), numbers (rows,) of tokens, and places."""
        x, weights, gate_up, down, numbers, order, inverse, ends = inputs
        pairs, product = gated_rows(x, gate_up, numbers, ends)
        y = grouped_quack(product, down.mT, ends)
        weight = weights.flatten()[order]
        ctx.save_for_backward(x, weight, gate_up, down, pairs, numbers, inverse, ends)
        ctx.k = weights.shape[1]
        out: Tensor = sum_of_rows(y, inverse.view(weights.shape), weights)
        return out

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gate_up, down, pairs, numbers, inverse, ends = ctx.saved_tensors
        grad = incoming[0]
        d_pairs, product, d_weight = gated_rows_backward(grad, down, pairs, weight, numbers, ends)
        d_down = sum_of_groups(grad, product, ends, numbers, False) if ctx.needs_input_grad[3] else None
        d_gate_up = sum_of_groups(x, d_pairs, ends, numbers, True) if ctx.needs_input_grad[2] else None
        places = inverse.view(-1, ctx.k)
        d_x = sum_of_rows(grouped_quack(d_pairs, gate_up, ends), places, None) if ctx.needs_input_grad[0] else None
        return d_x, d_weight[places], d_gate_up, d_down, None, None, None, None
