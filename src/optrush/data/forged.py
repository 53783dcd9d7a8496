"""Control tokens that a message holds as text: they would end its turn, or begin another that nobody wrote."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from optrush.data.rows import Chat, Where
from optrush.errors import DataError


def any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Finds any of these texts, the longest at a place."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=lambda t: (-len(t), t)))) or "(?!)")


def refuse(chat: Chat, controls: re.Pattern[str], where: Where) -> None:
    """Raises DataError where a message, a call or a tool holds a control token as text."""
    for name, text in _said(chat):
        if found := controls.search(text):
            raise DataError(
                f"to learn from the messages at {where}",
                f"{name} holds the text {found[0]}, which the tokenizer takes for its control token: a forged turn",
                "take it out, or write it otherwise",
            )


def _said(chat: Chat) -> Iterator[tuple[str, str]]:
    """All texts of a conversation, with what they are."""
    for i, turn in enumerate(chat.messages):
        yield f"messages[{i}]", turn.content
        more = [turn.reasoning, turn.name, turn.call_id, *_texts(turn.calls)]
        yield from ((f"messages[{i}]", text) for text in more if text)
    yield from ((f"tools[{i}]", text) for i, tool in enumerate(chat.tools) for text in _texts(tool))


def _texts(value: Any) -> Iterator[str]:
    """All strings in nested lists and objects, names too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from (*_texts(name), *_texts(inner))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)
