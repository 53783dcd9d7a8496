"""Tokenize data once, into shards on the disk, by as many processes as there are cores.

A shard is a safetensors file that is whole or absent, so after a kill the next run goes on where the last one stopped.
The folder's name is a digest of the files, the tokenizer, its template and every setting that changes ids or masks.
T, and what happens to documents longer than T, is a view on the shards and not part of it (dataset.py).

One process of a machine tokenizes, under a lock that ends with it; the others wait for the lock. No collective runs
meanwhile: a rank that tokenizes for an hour makes no other rank time out.
"""

from __future__ import annotations

import datetime
import errno
import fcntl
import hashlib
import json
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, field, replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from optrush import __version__, errors
from optrush.config import Config
from optrush.data import readers, schema
from optrush.data.chat_template import Tokens, answers
from optrush.data.readers import PARQUET, Chunk, attempts, chunks, form
from optrush.data.schema import NO_RULES, Chat, Document, Judged, Row, RowLocation, RowRules, row_rules
from optrush.errors import DataError, UserError
from optrush.files import open_to_append, sync_folder, write_whole
from optrush.objectives import learnt

# --- One shard: the documents of a piece of the data as token ids.
#
# This module writes and maps the safetensors file itself: the library's writer does not sync, and its reader copies.
# The name has the shard's place and the SHA-256 of its bytes, so a shard that was cut off or has one bit flipped is
# found by reading it once. Nothing in it depends on the paths of the data files, or on T: documents are whole.

FORMAT = 5  # part of every key: shards of another format are other shards
HERE = "\0"  # in place of the row's place in the text of an error
TEMPORARY = ".tmp-"
STALE_S = 86400.0  # the age at which a temporary file of another machine counts as abandoned

_DTYPES: dict[str, np.dtype[Any]] = {"I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "U8": np.dtype("u1")}
_ARRAYS = (  # widest elements first, so that each array is aligned
    ("starts", "I64"), ("numbers", "I64"), ("lines", "I64"), ("digests", "I64"), ("files", "I32"), ("learnt", "I32"),
    ("ids", "I32"), ("targets", "U8"), ("desirable", "U8"), ("refused", "U8"), ("keys", "U8"),
)  # fmt: skip
_FACTS = ("rows", "cleaned", "marked", "parts", "highest", "last")


class BadRow(NamedTuple):
    """A row that is no training data, and the error with the reason."""

    where: RowLocation
    error: DataError


@dataclass(frozen=True)
class Shard:
    """S samples of one document each, or of two (`parts`); arrays are in memory, or of a mapped file.

    A row's number counts the rows of the shard from 0, refused ones included, those that cleaning removed not. A row
    can have several samples (`data.split_turns`).
    """

    rows: int  # with the refused ones
    cleaned: int  # rows that cleaning removed
    marked: int  # plain texts that contain special tokens as text
    parts: int  # documents of a sample: 1, of pairs 2
    highest: int  # the highest token id
    last: int  # 1: no further shard of the same job follows
    starts: np.ndarray  # (S * parts + 1,) int64: where the documents begin in ids
    numbers: np.ndarray  # (S,) int64: of each sample's row, rising
    lines: np.ndarray  # (S,) int64: of each sample's row in its file
    digests: np.ndarray  # (S,) int64: of each sample's tokens, to find samples that are equal
    files: np.ndarray  # (S,) int32: of each sample's row, a position in the list of files
    learnt: np.ndarray  # (S,) int32: targets of each sample
    ids: np.ndarray  # (tokens,) int32
    targets: np.ndarray  # (tokens / 8,) uint8: bits
    desirable: np.ndarray  # (S,) uint8: 0 of answers that were judged to be bad
    refused: np.ndarray  # uint8: JSON, a list of [number, file, line and the three texts of the error]
    keys: np.ndarray  # uint8: JSON, how many rows have each key that is not read, or that `data.columns` names

    def __len__(self) -> int:
        return len(self.numbers)

    def lengths(self) -> np.ndarray:
        """Return the tokens of each sample, (S,) int64."""
        return np.asarray(np.diff(self.starts[:: self.parts]))

    def document(self, start: int, end: int) -> Document:
        """Return the tokens [start, end) of `ids`; the first is no target, for it has no context."""
        bits = np.unpackbits(self.targets[start // 8 : -(-end // 8)])
        targets = bits[start % 8 :][: end - start].astype(bool)
        targets[:1] = False
        sample = (int(np.searchsorted(self.starts, start, "right")) - 1) // self.parts
        return Document(np.asarray(self.ids[start:end]), targets, bool(self.desirable[sample]))

    def refusals(self, files: Sequence[Path]) -> list[tuple[int, BadRow]]:
        """Return the refused rows in order, by their number."""
        result = []
        for number, file, line, *texts in json.loads(self.refused.tobytes() or b"[]"):
            where = RowLocation(files[file], line)
            result.append((number, BadRow(where, DataError(*(text.replace(HERE, str(where)) for text in texts)))))
        return result

    def noted(self) -> dict[str, int]:
        """Return how many rows have each key that `parse_row` noted."""
        found: dict[str, int] = json.loads(self.keys.tobytes() or b"{}")
        return found

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
    """Collects samples until they are a shard."""

    rows: int = 0
    cleaned: int = 0
    marked: int = 0
    tokens: int = 0
    parts: int = 0
    keys: Counter[str] = field(default_factory=Counter)
    _ids: list[np.ndarray] = field(default_factory=list)
    _targets: list[np.ndarray] = field(default_factory=list)
    _samples: list[tuple[int, int, int, int, int]] = field(default_factory=list)  # number, line, digest, file, learnt
    _desirable: list[bool] = field(default_factory=list)
    _refused: list[list[Any]] = field(default_factory=list)

    def note(self, keys: Iterable[str]) -> None:
        """Count the keys that a row had; of many different ones the first."""
        for key in keys:
            self.keys[key if key in self.keys or len(self.keys) < MOST_KEYS else OTHER_KEYS] += 1

    def add_samples(self, where: RowLocation, file: int, made: Samples | DataError) -> None:
        """Append a row: its samples, or the error."""
        if isinstance(made, DataError):
            self.add(where, file, made)
            return
        for n, sample in enumerate(made):
            self.rows -= n > 0  # of the same row
            self.add(where, file, sample)

    def add(self, where: RowLocation, file: int, row: tuple[Document, ...] | DataError) -> None:
        """Append a row of one sample: its documents, or the error. Raises DataError if pairs and other rows meet."""
        if isinstance(row, DataError):
            texts = (text.replace(str(where), HERE) for text in (row.asked, row.found, row.do))
            self._refused.append([self.rows, file, where.line, *texts])
        else:
            if self.parts not in (0, len(row)):
                raise mixed_kinds(where)
            self.parts = len(row)
            self._ids += [document.ids for document in row]
            self._targets += [document.targets for document in row]
            targets = sum(int(np.count_nonzero(document.targets)) for document in row)
            digest = hashlib.blake2b(b"".join([document.ids.tobytes() for document in row]), digest_size=8).digest()
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
        starts = np.cumsum([0, *map(len, self._ids)], dtype=np.int64)
        keys = np.frombuffer(json.dumps(dict(sorted(self.keys.items()))).encode() if self.keys else b"", np.uint8)
        highest = int(ids.max(initial=-1))
        return Shard(
            self.rows, self.cleaned, self.marked, self.parts or 1, highest, int(last), starts, numbers, lines,
            digests, files.astype(np.int32), learnt.astype(np.int32), ids, bits,
            np.array(self._desirable, np.uint8), refused, keys,
        )  # fmt: skip


def mixed_kinds(where: object) -> DataError:
    """Return the error of data with pairs and other rows, of which different things are learnt."""
    return DataError("pairs (chosen and rejected), or rows of other kinds", f"both, at {where}", "take one kind out")


def shard_digest(shard: Shard) -> str:
    """Return the part of the shard's file name that is a digest of its bytes."""
    sha = hashlib.sha256()
    for data in shard.encoded():
        sha.update(data)
    return sha.hexdigest()[:32]


def commit_shard(shard: Shard, folder: Path, job: int, piece: int) -> Path:
    """Write the shard's file, whole or not at all, and return its path; raises OSError."""
    name = f"{job:06d}-{piece:03d}"
    path = folder / f"{name}-{shard_digest(shard)}.safetensors"
    write_whole(path, shard.encoded(), folder / f"{name}{TEMPORARY}{socket.gethostname()}-{secrets.token_hex(4)}")
    return path


def intact(path: Path) -> bool:
    """Return whether the file's bytes match the digest in its name; reads all of it."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:32] == path.stem.rsplit("-", 1)[1]
    except OSError:
        return False


def mapped(path: Path) -> Shard:
    """Return the shard in an intact file; its arrays are the file's own pages."""
    data = np.memmap(path, np.uint8, "r").view(np.ndarray)
    size = int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8 : 8 + size].tobytes())
    found: dict[str, Any] = {name: int(header["__metadata__"][name]) for name in _FACTS}
    for name, kind in _ARRAYS:
        first, end = header[name]["data_offsets"]
        found[name] = data[8 + size + first : 8 + size + end].view(_DTYPES[kind])
    return Shard(**found)


def sweep(folder: Path) -> None:
    """Remove temporary files of killed processes: all of this machine (none may be writing), others' of yesterday."""
    for path in folder.glob(f"*{TEMPORARY}*"):
        ours = path.name.split(TEMPORARY)[1].rsplit("-", 1)[0] == socket.gethostname()
        if ours or time.time() - path.stat().st_mtime > STALE_S:
            path.unlink(missing_ok=True)


# --- Rows to shards, in one process.

BATCH_rows = 512  # that the tokenizer gets at a time,
BATCH_chars = 1 << 20  # and about how much text: it needs some 100 bytes a token while it works
SHARD_tok = 4 << 20  # from which a job's shard is full: 16 MiB of ids
SHARD_rows = 1 << 17  # likewise, refused ones included: a file of empty lines must not fill the memory

# Of each file whether cleaning kept a row: row k of a chunk is at chunk.first - 1 + k. None: it kept all.
Kept = Sequence[np.ndarray] | None
# Position of the file, place, row (None: cleaning removed it), keys that `parse_row` noted.
Parsed = tuple[int, RowLocation, Row | DataError | None, Collection[str]]
Samples = Sequence[tuple[Document, ...]]  # of one row
MOST_KEYS, OTHER_KEYS = 100, "other keys"  # different keys that are counted one by one; the name of the others


@dataclass(frozen=True)
class TokenizeJob:
    """Consecutive chunks that are tokenized together, each with its file's position in the list of files."""

    number: int
    chunks: tuple[tuple[int, Chunk], ...]
    size_bytes: float = 0.0  # about how much of the files that is


def shards(
    job: TokenizeJob,
    tokens: Tokens,
    train_on: str,
    text_rows: str,
    kept: Kept = None,
    skip: int = 0,
    most: int | None = None,
    progress: Callable[[int], None] = lambda n: None,
    rules: RowRules = NO_RULES,
) -> Iterator[Shard]:
    """Yield the job's rows as shards of bounded size, the last one marked.

    The first `skip` rows are in shards already; all after `most` are left out. `progress` gets the number of new rows.
    """
    builder, batch, chars, seen = Builder(), list[Parsed](), 0, 0

    def flush() -> None:
        good = [(where, row) for _, where, row, _ in batch if row is not None and not isinstance(row, DataError)]
        made = iter(row_samples(tokens, good, train_on))
        builder.marked += sum(tokens.marked(row) for _, row in good)
        for file, where, row, keys in batch:
            if row is None:
                builder.cleaned += 1
            else:
                builder.note(keys)
                builder.add_samples(where, file, row if isinstance(row, DataError) else next(made))
        progress(len(batch))
        batch.clear()

    for entry in islice(parsed(job, text_rows, kept, rules), skip, None):
        batch.append(entry)
        row = entry[2]
        chars += 0 if row is None or isinstance(row, DataError) else len(schema.row_text(row))
        seen += row is not None
        if seen == most:
            break
        if len(batch) >= BATCH_rows or chars >= BATCH_chars:
            flush()
            chars = 0
            if builder.tokens >= SHARD_tok or builder.rows >= SHARD_rows:
                yield builder.shard(last=False)
                builder = Builder()
    flush()
    yield builder.shard(last=True)


def row_samples(tokens: Tokens, rows: Sequence[tuple[RowLocation, Row]], train_on: str) -> list[Samples | DataError]:
    """Return the samples of each row, or the error that names it: one, or with `each` one an answer that is learnt."""
    if train_on != "each":
        found = zip(rows, tokens.batch(rows, train_on), strict=True)
        return [
            made if isinstance(made, DataError) else [(d,) for d in made] if isinstance(row, Judged) else [made]
            for (_, row), made in found
        ]
    parts = [split_turns(row) for _, row in rows]
    flat = [(where, part) for (where, _), of in zip(rows, parts, strict=True) for part in of]
    made = iter(tokens.batch(flat, "last"))
    result: list[Samples | DataError] = []
    for of in parts:
        samples = [next(made) for _ in of]
        bad = next((sample for sample in samples if isinstance(sample, DataError)), None)
        result.append(bad or [sample for sample in samples if not isinstance(sample, DataError)])
    return result


def split_turns(row: Row) -> list[Row]:
    """Return a conversation up to each of its answers that are learnt; judged answers apart; any other row as it is."""
    if isinstance(row, Judged):
        return [Judged((answer,), (label,)) for answer, label in zip(row.answers, row.labels, strict=True)]
    if not isinstance(row, Chat):
        return [row]
    return [replace(row, messages=row.messages[: i + 1]) for i in answers(row, "assistant")] or [row]


def parsed(job: TokenizeJob, text_rows: str, kept: Kept, rules: RowRules = NO_RULES) -> Iterator[Parsed]:
    """Yield the job's rows with their meaning, or the error of one that has none."""
    for file, chunk in job.chunks:
        keep = None if kept is None else kept[file]
        for k, (where, row) in enumerate(attempts(chunk, text_rows), chunk.first - 1):
            if keep is not None and not keep[k]:
                yield file, where, None, ()
            elif isinstance(row, DataError):
                yield file, where, row, ()
            else:
                keys = set[str]()
                yield file, where, meaning(where, row, rules, keys), keys


def meaning(where: RowLocation, row: dict[str, Any], rules: RowRules, keys: set[str]) -> Row | DataError:
    """Return the row, or the error of one that is none; `keys` gets those that `parse_row` notes."""
    try:
        return schema.parse_row(where, row, rules, keys)
    except DataError as error:
        return error


def identity(tokens: Tokens) -> str:
    """Return the SHA-256 over all of a tokenizer that changes ids and masks; with the date if the template uses it."""
    tokenizer, source, other = tokens.tokenizer, _template(tokens) or "", _template(tokens, tools=True) or ""
    today = datetime.date.today().isoformat() if "strftime_now" in source + other else ""
    parts = [tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id, tokenizer.special_tokens_map, source, today]
    parts += [] if other == source else [other]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


def _template(tokens: Tokens, tools: bool = False) -> str | None:
    """Return the chat template, with the run's date in it; None if there is none: text does not need one."""
    with suppress(DataError):
        return tokens.template(tools)
    return None


def commit_chunk(
    job: TokenizeJob, tokens: Tokens, train_on: str, text_rows: str, kept: Kept, folder: Path, skip: int, piece: int,
    marks: Sequence[list[int]] = (), rules: RowRules = NO_RULES,
) -> tuple[list[str], int]:  # fmt: skip
    """Write the missing shards of a job; return (their names, rows). Each shard written stays.

    Raises DataError: the disk is full, or a file has changed since its mark was taken.
    """
    names, n = list[str](), 0
    for shard in shards(job, tokens, train_on, text_rows, kept, skip, rules=rules):
        for (_, chunk), mark in zip(job.chunks, marks):
            if readers.mark(chunk.file) != mark:
                raise readers.changed_meanwhile(chunk.file)
        try:
            names.append(commit_shard(shard, folder, job.number, piece + len(names)).name)
        except OSError as error:
            raise no_room(folder, error) from None
        n += shard.rows + shard.cleaned
    return names, n


def no_room(folder: Path, error: OSError) -> DataError:
    """Return the error of a folder that cannot take the shards."""
    do = "free some space there" if error.errno == errno.ENOSPC else "check the folder and its rights"
    asked = f"to keep the tokenised data in {folder}"
    return DataError(asked, str(error.strerror), f"{do}, or name another: data.cache")


# --- A worker: a fresh interpreter that turns chunks of files into shards.
#
# Standard input brings its jobs, a line of JSON each, and standard output takes an answer a line. So it inherits no
# GPU, no process group and no lock, needs no pickle, and does not run the caller's main module again. It never imports
# torch, which would take more memory than its work, and transformers only for the templates of conversations.


def save_kept(path: Path, kept: Sequence[np.ndarray]) -> None:
    """Write which rows cleaning kept, by file."""
    with path.open("wb") as file:
        np.savez_compressed(file, *kept)


def load_kept(path: Path) -> list[np.ndarray]:
    """Return what `save_kept` wrote."""
    with np.load(path) as arrays:
        return [arrays[f"arr_{i}"] for i in range(len(arrays.files))]


def worker_main() -> None:
    """Run a worker: the first line has instructions, each further one a job; it ends with its input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process decides
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)  # the parent is gone: what is half done stays undone

    threading.Thread(target=listen, daemon=True).start()
    try:
        work = _begin(json.loads(lines.get()))
        while True:
            try:
                answer = work(json.loads(lines.get()))
            except UserError as error:
                answer = {"error": [type(error).__name__, error.asked, error.found, error.do]}
            out.write(json.dumps(answer) + "\n")
            out.flush()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # at once: the interpreter would wait for the thread that listens


class _Tokenizer:
    """The part of a transformers tokenizer that `Tokens` uses, from a worker's instructions."""

    is_fast = True

    def __init__(self, given: dict[str, Any]) -> None:
        from tokenizers import Tokenizer

        self.name_or_path, self.eos_token_id = given["tokenizer"], given["eos"]
        self.special_tokens_map, self._templates = given["special"], given["templates"]
        self.backend_tokenizer = Tokenizer.from_file(given["tokenizer"])
        self.added_tokens_decoder = self.backend_tokenizer.get_added_tokens_decoder()

    def get_chat_template(self, given: str | None, tools: list[Any] | None = None) -> str:
        template = self._templates[tools is not None]
        if template is None:
            raise ValueError("no template")
        return str(template)

    def convert_ids_to_tokens(self, i: int) -> str | None:
        return self.backend_tokenizer.id_to_token(i)


def _begin(given: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Open the tokenizer; return a function that does a job."""
    tokens = Tokens(cast(Any, _Tokenizer(given)))
    folder, kept = Path(given["folder"]), None if given["kept"] is None else load_kept(Path(given["kept"]))
    objective, columns, roles = given["rules"]
    rules = RowRules(objective, tuple(map(tuple, columns)), tuple(map(tuple, roles)))

    def work(task: dict[str, Any]) -> dict[str, Any]:
        chunks = tuple((file, Chunk(Path(path), *rest)) for file, path, *rest in task["chunks"])
        how = given["train_on"], given["text_rows"], kept, folder, task["skip"], task["piece"], task["marks"]
        names, n = commit_chunk(TokenizeJob(task["number"], chunks), tokens, *how, rules)
        return {"names": names, "rows": n}

    return work


def _instructions(work: TokenizeWork, folder: Path) -> dict[str, Any]:
    """Return a worker's first line; large parts of it are files in the folder, under the shards' lock."""
    tokenizer, engine, rows = work.tokens.tokenizer, folder / "tokenizer.json", folder / "kept.npz"
    engine.write_text(tokenizer.backend_tokenizer.to_str(), "utf-8")
    if work.kept is not None:
        save_kept(rows, work.kept)
    return {
        "tokenizer": str(engine), "eos": tokenizer.eos_token_id, "special": tokenizer.special_tokens_map,
        "templates": [_template(work.tokens, tools) for tools in (False, True)], "kept": work.kept and str(rows),
        "train_on": learnt(work.config), "text_rows": work.config.data.text_rows, "folder": str(folder),
        "rules": astuple(row_rules(work.config)),
    }  # fmt: skip


# --- All shards of some data.

CHUNK_bytes = 16 << 20  # of a job; data smaller than this stays in memory
PACKED = 4  # times its bytes is the text of a compressed file, about
AHEAD = 2  # jobs that wait for each worker, so that it never waits
QUIET_S, EVERY_S = 2.0, 5.0  # work shorter than the first is not reported; seconds between two reports
POLL_S = 0.2
# The interpreter of a worker must not find torch: importing it takes longer and more memory than tokenizing.
WORKER = (
    "import sys; sys.modules['torch'] = None; sys.argv[1] in sys.path or sys.path.insert(0, sys.argv[1]); "
    "from optrush.data.tokenize import worker_main; worker_main()"
)
# One thread each. In a pool of one the tokenizer is a third faster than without a pool (measured, tokenizers 0.23).
ALONE = {
    "TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1",
    "TRANSFORMERS_VERBOSITY": "error", "CUDA_VISIBLE_DEVICES": "",
}  # fmt: skip

Say = Callable[[str], None]


def silent(_: str) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class TokenizeWork:
    """What is tokenized, and how."""

    config: Config
    tokens: Tokens
    files: tuple[Path, ...]
    kept: Kept = None  # by file
    cleaning: str = ""  # names `kept`: a digest
    say: Say = silent

    @property
    def folder(self) -> Path:
        """The folder of its shards."""
        key = {
            "format": FORMAT, "files": readers.files_fingerprint(self.files, cache_root(self.config.data.cache)),
            "tokens": identity(self.tokens), "train_on": learnt(self.config), "text_rows": self.config.data.text_rows,
            "cleaning": self.cleaning, "rules": astuple(row_rules(self.config)),
            "made_by": [__version__, *map(version, ("tokenizers", "transformers", "jinja2"))],
        }  # fmt: skip
        return cache_root(self.config.data.cache) / "tokens" / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]


def cache_root(cache: str | None) -> Path:
    """Return the folder for what is made of data: the one given, `$OPTRUSH_CACHE`, or one in the user's cache."""
    if cache is not None or "OPTRUSH_CACHE" in os.environ:
        return Path(cache or os.environ["OPTRUSH_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "optrush"


def tokenized(work: TokenizeWork, most: int | None = None) -> Generator[Path | Shard]:
    """Yield the shards of the data in order, each as soon as it exists; close the iterator to stop.

    Of small data no more than `most` rows are tokenized. Raises DataError: a file that cannot be read or written.
    """
    progress = Progress(work.say, "tokenising", sum(path.stat().st_size for path in work.files))
    if small(work.files):
        how = learnt(work.config), work.config.data.text_rows, work.kept
        for job in jobs(work.files, work.config.data.text_rows):
            yield from shards(job, work.tokens, *how, most=most, progress=progress.done, rules=row_rules(work.config))
        return
    marks = [readers.mark(path) for path in work.files]
    folder = work.folder
    store = ShardStore(folder)
    number = yield from store.ready(0)
    if number == store.jobs:
        return
    with locked(folder, work.say):
        sweep(folder)
        store.refresh()  # another process may have worked meanwhile
        number = yield from store.ready(number)
        if number != store.jobs:
            for paths in _remaining(work, store, progress, number, marks):
                yield from paths


def small(paths: Sequence[Path]) -> bool:
    """Return whether the data fits into one chunk, and so into memory."""
    return sum(path.stat().st_size * (1 if _plain(path) else PACKED) for path in paths) < CHUNK_bytes


def _plain(path: Path) -> bool:
    suffix, packing = form(path) or ("", "")
    return not packing and suffix != PARQUET


class ShardStore:
    """The shards in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sound: set[Path] = set()  # read and found intact
        self.refresh()

    def refresh(self) -> None:
        """List the folder again. A damaged shard counts as missing; made again it gets the same name."""
        paths = sorted(self.folder.glob("*.safetensors"))
        fresh = [path for path in paths if path not in self._sound]
        with ThreadPoolExecutor(cores()) as pool:  # hashing releases Python's lock
            self._sound |= {path for path, ok in zip(fresh, pool.map(intact, fresh)) if ok}
        self.jobs = next((int(path.name.split("-")[1]) for path in self.folder.glob("complete-*")), None)
        self.begun: dict[int, list[Path]] = {}  # the shards of each job from its first on, without a gap
        for path in paths:
            job, piece = map(int, path.name.split("-")[:2])
            if path in self._sound and piece == len(self.begun.setdefault(job, [])):
                self.begun[job].append(path)
        self.whole = {job: pieces for job, pieces in self.begun.items() if pieces and mapped(pieces[-1]).last}

    def ready(self, number: int) -> Generator[Path, None, int]:
        """Yield the shards of the jobs from `number` on; return the first job of which some are missing."""
        while number in self.whole:
            yield from self.whole[number]
            number += 1
        return number

    def close(self, jobs: int) -> None:
        """Record that there are no more jobs than these."""
        sync_folder(self.folder)
        (self.folder / f"complete-{jobs}").touch()
        sync_folder(self.folder)


def jobs(paths: Sequence[Path], text_rows: str) -> Iterator[TokenizeJob]:
    """Yield the data in jobs of about CHUNK_bytes, from the files alone: a part of one, or several small ones."""
    number, members, size = 0, list[tuple[int, Chunk]](), 0.0
    whole: float
    for file, path in enumerate(paths):
        whole, parts = path.stat().st_size, chunks(path, CHUNK_bytes, text_rows)
        if path.suffix.lower() == PARQUET:  # its parts are row groups: cheap to list, and not counted in bytes
            listed = list(parts)
            whole, parts = whole / len(listed), iter(listed)
        for chunk in parts:
            part = chunk.end - chunk.start if _plain(path) and chunk.end is not None else whole
            if members and size + part > CHUNK_bytes:
                yield TokenizeJob(number, tuple(members), size)
                number, members, size = number + 1, [], 0.0
            members.append((file, chunk))
            size += part
    if members:
        yield TokenizeJob(number, tuple(members), size)


def _remaining(
    work: TokenizeWork, store: ShardStore, progress: Progress, first: int, marks: Sequence[list[int]]
) -> Iterator[list[Path]]:
    """Yield the shards of each job from `first` on, in order; workers make the missing ones.

    The marks are those of the files before their contents were hashed: a changed one belongs to another folder.
    """
    waiting: deque[tuple[TokenizeJob, Future[tuple[list[Path], int]] | None]] = deque()
    most = work.config.data.workers or cores()
    todo, number = jobs(work.files, work.config.data.text_rows), 0
    with Workers(work, store, min(most, 1 + int(progress.total) // CHUNK_bytes), marks) as workers:
        while True:
            while len(waiting) < AHEAD * most and (job := next(todo, None)) is not None:
                number += 1
                if job.number >= first:
                    waiting.append((job, None if job.number in store.whole else workers.start(job)))
            if not waiting:
                break
            job, future = waiting.popleft()
            paths, rows = (store.whole[job.number], 0) if future is None else future.result()
            progress.done(rows, job.size_bytes, fresh=future is not None)
            yield paths
    store.close(number)


class Workers:
    """Worker processes, each of which does one job after another."""

    def __init__(self, work: TokenizeWork, store: ShardStore, count: int, marks: Sequence[list[int]]) -> None:
        self.store = store
        self._marks = marks
        self._given = _instructions(work, store.folder)
        self._count = count
        self._pool = ThreadPoolExecutor(count)  # a thread waits for each
        self._processes: list[subprocess.Popen[str]] = []
        self._idle: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()

    def __enter__(self) -> Workers:
        command = [sys.executable, "-P", "-c", WORKER, str(Path(errors.__file__).parents[1])]
        for _ in range(self._count):
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **ALONE}, encoding="utf-8"
            )
            self._processes.append(process)
            self._idle.put(process)
            _send(process, self._given)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        self._pool.shutdown(cancel_futures=True)
        for process in self._processes:
            process.communicate()
        sweep(self.store.folder)  # their unfinished files

    def start(self, job: TokenizeJob) -> Future[tuple[list[Path], int]]:
        """Make the missing shards of a job: the paths of all its shards, and the rows that were read for it."""
        return self._pool.submit(self._make, job)

    def _make(self, job: TokenizeJob) -> tuple[list[Path], int]:
        there = self.store.begun.get(job.number, [])
        skip = sum(shard.rows + shard.cleaned for shard in map(mapped, there))
        chunks = [(file, str(chunk.file), chunk.first, chunk.start, chunk.end) for file, chunk in job.chunks]
        marks = [self._marks[file] for file, _ in job.chunks]
        process = self._idle.get()
        _send(process, {"number": job.number, "chunks": chunks, "skip": skip, "piece": len(there), "marks": marks})
        assert process.stdout is not None
        line = process.stdout.readline()
        self._idle.put(process)  # a dead one too: the next job on it fails, and no job waits for ever
        if not line:
            code, first = process.wait(), job.chunks[0][1]
            by = f"was killed by signal {-code}" if code < 0 else f"ended with code {code} (what it said stands above)"
            hint = " (out of memory?)" if code == -signal.SIGKILL else ""
            do = "start again: what is done is kept; `data.workers: 1` needs the least memory"
            asked = f"to tokenise {first.file} from row {first.first} on"
            raise DataError(asked, f"the process that did it {by}{hint}", do)
        answer = json.loads(line)
        if "error" in answer:
            kind, *texts = answer["error"]
            raise getattr(errors, kind)(*texts)
        return [*there, *(self.store.folder / name for name in answer["names"])], answer["rows"]


def _send(process: subprocess.Popen[str], what: dict[str, Any]) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # a dead process is noticed when its answer is read
        process.stdin.write(json.dumps(what) + "\n")
        process.stdin.flush()


class Progress:
    """Reports the progress of some work, unless it is over soon."""

    def __init__(self, say: Say, what: str, total: float) -> None:
        self.say, self.what, self.total = say, what, total
        self.rows, self.passed, self.fresh = 0, 0.0, 0.0
        self.begun = self.last = time.monotonic()

    def done(self, rows: int, size: float = 0.0, fresh: bool = True) -> None:
        """Count so many rows more, and so much of the total; `fresh`: it took time."""
        self.rows += rows
        self.passed += size
        self.fresh += size if fresh else 0.0
        now = time.monotonic()
        if now - self.begun < QUIET_S or now - self.last < EVERY_S:
            return
        self.last = now
        text = f"{self.what}: {self.rows:,} rows, {self.rows / (now - self.begun):,.0f} a second"
        if self.fresh:
            left = (self.total - self.passed) / self.fresh * (now - self.begun)
            text += f", {self.passed / self.total:.0%}, {left:.0f} s left"
        self.say(text)

    def share(self, share: float, rows: int) -> None:
        """Set the share of the whole work, and the rows, done until now."""
        self.done(rows - self.rows, share * self.total - self.passed)


@contextmanager
def locked(folder: Path, say: Say) -> Iterator[None]:
    """Hold the folder's lock, exclusive on this machine; it ends with this process. Raises DataError for OSError."""
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
                        say("waiting for another process that tokenises the same data")
                    time.sleep(POLL_S)
            yield
    except OSError as error:
        raise no_room(folder, error) from error


def cores() -> int:
    """Return the processor cores that this process may use."""
    return len(os.sched_getaffinity(0))


# --- Bad rows that are set aside instead of stopping the run: each is named, and never more than the run allows.

EARLY_rows = 10_000  # read before the share is checked for the first time, unless the data has fewer
NAMED = 3


def check_bad_share(refused: Sequence[BadRow], rows: int, most: float) -> None:
    """Raise DataError if more than the share `most` of so many rows are bad."""
    if len(refused) > most * rows:
        named = "; ".join(f"{where}: {error.found}" for where, error in refused[:NAMED])
        asked = f"at most {most:.4g} of the rows bad (data.most_bad)"
        raise DataError(asked, f"{len(refused):,} of {rows:,}: {named}", "mend the file, or raise data.most_bad")


def append_bad_rows(path: Path, refused: Iterable[BadRow]) -> None:
    """Append a line of JSON a row to a file (quarantine.jsonl); several processes may."""
    for where, error in refused:
        line = json.dumps({"file": str(where.file), "line": where.line, "reason": error.found}, ensure_ascii=False)
        with open_to_append(path) as file:  # one call a line: the lines of two processes do not mix
            file.write(line.encode("utf-8", "backslashreplace") + b"\n")
