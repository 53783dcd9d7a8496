"""Clean data: measure every row once, apply the filters of `data.clean` in order, write the kept rows and a record.

Worker processes measure the rows, one part of a file at a time; then the filters use the measurements. A filter
that compares rows (how many contain an item, which came first) counts only the rows kept by earlier filters.
Measurements are in memory: some ten bytes per row, for near duplicates a kilobyte more. The result does not depend
on the number of processes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import distributions, version
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from optrush import __version__
from optrush.config import Bounds, Cleaning, Items, nearest
from optrush.data import pool, schema, tokenize
from optrush.data.chat_template import refuse_long, tokenizing
from optrush.data.readers import (
    LINES,
    Chunk,
    chunks,
    find_files,
    form,
    lines,
    opened,
    read_rows_or_errors,
    skip_mark,
    without_blank_end,
)  # fmt: skip
from optrush.data.schema import NO_RULES, Row, RowLocation, RowRules, bad_row
from optrush.data.similarity import (
    EvaluationRuns,
    Sets,
    banding,
    bands,
    find_exact_duplicates,
    find_near_duplicates,
    hashed,
    own_text,
    read_evaluation,
    shingles,
    text_digest,
)
from optrush.data.strict_json import decode_json
from optrush.data.time_limit import TooLong, limited
from optrush.errors import ConfigError, DataError, NeedsError, RunError
from optrush.files import open_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from optrush.data.chat_template import Tokens

WHOLE = "text"  # the field of items that is the entire text of the row
STAYS, BAD = 0, 255  # values of `Table.taken`; between them the filters' numbers, from 1
BATCH_rows = 1024  # rows measured at a time
WORKER_bytes = 4 << 20  # minimum of file bytes per worker: for less, its start would take longer
BATCH_chars = 1 << 20  # text per batch: a tokenizer needs some 100 bytes per token
LANGUAGE_chars = 2000  # of a row's text, used to identify its language
MOST_NEAR_bytes = 16 << 30  # memory for finding near duplicates
FORMAT, MATCHING_s = 3, 5.0  # of the record; limit for a pattern on one row
EXAMPLES, EXAMPLE_chars = 10, 280  # of each filter in the record, and the length of each
LIBRARIES = ("numpy", "py3langid", "rensa", "tokenizers")
ROWS, REMOVED, QUARANTINE = "rows.jsonl", "removed.jsonl", "quarantine.jsonl"

Columns = Mapping[str, np.ndarray]  # measurements, one entry per row
Progress = Callable[[float, int], None]  # the share of the work done, the rows read so far
Values = Mapping[str, np.ndarray]  # any number of entries per row, concatenated


@dataclass(frozen=True)
class Cleaned:
    """The result of cleaning."""

    # Per file (rows,) bool: row k of a part is entry `part.first - 1 + k`. Bad rows are kept, for the next reader to
    # reject.
    kept: dict[Path, np.ndarray]
    record: dict[
        str, Any
    ]  # settings, inputs and results as in cleaning.json; without times, the same for the same input
    table: Table  # has the reason why each row was removed

    def summary(self) -> str:
        """Return the counts as a line of text."""
        taken = [f"{f['name']} {f['taken']:,}" for f in self.record["filters"] if f["taken"]]
        taken += [f"bad {self.record['bad']['rows']:,}"] if self.record["bad"]["rows"] else []
        stay = f"{self.record['kept']['rows']:,} of {self.record['rows']:,} rows remain"
        return stay + (f"; removed by {', '.join(taken)}" if taken else "")


def clean_files(
    files: Sequence[Path],
    settings: Cleaning,
    *,
    tokens: Tokens | None,
    text_rows: str = "file",
    rules: RowRules = NO_RULES,
    bad_rows: Literal["error", "quarantine"] = "error",
    most_bad: float = 0.01,
    workers: int | None = None,
    progress: Progress = lambda share, rows: None,
    cache: Path | None = None,
) -> Cleaned:
    """Return the kept rows of the files, with the record of the cleaning.

    Args:
        files: in order; of equal rows the first is kept.
        tokens: the tokenizer, required by `settings.tokens`.
        bad_rows: `error` raises at the first invalid row, `quarantine` counts them.
        most_bad: the largest allowed share of bad rows with `quarantine`.
        workers: processes; None: one per core.
        cache: for hub data sets, such as the evaluation data.

    Raises:
        ConfigError: contradictory settings.
        DataError: a bad row, too many of them, a field that no row has, no row left.
        NeedsError: a library that a filter needs is missing.
        RunError: a worker was killed.
    """
    check_settings(settings)
    _check_libraries(settings)
    tokenizer = None
    if settings.tokens is not None:
        if tokens is None:
            raise ConfigError("`data.clean.tokens`", "no tokenizer", "name a model; its tokenizer counts: `model: DIR`")
        tokenizer = tokens.tokenizer.backend_tokenizer.to_str()
    judging = [] if settings.decontaminate is None else find_files(settings.decontaminate, cache)
    evaluation = read_evaluation(judging, text_rows, rules) if judging else None
    reading = 0.75 if settings.near_duplicates is not None else 0.95  # approximate share of the work
    task = Task(settings, text_rows, rules, tokenizer, evaluation)
    table = measure_files(
        files, task, workers, lambda share, rows: progress(reading * share, rows), bad_rows == "error"
    )
    if len(table.bad) > most_bad * len(table):
        refused = [tokenize.BadRow(where, bad_row(where, reason)) for _, where, reason in table.bad]
        tokenize.check_bad_share(refused, len(table), most_bad)
    for share in table.apply():
        progress(reading + (1 - reading) * share, len(table))
    given = {"text_rows": text_rows, "bad_rows": bad_rows, "most_bad": most_bad, "objective": rules.objective}
    given |= {"columns": dict(rules.columns), "roles": dict(rules.roles), "compares": rules.compares}
    if tokenizer is not None:
        given["tokenizer"] = hashlib.sha256(tokenizer.encode()).hexdigest()
    cleaned = Cleaned(table.kept(), table.record(files, judging, **given), table)
    if not cleaned.record["kept"]["rows"]:
        names = ", ".join(map(str, files[:3])) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
        do = "loosen the filter that took most, or look at the rows: `optrush data clean` shows examples"
        raise DataError(f"to clean {names}", cleaned.summary(), do)
    return cleaned


def measure_files(files: Sequence[Path], task: Task, workers: int | None, progress: Progress, strict: bool) -> Table:
    """Return the measurements and bad rows of all files; `strict`: raise DataError at the first bad row."""
    parts = [part for file in files for part in chunks(file, tokenize.chunk_bytes(files), task.text_rows)]
    # The cost of a part: its bytes, or row groups of a Parquet file.
    sizes = [max(1, p.file.stat().st_size if p.end is None else p.end - p.start) for p in parts]
    table, done = Table(task), 0.0
    table.stamps = {file: _stamp(file) for file in files}
    for part, size, measured in zip(parts, sizes, _measured(task, parts, workers)):
        table.add(part, measured)
        if table.bad and strict:
            raise bad_row(*table.bad[0][1:])
        progress((done := done + size) / sum(sizes), len(table))
    return table


def check_settings(settings: Cleaning) -> None:
    """Raise ConfigError for bounds the wrong way round, an invalid pattern, items without a condition, or no filter."""
    bounded = [("chars", settings.chars), ("tokens", settings.tokens)]
    bounded += [(f"items[{i}].bounds", entry.bounds) for i, entry in enumerate(settings.items)]
    for name, bounds in bounded:
        if bounds is None:
            continue
        least, most = bounds
        if (least is None and most is None) or (least is not None and most is not None and least > most):
            do = "give [least, most]; null for no limit"
            raise ConfigError(f"`data.clean.{name}: {list(bounds)}`", "the minimum exceeds the maximum", do)
    for i, entry in enumerate(settings.items):
        name = f"`data.clean.items[{i}]`"
        if entry.bounds is None and entry.rarest is None:
            raise ConfigError(name, "neither `bounds` nor `rarest`", "set one of them")
        if entry.field == WHOLE and entry.pattern is None:
            do = 'define items of the text, `pattern: "^- (.+)$"`, or use another `field`'
            raise ConfigError(name, "the whole text as one item", do)
        if entry.pattern is not None:
            try:
                re.compile(entry.pattern)
            except re.error as error:
                asked = f"`data.clean.items[{i}].pattern: {entry.pattern}`"
                raise ConfigError(asked, f"not a regular expression: {error}", "fix it; quote it in YAML") from None
    if not filters(settings):
        do = "add a filter: data.clean.chars, tokens, items, repeated_lines, language, exact_duplicates, ..."
        raise ConfigError("`data.clean`", "no filter", do)


def _check_libraries(settings: Cleaning) -> None:
    for key, library, extra in (("near_duplicates", "rensa", "dedup"), ("language", "py3langid", "language")):
        if getattr(settings, key) and importlib.util.find_spec(library) is None:
            do = f"python -m pip install 'optrush[{extra}]'"
            raise NeedsError(f"`data.clean.{key}`", f"the library {library} is not installed", do)
    if settings.language:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier

        known = LanguageIdentifier.from_model_file(MODEL_FILE).labels
        for code in settings.language:
            if code not in known:
                raise ConfigError(f"`data.clean.language: {code}`", "unknown language code", nearest(code, known))


# --- The filters.


class Filter(NamedTuple):
    """One filter: its name in records, its kind, its label, and the index of its items."""

    name: str
    kind: str
    label: str
    at: int = 0


def filters(settings: Cleaning) -> list[Filter]:
    """Return the configured filters in order."""
    chosen: list[Filter | None] = [
        settings.chars and Filter("chars", "chars", f"characters: {_limits(settings.chars)}"),
        settings.tokens and Filter("tokens", "tokens", f"tokens: {_limits(settings.tokens)}"),
    ]
    for i, entry in enumerate(settings.items):
        name, title = f"items[{i}]", _title(entry)
        if entry.bounds is not None:
            chosen.append(Filter(f"{name}.bounds", "count", f"number of {title}: {_limits(entry.bounds)}", i))
        if entry.rarest is not None:
            chosen.append(Filter(f"{name}.rarest", "rare", f"{title} in at least {entry.rarest:,} rows", i))
    if (most := settings.repeated_lines) is not None:
        chosen.append(Filter("repeated_lines", "repeated", f"in repeated lines: at most {most:.4g}"))
    if settings.language:
        chosen.append(Filter("language", "language", f"language: {', '.join(settings.language)}"))
    if settings.exact_duplicates:
        chosen.append(Filter("exact_duplicates", "exact", "exact duplicates"))
    if (least := settings.near_duplicates) is not None:
        chosen.append(Filter("near_duplicates", "near", f"near duplicates: similarity from {least:.4g}"))
    if settings.decontaminate is not None:
        chosen.append(Filter("decontaminate", "contaminated", f"text shared with {settings.decontaminate}"))
    return [entry for entry in chosen if entry is not None]


def _title(items: Items) -> str:
    return items.field if items.pattern is None else f"/{items.pattern}/ in {items.field}"


def _limits(bounds: Bounds) -> str:
    least, most = bounds
    given = (("at least", least), ("at most", most))
    return ", ".join(f"{side} {bound:,.10g}" for side, bound in given if bound is not None) or "any"


def _outside(rule: Filter, settings: Cleaning, columns: Columns) -> np.ndarray:
    """Return the rows that a filter removes, (N,) bool; all False for filters that compare rows."""
    if rule.kind in ("chars", "tokens"):
        return _beyond(columns[rule.kind], getattr(settings, rule.kind))
    if rule.kind == "count":
        return _beyond(np.maximum(columns[f"items{rule.at}"], 0), settings.items[rule.at].bounds or (None, None))
    if rule.kind == "repeated":
        return np.asarray(columns["repeated"] > (settings.repeated_lines or 0.0))
    if rule.kind == "language":
        return ~np.isin(columns["language"], np.array([b"", *(code.encode() for code in settings.language)]))
    if rule.kind == "contaminated":
        return columns["contaminated"] > 0
    return np.zeros(len(columns["chars"]), bool)


def _beyond(values: np.ndarray, bounds: Bounds) -> np.ndarray:
    least, most = bounds
    low, high = -math.inf if least is None else least, math.inf if most is None else most
    return np.asarray((values < low) | (values > high))


def items_of(items: Items, row: Mapping[str, Any], text: str) -> list[str] | None:
    """Return the row's items unchanged; None if it has no such field.

    In a list of objects, the field of each. Entries other than text become JSON; empty ones are dropped.
    """
    entries: list[Any] | None = [text] if items.field == WHOLE else _under(row, items.field.split("."))
    if entries is None:
        return None
    options: dict[str, Any] = {"sort_keys": True, "ensure_ascii": False, "separators": (",", ":")}
    texts = [entry if isinstance(entry, str) else json.dumps(entry, **options) for entry in entries]
    if items.pattern is not None:
        pattern = re.compile(items.pattern, re.MULTILINE)
        try:
            with limited(MATCHING_s):
                texts = [m[1] if pattern.groups else m[0] for t in texts for m in pattern.finditer(t)]
        except TooLong:
            asked = f"`data.clean.items` with the pattern {items.pattern}"
            raise ConfigError(asked, f"it takes longer than {MATCHING_s:g} s for one row", "simplify it") from None
    return [t for t in texts if t and t.strip()]


def _under(value: Any, keys: list[str]) -> list[Any] | None:
    for i, key in enumerate(keys):
        if isinstance(value, list):
            parts = [part for entry in value if (part := _under(entry, keys[i:])) is not None]
            return [entry for part in parts for entry in part] if parts else None
        if not isinstance(value, dict) or value.get(key) is None:
            return None
        value = value[key]
    return value if isinstance(value, list) else [value]


def _different(items: list[str] | None) -> list[str]:
    """Return the distinct items in order, ignoring case and outer white space."""
    return list(dict.fromkeys(item.strip().casefold() for item in items or ()))


def repeated_share(text: str) -> float:
    """Return the fraction of a text's characters in repeated lines; blank lines do not count.

    Source: the duplicate line character fraction of Gopher (Rae et al. 2021, https://arxiv.org/abs/2112.11446, A1.1).
    """
    parts = [line for line in map(str.strip, text.split("\n")) if line]
    every = sum(map(len, parts))
    return (every - sum(map(len, set(parts)))) / every if every else 0.0


# --- Measuring rows.


class Task(NamedTuple):
    """The settings of a worker, with `data.text_rows` and the tokenizer as JSON."""

    settings: Cleaning
    text_rows: str
    rules: RowRules
    tokenizer: str | None
    evaluation: EvaluationRuns | None


class Measured(NamedTuple):
    """A part's columns and values, and its bad rows: index in the part, line, reason."""

    columns: dict[str, np.ndarray]
    values: dict[str, np.ndarray]
    bad: list[tuple[int, int, str]]


class _Entry(NamedTuple):
    """A good row: its index in the batch, the raw and the parsed row, and its text."""

    place: int
    raw: dict[str, Any]
    row: Row
    text: str


def _measured(task: Task, parts: Sequence[Chunk], workers: int | None) -> Iterator[Measured]:
    def lost(part: Chunk, what: str) -> RunError:
        asked = f"to measure {part.file} from row {part.first} on, for cleaning"
        return RunError(asked, f"the process {what}", "free memory, or clean fewer files at a time")

    size = sum(part.file.stat().st_size if part.end is None else part.end - part.start for part in parts)
    workers = min(workers or tokenize.cores(), len(parts), size // WORKER_bytes)
    return pool.map_ahead(Measure(task), parts, workers, lost)


class Measure:
    """Measure parts; one instance per process.

    A filter skips rows that earlier per-row filters removed, so cheap filters come first.
    """

    def __init__(self, task: Task) -> None:
        self.task, self.settings = task, task.settings
        self.filters = filters(task.settings)
        self.tokenizer: Tokenizer | None = None
        if task.tokenizer is not None:
            from tokenizers import Tokenizer

            self.tokenizer = Tokenizer.from_str(task.tokenizer)
            self.tokenizer.no_truncation()
            self.tokenizer.no_padding()

    def __reduce__(self) -> tuple[type[Measure], tuple[Task]]:
        return Measure, (self.task,)

    def __call__(self, chunk: Chunk, beat: pool.Beat) -> Measured:
        """Return the measurements of a part."""
        blocks: list[tuple[Columns, Values]] = []
        bad: list[tuple[int, int, str]] = []
        done = 0
        compared = bool(filters(self.task.settings))
        for places, entries, refused in _batches(chunk, self.task.text_rows, self.task.rules, compared):
            blocks.append(self._block(np.array(places), entries))
            bad += [(done + place, places[place], reason) for place, reason in refused]
            done += len(places)
            beat(len(places))
        columns, values = (
            {name: np.concatenate([block[name] for block in kind]) for name in (kind[0] if kind else ())}
            for kind in ([columns for columns, _ in blocks], [values for _, values in blocks])
        )
        return Measured(columns, values, bad)

    def _block(self, places: np.ndarray, entries: list[_Entry]) -> tuple[Columns, Values]:
        n = len(places)
        columns, values = {"line": places, "chars": np.zeros(n, np.int64)}, dict[str, np.ndarray]()
        columns["chars"][[e.place for e in entries]] = [len(e.text) for e in entries]
        for rule in self.filters:
            measured, more = self._figures(rule, entries)
            values |= more
            for name, figures in measured.items():
                columns[name] = np.zeros((n, *figures.shape[1:]), figures.dtype)
                columns[name][[e.place for e in entries]] = figures
            taken = _outside(rule, self.settings, columns)
            entries = [e for e in entries if not taken[e.place]]
        return columns, values

    def _figures(self, rule: Filter, entries: list[_Entry]) -> tuple[Columns, Values]:
        """Return the columns and values of these rows that a filter needs."""
        texts = [e.text for e in entries]
        if rule.kind == "tokens":
            assert self.tokenizer is not None
            for text in texts:
                refuse_long(text, f"the row that begins {text[:60]!r}")
            try:
                with tokenizing("rows"):
                    encoded = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            except DataError:
                for text in texts:
                    with tokenizing(f"the row that begins {text[:60]!r}"):
                        self.tokenizer.encode(text)
                raise
            return {"tokens": np.array([len(e) for e in encoded], np.int64)}, {}
        if rule.kind in ("count", "rare"):
            return self._items(rule, entries)
        if rule.kind == "repeated":
            return {"repeated": np.array([repeated_share(t) for t in texts], np.float64)}, {}
        if rule.kind == "language":  # texts without letters have no code
            from py3langid import classify

            codes = [classify(t)[0] if any(map(str.isalpha, t)) else "" for t in (t[:LANGUAGE_chars] for t in texts)]
            return {"language": np.array(codes, "S8")}, {}
        if rule.kind == "exact":
            return {"digest": np.frombuffer(b"".join(map(text_digest, texts)), "<u8").reshape(-1, 2)}, {}
        if rule.kind == "near":
            assert self.settings.near_duplicates is not None
            sets = [shingles(own_text(e.row)) for e in entries]
            runs, sizes = np.concatenate([np.zeros(0, np.uint32), *sets]), np.array(list(map(len, sets)), np.int32)
            keys = bands(runs, sizes[sizes > 0], banding(self.settings.near_duplicates))
            return {"shingles": sizes}, {"shingles": runs, "bands": keys}
        if self.task.evaluation is not None and rule.kind == "contaminated":
            shared = [self.task.evaluation.shared(own_text(e.row)) for e in entries]
            return {"contaminated": np.array(shared, np.int32)}, {}
        return {}, {}

    def _items(self, rule: Filter, entries: list[_Entry]) -> tuple[Columns, Values]:
        """Return each row's number of items, -1 if it has no such field; for `rare` also of the distinct ones."""
        items = [items_of(self.settings.items[rule.at], e.raw, e.text) for e in entries]
        columns = {f"items{rule.at}": np.array([-1 if f is None else len(f) for f in items], np.int32)}
        if rule.kind == "count":
            return columns, {}
        different = list(map(_different, items))
        if self.settings.items[rule.at].bounds is not None:
            columns.clear()  # already counted by the filter `count`, for more rows
        columns[f"different{rule.at}"] = np.array(list(map(len, different)), np.int32)
        return columns, {f"items{rule.at}": hashed(item for row in different for item in row)}


def _batches(
    chunk: Chunk, text_rows: str, rules: RowRules, compared: bool
) -> Iterator[tuple[list[int], list[_Entry], list[tuple[int, str]]]]:
    """Yield (lines of the rows, good rows, bad rows with the reason), a batch at a time."""
    places: list[int] = []
    entries: list[_Entry] = []
    bad: list[tuple[int, str]] = []
    chars = 0
    for where, raw in read_rows_or_errors(chunk, text_rows):
        place = len(places)
        places.append(where.line)
        try:
            if isinstance(raw, DataError):
                raise raw
            row = schema.parse_row(where, raw, rules)
            if compared and any(isinstance(part, schema.Chat) and part.images for part in schema.parts_of(row)):
                raise schema.bad_row(where, "it has images; data.clean only filters text")
        except DataError as error:
            bad.append((place, error.found))
        else:
            text = schema.row_text(row)
            entries.append(_Entry(place, raw, row, text))
            chars += len(text)
        if len(places) >= BATCH_rows or chars >= BATCH_chars:
            yield places, entries, bad
            places, entries, bad, chars = [], [], [], 0
    if places:
        yield places, entries, bad


# --- Applying the filters.


class Table:
    """The rows of all files, N in the order in which they were added."""

    def __init__(self, task: Task) -> None:
        self.task, self.settings = task, task.settings
        self.filters = filters(task.settings)
        self.parts: list[Chunk] = []
        self.stamps: dict[Path, tuple[int, int]] = {}  # of the files, when they were first read
        self.begins = [0]  # the first row of each part, and N
        self.bad: list[tuple[int, RowLocation, str]] = []  # bad rows with the reason
        self.columns: Columns = {}  # measurements
        self.values: Values = {}
        self._added: list[Measured] = []
        self._near_bytes = 0

    def __len__(self) -> int:
        return self.begins[-1]

    def add(self, part: Chunk, measured: Measured) -> None:
        """Add the next part's rows."""
        begin = self.begins[-1]
        self.bad += [(begin + place, RowLocation(part.file, line), reason) for place, line, reason in measured.bad]
        self._added.append(measured)
        self.parts.append(part)
        self.begins.append(begin + len(measured.columns.get("line", ())))
        self._near_bytes += sum(
            measured.values[name].nbytes for name in ("shingles", "bands") if name in measured.values
        )
        if self._near_bytes > MOST_NEAR_bytes:
            found = f"more than {MOST_NEAR_bytes >> 30} GiB of memory for {len(self):,} rows"
            do = "clean fewer files at a time, or use a tool for terabytes, such as datatrove"
            raise NeedsError("`data.clean.near_duplicates`", found, do)

    def apply(self) -> Iterator[float]:
        """Apply the filters; yield the share of the work done."""
        self.columns, self.values = (
            {name: np.concatenate([part[name] for part in kind if part]) for name in next(filter(None, kind), {})}
            for kind in ([m.columns for m in self._added], [m.values for m in self._added])
        )
        self._added.clear()
        n = len(self)
        self.taken = np.zeros(n, np.uint8)  # the filter that removed each row
        self.taken[[i for i, _, _ in self.bad]] = BAD
        # For a duplicate, the kept row; for a rare item, its index among the row's distinct items.
        self.of = np.zeros(n, np.int64)
        self.share = np.zeros(n)  # near duplicate: similarity; rare item: number of rows
        for number, rule in enumerate(self.filters, 1):
            alive = self.taken == STAYS
            if rule.kind in ("count", "rare"):
                self._check_field(rule, alive)
            if rule.kind == "rare":
                self._take_rare(rule, alive, number)
            elif rule.kind == "exact":
                again, first = find_exact_duplicates(self.columns["digest"], alive)
                self.taken[again], self.of[again] = number, first
            elif rule.kind == "near":
                yield from self._take_near(alive, number)
            else:
                self.taken[alive & _outside(rule, self.settings, self.columns)] = number
        yield 1.0

    def _check_field(self, rule: Filter, alive: np.ndarray) -> None:
        if alive.any() and (self.columns[f"items{rule.at}"][alive] < 0).all():
            _, raw = next(self.reread([int(np.flatnonzero(alive)[0])]))
            name = f"`data.clean.items[{rule.at}].field: {self.settings.items[rule.at].field}`"
            known = ", ".join(list(raw)[:8])
            raise DataError(name, f"no row has it; the first row has {known}", "use a key of the rows, dotted")

    def _take_rare(self, rule: Filter, alive: np.ndarray, number: int) -> None:
        """Remove rows with an item that too few rows have; a row counts once per item."""
        least = self.settings.items[rule.at].rarest or 0
        sizes, hashes = self.columns[f"different{rule.at}"].astype(np.int64), self.values[f"items{rule.at}"]
        mine = np.repeat(alive, sizes)
        known, counts = np.unique(hashes[mine], return_counts=True)
        rows = np.full(len(hashes), least, np.int64)  # number of rows with each item
        rows[mine] = counts[np.searchsorted(known, hashes[mine])]
        some = np.flatnonzero(alive & (sizes > 0))
        starts = (np.cumsum(sizes) - sizes)[some]
        lowest = np.minimum.reduceat(rows, starts) if len(some) else np.zeros(0, np.int64)
        for k in np.flatnonzero(lowest < least).tolist():
            i, start = int(some[k]), int(starts[k])
            self.taken[i], self.share[i] = number, lowest[k]
            self.of[i] = int(np.argmin(rows[start : start + sizes[i]]))

    def _take_near(self, alive: np.ndarray, number: int) -> Iterator[float]:
        threshold, sizes = self.settings.near_duplicates or 0.0, self.columns["shingles"]
        rows = np.flatnonzero((sizes > 0) & alive)
        if not len(rows):
            return
        keys = self.values["bands"][alive[sizes > 0]]  # rows without words have no keys
        for i, like, share in find_near_duplicates(keys, Sets(self.values["shingles"], sizes), rows, threshold):
            self.taken[i], self.of[i], self.share[i] = number, like, share
            yield i / len(self)

    # --- Locations, rows, reasons.

    def where(self, i: int) -> RowLocation:
        """Return the location of row i."""
        return RowLocation(self.parts[self._part(i)].file, int(self.columns["line"][i]))

    def _part(self, i: int) -> int:
        return int(np.searchsorted(self.begins, i, "right")) - 1

    def reread(self, rows: Sequence[int]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield these good rows, read again from their files; `rows` is ascending."""
        left = list(rows)[::-1]
        while left:
            part = self._part(left[-1])
            for i, (_, raw) in enumerate(read_rows_or_errors(self.parts[part], self.task.text_rows), self.begins[part]):
                if i == left[-1]:
                    if isinstance(raw, DataError):
                        raise _changed(self.parts[part].file)
                    yield left.pop(), raw
                    if not left or left[-1] >= self.begins[part + 1]:
                        break
            else:
                raise _changed(self.parts[part].file)

    def kept(self) -> dict[Path, np.ndarray]:
        """Return per file the mask of rows that are kept or bad, (rows,) bool."""
        masks: dict[Path, np.ndarray] = {}
        stays = (self.taken == STAYS) | (self.taken == BAD)
        for part, begin, end in zip(self.parts, self.begins, self.begins[1:]):
            before = masks.get(part.file, np.zeros(0, bool))
            gap = np.zeros(part.first - 1 - len(before), bool)  # lines that are not rows
            masks[part.file] = np.concatenate([before, gap, stays[begin:end]])
        return masks

    def reason(self, i: int, reread: Callable[[], Mapping[str, Any]]) -> str:
        """Return the reason why row i was removed; `reread` returns the raw row, for reasons that quote it."""
        rule = self.filters[int(self.taken[i]) - 1]
        settings, columns = self.settings, self.columns
        if rule.kind in ("chars", "tokens"):
            name = "characters" if rule.kind == "chars" else "tokens"
            return f"{columns[rule.kind][i]:,} {name}; {_limits(getattr(settings, rule.kind))}"
        if rule.kind == "count":
            items, n = settings.items[rule.at], int(columns[f"items{rule.at}"][i])
            assert items.bounds is not None
            return (f"no {items.field}" if n < 0 else f"{n:,} {_title(items)}") + f"; {_limits(items.bounds)}"
        if rule.kind == "rare":
            items, row = settings.items[rule.at], reread()
            item = _different(items_of(items, row, self._text(i, row)))[int(self.of[i])]
            n = int(self.share[i])
            return f"{_shortened(item, 80)!r} is in {n:,} row{'s' * (n != 1)}; at least {items.rarest:,}"
        if rule.kind == "repeated":
            share = columns["repeated"][i]
            return f"{share:.1%} of its characters are in repeated lines; at most {settings.repeated_lines:.4g}"
        if rule.kind == "language":
            return f"its language is {columns['language'][i].decode()}"
        if rule.kind == "exact":
            return f"the same text as {self.where(int(self.of[i]))}"
        if rule.kind == "near":
            return f"similarity {self.share[i]:.3f} with {self.where(int(self.of[i]))}"
        evaluation = self.task.evaluation
        assert evaluation is not None
        where = evaluation.places[int(columns["contaminated"][i]) - 1]
        passage = evaluation.passage(schema.parse_row(self.where(i), dict(reread()), self.task.rules))
        return f"shares words with {where}: {_shortened(passage, 120)!r}"

    def _text(self, i: int, raw: Mapping[str, Any]) -> str:
        return schema.row_text(schema.parse_row(self.where(i), dict(raw), self.task.rules))

    # --- The record.

    def record(self, files: Sequence[Path], evaluation: Sequence[Path], **given: Any) -> dict[str, Any]:
        """Return the record of a cleaning: settings (plus `given`), inputs and results; without times."""
        stays = self.taken == STAYS
        settings = self.settings.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        first = [{"file": str(w.file), "line": w.line, "reason": reason} for _, w, reason in self.bad[:EXAMPLES]]
        mask = hashlib.sha256(np.packbits(stays).tobytes()).hexdigest()
        installed = {d.name for d in distributions()}
        versions = {name: version(name) for name in LIBRARIES if name in installed}
        return {
            "format": FORMAT, "settings": settings, **given, "versions": {"optrush": __version__, **versions},
            "inputs": list(map(_named, files)), "evaluation": list(map(_named, evaluation)), "rows": len(self),
            "bad": {"rows": len(self.bad), "examples": first},
            "kept": {"rows": int(np.count_nonzero(stays)), "sha256": mask},
            "filters": self._filters(),
        }  # fmt: skip

    def _filters(self) -> list[dict[str, Any]]:
        """Return for each filter the number of rows that it removed, the number left, and the first removed rows."""
        counts = np.bincount(self.taken, minlength=BAD + 1)
        left = len(self) - int(counts[BAD])
        firsts = {n: np.flatnonzero(self.taken == n)[:EXAMPLES].tolist() for n in range(1, len(self.filters) + 1)}
        examples: dict[int, dict[str, Any]] = {}
        for i, raw in self.reread(sorted(i for first in firsts.values() for i in first)):
            where, reason = self.where(i), self.reason(i, partial(dict, raw))
            text = _shortened(self._text(i, raw), EXAMPLE_chars)
            examples[i] = {"file": str(where.file), "line": where.line, "reason": reason, "text": text}
        results = []
        for number, rule in enumerate(self.filters, 1):
            left -= (taken := int(counts[number]))
            first = [examples[i] for i in firsts[number]]
            results.append({"name": rule.name, "label": rule.label, "taken": taken, "left": left, "examples": first})
        return results


def _changed(file: Path) -> DataError:
    return DataError(f"to clean {file}", "it changed during reading", "clean it again when no process writes to it")


def _stamp(file: Path) -> tuple[int, int]:
    return file.stat().st_size, file.stat().st_mtime_ns


def _shortened(text: str, most: int) -> str:
    line = " ".join(text[: 2 * most].split())
    return line if len(line) <= most and len(text) <= 2 * most else line[: most - 1] + "…"


def file_sha256(file: Path) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal digits."""
    with open_file(file) as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _named(file: Path) -> dict[str, Any]:
    return {"file": str(file), "bytes": file.stat().st_size, "sha256": file_sha256(file)}


# --- The output of `optrush data clean`.


def write_rows(cleaned: Cleaned, folder: Path) -> dict[str, Any]:
    """Write the kept, removed and bad rows; return the record with the digests of these files.

    Rows of JSON Lines files are copied byte for byte, others are written as JSON (NaN becomes null).
    Raises DataError: a file has changed since it was measured.
    """
    table = cleaned.table
    with (folder / ROWS).open("wb") as rows, (folder / REMOVED).open("wb") as removed:
        for i, raw, reread in _all_rows(table):
            taken = table.taken[i]
            if taken == STAYS:
                rows.write(raw if raw.endswith(b"\n") else raw + b"\n")
            elif taken != BAD:
                where, name = table.where(i), table.filters[taken - 1].name
                values = {"file": str(where.file), "line": where.line, "filter": name}
                removed.write(_line(values | {"reason": table.reason(i, reread)}))
    if table.bad:
        with (folder / QUARANTINE).open("wb") as bad:
            bad.writelines(_line({"file": str(w.file), "line": w.line, "reason": reason}) for _, w, reason in table.bad)
    names = [name for name in (ROWS, REMOVED, QUARANTINE) if (folder / name).exists()]
    output = {name: {"bytes": (folder / name).stat().st_size, "sha256": file_sha256(folder / name)} for name in names}
    return {**cleaned.record, "output": output}


def _all_rows(table: Table) -> Iterator[tuple[int, bytes, Callable[[], dict[str, Any]]]]:
    """Yield every row: its number, its line of JSON (empty if bad), and a function that returns the raw row."""
    for file, numbers in groupby(range(len(table.parts)), lambda k: table.parts[k].file):
        parts = list(numbers)
        i, end = table.begins[parts[0]], table.begins[parts[-1] + 1]
        for raw, reread in _rows_of(file, table.task.text_rows):
            if i < end:
                yield i, raw, reread
            i += 1
        if i != end or table.stamps[file] != _stamp(file):
            raise _changed(file)


def _rows_of(file: Path, text_rows: str) -> Iterator[tuple[bytes, Callable[[], dict[str, Any]]]]:
    suffix, packing = form(file) or ("", "")
    if suffix in LINES:
        with opened(file, packing) as stream:
            skip_mark(stream)
            for raw in without_blank_end(lines(stream), stream):
                yield raw or b"", partial(decode_json, raw or b"")
        return
    for _, row in read_rows_or_errors(file, text_rows):
        good = {} if isinstance(row, DataError) else row
        yield _line(good), partial(dict, good)


def _line(values: dict[str, Any]) -> bytes:
    try:
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
    except ValueError:  # NaN, a missing number in many Parquet files
        text = json.dumps(_finite(values), ensure_ascii=False)
    return text.encode() + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
