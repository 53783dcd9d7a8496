"""A GGUF file has the model, read by the format's own package: every tensor, and what ends an answer."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, GenerationConfig

from meshes import further
from optrush.data.tokenizer import answer_ends
from optrush.errors import NeedsError
from optrush.exporting import write_generation
from optrush.models.families import FAMILIES as SPECS
from optrush.models.gguf import ENDS_BY_TEXT, _splitting, write_gguf
from optrush.models.tiny import TEMPLATE, _tokenizer

from parity_models import FAMILIES, SIZES, reference

WIDE = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96, "vocab_size": 2050}
ROPE_PAIRS = ("llama", "llama-tied", "mistral", "smollm3", "granite")
PLAIN = {"rope_type": "default", "rope_theta": 1000.0}
# What the format has no place for, replaced.
WITH = {
    "smollm3": {"mlp_bias": False, "no_rope_layers": [1, 1]}, "olmo2": {"rope_parameters": PLAIN},
    "cohere": {"attention_bias": False}, "cohere2": {"num_hidden_layers": 4, "sliding_window_pattern": 4},
    "phi3": {"rope_parameters": {
        **FAMILIES["phi3"]["rope_parameters"], "short_factor": [1.0 + i / 8 for i in range(6)],
        "long_factor": [1.0 + i for i in range(6)],
    }},
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return _tokenizer()


def folder(at: Path, family: str, tokenizer: Any) -> Path:
    model = reference({**FAMILIES[family], **WIDE, **WITH.get(family, {})})
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
@pytest.mark.parametrize("family", sorted(n for n in FAMILIES if n in SPECS and SPECS[n].gguf))
def test_every_tensor_is_there(tmp_path, tokenizer, family, kind):
    at = folder(tmp_path / "model", family, tokenizer)
    write_gguf(at, tmp_path / "m.gguf", kind, "name")
    read = {t.name: t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    sizes = {**SIZES, **FAMILIES[family]}
    short = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
             "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
             "mlp.down_proj": "ffn_down",
             "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_norm": "attn_q_norm",
             "self_attn.k_norm": "attn_k_norm", "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up",
             "post_feedforward_layernorm": "post_ffw_norm", "post_self_attn_layernorm": "post_attention_norm",
             "post_mlp_layernorm": "post_ffw_norm"}  # fmt: skip
    short |= {"post_attention_layernorm": "post_attention_norm"} if family == "olmo2" else {}
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
    factors = {"llama": {"rope_freqs.weight"}, "phi3": {"rope_factors_long.weight", "rope_factors_short.weight"}}
    assert set(read) == factors.get(family, set())
    rope = WITH["phi3"]["rope_parameters"]
    for name in factors["phi3"] & set(read):
        assert read[name].data.tolist() == rope[f"{name.split('_')[2].removesuffix('.weight')}_factor"]


def test_keys_of_long_positions_and_of_multipliers(tmp_path, tokenizer):
    keys = {}
    for family in ("phi3", "phi3-plain", "granite", "glm4", "cohere", "cohere2"):
        write_gguf(folder(tmp_path / family, family, tokenizer), tmp_path / f"{family}.gguf", "f16", "name")
        fields = gguf.GGUFReader(tmp_path / f"{family}.gguf").fields
        keys[family] = {name.partition(".")[2]: field.contents() for name, field in fields.items()}
    phi, plain, granite, glm, cohere, cohere2 = keys.values()
    assert (cohere["logit_scale"], cohere2["logit_scale"], cohere2["attention.sliding_window"]) == (0.25, 0.5, 4)
    assert cohere["attention.layer_norm_epsilon"] == pytest.approx(1e-5) and cohere2["context_length"] == 64
    assert "attention.layer_norm_rms_epsilon" not in cohere
    assert (
        phi["rope.dimension_count"] == 12 and plain["rope.dimension_count"] == 16 and glm["rope.dimension_count"] == 8
    )
    assert phi["attention.sliding_window"] == phi["context_length"] == 4 and plain["attention.sliding_window"] == 0
    assert phi["rope.scaling.original_context_length"] == 32
    assert phi["rope.scaling.attn_factor"] == pytest.approx((1 + np.log(2) / np.log(32)) ** 0.5)
    scales = [granite[key] for key in ("embedding_scale", "attention.scale", "residual_scale", "logit_scale")]
    assert scales == pytest.approx([6.5, 0.2, 0.3, 2.5])


SPACES = {"pre_tokenizer": {"type": "Whitespace"}}


@pytest.mark.parametrize(("family", "changes", "engine", "says"), [
    ("smollm3", {"mlp_bias": True}, {}, "linears with biases"),
    ("cohere", {"attention_bias": True}, {}, "linears with biases"),
    ("cohere2", {"layer_types": ["sliding_attention", "full_attention"] * 2}, {}, "layers 1, 3 without rotary"),
    ("olmo2", {"attention_bias": True}, {}, "linears with biases"),
    ("smollm3", {"no_rope_layers": [1, 0]}, {}, "layers 1 without rotary embedding, llama.cpp expects every fourth"),
    ("olmo2", {"rope_parameters": FAMILIES["llama"]["rope_parameters"]}, {}, "files of olmo2 support default, linear"),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e3}}, {}, "'yarn' as GGUF"),
    ("llama", {}, {"byte_fallback": True}, "sentencepiece"), ("llama", {}, {"type": "Unigram"}, "Unigram"),
    ("llama", {}, SPACES, "words split by"),
])  # fmt: skip
def test_what_the_format_does_not_have_is_refused(tmp_path, tokenizer, family, changes, engine, says):
    at = folder(tmp_path / "model", family, tokenizer)
    hf, own = (json.loads((at / name).read_text()) for name in ("config.json", "tokenizer.json"))
    (own if engine is SPACES else own["model"]).update(engine)
    (at / "config.json").write_text(json.dumps({**hf, **changes}))
    (at / "tokenizer.json").write_text(json.dumps(own))
    with pytest.raises(NeedsError, match=says):
        write_gguf(at, tmp_path / "m.gguf", "f16", "name")


CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"
O200K = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}]*[\p{Ll}\p{Lm}]+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s+(?!\S)|\s+"


def split(pattern: str) -> list[dict[str, Any]]:
    return [{"type": "Split", "pattern": {"Regex": pattern}}, {"type": "ByteLevel", "use_regex": False}]


@pytest.mark.parametrize(("parts", "whole", "name"), [
    (split(CL100K), True, "llama-bpe"), (split(CL100K), False, "dbrx"), (split(O200K), False, "gpt-4o"),
    ([{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel"}], False, "smollm"),
    ([{"type": "ByteLevel"}], False, "gpt-2"),
])  # fmt: skip
def test_names_of_rules_that_split_words(parts, whole, name):
    engine = {"model": {"ignore_merges": whole}, "pre_tokenizer": {"type": "Sequence", "pretokenizers": parts}}
    assert _splitting(engine, "") == name


def test_tokenizer_template_and_ends(tmp_path, tokenizer):
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


# --- what ends an answer, by the layout of published bases: the tokenizer's eos_token, eos_token_id of
# generation_config.json, the chat template, the ends of the
# exported model.

CHATML = "{% for m in messages %}<|im_start|>{{ m['role'] + '\n' + m['content'] }}<|im_end|>\n{% endfor %}"
LLAMA3 = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}"
    "<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{% if m.tool_calls %}"
    "{{ m.tool_calls[0].function | tojson }}<|eom_id|>{% else %}{{ m['content'] }}<|eot_id|>{% endif %}{% endfor %}"
)
GEMMA = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else 'user' }}\n{{ m['content'] }}<end_of_turn>\n"
    "{% endfor %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] + eos_token }}"
    "{% else %}[INST] {{ m['content'] }} [/INST]{% endif %}{% endfor %}"
)
PHI = "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
DEEPSEEK = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<｜Assistant｜>{{ m['content'] }}<｜end▁of▁sentence｜>"
    "{% else %}<｜User｜>{{ m['content'] }}{% endif %}{% endfor %}"
)
SYSTEM_FIRST = (
    "{% if messages[0]['role'] != 'system' %}{{ raise_exception('a system turn first') }}{% endif %}" + CHATML
)
LAYOUTS: dict[str, tuple[str, Any, str | None, list[str]]] = {
    "qwen3-base": ("<|endoftext|>", "<|endoftext|>", CHATML, ["<|endoftext|>", "<|im_end|>"]),
    "qwen3": ("<|im_end|>", ["<|im_end|>", "<|endoftext|>"], CHATML, ["<|im_end|>", "<|endoftext|>"]),
    "llama3-base": ("<|end_of_text|>", "<|end_of_text|>", LLAMA3, ["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"]),
    "llama3": ("<|eot_id|>", ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"], LLAMA3,
               ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]),
    "llama3-chatml": ("<|eot_id|>", ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"], CHATML,
                      ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<|im_end|>"]),
    "gemma": ("<eos>", "<eos>", GEMMA, ["<eos>", "<end_of_turn>"]),
    "mistral": ("</s>", "</s>", MISTRAL, ["</s>"]),
    "phi3-base": ("<|endoftext|>", "<|endoftext|>", PHI, ["<|endoftext|>", "<|end|>"]),
    "smollm": ("<|endoftext|>", None, CHATML, ["<|endoftext|>", "<|im_end|>"]),
    "smollm-instruct": ("<|im_end|>", "<|im_end|>", CHATML, ["<|im_end|>"]),
    "deepseek": ("<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>", DEEPSEEK, ["<｜end▁of▁sentence｜>"]),
    "gpt-neox": ("<|endoftext|>", "</s>", None, ["</s>", "<|endoftext|>"]),
    "system-first": ("<eos>", "<eos>", SYSTEM_FIRST, ["<eos>", "<|im_end|>"]),
    "config.json": ("<|endoftext|>", ["<|endoftext|>", "<|im_end|>"], CHATML, ["<|endoftext|>", "<|im_end|>"]),
    "unknown": ("<eos>", "<eos>", "{{ messages[0]['content'] }}", ["<eos>"]),
}  # fmt: skip
MARKS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>",
    "<|start_header_id|>", "<|end_header_id|>", "<eos>", "<start_of_turn>", "<end_of_turn>", "</s>", "[INST]",
    "[/INST]", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<｜User｜>", "<｜Assistant｜>",
    "<｜end▁of▁sentence｜>",
]  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A folder of weights, to which each layout adds its tokenizer."""
    at = tmp_path_factory.mktemp("small")
    sizes = {"hidden_size": 32, "head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    reference({**FAMILIES["llama"], **WIDE, **sizes, "num_hidden_layers": 1, "vocab_size": 2100}).save_pretrained(at)
    return at


@pytest.mark.parametrize(
    ("name", "objective"),
    further([*((name, "sft") for name in LAYOUTS), *((name, "dpo") for name in LAYOUTS)], len(LAYOUTS) + 1),
)
def test_an_exported_model_stops_where_its_answers_end(small, tmp_path, name, objective):
    eos, listed, template, ends = LAYOUTS[name]
    made = _tokenizer()
    made.add_special_tokens({"eos_token": eos, "additional_special_tokens": MARKS})
    made.chat_template = template
    at = shutil.copytree(small, tmp_path / "model")
    made.save_pretrained(at, save_jinja_files=False)
    known = None if listed is None else made.convert_tokens_to_ids(listed)
    hf = {**json.loads((at / "config.json").read_text()), "eos_token_id": known} if name == "config.json" else {}
    if hf:
        (at / "config.json").write_text(json.dumps(hf))
        (at / "generation_config.json").unlink()
    elif known is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": known, "top_p": 0.5}))
    job: Any = SimpleNamespace(tokenizer=made, hf=hf, config=SimpleNamespace(objective=objective, scored=False))
    write_generation(job, at, tmp_path)
    if hf:
        assert not (at / "generation_config.json").exists(), "config.json has them all"
        found = GenerationConfig.from_model_config(AutoConfig.from_pretrained(at))
    else:
        found = GenerationConfig.from_pretrained(at)
        assert found.top_p == (None if listed is None else 0.5), "nothing else changes"
    stops = found.eos_token_id if isinstance(found.eos_token_id, list) else [found.eos_token_id]
    assert made.convert_ids_to_tokens(stops) == ends
    assert answer_ends(made, known) == stops, "where chat stops"
    write_gguf(at, tmp_path / "m.gguf", "f16", "name")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    keys = {role: f"tokenizer.ggml.{role}_token_id" for role in ("eos", "eot", "eom")}
    roles = {role: text(reader, key) for role, key in keys.items() if key in reader.fields}
    assert roles["eos"] == made.eos_token_id
    unnamed = {*stops} - {*roles.values()}
    assert not unnamed if len(stops) <= 3 else {*made.convert_ids_to_tokens([*unnamed])} <= ENDS_BY_TEXT


def test_a_scored_model_keeps_its_generation_config(small, tmp_path):
    made = _tokenizer()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    job: Any = SimpleNamespace(tokenizer=made, hf={}, config=SimpleNamespace(objective="reward", scored=True))
    (tmp_path / "out").mkdir()
    write_generation(job, tmp_path / "out", tmp_path)
    assert (tmp_path / "out" / "generation_config.json").read_text() == '{"eos_token_id": 7}'


def ending(small, at, marks, *ends):
    """A folder whose answers end with these tokens."""
    made = _tokenizer()
    made.add_special_tokens({"additional_special_tokens": marks})
    shutil.copytree(small, at)
    made.save_pretrained(at, save_jinja_files=False)
    ids = made.convert_tokens_to_ids([end or made.eos_token for end in ends])
    (at / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return at, ids


def test_an_end_of_text_that_ends_no_answer(small, tmp_path):
    """The first token that ends one is the format's eos instead."""
    at, ids = ending(small, tmp_path / "model", ["<a>", "<b>"], "<b>", "<a>")
    write_gguf(at, tmp_path / "m.gguf", "f16", "name")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert [text(reader, f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot")] == ids


def test_more_ends_than_the_format_has_roles(small, tmp_path):
    ends = ["", "<a>", "<b>", "<|im_end|>", "<c>"]
    for many in (4, 5):
        at, _ = ending(small, tmp_path / str(many), ends[1:], *ends[:many])
        with pytest.raises(NeedsError, match="5 end-of-answer tokens") if many == 5 else nullcontext():
            write_gguf(at, tmp_path / "m.gguf", "f16", "name")
