"""Charts as inline SVG: no script, nothing to fetch, colours from the page's own variables (light, dark, paper).

Widths are percentages and letters have their size in pixels, so that a chart is as readable at 400 pixels as at 1600:
a `viewBox` would shrink the letters with the drawing. Names stand above their bars, where long ones fit; figures stand
right of them (left of curves), in room that the style sheet leaves beside a chart. A curve lies in an inner SVG of
1000 x 1000 units that is stretched, with strokes that are not.

What a colour says, a word or a hatching says too.
"""

from __future__ import annotations

import dataclasses
import io
import math
import statistics
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

# --- What the report says of a record: figures made safe, written out, and compared. No layout here, see report.py.
#
# A record may come from another machine or from an older version: a figure that is missing, null or no number becomes
# None and is shown as a dash, and no text reaches a page with characters that a page cannot hold.


DASH = "–"


def clean(value: object, *, lines: bool = False) -> str:
    """Any value as text: no control characters, no half of a surrogate pair, one line unless `lines`."""
    if value is None:
        return ""
    kept = "\n\t" if lines else ""
    blank = str(value) if lines else " ".join(str(value).split())
    return "".join(c if c.isprintable() or c in kept else "\ufffd" for c in blank)


def cut(text: str, width: int) -> str:
    """The text's beginning, where it is wider than `width` letters; a wide character counts as two."""
    used = 0
    for i, letter in enumerate(text):
        used += 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        if used > width:
            return text[: max(0, i - 1)].rstrip() + "…"
    return text


def number(value: object) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def positive(value: object) -> float | None:
    found = number(value)
    return found if found is not None and found > 0 else None


def numbers(value: object) -> list[float | None]:
    return [number(v) for v in value] if isinstance(value, list | tuple) else []


def ratio(new: float | None, old: float | None) -> float | None:
    return new / old if new is not None and old else None


def off(predicted: float | None, measured: float | None) -> float | None:
    """By how many percent of the measured figure the prediction is off."""
    found = ratio(predicted, measured)
    return None if found is None else 100 * (found - 1)


# --- figures for people


def plain(value: float | None, digits: int = 0) -> str:
    return DASH if value is None else f"{value:,.{digits}f}"


def speed(value: float | None) -> str:
    return plain(value, 0 if value is None or value >= 100 else 1 if value >= 10 else 2)


def gib(count: float | None) -> str:
    """Bytes in GiB, without the unit."""
    if count is None:
        return DASH
    return plain(count / 2**30, 1 if count >= 10 * 2**30 else 2)


def times(value: float | None) -> str:
    return DASH if value is None else f"×{value:.1f}" if value >= 10 else f"×{value:.2f}"


def percent(value: float | None, *, signed: bool = False) -> str:
    return DASH if value is None else (f"{value:+,.1f} %" if signed else f"{value:,.1f} %").replace("-", "−")


def short(value: float) -> str:
    """A tick of an axis: as few digits as tell it apart."""
    if value and (abs(value) < 1e-3 or abs(value) >= 1e7):
        return f"{value:.2g}".replace("-", "−")
    return f"{value:,.6f}".rstrip("0").rstrip(".").replace("-", "−")


def amount(count: int, one: str, many: str = "") -> str:
    """1 rung, 2 rungs."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


# --- rungs


@dataclass(frozen=True)
class Rung:
    """A record as it is shown. `key` is its name, with the other system's where it is another system's."""

    key: str
    name: str
    peer: str
    mode: str
    since: str
    changes: str
    speed: float | None
    low: float | None
    high: float | None
    peak: float | None
    memory_kind: str
    predicted_peak: float | None
    predicted_speed: float | None
    basis: str
    mfu: float | None
    targets: float | None
    fill: float | None
    waits: float | None
    losses: tuple[float | None, ...]
    proof: str
    verdict: str
    red: tuple[str, ...]
    error: str
    factor: float | None = None  # tokens/s, times the rung it is compared with
    peak_factor: float | None = None
    since_speed: float | None = None
    case: str = ""
    longest: float | None = None  # tokens of the longest row that trained
    open: bool = False  # no longer one was tried: the search ended there

    @property
    def failed(self) -> bool:
        return bool(self.error)

    @property
    def kind(self) -> str:
        """How it is drawn: failed, peer, red, noise, faster, slower, smaller, base."""
        if self.failed:
            return "failed"
        if self.peer:
            return "peer"
        if self.red or self.verdict == "red":
            return "red"
        return self.verdict if self.verdict in ("faster", "slower", "smaller", "noise") else "base"

    @property
    def word(self) -> str:
        """The verdict as a word of its own, for nobody sees it by the colour alone."""
        return {"base": self.verdict or "baseline", "peer": "other system"}.get(self.kind, self.kind)

    @property
    def length(self) -> str:
        return DASH if self.longest is None else f"{plain(self.longest)}{' or more' * self.open}"

    @property
    def first_words(self) -> str:
        return self.error.strip().splitlines()[0] if self.error.strip() else ""

    @property
    def quartiles(self) -> str:
        return DASH if self.low is None or self.high is None else f"{speed(self.low)} to {speed(self.high)}"

    @property
    def peak_off(self) -> float | None:
        return off(self.predicted_peak, self.peak)

    @property
    def speed_off(self) -> float | None:
        return off(self.predicted_speed, self.speed)


def rungs(records: Sequence[Mapping[str, Any]]) -> tuple[list[Rung], int]:
    """The records as they are shown, each compared with the rung it names; and how many a later one replaced."""
    latest: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for record in records:  # measured again: the later record counts, in the place of the first
        latest[tuple(clean(record.get(k)) for k in ("case", "device", "mode", "rung", "peer"))] = record
    made = {place: _rung(record) for place, record in latest.items()}
    # A rung may name a case of its own, and still be compared with one of another.
    elsewhere = {(p[1], r.name): r for p, r in made.items() if r.mode == "cumulative" and not r.peer}
    shown = []
    for place, rung in made.items():
        base = made.get((*place[:2], "cumulative", rung.since, "")) or elsewhere.get((place[1], rung.since))
        if base is not None and base is not rung:
            rung = dataclasses.replace(
                rung,
                factor=ratio(rung.speed, base.speed),
                peak_factor=ratio(rung.peak, base.peak),
                since_speed=base.speed,
            )
        shown.append(rung)
    return shown, len(records) - len(latest)


def _rung(record: Mapping[str, Any]) -> Rung:
    get = record.get
    tries = get("tries")
    quartiles = numbers(get("tokens_per_s_iqr"))
    low, high = quartiles if len(quartiles) == 2 else (None, None)
    name, peer = clean(get("rung")) or "unnamed", clean(get("peer"))
    error = clean(get("error"), lines=True)
    found = positive(get("tokens_per_s")) if not error else None  # a rung that failed has no figure to compare
    reasons = get("red")
    return Rung(
        key=f"{name} ({peer})" if peer else name,
        name=name,
        peer=peer,
        mode=clean(get("mode")) or "cumulative",
        since=clean(get("since")),
        changes=clean(get("changes")),
        speed=found,
        low=low,
        high=high,
        peak=positive(get("peak_bytes")) if found is not None else None,
        memory_kind=clean(get("memory_kind")),
        predicted_peak=positive(get("predicted_peak_bytes")),
        predicted_speed=positive(get("predicted_tokens_per_s")),
        basis=clean(get("basis")),
        mfu=number(get("mfu")),
        targets=positive(get("targets_per_s")),
        fill=number(get("fill")),
        waits=number(get("data_wait")),
        losses=tuple(numbers(get("losses"))),
        proof=_proof(get("proof")),
        verdict=clean(get("verdict")),
        red=tuple(clean(r) for r in reasons) if isinstance(reasons, list | tuple) else (),
        case=clean(get("case")),
        longest=positive(get("longest_seq")),
        open=not any(isinstance(t, Mapping) and t.get("error") for t in tries) if isinstance(tries, list) else False,
        error=error or ("" if found is not None else "no figure, and no reason given"),
    )


def _proof(proof: object) -> str:
    if not isinstance(proof, Mapping):
        return DASH
    numerics = clean(proof.get("numerics")).lower().replace("_", " ") or "numerics not declared"
    worst, allowed = number(proof.get("worst")), number(proof.get("tolerance"))
    held = "holds" if proof.get("ok") is True else "BROKEN"
    where = f" ({clean(proof.get('of'))})" if proof.get("of") else ""
    limit = "" if allowed is None else f", allowed {allowed:.2g}"
    figures = "" if worst is None else f"; largest difference {worst:.2g}{where}{limit}"
    cosine = number(proof.get("cosine"))
    angle = "" if cosine is None else f"; 1 − cosine of the first gradients {max(0.0, 1 - cosine):.2g}"
    return f"{held}: {numerics}, against “{clean(proof.get('against'))}”{figures}{angle}"


# --- said in words


def verdict(shown: Sequence[Rung]) -> str:
    """The whole ladder in one paragraph: from, to, how often, and what was not right."""
    own = [r for r in shown if not r.peer]
    climbed = [r for r in own if r.mode == "cumulative" and not r.failed]
    counts = [
        amount(len([r for r in own if r.mode == "cumulative"]), "rung"),
        f"{sum(_is_red(r) and not r.failed for r in own)} red",
    ]
    counts += [f"{n} failed" for n in (sum(r.failed for r in own),) if n]
    counts += [f"{n} within the noise" for n in (sum(r.kind == "noise" for r in own),) if n]
    counts += [f"{n} measured without one technique" for n in (sum(r.mode != "cumulative" for r in own),) if n]
    tally = ", ".join(counts)
    if not climbed:
        return f"No rung of the ladder has a figure; {tally}."
    first, last = climbed[0], climbed[-1]
    if first is last:
        return f"{speed(first.speed)} tokens/s, peak {gib(first.peak)} GiB ({first.name}); {tally}."
    if first.longest is not None and last.longest is not None:
        rows = f"From rows of {first.length} to {last.length} tokens"
        return f"{rows}, peak {gib(first.peak)} → {gib(last.peak)} GiB; {tally}."
    text = (
        f"From {speed(first.speed)} to {speed(last.speed)} tokens/s: {times(ratio(last.speed, first.speed))}, "
        f"peak {gib(first.peak)} → {gib(last.peak)} GiB; {tally}."
    )
    best = max(climbed, key=lambda r: r.speed or 0)
    if best is not last:
        text += f" The fastest rung is “{best.name}” with {speed(best.speed)} tokens/s."
    return text


def _is_red(rung: Rung) -> bool:
    return bool(rung.red) or rung.verdict == "red"


def troubled(shown: Iterable[Rung]) -> list[Rung]:
    """Red rungs, then failed ones."""
    return sorted((r for r in shown if _is_red(r) or r.failed), key=lambda r: not _is_red(r))


def errors_said(shown: Sequence[Rung]) -> str:
    """How far the predictions were off, in the median and at worst."""
    said = []
    for what, value in (("Peak memory", "peak_off"), ("Speed", "speed_off")):
        found = [(abs(e), r.key) for r in shown if (e := getattr(r, value)) is not None]
        if not found:
            said.append(f"{what}: no prediction to compare.")
            continue
        worst, where = max(found)
        middle = statistics.median(e for e, _ in found)
        said.append(
            f"{what} was predicted to within {percent(middle)} in the median and {percent(worst)} at worst "
            f"({where}), over {amount(len(found), 'rung')}."
        )
    bases = sorted({r.basis for r in shown if r.basis})
    return " ".join(said) + (f" Rates: {', '.join(bases)}." if bases else "")


def losses_said(shown: Sequence[Rung]) -> str:
    """The largest difference between any two rungs at one proof step."""
    widest: tuple[float, int, str, str] | None = None
    steps = max((len(r.losses) for r in shown), default=0)
    for step in range(steps):
        here = [(x, r.key) for r in shown if step < len(r.losses) and (x := r.losses[step]) is not None]
        if len(here) > 1:
            (low, under), (high, over) = min(here), max(here)
            if widest is None or high - low > widest[0]:
                widest = (high - low, step + 1, over, under)
    gaps = sum(x is None for r in shown for x in r.losses)
    lost = f" {amount(gaps, 'loss was', 'losses were')} not finite." if gaps else ""
    if widest is None:
        return "There are no two curves to compare." + lost
    if widest[0] == 0:
        return f"All curves are equal to the last digit over {amount(steps, 'step')}." + lost
    return (
        f"Over {amount(steps, 'proof step')} the losses of two rungs differ by at most {widest[0]:.2g} nats, "
        f"at step {widest[1]}, between “{widest[2]}” and “{widest[3]}”." + lost
    )


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


# --- The two charts of a ladder as PNG files, for a README or a message: tokens/s a rung, peak memory a rung.


# Okabe and Ito's colours, which people who see few colours can tell apart; hatching and words say the same.
COLOURS = {
    "base": "#5b6b7b", "faster": "#0072b2", "smaller": "#009e73", "slower": "#e69f00", "noise": "#9aa5b1",
    "red": "#d55e00", "failed": "#d55e00", "peer": "#c8b8d8",
}  # fmt: skip
INK, PALE, GIB = "#1f2933", "#d5dae0", 2**30


@dataclass(frozen=True)
class _Row:
    name: str
    kind: str
    value: float | None
    text: str
    predicted: float | None
    low: float | None = None
    high: float | None = None


def tokens(title: str, rungs: Sequence[Rung]) -> bytes:
    """A PNG of tokens/s a rung: median, quartiles, gain, prediction."""
    rows = []
    for r in rungs:
        gain = "" if r.factor is None else f"  {times(r.factor)}"
        note = f"  {r.kind}" if r.kind in ("noise", "red", "slower", "smaller") else ""
        text = cut(r.first_words, 60) if r.failed else f"{speed(r.speed)}{gain}{note}"
        rows.append(_Row(r.key, r.kind, r.speed, text, r.predicted_speed, r.low, r.high))
    return _draw(f"{title}: tokens/s", "tokens/s: median, quartiles; |: predicted", rows)


def memory(title: str, rungs: Sequence[Rung]) -> bytes:
    """A PNG of the peak memory of each rung in GiB, with its prediction."""
    rows = []
    for r in rungs:
        text = cut(r.first_words, 60) if r.failed else f"{gib(r.peak)} GiB"
        predicted = None if r.predicted_peak is None else r.predicted_peak / GIB
        kind = r.kind if r.kind in ("red", "peer", "failed") else "base"  # the other verdicts are of the speed
        rows.append(_Row(r.key, kind, None if r.peak is None else r.peak / GIB, text, predicted))
    return _draw(f"{title}: peak memory", "peak GiB; |: predicted", rows)


def _draw(title: str, axis: str, rows: Sequence[_Row]) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 1.3 + 0.42 * len(rows)), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    most = max((x for r in rows for x in (r.value, r.high, r.predicted) if x is not None), default=1.0)
    for i, row in enumerate(rows):
        colour = COLOURS[row.kind]
        failed = row.value is None
        axes.barh(
            i, 0.06 * most if row.value is None else row.value, 0.62, color="white" if failed else colour,
            edgecolor=colour if failed else "white" if row.kind == "red" else "none", linewidth=1,
            hatch="////" if failed or row.kind == "red" else None, alpha=1 if failed else 0.92,
        )  # fmt: skip
        if row.low is not None and row.high is not None:
            axes.plot([row.low, row.high], [i, i], color=INK, linewidth=1.2, marker="|", markersize=5)
        if row.predicted is not None:
            axes.plot([row.predicted] * 2, [i - 0.42, i + 0.42], color=INK, linewidth=1.4)
        end = max((x for x in (row.value, row.high, row.predicted) if x is not None), default=0.0)
        end = 0.06 * most if failed else end
        axes.annotate(
            row.text, (end, i), (6, 0), textcoords="offset points", va="center", fontsize=9, color=INK,
            parse_math=False,
        )  # fmt: skip
    axes.set_yticks(range(len(rows)), labels=[cut(r.name, 44) for r in rows], fontsize=9, parse_math=False)
    axes.invert_yaxis()
    axes.set_xlim(0, most * 1.3)
    axes.set_xlabel(axis, fontsize=9, color=INK)
    axes.set_title(cut(title, 90), fontsize=11, loc="left", color=INK, parse_math=False)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8, colors=INK)
    axes.grid(axis="x", color=PALE, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    written = io.BytesIO()
    with warnings.catch_warnings():
        # A name may hold letters that the font has not: they become boxes here, and stand whole on the page.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(written, format="png")
    return written.getvalue()
