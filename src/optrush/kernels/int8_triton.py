"""Dequantize 8-bit weights in one launch of a Triton kernel; int8.py has the format and the reference.

Imported where it is launched only, like nf4_triton.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # values of one program, at most: of one row, so that there is no division

_PART = tl.constexpr(1 / 127)  # int8.PART; globals of a kernel must be its constants


@triton.jit
def _dequantise(codes, scales, out, width, in_group, group_stride, row_stride, TILE: tl.constexpr):
    row, column = tl.program_id(0), tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = column < width
    code = tl.load(codes + row.to(tl.int64) * width + column, mask=there, other=0).to(tl.float32)
    value = code * tl.load(scales + row) * _PART
    to = out + (row // in_group).to(tl.int64) * group_stride + (row % in_group).to(tl.int64) * row_stride
    tl.store(to + column, value.to(out.dtype.element_ty), mask=there)


@torch.no_grad()
def launch_int8(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """Implement `int8.dequantize`."""
    grouped = out if out.dim() == 3 else out[None]
    assert grouped.stride(2) == 1
    groups, in_group, width = grouped.shape
    tile = min(TILE, triton.next_power_of_2(width))
    _dequantise[(groups * in_group, triton.cdiv(width, tile))](
        codes, scales, grouped, width, in_group, grouped.stride(0), grouped.stride(1), TILE=tile,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
