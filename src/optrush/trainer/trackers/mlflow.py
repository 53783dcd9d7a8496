"""MLflow, through its client. Offline: a SQLite database under the run's folder, which `mlflow ui` shows.

MLflow retries a failed request for minutes by itself; here the caller retries, so the library is told not to. The
client writes no machine's, user's or repository's name, as the library's shorter interface would.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from optrush.config import Tracker as Options

ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "8",
}
STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
MOST_PARAMS, LONGEST = 100, 6000  # in a request, characters of a value: the server's limits


class MLflow:
    """A run of an experiment; `tracking` and `entities` are the library's modules."""

    def __init__(self, tracking: Any, entities: Any, options: Options, folder: Path) -> None:
        self.tracking, self.entities, self.options, self.folder = tracking, entities, options, folder
        self.id: str | None = None
        self.client: Any = None

    def answer(self) -> None:
        if not self.options.offline:
            self._connect()
            self.client.search_experiments(max_results=1)

    def _connect(self) -> None:
        uri = f"sqlite:///{self.folder / 'mlflow.db'}" if self.options.offline else self.options.uri
        self.client = self.tracking.MlflowClient(tracking_uri=uri)  # None: as MLFLOW_TRACKING_URI says

    def start(self, config: Mapping[str, Any], fresh: str, known: str | None) -> str:
        """Creates the run once, however often it is asked; a server takes a value of the configuration only once."""
        if self.options.offline:
            self.folder.mkdir(exist_ok=True)
        if self.client is None:
            self._connect()
        if known is not None:
            self.id = known
            self.client.update_run(known, status="RUNNING")
            return known
        if self.id is None:
            tags = {"optrush.run": fresh}
            self.id = self.client.create_run(self._experiment(), run_name=self.options.run, tags=tags).info.run_id
        params = [self.entities.Param(key, str(value)[:LONGEST]) for key, value in flat(config)]
        for at in range(0, len(params), MOST_PARAMS):
            self.client.log_batch(self.id, params=params[at : at + MOST_PARAMS])
        assert self.id is not None
        return self.id

    def _experiment(self) -> str:
        found = self.client.get_experiment_by_name(self.options.project)
        if found is not None:
            return str(found.experiment_id)
        place = (self.folder / "artifacts").absolute().as_uri() if self.options.offline else None
        return str(self.client.create_experiment(self.options.project, artifact_location=place))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        now = time.time_ns() // 10**6
        made = [self.entities.Metric(key, value, now, step) for key, value in values.items()]
        self.client.log_batch(self.id, metrics=made)

    def artifact(self, path: Path, kind: str) -> None:
        if path.is_dir():
            self.client.log_artifacts(self.id, str(path), f"checkpoints/{path.name}" if kind == "checkpoint" else kind)
        else:
            self.client.log_artifact(self.id, str(path))

    def finish(self, status: str) -> None:
        self.client.set_terminated(self.id, STATUS[status])


def make(options: Options, folder: Path) -> MLflow:
    os.environ.update(ENVIRONMENT)  # read when the library is imported
    from mlflow import entities, tracking

    return MLflow(tracking, entities, options, folder)


def flat(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """{"a": {"b": 1}} -> ("a.b", 1)."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{path}{key}.")
        else:
            yield path + key, value
