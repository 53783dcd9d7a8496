"""Parse rows: the shapes of training data that are recognized by their keys; everything else is refused.

A row that is half understood trains the model on data that its author did not write. Here a row is exactly one of the
known kinds, and a key that would change its meaning and is not understood is an error with the row's place.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from optrush.errors import DataError

# --- JSON without leniency: one meaning or none.
#
# The standard library keeps the last of two equal keys and takes NaN, infinite numbers and half a surrogate pair; such
# a row may not be what its author wrote. Hooks that refuse them cost a quarter of the speed. A faster library, with the
# keys counted to find duplicates, gained no more than that; tokenizing takes far longer.


DEEPEST = 100  # levels of lists and objects; what recurses over a row must not run out of stack
SHOWN = 60  # characters of a value that an error message shows


def decode_json(raw: bytes) -> Any:
    """Return the value of a JSON text, strictly. Raises ValueError with the reason in one line."""
    if raw.startswith(b"\xef\xbb\xbf"):
        raise ValueError("it begins with a byte order mark (BOM)")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"invalid UTF-8 at byte {error.start}: {raw[error.start]:#04x}") from None
    try:
        found = _DECODER.decode(text)
        if raw.count(b"[") + raw.count(b"{") > DEEPEST and _depth(found) > DEEPEST:
            raise RecursionError
        if "\\ud" in text or "\\uD" in text:
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    except UnicodeEncodeError as error:
        raise ValueError(f"half a surrogate pair: \\u{ord(error.object[error.start]):04x}") from None
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")  # as some of them end
        raise ValueError(f"not valid JSON (cut off?): {what} at character {error.pos}") from None
    except ValueError as error:  # raised by the three hooks, and for a number of thousands of digits
        raise ValueError(f"not valid JSON: {error}") from None
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for i, key in enumerate(keys) if key in keys[:i])
        raise ValueError(f"the key {quoted(twice)} stands twice in one object")
    return found


def _number(digits: str) -> float:
    if digits in ("NaN", "Infinity", "-Infinity"):
        raise ValueError(f"{digits} is not a JSON number")
    if math.isinf(number := float(digits)):
        raise ValueError(f"the number {quoted(digits)} is too large")
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_number, parse_float=_number)


def _depth(found: Any) -> int:
    depth, level = 0, [found]
    while level := [value for value in level if isinstance(value, dict | list)]:
        depth += 1
        level = [below for value in level for below in (value.values() if isinstance(value, dict) else value)]
    return depth


def kind_of(found: Any) -> str:
    """Return what a value is, as words for an error message."""
    if found is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(found), f"a value of the kind {type(found).__name__}")


def quoted(value: str) -> str:
    """Return a value in quotes, short enough for a line."""
    return repr(value if len(value) <= SHOWN else value[:SHOWN] + "...")


ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "function_call": "assistant", "tool": "tool", "observation": "tool",
}  # fmt: skip
MAY_BE_EMPTY = ("system", "developer", "tool")  # an empty prompt or result has a meaning; another empty turn has none
REASONING = ("reasoning_content", "reasoning", "thinking")
# Keys that change the model's input or its targets; dropping them would change the row.
MEDIA = ("images", "image", "videos", "video", "audios", "audio")
TURN_NOT_UNDERSTOOD = (*MEDIA, "function_call", "refusal", "prefix", "train_detail")
ROW_NOT_UNDERSTOOD = (*MEDIA, "history", "functions", "function_call", "chat_template_kwargs")
# They determine a row's kind; `chosen` and `rejected` are one kind.
SIGNS = ("text", "messages", "conversations", "instruction", "completion", "chosen", "rejected")
# All keys of a row that are read.
MEANT = frozenset({*SIGNS, *ROW_NOT_UNDERSTOOD, "input", "output", "prompt", "system", "tools", "label"})


class _Bad(Exception):
    """The reason why a row is none."""


class RowLocation(NamedTuple):
    """The place of a row; lines count from 1."""

    file: Path
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Message:
    """One turn. `learnt` is False if the row marks this assistant turn as context only."""

    role: str
    content: str
    reasoning: str | None = None
    calls: tuple[dict[str, Any], ...] = ()
    name: str | None = None
    call_id: str | None = None
    learnt: bool = True

    def shown(self) -> dict[str, Any]:
        """Return the turn as a chat template gets it: absent parts are absent keys."""
        more = {
            **dict.fromkeys(REASONING, self.reasoning),  # each template has its own name for it
            "tool_calls": list(self.calls),
            "name": self.name,
            "tool_call_id": self.call_id,
        }
        return {"role": self.role, "content": self.content} | {key: value for key, value in more.items() if value}


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Chat:
    """A conversation; the first `prompt` messages are never learnt."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    prompt: int = 0


@dataclass(frozen=True)
class Completion:
    """Two plain strings that follow one another unchanged; the second is learnt."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Pair:
    chosen: Chat | Completion
    rejected: Chat | Completion


Row = Text | Chat | Completion | Pair


def bad_row(where: RowLocation, reason: str) -> DataError:
    """Return the error of one row, with the same words for every reader and cleaner."""
    return DataError(f"a row of training data at {where}", reason, "mend that line, or take it out")


def row_text(row: Row) -> str:
    """Return the readable text of a row, a newline between turns; of a pair the common prompt once."""
    if isinstance(row, Text):
        return row.text
    if isinstance(row, Completion):
        return row.prompt + row.completion
    if isinstance(row, Chat):
        parts: list[str | None] = []
        for message in row.messages:
            parts += [message.reasoning, message.content]
            parts += [json.dumps(call["function"], ensure_ascii=False) for call in message.calls]
        return "\n".join(part for part in parts if part)
    rejected = row.rejected
    if isinstance(rejected, Completion):
        return f"{row_text(row.chosen)}\n{rejected.completion}"
    return f"{row_text(row.chosen)}\n{row_text(Chat(rejected.messages[rejected.prompt :]))}"


def parse_row(where: RowLocation, found: dict[str, Any]) -> Row:
    """Return a row's meaning: exactly one kind must be recognized by its keys.

    text; messages; conversations (ShareGPT); instruction, input, output (Alpaca); prompt, completion; chosen, rejected
    with or without prompt. A null counts as no key. Other keys (identifiers, sources, scores) are ignored.

    Raises DataError with the place: no kind or several, a wrong type, an empty turn, nothing to learn, or a key that
    would change the row's meaning and is not understood.
    """
    try:
        return _row(found)
    except _Bad as bad:
        raise bad_row(where, str(bad)) from None


def _row(found: dict[str, Any]) -> Row:
    signs = [key for key in SIGNS if found.get(key) is not None] or [key for key in SIGNS if key in found]
    if not signs:
        keys = ", ".join(quoted(key) for key in list(found)[:8]) or "no keys"
        raise _Bad(f"neither 'text' nor 'messages' nor another known kind is there, but {keys}")
    sign = "chosen" if signs == ["chosen", "rejected"] else signs[0]
    if (len(signs) > 1 and sign != "chosen") or len(signs) > 2:
        raise _Bad(f"both {quoted(signs[0])} and {quoted(signs[-1])}; which one is meant cannot be known")
    _refuse(found, MEDIA if sign == "text" else ROW_NOT_UNDERSTOOD, "the row")
    if sign == "text":
        return Text(_full(found["text"], "text"))
    if sign in ("messages", "conversations"):
        return _chat(_system(found, sign) + _turns(found[sign], sign), _tools(found))
    if sign == "instruction":
        return _alpaca(found)
    _refuse(found, ("system",), "the row")
    if sign == "completion":
        if isinstance(found.get("label"), bool):
            raise _Bad("the row has 'label': a judged answer, which must not be learnt as if it were a good one")
        if found.get("prompt") is None:
            raise _Bad("'completion' without 'prompt'")
        return _answer(found, "completion")
    return _pair(found)


def _alpaca(found: dict[str, Any]) -> Chat:
    _refuse(found, ("tools",), "the row")
    ask = _full(found["instruction"], "instruction")
    if found.get("output") is None:
        raise _Bad("'instruction' without 'output'")
    given = _string(_given(found, "input", ""), "input")
    if given.strip():
        ask = f"{ask}\n\n{given}"
    return _chat((*_system(found, ""), Message("user", ask), Message("assistant", _full(found["output"], "output"))))


def _pair(found: dict[str, Any]) -> Pair:
    for key, other in (("chosen", "rejected"), ("rejected", "chosen")):
        if found.get(key) is None:
            raise _Bad(f"{quoted(other)} without {quoted(key)}")
    if found["chosen"] == found["rejected"]:
        raise _Bad("chosen and rejected are the same")
    chosen, rejected = _answer(found, "chosen"), _answer(found, "rejected")
    if isinstance(chosen, Completion) != isinstance(rejected, Completion):
        raise _Bad(f"chosen is {kind_of(found['chosen'])}, rejected is {kind_of(found['rejected'])}")
    if isinstance(chosen, Completion) and isinstance(rejected, Completion) and found.get("prompt") is None:
        common = os.path.commonprefix([chosen.completion, rejected.completion])  # noqa: RUF071 - of characters
        n = max((i for i, char in enumerate(common, 1) if char.isspace()), default=0)  # words stay whole
        chosen, rejected = (
            Completion(common[:n], _full(side.completion[n:], f"{name} behind what both begin with"))
            for name, side in (("chosen", chosen), ("rejected", rejected))
        )
    if isinstance(chosen, Chat) and isinstance(rejected, Chat):
        both = list(zip(chosen.messages, rejected.messages))
        alike = next((i for i, (ours, theirs) in enumerate(both) if ours != theirs), len(both))
        if alike < max(1, chosen.prompt, rejected.prompt):
            raise _Bad("chosen and rejected do not begin with the same prompt")
        if found.get("prompt") is None:
            chosen, rejected = _after(chosen, alike, "chosen"), _after(rejected, alike, "rejected")
    return Pair(chosen, rejected)


def _answer(found: dict[str, Any], key: str) -> Chat | Completion:
    """Return the prompt with one of its answers; a conversation that begins with the prompt has it once."""
    prompt, answer = found.get("prompt"), found[key]
    if isinstance(answer, str):
        _refuse(found, ("tools",), "the row")
        return Completion("" if prompt is None else _full(prompt, "prompt"), _full(answer, key))
    turns = _turns(answer, key)
    if prompt is None:
        return Chat(turns, _tools(found))
    before = _turns(prompt, "prompt") if isinstance(prompt, list) else (Message("user", _full(prompt, "prompt")),)
    n = 0
    if isinstance(prompt, str):  # a system turn comes before it
        n = next((i for i, turn in enumerate(turns) if turn.role not in ("system", "developer")), len(turns))
    before, turns = turns[:n] + before, turns[n:]
    if turns[: len(before) - n] == before[n:]:
        turns = turns[len(before) - n :]
    return _after(Chat(before + turns, _tools(found)), len(before), key)


def _after(chat: Chat, n: int, key: str) -> Chat:
    """Return the conversation with its first n turns as the prompt, if an answer follows them."""
    if len(chat.messages) == n or chat.messages[n].role != "assistant":
        raise _Bad(f"{key}: no assistant turn follows the prompt")
    return _chat(chat.messages, chat.tools, n)


def _chat(messages: tuple[Message, ...], tools: tuple[dict[str, Any], ...] = (), prompt: int = 0) -> Chat:
    answers = [message for message in messages[prompt:] if message.role == "assistant"]
    if not any(message.learnt for message in answers):
        raise _Bad(f"no assistant turn{' is to be learnt' if answers else ''}: there is nothing to learn")
    return Chat(messages, tools, prompt)


def _system(found: dict[str, Any], turns: str) -> tuple[Message, ...]:
    system = _string(_given(found, "system", ""), "system")
    if not system:
        return ()
    first = found[turns][0] if turns and isinstance(found[turns], list) and found[turns] else {}
    if isinstance(first, dict) and "system" in (first.get("role"), first.get("from")):
        raise _Bad(f"both 'system' and a system turn in {turns}; which one is meant cannot be known")
    return (Message("system", system),)


def _tools(found: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    tools = _given(found, "tools", [])
    if isinstance(tools, str):
        tools = _decoded(tools, "tools")
    _list(tools, "tools")
    for i, tool in enumerate(tools):
        inner = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise _Bad(f"tools[{i}] is no object with the name of a function")
    return tuple(tools)


def _turns(found: Any, name: str) -> tuple[Message, ...]:
    if not _list(found, name):
        raise _Bad(f"{name} is an empty list")
    return tuple([_turn(turn, f"{name}[{i}]", name == "conversations") for i, turn in enumerate(found)])


def _turn(found: Any, name: str, sharegpt: bool) -> Message:
    if not isinstance(found, dict):
        raise _Bad(f"{name} is {kind_of(found)}, not an object with role and content")
    said, content_key = ("from", "value") if sharegpt and "from" in found else ("role", "content")
    if said == "from" and found.get("role") is not None:
        raise _Bad(f"{name} has both 'from' and 'role'")
    if said not in found:
        raise _Bad(f"{name} has no {said!r}")
    known = SHAREGPT if said == "from" else ROLES
    role = _string(found[said], f"{name}.{said}")
    if role not in known:
        raise _Bad(f"{name}.{said} is {quoted(role)}, not one of {', '.join(known)}")
    content = found.get(content_key)
    if role == "function_call":
        value = _decoded(_string(content, f"{name}.value"), f"{name}.value")
        given = [{"function": call} for call in (value if isinstance(value, list) else [value])]
        calls = _calls(given, f"{name}.value")
        return Message("assistant", "", calls=calls, learnt=_learnt(found, "assistant", name))
    role = SHAREGPT[role] if said == "from" else role
    more = _more(found, role, name) if len(found) > 2 else {}
    if content is None and role == "assistant" and more.get("calls"):
        content = ""
    if content_key not in found and content is None:
        raise _Bad(f"{name} has no {content_key!r}")
    content = _content(content, f"{name}.{content_key}")
    if not content.strip() and role not in MAY_BE_EMPTY and not more.get("calls"):
        raise _Bad(f"{name}.{content_key}: an empty {role} turn")
    return Message(role, content, **more)


def _more(found: dict[str, Any], role: str, name: str) -> dict[str, Any]:
    _refuse(found, TURN_NOT_UNDERSTOOD, name)
    if role != "assistant":
        _refuse(found, ("tool_calls", *REASONING), f"{name}, of the role {role!r},")
    if role != "tool":
        _refuse(found, ("tool_call_id",), f"{name}, of the role {role!r},")
    thoughts = {_string(found[key], f"{name}.{key}") for key in REASONING if found.get(key)}
    if len(thoughts) > 1:
        raise _Bad(f"{name} has several of {', '.join(REASONING)}, which differ")
    return {
        "reasoning": thoughts.pop() if thoughts else None,
        "calls": _calls(_given(found, "tool_calls", []), f"{name}.tool_calls"),
        "name": _string(_given(found, "name", ""), f"{name}.name") or None,
        "call_id": _string(_given(found, "tool_call_id", ""), f"{name}.tool_call_id") or None,
        "learnt": _learnt(found, role, name),
    }


def _learnt(found: dict[str, Any], role: str, name: str) -> bool:
    """Return whether `weight` (0 or 1) or `train` (true or false) makes a turn learnt."""
    given = {key: found[key] for key in ("weight", "train") if found.get(key) is not None}
    for key, value in given.items():
        if value not in (0, 1) or isinstance(value, bool) != (key == "train"):
            raise _Bad(f"{name}.{key} is neither {'false nor true' if key == 'train' else '0 nor 1'}")
        if value and role != "assistant":
            raise _Bad(f"{name}.{key}: a {role} turn is not learnt")
    if len(set(given.values())) > 1:
        raise _Bad(f"{name}: weight and train contradict each other")
    return all(given.values())


def _calls(found: Any, name: str) -> tuple[dict[str, Any], ...]:
    """Return tool calls as {"type": "function", "id" if any, "function": {"name", "arguments" as an object}}."""
    _list(found, name)
    calls: list[dict[str, Any]] = []
    for i, call in enumerate(found):
        at = f"{name}[{i}]"
        inner = call.get("function") if isinstance(call, dict) else None
        if not isinstance(inner, dict) or call.get("type", "function") != "function":
            raise _Bad(f"{at} is no call of a function: {{'type': 'function', 'function': {{'name', 'arguments'}}}}")
        arguments = inner.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _decoded(arguments, f"{at}.arguments")
        if not isinstance(arguments, dict):
            raise _Bad(f"{at}.arguments is {kind_of(arguments)}, not an object")
        number = {"id": _string(call["id"], f"{at}.id")} if call.get("id") else {}
        function = {"name": _full(inner.get("name"), f"{at}.name"), "arguments": arguments}
        calls.append({"type": "function", **number, "function": function})
    return tuple(calls)


def _content(found: Any, name: str) -> str:
    if not isinstance(found, list):
        return _string(found, name)
    for i, part in enumerate(found):
        if not isinstance(part, dict) or part.get("type") != "text":
            shown = quoted(str(part.get("type"))) if isinstance(part, dict) else kind_of(part)
            raise _Bad(f"{name}[{i}] is {shown}, not a part of the type 'text'")
    return "".join(_string(part.get("text"), f"{name}[{i}].text") for i, part in enumerate(found))


def _refuse(found: dict[str, Any], keys: tuple[str, ...], name: str) -> None:
    for key in keys:
        if found.get(key):  # null, empty, false: counts as no key
            raise _Bad(f"{name} has {key!r}, which is not understood and must not be dropped silently")


def _decoded(found: str, name: str) -> Any:
    try:
        return decode_json(found.encode())
    except ValueError as error:
        raise _Bad(f"{name}: {error}") from None


def _full(found: Any, name: str) -> str:
    if not _string(found, name).strip():
        raise _Bad(f"{name} is empty")
    return cast(str, found)


def _string(found: Any, name: str) -> str:
    if not isinstance(found, str):
        raise _Bad(f"{name} is {kind_of(found)}, not a string")
    return found


def _list(found: Any, name: str) -> list[Any]:
    if not isinstance(found, list):
        raise _Bad(f"{name} is {kind_of(found)}, not a list")
    return found


def _given(found: dict[str, Any], key: str, absent: Any) -> Any:
    """Return an optional value; null counts as absent, 0 and false do not."""
    value = found.get(key)
    return absent if value is None else value


# --- A tokenized document. Without torch, which a process that only makes documents does not load.


@dataclass(frozen=True)
class Document:
    """Token ids and which of them are learnt; `targets[0]` is always False: nothing predicts a first token."""

    ids: np.ndarray  # (n,) int32
    targets: np.ndarray  # (n,) bool

    def __len__(self) -> int:
        return len(self.ids)
