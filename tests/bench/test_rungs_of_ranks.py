"""Rungs of several ranks: processes that meet, what a failed rank leaves, and what a ladder says of them."""

import sys
from pathlib import Path

import pytest

from optrush.benchmark import ladder as ladders
from optrush.benchmark import runner, tune, worker
from optrush.benchmark.ladder import parse_ladder, resolve_rungs
from optrush.config import dump_config
from optrush.errors import ConfigError
from optrush.report.bench import ladder_summary, read_rungs, scaling_chart

from toy import ladder, parsed, put

BATCH = {"seq": 64, "tokens": 512, "micro_tokens": 128}


def request(ranks, **techniques):
    baseline = parsed(batch=BATCH)
    config = parsed(batch=BATCH, **{"with": techniques})
    proof = {"steps": 3, "documents": 6}
    return {"run": dump_config(config), "baseline": dump_config(baseline), "warmup": 1, "proof": proof, "ranks": ranks}


@pytest.mark.slow
def test_two_ranks_prove_what_one_learns():
    alone = worker.measure(parsed(batch=BATCH), parsed(batch=BATCH), 1, 3, 6)  # of one rank, in this process
    found = runner.run_worker(request(2, fsdp={}), 120)
    assert "error" not in found, found
    assert found["proof"]["losses"] == pytest.approx(alone["proof"]["losses"], rel=1e-5)
    assert found["proof"]["grad_norms"] == pytest.approx(alone["proof"]["grad_norms"], rel=1e-4)
    assert found["proof"]["gradient"]["of"] == alone["proof"]["gradient"]["of"]
    assert found["parts_s"] and found["peak_bytes"] > 0


FAILS = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit("the second one cannot")
time.sleep(600)
"""


def test_a_rank_that_fails_ends_the_rung(tmp_path, monkeypatch):
    (tmp_path / "worker.py").write_text(FAILS)
    monkeypatch.setattr(runner, "COMMAND", [sys.executable, str(tmp_path / "worker.py")])
    monkeypatch.setattr(runner, "FAILED_GRACE_S", 0.5)
    found = runner.run_worker(request(2, ddp={}), 240)
    assert "the second one cannot" in found["error"]


def test_ranks_go_on_to_later_rungs_and_variables_do_not():
    rungs = [
        {"name": "one"}, {"name": "two", "ranks": 2, "with": {"ddp": {}}},
        {"name": "far", "env": {"NCCL_P2P_DISABLE": "1"}}, {"name": "near", "from": "two", "with": {"fused-adamw": {}}},
    ]  # fmt: skip
    text = put(Path("ladder.yaml"), ladder(rungs, all_but_one=False))
    found = resolve_rungs(parse_ladder(Path(text).read_text(), text, "x"), parsed(), cumulative_only=False)
    assert [(r.ranks, r.env) for r in found] == [(1, {}), (2, {}), (2, {"NCCL_P2P_DISABLE": "1"}), (2, {})]
    changes = ["the baseline", "1 -> 2 ranks, + ddp", "NCCL_P2P_DISABLE=1", "+ fused-adamw"]
    assert [r.changes for r in found] == changes


@pytest.mark.parametrize(
    ("wrong", "found"),
    [({"ranks": 0}, "ranks"), ({"env": {"PATH": "/"}}, "an NCCL variable"), ({"env": {"NCCL_DEBUG": 1}}, "env")],
)
def test_what_a_rung_may_not_set(wrong, found):
    text = put(Path("ladder.yaml"), ladder([{"name": "one"}, {"name": "two", **wrong}]))
    with pytest.raises(ConfigError) as raised:
        parse_ladder(Path(text).read_text(), text, "x")
    assert found in str(raised.value) and "ladder.yaml:" in str(raised.value)


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    from optrush import hardware

    text = put(Path("ladder.yaml"), ladder([{"name": "one"}, {"name": "two", "ranks": 2, "with": {"ddp": {}}}]))
    two = resolve_rungs(parse_ladder(Path(text).read_text(), text, "x"), parsed(), cumulative_only=True)[1]
    monkeypatch.setattr(hardware, "probe", lambda: [hardware.NAMED["h100"]])
    with pytest.raises(runner.NeedsError, match="this machine has 1 GPU"):
        runner._refuse_ranks(two)


def test_the_share_of_ideal_scaling():
    common = {"case": "x", "device": "d", "mode": "cumulative", "peer": None}
    rows = [
        {**common, "rung": "one", "ranks": 1, "tokens_per_s": 100.0, "predicted_tokens_per_s": 110.0},
        {**common, "rung": "two", "ranks": 2, "tokens_per_s": 190.0, "predicted_tokens_per_s": 220.0, "since": "one"},
    ]
    one, two = read_rungs(rows)[0]
    assert (one.scaling, two.scaling, two.predicted_scaling) == (None, 0.95, 1.0)
    failed = {**rows[1], "rung": "other", "peer": "trainer", "tokens_per_s": None, "error": "no"}
    shown = read_rungs([rows[0], failed])[0]
    assert scaling_chart(shown[1:]) is None and scaling_chart([two]) is not None
    assert "1 of other systems failed" in ladder_summary(shown)


def test_rungs_of_more_ranks_than_gpus_are_left_out(monkeypatch, tmp_path):
    from optrush import hardware

    rungs = [
        {"name": "one"},
        {"name": "four", "ranks": 4, "with": {"ddp": {}}},
        {"name": "one again", "from": "four", "ranks": 1, "without": ["ddp"], "with": {"fused-adamw": {}}},
    ]
    text = put(tmp_path / "ladder.yaml", ladder(rungs, all_but_one=False))
    written = parse_ladder(Path(text).read_text(), text, "x")
    resolved = resolve_rungs(written, parsed(), cumulative_only=True)
    state = runner.BenchState(written, resolved, tmp_path / "out", 1, 60.0, "", {}, {})
    state.predict = lambda *_: {"predicted_peak_bytes": None, "predicted_tokens_per_s": None}
    monkeypatch.setattr(hardware, "probe", lambda: [hardware.NAMED["h100"]])
    monkeypatch.setattr(runner, "decide", lambda *_, **__: None)
    lines: list[str] = []
    board = runner.ProgressBoard()
    monkeypatch.setattr(board, "log", lines.append)
    runner._refuse(state, board)
    assert lines == ["skipped (this machine has 1 GPU): `four`"]
    assert [r.name for _, r in state.missing()] == ["one", "one again"] and not state.records()
    assert state.since(state.rungs[2]) is None, "until the first has figures"
    ran = {"tokens_per_s": [1.0], "step_s": [1.0], "peak_bytes": 1, "memory_kind": "rss"}
    state.results["one"] = [{**ran, "proof": {"losses": []}}]
    assert state.since(state.rungs[2]) is state.rungs[0]
    assert ladders.changes_since(state.rungs[0], state.rungs[2].config, 1, {}) == "+ fused-adamw"
    assert ladders.changes_since(state.rungs[1], state.rungs[0].config, 1, {"NCCL_A": "1"}).startswith(
        "4 -> 1 ranks, NC"
    )


def test_a_tuning_says_that_there_are_too_few_gpus(monkeypatch, tmp_path):
    from optrush import hardware

    text = put(tmp_path / "ladder.yaml", ladder([{"name": "one"}, {"name": "two", "ranks": 2, "with": {"ddp": {}}}]))
    written = parse_ladder(Path(text).read_text(), text, "x")
    resolved = resolve_rungs(written, parsed(), cumulative_only=True)
    state = tune.TuneState(written, resolved, tmp_path / "out", 1, 60.0, "", {}, {})
    monkeypatch.setattr(hardware, "probe", lambda: [hardware.NAMED["h100"]])
    monkeypatch.setattr(runner, "decide", lambda *_, **__: None)
    runner._refuse(state, runner.ProgressBoard())
    assert "this machine has 1 GPU" in state.refused["two"] and not state.absent


def test_a_rung_is_predicted_over_its_own_link(monkeypatch):
    from optrush import hardware

    off = {"NCCL_P2P_DISABLE": "1"}
    rungs = [{"name": "one"}, {"name": "two", "ranks": 2, "with": {"ddp": {}}}, {"name": "far", "env": off}]
    text = put(Path("ladder.yaml"), ladder(rungs, all_but_one=False))
    written = parse_ladder(Path(text).read_text(), text, "x")
    config = parsed(batch=BATCH, model={"shape": "llama-3.2-1b"}, data={"random": 64})
    found = resolve_rungs(written, config, cumulative_only=True)
    monkeypatch.setattr(hardware, "probe", lambda: [hardware.NAMED["h100"]] * 2)
    near, far = (runner.predict_rung(r, r.config)["predicted_tokens_per_s"] for r in found[1:])
    assert far < near
