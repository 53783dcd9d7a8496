"""End the loader's workers after each test: a run does so itself, but a dropped trainer waits for them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.utils import counters

from optrush.data.sampler import close_workers_after


@pytest.fixture(autouse=True)
def _end_workers() -> Iterator[None]:
    yield
    with close_workers_after(iter(())):
        pass


@pytest.fixture
def fresh() -> Iterator[None]:
    """A compiler that has seen nothing, and counts its graphs from zero."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def traced(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile makes the same graphs, and writes no code for them, which takes most of its time."""
    _compiler(monkeypatch, "aot_eager")


@pytest.fixture
def partitioned(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `traced`, and the same tensors are kept for the backward pass: all but the last step of torch's compiler."""
    with warnings.catch_warnings(action="ignore"):  # about its own parts, when it is imported
        from torch._inductor.compile_fx import compile_fx
    plain = partial(compile_fx, inner_compile=lambda graph, _, **how: make_boxed_func(graph.forward))
    _compiler(monkeypatch, plain)


def _compiler(monkeypatch: pytest.MonkeyPatch, backend: str | Callable[..., Any]) -> None:
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, options=None, **kwargs: real(f, backend=backend, **kwargs))
