"""The functions of `optrush` from Python: docs/python.md as written, callbacks, rows, losses."""

import functools
import json
import math
import pkgutil
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import optrush
from optrush import api
from optrush.cli import app
from optrush.config import Plugin, dump_config, parse_config
from optrush.errors import CheckpointError, ConfigError, DataError, RunError, UserError

ROOT = Path(__file__).parents[2]
CONFIG: dict[str, Any] = {
    "model": "tiny", "objective": "sft", "data": {"sample": "recipes", "max_samples": 20, "too_long": "split"},
    "batch": {"seq": 128, "tokens": 128}, "train": {"steps": 2, "export": False}, "output": "out",
}  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def page(here, monkeypatch):
    """The page: blocks that begin with a file's name are written as files; the others of Python."""
    monkeypatch.syspath_prepend(here)
    text = (ROOT / "docs" / "python.md").read_text("utf-8")
    for name, content in re.findall(r"```\w+\n# (\S+\.\w+)\n(.*?)```", text, re.DOTALL):
        Path(name).write_text(content)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    return re.findall(r"```python\n(?!# \S+\.py\n)(.*?)```", text, re.DOTALL)


@pytest.mark.slow
def test_the_page_runs_as_it_is_written(page, here, capsys):
    """Every block of Python in one namespace, in order."""
    names: dict[str, Any] = {}
    for block in page:
        exec(compile(block, "docs/python.md", "exec"), names)
    out = capsys.readouterr().out
    assert "the folder has a run ->" in out and "saved runs/shown/checkpoints/step-000002" in out
    losses = [json.loads(line)["loss"] for line in Path("runs/focal/metrics.jsonl").read_text().splitlines()
              if '"loss"' in line]  # fmt: skip
    plain = [json.loads(line)["loss"] for line in Path("runs/python/metrics.jsonl").read_text().splitlines()
             if '"loss"' in line]  # fmt: skip
    assert all(0 < own < usual for own, usual in zip(losses, plain, strict=True)), "(1 - p)^2 < 1"
    lines = [json.loads(line) for line in Path("runs/margin/metrics.jsonl").read_text().splitlines()]
    assert all(math.isfinite(line["lead"]) for line in lines if "loss" in line) and any("loss" in x for x in lines)
    assert "'signs'" in out and not [r.error for r in names["records"] if r.error]


def test_the_parts_of_the_page_run(page, here):
    """The loss, the objective and the optimizer; the technique in tests/plugins."""
    blocks = [block for block in page if "train({**config" in block and re.search("focal|margin|smooth", block)]
    small = {**CONFIG, "train": {"steps": 1, "export": False}, "data": CONFIG["data"] | {"max_samples": 6}}
    names: dict[str, Any] = {
        "config": small, "train": optrush.train, "plan": optrush.plan, "partial": functools.partial,
    }  # fmt: skip
    assert len(blocks) == 4
    for block in [*blocks, next(block for block in page if "from signs" in block)]:
        exec(compile(block, "docs/python.md", "exec"), names)
    assert {p.name for p in Path("runs").iterdir()} == {"focal", "focal-1", "margin", "signs", "smooth"}
    logged = [json.loads(line) for line in Path("runs/smooth/metrics.jsonl").read_text().splitlines()]
    (step,) = [line for line in logged if "loss" in line]
    assert step["nll"] != pytest.approx(step["loss"]), "the default loss, beside the smoothed one"


LOSSES = """
import torch
from optrush import train

def half(head, hidden, batch, share=0.5):
    return share * head(hidden, batch.labels)

class Weighted:
    def __init__(self, share=0.5):
        self.share = share
    def __call__(self, head, hidden, batch):
        return half(head, hidden, batch, self.share)

def each(head, hidden, batch):
    return head(hidden, batch.labels, reduce="none")

def nothing(head, hidden, batch):
    pass

def breaks(head, hidden, batch):
    return {}["logits"]

class Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x
    @staticmethod
    def backward(ctx, g):
        raise ValueError("of backward")

def turned(head, hidden, batch):
    return Turned.apply(half(head, hidden, batch))

later = []
def breaks_later(head, hidden, batch):
    later.append(1)
    return half(head, hidden, batch) if len(later) < 5 else 1 / 0

def two(head, hidden):
    pass
"""


@pytest.fixture
def losses(here, monkeypatch):
    monkeypatch.syspath_prepend(here)
    (here / "losses.py").write_text(LOSSES)
    (here / "broken.py").write_text("import torch\nimport no_such_module\n")
    (here / "wrong.py").write_text("def f(:\n")
    (here / "calls.py").write_text(f"import optrush\noptrush.train({CONFIG!r})\n")
    return here


def first_loss(**changes):
    optrush.train({**CONFIG, **changes, "train": CONFIG["train"] | {"overwrite": True, "steps": 1}})
    return next(x["loss"] for x in map(json.loads, Path("out/metrics.jsonl").read_text().splitlines()) if "loss" in x)


def test_a_loss_by_its_name(losses):
    plain = first_loss()
    assert "loss" not in Path("out/run.yaml").read_text().split("data:")[0]
    for loss, times in (
        ("losses.py:half", 0.5), ("losses:half", 0.5), ({"use": "losses.py:half", "options": {"share": 2.0}}, 2.0),
        ({"use": "losses.py:Weighted", "options": {"share": 0.25}}, 0.25),
    ):  # fmt: skip
        assert first_loss(loss=loss) == pytest.approx(times * plain, rel=1e-5)


def test_a_named_loss_is_in_the_run_and_is_needed_to_resume(losses):
    """Its run.yaml names the file from the root; a changed text is refused, and allowed by its name."""
    long = {**CONFIG, "loss": "losses.py:half", "train": {"steps": 2, "save_every": 1, "export": False}}
    optrush.train({**long, "train": long["train"] | {"steps": 1}})
    assert f"use: {losses / 'losses.py'}:half" in Path("out/run.yaml").read_text()
    (losses / "other.py").write_text(LOSSES.replace("share * head", "head"))
    with pytest.raises(CheckpointError, match="loss"):
        optrush.train({**long, "loss": "other.py:half"}, resume="auto", allow_change=["order"])
    optrush.train({**long, "loss": "other.py:half"}, resume="auto", allow_change=["order", "loss"])


@pytest.mark.parametrize(("use", "says"), [
    ("losses.py:each", ["Tensor of shape (1, 128)", "without dimensions"]),
    ("losses.py:nothing", ["NoneType", "without dimensions"]),
    ("losses.py:breaks", ["KeyError: 'logits', in breaks (", "losses.py:21"]),
    ("losses.py:two", ["too many positional", "(head, hidden, batch)"]), ("losses.py:hlaf", ["no `hlaf`", "half"]),
    ("losses.py:later", ["list, which cannot be called"]), ("broken.py:f", ["ModuleNotFoundError", "broken.py:2"]),
    ("wrong.py:f", ["SyntaxError", "wrong.py:1"]), ("calls.py:f", ["__main__"]), ("none.py:f", ["no file"]),
    ("no_such_module:f", ["ModuleNotFoundError"]), ("focal", ["no entry point", "optrush.losses"]),
    ("python:focal", ["another Python process", "loss=focal"]),
    *((odd, ["write FILE.py:NAME or MODULE:NAME"]) for odd in (":", ":half", "losses:", "losses.py:", "a b:half",
        ".losses:half", "losses..x:half", "losses.py:two words")),
    ("~nobody-here/losses.py:half", ["no file"]), (f"{'x' * 300}.py:half", ["no file"]),
])  # fmt: skip
def test_a_loss_that_fails_is_named(losses, use, says):
    with pytest.raises(UserError) as caught:
        optrush.train({**CONFIG, "loss": use})
    assert f"the loss `{use}`" in str(caught.value) and all(text in str(caught.value) for text in says), caught.value
    assert not Path("out").exists()


def test_a_loss_that_fails_in_a_later_step_fails_the_run(losses):
    with pytest.raises(RunError, match=r"breaks_later[\s\S]*ZeroDivisionError[\s\S]*losses.py:\d+"):
        optrush.train({**CONFIG, "loss": "losses.py:breaks_later", "train": {"steps": 5, "export": False}})


def test_a_loss_that_fails_in_its_backward_pass_is_named(losses):
    """By the command line: autograd calls it, without a frame of the loss."""
    with pytest.raises(ValueError, match="of backward") as caught:
        optrush.train({**CONFIG, "loss": "losses.py:turned"})
    assert "the loss `losses.py:turned`" in str(blamed := app._of_plugin(caught.value)) and "Turned" in str(blamed)


@pytest.mark.parametrize(("objective", "changes"), [
    ("dpo", {}), ("kto", {}), ("reward", {}), ("distill", {"distill": {"teacher": "tiny"}}),
])  # fmt: skip
def test_a_loss_in_place_of_one_that_has_no_other(losses, objective, changes):
    with pytest.raises(ConfigError, match="has its own loss"):
        optrush.train({**CONFIG, "objective": objective, "loss": "losses.py:half", **changes})


@pytest.mark.parametrize("own", [
    {"use": "losses.py:half"}, {"use": "losses.py:half", "rows": "words"}, {"rows": "chat"}, "mine",
    {"use": "losses.py:half", "rows": "chat", "beta": 1},
])  # fmt: skip
def test_an_objective_that_is_not_whole(losses, own):
    with pytest.raises(ConfigError, match=r"use: FILE.py:NAME, rows: text\|chat\|pairs"):
        optrush.train({**CONFIG, "objective": own})


@pytest.mark.parametrize("objective", [{"use": "losses.py:half", "rows": "chat"}, {"use": "losses.py:half"}])
@pytest.mark.parametrize("loss", ["losses.py:half", {"use": "losses.py:each"}])
def test_an_objective_of_ones_own_beside_a_loss(losses, objective, loss):
    with pytest.raises(ConfigError, match=r"run.yaml:2: `loss`(?s:.*)keep one") as caught:
        parse_config(f"objective: {json.dumps(objective)}\nloss: {json.dumps(loss)}\n", "run.yaml")
    assert "use" in caught.value.found
    with pytest.raises(ConfigError, match="--set loss=x: `loss`"):
        parse_config(f"objective: {json.dumps(objective)}\n", "run.yaml", ["loss=x"])


@pytest.mark.parametrize(("objective", "name"), [
    ({"use": "losses.py:half", "rows": "pairs"}, "orpo"), ({"use": "losses.py:half", "rows": "pairs"}, "simpo"),
    ({"use": "losses.py:half", "rows": "chat"}, "dpo"), ("orpo", "orpo"), ("simpo", "simpo"),
])  # fmt: skip
def test_sections_that_a_loss_of_ones_own_does_not_read(losses, objective, name):
    loss = {"loss": "losses.py:half"} if isinstance(objective, str) else {}
    with pytest.raises(ConfigError, match="this objective does not use it") as caught:
        optrush.train({**CONFIG, "objective": objective, **loss, name: {}})
    assert caught.value.asked == f"`{name}` with the loss `losses.py:half`" and caught.value.do == f"leave `{name}` out"


@pytest.mark.parametrize(("rows", "objective"), [("text", "pretrain"), ("chat", "sft"), ("pairs", "orpo")])
def test_the_rows_of_an_objective(rows, objective):
    config = parse_config(json.dumps({**CONFIG, "objective": {"use": "x", "rows": rows}}), "run")
    assert (config.objective, config.loss) == (objective, Plugin(use="x"))
    assert parse_config(dump_config(config), "again") == config


def test_a_loss_without_weights_and_rows_with_some(losses):
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two", "weight": 0.5}]
    with pytest.raises(ConfigError, match=r"(?s)losses.py:half.*weighted = True"):
        optrush.train({**CONFIG, "data": {}, "loss": "losses.py:half"}, rows=[{"messages": turns}] * 8)


def test_a_ladder_needs_a_loss_of_a_file(here):
    with pytest.raises(ConfigError, match="at the top level of a file"):
        optrush.bench(CONFIG, "ladder", loss=lambda head, hidden, batch: hidden.sum())
    with pytest.raises(ConfigError, match="at the top level of a file"):
        optrush.tune(CONFIG, "tuned.yaml", optimizer=type("Local", (), {}))


def test_entry_points(losses):
    """Of a package that is installed: a loss, an objective and an optimizer by their names alone."""
    facts = losses / "mine-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    entries = "[optrush.losses]\nhalf = losses:half\n[optrush.objectives]\nquarter = losses:Weighted\n"
    (facts / "entry_points.txt").write_text(f"{entries}[optrush.optimizers]\nada = torch.optim:Adagrad\n")
    plain = first_loss(**{"with": {}})
    assert first_loss(loss="half", **{"with": {}}) == pytest.approx(plain / 2, rel=1e-5)
    quarter = {"use": "quarter", "rows": "chat", "options": {"share": 0.25}}
    assert first_loss(objective=quarter, **{"with": {"own-optimizer": {"use": "ada", "states": 1.0}}}) == pytest.approx(
        plain / 4, rel=1e-5
    )


def test_refusals(here):
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
    with pytest.raises(ConfigError, match="has its own loss"):
        optrush.train({**CONFIG, "objective": "dpo"}, loss=lambda head, hidden, batch: hidden.sum())
    assert not list(here.iterdir())


def test_no_module_hides_a_function_of_its_name():
    """Importing a submodule binds its name in the package, where it would hide the function."""
    assert not {*optrush.__all__} & {module.name for module in pkgutil.iter_modules(optrush.__path__)}
    assert set(optrush.__all__) <= set(dir(optrush)) and not hasattr(optrush, "none")
    for name in optrush.__all__:
        if name not in ("Config", "Sampling"):
            assert getattr(optrush, name) is getattr(api, name) and getattr(api, name).__doc__
