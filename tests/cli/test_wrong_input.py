"""Whatever a user gets wrong: exit code 2, three lines that name it and say what to do, and nothing is written."""

import gzip
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from optrush import hardware
from optrush.config import nearest
from optrush.models import tiny
from optrush.models.published import SHAPES
from optrush.models.source import _published

from clirun import edited, refused, write_rows

on_cpu = pytest.mark.skipif(bool(hardware.probe()), reason="this machine has what the technique needs")


# --- the YAML as text: what is wrong with it, and what the message must say

TEXTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "unknown key": ("model: tiny\noptim: {lrr: 1}\n", ("run.yaml:2: `optim.lrr`", "no such key", "did you mean `lr`?")),
    "option beside a reward": (
        "objective: grpo\ngrpo:\n  rewards: [{use: length, most: 20}]\n",
        ("run.yaml:3: `grpo.rewards.0.most`", "no such key", "write `options: {most: ...}`", "known: options"),
    ),
    "unknown key at the top": ("modle: tiny\n", ("run.yaml:1: `modle`", "did you mean `model`?")),
    "unknown key of a model": ("model: {pth: x}\n", ("run.yaml:1: `model.pth`", "did you mean `path`?")),
    "duplicate key": ("model: tiny\nseed: 1\nseed: 2\n", ("run.yaml:3", "`seed` appears twice", "keep")),
    "alias": ("model: &m tiny\noutput: *m\n", ("run.yaml:2", "the alias *m", "write the value out")),
    "tag": ("model: !!python/object/apply:os.system ['touch out']\n", ("run.yaml:1", "python/object/apply:os.system")),
    "not YAML": ("model: [tiny\n", ("run.yaml:", "not YAML", "fix that line")),
    "a tab": ("data:\n\tpath: x\n", ("run.yaml:2", "not YAML")),
    "empty": ("", ("run.yaml", "nothing at the top", "start with `model:`")),
    "a list": ("- model: tiny\n", ("run.yaml", "no mapping at the top", "start with `model:`")),
    "two documents": ("model: tiny\n---\nmodel: tiny\n", ("run.yaml:", "not YAML", "expected a single document")),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_text(name, call, write):
    text, says = TEXTS[name]
    refused(call("train", write(text)), *says)


# --- values: changes of a run that works, flags, and what the message must say

Case = tuple[dict[str, Any], list[str], tuple[str, ...]]
VALUES: dict[str, Case] = {
    "missing key": ({"objective": None}, [], ("`objective`", "it is missing", "add `objective:`")),
    "text for a number": ({"batch": {"seq": "big"}}, [], ("`batch.seq`", "'big'", "give a whole number")),
    "text for a switch": ({"train": {"overwrite": "yes"}}, [], ("`train.overwrite`", "'yes'", "give true or false")),
    "infinite rate": ({"optim": {"lr": float("inf")}}, [], ("`optim.lr`", "inf", "finite")),
    "negative rate": ({"optim": {"lr": -1e-3}}, [], ("`optim.lr`", "-0.001", "give a number above 0")),
    "unknown choice": ({"optim": {"schedule": "cosin"}}, [], ("`optim.schedule`", "'cosin'", "'cosine'")),
    "rows of an objective in a list": (
        {"objective": {"use": "loss.py:f", "rows": ["chat"]}}, [], ("`objective`", "one of your own"),
    ),
    "objective not built": ({"objective": "ppo"}, [], ("`objective`", "'ppo'", "'distill' or 'grpo'")),
    "list for a section": ({"optim": [1]}, [], ("`optim`", "[1]", "optim")),
    "eval out of range": ({"data": {"eval": 1.5}}, [], ("`data.eval`", "1.5", "give a number below 1 or a path")),
    "rows do not divide": (
        {"batch": {"tokens": 200}}, [],
        ("`batch.tokens: 200`", "not divisible by 128 slots of a micro-batch x 1 rank", "set it to 256"),
    ),
    "ranks do not divide": (
        {"batch": {"tokens": 384}}, ["--ranks", "2", "--with", "ddp"],
        ("`batch.tokens: 384`", "128 slots of a micro-batch x 2 ranks", "set it to 512"),
    ),
    "micro no multiple": (
        {"batch": {"micro_tokens": 200}}, [],
        ("`batch.micro_tokens: 200`", "not a multiple of `batch.seq: 128`", "set it to 128"),
    ),
    "a cap without a GPU": (
        {}, ["--with", "memory-cap:mib=8000"],
        ("`memory-cap` needs a CUDA device", "a CPU only", "turn the technique off"),
    ),
    "no data": ({"data": {"path": None}}, [], ("one of `data.path`", "none of them", "give exactly one")),
    "two data": ({"data": {"sample": "recipes"}}, [], ("`data.path` and `data.sample`", "give exactly one")),
    "random with sft": (
        {"data": {"path": None, "random": True}}, [],
        ("`objective: sft` on `data.random`", "random tokens", "objective: pretrain"),
    ),
    "random with a file": (
        {"objective": "pretrain", "data": {"path": None, "random": 8, "eval": "chat.jsonl"}}, [],
        ("`data.eval` from a file with `data.random`", "chat.jsonl", "give a fraction"),
    ),
    "text on a shape": (
        {"model": {"shape": "llama-3.2-1b"}}, [],
        ("`model.shape: llama-3.2-1b` on text", "a shape has no tokenizer", "take data.random"),
    ),
    "no data file": ({"data": {"path": "no.jsonl"}}, [], ("no.jsonl", "no such file", "check the path")),
    "data of no known kind": (
        {"data": {"path": "run.yaml"}}, [], ("no known kind of data", "rename them by their content"),
    ),
    "no eval file": ({"data": {"eval": "no.jsonl"}}, [], ("`data.eval: no.jsonl`", "no such file", "JSONL file")),
    "eval fraction of few": (
        {"data": {"eval": 0.01}}, [], ("0.01 of the data", "12 rows: this fraction gives 0", "change the fraction"),
    ),
    "no model": ({"model": "./models/none"}, [], ("the model ./models/none", "no such folder", "hub id, or `tiny`")),
    "a shape as init takes it": (
        {"model": "shape:llama-3.1-8b"}, [],
        ("the model shape:llama-3.1-8b", "no such folder", "write `model: {shape: llama-3.1-8b}`", "or `tiny`"),
    ),
    "a shape of a hub id": ({"model": "shape:org/name"}, [], ("no such folder", "write `model: {shape: org/name}`")),
    "a sample as init takes it": (
        {"data": {"path": "sample:recipes", "eval": None}}, [], ("no such file", "write `data: {sample: recipes}`"),
    ),
    "random tokens as init takes them": (
        {"data": {"path": "random:64", "eval": None}}, [], ("no such file", "write `data: {random: 64}`; or check"),
    ),
    "a shape by its name": (
        {}, ["--set", "model=llama-3.1-8b"], ("the model llama-3.1-8b", "write `model: {shape: llama-3.1-8b}`"),
    ),
    "hub without network": (
        {"model": "somebody/some-model"}, [],
        ("the model somebody/some-model", "the hub cannot be reached", "check the name and the network"),
    ),
    "hub id with a slip": (
        {"model": "meta-llama/Lama-3.1-8B"}, [],
        ("did you mean the hub id `meta-llama/Llama-3.1-8B`, whose shape is built in? Else check the name",),
    ),
    "hub id of another size": (
        {"model": "meta-llama/Llama-3.1-13B"}, [],
        ("do:    check the name", "a plan only needs its config.json", "built-in shapes: meta-llama/Llama-3."),
    ),
    "hub id of a neighbour": (
        {"model": "mistralai/Mistral-Large-Instruct-2407"}, [],
        ("do:    check the name and", "built-in shapes: mistralai/"),
    ),
    "hub id like none": ({"model": "x9/zz"}, [], ("a plan only needs its config.json)",)),
    "hub id without its owner": ({"model": "qwen2.5-7b"}, [], ("a hub id such as `Qwen/Qwen2.5-7B`, or `tiny`",)),
    "neither path nor shape": (
        {"model": {"dtype": "float32"}}, [], ("`model.path` and `model.shape`", "neither", "give exactly one"),
    ),
    "both path and shape": (
        {
            "model": {"path": "tiny", "shape": "llama-3.2-1b"},
            "objective": "pretrain", "data": {"path": None, "random": 8},
        }, [], ("both", "give exactly one"),
    ),
    "unknown shape": (
        {"model": {"shape": "llama-3.2-1bb"}, "objective": "pretrain", "data": {"path": None, "random": 8}}, [],
        ("`model.shape: llama-3.2-1bb`", "no such shape", "did you mean `llama-3.2-1b`?"),
    ),
    **{
        f"unknown shape {name}": (
            {"model": {"shape": name}, "objective": "pretrain", "data": {"path": None, "random": 8}}, [],
            (f"`model.shape: {name}`", "no such shape", do),
        ) for name, do in (
            ("LLAMA-3.1-8b", "did you mean `llama-3.1-8b`?"), ("zzz", "are in docs/models.md"),
        )
    },
    "text longer than T": (
        {"batch": {"seq": 32, "tokens": 32}}, [],
        ("at most 32 tokens (batch.seq)", "chat.jsonl:1", "data.too_long: split, drop or truncate"),
    ),
    "all rows dropped": (
        {"batch": {"seq": 4, "tokens": 4}, "data": {"too_long": "drop"}}, [],
        ("chat.jsonl", "nothing is left of 9 rows: 9 were longer than 4 tokens", "raise batch.seq"),
    ),
    # techniques
    "unknown technique": (
        {"with": {"pakcing": {}}}, [], ("the technique `pakcing`", "no such technique", "did you mean `packing`?"),
    ),
    "unknown option": (
        {"with": {"attention": {"imp": "sdpa"}}}, [], ("`attention: imp`", "no such option", "did you mean `impl`?"),
    ),
    "another program's option of a technique": (
        {"with": {"attention": {"kernel": "fa2"}}}, [],
        ("`attention: kernel`", "impl (masked, sdpa, varlen, cudnn, fa4)"),
    ),
    "a chat template that is no file": (
        {"model": {"path": "tiny", "chat_template": "none"}}, [],
        ("`model.chat_template: none`", "no such file", "left out, "),
    ),
    "option of none": (
        {"with": {"fused-adamw": {"x": 1}}}, [], ("`fused-adamw: x`", "no such option", "takes no options"),
    ),
    "option's type": ({"with": {"recompute": {"every": "two"}}}, [], ("`recompute: every`", "'two'", "a whole number")),
    "option's choice": ({"with": {"attention": {"impl": "flash"}}}, [], ("`attention: impl`", "'flash'", "'sdpa'")),
    "option's bound": ({"with": {"fused-loss": {"chunk": 0}}}, [], ("`fused-loss: chunk`", "0", "of at least 1")),
    "options no mapping": ({"with": {"packing": True}}, [], ("`with.packing`", "True", "give a mapping {KEY: VALUE}")),
    "with no mapping": ({"with": ["packing"]}, [], ("`with`", "['packing']", "give a mapping {KEY: VALUE}")),
    "amp with bf16": (
        {"with": {"amp": {}, "bf16": {}}}, [],
        ("`amp` with `bf16`", "both own the dtype of matmuls", "turn one off: --without amp or --without bf16"),
    ),
    "ddp with fsdp": (
        {"with": {"ddp": {}, "fsdp": {}}}, ["--ranks", "2"],
        ("`ddp` with `fsdp`", "both own the data-parallel axis", "turn one off: --without ddp or --without fsdp"),
    ),
    "fsdp on one rank": ({"with": {"fsdp": {}}}, [], ("`fsdp`", "one rank", "--ranks 2 or torchrun")),
    "ranks without either": ({}, ["--ranks", "2"], ("2 ranks", "no technique shares the work", "--with ddp")),
    "recompute none": (
        {"with": {"recompute": {"every": 99}}}, [],
        ("`recompute:every=99`", "the model has 4 blocks", "take every from 1 to 4"),
    ),
    "amp on bf16 weights": (
        {"model": {"path": "tiny", "dtype": "bfloat16"}, "with": {"amp": {}}}, [],
        ("`amp` keeps float32 weights", "`model.dtype: bfloat16`", "leave `model.dtype` out"),
    ),
    "bf16 of bf16 weights": (
        {"model": {"path": "tiny", "dtype": "bfloat16"}, "with": {"bf16": {}}}, [],
        ("`bf16` converts float32 weights", "`model.dtype: bfloat16`", "leave one of the two out"),
    ),
    # flags
    "set without a value": ({}, ["--set", "optim.lr"], ("--set optim.lr", "no `key=value`", "--set optim.lr=1e-4")),
    "set without a key": ({}, ["--set", "=3"], ("--set =3", "no `key=value`")),
    "set of an unknown key": ({}, ["--set", "optim.lrr=1"], ("--set optim.lrr=1: `optim.lrr`", "no such key", "`lr`?")),
    "set through a value": ({}, ["--set", "seed.x=1"], ("`seed`", "{'x': 1}", "give a whole number")),
    "set of a wrong type": ({}, ["--set", "seed=abc"], ("--set seed=abc: `seed`", "'abc'", "give a whole number")),
    "with an option unset": ({}, ["--with", "recompute:every"], ("--with recompute:every", "'every' has no value")),
    "without what is not there": ({}, ["--without", "amp"], ("--without amp", "`with` holds packing", "remove")),
    # resuming
    "resume nothing": ({}, ["--resume", "no-such"], ("no-such", )),
    "allow without resume": ({}, ["--allow-change", "data"], ("--allow-change", "no --resume", "leave it out")),
    "learn the answers of everything": (
        {"objective": "pretrain", "data": {"train_on": "answer"}}, [], ("train_on: answer", "learns every token"),
    ),
    "learn the answers of pairs": (
        {"objective": "orpo", "data": {"train_on": "answer"}}, [], ("train_on: answer", "compares whole answers"),
    ),
    "every one and a half steps": ({"train": {"save_every": 1.5}}, [], ("save_every", "1.5", "whole number of steps")),
    "with a number": ({"with": {"packing": 5}}, ["--with", "packing:x=1"], ("`with.packing` holds 5", "as a mapping")),
    "with a list": ({"with": ["packing"]}, ["--without", "packing"], ("--without packing", "no mapping")),
    "output nowhere": ({"output": ""}, [], ("`output`", "''")),
    "a long name": ({"output": "x" * 300}, [], ("x" * 300, "File name too long", "use another")),
    "a long model": ({"model": "x" * 300}, [], ("x" * 300, "File name too long", "give a path")),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_value(name, call, write):
    changes, flags, says = VALUES[name]
    refused(call("train", write(**{("with_" if k == "with" else k): v for k, v in changes.items()}), *flags), *says)


@on_cpu
@pytest.mark.parametrize(("impl", "wanted"), [("varlen", "8.0"), ("cudnn", "9.0")])
def test_gpu_technique_on_a_cpu(impl, wanted, call, write):
    found = call("train", write(), "--with", f"attention:impl={impl}", "--with", "amp")
    refused(
        found, f"`attention:impl={impl}` needs a CUDA device of capability {wanted}", "a CPU only",
        "turn the technique off",
    )  # fmt: skip


def test_no_configuration(call, here):
    refused(call("train", "no.yaml"), "the configuration no.yaml", "no such file", "name a YAML file")
    refused(call("train", "."), "the configuration .", "no such file")
    write_rows(here / "rows.jsonl", [{"prompt": "Hm", "completion": " a"}] * 2)
    init = "optrush init --model MODEL --data rows.jsonl"
    refused(call("train", "rows.jsonl"), "the configuration rows.jsonl", "a data file, not YAML", init)
    (here / "latin.yaml").write_bytes(b"output: caf\xe9\n")
    refused(call("train", "latin.yaml"), "latin.yaml", "not UTF-8", "save it as UTF-8")


# --- models

CONFIGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a router's balance loss": ({"model_type": "qwen2_moe", "output_router_logits": True,
        "router_aux_loss_coef": 0.01}, ("output_router_logits true", "times 0.01", '"output_router_logits": false')),
    "encoder-decoder": ({"model_type": "t5", "is_encoder_decoder": True}, ("an encoder-decoder", "causal")),
    "quantised": ({"quantization_config": {"quant_method": "hqq"}},
        ("weights quantised on disk", "hqq", "unquantised")),
    "unknown rope": ({"rope_parameters": {"rope_type": "llama33", "rope_theta": 1e4}},
        ("RoPE type 'llama33'", "fix rope_type")),
    "no size": ({"hidden_size": None}, ("hidden_size is None", "positive whole number")),
    "sizes do not divide": ({"num_key_value_heads": 5}, ("num_key_value_heads 5", "multiple of key/value heads")),
    "weights of another size": ({"intermediate_size": 256}, ("gate_proj", "check that config.json fits the weights")),
    "unknown type": ({"model_type": "megallama"}, ("'megallama'", "transformers cannot load it", "update")),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_model_config(name, call, write, model, here):
    changes, says = CONFIGS[name]
    edited(model, here / "m", **changes)
    refused(call("train", write(model="m")), *says)


def test_model_folder(call, write, model, here):
    folder = here / "m"
    folder.mkdir()
    refused(call("train", write(model="m")), "the model m", "a folder without config.json", "Hugging Face")
    (folder / "adapter_config.json").write_text("{}")
    refused(call("train", write(model="m")), "the model m", "an adapter", "optrush export RUN --out DIR")
    (folder / "adapter_config.json").unlink()
    (here / "m" / "model").mkdir()
    (here / "m" / "model" / "config.json").write_text("{}")  # a run's folder
    refused(call("train", write(model="m")), "the model m", "a folder without config.json", "name m/model")
    (folder / "config.json").write_text('{"model_type": ')
    refused(call("train", write(model="m")), "config.json", "not JSON", "download the model again")
    (folder / "config.json").write_text("[]")
    refused(call("train", write(model="m")), "config.json", "not a JSON object", "download the model again")
    shutil.rmtree(folder)
    edited(model, folder)
    (folder / "model.safetensors").unlink()
    refused(call("train", write(model="m")), "the weights in m", "model.safetensors", "save_pretrained")
    (folder / "model.safetensors").write_bytes(b"not safetensors")
    refused(call("train", write(model="m")), "the weights in m", "model.safetensors", "download it again")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    refused(call("train", write(model="m")), "the weights in m", "pytorch_model.bin")


def test_tokenizer(call, write, model, here):
    edited(model, here / "none")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (here / "none" / name).unlink()
    refused(call("train", write(model="none")), "the tokenizer of none", "tokenizer.json")
    edited(model, here / "slow")
    (here / "slow" / "tokenizer.json").unlink()
    (here / "slow" / "tokenizer_config.json").unlink()
    (here / "slow" / "vocab.json").write_text(json.dumps({"<unk>": 0, "a": 1}))
    (here / "slow" / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "CTRLTokenizer", "unk_token": "<unk>"})
    )
    (here / "slow" / "merges.txt").write_text("#version: 0.2\n")
    refused(call("train", write(model="slow")), "the tokenizer of slow", "tokenizer.json")


def test_template(call, write, model, here):
    (here / "t.jinja").write_text("{% for m in messages %}{{ m['content'] }}\n{% endfor %}")
    refused(
        call("train", write(model={"path": "tiny", "chat_template": "t.jinja"})),
        "to mask the messages at chat.jsonl:1", "no end-of-turn token", "data.train_on: all",
    )  # fmt: skip
    (here / "t.jinja").write_text("{{ messages | nothing }}")
    found = call("train", write(model={"path": "tiny", "chat_template": "t.jinja"}))
    refused(found, "to render the messages at chat.jsonl:1", "the chat template failed", "model.chat_template")
    (here / "t.jinja").write_bytes(b"caf\xe9")
    refused(call("train", write(model={"path": "tiny", "chat_template": "t.jinja"})), "t.jinja", "UTF-8")
    folder = edited(model, here / "plain")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    refused(call("train", write(model="plain")), "training on messages", "no chat template", "model.chat_template")


# --- rows

ROWS: dict[str, tuple[str, tuple[str, ...]]] = {
    "cut off": ('{"messages": [{"role": "user"', ("not valid JSON (cut off?)",)),
    "unknown role": ('{"messages": [{"role": "bot", "content": "Hm"}]}', ("messages[0].role is 'bot'", "assistant")),
    "captions": ('{"image": "a.png", "caption": "Hm"}', ("images with captions", "init --data FOLDER")),
    "pictures": ('{"img_path": "a.png", "answer": "Hm"}', ("images with captions", "in metadata.csv")),
    "files": ('{"file_name": "a.png", "caption": "Hm"}', ("images with captions", "init --data FOLDER")),
    "descriptions": ('{"images": ["a.png"], "description": "Hm"}', ("images with captions", "metadata.csv")),
    "neither": ('{"prompt": "Hm"}', ("no known format: the row has 'prompt'",)),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_row(name, call, write, here):
    line, says = ROWS[name]
    good = (here / "chat.jsonl").read_text().splitlines()
    (here / "chat.jsonl").write_text("\n".join([good[0], line, good[1]]) + "\n")
    do = () if "images with captions" in says else ("fix that line",)
    refused(call("train", write()), "chat.jsonl:2", *do, *says)


def test_text_without_a_target(call, write, model, here):
    """A one-token text has nothing to predict: its first token is never a target."""
    folder = edited(model, here / "m")
    inner = json.loads((folder / "tokenizer.json").read_text())
    inner["post_processor"] = None  # no begin-of-text token
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").write_text(json.dumps(inner))
    write_rows(here / "one.jsonl", [{"text": "Stir well."}, {"text": "<|eos|>"}])
    refused(call("train", write(model="m", data={"path": "one.jsonl"})), "one.jsonl:2", "no target token", "remove it")


# --- the output folder

FINISHED = {"run.yaml": "model: tiny\n", "metrics.jsonl": '{"step": 1}\n'}


@pytest.mark.parametrize(("files", "clean", "says"), [
    ({"thesis.txt": "years of work"}, True,
        ("`train.overwrite: true` in out", "`thesis.txt` is in the folder", "move it")),
    ({**FINISHED, "notes.md": "mine"}, True, ("`notes.md` is in the folder",)),
    (FINISHED, False, ("`output: out`", "the folder has a run", "--resume auto", "overwrite")),
], ids=["something else", "a run with something else", "a finished run"])  # fmt: skip
def test_output_that_is_not_empty(files, clean, says, call, write, here):
    (here / "out").mkdir()
    for name, text in files.items():
        (here / "out" / name).write_text(text)
    refused(call("train", write(train={"overwrite": True}) if clean else write()), *says, output=None)
    assert {p.name: p.read_text() for p in (here / "out").iterdir()} == files


@pytest.mark.parametrize("finished", [False, True])
def test_a_checkpoint_that_is_not_there(finished, call, write, here):
    """It is the flag that is wrong, not the output folder."""
    config = write()
    if finished:
        (here / "out").mkdir()
        shutil.copy(config, here / "out" / "run.yaml")
    says = ("the checkpoint none/step-000001", "no such folder", "--resume auto")
    refused(call("train", config, "--resume", "none/step-000001"), *says, output=None)


def test_output_that_is_a_file(call, write, here):
    (here / "out").write_text("a file")
    refused(call("train", write()), "`output: out`", "out is not a folder", "use another `output`", output=None)
    refused(call("train", write(output="out/deeper")), "is not a folder", output=None)
    assert (here / "out").read_text() == "a file"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_output_without_rights(call, write, here):
    (here / "shut").mkdir(mode=0o500)
    found = call("train", write(output="shut/out"))
    refused(found, "cannot be written to", "change its permissions", output="shut/out")


# --- eval


def test_eval(call, write, here):
    refused(call("eval", write(), "--data", "no.jsonl", "--json"), "no.jsonl", "no such file", "check the path")
    lengths = ("--with", "packing", "--set", "batch.micro_tokens=null")  # decided by the lengths of the rows
    refused(call("eval", write(), "--data", "no.jsonl", *lengths), "asked: rows from no.jsonl", "no such file")
    (here / "bad.jsonl").write_text('{"foo": 1}\n')
    refused(call("eval", write(), "--data", "bad.jsonl"), "asked: the row at bad.jsonl:1", "no known format")
    refused(call("eval", write(), "--model", "no/such/model"), "the model no/such/model", "no such folder")


@pytest.mark.parametrize("names", [("a.txt",), ("a.md.gz", "b.md.gz")])
def test_eval_of_few_texts(names, call, write, here):
    """A text file is one row, unless data.text_rows makes more of it."""
    for name in names:
        raw = "\n\n".join(f"{name}, {i}: stir." for i in range(30)).encode()
        (here / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    data = {"path": [*names], "eval": 0.1, "too_long": "split"}
    found = call("train", write(objective="pretrain", data=data), "--dry-run")
    refused(found, f"{len(names)} rows: this fraction gives 0", "set data.text_rows: paragraph (or line)")
    found = call("train", write(objective="pretrain", data={**data, "text_rows": "paragraph"}), "--dry-run")
    assert found.code == 0, found.err
    write_rows(here / "one.jsonl", [{"text": "Stir."}])
    found = call("train", write(objective="pretrain", data={**data, "path": "one.jsonl"}), "--dry-run")
    refused(found, "1 rows", "change the fraction")
    assert "text_rows" not in found.err


def test_a_model_in_the_way(call, write, here):
    """The output's `model/` is what a run replaces: it may be neither what the run reads nor somebody's own."""
    tiny.write_tiny(here / "out/model")
    before = {p: p.read_bytes() for p in (here / "out").rglob("*") if p.is_file()}
    found = call("train", write(model="out/model"))
    assert found.code == 2 and "and would write to it" in found.err
    found = call("train", write())
    assert found.code == 2 and "the folder has a `model`, which this run would overwrite" in found.err
    assert {p: p.read_bytes() for p in (here / "out").rglob("*") if p.is_file()} == before


# --- real processes: the same face, and no traceback


def test_as_a_process(start, call, write, here):
    refused(start("train", write("model: tiny\noptim: {lrr: 1}\n")), "run.yaml:2: `optim.lrr`", "did you mean `lr`?")
    refused(call("train", write(model="somebody/some-model")), "somebody/some-model", "the hub")


@pytest.mark.slow
def test_on_two_ranks(start, write):
    """What only assembly finds is agreed on: one rank says it in three lines, and the launcher passes the code on."""
    found = start("train", write(data={"path": "no.jsonl"}), "--ranks", "2", "--with", "ddp")
    assert found.code == 2 and found.out == "" and "Traceback" not in found.err
    assert [line[:6] for line in found.err.splitlines()] == ["asked:", "found:", "do:   "], found.err
    assert not Path("out").exists()


def test_debug_shows_the_traceback(start, write):
    found = start("train", write(seed="x"), "--debug")
    assert found.code == 1 and "Traceback" in found.err and "ConfigError" in found.err


@pytest.mark.parametrize("arguments", [["trian"], ["train"], ["train", "run.yaml", "--rank", "2"]])
def test_usage(arguments, call, write):
    """What the parser itself refuses: exit code 2, usage and the mistake."""
    write()
    found = call(*arguments)
    assert found.code == 2 and found.out == "" and "Usage: optrush" in found.err and "Error" in found.err


def test_a_long_list_of_names_is_not_printed():
    """The nearest five are, and where to see all; the page has each of them."""
    known = {**SHAPES, **_published()}
    for name in ("zzz", "1", "", "deepseek-v3"):
        assert len(hint := nearest(name, known, "docs/models.md")) < 300 and f"all {len(known)} are in docs/" in hint
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text("utf-8").partition("## Named shapes")[2]
    assert {*re.findall("`([^`]+)`", page)} >= known.keys()
    assert nearest("zzz", map(str, range(99))).endswith("; 94 more exist")
    assert nearest("zzz", ["a", "b"]) == "known: a, b"
    assert nearest("loar", ["loader", "lora"]) == "did you mean `lora`?"
