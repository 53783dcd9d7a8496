"""Store a model's values per sample in files next to the tokenized data, by sample number.

A reference's log-probabilities (`dpo_reference`), or a teacher's most likely tokens (`teacher`). Records are in sample
order: a run's rows, their order and its ranks do not matter. A file has complete samples. It is written completely or
not at all, and its name has the digest of its bytes; a damaged file is recomputed.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from optrush import console
from optrush.data import readers, sampler, tokenize
from optrush.data.batch import Batch
from optrush.data.samples import SampleChunk, SampleSource
from optrush.data.schema import Document
from optrush.files import regular, sync_folder, write_whole
from optrush.models.weights import value_files
from optrush.trainer import distributed
from optrush.trainer.trainer import Trainer

FILE_BYTES = 2**27  # approximate size of a file
OPEN = 64  # mapped files at a time: each has a file descriptor


class SampleStore:
    """The files of one key. Every rank calls `missing` and `write`; each machine's first rank reads and writes.

    Args:
        content: all inputs of the records, as JSON.
        counts: (samples,) records per sample.
    """

    def __init__(self, folder: Path, content: object, counts: np.ndarray, record: np.dtype) -> None:
        text = json.dumps(content, sort_keys=True, default=str)
        self.folder, self.key, self.record = folder, hashlib.sha256(text.encode()).hexdigest()[:32], record
        self.starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])  # the first record of each sample
        file = self.starts[:-1] // max(1, FILE_BYTES // record.itemsize)
        self.firsts = np.concatenate([[0], np.flatnonzero(np.diff(file)) + 1, [len(counts)]])  # sample of each file

    def missing(self) -> list[range]:
        """Return the samples of each file that any machine lacks."""
        lacking = []
        for file, (first, end) in enumerate(zip(self.firsts, self.firsts[1:])):
            path = distributed.agreed(partial(self._intact, file))
            if not all(distributed.gather("" if path is None else "there")):
                lacking.append(range(int(first), int(end)))
        return lacking

    def write(self, samples: range, records: np.ndarray) -> None:
        """Write the file of these samples.

        Raises:
            DataError: the file cannot be written.
        """
        distributed.agreed(lambda: self._write(int(np.searchsorted(self.firsts, samples.start)), records))

    def n_records(self, samples: range) -> int:
        """Return the number of records of consecutive samples."""
        return int(self.starts[samples.stop] - self.starts[samples.start])

    def opened(self) -> Callable[[int], np.ndarray]:
        """Return the function from a sample's number to its records; every file must exist."""
        paths = self._paths()

        def find(sample: int) -> np.ndarray:
            file = int(np.searchsorted(self.firsts, sample, side="right")) - 1
            before = int(self.starts[self.firsts[file]])
            return _mapped(paths[file])[int(self.starts[sample]) - before : int(self.starts[sample + 1]) - before]

        return find

    def loaded(self) -> np.ndarray:
        """Return all records; every file must exist."""
        return np.concatenate([np.load(regular(path), allow_pickle=False) for path in self._paths()])

    def _path(self, file: int) -> Path | None:
        return next(iter(sorted(self.folder.glob(f"{self.key}-{file}-*.npy"))), None)

    def _paths(self) -> list[Path]:
        paths = [path for file in range(len(self.firsts) - 1) if (path := self._path(file)) is not None]
        assert len(paths) == len(self.firsts) - 1, "a file has not been written"
        return paths

    def _intact(self, file: int) -> Path | None:
        """Return the path of a file; each machine's first rank verifies it, and removes a damaged file."""
        path = self._path(file)
        if path is None or not _first_here() or tokenize.intact(path):
            return path
        path.unlink(missing_ok=True)
        return None

    def _write(self, file: int, records: np.ndarray) -> None:
        if not _first_here() or self._path(file) is not None:
            return
        buffer = io.BytesIO()
        np.save(buffer, records, allow_pickle=False)
        data = buffer.getbuffer()
        path = self.folder / f"{self.key}-{file}-{hashlib.sha256(data).hexdigest()[:32]}.npy"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, [data], self.folder / f"{path.stem}{tokenize.TEMPORARY}{secrets.token_hex(4)}")
            sync_folder(self.folder)
        except OSError as error:
            raise tokenize.no_room(self.folder, error) from None


@lru_cache(OPEN)
def _mapped(path: Path) -> np.ndarray:
    return np.asarray(np.load(regular(path), mmap_mode="r", allow_pickle=False))


def _first_here() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def values_digest(folder: Path, cache: Path) -> str:
    """Hash a model's files, once per machine; digests of unchanged files are cached. Every rank calls it."""
    digest = distributed.agreed(lambda: readers.files_fingerprint(value_files(folder), cache) if _first_here() else "")
    return " ".join(sorted({*distributed.gather(digest)} - {""}))


def batches_of(trainer: Trainer, source: SampleSource, packed: bool, what: str) -> Iterator[Batch]:
    """Return this rank's batches of one pass over a source, with a progress bar named `what`."""
    rows = sampler.evaluation(
        source, T=trainer.env.seq, micro_rows=trainer.env.micro_rows, rank=trainer.world.data_rank,
        ranks=trainer.world.data_ranks, packed=packed,
    )  # fmt: skip
    return iter(console.passing(rows, rows.batches, what))


@dataclass(frozen=True)
class SamplePart:
    """A subset of a source, renumbered from 0."""

    source: SampleSource
    samples: Sequence[int]
    fingerprint: str = ""
    tokenized: bool = True

    @property
    def parts(self) -> int:
        return self.source.parts

    @property
    def spans(self) -> tuple[tuple[int, float], ...]:
        return ((len(self.samples), 1.0),)

    def __len__(self) -> int:
        return len(self.samples)

    def lengths(self) -> np.ndarray:
        return np.asarray(self.source.lengths()[np.asarray(self.samples)])

    def targets(self) -> np.ndarray:
        return np.asarray(self.source.targets()[np.asarray(self.samples)])

    def documents(self, i: int) -> tuple[Document, ...]:
        return self.source.documents(self.samples[i])

    def read(self, numbers: Sequence[int]) -> SampleChunk:
        return SampleChunk([(i, self.documents(i)) for i in numbers], len(numbers))
