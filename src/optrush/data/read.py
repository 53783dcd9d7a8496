"""Rows from JSON Lines, strictly: what is not exactly understood is an error with its file, line and reason.

Lenient readers guess a schema and change it silently when a row does not fit; a row that was half understood then
trains the model on something nobody wrote. Here a bad row is never repaired and never skipped: `read` raises at the
first, `attempts` hands each one over as a value, so that a cleaner can count and keep them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from optrush.errors import DataError

LONGEST_ROW_bytes = 32 * 2**20
ROLES = ("system", "developer", "user", "assistant", "tool")
MAY_BE_EMPTY = ("system", "developer")  # an empty system prompt is common, and says something; an empty turn does not
# Keys of a message that change what is shown to the model or learnt from it; dropping them would change the row.
NOT_UNDERSTOOD = (
    "tool_calls", "function_call", "tool_call_id", "reasoning", "reasoning_content", "thinking", "images", "audio",
    "weight", "train", "prefix",
)  # fmt: skip
SHOWN = 60  # characters of a value that an error message shows


class Where(NamedTuple):
    """The place of a row; lines count from 1."""

    file: Path
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Chat:
    messages: tuple[Message, ...]


Row = Text | Chat


def bad_row(where: Where, reason: str) -> DataError:
    """The error of one row: every reader and cleaner words it the same way."""
    return DataError(f"a row of training data at {where}", reason, "mend that line, or take it out")


def read(path: Path) -> Iterator[tuple[Where, dict[str, Any]]]:
    """Every row of a JSON Lines file with its place; raises DataError at the first that is not one JSON object."""
    for where, found in attempts(path):
        if isinstance(found, DataError):
            raise found
        yield where, found


def attempts(path: Path) -> Iterator[tuple[Where, dict[str, Any] | DataError]]:
    """Every line of the file as a row or as the error that says why it is none; goes on after a bad one."""
    if path.is_dir():
        raise DataError(f"training data from {path}", "a folder, not a file", "name a .jsonl file inside it")
    if not path.exists():
        raise DataError(f"training data from {path}", "no such file", "check the path")
    line = 0
    try:
        with path.open("rb") as file:
            while raw := file.readline(LONGEST_ROW_bytes + 1):
                line += 1
                where = Where(path, line)
                if len(raw) > LONGEST_ROW_bytes:
                    while not raw.endswith(b"\n") and (raw := file.readline(2**20)):
                        pass
                    yield where, bad_row(where, f"the row is longer than {LONGEST_ROW_bytes >> 20} MiB")
                    continue
                yield where, _decode(where, raw)
    except OSError as error:
        raise DataError(f"training data from {path}", f"{error.strerror}", "check the file and its rights") from error
    if line == 0:
        raise DataError(f"training data from {path}", "an empty file", "give a file with at least one row")


def _decode(where: Where, raw: bytes) -> dict[str, Any] | DataError:
    if raw.startswith(b"\xef\xbb\xbf"):
        return bad_row(where, "the line begins with a byte order mark (BOM)")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return bad_row(where, f"invalid UTF-8 at byte {error.start} of the line: {raw[error.start]:#04x}")
    if not text.strip():
        return bad_row(where, "an empty line")
    try:
        found = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        return bad_row(where, "JSON nested too deeply")
    except json.JSONDecodeError as error:
        return bad_row(where, f"not valid JSON (cut off?): {error.msg} at character {error.pos}")
    except ValueError as error:  # raised by the two hooks, and for a number of thousands of digits
        return bad_row(where, f"not valid JSON: {error}")
    if not isinstance(found, dict):
        return bad_row(where, f"{_kind(found)} where an object {{...}} belongs")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {_show(key)} stands twice in one object")
            seen.add(key)
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def parse(where: Where, found: dict[str, Any]) -> Row:
    """A row's meaning: exactly one of `text` and `messages`; other keys (identifiers, sources) are not looked at."""
    if "text" in found and "messages" in found:
        raise bad_row(where, "both 'text' and 'messages'; which one is meant cannot be known")
    if "text" in found:
        text = _string(where, found["text"], "text")
        if not text.strip():
            raise bad_row(where, "text is empty")
        return Text(text)
    if "messages" in found:
        return _chat(where, found["messages"])
    keys = ", ".join(_show(key) for key in list(found)[:8]) or "no keys"
    raise bad_row(where, f"neither 'text' nor 'messages' is there, but {keys}")


def _chat(where: Where, found: Any) -> Chat:
    if not isinstance(found, list):
        raise bad_row(where, f"messages is {_kind(found)}, not a list")
    if not found:
        raise bad_row(where, "messages is an empty list")
    messages = tuple(_message(where, message, f"messages[{i}]") for i, message in enumerate(found))
    if not any(message.role == "assistant" for message in messages):
        raise bad_row(where, "no assistant turn: there is nothing to learn")
    return Chat(messages)


def _message(where: Where, found: Any, name: str) -> Message:
    if not isinstance(found, dict):
        raise bad_row(where, f"{name} is {_kind(found)}, not an object with role and content")
    for key in ("role", "content"):
        if key not in found:
            raise bad_row(where, f"{name} has no {key!r}")
    for key in NOT_UNDERSTOOD:
        if found.get(key) not in (None, "", []):
            raise bad_row(where, f"{name} has {key!r}, which is not understood and must not be dropped silently")
    role = _string(where, found["role"], f"{name}.role")
    if role not in ROLES:
        raise bad_row(where, f"{name}.role is {_show(role)}, not one of {', '.join(ROLES)}")
    content = _string(where, found["content"], f"{name}.content")
    if not content.strip() and role not in MAY_BE_EMPTY:
        raise bad_row(where, f"{name}.content: an empty {role} turn")
    return Message(role, content)


def _string(where: Where, found: Any, name: str) -> str:
    if not isinstance(found, str):
        raise bad_row(where, f"{name} is {_kind(found)}, not a string")
    try:
        found.encode("utf-8")
    except UnicodeEncodeError as error:
        raise bad_row(where, f"{name} holds half a surrogate pair at character {error.start}") from error
    return found


def _kind(found: Any) -> str:
    if found is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names[type(found)]


def _show(value: str) -> str:
    return repr(value if len(value) <= SHOWN else value[:SHOWN] + "...")
