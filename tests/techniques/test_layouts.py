"""pad, sort-by-length, wrap, packing: each against transformers on the documents that its own step holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from meshes import further
from optrush.data import sampler
from optrush.trainer.trainer import evaluate

from golden import make_golden
from golden.make_golden import CASES, PER_STEP, T
from heldout import documents, held_out
from trials import assembled, furthest, golden_run, published, wire

MARGIN = 0.1  # nats a token, of the mean over the seeds
SEEDS = (1, 2)


def first_step(trainer):
    batches = next(trainer.batches)
    wire(trainer)
    return batches


@pytest.mark.parametrize("implementation", ["native", "transformers"])
@pytest.mark.parametrize("name", further(["chat", "untied"], 1))
@pytest.mark.parametrize(
    "with_", further([{"pad": {}}, {"sort_by_length": {"window": 20}}, {"sort_by_length": {"window": 64}}], 2)
)
def test_the_same_documents_the_same_loss_and_gradients(box, name, with_, implementation):
    case = CASES[name]
    T = 128 if implementation == "native" else 64  # transformers' model has no more positions
    sets = [f"model.implementation={implementation}", f"batch.seq={T}", f"batch.tokens={T * 16}"]
    job = assembled(golden_run(box, case, sets=[*sets, f"batch.micro_tokens={T * 4}"], **with_))
    batches = first_step(job)
    assert [b.tokens.shape for b in batches] == [(4, 64)] * 4  # no document has more than 24 tokens, a bucket is 64
    held = [s for b in batches for s in b.samples]
    assert len(set(held)) == 16
    folder, path = make_golden.places(box, case)
    documents = make_golden.read_documents(folder, path)
    model = make_golden.open_model(folder)
    want_loss, _ = make_golden.window(model, [documents[i] for i in held])
    loss, grads = published(job)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert furthest(grads, {n: p.grad for n, p in model.named_parameters()}) < 1e-5
    if with_.get("sort_by_length") == {"window": 64}:
        lengths = [len(documents[i][0]) for i in held]
        assert max(lengths) - min(lengths) <= 4 < max(len(d[0]) for d in documents) - min(len(d[0]) for d in documents)


@pytest.mark.parametrize("implementation", further(["native", "transformers"], 1))
@pytest.mark.parametrize("overlap", further([0, 5, 1], 2))
def test_a_wrapped_row_is_one_line_of_tokens(box, overlap, implementation):
    sets = [f"model.implementation={implementation}"]
    job = assembled(golden_run(box, rows=4, sets=sets, wrap={"overlap": overlap}))
    batches = first_step(job)
    folder, path = make_golden.places(box, CASES["untied"])
    documents = make_golden.read_documents(folder, path)
    line = torch.cat([documents[i][0] for step in make_golden.order() for i in step])
    learnt = torch.cat([documents[i][1] for step in make_golden.order() for i in step])
    model = make_golden.open_model(folder)
    terms = sum(b.n_terms for b in batches)
    total, at, seen = 0.0, 0, 0
    ends = np.cumsum([len(documents[i][0]) for step in make_golden.order() for i in step]).tolist()
    for _ in range(16):
        begun = at - max([0, *(e for e in ends if e <= at)])  # tokens of the document that lie before this row
        back = min(overlap, begun)
        ids, flags = line[at - back : at - back + T], learnt[at - back : at - back + T].clone()
        flags[: max(1, back)] = False
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        nll = cross_entropy(logits[:-1], ids[1:], reduction="none")[flags[1:]].sum()
        (nll / terms).backward()
        total, seen, at = total + nll.item(), seen + int(flags.sum()), at + T - back
    assert seen == terms
    loss, grads = published(job)
    assert loss == pytest.approx(total / terms, rel=1e-6)
    assert furthest(grads, {n: p.grad for n, p in model.named_parameters()}) < 1e-5


# Packing: fewer rows for the same documents; the rest of the proof is tests/golden.


def test_the_same_documents_in_half_the_rows(box):
    single, packed = assembled(golden_run(box)), assembled(golden_run(box, packed=True))
    for one, two in zip(single.batches, packed.batches, strict=True):
        assert sum(len(b.tokens) for b in one) == PER_STEP == 2 * sum(len(b.tokens) for b in two)
        assert sorted(s for b in one for s in b.samples) == sorted(s for b in two for s in b.samples)
        assert sum(b.n_tokens for b in one) == sum(b.n_tokens for b in two)
        assert sum(b.n_terms for b in one) == sum(b.n_terms for b in two)
        assert all(b.documents.single for b in one) and not any(b.documents.single for b in two)


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_packed_documents_have_the_same_loss_and_gradients(box, reference, implementation):
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


# Wrapping over seeds.


def wrapping_is_worse(box, *words):
    sets = (*documents(box, words), "data.too_long=split")
    packed, wrapped = ([held_out(box, seed, sets, **{how: {}}) for seed in SEEDS] for how in ("packing", "wrap"))
    print("packing", packed, "wrap", wrapped)
    assert all(last < 0.6 * first for first, last in packed), "it learns"
    return np.mean([w[1] - p[1] for w, p in zip(wrapped, packed)])


@pytest.mark.slow
def test_wrapping_long_documents_learns_no_worse(box):
    assert wrapping_is_worse(box, 2 * T, 6 * T) < MARGIN


@pytest.mark.slow
def test_wrapping_short_documents_does(box):
    """Why chats are packed: a document that always had others before it in training is a stranger alone."""
    assert wrapping_is_worse(box, 10, 22) > 0.3
