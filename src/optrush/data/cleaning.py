"""Clean data: measure every row once, apply the filters of `data.clean` in their order, write what stays and why not.

Rows are measured in worker processes, part by part of a file; then the filters are applied to the figures. A filter
that counts over rows (how many contain an item, which came first) counts the rows that the filters before it have left.
Columns take some ten bytes a row; what rows are compared by (runs of words, band keys, hashes of items) is in files of
about a kilobyte a row. The result does not depend on the number of processes.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.util
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.metadata import distributions, version
from itertools import count, groupby, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from optrush import __version__
from optrush.config import Bounds, Cleaning, Items, nearest
from optrush.data import schema
from optrush.data.readers import (
    LINES,
    Chunk,
    attempts,
    chunks,
    find_files,
    form,
    lines,
    opened,
    read_rows,
    skip_mark,
    without_blank_end,
)  # fmt: skip
from optrush.data.schema import (
    NO_RULES,
    Chat,
    Completion,
    Judged,
    Pair,
    Row,
    RowLocation,
    RowRules,
    bad_row,
    decode_json,
)
from optrush.errors import ConfigError, DataError, NeedsError, RunError
from optrush.launch import die_with_parent

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from optrush.data.chat_template import Tokens

WORK = "optrush-clean-"  # how the names of temporary folders begin
SHARED_words = 13  # in a row, with an evaluation text
WHOLE = "text"  # as a field of items: all of the row's text
COMMON_ROLES = ("system", "developer")  # their texts are shared by many rows by design
STAYS, BAD = 0, 255  # of `Table.taken`; between them the filters' numbers, from 1
BATCH_rows = 1024  # rows that are measured at a time,
BATCH_chars = 1 << 20  # and about how much text: a tokenizer needs some 100 bytes a token while it works
LANGUAGE_chars = 2000  # of a row's text, by which its language is identified
BLOCK = 1 << 16  # rows whose keys or items are read at once
BANDS = 8  # bands whose keys are read at once
FORMAT = 2  # of the record
EXAMPLES, EXAMPLE_chars = 10, 280  # of each filter in the record, and the length of each
BINS = 60  # of a histogram, about
LIBRARIES = ("numpy", "py3langid", "rensa", "tokenizers")
ROWS, REMOVED, QUARANTINE, RECORD, PAGE = (
    "rows.jsonl", "removed.jsonl", "quarantine.jsonl", "cleaning.json", "cleaning.html",
)  # fmt: skip

Columns = Mapping[str, np.ndarray]  # what was measured, one entry a row
Progress = Callable[[float, int], None]  # the share of the work that is done, the rows read so far
Write = Callable[[str, np.ndarray], None]  # appends values to the file of that name


@dataclass(frozen=True)
class Cleaned:
    """The result of a cleaning."""

    # Of each file (rows,) bool: row k of a part is entry `part.first - 1 + k`. A bad row is kept: the next reader must
    # reject it again.
    kept: dict[Path, np.ndarray]
    record: dict[
        str, Any
    ]  # settings, inputs and results as in cleaning.json; without times, the same for the same input
    table: Table  # why each row was taken

    def summary(self) -> str:
        """Return the counts in a line."""
        taken = [f"{f['name']} {f['taken']:,}" for f in self.record["filters"] if f["taken"]]
        taken += [f"bad {self.record['bad']['rows']:,}"] if self.record["bad"]["rows"] else []
        stay = f"{self.record['kept']['rows']:,} of {self.record['rows']:,} rows stay"
        return stay + (f"; taken by {', '.join(taken)}" if taken else "")


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
    folder: Path | None = None,
    cache: Path | None = None,
) -> Cleaned:
    """Return which rows of the files stay.

    Args:
        files: in the order in which of two equal rows the first stays.
        tokens: the tokenizer, required by `settings.tokens`.
        bad_rows: `error` raises at the first row that cannot be read, `quarantine` counts them.
        most_bad: the share of the rows that may be bad with `quarantine`.
        workers: processes; None: one a core.
        folder: of temporary files, about a kilobyte a row; None: the system's.
        cache: of data sets of the hub, one of which may be the evaluation.

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
            do = "name the model whose tokenizer counts: `model: DIR`"
            raise ConfigError("`data.clean.tokens`", "no tokenizer", do)
        tokenizer = tokens.tokenizer.backend_tokenizer.to_str()
    judging = [] if settings.decontaminate is None else find_files(settings.decontaminate, cache)
    evaluation = read_evaluation(judging, text_rows, rules) if judging else None
    parts = [part for file in files for part in chunks(file, text_rows=text_rows)]
    # The cost of a part against that of others: its bytes, or row groups of a Parquet file.
    sizes = [max(1, p.file.stat().st_size if p.end is None else p.end - p.start) for p in parts]
    reading, done = 0.75 if settings.near_duplicates is not None else 0.95, 0.0  # of the work, about
    with tempfile.TemporaryDirectory(prefix=WORK, dir=folder) as name:
        table = Table(Task(settings, text_rows, rules, tokenizer, evaluation, Path(name)))
        table.stamps = {file: _stamp(file) for file in files}
        for part, size, found in zip(parts, sizes, _measured(table.task, parts, workers)):
            table.add(part, found)
            if table.bad and bad_rows == "error":
                raise bad_row(*table.bad[0][1:])
            done += size
            progress(reading * done / sum(sizes), len(table))
        if len(table.bad) > most_bad * len(table):
            from optrush.data import tokenize

            refused = [tokenize.BadRow(where, bad_row(where, why)) for _, where, why in table.bad]
            tokenize.check_bad_share(refused, len(table), most_bad)
        for share in table.apply():
            progress(reading + (1 - reading) * share, len(table))
    given = {"text_rows": text_rows, "bad_rows": bad_rows, "most_bad": most_bad, "objective": rules.objective}
    given |= {"columns": dict(rules.columns), "roles": dict(rules.roles)}
    if tokenizer is not None:
        given["tokenizer"] = hashlib.sha256(tokenizer.encode()).hexdigest()
    cleaned = Cleaned(table.kept(), table.record(files, judging, **given), table)
    if not cleaned.record["kept"]["rows"]:
        names = ", ".join(map(str, files[:3])) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
        do = "loosen the filter that took most, or look at the rows: `optrush data clean` shows examples"
        raise DataError(f"rows that stay of {names}", f"none: {cleaned.summary()}", do)
    return cleaned


def check_settings(settings: Cleaning) -> None:
    """Raise ConfigError for bounds the wrong way round, an invalid pattern, items without a condition, or no filter."""
    bounded = [("chars", settings.chars), ("tokens", settings.tokens)]
    bounded += [(f"items[{i}].bounds", one.bounds) for i, one in enumerate(settings.items)]
    for name, bounds in bounded:
        if bounds is None:
            continue
        least, most = bounds
        if (least is None and most is None) or (least is not None and most is not None and least > most):
            do = "give [least, most]; null for none of one side"
            raise ConfigError(f"`data.clean.{name}: {list(bounds)}`", "no row can be meant by that", do)
    for i, one in enumerate(settings.items):
        name = f"`data.clean.items[{i}]`"
        if one.bounds is None and one.rarest is None:
            raise ConfigError(name, "neither `bounds` nor `rarest`", "give one of them")
        if one.field == WHOLE and one.pattern is None:
            do = 'define an item of the text, `pattern: "^- (.+)$"`, or name another `field`'
            raise ConfigError(name, "the whole text as one item", do)
        if one.pattern is not None:
            try:
                re.compile(one.pattern)
            except re.error as error:
                asked = f"`data.clean.items[{i}].pattern: {one.pattern}`"
                raise ConfigError(asked, f"not a regular expression: {error}", "correct it; in YAML quote it") from None
    if not filters(settings):
        do = "name a filter: data.clean.chars, tokens, items, repeated_lines, language, exact_duplicates, ..."
        raise ConfigError("`data.clean`", "no filter is asked for", do)


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
                raise ConfigError(f"`data.clean.language: {code}`", "no code of a known language", nearest(code, known))


# --- the filters


class Filter(NamedTuple):
    """One filter: its name in records, its kind, its label for people, and the index of its items."""

    name: str
    kind: str
    label: str
    at: int = 0


def filters(settings: Cleaning) -> list[Filter]:
    """Return the configured filters in the order in which they are applied."""
    chosen: list[Filter | None] = [
        settings.chars and Filter("chars", "chars", f"characters: {_limits(settings.chars)}"),
        settings.tokens and Filter("tokens", "tokens", f"tokens: {_limits(settings.tokens)}"),
    ]
    for i, one in enumerate(settings.items):
        name, title = f"items[{i}]", _title(one)
        if one.bounds is not None:
            chosen.append(Filter(f"{name}.bounds", "count", f"number of {title}: {_limits(one.bounds)}", i))
        if one.rarest is not None:
            chosen.append(Filter(f"{name}.rarest", "rare", f"{title} in at least {one.rarest:,} rows", i))
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
    return [one for one in chosen if one is not None]


def _title(items: Items) -> str:
    return items.field if items.pattern is None else f"/{items.pattern}/ in {items.field}"


def _limits(bounds: Bounds) -> str:
    least, most = bounds
    given = (("at least", least), ("at most", most))
    return ", ".join(f"{side} {bound:,.10g}" for side, bound in given if bound is not None) or "any"


def _outside(one: Filter, settings: Cleaning, columns: Columns) -> np.ndarray:
    """Return the rows that a filter takes regardless of other rows, (N,) bool; none for other filters."""
    if one.kind in ("chars", "tokens"):
        return _beyond(columns[one.kind], getattr(settings, one.kind))
    if one.kind == "count":
        return _beyond(np.maximum(columns[f"items{one.at}"], 0), settings.items[one.at].bounds or (None, None))
    if one.kind == "repeated":
        return np.asarray(columns["repeated"] > (settings.repeated_lines or 0.0))
    if one.kind == "language":
        return ~np.isin(columns["language"], np.array([b"", *(code.encode() for code in settings.language)]))
    if one.kind == "contaminated":
        return columns["contaminated"] > 0
    return np.zeros(len(columns["chars"]), bool)


def _beyond(values: np.ndarray, bounds: Bounds) -> np.ndarray:
    least, most = bounds
    low, high = -math.inf if least is None else least, math.inf if most is None else most
    return np.asarray((values < low) | (values > high))


def items_of(items: Items, row: Mapping[str, Any], text: str) -> list[str] | None:
    """Return the row's items as they are; None if it has no such field.

    A field of a list of objects means that field of each. Entries that are not text are their JSON; empty ones none.
    """
    entries: list[Any] | None = [text] if items.field == WHOLE else _under(row, items.field.split("."))
    if entries is None:
        return None
    options: dict[str, Any] = {"sort_keys": True, "ensure_ascii": False, "separators": (",", ":")}
    texts = [entry if isinstance(entry, str) else json.dumps(entry, **options) for entry in entries]
    if items.pattern is not None:
        pattern = re.compile(items.pattern, re.MULTILINE)
        texts = [m[1] if pattern.groups else m[0] for t in texts for m in pattern.finditer(t)]
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


def _different(found: list[str] | None) -> list[str]:
    """Return the different items in their order; case and outer white space do not distinguish them."""
    return list(dict.fromkeys(item.strip().casefold() for item in found or ()))


def repeated_share(text: str) -> float:
    """Return the share of a text's characters in lines that occurred before in it; blank lines do not count.

    Source: the duplicate line character fraction of Gopher (Rae et al. 2021, https://arxiv.org/abs/2112.11446, A1.1).
    """
    parts = [line for line in map(str.strip, text.split("\n")) if line]
    every = sum(map(len, parts))
    return (every - sum(map(len, set(parts)))) / every if every else 0.0


def own_text(row: Row) -> str:
    """Return a row's text without what many rows share by design: system prompts and the tools on offer."""

    def without(part: Chat | Completion) -> Chat | Completion:
        if isinstance(part, Completion):
            return part
        prompt = sum(m.role not in COMMON_ROLES for m in part.messages[: part.prompt])
        return Chat(tuple(m for m in part.messages if m.role not in COMMON_ROLES), prompt=prompt)

    if isinstance(row, Pair):
        return schema.row_text(Pair(without(row.chosen), without(row.rejected)))
    if isinstance(row, Judged):
        return schema.row_text(Judged(tuple(map(without, row.answers)), row.labels))
    return schema.row_text(without(row) if isinstance(row, Chat | Completion) else row)


@dataclass(frozen=True)
class EvaluationRuns:
    """The 13-word runs of all evaluation texts; a row is taken if it has one of them.

    A text of fewer words is one run, which a row must have as its whole. Source: Brown et al. 2020
    (https://arxiv.org/abs/2005.14165, appendix C). Differs from the source: the whole row is taken, not the passage and
    200 characters around it; system prompts and tools are not compared, because rows and evaluation may share them by
    design. A paraphrase or a translation is not found.
    """

    hashes: np.ndarray  # (R,) uint64, ascending
    owners: np.ndarray  # (R,) int32, the text of each
    places: Sequence[RowLocation]  # of the texts

    def shared(self, texts: Sequence[str]) -> np.ndarray:
        """Return for each row's text the number (from 1) of an evaluation text that shares a run, or 0; (N,) int32."""
        found, counts = word_runs(*hashed_words(texts), SHARED_words)
        owners = self._owners(found)
        shared = np.zeros(len(texts), np.int32)
        at = np.flatnonzero(owners)[::-1]  # backwards: of a row's runs the first is written last
        shared[np.repeat(np.arange(len(texts)), counts)[at]] = owners[at]
        return shared

    def passage(self, row: Row) -> str:
        """Return the first words that a contaminated row shares."""
        text = own_text(row)
        first = int(np.flatnonzero(self._owners(word_runs(*hashed_words([text]), SHARED_words)[0]))[0])
        return " ".join(islice(split_words(text), first, first + SHARED_words))

    def _owners(self, found: np.ndarray) -> np.ndarray:
        if not len(self.hashes):
            return np.zeros(len(found), np.int32)
        at = np.minimum(np.searchsorted(self.hashes, found), len(self.hashes) - 1)
        return np.where(self.hashes[at] == found, self.owners[at] + 1, 0).astype(np.int32)


def read_evaluation(files: Sequence[Path], text_rows: str, rules: RowRules = NO_RULES) -> EvaluationRuns:
    """Return the runs of all rows of the evaluation files. Raises DataError: at the first bad row."""
    places: list[RowLocation] = []
    all_hashes, all_owners = [np.zeros(0, np.uint64)], [np.zeros(0, np.int32)]
    pairs = (pair for file in files for pair in read_rows(file, text_rows))
    while batch := list(islice(pairs, BATCH_rows)):
        texts = [own_text(schema.parse_row(where, found, rules)) for where, found in batch]
        found, counts = word_runs(*hashed_words(texts), SHARED_words)
        all_hashes.append(found)
        all_owners.append(np.repeat(np.arange(len(places), len(places) + len(batch), dtype=np.int32), counts))
        places += [where for where, _ in batch]
    hashes, first = np.unique(np.concatenate(all_hashes), return_index=True)
    return EvaluationRuns(hashes, np.concatenate(all_owners)[first], places)


# --- comparing texts by their words: duplicates and near duplicates among rows
#
# Words are letters and digits in a row, case-folded; in scripts without spaces each letter is a word. A run of n words
# is one 64-bit hash, a mixed polynomial of the words' own hashes: the same text gives the same numbers everywhere.
#
# Two texts are near duplicates if the Jaccard similarity of their sets of 5-word runs reaches a threshold. MinHash
# signatures cut into bands select the pairs that are compared in full (Broder 1997; Leskovec, Rajaraman, Ullman, Mining
# of Massive Datasets, 3.4), so no row is removed because of a hash. In the rows' order a row is removed if it is a near
# duplicate of one that stays: every removed row has its like among the rows that stay.

# Thai, Lao, Burmese, Khmer; kana; Han. As words, clauses without spaces would differ whole for one changed letter.
SPACELESS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
WORD = re.compile(rf"[{SPACELESS}]|[^\W{SPACELESS}]+")
LONG_chars = 1 << 20  # a longer text is not split into a list, which would take many times its bytes

RUN_words = 5  # of a run: fewer are shared by unrelated texts of one kind, more are broken by a few changed words
PERMUTATIONS, SEED = 256, 1
TOGETHER = 2  # bands that a pair must share: unlike texts of one kind often share one, seldom two
MISSED = 2e-3  # the share of the pairs exactly at the threshold that may share fewer bands
# A row is compared with at most MOST others, those that share most bands with it first; of a group that shares a band,
# with its first WINDOW members only. Rows made of common phrases share a band with thousands of others.
WINDOW, MOST = 64, 32
PAIRS = 1 << 21  # pairs that are counted at once

_FACTOR, _HALF = np.uint64(0x9E3779B97F4A7C15), np.uint64(32)


@lru_cache(1 << 16)
def _word_hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")


def hashed(words: Iterable[str]) -> np.ndarray:
    """Return the words' hashes, (n,) uint64."""
    return np.fromiter(map(_word_hash, words), np.uint64)


def text_digest(text: str) -> bytes:
    """Return 16 bytes that two texts share if they are equal in normal form C with white space collapsed."""
    return hashlib.blake2b(" ".join(unicodedata.normalize("NFC", text).split()).encode(), digest_size=16).digest()


def split_words(text: str) -> Iterable[str]:
    """Return the text's words, in normal form C and case-folded."""
    folded = unicodedata.normalize("NFC", text).casefold()
    return WORD.findall(folded) if len(folded) < LONG_chars else (m.group() for m in WORD.finditer(folded))


def hashed_words(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of all texts' words one after another, (W,) uint64, and the words of each text, (N,) int64."""
    hashes = [hashed(split_words(text)) for text in texts]
    return np.concatenate([np.zeros(0, np.uint64), *hashes]), np.array([len(h) for h in hashes], np.int64)


def word_runs(hashes: np.ndarray, lengths: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of every n words in a row, text after text, (R,) uint64, and their number a text, (N,) int64.

    A text of fewer than n words has one run, the whole of it; a text without words has none.
    """
    room = np.where(lengths > 0, np.maximum(lengths, n), 0)
    begins = np.cumsum(room) - room
    padded = np.zeros(int(room.sum()), np.uint64)
    padded[stretches(begins, lengths)] = hashes
    counts = np.where(room > 0, room - n + 1, 0)
    at = stretches(begins, counts)
    polynomials = np.zeros(len(at), np.uint64)
    for k in range(n):
        polynomials = polynomials * _FACTOR + padded[at + k]
    return _mixed(polynomials), counts


def stretches(begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the positions begins[i] to begins[i] + lengths[i] - 1 of all i, one after another, int64."""
    at: np.ndarray = np.arange(lengths.sum()) + np.repeat(begins - (np.cumsum(lengths) - lengths), lengths)
    return at


def _mixed(x: np.ndarray) -> np.ndarray:
    """Spread every bit over all: the finalizer of SplitMix64 (Steele, Lea, Flood 2014); uint64 in and out."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return x


def shingles(hashes: np.ndarray, lengths: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each text's set of runs, ascending, one set after another, (S,) uint32, and their sizes, (N,) int64.

    32 bits of a hash are used: two texts of 10,000 words share about 0.02 runs by chance.
    """
    found, counts = word_runs(hashes, lengths, n)
    text = np.repeat(np.arange(len(lengths), dtype=np.uint64), counts)
    keys = np.unique((text << _HALF) | (found >> _HALF))
    return keys.astype(np.uint32), np.bincount((keys >> _HALF).astype(np.int64), minlength=len(lengths))


def exact(digests: np.ndarray, alive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which rows have the digest of an earlier one, and the first row with it; (M,) int64 each.

    Of `digests`, (N, 2) uint64, those of `alive`, (N,) bool, are compared.
    """
    rows = np.flatnonzero(alive)
    compared = digests[rows]
    order = np.lexsort((compared[:, 0], compared[:, 1]))  # stable: of equal ones the first row comes first
    new = np.append(True, (np.diff(compared[order], axis=0) != 0).any(1))[: len(order)]
    first = order[np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))]
    return rows[order[~new]], rows[first[~new]]


def banding(threshold: float) -> tuple[int, int]:
    """Return (bands, rows of a band): the most rows for which at most MISSED of the pairs at the threshold are missed.

    A pair of similarity s agrees in a band with probability p = s^rows, in none of n bands with (1 - p)^n, in exactly
    one with n p (1 - p)^(n - 1).
    """

    def missed(rows: int) -> float:
        n, p = PERMUTATIONS // rows, threshold**rows
        return (1 - p) ** n + n * p * (1 - p) ** (n - 1)

    rows = max((r for r in range(1, PERMUTATIONS // TOGETHER + 1) if missed(r) <= MISSED), default=1)
    return PERMUTATIONS // rows, rows


def bands(shingles: np.ndarray, sizes: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return keys (N, bands) uint32 of N sets of runs; two sets share a key if they agree in all rows of that band.

    `shingles` and `sizes` are (S,) uint32 and (N,) int64, no size 0; `shape` is as `banding` returns it.
    """
    from rensa import RMinHash

    count, rows = shape
    if not len(sizes):
        return np.zeros((0, count), np.uint32)
    ends = np.concatenate([[0], np.cumsum(sizes)]).astype(np.uint64)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(shingles.astype(np.uint64), ends, PERMUTATIONS, SEED)
    signatures = np.array(matrix.to_rows(), np.uint64)[:, : count * rows]
    keys = np.zeros((len(sizes), count), np.uint64)
    for k in range(rows):
        keys = _mixed(keys + signatures[:, k::rows])
    return keys.astype(np.uint32)


class Sets:
    """The rows' sets of runs, one after another in a file of uint32; `sizes` (N,) are those of each row."""

    def __init__(self, file: Path, sizes: np.ndarray) -> None:
        self._all = np.memmap(file, np.uint32, "r") if file.stat().st_size else np.zeros(0, np.uint32)
        self._sizes, self._ends = sizes, np.cumsum(sizes, dtype=np.int64)

    def similarity(self, a: int, b: int, least: float) -> float:
        """Return the Jaccard similarity of two rows, or 0 if their sizes alone limit it to less than `least`."""
        few, many = sorted((int(self._sizes[a]), int(self._sizes[b])))
        if few < least * many:
            return 0.0
        both = np.sort(np.concatenate([self._all[self._ends[i] - self._sizes[i] : self._ends[i]] for i in (a, b)]))
        shared = int(np.count_nonzero(both[1:] == both[:-1]))
        return shared / (few + many - shared)


class Groups:
    """N rows with the same key, for each of the bands, in files of a folder: 9 bytes a row and band."""

    def __init__(self, rows: int, folder: Path) -> None:
        self._files = {name: folder / name for name in ("order", "begins", "widths")}
        self._bands = 0
        self._pairs = np.zeros(rows, np.int64)  # of each row with earlier ones, over all bands
        for file in self._files.values():
            file.unlink(missing_ok=True)

    def add(self, keys: np.ndarray) -> None:
        """Add the next band's keys, (N,)."""
        n = len(keys)
        order = np.argsort(keys, kind="stable")  # equal keys next to each other, the first row first
        new = np.append(True, np.diff(keys[order]) != 0)[:n]
        begins, widths = np.zeros(n, np.uint32), np.zeros(n, np.uint8)
        first = np.maximum.accumulate(np.where(new, np.arange(n), 0))
        begins[order], widths[order] = first, np.minimum(np.arange(n) - first, WINDOW)
        self._pairs += widths
        self._bands += 1
        for name, values in (("order", order.astype(np.uint32)), ("begins", begins), ("widths", widths)):
            with self._files[name].open("ab") as file:
                file.write(values.tobytes())

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Yield pairs (i, an earlier j) that share enough bands, by i; of one i those that share most come first."""
        n = len(self._pairs)
        ends = np.cumsum(self._pairs)
        begin = 0
        while begin < n:
            before = int(ends[begin - 1]) if begin else 0
            end = max(begin + 1, int(np.searchsorted(ends, before + PAIRS, "right")))
            candidates = np.concatenate([self._of_band(band, begin, end) for band in range(self._bands)])
            pairs, shared = np.unique(candidates, return_counts=True)
            enough = shared >= TOGETHER
            pairs, shared = pairs[enough], shared[enough]
            pairs = pairs[np.lexsort((pairs, -shared, pairs >> _HALF))]
            yield from zip((pairs >> _HALF).tolist(), (pairs & np.uint64(2**32 - 1)).tolist())
            begin = end

    def _of_band(self, band: int, begin: int, end: int) -> np.ndarray:
        """Return the pairs i << 32 | j of one band with begin <= i < end, (M,) uint64."""
        n = len(self._pairs)
        at = band * n + begin
        widths = np.fromfile(self._files["widths"], np.uint8, end - begin, offset=at).astype(np.int64)
        if not widths.any():
            return np.zeros(0, np.uint64)
        begins = np.fromfile(self._files["begins"], np.uint32, end - begin, offset=4 * at).astype(np.int64)
        order = np.memmap(self._files["order"], np.uint32, "r", 4 * band * n, (n,))
        mine = np.repeat(np.arange(begin, end, dtype=np.uint64), widths)
        pairs: np.ndarray = mine << _HALF | order[stretches(begins, widths)].astype(np.uint64)
        return pairs


def near(groups: Groups, sets: Sets, rows: np.ndarray, threshold: float) -> Iterator[tuple[int, int, float]]:
    """Yield the near duplicates of rows that stay: (row, the row that stays, their similarity); rows (N,) ascend."""
    stays = np.ones(len(rows), bool)
    last, left = -1, 0
    for i, j in groups.pairs():
        if i != last:
            last, left = i, MOST
        if left and stays[i] and stays[j]:
            left -= 1
            similarity = sets.similarity(int(rows[i]), int(rows[j]), threshold)
            if similarity >= threshold:
                stays[i] = False
                yield int(rows[i]), int(rows[j]), similarity


# --- measuring rows


class Task(NamedTuple):
    """The settings of a worker: text_rows as in `data`, the tokenizer as JSON, and the folder for files."""

    settings: Cleaning
    text_rows: str
    rules: RowRules
    tokenizer: str | None
    evaluation: EvaluationRuns | None
    folder: Path


class Measured(NamedTuple):
    """A part's columns, its bad rows (place in the part, line, why), and the files it has written, by name."""

    columns: dict[str, np.ndarray]
    bad: list[tuple[int, int, str]]
    files: dict[str, Path]


class _Entry(NamedTuple):
    """A good row: its place in the batch, the row as read and as parsed, and its text."""

    place: int
    raw: dict[str, Any]
    row: Row
    text: str


_measure: Measure | None = None  # of a worker


def _measured(task: Task, parts: Sequence[Chunk], workers: int | None) -> Iterator[Measured]:
    workers = min(workers or len(os.sched_getaffinity(0)), len(parts))
    if workers <= 1:
        yield from map(Measure(task).part, parts, count())
        return
    context = multiprocessing.get_context("spawn")  # forking a process with threads of torch can hang
    pool = ProcessPoolExecutor(workers, context, _begin, (task, os.getpid()))
    try:
        yield from pool.map(_part, parts, count())
    except BrokenProcessPool:
        asked, found = "the measuring of rows for cleaning", "a process of it was killed, most likely out of memory"
        raise RunError(asked, found, "free memory, or clean a part of the files at a time") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(task: Task, parent: int) -> None:
    global _measure
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    _measure = Measure(task)


def _part(part: Chunk, number: int) -> Measured:
    assert _measure is not None
    return _measure.part(part, number)


class Measure:
    """Measures parts; one a process.

    A filter measures only the rows that no earlier one has taken regardless of other rows, so cheap filters come first.
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

    def part(self, chunk: Chunk, number: int) -> Measured:
        """Measure all rows of a part; `number` is in the names of its files."""
        blocks: list[dict[str, np.ndarray]] = []
        bad: list[tuple[int, int, str]] = []
        paths: dict[str, Path] = {}
        with ExitStack() as stack:
            handles: dict[str, IO[bytes]] = {}

            def write(name: str, values: np.ndarray) -> None:
                if name not in handles:
                    paths[name] = self.task.folder / f"{name}.{number}"
                    handles[name] = stack.enter_context(paths[name].open("wb"))
                handles[name].write(values.tobytes())

            done = 0
            for places, entries, refused in _batches(chunk, self.task.text_rows, self.task.rules):
                blocks.append(self._block(np.array(places), entries, write))
                bad += [(done + place, places[place], why) for place, why in refused]
                done += len(places)
        names = blocks[0] if blocks else ()
        return Measured({name: np.concatenate([b[name] for b in blocks]) for name in names}, bad, paths)

    def _block(self, places: np.ndarray, entries: list[_Entry], write: Write) -> dict[str, np.ndarray]:
        n = len(places)
        columns = {"line": places, "chars": np.zeros(n, np.int64)}
        columns["chars"][[e.place for e in entries]] = [len(e.text) for e in entries]
        for one in self.filters:
            for name, values in self._values(one, entries, write).items():
                columns[name] = np.zeros((n, *values.shape[1:]), values.dtype)
                columns[name][[e.place for e in entries]] = values
            taken = _outside(one, self.settings, columns)
            entries = [e for e in entries if not taken[e.place]]
        return columns

    def _values(self, one: Filter, entries: list[_Entry], write: Write) -> dict[str, np.ndarray]:
        """Return the columns that a filter needs of these rows; what does not fit into columns is written to files."""
        texts = [e.text for e in entries]
        if one.kind == "tokens":
            assert self.tokenizer is not None
            encoded = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            return {"tokens": np.array([len(e) for e in encoded], np.int64)}
        if one.kind in ("count", "rare"):
            return self._items(one, entries, write)
        if one.kind == "repeated":
            return {"repeated": np.array([repeated_share(t) for t in texts], np.float64)}
        if one.kind == "language":  # no code for a text without a letter
            from py3langid import classify

            codes = [classify(t)[0] if any(map(str.isalpha, t)) else "" for t in (t[:LANGUAGE_chars] for t in texts)]
            return {"language": np.array(codes, "S8")}
        if one.kind == "exact":
            return {"digest": np.frombuffer(b"".join(map(text_digest, texts)), "<u8").reshape(-1, 2)}
        if one.kind == "near":
            assert self.settings.near_duplicates is not None
            found, sizes = shingles(*hashed_words([own_text(e.row) for e in entries]), RUN_words)
            write("shingles", found)
            write("bands", bands(found, sizes[sizes > 0], banding(self.settings.near_duplicates)))
            return {"shingles": sizes.astype(np.int32)}
        if self.task.evaluation is not None and one.kind == "contaminated":
            return {"contaminated": self.task.evaluation.shared([own_text(e.row) for e in entries])}
        return {}

    def _items(self, one: Filter, entries: list[_Entry], write: Write) -> dict[str, np.ndarray]:
        """Count each row's items, -1 if it has no such field; for `rare` the different ones too."""
        found = [items_of(self.settings.items[one.at], e.raw, e.text) for e in entries]
        columns = {f"items{one.at}": np.array([-1 if f is None else len(f) for f in found], np.int32)}
        if one.kind == "count":
            return columns
        different = list(map(_different, found))
        write(f"items{one.at}", hashed(item for d in different for item in d))
        if self.settings.items[one.at].bounds is not None:
            columns.clear()  # counted before, for more rows
        return columns | {f"different{one.at}": np.array(list(map(len, different)), np.int32)}


def _batches(
    chunk: Chunk, text_rows: str, rules: RowRules
) -> Iterator[tuple[list[int], list[_Entry], list[tuple[int, str]]]]:
    """Yield (the rows' lines, the good ones, the bad ones with the reason) of some rows at a time."""
    places: list[int] = []
    entries: list[_Entry] = []
    bad: list[tuple[int, str]] = []
    chars = 0
    for where, raw in attempts(chunk, text_rows):
        place = len(places)
        places.append(where.line)
        try:
            if isinstance(raw, DataError):
                raise raw
            row = schema.parse_row(where, raw, rules)
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


# --- applying the filters


class Table:
    """The rows of all files, one after another: row i of N is the i-th that was added."""

    def __init__(self, task: Task) -> None:
        self.task, self.settings, self.folder = task, task.settings, task.folder
        self.filters = filters(task.settings)
        self.parts: list[Chunk] = []
        self.stamps: dict[Path, tuple[int, int]] = {}  # of the files, when they were first read
        self.begins = [0]  # the first row of each part, and N
        self.bad: list[tuple[int, RowLocation, str]] = []  # bad rows and why
        self.columns: dict[str, np.ndarray] = {}  # what was measured
        self._added: defaultdict[str, list[np.ndarray]] = defaultdict(list)

    def __len__(self) -> int:
        return self.begins[-1]

    def add(self, part: Chunk, measured: Measured) -> None:
        """Add the next part's rows."""
        begin = self.begins[-1]
        self.bad += [(begin + place, RowLocation(part.file, line), why) for place, line, why in measured.bad]
        for name, values in measured.columns.items():
            self._added[name].append(values)
        for name, path in measured.files.items():
            with path.open("rb") as new, (self.folder / name).open("ab") as whole:
                shutil.copyfileobj(new, whole, 1 << 20)
            path.unlink()
        self.parts.append(part)
        self.begins.append(begin + len(measured.columns.get("line", ())))

    def apply(self) -> Iterator[float]:
        """Apply the filters and yield the share of the work that is done."""
        for name in list(self._added):
            self.columns[name] = np.concatenate(self._added.pop(name))
        n = len(self)
        self.taken = np.zeros(n, np.uint8)  # the filter that took each row
        self.taken[[i for i, _, _ in self.bad]] = BAD
        # For a duplicate the row that stays, for a rare item its index among the row's different ones.
        self.of = np.zeros(n, np.int64)
        self.share = np.zeros(n)  # for a near duplicate the similarity, for a rare item how many rows have it
        for number, one in enumerate(self.filters, 1):
            alive = self.taken == STAYS
            if one.kind in ("count", "rare"):
                self._check_field(one, alive)
            if one.kind == "rare":
                self._take_rare(one, alive, number)
            elif one.kind == "exact":
                again, first = exact(self.columns["digest"], alive)
                self.taken[again], self.of[again] = number, first
            elif one.kind == "near":
                yield from self._take_near(alive, number)
            else:
                self.taken[alive & _outside(one, self.settings, self.columns)] = number
        yield 1.0

    def _check_field(self, one: Filter, alive: np.ndarray) -> None:
        if alive.any() and (self.columns[f"items{one.at}"][alive] < 0).all():
            _, raw = next(self.reread([int(np.flatnonzero(alive)[0])]))
            name = f"`data.clean.items[{one.at}].field: {self.settings.items[one.at].field}`"
            known = ", ".join(list(raw)[:8])
            raise DataError(name, f"no row has it; the first one has {known}", "name a key of the rows, dotted")

    def _take_rare(self, one: Filter, alive: np.ndarray, number: int) -> None:
        """Take rows with an item that too few rows have; a row counts once for an item."""
        least = self.settings.items[one.at].rarest or 0
        sizes = self.columns[f"different{one.at}"].astype(np.int64)
        known, counts = np.zeros(0, np.uint64), np.zeros(0, np.int64)
        pending: list[np.ndarray] = []
        for begin, end, found in self._blocks(f"items{one.at}", sizes):
            pending.append(found[np.repeat(alive[begin:end], sizes[begin:end])])
            if sum(map(len, pending)) > len(known) + BLOCK or end == len(self):  # merged seldom enough to cost little
                new, more = np.unique(np.concatenate(pending), return_counts=True)
                known, place = np.unique(np.concatenate([known, new]), return_inverse=True)
                counts = np.bincount(place, np.concatenate([counts, more]), len(known)).astype(np.int64)
                pending = []
        for begin, end, found in self._blocks(f"items{one.at}", sizes):
            here = np.flatnonzero(alive[begin:end] & (sizes[begin:end] > 0))
            every = np.full(len(found), least, np.int64)
            mine = np.repeat(alive[begin:end], sizes[begin:end])
            every[mine] = counts[np.searchsorted(known, found[mine])]
            starts = (np.cumsum(sizes[begin:end]) - sizes[begin:end])[here]
            lowest = np.minimum.reduceat(every, starts) if len(here) else np.zeros(0, np.int64)
            for k in np.flatnonzero(lowest < least).tolist():
                i, start = begin + int(here[k]), int(starts[k])
                self.taken[i], self.share[i] = number, lowest[k]
                self.of[i] = int(np.argmin(every[start : start + sizes[i]]))

    def _take_near(self, alive: np.ndarray, number: int) -> Iterator[float]:
        threshold, sizes = self.settings.near_duplicates or 0.0, self.columns["shingles"]
        rows = np.flatnonzero((sizes > 0) & alive)
        if not len(rows):
            return
        chosen = alive[sizes > 0]  # of the rows whose keys were written
        width, _ = banding(threshold)
        groups = Groups(len(rows), self.folder)
        for begin in range(0, width, BANDS):
            blocks = []
            with (self.folder / "bands").open("rb") as file:
                for at in range(0, len(chosen), BLOCK):
                    block = np.fromfile(file, np.uint32, BLOCK * width).reshape(-1, width)
                    blocks.append(block[chosen[at : at + BLOCK], begin : begin + BANDS])
            for keys in np.concatenate(blocks).T:
                groups.add(keys)
            yield 0.5 * begin / width
        for i, like, share in near(groups, Sets(self.folder / "shingles", sizes), rows, threshold):
            self.taken[i], self.of[i], self.share[i] = number, like, share
            yield 0.5 + 0.5 * i / len(self)

    def _blocks(self, name: str, sizes: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield (first row, end, their values) of some rows at a time, from a file of uint64."""
        with (self.folder / name).open("rb") as file:
            for begin in range(0, len(sizes), BLOCK):
                end = min(len(sizes), begin + BLOCK)
                yield begin, end, np.fromfile(file, np.uint64, int(sizes[begin:end].sum()))

    # --- places, rows, reasons

    def where(self, i: int) -> RowLocation:
        """Return the place of row i."""
        return RowLocation(self.parts[self._part(i)].file, int(self.columns["line"][i]))

    def _part(self, i: int) -> int:
        return int(np.searchsorted(self.begins, i, "right")) - 1

    def reread(self, rows: Sequence[int]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Read these good rows again from their files; ascending."""
        left = list(rows)[::-1]
        while left:
            part = self._part(left[-1])
            for i, (_, raw) in enumerate(attempts(self.parts[part], self.task.text_rows), self.begins[part]):
                if i == left[-1]:
                    if isinstance(raw, DataError):
                        raise _changed(self.parts[part].file)
                    yield left.pop(), raw
                    if not left or left[-1] >= self.begins[part + 1]:
                        break
            else:
                raise _changed(self.parts[part].file)

    def kept(self) -> dict[Path, np.ndarray]:
        """Return of each file which rows stay or are bad, (rows,) bool."""
        masks: dict[Path, np.ndarray] = {}
        stays = (self.taken == STAYS) | (self.taken == BAD)
        for part, begin, end in zip(self.parts, self.begins, self.begins[1:]):
            before = masks.get(part.file, np.zeros(0, bool))
            gap = np.zeros(part.first - 1 - len(before), bool)  # lines that are not rows
            masks[part.file] = np.concatenate([before, gap, stays[begin:end]])
        return masks

    def reason(self, i: int, reread: Callable[[], Mapping[str, Any]]) -> str:
        """Return why row i was taken; `reread` returns the row from its file, if the reason quotes it."""
        one = self.filters[int(self.taken[i]) - 1]
        settings, columns = self.settings, self.columns
        if one.kind in ("chars", "tokens"):
            name = "characters" if one.kind == "chars" else "tokens"
            return f"{columns[one.kind][i]:,} {name}; {_limits(getattr(settings, one.kind))}"
        if one.kind == "count":
            items, n = settings.items[one.at], int(columns[f"items{one.at}"][i])
            assert items.bounds is not None
            return (f"no {items.field}" if n < 0 else f"{n:,} {_title(items)}") + f"; {_limits(items.bounds)}"
        if one.kind == "rare":
            items, row = settings.items[one.at], reread()
            item = _different(items_of(items, row, self._text(i, row)))[int(self.of[i])]
            n = int(self.share[i])
            return f"{_shortened(item, 80)!r} is in {n:,} row{'s' * (n != 1)}; at least {items.rarest:,}"
        if one.kind == "repeated":
            share = columns["repeated"][i]
            return f"{share:.1%} of its characters are in repeated lines; at most {settings.repeated_lines:.4g}"
        if one.kind == "language":
            return f"its language is {columns['language'][i].decode()}"
        if one.kind == "exact":
            return f"the same text as {self.where(int(self.of[i]))}"
        if one.kind == "near":
            return f"similarity {self.share[i]:.3f} with {self.where(int(self.of[i]))}"
        evaluation = self.task.evaluation
        assert evaluation is not None
        where = evaluation.places[int(columns["contaminated"][i]) - 1]
        passage = evaluation.passage(schema.parse_row(self.where(i), dict(reread()), self.task.rules))
        return f"shares words with {where}: {_shortened(passage, 120)!r}"

    def _text(self, i: int, raw: Mapping[str, Any]) -> str:
        return schema.row_text(schema.parse_row(self.where(i), dict(raw), self.task.rules))

    # --- the record

    def record(self, files: Sequence[Path], evaluation: Sequence[Path], **given: Any) -> dict[str, Any]:
        """Return the record of a cleaning: settings (`given` are further ones), inputs and results; without times."""
        stays = self.taken == STAYS
        settings = self.settings.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        first = [{"file": str(w.file), "line": w.line, "reason": why} for _, w, why in self.bad[:EXAMPLES]]
        mask = hashlib.sha256(np.packbits(stays).tobytes()).hexdigest()
        installed = {d.name for d in distributions()}
        versions = {name: version(name) for name in LIBRARIES if name in installed}
        return {
            "format": FORMAT, "settings": settings, **given, "versions": {"optrush": __version__, **versions},
            "inputs": list(map(_named, files)), "evaluation": list(map(_named, evaluation)), "rows": len(self),
            "bad": {"rows": len(self.bad), "examples": first},
            "kept": {"rows": int(np.count_nonzero(stays)), "sha256": mask},
            "filters": self._filters(), "histograms": self._histograms(),
        }  # fmt: skip

    def _filters(self) -> list[dict[str, Any]]:
        """Return of each filter how many rows it took, how many were left, and the first of them."""
        counts = np.bincount(self.taken, minlength=BAD + 1)
        left = len(self) - int(counts[BAD])
        firsts = {n: np.flatnonzero(self.taken == n)[:EXAMPLES].tolist() for n in range(1, len(self.filters) + 1)}
        examples: dict[int, dict[str, Any]] = {}
        for i, raw in self.reread(sorted(i for first in firsts.values() for i in first)):
            where, reason = self.where(i), self.reason(i, partial(dict, raw))
            text = _shortened(self._text(i, raw), EXAMPLE_chars)
            examples[i] = {"file": str(where.file), "line": where.line, "reason": reason, "text": text}
        results = []
        for number, one in enumerate(self.filters, 1):
            left -= (taken := int(counts[number]))
            first = [examples[i] for i in firsts[number]]
            results.append({"name": one.name, "label": one.label, "taken": taken, "left": left, "examples": first})
        return results

    def _histograms(self) -> list[dict[str, Any]]:
        """Return characters, and tokens and items of filters: of the rows that the filter checked and of what stays."""
        stays = self.taken == STAYS
        drawn = [_histogram("characters", self.columns["chars"], self.taken != BAD, stays, self.settings.chars)]
        for number, one in enumerate(self.filters, 1):
            checked = stays | (self.taken >= number) & (self.taken != BAD)
            if one.kind == "tokens":
                drawn.append(_histogram("tokens", self.columns["tokens"], checked, stays, self.settings.tokens))
            elif one.kind == "count" or (one.kind == "rare" and self.settings.items[one.at].bounds is None):
                items, counted = self.settings.items[one.at], np.maximum(self.columns[f"items{one.at}"], 0)
                drawn.append(_histogram(f"number of {_title(items)}", counted, checked, stays, items.bounds))
        return drawn


def _changed(file: Path) -> DataError:
    do = "clean it again when nothing writes to it"
    return DataError(f"to clean {file}", "it changed while it was read", do)


def _stamp(file: Path) -> tuple[int, int]:
    return file.stat().st_size, file.stat().st_mtime_ns


def _shortened(text: str, most: int) -> str:
    line = " ".join(text[: 2 * most].split())
    return line if len(line) <= most and len(text) <= 2 * most else line[: most - 1] + "…"


def file_sha256(file: Path) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal digits."""
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _named(file: Path) -> dict[str, Any]:
    return {"file": str(file), "bytes": file.stat().st_size, "sha256": file_sha256(file)}


def _histogram(
    name: str, values: np.ndarray, before: np.ndarray, after: np.ndarray, bounds: Sequence[float | None] | None
) -> dict[str, Any]:
    """Count between equal steps of a round width; the last step includes all above it (one row in 200, about)."""
    checked = np.sort(values[before])
    if not len(checked):
        return {"name": name, "edges": [0, 1], "before": [0], "after": [0], "bounds": bounds, "longest": 0}
    low, high = int(checked[0]), int(checked[math.ceil(0.995 * (len(checked) - 1))])
    raw = max(1.0, (high - low + 1) / BINS)
    base = 10 ** math.floor(math.log10(raw))
    width = next(base * m for m in (1, 2, 5, 10) if base * m >= raw)
    edges = list(range(low // width * width, high + width + 1, width))
    bins = np.minimum((values - edges[0]) // width, len(edges) - 2)
    counts = [np.bincount(bins[mask], minlength=len(edges) - 1).tolist() for mask in (before, after)]
    return {
        "name": name, "edges": edges, "before": counts[0], "after": counts[1],
        "bounds": bounds and list(bounds), "longest": int(checked[-1]),
    }  # fmt: skip


# --- the output of `optrush data clean`


def write_rows(cleaned: Cleaned, folder: Path) -> dict[str, Any]:
    """Write the rows that stay, what was taken, and bad rows if there are any; return the record with their digests.

    Rows of JSON Lines files are copied byte for byte, others written as JSON (a number that is none becomes null).
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
            bad.writelines(_line({"file": str(w.file), "line": w.line, "reason": why}) for _, w, why in table.bad)
    names = [name for name in (ROWS, REMOVED, QUARANTINE) if (folder / name).exists()]
    output = {name: {"bytes": (folder / name).stat().st_size, "sha256": file_sha256(folder / name)} for name in names}
    return {**cleaned.record, "output": output}


def _all_rows(table: Table) -> Iterator[tuple[int, bytes, Callable[[], dict[str, Any]]]]:
    """Yield every row: its number, its line of JSON (empty if it is bad), and a function that returns it as read."""
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
        with opened(file, packing) as whole:
            skip_mark(whole)
            for raw in without_blank_end(lines(whole), whole):
                yield raw or b"", partial(decode_json, raw or b"")
        return
    for _, found in attempts(file, text_rows):
        good = {} if isinstance(found, DataError) else found
        yield _line(good), partial(dict, good)


def _line(values: dict[str, Any]) -> bytes:
    try:
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
    except ValueError:  # NaN, the missing number of many Parquet files
        text = json.dumps(_finite(values), ensure_ascii=False)
    return text.encode() + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def cleaning_folder(out: Path, reads: Sequence[Path]) -> Iterator[Path]:
    """Yield a folder to write into, which becomes `out` at the end and replaces an earlier cleaning; removed on error.

    A killed process leaves nothing unfinished under the final name.

    Raises ConfigError: `out` is not the folder of a cleaning, or holds an input; it cannot be made; it is in use.
    """
    asked = f"--out {out}"
    if out.name in ("", ".."):
        raise ConfigError(asked, "no name of its own", "name a new folder")
    new, old = out.with_name(out.name + ".tmp"), out.with_name(out.name + ".old.tmp")
    for path in (out, new, old):
        _check_replaceable(asked, path)
    if inside := [r for r in reads if r.resolve().is_relative_to(out.resolve())]:
        raise ConfigError(asked, f"the folder of the input {inside[0]}", "take another folder")
    try:
        new.mkdir(parents=True, exist_ok=True)
        lock = os.open(new, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise ConfigError(asked, f"{error.strerror}", "name a folder that can be made") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for left in new.iterdir():  # of a process that was killed
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        try:
            yield new
            if out.exists():
                shutil.rmtree(old, ignore_errors=True)
                out.rename(old)
            new.rename(out)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        shutil.rmtree(old, ignore_errors=True)
    except BlockingIOError:
        raise ConfigError(asked, "another cleaning is at work there", "wait for it, or take another folder") from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        do = "free some (cleaning takes about a kilobyte a row while it works), or take another folder"
        raise ConfigError(asked, "no space left there", do) from None
    finally:
        os.close(lock)


def _check_replaceable(asked: str, path: Path) -> None:
    if not os.path.lexists(path):
        return
    if not path.is_dir():
        raise ConfigError(asked, f"{path} is no folder", "take another folder")
    known = {ROWS, REMOVED, QUARANTINE, RECORD, PAGE}
    if foreign := sorted({p.name for p in path.iterdir() if not p.name.startswith(WORK)} - known):
        raise ConfigError(asked, f"`{foreign[0]}` in {path} is not of a cleaning", "take another folder")
