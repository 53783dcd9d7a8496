"""What tests on a GPU share: compiled code of one test is not counted against the next one's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    yield
    torch._dynamo.reset()
