"""Write data.html (the samples of `data show`, their lengths and fills) and cleaning.html (a cleaning's record)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from markupsafe import Markup

from optrush.errors import ConfigError
from optrush.files import write_whole
from optrush.report.page import BarRow, bars_svg, histogram, inline_svg, readable, render, safe_text

DATA_PAGE = "data.html"
CLEANING_PAGE, RECORD = "cleaning.html", "cleaning.json"


def write_data_page(facts: Mapping[str, Any], folder: Path) -> Path:
    """Write data.html and return its path.

    Raises:
        ConfigError: the folder cannot be created.
    """
    text = data_page(facts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder}", f"{error.strerror}", "name a folder that can be made") from None
    write_whole(folder / DATA_PAGE, text)
    return folder / DATA_PAGE


def data_page(facts: Mapping[str, Any]) -> str:
    """Return data.html as text.

    Args:
        facts: from `data show`: lengths, fills, and samples or rows.
    """

    rows = [BarRow(f["name"], f"{f['fill']:.2%}", ((0, 100 * f["fill"], "faster" if f["chosen"] else "base"),))
            for f in facts["fills"]]  # fmt: skip
    fills = bars_svg("Share of real tokens", rows, unit=" %")
    lengths = lengths_histogram(facts["lengths"], facts["seq"])
    return render("data.html.j2", **facts, safe=readable, histogram=lengths, filled=fills)


def lengths_histogram(lengths: Mapping[str, Any], T: int) -> Markup:
    """Draw the histogram of sample lengths, with a line at T; longer samples have another color."""
    edges, counts = lengths["histogram"]["edges"], lengths["histogram"]["counts"]
    layers = [("base", [n if low <= T else 0 for n, low in zip(counts, edges)]),
              ("slower", [n if low > T else 0 for n, low in zip(counts, edges)])]  # fmt: skip
    # A sample of T tokens is left of the line; without longer or without shorter samples there is no line.
    marks = [(T + 1.0, f"T = {T:,}")] if edges[0] < T + 1 < edges[-1] else []
    each = (f"{low:,} to {high - 1:,} tokens: {n:,}" for low, high, n in zip(edges, edges[1:], counts))
    description = (
        f"{lengths['samples']} samples of {lengths['min']} to {lengths['max']} tokens, median {lengths['median']:g}; "
        f"{lengths['longer_than_seq']} longer than {T}; {'; '.join(each)}"
    )
    return inline_svg(histogram(edges, layers, marks), "Tokens of a sample", description)


def write_cleaning_page(record: Mapping[str, Any], folder: Path) -> Path:
    """Write cleaning.json and cleaning.html of a record, and return the page's path; the folder must exist."""
    write_whole(folder / RECORD, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    write_whole(folder / CLEANING_PAGE, cleaning_page(record))
    return folder / CLEANING_PAGE


def cleaning_page(record: Mapping[str, Any]) -> str:
    """Return cleaning.html as text."""
    settings = yaml.safe_dump({"data": {"clean": record["settings"]}}, sort_keys=False, allow_unicode=True)
    return render("cleaning.html.j2", r=record, settings=settings, waterfall=_waterfall(record))


def _waterfall(record: Mapping[str, Any]) -> Markup:
    """Draw the remaining rows after each filter, and next to them the removed ones."""
    total, left = record["rows"], record["rows"] - record["bad"]["rows"]
    filters = [("rows", total, 0)] + ([("bad rows", left, total - left)] if left < total else [])
    filters += [(safe_text(f["label"]), f["left"], f["taken"]) for f in record["filters"]]
    rows = []
    for label, stay, taken in filters:
        text = f"{stay:,}" + (f" (−{taken:,})" if taken else "")
        pieces: tuple[tuple[float, float, str], ...] = ((0, stay, "base"),)
        rows.append(BarRow(label, text, pieces + (((stay, stay + max(taken, 0.004 * total), "red"),) if taken else ())))
    return bars_svg("Rows left after each filter", rows)
