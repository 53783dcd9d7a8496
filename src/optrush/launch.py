"""Read this process' rank from the environment; launch N processes of this command with one exit code (`--ranks N`).

torchrun does the same over many machines, but replaces 143, the exit code of a run that a signal stopped and that can
be resumed; this launcher returns it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial

from optrush.errors import ConfigError

_LIBC = ctypes.CDLL(None)
TRACKER_THREAD = "optrush-tracker"  # the name of a daemon thread that may be blocked in a client library
GRACE_S = 30.0  # how long the others may take to leave after one has failed


def launched() -> tuple[int, int]:
    """Return (rank, ranks) from the environment of a launcher; (0, 1) without one.

    Raises:
        ConfigError: only one of the two is set.
    """
    if ("RANK" in os.environ) != ("WORLD_SIZE" in os.environ):
        found = "RANK" if "RANK" in os.environ else "WORLD_SIZE"
        raise ConfigError(
            "RANK and WORLD_SIZE in the environment", f"{found} alone", "start with --ranks or torchrun, or unset it"
        )
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def spawn(arguments: Sequence[str], ranks: int) -> int:
    """Run `python -m optrush ARGUMENTS` as `ranks` processes; SIGTERM, SIGINT, SIGUSR1 and SIGHUP are passed to all.

    Returns:
        0 if all succeeded; else 143 if a signal stopped one cleanly, 2 if one refused its input, else the smallest
        code: a rank's own, rather than that of one that was killed afterwards.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    shared = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    processes: list[subprocess.Popen[bytes]] = []

    def forward(number: int, _: object) -> None:
        for p in processes:
            if p.poll() is None:
                p.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, forward)
    begin = partial(die_with_parent, os.getpid())
    for rank in range(ranks):
        own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, "-m", "optrush", *arguments]
        processes.append(subprocess.Popen(command, env=own, start_new_session=True, preexec_fn=begin))
    failed_at: float | None = None
    while any(p.poll() is None for p in processes):
        time.sleep(0.05)
        if failed_at is None and any(p.returncode not in (None, 0) for p in processes):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > GRACE_S:
            for p in processes:
                if p.poll() is None:
                    p.kill()
    codes = [p.returncode for p in processes]
    bad = [c if c > 0 else 128 - c for c in codes if c != 0]
    return next((c for c in (143, 2) if c in bad), min(bad, default=0))


def die_with_parent(parent: int) -> None:
    """Send this child process SIGTERM when its parent dies, even if the parent is killed.

    Args:
        parent: its process id, determined in the parent: if it died before this call, the child exits.
    """
    _LIBC.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(128 + signal.SIGTERM)
