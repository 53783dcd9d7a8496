"""A folder with a toy model, a run and a ladder in it; climbs whose processes are scripts, for what needs no torch."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from optrush.benchmark import runner
from optrush.report import bench

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "peers"))  # as `bench` does in a checkout

from calls import call as call

from toy import FAKE, Copy, Fakes, document, put, write_model


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "toy"
    write_model(folder)
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path: Path, toy: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder of a test: `toy/` and run.yaml."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "toy").symlink_to(toy)
    put(tmp_path / "run.yaml", document())
    handler = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    """Workers are scripts, and the report is not drawn."""
    found = Fakes(tmp_path)
    worker = tmp_path / "worker.py"
    worker.write_text(FAKE.format(log=str(found.log), script=str(found.script)))
    monkeypatch.setattr(runner, "COMMAND", [sys.executable, str(worker)])
    monkeypatch.setattr(bench, "write_bench", lambda folder: None)
    return found


@pytest.fixture
def copied(tmp_path: Path) -> Copy:
    return Copy(tmp_path / "copy")
