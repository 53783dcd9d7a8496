"""A product added in place: by cuBLAS, or by QuACK's kernel on Hopper.

torch.addmm copies what it adds to first, and a compiler makes addmm of addmm_. Of two products that are added up, make
the one that sums over less first, and add the other to it: the kernel of that one is busy multiplying, and reads
meanwhile. And what is small beside the other counts only where it is added before that is rounded.

QuACK adds in float32 and rounds once. cuBLAS seems to round its product first: inferred from how fast the loss of an 8B
model fell beside adapters that had just begun, not shown (LOG.md).

Source: https://github.com/Dao-AILab/quack (gemm_interface.py, gemm).
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

By = Literal["cublas", "quack"]
ALIGNED = 8  # values: QuACK's loads want rows that begin at 16 bytes


@torch.library.custom_op("optrush::add_product", mutates_args={"y"})
def add_product(y: Tensor, a: Tensor, b: Tensor, by: str) -> None:
    """y (N, M) += a (N, K) @ b (K, M), of 16 bits where by QuACK. No gradient: for inside of a Function."""
    if by == "cublas" or not y.is_cuda:
        y.addmm_(a, b)
    elif y.numel():
        from quack.gemm_interface import gemm_tuned

        gemm_tuned.fn(_loaded(a), _loaded(b), y, y, config=_tile(), dynamic_scheduler=True)


@add_product.register_fake
def _(y: Tensor, a: Tensor, b: Tensor, by: str) -> None:
    return None


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
