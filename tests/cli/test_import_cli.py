"""`optrush import`: configurations of other trainers become ours, or are refused by their key."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig

from optrush.cli.import_config import _Place, _read_keys, translate
from optrush.config import SECTIONS, Config, parse_config
from optrush.data.schema import Chat, Message, Pair, RowLocation, parse_row, row_rules
from optrush.decide import decide
from optrush.errors import ConfigError
from optrush.foreign_keys import SPEED, TOOLS
from optrush.hardware import parse_hardware
from optrush.technique import instantiate
from optrush.techniques import ALL

H200 = parse_hardware("h200")[0]
AXOLOTL: dict[str, Any] = {
    "base_model": "tiny", "datasets": [{"path": "rows.jsonl", "type": "alpaca"}], "sequence_len": 256,
    "micro_batch_size": 2, "gradient_accumulation_steps": 3, "num_epochs": 2, "learning_rate": 2e-4,
    "optimizer": "adamw_bnb_8bit", "lr_scheduler": "cosine", "bf16": "auto", "sample_packing": True, "adapter": "qlora",
    "load_in_4bit": True, "lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.05, "lora_target_linear": True,
    "gradient_checkpointing": True, "val_set_size": 0.1, "evals_per_epoch": 4, "saves_per_epoch": 1,
    "warmup_ratio": 0.1, "logging_steps": 1, "output_dir": "out", "wandb_project": "kitchen", "tf32": False,
    "attn_implementation": "flash_attention_2", "special_tokens": {"pad_token": "<pad>"}, "lora_model_dir": None,
}  # fmt: skip
FACTORY: dict[str, Any] = {
    "model_name_or_path": "tiny", "stage": "sft", "do_train": True, "finetuning_type": "lora", "lora_rank": 4,
    "lora_target": "q_proj,v_proj", "dataset": "dishes, pairs", "dataset_dir": "lists", "template": "qwen",
    "cutoff_len": 128, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "learning_rate": 1e-4,
    "num_train_epochs": 3.0, "lr_scheduler_type": "constant", "warmup_ratio": 0.1, "bf16": True, "save_steps": 50,
    "output_dir": "saved", "overwrite_output_dir": True, "plot_loss": True, "quantization_bit": 8,
}  # fmt: skip
LISTED = {
    "dishes": {"file_name": "dishes.json", "columns": {"prompt": "question", "response": "answer"}},
    "pairs": {"hf_hub_url": "some/pairs", "formatting": "sharegpt", "columns": {"messages": "conversations"}},
}
SFT = """# as it was started
accelerate launch --config_file fsdp2.yaml --num_processes 4 sft.py \\
    --model_name_or_path tiny --dataset_name some/chats --learning_rate 2.0e-4 --max_length 128 --packing \\
    --per_device_train_batch_size 2 --eval_strategy steps --eval_steps 100 --use_peft --lora_r 32 \\
    --lora_target_modules q_proj, v_proj --output_dir out --assistant_only_loss --report_to none
"""
DPO = {
    "model_name_or_path": "tiny", "dataset_name": "pairs.jsonl", "beta": 0.2, "loss_type": "ipo", "max_length": 64,
    "per_device_train_batch_size": 1, "gradient_checkpointing": False, "max_steps": 7, "bf16": False,
    "output_dir": "out",
}  # fmt: skip
SCRIPT = (
    "python train.py --model tiny --data chats.jsonl --eval_split 0.05 --eval_strategy steps --eval_steps 0.05 "
    "--save_steps 0.05 --max_samples 100 --train_on_prompt --clean_output --gpu_memory_fraction 0.5 --lr 1e-5 --bf16"
)


def translated(file, text, **given):
    """The YAML that a text becomes, after it was checked as a run is before it is built."""
    Path(file).write_text(text if isinstance(text, str) else yaml.safe_dump(text))
    found = translate(Path(file), **given)
    decide(found.config, ranks=found.ranks, device=H200)
    return yaml.safe_load(found.text)


def test_axolotl(here):
    found = translated("a.yml", AXOLOTL)
    assert found == {
        "model": {"path": "tiny"}, "objective": "sft", "data": {"path": "rows.jsonl", "eval": 0.1, "too_long": "drop"},
        "batch": {"seq": 256, "tokens": 2 * 3 * 256, "micro_tokens": 512},
        "optim": {"lr": 2e-4, "schedule": "cosine", "warmup": 0.1, "betas": [0.9, 0.999]},
        "train": {"epochs": 2.0, "log_every": 1, "best": False, "eval_every": 0.125, "save_every": 0.5}, "seed": 42,
        "output": "out",
        "with": {"adam8bit": {}, "recompute": {}, "attention": {"impl": "varlen"}, "amp": {}, "packing": {},
            "nf4": {"double": True}, "lora": {"rank": 8, "alpha": 16.0, "dropout": 0.05, "targets": "all-linear"}},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "place", "value"),
    [
        ({"adapter": None, "load_in_4bit": False}, ("with", "bf16"), {"rounding": "nearest"}),
        ({"adapter": "lora", "load_in_4bit": None, "load_in_8bit": True}, ("with", "int8"), {}),
        ({"sample_packing": False}, ("with", "pad"), {}),
        ({"sample_packing": False, "group_by_length": True}, ("with", "sort-by-length"), {}),
        ({"optimizer": "adamw_torch_fused"}, ("with", "fused-adamw"), {}),
        ({"lora_target_linear": None, "lora_target_modules": ["q_proj"]}, ("with", "lora", "targets"), ["q_proj"]),
        ({"rl": "ipo", "datasets": [{"path": "p.jsonl", "type": "chatml.intel"}]}, ("dpo", "loss"), "ipo"),
        ({"rl": "dpo", "datasets": [{"path": "p.jsonl", "type": "chatml.ultra"}]}, ("batch", "seq"), 512),
        ({"rl": "kto", "datasets": [{"path": "p.jsonl", "type": "chatml.argilla"}], "rl_beta": 1,
          "kto_undesirable_weight": 0.2}, ("kto",), {"beta": 1.0, "undesirable_weight": 0.2}),
        ({"reward_model": True, "center_rewards_coefficient": 0.01,
          "datasets": [{"path": "p.jsonl", "type": "bradley_terry.chat_template"}]}, ("reward",), {"center": 0.01}),
        ({"rl": "simpo", "rl_beta": 3, "datasets": [{"path": "p.jsonl", "type": "chatml.ultra"}]},
         ("simpo", "beta"), 3.0),
        ({"datasets": [{"path": "t.txt", "type": "completion"}]}, ("data", "too_long"), "split"),
        ({"datasets": [{"path": "a/b", "type": "sharegpt"}]}, ("data", "path"), "hub:a/b"),
        ({"datasets": [{"path": "a/b", "name": "main", "split": "train[:20%]", "type": "alpaca"}]}, ("data", "path"),
         "hub:a/b/main:train[:20%]"),
        ({"datasets": [{"path": "json", "data_files": "x.jsonl", "type": "alpaca"}]}, ("data", "path"), "x.jsonl"),
        ({"datasets": [{"path": "c.jsonl", "type": "chat_template", "field_messages": "talk",
                        "message_property_mappings": {"role": "by", "content": "words"}}]},
         ("data", "columns"), {"talk": "messages", "messages[].by": "role", "messages[].words": "content"}),
        ({"batch_size": 12, "gradient_accumulation_steps": None}, ("batch", "tokens"), 12 * 256),
        ({"chat_template": "chatml"}, ("model", "chat_template"), "chatml"),
        ({"warmup_steps": 20}, ("optim", "warmup"), 20.0),
        ({"train_on_inputs": True}, ("data", "train_on"), "all"),
        ({"fp16": True}, ("with", "amp"), {"dtype": "fp16"}),
        ({"neftune_noise_alpha": 5}, ("with", "neftune"), {"alpha": 5.0}),
        ({"loraplus_lr_ratio": 16, "loraplus_lr_embedding": 1e-6}, ("with", "lora", "lr_ratio"), 16.0),
        ({"adapter": "lora", "load_in_4bit": None, "peft_init_lora_weights": "pissa_niter_4"},
         ("with", "lora", "init"), "pissa_niter_4"),
        ({"activation_offloading": "legacy"}, ("with", "offload-activations"), {}),
        ({"activation_offloading": "disk", "gradient_checkpointing": None}, ("with", "offload-activations"), {}),
        ({"bf16": None}, ("with", "amp"), {}),  # `auto` there
        ({"bf16": None, "adapter": None, "load_in_4bit": None, "fp8": True}, ("with", "compile"), {}),
        ({"bnb_config_kwargs": {"bnb_4bit_use_double_quant": False}}, ("with", "nf4"), {"double": False}),
        ({"bnb_config_kwargs": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}},
         ("with", "nf4"), {"double": True}),
        ({"lr_scheduler": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 3}}, ("optim", "restarts"), 2),
        ({"datasets": [{"path": "rows.jsonl", "type": "chat_template", "message_property_mappings": {
            "content": "words", "tool_calls": "calls", "name": "name"}}]},
         ("data", "columns"), {"messages[].words": "content", "messages[].calls": "tool_calls"}),
        ({"chunked_cross_entropy": True}, ("with", "fused-loss"), {}),
        ({"noisy_embedding_alpha": 5}, ("with", "neftune", "alpha"), 5.0),
        ({"rl": "dpo", "dpo_loss_type": ["ipo"], "dpo_beta": 0.3,
          "datasets": [{"path": "p.jsonl", "type": "chatml.ultra"}]}, ("dpo",), {"loss": "ipo", "beta": 0.3}),
        ({"rl": "simpo", "simpo_gamma": 0.7, "datasets": [{"path": "p.jsonl", "type": "chatml.ultra"}]},
         ("simpo", "gamma"), 0.7),
        ({"tokens": ["<a>"]}, ("model", "add_tokens"), ["<a>"]),
        ({"tokens": {"bos_token": "<s>"}}, ("model",), {"path": "tiny"}),
        ({"base_model": "Qwen/Qwen2.5-0.5B", "reinit_weights": True, "adapter": None, "load_in_4bit": None},
         ("model",), {"shape": "Qwen/Qwen2.5-0.5B", "tokenizer": "Qwen/Qwen2.5-0.5B"}),
        ({"unfrozen_parameters": ["model.language_model.*", "lm_head"], "adapter": None, "load_in_4bit": None},
         ("with", "bf16"), {"rounding": "nearest"}),
        ({"model_config": {"output_router_logits": False}}, ("model",), {"path": "tiny"}),
        ({"base_model": "Qwen/Qwen2.5-0.5B", "model_config": {"output_router_logits": True}}, ("objective",), "sft"),
        ({"model_quantization_config": "Mxfp4Config", "model_quantization_config_kwargs": {"dequantize": True}},
         ("model",), {"path": "tiny"}),
        ({"lora_target_linear": None, "lora_target_modules": r".*\.self_attn\.(q|v)_proj"},
         ("with", "lora", "targets"), r".*\.self_attn\.(q|v)_proj"),
        ({"lora_target_linear": None, "lora_target_modules": ["q_proj", "c_attn"]},
         ("with", "lora", "targets"), ["q_proj", "c_attn"]),
        ({"plugins": ["axolotl.integrations.expert_parallel.ExpertParallelPlugin"]}, ("objective",), "sft"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) and value else "",
)  # fmt: skip
def test_keys_of_axolotl(here, changes, place, value):
    found: Any = translated("a.yml", {k: v for k, v in {**AXOLOTL, **changes}.items() if v is not None})
    for key in place:
        found = found[key]
    assert found == value


@pytest.mark.parametrize(
    ("model", "impl"),
    [("Qwen/Qwen2.5-0.5B", "varlen"), ("phi", "sdpa"), ("somebody/a-model", "sdpa"), ("llama", "varlen")],
)
def test_attention_suits_the_family(here, model, impl):
    """varlen runs in our decoder alone; of a model that is not here the family is not known."""
    if "/" not in model:
        made = AutoConfig.for_model(model, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=300)
        made.architectures = [f"{model.title()}ForCausalLM"]
        made.save_pretrained(here / model)
    Path("a.yml").write_text(yaml.safe_dump({**AXOLOTL, "base_model": model}))
    assert yaml.safe_load(translate(Path("a.yml")).text)["with"]["attention"] == {"impl": impl}


def test_a_memory_technique_that_is_a_plugin(here):
    plugins = ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin", "axolotl.integrations.liger.LigerPlugin"]
    assert translated("a.yml", {**AXOLOTL, "plugins": plugins[1:]})["with"].get("fused-loss") is None
    assert translated("a.yml", {**AXOLOTL, "plugins": plugins})["with"]["fused-loss"] == {}


@pytest.mark.parametrize(("changes", "with_"), [
    ({"tensor_parallel_size": 2}, {"tensor": {"size": 2}}), ({"dp_shard_size": 4}, {"fsdp": {}}),
    ({"context_parallel_size": 2, "dp_shard_size": 2}, {"context": {"size": 2}, "fsdp": {}}),
    ({"dp_shard_size": 2, "dp_replicate_size": 2}, {"fsdp": {"replicate": 2}}),
    ({"tensor_parallel_size": 1, "context_parallel_size": 1}, {"ddp": {}}),
])  # fmt: skip
def test_axes_of_axolotl(here, changes, with_):
    full = {**AXOLOTL, "adapter": None, "load_in_4bit": None, "optimizer": "adamw_torch_fused", **changes}
    Path("a.yml").write_text(yaml.safe_dump({k: v for k, v in full.items() if v is not None}))
    found = yaml.safe_load(translate(Path("a.yml"), ranks=4).text)["with"]
    axes = {"tensor", "context", "experts", "fsdp", "ddp"}
    assert {k: v or {} for k, v in found.items() if k in axes and k != "ddp"} == {
        k: v for k, v in with_.items() if k != "ddp"
    }
    for ranks in (1, 3):
        if with_.keys() & {"tensor", "context"}:
            with pytest.raises(ConfigError, match=f"2, where the run has --ranks {ranks}") as caught:
                translate(Path("a.yml"), ranks=ranks)
            assert "give --ranks N, a multiple of 2:" in caught.value.do
            return
    alone = translate(Path("a.yml"))
    assert not axes & yaml.safe_load(alone.text)["with"].keys()
    assert with_ == {"ddp": {}} or any("give --ranks N" in note for note in alone.notes)


def test_settings_of_one_objective(here):
    pairs = {"datasets": [{"path": "p.jsonl", "type": "chatml.ultra"}]}
    assert translated("a.yml", {**AXOLOTL, **pairs, "rl": "orpo", "orpo_alpha": 0.2})["orpo"] == {"beta": 0.2}
    translated("a.yml", {**AXOLOTL, "num_labels": 1})
    with pytest.raises(ConfigError, match="num_labels"):
        translated("a.yml", {**AXOLOTL, "num_labels": 3})


@pytest.mark.parametrize(
    ("modules", "targets"),
    [(["q_proj", "up_proj", "gate_proj", "down_proj"], ["q_proj", "dense", "experts"]), (None, "experts")],
)
def test_experts_of_axolotl(here, modules, targets):
    """Adapters of experts are a set of their own here; linears beside experts are the set `dense`."""
    experts = {"lora_target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    kernels = {"use_scattermoe": True, "quantize_moe_experts": True}
    given = {**AXOLOTL, **experts, **kernels, "lora_target_linear": None, "lora_target_modules": modules}
    Path("a.yml").write_text(yaml.safe_dump({k: v for k, v in given.items() if v is not None}))
    found = translate(Path("a.yml"))
    assert found.config.with_["lora"]["targets"] == targets
    assert any(note.startswith("quantize_moe_experts: ") for note in found.notes)


def test_llama_factory(here):
    """Names of data sets are looked up in the list that they are from."""
    Path("lists").mkdir()
    Path("lists/dataset_info.json").write_text(json.dumps(LISTED))
    pissa = {**FACTORY, "quantization_bit": None, "pissa_init": True, "pissa_convert": True}
    for more, init in (({}, "pissa_niter_16"), ({"pissa_iter": -1}, "pissa")):
        assert translated("p.yaml", {**pissa, **more})["with"]["lora"]["init"] == init
    found = translated("f.yaml", FACTORY)
    assert found["data"] == {
        "path": ["lists/dishes.json", "hub:some/pairs"], "too_long": "truncate", "most_truncated": 1.0,
        "columns": {"question": "instruction", "answer": "output"},
    }  # fmt: skip
    assert found["with"] == {
        "lora": {"rank": 4, "alpha": 8.0, "dropout": 0.0, "targets": ["q_proj", "v_proj"]}, "int8": {}, "amp": {},
        "recompute": {}, "pad": {}, "attention": {"impl": "sdpa"},
    }  # fmt: skip
    assert found["optim"] == {"lr": 1e-4, "schedule": "constant", "warmup": 0.0, "betas": [0.9, 0.999]}
    assert found["train"] == {"epochs": 3.0, "best": False, "overwrite": True, "save_every": 50}
    assert found["batch"] == {"seq": 128, "tokens": 2 * 4 * 128, "micro_tokens": 256}


@pytest.mark.parametrize("model", ["$MODEL", "${MODEL}", "${OTHER:-tiny}", '"$MODEL"', "tiny"])
@pytest.mark.parametrize("line", ["MODEL=tiny", "export MODEL='tiny'  # the built-in one"])
def test_a_script_of_llama_factory(here, model, line):
    """Its option `--stage sft` is no script of TRL, and variables of the shell that it sets are put in their places."""
    command = f"llamafactory-cli train \\\n  --model_name_or_path {model} --stage sft --dataset x --cutoff_len 64\n"
    found = translated("run.sh", f"#!/bin/bash\n{line}\n{command}", data="rows.jsonl")
    assert found["model"]["path"] == "tiny" and found["batch"]["seq"] == 64 and "lora" in found["with"]


def test_images_of_llama_factory(here):
    turns = [{"from": "human", "value": "<image>what ?"}, {"from": "gpt", "value": "a cat"}]
    entry = {"file_name": "rows.jsonl", "formatting": "sharegpt", "columns": {"messages": "talk", "images": "pics"}}
    (here / "dataset_info.json").write_text(json.dumps({"pictures": entry}))
    given = {**FACTORY, "dataset": "pictures", "dataset_dir": str(here), "image_max_pixels": 4096}
    found = translated("f.yaml", {**given, "image_min_pixels": 64, "freeze_vision_tower": True})
    assert found["data"]["max_pixels"] == 4096 and found["data"]["min_pixels"] == 64
    row = read(found, {"talk": turns, "pics": ["a.png"]})
    assert isinstance(row, Chat) and [one.path for one in row.images] == ["a.png"]
    for more in ({"freeze_vision_tower": False}, {"video_max_pixels": 9}):
        with pytest.raises(ConfigError, match=next(iter(more))):
            translated("f.yaml", {**given, **more})


def test_full_training_of_llama_factory(here):
    """A value that means none is not replaced by the tool's default."""
    given = {**FACTORY, "finetuning_type": "full", "quantization_bit": None}
    assert translated("f.yaml", given, data="rows.jsonl")["with"] == {
        "recompute": {}, "amp": {}, "pad": {}, "attention": {"impl": "sdpa"}
    }  # fmt: skip
    assert "lora" in translated("f.yaml", {**given, "finetuning_type": None}, data="rows.jsonl")["with"], "its default"
    found = translated("f.yaml", {**given, "gradient_checkpointing": False}, data="rows.jsonl")
    assert "recompute" not in found["with"]
    for bits in (4, 8):
        with pytest.raises(ConfigError, match=r"f.yaml:\d+: `quantization_bit`"):
            translated("f.yaml", {**given, "quantization_bit": bits}, data="rows.jsonl")


def test_no_default_replaces_a_given_value():
    """A value that means none leaves none, in the place of every default of every tool."""
    place = _Place(Path("x"), {})
    found = [
        (tool.name, key, value)
        for tool in TOOLS.values()
        for key, rule in tool.keys.items()
        for value, ours in (rule.values or {}).items()
        if ours is None
        and _read_keys({**dict.fromkeys(tool.needed, 0), key: value}, tool, place).of.get(rule.to) is not None
    ]
    assert not found


def test_trl_from_a_command_line(here):
    found = translated("sft.sh", SFT)
    assert found["data"] == {
        "path": "hub:some/chats", "eval": "hub:some/chats:test", "too_long": "truncate", "train_on": "assistant",
        "most_truncated": 1.0,
    }  # fmt: skip
    assert found["batch"]["tokens"] == 4 * 2 * 128
    assert found["with"] == {
        "recompute": {}, "amp": {}, "packing": {}, "fsdp": {"stage": 3}, "attention": {"impl": "sdpa"},
        "lora": {"rank": 32, "alpha": 32.0, "dropout": 0.05, "targets": ["q_proj", "v_proj"]},
    }  # fmt: skip
    assert found["train"]["eval_every"] == 100


@pytest.mark.parametrize(("given", "held_out", "every", "listed"), [
    ({"dataset_test_split": "valid", "eval_strategy": "steps", "eval_steps": 9}, "hub:some/chats:valid", 9, ""),
    ({"eval_strategy": "epoch", "dataset_config": "main"}, "hub:some/chats/main:test", 0.333333, ""),
    ({"eval_strategy": "steps", "logging_steps": 7}, "hub:some/chats:test", 7, ""),
    ({"eval_strategy": "steps"}, "hub:some/chats:test", 10, ""),
    ({"eval_strategy": "steps", "logging_steps": 0.05}, "hub:some/chats:test", 0.05, ""),
    ({"dataset_test_split": "valid"}, None, None, "dataset_test_split"),
    ({"eval_strategy": "no", "eval_steps": 9}, None, None, "eval_steps"),
    ({"dataset_name": "r.jsonl", "eval_strategy": "steps", "eval_steps": 9, "dataset_test_split": "test"}, None, None,
        "eval_strategy eval_steps dataset_test_split"),
], ids=str)  # fmt: skip
def test_evaluation_of_trl(here, given, held_out, every, listed):
    """What it evaluates on is mapped, or listed with the reason."""
    Path("t.yaml").write_text(yaml.safe_dump({**DPO, "dataset_name": "some/chats", "max_steps": -1, **given}))
    found = translate(Path("t.yaml"))
    assert (found.config.data.eval, found.config.train.eval_every) == (held_out, every)
    for key in listed.split():
        assert any(note.startswith(f"{key}: ") for note in found.notes), found.notes


def test_how_often_of_one_epoch(here):
    """Once an epoch is once a run where it has one: at its end, and not after each step."""
    once = {"num_train_epochs": 1, "eval_strategy": "epoch", "save_strategy": "epoch", "dataset_name": "some/chats"}
    found = translated("d.json", json.dumps({**DPO, **once}))["train"]
    assert not found.keys() & {"eval_every", "save_every"}
    assert translated("d.json", json.dumps({**DPO, "save_steps": 1}))["train"]["save_every"] == 1
    found = translated("a.yml", {**AXOLOTL, "val_set_size": 0, "test_datasets": [{"path": "a/b", "split": "test"}]})
    assert found["data"]["eval"] == "hub:a/b:test" and found["train"]["eval_every"] == 0.125


def test_null_is_no_default_of_trl(here):
    """Null cuts no row there, where the length that is left out cuts at 1,024 tokens."""
    with pytest.raises(ConfigError, match="`max_length`\nfound: null: rows of any length"):
        translated("d.json", json.dumps({**DPO, "max_length": None}))


@pytest.mark.parametrize(("packing", "padding_free"), [(True, False), (False, True), (True, True)])
def test_either_key_packs(here, packing, padding_free):
    for given in (
        {"packing": packing, "padding_free": padding_free},
        {"padding_free": padding_free, "packing": packing},
    ):
        Path("s.yaml").write_text(yaml.safe_dump({**DPO, **given}, sort_keys=False))
        assert "packing" in translate(Path("s.yaml")).config.with_


BARE = {k: v for k, v in DPO.items() if k not in ("beta", "loss_type")}


@pytest.mark.parametrize(("given", "objective", "section"), [
    (DPO, "dpo", {"beta": 0.2, "loss": "ipo"}),
    ({**DPO, "loss_type": "kto", "undesirable_weight": 2.0}, "kto", {"beta": 0.2, "undesirable_weight": 2.0}),
    ({**BARE, "center_rewards_coefficient": 0.01}, "reward", {"center": 0.01}),
], ids=["dpo", "kto", "reward"])  # fmt: skip
def test_trl_preferences(here, given, objective, section):
    """Of a judged answer each has a mismatched one in its row."""
    found = translated("d.json", json.dumps(given), **({"tool": "trl-kto"} if objective == "kto" else {}))
    assert found["objective"] == objective and found[objective] == section and found["batch"]["seq"] == 128
    if objective == "dpo":
        assert found["optim"]["lr"] == 1e-6 and found["train"]["steps"] == 7
        assert found["with"] == {"pad": {}, "attention": {"impl": "sdpa"}}
    assert objective != "kto" or found["data"]["too_long"] == "drop"


def test_trl_gkd(here):
    """Distillation on rows; what generates while it trains is refused."""
    given = BARE | {"teacher_model_name_or_path": "tiny", "lmbda": 0.0, "beta": 1.0, "assistant_only_loss": True}
    found = translated("g.json", json.dumps(given))
    assert found["objective"] == "distill" and found["batch"]["seq"] == 64
    assert found["distill"] == {"teacher": "tiny", "temperature": 0.9, "divergence": "reverse"}
    for key in ("lmbda", "beta"):
        with pytest.raises(ConfigError, match=f"`{key}`"):
            translated("h.json", json.dumps({k: v for k, v in given.items() if k != key}), tool="trl-gkd")


def test_arguments_of_a_script(here):
    found = translated("run.sh", SCRIPT)
    assert found["data"] == {
        "path": "chats.jsonl", "eval": 0.05, "max_samples": 100, "train_on": "all", "too_long": "truncate",
        "most_truncated": 1.0,
    }  # fmt: skip
    assert found["train"]["eval_every"] == found["train"]["save_every"] == 0.05 and found["train"]["overwrite"]
    assert found["with"]["memory-cap"] == {"fraction": 0.5}


@pytest.mark.parametrize(("changes", "key"), [
    ({"unheard_of": 1}, "unheard_of"), ({"rl": "grpo"}, "rl"), ({"lr_scheduler": "rex"}, "lr_scheduler"),
    ({"optimizer": "lion_8bit"}, "optimizer"),
    *(({"adapter": None, "load_in_4bit": None, "unfrozen_parameters": names},
        "unfrozen_parameters") for names in (["a"], ["model.layers.4[4-9]+.mlp", "lm_head"],
        ["model.language_model.layers.3.*", "lm_head"], ["model.language_model.*"],
        ["model.language_model.*", "model.visual.*", "lm_head"])),
    ({"lora_target_linear": None, "lora_target_parameters": ["experts.down_proj"]}, "lora_target_parameters"),
    ({"lora_target_linear": None, "lora_target_parameters": 5}, "lora_target_parameters"),
    ({"lora_target_parameters": ["other.gate_up_proj", "other.down_proj"]}, "lora_target_parameters"),
    ({"lora_target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}, "lora_target_parameters"),
    ({"lora_target_linear": None, "lora_target_modules": ["q_proj", "down_proj"],
        "lora_target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}, "lora_target_modules"),
    ({"processor_type": "LlavaProcessor"}, "processor_type"), ({"qat": {"weight_dtype": "int8"}}, "qat"),
    ({"model_config": {"output_router_logits": True}, "base_model": "a/mixture"}, "model_config"),
    ({"model_config": {"rope_theta": 5}}, "model_config"),
    ({"model_quantization_config": "Fp8"}, "model_quantization_config"), ({"reinit_weights": True}, "reinit_weights"),
    ({"pretrain_multipack_attn": False}, "pretrain_multipack_attn"),
    *(({"bnb_config_kwargs": {key: value}}, f"bnb_config_kwargs.{key}") for key,
        value in (("bnb_4bit_quant_type", "fp4"), ("bnb_4bit_use_duoble_quant", True),
        ("llm_int8_skip_modules", ["lm_head"]), ("load_in_8bit", True), ("llm_int8_enable_fp32_cpu_offload", True))),
    ({"load_in_4bit": None, "adapter": "lora", "load_in_8bit": True, "bnb_config_kwargs": {"odd": 1}},
        "bnb_config_kwargs.odd"),
    ({"datasets": [{"path": "a", "type": "chat_template", "message_property_mappings": {"mood": "tone"}}]},
        "message_property_mappings"),
    *(({key: 4}, key) for key in ("sequence_parallel_degree", "context_parallel_size", "tensor_parallel_size",
        "expert_parallel_size")),
    *(({"lora_target_linear": None, "lora_target_modules": targets},
        "lora_target_modules") for targets in (r".*layers\.(3|7)\..*q_proj", "(q_proj")),
    ({"datasets": [{"path": "a", "type": "jeopardy"}]}, "datasets[0].type"), ({"val_set_size": 200}, "val_set_size"),
    ({"datasets": [{"path": "a", "type": "alpaca", "odd": 1}]}, "datasets[0].odd"),
    ({"datasets": [{"path": "a/b", "type": "alpaca", "split": "train+test"}]}, "split"),
    ({"datasets": [1]}, "datasets[0]"), ({"datasets": [{"type": "alpaca"}]}, "path"),
    ({"datasets": [{"path": "a", "type": ["alpaca"]}]}, "datasets[0].type"),
    ({"datasets": [{"path": "a", "type": "completion", "field": ["body"]}]}, "datasets[0].field"),
    ({"deepspeed": {"zero_optimization": {"stage": 12}}}, "zero_optimization.stage"),
    ({"adapter": None}, "load_in_4bit"), ({"gradient_accumulation_steps": 2, "batch_size": "x"}, "batch_size"),
    ({"plugins": ["their.own.Plugin"]}, "plugins"), ({"learning_rate": [1]}, "learning_rate"),
    *(({"datasets": [{"path": "a", "type": "chat_template", key: value}]}, f"datasets[0].{key}") for key,
        value in (("roles_to_train", 5), ("roles_to_train", [["a"]]), ("message_field_training", ["a"]))),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_what_has_no_counterpart_is_refused_by_its_key(call, here, changes, key):
    text = yaml.safe_dump({k: v for k, v in {**AXOLOTL, **changes}.items() if v is not None})
    Path("a.yml").write_text(text)
    found = call("import", "a.yml", "--out", "ours.yaml")
    assert found.code == 2 and not Path("ours.yaml").exists()
    assert f"`{key}`" in found.err.splitlines()[-3], found.err
    assert [line[:7] for line in found.err.splitlines()[-3:]] == ["asked: ", "found: ", "do:    "]


PREFERRED = {
    "conversations": [{"from": "human", "value": "q"}],
    "chosen": {"from": "gpt", "value": "yes"},
    "rejected": {"from": "gpt", "value": "no"},
}
TAGGED = {
    "conversations": [{"by": "me", "words": "q"}],
    "chosen": {"by": "bot", "words": "yes"},
    "rejected": {"by": "bot", "words": "no"},
}
TAGS = {"role_tag": "by", "content_tag": "words", "user_tag": "me", "assistant_tag": "bot"}
PAIR = Pair(*(Chat((Message("user", "q"), Message("assistant", text)), prompt=1) for text in ("yes", "no")))


def read(found, row):
    """What a row means under an imported configuration."""
    return parse_row(RowLocation(Path("r"), 1), row, row_rules(parse_config(yaml.safe_dump(found), "r")))


@pytest.mark.parametrize(("row", "tags"), [(PREFERRED, {}), (TAGGED, TAGS)], ids=["named as usual", "tags"])
def test_preferences_of_llama_factory(here, row, tags):
    entry = {"file_name": "rows.jsonl", "ranking": True, "formatting": "sharegpt", "tags": tags}
    columns = {key: key for key in ("chosen", "rejected")}
    (here / "dataset_info.json").write_text(json.dumps({
        "whole": {**entry, "columns": {**columns, "messages": "conversations"}}, "brief": {**entry, "columns": columns}
    }))  # fmt: skip
    for name in ("whole", "brief"):
        given = {**FACTORY, "stage": "dpo", "dataset": name, "dataset_dir": str(here)}
        assert read(translated("f.yaml", given), row) == PAIR


@pytest.mark.parametrize("named", [{}, {"prompt": "instruction", "query": "input"}, {"prompt": "ask"},
                                   {"prompt": "prompt"}, {"prompt": "prompt", "system": "system"}],
                         ids=str)  # fmt: skip
@pytest.mark.parametrize("system", [None, "", "be kind"])
def test_preferences_of_texts_of_llama_factory(here, named, system):
    """They are turns, as there; a `system` or an `input` that its columns do not name is not read."""
    row = {named.get("prompt", "instruction"): "q", "input": "odd", "chosen": "yes", "worse": "no"}
    row |= {} if system is None else {"system": system}
    (here / "rows.jsonl").write_text(json.dumps(row))
    columns = {**named, "chosen": "chosen", "rejected": "worse"}
    entry = {"file_name": "rows.jsonl", "ranking": True, "columns": columns}
    (here / "dataset_info.json").write_text(json.dumps({"pairs": entry}))
    given = {**FACTORY, "stage": "dpo", "dataset": "pairs", "dataset_dir": str(here)}
    ask = "q\n\nodd" if "query" in named else "q"
    before = (Message("system", "be kind"),) if system and "system" in named else ()
    turns = (*before, Message("user", ask))
    pair = Pair(*(Chat((*turns, Message("assistant", text)), prompt=len(turns)) for text in ("yes", "no")))
    assert read(translated("f.yaml", given), row) == pair


def test_turns_of_other_keys(here):
    """Their names are those of the list that a row has them in."""
    entry = {"file_name": "rows.jsonl", "formatting": "sharegpt", "tags": TAGS}
    (here / "dataset_info.json").write_text(json.dumps({"chats": entry}))
    turns = [*TAGGED["conversations"], TAGGED["chosen"]]
    found = translated("f.yaml", {**FACTORY, "dataset": "chats", "dataset_dir": str(here)})
    assert read(found, {"conversations": turns}) == Chat(PAIR.chosen.messages)
    mapped = {
        "path": "r.jsonl", "type": "chat_template", "message_property_mappings": {"role": "by", "content": "words"},
    }  # fmt: skip
    mapped["roles"] = {"user": ["me"], "assistant": ["bot"]}
    for key in ("conversations", "messages", "talk"):
        found = translated("a.yml", {**AXOLOTL, "datasets": [{**mapped, "field_messages": key}]})
        assert read(found, {key: turns}) == Chat(PAIR.chosen.messages)
        found = translated("a.yml", {**AXOLOTL, "rl": "dpo", "datasets": [{**mapped, "field_messages": key}]})
        assert read(found, {**TAGGED, "conversations": None, key: TAGGED["conversations"]}) == PAIR


def test_all_refused_keys_are_named_at_once(call, here):
    """Each has three lines of its own, and a known key is suggested where it is nearly the same word."""
    wrong = {"learning_rte": 1, "s2_attention": True, "rope_scaling": {"factor": 2}, "optimizer": "lion_8bit"}
    Path("a.yml").write_text(yaml.safe_dump({**AXOLOTL, **wrong}, sort_keys=False))
    found = call("import", "a.yml")
    lines = found.err.splitlines()
    assert found.code == 2 and [line[:7] for line in lines] == ["asked: ", "found: ", "do:    "] * 4, found.err
    hints = {asked.split("`")[1]: do for asked, do in zip(lines[::3], lines[2::3])}
    assert hints.keys() == {"optimizer", "learning_rte", "s2_attention", "rope_scaling"}
    assert hints["learning_rte"].endswith("counterpart; did you mean `learning_rate`?")
    assert all(hints[key].endswith("no counterpart") for key in ("s2_attention", "rope_scaling"))
    assert hints["optimizer"].startswith("do:    take one of adamw_torch_fused")


@pytest.mark.parametrize(("file", "given", "place", "value"), [
    (AXOLOTL, {"early_stopping_patience": 3}, ("train", "stop_after"), 3),
    (FACTORY, {"early_stopping_steps": 3, "val_size": 0.1}, ("train", "stop_after"), 3),
    ({**DPO, "dataset_name": "a/b"}, {"early_stopping_patience": 3, "eval_strategy": "epoch"}, ("train", "stop_after"),
        3),
    (AXOLOTL, {"cosine_min_lr_ratio": 0.0}, ("optim", "schedule"), "cosine"),
    (AXOLOTL, {"metric_for_best_model": "eval_loss", "greater_is_better": False}, ("train", "best"), False),
    (FACTORY, {"lr_scheduler_kwargs": {}}, ("optim", "schedule"), "constant"),
    (FACTORY, {"lr_scheduler_type": "cosine_with_restarts"}, ("optim", "schedule"), "cosine"),
    (DPO, {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 4}}, ("optim",
        "restarts"), 3),
    (AXOLOTL, {"cosine_min_lr_ratio": 0.1}, ("optim", "min_lr_ratio"), 0.1),
    (FACTORY, {"learning_rate": 1e-4, "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr": 1e-5}}, ("optim", "min_lr_ratio"), pytest.approx(0.1)),
    (DPO, {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.2}}, ("optim",
        "min_lr_ratio"), 0.2),
    (FACTORY, {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"decay_type": "linear",
        "num_decay_steps": 20}}, ("optim", "decay"), 20),
], ids=lambda value: next(iter(value)) if isinstance(value, dict) and len(value) < 4 else "")  # fmt: skip
def test_more_keys(here, file, given, place, value):
    data = {"data": "rows.jsonl"} if file is FACTORY else {}
    found: Any = translated("a.yml", {**file, **given}, **data)
    for key in place:
        found = found[key]
    assert found == value


@pytest.mark.parametrize(("file", "given", "reason"), [
    (AXOLOTL, {"cosine_constant_lr_ratio": 0.1}, "decays to the end"),
    (FACTORY, {"early_stopping_steps": 3}, "no rows are held"),
    (FACTORY, {"lr_scheduler_kwargs": {"num_cycles": 3}}, "num_cycles: 3, which has no counterpart"),
    (FACTORY, {"lr_scheduler_kwargs": {"min_lr": "low"}}, "min_lr: 'low'"),
    (FACTORY, {"lr_scheduler_kwargs": {"num_cycles": 3}, "lr_scheduler_type": "cosine"}, "num_cycles: 3"),
    *((FACTORY, {"lr_scheduler_kwargs": {"num_cycles": cycles}, "lr_scheduler_type": "cosine_with_restarts"},
        f"num_cycles: {cycles!r}") for cycles in (0, 1.5, "2", True)),
    (FACTORY, {"lr_scheduler_type": "warmup_stable_decay"}, "decay of type cosine"),
    (AXOLOTL, {"early_stopping_patience": 3, "val_set_size": 0}, "no rows are held out"),
    (AXOLOTL, {"early_stopping_patience": 2.5}, "a whole number"),
    (DPO, {"metric_for_best_model": "accuracy"}, "the lowest held-out loss"),
], ids=lambda value: next(iter(value)) if isinstance(value, dict) and len(value) < 4 else "")  # fmt: skip
def test_a_refusal_has_its_reason(here, file, given, reason):
    data = {"data": "rows.jsonl"} if file is FACTORY else {}
    with pytest.raises(ConfigError, match=f"`{next(iter(given))}`(.|\n)*{reason}"):
        translated("a.yml", {**file, **given}, **data)


@pytest.mark.parametrize(("key", "value", "reason"), [
    ("eval_max_new_tokens", 128, "no text is generated"), ("eval_table_size", 5, "no text is generated"),
    ("gradient_checkpointing_kwargs", {"use_reentrant": False}, "gradients do not change"),
    ("save_first_step", True, "train.save_every"), ("eval_batch_size", 1, "batch sizes and precision"),
    ("device_map", "auto", "a rank has one device"), ("dataset_processes", 8, "data.workers"),
    ("average_tokens_across_devices", False, "targets of all ranks"), ("tokenizer_legacy", False, "tokenizer.json"),
    ("lora_qkv_kernel", True, "a choice of kernels"), ("fsdp_version", 2, "FSDP2"),
    ("unsloth_rope", True, "a choice of kernels"), ("gemma4_hybrid_attn_impl", True, "speed or memory"),
    ("heads_k_stride", 1, "speed or memory"), ("llama4_linearized_experts", True, "one matrix or one by one"),
    ("tokenizer_use_mistral_common", True, "tokenizer.json"), ("freeze_mm_modules", True, "only the language"),
    ("do_causal_lm_eval", True, "optrush eval"), ("lora_fan_in_fan_out", True, "disables it for linears"),
    ("eta_min", 7e-7, "does not read it"), ("accelerator_config", {"split_batches": False}, "speed or memory"),
    ("cls_model_config", "LlamaConfig", "name the class"), ("dataloader_drop_last", True, "once per epoch"),
    ("lora_on_cpu", True, "optrush export"),
])  # fmt: skip
def test_each_listed_key_has_its_own_reason(here, key, value, reason):
    Path("a.yml").write_text(yaml.safe_dump({**AXOLOTL, key: value}))
    assert any(note.startswith(f"{key}: ") and reason in note for note in translate(Path("a.yml")).notes)


def test_only_kernels_are_a_choice_of_kernels():
    kernels = re.compile(r"liger|kernel|flash|unsloth|flex_attn|cross_entropy|fp8_backend|moe|experts_implementation")
    listed = {key for tool in TOOLS.values() for key, rule in tool.keys.items() if rule == SPEED}
    assert listed and not [key for key in listed if not kernels.search(key)]


def test_the_reason_of_what_has_no_effect(here):
    Path("a.yml").write_text(yaml.safe_dump({**AXOLOTL, "val_set_size": 0}))
    assert any(note.startswith("evals_per_epoch: no effect") for note in translate(Path("a.yml")).notes)
    Path("x").write_text(f"{SCRIPT} --fsdp full_shard --fsdp_transformer_layer_cls_to_wrap B")
    says = (note.partition(": ") for note in translate(Path("x")).notes)
    assert any(key == "fsdp_transformer_layer_cls_to_wrap" and "block by block" in why for key, _, why in says)


OFFLOADED: list[tuple[dict[str, Any], str]] = [
    ({"fsdp": ["full_shard"], "fsdp_config": {"fsdp_offload_params": True}}, "fsdp_config.fsdp_offload_params"),
    ({"fsdp": "full_shard", "fsdp_config": {"offload_params": "true"}}, "fsdp_config.offload_params"),
    ({"fsdp": "full_shard offload"}, "fsdp"), ({"deepspeed": "zero3_offload.json"}, "deepspeed"),
    ({"deepspeed": {"zero_optimization": {"stage": 2, "cpu_offload": True}}},
     "deepspeed.zero_optimization.cpu_offload"),
    ({"deepspeed": {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}},
     "deepspeed.zero_optimization.offload_param"),
    ({"deepspeed": "named.json"}, "deepspeed.zero_optimization.offload_optimizer"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "key"), OFFLOADED, ids=[key for _, key in OFFLOADED])
@pytest.mark.parametrize("file", [AXOLOTL, DPO], ids=["axolotl", "trl"])
def test_what_is_kept_in_host_memory(here, file, given, key):
    """States stay there by a technique; of weights, and beside an adapter, it is listed: results are the same."""
    Path("named.json").write_text('{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}')
    found = translated("a.yml", {**file, **given}, ranks=4)
    assert ("paged-states" in found["with"]) == ("adapter" not in file) and "fsdp" in found["with"]
    says = "weights stay on the GPUs" if "adapter" in file else "`paged-states` keeps the optimizer's states"
    assert any(note.startswith(f"{key}: ") and says in note for note in translate(Path("a.yml"), ranks=4).notes)


@pytest.mark.parametrize(("launcher", "key"), [
    ("--config_file acc.yaml", "config_file.fsdp_config.fsdp_offload_params"),
    ("--use_fsdp --fsdp_offload_params true", "accelerate launch.fsdp_offload_params"),
    ("--zero_stage 3 --offload_optimizer_device cpu", "accelerate launch.offload_optimizer_device"),
    ("--deepspeed_config_file a.json", "accelerate launch.deepspeed_config_file.zero_optimization.offload_param"),
    ("--config_file deepspeed_zero3_offload.yaml", "config_file"),
])  # fmt: skip
def test_what_a_launcher_keeps_in_host_memory(here, launcher, key):
    Path("acc.yaml").write_text("distributed_type: FSDP\nfsdp_config: {fsdp_offload_params: true}\n")
    Path("a.json").write_text('{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}')
    translated("sft.sh", SFT.replace("--config_file fsdp2.yaml", launcher))
    assert any(note.startswith(f"{key}: weights stay on the GPUs") for note in translate(Path("sft.sh")).notes)


@pytest.mark.parametrize(("given", "technique"), [
    ({"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_offload_params": False}}, {"stage": 3}),
    ({"fsdp": "shard_grad_op"}, {"stage": 2}), ({"fsdp": ["no_shard"]}, None),
    ({"fsdp": "full_shard", "fsdp_config": {"reshard_after_forward": False}}, {"stage": 2}),
    ({"fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, "fsdp_version": 2}, {"stage": 2}),
    ({"deepspeed": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}}}, {"stage": 2}),
    ({"deepspeed": {"zero_optimization": {"stage": 1}}}, None), ({"deepspeed": {"bf16": {}}}, None),
    ({"deepspeed": {"zero_optimization": {"stage": 3, "offload_optimizer_device": "none",
        "offload_optimizer_nvme_path": "/nvme"}}}, {"stage": 3}),
    ({"deepspeed": "deepspeed_configs/zero1.json"}, None), ({"deepspeed": "ds_z3_config.json"}, {"stage": 3}),
    ({"deepspeed": "here.json"}, {"stage": 2}), ({"fsdp": False}, None), ({}, None),
], ids=lambda value: str(next(iter(value.values()))) if value else "")  # fmt: skip
def test_how_a_model_is_cut(here, given, technique):
    """Of names, inline settings and files; with whole weights on each rank it is `ddp`."""
    Path("here.json").write_text('{"zero_optimization": {"stage": 2}}')
    found = translated("a.yml", {**AXOLOTL, "adapter": None, "load_in_4bit": None, **given}, ranks=4)["with"]
    assert found.get("fsdp") == technique and ("ddp" in found) == (technique is None)


def test_fsdp_may_recompute(here):
    given = {**DPO, "fsdp": "full_shard", "fsdp_config": {"activation_checkpointing": True}}
    assert "recompute" in translated("a.yml", given, ranks=2)["with"]


def test_a_configuration_of_sharding_that_is_none(here):
    Path("broken.json").write_text('{"zero_optimization": ')
    with pytest.raises(ConfigError, match="found: not a JSON"):
        translated("a.yml", {**AXOLOTL, "deepspeed": "broken.json"}, ranks=2)


def test_the_line_of_a_refused_key(here):
    text = "base_model: tiny\ndatasets:\n- path: a\n  type: alpaca\n- path: b\n  type: jeopardy\n"
    with pytest.raises(ConfigError, match=r"a.yml:6: `datasets\[1\].type`"):
        translated("a.yml", text)


def test_what_has_no_effect_is_listed(call, here):
    Path("a.yml").write_text(yaml.safe_dump(AXOLOTL))
    found = call("import", "a.yml", "--out", "ours.yaml", "--ranks", "2")
    assert found.code == 0 and found.out == "optrush train ours.yaml --ranks 2 --dry-run\n"
    assert "wandb_project: a logging option" in found.err and "tf32" in found.err
    assert yaml.safe_load(Path("ours.yaml").read_text())["with"]["ddp"] == {}
    assert call("import", "a.yml", "--out", "ours.yaml").code == 2, "an existing file stays"


def test_what_axolotl_does_not_read_is_listed(here):
    rows = {"path": "rows.jsonl", "type": "alpaca", "roles_to_train": ["user"]}
    Path("a.yml").write_text(yaml.safe_dump({**AXOLOTL, "datasets": [rows]}))
    notes = translate(Path("a.yml"), tool="axolotl").notes
    assert "datasets[0].roles_to_train: axolotl ignores it for rows of this type" in notes


@pytest.mark.parametrize("entry", ["a", {"file_name": 5}, {"tags": ["a"]}, {"columns": {"messages": ["a"]}}], ids=str)
def test_a_list_of_other_things_is_refused(here, entry):
    (here / "dataset_info.json").write_text(json.dumps({"dishes": entry}))
    Path("f.yaml").write_text(yaml.safe_dump(FACTORY | {"dataset": "dishes", "dataset_dir": str(here)}))
    with pytest.raises(ConfigError, match=r"dishes(\.| is )"):
        translate(Path("f.yaml"), tool="llama-factory")


def test_data_of_a_list_that_is_elsewhere(call, here):
    Path("f.yaml").write_text(yaml.safe_dump(FACTORY))
    found = call("import", "f.yaml")
    assert found.code == 2 and "dataset_info.json" in found.err and "--data FILE" in found.err
    assert yaml.safe_load(call("import", "f.yaml", "--data", "mine.jsonl").out)["data"]["path"] == "mine.jsonl"


@pytest.mark.parametrize(("text", "says"), [
    ("{", "not JSON"), ("a: 1\n", "of no known tool"), ("python grpo.py --beta 1", "a command of grpo.py"),
    ("", "nothing"),
])  # fmt: skip
def test_what_is_of_no_tool(here, text, says):
    Path("x").write_text(text)
    with pytest.raises(ConfigError, match=says):
        translate(Path("x"))


def test_every_place_exists():
    """A mapped key leads to a key of ours, an option of a technique, or a value that others are combined with."""
    techniques = {t.name: {f.name for f in dataclasses.fields(t)} for t in ALL}
    places = {rule.to for tool in TOOLS.values() for rule in tool.keys.values() if rule.to}
    for place in places | {key for tool in TOOLS.values() for key in tool.defaults}:
        first, _, rest = place.partition(".")
        if first == "with" and rest:
            technique, option = rest.split(".")
            assert option in techniques[technique], place
        elif first == "*":
            assert any(rest in section.model_fields for section in SECTIONS.values()), place
        elif first != "with" and not first.startswith("@"):
            part: Any = Config
            for name in place.split("."):
                assert name in part.model_fields, place
                kinds = [
                    part.model_fields[name].annotation,
                    *getattr(part.model_fields[name].annotation, "__args__", ()),
                ]
                part = next((m for m in kinds if hasattr(m, "model_fields")), None)
    wanted = [v for tool in TOOLS.values() for r in tool.keys.values() if r.to == "with" for v in r.values.values()]
    for with_ in wanted:
        assert all(dataclasses.is_dataclass(t) for t in instantiate(ALL, with_))
