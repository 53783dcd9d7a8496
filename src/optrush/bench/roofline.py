"""How near a rung comes to its device's ceiling: the step as measured, and what its parts would take at the ceiling.

Only the length of a step is measured. The parts are computed: the work that the plan counts for the rung, at the rates
that the device reaches with that kind of work alone (`optrush calibrate`) or, without them, at its datasheet's whole
rates. What is left of the step is work below its ceiling, work that the plan does not count, and gaps.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from optrush.bench import charts
from optrush.bench.figures import clean, numbers, percent, positive
from optrush.rates import PARTS

LEFT = "remainder"


@dataclass(frozen=True)
class Roof:
    """One rung: seconds of its step, and of each part at the ceiling."""

    name: str
    basis: str
    step_s: float
    parts: dict[str, float]

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
    name = clean(record.get("rung")) or "unnamed"
    return Roof(name, clean(record.get("basis")), statistics.median(held), parts)


def section(records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What the page lays out; None: no rung has a ceiling."""
    shown = roofs(records)
    if not shown:
        return None
    said = {"calibrated": "the rates that optrush calibrate measured", "datasheet": "the whole rates of a datasheet"}
    bases = dict.fromkeys(said.get(r.basis, "rates of an unknown kind") for r in shown)
    return {
        "basis": " and ".join(bases),
        "chart": _chart(shown),
        "legend": [(_swatch(part), part) for part in (*PARTS, LEFT)],
        "parts": (*PARTS, LEFT),
        "rows": shown,
        "above": [r.name for r in shown if r.left_s < 0],
    }


def _chart(shown: Sequence[Roof]) -> Markup:
    """A bar a rung, as long as its step: the parts from the left, then what is left."""
    most = max(1.0, *(r.total_s / r.step_s for r in shown))
    inside = []
    for i, roof in enumerate(shown):
        top, begin = i * charts.ROW, 0.0
        inside.append(charts.named(roof.name, top))
        for part in (*PARTS, LEFT):
            width = max(0.0, roof.share(part)) / 100 / most
            inside.append(charts.segment(begin, begin + width, top, _kind(part)))
            begin += width
        inside.append(charts.figure(f"{percent(roof.reached)}, {milliseconds(roof.step_s)}", top, begin))
    said = "; ".join(
        f"{r.name}: " + ", ".join(f"{part} {percent(r.share(part))}" for part in (*PARTS, LEFT)) for r in shown
    )
    title = "Parts of each rung's step at the ceiling, in percent of the measured step"
    return charts.picture(title, said, len(shown) * charts.ROW, *inside)


def milliseconds(seconds: float) -> str:
    """1.2345 -> 1,234.5 ms; what is shorter than one has three digits."""
    value = 1e3 * seconds
    return (f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3g}").replace("-", "−") + " ms"


def _kind(part: str) -> str:
    return "band" if part == LEFT else f"fill s{PARTS.index(part)}"


def _swatch(part: str) -> Markup:
    square = charts.node("rect", class_=_kind(part), width=12, height=12)
    return charts.node("svg", square, width=12, height=12, class_="swatch", aria_hidden="true")
