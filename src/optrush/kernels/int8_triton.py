"""8-bit weights to dense ones in one launch of a Triton kernel; int8.py has the format and the reference.

Only who launches it imports this module, as for nf4_triton.py.
"""
# Kernels are no Python functions: their arguments are typed by what is launched.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-not-found, import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from optrush.kernels.int8 import PART

TILE = 4096  # values of one program

_PART = tl.constexpr(PART)  # globals of a kernel must be its constants


@triton.jit
def _dequantise(codes, scales, out, n, width, in_group, group_stride, row_stride, TILE: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = i < n
    row = i // width
    code = tl.load(codes + i, mask=there, other=0).to(tl.float32)
    value = code * tl.load(scales + row, mask=there, other=0.0) * _PART
    at = row // in_group * group_stride + row % in_group * row_stride + i % width
    tl.store(out + at, value.to(out.dtype.element_ty), mask=there)


@torch.no_grad()
def launch(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """As `int8.dequantise`."""
    grouped = out if out.dim() == 3 else out[None]
    assert grouped.stride(2) == 1
    n = grouped.numel()
    _dequantise[(-(-n // TILE),)](
        codes, scales, grouped, n, grouped.shape[2], grouped.shape[1], grouped.stride(0), grouped.stride(1), TILE=TILE,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
