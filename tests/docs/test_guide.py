"""Run every block of the guide, in order, in one folder: its commands in this process, its Python in one namespace.

A block that cannot be run here has a comment before it, `<!-- not run: WHY -->`. A block of YAML whose first line names
a file is written to it; each one must be a configuration that can be planned.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from optrush.cli import app
from optrush.config import parse_config
from optrush.planner.search import predict
from optrush.trainer import run

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the hub's library is imported
ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guide"
CHAPTERS = [GUIDE / "README.md", *sorted(GUIDE.glob("[0-9]*.md"))]
PAGES = [*CHAPTERS, ROOT / "docs" / "serving.md"]  # which goes on from the guide
LANGUAGES = ("bash", "python", "yaml")


class Block(NamedTuple):
    """A block of code of a page."""

    where: str  # file:line
    language: str
    text: str
    skipped: str  # why it is not run; "": it is


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text("utf-8")
    for found in re.finditer(r"(?:<!-- not run: (.*?) -->\n)?```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        line = text.count("\n", 0, found.start(2)) + 1
        yield Block(f"{page.name}:{line}", found[2], found[3], found[1] or "")


def run_commands(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    for line in block.text.splitlines():
        words = shlex.split(line, comments=True)
        assert words[0] == "optrush", f"{block.where}: {line}: only commands of optrush are run"
        monkeypatch.setattr(sys, "argv", words)
        code = None
        try:
            app.main()
        except SystemExit as leaving:
            code = leaving.code
        assert not code, f"{block.where}: {line}: exit code {code}"


def write_configuration(block: Block) -> None:
    name = re.match(r"# ([\w.-]+\.yaml)\n", block.text)
    assert name is not None, f"{block.where}: its first line names no file"
    Path(name[1]).write_text(block.text, "utf-8")
    assert predict(parse_config(block.text, name[1]), "h200").peak_bytes > 0


def test_every_chapter_has_blocks() -> None:
    for page in CHAPTERS:
        found = list(blocks(page))
        assert {b.language for b in found} <= {*LANGUAGES, "text"}, page.name
        assert any(not b.skipped for b in found), page.name
        assert (GUIDE / f"{page.stem}.svg").is_file() or page.name == "README.md"


@pytest.mark.slow
def test_every_block_runs(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "write_run", lambda *_: None)  # a second of charts each; they have tests of their own
    torch.set_num_threads(1)
    names: dict[str, Any] = {}
    for page in PAGES:
        for block in blocks(page):
            if block.skipped:
                continue
            if block.language == "yaml":
                write_configuration(block)
            elif block.language == "bash":
                run_commands(block, monkeypatch)
            elif block.language == "python":
                exec(compile(block.text, block.where, "exec"), names)


@pytest.mark.slow
def test_its_pictures_are_what_is_drawn(tmp_path: Path) -> None:
    """Drawn again and compared: words, and places and colors of lines; another version may round a number otherwise."""

    def parts(picture: Path) -> tuple[list[str], list[float], set[str]]:
        text = picture.read_text("utf-8")
        numbers = [float(x) for d in re.findall(r' d="([^"]*)"', text) for x in re.findall(r"-?[\d.]+", d)]
        return re.findall(r">([^<>]*)</text>", text), numbers, set(re.findall(r"(?:fill|stroke): [^;\"]+", text))

    (tmp_path / "guide").mkdir()
    runpy.run_path(str(ROOT / "docs/pictures.py"))["draw"](tmp_path / "guide")
    for drawn in (found := sorted(tmp_path.rglob("*.svg"))):
        committed = GUIDE.parent / drawn.relative_to(tmp_path)
        (words, places, colors), (words_, places_, colors_) = parts(drawn), parts(committed)
        assert (words, colors, len(places)) == (words_, colors_, len(places_)), f"{drawn.name}: run docs/pictures.py"
        assert places == pytest.approx(places_, abs=0.5), f"{drawn.name}: run docs/pictures.py"
        text = committed.read_text("utf-8")
        assert len(text) < 60_000 and "prefers-color-scheme: dark" in text and "#000000" not in text
        assert float(re.findall(r'<svg [^>]*?viewBox="0 0 ([\d.]+)', text)[0]) < 400, "letters are too small on a phone"
    shown = {name for page in CHAPTERS for name in re.findall(r"\]\(([\w-]+)\.svg\)", page.read_text("utf-8"))}
    assert {p.stem for p in found if p.parent.name == "guide"} == shown >= {p.stem for p in CHAPTERS} - {"README"}


def test_a_wrong_sum_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    page.write_text("```python\nassert 2 + 2 == 5\n```\n<!-- not run: x -->\n```bash\noptrush no\n```\n")
    wrong, skipped = blocks(page)
    with pytest.raises(AssertionError):
        exec(compile(wrong.text, wrong.where, "exec"), {})
    assert skipped.skipped == "x" and wrong.where == "page.md:1"
    with pytest.raises(AssertionError, match="exit code 2"):
        run_commands(skipped._replace(text="optrush train none.yaml"), monkeypatch)
