"""ddp and fsdp beside the golden list: what each rank holds, buckets, ranks without targets, a window cut short."""

from __future__ import annotations

import functools
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

from meshes import further
from optrush.techniques import ddp

from golden.make_golden import CASES
from trials import assembled, first_gradients, furthest, golden_run, steps, weights

KINDS = {
    "ddp": {"ddp": {}},
    "fsdp2": {"fsdp": {"stage": 2}},
    "fsdp3": {"fsdp": {}},
    "fsdp3-each": {"fsdp": {"sync": "each"}},
}


def share_of_the_model(box, name, with_):
    """(this rank's numbers of weights, states; whole numbers of weights), after two steps."""
    job = assembled(golden_run(box, CASES[name], packed=True, **with_))
    list(steps(job, 2))
    states = sum(s.numel() for by_name in job.optimizer.state().values() for s in by_name.values() if s.dim())
    return sum(t.local.numel() for t in job.trained), states, sum(t.parameter.numel() for t in job.trained)


@pytest.mark.parametrize("name", further(["tied", "untied"], 1))
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_rank_holds(box, pair, name, kind):
    for mine, states, whole in pair(share_of_the_model, box, name, KINDS[kind]):
        assert mine == (whole if kind == "ddp" else whole // 2)
        assert states == 2 * mine


def gathered(box, stage):
    """Whether block 0 is whole when block 1 has run, and everything is cut again after an evaluation."""
    sets = [f"data.eval={box}/held.jsonl"]
    job = assembled(golden_run(box, packed=True, sets=sets, fsdp={"stage": stage}))
    blocks, seen = job.model.blocks, []
    blocks["1"].register_forward_hook(lambda *_: seen.append(isinstance(blocks["0"].o.weight, DTensor)))
    first_gradients(job)
    for batch in job.evaluation:
        job.eval_loss([batch])
    return not any(seen[:4]), all(isinstance(p, DTensor) for p in job.model.parameters())


@pytest.mark.parametrize("stage", [2, 3])
def test_stages_differ_in_what_stays_gathered(box, pair, stage):
    assert pair(gathered, box, stage) == [(stage == 2, True)] * 2


def reduced(box, with_):
    """Before each of the step's micro-batches: whether gradients of the one before are there, reduced."""
    job = assembled(golden_run(box, rows=1, packed=True, **with_))
    seen, inner = [], job.loss
    job.loss = lambda batch: seen.append([t.grad is not None for t in job.trained]) or inner(batch)
    first_gradients(job)
    return [all(flags) if any(flags) else None for flags in seen]


def test_when_gradients_are_reduced(box, pair):
    assert pair(reduced, box, KINDS["fsdp3"]) == [[None] * 4] * 2, "whole ones are held inside until the last"
    assert pair(reduced, box, KINDS["fsdp3-each"]) == [[None, True, True, True]] * 2


def bucketed(box, most_bytes):
    small = functools.partial(Small, most_bytes=most_bytes)
    with mock.patch.object(ddp, "Buckets", small):
        job = assembled(golden_run(box, CASES["chat"], packed=True, ddp={}))
        loss, grads = first_gradients(job)
        return [e.count for e in job.applied if e.stage == "wrap_step"], loss, grads


class Small(ddp.Buckets):
    """Buckets of other sizes than the whole MiB that the option offers."""

    def __init__(self, trained, group, _, *, most_bytes):
        super().__init__(trained, group, most_bytes)


@pytest.mark.parametrize("most_bytes", further([20_000, 1, 1 << 30], 1))
def test_any_size_of_bucket(box, pair, most_bytes):
    want_loss, want = first_gradients(assembled(golden_run(box, CASES["chat"], packed=True)))
    for count, loss, grads in pair(bucketed, box, most_bytes):
        assert count == [{1: len(want), 1 << 30: 1}.get(most_bytes, count[0])]
        assert most_bytes != 20_000 or 1 < count[0] < len(want)
        assert loss == pytest.approx(want_loss, rel=1e-6)
        assert furthest(grads, want) < 1e-5


def short(box, with_):
    """Five documents in a step of 16 rows: most of every rank's rows are empty."""
    sets = ["data.max_samples=5", "train.steps=null", "train.epochs=1"]
    job = assembled(golden_run(box, CASES["chat"], rows=1, sets=sets, **with_))
    batches = next(job.batches)
    terms = job.all_reduce_int(sum(b.n_terms for b in batches))
    job.set_step(1)
    loss = job.forward_backward(batches, terms)
    norm, skipped = job.optimizer_step()
    return [b.n_terms for b in batches], loss.item(), norm.item(), bool(skipped), weights(job)


@pytest.mark.parametrize("kind", further(["ddp", "fsdp3", "fsdp3-each", "fsdp2"], 1))
def test_rows_without_targets(box, pair, kind):
    _, want_loss, want_norm, _, want = short(box, {})
    found = pair(short, box, KINDS[kind])
    counts = [n for n, *_ in found]
    assert [len(n) for n in counts] == [8, 8] and all(n[-1] == 0 for n in counts)
    assert sum(n > 0 for c in counts for n in c) == 5
    for _, loss, norm, skipped, after in found:
        assert not skipped and loss == pytest.approx(want_loss, rel=1e-6) and norm == pytest.approx(want_norm, rel=1e-5)
        assert furthest(after, want) < 1e-4


def poisoned(box, with_):
    """One rank's gradients become infinite in the second of three steps."""
    job = assembled(golden_run(box, packed=True, **with_))
    list(steps(job, 1))
    before = weights(job)
    inner = job.loss
    if job.world.rank == 1:
        job.loss = lambda batch: inner(batch) * float("inf")
    ((_, _, bad),) = steps(job, 1, first=2)
    same = all(torch.equal(w, before[name]) for name, w in weights(job).items())
    job.loss = inner
    ((_, _, worse),) = steps(job, 1, first=3)
    return bad, same, worse, torch.stack([w.sum() for w in weights(job).values()]).isfinite().all().item()


@pytest.mark.parametrize("kind", further(["ddp", "fsdp3", "fsdp3-each", "fsdp2"], 1))
def test_a_bad_rank_skips_the_update_on_all(box, pair, kind):
    assert pair(poisoned, box, KINDS[kind]) == [(True, True, False, True)] * 2


def cut_short(box, with_):
    """An exception in the middle of a window; then the window again, where that is allowed."""
    job = assembled(golden_run(box, packed=True, **with_))
    batches = next(job.batches)
    terms = job.all_reduce_int(sum(b.n_terms for b in batches))
    inner, calls = job.loss, []

    def failing(batch):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        return inner(batch)

    job.loss = failing
    try:
        job.forward_backward(batches, terms)
    except MemoryError:
        job.loss = inner
    try:
        loss = job.forward_backward(batches, terms)
    except AssertionError as error:
        return str(error)
    return loss.item(), {t.name: t.grad.clone() for t in job.trained}


def test_a_window_is_taken_again_or_refused(box, pair):
    want_loss, want = first_gradients(assembled(golden_run(box, packed=True)))
    for loss, grads in pair(cut_short, box, KINDS["ddp"]):
        assert loss == pytest.approx(want_loss, rel=1e-6)
        assert furthest(grads, want) < 1e-5
    for said in pair(cut_short, box, KINDS["fsdp3"]):
        assert "resume from a checkpoint" in said
