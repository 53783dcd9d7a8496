"""AdamW update with 8-bit or 4-bit moments, all parameters of a group in one launch of a Triton kernel.

adam8bit.py has the formats and the bit-identical reference. Imported like adamw_triton.py, whose small kernel runs
first. A program updates tiles of complete blocks, each within a warp, and reads and writes every value once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from optrush.kernels.adam8bit import (
    BORDERS,
    FIRST,
    LAST,
    LEAST_SCALE,
    PER_PART,
    STARTS,
    UP,
    QuantizedGroup,
    block_width,
    blocks_per_row,
    levels,
)
from optrush.kernels.adamw_triton import ALIGNMENT, GroupLauncher, _mix, _pointer, _read, _write
from optrush.kernels.dequantize_triton import lookup

# Elements per program, all of one parameter (many per lookup of the parameter), and per tile: 8 per thread.
PART, TILE, WARPS = 16384, 2048, 8
COLUMNS = 13  # of the table of parameters

# A kernel's globals must be tl.constexpr.
_LEAST, _PER_PART, _FIRST = tl.constexpr(LEAST_SCALE), tl.constexpr(PER_PART), tl.constexpr(FIRST)
_LAST_SIGNED, _LAST_ROOT = tl.constexpr(LAST[True]), tl.constexpr(LAST[False])
_STARTS, _UP, _BORDERS = tl.constexpr(STARTS), tl.constexpr(UP), tl.constexpr(BORDERS)
_COLUMNS = tl.constexpr(COLUMNS)


@triton.jit
def _nibble_places(block, in_row, columns, inside, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    """Return where the bytes of blocks begin, and the mask of (TILE, BLOCK / 2) bytes. block: its index."""
    half = tl.arange(0, BLOCK // 2)[None, :]
    if WHOLE:
        begin = (block * (BLOCK // 2))[:, None]
        mask = inside[:, None] & (half < BLOCK)
    else:
        in_line = (block % in_row * (BLOCK // 2))[:, None]
        begin = (block // in_row * ((columns + 1) // 2))[:, None] + in_line
        mask = inside[:, None] & (in_line + half < (columns + 1) // 2)
    return begin, mask


@triton.jit
def _read_nibbles(bytes_, scales, signed, begin, pairs, mask, inside, SIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Load (TILE, BLOCK) codes as float32, 0 outside the mask. signed: (16,) float32, the levels of signed codes."""
    pair = tl.load(bytes_ + begin + tl.arange(0, BLOCK // 2)[None, :], mask=pairs, other=0).to(tl.int32)
    code = tl.reshape(tl.join(pair & 15, pair >> 4), mask.shape)
    if SIGNED:
        value = lookup(signed, code)
    else:
        value = (code + 1).to(tl.float32) * 0.0625
    return tl.where(mask, value * tl.load(scales, mask=inside, other=0.0)[:, None], 0.0)


@triton.jit
def _write_nibbles(x, bytes_, scales, signed, begin, mask, inside, SIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Store the nearest codes of rows of one block each, and their scales; return the values of the codes if SIGNED."""
    scale = tl.max(tl.abs(x), axis=1)
    ones = tl.full(scale.shape, 1.0, tl.float32)
    some = scale > _LEAST
    inverse = tl.where(some, tl.div_rn(ones, tl.where(some, scale, 1.0)), 0.0)
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
    tl.store(bytes_ + begin + half, (low | (high << 4)).to(tl.uint8), mask=mask)
    tl.store(scales, scale, mask=inside)
    return x


@triton.jit
def _encode(x, SIGNED: tl.constexpr):
    """Return the nearest codes of rows of one block each, and their scales."""
    scale = tl.max(tl.abs(x), axis=1)
    ones = tl.full(scale.shape, 1.0, tl.float32)
    some = scale > _LEAST
    inverse = tl.where(some, tl.div_rn(ones, tl.where(some, scale, 1.0)), 0.0)
    part = x * inverse[:, None]
    size = tl.abs(part)
    decade = tl.zeros(x.shape, tl.int32)
    up = tl.full(x.shape, _UP[0], tl.float32)
    for i in tl.static_range(1, 7):
        above = size >= _STARTS[i - 1]
        decade += above.to(tl.int32)
        up = tl.where(above, _UP[i], up)
    parts = tl.full(x.shape, 1 if SIGNED else 2, tl.int32) << decade
    at = (size * up - 0.1) * _PER_PART * parts.to(tl.float32)
    code = parts + tl.minimum(tl.maximum(tl.floor(at), 0.0).to(tl.int32), parts - 1)
    code -= ((at < 0.2) & (decade > 0)).to(tl.int32)
    if SIGNED:
        code = tl.where(size > _LAST_SIGNED, 2 * parts, code)
        code = tl.where(size < _FIRST, 0, code)
        code = tl.where(part < 0, -tl.minimum(code, 127), code)
    else:
        code = tl.where(size > _LAST_ROOT, 2 * parts, code)
        code = tl.where(size > 0, code - 1, 0)
    return (code & 0xFF).to(tl.uint8), scale


@triton.jit
def _decode(address, scales, numbers, at, mask, inside, ALIGNED: tl.constexpr):
    """Load the values of bytes. numbers: (256,) levels of the codes; scales: addresses of the blocks' scales."""
    code = tl.load(_pointer(address, tl.uint8, ALIGNED) + at, mask=mask, other=0).to(tl.int32)
    return lookup(numbers, code) * tl.load(scales, mask=inside, other=0.0)[:, None]


@triton.jit(do_not_specialize=["begin"])
def _update(
    owners, starts, table, values, grads, numbers, keys, lr, found_inf, begin,
    KEPT2: tl.constexpr, NEW1: tl.constexpr, NEW2: tl.constexpr, LATER: tl.constexpr, EPS: tl.constexpr,
    RANDOM: tl.constexpr, WIDE: tl.constexpr, WIDE_GRADS: tl.constexpr, CODES: tl.constexpr, HALVES: tl.constexpr,
    WHOLE: tl.constexpr, CUT: tl.constexpr, ALIGNED: tl.constexpr,
    PART: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update some blocks of a parameter. values: (512,) levels of signed and unsigned bytes; (16,) of signed HALVES."""
    if tl.load(found_inf) == 0:
        program = begin + tl.program_id(0)
        k = tl.load(owners + program).to(tl.int64)
        first = (program - tl.load(starts + k)).to(tl.int64) * PART
        row = table + k * _COLUMNS
        weights, means, squares = tl.load(row), tl.load(row + 1), tl.load(row + 2)
        of_mean, of_root = _pointer(tl.load(row + 3), tl.float32, False), _pointer(tl.load(row + 4), tl.float32, False)
        in_row, columns = tl.load(row + 6), tl.load(row + 7)
        gradients = tl.load(grads + k)
        left = tl.minimum(tl.load(row + 5) - first, PART).to(tl.int32)
        keep, size = tl.load(numbers + k * 4), tl.load(numbers + k * 4 + 1)
        root, inverse = tl.load(numbers + k * 4 + 2), tl.load(numbers + k * 4 + 3)
        key = tl.load(keys + k * 2).to(tl.uint32, bitcast=True)
        second = tl.load(keys + k * 2 + 1).to(tl.uint32, bitcast=True)
        start = first * BLOCK if WHOLE else first * 0  # full blocks are contiguous
        signed = tl.load(values + tl.arange(0, 16 if HALVES else 256))
        unsigned = tl.load(values + (0 if HALVES else 256) + tl.arange(0, 16 if HALVES else 256))  # not with HALVES
        for tile in range(0, PART, TILE):
            b = tile + tl.arange(0, TILE)
            inside = b < left
            within = tl.arange(0, BLOCK)
            if WHOLE:
                j = b[:, None] * BLOCK + within[None, :]
                mask = inside[:, None] & (within < BLOCK)[None, :]
            else:
                line = (first + b) // in_row
                column = ((first + b) % in_row * BLOCK)[:, None] + within[None, :]
                j = line[:, None] * columns + column
                mask = inside[:, None] & (column < columns)
            grad = _read(gradients, start, j, mask, WIDE_GRADS, ALIGNED) * inverse
            weight = _read(weights, start, j, mask, WIDE, ALIGNED)
            mean_scale, root_scale = of_mean + first + b, of_root + first + b
            if HALVES:
                place, pairs = _nibble_places(first + b, in_row, columns, inside, WHOLE, BLOCK)
                in_means, in_squares = _pointer(means, tl.uint8, ALIGNED), _pointer(squares, tl.uint8, ALIGNED)
                mean = _read_nibbles(in_means, mean_scale, signed, place, pairs, mask, inside, True, BLOCK)
                square = _read_nibbles(in_squares, root_scale, signed, place, pairs, mask, inside, False, BLOCK)
                square = square * square
            elif CODES:
                mean = _decode(means, mean_scale, signed, start + j, mask, inside, ALIGNED)
                square = _decode(squares, root_scale, unsigned, start + j, mask, inside, ALIGNED)
                square = square * square
            else:
                mean = _read(means, start, j, mask, True, ALIGNED)
                square = _read(squares, start, j, mask, True, ALIGNED)
            mean = mean + (grad - mean) * NEW1
            square = square * KEPT2 + (grad * grad) * NEW2
            deviation = tl.sqrt_rn(square)
            push = size * mean
            if HALVES:
                kept = _write_nibbles(mean, in_means, mean_scale, signed, place, pairs, inside, True, BLOCK)
                _write_nibbles(deviation, in_squares, root_scale, signed, place, pairs, inside, False, BLOCK)
                push = push + tl.load(lr) * LATER * (mean - kept)
            weight = weight * keep - tl.div_rn(push, deviation * root + EPS)
            bits = tl.zeros([TILE, BLOCK], tl.uint32)
            if RANDOM:
                index = start + j
                if CUT:
                    width = tl.load(row + 9)
                    index = index // width * tl.load(row + 10) + index % width
                bits = _mix(_mix((tl.load(row + 8) + index).to(tl.uint32) ^ key) ^ second)
            _write(weights, start, j, mask, weight, bits, RANDOM, WIDE, ALIGNED)
            if not CODES:
                _write(means, start, j, mask, mean, bits, False, True, ALIGNED)
                _write(squares, start, j, mask, square, bits, False, True, ALIGNED)
            elif not HALVES:
                code, scale = _encode(mean, True)
                tl.store(_pointer(means, tl.uint8, ALIGNED) + start + j, code, mask=mask)
                tl.store(mean_scale, scale, mask=inside)
                code, scale = _encode(deviation, False)
                tl.store(_pointer(squares, tl.uint8, ALIGNED) + start + j, code, mask=mask)
                tl.store(root_scale, scale, mask=inside)


class QuantizedLauncher(GroupLauncher):
    """Launches a group's update."""

    def __init__(self, group: QuantizedGroup) -> None:
        self.group, bits, device = group, group.bits, group.params.counts.device
        # A narrower block if all rows are narrower: a program then updates more of them.
        self.block = block = max(block_width(w.shape[1], bits) for w in group.weights)
        totals = [w.shape[0] * blocks_per_row(w.shape[1], bits) for w in group.weights]
        rows = []
        for w, moments, total, span in zip(group.weights, group.moments, totals, group.params.spans, strict=True):
            addresses = [t.data_ptr() for t in (w, *moments.tensors(), w, w)[:5]]
            rows.append([*addresses, total, blocks_per_row(w.shape[1], bits), w.shape[1], *span, 0, 0])
        assert all(len(r) == COLUMNS for r in rows)
        super().__init__(group.params, group.betas, group.weights, [-(-n // (PART // block)) for n in totals], rows)
        self.coded = group.moments[0].scales is not None
        self.halves = self.coded and bits == 4
        self.whole = all(w.shape[1] % block == 0 for w in group.weights)
        self.aligned = self.whole and all(p % ALIGNMENT == 0 for r in rows for p in r[:3])
        signed = [True] if self.halves else [True, False]
        self.values = torch.cat([levels(4 if self.halves else 8, s, device) for s in signed])

    def launch(self, begin: int, programs: int, dtype: torch.dtype, lr: Tensor, flag: Tensor, aligned: bool) -> None:
        group, block = self.group, self.block
        _update[(programs,)](
            self.owners, self.firsts, self.table, self.values, self.grads, self.numbers, self.keys, lr, flag, begin,
            group.betas[1], 1.0 - group.betas[0], 1.0 - group.betas[1], group.feedback, group.eps,
            RANDOM=group.rounding == "stochastic" and group.weights[0].dtype == torch.bfloat16,
            WIDE=group.weights[0].dtype == torch.float32, WIDE_GRADS=dtype == torch.float32,
            CODES=self.coded, HALVES=self.halves, WHOLE=self.whole, CUT=self.cut, ALIGNED=self.aligned and aligned,
            PART=PART // block, TILE=TILE // block, BLOCK=block, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
