"""Techniques of other packages: the examples as installed packages, and the page about optimizers as it is written."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from meshes import further
from optrush.techniques import ALL

from plugged import EXAMPLES, ROOT, commands, installed, optrush
from trials import assembled, golden_run, steps

CONFIG: dict[str, Any] = {
    "model": "tiny", "objective": "sft", "data": {"sample": "recipes", "max_samples": 20, "too_long": "split"},
    "batch": {"seq": 128, "tokens": 128}, "train": {"steps": 2, "export": False}, "output": "out",
}  # fmt: skip
PACKAGES: dict[str, tuple[str, dict[str, Any], str]] = {  # name -> folder, options, what a run says
    "clip-values": ("plugin", {"limit": 1e-9}, "clip-values (limit=1e-09): 1 change"),
    "apollo": ("plugin-optimizer", {"rank": 16}, "apollo sketches"),
}
each = pytest.mark.parametrize("name", further(list(PACKAGES), 1))


def plugged(folder: Path, name: str) -> Path:
    """A run with the technique of an example, and the example installed; return where."""
    source, options, _ = PACKAGES[name]
    (folder / "run.yaml").write_text(json.dumps({**CONFIG, "with": {name: options}}))
    return installed(EXAMPLES / source, folder / "path")


@each
def test_a_technique_of_another_package(tmp_path: Path, name: str) -> None:
    """Listed, planned, trained with an effect."""
    path = plugged(tmp_path, name)
    planned = ["plan", "run.yaml", "--hardware", "h200"]
    said = commands(["techniques", "--json"], planned, ["train", "run.yaml"], folder=tmp_path, path=path)
    assert f'"{name}"' in said and "fits on NVIDIA H200" in said and PACKAGES[name][2] in said, said
    lines = [json.loads(x) for x in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    if name == "clip-values":
        assert all(0 < line["grad_norm"] < 1e-5 for line in lines if "loss" in line), "clipped before the norm is taken"


def rung_of(folder: Path) -> dict[str, Any]:
    """The last rung of a ladder without errors."""
    records = [json.loads(x) for x in (folder / "ladder" / "records.jsonl").read_text().splitlines()]
    assert not any(r["error"] for r in records), records
    return dict(records[-1])


@pytest.mark.slow
@each
def test_a_technique_of_another_package_is_a_rung(tmp_path: Path, name: str) -> None:
    """Of the ladder of its configuration."""
    path = plugged(tmp_path, name)
    optrush("bench", "run.yaml", "--out", "ladder", "--repeats", "1", "--cumulative-only", folder=tmp_path, path=path)
    assert name in rung_of(tmp_path)["config"]["with"]


@pytest.mark.parametrize(("entry", "reason"), [
    ("clip-values = no_module:X", "ModuleNotFoundError"),
    ("other = clip_values:ClipValues", "is not the entry point's"),
    ("clip-values = clip_values:Field", "no subclass"),
])  # fmt: skip
def test_a_technique_that_cannot_be_loaded_is_named(tmp_path: Path, entry: str, reason: str) -> None:
    path = installed(EXAMPLES / "plugin", tmp_path / "path", entry)
    listed = optrush("techniques", "--json", folder=tmp_path, path=path)
    assert listed.returncode == 0 and reason in listed.stderr and "optrush-plugin-example is left out" in listed.stderr


DEF = "    def wrap_step("
FAILING = {  # text of the example -> what stands there instead, exit code, what is said
    "a stage": ("        inner = trainer.optimizer_step\n", "        return trainer.nothing\n", 2, "AttributeError"),
    "a later step": (
        "            return inner()",
        "            self.__dict__['n'] = self.__dict__.get('n', 0) + 1\n"
        "            return inner() if self.__dict__['n'] < 4 else 1 / 0",
        1, "ZeroDivisionError",
    ),
    "an optimizer": ("        def step() ->", "        def step(self: int) ->", 2, "TypeError"),
    "an update": ("            return inner()", "            raise ValueError('first\\nsecond')", 2, "first second"),
    "a loss": (
        "        return 1\n",
        "        def loss(b):\n            raise KeyError('logits')\n        trainer.loss = loss\n        return 1\n",
        2, "KeyError: 'logits'",
    ),
    "a loss of nothing": (
        "        return 1\n",
        "        def loss(b):\n            return None\n        trainer.loss = loss\n        return 1\n",
        2, "NoneType",
    ),
    "what it returns": ("        return 1\n", "        return 'one'\n", 2, "clip-values"),
    "its needs": (DEF, "    def needs(self, env):\n        return None\n\n" + DEF, 2, "TypeError"),
    "its prediction": (DEF, "    def predict(self, env):\n        1 / 0\n\n" + DEF, 2, "ZeroDiv"),
}  # fmt: skip


@pytest.mark.parametrize("kind", further(list(FAILING), 1))
def test_a_technique_that_fails_is_named(kind: str, tmp_path: Path) -> None:
    """In three lines, with the place in its own file."""
    path = plugged(tmp_path, "clip-values")
    old, new, code, says = FAILING[kind]
    file = path / "clip_values.py"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    ended = optrush("plan" if kind == "its prediction" else "train", "run.yaml", folder=tmp_path, path=path)
    *_, asked, found, do = ended.stderr.splitlines()
    assert ended.returncode == code and "Traceback" not in ended.stderr, ended.stderr
    assert asked.startswith("asked: the technique `clip-values` of the package clip_values"), ended.stderr
    assert says in asked + found and ".py:" in found and "--without clip-values" in do, ended.stderr


def test_an_error_that_is_not_a_plugins() -> None:
    from optrush.cli import app

    with pytest.raises(ValueError, match="ours") as caught:
        raise ValueError("ours")
    assert app._of_plugin(caught.value) is None


def test_the_systems_of_a_package_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from importlib.metadata import EntryPoint

    from optrush.benchmark import peer
    from optrush.errors import ConfigError

    for value in ("no_module:PEERS", "json:PEERS"):
        entry = EntryPoint("x", value, peer.GROUP)
        monkeypatch.setattr(peer, "entry_points", lambda group, entry=entry: [entry])
        with pytest.raises(ConfigError, match=value.partition(":")[0]):
            peer.find_peers(tmp_path)


# The pages: files and commands as they stand there.


@pytest.mark.slow
def test_the_technique_of_the_page_from_python(tmp_path: Path) -> None:
    """Its package is listed, and a run has its effect."""
    files_of("python.md", tmp_path)
    path = installed(tmp_path, tmp_path / "path")
    (tmp_path / "run.yaml").write_text(json.dumps({**CONFIG, "train": {"steps": 1, "export": False}, "with": {}}))
    trained = ["train", "run.yaml", "--with", "clip-values:limit=1e-9"]
    said = commands(["techniques"], trained, folder=tmp_path, path=path)
    assert "\nclip-values " in said and "clip-values (limit=1e-09): 1 change" in said, said
    lines = [json.loads(x) for x in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < line["grad_norm"] < 1e-5 for line in lines if "loss" in line)


def files_of(page: str, folder: Path) -> str:
    """Write the files of a page into a folder; return its text."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    for name, content in re.findall(r"```\w+\n# (\S+\.\w+)\n(.*?)```", text, re.DOTALL):
        (folder / name).write_text(content)
    return text


def written(folder: Path) -> list[list[str]]:
    """Write the files of the page about optimizers into a folder; return its commands."""
    text = files_of("optimizer.md", folder)
    (commands,) = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    return [shlex.split(line) for line in commands.splitlines()]


@pytest.mark.slow
def test_the_page_leads_from_nothing_to_a_ladder(tmp_path: Path) -> None:
    commands = written(tmp_path)
    assert commands[0] == ["python", "-m", "pip", "install", "-e", "."]
    path = installed(tmp_path, tmp_path / "path")
    said = {}
    for program, *arguments in commands[1:]:
        assert program == "optrush"
        ended = optrush(*arguments, folder=tmp_path, path=path)
        said[arguments[0]] = ended.stdout + ended.stderr
        assert arguments[0] == "bench" or ended.returncode == 0, ended.stderr
    assert list(said) == ["techniques", "plan", "train", "bench"]
    assert "lion" in said["techniques"] and "optimizer  lion (momentum=0.99): 1 change" in said["train"]
    planned = json.loads(optrush("plan", "run.yaml", "--hardware", "h200", "--json", folder=tmp_path, path=path).stdout)
    kept = {line["name"]: line["bytes"] for line in planned["lines"]}
    assert kept["states.blocks"] == kept["weights.blocks"], "one state per weight"
    rung = rung_of(tmp_path)
    assert rung["rung"] in ("lion", "micro-batch") and rung["verdict"] != "red", said["bench"]
    assert "lion" in rung["config"]["with"]


@pytest.fixture(scope="module")
def lion(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The technique of the page, loaded here."""
    folder = tmp_path_factory.mktemp("lion")
    written(folder)
    sys.path.insert(0, str(folder))
    yield __import__("optrush_lion").Lion
    sys.path.remove(str(folder))


def test_the_optimizer_of_the_page_is_lion(box: Path, lion: Any) -> None:
    """The paper's program 1, on the gradients of three steps; a skipped step changes nothing."""
    trainer = assembled(golden_run(box, lion={}), (*ALL, lion))
    weights = {t.name: t.local.clone() for t in trainer.trained}
    averages = {name: torch.zeros_like(w) for name, w in weights.items()}
    inner, decay = trainer.optimizer.step, trainer.config.optim.weight_decay

    def watched(lr: Any, scale: Any, skipped: Any) -> None:
        before = [t.local.clone() for t in trainer.trained]
        inner(lr, scale, torch.tensor(True))
        assert all(torch.equal(t.local, b) for t, b in zip(trainer.trained, before, strict=True))
        for t in trainer.trained:
            g, m, w = t.grad / scale, averages[t.name], weights[t.name]
            w.sub_(lr * ((0.9 * m + 0.1 * g).sign() + (decay if t.decays else 0.0) * w))
            m.mul_(0.99).add_(0.01 * g)
        inner(lr, scale, skipped)

    trainer.optimizer.step = watched
    list(steps(trainer, 3))
    for t in trainer.trained:
        torch.testing.assert_close(t.local, weights[t.name], rtol=1e-5, atol=1e-6, msg=t.name)
        state = trainer.optimizer.state()[t.name]["average"]
        torch.testing.assert_close(state, averages[t.name], rtol=1e-5, atol=1e-7, msg=t.name)


def losses(box: Path, folder: str, with_: dict[str, Any]) -> list[float]:
    if folder not in sys.path:
        sys.path.insert(0, folder)
    lion = __import__("optrush_lion").Lion
    return [f[0] for f in steps(assembled(golden_run(box, packed=True, lion={}, **with_), (*ALL, lion)), 3)]


def test_the_optimizer_of_the_page_is_sharded(box: Path, pair: Any, tmp_path: Path) -> None:
    written(tmp_path)
    one, two = losses(box, str(tmp_path), {}), pair(losses, box, str(tmp_path), {"fsdp": {}})
    assert all(side == pytest.approx(one, rel=1e-4) for side in two)
