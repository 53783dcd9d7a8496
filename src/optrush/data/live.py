"""Steps from rows that are tokenised while training runs: for data that shall not, or cannot, be tokenised before.

The order, the windows and the layouts are those of a Stream, and so are the batches as long as no row is cut in
pieces or left out. What is missing are the lengths: how many rows a window makes is known when it has been read. So
where a run stands is (window, row), kept as one number, and only a number of steps can end it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optrush.data import quarantine
from optrush.data.batch import Batch
from optrush.data.document import Document
from optrush.data.loader import Loading, ahead
from optrush.data.pack import Layout, Rows
from optrush.data.rows import Where
from optrush.data.shard import Refused
from optrush.data.stream import Plan, Row, Stream, batches, draw, drawn, epoch_order, gather, plain_cost
from optrush.errors import ConfigError, DataError

if TYPE_CHECKING:
    from optrush.data.corpus import Source
    from optrush.data.streamed import Streamed

CHUNK = 64  # rows that a worker tokenises at a time
ROOM = 8  # the room for documents in a row grows by so many: few distinct shapes
ROWS = 2**32  # more than a window ever makes: a position is window * ROWS + row

Task = tuple[int, int, int]  # a window, and which of its rows: [first, last)
Sample = tuple[int, tuple[Document, ...]]


class Part(NamedTuple):
    """What some rows became."""

    samples: list[Sample]
    rows: int
    refused: Sequence[Refused]


class Live:
    """What `Stream` is, over rows that are read when they are needed."""

    def __init__(
        self,
        source: Streamed,
        layout: Layout,
        *,
        T: int,
        rows: int,
        seed: int,
        cost: Callable[[int, int], float] = plain_cost,
    ) -> None:
        self.source, self.layout, self.T, self.rows, self.seed, self.cost = source, layout, T, rows, seed, cost
        self.samples = sum(drawn(n, weight) for n, weight in source.spans)  # rows of an epoch
        self._windows = -(-self.samples // layout.window)  # of an epoch
        self._order: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))
        self._positions = {0: 0}  # of the steps that are known
        self.reference: np.ndarray | None = None  # nobody has read the rows: never known before
        self.aside: Path | None = None  # where bad rows are written down
        self.read = 0  # rows, by this process and its workers
        self._refused: dict[Where, Refused] = {}

    def plan(self, epochs: float | None = None, steps: int | None = None) -> Plan:
        """Raises ConfigError without a number of steps: nobody has counted the rows."""
        if steps is None:
            raise ConfigError(
                f"`train.epochs: {epochs:g}` with `data.stream`",
                "how many steps that is shows only when all is tokenised",
                "give train.steps, or leave data.stream out",
            )
        return Plan(steps, steps * self.rows, 0)

    def position(self, k: int) -> int:
        """Where step k begins, of the steps handed out and the one after them."""
        return self._positions[k]

    def seek(self, k: int, position: int) -> int:
        """Goes on with step k at this position; returns it."""
        self._positions = {k: position}
        return position

    def step(self, k: int, plan: Plan) -> list[Row]:
        """The rows of the first step; any other one is known when those before it are."""
        assert k == 0
        made = self._made(0, Loading())
        return [next(made)[0] for _ in range(self.rows)]

    def run(
        self, plan: Plan, done: int, *, rank: int, ranks: int, micro_rows: int, loading: Loading
    ) -> Iterator[list[Batch]]:
        """This rank's micro-batches of the steps from `done` on; every rank reads all rows, to know their lengths."""
        made = self._made(self._positions[done], loading)
        return self._run(made, plan, done, rank=rank, ranks=ranks, micro_rows=micro_rows, pinned=loading.pinned)

    def _run(
        self,
        made: Iterator[tuple[Row, int]],
        plan: Plan,
        done: int,
        *,
        rank: int,
        ranks: int,
        micro_rows: int,
        pinned: bool,
    ) -> Iterator[list[Batch]]:
        room = 0
        for k in range(done, plan.steps):
            rows: list[Row] = []
            while len(rows) < self.rows:
                row, after = next(made)
                rows.append(row)
            self._positions[k + 1] = after
            held = max(len(row) + 1 for row in rows) if self.layout.isolated else 2
            room = max(room, -(-held // ROOM) * ROOM)
            found = batches(self, rows, room, rank=rank, ranks=ranks, micro_rows=micro_rows)
            yield [b.pin_memory() for b in found] if pinned else found

    def _made(self, position: int, loading: Loading) -> Iterator[tuple[Row, int]]:
        """(a row, the position after it) without end."""
        window, skip = divmod(position, ROWS)
        chunks = -(-min(self.layout.window, self.samples) // CHUNK)
        # The next window is on its way while this one is trained on.
        deep = replace(loading, prefetch=max(loading.prefetch, -(-chunks // max(1, loading.workers))), pinned=False)
        return self._laid(ahead(self._read, self._tasks(window), deep), window, skip)

    def _laid(self, parts: Iterator[Part], window: int, skip: int) -> Iterator[tuple[Row, int]]:
        """The rows of windows that arrive in parts, from this window on, without the first `skip`."""
        samples: list[Sample] = []
        before, empty = -skip % self.rows, 0  # a step begins at `position`
        for part, (_, _, last) in zip(parts, self._tasks(window)):
            samples += part.samples
            self._note(part)
            if last < self._size(window):
                continue
            empty = 0 if samples else empty + 1
            if empty > self._windows:
                raise DataError("`data.stream`", "not one sample in all rows", "look at the rows: optrush data show")
            if samples:
                placed = self._place(window, before, samples)
                for r in range(skip, len(placed)):
                    yield gather(placed, r, samples.__getitem__), window * ROWS + r + 1
                before += len(placed)
            skip, samples, window = 0, [], window + 1

    def _note(self, part: Part) -> None:
        """Bad rows are written down once, and counted against the share that is allowed, over all workers."""
        self.read += part.rows
        new = [r for r in part.refused if r.where not in self._refused]
        self._refused.update((r.where, r) for r in new)
        if self.aside is not None:
            quarantine.append(self.aside, new)
        if self._refused and self.read >= min(quarantine.EARLY_rows, self.samples):
            quarantine.check(list(self._refused.values()), min(self.read, self.samples), self.source.most_bad)

    def _tasks(self, window: int) -> Iterator[Task]:
        while True:
            size = self._size(window)
            yield from ((window, first, min(size, first + CHUNK)) for first in range(0, size, CHUNK))
            window += 1

    def _size(self, window: int) -> int:
        j = window % self._windows
        return (j + 1) * self.samples // self._windows - j * self.samples // self._windows

    def _read(self, task: Task) -> Part:
        """The samples of some rows of a window, by the number of the row; a worker does this."""
        window, first, last = task
        epoch, j = divmod(window, self._windows)
        if self._order[0] != epoch:
            self._order = (epoch, epoch_order(self.source.spans, self.seed, epoch))
        begin = j * self.samples // self._windows
        numbers = self._order[1][begin + first : begin + last].tolist()
        met = len(self.source.refused)
        samples = [(n, sample) for n, row in zip(numbers, self.source.read(numbers)) for sample in row]
        return Part(samples, len(numbers), self.source.refused[met:])

    def _place(self, window: int, before: int, samples: list[Sample]) -> Rows:
        lengths = np.array([sum(map(len, documents)) for _, documents in samples], np.int64)
        bits = draw(self.seed, *divmod(window, self._windows))
        return self.layout.place(lengths, self.T, self.rows, before % self.rows, bits)


def flow(
    source: Source | Streamed,
    layout: Layout,
    *,
    T: int,
    rows: int,
    seed: int,
    cost: Callable[[int, int], float] = plain_cost,
) -> Stream | Live:
    """The steps of a source, whichever kind it is."""
    from optrush.data.streamed import Streamed

    if isinstance(source, Streamed):
        return Live(source, layout, T=T, rows=rows, seed=seed, cost=cost)
    return Stream(source, layout, T=T, rows=rows, seed=seed, cost=cost)
