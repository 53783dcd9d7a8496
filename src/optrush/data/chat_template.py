"""Convert rows to token ids and a target mask with the model's own chat template, without guessing.

A mask that is empty, complete or shifted trains a wrong model silently, so every doubt here is an error with the row's
location. `mask` proves which characters the assistant wrote; offsets, or the tokens' bytes, map them to tokens. The
texts of many rows are tokenized together, which takes most of the time.
"""

from __future__ import annotations

import datetime
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from optrush.data import schema
from optrush.data.images import ImageReader, Picture, SeenImage
from optrush.data.mask import (
    LIMITS,
    MEND_EARLIER,
    MEND_TEMPLATE,
    NO_STOP,
    SHOWN,
    TEMPLATE,
    CharSpan,
    EndMarks,
    Layout,
    Masker,
    Template,
    any_of,
    find_layout,
    thoughts_end,
    visible,
)
from optrush.data.schema import (
    Chat,
    Completion,
    Document,
    Judged,
    Message,
    Pair,
    Row,
    RowLocation,
    Text,
    bad_row,
    parts_of,
)
from optrush.data.words import WRITTEN, Held, Words, composes, unknown_id, widths
from optrush.errors import DataError, one_line, reason
from optrush.tokenizer_files import (
    ENGINE,
)

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerBase


# --- Control tokens in a message's text: they would end its turn or forge another.


def refuse(chat: Chat, controls: re.Pattern[str], where: RowLocation) -> None:
    """Raise DataError if a message, a call or a tool contains a control token as text."""
    if not chat.tools and all(m.plain and not controls.search(m.content) for m in chat.messages):
        return
    named: list[tuple[str, Any]] = [
        (f"messages[{i}]", [m.content, m.reasoning, m.name, m.call_id, m.calls]) for i, m in enumerate(chat.messages)
    ]
    named += [(f"tools[{i}]", tool) for i, tool in enumerate(chat.tools)]
    for name, parts in named:
        for text in _texts(parts):
            if match := controls.search(text):
                found = f"{name} holds the text {match[0]}, which the tokenizer reads as a control token: a forged turn"
                raise DataError(f"to learn from the messages at {where}", found, "remove it, or write it differently")


def _texts(value: Any) -> Iterator[str]:
    """Yield all strings in nested lists and objects, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts([*value.items()])
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


NO_IMAGES = DataError("rows with images", "only `optrush train` reads images", "use rows of text")
GIVE_TEMPLATE = "set `model.chat_template: chatml` (built in) or `model.chat_template: FILE.jinja`"
TRAIN_ON = ("assistant", "last", "all", "answer", "last-answer")
LONGEST_TEMPLATE_bytes = 64 * 2**10
LONGEST_TEXT_bytes = 8 << 20  # per row; a book has 1 MiB
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
MOST_SHAPES, LONGEST_SHAPE = 1024, 512  # conversation shapes in memory; messages per shape
COMPARED, COMPARED_ROWS = 512, 64  # tokens compared per document; documents compared
EVERYDAY = ("It's 7 12345, isn't it?\n\n\tNot so: x_1 == 3.14159;  HELLO", "Café, 日本語 and 🙂.", " a", "a  b ")
WORDS_FROM = 256  # texts encoded before word lookup, whose setup takes 0.1 s
HEAD, TAIL = 60, 30  # tokens of a document shown in errors, from its start and end
REASONING_MARKS = frozenset({"<think>", "</think>"})  # tokens that an answer's text may contain


class Shape(NamedTuple):
    """The properties of a conversation that templates depend on: its turns' roles and parts, and literals in texts."""

    steady: bool  # reject if later turns change an answer's rendering
    plain: bool  # only texts, without strings that the template looks for
    turns: tuple[int, ...]  # the masked turns
    messages: tuple[object, ...]


class _Draft(NamedTuple):
    """A row's text before tokenization, and its target characters."""

    where: RowLocation
    text: str
    special: bool  # add the tokenizer's special tokens: the text comes from no template
    seam: int = 0  # targets start at this character
    spans: tuple[CharSpan, ...] = ()  # targets, or (if `rest`) non-targets
    rest: bool = True  # whether text outside the spans is a target
    weights: tuple[float, ...] = ()  # of the spans, in the loss; empty: all 1


class Tokens:
    """A fast tokenizer with its chat template, or the one given: rows in, documents out.

    `today`: the date for templates that write it into the system prompt; None: the current one, so that the ids change
    every day.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: str | None = None, today: datetime.date | None = None
    ) -> None:
        if not tokenizer.is_fast:
            found = "a slow tokenizer, which has no token offsets"
            asked = f"the tokenizer of {tokenizer.name_or_path or 'the model'}"
            raise DataError(asked, found, "use a model folder with a tokenizer.json")
        self.tokenizer = tokenizer
        self.images: ImageReader | DataError = NO_IMAGES  # reader of images, or the reason why images are rejected
        self._given = template
        self._today = today
        self._engine = _engine(tokenizer)
        source = json.loads(self._engine.to_str())
        self._widths, self._composed = widths(source), composes(source)
        self._unknown = unknown_id(source)
        self._encoded = self.lossy = 0  # number of texts; number of texts that lose characters outside answers
        self._eos = cast("int | None", tokenizer.eos_token_id)
        self._end = "" if self._eos is None else str(tokenizer.convert_ids_to_tokens(self._eos))
        self._added = {str(token): i for i, token in tokenizer.added_tokens_decoder.items()}
        self._marks = EndMarks(list(self._added))
        self._ends = frozenset(self._added[token] for token in self._marks.tokens)
        control = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._control = frozenset(control) & frozenset(self._marks.tokens) - REASONING_MARKS
        self._controls = any_of(self._control)
        self._bos = self._added.get(str(tokenizer.special_tokens_map.get("bos_token")))
        self._layouts: dict[Shape, Layout | None] = {}
        self._checked: set[Shape] = set()  # rendered completely, and unchanged by later turns

    def batch(
        self, samples: Sequence[tuple[RowLocation, Row]], train_on: str
    ) -> list[tuple[Document, ...] | DataError]:
        """Return each row's document, the two of a pair (chosen, rejected), or its error.

        Args:
            train_on: the targets of a conversation or completion: `assistant` all answers, `last` the last one,
                `all` every token but the first. In a text every token is a target. With `answer` and `last-answer` the
                thoughts of these answers are not targets.
        """
        drafts: list[list[_Draft] | DataError] = []  # per row
        rendering = any(isinstance(part, Chat) for _, row in samples for part in parts_of(row))
        with LIMITS if rendering else nullcontext():
            for where, row in samples:
                try:
                    if isinstance(self.images, DataError) and any(
                        isinstance(p, Chat) and p.images for p in parts_of(row)
                    ):
                        asked, found, do = self.images.args
                        raise DataError(f"{asked}, such as {where}", found, do)
                    texts = [self._draft(part, train_on, where) for part in parts_of(row)]
                    for draft in texts:
                        refuse_long(draft.text, f"the row at {where}")
                    drafts.append(texts)
                except DataError as error:
                    drafts.append(error)
        made = iter(self._documents([draft for of in drafts if isinstance(of, list) for draft in of]))
        result: list[tuple[Document, ...] | DataError] = []
        for (where, row), of in zip(samples, drafts, strict=True):
            parts = [of] if isinstance(of, DataError) else [next(made) for _ in of]
            if isinstance(row, Chat) and row.images and isinstance(parts[0], Document):
                parts = [self.with_images(row.images, parts[0], where)]
            if bad := next((part for part in parts if isinstance(part, DataError)), None):
                result.append(bad)
                continue
            documents = tuple([part for part in parts if isinstance(part, Document)])
            if isinstance(row, Judged):
                judged = zip(documents, row.labels, strict=True)
                documents = tuple([replace(document, desirable=label) for document, label in judged])
            result.append(documents)
        return result

    def with_images(self, images: Sequence[Picture], document: Document, where: RowLocation) -> Document | DataError:
        """Return the document with the right number of placeholders per image, or an error."""
        assert isinstance(self.images, ImageReader)
        seen = list[SeenImage]()
        try:
            for image in images:
                seen.append(self.images.look(image, where.file.parent))
        except ValueError as error:
            bad = bad_row(where, f"image {len(seen) + 1} of {len(images)}: {error}")
            bad.image = images[len(seen)].path
            return bad
        if (n := int((document.ids == self.images.token).sum())) != len(seen):
            mark = self.tokenizer.convert_ids_to_tokens(self.images.token)
            found = f"{len(seen)} images, but the chat template writes {mark} {n} times"
            return DataError(f"to render the messages at {where}", found, "use the base's own (model.chat_template)")
        places, times = document.ids == self.images.token, np.ones(len(document), np.int64)
        times[places] = [image.tokens for image in seen]
        begin, ids = (times.cumsum() - times)[places].tolist(), np.repeat(document.ids, times)
        ids[np.repeat(places, times)] = np.concatenate([self.images.written(image.grid) for image in seen])
        return Document(
            ids, np.repeat(document.targets & ~places, times),
            weights=None if document.weights is None else np.repeat(document.weights, times),
            images=tuple([image._replace(at=at) for image, at in zip(seen, begin, strict=True)]),
        )  # fmt: skip

    def document(self, row: Row, train_on: str, where: RowLocation) -> Document:
        """Return token ids and target mask of a row (not a pair); raises DataError without targets."""
        assert not isinstance(row, Pair | Judged)
        made = self.batch([(where, row)], train_on)[0]
        if isinstance(made, DataError):
            raise made
        return made[0]

    def prepare(self) -> None:
        """Prepare lookups for many texts, before this process is forked."""
        self._encoded = max(self._encoded, WORDS_FROM)
        _ = self._words, self._head

    def marked(self, row: Row) -> bool:
        """Return whether a plain text contains special tokens; its end-of-text token does not count.

        They are tokenized as special tokens, as is usual in pretraining data. In messages they are rejected.
        """
        if not isinstance(row, Text | Completion):
            return False
        text = schema.row_text(row)
        return self._controls.search(text.removesuffix(self._end)) is not None

    def shown(self, ids: Sequence[int]) -> str:
        """Return a document's first and last tokens as one line of text."""
        parts = [ids] if len(ids) <= HEAD + TAIL else [ids[:HEAD], ids[-TAIL:]]
        decode = self._engine.decode
        return " ... ".join(visible(decode(list(part), skip_special_tokens=False)) for part in parts)

    def otherwise(self, folder: Path, documents: Iterable[Sequence[int]] = ()) -> str | None:
        """Return a text that the folder's tokenizer.json splits differently; None if none was found.

        transformers builds some classes (`tokenizer_class`) from the vocabulary by other rules; other programs use the
        file.

        Args:
            documents: token ids; the starts of their texts are compared.
        """
        from tokenizers import Tokenizer

        if not (folder / ENGINE).is_file():
            return None
        try:
            stored = Tokenizer.from_file(str(folder / ENGINE))
        except Exception as error:  # the library raises bare Exceptions
            return f"tokenizer.json cannot be read by itself: {reason(error)}"
        stored.no_truncation()
        stored.no_padding()
        texts = (self._engine.decode(list(ids[:COMPARED]), skip_special_tokens=True) for ids in documents)
        for text in (*texts, *EVERYDAY):
            ours, theirs = (_split(engine, text) for engine in (self._engine, stored))
            if ours != theirs:
                at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), 0)
                a, b = (" | ".join(token for _, token in pieces[at : at + 4]) for pieces in (ours, theirs))
                return (
                    f"{visible(text[:TAIL])!r}: tokenizer.json has the tokens {b}, {type(self.tokenizer).__name__} {a}"
                )
        return None

    def template(self, tools: bool = False) -> str:
        """Return the source of the chat template; of several, the one for rows with or without `tools`.

        Raises DataError: it is missing or too large.
        """
        return (self._tool_template if tools else self._template).source

    def has_template(self) -> bool:
        """Return whether there is a chat template."""
        with suppress(DataError):
            return bool(self.template())
        return False

    def tagged(self) -> bool:
        """Return whether the chat template has generation tags; the targets do not depend on them."""
        tagged = False
        for tools in (False, True):
            with suppress(DataError):
                tagged |= GENERATION.search(self.template(tools)) is not None
        return tagged

    def spans(
        self, chat: Chat, turns: Sequence[int], where: RowLocation, steady: bool, whole: bool = False
    ) -> tuple[str, Sequence[CharSpan]]:
        """Return the rendered conversation, and the characters that the assistant wrote in these turns.

        Args:
            steady: reject the row if later turns change how the template writes one of these.
            whole: reject it if the template leaves out reasoning; for rows in which all tokens are targets.

        Raises DataError: like `Masker`; or a message forges a turn.
        """
        template = self._tool_template if chat.tools else self._template
        shape = self._shape(chat, turns, steady)
        layout = self._layout(template, chat, turns, shape)
        if layout is not None:
            rendered = template.render([template.shown(message) for message in chat.messages], where)
            if (spans := layout.spans(chat, turns, rendered)) is not None:
                refuse(chat, self._forgers, where)
                return rendered, spans
        checked = layout is None and shape in self._checked
        masker = Masker(template, self._marks, chat, turns, where, checked)
        refuse(chat, self._forgers, where)
        spans = masker.spans() if turns else []
        if whole:
            masker.check_thoughts()
        if steady and not checked:
            masker.check_steady()
        if layout is None and len(chat.messages) <= LONGEST_SHAPE and len(self._checked) < MOST_SHAPES:
            self._checked.add(shape)
        return masker.rendered, spans

    def _shape(self, chat: Chat, turns: Sequence[int], steady: bool) -> Shape:
        messages, plain = list[object](), not chat.tools
        for m in chat.messages:
            text = f"{m.content}{m.reasoning}" if m.reasoning else m.content
            sought = tuple([literal for literal in self._sought if literal in text])
            plain &= m.plain and not sought
            messages += m.role, not m.content.strip(), m.reasoning is None, len(m.calls), len(m.images), sought
        return Shape(steady, plain, tuple(turns), (len(chat.tools), *messages))

    def _layout(self, template: Template, chat: Chat, turns: Sequence[int], shape: Shape) -> Layout | None:
        """Return the layout of a conversation of plain texts, without strings that the template looks for."""
        if shape in self._layouts:
            return self._layouts[shape]
        if not shape.plain or len(chat.messages) > LONGEST_SHAPE or len(self._layouts) == MOST_SHAPES:
            return None
        self._layouts[shape] = find_layout(template, self._marks, chat, turns, shape.steady)
        return self._layouts[shape]

    @cached_property
    def _sought(self) -> tuple[str, ...]:
        return tuple(sorted(self._template.literals | REASONING_MARKS))

    @cached_property
    def _forgers(self) -> re.Pattern[str]:
        """Tokens forbidden in messages: special tokens, and tokens that the template writes around plain turns."""
        plain = (Message("system", "a"), Message("user", "b"), Message("assistant", "c"), Message("user", "d"))
        written = ""
        for name, turns in product(("_template", "_tool_template"), (plain, plain[1:])):
            with suppress(DataError):  # a template may reject a system turn, and several may have no default
                template = getattr(self, name)
                written += template.render([template.shown(turn) for turn in turns], TEMPLATE)
        marks = {token for token in self._marks.tokens if token in self._control or token in written}
        return any_of(marks - REASONING_MARKS)

    @cached_property
    def _template(self) -> Template:
        return self._opened(tools=False)

    @cached_property
    def _tool_template(self) -> Template:
        """The template for rows with tools: if there are several, the one named `tool_use`, like in transformers."""
        template = self._opened(tools=True)
        with suppress(DataError):  # there may be only one
            return self._template if self._template.source == template.source else template
        return template

    def _opened(self, tools: bool) -> Template:
        try:
            source = self.tokenizer.get_chat_template(self._given, [] if tools else None)
        except ValueError as error:
            found = "the tokenizer has no chat template, or several without a default"
            raise DataError("training on messages", found, GIVE_TEMPLATE) from error
        if not isinstance(source, str):
            raise DataError("the chat template", f"the tokenizer's template is {source!r}, not text", GIVE_TEMPLATE)
        if (size := len(source.encode())) > LONGEST_TEMPLATE_bytes:
            raise DataError("the chat template", f"{size} bytes; the limit is {LONGEST_TEMPLATE_bytes}", GIVE_TEMPLATE)
        source = source if self._today is None else _dated(source, self._today)
        frame = self.images.frame if isinstance(self.images, ImageReader) else ("", "")
        return Template(source, self.tokenizer.special_tokens_map, frame)

    def _draft(self, row: Text | Chat | Completion, train_on: str, where: RowLocation) -> _Draft:
        """Return a row's text and its target characters; raise DataError if `train_on` does not fit the row."""
        assert train_on in TRAIN_ON, train_on
        if isinstance(row, Text):
            return _Draft(where, row.text, special=True)
        if isinstance(row, Completion):
            if train_on.endswith("answer") and _never_ending(Message("assistant", row.completion)):
                do = "add </think> where the thoughts end, or learn them, too (data.train_on: assistant)"
                raise DataError(f"to learn the answer at {where}", "it begins with <think> but has no </think>", do)
            seam = 0 if train_on == "all" else len(row.prompt)
            seam += thoughts_end(row.completion, row.completion, None) if train_on.endswith("answer") else 0
            return _Draft(where, row.prompt + row.completion, special=True, seam=seam)
        turns = answers(row, train_on)
        if not turns and train_on != "all":
            raise DataError(f"to learn from the messages at {where}", "none of the answers is a target", "remove them")
        try:
            rendered, spans = self.spans(row, turns, where, train_on in ("assistant", "answer"), train_on == "all")
        except RecursionError as error:
            raise DataError(f"to mask the messages at {where}", "calls nested too deeply", "remove them") from error
        if unknown := {stop for span in spans for stop in span.stops} - self._control - REASONING_MARKS:
            refuse(row, any_of(unknown), where)
        if train_on.endswith("answer"):
            spoken = [(rendered[s.start : s.end], row.messages[i]) for s, i in zip(spans, turns, strict=True)]
            if (n := next((i for i in turns if _never_ending(row.messages[i])), None)) is not None:
                found = f"messages[{n}] begins with <think> but has no </think>"
                do = "add </think> where the thoughts end, or learn them, too (data.train_on: assistant)"
                raise DataError(f"to learn the answers at {where}", found, do)
            begin = [thoughts_end(text, turn.content, turn.reasoning) for text, turn in spoken]
            spans = [s._replace(start=s.start + n) for s, n in zip(spans, begin, strict=True)]
        weights = tuple(row.messages[i].weight for i in turns)
        if train_on == "all" and any(m.weight not in (0, 1) for m in row.messages):
            found = "a turn has a weight, but every token is a target (data.train_on: all)"
            raise DataError(f"to learn from the messages at {where}", found, "set data.train_on: assistant")
        weights = weights if any(w != 1 for w in weights) and train_on != "all" else ()
        return _Draft(where, rendered, False, spans=tuple(spans), rest=train_on == "all", weights=weights)

    def _documents(self, drafts: Sequence[_Draft]) -> list[Document | DataError]:
        """Return the document of each draft, or the error that names its row."""
        ids, encodings, failed = self._encode(drafts)
        result = list[Document | DataError]()
        for n, made in enumerate(self._located(drafts, ids)):
            if n in failed:
                result.append(failed[n])
                continue
            try:
                result.append(made or self._document(drafts[n], ids[n], encodings.get(n)))
            except DataError as error:
                result.append(error)
        return result

    def _encode(self, drafts: Sequence[_Draft]) -> tuple[list[np.ndarray], dict[int, Encoding], dict[int, DataError]]:
        """Return each draft's ids, and by draft number the encodings with offsets where needed, and the errors."""
        self._encoded += len(drafts)
        words = self._words if self._encoded > WORDS_FROM else None
        ids: list[Any] = [None] * len(drafts)
        encodings: dict[int, Encoding] = {}
        failed: dict[int, DataError] = {}
        groups: dict[tuple[bool, bool], list[int]] = {}  # (with special tokens, with offsets): drafts
        for n, draft in enumerate(drafts):
            if words is not None and (not draft.special or self._head is not None):
                with suppress(Exception):  # from the library; the engine raises its error below
                    ids[n] = words.encode(draft.text)
            if ids[n] is None:
                offsets = draft.spans != () and self._widths is None
                offsets |= self._head is None and (draft.seam > 0 or self._unknown is not None)
                groups.setdefault((draft.special, offsets), []).append(n)
            else:
                ids[n] = np.array([*(self._head or ()), *ids[n]] if draft.special else ids[n], np.int32)
        for (special, offsets), members in groups.items():
            encode = self._engine.encode_batch if offsets else self._engine.encode_batch_fast
            try:
                with tokenizing("a batch of rows"):
                    made: list[Any] = encode([drafts[n].text for n in members], add_special_tokens=special)
            except DataError:
                made = [self._alone(drafts[n]) for n in members]
            for n, encoding in zip(members, made, strict=True):
                if isinstance(encoding, DataError):
                    failed[n] = encoding
                elif offsets:
                    encodings[n] = encoding
                ids[n] = np.array([] if n in failed else encoding.ids, np.int32)
        return ids, encodings, failed

    def _alone(self, draft: _Draft) -> Encoding | DataError:
        try:
            with tokenizing(f"the row at {draft.where}"):
                return self._engine.encode(draft.text, add_special_tokens=draft.special)
        except DataError as error:
            return error

    @cached_property
    def _words(self) -> Words | None:
        with suppress(ValueError, KeyError):  # unknown rules
            return None if self._widths is None else Words(self._engine, json.loads(self._engine.to_str()))
        return None

    @cached_property
    def _head(self) -> list[int] | None:
        """Special tokens before a text; None if unknown, or if tokens do not map to bytes."""
        if self._widths is None:
            return None
        bare, full = (self._engine.encode("a", add_special_tokens=special).ids for special in (False, True))
        return full[: -len(bare)] if full[-len(bare) :] == bare else None

    def _bytes(self, text: str, end: int | None = None) -> int:
        """Return the bytes of a text, or of its first `end` characters; -1 if tokens do not match its bytes."""
        if text.isascii():
            return len(text) if end is None else end
        return len(text[:end].encode()) if not self._composed or unicodedata.is_normalized("NFC", text) else -1

    def _located(self, drafts: Sequence[_Draft], ids: Sequence[np.ndarray]) -> list[Document | None]:
        """Return the documents of conversations, located by the bytes of all tokens at once.

        None: a text, or a conversation with an unusual span start or end (`_document`).
        """
        documents: list[Document | None] = [None] * len(drafts)
        plain = (n for n, draft in enumerate(drafts) if not draft.special and len(ids[n]))
        usual = [n for n in plain if not drafts[n].weights and all(len(span.stops) == 1 for span in drafts[n].spans)]
        if self._widths is None or not usual:
            return documents  # `_document` makes them
        flat, starts = np.concatenate([ids[n] for n in usual]), np.cumsum([0, *(len(ids[n]) for n in usual)])
        ends = self._widths[flat].cumsum()
        edges = np.concatenate([[0], ends[starts[1:] - 1]])  # in bytes, of the texts
        sound = np.diff(edges) == [self._bytes(drafts[n].text) for n in usual]
        spans = [
            (k, self._bytes(text, span.start), self._bytes(text, span.end - span.closed), self._added[span.stops[0]])
            for k, n in enumerate(usual) for text in [drafts[n].text] for span in drafts[n].spans
        ]  # fmt: skip
        rows, begin, end, stop = np.array(spans, np.int64).reshape(-1, 4).T
        first, last = (ends.searchsorted(edges[rows] + at, "right") for at in (begin, end))
        inside = last < starts[rows + 1]
        sound[rows[~inside]] = False
        rows, first, last, stop = (column[inside] for column in (rows, first, last, stop))
        sound[rows[(flat[last] != stop) | np.isin(flat[first], list(self._ends))]] = False
        first, last = first[sound[rows]], last[sound[rows]]  # other spans may point into other texts
        steps = np.zeros(len(flat) + 1, np.int64)
        np.add.at(steps, first, 1)
        np.add.at(steps, last + 1, -1)
        targets = (steps[:-1].cumsum() > 0) ^ np.repeat([drafts[n].rest for n in usual], np.diff(starts))
        targets[starts[:-1]] = False
        sound &= np.add.reduceat(targets, starts[:-1], dtype=np.int64) > 0
        if self._bos is not None:
            sound &= (flat[starts[:-1]] != self._bos) | (np.append(flat, -1)[starts[:-1] + 1] != self._bos)
        for k in np.flatnonzero(sound).tolist():
            a, b = int(starts[k]), int(starts[k + 1])
            documents[usual[k]] = Document(flat[a:b], targets[a:b])
        return documents

    def _document(self, draft: _Draft, ids: np.ndarray, encoding: Encoding | None) -> Document:
        """Return a draft's document, or raise DataError; without an encoding, token widths locate its targets."""
        ends: np.ndarray | None = None
        weights = np.ones(len(ids), np.float32) if draft.weights else None
        if encoding is None and self._widths is not None and (draft.spans or draft.seam or self._unknown is not None):
            ends = self._widths[ids[len(self._head or ()) if draft.special else 0 :]].cumsum()
            if not len(ends) or ends[-1] != self._bytes(draft.text):  # a token absorbs adjacent white space
                encoding, ends = self._engine.encode(draft.text, add_special_tokens=draft.special), None
        if self._unknown is not None and ends is None:  # byte-level tokens lose nothing
            self._refuse_lost(draft, encoding)
        if not draft.special:
            targets = np.full(len(ids), draft.rest)
            for n, span in enumerate(draft.spans):
                first, last = self._tokens(draft, ids, encoding, ends, span)
                targets[first : last + 1] = not draft.rest
                if weights is not None:
                    weights[first : last + 1] = draft.weights[n]
        else:
            if self._eos is None:
                asked, do = f"the text at {draft.where} with its end marked", "set eos_token in tokenizer_config.json"
                raise DataError(asked, "the tokenizer has no end-of-text token (eos_token)", do)
            if not len(ids) or ids[-1] != self._eos:
                ids = np.concatenate((ids, np.array([self._eos], np.int32)))
            targets = np.ones(len(ids), bool)
            # A token across the seam is a target.
            if draft.seam and ends is not None:
                n = int(ends.searchsorted(self._bytes(draft.text, draft.seam), "right"))
                targets[: n + len(self._head or ())] = False
            elif draft.seam and encoding is not None:
                covers = (encoding.char_to_token(at) for at in range(draft.seam, len(draft.text)))
                targets[: next((token for token in covers if token is not None), None)] = False
        if self._bos is not None and ids[:2].tolist() == [self._bos, self._bos]:
            writer = "tokenizer" if draft.special else "chat template"
            asked = f"to begin a document with one {self.tokenizer.convert_ids_to_tokens(self._bos)}"
            do = f"remove one from the rows or the template: the {writer} adds one"
            raise DataError(asked, f"two of them; at {draft.where}: '{self.shown(ids.tolist())}'", do)
        targets[:1] = False
        if not ((len(ids) and targets[-1]) or targets.any()):  # most rows end with a target, and `any` is slow
            raise DataError(f"to learn from the row at {draft.where}", "it has no target token", "remove it")
        return Document(ids, targets, weights=weights)

    def _refuse_lost(self, draft: _Draft, encoding: Encoding | None) -> None:
        """Raise DataError if target characters are in no token; count texts that lose other characters."""
        text, learnt = draft.text, np.full(len(draft.text), draft.rest and not draft.special)
        if self._unknown == -1:
            if not (missing := {char for char in set(text) if not self._held[char]}):
                return
            held = np.array([char not in missing for char in text], bool)
        else:
            encoding = encoding or self._engine.encode(text, add_special_tokens=draft.special)
            offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            unknown = np.array(encoding.ids) == self._unknown
            held = _covered(len(text), offsets[~unknown]) & ~_covered(len(text), offsets[unknown])
            for at in np.flatnonzero(~held).tolist():  # mostly white space
                held[at] = unicodedata.category(text[at])[0] not in WRITTEN
        marks = [mark.span() for mark in any_of(self._added).finditer(text)]
        for start, end in marks:
            held[start:end] = True
        if held.all():
            return
        for span in draft.spans:
            learnt[span.start : span.end] = not draft.rest
        learnt[draft.seam :] |= draft.seam > 0
        if self._unknown == -1:  # after a dropped character, offsets are too small up to the next added token
            places = [span.start for span in draft.spans] + [draft.seam] * (draft.seam > 0)
            for at in places:
                learnt[max((end for _, end in marks if end <= at), default=0) : at] = True
        if not (lost := [text[at] for at in np.flatnonzero(learnt & ~held)]):
            self.lossy += 1
            return
        names = ", ".join(map(repr, sorted(set(lost))[:SHOWN]))
        found = f"its answer would lose characters without a token: {names} ({len(lost)} in all)"
        do = "remove the row, or use a model whose tokenizer has them"
        raise DataError(f"to learn from the row at {draft.where}", found, do)

    @cached_property
    def _held(self) -> Held:
        return Held(self._engine, self._widths is not None)

    def _tokens(
        self, draft: _Draft, ids: np.ndarray, encoding: Encoding | None, ends: np.ndarray | None, span: CharSpan
    ) -> tuple[int, int]:
        """Return the first and last token of a span, including its end-of-turn token.

        Args:
            ends: end of each token in the text's bytes, (n,); None: the encoding has offsets.
        """
        places = span.start, span.end - span.closed
        stop, *further = (self._added[token] for token in span.stops)
        first: int | None
        last: int | None
        if encoding is not None:
            first, last = map(encoding.char_to_token, places)
        else:
            assert ends is not None
            first, last = (int(ends.searchsorted(self._bytes(draft.text, at), "right")) for at in places)
        if first is None or last is None or last >= len(ids) or ids[last] != stop or ids[first] in self._ends:
            encoding = encoding or self._engine.encode(draft.text, add_special_tokens=False)
            first, last = self._searched(draft, ids, encoding, span)
        for stop in further:
            if ids[last + 1 : last + 2] != stop:
                break
            last += 1
        return first, last

    def _searched(self, draft: _Draft, ids: np.ndarray, encoding: Encoding, span: CharSpan) -> tuple[int, int]:
        """Return a span's first token and its end-of-turn token, which may follow after white space."""
        starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T  # the characters [start, end) of each
        start, end, stop = span.start, span.end - span.closed, self._added[span.stops[0]]
        asked = f"to mask the messages at {draft.where}"
        # The end-of-turn token starts at the text's end, or earlier if it absorbs white space (`lstrip`). White space
        # before it (some templates write a space) is a target too, or the model could not reach the end.
        last = int(ends.searchsorted(end, "right"))
        while last < len(ids) and ids[last] != stop:
            if ids[last] in self._ends and not span.closed:
                other = self.tokenizer.convert_ids_to_tokens(int(ids[last]))
                found = f"{other} follows an answer, {span.stops[0]} the last: the model would not learn to stop there"
                raise DataError(asked, found, MEND_EARLIER)
            last = len(ids) if span.closed or draft.text[end : ends[last]].strip() else last + 1
        if last == len(ids):
            raise DataError(asked, NO_STOP, MEND_TEMPLATE)
        first = int(ends.searchsorted(start, "right"))
        # A header's mark that absorbs white space (`rstrip`) can reach into the text; it still belongs to the header.
        while first < last and ids[first] in self._ends and starts[first] < start:
            first += 1
        return first, last


def _covered(length: int, offsets: np.ndarray) -> np.ndarray:
    """Return the mask of characters in a token, (length,) bool, from the tokens' offsets [start, end), (n, 2)."""
    steps = np.zeros(length + 1, np.int64)
    np.add.at(steps, offsets[:, 0], 1)
    np.add.at(steps, offsets[:, 1], -1)
    return steps[:-1].cumsum() > 0


def refuse_long(text: str, asked: str) -> None:
    """Raise DataError for a text that needs gigabytes to tokenize: 130 bytes per byte of text."""
    if len(text) > LONGEST_TEXT_bytes // 4 and (size := len(text.encode())) > LONGEST_TEXT_bytes:
        found = f"a text of {size / 2**20:.1f} MiB; the limit for one row is {LONGEST_TEXT_bytes >> 20} MiB"
        raise DataError(f"to tokenize {asked}", found, "split it; for a text file set data.text_rows: paragraph")


@contextmanager
def tokenizing(asked: str) -> Iterator[None]:
    """Convert errors of the tokenizers library (bare Exceptions and panics) to a DataError."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        do = "add the token to the vocabulary in tokenizer.json, fix tokenizer_class in tokenizer_config.json, "
        do += "or use another tokenizer: model.tokenizer"
        raise DataError(f"to tokenize {asked}", f"the tokenizer fails: {one_line(str(error))}", do) from None


def _never_ending(turn: Message) -> bool:
    return turn.content.lstrip().startswith("<think>") and "</think>" not in turn.content


def answers(chat: Chat, train_on: str) -> list[int]:
    """Return the numbers of the answers to mask: those that are targets, or with `all` the others."""
    turns = [i for i, message in enumerate(chat.messages) if message.role == "assistant"]
    if train_on == "all":
        return [i for i in turns if not chat.messages[i].learnt]
    turns = [i for i in turns if i >= chat.prompt and chat.messages[i].learnt]
    return turns[-1:] if train_on.startswith("last") else turns


def _dated(source: str, today: datetime.date) -> str:
    """Return the template with date calls replaced: the sandbox accepts no extra function."""
    now = r"""\bstrftime_now\(\s*(["'])([^"'\\]*)\1\s*\)"""
    return re.sub(now, lambda call: f"{call[1]}{today.strftime(call[2])}{call[1]}", source)


def _engine(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Return a private copy of the tokenizer's engine with exact offsets.

    Byte-level post-processors trim white space from offsets, so that a token of spaces seems empty.
    """
    from tokenizers import Tokenizer

    source = tokenizer.backend_tokenizer.to_str()
    engine = Tokenizer.from_str(source.replace('"trim_offsets":true', '"trim_offsets":false'))
    engine.no_truncation()
    engine.no_padding()
    return engine


def _split(engine: Tokenizer, text: str) -> list[tuple[int, str]]:
    """Return a text's (id, token) pairs; empty if the engine fails."""
    try:
        encoding = engine.encode(text, add_special_tokens=False)
    except Exception:  # the library raises bare Exceptions
        return []
    return list(zip(encoding.ids, encoding.tokens, strict=True))


AS_STORED = "set tokenizer_class: PreTrainedTokenizerFast in the base's tokenizer_config.json to train with that file"
