"""8-bit moments and updates in the backward pass on a GPU: bits, waiting, memory."""

import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from stepping import BASE, steps

from optrush.config import Optim, parse_config
from optrush.decide import decide
from optrush.kernels.adam8bit import adam8bit_update
from optrush.optim.adam8bit import Adam8bit
from optrush.trainer.build import build
from optrush.trainer.trainer import Trainer, set_step

SIZES = {"whole": (512, 2048), "odd": (333, 896), "rest": (40, 1001), "norm": (2048,), "small": (9, 11)}


def optimizer(dtype: torch.dtype, rounding: str, device: str) -> Adam8bit:
    g = torch.Generator().manual_seed(3)
    found = []
    for name, shape in SIZES.items():
        local = (0.02 * torch.randn(shape, generator=g)).to(device, dtype)
        found.append(SimpleNamespace(
            name=name, local=local, grad=None, decays=len(shape) > 1, full_shape=shape, offset=(0,) * len(shape),
        ))  # fmt: skip
    return Adam8bit(found, Optim(lr=1e-3), rounding=rounding, seed=7)


def moved(ours: Adam8bit, number: int, device: str, bad: bool = False) -> None:
    g = torch.Generator().manual_seed(number)
    for t in ours.trained:
        grad = torch.randn(t.full_shape, generator=g) * torch.exp(3 * torch.randn(t.full_shape, generator=g))
        t.grad = (8 * grad).to(device, t.local.dtype)
    ours.step(torch.tensor(1e-3, device=device), torch.tensor(8.0, device=device), torch.tensor(bad, device=device))


@pytest.mark.parametrize(("dtype", "rounding"), [
    (torch.float32, "nearest"), (torch.bfloat16, "nearest"), (torch.bfloat16, "stochastic"),
], ids=str)  # fmt: skip
def test_the_kernel_has_the_references_bits(dtype, rounding):
    """Weights, codes, scales and counts after several steps, one of them skipped: kernel, reference on GPU and CPU."""
    kernel, plain = (optimizer(dtype, rounding, "cuda") for _ in range(2))
    cpu = optimizer(dtype, rounding, "cpu")
    plain.updates = [partial(adam8bit_update, group) for group in plain.groups]
    for n, (ours, device) in itertools.product(range(1, 6), ((kernel, "cuda"), (plain, "cuda"), (cpu, "cpu"))):
        moved(ours, n, device, bad=n == 3)
    for other in (plain, cpu):
        for a, b in zip(kernel.trained, other.trained, strict=True):
            assert torch.equal(a.local.cpu(), b.local.cpu()), a.name
            for k, s in kernel.state()[a.name].items():
                assert torch.equal(s.cpu(), other.state()[a.name][k].cpu()), f"{a.name} {k}"


def job_of(*withs: str) -> Trainer:
    trainer = build(decide(parse_config(BASE, "test", withs=withs)))
    trainer.set_step = partial(set_step, trainer, steps=6)
    return trainer


@pytest.mark.parametrize("withs", [
    ("amp", "adam8bit"), ("bf16", "adam8bit", "compile", "fused-loss"),
    ("bf16", "adam8bit", "update-in-backward", "compile", "fused-loss", "recompute"),
    ("bf16", "fused-adamw", "update-in-backward"), ("amp", "fused-adamw", "update-in-backward"),
], ids="+".join)  # fmt: skip
def test_a_step_never_waits_for_the_device(withs):
    trainer = job_of("packing", "attention:impl=varlen", *withs)
    assert not trainer.optimizer.reads_host
    found = steps(trainer, 4, waits=False)
    assert found[-1][0] < found[0][0] and not any(skipped for _, _, skipped in found)


@pytest.mark.parametrize("withs", [("fused-adamw",), ("adam8bit",), ("bf16", "adam8bit")], ids="+".join)
def test_in_the_backward_pass_it_is_the_same_update(withs):
    """To the bit, where the backward pass itself is: deterministic operators."""
    torch.use_deterministic_algorithms(True)
    try:
        plain, early = job_of("packing", *withs), job_of("packing", *withs, "update-in-backward")
        base, ours = steps(plain, 5), steps(early, 5)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [f[0] for f in ours] == [f[0] for f in base]
    assert [f[1] for f in ours] == [pytest.approx(f[1], rel=1e-5) for f in base]
    for a, b in zip(plain.trained, early.trained, strict=True):
        assert torch.equal(a.local, b.local), a.name


def test_it_learns_alike():
    """A few hundred updates of the tiny model: 8-bit moments learn as float32 moments do."""
    last = {}
    for name in ("fused-adamw", "adam8bit"):
        trainer = job_of("packing", name)
        plan = trainer.stream.plan(None, 6)
        for k in range(200):
            batches = trainer.stream.batches(k % 6, plan, rank=0, ranks=1, micro_rows=trainer.env.micro_rows)
            trainer.set_step(k % 6 + 1)
            last[name] = trainer.forward_backward(batches, sum(b.n_terms for b in batches)).item()
            trainer.optimizer_step()
    assert last["adam8bit"] == pytest.approx(last["fused-adamw"], rel=0.1, abs=0.1)


def test_memory_is_less():
    """States of two bytes and gradients of one parameter: what a step leaves, and its peak over what it began with."""
    peaks = {}
    for withs in (("fused-adamw",), ("adam8bit",), ("adam8bit", "update-in-backward")):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        trainer = job_of("packing", "recompute", *withs)
        steps(trainer, 2)
        torch.cuda.reset_peak_memory_stats()
        steps(trainer, 1)
        states = sum(s.nbytes for by in trainer.optimizer.state().values() for s in by.values())
        peaks[withs] = (torch.cuda.max_memory_allocated() - before, states)
        del trainer
    n = peaks["fused-adamw",][1] / 8
    assert peaks["adam8bit",][1] <= 2.6 * n, "the tiny model's rows are short"
    assert peaks["adam8bit", "update-in-backward"][0] < peaks["adam8bit",][0] < peaks["fused-adamw",][0], peaks
