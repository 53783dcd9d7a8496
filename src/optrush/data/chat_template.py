"""Turn rows into token ids and a mask of what is learnt, through the model's own chat template, without guessing.

A mask that is empty, complete or shifted trains a wrong model without a sign; so every doubt here is an error with the
row's place. `Masker` proves which characters the assistant wrote; the tokenizer's offsets map characters to tokens.
All texts of many rows go to the tokenizer at once, which takes most of the time.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import resource
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import count, pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from jinja2.exceptions import TemplateError

from optrush.config import Config
from optrush.console import transformers_silenced
from optrush.data import schema
from optrush.data.schema import Chat, Completion, Document, Judged, Message, Pair, Row, RowLocation, Text, parts_of
from optrush.errors import ConfigError, DataError, NeedsError, reason
from optrush.technique import library
from optrush.tokenizer_files import copy_tokenizer

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerBase


# --- A chat template: compiled once, rendered in the sandbox, and probed for what it does with a conversation's parts.
#
# Templates differ in what they take (a text, or a list of parts; a call's arguments as an object, or as JSON) and drop
# unknown parts silently. Rendering placeholders shows both; the source is never read.


LONGEST_RENDER_chars = 32 * 2**20
# What rendering raises: filters check with `assert`, and Python compiles what Jinja writes.
RENDERING = (
    TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError, AssertionError,
    SyntaxError,
)  # fmt: skip
MEND = "mend the row, or give another template (model.chat_template)"
MOST_BITS = 10_000  # of an integer that a template computes
MOST_ERROR_chars = 200  # of a template's own error that is shown
MOST_SHAPES, LONGEST_SHAPE = 1024, 512  # of conversations in memory; messages of one
SHOWN = 4  # things left out that an error message names
SHOWN_chars = 100  # of a difference that an error message shows
HEAD, TAIL = 60, 30  # tokens of a document that an error message shows, from its beginning and its end
PLACEHOLDER = "97351{:06}"  # digits pass through quoting, escaping and capitals as they are

Shown = dict[str, Any]  # a message as a template gets it


class RenderLimits:
    """Limits the time and the memory of rendering, in which the code of a template runs, which may be anybody's.

    Within the block a timer's signal ends a rendering (in the main thread, the only one that receives it), and a limit
    of the address space lets allocations fail. Time is the processor's, so that a process that is stopped and goes on
    loses none. Both are of the whole process: what other threads compute and allocate meanwhile counts too, and their
    allocations fail beyond the limit. So a block contains one rendering, and nothing else; threads take turns.
    """

    def __init__(self, seconds: float, memory_bytes: int) -> None:
        self.seconds, self.memory_bytes = seconds, memory_bytes
        self._turn = threading.Lock()
        self._before: tuple[Any, int] = (None, -1)  # the signal's handler, the soft limit of the address space

    def __enter__(self) -> None:
        self._turn.acquire()
        timed = threading.current_thread() is threading.main_thread()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        self._before = (signal.signal(signal.SIGPROF, self._late) if timed else None, soft)
        with open("/proc/self/statm", "rb", buffering=0) as file:
            pages = int(file.read(64).split()[0])
        most = pages * resource.getpagesize() + self.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most if soft == -1 else min(soft, most), hard))
        if timed:
            signal.setitimer(signal.ITIMER_PROF, self.seconds)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        handler, soft = self._before
        if handler is not None:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft, resource.getrlimit(resource.RLIMIT_AS)[1]))
        self._turn.release()
        if isinstance(error, MemoryError):
            raise _monstrous(f"more than {self.memory_bytes >> 20} MiB of memory") from None

    def forget(self) -> None:
        """End, in a process that was forked meanwhile, the block of a thread that it does not have."""
        if self._turn.locked():
            resource.setrlimit(resource.RLIMIT_AS, (self._before[1], resource.getrlimit(resource.RLIMIT_AS)[1]))
            self._turn = threading.Lock()

    def _late(self, *_: object) -> None:
        raise _monstrous(f"more than {self.seconds:g} s of the processor")


LIMITS = RenderLimits(seconds=10, memory_bytes=1 << 30)
os.register_at_fork(after_in_child=LIMITS.forget)


def _monstrous(what: str) -> ConfigError:
    """Return the error of a template that takes too much; no bad row, for the template is at fault."""
    return ConfigError("to render messages", f"the chat template takes {what}", "give another: model.chat_template")


def _times(left: Any, right: Any) -> Any:
    """Return a product in a template; MemoryError for a monstrous one, before it is computed."""
    for one, n in ((left, right), (right, left)):
        if isinstance(n, int) and hasattr(one, "__len__") and len(one) * n > LONGEST_RENDER_chars:
            raise MemoryError
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MOST_BITS:
        raise MemoryError
    return left * right


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MOST_BITS:
        raise MemoryError
    return left**right


class Template:
    """A template's source with the names of the tokenizer's special tokens that it may write."""

    def __init__(self, source: str, special: Mapping[str, Any]) -> None:
        self.source = source
        self._special = dict(special)
        self._whole: set[object] = set()  # shapes of conversations of which nothing is left out, a bounded number
        self._steady: set[object] = set()  # shapes of which later turns change nothing

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy in another process needs: it compiles the source anew."""
        return {name: value for name, value in vars(self).items() if name not in ("_environment", "_compiled")}

    def shown(self, message: Message) -> Shown:
        """Return the message in the form that the template takes."""
        shown = message.shown()
        if message.calls and self._json_arguments:
            shown["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": _json(call["function"]["arguments"])}}
                for call in message.calls
            ]
        if self._parts:
            shown["content"] = _parts(message.content)
        return shown

    def render(
        self, turns: Sequence[Shown], where: RowLocation, tools: Sequence[Any] = (), prompt: bool = False
    ) -> str:
        """Render messages as `shown` returns them; with `prompt` the header of an answer follows.

        Raises DataError: the template failed, or made a monstrous text.
        """
        asked = f"to render the messages at {where}"
        try:
            rendered = self._render(turns, tools, prompt)
            rendered.encode()
        except RENDERING as error:
            why = f"{type(error).__name__}: {visible(str(error)[:MOST_ERROR_chars])}"
            raise DataError(asked, f"the chat template failed: {why}", MEND) from error
        if len(rendered) > LONGEST_RENDER_chars:
            found = f"the chat template made {len(rendered)} characters; at most {LONGEST_RENDER_chars} are taken"
            raise DataError(asked, found, MEND)
        return rendered

    def check(self, chat: Chat, where: RowLocation) -> None:
        """Raises DataError where the template leaves out the tools, a call, or a turn that is not the assistant's.

        What is left out depends on roles and places, so each shape of a conversation is checked once.
        """
        shape = (len(chat.tools), *((m.role, not m.content.strip(), len(m.calls)) for m in chat.messages))
        if shape in self._whole:
            return
        names: dict[str, str] = {}

        def place(name: str) -> str:
            mark = PLACEHOLDER.format(len(names))
            names[mark] = name
            return mark

        marked = []
        for i, message in enumerate(chat.messages):
            calls = tuple(_named(call, place(f"messages[{i}].tool_calls[{n}]")) for n, call in enumerate(message.calls))
            content = message.content
            if content.strip():
                content = "a" if message.role == "assistant" else place(f"messages[{i}] ({message.role})")
            marked.append(self.shown(replace(message, content=content, calls=calls)))
        tools = [_named(tool, place(f"tools[{n}]")) for n, tool in enumerate(chat.tools)]
        rendered = self.render(marked, where, tools)
        lost = [name for mark, name in names.items() if mark not in rendered]
        if lost:
            more = f", and {len(lost) - SHOWN} more" if len(lost) > SHOWN else ""
            found = f"the chat template leaves out {', '.join(lost[:SHOWN])}{more}"
            raise DataError(f"to render the messages at {where}", found, MEND)
        if len(self._whole) == MOST_SHAPES:
            self._whole.clear()
        if len(shape) <= LONGEST_SHAPE:
            self._whole.add(shape)

    def check_steady(self, masker: Masker, chat: Chat, turns: Sequence[int], where: RowLocation) -> None:
        """Raises DataError where later turns change how the template writes one of these: other text would be asked.

        Each shape of a conversation is checked once. It has what templates look at: the roles, which parts a turn has,
        and which of the texts that the template looks for are in it.
        """
        if not turns or turns[0] + 1 == len(chat.messages):
            return
        shape: tuple[object, ...] = (bool(chat.tools), tuple(turns))
        for m in chat.messages:
            text = f"{m.content}{m.reasoning or ''}" if self._sought else ""
            shape += (
                (m.role, not m.content.strip(), m.reasoning is None, len(m.calls)),
                *(s in text for s in self._sought),
            )
        if shape in self._steady:
            return
        for i in turns:
            if i + 1 < len(chat.messages) and (changed := masker.changes(i)):
                alone, here = (visible(text)[:SHOWN_chars] for text in changed)
                asked = f"to learn every answer of the conversation at {where} (data.train_on: assistant)"
                found = f"later turns change how the template writes messages[{i}]: '{alone}' becomes '{here}'"
                raise DataError(asked, found, MEND_EARLIER)
        if len(self._steady) == MOST_SHAPES:
            self._steady.clear()
        if len(chat.messages) <= LONGEST_SHAPE:
            self._steady.add(shape)

    @cached_property
    def _sought(self) -> tuple[str, ...]:
        """The texts that the template looks for in others: `'</think>' in content`, `content.split('</think>')`."""
        from jinja2 import nodes

        found: set[str] = set()
        tree = self._environment.parse(self.source)
        for compare in tree.find_all(nodes.Compare):
            operands = [operand.expr for operand in compare.ops]
            if isinstance(compare.expr, nodes.Const):
                found.add(str(compare.expr.value))
            found |= {str(operand.value) for operand in operands if isinstance(operand, nodes.Const)}
        for call in (*tree.find_all(nodes.Call), *tree.find_all(nodes.Filter)):
            found |= {str(given.value) for given in call.args if isinstance(given, nodes.Const)}
        plain = {*schema.ROLE_NAMES, "role", "content", "True", "False", "None"}
        return tuple(sorted(text for text in found - plain if len(text.strip()) > 1))

    def _render(self, turns: Sequence[Shown], tools: Sequence[Any] = (), prompt: bool = False) -> str:
        # As apply_chat_template, without its copies of the data, which come from JSON and are plain already.
        with LIMITS:
            rendered = self._compiled.render(
                messages=turns, tools=list(tools) or None, documents=None, add_generation_prompt=prompt, **self._special
            )
        assert isinstance(rendered, str)
        return rendered

    @cached_property
    def _environment(self) -> Any:
        """Transformers' environment for templates, in which no product or power becomes monstrous."""
        from transformers.utils.chat_template_utils import _compile_jinja_template

        environment = _compile_jinja_template("").environment.overlay()
        environment.intercepted_binops = frozenset({"*", "**"})  # read by jinja for each environment
        environment.binop_table = {**environment.binop_table, "*": _times, "**": _power}
        return environment

    @cached_property
    def _compiled(self) -> Any:
        return self._environment.from_string(self.source)

    @cached_property
    def _parts(self) -> bool:
        """Whether a turn's content is shown as a list of parts: the template loses or refuses a text."""
        texts = [PLACEHOLDER.format(i) for i in range(2)]
        talk = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)]
        split = [{**turn, "content": _parts(turn["content"])} for turn in talk]
        return not self._holds(talk, texts) and self._holds(split, texts)

    @cached_property
    def _json_arguments(self) -> bool:
        """Whether a call's arguments are shown as JSON: the template loses or refuses an object."""
        value = PLACEHOLDER.format(0)
        asked, empty = (_parts(text) if self._parts else text for text in ("a", ""))

        def talk(arguments: Any) -> list[Shown]:
            call = {"id": "0", "type": "function", "function": {"name": "f", "arguments": arguments}}
            return [{"role": "user", "content": asked}, {"role": "assistant", "content": empty, "tool_calls": [call]}]

        return not self._holds(talk({"x": value}), [value]) and self._holds(talk(_json({"x": value})), [value])

    def _holds(self, turns: Sequence[Shown], texts: list[str]) -> bool:
        try:
            rendered = self._render(turns)
        except RENDERING:
            return False
        return all(text in rendered for text in texts)


def _parts(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}]


def _named(tool: dict[str, Any], name: str) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], "name": name}} if "function" in tool else {**tool, "name": name}


def _json(arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False)


# --- Which characters of a rendered conversation the assistant wrote, proven or refused, never guessed.
#
# The conversation is rendered twice: once as it is, once with every text that the assistant wrote (a content, a
# reasoning, a call's name, a value of its arguments) between two marks. Without the marks, the second must equal the
# first, character by character; then the text between the marks is what the assistant wrote.
#
# A turn of nothing but content is learnt from its text to the end-of-turn token behind it. Where reasoning or calls are
# written, what the template puts around them (`<tool_call>`, a channel) must be learnt too. Such a turn begins where
# the header ends (that of the same turn with nothing but content, or the generation prompt), and ends where the render
# of the conversation up to it ends.


CHANGED = "the template changes the assistant's text, so it cannot be masked"
NO_STOP = "no end-of-turn token follows the assistant's text: the model would never learn to stop"
MEND_TEMPLATE = "give another template (model.chat_template), or train on all tokens (data.train_on: all)"
MEND_EARLIER = (
    "train on the last answer only (data.train_on: last), on each as it would be asked for (data.split_turns: true), "
    "or give another template (model.chat_template)"
)
MOST_TURNS = 1000  # if each turn needs a render of its own
THINKING = re.compile("(</?think>)")
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class CharSpan(NamedTuple):
    """Characters [start, end) to be learnt.

    `stops` are the tokens that end the turn, one in most templates: they follow, perhaps after white space, or, if the
    span is `closed`, the last of them is its end. Before another turn, only the first of several must be there.
    """

    start: int
    end: int
    stops: tuple[str, ...]
    closed: bool


class Leaf(NamedTuple):
    """A text that the assistant wrote, as it is in the row."""

    turn: int
    name: str
    text: str


class Found(NamedTuple):
    """The leaf number `leaf`, at the characters [start, end)."""

    leaf: int
    start: int
    end: int


class EndMarks:
    """The added tokens that can end a turn."""

    def __init__(self, tokens: Sequence[str]) -> None:
        # Some vocabularies list runs of spaces or newlines as added tokens; those end no turn.
        self.tokens = [t for t in tokens if t.replace("▁", " ").strip()]
        self._pattern = any_of(self.tokens)

    def first(self, text: str) -> tuple[str, ...]:
        """Return the tokens that the text begins with, one directly after the other; leading white space is skipped."""
        text, found = text.lstrip(), list[str]()
        while token := self._pattern.match(text):
            found.append(token[0])
            text = text[token.end() :]
        return tuple(found)

    def last(self, text: str) -> str | None:
        """Return the token that the text ends with."""
        found = list(self._pattern.finditer(text))
        return found[-1][0] if found and found[-1].end() == len(text) else None


class Masker:
    """One conversation under one template; `turns` are the turns to find, by number.

    Raises DataError: the template fails, or leaves out something that the assistant did not write.
    """

    def __init__(
        self, template: Template, marks: EndMarks, chat: Chat, turns: Sequence[int], where: RowLocation
    ) -> None:
        self.template, self._marks, self._where = template, marks, where
        self._chat, self._turns = chat, turns
        template.check(chat, where)
        self._shown = [template.shown(message) for message in chat.messages]
        self.rendered = self._render(self._shown)  # the conversation as the template writes it
        # Digits pass through quoting, escaping and capitals as they are; no other 9 is in these, so none overlap.
        salt = next(salt for n in count(0o7351) if (salt := f"9{n:o}") not in self.rendered)
        self._open, self._close = f"{salt}:", f"{salt};"
        self._marked = re.compile(f"{self._open}([0-9]+):(.*?){self._close}", re.DOTALL)
        # A template that takes reasoning out of a content writes the `<think>` that such a content lacks, before it.
        self._cut(split=any(_unopened(chat.messages[i].content) for i in turns))

    def spans(self) -> list[CharSpan]:
        """Return what is learnt of each of the turns, in order; raises DataError if it cannot be proven."""
        found: dict[int, list[Found]] = {i: [] for i in self._turns}
        for leaf in self._proven():
            found[self._leaves[leaf.leaf].turn].append(leaf)
        spans: list[CharSpan] = []
        stops: tuple[str, ...] = ()
        for i, mine in reversed(found.items()):
            if [self._leaves[f.leaf].name for f in mine] == ["content"]:
                stops = stops or self._stops(i, mine[0])
                spans.append(CharSpan(mine[0].start, mine[0].end, stops, closed=False))
            else:
                spans.append(self._turn(i, mine))
        spans.reverse()
        if any(before.end > after.start for before, after in pairwise(spans)):
            raise self._refused(CHANGED)
        return spans

    def changes(self, i: int) -> tuple[str, str] | None:
        """Return what later turns change of the text up to the end of turn `i`: (without them, with them), or None."""
        tail = self._until(i)[-1]
        alone = self._render(self._shown[: i + 1])
        alone = alone[: len(alone) - len(tail) + len(_ending(tail, "".join(self._marks.first(self._plain(i, 0)[1]))))]
        if self.rendered.startswith(alone):
            return None
        same = next((n for n, (a, b) in enumerate(zip(alone, self.rendered)) if a != b), len(self.rendered))
        return alone[same:], self.rendered[same:]

    def _cut(self, split: bool) -> None:
        self._split = split
        self._leaves: list[Leaf] = []
        self._numbered: dict[int, int] = {}  # the number of each turn's first leaf
        for i in self._turns:
            self._numbered[i] = len(self._leaves)
            self._leaves += _leaves(i, self._chat.messages[i], split)

    def _render(self, turns: Sequence[Shown], prompt: bool = False) -> str:
        return self.template.render(turns, self._where, self._chat.tools, prompt)

    def _turn_with(self, i: int, texts: Mapping[int, str], twice: bool = False) -> Shown:
        """Return turn `i` with these leaves, by number, between marks; `twice`: each of its calls made two times."""
        numbers = iter(range(self._numbered[i], len(self._leaves)))

        def mark(name: str, text: str) -> str:
            k = next(numbers)
            return f"{self._open}{k}:{texts[k]}{self._close}" if k in texts else text

        message = _changed(self._chat.messages[i], mark, self._split)
        return self.template.shown(replace(message, calls=message.calls * 2) if twice else message)

    def _with(self, texts: Mapping[int, str]) -> str:
        turns = list(self._shown)
        for i in self._turns:
            turns[i] = self._turn_with(i, texts)
        return self._render(turns)

    def _prove(self, texts: Mapping[int, str]) -> list[Found]:
        """Return the places of these leaves in the rendered text, if it is made of exactly them; else nothing."""
        pieces = self._marked.split(self._with(texts))
        found, text, at = list[Found](), [pieces[0]], len(pieces[0])
        for k, inner, piece in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
            found.append(Found(int(k), at, at + len(inner)))
            text += inner, piece
            at += len(inner) + len(piece)
        seen = Counter(f.leaf for f in found)
        if "".join(text) != self.rendered or seen.keys() != texts.keys():
            return []
        for k, start, end in found:  # texts of a call may be quoted, and its answer may repeat a call's name
            called = self._leaves[k].name.startswith("tool_calls")
            if not called and (seen[k] > 1 or self.rendered[start:end] != texts[k]):
                return []
        return found

    def _proven(self) -> list[Found]:
        """Return the places of all leaves, each with or without white space at its ends, as the template writes it."""
        texts = {k: leaf.text for k, leaf in enumerate(self._leaves)}
        bare = {k: text.strip() for k, text in texts.items()}
        if found := self._prove(texts) or (self._prove(bare) if bare != texts else []):
            return found
        self._slow()
        for k, text in texts.items():
            left = [text, text.lstrip("\n"), text.lstrip()]  # without white space or newlines at its ends
            forms = dict.fromkeys(form for start in left for form in (start, start.rstrip("\n"), start.rstrip()))
            form = next((form for form in forms if self._prove({k: form})), None)
            if form is None:
                if not self._split and any(THINKING.search(self._chat.messages[i].content) for i in self._turns):
                    self._cut(split=True)
                    return self._proven()
                raise self._lost(k)
            texts[k] = form
        if found := self._prove(texts):
            return found
        raise self._refused(CHANGED)

    def _until(self, i: int, twice: bool = False) -> list[str]:
        """Render the conversation up to turn `i`, split at its leaves: text, number, leaf, text, ..., leaf, text."""
        texts = {k: leaf.text for k, leaf in enumerate(self._leaves) if leaf.turn == i}
        return self._marked.split(self._render([*self._shown[:i], self._turn_with(i, texts, twice)]))

    def _stops(self, i: int, content: Found) -> tuple[str, ...]:
        """Return the tokens that end a turn of nothing but content, where no turn follows (its header is no end)."""
        last = i + 1 == len(self._chat.messages)
        stops = self._marks.first(self.rendered[content.end :] if last else self._until(i)[-1])
        if not stops:
            raise self._refused(NO_STOP)
        return stops

    def _turn(self, i: int, mine: list[Found]) -> CharSpan:
        """Return the span of a turn with more than content, its end-of-turn token included."""
        self._slow()
        pieces = self._until(i)
        leaves = [int(k) for k in pieces[1::3]]
        header, behind = self._plain(i, 0)
        usual = "".join(self._marks.first(behind))
        ending = _ending(pieces[-1], usual)
        own = mine[: len(leaves)]  # the answer to a call may name it again
        between = [self.rendered[a.end : b.start] for a, b in pairwise(own)]
        same = [f.leaf for f in own] == leaves and {f.leaf for f in mine} == set(leaves) and between == pieces[3:-1:3]
        if not own or not same or not self.rendered.startswith(ending, own[-1].end):
            raise self._refused(f"the template writes messages[{i}] otherwise once later turns follow", MEND_EARLIER)
        stop = self._marks.last(ending)
        if stop is None or not usual or not (ending.endswith(usual) or self._ends(i, stop)):
            raise self._refused(NO_STOP)
        first, end = own[0].start, own[-1].end + len(ending)
        fitting = (len(h) for h in self._headers(i, header) if len(h) <= first and self.rendered.startswith(h))
        if (start := next(fitting, None)) is None:
            found = f"the template begins messages[{i}] neither like a plain answer nor as it asks for one"
            raise self._refused(f"{found}: where its header ends cannot be told")
        for value in _scalars([call["function"]["arguments"] for call in self._chat.messages[i].calls]):
            if not any(form in self.rendered[start:end] for form in (str(value), json.dumps(value))):
                raise self._refused(f"{CHANGED}: {json.dumps(value)} of messages[{i}].tool_calls is left out")
        return CharSpan(start, end, (stop,), closed=True)

    def _plain(self, i: int, after: int) -> tuple[str, str]:
        """Return what is written before and behind turn `i` if it is nothing but content, and so many turns follow."""
        spoken = self.template.shown(Message("assistant", f"{self._open}0:a{self._close}"))
        pieces = self._marked.split(self._render([*self._shown[:i], spoken, *self._shown[i + 1 : i + 1 + after]]))
        return pieces[0], pieces[-1]

    def _headers(self, i: int, plain: str) -> Iterator[str]:
        """Yield the text up to where turn `i` may begin: behind a plain turn's header, or the generation prompt."""
        yield plain
        with suppress(DataError):  # the answer to a call can be refused where no call was made
            yield self._plain(i, len(self._chat.messages))[0]
        if i:
            bare, asked = (self._render(self._shown[:i], prompt) for prompt in (False, True))
            if len(asked) > len(bare) and asked.startswith(bare):
                yield asked

    def _ends(self, i: int, stop: str) -> bool:
        """Return whether a token that ends turns with calls ends only the turn, and not each call."""
        try:
            pieces = self._until(i, twice=True)
        except DataError:
            return False  # a template that takes one call a turn: the end of a call may be that of the turn
        return "".join(pieces[3::3]).count(stop) == 1

    def _slow(self) -> None:
        if len(self._turns) > MOST_TURNS:
            raise self._refused(f"{len(self._turns)} answers, calls or trimmed texts among them; at most {MOST_TURNS}")

    def _lost(self, k: int) -> DataError:
        turn, name, text = self._leaves[k]
        gone = f"{self._open}{k}:" not in self._with({k: text})
        found = f"{CHANGED}: messages[{turn}].{name} is {'left out' if gone else 'changed'}"
        return self._refused(found, MEND_TEMPLATE if turn == self._turns[-1] else MEND_EARLIER)

    def _refused(self, found: str, do: str = MEND_TEMPLATE) -> DataError:
        return DataError(f"to mask the messages at {self._where}", found, do)


def _unopened(content: str) -> bool:
    """Return whether the first thinking mark of a content is the one that ends reasoning."""
    first = THINKING.search(content)
    return first is not None and first[0] == "</think>"


def _ending(tail: str, usual: str) -> str:
    """Return what belongs to a turn of the text behind its last leaf, if no turn follows; plain turns end `usual`."""
    return tail[: tail.index(usual) + len(usual)] if usual and usual in tail else tail.rstrip()


def _changed(message: Message, change: Callable[[str, str], str], split: bool) -> Message:
    """Return the message with each text of the assistant replaced by change(its name, it); blank ones stay.

    With `split` a content is taken apart at `<think>` and `</think>`.
    """

    def walk(name: str, value: Any) -> Any:
        if isinstance(value, str):
            return change(name, value) if value.strip() else value
        if isinstance(value, dict):
            return {key: walk(f"{name}.{key}", inner) for key, inner in value.items()}
        return [walk(f"{name}[{n}]", inner) for n, inner in enumerate(value)] if isinstance(value, list) else value

    parts = THINKING.split(message.content) if split else [message.content]
    if len(parts) == 1:
        content = walk("content", message.content)
    else:
        content = "".join(part if n % 2 else walk(f"content[{n // 2}]", part) for n, part in enumerate(parts))
    calls = tuple(
        {**call, "function": walk(f"tool_calls[{n}].function", call["function"])}
        for n, call in enumerate(message.calls)
    )
    return replace(message, content=content, reasoning=walk("reasoning", message.reasoning), calls=calls)


def _leaves(turn: int, message: Message, split: bool) -> list[Leaf]:
    leaves: list[Leaf] = []

    def keep(name: str, text: str) -> str:
        leaves.append(Leaf(turn, name, text))
        return text

    _changed(message, keep, split)
    return leaves


def _scalars(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _scalars(inner)
    elif not isinstance(value, str):
        yield value


# --- Control tokens in the text of a message: they would end its turn, or forge another.


def any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return an expression that matches any of these texts, the longest at a place."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=lambda t: (-len(t), t)))) or "(?!)")


def refuse(chat: Chat, controls: re.Pattern[str], where: RowLocation) -> None:
    """Raise DataError if a message, a call or a tool contains a control token as text."""
    named: list[tuple[str, Any]] = [
        (f"messages[{i}]", [m.content, m.reasoning, m.name, m.call_id, m.calls]) for i, m in enumerate(chat.messages)
    ]
    named += [(f"tools[{i}]", tool) for i, tool in enumerate(chat.tools)]
    for name, parts in named:
        for text in _texts(parts):
            if found := controls.search(text):
                why = (
                    f"{name} holds the text {found[0]}, which the tokenizer takes for its control token: a forged turn"
                )
                raise DataError(f"to learn from the messages at {where}", why, "take it out, or write it otherwise")


def _texts(value: Any) -> Iterator[str]:
    """Yield all strings in nested lists and objects, names too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts([*value.items()])
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


TRAIN_ON = ("assistant", "last", "all")
LONGEST_TEMPLATE_bytes = 64 * 2**10
REASONING_MARKS = frozenset({"<think>", "</think>"})  # tokens that an answer's text may contain


class _Draft(NamedTuple):
    """A row's text before it is tokenised, and the characters that are learnt of it."""

    where: RowLocation
    text: str
    special: bool  # add the tokenizer's special tokens: no template has written them
    seam: int = 0  # learnt from this character on
    spans: tuple[CharSpan, ...] = ()  # learnt, or (if `rest`) not learnt
    rest: bool = True  # whether the text outside of the spans is learnt


class Tokens:
    """A fast tokenizer with its chat template, or the one given: rows in, documents out.

    `today` is the date for templates that write it into the system prompt; None is the real one, with which the same
    row gives other ids tomorrow.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: str | None = None, today: datetime.date | None = None
    ) -> None:
        if not tokenizer.is_fast:
            found = "a slow tokenizer, which cannot tell where in a text its tokens lie"
            asked = f"the tokenizer of {tokenizer.name_or_path or 'the model'}"
            raise DataError(asked, found, "use a model folder with a tokenizer.json")
        self.tokenizer = tokenizer
        self._given = template
        self._today = today
        self._engine = _engine(tokenizer)
        self._eos = cast("int | None", tokenizer.eos_token_id)
        self._end = "" if self._eos is None else str(tokenizer.convert_ids_to_tokens(self._eos))
        self._added = {str(token): i for i, token in tokenizer.added_tokens_decoder.items()}
        self._marks = EndMarks(list(self._added))
        self._ends = frozenset(self._added[token] for token in self._marks.tokens)
        control = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._control = frozenset(control) & frozenset(self._marks.tokens) - REASONING_MARKS
        self._controls = any_of(self._control)
        self._bos = self._added.get(str(tokenizer.special_tokens_map.get("bos_token")))

    def batch(
        self, samples: Sequence[tuple[RowLocation, Row]], train_on: str
    ) -> list[tuple[Document, ...] | DataError]:
        """Return each row's document, the two of a pair (chosen, rejected), or the error that names the row.

        Args:
            train_on: what is learnt of a conversation or a completion: `assistant` all answers, `last` the last one,
                `all` every token but the first. A text is always learnt whole.
        """
        drafts: list[list[_Draft] | DataError] = []  # of each row
        for where, row in samples:
            try:
                drafts.append([self._draft(part, train_on, where) for part in parts_of(row)])
            except DataError as error:
                drafts.append(error)
        encodings = iter(self._encode([draft for of in drafts if isinstance(of, list) for draft in of]))
        made: list[tuple[Document, ...] | DataError] = []
        for of in drafts:
            if isinstance(of, DataError):
                made.append(of)
                continue
            encoded = [(draft, next(encodings)) for draft in of]
            row = samples[len(made)][1]
            labels = row.labels if isinstance(row, Judged) else [True] * len(encoded)
            try:
                judged = zip(encoded, labels, strict=True)
                made.append(tuple([replace(self._document(*pair), desirable=label) for pair, label in judged]))
            except DataError as error:
                made.append(error)
        return made

    def document(self, row: Row, train_on: str, where: RowLocation) -> Document:
        """Return the token ids of a row that is no pair, and which are learnt; raises DataError if none would be."""
        assert not isinstance(row, Pair | Judged)
        made = self.batch([(where, row)], train_on)[0]
        if isinstance(made, DataError):
            raise made
        return made[0]

    def marked(self, row: Row) -> bool:
        """Return whether a plain text contains special tokens; its end-of-text token does not count.

        They are tokenized as special tokens: pretraining data is written so. In messages they are refused.
        """
        if not isinstance(row, Text | Completion):
            return False
        text = schema.row_text(row)
        return self._controls.search(text.removesuffix(self._end)) is not None

    def shown(self, ids: Sequence[int]) -> str:
        """Return the first and last tokens of a document as text, in one line."""
        parts = [ids] if len(ids) <= HEAD + TAIL else [ids[:HEAD], ids[-TAIL:]]
        decode = self._engine.decode
        return " ... ".join(visible(decode(list(part), skip_special_tokens=False)) for part in parts)

    def template(self, tools: bool = False) -> str:
        """Return the source of the chat template, of several that of rows with `tools` or of those without.

        Raises DataError: there is none, or a monstrous one.
        """
        return (self._tool_template if tools else self._template).source

    def tagged(self) -> bool:
        """Return whether the chat template marks what the assistant generates; what is learnt does not depend on it."""
        found = False
        for tools in (False, True):
            with suppress(DataError):
                found |= GENERATION.search(self.template(tools)) is not None
        return found

    def masker(self, chat: Chat, turns: Sequence[int], where: RowLocation) -> Masker:
        """Return the conversation under the template; raises DataError as `Masker`."""
        return Masker(self._tool_template if chat.tools else self._template, self._marks, chat, turns, where)

    @cached_property
    def _forgers(self) -> re.Pattern[str]:
        """Tokens that no message may contain: special ones, and those that the template writes around plain turns."""
        plain = (Message("system", "a"), Message("user", "b"), Message("assistant", "c"), Message("user", "d"))
        written, nowhere = "", RowLocation(Path("the template"), 0)
        for name, turns in product(("_template", "_tool_template"), (plain, plain[1:])):
            with suppress(DataError):  # a template may refuse a system turn, and of several none may be the default
                template = getattr(self, name)
                written += template.render([template.shown(turn) for turn in turns], nowhere)
        marks = {token for token in self._marks.tokens if token in self._control or token in written}
        return any_of(marks - REASONING_MARKS)

    @cached_property
    def _template(self) -> Template:
        return self._opened(tools=False)

    @cached_property
    def _tool_template(self) -> Template:
        """The template of rows with tools: of several the one named `tool_use`, as transformers chooses."""
        own = self._opened(tools=True)
        with suppress(DataError):  # there may be no other
            return self._template if self._template.source == own.source else own
        return own

    def _opened(self, tools: bool) -> Template:
        try:
            source = self.tokenizer.get_chat_template(self._given, [] if tools else None)
        except ValueError as error:
            found = "the tokenizer has no chat template, or several and no default"
            raise DataError("training on messages", found, GIVE_TEMPLATE) from error
        if not isinstance(source, str):
            found = f"the tokenizer has {source!r}, no text"
            raise DataError("the chat template", found, GIVE_TEMPLATE)
        if (size := len(source.encode())) > LONGEST_TEMPLATE_bytes:
            found = f"{size} bytes; at most {LONGEST_TEMPLATE_bytes} are taken"
            raise DataError("the chat template", found, GIVE_TEMPLATE)
        source = source if self._today is None else _dated(source, self._today)
        return Template(source, self.tokenizer.special_tokens_map)

    def _draft(self, row: Text | Chat | Completion, train_on: str, where: RowLocation) -> _Draft:
        assert train_on in TRAIN_ON, train_on
        if isinstance(row, Text):
            return _Draft(where, row.text, special=True)
        if isinstance(row, Completion):
            seam = 0 if train_on == "all" else len(row.prompt)
            return _Draft(where, row.prompt + row.completion, special=True, seam=seam)
        turns, asked = answers(row, train_on), f"to learn from the messages at {where}"
        if not turns and train_on != "all":
            raise DataError(asked, "no answer of them is to be learnt", "take them out")
        try:
            masker = self.masker(row, turns, where)
            refuse(row, self._forgers, where)
            spans = tuple(masker.spans()) if turns else ()
            if train_on == "assistant":
                masker.template.check_steady(masker, row, turns, where)
        except RecursionError as error:
            raise DataError(f"to mask the messages at {where}", "calls nested too deeply", "take them out") from error
        if unknown := {stop for span in spans for stop in span.stops} - self._control - REASONING_MARKS:
            refuse(row, any_of(unknown), where)
        return _Draft(where, masker.rendered, special=False, spans=spans, rest=train_on == "all")

    def _encode(self, drafts: list[_Draft]) -> list[Encoding]:
        """Tokenize the drafts' texts, with offsets only where `_document` needs them."""
        encodings: dict[int, Encoding] = {}
        groups: dict[tuple[bool, bool], list[int]] = {}  # (with special tokens, with offsets): drafts
        for n, draft in enumerate(drafts):
            groups.setdefault((draft.special, draft.seam > 0 or draft.spans != ()), []).append(n)
        for (special, offsets), members in groups.items():
            encode = self._engine.encode_batch if offsets else self._engine.encode_batch_fast
            encodings.update(zip(members, encode([drafts[n].text for n in members], add_special_tokens=special)))
        return [encodings[n] for n in range(len(drafts))]

    def _document(self, draft: _Draft, encoding: Encoding) -> Document:
        ids = np.array(encoding.ids, np.int32)
        if not draft.special:
            targets = np.full(len(ids), draft.rest)
            if draft.spans:
                offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            for span in draft.spans:
                first, last = self._tokens(draft, ids, offsets, span)
                targets[first : last + 1] = not draft.rest
        else:
            if self._eos is None:
                asked, do = f"the text at {draft.where} with its end marked", "set eos_token in tokenizer_config.json"
                raise DataError(asked, "the tokenizer has no end-of-text token (eos_token)", do)
            if not len(ids) or ids[-1] != self._eos:
                ids = np.concatenate((ids, np.array([self._eos], np.int32)))
            targets = np.ones(len(ids), bool)
            if draft.seam:
                # The token that reaches over the seam is learnt: it is what must follow the tokens before it.
                covers = (encoding.char_to_token(at) for at in range(draft.seam, len(draft.text)))
                targets[: next((token for token in covers if token is not None), None)] = False
        if self._bos is not None and ids[:2].tolist() == [self._bos, self._bos]:
            writer = "tokenizer" if draft.special else "chat template"
            asked = f"to begin a document with one {self.tokenizer.convert_ids_to_tokens(self._bos)}"
            do = f"take one out of the rows' text or the template: the {writer} writes one by itself"
            raise DataError(asked, f"two of them; at {draft.where}: '{self.shown(ids.tolist())}'", do)
        targets[:1] = False
        if not ((len(ids) and targets[-1]) or targets.any()):  # the end of most rows is learnt, and `any` is slow
            asked = f"to learn from the row at {draft.where}"
            raise DataError(asked, "not one token of it would be learnt", "take it out")
        return Document(ids, targets)

    def _tokens(self, draft: _Draft, ids: np.ndarray, offsets: np.ndarray, span: CharSpan) -> tuple[int, int]:
        """Return the first and the last token of a span, its end-of-turn token included.

        Args:
            ids, offsets: (n,) and (n, 2), the tokens and the characters [start, end) that each covers.
        """
        asked, (starts, ends) = f"to mask the messages at {draft.where}", offsets.T
        start, end = span.start, span.end - span.closed
        stop, *further = (self._added[token] for token in span.stops)
        # The token that ends a turn begins where the text ends, or a little earlier if it swallows white space
        # (`lstrip`). White space may come between (some templates write one space before it); it is learnt too, or the
        # model could not reach the end by itself.
        last = int(ends.searchsorted(end, "right"))
        while last < len(ids) and ids[last] != stop:
            if ids[last] in self._ends and not span.closed:
                other = self.tokenizer.convert_ids_to_tokens(int(ids[last]))
                found = f"{other} follows an answer, {span.stops[0]} the last: it would never learn to stop there"
                raise DataError(asked, found, MEND_EARLIER)
            last = len(ids) if span.closed or draft.text[end : ends[last]].strip() else last + 1
        if last == len(ids):
            raise DataError(asked, NO_STOP, MEND_TEMPLATE)
        for stop in further:
            if ids[last + 1 : last + 2] != stop:
                break
            last += 1
        first = int(ends.searchsorted(start, "right"))
        # A header's mark that swallows white space (`rstrip`) can reach into the text; it is the header's still.
        while first < last and ids[first] in self._ends and starts[first] < start:
            first += 1
        return first, last


def answers(chat: Chat, train_on: str) -> list[int]:
    """Return the turns to be masked, by number: those that are learnt, or with `all` those that are not."""
    turns = [i for i, message in enumerate(chat.messages) if message.role == "assistant"]
    if train_on == "all":
        return [i for i in turns if not chat.messages[i].learnt]
    turns = [i for i in turns if i >= chat.prompt and chat.messages[i].learnt]
    return turns[-1:] if train_on == "last" else turns


def visible(text: str) -> str:
    """Return text with its control characters written out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _dated(source: str, today: datetime.date) -> str:
    """Return the template with its calls for the date replaced: the sandbox takes no function of ours."""
    now = r"""\bstrftime_now\(\s*(["'])([^"'\\]*)\1\s*\)"""
    return re.sub(now, lambda call: f"{call[1]}{today.strftime(call[2])}{call[1]}", source)


def _engine(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Return a private copy of the tokenizer's engine whose offsets are exact.

    Byte-level post-processors trim white space off the offsets, so that a token of spaces seems to cover nothing.
    """
    from tokenizers import Tokenizer

    source = tokenizer.backend_tokenizer.to_str()
    engine = Tokenizer.from_str(source.replace('"trim_offsets":true', '"trim_offsets":false'))
    engine.no_truncation()
    engine.no_padding()
    return engine


# --- The tokenizer of a run: the model's own, with special tokens added and its chat template or the one given.

GIVE_TEMPLATE = "give one: `model.chat_template: chatml`, which is built in, or `model.chat_template: FILE.jinja`"
START, END = "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
AROUND = ("{}", "a{}b", "a {} b\n")  # texts in which an added token must come out as it went in


def open_tokens(config: Config, folder: Path | None, today: datetime.date | None = None) -> Tokens | None:
    """Return the model's tokenizer, as the run changes it, with its chat template; None for a shape without one.

    Raises:
        ConfigError: no such template, or tokens that cannot be added.
        NeedsError: no tokenizer there.
    """
    if config.model.tokenizer is not None:
        folder = Path(config.model.tokenizer)
    if folder is None:
        return None
    if config.data.random is not None and not config.model.add_tokens and not (folder / "tokenizer.json").exists():
        return None  # random tokens need none
    tokenizer = open_tokenizer(folder)
    if config.model.add_tokens:
        add_tokens(tokenizer, config.model.add_tokens)
        _refuse_moved(folder, tokenizer, config.model.add_tokens)
    given = None if config.model.chat_template is None else _template(config.model.chat_template, tokenizer)
    if given is not None:
        tokenizer.chat_template = given
    return Tokens(tokenizer, given, today)


def open_tokenizer(folder: Path) -> Any:
    """Return transformers' tokenizer of a folder.

    Raises:
        NeedsError: there is none, a package that reads it is missing, or config.json beside it is not read.
    """
    from transformers import AutoTokenizer

    asked = f"the tokenizer of {folder}"
    try:
        with transformers_silenced():
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of its files: what is wrong in them decides the class of the exception
        if (wrong := _config_error(folder)) is not None:
            raise NeedsError(f"{folder / 'config.json'}", reason(wrong), "correct that in config.json") from None
        pieces = [file.name for file in folder.glob("*.model") if file.read_bytes()[:1] == b"\n"]  # a protobuf message
        if pieces and not (folder / "tokenizer.json").is_file():
            missing = [name for name in ("sentencepiece", "protobuf") if library(name) is None]
            found = f"{pieces[0]} without tokenizer.json, which sentencepiece reads: "
            found += f"not installed: {', '.join(missing)}" if missing else reason(error)
            do = f"pip install {' '.join(missing)}" if missing else "download the model again"
            raise NeedsError(asked, found, f"{do}, or put the model's tokenizer.json there") from None
        raise NeedsError(asked, reason(error), "put its tokenizer.json there") from None
    if isinstance(tokenizer.chat_template, str):
        tokenizer.chat_template = tokenizer.chat_template.removeprefix("\ufeff")
    return tokenizer


def _config_error(folder: Path) -> Exception | None:
    """Return the error of reading config.json, which transformers reads first for a tokenizer; None: there is none."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        return None
    try:
        AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # checks that the families define themselves are of many classes
        return error
    return None


def add_tokens(tokenizer: Any, tokens: tuple[str, ...]) -> tuple[str, ...]:
    """Add special tokens to a tokenizer; return the new ones in the order of their ids.

    One that it had and that was not special is from now on, under its id. Raises ConfigError for one that is a word of
    its vocabulary, or that it does not read back as one token.
    """
    from tokenizers import AddedToken

    vocabulary, added = tokenizer.get_vocab(), {str(t): t for t in tokenizer.added_tokens_decoder.values()}
    for token in tokens:
        asked = f"`model.add_tokens`: {token!r}"
        if token != token.strip():
            raise ConfigError(asked, "white space at its ends, which templates cut off", "leave it out")
        if token in vocabulary and token not in added:
            found = "a word of this tokenizer's vocabulary: every text that has it would be read otherwise"
            raise ConfigError(asked, found, "take one that no text has, such as <|im_start|>")
    fresh = tuple(token for token in tokens if token not in vocabulary)
    given = [AddedToken(t, special=True, normalized=False) for t in fresh]
    for old in (added[t] for t in tokens if t in added and not added[t].special):
        ways = {way: getattr(old, way) for way in ("single_word", "lstrip", "rstrip", "normalized")}
        given.append(AddedToken(str(old), special=True, **ways))
    tokenizer.add_tokens(given, special_tokens=True)
    for token in tokens:
        own = tokenizer.convert_tokens_to_ids(token)
        for around in AROUND:
            ids = tokenizer.encode(around.format(token), add_special_tokens=False)
            if ids.count(own) != 1 or tokenizer.decode([own]) != token:
                found = f"the tokenizer reads {around.format(token)!r} as {tokenizer.convert_ids_to_tokens(ids)}"
                do = "take another, or a tokenizer that keeps special tokens whole (split_special_tokens: false)"
                raise ConfigError(f"`model.add_tokens`: {token!r}", found, do)
    return fresh


def _refuse_moved(folder: Path, tokenizer: Any, tokens: tuple[str, ...]) -> None:
    """Raise NeedsError for an added token that has another id once the tokenizer's files are written and read."""
    with TemporaryDirectory() as made:
        copy_tokenizer(folder, Path(made), tokenizer, tokens)
        again = open_tokenizer(Path(made))
    for token in tokens:
        own, there = tokenizer.convert_tokens_to_ids(token), again.convert_tokens_to_ids(token)
        if own != there:
            found = f"its id is {own} while training, and would be {there} in the exported tokenizer"
            raise NeedsError(f"`model.add_tokens`: {token!r}", found, "save the tokenizer with transformers 5 first")


def turn_ends(tokenizer: Any) -> list[int]:
    """Return the ids that end an answer under the tokenizer's template; none if they are unknown."""
    chat = Chat((Message("user", "a"), Message("assistant", "b")))
    with suppress(DataError):
        (span,) = Tokens(tokenizer).masker(chat, [1], RowLocation(Path("the template"), 0)).spans()
        return [int(tokenizer.convert_tokens_to_ids(stop)) for stop in span.stops[:1]]
    return []


def _template(given: str, tokenizer: Any) -> str:
    """Return the source of the template that a run names: a file's, or ChatML if `chatml` is no file."""
    path, asked = Path(given), f"`model.chat_template: {given}`"
    if not path.is_file():
        if given == "chatml":
            return _chatml(tokenizer)
        raise ConfigError(asked, "no such file", "name a file with a jinja template, or chatml")
    try:
        return path.read_text("utf-8-sig")  # without the byte order mark that some editors write
    except UnicodeDecodeError as error:
        raise ConfigError(asked, f"not UTF-8: {error.reason}", "save it as UTF-8") from None


def chatml_keys(folder: Path) -> dict[str, Any]:
    """Return the keys of `model` that give it ChatML; none if the folder's tokenizer has a chat template.

    Raises:
        NeedsError: as `open_tokenizer`.
    """
    tokenizer = open_tokenizer(folder)
    if tokenizer.chat_template:
        return {}
    lacking = _lacking(tokenizer)
    return {"chat_template": "chatml", **({"add_tokens": lacking} if lacking else {})}


def _lacking(tokenizer: Any) -> list[str]:
    """Return the special tokens of ChatML that a tokenizer has not."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return [token for token in (START, END) if token not in added]


def _chatml(tokenizer: Any) -> str:
    """Return ChatML, with the begin-of-text token before it if the tokenizer writes one before every text."""
    if lacking := _lacking(tokenizer):
        found = f"the tokenizer has no special token {' and no '.join(lacking)}"
        do = f'give it them: add_tokens: ["{START}", "{END}"] under model'
        raise ConfigError("`model.chat_template: chatml`", found, do)
    bos = tokenizer.bos_token_id
    return "{{ bos_token }}" + CHATML if bos is not None and tokenizer.encode("a")[:1] == [bos] else CHATML
