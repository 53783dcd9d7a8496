"""Rows are never over-full, documents are taken strictly in order, and a step stops only where it must."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optrush.data.pack import best_fit, single, taken

quick = settings(database=None, deadline=None, max_examples=200)
T = 16
lengths = st.lists(st.integers(1, T), max_size=60)


@quick
@given(lengths, st.integers(0, 5), st.integers(1, 6), st.sampled_from([single, best_fit]))
def test_rows_hold_the_next_documents_and_no_row_too_many(lengths, start, rows, fill):
    start = min(start, len(lengths))
    placed = fill(lengths, start, rows, T)
    assert len(placed) == rows
    assert sorted(i for row in placed for i in row) == list(range(start, start + taken(placed)))
    assert all(sum(lengths[i] for i in row) <= T for row in placed)
    assert all(row == sorted(row) for row in placed)
    after = start + taken(placed)
    if after < len(lengths):
        if fill.single:
            assert all(len(row) == 1 for row in placed)
        else:
            assert all(sum(lengths[i] for i in row) + lengths[after] > T for row in placed)


@quick
@given(lengths, st.integers(1, 6), st.sampled_from([single, best_fit]))
def test_a_step_made_again_from_its_own_documents_is_the_same(lengths, rows, fill):
    placed = fill(lengths, 0, rows, T)
    n = taken(placed)
    assert fill(lengths[:n], 0, rows, T) == placed
    assert fill([7, 3, *lengths], 2, rows, T) == [[i + 2 for i in row] for row in placed]


def test_the_tightest_row_is_taken():
    assert best_fit([10, 12, 4, 6], 0, 2, T) == [[0, 3], [1, 2]]
    assert best_fit([8, 8, 9, 1], 0, 2, T) == [[0, 1], [2, 3]]
    assert best_fit([8, 9, 9, 1], 0, 2, T) == [[0], [1]]  # the third fits nowhere: the fourth must wait for it
    assert single([8, 1, 1], 0, 2, T) == [[0], [1]]
    assert single([8], 0, 2, T) == [[0], []]


@pytest.mark.parametrize("fill", [single, best_fit])
@pytest.mark.parametrize("n", [0, T + 1])
def test_a_document_that_fits_no_row_is_no_endless_loop(fill, n):
    with pytest.raises(AssertionError, match="longer than a row, or empty"):
        fill([3, n], 0, 2, T)
