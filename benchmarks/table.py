"""Writes the figures of the README from the committed records; a test re-runs it and compares.

usage: table.py          rewrites README.md between its two markers
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
RECORDS = Path("benchmarks/results/h200-llama1b.jsonl")
BEGIN, END = "<!-- figures: benchmarks/table.py -->", "<!-- end of figures -->"


def table() -> str:
    """A row for each system and micro-batch: medians over the interleaved repeats, and their range."""
    groups: dict[tuple[str, int], list[dict[str, float]]] = defaultdict(list)
    device = ""
    for line in (ROOT / RECORDS).read_text().splitlines():
        record = json.loads(line)
        device = record["device"]
        groups[record.get("peer", "optrush"), record["micro_tokens"] // record["seq"]].append(record)
    rows = [
        f"Llama-3.2-1B shape, T=2048, weights and states in bf16, AdamW, random tokens, one {device}:",
        "",
        "| system | rows a micro-batch | tokens/s (range of repeats) | MFU | peak GiB |",
        "|---|---|---|---|---|",
    ]
    for (system, rows_), records in sorted(groups.items(), key=lambda g: (g[0][0], -g[0][1])):
        speeds = sorted(r["tokens_per_s"] for r in records)
        named = f"{system}, torch.compile" if system != "optrush" else "optrush: compile, sdpa, fused-loss, fused-adamw"
        rows.append(
            f"| {named} | {rows_} | {statistics.median(speeds):,.0f} ({speeds[0]:,.0f} to {speeds[-1]:,.0f}) "
            f"| {statistics.median(r['mfu'] for r in records):.1%} | {max(r['peak_gib'] for r in records):.1f} |"
        )
    rows += [
        "",
        f"From [{RECORDS}]({RECORDS}), interleaved repeats in fresh processes. optrush takes 32,768 tokens a step, so",
        "that 8 rows are two micro-batches; the plain loop takes one micro-batch a step.",
    ]
    return "\n".join(rows)


def written(readme: str) -> str:
    """The README with the figures of the records between its markers."""
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(written(path.read_text()))
