"""Both narrow gradients of a low-rank sum y = U z from one reading of what comes in: d_z = d_y U and d_U = d_y^T z.

As two products each reads all of d_y, which is what they cost: nothing else of theirs is large. The kernel has each
part of d_y on the chip once, for both. Where d_y fits into the device's cache the second reading is all but free, and
where ranks are high the products multiply: there they stay two.

Sums are float32 and in one order, each rounded once. Legend: r columns of U; R rows of U, which are columns of d_y.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGE_BYTES = 160 << 20  # of d_y: on an H200 71 us against 74 with 128 MiB, 75 against 103 with 192
MOST = 32  # of r
TYPES = (torch.bfloat16, torch.float16)


def low_rank_gradients(grad: Tensor, u: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """grad (N, R), U (R, r), z (N, r), all of one type -> d_z (N, r) and d_U (R, r). Without gradients of its own."""
    large = grad.numel() * grad.element_size() >= LARGE_BYTES
    if large and grad.is_cuda and grad.dtype in TYPES and 0 < u.shape[1] <= MOST and grad.stride(1) == 1:
        d_z, d_u = both(grad, u, z)
        return d_z, d_u
    return grad @ u, grad.t() @ z


@torch.library.custom_op("optrush::low_rank_gradients", mutates_args=(), device_types="cuda")
def both(grad: Tensor, u: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    from optrush.kernels.low_rank_gradients_triton import launch

    return launch(grad, u, z)


@both.register_fake
def _(grad: Tensor, u: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    return z.new_empty(z.shape), u.new_empty(u.shape)
