"""What other libraries print does not reach standard output."""

from __future__ import annotations

import logging
import sys

import pytest

from optrush.cli.app import to_stderr


def test_deepspeeds_logger_speaks_on_the_other_stream(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.Logger("as DeepSpeed's")
    logger.addFilter(to_stderr)
    logger.addHandler(logging.StreamHandler(sys.stdout))
    logger.info("chatter")
    logger.warning("no accelerator")
    assert tuple(capsys.readouterr()) == ("", "no accelerator\n")
