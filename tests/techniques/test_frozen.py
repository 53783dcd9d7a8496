"""Freezing a part of the model: which parameters, what it computes, what a plan says, what is saved."""

from __future__ import annotations

import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from meshes import further
from optrush.config import Config, parse_config
from optrush.decide import decide
from optrush.exporting import export_run
from optrush.hardware import parse_hardware
from optrush.models.shapes import SHAPES, ModelShape
from optrush.planner import ledger, search
from optrush.techniques import ALL
from optrush.techniques.freeze import _matches, published_names
from optrush.trainer import run as fit
from optrush.trainer.trainer import Trainer

from memory import supposed
from trials import assembled, first_gradients, golden_run, ledgers, steps, weights

CLASSES = ALL
EIGHT = "blocks.[0-7].*"


def run(*names: str, shape: str = "llama-3.2-1b", rows: int = 4, more: tuple[str, ...] = ()) -> Config:
    text = f"""
model: {{shape: {shape}}}
objective: pretrain
data: {{random: 32}}
batch: {{seq: 1024, tokens: {rows * 1024}, micro_tokens: {rows * 1024}}}
with: {{bf16: {{}}, fused-adamw: {{}}, attention: {{}}, {f"freeze: {{names: {list(names)}}}" if names else ""}}}
output: unused
"""
    return parse_config(text, "case", (), more)


def test_a_checkpoint_has_what_is_trained() -> None:
    shape = ModelShape.read(SHAPES["llama-3.2-1b"])
    frozen = sum(n for name, n in shape.named_parameters() if name.startswith("embedding.") or fnmatchcase(name, EIGHT))
    ((book,), *_) = ledgers(run(EIGHT, "embedding.*"), parse_hardware("h200")[0], 1, CLASSES)
    assert ledger.saved_bytes(book) == pytest.approx((shape.parameters - frozen) * 6)


def test_a_tied_head_that_is_frozen_has_no_gradient_to_add() -> None:
    for names, gone in (((EIGHT,), False), ((EIGHT, "embedding.*"), True)):
        ((book,), *_) = ledgers(run(*names), parse_hardware("h200")[0], 1, CLASSES)
        assert all(line.gone == gone for line in book.lines if "tied" in line.tags)


def test_flops() -> None:
    """Of 6 a weight: 4 where it is frozen, and 2 where all that is below is frozen, too."""
    shape = ModelShape.read(SHAPES["llama-3.2-1b"])
    block = sum(linear.inputs * linear.outputs for linear in shape.linears.values())
    head = shape.vocab * shape.width
    for names, saved in (((EIGHT,), 8 * 2 * block), ((EIGHT, "embedding.*"), 8 * 4 * block + 2 * head)):
        with supposed(run(*names), CLASSES) as job:
            assert job.model.frozen_flops == saved


# Which parameters, and what becomes of them.


def names_of(job: Trainer) -> set[str]:
    return {name for name, p in job.model.named_parameters() if not p.requires_grad}


CHOSEN: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "layers": ({"layers": "0"}, lambda n: n.startswith("blocks.0.")),
    "a number": ({"layers": 1}, lambda n: n.startswith("blocks.1.")),
    "a list": ({"layers": [1]}, lambda n: n.startswith("blocks.1.")),
    "spaces": ({"layers": " 0 - 0 , 1"}, lambda n: n.startswith("blocks.")),
    "names of files": ({"names": ["model.layers.0.mlp.*", "embed_tokens"]},
                       lambda n: n == "embedding.weight" or n.startswith(("blocks.0.gate_up", "blocks.0.down"))),
    "one text": ({"names": "*layernorm.weight"}, lambda n: ".norm" in n),
    "own names": ({"names": ["blocks.*.down.weight"]}, lambda n: n.endswith("down.weight")),
    "both": ({"layers": "0", "names": ["o_proj"]}, lambda n: n.startswith("blocks.0.") or ".o." in n),
    "all pieces": ({"names": ["gate_proj", "up_proj"]}, lambda n: "gate_up" in n),
}  # fmt: skip


@pytest.mark.parametrize("kind", further([*CHOSEN][::2] + [*CHOSEN][1::2], 5))
def test_what_is_frozen_stays_and_the_rest_learns_as_it_would(box: Path, kind: str) -> None:
    """The first step's gradients are those of a run of everything; nothing else moves; a plan counts the same."""
    options, wanted = CHOSEN[kind]
    config = golden_run(box, packed=True, freeze=options)
    job, everything = assembled(config), assembled(golden_run(box, packed=True))
    frozen = names_of(job)
    assert frozen == {n for n, _ in everything.model.named_parameters() if wanted(n)} and frozen
    before = {n: p.detach().clone() for n, p in job.model.named_parameters()}
    (loss, grads), (other, whole) = first_gradients(job), first_gradients(everything)
    assert loss == other and grads.keys() == whole.keys() - frozen
    for name, grad in grads.items():
        torch.testing.assert_close(grad, whole[name], rtol=1e-6, atol=1e-8, msg=name)
    list(steps(job, 2))
    for name, p in job.model.named_parameters():
        assert torch.equal(p, before[name]) == (name in frozen), name
    assert not job.optimizer.state().keys() & frozen


LOWER: dict[str, Any] = {"layers": "0", "names": ["embed_tokens", "lm_head"]}


def frozen_figures(box: Path, with_: dict[str, Any], rows: int = 2) -> tuple[list[tuple[float, float]], Any]:
    job = assembled(golden_run(box, packed=True, rows=rows, freeze=LOWER, **with_))
    return [f[:2] for f in steps(job, 3)], weights(job)


BESIDE: dict[str, dict[str, Any]] = {
    "recompute": {"recompute": {}}, "fused": {"fused-adamw": {}, "fused-loss": {}, "attention": {}},
    "8 bits": {"adam8bit": {}}, "muon": {"muon": {}}, "sums": {"selective-recompute": {}},
}  # fmt: skip


@pytest.mark.parametrize("beside", further(list(BESIDE)[::-1], 2))
def test_beside_others(box: Path, beside: str) -> None:
    plain, _ = frozen_figures(box, {})
    figures, _ = frozen_figures(box, BESIDE[beside])
    near = 1e-4 if beside in ("recompute", "fused", "sums") else 0.05
    assert [f[0] for f in figures] == pytest.approx([f[0] for f in plain], rel=near)
    assert figures[0] == pytest.approx(plain[0], rel=1e-4)


def test_a_run_exports_every_weight(box: Path, tmp_path: Path) -> None:
    config = golden_run(box, packed=True, freeze={"layers": "0"}, sets=[f"output={tmp_path}/out", "train.steps=2"])
    assert fit.run(fit.RunRequest(decide(config))).code == 0
    base, found = (load_file(f / "model.safetensors") for f in (box / "untied", tmp_path / "out/model"))
    assert base.keys() == found.keys()
    for name, w in base.items():
        assert torch.equal(w, found[name]) == name.startswith("model.layers.0."), name
    assert export_run(tmp_path / "out", tmp_path / "again").out.is_dir()
    assert torch.equal(load_file(tmp_path / "again/model.safetensors")["lm_head.weight"], found["lm_head.weight"])


def test_through_transformers(box: Path) -> None:
    sets = ["model.implementation=transformers"]
    job = assembled(golden_run(box, freeze={"layers": "0", "names": ["embed_tokens"]}, sets=sets))
    entries = job.weight_map.entries
    pieces = {n: entries[n].pieces[0][0] for n, _ in job.model.named_parameters()}
    assert names_of(job) == {n for n, piece in pieces.items() if ".layers.0." in piece or "embed_tokens" in piece}
    list(steps(job, 1))


def test_names_of_files_are_those_of_the_model(box: Path) -> None:
    """What a plan takes for the names of a family is what its files have."""
    job = assembled(golden_run(box))
    assert job.env.shape is not None
    for name, pieces in published_names(job.env.shape).items():
        assert pieces == [piece for piece, _ in job.weight_map.entries[name].pieces], name


def test_half_frozen_needs_less(box: Path) -> None:
    whole, half = (search.predict(run(*names), "h200") for names in ((), (EIGHT, "embed_tokens")))
    lines = [{line.name: line.bytes for line in found.lines} for found in (whole, half)]
    assert lines[1]["states.blocks"] == pytest.approx(lines[0]["states.blocks"] / 2, rel=0.02)
    assert half.peak_bytes < 0.7 * whole.peak_bytes


@pytest.mark.parametrize("name", ["*a" * 20 + "b", "*" * 60 + "x", "*?" * 30 + "!", "[!a]*" * 20 + "z"])
def test_names_with_many_stars_match_at_once(name: str) -> None:
    began = time.perf_counter()
    assert not _matches(name, [f"blocks.{n}.{'a' * 60}.weight" for n in range(200)])
    assert time.perf_counter() - began < 1
