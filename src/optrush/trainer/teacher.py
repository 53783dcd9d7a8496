"""Load the teacher of `objective: distill`: a second, frozen model, replicated on every rank, with the same tokens.

It runs in each step, or once over the data (`distill.store`) before the model is allocated: the two are never in memory
together. Stored tokens are cached under a digest of their inputs.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from optrush.config import Config
from optrush.data.batch import IGNORE, Batch
from optrush.data.samples import SampleSource
from optrush.data.stored_tokens import StoredTokens, record_type
from optrush.data.tokenize import cache_root
from optrush.data.tokenizer import open_tokenizer
from optrush.errors import DataError, NeedsError, exhausted, first_line
from optrush.kernels.distillation import Blend, Compared, Lesson, likeliest
from optrush.models.decoder import Decoder
from optrush.models.hf import HFModel, load, refuse_shared_rows
from optrush.models.shapes import sdpa_obstacle
from optrush.models.text_part import text_config
from optrush.models.weights import weights_fingerprint
from optrush.objectives.distill import loss_with_stored, loss_with_teacher
from optrush.technique import Part
from optrush.trainer import distributed
from optrush.trainer.run_dir import free_space
from optrush.trainer.sample_store import SamplePart, SampleStore, batches_of, values_digest
from optrush.trainer.trainer import Trainer

FORMAT = 1  # part of every key


def add_teacher(trainer: Trainer, folder: Path | None, hf: dict[str, Any]) -> None:
    """Make the head's kernel and the loss use the teacher: loaded, or its stored tokens.

    Raises:
        NeedsError: its tokens differ, or the model is not supported.
    """
    config, settings = trainer.config, trainer.config.distill
    assert settings is not None
    lesson, blend = Lesson(), Blend(settings.temperature, settings.alpha, settings.divergence == "reverse")
    trainer.fingerprints["teacher"] = weights_fingerprint(folder, config.seed)
    if settings.store is None:
        teacher = load_teacher(trainer, folder, hf)
        if Part.PACKED_ROWS in trainer.env.claimed:
            refuse_shared_rows(teacher, hf, trainer.env.paired)
        logits = teacher.head.logits
        trainer.loss = partial(loss_with_teacher, trainer.loss, teacher, lesson)
    else:
        logits = None
        trainer.loss = partial(loss_with_stored, trainer.loss, _common(trainer, hf), lesson)
    trainer.model.head.nll = Compared(
        logits=logits, lesson=lesson, blend=blend, metrics=trainer.metrics, chunk=settings.chunk
    )


def load_teacher(trainer: Trainer, folder: Path | None, hf: dict[str, Any]) -> Decoder | HFModel:
    """Load the teacher onto the device; raise like `add_teacher`."""
    config, settings = trainer.config, trainer.config.distill
    assert settings is not None
    _same_tokens(trainer, config, folder, hf)
    dtype = getattr(torch, settings.dtype)
    teacher, recipe = load(folder, hf, None, dtype, config.seed)
    attention = trainer.env.spec.attention
    if isinstance(teacher, HFModel) and attention != "masked":
        attention = "masked" if sdpa_obstacle(hf) else "sdpa"
    if isinstance(teacher, Decoder) and teacher.shape.score_cap is not None:
        attention = "masked"
    teacher.set_attention(attention)
    teacher.to_empty(device=trainer.world.device)
    teacher.tie()
    teacher.restore_buffers(trainer.world.device)
    with torch.no_grad():
        for name, p in teacher.named_parameters():
            recipe.fill(name, p, (0,) * p.dim())
    recipe.release()
    teacher.requires_grad_(False).eval()
    kind = "our decoder" if isinstance(teacher, Decoder) else "transformers"
    size = f"{sum(p.numel() for p in teacher.parameters()) / 1e6:,.1f} M parameters in {settings.dtype}"
    trainer.notes.append(f"teacher: {settings.teacher}, {size}, {kind}, attention {attention}")
    return teacher


# --- One pass of the teacher over the data.


@dataclass(frozen=True)
class StoringPass:
    """Stores the teacher's most likely tokens if they are not cached; every rank calls each method.

    Args:
        place: the teacher's folder and its config.json.
    """

    trainer: Trainer
    place: tuple[Path | None, dict[str, Any]]

    def stored(self, sources: Sequence[SampleSource]) -> list[StoredTokens]:
        """Return the records of each source, after a pass over the missing ones.

        Raises:
            DataError: a file cannot be written.
            NeedsError: the teacher cannot be loaded, or does not fit in memory.
        """
        stores = [self._store(source) for source in sources]
        missing = [(n, samples) for n, store in enumerate(stores) for samples in store.missing()]
        if missing:
            self._check_room(stores[0].folder, sum(stores[n].n_records(samples) for n, samples in missing))
            teacher = distributed.agreed(lambda: load_teacher(self.trainer, *self.place))
            for n, samples in missing:
                stores[n].write(samples, self.compute_records(teacher, sources[n], samples))
            del teacher
            self._release()
        self.trainer.notes.append(f"teacher: {sum(map(len, sources)):,} samples stored in {stores[0].folder}")
        return [StoredTokens(self._record, store.opened()) for store in stores]

    def stored_in_memory(self, source: SampleSource, samples: Iterable[int]) -> StoredTokens:
        """Return the records of a few samples, without writing a file."""
        chosen = sorted(set(samples))
        teacher = distributed.agreed(lambda: load_teacher(self.trainer, *self.place))
        records = self.compute_records(teacher, source, chosen)
        del teacher
        self._release()
        ends = np.cumsum(source.targets()[chosen])
        records_of = dict(zip(chosen, np.split(records, ends[:-1]), strict=True))
        return StoredTokens(self._record, records_of.__getitem__)

    def compute_records(self, teacher: Decoder | HFModel, source: SampleSource, samples: Sequence[int]) -> np.ndarray:
        """Return the concatenated records of these samples, by a forward pass over them."""
        trainer, settings = self.trainer, self.trainer.config.distill
        assert settings is not None and settings.store is not None
        part = SamplePart(source, samples)
        begins = np.concatenate([[0], np.cumsum(part.targets(), dtype=np.int64)])
        ids = torch.zeros(int(begins[-1]), settings.store, dtype=torch.int32)
        log_p = torch.zeros(int(begins[-1]), settings.store + 1)

        def work() -> None:
            for batch in batches_of(trainer, part, teacher.supports_packing, f"the teacher over {len(part):,} samples"):
                where = [np.arange(begins[i], begins[i + 1]) for i in batch.samples]
                at = torch.from_numpy(np.concatenate([*where, np.zeros(0, np.int64)]))
                ids[at], log_p[at] = self._likeliest(teacher, trainer.place(batch))

        distributed.agreed(partial(_enough_memory, work))
        result = np.zeros(len(ids), self._record)
        for name, mine in (("ids", ids), ("log_p", log_p)):  # each rank has its own samples, and zeros for the others
            result[name] = trainer.all_reduce(mine.to(trainer.world.device)).cpu().numpy()
        return result

    @torch.no_grad()
    def _likeliest(self, teacher: Decoder | HFModel, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return ((targets, k), (targets, k + 1)) on the host, in the order of the batch's targets."""
        settings = self.trainer.config.distill
        assert settings is not None and settings.store is not None
        dtype = torch.float32 if settings.dtype == "float32" else torch.float16
        vocab = _common(self.trainer, self.place[1])
        hidden = teacher(batch.tokens, batch.positions, batch.documents)[batch.labels != IGNORE]
        rows = [
            likeliest(teacher.head.logits(h)[:, :vocab], settings.store, settings.temperature, dtype)
            for h in hidden.split(settings.chunk)
        ]
        ids, log_p = torch.cat([f.ids for f in rows]), torch.cat([f.log_p for f in rows])
        return ids.int().cpu(), log_p.float().cpu()

    @property
    def _record(self) -> np.dtype:
        settings = self.trainer.config.distill
        assert settings is not None and settings.store is not None
        return record_type(settings.store, 4 if settings.dtype == "float32" else 2)

    def _store(self, source: SampleSource) -> SampleStore:
        """Return the store for these inputs: the samples and their tokens, the teacher, the number of tokens kept."""
        config, settings = self.trainer.config, self.trainer.config.distill
        assert settings is not None
        (folder, hf), cache = self.place, cache_root(config.data.cache)
        cut = hashlib.sha256(source.lengths().tobytes() + source.targets().tobytes()).hexdigest()
        tokens = [self.trainer.fingerprints.get(name) for name in ("tokenizer", "template", "date")]
        values = f"drawn, seed {config.seed}" if folder is None else values_digest(folder, cache)
        settings_used = settings.store, settings.temperature, settings.dtype, _common(self.trainer, hf)
        content = [FORMAT, source.fingerprint, cut, tokens, values, hf, settings_used]
        return SampleStore(cache / "teacher", content, source.targets(), self._record)

    def _check_room(self, folder: Path, records: int) -> None:
        """Raise DataError unless the cache's disk has room for the pass."""
        place, free = free_space(folder)
        needed = records * self._record.itemsize

        def work() -> None:
            if needed > free:
                asked = f"{self._record.itemsize} bytes of the teacher's tokens for each of {records:,} targets"
                found = f"{needed:,} bytes, but {place} has {free:,} free"
                raise DataError(asked, found, "free space, set another data.cache, or lower distill.store")

        distributed.agreed(work)

    def _release(self) -> None:
        gc.collect()
        if self.trainer.world.device.type == "cuda":
            torch.cuda.empty_cache()


def _enough_memory(work: Callable[[], None]) -> None:
    try:
        work()
    except (RuntimeError, MemoryError) as error:
        if not exhausted(error):
            raise
        do = "lower batch.micro_tokens or distill.chunk, or use a smaller teacher"
        raise NeedsError("a pass of the teacher over the data", f"out of memory: {first_line(error)}", do) from None


def _common(trainer: Trainer, hf: dict[str, Any]) -> int:
    """Return the number of logits in common."""
    return min(trainer.vocab, int(text_config(hf).get("vocab_size") or trainer.vocab))


def _same_tokens(trainer: Trainer, config: Config, folder: Path | None, hf: dict[str, Any]) -> None:
    """Raise NeedsError unless the teacher has the same tokens with the same ids."""
    assert config.distill is not None
    asked, do = f"`distill.teacher: {config.distill.teacher}`", "use a teacher of the same family"
    ours = {} if trainer.tokenizer is None else trainer.tokenizer.get_vocab()
    rows = int(text_config(hf).get("vocab_size") or 0)
    if folder is None or not ours or not any(folder.glob("tokenizer*")):
        if rows != trainer.vocab:
            raise NeedsError(asked, f"a vocabulary of {rows}, but the model's has {trainer.vocab}", do)
        return
    theirs: dict[str, int] = open_tokenizer(folder).get_vocab()
    odd = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    if odd:
        t = odd[0]
        found = f"{len(odd)} tokens differ: {t!r} is {theirs.get(t, 'none')} there, {ours.get(t, 'none')} here"
        raise NeedsError(asked, found, do)
    least, most = min(rows, trainer.vocab), max(ours.values())
    if most >= least:
        raise NeedsError(asked, f"{least} logits in common, but the tokenizer has {most + 1} tokens", do)
