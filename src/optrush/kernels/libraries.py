"""Linear layer and cross-entropy by kernel libraries: sums of losses whose gradients are made in the forward pass.

    function(hidden (N, D), weight (V, D), labels (N,) int64, chunk) -> () float32, the sum over labels not -100

Both hold the logits of some rows at a time, sum the weight's gradient in float32, and scale what they made in place in
the backward pass: once. No bias, scale, softcap or row weights. Their modules are imported when first called.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optrush.data.batch import IGNORE
from optrush.errors import NeedsError

STEP = 128  # rows of QuACK's tile


def quack(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """QuACK's products whose epilogue exponentiates: neither logits nor their gradients are written, exponents are.

    bfloat16 (autocast's too), capability 9.0; V and chunk multiples of 128. A product of as many rows as the width is
    refused by the library (it cannot tell rows from columns): so chunks are made smaller until none is one.
    Source: https://github.com/Dao-AILab/quack (linear_cross_entropy.py).
    Saves (N, D) in hidden's type and (V, D) float32. Holds (chunk, V) bfloat16 at once.
    """
    from quack.linear_cross_entropy import scaled_exp_linear_cross_entropy

    rows = even(len(hidden), hidden.shape[1], chunk)
    total = scaled_exp_linear_cross_entropy(hidden, weight, labels, rows, IGNORE, "sum")
    assert isinstance(total, Tensor)
    return total


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
