"""Results in order, a bounded number of items ahead; workers that die, fail or hang are errors of their items."""

import os
import signal
import subprocess
import sys
import time

import pytest

from optrush.data import pool
from optrush.data.pool import Pool, forked, map_ahead
from optrush.errors import DataError

from trials import alive


def lost(item, what):
    return DataError(f"item {item}", what, "do")


def made(work, items, count=2, **options):
    return Pool(forked(lambda: work, count), items, lost, **options)


def test_results_come_in_order_and_few_items_are_taken_ahead():
    taken = []

    def items():
        for n in range(40):
            taken.append(n)
            yield n

    def work(n, beat):
        time.sleep(0.02 * (n % 3 == 0))
        beat(1)
        return n * n, os.getpid()

    beats = []
    with made(work, items(), ahead=3, beat=beats.append) as results:
        for n, (square, _) in enumerate(results):
            assert square == n * n and len(taken) <= n + 1 + 2 * 3
    assert len(taken) == 40 and len(beats) == 40


def test_what_a_worker_raises_is_raised_where_its_item_s_turn_comes():
    def work(n, _):
        if n == 3:
            raise DataError("asked", "found", "do")
        return n // (n - 5)

    results = made(work, range(9), ahead=9)
    assert [next(results) for _ in range(3)] == [0, -1, -1]
    with pytest.raises(DataError, match="found"):
        next(results)
    with pytest.raises(DataError, match=r"item 5\n.*failed: ZeroDivisionError: .*test_pool\.py:\d+"):
        list(made(work, range(5, 9)))


def test_a_worker_that_dies_or_hangs_is_an_error_of_its_item(monkeypatch):
    monkeypatch.setattr(pool, "POLL_S", 0.1)

    def dies(n, _):
        if n == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return n

    def hangs(n, beat):
        for _ in range(600 if n == 5 else 8):
            time.sleep(0.1)
            if n != 5:
                beat(0)  # takes longer than the limit, and says that it is at work
        return n

    for work, what, limit_s in (
        (dies, r"was killed by signal 9 \(out of memory\?\)", 600),
        (hangs, "gave no result", 0.6),
    ):
        results = made(work, range(4, 9), limit_s=limit_s)
        workers = [worker.pid for worker in results.workers]
        assert next(results) == 4
        with pytest.raises(DataError, match=f"item 5\n.*{what}"):
            next(results)
        assert not any(map(alive, workers)) and list(results) == []


def test_the_pool_waits_aloud(monkeypatch):
    monkeypatch.setattr(pool, "POLL_S", 0.1)
    waits = []
    assert list(made(lambda n, _: time.sleep(0.5), [1], waiting=waits.append)) == [None]
    assert len(waits) > 1 and waits == sorted(waits)


def test_one_worker_is_this_process():
    seen = []
    assert list(map_ahead(lambda n, beat: beat(n) or os.getpid(), range(3), 1, lost, seen.append)) == [os.getpid()] * 3
    assert seen == [0, 1, 2]


INTERRUPTED = """
import signal, time
from optrush.data.pool import Pool, forked
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background commands ignore it
with Pool(forked(lambda: lambda n, _: time.sleep(600), 2), range(9), None) as results:
    print(*[worker.pid for worker in results.workers], flush=True)
    next(results)
"""


def test_an_interrupt_ends_all():
    """A terminal sends it to the workers too."""
    command = [sys.executable, "-c", INTERRUPTED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        workers = [int(pid) for pid in process.stdout.readline().split()]
        assert len(workers) == 2 and all(map(alive, workers))
        os.killpg(process.pid, signal.SIGINT)
        assert b"KeyboardInterrupt" in process.communicate()[1]
    assert not any(map(alive, workers))


def test_no_process_more(monkeypatch):
    """Where another worker cannot begin, those before end, and this process is as it was."""
    real, begun = os.fork, []

    def fork():
        if begun:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        pid = real()
        begun.append(pid)
        return pid

    monkeypatch.setattr(os, "fork", fork)
    monkeypatch.delenv(pool.SERIAL, raising=False)
    with pytest.raises(BlockingIOError):
        pool.forked(lambda: lambda item, beat: item, 2)
    assert pool.SERIAL not in os.environ and not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGINT}
    with pytest.raises(ChildProcessError):
        os.waitpid(begun[0], 0)
