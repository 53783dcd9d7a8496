"""Tiny runs on the golden models and documents, through the real path: text -> Run -> prepare -> assemble -> train."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from optrush import files
from optrush.config import Config, parse_config
from optrush.data.batch import Batch
from optrush.data.length_estimate import estimate_fill
from optrush.decide import Decided, decide
from optrush.hardware import Device
from optrush.models.decoder import Decoder
from optrush.models.shapes import HF, ModelShape
from optrush.models.traced import shape_of
from optrush.planner import baseline
from optrush.planner.ledger import Ledger
from optrush.technique import Environment, Technique
from optrush.techniques import ALL
from optrush.trainer import checkpoint
from optrush.trainer import run as fit
from optrush.trainer.build import build
from optrush.trainer.trainer import RunPlan, Trainer, set_step
from optrush_apollo import Apollo

from golden.make_golden import BETAS, DECAY, EPS, LR, PER_STEP, SEED, STEPS, WARMUP, Case, T

UNTIED = Case(False)
KNOWN = (*ALL, Apollo)  # the package's own, and the optimizer of examples/plugin-optimizer
FASTEST = (  # as --with takes them: what benchmarks/llama1b-peers.yaml has, with a chunk for small models
    "fused-adamw", "bf16", "attention:impl=fa4", "fused-kernels:mlp=quack,norm=true,rope=true", "compile",
    "fused-loss:impl=quack,chunk=512",
)  # fmt: skip


def undrawn(patch: pytest.MonkeyPatch) -> None:
    """Let a run write its report and its curve as empty files."""

    def write_run(folder: Path, ranks: int | None = None) -> None:
        for name in ("loss.png", "report.html"):
            files.write_whole(folder / name, b"")

    patch.setattr(fit, "write_run", write_run)


def golden_run(
    box: Path,
    case: Case = UNTIED,
    *,
    rows: int = 2,
    packed: bool = False,
    sets: Sequence[str] = (),
    **with_: dict[str, Any],
) -> Config:
    """The golden script's run. rows: of one micro-batch of one rank; packed: 8 rows a step instead of 16."""
    with_ = {name.replace("_", "-"): options for name, options in with_.items()}
    if packed and not {"pad", "sort-by-length", "wrap"} & with_.keys():
        with_["packing"] = {"window": PER_STEP}  # a step's documents share its rows, and no other's
    output = box / "output"
    tokens = T * PER_STEP // (1 + packed)
    # It wants a step's gradients from one micro-batch, and no clipping (and one rank, which others do not).
    whole = "update-in-backward" in with_ and not {"ddp", "fsdp", "experts", "quantised-links"} & with_.keys()
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
    return parse_config(yaml.safe_dump(document), "golden.yaml", sets)


def shaped(
    shape: str, *withs: str, rows: int = 8, seq: int = 2048, windows: int = 1, sets: Sequence[str] = ()
) -> Config:
    """A run of a published shape on random tokens. rows: of a micro-batch; windows: micro-batches a step."""
    text = (
        f"{{model: {{shape: {shape}}}, objective: pretrain, data: {{random: 64}}, train: {{steps: 40000}}, output: o}}"
    )
    batch = [f"batch.seq={seq}", f"batch.tokens={rows * seq * windows}", f"batch.micro_tokens={rows * seq}"]
    return parse_config(text, "shaped", [*batch, *sets], withs)


def ledgers(
    config: Config, device: Device, ranks: int, classes: Sequence[type[Technique]] = ALL
) -> tuple[list[Ledger], Environment, HF]:
    """The ledger of each rank of a pipeline (one without a pipeline), the environment and the config.json."""
    decided, lengths = decide(config, classes, ranks, device), estimate_fill(config)
    env = dataclasses.replace(decided.env, reach=lengths.reach)
    return baseline.books(decided.techniques, env, shape_of(decided.hf), lengths.padding), env, decided.hf


def metrics(config: Config, classes: Sequence[type[Technique]] = ALL) -> list[dict[str, Any]]:
    """Trains to the end and returns what metrics.jsonl says; empty on other ranks than the first."""
    from optrush.launch import launched

    output, others = Path(config.output), launched()[0]
    if not others:
        shutil.rmtree(output, ignore_errors=True)  # what a process of an earlier test wrote there when that was over
    prepared = decide(config, classes)
    assert fit.run(fit.RunRequest(prepared)).code == 0
    if others:
        return []
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(output)
    return [line for line in lines if "start_s" not in line]


def assembled(config: Config | Decided, classes: Sequence[type[Technique]] = KNOWN, **options: Any) -> Trainer:
    """A job whose `batches` and `begin` are those of the run."""
    prepared = decide(config, classes) if isinstance(config, Config) else config
    trainer = build(prepared, **options)
    wire(trainer)
    return trainer


def wire(trainer: Trainer) -> None:
    """What the training run itself adds to a job: its batches and what begins a step."""
    steps = trainer.config.train.steps
    plan = RunPlan(trainer, trainer.stream.plan(None if steps else trainer.config.train.epochs, steps))
    trainer.batches = fit.batches(trainer, plan)
    trainer.set_step = lambda n: set_step(trainer, n, plan.total)


def steps(trainer: Trainer, n: int = STEPS, first: int = 1) -> Iterator[tuple[float, float, bool]]:
    """(loss, norm, skipped) of each step, as the loop takes it."""
    for k in range(first, first + n):
        batches = next(trainer.batches)
        terms = trainer.all_reduce_terms(sum(b.n_terms for b in batches))
        trainer.set_step(k)
        loss = trainer.forward_backward(batches, terms)
        norm, skipped = trainer.optimizer_step()
        yield loss.item(), norm.item(), bool(skipped)


def first_gradients(trainer: Trainer) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and whole gradients by canonical name of the first step; nothing is updated."""
    batches = next(trainer.batches)
    trainer.set_step(1)
    loss = trainer.forward_backward(batches, trainer.all_reduce_terms(sum(b.n_terms for b in batches)))
    return loss.item(), {t.name: t.whole_grad.clone() for t in trainer.trained}


def published(trainer: Trainer) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the first step, these under transformers' names."""
    loss, found = first_gradients(trainer)
    return loss, {hf: part for t in trainer.trained for hf, part in trainer.weight_map.split(t.name, found[t.name])}


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Whole weights by canonical name, copies."""
    return {t.name: t.whole.clone() for t in trainer.trained}


def all_bits(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Copies of weights, whole, and of states, whole or this rank's."""
    found = {f"{n} {k}": s.clone() for n, by in trainer.optimizer.state().items() for k, s in by.items()}
    return found | weights(trainer)


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def learnt(trainer: Trainer) -> Trainer:
    """The job with adapters that have learnt something already, so that every gradient is there."""
    for t in trainer.trained:
        if ".adapter." in t.name and t.local.dim() == 1 and (t.local == 1).all():  # factors
            t.local.copy_(1 + 0.2 * torch.cos(torch.arange(t.offset[0], t.offset[0] + len(t.local))))
        elif t.name.endswith((".b", "_b")):
            drawn = torch.randn(t.full_shape, generator=torch.Generator().manual_seed(len(t.name))) * 0.1
            t.local.copy_(drawn[tuple(slice(o, o + n) for o, n in zip(t.offset, t.local.shape))])
    return trainer


def goes_on(config: Config, begun: Callable[[Config], Trainer] = assembled, n: int = 3) -> tuple[Path, Trainer]:
    """Assert that a run goes on from its checkpoint to the bit; return that of its step 2, and the job."""
    straight = begun(config)
    list(steps(straight, 2))
    path = checkpoint.save(straight, 2, checkpoint.Meta("00ff", 0, fingerprints=straight.fingerprints))
    want = list(steps(straight, n - 2, first=3))
    again = begun(config)
    checkpoint.restore(again, path, again.fingerprints)
    for _ in range(2):
        next(again.batches)
    assert list(steps(again, n - 2, first=3)) == want and same_bits(all_bits(again), all_bits(straight))
    return path, again


def whole(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, in units of the largest value of `b`."""
    return ((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item()


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(apart(a[name], b[name]) for name in b)


def kept(trainer: Trainer) -> int:
    """Bytes that the forward pass keeps for the backward pass, each storage once."""
    held: list[torch.Tensor] = []  # alive, so that no address is given twice
    batches = trainer.stream.batches(
        0, trainer.stream.plan(None, 1), rank=0, ranks=1, micro_rows=trainer.env.micro_rows
    )
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (held.append(t), t)[1], lambda t: t):
        trainer.loss(batches[0])
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())


def micro(trainer: Trainer) -> Batch:
    """The first micro-batch of the run; the job's own batches stay where they are."""
    other = copy.copy(trainer)
    wire(other)
    return next(other.batches)[0]


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended, and whose parent has not asked yet, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def build_decoder(hf: Any, dtype: torch.dtype) -> Decoder:
    """Return the decoder of a config.json, on the meta device."""
    return Decoder(ModelShape.read(hf), device=torch.device("meta"), dtype=dtype)
