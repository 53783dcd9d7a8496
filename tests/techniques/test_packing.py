"""Packing: fewer rows for the same documents, the same loss; the rest of the proof is tests/golden."""

from __future__ import annotations

import pytest

from optrush.data import sampler
from optrush.trainer.trainer import evaluate

from golden.make_golden import PER_STEP
from trials import assembled, furthest, golden_run, published


def test_the_same_documents_in_half_the_rows(box):
    single, packed = assembled(golden_run(box)), assembled(golden_run(box, packed=True))
    for one, two in zip(single.batches, packed.batches, strict=True):
        assert sum(len(b.tokens) for b in one) == PER_STEP == 2 * sum(len(b.tokens) for b in two)
        assert sorted(s for b in one for s in b.samples) == sorted(s for b in two for s in b.samples)
        assert sum(b.n_tokens for b in one) == sum(b.n_tokens for b in two)
        assert sum(b.n_terms for b in one) == sum(b.n_terms for b in two)
        assert all(b.documents.single for b in one) and not any(b.documents.single for b in two)


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_the_same_loss_and_gradients(box, reference, implementation):
    sets = [f"model.implementation={implementation}"]
    loss, grads = published(assembled(golden_run(box, packed=True, sets=sets)))
    want_loss, want = reference("untied")
    assert loss == pytest.approx(want_loss, rel=1e-6)
    if implementation == "native":
        assert furthest(grads, want) < 1e-5
    else:
        single = published(assembled(golden_run(box, sets=sets)))[1]
        assert furthest(grads, single) < 1e-5


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_evaluation_is_packed_and_the_same(box, monkeypatch, implementation):
    run = golden_run(box, sets=[f"data.eval={box}/held.jsonl", f"model.implementation={implementation}"])
    job = assembled(run)
    assert job.evaluation.documents == 64 and job.evaluation.rows == 32
    loss, targets, _ = evaluate(job)
    laid = sampler.evaluation
    monkeypatch.setattr(sampler, "evaluation", lambda *args, **given: laid(*args, **{**given, "packed": False}))
    alone = assembled(run)
    assert alone.evaluation.rows == 64
    assert evaluate(alone)[:2] == (pytest.approx(loss, rel=1e-6), targets)
