"""Compute rewards in worker processes: in parallel, with a time limit that also ends code in C, and bounded memory.

A worker is a fresh interpreter that shares nothing with the training process: no GPU, locks or memory. It has one
answer at a time. If a worker is late or dies, its answer has no reward, like after an exception, and the worker is
replaced; also after RECYCLED answers, or once its memory has grown by GROWTH_bytes.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from optrush.config import Grpo, RewardRule
from optrush.errors import ConfigError, one_line
from optrush.launch import die_with_parent
from optrush.objectives.plugged import HERE
from optrush.objectives.rewards import Judge

GRACE_S = 1.0  # time after the limits of all rewards until a worker is killed
READY_S = 120.0  # time limit of a worker's imports
RECYCLED, GROWTH_bytes = 1000, 1 << 29
LEFT_TO_PARENT = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def judge_of(settings: Grpo) -> Judge:
    """Return the rewards of a run. Raises ConfigError like `open_reward`, or if workers cannot load a function."""
    if not settings.reward_workers:
        return Judge(settings.rewards, settings.reward_timeout)
    return PooledJudge(settings.rewards, settings.reward_timeout, settings.reward_workers)


@dataclass
class RewardWorker:
    """A worker process, the number of its answer (None: idle or starting), and its deadline."""

    process: subprocess.Popen[bytes]
    pipe: Connection
    until: float
    ready: bool = False
    number: int | None = None


class PooledJudge(Judge):
    """The rewards of a run, computed by `count` workers that start with the first answers and end with this object."""

    def __init__(self, rules: Sequence[RewardRule], seconds: float, count: int) -> None:
        super().__init__(rules, seconds)
        self.count, self.workers = count, list[RewardWorker]()
        self.asked = f"`grpo.reward_workers: {count}`"
        if local := next((rule.use for rule in rules if rule.use.startswith(HERE)), None):
            found = f"`{local}`, a function of this process, which others cannot load"
            raise ConfigError(self.asked, found, "name it as FILE.py:FUNCTION, or set grpo.reward_workers: 0")
        self._end = weakref.finalize(self, _end, self.workers, os.getpid())

    def every(self, answers: Sequence[tuple[str, str, Mapping[str, Any], str]]) -> list[list[float] | None]:
        """Implement `Judge.every`.

        Raises:
            ConfigError: a worker does not start.
        """
        results: dict[int, tuple[list[float] | None, str]] = {}
        todo = deque(range(len(answers)))
        try:
            while len(results) < len(answers):
                self._advance(answers, todo, results)
        except BaseException:  # results of this call must not reach the next one
            _end(self.workers)
            raise
        ordered = [results[i] for i in range(len(answers))]
        self.first_failure = self.first_failure or next((failure for _, failure in ordered if failure), "")
        return [values for values, _ in ordered]

    def _advance(
        self, answers: Sequence[tuple[str, str, Mapping[str, Any], str]], todo: deque[int],
        results: dict[int, tuple[list[float] | None, str]],
    ) -> None:  # fmt: skip
        """Send answers to idle workers, and add the next results to `results`."""
        while len(self.workers) < min(self.count, len(todo) + sum(w.number is not None for w in self.workers)):
            self.workers.append(_begin(self.rules, self.seconds))
        for worker in self.workers:
            if worker.ready and worker.number is None and todo:
                self._give(worker, todo.popleft(), answers)
        busy = {w.pipe: w for w in self.workers if not w.ready or w.number is not None}
        at = wait(list(busy), max(0.0, min(w.until for w in busy.values()) - time.monotonic()))
        late = [w for w in busy.values() if w.until <= time.monotonic() and w.pipe not in at]
        for worker in [busy[pipe] for pipe in at if isinstance(pipe, Connection)] + late:
            values, failure = self._result(worker, worker in late)
            if worker.number is not None:
                where = answers[worker.number][3]
                results[worker.number] = values, self._named(failure, where) if failure else ""
                worker.number = None

    def _named(self, failure: str, where: str) -> str:
        names = ", ".join(rule.use for rule in self.rules)
        return failure if failure.startswith("the reward") else one_line(f"the reward `{names}` at {where}: {failure}")

    def _give(
        self, worker: RewardWorker, number: int, answers: Sequence[tuple[str, str, Mapping[str, Any], str]]
    ) -> None:
        worker.number, worker.until = number, time.monotonic() + self.seconds * len(self.rules) + GRACE_S
        with suppress(OSError):  # a dead worker is noticed when its pipe is read
            worker.pipe.send(answers[number])

    def _result(self, worker: RewardWorker, late: bool) -> tuple[list[float] | None, str]:
        """Return an answer's values and its failure; remove a late, dead or used-up worker."""
        try:
            if late:
                raise EOFError
            values, failure, used_up = worker.pipe.recv()
        except (EOFError, OSError):
            code = _end([worker])
            self.workers.remove(worker)
            what = f"it took longer than {self.seconds:g} s" if late else f"its process ended with {code}"
            if not worker.ready:
                do = "read its output above, or set grpo.reward_workers: 0"
                found = f"a worker was not ready within {READY_S:g} s" if late else f"a worker ended with {code}"
                raise ConfigError(self.asked, f"{found} before its first answer", do) from None
            return None, what
        if not worker.ready:
            worker.ready = True
        elif used_up:
            _end([worker])
            self.workers.remove(worker)
        return values, failure


def _begin(rules: Sequence[RewardRule], seconds: float) -> RewardWorker:
    ours, theirs = Pipe()
    places = [place or os.getcwd() for place in sys.path]  # not PYTHONPATH: a reward's subprocesses would inherit it
    with theirs:
        code = f"from {__name__} import serve; serve({theirs.fileno()}, {os.getpid()})"
        process = subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.path[:] = {places!r}; {code}"], pass_fds=(theirs.fileno(),),
            env={"OMP_NUM_THREADS": "1", **os.environ}, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True,
        )  # fmt: skip
    with suppress(OSError):  # a dead worker is noticed when its pipe is read
        ours.send(([rule.model_dump() for rule in rules], seconds, RECYCLED, GROWTH_bytes))
    return RewardWorker(process, ours, time.monotonic() + READY_S)


def _end(workers: list[RewardWorker], parent: int = 0) -> int:
    """Kill workers and their children; return the last one's exit code, or minus the fatal signal.

    Args:
        parent: the owning process (a fork has no workers). 0: this one.
    """
    code = 0
    while workers and parent in (0, os.getpid()):
        worker = workers.pop()
        worker.pipe.close()
        with suppress(subprocess.TimeoutExpired):  # a dead worker keeps its exit code
            worker.process.wait(0.1)
        with suppress(ProcessLookupError):  # the worker's process group, even if the worker has ended
            os.killpg(worker.process.pid, signal.SIGKILL)
        code = worker.process.wait()
    return code


def serve(number: int, parent: int) -> None:
    """Compute rewards for answers from a pipe until it closes."""
    for each in LEFT_TO_PARENT:  # not SIG_IGN: a reward's subprocesses would inherit it
        signal.signal(each, lambda *_: None)
    os.register_at_fork(after_in_child=lambda: [signal.signal(each, signal.SIG_DFL) for each in LEFT_TO_PARENT])
    die_with_parent(parent, signal.SIGKILL)
    pipe = Connection(number)
    rules, seconds, most, growth = pipe.recv()
    judge = Judge([RewardRule.model_validate(rule) for rule in rules], seconds)
    begun, done = _held_bytes(), 0
    pipe.send((None, "", False))
    while True:
        try:
            answer = pipe.recv()
        except EOFError:
            return
        judge.first_failure, done = "", done + 1
        values = judge(*answer)
        used_up = done >= most or _held_bytes() - begun > growth
        pipe.send((values, judge.first_failure, used_up))


def _held_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
