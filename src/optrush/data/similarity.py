"""Compare texts by their words: exact duplicates, near duplicates, and rows that share words with an evaluation.

Words are consecutive letters and digits, case-folded; in scripts without spaces each letter is a word. A run of n words
has one 64-bit hash, a mixed polynomial of the hashes of its words: the same text gives the same hashes everywhere.

Two texts are near duplicates if the Jaccard similarity of their sets of 5-word runs reaches a threshold. MinHash
signatures (by the library rensa), split into bands, select the pairs that are compared in full (Broder 1997; Leskovec,
Rajaraman, Ullman, Mining of Massive Datasets, 3.4), so no row is removed because of a hash alone. Rows are compared in
order; a row is removed if it is a near duplicate of an earlier row that stays.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np

from optrush.data import schema
from optrush.data.readers import read_rows
from optrush.data.schema import NO_RULES, Chat, Completion, Judged, Pair, Row, RowLocation, RowRules

COMMON_ROLES = ("system", "developer")  # many rows share these texts by design
SHARED_words = 13  # consecutive words shared with an evaluation text
# Thai, Lao, Burmese, Khmer; kana; Han. With clauses as words, one changed letter would change a whole clause.
SPACELESS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
WORD = re.compile(rf"[{SPACELESS}]|[^\W{SPACELESS}]+")
LONG_chars = 1 << 20  # a longer text is not split into a list, which would take many times its size

RUN_words = 5  # per run: unrelated texts of one kind share shorter runs, a few changed words break longer ones
PERMUTATIONS, SEED = 256, 1
TOGETHER = 2  # bands that a pair must share: different texts of one kind often share one, seldom two
MISSED = 2e-3  # share of pairs exactly at the threshold that may share fewer bands
# A row is compared with at most MOST others, in descending order of shared bands; in a group that shares a band, only
# with the first WINDOW members. Rows made of common phrases share a band with thousands of others.
WINDOW, MOST = 64, 32
PAIRS = 1 << 21  # pairs counted at once

_FACTOR, _HALF = np.uint64(0x9E3779B97F4A7C15), np.uint64(32)


@lru_cache(1 << 16)
def _word_hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")


def hashed(words: Iterable[str]) -> np.ndarray:
    """Return the words' hashes, (n,) uint64."""
    return np.fromiter(map(_word_hash, words), np.uint64)


def text_digest(text: str) -> bytes:
    """Return a 16-byte digest of a text in normal form C with white space collapsed."""
    return hashlib.blake2b(" ".join(unicodedata.normalize("NFC", text).split()).encode(), digest_size=16).digest()


def split_words(text: str) -> Iterable[str]:
    """Return the text's words, in normal form C and case-folded."""
    folded = unicodedata.normalize("NFC", text).casefold()
    return WORD.findall(folded) if len(folded) < LONG_chars else (m.group() for m in WORD.finditer(folded))


def word_runs(text: str, n: int) -> np.ndarray:
    """Return the hashes of all runs of n consecutive words in a text, (R,) uint64.

    A text of fewer than n words is one run; a text without words has none.
    """
    hashes = hashed(split_words(text))
    if not len(hashes):
        return hashes
    hashes = np.pad(hashes, (0, max(0, n - len(hashes))))
    runs = np.zeros(len(hashes) - n + 1, np.uint64)
    for k in range(n):
        runs = runs * _FACTOR + hashes[k : k + len(runs)]
    return _mixed(runs)


def stretches(begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the positions begins[i] to begins[i] + lengths[i] - 1 for all i, concatenated, int64."""
    at: np.ndarray = np.arange(lengths.sum()) + np.repeat(begins - (np.cumsum(lengths) - lengths), lengths)
    return at


def _mixed(x: np.ndarray) -> np.ndarray:
    """Mix the bits by the finalizer of SplitMix64 (Steele, Lea, Flood 2014); uint64 in and out."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return x


def shingles(text: str) -> np.ndarray:
    """Return the set of hashes of a text's runs of RUN_words words, ascending, (S,) uint32.

    32 bits of each hash are enough: two texts of 10,000 words share about 0.02 runs by chance.
    """
    return np.unique(word_runs(text, RUN_words) >> _HALF).astype(np.uint32)


def find_exact_duplicates(digests: np.ndarray, alive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows with the digest of an earlier row, and the first row with that digest; (M,) int64 each.

    Compares those `digests`, (N, 2) uint64, for which `alive`, (N,) bool, is true.
    """
    rows = np.flatnonzero(alive)
    compared = digests[rows]
    order = np.lexsort((compared[:, 0], compared[:, 1]))  # stable: equal digests stay in row order
    new = np.append(True, (np.diff(compared[order], axis=0) != 0).any(1))[: len(order)]
    first = order[np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))]
    return rows[order[~new]], rows[first[~new]]


def banding(threshold: float) -> tuple[int, int]:
    """Return (bands, rows per band): the most rows for which at most MISSED of the pairs at the threshold are missed.

    A pair of similarity s agrees in a band with probability p = s^rows, in 0 of n bands with (1 - p)^n, in exactly 1
    with n p (1 - p)^(n - 1).
    """

    def missed(rows: int) -> float:
        n, p = PERMUTATIONS // rows, threshold**rows
        return (1 - p) ** n + n * p * (1 - p) ** (n - 1)

    rows = max((r for r in range(1, PERMUTATIONS // TOGETHER + 1) if missed(r) <= MISSED), default=1)
    return PERMUTATIONS // rows, rows


def bands(shingles: np.ndarray, sizes: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return keys (N, bands) uint32 of N sets of runs; two sets share a key if they agree in all rows of that band.

    `shingles` and `sizes` are (S,) uint32 and (N,) int64, without 0; `shape` is the result of `banding`.
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
    """The sets of runs of all rows: `values` (S,) uint32 concatenates them, `sizes` (N,) has the size of each."""

    def __init__(self, values: np.ndarray, sizes: np.ndarray) -> None:
        self._values, self._sizes, self._ends = values, sizes, np.cumsum(sizes, dtype=np.int64)

    def similarity(self, a: int, b: int, least: float) -> float:
        """Return the Jaccard similarity of two rows; 0 if their sizes alone bound it below `least`."""
        few, many = sorted((int(self._sizes[a]), int(self._sizes[b])))
        if few < least * many:
            return 0.0
        both = np.sort(np.concatenate([self._values[self._ends[i] - self._sizes[i] : self._ends[i]] for i in (a, b)]))
        shared = int(np.count_nonzero(both[1:] == both[:-1]))
        return shared / (few + many - shared)


def candidates(keys: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield pairs (i, j), j < i, that share enough bands, in ascending i; for one i, most shared bands first.

    Args:
        keys: (N, bands) uint32, the result of `bands`.
    """
    n, width = keys.shape
    groups = []  # per band: rows sorted by key, the start of each row's group, members before it (at most WINDOW)
    for band in range(width):
        order = np.argsort(keys[:, band], kind="stable")
        new = np.append(True, np.diff(keys[order, band]) != 0)[:n]
        first = np.maximum.accumulate(np.where(new, np.arange(n), 0))
        firsts, sizes = np.zeros(n, np.uint32), np.zeros(n, np.uint8)
        firsts[order], sizes[order] = first, np.minimum(np.arange(n) - first, WINDOW)
        groups.append((order.astype(np.uint32), firsts, sizes))
    ends = np.cumsum(sum((before.astype(np.int64) for _, _, before in groups), np.zeros(n, np.int64)))
    begin = 0
    while begin < n:
        end = max(begin + 1, int(np.searchsorted(ends, (ends[begin - 1] if begin else 0) + PAIRS, "right")))
        pairs = [np.zeros(0, np.uint64)]
        for rows, begins, before in groups:
            counts = before[begin:end].astype(np.int64)
            mine = np.repeat(np.arange(begin, end, dtype=np.uint64), counts)
            pairs.append(mine << _HALF | rows[stretches(begins[begin:end], counts)].astype(np.uint64))
        packed, shared = np.unique(np.concatenate(pairs), return_counts=True)
        packed, shared = packed[shared >= TOGETHER], shared[shared >= TOGETHER]
        packed = packed[np.lexsort((packed, -shared, packed >> _HALF))]
        yield from zip((packed >> _HALF).tolist(), (packed & np.uint64(2**32 - 1)).tolist())
        begin = end


def find_near_duplicates(
    keys: np.ndarray, sets: Sets, rows: np.ndarray, threshold: float
) -> Iterator[tuple[int, int, float]]:
    """Yield near duplicates of rows that stay: (row, the row that stays, similarity); `rows` (N,) is ascending."""
    stays = np.ones(len(rows), bool)
    last, left = -1, 0
    for i, j in candidates(keys):
        if i != last:
            last, left = i, MOST
        if left and stays[i] and stays[j]:
            left -= 1
            similarity = sets.similarity(int(rows[i]), int(rows[j]), threshold)
            if similarity >= threshold:
                stays[i] = False
                yield int(rows[i]), int(rows[j]), similarity


# --- Rows that share words with an evaluation.


def own_text(row: Row) -> str:
    """Return a row's text without system prompts and tool definitions, which many rows share by design."""

    def without(part: Chat | Completion) -> Chat | Completion:
        if isinstance(part, Completion):
            return part
        prompt = sum(m.role not in COMMON_ROLES for m in part.messages[: part.prompt])
        return Chat(tuple(m for m in part.messages if m.role not in COMMON_ROLES), prompt=prompt)

    if isinstance(row, Pair):
        return schema.row_text(Pair(without(row.chosen), without(row.rejected)))
    if isinstance(row, Judged):
        return schema.row_text(Judged(tuple(map(without, row.answers)), row.labels))
    return schema.row_text(without(row) if isinstance(row, Chat | Completion) else row)


@dataclass(frozen=True)
class EvaluationRuns:
    """The 13-word runs of all evaluation texts; a row that contains one of them is contaminated.

    A shorter text is one run, which matches only a row of exactly these words. Source: Brown et al. 2020
    (https://arxiv.org/abs/2005.14165, appendix C). Differs from the source: the entire row is removed, not the passage
    and 200 characters around it; system prompts and tools are not compared, because rows and evaluation may share them
    by design. Paraphrases and translations are not detected.
    """

    hashes: np.ndarray  # (R,) uint64, ascending
    owners: np.ndarray  # (R,) int32, the number of each run's text
    places: Sequence[RowLocation]  # of the texts

    def shared(self, text: str) -> int:
        """Return the number (from 1) of the evaluation text with the row's first shared run; 0 if none is shared."""
        owners = self._owners(word_runs(text, SHARED_words))
        return int(owners[np.argmax(owners > 0)]) if len(owners) else 0

    def passage(self, row: Row) -> str:
        """Return the words of a contaminated row's first shared run."""
        text = own_text(row)
        first = int(np.argmax(self._owners(word_runs(text, SHARED_words)) > 0))
        return " ".join(islice(split_words(text), first, first + SHARED_words))

    def _owners(self, runs: np.ndarray) -> np.ndarray:
        if not len(self.hashes):
            return np.zeros(len(runs), np.int32)
        at = np.minimum(np.searchsorted(self.hashes, runs), len(self.hashes) - 1)
        return np.where(self.hashes[at] == runs, self.owners[at] + 1, 0).astype(np.int32)


def read_evaluation(files: Sequence[Path], text_rows: str, rules: RowRules = NO_RULES) -> EvaluationRuns:
    """Return the runs of all rows of the evaluation files. Raises DataError at the first bad row."""
    places: list[RowLocation] = []
    all_hashes = [np.zeros(0, np.uint64)]
    for where, raw in (row for file in files for row in read_rows(file, text_rows)):
        places.append(where)
        all_hashes.append(word_runs(own_text(schema.parse_row(where, raw, rules)), SHARED_words))
    owners = np.repeat(np.arange(-1, len(places), dtype=np.int32), [len(hashes) for hashes in all_hashes])
    hashes, first = np.unique(np.concatenate(all_hashes), return_index=True)
    return EvaluationRuns(hashes, owners[first], places)
