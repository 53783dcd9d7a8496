"""The kernel of scaled.py in Triton: x is read once, and what is written is written once. Imported on CUDA only."""

# Kernels are no Python functions: their arguments are typed by what is launched.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-not-found, import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # 16 elements a thread
WARPS = 8


@triton.jit
def _scaled(x, factor, out, n, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK  # 32 bits end at 2 billion values
    at = start + tl.arange(0, BLOCK)
    product = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32) * tl.load(factor)
    tl.store(out + at, product, mask=at < n)


def launch(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """As `scaled.scaled` says."""
    assert x.is_contiguous() and factor.dtype == torch.float32 and factor.numel() == 1
    out = x if dtype == x.dtype else torch.empty_like(x, dtype=dtype)
    if n := x.numel():
        _scaled[(triton.cdiv(n, BLOCK),)](x, factor, out, n, BLOCK=BLOCK, num_warps=WARPS)
    return out
