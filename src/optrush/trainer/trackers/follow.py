"""The process that reports a run: reads what the run writes to its folder, and tells a tracker. `python -m` runs it.

The training never waits for it. The queue is the folder: what could not be told is still in metrics.jsonl, and is
tried again; `tracker.json` says what the tracker has, so a resumed run goes on there. It talks with the training
(reporting.py) in lines of JSON:

in:  {"tracker", "config", "run", "output"}; {"follow": id of the run, "done": steps, "course": digest};
     {"end": status}. The end of the input: killed.
out: {"loaded"}; {"ready"} or {"refused": why}; {"trouble": why}, once; {"sending": bytes}; {"alive"}; {"done": ...}.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import select
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

from optrush.config import Tracker as Options
from optrush.config import scrubbed
from optrush.trainer.trackers import FOLDER, KNOWN, Tracker, make

EVERY_S, LONGEST_S = 1.0, 30.0  # between looks at the folder; between attempts, where the tracker fails
PATIENCE_S = 5.0  # of the end: without anything told
MARKS = ("loss", "eval_loss")  # a line with one of these holds figures
Say = Callable[[dict[str, Any]], None]


class Follower:
    """One run and its tracker; `say` answers the training."""

    def __init__(self, tracker: Tracker, options: Options, config: dict[str, Any], output: Path, say: Say) -> None:
        self.tracker, self.options, self.config, self.output, self.say = tracker, options, config, output, say
        self.known: dict[str, Any] = {"name": options.name, "id": None, "course": None, "step": {}, "sent": {}}
        self.fresh = ""
        self.offset = 0  # of metrics.jsonl, up to which all is told
        self.started = False
        self.troubles, self.lines, self.artifacts = 0, 0, 0
        self.error: str | None = None
        self.gone: list[str] = []  # checkpoints that were replaced before they were sent
        self.refused: dict[str, str] = {}  # artifacts that the tracker does not take, and why

    def follow(self, fresh: str, done: int, course: str) -> None:
        """Begins; goes on with what the folder says the tracker has.

        A run that goes on from before what was told repeats those figures, unless its `course` is another: then what
        was told holds no more, which no tracker can take back, and a new run begins there, with the whole history.
        """
        self.fresh, self.known["course"] = fresh, course
        self.held = os.open(self.output, os.O_RDONLY)
        fcntl.flock(self.held, fcntl.LOCK_EX)  # one whose run was killed has seconds left
        try:
            found = json.loads((self.output / KNOWN).read_text())
        except (OSError, ValueError):
            return
        if found.get("name") == self.options.name:
            if max(found["step"].values(), default=0) > done and found.get("course") != course:
                self.fresh = uuid.uuid4().hex
            else:
                self.known = found | {"course": course}

    def turn(self, status: str | None = None) -> bool:
        """Tells the tracker what is new; False: it failed, and the rest waits. `status`: how the run has ended.

        An artifact that the tracker does not take holds up no other.
        """
        try:
            if not self.started:
                self.known["id"] = self.tracker.start(self.config, self.fresh, self.known["id"])
                self.started = True
                self._keep()
            for step, mark, values in self._lines():
                self.tracker.metrics(step, values)
                self.known["step"][mark] = step
                self.lines += 1
                self._keep()
            self.refused.clear()
            for path, kind in self._artifacts(status):
                if self._sent(path, kind) and status is None:
                    break  # figures first
        except Exception as error:  # a library's, a server's: none of them is worth a run
            self._trouble(error)
            return False
        self.error = next(iter(self.refused.values()), None)
        return not self.refused

    def _trouble(self, error: Exception) -> None:
        if self.troubles == 0:
            self.say({"trouble": told(error)})
        self.troubles, self.error = self.troubles + 1, told(error)

    def _lines(self) -> Iterator[tuple[int, str, dict[str, float]]]:
        """Lines of figures that the tracker has not got: (step, what kind of line, figures)."""
        try:
            with (self.output / "metrics.jsonl").open("rb") as file:
                file.seek(self.offset)
                text = file.read()
        except FileNotFoundError:
            return
        for line in text[: text.rfind(b"\n") + 1].splitlines(keepends=True):
            found = json.loads(line)
            mark = next((m for m in MARKS if m in found), None)
            if mark is not None and found["step"] > self.known["step"].get(mark, -1):
                figures = {k: float(v) for k, v in found.items() if isinstance(v, int | float) and k != "step"}
                yield found["step"], mark, {k: v for k, v in figures.items() if math.isfinite(v)}
            self.offset += len(line)  # not if telling it raised

    def _artifacts(self, status: str | None) -> Iterator[tuple[Path, str]]:
        """What may be to be sent: run.yaml, checkpoints as they come, the newest first (offline, those that are left at
        the end), and the model. A run that is to stop at once sends none of these: it will be resumed.
        """
        asked, ended = self.options.artifacts, status in ("finished", "failed")
        yield self.output / "run.yaml", "config"
        if asked == "all" and (ended or not (self.options.offline or status)):
            names = sorted((p.name for p in (self.output / "checkpoints").glob("step-*")), reverse=True)
            yield from ((self.output / "checkpoints" / n, "checkpoint") for n in names if "." not in n)
        if asked != "none" and status == "finished" and (self.output / "model").is_dir():
            yield self.output / "model", "model"

    def _sent(self, path: Path, kind: str) -> bool:
        """Sends it, unless the tracker has it as it is; True: it was sent now."""
        try:
            if kind == "model":  # reading it takes a while, too
                self.say({"sending": size_bytes(path)})
            holds = content(path)
            if self.known["sent"].get(path.name) == holds:
                return False
            self.say({"sending": size_bytes(path)})
            self.tracker.artifact(path, kind)
        except Exception as error:
            if path.exists():
                self._trouble(error)
                self.refused[path.name] = told(error)
            else:
                self.gone.append(path.name)  # a newer one has replaced it
            self.say({"alive": True})
            return False
        self.known["sent"][path.name] = holds
        self.artifacts += kind != "config"
        self._keep()
        return True

    def _keep(self) -> None:
        new = self.output / f"{KNOWN}.tmp"
        new.write_text(json.dumps(self.known) + "\n")
        os.replace(new, self.output / KNOWN)
        self.say({"alive": True})

    def end(self, status: str) -> None:
        """All that waits, then the end; gives up after so long without anything told."""
        got, until = self.lines + self.artifacts, time.monotonic() + PATIENCE_S
        while not self.turn(status):
            if self.lines + self.artifacts > got:
                got, until = self.lines + self.artifacts, time.monotonic() + PATIENCE_S
            if time.monotonic() > until:
                break
            time.sleep(EVERY_S)
        self._finish(status)
        left = sum(1 for _ in self._lines())
        counts = {"lines": self.lines, "left": left, "artifacts": self.artifacts, "gone": self.gone}
        self.say({"done": {**counts, "refused": list(self.refused), "error": self.error}})

    def _finish(self, status: str) -> None:
        """Also of a run that the tracker has not all of."""
        until = time.monotonic() + PATIENCE_S
        while self.started:
            try:
                return self.tracker.finish(status)
            except Exception as error:
                self._trouble(error)
            if time.monotonic() > until:
                return None
            time.sleep(EVERY_S)


def size_bytes(path: Path) -> int:
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return sum(p.stat().st_size for p in files)


def content(path: Path) -> str:
    """What an artifact holds, in short: the same name may come again with other weights."""
    manifest = path / "manifest.json"  # of a checkpoint; it has the digests of the other files
    parts = [path] if path.is_file() else [manifest] if manifest.is_file() else sorted(path.glob("*.safetensors"))
    sums = sha256()
    for part in parts:
        with part.open("rb") as file:
            sums.update(file_digest(file, "sha256").digest())
    return sums.hexdigest()[:16]


def told(error: Exception) -> str:
    """An exception of another's in one line, without secrets."""
    return scrubbed(" ".join(f"{type(error).__name__}: {error}".split()))[:300]


class Ears:
    """Lines of JSON from the training."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.buffer, self.closed = descriptor, b"", False

    def next(self, patience_s: float | None) -> dict[str, Any] | None:
        """The next message, or None when none came in that time, or none will come."""
        while b"\n" not in self.buffer:
            if self.closed or not select.select([self.descriptor], [], [], patience_s)[0]:
                return None
            data = os.read(self.descriptor, 1 << 16)
            self.buffer, self.closed = self.buffer + data, not data
        line, _, self.buffer = self.buffer.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found


def speaking(descriptor: int) -> Say:
    def say(what: dict[str, Any]) -> None:
        with suppress(OSError):  # a training that was killed listens no more
            os.write(descriptor, (json.dumps(what) + "\n").encode())

    return say


def main() -> None:
    """From the first message to the end of the run, or of the process that runs it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    say, ears = speaking(os.dup(1)), Ears(os.dup(0))
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):  # libraries print, and ask for passwords
        os.dup2(nothing, descriptor)
    hello = ears.next(None)
    if hello is None:
        return
    output, options = Path(hello["output"]), Options.model_validate(hello["tracker"])
    try:
        tracker = make(options, output / FOLDER)
        say({"loaded": True})
        tracker.answer()
    except Exception as error:
        say({"refused": told(error)})
        return
    say({"ready": True})
    begin = ears.next(None)
    if begin is None:
        return
    follower = Follower(tracker, options, hello["config"], output, say)
    follower.follow(begin["follow"], begin["done"], begin["course"])
    wait_s = EVERY_S
    while (end := ears.next(wait_s)) is None and not ears.closed:
        wait_s = EVERY_S if follower.turn() else min(2 * wait_s, LONGEST_S)
    if end is None:
        signal.alarm(int(2 * PATIENCE_S))  # nobody is left who could end this process
    follower.end("stopped" if end is None else end["end"])


if __name__ == "__main__":
    main()
