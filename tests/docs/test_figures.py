"""The figures of the README and of docs are those of the committed records."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from optrush.benchmark import ladder
from optrush.config import parse_config
from optrush.techniques import ALL

ROOT = Path(__file__).parents[2]


@cache
def written_by() -> dict[str, Any]:
    """What benchmarks/table.py defines."""
    return runpy.run_path(str(ROOT / "benchmarks/table.py"))


@pytest.mark.parametrize(
    ("page", "rung"),
    [
        ("docs/benchmarks.md", "| float32, eager |"),
        ("README.md", "| 1b-amp-2048 | torchtitan |"),
        ("docs/data.md", "| padded to the longest |"),
        ("docs/ladder.md", "| torchtitan |"),
        ("docs/plan.md", "| rows | T=8192 |"),
        ("docs/reliability.md", "| R3 | damaged bytes"),
        ("docs/techniques/recompute.md", "longest row 20,480 -> 206,848 | + recompute |"),
    ],
)
def test_the_page_is_what_the_records_say(page: str, rung: str) -> None:
    table = written_by()
    text = (ROOT / page).read_text()
    assert table["written"](page) == text, "run benchmarks/table.py"
    assert rung in text


@pytest.mark.parametrize("name", sorted(p.name for p in (ROOT / "docs/guide").glob("[0-9]*.md")))
def test_the_guide_is_what_the_records_say(name: str) -> None:
    table, page = written_by(), f"docs/guide/{name}"
    text = (ROOT / page).read_text()
    assert page not in table["PAGES"] or table["written"](page) == text, "run benchmarks/table.py"
    assert (page in table["PAGES"]) == (table["BEGIN"] in text)


@pytest.mark.parametrize("name", [c.name for c in ALL])
def test_what_a_technique_was_worth_is_what_the_records_say(name: str) -> None:
    table = written_by()
    page = f"docs/techniques/{name}.md"
    assert table["written"](page) == (ROOT / page).read_text(), "run benchmarks/table.py"


def test_the_plan_is_near_what_was_measured() -> None:
    """Of every rung on an H200 that does not wait for the host: peaks within 5 %, speeds within 11 % by the datasheet,
    within 13 % after `calibrate` (a recorded step of a small model; the others within 10 %).
    """
    said = re.search(r"Errors of peaks: .*", (ROOT / "docs/plan.md").read_text())
    assert said is not None
    largest = [float(x) for x in re.findall(r"largest ([\d.]+)%", said[0])]
    assert len(largest) == 3 and largest[0] <= 5 and largest[1] <= 11 and largest[2] <= 13


def test_gradients_of_every_rung_point_where_float32s_do() -> None:
    """On the 1B shape: the cosine of each rung of `single-gpu`, all values compared, is 0.999 or more."""
    config = parse_config((ROOT / "benchmarks/llama1b.yaml").read_text(), "llama1b.yaml")
    rungs = ladder.resolve_rungs(ladder.find_ladder("single-gpu", config), config, cumulative_only=True)
    lines = (ROOT / "benchmarks/results/h200-gradients.jsonl").read_text().splitlines()
    found = {r["rung"]: r.get("cosine", 0) for r in map(json.loads, lines) if r["ladder"] == "single-gpu"}
    assert list(found) == [r.name for r in rungs] and min(found.values()) >= 0.999, found


@pytest.mark.slow
def test_its_pictures_are_what_the_records_say(tmp_path: Path) -> None:
    """Drawn again and compared dot by dot; another version of the fonts may move an edge."""
    from matplotlib.image import imread

    from optrush.report.bench import write_bench

    results = ROOT / "benchmarks" / "results" / "h200-single-gpu"
    shutil.copy(results / "records.jsonl", tmp_path)
    write_bench(tmp_path)
    for picture in ("speed.png", "memory.png"):
        drawn, committed = imread(tmp_path / picture), imread(results / picture)
        assert drawn.shape == committed.shape and abs(drawn - committed).mean() < 0.01, "run benchmarks/table.py"
