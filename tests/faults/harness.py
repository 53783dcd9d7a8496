"""What the fault tests share: forked processes and ranks that may be killed, and a job small enough to save 200 times.

Children are forked, not started: importing torch takes longer than everything these runs do.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from optrush import files
from optrush.config import parse_config
from optrush.hardware import HostMemory
from optrush.optim.adamw import AdamW
from optrush.trainer import distributed
from optrush.trainer.checkpoint import Meta, save, slices
from optrush.trainer.trainer import Storage, TrainedParam, Trainer

torch.set_num_threads(1)
LONG = os.environ.get("OPTRUSH_FAULTS") == "long"  # as `make faults` asks: as often as the documentation says
GUARD_S = 240.0  # longer than any child takes, on a machine that is busy: one that has not ended by then hangs
RAISED = 99  # what a child exits with that did not get to an end of its own
DISK = ("make_folder", "write_piece", "sync_file", "rename_file", "remove_file", "remove_folder")


def told(fault: str, n: int, figure: object) -> None:
    """The line a person reads with `pytest -s`; a test that gets here has passed."""
    print(json.dumps({"fault": fault, "n": n, "pass": n, "figure": figure}))


def fork(work: Callable[[], Any], env: dict[str, str] | None = None, log: Path | None = None) -> int:
    """Starts `work` in a forked child and returns its pid; an exception prints itself and exits with RAISED."""
    sys.stdout.flush()
    sys.stderr.flush()
    if log is not None:
        log.touch()  # who looks before the child has begun finds nothing said
    if pid := os.fork():
        return pid
    code = RAISED
    try:
        os.setpgid(0, 0)
        torch.set_num_threads(1)  # makes the thread pool anew here, before two threads try to at once and torch aborts
        if log is not None:
            fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            sys.stdout = sys.stderr = os.fdopen(fd, "w", buffering=1)  # pytest's own write elsewhere
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
        os.environ.update(env or {})
        answer = work()
        code = answer if isinstance(answer, int) else 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        with log.open("a") if log is not None else nullcontext(sys.stderr) as out:  # stderr may be another by now
            traceback.print_exc(file=out)
    finally:
        try:  # whatever happens, the child must not go on as a second pytest
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def wait_until(check: Callable[[], object], what: str) -> None:
    end = time.monotonic() + GUARD_S
    while not check():
        assert time.monotonic() < end, f"not within {GUARD_S:.0f} s: {what}"
        time.sleep(0.005)


def ended(pid: int) -> int:
    """Exit code of a child; minus the signal that killed it."""
    descriptor = os.pidfd_open(pid)
    over = select.select([descriptor], [], [], GUARD_S)[0]
    os.close(descriptor)
    if not over:
        os.kill(pid, signal.SIGKILL)
    assert over, f"process {pid} has not ended within {GUARD_S:.0f} s"
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run(work: Callable[[], Any]) -> int:
    return ended(fork(work))


def launch_env(n: int) -> list[dict[str, str]]:
    """What a launcher puts into the environment of each of n ranks."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    shared = {"WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [{**shared, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(n)]


def ranks(n: int, work: Callable[[], Any]) -> list[Any]:
    """Runs `work` on n ranks (gloo) and returns what each returned, through JSON."""
    with tempfile.TemporaryDirectory() as box:

        def rank(r: int) -> None:
            with distributed.leaving():
                answer = work()
            (Path(box) / str(r)).write_text(json.dumps(answer))

        pids = [fork(lambda r=r: rank(r), env) for r, env in enumerate(launch_env(n))]
        codes = [ended(pid) for pid in pids]
        assert codes == [0] * n, f"ranks ended with {codes}"
        return [json.loads((Path(box) / str(r)).read_text()) for r in range(n)]


def killing(at: int, how: str, names: tuple[str, ...] = DISK) -> None:
    """From here on, this process is killed at its `at`-th call that changes the disk: before, halfway, or after it."""
    calls = {"n": 0}

    def wrap(name: str) -> None:
        real = getattr(files, name)

        def call(*args: Any) -> Any:
            calls["n"] += 1
            if calls["n"] != at:
                return real(*args)
            if how == "half" and name == "write_piece":
                file, data = args
                real(file, memoryview(data)[: len(data) // 2])
                file.flush()
            elif how == "after":
                real(*args)
                if name == "write_piece":
                    args[0].flush()
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(files, name, call)

    for name in names:
        wrap(name)


class Kept:
    """A technique's state, as simple as can be."""

    def __init__(self) -> None:
        self.value = 0.0

    def save(self) -> dict[str, Any]:
        return {"value": self.value}

    def load(self, saved: dict[str, Any]) -> None:
        self.value = saved["value"]


SHAPES = {"embed": (33, 64), "norm": (7,), "narrow": (2, 5), "one": ()}


def small_job(output: Path, how: str = "whole", keep: int = 2, dtype: torch.dtype = torch.float32) -> Any:
    """A job of four parameters. how: whole | rows | columns | copies (as DTensors over the ranks there are)."""
    text = f"{{model: tiny, objective: sft, data: {{random: 8}}, output: '{output}', train: {{keep: {keep}}}}}"
    world = distributed.build_mesh({}, distributed.join("cpu"))
    trained = []
    for name, shape in SHAPES.items():
        whole = torch.zeros(shape, dtype=torch.bfloat16 if name == "norm" else dtype)
        placed: Any = whole
        if how != "whole" and world.mesh is not None:
            dim = 1 if how == "columns" and len(shape) == 2 else 0
            placement = Replicate() if how == "copies" or not shape else Shard(dim)
            placed = distribute_tensor(whole, world.mesh["dp"], [placement])
        trained.append(TrainedParam(name, nn.Parameter(placed), len(shape) > 1))
    run_ = parse_config(text, "test")
    optimizer = AdamW(trained, run_.optim, fused=False)
    state = {"kept": Kept()}
    job = SimpleNamespace(
        config=run_, world=world, trained=trained, optimizer=optimizer, state=state, counted_elsewhere=frozenset(),
        storage=Storage(), host_memory=HostMemory(None),
    )  # fmt: skip
    job.counts = partial(Trainer.counts, job)
    return job


def content(name: str, whole: tuple[int, ...], dtype: torch.dtype, step: int) -> torch.Tensor:
    """What the tensor of that name holds after that step: a pure function, so that any cutting can be checked."""
    g = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return torch.randn(whole, generator=g).to(dtype)


def advance(job: Any, step: int) -> None:
    for s in slices(job):
        here = tuple(slice(o, o + n) for o, n in zip(s.offset, s.shape))
        s.local.copy_(content(s.name, s.whole, s.local.dtype, step)[here])
    job.state["kept"].value = step / 3


def holds(job: Any, step: int) -> bool:
    """Whether every number of the job is, bit for bit, what it was after that step."""
    for s in slices(job):
        here = tuple(slice(o, o + n) for o, n in zip(s.offset, s.shape))
        if not torch.equal(s.local, content(s.name, s.whole, s.local.dtype, step)[here]):
            return False
    return bool(job.state["kept"].value == step / 3)


def meta(step: int, **fingerprints: str) -> Meta:
    return Meta("00ff", position=10 * step, skipped=step, fingerprints=fingerprints)


def saved(output: Path, steps: tuple[int, ...] = (2, 4, 6), keep: int = 2, **prints: str) -> Any:
    job = small_job(output, keep=keep)
    for step in steps:
        advance(job, step)
        save(job, step, meta(step, **prints))
    return job


def leftovers(output: Path) -> list[str]:
    return [p.name for p in (output / "checkpoints").iterdir() if ".tmp-" in p.name]
