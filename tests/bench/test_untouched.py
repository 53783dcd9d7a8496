"""What nobody has sabotaged: no rung is red; and a new technique needs its file and its line, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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


def test_a_technique_is_one_file_and_one_line(copied: Copy) -> None:
    """It is listed and trained without another change; the sabotage above climbs with it."""
    copied.add("sound", technique("sound"))
    done = copied.run("techniques")
    assert "sound        a test" in done.stdout
    done = copied.run("train", "run.yaml", "--with", "sound", "--set", "train.steps=2", "--set", "output=trained")
    assert done.returncode == 0 and "drive      sound: 1 change" in done.stderr, done.stderr
    # And planned: the place for `optrush plan`, once it is a verb.


def test_help_names_the_ladders(call: Callable[..., Found]) -> None:
    found = call("bench", "--help")
    assert found.code == 0
    for word in ("--ladder", "single-gpu", "cpu-demo", "--resume", "--cumulative-only", "--repeats"):
        assert word in found.out
