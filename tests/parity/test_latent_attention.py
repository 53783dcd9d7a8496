"""Latent attention beyond its parity (test_native.py): published sizes, adapters, a plan, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from optrush import config as configuration
from optrush.decide import decide
from optrush.errors import ConfigError, NeedsError
from optrush.models.decoder import Decoder
from optrush.models.hf import load
from optrush.models.shapes import SHAPES, ModelShape
from optrush.peft import io
from optrush.planner import search

from parity_models import EXPERTS, FAMILIES, compare_gradients, materialise, packed, reference, save
from trials import assembled, shaped

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks

ROPE = {"rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32}
V2_LITE: dict[str, Any] = {  # as published
    "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
    "n_shared_experts": 2, "n_routed_experts": 64, "routed_scaling_factor": 1.0, "kv_lora_rank": 512,
    "q_lora_rank": None, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "topk_method": "greedy",
    "n_group": 1, "topk_group": 1, "num_experts_per_tok": 6, "moe_layer_freq": 1, "first_k_dense_replace": 1,
    "norm_topk_prob": False, "scoring_func": "softmax", "max_position_embeddings": 163840, "rms_norm_eps": 1e-6,
    "rope_scaling": {**ROPE, "type": "yarn", "mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
V3: dict[str, Any] = {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "rope_scaling": {**ROPE, "type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
YOUTU: dict[str, Any] = {
    "model_type": "youtu", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 6144,
    "num_hidden_layers": 32, "num_attention_heads": 16, "rope_theta": 1600000,
}  # fmt: skip


@pytest.mark.parametrize("hf", [V2_LITE, V3, YOUTU], ids=lambda hf: hf["model_type"])
def test_published_sizes(hf):
    """Counted by transformers on the meta device, from the same config.json; attention's FLOPs by both widths."""
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf, num_nextn_predict_layers=0))
    shape = ModelShape.read(hf)
    assert shape.parameters == sum(p.numel() for p in theirs.parameters())
    one, other = shape.flops(0, 10**6), 3 * 10**6 * shape.layers * shape.heads
    assert one == other * (theirs.model.layers[0].self_attn.qk_head_dim + theirs.config.v_head_dim)
    assert shape.latent is not None and shape.latent.scale == pytest.approx(
        theirs.model.layers[0].self_attn.scaling * shape.head_width**0.5
    )


def run(folder: Path, output: Path, **lora: Any) -> Any:
    lora = {"rank": 4, "alpha": 6.0, **lora}
    made = {
        "model": {"path": str(folder)}, "objective": "pretrain", "data": {"random": 8}, "output": str(output),
        "batch": {"seq": 20, "tokens": 40, "micro_tokens": 40}, "train": {"steps": 2}, "with": {"lora": lora},
    }  # fmt: skip
    return configuration.parse_config(json.dumps(made), "case.yaml", ())


@pytest.mark.parametrize("name", ["deepseek_v3", "youtu"])
def test_adapters_are_those_of_peft(name, tmp_path):
    """Loss and gradients begun with PEFT's file, and ours read by PEFT."""
    save(reference({**FAMILIES, **EXPERTS}[name]), tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    latent = [
        "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", *(["q_proj"] if name == "youtu" else ["q_a_proj", "q_b_proj"]),
    ]  # fmt: skip
    made = LoraConfig(r=4, lora_alpha=6, target_modules=latent, task_type="CAUSAL_LM", init_lora_weights=False)
    theirs = get_peft_model(base, made).train()
    theirs.save_pretrained(tmp_path / "theirs")
    job = assembled(run(tmp_path / "base", tmp_path / "run", targets="attention", init=str(tmp_path / "theirs")))
    batch = packed([[5, 7, 3], [19, 1]], 20, 61)
    mine = job.loss(batch)
    logits = theirs(input_ids=batch.tokens, position_ids=batch.positions.long(), use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
    torch.testing.assert_close(mine, loss, rtol=1e-6, atol=0)
    mine.backward()
    loss.backward()
    want = {key.replace(".default", ""): p.grad for key, p in theirs.named_parameters() if p.requires_grad}
    seen = 0
    for linear, adapter in io.adapters(job.model).items():
        for key, grad in adapter.published({n: p.grad for n, p in adapter.named_parameters()}):
            other = want[io.PREFIX + key]
            torch.testing.assert_close(grad, other, rtol=1e-4, atol=1e-4 * other.abs().max().item(), msg=linear)
            seen += 1
    assert seen == len(want)
    (tmp_path / "ours").mkdir()
    trained = {t.name: t.local.detach() for t in job.trained}
    io.save_adapter(tmp_path / "ours", job.model, job.weight_map, trained, str(tmp_path / "base"))
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "ours")
    found = again(input_ids=batch.tokens, position_ids=batch.positions.long(), use_cache=False).logits
    torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-5)


def test_lines_that_name_no_linear(tmp_path):
    save(reference(EXPERTS["deepseek_v3"]), tmp_path)
    with pytest.raises(NeedsError, match="no linear is called k_proj"):
        decide(run(tmp_path, tmp_path / "run", targets=["k_proj"]), ranks=1)


# --- what is planned, and what is refused
@pytest.fixture
def youtu(monkeypatch):
    monkeypatch.setitem(SHAPES, "latent", YOUTU)
    monkeypatch.setitem(SHAPES, "latent-experts", V2_LITE)


@pytest.mark.usefixtures("youtu")
def test_a_plan_needs_the_sizes_only():
    """By what of it is certain: weights, gradients and states, and fewer of them under adapters."""
    peaks = {}
    for shape, hf in (("latent", YOUTU), ("latent-experts", V2_LITE)):
        for withs in (("bf16", "attention", "recompute"), ("bf16", "attention", "recompute", "lora")):
            peaks[shape, len(withs)] = search.predict(shaped(shape, *withs, seq=1024, rows=1), "b200").peak_bytes
        known = 2 * ModelShape.read(hf).parameters
        assert 4 * known <= peaks[shape, 3] and known <= peaks[shape, 4] < 2 * known


@pytest.mark.parametrize(("name", "given", "found"), [
    ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob True"),
    ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method 'greedy'"),
    ("glm4_moe_lite", {"mlp_layer_types": None, "first_k_dense_replace": 2}, "first_k_dense_replace 2"),
    ("youtu", {"num_key_value_heads": 2}, "num_key_value_heads 2"),
    ("youtu", {"qk_rope_head_dim": 5}, "qk_rope_head_dim 5"),
])  # fmt: skip
def test_configurations_that_are_read_in_two_ways(name, given, found):
    with pytest.raises((NeedsError, ConfigError), match=found):
        ModelShape.read({**FAMILIES, **EXPERTS}[name] | given)


def test_a_router_without_groups(tmp_path):
    """DeepSeek-V2-Lite's: greedy over all experts, whatever n_group is; queries by one product."""
    theirs = reference({**EXPERTS["deepseek_v2"], "topk_method": "greedy", "q_lora_rank": None})
    ours, recipe = load(tmp_path, save(theirs, tmp_path), None, torch.float32, 0)
    assert isinstance(ours, Decoder)
    materialise(ours, recipe)
    batch = packed([[5, 7, 3], [19, 1]], 20, 61)
    hidden = ours(batch.tokens, batch.positions, batch.documents)
    logits = theirs(input_ids=batch.tokens, position_ids=batch.positions.long(), use_cache=False).logits
    torch.testing.assert_close(ours.head.logits(hidden)[1], logits[1], rtol=1e-5, atol=1e-5)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum").backward()
    ours.head(hidden, batch.labels).backward()
    compare_gradients(ours, recipe, theirs)
