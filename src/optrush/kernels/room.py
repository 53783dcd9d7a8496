"""Room behind a matrix: rows and columns in the same memory, where an adapter's small matrices lie beside it.

[W | U] is one matrix to a product, if U lies behind W, and so is [x | A x]. Laid there it costs what U has; without
room W is copied, once a product. Room is scratch: whoever multiplies by it lays there what it wants, each time.

A matrix with room is a view whose rows are further apart than they are wide, of a storage with nothing else in it. The
second cannot be seen: so who has made it must say so (`roomy`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from optrush.peft.ledger import TILE, tiles


class Room(NamedTuple):
    """Where there is room for the small matrices of an adapter.

    x and grad come from kernels of our own as they are: who cuts something out of them must take back what is said
    here, for a part of a larger tensor looks as if it had room.
    """

    weight: bool = False  # U right of a frozen weight, A below it
    x: bool = False  # beside what the linear reads
    grad: bool = False  # beside the gradient of what it gives


def with_room(weight: Tensor, rows: int, columns: int) -> Tensor:
    """A copy of weight (R, C), with room for so many rows below it and columns (one at least) beside it."""
    assert columns
    wide = weight.new_empty(weight.shape[0] + tiles(rows), weight.shape[1] + tiles(columns))
    return wide[: weight.shape[0], : weight.shape[1]].copy_(weight)


def empty_with_room(like: Tensor, *shape: int, columns: int, dtype: torch.dtype | None = None) -> Tensor:
    """Of that shape, and like another tensor otherwise, with room for so many columns beside the last dimension."""
    *rows, width = shape
    return like.new_empty(*rows, width + columns, dtype=dtype or like.dtype)[..., :width]


def copied_with_room(t: Tensor, columns: int, dtype: torch.dtype | None = None) -> Tensor:
    """t (..., D) in a type, or a copy where there is room for columns."""
    dtype = dtype or t.dtype
    return empty_with_room(t, *t.shape, columns=columns, dtype=dtype).copy_(t) if columns else t.to(dtype)


def joined(wide: Tensor, narrow: Tensor, dim: int) -> Tensor:
    """A copy of wide (R, C), then narrow along a dimension, then zeros up to a multiple of TILE."""
    if not narrow.shape[dim]:
        return wide
    zeros = narrow.new_zeros(-narrow.shape[dim] % TILE, narrow.shape[1 - dim])
    return torch.cat((wide, narrow, zeros.t() if dim else zeros), dim)


def beside(weight: Tensor, narrow: Tensor | None, dim: int, roomy: bool) -> Tensor:
    """As `joined`, in the room behind weight where it is `roomy`. For inside of operators, which no compiler sees."""
    if narrow is None or not narrow.shape[dim]:
        return weight
    assert narrow.shape[1 - dim] == weight.shape[1 - dim]
    at, many = weight.shape[dim], tiles(narrow.shape[dim])
    whole = _whole(weight) if roomy else None
    if whole is None or whole.shape[dim] < at + many:  # a copy of it, which has none, or a larger rank than it is for
        return joined(weight, narrow, dim)
    found = whole.narrow(1 - dim, 0, weight.shape[1 - dim]).narrow(dim, 0, at + many)
    _fill(found.narrow(dim, at, many), narrow)
    return found


def _fill(place: Tensor, narrow: Tensor) -> None:
    """place (R, C) becomes narrow (r, c), and zero beyond it."""
    if place.is_cuda:
        from optrush.kernels.room_triton import fill

        fill(place, narrow)
    else:
        place.zero_()
        place[: narrow.shape[0], : narrow.shape[1]] = narrow


def _whole(weight: Tensor) -> Tensor | None:
    """All of the memory of a weight with room."""
    pitch, one = weight.stride()
    values = weight.untyped_storage().nbytes() // weight.element_size()
    if one != 1 or pitch <= weight.shape[1] or weight.storage_offset() or values % pitch:
        return None
    # Of its data: what lies there is no change of the weight, which the backward pass may have saved.
    return weight.data.as_strided((values // pitch, pitch), (pitch, 1))
