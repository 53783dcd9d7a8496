"""The order of the documents, and which of them a step, a rank and a micro-batch get.

The global index g counts documents over the whole run: it lies in epoch g // N, at place g % N of that epoch's
permutation, a pure function of (seed, epoch). A step is the documents [plan[k], plan[k+1]) packed into a fixed number
of rows. None of this knows of ranks or micro-batches, so a run resumes with one number and any number of ranks; only
the last question, which rows of a step are mine, does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from optrush.data.batch import Batch, Document, collate
from optrush.data.corpus import Source, permutation
from optrush.data.pack import Fill, taken

AHEAD = 4096  # documents a plan looks ahead at least, so that it does not refill its buffer for every step
WINDOW = 64  # rows that evaluation packs at a time; a constant, so that its rows do not depend on the ranks

Rows = list[list[tuple[int, Document]]]
_Row = TypeVar("_Row")


class Plan(list[int]):
    """The first global index of each step, and the end; step k, from 0, takes the documents [plan[k], plan[k+1])."""

    def __init__(self, starts: Sequence[int], widest: int) -> None:
        super().__init__(starts)
        self.widest = widest  # most documents in one row of the run, padding counted as one

    @property
    def steps(self) -> int:
        return len(self) - 1


class Stream:
    """Documents in a fixed order as steps of `rows` rows of T tokens.

    Args:
        rows: rows of one step over all ranks and micro-batches.
        fill: which documents lie in which row (pack.single, pack.best_fit).
        shuffle: False takes every epoch in the source's own order.
    """

    def __init__(self, documents: Source, *, T: int, rows: int, seed: int, fill: Fill, shuffle: bool = True) -> None:
        assert len(documents) > 0 and T > 1 and rows > 0
        self.documents, self.T, self.rows, self.seed, self.fill, self.shuffle = documents, T, rows, seed, fill, shuffle
        self._lengths = _lengths(documents)
        assert self._lengths.min() > 0 and self._lengths.max() <= T, "documents are cut to T when they are made"
        self._order: tuple[int, np.ndarray] = (-1, self._lengths)

    def sample(self, index: int) -> int:
        """The document at a global index."""
        epoch, place = divmod(index, len(self.documents))
        return int(self._epoch(epoch)[place])

    def plan(self, epochs: float | None = None, steps: int | None = None) -> Plan:
        """Cuts the run into steps: `epochs` (the last step may be partly empty) or `steps`, however many epochs."""
        assert (epochs is None) != (steps is None)
        end = None if epochs is None else max(1, round(epochs * len(self.documents)))
        starts, widest = [0], 0
        ahead: list[int] = []  # lengths of the documents from `base` on
        base, at = 0, 0
        while starts[-1] != end and len(starts) - 1 != steps:
            placed = self.fill(ahead, at, self.rows, self.T)
            after = at + taken(placed)
            if after == len(ahead) and base + after != end:  # the step may hold documents not yet looked at
                ahead, base, at = self._extend(ahead[at:], base + at, end), base + at, 0
                continue
            widest = max(widest, _widest(placed, ahead, self.T))
            at = after
            starts.append(base + at)
        return Plan(starts, widest)

    def step(self, first: int, last: int) -> Rows:
        """The rows of the step that takes the documents [first, last): exactly `rows` rows, the last may be empty."""
        samples = [self.sample(index) for index in range(first, last)]
        placed = self.fill([int(self._lengths[i]) for i in samples], 0, self.rows, self.T)
        assert taken(placed) == last - first, "more documents than this step holds"
        return [[(samples[i], self.documents.document(samples[i])) for i in row] for row in placed]

    def batches(self, k: int, plan: Plan, *, rank: int, ranks: int, micro_rows: int) -> list[Batch]:
        """This rank's micro-batches of step k: the same number and the same shapes on every rank and in every step."""
        assert self.rows % (micro_rows * ranks) == 0 and 0 <= rank < ranks
        return [
            collate(part, self.T, single=self.fill.single, most=micro_rows * plan.widest)
            for part in _share(self.step(plan[k], plan[k + 1]), rank, ranks, micro_rows)
        ]

    def _epoch(self, epoch: int) -> np.ndarray:
        if self._order[0] != epoch:
            n = len(self.documents)
            self._order = (epoch, permutation(n, self.seed, epoch) if self.shuffle else np.arange(n))
        return self._order[1]

    def _extend(self, ahead: list[int], base: int, end: int | None) -> list[int]:
        """The lengths of the documents from `base` on, more than twice as many as `ahead` has."""
        n = len(self.documents)
        wanted = 2 * len(ahead) + AHEAD
        while len(ahead) < wanted and (end is None or base + len(ahead) < end):
            epoch, place = divmod(base + len(ahead), n)
            last = n if end is None else min(n, place + end - base - len(ahead))
            ahead += self._lengths[self._epoch(epoch)[place:last]].tolist()
        return ahead


@dataclass(frozen=True)
class Evaluation:
    """Every document once, in its own order; iterate for this rank's batches (the same number on every rank)."""

    documents: int
    rows: int  # rows that hold at least one document
    batches: int  # of each rank
    _source: Source
    _fill: Fill
    _placed: Sequence[Sequence[int]]
    _T: int
    _share: tuple[int, int, int]  # rank, ranks, micro_rows
    _most: int

    def __iter__(self) -> Iterator[Batch]:
        rank, ranks, micro_rows = self._share
        for first in range(0, len(self._placed), ranks * micro_rows):
            rows = self._placed[first : first + ranks * micro_rows]
            mine = _share(rows, rank, ranks, micro_rows)[0]
            part = [[(i, self._source.document(i)) for i in row] for row in mine]
            yield collate(part, self._T, single=self._fill.single, most=self._most)


def evaluation(source: Source, *, T: int, micro_rows: int, rank: int, ranks: int, fill: Fill) -> Evaluation:
    """Packs all documents, unshuffled; empty rows fill up so that every rank has as many batches as the others."""
    assert len(source) > 0 and 0 <= rank < ranks and micro_rows > 0
    lengths = _lengths(source).tolist()
    assert max(lengths) <= T, "documents are cut to T when they are made"
    placed: list[list[int]] = []
    at = 0
    while at < len(lengths):
        window = fill(lengths, at, WINDOW, T)
        at += taken(window)
        placed += [row for row in window if row]
    rows = len(placed)
    placed += [[] for _ in range(-rows % (ranks * micro_rows))]
    most = micro_rows * _widest(placed, lengths, T)
    batches = len(placed) // (ranks * micro_rows)
    return Evaluation(len(lengths), rows, batches, source, fill, placed, T, (rank, ranks, micro_rows), most)


def _share(rows: Sequence[_Row], rank: int, ranks: int, micro_rows: int) -> list[list[_Row]]:
    """A rank's rows, cut into micro-batches. Rows go round the ranks, so that a half-empty step is shared by all."""
    mine = rows[rank::ranks]
    return [list(mine[i : i + micro_rows]) for i in range(0, len(mine), micro_rows)]


def _widest(placed: Sequence[Sequence[int]], lengths: Sequence[int], T: int) -> int:
    return max(len(row) + (sum(lengths[i] for i in row) < T) for row in placed)


def _lengths(source: Source) -> np.ndarray:
    return np.fromiter((source.length(i) for i in range(len(source))), np.int64, len(source))
