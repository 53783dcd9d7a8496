"""Room behind a matrix: rows and columns in the same memory, where an adapter's small matrices lie beside it.

[W | U] is one matrix to a product, if U lies behind W, and so is [x | A x]. Laid there it costs what U has; without
room W is copied, once a product. Room is scratch: whoever multiplies by it lays there what it wants, each time.

A matrix with room is a view whose rows are further apart than they are wide, of a storage with nothing else in it. The
second cannot be seen: so who has made it must say so (`roomy`).
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from optrush.peft.ledger import TILE, tiles


class Padding(NamedTuple):
    """Where there is room for the small matrices of an adapter.

    x and grad come from kernels of our own as they are: who cuts something out of them must take back what is said
    here, for a part of a larger tensor looks as if it had room.
    """

    weight: bool = False  # U right of a frozen weight, A below it
    x: bool = False  # beside what the linear reads
    grad: bool = False  # beside the gradient of what it gives


def with_padding(weight: Tensor, rows: int, columns: int) -> Tensor:
    """A copy of weight (R, C), with room for so many rows below it and columns (one at least) beside it."""
    assert columns
    wide = weight.new_empty(weight.shape[0] + tiles(rows), weight.shape[1] + tiles(columns))
    return wide[: weight.shape[0], : weight.shape[1]].copy_(weight)


def empty_padded(like: Tensor, *shape: int, columns: int, dtype: torch.dtype | None = None) -> Tensor:
    """Of that shape, and like another tensor otherwise, with room for so many columns beside the last dimension."""
    *rows, width = shape
    return like.new_empty(*rows, width + columns, dtype=dtype or like.dtype)[..., :width]


def copied_padded(t: Tensor, columns: int, dtype: torch.dtype | None = None) -> Tensor:
    """t (..., D) in a type, or a copy where there is room for columns."""
    dtype = dtype or t.dtype
    return empty_padded(t, *t.shape, columns=columns, dtype=dtype).copy_(t) if columns else t.to(dtype)


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
        from optrush.kernels.lora_matmul_triton import fill

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


# --- Products that an adapter's are added to, or made in one with: by cuBLAS, or by QuACK's kernel on Hopper.
#
# Where the frozen weight has room (kernels/room.py), W x + U A x is one product of [x | A x] by [W | U], rounded once.
# Where it has none, U A x is made first and W x added to it: what is small beside the other counts only where it is
# added before that is rounded. QuACK adds in float32 and rounds once; by cuBLAS (addmm_ of 16 bits) a hundredth of a
# last place is lost, on an H200 at every shape that was tried (docs/log).
#
# Source: https://github.com/Dao-AILab/quack (gemm_interface.py, gemm).


By = Literal["cublas", "quack"]
ALIGNED = 8  # values: QuACK's loads want rows that begin at 16 bytes


def low_rank(
    x: Tensor, wide: Tensor, first: Tensor, second: Tensor, by: By, bias: Tensor | None = None, *,
    roomy: bool = False, roomy_x: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x (N, K), wide (K, M), first (K, r), second (r, M) -> x wide + (x first) second + bias (N, M), x first (N, r).

    Without gradient.

    Args:
        roomy: wide, or its transpose, has room for `second`: by QuACK, and without bias.
        roomy_x: x has room for x first.
    """
    if not first.shape[1]:
        return x @ wide if bias is None else torch.addmm(bias, x, wide), x @ first
    if roomy:
        assert by == "quack" and bias is None
        y, z = _in_one(x, wide, first, second, roomy_x)
        return y, z
    z = x @ first
    y = z @ second if bias is None else torch.addmm(bias, z, second)
    add_product(y, x, wide, by)
    return y, z


@torch.library.custom_op("optrush::low_rank", mutates_args=())
def _in_one(x: Tensor, wide: Tensor, first: Tensor, second: Tensor, roomy_x: bool) -> tuple[Tensor, Tensor]:
    z, turned = x @ first, wide.stride(0) == 1
    left = beside(x, z, 1, roomy_x)
    right = beside(wide.t(), second.t(), 1, roomy=True).t() if turned else beside(wide, second, 0, roomy=True)
    if not x.is_cuda or not len(x):
        return left @ right, z
    from quack.gemm_interface import gemm_tuned

    y = x.new_empty(len(x), wide.shape[1])
    gemm_tuned.fn(_loaded(left), _loaded(right), y, config=_tile(), dynamic_scheduler=True)
    return y, z


@_in_one.register_fake
def _(x: Tensor, wide: Tensor, first: Tensor, second: Tensor, roomy_x: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(len(x), wide.shape[1]), x.new_empty(len(x), first.shape[1])


@torch.library.custom_op("optrush::add_product", mutates_args={"y"})
def add_product(y: Tensor, a: Tensor, b: Tensor, by: str) -> None:
    """y (N, M) += a (N, K) @ b (K, M), of 16 bits where by QuACK. No gradient: for inside of a Function.

    torch.addmm copies what it adds to first, and a compiler makes addmm of addmm_.
    """
    if by == "cublas" or not y.is_cuda:
        y.addmm_(a, b)
    elif y.numel():
        from quack.gemm_interface import gemm_tuned

        gemm_tuned.fn(_loaded(a), _loaded(b), y, y, config=_tile(), dynamic_scheduler=True)


@add_product.register_fake
def _(y: Tensor, a: Tensor, b: Tensor, by: str) -> None:
    return None


@torch.library.custom_op("optrush::plus_product", mutates_args=())
def plus_product(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """x (N, M) + a (N, K) @ b (K, M), rounded once; by QuACK where on a GPU. No gradient: for inside of a Function."""
    if not x.is_cuda or not len(x):
        return torch.addmm(x, a, b)
    from quack.gemm_interface import gemm_tuned

    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    gemm_tuned.fn(_loaded(a), _loaded(b), y, _loaded(x), config=_tile(), dynamic_scheduler=True)
    return y


@plus_product.register_fake
def _(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def summed(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a (M, N) @ b (N, K) in their type, or in float32: then what was summed is not rounded to theirs."""
    if dtype == a.dtype:
        return a @ b
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda else a.to(dtype) @ b.to(dtype)


@torch.library.custom_op("optrush::gradients", mutates_args=())
def gradients(grad: Tensor, weight: Tensor, u: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Of y = x W^T + (x A^T) U^T with W (M, D), U (M, r), A (r, D): grad (N, M) -> d_x (N, D), d_z = grad U (N, r).

    W is `roomy` (kernels/room.py). grad is read once: d_z is further columns of the product with W, and free as long as
    the last of the tiles, of 192 columns, has place for them. d_x is rounded before d_z A is added to it, and after:
    what is small beside it is lost, which a gradient can bear. By QuACK; no gradient: for inside of a Function.
    """
    if not grad.is_cuda or not len(grad):
        d_z = grad @ u
        return grad @ weight + d_z @ a, d_z
    from quack.gemm_interface import gemm_tuned

    width, rank = weight.shape[1], u.shape[1]
    whole = beside(weight, u, 1, roomy=True)  # (M, D + r, up to whole tiles)
    both, d_x = grad.new_empty(len(grad), whole.shape[1]), grad.new_empty(len(grad), width)
    gemm_tuned.fn(_loaded(grad), whole, both, config=_tile(), dynamic_scheduler=True)
    small = torch.nn.functional.pad(a, (0, 0, 0, whole.shape[1] - width - rank))
    gemm_tuned.fn(both[:, width:], small, d_x, both[:, :width], config=_tile(), dynamic_scheduler=True)
    return d_x, both[:, width : width + rank].contiguous()


@gradients.register_fake
def _(grad: Tensor, weight: Tensor, u: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    return grad.new_empty(len(grad), weight.shape[1]), grad.new_empty(len(grad), u.shape[1])


def _loaded(t: Tensor) -> Tensor:
    """A matrix as its loads want it."""
    small, large = sorted(t.stride())
    return t if small == 1 and large % ALIGNED == 0 and t.storage_offset() % ALIGNED == 0 else t.contiguous()


@cache
def _tile() -> Any:
    """256 x 192 values, each tile for who is free; one object for all calls: QuACK knows a call again by it."""
    from quack.gemm_config import GemmConfig

    return GemmConfig(
        tile_m=256, tile_n=192, pingpong=False, cluster_m=2, cluster_n=1, is_dynamic_persistent=False, device_capacity=9
    )
