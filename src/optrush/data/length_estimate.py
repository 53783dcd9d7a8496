"""Estimate a run's document lengths from characters, for the plan, which does not tokenize."""

from __future__ import annotations

import glob
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from optrush.config import JUDGED, Config, Data
from optrush.errors import DataError
from optrush.files import open_file
from optrush.tokenizer_files import check_sizes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from optrush.data.images import Picture

ROWS = 200  # rows sampled
FILES = 8  # files sampled at most
MOST_CHARS = 4 << 20
CHARS_A_TOKEN = 4.0  # for English, without a tokenizer; the usual rule of thumb
TOKENS_A_TURN = 5  # added by a template: two marks, the role and two newlines
PROBED = 40  # rows used to measure characters per token
RANDOM, SAMPLES = 4096, 1000  # documents of `data.random: true`; conversations of a built-in sample
FEW = 200  # rows per file searched for images
MOST_BYTES = 256 << 20  # read to count lines


class Fill(NamedTuple):
    """The estimated fill of rows of T slots."""

    padding: float  # fraction of empty slots with one document per row
    reach: float  # mean over tokens of document length / T; a pair is two documents


class _Read(NamedTuple):
    text: str
    turns: int
    images: list[Picture]
    folder: Path


def estimate_fill(config: Config) -> Fill:
    """Return the estimated fill of the run's rows; with unknown lengths each row is one full document.

    Raises DataError: a local file is missing.
    """
    for path in (o.path for o in config.data.origins if "://" not in o.path):
        if Path(path).suffix and not (Path(path).exists() or glob.glob(path, recursive=True)):  # not a hub id
            raise DataError(f"rows from {path}", "no such file", "check the path")
    T = config.batch.seq
    lengths = [min(n, T) for n in _lengths(config)]
    if not any(lengths):
        return Fill(0.0, 1.0)
    reach = sum(n * n for n in lengths) / (T * sum(lengths))
    return Fill(1 - sum(lengths) / (T * len(lengths)), reach / 2 if config.paired else reach)


def estimate_longest(config: Config) -> int | None:
    """Return the estimated tokens of the longest among the first rows; None: unknown."""
    return math.ceil(max(lengths)) if any(lengths := _lengths(config)) else None


def estimate_mean(config: Config) -> float:
    """Return the estimated mean tokens of the first rows; T if unknown."""
    lengths = _lengths(config)
    return sum(lengths) / len(lengths) if any(lengths) else config.batch.seq


def _lengths(config: Config) -> list[float]:
    folder, judged = config.model.tokenizer or config.model.path, config.objective == JUDGED
    base = config.model.path
    return estimate(config.data, config.seed, pairs=config.paired, judged=judged, tokenizer=folder, base=base)


def estimate(
    data: Data, seed: int, *, pairs: bool = False, judged: bool = False, tokenizer: str | None = None,
    base: str | None = None,
) -> list[float]:  # fmt: skip
    """Return the estimated tokens of the first documents or pairs; empty if they fill their rows or are unknown.

    Unknown: a missing file, a missing library, or a data set of the hub, which is not downloaded.

    Args:
        tokenizer: its folder; without one, `CHARS_A_TOKEN` applies.
        base: the model's folder, which determines the tokens per image.
    """
    if data.sample == "recipes":
        from optrush.data.sample import conversations, preferences

        if pairs:
            answers = ((p["prompt"] + p["chosen"], p["prompt"] + p["rejected"]) for p in preferences(ROWS, seed))
            return [sum(_size(turns) for turns in both) for both in answers]
        return [_size(c) for c in conversations(ROWS, seed)]
    each = max(1, FILES // max(1, len(data.origins)))
    files = [file for origin in data.origins for file in _spread(_files(origin.path), each)]
    rows = [row for file in files[:ROWS] for row in _texts(file, data, max(1, ROWS // len(files)), judged)]
    width = _chars_a_token(tokenizer, [row.text for row in rows[:PROBED]])
    lengths = [len(row.text) / width + row.turns * TOKENS_A_TURN for row in rows]
    if not any(row.images for row in rows):
        return lengths
    from optrush.data.images import about_tokens

    seen = about_tokens(Path(base or ""), data.min_pixels, data.max_pixels)
    return [n + sum(seen(image, row.folder) for image in row.images) for n, row in zip(lengths, rows, strict=True)]


class FirstImages(NamedTuple):
    """Placeholders of the images in the first rows."""

    mean: float  # per image
    largest: float
    share: float  # of all tokens of these rows


def first_images(config: Config) -> FirstImages | None:
    """Return the placeholders of the images in the first rows; None if there are no images."""
    files = [file for origin in config.data.origins for file in _spread(_files(origin.path), 1)]
    rows = [row for file in files for row in _texts(file, config.data, FEW, config.objective == JUDGED)]
    if not any(row.images for row in rows):
        return None
    from optrush.data.images import about_tokens

    base, width = config.model.path, _chars_a_token(config.model.path, [row.text for row in rows])
    seen = about_tokens(Path(base or ""), config.data.min_pixels, config.data.max_pixels)
    each = [seen(image, row.folder) for row in rows for image in row.images]
    texts = sum(len(row.text) / width + row.turns * TOKENS_A_TURN for row in rows)
    return FirstImages(sum(each) / len(each), max(each), sum(each) / (sum(each) + texts))


def estimate_tokens(config: Config) -> float | None:
    """Return the estimated tokens per epoch, with weighted sources; None: unknown."""
    data, T = config.data, config.batch.seq
    if data.random is not None:
        return float(RANDOM if data.random is True else data.random) * T
    lengths = _lengths(config)
    if not lengths:
        return None
    rows = estimate_rows(config)
    return None if rows is None else rows * sum(lengths) / len(lengths)


def estimate_rows(config: Config) -> float | None:
    """Return the estimated rows per epoch, without held-out rows; None: unknown."""
    data = config.data
    rows: float | None = float(SAMPLES) if data.sample is not None else _rows(data)
    if rows is None:
        return None
    rows = rows if data.max_samples is None else min(rows, data.max_samples)
    return rows * (1 - (data.eval if isinstance(data.eval, float) else 0.0))


def run_tokens(config: Config) -> float | None:
    """Return the estimated tokens of the run; None: unknown."""
    if config.train.steps is not None:
        return float(config.train.steps) * config.batch.tokens
    epoch = estimate_tokens(config)
    return None if epoch is None else config.train.epochs * epoch


def _rows(data: Data) -> float | None:
    """Return the number of rows in JSON Lines files, by newlines; None for other formats, or too many bytes."""
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


def _size(turns: Sequence[dict[str, str]]) -> float:
    return sum(len(turn["content"]) / CHARS_A_TOKEN + TOKENS_A_TURN for turn in turns)


def _files(path: str) -> list[Path]:
    from optrush.data.readers import find_files
    from optrush.errors import UserError

    if not (Path(path).exists() or glob.glob(path, recursive=True)):
        return []
    try:
        return find_files(path)
    except UserError:  # the run raises it when it reads the files
        return []


def _spread(files: Sequence[Path], most: int) -> list[Path]:
    return [files[i * len(files) // most] for i in range(most)] if len(files) > most else list(files)


def _texts(file: Path, data: Data, most: int, judged: bool) -> Iterator[_Read]:
    """Yield the first rows of a file; bad rows are skipped."""
    from optrush.data.readers import read_rows_or_errors
    from optrush.data.schema import Chat, Judged, RowRules, parse_row, parts_of, row_text
    from optrush.errors import UserError

    kinds = (JUDGED,) if judged else ("grpo", "")  # grpo also reads prompts without an answer, but no text
    left, rules = MOST_CHARS, [RowRules(k, tuple(data.columns.items()), tuple(data.roles.items())) for k in kinds]
    try:
        for where, raw in islice(read_rows_or_errors(file, data.reading), most):
            if left < 0:
                return
            row = None
            for rule in rules:
                with suppress(UserError):
                    row = row or (parse_row(where, raw, rule) if isinstance(raw, dict) else None)
            if row is not None:
                chats = [part for part in parts_of(row) if isinstance(part, Chat)]
                turns = sum(len(part.messages) for part in chats)
                times = 1 + isinstance(row, Judged)  # another row's answer is added: about twice the text
                text = row_text(row) * times
                left -= len(text)
                yield _Read(text, turns * times, [image for part in chats for image in part.images], file.parent)
    except UserError:
        return


def _chars_a_token(folder: str | None, texts: Sequence[str]) -> float:
    """Return the characters per token of these texts with a folder's tokenizer; CHARS_A_TOKEN without one."""
    file = Path(folder or "") / "tokenizer.json"
    if not texts or not file.is_file():
        return CHARS_A_TOKEN
    try:
        if (engine := _opened(file, file.stat().st_mtime_ns)) is None:
            return CHARS_A_TOKEN
        made = engine.encode_batch([text[:MOST_CHARS] for text in texts])
    except Exception:  # the run reports it
        return CHARS_A_TOKEN
    return max(1, sum(map(len, texts))) / max(1, sum(len(encoding.ids) for encoding in made))


@cache
def _opened(file: Path, _: int) -> Tokenizer | None:
    """Return the tokenizer of a file; None if it must be read in a process with limits."""
    from tokenizers import Tokenizer

    if check_sizes(file.parent):
        return None
    engine = Tokenizer.from_file(str(file))
    engine.no_truncation()
    engine.no_padding()
    return engine
