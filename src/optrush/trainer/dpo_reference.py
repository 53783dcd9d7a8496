"""The reference of `objective: dpo` where the trained model cannot be undone: log-probabilities made before step 0.

One pass of the untouched model over all pairs, shared by the ranks, before a checkpoint is restored over the weights.
What it finds, two numbers a pair, is kept beside the tokenised data, under the name of all that decides about it, and
rides in the batches from then on. A file is there whole or not at all, and its name tells of its bytes.
"""

from __future__ import annotations

import gc
import hashlib
import io
import json
import os
import secrets
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from optrush import console
from optrush.data import readers, sampler, tokenize
from optrush.data.batch import Batch
from optrush.data.dataset import Source, Streamed
from optrush.data.tokenize import no_room, root
from optrush.errors import ConfigError, UserError
from optrush.models.weights import value_files
from optrush.objectives import dpo
from optrush.resolve import Prepared
from optrush.technique import Numerics
from optrush.trainer import distributed
from optrush.trainer.build import assemble
from optrush.trainer.trainer import Job

FORMAT = 2  # part of every key


def fill(job: Job, prepared: Prepared, *, training: bool = True) -> None:
    """Gives the batches of a run of pairs their reference, where they need one; every rank calls it.

    Args:
        job: as it was assembled: its weights are the reference's.
        training: False leaves out the pairs that are trained on.

    Raises:
        ConfigError: the rows to train on are not there before the run.
        DataError: what was found cannot be kept.
    """
    held = job.evaluation
    if not _asked(job):
        return
    if training:
        job.stream.reference = _found(job, prepared, _counted(job), "pairs to train on")
    if held is not None:
        job.evaluation = replace(held, reference=_found(job, prepared, held.source, "pairs held out"))


def blank(job: Job, prepared: Prepared) -> None:
    """As `fill`, with zeros: for who takes few batches and asks `beside`. The rehearsal needs no more than room."""
    if _asked(job):
        job.stream.reference = np.zeros((len(_counted(job)), 2), np.float32)
        if (held := job.evaluation) is not None:
            job.evaluation = replace(held, reference=np.zeros((len(held.source), 2), np.float32))


def beside(job: Job, windows: list[list[Batch]]) -> list[list[Batch]]:
    """These batches with the reference of their own pairs, by the model as it is; every rank calls it. Keeps nothing.

    Args:
        windows: on each rank as many batches.
    """
    if not _asked(job):
        return windows
    samples = dict.fromkeys(s for window in windows for batch in window for s in batch.samples)
    places = {sample: n for n, sample in enumerate(samples)}
    found = _scored(job, (batch for window in windows for batch in window), len(places), places.__getitem__).cpu()

    def filled(batch: Batch) -> Batch:
        there, known = batch.extra["pairs"], torch.zeros_like(batch.extra["reference"])  # (B, P), (B, P, 2)
        known[there] = found[[places[sample] for sample in batch.samples]]
        return replace(batch, extra={**batch.extra, "reference": known})

    return [[filled(batch) for batch in window] for window in windows]


def _asked(job: Job) -> bool:
    """Whether batches need a reference."""
    return job.run.dpo is not None and not dpo.by_adapter(job.run.dpo, job.untrained)


def _counted(job: Job) -> Source:
    """The pairs to train on; ConfigError where they are not there before the run."""
    if isinstance(job.sources.train, Streamed):
        found = "`data.stream`: nobody has read its rows before step 0, and what is trained cannot be undone"
        raise ConfigError("a reference for `objective: dpo`", found, "leave data.stream out, or train an adapter")
    return job.sources.train


def against(prepared: Prepared, before: Prepared, data: str | None, say: Callable[[str], None]) -> Job:
    """The job of an evaluation, its pairs with the reference of the model that training began with.

    Args:
        prepared: of the trained model; adapters are merged into it, so none can be left out of it again.
        before: of the other one, which is gone when this returns.
        data: as `assemble` takes it.

    Raises:
        ConfigError: the two read the pairs as different tokens, whose likelihoods cannot be compared.
    """
    other = assemble(_precomputed(before), training=False, data=data, progress=say)
    fill(other, before, training=False)
    assert other.evaluation is not None
    known, read, begun = other.evaluation.reference, _read(other.evaluation.source), other.fingerprints
    del other
    gc.collect()
    job = assemble(_precomputed(prepared), training=False, data=data, progress=say)
    assert job.evaluation is not None
    if _read(job.evaluation.source) != read:
        parts = {"tokenizer": "tokenizer", "template": "chat template"}
        differ = " and ".join(said for part, said in parts.items() if job.fingerprints[part] != begun[part])
        models = [p.run.model.path or p.run.model.shape for p in (prepared, before)]
        found = f"the pairs are other tokens for {models[0]} than for {models[1]}: another {differ}"
        do = "give a model with the tokenizer and the chat template of CONFIG's"
        raise ConfigError("`optrush eval` of `objective: dpo`", found, do)
    job.evaluation = replace(job.evaluation, reference=known)
    return job


def _read(source: Source) -> str:
    """A hash of the tokens and targets of all documents."""
    sha = hashlib.sha256()
    for document in (d for i in range(len(source)) for d in source.documents(i)):
        sha.update(f"{len(document)} ".encode() + document.ids.tobytes() + document.targets.tobytes())
    return sha.hexdigest()


def _precomputed(prepared: Prepared) -> Prepared:
    assert prepared.run.dpo is not None
    settings = prepared.run.dpo.model_copy(update={"reference": "precomputed"})
    return replace(prepared, run=prepared.run.model_copy(update={"dpo": settings}))


def _found(job: Job, prepared: Prepared, source: Source, what: str) -> np.ndarray:
    """(samples, 2) float32: the log-probabilities of the chosen and the rejected document of each pair."""
    folder, key = root(job.run.data.cache) / "reference", _key(job, prepared, source)
    kept = _kept(folder, key)
    if all(distributed.gather("there" if kept is not None else "")):  # hosts may differ
        assert kept is not None and kept.shape == (len(source), 2)
        return kept
    made, error = passed(job, source, what), None
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        try:
            _keep(made, folder, key)
        except OSError as e:
            error = no_room(folder, e)
    distributed.agree(error)
    return made


def _key(job: Job, prepared: Prepared, source: Source) -> str:
    """All that decides about the figures: the pairs, the model, and in which precision and with which maths it runs."""
    model = {k: v for k, v in job.fingerprints.items() if k in ("config", "tokenizer")}
    model["base"] = _values(job, prepared)
    other = {t.name: job.run.with_.get(t.name) for t in prepared.techniques if t.numerics is Numerics.DIFFERENT_MATHS}
    added = hashlib.sha256()  # what an adapter begins with may come from a file of its own
    for t in job.trained:
        if t.name in job.recipe.fillers:
            added.update(t.local.float().cpu().numpy().tobytes())
    begun = sorted(set(distributed.gather(added.hexdigest())))
    said = [FORMAT, source.fingerprint, model, job.run.seed, job.run.model.dtype, str(job.precision), other, begun]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:32]


def _values(job: Job, prepared: Prepared) -> str:
    """A hash of every byte of the model's files: a sample of them would take one model for another."""
    if prepared.folder is None:
        return job.fingerprints["base"]
    found, error = "", None
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:  # once a machine; the cache knows files that did not change
        try:
            found = readers.fingerprint(value_files(prepared.folder), root(job.run.data.cache))
        except UserError as e:
            error = e
    distributed.agree(error)
    return " ".join(sorted({*distributed.gather(found)} - {""}))


def passed(job: Job, source: Source, what: str) -> np.ndarray:
    """One forward pass over all pairs, through the same callables as an evaluation."""
    world, setup = job.world, job.setup
    rows = sampler.evaluation(
        source, T=setup.seq, micro_rows=setup.micro_rows, rank=world.data_rank, ranks=world.data_ranks,
        packed=job.model.isolates,
    )  # fmt: skip
    batches = console.passing(rows, rows.batches, f"the reference of {len(source):,} {what}")
    found = _scored(job, batches, len(source), lambda sample: sample)
    return np.asarray(job.share(found).cpu().numpy())  # each rank has its own pairs, and zeros


def _scored(job: Job, batches: Iterable[Batch], n: int, place: Callable[[int], int]) -> Tensor:
    """(n, 2) float32: the log-probabilities of the pairs in these batches, sample i in row place(i)."""
    device, score = job.world.device, job.score
    found = torch.zeros(n, 2, device=device)

    def noted(hidden: Tensor, batch: Batch) -> Tensor:
        values = dpo.log_probabilities(job.model.head, hidden, batch)[batch.extra["pairs"]]  # (pairs, 2)
        found[torch.tensor([place(sample) for sample in batch.samples], device=device).long()] = values.float()
        return values.sum()

    job.score = noted
    try:
        for batch in batches:
            job.losses([batch])
    finally:
        job.score = score
    return found


def _kept(folder: Path, key: str) -> np.ndarray | None:
    """What an earlier run found; None where there is none, or its bytes are not those that its name tells of."""
    path = next(filter(tokenize.intact, folder.glob(f"{key}-*.npy")), None)
    return None if path is None else np.asarray(np.load(path, allow_pickle=False))


def _keep(made: np.ndarray, folder: Path, key: str) -> None:
    file = io.BytesIO()
    np.save(file, made, allow_pickle=False)
    data = file.getvalue()
    temporary = folder / f"{key}{tokenize.TEMPORARY}{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as out:
            tokenize.write(out, data)
            out.flush()
            tokenize.sync(out.fileno())
        tokenize.rename(temporary, folder / f"{key}-{hashlib.sha256(data).hexdigest()[:32]}.npy")
        tokenize.sync_folder(folder)
    finally:
        temporary.unlink(missing_ok=True)
