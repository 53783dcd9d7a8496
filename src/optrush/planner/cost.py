"""Predict the seconds of a step from the ledger's work and a device's rates, and choose the micro-batch by them. Pure.

A device runs matmuls, attention and memory traffic in sequence. In parallel the host launches operators, and links
carry gradients, weights and offloaded values; the slowest of the three decides. A CPU launches its own operators, not
in parallel. Rates come from `optrush calibrate` on the device, else from a datasheet, times the share that such work
reached on one H200. On another device that share is an assumption: there the seconds rank settings better than they
predict speeds.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from optrush import hardware
from optrush.hardware import CONTEXT_BYTES, Device
from optrush.models.shapes import ModelShape
from optrush.models.traced import TracedShape
from optrush.planner import calibration
from optrush.planner.calibration import AttentionRate, Calibration
from optrush.planner.ledger import Ledger, WorkItem, host_bytes, hosted_bytes, most_bytes
from optrush.technique import Environment

# Shares of the datasheet's rates reached by a step (H200, Llama-3.2-1B shape; docs/log).
HALF_PRODUCTS, FLOAT32_PRODUCTS, MEMORY, LINK = 0.66, 0.78, 0.80, 0.70
# Attention without scores: the share for long rows, and the length that reaches half of it; memory traffic per token
# counts for less in longer rows. On a CPU it runs at the rate of matmuls, half of it wasted.
ATTENTION, HALFWAY = 0.48, 800
ROW = 2048  # default tokens per row
# Memory traffic of operators that also compute, as a share of a copy's rate (the same steps; on a CPU of cpu-demo).
MOVING = {"cuda": 0.92, "cpu": 0.4}
# (share, half length) of heads narrower than WIDE: slower at long rows, not at short (h200-calibration, h200-cells).
WIDE, NARROW = 128, (0.384, 240)
# Rates of FlashAttention 2 and 4 as shares of the rate of torch's kernel, from Hopper on (h200-operators: forward 270
# and 545 against 529 TFLOP/s, backward 219 and 390 against 346).
FLASH2, FLASH4 = 0.61, 1.12
# Keys per block of torch's attention on a CPU (kvSplitSize of ATen/native/cpu/FlashAttentionKernel.cpp). Causal
# attention skips only blocks that are fully masked: it computes the half that counts as work, and up to the same again.
# Attention with a mask computes the whole square, all of which counts; the mask's own cost does not.
PIECE = 512
EIGHT = 2.0  # rate of 8-bit matmuls over bf16's, by the datasheets of Ada, Hopper and Blackwell
HOSTED = 0.86  # share of PCI Express's rate to pinned host memory: assumed, not measured
LAUNCH_S = 1.5e-5  # the host's time to launch one operator; a CPU computes nothing meanwhile
# The device waits for the host at the start of a micro-batch, at a host read within it, and at the end of a step, when
# its loss is read.
MICRO_S, STEP_S = 2e-3, 5e-3

Basis = Literal["datasheet", "calibrated"]
ATTENTIONS = ("attention", "flash2", "flash4", "masked")  # units of attention that stores no scores
# Share of NCCL's time by which overlapping kernels slow down: it uses their multiprocessors and memory (two H100, 8B
# with adapters under fsdp against ddp: benchmarks/results/2xh100-links.jsonl). It uses as many multiprocessors as the
# link needs: below that machine's link rate the slowdown is proportionally smaller (two and four H200 without NVLink:
# 2xh200-cells.jsonl, 4xh200-cells.jsonl).
CONTENTION, DISTURBING = 0.5, 3.15e11
SLACK = 0.03  # share of a peak lost to the allocator's gaps
TIGHT = 0.96  # share of the usable memory; the rest is the error of predicted peaks
CLOSE = 0.01  # speeds within this share are equal
SPARE = 0.5  # share of a CPU's memory that plans fill: other programs, and plans up to 17 % low (docs/log/open.md)
WORTH = 0.03  # speedup required of a micro-batch that fills more than TIGHT
PARTS = ("products", "attention", "head", "elementwise", "optimizer")


@dataclass(frozen=True)
class Rates:
    """Rates of a device. None: unknown.

    `products` and `attention` are keyed by whether values are narrower than float32, then by "unit.name" of the work,
    "unit." or its name; "" is all other work of the kind.
    """

    basis: Basis
    source: str  # a sentence for reports
    products: Mapping[bool, Mapping[str, float]]
    attention: Mapping[bool, Mapping[str, float]]
    bytes_s: float  # of device memory
    link_bytes_s: float | None  # to another device
    launch_s: float
    micro_s: float  # the device's wait per micro-batch, and per step
    step_s: float
    host_bytes_s: float | None = None  # to and from pinned host memory; None: unknown, or a CPU
    network_bytes_s: float = math.inf  # into each host from others
    network_step_s: float = 0.0

    def flop_s(self, work: WorkItem, narrow: bool) -> float:
        """Return the rate of one item of work."""
        table = (self.attention if work.unit in ATTENTIONS else self.products)[narrow]
        known = (table.get(key) for key in (f"{work.unit}.{work.name}", f"{work.unit}.", work.name, ""))
        rate = next(r for r in known if r is not None)
        return rate * {"product8": EIGHT, "flash2": FLASH2, "flash4": FLASH4}.get(work.unit, 1.0)


@dataclass(frozen=True)
class WorkTime:
    """One item of work of a step on this rank, and its seconds if it ran alone."""

    name: str
    flop: float
    bytes: float
    launches: float
    seconds: float
    where: Literal["device", "host", "link"]
    reason: str


def linears(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of each kind of linear, by the last part of the work's name in the ledger."""
    D, F, kinds = shape.width, shape.ff_width, shape.linears
    if isinstance(shape, TracedShape):
        return {**{n: (each.outputs, each.inputs) for n, each in kinds.items()}, "head": (shape.vocab, D)}
    inner = sum(linear.weights for linear in kinds.values() if linear.module == "qkv" or "latent." in linear.module)
    return {
        "qkv": (inner // (D * shape.attention_layers), D),
        "o": (D, shape.attended_width),
        "gate_up": (F if shape.gateless else 2 * F, D),
        "down": (D, F),
        "head": (shape.vocab, D),
    }


# --- rates


def expected_and_ceiling(
    device: Device, found: Calibration | None, shape: ModelShape, T: float, seq: float
) -> tuple[Rates | None, Rates | None]:
    """Return the expected rates of a model of this shape, and their ceiling."""
    return device_rates(device, found, shape, T, seq), device_rates(device, found, shape, T, seq, ceiling=True)


@lru_cache(128)
def device_rates(
    device: Device, found: Calibration | None = None, shape: ModelShape | None = None, T: float = ROW,
    seq: float | None = None, *, ceiling: bool = False,
) -> Rates | None:  # fmt: skip
    """Return the expected rates of a step on a device; None: not measured and not in a datasheet.

    Args:
        found: the device's calibration.
        shape: the model's, to look up its matmuls and attention; required with `found`; without it, it gives the width
            of the heads.
        T: tokens per document, for attention that separates documents.
        seq: tokens per row; None: T.
        ceiling: return the highest rates: those measured for each kind of work alone, or the datasheet's.
    """
    if found is not None:
        assert shape is not None
        alone = _shared(_calibrated(device, found, shape, T, seq or T), device)
        return alone if ceiling else replace(alone, bytes_s=alone.bytes_s * MOVING[device.kind])
    if ceiling:
        return _datasheet(device, (1.0, 1.0, 1.0, 1.0, 1.0, 1.0))
    most, halfway = NARROW if shape is not None and shape.head_width < WIDE else (ATTENTION, HALFWAY)
    attention = most * T / (T + halfway) if device.kind == "cuda" else HALF_PRODUCTS / 2
    if (kept := hardware.SUSTAINED.get(device.name)) is not None and device.half_flop_s is not None:
        device = replace(device, half_flop_s=device.half_flop_s * kept / HALF_PRODUCTS)
    return _datasheet(device, (HALF_PRODUCTS, FLOAT32_PRODUCTS, attention, FLOAT32_PRODUCTS / 2, MEMORY, LINK))


def assumed_rates(device: Device, shape: ModelShape, T: float, seq: float) -> Rates | None:
    """Return rates that rank sets on a GPU with unknown rates: an H100's, replaced where known.

    They do not predict its speed, but most sets that are slower on one GPU are slower on the other.
    """
    h100 = hardware.NAMED["h100"]
    assumed = replace(
        device, half_flop_s=h100.half_flop_s, float32_flop_s=h100.float32_flop_s,
        bandwidth_bytes_s=device.bandwidth_bytes_s or h100.bandwidth_bytes_s,
        link_bytes_s=device.link_bytes_s or h100.link_bytes_s,
    )  # fmt: skip
    return device_rates(assumed, None, shape, T, seq)


def _datasheet(device: Device, shares: tuple[float, float, float, float, float, float]) -> Rates | None:
    """Return `shares` of a datasheet's rates; None if a rate is unknown.

    Shares of matmuls in 16 bits and float32, attention in 16 bits and float32, memory and link, in this order.
    """
    half, float32 = device.half_flop_s, device.float32_flop_s
    memory, link = device.bandwidth_bytes_s, device.link_bytes_s
    if half is None or float32 is None or memory is None or link is None:
        return None
    sheet = "counted from cores, clock and vector width" if device.kind == "cpu" else "a datasheet's"
    source = f"{sheet}, not measured: optrush calibrate measures the device's own{_exchanged(device)}"
    products = {True: {"": half * shares[0]}, False: {"": float32 * shares[1]}}
    attention = {True: {"": half * shares[2]}, False: {"": float32 * shares[3]}}
    pcie = hardware.PCIE.get(device.capability[0], hardware.PCIE_LATER) * HOSTED if device.kind == "cuda" else None
    if device.kind == "cpu":  # attention with a mask runs at the rate of matmuls, none of it wasted
        attention = {narrow: {**rates, "masked.": products[narrow][""]} for narrow, rates in attention.items()}
    return Rates(
        "datasheet", source, products, attention, memory * shares[4], link * shares[5], *_host(device, LAUNCH_S), pcie,
        *_network(device, shares[5]),
    )  # fmt: skip


def _calibrated(device: Device, measured: Calibration, shape: ModelShape, T: float, seq: float) -> Rates:
    """Return the rates of each kind of work alone."""
    source = measured.source
    if old := calibration.stale(measured):
        source += f"; {old}: optrush calibrate measures again"
    source += _exchanged(device)
    link = None if device.link_bytes_s is None else device.link_bytes_s * LINK
    if measured.link_bytes_s is not None and not device.linked:  # a link in the hardware's name wins
        link = measured.link_bytes_s
    products, attention = {}, {}
    for narrow in (True, False):
        products[narrow] = _products(measured, narrow, shape)
        attention[narrow] = _attention(measured, narrow, shape, T)
        if device.kind == "cpu":
            squares = _attention(_squared(measured), narrow, shape, seq)
            attention[narrow] |= {f"masked.{name}": rate for name, rate in squares.items()}
    up, down = measured.to_device_bytes_s, measured.from_device_bytes_s
    pcie = None if up is None or down is None else statistics.harmonic_mean((up, down))
    return Rates(
        "calibrated", source, products, attention, measured.copy_bytes_s, link, *_host(device, measured.launch_s), pcie,
        *_network(device, LINK),
    )  # fmt: skip


def _shared(rates: Rates, device: Device) -> Rates:
    """Return a CPU's rates, measured with all of its cores, for a rank that shares them."""
    if device.kind != "cpu" or device.float32_flop_s is None:
        return rates
    share = device.float32_flop_s / (hardware.cpu().float32_flop_s or device.float32_flop_s)
    products, attention = (
        {narrow: {name: rate * share for name, rate in by.items()} for narrow, by in kind.items()}
        for kind in (rates.products, rates.attention)
    )
    return replace(rates, products=products, attention=attention, bytes_s=rates.bytes_s * share)


def _exchanged(device: Device) -> str:
    """Return the end of a sentence on a link between devices that differs from the product's own."""
    if not device.linked:
        return ""
    variable = hardware.SLOWER[device.linked]
    return f"; ranks of a host exchange by {device.linked}, as with {variable}=1 in the environment"


def _host(device: Device, launch_s: float) -> tuple[float, float, float]:
    """Return the host's seconds per launch, micro-batch and step; a CPU waits for no other device."""
    return (launch_s, MICRO_S, STEP_S) if device.kind == "cuda" else (launch_s, 0.0, 0.0)


def _network(device: Device, share: float) -> tuple[float, float]:
    """Return the rate into a host, with the inner link's share (assumed), and the time per network step."""
    return (math.inf, 0.0) if device.network is None else (device.network.bytes_s * share, device.network.step_s)


def _products(measured: Calibration, narrow: bool, shape: ModelShape) -> dict[str, float]:
    """Return rates by the ledger's names where the shape was measured; "" is the median of all shapes.

    The rate of equal amounts of work, one after the other, is the harmonic mean.
    """
    here = [p for p in measured.products if (p.dtype != "float32") == narrow]
    rates = {"": statistics.median(p.flop_s for p in here)}
    for part, sizes in linears(shape).items():
        matching = {p.direction: p.flop_s for p in here if (p.outputs, p.inputs) == sizes}
        if len(matching) < 3:
            continue
        if part == "head":
            rates["head.products"] = statistics.harmonic_mean(list(matching.values()))
        else:
            rates[f"forward.{part}"] = matching["forward"]
            rates[f"backward.{part}"] = statistics.harmonic_mean((matching["input"], matching["weight"]))
    return rates


def _attention(measured: Calibration, narrow: bool, shape: ModelShape, T: float) -> dict[str, float]:
    """Return rates of the model's heads, interpolated at T; else the median of all heads."""
    here = [a for a in measured.attention if (a.dtype != "float32") == narrow]
    rates = {"": statistics.median(a.flop_s for a in here)}
    heads = (shape.heads, shape.kv_heads, shape.head_width)
    for direction in ("forward", "backward"):
        rows = [a for a in here if a.direction == direction]
        matching = [a for a in rows if (a.heads, a.kv_heads, a.head_width) == heads]
        rates[f"{direction}.scores"] = _at(matching, T) if matching else statistics.median(a.flop_s for a in rows)
    return rates


def _squared(measured: Calibration) -> Calibration:
    """Return the calibration with a CPU's rates for whole squares; the measurement counts only halves."""
    scaled = (replace(a, flop_s=a.flop_s * (1 + min(1.0, PIECE / a.seq))) for a in measured.attention)
    return replace(measured, attention=tuple(scaled))


def _at(measured: Iterable[AttentionRate], T: float) -> float:
    """Return the rate at rows of T: linear in the logarithm of the length between its neighbors, constant beyond."""
    by = {a.seq: a.flop_s for a in measured}
    below, above = max((n for n in by if n <= T), default=min(by)), min((n for n in by if n >= T), default=max(by))
    share = math.log(T / below) / math.log(above / below) if below < T < above else 0.0
    return by[below] + share * (by[above] - by[below])


# --- seconds


def list_work_times(ledger: Ledger, device: Device, tokens: float, rates: Rates | None = None) -> list[WorkTime]:
    """List the work of a step of `ledger.accumulation` micro-batches of `tokens` slots; empty if rates are unknown."""
    rates = rates or device_rates(device)
    if rates is None:
        return []
    listed = []
    for work, times, alone, started in _each(ledger, tokens, rates):
        flop, moved = work.flop * times, work.values * ledger.bytes_per_value[work.role] * times
        place: Literal["device", "link"] = "link" if work.unit == "link" else "device"
        if alone and math.isfinite(alone):
            listed.append(WorkTime(work.name, flop, moved, 0.0, alone, place, work.reason))
        if started:
            listed.append(WorkTime(work.name, 0.0, 0.0, work.launches * times, started, "host", work.reason))
        if work.reads and rates.micro_s:
            listed.append(WorkTime(work.name, 0.0, 0.0, 0.0, work.reads * times * rates.micro_s, "host", work.reason))
    if waiting := _waiting(ledger):
        window = sum(alone for work, _, alone, _ in _each(ledger, tokens, rates) if _in_window(work))
        reason = next(w.reason for w in ledger.work if w.waiting)
        listed.append(WorkTime("bubble", 0.0, 0.0, 0.0, window * waiting / (1 - waiting), "device", reason))
    return listed + [e for e in _host_traffic(ledger, tokens, rates) if e.seconds and math.isfinite(e.seconds)]


def step_seconds(ledger: Ledger, device: Device, tokens: float, rates: Rates | None = None) -> float | None:
    """Return the seconds of a step, from `list_work_times`; None: the device's rates are unknown."""
    rates = rates or device_rates(device)
    if rates is None:
        return None
    on_host, disturbed, window, read = 0.0, 0.0, 0.0, 0.0
    contention = CONTENTION * min(1.0, (rates.link_bytes_s or math.inf) / DISTURBING)
    computed = {"micro": 0.0, "step": 0.0}
    linked = {"micro": 0.0, "step": 0.0}
    for work, times, alone, started in _each(ledger, tokens, rates):
        on_host += started
        read += work.reads * times
        window += alone if _in_window(work) else 0.0  # it may be infinite
        per = "step" if work.per == "step" else "micro"
        if work.unit == "link" and not work.awaited:
            linked[per] += alone
            disturbed += alone * contention
        else:
            computed[per] += alone
    computed["micro"] += min(disturbed, CONTENTION * sum(computed.values()))
    computed["micro"] += window * (waiting := _waiting(ledger)) / (1 - waiting)
    offload, paging = _host_traffic(ledger, tokens, rates)
    computed["step"] += paging.seconds
    if not computed["micro"] or math.isinf(max(*computed.values(), *linked.values(), offload.seconds)):
        return None
    # Data sent once per step overlaps with the last micro-batch; then the update waits for the rest.
    last = max(linked["micro"] / ledger.accumulation + linked["step"], computed["micro"] / ledger.accumulation)
    others = (1 - 1 / ledger.accumulation) * max(computed["micro"], linked["micro"])
    busy = others + last + computed["step"]
    if device.kind == "cpu":
        busy, on_host = busy + on_host, 0.0
    return max(busy, on_host, offload.seconds) + rates.micro_s * (ledger.accumulation + read) + rates.step_s


def slowest(books: Sequence[Ledger], device: Device, tokens: float, rates: Rates | None = None) -> float | None:
    """Return the seconds of a step on the slowest rank of a pipeline; None: rates are unknown."""
    times = [step_seconds(book, device, tokens, rates) for book in books]
    known = [seconds for seconds in times if seconds is not None]
    return max(known) if len(known) == len(times) else None


def seconds_by_part(ledger: Ledger, tokens: float, rates: Rates) -> dict[str, float]:
    """Return the device's seconds of a step for each of `PARTS`, at these rates."""
    by_part = dict.fromkeys(PARTS, 0.0)
    for work, _, alone, _ in _each(ledger, tokens, rates):
        if work.unit != "link":  # links run in parallel
            by_part[_part(work)] += alone
    by_part["optimizer"] += _host_traffic(ledger, tokens, rates)[1].seconds
    return by_part


def _host_traffic(ledger: Ledger, tokens: float, rates: Rates) -> tuple[WorkTime, WorkTime]:
    """Return the seconds of offloading, in parallel with the computation, and of paging, which delays the update.

    Paging moves both directions at once (assumed, not measured).
    """

    def taken(bytes_: float) -> float:
        return 0.0 if not bytes_ else math.inf if rates.host_bytes_s is None else bytes_ / rates.host_bytes_s

    awaiting, paged = host_bytes(ledger, tokens)
    moved, swapped = 2 * awaiting * ledger.accumulation, 2 * paged
    return (
        WorkTime("offload", 0.0, moved, 0.0, taken(moved), "link", "what waits on the host, there and back"),
        WorkTime("paging", 0.0, swapped, 0.0, taken(swapped / 2), "device", "what lives on the host, there and back"),
    )


def _part(work: WorkItem) -> str:
    if work.per == "step":
        return "optimizer"
    if "loss" in work.of:
        return "head"
    if "attention" in work.of or "scores" in work.of:
        return "attention"
    return "products" if work.flop else "elementwise"


def _each(ledger: Ledger, tokens: float, rates: Rates) -> Iterator[tuple[WorkItem, float, float, float]]:
    """Yield each work item, its count per step, its seconds on device or link, and the host's seconds to launch it."""
    counts = {"token": tokens * ledger.accumulation, "micro": float(ledger.accumulation), "step": 1.0}
    narrow = ledger.bytes_per_value["product"] < 4
    for work in ledger.work:
        if not work.gone:
            times = work.times * counts[work.per]
            speed = rates.link_bytes_s if work.unit == "link" else rates.bytes_s
            moved = work.values * ledger.bytes_per_value[work.role] * times
            alone = 0.0 if not moved else math.inf if speed is None else moved / speed
            if work.entering:  # exchanges within a host and between hosts overlap
                entering = work.entering * ledger.bytes_per_value[work.role] * times
                rounds = 1 if work.per == "step" else ledger.accumulation
                alone = max(alone, entering / rates.network_bytes_s) + work.steps * rounds * rates.network_step_s
            if work.flop:
                alone += work.flop * times / rates.flop_s(work, narrow)
            yield work, times, alone, work.launches * times * rates.launch_s


def _in_window(work: WorkItem) -> bool:
    """Return whether the device does the work in every micro-batch, and nothing else meanwhile."""
    return work.per != "step" and (work.unit != "link" or work.awaited)


def _waiting(ledger: Ledger) -> float:
    """Return the share of a window in which this rank waits for other stages of a pipeline."""
    return sum(w.waiting * w.times for w in ledger.work if not w.gone)


def filled_share(ledger: Ledger) -> float:
    """Return the share of the slots with a token."""
    return 1.0 - sum(w.padding * w.times for w in ledger.work if not w.gone)


def room(device: Device) -> float | None:
    """Return the most bytes of a peak on a device; None: its memory is unknown."""
    if device.memory_bytes is None:
        return None
    context = CONTEXT_BYTES if device.kind == "cuda" else 0
    return (device.memory_bytes - context) / (1 + SLACK)


def host_room(env: Environment) -> int | None:
    """Return the bytes of host memory for a rank's data, from `hardware.room_on_host`."""
    hosts = env.device.hosts
    here = int(os.environ.get("LOCAL_WORLD_SIZE", env.ranks)) if hosts == 1 else env.ranks // hosts
    return hardware.room_on_host(env.device, here)


def excess_on_host(books: Sequence[Ledger], env: Environment, tokens: float) -> float:
    """Return the bytes by which the rank with the most data on its host exceeds its room there; 0.0: it fits."""
    most = host_room(env)
    return 0.0 if most is None else max(0.0, *(hosted_bytes(book, tokens) - most for book in books))


def fullness(books: Sequence[Ledger], env: Environment, tokens: float) -> float:
    """Return the filled share of a rank's room on its device or its host, whichever is fuller; above 1: too much.

    0.0 for an unknown room.
    """
    on_device, on_host = room(env.device), host_room(env)
    shares = [0.0 if on_device is None else most_bytes(book, tokens) / on_device for book in books]
    return max(*shares, *(hosted_bytes(book, tokens) / on_host for book in books if on_host), 0.0)
