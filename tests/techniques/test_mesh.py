"""Meshes of several axes: golden list, gradients, checkpoints from one mesh to another, who counts, refusals."""

from __future__ import annotations

import pytest

from meshes import MeshCase, follows, play, prove, saved, train
from optrush.errors import NeedsError
from optrush.resolve import resolve

from trials import assembled, first_gradients, golden_run

HYBRID = {"fsdp": {"replicate": 2}}
CASES = [
    MeshCase(4, {"ddp": {}}, rows=1),
    MeshCase(4, {"fsdp": {}}, "tied", rows=1),
    MeshCase(4, {"fsdp": {"stage": 2}}, rows=1),
    MeshCase(4, HYBRID, rows=1),
    MeshCase(4, HYBRID, "tied", packed=False, rows=1),
    MeshCase(4, {"fsdp": {"replicate": 2, "stage": 2, "sync": "each"}}, "chat", rows=1),
    MeshCase(
        4, HYBRID | {"nf4": {}, "lora": {"rank": 4}, "recompute": {}}, rows=1, base={"nf4": {}, "lora": {"rank": 4}}
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_four_ranks_are_one_process(box, quad, reference, case):
    prove(box, quad, case, reference)


def test_what_a_rank_of_a_group_holds(box, quad):
    """Half of the model, not a quarter: two groups of two."""
    whole = play(box, MeshCase(1, {}), {}).held
    assert [one.held for one in quad(play, box, MeshCase(4, HYBRID, rows=1), HYBRID)] == [whole // 2] * 4


def test_a_checkpoint_goes_on_in_another_mesh(box, quad, pair, tmp_path):
    hybrid, one = tmp_path / "hybrid", tmp_path / "one"
    follows(quad(train, box, hybrid, HYBRID)[0])
    follows(pair(train, box, tmp_path / "ddp", {"ddp": {}}, saved(hybrid))[0], first=5)
    follows(train(box, tmp_path / "alone", {}, saved(hybrid)), first=5)
    train(box, one, {})
    follows(quad(train, box, tmp_path / "back", HYBRID, saved(one))[0], first=5)


def miscounted(box):
    """Loss and norm of the first step where every copy counts."""
    job = assembled(golden_run(box, rows=1, packed=True, **HYBRID))
    job.counts = lambda t: True
    loss, _ = first_gradients(job)
    return loss, job.grad_norm().item()


def test_these_tests_would_see_copies_that_count_twice(box, quad):
    job = assembled(golden_run(box, packed=True))
    loss, _ = first_gradients(job)
    norm = job.grad_norm().item()
    for seen, wrong in quad(miscounted, box):
        assert seen == pytest.approx(loss, rel=1e-5) and wrong == pytest.approx(norm * 2**0.5, rel=1e-5)


@pytest.mark.parametrize(
    ("ranks", "options", "found"),
    [
        (3, {"replicate": 2}, "3 ranks"),
        (2, {"replicate": 2}, "2 ranks in 2 groups"),
        (1, {"replicate": 2}, "one rank"),
        (1, {}, "one rank"),
    ],
)
def test_meshes_that_the_ranks_do_not_fill(box, ranks, options, found):
    with pytest.raises(NeedsError) as error:
        resolve(golden_run(box, packed=True, fsdp=options), ranks=ranks)
    assert found in error.value.found and "ranks" in error.value.do
