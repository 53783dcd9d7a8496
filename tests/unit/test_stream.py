"""Every sample once an epoch, the same steps for any ranks, micro-batches and workers, any step from its number."""

import hashlib
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshes import further
from optrush.data import pool, sampler, tokenize
from optrush.data.packing import Fitted, Packed, Padded, Sorted, Wrapped
from optrush.data.sampler import (
    LiveStream,
    Loading,
    Stream,
    close_workers_after,
    epoch_order,
    evaluation,
    prefetched,
    stream_of,
)
from optrush.data.samples import Counts, SampleChunk, permutation
from optrush.data.schema import Document
from optrush.errors import ConfigError, DataError, RunError

from trials import alive

quick = settings(database=None, max_examples=40)
T = 16


class Listed:
    """Samples whose tokens are their number."""

    parts, fingerprint, tokenized = 1, "", True

    def __init__(self, lengths, spans=None):
        self.held, self.spans = np.array(lengths, np.int64), spans or ((len(lengths), 1.0),)

    def __len__(self):
        return len(self.held)

    def lengths(self):
        return self.held

    def targets(self):
        return self.held - 1

    def documents(self, i):
        n = int(self.held[i])
        return (Document(np.full(n, i, np.int32), np.arange(n) > 0),)


class Pairs(Listed):
    parts = 2

    def documents(self, i):
        n = int(self.held[i])
        return tuple(Document(np.full(m, i, np.int32), np.arange(m) > 0) for m in (n // 2, n - n // 2))


class Rowed(Listed):
    """The same as rows that are read when they are needed."""

    tokenized, most_truncated, counts = False, 1.0, Counts()

    def read(self, numbers):
        return SampleChunk([(n, self.documents(n)) for n in numbers], len(numbers))


sources = st.lists(st.integers(1, T), min_size=1, max_size=40).map(Listed)
layouts = st.sampled_from([Padded(), Fitted(), Sorted(7), Packed(), Packed(5), Wrapped(1), Wrapped(0, 9)])
WHOLE = [Padded(), Fitted(), Sorted(7), Packed(), Packed(5)]


def stream(source, rows=4, seed=0, layout=None, shuffle=True):
    return Stream(source, layout or Packed(), T=T, rows=rows, seed=seed, shuffle=shuffle)


def samples(rows):
    return [sample for row in rows for sample, _ in row]


@quick
@given(sources, st.integers(1, 6), st.integers(0, 9), st.sampled_from(WHOLE), st.booleans(), st.integers(1, 3))
def test_every_sample_once_an_epoch(source, rows, seed, layout, shuffle, epochs):
    made = stream(source, rows, seed, layout, shuffle)
    plan = made.plan(epochs=epochs)
    seen = [samples([row]) for k in range(plan.steps) for row in made.step(k, plan)]
    n, at = len(source), 0
    for _ in range(epochs):
        epoch = []
        while len(epoch) < n:
            epoch += seen[at]
            at += 1
        assert sorted(epoch) == list(range(n))
    assert not any(seen[at:]) and plan.rows == at
    totals = made.totals(plan, rows)
    assert (totals.epochs, totals.tokens) == (pytest.approx(epochs, abs=epochs), epochs * source.held.sum())
    assert totals.targets == epochs * (source.held - 1).sum()


@quick
@given(sources, st.integers(0, 9), layouts, st.sampled_from([(1, 1), (1, 4), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1)]))
def test_the_ranks_together_hold_the_step_whatever_their_number(source, seed, layout, cut):
    ranks, micro_rows = cut
    made = stream(source, 8, seed, layout)
    plan = made.plan(epochs=2)
    for k in range(plan.steps):
        step = made.step(k, plan)
        each = [made.batches(k, plan, rank=rank, ranks=ranks, micro_rows=micro_rows) for rank in range(ranks)]
        assert {len(batches) for batches in each} == {8 // (ranks * micro_rows)}
        flat = [batch for batches in each for batch in batches]
        assert sorted(s for batch in flat for s in batch.samples) == sorted(samples(step))
        assert {len(batch.tokens) for batch in flat} == {micro_rows}
        assert {batch.documents.starts.shape for batch in flat} == {(micro_rows * plan.widest + 1,)}
        assert sum(batch.n_tokens for batch in flat) == sum(len(d) for row in step for _, d in row)
        assert all(batch.documents.single == (layout.one_doc or not layout.isolated) for batch in flat)
        rows = sorted(row for batch in flat for row in batch.tokens.tolist())
        whole = made.batches(k, plan, rank=0, ranks=1, micro_rows=8)[0]
        assert rows == sorted(whole.tokens.tolist())


@quick
@given(sources, st.integers(1, 6), st.integers(0, 9), layouts, st.integers(1, 12), st.data())
def test_a_step_depends_on_its_number_alone(source, rows, seed, layout, steps, data):
    first = stream(source, rows, seed, layout)
    plan = first.plan(steps=steps)
    assert plan.steps == steps
    k = data.draw(st.integers(0, steps - 1))
    for j in range(k):
        first.step(j, plan)
    fresh = stream(source, rows, seed, layout)
    assert first.position(k) == fresh.seek(k, 0)
    assert ids(fresh.step(k, plan)) == ids(first.step(k, plan))


@quick
@given(sources, st.integers(0, 9), layouts, st.floats(0.3, 2.7))
def test_totals_without_walking(source, seed, layout, epochs):
    made = stream(source, 4, seed, layout)
    plan = made.plan(epochs=epochs)
    totals = made.totals(plan, 2)
    steps = [made.batches(k, plan, rank=0, ranks=1, micro_rows=2) for k in range(plan.steps)]
    again = 0 if layout.isolated else sum(b.n_tokens for step in steps for b in step) - totals.tokens
    assert totals.tokens + again == sum(b.n_tokens for step in steps for b in step) and 0 <= again <= plan.rows
    if layout.isolated:
        assert totals.targets == sum(b.n_targets for step in steps for b in step)
    assert totals.slots >= totals.tokens and (layout.pad_to_longest or totals.slots == plan.steps * 4 * T)


def ids(rows):
    return [[(n, d.ids.tolist(), d.targets.tolist()) for n, d in row] for row in rows]


def test_a_step_spans_epochs_and_only_the_last_is_partly_empty():
    made = stream(Listed([T, T, T]), rows=2, layout=Padded())
    assert made.plan(steps=4)[:2] == (4, 8)
    assert made.plan(epochs=1)[:2] == (2, 3)
    assert made.plan(epochs=1.5)[:2] == (3, 5)
    assert made.plan(epochs=0.01)[:2] == (1, 1)
    assert [len(row) for row in made.step(1, made.plan(epochs=1))] == [1, 0]


def test_wrapped_rows_are_one_document_whose_positions_run_on():
    made = stream(Listed([5, 9, 30]), rows=3, layout=Wrapped(2), shuffle=False)
    (batch,) = made.batches(0, made.plan(epochs=1), rank=0, ranks=1, micro_rows=3)
    assert batch.positions.tolist()[0] == list(range(T)) and batch.documents.single
    assert (batch.documents.ids == 0).all()
    assert batch.tokens[0].tolist() == [0] * 5 + [1] * 9 + [2] * 2
    assert (batch.labels[0] == -100).nonzero().flatten().tolist() == [4, 13, 15]  # before a beginning, and at the end
    assert (batch.labels[1] == -100).nonzero().flatten().tolist() == [0, 15]  # the repeated token, and the end
    assert batch.n_targets == 4 + 8 + 29 and batch.attended == 3 * T * T
    assert batch.n_tokens == 5 + 9 + 30 + 2 * 2


def test_a_snug_batch_is_as_wide_as_its_longest_row():
    made = Stream(Listed([5, 100, 70, 20, 300]), Fitted(), T=512, rows=5, seed=0, shuffle=False)
    batches = made.batches(0, made.plan(epochs=1), rank=0, ranks=1, micro_rows=1)
    assert [b.tokens.shape[1] for b in batches] == [64, 128, 128, 64, 320]


def test_a_pair_is_never_torn():
    source = Pairs([6, 9, 12, 3, 16, 2, 8])
    for layout in (Packed(), Padded()):
        made = stream(source, rows=2, layout=layout)
        plan = made.plan(epochs=1)
        for k in range(plan.steps):
            step = made.step(k, plan)
            for row in step:
                found = samples([row])
                assert found[::2] == found[1::2]
            (batch,) = made.batches(k, plan, rank=0, ranks=1, micro_rows=2)
            assert not batch.documents.single
            assert batch.attended == sum(len(d) ** 2 for row in step for _, d in row)


def test_orders_differ_by_seed_and_epoch_and_are_pinned():
    spans = ((50, 1.0),)
    orders = [tuple(epoch_order(spans, seed, epoch)) for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(orders)) == 4 and tuple(range(50)) not in orders
    assert epoch_order(spans, 0, 3, shuffle=False).tolist() == list(range(50))
    assert permutation(8, 0, 0).tolist() == PINNED  # another numpy must not reorder a run that is resumed
    lengths = [1 + i * 7 % T for i in range(200)]
    order = [s for k in range(9) for s in samples(stream(Listed(lengths)).step(k, stream(Listed(lengths)).plan(9)))]
    assert hashlib.sha256(np.array(order).tobytes()).hexdigest()[:16] == PINNED_ROWS


PINNED = [3, 2, 1, 6, 0, 7, 4, 5]
PINNED_ROWS = "b46e91ab8e2d8d9a"


def test_weights_say_how_often_a_source_is_read():
    spans = ((10, 2.0), (8, 0.5), (4, 1.0))
    for epoch in range(4):
        order = epoch_order(spans, 3, epoch)
        counts = np.bincount(order, minlength=22)
        assert (counts[:10] == 2).all() and (counts[18:] == 1).all()
        assert counts[10:18].sum() == 4 and counts[10:18].max() == 1
    both = np.concatenate([epoch_order(spans, 3, epoch) for epoch in (0, 1)])
    assert (np.bincount(both, minlength=22)[10:18] == 1).all()  # the second epoch takes the other half
    made = stream(Listed([1 + i % T for i in range(22)], spans))
    assert made.samples == 28 and made.totals(made.plan(epochs=1), 4).epochs == 1


@pytest.mark.parametrize("packed", [False, True])
def test_evaluation_reads_every_document_once_on_any_number_of_ranks(packed):
    source = Listed([1 + i * 7 % T for i in range(150)])
    seen = []
    for ranks, micro_rows in ((1, 1), (1, 5), (2, 3), (4, 2)):
        each = [
            evaluation(source, T=T, micro_rows=micro_rows, rank=rank, ranks=ranks, packed=packed)
            for rank in range(ranks)
        ]
        batches = [list(part) for part in each]
        assert {len(part) for part in batches} == {each[0].batches}
        flat = [batch for part in batches for batch in part]
        assert sorted(s for batch in flat for s in batch.samples) == list(range(150))
        assert {(batch.tokens.shape, batch.documents.starts.shape) for batch in flat} == {
            ((micro_rows, T), flat[0].documents.starts.shape)
        }
        held = sum(bool((row != 0).any() or 0 in batch.samples) for batch in flat for row in batch.tokens)
        assert each[0].documents == 150 and held >= each[0].rows
        seen.append((each[0].rows, sum(batch.n_targets for batch in flat)))
    assert len(set(seen)) == 1
    assert (source.held.sum() / T <= seen[0][0] < 90) if packed else seen[0][0] == 150


# --- who makes the batches changes nothing


def flat(batches):
    return [(
        b.tokens.tolist(), b.labels.tolist(), b.positions.tolist(), b.documents.starts.tolist(), b.samples,
    ) for step in batches for b in step]  # fmt: skip


def trained(made, plan, done, ranks=1, workers=0):
    each = [
        list(made().run(plan, done, rank=r, ranks=ranks, micro_rows=1, loading=Loading(workers))) for r in range(ranks)
    ]
    return [[sorted(b.samples) for rank in each for b in rank[k]] for k in range(len(each[0]))], flat(each[0])


@pytest.mark.parametrize(("layout", "live"), further([
    (Packed(11), False), (Wrapped(1, 10), True), (Packed(11), True), (Wrapped(1, 10), False),
    *((layout, live) for layout in (Sorted(13), Padded()) for live in (False, True)),
], 2))  # fmt: skip
def test_any_index_any_ranks_any_workers(layout, live):
    lengths = [1 + i * 7 % T for i in range(60)]

    def made():
        if live:
            return LiveStream(Rowed(lengths), layout, T=T, rows=4, seed=1)
        return stream(Listed(lengths), seed=1, layout=layout)

    plan = made().plan(steps=12)
    whole, batches = trained(made, plan, 0)
    assert trained(made, plan, 0, workers=2) == (whole, batches)
    by_step = [sorted(s for part in step for s in part) for step in whole]
    walked = made()
    walk = walked.run(plan, 0, rank=0, ranks=1, micro_rows=1, loading=Loading())
    for k in range(12):
        ranks, workers = ((1, 0), (2, 2), (4, 0))[k % 3]
        position = walked.position(k)

        def resumed(k=k, position=position):
            again = made()
            assert again.seek(k, position) == position
            return again

        found, _ = trained(resumed, plan, k, ranks, workers if k < 3 else 0)
        assert [sorted(s for part in step for s in part) for step in found] == by_step[k:]
        next(walk)


@pytest.mark.parametrize("layout", [Packed(11), Sorted(13), Padded(), Wrapped(1, 10)])
def test_live_rows_make_the_same_batches_as_cached_ones(layout):
    lengths = [1 + i * 7 % T for i in range(60)]
    live = LiveStream(Rowed(lengths), layout, T=T, rows=4, seed=1)
    cached = stream(Listed(lengths), seed=1, layout=layout)
    plan = cached.plan(steps=20)
    one = [samples(cached.step(k, plan)) for k in range(20)]
    steps = live.run(live.plan(steps=20), 0, rank=0, ranks=1, micro_rows=4, loading=Loading())
    assert [list(b.samples) for step in steps for b in step] == one


def test_a_live_window_is_small(monkeypatch, capsys):
    """The first step waits for it, and says so if that takes long."""
    monkeypatch.setattr(sampler, "LIVE_WINDOW", 200)
    monkeypatch.setattr(tokenize, "QUIET_S", 0.0)
    source = Rowed([3] * 1000)
    steps = stream_of(source, Packed(), T=T, rows=4, seed=1)
    assert stream_of(Listed([3] * 1000), Packed(), T=T, rows=4, seed=1).layout.window > 200 == steps.layout.window
    next(steps.run(steps.plan(steps=3), 0, rank=0, ranks=1, micro_rows=4, loading=Loading()))
    assert steps.counts.rows == 200
    assert "tokenising the first rows: 64 rows, " in capsys.readouterr().err
    assert stream_of(source, Sorted(13), T=T, rows=4, seed=1).layout == Sorted(13)


def test_live_rows_need_a_number_of_steps_and_something_in_them():
    live = LiveStream(Rowed([3, 4]), Packed(), T=T, rows=1, seed=0)
    with pytest.raises(ConfigError, match=r"train\.steps"):
        live.plan(epochs=1.0)

    class Empty(Rowed):
        def read(self, numbers):
            return SampleChunk([], len(numbers))

    with pytest.raises(DataError, match="no row gives a sample"):
        next(LiveStream(Empty([3, 4]), Packed(), T=T, rows=1, seed=0).run(
            live.plan(steps=1), 0, rank=0, ranks=1, micro_rows=1, loading=Loading()
        ))  # fmt: skip


# --- a worker that fails (R13)


def test_what_fails_in_a_worker_is_raised_here():
    def refuses(n):
        raise DataError("a row", f"row {n} is bad", "fix it")

    def breaks(n):
        return 1 // (n - 3)

    for workers in (0, 2):
        with pytest.raises(DataError, match="row 0 is bad"):
            list(prefetched(refuses, range(4), Loading(workers)))
    with pytest.raises(RunError, match=r"a data worker failed: ZeroDivisionError.*test_stream\.py:\d+"):
        list(prefetched(breaks, range(9), Loading(2)))


def test_a_killed_worker_is_an_error_at_once():
    def mortal(n):
        if n == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return n

    def consume():
        items = prefetched(mortal, range(50), Loading(2))
        with close_workers_after(items):
            for _ in items:
                pass

    with pytest.raises(RunError, match=r"(?s)a data worker died .*--resume auto"):
        consume()


def workers():
    return [worker.pid for items in sampler._pools for worker in items.workers]


def test_workers_end_with_the_reading():
    items = prefetched(lambda n: n, range(50), Loading(2))
    with close_workers_after(items):
        assert next(items) == 0
        begun = workers()
        assert len(begun) == 2 and all(map(alive, begun))
    assert not workers() and not any(map(alive, begun))


def test_workers_end_with_the_reading_whoever_still_holds_them():
    """Also where they do not end when asked."""

    def stops(n):
        if n == 1:  # the second worker's first
            os.kill(os.getpid(), signal.SIGSTOP)
        return n

    for make in (lambda n: n, stops):
        items = prefetched(make, range(50), Loading(2))
        begun = workers()
        with close_workers_after(iter([])):  # nothing here closes `items`
            assert next(items) == 0
            time.sleep(0.3)  # until one of them has stopped
        assert len(begun) == 2 and not any(map(alive, begun))
        items.close()


LEFT = """
from optrush.data.sampler import Loading, prefetched
items = prefetched(int, range(50), Loading(2))
print(next(items))
"""


def test_workers_that_are_left_end_with_the_interpreter():
    done = subprocess.run([sys.executable, "-c", LEFT], timeout=300, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_workers_leave_signals_to_the_trainer():
    def told(n):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            os.kill(os.getpid(), number)
        return n

    assert list(prefetched(told, range(4), Loading(2))) == [0, 1, 2, 3]


def test_a_worker_that_has_not_begun_leaves_signals_to_the_trainer(monkeypatch):
    begin = pool._leave_signals
    monkeypatch.setattr(pool, "_leave_signals", lambda parent: time.sleep(0.5) or begin(parent))
    items = prefetched(lambda n: n, range(4), Loading(2))
    for worker in workers():
        os.kill(worker, signal.SIGTERM)
    assert list(items) == [0, 1, 2, 3]


def test_a_forked_process_does_not_end_the_workers_of_its_parent():
    items = prefetched(lambda n: n, range(8), Loading(2))
    assert next(items) == 0 and len(workers()) == 2
    if (pid := os.fork()) == 0:
        items.close()
        with close_workers_after(items):
            pass
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0 and len(workers()) == 2
    with close_workers_after(items):
        assert list(items) == [*range(1, 8)]
    assert not workers()


def test_a_late_batch_whose_worker_has_ended():
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert "its data workers are busy" in sampler._late(60.0, [ended.pid])
