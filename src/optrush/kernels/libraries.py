"""Linear layer and cross-entropy by kernel libraries: sums of losses whose gradients are made in the forward pass.

    function(hidden (N, D), weight (V, D), labels (N,) int64, chunk) -> () float32, the sum over labels not -100

Both hold the logits of some rows at a time, sum the weight's gradient in float32, and scale what they made in place in
the backward pass: once. No bias, scale, softcap or row weights. Their modules are imported when first called.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optrush.data.batch import IGNORE
from optrush.errors import NeedsError
from optrush.kernels.scaled import scaled

STEP = 128  # rows of QuACK's tile


def quack(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """QuACK's products whose epilogue exponentiates: neither logits nor their gradients are written, exponents are.

    bfloat16 (autocast's too), capability 9.0; V and chunk multiples of 128. A product of as many rows as the width is
    refused by the library (it cannot tell rows from columns): so chunks are made smaller until none is one.
    Source: https://github.com/Dao-AILab/quack (linear_cross_entropy.py).
    Saves (N, D) in bfloat16 and (V, D) float32. Holds (chunk, V) bfloat16 at once.
    Differs from the source: the backward pass scales and casts each gradient at once, by a float32 factor.
    """
    from quack.linear_cross_entropy import scaled_exp_linear_cross_entropy

    rows = even(len(hidden), hidden.shape[1], chunk)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        total = _Quack.apply(hidden, weight, labels, rows)  # type: ignore[no-untyped-call]
    else:
        total = scaled_exp_linear_cross_entropy(hidden, weight, labels, rows, IGNORE, "sum")
    assert isinstance(total, Tensor)
    return total


class _Quack(torch.autograd.Function):
    """The library's loss and gradients; how these are scaled is ours."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, rows: int) -> Tensor:
        from quack.linear_cross_entropy import scaled_exp_linear_cross_entropy_fwd

        N, (h_needs, w_needs) = len(hidden), ctx.needs_input_grad[:2]
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else hidden.dtype
        h = hidden.to(dtype).contiguous()  # its loads want rows that begin at 16 bytes
        losses, dh, dw = scaled_exp_linear_cross_entropy_fwd(
            h, weight.to(dtype), labels, rows, IGNORE, need_dx=h_needs, need_dw=w_needs
        )
        ctx.types = (hidden.dtype, weight.dtype)
        ctx.made = (None if dh is None else dh[:N], dw)  # it pads the last chunk
        total: Tensor = losses[:N].sum()
        return total

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.made is None:
            raise RuntimeError("quack's loss gives its gradients once: they were scaled in place")
        made, ctx.made = ctx.made, None
        dh, dw = (None if t is None else scaled(t, incoming[0], dtype) for t, dtype in zip(made, ctx.types))
        return dh, dw, None, None


def even(N: int, D: int, chunk: int) -> int:
    """Rows a chunk: a multiple of 128 up to `chunk`, about even, and no chunk has D rows when padded to 128.

    Raises:
        NeedsError: there are D rows, and D is 128.
    """
    size = chunk + 1
    for chunks in range(-(-N // chunk), N + 1):
        size = min(size, _padded(-(-N // chunks)))
        if D not in {_padded(N % size or size), size}:
            return size
    raise NeedsError(f"fused-loss:impl=quack on {N} rows", f"as many as the model is wide, {D}", "take impl=chunked")


def _padded(rows: int) -> int:
    return -(-rows // STEP) * STEP


def liger(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """Liger's Triton kernel with sums in float32. It cuts the rows itself, into about N * D / V: `chunk` is not asked.

    Source: https://github.com/linkedin/Liger-Kernel, Hsu et al., https://arxiv.org/abs/2410.10989.
    """
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Function

    total = Function.apply(hidden, weight, labels, None, None, IGNORE, 0.0, 0.0, "sum", None, False, torch.float32)[0]
    assert isinstance(total, Tensor)
    return total
