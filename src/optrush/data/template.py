"""A chat template: compiled once, rendered in the sandbox, and asked what it does with the parts of a conversation.

Templates differ in what they take (a text, or a list of parts; a call's arguments as an object, or as JSON) and drop
what they do not know without a word. Both are found out by rendering placeholders, never by reading the source.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from jinja2.exceptions import TemplateError

from optrush.data.rows import Chat, Message, Where
from optrush.errors import DataError

LONGEST_RENDER_chars = 32 * 2**20
# What an expression of a template can raise besides jinja's own errors.
RENDERING = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
MEND = "mend the row, or give another template (model.chat_template)"
MOST_SHAPES, LONGEST_SHAPE = 1024, 512  # of conversations that are remembered; messages of one
SHOWN = 4  # things left out that an error message names
PLACED = re.compile(r"97351([0-9]{6})")
PLACEHOLDER = "97351{:06}"  # digits pass through quoting, escaping and capitals as they are

Shown = dict[str, Any]  # a message as a template sees it


class Template:
    """A template's source with the names of the tokenizer's special tokens that it may write."""

    def __init__(self, source: str, special: Mapping[str, Any]) -> None:
        self.source = source
        self._special = dict(special)
        self._around: dict[tuple[str, ...], list[str] | None] = {}  # by the roles of a conversation, a bounded number
        self._whole: set[object] = set()  # shapes of conversations of which nothing is left out, a bounded number

    def shown(self, message: Message) -> Shown:
        """The message in the form that the template takes."""
        shown = message.shown()
        if message.calls and self._json_arguments:
            shown["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": _json(call["function"]["arguments"])}}
                for call in message.calls
            ]
        if self._parts:
            shown["content"] = _parts(message.content)
        return shown

    def render(self, turns: Sequence[Shown], where: Where, tools: Sequence[Any] = (), prompt: bool = False) -> str:
        """The conversation as text.

        Args:
            turns: what `shown` makes of the messages.
            prompt: whether the header of an answer follows, as when the model is to write one.

        Raises:
            DataError: the template failed, or made a monstrous text.
        """
        try:
            rendered = self._render(turns, tools, prompt)
            rendered.encode()
        except RENDERING as error:
            found = f"the chat template failed: {type(error).__name__}: {error}"
            raise DataError(f"to render the messages at {where}", found, MEND) from error
        if len(rendered) > LONGEST_RENDER_chars:
            found = f"the chat template made {len(rendered)} characters; at most {LONGEST_RENDER_chars} are taken"
            raise DataError(f"to render the messages at {where}", found, MEND)
        return rendered

    def check(self, chat: Chat, where: Where) -> None:
        """Raises DataError where the template leaves out the tools, a call, or a turn that is not the assistant's.

        What is left out depends on roles and places, so each shape of a conversation is looked at once.
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

    def around(self, chat: Chat, where: Where) -> list[str] | None:
        """What is written before, between and behind the contents of a conversation like this, by its roles alone.

        None where something but contents is said, or the template does not write each of them once and in order.
        Whether it does so with these contents, only its render of them shows.
        """
        turns, roles = chat.messages, tuple([message.role for message in chat.messages])
        plain = all(m.content.strip() and not (m.calls or m.reasoning or m.name or m.call_id) for m in turns)
        if chat.tools or not plain or len(turns) > LONGEST_SHAPE:
            return None
        if roles not in self._around:
            if len(self._around) == MOST_SHAPES:
                self._around.clear()
            named = [Message(role, PLACEHOLDER.format(i)) for i, role in enumerate(roles)]
            try:
                pieces = PLACED.split(self.render([self.shown(message) for message in named], where))
            except DataError:  # the conversation's own render says why
                pieces = []
            whole = [int(number) for number in pieces[1::2]] == list(range(len(turns)))
            self._around[roles] = pieces[::2] if whole else None
        return self._around[roles]

    def _render(self, turns: Sequence[Shown], tools: Sequence[Any] = (), prompt: bool = False) -> str:
        # What apply_chat_template does, less its copies of the data, which come from JSON and are plain already.
        from transformers.utils.chat_template_utils import _compile_jinja_template

        rendered = _compile_jinja_template(self.source).render(
            messages=turns, tools=list(tools) or None, documents=None, add_generation_prompt=prompt, **self._special
        )
        assert isinstance(rendered, str)
        return rendered

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

        def talk(arguments: Any) -> list[Shown]:
            call = {"id": "0", "type": "function", "function": {"name": "f", "arguments": arguments}}
            asked, empty = (_parts(text) if self._parts else text for text in ("a", ""))
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
    """A tool, or a call of one, under another name."""
    return {**tool, "function": {**tool["function"], "name": name}} if "function" in tool else {**tool, "name": name}


def _json(arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False)
