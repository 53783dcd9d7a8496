"""8-bit frozen linears: near the model of the file, and as good on documents that it has not seen.

tests/techniques/test_nf4.py has what both forms owe: equal maths, ranks, compilers, memory, export.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from optrush.trainer.trainer import evaluate

from golden.make_golden import T
from trials import assembled, golden_run, steps

FORMS = {"int8": {"int8": {}}, "nf4": {"nf4": {}}}
LORA = {"lora": {"rank": 8, "save": ["embed_tokens", "lm_head"]}}
MARGIN, SEEDS, STEPS = 0.03, (1, 2), 40  # nats a token, of the mean over the seeds; a seed alone twice


@pytest.mark.parametrize(("form", "off"), [("int8", 0.01), ("nf4", 0.15)])
def test_how_far_weights_and_hidden_states_are(box, form, off):
    """A bound for each: halved, these fail."""
    plain = assembled(golden_run(box, packed=True, lora={}))
    ours = assembled(golden_run(box, packed=True, lora={}, **FORMS[form]))
    for (_, a), (_, b) in zip(ours.model.linears(), plain.model.linears(), strict=True):
        dense = a.dequantized(torch.float32)
        assert off / 4 < (dense - b.weight).norm() / b.weight.norm() < off
    batch = next(plain.batches)[0]
    with torch.no_grad():
        x, y = (j.model(batch.tokens, batch.positions, batch.documents).flatten() for j in (ours, plain))
    assert F.cosine_similarity(x, y, dim=0) > 1 - off


@pytest.fixture(scope="module")
def counting(box):
    """Documents that count on from a random word in strides of 1 to 3: learnt within a few steps."""
    draw = np.random.RandomState(7)
    for name, n in (("train48", 400), ("held48", 60)):
        lines = []
        for _ in range(n):
            at, stride, length = draw.randint(0, 73), draw.randint(1, 4), draw.randint(10, 22)
            lines.append(json.dumps({"text": " ".join(f"w{(at + stride * i) % 73}" for i in range(length))}))
        (box / f"{name}.jsonl").write_text("\n".join(lines))
    return box


def held_out(box, seed, **with_):
    sets = [
        f"data.path={box}/train48.jsonl", f"data.eval={box}/held48.jsonl", f"seed={seed}", f"train.steps={STEPS}",
        "optim.lr=1e-2", f"batch.tokens={T * 8}", f"batch.micro_tokens={T * 8}",
    ]  # fmt: skip
    job = assembled(golden_run(box, packed=True, sets=sets, **LORA, **with_))
    first = evaluate(job)[0]
    list(steps(job, STEPS))
    return first, evaluate(job)[0]


def test_held_out_loss_over_seeds(counting):
    base = [held_out(counting, seed) for seed in SEEDS]
    assert all(last < 0.7 * first for first, last in base), "it learns"
    for form, with_ in FORMS.items():
        ours = [held_out(counting, seed, **with_) for seed in SEEDS]
        off = [b[1] - a[1] for a, b in zip(base, ours, strict=True)]
        print(form, off)
        assert sum(off) / len(off) < MARGIN and max(off) < 2 * MARGIN
