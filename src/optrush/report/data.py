"""data.html: samples token by token, how long they are, and how full rows would be. One file that needs nothing else.

Drawn from the facts of `data.show`, in the look of the reports; what a page may hold and fetch is said in bench/report.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from markupsafe import Markup

from optrush.data.preview import visible
from optrush.errors import ConfigError
from optrush.report import charts
from optrush.report.charts import clean, cut, short
from optrush.trainer.run_dir import put

DATA_PAGE = "data.html"
PLOT, TOP = 150, 18  # pixels of the histogram: its bars, the room above them
LETTER = 0.03  # of a phone's width: a letter of an axis' figures


def write_data_page(facts: Mapping[str, Any], folder: Path) -> Path:
    """The page of these facts, whole or not at all.

    Raises:
        ConfigError: the folder cannot be made.
    """
    text = data_page(facts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder}", f"{error.strerror}", "name a folder that can be made") from None
    put(folder / DATA_PAGE, text)
    return folder / DATA_PAGE


def data_page(facts: Mapping[str, Any]) -> str:
    """The page as text."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(charts.__file__).parent)
    house = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    house.filters |= {"seen": _seen, "many": lambda n: f"{n:,.0f}", "percent": lambda x: f"{x:.2%}"}
    return house.get_template("data.html.j2").render(
        **facts,
        hatching=charts.hatching(),
        histogram=lengths_histogram(facts["lengths"], facts["seq"]),
        filled=filled(facts["fills"]),
    )


def _seen(text: str) -> str:
    """Text of the data without control characters and without what turns the direction of writing."""
    return "".join(visible(c, marks="") for c in text)


def lengths_histogram(lengths: Mapping[str, Any], T: int) -> Markup:
    """How many samples are how long, with a line at T."""
    edges, counts = lengths["histogram"]["edges"], lengths["histogram"]["counts"]
    n, most = len(counts), max(counts)
    inside = []
    for i, count in enumerate(counts):
        height = PLOT * count / most
        bar = {"x": f"{100 * (i + 0.04) / n:.2f}%", "width": f"{92 / n:.2f}%", "rx": 1}
        said = charts.node("title", f"{edges[i]:,} to {edges[i + 1] - 1:,} tokens: {count:,} samples")
        kind = "slower" if edges[i] > T else "base"
        inside.append(charts.node("rect", said, class_=f"bar {kind}", y=TOP + PLOT - height, height=height, **bar))
    inside.append(charts.node("line", class_="zero", x1="0%", x2="100%", y1=TOP + PLOT, y2=TOP + PLOT))
    if edges[0] < T + 1 < edges[-1]:  # what is as long as T lies left of the line
        i = max(i for i, edge in enumerate(edges) if edge <= T + 1)
        at = (i + (T + 1 - edges[i]) / (edges[i + 1] - edges[i])) / n
        x = f"{100 * at:.2f}%"
        word = {"dx": 5, "text_anchor": "start"} if at < 0.5 else {"dx": -5, "text_anchor": "end"}
        inside.append(charts.node("line", class_="predicted", x1=x, x2=x, y1=TOP - 4, y2=TOP + PLOT))
        inside.append(charts.node("text", f"T = {T:,}", class_="figure halo", x=x, y=TOP - 6, **word))
    inside += _edge_ticks(edges)
    heads = charts.node("title", "Tokens of a sample"), charts.node("desc", _told(lengths, T))
    return charts.node("svg", *heads, *inside, role="img", class_="chart", width="100%", height=TOP + PLOT + 22)


def _edge_ticks(edges: Sequence[int]) -> list[Markup]:
    """Figures under every few edges; one that would touch the next is left out."""
    n, found, reached = len(edges) - 1, [], -1.0
    for i in range(n + 1):
        figure, share = short(edges[i]), i / n
        anchor = "start" if share < 0.06 else "end" if share > 0.94 else "middle"
        begin = share - {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor] * LETTER * len(figure)
        if begin > reached:
            reached = begin + LETTER * (len(figure) + 2)
            place = {"x": f"{100 * share:.2f}%", "y": TOP + PLOT + 15, "text_anchor": anchor}
            found.append(charts.node("text", figure, class_="tick", **place))
    return found


def _told(lengths: Mapping[str, Any], T: int) -> str:
    return (
        f"{lengths['samples']} samples of {lengths['min']} to {lengths['max']} tokens, median {lengths['median']:g}; "
        f"{lengths['longer_than_seq']} longer than {T}"
    )


def filled(fills: Sequence[Mapping[str, Any]]) -> Markup:
    """The share of real tokens under each layout."""
    rows = [charts.Bar(f["name"], f["fill"], f"{f['fill']:.2%}", "faster" if f["chosen"] else "base") for f in fills]
    return charts.bars("Share of real tokens", "; ".join(f"{r.name}: {r.text}" for r in rows), rows)


# --- cleaning.html: what each filter of `data.clean` took, and how rows were before and after. One file, nothing
# fetched.
#
# Drawn from the record alone, in the look of the reports; what a page may hold and fetch is said in bench/report.


CLEANING_PAGE, RECORD = "cleaning.html", "cleaning.json"
ROW, BAR = 42, 14  # pixels of the waterfall: a row with its name, its bar
BARS, ABOVE = 150, 20  # pixels of a histogram: its bars, the room above them


def write_cleaning_page(record: Mapping[str, Any], folder: Path) -> Path:
    """cleaning.json and cleaning.html of a record, each whole or not at all; the folder must exist."""
    put(folder / RECORD, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    put(folder / CLEANING_PAGE, cleaning_page(record))
    return folder / CLEANING_PAGE


def cleaning_page(record: Mapping[str, Any]) -> str:
    """The page as text."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(charts.__file__).parent)
    house = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    house.filters |= {"seen": clean, "many": lambda n: f"{n:,.0f}", "percent": lambda x: f"{x:.2%}"}
    settings = yaml.safe_dump({"data": {"clean": record["settings"]}}, sort_keys=False, allow_unicode=True)
    return house.get_template("cleaning.html.j2").render(
        r=record,
        settings=settings,
        hatching=charts.hatching(),
        waterfall=waterfall(record),
        histograms=[(h, before_after_histogram(h)) for h in record["histograms"]],
    )


def waterfall(record: Mapping[str, Any]) -> Markup:
    """Rows left after each filter, and beside them what it took."""
    total, left = record["rows"], record["rows"] - record["bad"]["rows"]
    rows = [("rows", total, 0)] + ([("bad rows", left, total - left)] if left < total else [])
    rows += [(f["label"], f["left"], f["taken"]) for f in record["filters"]]
    inside = []
    for i, (label, stay, taken) in enumerate(rows):
        y, name = i * ROW, cut(clean(label), charts.NAME)
        inside.append(charts.node("text", charts.node("title", clean(label)), name, class_="name halo", x=0, y=y + 13))
        share, gone = 100 * stay / total, max(100 * taken / total, 0.5 if taken else 0)
        bar = {"y": y + 19, "height": BAR, "rx": 1.5}
        inside.append(charts.node("rect", class_="bar base", x=0, width=f"{max(share, 0.2):.2f}%", **bar))
        if taken:
            inside.append(charts.node("rect", class_="bar red", x=f"{share:.2f}%", width=f"{gone:.2f}%", **bar))
        words = f"{stay:,}" + (f" (−{taken:,})" if taken else "")
        inside.append(charts.node("text", words, class_="figure", x=f"{share + gone:.2f}%", dx=9, y=y + 16 + BAR))
    said = "; ".join(f"{label}: {stay:,} left, {taken:,} taken" for label, stay, taken in rows)
    heads = charts.node("title", "Rows left after each filter"), charts.node("desc", clean(said))
    size = {"width": "100%", "height": len(rows) * ROW}
    return charts.node("svg", *heads, *inside, role="img", class_="chart rows", **size)


def before_after_histogram(found: Mapping[str, Any]) -> Markup:
    """Bars of the rows before, in front of them those that stay, and lines at the bounds."""
    edges, before, after = found["edges"], found["before"], found["after"]
    n, most = len(before), max(1, *before)
    inside = []
    for i, (b, a) in enumerate(zip(before, after)):
        place = {"x": f"{100 * (i + 0.04) / n:.2f}%", "width": f"{92 / n:.2f}%", "rx": 1}
        upper = f"{edges[i + 1] - 1:,}" if i + 1 < n else f"{max(found['longest'], edges[i + 1] - 1):,}"
        said = charts.node("title", f"{edges[i]:,} to {upper}: {b:,} before, {a:,} after")
        for count, kind in ((b, "noise"), (a, "faster")):
            height = BARS * count / most
            bar = charts.node("rect", said, class_=f"bar {kind}", y=ABOVE + BARS - height, height=height, **place)
            inside.append(bar if count else Markup(""))
    inside.append(charts.node("line", class_="zero", x1="0%", x2="100%", y1=ABOVE + BARS, y2=ABOVE + BARS))
    for bound, beyond in zip(found["bounds"] or (), (0, 1)):  # what is at most 24 ends where 25 begins
        share = -1.0 if bound is None else (bound + beyond - edges[0]) / (edges[-1] - edges[0])
        if 0 <= share <= 1:
            x, right = f"{100 * share:.2f}%", share > 0.5
            inside.append(charts.node("line", class_="predicted", x1=x, x2=x, y1=ABOVE - 4, y2=ABOVE + BARS))
            word = {"dx": -5 if right else 5, "text_anchor": "end" if right else "start"}
            inside.append(charts.node("text", f"{bound:,.10g}", class_="figure halo", x=x, y=ABOVE - 7, **word))
    inside += _bar_ticks(edges)
    told = f"{sum(before):,} rows before, {sum(after):,} after; the largest {found['longest']:,}"
    heads = charts.node("title", clean(found["name"])), charts.node("desc", told)
    return charts.node("svg", *heads, *inside, role="img", class_="chart", width="100%", height=ABOVE + BARS + 22)


def _bar_ticks(edges: Sequence[int]) -> list[Markup]:
    """Figures under bars at equal distances, as many as fit; the last bar holds all above and has none at its end."""
    n = len(edges) - 1
    wide = LETTER * (max(len(short(edge)) for edge in edges) + 2)
    every = next(k * 10**e for e in range(9) for k in (1, 2, 5) if k * 10**e / n >= wide)
    made = []
    for i in range(0, n, every):
        if i / n < 0.94:
            place = {"x": f"{100 * i / n:.2f}%", "y": ABOVE + BARS + 15, "text_anchor": "middle" if i else "start"}
            made.append(charts.node("text", short(edges[i]), class_="tick", **place))
    return made
