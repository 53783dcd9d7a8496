"""What is looked at before step 0: each doubt is an error that shows a row; data without one passes."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from optrush.data.chat_template import Tokens
from optrush.data.dataset import SAMPLES, probe_rows
from optrush.data.schema import Chat, Completion, Document, Message, Pair, RowLocation, Text
from optrush.errors import DataError
from optrush.models import tiny

# As Qwen3's: an empty thought before the last answer, none before earlier ones.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if loop.last and m['role'] == 'assistant' %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
)
# As Phi-3's: the end of the text behind the last turn, which changes no turn.
ENDED = tiny.TEMPLATE + "{{ eos_token }}"


@pytest.fixture(scope="module")
def tokenizer(tiny_folder):
    return AutoTokenizer.from_pretrained(tiny_folder)


def talk(*answers):
    turns = []
    for answer in answers:
        turns += [Message("user", "How\tmany eggs?"), Message("assistant", answer)]
    return Chat(tuple(turns))


def look(tokens, rows, train_on="assistant", *, cut=lambda documents: documents, truncated=0, most=0.1):
    """Probes the rows, their documents cut as the run would."""
    samples = [(RowLocation(Path("d.jsonl"), n + 1), row) for n, row in enumerate(rows)]
    made = [() if isinstance(found, DataError) else cut(found) for found in tokens.batch(samples, train_on)]
    probe_rows(samples, made, tokens, train_on, rows=len(rows), truncated=truncated, most_truncated=most)


def masked(tokens, rows):
    """Raises the first row's error, as each row is masked."""
    for found in tokens.batch([(RowLocation(Path("d.jsonl"), n + 1), row) for n, row in enumerate(rows)], "assistant"):
        if isinstance(found, DataError):
            raise found


def shorter(n):
    return lambda documents: tuple(Document(d.ids[:n], d.targets[:n]) for d in documents)


@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
@pytest.mark.parametrize("template", [None, ENDED])
def test_sound_data_passes(tokenizer, train_on, template):
    tokens = Tokens(tokenizer, template)
    rows = [talk("Two."), talk("Two.", "Three."), Text("Two eggs."), Completion("Two ", "eggs.")]
    look(tokens, [*rows, Pair(talk("Two."), talk("Three."))], train_on)
    look(tokens, [], train_on)
    assert SAMPLES == 200


def test_nothing_to_learn(tokenizer):
    with pytest.raises(DataError, match="they have no target token") as caught:
        look(Tokens(tokenizer), [talk("Two."), talk("Three.")], cut=shorter(5))
    assert "first 2 rows" in caught.value.asked and "batch.seq" in caught.value.do
    assert "at d.jsonl:1: '<|bos|><|im_start|>user\\n" in caught.value.found, "control characters are written out"
    with pytest.raises(DataError, match=r"the first, at d.jsonl:1: .*How\\tmany eggs"):
        look(Tokens(tokenizer), [talk("Two.")], cut=lambda documents: ())


def test_a_long_sample_is_shortened(tokenizer):
    with pytest.raises(DataError) as caught:
        look(Tokens(tokenizer), [talk("egg " * 500)], cut=lambda documents: ())
    assert len(caught.value.found) < 600 and " ... " in caught.value.found


BARE = "{{ bos_token }}{% for m in messages %}{{ m['content'] + '<|im_end|>' }}{% endfor %}"


@pytest.mark.parametrize(("row", "template", "who"), [
    (Text("<|bos|>Two eggs."), None, "tokenizer"), (Completion("<|bos|>Two ", "eggs."), None, "tokenizer"),
    (talk("Two."), "{{ bos_token }}" + tiny.TEMPLATE, "chat template"),
    (talk("Two."), "{{ bos_token }}" + BARE, "chat template"),
    (Pair(talk("Two."), talk("Three.")), "{{ bos_token }}" + tiny.TEMPLATE, "chat template"),
])  # fmt: skip
def test_two_bos(tokenizer, row, template, who):
    with pytest.raises(DataError, match=r"two of them; at d.jsonl:2: '<\|bos\|><\|bos\|>") as caught:
        masked(Tokens(tokenizer, template), [Completion("Two ", "eggs."), row])
    assert caught.value.asked == "to begin a document with one <|bos|>" and f"the {who} adds one" in caught.value.do


def test_a_template_that_changes_earlier_turns(tokenizer):
    tokens = Tokens(tokenizer, THINKING)
    look(tokens, [talk("Two.")])
    look(tokens, [talk("Two.", "Three.")], "last")
    with pytest.raises(DataError) as caught:
        masked(tokens, [talk("Two."), talk("Two.", "Three.")])
    assert "conversation at d.jsonl:2" in caught.value.asked
    assert (
        r"writes messages[1]: '<think>\n\n</think>\n\nTwo.<|im_end|>' becomes 'Two.<|im_end|>\n<" in caught.value.found
    )
    assert "data.train_on: last" in caught.value.do and "model.chat_template" in caught.value.do
    with pytest.raises(DataError, match=r"writes messages\[1\]"):
        masked(tokens, [Pair(talk("Two."), talk("Two.", "Three."))])


def test_a_row_that_cannot_be_masked_is_not_looked_at(tokenizer):
    tokens = Tokens(tokenizer, tiny.TEMPLATE.replace("message['content']", "message['content'] | replace('x', 'y')"))
    look(tokens, [talk("x", "x"), talk("Two.")])


def test_too_many_truncated(tokenizer):
    tokens = Tokens(tokenizer)
    long = talk("Two eggs and a little salt and pepper.")
    rows = [talk("Two."), long]
    look(tokens, rows, truncated=1, most=0.5)
    with pytest.raises(DataError) as caught:
        look(tokens, rows, cut=lambda d: shorter(16)(d) if len(d[0]) > 30 else d, truncated=1, most=0.1)
    assert caught.value.asked == "at most 10.0% of the rows without their end (data.most_truncated)"
    assert "1 of 2 rows (50.0%)" in caught.value.found and "one, at d.jsonl:2: '<|bos|>" in caught.value.found
    assert "data.too_long" in caught.value.do
    with pytest.raises(DataError) as caught:
        look(tokens, [talk("Two.")] * 2, truncated=1)  # none of the samples is
    assert caught.value.found == "1 of 2 rows (50.0%) are longer than batch.seq and truncated"


def endless(documents):
    """Without the last two tokens of each that is long."""
    return tuple(Document(d.ids[:-2], d.targets[:-2]) if len(d) > 36 else d for d in documents)


@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
@pytest.mark.parametrize(("row", "stop"), [
    (Chat((Message("assistant", "eggs and salt " * 9),)), "<|im_end|>"),
    (Completion("Two ", "eggs and salt " * 9), "<|eos|>"),
])  # fmt: skip
def test_an_end_of_turn_that_is_never_learnt(tokenizer, train_on, row, stop):
    tokens = Tokens(tokenizer)
    with pytest.raises(DataError) as caught:
        look(tokens, [row, Text("Two eggs " * 20)], train_on, cut=endless)
    assert caught.value.asked == f"to learn to stop with {stop} at the end of answers"
    assert "none of the first 2 rows; one, at d.jsonl:1" in caught.value.found and "batch.seq" in caught.value.do
    look(tokens, [row, talk("Two."), Completion("a", "b")], train_on, cut=endless)
