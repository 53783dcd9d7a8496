"""A package without sabotage: no rung is red; and a new technique needs its file and its line, nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from toy import Copy, each, put_ladder, records, technique

PREDICTED = """
    def predict(self, env: Environment) -> Iterator[Rule]:
        yield add(Line("toy", "what a toy takes", 123_456_789, "byte", "always"))

    def wrap_step("""


def test_a_technique_is_one_file_and_one_line(copied: Copy) -> None:
    """It is listed, planned, searched, trained and laddered without another change; no rung of that ladder is red.

    A busy machine may slow one process; then a second repeat, with --resume, must clear it.
    """
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
    written = put_ladder(*each("sound", "fused-loss", "recompute"))
    arguments = ("bench", "run.yaml", "--ladder", written, "--out", "out", "--cumulative-only")
    done = copied.run(*arguments)
    assert done.returncode == 0, done.stderr
    rungs = records(Path("out"))
    predicted = {name: r["predicted_peak_bytes"] for name, r in rungs.items()}
    assert predicted["sound"] - predicted["base"] == 123_456_789
    assert rungs["sound"]["tokens_per_s"] > 0
    assert all(r["proof"]["ok"] and r["proof"]["worst"] < 1e-5 for n, r in rungs.items() if n != "base")
    rungs.pop("sound")  # red: the memory that it predicts is not there
    if any(r["red"] for r in rungs.values()):
        done = copied.run(*arguments, "--resume", "--repeats", "2")
    assert not any(r["red"] for n, r in records(Path("out")).items() if n != "sound"), done.stderr
