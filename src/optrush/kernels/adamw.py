"""AdamW with float32 arithmetic and three ways to round a bfloat16 weight: the reference, in plain torch.

bfloat16 has 8 significant bits: rounded to nearest, a weight changes only if its update exceeds 1/512 to 1/256 of it.
`stochastic` rounds up or down with the probability that makes the expected value exact. `kahan` stores the rounding
error of a weight in a second bfloat16 and adds it to the next update. The moments have the same problem: with beta2 =
0.999 a step changes the mean square by less than half a unit, so rounded to nearest it can grow but never shrink.
Therefore `stochastic` and `kahan` also round the moments, and kahan its compensation, stochastically; `nearest` rounds
nothing stochastically. float32 weights are not rounded.

Random bits are a pure function of (seed, the parameter's name, its count of updates, the element's index in the full
parameter), so ranks, shards, resumed runs, CPUs and GPUs draw the same bits. Every operation is rounded separately, in
the order of the Triton kernel (adamw_triton.py): the two are bit-identical.

Sources: AdamW: Loshchilov and Hutter, https://arxiv.org/abs/1711.05101. Stochastic rounding of bfloat16 weights:
Zamirai et al., https://arxiv.org/abs/2010.06192. The hash is lowbias32 by Chris Wellons (public domain),
https://github.com/skeeto/hash-prospector.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

Rounding = Literal["nearest", "stochastic", "kahan"]

MASK = 0xFFFFFFFF  # 32 bits, in int64: torch has no arithmetic on uint32
FACTORS = (0x7FEB352D, 0x846CA68B)  # of lowbias32
SECOND_KEY = 0x9E3779B9  # xor with it derives a second key
COUNT_BITS = 24  # counts are float32, exact up to 2^24
# Elements at a time: the reference's temporaries, about 60 bytes per element, stay small compared with a model.
CHUNK = {"cpu": 1 << 20, "cuda": 1 << 22}


# --- Random bits and rounding.


class ShardSpan(NamedTuple):
    """Position of a shard in the full tensor: element i is the full `first + i // width * pitch + i % width`."""

    first: int
    width: int
    pitch: int


def shard_span(full_shape: Sequence[int], shape: Sequence[int], offset: Sequence[int]) -> ShardSpan:
    """Return the span of a box at `offset` of a tensor that is sharded in its first dimension, one other, or both."""
    cut = [d for d, (n, m) in enumerate(zip(shape, full_shape, strict=True)) if n != m]
    last = cut[-1] if cut else 0
    assert set(cut) <= {0, last}, f"a piece {tuple(shape)} of {tuple(full_shape)}: cut in the middle too"
    first = sum(o * math.prod(full_shape[d + 1 :]) for d, o in enumerate(offset))
    return ShardSpan(first, math.prod(shape[last:]), math.prod(full_shape[last:]))


def key_words(seed: int, name: str) -> tuple[int, int]:
    """Return the constant part of a parameter's key: two words of 32 bits."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def mix(x: Tensor) -> Tensor:
    """Compute lowbias32, a bijection of 32-bit integers, in int64."""
    x = x ^ (x >> 16)
    x = (x * FACTORS[0]) & MASK
    x = x ^ (x >> 15)
    x = (x * (FACTORS[1] - (1 << 32))) & MASK  # the same low 32 bits, and no overflow of int64
    return x ^ (x >> 16)


def step_key(words: Tensor, counts: Tensor) -> Tensor:
    """Return the (n, 2) int64 keys of one update, from `key_words` (n, 2) int64 and update counts (n,), from 1 on."""
    first = mix(words[:, 0] ^ counts.long())
    return torch.stack([first, mix(first ^ words[:, 1])], dim=1)


def random_bits(key: Tensor, index: Tensor) -> Tensor:
    """Return 32 random bits in int64, shaped like `index` (int64, modulo 2^32); key: (2,), a row of `step_key`."""
    return mix(mix((index & MASK) ^ key[0]) ^ key[1])


def round_stochastic(x: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to bfloat16, up with a probability proportional to the distance from the lower neighbor.

    The lowest 16 of `bits` are added below the last bit of bfloat16, then the lower half is cut off. Finite values stay
    finite, inf and nan stay inf and nan, and a value that bfloat16 represents is unchanged.
    """
    raw = x.view(torch.int32)
    moved = (raw + (bits & 0xFFFF).int()) & -0x10000
    over = (moved & 0x7F800000) == 0x7F800000  # beyond the largest bfloat16, or inf already: truncate only
    out = (torch.where(over, raw, moved) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(x.isnan(), x.to(torch.bfloat16), out)


# --- Groups of parameters, one call's update.


@dataclass(frozen=True)
class ParamTable:
    """Values of n parameters on one device, read in every update of them."""

    counts: Tensor  # (n,) float32, updates so far
    decays: Tensor  # (n,) float64, weight decay
    words: Tensor  # (n, 2) int64, `key_words` of each
    spans: list[ShardSpan]

    def count_update(self, first: int, last: int, found_inf: Tensor) -> Tensor:
        """Increment counts of [first, last) unless `found_inf` () bool is True; return the keys (last - first, 2)."""
        counts = self.counts[first:last]
        counts.add_((~found_inf).float())
        return step_key(self.words[first:last], counts)

    def step_factors(self, first: int, last: int, betas: tuple[float, float], lr: Tensor, grad_scale: Tensor) -> Tensor:
        """Return (last - first, 4) float32: 1 - lr * decay, step size, 1 / root of beta2's bias, 1 / grad_scale.

        Call it after `count_update`: bias corrections include the current update.
        """
        counts, rate = self.counts[first:last], lr.double()
        keep = 1.0 - rate * self.decays[first:last]
        size = rate / (1.0 - power(betas[0], counts))
        root = 1.0 / sqrt((1.0 - power(betas[1], counts)).float())
        inverse = (1.0 / grad_scale.double()).expand_as(size)
        return torch.stack([keep.float(), size.float(), root, inverse.float()], dim=1)


@dataclass(frozen=True)
class AdamWGroup:
    """Parameters in one update: n local tensors with their states, all contiguous, on one device.

    The states have one dtype, bfloat16 or float32; for float32 weights it is float32.
    """

    weights: list[Tensor]  # bfloat16, or all float32 and rounded to nearest
    means: list[Tensor]
    squares: list[Tensor]
    remainders: list[Tensor] | None  # bfloat16, for `kahan`
    params: ParamTable
    betas: tuple[float, float]
    eps: float
    rounding: Rounding

    def __post_init__(self) -> None:
        assert all(w.dtype == self.dtype and w.is_contiguous() for w in self.weights)
        assert self.dtype == torch.bfloat16 or (self.dtype, self.rounding) == (torch.float32, "nearest")
        assert (self.remainders is not None) == (self.rounding == "kahan")

    @property
    def dtype(self) -> torch.dtype:
        return self.weights[0].dtype


def contiguous_ranges(indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield ascending indices as half-open ranges without gaps."""
    start = 0
    for k in range(1, len(indices) + 1):
        if k == len(indices) or indices[k] != indices[k - 1] + 1:
            yield indices[start], indices[k - 1] + 1
            start = k


def power(base: float, exponents: Tensor) -> Tensor:
    """Compute float64 powers by squaring, in a fixed order of multiplications: bit-identical on every device."""
    left = exponents.long()
    result, square = torch.ones_like(left, dtype=torch.float64), torch.full_like(left, base, dtype=torch.float64)
    for _ in range(COUNT_BITS):
        result = torch.where((left & 1).bool(), result * square, result)
        square, left = square * square, left >> 1
    return result


def sqrt(x: Tensor) -> Tensor:
    """Compute correctly rounded float32 roots; torch's CPU root is off by one bit in a sixth of the cases (MKL)."""
    return x.double().sqrt().float()


class GroupUpdate(Protocol):
    """An implementation of a group's update."""

    def __call__(
        self, grads: Sequence[Tensor], lr: Tensor, grad_scale: Tensor, found_inf: Tensor, first: int = 0
    ) -> None:
        """Update the group's parameters `first` ... `first + len(grads)` once, without a device synchronization.

        grads: contiguous, bfloat16 or float32, multiplied by `grad_scale` () float32; lr: () float32; found_inf: ()
            bool: if True, nothing changes, nor do the counts.
        """
        ...


@dataclass(frozen=True)
class ReferenceUpdate:
    """Update a group by parameter, chunk and operator."""

    group: AdamWGroup

    @torch.no_grad()
    def __call__(
        self, grads: Sequence[Tensor], lr: Tensor, grad_scale: Tensor, found_inf: Tensor, first: int = 0
    ) -> None:
        """Update weights, remainders, means and squares in place, one chunk at a time; see `GroupUpdate`."""
        group, last, device = self.group, first + len(grads), self.group.params.counts.device
        keys = group.params.count_update(first, last, found_inf)
        factors = group.params.step_factors(first, last, group.betas, lr, grad_scale)
        for k, grad in enumerate(grads):
            states = [group.weights, group.means, group.squares, *([group.remainders] if group.remainders else [])]
            flat = [t.view(-1) for t in (*(each[first + k] for each in states), grad)]
            size = CHUNK[device.type]
            for at in range(0, grad.numel(), size):
                *old, part = (t[at : at + size] for t in flat)
                index = full_index(group.params.spans[first + k], at, part)
                new = _updated(group, old, part, factors[k], keys[k], index)
                for t, value in zip(old, list(new), strict=True):
                    t.copy_(torch.where(found_inf, t, value))


def full_index(span: ShardSpan, start: int, part: Tensor) -> Tensor:
    """Return int64 indices in the full parameter, in part's shape, for elements from `start` of the shard on."""
    index = torch.arange(start, start + part.numel(), device=part.device).view(part.shape)
    return span.first + index // span.width * span.pitch + index % span.width


def _updated(
    group: AdamWGroup, old: Sequence[Tensor], grad: Tensor, factors: Tensor, key: Tensor, index: Tensor
) -> Iterator[Tensor]:
    """Yield the new weight, mean, mean square and remainder of one chunk."""
    keep, size, root, inverse = factors.unbind()
    weight, mean, square = (t.float() for t in old[:3])
    bits = random_bits(key, index) if group.rounding != "nearest" else None
    grad = grad.float() * inverse
    mean = mean + (grad - mean) * (1.0 - group.betas[0])
    square = square * group.betas[1] + (grad * grad) * (1.0 - group.betas[1])
    step = (size * mean) / (sqrt(square) * root + group.eps)
    if group.remainders is not None:
        weight = weight + old[3].float()
    weight = weight * keep - step
    nearest = weight.to(old[0].dtype)
    if bits is None:
        yield from (nearest, mean.to(old[1].dtype), square.to(old[2].dtype))
        return
    more = random_bits(torch.stack([key[0], key[1] ^ SECOND_KEY]), index)
    narrow = old[1].dtype == torch.bfloat16
    yield nearest if group.rounding == "kahan" else round_stochastic(weight, bits)
    yield round_stochastic(mean, bits >> 16) if narrow else mean
    yield round_stochastic(square, more) if narrow else square
    if group.rounding == "kahan":
        yield round_stochastic(weight - nearest.float(), bits)


# --- Rounding and skipping for optimizers whose update consists of torch operators.


def write_stochastic(
    target: Tensor, value: Tensor, found_inf: Tensor, key: Tensor, shift: int = 0, first: int = 0
) -> None:
    """Write a tensor, rounded up or down with the probability that preserves the expected value.

    Args:
        target: bfloat16, contiguous; unchanged if `found_inf` () is True.
        value: equally many elements, contiguous, float32.
        key: (2,) int64, a row of `step_key`.
        shift: 0 or 16: which 16 of the 32 random bits are used.
        first: index of the target's first element in the full parameter; the target is contiguous there.
    """
    flat, values, size = target.view(-1), value.view(-1), CHUNK[target.device.type]
    for at in range(0, flat.numel(), size):
        old = flat[at : at + size]
        index = torch.arange(first + at, first + at + old.numel(), device=old.device)
        new = round_stochastic(values[at : at + size], random_bits(key, index) >> shift)
        old.copy_(torch.where(found_inf, old, new))
