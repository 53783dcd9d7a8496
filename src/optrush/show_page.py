"""data.html: samples token by token, how long they are, and how full rows would be. One file that needs nothing else.

Drawn from the facts of `data.show`, in the look of the reports; what a page may hold and fetch is said in bench/report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from optrush.bench import charts
from optrush.bench.figures import short
from optrush.data.preview import visible
from optrush.errors import ConfigError
from optrush.trainer.run_dir import put

PAGE = "data.html"
PLOT, TOP = 150, 18  # pixels of the histogram: its bars, the room above them
LETTER = 0.03  # of a phone's width: a letter of an axis' figures


def write(facts: Mapping[str, Any], folder: Path) -> Path:
    """The page of these facts, whole or not at all.

    Raises:
        ConfigError: the folder cannot be made.
    """
    text = page(facts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder}", f"{error.strerror}", "name a folder that can be made") from None
    put(folder / PAGE, text)
    return folder / PAGE


def page(facts: Mapping[str, Any]) -> str:
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
        histogram=histogram(facts["lengths"], facts["seq"]),
        filled=filled(facts["fills"]),
    )


def _seen(text: str) -> str:
    """Text of the data without control characters and without what turns the direction of writing."""
    return "".join(visible(c, marks="") for c in text)


def histogram(lengths: Mapping[str, Any], T: int) -> Markup:
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
    inside += _ticks(edges)
    heads = charts.node("title", "Tokens of a sample"), charts.node("desc", _told(lengths, T))
    return charts.node("svg", *heads, *inside, role="img", class_="chart", width="100%", height=TOP + PLOT + 22)


def _ticks(edges: Sequence[int]) -> list[Markup]:
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
