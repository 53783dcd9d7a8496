"""The ledger against torch itself: real steps of published shapes on tensors without bytes, every storage counted.

The tracker (tests/memory.py) sees what eager code allocates, and is held to the allocator by its own tests. What
torch.compile allocates it does not see: the cells of benchmarks/cells.py were measured for that.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshes import further
from optrush.config import Config, parse_config
from optrush.kernels import attention
from optrush.models.shapes import SHAPES
from optrush.models.source import _published
from optrush.planner import baseline, search

from memory import supposed, track

SDPA = ("fused-adamw", "attention")
CASES = [
    # shape, implementation, techniques, rows of a micro-batch, T, micro-batches of a step
    ("llama-3.2-1b", "transformers", (), 1, 2048, 1),
    ("llama-3.2-1b", "transformers", ("amp", *SDPA), 4, 1024, 1),
    ("llama-3.2-1b", "native", ("bf16", *SDPA), 4, 1024, 2),
    ("llama-3.2-1b", "native", ("bf16", *SDPA, "fused-loss:chunk=1024"), 4, 1024, 2),
    ("llama-3.2-1b", "native", ("bf16", *SDPA, "fused-loss", "recompute"), 8, 2048, 1),
    ("llama-3.2-1b", "native", (*SDPA, "recompute"), 1, 512, 1),  # a tied weight's two gradients are the peak
    ("qwen2.5-0.5b", "native", ("amp", "fused-adamw"), 4, 1024, 1),
    ("qwen2.5-0.5b", "transformers", ("bf16", *SDPA, "recompute"), 2, 1024, 2),
    ("qwen2.5-0.5b", "native", (*SDPA, "packing"), 2, 1024, 1),
    ("qwen3-30b-a3b", "native", ("bf16", *SDPA, "fused-loss"), 2, 1024, 1),
    ("qwen3-30b-a3b", "native", ("bf16", *SDPA, "fused-loss", "fused-kernels", "recompute"), 8, 2048, 1),
]
# Blocks with other places of norms, other multipliers, layers without a rotation; linears in one tensor of the files.
ORDERS = [
    (shape, "native", (*withs, *SDPA, "fused-loss"), 4, 1024, 1)
    for shape in (
        "google/gemma-3-1b-pt",
        "allenai/OLMo-2-0425-1B",
        "HuggingFaceTB/SmolLM3-3B",
        "microsoft/Phi-4-mini-instruct",
    )
    for withs in (("bf16",), ("amp",), ("bf16", "lora"))
]
SMALL_HEAD = "fused-loss:chunk=128"
BACKWARD = [  # the peak is a block's backward pass, or the embedding's
    ("llama-3.2-1b", "native", ("bf16", *SDPA, SMALL_HEAD, "recompute"), 16, 2048, 1),
    ("llama-3.2-1b", "native", ("bf16", *SDPA, SMALL_HEAD, "recompute", "fused-kernels"), 16, 2048, 1),
    ("llama-3.2-1b", "native", ("amp", *SDPA, SMALL_HEAD, "recompute"), 8, 2048, 1),
    ("llama-3.2-1b", "native", (*SDPA, SMALL_HEAD), 8, 2048, 1),
    ("llama-3.2-1b", "native", ("bf16", *SDPA, "recompute"), 1, 256, 2),
    ("llama-3.1-8b", "native", ("bf16", *SDPA, "recompute"), 1, 256, 1),
    ("llama-3.1-8b", "native", ("bf16", *SDPA, "recompute"), 1, 256, 2),
    ("qwen3-30b-a3b", "native", ("bf16", *SDPA, "recompute", "fused-loss:chunk=64", "lora", "nf4"), 1, 4096, 1),
]
# The peak is attention's backward pass, which holds whole scores: masked, or transformers' sdpa in float32 on CUDA.
SCORES = [
    ("llama-3.2-1b", "native", (SMALL_HEAD,), 2, 2048, 1),
    ("llama-3.2-1b", "native", ("bf16", SMALL_HEAD), 2, 2048, 1),
    ("llama-3.2-1b", "transformers", ("amp", SMALL_HEAD), 2, 2048, 1),
    ("llama-3.2-1b", "transformers", (*SDPA, "recompute"), 8, 4096, 1),
    ("llama-3.2-1b", "transformers", (*SDPA, SMALL_HEAD), 8, 2048, 1),
]


def run(box: Path, shape: str, implementation: str, withs: tuple[str, ...], rows: int, T: int, times: int) -> Config:
    text = f"""
model: {{shape: {shape}, implementation: {implementation}}}
objective: pretrain
data: {{random: 32}}
batch: {{seq: {T}, tokens: {rows * T * times}, micro_tokens: {rows * T}}}
train: {{steps: 4}}
output: {box / "output"}
with: {{}}
"""
    return parse_config(text, "case", (), withs)


EVERY = [*((c, 0.05) for c in (*CASES, *ORDERS)), *((c, 0.02) for c in (*BACKWARD, *SCORES))]
WHOLE_ONLY = (
    *BACKWARD[:3],
    BACKWARD[-1],
    *SCORES[1:3],
)  # few blocks peak elsewhere; many chunks take long
QUICK = [(case, near) for case, near in EVERY if case not in WHOLE_ONLY]


@pytest.mark.parametrize(
    ("case", "near", "blocks"),
    [
        *further([(case, near, 3) for case, near in QUICK[::4] + QUICK[1::4] + QUICK[2::4] + QUICK[3::4]], 6),
        *(pytest.param(case, near, None, marks=pytest.mark.slow) for case, near in EVERY),
    ],
    ids=str,
)
def test_peak(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: tuple[str, str, tuple[str, ...], int, int, int],
    near: float,
    blocks: int | None,
) -> None:
    """Of the published number of blocks, or of a few of them, which takes a tenth of the time."""
    scored = case in SCORES
    if blocks is not None:
        sizes = {**SHAPES, **_published()}[case[0]]
        monkeypatch.setitem(SHAPES, case[0] + " here", sizes | {"num_hidden_layers": blocks})
        case = (case[0] + " here", *case[1:])
    monkeypatch.setattr(attention, "_groups", lambda q: q.dtype != torch.float32)  # as on an H200
    asked = run(tmp_path, *case)
    said = search.predict(asked, "h200").peak_bytes - baseline.CUBLAS_BYTES  # the one line that only a GPU has
    with supposed(asked) as job, sdpa_kernel(SDPBackend.MATH) if scored else nullcontext():
        found = track(job, 1, supposed=True, cuda=True)
    assert said == pytest.approx(found.peak, rel=near)
