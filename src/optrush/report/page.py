"""Render the pages of reports, and format the text and figures on them.

A record may come from another machine or an older version. A figure that is missing or no finite number becomes None
and is shown as a dash; control characters and halves of surrogate pairs are replaced before text reaches a page.
"""

from __future__ import annotations

import math
import unicodedata
from pathlib import Path
from typing import Any

# Colors of the style sheet, and of the charts.
LIGHT = {
    "page": "#fbfbfa", "card": "#ffffff", "ink": "#1b2430", "soft": "#566373", "rule": "#d9dee4", "grid": "#e6eaee",
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


def cut_text(text: str, width: int) -> str:
    """Return the beginning of a text that is wider than `width` letters; a wide character counts as two."""
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
    """Format seconds in ms: 1.2345 as 1,234.5 ms, less than 10 ms with three digits."""
    value = 1e3 * seconds
    return (f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3g}").replace("-", "−") + " ms"


def short(value: float) -> str:
    """Format the tick of an axis with as few digits as it needs."""
    if value and (abs(value) < 1e-3 or abs(value) >= 1e7):
        return f"{value:.2g}".replace("-", "−")
    return f"{value:,.6f}".rstrip("0").rstrip(".").replace("-", "−")


def amount(count: int, one: str, many: str = "") -> str:
    """Format a count with its noun: 1 rung, 2 rungs."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def render(template: str, **content: Any) -> str:
    """Return a page as text: one of the templates of this folder, everything on it escaped.

    The page's content security policy allows no script and no request.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "speed": speed, "gib": gib, "times": times, "percent": percent, "plain": plain_number, "cut": cut_text,
        "clean": safe_text,
        "milliseconds": milliseconds,
        "many": lambda n: f"{n:,.0f}",
        "share": lambda x: f"{x:.2%}",
        "signed": lambda value: percent(value, signed=True),
    }  # fmt: skip
    return environment.get_template(template).render(light=LIGHT, dark=DARK, **content)
