"""Trackio. Offline: a SQLite database under the run's folder, which `TRACKIO_DIR=... trackio show` shows.

With a server it keeps what waits on disk, so a server that dies shows only at the end. Spaces are left out: whether
one answers cannot be asked without creating it.
"""

from __future__ import annotations

import os
import re
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optrush.config import Tracker as Options

ANSWER_S = 8


class Trackio:
    """A run of a project; the library has one at a time."""

    def __init__(self, library: Any, options: Options) -> None:
        self.library, self.options = library, options
        self.id = ""

    def answer(self) -> None:
        if not self.options.offline:
            urllib.request.urlopen(self.options.uri or os.environ["TRACKIO_SERVER_URL"], timeout=ANSWER_S).close()

    def start(self, config: Mapping[str, Any], fresh: str, known: str | None) -> str:
        self.id = known or f"{self.options.run}-{fresh[:8]}"  # a run is known by its name
        self.library.init(
            project=self.options.project, name=self.id, server_url=self.options.uri, config=dict(config),
            resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip
        return self.id

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.library.log(dict(values), step=step)

    def artifact(self, path: Path, kind: str) -> None:
        name = re.sub(r"[^A-Za-z0-9._-]", "-", f"{kind}-{self.id}")  # what it takes for a name
        self.library.log_artifact(str(path), name=name, type=kind, aliases=[path.name])

    def finish(self, status: str) -> None:
        self.library.finish()


def make(options: Options, folder: Path) -> Trackio:
    os.environ["TRACKIO_DIR"] = str(folder)  # read when the library is imported
    os.environ.pop("TRACKIO_SPACE_ID", None)
    if options.offline:
        os.environ.pop("TRACKIO_SERVER_URL", None)
    import trackio

    return Trackio(trackio, options)
