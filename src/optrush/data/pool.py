"""Map a function over items with worker processes: results in order, a bounded number of items ahead, no hangs.

A worker is a fork that shares this process's memory, so that it starts within some hundredths of a second and needs
little extra memory. The pool waits for all pipes at once: a worker that dies closes its pipe, and a worker that sends
nothing for too long is killed. Either is an error of its item, raised at the item's turn. Workers ignore signals, which
their parent handles, and end with it.
"""

from __future__ import annotations

import gc
import math
import os
import signal
import threading
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from queue import Queue
from typing import Any, Generic, TypeVar

from optrush.errors import RunError, UserError
from optrush.launch import die_with_parent

Item = TypeVar("Item")
Result = TypeVar("Result")
Beat = Callable[[int], None]  # reports that a worker is alive, with the number of rows done since the last report
Work = Callable[[Item, Beat], Result]
Lost = Callable[[Item, str], Exception]  # the error of a lost worker's item

AHEAD = 2  # items per worker
SENT_S = 0.2  # a worker's maximum wait for its last result to be sent
QUIET_S = 600.0  # a worker that sends no message for this long is killed
POLL_S = 1.0
LEFT_TO_PARENT = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def silent(_: Any) -> None:
    """Report nothing."""


def map_ahead(
    work: Work[Item, Result], items: Iterable[Item], count: int, lost: Lost[Item], beat: Beat = silent
) -> Generator[Result]:
    """Yield work(item, beat) for each item, in order; in worker processes if `count` is more than one.

    Args:
        work: its result is pickled.
        count: number of workers; close the generator to end them.

    Raises:
        UserError, RunError: from `work`, at the item's turn.
        Exception: `lost(item, reason)`, for a worker that died, failed or sent nothing for QUIET_S.
    """
    if count <= 1:
        for item in items:
            yield work(item, beat)
        return

    def start() -> Work[Item, Result]:
        gc.freeze()  # a collection would write to shared memory, and so copy it
        os.dup2(2, 1)  # output of libraries goes to standard error
        return work

    with Pool[Item, Result](forked(start, count), items, lost, limit_s=QUIET_S, beat=beat) as pool:
        yield from pool


@dataclass
class Worker:
    """A worker process, and the numbers of its items, the current one first."""

    pid: int
    pipe: Connection
    numbers: deque[int] = field(default_factory=deque)
    quiet_s: float = 0.0  # time that this process has waited since the worker's last message


class Pool(Generic[Item, Result]):
    """An iterator over the results of items; workers start immediately.

    Args:
        ahead: items per worker at a time.
        limit_s: like QUIET_S.
        waiting: called about once per second while waiting for a result, with the seconds so far.
    """

    def __init__(
        self, workers: list[Worker], items: Iterable[Item], lost: Lost[Item], *, ahead: int = AHEAD,
        limit_s: float = math.inf, waiting: Callable[[float], None] = silent, beat: Beat = silent,
    ) -> None:  # fmt: skip
        self.workers = workers
        self._todo, self._lost, self._limit_s, self._waiting, self._beat = iter(items), lost, limit_s, waiting, beat
        self._most, self._end = ahead * len(workers), weakref.finalize(self, _end, workers, os.getpid())
        self._items: dict[int, Item] = {}  # given to a worker, result pending
        self._done: dict[int, Result | Exception] = {}
        self._next = self._given = 0
        self._feed()

    def __enter__(self) -> Pool[Item, Result]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Result]:
        return self

    def __next__(self) -> Result:
        """Return the next item's result, in the order of the items; raise its exception and close the pool."""
        self._feed()
        begun = time.monotonic()
        while self._next not in self._done:
            if self._next not in self._items:
                self.close()
                raise StopIteration
            if not self._receive():
                self._waiting(time.monotonic() - begun)
        result, _ = self._done.pop(self._next), self._items.pop(self._next)
        self._next += 1
        if isinstance(result, Exception):
            self.close()
            raise result
        return result

    def close(self) -> None:
        """Kill the workers; this also happens when the object or the interpreter ends."""
        self._end()
        self._todo = iter(())
        self._items.clear()
        self._done.clear()

    def _feed(self) -> None:
        for item in islice(self._todo, self._most - len(self._items) if self.workers else 0):
            worker = min(self.workers, key=lambda w: len(w.numbers))
            worker.numbers.append(self._given)
            self._items[self._given] = item
            self._given += 1
            with suppress(OSError):  # a dead worker is noticed when its pipe is read
                worker.pipe.send(item)

    def _receive(self) -> bool:
        """Process the workers' messages that arrive within POLL_S; return whether there were any."""
        busy, begun = {worker.pipe: worker for worker in self.workers if worker.numbers}, time.monotonic()
        ready = [busy[pipe] for pipe in wait(list(busy), POLL_S) if isinstance(pipe, Connection)]
        for worker in ready:
            worker.quiet_s = 0.0
            try:
                kind, value = worker.pipe.recv()
            except (EOFError, OSError):
                self._lose(worker, _ending(_reaped(worker)))
                continue
            if kind == "beat":
                self._beat(value)
            else:
                number = worker.numbers.popleft()
                self._done[number] = value if kind == "done" else self._lost(self._items[number], value)
        waited = time.monotonic() - begun  # excludes the caller's time between two results
        for worker in (w for w in busy.values() if w not in ready):
            worker.quiet_s += waited
            if worker.quiet_s >= self._limit_s:
                with suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)
                _reaped(worker)
                self._lose(worker, f"gave no result for {self._limit_s:g} s and was stopped")
        self._feed()
        return bool(ready)

    def _lose(self, worker: Worker, what: str) -> None:
        self.workers.remove(worker)
        for number in worker.numbers:
            self._done[number] = self._lost(self._items[number], what)


def _end(workers: list[Worker], parent: int) -> None:
    if os.getpid() == parent:  # a fork of this process has no workers
        for worker in workers:
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
        for worker in workers:
            _reaped(worker)
        workers.clear()


def _reaped(worker: Worker) -> int:
    """Wait for a worker to end; return its exit code, or minus the signal that ended it."""
    worker.pipe.close()
    try:
        return os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
    except ChildProcessError:  # SIGCHLD is ignored: the kernel has reaped it
        return 0


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with code {code} (its output is above)"
    return f"was killed by signal {-code}" + (" (out of memory?)" if code == -signal.SIGKILL else "")


# --- Starting a worker.

SERIAL = "TOKENIZERS_PARALLELISM"  # a fork lacks the tokenizer's threads, and would wait for them


def forked(start: Callable[[], Work[Item, Result]], count: int) -> list[Worker]:
    """Start forks of this process, each with the function that `start` returns there."""
    workers, parent, threads = list[Worker](), os.getpid(), os.environ.get(SERIAL)
    os.environ[SERIAL] = "false"
    try:
        for _ in range(count):
            workers.append(_fork(start, parent))
    except OSError:  # no more processes, or no more pipes
        _end(workers, parent)
        raise
    finally:
        del os.environ[SERIAL]
        os.environ.update({} if threads is None else {SERIAL: threads})
    return workers


def _fork(start: Callable[[], Work[Item, Result]], parent: int) -> Worker:
    """Start one fork of this process, which serves the function that `start` returns there; return its Worker."""
    ours, theirs = Pipe()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_PARENT)  # until the worker ignores them
    try:
        with warnings.catch_warnings():  # Python 3.12 warns about threads, which the forks do not use
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            try:
                _leave_signals(parent)
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                _serve(theirs, start())
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)  # the parent's exit handlers must not run
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
    return Worker(pid, ours)


def _leave_signals(parent: int) -> None:
    """Ignore signals: schedulers and terminals signal every process of a job; only the parent reacts."""
    for number in LEFT_TO_PARENT:
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(parent, signal.SIGKILL)


def _serve(pipe: Connection, work: Work[Item, Result]) -> None:
    """Process items until the pipe ends. A thread sends results, so that work continues meanwhile."""
    waiting: Queue[memoryview] = Queue()

    def send() -> None:
        with suppress(OSError):
            while True:
                pipe.send_bytes(waiting.get())
                waiting.task_done()

    def beat(rows: int) -> None:
        waiting.put(ForkingPickler.dumps(("beat", rows)))

    threading.Thread(target=send, daemon=True).start()
    while True:
        try:
            item = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        with waiting.all_tasks_done:  # if the next item kills this process, unsent results are lost
            waiting.all_tasks_done.wait_for(lambda: not waiting.unfinished_tasks, SENT_S)
        try:
            message: tuple[str, object] = "done", work(item, beat)
        except (UserError, RunError) as error:
            message = "done", error  # raised by the receiver
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            message = "failed", f"failed: {type(error).__name__}: {error} ({last.filename}:{last.lineno})"
        waiting.put(ForkingPickler.dumps(message))
