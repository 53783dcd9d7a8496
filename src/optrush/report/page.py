"""Format the text and figures of reports, draw their charts, and render their pages.

A record can come from another machine or an older version. A missing or non-finite figure becomes None and is shown as
a dash; control characters and halves of surrogate pairs are replaced before text reaches a page.

Charts are drawn with matplotlib: as inline SVG that follows light and dark mode, or as PNG. Each function returns a
figure; `inline_svg` and `png` save it. In SVG the colors of LIGHT become the variables of the page's style sheet, text
stays text, and the same figure gives the same bytes. Every color has a word or a hatching next to it, and the colors
are those of Okabe and Ito, which color-blind readers can distinguish.
"""

from __future__ import annotations

import io
import itertools
import math
import re
import textwrap
import unicodedata
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from optrush.console import duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colors of the style sheet, and of the charts.
LIGHT = {
    "page": "#fdfdfc", "card": "#ffffff", "ink": "#1b2430", "soft": "#566373", "rule": "#d9dee4", "grid": "#e6eaee",
    "base": "#66788a", "faster": "#0072b2", "smaller": "#007f5f", "slower": "#c98200", "noise": "#a3adb8",
    "red": "#cc4a00", "peer": "#b79fcc", "band": "#e1eff6",
    "s0": "#0073b3", "s1": "#cc4b01", "s2": "#008060", "s3": "#a8447c", "s4": "#b07a00", "s5": "#2a93cf",
    "s6": "#4a5563",
}  # fmt: skip
DARK = {
    "page": "#12161b", "card": "#1a2027", "ink": "#e8ecf0", "soft": "#a3afbb", "rule": "#333d48", "grid": "#2a323b",
    "base": "#8496a8", "faster": "#4aa8e0", "smaller": "#2fbf95", "slower": "#e8a93a", "noise": "#67727e",
    "red": "#f0793a", "peer": "#9c83b5", "band": "#1f3342",
    "s0": "#4aa8e0", "s1": "#f0793a", "s2": "#2fbf95", "s3": "#dd86b4", "s4": "#e8c04a", "s5": "#8fd0f5",
    "s6": "#c3ccd5",
}  # fmt: skip
DASH = "–"


def safe_text(value: object, *, lines: bool = False) -> str:
    """Return a value as text without control characters; in one line unless `lines`."""
    if value is None:
        return ""
    allowed = "\n\t" if lines else ""
    text = str(value) if lines else " ".join(str(value).split())
    return "".join(c if c.isprintable() or c in allowed else "\ufffd" for c in text)


def readable(text: str) -> str:
    """Return text from data with escaped control and direction characters."""
    from optrush.data.preview import visible

    return "".join(visible(c, marks="") for c in text)


def cut_text(text: str, width: int) -> str:
    """Shorten a text to `width` letters; a wide character counts as two."""
    used = 0
    for i, letter in enumerate(text):
        used += 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        if used > width:
            return text[: max(0, i - 1)].rstrip() + "…"
    return text


def number(value: object) -> float | None:
    """Return a finite number as float, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if math.isfinite(result) else None


def positive(value: object) -> float | None:
    """Return a finite number above zero as float, None for anything else."""
    result = number(value)
    return result if result is not None and result > 0 else None


def numbers(value: object) -> list[float | None]:
    return [number(v) for v in value] if isinstance(value, list | tuple) else []


def ratio(new: float | None, old: float | None) -> float | None:
    return new / old if new is not None and old else None


def relative_error(predicted: float | None, measured: float | None) -> float | None:
    """Return the error of a prediction in percent of the measured figure."""
    result = ratio(predicted, measured)
    return None if result is None else 100 * (result - 1)


def plain_number(value: float | None, digits: int = 0) -> str:
    return DASH if value is None else f"{value:,.{digits}f}"


def speed(value: float | None) -> str:
    """Format tokens/s with three digits or more."""
    return plain_number(value, 0 if value is None or value >= 100 else 1 if value >= 10 else 2)


def gib(count: float | None) -> str:
    """Format bytes in GiB, without the unit."""
    return DASH if count is None else plain_number(count / 2**30, 1 if count >= 10 * 2**30 else 2)


def times(value: float | None) -> str:
    return DASH if value is None else f"×{value:.1f}" if value >= 10 else f"×{value:.2f}"


def percent(value: float | None, *, signed: bool = False) -> str:
    return DASH if value is None else (f"{value:+,.1f} %" if signed else f"{value:,.1f} %").replace("-", "−")


def milliseconds(seconds: float) -> str:
    """Format seconds in ms: 1.2345 as 1,234.5 ms, below 10 ms with three digits."""
    value = 1e3 * seconds
    return (f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3g}").replace("-", "−") + " ms"


def short(value: float) -> str:
    """Format the tick of an axis with the fewest digits."""
    if value and (abs(value) < 1e-3 or abs(value) >= 1e7):
        return f"{value:.2g}".replace("-", "−")
    return f"{value:,.6f}".rstrip("0").rstrip(".").replace("-", "−")


def amount(count: int, one: str, many: str = "") -> str:
    """Format a count with its noun: 1 rung, 2 rungs."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def render(template: str, **content: Any) -> str:
    """Return a page as text, from a template of this folder with all values escaped.

    The page's content security policy allows no script and no request.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {
        "speed": speed, "gib": gib, "times": times, "percent": percent, "plain": plain_number, "cut": cut_text,
        "clean": safe_text, "milliseconds": milliseconds, "many": lambda n: f"{n:,.0f}",
        "share": lambda x: f"{x:.2%}", "signed": lambda value: percent(value, signed=True), "duration": duration,
    }  # fmt: skip
    return environment.get_template(template).render(light=LIGHT, dark=DARK, **content)


# --- charts

SERIES, DASHES = 7, ("-", "--", ":", "-.")  # colors and strokes of curves
WIDE, NARROW = 640, 300  # points: a PNG, and a chart on a phone's page, which is stretched on wider pages
SHOWN = 1.1  # CSS pixels per point on a page
SIDE, ROW, LINE = 10, 38, 15  # points: the margins, a bar with its name, a further line of the name
LETTER = 6.8  # points: the average width of a letter
SMALL, NORMAL = 10.5, 11.5  # points: the font of ticks, and of all other text

Points = Sequence[tuple[float, float | None]]


@dataclass(frozen=True)
class BarRow:
    """One row of a bar chart.

    Attributes:
        text: text to the right of the bar.
        pieces: (begin, end, kind) of each piece; a kind is a color of LIGHT, pale with " pale".
        low, high: the ends of a whisker.
        predicted: the place of a tick.
        failed: an empty hatched bar replaces the pieces.
    """

    name: str
    text: str
    pieces: tuple[tuple[float, float, str], ...] = ()
    low: float | None = None
    high: float | None = None
    predicted: float | None = None
    failed: bool = False


@dataclass(frozen=True)
class Series:
    """One curve; a y of None is a gap."""

    name: str
    points: Points
    dots: bool = False


def bars_svg(title: str, rows: Sequence[BarRow], **options: Any) -> Markup:
    """Return `bars` as inline SVG, with the rows as text for screen readers."""
    return inline_svg(bars(rows, **options), title, "; ".join(f"{r.name}: {r.text}" for r in rows))


def bars(
    rows: Sequence[BarRow],
    *,
    title: str = "",
    axis: str = "",
    unit: str = "",
    log: bool = False,
    band: float | None = None,
    width: float = NARROW,
) -> Figure:
    """Draw horizontal bars, each under its name; a text too long for the space right of its bar goes below the name.

    Args:
        title, axis: above and below the chart.
        unit: of the ticks.
        log: use a logarithmic axis, with equal lengths for equal factors; every value must be above zero.
        band: shade values up to this size.
    """
    values = [x for r in rows for x in (*(p for a, b, _ in r.pieces for p in (a, b)), r.low, r.high, r.predicted)
              if x is not None and (x > 0 or not log)]  # fmt: skip
    if log:
        low, high = (min(values), max(values)) if values else (1.0, 2.0)
        low, high = (low / 1.03, high * 1.03) if high / low < 1.5 else (low / 1.1, high * 1.05)
    else:
        low, high = min([0.0, *values, *([] if band is None else [-band])]), max([*values, band or 0.0])
        low, high = low - 0.04 * (high - low) * (low < 0), high if high > low else low + 1

    def place(value: float) -> float:
        """Return the distance of a value from `low`."""
        return math.log(value / low) if log else value - low

    ends = []  # per row, the beginning of its text
    for r in rows:
        marks = [x for x in (r.high, r.predicted) if x is not None]
        ends.append(max([low if log else 0.0, *(max(a, b) for a, b, _ in r.pieces), *marks]))
    letters = int((width - 2 * SIDE) / LETTER)
    beside = [len(r.text) <= 0.6 * letters for r in rows]
    names = [[(line, "bold") for line in textwrap.wrap(r.name, int(0.9 * letters))] for r in rows]
    for r, name, fits in zip(rows, names, beside):
        name += [] if fits else [(line, "normal") for line in textwrap.wrap(r.text, letters)]
    rooms = [(8 + LETTER * len(r.text) * fits) / (width - 2 * SIDE) for r, fits in zip(rows, beside)]
    reach = max([place(high) / 0.95, *(place(end) / (1 - room) for end, room in zip(ends, rooms))])
    stub = 0.12 * reach  # length of a failed row's bar
    tops = [0.0, *itertools.accumulate(ROW + LINE * (max(1, len(name)) - 1) for name in names)]
    height = max(ROW, tops[-1])
    figure, axes = _figure(height, width=width, bottom=40 if axis else 24, title=title)
    axes.set(xlim=(low, low * math.exp(reach) if log else low + reach), ylim=(height, 0))
    if log:
        axes.set_xscale("log")
    if band is not None:
        axes.axvspan(-band, band, color=LIGHT["band"], linewidth=0)
    for row, end, top, bottom, name, fits in zip(rows, ends, tops, tops[1:], names, beside):
        y = bottom - 0.34 * ROW
        _row(axes, row, y)
        if row.failed:
            end = low * math.exp(stub) if log else low + stub
            axes.barh(y, end - low, 0.4 * ROW, left=low, facecolor="none", edgecolor=LIGHT["red"], hatch="////")
        # Names start at the chart's edge, texts right of the bars.
        for i, (text, weight) in enumerate(name):
            at = (0, top + 0.34 * ROW + LINE * i)
            _text(axes, cut_text(text, letters), at, axes.get_yaxis_transform(), weight=weight)
        axes.annotate(row.text if fits else "", (end, y), (6, 0), textcoords="offset points", va="center_baseline",
                      fontsize=NORMAL, color=LIGHT["ink"], annotation_clip=False)  # fmt: skip
    if low < 0:
        axes.axvline(0, color=LIGHT["soft"], linewidth=1)
    axes.set_yticks([])
    _ticks(axes.xaxis, unit, log=log)
    axes.set_xlabel(axis, fontsize=SMALL, color=LIGHT["soft"])
    axes.spines[:].set_visible(False)
    return figure


def _row(axes: Axes, row: BarRow, y: float) -> None:
    """Draw the pieces, the whisker and the tick of a row."""
    for begin, end, kind in row.pieces:
        name, _, pale = kind.partition(" ")
        style: dict[str, Any] = {"hatch": "////", "edgecolor": LIGHT["card"]} if name == "red" else {}
        style |= {"facecolor": LIGHT[name], "alpha": 0.4 if pale else None, "linewidth": 0}
        axes.barh(y, end - begin, 0.4 * ROW, left=begin, **style)
    if row.low is not None and row.high is not None:
        axes.hlines(y, row.low, row.high, color=LIGHT["ink"], linewidth=1.2)
        axes.vlines([row.low, row.high], y - 0.1 * ROW, y + 0.1 * ROW, color=LIGHT["ink"], linewidth=1.2)
    if row.predicted is not None:
        axes.vlines(row.predicted, y - 0.28 * ROW, y + 0.28 * ROW, color=LIGHT["ink"], linewidth=1.8)


def curves(
    series: Sequence[Series], *, title: str = "", axis: str = "", unit: str = "", height: int = 200, zero: bool = False,
    width: float = NARROW,
) -> Figure:  # fmt: skip
    """Draw lines over steps, with a legend if there are several; a curve's None is a gap.

    Args:
        title, axis: above and below the chart.
        unit: of the y axis.
        height: of the plot in points.
        zero: start the y axis at zero.
    """
    drawn = [s for s in series if any(y is not None for _, y in s.points)]
    names = len(series) if len(series) > 1 else 0
    columns, each = (2, 19) if width == WIDE else (1, 16.2)
    legend = 8 + each * math.ceil(names / columns) if names else 0
    bottom = (40 if axis else 24) + legend
    figure, axes = _figure(height, width=width, left=62 if unit else 54, bottom=bottom, title=title)
    handles = []
    for i, curve in enumerate(series):
        xs = [x for x, _ in curve.points]
        ys = [math.nan if y is None else y for _, y in curve.points]
        style: dict[str, Any] = {"color": LIGHT[f"s{i % SERIES}"], "linestyle": DASHES[i // SERIES % len(DASHES)]}
        (line,) = axes.plot(xs, ys, linewidth=1.7, **style)
        alone = [ys[j - 1 : j + 2 if j else 2] for j in range(len(ys))]
        marks = [j for j, near in enumerate(alone) if curve.dots or sum(map(math.isfinite, near)) == 1]
        marks = [j for j in marks if math.isfinite(ys[j])]
        axes.plot([xs[j] for j in marks], [ys[j] for j in marks], "o", markersize=4, color=style["color"])
        handles.append(line)
    if not drawn:
        axes.set_axis_off()
        _text(axes, "no figure", (0.02, 0.5), axes.transAxes)
    if zero:
        low, high = axes.dataLim.intervaly if drawn else (0.0, 1.0)
        axes.set_ylim(min(0.0, low), 1.06 * high or 1.0)
    _ticks(axes.yaxis)
    _ticks(axes.xaxis, integers=True)
    axes.set_xlabel(axis, fontsize=SMALL, color=LIGHT["soft"])
    axes.set_ylabel(unit, fontsize=SMALL, color=LIGHT["soft"])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(LIGHT["soft"])
    if names:
        box = figure.legend(
            handles, [str(i) for i in range(names)], loc="lower left", bbox_to_anchor=(SIDE / width, 0), ncols=columns,
            frameon=False, fontsize=SMALL, labelcolor=LIGHT["ink"], borderaxespad=0.2, handlelength=2.4,
        )  # fmt: skip
        for text, curve in zip(box.get_texts(), series):  # set names here: "_" and "$" are special above
            text.set(text=cut_text(curve.name, int((width / columns - 50) / LETTER)), parse_math=False)
    return figure


def histogram(
    edges: Sequence[int], layers: Sequence[tuple[str, Sequence[int]]], marks: Sequence[tuple[float, str]] = ()
) -> Figure:
    """Draw counts between edges as bars of equal width, in layers.

    Args:
        edges: (n + 1,) ascending.
        layers: (kind, (n,) counts) each, from back to front.
        marks: (value, text) of vertical lines; lines outside the edges are left out.
    """
    import numpy as np

    n = len(edges) - 1
    figure, axes = _figure(150, width=NARROW, left=54, bottom=28, top=20)
    for kind, counts in layers:
        full = np.flatnonzero(counts)
        axes.bar(full + 0.5, np.asarray(counts)[full], 0.92, color=LIGHT[kind], linewidth=0)
    for value, text in marks:
        if edges[0] <= value <= edges[-1]:
            at = float(np.interp(value, edges, range(n + 1)))
            axes.axvline(at, color=LIGHT["ink"], linewidth=1.8)
            side = {"ha": "left" if at < n / 2 else "right", "va": "bottom"}
            _text(axes, text, (at, 1.02), axes.get_xaxis_transform(), **side)
    axes.set_xlim(0, n)
    every = max(1, math.ceil(n * (LETTER * max(len(short(e)) for e in edges) + 10) / (NARROW - 54)))
    axes.set_xticks(range(0, n, every), labels=[short(e) for e in edges[:n:every]])
    axes.tick_params(axis="x", length=0, pad=8, labelsize=SMALL, labelcolor=LIGHT["soft"])
    _ticks(axes.yaxis, integers=True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(LIGHT["soft"])
    return figure


def _figure(
    height: float, *, width: float, left: float = SIDE, bottom: float, top: float = 8, title: str = ""
) -> tuple[Figure, Axes]:
    """Return a figure and its axes; all sizes are in points, so that no layout is solved."""
    from matplotlib.figure import Figure

    top += 22 if title else 0
    total = height + bottom + top
    figure = Figure(figsize=(width / 72, total / 72), facecolor="none")
    axes = figure.add_axes((left / width, bottom / total, 1 - (left + SIDE) / width, height / total), facecolor="none")
    axes.set_axisbelow(True)
    if title:
        figure.text(SIDE / width, 1 - 8 / total, cut_text(title, 90), va="top", fontsize=12, color=LIGHT["ink"])
    return figure, axes


def _text(axes: Axes, text: str, at: tuple[float, float], transform: Any, **style: Any) -> None:
    axes.text(*at, text, transform=transform, fontsize=NORMAL, color=LIGHT["ink"], **style)


def _ticks(axis: Any, unit: str = "", *, integers: bool = False, log: bool = False) -> None:
    """Place round ticks with grid lines; `whole` allows integers only."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    low, high = sorted(axis.get_view_interval())
    wide = log and high / low > 4
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)) if wide else MaxNLocator(5, integer=integers))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: short(value) + unit))
    axis.set_tick_params(length=0, labelsize=SMALL, labelcolor=LIGHT["soft"])
    axis.grid(True, color=LIGHT["grid"], linewidth=1)


def swatch(color: str) -> Markup:
    """Return a square of a color of LIGHT for a legend in HTML."""
    return Markup('<span class="swatch" style="background: var(--{})" aria-hidden="true"></span>').format(color)


# --- saving


def png(figure: Figure) -> bytes:
    """Return the figure as a PNG with a white background."""
    return _saved(figure, "png", dpi=150, facecolor="white", metadata={"Software": None})


def inline_svg(figure: Figure, title: str, description: str) -> Markup:
    """Return the figure as an `svg` element for a page.

    Lines and bars are stretched to the width of the page; letters and dots keep their size, and their position is a
    share of the width. It makes no requests, its colors are the page's variables, and `title` and `description` are its
    texts for screen readers. Ids depend only on the title: charts of one page must differ in it.
    """
    svg = _saved(figure, "svg", salt=title).decode()
    svg = re.sub(r"<metadata.*?</metadata>|<style.*?</style>|<!--.*?-->|\n *(?=<)", "", svg, flags=re.DOTALL)
    names, used = {color: name for name, color in LIGHT.items()}, set(re.findall(r"#([\w-]+)", svg))

    def plain(tag: re.Match[str]) -> str:
        """Return a tag without name spaces and unreferenced ids, which HTML does not need."""
        text = re.sub(r' xmlns[\w:]*="[^"]*"| id="([^"]*)"', lambda m: m[0] if m[1] in used else "", tag[0])
        text = re.sub(r"#[0-9a-f]{6}\b", lambda m: f"var(--{names[m[0]]})" if m[0] in names else m[0], text)
        if text.startswith(("<text", "<use")):
            text = re.sub(r"font-family: [^;]*; | transform=\"[^\"]*\"", "", text)
            text = re.sub(r"(?<=font-size: )[\d.]+", lambda m: f"{SHOWN * float(m[0]):.3g}", text)
            text = re.sub(r'(?<= x=")[^"]*', lambda m: f"{float(m[0]) / width:.2%}", text)
            text = re.sub(r'(?<= y=")[^"]*', lambda m: f"{SHOWN * float(m[0]):.1f}", text)
        return text.replace("xlink:", "")

    view, body = svg[svg.index(' viewBox="') :].split(">", 1)
    width, height = map(float, view.split('"')[1].split()[2:])
    body = re.sub("<[^>]*>", plain, body.strip())
    head = Markup("<title>{}</title><desc>{}</desc>").format(title, description)
    loose = r"<text.*?</text>|<use.*?/>"
    return Markup(
        f'<svg role="img" class="chart" height="{SHOWN * height:.0f}">{head}<svg viewBox="0 0 {width:g} {height:g}" '
        f'preserveAspectRatio="none">{re.sub(loose, "", body)}{"".join(re.findall(loose, body))}</svg>'
    )


def _saved(figure: Figure, kind: str, salt: str = "", **options: Any) -> bytes:
    """Return a figure as the bytes of a file of format `kind`; `salt` determines the ids in an SVG."""
    from matplotlib import rc_context
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)  # names of runs, models and files may contain dollar signs
    written = io.BytesIO()
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": salt or "optrush", "hatch.linewidth": 1.4,
                                   "font.family": ["DejaVu Sans"]}  # fmt: skip
    with rc_context(settings), warnings.catch_warnings():
        # The browser has fonts for letters that DejaVu lacks; in a PNG they become boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        warnings.filterwarnings("ignore", message="Matplotlib currently does not support .* natively")
        figure.savefig(written, format=kind, **options)
    return written.getvalue()
