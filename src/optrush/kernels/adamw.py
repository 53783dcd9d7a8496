"""AdamW: float32 inside, and three ways to write a bfloat16 weight. The reference, in plain torch.

A bfloat16 has 8 significant bits: rounded to the nearest, a weight moves only if its update exceeds 1/512 to 1/256 of
it. `stochastic` rounds up or down with the probability that makes the expected value exact. `kahan` keeps what rounding
took from a weight in a bfloat16 of its own, and adds it to the next update. The same happens to the moments: one step
changes the mean square by at most 1 - beta2 of itself, which for beta2 = 0.999 is always less than half a unit, so that
rounded to the nearest it can grow and never shrink. With `stochastic` and with `kahan` the moments, and kahan's
remainders, are therefore rounded stochastically; with `nearest` nothing is. float32 weights are written as they are.

Random bits are a pure function of (seed, the parameter's name, its count of updates, the element's index in the whole
parameter): no generator, so ranks, shards, resumed runs, a CPU and a GPU draw the same ones. Every operation here is
rounded by itself, in one order, as in the Triton kernel (adamw_triton.py): the two agree to the bit.

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
ANOTHER = 0x9E3779B9  # turns a key into a second one
COUNT_BITS = 24  # counts are float32, exact so far
# Elements at a time: the loop's temporaries, about 60 bytes for each, stay small beside a model.
CHUNK = {"cpu": 1 << 20, "cuda": 1 << 22}


class Span(NamedTuple):
    """Where a local tensor lies in the whole: element i is the whole's `first + i // width * pitch + i % width`."""

    first: int
    width: int
    pitch: int


def span(whole: Sequence[int], shape: Sequence[int], offset: Sequence[int]) -> Span:
    """The span of a box of a tensor, which is cut along its first dimension, one other, or both.

    Args:
        whole: the whole tensor's shape.
        shape: the box's.
        offset: where in the whole the box begins.
    """
    cut = [d for d, (n, m) in enumerate(zip(shape, whole, strict=True)) if n != m]
    last = cut[-1] if cut else 0
    assert set(cut) <= {0, last}, f"a piece {tuple(shape)} of {tuple(whole)}: cut in the middle too"
    first = sum(o * math.prod(whole[d + 1 :]) for d, o in enumerate(offset))
    return Span(first, math.prod(shape[last:]), math.prod(whole[last:]))


def key_words(seed: int, name: str) -> tuple[int, int]:
    """The part of a parameter's key that never changes: two words of 32 bits."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def mix(x: Tensor) -> Tensor:
    """lowbias32, a bijection of 32-bit integers, held in int64."""
    x = x ^ (x >> 16)
    x = (x * FACTORS[0]) & MASK
    x = x ^ (x >> 15)
    x = (x * (FACTORS[1] - (1 << 32))) & MASK  # the same low 32 bits, and no overflow of int64
    return x ^ (x >> 16)


def step_key(words: Tensor, counts: Tensor) -> Tensor:
    """(n, 2) int64 keys of one update, from `key_words` (n, 2) int64 and counts (n,), the update's own included."""
    first = mix(words[:, 0] ^ counts.long())
    return torch.stack([first, mix(first ^ words[:, 1])], dim=1)


def random_bits(key: Tensor, index: Tensor) -> Tensor:
    """32 random bits in int64, shaped like `index` (int64, taken modulo 2^32); key: a row of `step_key`, (2,)."""
    return mix(mix((index & MASK) ^ key[0]) ^ key[1])


def round_stochastic(x: Tensor, bits: Tensor) -> Tensor:
    """float32 to bfloat16, up with the probability of what lies above the lower neighbour.

    16 random bits are added below bfloat16's last one, then those are cut off. What is finite stays finite, inf and nan
    stay what they are, and what bfloat16 can hold stays as it is.

    Args:
        bits: integers, whose lowest 16 bits are used.
    """
    raw = x.view(torch.int32)
    moved = (raw + (bits & 0xFFFF).int()) & -0x10000
    over = (moved & 0x7F800000) == 0x7F800000  # beyond the largest bfloat16, or inf already: cut only
    out = (torch.where(over, raw, moved) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(x.isnan(), x.to(torch.bfloat16), out)


@dataclass(frozen=True)
class Group:
    """Parameters that are updated together: n local tensors with their states, all contiguous, on one device.

    The states' dtype is bfloat16 or float32, one for all; of float32 weights it is float32.
    """

    weights: list[Tensor]  # bfloat16, or all float32 and rounded to the nearest
    means: list[Tensor]
    squares: list[Tensor]
    counts: Tensor  # (n,) float32, updates so far
    remainders: list[Tensor] | None  # bfloat16, for `kahan`
    decays: Tensor  # (n,) float64
    words: Tensor  # (n, 2) int64, `key_words` of each
    spans: list[Span]
    betas: tuple[float, float]
    eps: float
    rounding: Rounding

    def __post_init__(self) -> None:
        assert all(w.dtype == self.dtype and w.is_contiguous() for w in self.weights)
        assert self.dtype == torch.bfloat16 or (self.dtype, self.rounding) == (torch.float32, "nearest")
        assert (self.remainders is not None) == (self.rounding == "kahan")

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.weights[0].dtype


def runs(indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending indices as half-open ranges without gaps."""
    start = 0
    for k in range(1, len(indices) + 1):
        if k == len(indices) or indices[k] != indices[k - 1] + 1:
            yield indices[start], indices[k - 1] + 1
            start = k


def power(base: float, exponents: Tensor) -> Tensor:
    """float64 powers by squaring: products in one order, the same bits on every device (a library's pow is not)."""
    left = exponents.long()
    result, square = torch.ones_like(left, dtype=torch.float64), torch.full_like(left, base, dtype=torch.float64)
    for _ in range(COUNT_BITS):
        result = torch.where((left & 1).bool(), result * square, result)
        square, left = square * square, left >> 1
    return result


def sqrt(x: Tensor) -> Tensor:
    """Correctly rounded float32 roots; torch's own on a CPU is off by one bit in a sixth of the cases (MKL's)."""
    return x.double().sqrt().float()


def factors(counts: Tensor, decays: Tensor, betas: tuple[float, float], lr: Tensor, grad_scale: Tensor) -> Tensor:
    """(n, 4) float32: what the weight keeps, the step's size, 1 / root of the bias of squares, 1 / grad_scale.

    Args:
        counts: (n,) of updates, this one included.
        decays: (n,) float64.
    """
    rate = lr.double()
    keep = 1.0 - rate * decays
    size = rate / (1.0 - power(betas[0], counts))
    root = 1.0 / sqrt((1.0 - power(betas[1], counts)).float())
    inverse = (1.0 / grad_scale.double()).expand_as(size)
    return torch.stack([keep.float(), size.float(), root, inverse.float()], dim=1)


class Update(Protocol):
    """One way to update a group."""

    def __call__(
        self, grads: Sequence[Tensor], lr: Tensor, grad_scale: Tensor, found_inf: Tensor, first: int = 0
    ) -> None:
        """One update of the group's parameters `first` ... `first + len(grads)`; waits for nothing on the device.

        Args:
            grads: contiguous, bfloat16 or float32, `grad_scale` times too large.
            lr: () float32, like `grad_scale`.
            found_inf: () bool; where True nothing changes, no count either.
        """
        ...


@dataclass(frozen=True)
class Loop:
    """The reference: parameter by parameter, chunk by chunk, operator by operator."""

    group: Group

    @torch.no_grad()
    def __call__(
        self, grads: Sequence[Tensor], lr: Tensor, grad_scale: Tensor, found_inf: Tensor, first: int = 0
    ) -> None:
        group, last, device = self.group, first + len(grads), self.group.counts.device
        counts = group.counts[first:last]
        counts.add_((~found_inf).float())
        keys = step_key(group.words[first:last], counts)
        numbers = factors(counts, group.decays[first:last], group.betas, lr, grad_scale)
        for k, grad in enumerate(grads):
            tensors = [group.weights[first + k], group.means[first + k], group.squares[first + k]]
            tensors += [group.remainders[first + k]] if group.remainders is not None else []
            flat = [t.view(-1) for t in [*tensors, grad]]
            size = CHUNK[device.type]
            for at in range(0, grad.numel(), size):
                *old, part = (t[at : at + size] for t in flat)
                where = group.spans[first + k]
                index = torch.arange(at, at + part.numel(), device=device)
                index = where.first + index // where.width * where.pitch + index % where.width
                new = _moved(group, old, part, numbers[k], keys[k], index)
                for t, value in zip(old, list(new), strict=True):
                    t.copy_(torch.where(found_inf, t, value))


def _moved(
    group: Group, old: Sequence[Tensor], grad: Tensor, numbers: Tensor, key: Tensor, index: Tensor
) -> Iterator[Tensor]:
    """New weight, mean, mean square and remainder of one chunk."""
    keep, size, root, inverse = numbers.unbind()
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
    more = random_bits(torch.stack([key[0], key[1] ^ ANOTHER]), index)
    narrow = old[1].dtype == torch.bfloat16
    yield nearest if group.rounding == "kahan" else round_stochastic(weight, bits)
    yield round_stochastic(mean, bits >> 16) if narrow else mean
    yield round_stochastic(square, more) if narrow else square
    if group.rounding == "kahan":
        yield round_stochastic(weight - nearest.float(), bits)
