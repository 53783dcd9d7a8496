"""Ladders of whole runs: their statistics by hand, what is refused, and benches of real runs and of scripts."""

import dataclasses
import json
import math
import re
import statistics
import subprocess
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import yaml

from optrush.benchmark import ladder, quality, record, runner
from optrush.config import parse_config
from optrush.errors import ConfigError, DataError, RunError
from optrush.report import bench as pages
from optrush.report import run as finished

from toy import document, put

WHOLE = "title: x\nquality: {seeds: 2}\nrungs:\n  - name: a\n"
QUESTIONS = [("3 + 4", "3 + 4 = 7\n#### 7"), ("10 - 2", "It is 8."), ("a dozen", "That makes 12")]


def run(**changes):
    given = {"data": {"random": 64, "eval": 0.25}, "train": {"steps": 3, "log_every": 1, "save_every": 1}, **changes}
    return parse_config(yaml.safe_dump(document(**given)), "run.yaml")


def resolved(text, **changes):
    written = ladder.parse_ladder(text, "own.yaml", "own")
    return {r.name: r for r in ladder.resolve_rungs(written, run(**changes), False)}


# --- the statistics


@pytest.mark.parametrize(
    ("freedom", "value"), [(1, 12.706), (2, 4.303), (10, 2.228), (11, 2.201), (30, 2.042), (1000, 1.962)]
)
def test_students_t(freedom, value):
    """The tables of any textbook."""
    assert quality.student(freedom) == pytest.approx(value, abs=3e-3)


def test_two_rungs_are_compared_as_by_a_paired_t_test():
    a, b = [1.0, 1.1, 1.3, 1.2], [1.05, 1.12, 1.36, 1.29]
    found = quality.compare({"a": a, "b": b}, "b", "a")
    each = [y - x for x, y in zip(a, b, strict=True)]
    spread = statistics.stdev(each) / math.sqrt(4)
    assert found == pytest.approx((statistics.mean(each), spread, 3.182 * spread))


def test_the_variance_of_many_rungs_is_that_of_randomized_blocks():
    """What a seed adds to all rungs does not count, and rungs that scatter alike are pooled."""
    draw = np.random.default_rng(0)
    noise = draw.normal(0, 0.01, (40, 3))
    values = {f"{i}": list(1 + i + np.array([0, 5, -3]) + noise[i]) for i in range(40)}
    table = np.array(list(values.values()))
    left = table - table.mean(1, keepdims=True) - table.mean(0) + table.mean()
    by_hand = (left**2).sum() / (39 * 2)
    assert all(found == (pytest.approx(by_hand), 78) for found in quality.variances(values).values())


def test_an_unsteady_rung_keeps_its_own_spread():
    draw = np.random.default_rng(1)
    values = {f"{i}": list(draw.normal(1, 0.001, 3)) for i in range(9)}
    before = quality.compare(values, "1", "0")
    values["wild"] = [1.0, 1.4, 0.8]
    after, wild = quality.compare(values, "1", "0"), quality.compare(values, "wild", "0")
    assert after[1] == pytest.approx(before[1], rel=0.2), "it does not widen that of the others"
    assert wild[1] == pytest.approx(statistics.stdev(values["wild"]) / math.sqrt(3), rel=0.1)
    assert wild[2] == pytest.approx(4.303 * (wild[1] or 0)), "of two degrees of freedom"


@pytest.mark.parametrize(
    ("difference", "margin", "verdict"),
    [(0.02, 0.01, "worse"), (-0.02, 0.01, "better"), (0.01, 0.01, "equal"), (0.0, 0.0, "equal"), (9, None, "one seed")],
)
def test_verdicts(difference, margin, verdict):
    assert quality.judge_quality(difference, margin) == verdict


def test_one_seed_has_no_spread():
    assert quality.compare({"a": [1.0], "b": [1.5]}, "b", "a") == (0.5, None, None)


def test_equal_rungs_call_few_others_better_or_worse():
    """Of rungs that learn the same, some 5 % are called otherwise, with two and with three seeds."""
    draw = np.random.default_rng(2)
    for rungs, seeds in ((2, 2), (3, 3), (12, 3)):
        wrong = total = 0
        for _ in range(200):
            values = {f"{i}": list(draw.normal(0, 1, seeds)) for i in range(rungs)}
            for name in list(values)[1:]:
                difference, _, margin = quality.compare(values, name, "0")
                wrong, total = wrong + (abs(difference) > (margin or 0)), total + 1
        assert 0.02 < wrong / total < 0.09, (rungs, seeds, wrong / total)


@pytest.mark.parametrize(("text", "number"), [
    ("16 - 3 = 13\n#### 18", "18"), ("$1,234.50.", "1234.5"), ("it is 18.", "18"), ("10-2", "2"), ("is -7", "-7"),
    ("18.00", "18"), ("1,234,567 in all", "1234567"), ("3, 4, 5", "5"), ("2.5%", "2.5"), ("12,34", "34"),
])  # fmt: skip
def test_the_last_number(text, number):
    assert quality.last_number(text) == Decimal(number)
    assert quality.last_number("none at all") is None


# --- a ladder as written


def test_whole_runs_keep_the_length_and_the_held_out_rows():
    found = resolved(
        WHOLE
        + "  - {name: b, with: {amp: {}}}\n  - {name: c, set: {optim.lr: 0.5, train.epochs: 2}}\n"
        + "  - {name: d, from: b, set: {optim.clip: null}}\n"
    )
    a = found["a"].config
    assert a.data.eval == 0.25 and a.train.steps == 3
    assert a.train.save_every is None and not a.train.export and a.tracker is None
    assert [r.since for r in found.values()] == [None, "a", "a", "b"], "from the first, unless it says from which"
    assert found["c"].config.with_ == {} and found["c"].config.optim.lr == 0.5
    assert found["d"].config.with_ == {"amp": {}} and found["d"].config.optim.clip is None
    assert list(found) == ["a", "b", "c", "d"], "no rung takes one technique away"


def test_a_score_needs_the_model():
    assert resolved(WHOLE.replace("seeds: 2", "score: number"))["a"].config.train.export


@pytest.mark.parametrize(("text", "said"), [
    ("steps: 4\n" + WHOLE, "own.yaml:1: `steps`\nfound: `quality` trains whole runs"),
    ("warmup: 4\n" + WHOLE, "own.yaml:1: `warmup`"),
    ("repeats: 4\n" + WHOLE, "all-but-one rungs\ndo:    write `quality: {seeds: N}`"),
    ("proof: {steps: 4}\n" + WHOLE, "own.yaml:1: `proof`"),
    ("all_but_one: true\n" + WHOLE, "own.yaml:1: `all_but_one`"),
    ("longest: {from: 8, to: 64}\n" + WHOLE, "own.yaml:1: `longest`"),
    (WHOLE.replace("seeds: 2", "seeds: 0"), "`quality.seeds`\nfound: 0\ndo:    give a number of at least 1"),
    (WHOLE.replace("seeds", "seed"), "`quality.seed`\nfound: no such key\ndo:    did you mean `seeds`"),
    (WHOLE.replace("seeds: 2", "score: rouge"), "`quality.score`\nfound: 'rouge'\ndo:    give 'number'"),
    (WHOLE + "  - {name: b, peer: {trainer: {}}}", "`name: b`\nfound: another system in a ladder of"),
    (WHOLE + "  - {name: b, set: {seed: 4}}", "own.yaml:5: `seed`\nfound: a rung cannot change this key"),
    (WHOLE + "  - {name: b, set: {optim.rate: 4}}", "`optim.rate`\nfound: a rung cannot change this key"),
    (WHOLE + "  - {name: b, set: {data.path: x}}", "`data.path`\nfound: a rung cannot change this key"),
    (WHOLE.replace("rungs:", "base: {set: {output: x}}\nrungs:"), "own.yaml:3: `output`\nfound: the ladder"),
])  # fmt: skip
def test_mistakes(text, said):
    with pytest.raises(ConfigError) as caught:
        resolved(text)
    assert said in str(caught.value)


def test_what_is_held_out_is_checked_before_anything_runs(tmp_path):
    own = ladder.Quality(score="number", samples=2)
    with pytest.raises(ConfigError, match=r"no `data\.eval`"):
        quality.check_quality(run(data={"random": 64}), ladder.Quality())
    with pytest.raises(ConfigError, match="a fraction of the data"):
        quality.check_quality(run(), own)
    quality.check_quality(run(), ladder.Quality())
    path = chats(tmp_path / "held.jsonl", [*QUESTIONS[:2], ("and you?", "well")])
    asked = quality.held_out_prompts(run(data={"path": "t", "eval": path}), 2)
    assert [p.reference for p in asked] == [answer for _, answer in QUESTIONS[:2]]
    with pytest.raises(DataError, match="no number in its reference answer") as caught:
        quality.held_out_prompts(run(data={"path": "t", "eval": path}), 3)
    assert "held.jsonl:3" in str(caught.value)


def test_a_score_reads_rows_by_the_names_of_the_configuration(tmp_path):
    (tmp_path / "held.jsonl").write_text('{"q": "3 + 4", "a": "7"}\n')
    columns = {"q": "prompt", "a": "completion"}
    config = run(objective="sft", data={"path": "t", "eval": str(tmp_path / "held.jsonl"), "columns": columns})
    (prompt,) = quality.held_out_prompts(config, 9)
    assert prompt.reference == "7"


def chats(path, pairs):
    rows = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in pairs]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return str(path)


# --- a bench whose runs are scripts

FAKE = """
import json, sys, yaml
request = json.load(open(sys.argv[1]))
run = yaml.safe_load(request["run"])
does = json.load(open({script!r})).get(" ".join(run.get("with", {{}})) or "none", {{}})
with open({log!r}, "a") as file:
    file.write(f"{{' '.join(run.get('with', {{}})) or 'none'}} {{run['seed']}}\\n")
if "error" in does:
    result = {{"error": does["error"]}}
elif "samples" in request:
    result = {{"score": does["scores"][run["seed"]], "samples": request["samples"]}}
else:
    loss = does["losses"][run["seed"]]
    result = {{"held_out": loss, "evals": [[0, 3.0], [3, loss]], "eval_targets": does.get("targets", 100),
              "tokens_per_s": [1000.0, 1100.0, 900.0], "peak_bytes": 2**30, "memory_kind": "rss", "start_s": 2.0,
              "device": "cpu"}}
json.dump(result, open(sys.argv[2], "w"))
"""
RUNGS = [{"name": "plain"}, {"name": "half", "with": {"bf16": {}}}, {"name": "other", "with": {"muon": {}}}]
PLAIN = {"losses": [1.0, 1.2, 1.1], "scores": [10, 20, 15]}
DOES = {"none": PLAIN, "bf16": {"losses": [1.001, 1.2, 1.101], "scores": [9, 21, 15]},
        "muon": {"losses": [0.9, 1.1, 1.0], "scores": [30, 41, 34]}}  # fmt: skip


@pytest.fixture
def told(here, monkeypatch):
    """Make runs scripts, each by its techniques; return the log of those that ran."""
    (here / "fake_quality.py").write_text(FAKE.format(script=str(here / "does.json"), log=str(here / "log")))
    monkeypatch.setenv("PYTHONPATH", str(here))
    real = runner.run_worker

    def fake(request, limit_s, peer=None, module=None):
        return real(request, limit_s, peer, "fake_quality")

    monkeypatch.setattr(runner, "run_worker", fake)
    put(here / "run.yaml", document(data={"random": 64, "eval": 0.25}, train={"steps": 3}))

    def tell(**does):
        (here / "does.json").write_text(json.dumps({**DOES, **does}))
        ran = (here / "log").read_text().splitlines() if (here / "log").exists() else []
        (here / "log").unlink(missing_ok=True)
        return ran

    tell()
    return tell


def bench(call, *flags, rungs=RUNGS, **settings):
    put(Path("ladder.yaml"), {"title": "x", "quality": {"seeds": 3, **settings}, "rungs": list(rungs)})
    return call("bench", "run.yaml", "--ladder", "ladder.yaml", "--out", "out", *flags)


def test_seeds_are_interleaved_and_compared(call, told):
    found = bench(call, "--json")
    assert found.code == 0, found.err
    assert told() == [f"{name} {seed}" for seed in (0, 1, 2) for name in ("none", "bf16", "muon")]
    plain, half, other = record.read_quality(Path("out"))
    assert json.loads(found.out) == [json.loads(r.to_json()) for r in (plain, half, other)]
    assert (plain.verdict, half.verdict, other.verdict) == ("first", "equal", "better")
    assert plain.since is None and half.since == "plain" and half.held_out == DOES["bf16"]["losses"]
    assert (half.seeds, half.evals[1], half.eval_targets) == ([0, 1, 2], [[0, 3.0], [3, 1.2]], [100] * 3)
    assert other.difference == pytest.approx(-0.1) and half.spread and half.margin and half.margin > half.spread
    assert (half.tokens_per_s, half.start_s, half.peak_bytes) == (1000.0, 2.0, 2**30)
    assert half.seconds and half.predicted_peak_bytes and half.config["with"] == {"bf16": {}}
    assert "rung 2/3 half, repeat 1/3: held-out loss 1.0010, 1,000 tok/s" in found.err
    lines = found.err.splitlines()
    assert any(
        line.split()[:6] == ["other", "3.0000", "1.0000", "-0.1000", "±", f"{other.margin:.4f}"] for line in lines
    )
    page = Path("out/report.html").read_text()
    assert "3 rungs, 3 seeds: 1 better, 1 equal." in page and "3.0000, 1.0000 (step 3)" in page
    assert Path("out/loss.png").stat().st_size > 1000
    Path("out/report.html").unlink()
    assert call("report", "out").code == 0 and Path("out/report.html").read_text() == page
    refused = call("report", "out", "out", "--out", "both.html")
    assert refused.code == 2 and "found: a ladder of whole runs" in refused.err


def test_a_failed_rung_is_a_record_and_the_others_run(call, told):
    told(bf16={"error": "out of memory: x"})
    found = bench(call, "--repeats", "2")
    assert found.code == 1 and len(told()) == 5
    plain, half, other = record.read_quality(Path("out"))
    assert (half.verdict, half.error, half.loss) == ("failed", "out of memory: x", None)
    assert len(plain.seeds) == 2 and other.verdict == "better"
    assert "half: failed: out of memory: x" in found.err
    assert "out of memory: x" in Path("out/report.html").read_text()


def test_other_held_out_tokens_are_not_compared(call, told):
    told(muon={**DOES["muon"], "targets": 90})
    assert bench(call, "--repeats", "1").code == 1
    plain, half, other = record.read_quality(Path("out"))
    assert (plain.verdict, half.verdict, other.verdict) == ("first", "one seed", "failed")
    assert other.error and other.error.startswith("90 held-out target tokens, `plain` has 100: ")
    assert half.difference == pytest.approx(0.001) and half.spread is None


def test_a_failed_first_rung_gives_its_place_to_the_next(call, told):
    told(none={"error": "x"})
    assert bench(call).code == 1
    found = record.read_quality(Path("out"))
    assert [(r.verdict, r.since) for r in found] == [("failed", None), ("first", None), ("better", "half")]
    assert found[2].changes == "- bf16, + muon"


def test_an_interrupted_bench_goes_on(call, told):
    first = bench(call, "--repeats", "1")
    assert first.code == 0 and len(re.findall(r", seed \d+: starts, \d+ steps", first.err)) == len(RUNGS)
    told()
    assert "it has results of a bench" in bench(call, "--repeats", "2").err
    assert bench(call, "--repeats", "2", "--resume").code == 0
    assert told() == ["none 1", "bf16 1", "muon 1"]
    put(Path("run.yaml"), document(data={"random": 64, "eval": 0.25}, train={"steps": 4}))
    assert "another configuration" in bench(call, "--repeats", "2", "--resume").err


def test_runs_beside_each_other_give_the_same_losses_and_no_times(call, told):
    assert bench(call).code == 0
    one_by_one = [(r.held_out, r.difference, r.verdict) for r in record.read_quality(Path("out"))]
    told()
    found = call("bench", "run.yaml", "--ladder", "ladder.yaml", "--out", "together", "--at-once", "3")
    assert found.code == 0, found.err
    ran, records = told(), record.read_quality(Path("together"))
    assert ran[:3] == ["none 0", "bf16 0", "muon 0"], "the first seed has the machine for itself"
    assert [sorted(ran[n : n + 3]) for n in (3, 6)] == [
        [f"{t} {seed}" for t in ("bf16", "muon", "none")] for seed in (1, 2)
    ]
    assert [(r.held_out, r.difference, r.verdict) for r in records] == one_by_one
    first, *others = [json.loads(p.read_text())["result"] for p in sorted(Path("together/rungs").glob("01-*"))]
    assert "beside" not in first and [r["beside"] for r in others] == [2, 2]
    assert records[0].seconds == first["seconds"]


def test_a_stopped_bench_ends_the_runs_beside_each_other(monkeypatch):
    with subprocess.Popen(["sleep", "60"]) as process:
        runner._stopping.set()
        try:
            assert runner._exit_codes([process], 60) == [None]
        finally:
            runner._stopping.clear()
            process.kill()


@pytest.mark.parametrize(("ladder_text", "flags", "said"), [
    ("title: x\nrungs:\n  - name: a\n", (), "found: the rungs are timed"),
    (WHOLE + "    ranks: 2\n    with: {ddp: {}}\n", (), "found: `a` has several ranks"),
    (WHOLE, ("--dry-run",), "leave --at-once out"),
])  # fmt: skip
def test_what_cannot_run_beside_others(call, told, ladder_text, flags, said):
    Path("ladder.yaml").write_text(ladder_text)
    found = call("bench", "run.yaml", "--ladder", "ladder.yaml", "--out", "out", "--at-once", "2", *flags)
    assert found.code == 2 and said in found.err, found.err
    assert not Path("out").exists()


def test_scores_are_compared_beside_the_losses(call, told, here):
    held = chats(here / "held.jsonl", QUESTIONS)
    trained = chats(here / "train.jsonl", QUESTIONS)
    put(here / "run.yaml", document(data={"path": trained, "eval": held}, train={"steps": 3}))
    found = bench(call, score="number", samples=3)
    assert found.code == 0, found.err
    assert told()[:4] == ["none 0", "none 0", "bf16 0", "bf16 0"], "a process trains, another one answers"
    plain, half, other = record.read_quality(Path("out"))
    assert (plain.scores, plain.score, other.score, other.samples) == ([10, 20, 15], 15, 35, 3)
    assert other.score_difference == pytest.approx(20) and other.score_margin and half.score_spread
    assert "right %" in found.err and "right %" in Path("out/report.html").read_text()


def test_the_rungs_before_anything_runs(call, told):
    found = bench(call, "--dry-run", "--json")
    assert found.code == 0 and not Path("out").exists() and not told()
    assert [r["rung"] for r in json.loads(found.out)] == ["plain", "half", "other"]
    assert bench(call, "--dry-run").out.endswith("3 rungs, 3 processes each\n")
    put(Path("run.yaml"), document(train={"steps": 3}))
    for flags in (("--dry-run",), ()):
        refused = bench(call, *flags)
        assert refused.code == 2 and "found: no `data.eval`" in refused.err and not Path("out").exists()


def test_a_damaged_record_is_named(call, told):
    bench(call, "--repeats", "1")
    text = Path("out/records.jsonl").read_text()
    Path("out/records.jsonl").write_text(text + '{"held_out": 1}\n')
    with pytest.raises(DataError, match=r"records\.jsonl:4"):
        pages.write_bench(Path("out"))


# --- a bench of real runs


@pytest.mark.slow
def test_whole_runs(call, here):
    """Two rungs and two seeds, each in a process."""
    put(here / "run.yaml", document(data={"random": 64, "eval": 0.25}, train={"steps": 3, "log_every": 1}))
    rungs = [{"name": "plain"}, {"name": "adapters", "with": {"lora": {"rank": 2}}, "set": {"optim.lr": 0.01}}]
    put(Path("ladder.yaml"), {"title": "x", "quality": {"seeds": 2}, "rungs": rungs})
    found = call("bench", "run.yaml", "--ladder", "ladder.yaml", "--out", "out")
    assert found.code == 0, found.err
    plain, adapters = record.read_quality(Path("out"))
    for r in (plain, adapters):
        assert r.loss and r.tokens_per_s and r.start_s and r.seconds and r.seconds > r.start_s
        assert [step for step, _ in r.evals[0]] == [0, 3] and len(r.held_out) == 2
    assert adapters.margin is not None and plain.evals[0][0] == adapters.evals[0][0]
    assert parse_config(Path("out/runs/02-adapters-2/run.yaml").read_text(), "x", own=True).seed == 1


@pytest.mark.slow
def test_the_answers_of_a_whole_run(call, here):
    held, trained = chats(here / "held.jsonl", QUESTIONS), chats(here / "train.jsonl", [("7 + 5", "It is 12.")] * 24)
    put(here / "run.yaml", document(
        model="tiny", objective="sft", data={"path": trained, "eval": held}, train={"steps": 2, "log_every": 1},
        batch={"seq": 128, "tokens": 256},
    ))  # fmt: skip
    rungs = [{"name": "plain"}]
    put(Path("ladder.yaml"), {"title": "x", "quality": {"seeds": 1, "score": "number", "samples": 2}, "rungs": rungs})
    found = call("bench", "run.yaml", "--ladder", "ladder.yaml", "--out", "out")
    assert found.code == 0, found.err
    (plain,) = record.read_quality(Path("out"))
    folder = Path("out/runs/01-plain-1")
    answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert [a["reference"] for a in answers] == [answer for _, answer in QUESTIONS[:2]]
    assert plain.scores == [50.0 * sum(a["right"] for a in answers)] and plain.samples == 2
    assert (folder / "metrics.jsonl").exists()
    assert not (folder / "model").exists() and not (folder / "checkpoints").exists()


def test_a_whole_run(here):
    """The process of a rung, in this process."""
    figures = quality.train_run(run(output="trained"), 0.0)
    assert figures["held_out"] == figures["evals"][-1][1] != figures["evals"][0][1]
    assert [step for step, _ in figures["evals"]] == [0, 3] and len(figures["tokens_per_s"]) == 2
    assert figures["memory_kind"] == "rss" and figures["eval_targets"] > 0 and figures["start_s"] > 1e9


def test_a_run_without_a_finite_loss_fails(here, monkeypatch):
    real, lost = finished.load_run, [{"step": 3, "eval_loss": None}]
    monkeypatch.setattr(finished, "load_run", lambda folder: dataclasses.replace(real(folder), evals=lost))
    with pytest.raises(RunError, match="a held-out loss is not finite"):
        quality.train_run(run(output="trained"), 0.0)
