"""Rows shared by ranks: golden list, gradients, isolation bit for bit, checkpoints, evaluation, refusals."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch

from meshes import MeshCase, further, prove
from optrush.data.batch import Documents
from optrush.decide import decide
from optrush.errors import NeedsError
from optrush.kernels import attention, attention_varlen, context_parallel
from optrush.planner import baseline
from optrush.planner.ledger import FLOAT32, Line, apply_rules, cut, line_bytes, peak_memory, tagged
from optrush.technique import in_order, instantiate
from optrush.techniques import ALL
from optrush.trainer.trainer import evaluate

from trials import assembled, golden_run, micro, shaped

TWO, FOUR = {"context": {}}, {"context": {"size": 4}}
GATHER, RING = {"context": {"kind": "gather"}}, {"context": {"kind": "ring"}}
QLORA = {"nf4": {}, "lora": {"rank": 4}}
HALF = 0.08  # of a largest gradient: on so small a model one process in bfloat16 is 0.04 from float32
PAIRS = [
    MeshCase(2, TWO | {"fsdp": {}, "recompute": {}, "attention": {}, "fused-loss": {"chunk": 7}}, "chat"),
    MeshCase(2, GATHER | {"ddp": {}, "attention": {}, "selective-recompute": {}}, "tied"),
    MeshCase(2, TWO | {"ddp": {}} | QLORA, base=QLORA),
    MeshCase(2, GATHER | {"fsdp": {}, "bf16": {}}, base={"bf16": {}}, close=HALF),
    MeshCase(2, RING | {"fsdp": {}, "amp": {}}, packed=False, base={"amp": {}}, close=HALF),
]
QUADS = [
    MeshCase(4, FOUR | {"ddp": {}}), MeshCase(4, {"context": {"size": 4, "kind": "gather"}, "fsdp": {}}, "chat"),
    MeshCase(4, {"context": {"size": 4, "kind": "ring"}, "ddp": {}, "recompute": {}}, "tied", packed=False),
    MeshCase(4, TWO | {"ddp": {}}, rows=1), MeshCase(4, RING | {"fsdp": {"replicate": 2}}, packed=False, rows=1),
    MeshCase(4, GATHER | {"fsdp": {"stage": 2, "sync": "each"}} | QLORA, rows=1, base=QLORA),
]  # fmt: skip


@pytest.mark.parametrize("case", further(PAIRS, 2), ids=str)
def test_two_ranks_are_one_process(box, pair, reference, case):
    prove(box, pair, case, reference)


@pytest.mark.parametrize("case", further(QUADS, 1), ids=str)
def test_four_ranks_are_one_process(box, quad, reference, case):
    prove(box, quad, case, reference)


def shared_rows(box, with_, packed=True, sets=()):
    return assembled(golden_run(box, rows=4, packed=packed, sets=sets, **with_))


def disturbed(box, with_, packed):
    """Another token in the first document of row 0: whether every bit of all others stays, states and gradients."""
    job = shared_rows(box, with_, packed)
    host = micro(job)
    others = torch.ones_like(host.tokens, dtype=torch.bool)
    others[0, host.documents.ids[0] == 0 if packed else ...] = False  # what pads a row of one document may read it
    tokens = host.tokens.clone()
    tokens[0, 1] = (tokens[0, 1] + 1) % 60
    labels = torch.where(others, host.labels, -100)
    here = job.place(dataclasses.replace(host, labels=others.long())).labels.bool()
    kept, score = [], job.loss_from_hidden
    job.loss_from_hidden = lambda states, batch: (kept.append(states.detach().clone()), score(states, batch))[1]
    grads = []
    for changed in (host.tokens, tokens):
        job.zero_grad()
        job.loss(job.place(dataclasses.replace(host, tokens=changed, labels=labels))).backward()
        grads.append({t.name: t.parameter.grad.clone() for t in job.trained})
    before, after = kept
    same = all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])
    return torch.equal(before[here], after[here]), same, torch.equal(before[~here], after[~here])


@pytest.mark.parametrize(("with_", "packed"), [(TWO, True), (GATHER, True), (RING, False)], ids=str)
def test_another_token_changes_no_bit_of_other_documents(box, pair, with_, packed):
    found = pair(disturbed, box, with_ | {"ddp": {}}, packed)
    assert all(states and grads for states, grads, _ in found)
    assert not all(itself for *_, itself in found), "the change has an effect on its own document"


def evaluated(box, with_):
    found = evaluate(shared_rows(box, with_, packed="ring" not in str(with_), sets=[f"data.eval={box}/held.jsonl"]))
    return found.loss, found.targets


@pytest.mark.parametrize("with_", [TWO, GATHER, RING], ids=str)
def test_an_evaluation_is_that_of_one_process(box, pair, with_):
    loss, targets = evaluated(box, {})
    for found in pair(evaluated, box, with_ | {"ddp": {}}):
        assert found == (pytest.approx(loss, rel=1e-6), targets)


# What it predicts.


def sent(box, with_, packed):
    """Values that a rank sends in a forward pass: counted, and predicted."""
    job = shared_rows(box, with_, packed)
    n, counted = job.env.axes["cp"], []

    def counting(function, share):
        return lambda t, *rest: (counted.append(t.numel() * share), function(t, *rest))[1]

    with (
        mock.patch.object(context_parallel, "all_to_all_single_autograd",
                          counting(context_parallel.all_to_all_single_autograd, (n - 1) / n)),
        mock.patch.object(context_parallel, "all_gather_tensor_autograd",
                          counting(context_parallel.all_gather_tensor_autograd, n - 1)),
        mock.patch.object(context_parallel, "_Passing", counting(context_parallel._Passing, 1)),
        torch.no_grad(),
    ):  # fmt: skip
        job.loss(job.place(micro(job)))
    return sum(counted), predicted(job.env, with_)[1]["forward.exchange"] * job.env.micro_rows * job.env.seq


def predicted(env, with_):
    """Bytes of the lines for one token, and values of work for one, as a rank has them."""
    ledger = baseline.book(in_order(instantiate(ALL, with_)), env, env.shape, 0.0)
    return (
        {line.name: line_bytes(ledger, line, 1.0) for line in ledger.lines if line.per_token},
        {work.name: (work.values + work.flop) * work.times for work in ledger.work if work.per == "token"},
    )


@pytest.mark.parametrize(("with_", "packed"), [(TWO, True), (GATHER, True), (RING, False)], ids=str)
def test_what_a_rank_sends_is_what_was_predicted(box, pair, with_, packed):
    for counted, values in pair(sent, box, with_ | {"ddp": {}}, packed):
        assert counted == values > 0


def test_a_rank_of_four_has_a_quarter_of_all_that_grows_with_the_tokens():
    def lines(*withs):
        resolved = decide(shaped("llama-3.2-1b", *withs, windows=4), ranks=4)
        return predicted(resolved.env, resolved.config.with_)

    plain, shared = lines("ddp", "fused-loss:chunk=512"), lines("ddp", "fused-loss:chunk=512", "context:size=4")
    for before, after in zip(plain, shared, strict=True):
        assert before.keys() < after.keys()
        for name, values in before.items():
            assert after[name] == pytest.approx(values / 4), name
    assert set(shared[0]) - set(plain[0]) == {"exchange"}
    assert lines("ddp", "context:size=4,kind=gather")[0]["saved.whole keys"] == 2 * 512 * 4 * 16 * 3 / 4


def test_a_chunk_of_the_loss_is_full_later():
    """Each rank fills its own: only a micro-batch of so many more tokens needs a whole chunk."""
    line = Line("chunk", "", 1.0, "byte", "head", True, most_tokens=100)
    book = apply_rules([line], FLOAT32, [cut(tagged("per-token"), "cp", 4, "")])
    assert [peak_memory(book, tokens).bytes for tokens in (200, 400, 800)] == [50, 100, 100]


# Some queries of a row, as `gather` asks.


@pytest.mark.parametrize("name", ["masked", "sdpa"])
def test_some_queries_of_a_row_are_those_of_all(name):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 12, 4, 8), torch.randn(2, 12, 2, 8), torch.randn(2, 12, 2, 8)
    k[0, 6, 0, 0] = float("nan")  # the second document of the first row, from its second token on
    ids = torch.tensor([[0] * 5 + [1] * 7, [0] * 3 + [1] * 4 + [2] * 5])
    documents = Documents(torch.tensor([0, 5, 12, 15, 19, 24, 24]), ids, 7, False)
    whole = attention.ATTENTIONS[name](q, k, v, documents)
    for first, last in ((0, 4), (4, 8), (8, 12), (3, 12)):
        part = attention.FROM[name](q[:, first:last], k[:, :last], v[:, :last], documents)
        torch.testing.assert_close(part, whole[:, first:last], equal_nan=True)
    assert whole[0, :6].isfinite().all() and whole[0, 6:].isnan().all() and whole[1].isfinite().all()


def by_lengths(q, k, v, queries, keys, *_, **__):
    """torch's `varlen_attn`, plainly: causal, and the queries of a document are the last of its tokens."""
    out = torch.zeros_like(q)
    for a, b, c, d in zip(queries[:-1], queries[1:], keys[:-1], keys[1:], strict=True):
        if b > a:
            ids = torch.zeros(1, d - c, dtype=torch.int32)
            one = Documents(torch.tensor([0, d - c]), ids, int(d - c), True)
            out[a:b] = attention.masked_from(q[None, a:b], k[None, c:d], v[None, c:d], one)[0]
    return out


def test_where_documents_begin_for_some_queries():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 12, 4, 8), torch.randn(3, 12, 2, 8), torch.randn(3, 12, 2, 8)
    ids = torch.tensor([[0] * 5 + [1] * 7, [0] * 12, [0] * 3 + [1] * 4 + [2] * 5])
    documents = Documents(torch.tensor([0, 5, 12, 24, 27, 31, 36, 36]), ids, 12, False)
    for first, last in ((0, 4), (4, 8), (8, 12), (3, 12), (0, 12)):
        parts = q[:, first:last], k[:, :last], v[:, :last], documents
        with mock.patch.object(attention_varlen, "varlen_attn", by_lengths):
            torch.testing.assert_close(attention_varlen.attend_from(*parts), attention.masked_from(*parts))


# What it refuses.


def packed_ring(box):
    """A ring that is given rows of several documents all the same."""
    job = shared_rows(box, RING | {"ddp": {}}, packed=False)
    batch = micro(job)
    try:
        job.loss(job.place(dataclasses.replace(batch, documents=batch.documents._replace(single=False))))
    except NeedsError as error:
        return error.found
    return ""


def test_a_ring_refuses_rows_of_several_documents(box, pair):
    assert pair(packed_ring, box) == ["rows of several documents"] * 2
