"""Read a model's config.json and check the type of each value. Pure Python."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from optrush.errors import ConfigError, one_line
from optrush.files import read_file

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # keys of the number of experts
MOST = 2**31 - 1  # of every integer: ids and positions are 32 bits wide
DTYPES = ("float64", "float32", "float16", "bfloat16")
MOST_BYTES, DEEPEST = 16 << 20, 32  # of a config.json
Check = Callable[[Any], bool]


def _whole(value: object, least: int) -> bool:
    return type(value) is int and least <= value <= MOST


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # False for a NaN


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


_TEXT: tuple[str, Check] = ("a text", lambda value: isinstance(value, str))
_NUMBER: tuple[str, Check] = ("a finite number", _number)
_TYPES: dict[tuple[str, Check], tuple[str, ...]] = {
    ("a positive whole number below 2**31", lambda value: _whole(value, 1)): (
        "hidden_size", "num_hidden_layers", "vocab_size", "head_dim", "global_head_dim", "n_embd", "n_head", "n_layer",
        "n_positions", "n_ctx", "n_inner", "max_position_embeddings", "original_max_position_embeddings",
        "sliding_window", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim",
        "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
        "linear_num_value_heads", "full_attention_interval", "attention_chunk_size", "intermediate_size_mlp",
        "interleave_moe_layer_step", "no_rope_layer_interval", "floor_scale", "bits", "vocab_size_per_layer_input",
    ),
    ("a positive whole number below 2**31", lambda v: _whole(v, 1) or _list_of(lambda i: _whole(i, 1))(v)): (
        "intermediate_size", "num_attention_heads", "num_key_value_heads", "ffn_dim",  # one per layer in some families
    ),
    ("a whole number below 2**31", lambda value: _whole(value, -1)): (
        "max_window_layers", *EXPERTS, "num_experts_per_tok", "decoder_sparse_step", "moe_intermediate_size",
        "bos_token_id", "pad_token_id", "n_group", "topk_group", "n_shared_experts", "first_k_dense_replace",
        "shared_expert_intermediate_size", "num_kv_shared_layers", "num_global_key_value_heads", "top_k_experts",
        "hidden_size_per_layer_input",
    ),
    ("a whole number or a list of them", lambda v: _whole(v, -1) or _list_of(lambda i: _whole(i, -1))(v)): (
        "eos_token_id",
    ),
    ("a list of whole numbers", _list_of(lambda i: _whole(i, -1))): (
        "mlp_only_layers", "moe_layers", "no_rope_layers",
    ),
    _NUMBER: (
        "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps", "initializer_range",
        "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop",
        "attn_pdrop", "logit_scale", "final_logit_softcapping", "attn_logit_softcapping",
        "router_aux_loss_coef", "router_jitter_noise", "clip_qkv", "swiglu_alpha", "swiglu_limit",
        "routed_scaling_factor", "attn_scale", "norm_epsilon", "residual_dropout", "embedding_dropout",
    ),
    ("a positive number", lambda value: _number(value) and value > 1e-30): (
        "rope_theta", "rope_local_base_freq", "embedding_multiplier", "attention_multiplier", "residual_multiplier",
        "logits_scaling", "query_pre_attn_scalar",
    ),
    ("a number above 0, at most 1", lambda value: _number(value) and 0 < value <= 1): ("partial_rotary_factor",),
    ("two positive whole numbers", lambda v: _list_of(lambda i: _whole(i, 1))(v) and len(v) == 2): (
        "weight_block_size",
    ),
    ("true or false", lambda value: isinstance(value, bool)): (
        "tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "is_encoder_decoder", "use_cache",
        "norm_topk_prob", "output_router_logits", "rope_interleave", "use_qk_norm", "use_bias",
        "attention_k_eq_v", "use_double_wide_mlp", "enable_moe_block",
    ),
    ("true, false or a whole number", lambda value: isinstance(value, bool) or _whole(value, 0)): (
        "attn_temperature_tuning",  # 4 in the first files of Llama 4
    ),
    _TEXT: (
        "model_type", "hidden_act", "hidden_activation", "activation_function", "scoring_func", "topk_method",
        "quant_method",
    ),
    ("a torch dtype such as bfloat16", lambda value: isinstance(value, str) and value in DTYPES): (
        "torch_dtype", "dtype",
    ),
    ("a list of strings", _list_of(_TEXT[1])): ("architectures", "layer_types", "mlp_layer_types"),
    ("a mapping", lambda value: isinstance(value, dict)): ("rope_scaling", "rope_parameters", "per_layer_config"),
}  # fmt: skip
_TYPE_OF = {key: kind for kind, keys in _TYPES.items() for key in keys}
_ROPE_FACTORS = (
    "factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow", "mscale",
    "mscale_all_dim",
)  # fmt: skip
_ROPE_TYPE_OF = {  # within rope_scaling and rope_parameters; some families have one mapping per kind of layer
    **_TYPE_OF, **dict.fromkeys(("type", "rope_type"), _TEXT), **dict.fromkeys(_ROPE_FACTORS, _NUMBER),
    **dict.fromkeys(("short_factor", "long_factor"), ("a list of numbers", _list_of(_number))),
    **dict.fromkeys(("full_attention", "sliding_attention"), ("a mapping", lambda value: isinstance(value, dict))),
}  # fmt: skip
_REQUIRED = {"num_attention_heads", "hidden_size", "num_hidden_layers", "vocab_size", "rms_norm_eps"}  # never null


def read_config_json(file: Path) -> dict[str, Any]:
    """Read a model's config.json: one JSON object, with values of the types in `_TYPES`.

    Raises:
        ConfigError: not a JSON object, or too large; a value of a wrong type or out of range, by file and key.
    """
    do = "download the model again"
    if (size := file.stat().st_size) > MOST_BYTES:
        raise ConfigError(f"{file}", f"{size} bytes; a config.json has a few thousand", do)
    try:
        hf = json.loads(read_file(file))
    except (ValueError, RecursionError) as error:  # ValueError includes UnicodeDecodeError
        raise ConfigError(f"{file}", f"not JSON: {error}", do) from None
    if not isinstance(hf, dict):
        raise ConfigError(f"{file}", "not a JSON object", do)
    _check_types(hf, file, "", 1)
    return hf


def _check_types(tree: Mapping[str, Any], file: Path, path: str, depth: int) -> None:
    """Check the values of a mapping, recursively."""
    for key, value in tree.items():
        place, kind = one_line(f"{path}{key}", 120), (_ROPE_TYPE_OF if path.startswith("rope_") else _TYPE_OF).get(key)
        if key == "sliding_window" and value == 0 and tree.get("use_sliding_window") is False:
            continue  # transformers writes a disabled window like this
        if kind is not None and not kind[1](value) and (value is not None or key in _REQUIRED):
            raise ConfigError(f"{file}: {place}", one_line(repr(value), 120), f"give {place} {kind[0]}")
        for part in value if isinstance(value, list) else [value]:
            if type(part) is int and abs(part) >= 2**63:
                do = "write a 64-bit number"
                raise ConfigError(f"{file}: {place}", f"a whole number of {part.bit_length()} bits", do)
        if isinstance(value, dict):
            if depth == DEEPEST:
                raise ConfigError(f"{file}", f"more than {DEEPEST} nested mappings", "download the model again")
            _check_types(value, file, f"{path}{key}.", depth + 1)


# Methods of `quantization_config` whose weights are read and dequantized (stored_quantized.py).
METHODS = {"fp8": "FP8", "compressed-tensors": "FP8", "gptq": "GPTQ", "awq": "AWQ"}


def is_readable(settings: Any) -> TypeGuard[Mapping[str, Any]]:
    """Return whether weights with these quantization settings can be read and dequantized."""
    if not isinstance(settings, Mapping) or (method := str(settings.get("quant_method"))) not in METHODS:
        return False
    bits = settings.get("bits", 4)
    if method == "awq":
        return bits == 4 and str(settings.get("version", "gemm")).lower() == "gemm"
    if method == "compressed-tensors":
        return settings.get("format") == "float-quantized"
    return method == "fp8" or bits in (2, 4, 8)
