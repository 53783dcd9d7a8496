"""Compute the angles of rotary position embeddings, of every kind that our decoder supports.

    default    position / theta^(2 i / E)                       arXiv:2104.09864
    linear     positions divided by a factor                    arXiv:2306.15595
    llama3     long waves slowed, short ones kept               Llama 3.1's code
    yarn       a ramp between both, by the turns of a wave within the original context; arXiv:2309.00071
    dynamic    theta grows with a document beyond the model's positions ("NTK-aware"), like in transformers
    longrope   two sets of factors, for documents within and beyond the original context; arXiv:2402.13753
    proportional  only the short waves of a head rotate, as in Gemma 4

Differs from transformers for dynamic and longrope: they depend on the length of each document instead of the batch's
longest, so a document's angles do not depend on other documents.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from optrush.models.rope_config import RopeShape


def frequencies(rope: RopeShape, width: int) -> Tensor:
    """Return (width / 2,) float32 radians per position, on the CPU; for longrope (2, width / 2): short, long."""
    exponent = torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width
    waves = rope.theta**exponent
    inverse = 1.0 / waves
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "proportional":
        turning = int(rope.part * width // 2)
        return torch.cat((inverse[:turning], inverse.new_zeros(width // 2 - turning))) / rope.factor
    if rope.kind == "llama3":
        low, high = rope.low_freq_factor, rope.high_freq_factor
        wave = 2 * math.pi / inverse
        mix = (rope.original_max / wave - low) / (high - low)
        mixed = (1 - mix) * inverse / rope.factor + mix * inverse
        slowed = torch.where(wave > rope.original_max / low, inverse / rope.factor, mixed)
        return torch.where(wave < rope.original_max / high, inverse, slowed)
    if rope.kind == "yarn":
        kept = 1 - _ramp(rope, width)
        return 1.0 / (rope.factor * waves) * (1 - kept) + inverse * kept
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor([rope.short_factor, rope.long_factor], dtype=torch.float32) * waves)
    return inverse


def _ramp(rope: RopeShape, width: int) -> Tensor:
    """Return (width / 2,), from 0 for waves with many turns in the original context, to 1."""

    def dimension(turns: float) -> float:
        return width * math.log(rope.original_max / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high = high + 0.001 if low == high else high
    return ((torch.arange(width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)


def angles(rope: RopeShape, inverse: Tensor, positions: Tensor) -> Tensor:
    """Return float32 angles (B, T, width / 2) for positions (B, T) that restart with each document.

    Positions may differ by angle, (B, T, width / 2), if the rotation does not depend on a document's length.

    Args:
        inverse: `frequencies`, on the device of the positions.
    """
    if rope.kind == "longrope":
        beyond = (document_lengths(positions) > rope.original_max)[..., None]
        inverse = torch.where(beyond, inverse[1], inverse[0])
    if rope.kind == "dynamic":
        width = 2 * len(inverse)
        length = document_lengths(positions).clamp(min=rope.original_max).float()
        growth = rope.factor * length / rope.original_max - (rope.factor - 1)
        theta = rope.theta * growth ** (width / (width - 2))
        exponent = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device) / width
        inverse = 1.0 / theta[..., None] ** exponent
    return (positions if positions.ndim == 3 else positions[..., None]).float() * inverse


def query_scales(temperature: tuple[int, float] | None, positions: Tensor) -> Tensor:
    """Return float32 (B, T, 1, 1): the factors of queries in layers without a rotation, at positions (B, T).

    Source: Nakanishi 2025 (arXiv:2501.19399), in steps as in Llama 4.
    """
    if temperature is None:
        return positions.new_ones((), dtype=torch.float32).expand(*positions.shape, 1, 1)
    tokens, factor = temperature
    steps = torch.floor((positions[..., None, None].float() + 1) / tokens)
    return torch.log1p(steps) * factor + 1


def document_lengths(positions: Tensor) -> Tensor:
    """Return the length of each token's document, by positions that restart with each document: both (B, T)."""
    document = (positions == 0).long().cumsum(1)
    last = positions.new_zeros(positions.shape[0], positions.shape[1] + 1)
    return last.scatter_reduce(1, document, positions, "amax").gather(1, document) + 1
