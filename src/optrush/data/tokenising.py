"""Rows to shards: what one process does, be it the one that trains or a worker of its own (worker.py)."""

from __future__ import annotations

import datetime
import errno
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from optrush.data import files, rows, shard
from optrush.data.read import Chunk, attempts
from optrush.data.rows import Row, Where
from optrush.errors import DataError

if TYPE_CHECKING:
    from optrush.data.chat import Tokens

BATCH_rows = 512  # that the tokenizer gets at a time,
BATCH_chars = 1 << 20  # and about how much text: it keeps some 100 bytes a token while it works
SHARD_tok = 4 << 20  # from which a job's shard is full: 16 MiB of ids
SHARD_rows = 1 << 17  # likewise, refused ones included: a file of empty lines must not fill the memory

# Of each file whether cleaning kept a row: row k of a chunk stands at chunk.first - 1 + k. None: it kept all.
Kept = Sequence[np.ndarray] | None


@dataclass(frozen=True)
class Job:
    """Consecutive chunks that are tokenised together, each with its file's position in the list of files."""

    number: int
    chunks: tuple[tuple[int, Chunk], ...]
    size_bytes: float = 0.0  # about how much of the files that is
    marks: tuple[list[int], ...] = ()  # of each chunk's file when it was hashed (files.mark)


Found = tuple[int, Where, Row | DataError | None]  # position of the file, place, row; None: cleaning took it out


def shards(
    job: Job,
    tokens: Tokens,
    train_on: str,
    text_rows: str,
    kept: Kept = None,
    skip: int = 0,
    most: int | None = None,
    told: Callable[[int], None] = lambda n: None,
) -> Iterator[shard.Shard]:
    """The job's rows as shards of bounded size, the last one marked.

    Args:
        skip: rows at the beginning that lie in shards already.
        most: rows after which the rest is left out.
        told: called with the number of rows done since it was last called.
    """
    builder, batch, chars, seen = shard.Builder(), list[Found](), 0, 0

    def flush() -> None:
        good = [(where, found) for _, where, found in batch if found is not None and not isinstance(found, DataError)]
        made = iter(tokens.batch(good, train_on))
        builder.marked += sum(tokens.marked(row) for _, row in good)
        for file, where, found in batch:
            if found is None:
                builder.cleaned += 1
            else:
                builder.add(where, file, found if isinstance(found, DataError) else next(made))
        told(len(batch))
        batch.clear()

    for entry in islice(parsed(job, text_rows, kept), skip, None):
        batch.append(entry)
        row = entry[2]
        chars += 0 if row is None or isinstance(row, DataError) else len(rows.text(row))
        seen += row is not None
        if seen == most:
            break
        if len(batch) >= BATCH_rows or chars >= BATCH_chars:
            flush()
            chars = 0
            if builder.tokens >= SHARD_tok or builder.rows >= SHARD_rows:
                yield builder.shard(last=False)
                builder = shard.Builder()
    flush()
    yield builder.shard(last=True)


def parsed(job: Job, text_rows: str, kept: Kept) -> Iterator[Found]:
    """The job's rows with their meaning, or why they have none."""
    for file, chunk in job.chunks:
        keep = None if kept is None else kept[file]
        for k, (where, found) in enumerate(attempts(chunk, text_rows), chunk.first - 1):
            if keep is not None and not keep[k]:
                yield file, where, None
            elif isinstance(found, DataError):
                yield file, where, found
            else:
                yield file, where, meaning(where, found)


def meaning(where: Where, found: dict[str, Any]) -> Row | DataError:
    """The row, or the error that says why it is none."""
    try:
        return rows.parse(where, found)
    except DataError as error:
        return error


def identity(tokens: Tokens) -> str:
    """SHA-256 over all of a tokenizer that decides about ids and masks; the date where the template asks for it."""
    tokenizer, source = tokens.tokenizer, template(tokens) or ""
    today = datetime.date.today().isoformat() if "strftime_now" in source else ""
    said = [tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id, tokenizer.special_tokens_map, source, today]
    return hashlib.sha256(json.dumps(said, default=str).encode()).hexdigest()


def template(tokens: Tokens) -> str | None:
    """The chat template, with the date in it where the run has one; None where there is none: text needs none."""
    try:
        return tokens.template()
    except DataError:
        return None


def no_room(folder: Path, error: OSError) -> DataError:
    """What a disk that does not take the shards becomes."""
    do = "free some space there" if error.errno == errno.ENOSPC else "check the folder and its rights"
    asked = f"to keep the tokenised data in {folder}"
    return DataError(asked, str(error.strerror), f"{do}, or name another: data.cache")


def commit(
    job: Job, tokens: Tokens, train_on: str, text_rows: str, kept: Kept, folder: Path, skip: int, piece: int
) -> tuple[list[str], int]:
    """Writes what is missing of a job's shards; (their names, rows). What is written stays, whatever happens next.

    Raises:
        DataError: a file is not what it was when the folder got its name; no shard of it is written then.
    """
    names, n = list[str](), 0
    for made in shards(job, tokens, train_on, text_rows, kept, skip):
        for (_, chunk), mark in zip(job.chunks, job.marks):
            if files.mark(chunk.file) != mark:
                raise files.changed(chunk.file)
        try:
            names.append(shard.commit(made, folder, job.number, piece + len(names)).name)
        except OSError as error:
            raise no_room(folder, error) from None
        n += made.rows + made.cleaned
    return names, n
