"""Both narrow products of a gradient beside an adapter, in one reading, by Triton; narrow.py has the mathematics.

A program has some columns of some rows, and goes down the rows: what it sums for U stays on the chip, its part of d_z
is written for each row. The second kernel adds those parts in their order and lays them beside the gradient.
"""

# Kernels are no Python functions: their arguments are typed by what is launched.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-not-found, import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from optrush.frozen import TILE

ROWS, COLUMNS, WARPS, STAGES = 64, 512, 8, 2  # of a program's tile; stages: tiles under way
PROGRAMS = 256  # about two a multiprocessor
LEAST = 16  # a product's sides at least


def once(grad: Tensor, u: Tensor, z: Tensor, left: Tensor, copies: bool) -> tuple[Tensor, Tensor]:
    """As `narrow.once`, and lays d_z in `left` (N, M + TILE) behind the gradient; copies: that, too."""
    (N, M), r = grad.shape, u.shape[1]
    assert grad.stride(1) == left.stride(1) == 1 and left.shape == (N, M + TILE)
    rank = max(LEAST, triton.next_power_of_2(r))
    across = triton.cdiv(M, COLUMNS)
    steps = triton.cdiv(N, max(1, PROGRAMS // across) * ROWS)
    down = triton.cdiv(N, steps * ROWS)
    parts_z = torch.empty(across, N, rank, dtype=torch.float32, device=grad.device)
    parts_u = torch.empty(down, M, rank, dtype=torch.float32, device=grad.device)
    d_z = grad.new_empty(N, r)
    _once[(across, down)](
        grad, u, z, left, parts_z, parts_u, N, M, r, grad.stride(0), left.stride(0), *u.stride(), *z.stride(),
        STEPS=steps, COPIES=copies, ROWS=ROWS, COLUMNS=COLUMNS, RANK=rank, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    _settle[(triton.cdiv(N, ROWS),)](
        parts_z, d_z, left, N, M, r, left.stride(0), PARTS=across, ROWS=ROWS, RANK=rank, TILE=TILE, num_warps=WARPS
    )
    return d_z, parts_u.sum(0)[:, :r].to(u.dtype)


@triton.jit
def _once(
    grad, u, z, left, parts_z, parts_u, N, M, r, grad_pitch, left_pitch, u_down, u_right, z_down, z_right,
    STEPS: tl.constexpr, COPIES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """STEPS: tiles of a program; pitch: values from one row to the next; down, right: from one value to the next."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rank = tl.arange(0, RANK)
    inside = (column < M)[:, None] & (rank < r)[None, :]
    narrow = tl.load(u + column[:, None] * u_down + rank[None, :] * u_right, mask=inside, other=0.0)
    d_u = tl.zeros([COLUMNS, RANK], tl.float32)
    for step in range(STEPS):
        row = ((tl.program_id(1) * STEPS + step) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        there = (row < N) & (column < M)[None, :]
        g = tl.load(grad + row * grad_pitch + column[None, :], mask=there, other=0.0)
        if COPIES:
            tl.store(left + row * left_pitch + column[None, :], g, mask=there)
        known = tl.load(z + row * z_down + rank[None, :] * z_right, mask=(row < N) & (rank < r)[None, :], other=0.0)
        d_u = tl.dot(tl.trans(g), known, d_u)
        part = tl.dot(g, narrow)
        at = (tl.program_id(0).to(tl.int64) * N + row) * RANK + rank[None, :]
        tl.store(parts_z + at, part, mask=row < N)
    at = (tl.program_id(1).to(tl.int64) * M + column[:, None]) * RANK + rank[None, :]
    tl.store(parts_u + at, d_u, mask=(column < M)[:, None])


@triton.jit
def _settle(
    parts, d_z, left, N, M, r, left_pitch,
    PARTS: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Zeros are laid beyond r, up to a whole tile."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    rank = tl.arange(0, TILE)[None, :]
    there = (row < N) & (rank < RANK)
    total = tl.zeros([ROWS, TILE], tl.float32)
    for part in range(PARTS):
        total += tl.load(parts + (part * N + row) * RANK + rank, mask=there, other=0.0)
    found = total.to(d_z.dtype.element_ty)
    tl.store(d_z + row * r + rank, found, mask=(row < N) & (rank < r))
    tl.store(left + row * left_pitch + M + rank, found, mask=row < N)
