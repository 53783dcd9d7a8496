"""Compare texts by their words: runs of words as hashes, duplicates and near duplicates among rows.

Words are letters and digits in a row, case-folded; in scripts without spaces each letter is a word. A run of n words is
one 64-bit hash, a mixed polynomial of the words' own hashes. The same text gives the same numbers on every machine.

Two texts are near duplicates if the Jaccard similarity of their sets of 5-word runs reaches a threshold. MinHash
signatures cut into bands select the pairs that are compared in full (Broder 1997; Leskovec, Rajaraman, Ullman, Mining
of Massive Datasets, 3.4), so no row is removed because of a hash. In the rows' order a row is removed if it is a near
duplicate of one that stays: every removed row has its like among the rows that stay.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

# Thai, Lao, Burmese, Khmer; kana; Han. As words, clauses without spaces would differ whole for one changed letter.
SPACELESS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
WORD = re.compile(rf"[{SPACELESS}]|[^\W{SPACELESS}]+")
LONG_chars = 1 << 20  # a longer text is not split into a list, which would take many times its bytes

RUN_words = 5  # of a run: fewer are shared by unrelated texts of one kind, more are broken by a few changed words
PERMUTATIONS, SEED = 256, 1
TOGETHER = 2  # bands that a pair must share: unlike texts of one kind often share one, seldom two
MISSED = 2e-3  # the share of the pairs exactly at the threshold that may share fewer bands
# A row is compared with at most MOST others, those that share most bands with it first; of a group that shares a band,
# with its first WINDOW members only. Rows made of common phrases share a band with thousands of others.
WINDOW, MOST = 64, 32
PAIRS = 1 << 21  # pairs that are counted at once

_FACTOR, _HALF = np.uint64(0x9E3779B97F4A7C15), np.uint64(32)


# --- words and runs


@lru_cache(1 << 16)
def _word_hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")


def hashed(words: Iterable[str]) -> np.ndarray:
    """Return the words' hashes, (n,) uint64."""
    return np.fromiter(map(_word_hash, words), np.uint64)


def text_digest(text: str) -> bytes:
    """Return 16 bytes that two texts share if they are equal in normal form C with white space collapsed."""
    return hashlib.blake2b(" ".join(unicodedata.normalize("NFC", text).split()).encode(), digest_size=16).digest()


def split_words(text: str) -> Iterable[str]:
    """Return the text's words, in normal form C and case-folded."""
    folded = unicodedata.normalize("NFC", text).casefold()
    return WORD.findall(folded) if len(folded) < LONG_chars else (m.group() for m in WORD.finditer(folded))


def hashed_words(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of all texts' words one after another, (W,) uint64, and the words of each text, (N,) int64."""
    hashes = [hashed(split_words(text)) for text in texts]
    return np.concatenate([np.zeros(0, np.uint64), *hashes]), np.array([len(h) for h in hashes], np.int64)


def word_runs(hashes: np.ndarray, lengths: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of every n words in a row, text after text, (R,) uint64, and their number a text, (N,) int64.

    A text of fewer than n words has one run, the whole of it; a text without words has none.

    Args:
        hashes, lengths: as `hashed_words` returns them.
    """
    room = np.where(lengths > 0, np.maximum(lengths, n), 0)
    begins = np.cumsum(room) - room
    padded = np.zeros(int(room.sum()), np.uint64)
    padded[stretches(begins, lengths)] = hashes
    counts = np.where(room > 0, room - n + 1, 0)
    at = stretches(begins, counts)
    polynomials = np.zeros(len(at), np.uint64)
    for k in range(n):
        polynomials = polynomials * _FACTOR + padded[at + k]
    return _mixed(polynomials), counts


def stretches(begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the positions begins[i] to begins[i] + lengths[i] - 1 of all i, one after another, int64."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    at: np.ndarray = np.arange(total) + np.repeat(begins - (ends - lengths), lengths)
    return at


def _mixed(x: np.ndarray) -> np.ndarray:
    """Spread every bit over all: the finalizer of SplitMix64 (Steele, Lea, Flood 2014); uint64 in and out."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return x


def shingles(hashes: np.ndarray, lengths: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each text's set of runs, ascending, one set after another, (S,) uint32, and their sizes, (N,) int64.

    32 bits of a hash are used: two texts of 10,000 words share about 0.02 runs by chance.
    """
    found, counts = word_runs(hashes, lengths, n)
    text = np.repeat(np.arange(len(lengths), dtype=np.uint64), counts)
    keys = np.unique((text << _HALF) | (found >> _HALF))
    return keys.astype(np.uint32), np.bincount((keys >> _HALF).astype(np.int64), minlength=len(lengths))


# --- exact duplicates


def exact(digests: np.ndarray, alive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which rows have the digest of an earlier one, and the first row with it; (M,) int64 each.

    Args:
        digests: (N, 2) uint64.
        alive: (N,) bool, the rows that are compared.
    """
    rows = np.flatnonzero(alive)
    compared = digests[rows]
    order = np.lexsort((compared[:, 0], compared[:, 1]))  # stable: of equal ones the first row comes first
    new = np.append(True, (np.diff(compared[order], axis=0) != 0).any(1))[: len(order)]
    first = order[np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))]
    return rows[order[~new]], rows[first[~new]]


# --- near duplicates


def banding(threshold: float) -> tuple[int, int]:
    """Return (bands, rows of a band): the most rows for which at most MISSED of the pairs at the threshold are missed.

    A pair of similarity s agrees in a band with probability p = s^rows, in none of n bands with (1 - p)^n, in exactly
    one with n p (1 - p)^(n - 1).
    """

    def missed(rows: int) -> float:
        n, p = PERMUTATIONS // rows, threshold**rows
        return (1 - p) ** n + n * p * (1 - p) ** (n - 1)

    rows = max((r for r in range(1, PERMUTATIONS // TOGETHER + 1) if missed(r) <= MISSED), default=1)
    return PERMUTATIONS // rows, rows


def bands(shingles: np.ndarray, sizes: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return keys (N, bands) uint32 of N sets of runs; two sets share a key if they agree in all rows of that band.

    Args:
        shingles, sizes: (S,) uint32 and (N,) int64, no size 0.
        shape: as `banding` returns it.
    """
    from rensa import RMinHash

    count, rows = shape
    if not len(sizes):
        return np.zeros((0, count), np.uint32)
    ends = np.concatenate([[0], np.cumsum(sizes)]).astype(np.uint64)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(shingles.astype(np.uint64), ends, PERMUTATIONS, SEED)
    signatures = np.array(matrix.to_rows(), np.uint64)[:, : count * rows]
    keys = np.zeros((len(sizes), count), np.uint64)
    for k in range(rows):
        keys = _mixed(keys + signatures[:, k::rows])
    return keys.astype(np.uint32)


class Sets:
    """The rows' sets of runs, one after another in a file.

    Args:
        file: uint32.
        sizes: (N,) of each row.
    """

    def __init__(self, file: Path, sizes: np.ndarray) -> None:
        self._all = np.memmap(file, np.uint32, "r") if file.stat().st_size else np.zeros(0, np.uint32)
        self._sizes, self._ends = sizes, np.cumsum(sizes, dtype=np.int64)

    def similarity(self, a: int, b: int, least: float) -> float:
        """Return the Jaccard similarity of two rows, or 0 if their sizes alone limit it to less than `least`."""
        few, many = sorted((int(self._sizes[a]), int(self._sizes[b])))
        if few < least * many:
            return 0.0
        both = np.sort(np.concatenate([self._all[self._ends[i] - self._sizes[i] : self._ends[i]] for i in (a, b)]))
        shared = int(np.count_nonzero(both[1:] == both[:-1]))
        return shared / (few + many - shared)


class Groups:
    """Rows with the same key, for each of the bands, in files: 9 bytes a row and band.

    Args:
        rows: how many, N.
        folder: of the files.
    """

    def __init__(self, rows: int, folder: Path) -> None:
        self._files = {name: folder / name for name in ("order", "begins", "widths")}
        self._bands = 0
        self._pairs = np.zeros(rows, np.int64)  # of each row with earlier ones, over all bands
        for file in self._files.values():
            file.unlink(missing_ok=True)

    def add(self, keys: np.ndarray) -> None:
        """Add the next band's keys, (N,)."""
        n = len(keys)
        order = np.argsort(keys, kind="stable")  # equal keys next to each other, the first row first
        new = np.append(True, np.diff(keys[order]) != 0)[:n]
        begins, widths = np.zeros(n, np.uint32), np.zeros(n, np.uint8)
        first = np.maximum.accumulate(np.where(new, np.arange(n), 0))
        begins[order], widths[order] = first, np.minimum(np.arange(n) - first, WINDOW)
        self._pairs += widths
        self._bands += 1
        for name, values in (("order", order.astype(np.uint32)), ("begins", begins), ("widths", widths)):
            with self._files[name].open("ab") as file:
                file.write(values.tobytes())

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Yield pairs (i, an earlier j) that share enough bands, by i; of one i those that share most come first."""
        n = len(self._pairs)
        ends = np.cumsum(self._pairs)
        begin = 0
        while begin < n:
            before = int(ends[begin - 1]) if begin else 0
            end = max(begin + 1, int(np.searchsorted(ends, before + PAIRS, "right")))
            candidates = np.concatenate([self._of_band(band, begin, end) for band in range(self._bands)])
            pairs, shared = np.unique(candidates, return_counts=True)
            enough = shared >= TOGETHER
            pairs, shared = pairs[enough], shared[enough]
            pairs = pairs[np.lexsort((pairs, -shared, pairs >> _HALF))]
            yield from zip((pairs >> _HALF).tolist(), (pairs & np.uint64(2**32 - 1)).tolist())
            begin = end

    def _of_band(self, band: int, begin: int, end: int) -> np.ndarray:
        """Return the pairs i << 32 | j of one band with begin <= i < end, (M,) uint64."""
        n = len(self._pairs)
        at = band * n + begin
        widths = np.fromfile(self._files["widths"], np.uint8, end - begin, offset=at).astype(np.int64)
        if not widths.any():
            return np.zeros(0, np.uint64)
        begins = np.fromfile(self._files["begins"], np.uint32, end - begin, offset=4 * at).astype(np.int64)
        order = np.memmap(self._files["order"], np.uint32, "r", 4 * band * n, (n,))
        mine = np.repeat(np.arange(begin, end, dtype=np.uint64), widths)
        pairs: np.ndarray = mine << _HALF | order[stretches(begins, widths)].astype(np.uint64)
        return pairs


def near(groups: Groups, sets: Sets, rows: np.ndarray, threshold: float) -> Iterator[tuple[int, int, float]]:
    """Yield the near duplicates of rows that stay: (row, the row that stays, their similarity), in the rows' order.

    Args:
        groups: of `rows`.
        rows: (N,) ascending, the rows that are compared.
    """
    stays = np.ones(len(rows), bool)
    last, left = -1, 0
    for i, j in groups.pairs():
        if i != last:
            last, left = i, MOST
        if left and stays[i] and stays[j]:
            left -= 1
            similarity = sets.similarity(int(rows[i]), int(rows[j]), threshold)
            if similarity >= threshold:
                stays[i] = False
                yield int(rows[i]), int(rows[j]), similarity
