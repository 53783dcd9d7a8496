"""Define our decoder's families: the meaning of config.json keys and the names of tensors. Pure Python.

A family without new block parts is one entry of `FAMILIES`: `ModelShape.read`, checks, tensor names and exports read
it. No other code knows a family by its name.

A switch is on, off, or the deciding key of config.json. `defaults` has the keys that config.json may omit, with the
values of transformers' configuration class (versions 5.17 to 5.23).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Switch = bool | str
Values = Mapping[str, tuple[Any, ...]]  # keys of config.json, with their allowed values
ROPE_KINDS = ("default", "linear", "llama3", "dynamic", "yarn", "longrope")
FOREIGN_ROPE_KINDS = ("proportional",)  # computed by transformers only
# Keys required in a nested configuration: each class has other defaults for them.
NEEDED = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "rms_norm_eps",
)  # fmt: skip
# Names of a layer's parts in files; {mlp} is the module of the dense feed-forward part, or of shared experts.
NAMES: Mapping[str, tuple[str, ...]] = {
    "norm1": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "q": ("self_attn.q_proj",),
    "q_a": ("self_attn.q_a_proj",),
    "q_a_norm": ("self_attn.q_a_layernorm",),
    "q_b": ("self_attn.q_b_proj",),
    "kv_a": ("self_attn.kv_a_proj_with_mqa",),
    "kv_a_norm": ("self_attn.kv_a_layernorm",),
    "kv_b": ("self_attn.kv_b_proj",),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "o": ("self_attn.o_proj",),
    "sinks": ("self_attn",),  # a parameter of the module itself
    "input_gate": ("per_layer_input_gate",),
    "input_out": ("per_layer_projection",),
    "dense_leaving": ("post_feedforward_layernorm_1",),
    "experts_norm": ("pre_feedforward_layernorm_2",),
    "experts_leaving": ("post_feedforward_layernorm_2",),
    "leaving3": ("post_per_layer_input_norm",),
    "norm2": ("post_attention_layernorm",),
    "leaving1": (),
    "leaving2": (),
    "gate_up": ("{mlp}.gate_proj", "{mlp}.up_proj"),
    "down": ("{mlp}.down_proj",),
    "shared_gate": ("mlp.shared_expert_gate",),
}
# For blocks with a norm before and after each part, and for blocks with norms only after the parts.
AROUND = {
    **NAMES, "norm2": ("pre_feedforward_layernorm",),
    "leaving1": ("post_attention_layernorm",), "leaving2": ("post_feedforward_layernorm",),
}  # fmt: skip
LAYER_INPUTS = {  # per model
    "embedding": "embed_tokens_per_layer", "project": "per_layer_model_projection", "norm": "per_layer_projection_norm",
}  # fmt: skip
JOINED = {**NAMES, "qkv": ("self_attn.qkv_proj",), "gate_up": ("{mlp}.gate_up_proj",)}  # pieces are stacked rows
AFTER = {**NAMES, "norm1": ("post_attention_layernorm",), "norm2": ("post_feedforward_layernorm",)}
SILU, GELU = ("silu", "swish"), ("gelu_pytorch_tanh",)


@dataclass(frozen=True)
class ExpertsSpec:
    """The routed experts of a family.

    Files have one tensor per kind for all experts of a layer, or three per expert, named by `apart`: the module, and
    gate, up and down.
    """

    router: Literal["softmax", "sigmoid", "logits"] = "softmax"  # the scoring function
    width: str = "moe_intermediate_size"  # the key of an expert's feed-forward width
    step: str = "decoder_sparse_step"  # the key of the distance between layers with experts
    listed: str = ""  # the key that lists those layers
    biases: bool = False
    shared_gate: bool = False  # the shared experts are gated by a sigmoid
    shared_name: str = "shared_experts"  # the module of the shared experts
    router_name: str = "gate"
    apart: tuple[str, str, str, str] | None = ("mlp", "gate_proj", "up_proj", "down_proj")
    transposed: bool = False  # a tensor of all experts is (N, width, rows)
    interleaved: bool = False  # rows of gate and up alternate, like here
    beside: bool = False  # experts and router are modules of the layer; they and a dense part have separate norms
    switch: str = ""  # the key that switches experts on; empty: always on
    active: str = "num_experts_per_tok"  # the key of the number of experts per token
    untold: bool = False  # transformers' class does not declare it transposed, so PEFT swaps A and B


@dataclass(frozen=True)
class FamilySpec:
    """A family of our own decoder."""

    architecture: str  # transformers' class
    defaults: Mapping[str, Any]
    qkv_bias: Switch = False
    o_bias: Switch = False
    mlp_bias: Switch = False
    qk_norm: Switch = False
    whole_qk_norm: bool = False  # one norm over all heads of a token
    centred: bool = False  # norms multiply by 1 + weight
    norms: Literal["before", "around", "after", "beside"] = "before"
    """Placement of norms; beside: attention and feed-forward share one norm, and are added together."""
    norm: Literal["rms", "layer", "layer, bias"] = "rms"  # the kind of the norms
    norm_eps: str = "rms_norm_eps"  # the key of its epsilon
    softcap: bool = False  # logits may be bounded by `final_logit_softcapping`
    score_cap: bool = False  # scores of attention may be bounded by `attn_logit_softcapping`
    gateless: bool = False  # no gate in the feed-forward part: the activation applies to `up`
    activation: tuple[str, ...] = SILU  # of the gate, by its possible names in config.json
    multipliers: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """Factors of the embedding, the scores (instead of E^-0.5), a part's output, and the logits: a key of config.json,
    raised to a power."""
    gated: bool = False  # attention's output is gated
    sinks: bool = False  # a learned logit per head, for no token
    partial_rotary: bool = False  # a part of each head is rotated
    pairs: bool = False  # rotated values are neighbouring pairs, not half a head apart
    rope_kinds: tuple[str, ...] = ROPE_KINDS
    rope_renamed: Mapping[str, str] = field(default_factory=dict)  # current types by their earlier names
    window: Literal["none", "all", "switched", "upper", "alternate", "pattern"] = "none"
    """The layers with the sliding window: all; all if `use_sliding_window`; then those of `layer_types`, or from
    `max_window_layers` on; those of `layer_types`, or every other one from the first on, or all but every n-th one, the
    `sliding_window_pattern`."""
    local_rope: bool = False  # layers with a window have a separate rotary embedding
    unrotated: Literal["none", "listed", "full", "unwindowed"] = "none"
    """The layers without rotary embedding: those with a 0 in `no_rope_layers`, else every `no_rope_layer_interval`-th;
    those without a window, if other layers have one; all those without a window."""
    latent: bool = False  # keys and values come from a latent
    interleaved: Switch = "rope_interleave"  # rotated values of latent attention are neighbouring pairs
    by_layer: bool = False  # heads, keys and values and feed-forward parts differ between layers (`ByLayer`)
    value_norm: bool = False  # values pass a norm without weights
    layer_scalar: bool = False  # a constant per block multiplies its output
    delta: bool = False  # it has delta-rule layers
    by_key_head: bool = False  # their first linears' rows are grouped by key head
    chunks: bool = False  # layers that attend within chunks, and layers without rotary embedding
    experts: ExpertsSpec | None = None
    ff_width: str = "intermediate_size"  # the key of the feed-forward width of dense layers
    feed_forward: str = "mlp"  # the module of that part
    names: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: NAMES)
    mxfp4: bool = False  # experts are published in 4 bits, exact in bfloat16
    later_layers: bool = False  # files may have multi-token prediction layers
    # Keys read either by published code or by transformers only: the values for which both agree.
    agreed: Values = field(default_factory=dict)
    nested: tuple[str, ...] = NEEDED  # required keys for the language model of a multimodal model
    gguf: str = ""  # the architecture in GGUF files; empty: none are written
    gguf_pairs: bool = False  # rotated values are neighbouring pairs there
    gguf_biases: bool = True  # its linears may have biases there
    gguf_scales: bool = False  # it has keys for multipliers there

    def experts_in(self, layer: str) -> str:
        """Return the module with a layer's experts and router."""
        beside = self.experts is not None and self.experts.beside
        return layer if beside else f"{layer}.{self.feed_forward}"

    @property
    def other_layers(self) -> str:
        """The type of layers that do not have full attention."""
        return "linear_attention" if self.delta else "chunked_attention" if self.chunks else "sliding_attention"


_BIASED: dict[str, Any] = {"qkv_bias": "attention_bias", "o_bias": "attention_bias"}
_QWEN = {
    "num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28,
}  # fmt: skip
_QWEN_DELTA = FamilySpec(
    "Qwen3_5ForCausalLM",
    {
        "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 32768, "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "full_attention_interval": 4,
    },
    **_BIASED, qk_norm=True, centred=True, gated=True, partial_rotary=True, delta=True, later_layers=True, nested=(),
)  # fmt: skip
_QWEN_NEXT = replace(
    _QWEN_DELTA,
    architecture="Qwen3NextForCausalLM",
    defaults={
        **_QWEN_DELTA.defaults, "num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": True,
        "router_aux_loss_coef": 0.001,
    },
    by_key_head=True, experts=ExpertsSpec(shared_gate=True, shared_name="shared_expert"), nested=NEEDED,
)  # fmt: skip
_DEEPSEEK = FamilySpec(
    "DeepseekV3ForCausalLM",
    {
        "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 4096, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "rope_interleave": True, "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
        "n_shared_experts": 1, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3,
        "norm_topk_prob": True, "router_aux_loss_coef": 0.0,
    },
    **_BIASED, latent=True, experts=ExpertsSpec("sigmoid"), later_layers=True, nested=(),
    agreed={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)},
)  # fmt: skip

_CAUSAL: dict[str, tuple[Any, ...]] = {"use_bidirectional_attention": (False,)}
_GEMMA: dict[str, Any] = {
    "centred": True, "activation": GELU, "multipliers": {"embedding": ("hidden_size", 0.5)},
}  # fmt: skip
_GEMMA_SCALED = {**_GEMMA, "multipliers": {**_GEMMA["multipliers"], "scores": ("query_pre_attn_scalar", -0.5)}}
_COHERE = FamilySpec(
    "CohereForCausalLM",
    {
        "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 8192, "layer_norm_eps": 1e-5,
        "tie_word_embeddings": True, "logit_scale": 0.0625,
    },
    **_BIASED, norms="beside", norm="layer", norm_eps="layer_norm_eps", pairs=True,
    multipliers={"logits": ("logit_scale", 1)}, agreed={"use_qk_norm": (False,)}, gguf="COMMAND_R", gguf_biases=False,
)  # fmt: skip
_OLMO = FamilySpec(
    "Olmo2ForCausalLM",
    {"num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    **_BIASED, qk_norm=True, whole_qk_norm=True, norms="after", names=AFTER,
)  # fmt: skip
_GEMMA4 = FamilySpec(
    "Gemma4ForCausalLM",
    {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512,
        "max_position_embeddings": 131072, "tie_word_embeddings": True, "vocab_size": 262144,
        "sliding_window": 512, "sliding_window_pattern": 6, "rope_theta": 10000.0, "rope_local_base_freq": 10000.0,
        "norm_topk_prob": True, "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    **_BIASED, activation=GELU, qk_norm=True, value_norm=True, norms="around", names=AROUND, window="pattern",
    multipliers={"embedding": ("hidden_size", 0.5), "scores": ("hidden_size", 0)},  # scores have no factor E^-0.5
    local_rope=True, rope_kinds=(*ROPE_KINDS, *FOREIGN_ROPE_KINDS), softcap=True, by_layer=True, layer_scalar=True,
    nested=(),
    agreed={"hidden_activation": GELU, "use_bidirectional_attention": ("vision",)}, experts=ExpertsSpec(
        beside=True, switch="enable_moe_block", active="top_k_experts", shared_name="", router_name="router.proj",
        apart=None,
    ),
)  # fmt: skip

FAMILIES: dict[str, FamilySpec] = {
    "llama": FamilySpec(
        "LlamaForCausalLM", {"num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048},
        **_BIASED, mlp_bias="mlp_bias", gguf="LLAMA", gguf_pairs=True,
    ),
    "mistral": FamilySpec(
        "MistralForCausalLM",
        {"num_key_value_heads": 8, "head_dim": None, "max_position_embeddings": 131072, "sliding_window": 4096},
        window="all", nested=(*NEEDED, "head_dim", "sliding_window"), gguf="LLAMA", gguf_pairs=True,
    ),
    "qwen2": FamilySpec(
        "Qwen2ForCausalLM", {**_QWEN, "head_dim": None}, qkv_bias=True, window="upper", gguf="QWEN2",
    ),
    "qwen3": FamilySpec(
        "Qwen3ForCausalLM", {**_QWEN, "head_dim": 128},
        **_BIASED, qk_norm=True, window="upper", nested=(*NEEDED, "head_dim"), gguf="QWEN3",
    ),
    "mixtral": FamilySpec(
        "MixtralForCausalLM",
        {
            "num_key_value_heads": 8, "head_dim": None, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True,
            "router_aux_loss_coef": 0.001,
        },
        window="all",
        experts=ExpertsSpec(width="intermediate_size", apart=("block_sparse_moe", "w1", "w3", "w2")),
    ),
    "olmoe": FamilySpec(
        "OlmoeForCausalLM",
        {
            "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
            "num_experts": 64, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.01,
        },
        **_BIASED, qk_norm=True, whole_qk_norm=True, experts=ExpertsSpec(width="intermediate_size"),
    ),
    "qwen3_moe": FamilySpec(
        "Qwen3MoeForCausalLM",
        {
            "num_key_value_heads": 4, "head_dim": None, "max_position_embeddings": 32768, "sliding_window": 4096,
            "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "router_aux_loss_coef": 0.001,
        },
        **_BIASED, qk_norm=True, window="switched", experts=ExpertsSpec(),
    ),
    "gpt_oss": FamilySpec(
        "GptOssForCausalLM",
        {
            "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0, "sliding_window": 128, "num_local_experts": 128, "num_experts_per_tok": 4,
            "norm_topk_prob": True, "router_aux_loss_coef": 0.001, "attention_bias": True, "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0, "rope_parameters": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        **_BIASED, sinks=True, window="alternate",
        experts=ExpertsSpec(
            width="intermediate_size", biases=True, router_name="router", apart=None, transposed=True,
            interleaved=True,
        ),
        mxfp4=True,
    ),
    "glm4_moe": FamilySpec(
        "Glm4MoeForCausalLM",
        {
            "num_key_value_heads": 8, "head_dim": None, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1,
            "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
            "norm_topk_prob": True, "use_qk_norm": False, "partial_rotary_factor": 0.5, "router_aux_loss_coef": 0.0,
        },
        qkv_bias="attention_bias", qk_norm="use_qk_norm", partial_rotary=True, experts=ExpertsSpec("sigmoid"),
        later_layers=True,
    ),
    "deepseek_v2": replace(
        _DEEPSEEK,
        architecture="DeepseekV2ForCausalLM",
        defaults={
            **_DEEPSEEK.defaults, "max_position_embeddings": 2048, "n_routed_experts": 64, "num_experts_per_tok": None,
            "moe_intermediate_size": 1407, "n_shared_experts": 2, "routed_scaling_factor": 1.0, "n_group": None,
            "topk_group": None, "topk_method": "greedy", "first_k_dense_replace": 0, "norm_topk_prob": False,
        },
        interleaved=True, experts=ExpertsSpec(), later_layers=False, nested=NEEDED,
        agreed={
            "scoring_func": ("softmax",), "topk_method": ("greedy", "group_limited_greedy"), "moe_layer_freq": (1,),
            "norm_topk_prob": (False,), "mlp_bias": (False,),
        },
    ),
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe_lite": replace(
        _DEEPSEEK,
        architecture="Glm4MoeLiteForCausalLM",
        defaults={
            **_DEEPSEEK.defaults, "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "q_lora_rank": 768,
            "qk_nope_head_dim": 192, "v_head_dim": 256, "n_routed_experts": 64, "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536, "routed_scaling_factor": 1.8, "n_group": 1, "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        nested=NEEDED,
        agreed={
            "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "first_k_dense_replace": (1,),
            "moe_layer_freq": (1,),
        },
    ),
    "gemma": FamilySpec(
        "GemmaForCausalLM",
        {
            "num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True,
        },
        **_BIASED, **_GEMMA, agreed={"hidden_act": ("gelu", *GELU), **_CAUSAL},
    ),
    "gemma2": FamilySpec(
        "Gemma2ForCausalLM",
        {
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
            "tie_word_embeddings": True, "sliding_window": 4096, "query_pre_attn_scalar": 256,
            "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
        },
        **_BIASED, **_GEMMA_SCALED, norms="around", names=AROUND, window="alternate", softcap=True, score_cap=True,
        agreed={"hidden_activation": GELU, **_CAUSAL},
    ),
    "gemma3_text": FamilySpec(
        "Gemma3ForCausalLM",
        {
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
            "tie_word_embeddings": True, "vocab_size": 262208, "sliding_window": 4096, "sliding_window_pattern": 6,
            "query_pre_attn_scalar": 256, "rope_theta": 1e6, "rope_local_base_freq": 10000.0,
        },
        **_BIASED, **_GEMMA_SCALED, qk_norm=True, norms="around", names=AROUND, window="pattern", local_rope=True,
        softcap=True, nested=(),
        agreed={"hidden_activation": GELU, "attn_logit_softcapping": (), **_CAUSAL},
    ),
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": replace(
        _GEMMA4, architecture="Gemma4UnifiedForCausalLM", experts=None,
        defaults={
            **_GEMMA4.defaults, "sliding_window": 1024, "hidden_size_per_layer_input": 0,
            "max_position_embeddings": 262144,
        },
    ),
    "cohere": _COHERE,
    "cohere2": replace(
        _COHERE, architecture="Cohere2ForCausalLM", window="pattern", unrotated="unwindowed", gguf="COHERE2",
        defaults={**_COHERE.defaults, "sliding_window": 4096, "sliding_window_pattern": 4},
    ),
    "smollm3": FamilySpec(
        "SmolLM3ForCausalLM",
        {
            "num_key_value_heads": 4, "head_dim": None, "max_position_embeddings": 32768, "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
        },
        **_BIASED, mlp_bias="mlp_bias", unrotated="listed", agreed={"use_sliding_window": (False,)},
        gguf="SMOLLM3", gguf_pairs=True, gguf_biases=False,
    ),
    "granite": FamilySpec(
        "GraniteForCausalLM",
        {
            "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048, "embedding_multiplier": 1.0,
            "attention_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0,
        },
        **_BIASED, mlp_bias="mlp_bias", multipliers={
            "embedding": ("embedding_multiplier", 1), "scores": ("attention_multiplier", 1),
            "residual": ("residual_multiplier", 1), "logits": ("logits_scaling", -1),
        },
        gguf="GRANITE", gguf_pairs=True, gguf_scales=True,
    ),
    "olmo2": replace(_OLMO, gguf="OLMO2", gguf_biases=False),
    "olmo3": replace(
        _OLMO, architecture="Olmo3ForCausalLM",
        defaults={
            **_OLMO.defaults, "sliding_window": 4096, "sliding_window_pattern": 4, "rope_theta": 500000.0,
            "rope_local_base_freq": 500000.0, "rms_norm_eps": 1e-5,
        },
        window="pattern", local_rope=True,
    ),
    "exaone4": FamilySpec(
        "Exaone4ForCausalLM",
        {
            "num_key_value_heads": 32, "head_dim": None, "max_position_embeddings": 2048, "sliding_window": 4096,
            "sliding_window_pattern": 4, "rms_norm_eps": 1e-5,
        },
        qk_norm=True, norms="after", names=AFTER, window="pattern", unrotated="full",
    ),
    "starcoder2": FamilySpec(
        "Starcoder2ForCausalLM",
        {
            "num_key_value_heads": 2, "head_dim": None, "max_position_embeddings": 4096, "norm_epsilon": 1e-5,
            "use_bias": True, "tie_word_embeddings": True, "intermediate_size": 12288,
        },
        qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias", norm="layer, bias", norm_eps="norm_epsilon",
        gateless=True, activation=GELU, window="all",
        names={**NAMES, "gate_up": ("{mlp}.c_fc",), "down": ("{mlp}.c_proj",)},
        agreed={"residual_dropout": (0,), "embedding_dropout": (0,)},
    ),
    "phi3": FamilySpec(
        "Phi3ForCausalLM",
        {
            "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
            "original_max_position_embeddings": 4096, "partial_rotary_factor": 1.0,
        },
        partial_rotary=True, rope_kinds=("default", "longrope"), window="all", names=JOINED,
        rope_renamed={"su": "longrope", "yarn": "longrope"},
        gguf="PHI3", agreed={"resid_pdrop": (0,), "embd_pdrop": (0,), "attention_bias": (False,), "mlp_bias": (False,)},
    ),
    "glm4": FamilySpec(
        "Glm4ForCausalLM",
        {
            "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7,
            "attention_bias": True, "partial_rotary_factor": 0.5,
        },
        qkv_bias="attention_bias", norms="around", partial_rotary=True, pairs=True, names={
            **NAMES, "gate_up": JOINED["gate_up"], "leaving1": ("post_self_attn_layernorm",),
            "leaving2": ("post_mlp_layernorm",),
        },
        gguf="GLM4",
    ),
    "ernie4_5": FamilySpec(
        "Ernie4_5ForCausalLM",
        {
            "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0, "tie_word_embeddings": True,
        },
        qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias", pairs=True,
    ),
    "helium": FamilySpec(
        "HeliumForCausalLM",
        {
            "num_key_value_heads": 20, "head_dim": 128, "max_position_embeddings": 4096, "rms_norm_eps": 1e-8,
            "rope_theta": 100000.0,
        },
        qkv_bias="attention_bias", mlp_bias="mlp_bias", pairs=True,
    ),
    "youtu": FamilySpec(
        "YoutuForCausalLM",
        {
            "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 131072, "q_lora_rank": 1536,
            "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
            "rope_interleave": True, "tie_word_embeddings": True,
        },
        **_BIASED, latent=True,
    ),
    "qwen3_next": _QWEN_NEXT,
    "qwen3_5_text": _QWEN_DELTA,
    "qwen3_5_moe_text": replace(
        _QWEN_NEXT,
        architecture="Qwen3_5MoeForCausalLM",
        defaults={**_QWEN_NEXT.defaults, "num_experts": 256, "num_experts_per_tok": 8},
        by_key_head=False, ff_width="moe_intermediate_size", nested=(),
        agreed={"decoder_sparse_step": (1,), "mlp_only_layers": ([],), "norm_topk_prob": (True,)},
    ),
    "llama4_text": FamilySpec(
        "Llama4ForCausalLM",
        {
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_local_experts": 16,
            "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "router_aux_loss_coef": 0.001,
            "no_rope_layer_interval": 4, "attention_chunk_size": 8192, "attn_temperature_tuning": True,
            "floor_scale": 8192, "attn_scale": 0.1, "use_qk_norm": True, "n_shared_experts": 1,
        },
        **_BIASED, chunks=True, pairs=True, ff_width="intermediate_size_mlp", feed_forward="feed_forward", nested=(),
        rope_kinds=("default", "linear", "llama3", "dynamic"),  # the others scale the inputs of query and key norms
        experts=ExpertsSpec(
            "logits", width="intermediate_size", step="interleave_moe_layer_step", listed="moe_layers",
            shared_name="shared_expert", router_name="router", apart=None, transposed=True, untold=True,
        ),
    ),
}  # fmt: skip
MIXTURES = tuple(name for name, spec in FAMILIES.items() if spec.experts is not None)
# Like `limits`, for every family.
PLAIN: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("attention_dropout", (None, 0), "which our decoder does not have"),
    ("clip_qkv", (None, 0), "which our decoder does not have"),
    ("router_jitter_noise", (None, 0), "which our decoder does not have"),
)


def limits(family: str) -> Iterator[tuple[str, tuple[Any, ...], str]]:
    """Yield keys of a family's config.json, the values that our decoder supports, and its alternative.

    A missing key is always supported.
    """
    yield from PLAIN
    if "hidden_act" not in FAMILIES[family].agreed:
        activation = FAMILIES[family].activation
        yield "hidden_act", activation, f"where our decoder has {activation[0]}"
    for key, agreed in FAMILIES[family].agreed.items():
        yield key, (None, *agreed), f"where our decoder has {' or '.join(map(repr, agreed))} in a {family} model"


# Language models that mix a row's documents: transformers does not pass document boundaries to a recurrent state, a
# convolution, or a positional bias or embedding. They train on rows of one document.
UNSEPARATED = frozenset({
    "afmoe", "bailing_hybrid", "bamba", "biogpt", "bloom", "falcon", "falcon_h1", "falcon_mamba", "granitemoehybrid",
    "inkling2_text", "inkling_text", "jamba", "kimi_linear", "mamba", "mamba2", "minimax", "mpt", "nemotron_h",
    "olmo_hybrid", "openai-gpt", "opt", "qwen4_exp_text", "recurrent_gemma", "rwkv", "xglm", "xlstm", "zaya", "zamba2",
})  # fmt: skip
# Multimodal models whose language model runs in our decoder: transformers' class.
MULTIMODAL = {
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "gemma4_unified": "Gemma4UnifiedForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "llava_next": "LlavaNextForConditionalGeneration",
    "llava_onevision": "LlavaOnevisionForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "kimi_k25": "Kimi_K25ForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration",
}


@dataclass(frozen=True)
class TowerSpec:
    """A base's image preparation, tokens and tower."""

    processors: tuple[str, ...]  # name prefixes of transformers' image processors for it
    sizes: Literal["bounded", "one", "longest", "budget"]
    """Size of an image: between two pixel counts; fixed; a maximum length; a maximum number of placeholders."""
    towers: tuple[str, ...] = ()  # the model types of its vision_config; empty: any
    frame: Literal["none", "rows", "ids", "text"] = "none"
    """Tokens besides placeholders: a mark after each row of them; one before and one after; those with empty lines, in
    the template's text."""
    axes: Literal["one", "sections", "in turn"] = "one"
    """How time, height and width share the pairs of a head, if a token has three positions."""
    mutual: Literal["none", "windowed", "all"] = "none"  # layers where an image's placeholders read each other
    merge: str = ""  # key of a placeholder's patches in height and width, or of an image's placeholders
    projector: Literal["own", "linear", "normed", "mlp", "merger"] = "own"
    """Between tower and language model: inside the tower; one matrix; a norm and one; two; a merger and two."""


_QWEN_TOWER = TowerSpec(("Qwen2VLImageProcessor",), "bounded", axes="in turn")
_PIXTRAL = TowerSpec(("PixtralImageProcessor",), "longest", ("pixtral",), "rows", projector="mlp")
# Of these, the models that train on images; after a comma, the model type of a tower with other settings.
TOWERS = {
    "qwen2_5_vl": replace(_QWEN_TOWER, axes="sections"),
    "qwen3_vl": _QWEN_TOWER, "qwen3_5": _QWEN_TOWER, "qwen3_5_moe": _QWEN_TOWER,
    "gemma3": TowerSpec(
        ("Gemma3ImageProcessor",), "one", ("siglip_vision_model",), "text", mutual="all", merge="mm_tokens_per_image",
        projector="normed",
    ),
    "gemma4": TowerSpec(
        ("Gemma4ImageProcessor",), "budget", ("gemma4_vision",), "ids", mutual="windowed", projector="linear",
    ),
    "llava": TowerSpec(
        ("CLIPImageProcessor", "LlavaImageProcessor", "SiglipImageProcessor"), "one",
        ("clip_vision_model", "siglip_vision_model"), projector="mlp",
    ),
    "llava,pixtral": _PIXTRAL,
    "mistral3": replace(_PIXTRAL, merge="spatial_merge_size", projector="merger"),
}  # fmt: skip
TOWER_BASES = tuple(kind for kind in TOWERS if "," not in kind)
# transformers' defaults for language model keys that published multimodal config.json files omit.
NESTED: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("llava", "llama"): {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": None, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    },
}  # fmt: skip
# transformers' defaults for a tower's keys.
_SEEN = {"num_channels": 3, "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "patch_size": 16}
VISION: Mapping[str, Mapping[str, Any]] = {
    "clip_vision_model": {**_SEEN, "num_hidden_layers": 12, "image_size": 224, "patch_size": 32},
    "siglip_vision_model": {**_SEEN, "num_hidden_layers": 12, "image_size": 224, "vision_use_head": True},
    "pixtral": {**_SEEN, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24},
    "gemma4_vision": {
        **_SEEN, "num_hidden_layers": 16, "num_key_value_heads": 12, "head_dim": 64, "pooling_kernel_size": 3,
        "position_embedding_size": 10240,
    },
}  # fmt: skip
ARCHITECTURES = {**{name: spec.architecture for name, spec in FAMILIES.items()}, **MULTIMODAL}
FLAT = ("qwen2_vl", "qwen2_5_vl")  # may have the language model's keys at the top level of config.json
HEAD_INSIDE = ("llama4",)  # the language model includes its head, in transformers too
# Language models that are equal to a text family on text, and the keys that they do not read: there, the three
# positions of a token (time, height, width), which rotate parts of its head, are equal. qwen2's head width is the width
# divided by the heads.
SAME: dict[str, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys((*FLAT, "qwen2_vl_text", "qwen2_5_vl_text"), ("qwen2", ("head_dim",))),
    "qwen3_vl_text": ("qwen3", ()),
    "kimi_k2": ("deepseek_v3", ()),
}
