"""Read a ladder's records as rungs: safe figures, comparisons between rungs, and the sentences of a page.

A record may come from another machine or an older version; figures that are missing or no numbers become None.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optrush.report.page import (
    DASH,
    amount,
    gib,
    number,
    numbers,
    percent,
    plain_number,
    positive,
    ratio,
    relative_error,
    safe_text,
    speed,
    times,
)


@dataclass(frozen=True)
class RungResult:
    """One record of a ladder.

    Attributes:
        key: the name, with the system's name if another system was measured.
        factor, peak_factor: tokens/s and peak, as multiples of the rung compared with.
        longest: tokens of the longest row that trained; `open` if no longer one was tried.
    """

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
    factor: float | None = None
    peak_factor: float | None = None
    since_speed: float | None = None
    case: str = ""
    longest: float | None = None
    open: bool = False

    @property
    def failed(self) -> bool:
        return bool(self.error)

    @property
    def kind(self) -> str:
        """Return the color's name: failed, peer, red, noise, faster, slower, smaller or base."""
        if self.failed:
            return "failed"
        if self.peer:
            return "peer"
        if self.red or self.verdict == "red":
            return "red"
        return self.verdict if self.verdict in ("faster", "slower", "smaller", "noise") else "base"

    @property
    def word(self) -> str:
        """Return the verdict as a word; the color alone must not carry it."""
        return {"base": self.verdict or "baseline", "peer": "other system"}.get(self.kind, self.kind)

    @property
    def length(self) -> str:
        return DASH if self.longest is None else f"{plain_number(self.longest)}{' or more' * self.open}"

    @property
    def first_words(self) -> str:
        return self.error.strip().splitlines()[0] if self.error.strip() else ""

    @property
    def quartiles(self) -> str:
        return DASH if self.low is None or self.high is None else f"{speed(self.low)} to {speed(self.high)}"

    @property
    def peak_off(self) -> float | None:
        return relative_error(self.predicted_peak, self.peak)

    @property
    def speed_off(self) -> float | None:
        return relative_error(self.predicted_speed, self.speed)


def read_rungs(records: Sequence[Mapping[str, Any]]) -> tuple[list[RungResult], int]:
    """Return the rungs, each compared with the one it names, and how many records a later one of that rung replaced."""
    latest: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for record in records:  # measured again: the later record counts, in the place of the first
        latest[tuple(safe_text(record.get(k)) for k in ("case", "device", "mode", "rung", "peer"))] = record
    found = {place: _rung(record) for place, record in latest.items()}
    # A rung may name a case of its own, and still be compared with a rung of another case.
    elsewhere = {(p[1], r.name): r for p, r in found.items() if r.mode == "cumulative" and not r.peer}
    compared = []
    for place, rung in found.items():
        base = found.get((*place[:2], "cumulative", rung.since, "")) or elsewhere.get((place[1], rung.since))
        if base is not None and base is not rung:
            rung = dataclasses.replace(
                rung,
                factor=ratio(rung.speed, base.speed),
                peak_factor=ratio(rung.peak, base.peak),
                since_speed=base.speed,
            )
        compared.append(rung)
    return compared, len(records) - len(latest)


def _rung(record: Mapping[str, Any]) -> RungResult:
    get = record.get
    tries = get("tries")
    quartiles = numbers(get("tokens_per_s_iqr"))
    low, high = quartiles if len(quartiles) == 2 else (None, None)
    name, peer = safe_text(get("rung")) or "unnamed", safe_text(get("peer"))
    error = safe_text(get("error"), lines=True)
    measured = positive(get("tokens_per_s")) if not error else None  # a failed rung has no figure to compare
    reasons = get("red")
    return RungResult(
        key=f"{name} ({peer})" if peer else name,
        name=name,
        peer=peer,
        mode=safe_text(get("mode")) or "cumulative",
        since=safe_text(get("since")),
        changes=safe_text(get("changes")),
        speed=measured,
        low=low,
        high=high,
        peak=positive(get("peak_bytes")) if measured is not None else None,
        memory_kind=safe_text(get("memory_kind")),
        predicted_peak=positive(get("predicted_peak_bytes")),
        predicted_speed=positive(get("predicted_tokens_per_s")),
        basis=safe_text(get("basis")),
        mfu=number(get("mfu")),
        targets=positive(get("targets_per_s")),
        fill=number(get("fill")),
        waits=number(get("data_wait")),
        losses=tuple(numbers(get("losses"))),
        proof=_proof(get("proof")),
        verdict=safe_text(get("verdict")),
        red=tuple(safe_text(r) for r in reasons) if isinstance(reasons, list | tuple) else (),
        case=safe_text(get("case")),
        longest=positive(get("longest_seq")),
        open=not any(isinstance(t, Mapping) and t.get("error") for t in tries) if isinstance(tries, list) else False,
        error=error or ("" if measured is not None else "no figure, and no reason given"),
    )


def _proof(proof: object) -> str:
    if not isinstance(proof, Mapping):
        return DASH
    numerics = safe_text(proof.get("numerics")).lower().replace("_", " ") or "numerics not declared"
    worst, allowed = number(proof.get("worst")), number(proof.get("tolerance"))
    state = "holds" if proof.get("ok") is True else "BROKEN"
    where = f" ({safe_text(proof.get('of'))})" if proof.get("of") else ""
    limit = "" if allowed is None else f", allowed {allowed:.2g}"
    figures = "" if worst is None else f"; largest difference {worst:.2g}{where}{limit}"
    cosine = number(proof.get("cosine"))
    angle = "" if cosine is None else f"; 1 − cosine of the first gradients {max(0.0, 1 - cosine):.2g}"
    return f"{state}: {numerics}, against “{safe_text(proof.get('against'))}”{figures}{angle}"


# --- sentences


def ladder_summary(shown: Sequence[RungResult]) -> str:
    """Return the ladder in one paragraph: first and last figures, counts of rungs, red and failed ones."""
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


def _is_red(rung: RungResult) -> bool:
    return bool(rung.red) or rung.verdict == "red"


def troubled(shown: Iterable[RungResult]) -> list[RungResult]:
    """Return red rungs, then failed ones."""
    return sorted((r for r in shown if _is_red(r) or r.failed), key=lambda r: not _is_red(r))


def prediction_summary(shown: Sequence[RungResult]) -> str:
    """Return the errors of the predictions in words, in the median and at worst."""
    sentences = []
    for what, value in (("Peak memory", "peak_off"), ("Speed", "speed_off")):
        errors = [(abs(e), r.key) for r in shown if (e := getattr(r, value)) is not None]
        if not errors:
            sentences.append(f"{what}: no prediction to compare.")
            continue
        worst, where = max(errors)
        middle = statistics.median(e for e, _ in errors)
        sentences.append(
            f"{what} was predicted to within {percent(middle)} in the median and {percent(worst)} at worst "
            f"({where}), over {amount(len(errors), 'rung')}."
        )
    bases = sorted({r.basis for r in shown if r.basis})
    return " ".join(sentences) + (f" Rates: {', '.join(bases)}." if bases else "")


def loss_summary(shown: Sequence[RungResult]) -> str:
    """Return the largest difference between any two rungs at one proof step in words."""
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


# --- comparison with other systems


@dataclass(frozen=True)
class Versus:
    """Another system's rung and ours, measured in turn on the same load; ratios above 1 are in our favour."""

    case: str
    ours: RungResult
    theirs: RungResult

    @property
    def faster(self) -> float | None:
        """Return our tokens/s over theirs."""
        return ratio(self.ours.speed, self.theirs.speed)

    @property
    def learns_faster(self) -> float | None:
        """Return our target tokens/s over theirs, the figure that counts if rows hold padding or masked tokens."""
        return ratio(self.ours.targets, self.theirs.targets)

    @property
    def smaller(self) -> float | None:
        """Return their peak over ours."""
        return ratio(self.theirs.peak, self.ours.peak)


def versus(shown: Sequence[RungResult]) -> list[Versus]:
    """Return each rung of another system that has figures, with the rung of ours that it names."""
    ours = {r.name: r for r in shown if not r.peer and r.mode == "cumulative"}
    pairs = [(r, ours.get(r.since)) for r in shown if r.peer and not r.failed]
    return [Versus(r.case, own, r) for r, own in pairs if own is not None and not own.failed]


def versus_summary(pairs: Sequence[Versus]) -> str:
    """Return the least ratio of each case in a sentence."""
    least: dict[str, Versus] = {}
    for pair in pairs:
        if pair.faster is None or pair.theirs.red or pair.ours.red:
            continue  # not the same work, or work that is wrong
        if pair.case not in least or pair.faster < (least[pair.case].faster or 0):
            least[pair.case] = pair
    ratios = [f"{case}: ×{pair.faster:.2f} the tokens/s of “{pair.theirs.name}”" for case, pair in least.items()]
    return f"Ours against the fastest other system: {'; '.join(ratios)}." if ratios else ""
