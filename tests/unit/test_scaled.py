"""A tensor times a number on the device: one rounding, in place where the type stays; its kernel in the interpreter."""

import pytest
import torch

import interpreter
from optrush.kernels import linear_cross_entropy as kernel
from optrush.technique import library

WIDE, HALF = torch.float32, torch.bfloat16
FACTOR = torch.tensor(1 / 3)  # bfloat16 has it 0.2 % off


def drawn(n, dtype):
    return torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)


@pytest.mark.parametrize(("given", "wanted"), [(WIDE, WIDE), (WIDE, HALF), (HALF, HALF), (HALF, WIDE)], ids=str)
def test_one_rounding(given, wanted):
    x = drawn(1000, given)
    right = (x.double() * FACTOR.double()).to(WIDE).to(wanted)
    found = kernel.scale_to_dtype(x, FACTOR, wanted)
    assert found.dtype == wanted and torch.equal(found, right)
    assert (found is x) == (given == wanted)


def interpreted():
    from optrush.kernels.linear_cross_entropy_triton import SCALE_BLOCK, launch_scale

    # No rounding to bfloat16: the interpreter cuts where a GPU rounds to the nearest. tests/gpu has it.
    for given, wanted in ((WIDE, WIDE), (WIDE, torch.float16), (HALF, WIDE), (torch.float16, torch.float16)):
        for n in (0, 1, 100, SCALE_BLOCK, 2 * SCALE_BLOCK + 7):
            x, around = drawn(n, given), torch.full((n + 2,), 7.0, dtype=given)
            inside = around[1:-1].copy_(x)
            found = launch_scale(inside, FACTOR, wanted)
            assert torch.equal(found, (x.float() * FACTOR).to(wanted)), (given, wanted, n)
            assert (found is inside) == (given == wanted) and (around[[0, -1]] == 7).all()
            assert given == wanted or torch.equal(inside, x)
    print("equal")


@pytest.mark.skipif(library("triton") is None, reason="triton is not installed")
def test_triton_equals_the_reference():
    interpreter.says(__file__, "equal")


if __name__ == "__main__":
    interpreted()
