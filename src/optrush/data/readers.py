"""Rows from files of every common format, strictly: what is not exactly understood is an error with its place.

Lenient readers guess a schema and change it silently when a row does not fit; a row that was half understood then
trains the model on something nobody wrote. Here a bad row is never repaired and never skipped: `read` raises at the
first, `attempts` hands each one over as a value, so that a cleaner can count and keep them. Everything streams: memory
is bounded by the longest row, not by the file.
"""

from __future__ import annotations

import bz2
import csv
import difflib
import errno
import glob
import hashlib
import io
import json
import lzma
import os
import re
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from optrush.data.schema import MEANT, RowLocation, bad_row, decode, kind, show
from optrush.errors import DataError, NeedsError

# --- Compressed files as streams of bytes, with every cut or foreign end found.
#
# The readers of the standard library and of zstandard take, one here and one there, a truncated stream or a damaged
# second one for the end of the file, which loses rows without a sign. Here only the end of a whole stream is an end.


PACKED = (".gz", ".bz2", ".xz", ".zst")
PIECE_bytes = 2**20
ARRAY_PIECE_bytes = 2**20  # of a JSON array, whose items are found while it is read
TAKEN_bytes = 2**10  # packed bytes unpacked at once: even zstd makes at most 32 MiB of these


class Damaged(Exception):
    """A file that cannot be read on, and why."""


def opened(path: Path, packing: str) -> io.BufferedReader[Any]:
    """The bytes of a file, unpacked where `packing` (a suffix of PACKED) says so; reading them may raise Damaged."""
    if not packing:
        return io.BufferedReader(io.FileIO(path), PIECE_bytes)
    new, errors = _unpacker(path, packing)
    return io.BufferedReader(_Unpacked(io.FileIO(path), new, errors), PIECE_bytes)


def _unpacker(path: Path, packing: str) -> tuple[Callable[[], Any], tuple[type[Exception], ...]]:
    """What makes a decompressor of one stream, and what that raises."""
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
        raise NeedsError(f"data from {path}", "no library zstandard, which unpacks it", do) from None
    return zstandard.ZstdDecompressor().decompressobj, (zstandard.ZstdError,)


class _Unpacked(io.RawIOBase):
    """The bytes inside a packed file; streams that follow one another are read as one."""

    def __init__(self, file: io.FileIO, new: Callable[[], Any], errors: tuple[type[Exception], ...]) -> None:
        self.file, self.new, self.errors = io.BufferedReader(file, PIECE_bytes), new, errors
        self.stream: Any = None
        self.rest = b""  # packed bytes that the stream has not seen
        self.ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self.ready:
            if (self.stream is None or self.stream.eof) and not self._next():
                return 0
            self.ready = memoryview(self._more())
        n = min(len(buffer), len(self.ready))
        buffer[:n], self.ready = self.ready[:n], self.ready[n:]
        return n

    def _next(self) -> bool:
        """Begins the next stream, if there is one; gzip and xz may be padded with zeros."""
        rest = b"" if self.stream is None else self.stream.unused_data.lstrip(b"\0")
        while not rest:
            taken = self.file.read(TAKEN_bytes)
            if not taken:
                return False
            rest = taken.lstrip(b"\0")
        self.stream, self.rest = self.new(), rest
        return True

    def _more(self) -> bytes:
        bounded = hasattr(self.stream, "needs_input")  # bz2 and xz: those can make gigabytes of a few bytes
        taken = b""
        if not bounded or self.stream.needs_input:
            taken, self.rest = self.rest or self.file.read(TAKEN_bytes), b""
            if not taken:
                raise Damaged("cut off: the file ends inside the compressed data")
        try:
            made: bytes = self.stream.decompress(taken, PIECE_bytes) if bounded else self.stream.decompress(taken)
        except self.errors as error:
            raise Damaged(f"damaged compressed data: {error}") from error
        return made


# --- The rows inside a file of bytes, one function a layout: JSON lines, a JSON array, CSV, text.
#
# Each takes an open stream and gives (number, row or the reason why it is none), reads on after a bad row wherever the
# next one can be told from it, and holds one row at a time.


LONGEST_ROW_bytes = 32 * 2**20
# Strings whole, objects without inner brackets whole, brackets and commas; a quote alone is a string that goes on
# beyond what was read.
STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
MARKS = re.compile(rb'%b|\{(?:[^\[\]{}"]++|%b)*+\}|["\[\]{},]' % (STRING, STRING), re.DOTALL)

Found = Iterator[tuple[int, dict[str, Any] | str]]


def objects(file: io.BufferedReader, first: int = 1, size: int | None = None) -> Found:
    """A JSON object a line, of the next `size` bytes; `first` is the number of their first line."""
    for line, raw in enumerate(lines(file, size), first):
        yield line, too_long() if raw is None else _object(raw)


def texts(file: io.BufferedReader, first: int = 1, size: int | None = None) -> Found:
    """A text a line, without the blank ones; as `objects`."""
    for line, raw in enumerate(lines(file, size), first):
        if raw is None or raw.strip():
            yield line, too_long() if raw is None else _text(raw)


def lines(file: io.BufferedReader, size: int | None = None) -> Iterator[bytes | None]:
    """The lines of the next `size` bytes, or of all; None for one that is too long."""
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
        raise Damaged("a row is not where it was: the file is shorter than when its parts were counted")


def too_long() -> str:
    """The reason of a row that is."""
    return f"the row is longer than {LONGEST_ROW_bytes >> 20} MiB"


def _object(raw: bytes) -> dict[str, Any] | str:
    try:
        found = decode(raw)
    except ValueError as error:
        return str(error) if raw.strip() else "an empty line"
    return found if isinstance(found, dict) else f"{kind(found)} where an object {{...}} belongs"


def _text(raw: bytes) -> dict[str, Any] | str:
    reason, text = _decoded(raw)
    return reason or {"text": text.rstrip("\r\n")}


def _decoded(raw: bytes) -> tuple[str, str]:
    """(reason, text): what is wrong with the bytes, and the text with marks where it is."""
    try:
        text = raw.decode("utf-8")
        return "it begins with a byte order mark (BOM)" if text.startswith("\ufeff") else "", text
    except UnicodeDecodeError as error:
        return f"invalid UTF-8 at byte {error.start}: {raw[error.start]:#04x}", raw.decode("utf-8", "replace")


def whole(file: io.BufferedReader) -> Found:
    """All of the file as one text."""
    raw = file.read(LONGEST_ROW_bytes + 1)
    if len(raw) > LONGEST_ROW_bytes:
        yield 1, f"{too_long()}; read the file by paragraphs or lines (data.text_rows)"
    elif raw:
        reason, text = _decoded(raw)
        yield 1, reason or {"text": text}


def paragraphs(file: io.BufferedReader) -> Found:
    """Texts between blank lines, each numbered by its first line."""
    parts: list[bytes] = []
    size = first = 0
    for line, raw in chain(enumerate(lines(file), 1), [(0, b"")]):
        if raw is None or raw.strip():
            first = first or line
            size += LONGEST_ROW_bytes + 1 if raw is None else len(raw)
            if raw is not None and size <= LONGEST_ROW_bytes:
                parts.append(raw)
        elif first:
            yield first, too_long() if size > LONGEST_ROW_bytes else _text(b"".join(parts))
            parts, size, first = [], 0, 0


def is_array(file: io.BufferedReader) -> bool:
    """Whether the file begins like a JSON array; reads nothing away."""
    return file.peek().lstrip()[:1] == b"["


def items(file: io.BufferedReader) -> Found:
    """The items of one JSON array, found by their brackets, each decoded alone."""
    data, at, start, depth, row = file.read(ARRAY_PIECE_bytes), 0, 0, 0, 0
    while True:
        then = len(data)
        for match in MARKS.finditer(data, at):
            mark = match[0]
            if mark == b'"':
                then = match.start()
                break
            depth += (mark in b"[{") - (mark in b"]}")
            if depth == 1 and mark == b"[":
                start = match.end()
            elif depth == 0 or (depth == 1 and mark == b","):
                item, start = data[start : match.start()], match.end()
                if mark == b"," or row or item.strip():
                    row += 1
                    yield row, _object(item) if item.strip() else "nothing between commas"
                if depth == 0:
                    rest = chain([data[start:]], iter(partial(file.read, ARRAY_PIECE_bytes), b""))
                    if mark != b"]" or any(more.strip() for more in rest):
                        raise Damaged(f"the list ends after row {row}, and the file goes on")
                    return
        if len(data) - start > LONGEST_ROW_bytes:
            raise Damaged(f"row {row + 1} is longer than {LONGEST_ROW_bytes >> 20} MiB, or does not end")
        more = file.read(ARRAY_PIECE_bytes)
        if not more:
            raise Damaged(f"cut off: the file ends inside row {row + 1}, or without the list's `]`")
        data, at, start = data[start:] + more, then - start, 0


# --- CSV and TSV


def cells(file: io.BufferedReader, delimiter: str) -> Found:
    """Rows of strings under the names of the first line (RFC 4180, with any end of line)."""
    csv.field_size_limit(LONGEST_ROW_bytes)  # the module's own is 128 KiB, for the whole process
    wrong: list[str] = []  # what is wrong with the bytes of the row that is being read
    row = first = size = 0

    def decoded() -> Iterator[str]:
        nonlocal size
        for raw in lines(file):
            size += LONGEST_ROW_bytes + 1 if raw is None else len(raw)
            if raw is None or size > LONGEST_ROW_bytes:  # where its quotes end, and the next row begins, is not known
                raise Damaged(f"row {row + 1}, line {first}: {too_long()}, or a quote is not closed")
            reason, text = _decoded(raw)
            wrong.extend([reason] if reason else [])
            yield text

    table = csv.reader(decoded(), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    while True:
        first, size = table.line_num + 1, 0
        wrong.clear()
        try:
            found = next(table)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end" in str(error):
                raise Damaged(f"cut off: a quote in row {row + 1}, line {first}, is not closed") from error
            wrong.append(f"not valid CSV: {error}")
            found = []
        if header is None:
            header = _header(found, wrong)
            continue
        row += 1
        if not wrong and len(found) != len(header):
            wrong.append(f"{len(found)} cells under {len(header)} columns" if found else "an empty line")
        yield row, f"{wrong[0]} (line {first} of the file)" if wrong else dict(zip(header, found))


def _header(names: list[str], wrong: list[str]) -> list[str]:
    """The names of the columns, if each is a name and no two are equal."""
    if not wrong:
        wrong += ["an empty line"] if not names else []
        wrong += [f"column {i + 1} has no name" for i, name in enumerate(names) if not name.strip()]
        wrong += [f"two columns are named {show(name)}" for name in names if names.count(name) > 1]
    if wrong:
        raise Damaged(f"the first line is no header: {wrong[0]}")
    return names


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


def read(path: Path, text_rows: str = "file") -> Iterator[tuple[RowLocation, dict[str, Any]]]:
    """Every row of a file with its place; raises DataError at the first that is none."""
    for where, found in attempts(path, text_rows):
        if isinstance(found, DataError):
            raise found
        yield where, found


def attempts(source: Path | Chunk, text_rows: str = "file") -> Iterator[tuple[RowLocation, dict[str, Any] | DataError]]:
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
                where = RowLocation(path, number)
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


def _rows(chunk: Chunk, suffix: str, packing: str, text_rows: str) -> Found:
    if suffix == PARQUET:
        yield from rows(chunk.file, chunk.first, chunk.start, chunk.end)
        return
    with opened(chunk.file, packing) as file:
        if suffix in CELLS:
            yield from cells(file, CELLS[suffix])
        elif suffix == ARRAY and chunk.end is None and is_array(file):
            yield from items(file)
        elif suffix in TEXT and text_rows == "file":
            yield from whole(file)
        elif suffix in TEXT and text_rows == "paragraph":
            yield from paragraphs(file)
        else:
            if chunk.start:
                file.seek(chunk.start)
            size = None if chunk.end is None else chunk.end - chunk.start
            yield from (texts if suffix in TEXT else objects)(file, chunk.first, size)


def _parts(file: Path, suffix: str, packing: str, size_bytes: int, text_rows: str) -> Iterator[Chunk]:
    if suffix == PARQUET:
        for first, start, end in parts(file, size_bytes):
            yield Chunk(file, first, start, end)
        return
    with opened(file, packing) as whole:
        array = suffix == ARRAY and is_array(whole)
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


# --- From what `data.path` says to files: one, a folder's, a glob's, or a data set of the hub written once as Parquet.
#
# What is left out is left out by a rule that is said (hidden names, unknown suffixes beside known ones, in a folder
# what tells about a data set); a choice that would read rows twice, or documents and rows as one, is refused.


HUB = "hub:"
HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(\w[\w.]*))?")
NAMED = 5  # files that an error message names
# What lies in the folder of a cloned or saved data set beside the data.
ABOUT = frozenset({
    "README.md", "LICENSE.md", "LICENSE.txt", "dataset_info.json", "dataset_infos.json", "dataset_dict.json",
    "state.json",
})  # fmt: skip
SETTLED_ns = 2 * 10**9  # a file changed so lately could change again within one tick of its clock


def find(path: str, cache: Path | None = None) -> list[Path]:
    """The data files that a path names, sorted.

    Args:
        path: a file; a folder (all data files in it and its folders, but hidden ones and those of ABOUT); a glob; or a
            data set of the hub, `org/name` where no such path exists, or `hub:org/name[:split]` (else its split
            `train`).
        cache: the folder for data sets of the hub; one that lies there is not asked for again.

    Raises:
        DataError: nothing is there, nothing known, or files that do not go together; no such data set or no network.
        NeedsError: a hub id without the `datasets` library.
    """
    asked = f"training data from {path}"
    try:
        return _find(path, asked, cache)
    except OSError as error:
        found = f"{error.strerror or error}: {error.filename or path}"
        raise DataError(asked, found, "check the path and its rights") from error


def _find(path: str, asked: str, cache: Path | None) -> list[Path]:
    if path.startswith(HUB):
        return [_from_hub(path.removeprefix(HUB), cache)]
    place = Path(os.path.expanduser(path))
    if place.is_file():
        return _together(asked, [place], "")
    if place.is_dir():
        return _together(asked, _data(sorted(_inside(place))), "an empty folder")
    if glob.has_magic(path):
        found = [Path(name) for name in sorted(glob.glob(str(place), recursive=True))]
        return _together(asked, [file for file in found if not file.is_dir()], "nothing that matches")
    if HUB_ID.fullmatch(path) and form(place) is None and not place.parent.is_dir():
        return [_from_hub(path, cache)]
    near = os.listdir(place.parent) if place.parent.is_dir() else []
    close = difflib.get_close_matches(place.name, near, 1)
    raise DataError(asked, "no such file", "check the path" + (f": did you mean {close[0]}?" if close else ""))


def about(path: str) -> list[str]:
    """The names in a folder that are left out because they tell about the data and are none."""
    place = Path(os.path.expanduser(path))
    found = list(_inside(place)) if place.is_dir() else []
    return sorted({file.name for file in set(found) - set(_data(found))})


def _data(found: list[Path]) -> list[Path]:
    """The files of a folder without those of ABOUT."""
    return [file for file in found if file.name not in ABOUT]


def _inside(folder: Path) -> Iterator[Path]:
    """The files in a folder and its folders, but the hidden ones; each folder once, whatever links lead there."""

    def refuse(error: OSError) -> None:
        raise error

    seen = {os.path.realpath(folder)}
    for at, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        inner = {name: os.path.realpath(os.path.join(at, name)) for name in sorted(folders) if name[0] != "."}
        folders[:] = [name for name, real in inner.items() if real not in seen]
        seen.update(inner.values())
        yield from (Path(at, name) for name in names if name[0] != ".")


def _together(asked: str, files: list[Path], nothing: str) -> list[Path]:
    """The files of known kinds, if they can be one corpus."""
    if not files:
        raise DataError(asked, nothing, "name a data file, a folder of some, or a glob")
    known = {file: format_ for file in files if (format_ := form(file))}
    if not known:
        do = f"name them by what they hold: {', '.join(KNOWN)}, or one of the text kinds with {', '.join(PACKED)}"
        raise DataError(asked, f"no known kind of data: {_named(files)}", do)
    texts = [file for file, (suffix, _) in known.items() if suffix in TEXT]
    if texts and len(texts) < len(known):
        rows = [file for file in known if file not in texts]
        found = f"files of rows ({_named(rows)}) and files of plain text ({_named(texts)})"
        do = "name one kind with a glob, such as folder/*.jsonl, or each as a source of its own"
        raise DataError(asked, found, do)
    plain: dict[Path, Path] = {}
    for file, (_, packing) in known.items():
        inner = file.with_suffix("") if packing else file
        if inner in plain:
            found = f"{plain[inner].name} and {file.name}: the same rows twice?"
            raise DataError(asked, found, "take one of them away")
        plain[inner] = file
    return list(known)


def _named(files: list[Path]) -> str:
    more = len(files) - NAMED
    return ", ".join(file.name for file in files[:NAMED]) + (f" and {more} more" if more > 0 else "")


def _from_hub(name: str, cache: Path | None) -> Path:
    """A data set of the hub as a Parquet file, fetched unless it lies in the cache; no code of its repository runs."""
    asked = f"the data set {name} from the hub"
    match = HUB_ID.fullmatch(name)
    if match is None:
        raise DataError(asked, "no name of a data set", "write hub:organisation/name or hub:organisation/name:split")
    repository, split = match[1], match[2] or "train"
    if cache is None:
        raise DataError(asked, "no folder to keep it in", "name one (data.cache)")
    file = cache / "hub" / f"{repository.replace('/', '--')}--{split}.parquet"
    if file.exists():
        return file
    try:
        import datasets
    except ImportError:
        do = "install it: python -m pip install 'optrush[datasets]'"
        raise NeedsError(asked, "no library datasets, which fetches it", do) from None
    if int(datasets.__version__.partition(".")[0]) < 4:
        do = "install a newer one: python -m pip install 'optrush[datasets]'"
        raise NeedsError(asked, f"datasets {datasets.__version__}, which may run code of a repository", do)
    if Path(repository).exists():  # the library would read that instead
        raise DataError(asked, f"a folder {repository} on this machine", "give its path without hub:, or rename it")
    with tempfile.TemporaryDirectory(dir=_made(file.parent)) as fresh:
        try:
            datasets.load_dataset(repository, split=split).to_parquet(part := os.path.join(fresh, file.name))
        except Exception as error:  # whatever it and the libraries below it raise
            found = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise DataError(asked, found, "check the name, the split and the network") from error
        os.replace(part, file)
    return file


def fingerprint(files: Path | Iterable[Path], cache: Path | None = None) -> str:
    """SHA-256 over the contents and formats of files in their order, wherever they lie and whatever they are called.

    Args:
        cache: a folder that keeps the hash of each file by its path, size, time of change and inode, so that a file
            that did not change is not read again.
    """
    memory = cache / "fingerprints.json" if cache else None
    known = _remembered(memory)
    whole, fresh = hashlib.sha256(), False
    for file in [files] if isinstance(files, Path) else files:
        try:
            key, now = os.path.realpath(file), mark(file)
            if known.get(key, [])[:-1] != now:
                with file.open("rb") as opened:
                    known[key] = [*now, hashlib.file_digest(opened, "sha256").hexdigest()]
                if mark(file) != now:
                    raise changed(file)
                fresh = True
        except OSError as error:
            do = "check the file and its rights"
            raise DataError(f"training data from {file}", error.strerror or str(error), do) from error
        whole.update(f"{form(file)} {known[key][-1]}\n".encode())
    if memory and fresh:
        settled = time.time_ns() - SETTLED_ns
        kept = {key: entry for key, entry in known.items() if int(entry[1]) < settled}
        with tempfile.NamedTemporaryFile("w", dir=_made(memory.parent), delete=False) as part:
            json.dump(kept, part)
        os.replace(part.name, memory)
    return whole.hexdigest()


def changed(file: Path) -> DataError:
    """The error of a file that is not what it was when its contents were hashed."""
    return DataError(f"to read {file}", "it changed meanwhile", "wait until it is complete, and start again")


def mark(file: Path) -> list[int]:
    """What changes whenever the file does."""
    found = file.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ino, found.st_ctime_ns]  # the last nobody can set back


def _remembered(memory: Path | None) -> dict[str, list[int | str]]:
    """What the cache holds; a damaged file of it is as good as none."""
    try:
        found = json.loads(memory.read_bytes()) if memory else {}
        return {
            key: entry for key, entry in found.items() if [type(part) for part in entry] == [int, int, int, int, str]
        }
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, "no right to write there")
    except OSError as error:
        do = "name another (data.cache)"
        raise DataError(f"the cache folder {folder}", error.strerror or str(error), do) from error
    return folder


# --- Rows of a Parquet file, a few at a time, as JSON has them.


MOST_ROWS = 256  # decoded at once


def parts(path: Path, size_bytes: int) -> Iterator[tuple[int, int, int]]:
    """(number of its first row, first row group, row group after the last) of parts of about `size_bytes`."""
    with _opened(path) as file:
        groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
    first, start, held, size = 1, 0, 0, 0
    for i, group in enumerate(groups):
        held, size = held + group.num_rows, size + group.total_byte_size
        if held and (size >= size_bytes or i + 1 == len(groups)):
            yield first, start, i + 1
            first, start, held, size = first + held, i + 1, 0, 0


def rows(path: Path, first: int = 1, start: int = 0, end: int | None = None) -> Found:
    """The rows of the row groups [start, end), numbered from `first`, without their nulls."""
    import pyarrow

    row = first - 1
    with _opened(path) as file:
        schema = file.schema_arrow
        twice = next((name for name in schema.names if schema.names.count(name) > 1), None)
        if twice is not None:
            raise Damaged(f"two columns are named {show(twice)}")
        leaves = {field.name: list(_leaves(field.type)) for field in schema}
        columns = [name for name, types in leaves.items() if name in MEANT or all(map(_in_json, types))]
        spelt = {name: schema.field(name).type for name in columns if any(map(_is_json, leaves[name]))}
        groups = range(file.num_row_groups)[start:end]
        try:
            # One thread: whoever wants more reads several parts at once.
            for batch in file.iter_batches(MOST_ROWS, row_groups=groups, columns=columns, use_threads=False):
                for found in _batch(batch, spelt):
                    row += 1
                    yield row, found
        except (pyarrow.ArrowException, OSError) as error:
            raise Damaged(f"a damaged Parquet file: {_first_line(error)}") from error


def _opened(path: Path) -> Any:
    """The file, of which only what is asked for is read."""
    import pyarrow.parquet

    options = {"pre_buffer": False, "buffer_size": PIECE_bytes, "page_checksum_verification": True}
    try:
        return pyarrow.parquet.ParquetFile(path, **options)
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise Damaged(f"a damaged or cut off Parquet file: {_first_line(error)}") from error


def _batch(batch: Any, spelt: dict[str, Any]) -> list[dict[str, Any] | str]:
    """The rows of a batch; one by one where they are large or one is bad."""
    if batch.nbytes <= LONGEST_ROW_bytes:
        try:
            return [_row(row, spelt) for row in batch.to_pylist()]
        except ValueError:
            pass  # one of them: which, and why, is found out below
    return [_alone(batch.slice(i, 1), spelt) for i in range(len(batch))]


def _alone(one: Any, spelt: dict[str, Any]) -> dict[str, Any] | str:
    if one.nbytes > LONGEST_ROW_bytes:
        return too_long()
    try:
        return _row(one.to_pylist()[0], spelt)
    except UnicodeDecodeError as error:
        return f"invalid UTF-8 in {show(error.object[:20].decode('utf-8', 'replace'))}"
    except ValueError as error:
        return _first_line(error)


def _row(found: dict[str, Any], spelt: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = _present(found)
    return row | {name: _decode_json(row[name], spelt[name]) for name in spelt.keys() & row.keys()} if spelt else row


def _present(found: Any) -> Any:
    """The value without the nulls in its objects."""
    if isinstance(found, dict):
        return {key: _present(value) for key, value in found.items() if value is not None}
    return [_present(value) for value in found] if isinstance(found, list) else found


def _decode_json(found: Any, type_: Any) -> Any:
    """The value with what its type says to be JSON text decoded (its nulls are the author's, and stay)."""
    if _is_json(type_) and isinstance(found, str):
        return decode(found.encode())
    if isinstance(found, list):
        return [_decode_json(value, type_.value_type) for value in found]
    if isinstance(found, dict):
        return {name: _decode_json(value, type_.field(name).type) for name, value in found.items()}
    return found


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
    """Whether JSON has such values."""
    from pyarrow import types

    text = types.is_string(type_) or types.is_large_string(type_) or _is_json(type_)
    number = types.is_boolean(type_) or types.is_integer(type_) or types.is_floating(type_)
    return bool(text or number or types.is_null(type_))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
