"""Runs of the command line, in this process and as real ones, on the built-in tiny model and a few short rows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the hub's library is imported

import pytest
import torch
import yaml
from trained import run

from calls import call as call
from optrush.models import tiny

from clirun import Found, base, write_rows

DISHES = ("soup", "stew", "curry", "salad", "pie", "risotto", "omelette", "gratin", "ragout", "pilaf", "tart", "chili")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Torch takes one thread, and signal handlers are as they were."""
    before, handler = torch.get_num_threads(), signal.getsignal(signal.SIGTERM)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the built-in model is written, once for all tests."""
    folder = tmp_path_factory.mktemp("cache")
    tiny.write_tiny(folder / "optrush" / "tiny-1")
    return folder


@pytest.fixture
def model(cache: Path) -> Path:
    """The built-in model's folder; shared, so nobody writes there."""
    return cache / "optrush" / "tiny-1"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a test, with chat.jsonl (12 rows) in it; `model: tiny` needs no network and no home."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    rows = []
    for i, dish in enumerate(DISHES):
        answer = f"{dish.capitalize()} for {i + 1}. Chop {i + 2} onions, fry them in butter, " + "and stir. " * (i % 5)
        turns = [("user", f"How do I make a {dish}?"), ("assistant", answer)]
        if i % 3 == 0:
            turns += [("user", "And for more people?"), ("assistant", "Take more of everything, and a larger pot.")]
        rows.append({"messages": [{"role": r, "content": c} for r, c in turns]})
    write_rows(tmp_path / "chat.jsonl", rows)
    return tmp_path


@pytest.fixture
def write(here: Path) -> Callable[..., str]:
    """Writes run.yaml from `base` with changes (or from a text) and names it."""

    def written(text: str | None = None, **changes: Any) -> str:
        (here / "run.yaml").write_text(yaml.safe_dump(base(**changes), sort_keys=False) if text is None else text)
        return "run.yaml"

    return written


@pytest.fixture
def trained(cache: Path) -> Path:
    """The folder of a finished run; shared, so nobody writes there."""
    return run(cache)


@pytest.fixture
def start() -> Callable[..., Found]:
    """`optrush ARGUMENTS` as a process of its own."""

    def started(*arguments: str, **environment: str) -> Found:
        done = subprocess.run(
            [sys.executable, "-m", "optrush", *arguments],
            env={**os.environ, **environment}, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        return Found(done.returncode, done.stdout, done.stderr)

    return started
