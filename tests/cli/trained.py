"""Runs to export and to talk to: the built-in model after a few steps, trained once for all tests."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from optrush.cli import app

from clirun import base, write_rows

ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": f"How do I make {dish}?"},
                  {"role": "assistant", "content": f"Chop {n} onions, fry them, and stir the {dish}."}]}
    for n, dish in enumerate(("soup", "stew", "curry", "salad", "pie", "risotto", "gratin", "chili"), 2)
]  # fmt: skip


@functools.cache
def run(cache: Path, name: str = "plain", **changes: str) -> Path:
    """The folder of a finished run of six steps with checkpoints of steps 2, 4 and 6; nobody writes there.

    changes: YAML of a key's value.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"run-{name}-", dir=cache))
    data = write_rows(folder / "chat.jsonl", ROWS)
    settings = base(
        data={"path": str(data), "eval": 0.25}, optim={"lr": 1e-2}, output=str(folder / "out"),
        train={"epochs": None, "steps": 6, "save_every": 2, "keep": 3, "log_every": 2, "eval_every": 2},
        **{key: yaml.safe_load(value) for key, value in changes.items()},
    )  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.setattr(sys, "argv", ["optrush", "train", str(folder / "run.yaml")])
        with pytest.raises(SystemExit) as left:
            app.main()
    assert not left.value.code and os.path.isdir(folder / "out" / "model")
    return folder / "out"
