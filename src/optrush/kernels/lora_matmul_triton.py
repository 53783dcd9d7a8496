"""Triton kernel that fills padding (lora_matmul.py): a small matrix, and zeros up to full tiles. CUDA only."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

VALUES, WIDEST, WARPS = 2048, 512, 4  # per program's tile


def fill_padding(place: Tensor, narrow: Tensor) -> None:
    """Write narrow (r, c) to the top left corner of place (R, C), with contiguous rows, and zeros elsewhere."""
    (R, C), (r, c) = place.shape, narrow.shape
    assert place.stride(1) == 1 and r <= R and c <= C
    columns = min(WIDEST, triton.next_power_of_2(C))
    rows = VALUES // columns
    grid = triton.cdiv(R, rows), triton.cdiv(C, columns)
    _fill[grid](
        place, narrow, R, C, r, c, place.stride(0), narrow.stride(0), narrow.stride(1),
        ROWS=rows, COLUMNS=columns, num_warps=WARPS,
    )  # fmt: skip


@triton.jit
def _fill(place, narrow, R, C, r, c, pitch, down, right, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """pitch: row stride of place; down, right: strides of narrow."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    value = tl.load(narrow + row * down + column * right, mask=(row < r) & (column < c), other=0.0)
    tl.store(place + row * pitch + column, value, mask=(row < R) & (column < C))
