"""Limit the time of code that others wrote: a reward, a regular expression."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class TooLong(BaseException):
    """Something took longer than it may: no `except Exception` in it keeps this from ending it."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TooLong in the block after some seconds, again and again; or after it, where no signal ended it.

    A signal interrupts Python in a main thread alone, and no function that hangs in C.
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
