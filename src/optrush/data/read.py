"""Rows from files of every common format, strictly: what is not exactly understood is an error with its place.

Lenient readers guess a schema and change it silently when a row does not fit; a row that was half understood then
trains the model on something nobody wrote. Here a bad row is never repaired and never skipped: `read` raises at the
first, `attempts` hands each one over as a value, so that a cleaner can count and keep them. Everything streams: memory
is bounded by the longest row, not by the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optrush.data import formats
from optrush.data.compressed import PACKED, Damaged, opened
from optrush.data.rows import Where, bad_row
from optrush.errors import DataError

LINES, ARRAY, PARQUET = (".jsonl", ".ndjson"), ".json", ".parquet"
CELLS = {".csv": ",", ".tsv": "\t"}
TEXT = (".txt", ".md")
KNOWN = (*LINES, ARRAY, PARQUET, *CELLS, *TEXT)  # all but Parquet may be packed: .jsonl.zst
TEXT_ROWS = ("file", "paragraph", "line")


@dataclass(frozen=True)
class Chunk:
    """A part of a file that is read alone.

    `first` is the number of its first row, from 1. Bytes [start, end) of a file of lines, row groups [start, end) of a
    Parquet file, or all of the file (0, None).
    """

    file: Path
    first: int
    start: int
    end: int | None


def form(path: Path) -> tuple[str, str] | None:
    """(format, packing) by the file's suffixes, as in (".jsonl", ".gz"); None where they are not known."""
    packing = path.suffix.lower()
    if packing not in PACKED:
        return (packing, "") if packing in KNOWN else None
    inner = Path(path.stem).suffix.lower()
    return (inner, packing) if inner in KNOWN and inner != PARQUET else None


def read(path: Path, text_rows: str = "file") -> Iterator[tuple[Where, dict[str, Any]]]:
    """Every row of a file with its place; raises DataError at the first that is none."""
    for where, found in attempts(path, text_rows):
        if isinstance(found, DataError):
            raise found
        yield where, found


def attempts(source: Path | Chunk, text_rows: str = "file") -> Iterator[tuple[Where, dict[str, Any] | DataError]]:
    """Every row of a file, or of a part of it, or the error that says why it is none; goes on after a bad one.

    A place is a line in files of lines and of text, and the row's number (from 1) in Parquet, CSV and JSON arrays.
    A Parquet file has every column in every row: null values are left out, at any depth, as keys that are not there.
    Its columns of values that JSON has not (bytes, times) are read only where a row's meaning needs them.

    Args:
        text_rows: what is one row of a .txt or .md file: `file`, `paragraph` (between blank lines), `line` (but no
            blank one).

    Raises:
        DataError: no such file, an unknown or damaged one (after the rows before the damage), or one without rows.
        NeedsError: the library that unpacks it is missing.
    """
    assert text_rows in TEXT_ROWS, text_rows
    chunk = source if isinstance(source, Chunk) else Chunk(source, 1, 0, None)
    path = chunk.file
    where = None
    with _said(path):
        suffix, packing = _checked(path)
        try:
            for number, found in _rows(chunk, suffix, packing, text_rows):
                where = Where(path, number)
                yield where, bad_row(where, found) if isinstance(found, str) else found
        except Damaged as damage:
            raise Damaged(f"{damage}; the last row that could be read: {where or 'none'}") from damage
    if where is None and chunk.end is None:
        raise _empty(path)


def chunks(file: Path, size_bytes: int = 16 << 20, text_rows: str = "file") -> Iterator[Chunk]:
    """The parts of a file, one after the other, from the file's bytes and `size_bytes` alone.

    Lines are never cut: a part ends with the line that reaches `size_bytes`. Packed files, JSON arrays, CSV and text
    that is not read by lines are one part.

    Raises:
        DataError: no such file, an unknown or damaged one, or an empty one.
    """
    chunk = None
    with _said(file):
        suffix, packing = _checked(file)
        for chunk in _parts(file, suffix, packing, size_bytes, text_rows):
            yield chunk
    if chunk is None:
        raise _empty(file)


def _checked(path: Path) -> tuple[str, str]:
    if path.is_dir():
        raise DataError(f"rows from {path}", "a folder, not a file", "name a .jsonl file inside it")
    if not path.exists():
        raise DataError(f"rows from {path}", "no such file", "check the path")
    known = form(path)
    if known is None:
        do = f"name it by what it holds: {', '.join(KNOWN)}, or one of the text kinds with {', '.join(PACKED)}"
        raise DataError(f"rows from {path}", "a suffix that says no known kind of data", do)
    return known


@contextmanager
def _said(path: Path) -> Iterator[None]:
    """Damage and the system's errors, in the house's three lines."""
    try:
        yield
    except Damaged as damage:
        raise DataError(f"rows from {path}", str(damage), "mend the file, or fetch it again") from damage
    except OSError as error:
        do = "check the file and its rights"
        raise DataError(f"rows from {path}", error.strerror or str(error), do) from error


def _empty(path: Path) -> DataError:
    return DataError(f"rows from {path}", "an empty file", "give a file with at least one row")


def _rows(chunk: Chunk, suffix: str, packing: str, text_rows: str) -> formats.Found:
    if suffix == PARQUET:
        from optrush.data import parquet

        yield from parquet.rows(chunk.file, chunk.first, chunk.start, chunk.end)
        return
    with opened(chunk.file, packing) as file:
        if suffix in CELLS:
            yield from formats.cells(file, CELLS[suffix])
        elif suffix == ARRAY and chunk.end is None and formats.is_array(file):
            yield from formats.items(file)
        elif suffix in TEXT and text_rows == "file":
            yield from formats.whole(file)
        elif suffix in TEXT and text_rows == "paragraph":
            yield from formats.paragraphs(file)
        else:
            if chunk.start:
                file.seek(chunk.start)
            size = None if chunk.end is None else chunk.end - chunk.start
            yield from (formats.texts if suffix in TEXT else formats.objects)(file, chunk.first, size)


def _parts(file: Path, suffix: str, packing: str, size_bytes: int, text_rows: str) -> Iterator[Chunk]:
    if suffix == PARQUET:
        from optrush.data import parquet

        for first, start, end in parquet.parts(file, size_bytes):
            yield Chunk(file, first, start, end)
        return
    with opened(file, packing) as whole:
        array = suffix == ARRAY and formats.is_array(whole)
        empty = not whole.peek()
    if empty:
        return
    if packing or array or suffix in CELLS or (suffix in TEXT and text_rows != "line"):
        yield Chunk(file, 1, 0, None)
        return
    with file.open("rb", buffering=0) as raw:
        start, first = 0, 1
        while piece := raw.read(size_bytes):
            end, lines = start + len(piece), piece.count(b"\n")
            while piece and not piece.endswith(b"\n"):  # on to the end of the line that was cut
                piece = raw.read(2**16)
                cut = piece.find(b"\n") + 1
                piece = piece[:cut] if cut else piece
                end, lines = end + len(piece), lines + (cut > 0)
            yield Chunk(file, first, start, end)
            start, first = end, first + lines
            raw.seek(start)
