"""Kernels, one operator per module, each with a plain reference; and the types in which operators compute."""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the type of matmuls of x: autocast's if it is on, else x's."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def widen(x: Tensor) -> Tensor:
    """Cast x to float32, or leave float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
