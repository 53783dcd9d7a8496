"""Rows under imported configurations of axolotl and LLaMA-Factory: tokens and targets as their own code made them.

import_cases.json holds what their code made, and of which version (benchmarks/make_import_cases.py).
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from optrush.cli.import_config import Imported, translate
from optrush.data.batch import IGNORE
from optrush.decide import decide
from optrush.errors import UserError
from optrush.models import tiny
from optrush.trainer.build import build

CASES = json.loads(Path(__file__).with_name("import_cases.json").read_text())["cases"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cases") / "model"
    tiny.write_tiny(folder)
    return folder


def imported(case: dict[str, Any], model: Path, folder: Path) -> Imported:
    rows = folder / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, case["rows"])))
    if case["tool"] == "axolotl":
        given = {
            "base_model": str(model), "datasets": [{"path": str(rows), **case["dataset"]}], "micro_batch_size": 1,
            "sequence_len": 128, "chat_template": "tokenizer_default", "pad_to_sequence_len": True,
        }  # fmt: skip
    else:
        (folder / "dataset_info.json").write_text(json.dumps({"ours": {"file_name": "rows.jsonl", **case["dataset"]}}))
        given = {
            "model_name_or_path": str(model), "stage": "sft", "finetuning_type": "full", "dataset": "ours",
            "dataset_dir": str(folder), "template": "chatml", "cutoff_len": 128, "per_device_train_batch_size": 1,
        }  # fmt: skip
    file = folder / "theirs.yaml"
    file.write_text(yaml.safe_dump(given | case["config"] | {"output_dir": str(folder / "run")}))
    return translate(file, tool=case["tool"])


def ours(found: Imported, path: Path) -> list[tuple[list[int], list[int]]]:
    made = []
    for batch in build(decide(found.config), training=False, data=str(path)).evaluation or ():
        ids = batch.documents.ids.tolist()
        for tokens, labels, numbers, row in zip(batch.tokens.tolist(), batch.labels.tolist(), ids, batch.rows):
            for n in sorted({*numbers[: row.tokens]}):  # documents: a pair has two
                at = [i for i, number in enumerate(numbers[: row.tokens]) if number == n]
                learnt = [i - at[0] + 1 for i in at if labels[i] != IGNORE]
                made.append(([tokens[i] for i in at], learnt))
    return made


# Cases that are refused, by the key that the error names.
REFUSED = {
    "axolotl chat-inputs": "train_on_inputs", "axolotl chat-no-system": "drop_system_message",
    **{f"axolotl chat-eos-{value}": "train_on_eos" for value in ("last", "all", "none")},
    **{f"axolotl chat-eot-{value}": "train_on_eot" for value in ("last", "all", "none")},
    **{f"axolotl chat-roles-{value}": "roles_to_train" for value in ("user", "none")},
    "axolotl chat-marked-user": "messages[3].train: a user turn is never a target",
    "llama-factory alpaca-history": "history",
}  # fmt: skip
# Cases of which other tokens are learnt, and what is listed for it.
LISTED = {
    "axolotl chat-no-eot": "axolotl learns that end only where it is the end of a text",
    "axolotl chat-marked-unnamed": "which axolotl reads by message_field_training alone",
}
# Rows that axolotl writes with headings of its own, which is listed: their learnt tokens are compared, without an end.
HEADED = ("axolotl alpaca", "axolotl alpaca-inputs", "axolotl qa")
NAMES = [f"{case['tool']} {case['name']}" for case in CASES]


def compared(tokens: list[int], learnt: list[int], tokenizer: Any) -> list[tuple[int, bool]]:
    """Each token of a row and whether it is learnt, without what LLaMA-Factory's import lists or has no effect.

    A begin of text; an empty line in place of a line break; a line break after the end of a turn.
    """
    end, line = (tokenizer.convert_tokens_to_ids(token) for token in (tiny.END, "\u010a"))
    pairs = [(token, n in learnt) for n, token in enumerate(tokens)]
    pairs = pairs[tokens[0] == tokenizer.bos_token_id :]
    pairs[0] = (pairs[0][0], False)
    return [p for before, p in zip([(None, False), *pairs], pairs) if p[0] != line or before[0] not in (end, line)]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_learnt_is_what_their_code_learns(model, tmp_path, name):
    case = CASES[NAMES.index(name)]
    if name in REFUSED:
        with pytest.raises(UserError, match=re.escape(REFUSED[name])):
            ours(imported(case, model, tmp_path), tmp_path / "rows.jsonl")
        return
    result, tokenizer = imported(case, model, tmp_path), AutoTokenizer.from_pretrained(model)
    found = sorted(ours(result, tmp_path / "rows.jsonl"))
    want = sorted((one["tokens"], one["learnt"]) for one in case["made"])
    if name in LISTED:
        assert found != want and any(LISTED[name] in note for note in result.notes)
    elif name in HEADED:
        assert any("headings" in note for note in result.notes)
        for mine, theirs in zip(*(sorted(map(answer, *zip(*rows))) for rows in (found, want)), strict=True):
            assert mine[:-1] == theirs[:-1] if case["config"]["train_on_inputs"] is False else mine and theirs
            assert tokenizer.convert_tokens_to_ids(tiny.END) in mine[-2:] and theirs[-1] == tokenizer.eos_token_id
    elif case["tool"] == "axolotl":
        assert found == want
    else:
        assert sorted(compared(*row, tokenizer) for row in found) == sorted(compared(*row, tokenizer) for row in want)


CHAT = [("system", "be short"), ("user", "salt?"), ("assistant", "a spoon"), ("user", "oil?"), ("assistant", "two")]
TURNS = [{"role": role, "content": text} for role, text in CHAT]
SHARED = [{"from": {"user": "human", "assistant": "gpt"}.get(role, role), "value": text} for role, text in CHAT]
ALPACA = {"instruction": "cook", "input": "rice", "output": "boil"}
PAIRED = {"chosen": "yes", "rejected": "no"}
BOTH = ["a spoon<|im_end|>", "two<|im_end|>"]
# What is learnt of a row, written from the tools' documentation: an answer with its end; of a text, all.
DOCUMENTED: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], list[str]]] = [
    ("axolotl", {"messages": TURNS}, {"type": "chat_template"}, {}, BOTH),
    ("axolotl", {"messages": TURNS}, {"type": "chat_template", "roles_to_train": ["assistant"]}, {}, BOTH),
    ("axolotl", {"talk": SHARED}, {"type": "chat_template", "field_messages": "talk", "message_property_mappings": {
        "role": "from", "content": "value"}}, {}, BOTH),
    ("axolotl", {"conversations": SHARED}, {"type": "sharegpt"}, {}, BOTH),
    ("axolotl", ALPACA, {"type": "alpaca"}, {"train_on_inputs": False}, ["boil<|im_end|>"]),
    ("axolotl", {"text": "boil rice"}, {"type": "completion"}, {}, ["boil rice<|eos|>"]),
    ("axolotl", {"messages": TURNS[:2], "chosen": TURNS[2], "rejected": TURNS[4]}, {"type": "chat_template"},
     {"rl": "dpo"}, BOTH),
    ("axolotl", {"prompt": "salt?", "chosen": "a spoon", "rejected": "two", "system": ""}, {"type": "chatml.ultra"},
     {"rl": "dpo"}, BOTH),
    ("llama-factory", ALPACA, {}, {}, ["boil<|im_end|>"]),
    ("llama-factory", {"conversations": SHARED}, {"formatting": "sharegpt"}, {}, BOTH),
    ("llama-factory", {"conversations": SHARED}, {"formatting": "sharegpt"}, {"mask_history": True}, BOTH[1:]),
    ("llama-factory", {**ALPACA, **PAIRED}, {"ranking": True, "columns": {
        "prompt": "instruction", "query": "input", "chosen": "chosen", "rejected": "rejected"}}, {"stage": "dpo"},
     ["yes<|im_end|>", "no<|im_end|>"]),
    ("llama-factory", {"prompt": "cook", **PAIRED}, {"ranking": True, "columns": {
        "prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}}, {"stage": "rm"},
     ["yes<|im_end|>", "no<|im_end|>"]),
    ("llama-factory", {"ask": "cook", "say": "boil"}, {"columns": {"prompt": "ask", "response": "say"}}, {},
     ["boil<|im_end|>"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("tool", "row", "dataset", "config", "texts"), DOCUMENTED, ids=[f"{n} {t[0]}" for n, t in enumerate(DOCUMENTED)]
)
def test_what_is_learnt_is_what_they_document(model, tmp_path, tool, row, dataset, config, texts):
    tokenizer = AutoTokenizer.from_pretrained(model)
    case = {"tool": tool, "rows": [row], "dataset": dataset, "config": config}
    runs = []
    for tokens, learnt in ours(imported(case, model, tmp_path), tmp_path / "rows.jsonl"):
        begins = [n for n in learnt if n - 1 not in learnt]
        ends = [n for n in learnt if n + 1 not in learnt]
        runs += [tokenizer.decode(tokens[a : b + 1]) for a, b in zip(begins, ends, strict=True)]
    assert runs == texts


def answer(tokens: list[int], learnt: list[int]) -> list[int]:
    return [tokens[n] for n in learnt]
