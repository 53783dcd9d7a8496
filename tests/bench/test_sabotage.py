"""Techniques made slower, wrong or idle in a copy of the package: the ladder must show each, and nothing else.

A real bench by real processes: the seconds go into starting them. Processes that die are in test_climb.py.
"""

import json
import re
from pathlib import Path

import pytest

from toy import BODIES, each, put_ladder, records, technique

PREDICTED = """
    def predict(self, env: Environment) -> Iterator[Rule]:
        yield add(Line("toy", "what a toy takes", 123_456_789, "byte", "always"))

    def wrap_step("""


@pytest.mark.slow
def test_a_technique_is_one_file_and_one_line(copied):
    """It is listed, planned, searched and trained without another change."""
    text = technique("sound").replace("\n    def wrap_step(", PREDICTED, 1)
    imported = "from optrush.planner.ledger import Line, Rule, add\nfrom optrush.technique"
    copied.add("sound", text.replace("from optrush.technique", imported, 1))
    assert re.search("^sound +a test$", copied.run("techniques").stdout, re.MULTILINE)

    def planned(*flags):
        done = copied.run("plan", "run.yaml", "--json", *flags)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    without, with_it = planned(), planned("--with", "sound")
    assert with_it["peak_bytes"] - without["peak_bytes"] == 123_456_789
    assert any(line["name"] == "toy" and line["reason"] == "what a toy takes" for line in with_it["lines"])
    assert "with sound" in {row["what"] for row in without["lost"]}
    done = copied.run("train", "run.yaml", "--with", "sound", "--set", "train.steps=2", "--set", "output=trained")
    assert done.returncode == 0 and "wrap_step  sound: 1 change" in done.stderr, done.stderr


@pytest.mark.slow
def test_sabotage_is_shown_red(copied):
    for name in BODIES:
        copied.add(name, technique(name))
    copied.edit(  # slower: its kernel sleeps
        "techniques/fused_loss.py", "head.nll = Chunked(chunk=self.tokens(trainer.env))",
        "import time\n            quick = Chunked(chunk=self.tokens(trainer.env))\n"
        "            head.nll = lambda *a, **k: (time.sleep(1.5), quick(*a, **k))[1]",
    )  # fmt: skip
    copied.edit(
        "techniques/recompute.py", "trainer.model.block_call = recomputed", "pass"
    )  # reports a change, has none
    written = put_ladder(*each("sound", "scaled", "divisor", "late", "fused-loss", "recompute"))
    done = copied.run("bench", "run.yaml", "--ladder", written, "--out", "out", "--cumulative-only")
    assert done.returncode == 0, done.stderr
    found = records(Path("out"))
    red = {name: " ".join(r["red"]) for name, r in found.items()}
    assert red["base"] == "" and red["sound"] == "", red
    assert found["sound"]["proof"]["ok"] and found["sound"]["proof"]["worst"] < 1e-5
    assert red["scaled"].startswith("wrong: losses differ by 0.05"), red
    assert red["divisor"].startswith("wrong: gradient norms differ by 0.5"), red
    assert red["late"].startswith("wrong: after the timed steps its gradient norms differ"), red
    assert red["fused-loss"].startswith("slower than it may be: 0."), red
    assert red["recompute"].startswith("no effect: the peak changed by"), red
    assert found["recompute"]["predicted_peak_bytes"] < found["base"]["predicted_peak_bytes"] - 64 * 2**20
    assert "scaled: wrong: losses" in done.stderr and Path("out/report.html").exists()
    assert not Path("never-written").exists()
