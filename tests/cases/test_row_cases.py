"""Rows as other tools write them: each key is read, obeyed, refused or named, whatever the row's number or format."""

import csv
import gzip
import io
import json
import re
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from calls import call as call
from meshes import further
from optrush.config import parse_config
from optrush.data import chat_template, mask
from optrush.data.chat_template import Tokens
from optrush.data.dataset import read_sources
from optrush.data.packing import Packed, Padded
from optrush.data.readers import chunks, find_files, read_rows_or_errors
from optrush.data.sampler import Loading, Stream, stream_of
from optrush.data.schema import Chat, Completion, Message, Pair, RowLocation, RowRules, Text, parse_row
from optrush.data.tokenize import identity
from optrush.data.tokenizer import open_tokens
from optrush.decide import check_fields
from optrush.errors import ConfigError, DataError, UserError
from optrush.generation import GenerationModel, find_model
from optrush.models import tiny

WHERE = RowLocation(Path("rows.jsonl"), 7)
ASK, ANSWER = {"role": "user", "content": "A city in Norway?"}, {"role": "assistant", "content": "Oslo."}
U, A = Message("user", "A city in Norway?"), Message("assistant", "Oslo.")
TURNS = [ASK, ANSWER]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
VOCAB = 32768


def parsed(row: dict[str, Any], objective: str = "sft", columns: Any = (), roles: Any = ()) -> tuple[Any, set[str]]:
    """What a row means, and the keys that are noted."""
    noted: set[str] = set()
    rules = RowRules(objective, tuple(dict(columns).items()), tuple(dict(roles).items()))
    return parse_row(WHERE, row, rules, noted), noted


def refused(row: dict[str, Any], objective: str = "sft") -> DataError:
    with pytest.raises(DataError) as caught:
        parsed(row, objective)
    assert str(caught.value).count("\n") == 2 and str(WHERE) in caught.value.asked
    return caught.value


@pytest.fixture(scope="session")
def tiny_home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    tiny.write_tiny(home / "optrush" / "tiny-1")
    return home


@pytest.fixture(autouse=True)
def here(tmp_path, tiny_home, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tiny_home))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(before)


def lines(path: Path | str, rows: list[Any]) -> str:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config(tiny_home: Path, objective: str = "sft", **data: Any) -> Any:
    """A run on the tiny model; `seq` and `model` are its own keys."""
    model = {"path": str(data.pop("folder", tiny_home / "optrush" / "tiny-1")), **data.pop("model", {})}
    train = {"steps": 4} if data.get("stream") else {}
    run = {"model": model, "objective": objective, "batch": {"seq": data.pop("seq", 128), "tokens": 256}}
    run |= {"data": data, "output": "out", "train": train}
    return parse_config(yaml.safe_dump(run), "run.yaml")


def read(tiny_home: Path, objective: str = "sft", **data: Any) -> Any:
    """The sources of a run."""
    run = config(tiny_home, objective, **data)
    return read_sources(run, open_tokens(run, Path(run.model.path)), VOCAB)


def run_file(**changes: Any) -> str:
    run = {
        "model": "tiny", "objective": "sft", "data": {"path": "chat.jsonl"}, "batch": {"seq": 128, "tokens": 256},
        "train": {"epochs": 1, "log_every": 1}, "output": "out", "with": {"packing": {}}, **changes,
    }  # fmt: skip
    Path("run.yaml").write_text(yaml.safe_dump(run))
    return "run.yaml"


# --- a turn that another tool does not learn
@pytest.mark.parametrize("key", ["loss", "loss_weight", "loss_mask", "loss_scale", "training", "trainable", "weight"])
def test_a_turn_that_is_not_to_be_learnt_is_not(key):
    turns = [ASK, {**ANSWER, key: 0}, ASK, {**ANSWER, key: 1}]
    assert [turn.learnt for turn in parsed({"messages": turns})[0].messages] == [True, False, True, True]
    if key != "weight":
        turns = [ASK, {**ANSWER, key: False}, ASK, {**ANSWER, key: True}]
        assert [turn.learnt for turn in parsed({"messages": turns})[0].messages] == [True, False, True, True]
    said = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", key: 0}, *({"from": "gpt", "value": "c"},)]
    assert [turn.learnt for turn in parsed({"conversations": said})[0].messages] == [True, False, True]
    weighs = key in ("loss_weight", "loss_scale", "weight")
    for wrong in (*((-0.5, 1e-9, 1e-46) if weighs else (0.5,)), [0, 1], "no"):
        assert f"messages[1].{key} is" in refused({"messages": [ASK, {**ANSWER, key: wrong}]}).found


def test_a_key_that_is_null_in_every_turn_means_nothing():
    turns = [{**turn, "loss": None, "train": None, "mask": None, "id": None} for turn in TURNS]
    assert parsed({"messages": turns, "loss": None, "label": None, "weight": None}) == (Chat((U, A)), set())


@pytest.mark.parametrize(
    "key",
    ["mask", "masked", "turn_mask", "ignore", "ignore_loss", "no_loss", "skip", "loss_multiplier", "token_weights"],
)
def test_a_turns_key_that_may_say_what_is_learnt_is_refused(key):
    for value in (False, True, 0, 1, [0, 1]):
        error = refused({"messages": [ASK, {**ANSWER, key: value}]})
        assert f"messages[1] has '{key}'" in error.found and f"'messages[].{key}': ignore" in error.do
    columns = {f"messages[].{key}": "ignore"}
    assert parsed({"messages": [ASK, {**ANSWER, key: 1}]}, columns=columns)[0] == Chat((U, A))


def test_a_turns_metadata_is_only_named():
    for key, value in (("training_source", "web"), ("loss_note", "none"), ("skip_reason", ["a"]), ("mask", [])):
        found, noted = parsed({"messages": [ASK, {**ANSWER, key: value}]})
        assert found == Chat((U, A)) and noted == ({f"messages[].{key}"} if value else set())
        parts = [{"type": "text", "text": "Oslo.", key: value}]
        assert parsed({"messages": [ASK, {**ANSWER, "content": parts}]})[0] == Chat((U, A))
    for given in ("false", [[0, 5], [7, 9]], [{"start": 0, "end": 5}], 0.5):
        assert "has 'turn_mask'" in refused({"messages": [ASK, {**ANSWER, "turn_mask": given}]}).found


def test_a_turns_text_under_another_key_is_only_named():
    said = [{"from": "human", "value": "q?", "question": "q?"}, {"from": "gpt", "value": "a", "prompt": ["a", ""]}]
    noted = {"conversations[].question", "conversations[].prompt"}
    assert parsed({"conversations": said}) == (Chat((Message("user", "q?"), Message("assistant", "a"))), noted)
    for text in ("one\ntwo", '"quoted"'):
        turns = [{"role": "user", "content": [{"type": "text", "text": text}], "question": text}, ANSWER]
        assert parsed({"messages": turns})[1] == {"messages[].question"}
    said[0]["question"] = "another?"
    assert "conversations[0] has 'question'" in refused({"conversations": said}).found


def test_a_part_of_a_turn_that_is_not_to_be_learnt_is_refused():
    parts = [{"type": "text", "text": "Os"}, {"type": "text", "text": "lo.", "train": False}]
    assert "messages[1].content[1] has 'train'" in refused({"messages": [ASK, {**ANSWER, "content": parts}]}).found


@pytest.mark.parametrize(
    ("key", "value"),
    [("loss", False), ("loss", 0), ("loss_mask", [0, 1]), ("weight", 0.5), ("weight", "0"), ("train", False),
     ("sample_weight", 2.0), ("labels", [1, -100]), ("mask", 0), ("assistant_masks", [1])],
)  # fmt: skip
@pytest.mark.parametrize("row", [{"messages": TURNS}, {"instruction": "a", "output": "b"}, {"text": "a"}])
def test_how_much_a_row_is_learnt_is_refused(key, value, row):
    assert f"the row has '{key}'" in refused({**row, key: value}).found
    assert parsed({**row, key: 1})[1] == {key}  # changes nothing
    assert parsed({**row, key: value}, columns={key: "ignore"})[1] == {f"{key} -> ignore"}


# --- what precedes an answer under another key
@pytest.mark.parametrize(("row", "key", "line"), [
    ({"system_prompt": "Answer in French only.", "messages": TURNS}, "system_prompt", "system_prompt: system"),
    ({"system_message": "Be brief.", "conversations": TURNS}, "system_message", "system_message: system"),
    ({"instruction": "A city?", "context": "Oslo is in Norway.", "output": "Oslo."}, "context", "context: input"),
    ({"instruction": "A city?", "passage": "Oslo is.", "output": "Oslo."}, "passage", "passage: input"),
    ({"instruction": "A city?", "question": "Which one?", "output": "Oslo."}, "question", "question: input"),
    ({"instruction": "A?", "system_prompt": "Be brief.", "output": "b"}, "system_prompt", "system_prompt: system"),
    ({"prompt": "a", "completion": "b", "context": "c"}, "context", "context: ignore"),
    ({"messages": TURNS, "context": "Oslo is in Norway."}, "context", "context: ignore"),
    ({"messages": TURNS, "prompt": "Another question?"}, "prompt", "prompt: ignore"),
    ({"messages": TURNS, "documents": [{"title": "a", "text": "b"}]}, "documents", "documents: ignore"),
    ({"messages": TURNS, "reasoning": "Let me think."}, "reasoning", "reasoning: ignore"),
    ({"messages": TURNS, "enable_thinking": False}, "enable_thinking", "enable_thinking: ignore"),
    ({"messages": TURNS, "rejected_response": "A dog."}, "rejected_response", "rejected_response: ignore"),
    ({"question": "A city in Norway?", "chosen": "Oslo.", "rejected": "A dog."}, "question", "question: prompt"),
    ({"query": "A?", "chosen": "Oslo.", "rejected": "A."}, "query", "query: prompt"),
    ({"context": "A?", "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "b"}]}, "context", "context: prompt"),
])  # fmt: skip
def test_what_precedes_an_answer_is_never_dropped(row, key, line):
    objective = "dpo" if "chosen" in row else "sft"
    error = refused(row, objective)
    assert f"'{key}'" in error.found + error.do and "`data.columns: {" in error.do
    assert line in error.do
    columns = {key: line.split(": ")[1]}
    if columns[key] != "ignore":
        found = parsed(row, objective, columns)[0]
        assert row[key] in json.dumps([str(found)])


def test_the_prompt_of_a_pair_arrives():
    row = {"question": "A city in Norway?", "chosen": "Oslo.", "rejected": "A dog."}
    want = Pair(Completion("A city in Norway?", "Oslo."), Completion("A city in Norway?", "A dog."))
    assert parsed(row, "dpo", {"question": "prompt"}) == (want, {"question -> prompt"})


S = Message("system", "Be brief.")


def test_a_system_text_makes_turns_of_the_texts_after_it():
    row = {"system": "Be brief.", "question": U.content, "chosen": "Oslo.", "rejected": "A dog."}
    error = refused(row, "dpo")
    assert "'system' without 'prompt'" in error.found and "`data.columns: {question: prompt}`" in error.do
    assert "`data.columns: {system: ignore}`" in refused({"system": "", "chosen": "a b", "rejected": "a c"}, "dpo").do
    worse = Message("assistant", "A dog.")
    want = Pair(Chat((S, U, A), (), 2), Chat((S, U, worse), (), 2))
    assert parsed(row, "dpo", {"question": "prompt"}) == (want, {"question -> prompt"})
    for nothing in ("", None):  # the rows of one table are of one kind
        pair = Pair(Chat((U, A), (), 1), Chat((U, worse), (), 1))
        assert parsed({**row, "system": nothing}, "dpo", {"question": "prompt"})[0] == pair
        renamed = {"question": "prompt", "sys": "system"}
        row_of_sys = {**{key: row[key] for key in row if key != "system"}, "sys": nothing}
        assert parsed(row_of_sys, "dpo", renamed)[0] == pair
    plain = Pair(Completion(U.content, "Oslo."), Completion(U.content, "A dog."))
    assert parsed(row, "dpo", {"question": "prompt", "system": "ignore"})[0] == plain
    assert parsed({"system": "Be brief.", "prompt": U.content, "completion": "Oslo."})[0] == Chat((S, U, A), (), 2)
    assert parsed({"system": "Be brief.", "prompt": [ASK], "completion": [ANSWER]})[0] == Chat((S, U, A), (), 2)
    pair = {"system": "Be brief.", "chosen": TURNS, "rejected": [ASK, {**ANSWER, "content": "A dog."}]}
    assert parsed(pair, "dpo")[0] == want
    turn = {"role": "system", "content": "Be long."}
    for prompt, answer in (([turn, ASK], [ANSWER]), (U.content, [turn, *TURNS]), (None, [turn, *TURNS])):
        row = {"system": "Be brief.", "prompt": prompt, "chosen": answer, "rejected": [*answer[:-1], ASK]}
        assert "both 'system' and a system turn" in refused(row, "dpo").found


@pytest.mark.parametrize("system", ["system", "developer", "persona", "system_prompt"])
def test_the_question_is_the_prompt_and_not_the_system_text(system):
    for asking in ("question", "instruction", "query", "input"):
        row = {system: "Be brief.", "context": "By sea.", asking: U.content, "chosen": "Oslo.", "rejected": "A dog."}
        error, columns = refused(row, "dpo"), {asking: "prompt"}
        if asking != "instruction":  # which is read as the prompt
            assert f"`data.columns: {{{asking}: prompt}}`" in error.do
        with pytest.raises(DataError) as caught:
            parsed(row, "dpo", columns)
        assert "`data.columns: {context: ignore}`" in caught.value.do
        columns["context"] = "ignore"
        if system != "system":
            with pytest.raises(DataError) as caught:
                parsed(row, "dpo", columns)
            assert f"`data.columns: {{{system}: system}}`" in caught.value.do
            columns[system] = "system"
        assert parsed(row, "dpo", columns)[0].chosen == Chat((S, U, A), (), 2)
    row = {system: "Be brief.", "context": "By sea.", "question": U.content, "response": "Oslo."}
    mapping = yaml.safe_load(refused(row).do.split("`data.columns: ")[1].split("`")[0])
    assert parsed(row, columns=mapping)[0] == Chat((S, Message("user", f"{U.content}\n\nBy sea."), A))


def test_a_text_that_is_in_the_row_already_is_only_named():
    assert parsed({"messages": TURNS, "prompt": "A city in Norway?", "id": 3}) == (Chat((U, A)), {"prompt", "id"})
    assert parsed({"messages": TURNS, "prompt": [ASK], "context": " "}) == (Chat((U, A)), {"prompt", "context"})


def test_thoughts_and_context_of_a_turn_are_never_dropped():
    for key, value in (
        ("thought", "hm"), ("reasoning_details", [{"text": "hm"}]), ("context", "Norway"), ("cot", "hm"),
    ):  # fmt: skip
        assert f"messages[1] has '{key}'" in refused({"messages": [ASK, {**ANSWER, key: value}]}).found
    row = {"messages": [ASK, {**ANSWER, "thought": "hm"}]}
    found, _ = parsed(row, columns={"messages[].thought": "reasoning_content"})
    assert found.messages[1].reasoning == "hm"


def test_other_keys_are_named_once_a_row():
    turns = [{**ASK, "id": "u"}, {**ANSWER, "id": "a", "model": "m", "tool_calls": [{**CALL, "extra": 1}]}]
    assert parsed({"messages": turns, "source": "web", "empty": "", "score": 0})[1] == {
        "source", "score", "messages[].id", "messages[].model", "messages[].tool_calls[].extra"
    }  # fmt: skip
    call = {"function": {"name": "add", "parameters": {"a": 1}}}
    assert "'parameters' instead of 'arguments'" in refused({"messages": [ASK, {**ANSWER, "tool_calls": [call]}]}).found


# --- a judged answer
@pytest.mark.parametrize(("key", "value"), [("label", False), ("label", True), ("label", 0), ("label", "False"),
                                           ("kto_tag", True), ("desirable", False), ("Label", 1)])  # fmt: skip
def test_a_judged_answer_is_not_learnt_as_a_good_one(key, value):
    for row in ({"messages": TURNS}, {"conversations": TURNS}, {"instruction": "a", "output": "b"}):
        assert f"'{key}': a judged answer" in refused({**row, key: value}).found
    assert "a judged answer" in refused({"prompt": "a", "completion": "b", key: value}).found


def test_a_label_that_is_no_judgement_is_named():
    assert parsed({"messages": TURNS, "label": "geography"})[1] == {"label"}
    assert parsed({"text": "a", "label": 1})[1] == {"label"}


# --- several kinds in one row
def test_the_objective_tells_which_kind_is_meant():
    alpaca = {"instruction": "A city?", "input": "", "output": "Oslo.", "text": "Below is an instruction ... Oslo."}
    assert parsed(alpaca) == (Chat((Message("user", "A city?"), A)), {"text"})
    assert parsed(alpaca, "pretrain") == (Text(alpaca["text"]), {"instruction", "output"})
    worse = [ASK, {**ANSWER, "content": "A dog."}]
    ultra = {"prompt": ASK["content"], "messages": TURNS, "chosen": TURNS, "rejected": worse, "score_chosen": 8.5}
    assert parsed(ultra) == (Chat((U, A)), {"prompt", "chosen", "rejected", "score_chosen"})
    pair, noted = parsed(ultra, "dpo")
    assert isinstance(pair, Pair) and pair.rejected.messages[-1].content == "A dog."
    assert noted == {"messages", "score_chosen"}
    for row in ({**ultra, "messages": [*TURNS, ASK]}, {"messages": TURNS, "instruction": "a", "output": "b"}):
        assert ": ambiguous" in refused(row).found
    assert "ignore" in refused({"messages": TURNS, "instruction": "a", "output": "b"}).do
    other = {"messages": [ASK, {**ANSWER, "content": "Bergen."}], "chosen": TURNS, "rejected": worse}
    assert "{messages: ignore}" in refused(other, "dpo").do, "a pair loses no answer"
    asked = {"messages": [ASK], "chosen": "Oslo.", "rejected": "A dog."}
    assert "{messages: prompt}" in refused(asked, "dpo").do, "nor its prompt"
    assert "{messages: prompt}" in refused({"messages": [ASK], "rejected": "A dog."}, "dpo").do


@pytest.mark.parametrize("objective", ["", "dpo", "orpo"])
@pytest.mark.parametrize("key", ["conversations", "messages"])
def test_a_conversation_without_an_answer_is_the_prompt_of_a_pair(key, objective):
    ask, yes, no = (
        {"from": "human", "value": ASK["content"]}, {**ANSWER, "content": "yes"}, {"from": "gpt", "value": "no"},
    )  # fmt: skip
    pair = Pair(*(Chat((U, Message("assistant", text)), prompt=1) for text in ("yes", "no")))
    assert parsed({key: [ask], "chosen": yes, "rejected": no}, objective) == (pair, set())
    assert parsed({key: [ask], "chosen": [yes], "rejected": no}, objective) == (pair, set())
    assert parsed({key: json.dumps([ask]), "chosen": yes, "rejected": no}, objective) == (pair, set())
    both = refused({key: [ask], "prompt": "b", "chosen": yes, "rejected": no}, objective).found
    assert ": ambiguous" in both
    named = {f"{key}[].by": "role", "chosen[].by": "role", "rejected[].by": "role"}
    turns: list[dict[str, Any]] = [{"by": by, "content": text} for by, text in (("me", U.content), ("it", "yes"))]
    row = {key: turns[:1], "chosen": turns[1], "rejected": {**turns[1], "content": "no"}}
    assert parsed(row, objective, named, {"me": "user", "it": "assistant"})[0] == pair


@pytest.mark.parametrize(("row", "line", "want"), [
    ({"question": "a", "answer": "b"}, "{question: instruction, answer: output}", ("a", "b")),
    ({"prompt": "a", "response": "b"}, "{prompt: instruction, response: output}", ("a", "b")),
    ({"query": "a", "response": "b", "id": 1}, "{query: instruction, response: output}", ("a", "b")),
    ({"Question": "a", "Answer": "b"}, "{Question: instruction, Answer: output}", ("a", "b")),
    ({"input": "a", "output": "b"}, "{input: instruction}", ("a", "b")),
    ({
        "instruction": "a", "context": "c", "response": "b", "category": "qa",
    }, "{response: output, context: input}", ("a\n\nc", "b")),
])  # fmt: skip
@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_the_line_that_maps_unknown_keys_works(row, line, want, suffix, tiny_home):
    path = f"rows{suffix}"
    if suffix == ".jsonl":
        lines(path, [row] * 3)
    elif suffix == ".csv":
        with open(path, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerows([list(row), *[list(row.values())] * 3])
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * 3), path)
    with pytest.raises(DataError) as caught:
        read(tiny_home, path=path)
    mapping = caught.value.do.split("`data.columns: ")[1].split("`")[0]
    assert mapping == line
    found, _ = parsed(row, columns=yaml.safe_load(line))
    assert [turn.content for turn in found.messages] == list(want)
    sources = read(tiny_home, path=path, columns=yaml.safe_load(line))
    assert len(sources.train) == 3 and "by data.columns" in sources.summary


def test_a_column_that_no_row_has_is_refused(tiny_home):
    lines("rows.jsonl", [{"messages": TURNS, "source": "web"}] * 3)
    with pytest.raises(DataError) as caught:
        read(tiny_home, path="rows.jsonl", columns={"sorce": "ignore"})
    assert caught.value.found == "no row has 'sorce'; unread keys: 'source'"
    lines("late.jsonl", [{"messages": TURNS}] * 250 + [{"messages": TURNS, "mask": 1}])
    assert "'mask -> ignore' (1)" in read(tiny_home, path="late.jsonl", columns={"mask": "ignore"}).summary


def test_roles_of_single_families_and_others_by_one_line():
    for asking, answering in (("human", "gpt"), ("user", "model"), ("human", "assistant")):
        turns = [{"role": asking, "content": U.content}, {"role": answering, "content": A.content}]
        assert parsed({"messages": turns})[0] == Chat((U, A))
    result = {"role": "function", "name": "add", "content": "2"}
    turns = [ASK, {"role": "assistant", "tool_calls": [CALL]}, result, ANSWER]
    assert parsed({"messages": turns})[0].messages[2] == Message("tool", "2", name="add")
    turns = [ASK, {"role": "ai", "content": "Oslo."}]
    assert "`data.roles: {ai: assistant}`" in refused({"messages": turns}).do
    assert parsed({"messages": turns}, roles={"ai": "assistant"})[0] == Chat((U, A))
    turns = [{"speaker": "user", "text": U.content}, {"speaker": "assistant", "text": A.content}]
    assert "'messages[].speaker': role" in refused({"messages": turns}).do
    columns = {"messages[].speaker": "role", "messages[].text": "content"}
    assert parsed({"messages": turns}, columns=columns)[0] == Chat((U, A))


@pytest.mark.parametrize("as_text", [False, True])
def test_keys_of_turns_are_renamed_in_a_renamed_list(as_text):
    turns: Any = [{"speaker": "user", "content": U.content}, {"speaker": "assistant", "content": A.content}]
    columns = {"messages[].speaker": "role", "dialog": "messages"}
    row = {"dialog": json.dumps(turns) if as_text else turns}
    want = {"dialog -> messages", "messages[].speaker -> role"}
    for ordered in (columns, dict(reversed(columns.items()))):
        assert parsed(row, columns=ordered) == (Chat((U, A)), want)
    assert "'messages[].speaker': role" in str(refused({"messages": turns}).do)


def test_turns_as_json_text():
    assert parsed({"messages": json.dumps(TURNS)})[0] == Chat((U, A))
    assert parsed({"conversations": json.dumps(TURNS)})[0] == Chat((U, A))
    worse = json.dumps([ASK, {**ANSWER, "content": "A dog."}])
    assert isinstance(parsed({"chosen": json.dumps(TURNS), "rejected": worse}, "dpo")[0].chosen, Chat)
    row = {"prompt": json.dumps([ASK]), "chosen": json.dumps([ANSWER]), "rejected": json.dumps(TURNS[1:] * 2)}
    assert parsed(row, "dpo")[0].chosen == Chat((U, A), (), 1)
    assert parsed({"prompt": json.dumps([ASK]), "completion": [ANSWER]})[0] == Chat((U, A), (), 1)
    assert "is not JSON" in refused({"messages": str(TURNS)}).found
    assert "is not JSON" in refused({"chosen": str(TURNS), "rejected": str(TURNS[:1])}, "dpo").found

    assert "is not JSON" in refused({"chosen": json.dumps(TURNS)[:-9], "rejected": json.dumps(TURNS)}, "dpo").found
    assert refused({"messages": "hello"}).found == "messages is a string, not a list"


LISTS = ['[{"value": 3, "unit": "kg"}]', '[{"content": "a"}]', '[{"role": "admin"}]', '[{"from": "Oslo"}, 2]', "[1]",
         "[]", '[{"value": 3, "unit"', "[{'value': 3}]", '[{"role": "user", "content": "a"}, {"b": 1}]']  # fmt: skip


@pytest.mark.parametrize("text", LISTS)
def test_a_text_that_holds_another_list_is_a_text(text):
    assert parsed({"prompt": "Extract", "completion": text})[0] == Completion("Extract", text)
    assert parsed({"prompt": text, "completion": "b"})[0] == Completion(text, "b")
    assert parsed({"messages": [ASK, {**ANSWER, "content": text}]})[0].messages[1].content == text
    both = parsed({"prompt": text, "chosen": text, "rejected": "b"}, "dpo")[0]
    assert both == Pair(Completion(text, text), Completion(text, "b"))
    assert parsed({"prompt": "a", "chosen": "b", "rejected": text}, "dpo")[0].rejected == Completion("a", text)


def test_a_completion_is_never_turns_as_text():
    text = json.dumps(TURNS)
    assert parsed({"prompt": "Invent a chat.", "completion": text})[0] == Completion("Invent a chat.", text)
    assert parsed({"prompt": "a", "chosen": text, "rejected": "b"}, "dpo")[0].chosen == Completion("a", text)


# --- calls without content
@pytest.mark.parametrize("turn", [{"role": "assistant", "tool_calls": [CALL]}, {"role": "assistant", "content": None,
                         "tool_calls": [CALL]}, {"from": "gpt", "tool_calls": [CALL]}])  # fmt: skip
def test_a_call_without_content_is_an_empty_content(turn):
    found = parsed({"messages": [ASK, turn]})[0]
    assert found.messages[1].shown() == {"role": "assistant", "content": "", "tool_calls": [CALL]}


def test_a_call_that_is_a_turns_content_is_a_call():
    turns = [ASK, {"role": "function_call", "content": json.dumps(CALL["function"])}, {"role": "tool", "content": "2"}]
    assert parsed({"messages": [*turns, ANSWER]})[0].messages[1] == Message("assistant", "", calls=(CALL,))
    turns[1] = {"role": "function_call", "content": "add(1)"}
    assert "messages[1].content: not valid JSON" in refused({"messages": [*turns, ANSWER]}).found


# --- what the run names
def test_keys_that_are_not_read_are_named_with_how_many_rows_have_them(call, tiny_home):
    rows = [{"messages": TURNS, "source": "web"} for _ in range(240)]
    rows[230]["late"] = 1
    lines("chat.jsonl", rows)
    run_file(train={"steps": 1})
    code, out, err = call("train", "run.yaml", "--dry-run")
    assert code == 0 and "unread keys in the 240 rows: 'source' (240), 'late' (1)" in out, err
    code, out, err = call("train", "run.yaml")
    assert code == 0 and "unread keys in the 240 rows: 'source' (240), 'late' (1)" in out + err
    held = lines("held.jsonl", [{"messages": [ASK, {**ANSWER, "content": "Bergen."}], "judge": "x"}])
    assert "'judge' (1)" in read(tiny_home, path="chat.jsonl", eval=held).summary


# --- streamed rows are held to the same limits
def streamed(sources: Any, steps: int = 40) -> tuple[Stream, list[str], Iterator[Any]]:
    """A stream's steps as a run reads them, and the lines that it reports."""
    stream, lines = stream_of(sources.train, Packed(window=50), T=64, rows=4, seed=0), list[str]()
    stream.report = lines.append
    batches = stream.run(stream.plan(steps=steps), 0, rank=0, ranks=1, micro_rows=4, loading=Loading())
    return stream, lines, batches


def test_cut_rows_of_a_stream_are_counted_and_refused_as_without_it(tiny_home):
    short, long = {"text": "soup " * 5}, {"text": "soup " * 100}
    lines("late.jsonl", [short] * 210 + [long] * 100)
    for stream in (False, True):
        with pytest.raises(DataError) as caught:  # noqa: PT012 - of the data, or of the stream
            sources = read(tiny_home, "pretrain", path="late.jsonl", stream=stream, seq=64, too_long="truncate")
            list(streamed(sources)[2])
        assert caught.value.asked == "at most 10.0% of the rows without their end (data.most_truncated)"
        assert "100 of 310 rows (32.3%)" in caught.value.found
    sources = read(
        tiny_home, "pretrain", path="late.jsonl", stream=True, seq=64, too_long="truncate", most_truncated=0.5
    )
    _, reported, batches = streamed(sources)
    assert len(list(batches)) == 40
    assert reported and "310 rows read: 100 too long, 100 truncated" in reported[0]


def test_keys_of_a_stream_are_named_when_they_appear(tiny_home):
    lines("late.jsonl", [{"text": "soup", "id": i} for i in range(250)] + [{"text": "stew", "late": 1}])
    sources = read(tiny_home, "pretrain", path="late.jsonl", stream=True)
    assert "unread keys in the first 200 rows: 'id' (200)" in sources.summary
    _, reported, batches = streamed(sources)
    assert len(list(batches)) == 40
    assert reported[0].startswith("unread keys: 'late'") and "'id' (250), 'late' (1)" in reported[1]


# --- held-out data that is trained on


SAME_FILE = ("same", "./same", "link", "copy", "glob", "folder", "list")
SAME_ROWS = ("other format", "part")  # not of a stream: its documents are not known before they are trained on


@pytest.mark.parametrize(
    ("how", "stream"), [*((how, True) for how in SAME_FILE), *((how, False) for how in (*SAME_FILE, *SAME_ROWS))]
)
def test_held_out_data_that_is_trained_on_is_refused(how, stream, here, tiny_home):
    rows = [{"messages": [ASK, {**ANSWER, "content": f"Oslo {i}."}]} for i in range(12)]
    (here / "data").mkdir()
    path: Any = lines(here / "data" / "t.jsonl", rows)
    held = {"same": path, "./same": f"{here}/./data/../data/t.jsonl", "link": "l.jsonl", "copy": "copy.jsonl"}.get(how)
    if how == "link":
        Path("l.jsonl").symlink_to(path)
    elif how == "copy":
        lines("copy.jsonl", rows)
    elif how in ("glob", "folder", "list"):
        held, path = (
            path,
            {"glob": "data/*.jsonl", "folder": "data", "list": [path, lines("other.jsonl", rows[:1])]}[how],
        )
    elif how == "other format":
        Path(held := "t.json").write_text(json.dumps(rows))
    elif how == "part":
        held = lines("part.jsonl", rows[3:6])
    with pytest.raises(DataError) as caught:
        read(tiny_home, path=path, eval=held, stream=stream)
    assert f"`data.eval: {held}`" == caught.value.asked and "memorisation" in caught.value.found


def test_held_out_rows_that_are_trained_on_are_counted(tiny_home):
    rows = [{"messages": [ASK, {**ANSWER, "content": f"Oslo {i}."}]} for i in range(12)]
    lines("t.jsonl", rows[:10])
    assert "(of 4 rows: 2 also trained on)" in read(tiny_home, path="t.jsonl", eval=lines("e.jsonl", rows[8:])).summary
    lines("twice.jsonl", rows[:2] * 20)
    assert "also trained on" in read(tiny_home, path="twice.jsonl", eval=0.25).summary
    assert "also trained on" not in read(tiny_home, path="t.jsonl", eval=0.3).summary


# --- the splits of a data set
@pytest.mark.parametrize(("names", "held"), [
    (["train.jsonl", "test.jsonl", "validation.jsonl"], "test.jsonl, validation.jsonl"),
    (["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "test-00000-of-00001.jsonl"], "test-00000-of"),
    (["data/train/0.jsonl", "data/test/0.jsonl"], "0.jsonl"), (["train_sft.jsonl", "test_sft.jsonl"], "test_sft.jsonl"),
    (["rows.jsonl", "rows.dev.jsonl"], "rows.dev.jsonl"), (["a.train.csv", "a.val.csv"], "a.val.csv"),
    (["train.txt", "eval.txt"], "eval.txt"),
    (["rows.jsonl", "test-1.jsonl.gz", "test_00002-of-00002.jsonl.gz"], "test-1.jsonl.gz"),
    (["data/rows/0.jsonl", "data/test/0.jsonl"], "0.jsonl"),
])  # fmt: skip
@pytest.mark.parametrize("how", ["ds", "ds/**/*.*"])
def test_a_held_out_split_is_not_trained_on(names, held, how, here):
    for name in names:
        (here / "ds" / name).parent.mkdir(parents=True, exist_ok=True)
        (here / "ds" / name).write_text("a\n")
    with pytest.raises(DataError) as caught:
        find_files(how)
    assert held in caught.value.found and "train" not in caught.value.found.replace("trained", "")
    assert caught.value.do.endswith("; or list all files to use all")
    line = yaml.safe_load(re.split("; |, and data.eval", caught.value.do.split("data.path: ")[1])[0])
    wanted = line if isinstance(line, list) else [line]
    assert [file for path in wanted for file in find_files(path)] and not any("test" in path for path in wanted)


@pytest.mark.parametrize(
    "names",
    [["a.jsonl", "b.jsonl"], ["test/1.jsonl", "test/2.jsonl"], ["intro.md", "test.md"], ["contest.csv", "latest.csv"],
     ["train-1.jsonl", "train-2.jsonl"], ["train_test.jsonl", "train.jsonl"],
     ["dev-docs.jsonl", "ops-docs.jsonl", "hr-docs.jsonl"],
     ["test_results.csv", "sales.csv"], ["dev-docs/a.jsonl", "hr-docs/a.jsonl"], ["a-test.parquet", "b.parquet"]],
)  # fmt: skip
def test_other_names_are_one_corpus(names, here):
    for name in names:
        (here / "ds" / name).parent.mkdir(parents=True, exist_ok=True)
        (here / "ds" / name).write_text("a\n")
    assert len(find_files("ds")) == len(names)
    assert len(find_files(f"ds/{names[0]}")) == 1


# --- marks and line ends that editors write

BOM = "\ufeff"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n", "\r\n \r\n\n", ""])
def test_rows_are_read_as_without_marks_and_blank_lines_at_the_end(end, stream, tiny_home):
    rows = [json.dumps({"text": f"soup {i}"}) for i in range(6)]
    Path("plain.jsonl").write_text("\n".join(rows))
    Path("marked.jsonl").write_bytes((BOM + end[:2].join(rows) + end).encode() if end in ("\n", "\r\n") else (
        BOM + "\n".join(rows) + end).encode())  # fmt: skip
    plain, marked = (read(tiny_home, "pretrain", path=f"{name}.jsonl", stream=stream) for name in ("plain", "marked"))
    assert len(marked.train) == len(plain.train) == 6
    for one in range(6):
        (_, ours), (_, theirs) = (source.train.read([one]).samples[0] for source in (marked, plain))
        assert ours[0].ids.tolist() == theirs[0].ids.tolist()
    parts = list(chunks(Path("marked.jsonl"), 10))
    found = [row for part in parts for _, row in read_rows_or_errors(part)]
    assert found == [json.loads(row) for row in rows]


def test_other_formats_are_read_as_without_marks_and_carriage_returns(tiny_home):
    text = "one\r\ntwo\r\n\r\nthree\r\n"
    for mark in ("", BOM):
        Path("a.txt").write_bytes((mark + text).encode())
        assert [row for _, row in read_rows_or_errors(Path("a.txt"))] == [{"text": "one\ntwo\n\nthree\n"}]
        assert [row for _, row in read_rows_or_errors(Path("a.txt"), "paragraph")] == [
            {"text": "one\ntwo"},
            {"text": "three"},
        ]
        assert [row["text"] for _, row in read_rows_or_errors(Path("a.txt"), "line")] == ["one", "two", "three"]
        Path("a.csv").write_bytes(f'{mark}text,n\r\n"one\r\ntwo",1\r\nthree,2\r\n\r\n\r\n'.encode())
        assert [row for _, row in read_rows_or_errors(Path("a.csv"))] == [
            {"text": "one\ntwo", "n": "1"},
            {"text": "three", "n": "2"},
        ]
        Path("a.json").write_bytes(f'{mark}[{{"text": "one"}}]\r\n'.encode())
        assert [row for _, row in read_rows_or_errors(Path("a.json"))] == [{"text": "one"}]
        Path("a.jsonl.gz").write_bytes(gzip.compress(f'{mark}{{"text": "one"}}\r\n\r\n'.encode()))
        assert [row for _, row in read_rows_or_errors(Path("a.jsonl.gz"))] == [{"text": "one"}]


def test_a_template_is_read_as_without_a_mark(tiny_home):
    lines("chat.jsonl", [{"messages": TURNS}] * 3)
    Path("t.jinja").write_bytes((BOM + tiny.TEMPLATE.replace("\n", "\r\n")).encode())
    plain = read(tiny_home, path="chat.jsonl").train
    marked = read(tiny_home, path="chat.jsonl", model={"chat_template": "t.jinja"}).train
    assert marked.documents(0)[0].ids.tolist() == plain.documents(0)[0].ids.tolist()
    run = config(tiny_home, path="chat.jsonl", model={"chat_template": "t.jinja"})
    tokens = open_tokens(run, Path(run.model.path))
    assert tokens is not None and not {BOM, "\r"} & set(tokens.tokenizer.chat_template)


# --- what is refused in the first rows is refused in any

# As Qwen3's: thoughts are written after the last question only.
STRIPPING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if '</think>' in m.content and not loop.last %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if loop.last and m.role == 'assistant' and "
    "'deep' in messages[0].content %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
)
THOUGHT = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nOslo."}


@pytest.mark.parametrize("stream", [False, True])
def test_a_template_that_changes_earlier_turns_is_refused_in_any_row(stream, tiny_home):
    Path("t.jinja").write_text(THINKING)
    rows = [{"messages": [*TURNS, *TURNS]}] * 230 + [
        {"messages": [{**ASK, "content": "Think deep."}, *TURNS[1:], *TURNS]}
    ]
    lines("late.jsonl", rows)
    settings: dict[str, Any] = {"path": "late.jsonl", "model": {"chat_template": "t.jinja"}, "stream": stream}
    with pytest.raises(DataError) as caught:
        list(streamed(read(tiny_home, **settings))[2])
    assert "late.jsonl:231" in caught.value.asked and "later turns change" in caught.value.found
    assert "data.split_turns: true" in caught.value.do


def test_two_begin_of_text_tokens_are_refused_in_any_row(tiny_home):
    lines("late.jsonl", [{"text": "soup"}] * 230 + [{"text": "<|bos|>soup"}])
    with pytest.raises(DataError) as caught:
        read(tiny_home, "pretrain", path="late.jsonl")
    assert "late.jsonl:231" in caught.value.found and "one <|bos|>" in caught.value.asked


# --- one document an answer
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("layout", [Packed(window=50), Padded()])
def test_each_answer_is_learnt_as_it_would_be_asked_for(stream, layout, tiny_home):
    Path("t.jinja").write_text(STRIPPING)
    talk = [ASK, THOUGHT, ASK, {**THOUGHT, "content": "<think>\nSo.\n</think>\n\nBergen."}]
    lines("chat.jsonl", [{"messages": talk}, {"messages": TURNS}, {"messages": [ASK, {**ANSWER, "loss": 0}, *TURNS]}])
    settings: dict[str, Any] = {"path": "chat.jsonl", "model": {"chat_template": "t.jinja"}, "split_turns": True}
    run = config(tiny_home, **settings)
    tokens = open_tokens(run, Path(run.model.path))
    assert tokens is not None
    want = []
    for turns in (talk[:2], talk, TURNS, [ASK, ANSWER, *TURNS]):
        parts = tokens.tokenizer.apply_chat_template(turns[:-1], tokenize=False, add_generation_prompt=True)
        whole = tokens.tokenizer.apply_chat_template(turns, tokenize=False)
        asked = tokens.tokenizer(parts, add_special_tokens=False)["input_ids"]
        ids = tokens.tokenizer(whole, add_special_tokens=False)["input_ids"]
        assert ids[: len(asked)] == asked, "the prompt is what generation would get"
        want.append((tuple(ids), len(asked)))
    source = read(tiny_home, stream=stream, **settings).train
    found = [d for _, documents in source.read(range(3)).samples for d in documents] if stream else [
        source.documents(i)[0] for i in range(len(source))]  # fmt: skip
    assert [(tuple(d.ids.tolist()), int(d.targets.argmax())) for d in found] == want
    steps = stream_of(source, layout, T=128, rows=2, seed=0)
    trained: Counter[int] = Counter()
    for batches in steps.run(steps.plan(steps=2), 0, rank=0, ranks=1, micro_rows=2, loading=Loading()):
        trained.update(b.n_targets for b in batches)
    assert trained
    held = read(tiny_home, **{**settings, "eval": 0.34})
    assert len(held.train) + len(held.held_out) == 4 and held.held_out.counts.rows == 1


def test_one_document_an_answer_is_for_answers(tiny_home):
    for objective, more in (("dpo", {}), ("pretrain", {}), ("sft", {"train_on": "last"})):
        with pytest.raises(ConfigError, match=r"data\.split_turns"):
            check_fields(config(tiny_home, objective, path="a.jsonl", split_turns=True, **more))


# --- a template that takes too much

MONSTERS = {
    "product": "{{ 'a' * 10**10 }}", "product of lists": "{{ [1] * 10**9 }}", "power": "{{ 10**(10**10) }}",
    "loops": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "string": "{% set n = namespace(s='aa') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "list": "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "tilde": "{% set n = namespace(s='aa') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "square": "{% set n = namespace(s=7) %}{% for i in range(60) %}{% set n.s = n.s * n.s %}{% endfor %}",
    "center": "{{ 'a'.center(10**10) }}", "filter": "{{ 'a' | center(3000000000) }}",
    "width": "{{ '%9999999999d' % 1 }}", "format": "{{ '{:9999999999}'.format(1) }}",
    "huge error": "{{ raise_exception('a\n' * 10**6) }}",
}  # fmt: skip


@pytest.mark.parametrize("monster", MONSTERS)
def test_a_monstrous_template_is_refused_soon(monster, tiny_home, monkeypatch):
    monkeypatch.setattr(mask.LIMITS, "seconds", 1)
    monkeypatch.setattr(mask.LIMITS, "memory_bytes", 256 << 20)
    Path("t.jinja").write_text(MONSTERS[monster] + tiny.TEMPLATE)
    lines("chat.jsonl", [{"messages": TURNS}] * 30)
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(UserError) as caught:
        read(tiny_home, path="chat.jsonl", model={"chat_template": "t.jinja"})
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    assert "chat template" in caught.value.found and str(caught.value).count("\n") == 2
    assert len(str(caught.value)) < 1000 and "model.chat_template" in caught.value.do


def test_a_stop_of_the_process_is_no_fault_of_a_template(monkeypatch):
    """Time that passes without the processor, as after Ctrl-Z, is not counted."""
    monkeypatch.setattr(mask.LIMITS, "seconds", 0.2)
    with mask.LIMITS:
        time.sleep(0.5)
    with pytest.raises(ConfigError, match="of CPU time"), mask.LIMITS:
        all(True for _ in range(10**9))


@pytest.mark.parametrize("row", [
    {"text": "Stir the soup. " * 20}, {"prompt": "Soup?", "completion": " é" * 150},
    {"messages": [{"role": "user", "content": "Soup? " * 60}, {"role": "assistant", "content": "Stir."}]},
    {"messages": [{"role": "user", "content": "Soup?"}, {"role": "assistant", "content": "汤" * 120}]},
    {"prompt": "Soup?", "chosen": "Stir. " * 60, "rejected": "No."},
])  # fmt: skip
def test_a_huge_row_is_a_bad_one(row, tiny_home, monkeypatch):
    monkeypatch.setattr(chat_template, "LONGEST_TEXT_bytes", 256)
    tokens = Tokens(AutoTokenizer.from_pretrained(tiny_home / "optrush" / "tiny-1"))
    small = {"messages": TURNS} if "messages" in row else {"text": "Stir."}
    where = [RowLocation(Path("x"), n) for n in range(3)]
    rows = [parse_row(place, one) for place, one in zip(where, (small, row, small))]
    first, error, last = tokens.batch(list(zip(where, rows)), "assistant")
    assert isinstance(error, DataError) and "x:1" in error.asked and "the limit for one row" in error.found
    assert not isinstance(first, DataError) and not isinstance(last, DataError)


@pytest.mark.parametrize(("turns", "says"), [(10_002, "10,002 turns"), (4002, "2001 answers to compare")])
def test_a_conversation_without_end_is_a_bad_row(turns, says, tiny_home):
    tokens = Tokens(AutoTokenizer.from_pretrained(tiny_home / "optrush" / "tiny-1"))
    where = RowLocation(Path("x"), 1)
    with pytest.raises(DataError) as caught:
        tokens.document(parse_row(where, {"messages": TURNS * (turns // 2)}), "assistant", where)
    assert says in caught.value.found and "x:1" in caught.value.asked


SLOW = {
    "a filter": "{% set n = ('a ' * 40000) | wordwrap(1) %}",
    "nested loops": "{% for i in range(1200) %}{% for j in range(1000) %}{% endfor %}{% endfor %}",
    "a loop over the text": (
        "{% for m in messages %}{% for c in m['content'] * 20000 %}{% if c == '~' %}{{ c }}{% endif %}{% endfor %}"
        "{% endfor %}"
    ),
    "sorting": "{% set n = (range(60000) | map('string') | sort | join) %}",
}


@pytest.mark.parametrize("kind", further(list(SLOW), 2))
def test_a_template_that_is_slow_row_by_row(kind, tiny_home, monkeypatch):
    """Each rendering is within its own limit; many of them are not."""
    monkeypatch.setattr(mask.LIMITS, "left_s", 0.3)
    monkeypatch.setattr(mask, "MEAN_RENDER_s", 0.005)
    Path("t.jinja").write_text(SLOW[kind] + tiny.TEMPLATE)
    lines("chat.jsonl", [{"messages": TURNS}] * 200)
    with pytest.raises(UserError) as caught:
        read(tiny_home, path="chat.jsonl", model={"chat_template": "t.jinja"})
    assert "per rendering; the limit" in caught.value.found and "model.chat_template" in caught.value.do


def test_fast_renderings_save_no_time_for_slow_ones(monkeypatch):
    limits = mask.RenderLimits(seconds=1, memory_bytes=1 << 30)
    for _ in range(100):
        with limits:
            pass
    assert limits.left_s <= 1
    limits.left_s = -mask.MEAN_RENDER_s
    with pytest.raises(ConfigError, match="on average"), limits:
        pass
    with limits:  # the next run begins anew
        pass
    limits.left_s = -1.0
    with pytest.raises(ConfigError, match="a cause"), limits:
        raise ConfigError("a", "a cause", "b")
    with limits:  # which one was slow is said already
        pass
    for _ in range(2 * mask.TICKS):  # signals that come after the block
        limits._tick()


def test_slow_rows_are_told_one_by_one(tiny_home, monkeypatch):
    from optrush.data import tokenize

    tokens = Tokens(AutoTokenizer.from_pretrained(tiny_home / "optrush" / "tiny-1"))
    rows = [(0, RowLocation(Path("x"), n), Text("Stir."), set[str]()) for n in range(200)]
    expected = [shard.encoded() for shard in tokenize.shards(iter(rows), tokens, "assistant")]
    told: list[int] = []
    monkeypatch.setattr(tokenize, "SLOW_s", -1.0)
    made = tokenize.shards(iter(rows), tokens, "assistant", progress=told.append)
    assert [shard.encoded() for shard in made] == expected
    assert sum(told) == 200 and told[:5] == [32, 8, 2, 1, 1]


@pytest.mark.parametrize("row", [Text("Stir."), Completion("Soup?", "Stir.")])
def test_rows_without_a_template_are_not_limited(row, tiny_home, monkeypatch):
    tokens = Tokens(AutoTokenizer.from_pretrained(tiny_home / "optrush" / "tiny-1"))
    monkeypatch.setattr(mask.RenderLimits, "__enter__", lambda self: pytest.fail("limited"))
    assert len(tokens.document(row, "assistant", RowLocation(Path("x"), 1)).ids) > 1


def test_limits_nest_and_end_with_the_outermost():
    """And a thread that is not the main one, which no signal reaches, sets none."""
    before, limits = resource.getrlimit(resource.RLIMIT_AS), mask.LIMITS
    with limits:
        inside = resource.getrlimit(resource.RLIMIT_AS)
        with limits:
            assert signal.getitimer(signal.ITIMER_PROF)[0] > 0
        assert resource.getrlimit(resource.RLIMIT_AS) == inside != before
        assert signal.getitimer(signal.ITIMER_PROF)[0] > 0
    assert signal.getitimer(signal.ITIMER_PROF) == (0, 0)
    assert resource.getrlimit(resource.RLIMIT_AS) == before

    def render() -> None:
        with limits:
            assert resource.getrlimit(resource.RLIMIT_AS) == before

    with ThreadPoolExecutor(1) as pool:
        pool.submit(render).result()


# --- weights that are no numbers
@pytest.mark.parametrize(("value", "greedy"), further(
    [(float("nan"), ()), (float("inf"), ("--greedy",)), (float("inf"), ()), (float("nan"), ("--greedy",))], 1,
))  # fmt: skip
def test_an_answer_of_broken_weights_is_refused(value, greedy, call, tiny_home, monkeypatch):
    shutil.copytree(tiny_home / "optrush" / "tiny-1", "model")
    weights = load_file("model/model.safetensors")
    name = next(name for name in weights if name.endswith("down_proj.weight"))
    weights[name][3] = value
    save_file(weights, "model/model.safetensors", {"format": "pt"})
    lines("asked.jsonl", [{"prompt": "A city?"}, {"prompt": "Another?"}])
    for command in (("generate", "model", "--prompts", "asked.jsonl", "--out", "out.jsonl"), ("chat", "model")):
        monkeypatch.setattr(sys, "stdin", io.StringIO("A city?\n"))
        code, out, err = call(*command, "--max-tokens", "4", *greedy)
        assert (code, "!!!" in out) == (1, False), err
        assert len(re.findall("^(?:asked|found|do): ", err, re.MULTILINE)) == 3 and "Traceback" not in err
        assert f"NaN or infinity among the scores of the next token; {name} has some" in err
    assert not Path("out.jsonl").exists()


# --- the same ids, the same mask

SHIPPED = sorted(Path(find_spec("trl").submodule_search_locations[0]).glob("chat_templates/*.jinja"))  # type: ignore
SAID = [
    {"content": "two and two\n</think>\n\nFour."}, {"content": "<think>\ntwo and two\n</think>\n\nFour."},
    {"content": "Four.", "reasoning_content": "two and two"}, {"content": "Four.", "reasoning": "two and two"},
    {"content": "\n</think>\n\nFour."}, {"content": "<think>\n\n</think>\n\nFour."}, {"content": "Four."},
    {"content": "Four.", "reasoning_content": ""}, {"content": "</think>Four."}, {"content": "two</think>"},
]  # fmt: skip


@pytest.mark.parametrize("called", further([True, False], 1))
@pytest.mark.parametrize("alike", further([SHIPPED[n::4] for n in range(4)], 2))
def test_however_a_row_writes_reasoning_the_mask_is_the_same(alike, called, tiny_home):
    lines("chat.jsonl", [{"messages": TURNS}])
    base = open_tokens(config(tiny_home, path="chat.jsonl"), tiny_home / "optrush" / "tiny-1")
    assert base is not None
    compared = 0
    for template in alike:
        tokens, masks = Tokens(base.tokenizer, template.read_text()), dict[tuple[int, ...], list[bool]]()
        for said in SAID:
            answer = {"role": "assistant", **said, **({"tool_calls": [CALL]} if called else {})}
            with suppress(UserError):
                row, _ = parsed({"messages": [ASK, answer]})
                document = tokens.document(row, "assistant", WHERE)
                ids, mask = tuple(document.ids.tolist()), document.targets.tolist()
                compared += ids in masks
                assert mask == masks.setdefault(ids, mask), (template.name, said)
    assert compared >= 3


# --- another number of rows a step, from a checkpoint
def test_rows_that_a_resumed_run_loses_or_repeats_are_counted(call):
    lines("chat.jsonl", [{"messages": [ASK, {**ANSWER, "content": f"Oslo {n}."}]} for n in range(24)])
    train = {"steps": 6, "log_every": 1, "save_every": 3}
    base = {"train": train, "with": {}, "batch": {"seq": 64, "tokens": 128}, "data": {"path": "chat.jsonl"}}
    code, _, err = call("train", run_file(**base))
    assert code == 0, err

    def resumed(tokens: int, **train_now: Any) -> tuple[int, str]:
        run_file(**{**base, "batch": {"seq": 64, "tokens": tokens}, "train": {"log_every": 1, **train_now}})
        code, _, err = call("train", "run.yaml", "--resume", "auto", "--allow-change", "order")
        return code, err

    code, err = resumed(256, epochs=1)
    assert code == 2 and "step 7 would begin at row 24" in err and "12 rows of this run's size lost" in err, err
    code, err = resumed(256, steps=7)
    assert code == 0 and "step 7 begins at row 24, the checkpoint ended before row 12: 12 rows" in err, err


# --- which template, and what it marks
def several(folder: Path, **templates: str) -> str:
    """The tiny model with templates by name, as older tokenizers hold them."""
    shutil.copytree(folder, "several")
    settings = json.loads(Path("several/tokenizer_config.json").read_text())
    settings["chat_template"] = [{"name": name, "template": source} for name, source in templates.items()]
    Path("several/tokenizer_config.json").write_text(json.dumps(settings))
    return "several"


NAMES_TOOLS = "{% for t in tools or [] %}{{ 'tool ' + t.function.name + '\n' }}{% endfor %}" + tiny.TEMPLATE


@pytest.mark.parametrize("stream", [False, True])
def test_rows_with_tools_take_the_template_for_them(stream, tiny_home):
    tool = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}
    rows: list[dict[str, Any]] = [{"messages": TURNS}, {"messages": TURNS, "tools": [tool]}, {"messages": TURNS}]
    rows.append({"messages": TURNS, "tools": []})
    lines("chat.jsonl", rows)
    folder = several(tiny_home / "optrush" / "tiny-1", default=tiny.TEMPLATE, tool_use=NAMES_TOOLS)
    source = read(tiny_home, folder=folder, path="chat.jsonl", stream=stream).train
    found = [d for _, made in source.read(range(4)).samples for d in made] if stream else [
        source.documents(i)[0] for i in range(4)]  # fmt: skip
    tokens = open_tokens(config(tiny_home, folder=folder, path="chat.jsonl"), Path(folder))
    assert tokens is not None
    for row, document in zip(rows, found, strict=True):
        text = tokens.tokenizer.apply_chat_template(row["messages"], tools=row.get("tools") or None, tokenize=False)
        assert tokens.tokenizer(text, add_special_tokens=False)["input_ids"] == document.ids.tolist()
        assert ("tool add" in text) == bool(row.get("tools"))
    prompt = GenerationModel(find_model(folder)).ids([U], WHERE, [tool])
    assert "tool add" in tokens.tokenizer.decode(prompt)


def test_tool_templates_are_one_cache_apart(tiny_home):
    made = set()
    for other in (tiny.TEMPLATE, NAMES_TOOLS):
        folder = several(tiny_home / "optrush" / "tiny-1", default=tiny.TEMPLATE, tool_use=other)
        tokens = open_tokens(config(tiny_home, folder=folder, path="chat.jsonl"), Path(folder))
        assert tokens is not None
        made.add(identity(tokens))
        shutil.rmtree(folder)
    assert len(made) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tag", ["{% generation %}", "{%- generation -%}", None])
def test_generation_tags_that_are_not_read_are_named(tag, stream, tiny_home):
    body = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{{ m.reasoning_content or '' }}"
    body += f"{tag}{{{{ m.content }}}}{{% endgeneration %}}" if tag else "{{ m.content }}"
    Path("t.jinja").write_text(body + "{{ '<|im_end|>' }}{{ '\n' }}{% endfor %}")
    lines("chat.jsonl", [{"messages": [ASK, {**ANSWER, "reasoning_content": "Hm."}]}])
    found = read(tiny_home, path="chat.jsonl", stream=stream, model={"chat_template": "t.jinja"})
    assert ("the chat template's generation tags are ignored" in found.summary) == (tag is not None)
