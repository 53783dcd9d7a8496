"""From a row to token ids and a mask of what is learnt, through the model's own chat template, without guessing.

Which characters the assistant wrote cannot be asked of a template, so the conversation is rendered twice: once really,
once with each assistant text replaced by a sentinel. What lies between the sentinels is the template's; the real render
must be those pieces with the texts between them, character by character, or the row is refused. From characters to
tokens the tokenizer's offsets lead. A mask that is empty, complete or shifted trains a wrong model without a sign;
hence every doubt here is an error with the row's place.
"""

from __future__ import annotations

import datetime
import re
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
from jinja2.exceptions import TemplateError

from optrush.data.batch import Document
from optrush.data.read import Chat, Row, Text, Where
from optrush.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

TRAIN_ON = ("assistant", "last", "all")
LONGEST_TEMPLATE_bytes = 64 * 2**10
LONGEST_RENDER_chars = 32 * 2**20
# What an expression of a template can raise besides jinja's own errors.
RENDERING = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
CHANGED = "the template changes the assistant's text, so it cannot be masked"
NO_STOP = "no end-of-turn token follows the assistant's text: the model would never learn to stop"
MEND = "give another template (model.chat_template), or train on all tokens (data.train_on: all)"
MEND_TEMPLATE = "mend the row, or give another template (model.chat_template)"

Span = tuple[int, int]  # characters [start, end) of the rendered text


class Encoded(NamedTuple):
    """A text, its token ids, and the characters [starts, ends) that each token covers."""

    text: str
    ids: list[int]
    starts: np.ndarray
    ends: np.ndarray


class Tokens:
    """A tokenizer with its chat template: rows in, documents out.

    Args:
        tokenizer: a fast tokenizer (the slow ones have no offsets).
        template: source of a chat template to use instead of the tokenizer's own.
        today: the date for templates that write it into the system prompt; None is the real one, with which the
            same row gives other ids tomorrow.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: str | None = None, today: datetime.date | None = None
    ) -> None:
        if not tokenizer.is_fast:
            raise DataError(
                f"the tokenizer of {tokenizer.name_or_path or 'the model'}",
                "a slow tokenizer, which cannot tell where in a text its tokens lie",
                "use a model folder with a tokenizer.json",
            )
        self.tokenizer = tokenizer
        self._given = template
        self._today = today
        self._raw = _without_postprocessing(tokenizer)
        added = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items()}
        # Some vocabularies list runs of spaces or newlines as added tokens; those end no turn.
        self._marks = frozenset(i for i, text in added.items() if text.replace("▁", " ").strip())

    def document(self, row: Row, train_on: str, where: Where) -> Document:
        """The row's token ids and which of them are learnt; DataError with the row's place if none would be."""
        assert train_on in TRAIN_ON, train_on
        if isinstance(row, Text):
            ids = self._text(row, where)
            targets = np.ones(len(ids), bool)
        else:
            ids, targets = self._chat(row, train_on, where)
        targets[:1] = False
        if not targets.any():
            raise DataError(f"to learn from the row at {where}", "not one token of it would be learnt", "take it out")
        return Document(np.asarray(ids, np.int32), targets)

    def template(self) -> str:
        """The chat template's source; DataError where there is none, or a monstrous one."""
        try:
            source = self.tokenizer.get_chat_template(self._given)
        except ValueError as error:
            raise DataError(
                "training on messages",
                "the tokenizer has no chat template, or several and no default",
                "give one: model.chat_template: FILE.jinja",
            ) from error
        size = len(source.encode())
        if size > LONGEST_TEMPLATE_bytes:
            raise DataError(
                "the chat template",
                f"{size} bytes; at most {LONGEST_TEMPLATE_bytes} are taken",
                "give a shorter one: model.chat_template: FILE.jinja",
            )
        return source if self._today is None else _dated(source, self._today)

    def _text(self, row: Text, where: Where) -> list[int]:
        ids = cast(list[int], self.tokenizer(row.text, add_special_tokens=True, verbose=False)["input_ids"])
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise DataError(
                f"the text at {where} with its end marked",
                "the tokenizer has no end-of-text token (eos_token)",
                "set eos_token in tokenizer_config.json",
            )
        return ids if ids and ids[-1] == eos else [*ids, cast(int, eos)]

    def _chat(self, row: Chat, train_on: str, where: Where) -> tuple[list[int], np.ndarray]:
        turns = [(message.role, message.content) for message in row.messages]
        encoded = self._encode(self._render(turns, where))
        if train_on == "all":
            return encoded.ids, np.ones(len(encoded.ids), bool)
        spans = self._spans(turns, encoded.text, where)
        stop = self._stop(turns, encoded, spans, where)
        targets = np.zeros(len(encoded.ids), bool)
        for start, end in spans[-1:] if train_on == "last" else spans:
            last = self._ending(encoded, end, stop, where)
            targets[self._beginning(encoded, start, last) : last + 1] = True
        return encoded.ids, targets

    def _stop(self, turns: list[tuple[str, str]], encoded: Encoded, spans: list[Span], where: Where) -> int:
        """The id of the end-of-turn token: the one after the last assistant's text where no other turn follows.

        What stands before another turn may be that turn's header, which must not pass for an end.
        """
        last = max(i for i, (role, _) in enumerate(turns) if role == "assistant")
        if last + 1 < len(turns):
            turns = turns[: last + 1]
            encoded = self._encode(self._render(turns, where))
            spans = self._spans(turns, encoded.text, where)
        return encoded.ids[self._ending(encoded, spans[-1][1], None, where)]

    def _render(self, turns: list[tuple[str, str]], where: Where) -> str:
        template = self.template()
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            rendered = self.tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
        except RENDERING as error:
            found = f"the chat template failed: {type(error).__name__}: {error}"
            raise DataError(f"to render the messages at {where}", found, MEND_TEMPLATE) from error
        assert isinstance(rendered, str)
        if len(rendered) > LONGEST_RENDER_chars:
            found = f"the chat template made {len(rendered)} characters; at most {LONGEST_RENDER_chars} are taken"
            raise DataError(f"to render the messages at {where}", found, MEND_TEMPLATE)
        return rendered

    def _encode(self, text: str) -> Encoded:
        encoding = self._raw.encode(text, add_special_tokens=False)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        return Encoded(text, encoding.ids, offsets[:, 0], offsets[:, 1])

    def _spans(self, turns: list[tuple[str, str]], rendered: str, where: Where) -> list[Span]:
        """Where in the rendered text the assistant's texts lie."""
        opening, closing = _unused(rendered)
        texts = [content for role, content in turns if role == "assistant"]
        marks = [f"{opening}{i}{closing}" for i in range(len(texts))]
        left = iter(marks)
        marked = [(role, next(left) if role == "assistant" else content) for role, content in turns]
        separators = _cut(self._render(marked, where), marks)
        spans = separators and _align(rendered, separators, texts)
        if not spans:
            raise DataError(f"to mask the messages at {where}", CHANGED, MEND)
        return spans

    def _beginning(self, encoded: Encoded, start: int, last: int) -> int:
        """The first token, at most `last`, of a text that begins at the character `start`."""
        first = int(np.argmax(encoded.ends > start))
        # A header's mark that swallows white space (`rstrip`) can reach into the text; it is the header's still.
        while first < last and encoded.starts[first] < start and encoded.ids[first] in self._marks:
            first += 1
        return first

    def _ending(self, encoded: Encoded, end: int, stop: int | None, where: Where) -> int:
        """The token that ends a turn whose text ends at the character `end`: `stop`, or any mark if that is None.

        It begins where the text ends, or a little earlier if it swallows white space (`lstrip`). White space may lie
        between (some templates write one space before it); the caller has that learnt too, or the model could not
        reach the end by itself.
        """
        at = int(np.argmax(encoded.ends > end))
        while at < len(encoded.ids) and encoded.ends[at] > end:
            if encoded.ids[at] in self._marks:
                if stop is None or encoded.ids[at] == stop:
                    return at
                break
            if encoded.text[end : encoded.ends[at]].strip():
                break
            at += 1
        raise DataError(f"to mask the messages at {where}", NO_STOP, MEND)


def _dated(source: str, today: datetime.date) -> str:
    """The template with its calls for the date answered: the sandbox lets no function of ours in."""

    def answer(call: re.Match[str]) -> str:
        return f"{call[1]}{today.strftime(call[2])}{call[1]}"

    return re.sub(r"""\bstrftime_now\(\s*(["'])([^"'\\]*)\1\s*\)""", answer, source)


def _without_postprocessing(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """A private copy of the tokenizer's engine whose offsets are exact.

    Byte-level post-processors trim white space off the offsets, so that a token of spaces seems to cover nothing. They
    change no ids once special tokens are off.
    """
    from tokenizers import Tokenizer, processors

    engine = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    engine.post_processor = processors.Sequence([])
    engine.no_truncation()
    engine.no_padding()
    return engine


def _unused(text: str) -> tuple[str, str]:
    """Two private-use characters that do not occur in the text."""
    used = set(text)
    free = (chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in used)
    return next(free), next(free)


def _cut(marked: str, marks: list[str]) -> list[str]:
    """The pieces around the marks, or nothing if they do not all stand there once and in order."""
    pieces: list[str] = []
    at = 0
    for mark in marks:
        found = marked.find(mark, at)
        if found < 0 or marked.count(mark) != 1:
            return []
        pieces.append(marked[at:found])
        at = found + len(mark)
    return [*pieces, marked[at:]]


def _align(rendered: str, separators: list[str], texts: list[str]) -> list[Span]:
    """Spans of the texts, as they are or stripped, such that pieces and texts make up the rendered text exactly.

    All ways are followed at once; where two of them meet the answer would be a guess, and there is none.
    """
    if not rendered.startswith(separators[0]):
        return []
    ways: dict[int, list[Span]] = {len(separators[0]): []}
    for text, separator in zip(texts, separators[1:], strict=True):
        onward: dict[int, list[Span]] = {}
        for at, spans in ways.items():
            for form in {text, text.strip(), text.lstrip(), text.rstrip()}:
                if rendered.startswith(form + separator, at):
                    end = at + len(form)
                    if end + len(separator) in onward:
                        return []
                    onward[end + len(separator)] = [*spans, (at, end)]
        ways = onward
    return ways.get(len(rendered), [])
