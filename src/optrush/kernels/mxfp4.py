"""4-bit floats with a shared power of two, as in published checkpoints: dequantization in plain torch.

    codes    uint8 (rows, width / 2)     two values per byte, the first in the low four bits: one sign bit, two
                                         exponent bits, one mantissa bit (e2m1)
    scales   uint8 (rows, width / 32)    e: the block's 32 values are multiplied by 2^(e - 127)

So 4 + 8 / 32 = 4.25 bits per value. Every value has two significant bits: bfloat16 holds it exactly.
dequantize_triton.py is bit-identical.

Source: the OCP Microscaling Formats specification, version 1.0, section 5.3.3; the order of the two values in a byte
    follows gpt-oss's files (https://github.com/openai/gpt-oss).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

BLOCK = 32
BIAS = 127
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@cache
def table(device: torch.device) -> Tensor:
    """Return (16,) float32: the value of each code."""
    return torch.tensor(VALUES, device=device)


def mxfp4_bytes(rows: int, width: int) -> dict[str, int]:
    """Return the bytes of each part of a matrix with rows of full blocks."""
    return {"codes": rows * width // 2, "scales": rows * width // BLOCK}


def dequantize_mxfp4(parts: Sequence[Tensor], out: Tensor) -> None:
    """Dequantize flat codes and scales, possibly longer than needed, into `out` of any floating type.

    out: (rows, width) or (groups, rows per group, width); contiguous rows of full blocks.
    """
    codes, scales = parts
    n = out.numel()
    if out.is_cuda:
        from optrush.kernels.dequantize_triton import launch_mxfp4

        launch_mxfp4(codes, scales, out, table(out.device))
        return
    numbers = table(out.device)
    pairs = torch.stack((numbers.repeat(16), numbers.repeat_interleave(16)), 1)  # (256, 2)
    values = pairs[codes[: n // 2].int()].view(-1, BLOCK)
    powers = torch.exp2(scales[: n // BLOCK].float() - BIAS)
    out.copy_((values * powers[:, None]).view(out.shape))
