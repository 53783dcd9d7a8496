"""Check of the documentation's site without building it: every page has its place, and every place its page.

That links lead somewhere is in test_words.py; `make site` builds the whole.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SITE = runpy.run_path(str(ROOT / "docs/hooks.py"))


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose one tag of Python is mkdocs's to apply."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def navigation() -> list[Any]:
    return yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), Loader)["nav"]


def lost(nav: Any, known: list[str]) -> set[str]:
    """Pages that the navigation does not lead to, and entries without a page."""
    return set(SITE["leaves"](SITE["expand"](nav, known))) ^ set(known)


def test_every_page_has_a_place() -> None:
    known = SITE["pages"]()
    assert not lost(navigation(), known)
    placed = list(SITE["leaves"](SITE["expand"](navigation(), known)))
    assert len(placed) == len(set(placed)), "a page has two places"


def test_a_lost_page_is_found() -> None:
    known = [*SITE["pages"](), "docs/nowhere.md"]
    assert lost(navigation(), known) == {"docs/nowhere.md"}
    assert lost([*navigation(), "docs/none.md"], SITE["pages"]()) == {"docs/none.md"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("docs/reference/verbs.md", ("## optrush train", "--dry-run", "## optrush data clean")),
        ("docs/reference/configuration.md", ("| `batch.seq` | T, tokens a row | whole number >= 2 | `2048` |",)),
    ],
)
def test_the_reference_is_made(name: str, expected: tuple[str, ...]) -> None:
    page = SITE["MADE"][name]()
    assert all(text in page for text in expected)


def test_code_wraps_and_wide_tables_keep_their_first_column() -> None:
    """The style of the site, which follows the system's scheme until a reader chooses one."""
    style = (ROOT / "docs/site.css").read_text("utf-8")
    assert "white-space: pre-wrap" in style and "position: sticky; left: 0" in style
    read = yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), Loader)
    assert read["extra_css"] == ["docs/site.css"] and read["theme"]["font"] is False
    media = [p["media"] for p in read["theme"]["palette"]]
    assert media == ["(prefers-color-scheme)", "(prefers-color-scheme: light)", "(prefers-color-scheme: dark)"]


def test_the_laid_out_folder_has_every_page(tmp_path: Path) -> None:
    folder = SITE["lay_out"](tmp_path / "pages")
    assert all((folder / page).is_file() for page in SITE["pages"]() if page not in SITE["MADE"])
    assert SITE["lay_out"](folder) == folder, "again"
