"""Mixed precision: products in the lower type, figures near float32's, and a loss scale that falls and rises."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshes import further
from optrush.techniques import amp

from golden.make_golden import CASES
from trials import all_bits, assembled, first_gradients, golden_run, same_bits, steps

# Of float32's: the loss, and the whole gradient (its difference's norm over its norm), which is 13 roundings away (2^-9
# in bf16, 2^-12 in fp16) through two layers.
CLOSE = {"bf16": (2e-3, 4e-2), "fp16": (2e-4, 5e-3)}


def distance(found, want) -> float:
    """Norm of the difference of all gradients over the norm of all."""
    off = sum((found[n] - want[n]).double().square().sum() for n in want)
    return float((off / sum(w.double().square().sum() for w in want.values())).sqrt())


def unscaled(job):
    loss, grads = first_gradients(job)
    return loss, {name: g / job.scale for name, g in grads.items()}


class Products(TorchDispatchMode):
    """Types of the matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default):
            self.seen.add(out.dtype)
        return out


def between_blocks(trainer) -> torch.dtype:
    """The type of what enters the second block."""
    seen = []
    handle = trainer.model.blocks["1"].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
    first_gradients(trainer)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize(
    ("stream", "dtype"), further([("float32", "bf16"), ("half", "fp16"), ("half", "bf16"), ("float32", "fp16")], 2)
)
@pytest.mark.parametrize("others", further([{"attention": {}, "fused_loss": {"chunk": 32}, "recompute": {}}, {}], 1))
def test_close_to_float32(box, dtype, others, stream):
    want_loss, want = first_gradients(assembled(golden_run(box, CASES["chat"], packed=True)))
    job = assembled(golden_run(box, CASES["chat"], packed=True, amp={"dtype": dtype, "stream": stream}, **others))
    with Products() as products:
        loss, grads = unscaled(job)
    lower = torch.bfloat16 if dtype == "bf16" else torch.float16
    assert lower in products.seen
    if "fused_loss" not in others:  # which sums the head's gradient over chunks in float32
        assert products.seen == {lower}
    assert {t.local.dtype for t in job.trained} == {t.grad.dtype for t in job.trained} == {torch.float32}
    assert {s.dtype for states in job.optimizer.state().values() for s in states.values()} == {torch.float32}
    assert between_blocks(job) == (torch.float32 if stream == "float32" else lower)
    close = CLOSE[dtype]
    assert 0 < abs(loss - want_loss) / want_loss < close[0]
    assert 0 < distance(grads, want) < close[1]


@pytest.mark.parametrize("dtype", further(["fp16", "bf16"], 1))
def test_close_to_float32_over_four_steps(box, dtype):
    base, found = (steps(assembled(golden_run(box, packed=True, **w)), 4) for w in ({}, {"amp": {"dtype": dtype}}))
    for (loss, norm, _), (want_loss, want_norm, _) in zip(found, base, strict=True):
        assert loss == pytest.approx(want_loss, rel=2e-3)
        assert norm == pytest.approx(want_norm, rel=2e-2), "the norm is of unscaled gradients"


@pytest.mark.parametrize("optimizer", further([{"fused_adamw": {}}, {}], 1))
def test_an_overflow_skips_the_update_and_halves_the_scale(box, optimizer):
    job = assembled(golden_run(box, packed=True, amp={"dtype": "fp16"}, **optimizer))
    assert job.scale.item() == 2.0**16
    assert [skipped for *_, skipped in steps(job, 2)] == [False, False]
    job.scale.fill_(2.0**24)
    before = all_bits(job)
    ((_, norm, skipped),) = steps(job, 1, first=3)
    assert skipped and not torch.isfinite(torch.tensor(norm))
    assert same_bits(all_bits(job), before)
    assert job.scale.item() == 2.0**23
    falling = []
    for k in range(4, 9):
        ((_, _, skipped),) = steps(job, 1, first=k)
        falling.append((skipped, job.scale.item()))
    scales = [2.0**23, *(scale for _, scale in falling)]
    for (skipped, after), scale in zip(falling, scales):
        assert after == (scale / 2 if skipped else scale)
    assert not falling[-1][0], "it finds a scale that fits"


def test_good_updates_raise_the_scale(box, monkeypatch):
    monkeypatch.setattr(amp, "GROWTH_INTERVAL", 3)
    job = assembled(golden_run(box, packed=True, amp={"dtype": "fp16"}))
    job.scale.fill_(256.0)
    scales = []
    for k in range(1, 9):
        list(steps(job, 1, first=k))
        scales.append(job.scale.item())
    assert scales == [256.0, 256.0, 512.0, 512.0, 512.0, 1024.0, 1024.0, 1024.0]


def test_the_scale_outlives_the_run(box):
    job = assembled(golden_run(box, packed=True, amp={"dtype": "fp16"}))
    job.scale.fill_(512.0)
    list(steps(job, 3))
    saved = job.state["amp"].save()
    assert saved == {"scale": 512.0, "good": 3.0}
    other = assembled(golden_run(box, packed=True, amp={"dtype": "fp16"}))
    other.state["amp"].load(saved)
    assert other.scale.item() == 512.0 and other.state["amp"].good.item() == 3.0


def test_bf16_needs_no_scale(box):
    job = assembled(golden_run(box, packed=True, amp={}))
    assert job.scale.item() == 1.0 and not job.state


def on_two_ranks(box, dtype, with_):
    """This rank's (loss, norm) of three steps, and whether autocast was left to do."""
    job = assembled(golden_run(box, CASES["chat"], packed=True, amp={"dtype": dtype}, **with_))
    return [line[:2] for line in steps(job, 3)], job.autocast


@pytest.mark.parametrize(
    ("data", "autocast"), further([({"ddp": {}}, True), ({"fsdp": {}}, False), ({"fsdp": {"stage": 2}}, False)], 2)
)
@pytest.mark.parametrize("dtype", further(["fp16", "bf16"], 1))
def test_on_two_ranks(box, pair, dtype, data, autocast):
    base = [line[:2] for line in steps(assembled(golden_run(box, CASES["chat"], packed=True)), 3)]
    for found, cast in pair(on_two_ranks, box, dtype, data):
        assert cast == autocast
        for (loss, norm), (want_loss, want_norm) in zip(found, base):
            assert loss == pytest.approx(want_loss, rel=2e-3)
            assert norm == pytest.approx(want_norm, rel=2e-2)
