"""From a run's `data:` to samples: files, the recipes sample or random tokens, and what is held out of them.

Every rank calls this; none waits for another in here but for a file lock, and no collective runs.
"""

from __future__ import annotations

import glob
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from optrush.config import Run
from optrush.data import files, quarantine, recipes
from optrush.data.cache import Say, Work, jobs, root, silent, tokenised
from optrush.data.chat import Tokens
from optrush.data.corpus import Corpus, Counts, Random, Shelf, Source, fit, held_rows, overlong, view
from optrush.data.document import Document
from optrush.data.kept import Kept, kept
from optrush.data.probe import SAMPLES, probe
from optrush.data.rows import Row, Where
from optrush.data.shard import Refused, Shard
from optrush.data.streamed import Streamed, foreign, index
from optrush.data.tokenising import parsed
from optrush.errors import DataError
from optrush.objectives import learnt

SAMPLE_ROWS = 1000  # conversations of a sample, unless data.max_samples says otherwise
RANDOM_DOCUMENTS = 4096  # of `data.random: true`


@dataclass(frozen=True)
class Sources:
    train: Source | Streamed
    held_out: Source | None
    fingerprint: str
    summary: str  # counts, for people
    too_long: int = 0  # rows longer than T, of what is evaluated (of all, where nothing is held out)
    refused: Sequence[Refused] = ()  # bad rows, set aside
    cleaned: dict[str, Any] | None = None  # the record of data.clean


def read_sources(
    run: Run,
    tokens: Tokens | None,
    vocab: int,
    progress: Say | None = None,
    data: str | None = None,
    cut: bool = True,
) -> Sources:
    """Reads and tokenises, or finds what was tokenised before.

    Args:
        tokens: the tokenizer; None only for random tokens.
        vocab: ids that the model has an embedding for.
        progress: is told a line now and then, where it takes long.
        data: a file to read as the held-out part instead of what the run says (`optrush eval --data`).
        cut: False leaves training documents longer than T whole, for a layout that cuts them itself.

    Raises:
        DataError: with file and line.
    """
    d, T = run.data, run.batch.seq
    if d.random is not None and data is None:
        return _random(run, vocab)
    assert tokens is not None
    reading = Reading(run, tokens, vocab, progress or silent)
    how = d.too_long if cut else "split"  # of what is evaluated: no row of T tokens holds more
    if data is not None:
        only = reading.evaluation(data, how)
        return reading.sources(only, only)
    if isinstance(d.eval, str) and not (Path(d.eval).exists() or glob.glob(d.eval, recursive=True)):
        raise DataError(f"`data.eval: {d.eval}`", "no such file", "give a JSONL file, or a fraction such as 0.1")
    limit, held_out = T if cut else None, None
    with _places(run) as (paths, origins):
        work = reading.work(paths, d.clean is not None)
        reading.look(work, limit)
        rows = reading.streamed(work, origins, limit) if d.stream else reading.shelf(work, limit, d.max_samples)
        held = np.zeros(rows.total, bool)
        if isinstance(d.eval, float):
            held = held_rows(rows.total, d.eval, run.seed)
        named = f"{held.sum()} of {rows.total} by {run.seed}" if held.any() else "none"
        train: Corpus | Streamed
        if isinstance(rows, Streamed):
            train = rows
            if held.any():
                train = rows.without(held, named)
                held_out = view(rows.shelf(held), T=T, how=how)
                reading.refused += rows.refused
        else:
            train = view(rows, T=limit, how=d.too_long, keep=~held, named=f"but {named}", origins=origins)
            train.counts.cleaned, train.counts.marked = rows.cleaned, rows.marked
            if train.counts.truncated:
                reading.look_again(train.counts)
            if held.any():
                held_out = view(rows, T=T, how=how, keep=held, named=named)
        if isinstance(d.eval, str):
            held_out = reading.evaluation(d.eval, how)
    return reading.sources(train, held_out)


def _random(run: Run, vocab: int) -> Sources:
    d, T = run.data, run.batch.seq
    n = RANDOM_DOCUMENTS if d.random is True or d.random is None else d.random
    n = min(n, d.max_samples or n)
    train = Random(n, T, vocab, run.seed)
    held = Random(max(1, round(n * d.eval)), T, vocab, run.seed + 1) if isinstance(d.eval, float) else None
    return Sources(train, held, train.fingerprint, f"{n} documents of {T} random tokens")


@contextmanager
def _places(run: Run) -> Iterator[tuple[list[Path], list[tuple[int, float]]]]:
    """The training files, and (files, weight) of each origin; those of a sample are gone afterwards."""
    d = run.data
    if d.sample is not None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{d.sample}.jsonl"
            recipes.write(path, d.max_samples or SAMPLE_ROWS, run.seed, pairs=run.objective == "dpo")
            yield [path], [(1, 1.0)]
        return
    found = [(files.find(origin.path, root(d.cache)), origin.weight) for origin in d.origins]
    paths = [path for of, _ in found for path in of]
    if double := next((p for i, p in enumerate(paths) if p.resolve() in {q.resolve() for q in paths[:i]}), None):
        do = "name it once, with a weight if it shall be read more often"
        raise DataError(f"training data from {double}", "two of the sources hold it", do)
    yield paths, [(len(of), weight) for of, weight in found]


@dataclass
class Reading:
    """One call of read_sources."""

    run: Run
    tokens: Tokens
    vocab: int
    say: Say
    parts: int = 1
    refused: list[Refused] = field(default_factory=list)
    kept: Kept | None = None
    _first: tuple[list[tuple[Where, Row]], list[list[Document]]] = field(default=([], []))

    def work(self, paths: Sequence[Path], clean: bool) -> Work:
        """What is to be tokenised."""
        if not clean:
            return Work(self.run, self.tokens, tuple(paths), say=self.say)
        self.kept = kept(self.run, self.tokens, paths, self.say)
        return Work(self.run, self.tokens, tuple(paths), self.kept.rows, self.kept.key, self.say)

    def look(self, work: Work, T: int | None) -> None:
        """Looks at the first rows before all others are tokenised: are they what one wants to train on?"""
        d, counts = self.run.data, Counts()
        rows = (entry for job in jobs(work.files, d.text_rows) for entry in parsed(job, d.text_rows, work.kept))
        most = min(SAMPLES, d.max_samples or SAMPLES)
        first = list(islice(((where, row) for _, where, row in rows if row is not None), most))
        good = [(where, row) for where, row in first if not isinstance(row, DataError)]
        made = iter(self.tokens.batch(good, learnt(self.run)))
        samples, documents = list[tuple[Where, Row]](), list[list[Document]]()
        for where, row in first:
            found = row if isinstance(row, DataError) else next(made)
            if isinstance(found, DataError):
                if d.bad_rows == "error":
                    raise found
                continue
            assert not isinstance(row, DataError)
            self._suits(len(found), where)
            cut = [found] if T is None else fit(found, T, d.too_long, where, counts)
            samples.append((where, row))
            documents.append([document for sample in cut for document in sample])
        self._first = samples, documents
        if any(documents):  # else all were too long, and what is left is counted later
            self._probe(len(samples) if d.stream else 0, counts.truncated)

    def _probe(self, rows: int, truncated: int) -> None:
        """Raises the first doubt; `rows` 0: how many are truncated is not known yet."""
        most = self.run.data.most_truncated
        probe(*self._first, self.tokens, learnt(self.run), rows=rows, truncated=truncated, most_truncated=most)

    def look_again(self, counts: Counts) -> None:
        """Raises DataError if too many rows of all lost their end."""
        self._probe(counts.rows, counts.truncated)

    def _suits(self, parts: int, where: Where) -> None:
        """Raises DataError for a row of so many documents if the objective cannot learn from it."""
        self.parts = parts
        asked, pairs = f"`objective: {self.run.objective}`", self.run.objective == "dpo"
        if parts > 1 and not pairs:
            do = "give rows of messages, of prompt and completion, or of text; or take objective: dpo"
            raise DataError(asked, f"a pair of a chosen and a rejected answer at {where}", do)
        if parts == 1 and pairs:
            found = f"a row at {where} that is no pair of a chosen and a rejected answer"
            raise DataError(asked, found, 'give rows {"prompt": ..., "chosen": ..., "rejected": ...}')

    def shelf(self, work: Work, T: int | None, most: int | None) -> Shelf:
        """The shards, looked at as they come: what stops the run stops it before the rest is tokenised.

        Args:
            T: rows longer than this are an error, where the run says so.
            most: rows, of which no more than needed are tokenised.
        """
        d, shelf = self.run.data, Shelf(work.files)
        with closing(tokenised(work, most)) as shards:
            for made in shards:
                shard, refused = shelf.add(made, most)
                self._check(shelf, shard, refused, T)
                if most is not None and shelf.total >= most:
                    break
        bad = [why for _, why in shelf.refused]
        quarantine.check(bad, shelf.total, d.most_bad)
        self.refused += bad
        return shelf

    def streamed(self, work: Work, origins: Sequence[tuple[int, float]], T: int | None) -> Streamed:
        """The rows, to be tokenised when they are asked for."""
        kept: Sequence[np.ndarray | None] = work.kept or [None] * len(work.files)
        d = self.run.data
        indexes = [index(path, keep, d.text_rows) for path, keep in zip(work.files, kept, strict=True)]
        return Streamed(work, indexes, origins, T, self.vocab, self.parts, d.max_samples)

    def _check(self, shelf: Shelf, shard: Shard, refused: Sequence[tuple[int, Refused]], T: int | None) -> None:
        """Raises the first error of a shard's rows, in their order."""
        d = self.run.data
        if shard.highest >= self.vocab:
            raise foreign(", ".join(map(str, shelf.files[:3])), shard.highest, self.vocab)
        if len(shard):
            self._suits(shard.parts, Where(shelf.files[shard.files[0]], int(shard.lines[0])))
        first = refused[0][0] if refused and d.bad_rows == "error" else shelf.total
        if T is not None and d.too_long == "error":
            long = np.flatnonzero(shard.lengths() > T)[:1]
            rows = shard.numbers[long] + shelf.rows_before[-2]
            if len(rows) and rows[0] < first:
                raise overlong(shelf.where(int(rows[0])), int(shard.lengths()[long[0]]), T, pair=shard.parts > 1)
        if first < shelf.total:
            raise refused[0][1].error
        if shelf.total >= quarantine.EARLY_rows:
            quarantine.check([why for _, why in shelf.refused], shelf.total, d.most_bad)

    def evaluation(self, path: str, how: str) -> Corpus:
        """All of a file, to be evaluated on."""
        T = self.run.batch.seq
        work = self.work(files.find(path, root(self.run.data.cache)), clean=False)
        return view(self.shelf(work, T if how == "error" else None, None), T=T, how=how)

    def sources(self, train: Corpus | Streamed, held_out: Corpus | None) -> Sources:
        """All that was read, with its counts in a line."""
        evaluated = train if held_out is None else held_out
        record = self.kept and self.kept.record
        if isinstance(train, Streamed):
            said = f"{len(train)} rows, tokenised while training"
            if record is not None:
                said += f" ({record['rows'] - record['kept']['rows']} more cleaned away or bad)"
        else:
            said = describe(train.counts)
        fingerprint = train.fingerprint
        if held_out is not None and held_out is not train:
            said += f"; held out: {describe(held_out.counts)}"
            fingerprint += held_out.fingerprint
        names = sorted({name for origin in self.run.data.origins for name in files.about(origin.path)})
        if names:
            said += f"; not read as data: {', '.join(names)}"
        return Sources(train, held_out, fingerprint, said, evaluated.counts.too_long, self.refused, record)


def describe(c: Counts) -> str:
    """The counts of a corpus in a line, with all that was left out or cut."""
    left_out = (
        (c.cleaned, "cleaned away"), (c.refused, "bad and set aside"), (c.too_long, "too long"),
        (c.truncated, "truncated"), (c.dropped, "pieces dropped"), (c.targets_lost, "targets lost"),
        (c.marked, "with special tokens written in their text"),
    )  # fmt: skip
    said = ", ".join(f"{n} {what}" for n, what in left_out if n)
    text = f"{c.documents} documents, {c.tokens} tokens, {c.targets} targets"
    return f"{text} (of {c.rows + c.cleaned} rows: {said})" if said else text
