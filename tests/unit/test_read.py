"""Bytes to rows, of every format: what is bad is named with its place, what is good arrives as it was written."""

import bz2
import codecs
import csv
import datetime
import gzip
import io
import json
import lzma
import re
import sys
import tracemalloc
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from meshes import further
from optrush.config import Data, parse_config
from optrush.data import readers
from optrush.data.readers import Chunk, chunks, read_rows, read_rows_or_errors
from optrush.errors import ConfigError, DataError, NeedsError

GOOD = b'{"text": "good", "id": 7}\n'
ROWS = [{"text": f"row {i} é\u2028", "n": {"deep": [None, i]}} for i in range(7)]
PACK = {
    ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress,
    ".zst": lambda raw: zstandard.ZstdCompressor().compress(raw),
}  # fmt: skip

BAD = {
    "truncated": (b'{"text": "go', "not valid JSON (cut off?)"),
    "line in a string": (b'{"text": "go\r"}', "not valid JSON (cut off?): Invalid control character at character 12"),
    "array": (b'["text"]', "a list instead of an object"), "string": (b'"text"', "a string instead of an object"),
    "number": (b"7", "a number instead of an object"), "null row": (b"null", "null instead of an object"),
    "empty line": (b"  ", "an empty line"), "bom": (b'\xef\xbb\xbf{"text": "a"}', "byte order mark"),
    "utf-8": (b'{"text": "\xff"}', "invalid UTF-8 at byte 10: 0xff"),
    "utf-8 surrogate": (b'{"text": "\xed\xa0\x80"}', "invalid UTF-8"),
    "half a pair": (rb'{"text": "\uD83d"}', r"half a surrogate pair: \ud83d"),
    "half a pair elsewhere": (rb'{"text": "a", "meta": {"k\udc00": 1}}', "half a surrogate pair"),
    "nan": (b'{"text": "a", "score": NaN}', "NaN is not a JSON number"),
    "infinity": (b'{"text": "a", "score": -Infinity}', "-Infinity is not a JSON number"),
    "huge number": (b'{"text": "a", "score": 1e999}', "the number '1e999' is too large"),
    "duplicate key": (b'{"text": "a", "text": "b"}', "'text' appears twice"),
    "duplicate inner key": (b'{"messages": [{"role": "user", "role": "user"}]}', "'role' appears twice"),
    "nested": (b'{"text": ' + b"[" * 200_000, "nested too deeply"),
    "nested and closed": (b'{"text": ' + b"[" * 101 + b"]" * 101 + b"}", "nested too deeply"),
    "long number": (b'{"text": "a", "n": ' + b"1" * 5000 + b"}", "not valid JSON"),
    "two values": (b'{"text": "a"} {"text": "b"}', "not valid JSON"),
}  # fmt: skip


def found(source, **options):
    """(line, row or the reason why it is none) of each."""
    return [
        (where.line, row.found if isinstance(row, DataError) else row)
        for where, row in read_rows_or_errors(source, **options)
    ]


def refused(act):
    with pytest.raises(DataError) as caught:
        act()
    return caught.value


def jsonl(rows):
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


# --- JSON lines


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_line_is_named_with_its_line_and_the_reason(tmp_path, kind):
    """In other places of the file: tests/faults/test_bad_rows.py."""
    raw, reason = BAD[kind]
    path = tmp_path / "däta file.jsonl"
    path.write_bytes(GOOD + raw + b"\n" + GOOD)
    error = refused(lambda: list(read_rows(path)))
    assert f"{path}:2" in error.asked and reason in error.found and "\n" not in error.found
    assert [(line, isinstance(row, dict)) for line, row in found(path)] == [(1, True), (2, False), (3, True)]


def test_an_over_long_row_is_refused_without_reading_it_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "LONGEST_ROW_bytes", 1 << 20)
    long = b'{"text": "' + b"a" * (3 << 20) + b'"}\n'
    path = tmp_path / "data.jsonl"
    path.write_bytes(long + GOOD + long + GOOD + long)
    good, reason = {"text": "good", "id": 7}, "the row is longer than 1 MiB"
    assert found(path) == [(i + 1, good if i % 2 else reason) for i in range(5)]
    assert [pair for part in chunks(path, 100) for pair in found(part)] == found(path)


def test_good_rows_arrive_unchanged(tmp_path):
    path = tmp_path / "data.ndjson"
    text = "é🙂\u2028e\u0301 \u0085 \\ud83d : {"
    row = {"text": text, "n": 2**70, "x": 1e-5, "t": True, "none": None, "deep": [[{"a:": [1.5]}]]}
    path.write_bytes(json.dumps(row, ensure_ascii=False).encode() + b"\r\n" + json.dumps(row).encode())
    assert found(path) == [(1, row), (2, row)]


def test_missing_folder_unknown_and_empty_files(tmp_path):
    for path in (tmp_path / "empty.jsonl", tmp_path / "data.bin", tmp_path / "data.parquet.gz"):
        path.touch()
    for path, reason in (
        (tmp_path / "none.jsonl", "no such file"),
        (tmp_path / ("a" * 300 + ".jsonl"), "File name too long"),
        (tmp_path, "a folder"),
        (tmp_path / "data.bin", "an unknown suffix"),
        (tmp_path / "data.parquet.gz", "an unknown suffix"),
        (tmp_path / "empty.jsonl", "an empty file"),
    ):
        for way in (read_rows, chunks):
            error = refused(lambda way=way, path=path: list(way(path)))
            assert reason in error.found and str(path) in error.asked


# --- parts


LINE = st.one_of(st.binary(max_size=12), st.integers(0, 300).map(lambda n: b'{"text": "' + b"x" * n + b'"}'))


@settings(max_examples=60)
@given(
    lines=st.lists(LINE.map(lambda raw: raw.replace(b"\n", b"")), min_size=1, max_size=30),
    end=st.sampled_from([b"\n", b"\r\n"]), last=st.booleans(), size=st.integers(1, 100),
)  # fmt: skip
def test_parts_never_change_rows_or_their_numbers(tmp_path_factory, lines, end, last, size):
    path = tmp_path_factory.getbasetemp() / "parts.jsonl"
    path.write_bytes(end.join([*lines, b"{}"]) + (end if last else b""))  # blank lines at the end are no rows
    parts = list(chunks(path, size))
    assert [pair for part in parts for pair in found(part)] == found(path)
    assert [part.first for part in parts[1:]] == [found(part)[-1][0] + 1 for part in parts[:-1]]
    assert parts[0].start == 0 and parts[-1].end == path.stat().st_size
    assert all(one.end == two.start and one.end - one.start >= size for one, two in pairwise(parts))


def test_a_file_that_was_cut_after_its_parts_were_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD * 4)
    parts = list(chunks(path, len(GOOD) * 2))
    path.write_bytes(GOOD * 3)
    assert len(found(parts[0])) == 2
    assert "shorter than when it was counted" in refused(lambda: found(parts[1])).found


@pytest.mark.parametrize("size", [1, 30, 10**6])
def test_parts_of_other_formats_hold_each_row_once(tmp_path, size):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet", row_group_size=2)
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    (tmp_path / "lines.json").write_bytes(jsonl(ROWS))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(jsonl(ROWS)))
    (tmp_path / "a.csv").write_text("text,n\n" + "a,1\n" * 7)
    (tmp_path / "a.txt").write_text("one\n\ntwo\nthree\n" * 5)
    for path in sorted(tmp_path.iterdir()):
        parts = list(chunks(path, size, "line"))
        together = [pair for part in parts for pair in found(part, text_rows="line")]
        assert together == found(path, text_rows="line") and len(together) in (7, 15)
        splits = path.name in ("a.parquet", "lines.json", "a.txt")
        assert (len(parts) > 3) if splits and size == 1 else (len(parts) == 1) if not splits or size == 10**6 else True


# --- arrays


def test_an_array_is_read_whatever_its_layout(tmp_path):
    path = tmp_path / "a.json"
    rows = [*ROWS, {"text": '"]},{[\\"', "n": {}}, {"text": "\\"}]
    for text in (json.dumps(rows), json.dumps(rows, indent=3), " \n" + json.dumps(rows, ensure_ascii=False) + "\n\n"):
        path.write_text(text, "utf-8")
        assert found(path) == [(i + 1, row) for i, row in enumerate(rows)]
    path.write_text('[{"text": "a"}, 7, {"text": "b"}]')
    assert found(path) == [(1, {"text": "a"}), (2, "a number instead of an object {...}"), (3, {"text": "b"})]


@pytest.mark.parametrize(("raw", "reason"), [
    (b'[{"text": "a"}, {"text": "b', "not valid JSON (cut off?)"), (b"[", "not valid JSON (cut off?)"),
    (b'[{"text": "a"}] {"text": "b"}', "not valid JSON (cut off?): Extra data at character 16"),
    (b'[{"text": "a"}, , {"text": "b"}]', "not valid JSON"), (b'[{"text": "a", "text": "b"}]', "'text' appears twice"),
    (b'[{"text": "\xff"}]', "invalid UTF-8 at byte 11"), (b" [ ] ", "an empty file"),
])  # fmt: skip
def test_a_damaged_array(tmp_path, raw, reason):
    path = tmp_path / "a.json"
    path.write_bytes(raw)
    assert reason in refused(lambda: list(read_rows_or_errors(path))).found


# --- CSV


def test_csv_cells_quotes_and_ends_of_line(tmp_path):
    rows = [{"text": "a", "n": "1"}, {"text": 'b "x", é\nsecond line', "n": ""}, {"text": "", "n": 'in"side'}]
    for delimiter, suffix in ((",", ".csv"), ("\t", ".tsv")):
        for end in ("\n", "\r\n"):
            made = io.StringIO()
            table = csv.DictWriter(made, ["text", "n"], delimiter=delimiter, lineterminator=end)
            table.writeheader()
            table.writerows(rows)
            path = tmp_path / f"a{suffix}"
            path.write_bytes(made.getvalue().encode())
            assert found(path) == [(i + 1, row) for i, row in enumerate(rows)]


def test_bad_rows_of_a_csv_are_named_with_their_line(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'text,n\n"two\nlines",1\nonly\n\na,b,c\n\xff,1\n"a"b,1\n"\n\xef\xbb\xbfa",1\nlast,2')
    rows = found(path)
    assert [line for line, _ in rows] == list(range(1, 9))
    assert rows[0][1] == {"text": "two\nlines", "n": "1"} and rows[7][1] == {"text": "last", "n": "2"}
    for (_, reason), expected, line in zip(
        rows[1:7],
        ["1 cells for 2 columns", "an empty line", "3 cells for 2", "invalid UTF-8", "not valid CSV", "byte order"],
        range(4, 10),
    ):
        assert expected in reason and reason.endswith(f"(line {line} of the file)")


@pytest.mark.parametrize(("raw", "reason"), [
    (b"text,text\na,b\n", "two columns are named 'text'"), (b"text, ,n\na,b,c\n", "column 2 has no name"),
    (b"\na,b\n", "an empty line"), (b"t\xff\na\n", "invalid UTF-8"),
    (b'text\na\n"b\nc\nd\n', "a quote in row 2, line 3, is not closed"),
    (b"text\na\n" + b"b" * (2 << 20) + b"\n", "row 2, line 3: the row is longer than 1 MiB"),
    (b'text\na\n"' + b"b\n" * (1 << 20), "row 2, line 3: the row is longer than 1 MiB"),
])  # fmt: skip
def test_a_csv_that_cannot_be_read_on(tmp_path, monkeypatch, raw, reason):
    monkeypatch.setattr(readers, "LONGEST_ROW_bytes", 1 << 20)
    path = tmp_path / "a.csv"
    path.write_bytes(raw)
    assert reason in refused(lambda: found(path)).found
    path.write_bytes(b"text\n")
    assert "an empty file" in refused(lambda: found(path)).found


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize(
    ("name", "mark"),
    [("a.csv", ";"), ("a.csv", "\t"), ("a.csv.gz", "|"), ("a.tsv", ","), ("a.csv", ","), ("a.tsv", "\t")],
)
def test_a_table_with_another_separator(tmp_path, name, mark, bom):
    """Spreadsheets of many countries write semicolons; the header and the first row agree on them."""
    rows = [["instruction", "output"], ["Boil, or\nfry?", 'say "boil"'], ["a;b\nc", "c|d, e\tf"]]
    made = io.StringIO()
    csv.writer(made, delimiter=mark).writerows(rows)
    raw = bom + made.getvalue().encode()
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    assert found(tmp_path / name) == [(n, dict(zip(rows[0], row))) for n, row in enumerate(rows[1:], 1)]


@pytest.mark.parametrize(("name", "header", "held", "do"), [
    ("a.csv", "instruction;output", "semicolons", 'write `data.separator: ";"`'),
    ("a.csv", "instruction\toutput", "tabs", "`, or name it .tsv"),
    ("a.csv.gz", "instruction|output", "bars", 'write `data.separator: "|"`'),
    ("a.tsv", "instruction,output", "commas", 'write `data.separator: ","`, or name it .csv'),
])  # fmt: skip
def test_a_table_whose_separator_is_unclear(tmp_path, name, header, held, do):
    """Its first row has another number of cells than its header."""
    mark = header[len("instruction")]
    raw = f"\ufeff{header}\n{header}{mark}more\n".encode()
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    error = refused(lambda: found(tmp_path / name))
    assert f"the header has one column, {header!r}, which contains {held}" in error.found and do in error.do
    (tmp_path / "one.csv").write_text("text\na;b|c\td\n")
    assert found(tmp_path / "one.csv") == [(1, {"text": "a;b|c\td"})]
    (tmp_path / "named.csv").write_text("the text; in one column\na b\n")
    assert found(tmp_path / "named.csv") == [(1, {"the text; in one column": "a b"})]


FILES = {
    "rows.jsonl": '{"text": "café"}\n', "rows.json": '[{"text": "café"}]\n', "rows.csv": "café,n\na,b\n",
    "rows.txt": "café\n",
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32", "latin-1", "cp1252"])
def test_a_file_in_another_encoding(tmp_path, name, encoding):
    """The error names the command that converts it, and the encoding where there is a mark of it."""
    mark = codecs.BOM_UTF16_BE if encoding == "utf-16-be" else b""
    (tmp_path / name).write_bytes(mark + FILES[name].encode(encoding))
    utf = encoding.upper()[:6] if encoding.startswith("utf") else None
    for text_rows in ("file", "paragraph", "line") if name.endswith(".txt") else ["file"]:
        error = refused(lambda how=text_rows: list(readers.read_rows(tmp_path / name, how)))
        assert "invalid UTF-8 at byte" in error.found
        assert (f"the byte order mark of {utf}" in error.found) == (utf is not None)
        assert f"save the file as UTF-8: iconv -f {utf or 'ENCODING'} -t UTF-8" in error.do
        assert ("or fix" in error.do) == (utf is None), "one byte may be wrong by itself"


# --- text


def test_text_by_file_paragraph_and_line(tmp_path):
    path = tmp_path / "a.md"
    path.write_bytes("# é\r\none\n\n \n\ntwo\nmore\n".encode())
    assert found(path) == [(1, {"text": "# é\none\n\n \n\ntwo\nmore\n"})]
    assert found(path, text_rows="paragraph") == [(1, {"text": "# é\none"}), (6, {"text": "two\nmore"})]
    assert [(line, row["text"]) for line, row in found(path, text_rows="line")] == [
        (1, "# é"), (2, "one"), (6, "two"), (7, "more"),
    ]  # fmt: skip


def test_bad_text(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "LONGEST_ROW_bytes", 100)
    path = tmp_path / "a.txt"
    path.write_bytes(b"good\n\nb\xffd\n\n" + b"long\n" * 30 + b"\n\xef\xbb\xbfmark\n\n" + b"x" * 200)
    for way, lines in (("paragraph", [1, 3, 5, 36, 38]), ("line", [1, 3, *range(5, 35), 36, 38])):
        rows = found(path, text_rows=way)
        assert [line for line, _ in rows] == lines and rows[0][1] == {"text": "good"}
        assert "invalid UTF-8" in rows[1][1] and "byte order mark" in rows[-2][1] and "longer than" in rows[-1][1]
    assert "data.text_rows" in found(path)[0][1]
    path.write_bytes(b"\xff")
    assert "invalid UTF-8" in found(path)[0][1]
    path.write_bytes(b" \n\n")
    assert "an empty file" in refused(lambda: found(path, text_rows="paragraph")).found


# --- Parquet


def test_parquet_rows_are_as_json_has_them(tmp_path):
    path = tmp_path / "a.parquet"
    rows = [
        {"messages": [{"role": "user", "content": "é", "calls": None}], "n": 1, "x": 1.5, "none": None},
        {"messages": [{"role": "user", "content": None, "calls": [{"a": {"b": True, "c": None}}]}], "n": None},
    ]
    table = pa.Table.from_pylist(rows, pa.schema([("messages", pa.list_(pa.struct([
        ("role", pa.string()), ("content", pa.large_string()),
        ("calls", pa.list_(pa.struct([("a", pa.struct([("b", pa.bool_()), ("c", pa.int8())]))]))),
    ]))), ("n", pa.int32()), ("x", pa.float32()), ("none", pa.null())]))  # fmt: skip
    table = table.append_column("kind", pa.array(["a", "b"]).dictionary_encode())
    table = table.append_column("when", pa.array([datetime.datetime(2020, 1, 1)] * 2))
    table = table.append_column("text", pa.array([b"raw", None]))
    pq.write_table(table, path)
    assert found(path) == [
        (1, {"messages": [{"role": "user", "content": "é"}], "n": 1, "x": 1.5, "kind": "a", "text": b"raw"}),
        (2, {"messages": [{"role": "user", "calls": [{"a": {"b": True}}]}], "kind": "b"}),
    ]


def test_json_inside_parquet_is_decoded(tmp_path):
    values = pa.array(['{"a": null, "b": 1}', "[", None], pa.string())
    array = pa.ExtensionArray.from_storage(pa.json_(), values)
    lists = pa.ListArray.from_arrays([0, 1, 2, 3], array)
    pq.write_table(pa.table({"tools": array, "rows": lists}), tmp_path / "a.parquet")
    rows = found(tmp_path / "a.parquet")
    assert rows[0][1] == {"tools": {"a": None, "b": 1}, "rows": [{"a": None, "b": 1}]} and rows[2][1] == {
        "rows": [None]
    }
    assert "not valid JSON" in rows[1][1]


def test_bad_rows_of_a_parquet_file(tmp_path, monkeypatch):
    monkeypatch.setattr("optrush.data.readers.LONGEST_ROW_bytes", 1000)
    raw = pa.array([b"good", b"b\xffd", b"x" * 2000, b"good"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 4, raw.buffers())
    pq.write_table(pa.table({"text": text}), tmp_path / "a.parquet")
    rows = [row for _, row in found(tmp_path / "a.parquet")]
    assert rows[0] == rows[3] == {"text": "good"}
    assert "invalid UTF-8" in rows[1] and "longer than" in rows[2]


def test_parquet_files_that_cannot_be_read(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"{i} {i * i}" for i in range(5000)]}), path, row_group_size=1000)
    whole = path.read_bytes()
    for cut in (0, 5, 1000, len(whole) - 1):
        path.write_bytes(whole[:cut])
        for way in (read_rows_or_errors, chunks):
            error = refused(lambda way=way: list(way(path)))
            assert "Parquet" in error.found and "fix the file" in error.do
    holed = bytearray(whole)
    holed[len(whole) // 2 : len(whole) // 2 + 500] = bytes(500)
    path.write_bytes(holed)
    error = refused(lambda: found(path))
    assert re.search(rf"the last row that could be read: {path}:\d{{4}}$", error.found)
    for names, reason in ((["text", "text"], "two columns are named 'text'"), (["text"], "an empty file")):
        pq.write_table(pa.Table.from_arrays([pa.array([], pa.string())] * len(names), names=names), path)
        assert reason in refused(lambda: found(path)).found


# --- packed


@pytest.mark.parametrize("packing", PACK)
def test_packed_files_hold_the_same_rows(tmp_path, packing):
    pack, raw = PACK[packing], jsonl(ROWS)
    path = tmp_path / f"a.jsonl{packing}"
    path.write_bytes(pack(raw) + pack(raw))  # two streams are one file
    assert found(path) == [(i + 1, row) for i, row in enumerate(ROWS * 2)]
    assert list(chunks(path, 10)) == [Chunk(path, 1, 0, None)]
    csv_file = tmp_path / f"a.CSV{packing.upper()}"
    csv_file.write_bytes(pack(b"text\nx\n"))
    assert found(csv_file) == [(1, {"text": "x"})]


@pytest.mark.parametrize("packing", further(list(PACK), 2))
def test_damaged_packed_files_say_how_far_they_got(tmp_path, packing):
    rows = [{"text": f"{i * 7919 % 10007:05d}" * 20} for i in range(20_000)]
    whole = PACK[packing](jsonl(rows))
    path = tmp_path / f"a.jsonl{packing}"
    for damaged, reason in (
        (whole[: len(whole) // 2], "cut off"),
        (whole[:-1], "cut off"),
        (whole + b"junk", "damaged compressed data"),
        (whole[: len(whole) // 2] + bytes(100) + whole[len(whole) // 2 + 100 :], "damaged compressed data"),
        (b"junk", "damaged compressed data"),
    ):
        path.write_bytes(damaged)
        read_so_far = []

        def walk(read_so_far=read_so_far):
            for _, row in read_rows_or_errors(path):
                read_so_far.append(row)

        error = refused(walk)
        assert reason in error.found
        if reason == "cut off":  # elsewhere gzip knows only at its end that what it gave was wrong
            assert read_so_far == rows[: len(read_so_far)]
        last = f"{path}:{len(read_so_far)}" if read_so_far else "none"
        assert error.found.endswith(f"the last row that could be read: {last}")
    path.write_bytes(b"")
    assert "an empty file" in refused(lambda: found(path)).found


def test_a_packed_bomb_stays_small(tmp_path):
    big = b'{"text": "' + bytes(128 << 20) + b'"}\n'
    for packing in (".bz2", ".zst"):
        path = tmp_path / f"a.jsonl{packing}"
        path.write_bytes(PACK[packing](big))
        tracemalloc.start()
        assert "longer than 32 MiB" in found(path)[0][1]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 110 << 20, packing


def test_zst_without_its_library_names_the_pip_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(b"x")
    with pytest.raises(NeedsError) as caught:
        found(path)
    assert "python -m pip install 'optrush[zstd]'" in caught.value.do


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".jsonl.gz", ".parquet"])
def test_memory_does_not_grow_with_the_file(tmp_path, suffix):
    peaks = []
    for n in (2_000, 20_000):
        path = tmp_path / f"{n}{suffix}"
        rows = [{"text": f"{i} " * 100} for i in range(n)]
        if suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        elif suffix == ".csv":
            path.write_text("text\n" + "".join(row["text"] + "\n" for row in rows))
        else:
            path.write_bytes(gzip.compress(jsonl(rows), 1) if suffix.endswith("gz") else jsonl(rows))
        del rows
        tracemalloc.start()
        assert sum(1 for _ in read_rows_or_errors(path)) == n
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.3 * peaks[0] + (1 << 20), peaks


@pytest.mark.parametrize(("name", "separator"), [
    ("a.csv", ";"), ("a.csv", "|"), ("a.csv", "\t"), ("a.tsv", ","), ("a.csv.gz", ";"), ("a.csv", " "),
])  # fmt: skip
def test_other_separators(tmp_path, name, separator):
    """Cells with the separator in quotes, and commas without; by each reading of texts."""
    rows = [{"prompt": "a, b", "completion": f'c{separator}"d"'}, {"prompt": "e", "completion": "f"}]
    text = io.StringIO()
    table = csv.DictWriter(text, ["prompt", "completion"], delimiter=separator)
    table.writeheader()
    table.writerows(rows)
    raw = text.getvalue().encode()
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    for mode in ("file", "line"):
        how = Data.model_validate({"path": "a", "text_rows": mode, "separator": separator}).reading
        assert [row for _, row in read_rows(tmp_path / name, how)] == rows


@pytest.mark.parametrize("separator", ["", ";;", "\n", '"'])
def test_separators_that_are_none(separator):
    data = {"path": "a.csv", "separator": separator}
    text = json.dumps({"model": "tiny", "objective": "sft", "data": data, "output": "o"})
    with pytest.raises(ConfigError, match=r"data.separator[\s\S]*one character"):
        parse_config(text, "run")
