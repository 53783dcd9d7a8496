"""A ladder's records as `optrush bench` would write them, and a training run's folder, without running either."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from optrush.report import page

GIB = 2**30
LOOKED_AT = (
    "test_a_ladder",
    "test_charts_of_odd_figures",
    "test_what_is_no_figure_is_a_dash",
    "test_a_run",
)  # whose pictures are drawn


@pytest.fixture(autouse=True)
def _pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures beside a page are empty where no test looks at them: they take longer than the page."""
    if request.node.originalname not in LOOKED_AT:
        monkeypatch.setattr(page, "png", lambda figure: b"")


# rung, changes, tokens/s, peak GiB, predicted tokens/s, predicted peak GiB, verdict
RUNGS: list[tuple[str, str, float | None, float | None, float, float, str]] = [
    ("eager", "", 4835, 31.4, 5120, 30.9, "baseline"),
    ("amp", "+ amp", 16420, 29.8, 17010, 30.6, "faster"),
    ("fused AdamW", "+ fused-adamw", 18230, 29.8, 18100, 29.4, "faster"),
    ("flash attention", "+ attention", 24110, 24.6, 25300, 24.1, "faster"),
    ("compile the whole model", "+ compile", 29870, 22.2, 28100, 23.4, "faster"),
    ("batch 4", "batch.micro_tokens 2048 -> 8192", 41060, 33.7, 42200, 33.1, "faster"),
    ("batch 8", "batch.micro_tokens 8192 -> 16384", 45210, 49.0, 46100, 48.2, "faster"),
    ("batch 16", "batch.micro_tokens 16384 -> 32768", 45630, 79.3, 47000, 78.0, "noise"),
    ("recompute at T=4096", "+ recompute, batch.seq 2048 -> 4096", 37020, 61.2, 36200, 63.9, "slower"),
    ("native decoder", "model.implementation native", 46890, 76.0, 47100, 75.2, "red"),
    ("fused loss", "+ fused-loss", None, None, 52000, 46.0, "baseline"),
    ("pure bf16", "+ bf16, - amp", 68878, 32.0, 69000, 31.2, "smaller"),
    ("larger micro-batch", "batch.micro_tokens 16384 -> 32768", 69851, 48.6, 71200, 47.1, "faster"),
]
WITHOUT = [
    ("compile", 51200, 60.4),
    ("attention", 58130, 52.0),
    ("fused-loss", 61020, 79.9),
    ("fused-adamw", 69600, 48.6),
]
ERROR = "CUDA out of memory. Tried to allocate 15.66 GiB\nand a second line of it"


def _record(name: str, **figures: Any) -> dict[str, Any]:
    return {
        "ladder": "single-gpu", "rung": name, "case": "llama-3.2-1b, random tokens", "mode": "cumulative",
        "since": None, "changes": "", "device": "NVIDIA H200", "ranks": 1, "seq": 2048, "micro_tokens": 32768,
        "tokens_per_s": None, "tokens_per_s_iqr": None, "repeats": [], "step_s": [], "peak_bytes": None,
        "memory_kind": None, "predicted_peak_bytes": None, "predicted_tokens_per_s": None, "basis": None, "mfu": None,
        "losses": [], "grad_norms": [], "proof": None, "verdict": "baseline", "red": [],
        "config": {"model": {"shape": "llama-3.2-1b"}},
        "environment": {"python": "3.12.3", "torch": "2.13.0+cu130", "cpu": "Intel(R) Xeon(R) Platinum, 16 threads"},
        "source": {"commit": "579b23d0c1e2f3a4b5c6d7e8f9a0b1c2d3e4f5a6", "clean": True, "digest": "8115d0382db2875a"},
        "command": "optrush bench benchmarks/llama1b.yaml --ladder single-gpu --out runs/ladder --repeats 3",
        "peer": None, "error": None, "date": "2026-11-21", **figures,
    }  # fmt: skip


def _measured(speed: float, peak: float, guess: float, guessed_peak: float, shift: float) -> dict[str, Any]:
    return {
        "tokens_per_s": speed, "tokens_per_s_iqr": [speed * 0.985, speed * 1.01], "repeats": [speed] * 3,
        "step_s": [[32768 / speed] * 5] * 3, "peak_bytes": int(peak * GIB), "memory_kind": "cuda_allocated",
        "predicted_peak_bytes": int(guessed_peak * GIB), "predicted_tokens_per_s": guess, "basis": "calibrated",
        "mfu": speed * 7.817e9 / 9.895e14, "losses": [12.17 - 0.08 * i - shift * i for i in range(8)],
        "grad_norms": [2.6] * 8,
    }  # fmt: skip


@pytest.fixture
def ladder() -> list[dict[str, Any]]:
    """13 rungs, one of them failed, one red, one noise, and four of all but one."""
    records = []
    before = None
    for i, (name, changes, speed, peak, guess, guessed_peak, verdict) in enumerate(RUNGS):
        figures: dict[str, Any] = {"changes": changes, "verdict": verdict, "since": before}
        if speed is None or peak is None:
            figures |= {"error": ERROR}
        else:
            figures |= _measured(speed, peak, guess, guessed_peak, 0.03 if verdict == "red" else 0.0002 * i)
            before = name
        if verdict == "red":
            figures["red"] = ["losses leave those of `amp` by 0.21, allowed 0.02"]
        if before not in (None, name) or i:
            proof = {"against": "eager", "numerics": "SAME_MATHS", "of": "losses", "tolerance": 0.02}
            figures["proof"] = None if speed is None else {**proof, "worst": 0.0014 * i, "ok": verdict != "red"}
            if i == 1 and speed is not None:
                figures["proof"] |= {"cosine": 0.99986541}
        records.append(_record(name, **figures))
    for name, speed, peak in WITHOUT:
        noise = "noise" if speed > 69000 else "slower"
        figures = {**_measured(speed, peak, speed * 1.03, peak * 0.98, 0.0), "mode": "without", "verdict": noise}
        records.append(_record(f"without {name}", **figures, since="larger micro-batch", changes=f"- {name}"))
    return records


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., Path]:
    """Writes records as a bench folder."""

    def written(records: list[dict[str, Any]], name: str = "climb") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        return folder

    return written


CONFIG = """\
model: tiny
objective: sft
data: {sample: recipes, eval: 0.1}
output: runs/first
with: {packing: {}, attention: {}}
"""


def _metrics() -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = [{"step": 0, "eval_loss": 8.31, "eval_target_tokens": 9120}]
    for step in range(10, 410, 10):
        loss = None if step == 200 else 2.1 + 6.1 * 0.985**step + 0.05 * ((step * 7) % 5)
        lines.append(
            {
                "step": step, "loss": loss, "lr": 2e-3 * min(1, step / 40) * (1 - step / 450),
                "grad_norm": 1 + 9 / step, "tokens": 4000, "target_tokens": 3100, "step_s": 0.5,
                "tokens_per_s": 8000.0 + step % 70, "mfu": None, "peak_bytes": int(1.1 * GIB) + step * 1000,
                "own_figure": 1.5, "memory_kind": "rss", "data_wait_s": 0.06, "skipped": step // 200,
            }
        )  # fmt: skip
        if step % 100 == 0:
            lines.append(
                {"step": step, "eval_loss": 2.4 + 5.9 * 0.985**step, "eval_target_tokens": 9120, "eval_own": 2.5}
            )
    lines.append({"step": 200, "passed_over": [{"checkpoint": "step-000200", "reason": "a hash differs"}]})
    lines.append({"step": 100, "changed": {"optim.lr": "0.002 -> 0.001"}})
    lines.append({"step": 300, "save_failed": "no space left on device"})
    lines.append({"step": 300, "workers_left": 3, "beside_steps": "12 % of the time"})
    return lines


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A training run's folder whose last line of metrics is cut off."""
    folder = tmp_path / "first"
    folder.mkdir()
    (folder / "run.yaml").write_text(CONFIG)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in _metrics()) + '{"step": 410, "lo')
    return folder


@pytest.fixture
def predicted(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A prediction that needs no plan."""
    lines = (
        SimpleNamespace(name="weights", bytes=4 * GIB // 10, reason="4 bytes a parameter"),
        SimpleNamespace(name="logits", bytes=6 * GIB // 10, reason="T x V in float32, <b>twice</b>"),
    )
    made = SimpleNamespace(
        peak_bytes=GIB, memory_kind="rss", phase="head", lines=lines, device="cpu", capacity_bytes=None, fits=True,
        tokens_per_s=7600.0, basis="calibrated",
    )  # fmt: skip
    monkeypatch.setattr("optrush.planner.search.predict", lambda *_, **__: made)
    return made
