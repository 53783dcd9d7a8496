"""The memory tracker counts what the CPU allocator gives out, and counts the same without any bytes."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from meshes import further
from optrush import config
from optrush.models.shapes import SHAPES

from memory import PHASES, Tracker, allocated, supposed, track
from trials import assembled

KIB = 2**10


def run(box, implementation="native", withs=(), accumulation=1):
    """A model of 1.3 million parameters on 2 x 64 random tokens."""
    text = f"""
model: {{shape: small, implementation: {implementation}}}
objective: pretrain
data: {{random: 32}}
batch: {{seq: 64, tokens: {128 * accumulation}, micro_tokens: 128}}
train: {{steps: 4}}
output: {box / "output"}
"""
    return config.parse_config(text, "run.yaml", (), withs)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    sizes = {
        "hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "num_hidden_layers": 3, "vocab_size": 4096, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    monkeypatch.setitem(SHAPES, "small", SHAPES["llama-3.2-1b"] | sizes)


def inside():
    """Forward, backward and update of a product and an autograd function of our own; the peak of each part."""

    class Squared(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            twice = x + x  # one passing tensor
            return twice * grads[0]

    weight, x = torch.ones(KIB, KIB, requires_grad=True), torch.ones(KIB, KIB)
    tracker = Tracker()
    tracker.hold(weight, "weight")
    tracker.hold(x, "x")
    with tracker:
        tracker.mark("forward")
        loss = Squared.apply(x @ weight).sum()
        tracker.mark("backward")
        loss.backward()
        tracker.mark("update")
        with torch.no_grad():
            weight -= weight.grad * 0.5
        weight.grad = None
        tracker.mark("between")
    assert tracker.current == tracker.measured().peaks["between"]
    del loss
    gc.collect()
    assert tracker.current == 8 * KIB * KIB, "only the weight and x are left"
    return {name: round(value / (4 * KIB * KIB)) for name, value in tracker.measured().peaks.items()}


@pytest.mark.parametrize("mode", [nullcontext, FakeTensorMode])
def test_every_part_of_a_step_is_seen(mode):
    with mode():
        found = inside()
    # forward: weight, x, the product, its square. backward: the first three, twice the product, its gradient.
    # update: weight, x, the weight's gradient, half of it.
    assert (found["forward"], found["backward"], found["update"]) == (4, 5, 4)


@pytest.mark.parametrize(("implementation", "withs"), further([
    ("native", ("amp", "attention", "fused-adamw")), ("transformers", ("bf16", "attention", "recompute")),
    ("native", ("amp", "fused-loss:chunk=48")), ("native", ()), ("native", ("bf16", "attention", "recompute")),
    ("transformers", ()), ("transformers", ("amp", "attention", "fused-adamw")),
    ("transformers", ("amp", "fused-loss:chunk=48")),
], 1), ids=str)  # fmt: skip
def test_the_tracker_agrees_with_the_allocator(tmp_path, implementation, withs):
    job = assembled(run(tmp_path, implementation, withs, accumulation=2))
    truth = allocated(job)
    found = track(job)
    assert sum(row[0] for row in found.live) == found.peak == max(found.peaks.values()) == found.peaks[found.phase]
    assert set(found.peaks) == set(PHASES)
    for phase in ("head", "backward", "update"):
        assert found.peaks[phase] == pytest.approx(truth[phase], rel=0.005), (phase, str(found))


@pytest.mark.parametrize(("implementation", "withs"), further([
    ("native", ("bf16", "attention", "fused-adamw", "recompute")), ("transformers", ()), ("native", ()),
    ("transformers", ("bf16", "attention", "fused-adamw", "recompute")),
], 1), ids=str)  # fmt: skip
def test_without_bytes_it_counts_the_same(tmp_path, implementation, withs):
    real = track(assembled(run(tmp_path, implementation, withs)))
    with supposed(run(tmp_path, implementation, withs), kernels=False) as job:
        without = track(job, supposed=True)
    for phase in PHASES:
        assert without.peaks[phase] == pytest.approx(real.peaks[phase], abs=KIB)


def test_a_published_shape_is_tracked_without_its_bytes(tmp_path):
    """One H200 held 23.09 GiB in this run (two cuBLAS workspaces of 32 MiB among them)."""
    text = f"""
model: {{shape: llama-3.2-1b, implementation: transformers}}
objective: pretrain
data: {{random: 8}}
batch: {{seq: 2048, tokens: 2048}}
train: {{steps: 2}}
output: {tmp_path / "output"}
with: {{amp: , fused-adamw: , attention: }}
"""
    with supposed(config.parse_config(text, "run.yaml")) as job:
        found = track(job, 1, supposed=True)
    assert found.phase == "backward"
    assert (found.peak + 2 * 32 * KIB * KIB) / 2**30 == pytest.approx(23.09, abs=0.01)
