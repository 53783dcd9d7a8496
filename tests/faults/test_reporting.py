"""Trackers: what they are told, a server that is not there, one that dies, secrets that must not be written."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from meshes import further
from optrush.config import TrackerConfig, parse_config
from optrush.errors import ConfigError
from optrush.launch import TRACKER_THREAD
from optrush.trainer import trackers
from optrush.trainer.checkpoint import find_checkpoints

from harness import ended, told, wait_until
from runs import at_step, begun, configuration, each_step, held, lines, said, together, trained, trained_on, wait_for

pytestmark = pytest.mark.filterwarnings("ignore")  # the runs are forked, and import the trackers' own libraries
CONFIG = parse_config("{model: tiny, objective: sft, data: {random: 1}, output: out}", "run.yaml")
SERVER = Path(__file__).with_name("mlflow_server.py")
TRAIN = {"steps": 12, "log_every": 1, "save_every": 3, "eval_every": 4}


def tracked(home, name, tracker, **changes):
    """A run's folder and its configuration; it holds a fifth of the data out."""
    output = home / name
    run = {"data__eval": 0.2, "train": TRAIN, "tracker": tracker, **changes}
    return output, configuration(home, output, **run)


class Server:
    """The stand-in for MLflow's server, which may die and come back."""

    def __init__(self, log: Path) -> None:
        self.port, self.log = 0, log
        self.begin()
        self.uri = f"http://127.0.0.1:{self.port}"

    def begin(self) -> None:
        """At the port that it had, or at one that is free; it prints it once it listens."""
        command = [sys.executable, "-S", str(SERVER), str(self.port), str(self.log)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def die(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def asked(self, end: str) -> list[dict[str, Any]]:
        """Requests whose path ends so, in order."""
        found = [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []
        return [r for r in found if r["path"].endswith(end)]

    def figures(self) -> list[tuple[str, float, int]]:
        """As MLflow has them: a figure that is told again, because no answer came, is there once."""
        told = (
            (m["key"], m["value"], int(m["step"]))
            for request in self.asked("runs/log-batch") for m in request["body"].get("metrics", [])
        )  # fmt: skip
        return list(dict.fromkeys(told))


@pytest.fixture
def server(tmp_path):
    made = Server(tmp_path / "requests.jsonl")
    yield made
    made.die()


def figures(output):
    """Every number of metrics.jsonl as a tracker must have it."""
    return [
        (key, float(value), line["step"])
        for line in lines(output) if "loss" in line or "eval_loss" in line
        for key, value in line.items() if key != "step" and isinstance(value, int | float)
    ]  # fmt: skip


def often():
    """A `before` with which the reporter looks and tries again more often."""
    trackers.EVERY_S, trackers.LONGEST_S, trackers.PATIENCE_S = 0.05, 0.2, 0.5


@pytest.mark.parametrize("tracker", further(["mlflow", "wandb"], 1))
def test_a_server_that_is_not_there(home, tracker, monkeypatch):
    """Exit 2 before step 0, in three lines, and nothing is written."""
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    output, config = tracked(home, f"nobody-{tracker}", {"name": tracker, "uri": "http://127.0.0.1:9"})
    before = lambda: setattr(trackers, "ANSWER_S", 2.0)
    assert trained(config, before=before) == 2, said(config)
    assert all(f"{part}: " in said(config) for part in ("asked", "found")) and "tracker.offline: true" in said(config)
    assert not output.exists()


@pytest.mark.slow
def test_on_two_ranks(home, server):
    """The first reports for all; where nobody answers, both are refused."""
    tracker = {"name": "mlflow", "uri": server.uri, "artifacts": "none"}
    output, config = tracked(home, "two", tracker, **{"with": {"packing": {}, "ddp": {}}})
    assert trained_on(2, config) == [0, 0], said(config)
    assert server.figures() == figures(output) and len(server.asked("runs/create")) == 1
    server.die()
    assert trained_on(2, config, "--set", f"output={output}-2") == [2, 2], said(config)
    assert not Path(f"{output}-2").exists()


def test_a_server_that_dies_costs_no_training(home, server):
    """Said once; the run ends soon after its last step, with exit 0, and says what the tracker has not.

    When the server is there again, the same command tells it all the rest, to the same run.
    """
    output, config = tracked(home, "dies", {"name": "mlflow", "uri": server.uri, "project": "p", "run": "first"})
    gone = home / "dies.gone"

    def noticed():
        (reporter,) = [t for t in threading.enumerate() if isinstance(t, trackers.Reporter) and t.options is not None]
        return bool(reporter.error)

    unanswered = at_step(8, lambda: wait_until(noticed, "the reporter had no answer"))
    pid = begun(config, before=together(often, held(6, gone), unanswered))
    wait_until(server.figures, "the server has a figure")
    server.die()
    gone.touch()
    assert ended(pid) == 0, said(config)
    assert (output / "model" / "model.safetensors").exists() and lines(output)[-1]["step"] == 12
    (line,) = [m for m in lines(output) if "tracker" in m]
    assert "refused" in line["tracker"] or "Connection" in line["tracker"]
    assert "and everything after them not sent" in said(config)
    had = server.figures()
    assert 0 < len(had) < len(figures(output))
    server.begin()
    assert trained(config, "--resume", "auto") == 0, said(config)
    assert server.figures() == figures(output) and len(figures(output)) > 12 * 5
    (made,) = server.asked("runs/create")
    assert made["body"]["run_name"] == "first" and server.asked("experiments/create")[0]["body"]["name"] == "p"
    params = {p["key"]: p["value"] for r in server.asked("runs/log-batch") for p in r["body"].get("params", [])}
    assert params["optim.lr"] == "0.01" and params["with.packing"] == "{}" and params["train.steps"] == "12"
    sent = {r["path"].partition("artifacts/1/0f/artifacts/")[2]: r["size"] for r in server.asked("")}
    assert sent["model/model.safetensors"] == (output / "model" / "model.safetensors").stat().st_size
    manifests = {f"checkpoints/{path.name}/manifest.json" for path in find_checkpoints(output)}
    assert {"run.yaml", "model/README.md", *manifests} <= set(sent)
    assert server.asked("runs/update")[-1]["body"]["status"] == "FINISHED"
    assert "lines and" in said(config) and "MLflow" in said(config)
    told("tracker", 1, f"died after {len(had)} figures of {len(figures(output))}; a resumed run told the rest")


@pytest.mark.slow
def test_a_server_that_comes_back(home, server):
    output, config = tracked(home, "comes-back", {"name": "mlflow", "uri": server.uri, "artifacts": "none"})
    gone, back = home / "gone", home / "back"
    pid = begun(config, before=together(often, held(3, gone), held(6, back)))
    wait_for(output, 2)
    server.die()
    gone.touch()
    wait_for(output, 5)
    server.begin()
    back.touch()
    assert ended(pid) == 0, said(config)
    assert server.figures() == figures(output) and not server.asked("manifest.json")


@pytest.mark.slow
def test_resumed_it_is_one_run(home, server):
    """Lines that the tracker has are not told again."""
    output, config = tracked(home, "again", {"name": "mlflow", "uri": server.uri})
    stopped = home / "again.stopped"
    pid = begun(config, before=together(often, held(7, stopped)))
    wait_until(server.figures, "the server has a figure")
    os.kill(pid, signal.SIGTERM)
    stopped.touch()
    assert ended(pid) == 143, said(config)
    assert server.asked("runs/update")[-1]["body"]["status"] == "KILLED"
    assert trained(config, "--resume", "auto") == 0, said(config)
    assert len(server.asked("runs/create")) == 1
    said_of = [request["body"]["status"] for request in server.asked("runs/update")]
    assert said_of[said_of.index("KILLED") + 1] == "RUNNING" and said_of[-1] == "FINISHED"
    assert [(key, at) for key, _, at in server.figures()] == [(key, at) for key, _, at in figures(output)]


class Choosy(trackers.ReportClient):
    """A tracker that takes no checkpoints, and notes the rest."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def start(self, config: Any, fresh: str, state: dict[str, Any]) -> str:
        return str(state["id"] or fresh)

    def log_metrics(self, step: int, values: Any) -> None:
        self.got.append(step)

    def log_artifact(self, path: Path, kind: str) -> None:
        if kind == "checkpoint":
            raise ValueError("too large")
        self.got.append(path.name)

    def finish(self, status: str) -> None:
        self.got.append(status)


def stand_in():
    """In a child: the tracker that is configured is one, and its library is not imported."""
    opened, client = trackers.open_client, Choosy()
    trackers.open_client = lambda options, output: opened(options, output) if options is None else client
    return client


def reporter_of(output, tracker, **options):
    """A reporter to a stand-in, connected."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trackers, "open_client", lambda *_: tracker)
        reporter = trackers.Reporter(TrackerConfig(name="wandb", **options), output, CONFIG)
        reporter.connect()
    return reporter


def sent_by(output, tracker, done, course, status):
    """One run's reporting, to its end: the run's id there, and the outcome."""
    reporter = reporter_of(output, tracker)
    reporter.status = status
    reporter.follow("fresh", done, {"data": course})
    outcome = reporter.end()
    return reporter.state["id"], outcome


def write_run(output, *steps):
    """A run's folder with a checkpoint and a model, as far as a follower looks at them."""
    for folder in ("checkpoints/step-000002", "model"):
        (output / folder).mkdir(parents=True, exist_ok=True)
    (output / "checkpoints" / "step-000002" / "manifest.json").write_text("{}")
    (output / "model" / "model.safetensors").write_bytes(bytes(steps))
    (output / "run.yaml").write_text("a")
    (output / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "loss": 1.5}}\n' for n in steps))


def test_what_a_tracker_refuses_holds_up_nothing(tmp_path, monkeypatch):
    """The model and the end arrive, and what did not is named; a model of the same name is sent when it is another."""
    monkeypatch.setattr(trackers, "PATIENCE_S", 0.0)
    write_run(tmp_path, 1, 2)
    tracker = Choosy()
    name, outcome = sent_by(tmp_path, tracker, 0, "a", "finished")
    assert tracker.got == [1, 2, "run.yaml", "model", "finished"] and name == "fresh"
    assert outcome.endswith("2 lines and 1 artifacts sent; not sent: step-000002 (ValueError: too large)")
    for steps, new in (((1, 2), []), ((1, 2, 3), [3, "model"])):
        write_run(tmp_path, *steps)
        tracker = Choosy()
        assert sent_by(tmp_path, tracker, 2, "a", "finished")[0] == "fresh"
        assert tracker.got == [*new, "finished"]
    write_run(tmp_path, 1, 2)  # cut back to step 2; repeated as it was, or not
    assert sent_by(tmp_path, Choosy(), 2, "a", "stopped")[0] == "fresh"
    tracker = Choosy()
    other, _ = sent_by(tmp_path, tracker, 2, "b", "stopped")
    assert other != "fresh" and tracker.got == [1, 2, "run.yaml", "stopped"]


class Away(Choosy):
    """A tracker that takes no figures while it is away."""

    away = True

    def log_metrics(self, step: int, values: Any) -> None:
        if self.away:
            raise ConnectionError("nobody")
        super().log_metrics(step, values)


def test_a_full_queue_loses_lines_and_counts_them(tmp_path, monkeypatch):
    """What did not fit before the tracker's run began is read from the file; what did not fit later is counted."""
    for name, value in (("QUEUED", 2), ("EVERY_S", 0.01), ("LONGEST_S", 0.01)):
        monkeypatch.setattr(trackers, name, value)
    write_run(tmp_path, 1, 2, 3)
    tracker = Away()
    reporter = reporter_of(tmp_path, tracker, artifacts="none")
    for step in (1, 2, 3):
        assert reporter.put({"step": step, "loss": 1.5, "note": "text"}) == ""
    assert len(reporter.queue) == 2 and reporter.lost == 1
    reporter.follow("fresh", 0, {})
    wait_until(lambda: reporter.error, "the tracker was away")
    assert reporter.put({"step": 4, "loss": 1.5}) == "ConnectionError: nobody"
    assert reporter.put({"step": 5, "loss": 1.5}) == "" and len(reporter.queue) == 5
    tracker.away = False
    reporter.status = "stopped"
    assert reporter.end() == (
        "Weights & Biases: 3 lines and 0 artifacts sent; 2 lines lost while 2 waited: metrics.jsonl has them"
    )
    assert tracker.got == [1, 2, 3, "run.yaml", "stopped"]


class Blocked(Choosy):
    """A client that does not return from a call before the test has ended."""

    def __init__(self, call: str, release: threading.Event) -> None:
        super().__init__()
        setattr(self, call, lambda *_: release.wait())


@pytest.mark.parametrize("call", ["answer", "start", "log_metrics", "log_artifact", "finish"])
def test_a_client_that_blocks_for_ever(tmp_path, call, monkeypatch):
    """Before step 0 the run is refused; later the end waits END_S, and the process need not wait for the thread."""
    if call == "answer":
        monkeypatch.setattr(trackers, "ANSWER_S", 0.2)
    monkeypatch.setattr(trackers, "END_S", 0.5)
    write_run(tmp_path, 1)
    release = threading.Event()
    if call == "answer":
        with pytest.raises(ConfigError, match="did not answer within 0 s"):
            sent_by(tmp_path, Blocked(call, release), 0, "a", "finished")
    else:
        _, outcome = sent_by(tmp_path, Blocked(call, release), 0, "a", "finished")
        assert "did not finish" in outcome
    blocked = [t for t in threading.enumerate() if t.name == TRACKER_THREAD and t.daemon]
    assert blocked
    release.set()  # a thread that is left would end this process with the next command that it runs
    for thread in blocked:
        thread.name = "released"


def test_the_process_leaves_a_blocked_client(home):
    """Also one that blocks in C, within threads that Python would join: exit 0, the model written."""
    output, config = tracked(home, "blocked", {"name": "mlflow", "offline": True})

    def before():
        def block(*_):
            with ThreadPoolExecutor(1) as pool:
                pool.submit(ctypes.CDLL(None).pause).result()

        client = stand_in()
        client.log_metrics = block  # type: ignore[method-assign]
        trackers.END_S = 1.0

    assert trained(config, before=before) == 0, said(config)
    assert "MLflow: did not finish" in said(config) and (output / "model").is_dir()


def test_a_second_interrupt_leaves_at_once(home):
    """Without waiting for what is still to be sent."""
    _, config = tracked(home, "interrupted", {"name": "mlflow", "offline": True})

    def interrupt(n):
        if n == 4:
            trackers.Reporter.end = None  # it would be called to wait
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    assert trained(config, before=together(stand_in, each_step(interrupt))) == 130, said(config)


CANARIES = {
    "WANDB_API_KEY": "c4n4ryWandb" + "0" * 29, "HF_TOKEN": "hf_c4n4ryHub", "MLFLOW_TRACKING_PASSWORD": "c4n4ryMlflow",
    "AWS_SECRET_ACCESS_KEY": "c4n4ryAws",
}  # fmt: skip


@pytest.mark.parametrize("tracker", ["wandb", pytest.param("mlflow", marks=pytest.mark.slow)])
def test_offline_and_nothing_secret(home, tracker, monkeypatch):
    """Its own files, under the run's folder, hold the figures; no file there holds a secret of the environment."""
    for name, value in CANARIES.items():
        monkeypatch.setenv(name, value)
    output, config = tracked(home, f"offline {tracker}", {"name": tracker, "offline": True})
    assert trained(config) == 0, said(config)
    last = [m for m in lines(output) if "loss" in m][-1]["loss"]
    folder = output / "tracker"
    if tracker == "wandb":
        (file,) = folder.rglob("*.wandb")
        assert b"eval_target_tokens" in file.read_bytes() and repr(last).encode() in file.read_bytes()
    else:
        database = sqlite3.connect(folder / "mlflow.db")
        rows = database.execute("select key, value, step from metrics order by rowid").fetchall()
        assert sorted(rows) == sorted(figures(output))
        assert [*folder.rglob("artifacts/model/model.safetensors")]
    assert json.loads((output / "tracker.json").read_text())["step"] == {"loss": 12, "eval_loss": 12}
    sent = len(find_checkpoints(output)) + 1  # the model
    logged = sum("loss" in m or "eval_loss" in m for m in lines(output))
    assert f": {logged} lines and {sent} artifacts sent\n" in said(config)
    for path in [*output.rglob("*"), config.with_suffix(".log")]:
        assert not path.is_file() or b"c4n4ry" not in path.read_bytes(), path
