"""Published configurations of models, by the names that `shape:` takes. Pure Python."""

from __future__ import annotations

from typing import Any


def _llama(
    width: int, ff_width: int, heads: int, layers: int, rope_factor: float, *, tied: bool, **more: Any
) -> dict[str, Any]:
    """Return the config.json of a Llama 3.1 or 3.2 model; `more` adds or replaces keys."""
    rope = {
        "factor": rope_factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    }  # fmt: skip
    return {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128000, "dtype": "bfloat16", "eos_token_id": 128001, "hidden_act": "silu",
        "hidden_size": width, "initializer_range": 0.02, "intermediate_size": ff_width,
        "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama", "num_attention_heads": heads,
        "num_hidden_layers": layers, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_scaling": rope,
        "rope_theta": 500000.0, "tie_word_embeddings": tied, "vocab_size": 128256, **more,
    }  # fmt: skip


# Published configurations, by the name that `shape:` takes.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": _llama(2048, 8192, 32, 16, 32.0, tied=True, head_dim=64),
    # For a fair comparison with systems that never tie the head.
    "llama-3.2-1b-untied": _llama(2048, 8192, 32, 16, 32.0, tied=False, head_dim=64),
    "llama-3.2-3b": _llama(3072, 8192, 24, 28, 32.0, tied=True, head_dim=128),
    "llama-3.1-8b": _llama(4096, 14336, 32, 32, 8.0, tied=False),
    "llama-3.1-70b": _llama(8192, 28672, 64, 80, 8.0, tied=False),
    "qwen2.5-0.5b": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "dtype": "bfloat16",
        "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
        "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2",
        "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "decoder_sparse_step": 1, "dtype": "bfloat16", "eos_token_id": 151643, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
        "max_position_embeddings": 32768, "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "dtype": "bfloat16",
        "eos_token_id": 200002, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initializer_range": 0.02,
        "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
        "output_router_logits": False, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
        "tie_word_embeddings": False, "vocab_size": 201088,
    },
    # The text part.
    "qwen3.5-9b": {
        "architectures": ["Qwen3_5ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "dtype": "bfloat16",
        "head_dim": 256, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 12288,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 8,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_value_head_dim": 128, "max_position_embeddings": 262144,
        "model_type": "qwen3_5_text", "num_attention_heads": 16, "num_hidden_layers": 32, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"},
        "tie_word_embeddings": False, "vocab_size": 248320,
    },
}  # fmt: skip
