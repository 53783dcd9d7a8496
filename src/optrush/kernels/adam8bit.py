"""AdamW update of parameters whose two moments are stored in 8 or 4 bits: the format and the reference, in plain torch.

Each row's values are split into blocks of 256 (8 bits) or 128 (4 bits), the last one shorter. A block never crosses
rows, so a shard along the first dimension has complete rows of codes and scales. A stored value is its code's level, in
[-1, 1], times its block's scale, the largest magnitude in the block. Code 0 with scale 0 is zero, so states start as
zeros. The second moment is stored as its square root.

8 bits: the dynamic map of Dettmers et al., https://arxiv.org/abs/2110.02861. Magnitudes from 1e-7 to 1 fall into seven
decades of equal parts: decade i, from 0, has 2^i signed or 2^(i+1) unsigned parts. A level is the middle of its part;
two more levels are 0 and 1.

    signed byte    0: zero; n = 1 ... 127: the nth magnitude; 128: one; 256 - n: minus the nth magnitude
    unsigned byte  0: zero; n = 1 ... 254: the nth magnitude; 255: one

Differs from the source: the root is stored instead of the square, because squares span twice as many decades as
gradients, and the map has seven; a positive root never gets the code of zero, so eps alone is never the divisor.

4 bits: the maps of Li et al., https://arxiv.org/abs/2309.01507 (DE and Linear there). Two codes per byte, along the
row: the even column in the low half, the odd one in the high half, which is 0 behind the row's end.

    signed code    0: zero; n = 1 ... 7: the nth magnitude; 8: one; 16 - n: minus the nth magnitude. The magnitudes are
                   from the dynamic map in three decades, 1e-3 to 1: 1, 2 and 4 equal parts, the middle of each
    root's code    n = 0 ... 15: (n + 1) / 16, never zero

With 4 bits the mean's quantization error is fed back, because with so few codes it has the same sign step after step: a
change below half the distance to the next code is always rounded away. The lost part would have changed the weight in
later steps by lr * beta1 / (1 - beta1) times itself over the denominator. The update applies this at once.

Differs from the source: the source loses the error; here the second moment has one scale per block, there each value
takes the smaller of its row's and its column's largest square. In simulations (beta2 0.95 to 0.999, sizes within a
block spread by 0.5 to 3 powers of e) steps from roots were always closer to float32's than steps from squares.

Encoding picks the nearest code. The update runs in float32; the Triton kernel (adam8bit_triton.py) is bit-identical.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from optrush.kernels.adamw import ParamTable, full_index, random_bits, round_stochastic, sqrt

Bits = Literal[8, 4]

BLOCK: dict[Bits, int] = {8: 256, 4: 128}  # values per scale
LEAST_WIDTH = 16  # of a block in a kernel
DECADES = 7
LEAST_SCALE = 1e-35  # of a block: below it all values are zero, because its reciprocal exceeds float32
CHUNK = 1 << 20  # elements that the reference holds in float32 at a time
# 8 bits, the same float32 numbers as in the kernel: the starts of decades 1 to 6; factors that scale decade i to
# [0.1, 1); parts per unit there; half the least magnitude, the border of code zero; the middle of the last level and 1.
STARTS = tuple(10.0 ** (i - DECADES) for i in range(1, DECADES))
UP = tuple(10.0 ** (DECADES - 1 - i) for i in range(DECADES))
PER_PART = 1 / 0.9
FIRST = 0.55e-6 / 2
LAST = {True: 1 - 0.225 / 64, False: 1 - 0.225 / 128}
# 4 bits, signed: a value above a border (the middle between two magnitudes) gets the larger magnitude.
MAGNITUDES = (0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875, 1.0)
BORDERS = tuple((a + b) / 2 for a, b in zip((0.0, *MAGNITUDES), MAGNITUDES))


# --- Codes.


def blocks_per_row(columns: int, bits: Bits) -> int:
    """Return the number of blocks in a row."""
    return -(-columns // BLOCK[bits])


def block_width(columns: int, bits: Bits) -> int:
    """Return the lanes of a kernel for a block of such rows; adapters' rows are as short as their rank."""
    return min(BLOCK[bits], max(LEAST_WIDTH, 1 << max(0, columns - 1).bit_length()))


@cache
def levels(bits: Bits, signed: bool, device: torch.device) -> Tensor:
    """Return (2^bits,) float32: the level of each code."""
    if bits == 4 and not signed:
        return torch.arange(1, 17, device=device) / 16
    parts = [2 ** (i + (not signed)) for i in range(DECADES)]
    magnitudes = [
        10.0 ** (i - DECADES + 1) * (0.1 + 0.9 * (k + 0.5) / n) for i, n in enumerate(parts) for k in range(n)
    ]
    positive = [*magnitudes, 1.0] if bits == 8 else MAGNITUDES
    negative = [-v for v in reversed(positive[:-1])] if signed else []
    return torch.tensor([0.0, *positive, *negative], dtype=torch.float32, device=device)


def quantize_blocks(x: Tensor, signed: bool, bits: Bits) -> tuple[Tensor, Tensor]:
    """Return the nearest codes and the blocks' scales; a tie may go either way, as in the kernel.

    Args:
        x: (R, C) float32, not negative if `signed` is False.

    Returns:
        (R, ceil(C bits / 8)) uint8 and (R, ceil(C / BLOCK[bits])) float32.
    """
    (R, C), block = x.shape, BLOCK[bits]
    n = blocks_per_row(C, bits)
    padded = torch.nn.functional.pad(x, (0, n * block - C)).view(R, n, block)
    scales = padded.abs().amax(-1)  # (R, n)
    inverse = torch.where(scales > LEAST_SCALE, 1.0 / scales, 0.0)
    unit = (padded * inverse[..., None]).view(R, n * block)  # in [-1, 1], 0 beyond the row's end
    if bits == 8:
        return _codes_8bit(unit[:, :C], signed).to(torch.uint8), scales
    pairs = _codes_4bit(unit, signed).view(R, -1, 2)[:, : -(-C // 2)]  # (R, ceil(C / 2), 2)
    return (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8), scales


def _codes_8bit(unit: Tensor, signed: bool) -> Tensor:
    """Return the int32 codes, 0 to 255, of the levels nearest to `unit`, float32 in [-1, 1], >= 0 if not signed."""
    size = unit.abs()
    decade = torch.zeros_like(size, dtype=torch.int32)
    for start in STARTS:
        decade += size >= start
    up = torch.tensor(UP, device=unit.device)[decade]
    parts = 1 << (decade + (not signed))
    at = (size * up - 0.1) * PER_PART * parts  # position within the decade, in parts
    code = parts + at.floor().int().clamp(min=0).minimum(parts - 1)
    # A decade's first part is five times as wide as the last part below it, so their border is not halfway.
    code -= ((at < 0.2) & (decade > 0)).int()
    code = torch.where(size > LAST[signed], 2 * parts, code)
    if not signed:
        return torch.where(size > 0, code - 1, 0)
    code = torch.where(size < FIRST, 0, code)
    return torch.where(unit < 0, -code.clamp(max=127), code) & 0xFF


def _codes_4bit(unit: Tensor, signed: bool) -> Tensor:
    if not signed:
        return (unit * 16.0 - 0.5).floor().clamp(0.0, 15.0).int()
    size = unit.abs()
    code = torch.zeros_like(size, dtype=torch.int32)
    for border in BORDERS:
        code += size > border
    return torch.where(unit < 0, -code.clamp(max=7), code) & 15


def dequantize_blocks(codes: Tensor, scales: Tensor, signed: bool, bits: Bits, columns: int) -> Tensor:
    """Return the (R, columns) float32 values of the results of `quantize_blocks`."""
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)[:, :columns]
    values = levels(bits, signed, codes.device)[codes.int()]
    return values * scales.repeat_interleave(BLOCK[bits], -1)[:, :columns]


# --- The update.


@dataclass(frozen=True)
class Moments:
    """States of one parameter by rows: codes with scales; for a small parameter, float32 without scales."""

    mean: Tensor  # (R, ceil(C bits / 8)) uint8, or (R, C) float32
    square: Tensor  # the same: codes of the root, or float32 of the square itself
    scales: tuple[Tensor, Tensor] | None  # of the mean and of the root, (R, ceil(C / BLOCK[bits])) float32 each

    def rows(self, first: int, last: int) -> Moments:
        """Return views of the rows [first, last)."""
        scales = None if self.scales is None else (self.scales[0][first:last], self.scales[1][first:last])
        return Moments(self.mean[first:last], self.square[first:last], scales)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.mean, self.square, *(self.scales or ()))


@dataclass(frozen=True)
class QuantizedGroup:
    """Parameters with the same update rule on one device: n weights with their moments, all contiguous."""

    weights: list[Tensor]  # (R, C) float32 or bfloat16
    moments: list[Moments]
    params: ParamTable
    betas: tuple[float, float]
    eps: float
    rounding: Literal["nearest", "stochastic"]  # of bfloat16 weights
    bits: Bits

    @property
    def feedback(self) -> float:
        """Return a mean's weight in later updates, beta1 + beta1^2 + ...: the factor of its fed-back error."""
        return self.betas[0] / (1.0 - self.betas[0])


@torch.no_grad()
def adam8bit_update(
    group: QuantizedGroup, grads: Sequence[Tensor], lr: Tensor, grad_scale: Tensor, found_inf: Tensor, first: int = 0
) -> None:
    """Implement `GroupUpdate`, some rows at a time; grads: (R, C) each."""
    last = first + len(grads)
    keys = group.params.count_update(first, last, found_inf)
    factors = group.params.step_factors(first, last, group.betas, lr, grad_scale)
    feedback = lr * group.feedback
    for k, grad in enumerate(grads):
        R, C = grad.shape
        rows = max(1, CHUNK // max(C, 1))
        for at in range(0, R, rows):
            moments = group.moments[first + k].rows(at, at + rows)
            weight, part = group.weights[first + k][at : at + rows], grad[at : at + rows]
            index = full_index(group.params.spans[first + k], at * C, part)
            new = _updated(group, weight, moments, part, factors[k], feedback, keys[k], index)
            for t, value in zip((weight, *moments.tensors()), new, strict=True):
                t.copy_(torch.where(found_inf, t, value))


def _updated(
    group: QuantizedGroup, old: Tensor, moments: Moments, grad: Tensor, factors: Tensor, feedback: Tensor,
    key: Tensor, index: Tensor,
) -> Iterator[Tensor]:  # fmt: skip
    """Yield the new weight, mean and square of some rows, then their scales; feedback: () float32, times the rate."""
    keep, size, root, inverse = factors
    mean, square, bits, columns = moments.mean, moments.square, group.bits, old.shape[1]
    if moments.scales is not None:
        mean = dequantize_blocks(mean, moments.scales[0], True, bits, columns)
        square = dequantize_blocks(square, moments.scales[1], False, bits, columns).square()
    grad = grad.float() * inverse
    mean = mean + (grad - mean) * (1.0 - group.betas[0])
    square = square * group.betas[1] + (grad * grad) * (1.0 - group.betas[1])
    deviation, push = sqrt(square), size * mean
    coded = (
        () if moments.scales is None else (quantize_blocks(mean, True, bits), quantize_blocks(deviation, False, bits))
    )
    if coded and bits == 4:
        push = push + feedback * (mean - dequantize_blocks(*coded[0], True, bits, columns))
    weight = old.float() * keep - push / (deviation * root + group.eps)
    if old.dtype == torch.bfloat16 and group.rounding == "stochastic":
        yield round_stochastic(weight, random_bits(key, index))
    else:
        yield weight.to(old.dtype)
    yield from (part for parts in zip(*coded) for part in parts) if coded else (mean, square)
