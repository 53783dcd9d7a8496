"""Our AdamW, fused or not, against torch.optim's. What every optimizer owes is in test_optimizers.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from optrush.config import Optim
from optrush.optim.adamw import AdamW
from optrush.technique import Requirement
from optrush.techniques import fused_adamw

from trials import assembled, furthest, golden_run, steps, weights

SHAPES = {"a": (7, 5), "bias": (5,), "b": (33, 4), "one": ()}
OPTIM = Optim(lr=1e-2, weight_decay=0.1)


def problem(fused: bool, rounding="nearest", dtype=torch.float32, wide=(), launch=False):
    """Parameters and their optimizer; `wide` ones are float32 whatever the dtype."""
    g = torch.Generator().manual_seed(3)
    trained = []
    for n, s in SHAPES.items():
        local = torch.randn(s, generator=g).to(torch.float32 if n in wide else dtype)
        place = {"full_shape": s, "offset": (0,) * len(s)}
        trained.append(SimpleNamespace(name=n, local=local, grad=None, decays=len(s) > 1, **place))
    return trained, AdamW(trained, OPTIM, fused=fused, rounding=rounding, launch=launch)


def gradients(step: int):
    g = torch.Generator().manual_seed(step)
    return [torch.randn(s, generator=g) * 10.0 ** (step % 3 - 1) for s in SHAPES.values()]


@pytest.mark.parametrize(("fused", "launch"), [(True, False), (False, False), (True, True)])
def test_equals_torch_optim(fused, launch):
    trained, ours = problem(fused, launch=launch)
    assert sum(len(at) for at, _ in ours.groups) == launch * len(SHAPES)
    theirs = [torch.nn.Parameter(t.local.clone()) for t in trained]
    groups = [
        {"params": [p for p in theirs if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in theirs if p.dim() <= 1], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, betas=OPTIM.betas, eps=OPTIM.eps)
    for step in range(1, 9):
        scale = 2.0**step
        for t, p, g in zip(trained, theirs, gradients(step)):
            t.grad, p.grad = g * scale, g.clone()
        for group in reference.param_groups:
            group["lr"] = OPTIM.lr / step
        reference.step()
        ours.step(torch.tensor(OPTIM.lr / step), torch.tensor(scale), torch.tensor(False))
        for t, p in zip(trained, theirs):
            torch.testing.assert_close(t.local, p.detach(), rtol=1e-6, atol=1e-7, msg=t.name)
            state, want = ours.state()[t.name], reference.state[p]
            torch.testing.assert_close(state["mean"], want["exp_avg"], rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(state["square"], want["exp_avg_sq"], rtol=1e-6, atol=1e-9)
            assert state["count"] == want["step"] == step


@pytest.mark.parametrize("launch", [False, True])
@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_narrow_and_wide_weights_together(rounding, launch):
    """float32 weights beside bf16 ones go through torch's kernel or a launch of their own, and have no remainder."""
    trained, ours = problem(True, rounding, torch.bfloat16, wide=("a", "one"), launch=launch)
    alone, torchs = problem(True, launch=launch)
    assert len(ours.groups) == 1 + launch
    for t, p, g in zip(trained, alone, gradients(1)):
        t.grad, p.grad = g.to(t.local.dtype), g
    for optimizer in (ours, torchs):
        optimizer.step(torch.tensor(1e-2), torch.tensor(1.0), torch.tensor(False))
    state = ours.state()
    assert [("compensation" in s) for s in state.values()] == [
        rounding == "kahan" and n in ("bias", "b") for n in SHAPES
    ]
    for t, p in zip(trained, alone):
        if t.local.dtype == torch.float32:
            assert torch.equal(t.local, p.local)
        else:
            torch.testing.assert_close(t.local.float(), p.local, rtol=2**-6, atol=1e-3)


@pytest.mark.parametrize(("kind", "lacks"), [("cpu", False), ("cuda", False), ("cuda", True)])
def test_whose_kernel_float32_weights_take(box, monkeypatch, kind, lacks):
    """On a GPU ours, where it can be built, and else torch's, which is said; on a CPU torch's."""
    asked, job = {}, assembled(golden_run(box, packed=True))
    job.world = SimpleNamespace(device=SimpleNamespace(type=kind))
    job.optimizer_factory = lambda trained, make: asked.update(make.keywords)
    lack = Requirement(False, "torch.compile on a card needs a C compiler", "none of cc, gcc", "install gcc")
    monkeypatch.setattr(fused_adamw, "compilers", lambda device: [lack] if lacks else [])
    fused_adamw.FusedAdamW().optimizer(job)
    assert asked["fused"] and asked["launch"] == (kind == "cuda" and not lacks)
    said = "fused-adamw: uses torch's kernel; ours cannot be built here: none of cc, gcc"
    assert (said in job.notes) == lacks


def test_equals_the_baseline_over_eight_steps(box):
    def trained(**with_):
        job = assembled(golden_run(box, packed=True, **with_))
        return list(steps(job)), weights(job), job.optimizer

    (base, want, loop), (figures, found, fused) = trained(), trained(fused_adamw={})
    assert loop.reads_host and not fused.reads_host
    assert figures == [pytest.approx(line, rel=1e-5) for line in base]
    assert furthest(found, want) < 1e-5


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "loop"])
def test_what_the_loop_reads_and_the_kernel_does_not(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three numbers; how often each parameter was stepped lies on the host, as torch's own optimizer has it."""
    trained, ours = problem(fused)
    for t, g in zip(trained, gradients(1), strict=True):
        t.grad = g
    read, item = [], torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda t: read.append(t) or item(t))
    given = torch.tensor(1e-3), torch.tensor(1.0), torch.tensor(False)
    ours.step(*given)
    counts = {id(c) for c in ours.count}
    assert len([r for r in read if id(r) not in counts]) == (0 if fused else 3) and ours.reads_host != fused
