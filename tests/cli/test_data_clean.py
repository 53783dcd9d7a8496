"""`optrush data clean`: what it writes and keeps its hands off, its record, its page, and a kill in the middle."""

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshes import further

from clirun import write_rows
from trials import alive

EVIL = "<script>document.title = 'taken'</script><img src=x onerror=alert(1)>"


@pytest.fixture
def recipes(here):
    """Seven rows: of these the third is too short, the fourth has too few of its items, the fifth is the first."""
    said = "Chop the onions, fry them in butter, stir, add stock and herbs, simmer for an hour, then serve it hot"
    rows = [
        {"text": said, "of": ["onion", "butter"]},
        {"text": "Grate cheese over the pasta, grind pepper on it and eat all of it at once", "of": ["cheese", "egg"]},
        {"text": EVIL[:4], "of": ["onion", "egg"]},
        {"text": "Take one egg. That is all, and it is enough for a whole meal " + EVIL, "of": ["egg"]},
        {"text": said.replace(" ", "  "), "of": ["onion", "butter"]},
        {"text": said.replace("stir", "rest"), "of": ["onion", "cheese"]},
        {"text": "Something with no likeness to anything else in this file at all, and long", "of": ["egg", EVIL]},
    ]
    return write_rows(here / "recipes.jsonl", rows)


FLAGS = (
    "chars=[10,null]", "items=[{field: of, bounds: [2, 9], rarest: 2}]", "exact_duplicates=true", "near_duplicates=0.5",
)  # fmt: skip


def flags(*more):
    return [part for flag in (*FLAGS, *more) for part in ("--set", f"data.clean.{flag}")]


def test_what_is_written(call, recipes, here):
    done = call("data", "clean", "recipes.jsonl", "--out", "out", *flags())
    assert done.code == 0, done.err
    assert "2 of 7 rows stay: out/rows.jsonl, out/cleaning.html" in done.out
    assert sorted(os.listdir("out")) == ["cleaning.html", "cleaning.json", "removed.jsonl", "rows.jsonl"]
    lines = recipes.read_bytes().splitlines(keepends=True)
    assert (here / "out/rows.jsonl").read_bytes() == lines[0] + lines[1]
    removed = [json.loads(line) for line in (here / "out/removed.jsonl").read_text().splitlines()]
    assert [(row["line"], row["filter"]) for row in removed] == [
        (3, "chars"), (4, "items[0].bounds"), (5, "exact_duplicates"), (6, "near_duplicates"), (7, "items[0].rarest"),
    ]  # fmt: skip
    assert set(removed[0]) == {"file", "line", "filter", "reason"}, "the row itself is not there"
    record = json.loads((here / "out/cleaning.json").read_text())
    assert [f["taken"] for f in record["filters"]] == [1, 1, 1, 1, 1]
    assert [f["left"] for f in record["filters"]] == [6, 5, 4, 3, 2]
    assert record["output"]["rows.jsonl"]["bytes"] == len(lines[0] + lines[1])


def test_by_a_runs_yaml(call, recipes, write):
    settings = {"chars": [10, None], "exact_duplicates": True}
    config = write(data={"path": "recipes.jsonl", "clean": settings})
    done = call("data", "clean", config, "--out", "out", "--set", "data.clean.chars=[60,null]")
    assert done.code == 0, done.err
    assert json.loads(Path("out/cleaning.json").read_text())["settings"]["chars"] == [60.0, None]


def test_what_lies_in_the_cache_of_the_hub(call, recipes, here):
    """Rows of one data set of the hub, and another to decontaminate against; neither is fetched again."""
    hub = here / "store" / "hub"
    hub.mkdir(parents=True)
    lines = [json.loads(line)["text"] for line in recipes.read_text().splitlines()]
    pq.write_table(pa.table({"text": lines}), hub / "org--rows--train.parquet")
    pq.write_table(pa.table({"text": lines[1:2]}), hub / "org--judge--train.parquet")
    more = ["--set", "data.clean.decontaminate=org/judge", "--set", "data.cache=store"]
    done = call("data", "clean", "org/rows", "--out", "out", *more)
    assert done.code == 0, done.err
    assert json.loads(Path("out/cleaning.json").read_text())["filters"][0]["taken"] == 1


def test_tokens_by_a_model(call, recipes):
    done = call("data", "clean", "recipes.jsonl", "--out", "out", "--set", "data.clean.tokens=[12,null]")
    assert done.code == 2 and "found: no tokenizer" in done.err
    assert not Path("out").exists() and not Path("out.tmp").exists()
    tiny = ["--set", "data.clean.tokens=[12,null]", "--set", "model=tiny"]
    done = call("data", "clean", "recipes.jsonl", "--out", "out", *tiny)
    assert done.code == 0, done.err
    assert json.loads(Path("out/cleaning.json").read_text())["filters"][0]["taken"] == 1
    assert call("data", "clean", "--check", "out").code == 0


def test_quarantine(call, recipes):
    with recipes.open("a") as file:
        file.write("not json\n")
    done = call("data", "clean", "recipes.jsonl", "--out", "out", *flags())
    assert done.code == 2 and "recipes.jsonl:8" in done.err
    assert not Path("out").exists()
    aside = ["--set", "data.bad_rows=quarantine", "--set", "data.most_bad=0.2"]
    done = call("data", "clean", "recipes.jsonl", "--out", "out", *flags(), *aside)
    assert done.code == 0, done.err
    (bad,) = [json.loads(line) for line in Path("out/quarantine.jsonl").read_text().splitlines()]
    assert (bad["file"], bad["line"]) == ("recipes.jsonl", 8) and "not valid JSON" in bad["reason"]
    assert "bad rows" in Path("out/cleaning.html").read_text()


# --- folders


def test_its_own_folder_is_replaced_and_no_other(call, recipes):
    assert call("data", "clean", "recipes.jsonl", "--out", "out", *flags()).code == 0
    assert call("data", "clean", "recipes.jsonl", "--out", "out", "--set", "data.clean.chars=[10,null]").code == 0
    assert len(json.loads(Path("out/cleaning.json").read_text())["filters"]) == 1
    assert not [name for name in os.listdir() if name.startswith("out.")]
    Path("out/mine.txt").write_text("mine")
    done = call("data", "clean", "recipes.jsonl", "--out", "out", *flags())
    assert done.code == 2 and "`mine.txt` in out is not of a cleaning" in done.err
    assert len(os.listdir("out")) == 5
    done = call("data", "clean", "recipes.jsonl", "--out", "recipes.jsonl", *flags())
    assert done.code == 2 and "recipes.jsonl is not a folder" in done.err


def test_what_is_read_is_not_written_over(call, recipes):
    assert call("data", "clean", "recipes.jsonl", "--out", "out", *flags()).code == 0
    done = call("data", "clean", "out/rows.jsonl", "--out", "out", *flags())
    assert done.code == 2 and "the folder of the input out/rows.jsonl" in done.err


BAD_FILES = {
    "lines.jsonl": (
        b'{"text": "a"}\n{"text": 1}\n{"text": "b"\n\n{"messages": [{"role": "user"}]}\n[1]\n\xff\n{"x": 1}\n',
        {2: "text is a number", 3: "not valid JSON", 4: "an empty line", 5: "has no 'content'", 6: "a list instead",
         7: "invalid UTF-8", 8: "no known format"}, 8,
    ),
    "cells.csv": (b"prompt,completion\na,b\nc\n", {2: "1 cells for 2 columns"}, 2),
    "list.json": (b'[{"text": "a"}, {"text": null}, {"text": "c"}]', {2: "text"}, 3),
    "pairs.jsonl": (b'{"chosen": "a", "rejected": "b"}\n{"chosen": "a"}\n', {2: "chosen"}, 2),
    "good.jsonl": (b'{"text": "a"}\n{"prompt": "a", "completion": "b"}\n', {}, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FILES)
def test_without_filters_bad_rows_are_listed(call, here, name):
    """All of them, by file and line, with their number; nothing is written."""
    content, bad, rows = BAD_FILES[name]
    (here / name).write_bytes(content)
    before = sorted(os.listdir(here))
    done, listed = call("data", "clean", name), call("data", "clean", name, "--json")
    *lines, total = done.out.splitlines()
    assert total == f"{len(bad)} of {rows} rows are bad"
    assert [line.partition(": ")[0] for line in lines] == [f"{name}:{at}" for at in bad]
    assert all(reason in line for reason, line in zip(bad.values(), lines, strict=True)), lines
    found = json.loads(listed.out)
    assert (found["rows"], found["bad"]) == (rows, len(bad))
    assert [f"{row['file']}:{row['line']}: {row['reason']}" for row in found["bad_rows"]] == lines
    assert done.code == listed.code == (2 if bad else 0)
    remedy = f"--set data.bad_rows=quarantine --set data.most_bad={math.ceil(1000 * len(bad) / rows) / 1000:g}"
    assert (remedy in done.err) == bool(bad)
    assert call("data", "clean", name, *remedy.split()).code == 0
    assert sorted(os.listdir(here)) == before


def test_bad_rows_of_a_run(call, here, write):
    """By the objective and the columns of its YAML."""
    (here / "rows.jsonl").write_text('{"q": "a", "a": "b"}\n{"q": "a"}\n')
    config = write(data={"path": "rows.jsonl", "columns": {"q": "prompt", "a": "completion"}}, objective="sft")
    done = call("data", "clean", config)
    assert done.code == 2 and done.out.startswith("rows.jsonl:2: ") and "1 of 2 rows are bad" in done.out


@pytest.mark.parametrize(("arguments", "said"), [
    (["recipes.jsonl", "--set", "data.clean.chars=[1,9]"], "no folder to write"),
    (["--out", "out"], "nothing to clean"), (["recipes.jsonl", "--out", "out"], "no `data.clean`"),
    (["run.yaml", "recipes.jsonl", "--out", "out"], "another source is run.yaml"),
    (["recipes.jsonl", "--check", "out"], "something to clean with it"),
    (["--check", "nowhere"], "cleaning.json: No such file or directory"),
    (["recipes.jsonl", "--out", "out", "--set", "data.clean.chars=[9,1]"], "the minimum exceeds the maximum"),
    (["recipes.jsonl", "--out", "out", "--set", "data.clean.char=1"], "did you mean `chars`?"),
    (["nowhere.jsonl", "--out", "out", "--set", "data.clean.chars=[1,9]"], "no such file"),
])  # fmt: skip
def test_wrong_input(call, recipes, arguments, said):
    done = call("data", "clean", *arguments)
    assert done.code == 2 and said in done.err, done.err
    assert "Traceback" not in done.err and not Path("out").exists() and not Path("out.tmp").exists()


# --- the record


def test_cleaned_again_it_is_the_same(call, recipes):
    assert call("data", "clean", "recipes.jsonl", "--out", "out", *flags()).code == 0
    before = {name: Path("out", name).read_bytes() for name in os.listdir("out")}
    done = call("data", "clean", "--check", "out")
    assert (done.code, done.out) == (0, "out: cleaned again, the same bytes\n")
    assert call("data", "clean", "recipes.jsonl", "--out", "out", *flags()).code == 0
    assert {name: Path("out", name).read_bytes() for name in os.listdir("out")} == before


def test_a_check_finds_a_changed_file_and_a_damaged_record(call, recipes):
    done = call("data", "clean", "recipes.jsonl", "--out", "out", "--json", *flags())
    assert json.loads(done.out) == json.loads(Path("out/cleaning.json").read_text())
    for changed in ("out/removed.jsonl", "out/rows.jsonl", "recipes.jsonl"):  # the last one changed is met first
        with Path(changed).open("a") as file:
            file.write(" ")
        done = call("data", "clean", "--check", "out")
        assert done.code == 2 and f"{changed} is not there, or not as it was" in done.err
    for damage in ("", "[]", "{}", '{"format": 1}', "\x00"):
        Path("out/cleaning.json").write_text(damage)
        done = call("data", "clean", "--check", "out")
        assert done.code == 2 and "name a folder that `optrush data clean` wrote" in done.err


def test_a_check_finds_other_bytes(call, recipes, monkeypatch):
    from optrush.data import cleaning

    assert call("data", "clean", "recipes.jsonl", "--out", "out", *flags()).code == 0
    monkeypatch.setattr(cleaning, "find_near_duplicates", lambda *_: iter(()))
    monkeypatch.setattr("optrush.data.cleaning.version", lambda name: "other")
    done = call("data", "clean", "--check", "out")
    assert done.code == 2 and "rows.jsonl, removed.jsonl came out differently" in done.err
    assert re.search(r"clean with the same versions \(numpy \S+ then, other now", done.err)


# --- the page


def test_the_page(call, recipes, here):
    """Nothing of a row becomes markup, nothing is fetched, and every filter is there."""
    assert call("data", "clean", "recipes.jsonl", "--out", "out", *flags()).code == 0
    page = Path("out/cleaning.html").read_text()
    assert "<script" not in page and "<img" not in page and "&lt;script&gt;" in page
    assert not re.search(r"<[^>]*\s(src|srcset|action|on[a-z]+)\s*=", page)
    assert {u for u in re.findall(r'href="([^"]*)"', page) if not u.startswith("#")} == {"data:,"}
    for label in ("characters: at least 10", "of in at least 2 rows", "exact duplicates", "near duplicates"):
        assert label in page
    assert page.count('class="chart"') == 1, "the waterfall"
    from optrush.report import data  # a run writes no rows

    record = json.loads(Path("out/cleaning.json").read_text())
    del record["output"], record["model"]
    assert data.write_cleaning_page(record, here).read_text().count("(written)") == 0
    assert json.loads(Path("cleaning.json").read_text()) == record


# --- a kill


HELD = """
import pathlib, time
from optrush.cli.app import main
from optrush.data import pool

serve = pool._serve
def held(item, beat):
    pathlib.Path("measured").touch()
    time.sleep(600)
pool._serve = lambda pipe, work: serve(pipe, lambda item, beat: [work(item, beat), held(item, beat)])
main()
"""


@pytest.mark.parametrize("moment", further(["workers measure", "workers begin"], 1))
def test_killed_in_the_middle(call, here, moment):
    """No folder of that name is there, no process is left, and the next run begins anew."""
    with (here / "many.jsonl").open("w") as file:
        words = [" ".join(f"w{(i * 31 + k * k) % 9973}" for k in range(99)) for i in range(997)]
        for i in range(34_000):
            file.write(json.dumps({"text": f"w{i} {words[i % 997]}", "of": ["a", "b"]}) + "\n")
    assert os.path.getsize("many.jsonl") > 17 << 20, "enough for several workers"
    command = [sys.executable, "-c", HELD, "data", "clean", "many.jsonl", "--out", "out", *flags()]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    workers: list[int] = []
    while len(workers) < 2:
        assert process.poll() is None
        workers = _children(process.pid)
        time.sleep(0.01)
    while moment == "workers measure" and not Path("measured").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)  # a fork is over
    workers = _children(process.pid)  # all of them: each holds the lock of the folder
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not Path("out").exists()
    killed = time.monotonic()
    while left := [pid for pid in workers if alive(pid)]:
        if time.monotonic() - killed > 60:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):  # gone between two looks
                    os.kill(pid, signal.SIGKILL)
            pytest.fail("a worker lives on")
        time.sleep(0.05)
    held = os.open("out.tmp", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)  # a thread of a worker may end after the process is seen to have ended
    os.close(held)
    done = call("data", "clean", "chat.jsonl", "--out", "out", "--set", "data.clean.chars=[1,null]")
    assert done.code == 0, done.err
    assert sorted(os.listdir("out")) == ["cleaning.html", "cleaning.json", "removed.jsonl", "rows.jsonl"]
    assert not Path("out.tmp").exists()


def test_two_at_once(call, recipes):
    Path("out.tmp").mkdir()
    held = os.open("out.tmp", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    done = call("data", "clean", "recipes.jsonl", "--out", "out", *flags())
    os.close(held)
    assert done.code == 2 and "another cleaning is at work there" in done.err
    assert call("data", "clean", "recipes.jsonl", "--out", "out", *flags()).code == 0


def test_a_full_disk(call, recipes, monkeypatch):
    from optrush.data import cleaning

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cleaning, "_line", full)
    done = call("data", "clean", "recipes.jsonl", "--out", "out", *flags())
    assert done.code == 2 and "no space left there" in done.err
    assert not Path("out").exists() and not Path("out.tmp").exists()


def _children(parent):
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            if int(stat.rpartition(")")[2].split()[1]) == parent:
                found.append(int(entry.name))
    return found
