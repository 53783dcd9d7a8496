"""Both narrow products of a gradient and what is laid beside it; by their kernels in the interpreter."""

from __future__ import annotations

import pytest
import torch

import interpreter
from optrush.kernels import narrow
from optrush.kernels.room import with_room
from optrush.technique import library


@pytest.mark.parametrize("r", [1, 16, 100])
@pytest.mark.parametrize("roomy", [False, True])
def test_once(r, roomy):
    grad, u, z = torch.randn(7, 24), torch.randn(24, r), torch.randn(7, r)
    given = with_room(grad, 0, r) if roomy else grad
    left, d_z, d_u = narrow.once(given, u, z, roomy)
    assert torch.equal(left[:, :24], grad) and torch.equal(left[:, 24 : 24 + r], d_z) and not left[:, 24 + r :].any()
    assert torch.equal(d_z, given @ u) and torch.equal(d_u, given.t() @ z)
    assert (left.data_ptr() == given.data_ptr()) == roomy


def test_together_without_an_adapter():
    grad = torch.randn(7, 24)
    copy, d_z, d_u = narrow.together(grad, torch.empty(24, 0), torch.empty(7, 0))
    assert copy is grad and d_z.shape == (7, 0) and d_u.shape == (24, 0)


def interpreted():
    from optrush.kernels import narrow_triton

    narrow_triton.PROGRAMS = 6
    for N, M, r in ((70, 300, 5), (1, 16, 1), (200, 256, 32), (129, 520, 16)):
        grad, u, z = torch.randn(N, M + 3)[:, :M], torch.randn(r, M).t(), torch.randn(N, r)
        for copies in (True, False):
            around = torch.full((N + 1, M + 64 + 5), 7.0)
            left = around[:-1, : M + 64]
            if not copies:
                left[:, :M] = grad
            d_z, d_u = narrow_triton.once(grad if copies else left[:, :M], u, z, left, copies)
            torch.testing.assert_close(d_z, grad @ u, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(d_u, grad.t() @ z, rtol=1e-4, atol=1e-4)
            assert torch.equal(left[:, :M], grad) and torch.equal(left[:, M : M + r], d_z), (N, M, r)
            assert not left[:, M + r :].any() and (around[-1] == 7).all() and (around[:, M + 64 :] == 7).all()
    print("equal")


@pytest.mark.skipif(library("triton") is None, reason="triton is not installed")
def test_triton_equals_two_products():
    interpreter.says(__file__, "equal")


if __name__ == "__main__":
    interpreted()
