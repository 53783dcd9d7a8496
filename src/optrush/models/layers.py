"""Linears and norms of our decoder's blocks, each with a kernel slot.

Legend: see `models/decoder.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optrush.kernels import rms_norm, widen

if TYPE_CHECKING:
    from optrush.models.shapes import ModelShape
    from optrush.peft.adapter import LinearAdapter
    from optrush.peft.quantized import QuantizedLinear

Pieces = tuple[tuple[str, int], ...]
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(x (..., width), weight (rows, width), bias (rows,) or None) -> (..., rows)"""


def uncast(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that always keep their type: those that a module names in `uncast`.

    They are small; sharding replicates them, because a single-type policy casts all that it gathers.
    """
    parameters = (getattr(module, name) for module in model.modules() for name in getattr(module, "uncast", ()))
    return [p for p in parameters if p is not None]


class Linear(nn.Linear):
    """A linear whose output rows are `groups` groups of `pieces`, each piece a role and its rows per group.

    Adapters wrap its `matmul`; quantized weights replace it, and `weight` is then None.
    """

    quantized: QuantizedLinear | None
    adapter: LinearAdapter | None

    def __init__(
        self, width: int, pieces: Pieces, *, groups: int = 1, bias: bool, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(width, groups * sum(rows for _, rows in pieces), bias=bias, device=device, dtype=dtype)
        self.groups, self.output_splits = groups, pieces
        self.matmul: Product = F.linear
        self.quantized = self.adapter = None

    @classmethod
    def of(cls, linear: nn.Linear, role: str) -> Linear:
        """Return the same linear with the same parameters, as one piece."""
        at = {"device": torch.device("meta"), "dtype": linear.weight.dtype}
        new = cls(linear.in_features, ((role, linear.out_features),), bias=linear.bias is not None, **at)  # type: ignore[arg-type]
        new.weight, new.bias = linear.weight, linear.bias
        return new.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., width) -> (..., rows)."""
        return self.matmul(x, self.weight, self.bias)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight (rows, width) from any form of storage."""
        return self.weight.to(dtype) if self.quantized is None else self.quantized.dense(dtype)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, float32 inside, rounded before the weight like the families.

    Source: Zhang and Sennrich 2019 (arXiv:1910.07467).
    """

    def __init__(self, width: int, eps: float, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, device=device, dtype=dtype))
        self.eps = eps
        self.impl: rms_norm.Norm = rms_norm.add_rms_norm

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) -> (..., D)."""
        return self.add_and_norm(x)[1]

    def add_and_norm(self, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Add a branch's output to the residual stream x (..., D); return the sum, and the sum normalized."""
        return self.impl(x, branch, self.weight, self.eps)


class CentredNorm(RMSNorm):
    """A norm that multiplies by 1 + weight in float32 and rounds once, as in Qwen3-Next; without a kernel slot."""

    def add_and_norm(self, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = x if branch is None else x + branch
        return x, (rms_norm.unit(x, self.eps) * (1 + widen(self.weight))).to(x.dtype)


class LayerNorm(RMSNorm):
    """Standard layer normalization, with or without a bias, by torch's operator, without a kernel slot.

    Source: Ba, Kiros and Hinton 2016 (arXiv:1607.06450).
    """

    def __init__(self, width: int, eps: float, *, bias: bool, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(width, eps, device=device, dtype=dtype)
        self.bias = nn.Parameter(torch.empty(width, device=device, dtype=dtype)) if bias else None

    def add_and_norm(self, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = x if branch is None else x + branch
        return x, F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps).to(x.dtype)


def norm_class(kind: str, centred: bool) -> Callable[..., RMSNorm]:
    """Return the constructor of a norm for a kind of `ModelShape.norm`."""
    if kind != "rms":
        return partial(LayerNorm, bias=kind == "layer, bias")
    return CentredNorm if centred else RMSNorm


class UnitNorm(nn.Module):
    """A norm without weights: x / rms(x), float32 inside."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x (..., E) -> (..., E)."""
        return rms_norm.unit(x, self.eps).to(x.dtype)


class LayerInputs(nn.Module):
    """Compute each layer's extra input from a second embedding and the first block's input.

    Gemma 4's "per-layer embeddings".
    """

    def __init__(self, shape: ModelShape, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        assert shape.by_layer is not None
        at: dict[str, Any] = {"device": device, "dtype": dtype}
        self.width, P = shape.width, shape.input_width
        self.embedding = nn.Embedding(shape.by_layer.input_words, shape.layers * P, **at)
        self.project = nn.Linear(shape.width, shape.layers * P, bias=False, **at)
        self.norm = RMSNorm(P, shape.norm_eps, **at)

    def forward(self, tokens: Tensor, x: Tensor, slots: Tensor | None = None, pad: int = 0) -> Tensor:
        """tokens (B, T), x (B, T, D) -> (B, T, L, P); `slots` of B*T hold images and get `pad`'s, frozen."""
        P = self.norm.weight.shape[0]
        made = self.norm((self.project(x) * self.width**-0.5).unflatten(-1, (-1, P)))
        factor = torch.tensor(P**0.5).to(self.embedding.weight.dtype).item()  # rounded as published
        embedded = self.embedding(tokens)
        if slots is not None:
            fixed = self.embedding(torch.full_like(slots, pad)).detach()
            embedded = embedded.flatten(0, 1).index_copy(0, slots, fixed).view_as(embedded)
        layer_inputs: Tensor = (made + (embedded * factor).unflatten(-1, (-1, P))) * 2**-0.5
        return layer_inputs


class WholeNorm(RMSNorm):
    """A norm over all heads of a token at once."""

    def forward(self, x: Tensor) -> Tensor:
        """x (..., n, E) -> (..., n, E)."""
        return super().forward(x.flatten(-2)).view(x.shape)
