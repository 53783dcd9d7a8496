"""Ranks (gloo) in processes that live as long as the test session, forked from one that has imported torch for all."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

PATIENCE_S = 300.0
IMPORTED = [  # once, before the first rank is forked; none of them starts a thread
    "torch", "torch.distributed.tensor", "torch.distributed.fsdp", "transformers.modeling_utils", "optrush.techniques",
    "optrush.trainer.run", "optrush.exporting", "tensorboard.summary.writer.record_writer", "pytest", "hypothesis",
]  # fmt: skip


class Pair:
    """`pair(function, *args)` calls a module's function on all ranks and returns what each returned.

    An exception on one is raised here; the processes are then replaced, since one may wait for another.
    """

    def __init__(self, ranks: int = 2) -> None:
        self.ranks = ranks
        self.processes: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stop()

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        if not self.processes:
            self._start()
        for pipe in self.pipes:
            pipe.send((function, args))
        answers = []
        for pipe in self.pipes:
            if not pipe.poll(PATIENCE_S):
                self._stop()
                raise TimeoutError(f"{function.__name__}{args}: a rank has not answered for {PATIENCE_S} s")
            try:
                good, answer = pipe.recv()
            except EOFError:
                good, answer = False, "a rank has died"
            if not good:
                time.sleep(0.5)  # one that dies takes the other's connection with it, and that one speaks first
                ends = [process.exitcode for process in self.processes]
                self._stop()
                raise AssertionError(f"{answer}\nexit statuses of the ranks: {ends}")
            answers.append(answer)
        return answers

    def _start(self) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        self.pipes = []
        for rank in range(self.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(theirs, rank, self.ranks, port, dict(os.environ)), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def _stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
            process.close()
        for pipe in self.pipes if self.processes else ():
            pipe.close()
        self.processes = []


def serve(pipe: Any, rank: int, ranks: int, port: int, environment: dict[str, str]) -> None:
    """A rank: answers calls until its pipe closes."""
    os.environ.clear()  # of the test that needed a forked process first
    os.environ |= environment | {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    import pytest
    import torch

    from trials import undrawn

    torch.set_num_threads(1)
    undrawn(pytest.MonkeyPatch())
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, f"rank {rank}:\n{traceback.format_exc()}"))
        _unwatched()


def _unwatched() -> None:
    """End the watch over the other rank: in a run an error ends the process, in a test it may be expected."""
    from optrush.trainer import distributed

    if distributed._watch is not None:
        distributed._watch.close()
        distributed._watch = None
