"""The command line: one file a group of verbs, `app` puts them together."""

import time

BEGUN = time.monotonic()  # the command
