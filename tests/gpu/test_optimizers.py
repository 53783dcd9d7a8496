"""AdamW on a GPU: bfloat16 weights, 4-bit moments, states on the host; bits, and no wait for the device."""

import itertools
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from optrush.config import Optim, parse_config
from optrush.decide import decide
from optrush.kernels import adamw as kernel
from optrush.kernels.adam8bit import adam8bit_update
from optrush.optim.adam8bit import Adam4bit
from optrush.techniques import paged_states
from optrush.trainer.build import build
from optrush.trainer.trainer import Trainer, set_step

from updates import compare, grads_of, group_of, stepped, tensors

BASE = """
model: tiny
objective: sft
data: {sample: recipes, max_samples: 60, too_long: split}
batch: {seq: 512, tokens: 4096, micro_tokens: 2048}
optim: {lr: 1e-3, schedule: constant, warmup: 0}
train: {steps: 6}
with: {}
output: unused
"""
ROUNDINGS = ["nearest", "stochastic", "kahan"]
WITHS = {"nearest": ("bf16:rounding=nearest",), "stochastic": ("bf16",), "kahan": ("bf16:rounding=kahan",)}


def job_of(*withs: str, sets: tuple[str, ...] = ()) -> Trainer:
    trainer = build(decide(parse_config(BASE, "test", sets, withs=withs)))
    trainer.set_step = partial(set_step, trainer, steps=6)
    return trainer


def step_of(trainer: Trainer, k: int) -> None:
    plan = trainer.stream.plan(None, 6)
    batches = trainer.stream.batches(k, plan, rank=0, ranks=1, micro_rows=trainer.env.micro_rows)
    trainer.set_step(k + 1)
    trainer.forward_backward(batches, sum(b.n_terms for b in batches))
    trainer.optimizer_step()


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("aligned", [True, False])
def test_triton_equals_the_reference(rounding, aligned):
    from optrush.kernels.adamw_triton import AdamWLauncher

    many, different = compare(rounding, aligned, AdamWLauncher, "cuda")
    assert many > 500 and different == 0


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_gpu_equals_a_cpu(rounding):
    """Large parameters, several programs each: Triton on the GPU against the reference on the CPU, to the bit."""
    from optrush.kernels.adamw_triton import AdamWLauncher

    shapes = [(1000, 640), (640,), (33, 17)]
    here, there = group_of(rounding, shapes), group_of(rounding, shapes, device="cuda")
    loop, launcher = kernel.ReferenceUpdate(here), AdamWLauncher(there)
    for k in range(1, 6):
        grads = grads_of(shapes, k)
        stepped(loop, grads, k)
        stepped(launcher, [g.cuda() for g in grads], k)
    for a, b in zip(tensors(here), tensors(there), strict=True):
        assert torch.equal(a, b.cpu())


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_the_loop_and_one_launch_agree(rounding):
    """Gradients are given, for a backward pass on a GPU may add in any order."""
    one, other = job_of(*WITHS[rounding]), job_of(*WITHS[rounding], "fused-adamw")
    assert not one.optimizer.reads_host and not other.optimizer.reads_host
    for k in range(3):
        for trainer in (one, other):
            g = torch.Generator("cuda").manual_seed(k)
            for t in trainer.trained:
                t.parameter.grad = torch.randn(t.local.shape, generator=g, device="cuda").bfloat16()
            trainer.optimizer_step()
    for t, w in zip(one.trained, other.trained, strict=True):
        assert torch.equal(t.local, w.local), t.name


def test_the_loop_waits_three_times_however_many_parameters_there_are():
    """For the rate, the scale and the flag; how often a parameter was stepped lies on the host."""
    trainer = job_of()
    step_of(trainer, 0)
    assert all(c.device.type == "cpu" and c.item() == 1 for c in trainer.optimizer.count)
    for t in trainer.trained:
        t.parameter.grad = torch.ones_like(t.local)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            trainer.optimizer.step(trainer.lr, trainer.scale, torch.zeros((), dtype=torch.bool, device="cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in said if "synchroniz" in str(w.message)]) == 3


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_an_update_never_waits_for_the_device(rounding):
    trainer = job_of(*WITHS[rounding], "packing", "fused-adamw", "attention:impl=varlen")
    before = [t.local.clone() for t in trainer.trained]
    for k in range(5):
        torch.cuda.set_sync_debug_mode("error" if k >= 2 else "default")
        try:
            step_of(trainer, k)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(torch.isfinite(t.local).all() for t in trainer.trained)
    assert any(not torch.equal(t.local, w) for t, w in zip(trainer.trained, before))
    assert all(s["count"].item() == 5 for s in trainer.optimizer.state().values())


@pytest.mark.parametrize("withs", [WITHS["stochastic"], ("amp",)], ids="+".join)
def test_one_launch_however_many_parameters(withs):
    """Two kernels of ours in all: the small one and the update."""
    from torch.profiler import ProfilerActivity, profile

    trainer = job_of(*withs, "fused-adamw")
    step_of(trainer, 0)
    for t in trainer.trained:
        t.parameter.grad = torch.zeros_like(t.local)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        trainer.optimizer_step()
        torch.cuda.synchronize()
    names = [e.name for e in found.events()]
    assert names.count("_update") == names.count("_prepare") == 1, names


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_bad_update_changes_nothing(rounding):
    trainer = job_of(*WITHS[rounding], "fused-adamw")
    step_of(trainer, 0)
    before = [t.local.clone() for t in trainer.trained]
    for t in trainer.trained:
        t.parameter.grad = torch.full_like(t.local, float("nan"))
    _, skipped = trainer.optimizer_step()
    assert skipped.item() and all(torch.equal(t.local, w) for t, w in zip(trainer.trained, before))
    assert all(s["count"].item() == 1 for s in trainer.optimizer.state().values())


# Codes of half a byte.

LOW = {"whole": (512, 2048), "odd": (333, 896), "rest": (40, 1001), "norm": (2048,), "small": (9, 11)}


def adam4bit(dtype: torch.dtype, rounding: kernel.Rounding, device: str) -> Adam4bit:
    g = torch.Generator().manual_seed(3)
    found = [SimpleNamespace(
        name=name, local=(0.02 * torch.randn(shape, generator=g)).to(device, dtype), grad=None, decays=len(shape) > 1,
        full_shape=shape, offset=(0,) * len(shape),
    ) for name, shape in LOW.items()]  # fmt: skip
    return Adam4bit(found, Optim(lr=1e-3), rounding=rounding, seed=7)


@pytest.mark.parametrize(("dtype", "rounding"), [
    (torch.float32, "nearest"), (torch.bfloat16, "nearest"), (torch.bfloat16, "stochastic"),
], ids=str)  # fmt: skip
def test_4_bit_codes_have_the_references_bits(dtype, rounding):
    """Weights, codes, scales and counts after several steps, one of them skipped: kernel, reference on GPU and CPU."""
    ours, plain, cpu = (adam4bit(dtype, rounding, where) for where in ("cuda", "cuda", "cpu"))
    plain.updates = [partial(adam8bit_update, group) for group in plain.groups]
    for n, one in itertools.product(range(1, 6), (ours, plain, cpu)):
        g = torch.Generator().manual_seed(n)
        for t in one.trained:
            grad = torch.randn(t.full_shape, generator=g) * torch.exp(2 * torch.randn(t.full_shape, generator=g))
            t.grad = (8 * grad).to(t.local.device, dtype)
        rate, scale, bad = (torch.tensor(v, device=one.trained[0].local.device) for v in (1e-3, 8.0, n == 3))
        one.step(rate, scale, bad)
    for other in (plain, cpu):
        for a, b in zip(ours.trained, other.trained, strict=True):
            assert torch.equal(a.local.cpu(), b.local.cpu()), a.name
            for k, s in ours.state()[a.name].items():
                assert torch.equal(s.cpu(), other.state()[a.name][k].cpu()), f"{a.name} {k}"


# States on the host.

PAGED = [("fused-adamw",), ("bf16", "fused-adamw"), ("bf16:rounding=kahan",), ("adam8bit",), ("bf16", "adam4bit")]


@pytest.fixture
def small_pieces(monkeypatch):
    """The tiny model's parameters are several pieces."""
    monkeypatch.setattr(paged_states, "PIECE", 1 << 16)
    monkeypatch.setattr(paged_states, "LEAST", 1 << 10)


def given(trainer: Trainer, k: int) -> None:
    """An update with gradients that are no backward pass's, which may add in any order."""
    g = torch.Generator("cuda").manual_seed(k)
    trainer.set_step(k + 1)
    for t in trainer.trained:
        t.parameter.grad = torch.randn(t.local.shape, generator=g, device="cuda").to(t.local.dtype)
    trainer.optimizer_step()


@pytest.mark.parametrize("withs", PAGED, ids="+".join)
def test_paged_states_have_the_same_bits(small_pieces, withs):
    one, other = job_of(*withs), job_of(*withs, "paged-states")
    for k in range(6):
        given(one, k)
        given(other, k)
    for t, w in zip(one.trained, other.trained, strict=True):
        assert torch.equal(t.local, w.local), t.name
    for name, by in one.optimizer.state().items():
        found = other.optimizer.state()[name]
        assert by.keys() == found.keys() and all(torch.equal(s.cpu(), found[k].cpu()) for k, s in by.items()), name


def test_paged_states_are_pinned_on_the_host(small_pieces):
    trainer = job_of("bf16", "fused-adamw", "paged-states")
    pages = [s for by in trainer.optimizer.state().values() for s in by.values() if s.device.type == "cpu"]
    assert pages and all(s.is_pinned() for s in pages)
    states = sum(s.nbytes for s in pages)
    assert sum(s.numel() for s in trainer.optimizer.slots) < states / 2


def test_a_paged_update_never_waits_for_the_device(small_pieces):
    trainer = job_of("packing", "bf16", "fused-adamw", "paged-states", "attention:impl=varlen")
    for k in range(5):
        torch.cuda.set_sync_debug_mode("error" if k >= 2 else "default")
        try:
            step_of(trainer, k)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(torch.isfinite(t.local).all() for t in trainer.trained)
