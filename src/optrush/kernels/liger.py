"""Linear layer and cross-entropy by Liger's Triton kernel: the gradients are made in the forward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from optrush.data.batch import IGNORE


def liger(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """hidden (N, D), weight (V, D), labels (N,) int64 -> () float32, the sum over labels that are not -100.

    It cuts the rows itself, into about N * D / V: `chunk` is not asked. Sums are in float32. No bias, scale, softcap or
    row weights.
    Source: https://github.com/linkedin/Liger-Kernel, Hsu et al., https://arxiv.org/abs/2410.10989.
    """
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Function

    total = Function.apply(hidden, weight, labels, None, None, IGNORE, 0.0, 0.0, "sum", None, False, torch.float32)[0]
    assert isinstance(total, Tensor)
    return total
