"""Rows by number, tokenised when asked for: for data that shall not, or cannot, be tokenised before.

One pass over the files notes where each row begins, 8 bytes a row; from then on any row can be read alone, by any
process that has a copy of this. Rows are numbered as in the cache, so the same ones are held out.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from optrush.data import files
from optrush.data.cache import Work, root, silent
from optrush.data.corpus import Counts, Shelf, fit
from optrush.data.document import Document
from optrush.data.read import PARQUET, TEXT, Chunk, attempts, chunks, form
from optrush.data.rows import Row, Where
from optrush.data.shard import Builder, Refused, mixed
from optrush.data.tokenising import BATCH_rows, SHARD_tok, identity, meaning
from optrush.errors import DataError
from optrush.objectives import learnt

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

    def read(self, wanted: Iterable[int]) -> Iterator[tuple[int, Where, dict[str, Any] | DataError]]:
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
    refused: list[Refused] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.work = replace(self.work, say=silent)  # what says something belongs to the process that began
        self._before = np.cumsum([0, *map(len, self.indexes)])
        self.total = int(min(self._before[-1], self.limit or self._before[-1]))

    def __len__(self) -> int:
        return self.total if self.rows is None else len(self.rows)

    @property
    def most_bad(self) -> float:
        """The share of the rows that may be bad."""
        return self.work.run.data.most_bad

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
        data = self.work.run.data
        said = [
            files.fingerprint(self.work.files, root(data.cache)), identity(self.work.tokens), learnt(self.work.run),
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

    def shelf(self, held: np.ndarray) -> Shelf:
        """The rows of a mask (rows,) bool, tokenised now and kept in memory."""
        numbers, shelf, builder = np.flatnonzero(held), Shelf(self.work.files), Builder()
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

    def made(self, numbers: Sequence[int]) -> list[tuple[int, Where, tuple[Document, ...] | DataError]]:
        """(file, place, documents or why there are none) of rows of the data, in the order asked for."""
        file = (np.searchsorted(self._before, numbers, "right") - 1).tolist()
        found: dict[int, tuple[int, Where, Row | DataError]] = {}
        for f in sorted(set(file)):
            before = int(self._before[f])
            wanted = [n - before for n, of in zip(numbers, file, strict=True) if of == f]
            for n, where, row in self.indexes[f].read(wanted):
                found[before + n] = f, where, row if isinstance(row, DataError) else meaning(where, row)
        good = {n: (where, row) for n, (_, where, row) in found.items() if not isinstance(row, DataError)}
        made = dict(zip(good, self.work.tokens.batch(list(good.values()), learnt(self.work.run)), strict=True))
        if len(found) < len(set(numbers)):
            asked = f"a row of {', '.join(map(str, self.work.files[:3]))}"
            raise DataError(asked, "it is not where it was", "leave the files alone while a run reads them")
        return [(found[n][0], found[n][1], made.get(n) or found[n][2]) for n in numbers]  # type: ignore[misc]

    def _samples(self, where: Where, made: tuple[Document, ...] | DataError) -> list[tuple[Document, ...]]:
        self.counts.rows += 1
        if isinstance(made, DataError):
            self._refuse(where, made)
            return []
        if len(made) != self.parts:
            raise mixed(where)
        highest = max(int(document.ids.max()) for document in made)
        if highest >= self.vocab:
            raise foreign(str(where), highest, self.vocab)
        return [made] if self.T is None else fit(made, self.T, self.work.run.data.too_long, where, self.counts)

    def _refuse(self, where: Where, error: DataError) -> None:
        data = self.work.run.data
        if data.bad_rows == "error":
            raise error
        self.counts.refused += 1
        self.refused.append(Refused(where, error))


def foreign(where: str, highest: int, vocab: int) -> DataError:
    """The error of a tokenizer that is not the model's."""
    do = "use the tokenizer that belongs to the model"
    return DataError(f"to embed the tokens of {where}", f"token {highest}, and a model of {vocab} tokens", do)
