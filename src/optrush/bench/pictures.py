"""The two charts of a ladder as PNG files, for a README or a message: tokens/s a rung, peak memory a rung."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from optrush.bench.figures import Rung, cut, gib, speed, times

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
