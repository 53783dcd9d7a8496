"""Experiment trackers: where a run is reported to, beside its own folder. One file a tracker, this one for all. Pure.

A tracker is only ever called in a process of its own (follow.py), so that whatever it imports, prints, holds up or
leaves running is not the training's.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from optrush.config import LOGIN, Config, refuse_secrets
from optrush.config import Tracker as Options
from optrush.errors import ConfigError, NeedsError
from optrush.technique import library

FOLDER, KNOWN = "tracker", "tracker.json"  # of a run's folder: the tracker's own files, and what it has
NAMES = {"mlflow": "MLflow", "wandb": "Weights & Biases", "trackio": "Trackio"}
STATUSES = ("finished", "stopped", "failed")
# Which distributions have it, the first of which pip brings; and the variable that names a server, where one must be.
_PACKAGES = {"mlflow": ("mlflow-skinny", "mlflow"), "wandb": ("wandb",), "trackio": ("trackio",)}
_SERVERS = {"mlflow": "MLFLOW_TRACKING_URI", "trackio": "TRACKIO_SERVER_URL"}


class Tracker(Protocol):
    """What each file's `make(options, folder)` returns. Every call may raise whatever its library raises."""

    def answer(self) -> None:
        """Raises unless the server answers and lets us in; creates nothing, here or there."""

    def start(self, config: Mapping[str, Any], fresh: str, known: str | None) -> str:
        """Begins a run with the id `fresh`, or goes on with the one known; the id to know it by. May be called again
        after it raised.
        """

    def metrics(self, step: int, values: Mapping[str, float]) -> None: ...

    def artifact(self, path: Path, kind: str) -> None:
        """A folder or a file; on return it is there, or what is needed of it is kept."""

    def finish(self, status: str) -> None:
        """One of STATUSES; on return all is there."""


def make(options: Options, folder: Path) -> Tracker:
    """The tracker that the options name; its own files go to `folder`."""
    made: Tracker = importlib.import_module(f"optrush.trackers.{options.name}").make(options, folder)
    return made


def check(config: Config) -> None:
    """Whether the run can be reported as asked, as far as that can be said without asking a server.

    Raises:
        UserError: a password in an address, a missing package, no server named, or none that can be one.
    """
    refuse_secrets(config)
    if config.tracker is None:
        return
    name, uri = config.tracker.name, config.tracker.uri
    asked = f"`tracker: {name}`"
    if uri is not None and (urlsplit(uri).query or urlsplit(uri).fragment):
        do = "put a token into the tracker's own environment variable, and name the address alone"
        raise ConfigError("`tracker.uri`", "an address with more than host and path, which may be a token", do)
    if uri is not None and config.tracker.offline:
        raise ConfigError("`tracker.offline: true`", "a `tracker.uri` beside it", "leave one of them out")
    if all(library(package) is None for package in _PACKAGES[name]):
        raise NeedsError(asked, f"the package {_PACKAGES[name][0]} is not installed", f"pip install 'optrush[{name}]'")
    server = None if config.tracker.offline else _SERVERS.get(name)
    address = "" if server is None else uri or os.environ.get(server, "")
    if server is not None and not address:
        found = f"no `tracker.uri`, and no {server} in the environment"
        raise ConfigError(asked, found, "name the server, or set `tracker.offline: true`")
    if name == "mlflow" and address and not address.startswith(("http://", "https://", "databricks")):
        do = "name a server, http://... or https://..., or set `tracker.offline: true`, which writes a database"
        raise ConfigError(asked, f"the address {LOGIN.sub('***@', address)}, which is no server's", do)
    if name == "trackio" and address and "write_token=" not in address and not os.environ.get("TRACKIO_WRITE_TOKEN"):
        do = "set TRACKIO_WRITE_TOKEN to the one that the server shows where it was started"
        raise ConfigError(
            asked, "no TRACKIO_WRITE_TOKEN in the environment, without which its server takes nothing", do
        )
