"""Turn a configuration's `data:` into samples: files, the recipes sample or random tokens, and what is held out.

Every rank calls `read_sources`; ranks wait for each other only at a file lock, and no collective runs.
"""

from __future__ import annotations

import glob
import hashlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from optrush.config import Config
from optrush.data import readers, sample, tokenize
from optrush.data.chat_template import MEND_EARLIER, Tokens, answers
from optrush.data.cleaning import clean_files
from optrush.data.dataset import (
    Counts,
    Dataset,
    Random,
    SampleSource,
    Streamed,
    TokenShards,
    fit_row,
    foreign,
    held_rows,
    index,
    overlong,
    view,
)
from optrush.data.schema import Chat, Document, Pair, Row, RowLocation, Text
from optrush.data.tokenize import (
    BadRow,
    Progress,
    Say,
    Shard,
    TokenizeWork,
    cache_root,
    identity,
    jobs,
    load_kept,
    locked,
    parsed,
    save_kept,
    silent,
    small,
    tokenized,
)
from optrush.errors import DataError
from optrush.files import write_whole
from optrush.objectives import learnt

# --- Cleaning once: which rows `data.clean` keeps, stored next to the tokenized data under a key of its own.

FORMAT = 1


class KeptRows(NamedTuple):
    """Which rows stay, by file; a digest that names them; the content of cleaning.json."""

    rows: list[np.ndarray]
    key: str
    record: dict[str, Any]


def kept_rows(config: Config, tokens: Tokens, paths: Sequence[Path], say: Say) -> KeptRows:
    """Clean, or return the stored result. One process of a machine cleans; small data is cleaned by each. Raises
    UserError: as `clean_files`.
    """
    data, settings = config.data, config.data.clean
    assert settings is not None
    cache, progress = cache_root(data.cache), Progress(say, "cleaning", 1.0)

    def now() -> tuple[list[np.ndarray], dict[str, Any]]:
        result = clean_files(
            paths, settings, tokens=tokens, text_rows=data.text_rows, bad_rows=data.bad_rows,
            most_bad=data.most_bad, workers=data.workers, progress=progress.share, cache=cache,
        )  # fmt: skip
        return [result.kept[path] for path in paths], result.record

    evaluation = [] if settings.decontaminate is None else readers.find_files(settings.decontaminate, cache)
    parts = [
        FORMAT, settings.model_dump(mode="json"), data.text_rows, data.bad_rows, data.most_bad,
        [str(path) for path in paths], readers.files_fingerprint([*paths, *evaluation], cache),
        settings.tokens and identity(tokens),
    ]  # fmt: skip
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    if small(paths):
        rows, record = now()
        return KeptRows(rows, key, record)
    folder = cache / "cleaned" / key
    record_file, rows_file = folder / "cleaning.json", folder / "kept.npz"
    with locked(folder, say):
        if not record_file.exists():  # written last
            rows, record = now()
            save_kept(rows_file, rows)
            write_whole(record_file, json.dumps(record))
    return KeptRows(load_kept(rows_file), key, json.loads(record_file.read_text()))


# --- The checks of the first rows, before step 0; each error shows one row.
#
# Each of these faults trains without a sign and shows only in the model: it learns nothing, never stops, expects two
# begin-of-text tokens, or answers a first question otherwise than it was trained to.

SAMPLES = 200  # rows that are checked
HEAD, TAIL = 60, 30  # tokens of a sample that are shown, from its beginning and its end
SHOWN = 100  # characters of a difference that are shown

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
        train_on: `assistant`, `last` or `all`.
        rows: of the whole corpus.
        truncated: of those, how many lost their end (`data.too_long: truncate`).
        most_truncated: the largest share of such rows (`data.most_truncated`).
    """
    assert len(samples) == len(documents)
    if not samples:
        return
    whole = _whole(samples, tokens, train_on)
    _learns(samples, documents, whole, tokens)
    _one_bos(samples, documents, tokens)
    if train_on == "assistant":
        _steady(samples, whole, tokens)
    _complete(samples, documents, whole, tokens, (rows, truncated, most_truncated))
    _stops(samples, documents, whole if train_on != "all" else _whole(samples, tokens, "last"), tokens)


def _whole(samples: Samples, tokens: Tokens, train_on: str) -> DocumentLists:
    """Return the uncut documents of each sample; none where the row is refused."""
    return [() if isinstance(made, DataError) else made for made in tokens.batch(samples, train_on)]


def _learns(samples: Samples, documents: DocumentLists, whole: DocumentLists, tokens: Tokens) -> None:
    if not any(document.targets.any() for made in documents for document in made):
        raise DataError(
            f"to learn from the first {len(samples)} rows",
            f"not one token of them would be learnt; the first, {_show(tokens, samples[0], documents[0] or whole[0])}",
            "raise batch.seq if answers are cut off, or choose what is learnt (data.train_on)",
        )


def _one_bos(samples: Samples, documents: DocumentLists, tokens: Tokens) -> None:
    bos = tokens.tokenizer.bos_token_id
    for pair, made in zip(samples, documents, strict=True):
        for document in made:
            if bos is not None and document.ids[:2].tolist() == [bos, bos]:
                asked = f"to begin a document with one {tokens.tokenizer.bos_token}"
                writer = "chat template" if any(_chats(pair[1])) else "tokenizer"
                do = f"take one out of the rows' text or the template: the {writer} writes one by itself"
                raise DataError(asked, f"two of them; {_show(tokens, pair, [document])}", do)


def _steady(samples: Samples, whole: DocumentLists, tokens: Tokens) -> None:
    for (where, row), made in zip(samples, whole, strict=True):
        for chat in _chats(row) if made else ():
            turns = answers(chat, "assistant")
            masker = tokens.masker(chat, turns, where)
            masker.spans()
            for i in turns:
                if changed := masker.changes(i):
                    alone, here = (_visible(text)[:SHOWN] for text in changed)
                    raise DataError(
                        f"to learn every answer of the conversation at {where} (data.train_on: assistant)",
                        f"later turns change how the template writes messages[{i}]: '{alone}' becomes '{here}'",
                        MEND_EARLIER,
                    )


def _complete(
    samples: Samples, documents: DocumentLists, whole: DocumentLists, tokens: Tokens, counts: tuple[int, int, float]
) -> None:
    rows, truncated, most = counts
    if not rows or truncated / rows <= most:
        return
    short = (n for n, made in enumerate(documents) if sum(map(len, made)) < sum(map(len, whole[n])))
    n = next(short, None)
    one = "" if n is None else f"; one, {_show(tokens, samples[n], documents[n] or whole[n])}"
    raise DataError(
        f"at most {most:.1%} of the rows without their end (data.most_truncated)",
        f"{truncated} of {rows} rows ({truncated / rows:.1%}) are longer than batch.seq and truncated{one}",
        "raise batch.seq, or choose data.too_long: drop or split",
    )


def _stops(samples: Samples, documents: DocumentLists, whole: DocumentLists, tokens: Tokens) -> None:
    trained = {int(i) for made in documents for document in made for i in document.ids[document.targets]}
    for n, made in enumerate(whole):
        if isinstance(samples[n][1], Text):
            continue
        for document in made:
            ends = document.targets & ~np.append(document.targets[1:], False)  # the last token of each answer
            for stop in sorted(set(document.ids[ends].tolist()) - trained):
                one = _show(tokens, samples[n], documents[n] or made)
                raise DataError(
                    f"to learn to stop with {tokens.tokenizer.convert_ids_to_tokens(stop)}, as answers end",
                    f"it is learnt in none of the first {len(samples)} rows; one, {one}",
                    "raise batch.seq, so that answers are not cut off, or choose data.too_long: drop",
                )


def _chats(row: Row) -> Iterator[Chat]:
    for part in (row.chosen, row.rejected) if isinstance(row, Pair) else (row,):
        if isinstance(part, Chat):
            yield part


def _show(tokens: Tokens, sample: tuple[RowLocation, Row], documents: Sequence[Document]) -> str:
    """Return a row's place and its first and last tokens as text, in one line."""
    if not documents:
        return f"at {sample[0]}"
    ids = documents[0].ids.tolist()
    parts = [ids] if len(ids) <= HEAD + TAIL else [ids[:HEAD], ids[-TAIL:]]
    texts = [cast(str, tokens.tokenizer.decode(part, clean_up_tokenization_spaces=False)) for part in parts]
    return f"at {sample[0]}: '{' ... '.join(map(_visible, texts))}'"


def _visible(text: str) -> str:
    """Return the text with its control characters written out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


# --- The sources of a run.

SAMPLE_ROWS = 1000  # conversations of a sample, unless data.max_samples is given
RANDOM_DOCUMENTS = 4096  # of `data.random: true`


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
    """Read and tokenize the data of a run, or map the shards of an earlier one.

    Args:
        tokens: the tokenizer; None only for random tokens.
        vocab: ids that the model has an embedding for.
        progress: called with a line now and then, where reading takes long.
        data: a file to read as the held-out part, in place of the configuration's (`optrush eval --data`).
        cut: False leaves training documents longer than T whole, for a layout that cuts them itself.

    Raises:
        DataError: with file and line.
    """
    d, T = config.data, config.batch.seq
    if d.random is not None and data is None:
        return _random(config, vocab)
    assert tokens is not None
    reading = _Reading(config, tokens, vocab, progress or silent)
    how = d.too_long if cut else "split"  # of what is evaluated: no row of T tokens has room for more
    if data is not None:
        only = reading.evaluation(data, how)
        return reading.sources(only, only)
    if isinstance(d.eval, str) and not (Path(d.eval).exists() or glob.glob(d.eval, recursive=True)):
        raise DataError(f"`data.eval: {d.eval}`", "no such file", "give a JSONL file, or a fraction such as 0.1")
    limit, held_out = T if cut else None, None
    with _places(config) as (paths, origins):
        work = reading.work(paths, d.clean is not None)
        reading.look(work, limit)
        rows = reading.streamed(work, origins, limit) if d.stream else reading.shelf(work, limit, d.max_samples)
        held = np.zeros(rows.total, bool)
        if isinstance(d.eval, float):
            held = held_rows(rows.total, d.eval, config.seed)
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
            train.counts.cleaned, train.counts.marked = rows.cleaned, rows.marked
            if train.counts.truncated:
                reading.probe(train.counts.rows, train.counts.truncated)
            if held.any():
                held_out = view(rows, T=T, how=how, keep=held, named=named)
        if isinstance(d.eval, str):
            held_out = reading.evaluation(d.eval, how)
    return reading.sources(train, held_out)


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
            sample.write_sample(path, d.max_samples or SAMPLE_ROWS, config.seed, pairs=config.objective == "dpo")
            yield [path], [(1, 1.0)]
        return
    origins = [(readers.find_files(origin.path, cache_root(d.cache)), origin.weight) for origin in d.origins]
    paths = [path for of, _ in origins for path in of]
    if double := next((p for i, p in enumerate(paths) if p.resolve() in {q.resolve() for q in paths[:i]}), None):
        do = "name it once, with a weight if it shall be read more often"
        raise DataError(f"training data from {double}", "two of the sources hold it", do)
    yield paths, [(len(of), weight) for of, weight in origins]


@dataclass
class _Reading:
    """One call of read_sources."""

    config: Config
    tokens: Tokens
    vocab: int
    say: Say
    parts: int = 1
    refused: list[BadRow] = field(default_factory=list)
    kept: KeptRows | None = None
    _first: tuple[list[tuple[RowLocation, Row]], list[list[Document]]] = field(default=([], []))

    def work(self, paths: Sequence[Path], clean: bool) -> TokenizeWork:
        """Return what is to be tokenized."""
        if not clean:
            return TokenizeWork(self.config, self.tokens, tuple(paths), say=self.say)
        self.kept = kept_rows(self.config, self.tokens, paths, self.say)
        return TokenizeWork(self.config, self.tokens, tuple(paths), self.kept.rows, self.kept.key, self.say)

    def look(self, work: TokenizeWork, T: int | None) -> None:
        """Check the first rows before all others are tokenized."""
        d, counts = self.config.data, Counts()
        rows = (entry for job in jobs(work.files, d.text_rows) for entry in parsed(job, d.text_rows, work.kept))
        most = min(SAMPLES, d.max_samples or SAMPLES)
        first = list(islice(((where, row) for _, where, row in rows if row is not None), most))
        good = [(where, row) for where, row in first if not isinstance(row, DataError)]
        made = iter(self.tokens.batch(good, learnt(self.config)))
        samples, documents = list[tuple[RowLocation, Row]](), list[list[Document]]()
        for where, row in first:
            result = row if isinstance(row, DataError) else next(made)
            if isinstance(result, DataError):
                if d.bad_rows == "error":
                    raise result
                continue
            assert not isinstance(row, DataError)
            self._suits(len(result), where)
            cut = [result] if T is None else fit_row(result, T, d.too_long, where, counts)
            samples.append((where, row))
            documents.append([document for sample in cut for document in sample])
        self._first = samples, documents
        if any(documents):  # else all were too long, and what is left is counted later
            self.probe(len(samples) if d.stream else 0, counts.truncated)

    def probe(self, rows: int, truncated: int) -> None:
        """Raise DataError at the first fault; `rows` 0: how many are truncated is unknown yet."""
        most = self.config.data.most_truncated
        probe_rows(*self._first, self.tokens, learnt(self.config), rows=rows, truncated=truncated, most_truncated=most)

    def _suits(self, parts: int, where: RowLocation) -> None:
        """Raise DataError for a row of so many documents if the objective cannot learn from it."""
        self.parts = parts
        asked, pairs = f"`objective: {self.config.objective}`", self.config.objective == "dpo"
        if parts > 1 and not pairs:
            do = "give rows of messages, of prompt and completion, or of text; or take objective: dpo"
            raise DataError(asked, f"a pair of a chosen and a rejected answer at {where}", do)
        if parts == 1 and pairs:
            found = f"a row at {where} that is no pair of a chosen and a rejected answer"
            raise DataError(asked, found, 'give rows {"prompt": ..., "chosen": ..., "rejected": ...}')

    def shelf(self, work: TokenizeWork, T: int | None, most: int | None) -> TokenShards:
        """Return the shards, each checked as it is made: an error stops the run before the rest is tokenized.

        Args:
            T: rows longer than this are an error, if `data.too_long` is `error`.
            most: rows, of which no more than needed are tokenized.
        """
        d, shelf = self.config.data, TokenShards(work.files)
        with closing(tokenized(work, most)) as shards:
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
        return Streamed(work, indexes, origins, T, self.vocab, self.parts, d.max_samples)

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

    def evaluation(self, path: str, how: str) -> Dataset:
        """Return all of a file, to be evaluated on."""
        T = self.config.batch.seq
        work = self.work(readers.find_files(path, cache_root(self.config.data.cache)), clean=False)
        return view(self.shelf(work, T if how == "error" else None, None), T=T, how=how)

    def sources(self, train: Dataset | Streamed, held_out: Dataset | None) -> Sources:
        """Return all that was read, with its counts in a line."""
        evaluated = train if held_out is None else held_out
        record = self.kept and self.kept.record
        if train.tokenized:
            summary = describe_counts(train.counts)
        else:
            summary = f"{len(train)} rows, tokenised while training"
            if record is not None:
                summary += f" ({record['rows'] - record['kept']['rows']} more cleaned away or bad)"
        fingerprint = train.fingerprint
        if held_out is not None and held_out is not train:
            summary += f"; held out: {describe_counts(held_out.counts)}"
            fingerprint += held_out.fingerprint
        names = sorted({name for origin in self.config.data.origins for name in readers.about(origin.path)})
        if names:
            summary += f"; not read as data: {', '.join(names)}"
        return Sources(train, held_out, fingerprint, summary, evaluated.counts.too_long, self.refused, record)


def describe_counts(c: Counts) -> str:
    """Return the counts of a dataset in a line, with all that was left out or cut."""
    left_out = (
        (c.cleaned, "cleaned away"), (c.refused, "bad and set aside"), (c.too_long, "too long"),
        (c.truncated, "truncated"), (c.dropped, "pieces dropped"), (c.targets_lost, "targets lost"),
        (c.marked, "with special tokens written in their text"),
    )  # fmt: skip
    losses = ", ".join(f"{n} {what}" for n, what in left_out if n)
    text = f"{c.documents} documents, {c.tokens} tokens, {c.targets} targets"
    return f"{text} (of {c.rows + c.cleaned} rows: {losses})" if losses else text
