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
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from optrush import console, distributed
from optrush.assemble import assemble
from optrush.data import shard, stream
from optrush.data.cache import root
from optrush.data.corpus import Source
from optrush.data.streamed import Streamed
from optrush.data.tokenising import no_room
from optrush.errors import ConfigError
from optrush.job import Batch, Job
from optrush.objectives import dpo
from optrush.prepare import Prepared
from optrush.technique import Numerics

FORMAT = 1  # part of every key


def fill(job: Job, prepared: Prepared, *, training: bool = True) -> None:
    """Gives the batches of a run of pairs their reference, where they need one; every rank calls it.

    Args:
        job: as it was assembled: its weights are the reference's.
        training: False leaves out the pairs that are trained on.

    Raises:
        ConfigError: the rows to train on are not there before the run.
        DataError: what was found cannot be kept.
    """
    run, train, held = job.run, job.sources.train, job.evaluation
    if run.dpo is None or dpo.by_adapter(run.dpo, job.untrained):
        return
    if training:
        if isinstance(train, Streamed):
            found = "`data.stream`: nobody has read its rows before step 0, and every weight is trained"
            raise ConfigError("a reference for `objective: dpo`", found, "leave data.stream out, or train an adapter")
        job.stream.reference = _found(job, prepared, train, "pairs to train on")
    if held is not None:
        job.evaluation = replace(held, reference=_found(job, prepared, held.source, "pairs held out"))


def against(prepared: Prepared, before: Prepared, data: str | None, say: Callable[[str], None]) -> Job:
    """The job of an evaluation, its pairs with the reference of the model that training began with.

    Args:
        prepared: of the trained model; adapters are merged into it, so none can be left out of it again.
        before: of the other one, which is gone when this returns.
        data: as `assemble` takes it.
    """
    other = assemble(_precomputed(before), training=False, data=data, progress=say)
    fill(other, before, training=False)
    assert other.evaluation is not None
    known = other.evaluation.reference
    del other
    gc.collect()
    job = assemble(_precomputed(prepared), training=False, data=data, progress=say)
    assert job.evaluation is not None
    job.evaluation = replace(job.evaluation, reference=known)
    return job


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
    model: Mapping[str, str] = {k: v for k, v in job.fingerprints.items() if k in ("config", "tokenizer", "base")}
    other = {t.name: job.run.with_.get(t.name) for t in prepared.techniques if t.numerics is Numerics.DIFFERENT_MATHS}
    added = hashlib.sha256()  # what an adapter begins with may come from a file of its own
    for t in job.trained:
        if t.name in job.recipe.fillers:
            added.update(t.local.float().cpu().numpy().tobytes())
    begun = sorted(set(distributed.gather(added.hexdigest())))
    said = [FORMAT, source.fingerprint, model, job.run.seed, job.run.model.dtype, str(job.precision), other, begun]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:32]


def passed(job: Job, source: Source, what: str) -> np.ndarray:
    """One forward pass over all pairs, through the same callables as an evaluation."""
    world, setup = job.world, job.setup
    found = torch.zeros(len(source), 2, device=world.device)
    score = job.score

    def noted(hidden: Tensor, batch: Batch) -> Tensor:
        values = dpo.log_probabilities(job.model.head, hidden, batch)[batch.extra["pairs"]]  # (pairs, 2)
        found[torch.tensor(batch.samples, dtype=torch.int64, device=world.device)] = values.float()
        return values.sum()

    rows = stream.evaluation(
        source, T=setup.seq, micro_rows=setup.micro_rows, rank=world.data_rank, ranks=world.data_ranks,
        packed=job.model.isolates,
    )  # fmt: skip
    job.score = noted
    try:
        for batch in console.passing(rows, rows.batches, f"the reference of {len(source):,} {what}"):
            job.losses([batch])
    finally:
        job.score = score
    return np.asarray(job.share(found).cpu().numpy())  # each rank has its own pairs, and zeros


def _kept(folder: Path, key: str) -> np.ndarray | None:
    """What an earlier run found; None where there is none, or its bytes are not those that its name tells of."""
    path = next(filter(shard.intact, folder.glob(f"{key}-*.npy")), None)
    return None if path is None else np.asarray(np.load(path, allow_pickle=False))


def _keep(made: np.ndarray, folder: Path, key: str) -> None:
    file = io.BytesIO()
    np.save(file, made, allow_pickle=False)
    data = file.getvalue()
    temporary = folder / f"{key}{shard.TEMPORARY}{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as out:
            shard.write(out, data)
            out.flush()
            shard.sync(out.fileno())
        shard.rename(temporary, folder / f"{key}-{hashlib.sha256(data).hexdigest()[:32]}.npy")
        shard.sync_folder(folder)
    finally:
        temporary.unlink(missing_ok=True)
