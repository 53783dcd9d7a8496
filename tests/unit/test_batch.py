"""One batch by hand: labels shifted inside documents, nothing learnt across a boundary, padding alone."""

import numpy as np
import pytest
import torch

from optrush.data.batch import IGNORE, collate
from optrush.data.document import Document

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
