"""What tests on a GPU share: they want one, and compiled code of one test is not counted against the next one's."""

from pathlib import Path

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))
            item.add_marker(pytest.mark.filterwarnings("default"))  # of compilers, drivers and other libraries


@pytest.fixture(autouse=True)
def _compiled_anew():
    yield
    torch._dynamo.reset()
