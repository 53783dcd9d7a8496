"""The kernel of low_rank_gradients.py in Triton. Imported on CUDA only (and by tests, for Triton's interpreter).

A program walks down some rows of a block of columns. To d_z a row adds the block's columns, so that there are as many
sums of d_z as blocks of columns; to d_U a tile adds its rows, so that there are as many sums of d_U as programs walk
down a block. Both are added up afterwards, in order.
"""
# Kernels are no Python functions: their arguments are typed by what is launched.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-not-found, import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 64, 512  # of a tile
WARPS, STAGES = 8, 3  # three tiles of 64 KiB are on the chip
PROGRAMS = 132  # at most, or one a block of columns: as an H100 or H200 has multiprocessors


@triton.jit
def _both(
    grad, u, z, d_z, d_u, n, across, r, stride,
    TILES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """d_z (blocks of columns, n, r) and d_u (programs of a block, across, r), float32."""
    block, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column, k = block * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, RANK)
    inside, ranked = column < across, k < r
    small = tl.load(u + column[:, None] * r + k[None, :], mask=inside[:, None] & ranked[None, :], other=0.0)
    total = tl.zeros((COLUMNS, RANK), tl.float32)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        row = (part * TILES + tile) * ROWS + tl.arange(0, ROWS)
        there = row < n
        wide = tl.load(grad + row[:, None] * stride + column[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        at = row[:, None] * r + k[None, :]
        seen = there[:, None] & ranked[None, :]
        narrow = tl.load(z + at, mask=seen, other=0.0)
        tl.store(d_z + block * n * r + at, tl.dot(wide, small), mask=seen)
        total = tl.dot(tl.trans(wide), narrow, total)
    to = d_u + part * across * r + column[:, None] * r + k[None, :]
    tl.store(to, total, mask=inside[:, None] & ranked[None, :])


def launch(grad: Tensor, u: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """As `low_rank_gradients`."""
    (n, across), r = grad.shape, u.shape[1]
    assert grad.stride(1) == 1
    blocks, rows = triton.cdiv(across, COLUMNS), triton.cdiv(n, ROWS)
    tiles = triton.cdiv(rows, max(1, PROGRAMS // blocks))  # of a program
    parts = triton.cdiv(rows, tiles)
    d_z = torch.empty(blocks, n, r, dtype=torch.float32, device=grad.device)
    d_u = torch.empty(parts, across, r, dtype=torch.float32, device=grad.device)
    _both[(blocks, parts)](
        grad, u.contiguous(), z.contiguous(), d_z, d_u, n, across, r, grad.stride(0),
        TILES=tiles, ROWS=ROWS, COLUMNS=COLUMNS, RANK=max(16, triton.next_power_of_2(r)), STAGES=STAGES,
        num_warps=WARPS,
    )  # fmt: skip
    return d_z.sum(0).to(z.dtype), d_u.sum(0).to(u.dtype)
