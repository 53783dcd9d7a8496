"""Averages of the weights: their values, what is evaluated, saved, resumed, exported and planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from meshes import further
from optrush.decide import decide
from optrush.exporting import export_run
from optrush.planner import search
from optrush.trainer import run as fit
from optrush.trainer.trainer import Trainer, evaluate

from trials import assembled, golden_run, shaped, steps, weights

DECAY = 0.75


def averaged(box: Path, **more: Any) -> Trainer:
    return assembled(golden_run(box, packed=True, ema={"decay": DECAY}, **more))


def averages(job: Trainer) -> dict[str, torch.Tensor]:
    return {name: states["ema"].clone() for name, states in job.optimizer.state().items()}


def by_hand(job: Trainer, n: int) -> dict[str, torch.Tensor]:
    """The averages in float64, from the weights before and after each step."""
    found = {name: w.double() for name, w in weights(job).items()}
    for k in range(1, n + 1):
        list(steps(job, 1, first=k))
        found = {name: DECAY * found[name] + (1 - DECAY) * w.double() for name, w in weights(job).items()}
    return found


@pytest.mark.parametrize(
    "with_", [{}, {"fused_adamw": {}}, {"adam8bit": {}}, {"lora": {}}, {"freeze": {"layers": "0"}}], ids=str
)
def test_averages_are_those_of_the_weights(box: Path, with_: dict[str, Any]) -> None:
    job = averaged(box, **with_)
    wanted = by_hand(job, 4)
    for name, average in averages(job).items():
        torch.testing.assert_close(average.double(), wanted[name], rtol=1e-6, atol=1e-7)


def test_a_skipped_update_changes_nothing(box: Path) -> None:
    job = averaged(box)
    skipped = torch.tensor(True)
    job.optimizer.step(job.lr, job.scale, skipped)
    assert not any(s.any() for states in job.optimizer.state().values() for s in states.values())
    list(steps(job, 1))
    before = averages(job)
    job.optimizer.step(job.lr, job.scale, skipped)
    assert all(torch.equal(a, before[n]) for n, a in averages(job).items())


def test_what_is_evaluated(box: Path) -> None:
    """The averages, put in and taken out; with `evaluate: false` the weights."""
    sets = [f"data.eval={box}/held.jsonl"]
    job, other = averaged(box, sets=sets), assembled(golden_run(box, packed=True, sets=sets))
    assert evaluate(job).loss == evaluate(other).loss, "before the first update"
    list(steps(job, 3))
    before, shadow = weights(job), averages(job)
    found = evaluate(job).loss
    assert all(torch.equal(w, before[n]) for n, w in weights(job).items())
    for t in other.trained:
        t.local.copy_(shadow[t.name])
    assert found == pytest.approx(evaluate(other).loss, rel=1e-6)
    raw = assembled(golden_run(box, packed=True, ema={"decay": DECAY, "evaluate": False}, sets=sets))
    list(steps(raw, 3))
    for t in other.trained:
        t.local.copy_(before[t.name])
    assert evaluate(raw).loss == evaluate(other).loss


@pytest.mark.parametrize(
    ("with_", "export"), further([({}, True), ({"lora": {}}, False), ({}, False), ({"lora": {}}, True)], 2), ids=str
)
def test_what_is_exported(box: Path, tmp_path: Path, export: bool, with_: dict[str, Any]) -> None:
    """At the end of a run, and from its checkpoint: the same, the averages or the weights."""

    def trained(folder: str, **ema: Any) -> tuple[dict[str, torch.Tensor], Path]:
        sets = [f"output={tmp_path / folder}", "train.steps=3", "train.save_every=1"]
        config = golden_run(box, packed=True, sets=sets, **with_, **({"ema": ema} if ema else {}))
        assert fit.run(fit.RunRequest(decide(config))).code == 0
        return load_file(tmp_path / folder / "model/model.safetensors"), tmp_path / folder

    (found, folder), (plain, _) = trained("a", decay=DECAY, export=export), trained("b")
    same = all(torch.equal(w, plain[n]) for n, w in found.items())
    assert same is not export
    again = load_file(export_run(folder, tmp_path / "again").out / "model.safetensors")
    assert all(torch.equal(w, found[n]) for n, w in again.items())
    if export and not with_:
        raw = assembled(golden_run(box, packed=True, sets=["train.steps=3"]))
        wanted = by_hand(raw, 3)
        head = raw.weight_map.split("head.weight", wanted["head.weight"])
        for name, w in head:
            torch.testing.assert_close(found[name].double(), w, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("with_", [("bf16", "adam8bit"), ("muon",), ("fused-adamw",)], ids=str)
def test_a_plan_counts_four_bytes_a_parameter(with_: tuple[str, ...]) -> None:
    plain, more = (search.predict(shaped("llama-3.2-1b", *with_, *ema), "h200") for ema in ((), ("ema",)))
    lines = [{line.name: line.bytes for line in found.lines} for found in (plain, more)]
    extra = {name: n for name, n in lines[1].items() if name.startswith("ema.")}
    assert sum(extra.values()) == pytest.approx(4 * 1_235_814_400, rel=1e-3)
    assert {name: n for name, n in lines[1].items() if name not in extra} == lines[0]
    assert more.tokens_per_s is not None and plain.tokens_per_s is not None and more.tokens_per_s < plain.tokens_per_s


def test_a_plan_of_what_is_frozen_or_sharded() -> None:
    def ema(*withs: str, hardware: str = "h200") -> float:
        found = search.predict(shaped("llama-3.2-1b", "ema", *withs, rows=8, windows=2), hardware)
        return sum(line.bytes for line in found.lines if line.name.startswith("ema."))

    assert ema("freeze:layers=0-7") < 0.7 * ema()
    assert ema("fsdp", hardware="2xh200") == pytest.approx(ema() / 2, rel=1e-3)


@pytest.mark.parametrize(("decay", "share"), [(0.999, "99%"), (0.9999, "100%"), (0.9, "43%"), (0.7, ""), (0.5, "")])
def test_averages_that_are_mostly_the_first_weights_are_noted(box: Path, decay: float, share: str) -> None:
    notes = assembled(golden_run(box, packed=True, ema={"decay": decay})).notes
    found = [note for note in notes if note.startswith("ema: after")]
    note = f"ema: after 8 steps {share} of the averages are the weights before training: decay=0.562 leaves 1%"
    assert found == ([note] if share else [])
