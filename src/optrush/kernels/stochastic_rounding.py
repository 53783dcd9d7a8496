"""Write float32 results into parameters and states with the run's rounding of bfloat16: the reference, in plain torch.

For optimizers whose update consists of torch's operators: rounding and skipping are left. Random bits are those of
adamw.py, a function of (seed, the parameter's name, its count of updates, the element's index), so resumed runs, a CPU
and a GPU draw the same bits. The Triton kernel in stochastic_rounding_triton.py writes the same bits.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from optrush.kernels.adamw import CHUNK, random_bits, round_stochastic


class RoundedWrite(Protocol):
    """Writes one tensor with one rounding."""

    def __call__(
        self, target: Tensor, value: Tensor, found_inf: Tensor, key: Tensor, shift: int = 0, first: int = 0
    ) -> None:
        """Write a whole contiguous tensor, or nothing where the flag is True; no device synchronization.

        Args:
            target: bfloat16, or float32, which is written unrounded.
            value: as many elements, contiguous, float32.
            found_inf: () bool.
            key: (2,) int64, a row of `adamw.step_key`.
            shift: 0 or 16: which 16 of the 32 random bits are used.
            first: index in the full parameter of the target's first element; the target is a run of elements.
        """
        ...


def write_nearest(
    target: Tensor, value: Tensor, found_inf: Tensor, key: Tensor, shift: int = 0, first: int = 0
) -> None:
    """Write rounded to the nearest, as `RoundedWrite`."""
    target.copy_(torch.where(found_inf, target, value.view_as(target).to(target.dtype)))


def write_stochastic(
    target: Tensor, value: Tensor, found_inf: Tensor, key: Tensor, shift: int = 0, first: int = 0
) -> None:
    """Write rounded up or down with the probability that preserves the expected value, as `RoundedWrite`."""
    if target.dtype == torch.float32:
        return write_nearest(target, value, found_inf, key)
    flat, values, size = target.view(-1), value.view(-1), CHUNK[target.device.type]
    for at in range(0, flat.numel(), size):
        old = flat[at : at + size]
        index = torch.arange(first + at, first + at + old.numel(), device=old.device)
        new = round_stochastic(values[at : at + size], random_bits(key, index) >> shift)
        old.copy_(torch.where(found_inf, old, new))


def rounded_write(rounding: str, device: torch.device) -> RoundedWrite:
    """Return the function that writes on a device: on a GPU stochastic rounding is a kernel."""
    if rounding == "nearest":
        return write_nearest
    return _stochastic_on_cuda if device.type == "cuda" else write_stochastic


def _stochastic_on_cuda(
    target: Tensor, value: Tensor, found_inf: Tensor, key: Tensor, shift: int = 0, first: int = 0
) -> None:
    from optrush.kernels.stochastic_rounding_triton import launch_stochastic  # a CPU build of torch has no triton

    write = write_nearest if target.dtype == torch.float32 else launch_stochastic
    write(target, value, found_inf, key, shift, first)
