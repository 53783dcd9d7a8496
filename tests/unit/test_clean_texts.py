"""What texts are compared by, against plain Python on small cases: words, runs, sets, bands, near duplicates."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optrush.data import similarity as texts
from optrush.data.cleaning import repeated_share
from optrush.data.similarity import Sets, banding, bands, candidates, find_exact_duplicates, find_near_duplicates

SENTENCES = st.lists(st.sampled_from(("a", "b", "c", "d", "e", "f")), max_size=12).map(" ".join)


def plain_runs(text, n):
    words = list(texts.split_words(text))
    return [tuple(words[i : i + n]) for i in range(max(1, len(words) - n + 1))] if words else []


@pytest.mark.parametrize(("text", "words"), [
    ("Don't stop, ÉCLAIR-lover!", ["don", "t", "stop", "éclair", "lover"]),
    ("e\u0301clair STRASSE Straße", ["éclair", "strasse", "strasse"]), ("炒蛋 abc炒", ["炒", "蛋", "abc", "炒"]),
    ("\u0e02\u0e49\u0e32\u0e27", ["\u0e02", "\u0e49", "\u0e32", "\u0e27"]), ("?! ...", []),
])  # fmt: skip
def test_words(text, words, monkeypatch):
    assert list(texts.split_words(text)) == words
    monkeypatch.setattr(texts, "LONG_chars", 0)
    assert list(texts.split_words(text)) == words, "a long text's words are the same"


@given(st.lists(SENTENCES, max_size=6), st.integers(1, 5))
def test_runs(given_texts, n):
    """Equal hashes exactly where the words are equal, over all texts, and as many as there are."""
    hashes = [texts.word_runs(text, n).tolist() for text in given_texts]
    wanted = [plain_runs(text, n) for text in given_texts]
    assert list(map(len, hashes)) == list(map(len, wanted))
    pairs = {pair for of in zip(hashes, wanted) for pair in zip(*of)}
    assert len({a for a, _ in pairs}) == len({b for _, b in pairs}) == len(pairs)


@given(SENTENCES, SENTENCES)
def test_shingles(one, other):
    a, b = texts.shingles(one), texts.shingles(other)
    first, second = (set(plain_runs(text, texts.RUN_words)) for text in (one, other))
    assert (len(a), len(b), len(np.intersect1d(a, b))) == (len(first), len(second), len(first & second))
    assert (np.diff(a.astype(np.int64)) > 0).all() and a.dtype == np.uint32


def test_hashes_do_not_change_between_processes_and_versions():
    """Records are compared by what these give."""
    assert texts.word_runs("one two three four five six", 5).tolist() == [16097572282202166377, 4132983344923093485]
    assert texts.text_digest(" a\tcafe\u0301 ") == texts.text_digest("a caf\u00e9")
    assert texts.text_digest("a b").hex() == "acc9227cc02e5f5c13e74125bce89499"


@given(st.text(alphabet="ab\n ", max_size=30))
def test_repeated_share(text):
    seen: set[str] = set()
    repeated = every = 0
    for line in (line.strip() for line in text.split("\n")):
        every += len(line)
        repeated += len(line) * (line in seen)
        seen.add(line)
    assert repeated_share(text) == (repeated / every if every else 0)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.booleans()), max_size=30))
def test_exact(rows):
    digests = np.array([row[:2] for row in rows], np.uint64).reshape(-1, 2)
    alive = np.array([row[2] for row in rows], bool)
    again, first = find_exact_duplicates(digests, alive)
    wanted, seen = {}, dict[tuple[int, int], int]()
    for i, (a, b, lives) in enumerate(rows):
        if lives and seen.setdefault((a, b), i) != i:
            wanted[i] = seen[a, b]
    assert dict(zip(again.tolist(), first.tolist())) == wanted


@pytest.mark.parametrize("threshold", [0.05, 0.5, 0.7, 0.8, 0.99])
def test_banding(threshold):
    """A pair at the threshold is met, by the formula and in an experiment."""
    count, rows = banding(threshold)
    assert count >= texts.TOGETHER and count * rows <= texts.PERMUTATIONS
    p = threshold**rows
    assert (1 - p) ** count + count * p * (1 - p) ** (count - 1) <= texts.MISSED or rows == 1
    pairs, size = 300, 200
    shared = round(2 * size * threshold / (1 + threshold))
    rng = np.random.default_rng(0)
    sets = []
    for _ in range(pairs):
        drawn = rng.choice(2**32, 2 * size - shared, replace=False).astype(np.uint32)
        sets += [np.sort(drawn[:size]), np.sort(np.append(drawn[:shared], drawn[size:]))]
    keys = bands(np.concatenate(sets), np.full(2 * pairs, size), (count, rows))
    met = (keys[0::2] == keys[1::2]).sum(1) >= texts.TOGETHER
    assert met.mean() >= 0.98


def brute(sets, threshold):
    stays: list[int] = []
    gone: dict[int, float] = {}
    for i, one in enumerate(sets):
        best = max((len(one & sets[j]) / len(one | sets[j]) for j in stays), default=0.0)
        if best >= threshold:
            gone[i] = best
        else:
            stays.append(i)
    return gone


@settings(max_examples=6)
@given(seed=st.integers(0, 10**6), threshold=st.sampled_from([0.5, 0.7, 0.85]), block=st.sampled_from([1, 40, 1 << 21]))
def test_near_against_all_pairs(seed, threshold, block):
    """The rows that go are those that a comparison of all pairs takes, for pairs well apart from the threshold."""
    rng = np.random.default_rng(seed)
    sets: list[set[int]] = []
    for _ in range(60):
        if sets and rng.random() < 0.6:  # nearly one of the earlier ones, or far from it
            other = list(sets[rng.integers(0, len(sets))])
            broken = round(len(other) * rng.choice([0.0, 0.02, 0.6]))
            sets.append(set(other[broken:]) | set(rng.integers(0, 2**32, broken).tolist()))
        else:
            sets.append(set(rng.integers(0, 2**32, rng.integers(80, 200)).tolist()))
    sizes = np.array([len(s) for s in sets])
    flat = np.concatenate([np.sort(np.array(list(s), np.uint32)) for s in sets])
    keys = bands(flat, sizes, banding(threshold))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "PAIRS", block)
        found = list(find_near_duplicates(keys, Sets(flat, sizes), np.arange(len(sets)), threshold))
    wanted = brute(sets, threshold)
    assert [i for i, _, _ in found] == sorted(wanted)
    gone = set(wanted)
    for i, j, share in found:
        assert j < i and j not in gone
        assert share == len(sets[i] & sets[j]) / len(sets[i] | sets[j]) >= threshold


def test_a_crowd_of_rows_that_share_a_band():
    """Of 400 rows that all agree in one band, those are found that agree in two, however late they come."""
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 2**32, (400, 20), dtype=np.uint32)
    keys[:, 3] = 7
    keys[399] = keys[200]
    keys[398, 4:6] = keys[300, 4:6]
    assert list(candidates(keys)) == [(398, 300), (399, 200)]
    alike = Sets(np.tile(np.arange(10, dtype=np.uint32), 400), np.full(400, 10))  # all equal, were they compared
    assert list(find_near_duplicates(keys, alike, np.arange(400), 0.9)) == [(398, 300, 1.0), (399, 200, 1.0)]


def test_the_similarity_of_a_part_and_its_whole():
    sets = Sets(np.array([1, 2, 3, 1, 2, 3, 9], np.uint32), np.array([3, 4]))
    assert sets.similarity(0, 1, 0.75) == sets.similarity(1, 0, 0.75) == 0.75
