"""Real graphs against the plain window, 8-bit products against the emulated ones, tuned blocks against the baseline."""

import json
import shutil
import subprocess
import sys
from typing import Literal

import pytest
import torch
import torch.nn.functional as F

from optrush.benchmark import worker
from optrush.config import parse_config
from optrush.data.batch import Batch
from optrush.decide import decide
from optrush.kernels import float8
from optrush.technique import library
from optrush.trainer import run as fit
from optrush.trainer.build import build
from optrush.trainer.trainer import Trainer, evaluate, set_step

from trials import FASTEST

BASE = """
model: tiny
objective: sft
data: {sample: recipes, max_samples: 60, too_long: split, eval: 0.1}
batch: {seq: 512, tokens: 4096, micro_tokens: 2048}
optim: {lr: 1e-3, schedule: constant, warmup: 0, clip: 1.0}
train: {steps: 6, log_every: 1, save_every: 3}
output: unused
"""
STEPS = 6


def job_of(*withs: str) -> Trainer:
    trainer = build(decide(parse_config(BASE, "test", withs=withs)))
    trainer.set_step = lambda n: set_step(trainer, n, STEPS)
    return trainer


def windows(trainer: Trainer, n: int = STEPS) -> list[list[Batch]]:
    plan = trainer.stream.plan(None, STEPS)
    rows = trainer.env.micro_rows
    return [trainer.stream.batches(k, plan, rank=0, ranks=1, micro_rows=rows) for k in range(n)]


def played(trainer: Trainer) -> tuple[list[tuple[float, float, bool]], dict[str, torch.Tensor]]:
    """(loss, norm, skipped) by step, and the weights afterwards."""
    lines = []
    for k, batches in enumerate(windows(trainer), 1):
        trainer.set_step(k)
        loss = trainer.forward_backward(batches, sum(b.n_terms for b in batches))
        norm, skipped = trainer.optimizer_step()
        lines.append((loss.item(), norm.item(), bool(skipped)))
    return lines, {t.name: t.local.clone() for t in trainer.trained}


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


# Graphs.

ORDERED = [  # what adds in one order, if torch is told to
    ("packing",),
    ("packing", "fused-adamw", "fused-loss:chunk=512"),
    ("packing", "fused-adamw", "amp:dtype=fp16"),
    ("packing", "fused-adamw", "bf16", "compile", "fused-loss:chunk=512"),
    ("fused-adamw", "bf16", "attention:impl=cudnn", "compile"),
]
ATOMIC = [  # attention within documents, whose backward pass has no order: two plain runs differ in the last bits
    ("packing", "fused-adamw", "attention:impl=sdpa", "fused-loss:chunk=512"),
    ("packing", "fused-adamw", "amp:dtype=fp16", "attention:impl=varlen"),
    ("packing", "fused-adamw", "bf16", "attention:impl=varlen", "compile", "fused-loss:chunk=512"),
]


@pytest.mark.skipif(library("quack-kernels") is None or library("flash-attn-4") is None, reason="not installed")
def test_the_fastest_kernels_are_recorded():
    want, _ = played(job_of("packing", *FASTEST))
    found, _ = played(job_of("cuda-graphs", "packing", *FASTEST))
    for a, b in zip(found, want):
        assert a[:2] == pytest.approx(b[:2], rel=1e-2) and a[2] == b[2]


@pytest.mark.parametrize("withs", ORDERED, ids="+".join)
def test_equal_bits_with_the_plain_window(withs, deterministic):
    """Two micro-batches a step, other documents and divisors each time."""
    want, want_weights = played(job_of(*withs))
    found, found_weights = played(job_of("cuda-graphs", *withs))
    assert found == want
    assert all(torch.equal(found_weights[name], w) for name, w in want_weights.items())


@pytest.mark.parametrize("withs", ATOMIC, ids="+".join)
def test_near_the_plain_window_as_runs_go(withs):
    """Without torch's deterministic kernels, as people run it."""
    want, _ = played(job_of(*withs))
    found, _ = played(job_of("cuda-graphs", *withs))
    for a, b in zip(found, want):
        assert a[:2] == pytest.approx(b[:2], rel=1e-2) and a[2] == b[2]


@pytest.mark.parametrize("withs", [*ORDERED, ("cuda-graphs", *ORDERED[-1])], ids="+".join)
def test_marks_lie_in_the_queue_and_in_the_graph(withs, deterministic):
    """Two micro-batches a step: two of the head's regions, forward and backward, in each; the same bits as without."""
    wanted, weights = played(job_of(*withs))
    trainer = job_of(*withs)
    marks = worker.RegionMarks(trainer)
    with marks.watching() as spans:
        found, after = played(trainer)
    assert found == wanted and all(torch.equal(after[n], w) for n, w in weights.items())
    names = [m[1] for s in spans if (m := worker.MARK.search(s.name))]
    assert [names.count(n) for n in ("asinh", "acosh")] == [4 * STEPS] * 2 or "cuda-graphs" in withs
    assert names.count("asinh") == names.count("acosh") >= 4 * (STEPS - 1), "replays have theirs too"
    assert names.count("atanh") == names.count("acos") == 2 * STEPS, "around the update, and the optimizer in it"
    assert names.count("asin") == STEPS and worker.steady(spans)[1] == STEPS - 1
    told = worker.part_seconds(spans)
    assert min(told[p] for p in ("products", "head", "optimizer", "elementwise")) > 0, told
    assert ("attention:impl=cudnn" in withs) == (told["attention"] > 0), told


def test_a_replay_starts_what_was_recorded_and_waits_for_nothing():
    trainer = job_of("cuda-graphs", "packing", "fused-adamw", "bf16", "attention:impl=varlen", "compile")
    made = windows(trainer)
    for k, batches in enumerate(made, 1):
        torch.cuda.set_sync_debug_mode("error" if k > 2 else "default")
        try:
            trainer.set_step(k)
            trainer.forward_backward(batches, sum(b.n_terms for b in batches))
            trainer.optimizer_step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
        trainer.forward_backward(made[0], 1000)
        torch.cuda.synchronize()
    calls = {e.key: e.count for e in profile.key_averages()}
    assert calls.get("cudaGraphLaunch") == 1
    assert calls.get("cudaLaunchKernel", 0) + calls.get("cuLaunchKernel", 0) < 20


def test_evaluation_and_windows_of_other_shapes_beside_it(deterministic):
    ours, plain = (job_of(*more, "packing", "fused-adamw") for more in (("cuda-graphs",), ()))
    for k, batches in enumerate(windows(ours), 1):
        part = batches[:1] if k % 2 else batches
        for trainer in (ours, plain):
            trainer.set_step(k)
        a, b = (trainer.forward_backward(part, sum(x.n_terms for x in part)) for trainer in (ours, plain))
        assert torch.equal(a, b)
        assert evaluate(ours) == evaluate(plain)
        for trainer in (ours, plain):
            trainer.optimizer_step()
    assert all(torch.equal(a.local, b.local) for a, b in zip(ours.trained, plain.trained))


def test_it_resumes_with_equal_bits(tmp_path, deterministic):
    """The last three steps once more, from the checkpoint of the third, in a recording of their own."""
    text = BASE.replace("output: unused", f"output: {tmp_path / 'out'}")
    config = parse_config(text, "test", withs=("cuda-graphs", "packing", "fused-adamw"))

    def trained(resume: Literal["auto"] | None) -> dict[int, tuple[float, float]]:
        fit.run(fit.RunRequest(decide(config), resume))
        lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
        return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines if "loss" in line}

    want = trained(None)
    shutil.rmtree(tmp_path / "out/checkpoints/step-000006")
    assert trained("auto") == want and len(want) == STEPS


# 8-bit products.

eight = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="no 8-bit products"
)


@eight
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("m", "k", "n"), [(512, 256, 768), (4096, 2048, 3072)])
def test_the_devices_products_are_the_emulated_ones(m, k, n, dtype):
    draw = torch.Generator("cuda").manual_seed(1)
    shapes = ((m, k), (n, k), (m, n))
    x, w, g = (torch.randn(s, generator=draw, device="cuda").to(dtype) for s in shapes)
    found, want = [], []
    for device, into in (("cuda", found), ("cpu", want)):
        a, b = (t.to(device).requires_grad_() for t in (x, w))
        y = float8.float8_linear(a, b, None)
        into += [t.float().cpu() for t in (y, *torch.autograd.grad(y, [a, b], g.to(device)))]
    for a, b, off in zip(found, want, (5e-3, 5e-3, 5e-3)):  # sums of fewer bits, and bf16's last one
        assert (a - b).norm() / b.norm() < off


@eight
@pytest.mark.parametrize("more", [(), ("cuda-graphs",), ("fp8:targets=mlp",)], ids="+".join)
@pytest.mark.parametrize("precision", ["bf16", "amp"])
def test_eight_bits_are_near_bf16(precision, more):
    """The first step's loss and gradients; compiled, as it must be on a GPU."""

    def first(trainer: Trainer):
        batches = windows(trainer, 1)[0]
        trainer.set_step(1)
        loss = trainer.forward_backward(batches, sum(b.n_terms for b in batches))
        return loss.item(), torch.cat([t.grad.float().flatten() for t in trainer.trained])

    withs = ("packing", precision, "attention:impl=varlen", "compile", "fused-loss:chunk=512")
    extra = more if any("fp8" in m for m in more) else (*more, "fp8")
    loss, grads = first(job_of(*withs))
    off, found = first(job_of(*withs, *extra))
    print(f"loss {loss} {off}, cosine {F.cosine_similarity(found, grads, dim=0).item():.4f}")
    assert off == pytest.approx(loss, rel=1e-2) and off != loss
    assert F.cosine_similarity(found, grads, dim=0) > 0.95


# Tuning.
def test_tuned_blocks_match_the_baseline():
    withs = ("packing", "attention:impl=sdpa", "fused-loss:chunk=512")
    want, _ = played(job_of(*withs))
    found, _ = played(job_of(*withs, "compile:autotune=true"))
    for a, b in zip(found, want):
        assert a[:2] == pytest.approx(b[:2], rel=1e-3)


REFUSED = """
import torch
from optrush.errors import NeedsError
from optrush.techniques.cuda_graphs import recorded

x = torch.ones(8, device="cuda")
try:
    recorded(lambda: float(x.sum()), lambda: None)
except NeedsError as error:
    print(error.asked)
"""


def test_what_cannot_be_recorded_is_said():
    """In a process of its own, for it leaves a recording that the driver gave up."""
    done = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, timeout=200)
    assert "records a window" in done.stdout, done.stderr[-2000:]
