"""Plan every example for the hardware that it names, and run the cells of the notebook."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from optrush.cli import app
from optrush.config import parse_config
from optrush.models.shapes import SHAPES
from optrush.planner.search import predict
from optrush.trainer import run

EXAMPLES = Path(__file__).parents[2] / "examples"
HARDWARE = {  # where an example names none in its comment
    "demo": "cpu", "tiny-sft-cpu": "cpu", "tiny-dpo-cpu": "cpu", "tiny-grpo-cpu": "cpu", "llama1b-sft-1gpu": "a100-40",
    "llama1b-pretrain-1gpu": "h100",
}  # fmt: skip
CHAT = {
    "messages": [{"role": "user", "content": "Soup?"}, {"role": "assistant", "content": "Chop, fry, simmer. " * 40}]
}
PAIR = {"prompt": "Soup?", "chosen": "Chop, fry, simmer.", "rejected": "No."}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the rows and models that the examples name."""
    rows = {"chat": CHAT, "pairs": PAIR, "texts": {"text": "A soup. " * 300}, "general": {"text": "A town. " * 300}}
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * 20)
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo/recipes.jsonl").write_text((json.dumps(CHAT) + "\n") * 20)
    for folder in ("Llama-3.2-1B-Instruct", "demo/tiny-llama"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(SHAPES["llama-3.2-1b"]))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", sorted(p.stem for p in EXAMPLES.glob("*.yaml")))
def test_an_example_can_be_planned(name: str, here: Path) -> None:
    text = (EXAMPLES / f"{name}.yaml").read_text("utf-8")
    named = re.search(r"--hardware ([\w-]+)", text)
    found = predict(parse_config(text, name), named[1] if named else HARDWARE[name])
    assert found.peak_bytes > 0
    if name != "demo":  # the stand-in for its model is a larger one
        assert found.fits, f"{found.peak_bytes / 2**30:.1f} GiB"


def test_pictures_train(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the script over `init`, which splits no rows with images, to a run."""
    runpy.run_path(str(EXAMPLES / "pictures.py"))["main"](Path("shapes"), 12)
    init = ["init", "pictures.yaml", "--model", "shapes/base", "--data", "shapes/rows.jsonl", "--yes"]
    train = ["train", "pictures.yaml", "--set", "train.steps=1", "--set", "train.export=false"]
    for words in ([*init, "--set", "optim.lr=2e-3"], train):
        monkeypatch.setattr(sys, "argv", ["optrush", *words])
        with pytest.raises(SystemExit) as left:
            app.main()
        assert not left.value.code
    assert parse_config(Path("pictures.yaml").read_text(), "pictures.yaml").data.too_long == "drop"
    assert '"loss"' in Path("runs/pictures/metrics.jsonl").read_text()


def test_the_index_lists_them() -> None:
    index = (EXAMPLES / "README.md").read_text("utf-8")
    for file in [*EXAMPLES.glob("*.yaml"), *EXAMPLES.glob("*.ipynb"), EXAMPLES / "pictures.py"]:
        assert f"[{file.name}]({file.name})" in index


@pytest.mark.slow
def test_the_notebook_runs(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "write_run", lambda *_: None)  # a second of charts, which have tests of their own
    cells = json.loads((EXAMPLES / "first_run.ipynb").read_text("utf-8"))["cells"]
    names: dict[str, Any] = {}
    for n, cell in enumerate(cells):
        assert not cell.get("outputs"), "committed without outputs"
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {n}", "exec"), names)
    assert len(names["curve"].losses) == 2 and names["answers"][0].tokens > 0
