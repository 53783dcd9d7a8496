"""Packing: fewer rows for the same documents, the same loss; the rest of the proof is tests/golden."""

from __future__ import annotations

import dataclasses

import pytest
import torch

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


@pytest.mark.parametrize("spoil", ["isolation", "positions", "divisor"])
def test_these_tests_would_see_a_mistake(box, spoil):
    """transformers tells documents by their positions, our decoder by their numbers."""
    implementation = "transformers" if spoil == "positions" else "native"
    sets = [f"model.implementation={implementation}"]

    def made(spoiled):
        job = assembled(golden_run(box, packed=True, sets=sets))
        inner, window = job.loss, job.forward_backward

        def loss(batch):
            if spoil == "isolation":
                documents = batch.documents._replace(ids=torch.zeros_like(batch.documents.ids))
                batch = dataclasses.replace(batch, documents=documents)
            if spoil == "positions":
                batch = dataclasses.replace(batch, positions=torch.arange(48, dtype=torch.int32).expand(2, 48))
            return inner(batch)

        if spoiled and spoil == "divisor":  # the mean of the micro-batches' means
            job.loss = lambda batch: inner(batch) / batch.n_terms
            job.forward_backward = lambda batches, terms: window(batches, len(batches))
        elif spoiled:
            job.loss = loss
        return published(job)

    (loss, grads), (want_loss, want) = made(True), made(False)
    assert abs(loss - want_loss) / want_loss > (1e-5 if spoil == "divisor" else 1e-3)
    assert furthest(grads, want) > 1e-3
