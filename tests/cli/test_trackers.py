"""`tracker:` as people write it: the short form and the long one, and what is refused before anything is asked."""

from collections.abc import Callable
from pathlib import Path

import pytest

from optrush import console
from optrush.config import dump_config, parse_config, scrubbed
from optrush.console import shown
from optrush.decide import decide
from optrush.errors import ConfigError
from optrush.trainer import trackers

from clirun import Found

Call, Write = Callable[..., Found], Callable[..., str]


def test_one_key_or_several(write, here):
    """`tracker: wandb` is the mapping with its defaults; flags change either; run.yaml is read back to the same."""
    text = Path(write(tracker="wandb")).read_text()
    short = parse_config(text, "run.yaml")
    assert short.tracker is not None and short.tracker.model_dump() == {
        "name": "wandb", "project": "optrush", "run": None, "uri": None, "offline": False, "artifacts": "all",
    }  # fmt: skip
    long = parse_config(text, "run.yaml", sets=["tracker.offline=true", "tracker.artifacts=model"])
    assert long.tracker == short.tracker.model_copy(update={"offline": True, "artifacts": "model"})
    assert parse_config(dump_config(long), "again") == long
    assert parse_config(text, "run.yaml", sets=["tracker=null"]).tracker is None


@pytest.mark.parametrize(("tracker", "asked", "found", "do"), [
    ("trackio", "`tracker`", "'trackio'", "'mlflow' or 'wandb'"),
    ("mlfow", "`tracker`", "'mlfow'", "'mlflow' or 'wandb'"),
    ({"name": "mlflow", "url": "x"}, "`tracker.url`", "no such key", "did you mean `uri`?"),
    ({"project": "p"}, "`tracker.name`", "it is missing", "add `tracker.name:`"),
    ("mlflow", "`tracker: mlflow`", "MLFLOW_TRACKING_URI", "tracker.offline: true"),
    ({"name": "mlflow", "uri": "http://h", "offline": True}, "`tracker.offline: true`", "`tracker.uri`", "remove"),
    ({"name": "mlflow", "uri": "sqlite:///a.db"}, "`tracker: mlflow`", "sqlite:///a.db", "tracker.offline: true"),
    ({"name": "mlflow", "uri": "http://u:c4n4ry@h"}, "`tracker.uri`", "a user or password", "remove it"),
    ({"name": "mlflow", "uri": "http://h/?t=c4n4ry"}, "`tracker.uri`", "more than host and path", "environment"),
    ({"name": "wandb", "run": "https://c4n4ry@h/r"}, "`tracker.run`", "a user or password", "remove it"),
    ("http://u:c4n4ry@h", "`tracker`", "http://***@h", "'mlflow' or 'wandb'"),
])  # fmt: skip
def test_what_is_refused(tracker, asked, found, do, write, call, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    got = call("train", write(tracker=tracker))
    lines = got.err.splitlines()
    assert got.code == 2 and len(lines) == 3 and not Path("out").exists(), got.err
    for line, (head, text) in zip(lines, (("asked:", asked), ("found:", found), ("do:", do))):
        assert line.startswith(head) and text in line
    assert "c4n4ry" not in got.err


def test_a_flag_with_a_password(write, call):
    got = call("train", write(), "--set", "tracker=http://u:c4n4ry@h")
    assert got.code == 2 and "c4n4ry" not in got.err and "***@h" in got.err


def test_no_verb_writes_a_password(write, call, here):
    """Every verb that reads a configuration refuses it, and leaves no file behind."""
    config = write(tracker={"name": "mlflow", "uri": "http://u:c4n4ry@h"})
    before = sorted(here.iterdir())
    for verb in (("bench", config, "--out", "records"), ("plan", config, "--out", "best.yaml"),
                 ("data", "show", config), ("calibrate", config)):  # fmt: skip
        got = call(*verb)
        assert got.code == 2 and "asked: `tracker.uri`" in got.err and "c4n4ry" not in got.err + got.out, (verb, got)
    run = parse_config(Path(config).read_text(), "run.yaml")
    with pytest.raises(ConfigError, match="an address with a user or password"):
        decide(run)
    assert sorted(here.iterdir()) == before


def test_an_error_moves_no_terminal(call, here, capsys):
    Path("bad.yaml").write_text('model: "\\e[2J\\e]0;x\\a"\nobjective: sft\noutput: out\ndata: {random: 1}\nbatch: 1\n')
    for arguments in (("train", "bad.yaml"), ("chat", "no\x1b[31mwhere")):
        got = call(*arguments)
        assert got.code == 2 and got.err.startswith("asked: ") and not set(got.err) & set("\x1b\a"), got.err
    assert "\ufffd[31mwhere" in got.err
    console.say("\x1b[2Jhe said")
    assert capsys.readouterr().err == "\ufffd[2Jhe said\n"
    assert shown("\x1b\n\t") == "\ufffd\n\t"


@pytest.mark.parametrize("name", list(trackers.NAMES))
def test_a_package_that_is_not_here(name, write, call, monkeypatch):
    monkeypatch.setattr(trackers, "library", lambda package: None)
    got = call("train", write(tracker={"name": name, "offline": True}))
    assert got.code == 2 and f"asked: `tracker: {name}`" in got.err and "is not installed" in got.err
    assert f"do:    pip install 'optrush[{name}]'" in got.err and not Path("out").exists()


def test_anothers_message_without_secrets():
    environment = {"SOME_API_KEY": "c4n4ry", "PATH": "plainly", "A_TOKEN": "abc"}
    text = "401 for http://me:pw@host/x with c4n4ry, plainly abc"
    assert scrubbed(text, environment) == "401 for http://***@host/x with ***, plainly abc"
