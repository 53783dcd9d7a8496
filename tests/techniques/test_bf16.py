"""Pure bf16: everything in two bytes, and a held-out loss near float32's."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from optrush.train import evaluate

from golden.make_golden import T
from trials import assembled, golden_run, steps

MARGIN = 0.03  # nats a token, of the mean over the seeds; a seed alone may be twice as far
STEPS = 40
SEEDS = (1, 2, 3)


@pytest.fixture(scope="module")
def counting(box):
    """Documents that count on from a random word in strides of 1 to 3: learnt within a few steps."""
    draw = np.random.RandomState(2)
    for name, n in (("train", 400), ("held", 60)):
        lines = []
        for _ in range(n):
            at, stride, length = draw.randint(0, 73), draw.randint(1, 4), draw.randint(10, 22)
            lines.append(json.dumps({"text": " ".join(f"w{(at + stride * i) % 73}" for i in range(length))}))
        (box / f"{name}.jsonl").write_text("\n".join(lines))
    return box


def held_out(box, seed, sets=(), **with_):
    sets = [
        f"data.path={box}/train.jsonl", f"data.eval={box}/held.jsonl", f"seed={seed}", f"train.steps={STEPS}",
        "optim.lr=1e-2", f"batch.tokens={T * 8}", f"batch.micro_tokens={T * 8}", *sets,
    ]  # fmt: skip
    job = assembled(golden_run(box, packed=True, sets=sets, **with_))
    first = evaluate(job)[0]
    list(steps(job, STEPS))
    return first, evaluate(job)[0]


def test_held_out_loss_over_seeds(counting):
    base = [held_out(counting, seed) for seed in SEEDS]
    ours = [held_out(counting, seed, bf16={}) for seed in SEEDS]
    print("float32", base, "bf16", ours)
    assert all(last < 0.6 * first for first, last in base), "it learns"
    off = [b[1] - a[1] for a, b in zip(base, ours)]
    assert sum(off) / len(off) < MARGIN and max(off) < 2 * MARGIN


def test_small_updates_are_lost(counting):
    """The margin is no accident of a test that cannot fail: at a small rate most weights never move."""
    sets = ["optim.lr=2e-5"]
    base, ours = held_out(counting, 1, sets), held_out(counting, 1, sets, bf16={})
    assert base[1] < base[0]
    assert ours[0] - ours[1] < 0.8 * (base[0] - base[1])


@pytest.mark.parametrize("optimizer", [{}, {"fused_adamw": {}}])
def test_everything_is_bf16(box, optimizer):
    job = assembled(golden_run(box, packed=True, bf16={}, **optimizer))
    types = set()
    update = job.update

    def looked():
        types.update(t.grad.dtype for t in job.trained)
        return update()

    job.update = looked
    list(steps(job, 1))
    assert types == {t.local.dtype for t in job.trained} == {torch.bfloat16}
    states = job.optimizer.state().values()
    assert {s[name].dtype for s in states for name in ("mean", "square")} == {torch.bfloat16}
    assert job.scale.item() == 1.0
