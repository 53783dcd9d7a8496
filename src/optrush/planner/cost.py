"""Seconds of a step, from the ledger's work and a device's rates. Pure.

A device does its products, its attention and its moving of bytes one after the other; the host starts operators
beside it, and links carry gradients and weights, and what waits on the host: the slowest of them decides. Rates are
those that `optrush calibrate` measured on the device; without them a datasheet's, times the share of them that such
work was seen to reach on one H200: on another device that share is an assumption, so the seconds rank settings better
than they promise speeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from optrush.hardware import CONTEXT_BYTES, Device
from optrush.models.shapes import ModelShape
from optrush.planner import calibration
from optrush.planner.calibration import Attention, Calibration
from optrush.planner.ledger import Ledger, Work, awaiting, paged

# Shares of the datasheet's rate that a step reached (H200, Llama-3.2-1B shape; docs/log).
HALF_PRODUCTS, FLOAT32_PRODUCTS, MEMORY, LINK = 0.66, 0.78, 0.80, 0.70
# Attention without scores: the share at long rows, and the length at which it is half of that, for what is read and
# written once a token counts for less in a longer row. On a CPU it is a product as any other, half of it wasted.
ATTENTION, HALFWAY = 0.48, 800
ROW = 2048  # tokens of a row where nobody says how many
# Of a copy's rate: what operators that also compute move bytes at (the same steps; on a CPU those of cpu-demo).
MOVING = {"cuda": 0.92, "cpu": 0.4}
FLASH2 = 0.54  # of attention's rate from Hopper on, for which that kernel was not written (h200-operators)
# Keys at a time of torch's attention on a CPU (kvSplitSize of ATen/native/cpu/FlashAttentionKernel.cpp). Causal, it
# skips a piece only where all of it is masked, so that beside the half that counts as its work it does up to as much
# again for nothing. By a mask it does the whole square, and all of that counts; what the mask itself costs does not.
PIECE = 512
EIGHT = 2.0  # 8-bit products in the time of one of bf16, by the datasheets of Ada, Hopper and Blackwell
# To pinned memory of the host, by the major capability: PCI Express x16 of that generation's datasheets, one direction,
# times a share that is assumed, not measured.
PCIE, HOSTED = {7: 1.6e10, 8: 3.2e10}, 0.86
PCIE_LATER = 6.4e10
LAUNCH_S = 1.5e-5  # the host's time to start one operator
# The device waits for the host where a micro-batch begins, and where a step ends and its loss is read.
MICRO_S, STEP_S = 2e-3, 5e-3

Basis = Literal["datasheet", "calibrated"]
ATTENTIONS = ("attention", "flash2", "masked")  # units of attention that keeps no scores
SLACK = 0.03  # of a peak: the allocator's gaps
CLOSE = 0.01  # speeds this near are equal; of those, what needs less memory is better
PARTS = ("products", "attention", "head", "elementwise", "optimizer")


@dataclass(frozen=True)
class Rates:
    """What a device does in a second. None: not known.

    `products` and `attention` go by whether values are narrower than float32, then by "unit.name" of the work, "unit."
    or its name; "" is all other work of the kind.
    """

    basis: Basis
    said: str  # where they come from, for people
    products: Mapping[bool, Mapping[str, float]]
    attention: Mapping[bool, Mapping[str, float]]
    bytes_s: float  # of device memory
    link_bytes_s: float | None  # to another device
    launch_s: float
    micro_s: float  # that the device waits at a micro-batch, and at a step
    step_s: float
    host_bytes_s: float | None = None  # to and from pinned memory of the host; None: not known, or there is no other

    def flop_s(self, work: Work, narrow: bool) -> float:
        """Of a piece of work."""
        table = (self.attention if work.unit in ATTENTIONS else self.products)[narrow]
        known = (table.get(key) for key in (f"{work.unit}.{work.name}", f"{work.unit}.", work.name, ""))
        rate = next(r for r in known if r is not None)
        return rate * {"product8": EIGHT, "flash2": FLASH2}.get(work.unit, 1.0)


@dataclass(frozen=True)
class WorkTime:
    """One item of work of a step on this rank: what is done, what is moved or sent, and how long that takes alone."""

    name: str
    flop: float
    bytes: float
    launches: float
    seconds: float
    where: Literal["device", "host", "link"]
    reason: str


def linears(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of each kind of linear, by the name that the ledger's work ends with."""
    D, F = shape.width, shape.ff_width
    q, kv = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    return {"qkv": (q + 2 * kv, D), "o": (D, q), "gate_up": (2 * F, D), "down": (D, F), "head": (shape.vocab, D)}


# --- where rates come from


def known(
    device: Device, found: Calibration | None, hf: Mapping[str, Any], T: float, seq: float
) -> tuple[Rates | None, Rates | None]:
    """The rates to expect of a model with this config.json, and their ceiling."""
    if found is None:  # a datasheet says the same of every model
        return of(device, T=T), ceiling(device)
    shape = ModelShape.read(hf)
    return of(device, found, shape, T, seq), ceiling(device, found, shape, T, seq)


@lru_cache(64)
def of(
    device: Device,
    found: Calibration | None = None,
    shape: ModelShape | None = None,
    T: float = ROW,
    seq: float | None = None,
) -> Rates | None:
    """The rates to expect of a step on a device.

    Args:
        found: what was measured on it.
        shape: of the model, whose own products and attention are looked up.
        T: tokens of a row, as far as an attention sees them that knows documents.
        seq: all tokens of a row; None: as many.

    Returns:
        None: neither measured nor in a datasheet.
    """
    if found is not None:
        assert shape is not None
        alone = _calibrated(device, found, shape, T, seq or T)
        return replace(alone, bytes_s=alone.bytes_s * MOVING[device.kind])
    attention = ATTENTION * T / (T + HALFWAY) if device.kind == "cuda" else HALF_PRODUCTS / 2
    return _datasheet(device, (HALF_PRODUCTS, FLOAT32_PRODUCTS, attention, FLOAT32_PRODUCTS / 2, MEMORY, LINK))


@lru_cache(64)
def ceiling(
    device: Device,
    found: Calibration | None = None,
    shape: ModelShape | None = None,
    T: float = ROW,
    seq: float | None = None,
) -> Rates | None:
    """What the device can do at most: what was measured of each kind of work alone, or the datasheet's whole rates."""
    if found is not None:
        assert shape is not None
        return _calibrated(device, found, shape, T, seq or T)
    return _datasheet(device, (1.0, 1.0, 1.0, 1.0, 1.0, 1.0))


def _datasheet(device: Device, shares: tuple[float, float, float, float, float, float]) -> Rates | None:
    half, float32, memory, link = (
        device.half_flop_s, device.float32_flop_s, device.bandwidth_bytes_s, device.link_bytes_s
    )  # fmt: skip
    if half is None or float32 is None or memory is None or link is None:
        return None
    sheet = "counted from cores, clock and vector width" if device.kind == "cpu" else "a datasheet's"
    said = f"{sheet}, not measured: optrush calibrate measures the device's own"
    products = {True: {"": half * shares[0]}, False: {"": float32 * shares[1]}}
    attention = {True: {"": half * shares[2]}, False: {"": float32 * shares[3]}}
    pcie = PCIE.get(device.capability[0], PCIE_LATER) * HOSTED if device.kind == "cuda" else None
    if device.kind == "cpu":  # by a mask it is a product as any other, and nothing is wasted
        attention = {narrow: {**rates, "masked.": products[narrow][""]} for narrow, rates in attention.items()}
    return Rates(
        "datasheet", said, products, attention, memory * shares[4], link * shares[5], *_host(device, LAUNCH_S), pcie
    )  # fmt: skip


def _calibrated(device: Device, found: Calibration, shape: ModelShape, T: float, seq: float) -> Rates:
    """Of each kind of work alone."""
    said = found.said
    if old := calibration.stale(found):
        said += f"; {old}: optrush calibrate measures again"
    link = None if device.link_bytes_s is None else device.link_bytes_s * LINK
    products, attention = {}, {}
    for narrow in (True, False):
        products[narrow] = _products(found, narrow, shape)
        attention[narrow] = _attention(found, narrow, shape, T)
        if device.kind == "cpu":
            squares = _attention(_squared(found), narrow, shape, seq)
            attention[narrow] |= {f"masked.{name}": rate for name, rate in squares.items()}
    up, down = found.to_device_bytes_s, found.from_device_bytes_s
    pcie = None if up is None or down is None else _together((up, down))
    return Rates(
        "calibrated", said, products, attention, found.copy_bytes_s, link, *_host(device, found.launch_s), pcie
    )  # fmt: skip


def _host(device: Device, launch_s: float) -> tuple[float, float, float]:
    """(launch, micro-batch, step): a CPU starts its operators itself, and at once."""
    return (launch_s, MICRO_S, STEP_S) if device.kind == "cuda" else (0.0, 0.0, 0.0)


def _products(found: Calibration, narrow: bool, shape: ModelShape) -> dict[str, float]:
    """By the ledger's names, where the shape was measured; else the median of all shapes."""
    here = [p for p in found.products if (p.dtype != "float32") == narrow]
    rates = {"": statistics.median(p.flop_s for p in here)}
    for part, sizes in linears(shape).items():
        own = {p.direction: p.flop_s for p in here if (p.outputs, p.inputs) == sizes}
        if len(own) < 3:
            continue
        if part == "head":
            rates["head.products"] = _together(own.values())
        else:
            rates[f"forward.{part}"] = own["forward"]
            rates[f"backward.{part}"] = _together((own["input"], own["weight"]))
    return rates


def _attention(found: Calibration, narrow: bool, shape: ModelShape, T: float) -> dict[str, float]:
    """Of the model's heads, between the measured lengths beside T; else the median of all heads."""
    here = [a for a in found.attention if (a.dtype != "float32") == narrow]
    rates = {"": statistics.median(a.flop_s for a in here)}
    heads = (shape.heads, shape.kv_heads, shape.head_width)
    for direction in ("forward", "backward"):
        all_ = [a for a in here if a.direction == direction]
        own = [a for a in all_ if (a.heads, a.kv_heads, a.head_width) == heads]
        rates[f"{direction}.scores"] = _at(own, T) if own else statistics.median(a.flop_s for a in all_)
    return rates


def _squared(found: Calibration) -> Calibration:
    """With the rates at which a CPU did whole squares while halves were counted."""
    whole = (replace(a, flop_s=a.flop_s * (1 + min(1.0, PIECE / a.seq))) for a in found.attention)
    return replace(found, attention=tuple(whole))


def _at(measured: Iterable[Attention], T: float) -> float:
    """The rate at rows of T: on the line, over the length's logarithm, between its neighbours; beyond them theirs."""
    by = {a.seq: a.flop_s for a in measured}
    below, above = max((n for n in by if n <= T), default=min(by)), min((n for n in by if n >= T), default=max(by))
    share = math.log(T / below) / math.log(above / below) if below < T < above else 0.0
    return by[below] + share * (by[above] - by[below])


def _together(rates: Iterable[float]) -> float:
    """The rate of equal amounts of work, one after the other."""
    return statistics.harmonic_mean(list(rates))


# --- what work takes


def efforts(ledger: Ledger, device: Device, tokens: float, rates: Rates | None = None) -> list[WorkTime]:
    """Of one step of `ledger.accumulation` micro-batches of `tokens` slots; empty where the rates are unknown."""
    found = []
    for work, times, alone, started in _each(ledger, tokens, rates or of(device)):
        flop, moved = work.flop * times, work.values * ledger.bytes_per_value[work.role] * times
        place: Literal["device", "link"] = "link" if work.unit == "link" else "device"
        if alone and math.isfinite(alone):
            found.append(WorkTime(work.name, flop, moved, 0.0, alone, place, work.reason))
        if started:
            found.append(WorkTime(work.name, 0.0, 0.0, work.launches * times, started, "host", work.reason))
    moved, taken = _offloaded(ledger, tokens, rates or of(device))
    if taken and math.isfinite(taken):
        found.append(WorkTime("offload", 0.0, moved, 0.0, taken, "link", "what waits on the host, there and back"))
    moved, taken = _paged(ledger, rates or of(device))
    if taken and math.isfinite(taken):
        found.append(WorkTime("paging", 0.0, moved, 0.0, taken, "device", "what lives on the host, there and back"))
    return found


def seconds(ledger: Ledger, device: Device, tokens: float, rates: Rates | None = None) -> float | None:
    """Of one step; None where the device's rates are unknown."""
    rates = rates or of(device)
    on_device, on_host, on_link = 0.0, 0.0, 0.0
    for work, _, alone, started in _each(ledger, tokens, rates):
        on_host += started
        if work.unit == "link":
            on_link += alone
        else:
            on_device += alone
    _, on_bus = _offloaded(ledger, tokens, rates)
    on_device += _paged(ledger, rates)[1]
    if rates is None or not on_device or math.isinf(max(on_device, on_link, on_bus)):
        return None
    return max(on_device, on_host, on_link, on_bus) + rates.micro_s * ledger.accumulation + rates.step_s


def _offloaded(ledger: Ledger, tokens: float, rates: Rates | None) -> tuple[float, float]:
    """Bytes of a step that cross the link to the host, and their seconds, beside the computation."""
    moved = 2 * awaiting(ledger, tokens) * ledger.accumulation
    if not moved or rates is None:
        return 0.0, 0.0
    return moved, math.inf if rates.host_bytes_s is None else moved / rates.host_bytes_s


def _paged(ledger: Ledger, rates: Rates | None) -> tuple[float, float]:
    """The same of what passes through the device in the update, which waits for it: both ways at once (assumed, not
    measured)."""
    moved = 2 * paged(ledger)
    if not moved or rates is None:
        return 0.0, 0.0
    return moved, math.inf if rates.host_bytes_s is None else moved / 2 / rates.host_bytes_s


def parts(ledger: Ledger, tokens: float, rates: Rates) -> dict[str, float]:
    """Seconds of a step that the device works on each part, at these rates; `PARTS` names them."""
    found = dict.fromkeys(PARTS, 0.0)
    for work, _, alone, _ in _each(ledger, tokens, rates):
        if work.unit != "link":  # which runs beside them
            found[_part(work)] += alone
    found["optimizer"] += _paged(ledger, rates)[1]  # which the update waits for
    return found


def _part(work: Work) -> str:
    if work.per == "step":
        return "optimizer"
    if "head" in work.name.split("."):  # that of a reference pass, too
        return "head"
    if work.unit in ATTENTIONS or ".scores" in work.name:
        return "attention"
    return "products" if work.flop else "elementwise"


def _each(ledger: Ledger, tokens: float, rates: Rates | None) -> Iterator[tuple[Work, float, float, float]]:
    """Work that is done, how many times a step, its seconds on device or link, and the host's to start it."""
    if rates is None:
        return
    counts = {"token": tokens * ledger.accumulation, "micro": float(ledger.accumulation), "step": 1.0}
    narrow = ledger.bytes_per_value["product"] < 4
    for work in ledger.work:
        if not work.gone:
            times = work.times * counts[work.per]
            speed = rates.link_bytes_s if work.unit == "link" else rates.bytes_s
            moved = work.values * ledger.bytes_per_value[work.role] * times
            alone = 0.0 if not moved else math.inf if speed is None else moved / speed
            if work.flop:
                alone += work.flop * times / rates.flop_s(work, narrow)
            yield work, times, alone, work.launches * times * rates.launch_s


def filled(ledger: Ledger) -> float:
    """The share of the slots that hold a token."""
    return 1.0 - sum(w.padding * w.times for w in ledger.work if not w.gone)


def room(device: Device) -> float | None:
    """Bytes that a peak may have on a device."""
    if device.memory_bytes is None:
        return None
    context = CONTEXT_BYTES if device.kind == "cuda" else 0
    return (device.memory_bytes - context) / (1 + SLACK)
