"""Triton kernels of the gated activation; swiglu.py has the mathematics. Imported on CUDA only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Pairs per program and its warps: the fastest of those tried on an H200 (docs/log).
FORWARD = {"BLOCK": 1024, "num_warps": 4}
BACKWARD = {"BLOCK": 512, "num_warps": 2}


def launch_swiglu_forward(gate_up: Tensor) -> Tensor:
    """gate_up (..., 2 F) contiguous -> silu(gate) * up (..., F)."""
    gate_up = gate_up.contiguous()
    out = torch.empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2), dtype=gate_up.dtype, device=gate_up.device)
    if n := out.numel():
        _forward[(triton.cdiv(n, FORWARD["BLOCK"]),)](gate_up, out, n, **FORWARD)
    return out


def launch_swiglu_backward(gate_up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return gate_up's gradient (..., 2 F) and the activation (..., F), from gate_up and the activation's gradient."""
    gate_up, grad = gate_up.contiguous(), grad.contiguous()
    d_gate_up, out = torch.empty_like(gate_up), torch.empty_like(grad)
    if n := grad.numel():
        _backward[(triton.cdiv(n, BACKWARD["BLOCK"]),)](gate_up, grad, d_gate_up, out, n, **BACKWARD)
    return d_gate_up, out


@triton.jit
def _forward(gate_up, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # 32 bits overflow at 2 billion values
    pairs = at[:, None] * 2 + tl.arange(0, 2)[None, :]
    gate, up = tl.split(tl.load(gate_up + pairs, mask=(at < n)[:, None], other=0.0).to(tl.float32))
    tl.store(out + at, gate * tl.sigmoid(gate) * up, mask=at < n)


@triton.jit
def _backward(gate_up, grad, d_gate_up, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pairs = at[:, None] * 2 + tl.arange(0, 2)[None, :]
    gate, up = tl.split(tl.load(gate_up + pairs, mask=(at < n)[:, None], other=0.0).to(tl.float32))
    d = tl.load(grad + at, mask=at < n, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    d_gate = d * up * (sigmoid + silu * (1 - sigmoid))
    tl.store(d_gate_up + pairs, tl.join(d_gate, d * silu), mask=(at < n)[:, None])
    tl.store(out + at, silu * up, mask=at < n)
