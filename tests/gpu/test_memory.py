"""A lack of memory as CUDA has it: the rehearsal, halving, and the cap; through the command itself."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from optrush.config import parse_config

# 4 layers of 512 with 128,256 tokens of vocabulary: whole float32 logits of 32 rows take 16 GiB.
CONFIG = """
model: model
objective: pretrain
data: {random: 64, eval: 0.25}
batch: {seq: 1024, tokens: 32768, micro_tokens: 32768}
optim: {lr: 1e-4, schedule: constant, warmup: 0}
train: {steps: 3, log_every: 1}
output: out
with: {fused-adamw: {}, attention: {impl: sdpa}}
"""
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 512,
    "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("small") / "model"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{k: v for k, v in SHAPE.items() if k != "architectures"})).save_pretrained(folder)
    return folder


def train(folder: Path, model: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    (folder / "run.yaml").write_text(CONFIG.replace("model: model", f"model: {model}"))
    command = [sys.executable, "-m", "optrush", "train", "run.yaml", *flags]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (folder / "out/metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [m["loss"] for m in lines(folder) if "loss" in m]


def test_what_does_not_fit_is_refused_before_step_0(model, tmp_path):
    done = train(tmp_path, model, "--with", "memory-cap:mib=16000")
    assert done.returncode == 2, done.stderr[-3000:]
    assert "micro-batches of 32 rows of 1024 tokens" in done.stderr and "CUDA out of memory" in done.stderr
    assert "set batch.micro_tokens: 16384, or auto" in done.stderr and not (tmp_path / "out").exists()


@pytest.mark.parametrize("more", [(), ("--with", "compile")], ids=["eager", "compile"])
def test_halving_finds_what_fits(model, tmp_path, more):
    """Under a cap 32 rows do not fit; the run that is halved learns what the run without a cap learns."""
    for name, flags in (("free", ()), ("capped", ("--with", "memory-cap:mib=16000", "--with", "micro-batch"))):
        (tmp_path / name).mkdir()
        done = train(tmp_path / name, model, *flags, *more)
        assert done.returncode == 0, done.stderr[-3000:]
    found = parse_config((tmp_path / "capped/out/run.yaml").read_text(), "run.yaml")
    assert isinstance(found.batch.micro_tokens, int) and found.batch.micro_tokens < 32768
    assert losses(tmp_path / "capped") == pytest.approx(losses(tmp_path / "free"), rel=1e-4)
    for line in lines(tmp_path / "capped"):
        assert line.get("peak_bytes", 0) <= 16000 << 20


def test_auto_under_a_cap(model, tmp_path):
    """The prediction fits at once, or nearly: the size that is written fits under the cap."""
    done = train(tmp_path, model, "--with", "memory-cap:mib=16000", "--set", "batch.micro_tokens=auto")
    assert done.returncode == 0, done.stderr[-3000:]
    found = parse_config((tmp_path / "out/run.yaml").read_text(), "run.yaml")
    print(f"auto took {found.batch.micro_tokens}")
    assert isinstance(found.batch.micro_tokens, int) and found.batch.micro_tokens < 32768


def test_equal_bits_below_the_cap(model, tmp_path):
    for name, flags in (("free", ()), ("capped", ("--with", "memory-cap:fraction=0.9"))):
        (tmp_path / name).mkdir()
        done = train(tmp_path / name, model, "--set", "batch.micro_tokens=4096", *flags)
        assert done.returncode == 0, done.stderr[-3000:]
    assert losses(tmp_path / "capped") == pytest.approx(losses(tmp_path / "free"), rel=1e-6)


@pytest.mark.parametrize("withs", [(), ("bf16", "compile", "fused-loss"), ("amp:dtype=fp16",)], ids="+".join)
def test_the_rehearsal_changes_no_bit(tmp_path, model, withs):
    """Weights, states, scale and both random states, with the kernels of a GPU."""
    from optrush.decide import decide
    from optrush.trainer import run as rehearse
    from optrush.trainer.build import build
    from optrush.trainer.trainer import RunPlan

    text = CONFIG.replace("model: model", f"model: {model}")
    config = parse_config(text, "x", ["batch.micro_tokens=4096", "batch.tokens=8192"], withs)
    trainer = build(decide(config))
    before = [t.local.clone() for t in trainer.trained]
    states = {n: {k: s.clone() for k, s in by.items()} for n, by in trainer.optimizer.state().items()}
    random, scale = torch.cuda.get_rng_state(), trainer.scale.item()
    assert rehearse.preflight(trainer, RunPlan(trainer, trainer.stream.plan(None, 3))) is None
    assert all(torch.equal(a, t.local) for a, t in zip(before, trainer.trained))
    assert torch.equal(random, torch.cuda.get_rng_state()) and trainer.scale.item() == scale
    for name, by in trainer.optimizer.state().items():
        assert all(torch.equal(states[name][k], s) for k, s in by.items()), name


def test_what_is_released_goes_back_to_the_device(model):
    from optrush.decide import decide
    from optrush.trainer import run
    from optrush.trainer.build import build

    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    trainer = build(decide(parse_config(CONFIG.replace("model: model", f"model: {model}"), "x")))
    held = torch.cuda.memory_allocated() - before
    run.release_memory(trainer)
    assert torch.cuda.memory_allocated() - before < 0.02 * held


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("data", ["ddp", "fsdp"])
def test_two_ranks_begin_again(model, tmp_path, data):
    flags = ("--ranks", "2", "--with", data, "--with", "micro-batch", "--with", "memory-cap:mib=12000")
    done = train(tmp_path, model, "--set", "batch.tokens=65536", *flags)
    assert done.returncode == 0, done.stderr[-3000:]
    found = parse_config((tmp_path / "out/run.yaml").read_text(), "run.yaml")
    assert isinstance(found.batch.micro_tokens, int) and found.batch.micro_tokens < 32768
    assert len(losses(tmp_path)) == 3
