"""The loss of a run as a picture: `loss.png` in the run's folder."""

from __future__ import annotations

import json
from pathlib import Path


def plot(metrics: Path, picture: Path, unit: str) -> None:
    """Training and held-out loss over the steps, from metrics.jsonl; `unit` is what it is counted in."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = [json.loads(text) for text in metrics.read_text().splitlines()]
    train = [(m["step"], m["loss"]) for m in lines if m.get("loss") is not None]
    held = [(m["step"], m["eval_loss"]) for m in lines if m.get("eval_loss") is not None]
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if train:
        axes.plot(*zip(*train), label="training loss", color="#2563eb", linewidth=1.6)
    if held:
        axes.plot(*zip(*held), "o-", label="held-out loss", color="#ea580c", linewidth=1.6, markersize=5)
    axes.set(xlabel="step", ylabel=f"loss, {unit}", title=metrics.resolve().parent.name)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if train or held:
        axes.legend(frameon=False)
    figure.savefig(picture)
