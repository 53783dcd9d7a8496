"""What blocks keep for the backward pass, on a GPU: real streams, real memory, real kernels' operators."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from optrush.config import Config, parse_config
from optrush.decide import decide
from optrush.models.activation_offload import Offload
from optrush.planner import search
from optrush.trainer.build import build
from optrush.trainer.trainer import Trainer, set_step

TINY = """
model: tiny
objective: sft
data: {sample: recipes, max_samples: 60, too_long: split}
batch: {seq: 512, tokens: 4096, micro_tokens: 2048}
optim: {lr: 1e-3, schedule: constant, warmup: 0}
train: {steps: 4}
output: unused
"""
LLAMA = """
model: {shape: llama-3.2-1b}
objective: pretrain
data: {random: 64}
batch: {seq: 2048, tokens: 16384, micro_tokens: 16384}
optim: {lr: 1e-5, schedule: constant, warmup: 0}
train: {steps: 4}
output: unused
"""
LARGE = ("bf16", "fused-adamw", "attention", "compile", "fused-loss")
SELECTIVE, OFFLOAD = "selective-recompute", "offload-activations"


def run_of(text: str, withs: tuple[str, ...]) -> Config:
    return parse_config(text, "test", withs=withs)


def job_of(text: str, withs: tuple[str, ...]) -> Trainer:
    trainer = build(decide(run_of(text, withs)))
    trainer.set_step = partial(set_step, trainer, steps=4)
    return trainer


def steps(trainer: Trainer, first: int, last: int) -> Iterator[float]:
    """Losses of steps `first` to `last`, as the loop takes them."""
    order = trainer.stream.plan(None, 4)
    for k in range(first, last + 1):
        batches = trainer.stream.batches(k - 1, order, rank=0, ranks=1, micro_rows=trainer.env.micro_rows)
        trainer.set_step(k)
        loss = trainer.forward_backward(batches, sum(b.n_terms for b in batches))
        trainer.optimizer_step()
        yield loss


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def trained(withs: tuple[str, ...]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of four steps, and the weights after them."""
    with deterministic():
        trainer = job_of(TINY, ("packing", *withs))
        losses = [loss.item() for loss in steps(trainer, 1, 4)]
        return losses, {t.name: t.local.clone() for t in trainer.trained}


PATHS = [(), ("amp", "attention:impl=sdpa"), ("bf16", "attention:impl=varlen"), (
    "bf16", "attention:impl=varlen", "compile", "fused-loss:chunk=512",
)]  # fmt: skip
KEPT = [(f"{SELECTIVE}:ops=products",), (f"{SELECTIVE}:ops=attention",)]
MOVED = [(OFFLOAD,), (f"{OFFLOAD}:keep=0",), (OFFLOAD, "recompute"), (OFFLOAD, "recompute:every=2")]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """The tiny model's tensors are worth moving here."""
    monkeypatch.setattr(Offload.__init__, "__kwdefaults__", {"page": 1 << 16, "least": 256, "take": lambda size: None})
    torch._dynamo.reset()


@pytest.mark.parametrize("path", PATHS[:3], ids="+".join)
@pytest.mark.parametrize("beside", [*KEPT, *MOVED], ids="+".join)
def test_equal_bits(path, beside):
    losses, weights = trained(path)
    found, after = trained((*path, *beside))
    assert found == losses
    assert all(torch.equal(after[name], w) for name, w in weights.items())


@pytest.mark.parametrize("beside", [*KEPT, (f"{SELECTIVE}:budget=0.5",), *MOVED, (OFFLOAD, SELECTIVE)], ids="+".join)
def test_compiled(beside):
    losses, weights = trained(PATHS[3])
    found, after = trained((*PATHS[3], *beside))
    assert found == pytest.approx(losses, rel=5e-3)
    for name, w in weights.items():
        assert (after[name].float() - w.float()).norm() <= 2e-2 * w.float().norm(), name


def offloading(trainer: Trainer) -> Offload:
    return next(c.cell_contents for c in trainer.model.block_call.__closure__ if isinstance(c.cell_contents, Offload))


@pytest.mark.parametrize("path", [PATHS[2], PATHS[3]], ids="+".join)
def test_a_step_never_waits_for_the_device(path):
    """Nor takes pinned memory, from the third on."""
    trainer = job_of(TINY, ("packing", "fused-adamw", *path, OFFLOAD))
    list(steps(trainer, 1, 2))
    made = offloading(trainer).pages.allocated
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses = list(steps(trainer, 3, 4))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert offloading(trainer).pages.allocated == made > 0
    assert all(torch.isfinite(loss) for loss in losses)


def measured(*beside: str) -> tuple[int, float]:
    """(peak bytes, seconds of a step) of the 1B shape, compiled anew: a budget is read when a block is compiled."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    trainer = job_of(LLAMA, (*LARGE, *beside))
    list(steps(trainer, 1, 2))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    list(steps(trainer, 3, 4))
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), (time.perf_counter() - start) / 2


@pytest.mark.parametrize("beside", [
    ("recompute",), (f"{SELECTIVE}:ops=products",), (f"{SELECTIVE}:ops=attention",), (OFFLOAD,), (OFFLOAD, "recompute"),
    (OFFLOAD, f"{SELECTIVE}:ops=products"),
], ids="+".join)  # fmt: skip
def test_the_plan_knows_the_peak(beside, monkeypatch):
    monkeypatch.undo()  # real pages
    said = search.predict(run_of(LLAMA, (*LARGE, *beside)), "h200")
    peak, seconds = measured(*beside)
    print(f"{'+'.join(beside)}: {peak / 2**30:.2f} GiB, planned {said.peak_bytes / 2**30:.2f}; {seconds:.3f} s a step")
    assert peak == pytest.approx(said.peak_bytes, rel=0.08)


@pytest.mark.parametrize("beside", [(), ("fused-kernels",)], ids=["", "fused-kernels"])
@pytest.mark.parametrize("budget", [0.3, 0.5, 0.6, 0.9])
def test_the_plan_knows_what_a_budget_keeps(budget, beside):
    withs = (*beside, f"{SELECTIVE}:budget={budget}")
    said = search.predict(run_of(LLAMA, (*LARGE, *withs)), "h200").peak_bytes
    peak, seconds = measured(*withs)
    print(f"{'+'.join(withs)}: {peak / 2**30:.2f} GiB, planned {said / 2**30:.2f}; {seconds:.3f} s a step")
    assert peak == pytest.approx(said, rel=0.05)
