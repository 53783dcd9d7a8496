"""The rows inside a file of bytes, one function a layout: JSON lines, a JSON array, CSV, text.

Each takes an open stream and gives (number, row or the reason why it is none), reads on after a bad row wherever the
next one can be told from it, and holds one row at a time.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

from optrush.data.compressed import Damaged, PIECE_bytes
from optrush.data.strict import decode, kind, show

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
    data, at, start, depth, row = file.read(PIECE_bytes), 0, 0, 0, 0
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
                    rest = chain([data[start:]], iter(partial(file.read, PIECE_bytes), b""))
                    if mark != b"]" or any(more.strip() for more in rest):
                        raise Damaged(f"the list ends after row {row}, and the file goes on")
                    return
        if len(data) - start > LONGEST_ROW_bytes:
            raise Damaged(f"row {row + 1} is longer than {LONGEST_ROW_bytes >> 20} MiB, or does not end")
        more = file.read(PIECE_bytes)
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
