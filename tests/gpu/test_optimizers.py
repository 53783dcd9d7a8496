"""AdamW on bfloat16 weights on a GPU: Triton's kernel against the reference to the bit, and no wait for the device."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from optrush import step
from optrush.assemble import assemble
from optrush.config import parse
from optrush.job import Job
from optrush.kernels import adamw_update as kernel
from optrush.prepare import prepare

from updates import compare, grads_of, group_of, stepped, tensors

pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

BASE = """
model: tiny
objective: sft
data: {sample: recipes, max_samples: 60, too_long: split}
batch: {seq: 512, tokens: 4096, micro_tokens: 2048}
optim: {lr: 1e-3, schedule: constant, warmup: 0}
train: {steps: 6}
output: unused
"""
ROUNDINGS = ["nearest", "stochastic", "kahan"]
WITHS = {
    "nearest": ("bf16:rounding=nearest",),
    "stochastic": ("bf16", "stochastic-rounding"),
    "kahan": ("bf16", "kahan"),
}


def job_of(*withs: str, sets: tuple[str, ...] = ()) -> Job:
    job = assemble(prepare(parse(BASE, "test", sets, withs=withs)))
    job.begin = partial(step.begin, job, steps=6)
    return job


def step_of(job: Job, k: int) -> None:
    plan = job.stream.plan(None, 6)
    batches = job.stream.batches(k, plan, rank=0, ranks=1, micro_rows=job.setup.micro_rows)
    job.begin(k + 1)
    job.gradients(batches, sum(b.n_terms for b in batches))
    job.update()


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("aligned", [True, False])
def test_triton_equals_the_reference(rounding, aligned):
    from optrush.kernels.adamw_triton import Launcher

    many, different = compare(rounding, aligned, Launcher, "cuda")
    assert many > 500 and different == 0


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_gpu_equals_a_cpu(rounding):
    """Large parameters, several programs each: Triton on the GPU against the reference on the CPU, to the bit."""
    from optrush.kernels.adamw_triton import Launcher

    shapes = [(1000, 640), (640,), (33, 17)]
    here, there = group_of(rounding, shapes), group_of(rounding, shapes, device="cuda")
    loop, launcher = kernel.Loop(here), Launcher(there)
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
        for job in (one, other):
            g = torch.Generator("cuda").manual_seed(k)
            for t in job.trained:
                t.parameter.grad = torch.randn(t.local.shape, generator=g, device="cuda").bfloat16()
            job.update()
    for t, w in zip(one.trained, other.trained, strict=True):
        assert torch.equal(t.local, w.local), t.name


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_an_update_never_waits_for_the_device(rounding):
    job = job_of(*WITHS[rounding], "packing", "fused-adamw", "attention:impl=varlen")
    before = [t.local.clone() for t in job.trained]
    for k in range(5):
        torch.cuda.set_sync_debug_mode("error" if k >= 2 else "default")
        try:
            step_of(job, k)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(torch.isfinite(t.local).all() for t in job.trained)
    assert any(not torch.equal(t.local, w) for t, w in zip(job.trained, before))
    assert all(s["count"].item() == 5 for s in job.optimizer.state().values())


def test_one_launch_however_many_parameters():
    """Two kernels of ours in all: the small one and the update."""
    from torch.profiler import ProfilerActivity, profile

    job = job_of(*WITHS["stochastic"], "fused-adamw")
    step_of(job, 0)
    for t in job.trained:
        t.parameter.grad = torch.zeros_like(t.local)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        job.update()
        torch.cuda.synchronize()
    names = [e.name for e in found.events()]
    assert names.count("_update") == names.count("_prepare") == 1, names


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_bad_update_changes_nothing(rounding):
    job = job_of(*WITHS[rounding], "fused-adamw")
    step_of(job, 0)
    before = [t.local.clone() for t in job.trained]
    for t in job.trained:
        t.parameter.grad = torch.full_like(t.local, float("nan"))
    _, skipped = job.update()
    assert skipped.item() and all(torch.equal(t.local, w) for t, w in zip(job.trained, before))
    assert all(s["count"].item() == 1 for s in job.optimizer.state().values())
