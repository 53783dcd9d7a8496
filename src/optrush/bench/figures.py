"""What the report says of a record: figures made safe, written out, and compared. No layout here, see report.py.

A record may come from another machine or from an older version: a figure that is missing, null or no number becomes
None and is shown as a dash, and no text reaches a page with characters that a page cannot hold.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
