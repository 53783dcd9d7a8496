"""What nobody has sabotaged: no rung is red; and a new technique needs its file and its line, nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from toy import Copy, Found, each, put_ladder, records, technique


def test_an_untouched_ladder_shows_no_red(copied: Copy) -> None:
    """A busy machine may slow one process; then a second repeat, which the first climb takes up, must clear it."""
    climbed = put_ladder(*each("fused-loss", "recompute"))
    arguments = ("bench", "run.yaml", "--ladder", climbed, "--out", "out", "--cumulative-only")
    done = copied.run(*arguments)
    assert done.returncode == 0, done.stderr
    if any(r["red"] for r in records(Path("out")).values()):
        done = copied.run(*arguments, "--resume", "--repeats", "2")
    told = records(Path("out"))
    assert not any(r["red"] for r in told.values()), done.stderr
    assert all(r["proof"]["ok"] and r["proof"]["worst"] < 1e-5 for n, r in told.items() if n != "base")


PREDICTED = """
    def predict(self, env: Environment) -> Iterator[Rule]:
        yield add(Line("toy", "what a toy takes", 123_456_789, "byte", "always"))

    def wrap_step("""


def test_a_technique_is_one_file_and_one_line(copied: Copy) -> None:
    """It is listed, planned, searched, trained and laddered without another change."""
    text = technique("sound").replace("\n    def wrap_step(", PREDICTED, 1)
    text = text.replace(
        "from optrush.technique", "from optrush.planner.ledger import Line, Rule, add\nfrom optrush.technique", 1
    )
    copied.add("sound", text)
    assert "sound               a test" in copied.run("techniques").stdout

    def planned(*flags: str) -> dict[str, Any]:
        done = copied.run("plan", "run.yaml", "--json", *flags)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    without, with_it = planned(), planned("--with", "sound")
    assert with_it["peak_bytes"] - without["peak_bytes"] == 123_456_789
    assert any(line["name"] == "toy" and line["reason"] == "what a toy takes" for line in with_it["lines"])
    assert "with sound" in {row["what"] for row in without["lost"]}
    done = copied.run("train", "run.yaml", "--with", "sound", "--set", "train.steps=2", "--set", "output=trained")
    assert done.returncode == 0 and "wrap_step  sound: 1 change" in done.stderr, done.stderr
    climbed = put_ladder(*each("sound"), load={"model.implementation": "native"})  # nobody is timed here
    done = copied.run("bench", "run.yaml", "--ladder", climbed, "--out", "out", "--cumulative-only")
    assert done.returncode == 0, done.stderr
    rung = records(Path("out"))["sound"]
    assert rung["proof"]["ok"] and rung["tokens_per_s"] > 0
    assert rung["predicted_peak_bytes"] - records(Path("out"))["base"]["predicted_peak_bytes"] == 123_456_789


def test_help_names_the_ladders(call: Callable[..., Found]) -> None:
    found = call("bench", "--help")
    assert found.code == 0
    for word in ("--ladder", "single-gpu", "cpu-demo", "--resume", "--cumulative-only", "--repeats"):
        assert word in found.out
