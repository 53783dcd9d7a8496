"""AdamW whose moments take a byte each, or half of one: the optimizers around kernels/adam8bit_update.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from optrush.config import Optim
from optrush.errors import NeedsError
from optrush.kernels import adam8bit as kernel
from optrush.kernels.adam8bit import Nibbles
from optrush.kernels.adamw import Rounding, Update, key_words, runs, span
from optrush.optim.adamw import Learnt, Zeros, zeros_beside

SMALL = 4096  # elements; below, and of vectors, moments stay float32: there is nothing to save


class Adam8bit:
    """Decoupled weight decay; norms and biases never decay (`Trained.decays`).

    States of a matrix (R, C), or of any tensor with rows of C: `mean` and `square`, bytes in its shape; `mean_scale`
    and `square_scale`, (R, ceil(C / 256)) float32, cut like its rows; `count`. `square` is the code of the root. Which
    parameters have bytes depends on whole shapes, so that every cutting agrees.

    Memory: 2 bytes a parameter and 8 a block of 256; 8 bytes a parameter of norms and biases.
    """

    reads_host = False
    codes: ClassVar[kernel.Codes] = kernel.Bytes()

    def __init__(
        self,
        trained: Sequence[Learnt],
        optim: Optim,
        *,
        rounding: Rounding = "nearest",
        seed: int = 0,
        zeros: Zeros = zeros_beside,
    ) -> None:
        self.trained = list(trained)
        self.rounding: Rounding = rounding
        kinds: dict[tuple[bool, torch.dtype], list[int]] = {}
        for i, t in enumerate(self.trained):
            kinds.setdefault((self._coded(t), t.local.dtype), []).append(i)
        self.groups = [
            self._group([self.trained[i] for i in at], optim, seed, coded, zeros) for (coded, _), at in kinds.items()
        ]
        self.place = {i: (g, k) for g, at in enumerate(kinds.values()) for k, i in enumerate(at)}
        self.updates = [_update(group) for group in self.groups]

    def step(self, lr: Tensor, grad_scale: Tensor, found_inf: Tensor, only: Sequence[int] | None = None) -> None:
        chosen = range(len(self.trained)) if only is None else only
        grads: list[dict[int, Tensor]] = [{} for _ in self.groups]
        for i in chosen:
            if (grad := self.trained[i].grad) is not None:
                g, k = self.place[i]
                grads[g][k] = grad.contiguous().view(self.groups[g].weights[k].shape)
        for update, found in zip(self.updates, grads, strict=True):
            for first, last in runs(list(found)):
                part = [found[k] for k in range(first, last)]
                update(part, lr, grad_scale.float(), found_inf.bool(), first)

    def state(self) -> dict[str, dict[str, Tensor]]:
        return {t.name: self.held(i) for i, t in enumerate(self.trained)}

    def held(self, i: int) -> dict[str, Tensor]:
        g, k = self.place[i]
        held, shape = self.groups[g].moments[k], self.trained[i].local.shape
        names = ("mean", "square", "mean_scale", "square_scale")
        coded = held.scales is not None
        states = {
            n: s.view(*shape[:-1], s.shape[-1]) if coded else s.view(shape) for n, s in zip(names, held.tensors())
        }
        return states | {"count": self.groups[g].counts[k]}

    def _coded(self, t: Learnt) -> bool:
        """Whether a parameter's moments are codes.

        Raises:
            NeedsError: they would be, but rows are cut.
        """
        coded = len(t.full_shape) > 1 and math.prod(t.full_shape) >= SMALL
        if coded and tuple(t.local.shape[1:]) != tuple(t.full_shape[1:]):
            asked = f"{self.codes.bits}-bit AdamW, whose blocks lie in whole rows"
            found = f"this rank holds {tuple(t.local.shape)} of the {tuple(t.full_shape)} of {t.name}"
            raise NeedsError(asked, found, "take another optimizer: fused-adamw")
        return coded

    def _group(self, mine: Sequence[Learnt], optim: Optim, seed: int, coded: bool, zeros: Zeros) -> kernel.Group:
        assert self.rounding != "kahan"
        device = mine[0].local.device
        weights = [_rows(t.local) if coded else t.local.view(1, -1) for t in mine]
        return kernel.Group(
            weights=weights,
            moments=[self._moments(t, w, coded, zeros) for t, w in zip(mine, weights)],
            counts=torch.zeros(len(mine), device=device),
            decays=torch.tensor(
                [optim.weight_decay if t.decays else 0.0 for t in mine], dtype=torch.float64, device=device
            ),
            words=torch.tensor([key_words(seed, t.name) for t in mine], dtype=torch.int64, device=device),
            spans=[span(t.full_shape, t.local.shape, t.offset) for t in mine],
            betas=optim.betas,
            eps=torch.tensor(optim.eps).item(),
            rounding=self.rounding,
            codes=self.codes,
        )

    def _moments(self, t: Learnt, weight: Tensor, coded: bool, zeros: Zeros) -> kernel.Moments:
        R, C = weight.shape
        if not coded:
            return kernel.Moments(zeros(t, (R, C), torch.float32), zeros(t, (R, C), torch.float32), None)
        mean, square = (zeros(t, (R, -(-C * self.codes.bits // 8)), torch.uint8) for _ in range(2))
        scales = [zeros(t, (R, kernel.blocks(C, self.codes.block)), torch.float32) for _ in range(2)]
        return kernel.Moments(mean, square, (scales[0], scales[1]))


class Adam4bit(Adam8bit):
    """The same with half a byte each: `mean` and `square` (R, ceil(C / 2)), scales (R, ceil(C / 128)).

    Memory: 1 byte a parameter and 8 a block of 128; 8 bytes a parameter of norms and biases.
    """

    codes = Nibbles()


def _rows(t: Tensor) -> Tensor:
    """(R, C), the very storage; R may be 0."""
    return t.view(math.prod(t.shape[:-1]), t.shape[-1])


def _update(group: kernel.Group) -> Update:
    """What updates a group: the kernel on a GPU, elsewhere the reference."""
    if group.counts.is_cuda:
        from optrush.kernels.adam8bit_triton import Launcher

        return Launcher(group)
    return partial(kernel.adam8bit_update, group)
