"""4-bit weights to dense ones in one launch of a Triton kernel; nf4.py has the format and the reference.

Only who launches it imports this module: torch brings Triton where there is a CUDA device. (Triton's interpreter runs
it on a CPU, in the tests.) Codes and scales are read once, the dense weight is written once, where it belongs: rows of
the destination may be those of one piece of a fused linear, with the rows of others between them.
"""
# Kernels are no Python functions: their arguments are typed by what is launched.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-not-found, import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from optrush.kernels.nf4 import BLOCK, NESTED, dynamic_map, table

BLOCKS = 64  # of one program: 4096 values

_BLOCK, _NESTED = tl.constexpr(BLOCK), tl.constexpr(NESTED)  # globals of a kernel must be its constants


@triton.jit
def _dequantise(
    codes, absmax, nested, table, map8, out, n, width, in_group, group_stride, row_stride, last,
    DOUBLE: tl.constexpr, WHOLE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """WHOLE: no block crosses a row. last: where the offset lies in `nested`."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    there = block * _BLOCK < n
    if DOUBLE:
        code = tl.load(absmax + block, mask=there, other=0).to(tl.int32)
        of_block = tl.load(nested + block // _NESTED, mask=there, other=0.0)
        scale = tl.load(map8 + code) * of_block + tl.load(nested + last)
    else:
        scale = tl.load(absmax + block, mask=there, other=0.0)
    byte = block[:, None] * (_BLOCK // 2) + tl.arange(0, _BLOCK // 2)[None, :]
    pair = tl.load(codes + byte, mask=byte * 2 < n, other=0).to(tl.int32)
    high = tl.load(table + (pair >> 4)) * scale[:, None]
    low = tl.load(table + (pair & 15)) * scale[:, None]
    values = tl.reshape(tl.join(high, low), (BLOCKS, _BLOCK))
    i = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    if WHOLE:
        row = (block * _BLOCK // width)[:, None]
        column = (block * _BLOCK % width)[:, None] + tl.arange(0, _BLOCK)[None, :]
    else:
        row = i // width
        column = i % width
    at = row // in_group * group_stride + row % in_group * row_stride + column
    tl.store(out + at, values.to(out.dtype.element_ty), mask=i < n)


@torch.no_grad()
def launch(codes: Tensor, absmax: Tensor, nested: Tensor | None, out: Tensor) -> None:
    """As `nf4.dequantise`; out: (rows, width), or (groups, rows of a group, width)."""
    grouped = out if out.dim() == 3 else out[None]
    assert grouped.stride(2) == 1
    _, in_group, width = grouped.shape
    n = grouped.numel()
    blocks = -(-n // BLOCK)
    _dequantise[(-(-blocks // BLOCKS),)](
        codes, absmax, absmax if nested is None else nested, table(out.device), dynamic_map(out.device), grouped, n,
        width, in_group, grouped.stride(0), grouped.stride(1), -(-blocks // NESTED),
        DOUBLE=nested is not None, WHOLE=width % BLOCK == 0, BLOCKS=BLOCKS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
