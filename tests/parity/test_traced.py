"""Plans of models that run through transformers: sizes and saved bytes are traced, and every model gets a figure."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from meshes import further
from optrush.config import Config, parse_config
from optrush.errors import ConfigError, ConflictError, NeedsError
from optrush.hardware import parse_hardware
from optrush.models import traced
from optrush.models.hf import HFModel, opened_on_meta
from optrush.models.shapes import SHAPES, ModelShape, native_obstacle
from optrush.models.trace import trace_model
from optrush.models.traced import NoPlan, TracedShape, read_traced, shape_of
from optrush.planner import answer, baseline, ledger, search
from optrush.planner.ledger import Line, WorkItem
from optrush.technique import instantiate
from optrush.techniques import ALL

from memory import check_prediction
from parity_models import EXPERTS, FAMILIES

TINY = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096, "pad_token_id": 0,
}  # fmt: skip
T = 512


def sizes(D: int, F: int, L: int, H: int, K: int, V: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": D, "intermediate_size": F, "num_hidden_layers": L, "num_attention_heads": H,
        "num_key_value_heads": K, "vocab_size": V, "max_position_embeddings": 4096, "pad_token_id": 0, **more,
    }  # fmt: skip


GEMMA2 = {
    "model_type": "gemma2", "sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
}  # fmt: skip
LFM2 = ["conv", "conv", "full_attention", *["conv", "conv", "full_attention"] * 2, *["conv", "full_attention"] * 3]
VISION = {
    "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
    "num_attention_heads": 16, "image_size": 896, "patch_size": 14,
}  # fmt: skip
NEMOTRON_H = {
    "model_type": "nemotron_h", "mamba_num_heads": 128, "mamba_head_dim": 80, "ssm_state_size": 128, "n_groups": 8,
    "conv_kernel": 4, "chunk_size": 128, "head_dim": 128,
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
}  # fmt: skip
QWEN_MOE = {
    "model_type": "qwen2_moe", "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}  # fmt: skip
GRANITE_MOE = {"model_type": "granitemoe", "num_experts_per_tok": 8, "tie_word_embeddings": True}
# As published, with the parameters in millions that their makers count (of images and text, the language model's).
PUBLISHED: dict[str, tuple[float, dict[str, Any]]] = {
    "gemma-2-2b": (2614, sizes(2304, 9216, 26, 8, 4, 256000, head_dim=256, **GEMMA2)),
    "gemma-3-1b": (1000, sizes(1152, 6912, 26, 4, 1, 262144, head_dim=256, model_type="gemma3_text")),
    "gemma-3-4b": (
        3880,
        {
            "model_type": "gemma3", "vision_config": VISION,
            "text_config": sizes(2560, 10240, 34, 8, 4, 262208, head_dim=256, model_type="gemma3_text"),
        },
    ),
    "phi-4-mini": (
        3836,
        sizes(3072, 8192, 32, 24, 8, 200064, model_type="phi3", partial_rotary_factor=0.75, tie_word_embeddings=True),
    ),
    "granite-3.3-2b": (2534, sizes(2048, 8192, 40, 32, 8, 49159, model_type="granite", tie_word_embeddings=True)),
    "olmo-2-1b": (1485, sizes(2048, 8192, 16, 16, 16, 100352, model_type="olmo2")),
    "smollm3-3b": (3075, sizes(2048, 11008, 36, 16, 4, 128256, model_type="smollm3", tie_word_embeddings=True)),
    "command-r7b": (8028, sizes(4096, 14336, 32, 32, 8, 256000, model_type="cohere2", sliding_window=4096)),
    "nemotron-nano-9b-v2": (8888, sizes(4480, 15680, 56, 40, 8, 131072, **NEMOTRON_H)),
    "lfm2-1.2b": (
        1170,
        sizes(2048, 8192, 16, 32, 8, 65536, model_type="lfm2", layer_types=[*LFM2, "conv"],
              block_ff_dim=8192, block_auto_adjust_ff_dim=False),
    ),
    "glm-4-9b": (9400, sizes(4096, 13696, 40, 32, 2, 151552, head_dim=128, model_type="glm4", attention_bias=True)),
    "starcoder2-3b": (3030, sizes(3072, 12288, 30, 24, 2, 49152, model_type="starcoder2", use_bias=True)),
    "exaone-4-1.2b": (
        1279,
        sizes(2048, 4096, 30, 32, 8, 102400, head_dim=64, model_type="exaone4", tie_word_embeddings=True),
    ),
    "pythia-1.4b": (1415, sizes(2048, 8192, 24, 16, 16, 50304, model_type="gpt_neox")),
    "gpt-j-6b": (
        6051,
        {"model_type": "gptj", "n_embd": 4096, "n_layer": 28, "n_head": 16, "rotary_dim": 64, "vocab_size": 50400,
         "n_positions": 2048},
    ),
    "bloom-1b7": (
        1722,
        {"model_type": "bloom", "hidden_size": 2048, "n_layer": 24, "n_head": 16, "vocab_size": 250880},
    ),
    "qwen1.5-moe-a2.7b": (14316, sizes(2048, 5632, 24, 16, 16, 151936, **QWEN_MOE)),
    "granite-3.0-1b-a400m": (1335, sizes(1024, 512, 24, 16, 8, 49155, **GRANITE_MOE, num_local_experts=32)),
    "granite-3.0-3b-a800m": (3299, sizes(1536, 512, 32, 24, 8, 49155, **GRANITE_MOE, num_local_experts=40)),
    "gpt2": (124, {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}),
    "command-r-08-2024": (
        32296,
        sizes(8192, 24576, 40, 64, 8, 256000, model_type="cohere", logit_scale=0.0625, tie_word_embeddings=True),
    ),
    "stablelm-2-1.6b": (
        1645,
        sizes(2048, 5632, 24, 32, 32, 100352, model_type="stablelm", use_qkv_bias=True, partial_rotary_factor=0.25),
    ),
    "falcon-h1-0.5b": (
        521,
        sizes(1024, 2048, 36, 8, 2, 32784, model_type="falcon_h1", head_dim=64, mamba_d_ssm=1536, mamba_n_heads=24,
              mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1, tie_word_embeddings=False),
    ),
    "ministral-8b": (8020, sizes(4096, 12288, 36, 32, 8, 131072, head_dim=128, model_type="ministral")),
    "hunyuan-7b": (
        7505,
        sizes(4096, 14336, 32, 32, 8, 128167, head_dim=128, model_type="hunyuan_v1_dense", tie_word_embeddings=True),
    ),
    "phi-2": (2780, sizes(2560, 10240, 32, 32, 32, 51200, model_type="phi", partial_rotary_factor=0.4)),
    # Of our own decoder.
    "qwen2.5-7b": (7616, sizes(3584, 18944, 28, 28, 4, 152064, model_type="qwen2")),
    "qwen3-8b": (8191, sizes(4096, 12288, 36, 32, 8, 151936, head_dim=128, model_type="qwen3")),
    "qwen3-30b-a3b": (
        30532,
        sizes(2048, 6144, 48, 32, 4, 151936, head_dim=128, model_type="qwen3_moe", num_experts=128,
              num_experts_per_tok=8, moe_intermediate_size=768),
    ),
    "qwen3.5-4b": (
        4206,
        sizes(2560, 9216, 32, 16, 4, 248320, head_dim=256, model_type="qwen3_5_text", tie_word_embeddings=True,
              linear_num_value_heads=32, linear_num_key_heads=16),
    ),
    "llama-3.1-8b": (8030, sizes(4096, 14336, 32, 32, 8, 128256, model_type="llama")),
    "mistral-7b": (7248, sizes(4096, 14336, 32, 32, 8, 32768, model_type="mistral", sliding_window=None)),
    "phi-3-mini": (3821, sizes(3072, 8192, 32, 32, 32, 32064, model_type="phi3", sliding_window=2047)),
    "olmo-3-7b": (7298, sizes(4096, 11008, 32, 32, 32, 100278, model_type="olmo3")),
    "ernie-4.5-0.3b": (
        361, sizes(1024, 3072, 18, 16, 2, 103424, head_dim=128, model_type="ernie4_5", tie_word_embeddings=True),
    ),
    "gpt-oss-20b": (
        20915,
        sizes(2880, 2880, 24, 64, 8, 201088, head_dim=64, model_type="gpt_oss", num_local_experts=32),
    ),
    "deepseek-v2-lite": (
        15706,
        sizes(2048, 10944, 27, 16, 16, 102400, model_type="deepseek_v2", q_lora_rank=None, num_experts_per_tok=6,
              n_routed_experts=64, n_shared_experts=2, moe_intermediate_size=1408, first_k_dense_replace=1),
    ),
    "mixtral-8x7b": (46703, sizes(4096, 14336, 32, 32, 8, 32000, model_type="mixtral")),
}  # fmt: skip
CARDS = ("4090", "h100", "h200", "a100-40", "l4")
SEVERAL = ("2xh100", "8xh200")
QUICK = ("gemma-2-2b", "gemma-3-1b", "lfm2-1.2b")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """One folder of traces for all tests of this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPTRUSH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def folder(here: Path, hf: dict[str, Any]) -> Path:
    """A folder with a config.json alone."""
    here.mkdir(exist_ok=True)
    (here / "config.json").write_text(json.dumps(hf))
    return here


def run(model: Path, with_: str | None = "{}", seq: int = 1024, rows: int = 2) -> Config:
    """A run of pre-training on random tokens; without `with_`, what is open is decided."""
    given = "" if with_ is None else f"with: {with_}\n"
    micro = "" if with_ is None else f", micro_tokens: {seq * rows}"
    text = f"model: {{path: {model}}}\nobjective: pretrain\ndata: {{random: 64}}\ntrain: {{steps: 3}}\noutput: out\n"
    return parse_config(f"{text}batch: {{seq: {seq}, tokens: {seq * rows}{micro}}}\n{given}", "case")


def trace(hf: dict[str, Any]) -> TracedShape:
    """The shape by a trace, of a family of our own decoder, too."""
    return traced._parsed(trace_model(hf), "of a test")


def kept(shape: ModelShape, widths: Any) -> float:
    """Bytes that the blocks keep of a token, scores included."""
    entries = baseline.entries(shape, T, native=False, cuda=True)
    lines = [e for e in entries if isinstance(e, Line) and e.live == "saved" and e.per_token and e.blocks > 1]
    return sum(line.values * widths[line.role] for line in lines)


def attended(shape: ModelShape) -> float:
    """Values of a token that the products after attention keep, which kernels of attention save anyway."""
    entries = baseline.entries(shape, T, native=False, cuda=True)
    return sum(e.values for e in entries if isinstance(e, Line) and e.name == "saved.attended")


# --- the trace against the ledger of our own decoder, which computes the same


GEMMA4 = {
    **TINY, "model_type": "gemma4_text", "num_hidden_layers": 4, "sliding_window": 256, "global_head_dim": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 512, "tie_word_embeddings": True,
}  # fmt: skip
NATIVE: dict[str, tuple[dict[str, Any], float]] = {
    "llama": (SHAPES["llama-3.2-1b"], 0.005),
    "qwen2": (SHAPES["qwen2.5-0.5b"], 0.005),
    "mistral": ({**TINY, "model_type": "mistral", "sliding_window": None}, 0.02),
    "qwen3": ({**TINY, "model_type": "qwen3"}, 0.05),
    "gemma2": ({**TINY, "model_type": "gemma2", "sliding_window": 256}, 0.05),
    # Of transformers' layer norm the mean and the weight are operators of their own, which keep 2 D more.
    "cohere": ({**TINY, "model_type": "cohere"}, 0.1),
    "cohere2": ({**TINY, "model_type": "cohere2", "sliding_window": 256, "num_hidden_layers": 4}, 0.1),
    "starcoder2": ({**TINY, "model_type": "starcoder2"}, 0.1),
    "gemma4": ({**GEMMA4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}, 0.06),
    "gemma4-keys": ({**GEMMA4, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True}, 0.06),
    "gemma2-uncapped": ({**TINY, "model_type": "gemma2", "attn_logit_softcapping": None}, 0.05),
}


FIRST = ("qwen3", "cohere")


@pytest.mark.parametrize("kind", further([*FIRST, *(kind for kind in NATIVE if kind not in FIRST)], len(FIRST)))
def test_a_trace_finds_what_the_ledger_has(kind):
    """Sizes exactly, saved bytes closely: the norms of queries and keys, 14 % of a small model, would be missed."""
    hf, near = NATIVE[kind]
    written, found = ModelShape.read({"architectures": ["ForCausalLM"], **hf}), trace(hf)
    assert (found.parameters, found.block_parameters) == (written.parameters, written.block_parameters)
    assert (found.block_matrices, found.width, found.vocab) == (written.block_matrices, written.width, written.vocab)
    theirs, ours = ([n.weights for n in shape.linears.values()] for shape in (found, written))
    assert (sum(theirs) == sum(ours)) if written.norms == "beside" else (sorted(theirs) == sorted(ours))
    assert found.query_width == written.layers * written.queries
    assert attended(found) == attended(written)
    for widths in (ledger.FLOAT32, ledger.BFLOAT16):
        assert kept(found, widths) == pytest.approx(kept(written, widths), rel=near)


@pytest.mark.parametrize("kind", [k for k in (*FAMILIES, *EXPERTS) if k != "llama4_text"])  # which has no such backbone
def test_sizes_of_native_families(kind):
    """Parameters of transformers' class, experts too, are those that `ModelShape` counts."""
    hf = {**FAMILIES, **EXPERTS}[kind]
    model = opened_on_meta(hf)
    model.tie_weights()
    with torch.device("meta"):
        wrapper = HFModel(model)
    written = ModelShape.read({"architectures": ["ForCausalLM"], **hf})
    assert sum(p.numel() for p in wrapper.parameters()) == written.parameters
    assert sum(p.numel() for b in wrapper.blocks.values() for p in b.parameters()) == written.block_parameters


ACTIVE = {"qwen1.5-moe-a2.7b": 2689, "granite-3.0-1b-a400m": 429, "granite-3.0-3b-a800m": 883}


@pytest.mark.parametrize("name", further([*ACTIVE], 1))
def test_matrices_that_a_token_passes(name):
    """Millions: what the names say. The work counts these, and memory all."""
    shape = shape_of(PUBLISHED[name][1])
    assert isinstance(shape, TracedShape) and 0 < shape.routed < shape.stacked < shape.matrices
    embedding = 0 if shape.tied else shape.vocab * shape.width
    assert (shape.matrix_parameters + embedding) / 1e6 == pytest.approx(ACTIVE[name], rel=5e-3)
    work = {e.name: e for e in baseline.entries(shape, T, native=False, cuda=True) if isinstance(e, WorkItem)}
    assert work["forward.experts"].flop == 2.4 * shape.routed


def test_blocks_that_return_pairs_are_traced():
    """The model takes two values of each block, from those that are not traced too."""
    mamba = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "attn_layer_indices": [1]}
    found = trace({**TINY, "model_type": "bamba", **mamba})
    assert found.layers == 2 and found.saved and not found.separates


def test_documents_that_meet_are_no_pairs(tmp_path):
    """A plan refuses what `train` would refuse; a set without `packing` is planned."""
    model = folder(tmp_path / "model", {**TINY, "model_type": "opt", "ffn_dim": 160, "word_embed_proj_dim": 64})
    assert search.predict(run(model), "h100").peak_bytes > 0
    with pytest.raises(NeedsError, match="`packing`") as error:
        search.predict(run(model, "{packing: {}}"), "h100")
    assert error.value.do == "leave packing out"
    (tmp_path / "rows.jsonl").write_text("{}\n")
    for objective in ("dpo", "orpo", "simpo", "kto", "reward"):
        text = f"model: {{path: {model}}}\nobjective: {objective}\ndata: {{path: {tmp_path}/rows.jsonl}}\noutput: out\n"
        text += "train: {steps: 3}\nbatch: {seq: 64, tokens: 128, micro_tokens: 128}\nwith: {}\n"
        with pytest.raises(NeedsError, match="rows of pairs") as error:
            search.predict(parse_config(text, "case"), "h100")
        assert "opt" in error.value.found and error.value.do == "use objective: sft"


def test_a_loop_over_experts_has_no_plan():
    """Its products depend on values, which a trace does not have."""
    hf = {**TINY, "model_type": "jetmoe", "num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 16}
    with pytest.raises(NoPlan, match="its blocks cannot be traced"):
        read_traced({**hf, "num_attention_heads": 4, "num_key_value_heads": 2})


# --- the prediction against steps on tensors without bytes


STEPS = [
    ("granite-3.0-3b-a800m", 2, "{amp: {}, attention: {}, fused-adamw: {}}"),
    ("lfm2-1.2b", 3, "{bf16: {}, attention: {}, selective-recompute: {}}"), ("gemma-2-2b", 2, "{bf16: {}}"),
    ("gemma-3-1b", 7, "{bf16: {}, attention: {}}"), ("olmo-2-1b", 6, "{amp: {}, attention: {}, fused-adamw: {}}"),
    ("phi-4-mini", 3, "{bf16: {}, attention: {}, recompute: {}, fused-loss: {}}"), ("smollm3-3b", 4, "{}"),
    ("qwen1.5-moe-a2.7b", 2, "{bf16: {}, attention: {}}"),
    ("granite-3.0-1b-a400m", 6, "{bf16: {}, attention: {}, recompute: {}, fused-loss: {}}"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "layers", "with_"), further(STEPS, 1))
def test_the_peak_of_a_step(tmp_path, name, layers, with_):
    hf = {**PUBLISHED[name][1], "num_hidden_layers": layers, "vocab_size": 4096}
    hf |= {"layer_types": hf["layer_types"][:layers]} if "layer_types" in hf else {}
    check_prediction(run(folder(tmp_path / "model", hf), with_), rel=0.07)


# --- every model on every card
@pytest.mark.parametrize("name", further([*PUBLISHED], 8))
def test_sizes_of_published_models(name):
    millions, hf = PUBLISHED[name]
    shape = shape_of(hf)
    assert shape.parameters / 1e6 == pytest.approx(millions, rel=5e-3)
    assert shape.layers * shape.width <= shape.block_parameters < shape.parameters


@pytest.mark.parametrize(
    ("name", "card"),
    further([(n, c) for n in (*QUICK, *sorted(PUBLISHED.keys() - {*QUICK})) for c in (*CARDS, *SEVERAL)], 8),
)
def test_every_model_has_a_plan_on_every_card(tmp_path, name, card):
    """A figure each; none fits only if weights in 4 bits, with the vocabulary in 16, nearly fill the card."""
    hf = PUBLISHED[name][1]
    model, shape = folder(tmp_path / "model", hf), shape_of(hf)
    device, ranks = parse_hardware(card)
    found = answer.answer(run(model, None, rows=2 * ranks), card, nearest=False)
    if found.best is None:
        vocabulary = shape.vocab * shape.width * (1 if shape.tied else 2)
        least = (shape.parameters - vocabulary) / 2 + 2 * vocabulary
        assert least > 0.6 * device.memory_bytes and found.least is not None
        return
    assert found.best.setting is not None
    prediction = found.best.setting.prediction
    assert prediction.traced == (native_obstacle(hf) is not None)
    assert prediction.fits and prediction.tokens_per_s
    assert prediction.peak_bytes > prediction.parameters / ranks / 2  # 4 bits of a share
    assert shape.separates or "packing" not in found.best.setting.with_


@pytest.mark.parametrize("kind", further([QWEN_MOE, GEMMA4, {"model_type": "stablelm"}, *(
    {"model_type": name} for name in ("gemma2", "cohere", "starcoder2")
)], 2), ids=lambda kind: kind["model_type"])  # fmt: skip
@pytest.mark.parametrize("name", [c.name for c in ALL])
def test_rules_of_each_technique_find_their_lines(tmp_path, name, kind):
    """A rule that matches nothing raises ValueError: only a need may be unmet, never a line missing."""
    hf = {**TINY, **kind, "num_key_value_heads": 4}
    model, device = folder(tmp_path / "model", hf), "2xh100"
    cls = next(c for c in ALL if c.name == name)
    base = {"bf16": {}, "ddp": {}, "lora": {}, "compile": {}}
    for left_out in ((), ("bf16", "ddp"), ("lora", "compile"), ("bf16", "ddp", "lora", "compile")):
        chosen = {n: o for n, o in base.items() if n not in left_out} | {name: dict(cls.sample)}
        config = run(model, json.dumps({n: o for n, o in chosen.items() if n == name or not _clash(n, cls)}))
        with suppress(NeedsError, ConfigError, ConflictError):
            assert search.predict(config, device if "ddp" in chosen else "h100").peak_bytes > 0


def _clash(name: str, cls: Any) -> bool:
    return bool(instantiate(ALL, {name: {}})[0].claims & cls.claims)


# --- the cache, and models without a plan
def test_a_second_plan_traces_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("OPTRUSH_CACHE", str(tmp_path))
    hf = {**TINY, "model_type": "olmo2", "vocab_size": 333}
    first = read_traced(hf)
    traced._read.cache_clear()
    monkeypatch.setattr("optrush.models.trace.trace_model", lambda hf: pytest.fail("traced again"))
    again = read_traced(hf)
    assert again == first and again.saved == first.saved and hash(again) == hash(first)
    (file,) = (tmp_path / "traces").iterdir()
    file.write_text("{")  # damaged
    traced._read.cache_clear()
    monkeypatch.undo()
    monkeypatch.setenv("OPTRUSH_CACHE", str(tmp_path))
    assert read_traced(hf) == first


def test_a_model_whose_code_is_not_transformers_own(tmp_path):
    hf = {**TINY, "model_type": "somebodys", "auto_map": {"AutoConfig": "code.Config"}}
    with pytest.raises(NoPlan, match="its code is not transformers' own"):
        read_traced(hf)
