"""Tiny runs on the golden models and documents, through the real path: text -> Run -> prepare -> assemble -> train."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from optrush import config
from optrush.data.batch import Batch
from optrush.resolve import Prepared, prepare
from optrush.technique import Technique
from optrush.techniques import ALL
from optrush.trainer import run as fit
from optrush.trainer import trainer
from optrush.trainer.build import assemble
from optrush.trainer.trainer import Job, Plan

from golden.make_golden import BETAS, DECAY, EPS, LR, PER_STEP, SEED, STEPS, WARMUP, Case, T

UNTIED = Case(False)
FASTEST = (  # as --with takes them: what benchmarks/llama1b-peers.yaml has, with a chunk for small models
    "fused-adamw", "bf16", "attention:impl=fa4", "fused-block:impl=quack", "fused-norm", "fused-rotation", "compile",
    "fused-loss:impl=quack,chunk=512",
)  # fmt: skip


def golden_run(
    box: Path,
    case: Case = UNTIED,
    *,
    rows: int = 2,
    packed: bool = False,
    sets: Sequence[str] = (),
    **with_: dict[str, Any],
) -> config.Run:
    """The golden script's run. rows: of one micro-batch of one rank; packed: 8 rows a step instead of 16."""
    with_ = {name.replace("_", "-"): options for name, options in with_.items()}
    if packed and not {"pad", "sort-by-length", "wrap"} & with_.keys():
        with_["packing"] = {"window": PER_STEP}  # a step's documents share its rows, and no other's
    output = box / "output"
    tokens = T * PER_STEP // (1 + packed)
    # It wants a step's gradients from one micro-batch, and no clipping (and one rank, which others do not).
    whole = "update-in-backward" in with_ and not {"ddp", "fsdp"} & with_.keys()
    document = {
        "model": str(box / ("tied" if case.tied else "untied")),
        "objective": "sft" if case.chat else "pretrain",
        "data": {"path": str(box / f"{'chat' if case.chat else 'text'}.jsonl")},
        "batch": {"seq": T, "tokens": tokens, "micro_tokens": tokens if whole else T * rows},
        "optim": {
            "lr": LR, "warmup": WARMUP, "weight_decay": DECAY, "betas": list(BETAS), "eps": EPS,
            "clip": None if whole else 1.0,
        },
        "train": {"steps": STEPS, "log_every": 1},
        "seed": SEED,
        "output": str(output),
        "with": with_,
    }  # fmt: skip
    return config.parse(yaml.safe_dump(document), "golden.yaml", sets)


def metrics(run: config.Run, classes: Sequence[type[Technique]] = ALL) -> list[dict[str, Any]]:
    """Trains to the end and returns what metrics.jsonl says; empty on other ranks than the first."""
    from optrush.launch import launched

    output, others = Path(run.output), launched()[0]
    if not others:
        shutil.rmtree(output, ignore_errors=True)  # what a process of an earlier test wrote there when that was over
    prepared = prepare(run, classes)
    assert fit.fit(prepared).code == 0
    if others:
        return []
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(output)
    return lines


def assembled(run: config.Run | Prepared, classes: Sequence[type[Technique]] = ALL, **options: Any) -> Job:
    """A job whose `batches` and `begin` are those of the run."""
    prepared = prepare(run, classes) if isinstance(run, config.Run) else run
    job = assemble(prepared, **options)
    wire(job)
    return job


def wire(job: Job) -> None:
    """What the training run itself adds to a job: its batches and what begins a step."""
    steps = job.run.train.steps
    plan = Plan(job, job.stream.plan(None if steps else job.run.train.epochs, steps))
    job.batches = fit.batches(job, plan)
    job.begin = lambda n: trainer.begin(job, n, plan.total)


def steps(job: Job, n: int = STEPS, first: int = 1) -> Iterator[tuple[float, float, bool]]:
    """(loss, norm, skipped) of each step, as the loop takes it."""
    for k in range(first, first + n):
        batches = next(job.batches)
        terms = job.total(sum(b.n_terms for b in batches))
        job.begin(k)
        loss = job.gradients(batches, terms)
        norm, skipped = job.update()
        yield loss.item(), norm.item(), bool(skipped)


def first_gradients(job: Job) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and whole gradients by canonical name of the first step; nothing is updated."""
    batches = next(job.batches)
    job.begin(1)
    loss = job.gradients(batches, job.total(sum(b.n_terms for b in batches)))
    return loss.item(), {t.name: whole(t.parameter.grad).clone() for t in job.trained}


def published(job: Job) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the first step, these under transformers' names."""
    loss, found = first_gradients(job)
    return loss, {hf: part for t in job.trained for hf, part in job.recipe.split(t.name, found[t.name])}


def weights(job: Job) -> dict[str, torch.Tensor]:
    """Whole weights by canonical name, copies."""
    return {t.name: whole(t.parameter.detach()).clone() for t in job.trained}


def whole(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, in units of the largest value of `b`."""
    return ((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item()


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(apart(a[name], b[name]) for name in b)


def kept(job: Job) -> int:
    """Bytes that the forward pass keeps for the backward pass, each storage once."""
    held: list[torch.Tensor] = []  # alive, so that no address is given twice
    batches = job.stream.batches(0, job.stream.plan(None, 1), rank=0, ranks=1, micro_rows=job.setup.micro_rows)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (held.append(t), t)[1], lambda t: t):
        job.loss(batches[0])
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())


def micro(job: Job) -> Batch:
    """The first micro-batch of the run; the job's own batches stay where they are."""
    other = copy.copy(job)
    wire(other)
    return next(other.batches)[0]


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended, and whose parent has not asked yet, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
