"""R14: bad rows of every kind, first, in the middle and last: each is named with file, line and reason, no other is.

Strictly, reading stops at the bad row; as for a quarantine it goes on, and the good rows around it are what they were.
"""

import json
from typing import Any

from optrush.data.readers import read_rows, read_rows_or_errors
from optrush.data.schema import parse_row
from optrush.errors import DataError

from harness import run, told

ASK, ANSWER = {"role": "user", "content": "aské\u2028"}, {"role": "assistant", "content": "answer"}
GOODS = [{"messages": [ASK, ANSWER], "id": 7, "meta": {"a": [None, 1.5]}}, {"text": "plain", "id": None}]


def line(**keys):
    return json.dumps(keys).encode()


# The bytes of a line, and what is said of it.
KINDS = {
    "truncated JSON": (line(messages=[ASK, ANSWER])[:-20], "not valid JSON (cut off?)"),
    "no object": (b'["text"]', "a list instead of an object"),
    "empty line": (b"", "an empty line"),
    "invalid UTF-8": (b'{"text": "\xff\xfe"}', "invalid UTF-8 at byte 10"),
    "byte order mark": (b'\xef\xbb\xbf{"text": "a"}', "byte order mark"),
    "50 MB": (b'{"text": "' + b"a" * 50_000_000 + b'"}', "longer than 32 MiB"),
    "duplicate key": (b'{"text": "a", "text": "b"}', "'text' appears twice"),
    "NaN": (b'{"text": "a", "score": NaN}', "NaN is not a JSON number"),
    "wrong type": (line(text=["a"]), "text is a list, not a string"),
    "chosen == rejected": (line(prompt="a", chosen="b", rejected="b"), "chosen and rejected are the same"),
}


# At the ends of a file they are what some editors leave there, and no row's.
READ_AS_WITHOUT = {("byte order mark", 0), ("empty line", 2)}


def strictly(path):
    try:
        for where, found in read_rows(path):
            parse_row(where, found)
    except DataError as error:
        return error
    return None


def named(path, at, reason, goods):
    """Whether row `at` of the file, and no other, is refused for the reason, and the others arrive as they are."""
    error = strictly(path)
    assert error is not None and error.asked.endswith(f"{path}:{at + 1}") and reason in error.found, error
    bad, rows = [], []
    for where, found in read_rows_or_errors(path):
        try:
            if isinstance(found, DataError):
                raise found
            parse_row(where, found)
            rows.append(found)
        except DataError as refused:
            bad.append((where.line, refused.found))
    assert bad == [(at + 1, error.found)] and rows == goods, (bad, rows)
    return True


def everywhere(write, kinds, path, goods):
    """How many of kinds x (first, middle, last) are named; all, or an assertion fails."""
    done = 0
    for kind, reason in kinds.items():
        for at in range(3):
            if (kind, at) in READ_AS_WITHOUT:
                continue
            write(path, at, kind)
            done += named(path, at, reason, goods)
    return done


def test_bad_rows_of_json_lines(tmp_path):
    def write(path, at, kind):
        lines = [line(**good) for good in GOODS]
        lines.insert(at, KINDS[kind][0])
        path.write_bytes(b"\n".join(lines) + b"\n")

    kinds = {kind: reason for kind, (_, reason) in KINDS.items()}
    done = everywhere(write, kinds, tmp_path / "däta.jsonl", GOODS)
    assert done == 28
    told("R14", done, f"{len(kinds)} kinds x first, middle, last: named, the good rows unchanged")


def test_bad_rows_of_csv(tmp_path):
    rows = {
        "truncated": (b"a,b", "2 cells for 3 columns"), "too many cells": (b"a,b,c,d", "4 cells for 3 columns"),
        "empty line": (b"", "an empty line"), "invalid UTF-8": (b"a,\xff,c", "invalid UTF-8"),
        "byte order mark in a row": (b"\xef\xbb\xbfa,b,c", "byte order mark"), "quotes": (b'a,"b"b,c', "not valid CSV"),
        "empty cell": (b"a,,c", "chosen is empty"),
        "chosen == rejected": (b"a,b,b", "chosen and rejected are the same"),
    }  # fmt: skip

    def write(path, at, kind):
        lines = [b'"a\nsk",yes,"n""o"'] * 2
        lines.insert(at, rows[kind][0])
        path.write_bytes(b"\n".join([b"prompt,chosen,rejected", *lines, b""]))

    good = {"prompt": "a\nsk", "chosen": "yes", "rejected": 'n"o'}
    kinds = {kind: reason for kind, (_, reason) in rows.items()}
    done = everywhere(write, kinds, tmp_path / "data.csv", [good] * 2)
    assert done == 23
    told("R14", done, f"CSV: {len(kinds)} kinds x first, middle, last")


def parquet(folder):
    import pyarrow as pa
    import pyarrow.parquet as pq

    turn = pa.struct([("role", pa.string()), ("content", pa.string()), ("n", pa.int8())])
    turns = pa.schema([("messages", pa.list_(turn)), ("id", pa.int64())])
    chats: dict[str, tuple[Any, str]] = {
        "null messages": (None, "the row has 'id'"),
        "null turn": ([ASK, None], "messages[1] is null"),
        "null role": ([{"content": "a"}, ANSWER], "messages[0] has no 'role'"),
        "50 MB": ([ASK, {"role": "assistant", "content": "a" * 50_000_000}], "longer than 32 MiB"),
    }
    good = {"messages": [ASK, ANSWER], "id": 7}

    def write(path, at, kind):
        rows = [good, good]
        rows.insert(at, {"messages": chats[kind][0], "id": 8})
        pq.write_table(pa.Table.from_pylist(rows, turns), path)

    kinds = {kind: reason for kind, (_, reason) in chats.items()}
    done = everywhere(write, kinds, folder / "chat.parquet", [good] * 2)
    texts = {"invalid UTF-8": (b"b\xffd", "invalid UTF-8"), "empty text": (b"", "text is empty")}

    def write_text(path, at, kind):
        raw = [b"good", b"good"]
        raw.insert(at, texts[kind][0])
        column = pa.Array.from_buffers(pa.string(), 3, pa.array(raw, pa.binary()).buffers())
        pq.write_table(pa.table({"text": column}), path)

    kinds |= {kind: reason for kind, (_, reason) in texts.items()}
    done += everywhere(
        write_text, {kind: kinds[kind] for kind in texts}, folder / "text.parquet", [{"text": "good"}] * 2
    )
    told("R14", done, f"Parquet: {len(kinds)} kinds x first, middle, last")


def test_bad_rows_of_parquet(tmp_path):
    """In a child: the library starts threads, and tests after this one fork."""
    assert run(lambda: parquet(tmp_path)) == 0
