"""What the layouts make of lengths: fill, rows, attention's work, documents planned a second, balance over 8 ranks.

    python benchmarks/layouts.py [OUT]      # appends one JSON line to OUT, default benchmarks/results/layouts.jsonl
    python benchmarks/layouts.py --picture docs/layouts.svg  # the same 24 chats in the rows of each layout

Lengths: the recipes sample as chats of the tiny tokenizer; log-normal (median 400, sigma 1, cut at T) and uniform (1 to
T), 100,000 of each with seed 0. Computed on the host; only the rates depend on the machine.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import runpy
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from recipes import conversations

from optrush.config import parse_config as config
from optrush.data import packing
from optrush.data.schema import RowLocation, parse_row
from optrush.data.tokenizer import open_tokens
from optrush.models import tiny
from optrush.models.shapes import SHAPES, ModelShape

N, RANKS = 100_000, 8
OUT = Path(__file__).parent / "results" / "layouts.jsonl"


def chats(n: int) -> np.ndarray:
    """Tokens of the first n conversations."""
    with tempfile.TemporaryDirectory() as folder:
        tiny.write_tiny(Path(folder))
        run = config("model: tiny\nobjective: sft\ndata: {sample: recipes}\noutput: x", "layouts.py")
        tokens = open_tokens(run, Path(folder))
        assert tokens is not None
        where = RowLocation(Path("recipes"), 0)
        rows = [(where, parse_row(where, {"messages": turns})) for turns in conversations(n, 0)]
        found = tokens.batch(rows, "assistant")
    return np.array([len(documents[0]) for documents in found if isinstance(documents, tuple)])


def surveyed(lengths: np.ndarray, T: int) -> list[dict[str, Any]]:
    """Rates are the best of five: they measure the code, not other load of the machine."""
    runs = [packing.survey(lengths, T, 16, 8) for _ in range(5)]
    found = [dataclasses.asdict(s) for s in runs[0]]
    for i, survey in enumerate(found):
        survey["samples_a_second"] = round(len(lengths) / min(run[i].seconds for run in runs))
        del survey["seconds"]
    return found


def balance(lengths: np.ndarray, T: int) -> dict[str, dict[str, float]]:
    """How much more FLOPs the dearest of 8 ranks has than the mean, by rows a rank and step: mean and 99th centile."""
    shape = ModelShape.read(SHAPES["llama-3.2-1b"])
    placed = packing.Packed().place(np.minimum(lengths[: packing.WINDOW], T), T, 16, 0, np.random.PCG64(0))
    cost = np.array([shape.flops(int(t), int(s)) for t, s in zip(placed.tokens(), placed.squares())])
    found = {}
    for each in (1, 2, 4, 8):
        steps = cost[: len(cost) // (each * RANKS) * each * RANKS].reshape(-1, each * RANKS)
        dealt = [[step[hand].sum() for hand in packing.deal(step.tolist(), RANKS)] for step in steps]
        in_turn = steps.reshape(len(steps), each, RANKS).sum(1)
        over = {"dealt": np.array(dealt), "in turn": in_turn}
        found[str(each)] = {
            f"{name}, {of}": float(f(sums.max(1) / sums.mean(1) - 1))
            for name, sums in over.items()
            for of, f in (("mean", np.mean), ("p99", lambda x: np.quantile(x, 0.99)))
        }
    return found


def picture(path: Path, count: int = 24, T: int = 1024, micro_rows: int = 8) -> None:
    """The first chats of the sample as bars in rows; what is grey is computed for nothing."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    lengths = np.minimum(chats(count), T)
    figure = Figure(figsize=(5.2, 5.6), layout="constrained")
    axes = figure.subplots(2, 2, sharey=True)
    for axis, (name, layout) in zip(axes.flat, packing.LAYOUTS.items(), strict=True):
        rows = layout.place(lengths, T, micro_rows, 0, np.random.PCG64(1))
        used = rows.tokens()
        for r in range(len(rows)):
            first = r - r % micro_rows
            width = packing.padded_width(int(used[first : first + micro_rows].max()), T) if layout.pad_to_longest else T
            axis.barh(r, width, color="#8883", edgecolor="none")
            at = 0
            for piece in range(rows.starts[r], rows.starts[r + 1]):
                n = int(rows.last[piece] - rows.first[piece])
                colour = colormaps["tab20"](int(rows.samples[piece]) % 20)
                axis.barh(r, n, left=at, color=colour, edgecolor="white", linewidth=0.6)
                at += n
        survey = next(s for s in packing.survey(lengths, T, micro_rows, micro_rows) if s.name == name)
        axis.set_title(f"{name}\n{len(rows)} rows, {survey.fill:.0%} text", fontsize=10)
        axis.set_xlim(0, T)
        axis.set_xticks([0, T // 2])
        axis.set_xlabel("tokens")
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(left=False)
    axes[0, 0].invert_yaxis()
    for axis in axes[:, 0]:
        axis.set_ylabel("rows")
    path.write_text(runpy.run_path(str(Path(__file__).parents[1] / "docs/pictures.py"))["svg"](figure, path.stem))


def main() -> None:
    if sys.argv[1:2] == ["--picture"]:
        picture(Path(sys.argv[2]))
        return
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else OUT
    draw = np.random.default_rng(0)
    cases = {
        "recipes, T=2048": (chats(20_000), 2048),
        "log-normal, T=4096": (np.clip(draw.lognormal(np.log(400), 1, N).astype(np.int64), 1, 4096), 4096),
        "uniform, T=4096": (draw.integers(1, 4097, N), 4096),
    }
    record = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": {"python": platform.python_version(), "numpy": np.__version__, "torch": torch.__version__},
        "cases": {
            name: {
                "samples": len(lengths),
                "mean": float(lengths.mean()),
                "longer_than_T": int((lengths > T).sum()),
                "layouts": surveyed(lengths, T),
                "imbalance_of_8_ranks_by_rows_each": balance(lengths, T),
            }
            for name, (lengths, T) in cases.items()
        },
    }
    with out.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
