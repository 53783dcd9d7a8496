"""QuACK matmuls of linear_cross_entropy.py, the first with an exponentiating epilogue. Imported on CUDA only.

QuACK identifies an epilogue by its module, so this one needs its own file.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from quack.epilogue.frontend import gemm_epilogue
from quack.epilogue.math import pexp2
from quack.epilogue.ops import ColVecLoad, ColVecReduce
from quack.gemm_config import GemmConfig
from quack.gemm_interface import gemm_tuned
from torch import Tensor

LOG2E = math.log2(math.e)


@gemm_epilogue(ops={"offset": ColVecLoad("offset")}, reduces={"sums": ColVecReduce("sums")})
def _exponents(acc, offset):
    e = pexp2(acc * LOG2E - offset)
    return {"D": e, "sums": e}


def exp_logits_product(x: Tensor, weight: Tensor, offset: Tensor, out: Tensor) -> Tensor:
    """Implement `linear_cross_entropy.exp_logits`: two groups of warps, one multiplies while the other writes.

    The tile's column count, the fastest (docs/log), must divide V: columns beyond V would enter the sums.
    """
    columns = 192 if len(weight) % 192 == 0 else 128
    sums = torch.empty(len(x), len(weight) // columns, dtype=torch.float32, device=x.device)
    operands = {"offset": offset, "sums": sums}
    _exponents.gemm(x, weight, out, epi_args=operands, tile_M=128, tile_N=columns, cluster_M=2, pingpong=True)
    return sums


def transposed_product(e: Tensor, x: Tensor) -> Tensor:
    """Implement `weight_gradient`. The kernel computes its transpose: tiles of 192 fit V better than D (docs/log)."""
    out = x.new_empty(e.shape[1], x.shape[1])
    gemm_tuned.fn(e.t(), x, out, config=_transposed(), dynamic_scheduler=True)
    return out


@cache
def _transposed() -> GemmConfig:
    """Return tiles of 256 (D) x 192 (V), paired to share reads of x; one object: QuACK compares by identity."""
    return GemmConfig(
        tile_m=256, tile_n=192, pingpong=False, cluster_m=1, cluster_n=2, swap_ab=True, is_dynamic_persistent=False,
        device_capacity=9,
    )  # fmt: skip
