"""Store a teacher's likeliest tokens of each target in files next to the tokenised data, and find them by sample.

A record belongs to one target: the numbers of k tokens, their log-probabilities, and last that of all others together.
Records are in the order of samples and of their targets, so that the rows, their order and the ranks of a run do not
matter. A file has whole samples. It is written whole or not at all, and its name holds the digest of its bytes.
"""

from __future__ import annotations

import hashlib
import io
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from optrush.data import tokenize
from optrush.errors import DataError
from optrush.files import sync_folder, write_whole

FILE_BYTES = 2**27  # of one file, about
OPEN = 64  # mapped files at a time: each holds a file descriptor


def record_type(k: int, width_bytes: int) -> np.dtype:
    """Return the type of a record, with log-probabilities in float32 (4 bytes) or float16 (2)."""
    return np.dtype([("ids", "<i4", (k,)), ("log_p", f"<f{width_bytes}", (k + 1,))])


@dataclass(frozen=True)
class StoredTokens:
    """The records of samples by their number."""

    record: np.dtype
    find: Callable[[int], np.ndarray]  # the number of a sample -> (its targets,) records

    @property
    def k(self) -> int:
        """Return how many tokens a record has."""
        return int(self.record["ids"].shape[0])


@dataclass(frozen=True)
class FileLayout:
    """Which records are in which file: a function of the samples' targets and the size of a record."""

    starts: np.ndarray  # (samples + 1,) int64: the first record of each sample
    firsts: np.ndarray  # (files + 1,) int64: the first sample of each file

    @classmethod
    def of(cls, targets: np.ndarray, record: np.dtype) -> FileLayout:
        """Return the layout of samples with so many targets each."""
        starts = np.concatenate([[0], np.cumsum(targets, dtype=np.int64)])
        file = starts[:-1] // max(1, FILE_BYTES // record.itemsize)
        return cls(starts, np.concatenate([[0], np.flatnonzero(np.diff(file)) + 1, [len(targets)]]))

    def samples(self, file: int) -> range:
        """Return the samples of a file."""
        return range(int(self.firsts[file]), int(self.firsts[file + 1]))

    def __len__(self) -> int:
        return len(self.firsts) - 1


class TokenFiles:
    """The files of one key, in a folder of the cache.

    Args:
        key: a digest of all that determines the records.
    """

    def __init__(self, folder: Path, key: str, layout: FileLayout, record: np.dtype) -> None:
        self.folder, self.key, self.layout, self.record = folder, key, layout, record
        self._paths: list[Path] = []

    def path(self, file: int, *, whole: bool) -> Path | None:
        """Return the path of a file that was written before, or None.

        Args:
            whole: read all its bytes, and check them.

        Raises:
            DataError: the bytes do not match the digest in its name.
        """
        found = next(iter(sorted(self.folder.glob(f"{self.key}-{file}-*.npy"))), None)
        if found is not None and whole and not tokenize.intact(found):
            asked, do = f"the teacher's stored tokens in {found}", f"remove it, and it is made again: rm {found}"
            raise DataError(asked, "damaged: its bytes do not match the digest in its name", do)
        return found

    def write(self, file: int, records: np.ndarray) -> None:
        """Write a file; OSError if the disk does not take it."""
        buffer = io.BytesIO()
        np.save(buffer, records, allow_pickle=False)
        data = buffer.getbuffer()
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{self.key}-{file}-{hashlib.sha256(data).hexdigest()[:32]}.npy"
        write_whole(path, [data], self.folder / f"{path.stem}{tokenize.TEMPORARY}{secrets.token_hex(4)}")
        sync_folder(self.folder)

    def opened(self) -> StoredTokens:
        """Return the records; every file must be there."""
        found = [self.path(file, whole=False) for file in range(len(self.layout))]
        self._paths = [path for path in found if path is not None]
        assert len(self._paths) == len(found), "a file has not been written"
        return StoredTokens(self.record, self._find)

    def _find(self, sample: int) -> np.ndarray:
        starts, firsts = self.layout.starts, self.layout.firsts
        file = int(np.searchsorted(firsts, sample, side="right")) - 1
        before = int(starts[firsts[file]])
        return _mapped(self._paths[file])[int(starts[sample]) - before : int(starts[sample + 1]) - before]


@lru_cache(OPEN)
def _mapped(path: Path) -> np.ndarray:
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
