"""Tokenize data once, into shards on disk, with one process per core.

A shard is a safetensors file that is either complete or absent, so a run resumes where a killed one stopped. The
folder's name is a digest of the files, the tokenizer, its template and every setting that changes ids or masks. T, and
the treatment of documents longer than T, are not part of it: the samples are a view on the shards (dataset.py).

One process per machine tokenizes, under a lock that is released when the process ends; the others wait for the lock. No
collective runs meanwhile, so a rank that tokenizes for an hour causes no timeout on the others.
"""

from __future__ import annotations

import datetime
import errno
import fcntl
import hashlib
import json
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import accumulate, chain, islice, tee
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from optrush import __version__
from optrush.config import Config
from optrush.data import pool, readers, schema
from optrush.data.chat_template import Tokens, answers
from optrush.data.download import REMOTE
from optrush.data.images import ImageReader, SeenImage, pack_images, unpack_images
from optrush.data.readers import PARQUET, Chunk, chunks, form, read_rows_or_errors
from optrush.data.schema import NO_RULES, Chat, Document, Judged, Row, RowLocation, RowRules, row_rules
from optrush.errors import DataError
from optrush.files import open_file, open_to_append, regular, sync_folder, write_whole
from optrush.objectives import learnt

# --- One shard: documents from a part of the data, as token ids.
#
# This module writes and maps the safetensors file itself: the library's writer does not sync, and its reader copies.
# The file name has the shard's position and the SHA-256 of its bytes, so reading a shard once detects truncation or a
# flipped bit. A shard does not depend on the paths of the data files, nor on T: its documents are uncut.

FORMAT = 10  # part of every key: shards of another format are not reused
HERE = "\0"  # replaces the row's location in the text of an error
TEMPORARY = ".tmp-"
STALE_S = 86400.0  # the age at which another machine's temporary file counts as abandoned

_DTYPES: dict[str, np.dtype[Any]] = {
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "F32": np.dtype("<f4"), "U8": np.dtype("u1"),
}  # fmt: skip
_ARRAYS = (  # widest elements first, so that each array is aligned
    ("starts", "I64"), ("numbers", "I64"), ("lines", "I64"), ("digests", "I64"), ("images", "I64"), ("files", "I32"),
    ("learnt", "I32"), ("ids", "I32"), ("weights", "F32"), ("targets", "U8"), ("desirable", "U8"), ("refused", "U8"),
    ("keys", "U8"), ("pictures", "U8"),
)  # fmt: skip
_FACTS = ("rows", "cleaned", "marked", "parts", "highest", "last")


def image_mark(image: str, folder: Path) -> list[int]:
    """Return numbers that change when a bad image should be tried again: a file's mark, or for a URL the hour."""
    try:
        return [int(time.time() // 3600)] if image.startswith(REMOTE) else readers.file_state(folder / image)
    except (OSError, ValueError):  # missing, or not a path
        return []


class BadRow(NamedTuple):
    """The location of an invalid row, and its error."""

    where: RowLocation
    error: DataError


@dataclass(frozen=True)
class Shard:
    """S samples of one document each, or of two (`parts`); arrays are in memory or of a mapped file.

    Row numbers count the rows of the shard from 0, including refused rows but not those that cleaning removed. A row
    can have several samples (`data.split_turns`).
    """

    rows: int  # including refused ones
    cleaned: int  # rows that cleaning removed
    marked: int  # plain texts that contain special tokens as text
    parts: int  # documents per sample: 1, or 2 for pairs
    highest: int  # the highest token id
    last: int  # 1: the last shard of its job
    starts: np.ndarray  # (S * parts + 1,) int64: offsets of the documents in ids
    numbers: np.ndarray  # (S,) int64: number of each sample's row, ascending
    lines: np.ndarray  # (S,) int64: line of each sample's row in its file
    digests: np.ndarray  # (S,) int64: digest of each sample's tokens and images, to find equal samples
    images: np.ndarray  # int64, and `pictures`: the result of `images.pack_images`
    files: np.ndarray  # (S,) int32: file of each sample's row, an index into the list of files
    learnt: np.ndarray  # (S,) int32: number of targets in each sample
    ids: np.ndarray  # (tokens,) int32
    weights: np.ndarray  # (tokens,) float32, of targets in the loss; (0,): all 1
    targets: np.ndarray  # (tokens / 8,) uint8: bits
    desirable: np.ndarray  # (S,) uint8: 0 for answers labelled bad
    refused: np.ndarray  # uint8: JSON, a list of [number, file, line, the three texts of the error], followed for a bad
    # image by its path and its mark
    keys: np.ndarray  # uint8: JSON, the number of rows with each key that is unread or in `data.columns`
    pictures: np.ndarray  # uint8: paths and bytes of images

    def __len__(self) -> int:
        return len(self.numbers)

    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each sample, (S,) int64."""
        return np.asarray(np.diff(self.starts[:: self.parts]))

    def document(self, start: int, end: int, weighted: bool = False, files: Sequence[Path] = ()) -> Document:
        """Return tokens [start, end) of `ids`, with weights if `weighted`; the first, without context, is not a target.

        Args:
            files: the list of files, for the folder of the document's images; may be empty if these are not read.
        """
        bits = np.unpackbits(self.targets[start // 8 : -(-end // 8)])
        targets = bits[start % 8 :][: end - start].astype(bool)
        targets[:1] = False
        sample = (int(np.searchsorted(self.starts, start, "right")) - 1) // self.parts
        ones = np.ones(end - start, np.float32) if weighted else None
        weights = np.asarray(self.weights[start:end]) if len(self.weights) else ones
        seen = unpack_images(self.images, self.pictures, start, end) if len(self.images) else ()
        if files and seen:
            folder = files[self.files[sample]].parent
            seen = tuple([image._replace(folder=folder) for image in seen])
        return Document(np.asarray(self.ids[start:end]), targets, bool(self.desirable[sample]), weights, seen)

    def refusals(self, files: Sequence[Path]) -> list[tuple[int, BadRow]]:
        """Return (number, row) of the refused rows, in order."""
        result = []
        for number, file, line, *texts in self.bad():
            where, texts = RowLocation(files[file], line), texts[:3]
            result.append((number, BadRow(where, DataError(*(text.replace(HERE, str(where)) for text in texts)))))
        return result

    def bad(self) -> list[list[Any]]:
        """Return the decoded `refused`."""
        rows: list[list[Any]] = json.loads(self.refused.tobytes() or b"[]")
        return rows

    def outdated(self, files: Sequence[Path]) -> bool:
        """Return whether an image that made a row invalid has appeared or changed since then."""
        marked = [(files[row[1]].parent, *row[6:]) for row in self.bad() if len(row) > 6]
        return any(image_mark(image, folder) != known for folder, image, known in marked)

    def noted(self) -> dict[str, int]:
        """Return the number of rows with each key that `parse_row` noted."""
        counts: dict[str, int] = json.loads(self.keys.tobytes() or b"{}")
        return counts

    def encoded(self) -> list[bytes | memoryview]:
        """Return the pieces of the shard's safetensors file."""
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
    """Collect samples for a shard."""

    rows: int = 0
    cleaned: int = 0
    marked: int = 0
    tokens: int = 0
    held: int = 0  # bytes of images
    parts: int = 0
    keys: Counter[str] = field(default_factory=Counter)
    _ids: list[np.ndarray] = field(default_factory=list)
    _targets: list[np.ndarray] = field(default_factory=list)
    _weights: list[np.ndarray | None] = field(default_factory=list)
    _images: list[tuple[SeenImage, int]] = field(default_factory=list)  # with the number of tokens before its document
    _samples: list[tuple[int, int, int, int, int]] = field(default_factory=list)  # number, line, digest, file, learnt
    _desirable: list[bool] = field(default_factory=list)
    _refused: list[list[Any]] = field(default_factory=list)

    def note(self, keys: Iterable[str]) -> None:
        """Count a row's keys; after MOST_KEYS different ones, new keys count as OTHER_KEYS."""
        for key in keys:
            self.keys[key if key in self.keys or len(self.keys) < MOST_KEYS else OTHER_KEYS] += 1

    def add_samples(self, where: RowLocation, file: int, made: Samples | DataError) -> None:
        """Append a row: its samples or its error."""
        if isinstance(made, DataError):
            self.add(where, file, made)
            return
        for n, sample in enumerate(made):
            self.rows -= n > 0  # still the same row
            self.add(where, file, sample)

    def add(self, where: RowLocation, file: int, row: tuple[Document, ...] | DataError) -> None:
        """Append a row of one sample: its documents or its error. Raises DataError if pairs meet other rows."""
        if isinstance(row, DataError):
            texts = (text.replace(str(where), HERE) for text in (row.asked, row.found, row.do))
            image = [row.image, image_mark(row.image, where.file.parent)] if row.image else []
            self._refused.append([self.rows, file, where.line, *texts, *image])
        else:
            if self.parts not in (0, len(row)):
                raise mixed_kinds(where)
            self.parts = len(row)
            self._ids += [document.ids for document in row]
            self._targets += [document.targets for document in row]
            self._weights += [document.weights for document in row]
            targets = sum(int(np.count_nonzero(document.targets)) for document in row)
            content = [document.ids.tobytes() for document in row]
            content += [str(seen.digest).encode() for document in row for seen in document.images]
            digest = hashlib.blake2b(b"".join(content), digest_size=8).digest()
            for document in row if len(row) == 1 else ():
                self._images += [(seen, self.tokens) for seen in document.images]
                self.held += sum(len(seen.picture.data) for seen in document.images)
            self._samples.append((self.rows, where.line, int.from_bytes(digest, "little", signed=True), file, targets))
            self._desirable.append(row[0].desirable)
            self.tokens += sum(map(len, row))
        self.rows += 1

    def shard(self, last: bool) -> Shard:
        """Return the rows collected so far as a shard."""
        numbers, lines, digests, files, learnt = np.array(self._samples, np.int64).reshape(-1, 5).T
        ids = np.concatenate([np.zeros(0, np.int32), *self._ids])
        bits = np.packbits(np.concatenate([np.zeros(0, bool), *self._targets]))
        refused = np.frombuffer(json.dumps(self._refused).encode() if self._refused else b"", np.uint8)
        weights = np.ones(len(ids) if any(w is not None for w in self._weights) else 0, np.float32)
        for at, part in zip(accumulate(map(len, self._ids), initial=0), self._weights):
            if part is not None:
                weights[at : at + len(part)] = part
        starts = np.cumsum([0, *map(len, self._ids)], dtype=np.int64)
        keys = np.frombuffer(json.dumps(dict(sorted(self.keys.items()))).encode() if self.keys else b"", np.uint8)
        highest = int(ids.max(initial=-1))
        images, pictures = pack_images([image for image, _ in self._images], [n for _, n in self._images])
        return Shard(
            self.rows, self.cleaned, self.marked, self.parts or 1, highest, int(last), starts, numbers, lines,
            digests, images, files.astype(np.int32), learnt.astype(np.int32), ids, weights, bits,
            np.array(self._desirable, np.uint8), refused, keys, pictures,
        )  # fmt: skip


def mixed_kinds(where: object) -> DataError:
    """Return the error for data that mixes pairs with other rows, which need different objectives."""
    return DataError("pairs (chosen and rejected), or rows of other kinds", f"both, at {where}", "remove one kind")


def shard_digest(shard: Shard) -> str:
    """Return the digest of a shard's bytes, a part of its file name."""
    sha = hashlib.sha256()
    for data in shard.encoded():
        sha.update(data)
    return sha.hexdigest()[:32]


def commit_shard(shard: Shard, folder: Path, job: int, piece: int) -> Path:
    """Write the shard's file atomically and return its path; raises OSError."""
    name = f"{job:06d}-{piece:03d}"
    path = folder / f"{name}-{shard_digest(shard)}.safetensors"
    write_whole(path, shard.encoded(), folder / f"{name}{TEMPORARY}{socket.gethostname()}-{secrets.token_hex(4)}")
    return path


def intact(path: Path) -> bool:
    """Return whether a file's bytes match the digest in its name; reads the whole file."""
    try:
        with open_file(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:32] == path.stem.rsplit("-", 1)[1]
    except OSError:
        return False


def open_shard(path: Path) -> Shard:
    """Return the shard in an intact file; its arrays are memory-mapped."""
    data = np.memmap(regular(path), np.uint8, "r").view(np.ndarray)
    size = int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8 : 8 + size].tobytes())
    fields: dict[str, Any] = {name: int(header["__metadata__"][name]) for name in _FACTS}
    for name, kind in _ARRAYS:
        first, end = header[name]["data_offsets"]
        fields[name] = data[8 + size + first : 8 + size + end].view(_DTYPES[kind])
    return Shard(**fields)


def remove_temporary_files(folder: Path) -> None:
    """Remove temporary files of killed processes: all from this machine (none may be writing), older ones of others."""
    for path in folder.glob(f"*{TEMPORARY}*"):
        ours = path.name.split(TEMPORARY)[1].rsplit("-", 1)[0] == socket.gethostname()
        with suppress(FileNotFoundError):  # another machine has just finished it
            if ours or time.time() - path.stat().st_mtime > STALE_S:
                path.unlink()


# --- Rows to shards, in one process.

BATCH_rows = 512  # maximum per call of the tokenizer
FIRST_rows, SLOW_s = 32, 1.0  # rows of the first call; a call that takes longer is followed by smaller ones
BATCH_chars = 1 << 20  # approximate maximum of text per batch: the tokenizer needs some 100 bytes per token
SHARD_tok = 4 << 20  # a shard is full at this number of tokens: 16 MiB of ids
ADDRESS_chars = 1 << 18  # counted in `BATCH_chars` for an image to download
SHARD_bytes = 64 << 20  # likewise, bytes of embedded images
SHARD_rows = 1 << 17  # likewise, rows, including refused ones: empty lines must not fill the memory

# For each file, whether cleaning kept each row: row k of a chunk has index chunk.first - 1 + k. None: all kept.
Kept = Sequence[np.ndarray] | None
# Index of the file, location, row (None: removed by cleaning), keys that `parse_row` noted.
Parsed = tuple[int, RowLocation, Row | DataError | None, Collection[str]]
Samples = Sequence[tuple[Document, ...]]  # of one row
LOSSY = "characters -> lost"  # counted like a key: rows with characters that the tokenizer lacks
MOST_KEYS, OTHER_KEYS = 100, "other keys"  # number of keys counted separately; the name for all others


@dataclass(frozen=True)
class TokenizeJob:
    """Consecutive chunks that are tokenized together, each with its file's index in the list of files."""

    number: int
    chunks: tuple[tuple[int, Chunk], ...]
    size_bytes: float = 0.0  # approximate size in the files


def shards(
    entries: Iterable[Parsed],
    tokens: Tokens,
    train_on: str,
    most: int | None = None,
    progress: pool.Beat = pool.silent,
) -> Iterator[Shard]:
    """Yield the first `most` rows (None: all) as shards of bounded size, the last one marked.

    `progress` gets the number of new rows.
    """
    builder, batch, chars, seen, size = Builder(), list[Parsed](), 0, 0, FIRST_rows

    def flush() -> None:
        """Tokenize the rows of the batch, add them to the builder, report them to `progress`, and empty the batch."""
        nonlocal size
        good = [(where, row) for _, where, row, _ in batch if row is not None and not isinstance(row, DataError)]
        samples, reported, before = list[Samples | DataError](), 0, tokens.lossy
        while len(samples) < len(good):  # report within a batch, too: templates may be slow
            begun = time.monotonic()
            samples += row_samples(tokens, good[len(samples) : len(samples) + size], train_on)
            size = min(BATCH_rows, 4 * size) if time.monotonic() - begun < SLOW_s else max(1, size // 4)
            progress(len(samples) - reported)
            reported = len(samples)
        made = iter(samples)
        builder.note([LOSSY] * (tokens.lossy - before))
        builder.marked += sum(tokens.marked(row) for _, row in good)
        for file, where, row, keys in batch:
            if row is None:
                builder.cleaned += 1
            else:
                builder.note(keys)
                builder.add_samples(where, file, row if isinstance(row, DataError) else next(made))
        progress(len(batch) - reported)
        batch.clear()

    for entry in entries:
        batch.append(entry)
        row = entry[2]
        chars += 0 if row is None or isinstance(row, DataError) else len(schema.row_text(row))
        if isinstance(row, Chat):
            chars += sum(ADDRESS_chars if image.path.startswith(REMOTE) else len(image.data) for image in row.images)
        seen += row is not None
        if seen == most:
            break
        if len(batch) >= BATCH_rows or chars >= BATCH_chars:
            flush()
            chars = 0
            if builder.tokens >= SHARD_tok or builder.rows >= SHARD_rows or builder.held >= SHARD_bytes:
                yield builder.shard(last=False)
                builder = Builder()
    flush()
    yield builder.shard(last=True)


def row_samples(tokens: Tokens, rows: Sequence[tuple[RowLocation, Row]], train_on: str) -> list[Samples | DataError]:
    """Return the samples of each row, or its error: one sample, or with `each` one per answer that is a target."""
    if not train_on.startswith("each"):
        zipped = zip(rows, tokens.batch(rows, train_on), strict=True)
        return [
            made if isinstance(made, DataError) else [(d,) for d in made] if isinstance(row, Judged) else [made]
            for (_, row), made in zipped
        ]
    parts = [split_turns(row) for _, row in rows]
    flat = [(where, part) for (where, _), of in zip(rows, parts, strict=True) for part in of]
    made = iter(tokens.batch(flat, train_on.replace("each", "last")))
    result: list[Samples | DataError] = []
    for of in parts:
        samples = [next(made) for _ in of]
        bad = next((sample for sample in samples if isinstance(sample, DataError)), None)
        result.append(bad or [sample for sample in samples if not isinstance(sample, DataError)])
    return result


def split_turns(row: Row) -> list[Row]:
    """Return a conversation up to each answer that is a target; labelled answers singly; other rows unchanged."""
    if isinstance(row, Judged):
        return [Judged((answer,), (label,)) for answer, label in zip(row.answers, row.labels, strict=True)]
    if not isinstance(row, Chat):
        return [row]
    return [replace(row, messages=row.messages[: i + 1]) for i in answers(row, "assistant")] or [row]


def parsed(job: TokenizeJob, text_rows: str, kept: Kept, rules: RowRules = NO_RULES) -> Iterator[Parsed]:
    """Yield the job's parsed rows; an error in place of an invalid row."""
    for file, chunk in job.chunks:
        keep = None if kept is None else kept[file]
        for k, (where, row) in enumerate(read_rows_or_errors(chunk, text_rows), chunk.first - 1):
            if keep is not None and not keep[k]:
                yield file, where, None, ()
            elif isinstance(row, DataError):
                yield file, where, row, ()
            else:
                keys = set[str]()
                yield file, where, parsed_or_error(where, row, rules, keys), keys


def parsed_or_error(where: RowLocation, row: dict[str, Any], rules: RowRules, keys: set[str]) -> Row | DataError:
    """Return the parsed row, or its error; `keys` gets the keys that `parse_row` notes."""
    try:
        return schema.parse_row(where, row, rules, keys)
    except DataError as error:
        return error


def identity(tokens: Tokens) -> str:
    """Return the SHA-256 of all that determines ids and masks; includes the date if the template uses it."""
    tokenizer, source, other = tokens.tokenizer, _template(tokens) or "", _template(tokens, tools=True) or ""
    today = datetime.date.today().isoformat() if "strftime_now" in source + other else ""
    parts = [tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id, tokenizer.special_tokens_map, source, today]
    parts += [] if other == source else [other]
    parts += [tokens.images.identity] if isinstance(tokens.images, ImageReader) else []
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


def _template(tokens: Tokens, tools: bool = False) -> str | None:
    """Return the chat template with the run's date; None if there is none, which is valid for plain text."""
    with suppress(DataError):
        return tokens.template(tools)
    return None


class Missing(NamedTuple):
    """The missing part of a job: its rows after the first `skip`, for shards from number `piece` on."""

    job: TokenizeJob
    skip: int
    piece: int
    marks: Sequence[list[int]] = ()  # of the chunks' files, from before the files were hashed


class Made(NamedTuple):
    """The names of new shards, and the number of rows read for them."""

    names: list[str]
    rows: int


@dataclass(frozen=True)
class ShardMaker:
    """Write the missing shards of jobs; written shards stay even if the job fails."""

    tokens: Tokens
    train_on: str
    text_rows: str
    kept: Kept
    rules: RowRules
    folder: Path

    def __call__(self, missing: Missing, beat: pool.Beat = pool.silent) -> Made:
        """Write the shards; raise DataError if the disk is full, or a file has changed since its mark was taken."""
        job, made = missing.job, Made([], 0)
        entries = islice(parsed(job, self.text_rows, self.kept, self.rules), missing.skip, None)
        for shard in shards(entries, self.tokens, self.train_on, progress=beat):
            for (_, chunk), mark in zip(job.chunks, missing.marks):
                if readers.file_state(chunk.file) != mark:
                    raise readers.changed_meanwhile(chunk.file)
            try:
                path = commit_shard(shard, self.folder, job.number, missing.piece + len(made.names))
            except OSError as error:
                raise no_room(self.folder, error) from None
            made = Made([*made.names, path.name], made.rows + shard.rows + shard.cleaned)
        return made


def no_room(folder: Path, error: OSError) -> DataError:
    """Return the error for a folder in which shards cannot be written."""
    do = "free space" if error.errno == errno.ENOSPC else "check the folder and its permissions"
    return DataError(f"to keep the tokenised data in {folder}", str(error.strerror), f"{do}, or set another data.cache")


# --- All shards of some data.

CHUNK_bytes = 1 << 18  # minimum per job, 0.1 s for chats; smaller data stays in memory
CHUNKS, MOST_bytes = 256, 16 << 20  # larger data: aim for this number of jobs, each of at most this size
PACKED = 4  # approximate compression ratio of text
QUIET_S, EVERY_S = 2.0, 5.0  # time before the first report; time between two reports
POLL_S = 0.2
CPU_SHARE = Path("/sys/fs/cgroup/cpu.max")  # microseconds of CPU time per period, and the period

Say = Callable[[str], None]


@dataclass(frozen=True)
class TokenizeWork:
    """The data to tokenize, and the settings."""

    config: Config
    tokens: Tokens
    files: tuple[Path, ...]
    kept: Kept = None  # by file
    cleaning: str = ""  # a digest of `kept`
    say: Say = pool.silent

    @property
    def folder(self) -> Path:
        """The folder of the shards."""
        seen = isinstance(self.tokens.images, ImageReader)
        key = {
            "format": FORMAT, "files": readers.files_fingerprint(self.files, cache_root(self.config.data.cache)),
            "tokens": identity(self.tokens), "train_on": learnt(self.config), "text_rows": self.config.data.reading,
            "images_in": sorted({os.path.realpath(file.parent) for file in self.files} if seen else ()),
            "cleaning": self.cleaning, "rules": row_rules(self.config).identity,
            "made_by": [__version__, *map(version, ("tokenizers", "transformers", "jinja2", *["pillow"] * seen))],
        }  # fmt: skip
        return cache_root(self.config.data.cache) / "tokens" / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]

    def parsed(self, job: TokenizeJob) -> Iterator[Parsed]:
        """Yield the parsed rows of a job."""
        return parsed(job, self.config.data.reading, self.kept, row_rules(self.config))


def cache_root(cache: str | None) -> Path:
    """Return the folder for derived data: `cache`, `$OPTRUSH_CACHE`, or a folder in the user's cache."""
    if cache is not None or "OPTRUSH_CACHE" in os.environ:
        return Path(cache or os.environ["OPTRUSH_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "optrush"


def tokenized(work: TokenizeWork, most: int | None = None) -> Generator[Path | Shard]:
    """Yield the shards of the data in order, each as soon as it exists; close the iterator to stop.

    `most` limits the rows of small data only. Raises DataError: a file cannot be read or written.
    """
    progress = Progress(work.say, "tokenising", sum(path.stat().st_size for path in work.files))
    if fits_in_memory(work.files):
        for job in jobs(work.files, work.config.data.reading):
            yield from shards(work.parsed(job), work.tokens, learnt(work.config), most, progress.done)
        return
    marks = [readers.file_state(path) for path in work.files]
    folder = work.folder
    store = ShardStore(folder, work.files)
    number = yield from store.ready(0)
    if number == store.jobs:
        return
    with locked(folder, work.say):
        remove_temporary_files(folder)
        store.refresh()  # another process may have added shards meanwhile
        for path in store.outdated:
            path.unlink(missing_ok=True)
        number = yield from store.ready(number)
        if number != store.jobs:
            for paths in _remaining(work, store, progress, number, marks):
                yield from paths


def fits_in_memory(paths: Sequence[Path]) -> bool:
    """Return whether the data is small enough to stay in memory: less than CHUNK_bytes."""
    return sum(path.stat().st_size * (1 if _plain(path) else PACKED) for path in paths) < CHUNK_bytes


def chunk_bytes(paths: Sequence[Path]) -> int:
    """Return the size of the jobs, from the sizes of the files alone: larger data has larger jobs."""
    return max(CHUNK_bytes, min(MOST_bytes, sum(path.stat().st_size for path in paths) // CHUNKS))


def _plain(path: Path) -> bool:
    suffix, packing = form(path) or ("", "")
    return not packing and suffix != PARQUET


class ShardStore:
    """The shards in a folder."""

    def __init__(self, folder: Path, files: Sequence[Path] = ()) -> None:
        self.folder, self.files = folder, files
        self._sound: set[Path] = set()  # checked: intact and up to date
        self.refresh()

    def refresh(self) -> None:
        """List the folder again. A damaged shard counts as missing; its replacement gets the same name."""
        paths = sorted(self.folder.glob("*.safetensors"))
        fresh = [path for path in paths if path not in self._sound]
        with ThreadPoolExecutor(cores()) as pool:  # hashing releases Python's lock
            fresh = [path for path, ok in zip(fresh, pool.map(intact, fresh)) if ok]
        self.outdated = {path for path in fresh if self.files and open_shard(path).outdated(self.files)}
        self._sound |= {*fresh} - self.outdated
        self.jobs = next((int(path.name.split("-")[1]) for path in self.folder.glob("complete-*")), None)
        self.begun: dict[int, list[Path]] = {}  # the shards of each job up to the first missing one
        for path in paths:
            job, piece = map(int, path.name.split("-")[:2])
            if path in self._sound and piece == len(self.begun.setdefault(job, [])):
                self.begun[job].append(path)
        self.whole = {job: pieces for job, pieces in self.begun.items() if pieces and open_shard(pieces[-1]).last}

    def ready(self, number: int) -> Generator[Path, None, int]:
        """Yield the shards of the jobs from `number` on; return the first incomplete job."""
        while number in self.whole:
            yield from self.whole[number]
            number += 1
        return number

    def close(self, jobs: int) -> None:
        """Record the number of jobs, once all are complete."""
        sync_folder(self.folder)
        (self.folder / f"complete-{jobs}").touch()
        sync_folder(self.folder)


def jobs(paths: Sequence[Path], text_rows: str) -> Iterator[TokenizeJob]:
    """Yield the data in jobs of about `chunk_bytes`, from the files alone: a part of a file, or several small files."""
    number, members, size, most = 0, list[tuple[int, Chunk]](), 0.0, chunk_bytes(paths)
    total: float
    for file, path in enumerate(paths):
        total, parts = path.stat().st_size, chunks(path, most, text_rows)
        if path.suffix.lower() == PARQUET:  # its parts are row groups: cheap to list, and of unknown size in bytes
            listed = list(parts)
            total, parts = total / len(listed), iter(listed)
        for chunk in parts:
            part = chunk.end - chunk.start if _plain(path) and chunk.end is not None else total
            if members and size + part > most:
                yield TokenizeJob(number, tuple(members), size)
                number, members, size = number + 1, [], 0.0
            members.append((file, chunk))
            size += part
    if members:
        yield TokenizeJob(number, tuple(members), size)


def _remaining(
    work: TokenizeWork, store: ShardStore, progress: Progress, first: int, marks: Sequence[list[int]]
) -> Iterator[list[Path]]:
    """Yield the shards of each job from `first` on, in order; make missing ones, in worker processes if there are many.

    `marks` of the files are from before their contents were hashed: shards of a changed file belong to another folder.
    """
    data, number = work.config.data, first

    def missing(job: TokenizeJob) -> Missing:
        pieces = store.begun.get(job.number, [])
        skip = sum(shard.rows + shard.cleaned for shard in map(open_shard, pieces))
        return Missing(job, skip, len(pieces), [marks[file] for file, _ in job.chunks])

    def lost(item: Missing, what: str) -> DataError:
        chunk, do = item.job.chunks[0][1], "start again: finished parts are kept; `data.workers: 1` needs least memory"
        return DataError(f"to tokenise {chunk.file} from row {chunk.first} on", f"the process {what}", do)

    listed, ahead = tee(job for job in jobs(work.files, data.reading) if job.number >= first)
    todo = (missing(job) for job in progress.sized(ahead) if job.number not in store.whole)
    work.tokens.prepare()
    first_few = list(islice(todo, min(data.workers or cores(), int(progress.total) // CHUNK_bytes)))
    make = ShardMaker(work.tokens, learnt(work.config), data.reading, work.kept, row_rules(work.config), store.folder)
    try:
        with closing(pool.map_ahead(make, chain(first_few, todo), len(first_few), lost, progress.done)) as results:
            for job in listed:
                number, paths = job.number + 1, store.whole.get(job.number)
                fresh = paths is None
                if paths is None:
                    pieces = store.begun.get(job.number, [])
                    paths = [*pieces, *(store.folder / name for name in next(results).names)]
                progress.done(0, job.size_bytes, fresh=fresh)
                yield paths
    finally:
        remove_temporary_files(store.folder)  # unfinished files of workers that were ended
    store.close(number)


class Progress:
    """Report the progress of work that takes longer than QUIET_S."""

    def __init__(self, say: Say, what: str, total: float) -> None:
        self.say, self.what, self.total = say, what, total
        self.rows, self.passed, self.fresh = 0, 0.0, 0.0
        self.of_row = 0.0  # approximate share of a row in `total`, in its unit; 0: unknown
        self.begun = time.monotonic()
        self.next = self.begun + QUIET_S

    def sized(self, listed: Iterable[TokenizeJob]) -> Iterator[TokenizeJob]:
        """Yield the jobs; estimate the size of a row from the positions at which they begin."""
        for job in listed:
            chunk = job.chunks[-1][1]
            if chunk.first > 1 and _plain(chunk.file):
                self.of_row = chunk.start / (chunk.first - 1)
            yield job

    def done(self, rows: int, size: float = 0.0, fresh: bool = True) -> None:
        """Add `rows`, and `size` in the unit of the total; `fresh`: done now, not by an earlier run."""
        self.rows += rows
        self.passed += size
        self.fresh += size if fresh else 0.0
        if (now := time.monotonic()) < self.next:
            return
        self.next = now + EVERY_S
        text = f"{self.what}: {self.rows:,} rows, {self.rows / (now - self.begun):,.0f} a second"
        stored = self.passed - self.fresh  # by an earlier run
        if made := max(self.fresh, min(self.rows * self.of_row, self.total - stored)):
            left = (self.total - stored - made) / made * (now - self.begun)
            text += f", {(stored + made) / self.total:.0%}, {left:.0f} s left"
        self.say(text)

    def share(self, share: float, rows: int) -> None:
        """Set the share of the total, and the number of rows, done so far."""
        self.done(rows - self.rows, share * self.total - self.passed)


@contextmanager
def locked(folder: Path, say: Say) -> Iterator[None]:
    """Hold the folder's lock, exclusive on this machine, released if the process ends. Raises DataError for OSError."""
    begun, reported = time.monotonic(), False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("a") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not reported and time.monotonic() - begun > QUIET_S:
                        reported = True
                        say("waiting for another process to tokenise the same data")
                    time.sleep(POLL_S)
            yield
    except OSError as error:
        raise no_room(folder, error) from error


def cores() -> int:
    """Return the number of CPU cores that this process may use, by its affinity and its container's quota."""
    with suppress(OSError, ValueError):  # no such control group, or `max`: no limit
        quota, period = map(int, CPU_SHARE.read_text().split())
        return max(1, min(len(os.sched_getaffinity(0)), -(-quota // period)))
    return len(os.sched_getaffinity(0))


# --- Bad rows that are set aside instead of stopping the run: each is listed, and their share is limited.

EARLY_rows = 10_000  # rows read before the first check of the share, unless the data has fewer
NAMED = 3


def check_bad_share(refused: Sequence[BadRow], rows: int, most: float) -> None:
    """Raise DataError if the share of bad rows exceeds `most`."""
    if len(refused) > most * rows:
        named = "; ".join(f"{where}: {error.found}" for where, error in refused[:NAMED])
        asked = f"at most {most:.4g} of the rows bad (data.most_bad)"
        raise DataError(asked, f"{len(refused):,} of {rows:,}: {named}", "fix the file, or raise data.most_bad")


def append_bad_rows(path: Path, refused: Iterable[BadRow]) -> None:
    """Append a line of JSON per row to a file (quarantine.jsonl); safe for several processes."""
    for where, error in refused:
        line = json.dumps({"file": str(where.file), "line": where.line, "reason": error.found}, ensure_ascii=False)
        with open_to_append(path) as file:  # one call a line: the lines of two processes do not mix
            file.write(line.encode("utf-8", "backslashreplace") + b"\n")
