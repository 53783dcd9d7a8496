"""End the loader's workers after each test: a run does so itself, but a dropped trainer waits for them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.context import ForkProcess

import pytest


@pytest.fixture(autouse=True)
def _end_workers() -> Iterator[None]:
    yield
    for process in multiprocessing.active_children():
        if isinstance(process, ForkProcess):  # the two ranks are spawned, and stay
            process.terminate()
            process.join(2)
