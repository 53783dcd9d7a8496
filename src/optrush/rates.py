"""Seconds of a step, from the ledger's work and a device's rates. Pure.

A device does its products, its attention and its moving of bytes one after the other; the host starts operators
beside it, and the link carries gradients and weights beside both: the slowest of the three decides. Rates are a
datasheet's, times the share of them that such work was seen to reach on one H200; on another device that share is
an assumption, so the seconds rank settings better than they promise speeds.
"""

from __future__ import annotations

from optrush.hardware import Device
from optrush.ledger import Ledger, Work

BASIS = "datasheet"
# Shares of the datasheet's rate that a step reached (H200, Llama-3.2-1B shape; LOG.md).
HALF_PRODUCTS, FLOAT32_PRODUCTS, ATTENTION, MEMORY, LINK = 0.66, 0.78, 0.33, 0.80, 0.70
LAUNCH_S = 6e-6  # the host's time to start one operator
# The device waits for the host where a micro-batch begins, and where a step ends and its loss is read.
MICRO_S, STEP_S = 2e-3, 5e-3


def seconds(ledger: Ledger, device: Device, tokens: float) -> float | None:
    """Of one step of `ledger.accumulation` micro-batches of `tokens` slots; None where the rates are unknown."""
    if None in (device.half_flop_s, device.float32_flop_s, device.bandwidth_bytes_s, device.link_bytes_s):
        return None
    parts = {"device": 0.0, "host": 0.0, "link": 0.0}
    for work in ledger.work:
        if work.gone:
            continue
        times = work.times * {"token": tokens * ledger.accumulation, "micro": ledger.accumulation, "step": 1}[work.per]
        moved = work.values * ledger.widths[work.role] * times
        if work.unit == "link":
            parts["link"] += moved / (_known(device.link_bytes_s) * LINK)
        else:
            parts["device"] += work.flop * times / _flop_s(work, ledger, device)
            parts["device"] += moved / (_known(device.bandwidth_bytes_s) * MEMORY)
        if device.kind == "cuda":  # a CPU starts its operators itself, and at once
            parts["host"] += work.launches * times * LAUNCH_S
    idle = MICRO_S * ledger.accumulation + STEP_S if device.kind == "cuda" else 0.0
    return max(parts.values()) + idle


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
