"""Cleaning: what is measured of a row, and which rows are taken out for it."""

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
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from optrush import __version__
from optrush.config import Bounds, Cleaning, Items, nearest
from optrush.data import schema
from optrush.data.readers import LINES, Chunk, attempts, chunks, find, form, lines, opened, read
from optrush.data.schema import Chat, Completion, Pair, Row, RowLocation, bad_row, decode
from optrush.errors import ConfigError, DataError, NeedsError, RunError
from optrush.launch import die_with_parent

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from optrush.data.chat_template import Tokens


# --- What texts are compared by: normal form, words, runs of words as numbers, repeated lines.
#
# Words are letters and digits in a row, case-folded; in scripts that set no spaces each letter is a word. A run of n
# words is one 64-bit hash: a polynomial of the words' own hashes, mixed. The same text gives the same numbers anywhere.


# Thai, Lao, Burmese, Khmer; kana; Han. Of a clause without spaces one changed letter would change "the word".
SPACELESS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
WORD = re.compile(rf"[{SPACELESS}]|[^\W{SPACELESS}]+")
MOST_KNOWN = 1 << 18  # words whose hashes a process keeps
LONG_chars = 1 << 20  # of a longer text no list of words is made: it would take many times its bytes

SHARED = ("system", "developer")  # roles whose texts many rows share by design

_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class _Hashes(dict[str, int]):
    """A word's 64-bit hash, kept for the next time."""

    def __missing__(self, word: str) -> int:
        if len(self) >= MOST_KNOWN:
            self.clear()
        found = hashlib.blake2b(word.encode(), digest_size=8).digest()
        self[word] = number = int.from_bytes(found, "little")
        return number


_hashes = _Hashes()


def hashed(words: Iterable[str]) -> np.ndarray:
    """The words' hashes, (n,) uint64."""
    return np.fromiter(map(_hashes.__getitem__, words), np.uint64)


def digest(text: str) -> bytes:
    """16 bytes that two texts share if they are equal in Unicode's normal form C with white space collapsed."""
    return hashlib.blake2b(" ".join(unicodedata.normalize("NFC", text).split()).encode(), digest_size=16).digest()


def words(text: str) -> Iterable[str]:
    """The text's words, in normal form C and case-folded."""
    folded = unicodedata.normalize("NFC", text).casefold()
    if len(folded) < LONG_chars:
        return WORD.findall(folded)
    return (found.group() for found in WORD.finditer(folded))


def hashed_words(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of all texts' words one after another, (W,) uint64, and how many words each text has, (N,) int64."""
    found = [hashed(words(text)) for text in texts]
    return np.concatenate([np.zeros(0, np.uint64), *found]), np.array([len(f) for f in found], np.int64)


def runs(hashes: np.ndarray, lengths: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of every n words in a row, text after text, (R,) uint64, and how many each text has, (N,) int64.

    A text of fewer than n words has one run, the whole of it; a text without words has none.

    Args:
        hashes, lengths: as `hashed_words` gives them.
    """
    held = np.where(lengths > 0, np.maximum(lengths, n), 0)
    begins = np.cumsum(held) - held
    padded = np.zeros(int(held.sum()), np.uint64)
    padded[stretches(begins, lengths)] = hashes
    counts = np.where(held > 0, held - n + 1, 0)
    at = stretches(begins, counts)
    found = np.zeros(len(at), np.uint64)
    for k in range(n):
        found = found * _FACTOR + padded[at + k]
    return mixed(found), counts


def stretches(begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The positions begins[i] to begins[i] + lengths[i] - 1 of all i, one after another, int64."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    at: np.ndarray = np.arange(total) + np.repeat(begins - (ends - lengths), lengths)
    return at


def mixed(x: np.ndarray) -> np.ndarray:
    """Spreads every bit over all: the finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return x


def shingles(hashes: np.ndarray, lengths: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Each text's set of runs, ascending, the sets one after another, (S,) uint32, and their sizes, (N,) int64.

    Of a hash 32 bits are kept: two texts of 10,000 words share about 0.02 runs by chance.
    """
    found, counts = runs(hashes, lengths, n)
    text = np.repeat(np.arange(len(lengths), dtype=np.uint64), counts)
    keys = np.sort((text << np.uint64(32)) | (found >> np.uint64(32)))
    keys = keys[np.append(True, keys[1:] != keys[:-1])[: len(keys)]]
    sizes = np.bincount((keys >> np.uint64(32)).astype(np.int64), minlength=len(lengths))
    return keys.astype(np.uint32), sizes


def repeated_share(text: str) -> float:
    """The share of a text's characters that stand in lines which came before in it; blank lines do not count.

    Source: the duplicate line character fraction of Gopher (Rae et al. 2021, https://arxiv.org/abs/2112.11446, A1.1).
    """
    lines = [line for line in map(str.strip, text.split("\n")) if line]
    every = sum(map(len, lines))
    return (every - sum(map(len, set(lines)))) / every if every else 0.0


def spoken(row: Row) -> str:
    """A row's text without what many rows share by design: system prompts and the tools on offer."""
    if isinstance(row, Pair):
        return schema.text(Pair(_without(row.chosen), _without(row.rejected)))
    return schema.text(_without(row) if isinstance(row, Chat | Completion) else row)


def _without(row: Chat | Completion) -> Chat | Completion:
    if isinstance(row, Completion):
        return row
    left = tuple(m for m in row.messages if m.role not in SHARED)
    prompt = sum(m.role not in SHARED for m in row.messages[: row.prompt])
    return replace(row, messages=left, tools=(), prompt=prompt)


# --- Rows that share text with what a model will be judged by.
#
# A row is taken if it holds WORDS words in a row that a text of the evaluation file holds too, or all of a text that is
# shorter than that and nothing else. Source: the 13-gram overlap of Brown et al. 2020
# (https://arxiv.org/abs/2005.14165, appendix C). Differs from the source: the whole row goes, not the passage with 200
# characters around it; and what was not written for the row (system prompts, tools) is not compared, because rows and
# evaluation may share it by design. A paraphrase or a translation is not found.


SHARED_WORDS = 13
BATCH = 1024


@dataclass(frozen=True)
class Evaluation:
    """The runs of all evaluation texts.

    hashes: (R,) uint64, ascending. owners: (R,) int32, which text each is from. places: where each text stands.
    """

    hashes: np.ndarray
    owners: np.ndarray
    places: Sequence[RowLocation]

    def shared(self, hashes: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """For each row the number (from 1) of a text that it shares a run with, or 0; (N,) int32.

        Args:
            hashes, lengths: the words of the rows' texts, as `hashed_words` gives them.
        """
        found, counts = runs(hashes, lengths, SHARED_WORDS)
        owners = self._owners(found)
        shared = np.zeros(len(lengths), np.int32)
        at = np.flatnonzero(owners)[::-1]  # backwards, so that a row's first run has the last word
        shared[np.repeat(np.arange(len(lengths)), counts)[at]] = owners[at]
        return shared

    def passage(self, row: Row) -> str:
        """The first words that a contaminated row shares."""
        text = spoken(row)
        found, _ = runs(*hashed_words([text]), SHARED_WORDS)
        first = int(np.flatnonzero(self._owners(found))[0])
        return " ".join(islice(words(text), first, first + SHARED_WORDS))

    def _owners(self, found: np.ndarray) -> np.ndarray:
        if not len(self.hashes):
            return np.zeros(len(found), np.int32)
        at = np.minimum(np.searchsorted(self.hashes, found), len(self.hashes) - 1)
        return np.where(self.hashes[at] == found, self.owners[at] + 1, 0).astype(np.int32)


def read_evaluation(files: Sequence[Path], text_rows: str) -> Evaluation:
    """The runs of all rows of the evaluation files.

    Raises:
        DataError: at the first row that is none.
    """
    places: list[RowLocation] = []
    held: list[tuple[np.ndarray, np.ndarray]] = []
    found = (pair for file in files for pair in read(file, text_rows))
    while batch := list(islice(found, BATCH)):
        hashes, counts = runs(*hashed_words([spoken(schema.parse(where, row)) for where, row in batch]), SHARED_WORDS)
        held.append((hashes, np.repeat(np.arange(len(places), len(places) + len(batch), dtype=np.int32), counts)))
        places += [where for where, _ in batch]
    hashes = np.concatenate([np.zeros(0, np.uint64), *(h for h, _ in held)])
    owners = np.concatenate([np.zeros(0, np.int32), *(o for _, o in held)])
    hashes, first = np.unique(hashes, return_index=True)
    return Evaluation(hashes, owners[first], places)


# --- The filters of a configuration one after another, what each is called, and what a row holds that they look at.


Columns = Mapping[str, np.ndarray]  # what was measured, one entry a row
WHOLE = "text"  # as a field: all of the row's text


class Step(NamedTuple):
    """One filter: its name in records, what it does (`kind`), for people (`label`), and for items which of them."""

    name: str
    kind: str
    label: str
    at: int = 0


def steps(settings: Cleaning) -> list[Step]:
    """The filters that are asked for, in the order in which they are applied."""

    def named() -> Iterator[Step]:
        if settings.chars is not None:
            yield Step("chars", "chars", f"characters: {said(settings.chars)}")
        if settings.tokens is not None:
            yield Step("tokens", "tokens", f"tokens: {said(settings.tokens)}")
        for i, items in enumerate(settings.items):
            if items.bounds is not None:
                yield Step(f"items[{i}].bounds", "count", f"number of {title(items)}: {said(items.bounds)}", i)
            if items.rarest is not None:
                yield Step(f"items[{i}].rarest", "rare", f"{title(items)} in at least {items.rarest:,} rows", i)
        if settings.repeated_lines is not None:
            yield Step("repeated_lines", "repeated", f"in repeated lines: at most {settings.repeated_lines:.4g}")
        if settings.language:
            yield Step("language", "language", f"language: {', '.join(settings.language)}")
        if settings.exact_duplicates:
            yield Step("exact_duplicates", "exact", "exact duplicates")
        if settings.near_duplicates is not None:
            yield Step("near_duplicates", "near", f"near duplicates: similarity from {settings.near_duplicates:.4g}")
        if settings.decontaminate is not None:
            yield Step("decontaminate", "contaminated", f"text shared with {settings.decontaminate}")

    return list(named())


def title(items: Items) -> str:
    """What is counted, for people."""
    return items.field if items.pattern is None else f"/{items.pattern}/ in {items.field}"


def said(bounds: Bounds) -> str:
    """Bounds in words."""
    least, most = bounds
    low, high = (
        f"at least {least:,.10g}" if least is not None else "",
        f"at most {most:,.10g}" if most is not None else "",
    )
    return ", ".join(filter(None, (low, high))) or "any"


def outside(step: Step, settings: Cleaning, columns: Columns) -> np.ndarray:
    """The rows that a filter takes for their own sake, whatever other rows hold; (N,) bool, none for other filters."""
    if step.kind in ("chars", "tokens"):
        return _beyond(columns[step.kind], getattr(settings, step.kind))
    if step.kind == "count":
        bounds = settings.items[step.at].bounds
        assert bounds is not None
        return _beyond(np.maximum(columns[f"items{step.at}"], 0), bounds)
    if step.kind == "repeated":
        assert settings.repeated_lines is not None
        return np.asarray(columns["repeated"] > settings.repeated_lines)
    if step.kind == "language":
        codes = np.array([b"", *(code.encode() for code in settings.language)])
        return ~np.isin(columns["language"], codes)
    if step.kind == "contaminated":
        return columns["contaminated"] > 0
    return np.zeros(len(columns["chars"]), bool)


def _beyond(values: np.ndarray, bounds: Bounds) -> np.ndarray:
    least, most = bounds
    taken = np.zeros(len(values), bool)
    if least is not None:
        taken |= values < least
    if most is not None:
        taken |= values > most
    return taken


def items(asked: Items, row: Mapping[str, Any], text: str) -> list[str] | None:
    """The row's items as they stand; None where it has no such field.

    A field of a list of objects means that field of each. Entries that are no text count as their JSON says them; an
    empty one is none.
    """
    if asked.field == WHOLE:
        entries: list[Any] = [text]
    else:
        found = _at(row, asked.field.split("."))
        if found is None:
            return None
        entries = found
    texts = [entry if isinstance(entry, str) else _json(entry) for entry in entries]
    if asked.pattern is not None:
        pattern = re.compile(asked.pattern, re.MULTILINE)
        texts = [m[1] if pattern.groups else m[0] for t in texts for m in pattern.finditer(t)]
    return [t for t in texts if t and t.strip()]


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _at(found: Any, keys: list[str]) -> list[Any] | None:
    """What stands under the keys, as a list; None where nothing does."""
    for i, key in enumerate(keys):
        if isinstance(found, list):
            parts = [part for entry in found if (part := _at(entry, keys[i:])) is not None]
            return [entry for part in parts for entry in part] if parts else None
        if not isinstance(found, dict) or found.get(key) is None:
            return None
        found = found[key]
    return found if isinstance(found, list) else [found]


def same(item: str) -> str:
    """What two items are compared by."""
    return item.strip().casefold()


def check(settings: Cleaning) -> None:
    """Refuses settings that cannot be meant.

    Raises:
        ConfigError: bounds the wrong way round, a pattern that is none, items that are not said, nothing to do.
    """
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
            raise ConfigError(name, "neither `bounds` nor `rarest`", "say what is asked of the items")
        if one.field == WHOLE and one.pattern is None:
            do = 'say what an item of the text is, `pattern: "^- (.+)$"`, or name another `field`'
            raise ConfigError(name, "the whole text as one item", do)
        if one.pattern is not None:
            try:
                re.compile(one.pattern)
            except re.error as error:
                asked = f"`data.clean.items[{i}].pattern: {one.pattern}`"
                raise ConfigError(asked, f"not a regular expression: {error}", "mend it; in YAML quote it") from None
    if not steps(settings):
        do = "name a filter: data.clean.chars, tokens, items, repeated_lines, language, exact_duplicates, ..."
        raise ConfigError("`data.clean`", "no filter is asked for", do)


# --- Rows that say what an earlier row said: exactly, or nearly.
#
# Two texts are nearly the same if the Jaccard similarity of their sets of WORDS-word runs reaches the threshold. All
# pairs cannot be compared; MinHash signatures cut into bands bring together those that may be (Broder 1997; Leskovec,
# Rajaraman, Ullman, Mining of Massive Datasets, 3.4). Pairs that share two bands are then compared in full, so that no
# row is taken for a hash's sake. In the rows' order a row goes if it is nearly one that stays: duplicates of a row that
# goes do not drag others along, and every row taken has its like among the rows that stay.


WORDS = 5  # of a run: fewer are shared by unrelated texts of one kind, more are all broken by a few changed words
PERMUTATIONS = 256
TOGETHER = 2  # bands that a pair must share: unlike texts of one kind often share one, seldom two
MISSED = 2e-3  # of the pairs exactly at the threshold may share fewer
SEED = 1
# A row is compared with so many at most, those that share most bands with it first; of a group that shares a band, with
# its first members only. Rows made of phrases that many have share a band with thousands, many bands with their like.
WINDOW, MOST = 64, 32
PAIRS = 1 << 21  # that are counted at once
BANDS = 8  # whose keys are read at once

_HALF = np.uint64(32)


def banding(threshold: float) -> tuple[int, int]:
    """(bands, rows of a band): as many rows as can be with at most MISSED of the pairs at the threshold missed.

    A pair of similarity s agrees in a band with probability p = s^rows, in none of n bands with (1 - p)^n, in exactly
    one with n p (1 - p)^(n - 1).
    """

    def missed(rows: int) -> float:
        n, p = PERMUTATIONS // rows, threshold**rows
        return (1 - p) ** n + n * p * (1 - p) ** (n - 1)

    rows = max((r for r in range(1, PERMUTATIONS // TOGETHER + 1) if missed(r) <= MISSED), default=1)
    return PERMUTATIONS // rows, rows


def bands(shingles: np.ndarray, sizes: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Keys (N, bands) uint32 of N sets of runs; two sets share a key where they agree in all rows of that band.

    Args:
        shingles, sizes: (S,) uint32 and (N,) int64, no size 0.
        shape: as `banding` gives it.
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
        keys = mixed(keys + signatures[:, k::rows])
    return keys.astype(np.uint32)


def exact(digests: np.ndarray, alive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which rows have the digest of an earlier one, and which that is: the first of all with it; (M,) int64 each.

    Args:
        digests: (N, 2) uint64.
        alive: (N,) bool, the rows that are compared.
    """
    rows = np.flatnonzero(alive)
    found = digests[rows]
    order = np.lexsort((found[:, 0], found[:, 1]))  # stable: of equal ones the first row comes first
    new = np.append(True, (np.diff(found[order], axis=0) != 0).any(1))[: len(order)]
    first = order[np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))]
    return rows[order[~new]], rows[first[~new]]


class Sets:
    """The rows' sets of runs, one after another in a file.

    Args:
        file: uint32.
        sizes: (N,) of each row.
    """

    def __init__(self, file: Path, sizes: np.ndarray) -> None:
        self._held = np.memmap(file, np.uint32, "r") if file.stat().st_size else np.zeros(0, np.uint32)
        self._sizes = sizes
        self._ends = np.cumsum(sizes, dtype=np.int64)

    def of(self, i: int) -> np.ndarray:
        """Row i's runs, ascending."""
        return self._held[self._ends[i] - self._sizes[i] : self._ends[i]]

    def similarity(self, a: int, b: int, least: float) -> float:
        """The Jaccard similarity of two rows, or 0 where their sizes alone keep it below `least`."""
        few, many = sorted((int(self._sizes[a]), int(self._sizes[b])))
        if few < least * many:
            return 0.0
        both = np.sort(np.concatenate([self.of(a), self.of(b)]))
        shared = int(np.count_nonzero(both[1:] == both[:-1]))
        return shared / (few + many - shared)


class Groups:
    """Rows with the same key, for each of the bands, in files: 9 bytes a row and band.

    Args:
        rows: how many, N.
        folder: where the files lie.
    """

    def __init__(self, rows: int, folder: Path) -> None:
        self._files = {name: folder / name for name in ("order", "begins", "widths")}
        self._bands = 0
        self._met = np.zeros(rows, np.int64)  # how many earlier rows each meets, over all bands
        for file in self._files.values():
            file.unlink(missing_ok=True)

    def add(self, keys: np.ndarray) -> None:
        """The next band's keys, (N,)."""
        n = len(keys)
        order = np.argsort(keys, kind="stable")  # equal keys beside each other, the first row first
        new = np.append(True, np.diff(keys[order]) != 0)[:n]
        begins, widths = np.zeros(n, np.uint32), np.zeros(n, np.uint8)
        first = np.maximum.accumulate(np.where(new, np.arange(n), 0))
        begins[order], widths[order] = first, np.minimum(np.arange(n) - first, WINDOW)
        self._met += widths
        self._bands += 1
        for name, values in (("order", order.astype(np.uint32)), ("begins", begins), ("widths", widths)):
            with self._files[name].open("ab") as file:
                file.write(values.tobytes())

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Pairs (i, an earlier j) that share bands enough, by i; of one i those first that share most bands with it."""
        n = len(self._met)
        ends = np.cumsum(self._met)
        begin = 0
        while begin < n:
            before = int(ends[begin - 1]) if begin else 0
            end = max(begin + 1, int(np.searchsorted(ends, before + PAIRS, "right")))
            found = np.concatenate([self._met_in(band, begin, end) for band in range(self._bands)])
            pairs, shared = np.unique(found, return_counts=True)
            enough = shared >= TOGETHER
            pairs, shared = pairs[enough], shared[enough]
            pairs = pairs[np.lexsort((pairs, -shared, pairs >> _HALF))]
            yield from zip((pairs >> _HALF).tolist(), (pairs & np.uint64(2**32 - 1)).tolist())
            begin = end

    def _met_in(self, band: int, begin: int, end: int) -> np.ndarray:
        """The pairs i << 32 | j of one band with begin <= i < end, (M,) uint64."""
        n = len(self._met)

        def read(name: str, dtype: type[np.generic], begin: int, end: int) -> np.ndarray:
            at = (band * n + begin) * np.dtype(dtype).itemsize
            return np.fromfile(self._files[name], dtype, end - begin, offset=at)

        widths = read("widths", np.uint8, begin, end).astype(np.int64)
        if not widths.any():
            return np.zeros(0, np.uint64)
        at = stretches(read("begins", np.uint32, begin, end).astype(np.int64), widths)
        order = np.memmap(self._files["order"], np.uint32, "r", band * n * 4, (n,))
        mine = np.repeat(np.arange(begin, end, dtype=np.uint64), widths)
        pairs: np.ndarray = mine << _HALF | order[at].astype(np.uint64)
        return pairs


def near(groups: Groups, sets: Sets, rows: np.ndarray, threshold: float) -> Iterator[tuple[int, int, float]]:
    """Which rows are nearly one that stays: (row, the row that stays, their similarity), in the rows' order.

    Args:
        groups: of `rows`.
        rows: (N,) ascending, the rows that are compared.
    """
    stays = np.ones(len(rows), bool)
    last, left = -1, 0
    for i, j in groups.pairs():
        if i != last:
            last, left = i, MOST
        if left and stays[i] and stays[j]:
            left -= 1
            found = sets.similarity(int(rows[i]), int(rows[j]), threshold)
            if found >= threshold:
                stays[i] = False
                yield int(rows[i]), int(rows[j]), found


# --- What is measured of each row, part by part of a file, in this process or in a worker.
#
# What rows are compared by goes into files (runs of words, keys of bands, hashes of items), some hundred bytes a row;
# all else are columns of some ten bytes a row. Neither depends on how the parts are spread over processes. A filter
# looks only at rows that no earlier one has taken for their own sake, so that what is cheap comes before what is not.


BATCH_rows = 1024  # measured at a time,
BATCH_chars = 1 << 20  # and about how much text: a tokenizer keeps some 100 bytes a token while it works
LANGUAGE_chars = 2000  # of a row's text that its language is told from

Write = Callable[[str, np.ndarray], None]  # appends values to the file of that name


@dataclass(frozen=True)
class Task:
    """What a process must know: settings, how text files are cut, a tokenizer's JSON, a folder for files."""

    settings: Cleaning
    text_rows: str
    tokenizer: str | None
    evaluation: Evaluation | None
    folder: Path


@dataclass
class Measured:
    """A part's columns, its bad rows (place in the part, line, why), and the files it has written, by name."""

    columns: dict[str, np.ndarray]
    bad: list[tuple[int, int, str]]
    files: dict[str, Path]


@dataclass(frozen=True)
class Entry:
    """A good row: its place in the batch, as it was read, what it means, and its text."""

    place: int
    found: dict[str, Any]
    row: Row
    text: str


class Measure:
    """Measures parts; holds what is made once a process."""

    def __init__(self, task: Task) -> None:
        self.task, self.settings = task, task.settings
        self.steps = steps(task.settings)
        self.tokenizer: Tokenizer | None = None
        if task.tokenizer is not None:
            from tokenizers import Tokenizer

            self.tokenizer = Tokenizer.from_str(task.tokenizer)
            self.tokenizer.no_truncation()
            self.tokenizer.no_padding()

    def part(self, chunk: Chunk, number: int) -> Measured:
        """All rows of a part; `number` names its files."""
        blocks: list[dict[str, np.ndarray]] = []
        bad: list[tuple[int, int, str]] = []
        paths: dict[str, Path] = {}
        with ExitStack() as stack:
            opened: dict[str, IO[bytes]] = {}

            def write(name: str, values: np.ndarray) -> None:
                if name not in opened:
                    paths[name] = self.task.folder / f"{name}.{number}"
                    opened[name] = stack.enter_context(paths[name].open("wb"))
                opened[name].write(values.tobytes())

            done = 0
            for lines, entries, refused in _batches(chunk, self.task.text_rows):
                blocks.append(self._block(np.array(lines), entries, write))
                bad += [(done + place, lines[place], why) for place, why in refused]
                done += len(lines)
        names = blocks[0] if blocks else ()
        return Measured({name: np.concatenate([b[name] for b in blocks]) for name in names}, bad, paths)

    def _block(self, lines: np.ndarray, entries: list[Entry], write: Write) -> dict[str, np.ndarray]:
        n = len(lines)
        columns = {"line": lines, "chars": np.zeros(n, np.int64)}
        columns["chars"][[e.place for e in entries]] = [len(e.text) for e in entries]
        for step in self.steps:
            for name, values in self._values(step, entries, write).items():
                columns[name] = np.zeros((n, *values.shape[1:]), values.dtype)
                columns[name][[e.place for e in entries]] = values
            taken = outside(step, self.settings, columns)
            entries = [e for e in entries if not taken[e.place]]
        return columns

    def _values(self, step: Step, entries: list[Entry], write: Write) -> dict[str, np.ndarray]:
        """What a filter needs to know of these rows, as columns; what does not fit into columns is written."""
        given = [e.text for e in entries]
        if step.kind == "tokens":
            assert self.tokenizer is not None
            encoded = self.tokenizer.encode_batch_fast(given, add_special_tokens=False)
            return {"tokens": np.array([len(e) for e in encoded], np.int64)}
        if step.kind in ("count", "rare"):
            return self._items(step, entries, write)
        if step.kind == "repeated":
            return {"repeated": np.array([repeated_share(t) for t in given], np.float64)}
        if step.kind == "language":
            return {"language": np.array([_language(t[:LANGUAGE_chars]) for t in given], "S8")}
        if step.kind == "exact":
            digests = b"".join(map(digest, given))
            return {"digest": np.frombuffer(digests, "<u8").reshape(-1, 2)}
        if step.kind == "near":
            return {"shingles": self._near([spoken(e.row) for e in entries], write)}
        if step.kind == "contaminated":
            assert self.task.evaluation is not None
            hashes, lengths = hashed_words([spoken(e.row) for e in entries])
            return {"contaminated": self.task.evaluation.shared(hashes, lengths)}
        return {}

    def _items(self, step: Step, entries: list[Entry], write: Write) -> dict[str, np.ndarray]:
        """How many items each row has, -1 where it has no such field; for `rare` how many different ones too."""
        found = [items(self.settings.items[step.at], e.found, e.text) for e in entries]
        counts = np.array([-1 if f is None else len(f) for f in found], np.int32)
        columns = {f"items{step.at}": counts}
        if step.kind == "count":
            return columns
        different = [dict.fromkeys(map(same, f or ())) for f in found]
        write(f"items{step.at}", hashed(item for d in different for item in d))
        if self.settings.items[step.at].bounds is not None:
            columns.clear()  # counted before, for more rows
        return columns | {f"different{step.at}": np.array([len(d) for d in different], np.int32)}

    def _near(self, given: Sequence[str], write: Write) -> np.ndarray:
        """The size of each row's set of runs of words; the sets and their bands' keys are written."""
        assert self.settings.near_duplicates is not None
        found, sizes = shingles(*hashed_words(given), WORDS)
        write("shingles", found)
        shape = banding(self.settings.near_duplicates)
        write("bands", bands(found, sizes[sizes > 0], shape))
        return sizes.astype(np.int32)


def _batches(chunk: Chunk, text_rows: str) -> Iterator[tuple[list[int], list[Entry], list[tuple[int, str]]]]:
    """(the rows' lines, the good ones, the bad ones with the reason) of some rows at a time."""
    lines: list[int] = []
    entries: list[Entry] = []
    bad: list[tuple[int, str]] = []
    chars = 0
    for where, found in attempts(chunk, text_rows):
        place = len(lines)
        lines.append(where.line)
        try:
            if isinstance(found, DataError):
                raise found
            row = schema.parse(where, found)
        except DataError as error:
            bad.append((place, error.found))
        else:
            text = schema.text(row)
            entries.append(Entry(place, found, row, text))
            chars += len(text)
        if len(lines) >= BATCH_rows or chars >= BATCH_chars:
            yield lines, entries, bad
            lines, entries, bad, chars = [], [], [], 0
    if lines:
        yield lines, entries, bad


def _language(text: str) -> bytes:
    """The code of a text's language; none where it has no letter."""
    import py3langid

    if not any(c.isalpha() for c in text):
        return b""
    code: str = py3langid.classify(text)[0]
    return code.encode()


# --- All rows as columns of figures, and the filters applied to them in their order.


STAYS, BAD = 0, 255  # of `taken`; between them lie the filters' numbers, from 1
BLOCK = 1 << 16  # rows whose keys or items are read at once


class Table:
    """The rows of all files, one after another: row i of N is the i-th that was added.

    taken: (N,) uint8, which filter took each row.
    of: (N,) int64, for a duplicate the row that stays, for a rare item its place among the row's different ones.
    share: (N,) float64, for a near duplicate the similarity, for a rare item how many rows hold it.
    columns: what was measured.
    """

    def __init__(self, settings: Cleaning, folder: Path, text_rows: str) -> None:
        self.settings, self.folder, self.text_rows = settings, folder, text_rows
        self.steps: Sequence[Step] = steps(settings)
        self.parts: list[Chunk] = []
        self.stamps: dict[Path, tuple[int, int]] = {}  # of the files, when they were first read
        self.begins = [0]  # the first row of each part, and N
        self.bad: list[tuple[int, RowLocation, str]] = []  # bad rows and why
        self.columns: dict[str, np.ndarray] = {}
        self._added: defaultdict[str, list[np.ndarray]] = defaultdict(list)

    def add(self, part: Chunk, measured: Measured) -> None:
        """The next part's rows."""
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

    def __len__(self) -> int:
        return self.begins[-1]

    def apply(self) -> Iterator[float]:
        """Applies the filters, and hands over the share of the work that is done."""
        for name in list(self._added):
            self.columns[name] = np.concatenate(self._added.pop(name))
        n = len(self)
        self.taken = np.zeros(n, np.uint8)
        self.taken[[i for i, _, _ in self.bad]] = BAD
        self.of, self.share = np.zeros(n, np.int64), np.zeros(n)
        for number, step in enumerate(self.steps, 1):
            alive = self.taken == STAYS
            if step.kind in ("count", "rare"):
                self._check_field(step, alive)
            if step.kind == "rare":
                self._rare(step, alive, number)
            elif step.kind == "exact":
                again, first = exact(self.columns["digest"], alive)
                self.taken[again], self.of[again] = number, first
            elif step.kind == "near":
                yield from self._near(alive, number)
            else:
                self.taken[alive & outside(step, self.settings, self.columns)] = number
        yield 1.0

    def _check_field(self, step: Step, alive: np.ndarray) -> None:
        asked = self.settings.items[step.at]
        if alive.any() and (self.columns[f"items{step.at}"][alive] < 0).all():
            _, found = next(self.reread([int(np.flatnonzero(alive)[0])]))
            known = ", ".join(list(found)[:8])
            name = f"`data.clean.items[{step.at}].field: {asked.field}`"
            raise DataError(name, f"no row has it; the first one has {known}", "name a key of the rows, dotted")

    def _rare(self, step: Step, alive: np.ndarray, number: int) -> None:
        """Takes rows with an item that fewer rows have than are asked for; each row counts once for an item."""
        least = self.settings.items[step.at].rarest
        assert least is not None
        sizes = self.columns[f"different{step.at}"].astype(np.int64)
        known, counts = np.zeros(0, np.uint64), np.zeros(0, np.int64)
        pending: list[np.ndarray] = []
        held = 0
        for begin, end, found in self._blocks(f"items{step.at}", sizes):
            pending.append(found[np.repeat(alive[begin:end], sizes[begin:end])])
            held += len(pending[-1])
            if held > len(known) + BLOCK or end == len(self):  # merged seldom enough to cost little
                new, more = np.unique(np.concatenate(pending), return_counts=True)
                known, place = np.unique(np.concatenate([known, new]), return_inverse=True)
                counts = np.bincount(place, np.concatenate([counts, more]), len(known)).astype(np.int64)
                pending, held = [], 0
        for begin, end, found in self._blocks(f"items{step.at}", sizes):
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

    def _near(self, alive: np.ndarray, number: int) -> Iterator[float]:
        """Takes near duplicates; hands over the share that is done."""
        threshold = self.settings.near_duplicates
        assert threshold is not None
        sizes = self.columns["shingles"]
        rows = np.flatnonzero((sizes > 0) & alive)
        if not len(rows):
            return
        chosen = alive[sizes > 0]  # of the rows whose keys were written
        count, _ = banding(threshold)
        groups = Groups(len(rows), self.folder)
        for begin in range(0, count, BANDS):
            held = []
            with (self.folder / "bands").open("rb") as file:
                for at in range(0, len(chosen), BLOCK):
                    block = np.fromfile(file, np.uint32, BLOCK * count).reshape(-1, count)
                    held.append(block[chosen[at : at + BLOCK], begin : begin + BANDS])
            for keys in np.concatenate(held).T:
                groups.add(keys)
            yield 0.5 * begin / count
        sets = Sets(self.folder / "shingles", sizes)
        for i, like, share in near(groups, sets, rows, threshold):
            self.taken[i], self.of[i], self.share[i] = number, like, share
            yield 0.5 + 0.5 * i / len(self)

    def _blocks(self, name: str, sizes: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
        """(first row, end, their values) of some rows at a time, from a file of uint64."""
        with (self.folder / name).open("rb") as file:
            for begin in range(0, len(sizes), BLOCK):
                end = min(len(sizes), begin + BLOCK)
                yield begin, end, np.fromfile(file, np.uint64, int(sizes[begin:end].sum()))

    # --- places and rows

    def part(self, i: int) -> int:
        """Which part row i lies in."""
        return int(np.searchsorted(self.begins, i, "right")) - 1

    def where(self, i: int) -> RowLocation:
        """The place of row i."""
        return RowLocation(self.parts[self.part(i)].file, int(self.columns["line"][i]))

    def reread(self, wanted: Sequence[int]) -> Iterator[tuple[int, dict[str, Any]]]:
        """These good rows as they stand in their files; ascending."""
        left = list(wanted)[::-1]
        while left:
            part = self.part(left[-1])
            for i, (_, found) in enumerate(attempts(self.parts[part], self.text_rows), self.begins[part]):
                if i == left[-1]:
                    if isinstance(found, DataError):
                        raise changed(self.parts[part].file)
                    yield left.pop(), found
                    if not left or left[-1] >= self.begins[part + 1]:
                        break
            else:
                raise changed(self.parts[part].file)


def changed(file: Path) -> DataError:
    """The error of a file that is not what it was when it was measured."""
    return DataError(f"to clean {file}", "it changed while it was read", "clean it again once nobody writes it")


def stamp(file: Path) -> tuple[int, int]:
    """What changes when a file is written: its size and the time."""
    found = file.stat()
    return found.st_size, found.st_mtime_ns


# --- What cleaning did, for people and for programs: why a row was taken, examples, histograms, the record of it all.


FORMAT = 1  # of the record
EXAMPLES = 10  # of each filter
SHOWN = 280  # characters of an example
BINS = 60  # of a histogram, about
LIBRARIES = ("numpy", "py3langid", "rensa", "tokenizers")


class Account:
    """Words and figures of a table whose filters are applied."""

    def __init__(self, table: Table, evaluation: Evaluation | None) -> None:
        self.table, self.evaluation = table, evaluation

    def reason(self, i: int, found: Callable[[], Mapping[str, Any]]) -> str:
        """Why row i was taken.

        Args:
            found: gives the row as it stands in its file; asked only where the reason names a part of it.
        """
        table = self.table
        step = table.steps[int(table.taken[i]) - 1]
        settings, columns = table.settings, table.columns
        if step.kind in ("chars", "tokens"):
            name = "characters" if step.kind == "chars" else "tokens"
            return f"{columns[step.kind][i]:,} {name}; {said(getattr(settings, step.kind))}"
        if step.kind == "count":
            asked, n = settings.items[step.at], int(columns[f"items{step.at}"][i])
            assert asked.bounds is not None
            held = f"no {asked.field}" if n < 0 else f"{n:,} {title(asked)}"
            return f"{held}; {said(asked.bounds)}"
        if step.kind == "rare":
            asked, row = settings.items[step.at], found()
            different = list(dict.fromkeys(map(same, items(asked, row, self._text(i, row)) or ())))
            item, n = different[int(table.of[i])], int(table.share[i])
            return f"{shortened(item, 80)!r} is in {n:,} row{'s' * (n != 1)}; at least {asked.rarest:,}"
        if step.kind == "repeated":
            share = columns["repeated"][i]
            return f"{share:.1%} of its characters are in repeated lines; at most {settings.repeated_lines:.4g}"
        if step.kind == "language":
            return f"its language is {columns['language'][i].decode()}"
        if step.kind == "exact":
            return f"the same text as {table.where(int(table.of[i]))}"
        if step.kind == "near":
            return f"similarity {table.share[i]:.3f} with {table.where(int(table.of[i]))}"
        assert self.evaluation is not None
        where = self.evaluation.places[int(columns["contaminated"][i]) - 1]
        passage = self.evaluation.passage(schema.parse(table.where(i), dict(found())))
        return f"shares words with {where}: {shortened(passage, 120)!r}"

    def _text(self, i: int, found: Mapping[str, Any]) -> str:
        return schema.text(schema.parse(self.table.where(i), dict(found)))

    def filters(self) -> list[dict[str, Any]]:
        """Of each filter how many rows it took, how many were left, and the first of them."""
        table = self.table
        counts = np.bincount(table.taken, minlength=BAD + 1)
        left = len(table) - int(counts[BAD])
        firsts = {n: np.flatnonzero(table.taken == n)[:EXAMPLES].tolist() for n in range(1, len(table.steps) + 1)}
        examples: dict[int, dict[str, Any]] = {}
        for i, found in table.reread(sorted(i for first in firsts.values() for i in first)):
            where = table.where(i)
            reason = self.reason(i, partial(dict, found))
            examples[i] = {
                "file": str(where.file), "line": where.line, "reason": reason,
                "text": shortened(self._text(i, found), SHOWN),
            }  # fmt: skip
        made = []
        for number, step in enumerate(table.steps, 1):
            taken = int(counts[number])
            left -= taken
            shown = [examples[i] for i in firsts[number]]
            made.append({"name": step.name, "label": step.label, "taken": taken, "left": left, "examples": shown})
        return made

    def histograms(self) -> list[dict[str, Any]]:
        """Characters, and tokens and items where a filter looks at them: of the rows it looked at and of what stays."""
        table, settings = self.table, self.table.settings
        stays = table.taken == STAYS
        made = [_histogram("characters", table.columns["chars"], table.taken != BAD, stays, settings.chars)]
        for number, step in enumerate(table.steps, 1):
            looked = (table.taken == STAYS) | (table.taken >= number) & (table.taken != BAD)
            if step.kind == "tokens":
                made.append(_histogram("tokens", table.columns["tokens"], looked, stays, settings.tokens))
            elif step.kind == "count" or (step.kind == "rare" and settings.items[step.at].bounds is None):
                asked = settings.items[step.at]
                counted = np.maximum(table.columns[f"items{step.at}"], 0)
                made.append(_histogram(f"number of {title(asked)}", counted, looked, stays, asked.bounds))
        return made

    def record(self, files: Sequence[Path], evaluation: Sequence[Path], **asked: Any) -> dict[str, Any]:
        """The record of a cleaning: what it was asked, from what, and what it did. Holds no time and no date.

        Args:
            asked: further settings that the result depends on.
        """
        table = self.table
        bad, kept = len(table.bad), int(np.count_nonzero(table.taken == STAYS))
        settings = table.settings.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        first = [{"file": str(w.file), "line": w.line, "reason": why} for _, w, why in table.bad[:EXAMPLES]]
        return {
            "format": FORMAT,
            "settings": settings,
            **asked,
            "versions": {"optrush": __version__, **_versions()},
            "inputs": list(map(_named, files)),
            "evaluation": list(map(_named, evaluation)),
            "rows": len(table),
            "bad": {"rows": bad, "examples": first},
            "kept": {"rows": kept, "sha256": hashlib.sha256(np.packbits(table.taken == STAYS).tobytes()).hexdigest()},
            "filters": self.filters(),
            "histograms": self.histograms(),
        }


def shortened(text: str, most: int) -> str:
    """The text's beginning in one line."""
    line = " ".join(text[: 2 * most].split())
    return line if len(line) <= most and len(text) <= 2 * most else line[: most - 1] + "…"


def sha256(file: Path) -> str:
    """Of a file's bytes."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _named(file: Path) -> dict[str, Any]:
    return {"file": str(file), "bytes": file.stat().st_size, "sha256": sha256(file)}


def _versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _histogram(
    name: str, values: np.ndarray, before: np.ndarray, after: np.ndarray, bounds: Sequence[float | None] | None
) -> dict[str, Any]:
    """Counts between equal steps of a round width; the last step holds all that lies above (one row in 200, about)."""
    looked = np.sort(values[before])
    if not len(looked):
        return {"name": name, "edges": [0, 1], "before": [0], "after": [0], "bounds": bounds, "longest": 0}
    low, high = int(looked[0]), int(looked[math.ceil(0.995 * (len(looked) - 1))])
    raw = max(1.0, (high - low + 1) / BINS)
    base = 10 ** math.floor(math.log10(raw))
    width = next(base * m for m in (1, 2, 5, 10) if base * m >= raw)
    edges = list(range(low // width * width, high + width + 1, width))
    counted = [
        np.bincount(np.minimum((values[mask] - edges[0]) // width, len(edges) - 2), minlength=len(edges) - 1).tolist()
        for mask in (before, after)
    ]
    return {
        "name": name, "edges": edges, "before": counted[0], "after": counted[1],
        "bounds": bounds and list(bounds), "longest": int(looked[-1]),
    }  # fmt: skip


# --- Parts measured in this process or in several, handed over in the files' order whatever order they end in.


AHEAD = 2  # parts that wait for each worker: their columns are held

_measure: Measure | None = None  # of a worker


def measured(task: Task, parts: Sequence[Chunk], workers: int) -> Iterator[Measured]:
    """What is measured of each part, in order.

    Raises:
        RunError: a worker was killed.
    """
    workers = min(workers, len(parts))
    if workers <= 1:
        measure = Measure(task)
        for number, part in enumerate(parts):
            yield measure.part(part, number)
        return
    context = multiprocessing.get_context("spawn")  # forking a process with threads of torch can hang
    pool = ProcessPoolExecutor(workers, context, _begin, (task, os.getpid()))
    try:
        waiting: deque[Future[Measured]] = deque()
        left = iter(enumerate(parts))
        while True:
            while len(waiting) < AHEAD * workers and (job := next(left, None)) is not None:
                waiting.append(pool.submit(_part, job[1], job[0]))
            if not waiting:
                return
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise RunError("a process that measured rows for cleaning was killed, most likely out of memory") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(task: Task, parent: int) -> None:
    global _measure
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    _measure = Measure(task)


def _part(part: Chunk, number: int) -> Measured:
    assert _measure is not None
    return _measure.part(part, number)


# --- Which rows stay: the filters of `data.clean`, applied to files of any size, and an account of what was taken.
#
# Every row is measured once, in worker processes; then the filters are applied in their order to the figures that came
# back. What a filter counts over rows (how many hold an item, which came first) it counts over the rows that the
# filters before it have left. Memory grows by about a hundred bytes a row, not with the rows' bytes; what else is
# compared lies in files. The result does not depend on the number of processes.


Progress = Callable[[float, int], None]  # the share of the work that is done, the rows read so far
WORK = "optrush-clean-"  # how the names of temporary folders begin


@dataclass(frozen=True)
class Cleaned:
    """What cleaning found.

    Attributes:
        kept: of each file (rows,) bool: row k of a part stands at `part.first - 1 + k`. A bad row is kept: whoever
            reads it next must refuse it again, and say so.
        record: what was asked and done, as in cleaning.json; holds no time, and is the same for the same input.
        account: why each row was taken.
    """

    kept: dict[Path, np.ndarray]
    record: dict[str, Any]
    account: Account

    def summary(self) -> str:
        """The counts in a line."""
        taken = [f"{f['name']} {f['taken']:,}" for f in self.record["filters"] if f["taken"]]
        said = f"{self.record['kept']['rows']:,} of {self.record['rows']:,} rows stay"
        bad = [f"bad {self.record['bad']['rows']:,}"] if self.record["bad"]["rows"] else []
        return said + (f"; taken by {', '.join(taken + bad)}" if taken or bad else "")


def clean(
    files: Sequence[Path],
    settings: Cleaning,
    *,
    tokens: Tokens | None,
    text_rows: str = "file",
    bad_rows: Literal["error", "quarantine"] = "error",
    most_bad: float = 0.01,
    workers: int | None = None,
    progress: Progress | None = None,
    folder: Path | None = None,
    cache: Path | None = None,
) -> Cleaned:
    """Which rows of the files stay.

    Args:
        files: in the order in which of two equal rows the first stays.
        tokens: the tokenizer; needed where `settings.tokens` is.
        bad_rows: what is done about a row that cannot be read: `error` raises at the first, `quarantine` counts them.
        most_bad: the share of the rows that may be bad, with `quarantine`.
        workers: processes; None: one a core.
        folder: where temporary files lie, about a kilobyte a row; None: the system's place for them.
        cache: where a data set of the hub lies, if one is decontaminated against.

    Raises:
        ConfigError: settings that cannot be meant.
        DataError: a bad row, too many of them, a field that no row has, nothing left.
        NeedsError: a library that a filter needs is missing.
        RunError: a worker was killed.
    """
    check(settings)
    _check_libraries(settings)
    tokenizer = None
    if settings.tokens is not None:
        if tokens is None:
            do = "name the model whose tokenizer counts: `model: DIR`"
            raise ConfigError("`data.clean.tokens`", "no tokenizer", do)
        tokenizer = tokens.tokenizer.backend_tokenizer.to_str()
    judging = [] if settings.decontaminate is None else find(settings.decontaminate, cache)
    evaluation = read_evaluation(judging, text_rows) if judging else None
    parts = [part for file in files for part in chunks(file, text_rows=text_rows)]
    with tempfile.TemporaryDirectory(prefix=WORK, dir=folder) as name:
        task = Task(settings, text_rows, tokenizer, evaluation, Path(name))
        table = Table(settings, task.folder, text_rows)
        table.stamps = {file: stamp(file) for file in files}
        tell = progress or (lambda share, rows: None)
        sizes = [_size(part) for part in parts]
        reading = 0.75 if settings.near_duplicates is not None else 0.95  # of the work, about
        done = 0.0
        for part, size, found in zip(parts, sizes, measured(task, parts, workers or len(os.sched_getaffinity(0)))):
            table.add(part, found)
            if table.bad and bad_rows == "error":
                raise bad_row(*table.bad[0][1:])
            done += size
            tell(reading * done / sum(sizes), len(table))
        if len(table.bad) > most_bad * len(table):
            from optrush.data import tokenize

            refused = [tokenize.BadRow(where, bad_row(where, why)) for _, where, why in table.bad]
            tokenize.check_bad_share(refused, len(table), most_bad)
        for share in table.apply():
            tell(reading + (1 - reading) * share, len(table))
    account = Account(table, evaluation)
    asked = {"text_rows": text_rows, "bad_rows": bad_rows, "most_bad": most_bad}
    if tokenizer is not None:
        asked["tokenizer"] = hashlib.sha256(tokenizer.encode()).hexdigest()
    cleaned = Cleaned(_kept(table), account.record(files, judging, **asked), account)
    if not cleaned.record["kept"]["rows"]:
        do = "loosen the filter that took most, or look at the rows: `optrush data clean` shows examples"
        raise DataError(f"rows that stay of {_listed(files)}", f"none: {cleaned.summary()}", do)
    return cleaned


def _check_libraries(settings: Cleaning) -> None:
    if settings.near_duplicates is not None and importlib.util.find_spec("rensa") is None:
        do = "python -m pip install 'optrush[dedup]'"
        raise NeedsError("`data.clean.near_duplicates`", "the library rensa is not installed", do)
    if not settings.language:
        return
    if importlib.util.find_spec("py3langid") is None:
        do = "python -m pip install 'optrush[language]'"
        raise NeedsError("`data.clean.language`", "the library py3langid is not installed", do)
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    known = LanguageIdentifier.from_model_file(MODEL_FILE).labels
    for code in settings.language:
        if code not in known:
            raise ConfigError(f"`data.clean.language: {code}`", "no code of a known language", nearest(code, known))


def _size(part: Chunk) -> int:
    """What a part costs, against other parts: bytes, or row groups of a Parquet file."""
    return max(1, part.file.stat().st_size if part.end is None else part.end - part.start)


def _kept(table: Table) -> dict[Path, np.ndarray]:
    found: dict[Path, np.ndarray] = {}
    stays = (table.taken == STAYS) | (table.taken == BAD)
    for part, begin, end in zip(table.parts, table.begins, table.begins[1:]):
        before = found.get(part.file, np.zeros(0, bool))
        gap = np.zeros(part.first - 1 - len(before), bool)  # lines that are no rows
        found[part.file] = np.concatenate([before, gap, stays[begin:end]])
    return found


def _listed(files: Sequence[Path]) -> str:
    return ", ".join(map(str, files[:3])) + (f" and {len(files) - 3} more" if len(files) > 3 else "")


# --- What `optrush data clean` writes: the rows that stay, what was taken and why, the bad rows, and the record.
#
# All of it is written into a folder of another name, which gets its own when it is whole: a kill leaves nothing half
# done under a final name.


ROWS, REMOVED, QUARANTINE, RECORD, PAGE = (
    "rows.jsonl", "removed.jsonl", "quarantine.jsonl", "cleaning.json", "cleaning.html",
)  # fmt: skip
OURS = frozenset({ROWS, REMOVED, QUARANTINE, RECORD, PAGE})


def write_rows(cleaned: Cleaned, folder: Path) -> dict[str, Any]:
    """Writes the rows that stay, what was taken, and bad rows if there are any; the record with their digests.

    Rows of JSON Lines files are copied byte for byte, others written as JSON (a number that is none becomes null).

    Raises:
        DataError: a file is not what it was when it was measured.
    """
    table = cleaned.account.table
    with (folder / ROWS).open("wb") as rows, (folder / REMOVED).open("wb") as removed:
        for i, raw, found in _all(table):
            taken = table.taken[i]
            if taken == STAYS:
                rows.write(raw if raw.endswith(b"\n") else raw + b"\n")
            elif taken != BAD:
                where = table.where(i)
                reason = cleaned.account.reason(i, found)
                name = table.steps[taken - 1].name
                removed.write(_line({"file": str(where.file), "line": where.line, "filter": name, "reason": reason}))
    if table.bad:
        with (folder / QUARANTINE).open("wb") as bad:
            bad.writelines(_line({"file": str(w.file), "line": w.line, "reason": why}) for _, w, why in table.bad)
    names = [name for name in (ROWS, REMOVED, QUARANTINE) if (folder / name).exists()]
    made = {name: {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)} for name in names}
    return {**cleaned.record, "output": made}


def _all(table: Table) -> Iterator[tuple[int, bytes, Callable[[], dict[str, Any]]]]:
    """Every row: its number, its line of JSON (none if it is bad), and a function that gives it as it was read."""
    for file, parts in groupby(range(len(table.parts)), lambda k: table.parts[k].file):
        held = list(parts)
        begin, end = table.begins[held[0]], table.begins[held[-1] + 1]
        i = begin
        for raw, found in _of(file, table.text_rows):
            if i < end:
                yield i, raw, found
            i += 1
        if i != end or table.stamps[file] != stamp(file):
            raise changed(file)


def _of(file: Path, text_rows: str) -> Iterator[tuple[bytes, Callable[[], dict[str, Any]]]]:
    known = form(file)
    assert known is not None
    suffix, packing = known
    if suffix in LINES:
        with opened(file, packing) as whole:
            for raw in lines(whole):
                yield raw or b"", partial(decode, raw or b"")
        return
    for _, found in attempts(file, text_rows):
        good = {} if isinstance(found, DataError) else found
        yield _line(good), partial(dict, good)


def _line(values: dict[str, Any]) -> bytes:
    try:
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
    except ValueError:  # a number of Parquet that JSON has not: the missing one of many writers
        text = json.dumps(_finite(values), ensure_ascii=False)
    return text.encode() + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def folder_for(out: Path, reads: Sequence[Path]) -> Iterator[Path]:
    """A folder to write into, which becomes `out` at the end, in the place of an earlier cleaning; nothing on an error.

    Raises:
        ConfigError: `out` is no folder of a cleaning, or holds what is read; it cannot be made; another one writes it.
    """
    asked = f"--out {out}"
    if out.name in ("", ".."):
        raise ConfigError(asked, "no name of its own", "name a new folder")
    new, old = out.with_name(out.name + ".tmp"), out.with_name(out.name + ".old.tmp")
    for path in (out, new, old):
        _check_ours(asked, path)
    if inside := [r for r in reads if r.resolve().is_relative_to(out.resolve())]:
        raise ConfigError(asked, f"{inside[0]}, which is read, lies there", "take another folder")
    try:
        new.mkdir(parents=True, exist_ok=True)
        lock = os.open(new, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(asked, f"{error.strerror}", "name a folder that can be made") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for left in new.iterdir():  # by a run that was killed
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


def _check_ours(asked: str, path: Path) -> None:
    if not os.path.lexists(path):
        return
    if not path.is_dir():
        raise ConfigError(asked, f"{path} is no folder", "take another folder")
    names = {p.name for p in path.iterdir() if not p.name.startswith(WORK)}
    if foreign := sorted(names - OURS):
        raise ConfigError(asked, f"`{foreign[0]}` lies in {path}, which no cleaning wrote", "take another folder")
