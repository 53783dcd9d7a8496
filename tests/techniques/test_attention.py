"""Attention kernels through the whole model: the same losses and gradients.

The kernels by themselves, on numbers of their own, are in tests/unit/test_attention.py; those that need a GPU in
tests/gpu; that documents never meet in a model in test_isolation.py.
"""

from __future__ import annotations

import pytest
import torch

from optrush import config
from optrush.models.shapes import SHAPES
from optrush.planner import search
from optrush.techniques import attention

from golden.make_golden import CASES
from trials import assembled, furthest, golden_run, micro, published

CLOSE = 1e-5  # of the largest gradient of each tensor
IMPLS = ["masked", "sdpa"]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("impl", IMPLS)
def test_equals_transformers_a_document_at_a_time(box, reference, impl, packed):
    loss, grads = published(assembled(golden_run(box, CASES["chat"], packed=packed, attention={"impl": impl})))
    want_loss, want = reference("chat")
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert furthest(grads, want) < CLOSE


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_it_is_really_another_kernel(box, implementation, monkeypatch):
    calls = []
    real = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or real(*a, **k)
    )
    for impl, wanted in (("masked", 0), ("sdpa", 2)):
        calls.clear()
        sets = [f"model.implementation={implementation}"]
        job = assembled(golden_run(box, packed=True, sets=sets, attention={"impl": impl}))
        calls.clear()  # the wrapper tries itself out while it is made
        job.eval_loss([micro(job)])
        assert len(calls) == wanted, "once a block"


@pytest.mark.parametrize(
    ("hardware", "withs", "sets", "spread", "scores"),
    [("h200", ("bf16", "attention"), (), False, False), ("h200", ("attention",), (), True, False),
     ("h200", ("attention",), ("model.implementation=transformers",), True, True),
     ("h200", ("attention",), ("model.shape=one-to-one", "model.implementation=transformers"), False, False),
     ("h200", ("attention",), ("model.shape=mistral", "model.implementation=transformers"), True, True),
     ("h200", ("attention",), ("model.shape=mistral",), True, False),
     ("t4", ("amp:dtype=fp16", "attention"), (), True, False), ("cpu", ("attention",), (), False, False),
     ("h200", ("bf16", "attention:impl=varlen"), (), False, False),
     ("h200 and torch 2.11.0+cu130", ("bf16", "attention:impl=varlen"), (), True, False)],
    ids=str,
)  # fmt: skip
def test_where_heads_are_repeated(monkeypatch, hardware, withs, sets, spread, scores):
    """Where torch's kernel cannot group query heads, keys and values are held for each, or by plain products scores."""
    monkeypatch.setitem(SHAPES, "one-to-one", SHAPES["llama-3.2-1b"] | {"num_key_value_heads": 32})
    mistral = SHAPES["llama-3.2-1b"] | {"model_type": "mistral", "rope_scaling": None, "sliding_window": None}
    monkeypatch.setitem(SHAPES, "mistral", {k: v for k, v in mistral.items() if k != "num_key_value_heads"})  # then 8
    hardware, _, torch_version = hardware.partition(" and torch ")
    monkeypatch.setattr(attention, "library", {"torch": torch_version or "2.13.0"}.get)
    text = "{model: {shape: llama-3.2-1b}, objective: pretrain, data: {random: 8}, output: none}"
    lines = {item.name for item in search.predict(config.parse_config(text, "case", sets, withs), hardware).lines}
    assert ("saved.spread" in lines, "saved.scores.held" in lines) == (spread, scores)
