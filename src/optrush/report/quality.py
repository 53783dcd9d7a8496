"""Write the page of a ladder of whole runs, and the table for page and terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from optrush.benchmark.record import QualityRecord, read_quality
from optrush.errors import DataError
from optrush.files import write_whole
from optrush.report import page

COLORS = {"better": "faster", "worse": "red", "equal": "noise"}


def write_quality(folder: Path) -> None:
    """Write report.html and loss.png from the records of whole runs.

    Raises:
        DataError: no records, or a line that is not a record; nothing was written.
    """
    records = read_quality(folder)
    if not records:
        raise DataError(f"the records of {folder}", "the file is empty", "measure again: optrush bench")
    first, table = records[0], list(columns(records))
    title = page.safe_text(first.ladder)
    rows = [bar(r) for r in records]
    axis = "held-out loss, difference from the rung compared with; whiskers: margin"
    text = page.render(
        "quality.html.j2", title=title, under=[page.safe_text(x) for x in (first.case, first.device, first.date[:10])],
        summary=quality_summary(records), chart=page.bars_svg("Held-out loss of each rung", rows),
        headings=[heading for heading, _ in table],
        rows=list(zip(*(cells for _, cells in table), strict=True)), failed=[r for r in records if r.error],
        evals=[(page.safe_text(r.rung), trace(r)) for r in records], command=page.safe_text(first.command, lines=True),
        environment={page.safe_text(k): page.safe_text(v) for k, v in first.environment.items()},
    )  # fmt: skip
    drawn = page.png(page.bars(rows, title=f"{title}: held-out loss", axis=axis, width=page.WIDE))
    for name, content in (("loss.png", drawn), ("report.html", text)):
        write_whole(folder / name, content)


def columns(records: Sequence[QualityRecord]) -> Iterator[tuple[str, list[str]]]:
    """Yield the heading and the cells of each column of the table."""
    yield "rung", [page.safe_text(r.rung) for r in records]
    yield "before", [page.plain_number(r.evals[0][0][1] if r.evals else None, 4) for r in records]
    yield "held-out loss", [page.plain_number(r.loss, 4) for r in records]
    yield "difference", [signed(r.difference, r.margin) for r in records]
    yield "verdict", [page.safe_text(r.verdict) for r in records]
    if any(r.scores for r in records):
        yield "right %", [page.plain_number(r.score, 1) for r in records]
        yield "difference ", [signed(r.score_difference, r.score_margin, 1) for r in records]
    yield "tokens/s", [page.speed(page.number(r.tokens_per_s)) for r in records]
    yield "peak GiB", [page.gib(page.number(r.peak_bytes)) for r in records]
    yield "start s", [page.plain_number(r.start_s) for r in records]
    yield "whole s", [page.plain_number(r.seconds) for r in records]
    yield "compared with", [page.safe_text(r.since) for r in records]


def signed(value: float | None, margin: float | None, digits: int = 4) -> str:
    """Format a difference with its margin: +0.0123 ± 0.0040."""
    if value is None:
        return ""
    return f"{value:+.{digits}f}" + ("" if margin is None else f" ± {margin:.{digits}f}")


def trace(r: QualityRecord) -> str:
    """Return the mean held-out loss of every evaluation: 1.3499, 0.8123 (step 87), 0.8045 (step 259)."""
    each = zip(*r.evals, strict=False)  # one evaluation of all seeds, at equal steps
    means = ((points[0][0], sum(loss for _, loss in points) / len(points)) for points in each)
    return ", ".join(f"{loss:.4f}" + (f" (step {step:g})" if step else "") for step, loss in means) or page.DASH


def quality_summary(records: Sequence[QualityRecord]) -> str:
    """Return the verdicts in a sentence."""
    words = ("better", "equal", "worse", "one seed", "failed")
    counts = [f"{n} {word}" for word in words if (n := sum(r.verdict == word for r in records))]
    seeds = max(len(r.seeds) for r in records)
    counted = f"{page.amount(len(records), 'rung')}, {page.amount(seeds, 'seed')}"
    return f"{counted}: {', '.join(counts) or 'nothing to compare'}."


def bar(r: QualityRecord) -> page.BarRow:
    """Return the bar of a rung: its difference, with the margin as whiskers."""
    name = page.safe_text(r.rung)
    if r.error is not None:
        return page.BarRow(name, f"failed: {page.cut_text(page.safe_text(r.error), 60)}", failed=True)
    text = f"{page.plain_number(r.loss, 4)}, {page.speed(r.tokens_per_s)} tokens/s, {page.plain_number(r.seconds)} s"
    if r.difference is None:
        return page.BarRow(name, text)
    low, high = (None, None) if r.margin is None else (r.difference - r.margin, r.difference + r.margin)
    pieces = ((0.0, r.difference, COLORS.get(r.verdict, "base")),)
    return page.BarRow(name, f"{r.verdict}: {signed(r.difference, None)}; {text}", pieces, low, high)
