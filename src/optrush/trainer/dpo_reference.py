"""Compute the reference of `objective: dpo` and `kto` before step 0, if there is no adapter to disable.

One pass of the initial model over all pairs, split over the ranks, before a checkpoint is restored. The result, two
numbers per pair, is cached under a digest of its inputs (`sample_store`), and then becomes part of the batches.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from optrush.data.batch import Batch
from optrush.data.samples import SampleSource
from optrush.data.tokenize import cache_root
from optrush.decide import Decided, with_reference
from optrush.errors import ConfigError
from optrush.objectives import dpo
from optrush.objectives.pairs import log_probabilities
from optrush.technique import Numerics
from optrush.trainer import distributed
from optrush.trainer.build import build
from optrush.trainer.sample_store import SamplePart, SampleStore, batches_of, values_digest
from optrush.trainer.trainer import Trainer

FORMAT = 2  # part of every key
PAIR = np.dtype((np.float32, 2))  # the dtype of a record


def fill_reference(trainer: Trainer, prepared: Decided, *, training: bool = True) -> None:
    """Add the reference to the batches of a preference run that needs one; every rank calls it.

    Args:
        trainer: as built, with the reference's weights.
        training: False skips the training pairs.

    Raises:
        ConfigError: the training rows do not exist before the run.
        DataError: the result cannot be written to the cache.
    """
    held = trainer.evaluation
    if not _needed(trainer):
        return
    if training:
        trainer.stream.reference = _reference_of(trainer, prepared, _counted(trainer), "pairs to train on")
    if held is not None:
        trainer.evaluation = replace(held, reference=_reference_of(trainer, prepared, held.source, "pairs held out"))


def zero_reference(trainer: Trainer, prepared: Decided) -> None:
    """Like `fill_reference` with zeros, for batches that `add_reference` completes; a preflight needs only memory."""
    if _needed(trainer):
        trainer.stream.reference = np.zeros((len(_counted(trainer)), 2), np.float32)
        if (held := trainer.evaluation) is not None:
            trainer.evaluation = replace(held, reference=np.zeros((len(held.source), 2), np.float32))


def add_reference(trainer: Trainer, windows: list[list[Batch]]) -> list[list[Batch]]:
    """Return these batches with references by the current model, uncached; every rank calls it.

    Args:
        windows: the same number of batches on each rank.
    """
    if not _needed(trainer):
        return windows
    samples = dict.fromkeys(s for window in windows for batch in window for s in batch.samples)
    places = {sample: n for n, sample in enumerate(samples)}
    scores = _scored(trainer, (batch for window in windows for batch in window), len(places), places.__getitem__).cpu()

    def filled(batch: Batch) -> Batch:
        places_of, known = batch.extra["pairs"], torch.zeros_like(batch.extra["reference"])  # (B, P), (B, P, 2)
        known[places_of] = scores[[places[sample] for sample in batch.samples]]
        return replace(batch, extra={**batch.extra, "reference": known})

    return [[filled(batch) for batch in window] for window in windows]


def _needed(trainer: Trainer) -> bool:
    settings = trainer.config.referenced
    return settings is not None and not dpo.by_adapter(settings, trainer.adapters_disabled)


def _counted(trainer: Trainer) -> SampleSource:
    """Return the training pairs; raise ConfigError if they do not exist before the run."""
    if not trainer.sources.train.tokenized:
        found = "`data.stream`: rows are not read before step 0, and there is no adapter to disable"
        asked = f"a reference for `objective: {trainer.config.objective}`"
        raise ConfigError(asked, found, "set data.stream=false, or train an adapter (--with lora)")
    return trainer.sources.train


def build_with_reference(prepared: Decided, before: Decided, data: str | None, say: Callable[[str], None]) -> Trainer:
    """Build the trainer for evaluating pairs, with the reference of the initial model.

    prepared: for the trained model; its adapters are merged and cannot be disabled.
    before: for the initial model, which is freed before this returns.
    data: see `assemble`.

    Raises:
        ConfigError: the two models tokenize the pairs differently.
    """
    other = build(_precomputed(before), training=False, data=data, progress=say)
    fill_reference(other, before, training=False)
    assert other.evaluation is not None
    known, read, begun = other.evaluation.reference, _read(other.evaluation.source), other.fingerprints
    del other
    gc.collect()
    trainer = build(_precomputed(prepared), training=False, data=data, progress=say)
    assert trainer.evaluation is not None
    if _read(trainer.evaluation.source) != read:
        parts = {"tokenizer": "tokenizer", "template": "chat template"}
        differ = " and ".join(said for part, said in parts.items() if trainer.fingerprints[part] != begun[part])
        models = [p.config.model.path or p.config.model.shape for p in (prepared, before)]
        found = f"{models[0]} and {models[1]} tokenize the pairs differently: another {differ}"
        do = "use a model with the same tokenizer and chat template as CONFIG"
        raise ConfigError(f"`optrush eval` of `objective: {prepared.config.objective}`", found, do)
    trainer.evaluation = replace(trainer.evaluation, reference=known)
    return trainer


def _read(source: SampleSource) -> str:
    sha = hashlib.sha256()
    for document in (d for i in range(len(source)) for d in source.documents(i)):
        sha.update(f"{len(document)} ".encode() + document.ids.tobytes() + document.targets.tobytes())
    return sha.hexdigest()


def _precomputed(prepared: Decided) -> Decided:
    return replace(prepared, config=with_reference(prepared.config, "precomputed"))


def _reference_of(trainer: Trainer, prepared: Decided, source: SampleSource, what: str) -> np.ndarray:
    """Return (samples, 2) float32: log-probabilities of the chosen and the rejected document of each pair."""
    folder = cache_root(trainer.config.data.cache) / "reference"
    store = SampleStore(folder, _content(trainer, prepared, source), np.ones(len(source), np.int64), PAIR)
    for samples in store.missing():
        store.write(samples, compute_reference(trainer, SamplePart(source, samples), what))
    return store.loaded()


def _content(trainer: Trainer, prepared: Decided, source: SampleSource) -> list[Any]:
    """Return the inputs that determine the result: the pairs, the model, the precision and the maths."""
    model = {k: v for k, v in trainer.fingerprints.items() if k in ("config", "tokenizer", "base")}
    if prepared.folder is not None:  # a sample of values could confuse two models
        model["base"] = values_digest(prepared.folder, cache_root(trainer.config.data.cache))
    different = [t.name for t in prepared.techniques if t.numerics is Numerics.DIFFERENT_MATHS]
    other = {name: trainer.config.with_.get(name) for name in different}
    added = hashlib.sha256()  # an adapter may start from its own file
    for t in trainer.trained:
        if t.name in trainer.weight_map.fillers:
            added.update(t.local.float().cpu().numpy().tobytes())
    begun = sorted(set(distributed.gather(added.hexdigest())))
    types = trainer.config.model.dtype, str(trainer.precision)
    return [FORMAT, source.fingerprint, model, trainer.config.seed, *types, other, begun]


def compute_reference(trainer: Trainer, source: SampleSource, what: str) -> np.ndarray:
    """Return the result of one forward pass over all pairs, with the callables of an evaluation."""
    batches = batches_of(trainer, source, trainer.model.supports_packing, f"the reference of {len(source):,} {what}")
    scores = _scored(trainer, batches, len(source), lambda sample: sample)
    return np.asarray(trainer.all_reduce(scores).cpu().numpy())  # each rank has its own pairs, and zeros for the others


def _scored(trainer: Trainer, batches: Iterable[Batch], n: int, place: Callable[[int], int]) -> Tensor:
    """Return (n, 2) float32: log-probabilities of the pairs in these batches, sample i in row place(i)."""
    device, score = trainer.world.device, trainer.loss_from_hidden
    scores = torch.zeros(n, 2, device=device)

    def noted(hidden: Tensor, batch: Batch) -> Tensor:
        values = log_probabilities(trainer.model.head, hidden, batch)[batch.extra["pairs"]]  # (pairs, 2)
        scores[torch.tensor([place(sample) for sample in batch.samples], device=device).long()] = values.float()
        return values.sum()

    trainer.loss_from_hidden = noted
    try:
        for batch in batches:
            trainer.eval_loss([batch])
    finally:
        trainer.loss_from_hidden = score
    return scores
