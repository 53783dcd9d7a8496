"""How near a rung comes to its device's ceiling: the step as measured, and what its parts would take at the ceiling.

The ceiling is computed: the work that the plan counts for the rung, at the rates that the device reaches with that kind
of work alone (`optrush calibrate`) or, without them, at its datasheet's whole rates. Where the rung was profiled
(parts.py) each part is held against it; else the whole step alone, and what is left of that is work below its ceiling,
work that the plan does not count, and gaps.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from optrush.bench import charts
from optrush.bench.figures import clean, number, numbers, percent, positive
from optrush.planner.cost import PARTS

LEFT, GAPS = "remainder", "gaps"  # gaps: the device had nothing to do
NEAR = 1.1  # times: profiled steps that took so much more or less than the timed ones do not speak for them


@dataclass(frozen=True)
class Roof:
    """One rung: seconds of its step, and of each part at the ceiling and, where it was profiled, as it took."""

    name: str
    basis: str
    step_s: float
    parts: dict[str, float]
    took: dict[str, float] | None = None  # gaps among them
    note: str = ""  # why it was not profiled

    @property
    def total_s(self) -> float:
        return sum(self.parts.values())

    @property
    def left_s(self) -> float:
        """Negative where the step is faster than what is called its ceiling."""
        return self.step_s - self.total_s

    @property
    def reached(self) -> float:
        """Percent of the ceiling."""
        return 100 * self.total_s / self.step_s

    def share(self, part: str) -> float:
        """Percent of the measured step that a part would take at the ceiling."""
        return 100 * (self.left_s if part == LEFT else self.parts[part]) / self.step_s

    @property
    def profiled_s(self) -> float:
        """Of a step under the profiler."""
        return sum((self.took or {}).values())

    def taken(self, part: str) -> float:
        """Percent of the profiled step."""
        return 100 * (self.took or {})[part] / self.profiled_s

    @property
    def apart(self) -> float | None:
        """How many times a timed step a profiled one took, where that is too much or too little; None: it is not."""
        times = self.profiled_s / self.step_s
        return times if self.took and not 1 / NEAR <= times <= NEAR else None

    @property
    def scored(self) -> bool:
        """Attention had no kernel: its whole scores were products and elementwise operators like any other."""
        return self.took is not None and self.took["attention"] == 0 < self.parts["attention"]

    def part_reached(self, part: str) -> float | None:
        """Percent of its ceiling that a part comes to; None: that cannot be said."""
        took, least = (self.took or {}).get(part), self.parts.get(part)
        mixed = self.scored and part in ("products", "attention", "elementwise")
        return 100 * least / took if took and least and not mixed and self.apart is None else None


def roofs(records: Sequence[Mapping[str, Any]]) -> list[Roof]:
    """Of every rung that has both, the later record of a rung that was measured twice; other systems have no plan."""
    latest = {tuple(clean(r.get(k)) for k in ("case", "device", "mode", "rung", "peer")): r for r in records}
    return [roof for record in latest.values() if (roof := _roof(record)) is not None]


def _roof(record: Mapping[str, Any]) -> Roof | None:
    given, repeats = record.get("ceiling_s"), record.get("step_s")
    steps = [s for own in repeats if isinstance(own, list) for s in numbers(own)] if isinstance(repeats, list) else []
    held = [s for s in map(positive, steps) if s is not None]
    if record.get("error") or not held or not isinstance(given, Mapping):
        return None
    parts = {part: positive(given.get(part)) or 0.0 for part in PARTS}
    if not any(parts.values()):
        return None
    seen = record.get("parts_s")
    read = {part: number(seen.get(part)) for part in (*PARTS, GAPS)} if isinstance(seen, Mapping) else {}
    took = {part: s for part, s in read.items() if s is not None and s >= 0}
    name = clean(record.get("rung")) or "unnamed"
    step_s, note = statistics.median(held), clean(record.get("parts_note"))
    whole = len(took) == len(PARTS) + 1 and any(took.values())
    return Roof(name, clean(record.get("basis")), step_s, parts, took if whole else None, note)


def section(records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What the page lays out; None: no rung has a ceiling."""
    shown = roofs(records)
    if not shown:
        return None
    said = {"calibrated": "the rates that optrush calibrate measured", "datasheet": "the whole rates of a datasheet"}
    bases = dict.fromkeys(said.get(r.basis, "rates of an unknown kind") for r in shown)
    profiled = any(r.took for r in shown)
    parts = (*PARTS, GAPS if profiled else LEFT)
    return {
        "basis": " and ".join(bases),
        "profiled": profiled,
        "chart": _profiled([r for r in shown if r.took]) if profiled else _chart(shown),
        "legend": [(_swatch(part), part) for part in parts],
        "parts": parts,
        "rows": shown,
        "notes": [f"{r.name}: {r.note}" for r in shown if r.note],
        "apart": [f"{r.name} ({r.apart:.2f} times)" for r in shown if r.apart is not None],
        "scored": [r.name for r in shown if r.scored],
        "above": [r.name for r in shown if r.left_s < 0],
    }


def _chart(shown: Sequence[Roof]) -> Markup:
    """A bar a rung, as long as its step: the parts from the left, then what is left."""
    most = max(1.0, *(r.total_s / r.step_s for r in shown))
    inside: list[Markup] = []
    for i, roof in enumerate(shown):
        pieces = [(max(0.0, roof.share(part)) / 100, _kind(part)) for part in (*PARTS, LEFT)]
        inside += _row(i, roof, pieces, most)
    said = "; ".join(
        f"{r.name}: " + ", ".join(f"{part} {percent(r.share(part))}" for part in (*PARTS, LEFT)) for r in shown
    )
    title = "Parts of each rung's step at the ceiling, in percent of the measured step"
    return charts.picture(title, said, len(shown) * charts.ROW, *inside)


def _profiled(shown: Sequence[Roof]) -> Markup:
    """A bar a rung: each part as it took, pale what of it goes beyond a known ceiling; then the gaps."""
    inside: list[Markup] = []
    for i, roof in enumerate(shown):
        pieces = []
        for part in PARTS:
            reached = roof.part_reached(part)
            width, reached = roof.taken(part) / 100, 1.0 if reached is None else min(100.0, reached) / 100
            pieces += [(width * reached, _kind(part)), (width * (1 - reached), f"{_kind(part)} pale")]
        inside += _row(i, roof, [*pieces, (roof.taken(GAPS) / 100, _kind(GAPS))], 1.0)
    said = "; ".join(
        f"{r.name}: " + ", ".join(f"{part} {percent(r.taken(part))}" for part in (*PARTS, GAPS)) for r in shown
    )
    title = "Parts of each rung's step as they took, in percent of the profiled step"
    return charts.picture(title, said, len(shown) * charts.ROW, *inside)


def _row(i: int, roof: Roof, pieces: Sequence[tuple[float, str]], most: float) -> Iterator[Markup]:
    """A rung's name, its pieces side by side, each a share of the longest bar, and how it fares."""
    top, begin = i * charts.ROW, 0.0
    yield charts.named(roof.name, top)
    for width, kind in pieces:
        yield charts.segment(begin, begin + width / most, top, kind)
        begin += width / most
    yield charts.figure(f"{percent(roof.reached)}, {milliseconds(roof.step_s)}", top, begin)


def milliseconds(seconds: float) -> str:
    """1.2345 -> 1,234.5 ms; what is shorter than one has three digits."""
    value = 1e3 * seconds
    return (f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3g}").replace("-", "−") + " ms"


def _kind(part: str) -> str:
    return "band" if part in (LEFT, GAPS) else f"fill s{PARTS.index(part)}"


def _swatch(part: str) -> Markup:
    square = charts.node("rect", class_=_kind(part), width=12, height=12)
    return charts.node("svg", square, width=12, height=12, class_="swatch", aria_hidden="true")
