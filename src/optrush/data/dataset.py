"""Samples to train on, as a view on shards: whole documents on the disk, cut to T and chosen by row when looked at.

What is in memory is 32 bytes a sample: where its tokens begin, how many they are, how many are learnt, and its row.
The tokens stay in the mapped files. A sample is a document or a piece of one, or the two documents of a pair.
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
from typing import Any, Protocol

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
    Work,
    digest,
    identity,
    mapped,
    meaning,
    mixed,
    root,
    silent,
)
from optrush.errors import DataError
from optrush.objectives import learnt

TOO_LONG = ("error", "split", "drop", "truncate")
OPEN = 128  # mapped shards at a time: each holds a file descriptor


class Source(Protocol):
    """Samples by number; each is a document, or the two of a pair, and no longer than T where it was asked for."""

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
        """(N,) int64: tokens of each sample, its documents together."""

    def targets(self) -> np.ndarray:
        """(N,) int64: how many of them are learnt."""

    def documents(self, i: int) -> tuple[Document, ...]: ...


@dataclass
class Counts:
    """What reading did. Nothing leaves the data without being counted here."""

    rows: int = 0  # rows read; without those that cleaning took out
    refused: int = 0  # bad rows that were set aside
    cleaned: int = 0  # rows that cleaning took out
    marked: int = 0  # plain texts that hold special tokens as text, of all rows that were tokenised
    too_long: int = 0  # rows longer than T, whatever was done with them
    truncated: int = 0  # rows that lost their end
    dropped: int = 0  # documents, or pieces of one, that were left out
    targets_lost: int = 0  # target tokens that were in the rows and are not in the corpus
    documents: int = 0
    tokens: int = 0
    targets: int = 0


# --- shards


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
        """Takes the next shard, of which the data ends with row `most`; (the shard, its refused rows by number)."""
        shard = mapped(made) if isinstance(made, Path) else made
        before = self.rows_before[-1]
        if len(shard):
            if self.tokens_before[-1] and shard.parts != self.parts:
                raise mixed(RowLocation(self.files[shard.files[0]], int(shard.lines[0])))
            self.parts = shard.parts
        self.made.append(made)
        self.names.append(made.stem.rsplit("-", 1)[1] if isinstance(made, Path) else digest(shard))
        self.rows_before.append(before + shard.rows)
        self.tokens_before.append(self.tokens_before[-1] + len(shard.ids))
        self.total = self.rows_before[-1] if most is None else min(most, self.rows_before[-1])
        self.cleaned += shard.cleaned
        self.marked += shard.marked
        refused = [(before + n, why) for n, why in shard.refusals(self.files) if before + n < self.total]
        self.refused += refused
        return shard, refused

    def shard(self, k: int) -> Shard:
        """Shard k; of mapped ones the last few stay open."""
        made = self.made[k]
        if isinstance(made, Shard):
            return made
        if k not in self._open:
            if len(self._open) >= OPEN:
                del self._open[next(iter(self._open))]
            self._open[k] = mapped(made)
        return self._open[k]

    def where(self, row: int) -> RowLocation:
        """The place of a row that has a sample."""
        k = bisect_right(self.rows_before, row) - 1
        shard = self.shard(k)
        at = int(np.searchsorted(shard.numbers, row - self.rows_before[k]))
        return RowLocation(self.files[shard.files[at]], int(shard.lines[at]))


# --- the view


@dataclass(frozen=True)
class Dataset:
    """The samples of a view; `row[i]` is the number of the row that sample i comes from."""

    shelf: TokenShards
    at: np.ndarray  # (N,) int64: of the first token, counted through all shards
    length: np.ndarray  # (N,) int64
    learnt: np.ndarray  # (N,) int64
    row: np.ndarray  # (N,) int64
    first: np.ndarray | None  # (N,) int64: tokens of a pair's first document
    counts: Counts
    fingerprint: str
    spans: tuple[tuple[int, float], ...]

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

    def where(self, i: int) -> RowLocation:
        """The place of the row that sample i comes from."""
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
    """The samples of some rows, of at most T tokens each.

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
    held, sizes = [np.zeros((columns, 0), np.int64)], np.zeros(len(weights), np.int64)
    for k in range(len(shelf.made)):
        shard = shelf.shard(k)
        rows = shard.numbers + shelf.rows_before[k]
        chosen = np.flatnonzero(rows < shelf.total)
        if keep is not None:
            chosen = chosen[keep[rows[chosen]]]
        sample, pieces = _pieces(shard, chosen, T, how, shelf.files, counts)
        pieces[0] += shelf.tokens_before[k]
        held.append(np.vstack([pieces[:3], rows[sample], pieces[3]])[:columns])
        sizes += np.bincount(origin_of[shard.files[sample]], minlength=len(weights))
    at, length, learnt, row, *first = np.concatenate(held, axis=1)
    counts.documents, counts.tokens, counts.targets = len(at) * shelf.parts, int(length.sum()), int(learnt.sum())
    if not len(at):
        raise DataError(
            f"training data from {', '.join(map(str, shelf.files[:3]))}",
            f"nothing is left of {counts.rows} rows: {counts.too_long} were longer than {T} tokens",
            "raise batch.seq, or choose data.too_long: split",
        )
    spans = tuple((int(n), weight) for n, weight in zip(sizes, weights, strict=True) if n)
    few, weighed = shelf.total < shelf.rows_before[-1], any(weight != 1 for weight in weights)
    said = [*shelf.names, named, few and shelf.total, counts.too_long and (T, how), weighed and spans]
    fingerprint = hashlib.sha256(json.dumps(said).encode()).hexdigest()
    return Dataset(shelf, at, length, learnt, row, first[0] if first else None, counts, fingerprint, spans)


def _pieces(
    shard: Shard, chosen: np.ndarray, T: int | None, how: str, files: Sequence[Path], counts: Counts
) -> tuple[np.ndarray, np.ndarray]:
    """((N,) the sample of each piece, (4, N) int64: where a piece begins, its tokens, its targets, its first part)."""
    starts, parts = shard.starts, shard.parts
    first = starts[1::parts] - starts[:-1:parts]
    whole = np.vstack([starts[:-1:parts], shard.lengths(), shard.learnt, first])[:, chosen].astype(np.int64)
    if T is None or not (whole[1] > T).any():
        return chosen, whole
    long = np.flatnonzero(whole[1] > T)
    if how == "error" or (parts > 1 and how != "drop"):
        i = chosen[long[0]]
        raise overlong(
            RowLocation(files[shard.files[i]], int(shard.lines[i])), int(whole[1, long[0]]), T, pair=parts > 1
        )
    cut = [cuts(shard.document(at, at + n).targets, T, how, counts) for at, n in whole[:2, long].T.tolist()]
    times = np.ones(len(chosen), np.int64)
    times[long] = [piece.shape[1] for piece in cut]
    sample = np.repeat(np.arange(len(chosen)), times)
    pieces, of_long = whole[:, sample], whole[1, sample] > T
    fresh = np.concatenate(cut, axis=1)
    pieces[0, of_long] += fresh[0]
    pieces[1:3, of_long] = fresh[1:]
    return chosen[sample], pieces


def cuts(targets: np.ndarray, T: int, how: str, counts: Counts) -> np.ndarray:
    """(3, P) int64: beginning, tokens and targets of what is left of a document longer than T; adds to `counts`.

    A piece begins without its context, so its first token is no target; a piece without targets is left out.
    """
    counts.too_long += 1
    all_targets, targets = int(targets.sum()), targets[: {"split": None, "truncate": T, "drop": 0}[how]]
    begin = np.arange(0, len(targets), T)
    learnt = np.add.reduceat(targets, begin, dtype=np.int64) - targets[begin] if len(begin) else begin
    kept = learnt > 0
    counts.dropped += int((~kept).sum()) if how != "drop" else 1
    counts.truncated += how == "truncate" and bool(kept.any())
    counts.targets_lost += all_targets - int(learnt.sum())
    return np.vstack([begin, np.minimum(T, len(targets) - begin), learnt])[:, kept]


def fit(
    documents: tuple[Document, ...], T: int, how: str, where: RowLocation, counts: Counts
) -> list[tuple[Document, ...]]:
    """One row's documents as samples of at most T tokens, as `view` makes them.

    Raises:
        DataError: they are longer, and `how` is `error`; or they are a pair, and to be cut.
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
    for at, tokens, _ in cuts(document.targets, T, how, counts).T.tolist():
        targets = document.targets[at : at + tokens].copy()
        targets[0] = False  # its context is gone
        pieces.append((Document(document.ids[at : at + tokens], targets),))
    return pieces


def overlong(where: RowLocation, n: int, T: int, *, pair: bool) -> DataError:
    """The error of a row that is longer than T and must not be."""
    what, ways = ("pairs", "drop") if pair else ("documents", "split, drop or truncate")
    return DataError(
        f"{what} of at most {T} tokens (batch.seq)",
        f"{n} tokens at {where}",
        f"raise batch.seq, or choose data.too_long: {ways}",
    )


def held_rows(rows: int, fraction: float, seed: int) -> np.ndarray:
    """(rows,) bool: which are held out, the same for the same rows and seed whatever is in them."""
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
    """An order of n things that depends on (seed, epoch) alone, on any machine and with any version of numpy."""
    raw = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(n)
    return np.argsort(raw, kind="stable")


@dataclass(frozen=True)
class Random:
    """n documents of exactly T random tokens, made when asked for, each from (seed, its number) alone."""

    n: int
    T: int
    vocab: int
    seed: int
    parts = 1

    def __len__(self) -> int:
        return self.n

    def lengths(self) -> np.ndarray:
        return np.full(self.n, self.T, np.int64)

    def targets(self) -> np.ndarray:
        return np.full(self.n, self.T - 1, np.int64)

    def documents(self, i: int) -> tuple[Document, ...]:
        assert 0 <= i < self.n
        # Raw words, because numpy keeps those the same between its versions, and not what `integers` makes of them.
        raw = np.random.PCG64(np.random.SeedSequence([self.seed, i])).random_raw(self.T)
        ids = ((raw >> np.uint64(32)) * np.uint64(self.vocab)) >> np.uint64(32)
        targets = np.ones(self.T, bool)
        targets[0] = False
        return (Document(ids.astype(np.int32), targets),)

    @property
    def spans(self) -> tuple[tuple[int, float], ...]:
        return ((self.n, 1.0),)

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(repr((self.n, self.T, self.vocab, self.seed)).encode()).hexdigest()


# --- Rows by number, tokenised when asked for: for data that shall not, or cannot, be tokenised before.
#
# One pass over the files notes where each row begins, 8 bytes a row; from then on any row can be read alone, by any
# process that has a copy of this. Rows are numbered as in the cache, so the same ones are held out.


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

    def read(self, wanted: Iterable[int]) -> Iterator[tuple[int, RowLocation, dict[str, Any] | DataError]]:
        """The rows of these numbers, from 0, in rising order, each with its number."""
        number = {p: n for n in sorted(set(wanted)) for p in [n if self.chosen is None else int(self.chosen[n])]}
        for chunk, last in self._chunks(list(number)):
            for where, found in attempts(chunk, "line"):
                if where.line - 1 in number:
                    yield number[where.line - 1], where, found
                if where.line > last:
                    break

    def _chunks(self, positions: list[int]) -> Iterator[tuple[Chunk, int]]:
        """What to read for these lines: (chunk, the last position wanted of it)."""
        if self.groups:
            group = np.searchsorted(self.starts, positions, "right") - 1
            for g, of in groupby(zip(group.tolist(), positions, strict=True), lambda pair: pair[0]):
                yield Chunk(self.path, int(self.starts[g]) + 1, g, g + 1), [p for _, p in of][-1]
            return
        for _, of in groupby(enumerate(positions), lambda pair: pair[1] - pair[0]):  # lines that follow one another
            run = [p for _, p in of]
            first, end = (int(self.starts[p]) for p in (run[0], run[-1] + 1))
            yield Chunk(self.path, run[0] + 1, first, end), run[-1]


def index(path: Path, kept: np.ndarray | None, text_rows: str = "line") -> Index:
    """One pass over the file. `kept` as cleaning gives it.

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

        facts = pyarrow.parquet.read_metadata(path)
        sizes = [facts.row_group(g).num_rows for g in range(facts.num_row_groups)]
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
    """The rows of some files; each is one sample or several, or none. Bad ones are in `refused`, once a reading."""

    work: Work
    indexes: Sequence[Index]
    origins: Sequence[tuple[int, float]]  # (files, weight) of each
    T: int | None
    vocab: int
    parts: int = 1
    limit: int | None = None  # rows of the data are only the first so many
    rows: np.ndarray | None = None  # the numbers of those that are trained on; None: all
    named: str = "all"
    counts: Counts = field(default_factory=Counts)  # of what was read, each time that it was
    refused: list[BadRow] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.work = replace(self.work, say=silent)  # what says something belongs to the process that began
        self._before = np.cumsum([0, *map(len, self.indexes)])
        self.total = int(min(self._before[-1], self.limit or self._before[-1]))

    def __len__(self) -> int:
        return self.total if self.rows is None else len(self.rows)

    @property
    def most_bad(self) -> float:
        """The share of the rows that may be bad."""
        return self.work.config.data.most_bad

    @property
    def spans(self) -> tuple[tuple[int, float], ...]:
        """(rows, weight) of each origin, one after the other."""
        ends = self._before[np.cumsum([n for n, _ in self.origins])].clip(max=self.total)
        ends = ends if self.rows is None else np.searchsorted(self.rows, ends)
        sizes = np.diff(ends, prepend=0).tolist()
        return tuple((n, weight) for n, (_, weight) in zip(sizes, self.origins, strict=True) if n)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the files and all that decides about samples."""
        data = self.work.config.data
        said = [
            readers.fingerprint(self.work.files, root(data.cache)), identity(self.work.tokens),
            learnt(self.work.config),
            self.work.cleaning, data.text_rows, data.too_long, self.T, self.total, self.named,
            [weight for _, weight in self.origins],
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()

    def read(self, numbers: Sequence[int]) -> list[tuple[tuple[Document, ...], ...]]:
        """The samples of the rows of these numbers.

        Raises:
            DataError: a bad row, with its file and line, where they are not set aside.
        """
        chosen = numbers if self.rows is None else self.rows[list(numbers)].tolist()
        return [tuple(self._samples(where, made)) for _, where, made in self.made(chosen)]

    def without(self, held: np.ndarray, named: str) -> Streamed:
        """The rows but those of a mask (rows,) bool."""
        return replace(self, rows=np.flatnonzero(~held), named=named)

    def shelf(self, held: np.ndarray) -> TokenShards:
        """The rows of a mask (rows,) bool, tokenised now and kept in memory."""
        numbers, shelf, builder = np.flatnonzero(held), TokenShards(self.work.files), Builder()
        for first in range(0, len(numbers), BATCH_rows):
            for file, where, made in self.made(numbers[first : first + BATCH_rows].tolist()):
                if isinstance(made, DataError):
                    self._refuse(where, made)
                builder.add(where, file, made)
            if builder.tokens >= SHARD_tok or first + BATCH_rows >= len(numbers):
                made_now, _ = shelf.add(builder.shard(last=False), None)
                if made_now.highest >= self.vocab:
                    raise foreign(str(self.work.files[0]), made_now.highest, self.vocab)
                builder = Builder()
        return shelf

    def made(self, numbers: Sequence[int]) -> list[tuple[int, RowLocation, tuple[Document, ...] | DataError]]:
        """(file, place, documents or why there are none) of rows of the data, in the order asked for."""
        file = (np.searchsorted(self._before, numbers, "right") - 1).tolist()
        found: dict[int, tuple[int, RowLocation, Row | DataError]] = {}
        for f in sorted(set(file)):
            before = int(self._before[f])
            wanted = [n - before for n, of in zip(numbers, file, strict=True) if of == f]
            for n, where, row in self.indexes[f].read(wanted):
                found[before + n] = f, where, row if isinstance(row, DataError) else meaning(where, row)
        good = {n: (where, row) for n, (_, where, row) in found.items() if not isinstance(row, DataError)}
        made = dict(zip(good, self.work.tokens.batch(list(good.values()), learnt(self.work.config)), strict=True))
        if len(found) < len(set(numbers)):
            asked = f"a row of {', '.join(map(str, self.work.files[:3]))}"
            raise DataError(asked, "it is not where it was", "leave the files alone while a run reads them")
        return [(found[n][0], found[n][1], made.get(n) or found[n][2]) for n in numbers]  # type: ignore[misc]

    def _samples(self, where: RowLocation, made: tuple[Document, ...] | DataError) -> list[tuple[Document, ...]]:
        self.counts.rows += 1
        if isinstance(made, DataError):
            self._refuse(where, made)
            return []
        if len(made) != self.parts:
            raise mixed(where)
        highest = max(int(document.ids.max()) for document in made)
        if highest >= self.vocab:
            raise foreign(str(where), highest, self.vocab)
        return [made] if self.T is None else fit(made, self.T, self.work.config.data.too_long, where, self.counts)

    def _refuse(self, where: RowLocation, error: DataError) -> None:
        data = self.work.config.data
        if data.bad_rows == "error":
            raise error
        self.counts.refused += 1
        self.refused.append(BadRow(where, error))


def foreign(where: str, highest: int, vocab: int) -> DataError:
    """The error of a tokenizer that is not the model's."""
    do = "use the tokenizer that belongs to the model"
    return DataError(f"to embed the tokens of {where}", f"token {highest}, and a model of {vocab} tokens", do)
