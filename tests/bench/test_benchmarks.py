"""Ladders and programs behind the published figures, as far as they can be asked without the GPU they are for."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from optrush import config, plan, technique
from optrush.bench import ladder, peer, peer_worker
from optrush.hardware import named
from optrush.prepare import prepare

FOLDER = Path(__file__).parents[2] / "benchmarks"
CLIMBED = {
    "adapter-levers": ("llama1b-peers",),
    "adapters": ("llama1b-peers", "llama8b"),
    "eight": ("llama8b",),
    "least": ("llama1b-peers", "llama8b"),
    "levers": ("llama1b-peers",),
    "longest": ("llama8b",),
    "longest-qlora": ("llama8b",),
    "peers-best": ("llama1b-peers",),
    "qlora": ("llama8b",),
    "rows": ("llama1b-peers",),
    "small-card": ("llama3b",),
}


@pytest.mark.parametrize(("name", "load"), [(n, load) for n, loads in CLIMBED.items() for load in loads])
def test_every_rung_is_one_that_an_h200_takes(name, load, monkeypatch):
    for module in (technique, peer):
        monkeypatch.setattr(module, "library", lambda name: "1")
    h200 = named("h200")[0]
    run = config.parse((FOLDER / f"{load}.yaml").read_text(), load)
    climbed = ladder.find(str(FOLDER / f"{name}.yaml"), run)
    for rung in ladder.rungs(climbed, run, True):
        prepared = prepare(rung.run, device=h200)
        if rung.peer is not None:
            peer_worker.check(rung.peer, rung.run, prepared.setup.device)
            continue
        said = plan.predict(rung.run, "h200")
        assert said.fits, f"{name}: {rung.name} takes {said.peak_bytes / 2**30:.1f} GiB"


def test_every_ladder_of_the_folder_is_looked_at():
    looked = {*CLIMBED, "chats", "loader"}  # the last two read texts that are made first
    assert {f.stem for f in FOLDER.glob("*.yaml") if "rungs:" in f.read_text()} == looked


def test_no_lever_changes_the_loss_kernel_unawares():
    """A rung's options replace all of a technique's."""
    for name in ("levers", "adapter-levers"):
        run = config.parse((FOLDER / "llama1b-peers.yaml").read_text(), name)
        for rung in ladder.rungs(ladder.find(str(FOLDER / f"{name}.yaml"), run), run, True):
            assert rung.run.with_["fused-loss"]["impl"] == "quack", rung.name
            assert rung.run.with_["fused-loss"]["chunk"] in (4096, 8192, 16384), rung.name


@pytest.fixture
def program(monkeypatch):
    """A program of the folder, by its name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def test_the_device_is_busy_where_one_kernel_runs(program):
    assert program("kernels").union([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.8)]) == 4.0


CURVE = """
model: tiny
objective: sft
data: {{path: {0}/train.jsonl, eval: {0}/held.jsonl, max_samples: 40, too_long: truncate}}
batch: {{seq: 768, tokens: 768, micro_tokens: 768}}
optim: {{lr: 1.0e-3, schedule: constant, warmup: 0}}
train: {{steps: 10, log_every: 1}}
output: {0}/out
with: {{packing: {{}}}}
"""


def curves(program, monkeypatch, capsys, folder, *more):
    (folder / "run.yaml").write_text(CURVE.format(folder))
    monkeypatch.setattr(sys, "argv", ["curves.py", str(folder / "run.yaml"), "--with", "bf16", "--seeds", "2", *more])
    module = program("curves")
    monkeypatch.setattr(module, "CONVERSATIONS", 60)
    monkeypatch.setattr(module, "HELD", 5)
    module.main()
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_curves_with_and_without(program, monkeypatch, capsys, tmp_path):
    *runs, summary = curves(program, monkeypatch, capsys, tmp_path, "--write")
    assert [(r["seed"], r["with"]) for r in runs] == [(0, None), (0, "bf16"), (1, None), (1, "bf16")]
    assert all(len(r["losses"]) == 10 and r["losses"][9] < r["losses"][0] for r in runs)
    a, b, c, d = (r["held_out"] for r in runs)
    assert summary["difference"] == [b - a, d - c]
    assert summary["scatter"] == pytest.approx(abs(a - c) / 2**0.5)
    assert 0 < abs(summary["mean"]) < 0.1 and not (tmp_path / "out").exists()


def test_a_curve_that_diverges_is_said(program, monkeypatch, capsys, tmp_path):
    with pytest.raises(SystemExit, match="diverged"):
        curves(program, monkeypatch, capsys, tmp_path, "--write", "--set", "optim.lr=1e30", "--set", "optim.clip=null")
    runs = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(runs) == 4 and all(r["held_out"] is None for r in runs)


def test_nobodys_files_are_overwritten(program, monkeypatch, capsys, tmp_path):
    (tmp_path / "held.jsonl").write_text("mine")
    with pytest.raises(SystemExit, match="not there yet"):
        curves(program, monkeypatch, capsys, tmp_path, "--write")
    assert (tmp_path / "held.jsonl").read_text() == "mine" and not (tmp_path / "train.jsonl").exists()


@pytest.mark.parametrize("sets", ["train.steps=15", "train.steps=null", "train.log_every=2", "data.eval=0.1"])
def test_what_curves_cannot_compare(program, monkeypatch, capsys, tmp_path, sets):
    with pytest.raises(SystemExit, match="wanted:"):
        curves(program, monkeypatch, capsys, tmp_path, "--set", sets)
