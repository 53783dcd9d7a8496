"""What is laid in room: a copy, zeros beyond it, and nothing else touched; by its kernel in the interpreter."""

import pytest
import torch

import interpreter
from optrush.technique import library


def interpreted():
    from optrush.kernels.lora_matmul_triton import fill_padding

    for R, C, r, c in ((70, 64, 70, 16), (64, 1300, 5, 1300), (3, 128, 3, 65), (1, 1, 1, 1), (64, 64, 3, 7)):
        for narrow in (torch.randn(r, c), torch.randn(c, r).t(), torch.randn(r, c + 3)[:, :c]):
            around = torch.full((R + 2, C + 5), 7.0)
            fill_padding(around[1:-1, 2 : 2 + C], narrow)
            want = torch.full_like(around, 7.0)
            want[1:-1, 2 : 2 + C] = 0
            want[1 : 1 + r, 2 : 2 + c] = narrow
            assert torch.equal(around, want), (R, C, r, c)
    print("equal")


@pytest.mark.skipif(library("triton") is None, reason="triton is not installed")
def test_triton_equals_a_copy():
    interpreter.says(__file__, "equal")


if __name__ == "__main__":
    interpreted()
