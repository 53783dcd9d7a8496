"""Render conversations with a chat template, and prove which characters the assistant wrote.

A shifted mask trains a wrong model silently. `Masker` proves the mask of any conversation by rendering it twice;
`Layout` proves it by one comparison for conversations of plain texts whose shape was proven before.
"""

from __future__ import annotations

import json
import operator
import re
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, chain, count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from jinja2.exceptions import TemplateError

from optrush.data import schema
from optrush.data.images import MARK
from optrush.data.schema import Chat, Message, RowLocation
from optrush.errors import ConfigError, DataError

# --- A chat template: compiled once, rendered in the sandbox, and probed for its handling of a conversation's parts.
#
# Templates differ in their inputs (a text or a list of parts; a call's arguments as object or JSON) and drop
# unknown parts silently. Rendering placeholders shows both; the source is never read.


LONGEST_RENDER_chars = 32 * 2**20
# Exceptions of rendering: filters check with `assert`, and Python compiles Jinja's output.
RENDERING = (
    TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError, AssertionError,
    SyntaxError,
)  # fmt: skip
MEND = "fix the row, or use another template (model.chat_template)"
MEAN_RENDER_s = 0.25  # the slowest templates in use take 0.02 s for a long conversation
MOST_BITS = 10_000  # of an integer that a template computes
MOST_ERROR_chars = 200  # of a template's error message, shown in ours
SHOWN = 4  # omitted parts listed in an error message
SHOWN_chars = 100  # of a difference, shown in an error message
PLACEHOLDER = "97351{:06}"  # digits survive quoting, escaping and capitalization
TEMPLATE = RowLocation(Path("the template"), 0)  # location of a conversation outside files

Shown = dict[str, Any]  # a message in a template's input form


class RenderLimits:
    """Limit untrusted template code: seconds per rendering, memory per block.

    A timer's signal ends a rendering, and a limit of the address space makes allocations fail. Time is CPU time, so the
    time in which a process is stopped does not count. Blocks nest: the outermost sets both limits, once for many rows;
    each tick of the timer counts for the current rendering. Both limits apply to the whole process, and only its main
    thread gets signals: in other threads blocks do nothing. Consecutive slow renderings use up `left_s`; each adds
    MEAN_RENDER_s.
    """

    def __init__(self, seconds: float, memory_bytes: int) -> None:
        self.seconds, self.memory_bytes = seconds, memory_bytes
        self.left_s = seconds
        self._start: float | None = None  # the thread's CPU time at the start of the innermost block
        self._depth = self._begun = self._ticks = 0
        self._seen = -1  # the rendering at the last tick
        self._before: tuple[Any, int] = (None, -1)  # the signal's handler, the soft limit of the address space

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        self._begun += 1
        self._depth += 1
        if self._depth == 1:
            soft, hard = resource.getrlimit(resource.RLIMIT_AS)
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = pages * resource.getpagesize() + self.memory_bytes
            resource.setrlimit(resource.RLIMIT_AS, (most if soft == -1 else min(soft, most), hard))
            self._before = (signal.signal(signal.SIGPROF, self._tick), soft)
            signal.setitimer(signal.ITIMER_PROF, self.seconds / TICKS, self.seconds / TICKS)
        self._start = time.thread_time()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Restore the process's limits if the block is the outermost; raise ConfigError if a limit was exceeded."""
        if threading.get_ident() != threading.main_thread().ident:
            return
        self._depth -= 1
        if not self._depth:
            signal.setitimer(signal.ITIMER_PROF, 0)
            handler, soft = self._before
            signal.signal(signal.SIGPROF, handler)
            resource.setrlimit(resource.RLIMIT_AS, (soft, resource.getrlimit(resource.RLIMIT_AS)[1]))
        if self._start is not None:
            used, self._start = time.thread_time() - self._start, None
            self.left_s = min(self.seconds, self.left_s + MEAN_RENDER_s) - used
            slow, self.left_s = self.left_s < 0, self.seconds if self.left_s < 0 else self.left_s
            if slow and error is None:
                raise _monstrous(f"{used:.1f} s of CPU time per rendering; the limit is {MEAN_RENDER_s} s on average")
        if isinstance(error, MemoryError):
            raise _monstrous(f"more than {self.memory_bytes >> 20} MiB of memory") from None

    def _tick(self, *_: object) -> None:
        self._seen, self._ticks = self._begun, self._ticks + 1 if self._seen == self._begun else 0
        if self._ticks >= TICKS and self._start is not None:  # else nothing is rendered
            raise _monstrous(f"more than {self.seconds:g} s of CPU time")


TICKS = 10  # timer ticks within the time limit of a rendering
LIMITS = RenderLimits(seconds=10, memory_bytes=1 << 30)


def _monstrous(what: str) -> ConfigError:
    """Return the error for a template that exceeds a limit; not a bad row, because the template is at fault."""
    return ConfigError("to render messages", f"the chat template takes {what}", "use another: model.chat_template")


def _bounded(operate: Callable[[Any, Any], Any], bits: Callable[[int, int], int]) -> Callable[[Any, Any], Any]:
    """Return an operator for templates that rejects huge integers: a signal cannot interrupt their computation."""

    def compute(left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int) and bits(left, right) > MOST_BITS:
            raise MemoryError
        return operate(left, right)

    return compute


OPERATORS = {
    "*": _bounded(operator.mul, lambda left, right: left.bit_length() + right.bit_length()),
    "**": _bounded(operator.pow, lambda left, right: left.bit_length() * right),
}


class Template:
    """A template's source, with the tokenizer's special tokens that it may write."""

    def __init__(self, source: str, special: Mapping[str, Any], frame: tuple[str, str] = ("", "")) -> None:
        """frame: its text for an image, and the replacement; "": unchanged."""
        self.source, self._frame = source, frame
        self._special = dict(special)

    def shown(self, message: Message) -> Shown:
        """Return the message in the template's input form."""
        shown = message.shown()
        if message.calls and self._json_arguments:
            shown["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": _json(call["function"]["arguments"])}}
                for call in message.calls
            ]
        if message.images:
            shown["content"] = _around_images(message.content)
        elif self._parts:
            shown["content"] = _parts(message.content)
        return shown

    def render(
        self, turns: Sequence[Shown], where: RowLocation, tools: Sequence[Any] = (), prompt: bool = False
    ) -> str:
        """Return the text of messages in the form of `shown`; with `prompt`, followed by the header of an answer.

        Raises DataError: the template failed, or its text is too long.
        """
        try:
            rendered = self._render(turns, tools, prompt)
            rendered.encode()
        except RENDERING as error:
            message = f"the chat template failed: {type(error).__name__}: {visible(str(error)[:MOST_ERROR_chars])}"
            raise DataError(f"to render the messages at {where}", message, MEND) from error
        if len(rendered) > LONGEST_RENDER_chars:
            message = f"the chat template wrote {len(rendered)} characters; the limit is {LONGEST_RENDER_chars}"
            raise DataError(f"to render the messages at {where}", message, MEND)
        return rendered

    def check(self, chat: Chat, where: RowLocation) -> None:
        """Raise DataError if the template leaves out the tools, a call, or a turn that is not the assistant's."""
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
        missing = [name for mark, name in names.items() if mark not in rendered]
        if missing:
            more = f", and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
            text = f"the chat template leaves out {', '.join(missing[:SHOWN])}{more}"
            raise DataError(f"to render the messages at {where}", text, MEND)

    @cached_property
    def literals(self) -> frozenset[str]:
        """String literals in the template's code, except roles and keys: it may search messages for them."""
        try:
            tokens = list(self._environment.lexer.tokenize(self.source))
        except TemplateError:  # rendering raises it again, with the row
            return frozenset()
        texts = {b.value for a, b in pairwise(tokens) if b.type == "string" and a.type != "lbracket"}
        plain = {*schema.ROLE_NAMES, "role", "content"}
        return frozenset(text for text in texts - plain if len(text.strip()) > 1)

    def _render(self, turns: Sequence[Shown], tools: Sequence[Any] = (), prompt: bool = False) -> str:
        # Like apply_chat_template, without copying the data, which is plain JSON already.
        with LIMITS:
            rendered = self._compiled.render(
                messages=turns, tools=list(tools) or None, documents=None, add_generation_prompt=prompt, **self._special
            )
        assert isinstance(rendered, str)
        return rendered.replace(*self._frame) if self._frame[0] else rendered

    @cached_property
    def _environment(self) -> Any:
        """Transformers' template environment, with bounded integers."""
        from transformers.utils.chat_template_utils import _compile_jinja_template

        environment = _compile_jinja_template("").environment.overlay()
        environment.intercepted_binops = frozenset(OPERATORS)  # read by jinja for each environment
        environment.binop_table = {**environment.binop_table, **OPERATORS}
        return environment

    @cached_property
    def _compiled(self) -> Any:
        return self._environment.from_string(self.source)

    @cached_property
    def _parts(self) -> bool:
        """Whether a turn's content must be a list of parts: the template loses or rejects a text."""
        texts = [PLACEHOLDER.format(i) for i in range(2)]
        talk = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)]
        split = [{**turn, "content": _parts(turn["content"])} for turn in talk]
        return not self._holds(talk, texts) and self._holds(split, texts)

    @cached_property
    def _json_arguments(self) -> bool:
        """Whether a call's arguments must be JSON: the template loses or rejects an object."""
        value = PLACEHOLDER.format(0)
        ask, empty = (_parts(text) if self._parts else text for text in ("a", ""))

        def talk(arguments: Any) -> list[Shown]:
            call = {"id": "0", "type": "function", "function": {"name": "f", "arguments": arguments}}
            return [{"role": "user", "content": ask}, {"role": "assistant", "content": empty, "tool_calls": [call]}]

        return not self._holds(talk({"x": value}), [value]) and self._holds(talk(_json({"x": value})), [value])

    def _holds(self, turns: Sequence[Shown], texts: list[str]) -> bool:
        try:
            rendered = self._render(turns)
        except RENDERING:
            return False
        return all(text in rendered for text in texts)


def _parts(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}]


def _around_images(content: str) -> list[dict[str, Any]]:
    """Return a content as a list of parts: texts, with images between them."""
    first, *rest = content.split(MARK)
    parts = _parts(first) if first else []
    for text in rest:
        parts += [{"type": "image"}, *(_parts(text) if text else [])]
    return parts


def _named(tool: dict[str, Any], name: str) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], "name": name}} if "function" in tool else {**tool, "name": name}


def _json(arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False)


# --- The assistant's characters in a rendered conversation: proven or rejected, never guessed.
#
# The conversation is rendered twice: once unchanged, once with every text that the assistant wrote (a content, a
# reasoning, a call's name, a value of its arguments) between two marks. Without the marks, the second must equal the
# first, character by character; then the text between the marks is the assistant's.
#
# The targets of a content-only turn are its text and the end-of-turn token. Where reasoning or calls are
# written, the template's text around them (`<tool_call>`, a channel) is a target, too. Such a turn starts where
# the header ends (of the same turn with only content, or of the generation prompt), and ends where the render
# of the conversation up to it ends.


CHANGED = "the template changes the assistant's text, so it cannot be masked"
NO_STOP = "no end-of-turn token follows the assistant's text: the model would not learn to stop"
MEND_TEMPLATE = "use another template (model.chat_template), or train on all tokens (data.train_on: all)"
KEEP_THOUGHTS = (
    "write it into the content between <think> and </think>; use a template that writes it (model.chat_template); or "
    "train without it: `data.columns: {{'messages[].{}': ignore}}`"
)
MEND_EARLIER = (
    "train on the last answer only (data.train_on: last), on each answer as its own row (data.split_turns: true), "
    "or use another template (model.chat_template)"
)
MOST_TURNS = 1000  # if each turn needs its own render
MOST_STEADY = 2000  # each is rendered with the turns before it
THINKING = re.compile("(</?think>)")


class CharSpan(NamedTuple):
    """Target characters [start, end).

    `stops` are the tokens that end the turn, one in most templates. They follow the span, possibly after white space;
    the last of them is inside a `closed` span. Before another turn, only the first of several is required.
    """

    start: int
    end: int
    stops: tuple[str, ...]
    closed: bool


class Leaf(NamedTuple):
    """A text of the assistant in the row."""

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
        # Some vocabularies list runs of spaces or newlines as added tokens; these do not end turns.
        self.tokens = [t for t in tokens if t.replace("▁", " ").strip()]
        self._pattern = any_of(self.tokens)

    def first(self, text: str) -> tuple[str, ...]:
        """Return the consecutive tokens at the start of the text; leading white space is skipped."""
        text, tokens = text.lstrip(), list[str]()
        while token := self._pattern.match(text):
            tokens.append(token[0])
            text = text[token.end() :]
        return tuple(tokens)

    def last(self, text: str) -> str | None:
        """Return the token at the end of the text; None if there is none."""
        matches = list(self._pattern.finditer(text))
        return matches[-1][0] if matches and matches[-1].end() == len(text) else None


class Masker:
    """One conversation under one template; `turns` are the turns to find, by number.

    `checked`: a conversation of the same shape was rendered completely.

    Raises DataError: the template fails, or leaves out something that the assistant did not write.
    """

    def __init__(
        self,
        template: Template,
        marks: EndMarks,
        chat: Chat,
        turns: Sequence[int],
        where: RowLocation,
        checked: bool = False,
    ) -> None:
        self.template, self._marks, self._where = template, marks, where
        self._chat, self._turns = chat, turns
        if not checked:
            template.check(chat, where)
        self._shown = [template.shown(message) for message in chat.messages]
        self.rendered = self._render(self._shown)  # the rendered conversation
        # Digits survive quoting, escaping and case changes. The marks have one 9 each, so they cannot overlap.
        salt = next(salt for n in count(0o7351) if (salt := f"9{n:o}") not in self.rendered)
        self._open, self._close = f"{salt}:", f"{salt};"
        self._marked = re.compile(f"{self._open}([0-9]+):(.*?){self._close}", re.DOTALL)
        # A template that extracts reasoning from a content adds the missing `<think>`.
        self._cut(split=any(_unopened(chat.messages[i].content) for i in turns))

    def check_thoughts(self) -> None:
        """Raise DataError if all tokens are targets and the template leaves out a turn's reasoning."""
        last = max((i for i, turn in enumerate(self._chat.messages) if turn.role == "assistant"), default=0)
        for i, turn in enumerate(self._chat.messages):
            if turn.reasoning and turn.learnt and turn.reasoning.strip() not in self.rendered:
                found = f"the template leaves out messages[{i}].{turn.thoughts}"
                raise self._refused(found, KEEP_THOUGHTS.format(turn.thoughts) if i == last else MEND_EARLIER)

    def spans(self) -> list[CharSpan]:
        """Return the target spans of the turns, in order; raises DataError if they cannot be proven."""
        places: dict[int, list[Found]] = {i: [] for i in self._turns}
        for leaf in self._proven():
            places[self._leaves[leaf.leaf].turn].append(leaf)
        spans: list[CharSpan] = []
        stops: tuple[str, ...] = ()
        for i, mine in reversed(places.items()):
            if [self._leaves[f.leaf].name for f in mine] == ["content"]:
                stops = stops or self._stops(i, mine[0])
                spans.append(CharSpan(mine[0].start, mine[0].end, stops, closed=False))
            else:
                spans.append(self._turn(i, mine))
        spans.reverse()
        if any(before.end > after.start for before, after in pairwise(spans)):
            raise self._refused(CHANGED)
        return spans

    def check_steady(self) -> None:
        """Raise DataError if later turns change how the template writes one of these: a prompt would differ."""
        if len(self._turns) > MOST_STEADY:
            raise self._refused(f"{len(self._turns)} answers to compare; the limit is {MOST_STEADY}", MEND_EARLIER)
        for i in self._turns:
            if i + 1 < len(self._chat.messages) and (changed := self._changes(i)):
                alone, here = (visible(text)[:SHOWN_chars] for text in changed)
                asked = f"to learn every answer of the conversation at {self._where} (data.train_on: assistant)"
                found = f"later turns change how the template writes messages[{i}]: '{alone}' becomes '{here}'"
                raise DataError(asked, found, MEND_EARLIER)

    def _changes(self, i: int) -> tuple[str, str] | None:
        """Return the text up to the end of turn `i` (without, with) later turns if it differs, else None."""
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
        """Return turn `i` with these leaves, by number, between marks; `twice` duplicates its calls."""
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
        """Return the places of these leaves in the rendered text; empty if the marked rendering does not match it."""
        pieces = self._marked.split(self._with(texts))
        places, text, at = list[Found](), [pieces[0]], len(pieces[0])
        for k, inner, piece in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
            places.append(Found(int(k), at, at + len(inner)))
            text += inner, piece
            at += len(inner) + len(piece)
        seen = Counter(f.leaf for f in places)
        if "".join(text) != self.rendered or seen.keys() != texts.keys():
            return []
        for k, start, end in places:  # a call's texts may be quoted, and an answer may repeat a call's name
            called = self._leaves[k].name.startswith("tool_calls")
            if not called and (seen[k] > 1 or self.rendered[start:end] != texts[k]):
                return []
        return places

    def _proven(self) -> list[Found]:
        """Return the places of all leaves, each with or without outer white space."""
        texts = {k: leaf.text for k, leaf in enumerate(self._leaves)}
        bare = {k: text.strip() for k, text in texts.items()}
        if places := self._prove(texts) or (self._prove(bare) if bare != texts else []):
            return places
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
        if places := self._prove(texts):
            return places
        raise self._refused(CHANGED)

    def _until(self, i: int, twice: bool = False) -> list[str]:
        """Return the rendering up to turn `i`, split at its leaves: text, number, leaf, text, ..., leaf, text."""
        texts = {k: leaf.text for k, leaf in enumerate(self._leaves) if leaf.turn == i}
        return self._marked.split(self._render([*self._shown[:i], self._turn_with(i, texts, twice)]))

    def _stops(self, i: int, content: Found) -> tuple[str, ...]:
        """Return the end tokens of a content-only turn; a following header does not count."""
        last = i + 1 == len(self._chat.messages)
        stops = self._marks.first(self.rendered[content.end :] if last else self._until(i)[-1])
        if not stops:
            raise self._refused(NO_STOP)
        return stops

    def _turn(self, i: int, mine: list[Found]) -> CharSpan:
        """Return the span of a turn with more than content, including its end-of-turn token."""
        self._slow()
        pieces = self._until(i)
        leaves = [int(k) for k in pieces[1::3]]
        header, behind = self._plain(i, 0)
        usual = "".join(self._marks.first(behind))
        ending = _ending(pieces[-1], usual)
        parts = mine[: len(leaves)]  # the answer to a call may name it again
        between = [self.rendered[a.end : b.start] for a, b in pairwise(parts)]
        same = [f.leaf for f in parts] == leaves and {f.leaf for f in mine} == set(leaves) and between == pieces[3:-1:3]
        if not parts or not same or not self.rendered.startswith(ending, parts[-1].end):
            raise self._refused(f"later turns change how the template writes messages[{i}]", MEND_EARLIER)
        stop = self._marks.last(ending)
        if stop is None or not usual or not (ending.endswith(usual) or self._ends(i, stop)):
            raise self._refused(NO_STOP)
        first, end = parts[0].start, parts[-1].end + len(ending)
        fitting = (len(h) for h in self._headers(i, header) if len(h) <= first and self.rendered.startswith(h))
        if (start := next(fitting, None)) is None:
            found = f"the template's header of messages[{i}] matches neither a plain answer nor a generation prompt"
            raise self._refused(f"{found}: the end of the header is unknown")
        for value in _scalars([call["function"]["arguments"] for call in self._chat.messages[i].calls]):
            if not any(form in self.rendered[start:end] for form in (str(value), json.dumps(value))):
                raise self._refused(f"{CHANGED}: {json.dumps(value)} of messages[{i}].tool_calls is left out")
        return CharSpan(start, end, (stop,), closed=True)

    def _plain(self, i: int, after: int) -> tuple[str, str]:
        """Return the text before and after a content-only version of turn `i`, with this many turns after it."""
        spoken = self.template.shown(Message("assistant", f"{self._open}0:a{self._close}"))
        pieces = self._marked.split(self._render([*self._shown[:i], spoken, *self._shown[i + 1 : i + 1 + after]]))
        return pieces[0], pieces[-1]

    def _headers(self, i: int, plain: str) -> Iterator[str]:
        """Yield the text up to possible starts of turn `i`: after a plain turn's header or the generation prompt."""
        yield plain
        with suppress(DataError):  # a template may reject a call's answer without the call
            yield self._plain(i, len(self._chat.messages))[0]
        if i:
            bare, prompted = (self._render(self._shown[:i], prompt) for prompt in (False, True))
            if len(prompted) > len(bare) and prompted.startswith(bare):
                yield prompted

    def _ends(self, i: int, stop: str) -> bool:
        """Return whether the end token of a turn with calls ends the turn, not each call."""
        try:
            pieces = self._until(i, twice=True)
        except DataError:
            return False  # one call per turn: the call's end may be the turn's
        return "".join(pieces[3::3]).count(stop) == 1

    def _slow(self) -> None:
        if len(self._turns) > MOST_TURNS:
            raise self._refused(f"{len(self._turns)} answers with calls or trimmed texts; the limit is {MOST_TURNS}")

    def _lost(self, k: int) -> DataError:
        turn, name, text = self._leaves[k]
        gone = f"{self._open}{k}:" not in self._with({k: text})
        found = f"{CHANGED}: messages[{turn}].{name} is {'left out' if gone else 'changed'}"
        last = turn == self._turns[-1]
        if last and gone and name == self._chat.messages[turn].thoughts:
            return self._refused(found, KEEP_THOUGHTS.format(name))
        return self._refused(found, MEND_TEMPLATE if last else MEND_EARLIER)

    def _refused(self, found: str, do: str = MEND_TEMPLATE) -> DataError:
        return DataError(f"to mask the messages at {self._where}", found, do)


class Layout(NamedTuple):
    """The layout of conversations of one shape, for a template that only puts their texts between its own.

    The shape is the turns' roles and targets. A conversation whose rendering consists of these pieces and its texts
    needs no marks: each text is between proven pieces.
    """

    pieces: tuple[str, ...]  # before, between and after the texts
    stops: tuple[str, ...]  # of a span

    def spans(self, chat: Chat, turns: Sequence[int], rendered: str) -> list[CharSpan] | None:
        """Return the target spans of the turns; None if the rendering does not consist of the pieces."""
        texts = [message.content for message in chat.messages]
        for written in (texts, [text.strip() for text in texts]):
            made = [self.pieces[0], *chain.from_iterable(zip(written, self.pieces[1:], strict=True))]
            if "".join(made) == rendered:
                ends = list(accumulate(map(len, made)))
                return [CharSpan(ends[2 * i], ends[2 * i + 1], self.stops, closed=False) for i in turns]
        return None


def find_layout(template: Template, marks: EndMarks, chat: Chat, turns: Sequence[int], steady: bool) -> Layout | None:
    """Return the layout of a conversation's shape, proven on placeholders; None if each row needs a proof.

    Args:
        steady: also reject if later turns change how the template writes an earlier one.
    """
    texts = [PLACEHOLDER.format(n) if m.content.strip() else "" for n, m in enumerate(chat.messages)]
    plain = Chat(tuple(Message(m.role, text) for m, text in zip(chat.messages, texts)))
    try:
        masker = Masker(template, marks, plain, turns, TEMPLATE)
        spans = masker.spans()
        if steady:
            masker.check_steady()
    except DataError:
        return None
    pieces, rest = list[str](), masker.rendered
    for text in texts:
        before, _, rest = rest.partition(text) if text else ("", "", rest)
        pieces.append(before)
    return Layout((*pieces, rest), spans[0].stops if spans else ())


def thoughts_end(text: str, content: str, reasoning: str | None) -> int:
    """Return the end of the thoughts in an assistant's rendered text, including white space after them.

    Args:
        content: of the turn; it has thoughts if it starts with <think>, or its first mark is </think>.
        reasoning: of the turn, if separate: the thoughts extend to the next </think> or to the content.
    """
    at = 0
    if reasoning and reasoning.strip():
        at = text.find(reasoning.strip()) + len(reasoning.strip())
        between = text.find(content.strip(), at) if content.strip() else len(text)
        close = text.find("</think>", at, between)
        at = close + len("</think>") if close >= 0 else between if content.strip() else at
    elif content.lstrip().startswith("<think>") or _unopened(content):
        at = text.find("</think>") + len("</think>") if "</think>" in text else len(text)
    return at + len(text[at:]) - len(text[at:].lstrip()) if at else 0


def _unopened(content: str) -> bool:
    """Return whether a content's first thinking mark is the closing one."""
    first = THINKING.search(content)
    return first is not None and first[0] == "</think>"


def _ending(tail: str, usual: str) -> str:
    """Return the part of `tail` that belongs to a final turn, after its last leaf; `usual` ends plain turns."""
    return tail[: tail.index(usual) + len(usual)] if usual and usual in tail else tail.rstrip()


def _changed(message: Message, change: Callable[[str, str], str], split: bool) -> Message:
    """Return the message with each text of the assistant replaced by change(name, text); blank texts stay.

    With `split` a content is split at `<think>` and `</think>`.
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
    return replace(message, content=content, reasoning=walk(message.thoughts, message.reasoning), calls=calls)


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


def any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return an expression that matches any of these texts, preferring the longest."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=lambda t: (-len(t), t)))) or "(?!)")


def visible(text: str) -> str:
    """Return the text with control characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
