"""data.html: whole, escaped, self-contained, and drawn as it should be in a real browser."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_browser import CHROMIUM, Browser, browser

from meshes import further
from optrush.data import preview
from optrush.errors import ConfigError
from optrush.report import data

__all__ = ["browser"]
EVIL = "<script>document.title = 'taken'</script>\"'><img src=x onerror=alert(1)>&amp;"
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")


def piece(text: str, learnt: bool, special: bool = False, *ids: int) -> dict[str, Any]:
    return {"text": text, "learnt": learnt, "special": special, "ids": ids or (7,)}


def document(name: str, *pieces: dict[str, Any], left_out: int = 0) -> dict[str, Any]:
    n = sum(len(p["ids"]) for p in pieces)
    end = [piece(" the end", True)] if left_out else []
    return {"name": name, "tokens": n + left_out, "targets": n // 2, "pieces": list(pieces), "left_out": left_out,
            "end": end}  # fmt: skip


def facts(**changes: Any) -> dict[str, Any]:
    """Two samples, a pair among them, and 20,000 lengths."""
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 1, 20_000), 2, None).astype(np.int64)
    turn = (
        piece("<|im_start|>", False, True, 3),
        piece("user\nHow?", False),
        piece("\u202eStir\x1b[31m 漢", True, False, 1, 2),
    )
    one = {
        "sample": 3,
        "where": "chat.jsonl:4",
        "longer": True,
        "documents": [document("document", *turn, left_out=99)],
    }
    two = {"sample": 4, "where": EVIL, "longer": False,
           "documents": [document("chosen", piece(EVIL, True)), document("rejected", *turn)]}  # fmt: skip
    run: Any = SimpleNamespace(seed=0, with_={"packing": {}}, data=SimpleNamespace(too_long="split"))
    return {
        "summary": f"20000 documents {EVIL}", "objective": "sft", "seq": 2048, "too_long": "split",
        "samples": [one, two], "lengths": preview.length_summary(lengths, lengths // 3, 2048),
        "fills": preview.fills(lengths, 2048, 32, 8, run), **changes,
    }  # fmt: skip


def test_the_page() -> None:
    page = data.data_page(facts())
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    assert f'<meta http-equiv="Content-Security-Policy" content="{policy}">' in page
    assert not re.search(r"https?://|<script|<img|None|nan\b", page)
    assert {u for u in re.findall(r'href="([^"]*)"', page) if not u.startswith("#")} == {"data:,"}
    for tag in ("svg", "table", "section", "div", "span", "text"):
        assert len(re.findall(rf"<{tag}[ >]", page)) == page.count(f"</{tag}>"), tag
    for said in (
        '<span class="u s" title="3">&lt;|im_start|&gt;</span><span class="u" title="7">user↵\nHow?</span>'
        '<span class="l" title="1 2">\\u202eStir\\x1b[31m 漢</span>',
        "… 99 tokens are not shown … </span><span class=\"l\" title=\"7\"> the end</span>",
        "chat.jsonl:4", "longer than T (data.too_long: split)", "<strong>chosen</strong>", "<strong>rejected</strong>",
        "&lt;script&gt;document.title", "T = 2,048", "packing (this run)", "20,000", "33.2",
    ):  # fmt: skip
        assert said in page, said
    assert not set("\x1b\u202e") & set(page)


def test_rows() -> None:
    held = facts()
    rows = [{"row": 17, "tokens": 1999, "samples": held.pop("samples")}]
    page = data.data_page(held | {"rows": rows})
    assert "Row 17: 1,999 of 2,048 slots" in page and "Rows as they are trained" in page and "chat.jsonl:4" in page


@pytest.mark.parametrize(
    ("lengths", "line"), [([128] * 9, False), ([2], False), ([5, 9000], True), ([1, 10**7], True), ([2048, 2049], True)]
)
def test_any_lengths(lengths: list[int], line: bool) -> None:
    """One length, two, far apart; the line at T stands where T lies within."""
    found = preview.length_summary(np.array(lengths), np.array(lengths) // 2, 2048)
    drawn = data.lengths_histogram(found, 2048)
    assert ("T = 2,048" in drawn) == line and "nan" not in drawn
    said = [int(n.replace(",", "")) for n in re.findall(r"tokens: ([\d,]+)", drawn)]
    assert sum(said) == len(lengths)
    assert ("var(--slower)" in drawn) == line


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as raised:
        data.write_data_page(facts(), tmp_path / "file" / "inside")
    assert raised.value.asked.startswith("--out ") and "name a folder" in raised.value.do
    held = facts()
    assert data.write_data_page(held, tmp_path / "new").read_text() == data.data_page(held)


@in_browser
@pytest.mark.parametrize("width", further([400, 1600], 1))
def test_in_a_browser(browser: Browser, tmp_path: Path, width: int) -> None:
    """A silent console, nothing fetched, no script run, charts to be read on a phone and in the dark."""
    few = np.array([10**6, 10**6 + 1])
    kinds = facts(), facts(seq=15_000), facts(seq=20), facts(lengths=preview.length_summary(few, few, 10**6), seq=10**6)
    pages = [data.write_data_page(kind, tmp_path / str(i)) for i, kind in enumerate(kinds)]
    light, dark, *more = [browser.open(page, width, dark=i == 1) for i, page in enumerate([pages[0], *pages])]
    for seen in (light, dark, *more):
        assert not seen.console and not seen.fetched and seen.wide <= 0
        assert [c["over"] + c["out"] for c in seen.charts] == [0, 0]
        assert all(c["width"] > 180 and c["height"] > 100 and c["letters"] >= 10 and c["said"] for c in seen.charts)
        assert seen.ids == ["samples", "lengths", "fill"]
    assert light.paper != dark.paper and light.charts[0]["fill"] != dark.charts[0]["fill"]
    title = browser.ask("Runtime.evaluate", expression="document.title", returnByValue=True)["result"]["value"]
    assert title.startswith("Data: 20000 documents <script>")
