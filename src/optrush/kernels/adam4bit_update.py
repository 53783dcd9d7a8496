"""The codes of half a byte, for moments of AdamW; adam8bit_update.py has the update, and what blocks and scales are.

A row's values lie in blocks of 128. Two codes a byte, along the row: the even column's in the low half, the odd one's
in the high half, which is 0 where the row ends before it. So codes and scales are cut like rows.

    signed code  0: zero; n = 1 ... 7: the nth magnitude; 8: one; 16 - n: minus the nth magnitude. The magnitudes are
                 those of the dynamic map in three decades, from 1e-3 to 1: 1, 2 and 4 equal parts, the middle of each
    root's code  n = 0 ... 15: (n + 1) / 16, so none is zero

Both are maps of Li et al., https://arxiv.org/abs/2309.01507 (there DE and Linear): a second moment that is rounded to
zero would divide a step by eps alone. A byte of 0 with a scale of 0 is zero: states begin as zeros. Codes are the
nearest.

What a mean loses to its code would have moved the weight in the steps to come: by rate beta1 / (1 - beta1) times it
over the denominator, if these stay as they are. It moves the weight at once instead, for the nearest of so few codes
errs the same way step after step: a change of less than half the distance to the next one is never seen.

Differs from the source: there what codes take is lost; the second moment's code is of its root, and its scale is its
block's alone, where there it is of the square, and each value takes the smaller of its row's and its column's largest.
In a simulation of running means over normally distributed gradients of different sizes (beta2 0.95 to 0.999, sizes
within a block spread by 0.5 to 3 powers of e) the steps that the roots gave were nearer to float32's than those of
squares in each case.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from optrush.kernels.adam8bit_update import LEAST_SCALE, blocks

BLOCK = 128
MAGNITUDES = (0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875, 1.0)
# Between a magnitude and the one below it: what is larger takes the larger one.
BORDERS = tuple((a + b) / 2 for a, b in zip((0.0, *MAGNITUDES), MAGNITUDES))


@cache
def values(signed: bool, device: torch.device) -> Tensor:
    """(16,) float32: the value of each code."""
    found = [0.0, *MAGNITUDES, *(-m for m in reversed(MAGNITUDES[:-1]))] if signed else [n / 16 for n in range(1, 17)]
    return torch.tensor(found, dtype=torch.float32, device=device)


class Nibbles:
    """Half a byte each."""

    bits, block, repays = 4, BLOCK, True

    def encode(self, x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
        """As `Codes` says; of two codes that are as near either, operations as in the kernel."""
        R, C = x.shape
        n = blocks(C, BLOCK)
        cut = torch.nn.functional.pad(x, (0, n * BLOCK - C)).view(R, n, BLOCK)
        scales = cut.abs().amax(-1)  # (R, n)
        inverse = torch.where(scales > LEAST_SCALE, 1.0 / scales, 0.0)
        part = (cut * inverse[..., None]).view(R, n * BLOCK)  # in [-1, 1], 0 beyond the row's end
        if signed:
            size = part.abs()
            code = torch.zeros_like(size, dtype=torch.int32)
            for border in BORDERS:
                code += size > border
            code = torch.where(part < 0, -code.clamp(max=7), code) & 15
        else:
            code = (part * 16.0 - 0.5).floor().clamp(0.0, 15.0).int()
        pairs = code.view(R, -1, 2)[:, : -(-C // 2)]  # (R, ceil(C / 2), 2)
        return (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8), scales

    def decode(self, codes: Tensor, scales: Tensor, signed: bool, columns: int) -> Tensor:
        halves = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)[:, :columns]
        found = values(signed, codes.device)[halves.int()]
        return found * scales.repeat_interleave(BLOCK, -1)[:, :columns]
