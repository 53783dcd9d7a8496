"""ModelShape: published counts, FIELD arithmetic by hand, both RoPE forms, windows, refusals."""

import json

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from optrush.config import parse_config
from optrush.errors import ConfigError, NeedsError
from optrush.models.families import FAMILIES
from optrush.models.shapes import SHAPES, ModelShape, RopeShape, native_obstacle, refuse_foreign
from optrush.models.source import known_config
from optrush.planner import search

TINY = {
    "model_type": "llama", "vocab_size": 100, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize(("name", "billions"), [
    ("Qwen/Qwen3-30B-A3B", 30.53), ("Qwen/Qwen3-235B-A22B", 235.09), ("openai/gpt-oss-20b", 20.91),
    ("openai/gpt-oss-120b", 116.83), ("meta-llama/Llama-3.1-405B", 405.85), ("Qwen/Qwen3.5-9B", 8.95),
    ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", 70.55), ("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", 14.77),
    ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", 32.76), ("mistralai/Mixtral-8x7B-v0.1", 46.70),
])  # fmt: skip
def test_models_that_are_planned_without_a_network(name, billions):
    """Sizes that their model cards give."""
    config = known_config(name)
    assert config is not None and round(ModelShape.read(config).parameters / 1e9, 2) == billions


@pytest.mark.parametrize(
    ("name", "parameters", "in_blocks", "in_head"),
    [
        ("llama-3.2-1b", 1_235_814_400, 973_078_528, 262_668_288),
        ("llama-3.2-3b", 3_212_749_824, 2_818_572_288, 394_002_432),
        ("llama-3.1-8b", 8_030_261_248, 6_979_321_856, 525_336_576),
        ("qwen2.5-0.5b", 494_032_768, 357_826_560, 136_134_656),
        ("qwen3-30b-a3b", 30_532_122_624, 2_730_491_904, 311_164_928),  # in blocks: of the experts that a token takes
    ],
)
def test_published_sizes(name, parameters, in_blocks, in_head):
    shape = ModelShape.read(SHAPES[name])
    assert shape.parameters == parameters
    assert shape.matrix_parameters == in_blocks + in_head
    assert native_obstacle(SHAPES[name]) is None
    assert shape.window is None


@pytest.mark.parametrize(("name", "T", "gflop"), [("llama-3.2-1b", 2048, 7.817), ("llama-3.1-8b", 4096, 48.25)])
def test_flops_a_token(name, T, gflop):
    assert ModelShape.read(SHAPES[name]).flops(T, T * T) / T / 1e9 == pytest.approx(gflop, rel=1e-3)


def test_read_fills_what_is_silent():
    shape = ModelShape.read(TINY)
    assert (shape.head_width, shape.kv_heads, shape.tied, shape.norm_eps) == (2, 2, False, 1e-6)
    assert not (shape.qkv_bias or shape.o_bias or shape.mlp_bias or shape.qk_norm)
    silent = {k: v for k, v in TINY.items() if k != "num_key_value_heads"}
    assert ModelShape.read(silent).kv_heads == 6
    qwen2 = ModelShape.read({**TINY, "model_type": "qwen2"})
    assert qwen2.qkv_bias and not qwen2.o_bias
    qwen3 = ModelShape.read({**TINY, "model_type": "qwen3", "attention_bias": True})
    assert qwen3.qk_norm and qwen3.head_width == 128 and qwen3.qkv_bias and qwen3.o_bias
    biased = ModelShape.read({**TINY, "attention_bias": True, "mlp_bias": True})
    assert biased.o_bias and biased.mlp_bias


QWEN3 = {"model_type": "qwen3", "sliding_window": 64, "use_sliding_window": True}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(("given", "want"), [
    ({}, RopeShape()), ({"rope_theta": 500.0, "rope_scaling": None}, RopeShape(theta=500.0)),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, RopeShape(theta=500.0)),
    ({"rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 3}}, RopeShape("linear", 7.0, 3.0)),
    ({"rope_parameters": {"rope_type": "linear", "factor": 3, "rope_theta": 7}}, RopeShape("linear", 7.0, 3.0)),
    ({"rope_theta": 9.0, "rope_scaling": {**LLAMA3, "type": "llama3", "original_max_position_embeddings": 64}},
        RopeShape("llama3", 9.0, 8.0, 1.0, 4.0, 64)),
    ({"max_position_embeddings": 32, "rope_parameters": {**LLAMA3, "rope_type": "llama3", "rope_theta": 9.0}},
        RopeShape("llama3", 9.0, 8.0, 1.0, 4.0, 32)),
    ({"max_position_embeddings": 32, "rope_scaling": {"type": "yarn", "factor": 2, "attention_factor": 1.5}},
        RopeShape("yarn", factor=2.0, original_max=32, scale=1.5)),
])  # fmt: skip
def test_both_forms_of_rope(given, want):
    assert ModelShape.read({**TINY, **given}).rope == want


def test_rope_that_our_decoder_lacks():
    foreign = {**TINY, "rope_scaling": {"rope_type": "proportional"}}
    assert "'proportional'" in native_obstacle(foreign)
    with pytest.raises(NeedsError, match=r"default, linear, llama3(.|\n)*implementation: transformers"):
        ModelShape.read(foreign)
    with pytest.raises(NeedsError, match="supported: default, linear, llama3"):
        native_obstacle({**TINY, "rope_scaling": {"rope_type": "yran", "factor": 4.0}})
    for given, found in (
        ({"rope_type": "linear"}, "factor is None"), ({"rope_type": "dynamic"}, "factor is None"),
        ({"rope_type": "longrope", "short_factor": [1.0, 2.0]}, "short_factor is"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=found):
            ModelShape.read({**TINY, "rope_scaling": given})


@pytest.mark.parametrize(("given", "found"), [
    ({"model_type": "gpt2"}, "model_type 'gpt2'"), ({"hidden_act": "gelu"}, "'gelu'"),
    ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ between layers"),
    ({"layer_types": ["chunked_attention"]}, "'chunked_attention'"),
])  # fmt: skip
def test_obstacles(given, found):
    assert found in native_obstacle({**TINY, **given})
    with pytest.raises(NeedsError, match="implementation: transformers"):
        ModelShape.read({**TINY, **given})


@pytest.mark.parametrize(("given", "window"), [
    ({"model_type": "mistral", "sliding_window": 64}, 64), ({"model_type": "mistral", "sliding_window": None}, None),
    ({"model_type": "mistral"}, 4096), ({"model_type": "qwen2", "sliding_window": 64}, None),
    ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3}, None),
    ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2}, 64),
    ({**QWEN3, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}, 64),
    ({"model_type": "llama", "sliding_window": 64}, None),
])  # fmt: skip
def test_windows(given, window):
    shape = ModelShape.read({**TINY, **given})
    assert shape.window == window and bool(shape.window_layers) == (window is not None)


@pytest.mark.parametrize(("given", "found"), [
    ({"num_experts": 8}, "num_experts = 8"), ({"n_routed_experts": 64}, "n_routed_experts = 64"),
    ({"vision_config": {"a": 1}}, "vision_config"), ({"text_config": {"a": 1}}, "text_config"),
    ({"is_encoder_decoder": True}, "encoder-decoder"), ({"architectures": ["BertModel"]}, "BertModel"),
    ({"quantization_config": {"quant_method": "aqlm"}}, "method aqlm"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "method gptq, 3 bits"),
])  # fmt: skip
def test_foreign_kinds(given, found):
    with pytest.raises(NeedsError, match=found):
        refuse_foreign({**TINY, **given})


def test_dense_models_pass():
    assert ModelShape.read({**TINY, "num_experts": 1}).experts is None
    assert ModelShape.read({**TINY, "model_type": "qwen3_moe", "num_experts": 0}).experts is None
    refuse_foreign({**TINY, "num_experts": None, "vision_config": None, "architectures": ["GPT2LMHeadModel"]})


@pytest.mark.parametrize(
    "given",
    [{"hidden_size": None}, {"vocab_size": 0}, {"num_key_value_heads": 4}, {"hidden_size": 13}, {"head_dim": 3}],
)
def test_sizes_that_do_not_go_together(given):
    with pytest.raises(ConfigError, match=r"from config.json"):
        ModelShape.read({**TINY, **given})


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_is_what_transformers_has(family):
    """Its class, and its defaults of what config.json leaves out, but for those that its class makes of other keys."""
    spec, config = FAMILIES[family], CONFIG_MAPPING[family]().to_dict()
    assert spec.architecture == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
    rope = config["rope_parameters"] or {}
    for key, value in spec.defaults.items():
        other = config.get(key, rope.get(key))
        assert None in (value, other) or value == other or (key == "rope_parameters" and value.items() <= other.items())


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_earlier_names_of_long_positions(name):
    """As transformers reads them in files of Phi-3."""
    factors = {"short_factor": [1.0], "long_factor": [2.0], "type": name}
    positions = {"max_position_embeddings": 64, "original_max_position_embeddings": 16}
    rope = ModelShape.read({**TINY, "model_type": "phi3", **positions, "rope_scaling": factors}).rope
    assert (rope.kind, rope.original_max, rope.long_factor) == ("longrope", 16, (2.0,))
    assert native_obstacle({**TINY, "model_type": "phi3", "resid_pdrop": 0.1}).startswith("resid_pdrop 0.1")


@pytest.mark.parametrize(("family", "given", "found"), [
    ("gemma3_text", {"num_hidden_layers": None}, "num_hidden_layers is None"),
    ("gemma3_text", {"layer_types": ["sliding_attention"]}, "1 values in layer_types"),
    ("smollm3", {"no_rope_layers": [1]}, "1 values in no_rope_layers"),
    ("granite", {"residual_multiplier": 0}, "residual_multiplier is 0"),
    ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping is -1.0"),
    ("gemma2", {"attn_logit_softcapping": float("inf")}, "attn_logit_softcapping is inf"),
    ("gemma2", {"final_logit_softcapping": "30"}, "final_logit_softcapping is '30'"),
    ("gemma2", {"final_logit_softcapping": True}, "final_logit_softcapping is True"),
    ("cohere", {"logit_scale": 0}, "logit_scale is 0"),
    ("olmo3", {"max_position_embeddings": None, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        "max_position_embeddings is None"),
])  # fmt: skip
def test_values_that_a_family_cannot_have(family, given, found):
    sizes = {
        "model_type": family, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 99,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=found):
        ModelShape.read({**sizes, **given})


def test_a_bound_of_logits_is_of_the_families_that_read_it():
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 99}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "final_logit_softcapping": 30.0}
    assert ModelShape.read({"model_type": "llama", **sizes}).softcap is None
    assert ModelShape.read({"model_type": "gemma3_text", **sizes}).softcap == 30.0
    gemma2 = {"model_type": "gemma2", **sizes, "attn_logit_softcapping": None}
    assert (ModelShape.read(gemma2).softcap, ModelShape.read(gemma2).score_cap) == (30.0, None)
    del gemma2["attn_logit_softcapping"]
    assert ModelShape.read(gemma2).score_cap == 50.0  # of its class


CAPPED = [
    {"attention": {}}, {"attention": {"impl": "varlen"}}, {"attention": {"impl": "cudnn"}},
    {"attention": {"impl": "fa4"}}, {"context": {"size": 2}}, {"longlora": {}},
]  # fmt: skip


@pytest.mark.parametrize("with_", CAPPED, ids=str)
def test_capped_scores_refuse_what_leaves_the_cap_out(with_, tmp_path):
    """`masked` computes them, and so does a model without the cap in every kernel."""
    sizes = {
        "model_type": "gemma2", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 4096,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    text = f"model: {{path: {tmp_path}}}\nobjective: pretrain\ndata: {{random: 64}}\ntrain: {{steps: 3}}\n"
    text += "output: out\nbatch: {seq: 256, tokens: 512, micro_tokens: 512}\n"
    techniques = {"bf16": {}, **with_}
    card = "2xh100" if "context" in with_ else "h100"
    with pytest.raises(NeedsError) as error:
        search.predict(parse_config(f"{text}with: {json.dumps(techniques)}", "case"), card)
    assert "attn_logit_softcapping" in error.value.found or "capped scores" in error.value.found
    masked = parse_config(f"{text}with: {{bf16: {{}}, attention: {{impl: masked}}}}", "case")
    held = search.predict(masked, "h100").peak_bytes
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "attn_logit_softcapping": None}))
    assert search.predict(masked, "h100").peak_bytes < held


def test_a_language_model_that_a_published_base_leaves_to_its_class():
    """LLaVA's text_config names what differs from the class of Llama alone."""
    text = {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
    hf = {"model_type": "llava", "text_config": text, "vision_config": {"model_type": "clip_vision_model"}}
    own, want = ModelShape.read(hf), CONFIG_MAPPING["llama"](**{key: text[key] for key in text if key != "model_type"})
    assert native_obstacle(hf) is None
    assert (own.width, own.ff_width, own.layers) == (want.hidden_size, want.intermediate_size, want.num_hidden_layers)
    assert (own.heads, own.kv_heads, own.vocab) == (want.num_attention_heads, want.num_key_value_heads, 32064)
    assert "hidden_size" in (native_obstacle({**hf, "model_type": "llava_next"}) or "")
