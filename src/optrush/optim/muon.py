"""Muon: matrices are updated along their orthogonalized momentum, everything else by AdamW.

Our fused matrices contain several matrices of the published model (`Pieces`), each orthogonalized separately: a fused
matrix has other singular vectors. States and weights stay fused; only the iterations run on the pieces. Newton-Schulz
iterations orthogonalize approximately: matmuls only, for many matrices at once.

Sources: Jordan et al., https://kellerjordan.github.io/posts/muon/; the step size, with which AdamW's learning rate and
weight decay carry over: Liu et al., https://arxiv.org/abs/2502.16982.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optrush.config import Optim
from optrush.kernels.adamw import ParamTable, Rounding, contiguous_ranges
from optrush.optim.adamw import LocalParam, MatrixOptimizer, param_table

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
LEAST_NORM = 1e-7  # minimum norm of a matrix; below, the result is scaled down, so that noise is not amplified
LIKE_ADAMW = 0.2  # the approximate root mean square of AdamW's update, in units of the rate


def orthogonal(x: Tensor, iterations: int = 5) -> Tensor:
    """Return the matrices (n, R, C) with singular values near 1, in x's dtype.

    Each iteration applies the odd polynomial A s + B s^3 + C s^5 to every singular value s and keeps the singular
    vectors. Five iterations bring all values that are not tiny near 1 (0.68 to 1.13), where they oscillate: the
    coefficients trade convergence for a steep start.
    Work: 2 r (2 r c + r^2) FLOP per iteration and matrix, r the smaller and c the larger side.
    """
    a, b, c = COEFFICIENTS
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x  # (n, r, c)
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=wide)  # (n, 1, 1)
    x = x / norm.clamp(min=LEAST_NORM).to(x.dtype)  # no singular value above about 1
    for _ in range(iterations):
        gram = x @ x.mT  # (n, r, r)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # (n, r, r)
        x = torch.baddbmm(x, polynomial, x, beta=a)  # (n, r, c)
    return x.mT if tall else x


@dataclass(frozen=True)
class Pieces:
    """Composition of a matrix (R, C): its rows are `groups` groups, each with `rows[i]` rows of every piece i."""

    groups: int
    rows: tuple[int, ...]


@dataclass(frozen=True)
class ShapeGroup:
    """Matrices of one shape with equal pieces, updated together."""

    weights: list[Tensor]  # (R, C) each, contiguous
    momenta: list[Tensor]
    params: ParamTable
    pieces: Pieces


class Muon(MatrixOptimizer):
    """Decoupled weight decay; norms and biases never decay (`TrainedParam.decays`).

    States of a matrix: `momentum` in the weight's dtype, and `count`; other parameters have AdamW's states.

    Memory: 4 bytes per parameter of the matrices (2 with bf16 weights), and temporaries of `room` elements.
    """

    def __init__(
        self, trained: Sequence[LocalParam], optim: Optim, matrices: Mapping[str, Pieces], *, momentum: float,
        iterations: int, room: int, rounding: Rounding = "nearest", seed: int = 0,
    ) -> None:  # fmt: skip
        """
        Args:
            matrices: the matrices to orthogonalize, by canonical name; must not be sharded.
            room: number of elements updated at a time.
        """
        kinds: dict[tuple[object, ...], list[int]] = {}
        for i, t in enumerate(trained):
            if t.name in matrices:
                kinds.setdefault((matrices[t.name], t.local.shape, t.local.dtype), []).append(i)
        self.momentum, self.iterations, self.room = momentum, iterations, room
        self.place = {i: (g, k) for g, at in enumerate(kinds.values()) for k, i in enumerate(at)}
        super().__init__(trained, optim, self.place, rounding, seed)
        self.groups = []
        for at in kinds.values():
            members = [self.trained[i] for i in at]
            weights, params = [t.local for t in members], param_table(members, optim, seed)
            momenta = [torch.zeros_like(w) for w in weights]
            self.groups.append(ShapeGroup(weights, momenta, params, matrices[members[0].name]))
        device = self.groups[0].params.counts.device
        narrow = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        self.products = torch.bfloat16 if narrow else torch.float32

    @torch.no_grad()
    def step(self, lr: Tensor, grad_scale: Tensor, found_inf: Tensor, only: Sequence[int] | None = None) -> None:
        """Update matrices by Muon and other parameters by AdamW, with the arguments of `Optimizer.step`."""
        chosen = range(len(self.trained)) if only is None else only
        self.step_rest(lr, grad_scale, found_inf, chosen)
        grads: list[dict[int, Tensor]] = [{} for _ in self.groups]
        for i in chosen:
            if i in self.place and (grad := self.trained[i].grad) is not None:
                g, k = self.place[i]
                grads[g][k] = grad
        inverse = (1.0 / grad_scale.double()).float()
        for group, of_group in zip(self.groups, grads, strict=True):
            most = max(1, self.room // group.weights[0].numel())
            for first, last in contiguous_ranges(list(of_group)):
                for at in range(first, last, most):
                    part = [of_group[k] for k in range(at, min(last, at + most))]
                    self._update(group, at, part, inverse, lr, found_inf.bool())

    def _update(
        self, group: ShapeGroup, first: int, grads: Sequence[Tensor], inverse: Tensor, lr: Tensor, found_inf: Tensor
    ) -> None:
        """Update consecutive matrices from index `first`, with gradients (R, C) each, multiplied by `inverse`."""
        span = slice(first, first + len(grads))
        keys = group.params.count_update(first, span.stop, found_inf)
        steps = self._moved(group.momenta[span], torch.stack(tuple(grads)).float().mul_(inverse), keys, found_inf)
        self._orthogonalize(steps, group.pieces)
        steps.mul_(lr)
        keep = (1.0 - lr.double() * self.optim.weight_decay).float()
        for weight, step, key in zip(group.weights[span], steps, keys, strict=True):
            self.write(weight, torch.mul(weight.float(), keep).sub_(step), found_inf, key)

    def _moved(self, old: Sequence[Tensor], grads: Tensor, keys: Tensor, found_inf: Tensor) -> Tensor:
        """Update the momenta; return the Nesterov direction (n, R, C), in the storage of the gradients."""
        new = torch.stack(tuple(old)).float()  # (n, R, C)
        new.lerp_(grads, 1.0 - self.momentum)
        for momentum, value, key in zip(old, new, keys, strict=True):
            self.write(momentum, value, found_inf, key, 16)
        return grads.lerp_(new, self.momentum)

    def _orthogonalize(self, steps: Tensor, pieces: Pieces) -> None:
        """Orthogonalize each piece of (n, R, C) in place, scaled to the size of AdamW's update."""
        n, _, C = steps.shape
        apart = steps.view(n, pieces.groups, -1, C).split_with_sizes(pieces.rows, dim=2)  # (n, groups, rows, C) each
        for rows in set(pieces.rows):
            same = [p for p in apart if p.shape[2] == rows]
            size = LIKE_ADAMW * math.sqrt(max(pieces.groups * rows, C))
            # (n per piece, groups x rows, C); no name refers to the input, so that it is freed in the iterations
            results = orthogonal(torch.cat([p.reshape(n, -1, C) for p in same]).to(self.products), self.iterations)
            for p, y in zip(same, results.chunk(len(same)), strict=True):
                p.copy_(y.reshape(p.shape)).mul_(size)

    def matrix_state(self, i: int) -> dict[str, Tensor]:
        g, k = self.place[i]
        return {"momentum": self.groups[g].momenta[k], "count": self.groups[g].params.counts[k]}
