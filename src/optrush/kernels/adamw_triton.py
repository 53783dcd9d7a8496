"""AdamW update of bfloat16 or float32 weights in one launch of a Triton kernel; the reference is in adamw.py.

Imported only where it is launched, because only CUDA builds of torch have Triton; tests run it in Triton's interpreter.

A small kernel first advances the counts and computes each parameter's factors and keys. Neither launch synchronizes
with the host: the device reads rate, divisor and skip flag; gradient addresses, which differ between steps, are sent
through pinned memory.

Bit-identical to the reference: fused multiply-add is off, root and quotient are correctly rounded, and bfloat16 is
written by shifts. Instructions limit the kernel as much as bytes: count the loop's instructions when changing it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from optrush.kernels.adamw import COUNT_BITS, FACTORS, SECOND_KEY, AdamWGroup, ParamTable

PART = 16384  # elements per program, all of one parameter, many per lookup of the parameter
BLOCK = 1024  # elements at a time: 8 per thread, 16 bytes of bfloat16, the widest access
WARPS = 4
WRITE_BLOCK, WRITE_WARPS = 4096, 8  # of `launch_stochastic`
LANES = 128  # parameters per program of the small kernel
ALIGNMENT = 16  # bytes, for the widest access

# A kernel's globals must be tl.constexpr.
_FACTOR_A, _FACTOR_B = tl.constexpr(FACTORS[0]), tl.constexpr(FACTORS[1])
_ANOTHER, _COUNT_BITS = tl.constexpr(SECOND_KEY), tl.constexpr(COUNT_BITS)
_LARGEST = tl.constexpr(torch.finfo(torch.bfloat16).max)


@triton.jit
def _mix(x):
    """Compute lowbias32 of uint32."""
    x = x ^ (x >> 16)
    x = x * _FACTOR_A
    x = x ^ (x >> 15)
    x = x * _FACTOR_B
    return x ^ (x >> 16)


@triton.jit
def _power(base: tl.constexpr, exponents, LANES: tl.constexpr):
    """Compute float64 powers by squaring, like the reference."""
    result = tl.full([LANES], 1.0, tl.float64)
    square = tl.full([LANES], base, tl.float64)
    for _ in tl.static_range(_COUNT_BITS):
        result = tl.where((exponents & 1) != 0, result * square, result)
        square = square * square
        exponents = exponents >> 1
    return result


@triton.jit
def _prepare(
    counts, decays, words, lr, grad_scale, found_inf, numbers, keys, first, last,
    BETA1: tl.constexpr, BETA2: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Run `ParamTable.count_update` and `step_factors` for the parameters [first, last)."""
    i = first + tl.program_id(0) * LANES + tl.arange(0, LANES)
    mask = i < last
    good = tl.load(found_inf) == 0
    count = tl.load(counts + i, mask=mask, other=1.0) + good.to(tl.float32)
    tl.store(counts + i, count, mask=mask)
    updates = count.to(tl.int32)
    rate = tl.load(lr).to(tl.float64)
    decay = tl.load(decays + i, mask=mask, other=0.0)
    ones = tl.full([LANES], 1.0, tl.float64)
    tl.store(numbers + i * 4, (ones - rate * decay).to(tl.float32), mask=mask)
    tl.store(numbers + i * 4 + 1, (rate / (ones - _power(BETA1, updates, LANES))).to(tl.float32), mask=mask)
    bias = (ones - _power(BETA2, updates, LANES)).to(tl.float32)
    tl.store(numbers + i * 4 + 2, tl.div_rn(ones.to(tl.float32), tl.sqrt_rn(bias)), mask=mask)
    tl.store(numbers + i * 4 + 3, (ones / tl.load(grad_scale).to(tl.float64)).to(tl.float32), mask=mask)
    key = _mix(tl.load(words + i * 2, mask=mask, other=0).to(tl.uint32) ^ updates.to(tl.uint32))
    tl.store(keys + i * 2, key.to(tl.int32, bitcast=True), mask=mask)
    key = _mix(key ^ tl.load(words + i * 2 + 1, mask=mask, other=0).to(tl.uint32))
    tl.store(keys + i * 2 + 1, key.to(tl.int32, bitcast=True), mask=mask)


@triton.jit
def _pointer(address, element: tl.constexpr, ALIGNED: tl.constexpr):
    at = address.to(tl.pointer_type(element))
    if ALIGNED:
        at = tl.multiple_of(at, 16)
    return at


@triton.jit
def _read(address, start, j, mask, WIDE: tl.constexpr, ALIGNED: tl.constexpr):
    """Load float32 or bfloat16 elements start + j as float32."""
    kind: tl.constexpr = tl.float32 if WIDE else tl.bfloat16
    return tl.load(_pointer(address, kind, ALIGNED) + start + j, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _nearest(x):
    """Round float32 to the bits of the nearest bfloat16, ties to even."""
    raw = x.to(tl.uint32, bitcast=True)
    raw = (raw + 0x7FFF + ((raw >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, raw.to(tl.int32)).to(tl.uint16)


@triton.jit
def _stochastic(x, bits):
    """Round float32 to bfloat16 bits like `round_stochastic`; a nan stays a nan, perhaps with other bits.

    One comparison is enough: a value up to the largest bfloat16 cannot exceed it, the rest (including inf and nan) is
    only truncated. A nan from arithmetic has the first mantissa bit set, so it is still a nan after truncation.
    """
    raw = x.to(tl.uint32, bitcast=True)
    return ((raw + tl.where(tl.abs(x) < _LARGEST, bits & 0xFFFF, 0)) >> 16).to(tl.uint16)


@triton.jit
def _write(address, start, j, mask, x, bits, RANDOM: tl.constexpr, WIDE: tl.constexpr, ALIGNED: tl.constexpr):
    if WIDE:
        tl.store(_pointer(address, tl.float32, ALIGNED) + start + j, x, mask=mask)
    elif RANDOM:
        tl.store(_pointer(address, tl.uint16, ALIGNED) + start + j, _stochastic(x, bits), mask=mask)
    else:
        tl.store(_pointer(address, tl.uint16, ALIGNED) + start + j, _nearest(x), mask=mask)


@triton.jit(do_not_specialize=["begin"])
def _update(
    owners, starts, table, grads, numbers, keys, found_inf, begin,
    KEPT2: tl.constexpr, NEW1: tl.constexpr, NEW2: tl.constexpr, EPS: tl.constexpr,
    RANDOM: tl.constexpr, KAHAN: tl.constexpr,
    WIDE_WEIGHTS: tl.constexpr, WIDE_GRADS: tl.constexpr, WIDE_STATES: tl.constexpr,
    CUT: tl.constexpr, ALIGNED: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update part of one parameter. table: (n, 8) int64 of addresses, sizes and spans."""
    if tl.load(found_inf) == 0:
        part = begin + tl.program_id(0)
        k = tl.load(owners + part).to(tl.int64)
        start = (part - tl.load(starts + k)).to(tl.int64) * PART
        row = table + k * 8
        weights, means, squares, remainders = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
        gradients, first = tl.load(grads + k), tl.load(row + 5)
        left = tl.minimum(tl.load(row + 4) - start, PART).to(tl.int32)
        if ALIGNED:
            left = tl.multiple_of(left, 16)
        keep, size = tl.load(numbers + k * 4), tl.load(numbers + k * 4 + 1)
        root, inverse = tl.load(numbers + k * 4 + 2), tl.load(numbers + k * 4 + 3)
        key = tl.load(keys + k * 2).to(tl.uint32, bitcast=True)
        second = tl.load(keys + k * 2 + 1).to(tl.uint32, bitcast=True)
        for at in range(0, PART, BLOCK):
            j = at + tl.arange(0, BLOCK)
            mask = j < left
            bits = tl.zeros([BLOCK], tl.uint32)
            more = bits
            if RANDOM:
                index = start + j
                if CUT:
                    width = tl.load(row + 6)
                    index = index // width * tl.load(row + 7) + index % width
                mixed = _mix((first + index).to(tl.uint32) ^ key)
                bits = _mix(mixed ^ second)
                more = _mix(mixed ^ (second ^ _ANOTHER))
            weight = _read(weights, start, j, mask, WIDE_WEIGHTS, ALIGNED)
            grad = _read(gradients, start, j, mask, WIDE_GRADS, ALIGNED) * inverse
            mean = _read(means, start, j, mask, WIDE_STATES, ALIGNED)
            square = _read(squares, start, j, mask, WIDE_STATES, ALIGNED)
            mean = mean + (grad - mean) * NEW1
            square = square * KEPT2 + (grad * grad) * NEW2
            step = tl.div_rn(size * mean, tl.sqrt_rn(square) * root + EPS)
            if KAHAN:
                weight = weight + _read(remainders, start, j, mask, False, ALIGNED)
            weight = weight * keep - step
            _write(weights, start, j, mask, weight, bits, RANDOM and not KAHAN, WIDE_WEIGHTS, ALIGNED)
            _write(means, start, j, mask, mean, bits >> 16, RANDOM, WIDE_STATES, ALIGNED)
            _write(squares, start, j, mask, square, more, RANDOM, WIDE_STATES, ALIGNED)
            if KAHAN:
                nearest = (_nearest(weight).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
                _write(remainders, start, j, mask, weight - nearest, bits, True, False, ALIGNED)


class GroupLauncher(ABC):
    """Base of kernels that update a group in one launch: device tables, and the small kernel before the update.

    Tables are built once, so the group's tensors must keep their addresses.

    Memory: 4 bytes per PART of a parameter, under 200 bytes per parameter tensor.
    """

    def __init__(
        self, params: ParamTable, betas: tuple[float, float], weights: Sequence[Tensor], programs: list[int],
        rows: list[list[int]],
    ) -> None:  # fmt: skip
        """programs: per parameter, for the update. rows: addresses, sizes and spans, one row per parameter."""
        device, n = params.counts.device, len(weights)
        self.params, self.betas = params, betas
        self.starts = [sum(programs[:k]) for k in range(n + 1)]
        owners = [k for k, count in enumerate(programs) for _ in range(count)]
        self.owners = torch.tensor(owners, dtype=torch.int32, device=device)
        self.firsts = torch.tensor(self.starts, dtype=torch.int32, device=device)
        self.table = torch.tensor(rows, dtype=torch.int64, device=device)
        self.grads = torch.zeros(n, dtype=torch.int64, device=device)
        self.numbers = torch.zeros(n, 4, device=device)
        self.keys = torch.zeros(n, 2, dtype=torch.int32, device=device)
        self.cut = any(span.width != w.numel() for span, w in zip(params.spans, weights))
        self.sent = [0] * n  # the gradient addresses on the device

    @torch.no_grad()
    def __call__(
        self, grads: Sequence[Tensor], lr: Tensor, grad_scale: Tensor, found_inf: Tensor, first: int = 0
    ) -> None:
        """Implement `GroupUpdate`: advance counts, compute factors and keys, send addresses, launch."""
        assert all(g.dtype == grads[0].dtype and g.is_contiguous() for g in grads)
        addresses, last, flag = [g.data_ptr() for g in grads], first + len(grads), found_inf.view(torch.uint8)
        if self.sent[first:last] != addresses:
            # New pinned memory each time: torch reuses it only after the pending copy has read it.
            box = torch.tensor(addresses, dtype=torch.int64, pin_memory=self.grads.is_cuda)
            self.grads[first:last].copy_(box, non_blocking=True)
            self.sent[first:last] = addresses
        p = self.params
        _prepare[(-(-len(grads) // LANES),)](
            p.counts, p.decays, p.words, lr, grad_scale, flag, self.numbers, self.keys, first, last,
            *self.betas, LANES, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        begin = self.starts[first]
        if programs := self.starts[last] - begin:
            self.launch(begin, programs, grads[0].dtype, lr, flag, all(a % ALIGNMENT == 0 for a in addresses))

    @abstractmethod
    def launch(self, begin: int, programs: int, dtype: torch.dtype, lr: Tensor, flag: Tensor, aligned: bool) -> None:
        """Launch `programs` programs of the update, starting at `begin`; dtype, aligned: of the gradients."""


class AdamWLauncher(GroupLauncher):
    """Launches a group's update."""

    def __init__(self, group: AdamWGroup) -> None:
        self.group = group
        sizes = [w.numel() for w in group.weights]
        remainders = group.remainders or group.weights  # a placeholder if there are none
        tensors = zip(group.weights, group.means, group.squares, remainders, strict=True)
        rows = [
            [*(t.data_ptr() for t in parts), n, *span]
            for parts, n, span in zip(tensors, sizes, group.params.spans, strict=True)
        ]
        super().__init__(group.params, group.betas, group.weights, [-(-n // PART) for n in sizes], rows)
        self.aligned = all(n % ALIGNMENT == 0 for n in sizes) and all(p % ALIGNMENT == 0 for r in rows for p in r[:4])

    def launch(self, begin: int, programs: int, dtype: torch.dtype, lr: Tensor, flag: Tensor, aligned: bool) -> None:
        group = self.group
        _update[(programs,)](
            self.owners, self.firsts, self.table, self.grads, self.numbers, self.keys, flag, begin,
            group.betas[1], 1.0 - group.betas[0], 1.0 - group.betas[1], group.eps,
            RANDOM=group.rounding != "nearest", KAHAN=group.rounding == "kahan",
            WIDE_WEIGHTS=group.dtype == torch.float32, WIDE_GRADS=dtype == torch.float32,
            WIDE_STATES=group.means[0].dtype == torch.float32,
            CUT=self.cut, ALIGNED=self.aligned and aligned, PART=PART, BLOCK=BLOCK, num_warps=WARPS,
            enable_fp_fusion=False,
        )  # fmt: skip


# --- Stochastic rounding of one tensor in one launch. With torch's operators the random bits alone would move some
# 600 bytes per element.


@triton.jit(do_not_specialize=["size", "first"])
def _store(target, value, found_inf, key, size, first, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Write BLOCK elements of `size`; target: bfloat16 bits; value: from arithmetic, so a nan stays a nan."""
    if tl.load(found_inf) == 0:
        j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = j < size
        x = tl.load(value + j, mask=mask, other=0.0)
        bits = _mix((first + j).to(tl.uint32) ^ tl.load(key).to(tl.uint32))
        bits = _mix(bits ^ tl.load(key + 1).to(tl.uint32)) >> SHIFT
        tl.store(target + j, _stochastic(x, bits), mask=mask)


def launch_stochastic(
    target: Tensor, value: Tensor, found_inf: Tensor, key: Tensor, shift: int = 0, first: int = 0
) -> None:
    """Write a bfloat16 target like `adamw.write_stochastic`."""
    assert (target.dtype, value.dtype) == (torch.bfloat16, torch.float32)
    assert target.is_contiguous() and value.is_contiguous()
    if size := target.numel():
        bits, flag = target.view(torch.uint16), found_inf.view(torch.uint8)
        grid = (triton.cdiv(size, WRITE_BLOCK),)
        _store[grid](bits, value, flag, key, size, first, shift, WRITE_BLOCK, num_warps=WRITE_WARPS)
