"""Blocks over ranks: golden list, gradients, checkpoints, evaluation, exports, refusals, what is predicted."""

from __future__ import annotations

import shutil

import pytest

from meshes import MeshCase, prove

from golden import make_golden

ONE = {"pipeline": {}}
TWO = [
    MeshCase(2, ONE),
    MeshCase(2, ONE, "tied", packed=False),
]


@pytest.mark.parametrize("case", TWO, ids=str)
def test_two_ranks_are_one_process(box, pair, reference, case):
    prove(box, pair, case, reference)
