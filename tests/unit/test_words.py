"""Ids that are made word by word are the tokenizer's own, whatever the text; what cannot be told is left to it."""

import random
import unicodedata

import pytest
from chats import ANSWERS, CHATML, WHERE, talk
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from optrush.data import chat_template, words
from optrush.data.chat_template import Tokens
from optrush.data.schema import Completion, Pair, Text
from optrush.data.words import GPT2, Unknown, Words

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
THREE = [  # one after the other; the second leaves most of a text uncut
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
]
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TRAINED = [
    "It's the end of the street, isn't it? I'LL go.  ",
    "naïve café, 1234567 eggs\r\n\r\n",
    "中文字 ひらがな 🙂 <s",
] * 20


def bytelevel(regex=False):
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)


def splits(*patterns):
    return pre_tokenizers.Sequence([*(pre_tokenizers.Split(Regex(p), "isolated") for p in patterns), bytelevel()])


CUTS = {
    "gpt2": lambda: bytelevel(True),
    "gpt2 said": lambda: splits(GPT2),
    "llama3": lambda: splits(LLAMA3),
    "qwen2": lambda: splits(QWEN2),
    "o200k": lambda: splits(O200K),
    "three": lambda: splits(*THREE),
    "digits": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytelevel(True)]),
    "numbers": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=False), bytelevel(True)]),
    "gaps": lambda: splits(r"(ab|a)(?=b)|[x-z]{2}"),  # and nothing else
}


def trained(cut, *tokens, special=SPECIAL):
    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer, engine.decoder = cut, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    engine.train_from_iterator(TRAINED, trainer)
    engine.add_tokens(list(tokens))
    return engine


def words_of(engine, text):
    """Where the library cuts: ids alone seldom tell, for few merges reach over a cut."""
    return [text[a:b] for _, (a, b) in engine.pre_tokenizer.pre_tokenize_str(text)]


def texts(n):
    """All characters that a text can hold, and many that make a difference."""
    draw = random.Random(1)
    usual = [*"abeilLstxyz  \n.,'", "'s", "'LL", "'ſ", "\r\n", "  ", "12", "\t", "é", "e\u0301", "🙂", "中", *SPECIAL]
    low, emoji, high = range(0xD800), range(0x1F300, 0x1FB00), [*range(0xE000, 0x110000)]
    every = [usual, [*map(chr, range(0x250))], [*usual, *map(chr, emoji)], [*map(chr, low)], None]
    for k in range(n):
        pools = every[: 2 + k % 4]
        found = ""
        for _ in range(draw.randrange(60)):
            pool = draw.choice(pools)
            found += draw.choice(pool) if pool else chr(draw.choice(high))
        yield found


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("nfc", [False, True])
def test_the_ids_are_the_tokenizers_own(name, nfc):
    engine = trained(CUTS[name]())
    if nfc:
        engine.normalizer = normalizers.NFC()
    made, told = Words(engine), 0
    for text in ["", *texts(400)]:
        for special in (False, True):
            ids = made.ids(text, special)
            if ids is not None:
                told += 1
                assert made._plain(text) == words_of(engine, text), ascii(text)
                assert ids.tolist() == engine.encode(text, add_special_tokens=special).ids, ascii(text)
    assert told > 250


def test_each_character_alone_and_between_letters():
    engine = trained(CUTS["llama3"]())
    made = Words(engine)
    for n in range(0, 0xD800, 64):
        text = "".join(
            f"{chr(c)}a {chr(c)}{chr(c)}'s" for c in range(n, n + 64) if unicodedata.category(chr(c)) != "Cn"
        )
        assert made.ids(text, False).tolist() == engine.encode(text).ids, n
        assert made._plain(text) == words_of(engine, text), n


def test_characters_that_were_not_asked_about_are_left_to_the_library():
    engine = trained(CUTS["llama3"]())
    assert Words(engine).ids("a\U00020000b", False) is None  # a letter, but which of them are?
    assert Words(engine).ids("a\u0378b", False) is None  # no character yet
    assert Words(engine).ids("e\u0301", False) is not None
    engine.normalizer = normalizers.NFC()
    assert Words(engine).ids("e\u0301", False) is None
    assert Words(engine).ids("é", False) is not None


def test_added_tokens_are_cut_out_first_and_the_longest_wins():
    engine = trained(CUTS["gpt2"](), AddedToken("<|im", normalized=False), AddedToken("tree", normalized=True))
    engine.add_tokens([AddedToken("street", normalized=False), AddedToken("trees s", normalized=True)])
    made = Words(engine)
    for text in ("street trees street", "a<|im<|im_start|>b<|im_end|><|im_en", "<s><s></s>", "treetrees stre", "trees"):
        assert made.ids(text, False).tolist() == engine.encode(text, add_special_tokens=False).ids
    assert len(made.ids("street", False)) == len(made.ids("tree", False)) == 1


def test_what_is_written_around_a_text_belongs_to_it():
    engine = trained(CUTS["gpt2"]())
    engine.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing("<s> <s> $A </s>", "$A $B", [("<s>", 0), ("</s>", 1)]),
        ]
    )
    made = Words(engine)
    for text in ("It's", "", "<s>"):
        assert made.ids(text, True).tolist() == engine.encode(text).ids
        assert made.ids(text, False).tolist() == engine.encode(text, add_special_tokens=False).ids


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(words, "MOST_WORDS", 12)
    monkeypatch.setattr(words, "LONGEST_WORD_chars", 5)
    engine = trained(CUTS["gpt2"]())
    made = Words(engine)
    for text in texts(300):
        ids = made.ids(text, False)
        assert ids is None or ids.tolist() == engine.encode(text).ids
        assert len(made._known) <= 12 and max(len(w) for w in made._known if w not in SPECIAL) <= 5


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (r"^\w+", r"\^"), (r".+", r"\."), (r"\bx", "x in its|bx"), (r"(?<=a)b", r"\?<=a"), (r"[[:alpha:]]+", "alpha"),
        (r"[a-z&&[^b]]+", "&&"), (r"(?i:ss)|\S+", "ss in either case"), (r"(?i:[a-z])+", "either case"),
        (r"x{2}+", r"\{2\}"), (r"\p{L}*", "matches nothing"), (r"[\x{1F600}]+", "emoji"), (r"(a)\1", r"\\1"),
        (r"a$", r"\$"), (r"(?i)a", r"\(\?i\)"),
    ],
)  # fmt: skip
def test_expressions_that_could_mean_another_thing_are_left_to_the_library(pattern, why):
    with pytest.raises(Unknown, match=why):
        Words(trained(splits(pattern)))


@pytest.mark.parametrize(
    "change",
    [
        lambda e: e.add_tokens([AddedToken("<x>", rstrip=True)]),
        lambda e: e.add_tokens([AddedToken("<x>", lstrip=True)]),
        lambda e: e.add_tokens([AddedToken("<x>", single_word=True)]),
        lambda e: e.add_tokens([AddedToken("<e\u0301>", normalized=True)]),
        lambda e: setattr(e, "encode_special_tokens", True),
        lambda e: setattr(e.model, "dropout", 0.1),
        lambda e: setattr(e, "pre_tokenizer", pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), bytelevel()])),
        lambda e: setattr(e, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda e: setattr(e, "pre_tokenizer", pre_tokenizers.Sequence([bytelevel(), bytelevel()])),
        lambda e: setattr(
            e, "pre_tokenizer", pre_tokenizers.Sequence([pre_tokenizers.Split(Regex("a"), "removed"), bytelevel()])
        ),
        lambda e: setattr(
            e,
            "pre_tokenizer",
            pre_tokenizers.Sequence([pre_tokenizers.Split(Regex("a"), "isolated", True), bytelevel()]),
        ),
    ],
)
def test_tokenizers_that_do_more_than_cut_are_left_to_the_library(change):
    engine = trained(CUTS["gpt2"]())
    Words(engine)
    change(engine)
    with pytest.raises(Unknown):
        Words(engine)


def test_a_sample_that_comes_out_otherwise_is_seen_at_the_beginning(monkeypatch):
    monkeypatch.setattr(words, "_translated", lambda source: words.re.compile(r"(\w+| +)"))
    with pytest.raises(Unknown, match="sample"):
        Words(trained(CUTS["llama3"]()))


# --- as the rows of a run are tokenised


@pytest.fixture
def tokenizer():
    made = PreTrainedTokenizerFast(tokenizer_object=trained(CUTS["llama3"]()), eos_token="</s>")
    made.chat_template = CHATML
    return made


def rows():
    found = [Text("Two eggs."), talk(ANSWERS, "Be kind."), Completion("Two eggs,", " and salt."), talk(["🙂", "a b "])]
    found += [Text("a\U00020000b"), Text("Salt.</s>"), Pair(talk(["yes"]), talk(["no \U00020000"]))]
    return [(WHERE, row) for row in found]


@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
def test_documents_are_the_same_with_and_without(tokenizer, train_on, monkeypatch):
    slow = Tokens(tokenizer)
    before = slow.batch(rows(), train_on)
    assert slow._words is None, "it was not worth it yet"
    monkeypatch.setattr(chat_template, "WORDS_chars", 0)
    fast = Tokens(tokenizer)
    after = fast.batch(rows(), train_on)
    assert fast._words is not None
    for ours, theirs in zip(after, before, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.ids.tolist() == other.ids.tolist() and one.targets.tolist() == other.targets.tolist()
            assert one.ids.dtype == other.ids.dtype and one.ids.flags.writeable


def test_it_is_asked_for_once_there_is_much_text(tokenizer):
    tokens = Tokens(tokenizer)
    for _ in range(3):
        tokens.batch([(WHERE, Text("Two eggs and some salt. " * 2**15))], "all")
    assert tokens._words is not None


def test_one_row_of_each_batch_is_compared_with_the_tokenizers_own(tokenizer, monkeypatch):
    monkeypatch.setattr(chat_template, "WORDS_chars", 0)
    tokens = Tokens(tokenizer)
    tokens.batch(rows(), "all")
    tokens._words._known["Two"] = tokens._words._known["eggs"]
    with pytest.raises(AssertionError, match=r"chat.jsonl:3 are not the tokenizer's own"):
        tokens.batch(rows(), "all")


def test_a_tokenizer_that_cannot_be_told_is_asked_once(tokenizer, monkeypatch):
    monkeypatch.setattr(chat_template, "WORDS_chars", 0)
    asked = []

    def refuse(engine):
        asked.append(engine)
        raise Unknown("no")

    monkeypatch.setattr(chat_template, "Words", refuse)
    tokens = Tokens(tokenizer)
    for _ in range(2):
        assert not any(isinstance(made, Exception) for made in tokens.batch(rows(), "all"))
    assert len(asked) == 1


@pytest.mark.parametrize("pattern", [r"\s*(?=\n)|\n| ?\p{L}+|[^\p{L}]", r"\p{N}*(?=\p{L})| ?\p{L}+|[^\p{L}]"])
def test_expressions_that_match_nothing_are_left_to_the_library(pattern):
    with pytest.raises(Unknown, match="matches nothing"):
        Words(trained(splits(pattern)))


def test_words_that_do_not_come_again_are_given_up(tokenizer, monkeypatch):
    """The ids are the same; only who makes them changes."""
    monkeypatch.setattr(words, "ENOUGH_WORDS", 200)
    monkeypatch.setattr(chat_template, "WORDS_chars", 0)
    draw = random.Random(3)
    new = ["".join(draw.choice("abcdefgh") for _ in range(30)) + " x" for _ in range(300)]
    for texts, kept in ((new, False), (["the same words again and again"] * 300, True)):
        tokens = Tokens(tokenizer)
        want = [tokenizer(t).input_ids for t in texts]
        for _ in range(2):
            made = tokens.batch([(WHERE, Text(t)) for t in texts], "all")
            assert [m[0].ids[: len(w)].tolist() for m, w in zip(made, want)] == want
        assert (tokens._words is not None) == kept
