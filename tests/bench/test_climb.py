"""A climb with scripts for processes: order, going on, and every way in which one can end."""

import base64
import fcntl
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from meshes import further
from optrush.benchmark import runner
from optrush.benchmark.record import Record, read_records
from optrush.errors import DataError

from toy import ladder, put, records
from trials import alive

RUNGS = [{"name": "base"}, {"name": "adamw", "with": {"fused-adamw": {}}}, {"name": "both", "with": {"fused-loss": {}}}]


def climb(call, *flags, rungs=RUNGS, out="out", **changes):
    put(Path("ladder.yaml"), ladder(rungs, **changes))
    return call("bench", "run.yaml", "--ladder", "ladder.yaml", "--out", out, *flags)


# --- order


def test_repeats_are_interleaved(call, fakes):
    found = climb(call, "--repeats", "2")
    assert found.code == 0, found.err
    each = ["none", "fused-adamw", "fused-adamw fused-loss", "fused-loss", "fused-adamw"]
    assert fakes.started == [*each, *each]
    assert len(list(Path("out/rungs").iterdir())) == 10
    assert [r.repeats for r in read_records(Path("out"))] == [[1000.5, 1000.5]] * 5


def gradient(*sums, of="x"):
    return {"of": of, "sums": base64.b64encode(bytes(np.float32(sums))).decode()}


FIRST, NARROW, TURNED, NONE = gradient(3, 4), gradient(3.1, 4), gradient(4, -3), gradient(0, 0, of="nothing")
NAMES = ("none", "bf16", "bf16__fused_adamw", "bf16__fused_adamw__fused_loss")
MATHS = [{"name": "base"}, {"name": "narrow", "with": {"bf16": {}}}, *RUNGS[1:]]


@pytest.mark.parametrize(("found", "red"), further([
    ([FIRST, NARROW, [NARROW, TURNED], NARROW], {"adamw": "narrow"}),
    ([FIRST, NARROW, NARROW, NARROW], {}),
    ([FIRST, NARROW, NARROW, TURNED], {"both": "narrow"}),
    ([FIRST, NONE, NARROW, TURNED], {"both": "adamw"}),  # the first of its maths has no gradient
    ([FIRST, TURNED, NARROW, NARROW], {}),  # bf16 turned it by as much
    ([FIRST, gradient(4, 3), gradient(3, 4), NARROW], {}),  # by 0.04, so 0.08 is chance
    ([FIRST, gradient(4, 3), gradient(3, 5), gradient(2, 5)], {"both": "narrow"}),
], 2))  # fmt: skip
def test_kernels_of_other_maths_are_held_against_the_first_of_their_own(call, fakes, found, red):
    """bf16 may turn the baseline's gradient; what comes after it may not turn that of bf16 by more."""
    fakes.does(**{name: {"gradient": g} for name, g in zip(NAMES, found, strict=True)})
    climb(call, "--cumulative-only", "--repeats", "2", rungs=MATHS)
    told = records(Path("out"))
    assert all(r["proof"]["ok"] for r in told.values() if r["proof"])
    assert {n for n, r in told.items() if r["verdict"] == "red"} == set(red)
    for name, against in red.items():
        assert len(told[name]["red"]) == 1 and f"from `{against}`, which promises" in told[name]["red"][0]


@pytest.mark.parametrize(
    ("base", "again", "red"),
    further(
        [
            (FIRST, gradient(9293, 3693), False),  # by 0.035; bf16 may by 0.03, but it lies 0.04 from the baseline
            (gradient(4, 3), gradient(9293, 3693), True),  # by 0.035, and it lies where the baseline does
            (FIRST, gradient(1, 0), True),  # by 0.2
        ],
        2,
    ),
)
def test_other_maths_may_turn_a_gradient_anew(call, fakes, base, again, red):
    """When it is asked again after the timed steps, as far as it lies from the baseline; the same maths may not."""
    turned = {"gradient": gradient(4, 3), "again": again}
    fakes.does(none={"gradient": base, "again": base}, bf16=turned, fused_adamw=turned)
    climb(call, "--cumulative-only", rungs=[*MATHS[:2], {**RUNGS[1], "from": "base"}])
    drifted = {n for n, r in records(Path("out")).items() if any("after the timed steps" in why for why in r["red"])}
    assert drifted == {"adamw", *(["narrow"] if red else [])}


def test_the_same_maths_is_not_the_next_rung(call, fakes):
    """What lies between, of the baseline's maths, is no measure; and in float32 little is allowed."""
    fakes.does(
        none={"gradient": FIRST}, fused_loss={"gradient": FIRST}, fused_loss__muon={"gradient": gradient(4, 3)},
        fused_loss__muon__recompute={"gradient": gradient(4, 3.01)},
    )  # fmt: skip
    muon, both = {"name": "muon", "with": {"muon": {}}}, {"name": "both", "with": {"recompute": {}}}
    rungs = [RUNGS[0], {"name": "loss", "with": {"fused-loss": {}}}, muon, both]
    climb(call, "--cumulative-only", rungs=rungs)
    found = records(Path("out"))
    assert found["muon"]["verdict"] != "red" and found["both"]["verdict"] != "red", found["both"]["red"]
    fakes.does(
        none={"gradient": FIRST}, fused_loss={"gradient": FIRST}, fused_loss__muon={"gradient": FIRST},
        fused_loss__muon__recompute={"gradient": gradient(3, 4.02)},
    )  # fmt: skip
    climb(call, "--cumulative-only", rungs=rungs, out="again")
    said = "wrong: its gradients differ by 2.9e-06 (1 - cosine) from `muon`, which promises the same maths"
    assert records(Path("again"))["both"]["red"] == [f"{said}, allowed 1e-06"]


def test_a_record_has_every_field(call, fakes):
    fakes.does(fused_adamw={"speed": 1500.0})
    found = climb(call, "--cumulative-only", "--json", "--set", "optim.lr=1e-4")
    told = json.loads(found.out)
    assert told == list(records(Path("out")).values()) and len(told) == 3
    r = Record.from_json(json.dumps(told[1]))
    assert (r.ladder, r.rung, r.mode, r.since, r.changes) == ("ladder", "adamw", "cumulative", "base", "+ fused-adamw")
    assert (r.case, r.device, r.ranks, r.seq, r.micro_tokens) == ("toy, random tokens", "cpu", 1, 64, 128)
    assert (r.tokens_per_s, r.verdict, r.red, r.error, r.peer) == (pytest.approx(1500.75), "faster", [], None, None)
    assert r.tokens_per_s_iqr is not None and r.step_s == [[0.1, 0.1]]
    assert r.proof == {
        "against": "base", "numerics": "SAME_MATHS", "of": "losses", "tolerance": 1e-4, "worst": 0, "ok": True,
        "cosine": None,
    }  # fmt: skip
    assert r.config["with"] == {"fused-adamw": {}} and r.config["optim"]["lr"] == 1e-4
    assert r.config["train"]["steps"] == 5
    assert {"python", "torch", "platform", "cpu", "threads"} <= set(r.environment)
    assert len(r.source["digest"]) == 16 and set(r.source) == {"commit", "clean", "digest"}
    assert (
        r.command
        == "optrush bench run.yaml --ladder ladder.yaml --out out --cumulative-only --json --set optim.lr=1e-4"
    )
    assert r.predicted_peak_bytes and r.basis
    assert Record.from_json(r.to_json()) == r


def test_people_see_a_line_a_process_and_the_table(call, fakes):
    found = climb(call, "--repeats", "2")
    assert "rung 2/5 adamw, repeat 1/2: 1,000 tok/s, 0.9 GiB  ETA" in found.err
    assert "rung 5/5 without fused-loss, repeat 2/2: " in found.err
    assert found.out == "out/report.html\n"


# --- how a process may end


@pytest.mark.parametrize(("does", "said"), further([
    ("kill", "killed by signal 9 (SIGKILL), most likely out of host memory"),
    ("refuse", "asked: a\nfound: b\ndo:    c"), ("hang", "still running after 2 s"),
    ("leave", "exit code 1: Something went wrong"),
], 2))  # fmt: skip
def test_a_rung_that_fails_is_a_record_and_the_others_run(call, fakes, does, said):
    fakes.does(fused_adamw={"do": does})
    found = climb(call, "--cumulative-only", "--repeats", "2", "--limit", "2" if does == "hang" else "60")
    assert found.code == 1
    assert fakes.started == ["none", "fused-adamw", "fused-adamw fused-loss", "none", "fused-adamw fused-loss"]
    told = records(Path("out"))
    assert said in told["adamw"]["error"] and told["adamw"]["verdict"] == "red"
    assert told["adamw"]["tokens_per_s"] is None and told["adamw"]["red"][0].startswith("failed: ")
    assert told["both"]["error"] is None
    assert (told["both"]["since"], told["both"]["changes"]) == ("base", "+ fused-adamw, + fused-loss")
    assert "rung 2/3 adamw, repeat 1/2: failed: " in found.err
    if does == "hang":
        assert len(fakes.pids) == 2 and all(gone(pid) for pid in fakes.pids), "with all that it started"


def gone(pid):
    for _ in range(50):
        if not alive(pid):
            return True
        time.sleep(0.1)
    return False


def test_when_the_baseline_fails_the_next_takes_its_place(call, fakes):
    fakes.does(none={"do": "kill"})
    assert climb(call, "--cumulative-only").code == 1
    told = records(Path("out"))
    assert [r["verdict"] for r in told.values()] == ["red", "baseline", "noise"]
    assert told["adamw"]["proof"] is None and told["both"]["proof"]["against"] == "adamw"


def test_a_rung_that_this_machine_cannot_run(call, fakes):
    rungs = [*RUNGS, {"name": "gpu", "with": {"attention": {"impl": "varlen"}}, "from": "base"}]
    found = climb(call, "--cumulative-only", rungs=rungs)
    assert found.code == 1 and len(fakes.started) == 3
    assert "asked: `attention:impl=varlen` needs a CUDA device" in records(Path("out"))["gpu"]["error"]


def test_a_technique_that_cannot_be_taken_away(call, fakes, monkeypatch):
    from optrush.technique import Part
    from optrush.techniques.fused_loss import FusedLoss

    monkeypatch.setattr(FusedLoss, "wants", frozenset({Part.OPTIMIZER}))
    found = climb(call)
    assert found.code == 0
    assert "skipped: `without fused-adamw`: `fused-loss`: no technique sets the optimizer" in found.err
    assert list(records(Path("out"))) == ["base", "adamw", "both", "without fused-loss"]


def test_a_wrong_rung_is_red(call, fakes):
    fakes.does(fused_adamw={"losses": [2.0, 1.501], "speed": 9000.0})
    assert climb(call, "--cumulative-only").code == 0
    told = records(Path("out"))["adamw"]
    assert told["verdict"] == "red" and told["proof"]["ok"] is False
    assert told["red"] == ["wrong: losses differ by 0.00067 (relative) from `base`, allowed 1e-04"]


# --- what is there before anything is measured


def test_a_dry_run_lists_the_rungs(call, fakes):
    def dry(*flags):
        return call("bench", "run.yaml", "--ladder", "ladder.yaml", "--dry-run", *flags)

    lacking = {"name": "varlen", "with": {"attention": {"impl": "varlen"}}}
    put(Path("ladder.yaml"), ladder([*RUNGS[:2], lacking]))
    found = dry("--cumulative-only")
    lines = found.out.splitlines()
    assert found.code == 1 and [line.split()[0] for line in lines[1:-1:2]] == ["base", "adamw", "varlen"]
    assert "needs a CUDA device" in lines[-2] and lines[-2].startswith("  refused: asked: ")
    assert lines[-1] == "2 rungs, 1 process each"
    put(Path("ladder.yaml"), ladder(RUNGS))
    found = dry("--repeats", "2")
    assert found.code == 0 and "  - fused-adamw" in found.out and found.out.endswith("2 processes each\n")
    listed = json.loads(dry("--json").out)
    assert [rung["rung"] for rung in listed] == ["base", "adamw", "both", "without fused-adamw", "without fused-loss"]
    assert all(rung["predicted_tokens_per_s"] > 0 and rung["predicted_peak_bytes"] > 0 for rung in listed)
    assert fakes.started == [] and not Path("out").exists()
    found = call("bench", "run.yaml", "--ladder", "ladder.yaml")
    assert found.code == 2 and "--dry-run" in found.err
    assert dry("--resume").code == dry("--limit", "4").code == 2


# --- what is refused before anything is written


def test_refusals(call, fakes):
    for rungs, said in (
        ([{"name": "a", "with": {"attention": {"impl": "varlen"}}}], "needs a CUDA device"),
        ([{"name": "a", "set": {"batch.tokens": 100}}], "not divisible"),
        ([{"name": "a", "with": {"amq": {}}}], "ladder.yaml:11: the technique `amq`"),
    ):
        found = climb(call, rungs=rungs)
        assert found.code == 2 and said in found.err, found.err
    said = call("bench", "run.yaml", "--ladder", "everest", "--out", "out").err
    assert "no such ladder or file" in said and "single-gpu; or name a YAML file" in said
    assert climb(call, "--resume").code == 2
    assert not Path("out").exists() and fakes.started == []
    Path("out").mkdir()
    Path("out/mine").touch()
    found = climb(call)
    assert found.code == 2 and "the folder is not empty" in found.err


def test_a_launcher(call, fakes, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(os, "_exit", lambda code: None)
    assert climb(call).code == 2


# --- going on


def test_resume_asks_for_what_is_missing(call, fakes):
    fakes.does(fused_adamw={"do": "leave"})
    climb(call, "--repeats", "2", "--cumulative-only")
    before = records(Path("out"))
    Path("out/rungs/03-both-2.json").unlink()
    Path("out/rungs/01-base-1.json").unlink()
    assert fakes.started
    assert climb(call, "--repeats", "2", "--cumulative-only").code == 2
    found = climb(call, "--repeats", "2", "--cumulative-only", "--resume")
    assert found.code == 1, found.err
    assert fakes.started == ["none", "none", "fused-adamw fused-loss"]  # after a gap, the rest is measured again
    after = records(Path("out"))
    assert after.keys() == before.keys() and after["adamw"]["error"] == before["adamw"]["error"]
    assert [len(r["repeats"]) for r in after.values()] == [2, 0, 2]


def test_more_repeats_and_rungs_can_be_added(call, fakes):
    climb(call, "--cumulative-only")
    assert len(fakes.started) == 3
    assert climb(call, "--repeats", "2", "--resume").code == 0
    assert len(fakes.started) == 3 + 2 * 2


def test_resume_refuses_another_climb(call, fakes, monkeypatch):
    climb(call, "--cumulative-only")
    for flags, changes, said in (
        (["--set", "optim.lr=1e-4"], {}, "`base` had another configuration"),
        ([], {"steps": 5}, "`base` had another configuration"),
        ([], {"proof": {"steps": 9}}, "`base` had another configuration"),
        ([], {"rungs": RUNGS[:2]}, "rungs/03-both-1.json belongs to no rung of this ladder"),
    ):
        found = climb(call, "--cumulative-only", "--resume", *flags, **changes)
        assert found.code == 2 and said in found.err, found.err
    from optrush.benchmark import record

    monkeypatch.setattr(record, "source", lambda: {"commit": None, "clean": None, "digest": "another"})
    found = climb(call, "--cumulative-only", "--resume")
    assert found.code == 2 and "the package has changed" in found.err


@pytest.mark.parametrize("text", further(['{"half', "[]", "{}", "\ufffe"], 1))
def test_a_damaged_result_is_named(call, fakes, text):
    climb(call, "--cumulative-only")
    Path("out/rungs/02-adamw-1.json").write_text(text)
    found = climb(call, "--cumulative-only", "--resume")
    assert found.code == 2 and "rungs/02-adamw-1.json is damaged" in found.err, found.err


def test_two_climbs_in_one_folder(call, fakes):
    climb(call, "--cumulative-only")
    with Path("out/.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        found = climb(call, "--cumulative-only", "--resume", "--repeats", "2")
    assert found.code == 2 and "another bench or tune is using it" in found.err


def test_a_baseline_that_is_refused_ends_the_climb(call, fakes):
    """What only a process finds out, in the data for example: as if it had been seen beforehand."""
    fakes.does(none={"do": "refuse"})
    found = climb(call, "--cumulative-only")
    assert found.code == 2 and found.err.endswith("asked: a\nfound: b\ndo:    c\n"), found.err
    assert not Path("out").exists() and fakes.started == ["none"]


@pytest.mark.parametrize(("number", "code"), further([(signal.SIGTERM, 143), (signal.SIGINT, 143)], 1))
def test_a_stopped_climb_keeps_what_it_has(call, fakes, number, code):
    fakes.does(**{"fused_adamw__fused_loss": {"do": "hang"}})
    stop_when_it_hangs(fakes, number)
    found = climb(call, "--cumulative-only")
    assert found.code == code, found.err
    assert list(records(Path("out"))) == ["base", "adamw"]
    assert all(gone(pid) for pid in fakes.pids) and fakes.pids
    fakes.does()
    assert climb(call, "--cumulative-only", "--resume").code == 0
    assert fakes.started[-1] == "fused-adamw fused-loss" and len(read_records(Path("out"))) == 3


def stop_when_it_hangs(fakes, number):
    """Sends this process a signal, as a terminal or a scheduler does, once a worker has begun to hang, and said so."""
    pids = Path(f"{fakes.log}.pids")

    def send(*_):
        if pids.exists() and pids.stat().st_size:
            signal.setitimer(signal.ITIMER_REAL, 0)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGALRM, send)
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.1)


# --- records


def test_reading_what_is_no_record(tmp_path):
    with pytest.raises(DataError, match="optrush bench"):
        read_records(tmp_path)
    (tmp_path / "records.jsonl").write_text('{"rung": "a"}\n')
    with pytest.raises(DataError, match=r"records.jsonl:1"):
        read_records(tmp_path)


def test_the_last_words_of_a_process():
    assert runner.cause_of_death(-11, "") == "killed by signal 11 (SIGSEGV)"
    assert "most likely out of host memory" in runner.cause_of_death(-9, "")
    assert runner.cause_of_death(3, "one\n\ntwo\n") == "it ended without a result, exit code 3: one | two"
