"""Samples by number: views on tokenized shards, rows that are tokenized when they are read, random tokens.

A sample is a document or a piece of one, or the two documents of a pair. A tokenized sample takes 32 bytes of memory:
where its tokens begin, how many they are, how many are learnt, and its row. The tokens stay whole in the mapped files
and are cut to T when they are read. Streamed samples (`data.stream`) are the same without shards: an index of 8 bytes
a row finds the row, and `read` tokenizes it.
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from optrush.data import readers
from optrush.data.readers import PARQUET, TEXT, Chunk, attempts, chunks, form
from optrush.data.schema import Document, Row, RowLocation
from optrush.data.tokenize import (
    BadRow,
    BATCH_rows,
    Builder,
    Shard,
    SHARD_tok,
    TokenizeWork,
    cache_root,
    identity,
    mapped,
    meaning,
    mixed_kinds,
    shard_digest,
    silent,
)
from optrush.errors import ConfigError, DataError
from optrush.objectives import learnt

TOO_LONG = ("error", "split", "drop", "truncate")
OPEN = 128  # mapped shards at a time: each holds a file descriptor

Sample = tuple[int, tuple[Document, ...]]  # its number, its documents


class SampleChunk(NamedTuple):
    """The samples of some numbers, in their order; a streamed row has one, several or none."""

    samples: list[Sample]
    rows: int  # that were read
    refused: Sequence[BadRow] = ()


class SampleSource(Protocol):
    """Samples by number; each is a document, or the two of a pair, of at most T tokens where they were cut."""

    @property
    def tokenized(self) -> bool:
        """Whether all samples are tokenized. If not, only `read` returns documents, and numbers count rows."""

    @property
    def parts(self) -> int:
        """Documents of a sample: 1, of pairs 2."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def spans(self) -> tuple[tuple[int, float], ...]:
        """(samples, weight) of each origin, one after the other."""

    def __len__(self) -> int: ...

    def lengths(self) -> np.ndarray:
        """Return the tokens of each sample, its documents together, (N,) int64."""

    def targets(self) -> np.ndarray:
        """Return how many of them are learnt, (N,) int64."""

    def documents(self, i: int) -> tuple[Document, ...]: ...

    def read(self, numbers: Sequence[int]) -> SampleChunk:
        """Return the samples of these numbers."""


@dataclass
class Counts:
    """What reading did. Nothing leaves the data without being counted here."""

    rows: int = 0  # rows read; without those that cleaning removed
    refused: int = 0  # bad rows that were set aside
    cleaned: int = 0  # rows that cleaning removed
    marked: int = 0  # plain texts that contain special tokens as text, of all rows that were tokenized
    too_long: int = 0  # rows longer than T, whatever was done with them
    truncated: int = 0  # rows that lost their end
    dropped: int = 0  # documents, or pieces of one, that were left out
    targets_lost: int = 0  # target tokens of the rows that are not in the dataset
    documents: int = 0
    tokens: int = 0
    targets: int = 0


# --- tokenized


@dataclass
class TokenShards:
    """The shards of some data, one after another; a row's number counts through all of them."""

    files: Sequence[Path]
    made: list[Path | Shard] = field(default_factory=list)
    rows_before: list[int] = field(default_factory=lambda: [0])
    tokens_before: list[int] = field(default_factory=lambda: [0])
    parts: int = 1
    cleaned: int = 0
    marked: int = 0
    refused: list[tuple[int, BadRow]] = field(default_factory=list)
    total: int = 0  # rows of the data: all in the shards, or the first so many
    names: list[str] = field(default_factory=list)
    _open: dict[int, Shard] = field(default_factory=dict)

    def add(self, made: Path | Shard, most: int | None) -> tuple[Shard, list[tuple[int, BadRow]]]:
        """Append the next shard, of which the data ends with row `most`; return it and its refused rows by number."""
        shard = mapped(made) if isinstance(made, Path) else made
        before = self.rows_before[-1]
        if len(shard):
            if self.tokens_before[-1] and shard.parts != self.parts:
                raise mixed_kinds(RowLocation(self.files[shard.files[0]], int(shard.lines[0])))
            self.parts = shard.parts
        self.made.append(made)
        self.names.append(made.stem.rsplit("-", 1)[1] if isinstance(made, Path) else shard_digest(shard))
        self.rows_before.append(before + shard.rows)
        self.tokens_before.append(self.tokens_before[-1] + len(shard.ids))
        self.total = self.rows_before[-1] if most is None else min(most, self.rows_before[-1])
        self.cleaned += shard.cleaned
        self.marked += shard.marked
        refused = [(before + n, row) for n, row in shard.refusals(self.files) if before + n < self.total]
        self.refused += refused
        return shard, refused

    def shard(self, k: int) -> Shard:
        """Return shard k; of mapped ones the last few stay open."""
        made = self.made[k]
        if isinstance(made, Shard):
            return made
        if k not in self._open:
            if len(self._open) >= OPEN:
                del self._open[next(iter(self._open))]
            self._open[k] = mapped(made)
        return self._open[k]

    def where(self, row: int) -> RowLocation:
        """Return the place of a row that has a sample."""
        k = bisect_right(self.rows_before, row) - 1
        shard = self.shard(k)
        at = int(np.searchsorted(shard.numbers, row - self.rows_before[k]))
        return RowLocation(self.files[shard.files[at]], int(shard.lines[at]))


@dataclass(frozen=True)
class Dataset:
    """The samples of a view on shards; sample i comes from the row of number `row[i]`."""

    shelf: TokenShards
    at: np.ndarray  # (N,) int64: of the first token, counted through all shards
    length: np.ndarray  # (N,) int64
    learnt: np.ndarray  # (N,) int64
    row: np.ndarray  # (N,) int64
    first: np.ndarray | None  # (N,) int64: tokens of a pair's first document
    counts: Counts
    fingerprint: str
    spans: tuple[tuple[int, float], ...]
    tokenized = True

    @property
    def parts(self) -> int:
        return self.shelf.parts

    def __len__(self) -> int:
        return len(self.at)

    def lengths(self) -> np.ndarray:
        return self.length

    def targets(self) -> np.ndarray:
        return self.learnt

    def documents(self, i: int) -> tuple[Document, ...]:
        at = int(self.at[i])
        k = bisect_right(self.shelf.tokens_before, at) - 1
        shard, start = self.shelf.shard(k), at - self.shelf.tokens_before[k]
        end = start + int(self.length[i])
        if self.first is None:
            return (shard.document(start, end),)
        middle = start + int(self.first[i])
        return shard.document(start, middle), shard.document(middle, end)

    def read(self, numbers: Sequence[int]) -> SampleChunk:
        return SampleChunk([(n, self.documents(n)) for n in numbers], len(numbers))

    def where(self, i: int) -> RowLocation:
        """Return the place of the row that sample i comes from."""
        return self.shelf.where(int(self.row[i]))


def view(
    shelf: TokenShards,
    *,
    T: int | None,
    how: str,
    keep: np.ndarray | None = None,
    named: str = "all",
    origins: Sequence[tuple[int, float]] = (),
) -> Dataset:
    """Return the samples of some rows, of at most T tokens each.

    Args:
        T: None leaves them as they are.
        how: what is done with longer ones: `error` raises, `split` cuts, `drop` leaves out, `truncate` keeps the start.
        keep: (rows,) bool; None: all.
        named: which rows those are, for the fingerprint.
        origins: (files, weight) of each, one after the other; none: all files are one.

    Raises:
        DataError: a row is too long, or nothing is left.
    """
    assert how in TOO_LONG and (T is None or T > 1), (how, T)
    weights = [weight for _, weight in origins] or [1.0]
    origin_of = np.repeat(np.arange(len(weights)), [n for n, _ in origins] or [len(shelf.files)])
    counts = Counts(rows=shelf.total if keep is None else int(keep.sum()))
    counts.refused = sum(keep is None or bool(keep[number]) for number, _ in shelf.refused)
    columns = 5 if shelf.parts > 1 else 4  # where, tokens, targets, row, tokens of a pair's first document
    parts, sizes = [np.zeros((columns, 0), np.int64)], np.zeros(len(weights), np.int64)
    for k in range(len(shelf.made)):
        shard = shelf.shard(k)
        rows = shard.numbers + shelf.rows_before[k]
        chosen = np.flatnonzero(rows < shelf.total)
        if keep is not None:
            chosen = chosen[keep[rows[chosen]]]
        sample, pieces = _pieces(shard, chosen, T, how, shelf.files, counts)
        pieces[0] += shelf.tokens_before[k]
        parts.append(np.vstack([pieces[:3], rows[sample], pieces[3]])[:columns])
        sizes += np.bincount(origin_of[shard.files[sample]], minlength=len(weights))
    at, length, targets, row, *first = np.concatenate(parts, axis=1)
    counts.documents, counts.tokens, counts.targets = len(at) * shelf.parts, int(length.sum()), int(targets.sum())
    if not len(at):
        raise DataError(
            f"training data from {', '.join(map(str, shelf.files[:3]))}",
            f"nothing is left of {counts.rows} rows: {counts.too_long} were longer than {T} tokens",
            "raise batch.seq, or choose data.too_long: split",
        )
    spans = tuple((int(n), weight) for n, weight in zip(sizes, weights, strict=True) if n)
    few, weighed = shelf.total < shelf.rows_before[-1], any(weight != 1 for weight in weights)
    identity = [*shelf.names, named, few and shelf.total, counts.too_long and (T, how), weighed and spans]
    fingerprint = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    return Dataset(shelf, at, length, targets, row, first[0] if first else None, counts, fingerprint, spans)


def _pieces(
    shard: Shard, chosen: np.ndarray, T: int | None, how: str, files: Sequence[Path], counts: Counts
) -> tuple[np.ndarray, np.ndarray]:
    """Return ((N,) the sample of each piece, (4, N) int64: where it begins, its tokens, targets, first part)."""
    starts, parts = shard.starts, shard.parts
    first = starts[1::parts] - starts[:-1:parts]
    whole = np.vstack([starts[:-1:parts], shard.lengths(), shard.learnt, first])[:, chosen].astype(np.int64)
    if T is None or not (whole[1] > T).any():
        return chosen, whole
    long = np.flatnonzero(whole[1] > T)
    if how == "error" or (parts > 1 and how != "drop"):
        i = chosen[long[0]]
        where = RowLocation(files[shard.files[i]], int(shard.lines[i]))
        raise overlong(where, int(whole[1, long[0]]), T, pair=parts > 1)
    cut = [_cuts(shard.document(at, at + n).targets, T, how, counts) for at, n in whole[:2, long].T.tolist()]
    times = np.ones(len(chosen), np.int64)
    times[long] = [piece.shape[1] for piece in cut]
    sample = np.repeat(np.arange(len(chosen)), times)
    pieces, of_long = whole[:, sample], whole[1, sample] > T
    fresh = np.concatenate(cut, axis=1)
    pieces[0, of_long] += fresh[0]
    pieces[1:3, of_long] = fresh[1:]
    return chosen[sample], pieces


def _cuts(targets: np.ndarray, T: int, how: str, counts: Counts) -> np.ndarray:
    """Return beginning, tokens and targets of the pieces of a document longer than T, (3, P) int64; adds to `counts`.

    A piece begins without its context, so its first token is no target; a piece without targets is left out.
    """
    counts.too_long += 1
    all_targets, targets = int(targets.sum()), targets[: {"split": None, "truncate": T, "drop": 0}[how]]
    begin = np.arange(0, len(targets), T)
    learnt = np.add.reduceat(targets, begin, dtype=np.int64) - targets[begin] if len(begin) else begin
    keep = learnt > 0
    counts.dropped += int((~keep).sum()) if how != "drop" else 1
    counts.truncated += how == "truncate" and bool(keep.any())
    counts.targets_lost += all_targets - int(learnt.sum())
    return np.vstack([begin, np.minimum(T, len(targets) - begin), learnt])[:, keep]


def fit_row(
    documents: tuple[Document, ...], T: int, how: str, where: RowLocation, counts: Counts
) -> list[tuple[Document, ...]]:
    """Return one row's documents as samples of at most T tokens, as `view` makes them. Raises DataError: they are
    longer, and `how` is `error`; or they are a pair, and to be cut.
    """
    assert how in TOO_LONG and T > 1, (how, T)
    n = sum(map(len, documents))
    if n <= T:
        return [documents]
    if how == "error" or (len(documents) > 1 and how != "drop"):
        raise overlong(where, n, T, pair=len(documents) > 1)
    if len(documents) > 1:
        counts.too_long, counts.dropped = counts.too_long + 1, counts.dropped + 1
        counts.targets_lost += sum(int(document.targets.sum()) for document in documents)
        return []
    (document,) = documents
    pieces: list[tuple[Document, ...]] = []
    for at, tokens, _ in _cuts(document.targets, T, how, counts).T.tolist():
        targets = document.targets[at : at + tokens].copy()
        targets[0] = False  # without its context
        pieces.append((Document(document.ids[at : at + tokens], targets),))
    return pieces


def overlong(where: RowLocation, n: int, T: int, *, pair: bool) -> DataError:
    """Return the error of a row that is longer than T and must not be."""
    what, ways = ("pairs", "drop") if pair else ("documents", "split, drop or truncate")
    return DataError(
        f"{what} of at most {T} tokens (batch.seq)",
        f"{n} tokens at {where}",
        f"raise batch.seq, or choose data.too_long: {ways}",
    )


def held_rows(rows: int, fraction: float, seed: int) -> np.ndarray:
    """Return which rows are held out, (rows,) bool: the same for the same rows and seed, whatever they contain."""
    n = round(fraction * rows)
    if not 0 < n < rows:
        raise DataError(
            f"{fraction} of the data for evaluation (data.eval)",
            f"{rows} rows, of which that is {n}",
            "change the fraction so that both parts get a row, or name a file of its own",
        )
    held = np.zeros(rows, bool)
    held[permutation(rows, seed, 0)[:n]] = True
    return held


def permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """Return an order of n things from (seed, epoch) alone, the same on any machine and with any version of numpy."""
    raw = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(n)
    return np.argsort(raw, kind="stable")


@dataclass(frozen=True)
class Random:
    """n documents of exactly T random tokens, made when they are read, each from (seed, its number) alone."""

    n: int
    T: int
    vocab: int
    seed: int
    parts = 1
    tokenized = True

    def __len__(self) -> int:
        return self.n

    def lengths(self) -> np.ndarray:
        return np.full(self.n, self.T, np.int64)

    def targets(self) -> np.ndarray:
        return np.full(self.n, self.T - 1, np.int64)

    def documents(self, i: int) -> tuple[Document, ...]:
        assert 0 <= i < self.n
        # Raw words: numpy keeps those the same between its versions, but not what `integers` makes of them.
        raw = np.random.PCG64(np.random.SeedSequence([self.seed, i])).random_raw(self.T)
        ids = ((raw >> np.uint64(32)) * np.uint64(self.vocab)) >> np.uint64(32)
        targets = np.ones(self.T, bool)
        targets[0] = False
        return (Document(ids.astype(np.int32), targets),)

    def read(self, numbers: Sequence[int]) -> SampleChunk:
        return SampleChunk([(n, self.documents(n)) for n in numbers], len(numbers))

    @property
    def spans(self) -> tuple[tuple[int, float], ...]:
        return ((self.n, 1.0),)

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(repr((self.n, self.T, self.vocab, self.seed)).encode()).hexdigest()


# --- streamed
#
# One pass over the files notes where each row begins; from then on any process with a copy of the index reads any row
# alone. Rows are numbered as in the shards, so the same ones are held out.


BLOCK_bytes = 1 << 22


@dataclass(frozen=True)
class Index:
    """Where the lines of a file begin, or the row groups of a Parquet file, and which lines are rows."""

    path: Path
    starts: np.ndarray  # int64: bytes of each line, or the row that each group begins with; the end last
    groups: bool
    chosen: np.ndarray | None  # (rows,) int64: positions of the rows among all lines, rising; None: all are rows

    def __len__(self) -> int:
        if self.chosen is not None:
            return len(self.chosen)
        return int(self.starts[-1]) if self.groups else len(self.starts) - 1

    def read(self, numbers: Iterable[int]) -> Iterator[tuple[int, RowLocation, dict[str, Any] | DataError]]:
        """Yield the rows of these numbers, from 0, in rising order, each with its number."""
        number = {p: n for n in sorted(set(numbers)) for p in [n if self.chosen is None else int(self.chosen[n])]}
        for chunk, last in self._chunks(list(number)):
            for where, row in attempts(chunk, "line"):
                if where.line - 1 in number:
                    yield number[where.line - 1], where, row
                if where.line > last:
                    break

    def _chunks(self, positions: list[int]) -> Iterator[tuple[Chunk, int]]:
        """Yield what to read for these lines: (chunk, the last position needed of it)."""
        if self.groups:
            group = np.searchsorted(self.starts, positions, "right") - 1
            for g, of in groupby(zip(group.tolist(), positions, strict=True), lambda pair: pair[0]):
                yield Chunk(self.path, int(self.starts[g]) + 1, g, g + 1), [p for _, p in of][-1]
            return
        for _, of in groupby(enumerate(positions), lambda pair: pair[1] - pair[0]):  # consecutive lines
            run = [p for _, p in of]
            first, end = (int(self.starts[p]) for p in (run[0], run[-1] + 1))
            yield Chunk(self.path, run[0] + 1, first, end), run[-1]


def index(path: Path, kept: np.ndarray | None, text_rows: str = "line") -> Index:
    """Return the index of a file, from one pass over it.

    Args:
        kept: as cleaning returns it: of each row of each chunk, whether it stays.

    Raises:
        DataError: rows of such a file cannot be read alone.
    """
    parts = list(chunks(path, text_rows="line"))
    suffix, _ = form(path) or ("", "")
    if suffix in TEXT and text_rows != "line":
        found = f"{path}, whose rows are `data.text_rows: {text_rows}`"
        raise DataError("`data.stream`", found, "take data.text_rows: line, or leave data.stream out")
    if parts[0].end is None:
        raise DataError(
            "`data.stream`",
            f"{path}, of which no row can be read alone: it is packed, a list in JSON, or CSV",
            "leave data.stream out, or make it .jsonl or .parquet",
        )
    if suffix == PARQUET:
        import pyarrow.parquet

        metadata = pyarrow.parquet.read_metadata(path)
        sizes = [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]
        return Index(path, np.cumsum([0, *sizes], dtype=np.int64), True, None if kept is None else np.flatnonzero(kept))
    starts, chosen = [np.zeros(1, np.int64)], None
    with path.open("rb") as file:
        at = 0
        while block := file.read(BLOCK_bytes):
            starts.append(np.flatnonzero(np.frombuffer(block, np.uint8) == 10) + at + 1)
            at += len(block)
        file.seek(-1, os.SEEK_END)
        if file.read() != b"\n":
            starts.append(np.array([at]))
        if suffix in TEXT:  # blank lines are no rows
            file.seek(0)
            chosen = np.array([n for n, line in enumerate(file) if line.strip()], np.int64)
    begins = np.concatenate(starts)
    if kept is not None:
        lines = np.arange(len(begins) - 1) if chosen is None else chosen
        firsts = np.array([part.first - 1 for part in parts])
        part = np.searchsorted(firsts, lines, "right") - 1
        chosen = lines[kept[firsts[part] + np.arange(len(lines)) - np.searchsorted(lines, firsts)[part]]]
    return Index(path, begins, False, chosen)


@dataclass
class Streamed:
    """The rows of some files, tokenized by `read`; each has one sample, several or none."""

    work: TokenizeWork
    indexes: Sequence[Index]
    origins: Sequence[tuple[int, float]]  # (files, weight) of each
    T: int | None
    vocab: int
    parts: int = 1
    limit: int | None = None  # rows of the data are only the first so many
    rows: np.ndarray | None = None  # the numbers of those that are trained on; None: all
    named: str = "all"
    counts: Counts = field(default_factory=Counts)  # of all reading
    tokenized = False

    def __post_init__(self) -> None:
        self.work = replace(self.work, say=silent)  # workers do not report progress
        self._before = np.cumsum([0, *map(len, self.indexes)])
        self.total = int(min(self._before[-1], self.limit or self._before[-1]))

    def __len__(self) -> int:
        return self.total if self.rows is None else len(self.rows)

    @property
    def spans(self) -> tuple[tuple[int, float], ...]:
        """(rows, weight) of each origin, one after the other."""
        ends = self._before[np.cumsum([n for n, _ in self.origins])].clip(max=self.total)
        ends = ends if self.rows is None else np.searchsorted(self.rows, ends)
        sizes = np.diff(ends, prepend=0).tolist()
        return tuple((n, weight) for n, (_, weight) in zip(sizes, self.origins, strict=True) if n)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the files and all that determines the samples."""
        data = self.work.config.data
        parts = [
            readers.files_fingerprint(self.work.files, cache_root(data.cache)), identity(self.work.tokens),
            learnt(self.work.config),
            self.work.cleaning, data.text_rows, data.too_long, self.T, self.total, self.named,
            [weight for _, weight in self.origins],
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def read(self, numbers: Sequence[int]) -> SampleChunk:
        """Tokenize the rows of these numbers. Raises DataError: a bad row, with its file and line, unless bad rows are
        set aside.
        """
        chosen = numbers if self.rows is None else self.rows[list(numbers)].tolist()
        samples: list[Sample] = []
        refused: list[BadRow] = []
        for n, (_, where, made) in zip(numbers, self._tokenized(chosen), strict=True):
            self.counts.rows += 1
            if isinstance(made, DataError):
                refused.append(self._refused(where, made))
                continue
            if len(made) != self.parts:
                raise mixed_kinds(where)
            highest = max(int(document.ids.max()) for document in made)
            if highest >= self.vocab:
                raise foreign(str(where), highest, self.vocab)
            too_long = self.work.config.data.too_long
            fitted = [made] if self.T is None else fit_row(made, self.T, too_long, where, self.counts)
            samples += [(n, sample) for sample in fitted]
        return SampleChunk(samples, len(numbers), refused)

    def lengths(self) -> np.ndarray:
        raise _not_tokenized()

    def targets(self) -> np.ndarray:
        raise _not_tokenized()

    def documents(self, i: int) -> tuple[Document, ...]:
        raise _not_tokenized()

    def without(self, held: np.ndarray, named: str) -> Streamed:
        """Return the rows without those of a mask (rows,) bool."""
        return replace(self, rows=np.flatnonzero(~held), named=named)

    def shelf(self, held: np.ndarray) -> TokenShards:
        """Tokenize the rows of a mask (rows,) bool into shards in memory."""
        numbers, shelf, builder = np.flatnonzero(held), TokenShards(self.work.files), Builder()
        for first in range(0, len(numbers), BATCH_rows):
            for file, where, made in self._tokenized(numbers[first : first + BATCH_rows].tolist()):
                if isinstance(made, DataError):
                    self._refused(where, made)
                builder.add(where, file, made)
            if builder.tokens >= SHARD_tok or first + BATCH_rows >= len(numbers):
                shard, _ = shelf.add(builder.shard(last=False), None)
                if shard.highest >= self.vocab:
                    raise foreign(str(self.work.files[0]), shard.highest, self.vocab)
                builder = Builder()
        return shelf

    def _tokenized(self, numbers: Sequence[int]) -> list[tuple[int, RowLocation, tuple[Document, ...] | DataError]]:
        """Return (file, place, documents or the reason for none) of rows of the data, in the order of `numbers`."""
        file = (np.searchsorted(self._before, numbers, "right") - 1).tolist()
        rows: dict[int, tuple[int, RowLocation, Row | DataError]] = {}
        for f in sorted(set(file)):
            before = int(self._before[f])
            inside = [n - before for n, of in zip(numbers, file, strict=True) if of == f]
            for n, where, row in self.indexes[f].read(inside):
                rows[before + n] = f, where, row if isinstance(row, DataError) else meaning(where, row)
        if len(rows) < len(set(numbers)):
            asked = f"a row of {', '.join(map(str, self.work.files[:3]))}"
            raise DataError(asked, "it is not where it was", "leave the files alone while a run reads them")
        made: dict[int, tuple[Document, ...] | DataError] = {}
        good: dict[int, tuple[RowLocation, Row]] = {}
        for n, (_, where, row) in rows.items():
            if isinstance(row, DataError):
                made[n] = row
            else:
                good[n] = where, row
        made.update(zip(good, self.work.tokens.batch(list(good.values()), learnt(self.work.config)), strict=True))
        return [(*rows[n][:2], made[n]) for n in numbers]

    def _refused(self, where: RowLocation, error: DataError) -> BadRow:
        if self.work.config.data.bad_rows == "error":
            raise error
        self.counts.refused += 1
        return BadRow(where, error)


def _not_tokenized() -> ConfigError:
    do = "leave data.stream out"
    return ConfigError("the samples of the data before it is read", "`data.stream`: no row is tokenized yet", do)


def foreign(where: str, highest: int, vocab: int) -> DataError:
    """Return the error of a tokenizer that does not belong to the model."""
    do = "use the tokenizer that belongs to the model"
    return DataError(f"to embed the tokens of {where}", f"token {highest}, and a model of {vocab} tokens", do)
