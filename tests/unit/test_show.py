"""Samples as pieces of text: every token once, exactly the ids' text, characters whole; lengths and fills."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from optrush.data import preview
from optrush.data.schema import Document

TALK = "<|im_start|>user\nWhat is 漢字?<|im_end|>\n<|im_start|>assistant\nÉcriture 🍕.<|im_end|>\n"


@pytest.fixture(scope="module")
def tokenizer(tiny_folder):
    return AutoTokenizer.from_pretrained(tiny_folder)


def document(tokenizer, text, learnt=slice(1, None)):
    ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
    targets = np.zeros(len(ids), bool)
    targets[learnt] = True
    targets[:1] = False
    return Document(ids, targets)


def whole(tokenizer, d):
    return list(preview.token_pieces(tokenizer, d, 0, len(d), preview.special_ids(tokenizer)))


def test_every_token_once_and_every_character_whole(tokenizer):
    d = document(tokenizer, TALK)
    found = whole(tokenizer, d)
    assert [i for p in found for i in p.ids] == d.ids.tolist()
    assert "".join(p.text for p in found) == TALK
    assert "\ufffd" not in "".join(p.text for p in found)
    assert {p.text for p in found if p.special} == {"<|im_start|>", "<|im_end|>"}
    assert next(p for p in found if p.text == "🍕").ids == tuple(tokenizer("🍕", add_special_tokens=False)["input_ids"])
    assert len(found) > 20, "tokens are told one by one"


@settings(max_examples=60)
@given(st.text(min_size=1, max_size=40), st.integers(0, 60), st.integers(0, 60))
def test_any_text_anywhere_learnt(tokenizer, text, a, b):
    """Whatever is learnt: ids and targets come back in order, and the text does where no character is cut."""
    d = document(tokenizer, text, slice(min(a, b), max(a, b)))
    found = whole(tokenizer, d)
    assert [i for p in found for i in p.ids] == d.ids.tolist()
    assert [p.learnt for p in found for _ in p.ids] == d.targets.tolist()
    joined = "".join(p.text for p in found)
    assert joined == text or "\ufffd" in joined


def test_a_character_that_is_learnt_by_half_is_two_pieces(tokenizer):
    d = document(tokenizer, "a🍕", slice(3, None))
    found = whole(tokenizer, d)
    assert [p.learnt for p in found] == [False, False, True]
    assert all("\ufffd" in p.text for p in found[1:])


class Words:
    """A tokenizer like SentencePiece's: a token is a word, and the first loses its space."""

    def decode(self, ids: list[int], **_: bool) -> str:
        return " ".join(f"w{i}" for i in ids)


def test_the_end_of_a_long_document_keeps_its_space():
    n = preview.HEAD_tok + preview.TAIL_tok + 7
    (found,) = preview.describe_sample(Words(), [Document(np.arange(n, dtype=np.int32), np.ones(n, bool))], frozenset())
    assert (found["tokens"], found["targets"], found["left_out"]) == (n, n, 7)
    assert [p["text"] for p in found["pieces"][:2]] == ["w0", " w1"] and len(found["pieces"]) == preview.HEAD_tok
    assert [p["ids"] for p in found["end"]] == [(i,) for i in range(n - preview.TAIL_tok, n)]
    assert found["end"][0]["text"] == f" w{n - preview.TAIL_tok}"


def test_a_short_document_is_told_once():
    n = preview.HEAD_tok + preview.TAIL_tok
    (found,) = preview.describe_sample(Words(), [Document(np.arange(n, dtype=np.int32), np.ones(n, bool))], frozenset())
    assert len(found["pieces"]) == n and found["left_out"] == 0 and found["end"] == []


def test_a_pair_has_two_names():
    d = Document(np.arange(3, dtype=np.int32), np.array([False, True, True]))
    assert [x["name"] for x in preview.describe_sample(Words(), [d, d], frozenset())] == ["chosen", "rejected"]
    assert [x["name"] for x in preview.describe_sample(Words(), [d], frozenset())] == ["document"]
    bad = [dataclasses.replace(d, desirable=False), d]
    assert [x["name"] for x in preview.describe_sample(Words(), bad, frozenset(), judged=True)] == [
        "bad answer", "mismatched"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "c", ["\x00", "\x07", "\x1b", "\x7f", "\x9b", "\u202e", "\u2066", "\u2028", "\udcff", *preview.MARKS]
)
def test_what_must_not_reach_a_terminal(c):
    seen = preview.visible(c)
    assert c not in seen and seen.isascii() and seen.startswith("\\")


def test_what_may():
    assert "".join(map(preview.visible, "aé漢 🍕\n")) == "aé漢 🍕↵\n"
    assert preview.visible(preview.OPEN, marks="") == preview.OPEN


# --- lengths


def test_spread():
    found = preview.length_summary(np.array([10, 20, 30, 40, 100]), np.array([5, 5, 10, 0, 30]), 40)
    told = [found[k] for k in ("samples", "tokens", "learnt", "min", "median", "mean", "p95", "max", "longer_than_seq")]
    assert told == [5, 200, 0.25, 10, 30.0, 40.0, 100, 100, 1]
    assert sum(found["histogram"]["counts"]) == 5 and not found["histogram"]["logarithmic"]


@given(st.lists(st.integers(1, 10**7), min_size=1, max_size=50))
def test_a_histogram_holds_every_sample(lengths):
    found = preview.length_summary(np.array(lengths), np.array(lengths), 2048)["histogram"]
    edges = found["edges"]
    assert sum(found["counts"]) == len(lengths) and len(found["counts"]) == len(edges) - 1 <= preview.BINS
    assert edges == sorted(set(edges)) and edges[0] == min(lengths) and edges[-1] == max(lengths) + 1
    assert found["logarithmic"] == (max(lengths) > preview.WIDE * min(lengths))


@pytest.mark.parametrize(
    ("how", "cut"),
    [("error", [10, 64, 64]), ("truncate", [10, 64, 64]), ("drop", [10, 64]), ("split", [8, 10, 64, 64, 64, 64])],
)
def test_fills(how, cut):
    """Each layout by its name; the samples as the run cuts them, but for wrap, which does that by itself."""
    run: Any = SimpleNamespace(seed=0, with_={"wrap": {}}, data=SimpleNamespace(too_long=how))
    lengths = np.array([10, 64, 200])
    assert sorted(preview.cut_lengths(lengths, 64, how).tolist()) == cut
    found = {f["name"]: f for f in preview.fills(lengths, 64, 4, 2, run)}
    assert list(found) == ["pad", "sort-by-length", "wrap", "packing"]
    assert [name for name, f in found.items() if f["chosen"]] == ["wrap"]
    assert found["pad"]["rows"] == found["sort-by-length"]["rows"] == len(cut)
    assert found["packing"]["tokens"] == sum(cut) and found["wrap"]["tokens"] == 274
    assert all(f["samples_per_s"] > 0 for f in found.values())


def test_fills_where_all_is_dropped():
    run: Any = SimpleNamespace(seed=0, with_={}, data=SimpleNamespace(too_long="drop"))
    assert {f["tokens"] for f in preview.fills(np.array([65]), 64, 4, 2, run)} == {64, 65}
