"""Read this process' rank from the environment; launch N processes of this command with one exit code (`--ranks N`).

torchrun does the same over many machines, but replaces 143, the exit code of a resumable run that a signal stopped;
this launcher returns it.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from optrush.errors import ConfigError, RunError

BEGUN = time.monotonic()  # start of the process: commands import this module first
_LIBC = ctypes.CDLL(None)
TRACKER_THREAD = "optrush-tracker"  # a daemon thread that can block in a client library
LAUNCHER = "OPTRUSH_LAUNCHER"  # set for ranks whose launcher reports the fatal signal
NOT_SHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"  # lets torchrun re-admit lost hosts
GRACE_S = 30.0  # time for the other ranks to exit after one has stopped
FAILED_GRACE_S = 8.0  # after one has failed: time to report the missing rank


def launched() -> tuple[int, int]:
    """Return (rank, ranks) from the environment of a launcher; (0, 1) without one.

    Raises:
        ConfigError: only one of the two is set.
    """
    if ("RANK" in os.environ) != ("WORLD_SIZE" in os.environ):
        found = "RANK" if "RANK" in os.environ else "WORLD_SIZE"
        raise ConfigError(
            "RANK and WORLD_SIZE in the environment", f"{found} only", "start with --ranks or torchrun, or unset it"
        )
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def unjoinable() -> str:
    """Return a warning if torchrun cannot re-admit a restarted host, else "".

    torchrun's rank 0 publishes the address of its store, shared with the ranks, only once. A restarted host looks for
    it among the keys of the next rendezvous, and both fail after 60 s
    (https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/elastic/rendezvous/dynamic_rendezvous.py#L1209).
    Unshared, each rendezvous has its own address.
    """
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    several = int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1
    if not (shared and several and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))):
        return ""
    do = f"start it with --rdzv-backend c10d and {NOT_SHARED} in its environment"
    return f"torchrun cannot re-admit a restarted host: {do}"


def spawn(arguments: Sequence[str], ranks: int, resume: Callable[[], str] | None = None) -> int:
    """Run `python -m optrush ARGUMENTS` as `ranks` processes; SIGTERM, SIGINT, SIGUSR1 and SIGHUP are passed to all.

    Args:
        resume: returns the remedy if a signal killed a rank; None: rerun the command.

    Returns:
        0 if all succeeded; else 143 if a signal stopped one cleanly, 2 if one refused its input, else the smallest
        code: the failed rank's, not that of one killed afterwards.
    """
    processes: list[subprocess.Popen[bytes]] = []

    def forward(number: int, _: object) -> None:
        for p in processes:
            if p.poll() is None:
                p.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    for stop in stop_numbers():
        signal.signal(stop, forward)
    begin = partial(die_with_parent, os.getpid())
    for more in rank_environments(ranks):
        environment = {**os.environ, LAUNCHER: str(os.getpid()), **more}
        command = [sys.executable, "-m", "optrush", *arguments]
        processes.append(subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=begin))
    killed = _wait(processes)
    if killed is not None:
        rank, number = killed
        asked, found = f"`--ranks {ranks}`", f"rank {rank} was killed by {_signal_name(number)}"
        if number == signal.SIGKILL:
            found += ", as the kernel does when memory runs out"
        do = "run the same command again" if resume is None else resume()
        sys.stderr.write(f"{RunError(asked, found, do)}\n")
    codes = [p.returncode for p in processes]
    bad = [c if c > 0 else 128 - c for c in codes if c != 0]
    return next((c for c in (143, 2) if c in bad), min(bad, default=0))


def rank_environments(ranks: int) -> list[dict[str, str]]:
    """Return the environment variables that connect the ranks of one machine, one set per rank."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // ranks))
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> tuple[int, int] | None:
    """Wait for all processes; after one failed, kill those that remain.

    Returns:
        The first failed rank and the signal that killed it; None without a failure or signal.
    """
    until = math.inf
    failed: list[int] = []
    while any(p.poll() is None for p in processes):
        time.sleep(0.05)
        failed = failed or [r for r, p in enumerate(processes) if p.poll() not in (None, 0)]
        if failed and until == math.inf:
            code = processes[failed[0]].returncode
            until = time.monotonic() + (GRACE_S if code in (2, 128 + signal.SIGTERM) else FAILED_GRACE_S)
        for p in processes if failed else ():
            if p.poll() is None and (time.monotonic() > until or process_stat(p.pid)[0] in "Tt"):
                p.kill()
    return next(((r, -processes[r].returncode) for r in failed if processes[r].returncode < 0), None)


def process_stat(pid: int) -> tuple[str, int]:
    """Return the letter of a process' state (T: stopped, Z: ended) and its start time in kernel ticks.

    Raises:
        OSError: there is no such process.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])


def sibling_ranks() -> dict[int, int]:
    """Return the process ids of the other ranks started by this process' parent."""
    same = [f"{name}={os.environ.get(name)}".encode() for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")]
    pids: dict[int, int] = {}
    for children in Path(f"/proc/{os.getppid()}/task").glob("*/children"):
        with suppress(OSError):
            for pid in map(int, children.read_text().split()):
                with suppress(OSError):  # the process has ended
                    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    ranks = [int(v[5:]) for v in variables if v.startswith(b"RANK=") and v[5:].isdigit()]
                    if pid != os.getpid() and ranks and all(v in variables for v in same):
                        pids[ranks[0]] = pid
    return pids


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def stop_numbers() -> list[signal.Signals]:
    """Return the signals that stop a run; SIGHUP (closed terminal) unless `nohup` ignores it."""
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    return numbers if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [*numbers, signal.SIGHUP]


def die_with_parent(parent: int, number: signal.Signals = signal.SIGTERM) -> None:
    """Send this child process a signal when its parent dies, even if the parent is killed.

    Args:
        parent: its process id, determined in the parent: if it died before this call, the child exits.
    """
    _LIBC.prctl(1, number)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(128 + signal.SIGTERM)
