"""Every layout: all samples, no row too full, the fill it promises, and no length that has its place in the epoch."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optrush.data import packing
from optrush.data.packing import Fitted, Packed, Padded, Sorted, Wrapped, deal, survey

quick = settings(database=None, max_examples=100)
T = 16
ALL = [Padded(), Fitted(), Sorted(), Wrapped(0), Wrapped(1), Wrapped(5), Packed()]
lengths = st.lists(st.integers(1, T), min_size=1, max_size=60).map(np.array)


def bits(*seed):
    return np.random.PCG64(np.random.SeedSequence(seed))


def lognormal(n, T, median=400, seed=0):
    drawn = np.random.default_rng(seed).lognormal(np.log(median), 1, n)
    return np.clip(drawn.astype(np.int64), 1, T)


def uniform(n, T, seed=0):
    return np.random.default_rng(seed).integers(1, T + 1, n)


def per_row(rows):
    return [list(zip(*(c[a:b].tolist() for c in rows[1:]))) for a, b in zip(rows.starts, rows.starts[1:])]


@quick
@given(lengths, st.sampled_from(ALL), st.integers(1, 6), st.data())
def test_every_token_is_learnt_once_and_no_row_is_too_full(lengths, layout, rows, data):
    before = data.draw(st.integers(0, rows - 1))
    placed = layout.place(lengths, T, rows, before, bits(1))
    seen = [np.zeros(n, int) for n in lengths]
    for row in per_row(placed):
        assert row and sum(last - first for _, first, _, last in row) <= T
        assert not layout.one_doc or len(row) == 1
        for sample, first, fresh, last in row:
            assert 0 <= first <= fresh < last <= lengths[sample]
            assert not layout.uncut or (first, fresh, last) == (0, 0, lengths[sample])
            seen[sample][fresh:last] += 1
    assert all((count == 1).all() for count in seen)
    assert placed.tokens().tolist() == [sum(p[3] - p[1] for p in row) for row in per_row(placed)]
    assert placed.squares().tolist() == [sum((p[3] - p[1]) ** 2 for p in row) for row in per_row(placed)]
    again = layout.place(lengths, T, rows, before, bits(1))
    assert all((a == b).all() for a, b in zip(placed, again))


@quick
@given(lengths)
def test_best_fit_is_what_a_plain_best_fit_decreasing_makes(lengths):
    left = []
    for n in sorted(lengths.tolist(), reverse=True):
        fits = [i for i, room in enumerate(left) if room >= n]
        if fits:
            left[min(fits, key=left.__getitem__)] -= n
        else:
            left.append(T - n)
    assert sorted(T - Packed().place(lengths, T, 1, 0, bits(0)).tokens()) == sorted(left)


@pytest.mark.parametrize("draw", [lognormal, uniform])
def test_packing_fills_rows_and_keeps_the_order_random(draw):
    lengths, T = draw(100_000, 4096), 4096
    fills, order = [], []
    for window in np.array_split(lengths, 2):
        placed = Packed().place(window, T, 16, 0, bits(len(fills)))
        fills.append((window.sum(), len(placed) * T))
        order.append(window[placed.samples])
    assert sum(t for t, _ in fills) / sum(s for _, s in fills) >= 0.995
    found = np.concatenate(order)
    by_document = np.corrcoef(found, np.arange(len(found)))[0, 1]
    assert abs(by_document) < 4 / np.sqrt(len(found))
    starts = Packed().place(np.array_split(lengths, 2)[0], T, 16, 0, bits(0)).starts[:-1]
    longest = np.maximum.reduceat(order[0], starts)
    assert abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 4 / np.sqrt(len(longest))


def test_sorted_steps_are_alike_in_length_and_shuffled():
    lengths = lognormal(1600, 2048)
    for before, rows in ((0, 16), (5, 16)):
        placed = Sorted().place(lengths, 2048, rows, before, bits(3))
        used = placed.tokens()
        head = (rows - before) % rows
        steps = np.split(used, range(head, len(used), rows))
        ranges = sorted((s.min(), s.max()) for s in steps if len(s))
        assert all(a[1] <= b[0] for a, b in pairwise(ranges))
        means = np.array([s.mean() for s in steps if len(s)])
        assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.4
    assert packing.padded_slots(used, 4, 2048) < 1.2 * used.sum()


def test_wrapping_repeats_the_end_of_what_it_cuts():
    placed = Wrapped(2).place(np.array([5, 9, 3]), 8, 1, 0, bits(0))
    assert per_row(placed) == [[(0, 0, 0, 5), (1, 0, 0, 3)], [(1, 1, 3, 9)], [(2, 0, 0, 3)]]
    assert per_row(Wrapped(0).place(np.array([20]), 8, 1, 0, bits(0))) == [
        [(0, 0, 0, 8)], [(0, 8, 8, 16)], [(0, 16, 16, 20)],
    ]  # fmt: skip


@quick
@given(st.lists(st.integers(1, 100), min_size=1, max_size=8), st.integers(1, 4), st.integers(0, 5))
def test_dealing_gives_each_rank_as_many_rows(costs, ranks, seed):
    costs = costs * ranks
    hands = deal(costs, ranks)
    assert sorted(r for hand in hands for r in hand) == list(range(len(costs)))
    assert {len(hand) for hand in hands} == {len(costs) // ranks}
    plain = max(sum(costs[r::ranks]) for r in range(ranks))
    assert max(sum(costs[r] for r in hand) for hand in hands) <= plain + max(costs)


def test_ranks_exchange_rows_until_their_costs_are_equal():
    """The greedy choice alone gives one rank 23 and the other 19."""
    costs = [9, 9, 7, 7, 7, 3]
    assert [sum(costs[r] for r in hand) for hand in deal(costs, 2)] == [21, 21]


def test_ranks_get_like_costs():
    """8 ranks with 4 rows each of documents of chat lengths: 1 % apart at most, on average; dealt in turn, 1 %."""
    from optrush.models.shapes import SHAPES, ModelShape

    shape = ModelShape.read(SHAPES["llama-3.2-1b"])
    placed = Packed().place(lognormal(60_000, 2048, 250), 2048, 32, 0, bits(0))
    costs = np.array([shape.flops(int(t), int(s)) for t, s in zip(placed.tokens(), placed.squares())])
    dealt, turns = [], []
    for step in costs[: len(costs) // 32 * 32].reshape(-1, 32):
        sums = np.array([step[hand].sum() for hand in deal(step, 8)])
        dealt.append(sums.max() / sums.mean() - 1)
        turns.append(step.reshape(4, 8).sum(0).max() / step.reshape(4, 8).sum(0).mean() - 1)
    assert np.mean(dealt) < 0.002 < 0.005 < np.mean(turns)
    assert np.quantile(dealt, 0.99) < 0.01


def test_a_survey_counts_what_the_layouts_make():
    lengths = np.concatenate([lognormal(5000, 4096, 200), [5000]])
    found = {s.name: s for s in survey(lengths, 1024, 16, 4)}
    assert set(found) == {"pad", "sort-by-length", "wrap", "packing"}
    assert found["pad"].tokens == np.minimum(lengths, 1024).sum() and found["wrap"].tokens == lengths.sum()
    assert found["pad"].fill < 0.6 < 0.85 < found["sort-by-length"].fill
    assert found["packing"].fill > 0.99 < found["wrap"].fill
    assert found["pad"].squares == found["packing"].squares < found["wrap"].squares
    assert found["packing"].rows * 1024 == found["packing"].slots
