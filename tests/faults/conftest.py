"""What the fault tests' runs begin with, made once for all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from runs import configuration, recording, trained, write_data, write_model


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, data, and `reference`: a run that nothing happened to. Other runs' folders lie beside it."""
    folder = tmp_path_factory.mktemp("home")
    write_model(folder / "model")
    write_data(folder / "data.jsonl")
    assert trained(configuration(folder, folder / "reference"), before=recording(folder / "reference.samples")) == 0
    return folder
