"""A chat format for a base model, from outside: `model.add_tokens` with `chat_template: chatml`."""

import json
import math

import pytest
import torch
from test_eval_cli import plain
from transformers import AutoModelForCausalLM, AutoTokenizer

from clirun import metrics, refused, write_rows

TOKENS = ["<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def base(tmp_path_factory, cache):
    """The tiny model as a base model: its tokenizer has no ChatML, its embedding a row for each token and no other."""
    folder = tmp_path_factory.mktemp("base")
    tiny = cache / "optrush" / "tiny-1"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (tiny / name).read_text()
        (folder / name).write_text(text.replace("<|im_", "<|old_"))
    model = AutoModelForCausalLM.from_pretrained(tiny)
    rows = len(AutoTokenizer.from_pretrained(folder))
    model.resize_token_embeddings(rows)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    return folder


@pytest.fixture
def changes(base):
    """What makes it one that chats."""
    return {
        "model": {"path": str(base), "add_tokens": TOKENS, "chat_template": "chatml"},
        "train": {"epochs": None, "steps": 3},
    }


def test_a_base_model_becomes_a_chat_model(call, write, here, changes):
    rows = [json.loads(line) for line in (here / "chat.jsonl").read_text().splitlines()]
    write_rows(here / "held.jsonl", rows[:4])
    write_rows(here / "chat.jsonl", rows[4:])
    found = call("train", write(**changes, data={"eval": "held.jsonl"}))
    assert found.code == 0, found.err
    assert "<|im_start|>, <|im_end|>: the embedding grows from 1782 rows to 1792, a multiple of 128" in found.err
    folder = here / "out" / "model"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.vocab_size == 1792 == model.get_input_embeddings().weight.shape[0]
    assert tokenizer.convert_tokens_to_ids(TOKENS) == [1782, 1783]
    assert model.generation_config.eos_token_id == [2, 1783], "it stops at the end of text and of a turn"
    assert model.generation_config.bos_token_id == 1
    last = [line["eval_loss"] for line in metrics(here / "out") if "eval_loss" in line][-1]
    loss, targets = plain(folder, rows[:4])
    assert math.isclose(loss, last, rel_tol=1e-4) and targets > 0
    new = model.get_input_embeddings().weight[1782:1784]
    assert not torch.equal(new[0], new[1]), "the two rows, equal at first, have learnt"

    again = call("eval", "run.yaml", "--model", "out/model", "--json")
    assert math.isclose(json.loads(again.out)["loss"], last, rel_tol=1e-6), "the tokens are there already: no change"
    shown = call("data", "show", "run.yaml", "--json")
    assert "<|im_start|>" in shown.out, shown.err
    wide = json.loads(call("plan", "run.yaml", "--json").out)
    narrow = json.loads(call("plan", "run.yaml", "--set", "model.add_tokens=[]", "--json").out)
    assert wide["peak_bytes"] > narrow["peak_bytes"]


def test_resuming_wants_the_same_tokens(call, write, here, changes):
    assert call("train", write(**changes)).code == 0
    more = [*TOKENS, "<|tool|>"]
    longer = ["--set", "train.steps=4", "--resume", "auto"]
    found = call("train", "run.yaml", *longer, "--set", f"model.add_tokens={json.dumps(more)}")
    refused(found, "tokenizer", output=None)
    found = call("train", "run.yaml", *longer)
    assert found.code == 0, found.err


def test_chatml_without_its_tokens(call, write, changes):
    says = ("`model.chat_template: chatml`", "no special token <|im_start|> and no <|im_end|>", "add_tokens: [")
    refused(call("train", write(**changes), "--set", "model.add_tokens=[]"), *says)


@pytest.mark.parametrize(("tokens", "says"), [
    ('["<a> "]', ("white space", "remove it")), ('["in"]', ("a word of this tokenizer's vocabulary", "<|im_start|>")),
    ("[7]", ("`model.add_tokens.0`", "7", "give text")),
])  # fmt: skip
def test_tokens_that_are_refused(call, write, changes, tokens, says):
    refused(call("train", write(**changes), "--set", f"model.add_tokens={tokens}"), *says)


def test_the_published_generation_config_is_kept(call, write, here, model):
    """With a template: eos gets the end of a turn beside those it had. Without one: the very file."""
    assert call("train", write(train={"epochs": None, "steps": 1}), "--set", "output=a").code == 0
    name = "generation_config.json"
    assert (here / "a" / "model" / name).read_bytes() == (model / name).read_bytes()
    (here / "t.jinja").write_text(
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<|eos|>' }}{% endfor %}"
    )
    sets = ["--set", "model.path=tiny", "--set", "model.chat_template=t.jinja", "--set", "output=b"]
    found = call("train", "run.yaml", *sets)
    assert found.code == 0, found.err
    was, now = (json.loads((f / name).read_text()) for f in (model, here / "b" / "model"))
    assert now == {**was, "eos_token_id": [4, 2]}
