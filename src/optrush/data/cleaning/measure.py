"""What is measured of each row, part by part of a file, in this process or in a worker.

What rows are compared by goes into files (runs of words, keys of bands, hashes of items), some hundred bytes a row;
all else are columns of some ten bytes a row. Neither depends on how the parts are spread over processes. A filter looks
only at rows that no earlier one has taken for their own sake, so that what is cheap comes before what is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from optrush.config import Cleaning
from optrush.data import rows
from optrush.data.cleaning import duplicates, texts
from optrush.data.cleaning.contamination import Evaluation
from optrush.data.cleaning.filters import Step, items, outside, same, steps
from optrush.data.read import Chunk, attempts
from optrush.data.rows import Row
from optrush.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

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
            return {"repeated": np.array([texts.repeated_share(t) for t in given], np.float64)}
        if step.kind == "language":
            return {"language": np.array([_language(t[:LANGUAGE_chars]) for t in given], "S8")}
        if step.kind == "exact":
            digests = b"".join(map(texts.digest, given))
            return {"digest": np.frombuffer(digests, "<u8").reshape(-1, 2)}
        if step.kind == "near":
            return {"shingles": self._near([texts.spoken(e.row) for e in entries], write)}
        if step.kind == "contaminated":
            assert self.task.evaluation is not None
            hashes, lengths = texts.hashed_words([texts.spoken(e.row) for e in entries])
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
        write(f"items{step.at}", texts.hashed(item for d in different for item in d))
        if self.settings.items[step.at].bounds is not None:
            columns.clear()  # counted before, for more rows
        return columns | {f"different{step.at}": np.array([len(d) for d in different], np.int32)}

    def _near(self, given: Sequence[str], write: Write) -> np.ndarray:
        """The size of each row's set of runs of words; the sets and their bands' keys are written."""
        assert self.settings.near_duplicates is not None
        found, sizes = texts.shingles(*texts.hashed_words(given), duplicates.WORDS)
        write("shingles", found)
        shape = duplicates.banding(self.settings.near_duplicates)
        write("bands", duplicates.bands(found, sizes[sizes > 0], shape))
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
            row = rows.parse(where, found)
        except DataError as error:
            bad.append((place, error.found))
        else:
            text = rows.text(row)
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
