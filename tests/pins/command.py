"""The command line as somebody outside calls it. The one place of these tests that knows where `main` lies."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import optrush

# What the answers may not depend on: a launcher, a device, a terminal, caches, secrets of the environment.
AWAY = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CXX", "CC", "PYTHONHASHSEED")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


class Command:
    """`optrush ARGUMENTS`, in a folder of its own with caches of its own."""

    package = str(Path(optrush.__file__).parents[1])  # for processes: what this one imports

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "cache").mkdir()

    def __call__(self, *arguments: str, torch: str | None = None, **environment: str) -> Ended:
        """In this process.

        Args:
            torch: the version that is said to be installed.
        """
        from optrush.cli.app import main

        out, err, code = io.StringIO(), io.StringIO(), 0
        with (
            mock.patch.dict(os.environ, environment_of(self.folder, environment)),
            mock.patch.object(sys, "argv", ["optrush", *arguments]),
            _signals(),
            supposed(torch),
            contextlib.chdir(self.folder),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            for name in AWAY:
                os.environ.pop(name, None)
            try:
                main()
            except SystemExit as leaving:
                code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        return Ended(code, out.getvalue(), err.getvalue())

    def process(self, *arguments: str) -> Ended:
        """As a process of its own, which sees no device."""
        there = {k: v for k, v in os.environ.items() if k not in AWAY} | environment_of(self.folder, {})
        done = subprocess.run(
            [sys.executable, "-m", "optrush", *arguments],
            env=there, cwd=self.folder, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        return Ended(done.returncode, done.stdout, done.stderr)


def environment_of(folder: Path, more: dict[str, str]) -> dict[str, str]:
    """Caches of its own, no device, eighty columns."""
    cache = str(folder / "cache")
    return {
        "OPTRUSH_CACHE": cache, "XDG_CACHE_HOME": cache, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "80", "NO_COLOR": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": Command.package, **more,
    }  # fmt: skip


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Handlers are as they were."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@contextlib.contextmanager
def supposed(torch: str | None) -> Iterator[None]:
    """A plan for another machine asks one thing of this one: which torch is installed; only optrush is told."""
    real = importlib.metadata.version

    def version(name: str) -> str:
        asked = sys._getframe(1).f_globals.get("__name__", "")
        return torch if torch and name == "torch" and asked.startswith("optrush.") else real(name)

    with mock.patch.object(importlib.metadata, "version", version):
        yield
