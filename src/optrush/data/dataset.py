"""Open a configuration's `data:` as numbered samples for training and evaluation (samples.py).

All files are tokenized once into shards; as a stream (`data.stream`) rows are tokenized when read: the
same path for a few rows at a time, without a cache. The first rows are checked before all others.

Every rank calls `read_sources`; ranks wait for each other only at a file lock, and no collective runs.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np

from optrush.config import JUDGED, Config
from optrush.data import pool, readers, sample, tokenize
from optrush.data.chat_template import Tokens
from optrush.data.cleaning import clean_files
from optrush.data.readers import PARQUET, TEXT, Chunk, chunks, form, read_rows_or_errors
from optrush.data.samples import (
    Counts,
    Dataset,
    Maker,
    Random,
    SampleChunk,
    SampleSource,
    TokenShards,
    describe_keys,
    listed,
    pair_mismatched,
    permutation,
    truncated_rows,
    view,
)  # fmt: skip
from optrush.data.schema import (
    ANSWERED,
    Chat,
    Completion,
    Document,
    Judged,
    Pair,
    Row,
    RowLocation,
    Text,
    check_kind,
    parts_of,
    row_rules,
)
from optrush.data.strict_json import quoted
from optrush.data.tokenize import OTHER_KEYS, BadRow, Parsed, Say, TokenizeWork, cache_root
from optrush.errors import ConfigError, DataError
from optrush.files import open_file, parse_json, read_text, regular, write_whole
from optrush.objectives import learnt

# --- A stream: one pass over the files indexes the start of each row; then any process with a copy of the index
# reads any row. Rows have the same numbers as in shards, so the same ones are held out.

BLOCK_bytes = 1 << 22


@dataclass(frozen=True)
class Index:
    """The starts of a file's lines, or of a Parquet file's row groups, and the lines that are rows."""

    path: Path
    starts: np.ndarray  # int64: byte offset of each line, or first row of each group; the end last
    groups: bool
    chosen: np.ndarray | None  # (rows,) int64: positions of the rows among all lines, ascending; None: all are rows

    def __len__(self) -> int:
        if self.chosen is not None:
            return len(self.chosen)
        return int(self.starts[-1]) if self.groups else len(self.starts) - 1

    def read(self, numbers: Iterable[int]) -> Iterator[tuple[int, RowLocation, dict[str, Any] | DataError]]:
        """Yield the rows with these numbers, from 0, in ascending order, each with its number."""
        number = {p: n for n in sorted(set(numbers)) for p in [n if self.chosen is None else int(self.chosen[n])]}
        for chunk, last in self._chunks(list(number)):
            for where, row in read_rows_or_errors(chunk, "line"):
                if where.line - 1 in number:
                    yield number[where.line - 1], where, row
                if where.line > last:
                    break

    def _chunks(self, positions: list[int]) -> Iterator[tuple[Chunk, int]]:
        """Yield the reads for these lines: (chunk, its last needed position)."""
        if self.groups:
            group = np.searchsorted(self.starts, positions, "right") - 1
            for g, of in groupby(zip(group.tolist(), positions, strict=True), lambda pair: pair[0]):
                yield Chunk(self.path, int(self.starts[g]) + 1, g, g + 1), [p for _, p in of][-1]
            return
        for _, of in groupby(enumerate(positions), lambda pair: pair[1] - pair[0]):  # consecutive lines
            run = [p for _, p in of]
            first, end = (int(self.starts[p]) for p in (run[0], run[-1] + 1))
            yield Chunk(self.path, run[0] + 1, first, end), run[-1]


def index(path: Path, kept: np.ndarray | None, text_rows: str, size_bytes: int) -> Index:
    """Return the index of a file, from one pass over it, without rows removed by cleaning.

    Args:
        size_bytes: size of the parts in which cleaning read the file.

    Raises DataError: rows of such a file cannot be read separately.
    """
    parts = list(islice(chunks(path, size_bytes, "line"), 1 if kept is None else None))
    suffix, _ = form(path) or ("", "")
    if suffix in TEXT and (mode := text_rows.partition(" ")[0]) != "line":
        found = f"{path} with `data.text_rows: {mode}`"
        raise DataError("`data.stream`", found, "set data.text_rows: line, or data.stream: false")
    if parts[0].end is None:
        found = f"{path} is compressed, a JSON list or CSV: rows cannot be read one by one"
        raise DataError("`data.stream`", found, "set data.stream: false, or convert it to .jsonl or .parquet")
    if suffix == PARQUET:
        import pyarrow.parquet

        metadata = pyarrow.parquet.read_metadata(path)
        sizes = [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]
        return Index(path, np.cumsum([0, *sizes], dtype=np.int64), True, None if kept is None else np.flatnonzero(kept))
    starts, chosen = [np.zeros(1, np.int64)], None
    with open_file(path) as file:
        at = 0
        while block := file.read(BLOCK_bytes):
            starts.append(np.flatnonzero(np.frombuffer(block, np.uint8) == 10) + at + 1)
            at += len(block)
        file.seek(-1, os.SEEK_END)
        if file.read() != b"\n":
            starts.append(np.array([at]))
        if suffix in TEXT:  # blank lines are not rows
            file.seek(0)
            chosen = np.array([n for n, line in enumerate(file) if line.strip()], np.int64)
    begins = _without_blank_end(path, np.concatenate(starts)) if suffix not in TEXT else np.concatenate(starts)
    if kept is not None:
        lines = np.arange(len(begins) - 1) if chosen is None else chosen
        firsts = np.array([part.first - 1 for part in parts])
        part = np.searchsorted(firsts, lines, "right") - 1
        chosen = lines[kept[firsts[part] + np.arange(len(lines)) - np.searchsorted(lines, firsts)[part]]]
    return Index(path, begins, False, chosen)


def _without_blank_end(path: Path, begins: np.ndarray) -> np.ndarray:
    """Return the starts of a file's lines, and the end, without trailing blank lines."""
    with open_file(path) as file:
        while len(begins) > 1:
            file.seek(begins[-2])
            if file.read(int(begins[-1] - begins[-2])).strip():
                break
            begins = begins[:-1]
    return begins


@dataclass
class Streamed:
    """The rows of files; the number of samples of each is known only once it is read."""

    maker: Maker
    work: TokenizeWork
    indexes: Sequence[Index]
    origins: Sequence[tuple[int, float]]  # (files, weight) of each
    T: int | None
    parts: int
    counts: Counts  # of the first rows only
    rows: np.ndarray | None = None  # numbers of training rows; None: all
    named: str = "all"
    tokenized = False

    def __post_init__(self) -> None:
        self.work = replace(self.work, say=pool.silent)  # workers do not report progress
        self.most_truncated = self.work.config.data.most_truncated
        self._before = np.cumsum([0, *map(len, self.indexes)])
        self.total = int(min(self._before[-1], self.work.config.data.max_samples or self._before[-1]))

    def __len__(self) -> int:
        return self.total if self.rows is None else len(self.rows)

    @property
    def spans(self) -> tuple[tuple[int, float], ...]:
        """Return (rows, weight) of each origin, in order."""
        ends = self._before[np.cumsum([n for n, _ in self.origins])].clip(max=self.total)
        ends = ends if self.rows is None else np.searchsorted(self.rows, ends)
        sizes = np.diff(ends, prepend=0).tolist()
        return tuple((n, weight) for n, (_, weight) in zip(sizes, self.origins, strict=True) if n)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the files and the settings that determine the samples."""
        data = self.work.config.data
        parts = [
            readers.files_fingerprint(self.work.files, cache_root(data.cache)), tokenize.identity(self.work.tokens),
            learnt(self.work.config), row_rules(self.work.config).identity, self.work.cleaning,
            data.reading, data.too_long, self.T, self.total, self.named,
            [weight for _, weight in self.origins],
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def describe(self) -> str:
        """Return the known counts as a line of text."""
        return f"{len(self)} rows, tokenised while training"

    def read(self, numbers: Sequence[int]) -> SampleChunk:
        """Tokenize the rows with these numbers; raises DataError for a bad row unless bad rows are set aside."""
        shelf = self._shards(np.asarray(numbers) if self.rows is None else self.rows[list(numbers)])
        dataset = view(shelf, T=self.T, how=self.work.config.data.too_long, some=False)
        dataset.counts.marked, dataset.counts.keys = shelf.marked, shelf.keys
        samples = [(numbers[row], dataset.documents(i)) for i, row in enumerate(dataset.row.tolist())]
        return SampleChunk(samples, len(numbers), [row for _, row in shelf.refused], dataset.counts)

    def documents(self, i: int = 0) -> Any:
        """Raise ConfigError: unknown for a stream."""
        asked, found = "the samples before the data is read", "`data.stream`: no row is tokenized yet"
        raise ConfigError(asked, found, "leave data.stream out")

    lengths = targets = documents

    def digests(self) -> np.ndarray:
        """Return an empty array: the samples are unknown before the rows are read."""
        return np.zeros(0, np.int64)

    def training(self, held: np.ndarray, named: str, *_: object) -> Streamed:
        """Return the rows outside the mask `held`, (rows,) bool."""
        return replace(self, rows=np.flatnonzero(~held), named=named) if held.any() else self

    def held_out(self, held: np.ndarray, named: str, T: int, how: str) -> Dataset:
        """Tokenize the rows in the mask `held`, (rows,) bool, and keep their samples in memory."""
        return view(self._shards(np.flatnonzero(held)), T=T, how=how)

    def _shards(self, numbers: np.ndarray) -> TokenShards:
        """Return shards of these rows, in this order."""
        parts = np.array_split(numbers, range(tokenize.BATCH_rows, len(numbers), tokenize.BATCH_rows))
        entries = (entry for part in parts for entry in self._entries(part.tolist()))
        return self.maker.shards(entries, self.work.files, self.T)

    def _entries(self, numbers: Sequence[int]) -> list[Parsed]:
        """Return parsed rows in the order of `numbers`."""
        file = (np.searchsorted(self._before, numbers, "right") - 1).tolist()
        rows: dict[int, Parsed] = {}
        rules = row_rules(self.work.config)
        for f in sorted(set(file)):
            before = int(self._before[f])
            inside = [n - before for n, of in zip(numbers, file, strict=True) if of == f]
            for n, where, row in self.indexes[f].read(inside):
                keys = set[str]()
                parsed = row if isinstance(row, DataError) else tokenize.parsed_or_error(where, row, rules, keys)
                rows[before + n] = f, where, parsed, keys
        if len(rows) < len(set(numbers)):
            asked = f"a row of {', '.join(map(str, self.work.files[:3]))}"
            raise DataError(asked, "it was moved or deleted", "do not change the files while a run reads them")
        return [rows[n] for n in numbers]


# --- Cleaning once: the rows kept by `data.clean`, stored next to the tokenized data under a separate key.

FORMAT = 3  # of the stored result


def kept_rows(
    config: Config, tokens: Tokens, paths: Sequence[Path], say: Say
) -> tuple[list[np.ndarray], str, dict[str, Any]]:
    """Clean, or return the stored result: kept rows by file, their digest, and cleaning.json.

    One process per machine cleans; small data is cleaned by every process. Raises UserError like `clean_files`.
    """
    data, settings = config.data, config.data.clean
    assert settings is not None
    cache, progress = cache_root(data.cache), tokenize.Progress(say, "cleaning", 1.0)

    def now() -> tuple[list[np.ndarray], dict[str, Any]]:
        result = clean_files(
            paths, settings, tokens=tokens, text_rows=data.reading, bad_rows=data.bad_rows,
            most_bad=data.most_bad, workers=data.workers, progress=progress.share, cache=cache,
            rules=row_rules(config),
        )  # fmt: skip
        return [result.kept[path] for path in paths], result.record

    evaluation = [] if settings.decontaminate is None else readers.find_files(settings.decontaminate, cache)
    parts = [
        FORMAT, settings.model_dump(mode="json"), data.reading, data.bad_rows, data.most_bad,
        row_rules(config).identity,
        [str(path) for path in paths], readers.files_fingerprint([*paths, *evaluation], cache),
        settings.tokens and tokenize.identity(tokens),
    ]  # fmt: skip
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    if tokenize.fits_in_memory(paths):
        rows, record = now()
        return rows, key, record
    folder = cache / "cleaned" / key
    record_file, rows_file = folder / "cleaning.json", folder / "kept.npz"
    with tokenize.locked(folder, say):
        if not record_file.exists():  # written last
            rows, record = now()
            with rows_file.open("wb") as file:
                np.savez_compressed(file, *rows)
            write_whole(record_file, json.dumps(record))
    with np.load(regular(rows_file)) as arrays:
        return list(arrays.values()), key, parse_json(read_text(record_file))


# --- The checks of the first rows, before step 0; each error shows one row.
#
# These faults cause no error in training and show only in the model: it learns nothing, never stops, expects two
# begin-of-text tokens, or answers a first question differently than trained.

SAMPLES = 200  # rows checked

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
        samples: the first rows, about SAMPLES of them.
        documents: training documents of each sample, after cutting to T; empty if dropped or rejected.
        rows: number of rows in the corpus, of which `truncated` lost their end: at most the share `most_truncated`.
    """
    if not samples:
        return
    uncut = _whole(samples, tokens, train_on)
    if not any(document.targets.any() for made in documents for document in made):
        example = _show(tokens, samples[0], documents[0] or uncut[0])
        found = f"they have no target token; the first, {example}"
        do = "raise batch.seq if answers are cut off, or change data.train_on"
        raise DataError(f"to learn from the first {len(samples)} rows", found, do)
    if rows and truncated / rows > most_truncated:
        n = next((n for n, made in enumerate(documents) if sum(map(len, made)) < sum(map(len, uncut[n]))), None)
        example = "" if n is None else f"; one, {_show(tokens, samples[n], documents[n] or uncut[n])}"
        raise truncated_rows(truncated, rows, most_truncated, example)
    _stops(samples, documents, uncut if train_on != "all" else _whole(samples, tokens, "last"), tokens)


def _whole(samples: Samples, tokens: Tokens, train_on: str) -> DocumentLists:
    return [() if isinstance(made, DataError) else made for made in tokens.batch(samples, train_on)]


def _stops(samples: Samples, documents: DocumentLists, uncut: DocumentLists, tokens: Tokens) -> None:
    trained = {int(i) for made in documents for document in made for i in document.ids[document.targets]}
    for n, made in enumerate(uncut):
        if isinstance(samples[n][1], Text):
            continue
        for document in made:
            ends = document.targets & ~np.append(document.targets[1:], False)  # the last token of each answer
            for stop in sorted(set(document.ids[ends].tolist()) - trained):
                example = _show(tokens, samples[n], documents[n] or made)
                asked = f"to learn to stop with {tokens.tokenizer.convert_ids_to_tokens(stop)} at the end of answers"
                do = "raise batch.seq, so that answers are not cut off, or set data.too_long: drop"
                raise DataError(asked, f"it is a target in none of the first {len(samples)} rows; one, {example}", do)


def _show(tokens: Tokens, sample: tuple[RowLocation, Row], documents: Sequence[Document]) -> str:
    """Return a row's location and its first and last tokens as a line of text."""
    if not documents:
        return f"at {sample[0]}"
    return f"at {sample[0]}: '{tokens.shown(documents[0].ids.tolist())}'"


# --- The sources of a run.

SAMPLE_ROWS = 1000  # conversations of a built-in sample, unless data.max_samples is given
RANDOM_DOCUMENTS = 4096  # with `data.random: true`


@dataclass(frozen=True)
class Sources:
    """The training and held-out samples of a run."""

    train: SampleSource
    held_out: SampleSource | None
    fingerprint: str
    summary: str  # counts, as text
    too_long: int = 0  # held-out rows longer than T (training rows, without held-out data)
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
    """Read and tokenize a run's data, or map cached shards; raises DataError with file and line.

    Args:
        tokens: the tokenizer; None only for random tokens.
        vocab: number of token ids with an embedding in the model.
        progress: called with a status line during long reads.
        data: a held-out file that replaces the configuration's (`optrush eval --data`).
        cut: False keeps training documents longer than T uncut, for a layout that cuts them.
    """
    d, T = config.data, config.batch.seq
    if d.random is not None and data is None:
        return _random(config, vocab)
    assert tokens is not None
    reading = _Reading(Maker(config, tokens, vocab), progress or pool.silent)
    how = d.too_long if cut else "split"  # for evaluation, whose rows have at most T tokens
    if data is not None:
        only = _completed(config, reading.evaluation(data, how))
        return reading.sources(only, only)
    local = isinstance(d.eval, str) and "://" not in d.eval
    if local and not (Path(str(d.eval)).exists() or glob.glob(str(d.eval), recursive=True)):
        raise DataError(f"`data.eval: {d.eval}`", "no such file", "use a JSONL file, or a fraction such as 0.1")
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
        train = rows.training(held, named, limit, d.too_long, origins)
        if train.counts.truncated:
            reading.probe(train.counts.rows, train.counts.truncated)
        if held.any():
            held_out = rows.held_out(held, named, T, how)
            if d.stream:
                reading.refused += [row for _, row in held_out.shelf.refused]
        if isinstance(d.eval, str):
            held_out = reading.evaluation(d.eval, how)
    if held_out is not None:
        _count_known(train, held_out, d.eval)
    reading.check_columns(train, held_out)
    return reading.sources(_completed(config, train), None if held_out is None else _completed(config, held_out))


def _completed(config: Config, samples: Source) -> Source:
    """Return labelled answers with their mismatched documents; other samples and streams unchanged."""
    if config.objective != JUDGED or not isinstance(samples, Dataset):
        return samples
    return pair_mismatched(samples, config.batch.seq, config.data.too_long)


def _refuse_same(paths: Sequence[Path], held_out: Sequence[Path], named: str) -> None:
    """Raise DataError if a held-out file is trained on, or has the same contents as a training file."""
    sizes: dict[int, list[Path]] = {}
    for path in paths:
        sizes.setdefault(path.stat().st_size, []).append(path)
    for file in held_out:
        for path in sizes.get(file.stat().st_size, ()):
            if path.samefile(file) or readers.files_fingerprint(path) == readers.files_fingerprint(file):
                same = "is" if path.samefile(file) else "has the contents of"
                raise _trained_on(named, f"{file} {same} {path} of data.path")


def _count_known(train: Source, held_out: Dataset, named: str | float | None) -> None:
    """Count held-out samples that are also trained on; raise DataError if that is true for all of a file."""
    both = np.isin(held_out.digests(), train.digests())
    held_out.counts.known = int(both.sum())
    if both.all() and isinstance(named, str):
        raise _trained_on(named, f"all of its {len(both)} documents are in data.path")


def _trained_on(named: str, found: str) -> DataError:
    do = "hold out rows that are not trained on: another file, or a fraction such as data.eval: 0.1"
    return DataError(f"`data.eval: {named}`", f"{found}: the eval loss would reward memorisation", do)


def held_rows(rows: int, fraction: float, seed: int, whole_texts: bool = False) -> np.ndarray:
    """Return the mask of held-out rows, (rows,) bool: depends only on the number of rows and the seed.

    Args:
        whole_texts: rows are text files, which could be split into paragraphs or lines.
    """
    n = round(fraction * rows)
    if not 0 < n < rows:
        do = "change the fraction so that both parts get a row, or use a file of held-out rows"
        if whole_texts:
            do = f"set data.text_rows: paragraph (or line): each text file is one row; or {do}"
        raise DataError(
            f"{fraction} of the data for evaluation (data.eval)", f"{rows} rows: this fraction gives {n}", do
        )
    held = np.zeros(rows, bool)
    held[permutation(rows, seed, 0)[:n]] = True
    return held


def _random(config: Config, vocab: int) -> Sources:
    d, T = config.data, config.batch.seq
    n = RANDOM_DOCUMENTS if d.random is True or d.random is None else d.random
    n = min(n, d.max_samples or n)
    train = Random(n, T, vocab, config.seed)
    held = Random(max(1, round(n * d.eval)), T, vocab, config.seed + 1) if isinstance(d.eval, float) else None
    return Sources(train, held, train.fingerprint, f"{n} documents of {T} random tokens")


@contextmanager
def _places(config: Config) -> Iterator[tuple[list[Path], list[tuple[int, float]]]]:
    """Yield the training files, and (files, weight) of each origin; delete a built-in sample's file afterwards."""
    d = config.data
    if d.sample is not None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{d.sample}.jsonl"
            sample.write_sample(path, d.max_samples or SAMPLE_ROWS, config.seed, pairs=config.paired)
            yield [path], [(1, 1.0)]
        return
    origins = [(readers.find_files(origin.path, cache_root(d.cache)), origin.weight) for origin in d.origins]
    paths = [path for of, _ in origins for path in of]
    if d.separator is not None and not any((readers.form(path) or ("",))[0] in readers.CELLS for path in paths):
        found = f"no {' or '.join(readers.CELLS)} file in the data: it has no effect"
        raise ConfigError(f"`data.separator: {d.separator}`", found, "remove it")
    first = {path.resolve(): i for i, path in reversed(list(enumerate(paths)))}
    if double := next((path for i, path in enumerate(paths) if first[path.resolve()] != i), None):
        do = "name it once, with a weight to read it more often"
        raise DataError(f"training data from {double}", "two sources contain it", do)
    yield paths, [(len(of), weight) for of, weight in origins]


Source = Dataset | Streamed


@dataclass
class _Reading:
    maker: Maker
    say: Say
    refused: list[BadRow] = field(default_factory=list)
    cleaned: dict[str, Any] | None = None  # the record of data.clean
    parts: int = 1
    first: Counts = field(default_factory=Counts)  # of the first rows: their number, and keys that `parse_row` noted
    _first: tuple[list[tuple[RowLocation, Row]], list[list[Document]]] = field(default=([], []))

    @property
    def config(self) -> Config:
        return self.maker.config

    def work(self, paths: Sequence[Path], clean: bool) -> TokenizeWork:
        """Return the tokenization job."""
        config, tokens = self.config, self.maker.tokens
        if not clean:
            return TokenizeWork(config, tokens, tuple(paths), say=self.say)
        kept, key, self.cleaned = kept_rows(config, tokens, paths, self.say)
        return TokenizeWork(config, tokens, tuple(paths), kept, key, self.say)

    def look(self, work: TokenizeWork, T: int | None) -> None:
        """Check the first rows before the others are tokenized."""
        d = self.config.data
        most = min(SAMPLES, d.max_samples or SAMPLES)
        rows = (entry for job in tokenize.jobs(work.files, d.reading) for entry in work.parsed(job))
        first = list(islice((entry for entry in rows if entry[2] is not None), most))
        for _, where, row, _ in first:
            if not isinstance(row, DataError | None):
                check_kind(self.config.objective, isinstance(row, Pair), where)
        parts = [part for _, _, row, _ in first if isinstance(row, Row) for part in parts_of(row)]
        if any(isinstance(part, Completion) for part in parts) and self.maker.tokens.has_template():
            named: dict[str, str] = {name: key for key, name in d.columns.items()}
            ask, say = (named.get(name, name) for name in ANSWERED[:2])
            line = f"`data.columns: {{{ask}: instruction, {say}: output}}` makes them turns"
            line = "use messages to train on turns" if self.config.objective != "sft" else line
            self.say(f"the chat template is not used for rows of plain prompt and completion; {line}")
        shelf = self.maker.shards(first, work.files, T)
        self.parts, self.first = shelf.parts, Counts(rows=len(first), keys=shelf.keys)
        samples = list[tuple[RowLocation, Row]]()
        for n in shelf.rows_with_samples():
            _, where, row, _ = first[n]
            assert row is not None and not isinstance(row, DataError)
            apart = learnt(self.config).startswith("each") or isinstance(row, Judged)
            samples += [(where, part) for part in (tokenize.split_turns(row) if apart else [row])]
        documents: list[list[Document]] = [[] for _ in samples]
        dataset = view(shelf, T=T, how=d.too_long, some=False)
        for i, of in enumerate(shelf.starts().searchsorted(dataset.at, "right") - 1):
            documents[of] += dataset.documents(i)
        self._first = samples, documents
        if len(dataset):  # else all are too long, which is counted later
            self.probe(len(samples) if d.stream else 0, dataset.counts.truncated)

    def probe(self, rows: int, truncated: int) -> None:
        """Raise DataError at the first fault; `rows` 0: the number of truncated rows is not known yet."""
        most = self.config.data.most_truncated
        how = learnt(self.config).replace("each", "last")
        probe_rows(*self._first, self.maker.tokens, how, rows=rows, truncated=truncated, most_truncated=most)

    def shelf(self, work: TokenizeWork, T: int | None, most: int | None) -> TokenShards:
        """Return the shards of at most `most` rows."""
        shelf = TokenShards(work.files)
        with closing(tokenize.tokenized(work, most)) as shards:
            for made in shards:
                self.maker.add(shelf, made, T, most)
                if most is not None and shelf.total >= most:
                    break
        bad = [row for _, row in shelf.refused]
        tokenize.check_bad_share(bad, shelf.total, self.config.data.most_bad)
        self.refused += bad
        return shelf

    def streamed(self, work: TokenizeWork, origins: Sequence[tuple[int, float]], T: int | None) -> Streamed:
        """Return the rows as a stream, tokenized when read."""
        kept: Sequence[np.ndarray | None] = work.kept or [None] * len(work.files)
        size, d = tokenize.chunk_bytes(work.files), self.config.data
        work.tokens.prepare()
        indexes = [index(path, keep, d.reading, size) for path, keep in zip(work.files, kept, strict=True)]
        return Streamed(self.maker, work, indexes, origins, T, self.parts, self.first)

    def check_columns(self, train: Source, held_out: Dataset | None) -> None:
        """Raise DataError for a key of `data.columns` that no row has (for streamed data: none of the first rows)."""
        keys = Counter(train.counts.keys)
        keys.update(held_out.counts.keys if held_out is not None else {})
        for key, name in self.config.data.columns.items():
            if f"{key} -> {name}" not in keys and OTHER_KEYS not in keys:
                unread = [k for k in keys if " -> " not in k]
                found = f"no row has {quoted(key)}" + (f"; unread keys: {listed(unread)}" if unread else "")
                raise DataError(f"`data.columns: {{{key}: {name}}}`", found, "use a key of the rows, or remove it")

    def evaluation(self, path: str, how: str) -> Dataset:
        """Return the samples of a file for evaluation."""
        T = self.config.batch.seq
        work = self.work(readers.find_files(path, cache_root(self.config.data.cache)), clean=False)
        shelf = self.shelf(work, T if how == "error" else None, None)
        dataset = view(shelf, T=T, how=how)
        dataset.counts.keys = shelf.keys
        return dataset

    def sources(self, train: Source, held_out: Source | None) -> Sources:
        """Return the sources, with a summary of their counts."""
        record, summary, fingerprint = self.cleaned, train.describe(), train.fingerprint
        if record is not None and not train.tokenized:
            summary += f" ({record['rows'] - record['kept']['rows']} more filtered or bad)"
        keys, rows, of = train.counts.keys, train.counts.rows, "" if train.tokenized else "first "
        if held_out is not None and held_out is not train:
            summary += f"; held out: {held_out.describe()}"
            fingerprint += held_out.fingerprint
            keys, rows = keys + held_out.counts.keys, rows + (0 if of else held_out.counts.rows)
        summary += describe_keys(keys, f"the {of}{rows} rows")
        if any(isinstance(row, Chat | Pair | Judged) for _, row in self._first[0]) and self.maker.tokens.tagged():
            summary += "; the chat template's generation tags are ignored: data.train_on selects the targets"
        names = sorted({name for origin in self.config.data.origins for name in readers.description_files(origin.path)})
        if names:
            summary += f"; not read as data: {', '.join(names)}"
        too_long = (train if held_out is None else held_out).counts.too_long
        return Sources(train, held_out, fingerprint, summary, too_long, self.refused, record)
