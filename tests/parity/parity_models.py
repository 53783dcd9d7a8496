"""Tiny random Hugging Face models with nothing trivial in them, and the few lines that give one of ours real memory."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from optrush.data.batch import Batch, collate
from optrush.data.schema import Document
from optrush.models.weights import WeightMap

transformers_logging.disable_progress_bar()
torch.set_num_threads(1)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 1000.0,
}
SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "llama": {**SIZES, "model_type": "llama", "attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3},
    "llama-tied": {
        **SIZES,
        "model_type": "llama",
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    },
    "mistral": {**SIZES, "model_type": "mistral", "sliding_window": None, "rope_theta": 5000.0},
    "qwen2": {**SIZES, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {**SIZES, "model_type": "qwen3", "attention_bias": True, "num_key_value_heads": 4},
}


def reference(sizes: dict, *, seed: int = 0) -> torch.nn.Module:
    """A transformers model in float32 whose every parameter, norms and biases too, is drawn away from its default."""
    config = AutoConfig.for_model(**sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.3 if parameter.ndim > 1 else parameter + noise * 0.2)
    return model


def reference_loss(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and summed loss by transformers itself; documents are told by their restarting positions."""
    logits = model(input_ids=batch.tokens, position_ids=batch.positions.long(), use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
    return logits, loss


def compare_gradients(ours: torch.nn.Module, recipe: WeightMap, theirs: torch.nn.Module) -> int:
    """Every gradient of ours, brought into transformers' layout, against its own; how many tensors were compared."""
    grads = {name: p.grad for name, p in theirs.named_parameters()}
    seen = set()
    for name, parameter in ours.named_parameters():
        for hf_name, part in recipe.split(name, parameter.grad):
            want = grads[hf_name]
            torch.testing.assert_close(part, want, rtol=1e-4, atol=1e-4 * want.abs().max().item(), msg=hf_name)
            assert want.abs().max() > 0 or hf_name.endswith("k_proj.bias"), hf_name
            seen.add(hf_name)
    assert seen == set(grads)
    return len(seen)


def save(model: torch.nn.Module, folder: Path, **options: object) -> dict:
    """Written by transformers itself; the config.json that it wrote."""
    model.save_pretrained(folder, **options)
    return json.loads((folder / "config.json").read_text())


def materialise(model: torch.nn.Module, recipe: WeightMap) -> torch.nn.Module:
    """What assembly does, in one process: allocate, tie again, fill, restore buffers."""
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))  # whatever the recipe leaves out shows
    model.tie()
    for name, parameter in model.named_parameters():
        recipe.fill(name, parameter.data, (0,) * parameter.ndim)
    model.restore_buffers(torch.device("cpu"))
    return model


def packed(lengths: list[list[int]], T: int, vocab: int, *, seed: int = 0, single: bool = False) -> Batch:
    """A batch whose row b holds documents of these lengths, of random tokens, all learnt but the first."""
    rng = np.random.default_rng(seed)

    def document(n: int) -> Document:
        return Document(rng.integers(0, vocab, n).astype(np.int32), np.arange(n) > 0)

    rows = [[(i, document(n)) for i, n in enumerate(row)] for row in lengths]
    return collate(rows, T, single=single, most=sum(map(len, lengths)) + len(lengths))
