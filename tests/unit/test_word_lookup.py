"""Texts encoded word by word have the engine's ids, under every rule of splitting that is looked up so."""

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
from chats import ANSWERS, CHATML, SWALLOWING, bytelevel_bpe, row
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from optrush.data import chat_template, words
from optrush.data.chat_template import Tokens
from optrush.data.schema import Chat, Completion, Message, RowLocation, Text
from optrush.data.words import CHARACTERS, Words

LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{M}]*[\p{Ll}\p{Lo}\p{M}]+(?i:'s|'ll)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+|\P{N}"
)
PARTS = (r"\p{N}{1,3}", "[一-龥]+", r"[\p{P}\p{S}][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|\s+")  # with gaps
LEVEL = pre_tokenizers.ByteLevel(False, use_regex=False)


def split(rule, behavior="isolated"):
    return pre_tokenizers.Split(Regex(rule), behavior)


RULES = {
    "gpt2": pre_tokenizers.ByteLevel(False),
    "digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]),
    "numbers": pre_tokenizers.Sequence([pre_tokenizers.Digits(False), pre_tokenizers.ByteLevel(False)]),
    "llama": pre_tokenizers.Sequence([split(LLAMA), LEVEL]),
    "cased": pre_tokenizers.Sequence([split(CASED), LEVEL]),
    "parts": pre_tokenizers.Sequence([*map(split, PARTS), LEVEL]),
    "a text": pre_tokenizers.Sequence([pre_tokenizers.Split("an", "isolated"), pre_tokenizers.ByteLevel(False)]),
}
PIECES = (
    "soup", "  ", "\n", "\n\n", "'s", "'LL", "12", "3456", "é", "Ä", "中文", " x", "don't", "\t", "\r\n", "\xa0", "½",
    "…", "🙂", "e\u0301", "ſ", "_a", "…—", "1,000.50", "<", "<|im_end|>", "an", "http://x.y/z?q=1", "\u2028", "\x1c",
)  # fmt: skip


def engine_of(rule, **more):
    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = rule
    for name, part in more.items():
        setattr(engine, name, part)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    engine.train_from_iterator(["soup and an answer, don't 12 34 café\n\n  x"] * 9, trainer)
    engine.add_special_tokens([AddedToken("<|im_end|>", normalized=False), AddedToken("<|im", normalized=False)])
    return engine


def texts(n, seed=0):
    draw = random.Random(seed)
    return ["".join(draw.choices(PIECES, k=draw.randint(0, 12))) for _ in range(n)]


@pytest.mark.parametrize("rule", RULES)
def test_ids_are_the_engine_s(rule):
    engine = engine_of(RULES[rule], normalizer=normalizers.NFC())
    found = Words(engine, json.loads(engine.to_str()))
    ids = {text: found.encode(text) for text in [*texts(600), *CHARACTERS]}
    known = [text for text, made in ids.items() if made is not None]
    assert len(known) > 150 and found._unsure == 0
    assert all(ids[text] == engine.encode(text, add_special_tokens=False).ids for text in known)
    assert {text for text in ids if "中" in text or "🙂" in text} <= ids.keys() - known


def test_what_has_other_rules_is_left_to_the_engine(tiny_folder, monkeypatch):
    def refused(rule=RULES["gpt2"], **more):
        engine = engine_of(rule, **more)
        with pytest.raises(ValueError, match=r".") as caught:
            Words(engine, json.loads(engine.to_str()))
        return str(caught.value)

    swallowing = bytelevel_bpe(tiny_folder).backend_tokenizer
    with pytest.raises(ValueError, match="other rules"):
        Words(swallowing, json.loads(swallowing.to_str()))
    assert refused(normalizer=normalizers.Lowercase()) == "other rules"
    for rule in (pre_tokenizers.Metaspace(), pre_tokenizers.ByteLevel(True), LEVEL, pre_tokenizers.Whitespace()):
        assert "byte-level" in refused(rule)
    for rule in (
        r"\p{Han}+",
        r"[a&&[^b]]",
        r"(a)(b)",
        r"[[:alpha:]]+",
        r"\h+",
        r"\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++|\p{L}+|\s+",
        r"\p{N}{2}?|.",
    ):
        refused(pre_tokenizers.Sequence([split(rule), LEVEL]))
    refused(pre_tokenizers.Sequence([split(r"\s+", "removed"), LEVEL]))
    monkeypatch.setattr(words, "GPT2", words.GPT2.replace("| ?\\p{N}+", ""))  # not as the engine has it
    assert "other words" in refused()


def test_a_text_of_the_data_with_other_ids_ends_the_looking_up():
    engine = engine_of(RULES["gpt2"])
    found = Words(engine, json.loads(engine.to_str()))
    found._ids["soup"] = (1, 2, 3)
    assert (
        found.encode("an") and found.encode("an soup") and found.encode("soup") is None and found.encode("an") is None
    )


def test_words_in_memory_are_bounded(monkeypatch):
    monkeypatch.setattr(words, "MOST_WORDS", 50)
    engine = engine_of(RULES["gpt2"])
    found = Words(engine, json.loads(engine.to_str()))
    for n in range(1000):
        assert found.encode(f"{n} <|im_end|> {'x' * 99}{n}")
        assert len(found._ids) <= 50 and max(map(len, found._ids)) <= words.LONGEST_WORD


HEAD = processors.TemplateProcessing(single="<|im_end|> $A", special_tokens=[("<|im_end|>", 0)])
AROUND = processors.BertProcessing(("<|im_end|>", 0), ("<|im_end|>", 0))


@pytest.mark.parametrize("template", [CHATML, SWALLOWING])
@pytest.mark.parametrize("kind", ["whole", "nfc", "head", "around", "a byte is missing"])
def test_documents_are_the_same_one_by_one_in_bulk_and_by_words(kind, template, monkeypatch):
    more = {"nfc": {"normalizer": normalizers.NFC()}, "head": {"post_processor": HEAD}}
    engine = engine_of(RULES["llama"], **more.get(kind, {"post_processor": AROUND} if kind == "around" else {}))
    engine.add_special_tokens([AddedToken(t, normalized=False) for t in ("<|im_start|>", "<|fin|>", "<|user|>")])
    if kind == "a byte is missing":
        source = json.loads(engine.to_str())
        source["model"]["vocab"] = {w: i for w, i in source["model"]["vocab"].items() if "Ð" not in w}
        engine = Tokenizer.from_str(json.dumps(source))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=engine, eos_token="<|im_end|>")
    answers = [text for text in (*ANSWERS, *texts(20, 1)) if text.strip()]
    turns = [(("user", "Question?\n"), ("assistant", a), ("user", b), ("assistant", b)) for a, b in pairwise(answers)]
    rows = [row(*some) for some in turns]
    rows += [part for text in answers for part in (Text(text), Completion(text, f"{text}."), Completion("Q: é", text))]
    rows.append(Chat((Message("user", "a"), Message("assistant", "b", reasoning="c"))))

    def made(start, train_on):
        monkeypatch.setattr(chat_template, "WORDS_FROM", start)
        tokens = Tokens(tokenizer, template)
        found = tokens.batch([(RowLocation(Path("f"), n), one) for n, one in enumerate(rows)], train_on)
        return [
            [(d.ids.tolist(), d.targets.tolist()) for d in one] if isinstance(one, tuple) else str(one) for one in found
        ]

    for train_on in ("assistant", "last", "all"):
        at_once, by_words = made(10**9, train_on), made(-1, train_on)
        with monkeypatch.context() as patch:
            patch.setattr(Tokens, "_located", lambda _, drafts, ids: [None] * len(drafts))
            assert made(10**9, train_on) == at_once == by_words


def test_words_serve_many_texts_alone(tiny_folder):
    tokens = Tokens(AutoTokenizer.from_pretrained(tiny_folder))
    rows = [(RowLocation(Path("f"), n), Text("soup")) for n in range(200)]
    tokens.batch(rows, "all")
    assert "_words" not in vars(tokens)
    tokens.batch(rows, "all")
    assert "_words" in vars(tokens)
