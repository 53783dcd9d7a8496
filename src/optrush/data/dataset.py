"""Turn a configuration's `data:` into samples by number: the shards of tokenized files, streamed rows, random tokens.

A sample is a document or a piece of one, or the two documents of a pair. A tokenized sample takes 32 bytes of memory:
where its tokens begin, how many they are, how many are learnt, and its row. The tokens stay whole in the mapped files
and are cut to T when they are read. Streamed samples (`data.stream`) are the same without shards: an index of 8 bytes
a row finds the row, and `read` tokenizes it.

Every rank calls `read_sources`; ranks wait for each other only at a file lock, and no collective runs.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass, field, fields, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from optrush.config import JUDGED, PAIRED, Config
from optrush.data import readers, sample, tokenize
from optrush.data.chat_template import Tokens
from optrush.data.cleaning import clean_files
from optrush.data.readers import PARQUET, TEXT, Chunk, attempts, chunks, form
from optrush.data.schema import Chat, Document, Judged, Pair, Row, RowLocation, Text, row_rules
from optrush.data.strict_json import quoted
from optrush.data.tokenize import OTHER_KEYS, BadRow, Builder, Say, Shard, SHARD_tok, TokenizeWork, cache_root
from optrush.errors import ConfigError, DataError
from optrush.files import parse_json, write_whole
from optrush.objectives import learnt

TOO_LONG = ("error", "split", "drop", "truncate")
OPEN = 128  # mapped shards at a time: each holds a file descriptor

Sample = tuple[int, tuple[Document, ...]]  # its number, its documents


class SampleChunk(NamedTuple):
    """The samples of some numbers, in their order; a streamed row has one, several or none."""

    samples: list[Sample]
    rows: int  # that were read
    refused: Sequence[BadRow] = ()
    counts: Counts | None = None  # of a streamed source: of these rows


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
    known: int = 0  # documents of the held-out part that are trained on, too
    keys: Counter[str] = field(default_factory=Counter)  # rows with each key that `parse_row` noted

    def add(self, other: Counts) -> None:
        """Add the counts of other rows."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


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
    keys: Counter[str] = field(default_factory=Counter)  # as in Counts
    refused: list[tuple[int, BadRow]] = field(default_factory=list)
    total: int = 0  # rows of the data: all in the shards, or the first so many
    names: list[str] = field(default_factory=list)
    _open: dict[int, Shard] = field(default_factory=dict)

    def add(self, made: Path | Shard, most: int | None) -> tuple[Shard, list[tuple[int, BadRow]]]:
        """Append the next shard, of which the data ends with row `most`; return it and its refused rows by number."""
        shard = tokenize.mapped(made) if isinstance(made, Path) else made
        before = self.rows_before[-1]
        if len(shard):
            if self.tokens_before[-1] and shard.parts != self.parts:
                raise tokenize.mixed_kinds(RowLocation(self.files[shard.files[0]], int(shard.lines[0])))
            self.parts = shard.parts
        self.made.append(made)
        self.names.append(made.stem.rsplit("-", 1)[1] if isinstance(made, Path) else tokenize.shard_digest(shard))
        self.rows_before.append(before + shard.rows)
        self.tokens_before.append(self.tokens_before[-1] + len(shard.ids))
        self.total = self.rows_before[-1] if most is None else min(most, self.rows_before[-1])
        self.cleaned += shard.cleaned
        self.marked += shard.marked
        self.keys.update(shard.noted())
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
            self._open[k] = tokenize.mapped(made)
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

    def digests(self) -> np.ndarray:
        """Return a digest of the tokens of each row's samples before they were cut, (rows,) int64."""
        shards = map(self.shelf.shard, range(len(self.shelf.made)))
        parts = [(shard.numbers + before, shard.digests) for shard, before in zip(shards, self.shelf.rows_before)]
        rows, digests = (np.concatenate([np.zeros(0, np.int64), *column]) for column in zip(*parts, strict=True))
        return np.asarray(digests[np.isin(rows, self.row)])


def view(
    shelf: TokenShards,
    *,
    T: int | None,
    how: str,
    keep: np.ndarray | None = None,
    named: str = "all",
    origins: Sequence[tuple[int, float]] = (),
) -> Dataset:
    """Return the samples of some rows, of at most T tokens each; None leaves them as they are.

    Args:
        how: what is done with longer ones: `error` raises, `split` cuts, `drop` leaves out, `truncate` keeps the start.
        keep: (rows,) bool; None: all.
        named: which rows those are, for the fingerprint.
        origins: (files, weight) of each, one after the other; none: all files are one.

    Raises DataError: a row is too long, or nothing is left.
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
        asked = f"training data from {', '.join(map(str, shelf.files[:3]))}"
        found = f"nothing is left of {counts.rows} rows: {counts.too_long} were longer than {T} tokens"
        raise DataError(asked, found, "raise batch.seq, or choose data.too_long: split")
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


@dataclass(frozen=True)
class Mismatched(Dataset):
    """Samples of two documents: the sample's own, and its prompt followed by the answer of another sample.

    KTO estimates from the second how far the model has gone from its reference. What precedes the first target is the
    prompt. The other sample is half the data away, so that answers to one prompt, which are neighbors, do not meet.
    """

    whole: Dataset  # without those that were too long left out
    own: np.ndarray  # (N,) int64: numbers in `whole`
    other: np.ndarray  # (N,) int64: those whose answers are taken
    prompts: np.ndarray  # (all,) int64: tokens before the first target, of each of `whole`

    @property
    def parts(self) -> int:
        return 2

    def lengths(self) -> np.ndarray:
        return both_lengths(self.whole, self.prompts, self.own, self.other)

    def targets(self) -> np.ndarray:
        return np.asarray(self.whole.learnt[self.own] + self.whole.learnt[self.other])

    def documents(self, i: int) -> tuple[Document, ...]:
        own, other = int(self.own[i]), int(self.other[i])
        (document,), (stranger,) = self.whole.documents(own), self.whole.documents(other)
        n, m = int(self.prompts[own]), int(self.prompts[other])
        ids = np.concatenate([document.ids[:n], stranger.ids[m:]])
        targets = np.concatenate([document.targets[:n], stranger.targets[m:]])
        return document, Document(ids, targets, document.desirable)


def mismatched(samples: Dataset, T: int, how: str) -> Mismatched:
    """Return judged answers with their mismatched documents, both in a row of at most T tokens.

    Args:
        how: what is done with longer ones: `error` raises, `drop` leaves them out, counted as too long.

    Raises DataError: one is too long, or nothing is left.
    """
    n = len(samples)
    prompts, own = _prompts(samples), np.arange(n)
    other = (own + n // 2) % n
    long = both_lengths(samples, prompts, own, other) > T
    if long.any() and how == "error":
        i = int(np.flatnonzero(long)[0])
        raise overlong(samples.where(i), int(both_lengths(samples, prompts, own, other)[i]), T, pair=True)
    if long.all():
        asked, found = "answers and mismatched ones in a row", f"all {n} are longer than {T} tokens"
        raise DataError(asked, found, "raise batch.seq")
    keep = np.flatnonzero(~long)
    counts = replace(samples.counts)
    counts.too_long += int(long.sum())
    counts.dropped += int(long.sum())
    counts.documents = 2 * len(keep)
    ends = np.cumsum([0, *(many for many, _ in samples.spans)])
    spans = [(int(((keep >= a) & (keep < b)).sum()), w) for (_, w), a, b in zip(samples.spans, ends, ends[1:])]
    kept = {f.name: getattr(samples, f.name) for f in fields(Dataset)}
    kept |= {name: kept[name][keep] for name in ("at", "length", "learnt", "row")}
    kept |= {"counts": counts, "fingerprint": f"{samples.fingerprint} mismatched"}
    kept["spans"] = tuple(span for span in spans if span[0])
    return Mismatched(**kept, whole=samples, own=keep, other=other[keep], prompts=prompts)


def both_lengths(samples: Dataset, prompts: np.ndarray, own: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the tokens of samples together with their mismatched documents."""
    length = samples.length
    return np.asarray(length[own] + prompts[own] + length[other] - prompts[other])


def _prompts(samples: Dataset) -> np.ndarray:
    """Return the tokens before the first target of each sample."""
    found = [int(samples.documents(i)[0].targets.argmax()) for i in range(len(samples))]
    return np.array(found, np.int64)


def fit_row(
    documents: tuple[Document, ...], T: int, how: str, where: RowLocation, counts: Counts
) -> list[tuple[Document, ...]]:
    """Return one row's documents as samples of at most T tokens, as `view` makes them; raises DataError as it does."""
    n = sum(map(len, documents))
    if n <= T:
        return [documents]
    if how == "error" or (len(documents) > 1 and how != "drop"):
        raise overlong(where, n, T, pair=len(documents) > 1)
    pieces: list[tuple[Document, ...]] = []
    for at, tokens, _ in _cuts(np.concatenate([d.targets for d in documents]), T, how, counts).T.tolist():
        targets = documents[0].targets[at : at + tokens].copy()
        targets[0] = False  # without its context
        pieces.append((Document(documents[0].ids[at : at + tokens], targets),))
    return pieces


def overlong(where: RowLocation, n: int, T: int, *, pair: bool) -> DataError:
    """Return the error of a row that is longer than T and must not be."""
    what, ways = ("pairs", "drop") if pair else ("documents", "split, drop or truncate")
    do = f"raise batch.seq, or choose data.too_long: {ways}"
    return DataError(f"{what} of at most {T} tokens (batch.seq)", f"{n} tokens at {where}", do)


def held_rows(rows: int, fraction: float, seed: int, whole_texts: bool = False) -> np.ndarray:
    """Return which rows are held out, (rows,) bool: the same for the same rows and seed, whatever they contain.

    Args:
        whole_texts: rows are text files, which paragraphs or lines would make more of.
    """
    n = round(fraction * rows)
    if not 0 < n < rows:
        do = "change the fraction so that both parts get a row, or name a file of its own"
        if whole_texts:
            do = f"take data.text_rows: paragraph (or line), for each text file is one row; or {do}"
        raise DataError(f"{fraction} of the data for evaluation (data.eval)", f"{rows} rows, of which that is {n}", do)
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


# --- Streamed: one pass over the files notes where each row begins; from then on any process with a copy of the index
# reads any row alone. Rows are numbered as in the shards, so the same ones are held out.

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
    """Return the index of a file, from one pass over it, without the rows that cleaning did not keep.

    Raises DataError: rows of such a file cannot be read alone.
    """
    parts = list(chunks(path, text_rows="line"))
    suffix, _ = form(path) or ("", "")
    if suffix in TEXT and text_rows != "line":
        found = f"{path}, whose rows are `data.text_rows: {text_rows}`"
        raise DataError("`data.stream`", found, "take data.text_rows: line, or leave data.stream out")
    if parts[0].end is None:
        found = f"{path}, of which no row can be read alone: it is packed, a list in JSON, or CSV"
        raise DataError("`data.stream`", found, "leave data.stream out, or make it .jsonl or .parquet")
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
    begins = _without_blank_end(path, np.concatenate(starts)) if suffix not in TEXT else np.concatenate(starts)
    if kept is not None:
        lines = np.arange(len(begins) - 1) if chosen is None else chosen
        firsts = np.array([part.first - 1 for part in parts])
        part = np.searchsorted(firsts, lines, "right") - 1
        chosen = lines[kept[firsts[part] + np.arange(len(lines)) - np.searchsorted(lines, firsts)[part]]]
    return Index(path, begins, False, chosen)


# Position of the file, place, samples or the reason for none, keys that `parse_row` noted.
_Read = tuple[int, RowLocation, tokenize.Samples | DataError, Collection[str]]


def _without_blank_end(path: Path, begins: np.ndarray) -> np.ndarray:
    """Return where the lines of a file begin, and the end, without the blank lines at its end."""
    with path.open("rb") as file:
        while len(begins) > 1:
            file.seek(begins[-2])
            if file.read(int(begins[-1] - begins[-2])).strip():
                break
            begins = begins[:-1]
    return begins


@dataclass
class Streamed:
    """The rows of some files, tokenized by `read`; each has one sample, several or none."""

    work: TokenizeWork
    indexes: Sequence[Index]
    origins: Sequence[tuple[int, float]]  # (files, weight) of each
    T: int | None
    vocab: int
    parts: int = 1
    first_keys: frozenset[str] = frozenset()  # that the first rows had, of those that `parse_row` notes
    limit: int | None = None  # rows of the data are only the first so many
    rows: np.ndarray | None = None  # the numbers of those that are trained on; None: all
    named: str = "all"
    tokenized = False

    def __post_init__(self) -> None:
        self.work = replace(self.work, say=tokenize.silent)  # workers do not report progress
        self._before = np.cumsum([0, *map(len, self.indexes)])
        self.total = int(min(self._before[-1], self.limit or self._before[-1]))

    def __len__(self) -> int:
        return self.total if self.rows is None else len(self.rows)

    @property
    def most_truncated(self) -> float:
        """The largest share of rows without their end."""
        return self.work.config.data.most_truncated

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
            readers.files_fingerprint(self.work.files, cache_root(data.cache)), tokenize.identity(self.work.tokens),
            learnt(self.work.config), astuple(row_rules(self.work.config)), self.work.cleaning,
            data.text_rows, data.too_long, self.T, self.total, self.named,
            [weight for _, weight in self.origins],
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def read(self, numbers: Sequence[int]) -> SampleChunk:
        """Tokenize the rows of these numbers; raises DataError for a bad row unless those are set aside."""
        chosen = numbers if self.rows is None else self.rows[list(numbers)].tolist()
        samples: list[Sample] = []
        refused: list[BadRow] = []
        counts = Counts(rows=len(numbers))
        too_long = self.work.config.data.too_long
        for n, (_, where, row, keys) in zip(numbers, self._tokenized(chosen), strict=True):
            counts.keys.update(keys)
            if isinstance(row, DataError):
                refused.append(self._refused(where, row))
                counts.refused += 1
                continue
            for made in row:
                if len(made) != self.parts:
                    raise tokenize.mixed_kinds(where)
                highest = max(int(document.ids.max()) for document in made)
                if highest >= self.vocab:
                    raise foreign(str(where), highest, self.vocab)
                fitted = [made] if self.T is None else fit_row(made, self.T, too_long, where, counts)
                samples += [(n, sample) for sample in fitted]
        return SampleChunk(samples, len(numbers), refused, counts)

    def documents(self, i: int = 0) -> Any:
        """Raise ConfigError: what other sources return is not known here."""
        asked, found = "the samples of the data before it is read", "`data.stream`: no row is tokenized yet"
        raise ConfigError(asked, found, "leave data.stream out")

    lengths = targets = documents

    def without(self, held: np.ndarray, named: str) -> Streamed:
        """Return the rows without those of a mask (rows,) bool."""
        return replace(self, rows=np.flatnonzero(~held), named=named)

    def shelf(self, held: np.ndarray) -> TokenShards:
        """Tokenize the rows of a mask (rows,) bool into shards in memory."""
        numbers, shelf, builder = np.flatnonzero(held), TokenShards(self.work.files), Builder()
        for first in range(0, len(numbers), tokenize.BATCH_rows):
            for file, where, made, keys in self._tokenized(numbers[first : first + tokenize.BATCH_rows].tolist()):
                if isinstance(made, DataError):
                    self._refused(where, made)
                builder.note(keys)
                builder.add_samples(where, file, made)
            if builder.tokens >= SHARD_tok or first + tokenize.BATCH_rows >= len(numbers):
                shard, _ = shelf.add(builder.shard(last=False), None)
                if shard.highest >= self.vocab:
                    raise foreign(str(self.work.files[0]), shard.highest, self.vocab)
                builder = Builder()
        return shelf

    def _tokenized(self, numbers: Sequence[int]) -> list[_Read]:
        """Return what is read of rows of the data, in the order of `numbers`."""
        file = (np.searchsorted(self._before, numbers, "right") - 1).tolist()
        rows: dict[int, tokenize.Parsed] = {}
        rules = row_rules(self.work.config)
        for f in sorted(set(file)):
            before = int(self._before[f])
            inside = [n - before for n, of in zip(numbers, file, strict=True) if of == f]
            for n, where, row in self.indexes[f].read(inside):
                keys = set[str]()
                parsed = row if isinstance(row, DataError) else tokenize.meaning(where, row, rules, keys)
                rows[before + n] = f, where, parsed, keys
        if len(rows) < len(set(numbers)):
            asked = f"a row of {', '.join(map(str, self.work.files[:3]))}"
            raise DataError(asked, "it is not where it was", "leave the files alone while a run reads them")
        good = {
            n: (where, row)
            for n, (_, where, row, _) in rows.items()
            if row is not None and not isinstance(row, DataError)
        }
        made: dict[int, tokenize.Samples | DataError]
        made = {n: row for n, (_, _, row, _) in rows.items() if isinstance(row, DataError)}
        samples = tokenize.row_samples(self.work.tokens, list(good.values()), learnt(self.work.config))
        made.update(zip(good, samples, strict=True))
        return [(*rows[n][:2], made[n], rows[n][3]) for n in numbers]

    def _refused(self, where: RowLocation, error: DataError) -> BadRow:
        if self.work.config.data.bad_rows == "error":
            raise error
        return BadRow(where, error)


def foreign(where: str, highest: int, vocab: int) -> DataError:
    """Return the error of a tokenizer that does not belong to the model."""
    do = "use the tokenizer that belongs to the model"
    return DataError(f"to embed the tokens of {where}", f"token {highest}, and a model of {vocab} tokens", do)


# --- Cleaning once: which rows `data.clean` keeps, stored next to the tokenized data under a key of its own.

FORMAT = 2  # of the stored result


def kept_rows(
    config: Config, tokens: Tokens, paths: Sequence[Path], say: Say
) -> tuple[list[np.ndarray], str, dict[str, Any]]:
    """Clean, or return the stored result: which rows stay, by file; a digest that names them; cleaning.json.

    One process of a machine cleans; small data is cleaned by each. Raises UserError as `clean_files`.
    """
    data, settings = config.data, config.data.clean
    assert settings is not None
    cache, progress = cache_root(data.cache), tokenize.Progress(say, "cleaning", 1.0)

    def now() -> tuple[list[np.ndarray], dict[str, Any]]:
        result = clean_files(
            paths, settings, tokens=tokens, text_rows=data.text_rows, bad_rows=data.bad_rows,
            most_bad=data.most_bad, workers=data.workers, progress=progress.share, cache=cache,
            rules=row_rules(config),
        )  # fmt: skip
        return [result.kept[path] for path in paths], result.record

    evaluation = [] if settings.decontaminate is None else readers.find_files(settings.decontaminate, cache)
    parts = [
        FORMAT, settings.model_dump(mode="json"), data.text_rows, data.bad_rows, data.most_bad,
        astuple(row_rules(config)),
        [str(path) for path in paths], readers.files_fingerprint([*paths, *evaluation], cache),
        settings.tokens and tokenize.identity(tokens),
    ]  # fmt: skip
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    if tokenize.small(paths):
        rows, record = now()
        return rows, key, record
    folder = cache / "cleaned" / key
    record_file, rows_file = folder / "cleaning.json", folder / "kept.npz"
    with tokenize.locked(folder, say):
        if not record_file.exists():  # written last
            rows, record = now()
            tokenize.save_kept(rows_file, rows)
            write_whole(record_file, json.dumps(record))
    return tokenize.load_kept(rows_file), key, parse_json(record_file.read_text())


# --- The checks of the first rows, before step 0; each error shows one row.
#
# Each of these faults trains without a sign and shows only in the model: it learns nothing, never stops, expects two
# begin-of-text tokens, or answers a first question otherwise than it was trained to.

SAMPLES = 200  # rows that are checked

Samples = Sequence[tuple[RowLocation, Row]]
DocumentLists = Sequence[Sequence[Document]]  # the documents of each sample


def probe_rows(
    samples: Samples,
    documents: DocumentLists,
    tokens: Tokens,
    train_on: str,
    *,
    rows: int,
    truncated: int,
    most_truncated: float,
) -> None:
    """Raise DataError at the first fault.

    Args:
        samples: the first rows as they were read, about SAMPLES of them.
        documents: what is trained on of each sample, after cutting to T; nothing where it was dropped or refused.
        rows: of the whole corpus, of which `truncated` lost their end; more than the share `most_truncated` is a fault.
    """
    if not samples:
        return
    whole = _whole(samples, tokens, train_on)
    if not any(document.targets.any() for made in documents for document in made):
        one = _show(tokens, samples[0], documents[0] or whole[0])
        found = f"not one token of them would be learnt; the first, {one}"
        do = "raise batch.seq if answers are cut off, or choose what is learnt (data.train_on)"
        raise DataError(f"to learn from the first {len(samples)} rows", found, do)
    if rows and truncated / rows > most_truncated:
        n = next((n for n, made in enumerate(documents) if sum(map(len, made)) < sum(map(len, whole[n]))), None)
        one = "" if n is None else f"; one, {_show(tokens, samples[n], documents[n] or whole[n])}"
        raise truncated_rows(truncated, rows, most_truncated, one)
    _stops(samples, documents, whole if train_on != "all" else _whole(samples, tokens, "last"), tokens)


def truncated_rows(truncated: int, rows: int, most: float, one: str = "") -> DataError:
    """Return the error of more rows that lost their end than the share `most`; `one` shows one of them."""
    asked = f"at most {most:.1%} of the rows without their end (data.most_truncated)"
    found = f"{truncated} of {rows} rows ({truncated / rows:.1%}) are longer than batch.seq and truncated{one}"
    return DataError(asked, found, "raise batch.seq, or choose data.too_long: drop or split")


def _whole(samples: Samples, tokens: Tokens, train_on: str) -> DocumentLists:
    return [() if isinstance(made, DataError) else made for made in tokens.batch(samples, train_on)]


def _stops(samples: Samples, documents: DocumentLists, whole: DocumentLists, tokens: Tokens) -> None:
    trained = {int(i) for made in documents for document in made for i in document.ids[document.targets]}
    for n, made in enumerate(whole):
        if isinstance(samples[n][1], Text):
            continue
        for document in made:
            ends = document.targets & ~np.append(document.targets[1:], False)  # the last token of each answer
            for stop in sorted(set(document.ids[ends].tolist()) - trained):
                one = _show(tokens, samples[n], documents[n] or made)
                asked = f"to learn to stop with {tokens.tokenizer.convert_ids_to_tokens(stop)}, as answers end"
                found = f"it is learnt in none of the first {len(samples)} rows; one, {one}"
                do = "raise batch.seq, so that answers are not cut off, or choose data.too_long: drop"
                raise DataError(asked, found, do)


def _show(tokens: Tokens, sample: tuple[RowLocation, Row], documents: Sequence[Document]) -> str:
    """Return a row's place and its first and last tokens as text, in one line."""
    if not documents:
        return f"at {sample[0]}"
    return f"at {sample[0]}: '{tokens.shown(documents[0].ids.tolist())}'"


# --- The sources of a run.

SAMPLE_ROWS = 1000  # conversations of a sample, unless data.max_samples is given
RANDOM_DOCUMENTS = 4096  # of `data.random: true`
NAMED_KEYS = 12  # keys that the summary names


@dataclass(frozen=True)
class Sources:
    """What a run trains and evaluates on."""

    train: SampleSource
    held_out: SampleSource | None
    fingerprint: str
    summary: str  # counts, for people
    too_long: int = 0  # rows longer than T, of what is evaluated (of all, where nothing is held out)
    refused: Sequence[BadRow] = ()  # bad rows, set aside
    cleaned: dict[str, Any] | None = None  # the record of data.clean


def read_sources(
    config: Config,
    tokens: Tokens | None,
    vocab: int,
    progress: Say | None = None,
    data: str | None = None,
    cut: bool = True,
) -> Sources:
    """Read and tokenize the data of a run, or map the shards of an earlier one; raises DataError with file and line.

    Args:
        tokens: the tokenizer; None only for random tokens.
        vocab: ids that the model has an embedding for.
        progress: called with a line now and then, where reading takes long.
        data: a file to read as the held-out part, in place of the configuration's (`optrush eval --data`).
        cut: False leaves training documents longer than T whole, for a layout that cuts them itself.
    """
    d, T = config.data, config.batch.seq
    if d.random is not None and data is None:
        return _random(config, vocab)
    assert tokens is not None
    reading = _Reading(config, tokens, vocab, progress or tokenize.silent)
    how = d.too_long if cut else "split"  # of what is evaluated: no row of T tokens has room for more
    if data is not None:
        only = _completed(config, reading.evaluation(data, how))
        return reading.sources(only, only)
    if isinstance(d.eval, str) and not (Path(d.eval).exists() or glob.glob(d.eval, recursive=True)):
        raise DataError(f"`data.eval: {d.eval}`", "no such file", "give a JSONL file, or a fraction such as 0.1")
    limit, held_out = T if cut else None, None
    with _places(config) as (paths, origins):
        if isinstance(d.eval, str):
            _refuse_same(paths, readers.find_files(d.eval, cache_root(d.cache)), d.eval)
        work = reading.work(paths, d.clean is not None)
        reading.look(work, limit)
        rows = reading.streamed(work, origins, limit) if d.stream else reading.shelf(work, limit, d.max_samples)
        held = np.zeros(rows.total, bool)
        if isinstance(d.eval, float):
            texts = any((readers.form(file) or ("",))[0] in TEXT for file in work.files)
            held = held_rows(rows.total, d.eval, config.seed, texts and d.text_rows == "file")
        named = f"{held.sum()} of {rows.total} by {config.seed}" if held.any() else "none"
        train: Dataset | Streamed
        if isinstance(rows, Streamed):
            train = rows
            if held.any():
                train = rows.without(held, named)
                shelf = rows.shelf(held)
                held_out = view(shelf, T=T, how=how)
                reading.refused += [row for _, row in shelf.refused]
        else:
            train = view(rows, T=limit, how=d.too_long, keep=~held, named=f"but {named}", origins=origins)
            train.counts.cleaned, train.counts.marked, train.counts.keys = rows.cleaned, rows.marked, rows.keys
            if train.counts.truncated:
                reading.probe(train.counts.rows, train.counts.truncated)
            if held.any():
                held_out = view(rows, T=T, how=how, keep=held, named=named)
        if isinstance(d.eval, str):
            held_out = reading.evaluation(d.eval, how)
    if isinstance(train, Dataset) and held_out is not None:
        _count_known(train, held_out, d.eval)
    reading.check_columns(train, held_out)
    if isinstance(train, Dataset):
        train, held_out = _completed(config, train), None if held_out is None else _completed(config, held_out)
    return reading.sources(train, held_out)


def _completed(config: Config, samples: Dataset) -> Dataset:
    """Return judged answers with their mismatched documents; other samples as they are."""
    if config.objective != JUDGED:
        return samples
    return mismatched(samples, config.batch.seq, config.data.too_long)


def _refuse_same(paths: Sequence[Path], held_out: Sequence[Path], named: str) -> None:
    """Raise DataError if a file of the held-out data is trained on, or has the contents of one that is."""
    sizes: dict[int, list[Path]] = {}
    for path in paths:
        sizes.setdefault(path.stat().st_size, []).append(path)
    for file in held_out:
        for path in sizes.get(file.stat().st_size, ()):
            if path.samefile(file) or readers.files_fingerprint(path) == readers.files_fingerprint(file):
                same = "is" if path.samefile(file) else "has the contents of"
                raise _trained_on(named, f"{file} {same} {path} of data.path")


def _count_known(train: Dataset, held_out: Dataset, named: str | float | None) -> None:
    """Count the held-out samples that are trained on, too; raises DataError if all of a file's are."""
    both = np.isin(held_out.digests(), train.digests())
    held_out.counts.known = int(both.sum())
    if both.all() and isinstance(named, str):
        raise _trained_on(named, f"each of its {len(both)} documents is in data.path too")


def _trained_on(named: str, found: str) -> DataError:
    do = "hold out rows that are not trained on: name another file, or a fraction such as data.eval: 0.1"
    return DataError(f"`data.eval: {named}`", f"{found}: what is memorised would look best", do)


def _random(config: Config, vocab: int) -> Sources:
    d, T = config.data, config.batch.seq
    n = RANDOM_DOCUMENTS if d.random is True or d.random is None else d.random
    n = min(n, d.max_samples or n)
    train = Random(n, T, vocab, config.seed)
    held = Random(max(1, round(n * d.eval)), T, vocab, config.seed + 1) if isinstance(d.eval, float) else None
    return Sources(train, held, train.fingerprint, f"{n} documents of {T} random tokens")


@contextmanager
def _places(config: Config) -> Iterator[tuple[list[Path], list[tuple[int, float]]]]:
    """Yield the training files, and (files, weight) of each origin; those of a sample are removed afterwards."""
    d = config.data
    if d.sample is not None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{d.sample}.jsonl"
            sample.write_sample(path, d.max_samples or SAMPLE_ROWS, config.seed, pairs=config.paired)
            yield [path], [(1, 1.0)]
        return
    origins = [(readers.find_files(origin.path, cache_root(d.cache)), origin.weight) for origin in d.origins]
    paths = [path for of, _ in origins for path in of]
    first = {path.resolve(): i for i, path in reversed(list(enumerate(paths)))}
    if double := next((path for i, path in enumerate(paths) if first[path.resolve()] != i), None):
        do = "name it once, with a weight if it shall be read more often"
        raise DataError(f"training data from {double}", "two of the sources hold it", do)
    yield paths, [(len(of), weight) for of, weight in origins]


@dataclass
class _Reading:
    config: Config
    tokens: Tokens
    vocab: int
    say: Say
    parts: int = 1
    refused: list[BadRow] = field(default_factory=list)
    cleaned: dict[str, Any] | None = None  # the record of data.clean
    first_keys: Counter[str] = field(default_factory=Counter)  # that `parse_row` noted, of the first rows
    first_rows: int = 0
    _first: tuple[list[tuple[RowLocation, Row]], list[list[Document]]] = field(default=([], []))

    def work(self, paths: Sequence[Path], clean: bool) -> TokenizeWork:
        """Return what is to be tokenized."""
        if not clean:
            return TokenizeWork(self.config, self.tokens, tuple(paths), say=self.say)
        kept, key, self.cleaned = kept_rows(self.config, self.tokens, paths, self.say)
        return TokenizeWork(self.config, self.tokens, tuple(paths), kept, key, self.say)

    def look(self, work: TokenizeWork, T: int | None) -> None:
        """Check the first rows before all others are tokenized."""
        d, counts = self.config.data, Counts()
        all_jobs = tokenize.jobs(work.files, d.text_rows)
        rules, train_on = row_rules(self.config), learnt(self.config)
        rows = (entry for job in all_jobs for entry in tokenize.parsed(job, d.text_rows, work.kept, rules))
        most = min(SAMPLES, d.max_samples or SAMPLES)
        first = list(islice(((where, row, keys) for _, where, row, keys in rows if row is not None), most))
        good = [(where, row) for where, row, _ in first if not isinstance(row, DataError)]
        made = iter(tokenize.row_samples(self.tokens, good, train_on))
        samples, documents = list[tuple[RowLocation, Row]](), list[list[Document]]()
        for where, row, keys in first:
            counts.keys.update(keys)
            result = row if isinstance(row, DataError) else next(made)
            if isinstance(result, DataError):
                if d.bad_rows == "error":
                    raise result
                continue
            assert not isinstance(row, DataError)
            apart = train_on == "each" or isinstance(row, Judged)
            for part, one in zip(tokenize.split_turns(row) if apart else [row], result, strict=True):
                self._suits(len(one), where)
                cut = [one] if T is None else fit_row(one, T, d.too_long, where, counts)
                samples.append((where, part))
                documents.append([document for piece in cut for document in piece])
        self.first_keys, self.first_rows = counts.keys, len(first)
        self._first = samples, documents
        if any(documents):  # else all were too long, and what is left is counted later
            self.probe(len(samples) if d.stream else 0, counts.truncated)

    def probe(self, rows: int, truncated: int) -> None:
        """Raise DataError at the first fault; `rows` 0: how many are truncated is unknown yet."""
        most = self.config.data.most_truncated
        how = "last" if self.config.data.split_turns else learnt(self.config)
        probe_rows(*self._first, self.tokens, how, rows=rows, truncated=truncated, most_truncated=most)

    def _suits(self, parts: int, where: RowLocation) -> None:
        """Raise DataError for a row of so many documents if the objective cannot learn from it."""
        self.parts = parts
        asked, pairs = f"`objective: {self.config.objective}`", self.config.objective in PAIRED
        if parts > 1 and not pairs:
            do = "give rows of messages, of prompt and completion, or of text; or take objective: dpo"
            raise DataError(asked, f"a pair of a chosen and a rejected answer at {where}", do)
        if parts == 1 and pairs:
            found = f"a row at {where} that is no pair of a chosen and a rejected answer"
            raise DataError(asked, found, 'give rows {"prompt": ..., "chosen": ..., "rejected": ...}')

    def shelf(self, work: TokenizeWork, T: int | None, most: int | None) -> TokenShards:
        """Return the shards of at most so many rows, each checked as it is made: an error stops the run at once."""
        d, shelf = self.config.data, TokenShards(work.files)
        with closing(tokenize.tokenized(work, most)) as shards:
            for made in shards:
                shard, refused = shelf.add(made, most)
                self._check(shelf, shard, refused, T)
                if most is not None and shelf.total >= most:
                    break
        bad = [row for _, row in shelf.refused]
        tokenize.check_bad_share(bad, shelf.total, d.most_bad)
        self.refused += bad
        return shelf

    def streamed(self, work: TokenizeWork, origins: Sequence[tuple[int, float]], T: int | None) -> Streamed:
        """Return the rows, to be tokenized when they are read."""
        kept: Sequence[np.ndarray | None] = work.kept or [None] * len(work.files)
        d = self.config.data
        indexes = [index(path, keep, d.text_rows) for path, keep in zip(work.files, kept, strict=True)]
        first = frozenset(self.first_keys)
        return Streamed(work, indexes, origins, T, self.vocab, self.parts, first, d.max_samples)

    def _check(self, shelf: TokenShards, shard: Shard, refused: Sequence[tuple[int, BadRow]], T: int | None) -> None:
        """Raise the first error of a shard's rows, in their order."""
        d = self.config.data
        if shard.highest >= self.vocab:
            raise foreign(", ".join(map(str, shelf.files[:3])), shard.highest, self.vocab)
        if len(shard):
            self._suits(shard.parts, RowLocation(shelf.files[shard.files[0]], int(shard.lines[0])))
        first = refused[0][0] if refused and d.bad_rows == "error" else shelf.total
        if T is not None and d.too_long == "error":
            long = np.flatnonzero(shard.lengths() > T)[:1]
            rows = shard.numbers[long] + shelf.rows_before[-2]
            if len(rows) and rows[0] < first:
                raise overlong(shelf.where(int(rows[0])), int(shard.lengths()[long[0]]), T, pair=shard.parts > 1)
        if first < shelf.total:
            raise refused[0][1].error
        if shelf.total >= tokenize.EARLY_rows:
            tokenize.check_bad_share([row for _, row in shelf.refused], shelf.total, d.most_bad)

    def check_columns(self, train: Dataset | Streamed, held_out: Dataset | None) -> None:
        """Raise DataError for a key of `data.columns` that no row has: of streamed data no row of the first ones."""
        keys = Counter(train.counts.keys if isinstance(train, Dataset) else self.first_keys)
        keys.update(held_out.counts.keys if held_out is not None else {})
        for key, name in self.config.data.columns.items():
            if f"{key} -> {name}" not in keys and OTHER_KEYS not in keys:
                there = [k for k in keys if " -> " not in k]
                found = f"no row has {quoted(key)}" + (f"; not read are {_listed(there)}" if there else "")
                raise DataError(f"`data.columns: {{{key}: {name}}}`", found, "name a key of the rows, or leave it out")

    def evaluation(self, path: str, how: str) -> Dataset:
        """Return all of a file, to be evaluated on."""
        T = self.config.batch.seq
        work = self.work(readers.find_files(path, cache_root(self.config.data.cache)), clean=False)
        shelf = self.shelf(work, T if how == "error" else None, None)
        found = view(shelf, T=T, how=how)
        found.counts.keys = shelf.keys
        return found

    def sources(self, train: Dataset | Streamed, held_out: Dataset | None) -> Sources:
        """Return all that was read, with its counts in a line."""
        evaluated = train if held_out is None else held_out
        record = self.cleaned
        if isinstance(train, Dataset):
            summary = describe_counts(train.counts)
        else:
            summary = f"{len(train)} rows, tokenised while training"
            if record is not None:
                summary += f" ({record['rows'] - record['kept']['rows']} more cleaned away or bad)"
        fingerprint = train.fingerprint
        if held_out is not None and held_out is not train:
            summary += f"; held out: {describe_counts(held_out.counts)}"
            fingerprint += held_out.fingerprint
        keys, of = (train.counts.keys, "") if isinstance(train, Dataset) else (self.first_keys, "first ")
        rows = train.counts.rows if isinstance(train, Dataset) else self.first_rows
        if held_out is not None and held_out is not train:
            keys, rows = keys + held_out.counts.keys, rows + (0 if of else held_out.counts.rows)
        summary += describe_keys(keys, f"the {of}{rows} rows")
        if any(isinstance(row, Chat | Pair | Judged) for _, row in self._first[0]) and self.tokens.tagged():
            summary += "; the chat template's generation tags are not read: data.train_on decides what is learnt"
        names = sorted({name for origin in self.config.data.origins for name in readers.about(origin.path)})
        if names:
            summary += f"; not read as data: {', '.join(names)}"
        too_long = evaluated.counts.too_long if isinstance(evaluated, Dataset) else 0
        return Sources(train, held_out, fingerprint, summary, too_long, self.refused, record)


def describe_keys(keys: Mapping[str, int], rows: str) -> str:
    """Return the keys that are not read, and those that `data.columns` names, with how many rows have each."""
    named = {key: n for key, n in keys.items() if " -> " in key}
    unread = {key: n for key, n in keys.items() if key not in named}
    text = f"; not read, of {rows}: {_listed(unread, unread)}" if unread else ""
    return text + (f"; by data.columns: {_listed(named, named)}" if named else "")


def _listed(keys: Iterable[str], counts: Mapping[str, int] | None = None) -> str:
    listed = sorted(keys, key=lambda key: (-(counts or {}).get(key, 0), key))
    shown = [quoted(key) + (f" ({counts[key]})" if counts else "") for key in listed[:NAMED_KEYS]]
    return ", ".join(shown) + (f" and {len(listed) - NAMED_KEYS} more" if len(listed) > NAMED_KEYS else "")


def describe_stream(c: Counts) -> str:
    """Return the counts of streamed rows in a line."""
    losses = ", ".join(f"{n} {what}" for n, what in _losses(c) if n) or "nothing lost"
    return f"{c.rows} rows read: {losses}{describe_keys(c.keys, 'them')}"


def _losses(c: Counts) -> tuple[tuple[int, str], ...]:
    return (
        (c.cleaned, "cleaned away"), (c.refused, "bad and set aside"), (c.too_long, "too long"),
        (c.truncated, "truncated"), (c.dropped, "pieces dropped"), (c.targets_lost, "targets lost"),
        (c.marked, "with special tokens written in their text"), (c.known, "also trained on"),
    )  # fmt: skip


def describe_counts(c: Counts) -> str:
    """Return the counts of a dataset in a line, with all that was left out or cut."""
    losses = ", ".join(f"{n} {what}" for n, what in _losses(c) if n)
    text = f"{c.documents} documents, {c.tokens} tokens, {c.targets} targets"
    return f"{text} (of {c.rows + c.cleaned} rows: {losses})" if losses else text
