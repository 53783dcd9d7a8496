"""A run to change, a model folder to change, and what a command left behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from calls import Found as Found

Call = Callable[..., Found]
Write = Callable[..., str]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def base(**changes: Any) -> dict[str, Any]:
    """A run that works; `section={...}` changes values of a section, `name=value` replaces one, None removes it."""
    run: dict[str, Any] = {
        "model": "tiny", "objective": "sft", "data": {"path": "chat.jsonl", "eval": 0.25},
        "batch": {"seq": 128, "tokens": 256}, "optim": {"lr": 1e-3}, "train": {"epochs": 2, "log_every": 1},
        "output": "out", "with": {"packing": {}},
    }  # fmt: skip
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


def refused(found: Found, *says: str, output: str | None = "out") -> None:
    """Exit code 2, nothing on stdout, exactly asked/found/do, every fragment in them; `output` was not made."""
    assert found.code == 2, found
    assert found.out == ""
    lines = found.err.splitlines()
    assert [line[:7] for line in lines] == ["asked: ", "found: ", "do:    "], found.err
    assert all(line[7:].strip() for line in lines), found.err
    for fragment in says:
        assert fragment in found.err, f"{fragment!r} is not in\n{found.err}"
    if output is not None:
        assert not Path(output).exists()


def error_of(*verb: str) -> Callable[..., str]:
    """What a command that refuses its arguments says."""

    def error(call: Call, *arguments: str) -> str:
        found = call(*verb, *arguments)
        refused(found, output=None)
        return found.err

    return error


def document_of(*verb: str) -> Callable[..., dict[str, Any]]:
    """The one JSON document on a command's standard output."""

    def document(call: Call, *arguments: str) -> dict[str, Any]:
        found = call(*verb, *arguments, "--json")
        assert found.code == 0, found.err
        assert found.out.count("\n") == 1 and found.out.endswith("\n")
        return dict(json.loads(found.out))

    return document
