"""The trained model as a Hugging Face folder that transformers loads: `model/` of a run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn

from optrush import card
from optrush.data.chat_template import turn_ends
from optrush.distributed import agree
from optrush.errors import NeedsError, RunError, UserError
from optrush.job import Job
from optrush.models.weights import export
from optrush.peft import io
from optrush.sharded import gathered, is_gathered

GENERATION = "generation_config.json"
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_model(job: Job, output: Path, steps: int, source: Path | None) -> Path:
    """Writes `model/` under the run's folder, whole or not at all: into a folder beside it first, then renamed.

    Every rank takes part (sharded parameters are gathered one at a time), rank 0 writes.
    """
    folder, fresh = output / "model", output / "model.tmp"
    tensors, error = whole(job), None
    if job.world.rank == 0:
        try:
            _write(job, tensors, folder, fresh, steps, source)
        except (OSError, SafetensorError, UserError) as e:
            shutil.rmtree(fresh, ignore_errors=True)
            error = RunError(f"{folder} could not be written ({e}); the last checkpoint is whole: --resume auto")
    for _ in tensors:  # what rank 0 has not taken, the others must still gather with it
        pass
    agree(error)
    if io.adapters(job.model):
        write_adapter(job, output / "adapter")
    return folder


def write_adapter(job: Job, folder: Path) -> Path:
    """Writes what a job with adapters has learnt as PEFT keeps it, whole or not at all; every rank takes part."""
    values, error = learnt(job), None
    fresh = folder.with_name(f"{folder.name}.tmp")
    if job.world.rank == 0:
        base = job.run.model.path or job.run.model.shape
        try:
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir(parents=True)
            io.write(fresh, job.model, job.recipe, values, str(base))
            _replace(fresh, folder)
        except (OSError, SafetensorError) as e:
            shutil.rmtree(fresh, ignore_errors=True)
            error = RunError(f"{folder} could not be written ({e}); the last checkpoint is whole: --resume auto")
    agree(error)
    return folder


def learnt(job: Job) -> dict[str, Tensor]:
    """Parameters that are trained by canonical name, whole, on the host of rank 0; every rank takes part."""
    found: dict[str, Tensor] = {}
    for t in job.trained:
        values = gathered(t.parameter.detach())
        if job.world.rank == 0:
            found[t.name] = values.cpu()
    return found


def _write(
    job: Job, tensors: Iterator[tuple[str, Tensor]], folder: Path, fresh: Path, steps: int, source: Path | None
) -> None:
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    export(fresh, tensors, job.recipe, job.hf)
    if job.tokenizer is not None:
        job.tokenizer.save_pretrained(fresh)
    write_generation(job, fresh, source)
    text = card.card(job.run, folder.parent, steps, source, job.sources.summary)
    (fresh / card.NAME).write_text(text, encoding="utf-8")
    _replace(fresh, folder)


def _replace(fresh: Path, folder: Path) -> None:
    """Gives a finished folder its name; one that has it goes."""
    old = folder.with_name(f"{folder.name}.old.tmp")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(fresh, folder)
    shutil.rmtree(old, ignore_errors=True)


def write_generation(job: Job, fresh: Path, source: Path | None) -> None:
    """How the model is asked for text: as the published one; where the run gave a chat template, until the token that
    ends an answer under it, too.
    """
    published = None if source is None or not (source / GENERATION).is_file() else source / GENERATION
    if job.run.model.chat_template is None or job.tokenizer is None:
        if published is not None:
            shutil.copyfile(published, fresh / GENERATION)
        return
    try:
        found = {key: job.hf.get(key) for key in SPECIAL} if published is None else json.loads(published.read_bytes())
        ends = found.get("eos_token_id")
    except (ValueError, AttributeError) as error:
        asked = f"to add the end of a turn to {published}"
        raise NeedsError(asked, f"no JSON object: {error}", "download the model again") from None
    ends = job.tokenizer.eos_token_id if ends is None else ends
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    found["eos_token_id"] = list(dict.fromkeys([*ends, *turn_ends(job.tokenizer)])) or None
    kept = {key: value for key, value in found.items() if value is not None}
    (fresh / GENERATION).write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def whole(job: Job) -> Iterator[tuple[str, Tensor]]:
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
        values = gathered(p.detach())
        yield name, values.cpu() if first else values


@contextmanager
def _gathered(model: nn.Module, name: str) -> Iterator[None]:
    """While it lasts, the module of that name holds its parameters whole."""
    owners = [name.rsplit(".", n)[0] for n in range(name.count(".") + 1)]
    cut = next((m for o in owners if is_gathered(m := model.get_submodule(o))), None)
    if cut is not None:
        cut.unshard()
    yield
    if cut is not None:
        cut.reshard()
