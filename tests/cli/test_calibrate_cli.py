"""`optrush calibrate` as a user and as a program call it, and the plan that follows."""

import json
from pathlib import Path

import pytest

from optrush.cli import plan as command
from optrush.cli.options import read_run
from optrush.planner import calibration
from optrush.planner.search import predict

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """Where calibrations go here."""
    monkeypatch.setenv("OPTRUSH_CACHE", str(tmp_path / "own"))
    return tmp_path / "own" / "calibrations"


def test_for_people_and_for_the_plan(call, write, kept, monkeypatch):
    run = write()
    before = predict(read_run(Path(run), [], [], []), "cpu")
    assert before.basis == "datasheet"
    monkeypatch.setattr(command, "EVERY_S", 0.0)
    found = call("calibrate", "--seconds", "1")
    assert found.code == 0, found.err
    lines = found.err  # there is no terminal
    assert "calibrating: tiny qkv, forward, bfloat16" in lines or "calibrating: tiny qkv, input, bfloat16" in lines
    assert "  ETA " in lines and "calibrating: copies" in lines
    (file,) = kept.iterdir()
    assert f"kept in {file}" in found.err
    for text in ("torch ", "TFLOP/s", "forward", "weight", "gate_up 192 -> 1024", "head 192 -> 2048", "bfloat16",
                 "float32", "T 256, 6/2 heads of 32", "GB/s", "to start an operator"):  # fmt: skip
        assert text in found.out, text
    assert "pinned" not in found.out, "a processor has no link to itself"
    shown = call("plan", run, "--hardware", "cpu", "--details").out
    after = predict(read_run(Path(run), [], [], []), "cpu")
    assert after.basis == "calibrated" and after.tokens_per_s != before.tokens_per_s
    assert f"about {after.tokens_per_s:,.0f} tokens/s (basis: calibrated)" in shown
    assert f"  rates: {after.rates_from}" in shown and after.rates_from.startswith("measured on 2")
    dry = call("train", run, "--dry-run").out
    assert "basis: calibrated" in dry and "rates: measured on 2" in dry


def test_for_programs(call, write, here, kept):
    out = here / "mine.json"
    arguments = (write(), "--set", "batch.seq=32", "--set", "batch.tokens=64", "--seconds", "1")
    found = call("calibrate", *arguments, "--json", "--out", str(out))
    assert found.code == 0, found.err
    document = json.loads(found.out)
    (file,) = kept.iterdir()
    assert json.loads(file.read_text()) == json.loads(out.read_text()) == document
    assert {p["inputs"] for p in document["products"] if p["part"] == "down"} == {512}
    assert {a["seq"] for a in document["attention"]} == {32}
    assert calibration.read_calibration(out).seconds == 1.0


def test_a_measured_file_can_be_carried_elsewhere(write, kept):
    """By its contents, whatever it is called: the name of the device in it decides."""
    kept.mkdir(parents=True)
    (kept / "from the other machine.json").write_text((RESULTS / "h200-calibration.json").read_text())
    config = read_run(Path(write()), [], [], [])
    assert predict(config, "h200").basis == "calibrated" and predict(config, "cpu").basis == "datasheet"


def refused(call, *arguments):
    found = call(*arguments)
    assert found.code == 2, found.out + found.err
    assert [line.split(":")[0] for line in found.err.splitlines()[-3:]] == ["asked", "found", "do"]
    return found.err


def never(*_, **__):
    raise AssertionError("measured")


def test_refusals_before_a_minute_is_spent(call, write, here, monkeypatch):
    monkeypatch.setattr("optrush.planner.calibrate.measure_rates", never)
    (here / "there.json").write_text("mine")
    assert "this file exists" in refused(call, "calibrate", "--out", "there.json")
    assert (here / "there.json").read_text() == "mine"
    assert "to write the calibration" in refused(call, "calibrate", "--out", "there.json/x.json")
    assert "no CONFIG to change" in refused(call, "calibrate", "--set", "batch.seq=64")
    assert "no such file" in refused(call, "calibrate", "none.yaml")
    assert "no rates of this device" in refused(call, "calibrate", "--ranks", "2")
    assert "one process exchanges nothing" in refused(call, "calibrate", "--ranks", "1")
    assert "--ranks measures links alone" in refused(call, "calibrate", "--ranks", "2", write())
    assert "found with these rates" in refused(call, "calibrate", write(), "--set", "batch.micro_tokens=auto")
    monkeypatch.setenv("OPTRUSH_CACHE", str(here / "there.json"))
    assert "$OPTRUSH_CACHE" in refused(call, "calibrate")


def test_one_process(start):
    found = start("calibrate", RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    assert found.code == 2 and "start it alone" in found.err


@pytest.mark.parametrize("seconds", ["0", "-1", "101", "x"])
def test_at_most_two_minutes(call, seconds):
    assert call("calibrate", "--seconds", seconds).code == 2


def test_a_damaged_one_is_named(call, write, kept):
    kept.mkdir(parents=True)
    (kept / "bad.json").write_text("{")
    run = write(batch={"micro_tokens": 128})
    for verb in (("plan", run), ("bench", run, "--out", "climb")):
        said = refused(call, *verb)
        assert str(kept / "bad.json") in said and "delete it, and measure again: optrush calibrate" in said
    assert not Path("climb").exists()
    assert (
        f"no prediction: the calibration {kept / 'bad.json'}: damaged: not JSON" in call("train", run, "--dry-run").out
    )
