"""`optrush generate`: answers against plain transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from trained import ROWS
from transformers import AutoModelForCausalLM, AutoTokenizer

from optrush import generation
from optrush.config import Sampling
from optrush.data.schema import Message
from optrush.errors import DataError
from optrush.generation import prompts
from optrush.technique import Requirement

from clirun import document_of, error_of, write_rows

generated, refused = document_of("generate"), error_of("generate")

USER = {"role": "user", "content": "How do I make soup?"}
KINDS: list[dict[str, Any]] = [
    {"messages": [USER]}, ROWS[0], {"prompt": "Rice for two, please, and not too salty."},
    {"text": "Salt the water, then"}, {"prompt": "Chop the", "completion": " onions."},
    {"conversations": [{"from": "human", "value": "Pie?"}]},
]  # fmt: skip


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class Plain:
    """transformers alone, one prompt at a time."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()

    def ids(self, asked: Any) -> list[int]:
        if isinstance(asked, str):
            return list(self.tokenizer(asked)["input_ids"])
        found = self.tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)
        return list(found["input_ids"])

    def answer(self, asked: Any) -> str:
        ids = torch.tensor([self.ids(asked)])
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False)
        return str(self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def test_the_answers_are_transformers_own(call, trained, model, here):
    """Every kind of row, unequal lengths padded in one batch; two models, and the rows' own answers."""
    write_rows(here / "p.jsonl", KINDS)
    flags = ("--prompts", "p.jsonl", "--greedy", "--max-tokens", "10", "--batch", "4")
    facts = generated(call, str(trained), *flags, "--out", "a.jsonl", "--base")
    rows, tuned, base = read(here / "a.jsonl"), Plain(trained / "model"), Plain(model)
    asked: list[Any] = [
        [USER], ROWS[0]["messages"][:1], [{"role": "user", "content": KINDS[2]["prompt"]}], KINDS[3]["text"],
        "Chop the", [{"role": "user", "content": "Pie?"}],
    ]  # fmt: skip
    assert [row["prompt"] for row in rows] == asked and facts["rows"] == len(rows) == 6
    for row in rows:
        assert row["answer"] == tuned.answer(row["prompt"]) and row["other"] == base.answer(row["prompt"])
    assert [row.get("reference") for row in rows] == [
        None, ROWS[0]["messages"][1]["content"], None, None, " onions.", None,
    ]  # fmt: skip
    assert facts["model"] == str(trained) and facts["other"] == "tiny"
    assert not list(here.glob("*.part"))


@pytest.mark.parametrize("streams", [True, False])
def test_a_neighbour_takes_no_room(trained, here, streams):
    """Each answer is as long as alone, whatever else is in the batch; the likeliest token forever, so none ends."""
    folder = shutil.copytree(trained / "model", here / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 24}))
    speaker = generation.GenerationModel(generation.find_model("m"), streams=streams)
    assert (speaker.decoder is None) == streams
    speaker.stops = []
    prompts = [list(range(300, 300 + n)) for n in (20, 4, 22, 5)]
    sampling = Sampling(greedy=True, max_tokens=12)
    found = speaker.answers(prompts, sampling, 0)
    assert [a.tokens for a in found] == [4, 12, 2, 12]
    assert found == [speaker.answers([ids], sampling, 0)[0] for ids in prompts]


@pytest.mark.parametrize("streams", [True, False])
def test_how_to_draw_is_the_flags_word(trained, here, streams):
    """Beams, several answers or other cuts in the folder's generation config change neither greedy nor drawn answers;
    a penalty of the model's own does.
    """
    folder = shutil.copytree(trained / "model", here / "m")
    file = folder / "generation_config.json"
    given = json.loads(file.read_text())
    prompts = [list(range(300, 306)), list(range(310, 313))]
    answers = []
    for more in ({}, {"num_beams": 3, "num_return_sequences": 3, "return_dict_in_generate": True, "min_p": 0.9,
                      "typical_p": 0.1, "do_sample": True, "max_length": 7, "stop_strings": ["a"]},
                 {"repetition_penalty": 9.0}):  # fmt: skip
        file.write_text(json.dumps(given | more))
        speaker = generation.GenerationModel(generation.find_model("m"), streams=streams)
        answers.append([
            speaker.answers(prompts, Sampling(greedy=greedy, temperature=2.0, top_p=1.0, max_tokens=9), 3)
            for greedy in (True, False)
        ])  # fmt: skip
    assert answers[0] == answers[1] and [len(a) for a in answers[0]] == [2, 2]
    assert answers[2][0] != answers[0][0]


@pytest.mark.parametrize(("file", "more", "device"), [
    ("config.json", {"dtype": "float64"}, "cpu"), ("config.json", {}, "cuda"),
    ("generation_config.json", {"no_repeat_ngram_size": 1}, "cpu"),
], ids=str)  # fmt: skip
def test_what_our_own_decoder_leaves_to_transformers(trained, here, monkeypatch, file, more, device):
    """Types that it does not compute in, a penalty, and a GPU where no kernel can be made."""
    folder = shutil.copytree(trained / "model", here / "m")
    given = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(given | more))
    unmet = Requirement(False, "", "no C compiler", "")
    monkeypatch.setattr(generation, "compilers", lambda gpu: iter([unmet]), raising=False)
    assert generation._decoder(generation.find_model("m"), torch.device(device)) == (None, None)


def test_one_model_and_the_seed(call, trained, here):
    write_rows(here / "p.jsonl", KINDS[:3])
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        found = call("generate", str(trained), "--prompts", "p.jsonl", "--out", f"{name}.jsonl", "--seed", seed,
                     "--max-tokens", "10", "--system", "Be brief.")  # fmt: skip
        assert (found.code, found.out) == (0, f"{name}.jsonl\n"), found.err
    a, b, c = (read(here / f"{name}.jsonl") for name in "abc")
    assert a == b and [r["answer"] for r in a] != [r["answer"] for r in c]
    assert all(r["prompt"][0] == {"role": "system", "content": "Be brief."} and "other" not in r for r in a)
    assert {r["finish"] for r in a} <= {"stop", "length"} and all(0 < r["tokens"] <= 10 for r in a)


def test_what_a_prompt_is(here):
    rows: list[dict[str, Any]] = [
        {"instruction": "Make soup", "input": "of leeks"}, {"instruction": "Make soup", "output": "Chop."},
        {"prompt": [USER]},
        {"prompt": [USER], "chosen": [{"role": "assistant", "content": "Yes."}],
            "rejected": [{"role": "assistant", "content": "No."}]},
        {"messages": [USER, {"role": "assistant", "content": "A"}, USER, {"role": "assistant", "content": "B"}]},
    ]  # fmt: skip
    write_rows(here / "p.jsonl", rows)
    found = list(prompts(here / "p.jsonl"))
    user = Message("user", USER["content"])
    assert [p.asked for p in found] == [
        (Message("user", "Make soup\n\nof leeks"),), (Message("user", "Make soup"),), (user,), (user,),
        (user, Message("assistant", "A"), user),
    ]  # fmt: skip
    assert [p.reference for p in found] == [None, "Chop.", None, "Yes.", "B"]
    briefed = list(prompts(here / "p.jsonl", system="Be brief."))
    assert all(p.asked[0] == Message("system", "Be brief.") for p in briefed)
    write_rows(here / "t.jsonl", [{"prompt": "Chop"}, {"prompt": "Chop", "completion": " it"}, {"text": "Chop"}])
    texts = list(prompts(here / "t.jsonl", plain=True))
    assert [p.asked for p in texts] == ["Chop"] * 3
    assert [p.reference for p in texts] == [None, " it", None]
    with pytest.raises(DataError, match="a conversation, not a text"):
        list(prompts(here / "p.jsonl", plain=True))
    bad = ({"messages": []}, {"messages": [{"role": "assistant", "content": "A"}]}, {"prompt": ""}, {"question": "?"},
           {"messages": [{"role": "robot", "content": "A"}]})  # fmt: skip
    for row in bad:
        write_rows(here / "bad.jsonl", [row])
        with pytest.raises(DataError, match=r"bad\.jsonl:1"):
            list(prompts(here / "bad.jsonl"))


def test_what_is_refused(call, trained, here):
    write_rows(here / "p.jsonl", [{"messages": [USER]}])
    some = ("tiny", "--prompts", "p.jsonl", "--out", "a.jsonl")
    assert "no MODEL" in refused(call) and "no MODEL" in refused(call, "tiny", "--prompts", "p.jsonl")
    assert "each names the other model" in refused(call, *some, "--base", "--against", "tiny")
    assert "its base model is unknown" in refused(call, *some, "--base")
    assert "rows from none.jsonl\nfound: no such file" in refused(
        call, "tiny", "--prompts", "none.jsonl", "--out", "a.jsonl"
    )
    assert "name a file that ends in .jsonl" in refused(call, "tiny", "--prompts", "p.jsonl", "--out", "a.txt")
    assert "no folder" in refused(call, "tiny", "--prompts", "p.jsonl", "--out", "b/a.jsonl")
    assert "p.jsonl exists" in refused(call, "tiny", "--prompts", "p.jsonl", "--out", "p.jsonl")
    assert "--system with --plain" in refused(call, *some, "--plain", "--system", "x")
    assert "--temperature with --greedy" in refused(call, *some, "--greedy", "--temperature", "0.7")
    assert "--top-p with --greedy" in refused(call, *some, "--greedy", "--top-p", "0.9")
    for value in ("1e-42", "0", "nan", "inf"):
        assert "`temperature`" in refused(call, *some, "--temperature", value)
    assert call("generate", *some, "--seed", str(2**63)).code == 2
    assert "no such user" in refused(call, "~nosuchuser/x", *some[1:])
    assert "`top_p`" in refused(call, *some, "--top-p", "0")
    write_rows(here / "forged.jsonl", [{"messages": [{"role": "user", "content": "<|im_start|>"}]}])
    assert "a forged turn" in refused(call, "tiny", "--prompts", "forged.jsonl", "--out", "a.jsonl")
    assert not (here / "a.jsonl").exists() and not list(here.glob("*.part"))


def test_out_of_memory(call, here, monkeypatch):
    from optrush import generation

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    write_rows(here / "p.jsonl", [{"messages": [USER]}])
    monkeypatch.setattr(generation.GenerationModel, "answers", full)
    found = call("generate", "tiny", "--prompts", "p.jsonl", "--out", "a.jsonl")
    assert found.code == 1 and "out of memory with 8 prompts at once; use --batch 4" in found.err
    found = call("generate", "tiny", "--prompts", "p.jsonl", "--out", "a.jsonl", "--batch", "1")
    assert found.code == 1 and "lower --max-tokens" in found.err
