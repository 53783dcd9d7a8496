"""Products of matrices in a block, and products added in place: by cuBLAS, or by QuACK's kernel on Hopper.

QuACK's tiles of 256 x 192, each taken by whoever is free instead of in a fixed order, give 1 to 3 % more than cuBLAS on
the shapes of an 8B model (benchmarks/results/h200-operators.jsonl).

torch.addmm copies what it adds to first, and a compiler makes addmm of addmm_; so what adds in place is an operator. Of
two products that are added up, make the one that sums over less first, and add the other to it: the kernel of that one
is busy multiplying, and reads meanwhile. The larger part is rounded once so, not twice.

Source: https://github.com/Dao-AILab/quack (gemm_interface.py, gemm).
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

By = Literal["cublas", "quack"]
ALIGNED = 8  # values: QuACK's loads want rows that begin at 16 bytes


@torch.library.custom_op("optrush::product", mutates_args=())
def product(a: Tensor, b: Tensor) -> Tensor:
    """a (N, K) @ b (K, M), 16-bit and by QuACK on CUDA. No gradient: for inside of a Function."""
    if not a.is_cuda:
        return a @ b
    y = a.new_empty(len(a), b.shape[1])
    _quack(y, a, b, None)
    return y


@product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(len(a), b.shape[1])


@torch.library.custom_op("optrush::add_product", mutates_args={"y"})
def add_product(y: Tensor, a: Tensor, b: Tensor, by: str) -> None:
    """y (N, M) += a (N, K) @ b (K, M), rounded once; `by`: see `By`. No gradient: for inside of a Function."""
    if by == "quack" and y.is_cuda:
        _quack(y, a, b, y)
    else:
        y.addmm_(a, b)


@add_product.register_fake
def _(y: Tensor, a: Tensor, b: Tensor, by: str) -> None:
    return None


def _quack(y: Tensor, a: Tensor, b: Tensor, to: Tensor | None) -> None:
    """Writes a @ b, and `to` added, into y, which may be `to`."""
    from quack.gemm_interface import gemm_tuned

    if y.numel():
        gemm_tuned.fn(_loaded(a), _loaded(b), y, to, config=_tile(), dynamic_scheduler=True)


def _loaded(t: Tensor) -> Tensor:
    """A matrix as its loads want it."""
    small, large = sorted(t.stride())
    return t if small == 1 and large % ALIGNED == 0 else t.contiguous()


@cache
def _tile() -> Any:
    """One object for all calls: QuACK knows a call again by it."""
    from quack.gemm_config import GemmConfig

    return GemmConfig(
        tile_m=256, tile_n=192, pingpong=False, cluster_m=2, cluster_n=1, is_dynamic_persistent=False, device_capacity=9
    )
