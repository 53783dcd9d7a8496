"""Compute a layer's queries, keys and values from small latents, with one rotated part shared by all keys.

    q = q_b(norm(q_a(h))), or q(h)          (B, T, H, E), the last R values of each head rotated
    latent, shared = kv_a(h)                (B, T, C) and (B, T, 1, R), the second rotated
    k, v = kv_b(norm(latent))               (B, T, H, E - R) and (B, T, H, W)
    k = concatenate(k, shared) per head     (B, T, H, E)

Values have their own width W. In the published weights the rotated values of a head are neighbouring pairs, other
families pair the two halves; once the pairs are separated, both are rotated equally, and the order of a head's values
does not change scores. With YaRN scores have one more factor.

Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1; DeepSeek-V3 (arXiv:2412.19437).
Legend: B rows, T tokens, H heads, E width of queries and keys, R its rotated part, C the latent of keys and values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from optrush.kernels.rope import rotate
from optrush.models.layers import Linear, RMSNorm
from optrush.models.shapes import ModelShape

LATENT_EPS = 1e-6  # of the norms of latents, independent of rms_norm_eps: as published


class LatentAttention(nn.Module):
    """The linears and norms that replace a layer's fused matmul for queries, keys and values."""

    q: Linear  # or q_a, q_a_norm and q_b
    q_a: Linear
    q_b: Linear
    kv_a: Linear
    kv_b: Linear

    def __init__(self, shape: ModelShape, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        assert shape.latent is not None
        self.shape, self.heads = shape.latent, shape.heads
        at: dict[str, Any] = {"device": device, "dtype": dtype}
        for name, linear in shape.linears.items():
            if linear.module.startswith("latent."):
                setattr(self, name, Linear(linear.inputs, tuple(linear.pieces.items()), bias=linear.bias, **at))
        self.q_a_norm = None if self.shape.q_rank is None else RMSNorm(self.shape.q_rank, LATENT_EPS, **at)
        self.kv_a_norm = RMSNorm(self.shape.kv_rank, LATENT_EPS, **at)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """h (B, T, D), cos and sin (B, T, 1, R) -> queries and keys (B, T, H, E), values (B, T, H, W)."""
        s = self.shape
        q = self.q(h) if self.q_a_norm is None else self.q_b(self.q_a_norm(self.q_a(h)))
        q, q_turned = torch.split(q.view(*q.shape[:2], self.heads, -1), [s.plain, s.rotated], -1)
        latent, k_turned = torch.split(self.kv_a(h), [s.kv_rank, s.rotated], -1)
        both: Tensor = self.kv_b(self.kv_a_norm(latent))
        k, v = torch.split(both.view(*both.shape[:2], self.heads, -1), [s.plain, s.value], -1)
        q_turned, k_turned = (rotate(self._halves(x), cos, sin) for x in (q_turned, k_turned[:, :, None]))
        q = torch.cat((q, q_turned), -1)
        k = torch.cat((k, k_turned.expand(-1, -1, self.heads, -1)), -1)
        # v is copied: as a view it would keep the keys' part alive until the backward pass.
        return q if s.scale == 1 else q * s.scale, k, v.contiguous()

    def _halves(self, x: Tensor) -> Tensor:
        """Reorder neighbouring pairs (..., R) into two halves."""
        return x.view(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2) if self.shape.interleaved else x
