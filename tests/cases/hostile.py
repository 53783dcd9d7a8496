"""What a stranger may have put into a file, and what a command made of it: shared by tests and benchmarks/faults."""

import contextlib
import io
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the hub's library is imported

import yaml

from optrush.cli import app
from optrush.models import tiny

CANARY = "canary-that-nothing-may-write"
LIMIT_S = 120.0  # of what takes a second: longer, and it hangs


class Ended(NamedTuple):
    """How a command ended; `failure` is a traceback, or what else must not happen, else empty."""

    code: int
    out: str
    err: str
    failure: str

    @property
    def lines(self) -> list[str]:
        """The first words of what was printed as an error."""
        return [line.partition(":")[0] for line in self.err.strip().splitlines()]

    @property
    def refused(self) -> bool:
        """Whether it ended with exit code 2 in exactly three lines, and nothing on standard output."""
        begins = [line[:7] for line in self.err.splitlines()]
        return not self.failure and self.code == 2 and self.out == "" and begins == ["asked: ", "found: ", "do:    "]


class Hang(BaseException):
    """A command has not ended within its time."""


@contextlib.contextmanager
def within(limit_s: float) -> Iterator[None]:
    """Raise Hang in the main thread after limit_s."""

    def ring(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def called(*arguments: str, limit_s: float = LIMIT_S) -> Ended:
    """`optrush ARGUMENTS` in this process."""
    out, err, code, failure = io.StringIO(), io.StringIO(), 0, ""
    argv, sys.argv = sys.argv, ["optrush", *arguments]
    try:
        with within(limit_s), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            app.main()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except Hang:
        code, failure = 124, f"no answer within {limit_s:.0f} s"
    except BaseException as error:
        code, failure = 1, "".join(traceback.format_exception(error))
    finally:
        sys.argv = argv
    failure = failure or (err.getvalue() if "Traceback (most recent call last)" in err.getvalue() else "")
    return Ended(code, out.getvalue(), err.getvalue(), failure)


class Box:
    """A working folder with the built-in model in `model/` and a few rows; each command begins in it afresh."""

    def __init__(self, folder: Path, model: Path | None = None) -> None:
        self.folder = folder
        self.model = folder / "model" if model is None else model
        if model is None:
            tiny.write_tiny(self.model)
        rows = [{"text": f"Chop {i + 2} onions, fry them in butter and stir."} for i in range(12)]
        (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        chats = [
            {"messages": [{"role": "user", "content": f"Soup {i}?"}, {"role": "assistant", "content": f"Stir {i}."}]}
            for i in range(12)
        ]
        (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))

    def run(self, **changes: Any) -> dict[str, Any]:
        """A run of one step that works, with some of its keys replaced (None removes one)."""
        run: dict[str, Any] = {
            "model": str(self.model), "objective": "pretrain", "data": {"path": str(self.folder / "text.jsonl")},
            "batch": {"seq": 32, "tokens": 64}, "train": {"steps": 1, "export": False},
            "output": str(self.folder / "out"), "with": {},
        }  # fmt: skip
        return {key: value for key, value in {**run, **changes}.items() if value is not None}

    def write(self, text: str | None = None, **changes: Any) -> str:
        """Write run.yaml and return its path."""
        file = self.folder / "run.yaml"
        file.write_text(yaml.safe_dump(self.run(**changes), sort_keys=False) if text is None else text)
        return str(file)

    def edited(self, text: str | None = None, **changes: Any) -> Path:
        """A folder like the model's, its config.json changed, or replaced by a text."""
        folder = self.folder / "edited"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for file in self.model.iterdir():
            if file.name != "config.json":
                shutil.copy(file, folder / file.name)
        config = {**json.loads((self.model / "config.json").read_text()), **changes}
        (folder / "config.json").write_text(json.dumps(config) if text is None else text)
        return folder
