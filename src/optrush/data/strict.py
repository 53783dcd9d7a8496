"""JSON without leniency: one meaning or none.

The standard library keeps the last of two equal keys and takes NaN, infinite numbers and half a surrogate pair; a row
that was read so may not be what its author wrote. Forbidding it by hooks costs a quarter of the speed. A faster library
with the keys counted, to prove that none stood twice, gained no more than that, of a time that tokenising dwarfs.
"""

from __future__ import annotations

import json
import math
from typing import Any

DEEPEST = 100  # levels of lists and objects; what recurses over a row must not run out of stack
SHOWN = 60  # characters of a value that an error message shows


def decode(raw: bytes) -> Any:
    """The value of a JSON text; ValueError says in a line why it has none."""
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
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {show(key)} stands twice in one object")
            seen.add(key)
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"the number {show(digits)} is too large")
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)


def _depth(found: Any) -> int:
    depth, level = 0, [found]
    while level := [value for value in level if isinstance(value, dict | list)]:
        depth += 1
        level = [below for value in level for below in (value.values() if isinstance(value, dict) else value)]
    return depth


def kind(found: Any) -> str:
    """What a value is, as an error message says it."""
    if found is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(found), f"a value of the kind {type(found).__name__}")


def show(value: str) -> str:
    """A value in quotes, short enough for a line."""
    return repr(value if len(value) <= SHOWN else value[:SHOWN] + "...")
