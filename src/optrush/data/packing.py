"""Lay samples out in rows: layouts, pure functions on lengths.

A layout gets a window, some ten thousand samples in the epoch's random order, and puts them into rows. Packing a whole
window fills rows to 99.9 %; filling rows in sequence leaves 10 % empty. The window also bounds memory, for data of any
length. A sample is a document, or the two of a pair, which always share a row.

Padded   one sample per row, padded to T                            the default
Fitted   one sample per row, padded to the longest of the micro-batch
Sorted   one sample per row, steps of similar lengths, in random order
Wrapped  all tokens joined, cut into full rows                     documents are cut and attend to each other
Packed   best fit decreasing, rows in random order                 samples stay uncut and isolated
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

WINDOW = 65536  # samples that a layout lays out together
BUCKET = 64  # row widths below T are multiples of this: few distinct shapes


class Rows(NamedTuple):
    """Rows of one window: row r has the pieces [starts[r], starts[r+1]).

    A piece is tokens [first, last) of a sample; tokens before `fresh` are context, not targets.
    """

    starts: np.ndarray  # (R+1,) int64
    samples: np.ndarray  # (P,) int64: positions in the window
    first: np.ndarray  # (P,) int64
    fresh: np.ndarray  # (P,) int64
    last: np.ndarray  # (P,) int64

    def __len__(self) -> int:
        return len(self.starts) - 1

    def squares(self) -> np.ndarray:
        """Return the attention cost of each row, the sum of its pieces' squared lengths, (R,) int64."""
        return self._sums((self.last - self.first) ** 2)

    def tokens(self) -> np.ndarray:
        """Return the number of real tokens of each row, (R,) int64."""
        return self._sums(self.last - self.first)

    def _sums(self, of: np.ndarray) -> np.ndarray:
        sums = np.append(0, np.cumsum(of))
        return np.asarray(sums[self.starts[1:]] - sums[self.starts[:-1]])


class RowLayout(Protocol):
    """A layout. Its `repr` is part of a checkpoint's fingerprint: equal layouts make equal rows."""

    @property
    def window(self) -> int:
        """Samples per window."""

    one_doc: ClassVar[bool]  # no row has two samples
    isolated: ClassVar[bool]  # documents of a row do not attend to each other
    uncut: ClassVar[bool]  # samples are never cut, so all must fit in T
    pad_to_longest: ClassVar[bool]  # a micro-batch is only as wide as its longest row (to a multiple of BUCKET), not T

    def place(self, lengths: np.ndarray, T: int, rows: int, before: int, draw: np.random.PCG64) -> Rows:
        """Return the rows of one window.

        Args:
            lengths: (n,) int64, tokens of its samples, in the epoch's order.
            rows: rows per step.
            before: rows of the window's first step that are in earlier windows, fewer than `rows`.
            draw: random bits that depend only on (seed, epoch, window).
        """


@dataclass(frozen=True)
class Padded:
    """One sample per row, padded to T slots."""

    window: int = WINDOW
    one_doc: ClassVar[bool] = True
    isolated: ClassVar[bool] = True
    uncut: ClassVar[bool] = True
    pad_to_longest: ClassVar[bool] = False

    def place(self, lengths: np.ndarray, T: int, rows: int, before: int, draw: np.random.PCG64) -> Rows:
        return _alone(lengths, np.arange(len(lengths)))


@dataclass(frozen=True)
class Fitted(Padded):
    """One sample per row, padded to the longest of its micro-batch."""

    pad_to_longest: ClassVar[bool] = True


@dataclass(frozen=True)
class Sorted(Padded):
    """One sample per row; a window is sorted by length, cut into steps, and the steps are shuffled."""

    pad_to_longest: ClassVar[bool] = True

    def place(self, lengths: np.ndarray, T: int, rows: int, before: int, draw: np.random.PCG64) -> Rows:
        """Return rows in steps aligned with the run's: the window may start inside a step."""
        order = np.argsort(lengths, kind="stable")
        head = (rows - before) % rows  # rows that complete the current step
        steps = -(-(len(order) - head) // rows)
        if steps < 1:
            return _alone(lengths, order)
        # Partial steps at the window's start and end are also drawn, so that no length is always in them.
        which = shuffled(steps + (head > 0), draw)
        sizes = np.full(len(which), rows)
        if head:
            sizes[which[0]] = head
        sizes[which[-1]] -= sizes.sum() - len(order)
        edges = np.concatenate([[0], np.cumsum(sizes)])
        return _alone(lengths, np.concatenate([order[edges[i] : edges[i + 1]] for i in which]))


@dataclass(frozen=True)
class Wrapped:
    """All tokens of a window, joined and cut into full rows; a row that starts inside a sample repeats `overlap`."""

    overlap: int = 1
    window: int = WINDOW
    one_doc: ClassVar[bool] = False
    isolated: ClassVar[bool] = False
    uncut: ClassVar[bool] = False
    pad_to_longest: ClassVar[bool] = False

    def place(self, lengths: np.ndarray, T: int, rows: int, before: int, draw: np.random.PCG64) -> Rows:
        """Return consecutive rows, each from the previous one's end, less the overlap."""
        assert 0 <= self.overlap < T, "a row of nothing but overlap"
        ends: list[int] = np.cumsum(lengths).tolist()
        sizes: list[int] = lengths.tolist()
        starts, pieces, at = [0], [], 0
        while at < ends[-1]:
            sample = bisect_right(ends, at)
            fresh = at - ends[sample] + sizes[sample]
            first = max(0, fresh - self.overlap)
            room = T - (fresh - first)
            while room and sample < len(sizes):
                last = min(sizes[sample], fresh + room)
                pieces.append((sample, first, fresh, last))
                room, at = room - (last - fresh), at + last - fresh
                sample, first, fresh = sample + 1, 0, 0
            starts.append(len(pieces))
        columns = np.array(pieces, np.int64).reshape(-1, 4).T
        return Rows(np.array(starts), *columns)


@dataclass(frozen=True)
class Packed:
    """Best fit decreasing over a window: the longest sample first, each into the fullest row with room for it.

    Source: Johnson et al. 1974, https://doi.org/10.1137/0203025; for training, https://arxiv.org/abs/2107.02027.
    Samples of one length are interchangeable, so whole groups of rows are filled at once; their assignment is
    the epoch's random order.
    """

    window: int = WINDOW
    one_doc: ClassVar[bool] = False
    isolated: ClassVar[bool] = True
    uncut: ClassVar[bool] = True
    pad_to_longest: ClassVar[bool] = False

    def place(self, lengths: np.ndarray, T: int, rows: int, before: int, draw: np.random.PCG64) -> Rows:
        row, count = _best_fit(lengths, T)
        row = shuffled(count, draw)[row]
        samples = np.argsort(row, kind="stable")  # within a row, in the epoch's order
        starts = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=count))])
        return _pieces(lengths, samples, starts)


def _best_fit(lengths: np.ndarray, T: int) -> tuple[np.ndarray, int]:
    """Return (the row of each sample, the number of rows)."""
    order = np.argsort(-lengths, kind="stable")
    sizes, counts = np.unique(lengths, return_counts=True)
    room: dict[int, list[int]] = {}  # rows by free tokens
    some = 0  # bit n: a row has n tokens free
    filled: list[list[int]] = []  # rows, in the order of their samples
    copies: list[int] = []  # the number of samples that each row took
    n = 0
    for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist()):
        while count:
            if at := some >> size:
                left = size + (at & -at).bit_length() - 1  # the smallest sufficient room
                held = room[left]
            else:
                left, held = T, list(range(n, n + max(1, count // (T // size))))
                n += len(held)
            each = min(left // size, count)
            takes = held[-max(1, count // each) :]
            if at:
                del held[-len(takes) :]
                if not held:
                    some ^= 1 << left
            if after := left - each * size:
                room.setdefault(after, []).extend(takes)
                some |= 1 << after
            filled.append(takes)
            copies.append(each)
            count -= each * len(takes)
    flat = np.fromiter((r for rows in filled for r in rows), np.int64)
    rows = np.empty(len(lengths), np.int64)
    rows[order] = np.repeat(flat, np.repeat(copies, [len(takes) for takes in filled]))
    return rows, n


def _alone(lengths: np.ndarray, samples: np.ndarray) -> Rows:
    return _pieces(lengths, samples, np.arange(len(samples) + 1))


def _pieces(lengths: np.ndarray, samples: np.ndarray, starts: np.ndarray) -> Rows:
    zero = np.zeros(len(samples), np.int64)
    return Rows(starts, samples, zero, zero, lengths[samples])


def shuffled(n: int, draw: np.random.PCG64) -> np.ndarray:
    """Return a permutation of n, the same with any numpy version (its raw words never change)."""
    return np.argsort(draw.random_raw(n), kind="stable")


def deal(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Return the rows of each rank: the same number, with nearly equal cost, by a greedy assignment.

    The most expensive row first, each to the cheapest rank with room. Then the most and the least expensive rank
    exchange the two rows that bring their costs closest, as long as that helps.
    """
    if ranks == 1:
        return [list(range(len(costs)))]
    cost = np.asarray(costs, np.float64)
    each, hands = len(costs) // ranks, [[] for _ in range(ranks)]  # type: int, list[list[int]]
    sums = [0.0] * ranks
    for row in np.argsort(-cost, kind="stable").tolist():
        rank = min((r for r in range(ranks) if len(hands[r]) < each), key=lambda r: sums[r])
        hands[rank].append(row)
        sums[rank] += cost[row]
    for _ in range(4 * ranks):
        high, low = int(np.argmax(sums)), int(np.argmin(sums))
        gap = sums[high] - sums[low]
        moved = cost[hands[high]][:, None] - cost[hands[low]][None, :]
        i, j = np.unravel_index(np.abs(moved - gap / 2).argmin(), moved.shape)
        if not 0 < moved[i, j] < gap:
            break
        hands[high][i], hands[low][j] = hands[low][j], hands[high][i]
        sums[high], sums[low] = sums[high] - moved[i, j], sums[low] + moved[i, j]
    return [sorted(hand) for hand in hands]


def padded_width(longest: int, T: int) -> int:
    """Return the width of a micro-batch padded to its longest row: a multiple of BUCKET, at most T."""
    return min(T, max(1, -(-longest // BUCKET)) * BUCKET)


def padded_slots(used: np.ndarray, micro_rows: int, T: int) -> int:
    """Return the number of slots of rows with these lengths, in micro-batches padded to their longest row."""
    first = np.arange(0, len(used), micro_rows)
    longest = np.maximum.reduceat(used, first)
    count = np.minimum(micro_rows, len(used) - first)
    return int((count * np.minimum(T, -(-longest // BUCKET) * BUCKET)).sum())


@dataclass(frozen=True)
class Survey:
    """The result of a layout on some lengths."""

    name: str
    rows: int
    slots: int  # token slots computed: rows x their width
    tokens: int  # real tokens; repeated context counts as padding
    fill: float  # tokens / slots
    squares: int  # sum of squared lengths of attention spans, the cost of attention
    seconds: float  # run time of the layout


def survey(lengths: np.ndarray, T: int, rows: int, micro_rows: int, seed: int = 0) -> list[Survey]:
    """Return the results of the four layouts on the same samples, in random order; cut to T if the layout does not cut.

    Args:
        lengths: (N,) int64, tokens of each sample.
        rows, micro_rows: per step, and per micro-batch; some layouts pad to its longest row.
    """
    results = []
    for name, layout in LAYOUTS.items():
        fitting = np.minimum(lengths, T) if layout.uncut else lengths
        n, parts, seconds = 0, [], 0.0
        mixed = fitting[shuffled(len(fitting), np.random.PCG64(np.random.SeedSequence([seed])))]
        for number, window in enumerate(np.array_split(mixed, -(-len(mixed) // layout.window))):
            begin = time.perf_counter()
            placed = layout.place(window, T, rows, n % rows, np.random.PCG64(np.random.SeedSequence([seed, number])))
            seconds += time.perf_counter() - begin
            n += len(placed)
            parts.append(placed)
        used = np.concatenate([p.tokens() for p in parts])
        slots = padded_slots(used, micro_rows, T) if layout.pad_to_longest else n * T
        squares = sum(int(p.squares().sum()) for p in parts) if layout.isolated else int((used**2).sum())
        tokens = int(fitting.sum())
        results.append(Survey(name, n, slots, tokens, tokens / slots, squares, seconds))
    return results


# Layouts by the technique that selects them.
LAYOUTS: dict[str, Padded | Wrapped | Packed] = {
    "pad": Fitted(), "sort-by-length": Sorted(), "wrap": Wrapped(), "packing": Packed(),
}  # fmt: skip
