"""Each rung against its ceiling: what is measured, what is computed, and a page that says which is which."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from optrush.planner.cost import PARTS
from optrush.report import bench as report
from optrush.report import page as pages

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
    found = {r.name: r for r in report.roofs(roofed)}
    assert "fused loss" not in found, "a rung that failed has no step"
    last = found["larger micro-batch"]
    step = 32768 / 69851
    assert last.step_s == pytest.approx(step) and last.total_s == pytest.approx(0.404)
    assert last.left_s == pytest.approx(step - 0.404) and last.reached == pytest.approx(100 * 0.404 / step)
    assert sum(map(last.share, (*PARTS, report.LEFT))) == pytest.approx(100)
    assert found["eager"].reached == pytest.approx(100 * 0.404 / (32768 / 4835))


def test_the_median_of_all_steps(roofed: Ladder) -> None:
    roofed[0]["step_s"] = [[1.0, 2.0, 9.0], [3.0, 30.0], ["x", None, float("inf"), -1]]
    assert report.roofs(roofed[:1])[0].step_s == 3.0


def test_a_later_record_counts(roofed: Ladder) -> None:
    again = {**roofed[0], "step_s": [[5.0]]}
    assert [r.step_s for r in report.roofs([roofed[0], again])] == [5.0]


@pytest.mark.parametrize("change", [
    {"ceiling_s": None}, {"ceiling_s": {}}, {"ceiling_s": [1]}, {"ceiling_s": {"products": "x"}}, {"step_s": None},
    {"step_s": [[]]}, {"error": "killed"},
])  # fmt: skip
def test_without_figures_there_is_no_roof(roofed: Ladder, change: dict[str, Any]) -> None:
    assert report.roofs([{**roofed[0], **change}]) == []


def test_the_page(roofed: Ladder, bench: Callable[..., Path]) -> None:
    page = _page(bench(roofed))
    at = page.index('<section id="ceiling">')
    assert page.index('<section id="predicted">') < at < page.index('<section id="without">')
    said = page[at : page.index("</section>", at)]
    for words in (
        "Only the whole step was measured", "at the rates that optrush calibrate measured", "step, measured",
        "products, computed", "optimizer, computed", ">remainder<", "469.1 ms", "404.0 ms", "86.1 %",
    ):  # fmt: skip
        assert words in said, words
    assert "remainder, computed" not in said and "Faster than the" not in said


@pytest.mark.slow
def test_old_records_have_no_such_section(ladder: Ladder, bench: Callable[..., Path]) -> None:
    assert 'id="ceiling"' not in _page(bench(ladder))


def test_a_step_above_its_ceiling_is_called_so(roofed: Ladder, bench: Callable[..., Path]) -> None:
    roofed[0]["step_s"], roofed[0]["basis"] = [[0.2]], "datasheet"
    page = _page(bench(roofed[:1]))
    assert "Faster than the computed ceiling" in page and "202.0 %" in page and "−204.0 ms" in page
    assert "the whole rates of a datasheet" in page


def pieces(records: Ladder, monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[float, float, str], ...]]:
    """Return the pieces of each bar that the section draws."""
    drawn: list[tuple[tuple[float, float, str], ...]] = []
    real = pages.bars
    monkeypatch.setattr(pages, "bars", lambda rows, **more: drawn.extend(r.pieces for r in rows) or real(rows, **more))
    report.roofline_section(records)
    return drawn


def test_a_bar_is_whole(roofed: Ladder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts and the rest make the step; a step above its ceiling has no rest."""
    roofed[0]["step_s"] = [[0.2]]
    above, *others = pieces(roofed, monkeypatch)
    assert len(others) == len(report.roofs(roofed)) - 1 and {len(bar) for bar in (above, *others)} == {6}
    assert above[-1][0] == above[-1][1] == pytest.approx(202)
    assert all(bar[-1][1] == pytest.approx(100) for bar in others)


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
    whole, none, *_, last = report.roofs(profiled)
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
        "The time of each part of a step", "step, profiled", ">gaps<", "530.0 ms", "360.0 ms, 67.9 %", "in others",
        "75.0 % of its ceiling", "200.0 % of its ceiling", "6 ms, 1.1 %", "Not profiled: amp: the profiler saw no",
        "&lt;x&gt;", "differ by more than 10 %", "so these three have no breakdown: eager.",
    ):  # fmt: skip
        assert words in said, words
    assert "computed</th>" not in said and "remainder" not in said and "Only the whole" not in said
    apart = re.findall(r"differ by more than 10 %: ([^<]*)\.</p>", said)[0].split(", ")
    assert "eager (0.07 times)" in apart and not any("larger" in name for name in apart)


def test_a_bar_of_a_profiled_rung_is_whole(profiled: Ladder, monkeypatch: pytest.MonkeyPatch) -> None:
    profiled[-1]["step_s"] = [[0.5]]
    (bar,) = pieces(profiled[-1:], monkeypatch)
    widths = [end - begin for begin, end, _ in bar]
    assert len(bar) == 11 and bar[0][0] == 0 and bar[-1][1] == pytest.approx(100)
    assert all(a[1] == pytest.approx(b[0]) for a, b in pairwise(bar))
    assert widths[0] / widths[1] == pytest.approx(3), "at the ceiling, and beyond it"
    assert widths[7] == pytest.approx(0), "faster than its ceiling: nothing of it is beyond"


@pytest.mark.parametrize(("times", "said"), [(0.8, True), (0.92, False), (1.09, False), (1.2, True)])
def test_profiled_steps_that_are_others(profiled: Ladder, times: float, said: bool) -> None:
    (roof,) = report.roofs([{**profiled[-1], "step_s": [[0.53 / times]]}])
    assert (roof.apart is not None) == said == (roof.part_reached("head") is None)


@pytest.mark.parametrize("seen", [
    None, [], {}, {"products": "x"}, {"other": 1.0}, {**TOOK, "head": -1.0}, {**TOOK, "attention": None},
    {k: v for k, v in TOOK.items() if k != "gaps"}, dict.fromkeys(TOOK, 0.0),
])  # fmt: skip
def test_parts_that_are_none(roofed: Ladder, seen: object) -> None:
    assert report.roofs([{**roofed[0], "parts_s": seen}])[0].took is None
