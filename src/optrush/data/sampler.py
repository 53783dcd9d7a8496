"""The order of the samples, and which of them a step, a rank and a micro-batch get.

An epoch is a random order of the samples, cut into windows; a layout makes rows of each window (pack.py). All of it is
a pure function of (seed, epoch, window), so rows have a global number g over the whole run, and where a run stands is
that one number: step k takes the rows [kR, (k+1)R). None of this knows of ranks, micro-batches or worker processes, so
any number of them resumes the run; only the last question, which rows of a step are mine, does.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import signal
import threading
import traceback
import warnings
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils.pin_memory import pin_memory

from optrush.data import tokenize
from optrush.data.batch import Batch, collate
from optrush.data.dataset import Source, permutation
from optrush.data.packing import Layout, Packed, Padded, Rows, deal, snug, snug_slots
from optrush.data.schema import Document, RowLocation
from optrush.data.tokenize import BadRow
from optrush.errors import ConfigError, DataError, RunError, UserError
from optrush.launch import die_with_parent

if TYPE_CHECKING:
    from optrush.data.dataset import Source, Streamed


# --- Work done ahead by other processes, in order: torch's DataLoader over a pure function of a number.
#
# Which process makes an item, and when, changes nothing about it, so a run may go on with any number of workers. What
# fails in a worker is raised here as it was raised there; a worker that dies is an error at once, not a wait.


Number = TypeVar("Number")
Item = TypeVar("Item")

GRACE_S = 2.0  # for a worker to end when it is asked to
_workers: list[BaseProcess] = []  # of the loader that was made last
os.register_at_fork(after_in_child=_workers.clear)  # they are not the child's to end


@dataclass(frozen=True)
class Loading:
    """How batches are made ready: by the training process itself, unless there are workers."""

    workers: int = 0
    prefetch: int = 2  # items that each worker is ahead
    pinned: bool = False  # in page-locked memory, from which a GPU fetches without the CPU


@dataclass(frozen=True)
class _Failed:
    error: UserError | RunError


class _Made(Dataset[Item], Generic[Number, Item]):
    def __init__(self, make: Callable[[Number], Item]) -> None:
        self.make = make

    def __getitem__(self, number: Number) -> Item | _Failed:  # type: ignore[override]
        try:
            return self.make(number)
        except (UserError, RunError) as error:
            return _Failed(error)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{last.filename}:{last.lineno}"
            return _Failed(RunError(f"a data worker failed: {type(error).__name__}: {error} ({where})"))


def ahead(make: Callable[[Number], Item], numbers: Iterable[Number], loading: Loading) -> Iterator[Item]:
    """make(n) for each number, in their order. Workers begin at once: use it inside `reading`, which ends them.

    Raises:
        UserError, RunError: as `make` raised them; anything else as a RunError that says where.
    """
    if not loading.workers:
        return _here(make, numbers, loading.pinned)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)  # more workers than cores
        loader: DataLoader[Item] = DataLoader(
            _Made(make),
            batch_size=None,
            sampler=numbers,
            num_workers=loading.workers,
            prefetch_factor=loading.prefetch,
            worker_init_fn=partial(_begin, os.getpid()),
            # What the worker reads is in memory already; it never touches a GPU nor a process group.
            multiprocessing_context="fork",
        )
        before = set(multiprocessing.active_children())
        items = iter(loader)
        _workers[:] = set(multiprocessing.active_children()) - before
        return _received(items, loading.pinned)


def _here(make: Callable[[Number], Item], numbers: Iterable[Number], pinned: bool) -> Iterator[Item]:
    for number in numbers:
        item = make(number)
        yield pin_memory(item) if pinned else item  # type: ignore[no-untyped-call]


def _received(items: Iterator[Item], pinned: bool) -> Iterator[Item]:
    """Pinned here, not by torch's thread: its loader waits for that thread without limit when it ends."""
    for item in items:
        if isinstance(item, _Failed):
            raise item.error
        yield pin_memory(item) if pinned else item  # type: ignore[no-untyped-call]


def _begin(trainer: int, _: int) -> None:
    """A worker lives as long as its trainer, which alone decides when a signal ends the run.

    Schedulers and terminals signal every process. So only a SIGTERM of the trainer itself ends a worker: that is how
    the interpreter ends the children it has left.
    """
    gc.freeze()  # what the trainer left to collect may be of a device that does not work here
    die_with_parent(trainer)
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_obey, args=(trainer,), daemon=True).start()


def _obey(trainer: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != trainer:
        pass
    os._exit(0)


@contextmanager
def reading(batches: Iterator[Item]) -> Iterator[None]:
    """Around what consumes batches: ends the workers afterwards, and says what one has died of.

    Torch tells of a dead worker wherever the main thread is, as a plain RuntimeError.
    """
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        _end()  # they may wait for a lock that the dead one holds
        said = next(line for line in str(error).splitlines() if "DataLoader worker" in line)
        raise RunError(f"a data worker died ({said}); the last checkpoint is intact: --resume auto") from error
    finally:
        if isinstance(batches, Generator):
            batches.close()
        _end()


def _end() -> None:
    """Ends the workers that are left: asks first, for torch takes any other end of a worker for a failure."""
    left = [_workers.pop() for _ in range(len(_workers))]
    for worker in left:
        worker.terminate()
    for worker in left:
        worker.join(GRACE_S)
    if any(worker.is_alive() for worker in left):
        handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # through which torch would tell of it
        for worker in left:
            worker.kill()
            worker.join()
        signal.signal(signal.SIGCHLD, handler)


Row = list[tuple[int, Document]]  # (sample, one of its documents or a piece of one)


def plain_cost(tokens: int, squares: int) -> float:
    """A cost without a model: attention as dear as the rest at 4096 tokens."""
    return tokens + squares / 4096


class Plan(NamedTuple):
    """How long a run is, and what its batches must have room for."""

    steps: int
    rows: int  # of the run; the last step may be partly empty
    widest: int  # most documents in one row of the run, padding counted as one


class Totals(NamedTuple):
    epochs: float
    tokens: int
    targets: int
    slots: int  # rows x their width, padding included


class Stream:
    """Samples in a fixed order as steps of `rows` rows of at most T tokens.

    Args:
        source: the samples; a layout that cuts none of them needs them to be no longer than T.
        layout: how they become rows.
        rows: rows of one step over all ranks and micro-batches.
        cost: FLOPs of (tokens, sum of squared document lengths): ranks get rows of like cost.
        shuffle: False takes every epoch in the source's own order.
    """

    def __init__(
        self,
        source: Source,
        layout: Layout,
        *,
        T: int,
        rows: int,
        seed: int,
        cost: Callable[[int, int], float] = plain_cost,
        shuffle: bool = True,
    ) -> None:
        assert len(source) > 0 and T > 1 and rows > 0
        self.source, self.layout, self.T, self.rows, self.seed = source, layout, T, rows, seed
        self.cost, self.shuffle = cost, shuffle
        self.samples: int = sum(drawn(n, weight) for n, weight in source.spans)  # of an epoch
        self.reference: np.ndarray | None = None  # (samples, 2) float32, of pairs: `Batch.extra`
        self._lengths = source.lengths()
        assert self._lengths.min() > 0 and (not layout.uncut or self._lengths.max() <= T), "samples are cut before"
        self._windows = -(-self.samples // layout.window)  # of an epoch
        self._before = [0]  # rows before each window of the run
        self._order: tuple[int, np.ndarray] = (-1, self._lengths)
        self._laid: dict[int, tuple[np.ndarray, Rows]] = {}

    def plan(self, epochs: float | None = None, steps: int | None = None) -> Plan:
        """The length of a run of so many epochs, or steps, however many epochs those are."""
        assert (epochs is None) != (steps is None)
        if steps is None:
            assert epochs is not None
            whole = int(epochs)
            self._reach(whole * self._windows)
            end = self._before[whole * self._windows]
            if epochs > whole:
                self._reach((whole + 1) * self._windows)
                end += round((epochs - whole) * (self._before[(whole + 1) * self._windows] - end))
            end = max(1, end)
        else:
            end = steps * self.rows
        widest, w = 1, 0
        while self._starts(w) < end:
            placed = self._window(w)[1]
            used, held = placed.tokens(), placed.starts[1:] - placed.starts[:-1]
            held = held if self.layout.isolated else np.ones_like(held)
            widest, w = max(widest, int((held * self.source.parts + (used < self.T)).max())), w + 1
        return Plan(-(-end // self.rows), end, widest)

    def totals(self, plan: Plan, micro_rows: int) -> Totals:
        """Counts of a whole run, from lengths alone."""
        learnt = self.source.targets()
        tokens, targets, slots = 0, 0, 0
        for w in itertools.count():
            count = min(plan.rows - self._starts(w), len(self._window(w)[1]))
            if count <= 0:
                break
            ids, placed = self._window(w)
            used = placed.tokens()[:count]
            pieces = slice(0, placed.starts[count])
            fresh = placed.fresh[pieces]
            tokens += int((placed.last[pieces] - fresh).sum())
            targets += int(learnt[ids[placed.samples[pieces]]][fresh == 0].sum())  # at a sample's first piece
            slots += snug_slots(used, micro_rows, self.T) if self.layout.pad_to_longest else count * self.T
        if not self.layout.pad_to_longest:
            slots = plan.steps * self.rows * self.T
        self._reach(self._windows)
        return Totals(plan.rows / self._before[self._windows], tokens, targets, slots)

    def step(self, k: int, plan: Plan) -> list[Row]:
        """The rows of step k, from 0: exactly `rows` of them; beyond the end of the run they are empty."""
        first, last = k * self.rows, min((k + 1) * self.rows, plan.rows)
        return [self._row(g) for g in range(first, last)] + [[] for _ in range(last, first + self.rows)]

    def batches(self, k: int, plan: Plan, *, rank: int, ranks: int, micro_rows: int) -> list[Batch]:
        """This rank's micro-batches of step k: the same number on every rank and in every step."""
        return batches(self, self.step(k, plan), plan.widest, rank=rank, ranks=ranks, micro_rows=micro_rows)

    def run(
        self, plan: Plan, done: int, *, rank: int, ranks: int, micro_rows: int, loading: Loading
    ) -> Iterator[list[Batch]]:
        """`batches` of the steps from `done` on."""
        make = partial(self.batches, plan=plan, rank=rank, ranks=ranks, micro_rows=micro_rows)
        return ahead(make, range(done, plan.steps), loading)

    def position(self, k: int) -> int:
        """The global number of the first row of step k: where a run stands that has done k steps."""
        return k * self.rows

    def seek(self, k: int, position: int) -> int:
        """Where step k begins, asked to go on with it at `position`: here the one follows from the other."""
        return self.position(k)

    def _row(self, g: int) -> Row:
        self._reach_row(g)
        w = bisect_right(self._before, g) - 1
        ids, placed = self._window(w)
        return gather(placed, g - self._before[w], lambda i: (int(ids[i]), self.source.documents(int(ids[i]))))

    def _reach_row(self, g: int) -> None:
        while self._before[-1] <= g:
            self._reach(len(self._before))

    def _starts(self, w: int) -> int:
        self._reach(w)
        return self._before[w]

    def _reach(self, w: int) -> None:
        """Lays out windows until it is known where window w begins."""
        while len(self._before) <= w:
            self._before.append(self._before[-1] + len(self._window(len(self._before) - 1)[1]))

    def _window(self, w: int) -> tuple[np.ndarray, Rows]:
        """(the window's samples, its rows); the last two are kept."""
        if w not in self._laid:
            epoch, j = divmod(w, self._windows)
            order = self._epoch(epoch)
            ids = order[j * self.samples // self._windows : (j + 1) * self.samples // self._windows]
            before = self._before[w] % self.rows
            placed = self.layout.place(self._lengths[ids], self.T, self.rows, before, draw(self.seed, epoch, j))
            self._laid = {**dict(list(self._laid.items())[-1:]), w: (ids, placed)}
        return self._laid[w]

    def _epoch(self, epoch: int) -> np.ndarray:
        if self._order[0] != epoch:
            self._order = (epoch, epoch_order(self.source.spans, self.seed, epoch, self.shuffle))
        return self._order[1]


def gather(placed: Rows, r: int, sample: Callable[[int], tuple[int, Sequence[Document]]]) -> Row:
    """Row r of a window, whose samples (number, documents) `sample` finds by their position in it."""
    row: Row = []
    for piece in range(placed.starts[r], placed.starts[r + 1]):
        number, documents = sample(int(placed.samples[piece]))
        first, fresh, last = (int(column[piece]) for column in (placed.first, placed.fresh, placed.last))
        row += [(number, d) for d in cut(documents, first, fresh, last)]
    return row


def batches(
    stream: Stream | Live, rows: Sequence[Row], widest: int, *, rank: int, ranks: int, micro_rows: int
) -> list[Batch]:
    """This rank's part of a step's rows as micro-batches."""
    assert len(rows) % (micro_rows * ranks) == 0 and 0 <= rank < ranks
    tokens = [sum(len(d) for _, d in row) for row in rows]
    isolated = stream.layout.isolated
    squares = [sum(len(d) ** 2 for _, d in row) if isolated else n * n for row, n in zip(rows, tokens)]
    mine = deal([stream.cost(n, s) for n, s in zip(tokens, squares)], ranks)[rank]
    found = []
    for first in range(0, len(mine), micro_rows):
        part = mine[first : first + micro_rows]
        T = stream.T
        if stream.layout.pad_to_longest:
            T = snug(max(tokens[r] for r in part), T)
        single = (stream.layout.one_doc and stream.source.parts == 1) or not isolated
        held = [rows[r] for r in part]
        made = collate(
            held, T, single=single, most=micro_rows * widest, isolated=isolated, parts=stream.source.parts,
            reference=stream.reference,
        )  # fmt: skip
        found.append(made)
    return found


def epoch_order(spans: Sequence[tuple[int, float]], seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    """The samples of an epoch in order, from (seed, epoch) alone.

    spans: (samples, weight) of each origin. Weight 2 reads each of its samples twice an epoch, 0.5 half of them, the
    other half in the next epoch.
    """
    parts, base = [], 0
    for n, weight in spans:
        whole, some = int(weight), drawn(n, weight) - int(weight) * n
        turn = permutation(n, seed, 0)[(epoch * some + np.arange(some)) % n] if some else np.zeros(0, np.int64)
        parts += [base + np.tile(np.arange(n), whole), base + np.sort(turn)]
        base += n
    samples = np.concatenate(parts)
    return samples[permutation(len(samples), seed, epoch)] if shuffle else samples


def draw(seed: int, epoch: int, window: int) -> np.random.PCG64:
    """Random bits of one window."""
    return np.random.PCG64(np.random.SeedSequence([seed, epoch, window]))


def drawn(n: int, weight: float) -> int:
    """Samples of an origin that an epoch reads."""
    return max(1, round(n * weight))


def cut(documents: Sequence[Document], first: int, fresh: int, last: int) -> Sequence[Document]:
    """The tokens [first, last) of a sample; those before `fresh` are context and not learnt."""
    if fresh == 0 and last == sum(map(len, documents)):
        return documents
    (document,) = documents  # a pair is never cut
    targets = document.targets[first:last].copy()
    targets[: max(1, fresh - first)] = False  # nothing predicts a row's first token
    return [Document(document.ids[first:last], targets)]


@dataclass(frozen=True)
class Evaluation:
    """Every sample once, in rows; iterate for this rank's batches (the same number on every rank)."""

    documents: int
    rows: int  # rows that hold at least one document
    batches: int  # of each rank
    source: Source
    _single: bool
    _placed: Sequence[Sequence[int]]
    _T: int
    _share: tuple[int, int, int]  # rank, ranks, micro_rows
    _most: int
    reference: np.ndarray | None = None  # (samples, 2) float32, of pairs: `Batch.extra`

    def __iter__(self) -> Iterator[Batch]:
        rank, ranks, micro_rows = self._share
        for first in range(0, len(self._placed), ranks * micro_rows):
            mine = self._placed[first : first + ranks * micro_rows][rank::ranks]
            part = [[(i, d) for i in row for d in self.source.documents(i)] for row in mine]
            yield collate(
                part, self._T, single=self._single, most=self._most, parts=self.source.parts, reference=self.reference
            )


def evaluation(source: Source, *, T: int, micro_rows: int, rank: int, ranks: int, packed: bool) -> Evaluation:
    """All samples as rows, packed or one a row; empty rows fill up so that every rank has as many batches."""
    assert len(source) > 0 and 0 <= rank < ranks and micro_rows > 0
    lengths = source.lengths()
    assert lengths.max() <= T, "samples are cut before"
    layout: Layout = Packed() if packed else Padded()
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


# --- Steps from rows that are tokenised while training runs: for data that shall not, or cannot, be tokenised before.
#
# The order, the windows and the layouts are those of a Stream, and so are the batches as long as no row is cut in
# pieces or left out. What is missing are the lengths: how many rows a window makes is known when it has been read. So
# where a run stands is (window, row), kept as one number, and only a number of steps can end it.


CHUNK = 64  # rows that a worker tokenises at a time
ROOM = 8  # the room for documents in a row grows by so many: few distinct shapes
ROWS = 2**32  # more than a window ever makes: a position is window * ROWS + row

Task = tuple[int, int, int]  # a window, and which of its rows: [first, last)
Sample = tuple[int, tuple[Document, ...]]


class Part(NamedTuple):
    """What some rows became."""

    samples: list[Sample]
    rows: int
    refused: Sequence[BadRow]


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
        self._refused: dict[RowLocation, BadRow] = {}

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
            tokenize.append(self.aside, new)
        if self._refused and self.read >= min(tokenize.EARLY_rows, self.samples):
            tokenize.check(list(self._refused.values()), min(self.read, self.samples), self.source.most_bad)

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
    from optrush.data.dataset import Streamed

    if isinstance(source, Streamed):
        return Live(source, layout, T=T, rows=rows, seed=seed, cost=cost)
    return Stream(source, layout, T=T, rows=rows, seed=seed, cost=cost)
