"""From rows to token ids and a mask of what is learnt, through the model's own chat template, without guessing.

A mask that is empty, complete or shifted trains a wrong model without a sign; hence every doubt here is an error with
the row's place. Which characters the assistant wrote is proven in mask.py; from characters to tokens the tokenizer's
offsets lead. All texts of many rows go to the tokenizer at once, which is where the time goes.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from unicodedata import is_normalized

import numpy as np

from optrush.data import forged, mask, rows
from optrush.data.document import Document
from optrush.data.rows import Chat, Completion, Message, Pair, Row, Text, Where
from optrush.data.template import Template
from optrush.data.words import Unknown, Words
from optrush.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerBase

TRAIN_ON = ("assistant", "last", "all")
LONGEST_TEMPLATE_bytes = 64 * 2**10
REASONING_MARKS = frozenset({"<think>", "</think>"})  # tokens that an answer's text may hold
WORDS_chars = 1 << 20  # of text that are tokenised before it is worth a moment to find out how to do it faster
# Parts of a tokenizer that cut a text, or compose its characters (NFC), and change nothing else.
CUTTING = {"Sequence", "Split", "ByteLevel", "Digits", "Punctuation"}
COMPOSING = {"Sequence", "NFC"}


class _Draft(NamedTuple):
    """A row's text before it is tokenised, and the characters that are learnt of it."""

    where: Where
    text: str
    special: bool  # the tokenizer's special tokens belong around it: the template writes none
    seam: int = 0  # learnt from this character on
    spans: tuple[mask.Span, ...] = ()  # learnt, or not learnt where all else is
    rest: bool = True  # whether what lies outside of the spans is learnt


class _Ids(NamedTuple):
    """A text's tokens, and what the library said of them if it was asked."""

    ids: np.ndarray  # (n,) int32
    encoding: Encoding | None


class _Laid(NamedTuple):
    """A text's tokens and what of it each covers, counted in characters, or in bytes where the text is bytes."""

    text: str | bytes
    ids: np.ndarray  # (n,) int32
    starts: np.ndarray  # (n,) int64
    ends: np.ndarray  # (n,) int64

    def at(self, character: int, text: str) -> int:
        """The place of a character of the text."""
        return character if isinstance(self.text, str) else len(text[:character].encode())

    def token(self, at: int) -> int:
        """The first token that ends behind a place; as many as there are tokens if none does."""
        return int(self.ends.searchsorted(at, "right"))


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
        self._engine = _engine(tokenizer)
        self._sizes = _token_bytes(self._engine)
        self._words: Words | None = None
        self._until_words = WORDS_chars if self._sizes is not None else None  # characters; None: not to be asked again
        self._eos = cast("int | None", tokenizer.eos_token_id)
        self._end = "" if self._eos is None else str(tokenizer.convert_ids_to_tokens(self._eos))
        self._added = {str(token): i for i, token in tokenizer.added_tokens_decoder.items()}
        self._marks = mask.Marks(list(self._added))
        self._ends = frozenset(self._added[token] for token in self._marks.tokens)
        control = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._control = frozenset(control) & frozenset(self._marks.tokens) - REASONING_MARKS
        self._controls = forged.any_of(self._control)

    def batch(self, samples: Sequence[tuple[Where, Row]], train_on: str) -> list[tuple[Document, ...] | DataError]:
        """Each row's document, the two of a pair (chosen, rejected), or the error that names the row.

        Args:
            train_on: what is learnt of a conversation or a completion: `assistant` all answers, `last` the last one,
                `all` every token but the first. A text is always learnt whole.
        """
        drafts: list[_Draft] = []
        parts: list[tuple[int, int] | DataError] = []  # of each row, its drafts
        for where, row in samples:
            start = len(drafts)
            try:
                for part in (row.chosen, row.rejected) if isinstance(row, Pair) else (row,):
                    drafts.append(self._draft(part, train_on, where))
                parts.append((start, len(drafts)))
            except DataError as error:
                parts.append(error)
        encodings = self._encode(drafts)
        made: list[tuple[Document, ...] | DataError] = []
        for entry in parts:
            try:
                if isinstance(entry, DataError):
                    raise entry
                made.append(tuple(self._document(drafts[n], encodings[n]) for n in range(*entry)))
            except DataError as error:
                made.append(error)
        return made

    def document(self, row: Row, train_on: str, where: Where) -> Document:
        """The token ids of a row that is no pair, and which are learnt; DataError with its place if none would be."""
        assert not isinstance(row, Pair)
        made = self.batch([(where, row)], train_on)[0]
        if isinstance(made, DataError):
            raise made
        return made[0]

    def marked(self, row: Row) -> bool:
        """Whether a plain text holds special tokens as its author wrote them; its end-of-text token does not count.

        They are taken for what they say: pretraining data is made so. In messages they are refused.
        """
        if not isinstance(row, Text | Completion):
            return False
        text = rows.text(row)
        return self._controls.search(text.removesuffix(self._end)) is not None

    def template(self) -> str:
        """The chat template's source; DataError where there is none, or a monstrous one."""
        return self._template.source

    def masker(self, chat: Chat, turns: Sequence[int], where: Where) -> mask.Masker:
        """The conversation under the template; DataError where it cannot be rendered, or loses something."""
        return mask.Masker(self._template, self._marks, chat, turns, where)

    @cached_property
    def _forgers(self) -> re.Pattern[str]:
        """Tokens that no message may hold: special ones, and those that the template writes around plain turns."""
        plain = (Message("system", "a"), Message("user", "b"), Message("assistant", "c"), Message("user", "d"))
        written, nowhere = "", Where(Path("the template"), 0)
        for turns in (plain, plain[1:]):
            with suppress(DataError):  # a template may know no system turn
                written += self._template.render([self._template.shown(turn) for turn in turns], nowhere)
        marks = {token for token in self._marks.tokens if token in self._control or token in written}
        return forged.any_of(marks - REASONING_MARKS)

    @cached_property
    def _template(self) -> Template:
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
        source = source if self._today is None else _dated(source, self._today)
        return Template(source, self.tokenizer.special_tokens_map)

    def _draft(self, row: Text | Chat | Completion, train_on: str, where: Where) -> _Draft:
        assert train_on in TRAIN_ON, train_on
        if isinstance(row, Text):
            return _Draft(where, row.text, special=True)
        if isinstance(row, Completion):
            seam = 0 if train_on == "all" else len(row.prompt)
            return _Draft(where, row.prompt + row.completion, special=True, seam=seam)
        turns = answers(row, train_on)
        if not turns and train_on != "all":
            raise DataError(
                f"to learn from the messages at {where}", "no answer of them is to be learnt", "take them out"
            )
        try:
            masker = self.masker(row, turns, where)
            forged.refuse(row, self._forgers, where)
            spans = tuple(masker.spans()) if turns else ()
        except RecursionError as error:
            raise DataError(f"to mask the messages at {where}", "calls nested too deeply", "take them out") from error
        if unknown := {stop for span in spans for stop in span.stops} - self._control - REASONING_MARKS:
            forged.refuse(row, forged.any_of(unknown), where)
        return _Draft(where, masker.rendered, special=False, spans=spans, rest=train_on == "all")

    def _encode(self, drafts: list[_Draft]) -> list[_Ids]:
        """The drafts' texts as tokens, with offsets only where those are needed."""
        summed, words = self._sizes is not None, self._fast(sum(len(draft.text) for draft in drafts))
        made: list[_Ids | None] = [None] * len(drafts)
        ways: dict[tuple[bool, bool], list[int]] = {}  # of the drafts that are left to the library
        looked = False
        for n, draft in enumerate(drafts):
            exact = draft.seam > 0 or (draft.spans != () and not summed)
            ids = None if words is None or exact else words.ids(draft.text, draft.special)
            if ids is not None and not looked:  # one of each batch
                alone = self._engine.encode(draft.text, add_special_tokens=draft.special)
                if ids.tolist() != alone.ids:
                    raise AssertionError(f"the tokens of the row at {draft.where} are not the tokenizer's own")
                looked = True
            if ids is None:
                ways.setdefault((draft.special, exact), []).append(n)
            else:
                made[n] = _Ids(ids, None)
        for (special, exact), those in ways.items():
            encode = self._engine.encode_batch if exact else self._engine.encode_batch_fast
            found = encode([drafts[n].text for n in those], add_special_tokens=special)
            for n, encoding in zip(those, found, strict=True):
                made[n] = _Ids(np.array(encoding.ids, np.int32), encoding)
        return cast("list[_Ids]", made)

    def _fast(self, chars: int) -> Words | None:
        """What tokenises faster than the library, once it is worth it; None where there is none."""
        if self._until_words is not None:
            self._until_words -= chars
            if self._until_words < 0:
                self._until_words = None
                with suppress(Unknown):
                    self._words = Words(self._engine)
        if self._words is not None and self._words.wasteful:
            self._words = None
        return self._words

    def _document(self, draft: _Draft, found: _Ids) -> Document:
        if not draft.special:
            laid = self._lay(draft, found)
            targets = np.full(len(laid.ids), draft.rest)
            for span in draft.spans:
                first, last = self._tokens(draft, laid, span)
                targets[first : last + 1] = not draft.rest
            ids = laid.ids
        else:
            if self._eos is None:
                raise DataError(
                    f"the text at {draft.where} with its end marked",
                    "the tokenizer has no end-of-text token (eos_token)",
                    "set eos_token in tokenizer_config.json",
                )
            ids = found.ids
            if not len(ids) or ids[-1] != self._eos:
                ids = np.concatenate((ids, np.array([self._eos], np.int32)))
            targets = np.ones(len(ids), bool)
            if draft.seam:
                assert found.encoding is not None
                # The token that reaches over the seam is learnt: it is what must follow the tokens before it.
                covers = (found.encoding.char_to_token(at) for at in range(draft.seam, len(draft.text)))
                targets[: next((token for token in covers if token is not None), None)] = False
        targets[:1] = False
        if not ((len(ids) and targets[-1]) or targets.any()):  # the end of most rows is learnt, and `any` is slow
            asked = f"to learn from the row at {draft.where}"
            raise DataError(asked, "not one token of it would be learnt", "take it out")
        return Document(ids, targets)

    def _lay(self, draft: _Draft, found: _Ids) -> _Laid:
        ids, encoding = found
        if not draft.spans:
            return _Laid(draft.text, ids, ids, ids)  # nobody asks what they cover
        if self._sizes is not None:
            sizes, text = self._sizes[ids], draft.text.encode()
            ends = sizes.cumsum()
            composed = self._engine.normalizer is None or is_normalized("NFC", draft.text)
            if len(ids) and ends[-1] == len(text) and composed:
                return _Laid(text, ids, ends - sizes, ends)
            encoding = None  # which has none
        encoding = encoding or self._engine.encode(draft.text, add_special_tokens=False)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        return _Laid(draft.text, ids, offsets[:, 0], offsets[:, 1])

    def _tokens(self, draft: _Draft, laid: _Laid, span: mask.Span) -> tuple[int, int]:
        """The first and the last token of a span, its end-of-turn token included."""
        start, end = laid.at(span.start, draft.text), laid.at(span.end - span.closed, draft.text)
        stop, *further = (self._added[token] for token in span.stops)
        # The token that ends a turn begins where the text ends, or a little earlier if it swallows white space
        # (`lstrip`). White space may lie between (some templates write one space before it); it is learnt too, or the
        # model could not reach the end by itself.
        last = laid.token(end)
        while last < len(laid.ids) and laid.ids[last] != stop:
            if laid.ids[last] in self._ends and not span.closed:
                other = self.tokenizer.convert_ids_to_tokens(int(laid.ids[last]))
                found = f"{other} follows an answer, {span.stops[0]} the last: it would never learn to stop there"
                raise DataError(f"to mask the messages at {draft.where}", found, mask.MEND_EARLIER)
            last = len(laid.ids) if span.closed or laid.text[end : laid.ends[last]].strip() else last + 1
        if last == len(laid.ids):
            raise DataError(f"to mask the messages at {draft.where}", mask.NO_STOP, mask.MEND)
        for stop in further:
            if laid.ids[last + 1 : last + 2] == stop:
                last += 1
            else:
                break
        first = laid.token(start)
        # A header's mark that swallows white space (`rstrip`) can reach into the text; it is the header's still.
        while first < last and laid.ids[first] in self._ends and laid.starts[first] < start:
            first += 1
        return first, last


def answers(chat: Chat, train_on: str) -> list[int]:
    """The turns to be masked, by number: those that are learnt, or with `all` those that are not."""
    turns = [i for i, message in enumerate(chat.messages) if message.role == "assistant"]
    if train_on == "all":
        return [i for i in turns if not chat.messages[i].learnt]
    turns = [i for i in turns if i >= chat.prompt and chat.messages[i].learnt]
    return turns[-1:] if train_on == "last" else turns


def _dated(source: str, today: datetime.date) -> str:
    """The template with its calls for the date answered: the sandbox lets no function of ours in."""

    def answer(call: re.Match[str]) -> str:
        return f"{call[1]}{today.strftime(call[2])}{call[1]}"

    return re.sub(r"""\bstrftime_now\(\s*(["'])([^"'\\]*)\1\s*\)""", answer, source)


def _engine(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """A private copy of the tokenizer's engine whose offsets are exact.

    Byte-level post-processors trim white space off the offsets, so that a token of spaces seems to cover nothing.
    """
    from tokenizers import Tokenizer

    source = tokenizer.backend_tokenizer.to_str()
    engine = Tokenizer.from_str(source.replace('"trim_offsets":true', '"trim_offsets":false'))
    engine.no_truncation()
    engine.no_padding()
    return engine


def _token_bytes(engine: Tokenizer) -> np.ndarray | None:
    """The bytes of text that each token stands for, (largest id + 1,) int64; None where a token alone cannot tell.

    A byte-level BPE cuts a text's bytes into tokens and changes none of them. So sums of these are the offsets, which
    would take the tokenizer a quarter of its time. Only added tokens can cover more than they say (the white space that
    they swallow) and a normaliser can change the text: `Tokens._lay` looks for both.
    """
    from tokenizers import models, pre_tokenizers

    model, alphabet = engine.model, pre_tokenizers.ByteLevel.alphabet()
    if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    cuts, normalises = _kinds(engine.pre_tokenizer), _kinds(engine.normalizer)
    vocabulary = engine.get_vocab(with_added_tokens=False)
    if "ByteLevel" not in cuts or cuts - CUTTING or normalises - COMPOSING or not vocabulary.keys() >= set(alphabet):
        return None
    added = {i: len(token.content.encode()) for i, token in engine.get_added_tokens_decoder().items()}
    sizes = {i: len(token) for token, i in vocabulary.items()} | added
    found = np.zeros(max(sizes) + 1, np.int64)
    found[list(sizes)] = list(sizes.values())
    return found


def _kinds(part: Any) -> set[str]:
    """The types of which a part of a tokenizer is made, what adds a space before the text among them."""
    state = "" if part is None else part.__getstate__().decode()
    return set(re.findall(r'"type":"(\w+)"', state)) | ({"prefix"} if '"add_prefix_space":true' in state else set())
