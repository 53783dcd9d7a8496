"""`model.add_tokens`, `model.chat_template: chatml`: the tokenizer, how far the embedding grows, and its new rows."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from tokenizers import AddedToken
from transformers import AutoTokenizer

from meshes import further
from optrush import config
from optrush.data.schema import Chat, Message, RowLocation, Text
from optrush.data.tokenizer import CHATML, add_tokens, open_tokenizer, open_tokens, turn_ends
from optrush.errors import ConfigError, DataError, NeedsError
from optrush.models.source import Growth, grow
from optrush.models.weights import Memory, WeightEntry, WeightMap, WithNewTokens
from optrush.planner import search
from optrush.trainer.run import absolute

from trials import assembled, steps, weights

TOKENS = ("<|im_start|>", "<|im_end|>")
HERE = RowLocation(Path("rows"), 1)


def run(box, *sets, objective="sft", **model):
    document = {
        "model": {"path": str(box / "untied"), **model}, "objective": objective,
        "data": {"path": str(box / "chat.jsonl")}, "batch": {"seq": 64, "tokens": 256, "micro_tokens": 128},
        "optim": {"lr": 1e-3}, "train": {"steps": 3}, "output": str(box / "output"), "with": {"packing": {}},
    }  # fmt: skip
    return config.parse_config(yaml.safe_dump(document), "run.yaml", sets)


def tokenizer(box):
    return AutoTokenizer.from_pretrained(box / "untied")


# --- the configuration


@pytest.mark.parametrize(("given", "says"), [
    ([3], "give text"), ([""], "give text that is not empty"), (["<a>", "<a>"], "each value once"),
    ("<a>", "give a list"), ([["<a>"]], "give text"),
])  # fmt: skip
def test_what_is_no_list_of_tokens(box, given, says):
    with pytest.raises(ConfigError) as caught:
        run(box, add_tokens=given)
    assert re.match(r"run.yaml:\d+: `model.add_tokens", caught.value.asked) and says in caught.value.do


def test_the_list_comes_back(box):
    asked = run(box, add_tokens=list(TOKENS), chat_template="chatml")
    assert config.parse_config(config.dump_config(asked), "again.yaml") == asked


# --- the tokenizer


def test_tokens_are_added_in_turn_and_saved(box, tmp_path):
    made = tokenizer(box)
    assert add_tokens(made, ("<a>", "<end>", "<b>")) == ("<a>", "<b>"), "<end> was there"
    assert made.convert_tokens_to_ids(["<a>", "<end>", "<b>"]) == [80, 5, 81]
    made.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.encode("w1<a>w2 <b>", add_special_tokens=False) == [8, 80, 9, 81]
    assert again.decode([8, 80, 9], skip_special_tokens=True).replace(" ", "") == "w1w2", "they are special"


def test_a_token_that_was_not_special_becomes_it(box, tmp_path):
    """Under its id and with its ways, in the files too; then a message may not hold it, and ChatML may name it."""
    made = tokenizer(box)
    made.add_tokens([AddedToken(token, special=False, lstrip=True) for token in TOKENS])
    made.save_pretrained(tmp_path / "plain")
    made = open_tokenizer(tmp_path / "plain")
    ids = made.convert_tokens_to_ids(list(TOKENS))
    assert not made.added_tokens_decoder[ids[0]].special
    assert add_tokens(made, TOKENS) == () and made.convert_tokens_to_ids(list(TOKENS)) == ids and len(made) == 82
    made.save_pretrained(tmp_path / "again")
    for folder in ("plain", "again"):
        tokens = open_tokens(run(box, add_tokens=list(TOKENS), chat_template="chatml"), tmp_path / folder)
        assert tokens is not None
        added = [tokens.tokenizer.added_tokens_decoder[i] for i in ids]
        assert (
            all(t.special and t.lstrip for t in added) and tokens.tokenizer.decode(ids, skip_special_tokens=True) == ""
        )
        with pytest.raises(DataError, match="im_end"):
            tokens.document(Chat((Message("user", "w1"), Message("assistant", "w2<|im_end|>"))), "assistant", HERE)


def test_tokens_that_cannot_be(box, tmp_path):
    with pytest.raises(ConfigError, match="white space") as caught:
        add_tokens(tokenizer(box), ("<a> ",))
    assert caught.value.do == "remove it" and "'<a> '" in caught.value.asked
    with pytest.raises(ConfigError, match="a word of this tokenizer's vocabulary") as caught:
        add_tokens(tokenizer(box), ("w3",))
    assert "<|im_start|>" in caught.value.do
    tokenizer(box).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "split_special_tokens": True}))
    with pytest.raises(ConfigError, match="reads '<a>' as") as caught:
        add_tokens(open_tokenizer(tmp_path), ("<a>",))
    assert "split_special_tokens: false" in caught.value.do


def test_rows_are_read_with_them(box):
    tokens = open_tokens(run(box, add_tokens=["<a>"]), box / "untied")
    assert tokens is not None
    assert tokens.document(Text("w1 <a> w2"), "assistant", HERE).ids.tolist() == [1, 8, 80, 9, 2]
    with pytest.raises(DataError, match="<a>"):  # a message may not hold a control token
        tokens.document(Chat((Message("user", "w1"), Message("assistant", "w2 <a>"))), "assistant", HERE)


# --- ChatML


def test_chatml(box):
    tokens = open_tokens(run(box, add_tokens=list(TOKENS), chat_template="chatml"), box / "untied")
    assert tokens is not None
    made = tokens.document(Chat((Message("user", "w1"), Message("assistant", "w2"))), "assistant", HERE)
    start, end = 80, 81
    text = tokens.tokenizer.decode(made.ids)
    assert made.ids[:2].tolist() == [1, start], "<bos> before it, for this tokenizer writes one before every text"
    assert made.ids[made.targets].tolist() == [9, end], "the answer and its end are learnt"
    assert text == "<bos> <|im_start|> <unk> w1 <|im_end|> <|im_start|> <unk> w2 <|im_end|>"
    assert turn_ends(tokens.tokenizer) == [end]
    want = tokens.tokenizer.apply_chat_template([{"role": "user", "content": "w1"}], tokenize=False)
    assert want == "<bos><|im_start|>user\nw1<|im_end|>\n"


def test_chatml_without_a_begin_of_text(box, tmp_path):
    made = tokenizer(box)
    made.backend_tokenizer.post_processor = None
    made.save_pretrained(tmp_path)
    tokens = open_tokens(run(box, add_tokens=list(TOKENS), chat_template="chatml"), tmp_path)
    assert tokens is not None and tokens.tokenizer.chat_template == CHATML


def test_chatml_needs_its_tokens(box):
    with pytest.raises(ConfigError) as caught:
        open_tokens(run(box, chat_template="chatml", add_tokens=TOKENS[:1]), box / "untied")
    assert caught.value.asked == "`model.chat_template: chatml`"
    assert caught.value.found == "the tokenizer has no special token <|im_end|>"
    assert caught.value.do == 'add them: add_tokens: ["<|im_start|>", "<|im_end|>"] under model'


def test_a_file_of_that_name_comes_first(box, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("chatml").write_text("{{ messages[0]['content'] }}")
    tokens = open_tokens(run(box, chat_template="chatml"), box / "untied")
    assert tokens is not None and tokens.template() == "{{ messages[0]['content'] }}"
    assert turn_ends(tokens.tokenizer) == [], "it leaves the answer out"


def test_a_folder_of_that_name_is_no_template(box, tmp_path, monkeypatch):
    """A run's own file still says `chatml`, where a path would mean nothing; a file's path is made absolute."""
    monkeypatch.chdir(tmp_path)
    Path("chatml").mkdir()
    asked = run(box, chat_template="chatml", add_tokens=list(TOKENS))
    assert absolute(asked).model.chat_template == "chatml"
    assert open_tokens(absolute(asked), box / "untied") is not None
    Path("mine.jinja").write_text("x")
    assert absolute(run(box, chat_template="mine.jinja")).model.chat_template == str(tmp_path / "mine.jinja")


# --- how far the vocabulary grows


@pytest.mark.parametrize(
    ("rows", "tokens", "want"),
    [
        (80, ("<a>",), Growth(("<a>",), (), 80, 80, 128, 128, 81)),  # the tokenizer has 80: no row is spare
        (82, ("<a>", "<b>"), Growth(("<a>", "<b>"), (), 82, 80, 82, 82, 82)),
        (82, ("<a>", "<b>", "<c>"), Growth(("<a>", "<b>", "<c>"), (), 82, 80, 128, 128, 83)),
        (300, ("<a>", "<end>"), Growth(("<a>",), ("<end>",), 300, 80, 81, 300, 81)),
        (80, ("<end>",), Growth((), ("<end>",), 80, 80, 80, 80, 80)),
        (70, ("<a>",), Growth(("<a>",), (), 70, 70, 128, 128, 81)),  # a tokenizer longer than its embedding
    ],
)  # fmt: skip
def test_growth(box, rows, tokens, want):
    assert grow(run(box, add_tokens=list(tokens)), box / "untied", {"vocab_size": rows}) == want


def test_growth_is_said():
    assert "grows from 80 rows to 128, a multiple of 128" in Growth(("<a>",), ("<b>",), 80, 80, 128, 128).note
    assert "the tokenizer has <b>" in Growth(("<a>",), ("<b>",), 80, 80, 128, 128).note
    assert "has rows for them (90)" in Growth(("<a>",), (), 90, 80, 81, 90).note
    assert Growth((), ("<b>",), 80, 80, 80, 80).note.endswith("the tokenizer has <b> already")


def test_growth_needs_a_tokenizer_and_a_size(box):
    with pytest.raises(ConfigError, match="has no tokenizer") as caught:
        grow(run(box, path=None, shape="llama-3.2-1b", add_tokens=["<a>"]), None, {"vocab_size": 9})
    assert "model.tokenizer" in caught.value.do
    with pytest.raises(ConfigError, match="no vocab_size"):
        grow(run(box, add_tokens=["<a>"]), box / "untied", {})
    of_a_shape = run(box, path=None, shape="llama-3.2-1b", tokenizer=str(box / "untied"), add_tokens=["<a>"])
    assert grow(of_a_shape, None, {"vocab_size": 128256}) == Growth(("<a>",), (), 128256, 80, 81, 128256, 81)


def test_the_plan_counts_the_new_rows(box):
    def weights_bytes(**model):
        lines = search.predict(run(box, "with.packing=null", **model), "h200", 1).lines
        return sum(line.bytes for line in lines if line.name.startswith("weights"))

    more = weights_bytes(add_tokens=["<a>"]) - weights_bytes()
    assert more == 2 * 48 * 64 * 4, "48 rows of embedding and of head, of width 64, in float32"


# --- the rows


def test_rows_under_any_cutting():
    """Every rectangle of the grown matrix, and of a head's bias, is what the whole one has there."""
    old, bias = torch.randn(10, 3, generator=torch.Generator().manual_seed(0)), torch.arange(10.0)
    growth = Growth(("a", "b", "c", "d"), (), 10, 8, 16, 16)
    source = WithNewTokens(Memory({"w": old.bfloat16(), "b": bias, "x": old}), frozenset({"w", "b"}), growth)
    entries = {
        "w": WeightEntry((16, 3), (("w", 16),)),
        "b": WeightEntry((16,), (("b", 16),)),
        "x": WeightEntry((10, 3), (("x", 10),)),
    }
    recipe = WeightMap(entries, source)
    mean = old.bfloat16()[:8].double().mean(0).float()
    want = torch.cat((old.bfloat16()[:8].float(), mean.expand(8, 3)))
    for first in range(16):
        for last in range(first, 17):
            got = torch.full((last - first, 2), float("nan"))
            recipe.fill("w", got, (first, 1))
            assert torch.equal(got, want[first:last, 1:])
    got = torch.empty(16)
    recipe.fill("b", got, (0,))
    assert got.tolist() == [*range(8), *[3.5] * 8]
    got = torch.empty(10, 3)
    recipe.fill("x", got, (0, 0))
    assert torch.equal(got, old), "what has no row for each token is as it was"


def trained(box, with_, implementation=None):
    """Losses and weights of three steps with new tokens."""
    asked = run(box, add_tokens=list(TOKENS), chat_template="chatml", implementation=implementation)
    job = assembled(asked.model_copy(update={"with_": {**asked.with_, **with_}}))
    first = weights(job)
    return [loss for loss, _, _ in steps(job, 3)], first, job.hf["vocab_size"]


@pytest.mark.parametrize("implementation", further([None, "transformers"], 1))
def test_two_ranks_have_the_same_rows(box, pair, implementation):
    losses, first, vocab = trained(box, {}, implementation)
    assert vocab == 128
    embedding = first["embedding.weight" if implementation is None else "model.embed_tokens.weight"]
    assert torch.equal(embedding[80:], embedding[:80].double().mean(0).float().expand(48, -1))
    for other, values, _ in pair(trained, box, {"fsdp": {}}, implementation):
        assert other == pytest.approx(losses, rel=1e-5)
        assert all(torch.equal(values[name], first[name]) for name in first)


@pytest.mark.parametrize("with_", [{"bf16": {}}, {"amp": {}}], ids=["bf16", "amp"])
def test_other_precisions(box, with_):
    losses, first, _ = trained(box, with_)
    want = first["embedding.weight"][:80].double().mean(0).float()
    torch.testing.assert_close(first["embedding.weight"][127].float(), want, rtol=1e-2, atol=1e-3)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("name", "implementation"),
    [("untied", None), ("tied", None), ("tied", "transformers")],
    ids=["untied", "tied", "transformers"],
)
def test_frozen_rows_are_refused(box, name, implementation):
    """Beside adapters new rows never learn, unless embedding and head are trained whole."""
    model = {"path": str(box / name), "implementation": implementation, "add_tokens": list(TOKENS)}
    asked = run(box, 'with.lora={"rank": 2}', chat_template="chatml", **model)
    with pytest.raises(NeedsError) as caught:
        assembled(asked)
    modules = "[embed_tokens, lm_head]"
    assert caught.value.asked == "`model.add_tokens: [<|im_start|>, <|im_end|>]`"
    assert "embed_tokens and lm_head frozen" in caught.value.found and f"save: {modules}" in caught.value.do
    job = assembled(run(box, f"with.lora={{rank: 2, save: {modules}}}", chat_template="chatml", **model))
    first = weights(job)
    list(steps(job, 2))
    embedding = next(n for n in first if "embed" in n)
    assert not torch.equal(weights(job)[embedding][80], first[embedding][80]), "the new row learns"
    assembled(run(box, 'with.lora={"rank": 2}', **{**model, "add_tokens": ["<end>"]}))  # nothing new
