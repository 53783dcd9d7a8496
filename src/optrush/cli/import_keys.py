"""Tables of `optrush import`: for each key of another trainer the place of its value in our YAML, or why it has none.

A place that begins with `@` is a fact that `import_config` combines with others: rows and accumulated batches become
slots, checkpoints an epoch become a fraction of the run. Defaults of a tool that differ from ours are listed with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

ToolName = Literal["axolotl", "llama-factory", "trl-sft", "trl-dpo", "trl-kto", "trl-reward", "trl-gkd", "train.py"]


@dataclass(frozen=True)
class Rule:
    """What one key of another tool becomes."""

    to: str = ""  # a place in our YAML, or @fact
    values: Mapping[Any, Any] | None = None  # the value there, by the value here; others are refused
    idle: str = ""  # why the key has no effect here
    only: tuple[Any, ...] = ()  # values without an effect; others are refused
    do: str = ""  # instead of a value that is refused
    null: str = ""  # what null means, where that is not the tool's default: it is refused


def to(place: str, values: Mapping[Any, Any] | None = None, do: str = "") -> Rule:
    return Rule(to=place, values=values, do=do)


def idle(why: str) -> Rule:
    return Rule(idle=why)


def only(*values: Any, do: str) -> Rule:
    return Rule(only=values, do=do)


Table = dict[str, Rule]
LEAVE = "leave it out: optrush has no counterpart"
LOGGED = idle("the name of a log; `tracker:` reports a run (docs/trackers.md)")
PATHS = idle("where files are kept does not change the training")
SPEED = idle("a choice of kernels: `optrush plan` finds the fastest set for this machine")
ELSEWHERE = idle("speed or memory of another trainer")
EVALUATION = idle("evaluation takes the sizes and the precision of training")
RECOMPUTED = idle("how torch recomputes: gradients are the same")
COMPILED = idle("`compile` has settings of its own")
READING = idle("rows are read and tokenised by `data.workers` processes")
GENERATED = idle("no text is generated while training: `optrush generate` answers prompts afterwards")
PACKED = idle("packing counts the tokens of the rows, and has its own window")
TOKENIZER = idle("tokenizer.json of the model's folder is read")
DEVICES = idle("a rank has one device: --ranks N, and `ddp` or `fsdp` follow")
REFERENCE = idle("the reference is computed in batches of training's size")
HUB_ACCESS = idle("access to the hub: the environment's HF_TOKEN is used")
ON, OFF = (True, "true", "True", 1), (False, "false", "False", 0)
BOOL = {True: True, False: False}

SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "@constant", "constant_with_warmup": "constant"}
EIGHT: dict[str, Any] = {"adam8bit": {}}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    **{name: {"fused-adamw": {}} for name in ("adamw_torch_fused", "adamw_apex_fused")},
    **{name: {} for name in ("adamw_torch", "adamw_hf", "adamw")},
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit"), EIGHT),
    "paged_adamw_8bit": {**EIGHT, "paged-states": {}},
    **{name: {"fused-adamw": {}, "paged-states": {}} for name in ("paged_adamw_32bit", "paged_adamw")},
    "adamw_torch_4bit": {"adam4bit": {}}, "muon": {"muon": {}},
}  # fmt: skip
FIRST: dict[Any, Any] = {
    True: None,
    **{name: name for name in ("pissa", "olora", *(f"pissa_niter_{n}" for n in range(1, 100)))},
}
FLASH: dict[str, Any] = {"attention": {"impl": "varlen"}}
SDPA: dict[str, Any] = {"attention": {"impl": "sdpa"}}
ATTENTION: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("flash_attention_2", "flash_attention_3", "fa2", "fa3"), FLASH),
    "kernels-community/vllm-flash-attn3": FLASH, "kernels-community/flash-attn2": FLASH,
    "kernels-community/flash-attn3": FLASH, "kernels-community/flash-attn": FLASH,
    **dict.fromkeys(("sdpa", "auto", "flex_attention", "xformers"), SDPA),
    **{name: {"attention": {"impl": "masked"}} for name in ("eager", "disabled")},
}  # fmt: skip
RECOMPUTE: dict[Any, dict[str, Any]] = {
    True: {"recompute": {}},
    False: {},
    "unsloth": {"recompute": {}},
    "offload": {"offload-activations": {}},
}

# Arguments of transformers' trainer, which LLaMA-Factory, TRL and most scripts take.
TRAINER: Table = {
    "model_name_or_path": to("model.path"), "model_revision": to("@revision"),
    "output_dir": to("output"), "seed": to("seed"), "data_seed": only(42, None, do="seed: the data's is the run's"),
    "per_device_train_batch_size": to("@rows"), "gradient_accumulation_steps": to("@accumulate"),
    "learning_rate": to("optim.lr"), "lr_scheduler_type": to("optim.schedule", SCHEDULES),
    "warmup_ratio": to("@warmup_ratio"), "warmup_steps": to("@warmup_steps"),
    "weight_decay": to("optim.weight_decay"), "adam_beta1": to("@beta1"), "adam_beta2": to("@beta2"),
    "adam_epsilon": to("optim.eps"), "max_grad_norm": to("optim.clip"),
    "num_train_epochs": to("train.epochs"), "max_steps": to("@steps"), "logging_steps": to("train.log_every"),
    "eval_strategy": to("@eval_strategy"), "evaluation_strategy": to("@eval_strategy"), "eval_steps": to("@eval_steps"),
    "save_strategy": to("@save_strategy"), "save_steps": to("@save_steps"), "save_total_limit": to("train.keep"),
    "load_best_model_at_end": to("train.best", BOOL), "overwrite_output_dir": to("train.clean", BOOL),
    "bf16": to("@bf16"), "fp16": to("@fp16", BOOL), "pure_bf16": to("@pure", BOOL),
    "optim": to("@with", OPTIMIZERS), "attn_implementation": to("@with", ATTENTION),
    "gradient_checkpointing": to("@with", RECOMPUTE), "activation_offloading": to("@offload", BOOL),
    "torch_compile": to("@with", {True: {"compile": {}}, False: {}}),
    "use_liger_kernel": to("@with", {True: {"fused-loss": {}}, False: {}}), "use_liger": to("@with", {
        True: {"fused-loss": {}}, False: {}}),
    "deepspeed": to("@sharding"), "fsdp": to("@sharding"), "fsdp_config": to("@fsdp_config"),
    "config_file": to("@accelerate"), "accelerate launch": to("@launcher"),
    "group_by_length": to("@sorted", BOOL), "train_sampling_strategy": to("@sorted", {
        "random": False, "group_by_length": True}),
    "dataloader_num_workers": to("@workers"), "max_samples": to("data.max_samples"),
    "max_train_samples": to("data.max_samples"), "streaming": to("data.stream", BOOL),
    "gradient_checkpointing_kwargs": RECOMPUTED, "torch_compile_backend": COMPILED, "torch_compile_mode": COMPILED,
    "tf32": idle("float32 products stay float32 unless a precision is chosen"), "ddp_timeout": to("train.timeout"),
    "fp8_backend": SPEED,
    "fp8_enable_fsdp_float8_all_gather": idle("`fsdp` decides in which precision weights are gathered"),
    "trust_remote_code": idle("no code from a model's folder runs"), "do_train": only(*ON, do=LEAVE),
    "do_eval": idle("held-out loss is measured where `data.eval` names rows"),
    "do_predict": only(*OFF, do="optrush eval"),
    "predict_with_generate": only(*OFF, do="optrush generate answers a file of prompts"),
    "resume_from_checkpoint": only(*OFF, "auto", do="leave it out, and run: optrush train --resume auto"),
    "neftune_noise_alpha": to("@neftune"), "label_smoothing_factor": only(0, 0.0, do=LEAVE),
    "push_to_hub": idle("optrush export RUN --push ORG/NAME does so afterwards"),
    "fp8": to("@with", {True: {"fp8": {}}, False: {}}),
    "early_stopping_patience": to("train.stop_after"),
    "metric_for_best_model": only("loss", "eval_loss", do="leave it out: the best is the least held-out loss"),
    "greater_is_better": only(*OFF, do="leave it out: the best is the least held-out loss"),
    "lr_scheduler_kwargs": only(do="leave it out: a schedule has no options here, and decays to 0"),
    **dict.fromkeys(("fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params"),
                    idle("`fsdp: {}` shards block by block")),
    **dict.fromkeys(("report_to", "run_name", "logging_dir", "project", "plot_loss", "include_num_input_tokens_seen",
                     "log_level", "disable_tqdm", "logging_first_step", "logging_strategy", "trackio_space_id",
                     "include_tokens_per_second"), LOGGED),
    **dict.fromkeys(("hub_model_id", "hub_strategy", "hub_private_repo", "hub_token"), HUB_ACCESS),
    **dict.fromkeys(("per_device_eval_batch_size", "eval_accumulation_steps", "bf16_full_eval"), EVALUATION),
    **dict.fromkeys(("dataset_num_proc", "preprocessing_num_workers"), READING),
    "remove_unused_columns": idle("keys of the rows that are not read are named in the run's log"),
    "overwrite_cache": idle("tokenised rows are cached by what they are made of"), "use_cache": GENERATED,
    "use_fast_tokenizer": TOKENIZER, "save_safetensors": idle("weights are written as safetensors"),
    "average_tokens_across_devices": idle("the loss is divided by the targets of all ranks"),
    "local_rank": DEVICES, "log_on_each_node": LOGGED,
    **dict.fromkeys(("dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor",
                     "ddp_find_unused_parameters", "low_cpu_mem_usage", "ddp_bucket_cap_mb"), ELSEWHERE),
    "save_only_model": idle("a checkpoint has all that a run needs to go on"),
}  # fmt: skip
LORA: Table = {
    "lora_r": to("@lora.rank"), "lora_rank": to("@lora.rank"), "lora_alpha": to("@lora.alpha"),
    "lora_dropout": to("@lora.dropout"), "use_rslora": to("@lora.rslora", BOOL), "use_dora": to("@lora.dora", BOOL),
    "load_in_4bit": to("@four", BOOL), "load_in_8bit": to("@eight", BOOL),
    "loraplus_lr_ratio": to("@lora.lr_ratio"), "loraplus_lr_embedding": idle("an embedding has no adapter here"),
}  # fmt: skip
TRL: Table = {
    **TRAINER, **LORA,
    "model_name": to("model.path"), "use_peft": to("@adapter", {True: "lora", False: None}),
    "lora_target_modules": to("@targets"), "lora_modules_to_save": to("@lora.save"),
    "lora_task_type": only("CAUSAL_LM", do=LEAVE), "dtype": to("@dtype"), "torch_dtype": to("@dtype"),
    "bnb_4bit_quant_type": only("nf4", do="nf4 is the one type of four bits here"),
    "use_bnb_nested_quant": to("@double", BOOL), "bnb_4bit_quant_storage": idle("codes are bytes here"),
    "dataset_name": to("@data"), "dataset_config": to("@data_config"), "dataset_train_split": to("@data_split"),
    "dataset_test_split": to("@test_split"), "dataset_streaming": to("data.stream", BOOL),
    "dataset_text_field": to("@text_field"),
    **dict.fromkeys(("max_length", "max_seq_length"), Rule("batch.seq", null="rows of any length", do="give a length")),
    "packing": to("@packing", BOOL), "packing_strategy": only("bfd", do="leave it out: rows are filled best fit first"),
    "eval_packing": idle("evaluation takes the layout of training"), "padding_free": to("@packing", BOOL),
    "truncation_mode": only("keep_start", do="data.too_long: truncate keeps the beginning"),
    "completion_only_loss": to("@answers", BOOL), "assistant_only_loss": to("@assistant", BOOL),
    "chat_template_path": to("model.chat_template"), "eos_token": idle("the tokenizer's own ends a text"),
    "pad_token": idle("no token is padding here"), "pad_to_multiple_of": idle("padding has its own width here"),
    "shuffle_dataset": idle("every epoch is shuffled, by the seed"),
    "ignore_bias_buffers": idle("`ddp` sends no buffers"),
    "num_processes": to("@ranks"), "accelerate_config": to("@accelerate"),
    "env": idle("set variables where the command is run"),
    "liger_kernel_config": SPEED, "learning_rate_scheduler_kwargs": only(
        do="leave it out: a schedule has no options here, and decays to 0"),
}  # fmt: skip
TRL_SFT: Table = {
    **TRL, "loss_type": only("nll", "chunked_nll", do="leave it out: the loss is the mean over target tokens"),
}  # fmt: skip
TRL_DPO: Table = {
    **TRL, "beta": to("dpo.beta"), "loss_type": to("@loss", do="dpo.loss: sigmoid or ipo"),
    "label_smoothing": to("dpo.label_smoothing"), "disable_dropout": only(*ON, do=LEAVE),
    "precompute_ref_log_probs": to("dpo.reference", {True: "precomputed", False: None}),
    "max_prompt_length": only(do="leave it out: a pair that is too long is left out whole"),
    "max_completion_length": only(do="leave it out: a pair that is too long is left out whole"),
    "f_divergence_type": only("reverse_kl", do=LEAVE), "sync_ref_model": only(*OFF, do=LEAVE),
    "use_weighting": only(*OFF, do=LEAVE), "precompute_ref_batch_size": REFERENCE,
}  # fmt: skip
TRL_KTO: Table = {
    **TRL, "beta": to("kto.beta"), "desirable_weight": to("kto.desirable_weight"),
    "undesirable_weight": to("kto.undesirable_weight"), "loss_type": only("kto", do=LEAVE),
    "disable_dropout": only(*ON, do=LEAVE),
    "precompute_ref_log_probs": to("kto.reference", {True: "precomputed", False: None}),
    "max_prompt_length": only(do="leave it out: a row that is too long is left out whole"),
    "max_completion_length": only(do="leave it out: a row that is too long is left out whole"),
    "precompute_ref_batch_size": REFERENCE,
}  # fmt: skip
TRL_REWARD: Table = {
    **TRL, "center_rewards_coefficient": to("reward.center"), "disable_dropout": only(*ON, do=LEAVE),
    "lora_task_type": only("SEQ_CLS", do=LEAVE),
}  # fmt: skip
TRL_GKD: Table = {
    **TRL, "teacher_model_name_or_path": to("distill.teacher"), "temperature": to("distill.temperature"),
    "beta": to("distill.divergence", {0: "forward", 1: "reverse"}, do="beta: 0 (forward) or 1 (reverse)"),
    "lmbda": to("@lmbda"), "seq_kd": only(*OFF, do="write the teacher's answers first: optrush generate"),
    "disable_dropout": only(*ON, do=LEAVE), "max_new_tokens": idle("no answer is generated while training"),
    "loss_type": only("nll", "chunked_nll", do=LEAVE),
}  # fmt: skip
SCRIPT: Table = {  # of scripts that call themselves train.py
    **TRL_SFT,
    **dict.fromkeys(("model", "model_id", "base_model"), to("model.path")),
    **dict.fromkeys(("data", "data_path", "dataset", "train_file"), to("@data")),
    **dict.fromkeys(("eval_file", "validation_file"), to("data.eval")),
    **dict.fromkeys(("eval_split", "val_split", "validation_split", "eval_ratio", "val_set_size"), to("data.eval")),
    **dict.fromkeys(("num_samples", "limit"), to("data.max_samples")),
    **dict.fromkeys(("train_on_prompt", "train_on_prompts", "train_on_inputs"), to("data.train_on", {
        True: "all", False: "assistant"})),
    **dict.fromkeys(("block_size", "model_max_length", "seq_len", "max_seq_len", "context_length"), to("batch.seq")),
    **dict.fromkeys(("batch_size", "micro_batch_size"), to("@rows")),
    **dict.fromkeys(("lr",), to("optim.lr")), **dict.fromkeys(("epochs", "num_epochs"), to("train.epochs")),
    **dict.fromkeys(("clean", "clean_output", "clean_output_dir"), to("train.clean", BOOL)),
    **dict.fromkeys(("gpu_memory_fraction", "memory_fraction", "max_memory_fraction"), to("@memory.fraction")),
    **dict.fromkeys(("gpu_memory_mib", "memory_mib", "max_memory_mib"), to("@memory.mib")),
    "resume": only(*OFF, do="leave it out, and run: optrush train --resume auto"),
    "lora": to("@adapter", {True: "lora", False: None}), "qlora": to("@adapter", {True: "qlora", False: None}),
    "gradient_accumulation": to("@accumulate"), "output": to("output"), "tracker": LOGGED,
}  # fmt: skip
LLAMA_FACTORY: Table = {
    **TRAINER, **LORA,
    "stage": to("@objective", {"sft": "sft", "pt": "pretrain", "dpo": "dpo", "kto": "kto", "rm": "reward"}),
    "finetuning_type": to("@adapter", {"full": None, "lora": "lora"}, do="finetuning_type: full or lora"),
    "lora_target": to("@targets"), "additional_target": to("@lora.save"), "adapter_name_or_path": to("@lora.init"),
    "quantization_bit": to("@bits", {4: 4, 8: 8}), "quantization_method": only("bnb", "bitsandbytes", do="nf4, int8"),
    "double_quantization": to("@double", BOOL), "upcast_layernorm": idle("norms are computed in float32"),
    "dataset": to("@data"), "eval_dataset": to("@eval_data"), "dataset_dir": to("@dataset_dir"),
    "val_size": to("data.eval"), "template": to("@template"), "cutoff_len": to("batch.seq"),
    "packing": to("@packing", BOOL), "neat_packing": to("@packing", BOOL),
    "train_on_prompt": to("data.train_on", {True: "all", False: None}),
    "mask_history": to("data.train_on", {True: "last", False: None}),
    "flash_attn": to("@with", ATTENTION), "enable_liger_kernel": to("@with", {True: {"fused-loss": {}}, False: {}}),
    "disable_gradient_checkpointing": to("@recompute", {True: False, False: True}),
    "gradient_checkpointing": to("@recompute", BOOL),
    "pref_beta": to("dpo.beta"), "pref_loss": to("@loss", do="dpo.loss: sigmoid or ipo"),
    "kto_chosen_weight": to("@kto.desirable_weight"), "kto_rejected_weight": to("@kto.undesirable_weight"),
    "simpo_gamma": to("@gamma"), "pref_ftx": only(0, 0.0, do=LEAVE),
    "dpo_label_smoothing": to("dpo.label_smoothing"), "tokenized_path": PATHS, "use_unsloth": only(*OFF, do=LEAVE),
    "cache_dir": PATHS, "use_kv_cache": GENERATED, "use_muon": to("@with", {True: {"muon": {}}, False: {}}),
    "model_revision": to("@revision"), "enable_thinking": idle("rows are rendered as they are"),
    "export_dir": only(do="leave it out, and run: optrush export RUN"), "use_reentrant_gc": RECOMPUTED,
    "pissa_init": to("@pissa", BOOL), "pissa_iter": to("@pissa_iter"),
    "pissa_convert": idle("an adapter is always written for the published weights"),
    "create_new_adapter": only(*OFF, do=LEAVE), "infer_backend": only(do="this is no training: optrush chat"),
    "ref_model": only(do="leave it out: the reference is the model that training begins with"),
    "freeze_vision_tower": only(do="leave it out: models of images are not trained here"),
    "image_max_pixels": only(do="leave it out: models of images are not trained here"),
    "video_max_pixels": only(do="leave it out: models of images are not trained here"),
    "early_stopping_steps": to("train.stop_after"),
    "reserved_label_len": idle("a document is cut at its end"), "preprocessing_batch_size": READING,
}  # fmt: skip
AXOLOTL: Table = {
    **TRAINER, **LORA,
    "base_model": to("model.path"), "revision_of_model": to("@revision"),
    "tokenizer_config": to("@tokenizer"), "model_type": idle("config.json names the class"),
    "tokenizer_type": idle("the tokenizer's files name the class"), "tokens": to("@tokens"),
    "special_tokens": to("@special"), "eot_tokens": to("@eot"),
    "chat_template": to("@template"), "chat_template_jinja": only(do="write it into a file: model.chat_template"),
    "datasets": to("@datasets"), "pretraining_dataset": to("@pretraining"), "test_datasets": to("@test_datasets"),
    "val_set_size": to("data.eval"), "sequence_len": to("batch.seq"), "sample_packing": to("@packing", BOOL),
    "excess_length_strategy": to("data.too_long", {"drop": "drop", "truncate": "truncate"}),
    "min_sample_len": to("@least"), "dataset_exact_deduplication": to("@dedup", BOOL),
    "micro_batch_size": to("@rows"), "batch_size": to("@all_rows"), "num_epochs": to("train.epochs"),
    "evals_per_epoch": to("@evals"), "saves_per_epoch": to("@saves"),
    "optimizer": to("@with", OPTIMIZERS), "lr_scheduler": to("optim.schedule", SCHEDULES), "adam_eps": to("optim.eps"),
    "bfloat16": to("@pure", BOOL), "float16": only(*OFF, do="fp16: true"),
    "adapter": to("@adapter", {"lora": "lora", "qlora": "qlora"}, do="adapter: lora or qlora, or none"),
    "lora_target_modules": to("@targets"), "lora_target_linear": to("@linear", BOOL),
    "lora_modules_to_save": to("@lora.save"), "lora_model_dir": to("@lora.init"), "peft_use_rslora": to(
        "@lora.rslora", BOOL), "peft_use_dora": to("@lora.dora", BOOL), "peft_init_lora_weights": to(
        "@lora.init", FIRST, do="peft_init_lora_weights: true, pissa, pissa_niter_N or olora"),
    "lora_fan_in_fan_out": only(*OFF, do=LEAVE),
    "train_on_inputs": to("data.train_on", {True: "all", False: None}),
    "rl": to("@objective", {"dpo": "dpo", "ipo": "ipo", "kto": "kto", "orpo": "orpo", "simpo": "simpo"}),
    "kto_desirable_weight": to("@kto.desirable_weight"), "kto_undesirable_weight": to("@kto.undesirable_weight"),
    "reward_model": to("@objective", {True: "reward", False: None}), "center_rewards_coefficient": to("@center"),
    "rl_beta": to("dpo.beta"), "dpo_label_smoothing": to("dpo.label_smoothing"),
    "flash_attention": to("@with", {True: FLASH, False: {}}), "sdp_attention": to("@with", {True: SDPA, False: {}}),
    "xformers_attention": to("@with", {True: SDPA, False: {}}), "pad_to_sequence_len": to("@whole_rows", BOOL),
    "auto_resume_from_checkpoints": idle("optrush train --resume auto goes on"),
    "strict": idle("keys are always checked"),
    "plugins": to("@plugins"), "cut_cross_entropy": to("@with", {True: {"fused-loss": {}}, False: {}}),
    "liger_fused_linear_cross_entropy": to("@with", {True: {"fused-loss": {}}, False: {}}),
    "liger_glu_activation": SPEED, "liger_rms_norm": SPEED, "liger_layer_norm": SPEED, "liger_rope": SPEED,
    "liger_cross_entropy": SPEED, "lora_mlp_kernel": SPEED, "lora_qkv_kernel": SPEED, "lora_o_kernel": SPEED,
    "lora_embedding_kernel": SPEED, "unsloth_lora_mlp": SPEED, "flash_attn_cross_entropy": SPEED,
    "fused_attn_kernel": SPEED, "use_scattermoe": SPEED, "use_sonicmoe": SPEED, "experts_implementation": SPEED,
    "moe_bnb_fast": SPEED, "quantize_moe_experts": idle("experts are held in the bits of the linears beside them"),
    "lora_target_parameters": to("@parameters"),
    "flash_attn_rms_norm": SPEED, "flash_attn_fuse_mlp": SPEED, "flash_attn_fuse_qkv": SPEED, "flash_optimum": SPEED,
    "flex_attn_compile_kwargs": SPEED, "use_kernels": SPEED,
    "resize_token_embeddings_to_32x": idle("the embedding keeps its size"),
    "tokenizer_use_fast": TOKENIZER, "tokenizer_legacy": TOKENIZER, "tiled_mlp": ELSEWHERE,
    "streaming_multipack_buffer_size": PACKED, "liger_rms_norm_gated": SPEED,
    "fsdp_version": idle("`fsdp` is FSDP2"),
    "eval_batch_size": EVALUATION,
    "eval_sample_packing": idle("evaluation takes the layout of training"), "sample_packing_eff_est": PACKED,
    "total_num_tokens": PACKED, "dataset_processes": READING, "experimental_skip_move_to_device": DEVICES,
    "device_map": DEVICES,
    "ddp": DEVICES, "gpu_memory_limit": only(do="leave it out, and add `with: {memory-cap: {mib: N}}`"),
    "bnb_config_kwargs": only(do="leave it out, and give `with: {nf4: {double: false}}`"),
    "dataset_prepared_path": PATHS, "push_dataset_to_hub": HUB_ACCESS, "hf_use_auth_token": HUB_ACCESS,
    "debug": idle("--debug shows tracebacks"), "shuffle_merged_datasets": only(*ON, do="rows are always shuffled"),
    **dict.fromkeys(("loss_watchdog_threshold", "loss_watchdog_patience"),
                    idle("a loss that is not finite stops a run")),
    "torchdistx_path": PATHS, "save_first_step": idle("`train.save_every` says when checkpoints are written"),
    "max_packed_sequence_len": only(do="sample_packing: true"),
    "processor_type": only(do="leave it out: models of images are not trained here"),
    "skip_prepare_dataset": only(*OFF, do="leave it out: models of images are not trained here"),
    "curriculum_sampling": only(*OFF, do=LEAVE), "relora": only(*OFF, do=LEAVE), "gptq": only(*OFF, do=LEAVE),
    "lora_on_cpu": idle("where an adapter is merged: `optrush export` merges one"),
    **dict.fromkeys(("cosine_min_lr_ratio", "cosine_constant_lr_ratio"),
                    only(0, 0.0, do="leave it out: a cosine has no floor here, and decays to 0")),
    "eval_max_new_tokens": GENERATED, "eval_table_size": GENERATED, "use_tensorboard": LOGGED, "use_wandb": LOGGED,
    "gpu_count": idle("--ranks N"), "torch_dtype": to("@dtype"),
    **dict.fromkeys(("wandb_project", "wandb_entity", "wandb_watch", "wandb_name", "wandb_log_model", "wandb_run_id",
                     "mlflow_tracking_uri", "mlflow_experiment_name", "project_name", "trackio_project_name",
                     "trackio_run_name", "comet_project_name"), LOGGED),
}  # fmt: skip
# Known keys of these tools whose counterpart is missing: the refusal gives the reason, not the nearest spelling.
FOREIGN = re.compile(
    r"(lora_target_parameters|unfrozen_parameters|"
    r"freeze_|image|video|audio|vision|qat|ebft|expert|moe|galore|apollo_|badam|lisa_"
    r"|oft_|kt_|reinit_weights|reward_model|process_reward|num_labels|diffusion|relora|gptq|vllm|"
    r"trl$|quantize_|onebit|tensor_parallel|context_parallel|dp_(shard|replicate)|llmcompressor|lora_qkv|reward|"
    r"dft|eaft|asft)"
)

# Options of `accelerate launch` that shard a model.
SHARDED = re.compile(r"use_fsdp|use_deepspeed|fsdp_|zero_stage|offload_|deepspeed_config_file")
LOGGER = re.compile(r"(wandb|mlflow|comet|swanlab|use_swanlab|trackio|use_otel|otel|use_mlflow|use_comet|ray_|use_ray)")


@dataclass(frozen=True)
class Tool:
    """Another trainer: its keys, and those of its defaults that are not ours, by place."""

    name: ToolName
    keys: Table
    defaults: Mapping[str, Any] = field(default_factory=dict)


_ADAM = {"@beta1": 0.9, "@beta2": 0.999}
_TRAINER = {
    **_ADAM, "seed": 42, "optim.schedule": "linear", "@warmup_steps": 0, "@rows": 8, "train.epochs": 3.0,
    "train.keep": None, "train.best": False, "@save_strategy": "steps", "@save_steps": 500,
}  # fmt: skip
_TRL: dict[str, Any] = {
    **_TRAINER, "batch.seq": 1024, "@with": {"recompute": {}}, "@bf16": True, "@double": False,
    "@lora.rank": 16, "@lora.alpha": 32, "@lora.dropout": 0.05, "@targets": "peft", "output": "runs/trl",
}  # fmt: skip
_SFT: dict[str, Any] = {**_TRL, "optim.lr": 2e-5, "data.too_long": "truncate"}
TOOLS: dict[ToolName, Tool] = {
    "axolotl": Tool("axolotl", AXOLOTL, {
        **_ADAM, "seed": 42, "optim.schedule": "cosine", "@warmup_steps": 0, "train.best": False, "@double": True,
        "data.too_long": "drop", "batch.seq": 512, "@lora.alpha": 8, "@lora.dropout": 0.0, "@rows": 1,
        "output": "runs/axolotl",
        "optim.lr": 5e-5, "@save_strategy": "epoch", "@lora.rank": 8,
    }),
    "llama-factory": Tool("llama-factory", LLAMA_FACTORY, {
        **_TRAINER, "batch.seq": 2048, "data.too_long": "truncate", "optim.lr": 5e-5, "@lora.rank": 8,
        "@lora.dropout": 0.0,
        "@targets": "all", "@double": True, "@recompute": True, "output": "runs/llama-factory", "@adapter": "lora",
    }),
    "trl-sft": Tool("trl-sft", TRL_SFT, _SFT),
    "trl-dpo": Tool("trl-dpo", TRL_DPO, {**_TRL, "optim.lr": 1e-6}),
    "trl-kto": Tool("trl-kto", TRL_KTO, {**_TRL, "optim.lr": 1e-6}),
    "trl-reward": Tool("trl-reward", TRL_REWARD, {**_TRL, "optim.lr": 1e-4}),
    "trl-gkd": Tool("trl-gkd", TRL_GKD, {
        **_SFT, "distill.temperature": 0.9, "distill.divergence": "@middle", "@lmbda": 0.5}),
    "train.py": Tool("train.py", SCRIPT, _SFT),
}  # fmt: skip

# Types of the values that are computed with, by place; the others are checked with the whole of our YAML.
KINDS: tuple[tuple[frozenset[str], tuple[type, ...]], ...] = (
    (frozenset({
        "train.stop_after",
        "@rows", "@all_rows", "@accumulate", "@pissa_iter", "@steps", "@workers", "@ranks", "batch.seq", "@lora.rank",
        "data.max_samples",
    }), (int,)),
    (frozenset({
        "@warmup_steps", "@warmup_ratio", "@beta1", "@beta2", "@eval_steps", "@save_steps", "@evals", "@saves",
        "@lora.alpha", "@lora.dropout", "@lora.lr_ratio", "@neftune",
        "@least", "optim.lr", "optim.weight_decay", "optim.eps", "optim.clip",
        "train.epochs",
    }), (int, float)),
    (frozenset({"@datasets", "@pretraining", "@test_datasets"}), (list, dict, str)),
    (frozenset({"@data", "@eval_data", "@targets"}), (str, list)),
    (frozenset({"@special"}), (dict,)), (frozenset({"@plugins"}), (list,)), (frozenset({"@dataset_dir"}), (str,)),
)  # fmt: skip
KIND_NAMES = {int: "a whole number", float: "a number", list: "a list", dict: "a mapping", str: "a text"}
# Kinds of axolotl's rows that are conversations.
CHATS = ("chat_template", "sharegpt", "chat_template.default", "chat_template.argilla")
# Those of them whose rows are a conversation with two answers, where the objective compares answers.
PAIRS = ("chat_template", "chat_template.default")
# Kinds of axolotl's rows: the objective, and what the keys of a row are where their names are others.
ROW_KINDS: dict[str, tuple[str, dict[str, str]]] = {
    **{name: ("sft", {}) for name in ("alpaca", "alpaca:chat", "alpaca:phi")},
    "alpaca_chat.load_qa": ("sft", {"question": "instruction", "answer": "output"}),
    **{name: ("sft", {}) for name in CHATS},
    **{name: ("pretrain", {}) for name in ("completion", "pretrain")},
    "gpteacher": ("sft", {"response": "output"}),
    **{name: ("dpo", {}) for name in ("chatml.ultra", "llama3.ultra", "chatml.default", "user_defined.default")},
    **{name: ("dpo", {"question": "prompt"}) for name in ("chatml.intel", "llama3.intel")},
    "bradley_terry.chat_template": ("dpo", {}),
    **{name: ("kto", {"instruction": "prompt"}) for name in ("chatml.argilla", "llama3.argilla")},
    **{name: ("dpo", {"input": "prompt"}) for name in ("chatml.icr", "llama3.icr")},
}  # fmt: skip
INSTRUCTION = {"field_instruction": "instruction", "field_input": "input", "field_output": "output",
               "field_system": "system"}  # fmt: skip
ROW_IDLE = ("ds_type", "format", "no_input_format", "chat_template", "field_thinking", "template_thinking_key",
            "trust_remote_code", "preprocess_shards")  # fmt: skip
FACTORY_COLUMNS = {
    "prompt": "instruction", "query": "input", "response": "output", "messages": "messages", "system": "system",
    "tools": "tools", "chosen": "chosen", "rejected": "rejected", "kto_tag": "label",
}  # fmt: skip
# Columns that LLaMA-Factory does not read where its list names others and not these.
FACTORY_UNNAMED = ("query", "system")
# Its tags: the keys of a turn, and the roles; with those that rows may have without being named here.
FACTORY_KEYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "role_tag": ("role", ("role", "from")), "content_tag": ("content", ("content", "value")),
}  # fmt: skip
FACTORY_ROLES: dict[str, tuple[str, tuple[str, ...]]] = {
    "user_tag": ("user", ("user", "human")), "assistant_tag": ("assistant", ("assistant", "gpt")),
    "system_tag": ("system", ("system",)), "observation_tag": ("tool", ("tool", "observation")),
}  # fmt: skip
FACTORY_REFUSED = {
    "folder": "name the files: --data", "script_url": "save the rows as a file: --data",
    "num_samples": "give data.max_samples for all rows",
}  # fmt: skip
