"""Techniques made slower, wrong, idle or deadly in a copy of the package: the ladder must show each, and nothing else.

A real climb by real processes: the seconds go into starting them.
"""

from __future__ import annotations

from pathlib import Path

from toy import BODIES, Copy, each, put_ladder, records, technique


def test_sabotage_is_shown_red(copied: Copy) -> None:
    for name in BODIES:
        copied.add(name, technique(name))
    slept = "head.nll = Chunked(chunk=self.chunk)"  # slower: its kernel sleeps
    copied.edit(
        "techniques/fused_loss.py", slept,
        "import time\n            quick = Chunked(chunk=self.chunk)\n"
        "            head.nll = lambda *a, **k: (time.sleep(0.5), quick(*a, **k))[1]",
    )  # fmt: skip
    copied.edit(
        "techniques/recompute.py", "trainer.model.block_call = recomputed", "pass"
    )  # it says it changed the blocks
    climbed = put_ladder(*each("sound", "scaled", "divisor", "late", "killed", "starved", "fused-loss", "recompute"))
    done = copied.run("bench", "run.yaml", "--ladder", climbed, "--out", "out", "--cumulative-only")
    assert done.returncode == 1, done.stderr
    told = records(Path("out"))
    red = {name: " ".join(r["red"]) for name, r in told.items()}
    assert red["base"] == "" and red["sound"] == "", red
    assert red["scaled"].startswith("wrong: losses lie 0.05"), red
    assert red["divisor"].startswith("wrong: gradient norms lie 0.5"), red
    assert red["late"].startswith("wrong: after the timed steps its gradient norms are others"), red
    assert red["fused-loss"].startswith("slower than it may be: 0."), red
    assert red["recompute"].startswith("no effect: the peak changed by"), red
    assert "killed by signal 9 (SIGKILL), most likely out of memory" in red["killed"]
    assert red["starved"] == "failed: out of memory: CUDA out of memory. Tried to allocate 2.00 GiB"
    assert told["recompute"]["predicted_peak_bytes"] < told["base"]["predicted_peak_bytes"] - 64 * 2**20
    assert "scaled: wrong: losses" in done.stderr and Path("out/report.html").exists()
    assert not Path("never-written").exists()
