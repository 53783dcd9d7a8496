"""The figures of the README, docs/data.md, docs/ladder.md and docs/plan.md are those of the committed records."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("page", "rung"),
    [
        ("README.md", "| float32, eager |"),
        ("README.md", "| 1b-amp-2048 | torchtitan |"),
        ("docs/data.md", "| padded to the longest |"),
        ("docs/ladder.md", "| torchtitan |"),
        ("docs/plan.md", "| rows | T=8192 |"),
    ],
)
def test_the_page_is_what_the_records_say(page: str, rung: str) -> None:
    table = runpy.run_path(str(ROOT / "benchmarks/table.py"))
    text = (ROOT / page).read_text()
    assert table["written"](page) == text, "run benchmarks/table.py"
    assert rung in text


@pytest.mark.parametrize("picture", ["speed.png", "memory.png"])
def test_its_pictures_are_what_the_records_say(picture: str, tmp_path: Path) -> None:
    """Drawn again and compared dot by dot; another version of the fonts may move an edge."""
    from matplotlib.image import imread

    from optrush.bench.report import write_bench

    results = ROOT / "benchmarks" / "results" / "h200-single-gpu"
    shutil.copy(results / "records.jsonl", tmp_path)
    write_bench(tmp_path)
    drawn, committed = imread(tmp_path / picture), imread(results / picture)
    assert drawn.shape == committed.shape and abs(drawn - committed).mean() < 0.01, "run benchmarks/table.py"
