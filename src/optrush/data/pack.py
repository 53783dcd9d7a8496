"""Which documents lie in which row: pure functions on lengths.

A fill takes documents strictly in their order and stops at the first that does not fit, so that where a run stands in
its data is one number, the index of the next document. Sorting documents first would pack tighter (the field does it),
but then the state is a set of leftovers, and the order depends on how far ahead one has looked. Best fit in order loses
little: the waste is what the last document of a step did not fit into.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Fill:
    """`fill(lengths, start, rows, T)`: one step's rows, each a list of positions in `lengths`, from `start` on.

    The documents taken are exactly start, start+1, ...: as many as the rows hold together (`taken`).
    `single` says that no row ever holds two.
    """

    single: bool
    place: Callable[[Sequence[int], int, int, int], list[list[int]]]

    def __call__(self, lengths: Sequence[int], start: int, rows: int, T: int) -> list[list[int]]:
        return self.place(lengths, start, rows, T)


def taken(rows: Sequence[Sequence[int]]) -> int:
    """How many documents a step's rows hold."""
    return sum(map(len, rows))


def _single(lengths: Sequence[int], start: int, rows: int, T: int) -> list[list[int]]:
    end = min(start + rows, len(lengths))
    assert all(0 < lengths[i] <= T for i in range(start, end)), "a document longer than a row, or empty"
    return [[i] if i < end else [] for i in range(start, start + rows)]


def _best_fit(lengths: Sequence[int], start: int, rows: int, T: int) -> list[list[int]]:
    placed: list[list[int]] = [[] for _ in range(rows)]
    room = [(T, row) for row in range(rows)]  # sorted: the tightest row that still fits is found by bisection
    for i in range(start, len(lengths)):
        n = lengths[i]
        assert 0 < n <= T, "a document longer than a row, or empty"
        at = bisect_left(room, (n, -1))
        if at == len(room):
            break
        left, row = room.pop(at)
        placed[row].append(i)
        if left > n:
            insort(room, (left - n, row))
    return placed


single = Fill(True, _single)
best_fit = Fill(False, _best_fit)
