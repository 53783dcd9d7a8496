"""Order the samples of a run, and split the order into steps, ranks and micro-batches.

An epoch is a random order of the samples, split into windows; a layout packs each window into rows (packing.py). The
order is a pure function of (seed, epoch, window). Rows therefore have a global number g over the whole run, and the
position of a run is one number. The rows of a step are fixed before they are assigned to ranks, micro-batches and
worker processes, so a run can resume with any number of these.
"""

from __future__ import annotations

import gc
import itertools
import math
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from optrush import console
from optrush.data import pool, tokenize
from optrush.data.batch import Batch, collate
from optrush.data.images import ImageReader
from optrush.data.packing import Packed, Padded, RowLayout, Rows, deal, padded_slots, padded_width
from optrush.data.pool import Pool
from optrush.data.samples import (
    Counts,
    LiveSource,
    Sample,
    SampleChunk,
    SampleSource,
    describe_stream,
    permutation,
    truncated_rows,
)  # fmt: skip
from optrush.data.schema import Document, RowLocation
from optrush.data.stored_tokens import StoredTokens
from optrush.data.strict_json import quoted
from optrush.data.tokenize import BadRow
from optrush.errors import ConfigError, DataError, RunError
from optrush.launch import launched, process_stat

# --- Prefetching by worker processes, in order: items are a pure function of a number.
#
# An item does not depend on the worker that computes it, so a run may resume with any number of workers. Workers are
# forks of the trainer: they read its memory, and use no GPU and no process group.

Number = TypeVar("Number")
Item = TypeVar("Item")

LATE_S, REPEAT_S = 20.0, 60.0  # wait for a batch before the first report, and between two reports
GIVING_UP_S = 5.0  # wait for the pending batch after a signal to stop the run
_pools: weakref.WeakSet[Pool[Any, Any]] = weakref.WeakSet()


@dataclass(frozen=True)
class Loading:
    """How batches are prepared: by the training process itself if `workers` is 0."""

    workers: int = 0
    prefetch: int = 2  # items that each worker prepares ahead
    pinned: bool = False  # put batches into page-locked memory, which a GPU reads without the CPU
    stopping: Callable[[], bool] = lambda: False  # whether the run should end, with or without the next batch


def decoding_ahead(loading: Loading, device: torch.device, ranks: int) -> Loading:
    """Return the loading of batches with images: on a GPU by worker processes, up to four if none are configured."""
    if device.type != "cuda" or loading.workers:
        return loading
    return Loading(max(1, min(4, tokenize.cores() // (2 * ranks))), pinned=True)


class NoBatch(Exception):
    """The run should end, and the next batch has not arrived."""


def prefetched(make: Callable[[Number], Item], numbers: Iterable[Number], loading: Loading) -> Iterator[Item]:
    """Return make(n) for each number, in order.

    Workers start at once; wrap the consumer in `close_workers_after` to end them.

    Raises:
        UserError, RunError: from `make`; any other exception of a worker becomes a RunError with its location.
        NoBatch: `loading.stopping()` is true, and the next item has not arrived within GIVING_UP_S.
    """
    if not loading.workers:
        return _received(map(make, numbers), loading.pinned)  # in this process: nothing to wait for

    def start() -> pool.Work[Number, Item]:
        gc.freeze()  # the trainer's uncollected objects may belong to a device that does not work in a fork
        torch.set_num_threads(1)  # a fork has none of the trainer's other threads
        return lambda number, _: make(number)

    def lost(_: Number, what: str) -> RunError:
        if what.startswith("failed"):
            do = "report it with the row, or run without data workers"
            return RunError("the batches", f"a data worker {what}", do)
        do = "resume from the last checkpoint, if any: --resume auto"
        return RunError("the batches", f"a data worker died (it {what})", do)

    workers = pool.forked(start, loading.workers)
    items = Pool[Number, Item](
        workers, numbers, lost, ahead=loading.prefetch, waiting=_Waiting(workers, loading.stopping)
    )
    _pools.add(items)
    return _received(items, loading.pinned)


@dataclass
class _Waiting:
    """The trainer's reaction while the next batch is late: report on standard error, or give up."""

    workers: Sequence[pool.Worker]
    stopping: Callable[[], bool]
    report_at: float = 0.0
    since: float = math.inf  # time of the request to stop

    def __call__(self, waited: float) -> None:
        now = time.monotonic()
        self.since = min(self.since, now) if self.stopping() else math.inf
        if now - self.since > GIVING_UP_S:
            raise NoBatch
        if waited < LATE_S:
            self.report_at = LATE_S
        elif waited > self.report_at:
            self.report_at += REPEAT_S
            console.warn(_late(waited, [worker.pid for worker in self.workers]))


def _late(seconds: float, workers: Sequence[int]) -> str:
    """Return a line that reports a late batch."""
    rank, ranks = launched()
    stopped: list[str] = []
    for worker in workers:
        with suppress(OSError):  # the worker has ended
            if process_stat(worker)[0] in "Tt":
                stopped.append(str(worker))
    subject = f"rank {rank} has waited" if ranks > 1 else "waited"
    if not stopped:
        return f"{subject} {seconds:.0f} s for the next batch; its data workers are busy, or blocked in reading"
    names = f"data worker{'s' * (len(stopped) > 1)} (process {', '.join(stopped)})"
    do = f"resume it: kill -CONT {' '.join(stopped)}; or stop and save the run: SIGTERM"
    return f"{subject} {seconds:.0f} s for the next batch: the {names} is stopped; {do}"


def _received(items: Iterator[Item], pinned: bool) -> Iterator[Item]:
    """Yield the items, in page-locked memory if `pinned`; the trainer pins, because workers use no GPU."""
    for item in items:
        yield _pinned(item, pinned)


def _pinned(item: Item, pinned: bool) -> Item:
    return pin_memory(item) if pinned else item  # type: ignore[no-untyped-call]


@contextmanager
def close_workers_after(batches: Iterator[Item]) -> Iterator[None]:
    """End all workers after the block, even if a caller still holds their batches."""
    try:
        yield
    finally:
        if isinstance(batches, Generator):
            batches.close()
        for items in list(_pools):
            items.close()


# --- The steps of a run.
#
# Tokenized data has known lengths: any step can be computed from its number, and workers make whole steps. Streamed
# data (`data.stream`) has known rows once all samples of a window are tokenized: workers tokenize chunks of samples,
# steps are made in order, the position of a run is (window, row) in one number, and only `train.steps` ends the run.
# Order, windows and layouts are the same; so are the batches, unless a sample is cut or dropped.

Row = list[tuple[int, Document]]  # (sample, one of its documents or a piece of one)
Task = tuple[int, int, int]  # a window, and the range of its samples: [first, last)

CHUNK = 64  # samples that a worker tokenizes at a time
LIVE_WINDOW = 4096  # samples per streamed window: the first step waits for them; rows are at most 0.3 % less full
ROOM = 8  # the capacity for documents of a streamed row grows in multiples of this: few distinct shapes
ROWS = 2**32  # more rows than any window has: a streamed position is window * ROWS + row


class StreamPlan(NamedTuple):
    """The length of a run, and the capacity for documents of its batches."""

    steps: int
    rows: int  # of the run; the last step is filled up with empty rows
    widest: int  # largest number of documents in a row of the run, padding counted as one; 0: unknown


class Totals(NamedTuple):
    """Counts of a whole run."""

    epochs: float
    tokens: int
    targets: int
    slots: int  # rows x their width, padding included


class _Window(NamedTuple):
    rows: Rows
    numbers: np.ndarray  # (n,) int64: the sample of each position in the window
    samples: list[Sample]  # of a streamed source, by position


def plain_cost(tokens: int, squares: int) -> float:
    """Return a cost that needs no model: attention costs as much as the other layers at 4096 tokens."""
    return tokens + squares / 4096


class Stream:
    """Samples in a fixed order, as steps of `rows` rows of at most T tokens. `stream_of` creates a source's stream.

    Args:
        source: the samples; a layout that does not cut documents requires samples of at most T tokens.
        rows: rows per step, over all ranks and micro-batches.
        cost: FLOPs of (tokens, sum of squared document lengths); ranks get rows of similar cost.
        shuffle: False: every epoch has the source's order.
        most_bad: the largest allowed share of bad rows of a streamed source.
    """

    tokenized = True  # all samples are, so any step can be computed from its number
    _kept = 2  # windows that stay in memory

    def __init__(
        self,
        source: SampleSource,
        layout: RowLayout,
        *,
        T: int,
        rows: int,
        seed: int,
        cost: Callable[[int, int], float] = plain_cost,
        shuffle: bool = True,
        most_bad: float = 0.0,
    ) -> None:
        assert len(source) > 0 and T > 1 and rows > 0
        self.source, self.layout, self.T, self.rows, self.seed = source, layout, T, rows, seed
        self.cost, self.shuffle, self.most_bad = cost, shuffle, most_bad
        self.reference: np.ndarray | None = None  # (samples, 2) float32, for pairs; becomes `Batch.extra`
        self.stored: StoredTokens | None = None  # a teacher's tokens; become `Batch.extra`
        self.reader: ImageReader | None = None  # fills `Batch.images`
        self.samples: int = sum(_samples_of(n, weight) for n, weight in source.spans)  # per epoch
        self._windows = -(-self.samples // layout.window)  # per epoch
        self._order: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))  # (epoch, its samples)
        self._before = [0]  # rows before each window of the run
        self._laid: dict[int, _Window] = {}  # the most recent windows
        self.report: Callable[[str], None] = pool.silent  # gets a line per new key of a stream, and after each epoch
        self._open()

    def _open(self) -> None:
        self._lengths = self.source.lengths()
        longest = self._lengths.max() if self.layout.uncut else self.T
        assert self._lengths.min() > 0 and longest <= self.T, "samples must be cut before"

    def plan(self, epochs: float | None = None, steps: int | None = None) -> StreamPlan:
        """Return the length of a run of `epochs`, or of `steps`."""
        if steps is None:
            assert epochs is not None
            full = int(epochs)
            end = self._starts(full * self._windows)
            if epochs > full:
                end += round((epochs - full) * (self._starts((full + 1) * self._windows) - end))
            end = max(1, end)
        else:
            end = steps * self.rows
        widest, w = 1, 0
        while self._starts(w) < end:
            rows = self._window(w).rows
            used, pieces = rows.tokens(), rows.starts[1:] - rows.starts[:-1]
            pieces = pieces if self.layout.isolated else np.ones_like(pieces)
            widest, w = max(widest, int((pieces * self.source.parts + (used < self.T)).max())), w + 1
        return StreamPlan(-(-end // self.rows), end, widest)

    def totals(self, plan: StreamPlan, micro_rows: int) -> Totals | None:
        """Return the counts of a whole run, from lengths alone; None if these are unknown."""
        learnt = self.source.targets()
        tokens, targets, slots = 0, 0, 0
        for w in itertools.count():
            count = min(plan.rows - self._starts(w), len(self._window(w).rows))
            if count <= 0:
                break
            rows, numbers, _ = self._window(w)
            pieces = slice(0, rows.starts[count])
            fresh = rows.fresh[pieces]
            tokens += int((rows.last[pieces] - fresh).sum())
            targets += int(learnt[numbers[rows.samples[pieces]]][fresh == 0].sum())  # at a sample's first piece
            slots += padded_slots(rows.tokens()[:count], micro_rows, self.T)
        if not self.layout.pad_to_longest:
            slots = plan.steps * self.rows * self.T
        return Totals(plan.rows / self._starts(self._windows), tokens, targets, slots)

    def position(self, k: int) -> int:
        """Return the position of a run after k steps: the global number of the first row of step k."""
        return k * self.rows

    def seek(self, k: int, position: int) -> int:
        """Set the start of step k to `position` if k does not determine it; return the start."""
        return self.position(k)

    def step(self, k: int, plan: StreamPlan) -> list[Row]:
        """Return the rows of step k, counted from 0: exactly `rows`; rows beyond the end of the run are empty."""
        first = k * self.rows
        last = max(first, min(first + self.rows, plan.rows))
        return [self._row(g)[0] for g in range(first, last)] + [[] for _ in range(last, first + self.rows)]

    def batches(self, k: int, plan: StreamPlan, *, rank: int, ranks: int, micro_rows: int) -> list[Batch]:
        """Return this rank's micro-batches of step k: the same number on every rank and in every step."""
        return micro_batches(self, self.step(k, plan), plan.widest, rank=rank, ranks=ranks, micro_rows=micro_rows)

    def run(
        self, plan: StreamPlan, done: int, *, rank: int, ranks: int, micro_rows: int, loading: Loading
    ) -> Iterator[list[Batch]]:
        """Return `batches` of the steps from `done` on."""
        make = partial(self.batches, plan=plan, rank=rank, ranks=ranks, micro_rows=micro_rows)
        return prefetched(make, range(done, plan.steps), loading)

    def _row(self, g: int) -> tuple[Row, int]:
        """Return row g of the run, and the position after it."""
        while self._before[-1] <= g:
            self._starts(len(self._before))
        w = bisect_right(self._before, g) - 1
        rows, numbers, samples = self._window(w)
        r = g - self._before[w]
        row: Row = []
        for piece in range(rows.starts[r], rows.starts[r + 1]):
            at = int(rows.samples[piece])
            number, documents = samples[at] if samples else (int(numbers[at]), self.source.documents(int(numbers[at])))
            first, fresh, last = (int(column[piece]) for column in (rows.first, rows.fresh, rows.last))
            row += [(number, d) for d in _cut(documents, first, fresh, last)]
        return row, w * ROWS + r + 1

    def _starts(self, w: int) -> int:
        """Return the number of the first row of window w; lays out the windows before it."""
        while len(self._before) <= w:
            self._before.append(self._before[-1] + len(self._window(len(self._before) - 1).rows))
        return self._before[w]

    def _window(self, w: int) -> _Window:
        """Return window w; the last `_kept` windows stay in memory."""
        if w not in self._laid:
            epoch, j = divmod(w, self._windows)
            numbers, lengths, samples = self._members(w)
            rows = Rows(np.zeros(1, np.int64), *np.zeros((4, 0), np.int64))
            if len(lengths):
                before = self._before[w] % self.rows
                draw = np.random.PCG64(np.random.SeedSequence([self.seed, epoch, j]))
                rows = self.layout.place(lengths, self.T, self.rows, before, draw)
            kept = list(self._laid.items())[len(self._laid) - self._kept + 1 :]
            self._laid = {**dict(kept), w: _Window(rows, numbers, samples)}
        return self._laid[w]

    def _members(self, w: int) -> tuple[np.ndarray, np.ndarray, list[Sample]]:
        """Return numbers and lengths of window w's samples, (n,) int64 each, and the samples of a streamed source."""
        numbers = self._numbers(*divmod(w, self._windows))
        return numbers, self._lengths[numbers], []

    def _numbers(self, epoch: int, j: int) -> np.ndarray:
        """Return the samples of window j of an epoch, (n,) int64."""
        if self._order[0] != epoch:
            self._order = (epoch, epoch_order(self.source.spans, self.seed, epoch, self.shuffle))
        return self._order[1][j * self.samples // self._windows : (j + 1) * self.samples // self._windows]


class LiveStream(Stream):
    """Samples whose lengths are known only once they are read: windows and steps are produced in order.

    The position of a run is window * ROWS + row, known for the steps produced so far and the next one.
    """

    tokenized, _kept = False, 1
    source: LiveSource

    def _open(self) -> None:
        self.aside: Path | None = None  # the file that lists bad rows
        self.counts = Counts()  # of all rows read, by this process and its workers
        self._described = 0  # rows reported
        self._keys = set(self.source.counts.keys)  # reported
        self._refused: dict[RowLocation, BadRow] = {}
        self._progress: tokenize.Progress | None = None  # of the first window
        self._positions = {0: 0}  # starts of the steps produced so far, and of the next
        self._parts: Iterator[SampleChunk] | None = None  # of the windows from `_next_window` on
        self._next_step, self._next_row, self._next_window = -1, 0, 0

    def plan(self, epochs: float | None = None, steps: int | None = None) -> StreamPlan:
        """Return the length of a run of `steps`; raise ConfigError if it is None."""
        if steps is None:
            do = "set train.steps, or data.stream: false"
            raise ConfigError(f"`train.epochs: {epochs:g}` with `data.stream`", "the length of a stream is unknown", do)
        return StreamPlan(steps, steps * self.rows, 0)

    def totals(self, plan: StreamPlan, micro_rows: int) -> None:
        """Return None: the tokens of a stream are unknown before they are read."""

    def position(self, k: int) -> int:
        return self._positions[k]

    def seek(self, k: int, position: int) -> int:
        self._positions = {0: 0, k: position}
        return position

    def step(self, k: int, plan: StreamPlan) -> list[Row]:
        if self._next_step != k:
            self._begin(k, Loading())
        rows = [self._row(g) for g in range(self._next_row, self._next_row + self.rows)]
        self._positions[k + 1] = rows[-1][1]
        self._next_step, self._next_row = k + 1, self._next_row + self.rows
        return [row for row, _ in rows]

    def run(
        self, plan: StreamPlan, done: int, *, rank: int, ranks: int, micro_rows: int, loading: Loading
    ) -> Iterator[list[Batch]]:
        """Return `batches` of the steps from `done` on; every rank reads all rows."""
        self._begin(done, loading)
        return self._run(plan, done, rank=rank, ranks=ranks, micro_rows=micro_rows, pinned=loading.pinned)

    def _run(
        self, plan: StreamPlan, done: int, *, rank: int, ranks: int, micro_rows: int, pinned: bool
    ) -> Iterator[list[Batch]]:
        room = 0
        try:
            for k in range(done, plan.steps):
                rows = self.step(k, plan)
                documents = max(len(row) + 1 for row in rows) if self.layout.isolated else 2
                room = max(room, -(-documents // ROOM) * ROOM)
                yield _pinned(micro_batches(self, rows, room, rank=rank, ranks=ranks, micro_rows=micro_rows), pinned)
            self._describe()
        finally:
            self._parts, self._next_step = None, -1  # drops the loader, which ends its workers

    def _begin(self, k: int, loading: Loading) -> None:
        window, row = divmod(self._positions[k], ROWS)
        chunks = -(-min(self.layout.window, self.samples) // CHUNK)
        # Workers read the next window while the run trains on the current one.
        prefetch = max(loading.prefetch, -(-chunks // max(1, loading.workers)))
        self._parts = prefetched(self._read, self._tasks(window), replace(loading, prefetch=prefetch, pinned=False))
        before = -row % self.rows  # makes the number of step k's first row a multiple of `rows`
        self._before, self._laid = [-1] * window + [before], {}
        self._next_step, self._next_row, self._next_window = k, before + row, window
        self._progress = tokenize.Progress(console.say, "tokenising the first rows", self._size(window))

    def _members(self, w: int) -> tuple[np.ndarray, np.ndarray, list[Sample]]:
        samples = self._receive(w)
        lengths = [sum(map(len, documents)) for _, documents in samples]
        return np.array([n for n, _ in samples], np.int64), np.array(lengths, np.int64), samples

    def _receive(self, w: int) -> list[Sample]:
        """Return the samples of the streamed window w, which must be the next one."""
        assert self._parts is not None and w == self._next_window, "windows are read in order"
        self._next_window += 1
        samples: list[Sample] = []
        progress, self._progress = self._progress or tokenize.Progress(pool.silent, "", 1.0), None
        for _ in range(-(-self._size(w) // CHUNK)):
            part = next(self._parts)
            samples += part.samples
            self._note(part)
            progress.done(part.rows, part.rows)
        first = bisect_right(self._before, self._before[-1] - 1)  # first of the consecutive windows without a row
        if not samples and w - first >= self._windows:
            raise DataError("`data.stream`", "no row gives a sample", "look at the rows: optrush data show")
        return samples

    def _note(self, part: SampleChunk) -> None:
        """List new bad rows in the file, report new keys, and check the shares of bad and cut rows over all workers."""
        epochs = self.counts.rows // self.samples
        self.counts.add(part.counts or Counts(rows=part.rows))
        new = [r for r in part.refused if r.where not in self._refused]
        self._refused.update((r.where, r) for r in new)
        if self.aside is not None:
            tokenize.append_bad_rows(self.aside, new)
        counts, enough = self.counts, self.counts.rows >= min(tokenize.EARLY_rows, self.samples)
        if self._refused and enough:
            tokenize.check_bad_share(list(self._refused.values()), min(counts.rows, self.samples), self.most_bad)
        if enough and counts.truncated > self.source.most_truncated * counts.rows:
            raise truncated_rows(counts.truncated, counts.rows, self.source.most_truncated)
        if fresh := {key for key in counts.keys if " -> " not in key} - self._keys:
            self._keys |= fresh
            self.report(
                f"unread keys: {', '.join(map(quoted, sorted(fresh)))}, first in the rows before row {counts.rows}"
            )
        if counts.rows // self.samples > epochs:
            self._describe()

    def _describe(self) -> None:
        """Report the counts of a streamed source if they have changed."""
        if self.counts.rows > self._described:
            self._described = self.counts.rows
            self.report(describe_stream(self.counts))

    def _tasks(self, window: int) -> Iterator[Task]:
        for w in itertools.count(window):
            size = self._size(w)
            yield from ((w, first, min(size, first + CHUNK)) for first in range(0, size, CHUNK))

    def _size(self, w: int) -> int:
        j = w % self._windows
        return (j + 1) * self.samples // self._windows - j * self.samples // self._windows

    def _read(self, task: Task) -> SampleChunk:
        """Return the tokenized samples of a task; runs in a worker."""
        window, first, last = task
        return self.source.read(self._numbers(*divmod(window, self._windows))[first:last].tolist())


def stream_of(source: SampleSource, layout: RowLayout, **settings: Any) -> Stream:
    """Return the stream of a source, with the arguments of `Stream`."""
    if source.tokenized:
        return Stream(source, layout, **settings)
    small: Any = replace(cast(Any, layout), window=min(layout.window, LIVE_WINDOW))
    return LiveStream(source, small, **settings)


def micro_batches(
    stream: Stream, rows: Sequence[Row], widest: int, *, rank: int, ranks: int, micro_rows: int
) -> list[Batch]:
    """Return this rank's rows of a step as micro-batches; `widest`: most documents in a row, padding counted as one."""
    assert len(rows) % (micro_rows * ranks) == 0 and 0 <= rank < ranks
    tokens = [sum(len(d) for _, d in row) for row in rows]
    isolated, parts = stream.layout.isolated, stream.source.parts
    squares = [sum(len(d) ** 2 for _, d in row) if isolated else n * n for row, n in zip(rows, tokens)]
    costs = [stream.cost(n, s) for n, s in zip(tokens, squares)]
    if (reader := stream.reader) is not None:
        costs = [cost + sum(reader.flops(i) for _, d in row for i in d.images) for cost, row in zip(costs, rows)]
    mine = deal(costs, ranks)[rank]
    single = (stream.layout.one_doc and parts == 1) or not isolated
    result = []
    for first in range(0, len(mine), micro_rows):
        part = mine[first : first + micro_rows]
        T = padded_width(max(tokens[r] for r in part), stream.T) if stream.layout.pad_to_longest else stream.T
        picked = [rows[r] for r in part]
        batch = collate(
            picked, T, single=single, most=micro_rows * widest, isolated=isolated, parts=parts,
            reference=stream.reference, stored=stream.stored, reader=stream.reader,
        )  # fmt: skip
        result.append(batch)
    return result


def epoch_order(spans: Sequence[tuple[int, float]], seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    """Return the samples of an epoch in order, (n,) int64; depends on (seed, epoch) alone.

    An origin of weight 2 has each sample twice per epoch; weight 0.5 takes half of them, the other half next epoch.
    """
    parts, base = [], 0
    for n, weight in spans:
        repeats, extra = int(weight), _samples_of(n, weight) - int(weight) * n
        turn = permutation(n, seed, 0)[(epoch * extra + np.arange(extra)) % n] if extra else np.zeros(0, np.int64)
        parts += [base + np.tile(np.arange(n), repeats), base + np.sort(turn)]
        base += n
    samples = np.concatenate(parts)
    return samples[permutation(len(samples), seed, epoch)] if shuffle else samples


def _samples_of(n: int, weight: float) -> int:
    return max(1, round(n * weight))


def _cut(documents: Sequence[Document], first: int, fresh: int, last: int) -> Sequence[Document]:
    """Return the tokens [first, last) of a sample; tokens before `fresh` are context, not targets."""
    if fresh == 0 and last == sum(map(len, documents)):
        return documents
    (document,) = documents  # a pair is never cut
    targets = document.targets[first:last].copy()
    targets[: max(1, fresh - first)] = False  # a row's first token has no context
    weights = None if document.weights is None else document.weights[first:last]
    assert not document.images, "a layout that cuts documents has none with images"
    return [Document(document.ids[first:last], targets, weights=weights)]


@dataclass(frozen=True)
class Evaluation:
    """All samples once, in rows; iterate for this rank's batches (the same number on every rank)."""

    documents: int
    rows: int  # rows with at least one document
    batches: int  # per rank
    source: SampleSource
    _single: bool
    _placed: Sequence[Sequence[int]]
    _T: int
    _share: tuple[int, int, int]  # rank, ranks, micro_rows
    _most: int
    reference: np.ndarray | None = None  # (samples, 2) float32, for pairs; becomes `Batch.extra`
    stored: StoredTokens | None = None  # a teacher's tokens; become `Batch.extra`
    reader: ImageReader | None = None  # fills `Batch.images`
    figures: Mapping[str, float] | None = None  # replaces the objective's other metrics, after an iteration

    def __iter__(self) -> Iterator[Batch]:
        rank, ranks, micro_rows = self._share
        for first in range(0, len(self._placed), ranks * micro_rows):
            mine = self._placed[first : first + ranks * micro_rows][rank::ranks]
            part = [[(i, d) for i in row for d in self.source.documents(i)] for row in mine]
            yield collate(
                part, self._T, single=self._single, most=self._most, parts=self.source.parts,
                reference=self.reference, stored=self.stored, reader=self.reader,
            )  # fmt: skip


def evaluation(source: SampleSource, *, T: int, micro_rows: int, rank: int, ranks: int, packed: bool) -> Evaluation:
    """Return all samples in rows, packed or one per row; empty rows make the number of batches equal on all ranks."""
    assert len(source) > 0 and 0 <= rank < ranks and micro_rows > 0
    lengths = source.lengths()
    assert lengths.max() <= T, "samples must be cut before"
    layout: RowLayout = Packed() if packed else Padded()
    laid = layout.place(lengths, T, 1, 0, np.random.PCG64(0))
    placed = [laid.samples[a:b].tolist() for a, b in zip(laid.starts, laid.starts[1:])]
    rows, used = len(placed), laid.tokens()
    placed += [[] for _ in range(-rows % (ranks * micro_rows))]
    most = micro_rows * max(len(row) * source.parts + (n < T) for row, n in zip(placed, used))
    single = layout.one_doc and source.parts == 1
    batches = len(placed) // (ranks * micro_rows)
    return Evaluation(
        len(source) * source.parts, rows, batches, source, single, placed, T, (rank, ranks, micro_rows), most
    )
