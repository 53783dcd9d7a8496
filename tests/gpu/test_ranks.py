"""Two GPUs against one: the same losses and gradient norms, through the command itself; and a resume between them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from optrush.models.tiny import write_tiny

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

CONFIG = """
model: tiny
objective: sft
data: {sample: recipes, max_samples: 120, too_long: split, eval: 0.1}
batch: {seq: 256, tokens: 4096, micro_tokens: 1024}
optim: {lr: 1e-3, schedule: constant, warmup: 0}
train: {steps: 6, log_every: 1, save_every: 3}
output: out
with: {packing: {}, fused-adamw: {}}
"""


def train(folder: Path, *flags: str) -> list[dict[str, float]]:
    """The training lines of a run in `folder`."""
    (folder / "run.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "optrush", "train", "run.yaml", *flags]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(text) for text in (folder / "out/metrics.jsonl").read_text().splitlines()]
    return [m for m in lines if "loss" in m]


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """The tiny model's folder with eight experts in each block."""
    folder = tmp_path_factory.mktemp("experts")
    write_tiny(folder)
    sizes = json.loads((folder / "config.json").read_text())
    kept = ("_size", "_heads", "_layers", "_token_id", "_embeddings")
    sizes = {key: value for key, value in sizes.items() if key.endswith(kept)}
    config = AutoConfig.for_model(
        "qwen3_moe", **sizes, head_dim=32, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return train(tmp_path_factory.mktemp("alone"))


AXES = [
    "ddp", "fsdp", "fsdp:stage=2", "fsdp:sync=each", "tensor", "tensor:sequence=true", "pipeline",
    "pipeline:schedule=interleaved", "pipeline:schedule=zero-bubble", "context ddp", "context:kind=gather fsdp",
    "deepspeed:stage=2", "deepspeed:stage=3",
]  # fmt: skip


@pytest.mark.parametrize("withs", AXES)
def test_float32(withs, alone, tmp_path):
    if withs.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    named = [text for name in withs.split() for text in ("--with", name)]
    without = ("--without", "fused-adamw") if withs.startswith("deepspeed") else ()
    found = train(tmp_path, "--ranks", "2", *named, *without)
    for a, b in zip(alone, found, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
        assert (b["tokens"], b["target_tokens"]) == (a["tokens"], a["target_tokens"])


@pytest.mark.parametrize(
    ("case", "withs"), [("experts", "fsdp experts"), ("experts", "ddp experts"), ("rows", "context:kind=ring fsdp")]
)
def test_float32_otherwise(case, withs, experts, tmp_path):
    """What needs another model; or rows of one document, and products in 16 bits."""
    (tmp_path / "one").mkdir()
    rows = ["--without", "packing", "--with", "bf16"]
    flags = {"experts": ["--set", f"model={experts}"], "rows": rows}[case]
    named = [text for name in withs.split() for text in ("--with", name)]
    alone, found = train(tmp_path / "one", *flags), train(tmp_path, "--ranks", "2", *flags, *named)
    of_losses, of_norms = {"experts": (1e-5, 1e-4), "rows": (5e-3, 3e-2)}[case]
    for a, b in zip(alone, found, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=of_losses)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=of_norms)


@pytest.mark.parametrize("precision", ["bf16", "amp", "amp:dtype=fp16"])
def test_half_precision(precision, alone, tmp_path):
    """FSDP reduces in the gradients' own type: a reduction that loses them would show in the norm."""
    found = train(tmp_path, "--ranks", "2", "--with", "fsdp", "--with", precision, "--with", "attention")
    for a, b in zip(alone[:2], found[:2], strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=5e-3)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=3e-2)


def test_two_then_one(alone, tmp_path):
    train(tmp_path, "--ranks", "2", "--with", "fsdp")
    shutil.rmtree(tmp_path / "out/checkpoints/step-000006")
    for a, b in zip(alone, train(tmp_path, "--resume", "auto"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
