"""Documents of a row do not see each other, on every path through attention that a CPU has, forward and backward."""

from __future__ import annotations

import pytest
import torch

from isolation import alone, disturbed
from trials import assembled, golden_run, micro

PATHS = [
    ("native", {}), ("native", {"attention": {"impl": "masked"}}), ("native", {"attention": {"impl": "sdpa"}}),
    ("native", {"attention": {"impl": "sdpa"}, "fused_loss": {"chunk": 7}, "recompute": {}}), ("transformers", {}),
    ("transformers", {"attention": {"impl": "masked"}}), ("transformers", {"attention": {"impl": "sdpa"}}),
]  # fmt: skip


@pytest.fixture(params=PATHS, ids=lambda p: "-".join([p[0], *(f"{k}:{v}" for k, v in p[1].items())]))
def job(request, box):
    implementation, with_ = request.param
    sets = [f"model.implementation={implementation}"]
    return assembled(golden_run(box, rows=4, packed=True, sets=sets, **with_))


def test_packed_documents_equal_each_alone(job):
    off = alone(job, micro(job))
    print(f"furthest logit: {off:.1e}")
    assert off <= 1e-5


def test_another_token_changes_no_bit_of_the_others(job):
    before, after, grads = disturbed(job, micro(job))
    assert torch.equal(before, after)
    for name, (one, again, other) in grads.items():
        assert torch.equal(one, again) and torch.equal(one, other), name


def test_a_leak_would_be_seen(box):
    job = assembled(golden_run(box, rows=4, packed=True))
    batch = micro(job)
    seen = job.model.forward
    job.model.forward = lambda tokens, positions, d: seen(tokens, positions, d._replace(ids=torch.zeros_like(d.ids)))
    before, after, grads = disturbed(job, batch)
    assert not torch.equal(before, after) and not torch.equal(*grads["embedding.weight"][::2])
    assert alone(job, batch) > 1e-3
