"""A large tensor times a number that is on the device, in place or into a narrower type, in one pass.

torch's own product with a number on the device is one of its slower kernels, takes the number in the tensor's type (in
bfloat16 eight of its bits), and needs a second pass for another type.
"""

from __future__ import annotations

import torch
from torch import Tensor


def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x * factor in `dtype`: the product in float32, rounded once. Where x has that type, x itself is overwritten.

    Args:
        x: contiguous, of a floating type up to float32.
        factor: one float32, on x's device.
    """
    if x.is_cuda:
        from optrush.kernels.scaled_triton import launch

        return launch(x, factor, dtype)
    product = x * factor if x.dtype == torch.float32 else x.float() * factor
    return x.copy_(product) if dtype == x.dtype else product.to(dtype)
