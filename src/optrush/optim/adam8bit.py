"""AdamW whose moments take a byte each: the optimizer around kernels/adam8bit_update.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from optrush.config import Optim
from optrush.errors import NeedsError
from optrush.kernels import adam8bit_update as kernel
from optrush.kernels.adamw_update import Rounding, Update, key_words, runs, span
from optrush.optim.adamw import Learnt

SMALL = 4096  # elements; below, and of vectors, moments stay float32: there is nothing to save


class Adam8bit:
    """Decoupled weight decay; norms and biases never decay (`Trained.decays`).

    States of a matrix (R, C), or of any tensor with rows of C: `mean` and `square`, bytes in its shape; `mean_scale`
    and `square_scale`, (R, ceil(C / 256)) float32, cut like its rows; `count`. `square` is the code of the root. Which
    parameters have bytes depends on whole shapes, so that every cutting agrees.

    Memory: 2 bytes a parameter and 8 a block of 256; 8 bytes a parameter of norms and biases.
    """

    reads_host = False

    def __init__(
        self, trained: Sequence[Learnt], optim: Optim, *, rounding: Rounding = "nearest", seed: int = 0
    ) -> None:
        if rounding == "kahan":
            found = "it keeps what rounding took from a weight, which this optimizer has no place for"
            raise NeedsError(
                "8-bit AdamW with Kahan summation", found, "take --with stochastic-rounding, or fused-adamw"
            )
        self.trained = list(trained)
        self.rounding: Rounding = rounding
        kinds: dict[tuple[bool, torch.dtype], list[int]] = {}
        for i, t in enumerate(self.trained):
            kinds.setdefault((_coded(t), t.local.dtype), []).append(i)
        self.groups = [
            _group([self.trained[i] for i in at], optim, rounding, seed, coded) for (coded, _), at in kinds.items()
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
        found = {}
        for i, t in enumerate(self.trained):
            g, k = self.place[i]
            held, shape = self.groups[g].moments[k], t.local.shape
            states = {"mean": held.mean.view(shape), "square": held.square.view(shape)}
            if held.scales is not None:
                mean, square = (s.view(*shape[:-1], s.shape[-1]) for s in held.scales)
                states |= {"mean_scale": mean, "square_scale": square}
            found[t.name] = states | {"count": self.groups[g].counts[k]}
        return found


def _coded(t: Learnt) -> bool:
    """Whether a parameter's moments take a byte each.

    Raises:
        NeedsError: they would, but rows are cut.
    """
    coded = len(t.whole) > 1 and math.prod(t.whole) >= SMALL
    if coded and tuple(t.local.shape[1:]) != tuple(t.whole[1:]):
        found = f"this rank holds {tuple(t.local.shape)} of the {tuple(t.whole)} of {t.name}"
        raise NeedsError("8-bit AdamW, whose blocks lie in whole rows", found, "take another optimizer: fused-adamw")
    return coded


def _group(mine: Sequence[Learnt], optim: Optim, rounding: Rounding, seed: int, coded: bool) -> kernel.Group:
    assert rounding != "kahan"
    device = mine[0].local.device
    weights = [_rows(t.local) if coded else t.local.view(1, -1) for t in mine]
    return kernel.Group(
        weights=weights,
        moments=[_moments(w, coded) for w in weights],
        counts=torch.zeros(len(mine), device=device),
        decays=torch.tensor(
            [optim.weight_decay if t.decays else 0.0 for t in mine], dtype=torch.float64, device=device
        ),
        words=torch.tensor([key_words(seed, t.name) for t in mine], dtype=torch.int64, device=device),
        spans=[span(t.whole, t.local.shape, t.offset) for t in mine],
        betas=optim.betas,
        eps=torch.tensor(optim.eps).item(),
        rounding=rounding,
    )


def _rows(t: Tensor) -> Tensor:
    """(R, C), the very storage; R may be 0."""
    return t.view(math.prod(t.shape[:-1]), t.shape[-1])


def _moments(weight: Tensor, coded: bool) -> kernel.Moments:
    R, C = weight.shape
    mean, square = (weight.new_zeros(R, C, dtype=torch.uint8 if coded else torch.float32) for _ in range(2))
    scales = [weight.new_zeros(R, kernel.blocks(C), dtype=torch.float32) for _ in range(2)]
    return kernel.Moments(mean, square, (scales[0], scales[1]) if coded else None)


def _update(group: kernel.Group) -> Update:
    """What updates a group: the kernel on a GPU, elsewhere the reference."""
    if group.counts.is_cuda:
        from optrush.kernels.adam8bit_triton import Launcher

        return Launcher(group)
    return partial(kernel.adam8bit_update, group)
