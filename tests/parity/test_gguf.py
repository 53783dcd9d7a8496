"""A GGUF file has the model, read by the format's own package: every tensor, and what ends an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from meshes import further
from optrush.errors import NeedsError
from optrush.models.families import FAMILIES as SPECS
from optrush.models.gguf import write_gguf
from optrush.models.tiny import TEMPLATE, _tokenizer

from parity_models import FAMILIES, SIZES, reference

WIDE = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96, "vocab_size": 2050}
ROPE_PAIRS = ("llama", "llama-tied", "mistral")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return _tokenizer()


def folder(at: Path, family: str, tokenizer: Any) -> Path:
    model = reference({**FAMILIES[family], **WIDE})
    model.save_pretrained(at)
    tokenizer.save_pretrained(at, save_jinja_files=False)
    ends = [tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.eos_token_id]
    (at / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return at


def text(reader: gguf.GGUFReader, key: str) -> Any:
    return reader.fields[key].contents()


def in_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Row i of a head's first half and row i of its second half, one after the other; written out by index."""
    each = weight.shape[0] // heads
    order = [h * each + half * each // 2 + i for h in range(heads) for i in range(each // 2) for half in (0, 1)]
    return weight[order]


@pytest.mark.parametrize("kind", further(["q8_0", "bf16", "f32", "f16"], 1))
@pytest.mark.parametrize("family", sorted(name for name in FAMILIES if name in SPECS and SPECS[name].gguf))
def test_every_tensor_is_there(tmp_path: Path, tokenizer: Any, family: str, kind: Any) -> None:
    at = folder(tmp_path / "model", family, tokenizer)
    write_gguf(at, tmp_path / "m.gguf", kind, "name")
    read = {t.name: t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    sizes = {**SIZES, **FAMILIES[family]}
    short = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
             "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
             "mlp.down_proj": "ffn_down",
             "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_norm": "attn_q_norm",
             "self_attn.k_norm": "attn_k_norm"}  # fmt: skip
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
           "lm_head.weight": "output.weight"}  # fmt: skip
    weights = load_file(at / "model.safetensors")
    for name, weight in weights.items():
        if name in top:
            new = top[name]
        else:
            _, _, layer, *module, leaf = name.split(".")
            new = f"blk.{layer}.{short['.'.join(module)]}.{leaf}"
            if family in ROPE_PAIRS and module[-1] in ("q_proj", "k_proj"):
                heads = sizes["num_attention_heads" if module[-1] == "q_proj" else "num_key_value_heads"]
                weight = in_pairs(weight, heads)
        held = read.pop(new)
        assert list(held.shape)[::-1] == list(weight.shape)
        values = gguf.quants.dequantize(held.data, held.tensor_type)
        exact = kind == "f32" or weight.ndim == 1
        wanted = (
            weight if exact else weight.half() if kind == "f16" else weight.bfloat16() if kind == "bf16" else weight
        )
        off = np.abs(values - wanted.float().numpy()).max()
        assert off == 0 or (kind == "q8_0" and not exact and off <= weight.abs().max().item() / 127)
    assert set(read) == ({"rope_freqs.weight"} if family == "llama" else set())


def test_tokenizer_template_and_ends(tmp_path: Path, tokenizer: Any) -> None:
    at = folder(tmp_path / "model", "llama", tokenizer)
    write_gguf(at, tmp_path / "m.gguf", "f16", "cook")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    tokens = text(reader, "tokenizer.ggml.tokens")
    assert len(tokens) == WIDE["vocab_size"] and tokens[: len(tokenizer)] == tokenizer.convert_ids_to_tokens(
        range(len(tokenizer))
    )
    assert text(reader, "tokenizer.chat_template") == TEMPLATE and text(reader, "general.name") == "cook"
    assert text(reader, "tokenizer.ggml.eos_token_id") == tokenizer.eos_token_id
    assert text(reader, "tokenizer.ggml.eot_token_id") == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert text(reader, "tokenizer.ggml.bos_token_id") == tokenizer.bos_token_id
    assert text(reader, "tokenizer.ggml.pre") == "gpt-2" and text(reader, "llama.block_count") == 2
    merges = json.loads((at / "tokenizer.json").read_text())["model"]["merges"]
    assert text(reader, "tokenizer.ggml.merges") == [" ".join(pair) for pair in merges]


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"byte_fallback": True}, "sentencepiece"), ({"type": "Unigram"}, "Unigram"), ({}, "words split by")],
)
def test_a_tokenizer_without_a_name_there_is_refused(
    tmp_path: Path, tokenizer: Any, changes: dict[str, Any], says: str
) -> None:
    at = folder(tmp_path / "model", "llama", tokenizer)
    engine = json.loads((at / "tokenizer.json").read_text())
    engine["model"] |= changes
    if not changes:
        engine["pre_tokenizer"] = {"type": "Whitespace"}
    (at / "tokenizer.json").write_text(json.dumps(engine))
    with pytest.raises(NeedsError, match=says):
        write_gguf(at, tmp_path / "m.gguf", "f16", "name")


def test_a_rope_without_keys_there_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    at = folder(tmp_path / "model", "llama", tokenizer)
    hf = json.loads((at / "config.json").read_text())
    rope = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1000.0}
    (at / "config.json").write_text(json.dumps({**hf, "rope_parameters": rope}))
    with pytest.raises(NeedsError, match="'yarn' as GGUF"):
        write_gguf(at, tmp_path / "m.gguf", "f16", "name")
