"""How long a run's documents are, estimated from characters in a blink: for the plan, which does not tokenise. Pure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from optrush.config import Data

ROWS = 200  # looked at
MOST_CHARS = 4 << 20
CHARS_A_TOKEN = 4.0  # of English; the usual rule of thumb


def estimate(data: Data, seed: int) -> list[float]:
    """Tokens of the first documents; empty where they fill their rows or cannot be told (random, a missing file)."""
    if data.sample == "recipes":
        from optrush.data.recipes import conversations

        return [sum(len(turn["content"]) + 8 for turn in c) / CHARS_A_TOKEN for c in conversations(ROWS, seed)]
    if data.path is None or not Path(data.path).is_file():
        return []
    with open(data.path, "rb") as file:
        text = file.read(MOST_CHARS).decode("utf-8", "replace")
    return [_chars(line) / CHARS_A_TOKEN for line in text.split("\n")[:ROWS] if line.strip()]


def _chars(line: str) -> int:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):
        return len(line)
    if isinstance(row, dict) and isinstance(row.get("text"), str):
        return len(row["text"])
    if isinstance(row, dict) and isinstance(row.get("messages"), list):
        return sum(len(str(m.get("content", ""))) + 8 for m in row["messages"] if isinstance(m, dict))
    return len(line)
