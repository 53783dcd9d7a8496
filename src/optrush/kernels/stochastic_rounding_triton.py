"""Stochastic rounding into a bfloat16 tensor in one launch of a Triton kernel; the reference: stochastic_rounding.py.

Imported where it is launched only: torch ships Triton where there is a CUDA device. Triton's interpreter runs it on a
CPU in the tests. One operator at a time the random bits alone would move some 600 bytes an element; here value and
weight are all that is read and written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from optrush.kernels.adamw_triton import _mix, _stochastic

BLOCK = 4096
WARPS = 8


@triton.jit(do_not_specialize=["size", "first"])
def _store(target, value, found_inf, key, size, first, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Write BLOCK elements of `size`; target: the bits of bfloat16; value: from arithmetic, whose nan stays one."""
    if tl.load(found_inf) == 0:
        j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        there = j < size
        x = tl.load(value + j, mask=there, other=0.0)
        bits = _mix((first + j).to(tl.uint32) ^ tl.load(key).to(tl.uint32))
        bits = _mix(bits ^ tl.load(key + 1).to(tl.uint32)) >> SHIFT
        tl.store(target + j, _stochastic(x, bits), mask=there)


def launch_stochastic(
    target: Tensor, value: Tensor, found_inf: Tensor, key: Tensor, shift: int = 0, first: int = 0
) -> None:
    """Write a bfloat16 target, as `stochastic_rounding.RoundedWrite`."""
    assert (target.dtype, value.dtype) == (torch.bfloat16, torch.float32)
    assert target.is_contiguous() and value.is_contiguous()
    if size := target.numel():
        bits, flag = target.view(torch.uint16), found_inf.view(torch.uint8)
        _store[(triton.cdiv(size, BLOCK),)](bits, value, flag, key, size, first, shift, BLOCK, num_warps=WARPS)
