"""Tables of other trainers' keys: the place of each value in our YAML, or why there is no place.

`optrush import` translates files by them; the error for a YAML with such a key names ours. A place is a dotted
path of our YAML, `*.NAME` a key of the objective's own section, and `@NAME` a value that `cli.import_config` combines
with others: rows and accumulated batches become slots, checkpoints an epoch a fraction of the run. Defaults of a tool
that differ from ours are listed with it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import yaml

ToolName = Literal["axolotl", "llama-factory", "trl-sft", "trl-dpo", "trl-kto", "trl-reward", "trl-gkd", "train.py"]


@dataclass(frozen=True)
class Rule:
    """The conversion of one key of another tool."""

    to: str = ""  # a place
    values: Mapping[Any, Any] | None = None  # their value -> ours; others are rejected
    idle: str = ""  # why the key, or a value outside `values`, has no effect here
    note: str = ""  # the difference here, if the value has a place
    only: tuple[Any, ...] = ()  # values without an effect; others are rejected
    do: str = ""  # remedy for a rejected value
    null: str = ""  # meaning of null if not the tool's default: rejected


def to(place: str, values: Mapping[Any, Any] | None = None, do: str = "") -> Rule:
    return Rule(to=place, values=values, do=do)


def listed(reason: str) -> Rule:
    return Rule(idle=reason)


def only(*values: Any, do: str) -> Rule:
    return Rule(only=values, do=do)


def on(technique: str, **options: Any) -> Rule:
    """Return the rule of a key that turns a technique on or off."""
    return to("with", {True: {technique: options}, False: {}})


Table = dict[str, Rule]
T = TypeVar("T")


def spread(values: Mapping[str, T]) -> dict[str, T]:
    """Split the keys of a mapping at spaces into single names."""
    return {name: value for names, value in values.items() for name in names.split()}


def rules_of(fates: Mapping[str, str | Rule]) -> Table:
    """Return the rule of each key; a rule may be given as only a place."""
    return {name: to(fate) if isinstance(fate, str) else fate for name, fate in spread(fates).items()}


LEAVE = "leave it out: optrush has no counterpart"
NO_VIDEOS = only(do="leave it out: videos and audio are not trained on here")
DROPPED = only(do="remove it: rows that are too long are dropped whole")
LOGGED = listed("a logging option; `tracker:` reports a run (docs/trackers.md)")
PATHS = listed("file locations do not change the training")
SPEED = listed("a choice of kernels: `optrush plan` finds the fastest set for this machine")
ELSEWHERE = listed("speed or memory of another trainer")
EVALUATION = listed("evaluation uses training's batch sizes and precision")
LAYOUT = listed("evaluation uses training's row layout")
RECOMPUTED = listed("how torch recomputes; gradients do not change")
COMPILED = listed("`compile` has settings of its own")
READING = listed("rows are read and tokenised by `data.workers` processes")
GENERATED = listed("no text is generated while training: `optrush generate` answers prompts afterwards")
PACKED = listed("packing measures row lengths and has its own window")
SPECIAL = listed("special tokens come from the tokenizer's files; padding needs none")
TOKENIZER = listed("the model folder's tokenizer.json is used")
DEVICES = listed("a rank has one device: --ranks N, and `ddp` or `fsdp` follow")
REFERENCE = listed("the reference uses training's batch size")
HUB_ACCESS = listed("hub access uses the environment's HF_TOKEN")
TEMPLATED = listed("the chat template of the model renders the rows")
ON, OFF = (True, "true", "True", 1), (False, "false", "False", 0)
ABSENT = only(*OFF, do=LEAVE)
ALWAYS = only(*ON, do=LEAVE)
NOT_RESUMED = only(*OFF, "auto", do="leave it out, and run: optrush train --resume auto")
BOOL = {True: True, False: False}
FLAG = {True: True, False: None}  # off is the default

SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "@constant", "constant_with_warmup": "constant"} | {
    "cosine_with_min_lr": "cosine", "cosine_with_restarts": "@cosine", "warmup_stable_decay": "wsd",
}  # fmt: skip
OPTIMIZERS: dict[str, dict[str, Any]] = spread({
    "adamw_torch_fused adamw_apex_fused": {"fused-adamw": {}}, "adamw_torch adamw_hf adamw": {},
    "adamw_8bit adamw_bnb_8bit adamw_torch_8bit": {"adam8bit": {}}, "adamw_torch_4bit": {"adam4bit": {}},
    "paged_adamw_8bit": {"adam8bit": {}, "paged-states": {}}, "muon": {"muon": {}},
    "paged_adamw_32bit paged_adamw": {"fused-adamw": {}, "paged-states": {}},
})  # fmt: skip
ATTENTION = spread({
    "flash_attention_2 flash_attention_3 fa2 fa3 kernels-community/vllm-flash-attn3 kernels-community/flash-attn2 "
    "kernels-community/flash-attn3 kernels-community/flash-attn": {"attention": {"impl": "varlen"}},
    "sdpa auto flex_attention xformers": {"attention": {"impl": "sdpa"}},
    "eager disabled": {"attention": {"impl": "masked"}},
})  # fmt: skip
RECOMPUTE: dict[Any, dict[str, Any]] = {
    True: {"recompute": {}}, False: {}, "unsloth": {"recompute": {}}, "offload": {"offload-activations": {}},
}  # fmt: skip
BF16: dict[Any, Any] = {**FLAG, "auto": True, "full": True}
DTYPES = {
    f"{torch}{name}": True if name == "bfloat16" else None
    for torch in ("", "torch.")
    for name in ("bfloat16", "float16", "float32", "auto")
}
FIRST: dict[Any, Any] = {
    True: None,
    **{name: name for name in ("pissa", "olora", *(f"pissa_niter_{n}" for n in range(1, 100)))},
}
LOSSES = to("*.loss", {name: name for name in ("sigmoid", "ipo", "orpo", "simpo")}, do="dpo.loss: sigmoid or ipo")
TEMPLATE = Rule(
    "model.chat_template", {"chatml": "chatml"}, "the model's own chat template is used",
    "chatml: texts start with the tokenizer's begin-of-text token, if it has one",
)  # fmt: skip
PRECOMPUTED = to("*.reference", {True: "precomputed", False: None})

# Arguments of transformers' trainer, shared by LLaMA-Factory, TRL and most scripts.
TRAINER = rules_of({
    "model_name_or_path": "model.path", "model_revision": "model.revision", "output_dir": "output", "seed": "seed",
    "data_seed": only(42, None, do="seed: the run's seed also orders the data"),
    "per_device_train_batch_size": "@rows", "gradient_accumulation_steps": "@accumulate",
    "learning_rate": "optim.lr", "lr_scheduler_type": to("optim.schedule", SCHEDULES),
    "lr_scheduler_kwargs": "@schedule", "warmup_ratio": "@warmup_ratio", "warmup_steps": "@warmup_steps",
    "weight_decay": "optim.weight_decay", "adam_beta1": "@beta1", "adam_beta2": "@beta2", "adam_epsilon": "optim.eps",
    "max_grad_norm": "optim.clip", "num_train_epochs": "train.epochs", "max_steps": "train.steps",
    "logging_steps": "train.log_every", "eval_strategy evaluation_strategy": "@eval_strategy",
    "eval_steps": "@eval_steps", "save_strategy": "@save_strategy", "save_steps": "@save_steps",
    "save_total_limit": "train.keep", "load_best_model_at_end": to("train.best", BOOL),
    "overwrite_output_dir": to("train.overwrite", FLAG), "early_stopping_patience": "train.stop_after",
    "metric_for_best_model": only("loss", "eval_loss", do="leave it out: the best has the lowest held-out loss"),
    "greater_is_better": only(*OFF, do="leave it out: the best checkpoint has the lowest held-out loss"),
    "bf16": to("@bf16", BF16), "fp16": on("amp", dtype="fp16"), "pure_bf16": to("@pure", FLAG), "fp8": on("fp8"),
    "optim": to("with", OPTIMIZERS), "attn_implementation": to("with", ATTENTION),
    "gradient_checkpointing": to("@recompute", RECOMPUTE), "activation_offloading": to(
        "with", {False: {}, **{name: {"offload-activations": {}} for name in (True, "legacy", "disk")}}),
    "torch_compile": on("compile"), "use_liger_kernel use_liger": on("fused-loss"), "group_by_length": on(
        "sort-by-length"), "train_sampling_strategy": to("with", {
        "random": {}, "group_by_length": {"sort-by-length": {}}}),
    "deepspeed fsdp": "@sharding", "fsdp_config": "@fsdp_config", "config_file": "@accelerate",
    "dataloader_num_workers": "with.loader.workers",
    "max_samples max_train_samples": "data.max_samples", "streaming": to("data.stream", FLAG),
    "neftune_noise_alpha": "with.neftune.alpha", "ddp_timeout": "train.timeout",
    "do_train": ALWAYS, "do_predict": only(*OFF, do="optrush eval"),
    "predict_with_generate": only(*OFF, do="optrush generate answers a file of prompts"),
    "resume_from_checkpoint": NOT_RESUMED, "label_smoothing_factor": only(0, 0.0, do=LEAVE),
    "do_eval": listed("held-out loss is measured if `data.eval` is set"),
    "push_to_hub": listed("use optrush export RUN --push ORG/NAME afterwards"),
    "gradient_checkpointing_kwargs": RECOMPUTED, "torch_compile_backend torch_compile_mode": COMPILED,
    "tf32": listed("float32 matmuls stay float32 unless a precision is chosen"), "fp8_backend": SPEED,
    "fp8_enable_fsdp_float8_all_gather": listed("`fsdp` chooses the precision of gathered weights"),
    "fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params": listed("`fsdp: {}` shards block by block"),
    "trust_remote_code": listed("no code from a model's folder runs"),
    "report_to run_name logging_dir project plot_loss include_num_input_tokens_seen log_level disable_tqdm "
    "logging_first_step logging_strategy trackio_space_id include_tokens_per_second log_on_each_node": LOGGED,
    "hub_model_id hub_strategy hub_private_repo hub_token": HUB_ACCESS,
    "per_device_eval_batch_size eval_accumulation_steps bf16_full_eval": EVALUATION,
    "dataset_num_proc preprocessing_num_workers": READING,
    "remove_unused_columns": listed("the run's log lists unread keys of the rows"),
    "overwrite_cache": listed("the cache of tokenised rows is keyed by content"), "use_cache": GENERATED,
    "use_fast_tokenizer": TOKENIZER, "save_safetensors": listed("weights are written as safetensors"),
    "average_tokens_across_devices": listed("the loss is divided by the targets of all ranks"), "local_rank": DEVICES,
    "dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor ddp_find_unused_parameters "
    "low_cpu_mem_usage ddp_bucket_cap_mb ddp_broadcast_buffers torch_empty_cache_steps accelerator_config": ELSEWHERE,
    "dataloader_drop_last": listed("every row is read once per epoch, in the last step too"),
    "logging_nan_inf_filter skip_memory_metrics log_level_replica save_on_each_node": LOGGED,
    "hub_always_push hub_revision": HUB_ACCESS, "auto_find_batch_size full_determinism": ABSENT,
    "prediction_loss_only eval_on_start eval_delay include_for_metrics batch_eval_metrics eval_do_concat_batches":
        EVALUATION,
    "save_only_model": listed("a checkpoint always has the full state to resume"),
    "lora_r lora_rank": "with.lora.rank", "lora_alpha": "with.lora.alpha", "lora_dropout": "with.lora.dropout",
    "use_rslora": to("with.lora.rslora", FLAG), "use_dora": to("with.lora.dora", FLAG),
    "load_in_4bit": to("@four", FLAG), "load_in_8bit": to("@eight", FLAG), "loraplus_lr_ratio": "with.lora.lr_ratio",
    "loraplus_lr_embedding": listed("an embedding has no adapter here"),
}) | {"accelerate launch": to("@launcher")}  # fmt: skip
TRL = TRAINER | rules_of({
    "model_name": "model.path", "use_peft": to("@adapter", {True: "lora", False: None}),
    "lora_target_modules": "with.lora.targets", "lora_modules_to_save": "with.lora.save",
    "lora_task_type": only("CAUSAL_LM", do=LEAVE), "dtype torch_dtype": to("@pure", DTYPES),
    "bnb_4bit_quant_type": only("nf4", do="nf4 is the only 4-bit type"),
    "use_bnb_nested_quant": to("@double", BOOL), "bnb_4bit_quant_storage": listed("codes are stored as bytes"),
    "dataset_name": "@data", "dataset_config": "@data_config", "dataset_train_split": "@data_split",
    "dataset_test_split": "@test_split", "dataset_streaming": to("data.stream", FLAG),
    "dataset_text_field": "@text_field",
    "max_length max_seq_length": Rule("batch.seq", null="rows of any length", do="give a length"),
    "packing padding_free": on("packing"), "eval_packing": LAYOUT,
    "packing_strategy": only("bfd", do="leave it out: packing is best-fit decreasing"),
    "truncation_mode": only("keep_start", do="data.too_long: truncate keeps the beginning"),
    "completion_only_loss": to("@answers", BOOL), "assistant_only_loss": to("@assistant", FLAG),
    "chat_template_path": "model.chat_template", "eos_token": listed("the tokenizer's own token ends a text"),
    "pad_token": listed("padding needs no token"), "pad_to_multiple_of": listed("padding has its own width here"),
    "shuffle_dataset": listed("every epoch is shuffled, by the seed"),
    "ignore_bias_buffers": listed("`ddp` sends no buffers"), "num_processes": "@ranks",
    "accelerate_config": "@accelerate", "env": listed("set variables where the command is run"),
    "liger_kernel_config": SPEED, "learning_rate_scheduler_kwargs": only(do="write lr_scheduler_kwargs"),
})  # fmt: skip
TRL_SFT = TRL | rules_of({
    "loss_type": only("nll", "chunked_nll", do="leave it out: the loss is the mean over target tokens"),
})  # fmt: skip
TRL_DPO = TRL | rules_of({
    "beta": "*.beta", "loss_type": LOSSES, "label_smoothing": "*.label_smoothing", "disable_dropout": ALWAYS,
    "precompute_ref_log_probs": PRECOMPUTED, "max_prompt_length max_completion_length": DROPPED,
    "f_divergence_type": only("reverse_kl", do=LEAVE), "sync_ref_model use_weighting": ABSENT,
    "precompute_ref_batch_size": REFERENCE,
})  # fmt: skip
TRL_KTO = TRL | rules_of({
    "beta": "*.beta", "desirable_weight": "*.desirable_weight", "undesirable_weight": "*.undesirable_weight",
    "loss_type": only("kto", do=LEAVE), "disable_dropout": ALWAYS, "precompute_ref_log_probs": PRECOMPUTED,
    "max_prompt_length max_completion_length": DROPPED, "precompute_ref_batch_size": REFERENCE,
})  # fmt: skip
TRL_REWARD = TRL | rules_of({
    "center_rewards_coefficient": "*.center", "disable_dropout": ALWAYS, "lora_task_type": only("SEQ_CLS", do=LEAVE),
})  # fmt: skip
TRL_GKD = TRL_SFT | rules_of({
    "teacher_model_name_or_path": "distill.teacher", "temperature": "distill.temperature",
    "beta": to("distill.divergence", {0: "forward", 1: "reverse"}, do="beta: 0 (forward) or 1 (reverse)"),
    "lmbda": only(0, 0.0, do="lmbda: 0 trains on the rows; otherwise that share of answers is generated in training"),
    "seq_kd": only(*OFF, do="write the teacher's answers first: optrush generate"), "disable_dropout": ALWAYS,
    "max_new_tokens": listed("no answer is generated while training"),
})  # fmt: skip
SCRIPT = TRL_SFT | rules_of({  # for scripts named train.py
    "model model_id base_model": "model.path", "data data_path dataset train_file": "@data",
    "eval_file validation_file eval_split val_split validation_split eval_ratio val_set_size": "data.eval",
    "num_samples limit": "data.max_samples", "train_on_prompt train_on_prompts train_on_inputs": to(
        "data.train_on", {True: "all", False: "assistant"}),
    "block_size model_max_length seq_len max_seq_len context_length": "batch.seq",
    "batch_size micro_batch_size": "@rows", "gradient_accumulation": "@accumulate", "lr": "optim.lr",
    "epochs num_epochs": "train.epochs", "clean clean_output clean_output_dir": to("train.overwrite", FLAG),
    "gpu_memory_fraction memory_fraction max_memory_fraction": "with.memory-cap.fraction",
    "gpu_memory_mib memory_mib max_memory_mib": "with.memory-cap.mib", "output": "output", "tracker": LOGGED,
    "resume": only(*OFF, do="leave it out, and run: optrush train --resume auto"),
    "lora": to("@adapter", {True: "lora", False: None}), "qlora": to("@adapter", {True: "qlora", False: None}),
})  # fmt: skip
LLAMA_FACTORY = TRAINER | rules_of({
    "stage": to("objective", {"sft": "sft", "pt": "pretrain", "dpo": "dpo", "kto": "kto", "rm": "reward"}),
    "finetuning_type": to("@adapter", {"full": None, "lora": "lora"}, do="finetuning_type: full or lora"),
    "lora_target": "with.lora.targets", "additional_target": "with.lora.save",
    "adapter_name_or_path": "with.lora.init", "quantization_bit": to("@bits", {4: 4, 8: 8}),
    "quantization_method": only("bnb", "bitsandbytes", do="nf4, int8"), "double_quantization": to("@double", BOOL),
    "pissa_init": to("@pissa", FLAG), "pissa_iter": "@pissa_iter",
    "pissa_convert": listed("adapters are always saved for the published weights"),
    "upcast_layernorm": listed("norms are computed in float32"), "dataset": "@data", "eval_dataset": "@held_out",
    "dataset_dir": "@dataset_dir", "val_size": "data.eval", "template": TEMPLATE, "cutoff_len": "batch.seq",
    "packing neat_packing": on("packing"), "train_on_prompt": to("data.train_on", {True: "all", False: None}),
    "mask_history": to("data.train_on", {True: "last", False: None}), "flash_attn": to("with", ATTENTION),
    "enable_liger_kernel": on("fused-loss"), "disable_gradient_checkpointing": to(
        "@recompute", {True: {}, False: {"recompute": {}}}), "use_muon": on("muon"),
    "pref_beta": "*.beta", "pref_loss": LOSSES, "kto_chosen_weight": "*.desirable_weight",
    "kto_rejected_weight": "*.undesirable_weight", "simpo_gamma": "*.gamma", "pref_ftx": only(0, 0.0, do=LEAVE),
    "dpo_label_smoothing": "*.label_smoothing", "tokenized_path cache_dir": PATHS,
    "use_unsloth create_new_adapter": ABSENT, "use_kv_cache": GENERATED,
    "enable_thinking": listed("rows are rendered as they are"), "use_reentrant_gc": RECOMPUTED,
    "export_dir": only(do="leave it out, and run: optrush export RUN"),
    "infer_backend": only(do="this is no training: optrush chat"),
    "ref_model": only(do="leave it out: the reference is the model before training"),
    "freeze_vision_tower": only(*ON, do="leave it out, and write image: {train: tower} into the YAML"),
    "freeze_multi_modal_projector": only(*ON, do="leave it out, and write image: {train: projector} into the YAML"),
    "image_max_pixels": "data.max_pixels", "image_min_pixels": "data.min_pixels",
    "video_max_pixels video_min_pixels": NO_VIDEOS, "early_stopping_steps": "train.stop_after",
    "reserved_label_len": listed("documents are truncated at the end"),
    "preprocessing_batch_size data_shared_file_system": READING, "use_v1_kernels": SPEED,
    "add_tokens add_special_tokens": "model.add_tokens", "mix_strategy": only(
        "concat", do="mix_strategy: concat; data.path: [{path: FILE, weight: 0.5}] reads less of one"),
    "compute_accuracy eval_on_each_dataset": listed("held-out loss is measured; use `optrush eval` afterwards"),
    "print_param_status": LOGGED, "ms_hub_token om_hub_token hf_hub_token": HUB_ACCESS,
    "max_new_tokens top_p top_k temperature repetition_penalty skip_special_tokens do_sample num_beams": GENERATED,
    "ignore_pad_token_for_loss": only(*ON, do="leave it out: padding is never a target"),
    "infer_dtype offload_folder": ELSEWHERE,
})  # fmt: skip
AXOLOTL = TRAINER | rules_of({
    "base_model": "model.path", "revision_of_model": "model.revision", "tokenizer_config": "@tokenizer",
    "model_type tokenizer_type": listed("the files of the model's folder name the class"),
    "cls_model_config base_model_config type_of_model is_falcon_derived_model is_llama_derived_model "
    "is_mistral_derived_model is_qwen_derived_model": listed("the files of the model's folder name the class"),
    "tokens": "@tokens", "special_tokens": SPECIAL, "eot_tokens": "@eot", "chat_template": TEMPLATE,
    "chat_template_jinja": only(do="write it into a file: model.chat_template"),
    "datasets": "@datasets", "pretraining_dataset": "@pretraining", "test_datasets": "@held_out",
    "val_set_size": "data.eval", "sequence_len": "batch.seq", "sample_packing": on("packing"),
    "excess_length_strategy": to("data.too_long", {"drop": "drop", "truncate": "truncate"}),
    "min_sample_len": "data.clean.tokens", "dataset_exact_deduplication": to("data.clean.exact_duplicates", FLAG),
    "micro_batch_size": "@rows", "batch_size": "@all_rows", "num_epochs": "train.epochs", "evals_per_epoch": "@evals",
    "saves_per_epoch": "@saves", "optimizer": to("with", OPTIMIZERS), "lr_scheduler": to("optim.schedule", SCHEDULES),
    "adam_eps": "optim.eps", "bf16": to("@pure", BF16), "bfloat16": to("@pure", FLAG),
    "torch_dtype": to("@pure", DTYPES), "float16": only(*OFF, do="fp16: true"),
    "adapter": to("@adapter", {"lora": "lora", "qlora": "qlora"}, do="adapter: lora or qlora, or none"),
    "lora_target_modules": "with.lora.targets", "lora_target_linear": to("@linear", BOOL),
    "lora_target_parameters": "@parameters", "lora_modules_to_save": "with.lora.save",
    "lora_model_dir": "with.lora.init", "peft_use_rslora": to("with.lora.rslora", FLAG),
    "peft_use_dora": to("with.lora.dora", FLAG), "peft_init_lora_weights": to(
        "with.lora.init", FIRST, do="peft_init_lora_weights: true, pissa, pissa_niter_N or olora"),
    "train_on_inputs": to("data.train_on", {True: "all", False: None}),
    "rl": to("objective", {name: name for name in ("dpo", "ipo", "kto", "orpo", "simpo")}),
    "reward_model": to("objective", {True: "reward", False: None}), "rl_beta dpo_beta beta": "*.beta",
    "dpo_loss_type": LOSSES, "simpo_gamma": "*.gamma", "cpo_alpha": only(0, 0.0, do=LEAVE),
    "precompute_ref_log_probs": PRECOMPUTED, "dpo_use_weighting dpo_norm_loss": ABSENT, "max_prompt_len": DROPPED,
    "dpo_generate_during_eval": GENERATED,
    "kto_desirable_weight": "*.desirable_weight", "kto_undesirable_weight": "*.undesirable_weight",
    "center_rewards_coefficient": "*.center", "dpo_label_smoothing": "*.label_smoothing",
    "flash_attention": on("attention", impl="varlen"), "sdp_attention xformers_attention flex_attention": on(
        "attention", impl="sdpa"), "eager_attention": on("attention", impl="masked"),
    "pad_to_sequence_len": to("@whole_rows", BOOL), "plugins": "@plugins",
    "cut_cross_entropy liger_fused_linear_cross_entropy chunked_cross_entropy": on("fused-loss"),
    "noisy_embedding_alpha": "with.neftune.alpha",
    "auto_resume_from_checkpoints": listed("use optrush train --resume auto"),
    "strict": listed("keys are always checked"),
    "quantize_moe_experts": listed("experts use the same bits as the other linears"),
    "liger_glu_activation liger_rms_norm liger_layer_norm liger_rope liger_cross_entropy liger_rms_norm_gated "
    "lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel unsloth_lora_mlp flash_attn_cross_entropy "
    "flash_attn_rms_norm flash_attn_fuse_mlp flash_attn_fuse_qkv flash_optimum flex_attn_compile_kwargs use_kernels "
    "fused_attn_kernel use_scattermoe use_sonicmoe experts_implementation moe_bnb_fast unsloth_lora_qkv unsloth_lora_o "
    "unsloth_cross_entropy_loss unsloth_rms_norm unsloth_rope liger_swiglu use_liger_loss dpo_use_liger_kernel "
    "chunked_cross_entropy_num_chunks flash_attn_d512 moe_grouped_backend moe_dequant_chunk_size use_dsv4_kernels "
    "use_glm_dsa_kernels dsv4_fp8_lora_kernel dsv4_shared_mlp_lora_kernel": SPEED,
    "dpo_use_logits_to_keep dpo_padding_free batch_flattening ring_attn_func heads_k_stride sdpa_varlen deepcompile "
    "large_head_attention gemma4_hybrid_attn_impl expert_backend dsv4_fp4_grouped_mode expert_parallel_backend "
    "expert_parallel_num_nvl_bytes expert_parallel_num_rdma_bytes expert_parallel_fallback_on_unsupported": ELSEWHERE,
    "llama4_linearized_experts": listed("experts load as one matrix or one by one"),
    "resize_token_embeddings_to_32x": listed("the embedding keeps its size"),
    "tokenizer_use_fast tokenizer_legacy tokenizer_use_mistral_common tokenizer_save_jinja_files": TOKENIZER,
    "tiled_mlp tiled_mlp_num_shards tiled_mlp_use_original_mlp layer_offloading gc_steps gc_collect_steps max_memory "
    "cpu_offload_pin_memory qlora_sharded_model_loading peft_autocast_adapter_dtype embeddings_skip_upcast": ELSEWHERE,
    "selective_checkpointing recompute_layer_types dynamic_checkpoint": RECOMPUTED, "torch_compile_options": COMPILED,
    "fp32_norms fp32_norm_classes": listed("norms are computed in float32"),
    "freeze_mm_modules": listed("only the language model is trained"),
    "base_model_ignore_patterns": PATHS,
    "eta_min": listed("axolotl does not read it: `cosine_min_lr_ratio` is a floor"),
    "lora_fan_in_fan_out": listed("PEFT disables it for linears"),
    "model_quantization_config": only("Mxfp4Config", do="leave it out: stored MXFP4 is read as it is"),
    "model_quantization_config_kwargs": only({"dequantize": True}, do="leave it out: stored MXFP4 is read as it is"),
    "pretrain_multipack_attn": only(*ON, do="true: packed documents never attend to each other"),
    "shuffle_before_merging_datasets": listed("every epoch is shuffled, by the seed"),
    "do_causal_lm_eval eval_causal_lm_metrics do_bench_eval bench_dataset bench_split lm_eval_tasks lm_eval_batch_size "
    "lm_eval_post_train": listed("held-out loss is measured; `optrush eval` measures more afterwards"),
    "include_tkps use_trackio profiler_steps profiler_steps_start axolotl_config_path": LOGGED,
    "fsdp_version": listed("`fsdp` is FSDP2"),
    "streaming_multipack_buffer_size sample_packing_eff_est total_num_tokens total_supervised_tokens "
    "sample_packing_bin_size sample_packing_group_size sample_packing_mp_start_method multipack_real_batches "
    "pretrain_multipack_buffer_size": PACKED, "eval_batch_size eval_sequence_len": EVALUATION,
    "eval_sample_packing": LAYOUT, "dataset_processes dataset_keep_in_memory num_dataset_shards_to_save": READING,
    "device_map ddp experimental_skip_move_to_device": DEVICES,
    "gpu_memory_limit": only(do="leave it out, and add `with: {memory-cap: {mib: N}}`"),
    "bnb_config_kwargs": "@bnb",
    "dataset_prepared_path torchdistx_path": PATHS, "push_dataset_to_hub hf_use_auth_token": HUB_ACCESS,
    "debug": listed("--debug shows tracebacks"), "shuffle_merged_datasets": only(*ON, do="rows are always shuffled"),
    "loss_watchdog_threshold loss_watchdog_patience": listed("a run stops if the loss is not finite"),
    "save_first_step": listed("`train.save_every` sets when checkpoints are written"),
    "max_packed_sequence_len": only(do="sample_packing: true"), "processor_type": only(
        "AutoProcessor", do="leave it out: the base's image processor is used"),
    "skip_prepare_dataset": listed("images are read while rows are tokenised"),
    "curriculum_sampling relora gptq": ABSENT,
    "lora_on_cpu": listed("where adapters are merged; use `optrush export`"),
    "cosine_min_lr_ratio": "optim.min_lr_ratio",
    "cosine_constant_lr_ratio": only(
        0, 0.0, do="leave it out: a cosine decays to the end; optim.schedule: wsd holds the rate first"),
    "eval_max_new_tokens eval_table_size generate_samples num_generation_samples generation_max_new_tokens": GENERATED,
    "gpu_count": listed("--ranks N"),
    "use_tensorboard use_wandb project_name": LOGGED, "orpo_alpha": "*.beta",
    "num_labels": only(1, do="num_labels: 1: `objective: reward` trains one score"),
    "tensor_parallel_size": "@tensor", "context_parallel_size sequence_parallel_degree": "@context",
    "expert_parallel_size": "@experts",
    "dp_shard_size": "@shards", "dp_replicate_size": "@replicas", "unfrozen_parameters": "@unfrozen",
    "model_config overrides_of_model_config": "@config_json", "reinit_weights": to("@random", FLAG),
})  # fmt: skip
# Known keys of these tools without a counterpart: the error gives the reason, not the nearest spelling.
FOREIGN = re.compile(
    r"(lora_target_parameters|unfrozen_parameters|"
    r"freeze_|image|video|audio|vision|qat|ebft|expert|moe|galore|apollo_|badam|lisa_"
    r"|oft_|kt_|reinit_weights|reward_model|process_reward|diffusion|relora|gptq|vllm|"
    r"trl$|quantize_|onebit|llmcompressor|lora_qkv|reward|"
    r"dft|eaft|asft)"
)
# Options of `accelerate launch` that shard a model.
SHARDED = re.compile(r"use_fsdp|use_deepspeed|fsdp_|zero_stage|offload_|deepspeed_config_file")
LOGGER = re.compile(r"(wandb|mlflow|comet|swanlab|use_swanlab|trackio|use_otel|otel|use_mlflow|use_comet|ray_|use_ray)")


@dataclass(frozen=True)
class Tool:
    """Another trainer: its keys, its defaults that differ from ours, by place, and its required keys."""

    name: str
    keys: Table
    defaults: Mapping[str, Any] = field(default_factory=dict)
    needed: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # meaning if absent, and remedy


_TRAINER: dict[str, Any] = {
    "@beta1": 0.9, "@beta2": 0.999, "seed": 42, "optim.schedule": "linear", "@rows": 8, "train.epochs": 3.0,
    "train.keep": None, "train.best": False, "@save_strategy": "steps", "@save_steps": 500, "@logged": 500,
}  # fmt: skip
_TRL: dict[str, Any] = {
    **_TRAINER, "batch.seq": 1024, "@recompute": {"recompute": {}}, "@bf16": True, "@double": False,
    "with.lora.rank": 16, "with.lora.alpha": 32.0, "with.lora.dropout": 0.05, "with.lora.targets": "peft",
    "output": "runs/trl", "@logged": 10, "@test_split": "test",
}  # fmt: skip
_SFT: dict[str, Any] = {**_TRL, "optim.lr": 2e-5, "data.too_long": "truncate", "data.train_on": "@rows"}
TOOLS: dict[ToolName, Tool] = {
    "axolotl": Tool("axolotl", AXOLOTL, {
        "@beta1": 0.9, "@beta2": 0.999, "seed": 42, "optim.schedule": "cosine", "train.best": False, "@double": True,
        "data.too_long": "drop", "batch.seq": 512, "with.lora.rank": 8, "with.lora.alpha": 8.0,
        "with.lora.dropout": 0.0, "@rows": 1, "output": "runs/axolotl", "optim.lr": 5e-5, "@save_strategy": "epoch",
        "@logged": 500, "@pure": True,
    }),
    "llama-factory": Tool("llama-factory", LLAMA_FACTORY, {
        **_TRAINER, "batch.seq": 2048, "data.too_long": "truncate", "optim.lr": 5e-5, "with.lora.rank": 8,
        "with.lora.dropout": 0.0, "with.lora.targets": "all", "@double": True, "@recompute": {"recompute": {}},
        "output": "runs/llama-factory", "@adapter": "lora",
    }),
    "trl-sft": Tool("trl-sft", TRL_SFT, _SFT),
    "trl-dpo": Tool("trl-dpo", TRL_DPO, {**_TRL, "optim.lr": 1e-6, "objective": "dpo"}),
    "trl-kto": Tool("trl-kto", TRL_KTO, {**_TRL, "optim.lr": 1e-6, "objective": "kto"}),
    "trl-reward": Tool("trl-reward", TRL_REWARD, {**_TRL, "optim.lr": 1e-4, "objective": "reward"}),
    "trl-gkd": Tool("trl-gkd", TRL_GKD, {**_SFT, "objective": "distill", "distill.temperature": 0.9}, {
        "lmbda": ("0.5: half of the answers are generated while training", "lmbda: 0 trains on the rows"),
        "beta": ("0.5: between both divergences", "beta: 0 (forward) or 1 (reverse)"),
    }),
    "train.py": Tool("train.py", SCRIPT, {**_SFT, "@test_split": None}),
}  # fmt: skip


# --- values


@dataclass(frozen=True)
class ValueKind:
    """The type of a place's value, and its conversion; None omits it."""

    kinds: tuple[type, ...]
    read: Callable[[Any], Any] = lambda value: value  # raises ValueError with a remedy
    do: str = ""  # remedy for a value of another type

    @property
    def words(self) -> str:
        """The kinds in words."""
        names = {int: "a whole number", float: "a number", list: "a list", dict: "a mapping", str: "a text"}
        return " or ".join(names[kind] for kind in self.kinds)


def _share(value: Any) -> Any:
    if isinstance(value, int | float) and value >= 1:
        raise ValueError("give the held-out fraction of the rows, such as 0.05")
    return value or None


def _clip(value: float) -> float:
    if not value:
        raise ValueError("optim.clip: null turns clipping off")
    return float(value)


def split_names(value: str | list[Any]) -> list[str]:
    """Return the names of a list, or of a text with commas."""
    return [str(name).strip(" ,") for name in (value.split(",") if isinstance(value, str) else value)]


_COUNT = ValueKind((int,), lambda n: n if n > 0 else None)
_MORE = ValueKind((int, float), lambda n: float(n) or None)
_LEAST = ValueKind((int, float), lambda least: [least, None] if least else None)
_REVISION = ValueKind((str, int, float), lambda name: None if name == "main" else str(name))
FORMS: dict[str, ValueKind] = spread({
    "@rows @all_rows @accumulate @pissa_iter @ranks batch.seq with.lora.rank data.max_samples train.stop_after":
        ValueKind((int,)),
    "@warmup_steps @warmup_ratio @beta1 @beta2 @eval_steps @save_steps @evals @saves with.lora.alpha with.lora.dropout "
    "optim.lr optim.weight_decay optim.eps train.epochs train.timeout *.beta *.label_smoothing *.desirable_weight "
    "*.undesirable_weight *.gamma *.center distill.temperature": ValueKind((int, float), float),
    "with.lora.lr_ratio with.neftune.alpha": _MORE, "train.steps with.loader.workers": _COUNT,
    "@tensor @context @experts @shards @replicas": ValueKind((int,), lambda n: n if n > 1 else None),
    "optim.min_lr_ratio": ValueKind((int, float), lambda n: float(n) or None), "@schedule": ValueKind((dict,)),
    "@datasets @pretraining @held_out": ValueKind((list, dict, str)), "@data with.lora.targets": ValueKind((str, list)),
    "with.lora.save": ValueKind((str, list), split_names), "@plugins @unfrozen": ValueKind((list,)),
    "@tokens": ValueKind((list, dict)), "@bnb @config_json": ValueKind((dict,)), "model.revision": _REVISION,
    "model.add_tokens": ValueKind((list, str), split_names, do="list the tokens to add: [<a>, <b>]"),
    "optim.clip": ValueKind((int, float), _clip), "data.eval": ValueKind((int, float, str), _share),
    "data.clean.tokens": _LEAST,
    "@keys @roles @columns @tags": ValueKind((dict,)), "@dataset_dir @messages @role @content file_name hf_hub_url "
    "columns.text columns.instruction columns.input columns.output columns.messages columns.system columns.tools "
    "columns.chosen columns.rejected columns.label": ValueKind((str,)),
})  # fmt: skip

# --- rows

# axolotl's row types that are conversations.
CHATS = ("chat_template", "sharegpt", "chat_template.default", "chat_template.argilla")
# Those with two answers per conversation, for objectives that compare answers.
PAIRS = ("chat_template", "chat_template.default")
# axolotl's row types: the objective, and our names of their keys if they differ.
ROW_KINDS: dict[str, tuple[str, dict[str, str]]] = {
    **dict.fromkeys(("alpaca", "alpaca:chat", "alpaca:phi", *CHATS), ("sft", {})),
    "alpaca_chat.load_qa": ("sft", {"question": "instruction", "answer": "output"}),
    **dict.fromkeys(("completion", "pretrain"), ("pretrain", {})),
    "gpteacher": ("sft", {"response": "output"}),
    **dict.fromkeys(("chatml.ultra", "llama3.ultra", "chatml.default", "user_defined.default",
                     "bradley_terry.chat_template"), ("dpo", {})),
    **dict.fromkeys(("chatml.intel", "llama3.intel"), ("dpo", {"question": "prompt"})),
    **dict.fromkeys(("chatml.argilla", "llama3.argilla"), ("kto", {"instruction": "prompt"})),
    **dict.fromkeys(("chatml.icr", "llama3.icr"), ("dpo", {"input": "prompt"})),
}  # fmt: skip
LEARNING = ("roles_to_train", "train_on_eos", "train_on_eot", "drop_system_message", "message_field_training")
_SOURCE = rules_of({
    "path": "path", "split": "split", "name": "name", "data_files": "data_files", "field_messages": "@messages",
    "message_property_mappings": "@keys", "message_field_role": "@role", "message_field_content": "@content",
    "roles": "@roles", "field text_column": "columns.text", "field_chosen": "columns.chosen",
    "field_rejected": "columns.rejected", "field_instruction": "columns.instruction", "field_input": "columns.input",
    "field_output": "columns.output", "field_system": "columns.system", "field_tools": "columns.tools",
    "ds_type format no_input_format chat_template field_thinking template_thinking_key trust_remote_code "
    "preprocess_shards split_thinking conversation": TEMPLATED,
})  # fmt: skip
# An entry of axolotl's `datasets`, for conversations and for other rows.
CHAT_SOURCE = Tool("axolotl's datasets", _SOURCE | rules_of({
    "roles_to_train": "@learnt", "message_field_training": "@mark", "drop_system_message": only(
        *OFF, do="remove the system message from the rows"),
    **{key: only("turn", do=f"{key}: turn: only the ends of answers are targets")
       for key in ("train_on_eos", "train_on_eot")},
}))  # fmt: skip
TEXT_SOURCE = Tool("axolotl's datasets", _SOURCE | rules_of({
    " ".join(LEARNING): listed("axolotl ignores it for rows of this type")}))  # fmt: skip
# An entry of LLaMA-Factory's list of data sets; the columns of its rows, and the keys and roles of the turns.
FACTORY_ENTRY = Tool("LLaMA-Factory's list", rules_of({
    "file_name": "file_name", "hf_hub_url": "hf_hub_url", "split": "split", "subset": "name", "columns": "@columns",
    "tags": "@tags", "formatting": "@formatting", "ranking": "@ranking",
    "ms_hub_url om_hub_url": listed("hf_hub_url or file_name is read"), "cloud_file_name script_url": only(
        do="save the rows as a file: --data"), "folder": only(do="name the files: --data"),
    "num_samples": only(do="give data.max_samples for all rows"),
}))  # fmt: skip
FACTORY_COLUMNS = Tool("LLaMA-Factory's columns", rules_of({
    "prompt": "columns.instruction", "query": "columns.input", "response": "columns.output",
    "messages": "columns.messages", "system": "columns.system", "tools": "columns.tools", "chosen": "columns.chosen",
    "rejected": "columns.rejected", "kto_tag": "columns.label",
    "history": only(do="write the rows as messages, with their earlier turns"),
    "images": "columns.images", "videos audios": NO_VIDEOS,
}))  # fmt: skip
FACTORY_TAGS = Tool("LLaMA-Factory's tags", rules_of({
    "role_tag": "@role", "content_tag": "@content", "user_tag": "user", "assistant_tag": "assistant",
    "system_tag": "system", "observation_tag": "tool", "function_tag": listed("a turn with tool calls keeps its role"),
}))  # fmt: skip
# Arguments of bitsandbytes, under a key of axolotl.
BITSANDBYTES = Tool("bitsandbytes", rules_of({
    "bnb_4bit_quant_type": only("nf4", do="use nf4, the only 4-bit type"),
    "bnb_4bit_use_double_quant": to("@double", BOOL), "bnb_4bit_quant_storage": listed("codes are stored as bytes"),
    "bnb_4bit_compute_dtype llm_int8_threshold": listed("matmuls use the run's precision"),
    "load_in_4bit load_in_8bit": only(do="write it next to bnb_config_kwargs, not inside"),
    "llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight": ABSENT,
}))  # fmt: skip
# Columns (theirs -> ours) that LLaMA-Factory ignores if its list names only others.
FACTORY_UNNAMED = {"query": "input", "system": "system"}
# Its default columns.
FACTORY_NAMED = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
IGNORED = "ignore"

# --- hints for a YAML of ours

# The nearest place for a value that is combined with others, or for a key that `optrush import` only lists.
NEAREST = {
    "model.path": "model", "@warmup_ratio": "optim.warmup", "@warmup_steps": "optim.warmup", "@adapter": "method",
    "@eval_steps": "train.eval_every", "@save_steps": "train.save_every", "@data": "data.path", "@recompute": "with",
    "@datasets": "data.path", "@tokens": "model.add_tokens",
    "sequence_length": "batch.seq", "context_length": "batch.seq",
    "@held_out": "data.eval", "report_to": "tracker", "*.gamma": "simpo.gamma",
    "*.center": "reward.center", "*.beta": "dpo.beta", "*.loss": "dpo.loss", "*.reference": "dpo.reference",
    "*.label_smoothing": "dpo.label_smoothing", "*.desirable_weight": "kto.desirable_weight",
    "*.undesirable_weight": "kto.undesirable_weight",
}  # fmt: skip
# Lines for keys with another value here.
LINES = {
    "@rows": "batch: {micro_tokens: N}, where N is VALUE rows x batch.seq",
    "@all_rows": "batch: {tokens: N}, where N is VALUE rows x batch.seq x ranks",
    "@accumulate": "batch: {tokens: N}, where N is VALUE x batch.micro_tokens x ranks",
    "@evals": "train: {eval_every: N}, where N is 1 / (VALUE x epochs)",
    "@saves": "train: {save_every: N}, where N is 1 / (VALUE x epochs)",
    "@bf16": "with: {amp: {}} (float32 weights), or with: {bf16: {}} (all in bf16)",
    "@pure": "with: {bf16: {}} (all in bf16), or with: {amp: {}} (float32 weights)",
    "@four": "method: qlora", "@eight": "with: {int8: {}, lora: {}}", "@linear": "with: {lora: {targets: all-linear}}",
    "early_stopping_threshold": "train: {stop_after: {evals: N, min_delta: VALUE}}",
    "@budget": "train: {steps: N}`, where `optrush plan CONFIG --solve tokens=VALUE` finds `N",
    "data.clean.tokens": "data: {clean: {tokens: [VALUE, null]}}",
}  # fmt: skip


# Keys that are command-line flags here.
FLAGS = {"resume_from_checkpoint": "optrush train CONFIG --resume auto"} | spread({
    "hours max_hours time max_time deadline time_limit": "optrush plan CONFIG --solve hours=N finds the steps",
    "usd cost max_cost dollars price budget": "optrush plan CONFIG --solve usd=N (or hours=N) finds the steps",
})  # fmt: skip


def foreign_spelling(key: str, value: Any) -> str | None:
    """Return our line for another tool's key; None for unknown keys and values without a place."""
    name = key.lower().replace("-", "_")
    rule = next((tool.keys[name] for tool in TOOLS.values() if name in tool.keys), Rule())
    if rule.to == "@tokens" and str(value)[:1].isdigit():  # the length of training, not tokens to add
        rule = to("@budget")
    place = NEAREST.get(name) or NEAREST.get(rule.to, rule.to)
    line = LINES.get(name) or LINES.get(rule.to) or _line(place)
    if name in FLAGS:
        return f"no key: {FLAGS[name]}"
    if not line or rule.to == key:
        return None
    if value is False:
        return "leave it out: it is off by default"
    known = rule.values or {}
    if rule is TEMPLATE and value not in known and not str(value).endswith((".jinja", ".jinja2", ".j2")):
        return f"leave it out: {rule.idle}, and none on rows of text, or of prompt and completion"
    value = known.get(value if isinstance(value, str | int | float) else "", known.get(True, value))
    if value in (None, {}):
        return "leave it out: it is the default"
    if place == "with" and not isinstance(value, dict):
        if value is not True:
            return None
        value = next(filter(None, known.values()))
    return f"write `{line.replace('VALUE', inline_yaml(value.removeprefix('@') if isinstance(value, str) else value))}`"


def _line(place: str) -> str:
    """Return the line of a place in our YAML; empty without a place."""
    if place[:1] in ("", "@", "*"):
        return ""
    first, *rest = place.split(".")
    return f"{first}: {''.join('{' + part + ': ' for part in rest)}VALUE{'}' * len(rest)}"


def inline_yaml(value: Any) -> str:
    """Return a value as YAML in one line."""
    return yaml.safe_dump(value, default_flow_style=True, width=sys.maxsize).removesuffix("\n...\n").strip()
