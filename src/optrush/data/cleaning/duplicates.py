"""Rows that say what an earlier row said: exactly, or nearly.

Two texts are nearly the same if the Jaccard similarity of their sets of WORDS-word runs reaches the threshold. All
pairs cannot be compared; MinHash signatures cut into bands bring together those that may be (Broder 1997; Leskovec,
Rajaraman, Ullman, Mining of Massive Datasets, 3.4). Pairs that share two bands are then compared in full, so that no
row is taken for a hash's sake. In the rows' order a row goes if it is nearly one that stays: duplicates of a row that
goes do not drag others along, and every row taken has its like among the rows that stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from optrush.data.cleaning.texts import mixed, stretches

WORDS = 5  # of a run: fewer are shared by unrelated texts of one kind, more are all broken by a few changed words
PERMUTATIONS = 256
TOGETHER = 2  # bands that a pair must share: unlike texts of one kind often share one, seldom two
MISSED = 2e-3  # of the pairs exactly at the threshold may share fewer
SEED = 1
# A row is compared with so many at most, those that share most bands with it first; of a group that shares a band, with
# its first members only. Rows made of phrases that many have share a band with thousands, many bands with their like.
WINDOW, MOST = 64, 32
PAIRS = 1 << 21  # that are counted at once
BANDS = 8  # whose keys are read at once

_HALF = np.uint64(32)


def banding(threshold: float) -> tuple[int, int]:
    """(bands, rows of a band): as many rows as can be with at most MISSED of the pairs at the threshold missed.

    A pair of similarity s agrees in a band with probability p = s^rows, in none of n bands with (1 - p)^n, in exactly
    one with n p (1 - p)^(n - 1).
    """

    def missed(rows: int) -> float:
        n, p = PERMUTATIONS // rows, threshold**rows
        return (1 - p) ** n + n * p * (1 - p) ** (n - 1)

    rows = max((r for r in range(1, PERMUTATIONS // TOGETHER + 1) if missed(r) <= MISSED), default=1)
    return PERMUTATIONS // rows, rows


def bands(shingles: np.ndarray, sizes: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Keys (N, bands) uint32 of N sets of runs; two sets share a key where they agree in all rows of that band.

    Args:
        shingles, sizes: (S,) uint32 and (N,) int64, no size 0.
        shape: as `banding` gives it.
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
        keys = mixed(keys + signatures[:, k::rows])
    return keys.astype(np.uint32)


def exact(digests: np.ndarray, alive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which rows have the digest of an earlier one, and which that is: the first of all with it; (M,) int64 each.

    Args:
        digests: (N, 2) uint64.
        alive: (N,) bool, the rows that are compared.
    """
    rows = np.flatnonzero(alive)
    found = digests[rows]
    order = np.lexsort((found[:, 0], found[:, 1]))  # stable: of equal ones the first row comes first
    new = np.append(True, (np.diff(found[order], axis=0) != 0).any(1))[: len(order)]
    first = order[np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))]
    return rows[order[~new]], rows[first[~new]]


class Sets:
    """The rows' sets of runs, one after another in a file.

    Args:
        file: uint32.
        sizes: (N,) of each row.
    """

    def __init__(self, file: Path, sizes: np.ndarray) -> None:
        self._held = np.memmap(file, np.uint32, "r") if file.stat().st_size else np.zeros(0, np.uint32)
        self._sizes = sizes
        self._ends = np.cumsum(sizes, dtype=np.int64)

    def of(self, i: int) -> np.ndarray:
        """Row i's runs, ascending."""
        return self._held[self._ends[i] - self._sizes[i] : self._ends[i]]

    def similarity(self, a: int, b: int, least: float) -> float:
        """The Jaccard similarity of two rows, or 0 where their sizes alone keep it below `least`."""
        few, many = sorted((int(self._sizes[a]), int(self._sizes[b])))
        if few < least * many:
            return 0.0
        both = np.sort(np.concatenate([self.of(a), self.of(b)]))
        shared = int(np.count_nonzero(both[1:] == both[:-1]))
        return shared / (few + many - shared)


class Groups:
    """Rows with the same key, for each of the bands, in files: 9 bytes a row and band.

    Args:
        rows: how many, N.
        folder: where the files lie.
    """

    def __init__(self, rows: int, folder: Path) -> None:
        self._files = {name: folder / name for name in ("order", "begins", "widths")}
        self._bands = 0
        self._met = np.zeros(rows, np.int64)  # how many earlier rows each meets, over all bands
        for file in self._files.values():
            file.unlink(missing_ok=True)

    def add(self, keys: np.ndarray) -> None:
        """The next band's keys, (N,)."""
        n = len(keys)
        order = np.argsort(keys, kind="stable")  # equal keys beside each other, the first row first
        new = np.append(True, np.diff(keys[order]) != 0)[:n]
        begins, widths = np.zeros(n, np.uint32), np.zeros(n, np.uint8)
        first = np.maximum.accumulate(np.where(new, np.arange(n), 0))
        begins[order], widths[order] = first, np.minimum(np.arange(n) - first, WINDOW)
        self._met += widths
        self._bands += 1
        for name, values in (("order", order.astype(np.uint32)), ("begins", begins), ("widths", widths)):
            with self._files[name].open("ab") as file:
                file.write(values.tobytes())

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Pairs (i, an earlier j) that share bands enough, by i; of one i those first that share most bands with it."""
        n = len(self._met)
        ends = np.cumsum(self._met)
        begin = 0
        while begin < n:
            before = int(ends[begin - 1]) if begin else 0
            end = max(begin + 1, int(np.searchsorted(ends, before + PAIRS, "right")))
            found = np.concatenate([self._met_in(band, begin, end) for band in range(self._bands)])
            pairs, shared = np.unique(found, return_counts=True)
            enough = shared >= TOGETHER
            pairs, shared = pairs[enough], shared[enough]
            pairs = pairs[np.lexsort((pairs, -shared, pairs >> _HALF))]
            yield from zip((pairs >> _HALF).tolist(), (pairs & np.uint64(2**32 - 1)).tolist())
            begin = end

    def _met_in(self, band: int, begin: int, end: int) -> np.ndarray:
        """The pairs i << 32 | j of one band with begin <= i < end, (M,) uint64."""
        n = len(self._met)

        def read(name: str, dtype: type[np.generic], begin: int, end: int) -> np.ndarray:
            at = (band * n + begin) * np.dtype(dtype).itemsize
            return np.fromfile(self._files[name], dtype, end - begin, offset=at)

        widths = read("widths", np.uint8, begin, end).astype(np.int64)
        if not widths.any():
            return np.zeros(0, np.uint64)
        at = stretches(read("begins", np.uint32, begin, end).astype(np.int64), widths)
        order = np.memmap(self._files["order"], np.uint32, "r", band * n * 4, (n,))
        mine = np.repeat(np.arange(begin, end, dtype=np.uint64), widths)
        pairs: np.ndarray = mine << _HALF | order[at].astype(np.uint64)
        return pairs


def near(groups: Groups, sets: Sets, rows: np.ndarray, threshold: float) -> Iterator[tuple[int, int, float]]:
    """Which rows are nearly one that stays: (row, the row that stays, their similarity), in the rows' order.

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
            found = sets.similarity(int(rows[i]), int(rows[j]), threshold)
            if found >= threshold:
                stays[i] = False
                yield int(rows[i]), int(rows[j]), found
