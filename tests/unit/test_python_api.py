"""The functions of `optrush` from Python: docs/python.md as written, callbacks, rows, losses."""

from __future__ import annotations

import json
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest

import optrush
from optrush import api
from optrush.errors import ConfigError, DataError

ROOT = Path(__file__).parents[2]
CONFIG: dict[str, Any] = {
    "model": "tiny", "objective": "sft", "data": {"sample": "recipes", "max_samples": 20, "too_long": "split"},
    "batch": {"seq": 128, "tokens": 128}, "train": {"steps": 2, "export": False}, "output": "out",
}  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_page_runs_as_it_is_written(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every block of Python in one namespace, in order."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text("utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)
    out = capsys.readouterr().out
    assert "the folder has a run ->" in out and "saved runs/shown/checkpoints/step-000002" in out
    losses = [json.loads(line)["loss"] for line in Path("runs/focal/metrics.jsonl").read_text().splitlines()
              if '"loss"' in line]  # fmt: skip
    plain = [json.loads(line)["loss"] for line in Path("runs/python/metrics.jsonl").read_text().splitlines()
             if '"loss"' in line]  # fmt: skip
    assert all(0 < own < usual for own, usual in zip(losses, plain, strict=True)), "(1 - p)^2 < 1"


def test_refusals(here: Path) -> None:
    with pytest.raises(ConfigError, match="no such key"):
        optrush.train({**CONFIG, "optim": {"rate": 1}})
    with pytest.raises(ConfigError, match="both"):
        optrush.train(CONFIG, rows=[{"text": "a"}])
    with pytest.raises(DataError, match="no row"):
        optrush.train({**CONFIG, "data": {}}, rows=[])
    with pytest.raises(DataError, match="row 1"):
        optrush.train({**CONFIG, "data": {}}, rows=[{"text": "a"}, {"text": object()}])
    with pytest.raises(ConfigError, match="no such file"):
        optrush.plan("none.yaml")
    with pytest.raises(ConfigError, match="a loss of its own"):
        optrush.train({**CONFIG, "objective": "dpo"}, loss=lambda head, hidden, batch: hidden.sum())
    assert not list(here.iterdir())


def test_no_module_hides_a_function_of_its_name() -> None:
    """Importing a submodule binds its name in the package, where it would hide the function."""
    assert not {*optrush.__all__} & {module.name for module in pkgutil.iter_modules(optrush.__path__)}
    assert set(optrush.__all__) <= set(dir(optrush)) and not hasattr(optrush, "none")
    for name in optrush.__all__:
        if name not in ("Config", "Sampling"):
            assert getattr(optrush, name) is getattr(api, name) and getattr(api, name).__doc__
