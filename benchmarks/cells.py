"""Compare the plan with measurements it was not fitted to: other shapes, row lengths, techniques; a process a cell.

usage: cells.py OUT.jsonl [--hardware NAME] [CELL...]      measures, a JSON line a cell, as soon as it is known
       cells.py --table RESULTS.jsonl                      the table of errors as Markdown

Each cell is predicted before it is measured; cells that should not fit are tried too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from optrush.bench import record
from optrush.bench.runner import run_worker
from optrush.config import Config, dump_config, parse_config
from optrush.planner.search import predict

NATIVE: dict[str, Any] = {"attention": {}, "compile": {}, "fused-loss": {}, "fused-adamw": {}}
# name: (shape, implementation, T, rows of a micro-batch, micro-batches of a step, techniques)
CELLS: dict[str, tuple[str, str, int, int, int, dict[str, Any]]] = {
    "3b bf16 T=1024": ("llama-3.2-3b", "native", 1024, 16, 1, {"bf16": {}, **NATIVE}),
    "3b bf16 T=8192": ("llama-3.2-3b", "native", 8192, 2, 1, {"bf16": {}, **NATIVE}),
    "3b bf16 T=8192, two micro-batches": ("llama-3.2-3b", "native", 8192, 1, 2, {"bf16": {}, **NATIVE}),
    "3b amp T=1024": ("llama-3.2-3b", "native", 1024, 8, 1, {"amp": {}, **NATIVE}),
    "3b amp recompute T=8192": ("llama-3.2-3b", "native", 8192, 1, 1, {"amp": {}, "recompute": {}, **NATIVE}),
    "0.5b bf16 T=1024": ("qwen2.5-0.5b", "native", 1024, 32, 1, {"bf16": {}, **NATIVE}),
    "0.5b bf16 T=8192": ("qwen2.5-0.5b", "native", 8192, 4, 1, {"bf16": {}, **NATIVE}),
    "0.5b transformers amp compile T=8192": (
        "qwen2.5-0.5b", "transformers", 8192, 2, 1,
        {"amp": {}, "attention": {}, "compile": {"scope": "model"}, "fused-adamw": {}},
    ),
    "0.5b transformers float32 T=1024": ("qwen2.5-0.5b", "transformers", 1024, 4, 1, {}),
    "0.5b amp, no compile T=1024": ("qwen2.5-0.5b", "native", 1024, 8, 1, {"amp": {}, "attention": {}}),
    "8b amp T=1024": ("llama-3.1-8b", "native", 1024, 1, 1, {"amp": {}, **NATIVE}),
    "3b bf16 T=8192, 7 rows": ("llama-3.2-3b", "native", 8192, 7, 1, {"bf16": {}, **NATIVE}),
    "8b bf16 T=8192, 4 rows": ("llama-3.1-8b", "native", 8192, 4, 1, {"bf16": {}, **NATIVE}),
    "1b transformers amp T=2048, 32 rows": (
        "llama-3.2-1b", "transformers", 2048, 32, 1, {"amp": {}, "attention": {}, "fused-adamw": {}}
    ),
}  # fmt: skip
STEPS, WARMUP = 8, 3


def run(name: str) -> Config:
    """Return a cell's configuration."""
    shape, implementation, T, rows, times, with_ = CELLS[name]
    data = {
        "model": {"shape": shape, "implementation": implementation},
        "objective": "pretrain",
        "data": {"random": 256},
        "batch": {"seq": T, "tokens": rows * times * T, "micro_tokens": rows * T},
        "optim": {"lr": 1e-5, "schedule": "constant", "warmup": 0},
        "train": {"steps": STEPS},
        "output": "unused",
        "with": with_,
    }
    return parse_config(json.dumps(data), name)


def measure(name: str, hardware: str) -> dict[str, Any]:
    """Return the plan's prediction and the measurement of a fresh process."""
    cell = run(name)
    plan = predict(cell, hardware)
    text = dump_config(cell)
    request = {"run": text, "baseline": text, "warmup": WARMUP, "proof": {"steps": 1, "documents": 1}}
    found = run_worker(request, 240)
    speeds = found.get("tokens_per_s") or []
    return {
        "cell": name,
        "predicted_fits": plan.fits,
        "predicted_peak_bytes": plan.peak_bytes,
        "predicted_tokens_per_s": plan.tokens_per_s,
        "basis": plan.basis,
        "phase": plan.phase,
        "peak_bytes": found.get("peak_bytes"),
        "memory_kind": found.get("memory_kind"),
        "tokens_per_s": statistics.median(speeds) if speeds else None,
        "step_s": found.get("step_s"),
        "mfu": found.get("mfu"),
        "error": found.get("error"),
        "device": found.get("device"),
        "config": cell.model_dump(mode="json", by_alias=True, exclude_none=True),
        "environment": {**record.machine(), **found.get("environment", {})},
        "source": record.source(),
    }


def table(path: Path) -> str:
    """Return the table of predictions, measurements and errors."""
    rows = [
        "| cell | predicted GiB | measured GiB | error | predicted tokens/s | measured | error |",
        "|---|---|---|---|---|---|---|",
    ]
    apart: list[float] = []
    for line in path.read_text().splitlines():
        r = json.loads(line)
        start = (
            f"| {r['cell']} | {r['predicted_peak_bytes'] / 2**30:.1f}{'' if r['predicted_fits'] else ', does not fit'}"
        )
        if r["peak_bytes"] is None:
            rows.append(f"{start} | {'out of memory' if 'out of memory' in r['error'] else 'failed'} | | | | |")
            continue
        error = r["predicted_peak_bytes"] / r["peak_bytes"] - 1
        apart.append(abs(error))
        speed = r["predicted_tokens_per_s"] / r["tokens_per_s"] - 1
        rows.append(
            f"{start} | {r['peak_bytes'] / 2**30:.1f} | {error:+.1%} "
            f"| {r['predicted_tokens_per_s']:,.0f} | {r['tokens_per_s']:,.0f} | {speed:+.0%} |"
        )
    errors = f"Peaks: median error {statistics.median(apart):.1%}, largest {max(apart):.1%}."
    return "\n".join([*rows, "", errors])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("cells", nargs="*")
    parser.add_argument("--hardware", default="auto")
    parser.add_argument("--table", action="store_true")
    a = parser.parse_args()
    if a.table:
        print(table(a.file))
        return
    for name in a.cells or CELLS:
        found = measure(name, a.hardware)
        with a.file.open("a") as file:
            file.write(json.dumps(found) + "\n")
        peak = "-" if found["peak_bytes"] is None else f"{found['peak_bytes'] / 2**30:.2f}"
        speed = found["tokens_per_s"] or 0
        print(
            f"{name}: predicted {found['predicted_peak_bytes'] / 2**30:.2f} GiB, found {peak}; predicted "
            f"{found['predicted_tokens_per_s']:,.0f} tok/s, found {speed:,.0f}; {found['error'] or ''}",
            file=sys.stderr,
            flush=True,
        )


if __name__ == "__main__":
    main()
