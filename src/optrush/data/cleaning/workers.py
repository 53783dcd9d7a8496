"""Parts measured in this process or in several, handed over in the files' order whatever order they end in."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from optrush.data.cleaning.measure import Measure, Measured, Task
from optrush.data.read import Chunk
from optrush.errors import RunError
from optrush.launch import die_with_parent

AHEAD = 2  # parts that wait for each worker: their columns are held

_measure: Measure | None = None  # of a worker


def measured(task: Task, parts: Sequence[Chunk], workers: int) -> Iterator[Measured]:
    """What is measured of each part, in order.

    Raises:
        RunError: a worker was killed.
    """
    workers = min(workers, len(parts))
    if workers <= 1:
        measure = Measure(task)
        for number, part in enumerate(parts):
            yield measure.part(part, number)
        return
    context = multiprocessing.get_context("spawn")  # forking a process with threads of torch can hang
    pool = ProcessPoolExecutor(workers, context, _begin, (task, os.getpid()))
    try:
        waiting: deque[Future[Measured]] = deque()
        left = iter(enumerate(parts))
        while True:
            while len(waiting) < AHEAD * workers and (job := next(left, None)) is not None:
                waiting.append(pool.submit(_part, job[1], job[0]))
            if not waiting:
                return
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise RunError("a process that measured rows for cleaning was killed, most likely out of memory") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(task: Task, parent: int) -> None:
    global _measure
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    _measure = Measure(task)


def _part(part: Chunk, number: int) -> Measured:
    assert _measure is not None
    return _measure.part(part, number)
