"""`optrush eval --json` against a plain loop over documents, one at a time, through transformers alone."""

import json
import math
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from meshes import further
from optrush.cli import tasks as harness
from optrush.errors import ConfigError
from optrush.models import tiny

from clirun import document_of, write_rows

asked = document_of("eval")

CLOSE = 1e-4  # relative; both sides are float32
SMALL = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256}  # fmt: skip
# family -> what its configuration needs beside the vocabulary
FAMILIES: dict[str, dict[str, Any]] = {
    **{family: {} for family in tiny.FAMILIES},
    "gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "gemma2": {**SMALL, "query_pre_attn_scalar": 16, "sliding_window": 32},
    "gemma3_text": {**SMALL, "query_pre_attn_scalar": 16, "sliding_window": 32},
}


def folder_of(family, tmp, model):
    """A tiny model of this family with the built-in tokenizer and template."""
    folder = tmp / family
    if family in tiny.FAMILIES:
        tiny.write_tiny(folder, family=family)
        return folder
    tokenizer = AutoTokenizer.from_pretrained(model)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, vocab_size=tiny.VOCABULARY, bos_token_id=1, eos_token_id=2, pad_token_id=0, **FAMILIES[family]
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def encoded(tokenizer, row):
    """Ids and targets, written from the contract alone: the built-in template's marks delimit the assistant's turns."""
    if "text" in row:
        ids = [*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id]
        return ids, [False] + [True] * (len(ids) - 1)
    text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    end = tokenizer.convert_tokens_to_ids(tiny.END)
    header = tokenizer(f"{tiny.START}assistant\n", add_special_tokens=False)["input_ids"]
    targets, inside = [False] * len(ids), False
    for i, token in enumerate(ids):
        inside = inside or ids[max(0, i - len(header)) : i] == header
        targets[i] = inside
        inside = inside and token != end
    return ids, targets


@torch.no_grad()
def plain(folder, rows):
    """Mean negative log-likelihood a target token, and their number; a document at a time, no batch, no mask."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    total, count = 0.0, 0
    for row in rows:
        ids, targets = encoded(tokenizer, row)
        logits = model(torch.tensor([ids])).logits[0, :-1].double()
        nll = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
        total += nll[torch.tensor(targets[1:])].sum().item()
        count += sum(targets[1:])
    return total / count, count


@pytest.mark.parametrize("family", further(list(FAMILIES), 1))
def test_the_loss_is_the_plain_loops(family, call, write, model, here):
    folder = folder_of(family, here, model)
    rows = [json.loads(line) for line in (here / "chat.jsonl").read_text().splitlines()]
    rows += [{"text": "Salt the water, then wait."}, {"text": "Nothing burns as well as an onion that nobody watches."}]
    write_rows(here / "mixed.jsonl", rows)
    found = asked(call, write(model=str(folder)), "--data", "mixed.jsonl")
    loss, targets = plain(folder, rows)
    assert set(found) == {"loss", "target_tokens", "documents", "rows", "too_long"}
    assert found["target_tokens"] == targets
    assert found["documents"] == len(rows) and 0 < found["rows"] < len(rows), "packed"
    assert found["too_long"] == 0
    assert math.isclose(found["loss"], loss, rel_tol=CLOSE), (found["loss"], loss)


def test_the_rows_length_and_the_micro_batch_change_nothing(call, write):
    config = write()
    first = asked(call, config, "--data", "chat.jsonl")
    for flags in (
        ["--set", "batch.seq=256", "--set", "batch.tokens=512", "--set", "batch.micro_tokens=512"],
        ["--with", "attention"],
        ["--with", "attention", "--with", "fused-loss:chunk=16"],
        ["--set", "model.implementation=transformers"],
    ):
        again = asked(call, config, "--data", "chat.jsonl", *flags)
        assert again["target_tokens"] == first["target_tokens"] and again["documents"] == first["documents"]
        assert math.isclose(again["loss"], first["loss"], rel_tol=CLOSE), flags


def test_what_is_evaluated(call, write, model, here):
    """--data, else what the run holds out, else its data; `train_on: all` takes every token but the first."""
    held = asked(call, write())
    assert held["documents"] == 3  # a quarter of 12
    whole = asked(call, write(data={"eval": None}))
    assert whole["documents"] == 12
    assert asked(call, write(data={"eval": "chat.jsonl"})) == whole
    every = asked(call, write(data={"eval": None, "train_on": "all"}))
    rows = [json.loads(line) for line in (here / "chat.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert every["target_tokens"] == sum(len(encoded(tokenizer, row)[0]) - 1 for row in rows)


def test_too_long_rows_are_counted(call, write):
    found = asked(call, write(batch={"seq": 64, "tokens": 64}, data={"eval": None, "too_long": "drop"}))
    assert found["too_long"] > 0 and found["documents"] + found["too_long"] == 12


def test_model_replaces_the_runs(call, write, here):
    tiny.write_tiny(here / "other", seed=3)
    config = write()
    other = asked(call, config, "--model", "other")
    assert other["loss"] != asked(call, config)["loss"]
    assert other == asked(call, write(model="other"))


def test_model_and_data_replace_random_tokens_on_a_shape(call, write):
    config = write(
        objective="pretrain", model={"shape": "llama-3.2-1b"}, data={"path": None, "random": 8, "eval": None}
    )
    found = asked(call, config, "--model", "tiny", "--data", "chat.jsonl")
    assert found == asked(call, write(data={"train_on": "all"}), "--data", "chat.jsonl")


def test_for_people(call, write):
    found = call("eval", write())
    assert found.code == 0 and [line.split()[0] for line in found.out.splitlines()] == [
        "loss", "target_tokens", "documents", "rows", "too_long",
    ]  # fmt: skip


# --- public tasks

TASK = """task: colours
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
ROWS = [
    {"question": "The sky is", "choices": [" blue", " a fish"], "answer": 0},
    {"question": "Grass is", "choices": [" loud", " green"], "answer": 1},
    {"question": "Salt is", "choices": [" white", " round and red"], "answer": 1},
]


def test_tasks(call, tmp_path):
    """The share of rows whose answer is the likeliest, as transformers alone finds it."""
    pytest.importorskip("lm_eval", reason="pip install optrush[eval]")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "colours.yaml").write_text(TASK.replace("FILE", str(tmp_path / "rows.jsonl")))
    tiny.write_tiny(tmp_path / "model", family="llama")
    config = write_config(tmp_path, model=str(tmp_path / "model"))
    found = call("eval", config, "--tasks", str(tmp_path / "colours.yaml"), "--json")
    assert found.code == 0, found.err
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")

    def likely(question, choice):
        whole, n = tokenizer(question + choice)["input_ids"], len(tokenizer(question)["input_ids"])
        with torch.no_grad():
            logits = model(torch.tensor([whole])).logits[0].log_softmax(-1)
        return sum(logits[i - 1, whole[i]].item() for i in range(n, len(whole)))

    best = [max(row["choices"], key=lambda c: likely(row["question"], c)) for row in ROWS]
    right = sum(row["choices"].index(b) == row["answer"] for row, b in zip(ROWS, best)) / len(ROWS)
    result = json.loads(found.out)["tasks"]["colours"]
    assert result["acc"] == pytest.approx(right) and result["samples"] == len(ROWS)


@pytest.mark.parametrize(("flags", "asked", "found"), [
    (("--tasks", "arc_easy", "--data", "x.jsonl"), "`optrush eval --tasks`", "tasks have rows of their own"),
    (("--tasks", "arc_easy", "--ranks", "2"), "`optrush eval --tasks`", "they run on one"),
    (("--tasks", ","), "--tasks", "no name"),
    (("--tasks", "arc_easy", "--set", "model={shape: llama-3.2-1b}"), "`optrush eval --tasks`", "is random"),
    (("--tasks", "arc_easy"), "`optrush eval --tasks`", "the package lm_eval is not installed"),
    (("--limit", "3"), "--limit", "no --tasks"),
], ids=str)  # fmt: skip
def test_tasks_refused(call, tmp_path, monkeypatch, flags, asked, found):
    monkeypatch.setattr("optrush.technique.library", lambda name: None)
    ended = call("eval", write_config(tmp_path), *flags)
    assert ended.code == 2 and f"asked: {asked}" in ended.err and found in ended.err, ended.err


@pytest.mark.parametrize(
    ("content", "found"),
    [(None, "no such file"), (b"group: many", "no `task: NAME`"), (b"task: [a", "not read"), (b"\xff", "not read")],
)
def test_files_of_no_task(tmp_path, content, found):
    if content is not None:
        (tmp_path / "x.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=found):
        harness._named([str(tmp_path / "x.yaml")])


def test_the_table_of_a_group():
    """It has figures of its own, and no number of samples."""
    figures = {"one": {"acc": 0.5, "samples": 4, "version": 1}, "group": {"acc": 0.25, "samples": None, "version": 2}}
    one, group = harness.table({"tasks": figures}).splitlines()
    assert one.split()[1:] == ["acc", "0.5000", "of", "4"] and group.split() == ["group", "acc", "0.2500"]


def write_config(folder, **changed):
    path = folder / "run.yaml"
    run = {"model": "tiny", "objective": "sft", "data": {"sample": "recipes"}, "output": str(folder / "run")} | changed
    path.write_text(json.dumps(run))
    return str(path)


@pytest.mark.parametrize(("name", "do"), [
    ("arc_esay", "did you mean arc_easy?"), ("zzz", "lm_eval ls tasks lists them"),
])  # fmt: skip
def test_an_unknown_task_is_told_its_nearest(name, do):
    assert harness._close(name, ["arc_easy", "gsm8k"]) == do
