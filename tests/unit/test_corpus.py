"""The view on shards: pieces of at most T tokens, chosen rows, places, counts; the shard's file; random documents."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optrush.data import tokenize
from optrush.data.dataset import held_rows
from optrush.data.samples import Random, TokenShards, permutation, view
from optrush.data.schema import Document, RowLocation, bad_row
from optrush.data.tokenize import Builder
from optrush.errors import DataError

quick = settings(database=None, max_examples=40)
FILES = (Path("a.jsonl"), Path("b.jsonl"))


def document(n, learnt=None, base=0):
    targets = np.zeros(n, bool)
    targets[list(range(1, n)) if learnt is None else learnt] = True
    return Document(np.arange(base, base + n, dtype=np.int32), targets)


def shelf(*shards, most=None):
    """A shelf of shards, each a list of rows: documents, or the reason why there are none; row i is line 10 * i + 1."""
    made, line = TokenShards(FILES), 1
    for s, found in enumerate(shards):
        builder = Builder()
        for row in found:
            where = RowLocation(FILES[min(s, 1)], line)
            builder.add(where, min(s, 1), bad_row(where, row) if isinstance(row, str) else row)
            line += 10
        made.add(builder.shard(last=s + 1 == len(shards)), most)
    return made


def pieces(corpus):
    return [[d.ids.tolist() for d in corpus.documents(i)] for i in range(len(corpus))]


def same(a, b):
    return len(a) == len(b) and all((x.ids == y.ids).all() and (x.targets == y.targets).all() for x, y in zip(a, b))


rows = st.lists(
    st.tuples(st.integers(2, 40), st.sets(st.integers(1, 39))).map(
        lambda d: (document(d[0], sorted(i for i in d[1] if i < d[0]) or [1], base=d[0]),)
    ),
    min_size=1,
    max_size=12,
)


def fitted(row, T, how):
    """A row's pieces, and what is counted of it: (too long, truncated, dropped, targets lost)."""
    if len(row) <= T:
        return [row], [0, 0, 0, 0]
    begins = {"split": range(0, len(row), T), "truncate": [0], "drop": []}[how]
    found = [document(n := len(row.ids[at : at + T]), [i for i in range(1, n) if row.targets[at + i]], row.ids[at])
             for at in begins]  # fmt: skip
    kept = [piece for piece in found if piece.targets.any()]
    lost = row.targets.sum() - sum(piece.targets.sum() for piece in kept)
    return kept, [1, how == "truncate" and len(kept), (len(found) or 1) - len(kept), lost]


@quick
@given(st.lists(rows, min_size=1, max_size=4), st.integers(2, 45), st.sampled_from(["split", "drop", "truncate"]))
def test_a_view_is_what_fitting_each_row_gives(shards, T, how):
    """The vectorised way against one row at a time, over any shards."""
    counts, wanted, of = np.zeros(4, int), [], []
    for row, (whole,) in enumerate(d for found in shards for d in found):
        cut, more = fitted(whole, T, how)
        wanted += [(piece,) for piece in cut]
        of += [row] * len(cut)
        counts += more
    if not wanted:
        with pytest.raises(DataError, match="nothing is left"):
            view(shelf(*shards), T=T, how=how)
        return
    corpus = view(shelf(*shards), T=T, how=how)
    assert len(corpus) == len(wanted) and corpus.row.tolist() == of
    for i, documents in enumerate(wanted):
        assert same(corpus.documents(i), documents)
        assert corpus.lengths()[i] == sum(map(len, documents)) <= T
        assert corpus.targets()[i] == sum(d.targets.sum() for d in documents) > 0
        assert corpus.where(i).line == 10 * of[i] + 1
    c = corpus.counts
    assert [c.too_long, c.truncated, c.dropped, c.targets_lost] == counts.tolist()
    assert corpus.counts.rows == sum(map(len, shards))
    assert (corpus.counts.tokens, corpus.counts.documents) == (corpus.lengths().sum(), len(corpus))
    whole = sum(int(d.targets.sum()) for found in shards for (d,) in found)
    assert corpus.counts.targets + corpus.counts.targets_lost == whole


def test_rows_too_long():
    short = (document(8),)
    with pytest.raises(DataError) as caught:
        view(shelf([(document(9),)]), T=8, how="error")
    assert caught.value.found == "9 tokens at a.jsonl:1" and "8" in caught.value.asked
    assert all(choice in caught.value.do for choice in ("split", "drop", "truncate", "batch.seq"))
    with pytest.raises(DataError, match=r"9 tokens at a\.jsonl:11"):
        view(shelf([short, (document(9),), (document(10),)]), T=8, how="error")
    corpus = view(shelf([(document(20),)]), T=8, how="split")
    assert pieces(corpus) == [[[*range(8)]], [[*range(8, 16)]], [[*range(16, 20)]]]
    assert [int(t) for t in corpus.targets()] == [7, 7, 3] and corpus.counts.targets_lost == 2
    corpus = view(shelf([(document(17, [3, 9, 16]),)]), T=8, how="split")  # the last piece has one token
    assert [np.flatnonzero(corpus.documents(i)[0].targets).tolist() for i in range(2)] == [[3], [1]]
    assert (corpus.counts.too_long, corpus.counts.dropped, corpus.counts.targets_lost) == (1, 1, 1)
    corpus = view(shelf([(document(9),), short]), T=8, how="drop")
    assert len(corpus) == 1 and (corpus.counts.too_long, corpus.counts.dropped, corpus.counts.targets_lost) == (1, 1, 8)
    corpus = view(shelf([(document(9),), (document(9, [8]),)]), T=8, how="truncate")
    assert pieces(corpus) == [[[*range(8)]]]
    assert (corpus.counts.too_long, corpus.counts.truncated, corpus.counts.dropped) == (2, 1, 1)


def test_without_a_length_nothing_is_cut():
    corpus = view(shelf([(document(20),), (document(3),)]), T=None, how="error")
    assert corpus.lengths().tolist() == [20, 3] and corpus.counts.too_long == 0


def test_pairs():
    """Two documents of one sample; T holds for both together, and a pair is never torn."""
    both = [(document(3), document(4, base=50)), (document(5), document(5)), (document(2), document(2))]
    corpus = view(shelf(both), T=16, how="error")
    assert corpus.parts == 2 and corpus.lengths().tolist() == [7, 10, 4] and corpus.counts.documents == 6
    assert all(same(corpus.documents(i), both[i]) for i in range(3))
    corpus = view(shelf(both), T=9, how="drop")
    assert corpus.lengths().tolist() == [7, 4] and corpus.counts.dropped == 1 and same(corpus.documents(1), both[2])
    for how in ("error", "split", "truncate"):
        with pytest.raises(DataError, match="pairs of at most 9 tokens") as caught:
            view(shelf(both), T=9, how=how)
        assert caught.value.do.endswith("data.too_long: drop") and "a.jsonl:11" in caught.value.found
    assert (corpus.counts.dropped, corpus.counts.targets_lost) == (1, 8)


def test_pairs_do_not_mix_with_other_rows():
    one, two = (document(3),), (document(3), document(3))
    for make in (lambda: shelf([one, two]), lambda: shelf([two], [one])):
        with pytest.raises(DataError, match="pairs") as caught:
            make()
        assert "jsonl:11" in caught.value.found and caught.value.do


def test_refused_rows_keep_their_number_place_and_words():
    found = shelf([(document(3),), "an empty line"], ["no JSON", (document(4),)])
    corpus = view(found, T=8, how="error")
    assert corpus.row.tolist() == [0, 3] and [str(corpus.where(i)) for i in range(2)] == ["a.jsonl:1", "b.jsonl:31"]
    assert corpus.counts.refused == 2 and corpus.counts.rows == 4
    assert [(number, str(why.where), why.error.found) for number, why in found.refused] == [
        (1, "a.jsonl:11", "an empty line"), (2, "b.jsonl:21", "no JSON"),
    ]  # fmt: skip
    assert found.refused[1][1].error.asked == "the row at b.jsonl:21"


def test_the_first_rows_only():
    found = shelf([(document(3),), "bad"], ["bad", (document(4),), (document(5),)], most=4)
    assert found.total == 4 and len(found.refused) == 2
    assert view(found, T=8, how="error").lengths().tolist() == [3, 4]
    assert shelf([(document(3),), "bad"], most=1).refused == []


def test_held_out_rows():
    """A pinned choice: another version, or another way to tokenise, must not move rows from one part to the other."""
    assert np.flatnonzero(held_rows(8, 0.4, 0)).tolist() == sorted(PINNED[:3])
    assert permutation(8, 0, 0).tolist() == PINNED
    found = shelf([(document(3 + i, base=i),) for i in range(6)] + ["bad"], [(document(20),)])
    mask = held_rows(8, 0.4, 0)
    train, held = (view(found, T=8, how="split", keep=keep, named=str(keep[0])) for keep in (~mask, mask))
    whole = view(found, T=8, how="split")
    assert sorted([*train.row, *held.row]) == whole.row.tolist() and set(held.row) == set(PINNED[:3]) - {6}
    assert whole.row.base.nbytes == 32 * len(whole)
    for name in ("rows", "refused", "too_long", "dropped", "targets_lost", "documents", "tokens", "targets"):
        assert getattr(train.counts, name) + getattr(held.counts, name) == getattr(whole.counts, name), name
    assert len({train.fingerprint, held.fingerprint, whole.fingerprint}) == 3
    for fraction in (0.001, 0.999):
        with pytest.raises(DataError, match=r"data\.eval"):
            held_rows(8, fraction, 0)


PINNED = [3, 2, 1, 6, 0, 7, 4, 5]


def test_the_fingerprint_is_of_what_is_trained_on():
    found = [(document(5),), (document(20),)]
    views = {
        "": view(shelf(found), T=32, how="error"),
        "the same": view(shelf(found), T=64, how="split"),  # nothing was cut
        "cut": view(shelf(found), T=16, how="split"),
        "cut elsewhere": view(shelf(found), T=8, how="split"),
        "cut short": view(shelf(found), T=16, how="truncate"),
        "less": view(shelf(found, most=1), T=32, how="error"),
        "another order": view(shelf(found[::-1]), T=32, how="error"),
        "other targets": view(shelf([(document(5, [1]),), found[1]]), T=32, how="error"),
        "weights": view(shelf(found[:1], found), T=32, how="error", origins=[(1, 2.0), (1, 1.0)]),
        "other weights": view(shelf(found[:1], found), T=32, how="error", origins=[(1, 2.0), (1, 2.0)]),
        "no weights": view(shelf(found[:1], found), T=32, how="error", origins=[(1, 1.0), (1, 1.0)]),
    }
    prints = {name: corpus.fingerprint for name, corpus in views.items()}
    assert view(shelf(found[:1], found), T=32, how="error").fingerprint == prints["no weights"]
    assert prints.pop("the same") == prints[""] and len(set(prints.values())) == len(prints)
    assert len(prints[""]) == hashlib.sha256().digest_size * 2


def test_origins():
    origins = [(1, 0.5), (1, 2.0)]
    corpus = view(shelf([(document(20),)], [(document(3),), (document(4),)]), T=8, how="split", origins=origins)
    assert corpus.spans == ((3, 0.5), (2, 2.0)) and sum(n for n, _ in corpus.spans) == len(corpus)
    only = view(shelf([(document(20),)], [(document(3),)]), T=8, how="drop", origins=origins)
    assert only.spans == ((1, 2.0),)


# --- files


def test_a_shard_comes_back_from_its_file(tmp_path):
    rows = [(document(9, [2, 8]),), "bad \0 \u2028 row", (document(3),)]
    made = shelf(rows).made[0]
    path = tokenize.commit_shard(made, tmp_path, 7, 2)
    assert path.name == f"000007-002-{tokenize.shard_digest(made)}.safetensors" and tokenize.intact(path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    held = TokenShards(FILES)
    held.add(path, None)
    a, b = view(held, T=16, how="error"), view(shelf(rows), T=16, how="error")
    assert pieces(a) == pieces(b) and a.fingerprint == b.fingerprint and a.counts == b.counts
    assert all(same(a.documents(i), b.documents(i)) for i in range(2))
    assert [w.error.args for _, w in held.refused] == [w.error.args for _, w in shelf(rows).refused]
    from safetensors.numpy import load_file

    assert load_file(path)["ids"].tolist() == made.ids.tolist()


def test_an_empty_shard_has_a_file_too(tmp_path):
    empty = Builder().shard(last=True)
    assert len(tokenize.open_shard(tokenize.commit_shard(empty, tmp_path, 0, 0))) == 0


@pytest.mark.parametrize("where", ["length", "header", "ids", "end"])
def test_one_bit_or_byte_less_is_found(tmp_path, where):
    path = tokenize.commit_shard(shelf([(document(50),)]).made[0], tmp_path, 0, 0)
    data = bytearray(path.read_bytes())
    data[{"length": 1, "header": 20, "ids": -60, "end": -1}[where]] ^= 4
    path.write_bytes(data)
    assert not tokenize.intact(path)
    data[{"length": 1, "header": 20, "ids": -60, "end": -1}[where]] ^= 4
    path.write_bytes(data)
    assert tokenize.intact(path)
    path.write_bytes(data[:-1])
    assert not tokenize.intact(path)


def test_many_shards_do_not_keep_many_files_open(tmp_path, monkeypatch):
    monkeypatch.setattr("optrush.data.samples.OPEN", 3)
    held = TokenShards(FILES)
    for k in range(9):
        held.add(tokenize.commit_shard(shelf([(document(5, base=k),)]).made[0], tmp_path, k, 0), None)
    corpus = view(held, T=8, how="error")
    first = corpus.documents(0)
    assert [corpus.documents(i)[0].ids[0] for i in (8, 0, 3, 4, 5, 6, 0)] == [8, 0, 3, 4, 5, 6, 0]
    assert len(held._open) == 3 and first[0].ids.tolist() == [0, 1, 2, 3, 4]  # outlives its file's turn


# --- random documents


def test_random_documents():
    source = Random(n=50, T=64, vocab=100, seed=3)
    ids = np.stack([source.documents(i)[0].ids for i in range(50)])
    assert ids.min() == 0 and ids.max() == 99 and len({row.tobytes() for row in ids}) == 50
    assert abs(ids.mean() - 49.5) < 3
    assert (Random(50, 64, 100, 3).documents(7)[0].ids == ids[7]).all()
    assert (Random(50, 64, 100, 4).documents(7)[0].ids != ids[7]).any()
    assert source.documents(0)[0].targets.tolist() == [False] + [True] * 63
    assert source.lengths().tolist() == [64] * 50 and source.targets().tolist() == [63] * 50
    assert source.spans == ((50, 1.0),) and source.parts == 1


@pytest.mark.parametrize(("first", "second"), [(0.5, None), (None, 0.5), (None, None), (0.5, 2.0), (1.0, None)])
def test_documents_have_weights_if_some_shard_has_any(first, second):
    """A recorded or compiled step has one form then."""
    found = [
        [(Document(d.ids, d.targets, weights=None if w is None else np.full(5, w, np.float32)),)]
        for w in (first, second)
        for d in [document(5)]
    ]
    corpus = view(shelf(*found), T=8, how="error")
    for (one,), w in zip(map(corpus.documents, range(2)), (first, second), strict=True):
        wanted = None if first is second is None else [1.0 if w is None else w] * 5
        assert (None if one.weights is None else one.weights.tolist()) == wanted
