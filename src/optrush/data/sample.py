"""Read the `recipes` sample: conversations with a cook, and pairs of recipes, for a first run without a download.

The rows are stored in this package. `benchmarks/recipes.py` generated them and can generate more.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

TURN = 37  # rows between the starts of two consecutive seeds

Turn = dict[str, str]


def conversations(n: int, seed: int) -> Iterator[list[Turn]]:
    """Yield n of the 1,000 conversations as lists of {role, content}; the seed selects the first."""
    return (row["messages"] for row in _rows("recipes.jsonl.xz", n, seed))


def preferences(n: int, seed: int) -> Iterator[dict[str, list[Turn]]]:
    """Yield n pairs as {prompt, chosen, rejected}; the rejected recipe has the chosen one's steps in another order."""
    return _rows("recipe_pairs.jsonl.xz", n, seed)


def write_sample(path: Path, n: int, seed: int, *, pairs: bool = False) -> None:
    """Write JSON Lines: conversations, one {"messages": [...]} per line, or pairs."""
    rows = preferences(n, seed) if pairs else ({"messages": messages} for messages in conversations(n, seed))
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _rows(name: str, n: int, seed: int) -> Iterator[dict[str, Any]]:
    lines = lzma.decompress(Path(__file__).with_name(name).read_bytes()).splitlines()
    start = seed * TURN % len(lines)
    yield from map(json.loads, islice(lines[start:] + lines[:start], n))
