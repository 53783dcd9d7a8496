"""`optrush tune`: what is measured, what is refused and why, going on, the budget; one tuning with real processes."""

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_climb import stop_when_it_hangs

from optrush.benchmark import tune
from optrush.benchmark.record import read_records
from optrush.config import parse_config
from optrush.planner import search
from optrush.planner.search import Candidate, SearchResult
from optrush.report import bench
from optrush.techniques.compile import Compile

from toy import document, parsed, put

SETS: list[dict[str, Any]] = [
    {"fused-adamw": {}}, {"fused-loss": {}}, {"recompute": {}}, {"packing": {}}, {"fused-adamw": {}, "fused-loss": {}},
]  # fmt: skip


@pytest.fixture
def planned(monkeypatch):
    """The plan's best settings are SETS, in this order; a process a setting, unless a test takes more."""
    monkeypatch.setattr(tune, "REPEATS", 1)

    def found(config, **_):
        settings = [config.model_copy(update={"with_": with_}) for with_ in SETS]
        return SearchResult(tuple(Candidate(c.with_, 2, search.predict(c)) for c in settings), 5, ())

    monkeypatch.setattr(search, "search", found)


def outcomes(found):
    return {t["name"]: t["outcome"] for t in json.loads(found.out)["tried"]}


def test_the_fastest_setting_that_is_proved_is_written(call, fakes, planned, monkeypatch):
    """A faster one that is wrong, a slow one, one without memory and one that cannot be built are refused."""
    monkeypatch.setattr(tune, "REPEATS", 2)
    fakes.does(
        fused_adamw={"speed": 1500.0}, fused_loss={"speed": 9000.0, "losses": [2.0, 1.501]}, recompute={"speed": 400.0},
        packing={"do": "kill"}, fused_adamw__fused_loss={"do": "refuse"},
    )  # fmt: skip
    found = call("tune", "run.yaml", "--json")
    assert found.code == 0, found.err
    told = json.loads(found.out)
    assert (told["winner"], round(told["ratio"], 3), told["proof"]["against"]) == ("setting 1", 1.5, "plain baseline")
    said = outcomes(found)
    assert said["setting 2"].startswith("refused: wrong: losses differ by 0.00067 (relative) from `plain baseline`")
    assert said["setting 3"] == "refused: slower, 0.40x"
    assert said["setting 4"].startswith("refused: killed by signal 9 (SIGKILL), most likely out of host memory")
    assert said["setting 5"] == "refused: asked: a found: b do: c"
    first = ["none", "none", "fused-adamw", "fused-loss", "recompute", "packing", "fused-adamw fused-loss"]
    assert fakes.started == [*first, "none", "fused-adamw"], "the others are not repeated"
    text = Path("run.tuned.yaml").read_text()
    assert text.startswith("# optrush tune: 1.50x of the original configuration, the same losses, ")
    assert "spent, pays back after " in text and "\n# optrush train run.tuned.yaml\n" in text
    given = {**yaml.safe_load(Path("run.yaml").read_text()), "with": {"fused-adamw": {}}}
    assert parse_config(text, "tuned") == parse_config(yaml.safe_dump(given), "given")
    again = call("tune", "run.yaml")
    assert again.code == 0 and fakes.started == [] and "setting 1          " in again.out
    peaks = dict(re.findall(r"^(setting \d) .* (\d\.\d\d)  (?:taken|refused)", again.out, re.MULTILINE))
    assert peaks["setting 1"] == peaks["setting 3"] == "0.93" and peaks["setting 4"] != "0.93", "measured, else planned"
    assert again.out.splitlines()[-2:] == [text.splitlines()[0][len(tune.MARK) :], "next: optrush train run.tuned.yaml"]
    assert len(read_records(Path("run.tuned"))) == 7


def test_the_configuration_stays_where_nothing_is_faster(call, fakes, planned):
    found = call("tune", "run.yaml", "--with", "fused-loss", "--out", "new.yaml")
    assert found.code == 0, found.err
    assert "the configuration stays unchanged: nothing measured is faster beyond the spread" in found.out
    assert parse_config(Path("new.yaml").read_text(), "new").with_ == {"fused-loss": {}}


@pytest.mark.parametrize(("does", "code"), [({"fused_adamw": {}}, 0), ({"fused_adamw": {"do": "kill"}}, 1)])
def test_a_configuration_that_does_not_run(call, fakes, planned, does, code):
    names = ("none", "fused_loss", "recompute", "packing", "fused_adamw__fused_loss")
    fakes.does(**{name: {"do": "kill"} for name in names}, **does)
    found = call("tune", "run.yaml")
    assert found.code == code, found.err
    assert Path("run.tuned.yaml").exists() == (code == 0)
    if code:
        assert "asked: optrush tune\nfound: plain baseline: refused: killed by signal 9" in found.err
    else:
        assert "`setting 1` runs, the original configuration does not, nothing else to prove it" in found.out


def test_a_tuning_that_was_stopped_goes_on(call, fakes, planned):
    fakes.does(fused_loss={"do": "hang"})
    stop_when_it_hangs(fakes, signal.SIGTERM)
    found = call("tune", "run.yaml")
    assert found.code == 143 and "run the same command to continue" in found.err, found.err
    assert fakes.started == ["none", "none", "fused-adamw", "fused-loss"] and not Path("run.tuned.yaml").exists()
    fakes.does()
    assert call("tune", "run.yaml").code == 0
    assert fakes.started[:4] == ["fused-loss", "recompute", "packing", "fused-adamw fused-loss"]
    other = call("tune", "run.yaml", "--set", "optim.lr=1e-4")
    assert other.code == 2 and "they belong to another configuration" in other.err
    Path("run.tuned/tune.json").write_text("{}")
    damaged = call("tune", "run.yaml")
    assert damaged.code == 2 and "tune.json is damaged" in damaged.err
    for begun in Path("run.tuned").iterdir():  # what is there before tune.json is written
        shutil.rmtree(begun) if begun.is_dir() else begun.unlink()
    Path("run.tuned/rungs").mkdir()
    Path("run.tuned/tune.json.tmp").write_text("{")
    assert call("tune", "run.yaml").code == 0 and read_records(Path("run.tuned"))


def test_the_budget(call, fakes, planned, monkeypatch):
    """The configuration is always measured; then what the budget has time for, and more of it with a larger one."""
    found = call("tune", "run.yaml", "--budget", "1s", "--json")
    assert found.code == 0 and fakes.started == ["none", "none"], found.err
    assert set(outcomes(found).values()) == {"measured", tune.LATE}
    assert "5 settings not measured: out of time" in Path("run.tuned.yaml").read_text()
    monkeypatch.setattr(tune, "PROCESS_S", 1.0)
    assert call("tune", "run.yaml", "--budget", "1h").code == 0
    assert fakes.started[:5] == ["fused-adamw", "fused-loss", "recompute", "packing", "fused-adamw fused-loss"]


def test_one_long_setting_leaves_time_to_the_others(call, fakes, planned, monkeypatch):
    monkeypatch.setattr(tune.TuneState, "expected_s", lambda _, rung: 1e6 if rung.name == "setting 2" else 1.0)
    found = call("tune", "run.yaml", "--budget", "10m", "--json")
    assert found.code == 0, found.err
    assert [name for name, outcome in outcomes(found).items() if outcome == tune.LATE] == ["setting 2"]


def test_a_dry_run_writes_nothing(call, fakes, planned):
    before = sorted(Path().iterdir())
    found = call("tune", "run.yaml", "--dry-run", "--budget", "5m")
    assert found.code == 0, found.err
    assert "  + fused-adamw, + fused-loss" in found.out and found.out.endswith("by the plan, 5 min at most\n")
    assert sorted(Path().iterdir()) == before and fakes.started == []


@pytest.mark.parametrize(("flags", "said"), [
    (["--out", "mine.yaml"], "a file not written by optrush tune"),
    (["--out", "taken.yaml"], "taken exists without tuning records"),
    (["--out", "new"], "use a name that ends in .yaml"), (["--out", "no/new.yaml"], "no folder no"),
    (["--budget", "soon"], "write 90s, 10m or 1h"), (["--with", "fusd-loss"], "no such technique"),
])  # fmt: skip
def test_refusals(call, fakes, flags, said):
    Path("mine.yaml").write_text("mine: 1\n")
    Path("taken").mkdir()
    Path("taken/mine").touch()
    found = call("tune", "run.yaml", *flags)
    assert found.code == 2 and said in found.err, found.err
    assert fakes.started == [] and Path("mine.yaml").read_text() == "mine: 1\n"


def test_what_a_run_learns_stays():
    """Techniques of other maths are in every setting as written, and none is added; the plain baseline has no other."""
    config = parsed(**{"with": {
        "bf16": {"rounding": "kahan"}, "lora": {"rank": 4, "dropout": 0.1}, "recompute": {"every": 2},
        "neftune": {"alpha": 3.0},
    }})  # fmt: skip
    rungs, notes = tune.plan_rungs(config)
    learnt = {"bf16": {"rounding": "kahan"}, "lora": {"rank": 4, "dropout": 0.0}}
    assert [r.name for r in rungs[:2]] == ["plain baseline", "as it is"] and len(rungs) > 3 and not notes
    assert rungs[0].config.with_ == learnt
    assert all(tune.kept_techniques(r.config) == learnt for r in rungs)
    assert all(tune.with_rung(config, r).with_["lora"]["dropout"] == 0.1 for r in rungs), (
        "it is off for the proof alone"
    )
    assert all(
        "neftune" not in r.config.with_ and tune.with_rung(config, r).with_["neftune"] == {"alpha": 3.0} for r in rungs
    )
    assert any("recompute" not in r.config.with_ for r in rungs[2:]), "what saves memory may go"
    assert all(r.config.model_copy(update={"with_": {}, "batch": config.batch, "train": config.train})
               == config.model_copy(update={"with_": {}}) for r in rungs)  # fmt: skip


@pytest.mark.slow
def test_a_real_tuning(call, monkeypatch):
    """The largest step, the proof and timed steps, in a process of the configuration, the plain one, and of a setting.

    What is held out is rehearsed, and not evaluated.
    """
    monkeypatch.setattr(Compile, "variants", lambda env: iter(()))
    monkeypatch.setattr(bench, "write_bench", lambda folder: None)
    for name, value in {"BEST": 1, "REPEATS": 1, "MOST": 4}.items():
        monkeypatch.setattr(tune, name, value)
    batch = {"seq": 64, "tokens": 128, "micro_tokens": 64}
    put(Path("run.yaml"), document(data={"random": 64, "eval": 0.25}, batch=batch))
    found = call("tune", "run.yaml", "--json")
    assert found.code == 0, found.err
    told = json.loads(found.out)
    assert [t["name"] for t in told["tried"]] == ["as it is", "setting 1"]
    records = {r.rung: r for r in read_records(Path("run.tuned"))}
    proof = records["setting 1"].proof
    assert proof is not None and proof["ok"] and proof["cosine"] > 0.999 and proof["against"] == "as it is"
    assert all(r.tokens_per_s and r.error is None for r in records.values()), records
