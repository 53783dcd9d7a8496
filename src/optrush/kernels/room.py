"""Room behind a frozen weight: rows and columns in the same memory, where an adapter's small matrices lie beside it.

[W | U] is one matrix to a product, if U lies behind W. Laid there it costs what U has; without room W is copied, once a
product. Room is scratch: whoever multiplies by it lays there what it wants, each time.

A weight with room is a view whose rows are further apart than they are wide, of a storage with nothing else in it. By
that it is known, wherever it comes from: a compiler, or autograd, hands on the memory, and nothing of Python's.
"""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNED = 64  # values of a row: QuACK wants 8; of 64 its tiles have no fewer, and a compiler pads to them, and copies


def aligned(many: int) -> int:
    """So many and what is missing to whole tiles."""
    return many + -many % ALIGNED


def with_room(weight: Tensor, rows: int, columns: int) -> Tensor:
    """A copy of weight (R, C), with room for so many rows below it and columns (one at least) beside it."""
    wide = weight.new_empty(weight.shape[0] + aligned(rows), weight.shape[1] + aligned(columns))
    wide.zero_()  # what nobody lays is multiplied by nothing, but never NaN
    return wide[: weight.shape[0], : weight.shape[1]].copy_(weight)


def joined(wide: Tensor, narrow: Tensor, dim: int) -> Tensor:
    """A copy of wide (R, C), then narrow along a dimension, then zeros up to a multiple of ALIGNED."""
    if not narrow.shape[dim]:
        return wide
    zeros = narrow.new_zeros(-narrow.shape[dim] % ALIGNED, narrow.shape[1 - dim])
    return torch.cat((wide, narrow, zeros.t() if dim else zeros), dim)


def beside(weight: Tensor, narrow: Tensor | None, dim: int) -> Tensor:
    """As `joined`, in the room behind weight where it has enough. For inside of operators: no compiler sees it."""
    if narrow is None or not narrow.shape[dim]:
        return weight
    at, many = weight.shape[dim], aligned(narrow.shape[dim])
    whole = _whole(weight)
    if whole is None or whole.shape[dim] < at + many:
        return joined(weight, narrow, dim)
    found = whole.narrow(1 - dim, 0, weight.shape[1 - dim]).narrow(dim, 0, at + many)
    here, rest = found.narrow(dim, at, many).tensor_split([narrow.shape[dim]], dim)
    here.copy_(narrow)
    rest.zero_()
    return found


def _whole(weight: Tensor) -> Tensor | None:
    """All of the memory of a weight with room; apart from it to autograd, for which the weight does not change."""
    pitch, one = weight.stride()
    values, rest = divmod(weight.untyped_storage().nbytes(), weight.element_size())
    if one != 1 or pitch <= weight.shape[1] or weight.storage_offset() or rest or values % pitch:
        return None
    return weight.data.as_strided((values // pitch, pitch), (pitch, 1))
