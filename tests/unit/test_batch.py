"""One batch by hand: labels shifted inside documents, nothing learnt across a boundary, padding alone."""

import numpy as np
import pytest
import torch

from optrush.data.batch import IGNORE, collate
from optrush.data.schema import Document

_ = IGNORE


def document(ids, targets):
    return Document(np.array(ids, np.int32), np.array(targets, bool))


A = document([1, 2, 3], [0, 1, 1])
B = document([4, 5], [0, 1])
C = document([6, 7, 8, 9], [0, 0, 1, 0])


def test_a_batch_by_hand():
    batch = collate([[(10, A), (11, B)], [(12, C)], []], 6, single=False, most=8)
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 5, 0], [6, 7, 8, 9, 0, 0], [0] * 6]
    assert batch.labels.tolist() == [[2, 3, _, 5, _, _], [_, 8, _, _, _, _], [_] * 6]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 5]]
    assert batch.documents.ids.tolist() == [[0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 1, 1], [0] * 6]
    assert batch.documents.starts.tolist() == [0, 3, 5, 6, 10, 12, 18, 18, 18]
    assert (batch.n_targets, batch.n_terms, batch.n_tokens) == (4, 4, 9)
    assert batch.attended == 9 + 4 + 16
    assert batch.samples == (10, 11, 12)
    assert batch.documents.longest == 6 and not batch.documents.single
    assert (batch.tokens.dtype, batch.labels.dtype) == (torch.int64, torch.int64)
    assert (batch.positions.dtype, batch.documents.starts.dtype) == (torch.int32, torch.int32)


def test_a_target_that_is_first_is_not_learnt_by_the_document_before():
    loose = document([4, 5], [1, 1])
    batch = collate([[(0, A), (1, loose)]], 5, single=False, most=3)
    assert batch.labels.tolist() == [[2, 3, _, 5, _]]


def test_a_full_row_has_no_padding_and_an_empty_batch_no_terms():
    batch = collate([[(0, A), (1, A)]], 6, single=False, most=2)
    assert batch.documents.starts.tolist() == [0, 3, 6] and batch.documents.longest == 6
    empty = collate([[], []], 128, single=True, most=2)
    assert empty.n_terms == empty.n_targets == empty.n_tokens == empty.attended == 0 and empty.samples == ()
    assert empty.documents.starts.tolist() == [0, 128, 256] and empty.documents.single


def test_the_longest_document_is_rounded_up_to_a_bucket():
    long = document(list(range(70)), [0] + [1] * 69)
    assert collate([[(0, long), (1, long)]], 180, single=False, most=3).documents.longest == 128
    assert collate([[(0, long)]], 100, single=True, most=3).documents.longest == 100


def test_overflow_is_our_own_mistake():
    with pytest.raises(AssertionError, match="past its end"):
        collate([[(0, A), (1, C)]], 6, single=False, most=9)
    with pytest.raises(AssertionError, match="more documents"):
        collate([[(0, A), (1, B)]], 6, single=False, most=2)


# --- parts


def equal(a, b):
    """Everything of two batches, `starts` up to how far it is filled up."""
    for name in ("tokens", "labels", "positions"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert torch.equal(a.documents.ids, b.documents.ids) and a.documents.single == b.documents.single
    n = min(len(a.documents.starts), len(b.documents.starts))
    assert torch.equal(a.documents.starts[:n], b.documents.starts[:n])
    assert a.documents.starts.dtype == torch.int32
    for name in ("n_terms", "n_targets", "n_tokens", "attended", "samples", "rows"):
        assert getattr(a, name) == getattr(b, name), name


ROWS = [[(10, A), (11, B)], [(12, C)], [], [(13, A), (14, A)], [(15, B)]]


@pytest.mark.parametrize("most", [1, 2, 3, 4])
@pytest.mark.parametrize("isolated", [True, False])
def test_parts_are_the_batches_of_their_rows(most, isolated):
    whole = collate(ROWS, 6, single=False, most=3 * len(ROWS), isolated=isolated)
    parts = whole.parts(most)
    assert [len(p.tokens) for p in parts] == [len(ROWS[i : i + most]) for i in range(0, 5, most)]
    for i, part in zip(range(0, 5, most), parts):
        rows = ROWS[i : i + most]
        equal(part, collate(rows, 6, single=False, most=3 * len(rows), isolated=isolated))
        assert len(part.documents.starts) == 3 * len(rows) + 1, "room for as many documents a row"
        assert part.documents.longest == whole.documents.longest, "a bound"


def test_parts_of_parts_and_of_what_is_small_enough():
    whole = collate(ROWS, 6, single=False, most=12)
    assert whole.parts(5) == [whole] and whole.parts(99) == [whole]
    for a, b in zip([p for half in whole.parts(3) for p in half.parts(1)], whole.parts(1), strict=True):
        equal(a, b)
    for name in ("n_terms", "n_tokens", "attended"):
        assert sum(getattr(p, name) for p in whole.parts(2)) == getattr(whole, name)


def test_a_part_with_more_documents_than_its_share_of_the_room():
    """`most` of the whole may be less than the rows times the most of one row."""
    whole = collate([[(0, A), (1, B), (2, B)], [(3, C)]], 8, single=False, most=6)
    first, second = whole.parts(1)
    assert first.documents.starts.tolist() == [0, 3, 5, 7, 8] and second.documents.starts.tolist() == [0, 4, 8, 8]
