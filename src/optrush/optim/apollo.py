"""APOLLO: the gradient itself, each row of it as long as AdamW's step would be; the lengths are asked of a sketch.

For a row g of a matrix's gradient, C values, AdamW runs on p = g S / sqrt(r), where S (C, r) are random signs: r values
with two moments each, instead of C. Its step a on p says how long a step on g would be, for signs keep lengths: the row
moves along g by |a| / |p| of it, times sqrt(C / r), since every entry of AdamW's step is about as large as the rate.

A row needs nothing of another, so fused matrices, and matrices cut along their first dimension, are stepped as the
whole ones. S is a function of the run's seed and C, and never changes.

Source: Zhu et al., https://arxiv.org/abs/2412.05270.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optrush.config import Optim
from optrush.errors import NeedsError
from optrush.kernels.adamw import Rounding, factors, key_words, random_bits, runs, sqrt, step_key
from optrush.kernels.stochastic_rounding import store
from optrush.optim.adamw import AdamW, Learnt

LEAST = 1e-18  # of a sketch's length, where float32's squares end: a row of zeros stays where it is


@dataclass(frozen=True)
class Sketched:
    """States of one matrix (R, C)."""

    at: int  # among the sketched ones
    mean: Tensor  # (R, r) float32
    square: Tensor


class Apollo:
    """Decoupled weight decay; norms and biases never decay (`Trained.decays`).

    States of a matrix (R, C) of more than `rank` columns: `mean` and `square`, (R, rank) float32, cut like its rows,
    and `count`; of everything else those of AdamW. The gradient has no momentum of its own.

    Memory: 8 rank / C bytes a parameter; temporaries of `room` elements, or of a row.
    """

    reads_host = False

    def __init__(
        self, trained: Sequence[Learnt], optim: Optim, *, rank: int, room: int, rounding: Rounding = "nearest",
        seed: int = 0,
    ) -> None:  # fmt: skip
        """room: elements of a matrix that are updated at a time, in whole rows."""
        assert rounding != "kahan"
        self.trained, self.optim, self.rank, self.room = list(trained), optim, rank, room
        self.rounding: Rounding = rounding
        self.sketched: dict[int, Sketched] = {}
        self.signs: dict[int, Tensor] = {}  # by columns C: (C, r) of -1 and 1, in the weights' type
        for i, t in enumerate(self.trained):
            if len(t.full_shape) == 2 and t.full_shape[1] > rank:
                self.sketched[i] = self._sketch(t, len(self.sketched))
                self.signs.setdefault(t.full_shape[1], _signs(t.full_shape[1], rank, seed, t.local))
        if not self.sketched:
            found = f"no matrix of this model has more than {rank} columns"
            raise NeedsError(f"APOLLO with a sketch of {rank} values a row", found, "take a smaller rank")
        mine, device = [self.trained[i] for i in self.sketched], next(iter(self.signs.values())).device
        decays = [optim.weight_decay if t.decays else 0.0 for t in mine]
        self.counts = torch.zeros(len(mine), device=device)  # updates so far
        self.decays = torch.tensor(decays, dtype=torch.float64, device=device)
        self.words = torch.tensor([key_words(seed, t.name) for t in mine], dtype=torch.int64, device=device)
        rest = [i for i in range(len(self.trained)) if i not in self.sketched]
        self.rest = {i: k for k, i in enumerate(rest)}
        self.adamw = AdamW([self.trained[i] for i in rest], optim, fused=True, rounding=rounding, seed=seed)
        self.store = store(rounding, device)

    def _sketch(self, t: Learnt, at: int) -> Sketched:
        if t.local.shape[1] != t.full_shape[1]:
            found = f"this rank holds {tuple(t.local.shape)} of the {tuple(t.full_shape)} of {t.name}"
            raise NeedsError("APOLLO, which sketches whole rows", found, "take another optimizer: fused-adamw")
        mean, square = (torch.zeros(len(t.local), self.rank, device=t.local.device) for _ in range(2))
        return Sketched(at, mean, square)

    def step(self, lr: Tensor, grad_scale: Tensor, found_inf: Tensor, only: Sequence[int] | None = None) -> None:
        chosen = range(len(self.trained)) if only is None else only
        if rest := [self.rest[i] for i in chosen if i in self.rest]:
            self.adamw.step(lr, grad_scale, found_inf, only=rest)
        mine = {self.sketched[i].at: i for i in chosen if i in self.sketched and self.trained[i].grad is not None}
        for first, last in runs(list(mine)):
            here = slice(first, last)
            self.counts[here].add_((~found_inf.bool()).float())
            keys = step_key(self.words[here], self.counts[here])
            numbers = factors(self.counts[here], self.decays[here], self.optim.betas, lr, grad_scale.float())
            for at in range(first, last):
                self._step(mine[at], numbers[at - first], keys[at - first], found_inf.bool())

    @torch.no_grad()
    def _step(self, i: int, numbers: Tensor, key: Tensor, found_inf: Tensor) -> None:
        t, held, grad = self.trained[i], self.sketched[i], self.trained[i].grad
        assert grad is not None
        keep, size, root, inverse = numbers.unbind()
        R, C = t.local.shape
        signs = self.signs[C].to(grad.dtype)
        rows = max(1, self.room // C)
        for at in range(0, R, rows):
            here = slice(at, at + rows)
            sketch = (grad[here] @ signs).float() * (inverse / math.sqrt(self.rank))  # (rows, r)
            mean, square = self._moments(held, here, sketch, found_inf)
            move = size * mean / (sqrt(square) * root + self.optim.eps)  # (rows, r)
            times = _length(move) / _length(sketch).clamp(min=LEAST) * math.sqrt(C / self.rank)  # (rows, 1)
            step = grad[here].float() * (times * inverse)  # (rows, C)
            weight = torch.mul(t.local[here].float(), keep).sub_(step)
            self.store(t.local[here], weight, found_inf, key, first=(t.offset[0] + at) * C)

    def _moments(self, held: Sketched, here: slice, sketch: Tensor, found_inf: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and mean square of some rows, this update's sketch in them; kept, if it is any good."""
        first, second = self.optim.betas
        mean = torch.lerp(held.mean[here], sketch, 1.0 - first)
        square = held.square[here] * second + sketch * sketch * (1.0 - second)
        for kept, new in ((held.mean, mean), (held.square, square)):
            kept[here] = torch.where(found_inf, kept[here], new)
        return mean, square

    def state(self) -> dict[str, dict[str, Tensor]]:
        rest, found = self.adamw.state(), {}
        for i, t in enumerate(self.trained):
            if i in self.rest:
                found[t.name] = rest[t.name]
            else:
                held = self.sketched[i]
                found[t.name] = {"mean": held.mean, "square": held.square, "count": self.counts[held.at]}
        return found


def _length(x: Tensor) -> Tensor:
    """(rows, 1) of (rows, ...)."""
    length: Tensor = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    return length


def _signs(columns: int, rank: int, seed: int, like: Tensor) -> Tensor:
    """(columns, rank) of -1 and 1: bits of a hash, equal on every rank and device."""
    words = torch.tensor([key_words(seed, f"signs of {columns}")], dtype=torch.int64, device=like.device)
    key = step_key(words, torch.zeros(1, device=like.device))[0]
    bits = random_bits(key, torch.arange(columns * rank, device=like.device)) & 1
    return (2 * bits - 1).to(like.dtype).view(columns, rank)
