"""What other libraries print does not reach standard output."""

import logging
import sys

from optrush.cli.app import to_stderr


def test_deepspeeds_logger_speaks_on_the_other_stream(capsys):
    logger = logging.Logger("as DeepSpeed's")
    logger.addFilter(to_stderr)
    logger.addHandler(logging.StreamHandler(sys.stdout))
    logger.info("chatter")
    logger.warning("no accelerator")
    assert tuple(capsys.readouterr()) == ("", "no accelerator\n")
