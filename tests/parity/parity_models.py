"""Tiny random Hugging Face models with nothing trivial in them, and the few lines that give one of ours real memory."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging as transformers_logging

from optrush.data.batch import Batch, collate
from optrush.data.schema import Document
from optrush.models.weights import WeightMap, export_weights

transformers_logging.disable_progress_bar()
torch.set_num_threads(1)

LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16, "rope_theta": 1000.0,
}  # fmt: skip
SIZES = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6,
    "v_head_dim": 7, "head_dim": 4,
}  # fmt: skip
DELTA = {
    "head_dim": 16, "linear_conv_kernel_dim": 3, "linear_key_head_dim": 6, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
MIXING = ["linear_attention", "full_attention"]
YARN = {
    "rope_type": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.2, "rope_theta": 1000.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
BY_LAYER = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
WIDE = {
    "model_type": "gemma4_text", "pad_token_id": None, "num_hidden_layers": 4, "sliding_window": 4,
    "global_head_dim": 16, "final_logit_softcapping": 5.0, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
}  # fmt: skip
FAMILIES = {
    "llama": {**SIZES, "model_type": "llama", "attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3},
    "llama-tied": {
        **SIZES, "model_type": "llama", "tie_word_embeddings": True, "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    },
    "mistral": {**SIZES, "model_type": "mistral", "sliding_window": None, "rope_theta": 5000.0},
    "qwen2": {**SIZES, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {**SIZES, "model_type": "qwen3", "attention_bias": True, "num_key_value_heads": 4},
    "qwen3_5_text": {
        **SIZES, **DELTA, "model_type": "qwen3_5_text", "attention_bias": True, "layer_types": MIXING[::-1],
    },
    "youtu": {**SIZES, **LATENT, "model_type": "youtu", "q_lora_rank": None, "rope_interleave": False},
    "gemma": {**SIZES, "model_type": "gemma", "pad_token_id": None, "attention_bias": True},
    "gemma2": {
        **SIZES, "model_type": "gemma2", "pad_token_id": None, "num_hidden_layers": 3, "sliding_window": 4,
        "query_pre_attn_scalar": 12, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0,
    },
    "gemma3_text": {
        **SIZES, "model_type": "gemma3_text", "pad_token_id": None, "num_hidden_layers": 3, "sliding_window": 4,
        "sliding_window_pattern": 2, "query_pre_attn_scalar": 12, "rope_parameters": BY_LAYER,
    },
    "gemma4_text": {  # as E2B: per-layer inputs, and layers that read the keys and values of earlier ones
        **SIZES, **WIDE, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 61,
        "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
    },
    "gemma4_text-keys": {  # as 31B: keys that are values
        **SIZES, **WIDE, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
    },
    "gemma4_unified_text": {  # 12B
        **SIZES, **WIDE, "model_type": "gemma4_unified_text", "num_hidden_layers": 2, "attention_k_eq_v": True,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "cohere": {**SIZES, "model_type": "cohere", "pad_token_id": None, "logit_scale": 0.25, "attention_bias": True},
    "cohere2": {
        **SIZES, "model_type": "cohere2", "pad_token_id": None, "num_hidden_layers": 3, "sliding_window": 4,
        "sliding_window_pattern": 2, "logit_scale": 0.5,
    },
    "smollm3": {
        **SIZES, "model_type": "smollm3", "pad_token_id": None, "mlp_bias": True, "no_rope_layers": [1, 0],
        "rope_theta": 5000.0,
    },
    "starcoder2": {**SIZES, "model_type": "starcoder2", "pad_token_id": None, "sliding_window": 4, "head_dim": 6},
    "granite": {
        **SIZES, "model_type": "granite", "mlp_bias": True, "embedding_multiplier": 6.5, "attention_multiplier": 0.2,
        "residual_multiplier": 0.3, "logits_scaling": 2.5,
    },
    "olmo2": {**SIZES, "model_type": "olmo2", "pad_token_id": None, "head_dim": 6, "rope_parameters": LLAMA3},
    "olmo3": {
        **SIZES, "model_type": "olmo3", "pad_token_id": None, "head_dim": 6, "sliding_window": 4,
        "rope_parameters": BY_LAYER, "layer_types": ["sliding_attention", "full_attention"],
    },
    "phi3": {
        **SIZES, "model_type": "phi3", "pad_token_id": None, "hidden_size": 32, "tie_word_embeddings": True,
        "sliding_window": 4, "original_max_position_embeddings": 32, "max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope", "short_factor": [1.0, 1.2, 1.5], "long_factor": [1.0, 3.0, 4.0],
            "partial_rotary_factor": 0.75, "rope_theta": 1000.0,
        },
    },
    "phi3-plain": {**SIZES, "model_type": "phi3", "pad_token_id": None, "head_dim": 6, "num_attention_heads": 6},
    "glm4": {**SIZES, "model_type": "glm4", "pad_token_id": None, "partial_rotary_factor": 0.5, "rope_theta": 1000.0},
    "ernie4_5": {**SIZES, "model_type": "ernie4_5", "pad_token_id": None, "use_bias": True, "rope_theta": 5000.0},
    "helium": {
        **SIZES, "model_type": "helium", "pad_token_id": None, "head_dim": 6, "attention_bias": True, "mlp_bias": True,
        "rope_theta": 5000.0,
    },
    "exaone4": {
        **SIZES, "model_type": "exaone4", "pad_token_id": None, "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}  # fmt: skip
THEIR_EXPERTS = {  # through transformers
    "qwen2_moe": {
        **SIZES, "model_type": "qwen2_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 20, "pad_token_id": None, "mlp_only_layers": [0], "num_hidden_layers": 3,
    },
    "granitemoe": {
        **SIZES, "model_type": "granitemoe", "num_local_experts": 6, "num_experts_per_tok": 2, "pad_token_id": None,
        "residual_multiplier": 0.5, "logits_scaling": 3.0, "embedding_multiplier": 4.0, "head_dim": 6,
    },
    "ernie4_5_moe": {
        **SIZES, "model_type": "ernie4_5_moe", "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 16,
        "moe_num_shared_experts": 1, "moe_layer_start_index": 1, "pad_token_id": None,
    },
    "phimoe": {
        **SIZES, "model_type": "phimoe", "num_local_experts": 6, "num_experts_per_tok": 2, "pad_token_id": None,
        "router_jitter_noise": 0.0, "input_jitter_noise": 0.0, "lm_head_bias": True, "attention_bias": True,
    },
    "aria_text": {
        **SIZES, "model_type": "aria_text", "moe_num_experts": 6, "moe_topk": 2, "moe_num_shared_experts": 2,
        "pad_token_id": None,
    },
}  # fmt: skip
EXPERTS = {
    "gemma4_text-experts": {  # as 26B-A4B
        **SIZES, **WIDE, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 16,
        "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
    },
    "mixtral": {**SIZES, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {
        **SIZES, "model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 3, "head_dim": 6, "pad_token_id": None,
    },
    "qwen3_moe": {
        **SIZES, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "norm_topk_prob": True, "mlp_only_layers": [1],
    },
    "glm4_moe": {
        **SIZES, "model_type": "glm4_moe", "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
        "n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.7, "n_shared_experts": 2, "first_k_dense_replace": 1,
        "attention_bias": True, "use_qk_norm": True,
    },
    "deepseek_v2": {
        **SIZES, **LATENT, "model_type": "deepseek_v2", "n_routed_experts": 6, "num_experts_per_tok": 3,
        "moe_intermediate_size": 16, "n_group": 3, "topk_group": 2, "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 1.7, "n_shared_experts": 2, "first_k_dense_replace": 1, "rope_parameters": YARN,
    },
    "deepseek_v3": {
        **SIZES, **LATENT, "model_type": "deepseek_v3", "n_routed_experts": 6, "num_experts_per_tok": 3,
        "moe_intermediate_size": 16, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.7, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "attention_bias": True, "rope_parameters": YARN, "num_mtp_layers": 0,
    },
    "glm4_moe_lite": {
        **SIZES, **LATENT, "model_type": "glm4_moe_lite", "n_routed_experts": 5, "num_experts_per_tok": 3,
        "moe_intermediate_size": 16, "mlp_layer_types": ["sparse", "dense"],
    },
    "qwen3_next": {
        **SIZES, **DELTA, "model_type": "qwen3_next", "num_experts": 6, "num_experts_per_tok": 3,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 12, "layer_types": MIXING,
    },
    "qwen3_5_moe_text": {
        **{key: value for key, value in SIZES.items() if key != "intermediate_size"}, **DELTA,
        "model_type": "qwen3_5_moe_text", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 12, "layer_types": MIXING,
    },
    "llama4_text": {
        **SIZES, "model_type": "llama4_text", "num_hidden_layers": 3, "intermediate_size_mlp": 20,
        "num_local_experts": 5, "num_experts_per_tok": 2, "moe_layers": [0, 2], "attention_chunk_size": 6,
        "no_rope_layers": [1, 1, 0], "floor_scale": 4, "attn_scale": 0.5, "attention_bias": True,
        "pad_token_id": None, "rope_parameters": LLAMA3,
    },
    "gpt_oss": {
        **SIZES, "model_type": "gpt_oss", "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 4,
        "swiglu_limit": 0.4, "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "truncate": False, "original_max_position_embeddings": 16,
            "rope_theta": 1000.0,
        },
    },
}  # fmt: skip


UNPACKED = (
    "gpt_oss",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "llama4_text",
)  # whose masks in transformers take no notice of positions that restart


def reference(sizes: dict, *, seed: int = 0) -> torch.nn.Module:
    """A transformers model in float32 whose every parameter, norms and biases too, is drawn away from its default."""
    config = AutoConfig.for_model(**sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.3 if parameter.ndim > 1 else parameter + noise * 0.2)
        for name, parameter in model.named_parameters() if "gemma4" in sizes["model_type"] else ():
            if name.endswith("q_norm.weight"):  # scores have no other factor; sharp ones multiply what is rounded
                parameter *= len(parameter) ** -0.5
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "layer_scalar")):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)
    return model


def reference_loss(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and summed loss by transformers itself; documents are separated by their restarting positions."""
    logits = model(input_ids=batch.tokens, position_ids=batch.positions.long(), use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
    return logits, loss


def reference_alone(theirs: Any, batch: Batch) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Logits of each document alone by transformers itself, and the loss of all."""
    found, loss = [], torch.zeros(())
    for row, ids in enumerate(batch.documents.ids):
        for number in ids.unique():
            at = ((ids == number) & batch.documents.filled[row]).nonzero().flatten()
            if len(at):
                logits = theirs(input_ids=batch.tokens[row][at][None], use_cache=False).logits[0]
                loss = loss + torch.nn.functional.cross_entropy(logits, batch.labels[row][at], reduction="sum")
                found.append(logits)
    return found, loss


def compare_gradients(ours, recipe, theirs, every=True, close=1e-4):
    """Every gradient of ours, brought into the base's layout, against transformers'; how many tensors were compared."""
    grads = {name: p.grad for name, p in theirs.named_parameters()}
    if any(".experts.0." in name for entry in recipe.entries.values() for name, _ in entry.hf_shapes()):
        grads = revert_weight_conversion(theirs, grads)  # one tensor of all experts to a tensor of each
    seen = set()
    for name, parameter in ours.named_parameters():
        if not parameter.requires_grad:
            continue
        for hf_name, part in recipe.split(name, parameter.grad):
            want = grads[hf_name]
            noise = 0.03 if hf_name.endswith("k_proj.bias") else 0.0  # all there is where it changes no softmax
            size = max(want.abs().max().item(), noise)
            torch.testing.assert_close(part, want, rtol=close, atol=close * size, msg=hf_name)
            assert want.abs().max() > 0 or hf_name.endswith("k_proj.bias") or not every, hf_name
            seen.add(hf_name)
    assert seen == {name for name, grad in grads.items() if grad is not None}
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


def compare_step(ours: Any, recipe: WeightMap, theirs: PreTrainedModel, *, padding: bool, every: bool = True) -> None:
    """Logits, loss and every gradient of two packed rows.

    padding: logits behind the last document too. every: each parameter has a gradient, and not all of it is 0.
    """
    batch = packed([[5, 7, 3], [19, 1]], 20, 61)
    hidden = ours(batch.tokens, batch.positions, batch.documents)
    compared = torch.tensor([[True] * 15 + [padding] * 5, [True] * 20])
    if theirs.config.model_type in UNPACKED:
        logits, loss = reference_alone(theirs, batch)
        wanted = torch.cat(logits)
        compared[0, 15:] = False
    else:
        logits, loss = reference_loss(theirs, batch)
        wanted = logits[compared]
    close = 2e-4 if hasattr(theirs.config, "linear_num_key_heads") else 1e-5  # 1e-13 in float64
    torch.testing.assert_close(ours.head.logits(hidden)[compared], wanted, rtol=1e-5, atol=close)
    mine = ours.head(hidden, batch.labels)
    torch.testing.assert_close(mine, loss, rtol=1e-6, atol=0)
    theirs.zero_grad()
    ours.zero_grad()
    loss.backward()
    mine.backward()
    assert compare_gradients(ours, recipe, theirs, every) >= 14


def compare_alone(ours: Any) -> None:
    """Packed documents against the same documents alone."""
    batch = packed([[5, 7, 3], [12, 2]], 16, 61)
    together = ours(batch.tokens, batch.positions, batch.documents)
    for row, first, n in ((0, 0, 5), (0, 5, 7), (0, 12, 3), (1, 0, 12), (1, 12, 2)):
        one = packed([[n]], n, 61, single=True)
        alone = ours(batch.tokens[row : row + 1, first : first + n], one.positions, one.documents)
        torch.testing.assert_close(together[row, first : first + n], alone[0], rtol=1e-5, atol=1e-5)


def compare_isolated(ours: Any) -> None:
    """Another token in one document: no bit of the others' hidden states, or of the gradients of their loss."""
    batch = packed([[5, 7, 3], [19, 1]], 20, 61)
    changed = batch.tokens.clone()
    changed[0, 6] = (changed[0, 6] + 1) % 61  # in the second document
    labels = batch.labels.clone()
    labels[0, 5:12] = -100
    found = []
    for tokens in (batch.tokens, changed):
        ours.zero_grad()
        hidden = ours(tokens, batch.positions, batch.documents)
        ours.head(hidden, labels).backward()
        found.append((hidden.detach(), [p.grad.clone() for p in ours.parameters() if p.requires_grad]))
    (one, grads), (other, again) = found
    assert torch.equal(one[0, :5], other[0, :5]) and torch.equal(one[0, 12:15], other[0, 12:15])
    assert torch.equal(one[1], other[1]) and not torch.equal(one[0, 6:12], other[0, 6:12])
    assert all(map(torch.equal, grads, again))


def compare_export(theirs, ours, recipe, hf, folder, max_shard_bytes=5e9):
    """Export, and load with transformers: equal bits under equal names."""
    export_weights(folder, ((n, p.data) for n, p in ours.named_parameters()), recipe, hf, max_shard_bytes)
    again, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    mine, expected = again.state_dict(), theirs.state_dict()
    assert mine.keys() == expected.keys() and all(torch.equal(mine[name], expected[name]) for name in expected)
