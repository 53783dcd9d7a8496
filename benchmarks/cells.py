"""Compare the plan with measurements it was not fitted to: shapes, row lengths, techniques, meshes; a process a cell.

usage: cells.py OUT.jsonl [--hardware NAME] [--group GROUP] [CELL...]   measures, a JSON line a cell, at once
       cells.py --plan [--hardware NAME] [--group GROUP] [CELL...]      only predicts: what would not start is said
       cells.py --table RESULTS.jsonl                                   the table of errors as Markdown

Each cell is predicted before it is measured; cells that should not fit are tried too. Groups: `one` GPU, further
`kinds` of training on one, `two`, `four` and `eight` GPUs of one host, `cpu`: meshes of four processes without a GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from optrush.benchmark import record
from optrush.benchmark.runner import run_worker
from optrush.config import Config, dump_config, parse_config
from optrush.errors import UserError
from optrush.planner.search import predict

NATIVE: dict[str, Any] = {"attention": {}, "compile": {}, "fused-loss": {}, "fused-adamw": {}}
# What is fastest on a Hopper GPU, with the packages flash-attn-4 and quack-kernels.
FAST: dict[str, Any] = {
    "bf16": {}, "attention": {"impl": "fa4"}, "fused-kernels": {"mlp": "quack", "norm": True, "rope": True},
    "compile": {}, "fused-loss": {"impl": "quack", "chunk": 8192}, "fused-adamw": {},
}  # fmt: skip
PARTS: dict[str, Any] = {**FAST, "fused-kernels": {"norm": True, "rope": True}}  # for other products of matrices
NORMED: dict[str, Any] = {**FAST, "fused-kernels": {"mlp": "quack", "norm": True}}  # norms before the rotation
GEMMA: dict[str, Any] = {**NATIVE, "bf16": {}, "attention": {"impl": "varlen"}}  # blocks of another order
LORA: dict[str, Any] = {"lora": {"rank": 16, "alpha": 16}}
QLORA: dict[str, Any] = {**LORA, "nf4": {}}
EXPERTS: dict[str, Any] = {"lora": {"rank": 16, "alpha": 16, "targets": [
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"]}}  # fmt: skip
SMALL: dict[str, Any] = {"fused-adamw": None, "adam8bit": {}}
LEAN: dict[str, Any] = {**SMALL, "update-in-backward": {}}
# Adapters of all experts over 4 bits on a card of 24 GB.
LEAST: dict[str, Any] = {
    "lora": {**EXPERTS["lora"], "dtype": "bfloat16"}, "nf4": {}, "fused-adamw": None, "adam4bit": {},
    "update-in-backward": {}, "recompute": {}, "offload-activations": {},
}  # fmt: skip
MIXED: dict[str, Any] = {  # models with experts: kernels for what is not an expert
    "bf16": {}, "attention": {"impl": "fa4"}, "compile": {}, "fused-loss": {"impl": "quack", "chunk": 8192},
    "fused-adamw": {}, "fused-kernels": {"norm": True},
}  # fmt: skip
SUNK: dict[str, Any] = {**NATIVE, "bf16": {}, "attention": {"impl": "fa4"}}  # windows and sinks
HYBRID: dict[str, Any] = {  # what an equal dense model takes, too
    "bf16": {}, "attention": {}, "compile": {}, "fused-loss": {}, "adam8bit": {}, "update-in-backward": {},
    "recompute": {},
}  # fmt: skip
EAGER: dict[str, Any] = {  # ring sends within a block, which no graph does
    "bf16": {}, "fused-kernels": {"mlp": "quack", "norm": True, "rope": True}, "fused-loss": {}, "fused-adamw": {},
    "recompute": {},
}  # fmt: skip
ALONE = {"NCCL_P2P_DISABLE": "1"}  # links: no NVLink
SLOW = {**ALONE, "NCCL_SHM_DISABLE": "1"}  # nor shared memory


class Cell(NamedTuple):
    """A run that is predicted and measured."""

    shape: str
    seq: int
    rows: int  # of a micro-batch
    times: int  # micro-batches of a step, of a rank
    with_: dict[str, Any]
    ranks: int = 1
    implementation: str = "native"
    env: dict[str, str] = {}  # noqa: RUF012 - nobody changes it

    @property
    def tokens(self) -> int:
        """Return the tokens of a step, of all ranks that read rows of their own."""
        sharing = [
            self.with_.get(name, {}).get("size", 2) for name in ("tensor", "context", "pipeline") if name in self.with_
        ]
        data_ranks = self.ranks
        for size in sharing:
            data_ranks //= size
        return self.rows * self.times * self.seq * data_ranks


ONE = {
    "3b bf16 T=1024": Cell("llama-3.2-3b", 1024, 16, 1, {"bf16": {}, **NATIVE}),
    "3b bf16 T=8192": Cell("llama-3.2-3b", 8192, 2, 1, {"bf16": {}, **NATIVE}),
    "3b bf16 T=8192, two micro-batches": Cell("llama-3.2-3b", 8192, 1, 2, {"bf16": {}, **NATIVE}),
    "3b amp T=1024": Cell("llama-3.2-3b", 1024, 8, 1, {"amp": {}, **NATIVE}),
    "3b amp recompute T=8192": Cell("llama-3.2-3b", 8192, 1, 1, {"amp": {}, "recompute": {}, **NATIVE}),
    "0.5b bf16 T=1024": Cell("qwen2.5-0.5b", 1024, 32, 1, {"bf16": {}, **NATIVE}),
    "0.5b bf16 T=8192": Cell("qwen2.5-0.5b", 8192, 4, 1, {"bf16": {}, **NATIVE}),
    "0.5b transformers amp compile T=8192": Cell(
        "qwen2.5-0.5b", 8192, 2, 1, {"amp": {}, "attention": {}, "compile": {"scope": "model"}, "fused-adamw": {}},
        implementation="transformers",
    ),
    "0.5b transformers float32 T=1024": Cell("qwen2.5-0.5b", 1024, 4, 1, {}, implementation="transformers"),
    "0.5b amp, no compile T=1024": Cell("qwen2.5-0.5b", 1024, 8, 1, {"amp": {}, "attention": {}}),
    "8b amp T=1024": Cell("llama-3.1-8b", 1024, 1, 1, {"amp": {}, **NATIVE}),
    "3b bf16 T=8192, 7 rows": Cell("llama-3.2-3b", 8192, 7, 1, {"bf16": {}, **NATIVE}),
    "8b bf16 T=8192, 4 rows": Cell("llama-3.1-8b", 8192, 4, 1, {"bf16": {}, **NATIVE}),
    "1b transformers amp T=2048, 32 rows": Cell(
        "llama-3.2-1b", 2048, 32, 1, {"amp": {}, "attention": {}, "fused-adamw": {}}, implementation="transformers"
    ),
}  # fmt: skip
KINDS = {
    "3b lora T=2048": Cell("llama-3.2-3b", 2048, 8, 1, {**FAST, **LORA}),
    "8b lora T=8192": Cell("llama-3.1-8b", 8192, 1, 2, {**FAST, **LORA}),
    "8b qlora T=2048": Cell("llama-3.1-8b", 2048, 4, 1, {**FAST, **QLORA}),
    "3b qlora recompute T=8192": Cell("llama-3.2-3b", 8192, 4, 1, {**FAST, **QLORA, "recompute": {}}),
    "1b adam8bit T=4096": Cell("llama-3.2-1b", 4096, 4, 1, {**FAST, "fused-adamw": None, "adam8bit": {}}),
    "1b muon T=2048": Cell("llama-3.2-1b", 2048, 8, 1, {**FAST, "fused-adamw": None, "muon": {}}),
    "3b fp8 T=4096": Cell("llama-3.2-3b", 4096, 4, 1, {**PARTS, "fp8": {}}),
    "1b one long row T=65536": Cell("llama-3.2-1b", 65536, 1, 1, {**FAST, "recompute": {}}),
    "1b offload T=32768": Cell("llama-3.2-1b", 32768, 1, 1, {**FAST, "offload-activations": {}}),
    "3b update in backward T=2048": Cell(
        "llama-3.2-3b", 2048, 8, 1, {**FAST, "fused-adamw": None, "adam8bit": {}, "update-in-backward": {}}
    ),
    "0.5b transformers lora T=2048": Cell(
        "qwen2.5-0.5b", 2048, 8, 1, {"bf16": {}, "attention": {}, **LORA}, implementation="transformers"
    ),
    "30b-a3b lora of attention T=4096": Cell(
        "qwen3-30b-a3b", 4096, 1, 1, {"bf16": {}, **NATIVE, "lora": {"rank": 16, "alpha": 16, "targets": "attention"}}
    ),
    "30b-a3b lora T=4096": Cell(
        "qwen3-30b-a3b", 4096, 2, 1, {**MIXED, **EXPERTS, "selective-recompute": {"ops": "attention"}}
    ),
    "30b-a3b qlora T=4096": Cell(
        "qwen3-30b-a3b", 4096, 2, 1, {**MIXED, **LEAST, "fused-loss": {"impl": "quack", "chunk": 2048}}
    ),
    "30b-a3b qlora of attention T=4096": Cell(
        "qwen3-30b-a3b",
        4096,
        1,
        1,
        {"bf16": {}, **NATIVE, "lora": {"rank": 16, "alpha": 16, "targets": "attention"}, "nf4": {}, "recompute": {}},
    ),
    "30b-a3b full T=4096": Cell("qwen3-30b-a3b", 4096, 2, 1, {**MIXED, **LEAN, "recompute": {}}),
    "30b-a3b full T=4096, quack": Cell(
        "qwen3-30b-a3b",
        4096,
        2,
        1,
        {**MIXED, **LEAN, "recompute": {}, "fused-kernels": {"mlp": "quack", "norm": True}},
    ),
    "gpt-oss-20b qlora T=4096": Cell("gpt-oss-20b", 4096, 2, 1, {**SUNK, **LEAST, "fused-loss": {"chunk": 1024}}),
    "qwen3.5-9b T=4096": Cell("qwen3.5-9b", 4096, 2, 1, HYBRID),
    "qwen3-8b T=4096": Cell("Qwen/Qwen3-8B", 4096, 2, 1, HYBRID),
    "qwen3-0.6b T=16384": Cell("Qwen/Qwen3-0.6B", 16384, 1, 1, NORMED),
    "qwen3-0.6b lora T=4096": Cell("Qwen/Qwen3-0.6B", 4096, 8, 1, {**NORMED, **LORA}),
    "qwen3-4b T=4096": Cell("Qwen/Qwen3-4B", 4096, 2, 1, NORMED),
    "qwen3-4b selective recompute T=8192": Cell("Qwen/Qwen3-4B", 8192, 2, 1, {**NORMED, "selective-recompute": {}}),
    "qwen3-14b lora T=4096": Cell("Qwen/Qwen3-14B", 4096, 1, 1, {**NORMED, **LORA}),
    "qwen3-14b lora T=4096, 2 rows": Cell("Qwen/Qwen3-14B", 4096, 2, 1, {**NORMED, **LORA}),
    "qwen3-32b qlora T=4096": Cell("Qwen/Qwen3-32B", 4096, 1, 1, {**NORMED, **QLORA}),
    "qwen3-32b qlora recompute T=8192": Cell("Qwen/Qwen3-32B", 8192, 2, 1, {**NORMED, **QLORA, "recompute": {}}),
    "gemma-3-1b T=4096": Cell("google/gemma-3-1b-pt", 4096, 4, 1, GEMMA),
    "gemma-3-4b lora T=4096": Cell("google/gemma-3-4b-pt", 4096, 2, 1, {**GEMMA, **LORA}),
    "gemma-3-12b qlora T=4096": Cell("google/gemma-3-12b-pt", 4096, 1, 1, {**GEMMA, **QLORA}),
    "gemma-4-e4b lora T=4096": Cell("google/gemma-4-E4B", 4096, 2, 1, {**GEMMA, **LORA}),
    "gemma-4-e4b lora T=4096, sdpa": Cell("google/gemma-4-E4B", 4096, 2, 1, {**GEMMA, "attention": {}, **LORA}),
    "glm-4-9b lora T=4096": Cell("zai-org/GLM-4-9B-0414", 4096, 2, 1, {**GEMMA, **LORA}),
    "granite-3b-a800m transformers T=4096": Cell(
        "ibm-granite/granite-3.0-3b-a800m-base",
        4096,
        2,
        1,
        {"bf16": {}, "attention": {}, "fused-loss": {}, "fused-adamw": {}},
        implementation="transformers",
    ),
    "olmo2-7b lora T=4096": Cell("allenai/OLMo-2-1124-7B", 4096, 2, 1, {**GEMMA, **LORA}),
    "granite-8b least T=4096": Cell("ibm-granite/granite-3.3-8b-base", 4096, 1, 1, {**GEMMA, **LEAN, "recompute": {}}),
    "phi-4 qlora T=4096": Cell("microsoft/phi-4", 4096, 1, 1, {**NORMED, **QLORA}),
    "smollm3 T=4096": Cell("HuggingFaceTB/SmolLM3-3B", 4096, 2, 1, NORMED),
    "30b-a3b qlora of attention T=2048, no recompute": Cell(
        "qwen3-30b-a3b",
        2048,
        1,
        1,
        {"bf16": {}, **NATIVE, "lora": {"rank": 16, "alpha": 16, "targets": "attention"}, "nf4": {}},
    ),
}
RECOMPUTED = {**FAST, "selective-recompute": {}}
BASIC: dict[str, Any] = {"amp": {}, "attention": {}, "fused-loss": {}, "recompute": {}}
OTHER = {**PARTS, "fused-loss": {}, "selective-recompute": {}}
TWO = {
    "1b ddp, 2": Cell("llama-3.2-1b", 2048, 16, 1, {**FAST, "ddp": {}}, 2),
    "1b ddp, 2, no NVLink": Cell("llama-3.2-1b", 2048, 16, 1, {**FAST, "ddp": {}}, 2, env=ALONE),
    "1b ddp, 2, no NVLink, no shared memory": Cell("llama-3.2-1b", 2048, 16, 1, {**FAST, "ddp": {}}, 2, env=SLOW),
    "8b fsdp, 2, T=4096": Cell("llama-3.1-8b", 4096, 2, 1, {**RECOMPUTED, "fsdp": {}}, 2),
    "8b amp fsdp, 2, T=4096": Cell(  # as torchtitan trains: float32 weights
        "llama-3.1-8b", 4096, 2, 1, {**RECOMPUTED, "bf16": None, "amp": {}, "fsdp": {}}, 2
    ),
    "8b fsdp, 2, T=8192": Cell("llama-3.1-8b", 8192, 1, 1, {**RECOMPUTED, "fsdp": {}}, 2),
    "8b tensor, 2, T=8192": Cell("llama-3.1-8b", 8192, 1, 2, {**OTHER, "tensor": {}}, 2),
    "8b ulysses, 2, T=65536": Cell(
        "llama-3.1-8b", 65536, 1, 1, {**FAST, "recompute": {}, "context": {}, "fsdp": {}}, 2
    ),
    "8b pipeline, 2, T=4096": Cell("llama-3.1-8b", 4096, 1, 8, {**RECOMPUTED, "pipeline": {}}, 2),
    "8b ring, 2, T=65536": Cell(
        "llama-3.1-8b",
        65536,
        1,
        1,
        {**EAGER, "context": {"kind": "ring"}, "fsdp": {}},
        2,
    ),
    "8b tensor, sequence, 2, T=8192": Cell("llama-3.1-8b", 8192, 1, 2, {**OTHER, "tensor": {"sequence": True}}, 2),
    "8b fsdp 2, 2, T=4096": Cell("llama-3.1-8b", 4096, 1, 1, {**RECOMPUTED, "fsdp": {"stage": 2}}, 2),
    "8b lora ddp, 2": Cell("llama-3.1-8b", 4096, 4, 1, {**FAST, **LORA, "ddp": {}}, 2),
    "8b qlora ddp, 2": Cell("llama-3.1-8b", 4096, 4, 1, {**FAST, **QLORA, "ddp": {}}, 2),
    "8b qlora deepspeed 2, 2": Cell("llama-3.1-8b", 4096, 2, 1, {**BASIC, **QLORA, "deepspeed": {"stage": 2}}, 2),
    "8b qlora deepspeed 3, 2": Cell("llama-3.1-8b", 4096, 2, 1, {**BASIC, **QLORA, "deepspeed": {"stage": 3}}, 2),
    "1b deepspeed 3, 2": Cell("llama-3.2-1b", 2048, 8, 1, {**BASIC, "deepspeed": {"stage": 3}}, 2),
    "30b-a3b lora, experts 2": Cell(
        "qwen3-30b-a3b", 4096, 2, 1, {"bf16": {}, **NATIVE, **EXPERTS, "recompute": {}, "fsdp": {}, "experts": {}}, 2
    ),
    "8b lora fsdp, 2": Cell("llama-3.1-8b", 4096, 4, 1, {**FAST, **LORA, "fsdp": {}}, 2),
    "8b qlora fsdp, 2": Cell("llama-3.1-8b", 4096, 4, 1, {**FAST, **QLORA, "fsdp": {}}, 2),
    "70b qlora fsdp, 2, T=2048": Cell("llama-3.1-70b", 2048, 1, 1, {**FAST, **QLORA, "recompute": {}, "fsdp": {}}, 2),
    "3b bf16 fsdp, 2, of 24 GB": Cell(
        "llama-3.2-3b", 2048, 1, 8, {"bf16": {}, **NATIVE, "recompute": {}, "fsdp": {}, "memory-cap": {"mib": 24064}}, 2
    ),
}
FOUR = {
    "1b, 1": Cell("llama-3.2-1b", 2048, 16, 1, FAST),  # what ratios are of
    "8b, 1, T=4096": Cell("llama-3.1-8b", 4096, 2, 1, RECOMPUTED),
    "8b, 1, T=131072": Cell("llama-3.1-8b", 131072, 1, 1, {**FAST, "recompute": {}}),
    "1b ddp, 4": Cell("llama-3.2-1b", 2048, 16, 1, {**FAST, "ddp": {}}, 4),
    "1b ddp, 4, no NVLink": Cell("llama-3.2-1b", 2048, 16, 1, {**FAST, "ddp": {}}, 4, env=ALONE),
    "8b fsdp 2, 4": Cell("llama-3.1-8b", 4096, 2, 1, {**RECOMPUTED, "fsdp": {"stage": 2}}, 4),
    "8b fsdp 3, 4": Cell("llama-3.1-8b", 4096, 2, 1, {**RECOMPUTED, "fsdp": {}}, 4),
    "8b hsdp 2 x 2": Cell("llama-3.1-8b", 4096, 2, 1, {**RECOMPUTED, "fsdp": {"replicate": 2}}, 4),
    "8b tensor 2 x fsdp 2": Cell("llama-3.1-8b", 8192, 1, 1, {**OTHER, "tensor": {}, "fsdp": {}}, 4),
    "8b context 4, T=131072": Cell(
        "llama-3.1-8b", 131072, 1, 1, {**FAST, "recompute": {}, "context": {"size": 4}, "fsdp": {}}, 4
    ),
    "8b pipeline 4, interleaved": Cell(
        "llama-3.1-8b", 4096, 1, 16, {**RECOMPUTED, "pipeline": {"size": 4, "schedule": "interleaved"}}, 4
    ),
    "70b qlora fsdp, 4, T=2048": Cell("llama-3.1-70b", 2048, 2, 1, {**FAST, **QLORA, "recompute": {}, "fsdp": {}}, 4),
    "30b-a3b full, experts 4": Cell(
        "qwen3-30b-a3b", 4096, 1, 1,
        {"bf16": {}, **NATIVE, **SMALL, "recompute": {}, "fsdp": {}, "experts": {"size": 4}}, 4,
    ),
    "3b amp fsdp, 3, of 24 GB": Cell(
        "llama-3.2-3b", 2048, 1, 8,
        {"amp": {}, **NATIVE, "recompute": {}, "fsdp": {"sync": "each"}, "memory-cap": {"mib": 24064}}, 3,
    ),
    "3b bf16 fsdp, 3, of 24 GB": Cell(
        "llama-3.2-3b", 2048, 1, 8, {"bf16": {}, **NATIVE, "fsdp": {}, "memory-cap": {"mib": 24064}}, 3
    ),
}  # fmt: skip
EIGHT = {
    "1b ddp, 8": Cell("llama-3.2-1b", 2048, 16, 1, {**FAST, "ddp": {}}, 8),
    "1b ddp, 8, no NVLink": Cell("llama-3.2-1b", 2048, 16, 1, {**FAST, "ddp": {}}, 8, env=ALONE),
    "8b fsdp, 8, T=8192": Cell("llama-3.1-8b", 8192, 2, 1, {**RECOMPUTED, "fsdp": {}}, 8),
    "8b fsdp fp8, 8, T=8192": Cell("llama-3.1-8b", 8192, 2, 1, {**OTHER, "fp8": {}, "fsdp": {}}, 8),
    "70b lora fsdp, 8, T=4096": Cell("llama-3.1-70b", 4096, 1, 1, {**FAST, **LORA, "recompute": {}, "fsdp": {}}, 8),
    "8b tensor 2 x fsdp 4": Cell("llama-3.1-8b", 8192, 1, 1, {**OTHER, "tensor": {}, "fsdp": {}}, 8),
    "8b pipeline 2 x fsdp 4": Cell("llama-3.1-8b", 4096, 1, 8, {**RECOMPUTED, "pipeline": {}, "fsdp": {}}, 8),
    "8b context 8, T=1048576": Cell(
        "llama-3.1-8b", 1048576, 1, 1,
        {**FAST, "recompute": {}, "offload-activations": {}, "context": {"size": 8}, "fsdp": {}}, 8,
    ),
    "30b-a3b fsdp, 8, T=4096": Cell(
        "qwen3-30b-a3b", 4096, 2, 1, {"bf16": {}, **NATIVE, "recompute": {}, "fsdp": {}}, 8
    ),
}  # fmt: skip
PLAIN: dict[str, Any] = {"attention": {}, "fused-loss": {}, "fused-adamw": {}}
ON_CPU = {
    "one process": Cell("tiny", 128, 2, 4, PLAIN),
    "ddp, 4": Cell("tiny", 128, 2, 1, {**PLAIN, "ddp": {}}, 4),
    "fsdp 3, 4": Cell("tiny", 128, 2, 1, {**PLAIN, "fsdp": {}}, 4),
    "hsdp 2 x 2": Cell("tiny", 128, 2, 1, {**PLAIN, "fsdp": {"replicate": 2}}, 4),
    "tensor 2 x fsdp 2": Cell("tiny", 128, 2, 2, {**PLAIN, "tensor": {}, "fsdp": {}}, 4),
    "context 4": Cell("tiny", 128, 2, 4, {**PLAIN, "context": {"size": 4, "kind": "gather"}, "ddp": {}}, 4),
    "pipeline 2 x ddp 2": Cell("tiny", 128, 2, 2, {**PLAIN, "pipeline": {}, "ddp": {}}, 4),
}
GROUPS = {"one": ONE, "kinds": KINDS, "two": TWO, "four": FOUR, "eight": EIGHT, "cpu": ON_CPU}
STEPS, WARMUP = 8, 3


def run(name: str, cell: Cell) -> Config:
    """Return a cell's configuration."""
    model = cell.shape if cell.shape == "tiny" else {"shape": cell.shape, "implementation": cell.implementation}
    clip = {"clip": None} if "update-in-backward" in cell.with_ else {}  # which never has all gradients
    data = {
        "model": model,
        "objective": "pretrain",
        "data": {"random": max(256, STEPS * cell.tokens // cell.seq)},
        "batch": {"seq": cell.seq, "tokens": cell.tokens, "micro_tokens": cell.rows * cell.seq},
        "optim": {"lr": 1e-5, "schedule": "constant", "warmup": 0, **clip},
        "train": {"steps": STEPS},
        "output": "unused",
        "with": {name: options for name, options in cell.with_.items() if options is not None},
    }
    return parse_config(json.dumps(data), name)


def measure(name: str, cell: Cell, hardware: str, limit_s: float) -> dict[str, Any]:
    """Return the plan's prediction and the measurement of fresh processes."""
    config = run(name, cell)
    plan = predict(config, hardware, cell.ranks)
    text = dump_config(config)
    request = {
        "run": text, "baseline": text, "warmup": WARMUP, "proof": {"steps": 1, "documents": 1},
        "ranks": cell.ranks, "env": cell.env,
    }  # fmt: skip
    found = run_worker(request, limit_s)
    speeds = found.get("tokens_per_s") or []
    return {
        "cell": name,
        "ranks": cell.ranks,
        "env": cell.env,
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
        "config": config.model_dump(mode="json", by_alias=True),
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
    beside: list[float] = []
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
        beside.append(abs(speed))
        rows.append(
            f"{start} | {r['peak_bytes'] / 2**30:.1f} | {error:+.1%} "
            f"| {r['predicted_tokens_per_s']:,.0f} | {r['tokens_per_s']:,.0f} | {speed:+.0%} |"
        )
    return "\n".join([*rows, "", f"Peaks: {_errors(apart)}. Speeds: {_errors(beside)}."])


def _errors(apart: Sequence[float]) -> str:
    return f"median error {statistics.median(apart):.1%}, largest {max(apart):.1%}"


def errors(paths: Iterable[Path]) -> str:
    """Return in a sentence how far all predictions were off, and those without a layer of experts."""
    runs = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    runs = [r for r in runs if r["peak_bytes"] and r["tokens_per_s"]]
    dense = [r for r in runs if not re.match(r"30b-a3b|gpt-oss", r["cell"])]
    peak, speed = (
        lambda rs: _errors([abs(r["predicted_peak_bytes"] / r["peak_bytes"] - 1) for r in rs]),
        lambda rs: _errors([abs(r["predicted_tokens_per_s"] / r["tokens_per_s"] - 1) for r in rs]),
    )
    return (
        f"All {len(runs)} cells: peaks {peak(runs)}; speeds {speed(runs)}. The {len(dense)} without experts: peaks "
        f"{peak(dense)}; speeds {speed(dense)}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("cells", nargs="*")
    parser.add_argument("--hardware", default="auto")
    parser.add_argument("--group", choices=GROUPS, default="one")
    parser.add_argument("--limit", type=float, default=240, help="seconds a cell may take")
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--table", action="store_true")
    a = parser.parse_args()
    group = GROUPS[a.group]
    if a.plan:
        names = [n for n in [str(a.file or ""), *a.cells] if n]
        for name in names or group:
            print(planned(name, group[name], a.hardware), flush=True)
        return
    if a.table:
        print(table(a.file))
        return
    for name in a.cells or group:
        found = measure(name, group[name], a.hardware, a.limit)
        with a.file.open("a") as file:
            file.write(json.dumps(found) + "\n")
        peak = "-" if found["peak_bytes"] is None else f"{found['peak_bytes'] / 2**30:.2f}"
        speed = found["tokens_per_s"] or 0
        print(
            f"{name}: predicted {found['predicted_peak_bytes'] / 2**30:.2f} GiB, found {peak}; predicted "
            f"{found['predicted_tokens_per_s'] or 0:,.0f} tok/s, found {speed:,.0f}; {found['error'] or ''}",
            file=sys.stderr,
            flush=True,
        )


def planned(name: str, cell: Cell, hardware: str) -> str:
    """Return a cell's prediction as a line, or why it cannot start."""
    try:
        plan = predict(run(name, cell), hardware, cell.ranks)
    except UserError as error:
        return f"{name}: refused: {error.asked}: {error.found}"
    speed = f"{plan.tokens_per_s:,.0f} tok/s" if plan.tokens_per_s else "no speed"
    return f"{name}: {plan.peak_bytes / 2**30:.2f} GiB{'' if plan.fits else ', does not fit'}, {speed}"


if __name__ == "__main__":
    main()
