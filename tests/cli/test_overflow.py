"""A real input that overflows: one document with a token whose embedding is finite and huge, nothing injected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from optrush.config import parse_config
from optrush.models import tiny
from optrush.resolve import resolve
from optrush.trainer.run import RunRequest
from optrush.trainer.run import run as fit

CONFIG = """
model: model
objective: pretrain
data: {path: rows.jsonl}
batch: {seq: 64, tokens: 512}
optim: {lr: 1e-3}
train: {epochs: 2, log_every: 1}
output: out
"""


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_update_is_skipped_and_the_run_goes_on(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama: the loss stays finite (its norm divides by infinity), the gradient does not. GPT-2: neither does."""
    monkeypatch.chdir(tmp_path)
    tiny.write_tiny(Path("tokenizer"))
    tokenizer = AutoTokenizer.from_pretrained("tokenizer")
    torch.manual_seed(0)
    if family == "llama":
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=2048, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
                tie_word_embeddings=False,
            )
        )  # fmt: skip
    else:
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=2048, n_positions=256, n_embd=64, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0,
                attn_pdrop=0, tie_word_embeddings=False,
            )
        )  # fmt: skip
    huge = tokenizer.convert_tokens_to_ids("Q")
    model.get_input_embeddings().weight.data[huge] = (torch.rand(64) * 2 - 1) * 3e38
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    rows = [{"text": f"number {i} is fine and good" + " Q" * (i == 17)} for i in range(64)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    assert fit(RunRequest(resolve(parse_config(CONFIG, "test")))).code == 0
    lines = [json.loads(text) for text in Path("out/metrics.jsonl").read_text().splitlines()]
    bad = [m["step"] for m in lines if m["grad_norm"] is None]
    assert len(lines) == 16 and len(bad) == 2 and lines[-1]["skipped"] == 2, "once an epoch"
    assert [m["step"] for m in lines if m["loss"] is None] == (bad if family == "gpt2" else [])
    weights = load_file("out/model/model.safetensors")
    assert all(w.isfinite().all() for w in weights.values())
    assert lines[-1]["loss"] < lines[0]["loss"]
