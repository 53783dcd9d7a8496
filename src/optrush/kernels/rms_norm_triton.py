"""Triton kernels of RMSNorm, forward and backward; rms_norm.py has the mathematics. Imported on CUDA only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from optrush.kernels.lora_matmul import empty_padded

TILE = 4096  # values per tile of a program: full rows, at least one
BACKWARD = 2048  # the same for the backward pass, which needs more registers: 8 values per thread
EACH = 4  # programs per multiprocessor there: each sums the weight's gradient over its rows


def rms_norm_forward(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype, padding: int
) -> tuple[Tensor, Tensor, Tensor]:
    """x, branch (..., D) -> their sum (x itself without a branch), the sum's norm in `dtype`, 1 / rms (N,) float32.

    padding: columns of padding for the normalized output.
    """
    assert x.dtype != torch.float64, "float32 inside"
    x = x.contiguous()
    branch = x if (alone := branch is None) else branch.contiguous()
    total = x if alone else torch.empty_like(x, dtype=torch.promote_types(x.dtype, branch.dtype))
    D, N = x.shape[-1], x.shape[:-1].numel()
    normed = empty_padded(x, *x.shape, columns=padding, dtype=dtype)
    scale = torch.empty(N, dtype=torch.float32, device=x.device)
    rows, width, warps = _tile(D, TILE, 16)
    if N:
        _forward[(triton.cdiv(N, rows),)](
            x, branch, weight, total, normed, scale, N, D, D + padding, eps,
            ADDS=not alone, ROWS=rows, WIDTH=width, num_warps=warps,
        )  # fmt: skip
    return total, normed, scale


def rms_norm_backward(
    x: Tensor, weight: Tensor, scale: Tensor, past: Tensor, grad: Tensor, learns: bool, padding: int
) -> tuple[Tensor, Tensor]:
    """Implement `rms_norm.norm_backward`."""
    x, grad = x.contiguous(), grad.contiguous()
    past = past.flatten(0, -2) if past.stride(-1) == 1 else past.contiguous().flatten(0, -2)
    D, N = x.shape[-1], x.shape[:-1].numel()
    rows, width, warps = _tile(D, BACKWARD, 8)
    programs = min(triton.cdiv(N, rows), EACH * _multiprocessors(x.device))
    dx = empty_padded(x, *x.shape, columns=padding)
    parts = torch.empty(programs if learns else 0, D, dtype=torch.float32, device=x.device)
    if N:
        _backward[(programs,)](
            x, weight, scale, past, grad, dx, parts, N, D, past.stride(0), D + padding,
            LEARNS=learns, ROWS=rows, WIDTH=width, num_warps=warps,
        )  # fmt: skip
    return dx, parts.sum(0).to(weight.dtype) if learns else weight.new_empty(0)


def _tile(D: int, values: int, each: int) -> tuple[int, int, int]:
    """Return a tile's rows for `values` values, its width (a power of two), and warps for `each` values per thread."""
    width: int = triton.next_power_of_2(D)
    rows = max(1, values // width)
    return rows, width, min(32, max(4, rows * width // (32 * each)))


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def _forward(
    x, branch, weight, total, normed, scale, N, D, pitch, eps,
    ADDS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """pitch: row stride of the normalized output."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    at = row[:, None] * D + column[None, :]
    mask = (row < N)[:, None] & (column < D)[None, :]
    a = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if ADDS:
        # Rounded first: the norm and the backward pass use the rounded stream.
        rounded = (a + tl.load(branch + at, mask=mask, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=mask)
        a = rounded.to(tl.float32)
    s = tl.rsqrt(tl.sum(a * a, 1) / D + eps)
    tl.store(scale + row, s, mask=row < N)
    unit = (a * s[:, None]).to(total.dtype.element_ty).to(tl.float32)
    w = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
    tl.store(normed + row[:, None] * pitch + column[None, :], unit * w[None, :], mask=mask)


@triton.jit
def _backward(
    x, weight, scale, past, grad, dx, parts, N, D, past_pitch, dx_pitch,
    LEARNS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Process every nth tile of rows; a program's part of the weight's gradient is a row of `parts`."""
    column = tl.arange(0, WIDTH)
    inside = column < D
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    gathered = tl.zeros([ROWS, WIDTH], tl.float32)
    tile = tl.program_id(0)
    while tile * ROWS < N:
        row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        at = row[:, None] * D + column[None, :]
        mask = (row < N)[:, None] & inside[None, :]
        s = tl.load(scale + row, mask=row < N, other=0.0)[:, None]
        unit = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) * s
        d = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
        through = tl.load(past + row[:, None] * past_pitch + column[None, :], mask=mask, other=0.0).to(tl.float32)
        inner = d * w[None, :]
        mean = tl.sum(inner * unit, 1) / D
        out = s * (inner - unit * mean[:, None]) + through
        tl.store(dx + row[:, None] * dx_pitch + column[None, :], out, mask=mask)
        if LEARNS:
            gathered += d * unit.to(dx.dtype.element_ty).to(tl.float32)
        tile += tl.num_programs(0)
    if LEARNS:
        tl.store(parts + tl.program_id(0) * D + column, tl.sum(gathered, 0), mask=inside)
