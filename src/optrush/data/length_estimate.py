"""Estimate the lengths of a run's documents from characters, for the plan, which does not tokenize. Pure."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from optrush.config import JUDGED, Config, Data
from optrush.errors import DataError
from optrush.files import open_file

ROWS = 200  # looked at
FILES = 8  # that they come from, if there are more
MOST_CHARS = 4 << 20
CHARS_A_TOKEN = 4.0  # of English; the usual rule of thumb
CHARS_A_TURN = 20  # of a template around a turn: two marks, the role and two ends of lines are five tokens
RANDOM, SAMPLES = 4096, 1000  # documents of `data.random: true`, conversations of a sample, where none are counted
MOST_BYTES = 256 << 20  # read to count lines


class Fill(NamedTuple):
    """How documents fill rows of T slots, by estimate."""

    padding: float  # share of the slots that hold no token, where a row holds one document
    reach: float  # a token's document as a share of T, on average over the tokens; a pair is two documents


def estimate_fill(config: Config) -> Fill:
    """Estimate how the run's data fills its rows; of unknown lengths, each row counts as full of one document.

    Raises DataError: a local file is not there.
    """
    for path in (o.path for o in config.data.origins):
        if Path(path).suffix and not (Path(path).exists() or glob.glob(path, recursive=True)):  # no hub id
            raise DataError(f"`data.path: {path}`", "no such file", "check the path")
    T = config.batch.seq
    lengths = [min(n, T) for n in estimate(config.data, config.seed, pairs=config.paired, judged=_judged(config))]
    if not any(lengths):
        return Fill(0.0, 1.0)
    reach = sum(n * n for n in lengths) / (T * sum(lengths))
    return Fill(1 - sum(lengths) / (T * len(lengths)), reach / 2 if config.paired else reach)


def _judged(config: Config) -> bool:
    return config.objective == JUDGED


def estimate(data: Data, seed: int, *, pairs: bool = False, judged: bool = False) -> list[float]:
    """Estimate the tokens of the first documents, or pairs of them; empty if they fill their rows or are unknown.

    Unknown are a missing file and data that needs a missing library; a data set of the hub is not fetched.
    """
    if data.sample == "recipes":
        from optrush.data.sample import conversations, preferences

        if pairs:
            answers = ((p["prompt"] + p["chosen"], p["prompt"] + p["rejected"]) for p in preferences(ROWS, seed))
            return [sum(_size(turns) for turns in both) / CHARS_A_TOKEN for both in answers]
        return [_size(c) / CHARS_A_TOKEN for c in conversations(ROWS, seed)]
    each = max(1, FILES // max(1, len(data.origins)))
    files = [file for origin in data.origins for file in _spread(_files(origin.path), each)]
    found: list[float] = []
    for file in files[:ROWS]:
        found += _chars(file, data, max(1, ROWS // len(files)), judged)
    return [chars / CHARS_A_TOKEN for chars in found]


def estimate_tokens(config: Config) -> float | None:
    """Estimate the tokens of one epoch, all sources counted by their weights; None: not known."""
    data, T = config.data, config.batch.seq
    if data.random is not None:
        return float(RANDOM if data.random is True else data.random) * T
    lengths = estimate(data, config.seed, pairs=config.paired, judged=_judged(config))
    if not lengths:
        return None
    mean = sum(lengths) / len(lengths)
    rows: float | None = float(SAMPLES) if data.sample is not None else _rows(data)
    if rows is None:
        return None
    rows = rows if data.max_samples is None else min(rows, data.max_samples)
    held_out = data.eval if isinstance(data.eval, float) else 0.0
    return rows * (1 - held_out) * mean


def _rows(data: Data) -> float | None:
    """Count the rows of JSON Lines by their line ends; None: files of another kind, or too many of them."""
    rows, left = 0.0, MOST_BYTES
    for origin in data.origins:
        for file in _files(origin.path):
            if file.suffix != ".jsonl" or left <= 0:
                return None
            size = file.stat().st_size
            with open_file(file) as opened:
                head = opened.read(min(size, left))
            left -= len(head)
            rows += origin.weight * head.count(b"\n") * (size / max(1, len(head)))
    return rows or None


def _size(turns: Sequence[dict[str, str]]) -> int:
    return sum(len(turn["content"]) + CHARS_A_TURN for turn in turns)


def _files(path: str) -> list[Path]:
    from optrush.data.readers import find_files
    from optrush.errors import UserError

    if not (Path(path).exists() or glob.glob(path, recursive=True)):
        return []
    try:
        return find_files(path)
    except UserError:  # the run raises it when it reads them
        return []


def _spread(files: Sequence[Path], most: int) -> list[Path]:
    return [files[i * len(files) // most] for i in range(most)] if len(files) > most else list(files)


def _chars(file: Path, data: Data, most: int, judged: bool) -> Iterator[int]:
    """Yield the characters of the first rows of a file, with those of a template; bad rows are left out."""
    from optrush.data.readers import attempts
    from optrush.data.schema import Chat, Judged, RowRules, parse_row, parts_of, row_text
    from optrush.errors import UserError

    kind = JUDGED if judged else "sft"
    left, rules = MOST_CHARS, RowRules(kind, tuple(data.columns.items()), tuple(data.roles.items()))
    try:
        for where, found in islice(attempts(file, data.text_rows), most):
            if left < 0:
                return
            try:
                row = parse_row(where, found, rules) if isinstance(found, dict) else None
            except UserError:
                continue
            if row is not None:
                turns = sum(len(part.messages) for part in parts_of(row) if isinstance(part, Chat))
                size = len(row_text(row)) + turns * CHARS_A_TURN
                size *= 1 + isinstance(row, Judged)  # with the answer of another row, about as much again
                left -= size
                yield size
    except UserError:
        return
