"""Turns with a weight: the mean over tokens times weights, against transformers' logits, whatever the layout."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from meshes import further
from optrush.config import Config
from optrush.decide import decide
from optrush.errors import DataError
from optrush.trainer.trainer import evaluate

from golden.make_golden import Case
from trials import apart, assembled, first_gradients, golden_run, steps

CHAT = Case(False, chat=True)
WEIGHTS = (0.5, 1, 3, 0.25, 2, 0, 1, 10, 0.1, 1, 1, 7, 0.5, 0.5, 4, 1)


def rows(box: Path, weights: tuple[float, ...], last: bool = True) -> list[dict[str, Any]]:
    """The golden conversations, whose last answers have these weights in turn; without `last` all answers."""
    found = []
    for n, line in enumerate((box / "chat.jsonl").read_text().splitlines()):
        row, w = json.loads(line), weights[n % len(weights)]
        answers = [m for m in row["messages"] if m["role"] == "assistant"]
        for answer in answers[-1:] if last else answers:
            answer["weight"] = w
        if any(m.get("weight", 1) for m in answers):
            found.append(row)
    return found


def run(box: Path, file: Path, weights: tuple[float, ...] = WEIGHTS, *, last: bool = True, **more: Any) -> Config:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows(box, weights, last)))
    return golden_run(box, CHAT, sets=[f"data.path={file}", *more.pop("sets", ())], **more)


LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {}, "packed": {"packed": True}, "other micro-batches": {"rows": 4}, "fused": {"fused_loss": {}},
    "split": {"sets": ["data.split_turns=true"]},
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loss_is_the_weighted_mean(box, tmp_path, layout):
    """Of all samples of the first step: sum of w times -log p over sum of w, by transformers' logits."""
    job = assembled(run(box, tmp_path / "w.jsonl", **LAYOUTS[layout]))
    batches = next(job.batches)
    plain = assembled(run(box, tmp_path / "one.jsonl", (1.0,), **LAYOUTS[layout]))
    model = AutoModelForCausalLM.from_pretrained(box / "untied", dtype=torch.float32).eval()
    total, divisor = 0.0, 0.0
    weighed = [i for b in batches for i in b.samples]
    for i in weighed:
        (document,) = job.stream.source.documents(i)
        logits = model(torch.tensor(document.ids[None]).long()).logits[0, :-1].log_softmax(-1)
        ids, targets = torch.tensor(document.ids[1:]).long(), document.targets[1:]
        nll = -logits.gather(1, ids[:, None])[:, 0].detach()
        weights = torch.ones(len(ids)) if document.weights is None else torch.tensor(document.weights[1:])
        total += (nll * weights)[torch.tensor(targets)].sum().item()
        divisor += weights[torch.tensor(targets)].sum().item()
    terms = sum(b.n_terms for b in batches)
    assert terms == pytest.approx(divisor, rel=1e-6)
    job.set_step(1)
    found = job.forward_backward(batches, job.all_reduce_terms(terms)).item()
    assert found == pytest.approx(total / divisor, rel=1e-5)
    assert found != pytest.approx(first_gradients(plain)[0], rel=1e-4)


def test_the_tokens_of_a_turn_have_its_weight(box, tmp_path):
    """From its first token to its end-of-turn token; those of other answers have 1."""
    job = assembled(run(box, tmp_path / "w.jsonl", (0.25,)))
    for i in range(len(job.stream.source)):
        (document,) = job.stream.source.documents(i)
        assert document.weights is not None
        ends = np.flatnonzero(document.targets & ~np.append(document.targets[1:], False))
        starts = np.flatnonzero(document.targets & ~np.insert(document.targets[:-1], 0, False))
        *others, mine = [set(document.weights[a : b + 1].tolist()) for a, b in zip(starts, ends, strict=True)]
        assert mine == {0.25} and all(other == {1.0} for other in others)


@pytest.mark.parametrize("w", [3.0, 1e-3])
def test_a_weight_that_all_have_changes_nothing(box, tmp_path, w):
    found, usual = (
        first_gradients(assembled(run(box, tmp_path / f"{n}.jsonl", (each,), last=False, packed=True)))
        for n, each in enumerate((w, 1.0))
    )
    near = 1e-5 if w > 1e-3 else 1e-3  # weights are summed in 2^-20
    assert found[0] == pytest.approx(usual[0], rel=near)
    assert max(apart(g, usual[1][n]) for n, g in found[1].items()) < near


def losses(box: Path, file: Path, with_: dict[str, Any], micro: int) -> list[tuple[float, float]]:
    job = assembled(golden_run(box, CHAT, packed=True, rows=micro, sets=[f"data.path={file}"], **with_))
    return [f[:2] for f in steps(job, 2)]


@pytest.mark.parametrize("with_", further([{"context": {}, "fsdp": {}}, {"ddp": {}}, {"fsdp": {}}], 2), ids=str)
def test_ranks(box, tmp_path, pair, with_):
    run(box, file := tmp_path / "w.jsonl")
    one = losses(box, file, {}, 4)
    for side in pair(losses, box, file, with_, 2):
        assert side == [pytest.approx(step, rel=1e-4) for step in one]


def test_held_out_rows_have_weights(box, tmp_path):
    run(box, tmp_path / "held.jsonl", (3.0, 1.0, 0.5))
    sets = [f"data.eval={tmp_path}/held.jsonl"]
    job = assembled(run(box, tmp_path / "w.jsonl", sets=sets))
    run(box, tmp_path / "held.jsonl", (1.0,))
    other = assembled(run(box, tmp_path / "w.jsonl", sets=sets))
    assert job.evaluation is not None and evaluate(job).targets == evaluate(other).targets
    assert evaluate(job).loss != pytest.approx(evaluate(other).loss, rel=1e-4)


@pytest.mark.parametrize(("sets", "says"), [
    (["data.train_on=all"], "every token is a target"),
    (["objective=distill", "distill.teacher=tiny"], "objective: sft"),
])  # fmt: skip
def test_what_weights_do_not_go_with(box, tmp_path, sets, says):
    with pytest.raises(DataError, match=says):
        assembled(decide(run(box, tmp_path / "w.jsonl", sets=sets)))
