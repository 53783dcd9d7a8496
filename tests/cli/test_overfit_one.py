"""`optrush train --overfit N`: it learns one batch by heart, or names the mistake; each mistake is made here."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from test_wrong_input import refused
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from optrush.config import Dpo, parse_config
from optrush.data.batch import collate
from optrush.data.schema import Document
from optrush.resolve import resolve
from optrush.technique import Numerics, Part, Technique
from optrush.techniques import ALL
from optrush.trainer import overfit as module
from optrush.trainer.overfit import Floor, Seen, diagnose, overfit
from optrush.trainer.trainer import Trainer

from clirun import Found, edited, write_rows
from pair import Pair

Call = Callable[..., Found]
Write = Callable[..., str]
SMALL = {"batch": {"seq": 128, "tokens": 128}, "optim": {"lr": 3e-3}, "data": {"eval": None}}


def seen(**changes: Any) -> Seen:
    """Steps that fell a little, and stopped."""
    losses = [7.0 - 5.0 * (1 - 0.8**n) for n in range(100)]
    usual = Seen(losses, 7.0, losses[-1], [1.0] * 100, Floor(), 0.0, 1.0, False, 1e-3, 100)
    return dataclasses.replace(usual, **changes)


def document(found: Found, code: int) -> dict[str, Any]:
    assert found.code == code, found
    answer: dict[str, Any] = json.loads(found.out)
    assert answer["reached"] == (code == 0) == (answer["cause"] is None)
    assert bool(answer["do"]) == (code == 1)
    return answer


def test_one_batch_is_learnt(call: Call, write: Write, here: Path) -> None:
    """To a loss near zero, on the run's own first step; nothing is written."""
    before = sorted(here.rglob("*"))
    config = write(**SMALL)
    found = call("train", config, "--overfit", "1", "--json")
    answer = document(found, 0)
    assert "step 10/200  loss " in found.err and "packing (window=65536): 1 change" in found.err
    assert answer["loss"] <= 0.05 == answer["target"] and answer["steps"] <= 200 and answer["floor"] == 0
    assert 7 < answer["first_loss"] < 8.5 and answer["terms"] > 20 and answer["unmoved"] < 0.1
    assert sorted(here.rglob("*")) == sorted([*before, here / config])
    assert call("train", config, "--set", "train.steps=1").code == 0
    first = json.loads((here / "out" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(answer["first_loss"], rel=1e-6), "the very batch that the run begins with"


def on_a_rank(text: str) -> dict[str, Any]:
    return dataclasses.asdict(overfit(resolve(parse_config(text, "run.yaml")), 2, 8))


def test_several_batches_and_ranks(box: Path, pair: Pair) -> None:
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
        for key in ("first_loss", "loss", "floor", "terms", "unmoved"):
            assert answer[key] == pytest.approx(alone[key], rel=1e-5, abs=1e-3), key
    assert one["found"] == two["found"] and not (box / "none").exists()


@pytest.mark.parametrize(
    ("lr", "cause", "says", "do"),
    [
        ("1e-6", "lr too small", "the loss falls steadily", "optim.lr=1e-05"),
        ("3.0", "lr too large", "", "optim.lr=0.3"),
        ("1e-12", "weights do not move", "lr 1e-12 is too small", "raise optim.lr"),
    ],
)
def test_learning_rates(call: Call, write: Write, lr: str, cause: str, says: str, do: str) -> None:
    sets = ["--set", f"optim.lr={lr}", "--overfit-steps", "12"]
    config = write(**SMALL)
    answer = document(call("train", config, "--overfit", "1", *sets, "--json"), 1)
    assert answer["cause"] == cause and says in answer["found"] and do in answer["do"], answer
    if cause == "lr too small":
        found = call("train", config, "--overfit", "1", *sets)
        first, *lines = found.out.splitlines()
        assert found.code == 1 and re.fullmatch(r"1 batch, \d+ terms of the loss: loss .* in 12 steps, \d+ s", first)
        assert lines == [f"found: {answer['found']}", f"do:    {answer['do']}"]


def test_weights_that_rounding_holds(call: Call, write: Write) -> None:
    sets = ["--set", "optim.lr=1e-7", "--overfit-steps", "12", "--with", "bf16:rounding=nearest", "--json"]
    answer = document(call("train", write(**SMALL), "--overfit", "1", *sets), 1)
    assert answer["cause"] == "weights do not move" and answer["unmoved"] > 0.9
    assert "bfloat16 rounds updates of this size away" in answer["found"] and "rounding=stochastic" in answer["do"]


def changed(model: Path, folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> str:
    """The model with other weights."""
    edited(model, folder)
    (folder / "model.safetensors").unlink()
    tensors = {name: change(name, t) for name, t in load_file(model / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize(
    ("change", "cause", "says"),
    [
        (lambda name, t: t * math.nan if "o_proj" in name else t, "not finite", "the loss is nan before"),
        (lambda _, t: torch.zeros_like(t), "no gradient", "the gradient is zero in every step"),
    ],
)
def test_broken_weights(
    call: Call, write: Write, here: Path, model: Path,
    change: Callable[[str, torch.Tensor], torch.Tensor], cause: str, says: str,
) -> None:  # fmt: skip
    config = write(**SMALL, model=changed(model, here / "broken", change))
    answer = document(call("train", config, "--overfit", "1", "--overfit-steps", "4", "--json"), 1)
    assert answer["cause"] == cause and says in answer["found"]
    assert (answer["loss"] is None) == (cause == "not finite")


def test_data_that_contradicts_itself(call: Call, write: Write, here: Path) -> None:
    """One question, two answers: half of all times the first word is wrong, whatever the model knows."""
    turns = [[("user", "Soup or salad?"), ("assistant", a)] for a in ("Soup", "Salad")] * 2
    rows = [{"messages": [{"role": r, "content": c} for r, c in talk]} for talk in turns]
    write_rows(here / "chat.jsonl", rows)
    config = write(**{**SMALL, "batch": {"seq": 192, "tokens": 192}})
    answer = document(call("train", config, "--overfit", "1", "--json"), 0)
    assert answer["floor"] == pytest.approx(4 * math.log(2) / answer["terms"], rel=1e-9)
    assert answer["floor"] < answer["loss"] <= 1.01 * answer["floor"]
    assert "the loss cannot be lower: after '" in answer["found"] and "(2 x)" in answer["found"]


def test_pairs(call: Call, write: Write, here: Path) -> None:
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


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_pairs_that_contradict_each_other(loss: str, call: Call, write: Write, here: Path) -> None:
    """A over B twice and B over A once, of one prompt: the loss goes down to what is left, and no further."""
    ask, good, bad = (
        {"role": r, "content": c} for r, c in (("user", "Soup?"), ("assistant", "Yes"), ("assistant", "No"))
    )
    a, b = ({"prompt": [ask], "chosen": [x], "rejected": [y]} for x, y in ((good, bad), (bad, good)))
    write_rows(here / "pairs.jsonl", [a, b, a])
    config = write(**{**SMALL, "data": {"path": "pairs.jsonl", "eval": None}}, objective="dpo", dpo={"loss": loss})
    more = ["--set", "batch.tokens=384", "--set", f"dpo.beta={1 if loss == 'ipo' else 0.1}"]
    answer = document(call("train", config, "--overfit", "1", *more, "--json"), 0)
    floor = 2 / 9 if loss == "ipo" else (math.log(3) - 2 / 3 * math.log(2))
    assert answer["terms"] == 6 and answer["floor"] == pytest.approx(floor)
    assert floor < answer["loss"] <= 1.01 * floor
    assert re.search(r"are each chosen over the other \((4 x and 2|2 x and 4) x\)", answer["found"])


def test_the_floor_of_pairs() -> None:
    """Against the least value that a search over the margin finds; what to do is said for pairs."""
    counts = Counter({0: 5, 1: 2})
    own = {1: (counts, [[5], [6]]), 2: (Counter({1: 3}), [[7], [8]])}
    tokenizer = SimpleNamespace(decode=str)
    margins = torch.linspace(-40, 40, 400_001, dtype=torch.float64)
    for settings in (Dpo(label_smoothing=0.1), Dpo(), Dpo(loss="ipo", beta=0.2)):
        e, half = settings.label_smoothing, 1 / (2 * settings.beta)

        def one(z: torch.Tensor) -> torch.Tensor:
            if settings.loss == "ipo":  # noqa: B023
                return (z - half).square()  # noqa: B023
            return -(1 - e) * torch.nn.functional.logsigmoid(z) - e * torch.nn.functional.logsigmoid(-z)  # noqa: B023

        least = (5 * one(margins) + 2 * one(-margins)).min() + 3 * one(margins).min()
        found = module._floor_of_pairs(settings, own, tokenizer)
        assert found.loss == pytest.approx(least.item() / 10, rel=1e-6, abs=1e-9)
        assert found.example == "'...[5]' and '...[6]' are each chosen over the other (5 x and 2 x)"
        assert "one of the two pairs" in diagnose(seen(floor=found, after=found.loss, losses=[9.0, found.loss]))[2]
    smooth = module._floor_of_pairs(Dpo(label_smoothing=0.1), {2: own[2]}, tokenizer)
    assert "label_smoothing 0.1" in smooth.example and "smaller dpo.label_smoothing" in smooth.do
    assert module._floor_of_pairs(Dpo(), {2: own[2]}, tokenizer).loss == 0


def test_only_the_pairs_that_are_shown_get_a_reference(call: Call, write: Write, here: Path) -> None:
    """And the cache has none of them."""
    rows = [{"prompt": f"Soup {i}? ", "chosen": "Yes, with two onions.", "rejected": "No."} for i in range(40)]
    write_rows(here / "pairs.jsonl", rows)
    config = write(**{**SMALL, "data": {"path": "pairs.jsonl", "eval": 0.2, "cache": "kept"}}, objective="dpo")
    found = call("train", config, "--overfit", "2", "--json")
    answer = document(found, 0)
    assert answer["first_loss"] == pytest.approx(math.log(2), abs=1e-6) and answer["loss"] <= 0.05
    assert "the reference of" not in found.err and not (here / "kept" / "reference").exists()


def test_what_follows_a_beginning() -> None:
    """Two documents in a row, one in another: after [5] come 6, 6 and 7; a token that is not learnt does not count."""
    ids, learnt = ([5, 6, 8], [5, 6, 9], [5, 7, 6, 4]), ([0, 1, 1], [0, 1, 0], [0, 1, 1, 1])
    first, second, third = (Document(np.array(i), np.array(t)) for i, t in zip(ids, learnt, strict=True))
    rows = [[(0, first), (1, second)], [(2, third)]]
    found = module._follows([[collate(rows, 8, single=False, most=6)]])
    want = [([5], {6: 2, 7: 1}), ([5, 6], {8: 1}), ([5, 7], {6: 1}), ([5, 7, 6], {4: 1})]
    assert sorted((tokens, dict(counts)) for counts, tokens in found.values()) == want
    assert module._entropy([2, 1]) == pytest.approx(math.log(3) + 2 * math.log(1.5))


@dataclass(frozen=True)
class OnlyNorm(Technique):
    """Freezes all but the last norm, as a mistaken adapter would."""

    name: ClassVar[str] = "only-norm"
    numerics: ClassVar[Numerics] = Numerics.DIFFERENT_MATHS
    claims: ClassVar[frozenset[Part]] = frozenset({Part.TRAINED})

    def peft(self, trainer: Trainer) -> int:
        for parameter in trainer.model.parameters():
            parameter.requires_grad_(False)
        trainer.model.norm.weight.requires_grad_(True)
        return 1


def test_nearly_all_is_frozen(write: Write, here: Path) -> None:
    text = (here / write(**SMALL, with_={"packing": {}, "only-norm": {}})).read_text()
    verdict = overfit(resolve(parse_config(text, "run.yaml"), (*ALL, OnlyNorm)), 1, 20)
    assert verdict.cause == "few parameters" and "of the parameters are trained" in verdict.found
    assert "train more of them" in verdict.do


def test_dropout_keeps_the_loss_up(call: Call, write: Write, here: Path, model: Path) -> None:
    config = AutoConfig.for_model(
        "gpt2", vocab_size=2048, n_embd=64, n_layer=1, n_head=2, n_positions=128, bos_token_id=1, eos_token_id=2,
        resid_pdrop=0.6, embd_pdrop=0.6,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(here / "dropping")
    AutoTokenizer.from_pretrained(model).save_pretrained(here / "dropping")
    run = write(**{**SMALL, "optim": {"lr": 1e-2}}, model="dropping")
    answer = document(call("train", run, "--overfit", "1", "--overfit-steps", "120", "--json"), 0)
    assert answer["loss"] <= 0.05 and "for dropout stays on in training" in answer["found"]


def test_nothing_is_learnt(call: Call, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows whose answers were all cut off are refused before; batches without a target can still come first."""
    inner = module.batches

    def without(*given: Any) -> Any:
        for window in inner(*given):
            yield [dataclasses.replace(b, labels=torch.full_like(b.labels, -100), n_terms=0) for b in window]

    monkeypatch.setattr(module, "batches", without)
    answer = document(call("train", write(**SMALL), "--overfit", "1", "--json"), 1)
    assert answer["cause"] == "no targets" and answer["terms"] == 0 and answer["steps"] == 0
    assert "optrush data show" in answer["do"]


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({}, "stuck"),
        ({"losses": [7.0, 3.0] * 20, "after": 3.0}, "lr too large"),
        ({"after": 8.0}, "lr too large"),
        ({"losses": [7.0, math.inf], "after": math.inf}, "lr too large"),
        ({"norms": [1.0, math.nan]}, "lr too large"),
        ({"losses": [7.0 - 0.01 * n for n in range(100)], "after": 6.0}, "lr too small"),
        ({"floor": Floor(1.9, "after 'x' follow 'a', 'b'")}, "contradictory targets"),
        ({"floor": Floor(0.5, "x")}, "stuck"),
        ({"unmoved": 0.95}, "weights do not move"),
        ({"trained": 1e-4}, "few parameters"),
        ({"before": math.nan}, "not finite"),
        ({"norms": [0.0] * 4}, "no gradient"),
    ],
)
def test_diagnoses(changes: dict[str, Any], cause: str) -> None:
    named, found, do = diagnose(seen(**changes))
    assert named == cause and found and do


def test_flags_that_say_nothing_together(call: Call, write: Write) -> None:
    config = write(**SMALL)
    for flags, says in (
        (["--overfit", "1", "--dry-run"], "--overfit with --dry-run"),
        (["--overfit", "1", "--resume", "auto"], "leaves no checkpoint"),
        (["--overfit-steps", "9"], "no --overfit"),
        (["--json"], "no --dry-run and no --overfit"),
        (["--overfit", "101"], "200 steps, which see each batch less than twice"),
        (["--overfit", "90", "--set", "train.epochs=1"], "a run of "),
    ):
        refused(call("train", config, *flags), says)
    assert sorted(os.listdir()) == ["chat.jsonl", "run.yaml"]
