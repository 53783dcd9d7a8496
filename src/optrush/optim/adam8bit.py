"""AdamW with moments of 8 or 4 bits: the optimizers around kernels/adam8bit.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from optrush.config import Optim
from optrush.errors import NeedsError
from optrush.kernels.adam8bit import Bits, Moments, QuantizedGroup, adam8bit_update, block_width, blocks_per_row
from optrush.kernels.adamw import GroupUpdate, Rounding, contiguous_ranges
from optrush.optim.adamw import LocalParam, StateAllocator, allocate_state, param_table

SMALL = 4096  # elements; smaller tensors and vectors keep float32 moments: the saving is negligible


class Adam8bit:
    """Decoupled weight decay; norms and biases never decay (`TrainedParam.decays`).

    States of a matrix (R, C), or of any tensor with rows of C: `mean` and `square`, bytes in its shape; `mean_scale`
    and `square_scale`, (R, ceil(C / 256)) float32, sharded like rows; `count`. `square` encodes the square root. Full
    shapes determine which parameters are quantized, so that it does not depend on the sharding.

    Memory: 2 bytes per parameter and 8 per block of 256; 8 bytes per parameter of norms and biases.
    """

    reads_host = False
    bits: ClassVar[Bits] = 8

    def __init__(
        self, trained: Sequence[LocalParam], optim: Optim, *, rounding: Rounding = "nearest", seed: int = 0,
        state_allocator: StateAllocator = allocate_state,
    ) -> None:  # fmt: skip
        self.trained, self.allocate = list(trained), state_allocator
        self.rounding: Rounding = rounding
        kinds: dict[tuple[bool, torch.dtype, int], list[int]] = {}
        for i, t in enumerate(self.trained):
            quantized = self._quantizes(t)
            width = block_width(t.local.shape[-1], self.bits) if quantized else 0
            kinds.setdefault((quantized, t.local.dtype, width), []).append(i)
        self.groups: list[QuantizedGroup] = []
        for (quantized, *_), at in kinds.items():
            self.groups.append(self._group([self.trained[i] for i in at], optim, seed, quantized))
        self.place = {i: (g, k) for g, at in enumerate(kinds.values()) for k, i in enumerate(at)}
        self.updates = [_update(group) for group in self.groups]

    def step(self, lr: Tensor, grad_scale: Tensor, found_inf: Tensor, only: Sequence[int] | None = None) -> None:
        chosen = range(len(self.trained)) if only is None else only
        grads: list[dict[int, Tensor]] = [{} for _ in self.groups]
        for i in chosen:
            if (grad := self.trained[i].grad) is not None:
                g, k = self.place[i]
                grads[g][k] = grad.contiguous().view(self.groups[g].weights[k].shape)
        for update, of_group in zip(self.updates, grads, strict=True):
            for first, last in contiguous_ranges(list(of_group)):
                part = [of_group[k] for k in range(first, last)]
                update(part, lr, grad_scale.float(), found_inf.bool(), first)

    def state(self) -> dict[str, dict[str, Tensor]]:
        return {t.name: self.param_state(i) for i, t in enumerate(self.trained)}

    def param_state(self, i: int) -> dict[str, Tensor]:
        g, k = self.place[i]
        moments, shape = self.groups[g].moments[k], self.trained[i].local.shape
        states = {"count": self.groups[g].params.counts[k]}
        for name, state in zip(("mean", "square", "mean_scale", "square_scale"), moments.tensors()):
            states[name] = state.view(shape if moments.scales is None else (*shape[:-1], state.shape[-1]))
        return states

    def _quantizes(self, t: LocalParam) -> bool:
        """Return whether a parameter's moments are quantized.

        Raises:
            NeedsError: they are, but this rank has only parts of rows.
        """
        quantizes = len(t.full_shape) > 1 and math.prod(t.full_shape) >= SMALL
        if quantizes and tuple(t.local.shape[1:]) != tuple(t.full_shape[1:]):
            asked = f"{self.bits}-bit AdamW, whose blocks need whole rows"
            found = f"this rank holds {tuple(t.local.shape)} of the {tuple(t.full_shape)} of {t.name}"
            raise NeedsError(asked, found, "use another optimizer: fused-adamw")
        return quantizes

    def _group(self, trained: Sequence[LocalParam], optim: Optim, seed: int, quantized: bool) -> QuantizedGroup:
        assert self.rounding != "kahan"
        local = [t.local for t in trained]
        weights = [w.view(math.prod(w.shape[:-1]), w.shape[-1]) if quantized else w.view(1, -1) for w in local]
        moments = [self._moments(t, w, quantized) for t, w in zip(trained, weights)]
        params, eps = param_table(trained, optim, seed), torch.tensor(optim.eps).item()
        return QuantizedGroup(weights, moments, params, optim.betas, eps, self.rounding, self.bits)

    def _moments(self, t: LocalParam, weight: Tensor, quantized: bool) -> Moments:
        R, C = weight.shape
        if not quantized:
            return Moments(self.allocate(t, (R, C), torch.float32), self.allocate(t, (R, C), torch.float32), None)
        mean, square = (self.allocate(t, (R, -(-C * self.bits // 8)), torch.uint8) for _ in range(2))
        scales = [self.allocate(t, (R, blocks_per_row(C, self.bits)), torch.float32) for _ in range(2)]
        return Moments(mean, square, (scales[0], scales[1]))


class Adam4bit(Adam8bit):
    """Adam8bit with 4 bits: `mean` and `square` (R, ceil(C / 2)), scales (R, ceil(C / 128)).

    Memory: 1 byte per parameter and 8 per block of 128; 8 bytes per parameter of norms and biases.
    """

    bits = 4


def _update(group: QuantizedGroup) -> GroupUpdate:
    """Return the update function of a group: the kernel on a GPU, else the reference."""
    if group.params.counts.is_cuda:
        from optrush.kernels.adam8bit_triton import QuantizedLauncher

        return QuantizedLauncher(group)
    return partial(adam8bit_update, group)
