"""Train tiny bases that transformers 4.57 wrote, and have it and llama.cpp's converter read what is exported.

    make readers

Each line is one base, trained whole or with an adapter that the export merges: {"base", "trained", "differences"}.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

READER = Path(__file__).with_name("reader.py")
TRAINED: dict[str, dict[str, Any]] = {"whole": {"packing": {}}, "adapter": {"packing": {}, "lora": {"rank": 4}}}


def call(python: str, *arguments: object) -> str:
    """Run a Python program; return what it prints.

    Raises:
        RuntimeError: it failed; with the end of its error.
    """
    done = subprocess.run([python, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-1500:])
    return done.stdout


def tried(reader: str, base: Path, how: str, folder: Path) -> dict[str, Any]:
    """Train a base for two steps; return the differences that the reader finds between it and the exported model."""
    rows = folder / "rows.jsonl"
    texts = [{"text": f"The town of Oslo is {i} miles from the sea."} for i in range(12)]
    rows.write_text("".join(json.dumps(text) + "\n" for text in texts))
    output = folder / f"{base.name}-{how}"
    run = {
        "model": str(base), "objective": "pretrain", "data": {"path": str(rows)}, "batch": {"seq": 64, "tokens": 128},
        "optim": {"lr": 1e-2}, "train": {"steps": 2}, "output": str(output), "with": TRAINED[how],
    }  # fmt: skip
    output.with_suffix(".yaml").write_text(yaml.safe_dump(run))
    call(sys.executable, "-m", "optrush", "train", output.with_suffix(".yaml"))
    said = call(reader, "-P", READER, "read", base, output / "model")
    return {"base": base.name, "trained": how, **json.loads(said.splitlines()[-1])}


def main() -> int:
    """Print a line for each base and way of training; return 1 if any has a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", help="the Python of the reader's environment")
    parser.add_argument("base", nargs="*", help="all, if none is named")
    given = parser.parse_args()
    held = True
    with tempfile.TemporaryDirectory() as box:
        call(given.python, "-P", READER, "write", Path(box) / "bases")
        bases = sorted((Path(box) / "bases").iterdir())
        for base in [b for b in bases if not given.base or b.name in given.base]:
            for how in TRAINED:
                try:
                    line = tried(given.python, base, how, Path(box))
                except RuntimeError as error:
                    line = {"base": base.name, "trained": how, "differences": [str(error)]}
                print(json.dumps(line), flush=True)
                held &= not line["differences"]
    return 0 if held else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
