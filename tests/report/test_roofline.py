"""Each rung against its ceiling: what is measured, what is computed, and a page that says which is which."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_browser import CHROMIUM, Browser

from optrush.planner.cost import PARTS
from optrush.report import bench as report
from optrush.report import bench as roofline

Ladder = list[dict[str, Any]]
CEILING = {"products": 0.27, "attention": 0.03, "head": 0.08, "elementwise": 0.02, "optimizer": 0.004}


@pytest.fixture
def roofed(ladder: Ladder) -> Ladder:
    for record in ladder:
        record["ceiling_s"] = {} if record["error"] else dict(CEILING)
    return ladder


def _page(folder: Path) -> str:
    report.write_bench(folder)
    return (folder / report.PAGE).read_text("utf-8")


def test_what_is_left_is_what_nothing_explains(roofed: Ladder) -> None:
    found = {r.name: r for r in roofline.roofs(roofed)}
    assert "fused loss" not in found, "a rung that failed has no step"
    last = found["larger micro-batch"]
    step = 32768 / 69851
    assert last.step_s == pytest.approx(step) and last.total_s == pytest.approx(0.404)
    assert last.left_s == pytest.approx(step - 0.404) and last.reached == pytest.approx(100 * 0.404 / step)
    assert sum(map(last.share, (*PARTS, roofline.LEFT))) == pytest.approx(100)
    assert found["eager"].reached == pytest.approx(100 * 0.404 / (32768 / 4835))


def test_the_median_of_all_steps(roofed: Ladder) -> None:
    roofed[0]["step_s"] = [[1.0, 2.0, 9.0], [3.0, 30.0], ["x", None, float("inf"), -1]]
    assert roofline.roofs(roofed[:1])[0].step_s == 3.0


def test_a_later_record_counts(roofed: Ladder) -> None:
    again = {**roofed[0], "step_s": [[5.0]]}
    assert [r.step_s for r in roofline.roofs([roofed[0], again])] == [5.0]


@pytest.mark.parametrize("change", [
    {"ceiling_s": None}, {"ceiling_s": {}}, {"ceiling_s": [1]}, {"ceiling_s": {"products": "x"}}, {"step_s": None},
    {"step_s": [[]]}, {"error": "killed"},
])  # fmt: skip
def test_without_figures_there_is_no_roof(roofed: Ladder, change: dict[str, Any]) -> None:
    assert roofline.roofs([{**roofed[0], **change}]) == []


def test_the_page(roofed: Ladder, bench: Callable[..., Path]) -> None:
    page = _page(bench(roofed))
    at = page.index('<section id="ceiling">')
    assert page.index('<section id="predicted">') < at < page.index('<section id="without">')
    said = page[at : page.index("</section>", at)]
    for words in (
        "Only the length of a step is measured", "at the rates that optrush calibrate measured", "step, measured",
        "products, computed", "optimizer, computed", ">remainder<", "469.1 ms", "404.0 ms", "86.1 %",
    ):  # fmt: skip
        assert words in said, words
    assert "remainder, computed" not in said and "Faster than what is called" not in said
    drawn = re.findall(r'<rect class="(fill s\d|band)"', said)
    rungs = len(roofline.roofs(roofed))
    assert drawn.count("band") == rungs + 1 and len(drawn) == 6 * (rungs + 1), "six pieces a rung, and the legend"


def test_old_records_have_no_such_section(ladder: Ladder, bench: Callable[..., Path]) -> None:
    assert 'id="ceiling"' not in _page(bench(ladder))


def test_a_step_above_its_ceiling_is_called_so(roofed: Ladder, bench: Callable[..., Path]) -> None:
    roofed[0]["step_s"], roofed[0]["basis"] = [[0.2]], "datasheet"
    page = _page(bench(roofed[:1]))
    assert "Faster than what is called its ceiling" in page and "202.0 %" in page and "−204.0 ms" in page
    assert "the whole rates of a datasheet" in page
    widths = [
        float(w) for w in re.findall(r'class="(?:fill s\d|band)" y="19" height="14" x="[\d.]+%" width="([\d.]+)%', page)
    ]
    assert sum(widths) == pytest.approx(100, abs=0.1), "the bar ends where the plot does"


TOOK = {"products": 0.36, "attention": 0.05, "head": 0.1, "elementwise": 0.01, "optimizer": 0.004, "gaps": 0.006}


@pytest.fixture
def profiled(roofed: Ladder) -> Ladder:
    for record in roofed:
        record["parts_s"] = {} if record["error"] else dict(TOOK)
    roofed[0]["parts_s"]["attention"] = 0.0  # whole scores
    roofed[1] |= {"parts_s": {}, "parts_note": "the profiler saw no kernel <x>"}
    return roofed


def test_each_part_against_its_ceiling(profiled: Ladder) -> None:
    profiled[-1]["step_s"] = [[0.5]]
    whole, none, *_, last = roofline.roofs(profiled)
    assert last.profiled_s == pytest.approx(0.53) and sum(map(last.taken, TOOK)) == pytest.approx(100)
    assert last.part_reached("products") == pytest.approx(75) and last.part_reached("attention") == pytest.approx(60)
    assert last.part_reached("elementwise") == pytest.approx(200) and last.part_reached("gaps") is None
    assert whole.scored and whole.apart is not None and not last.scored and last.apart is None
    near = replace(whole, step_s=whole.profiled_s)
    assert near.apart is None and near.part_reached("head") == pytest.approx(80)
    assert {near.part_reached(p) for p in ("products", "attention", "elementwise")} == {None}, "they cannot be told"
    assert none.took is None and none.part_reached("products") is None


def test_the_page_of_profiled_rungs(profiled: Ladder, bench: Callable[..., Path]) -> None:
    profiled[12]["step_s"] = [[0.5]]
    page = _page(bench(profiled))
    at = page.index('<section id="ceiling">')
    said = page[at : page.index("</section>", at)]
    for words in (
        "What each part of a step took", "step, profiled", ">gaps<", "530.0 ms", "360.0 ms, 67.9 %", "in others",
        "75.0 % of its ceiling", "200.0 % of its ceiling", "6 ms, 1.1 %", "Not profiled: amp: the profiler saw no",
        "&lt;x&gt;", "more than 1.1 times as long as a timed one", "so that no share is given for the three: eager.",
    ):  # fmt: skip
        assert words in said, words
    assert "computed</th>" not in said and "remainder" not in said and "Only the length" not in said
    drawn = re.findall(r'<rect class="(fill s\d(?: pale)?|band)"', said)
    rungs = len(roofline.roofs(profiled)) - 1
    assert len(drawn) == 11 * rungs + 6, "each part twice and the gaps, a rung; and the legend"
    apart = re.findall(r"rows were in it: ([^<]*)\.</p>", said)[0].split(", ")
    assert "eager (0.07 times)" in apart and not any("larger" in name for name in apart)


def test_a_bar_of_a_profiled_rung_is_whole(profiled: Ladder, bench: Callable[..., Path]) -> None:
    profiled[-1]["step_s"] = [[0.5]]
    page = _page(bench(profiled[-1:]))
    widths = re.findall(r'class="(?:fill s\d(?: pale)?|band)" y="19" height="14" x="[\d.]+%" width="([\d.]+)%', page)
    assert len(widths) == 11 and sum(map(float, widths)) == pytest.approx(100, abs=0.1)
    assert float(widths[0]) / float(widths[1]) == pytest.approx(3, rel=0.01), "at the ceiling, and beyond it"
    assert float(widths[7]) == 0, "faster than its ceiling: nothing of it is beyond"


@pytest.mark.parametrize(("times", "said"), [(0.8, True), (0.92, False), (1.09, False), (1.2, True)])
def test_profiled_steps_that_are_others(profiled: Ladder, times: float, said: bool) -> None:
    (roof,) = roofline.roofs([{**profiled[-1], "step_s": [[0.53 / times]]}])
    assert (roof.apart is not None) == said == (roof.part_reached("head") is None)


@pytest.mark.parametrize("seen", [
    None, [], {}, {"products": "x"}, {"other": 1.0}, {**TOOK, "head": -1.0}, {**TOOK, "attention": None},
    {k: v for k, v in TOOK.items() if k != "gaps"}, dict.fromkeys(TOOK, 0.0),
])  # fmt: skip
def test_parts_that_are_none(roofed: Ladder, seen: object) -> None:
    assert roofline.roofs([{**roofed[0], "parts_s": seen}])[0].took is None


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")
@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("kind", ["roofed", "profiled"])
def test_it_is_seen(
    request: pytest.FixtureRequest, kind: str, bench: Callable[..., Path], tmp_path: Path, width: int
) -> None:
    folder = bench(request.getfixturevalue(kind))
    report.write_bench(folder)
    browser = Browser(tmp_path / "profile")
    try:
        seen = browser.open(folder / report.PAGE, width, dark=True)
    finally:
        browser.close()
    assert not seen.console and not seen.fetched and seen.wide <= 0 and "ceiling" in seen.ids
    assert not any(chart["out"] or chart["over"] for chart in seen.charts)
