"""Writes what the demo trains on: a chat file of recipes, and a small checkpoint as one would have downloaded it.

usage: demo.py FOLDER
       demo.py FOLDER --closing VENV    after the last step: what was made, and what to do next
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

CONVERSATIONS = 700


def begin(folder: Path) -> None:
    """Write conversations and checkpoint."""
    from optrush.data import sample
    from optrush.models import tiny

    folder.mkdir(exist_ok=True)
    sample.write_sample(folder / "recipes.jsonl", CONVERSATIONS, seed=0)
    if not (folder / "tiny-llama" / "config.json").exists():
        tiny.write_tiny(folder / "tiny-llama")
    print(f"{CONVERSATIONS} conversations in {folder / 'recipes.jsonl'}, a checkpoint in {folder / 'tiny-llama'}")


def close(folder: Path, venv: str) -> int:
    """Print what the demo has made and what to do next; return 1 if a rung failed for more than its time limit."""
    records = folder / "ladder" / "records.jsonl"
    rungs = [json.loads(line) for line in records.read_text().splitlines()] if records.is_file() else []
    failed = [r for r in rungs if r["error"]]
    late = [r for r in failed if r["error"].startswith("still running")]
    if late:
        print(f"cut off at their time limit: {', '.join(r['rung'] for r in late)}. With more time for each:")
        print("  rm -rf demo/ladder")
        print("  optrush bench examples/demo.yaml --ladder benchmarks/demo-ladder.yaml --out demo/ladder --limit 3600")
    print(f"""
the run       {folder}/run/report.html
the model     {folder}/run/model
the ladder    {folder}/ladder/report.html

next, in this shell:
  source {venv}/bin/activate
  optrush chat {folder}/run                               # talk to what was trained
  optrush init mine.yaml --model tiny --data chat.jsonl   # your own rows, or your own model's folder""")
    return int(not rungs or len(failed) > len(late))


def main() -> int:
    match sys.argv[1:]:
        case [folder] if not folder.startswith("-"):
            begin(Path(folder))
            return 0
        case [folder, "--closing", venv]:
            return close(Path(folder), venv)
    sys.exit(__doc__)


if __name__ == "__main__":
    sys.exit(main())
