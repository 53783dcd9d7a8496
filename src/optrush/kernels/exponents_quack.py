"""The product of exponents.py: QuACK's, with an epilogue that exponentiates. Imported on CUDA only.

Its own module, for QuACK finds an epilogue again by where it is defined.
"""
# Epilogues are no Python functions: they are traced, value by value.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-not-found, import-untyped"

from __future__ import annotations

import torch
from quack.epilogue.frontend import gemm_epilogue
from quack.epilogue.math import pexp2
from quack.epilogue.ops import ColVecLoad, ColVecReduce
from torch import Tensor

from optrush.kernels.exponents import LOG2E


@gemm_epilogue(ops={"offset": ColVecLoad("offset")}, reduces={"sums": ColVecReduce("sums")})
def _exponents(acc, offset):
    e = pexp2(acc * LOG2E - offset)
    return {"D": e, "sums": e}


def product(
    x: Tensor, weight: Tensor, offset: Tensor, out: Tensor, columns: int | None = None, turns: bool = True
) -> Tensor:
    """As `exponents.exponents` says.

    Args:
        columns: of a tile; None takes those that were fastest (LOG.md). They divide V: what lies behind the last column
            of a matrix would be summed as well.
        turns: two groups of warps, of which one multiplies while the other writes what it has.
    """
    if columns is None:
        columns = 192 if len(weight) % 192 == 0 else 128
    sums = torch.empty(len(x), len(weight) // columns, dtype=torch.float32, device=x.device)
    rows = 256 if columns < 256 and not turns else 128
    operands = {"offset": offset, "sums": sums}
    _exponents.gemm(x, weight, out, epi_args=operands, tile_M=rows, tile_N=columns, cluster_M=2, pingpong=turns)
    return sums
