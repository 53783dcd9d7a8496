"""Plan every example for the hardware that it names, and run the cells of the notebook."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from optrush.config import parse_config
from optrush.decide import decide
from optrush.models.shapes import SHAPES
from optrush.planner.search import predict
from optrush.trainer import run

EXAMPLES = Path(__file__).parents[2] / "examples"
HARDWARE = {  # where an example names none in its comment
    "demo": "cpu", "tiny-sft-cpu": "cpu", "tiny-dpo-cpu": "cpu", "tiny-grpo-cpu": "cpu", "rule-grpo-cpu": "cpu",
    "tiny-shapes-cpu": "cpu", "llama1b-sft-1gpu": "a100-40", "llama1b-pretrain-1gpu": "h100",
}  # fmt: skip
CHAT = {
    "messages": [{"role": "user", "content": "Soup?"}, {"role": "assistant", "content": "Chop, fry, simmer. " * 40}]
}
PAIR = {"prompt": "Soup?", "chosen": "Chop, fry, simmer.", "rejected": "No."}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the rows and models that the examples name."""
    sums = {"prompt": "12 + 7 =", "completion": "19"}
    rows = {
        "sums-train": sums,
        "sums-test": sums,
        "chat": CHAT,
        "pairs": PAIR,
        "texts": {"text": "A soup. " * 300},
        "general": {"text": "A town. " * 300},
    }
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
    if name == "tiny-shapes-cpu":
        write_shapes(here / "shapes", 8, 2)
    named = re.search(r"--hardware ([\w-]+)", text)
    found = predict(parse_config(text, name), named[1] if named else HARDWARE[name])
    assert found.peak_bytes > 0
    if name != "demo":  # the stand-in for its model is a larger one
        assert found.fits, f"{found.peak_bytes / 2**30:.1f} GiB"


def write_shapes(folder: Path, rows: int, held_out: int) -> dict[str, Any]:
    """Write what the example of pictures reads, smaller; return the names of its script."""
    names = runpy.run_path(str(EXAMPLES / "shapes.py"))
    folder.mkdir()
    drawn = set[bytes]()
    for part, count in (("rows", rows), ("held-out", held_out)):
        names["write_rows"](folder, part, count, len(part), drawn)
    assert len(drawn) == rows + held_out
    names["write_base"](folder / "base")
    return names


def test_pictures_of_shapes_are_trained_on_and_scored(here: Path) -> None:
    """Two steps of the example, and its own score; `make shapes` trains it to the end."""
    names = write_shapes(here / "shapes", 24, 3)
    sets = ["train.steps=2", "train.epochs=1", "train.eval_every=1", "train.log_every=1"]
    config = parse_config((EXAMPLES / "tiny-shapes-cpu.yaml").read_text("utf-8"), "shapes.yaml", sets)
    assert run.run(run.RunRequest(decide(config))).code == 0
    assert names["score"](here / "shapes", Path(config.output) / "model") in (0, 1 / 3, 2 / 3, 1)


def test_the_index_lists_them() -> None:
    index = (EXAMPLES / "README.md").read_text("utf-8")
    for file in [*EXAMPLES.glob("*.yaml"), *EXAMPLES.glob("*.ipynb")]:
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
