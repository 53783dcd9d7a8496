"""Matmuls of a linear with a low-rank adapter, x W + (x A) U: padded matrices, and matmuls by cuBLAS or QuACK.

Padding is rows and columns behind a matrix in the same storage: if U is stored behind W, [W | U] is one matrix for a
matmul, and so is [x | A x]. Writing U there costs U's bytes; without padding each matmul copies W. Padding is scratch
memory: each matmul writes its matrix there.

A padded matrix is a view whose row stride exceeds its width, and the only view of its storage. The latter cannot be
detected, so the caller must pass `padded=True`.

Source of the Hopper kernels: https://github.com/Dao-AILab/quack (gemm_interface.py, gemm).
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from optrush.hardware import TILE, tiles


class Padding(NamedTuple):
    """The padded matrices of a linear with an adapter.

    x and grad are padded only as returned by our kernels: slicing them must reset these flags, because a part of a
    larger tensor looks padded.
    """

    weight: bool = False  # U right of a frozen weight, A below it
    x: bool = False  # the linear's input
    grad: bool = False  # the gradient of its output


def with_padding(weight: Tensor, rows: int, columns: int) -> Tensor:
    """Copy weight (R, C) with padding for `rows` below it and `columns` (at least one) to its right."""
    assert columns
    wide = weight.new_empty(weight.shape[0] + tiles(rows), weight.shape[1] + tiles(columns))
    return wide[: weight.shape[0], : weight.shape[1]].copy_(weight)


def empty_padded(like: Tensor, *shape: int, columns: int, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate `shape`, otherwise like `like`, with `columns` of padding behind the last dimension."""
    *rows, width = shape
    return like.new_empty(*rows, width + columns, dtype=dtype or like.dtype)[..., :width]


def copied_padded(t: Tensor, columns: int, dtype: torch.dtype | None = None) -> Tensor:
    """Cast t (..., D) to a type; with `columns`, copy it with that padding."""
    dtype = dtype or t.dtype
    return empty_padded(t, *t.shape, columns=columns, dtype=dtype).copy_(t) if columns else t.to(dtype)


def concat_padded(wide: Tensor, narrow: Tensor, dim: int) -> Tensor:
    """Concatenate wide (R, C) and narrow along a dimension, then zeros up to a multiple of TILE."""
    if not narrow.shape[dim]:
        return wide
    zeros = narrow.new_zeros(-narrow.shape[dim] % TILE, narrow.shape[1 - dim])
    return torch.cat((wide, narrow, zeros.t() if dim else zeros), dim)


def concat_in_padding(weight: Tensor, narrow: Tensor | None, dim: int, padded: bool) -> Tensor:
    """Concatenate in weight's padding if it is `padded`, else like `concat_padded`. Only inside custom operators."""
    if narrow is None or not narrow.shape[dim]:
        return weight
    assert narrow.shape[1 - dim] == weight.shape[1 - dim]
    at, size = weight.shape[dim], tiles(narrow.shape[dim])
    storage = _whole(weight) if padded else None
    if storage is None or storage.shape[dim] < at + size:  # a copy without padding, or a larger rank
        return concat_padded(weight, narrow, dim)
    both = storage.narrow(1 - dim, 0, weight.shape[1 - dim]).narrow(dim, 0, at + size)
    _fill(both.narrow(dim, at, size), narrow)
    return both


def _fill(place: Tensor, narrow: Tensor) -> None:
    """Write narrow (r, c) to the top left corner of place (R, C), and zeros elsewhere."""
    if place.is_cuda:
        from optrush.kernels.lora_matmul_triton import fill_padding

        fill_padding(place, narrow)
    else:
        place.zero_()
        place[: narrow.shape[0], : narrow.shape[1]] = narrow


def _whole(weight: Tensor) -> Tensor | None:
    """Return the full storage of a padded weight as a matrix, or None."""
    pitch, step = weight.stride()
    values = weight.untyped_storage().nbytes() // weight.element_size()
    if step != 1 or pitch <= weight.shape[1] or weight.storage_offset() or values % pitch:
        return None
    # Uses `.data`: writing to the padding must not count as changing the weight, which the backward may have saved.
    return weight.data.as_strided((values // pitch, pitch), (pitch, 1))


# --- Matmuls by cuBLAS, or by QuACK's kernel on Hopper.
#
# If the frozen weight is padded, W x + U A x is one matmul of [x | A x] by [W | U], rounded once. Otherwise U A x is
# computed first and W x is added to it: the smaller term survives only if it is added before rounding. QuACK adds in
# float32 and rounds once; cuBLAS (addmm_ of 16 bits) loses a hundredth of a unit in the last place, on an
# H200 at every shape tried (docs/log).


MatmulBackend = Literal["cublas", "quack"]
ALIGNED = 8  # values: QuACK's loads need rows aligned to 16 bytes


def low_rank(
    x: Tensor, wide: Tensor, first: Tensor, second: Tensor, by: MatmulBackend, bias: Tensor | None = None, *,
    padded: bool = False, padded_x: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x (N, K), wide (K, M), first (K, r), second (r, M) -> x wide + (x first) second + bias (N, M), x first (N, r).

    Without gradient: for use inside a Function.

    Args:
        padded: wide, or its transpose, has padding for `second`; QuACK only, without bias.
        padded_x: x has padding for x first.
    """
    if not first.shape[1]:
        return x @ wide if bias is None else torch.addmm(bias, x, wide), x @ first
    if padded:
        assert by == "quack" and bias is None
        y, z = _in_one(x, wide, first, second, padded_x)
        return y, z
    z = x @ first
    y = z @ second if bias is None else torch.addmm(bias, z, second)
    add_product(y, x, wide, by)
    return y, z


@torch.library.custom_op("optrush::low_rank", mutates_args=())
def _in_one(x: Tensor, wide: Tensor, first: Tensor, second: Tensor, padded_x: bool) -> tuple[Tensor, Tensor]:
    z, transposed = x @ first, wide.stride(0) == 1
    left = concat_in_padding(x, z, 1, padded_x)
    if transposed:
        right = concat_in_padding(wide.t(), second.t(), 1, padded=True).t()
    else:
        right = concat_in_padding(wide, second, 0, padded=True)
    if not x.is_cuda or not len(x):
        return left @ right, z
    from quack.gemm_interface import gemm_tuned

    y = x.new_empty(len(x), wide.shape[1])
    gemm_tuned.fn(_loaded(left), _loaded(right), y, config=_tile(), dynamic_scheduler=True)
    return y, z


@_in_one.register_fake
def _(x: Tensor, wide: Tensor, first: Tensor, second: Tensor, padded_x: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(len(x), wide.shape[1]), x.new_empty(len(x), first.shape[1])


@torch.library.custom_op("optrush::add_product", mutates_args={"y"})
def add_product(y: Tensor, a: Tensor, b: Tensor, by: str) -> None:
    """Compute y (N, M) += a (N, K) @ b (K, M), with QuACK in 16 bits. Without gradient: for use inside a Function.

    torch.addmm copies its first argument, and a compiler turns addmm_ into addmm.
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
    """Compute x (N, M) + a (N, K) @ b (K, M), rounded once; on a GPU by QuACK. Without gradient: for a Function."""
    if not x.is_cuda or not len(x):
        return torch.addmm(x, a, b)
    from quack.gemm_interface import gemm_tuned

    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    gemm_tuned.fn(_loaded(a), _loaded(b), y, _loaded(x), config=_tile(), dynamic_scheduler=True)
    return y


@plus_product.register_fake
def _(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def matmul_to_dtype(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute a (M, N) @ b (N, K) in their type, or in float32 without rounding the sums to their type."""
    if dtype == a.dtype:
        return a @ b
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda else a.to(dtype) @ b.to(dtype)


@torch.library.custom_op("optrush::gradients", mutates_args=())
def low_rank_gradients(grad: Tensor, weight: Tensor, u: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Return d_x (N, D) and d_z = grad U (N, r) of y = x W^T + (x A^T) U^T; grad (N, M), W (M, D), U (M, r), A (r, D).

    W is padded. grad is read once: d_z is extra columns of the matmul with W, free if they fit in its last tile of 192
    columns. d_x is rounded before and after d_z A is added: a much smaller term is lost, which is acceptable for a
    gradient. By QuACK; without gradient: for use inside a Function.
    """
    if not grad.is_cuda or not len(grad):
        d_z = grad @ u
        return grad @ weight + d_z @ a, d_z
    from quack.gemm_interface import gemm_tuned

    width, rank = weight.shape[1], u.shape[1]
    joined = concat_in_padding(weight, u, 1, padded=True)  # (M, D + r, padded to full tiles)
    both, d_x = grad.new_empty(len(grad), joined.shape[1]), grad.new_empty(len(grad), width)
    gemm_tuned.fn(_loaded(grad), joined, both, config=_tile(), dynamic_scheduler=True)
    small = torch.nn.functional.pad(a, (0, 0, 0, joined.shape[1] - width - rank))
    gemm_tuned.fn(both[:, width:], small, d_x, both[:, :width], config=_tile(), dynamic_scheduler=True)
    return d_x, both[:, width : width + rank].contiguous()


@low_rank_gradients.register_fake
def _(grad: Tensor, weight: Tensor, u: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    return grad.new_empty(len(grad), weight.shape[1]), grad.new_empty(len(grad), u.shape[1])


def _loaded(t: Tensor) -> Tensor:
    """Return a matrix with the alignment that QuACK's loads need."""
    small, large = sorted(t.stride())
    return t if small == 1 and large % ALIGNED == 0 and t.storage_offset() % ALIGNED == 0 else t.contiguous()


@cache
def _tile() -> Any:
    """Return 256 x 192 tiles, scheduled dynamically; one object, because QuACK's cache compares by identity."""
    from quack.gemm_config import GemmConfig

    return GemmConfig(
        tile_m=256, tile_n=192, pingpong=False, cluster_m=2, cluster_n=1, is_dynamic_persistent=False, device_capacity=9
    )
