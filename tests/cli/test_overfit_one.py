"""`optrush train --overfit N`: it learns one batch by heart, or names the mistake; each mistake is made here."""

import dataclasses
import json
import math
import os
import re
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from optrush.config import parse_config
from optrush.decide import decide
from optrush.trainer import overfit as module
from optrush.trainer.overfit import OverfitTrace, likely_cause, run_overfit

from clirun import edited, refused, write_rows

SMALL = {"batch": {"seq": 128, "tokens": 128}, "optim": {"lr": 3e-3}, "data": {"eval": None}}


def trace(**changes):
    """Steps that fell a little, and stopped."""
    losses = [7.0 - 5.0 * (1 - 0.8**n) for n in range(100)]
    return dataclasses.replace(OverfitTrace(losses, 7.0, losses[-1], [1.0] * 100, False, 1e-3, 100), **changes)


def document(found, code):
    assert found.code == code, found
    answer: dict[str, Any] = json.loads(found.out)
    assert answer["reached"] == (code == 0) == (answer["cause"] is None)
    assert bool(answer["do"]) == (code == 1)
    return answer


def test_one_batch_is_learnt(call, write, here):
    """To a loss near zero, on the run's own first step; nothing is written."""
    before = sorted(here.rglob("*"))
    config = write(**SMALL)
    found = call("train", config, "--overfit", "1", "--json")
    answer = document(found, 0)
    assert "step 10/200  loss " in found.err and "packing (window=65536): 1 change" in found.err
    assert answer["loss"] <= 0.05 == answer["target"] and answer["steps"] <= 200 and answer["floor"] == 0
    assert 7 < answer["first_loss"] < 8.5 and answer["terms"] > 20
    assert sorted(here.rglob("*")) == sorted([*before, here / config])
    assert call("train", config, "--set", "train.steps=1").code == 0
    first = json.loads((here / "out" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(answer["first_loss"], rel=1e-6), "the very batch that the run begins with"


def on_a_rank(text):
    return dataclasses.asdict(run_overfit(decide(parse_config(text, "run.yaml")), 2, 8))


def test_several_batches_and_ranks(box, pair):
    run = {
        "model": str(box / "untied"), "objective": "sft", "data": {"path": str(box / "chat.jsonl")},
        "batch": {"seq": 48, "tokens": 384}, "optim": {"lr": 1e-3}, "output": str(box / "none"),
        "with": {"packing": {}, "fsdp": {}},
    }  # fmt: skip
    one, two = pair(on_a_rank, yaml.safe_dump(run))
    del run["with"]["fsdp"]
    alone = on_a_rank(yaml.safe_dump(run))
    for answer in (one, two):
        assert answer["batches"] == 2 and answer["steps"] == 8 and answer["cause"] == "lr too small"
        for key in ("first_loss", "loss", "floor", "terms"):
            assert answer[key] == pytest.approx(alone[key], rel=1e-5, abs=1e-3), key
    assert one["found"] == two["found"] and not (box / "none").exists()


@pytest.mark.parametrize(("lr", "cause", "says", "do"), [
    ("1e-6", "lr too small", "the loss falls too slowly", "optim.lr=1e-05"),
    ("3.0", "lr too large", "", "optim.lr=0.3"),
])  # fmt: skip
def test_learning_rates(call, write, lr, cause, says, do):
    sets = ["--set", f"optim.lr={lr}", "--overfit-steps", "12"]
    config = write(**SMALL)
    answer = document(call("train", config, "--overfit", "1", *sets, "--json"), 1)
    assert answer["cause"] == cause and says in answer["found"] and do in answer["do"], answer
    if cause == "lr too small":
        found = call("train", config, "--overfit", "1", *sets)
        first, *lines = found.out.splitlines()
        assert found.code == 1 and re.fullmatch(r"1 batch, \d+ terms of the loss: loss .* in 12 steps, \d+ s", first)
        assert lines == [f"found: {answer['found']}", f"do:    {answer['do']}"]


def test_weights_that_rounding_holds(call, write):
    sets = ["--set", "optim.lr=1e-7", "--overfit-steps", "4", "--with", "bf16:rounding=nearest", "--json"]
    answer = document(call("train", write(**SMALL), "--overfit", "1", *sets), 1)
    assert answer["cause"] == "lr too small"
    assert "rounding=stochastic (bfloat16 rounds small updates away)" in answer["do"]


def changed(model, folder, change):
    """The model with other weights."""
    edited(model, folder)
    (folder / "model.safetensors").unlink()
    tensors = {name: change(name, t) for name, t in load_file(model / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize(("change", "cause", "says"), [
    (lambda name, t: t * math.nan if "o_proj" in name else t, "not finite", "the loss is nan before"),
    (lambda _, t: torch.zeros_like(t), "no gradient", "the gradient is zero in every step"),
])  # fmt: skip
def test_broken_weights(
    call, write, here, model,
    change, cause, says,
):  # fmt: skip
    config = write(**SMALL, model=changed(model, here / "broken", change))
    answer = document(call("train", config, "--overfit", "1", "--overfit-steps", "4", "--json"), 1)
    assert answer["cause"] == cause and says in answer["found"]
    assert (answer["loss"] is None) == (cause == "not finite")


def test_pairs(call, write, here):
    """Of preferences: to the loss near zero that only right answers have; with smoothed labels to their entropy."""
    ask, good, bad = "How do I make a soup?", "Chop onions.", "No idea."
    talk = [{"role": "user", "content": ask}]
    answers = {k: [{"role": "assistant", "content": c}] for k, c in (("chosen", good), ("rejected", bad))}
    write_rows(here / "pairs.jsonl", [{"prompt": talk, **answers}])
    config = write(**{**SMALL, "data": {"path": "pairs.jsonl", "eval": None}}, objective="dpo")
    answer = document(call("train", config, "--overfit", "1", "--json"), 0)
    assert answer["first_loss"] == pytest.approx(math.log(2)) and answer["loss"] <= 0.05 and answer["terms"] == 1
    smooth = document(call("train", config, "--overfit", "1", "--set", "dpo.label_smoothing=0.2", "--json"), 0)
    floor = -0.2 * math.log(0.2) - 0.8 * math.log(0.8)
    assert smooth["floor"] == pytest.approx(floor) and floor < smooth["loss"] <= 1.01 * floor


def test_only_the_pairs_that_are_shown_get_a_reference(call, write, here):
    """And the cache has none of them."""
    rows = [{"prompt": f"Soup {i}? ", "chosen": "Yes, with two onions.", "rejected": "No."} for i in range(40)]
    write_rows(here / "pairs.jsonl", rows)
    config = write(**{**SMALL, "data": {"path": "pairs.jsonl", "eval": 0.2, "cache": "kept"}}, objective="dpo")
    found = call("train", config, "--overfit", "2", "--json")
    answer = document(found, 0)
    assert answer["first_loss"] == pytest.approx(math.log(2), abs=1e-6) and answer["loss"] <= 0.05
    assert "the reference of" not in found.err and not (here / "kept" / "reference").exists()


def test_dropout_keeps_the_loss_up(call, write, here, model):
    config = AutoConfig.for_model(
        "gpt2", vocab_size=2048, n_embd=64, n_layer=1, n_head=2, n_positions=128, bos_token_id=1, eos_token_id=2,
        resid_pdrop=0.6, embd_pdrop=0.6,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(here / "dropping")
    AutoTokenizer.from_pretrained(model).save_pretrained(here / "dropping")
    run = write(**{**SMALL, "optim": {"lr": 1e-2}}, model="dropping")
    answer = document(call("train", run, "--overfit", "1", "--overfit-steps", "120", "--json"), 0)
    assert answer["loss"] <= 0.05 and "where dropout is on" in answer["found"]


def test_nothing_is_learnt(call, write, monkeypatch):
    """Rows whose answers were all cut off are refused before; batches without a target can still come first."""
    inner = module.batches

    def without(*given):
        for window in inner(*given):
            yield [dataclasses.replace(b, labels=torch.full_like(b.labels, -100), n_terms=0) for b in window]

    monkeypatch.setattr(module, "batches", without)
    answer = document(call("train", write(**SMALL), "--overfit", "1", "--json"), 1)
    assert answer["cause"] == "no targets" and answer["terms"] == 0 and answer["steps"] == 0
    assert "optrush data show" in answer["do"]


@pytest.mark.parametrize(("changes", "cause"), [
    ({}, "stuck"), ({"losses": [7.0, 3.0] * 20, "after": 3.0}, "lr too large"), ({"after": 8.0}, "lr too large"),
    ({"losses": [7.0, math.inf], "after": math.inf}, "lr too large"), ({"norms": [1.0, math.nan]}, "lr too large"),
    ({"losses": [7.0 - 0.01 * n for n in range(100)], "after": 6.0}, "lr too small"),
    ({"losses": [7.0] * 9, "after": 7.0}, "lr too small"), ({"before": math.nan}, "not finite"),
    ({"norms": [0.0] * 4}, "no gradient"),
])  # fmt: skip
def test_diagnoses(changes, cause):
    named, found, do = likely_cause(trace(**changes))
    assert named == cause and found and do


def test_flags_that_say_nothing_together(call, write):
    config = write(**SMALL)
    for flags, says in (
        (["--overfit", "1", "--dry-run"], "--overfit with --dry-run"),
        (["--overfit", "1", "--resume", "auto"], "leaves no checkpoint"),
        (["--overfit-steps", "9"], "no --overfit"),
        (["--json"], "no --dry-run and no --overfit"),
        (["--overfit", "101"], "200 steps, fewer than two passes over each batch"),
        (["--overfit", "90", "--set", "train.epochs=1"], "a run of "),
    ):
        refused(call("train", config, *flags), says)
    assert sorted(os.listdir()) == ["chat.jsonl", "run.yaml"]
