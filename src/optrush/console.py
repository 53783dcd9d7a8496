"""Show progress on standard error: a bar on a terminal, plain lines elsewhere. Escape text from outside."""

from __future__ import annotations

import errno
import os
import sys
import time
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from logging import CRITICAL
from typing import Any, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, track

from optrush.launch import launched

JOINERS = "\u200c\u200d"  # join letters and emoji; harmless for a terminal


def shown(text: str) -> str:
    """Replace escape sequences and direction changes in text from a model, a file or a server."""
    return "".join(
        c if c.isprintable() or c in "\n\t" + JOINERS or unicodedata.category(c) == "Zs" else "\ufffd" for c in text
    )


@contextmanager
def transformers_silenced() -> Iterator[None]:
    """Turn off the progress bars, reports and generated docstrings of transformers.

    The important findings of its reports are checked and raised here. Generating the docstring of the first config
    class imports every model and its generation: 7 s of each start with transformers 5.17.
    """
    from transformers import utils
    from transformers.utils import logging

    vars(utils)["auto_docstring"] = lambda documented=None, **_: documented or (lambda plain: plain)
    shows, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity(CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shows:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def use_color() -> bool:
    """Return whether standard output is a terminal that shows color."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


class _Log(Console):
    """A console that drops lines while the disk is full or the terminal is closed."""

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except OSError as error:
            if error.errno not in LOST:
                raise


LOST = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # such an error on a log line does not end a run; EIO: no terminal
err = _Log(stderr=True, highlight=False, soft_wrap=True)
QUIET_S, EVERY_S = 2.0, 5.0  # without lines before the first; between two lines
Item = TypeVar("Item")


def count(n: float) -> str:
    """Format a number: 1234567 as 1.23M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if n >= size:
            return f"{n / size:.3g}{unit}"
    return f"{n:.3g}"


def duration(seconds: float) -> str:
    """Format seconds: 42 s, 3 min 20 s, 5 h 12 min."""
    total = round(seconds)
    if total < 120:
        return f"{total} s"
    return f"{total // 60} min {total % 60} s" if total < 7200 else f"{total // 3600} h {total % 3600 // 60} min"


def line(m: dict[str, Any]) -> str:
    """Format a record of metrics."""
    if "eval_loss" in m:
        loss = "not finite" if m["eval_loss"] is None else f"{m['eval_loss']:.4f}"
        return f"held-out loss {loss} over {count(m['eval_target_tokens'])} targets{_rewards(m, 'eval_')}"
    if "loss" not in m:
        return ", ".join(f"{k} {v}" for k, v in m.items() if k != "step")
    loss = "not finite" if m["loss"] is None else f"{m['loss']:.4f}"
    norm = "not finite" if m["grad_norm"] is None else f"{m['grad_norm']:.3g}"
    text = f"loss {loss}{_rewards(m)}  lr {m['lr']:.2e}  norm {norm}  {count(m['tokens_per_s'])} tok/s"
    if m["mfu"] is not None:
        text += f"  MFU {m['mfu']:.1%}"
    text += f"  {m['peak_bytes'] / 2**30:.1f} GiB  data {m['data_wait_s'] / m['step_s']:.0%}"
    return text + (f"  skipped {m['skipped']}" if m["skipped"] else "")


def _rewards(m: dict[str, Any], kind: str = "") -> str:
    if "group_spread" in m:
        sampled = f"{m['answer_tokens']:.0f} tokens an answer at {count(m['rollout_tokens_per_s'])} tok/s"
        return f"  reward {m['reward']:.3f}  {sampled}"
    accuracy, margin = m.get(f"{kind}reward_accuracy"), m.get(f"{kind}reward_margin")
    return "" if accuracy is None or margin is None else f"  pairs right {accuracy:.0%}, margin {margin:.3g}"


class Bar:
    """Progress over the steps of a run, from its metrics records: lines, and on a terminal a bar below them.

    The time left is estimated from all steps so far.
    """

    def __init__(self, total: int, done: int = 0) -> None:
        self.total, self.first, self.begun = total, done, time.monotonic()
        columns = (
            SpinnerColumn(), MofNCompleteColumn(), BarColumn(20), TimeElapsedColumn(), TextColumn("{task.description}"),
        )  # fmt: skip
        self.progress = Progress(*columns, console=err, transient=True) if sys.stderr.isatty() else None
        self.task = None if self.progress is None else self.progress.add_task("", total=total, completed=done)

    def __enter__(self) -> Bar:
        if self.progress is not None:
            self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.progress is not None:
            self.progress.stop()

    def say(self, m: dict[str, Any]) -> None:
        step, rest = m["step"], ""
        if "loss" in m and step > self.first:
            eta = duration((time.monotonic() - self.begun) / (step - self.first) * (self.total - step))
            if self.progress is not None and self.task is not None:
                self.progress.update(self.task, completed=step, description=f"ETA {eta}")
            elif step < self.total:
                rest = f"  ETA {eta}"
        err.print(shown(f"step {step}/{self.total}  {line(m)}{rest}"), markup=False)


def passing(items: Iterable[Item], total: int, what: str) -> Iterator[Item]:
    """Yield the items and show the time left: a bar on a terminal, occasional lines elsewhere."""
    if launched()[0] == 0 and sys.stderr.isatty():
        yield from track(items, escape(what), total, console=err, transient=True)
        return
    begun = last = time.monotonic()
    for n, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - begun > QUIET_S and now - last > EVERY_S:
            last = now
            say(f"{what}: {n / total:.0%}, {(now - begun) / n * (total - n):.0f} s left")


def say(text: str) -> None:
    """Print a line on the first rank."""
    if launched()[0] == 0:
        err.print(shown(text), markup=False)


def loading(text: str) -> None:
    """Print loading progress before the first step, only on the first rank's terminal."""
    if sys.stderr.isatty():
        say(text)


def warn(text: str) -> None:
    """Print a line about this rank, on any rank."""
    err.print(shown(text), markup=False)
