"""`optrush export`: a run's checkpoint as a folder that others load, proven to compute what was trained.

Written beside its place, verified there, and renamed when it holds. A folder that fails stays under its other name.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from optrush import card, runfolder, verify
from optrush.errors import ConfigError, RunError
from optrush.export import learnt, whole, write_generation
from optrush.job import Job
from optrush.models.weights import export
from optrush.peft import io
from optrush.rebuild import Rebuilt, read_run, rebuild
from optrush.step import exhausted

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MODEL, ADAPTER = "model", "adapter"


@dataclass(frozen=True)
class Delivered:
    out: Path
    step: int
    passed: tuple[tuple[str, str], ...]  # damaged checkpoints that were passed over
    dtype: str | None  # of the weights; None: an adapter's files
    size_bytes: int
    compared: verify.Compared | None

    def facts(self) -> dict[str, Any]:
        """As one JSON document."""
        found = asdict(self) | {"out": str(self.out)}
        found["passed"] = [list(pair) for pair in self.passed]
        if self.compared is not None:
            found["compared"]["relative"] = self.compared.worst / self.compared.scale
        return found


def place(run: Path, out: Path | None, adapter: bool) -> Path:
    """Where the folder goes, if it may: `model/` or `adapter/` of the run, unless `out` says otherwise.

    Raises:
        ConfigError: no run, or something lies there.
    """
    folder, _ = read_run(run)
    where = out or folder / (ADAPTER if adapter else MODEL)
    if where.exists() and (not where.is_dir() or any(where.iterdir())):
        found = "it is not empty" if where.is_dir() else "a file, no folder"
        raise ConfigError(f"to export to {where}", found, "name another folder: --out DIR")
    if not where.absolute().parent.is_dir():
        raise ConfigError(f"to export to {where}", f"{where.absolute().parent} is no folder", "make it first")
    return where


def deliver(
    run: Path,
    out: Path | None = None,
    *,
    checkpoint: str | None = None,
    dtype: str | None = None,
    adapter: bool = False,
    verifies: bool = True,
    max_shard_bytes: float = 5e9,
) -> Delivered:
    """Exports a run.

    Args:
        out: the folder; None: the run's own `model/`, or `adapter/`.
        checkpoint: a step or a folder; None: the best one, else the newest intact one.
        dtype: of the weights; None: as they were trained.
        adapter: the adapter's files, not the merged model.

    Raises:
        UserError: as `rebuild`; the folder is not free; no adapter in this run.
        RunError: the folder does not compute what was trained.
    """
    where = place(run, out, adapter)
    folder = where.absolute().parent
    at_work = any((folder / name).exists() for name in (runfolder.RUN, runfolder.LOCK))  # a run may write there
    try:
        with runfolder.lock(folder) if at_work else nullcontext(), _beside(where, at_work) as fresh:
            found = rebuild(run, checkpoint)
            if adapter and not io.adapters(found.job.model):
                done = "this run has no adapter: it trained the model's own weights"
                raise ConfigError("--adapter", done, "leave it out")
            kind = None if adapter else _kept(found.job) if dtype is None else DTYPES[dtype]
            compared = None
            with _writing(where):
                written = _write_adapter(found, fresh) if kind is None else _write(found, fresh, dtype, max_shard_bytes)
            if kind is not None and verifies:
                compared = _verify(found, fresh, written, kind)
            with _writing(where):
                if where.exists():
                    where.rmdir()  # empty
                os.rename(fresh, where)
    except (RuntimeError, MemoryError) as error:
        if not exhausted(error):
            raise
        do = "leave the GPU out: CUDA_VISIBLE_DEVICES= optrush export ..."
        raise RunError(f"out of memory while exporting ({next(iter(str(error).splitlines()), '')}); {do}") from error
    size, said = sum(f.stat().st_size for f in where.iterdir()), None if kind is None else str(kind)[len("torch.") :]
    return Delivered(where, found.checkpoint.step, found.passed, said, size, compared)


@contextmanager
def _beside(where: Path, at_work: bool) -> Iterator[Path]:
    """A new folder beside the place. It goes with an error, unless that is the proof that failed.

    Args:
        at_work: its parent is a run's folder, whose lock is held: what a kill left there under a run's own name goes.

    Raises:
        ConfigError: something lies there, or it cannot be made.
    """
    fresh = where.with_name(where.name + ".tmp")
    if at_work and fresh.name in runfolder.KNOWN:
        shutil.rmtree(fresh, ignore_errors=True)
    try:
        fresh.mkdir()
    except FileExistsError:
        do = "look at it and delete it, or take another folder: --out DIR"
        raise ConfigError(f"to export to {where}", f"{fresh}, where it would be written first, is there", do) from None
    except OSError as error:
        do = "take another folder: --out DIR"
        raise ConfigError(f"to export to {where}", f"{fresh}: {error.strerror}", do) from None
    try:
        yield fresh
    except RunError:
        raise
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


@contextmanager
def _writing(where: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"to export to {where}", f"{error}", "make room, or take another folder: --out DIR") from None


def _write_adapter(found: Rebuilt, fresh: Path) -> dict[str, str]:
    job = found.job
    io.write(fresh, job.model, job.recipe, learnt(job), str(job.run.model.path or job.run.model.shape))
    return {}


def _write(found: Rebuilt, fresh: Path, dtype: str | None, max_shard_bytes: float) -> dict[str, str]:
    """The merged model with its tokenizer, generation config and card; digests of what was to be written."""
    job, written = found.job, dict[str, str]()

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, t in whole(job):
            kept = t if dtype is None else t.to(DTYPES[dtype])
            written.update((hf, verify.digest(part)) for hf, part in job.recipe.split(name, kept))
            yield name, kept

    export(fresh, tensors(), job.recipe, job.hf, max_shard_bytes)
    if job.tokenizer is not None:
        job.tokenizer.save_pretrained(fresh)
    write_generation(job, fresh, found.base)
    text = card.card(found.run, found.folder, found.checkpoint.step, found.base)
    (fresh / card.NAME).write_text(text, encoding="utf-8")
    return written


def _kept(job: Job) -> torch.dtype:
    weight = job.model.embedding.weight
    assert isinstance(weight, Tensor)
    return weight.dtype


def _verify(found: Rebuilt, fresh: Path, written: Mapping[str, str], kind: torch.dtype) -> verify.Compared:
    verify.demand_bytes(fresh, written)
    job, d = found.job, found.run.data
    exact = kind == _kept(job) and all(m.adapter is None and m.stored is None for _, m in job.model.linears())
    paths = [d.eval] if isinstance(d.eval, str) else [origin.path for origin in d.origins]
    texts, said = verify.samples(job, paths, d.sample)
    ours = verify.trained(job, texts)
    device = job.world.device
    job.model.to("meta")  # its memory is the reloaded model's now
    theirs = verify.reloaded(fresh, texts, device)
    compared = verify.compare(ours, theirs, said, kind, exact)
    verify.demand(compared, fresh)
    return compared
