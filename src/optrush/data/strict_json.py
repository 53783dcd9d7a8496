"""Decode JSON strictly: a text has one meaning, or it is rejected with the reason.

The standard library keeps the last of two equal keys and accepts NaN, infinite numbers and half a surrogate pair; such
a row may not be what its author wrote. Hooks that reject these cost a quarter of the speed. A faster library that
counts keys to find duplicates gained no more than that; tokenizing takes far longer.
"""

from __future__ import annotations

import json
import math
from typing import Any

DEEPEST = 100  # levels of lists and objects, so that recursion over a row does not overflow the stack
SHOWN = 60  # characters of a value that an error message shows


def decode_json(raw: bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError with the reason in one line."""
    if raw.startswith(b"\xef\xbb\xbf"):
        raise ValueError("it begins with a byte order mark (BOM)")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(not_utf8(error)) from None
    try:
        value = _DECODER.decode(text)
        if raw.count(b"[") + raw.count(b"{") > DEEPEST and _depth(value) > DEEPEST:
            raise RecursionError
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    except UnicodeEncodeError as error:
        raise ValueError(f"half a surrogate pair: \\u{ord(error.object[error.start]):04x}") from None
    except json.JSONDecodeError as error:
        message = error.msg.removesuffix(" at")  # the end of some messages
        raise ValueError(f"not valid JSON (cut off?): {message} at character {error.pos}") from None
    except ValueError as error:  # from the hooks, or for a number with thousands of digits
        raise ValueError(f"not valid JSON: {error}") from None
    return value


NOT_UTF8 = "invalid UTF-8 at byte"
# Byte order marks of other encodings; UTF-32 comes first, because its mark begins with that of UTF-16.
MARKS = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


def not_utf8(error: UnicodeDecodeError) -> str:
    """Return the reason why bytes are not UTF-8, with the encoding that their byte order mark indicates, if any."""
    name = next((name for start, name in MARKS.items() if error.object.startswith(start)), None)
    marked = f", the byte order mark of {name}" if name else ""
    return f"{NOT_UTF8} {error.start}: {error.object[error.start]:#04x}{marked}"


def remedy(reason: str, do: str) -> str:
    """Return the fix for a row or file: `do`, or for another encoding than UTF-8 the command that converts the file."""
    if NOT_UTF8 not in reason:
        return do
    name = next((name for name in MARKS.values() if f"byte order mark of {name}" in reason), None)
    line = f"save the file as UTF-8: iconv -f {name or 'ENCODING'} -t UTF-8 FILE > NEW_FILE"
    return line if name else f"{line}; or {do}"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for i, key in enumerate(keys) if key in keys[:i])
        raise ValueError(f"the key {quoted(twice)} appears twice in one object")
    return result


def _number(digits: str) -> float:
    if digits in ("NaN", "Infinity", "-Infinity"):
        raise ValueError(f"{digits} is not a JSON number")
    if math.isinf(number := float(digits)):
        raise ValueError(f"the number {quoted(digits)} is too large")
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_number, parse_float=_number)


def _depth(root: Any) -> int:
    depth, level = 0, [root]
    while level := [value for value in level if isinstance(value, dict | list)]:
        depth += 1
        level = [below for value in level for below in (value.values() if isinstance(value, dict) else value)]
    return depth


def kind_of(found: Any) -> str:
    """Return the kind of a value, in words for an error message."""
    if found is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(found), f"a value of the kind {type(found).__name__}")


def quoted(value: str) -> str:
    """Return a text in quotes, cut after SHOWN characters."""
    return repr(value if len(value) <= SHOWN else value[:SHOWN] + "...")
