"""`optrush data show`, `optrush data pack`: samples told from the ids that training gets, and nothing left behind."""

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from optrush.cli import data
from optrush.data.preview import BORDER, CLOSE, CLOSE_SPECIAL, OPEN, OPEN_SPECIAL

from clirun import document_of, write_rows

told = document_of("data")

MARKED = re.compile(f"{OPEN}(.*?){CLOSE}", re.DOTALL)
HEAD = re.compile(r"^── sample (\d+) · (\S+) · (\d+) tokens, (\d+) learnt$", re.MULTILINE)


def shown(call, *arguments):
    found = call("data", "show", *arguments)
    assert found.code == 0, found.err
    return found.out


def text(pieces):
    return "".join(p["text"] for p in pieces)


# --- the samples


def test_samples_with_their_places(call, write, here, model):
    """What is learnt is the assistant's words and their end; the text is the template's; the place is the row's."""
    rows = [json.loads(line) for line in (here / "chat.jsonl").read_text().splitlines()]
    samples = told(call, "show", write(data={"eval": None}), "--rows", "3", "--from", "2")["samples"]
    assert [s["sample"] for s in samples] == [2, 3, 4]
    assert [s["where"] for s in samples] == [f"chat.jsonl:{i + 1}" for i in (2, 3, 4)]
    tokenizer = AutoTokenizer.from_pretrained(model)
    for sample in samples:
        (document,) = sample["documents"]
        talk = rows[sample["sample"]]["messages"]
        pieces = document["pieces"]
        assert text(pieces) == tokenizer.apply_chat_template(talk, tokenize=False)
        learnt = [p for p in pieces if p["learnt"]]
        assert text(learnt) == "".join(m["content"] + "<|im_end|>" for m in talk if m["role"] == "assistant")
        assert document["targets"] == sum(len(p["ids"]) for p in learnt)
        assert document["tokens"] == sum(len(p["ids"]) for p in pieces)


def test_nothing_is_written_and_no_model_is_made(call, write, here, cache, monkeypatch):
    def never(*_, **__):
        raise AssertionError("a model")

    monkeypatch.setattr(torch.nn.Module, "__init__", never)
    config = write()
    before = {(p, p.stat().st_mtime_ns) for f in (here, cache) for p in f.rglob("*")}
    shown(call, config)
    assert {(p, p.stat().st_mtime_ns) for f in (here, cache) for p in f.rglob("*")} == before


def test_marks_off_a_terminal(call, write):
    out = shown(call, write(data={"eval": None}))
    assert "\x1b" not in out
    assert [m[0] for m in HEAD.findall(out)] == ["0", "1", "2", "3", "4"]
    body = out[out.index("── sample") :]
    assert body.count(OPEN) == body.count(CLOSE) >= 5 and "↵" in body
    assert all("im_start" not in piece for piece in MARKED.findall(body)), "no header is learnt"
    assert f"{OPEN_SPECIAL}<|im_end|>{CLOSE_SPECIAL}{CLOSE}" in body and BORDER not in out
    assert re.search(r"^12 samples of \d+ to \d+ tokens, median .* learnt; \d+ longer than T = 128", out, re.MULTILINE)


def test_token_borders(call, write):
    """As many borders as there are tokens but one, for text whose characters are a token or more each."""
    out = shown(call, write(data={"eval": None}), "--tokens", "--rows", "1")
    body = out[out.index("── sample") : out.index("12 samples of")]
    assert body.count(BORDER) == int(HEAD.findall(out)[0][2]) - 1


def test_colours_on_a_terminal(call, write, monkeypatch):
    """Colours instead of marks; each line closes what it opens."""
    monkeypatch.setattr("optrush.console.use_color", lambda: True)
    out = shown(call, write(data={"eval": None}))
    assert OPEN not in out and OPEN_SPECIAL not in out
    for line in out[: out.index("12 documents")].splitlines():
        assert line.startswith(("── ", "read")) or line.count("\x1b")
        assert len(re.findall(r"\x1b\[[\d;]+m", line)) == 2 * line.count(data.PLAIN)
    assert not re.search(r"\x1b\[[\d;]+m\x1b\[0m", out), "nothing is coloured"
    assert f"\x1b[{data.LEARNT}{data.SPECIAL}m<|im_end|>{data.PLAIN}" in out
    assert f"\x1b[{data.READ}{data.SPECIAL}m<|im_start|>{data.PLAIN}" in out


HOSTILE = "a\x1b[31mred\x07\x9b2J ⟦b⟧⟪s⟫╎ \u202ec\ttab\nend"


def test_what_data_holds_does_not_reach_the_terminal(call, write, here):
    """Neither from a row nor from a file's name, in colour or without."""
    name = "odd\x1b[31m\n.jsonl"
    write_rows(here / name, [{"text": HOSTILE}])
    out = shown(call, write(data={"path": name, "eval": None}))
    assert not set("\x1b\x07\x9b\u202e\t") & set(out)
    body = out[out.index("── sample") :]
    assert body.startswith("── sample 0 · odd\\x1b[31m↵.jsonl:1 · ")
    assert "\\x1b[31mred\\x07\\x9b2J \\u27e6b\\u27e7\\u27eas\\u27eb\\u254e \\u202ec\\ttab↵\n" in re.sub(
        f"[{OPEN}{CLOSE}]", "", body
    )
    assert body.count(OPEN) == body.count(CLOSE) == 1


def test_a_terminal_without_our_marks(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    data._print(f"{OPEN}é")
    sys.stdout.flush()
    assert written.getvalue() == b"\\u27e6\\xe9\n"


def test_random_is_the_order_of_the_run(call, write):
    config = write(data={"eval": None})
    order = [s["sample"] for s in told(call, "show", config, "--random", "--rows", "99")["samples"]]
    assert sorted(order) == list(range(12)) != order
    assert [s["sample"] for s in told(call, "show", config, "--random", "--from", "9")["samples"]] == order[9:]
    other = told(call, "show", config, "--random", "--rows", "99", "--set", "seed=1")["samples"]
    assert [s["sample"] for s in other] != order


def test_what_is_held_out_is_not_shown(call, write):
    facts = told(call, "show", write(data={"eval": 0.25}), "--rows", "99")
    assert len(facts["samples"]) == 9 and "held out" in facts["summary"]


@pytest.mark.parametrize("how", ["error", "split", "drop", "truncate"])
def test_a_sample_that_is_longer_than_a_row(how, call, write, here):
    """It is shown whole and said to be longer, whatever training does with it."""
    write_rows(here / "long.jsonl", [{"text": "Stir and wait. " * 500}, {"text": "Taste."}])
    config = write(data={"path": "long.jsonl", "eval": None, "too_long": how})
    facts = told(call, "show", config)
    first, second = facts["samples"]
    assert first["longer"] and not second["longer"] and facts["lengths"]["longer_than_seq"] == 1
    (document,) = first["documents"]
    assert document["left_out"] > 0 and len(document["end"]) > 100
    assert sum(len(p["ids"]) for p in document["pieces"] + document["end"]) + document["left_out"] == document["tokens"]
    out = shown(call, config)
    assert f"longer than T (data.too_long: {how})" in out and f"{document['left_out']} tokens are not shown" in out


# --- every kind of data

TEXTS = {
    "pretrain": [{"text": f"Stir the soup {i} times."} for i in range(4)],
    "sft": [{"prompt": f"{i} soups? ", "completion": "Yes."} for i in range(4)],
}


@pytest.mark.parametrize("objective", sorted(TEXTS))
def test_every_objective(objective, call, write, here):
    write_rows(here / "rows.jsonl", TEXTS[objective])
    facts = told(call, "show", write(objective=objective, data={"path": "rows.jsonl", "eval": None}))
    assert len(facts["samples"]) == 4 and facts["objective"] == objective
    learnt = [text([p for p in s["documents"][0]["pieces"] if p["learnt"]]) for s in facts["samples"]]
    expected = "Yes." if objective == "sft" else "Stir the soup 0 times."
    assert expected in learnt[0]
    assert "soups?" not in learnt[0]


def test_pairs_are_shown_together(call, write, here):
    rows = [{"prompt": f"{i} soups? ", "chosen": "Yes, two.", "rejected": "No."} for i in range(4)]
    write_rows(here / "pairs.jsonl", rows)
    config = write(objective="dpo", data={"path": "pairs.jsonl", "eval": None})
    for sample in told(call, "show", config)["samples"]:
        chosen, rejected = sample["documents"]
        assert (chosen["name"], rejected["name"]) == ("chosen", "rejected")
        assert "Yes, two." in text(chosen["pieces"]) and "No." in text(rejected["pieces"])
    for row in told(call, "show", config, "--packed")["rows"]:
        assert [[d["name"] for d in s["documents"]] for s in row["samples"]] == [["chosen", "rejected"]] * 4
    out = shown(call, config, "--rows", "1")
    assert re.search(r"^  ── chosen · .*\n(.*\n)+?  ── rejected · ", out, re.MULTILINE)


# --- rows


@pytest.mark.parametrize("layout", ["pad", "sort-by-length", "wrap", "packing"])
def test_rows_of_the_run(layout, call, write):
    """As the dry run's first step: every token of a row in a sample of it, no row longer than T."""
    config = write(data={"eval": None}, with_={layout: {}})
    rows = told(call, "show", config, "--packed", "--rows", "99")["rows"]
    assert [r["row"] for r in rows] == list(range(len(rows)))
    for row in rows:
        held = [d for s in row["samples"] for d in s["documents"]]
        assert row["tokens"] == sum(d["tokens"] for d in held) <= 128
    step = json.loads(call("train", config, "--dry-run", "--json").out)["rows"]
    seen = [[s["sample"] for s in r["samples"]] for r in rows]
    assert seen[: len(step)] == [[s["sample"] for s in r["samples"]] for r in step]
    part = told(call, "show", config, "--packed", "--rows", "2", "--from", "1")["rows"]
    assert part == rows[1:3]


def test_rows_as_text(call, write):
    """A line over each row, and one over each document in it: where documents meet is to be seen."""
    out = shown(call, write(data={"eval": None}), "--packed", "--rows", "2")
    heads = re.findall(r"^══ row (\d+) · (\d+) samples? · (\d+) of 128 slots$", out, re.MULTILINE)
    assert [h[0] for h in heads] == ["0", "1"] and sum(int(h[1]) for h in heads) == len(HEAD.findall(out)) > 2


# --- pack


def test_pack(call, write):
    """What was read, and each layout; data this small is not cached, and that is said."""
    config = write(data={"eval": 0.25})
    facts = told(call, "pack", config)
    train, held = facts["counts"]["train"], facts["counts"]["held_out"]
    assert (train["rows"], held["rows"]) == (9, 3) and train["refused"] == train["too_long"] == 0
    assert train["targets"] < train["tokens"]
    assert {f["name"]: f["chosen"] for f in facts["fills"]} == {
        "pad": False, "sort-by-length": False, "wrap": False, "packing": True,
    }  # fmt: skip
    assert facts["cache"] == [] and facts["cache_bytes"] == 0
    out = call("data", "pack", config).out
    assert re.search(r"^rows +9 +3$", out, re.MULTILINE) and re.search(r"^packing \* +\d+\.\d\d%", out, re.MULTILINE)
    assert "cache not needed" in out


def test_pack_fills_the_cache(call, write, here, monkeypatch):
    """The folder and bytes are those on the disk, and a second call finds them."""
    monkeypatch.setattr("optrush.data.tokenize.CHUNK_bytes", 100)
    facts = told(call, "pack", write(data={"eval": None, "cache": str(here / "kept"), "workers": 1}))
    (folder,) = map(Path, facts["cache"])
    assert folder.is_relative_to(here / "kept")
    assert facts["cache_bytes"] == sum(f.stat().st_size for f in folder.glob("*.safetensors")) > 0
    before = {(f, f.stat().st_mtime_ns) for f in folder.rglob("*.safetensors")}
    assert f"cache {folder}: 0." in call("data", "pack", "run.yaml").out
    assert {(f, f.stat().st_mtime_ns) for f in folder.rglob("*.safetensors")} == before


def test_what_is_left_out_is_counted(call, write, here):
    rows: list[dict[str, Any]] = [{"text": f"Stir {i}."} for i in range(50)]
    write_rows(here / "some.jsonl", [*rows, {"text": "Stir and wait. " * 500}, {"txt": 1}])
    more = {"path": "some.jsonl", "eval": None, "too_long": "drop", "bad_rows": "quarantine", "most_bad": 0.1}
    facts = told(call, "pack", write(objective="pretrain", data=more))
    counts = facts["counts"]["train"]
    assert (counts["rows"], counts["refused"], counts["too_long"], counts["dropped"]) == (52, 1, 1, 1)
    assert [r["where"] for r in facts["refused"]] == ["some.jsonl:52"]
    assert "\nrefused some.jsonl:52: " in call("data", "pack", "run.yaml").out
    assert "1 bad and set aside" in shown(call, "run.yaml")


# --- refusals


@pytest.mark.parametrize(("verb", "flags", "changes", "says"), [
    ("show", [], {"objective": "pretrain", "data": {"path": None, "random": 8, "eval": None}}, "nothing to show"),
    ("pack", [], {"objective": "pretrain", "data": {"path": None, "random": 8, "eval": None}}, "nothing to show"),
    ("show", ["--from", "12"], {"data": {"eval": None}}, "12 samples, the first is 0"),
    ("show", ["--packed", "--from", "99"], {}, "rows, the first is 0"),
    ("show", ["--packed", "--random"], {}, "in the run's random order"),
    ("show", ["--packed"], {"data": {"stream": True}, "train": {"epochs": None, "steps": 2}}, "while training"),
    ("pack", [], {"data": {"stream": True}, "train": {"epochs": None, "steps": 2}}, "tokenised while training"),
    ("show", [], {"data": {"path": "no.jsonl"}}, "no.jsonl"), ("show", [], {"with_": {"no-such": {}}}, "no-such"),
    ("show", ["--packed"], {"batch": {"seq": 32, "tokens": 32}}, "data.too_long: split, drop or truncate"),
    ("pack", [], {"batch": {"seq": 32, "tokens": 32}}, "data.too_long: split, drop or truncate"),
    ("show", ["--out", "chat.jsonl"], {}, "--out chat.jsonl"),
])  # fmt: skip
def test_refusals(verb, flags, changes, says, call, write, here):
    found = call("data", verb, write(**changes), *flags)
    assert found.code == 2 and found.out == "" and says in found.err
    assert [line.split(":")[0] for line in found.err.splitlines()] == ["asked", "found", "do"]


def test_no_gpu_is_needed(call, write):
    """What lays out no rows is not asked for: data is looked at before there is a machine to train on."""
    config = write(data={"eval": None}, with_={"packing": {}, "fsdp": {}, "amp": {"dtype": "fp16"}})
    assert call("train", config, "--dry-run").code == 2
    assert len(told(call, "show", config)["samples"]) == 5


def test_a_stream_shows_its_beginning(call, write, monkeypatch):
    monkeypatch.setattr(data, "STREAMED", 7)
    config = write(data={"eval": None, "stream": True}, train={"epochs": None, "steps": 2})
    facts = told(call, "show", config, "--rows", "99")
    assert len(facts["samples"]) == 7 and facts["summary"].startswith("data.stream, the first 7 rows: ")


def test_the_page(call, write, here):
    out = shown(call, write(data={"eval": None}), "--out", str(here / "new" / "seen"))
    assert out.splitlines()[-1] == str(here / "new" / "seen" / "data.html")
    assert (here / "new" / "seen" / "data.html").read_text().startswith("<!doctype html>")
