"""Sharded tensors (torch's DTensor), asked about without loading what makes them.

That takes a process a second, and most have none: where nobody has loaded it, no tensor is sharded.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def is_sharded(t: Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor: this rank may hold a piece of it only."""
    made = sys.modules.get("torch.distributed.tensor")
    return made is not None and isinstance(t, made.DTensor)


def is_gathered(module: nn.Module) -> TypeGuard[FSDPModule]:
    """Whether FSDP gathers this module's parameters where they are used."""
    made = sys.modules.get("torch.distributed.fsdp")
    return made is not None and isinstance(module, made.FSDPModule)


def local(t: Tensor) -> Tensor:
    """This rank's piece, the very storage."""
    return t.to_local() if is_sharded(t) else t


def gathered(t: Tensor) -> Tensor:
    """All of it; of a sharded one every rank must ask."""
    return t.full_tensor() if is_sharded(t) else t


def offset(t: Tensor) -> tuple[int, ...]:
    """Where in the whole this rank's piece begins."""
    if not is_sharded(t):
        return (0,) * t.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return tuple(compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)[1])
