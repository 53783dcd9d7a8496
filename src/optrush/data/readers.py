"""Read rows from files of every common format, strictly: a row that does not parse is an error with its location.

Lenient readers guess a schema and change it silently when a row does not fit. Here a bad row is never repaired and
never skipped: `read_rows` raises at the first one, `read_rows_or_errors` yields each as a value, so that a cleaner can
count them. Every format but JSON arrays is streamed: memory is bounded by the longest row, not by the file.
`find_files` turns `data.path` into files.
"""

from __future__ import annotations

import bz2
import csv
import difflib
import glob
import hashlib
import io
import json
import lzma
import os
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from optrush.data.hub import cache_folder, fetch, fetch_remote
from optrush.data.schema import MEANT, RowLocation, bad_row
from optrush.data.strict_json import decode_json, kind_of, not_utf8, quoted, remedy
from optrush.errors import DataError, NeedsError, first_line
from optrush.files import SEPARATORS, open_file, parse_json, read_file, regular, separator, write_whole

PACKED = (".gz", ".bz2", ".xz", ".zst")
LINES, ARRAY, PARQUET = (".jsonl", ".ndjson"), ".json", ".parquet"
CELLS = {".csv": ",", ".tsv": "\t"}
TEXT = (".txt", ".md")
KNOWN = (*LINES, ARRAY, PARQUET, *CELLS, *TEXT)  # all but Parquet may be compressed: .jsonl.zst
NAMES = f"{', '.join(KNOWN)}, or one of the text kinds with {', '.join(PACKED)}"  # for error messages
LONGEST_ROW_bytes = 32 * 2**20
PIECE_bytes, LEAST_bytes = 2**20, 2**12  # size of one read, and its minimum for a part of a file
TAKEN_bytes = 2**10  # compressed bytes per decompression call: even zstd expands these to at most 32 MiB

Rows = Iterator[tuple[int, dict[str, Any] | str]]  # (number, the row or the reason why it is invalid)


class Damaged(Exception):
    """A file that cannot be read further, with the reason and the fix."""

    def __init__(self, reason: str, do: str = "fix the file, or fetch it again") -> None:
        super().__init__(reason)
        self.do = do


@dataclass(frozen=True)
class Chunk:
    """A part of a file, read independently of the others.

    `first` is the number of its first row, from 1. [start, end) are bytes of a file of lines, or row groups of a
    Parquet file; (0, None) is the whole file.
    """

    file: Path
    first: int
    start: int
    end: int | None


def form(path: Path) -> tuple[str, str] | None:
    """Return (format, packing) by the file's suffixes, as in (".jsonl", ".gz"); None if they are unknown."""
    packing = path.suffix.lower()
    if packing not in PACKED:
        return (packing, "") if packing in KNOWN else None
    inner = Path(path.stem).suffix.lower()
    return (inner, packing) if inner in KNOWN and inner != PARQUET else None


# --- Bytes. The readers of the standard library and of zstandard treat a truncated stream, or a damaged second one, as
# the end of the file, which loses rows silently. Here only the end of a complete stream ends the file.


def opened(path: Path, packing: str, size: int = PIECE_bytes) -> io.BufferedReader[Any]:
    """Open a file to read `size` bytes, decompressed if `packing` (one of PACKED) is set; reading may raise Damaged."""
    if not packing:
        return io.BufferedReader(open_file(path, 0), max(LEAST_bytes, min(size, PIECE_bytes)))
    new, errors = _unpacker(path, packing)
    packed = io.BufferedReader(open_file(path, 0), PIECE_bytes)
    return io.BufferedReader(_Unpacked(_unpacked(packed, new, errors), packed), PIECE_bytes)


def _unpacker(path: Path, packing: str) -> tuple[Callable[[], Any], tuple[type[Exception], ...]]:
    """Return (a function that creates a decompressor for one stream, the errors that it raises)."""
    if packing == ".gz":
        return lambda: zlib.decompressobj(zlib.MAX_WBITS | 16), (zlib.error,)
    if packing == ".bz2":
        return bz2.BZ2Decompressor, (OSError, ValueError)
    if packing == ".xz":
        return lzma.LZMADecompressor, (lzma.LZMAError,)
    try:
        import zstandard
    except ImportError:
        do = "install it: python -m pip install 'optrush[zstd]'"
        raise NeedsError(f"data from {path}", "the library zstandard, which unpacks it, is not installed", do) from None
    return zstandard.ZstdDecompressor().decompressobj, (zstandard.ZstdError,)


def _unpacked(
    file: io.BufferedReader[Any], new: Callable[[], Any], errors: tuple[type[Exception], ...]
) -> Iterator[bytes]:
    """Yield the contents of consecutive streams; zeros between them are padding."""
    packed = b""
    while True:
        while not (packed := packed.lstrip(b"\0")):
            if not (packed := file.read(TAKEN_bytes)):
                return
        stream = new()
        bounded = hasattr(stream, "needs_input")  # bz2 and xz: they can expand a few bytes to gigabytes
        while not stream.eof:
            if not packed and (not bounded or stream.needs_input):
                packed = file.read(TAKEN_bytes)
                if not packed:
                    raise Damaged("cut off: the file ends inside the compressed data")
            try:
                yield stream.decompress(packed, PIECE_bytes) if bounded else stream.decompress(packed)
            except errors as error:
                raise Damaged(f"damaged compressed data: {error}") from error
            packed = b""
        packed = stream.unused_data


class _Unpacked(io.RawIOBase):
    def __init__(self, pieces: Iterator[bytes], file: io.BufferedReader[Any]) -> None:
        self.pieces, self.file, self.ready = pieces, file, memoryview(b"")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self.ready:
            if (piece := next(self.pieces, None)) is None:
                return 0
            self.ready = memoryview(piece)
        n = min(len(buffer), len(self.ready))
        buffer[:n], self.ready = self.ready[:n], self.ready[n:]
        return n


def lines(file: io.BufferedReader, size: int | None = None) -> Iterator[bytes | None]:
    """Yield the lines of the next `size` bytes, by default of all; None in place of a line that is too long."""
    left: float = float("inf") if size is None else size
    while left > 0 and (raw := file.readline(LONGEST_ROW_bytes + 1)):
        left -= len(raw)
        if len(raw) <= LONGEST_ROW_bytes:
            yield raw
            continue
        while not raw.endswith(b"\n") and (raw := file.readline(PIECE_bytes)):
            left -= len(raw)
        yield None
    if size is not None and left > 0:
        raise Damaged("a row is missing: the file is shorter than when it was counted")


BOM = b"\xef\xbb\xbf"


def skip_mark(file: io.BufferedReader[Any]) -> bool:
    """Skip the byte order mark that some editors write at the beginning of a file; return whether there was one."""
    return file.peek(len(BOM))[: len(BOM)] == BOM and file.read(len(BOM)) == BOM


def without_blank_end(found: Iterator[bytes | None], file: io.BufferedReader[Any]) -> Iterator[bytes | None]:
    """Yield the lines of a file without the blank ones that editors leave at its end; other blank lines are rows."""
    blank = 0
    for raw in found:
        if raw is not None and not raw.strip():
            blank += 1
            continue
        yield from (b"\n" for _ in range(blank))
        blank = 0
        yield raw
    if blank and any(piece.strip() for piece in iter(lambda: file.read(PIECE_bytes), b"")):
        yield from (b"\n" for _ in range(blank))


# --- Rows of an open file, one function per layout. Each continues after a bad row wherever the next row can be found,
# and holds one row in memory.


def _too_long() -> str:
    return f"the row is longer than {LONGEST_ROW_bytes >> 20} MiB"


def _object(raw: bytes) -> dict[str, Any] | str:
    try:
        return _checked_object(decode_json(raw))
    except ValueError as error:
        return str(error) if raw.strip() else "an empty line"


def _checked_object(value: Any) -> dict[str, Any] | str:
    return value if isinstance(value, dict) else f"{kind_of(value)} instead of an object {{...}}"


def _text(raw: bytes) -> dict[str, Any] | str:
    reason, text = _decoded(raw)
    return reason or {"text": _lines_ended(text).rstrip("\n")}


def _lines_ended(text: str) -> str:
    """Return the text with line feeds as line ends, whichever system wrote it."""
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _decoded(raw: bytes) -> tuple[str, str]:
    """Return (the reason why the bytes are invalid, else "", the text with replacement characters)."""
    try:
        text = raw.decode("utf-8")
        return "it begins with a byte order mark (BOM)" if text.startswith("\ufeff") else "", text
    except UnicodeDecodeError as error:
        return not_utf8(error), raw.decode("utf-8", "replace")


def _whole(file: io.BufferedReader) -> Rows:
    raw = file.read(LONGEST_ROW_bytes + 1)
    if len(raw) > LONGEST_ROW_bytes:
        yield 1, f"{_too_long()}; read the file by paragraphs or lines (data.text_rows)"
    elif raw:
        reason, text = _decoded(raw)
        yield 1, reason or {"text": _lines_ended(text)}


def _paragraphs(file: io.BufferedReader) -> Rows:
    """Yield the texts between blank lines; a text's number is that of its first line."""
    parts: list[bytes] = []
    size = first = 0
    for line, raw in chain(enumerate(lines(file), 1), [(0, b"")]):
        if raw is None or raw.strip():
            first = first or line
            size += LONGEST_ROW_bytes + 1 if raw is None else len(raw)
            if raw is not None and size <= LONGEST_ROW_bytes:
                parts.append(raw)
        elif first:
            yield first, _too_long() if size > LONGEST_ROW_bytes else _text(b"".join(parts))
            parts, size, first = [], 0, 0


def _items(file: io.BufferedReader) -> Rows:
    """Yield the items of one JSON array; reads the whole file into memory."""
    try:
        values = decode_json(file.read())
    except ValueError as error:
        raise Damaged(str(error)) from None
    for row, value in enumerate(values, 1):
        yield row, _checked_object(value)


def _cells(file: io.BufferedReader, usual: str, named: str) -> Rows:
    """Yield rows of strings keyed by the header (RFC 4180), split at the separator `named`, by default at `usual`."""
    csv.field_size_limit(LONGEST_ROW_bytes)  # the default is 128 KiB; the limit is per process
    wrong: list[str] = []  # errors in the bytes of the current row
    row = first = size = 0
    delimiter = named or separator(file.peek(PIECE_bytes)[:PIECE_bytes].decode("utf-8", "ignore"), usual)

    def decoded() -> Iterator[str]:
        nonlocal size
        for raw in lines(file):
            size += LONGEST_ROW_bytes + 1 if raw is None else len(raw)
            if raw is None or size > LONGEST_ROW_bytes:  # where its quotes end, and so the next row, is unknown
                raise Damaged(f"row {row + 1}, line {first}: {_too_long()}, or a quote is not closed")
            reason, text = _decoded(raw)
            wrong.extend([reason] if reason else [])
            yield text.removesuffix("\r\n") + "\n" if text.endswith("\r\n") else text

    table = csv.reader(decoded(), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    blank: list[tuple[int, str]] = []  # errors of blank rows, unless these end the file
    while True:
        first, size = table.line_num + 1, 0
        wrong.clear()
        try:
            cells = next(table)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end" in str(error):
                raise Damaged(f"cut off: a quote in row {row + 1}, line {first}, is not closed") from error
            wrong.append(f"not valid CSV: {error}")
            cells = []
        if header is None:
            header = cells
            if not wrong:
                wrong += [] if cells else ["an empty line"]
                wrong += [f"column {i + 1} has no name" for i, name in enumerate(cells) if not name.strip()]
                wrong += [f"two columns are named {quoted(name)}" for name in cells if cells.count(name) > 1]
            if wrong:
                raise Damaged(f"the first line is not a header: {wrong[0]}")
            continue
        row += 1
        if row == 1:
            _refuse_separator(header, cells, delimiter)
        if not wrong and len(cells) != len(header):
            wrong.append(f"{len(cells)} cells for {len(header)} columns" if cells else "an empty line")
        if wrong == ["an empty line"]:
            blank.append((row, f"{wrong[0]} (line {first} of the file)"))
            continue
        yield from blank
        blank.clear()
        yield row, f"{wrong[0]} (line {first} of the file)" if wrong else dict(zip(header, cells))


def _refuse_separator(header: list[str], cells: list[str], delimiter: str) -> None:
    """Raise Damaged if another separator would split the header and the first row into several columns."""
    marks = (mark for mark in SEPARATORS if mark != delimiter and mark in header[0] and mark in "".join(cells))
    if len(header) == 1 and (other := next(marks, None)) is not None:
        named = "".join(f", or name it {suffix}" for suffix, mark in CELLS.items() if mark == other)
        found = f"the header has one column, {quoted(header[0])}, which contains {SEPARATORS[other]}"
        raise Damaged(found, f"write `data.separator: {json.dumps(other)}`{named}")


# --- Rows of a Parquet file, a few at a time, as JSON values.

MOST_ROWS = 256  # decoded at once


def _parquet_rows(chunk: Chunk) -> Rows:
    """Yield the rows of a chunk's row groups, without nulls."""
    import pyarrow

    row = chunk.first - 1
    with _parquet(chunk.file) as file:
        schema = file.schema_arrow
        twice = next((name for name in schema.names if schema.names.count(name) > 1), None)
        if twice is not None:
            raise Damaged(f"two columns are named {quoted(twice)}")
        leaves = {field.name: list(_leaves(field.type)) for field in schema}
        columns = [name for name, types in leaves.items() if name in MEANT or all(map(_in_json, types))]
        types = {name: schema.field(name).type if any(map(_is_json, leaves[name])) else None for name in columns}
        groups = range(file.num_row_groups)[chunk.start : chunk.end]
        try:
            # Single-threaded: chunks are read in parallel.
            for batch in file.iter_batches(MOST_ROWS, row_groups=groups, columns=columns, use_threads=False):
                for value in _batch(batch, types):
                    row += 1
                    yield row, value
        except (pyarrow.ArrowException, OSError) as error:
            raise Damaged(f"a damaged Parquet file: {first_line(error)}") from error


def _parquet_chunks(path: Path, size_bytes: int) -> Iterator[Chunk]:
    with _parquet(path) as file:
        groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
    first, start, rows, size = 1, 0, 0, 0
    for i, group in enumerate(groups):
        rows, size = rows + group.num_rows, size + group.total_byte_size
        if rows and (size >= size_bytes or i + 1 == len(groups)):
            yield Chunk(path, first, start, i + 1)
            first, start, rows, size = first + rows, i + 1, 0, 0


def _parquet(path: Path) -> Any:
    """Open a Parquet file; only the columns and row groups in use are read."""
    import pyarrow.parquet

    options = {"pre_buffer": False, "buffer_size": PIECE_bytes, "page_checksum_verification": True}
    try:
        return pyarrow.parquet.ParquetFile(path, **options)
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise Damaged(f"a damaged or cut off Parquet file: {first_line(error)}") from error


def _batch(batch: Any, types: dict[str, Any]) -> list[dict[str, Any] | str]:
    """Return the rows of a batch, or the reason why each is invalid; converts them singly if large or if one is bad."""
    reason = _too_long()
    if batch.nbytes <= LONGEST_ROW_bytes:
        try:
            rows = batch.to_pylist()
            return [{n: _plain(value, types[n]) for n, value in row.items() if value is not None} for row in rows]
        except UnicodeDecodeError as error:
            reason = f"invalid UTF-8 in {quoted(error.object[:20].decode('utf-8', 'replace'))}"
        except ValueError as error:
            reason = first_line(error)
    if len(batch) == 1:
        return [reason]
    return [_batch(batch.slice(i, 1), types)[0] for i in range(len(batch))]


def _plain(value: Any, type_: Any) -> Any:
    """Return a value without nulls in its objects; strings of Arrow's JSON type are decoded and keep their nulls."""
    if isinstance(value, dict):
        present = {name: part for name, part in value.items() if part is not None}
        return {name: _plain(part, None if type_ is None else type_.field(name).type) for name, part in present.items()}
    if isinstance(value, list):
        inner = None if type_ is None else type_.value_type
        return [_plain(part, inner) for part in value]
    return decode_json(value.encode()) if isinstance(value, str) and type_ is not None and _is_json(type_) else value


def _leaves(type_: Any) -> Iterator[Any]:
    from pyarrow import types

    if types.is_struct(type_):
        for field in type_:
            yield from _leaves(field.type)
    elif types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_):
        yield from _leaves(type_.value_type)
    else:
        yield type_.value_type if types.is_dictionary(type_) else type_


def _is_json(type_: Any) -> bool:
    import pyarrow

    return isinstance(type_, pyarrow.JsonType)


def _in_json(type_: Any) -> bool:
    from pyarrow import types

    kinds = types.is_string, types.is_large_string, types.is_boolean, types.is_integer, types.is_floating, types.is_null
    return _is_json(type_) or any(kind(type_) for kind in kinds)


# --- Rows of a file of any format.


def read_rows(path: Path, text_rows: str = "file") -> Iterator[tuple[RowLocation, dict[str, Any]]]:
    """Yield every row of a file with its location; raise DataError at the first invalid one."""
    for where, row in read_rows_or_errors(path, text_rows):
        if isinstance(row, DataError):
            raise row
        yield where, row


def read_rows_or_errors(
    source: Path | Chunk, text_rows: str = "file"
) -> Iterator[tuple[RowLocation, dict[str, Any] | DataError]]:
    """Yield every row of a file, or of a part of it; for an invalid row its error, after which reading continues.

    A location is a line in files of lines and of text, and the row's number (from 1) in Parquet, CSV and JSON arrays.
    A Parquet file has every column in every row: null values, at any depth, are treated as absent keys.
    Columns of types that JSON lacks (bytes, times) are read only if `MEANT` has their name.

    A row of a .txt or .md file is the `file`, a `paragraph` (between blank lines), or a `line` (unless blank).

    Raises:
        DataError: a missing, unknown, empty or damaged file; damage is reported after the rows before it.
        NeedsError: the library that decompresses the file is missing.
    """
    chunk = source if isinstance(source, Chunk) else Chunk(source, 1, 0, None)
    path = chunk.file
    where = None
    with _as_data_errors(path):
        suffix, packing = _checked(path)
        try:
            for number, row in _rows(chunk, suffix, packing, text_rows):
                where = RowLocation(path, number)
                yield where, bad_row(where, row) if isinstance(row, str) else row
        except Damaged as damage:
            found = f"{damage}; the last row that could be read: {where or 'none'}"
            raise Damaged(found, remedy(str(damage), damage.do)) from damage
    if where is None and chunk.end is None:
        raise _empty(path)


def chunks(file: Path, size_bytes: int = 16 << 20, text_rows: str = "file") -> Iterator[Chunk]:
    """Yield the parts of a file in order; they depend on the file's bytes and `size_bytes` alone.

    Lines are never split: a part ends with the line that reaches `size_bytes`. Compressed files, JSON arrays, CSV and
    text that is not read by lines are one part. Raises DataError: a missing, unknown, damaged or empty file.
    """
    chunk = None
    with _as_data_errors(file):
        suffix, packing = _checked(file)
        if suffix == PARQUET:
            parts = _parquet_chunks(file, size_bytes)
        else:
            with opened(file, packing) as start:
                skip_mark(start)
                begin = start.peek()
            array, empty = suffix == ARRAY and begin.lstrip()[:1] == b"[", not begin
            single = packing or array or suffix in CELLS or (suffix in TEXT and text_rows.partition(" ")[0] != "line")
            parts = iter([Chunk(file, 1, 0, None)]) if single else _line_chunks(file, size_bytes)
            parts = iter(()) if empty else parts
        for chunk in parts:
            yield chunk
    if chunk is None:
        raise _empty(file)


def _checked(path: Path) -> tuple[str, str]:
    if path.is_dir():
        raise DataError(f"rows from {path}", "a folder", "name a .jsonl file in it; images: optrush init --data FOLDER")
    if not path.exists():
        raise DataError(f"rows from {path}", "no such file", "check the path")
    known = form(regular(path))
    if known is None:
        raise DataError(f"rows from {path}", "an unknown suffix", f"rename it by its content: {NAMES}")
    return known


@contextmanager
def _as_data_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except Damaged as damage:
        raise DataError(f"rows from {path}", str(damage), damage.do) from damage
    except OSError as error:
        do = "check the file and its permissions"
        raise DataError(f"rows from {path}", error.strerror or str(error), do) from error


def _empty(path: Path) -> DataError:
    return DataError(f"rows from {path}", "an empty file", "use a file with at least one row")


def _rows(chunk: Chunk, suffix: str, packing: str, text_rows: str) -> Rows:
    """Yield the numbered rows of a chunk, or reasons why they are invalid; `text_rows`: see `read_rows_or_errors`."""
    if suffix == PARQUET:
        yield from _parquet_rows(chunk)
        return
    text_rows, _, named = text_rows.partition(" ")
    with opened(chunk.file, packing, PIECE_bytes if chunk.end is None else chunk.end - chunk.start) as file:
        marked = not chunk.start and skip_mark(file)
        if suffix in CELLS:
            yield from _cells(file, CELLS[suffix], named)
        elif suffix == ARRAY and chunk.end is None and file.peek().lstrip()[:1] == b"[":
            yield from _items(file)
        elif suffix in TEXT and text_rows == "file":
            yield from _whole(file)
        elif suffix in TEXT and text_rows == "paragraph":
            yield from _paragraphs(file)
        else:
            if chunk.start:
                file.seek(chunk.start)
            row = _text if suffix in TEXT else _object
            size = None if chunk.end is None else chunk.end - chunk.start - len(BOM) * marked
            for line, raw in enumerate(without_blank_end(lines(file, size), file), chunk.first):
                if raw is None or raw.strip() or suffix not in TEXT:  # blank lines of a text are not rows
                    yield line, _too_long() if raw is None else row(raw)


def _line_chunks(file: Path, size_bytes: int) -> Iterator[Chunk]:
    with open_file(file, 0) as raw:
        start, first = 0, 1
        while piece := raw.read(size_bytes):
            end, count = start + len(piece), piece.count(b"\n")
            while piece and not piece.endswith(b"\n"):  # read to the end of the line
                piece = raw.read(2**16)
                cut = piece.find(b"\n") + 1
                piece = piece[:cut] if cut else piece
                end, count = end + len(piece), count + (cut > 0)
            yield Chunk(file, first, start, end)
            start, first = end, first + count
            raw.seek(start)


# --- From `data.path` to files: a file, a folder, a glob, or a data set of the hub, stored once as Parquet.
#
# Files are skipped only by rule: hidden names, unknown suffixes next to known ones, files that describe a data set.
# A choice that would read rows twice, or mix documents with rows, is rejected.

HUB = "hub:"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?::\w[\w.]*)?")
# The text after the prefix: may also have a configuration of the data set, and a slice of a split.
HUB_SET = re.compile(
    r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/([A-Za-z0-9][\w.-]*))?(?::(\w[\w.]*(?:\[[-\d]*%?:?[-\d]*%?\])?))?"
)
NAMED = 5  # files that an error message names
# Files in the folder of a cloned or saved data set that are not data.
ABOUT = frozenset({
    "README.md", "LICENSE.md", "LICENSE.txt", "dataset_info.json", "dataset_infos.json", "dataset_dict.json",
    "state.json",
})  # fmt: skip
# Names of a data set's splits: train.jsonl, test-00000-of-00001.parquet, valid_1.json, and folders of these names.
PARTS = "(train|training|test|testing|valid|validation|val|dev|eval|evaluation|heldout|holdout)"
SPLIT = re.compile(rf"(?i)(?:^|[-_. ]){PARTS}(?=$|[-_. \d])")
# Where no file is named after training, the whole name must match, except a shard's number and parts between dots:
# `dev-docs.jsonl` may be an ordinary file.
WHOLE = re.compile(rf"(?i)(?:^|\.){PARTS}(?:[-_ ]?\d+(?:-of-\d+)?)?(?=$|\.)")
SETTLED_ns = 2 * 10**9  # a file that changed more recently could change again within one tick of its clock


def find_files(path: str, cache: Path | None = None) -> list[Path]:
    """Return the data files that a path names, sorted.

    A path is a file; a folder (all data files below it except hidden ones and those in ABOUT); a glob; `s3://...`; or a
    data set of the hub, downloaded once into the cache: `org/name` if no such path exists, or
    `hub:org/name[/configuration][:split]`. The default split is `train`; a split may be a slice, `train[:20%]`.

    Raises:
        DataError: no file, no known format, or files that do not go together; no such data set, or no network.
        NeedsError: a hub id without the `datasets` library.
    """
    asked = f"rows from {path}"
    try:
        return _find(str(fetch_remote(asked, path, cache)) if "://" in path else path, asked, cache)
    except OSError as error:
        found = f"{error.strerror or error}: {error.filename or path}"
        raise DataError(asked, found, "check the path and its permissions") from error


def _find(path: str, asked: str, cache: Path | None) -> list[Path]:
    """Return the data files of a path; raise DataError with a similar name if no such file exists."""
    if path.startswith(HUB):
        return [_from_hub(path.removeprefix(HUB), cache)]
    place = Path(os.path.expanduser(path))
    if place.exists() and not place.is_dir():
        return _together(asked, [place], "")
    if place.is_dir():
        listed = [file for file in sorted(_inside(place)) if file.name not in ABOUT]
        return _one_split(asked, _together(asked, listed, "an empty folder"), place)
    if glob.has_magic(path):
        matches = [Path(name) for name in sorted(glob.glob(str(place), recursive=True))]
        files = _together(asked, [file for file in matches if not file.is_dir()], "no match")
        return _one_split(asked, files, Path(os.path.commonpath([file.parent for file in files])))
    if HUB_ID.fullmatch(path) and form(place) is None and not place.parent.is_dir():
        return [_from_hub(path, cache)]
    near = os.listdir(place.parent) if place.parent.is_dir() else []
    do = "check the path" + "".join(f": did you mean {n}?" for n in difflib.get_close_matches(place.name, near, 1))
    kind, _, more = path.partition(":")  # forms that `optrush init --data` accepts
    if kind in ("sample", "random"):
        do = f"write `data: {{{kind}: {more or {'sample': 'recipes', 'random': 'true'}[kind]}}}`; or {do}"
    raise DataError(asked, "no such file", do)


def description_files(path: str) -> list[str]:
    """Return the names of the files in a folder that are skipped because they describe the data."""
    place = Path(os.path.expanduser(path))
    return sorted({file.name for file in _inside(place)} & ABOUT) if place.is_dir() else []


def _inside(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder except hidden ones; each folder once, even if several links lead to it."""

    def refuse(error: OSError) -> None:
        raise error

    seen = {os.path.realpath(folder)}
    for at, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        inner = {name: os.path.realpath(os.path.join(at, name)) for name in sorted(folders) if name[0] != "."}
        folders[:] = [name for name, real in inner.items() if real not in seen]
        seen.update(inner.values())
        yield from (Path(at, name) for name in names if name[0] != ".")


def _together(asked: str, files: list[Path], nothing: str) -> list[Path]:
    """Return the files of known formats; raise DataError if they cannot be one corpus."""
    if not files:
        raise DataError(asked, nothing, "name a data file, a folder of some, or a glob")
    known = {file: format_ for file in files if (format_ := form(file))}
    if not known:
        raise DataError(asked, f"no known kind of data: {_named(files)}", f"rename them by their content: {NAMES}")
    texts = [file for file, (suffix, _) in known.items() if suffix in TEXT]
    if texts and len(texts) < len(known):
        rows = [file for file in known if file not in texts]
        do = "name one kind with a glob, such as folder/*.jsonl, or list each as a source"
        raise DataError(asked, f"files of rows ({_named(rows)}) and files of plain text ({_named(texts)})", do)
    plain: dict[Path, Path] = {}
    for file, (_, packing) in known.items():
        other = plain.setdefault(file.with_suffix("") if packing else file, file)
        if other != file:
            raise DataError(asked, f"{other.name} and {file.name}: the same rows twice?", "remove one of them")
    return list(known)


def _one_split(asked: str, files: list[Path], root: Path) -> list[Path]:
    """Return `files`; raise DataError if they mix a data set's held-out split with other files below `root`.

    Plain texts count as splits only if one of them is named after training: `test.md` may be an ordinary page.
    """
    splits = _splits(files, root, SPLIT)
    if "train" not in splits:
        text = all((form(file) or ("",))[0] in TEXT for file in files)
        splits = {} if text else _splits(files, root, WHOLE)
    held_out = [file for split, some in splits.items() if split not in ("", "train") for file in some]
    if not held_out or len(splits) == 1:
        return files
    rest = splits.get("train") or [file for file in files if file not in held_out]
    line = str(rest[0]) if len(rest) == 1 else f"[{', '.join(map(str, rest))}]" if rest else "FILE"
    found = f"splits of a data set: {_named(held_out)} would be trained on"
    line = line if len(rest) <= NAMED else str(rest[0])
    more = f", and data.eval: {held_out[0]}" if len(held_out) == 1 else ""
    raise DataError(asked, found, f"name the training split: data.path: {line}{more}; or list all files to use all")


def _splits(files: list[Path], root: Path, pattern: re.Pattern[str]) -> dict[str, list[Path]]:
    """Return the files of each split, by their names below a folder; "" has files of no split or of several."""
    splits: dict[str, list[Path]] = {}
    for file in files:
        names = [match[1].lower() for part in file.relative_to(root).parts for match in pattern.finditer(part)]
        kinds = {"train" if name.startswith("train") else name for name in names}
        splits.setdefault(kinds.pop() if len(kinds) == 1 else "", []).append(file)
    return splits


def _named(files: list[Path]) -> str:
    more = len(files) - NAMED
    return ", ".join(file.name for file in files[:NAMED]) + (f" and {more} more" if more > 0 else "")


def _from_hub(name: str, cache: Path | None) -> Path:
    asked = f"the data set {name} from the hub"
    match = HUB_SET.fullmatch(name)
    if match is None:
        raise DataError(asked, "not a data set name", "write hub:organisation/name[/configuration][:split]")
    return fetch(asked, match[1], match[2], match[3] or "train", cache)


# --- The identity of files.


def files_fingerprint(files: Path | Iterable[Path], cache: Path | None = None) -> str:
    """Return the SHA-256 over the contents and formats of files in order, independent of their names and folders.

    The cache stores hashes by path, size, times of change and inode, so that an unchanged file is not read again.
    """
    named = [files] if isinstance(files, Path) else list(files)
    lines = (f"{form(file)} {digest}\n" for file, digest in zip(named, _digests(named, cache), strict=True))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _digests(files: Iterable[Path], cache: Path | None) -> list[str]:
    """Return the SHA-256 of each file; a file whose hash is in the cache is not read."""
    memory = cache / "fingerprints.json" if cache else None
    known = _stored_hashes(memory)
    digests: list[str] = []
    fresh = False
    for file in files:
        try:
            key, now = os.path.realpath(file), file_state(file)
            if known.get(key, [])[:-1] != now:
                with open_file(file) as content:
                    known[key] = [*now, hashlib.file_digest(content, "sha256").hexdigest()]
                if file_state(file) != now:
                    raise changed_meanwhile(file)
                fresh = True
        except OSError as error:
            do = "check the file and its permissions"
            raise DataError(f"rows from {file}", error.strerror or str(error), do) from error
        digests.append(str(known[key][-1]))
    if memory and fresh:
        settled = time.time_ns() - SETTLED_ns
        kept = {key: entry for key, entry in known.items() if int(entry[1]) < settled}
        cache_folder(memory.parent)
        write_whole(memory, json.dumps(kept), memory.with_name(f"{memory.name}.{os.getpid()}"))
    return digests


# --- Records of the files of a run, so that a resumed run can report changes.


def record_files(paths: Iterable[str], cache: Path | None) -> list[dict[str, Any]]:
    """Return path, bytes and SHA-256 of each file that the paths name.

    The hashes come from the cache, filled by `files_fingerprint`.
    """
    files = [file for path in paths for file in find_files(path, cache)]
    digests = zip(files, _digests(files, cache), strict=True)
    return [{"path": str(file.resolve()), "bytes": file.stat().st_size, "sha256": digest} for file, digest in digests]


def record_changes(then: Iterable[Mapping[str, Any]], now: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the differences between two records, a text per file."""
    before, after = ({part["path"]: part for part in record} for record in (then, now))
    changes = [f"{path} is no longer read" for path in before if path not in after]
    changes += [f"{path} was not read before" for path in after if path not in before]
    for path in before.keys() & after.keys():
        old, new = before[path], after[path]
        if old["sha256"] != new["sha256"]:
            changes.append(f"{path}: other content ({old['bytes']:,} bytes then, {new['bytes']:,} now)")
    return sorted(changes)


def changed_meanwhile(file: Path) -> DataError:
    """Return the error for a file that changed after it was hashed."""
    return DataError(f"to read {file}", "it changed during reading", "wait until it is complete, and start again")


def file_state(file: Path) -> list[int]:
    """Return numbers that identify the file's state: at least one changes whenever the file does."""
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_ctime_ns]  # ctime cannot be set back


def _stored_hashes(memory: Path | None) -> dict[str, list[int | str]]:
    """Return the hashes in the cache; none if its file is missing or damaged."""
    try:
        stored, sound = parse_json(read_file(memory)) if memory else {}, [int, int, int, int, str]
        return {key: entry for key, entry in stored.items() if [type(part) for part in entry] == sound}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
