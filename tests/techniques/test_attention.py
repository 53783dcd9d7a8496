"""Attention kernels through the whole model: the same losses and gradients, and documents that never meet.

The kernels by themselves, on numbers of their own, are in tests/unit/test_attention.py; those that need a GPU in
tests/gpu.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from optrush import config
from optrush.data.batch import collate
from optrush.data.schema import Document
from optrush.models.shapes import SHAPES
from optrush.planner import search
from optrush.techniques import attention

from golden.make_golden import CASES
from trials import apart, assembled, first_gradients, furthest, golden_run, micro, published

CLOSE = 1e-5  # of the largest gradient of each tensor
IMPLS = ["masked", "sdpa"]
A, B, T = 19, 22, 48


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("impl", IMPLS)
def test_equals_transformers_a_document_at_a_time(box, reference, impl, packed):
    loss, grads = published(assembled(golden_run(box, CASES["chat"], packed=packed, attention={"impl": impl})))
    want_loss, want = reference("chat")
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert furthest(grads, want) < CLOSE


@pytest.mark.parametrize("packed", [True, False])
def test_sdpa_equals_masked(box, packed):
    def made(impl):
        return first_gradients(assembled(golden_run(box, packed=packed, attention={"impl": impl})))

    (loss, grads), (want_loss, want) = made("sdpa"), made("masked")
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert furthest(grads, want) < CLOSE


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_it_is_really_another_kernel(box, implementation, monkeypatch):
    calls = []
    real = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or real(*a, **k)
    )
    for impl, wanted in (("masked", 0), ("sdpa", 2)):
        calls.clear()
        sets = [f"model.implementation={implementation}"]
        job = assembled(golden_run(box, packed=True, sets=sets, attention={"impl": impl}))
        calls.clear()  # the wrapper tries itself out while it is made
        job.eval_loss([micro(job)])
        assert len(calls) == wanted, "once a block"


# Isolation: a row of A, B and padding. Only B's tokens are learnt.


@pytest.fixture(scope="module", params=IMPLS)
def job(request, box):
    return assembled(golden_run(box, rows=1, packed=True, attention={"impl": request.param}))


def row(seed: int, first: int = 10):
    """A row in which only A depends on the seed."""
    draw, other = np.random.default_rng(7), np.random.default_rng(seed)
    b = Document(draw.integers(20, 70, B).astype(np.int32), np.arange(B) > 0)
    a = Document(other.integers(first, first + 8, A).astype(np.int32), np.zeros(A, bool))
    return collate([[(0, a), (1, b)]], T, single=False, most=3)


def outputs(trainer, batch):
    """Hidden states of B, the loss of B, and its gradient in every parameter."""
    trainer.zero_grad()
    hidden = trainer.model(batch.tokens, batch.positions, batch.documents)
    loss = trainer.loss_from_hidden(hidden, batch)
    loss.backward()
    grads = {t.name: t.grad.clone() for t in trainer.trained}
    trainer.zero_grad()
    return hidden[:, A : A + B].detach(), loss.detach(), grads


def test_another_document_changes_no_bit(job):
    before, after = outputs(job, row(1)), outputs(job, row(2))
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    for name, want in before[2].items():
        assert torch.equal(after[2][name], want), name
        assert want.abs().max() > 0, name


def test_a_document_alone_gives_the_same(job):
    """B behind A, and B at the row's beginning."""
    batch = row(1)
    alone = collate([[(1, Document(batch.tokens[0, A : A + B].numpy().astype(np.int32), np.arange(B) > 0))]], T,
                    single=False, most=3)  # fmt: skip
    _, loss, grads = outputs(job, batch)
    _, want_loss, want = outputs(job, alone)
    assert loss.item() == pytest.approx(want_loss.item(), rel=1e-6)
    assert furthest(grads, want) < CLOSE


def test_a_bad_value_stays_in_its_document(job):
    clean = outputs(job, row(1))
    bad_row = 10  # tokens 10 to 17 are A's alone
    batch = row(1)
    assert (batch.tokens[0, :A] == bad_row).any() and not (batch.tokens[0, A : A + B] == bad_row).any()
    weight = job.model.embedding.weight
    kept = weight[bad_row].detach().clone()
    with torch.no_grad():
        weight[bad_row] = float("nan")
    try:
        hidden, loss, _ = outputs(job, batch)
        whole = job.model(batch.tokens, batch.positions, batch.documents)
    finally:
        with torch.no_grad():
            weight[bad_row] = kept
    assert whole[:, :A].isnan().any(), "the bad value is there, and not hidden from its own document"
    assert torch.equal(hidden, clean[0])
    assert torch.equal(loss, clean[1])


@pytest.mark.parametrize("how", ["one document", "positions run on"])
def test_these_tests_would_see_a_leak(job, how):
    def spoil(batch):
        if how == "one document":
            ids = torch.zeros_like(batch.documents.ids)
            return dataclasses.replace(batch, documents=batch.documents._replace(ids=ids))
        return dataclasses.replace(batch, positions=torch.arange(T, dtype=torch.int32)[None])

    _, _, good = outputs(job, row(1))
    _, _, bad = outputs(job, spoil(row(1)))
    if how == "one document":
        assert furthest(bad, good) > 1e-2
        assert not torch.equal(outputs(job, spoil(row(1)))[0], outputs(job, spoil(row(2)))[0])
    else:  # positions are relative within a document, so running on moves only the last bits: seen where they restart
        assert apart(bad["blocks.0.qkv.weight"], good["blocks.0.qkv.weight"]) < 1e-4
        at = row(1).positions[0].tolist()
        assert at == [*range(A), *range(B), *range(T - A - B)]


@pytest.mark.parametrize(
    ("hardware", "withs", "sets", "spread", "scores"),
    [
        ("h200", ("bf16", "attention"), (), False, False),
        ("h200", ("attention",), (), True, False),
        ("h200", ("attention",), ("model.implementation=transformers",), True, True),
        ("h200", ("attention",), ("model.shape=one-to-one", "model.implementation=transformers"), False, False),
        ("h200", ("attention",), ("model.shape=mistral", "model.implementation=transformers"), True, True),
        ("h200", ("attention",), ("model.shape=mistral",), True, False),
        ("t4", ("amp:dtype=fp16", "attention"), (), True, False),
        ("cpu", ("attention",), (), False, False),
        ("h200", ("bf16", "attention:impl=varlen"), (), False, False),
        ("h200 and torch 2.11.0+cu130", ("bf16", "attention:impl=varlen"), (), True, False),
    ],
    ids=str,
)
def test_where_heads_are_repeated(monkeypatch, hardware, withs, sets, spread, scores):
    """Where torch's kernel cannot group query heads, keys and values are held for each, or by plain products scores."""
    monkeypatch.setitem(SHAPES, "one-to-one", SHAPES["llama-3.2-1b"] | {"num_key_value_heads": 32})
    mistral = SHAPES["llama-3.2-1b"] | {"model_type": "mistral", "rope_scaling": None, "sliding_window": None}
    monkeypatch.setitem(SHAPES, "mistral", {k: v for k, v in mistral.items() if k != "num_key_value_heads"})  # then 8
    hardware, _, torch_version = hardware.partition(" and torch ")
    monkeypatch.setattr(attention, "library", {"torch": torch_version or "2.13.0"}.get)
    text = "{model: {shape: llama-3.2-1b}, objective: pretrain, data: {random: 8}, output: none}"
    lines = {item.name for item in search.predict(config.parse_config(text, "case", sets, withs), hardware).lines}
    assert ("saved.spread" in lines, "saved.scores.held" in lines) == (spread, scores)
