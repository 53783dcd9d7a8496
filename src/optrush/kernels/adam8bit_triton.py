"""AdamW whose moments are codes, all parameters of a group in one launch of a Triton kernel; adam8bit_update.py has
the codes of a byte and the reference, adam4bit_triton.py what differs where codes take half a byte.

Only who launches it imports this module: torch brings Triton where there is a CUDA device. (Triton's interpreter runs
it on a CPU, in the tests.)

A program takes tiles of whole blocks, within a warp each: it reads codes, scales, weights and gradients once, and
writes codes, scales and weights once. What is the same for all of a parameter a small launch computes before it, as
for the AdamW of adamw_triton.py, whose parts this file uses: neither asks the host for anything, and the bits are the
reference's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from optrush.kernels import adam8bit
from optrush.kernels.adam8bit import BORDERS, FIRST, LAST, LEAST_SCALE, PER_PART, STARTS, UP, Group, blocks, values
from optrush.kernels.adamw_triton import LANES, _mix, _pointer, _prepare, _read, _write
from optrush.kernels.lookup_triton import lookup

# --- Codes of half a byte for the kernel of adam8bit_triton.py; adam4bit_update.py has the codes and the reference.


# Kernels are no Python functions: their arguments are typed by what is launched.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-not-found, import-untyped"


# Globals of a kernel must be its constants.
_LEAST_SCALE, _BORDERS = tl.constexpr(LEAST_SCALE), tl.constexpr(BORDERS)


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
    some = scale > _LEAST_SCALE
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


# Kernels are no Python functions: their arguments are typed by what is launched.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-not-found, import-untyped"


# Elements of one program, of one parameter (what is looked up once a program is little beside them), and of them at a
# time: 8 a thread.
PART, TILE, WARPS = 16384, 2048, 8
COLUMNS = 13  # of the table of parameters

# Globals of a kernel must be its constants.
_LEAST, _PER_PART, _FIRST = tl.constexpr(LEAST_SCALE), tl.constexpr(PER_PART), tl.constexpr(FIRST)
_LAST_SIGNED, _LAST_ROOT = tl.constexpr(LAST[True]), tl.constexpr(LAST[False])
_STARTS, _UP = tl.constexpr(STARTS), tl.constexpr(UP)
_COLUMNS = tl.constexpr(COLUMNS)


@triton.jit
def _encode(x, SIGNED: tl.constexpr):
    """The nearest codes of rows of one block each, and their scales."""
    scale = tl.max(tl.abs(x), axis=1)
    one = tl.full(scale.shape, 1.0, tl.float32)
    some = scale > _LEAST
    inverse = tl.where(some, tl.div_rn(one, tl.where(some, scale, 1.0)), 0.0)
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
def _decode(address, scales, numbers, at, there, inside, ALIGNED: tl.constexpr):
    """What bytes stand for. numbers: (256,) values of codes; scales: where those of the blocks are."""
    code = tl.load(_pointer(address, tl.uint8, ALIGNED) + at, mask=there, other=0).to(tl.int32)
    return lookup(numbers, code) * tl.load(scales, mask=inside, other=0.0)[:, None]


@triton.jit(do_not_specialize=["begin"])
def _update(
    owners, starts, table, values, grads, numbers, keys, lr, found_inf, begin,
    KEPT2: tl.constexpr, NEW1: tl.constexpr, NEW2: tl.constexpr, LATER: tl.constexpr, EPS: tl.constexpr,
    RANDOM: tl.constexpr, WIDE: tl.constexpr, WIDE_GRADS: tl.constexpr, CODES: tl.constexpr, HALVES: tl.constexpr,
    WHOLE: tl.constexpr, CUT: tl.constexpr, ALIGNED: tl.constexpr,
    PART: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some blocks of one parameter. values: (512,) float32 of signed and unsigned bytes; (16,) of signed HALVES."""
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
        start = first * BLOCK if WHOLE else first * 0  # whole blocks lie one after the other
        signed = tl.load(values + tl.arange(0, 16 if HALVES else 256))
        unsigned = tl.load(values + (0 if HALVES else 256) + tl.arange(0, 16 if HALVES else 256))  # nobody's of HALVES
        for tile in range(0, PART, TILE):
            b = tile + tl.arange(0, TILE)
            inside = b < left
            within = tl.arange(0, BLOCK)
            if WHOLE:
                j = b[:, None] * BLOCK + within[None, :]
                there = inside[:, None] & (within < BLOCK)[None, :]
            else:
                line = (first + b) // in_row
                column = ((first + b) % in_row * BLOCK)[:, None] + within[None, :]
                j = line[:, None] * columns + column
                there = inside[:, None] & (column < columns)
            grad = _read(gradients, start, j, there, WIDE_GRADS, ALIGNED) * inverse
            weight = _read(weights, start, j, there, WIDE, ALIGNED)
            mean_scale, root_scale = of_mean + first + b, of_root + first + b
            if HALVES:
                place, pairs = places(first + b, in_row, columns, inside, WHOLE, BLOCK)
                in_means, in_squares = _pointer(means, tl.uint8, ALIGNED), _pointer(squares, tl.uint8, ALIGNED)
                mean = read(in_means, mean_scale, signed, place, pairs, there, inside, True, BLOCK)
                square = read(in_squares, root_scale, signed, place, pairs, there, inside, False, BLOCK)
                square = square * square
            elif CODES:
                mean = _decode(means, mean_scale, signed, start + j, there, inside, ALIGNED)
                square = _decode(squares, root_scale, unsigned, start + j, there, inside, ALIGNED)
                square = square * square
            else:
                mean = _read(means, start, j, there, True, ALIGNED)
                square = _read(squares, start, j, there, True, ALIGNED)
            mean = mean + (grad - mean) * NEW1
            square = square * KEPT2 + (grad * grad) * NEW2
            deviation = tl.sqrt_rn(square)
            push = size * mean
            if HALVES:
                kept = write(mean, in_means, mean_scale, signed, place, pairs, inside, True, BLOCK)
                write(deviation, in_squares, root_scale, signed, place, pairs, inside, False, BLOCK)
                push = push + tl.load(lr) * LATER * (mean - kept)
            weight = weight * keep - tl.div_rn(push, deviation * root + EPS)
            bits = tl.zeros([TILE, BLOCK], tl.uint32)
            if RANDOM:
                index = start + j
                if CUT:
                    width = tl.load(row + 9)
                    index = index // width * tl.load(row + 10) + index % width
                bits = _mix(_mix((tl.load(row + 8) + index).to(tl.uint32) ^ key) ^ second)
            _write(weights, start, j, there, weight, bits, RANDOM, WIDE, ALIGNED)
            if not CODES:
                _write(means, start, j, there, mean, bits, False, True, ALIGNED)
                _write(squares, start, j, there, square, bits, False, True, ALIGNED)
            elif not HALVES:
                code, scale = _encode(mean, True)
                tl.store(_pointer(means, tl.uint8, ALIGNED) + start + j, code, mask=there)
                tl.store(mean_scale, scale, mask=inside)
                code, scale = _encode(deviation, False)
                tl.store(_pointer(squares, tl.uint8, ALIGNED) + start + j, code, mask=there)
                tl.store(root_scale, scale, mask=inside)


class Launcher:
    """Updates a group in one launch. Tables are made once, so the tensors of the group must stay where they are.

    Memory: 4 bytes for every PART elements, under 200 bytes a parameter tensor.
    """

    def __init__(self, group: Group) -> None:
        self.group, device = group, group.counts.device
        block = group.codes.block
        totals = [w.shape[0] * blocks(w.shape[1], block) for w in group.weights]
        programs = [-(-n // (PART // block)) for n in totals]
        self.starts = [sum(programs[:k]) for k in range(len(programs) + 1)]
        owners = [k for k, n in enumerate(programs) for _ in range(n)]
        rows = []
        for w, held, total, where in zip(group.weights, group.moments, totals, group.spans, strict=True):
            addresses = [t.data_ptr() for t in (w, *held.tensors(), w, w)[:5]]
            rows.append([*addresses, total, blocks(w.shape[1], block), w.shape[1], *where, 0, 0])
        assert all(len(r) == COLUMNS for r in rows)
        self.coded = group.moments[0].scales is not None
        self.halves = self.coded and group.codes.bits == 4
        self.whole = all(w.shape[1] % block == 0 for w in group.weights)
        self.aligned = self.whole and all(p % 16 == 0 for r in rows for p in r[:3])
        self.cut = any(where.width != w.numel() for where, w in zip(group.spans, group.weights))
        self.owners = torch.tensor(owners, dtype=torch.int32, device=device)
        self.firsts = torch.tensor(self.starts, dtype=torch.int32, device=device)
        self.table = torch.tensor(rows, dtype=torch.int64, device=device)
        self.values = torch.cat([values(True, device), values(False, device)])
        if self.halves:
            self.values = adam8bit.values_4bit(True, device)
        self.grads = torch.zeros(len(rows), dtype=torch.int64, device=device)
        self.numbers = torch.zeros(len(rows), 4, device=device)
        self.keys = torch.zeros(len(rows), 2, dtype=torch.int32, device=device)
        self.sent = [0] * len(rows)  # the addresses of gradients that the device has

    @torch.no_grad()
    def __call__(
        self, grads: Sequence[Tensor], lr: Tensor, grad_scale: Tensor, found_inf: Tensor, first: int = 0
    ) -> None:
        """As `adam8bit_update`."""
        group, last = self.group, first + len(grads)
        dtype = grads[0].dtype
        assert all(g.dtype == dtype and g.is_contiguous() for g in grads)
        addresses = [g.data_ptr() for g in grads]
        if self.sent[first:last] != addresses:
            # Pinned memory anew each time: torch gives it out again only when the copy under way has read it.
            box = torch.tensor(addresses, dtype=torch.int64, pin_memory=self.grads.is_cuda)
            self.grads[first:last].copy_(box, non_blocking=True)
            self.sent[first:last] = addresses
        flag = found_inf.view(torch.uint8)
        exact: dict[str, Any] = {"enable_fp_fusion": False}
        _prepare[(-(-len(grads) // LANES),)](
            group.counts, group.decays, group.words, lr, grad_scale, flag, self.numbers, self.keys, first, last,
            group.betas[0], group.betas[1], LANES, num_warps=4, **exact,
        )  # fmt: skip
        begin, block = self.starts[first], group.codes.block
        if programs := self.starts[last] - begin:
            _update[(programs,)](
                self.owners, self.firsts, self.table, self.values, self.grads, self.numbers, self.keys, lr, flag, begin,
                group.betas[1], 1.0 - group.betas[0], 1.0 - group.betas[1], group.later, group.eps,
                RANDOM=group.rounding == "stochastic" and group.weights[0].dtype == torch.bfloat16,
                WIDE=group.weights[0].dtype == torch.float32, WIDE_GRADS=dtype == torch.float32,
                CODES=self.coded, HALVES=self.halves, WHOLE=self.whole, CUT=self.cut,
                ALIGNED=self.aligned and all(a % 16 == 0 for a in addresses),
                PART=PART // block, TILE=TILE // block, BLOCK=block, num_warps=WARPS, **exact,
            )  # fmt: skip
