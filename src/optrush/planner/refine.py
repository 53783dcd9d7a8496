"""Move a device's calibrated rates so that predicted steps come nearer to the steps of records. Pure.

`optrush calibrate` measures each kind of work alone. In a step other rates are reached: kernels wait for each other,
caches are shared, the device is hotter. A record has the seconds of such steps. Its predicted seconds are those of its
ledger at the calibration's rates, each kind of them times a factor; the factors are those with the least sum of squared
logarithms of predicted over measured seconds, and of the factors themselves, so that a kind of work that the records
hardly depend on keeps its rate.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import yaml

from optrush import hardware
from optrush.benchmark.record import Record
from optrush.config import Config, current_techniques, parse_config
from optrush.errors import ConfigError, UserError
from optrush.hardware import Device
from optrush.models.shapes import ModelShape
from optrush.planner import calibration, cost
from optrush.planner.calibration import Calibration
from optrush.planner.ledger import Ledger
from optrush.planner.search import books_of

KINDS = ("products", "float32 products", "attention", "copies", "launches")
WEIGHT = 0.01  # of a factor's squared logarithm; of the mean over the records it is 1
MOST = math.log(4.0)  # a rate moves by this at most
STEPS = (0.3, 0.1, 0.03, 0.01)  # of the logarithm of a factor, tried one after the other


@dataclass(frozen=True)
class Observation:
    """A measured step, and what predicts it."""

    book: Ledger
    shape: ModelShape
    span: float
    seq: int
    tokens: int
    measured_s: float

    def predicted_s(self, device: Device, rates: Calibration) -> float:
        found = cost.device_rates(device, rates, self.shape, self.span, self.seq)
        return cost.step_seconds(self.book, device, self.tokens, found) or math.inf


@dataclass(frozen=True)
class Refined:
    """Moved rates, the factors by kind, and the errors of the predicted steps before and after."""

    calibration: Calibration
    factors: Mapping[str, float]
    before: tuple[float, ...]  # predicted over measured seconds - 1, a record each
    after: tuple[float, ...]
    left_out: tuple[str, ...]  # records that predict nothing, and why

    @property
    def better(self) -> bool:
        return root_mean_square(self.after) < root_mean_square(self.before) - 1e-3


def root_mean_square(errors: Sequence[float]) -> float:
    """Return the root of the mean of squares."""
    return math.sqrt(statistics.fmean(e * e for e in errors))


def refine(records: Sequence[Record], device: Device) -> Refined:
    """Fit the calibration of a device to records of it.

    Raises:
        ConfigError: the device has no calibration, a record is of another one, or no record can be predicted.
    """
    asked = "calibrate --from"
    found = calibration.for_device(device)
    if found is None:
        raise ConfigError(asked, f"{calibration.device_name(device)} has no calibration", "optrush calibrate first")
    if other := next((r for r in records if not _is_of(r, device)), None):
        name = other.environment.get("cpu", "unknown") if other.device == "cpu" else other.device
        here = calibration.device_name(device)
        raise ConfigError(asked, f"`{other.rung}` was measured on {name}, this is {here}", "take records of this one")
    observed, left_out = list[Observation](), list[str]()
    for r in records:
        why = _unusable(r)
        try:
            observed += [] if why else [_observe(r, device)]
        except UserError as error:
            why = f"{error.asked}: {error.found}"
        left_out += [f"{r.rung}: {why}"] if why else []
    if not observed:
        reasons = "; ".join(left_out) or "there is none"
        raise ConfigError(asked, f"no record whose steps can be predicted: {reasons}", "take a bench on one device")

    def errors(factors: Sequence[float]) -> tuple[float, ...]:
        moved = scaled(found, factors)
        return tuple(o.predicted_s(device, moved) / o.measured_s - 1 for o in observed)

    def value(logs: Sequence[float]) -> float:
        squares = [math.log1p(e) ** 2 for e in errors([math.exp(x) for x in logs])]
        return statistics.fmean(squares) + WEIGHT * sum(x * x for x in logs)

    factors = [math.exp(x) for x in descend(value, len(KINDS))]
    named = dict(zip(KINDS, factors, strict=True))
    date = max(r.date for r in records)[:10]
    moved = replace(scaled(found, factors), fitted=f"{len(observed)} records of {date}")
    return Refined(moved, named, errors([1.0] * len(KINDS)), errors(factors), tuple(left_out))


def _is_of(r: Record, device: Device) -> bool:
    if device.kind != "cpu" or r.device != "cpu":
        return r.device == device.name
    model, _ = hardware.processor()
    return r.environment.get("cpu", model).rpartition(",")[0] in ("", model)


def _unusable(r: Record) -> str | None:
    """Return why a record's steps are not compared."""
    if r.error is not None or not any(r.step_s):
        return "no figures"
    if r.peer is not None:
        return "another system"
    if r.ranks > 1:
        return f"{r.ranks} ranks, which wait for their link"
    if r.longest_seq is not None or r.basis is None:
        return "first steps, or no prediction"
    return next((why for why in r.red if why.startswith("wrong")), None)


def _observe(r: Record, device: Device) -> Observation:
    tree = {**r.config, "with": current_techniques(r.config.get("with") or {})}
    config: Config = parse_config(yaml.safe_dump(tree), f"the record of {r.rung}", own=True)
    if config.batch.micro_tokens == "auto":
        config = config.model_copy(update={"batch": config.batch.model_copy(update={"micro_tokens": r.micro_tokens})})
    (book,), env, hf = books_of(config, device, 1)
    seconds = statistics.median(s for steps in r.step_s for s in steps)
    return Observation(book, ModelShape.read(hf), env.span, env.seq, env.micro_rows * env.seq, seconds)


def scaled(c: Calibration, factors: Sequence[float]) -> Calibration:
    """Return a calibration with each kind of rate times its factor; launches take that much longer."""
    half, single, attention, copies, launches = factors
    return replace(
        c,
        products=tuple(replace(p, flop_s=p.flop_s * (single if p.dtype == "float32" else half)) for p in c.products),
        attention=tuple(replace(a, flop_s=a.flop_s * attention) for a in c.attention),
        copy_bytes_s=c.copy_bytes_s * copies,
        launch_s=c.launch_s * launches,
    )


def descend(value: Callable[[Sequence[float]], float], count: int) -> list[float]:
    """Return logarithms of factors that no single change by the smallest step improves, beginning at zero."""
    here = [0.0] * count
    best = value(here)
    for step in STEPS:
        improved = True
        while improved:
            improved = False
            for i in range(count):
                for change in (step, -step):
                    there = [*here[:i], here[i] + change, *here[i + 1 :]]
                    if abs(there[i]) <= MOST and (found := value(there)) < best - 1e-12:
                        here, best, improved = there, found, True
    return here
