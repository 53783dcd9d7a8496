"""The figures of the README are those of the committed records."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_readme_is_what_the_records_say() -> None:
    table = runpy.run_path(str(ROOT / "benchmarks/table.py"))
    readme = (ROOT / "README.md").read_text()
    assert table["written"](readme) == readme, "run benchmarks/table.py"
    assert "| optrush" in readme
