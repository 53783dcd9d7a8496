"""Dequantize 4-bit or 8-bit weights in one launch; nf4.py, mxfp4.py and int8.py have formats and references.

Imported only where it is launched, because only CUDA builds of torch have Triton; tests run it in Triton's interpreter.
Codes and scales are read once, the dense weight is written once, in place: the destination rows may belong to one piece
of a fused linear, with other pieces' rows between them.

If no 4-bit block crosses a row, a program processes a piece of one row and reads eight values per word. Words are in
one dimension, each with its scale, so that neighboring threads store neighboring values: with two dimensions the
compiler gave each thread of a warp another block, which took three times as long.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, NESTED = 64, 256  # values per block, blocks per nested one: nf4.py
BLOCKS, LEAST = 64, 16  # of one program, maximum and minimum: 4096 and 1024 values
WORD = 8  # values per 4 bytes
TILE = 2048  # maximum 8-bit values per program, all of one row, to avoid a division

# A kernel's globals must be tl.constexpr.
_BLOCK, _NESTED = tl.constexpr(BLOCK), tl.constexpr(NESTED)
_PART = tl.constexpr(1 / 127)  # int8.PART
_MX_BLOCK = tl.constexpr(32)  # mxfp4.BLOCK
_LEAST_POWER = tl.constexpr(0x00400000)  # 2^-127 as the bits of a float32


@triton.jit
def lookup(numbers, codes):
    """Return numbers (n,) at int32 codes from 0 to n - 1, in the codes' shape.

    A load by code does not fix the thread layout: the compiler chose one that gives each thread of a warp another
    block, and applied it to all loads and stores around. An on-chip gather has the layout of the codes.
    """
    return tl.reshape(tl.gather(numbers, tl.reshape(codes, (codes.numel,)), 0), codes.shape)


@triton.jit
def _scales(absmax, nested, map8, block, mask, last, DOUBLE: tl.constexpr):
    """Load the scales of blocks. last: index of the offset in `nested`."""
    if DOUBLE:
        code = tl.load(absmax + block, mask=mask, other=0).to(tl.int32)
        of_block = tl.load(nested + block // _NESTED, mask=mask, other=0.0)
        scale = tl.load(map8 + code) * of_block + tl.load(nested + last)
    else:
        scale = tl.load(absmax + block, mask=mask, other=0.0)
    return scale


@triton.jit
def _by_rows(
    codes, absmax, nested, table, map8, out, across, in_group, group_stride, row_stride, last,
    DOUBLE: tl.constexpr, BLOCKS: tl.constexpr, WORDS: tl.constexpr, WORD: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """Dequantize some of a row's `across` blocks; blocks do not cross rows. codes: words of 4 bytes, lowest first."""
    row, begin = tl.program_id(0), tl.program_id(1) * BLOCKS
    word, value = tl.arange(0, BLOCKS * WORDS), tl.arange(0, WORD)
    inside = word // WORDS
    mask = begin + inside < across
    first = row.to(tl.int64) * across + begin
    scale = _scales(absmax, nested, map8, first + inside, mask, last, DOUBLE)
    packed = tl.load(codes + first * WORDS + word, mask=mask, other=0)
    code = (packed[:, None] >> ((value ^ 1) * 4)[None, :]) & 15  # the first value of a byte is its high half
    numbers = tl.load(table + tl.arange(0, NUMBERS))
    values = lookup(numbers, code) * scale[:, None]
    to = out + (row // in_group).to(tl.int64) * group_stride + (row % in_group).to(tl.int64) * row_stride
    to += begin * _BLOCK
    at = word[:, None] * WORD + value[None, :]
    tl.store(to + at, values.to(out.dtype.element_ty), mask=mask[:, None])


@triton.jit
def _dequantize_blocks(
    codes, absmax, nested, table, map8, out, n, width, in_group, group_stride, row_stride, last,
    DOUBLE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Dequantize blocks that may cross rows."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    scale = _scales(absmax, nested, map8, block, block * _BLOCK < n, last, DOUBLE)
    byte = block[:, None] * (_BLOCK // 2) + tl.arange(0, _BLOCK // 2)[None, :]
    pair = tl.load(codes + byte, mask=byte * 2 < n, other=0).to(tl.int32)
    high = tl.load(table + (pair >> 4)) * scale[:, None]
    low = tl.load(table + (pair & 15)) * scale[:, None]
    values = tl.reshape(tl.join(high, low), (BLOCKS, _BLOCK))
    i = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    row = i // width
    column = i % width
    at = row // in_group * group_stride + row % in_group * row_stride + column
    tl.store(out + at, values.to(out.dtype.element_ty), mask=i < n)


@torch.no_grad()
def launch_nf4(
    codes: Tensor, absmax: Tensor, nested: Tensor | None, out: Tensor, table: Tensor, dynamic_map: Tensor
) -> None:
    """Implement `nf4.dequantize_nf4`; out: (rows, width) or (groups, rows per group, width); tables: nf4's."""
    grouped = out if out.dim() == 3 else out[None]
    assert grouped.stride(2) == 1
    groups, in_group, width = grouped.shape
    n = grouped.numel()
    blocks = -(-n // BLOCK)
    scales = absmax, absmax if nested is None else nested
    places = in_group, grouped.stride(0), grouped.stride(1), -(-blocks // NESTED)
    lookups = table, dynamic_map
    if width % BLOCK == 0 and codes.data_ptr() % 4 == 0:
        across = width // BLOCK
        most = min(BLOCKS, max(LEAST, across & -across))  # a power of two that divides `across`, if possible
        words = codes[: n // 2].view(torch.int32)
        _by_rows[(groups * in_group, triton.cdiv(across, most))](
            words, *scales, *lookups, grouped, across, *places,
            DOUBLE=nested is not None, BLOCKS=most, WORDS=BLOCK // WORD, WORD=WORD,
            NUMBERS=len(table),
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        return
    _dequantize_blocks[(triton.cdiv(blocks, BLOCKS),)](
        codes, *scales, *lookups, grouped, n, width, *places,
        DOUBLE=nested is not None, BLOCKS=BLOCKS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _dequantize_int8(codes, scales, out, width, in_group, group_stride, row_stride, TILE: tl.constexpr):
    row, column = tl.program_id(0), tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < width
    code = tl.load(codes + row.to(tl.int64) * width + column, mask=mask, other=0).to(tl.float32)
    value = code * tl.load(scales + row) * _PART
    to = out + (row // in_group).to(tl.int64) * group_stride + (row % in_group).to(tl.int64) * row_stride
    tl.store(to + column, value.to(out.dtype.element_ty), mask=mask)


@torch.no_grad()
def launch_int8(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """Implement `int8.dequantize_int8`."""
    grouped = out if out.dim() == 3 else out[None]
    assert grouped.stride(2) == 1
    groups, in_group, width = grouped.shape
    tile = min(TILE, triton.next_power_of_2(width))
    _dequantize_int8[(groups * in_group, triton.cdiv(width, tile))](
        codes, scales, grouped, width, in_group, grouped.stride(0), grouped.stride(1), TILE=tile,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _mxfp4_by_rows(
    codes, scales, table, out, across, in_group, group_stride, row_stride,
    BLOCKS: tl.constexpr, WORDS: tl.constexpr, WORD: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """Dequantize some of a row's `across` blocks like `_by_rows`. codes: words of 4 bytes, lowest value first."""
    row, begin = tl.program_id(0), tl.program_id(1) * BLOCKS
    word, value = tl.arange(0, BLOCKS * WORDS), tl.arange(0, WORD)
    inside = word // WORDS
    mask = begin + inside < across
    first = row.to(tl.int64) * across + begin
    exponent = tl.load(scales + first + inside, mask=mask, other=0).to(tl.int32)
    scale = tl.where(exponent == 0, _LEAST_POWER, exponent << 23).to(tl.float32, bitcast=True)
    packed = tl.load(codes + first * WORDS + word, mask=mask, other=0)
    code = (packed[:, None] >> (value * 4)[None, :]) & 15
    values = lookup(tl.load(table + tl.arange(0, NUMBERS)), code) * scale[:, None]
    to = out + (row // in_group).to(tl.int64) * group_stride + (row % in_group).to(tl.int64) * row_stride
    to += begin * _MX_BLOCK
    at = word[:, None] * WORD + value[None, :]
    tl.store(to + at, values.to(out.dtype.element_ty), mask=mask[:, None])


@torch.no_grad()
def launch_mxfp4(codes: Tensor, scales: Tensor, out: Tensor, table: Tensor) -> None:
    """Implement `mxfp4.dequantize_mxfp4`; table: mxfp4's."""
    grouped = out if out.dim() == 3 else out[None]
    assert grouped.stride(2) == 1
    groups, in_group, width = grouped.shape
    codes = codes[: grouped.numel() // 2]
    codes = codes if codes.data_ptr() % 4 == 0 else codes.clone()
    across, words = width // 32, 32 // WORD
    most = min(2 * BLOCKS, max(2 * LEAST, across & -across))
    _mxfp4_by_rows[(groups * in_group, triton.cdiv(across, most))](
        codes.view(torch.int32), scales, table, grouped, across, in_group, grouped.stride(0), grouped.stride(1),
        BLOCKS=most, WORDS=words, WORD=WORD, NUMBERS=len(table), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
