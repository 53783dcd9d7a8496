"""The functions of `optrush` from Python: docs/python.md as written, callbacks, rows, losses, a plug-in."""

from __future__ import annotations

import json
import os
import pkgutil
import re
import subprocess
import sys
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


def test_the_page_runs_as_it_is_written(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every block of Python in one namespace, in order."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text("utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)
    out = capsys.readouterr().out
    assert "a run lies there ->" in out and "saved runs/shown/checkpoints/step-000002" in out
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


def run(*arguments: str, folder: Path, path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(path)])}
    command = [sys.executable, "-m", "optrush", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def installed(folder: Path, entry: str) -> Path:
    """A folder on the path that has the example as an installed package has it."""
    facts = folder / "optrush_plugin_example-0.1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: optrush-plugin-example\nVersion: 0.1.0\n")
    (facts / "entry_points.txt").write_text(f"[optrush.techniques]\n{entry}\n")
    example = ROOT / "examples" / "plugin" / "clip_values.py"
    (folder / "clip_values.py").write_text(example.read_text("utf-8"))
    return folder


def plugin(folder: Path) -> Path:
    """The example as it is installed, and a run with it."""
    entry = (ROOT / "examples" / "plugin" / "pyproject.toml").read_text("utf-8")
    found = re.search(r'techniques"\]\n(\S+) = "(\S+)"', entry)
    assert found is not None
    (folder / "run.yaml").write_text(json.dumps({**CONFIG, "with": {"clip-values": {"limit": 1e-9}}}))
    return installed(folder / "path", f"{found[1]} = {found[2]}")


def test_a_technique_of_another_package(tmp_path: Path) -> None:
    """Listed, planned, trained with an effect."""
    path = plugin(tmp_path)
    listed = json.loads(run("techniques", "--json", folder=tmp_path, path=path).stdout)
    assert "clip-values" in json.dumps(listed)
    planned = run("plan", "run.yaml", "--hardware", "h200", folder=tmp_path, path=path)
    assert planned.returncode == 0, planned.stderr
    trained = run("train", "run.yaml", folder=tmp_path, path=path)
    assert trained.returncode == 0 and "clip-values (limit=1e-09): 1 change" in trained.stderr, trained.stderr
    norms = [json.loads(x)["grad_norm"] for x in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < norm < 1e-5 for norm in norms), "every value is clipped before the norm is taken"


@pytest.mark.slow
def test_a_technique_of_another_package_is_a_rung(tmp_path: Path) -> None:
    """Of the ladder of its configuration."""
    path = plugin(tmp_path)
    climbed = run("bench", "run.yaml", "--out", "ladder", "--repeats", "1", "--cumulative-only",
                  folder=tmp_path, path=path)  # fmt: skip
    records = [json.loads(x) for x in (tmp_path / "ladder" / "records.jsonl").read_text().splitlines()]
    assert "clip-values" in json.dumps(records[-1]["rung"]) and not any(r["error"] for r in records), climbed.stderr


@pytest.mark.parametrize(("entry", "why"), [
    ("clip-values = no_module:X", "ModuleNotFoundError"),
    ("other = clip_values:ClipValues", "is not the entry point's"),
    ("clip-values = clip_values:Field", "no subclass"),
])  # fmt: skip
def test_a_technique_that_cannot_be_loaded_is_named(tmp_path: Path, entry: str, why: str) -> None:
    found = run("techniques", "--json", folder=tmp_path, path=installed(tmp_path / "path", entry))
    assert found.returncode == 0 and why in found.stderr and "optrush-plugin-example is left out" in found.stderr
