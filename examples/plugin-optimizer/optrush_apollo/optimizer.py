"""APOLLO: a gradient step, each row scaled to the norm of an AdamW step, which is estimated by random projection.

For a row g of a matrix's gradient, C values, AdamW runs on the projection p = g S / sqrt(r), where S (C, r) are random
signs: r values with two moments each, instead of C. Random signs preserve norms, so its step a on p gives the norm of a
step on g: the row moves along g by |a| / |p| of it, times sqrt(C / r), because every entry of AdamW's step is about as
large as the rate.

Rows are independent, so fused matrices, and shards along the first dimension, are updated like the full ones. S is a
function of the run's seed and C, and constant.

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
from optrush.kernels.adamw import Rounding, contiguous_ranges, key_words, random_bits, sqrt, step_key
from optrush.optim.adamw import LocalParam, MatrixOptimizer, param_table

LEAST = 1e-18  # of a projection's norm, where float32's squares end: a row of zeros does not move


@dataclass(frozen=True)
class Projected:
    """States of one matrix (R, C)."""

    at: int  # index among the projected matrices
    mean: Tensor  # (R, r) float32
    square: Tensor


class Apollo(MatrixOptimizer):
    """Decoupled weight decay; norms and biases never decay (`TrainedParam.decays`).

    States of a matrix (R, C) of more than `rank` columns: `mean` and `square`, (R, rank) float32, cut like its rows,
    and `count`; of everything else those of AdamW. The gradient has no momentum of its own.

    Memory: 8 rank / C bytes a parameter; temporaries of `room` elements, or of a row.
    """

    def __init__(
        self, trained: Sequence[LocalParam], optim: Optim, *, rank: int, room: int, rounding: Rounding = "nearest",
        seed: int = 0,
    ) -> None:  # fmt: skip
        """room: elements of a matrix that are updated at a time, in whole rows."""
        self.rank, self.room = rank, room
        self.sketched: dict[int, Projected] = {}
        self.signs: dict[int, Tensor] = {}  # by columns C: (C, r) of -1 and 1, in the weights' type
        for i, t in enumerate(trained):
            if len(t.full_shape) == 2 and t.full_shape[1] > rank:
                self.sketched[i] = self._projected(t, len(self.sketched))
                self.signs.setdefault(t.full_shape[1], _signs(t.full_shape[1], rank, seed, t.local))
        if not self.sketched:
            found = f"no matrix of this model has more than {rank} columns"
            raise NeedsError(f"APOLLO with a sketch of {rank} values a row", found, "take a smaller rank")
        super().__init__(trained, optim, self.sketched, rounding, seed)
        self.params = param_table([self.trained[i] for i in self.sketched], optim, seed)

    def _projected(self, t: LocalParam, at: int) -> Projected:
        if t.local.shape[1] != t.full_shape[1]:
            found = f"this rank holds {tuple(t.local.shape)} of the {tuple(t.full_shape)} of {t.name}"
            raise NeedsError("APOLLO, which sketches whole rows", found, "take another optimizer: fused-adamw")
        mean, square = (torch.zeros(len(t.local), self.rank, device=t.local.device) for _ in range(2))
        return Projected(at, mean, square)

    def step(self, lr: Tensor, grad_scale: Tensor, found_inf: Tensor, only: Sequence[int] | None = None) -> None:
        chosen = range(len(self.trained)) if only is None else only
        self.step_rest(lr, grad_scale, found_inf, chosen)
        index = {self.sketched[i].at: i for i in chosen if i in self.sketched and self.trained[i].grad is not None}
        for first, last in contiguous_ranges(list(index)):
            keys = self.params.count_update(first, last, found_inf.bool())
            factors = self.params.step_factors(first, last, self.optim.betas, lr, grad_scale.float())
            for at in range(first, last):
                self._step(index[at], factors[at - first], keys[at - first], found_inf.bool())

    @torch.no_grad()
    def _step(self, i: int, factors: Tensor, key: Tensor, found_inf: Tensor) -> None:
        t, states, grad = self.trained[i], self.sketched[i], self.trained[i].grad
        assert grad is not None
        keep, size, root, inverse = factors.unbind()
        R, C = t.local.shape
        signs = self.signs[C].to(grad.dtype)
        rows = max(1, self.room // C)
        for at in range(0, R, rows):
            here = slice(at, at + rows)
            sketch = (grad[here] @ signs).float() * (inverse / math.sqrt(self.rank))  # (rows, r)
            mean, square = self._moments(states, here, sketch, found_inf)
            move = size * mean / (sqrt(square) * root + self.optim.eps)  # (rows, r)
            times = _row_norms(move) / _row_norms(sketch).clamp(min=LEAST) * math.sqrt(C / self.rank)  # (rows, 1)
            step = grad[here].float() * (times * inverse)  # (rows, C)
            weight = torch.mul(t.local[here].float(), keep).sub_(step)
            self.write(t.local[here], weight, found_inf, key, first=(t.offset[0] + at) * C)

    def _moments(self, states: Projected, here: slice, sketch: Tensor, found_inf: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new mean and mean square of some rows, which replace the states unless `found_inf`."""
        first, second = self.optim.betas
        mean = torch.lerp(states.mean[here], sketch, 1.0 - first)
        square = states.square[here] * second + sketch * sketch * (1.0 - second)
        for state, new in ((states.mean, mean), (states.square, square)):
            state[here] = torch.where(found_inf, state[here], new)
        return mean, square

    def matrix_state(self, i: int) -> dict[str, Tensor]:
        states = self.sketched[i]
        return {"mean": states.mean, "square": states.square, "count": self.params.counts[states.at]}


def _row_norms(x: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    return norms


def _signs(columns: int, rank: int, seed: int, like: Tensor) -> Tensor:
    """Return (columns, rank) of -1 and 1: bits of a hash, equal on every rank and device."""
    words = torch.tensor([key_words(seed, f"signs of {columns}")], dtype=torch.int64, device=like.device)
    key = step_key(words, torch.zeros(1, device=like.device))[0]
    bits = random_bits(key, torch.arange(columns * rank, device=like.device)) & 1
    return (2 * bits - 1).to(like.dtype).view(columns, rank)
