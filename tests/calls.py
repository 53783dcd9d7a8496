"""`optrush ARGUMENTS` in this process, and how it ended."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from optrush.cli import app


class Found(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Found]:
    """`optrush ARGUMENTS` in this process."""

    def called(*arguments: str) -> Found:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["optrush", *arguments])
        code = 0
        try:
            app.main()
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        out, err = capsys.readouterr()
        return Found(code, out, err)

    return called
