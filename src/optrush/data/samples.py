"""Access samples by number: views on the shards of tokenized files, and documents of random tokens.

A sample is a document, a piece of one, or the two documents of a pair. It takes 32 bytes of memory: the start of its
tokens, their number, the number of targets, and its row. The documents stay uncut in the shards (memory-mapped files or
arrays) and are cut to T when they are read.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from optrush.config import Config
from optrush.data import tokenize
from optrush.data.chat_template import Tokens
from optrush.data.images import COLUMNS
from optrush.data.schema import Document, RowLocation, check_kind
from optrush.data.strict_json import quoted
from optrush.data.tokenize import BadRow, Parsed, Shard
from optrush.errors import DataError
from optrush.objectives import learnt

TOO_LONG = ("error", "split", "drop", "truncate")
QUARANTINE = "data.bad_rows: quarantine"
NAMED_KEYS = 12  # keys that a summary names
OPEN = 128  # mapped shards at a time: each holds a file descriptor

Sample = tuple[int, tuple[Document, ...]]  # its number, its documents


class SampleChunk(NamedTuple):
    """The samples of some numbers, in order; a streamed row has one, several or none."""

    samples: list[Sample]
    rows: int  # rows read
    refused: Sequence[BadRow] = ()
    counts: Counts | None = None  # of these rows, for a streamed source


class SampleSource(Protocol):
    """Samples by number: each is one document or a pair of two; if the source cuts, of at most T tokens."""

    @property
    def tokenized(self) -> bool:
        """Whether all samples are tokenized. If not, only `read` returns documents, and numbers count rows."""

    @property
    def parts(self) -> int:
        """Documents per sample: 1, or 2 for pairs."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def spans(self) -> tuple[tuple[int, float], ...]:
        """(samples, weight) of each origin, in order."""

    def __len__(self) -> int: ...

    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each sample, over its documents, (N,) int64."""

    def targets(self) -> np.ndarray:
        """Return the number of targets of each sample, (N,) int64."""

    def documents(self, i: int) -> tuple[Document, ...]: ...

    def read(self, numbers: Sequence[int]) -> SampleChunk:
        """Return the samples of these numbers."""


class LiveSource(SampleSource, Protocol):
    """Samples whose lengths are known only once they are read."""

    most_truncated: float  # the largest allowed share of truncated rows
    counts: Counts  # of the first rows


@dataclass
class Counts:
    """Counts of the rows read. Every row or token that is dropped is counted here."""

    rows: int = 0  # rows read, except those that cleaning removed
    refused: int = 0  # bad rows set aside
    cleaned: int = 0  # rows that cleaning removed
    marked: int = 0  # plain texts that contain special tokens as text, among all rows tokenized
    too_long: int = 0  # rows longer than T, however they were treated
    truncated: int = 0  # rows that lost their end
    dropped: int = 0  # documents, or pieces of one, dropped
    targets_lost: int = 0  # target tokens that are not in the dataset
    documents: int = 0
    images: int = 0
    tokens: int = 0
    targets: int = 0
    known: int = 0  # held-out documents that are also in the training part
    keys: Counter[str] = field(default_factory=Counter)  # number of rows with each key that `parse_row` noted

    def add(self, other: Counts) -> None:
        """Add the counts of other rows."""
        for count in fields(self):
            setattr(self, count.name, getattr(self, count.name) + getattr(other, count.name))


@dataclass
class TokenShards:
    """The shards of some data, in order; a row's number counts through all of them."""

    files: Sequence[Path]
    made: list[Path | Shard] = field(default_factory=list)
    rows_before: list[int] = field(default_factory=lambda: [0])
    tokens_before: list[int] = field(default_factory=lambda: [0])
    parts: int = 1
    cleaned: int = 0
    marked: int = 0
    keys: Counter[str] = field(default_factory=Counter)  # as in Counts
    refused: list[tuple[int, BadRow]] = field(default_factory=list)
    total: int = 0  # rows of the data: all rows in the shards, or a limited number of them
    _open: dict[int, Shard] = field(default_factory=dict)

    def add(self, made: Path | Shard, most: int | None) -> tuple[Shard, list[tuple[int, BadRow]]]:
        """Append the next shard; return it and its refused rows by number. The data has at most `most` rows."""
        shard = tokenize.open_shard(made) if isinstance(made, Path) else made
        before = self.rows_before[-1]
        if len(shard):
            if self.tokens_before[-1] and shard.parts != self.parts:
                raise tokenize.mixed_kinds(RowLocation(self.files[shard.files[0]], int(shard.lines[0])))
            self.parts = shard.parts
        self.made.append(made)
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
        """Return shard k; at most OPEN mapped ones stay open."""
        made = self.made[k]
        if isinstance(made, Shard):
            return made
        if k not in self._open:
            if len(self._open) >= OPEN:
                del self._open[next(iter(self._open))]
            self._open[k] = tokenize.open_shard(made)
        return self._open[k]

    def names(self) -> list[str]:
        """Return a digest of each shard."""
        return [m.stem.rsplit("-", 1)[1] if isinstance(m, Path) else tokenize.shard_digest(m) for m in self.made]

    def starts(self) -> np.ndarray:
        """Return the first token of each uncut sample, counted through all shards, (samples,) int64."""
        shards = map(self.shard, range(len(self.made)))
        return np.concatenate([s.starts[: -1 : s.parts] + n for s, n in zip(shards, self.tokens_before)])

    def rows_with_samples(self) -> list[int]:
        """Return the numbers of the rows that have samples, ascending."""
        numbers = [self.shard(k).numbers + n for k, n in zip(range(len(self.made)), self.rows_before)]
        return list(map(int, np.unique(np.concatenate([np.zeros(0, np.int64), *numbers]))))

    def training(
        self, held: np.ndarray, named: str, T: int | None, how: str, origins: Sequence[tuple[int, float]]
    ) -> Dataset:
        """Return the samples of all rows except those in the mask `held`, (rows,) bool."""
        train = view(self, T=T, how=how, keep=~held, named=f"but {named}", origins=origins)
        train.counts.cleaned, train.counts.marked, train.counts.keys = self.cleaned, self.marked, self.keys
        return train

    def held_out(self, held: np.ndarray, named: str, T: int, how: str) -> Dataset:
        """Return the samples of the rows in the mask `held`, (rows,) bool."""
        return view(self, T=T, how=how, keep=held, named=named)

    def where(self, row: int) -> RowLocation:
        """Return the location of a row that has a sample."""
        k = bisect_right(self.rows_before, row) - 1
        shard = self.shard(k)
        at = int(np.searchsorted(shard.numbers, row - self.rows_before[k]))
        return RowLocation(self.files[shard.files[at]], int(shard.lines[at]))


@dataclass(frozen=True)
class Dataset:
    """The samples of a view on shards; sample i comes from row number `row[i]`."""

    shelf: TokenShards
    at: np.ndarray  # (N,) int64: the first token, counted through all shards
    length: np.ndarray  # (N,) int64
    learnt: np.ndarray  # (N,) int64
    row: np.ndarray  # (N,) int64
    first: np.ndarray | None  # (N,) int64: tokens of a pair's first document
    counts: Counts
    identity: tuple[object, ...]  # the settings that determine the samples, besides the shards
    spans: tuple[tuple[int, float], ...]
    weighted: bool  # some shard has weights: then every document gets some, so that all batches have the same tensors
    tokenized = True

    @property
    def parts(self) -> int:
        return self.shelf.parts

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the shards and the settings that determine the samples."""
        return hashlib.sha256(json.dumps([*self.shelf.names(), *self.identity]).encode()).hexdigest()

    def describe(self) -> str:
        """Return the counts as a line of text."""
        return describe_counts(self.counts)

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
            return (shard.document(start, end, self.weighted, self.shelf.files),)
        middle = start + int(self.first[i])
        return shard.document(start, middle), shard.document(middle, end)

    def read(self, numbers: Sequence[int]) -> SampleChunk:
        return SampleChunk([(n, self.documents(n)) for n in numbers], len(numbers))

    def where(self, i: int) -> RowLocation:
        """Return the location of sample i's row."""
        return self.shelf.where(int(self.row[i]))

    def digests(self) -> np.ndarray:
        """Return a digest of the tokens of each uncut sample, (uncut samples,) int64."""
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
    some: bool = True,
) -> Dataset:
    """Return the samples of the rows in `keep`, of at most T tokens each; T None: uncut.

    Args:
        how: treatment of longer samples: `error` raises, `split` cuts, `drop` drops, `truncate` keeps the start.
        keep: (rows,) bool; None: all.
        named: the name of these rows, for the fingerprint.
        origins: (files, weight) of each origin, in order; empty: all files are one origin.
        some: raise an error if no sample is left.

    Raises DataError: a row is too long, or no sample is left.
    """
    assert how in TOO_LONG and (T is None or T > 1), (how, T)
    weights = [weight for _, weight in origins] or [1.0]
    origin_of = np.repeat(np.arange(len(weights)), [n for n, _ in origins] or [len(shelf.files)])
    counts = Counts(rows=shelf.total if keep is None else int(keep.sum()))
    counts.refused = sum(keep is None or bool(keep[number]) for number, _ in shelf.refused)
    columns = 5 if shelf.parts > 1 else 4  # start, tokens, targets, row, tokens of a pair's first document
    parts, sizes = [np.zeros((columns, 0), np.int64)], np.zeros(len(weights), np.int64)
    weighted = seen = False
    for k in range(len(shelf.made)):
        shard = shelf.shard(k)
        weighted, seen = weighted or len(shard.weights) > 0, seen or len(shard.images) > 0
        rows = shard.numbers + shelf.rows_before[k]
        chosen = np.flatnonzero(rows < shelf.total)
        if keep is not None:
            chosen = chosen[keep[rows[chosen]]]
        sample, pieces = _pieces(shard, chosen, T, how, shelf.files, counts)
        places = shard.images[::COLUMNS]
        counts.images += int((places.searchsorted(pieces[0] + pieces[1]) - places.searchsorted(pieces[0])).sum())
        pieces[0] += shelf.tokens_before[k]
        parts.append(np.vstack([pieces[:3], rows[sample], pieces[3]])[:columns])
        sizes += np.bincount(origin_of[shard.files[sample]], minlength=len(weights))
    at, length, targets, row, *first = np.concatenate(parts, axis=1)
    counts.documents, counts.tokens, counts.targets = len(at) * shelf.parts, int(length.sum()), int(targets.sum())
    if some and not len(at):
        asked = f"rows from {', '.join(map(str, shelf.files[:3]))}"
        found = f"nothing is left of {counts.rows} rows: {counts.too_long} were longer than {T} tokens"
        fixed = shelf.parts > 1 or how == "split"
        more = ", or lower data.max_pixels" if seen else "" if fixed else ", or choose data.too_long: split"
        raise DataError(asked, found, f"raise batch.seq{more}")
    spans = tuple((int(n), weight) for n, weight in zip(sizes, weights, strict=True) if n)
    few, weighed = shelf.total < shelf.rows_before[-1], any(weight != 1 for weight in weights)
    identity = named, few and shelf.total, counts.too_long and (T, how), weighed and spans
    return Dataset(shelf, at, length, targets, row, first[0] if first else None, counts, identity, spans, weighted)


def _pieces(
    shard: Shard, chosen: np.ndarray, T: int | None, how: str, files: Sequence[Path], counts: Counts
) -> tuple[np.ndarray, np.ndarray]:
    """Return ((N,) the sample of each piece, (4, N) int64: start, tokens, targets, tokens of the first document)."""
    starts, parts = shard.starts, shard.parts
    first = starts[1::parts] - starts[:-1:parts]
    documents = np.vstack([starts[:-1:parts], shard.lengths(), shard.learnt, first])[:, chosen].astype(np.int64)
    if T is None or not (documents[1] > T).any():
        return chosen, documents
    long = np.flatnonzero(documents[1] > T)
    if how == "error" or (parts > 1 and how != "drop"):
        i = chosen[long[0]]
        where = RowLocation(files[shard.files[i]], int(shard.lines[i]))
        raise overlong(where, int(documents[1, long[0]]), T, pair=parts > 1, images=len(shard.images) > 0)
    cut = [_cuts(shard.document(at, at + n), T, how, counts) for at, n in documents[:2, long].T.tolist()]
    times = np.ones(len(chosen), np.int64)
    times[long] = [piece.shape[1] for piece in cut]
    sample = np.repeat(np.arange(len(chosen)), times)
    pieces, of_long = documents[:, sample], documents[1, sample] > T
    fresh = np.concatenate(cut, axis=1)
    pieces[0, of_long] += fresh[0]
    pieces[1:3, of_long] = fresh[1:]
    return chosen[sample], pieces


def _cuts(document: Document, T: int, how: str, counts: Counts) -> np.ndarray:
    """Return start, tokens and targets of the pieces of a document longer than T, (3, P) int64; adds to `counts`.

    A piece has no context before it, so its first token is not a target; pieces without targets are dropped. Images
    stay uncut: a truncated document ends before the first image that does not fit.
    """
    counts.too_long += 1
    assert how != "split" or not document.images
    most = min([T, *(image.at for image in document.images if image.at + image.tokens > T)])
    targets = document.targets
    before, targets = int(targets.sum()), targets[: {"split": None, "truncate": most, "drop": 0}[how]]
    begin = np.arange(0, len(targets), T)
    learnt = np.add.reduceat(targets, begin, dtype=np.int64) - targets[begin] if len(begin) else begin
    keep = learnt > 0
    counts.dropped += int((~keep).sum()) if how != "drop" else 1
    counts.truncated += how == "truncate" and bool(keep.any())
    counts.targets_lost += before - int(learnt.sum())
    return np.vstack([begin, np.minimum(T, len(targets) - begin), learnt])[:, keep]


@dataclass(frozen=True)
class Mismatched(Dataset):
    """Samples of two documents: the sample itself, and its prompt followed by another sample's answer.

    From the second, KTO estimates the divergence of the model from its reference. The prompt is all tokens before the
    first target. The other sample is half the dataset away, because answers to the same prompt are usually neighbors.
    """

    whole: Dataset  # all samples, including those that are too long with their mismatched document
    own: np.ndarray  # (N,) int64: numbers in `whole`
    other: np.ndarray  # (N,) int64: numbers of the samples that give the other answer
    prompts: np.ndarray  # (len(whole),) int64: tokens before the first target of each sample of `whole`

    @property
    def parts(self) -> int:
        return 2

    @cached_property
    def fingerprint(self) -> str:
        return f"{self.whole.fingerprint} mismatched"

    def lengths(self) -> np.ndarray:
        return both_lengths(self.whole, self.prompts, self.own, self.other)

    def targets(self) -> np.ndarray:
        return np.asarray(self.whole.learnt[self.own] + self.whole.learnt[self.other])

    def documents(self, i: int) -> tuple[Document, ...]:
        number, other = int(self.own[i]), int(self.other[i])
        (document,), (mismatch,) = self.whole.documents(number), self.whole.documents(other)
        n, m = int(self.prompts[number]), int(self.prompts[other])
        ids = np.concatenate([document.ids[:n], mismatch.ids[m:]])
        targets = np.concatenate([document.targets[:n], mismatch.targets[m:]])
        return document, Document(ids, targets, document.desirable)


def pair_mismatched(samples: Dataset, T: int, how: str) -> Mismatched:
    """Return labelled answers with their mismatched documents, both in a row of at most T tokens.

    Args:
        how: treatment of longer rows: `error` raises, `drop` drops them, counted as too long.

    Raises DataError: a row is too long, or no row is left.
    """
    n = len(samples)
    prompts, numbers = _prompts(samples), np.arange(n)
    other = (numbers + n // 2) % n
    long = both_lengths(samples, prompts, numbers, other) > T
    if long.any() and how == "error":
        i = int(np.flatnonzero(long)[0])
        raise overlong(samples.where(i), int(both_lengths(samples, prompts, numbers, other)[i]), T, pair=True)
    if long.all():
        asked, found = "answers and mismatched answers in a row", f"all {n} are longer than {T} tokens"
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
    kept["counts"] = counts
    kept["spans"] = tuple(span for span in spans if span[0])
    return Mismatched(**kept, whole=samples, own=keep, other=other[keep], prompts=prompts)


def both_lengths(samples: Dataset, prompts: np.ndarray, own: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the tokens of each sample and its mismatched document together."""
    length = samples.length
    return np.asarray(length[own] + prompts[own] + length[other] - prompts[other])


def _prompts(samples: Dataset) -> np.ndarray:
    """Return the number of tokens before the first target of each sample."""
    return np.array([int(samples.documents(i)[0].targets.argmax()) for i in range(len(samples))], np.int64)


def overlong(where: RowLocation, n: int, T: int, *, pair: bool, images: bool = False) -> DataError:
    """Return the error for a row that is longer than T."""
    what, ways = ("pairs", "drop") if pair else ("documents", "split, drop or truncate")
    ways = "drop or truncate, or lower data.max_pixels" if images else ways
    do = f"raise batch.seq, or set data.too_long: {ways}"
    return DataError(f"{what} of at most {T} tokens (batch.seq)", f"{n} tokens at {where}", do)


def truncated_rows(truncated: int, rows: int, most: float, one: str = "") -> DataError:
    """Return the error for a larger share of truncated rows than `most`; `one` shows one of them."""
    asked = f"at most {most:.1%} of the rows without their end (data.most_truncated)"
    found = f"{truncated} of {rows} rows ({truncated / rows:.1%}) are longer than batch.seq and truncated{one}"
    return DataError(asked, found, "raise batch.seq, or set data.too_long: drop or split")


def permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """Return a permutation of n from (seed, epoch) alone, the same on every machine and with every version of numpy."""
    raw = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(n)
    return np.argsort(raw, kind="stable")


@dataclass(frozen=True)
class Random:
    """n documents of exactly T random tokens, generated when read, each from (seed, its number) alone."""

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
        # Raw words: numpy guarantees the same ones in all versions, which it does not for `integers`.
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


# --- Rows to shards in memory, and checks of all shards.


@dataclass(frozen=True)
class Maker:
    """Tokenize rows and check each shard as it is made: an error stops the run at once."""

    config: Config
    tokens: Tokens
    vocab: int

    def shards(
        self, entries: Iterable[Parsed], files: Sequence[Path], T: int | None, most: int | None = None
    ) -> TokenShards:
        """Return at most `most` rows of the files as shards in memory."""
        shelf = TokenShards(files)
        for shard in tokenize.shards(entries, self.tokens, learnt(self.config), most):
            self.add(shelf, shard, T, most)
        return shelf

    def add(self, shelf: TokenShards, made: Path | Shard, T: int | None, most: int | None = None) -> None:
        """Append the next shard and raise the first error of its rows. The data has at most `most` rows."""
        d = self.config.data
        shard, refused = shelf.add(made, most)
        if shard.highest >= self.vocab:
            do = "use the tokenizer that belongs to the model"
            found = f"token {shard.highest}, but the model has {self.vocab} tokens"
            raise DataError(f"to embed the tokens of {', '.join(map(str, shelf.files[:3]))}", found, do)
        if len(shard):
            where = RowLocation(shelf.files[shard.files[0]], int(shard.lines[0]))
            check_kind(self.config.objective, shard.parts > 1, where)
        first = refused[0][0] if refused and d.bad_rows == "error" else shelf.total
        if T is not None and d.too_long == "error":
            long = np.flatnonzero(shard.lengths() > T)[:1]
            rows = shard.numbers[long] + shelf.rows_before[-2]
            if len(rows) and rows[0] < first:
                n, seen = int(shard.lengths()[long[0]]), len(shard.images) > 0
                raise overlong(shelf.where(int(rows[0])), n, T, pair=shard.parts > 1, images=seen)
        if first < shelf.total:
            asked, found, do = (getattr(refused[0][1].error, name) for name in ("asked", "found", "do"))
            raise DataError(asked, found, do if QUARANTINE in do else f"{do}; or set bad rows aside: {QUARANTINE}")
        if shelf.total >= tokenize.EARLY_rows:
            tokenize.check_bad_share([row for _, row in shelf.refused], shelf.total, d.most_bad)


# --- Summaries in words.


def describe_keys(keys: Mapping[str, int], rows: str) -> str:
    """Return text about the unread keys, and the keys in `data.columns`, with the number of rows that have each."""
    named = {key: n for key, n in keys.items() if " -> " in key and key != tokenize.LOSSY}
    unread = {key: n for key, n in keys.items() if " -> " not in key}
    text = f"; unread keys in {rows}: {listed(unread, unread)}" if unread else ""
    if lossy := keys.get(tokenize.LOSSY):
        text += f"; {lossy} texts have characters without a token"
    return text + (f"; by data.columns: {listed(named, named)}" if named else "")


def listed(keys: Iterable[str], counts: Mapping[str, int] | None = None) -> str:
    """Return the keys as text, the most frequent first."""
    ordered = sorted(keys, key=lambda key: (-(counts or {}).get(key, 0), key))
    shown = [quoted(key) + (f" ({counts[key]})" if counts else "") for key in ordered[:NAMED_KEYS]]
    return ", ".join(shown) + (f" and {len(ordered) - NAMED_KEYS} more" if len(ordered) > NAMED_KEYS else "")


def describe_stream(c: Counts) -> str:
    """Return the counts of streamed rows as a line of text."""
    losses = ", ".join(f"{n} {what}" for n, what in _losses(c) if n) or "nothing lost"
    return f"{c.rows} rows read: {losses}{describe_keys(c.keys, 'them')}"


def _losses(c: Counts) -> tuple[tuple[int, str], ...]:
    return (
        (c.cleaned, "filtered out"), (c.refused, "bad and set aside"), (c.too_long, "too long"),
        (c.truncated, "truncated"), (c.dropped, "pieces dropped"), (c.targets_lost, "targets lost"),
        (c.marked, "with special tokens written in their text"), (c.known, "also trained on"),
    )  # fmt: skip


def describe_counts(c: Counts) -> str:
    """Return the counts of a dataset as a line of text, with everything dropped or cut."""
    losses = ", ".join(f"{n} {what}" for n, what in _losses(c) if n)
    text = f"{c.documents} documents, {c.tokens} tokens, {c.targets} targets"
    text += f", {c.images} images" if c.images else ""
    return f"{text} (of {c.rows + c.cleaned} rows: {losses})" if losses else text
