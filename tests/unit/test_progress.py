"""What a run shows while it trains and at its end: lines with the time left, cadences, the closing lines."""

import dataclasses
import io
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import optrush
from optrush import console
from optrush.benchmark import runner
from optrush.benchmark.results import BenchState
from optrush.config import Config, Training
from optrush.planner import search
from optrush.report.page import DASH
from optrush.report.page import speed as shown_speed
from optrush.report.run import RunLog, beside_steps, load_run, off_plan, page_content
from optrush.trainer import metrics
from optrush.trainer.run import Outcome, perplexity

LINE = {
    "step": 1, "loss": 2.0, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_s": 100.0, "mfu": None, "peak_bytes": 2**30,
    "data_wait_s": 0.0, "step_s": 1.0, "skipped": 0,
}  # fmt: skip


@pytest.mark.parametrize("terminal", [True, False])
def test_the_time_left_is_shown_from_the_second_line_on(monkeypatch, terminal):
    """A line a minute, as a large model logs: the bar shows the time left, and the lines before stay."""
    out, now = io.StringIO(), [0.0]
    screen = Console(file=out, force_terminal=terminal, width=200, soft_wrap=True, highlight=False)
    monkeypatch.setattr(console, "err", screen)
    monkeypatch.setattr(console.sys.stderr, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    with console.Bar(10) as bar:
        for step in (1, 2):
            now[0] += 60.0
            bar.say({**LINE, "step": step})
        if bar.progress is not None:
            assert bar.progress.tasks[0].description == "ETA 8 min 0 s"
    text = out.getvalue()
    assert "step 1/10  loss 2.0000" in text and "step 2/10  loss 2.0000" in text
    assert terminal or "ETA 8 min 0 s" in text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (119, "119 s"), (200, "3 min 20 s"), (18720, "5 h 12 min")]
)
def test_durations(seconds, text):
    assert console.duration(seconds) == text


def test_cadences_follow_the_length_of_a_run():
    free, given = Training(), Training(log_every=7, eval_every=0.5)
    assert [free.steps_a_line(n) for n in (1, 40, 200, 10**6)] == [1, 2, 10, 10]
    assert [free.eval_cadence(n) for n in (1, 99, 100)] == [None, None, 0.2]
    assert given.steps_a_line(10**6) == 7 and given.eval_cadence(10**6) == 0.5


def test_the_closing_lines(tmp_path):
    (tmp_path / "model").mkdir()
    lines = Outcome(0, tmp_path, (3.0, 2.0), 130.0, 12_345).closing_lines(pairs=False)
    assert lines[0] == "done in 2 min 10 s, 12.3K tokens"
    assert lines[1] == "held-out loss 3.0000 -> 2.0000, perplexity 7.389"
    assert lines[-1].split() == ["next", "optrush", "chat", str(tmp_path)]
    assert "perplexity" not in "".join(Outcome(0, tmp_path, (3.0, 2.0)).closing_lines(pairs=True))
    assert "optrush chat" not in "".join(Outcome(0, tmp_path, (3.0, 2.0)).closing_lines(pairs=True, scores=True))
    assert perplexity(1e4) == "beyond 1e304"


def test_limits_scale_with_what_was_measured():
    """On a busy machine a process has more time, unless the limit was given."""
    some: Any = None
    state = BenchState(some, [], Path(), 1, 120.0, "", {}, {})
    assert runner.time_limit(state) == 1200.0, "nothing measured yet"
    state.results = {"a": [{"seconds": 15.0}]}
    assert runner.time_limit(state) == 120.0, "a quiet machine"
    state.results = {"a": [{"seconds": 15.0}, {"seconds": 200.0}], "b": [{"seconds": 900.0, "error": "x"}]}
    assert runner.time_limit(state) == 1200.0
    state.exact_limit = True
    assert runner.time_limit(state) == 120.0


@pytest.mark.parametrize(
    ("speed", "wait_s", "slow", "expected"),
    [
        (900, 0.0, False, ""),  # by a tenth
        (1300, 0.0, False, "1,300 tokens/s in the median, planned 1,000 (+30%): the plan's rates are low here"),
        (500, 0.8, False, "planned 1,000 (-50%): most of it waiting for data, 0.8 s of 2 s a step"),
        (500, 0.1, False, "most of it the step itself, 1.9 s, planned 1 s"),
        (800, 0.1, True, "most of it single slow steps, 5 s a step in the mean"),
    ],
)
def test_a_run_off_its_plan(speed, wait_s, slow, expected, monkeypatch):
    """By the median of the lines after the first one, whatever that took; it names what takes most."""
    line = {"loss": 1.0, "tokens_per_s": speed, "step_s": 1000 / speed, "data_wait_s": wait_s}
    lines = [{**line, "step": n} for n in range(6)]
    lines[0] |= {"tokens_per_s": 1.0, "step_s": 1000.0}
    if slow:
        lines[3] |= {"tokens_per_s": 37.0, "step_s": 26.25}
    some: Any = SimpleNamespace(grpo=None)
    log = RunLog("run", some, "", lines, [], [], False)
    guess = SimpleNamespace(tokens_per_s=1000.0, step_s=1.0, memory_kind="cuda_allocated", basis="datasheet")
    monkeypatch.setattr(search, "predict", lambda config, ranks: guess)
    found = off_plan(log)
    assert expected in found and bool(found) == bool(expected), found
    guess.memory_kind = "rss"
    assert off_plan(log) == "", "rates that are counted from cores are no plan"
    assert off_plan(dataclasses.replace(log, steps=lines[:4])) == ""


TOY: dict[str, Any] = {"model": "tiny", "objective": "sft", "data": {"sample": "recipes"}, "output": "x"}


@pytest.mark.parametrize(
    ("train", "with_", "beside", "steps", "seconds", "expected"),
    [
        ({"save_every": 1.0}, {}, {"saving": (80.0, 20)}, 20, 100.0,
         "saving every step took 80% of 100 s: train.save_every is 1.0; raise it (100: every 100 steps; 0.1: ten times "
         "a run), or set train.save: async"),
        ({"save_every": 5, "save": "async"}, {}, {"saving": (0.2, 4)}, 20, 1.0, "saving 4 times in 20 steps took 20%"),
        ({"save_every": 5}, {}, {"saving": (9.0, 4)}, 20, 100.0, ""),
        ({"save_every": 1}, {}, {"saving": (0.8, 9)}, 9, 1.0, ""),  # a run of a moment
        ({"save_every": 1}, {}, {"saving": (30.0, 4)}, 4, 40.0, "saving every step took 75% of 40 s"),
        ({}, {}, {"saving": (50.0, 1)}, 20, 100.0, ""),  # the last save is no choice
        ({"stop_after": 3}, {}, {"saving": (50.0, 7)}, 20, 100.0, "train.best: false"),
        ({"eval_every": 2}, {}, {"evaluation": (0.3, 10)}, 20, 1.0, "train.eval_every is 2.0; raise it, or"),
        ({}, {}, {"evaluation": (30.0, 5)}, 500, 100.0, "train.eval_every is 0.2; raise it"),
        ({}, {}, {"evaluation": (30.0, 1)}, 20, 100.0, "took 30% of 100 s: hold out fewer rows (data.eval)"),
        ({}, {}, {"evaluation": (0.3, 1)}, 20, 1.0, ""),
        ({}, {}, {"data": (11.0, 20)}, 20, 100.0, "waiting for data took 11% of 100 s: --with loader, or"),
        ({}, {"loader": {"workers": 4}}, {"data": (11.0, 20)}, 20, 100.0, "raise with.loader.workers (4)"),
        ({}, {"loader": {}}, {"data": (11.0, 20)}, 20, 100.0, "raise with.loader.workers (2)"),
        ({}, {}, {"data": (0.5, 20)}, 20, 1.0, ""),  # the first batch of a quick run
    ],
)  # fmt: skip
def test_time_beside_the_steps(train, with_, beside, steps, seconds, expected):
    """What takes more than a tenth of a run is named with its share and the key that changes it; else nothing is."""
    config = Config(**TOY, train=train, **{"with": with_})
    spent = {**dict.fromkeys(("saving", "evaluation", "data"), (0.0, 0)), **beside}
    found = "".join(beside_steps(config, spent, steps, seconds).values())
    assert expected in found and bool(found) == bool(expected), found
    assert train.get("save") != "async" or "async" not in found


def toy_run(folder, length):
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"Oslo lies {i} miles from the sea."}) + "\n" for i in range(40)))
    return {
        "model": "tiny", "objective": "pretrain", "data": {"path": str(rows), "eval": 0.2},
        "batch": {"seq": 64, "tokens": 64}, "train": length, "with": {}, "output": str(folder / "run"),
    }  # fmt: skip


def test_a_run_notes_where_its_time_goes(tmp_path, monkeypatch):
    """As soon as it is clear, once; at the end the seconds of start, steps and end, in the report with the plan's."""
    monkeypatch.setattr(metrics, "STEADY", (10, 0.0))
    begun = time.monotonic()
    with console.err.capture() as said:
        optrush.train(toy_run(tmp_path, {"steps": 13, "save_every": 1.0, "eval_every": 1, "best": False}))
    elapsed = time.monotonic() - begun
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    notes = [(m["step"], m["beside_steps"].split()[:3]) for m in lines if "beside_steps" in m]
    assert notes == [(10, ["saving", "every", "step"]), (10, ["evaluation", "every", "step"])]
    assert "train.save_every is 1.0" in said.get()
    (times,) = [m for m in lines if "start_s" in m]
    assert times["step"] == 13 and "resumed_at" not in times
    assert 0.5 * elapsed < times["start_s"] + times["steps_s"] + times["end_s"] < elapsed
    steps = sum(m["step_s"] for m in lines if "step_s" in m)
    assert times["steps_s"] == pytest.approx(steps, rel=0.3)
    content = page_content(load_run(tmp_path / "run"))
    assert any("train.save_every" in note for note in content["notes"])
    assert not any("start_s" in note for note in content["notes"])
    rows = {name: figures for name, *figures in content["predicted"]}
    assert rows["steps, s"][1] == shown_speed(times["steps_s"]) and rows["start, s"][0] != DASH
    assert "saves, evaluations, model, s" in rows


def test_times_of_a_resumed_run(tmp_path):
    """Its steps are not those that the plan counts; a run that was complete before notes none."""
    for steps, resume in ((2, None), (4, "auto"), (4, "auto")):
        optrush.train(toy_run(tmp_path, {"steps": steps}), resume=resume)
    log = load_run(tmp_path / "run")
    assert log.times["step"] == 4 and log.times["resumed_at"] == 2
    assert [row[0] for row in page_content(log)["predicted"]] == ["peak, GiB", "tokens/s", "start, s"]
