"""Muon: matrices are stepped along their momentum made orthogonal, everything else by AdamW.

A fused matrix of ours is several matrices of the published model (`Pieces`), and each is made orthogonal by itself:
together they would be another matrix, with other singular vectors. Its states and weights stay fused; only the
iterations see it in pieces.

Sources: Jordan et al., https://kellerjordan.github.io/posts/muon/; the step's size, by which learning rate and weight
decay of AdamW carry over: Liu et al., https://arxiv.org/abs/2502.16982.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optrush.config import Optim
from optrush.kernels.adamw import Rounding, key_words, runs, step_key
from optrush.kernels.newton_schulz import orthogonal
from optrush.kernels.stochastic_rounding import store
from optrush.optim.adamw import AdamW, Learnt

LIKE_ADAMW = 0.2  # the root mean square of AdamW's update, about, in units of the rate


@dataclass(frozen=True)
class Pieces:
    """How a matrix (R, C) is made of others: its rows are `groups` groups, in each `rows` of every piece in turn."""

    groups: int
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Alike:
    """Matrices of one shape, made of equal pieces: they are updated together."""

    at: list[int]  # which of the trained
    weights: list[Tensor]  # (R, C) each, contiguous
    momenta: list[Tensor]
    counts: Tensor  # (n,) float32, updates so far
    words: Tensor  # (n, 2) int64, `key_words` of each
    pieces: Pieces


class Muon:
    """Decoupled weight decay; norms and biases never decay (`Trained.decays`).

    States of a matrix: `momentum` in the weight's dtype, and `count`; of everything else those of AdamW.

    Memory: 4 bytes a parameter of the matrices (2 with bf16 weights), and temporaries of `room` elements.
    """

    reads_host = False

    def __init__(
        self, trained: Sequence[Learnt], optim: Optim, matrices: Mapping[str, Pieces], *, momentum: float,
        iterations: int, room: int, rounding: Rounding = "nearest", seed: int = 0,
    ) -> None:  # fmt: skip
        """matrices: what is made orthogonal, by canonical name; it must not be cut. room: elements of the matrices that
        are updated at a time."""
        assert rounding != "kahan"
        self.trained, self.optim = list(trained), optim
        self.momentum, self.iterations, self.room = momentum, iterations, room
        self.rounding: Rounding = rounding
        rest = [i for i, t in enumerate(self.trained) if t.name not in matrices]
        self.rest = {i: k for k, i in enumerate(rest)}
        self.adamw = AdamW([self.trained[i] for i in rest], optim, fused=True, rounding=rounding, seed=seed)
        kinds: dict[tuple[object, ...], list[int]] = {}
        for i, t in enumerate(self.trained):
            if t.name in matrices:
                kinds.setdefault((matrices[t.name], t.local.shape, t.local.dtype), []).append(i)
        self.alike = [_alike(self.trained, at, matrices[self.trained[at[0]].name], seed) for at in kinds.values()]
        self.place = {i: (a, k) for a, alike in enumerate(self.alike) for k, i in enumerate(alike.at)}
        device = self.alike[0].counts.device
        narrow = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        self.products = torch.bfloat16 if narrow else torch.float32
        self.store = store(rounding, device)

    @torch.no_grad()
    def step(self, lr: Tensor, grad_scale: Tensor, found_inf: Tensor, only: Sequence[int] | None = None) -> None:
        chosen = range(len(self.trained)) if only is None else only
        if rest := [self.rest[i] for i in chosen if i in self.rest]:
            self.adamw.step(lr, grad_scale, found_inf, only=rest)
        grads: list[dict[int, Tensor]] = [{} for _ in self.alike]
        for i in chosen:
            if i in self.place and (grad := self.trained[i].grad) is not None:
                a, k = self.place[i]
                grads[a][k] = grad
        inverse = (1.0 / grad_scale.double()).float()
        for alike, found in zip(self.alike, grads, strict=True):
            most = max(1, self.room // alike.weights[0].numel())
            for first, last in runs(list(found)):
                for at in range(first, last, most):
                    part = [found[k] for k in range(at, min(last, at + most))]
                    self._update(alike, slice(at, at + len(part)), part, inverse, lr, found_inf.bool())

    def _update(
        self, alike: Alike, here: slice, grads: Sequence[Tensor], inverse: Tensor, lr: Tensor, found_inf: Tensor
    ) -> None:
        """Some of the matrices, by their gradients (R, C) each, which are 1 / `inverse` too large."""
        counts = alike.counts[here]
        counts.add_((~found_inf).float())
        keys = step_key(alike.words[here], counts)
        steps = self._moved(alike.momenta[here], torch.stack(tuple(grads)).float().mul_(inverse), keys, found_inf)
        self._make_orthogonal(steps, alike.pieces)
        steps.mul_(lr)
        keep = (1.0 - lr.double() * self.optim.weight_decay).float()
        for weight, step, key in zip(alike.weights[here], steps, keys, strict=True):
            self.store(weight, torch.mul(weight.float(), keep).sub_(step), found_inf, key)

    def _moved(self, old: Sequence[Tensor], grads: Tensor, keys: Tensor, found_inf: Tensor) -> Tensor:
        """Advances the momenta; what they and the gradients (n, R, C), in whose place it lies, say to step along."""
        new = torch.stack(tuple(old)).float()  # (n, R, C)
        new.lerp_(grads, 1.0 - self.momentum)
        for momentum, value, key in zip(old, new, keys, strict=True):
            self.store(momentum, value, found_inf, key, 16)
        return grads.lerp_(new, self.momentum)  # Nesterov: as if the momentum had already moved on

    def _make_orthogonal(self, steps: Tensor, pieces: Pieces) -> None:
        """Each piece of (n, R, C) by itself, in place, and as large as AdamW's update would be."""
        n, _, C = steps.shape
        apart = steps.view(n, pieces.groups, -1, C).split_with_sizes(pieces.rows, dim=2)  # (n, groups, rows, C) each
        for rows in set(pieces.rows):
            same = [p for p in apart if p.shape[2] == rows]
            size = LIKE_ADAMW * math.sqrt(max(pieces.groups * rows, C))
            # (n of each piece, groups rows, C); no name holds them while the iterations run
            found = orthogonal(torch.cat([p.reshape(n, -1, C) for p in same]).to(self.products), self.iterations)
            for p, y in zip(same, found.chunk(len(same)), strict=True):
                p.copy_(y.reshape(p.shape)).mul_(size)

    def state(self) -> dict[str, dict[str, Tensor]]:
        rest, found = self.adamw.state(), {}
        for i, t in enumerate(self.trained):
            if i in self.rest:
                found[t.name] = rest[t.name]
            else:
                a, k = self.place[i]
                found[t.name] = {"momentum": self.alike[a].momenta[k], "count": self.alike[a].counts[k]}
        return found


def _alike(trained: Sequence[Learnt], at: list[int], pieces: Pieces, seed: int) -> Alike:
    weights = [trained[i].local for i in at]
    device = weights[0].device
    words = torch.tensor([key_words(seed, trained[i].name) for i in at], dtype=torch.int64, device=device)
    momenta = [torch.zeros_like(w) for w in weights]
    return Alike(at, weights, momenta, torch.zeros(len(at), device=device), words, pieces)
