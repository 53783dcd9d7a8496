"""The training's side of a tracker: starts the process that reports, hears what it says, ends it in bounded time.

Nothing here waits while steps are taken. Before step 0 the tracker has a bounded time to answer; after the last step it
has as long as it gets something done, and a bounded time without.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

from optrush.config import Config
from optrush.errors import ConfigError, UserError
from optrush.launch import launched
from optrush.trainer import distributed
from optrush.trainer.trackers import NAMES

IMPORT_S, ANSWER_S = 120.0, 10.0  # to load the tracker's package; then, to answer
END_S, SLOWEST_BYTES_S = 25.0, 10e6  # after the last step without a sign of life, and what sending adds to it


class Reporter:
    """The process that tells a tracker; `status` is how the run ends, as far as is known."""

    def __init__(self, run: Config) -> None:
        """Raises ConfigError: the tracker does not answer, or does not let us in."""
        assert run.tracker is not None
        self.name, self.following, self.status = NAMES[run.tracker.name], False, "failed"
        self.buffer, self.trouble, self.hung_up = b"", "", False
        output = Path(run.output).absolute()
        options = run.tracker.model_copy(update={"run": run.tracker.run or output.name})
        self.process = subprocess.Popen(
            [sys.executable, "-m", "optrush.trainer.trackers.follow"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        config = run.model_dump(mode="json", by_alias=True)
        # What decides the figures: a run that goes on with the same repeats what it has told.
        self.course = {k: v for k, v in config.items() if k not in ("output", "tracker", "train")}
        self.course |= {key: config["train"][key] for key in ("steps", "epochs")}
        self._tell({"tracker": options.model_dump(), "config": config, "output": str(output)})
        if self._within(IMPORT_S, "loaded"):
            self._within(ANSWER_S, "ready")

    def _within(self, patience_s: float, wanted: str) -> bool:
        said = self._next(time.monotonic() + patience_s)
        if said is not None and wanted in said:
            return True
        self.close()
        found = f"{self.name} did not answer within {patience_s:.0f} s" if said is None else said.get("refused", "")
        if self.hung_up and said is None:
            found = f"the process that would report to {self.name} ended at once"
        do = "start the server or mend its address and login, or set `tracker.offline: true`"
        raise ConfigError("to report the run to `tracker`", found, do)

    def follow(self, run_id: str, done: int, fingerprints: Mapping[str, str]) -> None:
        """From here on the run's folder is told to the tracker.

        Args:
            done: steps that the run goes on from.
        """
        self.following = True
        course = json.dumps([self.course, dict(fingerprints)], sort_keys=True)
        self._tell({"follow": run_id, "done": done, "course": sha256(course.encode()).hexdigest()[:16]})

    def news(self) -> str | None:
        """What went wrong, said once; never waits."""
        before = self.trouble
        while (said := self._next(0.0)) is not None:
            self.trouble = self.trouble or said.get("trouble", "")
        if self.hung_up and not self.trouble:
            self.trouble = "the process that reports has ended"
        return self.trouble if self.trouble != before else None

    def end(self) -> str:
        """Waits for what is still to be told, a bounded time after the last sign of life; what came of it, in words."""
        self._tell({"end": self.status})
        until = time.monotonic() + END_S
        done: dict[str, Any] | None = None
        while done is None and (said := self._next(until)) is not None:
            until = time.monotonic() + END_S + said.get("sending", 0) / SLOWEST_BYTES_S
            done = said.get("done")
        self.close()
        if done is None:
            return f"{self.name}: did not finish; it may lack the last figures and files of this run"
        text = f"{self.name}: {done['lines']} lines and {done['artifacts']} artifacts told"
        if done["gone"]:
            text += f"; replaced before they were sent: {', '.join(done['gone'])}"
        if done["refused"]:
            text += f"; not sent: {', '.join(done['refused'])} ({done['error']})"
        if done["error"] is not None and (done["left"] or not done["refused"]):
            text += f"; {done['left']} lines not, nor what came after them ({done['error']})"
        return text

    def close(self) -> None:
        """Ends the process and what it has started; may be called again."""
        if self.process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for end in (self.process.stdin, self.process.stdout):
            assert end is not None
            with suppress(OSError):
                end.close()

    def _tell(self, what: dict[str, Any]) -> None:
        file: IO[bytes] | None = self.process.stdin
        assert file is not None
        with suppress(OSError):  # it has ended; `_next` shows that
            file.write((json.dumps(what) + "\n").encode())
            file.flush()

    def _next(self, until: float) -> dict[str, Any] | None:
        """What it says next, up to a moment; None: nothing, or it has hung up."""
        assert self.process.stdout is not None
        while b"\n" not in self.buffer:
            wait_s = max(0.0, until - time.monotonic())
            if self.hung_up or not select.select([self.process.stdout], [], [], wait_s)[0]:
                return None
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            self.buffer, self.hung_up = self.buffer + data, not data
        line, _, self.buffer = self.buffer.partition(b"\n")
        said: dict[str, Any] = json.loads(line)
        return said


@contextmanager
def reporting(config: Config) -> Iterator[Reporter | None]:
    """Around a run: the reporter of the first rank, where the run asks for a tracker.

    Raises:
        ConfigError: on every rank; see Reporter.
    """
    reporter, error = None, None
    if config.tracker is not None and launched()[0] == 0:
        try:
            reporter = Reporter(config)
        except UserError as e:
            error = e
    distributed.agree(error)
    try:
        yield reporter
    finally:
        if reporter is not None:
            reporter.close()
