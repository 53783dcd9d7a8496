"""Charts as inline SVG: no script, nothing to fetch, colours from the page's own variables (light, dark, paper).

Widths are percentages and letters have their size in pixels, so that a chart is as readable at 400 pixels as at 1600:
a `viewBox` would shrink the letters with the drawing. Names stand above their bars, where long ones fit; figures stand
right of them (left of curves), in room that the style sheet leaves beside a chart. A curve lies in an inner SVG of
1000 x 1000 units that is stretched, with strokes that are not.

What a colour says, a word or a hatching says too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from optrush.bench.figures import cut, short

ROW, BAR = 42, 14  # pixels: a row with its name, its bar
NAME = 40  # letters of a name that fit above a bar on a phone
TICK = 0.035  # of a phone's width: a letter of an axis' figures
POINTS = 600  # of a curve; more cannot be seen
LINES, DASHES = 7, 4  # kinds of strokes in the page's style sheet

Points = Sequence[tuple[float, float | None]]


@dataclass(frozen=True)
class Bar:
    """One row: what was measured, what was predicted, and words to the right. `kind` is a class of the style sheet."""

    name: str
    value: float | None
    text: str
    kind: str
    low: float | None = None
    high: float | None = None
    predicted: float | None = None


@dataclass(frozen=True)
class Span:
    """One row of a waterfall: from one figure to another."""

    name: str
    begin: float | None
    end: float | None
    text: str
    kind: str


@dataclass(frozen=True)
class Offset:
    """One row beside a zero line."""

    name: str
    value: float | None
    text: str
    kind: str


@dataclass(frozen=True)
class Series:
    """One curve; a y of None is a gap."""

    name: str
    points: Points
    dots: bool = False


def node(tag: str, *inside: object, **attributes: object) -> Markup:
    """One element. Everything that is not markup already is escaped; `class_` is class, other _ are -."""
    given = {k.rstrip("_").replace("_", "-"): _text(v) for k, v in attributes.items() if v is not None}
    head = Markup("").join(Markup(' {}="{}"').format(k, v) for k, v in given.items())
    held = Markup("").join(map(escape, inside))
    return Markup("<{}{}>{}</{}>").format(Markup(tag), head, held, Markup(tag))


def _text(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def _share(part: float) -> str:
    return f"{100 * part:.2f}%"


def picture(title: str, description: str, height: float, *inside: object, kind: str = "rows") -> Markup:
    heads = node("title", title), node("desc", description)
    return node("svg", *heads, *inside, role="img", class_=f"chart {kind}", width="100%", height=height)


def named(name: str, y: float) -> Markup:
    shown = cut(name, NAME)
    return node("text", *([node("title", name)] if shown != name else []), shown, class_="name halo", x=0, y=y + 13)


def _words(text: str, y: float, x: str = "100%") -> Markup:
    return node("text", text, class_="figure", x=x, dx=7, y=y + 19 + BAR - 3)


def figure(text: str, y: float, share: float) -> Markup:
    """Words to the right of a bar."""
    return _words(text, y, _share(share))


def segment(begin: float, end: float, y: float, kind: str) -> Markup:
    """A piece of a bar that is made of several, between two shares of the plot's width."""
    size = {"y": y + 19, "height": BAR, "x": _share(begin), "width": _share(end - begin)}
    return node("rect", class_=kind, **size)


def _block(begin: float, end: float, y: float, kind: str) -> Markup:
    """A bar between two shares of the plot's width, at least wide enough to be seen."""
    left, width = min(begin, end), abs(end - begin)
    size = {"y": y + 19, "height": BAR, "x": _share(left), "width": _share(max(width, 0.004))}
    drawn = node("rect", class_=f"bar {kind}", rx=1.5, **size)
    if kind in ("red", "failed"):
        drawn += node("rect", fill=f"url(#hatch-{kind})", **size)
    return drawn


def bars(title: str, description: str, rows: Sequence[Bar]) -> Markup:
    """Horizontal bars from zero, with whiskers from `low` to `high` and a thin tick at `predicted`."""
    most = max((x for r in rows for x in (r.value, r.high, r.predicted) if x is not None), default=1.0)
    inside = []
    for i, row in enumerate(rows):
        y = i * ROW
        drawn = []
        if row.value is None:
            drawn = [_block(0, 0.12, y, "failed"), _words(cut(row.text, 38), y, "12%")]
        else:
            drawn = [_block(0, row.value / most, y, row.kind)]
            if row.low is not None and row.high is not None:
                drawn.append(_whisker(max(0.0, row.low / most), row.high / most, y))
            if row.predicted is not None:
                at = _share(row.predicted / most)
                drawn.append(node("line", class_="predicted", x1=at, x2=at, y1=y + 16, y2=y + 22 + BAR))
            ends = [x for x in (row.value, row.high, row.predicted) if x is not None]
            drawn.append(_words(row.text, y, _share(max(ends) / most)))
        inside += [named(row.name, y), *drawn]
    return picture(title, description, len(rows) * ROW, *inside)


def _whisker(low: float, high: float, y: float) -> Markup:
    middle = y + 19 + BAR / 2
    ends = [(low, low, middle - 3, middle + 3), (high, high, middle - 3, middle + 3), (low, high, middle, middle)]
    return Markup("").join(
        node("line", class_="whisker", x1=_share(a), x2=_share(b), y1=top, y2=bottom) for a, b, top, bottom in ends
    )


def waterfall(title: str, description: str, rows: Sequence[Span]) -> Markup:
    """From one figure to the next on a logarithmic axis, where equal factors have equal lengths."""
    held = [x for r in rows for x in (r.begin, r.end) if x is not None and x > 0]
    low, high = (min(held), max(held)) if held else (1.0, 2.0)
    low, high = (low / 1.03, high * 1.03) if high / low < 1.5 else (low / 1.1, high * 1.05)
    span = math.log(high / low)

    def at(value: float) -> float:
        return math.log(value / low) / span

    top, height = 18, 18 + len(rows) * ROW
    inside = list(_grid([(at(t), short(t)) for t in _steps(low, high)], height))
    for i, row in enumerate(rows):
        y = top + i * ROW
        inside.append(named(row.name, y))
        if row.end is None:
            inside += [_block(0, 0.12, y, "failed"), _words(cut(row.text, 38), y, "12%")]
            continue
        begin = row.end if row.begin is None else row.begin
        inside += [_block(at(begin), at(row.end), y, row.kind), _words(row.text, y)]
    return picture(title, description, height, *inside)


def offsets(title: str, description: str, rows: Sequence[Offset], band: float | None = None) -> Markup:
    """Bars to the left and right of zero; `band` shades what lies within so many percent."""
    held = [r.value for r in rows if r.value is not None]
    low, high = min([0.0, *held]), max([0.0, *held])
    if band is not None:
        low, high = min(low, -band), max(high, band)
    room = 0.04 * (high - low) or 1.0
    low, high = low - room, high + room

    def at(value: float) -> float:
        return (value - low) / (high - low)

    top, height = 18, 18 + len(rows) * ROW
    inside = list(_grid([(at(t), short(t) + " %") for t in _nice(low, high, 4)], height))
    zero = _share(at(0))
    for i, row in enumerate(rows):
        y = top + i * ROW
        drawn = []
        if band is not None:
            size = {"x": _share(at(-band)), "width": _share(at(band) - at(-band)), "y": y + 17, "height": BAR + 4}
            drawn.append(node("rect", class_="band", **size))
        drawn.append(node("line", class_="zero", x1=zero, x2=zero, y1=y + 16, y2=y + 22 + BAR))
        if row.value is not None:
            drawn.append(_block(at(0), at(row.value), y, row.kind))
        inside += [*drawn, _words(row.text, y), named(row.name, y)]
    return picture(title, description, height, *inside)


def _grid(ticks: Sequence[tuple[float, str]], height: float) -> Iterator[Markup]:
    """Upright lines with their figures at the top; a figure that would touch the one before it is left out."""
    reached = -1.0
    for share, text in ticks:
        yield node("line", class_="grid", x1=_share(share), x2=_share(share), y1=16, y2=height)
        wide, anchor = len(text) * TICK, _anchor(share)
        begin = share - {"start": 0.0, "middle": wide / 2, "end": wide}[anchor]
        if begin > reached:
            reached = begin + wide + TICK
            yield node("text", text, class_="tick", x=_share(share), y=11, text_anchor=anchor)


def _anchor(share: float) -> str:
    """A figure under or over a tick does not reach over the chart's edge."""
    return "start" if share < 0.09 else "end" if share > 0.93 else "middle"


def groups(title: str, description: str, rows: Sequence[tuple[str, Sequence[Bar]]]) -> Markup:
    """A name with several thin bars under it, one a machine; a bar's own name is its letter."""
    most = max((b.value for _, row in rows for b in row if b.value is not None), default=1.0)
    y, inside = 0.0, []
    height = sum(26 + 17 * len(row) for _, row in rows)
    for name, row in rows:
        inside.append(named(name, y))
        for i, bar in enumerate(row):
            top = y + 19 + 17 * i
            share = 0.0 if bar.value is None else bar.value / most
            size = {"x": 0, "y": top, "width": _share(max(share, 0.004)), "height": BAR - 1}
            drawn = [] if bar.value is None else [node("rect", class_=f"bar {bar.kind}", rx=1.5, **size)]
            text = node("text", bar.text, class_="figure", x=_share(share), dx=7, y=top + 11)
            letter = node("text", bar.name, class_="figure", x=0, y=top + 11)
            inside += [letter, node("g", *drawn, text, transform="translate(18 0)")]
        y += 26 + 17 * len(row)
    return picture(title, description, height, *inside)


def curves(
    title: str,
    description: str,
    series: Sequence[Series],
    *,
    height: int = 230,
    write: Callable[[float], str] = short,
    zero: bool = False,
) -> Markup:
    """Lines over steps. `zero` lets the axis begin there."""
    drawn = [[(x, y) for x, y in s.points if y is not None] for s in series]
    held = [p for points in drawn for p in points]
    if not held:
        return picture(title, description, 40, node("text", "no figure", class_="tick", x=0, y=24), kind="curves")
    left, right = min(x for x, _ in held), max(x for x, _ in held)
    low, high = min(y for _, y in held), max(y for _, y in held)
    low = min(low, 0.0) if zero else low
    room = 0.06 * (high - low) or abs(high) * 0.01 or 1.0
    low, high = (low if zero and low == 0 else low - room), high + room
    width = (right - left) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        middle = 0.5 if right == left else (x - left) / width
        return 1000 * middle, 1000 * (high - y) / (high - low)

    plot, inside = height - 26, []
    for tick in _nice(low, high, 4):
        at = 8 + (plot - 8) * place(left, tick)[1] / 1000
        inside.append(node("line", class_="grid", x1="0%", x2="100%", y1=at, y2=at))
        inside.append(node("text", write(tick), class_="tick", x=0, dx=-6, y=at + 4, text_anchor="end"))
    lines = [p for i, s in enumerate(series) for p in _strokes(s, i, place)]
    box = {"viewBox": "0 0 1000 1000", "preserveAspectRatio": "none", "overflow": "visible"}
    inside.append(node("svg", *lines, x=0, y=8, width="100%", height=plot - 8, **box))
    for tick in _nice(left, right, 5, whole=True):
        share = place(tick, low)[0] / 1000
        under = {"x": _share(share), "y": height - 8, "text_anchor": _anchor(share)}
        inside.append(node("text", short(tick), class_="tick", **under))
    return picture(title, description, height, *inside, kind="curves")


def _strokes(series: Series, index: int, place: Callable[[float, float], tuple[float, float]]) -> Iterator[Markup]:
    """The curve's pieces between its gaps; a piece of one point is a dot."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for x, y in _thinned(series.points):
        if y is None:
            pieces.append([])
        else:
            pieces[-1].append(place(x, y))
    kind = _kind(index)
    for piece in filter(None, pieces):
        if len(piece) > 1:
            yield node("polyline", class_=f"line {kind}", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in piece))
        if len(piece) == 1 or series.dots:  # a line of no length with round ends stays round however it is stretched
            yield node("path", class_=f"dot {kind}", d="".join(f"M{x:.1f} {y:.1f}h0" for x, y in piece))


def _kind(index: int) -> str:
    return f"s{index % LINES} d{index // LINES % DASHES}"


def swatch(index: int) -> Markup:
    """A curve's stroke, for a legend."""
    stroke = node("line", class_=f"line {_kind(index)}", x1=0, x2=26, y1=6, y2=6)
    return node("svg", stroke, width=26, height=12, class_="swatch", aria_hidden="true")


def _thinned(points: Points) -> Points:
    """At most about POINTS points: of each stretch the lowest and the highest, so that no spike is lost."""
    if len(points) <= POINTS:
        return points
    size = math.ceil(2 * len(points) / POINTS)
    kept: list[tuple[float, float | None]] = []
    for begin in range(0, len(points), size):
        part = [(x, y) for x, y in points[begin : begin + size] if y is not None]
        if part:
            kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
        else:
            kept.append(points[begin])
    return kept


def _nice(low: float, high: float, count: int, *, whole: bool = False) -> list[float]:
    """Round figures between two, about `count` of them."""
    raw = (high - low) / max(count, 1)
    if raw <= 0:
        return [low]
    base = 10.0 ** math.floor(math.log10(raw))
    step = next(base * m for m in (1, 2, 2.5, 5, 10) if base * m >= raw * 0.999)
    if whole:
        step = max(1.0, float(round(step)))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]


def _steps(low: float, high: float) -> list[float]:
    """Ticks of a logarithmic axis: 1, 2, 5 of each decade, or round figures where it spans less."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for parts in ((1,), (1, 3), (1, 2, 5)):
        found = [m * 10.0**d for d in decades for m in parts if low <= m * 10.0**d <= high]
        if 3 <= len(found) <= 6:
            return found
    return _nice(low, high, 3)


def hatching() -> Markup:
    """What `url(#hatch-...)` names, once a page."""
    made = []
    for kind in ("red", "failed"):
        stripe = node("path", d="M0 7L7 0M-1 1L1 -1M6 8L8 6", class_=f"stripe {kind}")
        made.append(node("pattern", stripe, id=f"hatch-{kind}", width=7, height=7, patternUnits="userSpaceOnUse"))
    return node("svg", node("defs", *made), width=0, height=0, class_="defs", aria_hidden="true")
