"""Looking numbers up by their codes, inside of Triton kernels.

Loads by code say nothing about where threads should lie: the compiler took an order that had each thread of a warp in
another block, and gave it to all loads and stores around. What is looked up on the chip has the order of its codes.
"""
# Kernels are no Python functions: their arguments are typed by what is launched.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-not-found, import-untyped"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def lookup(numbers, codes):
    """numbers (n,), codes int32 of any shape, from 0 to n - 1 -> the numbers, of that shape."""
    return tl.reshape(tl.gather(numbers, tl.reshape(codes, (codes.numel,)), 0), codes.shape)
