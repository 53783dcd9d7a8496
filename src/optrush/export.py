"""The trained model as a Hugging Face folder that transformers loads: `model/` of a run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor

from optrush import __version__
from optrush.distributed import agree
from optrush.errors import RunError
from optrush.job import Job
from optrush.model.weights import export

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
    """Parameters by canonical name, whole and on the host of rank 0; on the others only the gathering happens."""
    for t in job.trained:
        whole = t.parameter.detach()
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        yield t.name, whole.cpu() if not dist.is_initialized() or dist.get_rank() == 0 else whole
