"""Triton kernel for the sum of a token's rows over its experts. Imported on CUDA only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 1024  # maximum per program: with 4 warps 8 values per thread, a load of 16 bytes


def launch_sum_of_rows(y: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """Sum rows of y (rows, D) at places (S, k), times float32 weights (S, k) or None -> (S, D), summed in float32."""
    y, places = y.contiguous(), places.contiguous()
    (S, k), D = places.shape, y.shape[1]
    out = torch.empty((S, D), dtype=y.dtype, device=y.device)
    block = min(COLUMNS, triton.next_power_of_2(D))
    if S:
        factors = y if weights is None else weights.contiguous()  # y is a placeholder
        weighed = weights is not None
        _sum[(S, triton.cdiv(D, block))](y, places, factors, out, D, K=k, WEIGHED=weighed, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _sum(y, places, weights, out, D, K: tl.constexpr, WEIGHED: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)  # 32 bits overflow at 2 billion values
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(K):
        row = tl.load(places + token * K + i).to(tl.int64)
        values = tl.load(y + row * D + at, mask=at < D, other=0.0).to(tl.float32)
        total += values * tl.load(weights + token * K + i) if WEIGHED else values
    tl.store(out + token * D + at, total.to(out.dtype.element_ty), mask=at < D)
