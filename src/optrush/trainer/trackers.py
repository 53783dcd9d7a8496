"""Report a run to TensorBoard, MLflow and Weights & Biases: each by a daemon thread of rank 0 and a bounded queue.

Metrics are queued without waiting. If the queue is full, the line is only counted; metrics.jsonl has it. A state file
records the sent lines; a resumed run sends the rest. A client's exception is logged once, and the call is retried.
After the last step the tracker has END_S seconds without progress, then its thread is abandoned.
"""

from __future__ import annotations

import json
import math
import os
import socket
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import file_digest, sha256
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from optrush import files
from optrush.config import LOGIN, Config, TrackerConfig, refuse_secrets, scrubbed
from optrush.errors import ConfigError, NeedsError, UserError, one_line
from optrush.files import open_file, read_file, read_text
from optrush.launch import TRACKER_THREAD, launched
from optrush.technique import library
from optrush.trainer import distributed

NAMES = {"mlflow": "MLflow", "wandb": "Weights & Biases"}
FOLDER, STATE, BOARD = "tracker", "tracker.json", "tensorboard"  # in the run folder
PACKAGES = {"mlflow": ("mlflow-skinny", "mlflow"), "wandb": ("wandb",)}  # distributions; an error names the first
QUEUED = 100_000  # maximum number of waiting lines
EVERY_S, LONGEST_S = 1.0, 30.0  # between two turns of a thread; maximum between attempts after failures
ANSWER_S = 10.0  # before step 0
PATIENCE_S, END_S, SLOWEST_BYTES_S = 5.0, 25.0, 10e6  # at the end: retries; silence; added for a file that is sent


class ReportClient:
    """One client library. A failed call is repeated."""

    def answer(self) -> None:
        """Raise unless the server answers and accepts the login; create nothing."""

    def start(self, config: Mapping[str, Any], fresh: str, state: dict[str, Any]) -> str:
        """Create a run with the id `fresh`, or continue the run with the id `state["id"]`; return its id."""
        return fresh

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values at a step."""

    def log_artifact(self, path: Path, kind: str) -> None:
        """Upload a file or a folder before returning."""

    def finish(self, status: str) -> None:
        """Flush everything; status is finished, stopped or failed."""


def check_tracker(config: Config) -> None:
    """Check `tracker:` without contacting a server.

    Raises:
        UserError: a password in an address, a missing package, no server, or an invalid address.
    """
    refuse_secrets(config)
    if config.tracker is None:
        return
    name, uri, offline = config.tracker.name, config.tracker.uri, config.tracker.offline
    asked, instead = f"`tracker: {name}`", "or set `tracker.offline: true`"
    if uri is not None and (urlsplit(uri).query or urlsplit(uri).fragment):
        do = "put a token into the tracker's own environment variable, and give only the address"
        raise ConfigError("`tracker.uri`", "an address with more than host and path, which may be a token", do)
    if uri is not None and offline:
        raise ConfigError("`tracker.offline: true`", "`tracker.uri` is set, too", "remove one of them")
    if all(library(package) is None for package in PACKAGES[name]):
        raise NeedsError(asked, f"the package {PACKAGES[name][0]} is not installed", f"pip install 'optrush[{name}]'")
    address = uri or os.environ.get("MLFLOW_TRACKING_URI", "")
    if name != "mlflow" or offline or address.startswith(("http://", "https://", "databricks")):
        return
    if not address:
        found = "no `tracker.uri`, and no MLFLOW_TRACKING_URI in the environment"
        raise ConfigError(asked, found, f"name the server, {instead}")
    found = f"the address {LOGIN.sub('***@', address)}, which is not a server"
    raise ConfigError(asked, found, f"name a server, http://... or https://..., {instead}, which writes a database")


@contextmanager
def open_reporter(config: Config) -> Iterator[Reporter | None]:
    """Yield rank 0's reporter to the configured tracker, once the server has answered; None without a tracker.

    Raises:
        ConfigError: on every rank; the tracker does not answer, or rejects the login.
    """
    reporter, error = None, None
    if (options := config.tracker) is not None and launched()[0] == 0:
        output = Path(config.output).absolute()
        options = TrackerConfig(**{**options.model_dump(), "run": options.run or output.name})
        reporter = Reporter(options, output, config)
        try:
            reporter.connect()
        except UserError as e:
            error = e
    distributed.agree(error)
    yield reporter


class Reporter(threading.Thread):
    """The thread that reports to one tracker. `status`: how the run ends, if known."""

    def __init__(self, options: TrackerConfig | None, output: Path, config: Config) -> None:
        """options: None for TensorBoard's files."""
        super().__init__(name=TRACKER_THREAD, daemon=True)
        self.options, self.output, self.status = options, output, "failed"
        self.label = "TensorBoard" if options is None else NAMES[options.name]
        self.state_path = output / (f"{BOARD}/{STATE}" if options is None else STATE)
        self.config = config.model_dump(mode="json", by_alias=True)
        self.queue = deque[tuple[int, str, dict[str, float]]]()
        self.lost, self.lines, self.artifacts = 0, 0, 0
        self.ending, self.started, self.fresh = threading.Event(), False, ""
        self.trouble, self.error = "", ""  # the first failure, until read; the last failure
        self.gone: list[str] = []  # checkpoints replaced before they were sent
        self.refused: dict[str, str] = {}  # artifacts that the tracker rejects, with reasons
        self.deadline, self.progress = math.inf, 0.0  # of `end`; time when the tracker last received something

    # called by training

    def connect(self) -> None:
        """Import the library, and contact the server for at most ANSWER_S.

        Raises:
            ConfigError: it does not answer, or rejects the login.
        """
        outcome = [f"{self.label} did not answer within {ANSWER_S:.0f} s"]

        def answer() -> None:
            try:
                self.client.answer()
                outcome.append("")
            except Exception as error:
                outcome.append(_described(error))

        try:
            self.client = open_client(self.options, self.output)
        except Exception as error:  # from the library's import
            outcome.append(_described(error))
        else:
            contact = threading.Thread(target=answer, name=TRACKER_THREAD, daemon=True)
            contact.start()
            contact.join(ANSWER_S)
        if found := outcome[-1]:
            do = "start the server, fix its address and login, or set `tracker.offline: true`"
            raise ConfigError("to report the run to `tracker`", found, do)

    def follow(self, run_id: str, done: int, fingerprints: Mapping[str, str]) -> None:
        """Start reporting.

        A run that repeats steps unchanged repeats the tracker's lines. With another configuration, data or model the
        tracker's history is wrong and cannot be deleted, so the tracker gets a new run.

        Args:
            run_id: the id of a new run in the tracker.
            done: steps completed before.
            fingerprints: of data, tokenizer and model.
        """
        course = {k: v for k, v in self.config.items() if k not in ("output", "tracker", "train")}
        course |= {key: self.config["train"][key] for key in ("steps", "epochs")}
        text = json.dumps([course, dict(fingerprints)], sort_keys=True)
        digest, name = sha256(text.encode()).hexdigest()[:16], self.label if self.options is None else self.options.name
        self.state: dict[str, Any] = {"name": name, "id": None, "course": digest, "step": {}, "sent": {}}
        self.fresh = run_id
        try:
            before = json.loads(read_text(self.state_path))
            reported = max((int(step) for step in before["step"].values()), default=0)
            if before["name"] == name and reported > done and before["course"] != digest:
                self.fresh = uuid.uuid4().hex
            elif before["name"] == name:
                self.state |= before | {"course": digest, "sent": dict(before["sent"])}
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            pass  # missing or damaged: report from the start
        self.state["done"] = done
        self.start()

    def put(self, line: Mapping[str, Any]) -> str:
        """Queue a line of metrics.jsonl if there is room; return the first failure of the tracker, once."""
        if (item := _figures(line)) is not None and len(self.queue) < QUEUED:
            self.queue.append(item)
        else:
            self.lost += item is not None
        trouble, self.trouble = self.trouble, ""
        return trouble

    def end(self) -> str:
        """Wait while the tracker makes progress, at most END_S without; return the outcome as text."""
        self.alive()
        self.progress = time.monotonic()
        self.ending.set()
        while self.is_alive() and time.monotonic() < self.deadline:
            self.join(0.1)
        if self.is_alive():
            return f"{self.label}: did not finish; it may lack the last metrics and files of this run"
        left = len(self.queue) if self.started else len(self._written())
        waits = self.error and (left or not self.refused)
        parts = {
            f"{self.lines} lines and {self.artifacts} artifacts sent": True,
            f"replaced before they were sent: {', '.join(self.gone)}": self.gone,
            f"not sent: {', '.join(self.refused)} ({self.error})": self.refused,
            f"{left} lines and everything after them not sent ({self.error})": waits,
            f"{self.lost} lines lost while {QUEUED:,} waited: metrics.jsonl has them": self.lost,
        }
        return f"{self.label}: {'; '.join(text for text, holds in parts.items() if holds)}"

    # run by the thread

    def run(self) -> None:
        """Send lines until `end`, then flush and finish."""
        wait_s = EVERY_S
        while not self.ending.wait(wait_s):
            wait_s = EVERY_S if self._tried(self._send) else min(2 * wait_s, LONGEST_S)
        for work in (self._send, lambda: self.client.finish(self.status)):
            while not self._tried(work) and time.monotonic() < self.progress + PATIENCE_S:
                time.sleep(EVERY_S)
            if not self.started:
                return

    def _tried(self, work: Callable[[], object]) -> bool:
        try:
            work()
        except Exception as error:  # errors of a library or server must not end a run
            self._failed(error)
            return False
        self.error = next(iter(self.refused.values()), "")
        return not self.refused

    def _send(self) -> None:
        """Send new lines, then artifacts."""
        if not self.started:
            self.state["id"] = self.client.start(self.config, self.fresh, self.state)
            self.started, self.lost = True, 0  # the file has the lines that did not fit into the queue
            self.queue.extendleft(reversed(self._written()))
            self._store()
        while self.queue:
            step, mark, values = self.queue[0]
            if step > self.state["step"].get(mark, -1):  # else it was read from the file and also queued
                self.client.log_metrics(step, values)
                self.state["step"][mark] = step
                self.lines += 1
                self._store()
            self.queue.popleft()
        self.refused.clear()
        for path, kind in self._artifacts():
            if self._sent(path, kind) and not self.ending.is_set():
                break  # metrics first

    def _failed(self, error: Exception) -> str:
        text = _described(error)
        self.trouble, self.error = self.trouble if self.error else text, text
        return text

    def _written(self) -> list[tuple[int, str, dict[str, float]]]:
        """Return the figures in metrics.jsonl that the tracker does not have."""
        try:
            text = read_file(self.output / "metrics.jsonl")
        except FileNotFoundError:
            return []
        items = (_figures(json.loads(line)) for line in text[: text.rfind(b"\n") + 1].splitlines())
        return [i for i in items if i is not None and i[0] > self.state["step"].get(i[1], -1)]

    def _artifacts(self) -> Iterator[tuple[Path, str]]:
        """Yield artifacts to send: run.yaml, checkpoints, newest first (offline: those left at the end), model.

        A run stopped by a signal sends neither checkpoints nor model: it will be resumed.
        """
        if self.options is None:
            return
        yield self.output / "run.yaml", "config"
        status = self.status if self.ending.is_set() else None
        due = status != "stopped" if status else not self.options.offline
        if self.options.artifacts == "all" and due:
            paths = sorted((self.output / "checkpoints").glob("step-*"), reverse=True)
            yield from ((path, "checkpoint") for path in paths if "." not in path.name)
        if self.options.artifacts != "none" and status == "finished" and (self.output / "model").is_dir():
            yield self.output / "model", "model"

    def _sent(self, path: Path, kind: str) -> bool:
        """Send an artifact unless the tracker has it with this content; return whether it was sent now."""
        try:
            self.alive(size_bytes(path))  # hashing also takes time
            digest = content_digest(path)
            if self.state["sent"].get(path.name) == digest:
                return False
            self.client.log_artifact(path, kind)
        except Exception as error:
            if path.exists():
                self.refused[path.name] = self._failed(error)
            else:
                self.gone.append(path.name)
            return False
        self.state["sent"][path.name] = digest
        self.artifacts += kind != "config"
        self._store()
        return True

    def _store(self) -> None:
        files.write_whole(self.state_path, json.dumps(self.state) + "\n")
        self.progress = time.monotonic()
        self.alive()

    def alive(self, sending_bytes: int = 0) -> None:
        """Move the deadline of `end`."""
        self.deadline = time.monotonic() + END_S + sending_bytes / SLOWEST_BYTES_S


def size_bytes(path: Path) -> int:
    """Return the size of a file, or of all files in a folder."""
    parts = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return sum(p.stat().st_size for p in parts)


def content_digest(path: Path) -> str:
    """Return a digest of an artifact: a name may be reused with other weights."""
    manifest = path / "manifest.json"  # a checkpoint's; it has the digests of the other files
    parts = [path] if path.is_file() else [manifest] if manifest.is_file() else sorted(path.glob("*.safetensors"))
    sums = sha256()
    for part in parts:
        with open_file(part) as file:
            sums.update(file_digest(file, "sha256").digest())
    return sums.hexdigest()[:16]


def _described(error: Exception) -> str:
    """Return a library's exception as one line without secrets."""
    return one_line(scrubbed(f"{type(error).__name__}: {error}"))


def _figures(line: Mapping[str, Any]) -> tuple[int, str, dict[str, float]] | None:
    """Return (step, kind of line, finite numbers) of a line of metrics.jsonl; None for other lines."""
    mark = next((m for m in ("loss", "eval_loss") if m in line), None)
    if mark is None:
        return None
    numbers = {k: float(v) for k, v in line.items() if k != "step" and isinstance(v, int | float)}
    return line["step"], mark, {k: v for k, v in numbers.items() if math.isfinite(v)}


def open_client(options: TrackerConfig | None, output: Path) -> ReportClient:
    """Import the library and build its client; None: TensorBoard's."""
    if options is None:
        return TensorBoard(output)
    return {"mlflow": MLflow, "wandb": Wandb}[options.name](options, output / FOLDER)


class MLflow(ReportClient):
    """Log to MLflow through its client, which records no machine, user or repository, unlike its fluent API.

    Offline: a SQLite database in the run's folder, for `mlflow ui`. The library's own retries take minutes and are off.
    """

    STATUS: ClassVar = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
    MOST_PARAMS, LONGEST = 100, 6000  # the server's limits: a request's parameters, characters of a value

    def __init__(self, options: TrackerConfig, folder: Path) -> None:
        os.environ.update({  # read when the library is imported
            "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
            "MLFLOW_HTTP_REQUEST_TIMEOUT": "8", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
            "MLFLOW_LOGGING_LEVEL": "ERROR", "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        })  # fmt: skip
        from mlflow import entities, tracking

        self.tracking, self.entities, self.options, self.folder = tracking, entities, options, folder
        self.id: str | None = None
        self.client: Any = None

    def answer(self) -> None:
        if not self.options.offline:
            self.client = self.tracking.MlflowClient(self.options.uri)  # None: from MLFLOW_TRACKING_URI
            self.client.search_experiments(max_results=1)

    def start(self, config: Mapping[str, Any], fresh: str, state: dict[str, Any]) -> str:
        """Create the run once, even if retried after a failure; a server accepts a parameter only once."""
        if self.options.offline and self.client is None:
            self.folder.mkdir(exist_ok=True)
            self.client = self.tracking.MlflowClient(f"sqlite:///{self.folder / 'mlflow.db'}")
        if state["id"] is not None:
            self.id = str(state["id"])
            self.client.update_run(self.id, status="RUNNING")
            return self.id
        if self.id is None:
            tags = {"optrush.run": fresh}
            self.id = str(self.client.create_run(self._experiment(), run_name=self.options.run, tags=tags).info.run_id)
        params = [self.entities.Param(key, str(value)[: self.LONGEST]) for key, value in flat(config)]
        for at in range(0, len(params), self.MOST_PARAMS):
            self.client.log_batch(self.id, params=params[at : at + self.MOST_PARAMS])
        return self.id

    def _experiment(self) -> str:
        experiment = self.client.get_experiment_by_name(self.options.project)
        if experiment is not None:
            return str(experiment.experiment_id)
        place = (self.folder / "artifacts").absolute().as_uri() if self.options.offline else None
        return str(self.client.create_experiment(self.options.project, artifact_location=place))

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        now = time.time_ns() // 10**6
        self.client.log_batch(self.id, metrics=[self.entities.Metric(k, v, now, step) for k, v in values.items()])

    def log_artifact(self, path: Path, kind: str) -> None:
        if path.is_dir():
            self.client.log_artifacts(self.id, str(path), f"checkpoints/{path.name}" if kind == "checkpoint" else kind)
        else:
            self.client.log_artifact(self.id, str(path))

    def finish(self, status: str) -> None:
        self.client.set_terminated(self.id, self.STATUS[status])


class Wandb(ReportClient):
    """Log to Weights & Biases; its records of machine, user, packages, code and command line are off.

    Offline: files in the run folder, for `wandb sync`. The library sends from its own process and stores waiting data
        on disk, so a dead server is detected only at the end.
    """

    ANSWER_S, SEND_S = 8, 600  # limits: the login; the upload of an artifact

    def __init__(self, options: TrackerConfig, folder: Path) -> None:
        self.cache = tempfile.TemporaryDirectory(prefix="optrush-")
        os.environ |= {"WANDB_ERROR_REPORTING": "false", "WANDB_DATA_DIR": str(folder), "WANDB_SILENT": "true",
                       "WANDB_CACHE_DIR": self.cache.name}  # fmt: skip
        if options.uri is not None:
            os.environ["WANDB_BASE_URL"] = options.uri
        import wandb

        self.library, self.options, self.folder = wandb, options, folder
        self.wandb_run: Any = None
        self.late: TimeoutError | None = None

    def answer(self) -> None:
        if not self.options.offline:
            _ = self.library.Api(timeout=self.ANSWER_S).viewer

    def start(self, config: Mapping[str, Any], fresh: str, state: dict[str, Any]) -> str:
        self.folder.mkdir(exist_ok=True)
        run_id = str(state["id"] or fresh)
        quiet = self.library.Settings(
            silent=True, console="off", save_code=False, disable_git=True, disable_code=True,
            x_disable_meta=True, x_disable_stats=True, x_disable_machine_info=True, x_save_requirements=False,
            init_timeout=self.ANSWER_S, finish_timeout=self.ANSWER_S, finish_timeout_raises=True,
        )  # fmt: skip
        self.wandb_run = self.library.init(
            project=self.options.project, name=self.options.run, id=run_id, resume="allow", dir=self.folder,
            mode="offline" if self.options.offline else "online", settings=quiet,
        )  # fmt: skip
        self.wandb_run.config.update(dict(config), allow_val_change=True)
        return run_id

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.wandb_run.log(dict(values), step=step)

    def log_artifact(self, path: Path, kind: str) -> None:
        artifact = self.library.Artifact(f"{kind}-{self.wandb_run.id}", type=kind)
        add = artifact.add_dir if path.is_dir() else artifact.add_file
        add(str(path), policy="immutable", skip_cache=True)  # a reference, not a copy
        logged = self.wandb_run.log_artifact(artifact, aliases=[path.name])
        if not self.options.offline:
            logged.wait(timeout=self.SEND_S)

    def finish(self, status: str) -> None:
        if self.late is not None:  # a second call of the library's finish would succeed and hide the timeout
            raise self.late
        try:
            self.wandb_run.finish(exit_code=0 if status == "finished" else 1)
        except TimeoutError as error:
            self.late = error
            raise


class TensorBoard(ReportClient):
    """Write TensorBoard's files: every number of metrics.jsonl under its own name, at its step, exactly once.

    After a resume `purge_step` hides lines that may repeat. The library's writer has a thread that dies with an
    unhandled exception when the disk is full; so records are written here, completely or not at all.
    """

    def __init__(self, output: Path) -> None:
        self.folder = output / BOARD

    def start(self, config: Mapping[str, Any], fresh: str, state: dict[str, Any]) -> str:
        """Hide events after the last step that is surely complete, and report their lines again."""
        from tensorboard.compat.proto import event_pb2, summary_pb2  # the import takes a second
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.events, self.summaries, self.records = event_pb2, summary_pb2, RecordWriter
        last = min(state["done"], *state["step"].values()) if state["step"] else -1
        self.folder.mkdir(exist_ok=True)
        unique = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
        self.path = self.folder / f"events.out.tfevents.{unique}"
        begin = self.events.SessionLog(status=self.events.SessionLog.START)
        try:
            self._write({"file_version": "brain.Event:2"}, {"step": last + 1, "session_log": begin})
        except OSError:
            self.path.unlink(missing_ok=True)
            raise
        state["step"] = dict.fromkeys(state["step"], last)
        return fresh

    def _write(self, *events: dict[str, Any]) -> None:
        records = BytesIO()
        for event in events:
            self.records(records).write(self.events.Event(wall_time=time.time(), **event).SerializeToString())
        with files.open_to_append(self.path) as file:
            files.append_whole(file, records.getvalue())

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        numbers = [self.summaries.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write({"step": step, "summary": self.summaries.Summary(value=numbers)})


def flat(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings: {"a": {"b": 1}} -> ("a.b", 1)."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{path}{key}.")
        else:
            yield path + key, value
