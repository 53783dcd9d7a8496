"""Limit the run time of user code: a reward, a regular expression."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class TooLong(BaseException):
    """The time limit was exceeded. A BaseException, so that `except Exception` in user code does not catch it."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TooLong in the block after `seconds`, repeatedly; or at its end, if no signal interrupted it.

    A signal interrupts Python code in the main thread only, and no function that hangs in C.
    """
    began = time.monotonic()

    def end(*_: object) -> None:
        raise TooLong(f"it took longer than {seconds:g} s")

    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGALRM, end) if main else None
    try:
        if main:
            signal.setitimer(signal.ITIMER_REAL, seconds, 0.1)
        yield
    finally:
        if main:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    if time.monotonic() - began > seconds:
        end()
