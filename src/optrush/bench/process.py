"""A fresh process for one rung, with a time limit, and why it ended where it left no answer. Pure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

STOPPED = 143  # the exit code of a climb that a signal stopped
COMMAND = [sys.executable, "-m", "optrush.bench.worker"]
PEER = [sys.executable, "-m", "optrush.bench.peer_worker"]  # for a request with a `peer`
QUIET = {"KINETO_LOG_LEVEL": "6"}  # what the profiler says of itself would be taken for a process' last words
TAIL = 5  # lines of standard error that an unexplained death is given


def run_worker(request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """What a fresh process says to a request. However it ends, there is a result: figures, or `error`."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="optrush-bench-") as name:
        asked, answered, said = (Path(name) / part for part in ("request.json", "result.json", "stderr"))
        asked.write_text(json.dumps({**request, "parent": os.getpid()}))
        command = [*(PEER if "peer" in request else COMMAND), str(asked), str(answered)]
        with said.open("wb") as stderr:
            process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True, env={**QUIET, **os.environ}
            )
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)  # with all that it started, a compiler's processes for example
        seconds = time.monotonic() - begun
        late = f"still running after {limit_s:g} s, and stopped (limit_s)"
        end = late if code is None else death(code, said.read_text("utf-8", "replace"))
        if not answered.exists():
            return {"error": end, "seconds": seconds}
        result: dict[str, Any] = {**json.loads(answered.read_text("utf-8")), "seconds": seconds}
        if "parts_note" in result and (code is None or code < 0):  # its other figures are whole
            result["parts_note"] = end
        return result


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and its group, whatever is left of it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def death(code: int, said: str) -> str:
    """Why a process left without an answer, as far as its exit code and its last words tell."""
    last = " | ".join([line for line in said.splitlines() if line.strip()][-TAIL:])
    if code >= 0:
        return f"it left without a result, exit code {code}: {last or 'and said nothing'}"
    name = signal.Signals(-code).name
    text = f"killed by signal {-code} ({name})"
    if -code == signal.SIGKILL:
        text += ", most likely out of memory: that is how the system ends the largest process; nothing else was seen"
    return text + (f": {last}" if last else "")


@contextmanager
def stopping() -> Iterator[None]:
    """SIGTERM and Ctrl-C stop a climb, its process with it: what is measured stays, and --resume goes on."""

    def stop(*_: object) -> None:
        raise SystemExit(STOPPED)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
