"""Draws the pictures of the guide and of README.md from formulas, plans and committed records, into docs.

A picture is an SVG: it is narrow, so that its letters can be read on a phone, and its lines and letters have the color
of the reader's scheme, light or dark.

usage: pictures.py [FOLDER]     a test draws them again and compares
"""

from __future__ import annotations

import io
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from optrush.config import Config
from optrush.data.image_sizes import sizes_of
from optrush.kernels import nf4
from optrush.models.shapes import SHAPES, ModelShape
from optrush.planner.search import Prediction, predict

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import guide

ROOT = Path(__file__).parents[1]
GIB = 2**30
COLOURS = ("#3b6fb6", "#e08a2e", "#4a9a5b", "#b5493f", "#7d62a8", "#8a8f98", "#c9b037")
FULL: dict[str, Any] = {"bf16": {}, "fused-adamw": {}, "attention": {}, "compile": {}, "fused-loss": {}}
PARTS = ("products", "attention", "head", "elementwise", "optimizer", "gaps")


def canvas(width: float = 5.2, height: float = 3.4, columns: int = 1) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, columns)
    for axis in np.atleast_1d(axes):
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def planned(shape: str = "llama-3.2-1b", rows: int = 1, seq: int = 2048, **techniques: Any) -> Prediction:
    named = {name.replace("_", "-"): options for name, options in techniques.items()}
    config: dict[str, Any] = {
        "model": {"shape": shape}, "objective": "pretrain", "data": {"random": 512}, "output": "x", "with": named,
        "batch": {"seq": seq, "tokens": rows * seq, "micro_tokens": rows * seq},
    }  # fmt: skip
    return predict(Config.model_validate(config), "h200")


def stacked(axis: Axes, names: Sequence[str], parts: Mapping[str, Sequence[float]], unit: str) -> None:
    """Draw a bar for each name, of the parts one after the other."""
    left = np.zeros(len(names))
    for colour, (part, values) in zip(COLOURS, parts.items()):
        axis.barh(names, values, left=left, color=colour, label=part, height=0.66)
        left += np.array(values)
    for y, total in enumerate(left):
        axis.text(total, y, f" {total:,.0f}" if total >= 100 else f" {total:.1f}", va="center", fontsize=9)
    axis.set_xlim(0, left.max() * 1.1)
    axis.invert_yaxis()
    axis.set_xlabel(unit)
    axis.legend(frameon=False, fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def model() -> Figure:
    """Bytes of models by what a parameter costs, beside the memory of cards."""
    figure, axis = canvas()
    sizes = {"1B": 1.236e9, "3B": 3.213e9, "8B": 8.03e9, "70B": 70.55e9}
    schemes = {"float32 or amp: 16 bytes": 16, "bf16: 8": 8, "LoRA: about 2": 2, "QLoRA: about 0.7": 0.7}
    for i, (title, each) in enumerate(schemes.items()):
        at = np.arange(len(sizes)) + (i - 1.5) * 0.2
        axis.bar(at, [n * each / GIB for n in sizes.values()], 0.19, color=COLOURS[i], label=title)
    for card, room in {"24 GiB card": 24, "H100 80 GB": 79.6, "H200 141 GB": 139.8}.items():
        axis.axhline(room, color="#888", lw=0.8, ls="--")
        axis.text(-0.48, room * 1.06, card, fontsize=8, color="#555")
    axis.set_yscale("log")
    axis.set_xticks(range(len(sizes)), list(sizes))
    axis.set_ylabel("GiB before activations")
    axis.set_ylim(0.5, 2000)
    axis.legend(frameon=False, fontsize=8, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure


def memory() -> Figure:
    """The plan's lines of the 1B shape, one row of 2048, by kind."""
    figure, axis = canvas(height=3.2)
    cases = {
        "no technique": planned(), "amp": planned(amp={}),
        "amp attention compile": planned(amp={}, attention={}, compile={}),
        "bf16 attention compile": planned(bf16={}, attention={}, compile={}),
        "the same, 16 rows": planned(rows=16, **FULL), "and recompute": planned(rows=16, **FULL, recompute={}),
    }  # fmt: skip
    kinds = ("weights", "gradients", "states", "casts", "activations", "head and the rest")
    parts: dict[str, list[float]] = {kind: [] for kind in kinds}
    for prediction in cases.values():
        found = dict.fromkeys(kinds, 0.0)
        for line in prediction.lines:
            kind = line.name.partition(".")[0]
            kind = "activations" if kind in ("saved", "input") else kind if kind in kinds else kinds[-1]
            found[kind] += line.bytes / GIB
        for kind in kinds:
            parts[kind].append(found[kind])
    stacked(axis, list(cases), parts, "GiB at the peak")
    return figure


def data() -> Figure:
    """A million rows, filter by filter, from the record of cleaning."""
    figure, axis = canvas(height=2.8)
    (r,) = guide.lines("cleaning.jsonl")
    names = {"short": "too short", "long": "too long", "few": "few items", "many": "many items", "rare": "rare item",
             "exact": "exact copy", "near": "near copy"}  # fmt: skip
    left = r["rows"]
    axis.bar("all rows", left / 1000, color=COLOURS[5])
    for key, title in names.items():
        gone = r["found"][key] * r["planted"][key]
        left -= gone
        axis.bar(title, gone / 1000, bottom=left / 1000, color=COLOURS[3])
        axis.text(title, left / 1000 - 5, f"-{gone / 1000:.1f}", ha="center", va="top", fontsize=8)
    axis.bar("left", left / 1000, color=COLOURS[2])
    axis.set_ylim(800, 1010)
    axis.set_ylabel("thousand rows (from 800)")
    axis.tick_params(axis="x", labelsize=9, rotation=35)
    return figure


def rows() -> Figure:
    """Text in the rows, by layout and by how lengths are distributed."""
    figure, axis = canvas(height=3.0)
    (record,) = guide.lines("layouts.jsonl")
    cases = record["cases"]
    names = [x["name"] for x in next(iter(cases.values()))["layouts"]]
    for i, (case, found) in enumerate(cases.items()):
        fills = [100 * x["fill"] for x in found["layouts"]]
        at = np.arange(len(names)) + (i - 1) * 0.26
        bars = axis.bar(at, fills, 0.25, color=COLOURS[i], label=f"{case}, mean {found['mean']:,.0f}")
        axis.bar_label(bars, [f"{x:.0f}" for x in fills], fontsize=7)
    axis.set_xticks(range(len(names)), names)
    axis.set_ylabel("% of the slots that hold text")
    axis.set_ylim(0, 112)
    axis.legend(frameon=False, fontsize=8, ncols=1, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure


def precision() -> Figure:
    """The bits of five types."""
    figure, axis = canvas(height=2.9)
    types = {"float32": (8, 23), "bf16": (8, 7), "fp16": (5, 10), "fp8 e4m3": (4, 3), "fp8 e5m2": (5, 2)}
    largest = {"float32": "3.4e38", "bf16": "3.4e38", "fp16": "65,504", "fp8 e4m3": "448", "fp8 e5m2": "57,344"}
    for y, (name, (exponent, mantissa)) in enumerate(types.items()):
        for x in range(1 + exponent + mantissa):
            colour = COLOURS[3] if x == 0 else COLOURS[1] if x <= exponent else COLOURS[0]
            axis.barh(y, 0.92, left=x, height=0.7, color=colour)
        text = f"up to {largest[name]}, step at 1: 2^-{mantissa}"
        axis.text(1 + exponent + mantissa + 0.3, y, text, va="center", fontsize=8)
    axis.set_yticks(range(len(types)), list(types))
    axis.set_xlim(0, 45)
    axis.invert_yaxis()
    axis.set_xticks([])
    axis.spines[["bottom", "left"]].set_visible(False)
    axis.set_title("sign (red), exponent (orange): range, mantissa (blue): precision", fontsize=9)
    return figure


def linears(shape: str) -> list[tuple[int, int]]:
    """(rows, width) of a block's seven matrices as they are published."""
    s = ModelShape.read(SHAPES[shape])
    D, F, q, kv = s.width, s.ff_width, s.heads * s.head_width, s.kv_heads * s.head_width
    return [(q, D), (kv, D), (kv, D), (D, q), (F, D), (F, D), (D, F)]


def adapters() -> Figure:
    """The share of parameters that adapters of a rank are."""
    figure, axis = canvas(height=3.0)
    ranks = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256])
    for colour, shape in zip(COLOURS, ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "llama-3.1-70b")):
        s = ModelShape.read(SHAPES[shape])
        each = sum(a + b for a, b in linears(shape)) * s.layers
        axis.plot(ranks, 100 * ranks * each / s.parameters, "o-", ms=4, color=colour, label=shape)
    axis.axhline(1, color="#888", lw=0.8, ls="--")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(ranks, [str(r) for r in ranks])
    axis.set_xlabel("rank r of adapters beside all seven matrices")
    axis.set_ylabel("trained, % of the model")
    axis.legend(frameon=False, fontsize=8)
    return figure


def four_bits() -> Figure:
    """The sixteen values of NF4 under a normal distribution, and bits a weight."""
    figure, (left, right) = canvas(columns=2, height=2.9)
    x = np.linspace(-1.1, 1.1, 300)
    left.plot(x, np.exp(-((x / 0.36) ** 2) / 2), color="#888", lw=1)
    left.vlines(list(nf4.VALUES), 0, 0.5, color=COLOURS[0], lw=1.5)
    left.set_yticks([])
    left.set_title("16 values under the weights", fontsize=9)
    left.set_xlabel("weight / largest of its block", fontsize=9)
    kinds = {
        "bf16": 16,
        "int8": 8.0,
        "nf4, float32 scales": 4 + 32 / 64,
        "nf4, scales in 8 bits": 4 + 8 / 64 + 32 / 64 / 256,
    }
    bars = right.barh(list(kinds), list(kinds.values()), color=COLOURS[0])
    right.bar_label(bars, [f" {v:.3g}" for v in kinds.values()], fontsize=8)
    right.invert_yaxis()
    right.set_xlim(0, 19)
    right.set_title("bits a weight", fontsize=9)
    right.tick_params(labelsize=8)
    return figure


def optimizers() -> Figure:
    """Bytes a parameter, by what is kept of it."""
    figure, axis = canvas(height=3.2)
    byte = 1 + 4 / 256
    cases = {
        "AdamW, float32": (4, 4, 8), "AdamW, bf16": (2, 2, 4), "bf16, 8-bit moments": (2, 2, 2 * byte),
        "bf16, 4-bit moments": (2, 2, 1 + 8 / 128), "Muon, bf16 (blocks)": (2, 2, 2),
        "8 bits, update in backward": (2, 0, 2 * byte), "4 bits, update in backward": (2, 0, 1 + 8 / 128),
    }  # fmt: skip
    parts = {k: [v[i] for v in cases.values()] for i, k in enumerate(("weight", "gradient", "states"))}
    stacked(axis, list(cases), parts, "bytes a parameter")
    return figure


def took(name: str) -> list[float]:
    r = guide.rung("h200-single-gpu", name)
    assert r.parts_s
    return [1000 * r.parts_s[part] for part in PARTS]


def step_parts(rungs: Mapping[str, str], height: float) -> Figure:
    """Draw milliseconds of a step by part, from the profiles in the records."""
    figure, axis = canvas(height=height)
    found = [took(name) for name in rungs.values()]
    stacked(axis, list(rungs), {part: [x[i] for x in found] for i, part in enumerate(PARTS)}, "ms of a step, profiled")
    return figure


def compiled() -> Figure:
    return step_parts({"one row, not compiled": "flash attention", "one row, compiled": "compile"}, 2.2)


def attention() -> Figure:
    """What attention keeps of a row, with and without its scores."""
    figure, axis = canvas(height=3.2)
    T = 2.0 ** np.arange(9, 18)
    H, K, E = 32, 8, 64
    axis.plot(
        T, (6 * H * T * T + 4 * (2 * H) * E * T) / GIB, "o-", ms=4, color=COLOURS[3], label="scores kept: 6 H T² bytes"
    )
    axis.plot(
        T,
        (4 * H * T + 2 * (2 * H + 2 * K) * E * T) / GIB,
        "o-",
        ms=4,
        color=COLOURS[0],
        label="no scores: grows with T",
    )
    axis.axhline(139.8, color="#888", lw=0.8, ls="--")
    axis.text(520, 160, "all of an H200", fontsize=8, color="#555")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(T, [f"{int(t):,}" for t in T], fontsize=8)
    axis.set_xlabel("T, tokens of a row (1B shape, bf16, one block)")
    axis.set_ylabel("GiB")
    axis.legend(frameon=False, fontsize=8)
    return figure


def kernels() -> Figure:
    names = ("larger micro-batch", "FlashAttention 4", "QuACK loss", "fused block", "fused block, in the products",
             "fused norm", "fused rotation")  # fmt: skip
    return step_parts({n: n for n in names}, 3.4)


def batch() -> Figure:
    """Speed and peak by rows of a micro-batch, and with blocks recomputed."""
    figure, (speed, peak) = canvas(columns=2, height=3.0)
    rungs = {1: "compile", 4: "batch 4", 8: "batch 8", 16: "batch 16"}
    found = {n: guide.rung("h200-single-gpu", name) for n, name in rungs.items()}
    speed.plot(list(found), [(r.tokens_per_s or 0) / 1000 for r in found.values()], "o-", color=COLOURS[0])
    speed.set_ylabel("thousand tokens/s")
    speed.set_ylim(0, 75)
    peak.plot(
        list(found), [(r.peak_bytes or 0) / GIB for r in found.values()], "o-", color=COLOURS[1], label="measured"
    )
    peak.plot(list(found), [(r.predicted_peak_bytes or 0) / GIB for r in found.values()], "x--", color="#666",
              label="predicted")  # fmt: skip
    peak.set_ylabel("peak GiB")
    peak.set_ylim(0, 75)
    peak.legend(frameon=False, fontsize=8)
    for axis in (speed, peak):
        axis.set_xticks(list(found))
        axis.set_xlabel("rows of 2048 in a micro-batch")
    return figure


def loader() -> Figure:
    """Relative speed when making a batch takes so much of a step, by number of workers."""
    figure, axis = canvas(height=3.0)
    ratio = np.linspace(0, 4, 200)
    axis.plot(ratio, 1 / (1 + ratio), color=COLOURS[3], label="made between two steps: 1 / (1 + d)")
    for colour, workers in zip(COLOURS, (1, 2, 4)):
        axis.plot(ratio, np.minimum(1, workers / np.maximum(ratio, 1e-9)), color=colour,
                  label=f"{workers} worker{'s' * (workers > 1)} ahead: min(1, {workers} / d)")  # fmt: skip
    axis.set_xlabel("d, time to make a batch / time of a step")
    axis.set_ylabel("speed, of a step without data")
    axis.set_ylim(0, 1.08)
    axis.legend(frameon=False, fontsize=8)
    return figure


def gpus() -> Figure:
    """Computing and sending of one micro-step of 8B cut over 8 cards, by tokens a card."""
    figure, axis = canvas(height=3.2)
    N, n = 8.03e9, 8
    tokens = 2.0 ** np.arange(9, 17)
    axis.plot(tokens, 6 * N * tokens / 500e12 * 1000, color=COLOURS[0], label="computing: 6 N tokens at 500 TFLOP/s")
    for colour, (link, rate) in zip(COLOURS[1:], {"NVLink, 350 GB/s": 350e9, "PCIe, 25 GB/s": 25e9}.items()):
        axis.axhline(6 * N * (n - 1) / n / rate * 1000, color=colour, label=f"sending 3 x 2 N bytes: {link}")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(tokens, [f"{int(t):,}" for t in tokens], fontsize=8)
    axis.set_xlabel("tokens of a micro-batch on each card")
    axis.set_ylabel("ms")
    axis.legend(frameon=False, fontsize=8)
    return figure


def scaling() -> Figure:
    """Speed of one to four GPUs beside as many times one, of cells with rows as long."""
    figure, panels = canvas(height=3.4, columns=2)
    lines = {
        "1b": {
            "ddp": ("1b, 1", "1b ddp, 2", "1b ddp, 4"),
            "ddp, no NVLink": ("1b, 1", "1b ddp, 2, no NVLink", "1b ddp, 4, no NVLink"),
        },
        "8b": {
            "fsdp 3": ("8b, 1, T=4096", "8b fsdp, 2, T=4096", "8b fsdp 3, 4"),
            "fsdp 2": ("8b, 1, T=4096", None, "8b fsdp 2, 4"),
            "pipeline": ("8b, 1, T=4096", "8b pipeline, 2, T=4096", "8b pipeline 4, interleaved"),
        },
    }
    runs = {name: (ranks, speed, planned) for name, ranks, speed, _, planned in guide.scaling()}
    for axis, (title, cuts) in zip(panels, lines.items(), strict=True):
        one = runs[next(iter(cuts.values()))[0]][1]
        axis.plot([1, 2, 4], [one, 2 * one, 4 * one], color="#888", lw=0.8, ls="--", label="as many times one")
        for colour, (name, which) in zip(COLOURS, cuts.items()):
            found = [runs[cell] for cell in which if cell is not None]
            axis.plot([n for n, _, _ in found], [y for _, y, _ in found], "o-", color=colour, label=name)
            axis.plot([n for n, _, _ in found], [y for _, _, y in found], "x", color=colour)
        axis.plot([], [], "x", color="#888", label="planned")
        axis.set_title(title, fontsize=10)
        axis.set_xticks([1, 2, 4])
        axis.set_xlabel("H200 of one host")
        axis.set_ylim(0)
        axis.yaxis.set_major_formatter(lambda y, _: f"{y / 1000:g}k")
        axis.legend(frameon=False, fontsize=8)
    panels[0].set_ylabel("tokens/s")
    return figure


def long_rows() -> Figure:
    """The longest row by rung."""
    figure, axis = canvas(height=3.0)
    for i, (folder, shape) in enumerate((("h200-long-context", "1B"), ("h200-long-context8", "8B"))):
        found = guide.records(folder)
        at = np.arange(len(found)) + (i - 0.5) * 0.38
        bars = axis.barh(at, [(r.longest_seq or 0) / 1000 for r in found], 0.36, color=COLOURS[i], label=shape)
        axis.bar_label(bars, [f" {(r.longest_seq or 0):,}" for r in found], fontsize=8)
    names = [r.rung if i == 0 else f"+ {r.rung}" for i, r in enumerate(guide.records("h200-long-context"))]
    axis.set_yticks(range(len(names)), names, fontsize=9)
    axis.invert_yaxis()
    axis.set_xlim(0, 390)
    axis.set_xlabel("longest row that trains, thousand tokens\n(the search ends at 307,200)")
    axis.legend(frameon=False, fontsize=8)
    return figure


def preferences() -> Figure:
    """The loss of a pair and the weight of its gradient by how far the chosen answer leads."""
    figure, (loss, weight) = canvas(columns=2, height=2.9)
    margin = np.linspace(-40, 60, 300)
    for colour, beta in zip(COLOURS, (0.05, 0.1, 0.5)):
        loss.plot(margin, np.log1p(np.exp(-beta * margin)), color=colour, label=f"beta {beta}")
        weight.plot(margin, 1 / (1 + np.exp(beta * margin)), color=colour)
    loss.plot([0], [math.log(2)], "ko", ms=4)
    loss.annotate("log 2: where it begins", (0, math.log(2)), (6, 3.2), fontsize=8, arrowprops={"arrowstyle": "-"})
    loss.set_ylim(0, 5)
    loss.set_ylabel("loss of a pair")
    weight.set_ylabel("weight of its gradient / beta")
    for axis in (loss, weight):
        axis.set_xlabel("r chosen - r rejected, nats")
    loss.legend(frameon=False, fontsize=8)
    return figure


def measuring() -> Figure:
    """Every repeat of every rung of the small ladder."""
    figure, axis = canvas(height=3.0)
    found = [r for r in guide.records("cpu-demo") if r.mode == "cumulative" and r.tokens_per_s]
    for y, r in enumerate(found):
        axis.plot(r.repeats, [y] * len(r.repeats), "o", ms=5, color=COLOURS[0], alpha=0.7)
        axis.plot([r.tokens_per_s or 0], [y], "|", ms=16, color=COLOURS[3])
        axis.text(7000, y, r.verdict, va="center", fontsize=9)
    axis.set_yticks(range(len(found)), [r.rung for r in found], fontsize=9)
    axis.set_xlim(0, 8000)
    axis.invert_yaxis()
    axis.set_xlabel("tokens/s: each repeat (dot),\nmedian of all steps (line), verdict")
    return figure


def ladder() -> Figure:
    """What each rung multiplies the speed by: its author's A100, and an H200 here."""
    figure, axis = canvas(height=3.2)
    names = [n for n in guide.SEED if "batch" not in n and "recompute" not in n] + ["batch 4", "batch 8", "batch 16"]
    here = []
    for name in names:
        r = guide.rung("h200-single-gpu", name)
        here.append((r.tokens_per_s or 0) / (guide.rung("h200-single-gpu", r.since or "").tokens_per_s or 1))
    there = [float(guide.SEED[n].partition(",")[0]) if guide.SEED[n][0].isdigit() else 0 for n in names]
    at = np.arange(len(names))
    for i, (title, values) in enumerate({"A100, its author": there, "H200, here": here}.items()):
        bars = axis.bar(at + (i - 0.5) * 0.38, values, 0.36, color=COLOURS[1 - i], label=title)
        axis.bar_label(bars, [f"{v:.2f}" if v else "" for v in values], fontsize=7)
    axis.axhline(1, color="#888", lw=0.8)
    axis.set_xticks(at, names, fontsize=8, rotation=30)
    axis.set_ylabel("x of the rung before")
    axis.legend(frameon=False, fontsize=8)
    return figure


def rewards() -> Figure:
    """The share of groups whose answers are all right or all wrong, by how often an answer is right."""
    figure, axis = canvas(height=2.9)
    right = np.linspace(0, 1, 200)
    for colour, group in zip(COLOURS, (4, 8, 16)):
        flat = 100 * (right**group + (1 - right) ** group)
        axis.plot(100 * right, flat, color=colour, label=f"{group} answers a prompt")
    axis.set_xlabel("right answers, %")
    axis.set_ylabel("groups without gradient, %")
    axis.legend(frameon=False, fontsize=8)
    return figure


def images() -> Figure:
    """The tokens of a square image, by its side, as the published processors of four families prepare it."""
    figure, axis = canvas(height=3.1)
    bases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "Qwen3-VL": (
            {"model_type": "qwen3_vl", "vision_config": {"patch_size": 16, "spatial_merge_size": 2}},
            {"size": {"shortest_edge": 65536, "longest_edge": 16777216}},
        ),
        "Mistral 3": (
            {"model_type": "mistral3", "vision_config": {"model_type": "pixtral", "patch_size": 14}},
            {"size": {"longest_edge": 1540}},
        ),
        "LLaVA 1.5": (
            {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model", "image_size": 336,
                                                      "patch_size": 14}}, {}),
        "Gemma 3": (
            {"model_type": "gemma3", "vision_config": {"model_type": "siglip_vision_model", "image_size": 896,
                                                       "patch_size": 14}}, {}),
    }  # fmt: skip
    sides = np.arange(64, 1601, 8)
    for colour, (name, (hf, given)) in zip(COLOURS, bases.items()):
        sizes = sizes_of({**hf, "text_config": {"model_type": "llama"}}, given.get, None, None)
        tokens = [sizes.tokens(sizes.grid(int(side), int(side))) for side in sides]
        axis.plot(sides, tokens, color=colour, label=name)
    axis.set_xlabel("pixels in height and width")
    axis.set_ylabel("tokens")
    axis.legend(frameon=False, fontsize=8)
    return figure


def ours() -> Figure:
    """Tokens/s of ours and of other systems that train all weights of the 1B shape in bf16."""
    figure, axis = canvas(height=1.9)
    names = {"ours, bf16": "optrush", "Trainer, bf16 weights": "Trainer with Liger", "Unsloth": "Unsloth",
             "Unsloth, stock": "Unsloth, stock"}  # fmt: skip
    speeds = [guide.rung("h200-peers", name).tokens_per_s or 0 for name in names]
    bars = axis.barh(list(names.values()), speeds, 0.62, color=[COLOURS[0], *[COLOURS[5]] * 3])
    axis.bar_label(bars, [f" {x:,.0f}" for x in speeds])
    axis.invert_yaxis()
    axis.set_xlim(0, 1.18 * max(speeds))
    axis.set_xticks([])
    axis.spines["bottom"].set_visible(False)
    axis.tick_params(axis="y", length=0)
    axis.set_title("tokens per second, all weights of a 1B model, one H200", fontsize=9, loc="left")
    return figure


def rungs(color: str, of: Callable[[Any], float], unit: str) -> Figure:
    """A figure of each rung of the ladder on one GPU."""
    found = [r for r in guide.records("h200-single-gpu") if r.mode == "cumulative" and not r.peer and r.tokens_per_s]
    figure, axis = canvas(height=0.24 * len(found) + 0.5)
    bars = axis.barh([r.rung for r in found], [of(r) for r in found], 0.7, color=color)
    axis.bar_label(bars, [f" {of(r):,.0f}" if of(r) >= 100 else f" {of(r):.1f}" for r in found], fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.14, y=0.01)
    axis.set_xlabel(unit)
    axis.tick_params(axis="y", labelsize=9)
    return figure


OF_DOCS: dict[str, Callable[[], Figure]] = {
    "ours": ours,
    "rungs-speed": lambda: rungs(COLOURS[0], lambda r: r.tokens_per_s, "tokens/s"),
    "rungs-memory": lambda: rungs(COLOURS[5], lambda r: r.peak_bytes / GIB, "peak GiB"),
}
PICTURES: dict[str, Callable[[], Figure]] = {
    "01-model": model, "02-memory": memory, "03-data": data, "04-rows": rows, "05-precision": precision,
    "06-adapters": adapters, "07-four-bits": four_bits, "08-optimizers": optimizers, "09-compile": compiled,
    "10-attention": attention, "11-kernels": kernels, "12-batch": batch, "13-loader": loader, "14-gpus": gpus,
    "14-scaling": scaling,
    "15-long-rows": long_rows, "16-preferences": preferences, "17-measuring": measuring, "18-ladder": ladder,
    "19-rewards": rewards, "20-images": images,
}  # fmt: skip


DARK = "@media (prefers-color-scheme: dark) { svg { color: #e8ecf0 } }"
STYLE = f"<style>svg {{ color: #1b2430; fill: currentColor }} {DARK}</style>"


def svg(figure: Figure, name: str) -> str:
    """Return a figure as SVG without a ground: black and the greys of letters become the color of the scheme."""
    written = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = written.getvalue()
    text = re.sub(r"<\?xml.*?<svg ", "<svg ", text, flags=re.DOTALL)
    text = re.sub(
        r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>|<!--.*?-->", "", text, flags=re.DOTALL
    )
    text = re.sub(r"font-family: [^;\"]*", "font-family: 'DejaVu Sans', Verdana, sans-serif", text)
    text = re.sub(r"#(?:000000|555555|666666)\b", "currentColor", text)
    return re.sub(r"\n\s*", "\n", text.replace(">", f">{STYLE}", 1)) + "\n"


def draw(folder: Path) -> None:
    """Write every picture: the guide's, and above them those of other pages."""
    for name, make in PICTURES.items():
        (folder / f"{name}.svg").write_text(svg(make(), name), "utf-8")
    for name, make in OF_DOCS.items():
        (folder.parent / f"{name}.svg").write_text(svg(make(), name), "utf-8")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "guide")
