"""A run to change, a model folder to change, and what a command left behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from calls import Found as Found


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def base(**changes: Any) -> dict[str, Any]:
    """A run that works; `section={...}` changes values of a section, `name=value` replaces one, None removes it."""
    run: dict[str, Any] = {
        "model": "tiny",
        "objective": "sft",
        "data": {"path": "chat.jsonl", "eval": 0.25},
        "batch": {"seq": 128, "tokens": 256},
        "optim": {"lr": 1e-3},
        "train": {"epochs": 2, "log_every": 1},
        "output": "out",
        "with": {"packing": {}},
    }
    for key, value in changes.items():
        key = "with" if key == "with_" else key
        if isinstance(value, dict) and isinstance(run.get(key), dict) and key != "with":
            run[key] = {k: v for k, v in {**run[key], **value}.items() if v is not None}
        else:
            run[key] = value
    return {k: v for k, v in run.items() if v is not None}


def edited(model: Path, folder: Path, **changes: Any) -> Path:
    """A model folder like `model`, its config.json changed (None removes a key)."""
    folder.mkdir()
    for file in model.iterdir():
        if file.name != "config.json":
            shutil.copy(file, folder / file.name)
    config = {**json.loads((model / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
