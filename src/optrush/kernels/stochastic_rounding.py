"""Writing float32 results into parameters and states, rounded as the run rounds bfloat16. The reference, plain torch.

For optimizers whose update is made of torch's own operators: what is left to do is to round and to skip. Random bits
are those of adamw_update.py: a function of (seed, the parameter's name, its count of updates, the element's index), so
that resumed runs, a CPU and a GPU draw the same ones. The Triton kernel in store_triton.py has the same bits.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from optrush.kernels.adamw import CHUNK, random_bits, round_stochastic


class Store(Protocol):
    """One way to write."""

    def __call__(
        self, target: Tensor, value: Tensor, found_inf: Tensor, key: Tensor, shift: int = 0, first: int = 0
    ) -> None:
        """Writes the whole of a contiguous tensor, or nothing where the flag is True; waits for nothing on the device.

        Args:
            target: bfloat16, or float32, which needs no rounding.
            value: as many elements, contiguous, float32.
            found_inf: () bool.
            key: (2,) int64, a row of `adamw_update.step_key`.
            shift: of the 32 random bits, the 16 from here on: 0 or 16.
            first: where in the whole parameter the target begins, of which it is a run of elements.
        """
        ...


def nearest(target: Tensor, value: Tensor, found_inf: Tensor, key: Tensor, shift: int = 0, first: int = 0) -> None:
    """As `Store` says, rounded to the nearest."""
    target.copy_(torch.where(found_inf, target, value.view_as(target).to(target.dtype)))


def stochastic(target: Tensor, value: Tensor, found_inf: Tensor, key: Tensor, shift: int = 0, first: int = 0) -> None:
    """As `Store` says, rounded up or down with the probability that keeps the expected value."""
    if target.dtype == torch.float32:
        return nearest(target, value, found_inf, key)
    flat, values, size = target.view(-1), value.view(-1), CHUNK[target.device.type]
    for at in range(0, flat.numel(), size):
        old = flat[at : at + size]
        index = torch.arange(first + at, first + at + old.numel(), device=old.device)
        new = round_stochastic(values[at : at + size], random_bits(key, index) >> shift)
        old.copy_(torch.where(found_inf, old, new))


def store(rounding: str, device: torch.device) -> Store:
    """What writes on a device: on a GPU random rounding is a kernel."""
    if rounding == "nearest":
        return nearest
    return _stochastic_on_cuda if device.type == "cuda" else stochastic


def _stochastic_on_cuda(
    target: Tensor, value: Tensor, found_inf: Tensor, key: Tensor, shift: int = 0, first: int = 0
) -> None:
    """As `stochastic`, in one kernel."""
    from optrush.kernels.stochastic_rounding_triton import stochastic as launch  # a CPU build of torch has no triton

    write = nearest if target.dtype == torch.float32 else launch
    write(target, value, found_inf, key, shift, first)
