"""Seconds of a step, from the ledger's work and a device's rates. Pure.

A device does its products, its attention and its moving of bytes one after the other; the host starts operators
beside it, and the link carries gradients and weights beside both: the slowest of the three decides. Rates are a
datasheet's, times the share of them that such work was seen to reach on one H200; on another device that share is
an assumption, so the seconds rank settings better than they promise speeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from optrush.hardware import Device
from optrush.ledger import Ledger, Work

BASIS = "datasheet"
# Shares of the datasheet's rate that a step reached (H200, Llama-3.2-1B shape; LOG.md).
HALF_PRODUCTS, FLOAT32_PRODUCTS, ATTENTION, MEMORY, LINK = 0.66, 0.78, 0.33, 0.80, 0.70
LAUNCH_S = 6e-6  # the host's time to start one operator
# The device waits for the host where a micro-batch begins, and where a step ends and its loss is read.
MICRO_S, STEP_S = 2e-3, 5e-3


@dataclass(frozen=True)
class Effort:
    """One item of work of a step on this rank: what is done, what is moved or sent, and how long that takes alone."""

    name: str
    flop: float
    bytes: float
    launches: float
    seconds: float
    where: Literal["device", "host", "link"]
    reason: str


def efforts(ledger: Ledger, device: Device, tokens: float) -> list[Effort]:
    """Of one step of `ledger.accumulation` micro-batches of `tokens` slots; empty where the rates are unknown."""
    found = []
    for work, times, alone, started in _each(ledger, device, tokens):
        flop, moved = work.flop * times, work.values * ledger.widths[work.role] * times
        place: Literal["device", "link"] = "link" if work.unit == "link" else "device"
        if alone:
            found.append(Effort(work.name, flop, moved, 0.0, alone, place, work.reason))
        if started:
            found.append(Effort(work.name, 0.0, 0.0, work.launches * times, started, "host", work.reason))
    return found


def seconds(ledger: Ledger, device: Device, tokens: float) -> float | None:
    """Of one step; None where the device's rates are unknown."""
    on_device, on_host, on_link = 0.0, 0.0, 0.0
    for work, _, alone, started in _each(ledger, device, tokens):
        on_host += started
        if work.unit == "link":
            on_link += alone
        else:
            on_device += alone
    if not on_device:
        return None
    idle = MICRO_S * ledger.accumulation + STEP_S if device.kind == "cuda" else 0.0
    return max(on_device, on_host, on_link) + idle


def _each(ledger: Ledger, device: Device, tokens: float) -> Iterator[tuple[Work, float, float, float]]:
    """Work that is done, how many times a step, its seconds on device or link, and the host's to start it."""
    if None in (device.half_flop_s, device.float32_flop_s, device.bandwidth_bytes_s, device.link_bytes_s):
        return
    counts = {"token": tokens * ledger.accumulation, "micro": float(ledger.accumulation), "step": 1.0}
    moving = {True: _known(device.link_bytes_s) * LINK, False: _known(device.bandwidth_bytes_s) * MEMORY}
    starting = LAUNCH_S if device.kind == "cuda" else 0.0  # a CPU starts its operators itself, and at once
    for work in ledger.work:
        if not work.gone:
            times = work.times * counts[work.per]
            alone = work.values * ledger.widths[work.role] * times / moving[work.unit == "link"]
            if work.flop:
                alone += work.flop * times / _flop_s(work, ledger, device)
            yield work, times, alone, work.launches * times * starting


def filled(ledger: Ledger) -> float:
    """The share of the slots that hold a token."""
    return 1.0 - sum(w.padding * w.times for w in ledger.work if not w.gone)


def _flop_s(work: Work, ledger: Ledger, device: Device) -> float:
    half = ledger.widths["product"] < 4
    rate = _known(device.half_flop_s if half else device.float32_flop_s)
    if work.unit == "attention":
        return rate * (ATTENTION if half else FLOAT32_PRODUCTS / 2)
    return rate * (HALF_PRODUCTS if half else FLOAT32_PRODUCTS)


def _known(rate: float | None) -> float:
    assert rate is not None
    return rate
