"""One AdamW update of parameters whose two moments are codes: those of a byte, and the reference in plain torch.

A row's values lie in blocks of 256, the last one shorter; a block never crosses a row, so that a cut along the first
dimension cuts codes and scales alike. A moment is its code's value, in [-1, 1], times its block's scale, the largest
magnitude in the block. The update takes any `Codes`; adam4bit_update.py has those of half a byte.

Codes of a byte: the dynamic map of Dettmers et al., https://arxiv.org/abs/2110.02861. Magnitudes from 1e-7 to 1 lie in
seven decades, each divided into equal parts, twice as many as the decade below it: decade i, from 0, has 2^i of them
where there is a sign and 2^(i+1) where there is none. A code's value is the middle of its part; two more codes are 0
and 1.

    signed byte    0: zero; n = 1 ... 127: the nth magnitude; 128: one; 256 - n: minus the nth magnitude
    unsigned byte  0: zero; n = 1 ... 254: the nth magnitude; 255: one

Byte 0 is zero, so states begin as zeros. The update runs in float32 and rounds moments to the nearest code; the Triton
kernel in adam8bit_triton.py does the same.
Differs from the source: the second moment's code is of its root, for squares span twice as many decades as gradients,
and the map has seven; and a positive root never takes the code of zero, so that nothing is divided by eps alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol

import torch
from torch import Tensor

from optrush.kernels.adamw import Span, factors, random_bits, round_stochastic, sqrt, step_key

Rounding = Literal["nearest", "stochastic"]

BLOCK = 256
DECADES = 7
LEAST_SCALE = 1e-35  # of a block: below it all values are zero, for its reciprocal is no float32
CHUNK = 1 << 20  # elements that the reference holds in float32 at a time
# Of the encoding, as float32 numbers on both sides: where decades 1 to 6 begin; what moves decade i to [0.1, 1); codes
# in a unit there; half the least magnitude, which is zero; by sign, the middle between the last magnitude and 1.
STARTS = tuple(10.0 ** (i - DECADES) for i in range(1, DECADES))
UP = tuple(10.0 ** (DECADES - 1 - i) for i in range(DECADES))
PER_PART = 1 / 0.9
FIRST = 0.55e-6 / 2
LAST = {True: 1 - 0.225 / 64, False: 1 - 0.225 / 128}


def blocks(columns: int, block: int = BLOCK) -> int:
    """Blocks of a row."""
    return -(-columns // block)


class Codes(Protocol):
    """How moments are written. Both functions do as the kernel does, to the bit."""

    bits: int  # of a code
    block: int  # values under one scale
    repays: bool  # what a mean loses to its code moves the weight at once, by what it would have moved it later

    def encode(self, x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
        """The codes of (R, C) float32, (R, ceil(C bits / 8)) uint8, and their scales, (R, ceil(C / block)) float32."""
        ...

    def decode(self, codes: Tensor, scales: Tensor, signed: bool, columns: int) -> Tensor:
        """What they stand for, (R, C) float32, C = columns."""
        ...


@cache
def values(signed: bool, device: torch.device) -> Tensor:
    """(256,) float32: the value of each byte."""
    parts = [2 ** (i + (not signed)) for i in range(DECADES)]
    magnitudes = [
        10.0 ** (i - DECADES + 1) * (0.1 + 0.9 * (k + 0.5) / n) for i, n in enumerate(parts) for k in range(n)
    ]
    below = [-v for v in reversed(magnitudes)] if signed else []
    return torch.tensor([0.0, *magnitudes, 1.0, *below], dtype=torch.float32, device=device)


def encode(x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """The nearest codes, and the scales of the blocks. Of equally near ones either; operations as in the kernel.

    Args:
        x: (R, C) float32, none below zero where `signed` is False.

    Returns:
        (R, C) uint8 and (R, ceil(C / 256)) float32.
    """
    R, C = x.shape
    n = blocks(C)
    cut = torch.nn.functional.pad(x, (0, n * BLOCK - C)).view(R, n, BLOCK)
    scales = cut.abs().amax(-1)  # (R, n)
    inverse = torch.where(scales > LEAST_SCALE, 1.0 / scales, 0.0)
    part = (cut * inverse[..., None]).view(R, n * BLOCK)[:, :C]  # in [-1, 1]
    size = part.abs()
    decade = torch.zeros_like(size, dtype=torch.int32)
    for start in STARTS:
        decade += size >= start
    up = torch.tensor(UP, device=x.device)[decade]
    parts = 1 << (decade + (not signed))
    at = (size * up - 0.1) * PER_PART * parts  # parts of the decade below it
    code = parts + at.floor().int().clamp(min=0).minimum(parts - 1)
    # Between the last part of a decade and the first of the next, five times as wide, the middle is not their border.
    code -= ((at < 0.2) & (decade > 0)).int()
    code = torch.where(size > LAST[signed], 2 * parts, code)
    if not signed:
        code = torch.where(size > 0, code - 1, 0)
    else:
        code = torch.where(size < FIRST, 0, code)
        code = torch.where(part < 0, -code.clamp(max=127), code) & 0xFF
    return code.to(torch.uint8), scales


def decode(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """(R, C) float32 of codes (R, C) uint8 and scales (R, ceil(C / 256)) float32."""
    found = values(signed, codes.device)[codes.int()]
    return found * scales.repeat_interleave(BLOCK, -1)[:, : codes.shape[-1]]


class Bytes:
    """A byte each."""

    bits, block, repays = 8, BLOCK, False

    def encode(self, x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
        return encode(x, signed)

    def decode(self, codes: Tensor, scales: Tensor, signed: bool, columns: int) -> Tensor:
        return decode(codes, scales, signed)


@dataclass(frozen=True)
class Moments:
    """The states of one parameter, as rows: codes with their scales; or float32 without, for a small parameter."""

    mean: Tensor  # (R, ceil(C bits / 8)) uint8, or (R, C) float32
    square: Tensor  # the same: codes of the root, or float32 of the square itself
    scales: tuple[Tensor, Tensor] | None  # of the mean and of the root, (R, ceil(C / block)) float32 each

    def rows(self, first: int, last: int) -> Moments:
        """Those of the rows [first, last), the very storage."""
        scales = None if self.scales is None else (self.scales[0][first:last], self.scales[1][first:last])
        return Moments(self.mean[first:last], self.square[first:last], scales)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.mean, self.square, *(self.scales or ()))


@dataclass(frozen=True)
class Group:
    """Parameters that are updated by the same rule, on one device: n weights with their moments, all contiguous."""

    weights: list[Tensor]  # (R, C) float32 or bfloat16
    moments: list[Moments]
    counts: Tensor  # (n,) float32, updates so far
    decays: Tensor  # (n,) float64
    words: Tensor  # (n, 2) int64, `key_words` of each
    spans: list[Span]
    betas: tuple[float, float]
    eps: float
    rounding: Rounding  # of bfloat16 weights
    codes: Codes

    @property
    def later(self) -> float:
        """What of a mean moves the weight after this update, in rates over the denominator: beta1 + beta1^2 + ..."""
        return self.betas[0] / (1.0 - self.betas[0])


@torch.no_grad()
def adam8bit_update(
    group: Group, grads: Sequence[Tensor], lr: Tensor, grad_scale: Tensor, found_inf: Tensor, first: int = 0
) -> None:
    """One update of the parameters `first` ... `first + len(grads)`, some rows at a time; reads nothing on the host.

    Args:
        grads: (R, C) each, contiguous, bfloat16 or float32, `grad_scale` times too large.
        lr: () float32, like `grad_scale`.
        found_inf: () bool; where True nothing changes, no count either.
    """
    last = first + len(grads)
    counts = group.counts[first:last]
    counts.add_((~found_inf).float())
    keys = step_key(group.words[first:last], counts)
    numbers = factors(counts, group.decays[first:last], group.betas, lr, grad_scale)
    later = lr * group.later
    for k, grad in enumerate(grads):
        (R, C), weight, where = grad.shape, group.weights[first + k], group.spans[first + k]
        rows = max(1, CHUNK // max(C, 1))
        for at in range(0, R, rows):
            held = group.moments[first + k].rows(at, at + rows)
            part = grad[at : at + rows]
            index = torch.arange(at * C, at * C + part.numel(), device=part.device).view(part.shape)
            index = where.first + index // where.width * where.pitch + index % where.width
            old = weight[at : at + rows]
            new = _moved(group, old, held, part, numbers[k], later, keys[k], index)
            for t, value in zip((old, *held.tensors()), new, strict=True):
                t.copy_(torch.where(found_inf, t, value))


def _moved(
    group: Group, old: Tensor, held: Moments, grad: Tensor, numbers: Tensor, later: Tensor, key: Tensor, index: Tensor
) -> Iterator[Tensor]:
    """New weight, mean and square of some rows, and their scales. later: () float32, the rate times `Group.later`."""
    keep, size, root, inverse = numbers
    mean, square, codes = held.mean, held.square, group.codes
    if held.scales is not None:
        mean = codes.decode(mean, held.scales[0], True, old.shape[1])
        square = codes.decode(square, held.scales[1], False, old.shape[1]).square()
    grad = grad.float() * inverse
    mean = mean + (grad - mean) * (1.0 - group.betas[0])
    square = square * group.betas[1] + (grad * grad) * (1.0 - group.betas[1])
    deviation, push = sqrt(square), size * mean
    coded = () if held.scales is None else (codes.encode(mean, True), codes.encode(deviation, False))
    if coded and codes.repays:
        push = push + later * (mean - codes.decode(*coded[0], True, old.shape[1]))
    weight = old.float() * keep - push / (deviation * root + group.eps)
    if old.dtype == torch.bfloat16 and group.rounding == "stochastic":
        yield round_stochastic(weight, random_bits(key, index))
    else:
        yield weight.to(old.dtype)
    # Codes, then scales.
    yield from (part for parts in zip(*coded) for part in parts) if coded else (mean, square)


# --- The codes of half a byte, for moments of AdamW; adam8bit_update.py has the update, and what blocks and scales are.
#
# A row's values lie in blocks of 128. Two codes a byte, along the row: the even column's in the low half, the odd one's
# in the high half, which is 0 where the row ends before it. So codes and scales are cut like rows.
#
#     signed code  0: zero; n = 1 ... 7: the nth magnitude; 8: one; 16 - n: minus the nth magnitude. The magnitudes are
#                  those of the dynamic map in three decades, from 1e-3 to 1: 1, 2 and 4 equal parts, the middle of each
#     root's code  n = 0 ... 15: (n + 1) / 16, so none is zero
#
# Both are maps of Li et al., https://arxiv.org/abs/2309.01507 (there DE and Linear): a second moment that is rounded to
# zero would divide a step by eps alone. A byte of 0 with a scale of 0 is zero: states begin as zeros. Codes are the
# nearest.
#
# What a mean loses to its code would have moved the weight in the steps to come: by rate beta1 / (1 - beta1) times it
# over the denominator, if these stay as they are. It moves the weight at once instead, for the nearest of so few codes
# errs the same way step after step: a change of less than half the distance to the next one is never seen.
#
# Differs from the source: there what codes take is lost; the second moment's code is of its root, and its scale is its
# block's alone, where there it is of the square, and each value takes the smaller of its row's and its column's
# largest. In a simulation of running means over normally distributed gradients of different sizes (beta2 0.95 to 0.999,
# sizes within a block spread by 0.5 to 3 powers of e) the steps that the roots gave were nearer to float32's than those
# of squares in each case.


BLOCK_4BIT = 128
MAGNITUDES = (0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875, 1.0)
# Between a magnitude and the one below it: what is larger takes the larger one.
BORDERS = tuple((a + b) / 2 for a, b in zip((0.0, *MAGNITUDES), MAGNITUDES))


@cache
def values_4bit(signed: bool, device: torch.device) -> Tensor:
    """(16,) float32: the value of each code."""
    found = [0.0, *MAGNITUDES, *(-m for m in reversed(MAGNITUDES[:-1]))] if signed else [n / 16 for n in range(1, 17)]
    return torch.tensor(found, dtype=torch.float32, device=device)


class Nibbles:
    """Half a byte each."""

    bits, block, repays = 4, BLOCK_4BIT, True

    def encode(self, x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
        """As `Codes` says; of two codes that are as near either, operations as in the kernel."""
        R, C = x.shape
        n = blocks(C, BLOCK_4BIT)
        cut = torch.nn.functional.pad(x, (0, n * BLOCK_4BIT - C)).view(R, n, BLOCK_4BIT)
        scales = cut.abs().amax(-1)  # (R, n)
        inverse = torch.where(scales > LEAST_SCALE, 1.0 / scales, 0.0)
        part = (cut * inverse[..., None]).view(R, n * BLOCK_4BIT)  # in [-1, 1], 0 beyond the row's end
        if signed:
            size = part.abs()
            code = torch.zeros_like(size, dtype=torch.int32)
            for border in BORDERS:
                code += size > border
            code = torch.where(part < 0, -code.clamp(max=7), code) & 15
        else:
            code = (part * 16.0 - 0.5).floor().clamp(0.0, 15.0).int()
        pairs = code.view(R, -1, 2)[:, : -(-C // 2)]  # (R, ceil(C / 2), 2)
        return (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8), scales

    def decode(self, codes: Tensor, scales: Tensor, signed: bool, columns: int) -> Tensor:
        halves = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)[:, :columns]
        found = values_4bit(signed, codes.device)[halves.int()]
        return found * scales.repeat_interleave(BLOCK_4BIT, -1)[:, :columns]
