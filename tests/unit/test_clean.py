"""The filters of data.clean one by one, each at its bounds; their order; bad rows; what does not depend on workers."""

import gzip
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from optrush.config import Cleaning, Items
from optrush.data import cleaning
from optrush.data import schema as meaning
from optrush.data.cleaning import Cleaned, clean_files, write_rows
from optrush.errors import ConfigError, DataError, NeedsError, RunError

Run = Callable[..., Cleaned]


@pytest.fixture
def run(tmp_path):
    """Cleans rows (texts, whole rows, or lines of bytes) by settings; `_` is what else `clean` gets."""

    def cleaned(rows, _=None, **settings):
        path = tmp_path / "rows.jsonl"
        path.write_bytes(b"".join(line(row) + b"\n" for row in rows))
        return clean_files([path], Cleaning(**settings), **{"tokens": None, **(_ or {})})

    return cleaned


def line(row):
    return row if isinstance(row, bytes) else json.dumps({"text": row} if isinstance(row, str) else row).encode()


def stays(found):
    """The rows that stay, counted from 0."""
    (mask,) = found.kept.values()
    return np.flatnonzero(mask).tolist()


def reasons(found, name):
    return next([e["reason"] for e in f["examples"]] for f in found.record["filters"] if f["name"] == name)


def chat(*turns, system=None):
    messages = [{"role": r, "content": t} for r, t in zip(("user", "assistant") * len(turns), turns)]
    return {"messages": ([{"role": "system", "content": system}] if system else []) + messages}


def text(n, first=0):
    """n words, none of them twice, that no other `first` gives."""
    return " ".join(f"w{first + i}" for i in range(n))


# --- what a row is by itself


def test_characters(run):
    found = run(["x" * n for n in (4, 5, 10, 11)], chars=(5, 10))
    assert stays(found) == [1, 2]
    assert reasons(found, "chars") == ["4 characters; at least 5, at most 10", "11 characters; at least 5, at most 10"]
    assert stays(run(["é" * 4, "é" * 5], chars=(5, None))) == [1], "characters, not bytes"
    assert stays(run(["x" * 4, "x" * 5], chars=(None, 4))) == [0]


def test_characters_of_all_turns(run):
    row = chat("ab", "cd")
    length = len(meaning.row_text(meaning.parse_row(meaning.RowLocation(Path("f"), 1), row)))
    assert stays(run([row, "x" * (length + 1)], chars=(length, length))) == [0]


def test_tokens(run):
    words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.enable_truncation(2)  # must not shorten what is counted
    held = SimpleNamespace(tokenizer=SimpleNamespace(backend_tokenizer=words))
    found = run([text(n) for n in (2, 3, 5, 6)], {"tokens": held}, tokens=(3, 5))
    assert stays(found) == [1, 2]
    assert reasons(found, "tokens") == ["2 tokens; at least 3, at most 5", "6 tokens; at least 3, at most 5"]
    assert len(found.record["tokenizer"]) == 64
    with pytest.raises(ConfigError, match="found: no tokenizer\ndo:    name a model; its tokenizer counts"):
        run(["a"], tokens=(1, 2))


def test_repeated_lines(run):
    """The share of characters, blank lines aside, at its bound."""
    rows = ["ab\ncd\nab\nef", "ab\n\n  ab \ncd\nef", "ab\nab\nab\ncd", "one line"]
    assert stays(run(rows, repeated_lines=0.25)) == [0, 1, 3]
    found = run(rows, repeated_lines=0.2)
    assert stays(found) == [3]
    assert reasons(found, "repeated_lines")[2] == "50.0% of its characters are in repeated lines; at most 0.2"


def test_language(run):
    german = "Die Zwiebeln fein hacken und in der Butter goldbraun braten, dann mit Brühe ablöschen."
    english = "Chop the onions finely and fry them in the butter until golden, then add the stock."
    found = run([english, german, "12345 !!!"], language=("en",))
    assert stays(found) == [0, 2], "what has no letters has no language"
    assert reasons(found, "language") == ["its language is de"]
    assert stays(run([english, german], language=("de", "en"))) == [0, 1]
    with pytest.raises(ConfigError) as error:
        run([english], language=("english",))
    assert error.value.found == "unknown language code"


@pytest.mark.parametrize(
    ("settings", "library", "extra"),
    [({"near_duplicates": 0.8}, "rensa", "dedup"), ({"language": ("en",)}, "py3langid", "language")],
)
def test_a_missing_library(run, monkeypatch, settings, library, extra):
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == library else there(name, *a))
    with pytest.raises(NeedsError) as error:
        run(["a"], **settings)
    assert error.value.found == f"the library {library} is not installed"
    assert error.value.do == f"python -m pip install 'optrush[{extra}]'"


# --- items


def test_number_of_items(run):
    rows = [{"text": "x", "of": {"a": ["i"] * n}} for n in (0, 1, 2, 3)] + [{"text": "x"}, {"text": "x", "of": "one"}]
    found = run(rows, items=[{"field": "of.a", "bounds": [1, 2]}])
    assert stays(found) == [1, 2]
    assert reasons(found, "items[0].bounds") == [
        "0 of.a; at least 1, at most 2", "3 of.a; at least 1, at most 2",
        "no of.a; at least 1, at most 2", "no of.a; at least 1, at most 2",
    ]  # fmt: skip
    assert stays(run(rows, items=[{"field": "of.a", "bounds": [None, 2]}])) == [0, 1, 2, 4, 5]


def test_items_by_a_pattern(run):
    rows = ["- a\n- b\nc", "- a", "no list", {"messages": chat("q", "- x\n- y")["messages"]}]
    assert stays(run(rows, items=[{"pattern": "^- (.+)$", "bounds": [2, None]}])) == [0, 3]
    assert stays(run(rows, items=[{"pattern": "^- .+$", "bounds": [1, 1]}])) == [1], "without a group the whole match"
    for pattern, item in (("^- (.+)$", "x"), ("^- .+$", "- x")):
        found = run(rows, items=[{"pattern": pattern, "rarest": 2}])
        assert reasons(found, "items[0].rarest")[-1] == f"'{item}' is in 1 row; at least 2"


def test_items_of_objects_and_of_a_text(run):
    rows = [{"text": "x", "list": [{"name": "a"}, {"name": "b"}, {"other": 1}]}, {"text": "y", "list": [{"name": "c"}]}]
    assert stays(run(rows, items=[{"field": "list.name", "bounds": [2, 2]}])) == [0]
    rows = [{"text": "x", "kind": "soup"}, {"text": "y", "kind": "stew"}, {"text": "z", "kind": " SOUP"}]
    assert stays(run(rows, items=[{"field": "kind", "rarest": 2}])) == [0, 2]


def test_rare_items(run):
    """In fewer rows than asked for; twice in one row counts once; case and outer spaces do not tell items apart."""
    held = [["Salt", "egg"], [" salt "], ["egg", "salt", "saffron", "saffron"], ["EGG"], []]
    rows = [{"text": "x", "of": items} for items in held]
    found = run(rows, items=[{"field": "of", "rarest": 2}])
    assert stays(found) == [0, 1, 3, 4]
    assert reasons(found, "items[0].rarest") == ["'saffron' is in 1 row; at least 2"]
    assert stays(run(rows, items=[{"field": "of", "rarest": 3}])) == [0, 1, 3, 4]
    assert stays(run(rows, items=[{"field": "of", "rarest": 4}])) == [4], "a row without items holds no rare one"


def test_items_are_counted_over_the_rows_that_are_left(run):
    rows = [{"text": "x" * n, "of": ["a"]} for n in (1, 9)] + [{"text": "x" * 9, "of": ["b"]} for _ in range(2)]
    assert stays(run(rows, items=[{"field": "of", "rarest": 2}])) == [0, 1, 2, 3]
    assert stays(run(rows, chars=(5, None), items=[{"field": "of", "rarest": 2}])) == [2, 3]
    rows = [{"text": "x", "a": a, "b": b} for a, b in (("r", "s"), ("m", "s"), ("m", "t"), ("m", "t"))]
    assert stays(run(rows, items=[{"field": "a", "rarest": 2}, {"field": "b", "rarest": 2}])) == [2, 3]
    assert stays(run(rows, items=[{"field": "b", "rarest": 2}])) == [0, 1, 2, 3]


def test_many_items_are_counted_across_batches(run, monkeypatch):
    from optrush.data import cleaning

    monkeypatch.setattr(cleaning, "BATCH_rows", 7)
    rows = [{"text": "x", "of": [f"i{i % 50}", f"j{i // 2}"]} for i in range(100)] + [{"text": "x", "of": ["i1", "k"]}]
    assert stays(run(rows, items=[{"field": "of", "rarest": 2}])) == list(range(100))


def test_a_field_that_no_row_has(run):
    with pytest.raises(DataError) as error:
        run([{"text": "x", "ingredients": []}], items=[{"field": "ingredient", "bounds": [1, 2]}])
    assert error.value.asked == "`data.clean.items[0].field: ingredient`"
    assert error.value.found == "no row has it; the first row has text, ingredients"


# --- duplicates and contamination


def test_exact_duplicates(run):
    """White space and Unicode's forms do not tell texts apart, letters do; the first stays."""
    rows = ["caf\u00e9 au lait", "other", " cafe\u0301  au\nlait", "Caf\u00e9 au lait", "other"]
    found = run(rows, exact_duplicates=True)
    assert stays(found) == [0, 1, 3]
    assert reasons(found, "exact_duplicates")[0].endswith("rows.jsonl:1")
    assert stays(run(["x" * 3, "x" * 9, "x" * 9], chars=(5, None), exact_duplicates=True)) == [1]


def test_near_duplicates(run):
    """At the bound of the similarity, which is exact: 100 words have 96 runs of 5, one changed word breaks 5."""
    words = text(100).split()
    one = " ".join([*words[:50], "changed", *words[51:]])
    rows = [" ".join(words), one, text(100, 1000)]
    similarity = 91 / (96 + 5)
    assert stays(run(rows, near_duplicates=similarity)) == [0, 2]
    assert stays(run(rows, near_duplicates=similarity + 1e-6)) == [0, 1, 2]
    found = run(rows, near_duplicates=0.5)
    assert reasons(found, "near_duplicates")[0].startswith("similarity 0.901 with ")
    assert reasons(found, "near_duplicates")[0].endswith("rows.jsonl:1")
    shouted = run([" ".join(words), " ".join(words).upper() + "!"], near_duplicates=0.99)
    assert stays(shouted) == [0], "case and punctuation are no words"


def test_near_duplicates_take_so_much_memory_and_no_more(run, monkeypatch):
    from optrush.data import cleaning

    monkeypatch.setattr(cleaning, "MOST_NEAR_bytes", 1000)
    assert stays(run([text(9)], near_duplicates=0.8)) == [0]
    with pytest.raises(NeedsError, match="GiB of memory for 20 rows") as error:
        run([text(50, 100 * i) for i in range(20)], near_duplicates=0.8)
    assert "clean fewer files at a time" in error.value.do


def test_near_duplicates_of_short_texts_and_of_texts_without_spaces(run):
    assert stays(run(["yes", "no", "Yes!", "?!", "..."], near_duplicates=0.5)) == [0, 1, 3, 4]
    chinese = "番茄炒蛋是一道简单又美味的家常菜只需要几个鸡蛋和两个番茄就可以做好先把鸡蛋打散再把番茄切成小块"
    assert stays(run([chinese, chinese[:20] + "汤" + chinese[21:]], near_duplicates=0.7)) == [0]


def test_a_chain_of_near_duplicates_is_not_dragged_along(run):
    """b is near a, c is near b but not near a: b goes, c stays, for b does not stay."""
    words = text(100).split()
    a, b, c = (" ".join(["x"] * n + words[n:]) for n in (0, 20, 40))
    assert stays(run([a, b, c], near_duplicates=0.6)) == [0, 2]
    assert stays(run([b, c, a], near_duplicates=0.6)) == [0]


def test_a_shared_system_prompt_makes_no_duplicates(run):
    rows = [chat(text(20, 100 * i), text(20, 100 * i + 50), system=text(500, 10**6)) for i in range(3)]
    assert stays(run(rows, near_duplicates=0.3)) == [0, 1, 2]
    assert stays(run([*rows, rows[0]], near_duplicates=0.3)) == [0, 1, 2]


def test_contamination(run, tmp_path):
    """Thirteen words in a row, or all of a shorter text; of an evaluation text's system prompt nothing."""
    evaluation = tmp_path / "eval.jsonl"
    judged = [{"text": text(40)}, {"text": "What is the capital?"}, chat(text(20, 500), "ok", system=text(30, 900))]
    evaluation.write_text("".join(json.dumps(row) + "\n" for row in judged))
    rows = [
        f"before {text(13, 5).upper()}, after", f"before {text(12, 5)} after", "what is the capital",
        "What is the capital? Paris.", chat(text(20, 500), "well"), chat("hello there", "hi", system=text(30, 900)),
    ]  # fmt: skip
    found = run(rows, decontaminate=str(evaluation))
    assert stays(found) == [1, 3, 5]
    why = reasons(found, "decontaminate")
    assert why[0] == f"shares words with {evaluation}:1: {text(13, 5)!r}"
    assert why[1].endswith("eval.jsonl:2: 'what is the capital'") and f"{evaluation}:3" in why[2]
    assert found.record["evaluation"][0]["file"] == str(evaluation)


def test_contamination_by_a_file_with_a_bad_row(run, tmp_path):
    evaluation = tmp_path / "eval.jsonl"
    evaluation.write_text('{"text": "a"}\n{"text": ""}\n')
    with pytest.raises(DataError, match=r"eval\.jsonl:2"):
        run(["x"], decontaminate=str(evaluation))


# --- settings that cannot be meant


@pytest.mark.parametrize(("settings", "asked", "found"), [
    ({}, "`data.clean`", "no filter"),
    ({"chars": (5, 4)}, "`data.clean.chars: [5.0, 4.0]`", "the minimum exceeds the maximum"),
    ({"tokens": (None, None)}, "`data.clean.tokens: [None, None]`", "the minimum exceeds the maximum"),
    ({"items": [{"field": "a"}]}, "`data.clean.items[0]`", "neither `bounds` nor `rarest`"),
    ({"items": [{"bounds": [1, 2]}]}, "`data.clean.items[0]`", "the whole text as one item"),
    ({"items": [{"field": "a", "pattern": "(", "rarest": 2}]}, "`data.clean.items[0].pattern: (`",
        "not a regular expression: missing ), unterminated subpattern at position 0"),
    ({"items": [{"field": "a", "bounds": [3, 1]}]}, "`data.clean.items[0].bounds: [3.0, 1.0]`",
        "the minimum exceeds the maximum"),
])  # fmt: skip
def test_settings(run, settings, asked, found):
    with pytest.raises(ConfigError) as error:
        run(["x"], **settings)
    assert (error.value.asked, error.value.found) == (asked, found)


def test_nothing_left(run):
    with pytest.raises(DataError) as error:
        run(["a", "b"], chars=(5, None))
    assert error.value.found == "0 of 2 rows remain; removed by chars 2"


# --- bad rows


def test_bad_rows(run):
    rows = ["good", b"not json", "good too", {"other": 1}, "x"]
    with pytest.raises(DataError, match=r"rows\.jsonl:2"):
        run(rows, chars=(2, None))
    aside = {"bad_rows": "quarantine", "most_bad": 0.4}
    found = run(rows, aside, chars=(2, None))
    assert stays(found) == [0, 1, 2, 3], "whoever reads next must refuse the bad ones again"
    assert found.record["bad"]["rows"] == 2 and found.record["kept"]["rows"] == 2
    assert [e["line"] for e in found.record["bad"]["examples"]] == [2, 4]
    assert found.summary() == "2 of 5 rows remain; removed by chars 1, bad 2"
    with pytest.raises(DataError) as error:
        run(rows, {**aside, "most_bad": 0.39}, chars=(2, None))
    assert error.value.asked == "at most 0.39 of the rows bad (data.most_bad)"
    assert error.value.found.startswith("2 of 5") and "rows.jsonl:2" in error.value.found


# --- files


def write(path, rows):
    path.write_bytes(b"".join(line(row) + b"\n" for row in rows))
    return path


def test_several_files_and_formats(tmp_path):
    """Rows are numbered by file, duplicates found across files, and what stays is written once."""
    first = write(tmp_path / "a.jsonl", ["one", "two"])
    second = tmp_path / "b.jsonl.gz"
    second.write_bytes(gzip.compress(b'{"text":  "two"}\n{"text": "thr\\u00e9e", "id": 7}'))
    third = tmp_path / "c.json"
    third.write_text('[{"text": "four"}, {"text": "one"}]')
    found = clean_files([first, second, third], Cleaning(exact_duplicates=True), tokens=None)
    assert {path.name: mask.tolist() for path, mask in found.kept.items()} == {
        "a.jsonl": [True, True], "b.jsonl.gz": [False, True], "c.json": [True, False],
    }  # fmt: skip
    out = tmp_path / "out"
    out.mkdir()
    write_rows(found, out)
    assert (out / "rows.jsonl").read_bytes() == (
        b'{"text": "one"}\n{"text": "two"}\n{"text": "thr\\u00e9e", "id": 7}\n{"text": "four"}\n'
    )
    taken = [json.loads(row) for row in (out / "removed.jsonl").read_text().splitlines()]
    assert [(Path(row["file"]).name, row["line"]) for row in taken] == [("b.jsonl.gz", 1), ("c.json", 2)]
    assert taken[0]["reason"] == f"the same text as {first}:2"


def test_parquet(tmp_path):
    """What is written is JSON, whatever numbers a column holds."""
    table = {"text": ["one", "two", "one"], "score": [1.5, float("nan"), 2.0], "of": [["a"], [], ["b"]]}
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
    found = clean_files([tmp_path / "a.parquet"], Cleaning(exact_duplicates=True), tokens=None)
    (tmp_path / "out").mkdir()
    write_rows(found, tmp_path / "out")
    assert (tmp_path / "out" / "rows.jsonl").read_text().splitlines() == [
        '{"text": "one", "score": 1.5, "of": ["a"]}', '{"text": "two", "score": null, "of": []}',
    ]  # fmt: skip
    assert (
        clean_files([tmp_path / "out" / "rows.jsonl"], Cleaning(chars=(1, 5)), tokens=None).record["kept"]["rows"] == 2
    )


def test_lines_of_text_that_are_blank_keep_their_number(tmp_path, monkeypatch):
    """Row k of a part stands at the part's first line + k, as whoever tokenises counts."""
    from optrush.data import cleaning as module
    from optrush.data.readers import chunks, read_rows_or_errors

    path = tmp_path / "a.txt"
    path.write_text("\nlong enough\n\nx\n\nlong enough too\nx\n")
    monkeypatch.setattr(module, "chunks", lambda file, _, text_rows: chunks(file, 15, text_rows=text_rows))
    found = clean_files([path], Cleaning(chars=(5, None)), tokens=None, text_rows="line", workers=1)
    assert len(found.table.parts) > 1
    seen = [
        (where.line, bool(found.kept[path][part.first - 1 + k]))
        for part in found.table.parts
        for k, (where, _) in enumerate(read_rows_or_errors(part, "line"))
    ]
    assert seen == [(2, True), (4, False), (6, True), (7, False)]


def test_a_file_that_changes(tmp_path):
    path = write(tmp_path / "a.jsonl", ["one", "one", "two"])
    found = clean_files([path], Cleaning(exact_duplicates=True), tokens=None)
    write(path, ["one", "one", "two!"])
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match="it changed during reading"):
        write_rows(found, tmp_path / "out")


def test_the_same_bytes_whatever_the_number_of_workers(tmp_path):
    rng = np.random.default_rng(0)
    files = []
    for name in "abc":
        rows = []
        for _ in range(300):
            words = [f"w{i}" for i in rng.integers(0, 400, 60)]
            rows.append({"text": " ".join(words), "of": [f"i{rng.integers(0, 200)}", f"j{rng.integers(0, 900)}"]})
            if rng.random() < 0.3:
                again = dict(rows[rng.integers(0, len(rows))])
                rows.append({**again, "text": again["text"].replace(" w1", " x", 1)})
        files.append(write(tmp_path / f"{name}.jsonl", rows))
    settings = Cleaning(
        chars=(270, 285), items=[{"field": "of", "rarest": 2}], exact_duplicates=True, near_duplicates=0.7
    )
    made = []
    for workers in (1, 2):
        found = clean_files(files, settings, tokens=None, workers=workers)
        out = tmp_path / f"{len(made)}"
        out.mkdir()
        made.append((json.dumps(write_rows(found, out)), *(f.read_bytes() for f in sorted(out.iterdir()))))
    assert made[0] == made[1]
    assert all(f["taken"] for f in found.record["filters"]), "the case tells"


def test_a_worker_that_is_killed(tmp_path, monkeypatch):
    from optrush.data import cleaning, pool

    started = pool.forked

    def killed(*arguments):
        workers = started(*arguments)
        for worker in workers:  # not one of them has read a row yet
            os.kill(worker.pid, signal.SIGKILL)
        return workers

    monkeypatch.setattr(pool, "forked", killed)
    monkeypatch.setattr(cleaning, "WORKER_bytes", 1)  # a worker for any data
    files = [write(tmp_path / f"{i}.jsonl", ["a"]) for i in range(6)]
    with pytest.raises(RunError, match="was killed by signal 9") as lost:
        clean_files(files, Cleaning(chars=(1, 2)), tokens=None, workers=2)
    assert "0.jsonl" in str(lost.value)


def test_batches_of_which_nothing_is_left(run, monkeypatch, tmp_path):
    from optrush.data import cleaning

    monkeypatch.setattr(cleaning, "BATCH_rows", 1)
    evaluation = write(tmp_path / "eval.jsonl", ["some other words"])
    rows = [{"text": t, "of": ["a"]} for t in ("x", "long enough", "x", "long enough", "!" * 9)]
    found = run(
        rows, chars=(5, None), items=[{"field": "of", "bounds": [1, 9], "rarest": 2}], repeated_lines=0.5,
        language=("en", "de", "da", "nl", "fr"), exact_duplicates=True, near_duplicates=0.5,
        decontaminate=str(evaluation),
    )  # fmt: skip
    assert [f["taken"] for f in found.record["filters"]] == [2, 0, 0, 0, 0, 1, 0, 0]


def test_hostile_rows(run):
    """Nothing of these is an error, and nothing is lost."""
    rows = [
        "<script>alert(1)</script>", "\u202e\u0000\x1b[31m", "a" * 3_000_000, "\U0001f35d " * 1000, "\n" * 5 + "x",
        {"text": "x", "of": [None, 1, {"a": [1.5]}, "", "  "]}, {"text": "x", "of": {"deep": "no list"}},
        {"text": "ｆｕｌｌ ｗｉｄｔｈ"}, "ß ẞ ﬁ İ",
    ]  # fmt: skip
    found = run(
        rows, chars=(1, None), items=[{"field": "of", "bounds": [0, 9]}], repeated_lines=0.99, exact_duplicates=True,
        near_duplicates=0.9, language=("en",),
    )  # fmt: skip
    taken = sum(f["taken"] for f in found.record["filters"])
    assert taken + found.record["kept"]["rows"] == len(rows)
    assert all(len(e["text"]) <= 280 for f in found.record["filters"] for e in f["examples"])


MEASURED = """
import sys
from pathlib import Path
from optrush.config import Cleaning
from optrush.data.cleaning import clean_files
settings = Cleaning(chars=(1, None), exact_duplicates=True, repeated_lines=0.9)
clean_files([Path(sys.argv[1])], settings, tokens=None, workers=1)
assert "torch" not in sys.modules
print(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows_bytes(tmp_path):
    """As many rows, each ten times as long."""
    peaks = []
    for words in (500, 5000):
        rows = [text(words, i * words) for i in range(400)]
        path = write(tmp_path / f"{words}.jsonl", rows)
        done = subprocess.run([sys.executable, "-c", MEASURED, str(path)], capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout))
    assert path.stat().st_size > 14e6
    assert peaks[1] < 1.15 * peaks[0], peaks


@pytest.mark.parametrize("pattern", [r"^(\w+ ?)+!$", r"(a|.)*!", r"((.+)+)+!", r"(.*)*(.*)*x!"])
def test_a_pattern_of_items_that_takes_too_long(pattern, monkeypatch):
    monkeypatch.setattr(cleaning, "MATCHING_s", 0.05)
    with pytest.raises(ConfigError, match=r"takes longer than 0\.05 s for one row") as caught:
        cleaning.items_of(Items(pattern=pattern, rarest=2), {}, "a word and one more " * 9)
    assert pattern in caught.value.asked
