"""One shard: the documents of a piece of the data as token ids, in a file that is whole or not there.

A safetensors file that this module writes and maps itself: the library's writer does not sync, and its reader makes
copies. Its name holds its place and the SHA-256 of its bytes, so a shard cut off or with one bit flipped is found by
reading it once. Nothing in it depends on where the data files lie. Documents are whole: a shard knows nothing of T.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from optrush.data.document import Document
from optrush.data.rows import Where
from optrush.errors import DataError

FORMAT = 3  # part of every key: shards of another format are other shards
HERE = "\0"  # stands for the row's place in the text of an error
TEMPORARY = ".tmp-"
STALE_S = 86400.0  # after which a temporary file of another machine is taken for dead

_DTYPES: dict[str, np.dtype[Any]] = {"I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "U8": np.dtype("u1")}
_ARRAYS = (  # widest elements first, so that each array lies aligned
    ("starts", "I64"), ("numbers", "I64"), ("lines", "I64"), ("files", "I32"), ("learnt", "I32"),
    ("ids", "I32"), ("targets", "U8"), ("refused", "U8"),
)  # fmt: skip
_FACTS = ("rows", "cleaned", "marked", "parts", "highest", "last")


class Refused(NamedTuple):
    """A row that is no training data, and the error that says why."""

    where: Where
    error: DataError


@dataclass(frozen=True)
class Shard:
    """S samples of one document each, or of two (`parts`); arrays are in memory, or of a mapped file.

    A row's number counts the rows of the shard from 0, refused ones included, those that cleaning took out not.
    """

    rows: int  # with the refused ones
    cleaned: int  # rows that cleaning had taken out
    marked: int  # plain texts that hold special tokens as text
    parts: int  # documents of a sample: 1, of pairs 2
    highest: int  # the highest token id
    last: int  # 1: no further shard of the same job follows
    starts: np.ndarray  # (S * parts + 1,) int64: where the documents lie in ids
    numbers: np.ndarray  # (S,) int64: of each sample's row, rising
    lines: np.ndarray  # (S,) int64: of each sample's row in its file
    files: np.ndarray  # (S,) int32: of each sample's row, a position in the list of files
    learnt: np.ndarray  # (S,) int32: targets of each sample
    ids: np.ndarray  # (tokens,) int32
    targets: np.ndarray  # (tokens / 8,) uint8: bits
    refused: np.ndarray  # uint8: JSON, a list of [number, file, line, asked, found, do]

    def __len__(self) -> int:
        return len(self.numbers)

    def lengths(self) -> np.ndarray:
        """(S,) int64: tokens of each sample."""
        return np.asarray(np.diff(self.starts[:: self.parts]))

    def document(self, start: int, end: int) -> Document:
        """The tokens [start, end) of `ids`; the first is no target, for its context is not there."""
        bits = np.unpackbits(self.targets[start // 8 : -(-end // 8)])
        targets = bits[start % 8 :][: end - start].astype(bool)
        targets[:1] = False
        return Document(np.asarray(self.ids[start:end]), targets)

    def refusals(self, files: Sequence[Path]) -> list[tuple[int, Refused]]:
        """The refused rows in order, by their number."""
        found = []
        for number, file, line, *said in json.loads(self.refused.tobytes() or b"[]"):
            where = Where(files[file], line)
            found.append((number, Refused(where, DataError(*(text.replace(HERE, str(where)) for text in said)))))
        return found

    def encoded(self) -> list[bytes | memoryview]:
        """The shard as the pieces of a safetensors file."""
        facts = {name: str(int(getattr(self, name))) for name in _FACTS}
        header: dict[str, Any] = {"__metadata__": {"format": str(FORMAT), **facts}}
        arrays = [np.ascontiguousarray(getattr(self, name), _DTYPES[kind]) for name, kind in _ARRAYS]
        at = 0
        for (name, kind), array in zip(_ARRAYS, arrays, strict=True):
            header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
            at += array.nbytes
        head = json.dumps(header).encode()
        head += b" " * (-len(head) % 8)
        return [len(head).to_bytes(8, "little") + head, *(array.data for array in arrays if array.nbytes)]


@dataclass
class Builder:
    """Collects samples until they are a shard."""

    rows: int = 0
    cleaned: int = 0
    marked: int = 0
    tokens: int = 0
    parts: int = 0
    _ids: list[np.ndarray] = field(default_factory=list)
    _targets: list[np.ndarray] = field(default_factory=list)
    _samples: list[tuple[int, int, int, int]] = field(default_factory=list)  # number, line, file, learnt
    _refused: list[list[Any]] = field(default_factory=list)

    def add(self, where: Where, file: int, found: tuple[Document, ...] | DataError) -> None:
        """The next row: its documents, or why it has none. Raises DataError where a pair meets rows that are none."""
        if isinstance(found, DataError):
            said = (text.replace(str(where), HERE) for text in (found.asked, found.found, found.do))
            self._refused.append([self.rows, file, where.line, *said])
        else:
            if self.parts not in (0, len(found)):
                raise mixed(where)
            self.parts = len(found)
            self._ids += [document.ids for document in found]
            self._targets += [document.targets for document in found]
            learnt = sum(int(np.count_nonzero(document.targets)) for document in found)
            self._samples.append((self.rows, where.line, file, learnt))
            self.tokens += sum(map(len, found))
        self.rows += 1

    def shard(self, last: bool) -> Shard:
        """What was collected."""
        numbers, lines, files, learnt = np.array(self._samples, np.int64).reshape(-1, 4).T
        ids = np.concatenate([np.zeros(0, np.int32), *self._ids])
        bits = np.packbits(np.concatenate([np.zeros(0, bool), *self._targets]))
        refused = np.frombuffer(json.dumps(self._refused).encode() if self._refused else b"", np.uint8)
        starts = np.cumsum([0, *map(len, self._ids)], dtype=np.int64)
        highest = int(ids.max(initial=-1))
        return Shard(
            self.rows, self.cleaned, self.marked, self.parts or 1, highest, int(last), starts, numbers, lines,
            files.astype(np.int32), learnt.astype(np.int32), ids, bits, refused,
        )  # fmt: skip


def mixed(where: object) -> DataError:
    """The error of data that holds pairs and other rows: what is learnt from them has nothing in common."""
    return DataError("pairs (chosen and rejected), or rows of other kinds", f"both, at {where}", "take one kind out")


# --- on the disk: three calls change it, each with a name, so that a test can kill the process there


def write(file: IO[bytes], data: Any) -> None:
    file.write(data)


def sync(descriptor: int) -> None:
    os.fsync(descriptor)


def rename(old: Path, new: Path) -> None:
    os.rename(old, new)


def commit(shard: Shard, folder: Path, job: int, piece: int) -> Path:
    """Writes the shard under a temporary name, syncs it and renames it; the temporary file never stays behind.

    Raises:
        OSError: the disk is full, or the folder not ours.
    """
    temporary = folder / f"{job:06d}-{piece:03d}{TEMPORARY}{socket.gethostname()}-{secrets.token_hex(4)}"
    sha = hashlib.sha256()
    try:
        with temporary.open("xb") as file:
            for data in shard.encoded():
                write(file, data)
                sha.update(data)
            file.flush()
            sync(file.fileno())
        path = folder / f"{job:06d}-{piece:03d}-{sha.hexdigest()[:32]}.safetensors"
        rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path


def sync_folder(folder: Path) -> None:
    """Makes renames in the folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def digest(shard: Shard) -> str:
    """What the name of the shard's file would hold."""
    sha = hashlib.sha256()
    for data in shard.encoded():
        sha.update(data)
    return sha.hexdigest()[:32]


def intact(path: Path) -> bool:
    """Whether the file's bytes are those that its name tells of; reads all of it."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:32] == path.stem.rsplit("-", 1)[1]
    except OSError:
        return False


def mapped(path: Path) -> Shard:
    """The shard in a file known to be intact; its arrays are the file's own pages."""
    data = np.memmap(path, np.uint8, "r").view(np.ndarray)
    size = int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8 : 8 + size].tobytes())
    facts = header["__metadata__"]
    arrays: dict[str, Any] = {}
    for name, kind in _ARRAYS:
        first, end = header[name]["data_offsets"]
        arrays[name] = data[8 + size + first : 8 + size + end].view(_DTYPES[kind])
    return Shard(**{name: int(facts[name]) for name in _FACTS} | arrays)


def sweep(folder: Path) -> None:
    """Removes temporary files that a killed process left: of this machine all, of others those of yesterday.

    To be called where no process of this machine can be writing.
    """
    for path in folder.glob(f"*{TEMPORARY}*"):
        ours = path.name.split(TEMPORARY)[1].rsplit("-", 1)[0] == socket.gethostname()
        if ours or time.time() - path.stat().st_mtime > STALE_S:
            path.unlink(missing_ok=True)
