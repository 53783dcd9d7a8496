"""Optimizers made of torch's own operators, on a GPU: the rounding kernel, waiting, the same steps as on a CPU."""

from functools import partial

import pytest
import torch
from stepping import BASE, steps

from optrush.config import parse_config
from optrush.decide import decide
from optrush.kernels.adamw import key_words, step_key, write_stochastic
from optrush.trainer.build import build
from optrush.trainer.trainer import Trainer, set_step

from trials import KNOWN

NAMES = ("muon", "apollo:rank=16")


@pytest.mark.parametrize("size", [1, 4096, 3 * 4096 + 5, 1 << 22])
def test_the_kernel_has_the_references_bits(size):
    from optrush.kernels.adamw_triton import launch_stochastic

    value = torch.randn(size, generator=torch.Generator().manual_seed(size))
    value[::97] = float("inf")
    for shift, bad in ((0, False), (16, False), (0, True)):
        key = step_key(torch.tensor([key_words(3, "a")]), torch.tensor([5.0]))[0]
        sides = [torch.ones(size, dtype=torch.bfloat16, device=device) for device in ("cpu", "cuda", "cuda")]
        for side, write in zip(sides, (write_stochastic, write_stochastic, launch_stochastic), strict=True):
            on = side.device
            write(side, value.to(on), torch.tensor(bad, device=on), key.to(on), shift, 1 << 33)
        assert torch.equal(sides[0], sides[1].cpu()) and torch.equal(sides[0], sides[2].cpu())


def job_of(*withs: str) -> Trainer:
    trainer = build(decide(parse_config(BASE, "test", withs=withs), KNOWN))
    trainer.set_step = partial(set_step, trainer, steps=6)
    return trainer


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("withs", [("amp",), ("bf16",), ("bf16", "update-in-backward")], ids="+".join)
def test_a_step_never_waits_for_the_device(withs, name):
    trainer = job_of("packing", "attention:impl=varlen", *withs, name)
    assert not trainer.optimizer.reads_host
    found = steps(trainer, 5, waits=False)
    assert found[-1][0] < found[0][0] and not any(skipped for _, _, skipped in found)


@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_steps_as_a_cpu(name):
    """From equal weights and gradients: to float32's digits, or for products of bfloat16 to theirs."""
    trainer = job_of(name)
    before = [t.local.cpu().clone() for t in trainer.trained]
    state = [{k: s.cpu() for k, s in by.items()} for by in trainer.optimizer.state().values()]
    for t in trainer.trained:
        g = torch.Generator().manual_seed(t.local.numel())
        t.parameter.grad = torch.randn(t.full_shape, generator=g).cuda()
    grads = [t.parameter.grad.cpu().clone() for t in trainer.trained]
    trainer.optimizer.step(torch.tensor(1e-2).cuda(), torch.tensor(1.0).cuda(), torch.tensor(False).cuda())
    cpu = job_on_cpu(name)
    for t, w, g in zip(cpu.trained, before, grads, strict=True):
        t.local.copy_(w)
        t.parameter.grad = g
    cpu.optimizer.step(torch.tensor(1e-2), torch.tensor(1.0), torch.tensor(False))
    assert all(set(a) == set(b) for a, b in zip(state, cpu.optimizer.state().values(), strict=True))
    for a, b in zip(trainer.trained, cpu.trained, strict=True):
        torch.testing.assert_close(a.local.cpu(), b.local, rtol=1e-3, atol=5e-4, msg=a.name)


def job_on_cpu(name: str) -> Trainer:
    """The same job, its weights moved and its optimizer made again there."""
    trainer = job_of(name)
    for t in trainer.trained:
        t.parameter.data = t.parameter.data.cpu()
    (technique,) = decide(parse_config(BASE, "test", withs=(name,)), KNOWN).techniques
    technique.optimizer(trainer)
    return trainer


@pytest.mark.parametrize("name", NAMES)
def test_a_bad_update_changes_nothing(name):
    trainer = job_of("bf16", name)
    steps(trainer, 1)
    before = [t.local.clone() for t in trainer.trained]
    states = [s.clone() for by in trainer.optimizer.state().values() for s in by.values()]
    for t in trainer.trained:
        t.parameter.grad = torch.full_like(t.local, float("nan"))
    _, skipped = trainer.optimizer_step()
    assert skipped.item() and all(torch.equal(t.local, w) for t, w in zip(trainer.trained, before, strict=True))
    after = [s for by in trainer.optimizer.state().values() for s in by.values()]
    assert all(torch.equal(a, b) for a, b in zip(after, states, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_it_learns(name):
    trainer = job_of("packing", "bf16", name)
    plan, first, last = trainer.stream.plan(None, 6), 0.0, 0.0
    for k in range(100):
        batches = trainer.stream.batches(k % 6, plan, rank=0, ranks=1, micro_rows=trainer.env.micro_rows)
        trainer.set_step(k % 6 + 1)
        last = trainer.forward_backward(batches, sum(b.n_terms for b in batches)).item()
        first = first or last
        trainer.optimizer_step()
    assert last < 0.8 * first
