"""Codes of half a byte for the kernel of adam8bit_triton.py; adam4bit_update.py has the codes and the reference."""
# Kernels are no Python functions: their arguments are typed by what is launched.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-not-found, import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from optrush.kernels.adam4bit_update import BORDERS
from optrush.kernels.adam8bit_update import LEAST_SCALE
from optrush.kernels.lookup_triton import lookup

# Globals of a kernel must be its constants.
_LEAST, _BORDERS = tl.constexpr(LEAST_SCALE), tl.constexpr(BORDERS)


@triton.jit
def places(block, in_row, columns, inside, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    """Where the bytes of blocks begin, and which of (TILE, BLOCK / 2) bytes are there. block: number in the matrix."""
    half = tl.arange(0, BLOCK // 2)[None, :]
    if WHOLE:
        begin = (block * (BLOCK // 2))[:, None]
        there = inside[:, None] & (half < BLOCK)
    else:
        in_line = (block % in_row * (BLOCK // 2))[:, None]
        begin = (block // in_row * ((columns + 1) // 2))[:, None] + in_line
        there = inside[:, None] & (in_line + half < (columns + 1) // 2)
    return begin, there


@triton.jit
def read(bytes_, scales, signed, begin, pairs, there, inside, SIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """float32 of (TILE, BLOCK) codes, 0 where none is there. signed: (16,) float32, the values of signed codes."""
    pair = tl.load(bytes_ + begin + tl.arange(0, BLOCK // 2)[None, :], mask=pairs, other=0).to(tl.int32)
    code = tl.reshape(tl.join(pair & 15, pair >> 4), there.shape)
    if SIGNED:
        found = lookup(signed, code)
    else:
        found = (code + 1).to(tl.float32) * 0.0625
    return tl.where(there, found * tl.load(scales, mask=inside, other=0.0)[:, None], 0.0)


@triton.jit
def write(x, bytes_, scales, signed, begin, there, inside, SIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """The nearest codes of rows of one block each, and their scales. Returns what SIGNED codes stand for."""
    scale = tl.max(tl.abs(x), axis=1)
    one = tl.full(scale.shape, 1.0, tl.float32)
    some = scale > _LEAST
    inverse = tl.where(some, tl.div_rn(one, tl.where(some, scale, 1.0)), 0.0)
    part = x * inverse[:, None]
    if SIGNED:
        size = tl.abs(part)
        code = tl.zeros(x.shape, tl.int32)
        for i in tl.static_range(0, 8):
            code += (size > _BORDERS[i]).to(tl.int32)
        code = tl.where(part < 0, -tl.minimum(code, 7), code) & 15
        x = lookup(signed, code) * scale[:, None]
    else:
        code = tl.minimum(tl.maximum(tl.floor(part * 16.0 - 0.5), 0.0), 15.0).to(tl.int32)
    low, high = tl.split(tl.reshape(code, [x.shape[0], BLOCK // 2, 2]))
    half = tl.arange(0, BLOCK // 2)[None, :]
    tl.store(bytes_ + begin + half, (low | (high << 4)).to(tl.uint8), mask=there)
    tl.store(scales, scale, mask=inside)
    return x
