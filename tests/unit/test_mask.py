"""What a template leaves out or writes elsewhere is refused, and a call's end is not taken for its turn's."""

from types import SimpleNamespace

import pytest
from chats import CHATML, WHERE, bytelevel_bpe, learnt, row, talk
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from optrush.data import mask
from optrush.data.chat_template import Tokens
from optrush.data.schema import Chat, Completion, Message, Text, parse_row
from optrush.errors import DataError


@pytest.fixture(scope="module")
def bytelevel(tiny_folder):
    return bytelevel_bpe(tiny_folder)


@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
@pytest.mark.parametrize(("source", "lost"), [
    (CHATML.replace("in messages", "in messages[:2]"), r"messages\[2\] \(user\)"),
    (CHATML.replace("in messages", "in messages[2:]"), r"messages\[0\] \(user\)"),
    (CHATML.replace("message['content']", "(message['content'] if message['role'] != 'user' else '')"), "mess"),
])  # fmt: skip
def test_a_turn_that_a_template_leaves_out_is_an_error(bytelevel, source, lost, train_on):
    tokens = Tokens(bytelevel, source)
    if "[:2]" in source:  # what it does to other conversations says nothing
        tokens.document(talk(["a"]), train_on, WHERE)
    with pytest.raises(DataError, match=f"leaves out {lost}") as caught:
        tokens.document(talk(["a", "b"]), train_on, WHERE)
    assert "chat.jsonl:3" in caught.value.asked and "model.chat_template" in caught.value.do


def test_not_all_of_very_many_turns_that_are_left_out_are_named(bytelevel):
    with pytest.raises(DataError, match=r"messages\[2\] .*messages\[8\] \(user\), and 6 more$|and 6 more\ndo"):
        Tokens(bytelevel, CHATML.replace("in messages", "in messages[:2]")).document(talk("abcdefghijk"), "all", WHERE)


def test_tools_and_calls_that_a_template_leaves_out_are_an_error(bytelevel):
    call = {"type": "function", "function": {"name": "weigh", "arguments": {"what": "flour"}}}
    tool = {"type": "function", "function": {"name": "weigh"}}
    tokens = Tokens(bytelevel, CHATML)
    turns = (Message("user", "How much?"), Message("assistant", "Wait.", calls=(call,)))
    with pytest.raises(DataError, match=r"leaves out messages\[1\].tool_calls\[0\]"):
        tokens.document(Chat(turns), "all", WHERE)
    with pytest.raises(DataError, match=r"leaves out tools\[0\]"):
        tokens.document(Chat((turns[0], Message("assistant", "a")), (tool,)), "all", WHERE)


def test_a_number_that_a_template_leaves_out_is_an_error(bytelevel):
    said = "{{ m.tool_calls[0].function.name }}:{{ m.tool_calls[0].function.arguments.what }}"
    source = "{% for m in messages %}<|im_start|>{% if m.tool_calls %}" + said + "{% else %}{{ m.content }}{% endif %}"
    tokens = Tokens(bytelevel, source + "<|im_end|>{% endfor %}")

    def calling(**arguments):
        call = {"type": "function", "function": {"name": "weigh", "arguments": arguments}}
        return Chat((Message("user", "How much?"), Message("assistant", "", calls=(call,))))

    made = tokens.document(calling(what="flour"), "assistant", WHERE)
    assert learnt(tokens, made) == ["weigh:flour<|im_end|>"]
    with pytest.raises(DataError, match=r"12 of messages\[1\].tool_calls is left out"):
        tokens.document(calling(what="flour", grams=12), "assistant", WHERE)
    with pytest.raises(DataError, match=r"messages\[1\].tool_calls\[0\].function.arguments.how is left out"):
        tokens.document(calling(what="flour", how="by hand"), "assistant", WHERE)


CALLS = "{% for call in m.tool_calls %}{{ call.function.name }}|{{ call.function.arguments.what }}{END}{% endfor %}"


def weighing(*names):
    calls = tuple({"type": "function", "function": {"name": name, "arguments": {"what": "eggs"}}} for name in names)
    return Chat((Message("user", "How much?"), Message("assistant", "", calls=calls), Message("user", "Thanks.")))


def caller(tokenizer, called):
    source = (
        "{% for m in messages %}<|start_header_id|>{% if m.tool_calls %}{CALLED}{% else %}{{ m.content }}<|im_end|>"
    )
    return Tokens(tokenizer, source.replace("{CALLED}", called) + "{% endif %}{% endfor %}")


@pytest.mark.parametrize(
    ("called", "said"),
    [
        (CALLS.replace("{END}", "") + "<|im_end|>", "ab|eggs<|im_end|>"),  # as every answer ends
        (CALLS.replace("{END}", "<|eot_id|>") + "<|im_end|>", "ab|eggs<|eot_id|><|im_end|>"),
        (CALLS.replace("{END}", "") + "<|eot_id|>", "ab|eggs<|eot_id|>"),  # as turns with calls end, and no call
        (CALLS.replace("{END}", "<|eot_id|>"), None),  # each call ends, and the turn does not
        (CALLS.replace("{END}", ""), None),
    ],
)
def test_what_ends_a_call_does_not_pass_for_the_end_of_the_turn(bytelevel, called, said):
    tokens = caller(bytelevel, called)
    if said is None:
        with pytest.raises(DataError, match="not learn to stop"):
            tokens.document(weighing("ab"), "assistant", WHERE)
    else:
        assert learnt(tokens, tokens.document(weighing("ab"), "assistant", WHERE)) == [said]
        twice = learnt(tokens, tokens.document(weighing("ab", "cd"), "assistant", WHERE))
        assert len(twice) == 1 and twice[0].count("|eggs") == 2 and twice[0].endswith(said[-10:])


def test_a_template_that_writes_other_turns_into_a_call_is_refused(bytelevel):
    other = "{% if not messages[-1].tool_calls %}{{ messages[-1].content }}{% endif %}"
    tokens = caller(bytelevel, CALLS.replace("|", other).replace("{END}", "") + "<|im_end|>")
    with pytest.raises(DataError, match=r"later turns change how the template writes messages\[1\]") as caught:
        tokens.document(weighing("ab"), "assistant", WHERE)
    assert "data.train_on: last" in caught.value.do
    alone = Chat(weighing("ab").messages[:2])
    assert learnt(tokens, tokens.document(alone, "assistant", WHERE)) == ["abeggs<|im_end|>"]


def test_calls_nested_without_end_are_an_error(bytelevel):
    value = "eggs"
    for _ in range(5000):
        value = [value]
    call = {"type": "function", "function": {"name": "weigh", "arguments": {"what": value}}}
    chat = Chat((Message("user", "How much?"), Message("assistant", "", calls=(call,))))
    named = "{% for call in m.tool_calls %}{{ call.function.name }}{% endfor %}<|im_end|>"
    for called, found in ((CALLS, "RecursionError"), (named, "calls nested too deeply")):
        with pytest.raises(DataError, match=found) as caught:
            caller(bytelevel, called).document(chat, "assistant", WHERE)
        assert "chat.jsonl:3" in caught.value.asked


@pytest.mark.parametrize(("change", "wanted"), [
    ("| trim", [["1 2", "3"], ["1 2", "3"], ["a", "salt"]]),
    ("| replace('2', '2')", [["1 2", "3"], [" 1 2", "3"], ["a", "salt"]]),
    ("| replace('salt', 'pepper')", [["1 2", "3"], [" 1 2", "3"], "changes the assistant's text"]),
])  # fmt: skip
def test_what_a_template_does_to_one_text_only_is_seen_in_that_text(bytelevel, change, wanted):
    tokens = Tokens(bytelevel, CHATML.replace("message['content']", f"(message['content'] {change})"))
    chats = [talk(["1 2", "3"]), talk([" 1 2", "3"]), talk(["a", "salt"])]
    for made, texts in zip(tokens.batch([(WHERE, chat) for chat in chats], "assistant"), wanted, strict=True):
        if isinstance(made, DataError):
            assert texts in made.found
        else:
            assert learnt(tokens, made[0]) == [text + "<|im_end|>" for text in texts]


def test_very_many_answers_that_must_be_looked_at_one_by_one_are_an_error(bytelevel, monkeypatch):
    monkeypatch.setattr(mask, "MOST_TURNS", 2)
    lstripped = CHATML.replace("message['content']", "message['content'].lstrip()")
    tokens = Tokens(bytelevel, lstripped)
    assert learnt(tokens, tokens.document(talk([" a ", "b"]), "assistant", WHERE)) == ["a <|im_end|>", "b<|im_end|>"]
    with pytest.raises(DataError, match="3 answers with calls or trimmed texts; the limit is 2"):
        tokens.document(talk([" a ", "b", "c"]), "assistant", WHERE)


# --- conversations of a shape that was proven before

LONG = "Boil ten eggs for ten minutes."


def chatml(content, end=""):
    return "{% for m in messages %}<|im_start|>{{ m.role }}\n" + end + "{{ " + content + " }}<|im_end|>\n{% endfor %}"


def test_a_text_that_a_known_shape_changes_is_refused(bytelevel):
    tokens = Tokens(bytelevel, chatml("m.content if m.content | length < 20 else m.content | upper"))
    for _ in range(2):
        assert learnt(tokens, tokens.document(talk(["Eggs."]), "assistant", WHERE)) == ["Eggs.<|im_end|>"]
        with pytest.raises(DataError, match="changes the assistant's text"):
            tokens.document(talk([LONG]), "assistant", WHERE)


def test_white_space_that_a_known_shape_trims_is_not_learnt(bytelevel):
    tokens = Tokens(bytelevel, chatml("m.content | trim"))
    for answer in ("Eggs.", " Eggs.\n", "Eggs.\n\n"):
        assert learnt(tokens, tokens.document(talk([answer]), "assistant", WHERE)) == ["Eggs.<|im_end|>"]


def test_what_a_template_looks_for_is_looked_at_in_every_row(bytelevel):
    """It adds a text to an answer that no other follows, where a word is asked for: never in the whole conversation."""
    added = "{% if loop.last and loop.index == 2 and 'deep' in messages[0].content %}Hm. {% endif %}"
    tokens = Tokens(bytelevel, chatml("m.content", added))
    plain, deep = talk(["Eggs.", "Ham."]), talk(["Eggs.", "Ham."])
    deep = Chat((Message("user", "Think deep."), *deep.messages[1:]))
    for _ in range(2):
        assert learnt(tokens, tokens.document(plain, "assistant", WHERE)) == ["Eggs.<|im_end|>", "Ham.<|im_end|>"]
        with pytest.raises(DataError, match=r"later turns change how the template writes messages\[1\]"):
            tokens.document(deep, "assistant", WHERE)


def test_a_known_shape_is_rendered_once(bytelevel, monkeypatch):
    tokens, rendered = Tokens(bytelevel, CHATML), list[int]()
    tokens.document(talk(["Eggs."]), "assistant", WHERE)
    render = mask.Template.render
    monkeypatch.setattr(mask.Template, "render", lambda *given: (rendered.append(1), render(*given))[1])
    assert learnt(tokens, tokens.document(talk(["Soup."]), "assistant", WHERE)) == ["Soup.<|im_end|>"]
    assert len(rendered) == 1


# --- characters without a token


def lacking(unknown=None, kind="bpe"):
    """A tokenizer of small letters: other characters vanish, or become one token."""
    letters = {c: 10 + i for i, c in enumerate("abcdefghijklmnopqrstuvwxyz \n")}
    vocab = {"<|im_start|>": 0, "<|im_end|>": 1, **({unknown: 2} if unknown else {}), **letters}
    if kind == "unigram":
        engine = Tokenizer(models.Unigram([(piece, -1.0) for piece in vocab], unk_id=2))
    elif kind.startswith("bytes"):
        alphabet = sorted({*pre_tokenizers.ByteLevel.alphabet()} - {*"7éÃ"})
        vocab = {c: n for n, c in enumerate([*([unknown] if unknown else []), *alphabet])}
        engine = Tokenizer(models.BPE(vocab, [], unk_token=unknown, fuse_unk=kind.endswith("fused")))
        engine.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    else:
        engine = Tokenizer(models.BPE(vocab, [], unk_token=unknown))
    engine.add_special_tokens([AddedToken(t, normalized=False) for t in ("<|im_start|>", "<|im_end|>")])
    return Tokens(PreTrainedTokenizerFast(tokenizer_object=engine, eos_token="<|im_end|>"), CHATML)


@pytest.mark.parametrize(
    ("tokens", "lost"),
    [(lacking(), ",7é"), (lacking("<unk>"), ",7é"), (lacking("<unk>", "unigram"), ",7é"),
        (lacking(kind="bytes"), "7é"), (lacking("<unk>", "bytes"), "7é"), (lacking("?!", "bytes fused"), "7é"),
        (lacking("?", "bytes"), "7é"), (lacking("<|im_end|>", "bytes"), "7é")],
    ids=["vanish", "unknown", "unigram", "bytes", "bytes unknown", "bytes fused", "bytes one", "bytes end"],
)  # fmt: skip
def test_an_answer_that_loses_characters_is_a_bad_row(tokens, lost):
    for answer in ("it is 7, café", "so 7", "é"):
        for given in (row(("user", "a"), ("assistant", answer)), Completion("a", answer)):
            with pytest.raises(DataError, match="would lose characters") as caught:
                tokens.document(given, "last", WHERE)
            found = caught.value.found
            assert all((repr(c) in found) == (c in answer) for c in lost) and "remove the row" in caught.value.do
    assert tokens.lossy == 0
    asked = row(("system", "é7"), ("user", "it is 7"), ("assistant", "it is"))
    assert learnt(tokens, tokens.document(asked, "assistant", WHERE)) == [
        tokens.tokenizer.decode(tokens.tokenizer.encode("it is<|im_end|>", add_special_tokens=False))
    ]
    assert tokens.lossy == 1  # a prompt is counted alone
    tokens.document(Text("it is 7"), "assistant", WHERE)
    assert tokens.lossy == 2
    tokens.document(Text("it is"), "assistant", WHERE)
    assert tokens.lossy == 2


def test_offsets_behind_a_character_that_vanishes_are_not_trusted():
    template = CHATML.replace("<|im_start|>", "<|im_start|>É")
    tokens = Tokens(lacking().tokenizer, template)
    with pytest.raises(DataError, match="'É'"):
        tokens.document(row(("user", "a"), ("assistant", "it is")), "assistant", WHERE)
    with pytest.raises(DataError, match="'7'"):
        lacking().document(Completion("so 7 ", "it is"), "assistant", WHERE)


@pytest.mark.parametrize(
    "tokens",
    [lacking(kind="bytes"), lacking("<unk>", "bytes"), lacking(), lacking("<unk>"), lacking("<unk>", "unigram")],
    ids=["bytes", "bytes unknown", "vanish", "unknown", "unigram"],
)
def test_an_ordinary_text_is_not_looked_at_by_character(tokens, monkeypatch):
    looked = []
    fake = SimpleNamespace(category=lambda c: (looked.append(c), "Ll")[1], is_normalized=lambda *_: True)
    monkeypatch.setattr("optrush.data.chat_template.unicodedata", fake)
    monkeypatch.setattr("optrush.data.words.unicodedata", fake)
    for given in (row(("user", "a"), ("assistant", "soup " * 99)), Completion("a", "soup " * 99), Text("soup " * 99)):
        tokens.document(given, "assistant", WHERE)
    assert tokens.lossy == 0 and len(looked) == len({*looked})  # kept in memory


def test_a_vocabulary_that_lacks_bytes_needs_no_offsets(monkeypatch):
    tokens = lacking("<unk>", "bytes")
    assert tokens._head == []
    monkeypatch.setattr(tokens, "_engine", SimpleNamespace(encode_batch_fast=tokens._engine.encode_batch_fast))
    document = tokens.document(talk(["Soup."]), "assistant", WHERE)
    assert [run.replace(" ", "") for run in learnt(tokens, document)] == ["Soup.<|im_end|>"]


def test_what_is_not_written_is_not_missed(bytelevel):
    tokens = lacking()
    assert tokens.document(row(("user", "a"), ("assistant", "it\u200b is\t")), "assistant", WHERE)
    assert tokens.lossy == 0
    whole = Tokens(bytelevel, CHATML)
    assert whole.document(talk(["é 7 中 🙂"]), "assistant", WHERE) and not whole.lossy


@pytest.mark.parametrize("key", ["thinking", "reasoning", "reasoning_content"])
@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
def test_thoughts_that_a_template_leaves_out_are_refused_whatever_is_learnt(bytelevel, key, train_on):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", key: "Eggs boil."}]
    tokens = Tokens(bytelevel, CHATML)
    with pytest.raises(DataError, match=rf"messages\[1\]\.{key}\b") as caught:
        tokens.document(parse_row(WHERE, {"messages": turns}), train_on, WHERE)
    do = caught.value.do
    assert "<think>" in do and f"'messages[].{key}': ignore" in do and "train_on" not in do
    kept = CHATML.replace("message['content']", "(message.reasoning or '') + message['content']")
    assert kept != CHATML
    assert Tokens(bytelevel, kept).document(parse_row(WHERE, {"messages": turns}), "all", WHERE)
    first = [*turns, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]
    with pytest.raises(DataError, match=rf"messages\[1\]\.{key}"):
        tokens.document(parse_row(WHERE, {"messages": first}), "all", WHERE)
    inside = [turns[0], {"role": "assistant", "content": "<think>\nEggs boil.\n</think>\n\nb"}]
    assert tokens.document(parse_row(WHERE, {"messages": inside}), train_on, WHERE)


QWEN = CHATML.replace(
    "message['content']",
    "('<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' if message.reasoning_content else '')"
    " + message['content']",
)
APART = CHATML.replace(
    "message['content']",
    "('(thinks) ' + message.thinking + ' (says) ' if message.thinking else '') + message['content']",
)


THINKING_TURNS = {
    "in the content": ({"content": "<think>\nTwo and two.\n</think>\n\nFour."}, CHATML, "Four.<|im_end|>"),
    "without marks": ({"content": "Four."}, CHATML, "Four.<|im_end|>"),
    "mark named later": ({"content": "Write <think> first."}, CHATML, "Write <think> first.<|im_end|>"),
    "only the end": ({"content": "Two and two.\n</think>\n\nFour."}, CHATML, "Four.<|im_end|>"),
    "a mark in the answer": ({"content": "<think>a</think>b </think> c"}, CHATML, "b </think> c<|im_end|>"),
    "no answer": ({"content": "<think>a</think>"}, CHATML, "<|im_end|>"),
    "apart, with marks": ({"content": "Four.", "reasoning_content": "Two and two."}, QWEN, "Four.<|im_end|>"),
    "apart, none": ({"content": "Four."}, QWEN, "Four.<|im_end|>"),
    "apart, the same words": ({"content": "Four.", "reasoning_content": "Four. Four."}, QWEN, "Four.<|im_end|>"),
    "other marks": ({"content": "Four.", "thinking": "Two and two."}, APART, "Four.<|im_end|>"),
}  # fmt: skip


@pytest.mark.parametrize("kind", THINKING_TURNS)
def test_thoughts_are_read_and_not_learnt(bytelevel, kind):
    turn, template, wanted = THINKING_TURNS[kind]
    tokens = Tokens(bytelevel, template)
    turns = [{"role": "user", "content": "How many?"}, {"role": "assistant", **turn}]
    made = tokens.document(parse_row(WHERE, {"messages": turns}), "answer", WHERE)
    assert [text.lstrip() for text in learnt(tokens, made)] == [wanted]
    assert len(made) == len(tokens.document(parse_row(WHERE, {"messages": turns}), "assistant", WHERE)), "they are read"
    both = [*turns, {"role": "user", "content": "And?"}, {"role": "assistant", "content": "<think>x</think>No."}]
    made = tokens.document(parse_row(WHERE, {"messages": both}), "last-answer", WHERE)
    assert learnt(tokens, made) == ["No.<|im_end|>"]


def test_thoughts_of_plain_texts(bytelevel):
    tokens = Tokens(bytelevel, CHATML)
    made = tokens.document(Completion("How many? ", "<think>Two.</think> Four."), "answer", WHERE)
    assert learnt(tokens, made)[0].lstrip().startswith("Four.")


def test_thoughts_without_an_end(bytelevel):
    tokens = Tokens(bytelevel, CHATML)
    chat = Chat((Message("user", "How many?"), Message("assistant", "<think>Two and")))
    with pytest.raises(DataError, match=r"messages\[1\] begins with <think>"):
        tokens.document(chat, "answer", WHERE)
    assert tokens.document(chat, "assistant", WHERE)
