"""Both narrow gradients of a low-rank sum from one reading: the Triton kernel against float64, in the interpreter."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import interpreter

CASES = [(64, 512, 16), (200, 1100, 16), (1000, 700, 5), (7, 30, 32), (130, 513, 1)]  # N, R, r: ends that fill no tile


def interpreted():
    from optrush.kernels import low_rank_gradients_triton as kernel

    for (n, across, r), programs in [(case, programs) for case in CASES for programs in (1, 9)]:
        kernel.PROGRAMS = programs
        draw = torch.Generator().manual_seed(n)
        wide = torch.randn(n, across + 24, generator=draw).half()
        grad, u, z = wide[:, 8 : across + 8], torch.randn(across, r, generator=draw), torch.randn(n, r, generator=draw)
        d_z, d_u = kernel.launch(grad, u.half(), z.half())
        assert d_z.dtype == d_u.dtype == torch.float16
        for got, want in ((d_z, grad.double() @ u.half().double()), (d_u, grad.double().t() @ z.half().double())):
            assert got.shape == want.shape
            assert (got.double() - want).abs().max() <= 1e-3 * want.abs().max(), (n, across, r, programs)
    print("close")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton here")
def test_the_kernel_against_float64():
    interpreter.says(__file__, "close")


if __name__ == "__main__":
    interpreted()
