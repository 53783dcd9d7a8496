"""Every kind of bad row, at the start, in the middle and at the end: named with file, line and reason; nothing else."""

import json

import pytest

from optrush.data import read as reader
from optrush.data.read import Chat, Message, Text, attempts, parse, read
from optrush.errors import DataError

GOOD = b'{"text": "good", "id": 7}\n'


def chat(*turns):
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]}).encode()


def talk(message):
    return json.dumps({"messages": [{"role": "user", "content": "?"}, message]}).encode()


BAD = {
    "truncated": (b'{"text": "go', "not valid JSON"),
    "array": (b'["text"]', "a list where an object"),
    "string": (b'"text"', "a string where an object"),
    "number": (b"7", "a number where an object"),
    "null row": (b"null", "null where an object"),
    "empty line": (b"  ", "an empty line"),
    "bom": (b'\xef\xbb\xbf{"text": "a"}', "byte order mark"),
    "utf-8": (b'{"text": "\xff"}', "invalid UTF-8 at byte 10 of the line: 0xff"),
    "utf-8 surrogate": (b'{"text": "\xed\xa0\x80"}', "invalid UTF-8"),
    "half a pair": (rb'{"text": "\ud83d"}', "half a surrogate pair"),
    "nan": (b'{"text": "a", "score": NaN}', "NaN is not a JSON number"),
    "infinity": (b'{"text": "a", "score": -Infinity}', "-Infinity is not a JSON number"),
    "duplicate key": (b'{"text": "a", "text": "b"}', "'text' stands twice"),
    "duplicate inner key": (b'{"messages": [{"role": "user", "role": "user"}]}', "'role' stands twice"),
    "nested": (b'{"text": ' + b"[" * 200_000, "nested too deeply"),
    "long number": (b'{"text": "a", "n": ' + b"1" * 5000 + b"}", "not valid JSON"),
    "two values": (b'{"text": "a"} {"text": "b"}', "not valid JSON"),
    "missing key": (b'{"txt": "a"}', "neither 'text' nor 'messages' is there, but 'txt'"),
    "no keys": (b"{}", "but no keys"),
    "both": (b'{"text": "a", "messages": []}', "both 'text' and 'messages'"),
    "null text": (b'{"text": null}', "text is null, not a string"),
    "wrong text": (b'{"text": ["a"]}', "text is a list, not a string"),
    "boolean text": (b'{"text": true}', "text is a boolean, not a string"),
    "empty text": (b'{"text": " \\n"}', "text is empty"),
    "null messages": (b'{"messages": null}', "messages is null, not a list"),
    "no messages": (b'{"messages": []}', "an empty list"),
    "wrong message": (b'{"messages": ["hello"]}', "messages[0] is a string, not an object"),
    "no role": (talk({"content": "a"}), "messages[1] has no 'role'"),
    "no content": (talk({"role": "assistant"}), "messages[1] has no 'content'"),
    "null role": (talk({"role": None, "content": "a"}), "messages[1].role is null"),
    "null content": (talk({"role": "assistant", "content": None}), "messages[1].content is null"),
    "content parts": (talk({"role": "assistant", "content": [{"type": "text"}]}), "messages[1].content is a list"),
    "unknown role": (talk({"role": "wizard", "content": "a"}), "messages[1].role is 'wizard', not one of"),
    "role in capitals": (talk({"role": "Assistant", "content": "a"}), "messages[1].role is 'Assistant'"),
    "empty turn": (talk({"role": "assistant", "content": " "}), "messages[1].content: an empty assistant turn"),
    "empty user": (chat(("user", ""), ("assistant", "a")), "messages[0].content: an empty user turn"),
    "no assistant": (chat(("system", "s"), ("user", "u")), "no assistant turn"),
    "tool call": (talk({"role": "assistant", "content": "a", "tool_calls": [1]}), "'tool_calls', which is not under"),
    "weight": (talk({"role": "assistant", "content": "a", "weight": 0}), "'weight', which is not under"),
}


def rows(path):
    return [parse(where, found) for where, found in read(path)]


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_bad_row_is_named_with_its_line_and_the_reason(tmp_path, kind, place):
    raw, reason = BAD[kind]
    path = tmp_path / "däta file.jsonl"
    lines = [GOOD, GOOD]
    at = {"first": 0, "middle": 1, "last": 2}[place]
    lines.insert(at, raw + b"\n")
    path.write_bytes(b"".join(lines)[: -1 if place == "last" else None])
    with pytest.raises(DataError) as caught:
        rows(path)
    assert f"{path}:{at + 1}" in str(caught.value)
    assert reason in caught.value.found


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_over_long_row_is_refused_without_reading_it_whole(tmp_path, place, monkeypatch):
    monkeypatch.setattr(reader, "LONGEST_ROW_bytes", 1 << 20)
    lines = [GOOD, GOOD]
    lines.insert(place, b'{"text": "' + b"a" * (3 << 20) + b'"}\n')
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"".join(lines))
    found = list(attempts(path))
    assert [isinstance(what, DataError) for _, what in found] == [i == place for i in range(3)]
    assert found[place][1].found == "the row is longer than 1 MiB"
    assert [where.line for where, _ in found] == [1, 2, 3]


def test_attempts_go_on_after_a_bad_row(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(GOOD + b"{\n" + GOOD + b"\xff\n" + GOOD)
    assert [isinstance(what, dict) for _, what in attempts(path)] == [True, False, True, False, True]


def test_good_rows_arrive_unchanged(tmp_path):
    path = tmp_path / "data.jsonl"
    text = "é🙂\u2028e\u0301 \u0085"
    turns = (("system", ""), ("user", " ask "), ("tool", "42"), ("assistant", text))
    path.write_bytes(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\r\n" + chat(*turns))
    assert rows(path) == [Text(text), Chat(tuple(Message(*turn) for turn in turns))]


def test_missing_folder_and_empty_file(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    for path, reason in ((tmp_path / "none.jsonl", "no such file"), (tmp_path, "a folder"), (empty, "an empty file")):
        with pytest.raises(DataError) as caught:
            list(read(path))
        assert reason in caught.value.found and str(path) in caught.value.asked
