"""Which characters of a rendered conversation the assistant wrote, proven or refused, never guessed.

A template cannot be asked, so the conversation is rendered twice: once really, once with every text that the assistant
wrote (a content, a reasoning, a call's name, a value of its arguments) put between two marks. Without the marks, the
second must be the first, character by character; then what lies between them is what the assistant wrote.

A turn of nothing but content is learnt from its text to the end-of-turn token behind it. Where reasoning or calls are
written, what the template puts around them (`<tool_call>`, a channel) must be learnt too. Such a turn begins where the
header ends (that of the same turn with nothing but content, or the one after which the model is asked to write), and
ends where the render of the conversation up to it ends.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import count, pairwise
from typing import Any, NamedTuple

from optrush.data.rows import Chat, Message, Where
from optrush.data.template import Shown, Template
from optrush.errors import DataError

CHANGED = "the template changes the assistant's text, so it cannot be masked"
NO_STOP = "no end-of-turn token follows the assistant's text: the model would never learn to stop"
MEND = "give another template (model.chat_template), or train on all tokens (data.train_on: all)"
MEND_EARLIER = "train on the last answer only (data.train_on: last), or give another template (model.chat_template)"
MOST_TURNS = 1000  # where each turn must be looked at by itself
THINKING = re.compile("(</?think>)")


class Span(NamedTuple):
    """Characters [start, end) to be learnt.

    `stops` are the tokens that end the turn, one in most templates: they follow, perhaps after white space, or, if the
    span is `closed`, the last of them is its end. Before another turn, only the first of several must be there.
    """

    start: int
    end: int
    stops: tuple[str, ...]
    closed: bool


class Leaf(NamedTuple):
    """A text that the assistant wrote, as the row has it."""

    turn: int
    name: str
    text: str


class Found(NamedTuple):
    """The leaf number `leaf`, at the characters [start, end)."""

    leaf: int
    start: int
    end: int


class Marks:
    """The added tokens that can end a turn."""

    def __init__(self, tokens: Sequence[str]) -> None:
        # Some vocabularies list runs of spaces or newlines as added tokens; those end no turn.
        self.tokens = sorted((t for t in tokens if t.replace("▁", " ").strip()), key=len, reverse=True)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.tokens)) or "(?!)")

    def first(self, text: str) -> tuple[str, ...]:
        """The tokens that the text begins with, one directly after the other, but for white space before them."""
        text, found = text.lstrip(), list[str]()
        while token := self._pattern.match(text):
            found.append(token[0])
            text = text[token.end() :]
        return tuple(found)

    def last(self, text: str) -> str | None:
        """The token that the text ends with."""
        found = list(self._pattern.finditer(text))
        return found[-1][0] if found and found[-1].end() == len(text) else None


class Masker:
    """One conversation under one template.

    Args:
        turns: the turns to find, by number.

    Raises:
        DataError: the template fails, or leaves out something that the assistant did not write.
    """

    def __init__(self, template: Template, marks: Marks, chat: Chat, turns: Sequence[int], where: Where) -> None:
        self._template, self._marks, self._where = template, marks, where
        self._chat, self._turns = chat, turns
        template.check(chat, where)
        self._shown = [template.shown(message) for message in chat.messages]
        self.rendered = self._render(self._shown)  # the conversation as the template writes it
        # Digits pass through quoting, escaping and capitals as they are; no other 9 is in these, so none overlap.
        salt = next(salt for n in count(0o7351) if (salt := f"9{n:o}") not in self.rendered)
        self._open, self._close = f"{salt}:", f"{salt};"
        self._marked = re.compile(f"{self._open}([0-9]+):(.*?){self._close}", re.DOTALL)
        self._cut(split=False)

    def spans(self) -> list[Span]:
        """What is learnt of each of the turns, in order; DataError where that cannot be proven."""
        found: dict[int, list[Found]] = {i: [] for i in self._turns}
        for leaf in self._proven():
            found[self._leaves[leaf.leaf].turn].append(leaf)
        spans: list[Span] = []
        stops: tuple[str, ...] = ()
        for i, mine in reversed(found.items()):
            if [self._leaves[f.leaf].name for f in mine] == ["content"]:
                stops = stops or self._stops(i, mine[0])
                spans.append(Span(mine[0].start, mine[0].end, stops, closed=False))
            else:
                spans.append(self._turn(i, mine))
        spans.reverse()
        if any(before.end > after.start for before, after in pairwise(spans)):
            raise self._refused(CHANGED)
        return spans

    def changes(self, i: int) -> tuple[str, str] | None:
        """What later turns change of the text up to the end of turn `i`: (as it is without them, as it is here)."""
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
        return self._template.render(turns, self._where, self._chat.tools, prompt)

    def _turn_with(self, i: int, texts: Mapping[int, str], twice: bool = False) -> Shown:
        """Turn `i` with these leaves, by number, put between marks; `twice`: each of its calls made two times."""
        numbers = iter(range(self._numbered[i], len(self._leaves)))

        def mark(name: str, text: str) -> str:
            k = next(numbers)
            return f"{self._open}{k}:{texts[k]}{self._close}" if k in texts else text

        message = _changed(self._chat.messages[i], mark, self._split)
        return self._template.shown(replace(message, calls=message.calls * 2) if twice else message)

    def _with(self, texts: Mapping[int, str]) -> str:
        """The conversation with these leaves put between marks."""
        turns = list(self._shown)
        for i in self._turns:
            turns[i] = self._turn_with(i, texts)
        return self._render(turns)

    def _prove(self, texts: Mapping[int, str]) -> list[Found]:
        """Where these leaves lie in the rendered text if it is made of them as they are given here; or nothing."""
        pieces = self._marked.split(self._with(texts))
        found, text, at = list[Found](), [pieces[0]], len(pieces[0])
        for k, inner, piece in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
            found.append(Found(int(k), at, at + len(inner)))
            text += inner, piece
            at += len(inner) + len(piece)
        seen = Counter(f.leaf for f in found)
        if "".join(text) != self.rendered or seen.keys() != texts.keys():
            return []
        for k, start, end in found:  # what is in a call may be quoted, and a call's name be told again by its answer
            called = self._leaves[k].name.startswith("tool_calls")
            if not called and (seen[k] > 1 or self.rendered[start:end] != texts[k]):
                return []
        return found

    def _filled(self) -> list[Found]:
        """Where all leaves lie if the rendered text is that of other contents with these in their place; or nothing."""
        pieces = self._template.around(self._chat, self._where)
        if pieces is None:
            return []
        text, at, places = [pieces[0]], len(pieces[0]), list[tuple[int, int]]()
        for message, piece in zip(self._chat.messages, pieces[1:], strict=True):
            text += message.content, piece
            places.append((at, at + len(message.content)))
            at += len(message.content) + len(piece)
        if "".join(text) != self.rendered:
            return []
        return [Found(k, *places[i]) for k, i in enumerate(self._turns)]  # of each turn, its content is the only leaf

    def _proven(self) -> list[Found]:
        """Where all leaves lie, each as it is or without white space at its ends, as the template writes it."""
        if found := self._filled():
            return found
        texts = {k: leaf.text for k, leaf in enumerate(self._leaves)}
        bare = {k: text.strip() for k, text in texts.items()}
        if found := self._prove(texts) or (self._prove(bare) if bare != texts else []):
            return found
        self._slow()
        for k, text in texts.items():
            form = next((form for form in _forms(text) if self._prove({k: form})), None)
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
        """The conversation up to turn `i`, split at its leaves: text, number, leaf, text, number, leaf, ..., text.

        Args:
            twice: whether the turn makes each of its calls two times.
        """
        texts = {k: leaf.text for k, leaf in enumerate(self._leaves) if leaf.turn == i}
        return self._marked.split(self._render([*self._shown[:i], self._turn_with(i, texts, twice)]))

    def _stops(self, i: int, content: Found) -> tuple[str, ...]:
        """The tokens that end a turn of nothing but content, asked for where no turn follows.

        What stands before another turn may be that turn's header, which must not pass for an end.
        """
        last = i + 1 == len(self._chat.messages)
        stops = self._marks.first(self.rendered[content.end :] if last else self._until(i)[-1])
        if not stops:
            raise self._refused(NO_STOP)
        return stops

    def _turn(self, i: int, mine: list[Found]) -> Span:
        """The whole of a turn with more than content, its end-of-turn token included."""
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
        start = next(
            (len(h) for h in self._headers(i, header) if len(h) <= first and self.rendered.startswith(h)), None
        )
        if start is None:
            found = f"the template begins messages[{i}] neither like a plain answer nor as it asks for one"
            raise self._refused(f"{found}: where its header ends cannot be told")
        for value in _scalars([call["function"]["arguments"] for call in self._chat.messages[i].calls]):
            if not any(form in self.rendered[start:end] for form in (str(value), json.dumps(value))):
                raise self._refused(f"{CHANGED}: {json.dumps(value)} of messages[{i}].tool_calls is left out")
        return Span(start, end, (stop,), closed=True)

    def _plain(self, i: int, after: int) -> tuple[str, str]:
        """What is written before and behind turn `i` if it is nothing but content, and so many turns follow."""
        spoken = self._template.shown(Message("assistant", f"{self._open}0:a{self._close}"))
        pieces = self._marked.split(self._render([*self._shown[:i], spoken, *self._shown[i + 1 : i + 1 + after]]))
        return pieces[0], pieces[-1]

    def _headers(self, i: int, plain: str) -> Iterator[str]:
        """The text up to where turn `i` may begin: behind a plain turn's header, or the one that asks for a turn."""
        yield plain
        with suppress(DataError):  # the answer to a call can be refused where no call was made
            yield self._plain(i, len(self._chat.messages))[0]
        if i:
            bare, asked = (self._render(self._shown[:i], prompt) for prompt in (False, True))
            if len(asked) > len(bare) and asked.startswith(bare):
                yield asked

    def _ends(self, i: int, stop: str) -> bool:
        """Whether a token that ends turns with calls only ends the turn, and not each call."""
        try:
            pieces = self._until(i, twice=True)
        except DataError:
            return False  # a template that takes one call a turn: its end cannot be told from the turn's
        return "".join(pieces[3::3]).count(stop) == 1

    def _slow(self) -> None:
        """Refuses what takes a render or more for each turn, where there are very many."""
        if len(self._turns) > MOST_TURNS:
            raise self._refused(f"{len(self._turns)} answers, calls or trimmed texts among them; at most {MOST_TURNS}")

    def _lost(self, k: int) -> DataError:
        turn, name, text = self._leaves[k]
        gone = f"{self._open}{k}:" not in self._with({k: text})
        found = f"{CHANGED}: messages[{turn}].{name} is {'left out' if gone else 'changed'}"
        return self._refused(found, MEND if turn == self._turns[-1] else MEND_EARLIER)

    def _refused(self, found: str, do: str = MEND) -> DataError:
        return DataError(f"to mask the messages at {self._where}", found, do)


def _ending(tail: str, usual: str) -> str:
    """What belongs to a turn still of the text behind its last leaf, where no turn follows.

    Args:
        usual: the tokens that end turns of nothing but content.
    """
    return tail[: tail.index(usual) + len(usual)] if usual and usual in tail else tail.rstrip()


def _changed(message: Message, change: Callable[[str, str], str], split: bool) -> Message:
    """The message with each text that the assistant wrote replaced by change(its name, it); blank ones are left.

    Args:
        split: whether a content is taken apart at `<think>` and `</think>`.
    """

    def walk(name: str, value: Any) -> Any:
        if isinstance(value, str):
            return change(name, value) if value.strip() else value
        if isinstance(value, dict):
            return {key: walk(f"{name}.{key}", inner) for key, inner in value.items()}
        return [walk(f"{name}[{n}]", inner) for n, inner in enumerate(value)] if isinstance(value, list) else value

    parts = THINKING.split(message.content) if split else [message.content]
    if len(parts) == 1:
        content = walk("content", parts[0])
    else:
        content = "".join(part if n % 2 else walk(f"content[{n // 2}]", part) for n, part in enumerate(parts))
    if not message.calls and message.reasoning is None:
        return Message(message.role, content, name=message.name, call_id=message.call_id)  # faster than `replace`
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
    """The values of a JSON object that are not texts."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _scalars(inner)
    elif not isinstance(value, str):
        yield value


def _forms(text: str) -> list[str]:
    """The text as it is, and without white space or newlines at its ends, each once."""
    left = [text, text.lstrip("\n"), text.lstrip()]
    return list(dict.fromkeys(form for start in left for form in (start, start.rstrip("\n"), start.rstrip())))
