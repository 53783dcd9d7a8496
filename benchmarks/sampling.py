"""Measure how fast answers are sampled, against what the memory's bandwidth allows.

    python benchmarks/sampling.py FILE meta-llama/Llama-3.2-1B [--slots 256] [--tokens 992] [--compile] [--profile]
    python benchmarks/sampling.py --table FILE

Random weights in bfloat16; prompts of 32 random tokens, none of which ends an answer. The ceiling reads all weights and
the keys and values of every sequence once a token, at the speed of a copy on the same device. Appends a line to FILE.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from optrush.models.decoder import Decoder
from optrush.models.sampling import Drawing, PromptIds, SamplingEngine
from optrush.models.shapes import ModelShape
from optrush.models.source import known_config

PROMPT = 32


def built(name: str, compiled: bool) -> Decoder:
    """Return a decoder of a published shape with random weights, on the GPU."""
    config = known_config(name)
    assert config is not None, f"no published configuration of {name}"
    shape = ModelShape.read(config)
    model = Decoder(shape, device=torch.device("meta"), dtype=torch.bfloat16).to_empty(device="cuda")
    model.tie()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.02) if p.dim() > 1 else p.fill_(1)
    model.set_attention("varlen")
    model.requires_grad_(False)
    if compiled:
        for module in (*model.blocks.values(), model.norm):
            module.compile(fullgraph=True, dynamic=False)
    return model


def bandwidth() -> float:
    """Return bytes a second that a copy reads and writes."""
    a = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    for _ in range(3):
        b.copy_(a)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(10):
        b.copy_(a)
    torch.cuda.synchronize()
    return 20 * a.numel() / (time.perf_counter() - began)


def measure(name: str, slots: int, tokens: int, compiled: bool, profile: bool) -> dict[str, Any]:
    """Return figures of sampling `slots` answers of `tokens` tokens, after once that compiles and records."""
    speed, model = bandwidth(), built(name, compiled)
    shape = model.shape
    rng = np.random.default_rng(0)
    prompts = [PromptIds(i, rng.integers(0, shape.vocab, PROMPT)) for i in range(slots)]
    engine, drawing = SamplingEngine(model, slots, PROMPT + tokens, tokens), Drawing(tokens, 1.0, (), 1, slots)
    engine.sample(prompts, 1, drawing)
    torch.cuda.synchronize()
    began = time.perf_counter()
    answers = engine.sample(prompts, 1, drawing)
    seconds = time.perf_counter() - began
    assert sum(len(a.ids) for a in answers) == slots * tokens
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    each = 2 * 2 * shape.kv_heads * shape.head_width * shape.layers  # bytes of a token's keys and values
    least = sum(weights + slots * each * (PROMPT + n) for n in range(tokens)) / speed
    if profile:
        print(kernels(engine))
    return {
        "shape": name, "slots": slots, "tokens": tokens, "compiled": compiled, "gpu": torch.cuda.get_device_name(),
        "tokens_per_s": slots * tokens / seconds, "ceiling_tokens_per_s": slots * tokens / least,
        "bandwidth": speed, "step_ms": 1000 * seconds / tokens, "peak_bytes": torch.cuda.max_memory_allocated(),
    }  # fmt: skip


def kernels(engine: SamplingEngine) -> str:
    """Return a table of the kernels of one step in the middle of an answer."""
    engine.live.fill_(True)
    engine.length.fill_(engine.cache.room // 2)
    engine.made.fill_(engine.most // 2)
    graph = next(iter(engine.graphs.values()))
    graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        graph.replay()
        torch.cuda.synchronize()
    return str(found.key_averages().table(sort_by="cuda_time_total", row_limit=24, max_name_column_width=70))


def table(file: Path) -> str:
    """Return the lines of a file as a table in Markdown."""
    lines = ["| model | sequences x tokens | tokens/s | of the ceiling | GPU |", "|---|---|---|---|---|"]
    for text in file.read_text().splitlines():
        r = json.loads(text)
        share = r["tokens_per_s"] / r["ceiling_tokens_per_s"]
        kind = ", compiled" if r["compiled"] else ""
        figures = f"{r['slots']} x {r['tokens']:,} | {r['tokens_per_s']:,.0f} | {share:.2f} | {r['gpu']}"
        lines.append(f"| {r['shape']}{kind} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("shape", nargs="?")
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=992)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--table", action="store_true")
    a = parser.parse_args()
    if a.table:
        print(table(a.file))
        return
    with torch.no_grad():
        found = measure(a.shape, a.slots, a.tokens, a.compile, a.profile)
    print(json.dumps(found))
    with a.file.open("a") as file:
        file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
