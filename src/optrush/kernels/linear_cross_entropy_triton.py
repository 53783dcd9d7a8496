"""Triton kernels for rows of linear_cross_entropy.py, and for scale_to_dtype. Imported on CUDA only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from optrush.data.batch import IGNORE

BLOCK = 2048


@triton.jit
def _offsets(x, weight, labels, out, D: tl.constexpr, LOG2E, SHIFT, IGNORE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    learnt = label != IGNORE
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, D, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = (at < D) & learnt
        values = tl.load(x + row * D + at, mask=mask, other=0.0).to(tl.float32)
        total += values * tl.load(weight + label * D + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row, tl.where(learnt, tl.sum(total) * LOG2E + SHIFT, float("inf")))


def launch_label_offsets(x: Tensor, weight: Tensor, labels: Tensor, log2e: float, shift: float) -> Tensor:
    """Implement `linear_cross_entropy.label_offsets`."""
    assert x.is_contiguous() and weight.is_contiguous() and labels.is_contiguous()
    n, D = x.shape
    out = torch.empty(n, dtype=torch.float32, device=x.device)
    _offsets[(n,)](x, weight, labels, out, D, log2e, shift, IGNORE=IGNORE, BLOCK=BLOCK)
    return out


@triton.jit
def _settle(
    e, sums, labels, losses, inverse, V, parts: tl.constexpr, SHIFT, UP, LN2, IGNORE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    learnt = label != IGNORE
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, parts, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(sums + row * parts + at, mask=at < parts, other=0.0)
    s = tl.sum(total)
    # The log of the unscaled sum would cancel with SHIFT and lose digits.
    nats = tl.where(s < 1.0, tl.log2(s * UP), tl.log2(s) + SHIFT) * LN2
    tl.store(losses + row, tl.where(learnt, nats, 0.0))
    tl.store(inverse + row, tl.where(learnt, 1.0 / s, 0.0))
    tl.store(e + row * V + label, (1.0 / UP - s).to(e.dtype.element_ty), mask=learnt)


def launch_finish_rows(e: Tensor, sums: Tensor, labels: Tensor, losses: Tensor, inverse: Tensor, shift: float) -> None:
    """Implement `linear_cross_entropy.finish_rows`."""
    assert all(t.is_contiguous() for t in (e, sums, labels, losses, inverse))
    (n, V), ln2 = e.shape, 0.6931471805599453
    _settle[(n,)](
        e, sums, labels, losses, inverse, V, sums.shape[1], shift, 2.0**shift, ln2, IGNORE=IGNORE, BLOCK=1024
    )  # fmt: skip


@triton.jit
def _rows_scaled(x, rows, factor, out, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    row_factor = tl.load(rows + row)
    by = row_factor * tl.load(factor)
    for start in range(0, D, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(x + row * D + at, mask=at < D, other=0.0).to(tl.float32)
        tl.store(out + row * D + at, tl.where(row_factor == 0.0, 0.0, values * by), mask=at < D)


def launch_scale_rows(x: Tensor, rows: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """Implement `linear_cross_entropy.scale_rows`."""
    assert all(t.is_contiguous() for t in (x, rows, out)) and factor.dtype == torch.float32
    if len(x):
        _rows_scaled[(len(x),)](x, rows, factor, out, x.shape[1], BLOCK=BLOCK)
    return out


SCALE_BLOCK = 4096  # 16 elements per thread
WARPS = 8


@triton.jit
def _scaled(x, factor, out, n, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK  # 32 bits overflow at 2 billion values
    at = start + tl.arange(0, BLOCK)
    product = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32) * tl.load(factor)
    tl.store(out + at, product, mask=at < n)


def launch_scale(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Implement `linear_cross_entropy.scale_to_dtype`: x is read once, and the result is written once."""
    assert x.is_contiguous() and factor.dtype == torch.float32 and factor.numel() == 1
    out = x if dtype == x.dtype else torch.empty_like(x, dtype=dtype)
    if n := x.numel():
        _scaled[(triton.cdiv(n, SCALE_BLOCK),)](x, factor, out, n, BLOCK=SCALE_BLOCK, num_warps=WARPS)
    return out
