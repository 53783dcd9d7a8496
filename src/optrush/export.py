"""The trained model as a Hugging Face folder that transformers loads: `model/` of a run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from optrush import __version__
from optrush.distributed import agree
from optrush.errors import RunError
from optrush.job import Job
from optrush.model.save import export

CARD = """---
library_name: transformers
tags: [optrush]
---
# {name}

Trained by optrush {version} with the objective `{objective}`, {steps} steps; techniques: {techniques}.
The run's `run.yaml` beside this folder says everything else.
"""


def write_model(job: Job, output: Path, steps: int, source: Path | None) -> Path:
    """Writes `model/` under the run's folder, whole or not at all: into a folder beside it first, then renamed.

    Every rank takes part (sharded parameters are gathered one at a time), rank 0 writes.
    """
    folder, fresh = output / "model", output / "model.tmp"
    tensors, error = _whole(job), None
    if job.world.rank == 0:
        try:
            _write(job, tensors, folder, fresh, steps, source)
        except (OSError, SafetensorError) as e:
            shutil.rmtree(fresh, ignore_errors=True)
            error = RunError(f"{folder} could not be written ({e}); the last checkpoint is whole: --resume auto")
    for _ in tensors:  # what rank 0 has not taken, the others must still gather with it
        pass
    agree(error)
    return folder


def _write(
    job: Job, tensors: Iterator[tuple[str, Tensor]], folder: Path, fresh: Path, steps: int, source: Path | None
) -> None:
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    export(fresh, tensors, job.recipe, job.hf)
    if job.tokenizer is not None:
        job.tokenizer.save_pretrained(fresh)
    if source is not None and (source / "generation_config.json").is_file():
        shutil.copyfile(source / "generation_config.json", fresh / "generation_config.json")
    card = CARD.format(
        name=folder.resolve().parent.name, version=__version__, objective=job.run.objective, steps=steps,
        techniques=", ".join(job.run.with_) or "none",
    )  # fmt: skip
    (fresh / "README.md").write_text(card)
    old = folder.with_name("model.old.tmp")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(fresh, folder)
    shutil.rmtree(old, ignore_errors=True)


def _whole(job: Job) -> Iterator[tuple[str, Tensor]]:
    """The published model's parameters by canonical name, whole and on the host of rank 0; on the others only the
    gathering happens. Adapters are merged in float32 and the sum is rounded; weights stored in another form are dense.
    """
    model, first = job.model, not dist.is_initialized() or dist.get_rank() == 0
    kept = model.embedding.weight
    assert isinstance(kept, Tensor)
    changed = {name: m for name, m in model.linears() if m.stored is not None or m.adapter is not None}
    for name, linear in changed.items():
        with _gathered(model, name):
            weight = linear.dense(torch.float32).detach()
            bias: Tensor | None = None if linear.bias is None else linear.bias.detach().float()
            if linear.adapter is not None:
                weight, bias = linear.adapter.merge(weight, bias)
            to = torch.device("cpu") if first else weight.device
            yield f"{name}.weight", weight.detach().to(to, kept.dtype)
            if bias is not None:
                yield f"{name}.bias", bias.detach().to(to, kept.dtype)
    for name, p in model.named_parameters():
        if any(name.startswith(f"{owner}.") for owner in changed):
            continue
        whole = p.detach()
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        yield name, whole.cpu() if first else whole


@contextmanager
def _gathered(model: nn.Module, name: str) -> Iterator[None]:
    """While it lasts, the module of that name holds its parameters whole."""
    owners = [name.rsplit(".", n)[0] for n in range(name.count(".") + 1)]
    cut = next((m for o in owners if isinstance(m := model.get_submodule(o), FSDPModule)), None)
    if cut is not None:
        cut.unshard()
    yield
    if cut is not None:
        cut.reshard()
