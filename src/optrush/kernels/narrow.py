"""The narrow products of a gradient beside an adapter, d_z = g U and that of U, g^T z, in one reading of g.

Each does so little with a value that it takes the time of reading it. What multiplies by [W ; A] next wants d_z beside
the gradient, which is copied there on the way where it has no room (kernels/room.py).

Legend: r rows of A, N rows of the gradient g (N, M); U (M, r), z = A x (N, r).
"""

from __future__ import annotations

import torch
from torch import Tensor

from optrush.frozen import TILE, tiles
from optrush.kernels.room import beside, reach

RANKS = 32  # more, and the parts of d_z cost what a second reading does


def together(grad: Tensor, u: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `once`, of a gradient without room. Without gradient of its own."""
    if not u.shape[1]:
        return grad, torch.empty_like(z), torch.empty_like(u)
    copy, d_z, d_u = _together(grad, u, z)
    return copy, d_z, d_u


@torch.library.custom_op("optrush::narrow_together", mutates_args=())
def _together(grad: Tensor, u: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return once(grad, u, z, False)


@_together.register_fake
def _(grad: Tensor, u: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    copy = grad.new_empty(len(grad), grad.shape[1] + tiles(u.shape[1]))
    return copy, z.new_empty(z.shape), u.new_empty(u.shape)


def once(grad: Tensor, u: Tensor, z: Tensor, roomy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """[g | d_z] (N, M + r in whole tiles), d_z (N, r), the gradient of U (M, r); of one type.

    For inside of operators: the first may be memory behind `grad`, where that is `roomy`.
    """
    if not grad.is_cuda or not len(grad) or u.shape[1] > RANKS:
        d_z = grad @ u
        return beside(grad, d_z, 1, roomy), d_z, grad.t() @ z
    from optrush.kernels import narrow_triton

    grad = grad if grad.stride(1) == 1 else grad.contiguous()
    left = reach(grad, TILE, 1) if roomy else None
    if left is not None:
        return left, *narrow_triton.once(grad, u, z, left, copies=False)
    left = grad.new_empty(len(grad), grad.shape[1] + TILE)
    return left, *narrow_triton.once(grad, u, z, left, copies=True)
