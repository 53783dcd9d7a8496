"""What a model is asked: rows of any kind that training reads, with or without the answer; and that answer apart.

A row is read as training reads it (rows.py). Where it has no answer yet, a stand-in takes its place while it is read,
so that there is one reader and one set of errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optrush.data import schema
from optrush.data.readers import read
from optrush.data.schema import Chat, Completion, Message, Pair, Text, Where
from optrush.errors import DataError

STAND_IN = "-"  # for an answer that is not there
ANSWERS = ("assistant", "gpt", "function_call")


@dataclass(frozen=True)
class Prompt:
    where: Where
    asked: str | tuple[Message, ...]  # a text to be continued as it stands, or a conversation
    tools: tuple[Any, ...] = ()
    reference: str | None = None  # the row's own answer
    row: Chat | Completion | None = None  # with that answer, as training would learn it

    def shown(self) -> str | list[dict[str, Any]]:
        return self.asked if isinstance(self.asked, str) else [m.shown() for m in self.asked]


def prompts(path: Path, plain: bool = False, system: str | None = None) -> Iterator[Prompt]:
    """The prompts of a file of rows.

    A conversation is asked up to its last assistant turn, which is the reference. A `prompt` alone is a user's turn, or
    with `plain` a text; beside a `completion` it is a text, as in training. A `text` is continued as it stands.

    Args:
        system: a system turn for conversations that have none.

    Raises:
        DataError: no such file, or a row that is no prompt, with its place.
    """
    for where, found in read(path):
        prompt = _prompt(where, found, plain)
        if system is not None and not isinstance(prompt.asked, str) and prompt.asked[0].role != "system":
            first = Message("system", system)
            row = prompt.row
            if isinstance(row, Chat):
                row = Chat((first, *row.messages), row.tools, row.prompt + 1)
            prompt = Prompt(where, (first, *prompt.asked), prompt.tools, prompt.reference, row)
        yield prompt


def _prompt(where: Where, found: dict[str, Any], plain: bool) -> Prompt:
    found, answered = _completed(found, plain)
    row = schema.parse(where, found)
    row = row.chosen if isinstance(row, Pair) else row
    if isinstance(row, Text):
        return Prompt(where, row.text)
    if isinstance(row, Completion):
        return Prompt(where, row.prompt, (), row.completion, row) if answered else Prompt(where, row.prompt)
    last = len(row.messages) - 1
    if row.prompt and row.prompt < last:
        last = row.prompt  # of a pair: its answer begins there
    asked, answer = row.messages[:last], row.messages[last]
    if not asked or answer.role != "assistant":
        raise schema.bad_row(where, "no turn that an answer could follow")
    if plain:
        raise DataError(f"the messages at {where} with --plain", "a conversation, which no text is", "leave it out")
    if not answered:
        return Prompt(where, asked, row.tools)
    return Prompt(where, asked, row.tools, answer.content, Chat(row.messages[: last + 1], row.tools, last))


def _completed(found: dict[str, Any], plain: bool) -> tuple[dict[str, Any], bool]:
    """The row with an answer, and whether it is its own."""
    for key in ("messages", "conversations"):
        turns = found.get(key)
        if isinstance(turns, list) and turns and isinstance(turns[-1], dict):
            said = "from" if "from" in turns[-1] else "role"
            if turns[-1].get(said) in ANSWERS:
                return found, True
            end = {"from": "gpt", "value": STAND_IN} if said == "from" else {"role": "assistant", "content": STAND_IN}
            return {**found, key: [*turns, end]}, False
    if found.get("instruction") is not None and found.get("output") is None:
        return {**found, "output": STAND_IN}, False
    prompt = found.get("prompt")
    if prompt is None or any(found.get(key) is not None for key in ("completion", "chosen", "rejected")):
        return found, True
    others = {key: value for key, value in found.items() if key != "prompt"}
    if isinstance(prompt, list):
        return _completed({**others, "messages": prompt}, plain)
    if plain:
        return {**found, "completion": STAND_IN}, False
    return {
        **others,
        "messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": STAND_IN}],
    }, False
