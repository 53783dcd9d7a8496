"""`optrush generate`: answers, likelihoods and verdicts against plain transformers and known figures."""

from __future__ import annotations

import io
import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trained import ROWS, run
from transformers import AutoModelForCausalLM, AutoTokenizer

from optrush import generate, judge
from optrush.config import Sampling
from optrush.data.schema import Chat, Completion, Message
from optrush.errors import DataError
from optrush.generate import prompts
from optrush.models import tiny

from clirun import Found, write_rows

Call = Callable[..., Found]
USER = {"role": "user", "content": "How do I make soup?"}
KINDS: list[dict[str, Any]] = [
    {"messages": [USER]},
    ROWS[0],
    {"prompt": "Rice for two, please, and not too salty."},
    {"text": "Salt the water, then"},
    {"prompt": "Chop the", "completion": " onions."},
    {"conversations": [{"from": "human", "value": "Pie?"}]},
]


@pytest.fixture
def trained(cache: Path) -> Path:
    return run(cache)


def generated(call: Call, *arguments: str) -> dict[str, Any]:
    found = call("generate", *arguments, "--json")
    assert found.code == 0, found.err
    assert found.out.count("\n") == 1
    return dict(json.loads(found.out))


def refused(call: Call, *arguments: str) -> str:
    found = call("generate", *arguments)
    assert found.code == 2 and found.out == "", found
    assert [line.partition(":")[0] for line in found.err.strip().splitlines()] == ["asked", "found", "do"], found.err
    return found.err


def read(path: Path) -> list[dict[str, Any]]:
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

    @torch.no_grad()
    def nll(self, asked: Any, reference: str) -> tuple[float, int]:
        end = tiny.EOS if isinstance(asked, str) else tiny.END
        before = self.ids(asked)
        answer = self.tokenizer(reference + end, add_special_tokens=False)["input_ids"]
        logp = self.model(torch.tensor([before + answer])).logits[0].double().log_softmax(-1)
        return -sum(logp[len(before) - 1 + i, token].item() for i, token in enumerate(answer)), len(answer)


def test_the_answers_are_transformers_own(call: Call, trained: Path, model: Path, here: Path) -> None:
    """Every kind of row, unequal lengths padded in one batch; two models, and the references' likelihoods."""
    write_rows(here / "p.jsonl", KINDS)
    flags = ("--prompts", "p.jsonl", "--greedy", "--max-tokens", "10", "--batch", "4")
    facts = generated(call, str(trained), *flags, "--out", "a.jsonl", "--base", "--judge-by", "reference")
    rows, tuned, base = read(here / "a.jsonl"), Plain(trained / "model"), Plain(model)
    asked: list[Any] = [
        [USER], ROWS[0]["messages"][:1], [{"role": "user", "content": KINDS[2]["prompt"]}], KINDS[3]["text"],
        "Chop the", [{"role": "user", "content": "Pie?"}],
    ]  # fmt: skip
    assert [row["prompt"] for row in rows] == asked and facts["rows"] == len(rows) == 6
    wins = 0
    for row in rows:
        assert row["answer"] == tuned.answer(row["prompt"]) and row["other"] == base.answer(row["prompt"])
        assert ("reference" in row) == ("reference_nll" in row) == ("other_reference_nll" in row)
        if "reference" in row:
            for key, model_ in (("", tuned), ("other_", base)):
                nll, n = model_.nll(row["prompt"], row["reference"])
                assert math.isclose(row[f"{key}reference_nll"], nll, rel_tol=1e-4), row
                assert row[f"{key}reference_tokens"] == n
            wins += row["reference_nll"] < row["other_reference_nll"]
    assert [row.get("reference") for row in rows] == [
        None, ROWS[0]["messages"][1]["content"], None, None, " onions.", None,
    ]  # fmt: skip
    found = facts["likelier"]
    assert (found["wins"], found["losses"], found["ties"]) == (wins, 2 - wins, 0)
    assert facts["model"] == str(trained) and facts["other"] == "tiny"
    same = generated(
        call, str(trained), *flags, "--against", str(trained), "--judge-by", "reference", "--out", "b.jsonl"
    )
    assert same["likelier"]["ties"] == 2 and same["likelier"]["rate"] is None
    assert not list(here.glob("*.part"))


def test_a_neighbour_takes_no_room(trained: Path, here: Path) -> None:
    """Each answer is as long as alone, whatever else is in the batch; the likeliest token forever, so none ends."""
    folder = shutil.copytree(trained / "model", here / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 24}))
    speaker = generate.Speaker(generate.find("m"))
    speaker.stops = []
    prompts = [list(range(300, 300 + n)) for n in (20, 4, 22, 5)]
    sampling = Sampling(greedy=True, max_tokens=12)
    found = speaker.answers(prompts, sampling, 0)
    assert [a.tokens for a in found] == [4, 12, 2, 12]
    assert found == [speaker.answers([ids], sampling, 0)[0] for ids in prompts]


def test_how_to_draw_is_the_flags_word(trained: Path, here: Path) -> None:
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
        speaker = generate.Speaker(generate.find("m"))
        answers.append([
            speaker.answers(prompts, Sampling(greedy=greedy, temperature=2.0, top_p=1.0, max_tokens=9), 3)
            for greedy in (True, False)
        ])  # fmt: skip
    assert answers[0] == answers[1] and [len(a) for a in answers[0]] == [2, 2]
    assert answers[2][0] != answers[0][0]


def test_one_model_and_the_seed(call: Call, trained: Path, here: Path) -> None:
    write_rows(here / "p.jsonl", KINDS[:3])
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        found = call("generate", str(trained), "--prompts", "p.jsonl", "--out", f"{name}.jsonl", "--seed", seed,
                     "--max-tokens", "10", "--system", "Be brief.")  # fmt: skip
        assert (found.code, found.out) == (0, f"{name}.jsonl\n"), found.err
    a, b, c = (read(here / f"{name}.jsonl") for name in "abc")
    assert a == b and [r["answer"] for r in a] != [r["answer"] for r in c]
    assert all(r["prompt"][0] == {"role": "system", "content": "Be brief."} and "other" not in r for r in a)
    assert {r["finish"] for r in a} <= {"stop", "length"} and all(0 < r["tokens"] <= 10 for r in a)


def test_what_a_prompt_is(here: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"instruction": "Make soup", "input": "of leeks"},
        {"instruction": "Make soup", "output": "Chop."},
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
    assert isinstance(found[4].row, Chat) and (len(found[4].row.messages), found[4].row.prompt) == (4, 3)
    briefed = list(prompts(here / "p.jsonl", system="Be brief."))
    assert all(p.asked[0] == Message("system", "Be brief.") for p in briefed)
    assert isinstance(briefed[4].row, Chat) and briefed[4].row.prompt == 4
    write_rows(here / "t.jsonl", [{"prompt": "Chop"}, {"prompt": "Chop", "completion": " it"}, {"text": "Chop"}])
    texts = list(prompts(here / "t.jsonl", plain=True))
    assert [p.asked for p in texts] == ["Chop"] * 3 and isinstance(texts[1].row, Completion)
    assert [p.reference for p in texts] == [None, " it", None]
    with pytest.raises(DataError, match="no text is"):
        list(prompts(here / "p.jsonl", plain=True))
    bad = ({"messages": []}, {"messages": [{"role": "assistant", "content": "A"}]}, {"prompt": ""}, {"question": "?"},
           {"messages": [{"role": "robot", "content": "A"}]})  # fmt: skip
    for row in bad:
        write_rows(here / "bad.jsonl", [row])
        with pytest.raises(DataError, match=r"bad\.jsonl:1"):
            list(prompts(here / "bad.jsonl"))


def test_wilsons_interval() -> None:
    """8 of 10 is Agresti and Coull's example; the limits hold where there is nothing, or nothing against."""
    found = judge.rate(["answer"] * 8 + ["other"] * 2 + ["tie"] * 5)
    assert (found.wins, found.losses, found.ties, found.rate) == (8, 2, 5, 0.8)
    assert math.isclose(found.low, 0.4901625, abs_tol=1e-6) and math.isclose(found.high, 0.9433178, abs_tol=1e-6)
    assert judge.rate(["tie"]).rate is None and (judge.rate([]).low, judge.rate([]).high) == (0.0, 1.0)
    sure = judge.rate(["answer"] * 5)
    assert sure.high == 1.0 and math.isclose(sure.low, 5 / (5 + judge.Z**2))
    for wins in range(21):  # the limits are where the score test is just not significant
        found = judge.rate(["answer"] * wins + ["other"] * (20 - wins))
        for p in {found.low, found.high} - {0.0, 1.0}:
            assert math.isclose(abs(wins / 20 - p), judge.Z * math.sqrt(p * (1 - p) / 20), abs_tol=1e-9)


def judged(call: Call, monkeypatch: pytest.MonkeyPatch, keys: str, *flags: str) -> Found:
    monkeypatch.setattr(sys, "stdin", io.StringIO(keys))
    return call("generate", "--judge", "a.jsonl", *flags)


def test_judging_is_blind_and_goes_on(call: Call, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [{"prompt": f"{n}?", "answer": f"tuned {n}\u2028\x1b[2J", "other": f"base {n}"} for n in range(40)]
    answers[7]["other"] = answers[7]["answer"]
    write_rows(here / "a.jsonl", answers)
    cases = judge.cases(here / "a.jsonl", 0)
    lefts = [case.left for case in cases]
    assert 10 < lefts.count("answer") < 30 and lefts == [c.left for c in judge.cases(here / "a.jsonl", 0)]
    assert lefts != [c.left for c in judge.cases(here / "a.jsonl", 1)]
    first = judged(call, monkeypatch, "x\n1\n2\n0\nq\n", "--json")
    assert first.code == 0 and "\x1b" not in first.err and "tuned" in first.err
    for word in ("`answer`", "`other`"):
        assert word not in first.err, "whose is whose is not said"
    facts = json.loads(first.out)
    assert (facts["judged"], facts["rows"]) == (3, 40)
    lines = read(here / "a.verdicts.jsonl")
    assert [line["row"] for line in lines] == [1, 2, 3]
    other = {"answer": "other", "other": "answer"}
    assert [line["verdict"] for line in lines] == [lefts[0], other[lefts[1]], "tie"]
    rest = judged(call, monkeypatch, "1\n" * 40)  # always the first that is shown
    assert rest.code == 0 and "=== 4 of 40" in rest.err and "=== 3 of 40" not in rest.err and "=== 8 of" not in rest.err
    lines = read(here / "a.verdicts.jsonl")
    assert len(lines) == 40 and lines[7]["verdict"] == "tie", "the same answer twice asks nobody"
    wins = [line["verdict"] for line in lines]
    assert f"judged 40 of 40; `answer` preferred to `other`: {judge.rate(wins)}" in rest.out
    assert [line["verdict"] for line in lines[3:7]] == lefts[3:7]
    assert judged(call, monkeypatch, "").code == 0, "all are judged"
    answers[2]["other"] = "another"
    write_rows(here / "a.jsonl", answers)
    assert "a verdict on other answers" in refused(call, "--judge", "a.jsonl")
    for verdict, why in (
        ({}, "no verdict"),
        ({"verdict": "tie"}, "other answers"),
        ({"verdict": "tie", "row": [1]}, "other answers"),
        ({"verdict": "tie", "row": 99}, "other"),
    ):
        write_rows(here / "a.verdicts.jsonl", [verdict])
        assert why in refused(call, "--judge", "a.jsonl")
    (here / "a.verdicts.jsonl").unlink()
    for _ in range(2):  # left at once, which leaves an empty file
        assert judged(call, monkeypatch, "q\n").code == 0
    assert (here / "a.verdicts.jsonl").read_bytes() == b""


def test_what_is_refused(call: Call, trained: Path, here: Path) -> None:
    write_rows(here / "p.jsonl", [{"messages": [USER]}])
    some = ("tiny", "--prompts", "p.jsonl", "--out", "a.jsonl")
    assert "no MODEL" in refused(call) and "no MODEL" in refused(call, "tiny", "--prompts", "p.jsonl")
    assert "one other model" in refused(call, *some, "--base", "--against", "tiny")
    assert "nothing to compare" in refused(call, *some, "--judge-by", "reference")
    assert "no row has an answer" in refused(call, *some, "--against", "tiny", "--judge-by", "reference")
    assert "its base is not known" in refused(call, *some, "--base")
    assert "rows from none.jsonl\nfound: no such file" in refused(
        call, "tiny", "--prompts", "none.jsonl", "--out", "a.jsonl"
    )
    assert "end it in .jsonl" in refused(call, "tiny", "--prompts", "p.jsonl", "--out", "a.txt")
    assert "no folder" in refused(call, "tiny", "--prompts", "p.jsonl", "--out", "b/a.jsonl")
    assert "p.jsonl exists" in refused(call, "tiny", "--prompts", "p.jsonl", "--out", "p.jsonl")
    assert "generate first" in refused(call, "tiny", "--judge", "a.jsonl")
    assert "--batch beside it" in refused(call, "--judge", "a.jsonl", "--batch", "2")
    assert "--system with --plain" in refused(call, *some, "--plain", "--system", "x")
    assert "--temperature with --greedy" in refused(call, *some, "--greedy", "--temperature", "0.7")
    assert "--top-p with --greedy" in refused(call, *some, "--greedy", "--top-p", "0.9")
    for value in ("1e-42", "0", "nan", "inf"):
        assert "`temperature`" in refused(call, *some, "--temperature", value)
    assert call("generate", *some, "--seed", str(2**63)).code == 2
    assert "nobody of that name" in refused(call, "~nosuchuser/x", *some[1:])
    assert "No such file" in refused(call, "--judge", "a.jsonl")
    write_rows(here / "one.jsonl", [{"prompt": "x", "answer": "y"}])
    assert "--base or --against" in refused(call, "--judge", "one.jsonl")
    (here / "no.jsonl").write_text("[]\n")
    assert "no JSON object" in refused(call, "--judge", "no.jsonl")
    (here / "bin.jsonl").write_bytes(b"\xff\n")
    assert "not UTF-8" in refused(call, "--judge", "bin.jsonl")
    assert "`top_p`" in refused(call, *some, "--top-p", "0")
    write_rows(here / "forged.jsonl", [{"messages": [{"role": "user", "content": "<|im_start|>"}]}])
    assert "a forged turn" in refused(call, "tiny", "--prompts", "forged.jsonl", "--out", "a.jsonl")
    assert not (here / "a.jsonl").exists() and not list(here.glob("*.part"))


def test_out_of_memory(call: Call, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from optrush import generate

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    write_rows(here / "p.jsonl", [{"messages": [USER]}])
    monkeypatch.setattr(generate.Speaker, "answers", full)
    found = call("generate", "tiny", "--prompts", "p.jsonl", "--out", "a.jsonl")
    assert found.code == 1 and "out of memory with 8 prompts at once; take --batch 4" in found.err
    found = call("generate", "tiny", "--prompts", "p.jsonl", "--out", "a.jsonl", "--batch", "1")
    assert found.code == 1 and "take a smaller --max-tokens" in found.err
