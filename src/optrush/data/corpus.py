"""Documents in memory: files read, tokenised, cut to length, counted, fingerprinted, and split into two parts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from optrush.data.batch import Document
from optrush.data.read import Where, parse, read
from optrush.errors import DataError

if TYPE_CHECKING:
    from optrush.data.chat import Tokens

TOO_LONG = ("error", "split", "drop", "truncate")


class Source(Protocol):
    """Documents by number; `length` is asked for all of them before the first `document`."""

    def __len__(self) -> int: ...

    def length(self, i: int) -> int: ...

    def document(self, i: int) -> Document: ...


@dataclass
class Counts:
    """What reading did. Nothing leaves the data without being counted here."""

    rows: int = 0  # rows read
    too_long: int = 0  # rows longer than T, whatever was done with them
    dropped: int = 0  # documents, or pieces of one, that were left out
    targets_lost: int = 0  # target tokens that were in the rows and are not in the corpus
    documents: int = 0
    tokens: int = 0
    targets: int = 0


@dataclass(frozen=True)
class Corpus:
    """Tokenised documents in the order of their rows; `origin[i]` is the number of the row document i comes from."""

    documents: Sequence[Document]
    origin: Sequence[int]
    counts: Counts
    fingerprint: str = field(default="", compare=False)  # SHA-256 over ids and targets
    long: frozenset[int] = frozenset()  # the rows that were longer than T

    def __len__(self) -> int:
        return len(self.documents)

    def length(self, i: int) -> int:
        return len(self.documents[i])

    def document(self, i: int) -> Document:
        return self.documents[i]


@dataclass(frozen=True)
class Random:
    """n documents of exactly T random tokens, made when asked for, each from (seed, its number) alone."""

    n: int
    T: int
    vocab: int
    seed: int

    def __len__(self) -> int:
        return self.n

    def length(self, i: int) -> int:
        return self.T

    def document(self, i: int) -> Document:
        assert 0 <= i < self.n
        # Raw words, because numpy keeps those the same between its versions, and not what `integers` makes of them.
        raw = np.random.PCG64(np.random.SeedSequence([self.seed, i])).random_raw(self.T)
        ids = ((raw >> np.uint64(32)) * np.uint64(self.vocab)) >> np.uint64(32)
        targets = np.ones(self.T, bool)
        targets[0] = False
        return Document(ids.astype(np.int32), targets)

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(repr((self.n, self.T, self.vocab, self.seed)).encode()).hexdigest()


def fit(document: Document, T: int, how: str, where: Where, counts: Counts) -> list[Document]:
    """The document as pieces of at most T tokens, with what was cut or left out added to `counts`.

    how: `error` refuses a document longer than T, `split` cuts it, `drop` leaves it out, `truncate` keeps its start.
    """
    assert how in TOO_LONG and T > 1, (how, T)
    n = len(document)
    if n <= T:
        return [document]
    counts.too_long += 1
    if how == "error":
        raise DataError(
            f"documents of at most {T} tokens (batch.seq)",
            f"{n} tokens at {where}",
            "raise batch.seq, or choose data.too_long: split, drop or truncate",
        )
    if how == "drop":
        counts.dropped += 1
        counts.targets_lost += int(document.targets.sum())
        return []
    kept: list[Document] = []
    for start in range(0, n if how == "split" else 1, T):
        targets = document.targets[start : start + T].copy()
        targets[0] = False  # its context is gone
        if targets.any():
            kept.append(Document(document.ids[start : start + T], targets))
        else:
            counts.dropped += 1
    counts.targets_lost += int(document.targets.sum()) - sum(int(piece.targets.sum()) for piece in kept)
    return kept


def load(
    files: Iterable[Path],
    tokens: Tokens,
    *,
    train_on: str,
    T: int,
    too_long: str = "error",
    max_samples: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Corpus:
    """All rows of the files, in order, as documents.

    Args:
        max_samples: reading stops after so many rows.
        progress: called with the number of rows read so far, after each.
    """
    assert max_samples is None or max_samples > 0
    paths = [Path(file) for file in files]
    counts = Counts()
    documents: list[Document] = []
    origin: list[int] = []
    long: set[int] = set()
    for path in paths:
        if counts.rows == max_samples:
            break
        for where, found in read(path):
            before = counts.too_long
            pieces = fit(tokens.document(parse(where, found), train_on, where), T, too_long, where, counts)
            if counts.too_long > before:
                long.add(counts.rows)
            documents += pieces
            origin += [counts.rows] * len(pieces)
            counts.rows += 1
            if progress is not None:
                progress(counts.rows)
            if counts.rows == max_samples:
                break
    if not documents:
        raise DataError(
            f"training data from {', '.join(map(str, paths)) or 'no file'}",
            f"nothing is left of {counts.rows} rows: {counts.too_long} were longer than {T} tokens",
            "raise batch.seq, or choose data.too_long: split",
        )
    return replace(_corpus(documents, origin, counts), long=frozenset(long))


def split(corpus: Corpus, fraction: float, seed: int) -> tuple[Corpus, Corpus]:
    """(training part, evaluation part) with `fraction` of the rows in the second; a row's pieces stay together.

    What reading left out or cut is counted in the first part, so that the counts of both add up to the whole.
    """
    rows = sorted(set(corpus.origin))
    if not 0 < fraction < 1:
        raise DataError(f"data.eval: {fraction}", "not a fraction between 0 and 1", "set a fraction such as 0.1")
    n = round(fraction * len(rows))
    if not 0 < n < len(rows):
        raise DataError(
            f"{fraction} of the data for evaluation (data.eval)",
            f"{len(rows)} rows, of which that is {n}",
            "change the fraction so that both parts get a row, or name a file of its own",
        )
    held = {rows[i] for i in permutation(len(rows), seed, 0)[:n]}
    parts: list[Corpus] = []
    for wanted in (False, True):
        at = [i for i, row in enumerate(corpus.origin) if (row in held) == wanted]
        long = len(held & corpus.long)
        counts = Counts(rows=n, too_long=long)
        if not wanted:
            whole = corpus.counts
            counts = replace(whole, rows=whole.rows - n, too_long=whole.too_long - long)
        parts.append(_corpus([corpus.documents[i] for i in at], [corpus.origin[i] for i in at], counts))
    return parts[0], parts[1]


def permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """An order of n things that depends on (seed, epoch) alone, on any machine and with any version of numpy."""
    raw = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(n)
    return np.argsort(raw, kind="stable")


def _corpus(documents: Sequence[Document], origin: Sequence[int], counts: Counts) -> Corpus:
    digest = hashlib.sha256()
    for document in documents:
        digest.update(len(document).to_bytes(8, "little"))
        digest.update(document.ids.astype("<i4").tobytes())
        digest.update(np.packbits(document.targets).tobytes())
    counts = replace(
        counts,
        documents=len(documents),
        tokens=sum(map(len, documents)),
        targets=sum(int(document.targets.sum()) for document in documents),
    )
    return Corpus(documents, origin, counts, digest.hexdigest())
