"""Work done ahead by other processes, in order: torch's DataLoader over a pure function of a number.

Which process makes an item, and when, changes nothing about it, so a run may go on with any number of workers. What
fails in a worker is raised here as it was raised there; a worker that dies is an error at once, not a wait.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Generic, TypeVar

from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils.pin_memory import pin_memory

from optrush.errors import RunError, UserError
from optrush.launch import die_with_parent

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
