"""Writes what the demo trains on: a chat file of recipes, and a small checkpoint as one would have downloaded it.

usage: demo.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from optrush.data import sample
from optrush.models import tiny

CONVERSATIONS = 700


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    sample.write_sample(folder / "recipes.jsonl", CONVERSATIONS, seed=0)
    if not (folder / "tiny-llama" / "config.json").exists():
        tiny.write_tiny(folder / "tiny-llama")
    print(f"{CONVERSATIONS} conversations in {folder / 'recipes.jsonl'}, a checkpoint in {folder / 'tiny-llama'}")


if __name__ == "__main__":
    main()
