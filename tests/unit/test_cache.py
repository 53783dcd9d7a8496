"""Shards made once and by several processes: what decides about them, what is made again, and who may work."""

import datetime
import errno
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import AutoTokenizer

from optrush import files
from optrush.config import parse_config
from optrush.data import pool, tokenize
from optrush.data.chat_template import Tokens
from optrush.data.schema import NO_RULES
from optrush.data.tokenize import Missing, Progress, TokenizeWork, jobs, open_shard, tokenized
from optrush.errors import DataError

from trials import alive

TEXTS = [f"soup number {i}: " + "stir and wait. " * (i % 7) for i in range(60)]


@pytest.fixture(scope="module")
def tokens(tiny_folder):
    return Tokens(AutoTokenizer.from_pretrained(tiny_folder))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder for files, with small jobs and a cache of its own."""
    monkeypatch.setattr(tokenize, "CHUNK_bytes", 600)
    monkeypatch.setenv("OPTRUSH_CACHE", str(tmp_path / "cache"))
    return tmp_path


def written(path, texts=TEXTS):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def work(tokens, *paths, say=lambda line: None, kept=None, cleaning="", **data):
    config = parse_config("model: tiny\nobjective: sft\ndata: {path: x, workers: 1}\noutput: o\n", "x")
    config = config.model_copy(update={"data": config.data.model_copy(update=data)})
    return TokenizeWork(config, tokens, tuple(paths), kept, cleaning, say)


def ids(made):
    """Documents, of shards in memory or on the disk."""
    found = [open_shard(m) if isinstance(m, Path) else m for m in made]
    return [s.ids[a:b].tolist() for s in found for a, b in zip(s.starts, s.starts[1:])]


def whole(tokens, path, kept=None, skip=0):
    """The shards of a file that one job has."""
    (job,) = jobs_of(path, 1 << 30)
    return tokenize.shards(islice(tokenize.parsed(job, "file", kept), skip, None), tokens, "assistant")


def alone(tokens, path):
    """What this process makes of a file by itself."""
    return ids(whole(tokens, path))


def maker(tokens, folder, kept=None):
    return tokenize.ShardMaker(tokens, "assistant", "file", kept, NO_RULES, folder)


def jobs_of(path, size):
    before, tokenize.CHUNK_bytes = tokenize.CHUNK_bytes, size
    try:
        return list(jobs([path], "file"))
    finally:
        tokenize.CHUNK_bytes = before


def no_workers(monkeypatch):
    def refuse(*_):
        raise AssertionError("something was tokenised again")

    monkeypatch.setattr(tokenize.ShardMaker, "__call__", refuse)


# --- jobs


def test_jobs_are_parts_of_large_files_and_groups_of_small_ones(here):
    small = [written(here / f"{i}.jsonl", ["soup"] * 3) for i in range(5)]
    large = written(here / "large.jsonl")
    found = list(jobs([*small, large, small[0]], "file"))
    assert [job.number for job in found] == list(range(len(found)))
    assert len(found[0].chunks) == 5 and all(len(job.chunks) == 1 for job in found[2:-1])
    chunks = [chunk for job in found for chunk in job.chunks]
    assert [file for file, _ in chunks] == [*range(5), *[5] * (len(chunks) - 6), 6]
    lines = [chunk.first for file, chunk in chunks if file == 5]
    assert lines[0] == 1 and len(lines) > 4 and lines == sorted(lines)
    assert all(job.size_bytes <= 600 * 1.5 for job in found)


def test_jobs_of_parquet_files_go_by_bytes(here):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist([{"text": f"{i * 7919} soup"} for i in range(300)])
    for i in range(3):
        pyarrow.parquet.write_table(table, here / f"{i}.parquet", row_group_size=1000)
    paths = sorted(here.glob("*.parquet"))
    assert paths[0].stat().st_size > 600 and len(list(jobs(paths, "file"))) == 3
    pyarrow.parquet.write_table(table, paths[0], row_group_size=50)
    found = list(jobs(paths, "file"))
    assert len(found) > 3
    assert sum(job.size_bytes for job in found) == pytest.approx(sum(path.stat().st_size for path in paths))


def test_a_job_is_cut_into_shards_of_bounded_size(here, tokens, monkeypatch):
    """One file that cannot be cut, such as a packed one: memory is bounded by the shard all the same."""
    path = written(here / "a.jsonl")
    monkeypatch.setattr(tokenize, "SHARD_tok", 200)
    monkeypatch.setattr(tokenize, "BATCH_rows", 4)
    made = list(whole(tokens, path))
    assert len(made) > 3 and [s.last for s in made] == [0] * (len(made) - 1) + [1]
    assert ids(made) == alone(tokens, path) and all(len(s.ids) < 400 for s in made)
    rest = whole(tokens, path, skip=made[0].rows)
    assert [tokenize.shard_digest(s) for s in rest] == [tokenize.shard_digest(s) for s in made[1:]]
    monkeypatch.setattr(tokenize, "SHARD_rows", 8)
    bad = written(here / "bad.jsonl", [""] * 40)
    made = list(whole(tokens, bad))
    assert len(made) == 6 and sum(len(s.refusals([bad])) for s in made) == 40


def test_rows_that_cleaning_took_out_are_counted_and_not_tokenised(here, tokens):
    path = written(here / "a.jsonl")
    kept = np.arange(60) % 3 > 0
    (made,) = whole(tokens, path, [kept])
    assert (made.rows, made.cleaned) == (40, 20) and made.numbers.tolist() == list(range(40))
    assert made.lines.tolist() == (np.flatnonzero(kept) + 1).tolist()
    through = list(tokenized(work(tokens, path, kept=[kept], cleaning="some")))
    assert ids(through) == ids([made])


# --- what is made, and what is found


def test_workers_have_the_tokenizer_of_this_process(here, tiny_folder):
    """Not the one of its folder: tokens may have been added, a template given."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.add_tokens(["soup"])
    template = "{% for m in messages %}<{{ m.content }}{{ eos_token }}{% endfor %}"
    path = here / "chat.jsonl"
    turns = [{"role": "user", "content": "a soup?"}, {"role": "assistant", "content": "a soup."}]
    path.write_text("".join(json.dumps(row) + "\n" for row in [{"messages": turns}, {"text": "soup"}] * 20))
    given = Tokens(tokenizer, template)
    made = ids(tokenized(work(given, path, workers=2)))
    assert made == alone(given, path) != alone(Tokens(AutoTokenizer.from_pretrained(tiny_folder)), path)


def test_small_data_stays_in_memory(here, tokens):
    path = written(here / "a.jsonl", ["soup"])
    made = list(tokenized(work(tokens, path)))
    assert len(made) == 1 and isinstance(made[0], tokenize.Shard) and not (here / "cache").exists()


def test_packed_data_counts_as_what_it_holds(here, tokens):
    """A small file may hold more than shall be in memory."""
    path = here / "a.jsonl.gz"
    path.write_bytes(gzip.compress(written(here / "a.jsonl").read_bytes()))
    size = path.stat().st_size
    assert size < 600 < size * tokenize.PACKED and not tokenize.fits_in_memory([path])
    made = list(tokenized(work(tokens, path)))
    assert all(isinstance(m, Path) for m in made) and ids(made) == alone(tokens, here / "a.jsonl")


def test_worker_processes_make_what_one_process_makes_and_only_once(here, tokens, monkeypatch):
    paths = [written(here / "a.jsonl"), written(here / "b.jsonl", TEXTS[::-1])]
    made = list(tokenized(work(tokens, *paths, workers=2)))
    assert len(made) > 6 and all(isinstance(m, Path) for m in made)
    assert ids(made) == alone(tokens, paths[0]) + alone(tokens, paths[1])
    folder = made[0].parent
    assert folder.parent == here / "cache" / "tokens" and not list(folder.glob("*.tmp-*"))
    no_workers(monkeypatch)
    assert list(tokenized(work(tokens, *paths))) == made
    assert list(tokenized(work(tokens, *[p.rename(p.with_stem(p.stem + "2")) for p in paths]))) == made


def test_a_file_that_changes_while_it_is_tokenised_is_refused_and_not_kept(here, tokens, monkeypatch):
    path, begin = written(here / "a.jsonl"), pool.map_ahead

    def changing(*args):
        path.write_text(path.read_text().swapcase())  # as long as it was
        return begin(*args)

    monkeypatch.setattr(pool, "map_ahead", changing)
    with pytest.raises(DataError) as caught:
        list(tokenized(work(tokens, path, workers=2)))
    assert str(path) in caught.value.asked and caught.value.found == "it changed during reading" and caught.value.do
    assert not list((here / "cache" / "tokens").glob("*/*.safetensors"))
    monkeypatch.setattr(pool, "map_ahead", begin)
    assert ids(tokenized(work(tokens, path))) == alone(tokens, path)


def test_workers_share_this_process_s_memory_and_are_none_beyond_the_work(here, tokens, monkeypatch):
    """Torch and the tokenizer are in memory once, however many cores there are."""
    begun = []
    real = pool.forked
    monkeypatch.setattr(pool, "forked", lambda *given: begun.extend(real(*given)) or [*begun])
    made = tokenized(work(tokens, written(here / "a.jsonl"), workers=64))
    next(made)
    assert 1 < len(begun) <= 8
    rollup = Path(f"/proc/{begun[0].pid}/smaps_rollup").read_text()
    kib = {line.split()[0]: int(line.split()[1]) for line in rollup.splitlines()[1:]}
    assert kib["Private_Dirty:"] < 64 << 10 and kib["Private_Dirty:"] < kib["Rss:"] / 2
    made.close()
    assert not any(alive(worker.pid) for worker in begun)


def test_little_data_is_tokenised_here(here, tokens, monkeypatch):
    """One worker would do nothing that this process can not."""
    monkeypatch.setattr(pool, "forked", None)
    for texts, data in ((TEXTS[:15], {"workers": 9}), (TEXTS, {"workers": 1})):
        path = written(here / "a.jsonl", texts)
        made = list(tokenized(work(tokens, path, **data)))
        assert all(isinstance(m, Path) for m in made) and len(made) > 1 and ids(made) == alone(tokens, path)


def test_who_has_seen_enough_stops_the_rest(here, tokens):
    made = tokenized(work(tokens, written(here / "a.jsonl", TEXTS * 20), workers=2))
    first = next(made)
    begun = first.parent / f"000009-000{tokenize.TEMPORARY}{tokenize.socket.gethostname()}-00ff"
    begun.touch()  # what a worker is about to write when it is stopped
    made.close()
    there = sorted(first.parent.glob("*.safetensors"))
    assert there[0] == first and len(there) <= 8 and not list(first.parent.glob("complete-*"))
    assert not list(first.parent.glob("*.tmp-*"))


def test_damaged_shards_are_made_again_and_no_others(here, tokens):
    """One has a flipped bit, one is cut short, one is gone, and the folder is not marked complete."""
    given = work(tokens, written(here / "a.jsonl"))
    made = list(tokenized(given))
    bytes_before = [path.read_bytes() for path in made]
    assert len(made) > 4
    made[1].write_bytes(bytes_before[1][:-9] + bytes([bytes_before[1][-9] ^ 1]) + bytes_before[1][-8:])
    made[2].write_bytes(bytes_before[2][:-100])
    made[3].unlink()
    next(made[0].parent.glob("complete-*")).unlink()
    before = [path.stat().st_mtime_ns for path in made if path.exists()]
    assert list(tokenized(given)) == made and [path.read_bytes() for path in made] == bytes_before
    after = [path.stat().st_mtime_ns for path in made]
    assert len(set(after) - set(before)) == 3 and list(made[0].parent.glob("complete-*"))


def test_a_job_that_is_half_done_is_gone_on_with(here, tokens, monkeypatch):
    """Its first shard lies there, made of the first rows; the rest is made, and only the rest."""
    path, kept = written(here / "a.jsonl"), np.arange(60) % 3 > 0
    given = work(tokens, path, kept=[kept], cleaning="some")
    given.folder.mkdir(parents=True)
    job = next(jobs([path], "file"))
    with monkeypatch.context() as patch:
        patch.setattr(tokenize, "SHARD_tok", 50)
        patch.setattr(tokenize, "BATCH_rows", 3)
        maker(tokens, given.folder, [kept])(Missing(job, 0, 0))
    first, *rest = sorted(given.folder.glob("*.safetensors"))
    assert rest and open_shard(first).rows and open_shard(first).cleaned
    for other in rest:
        other.unlink()
    before = first.stat()
    made = list(tokenized(given))
    assert made[0] == first and first.stat() == before and open_shard(made[1]).last
    assert ids(made) == ids(whole(tokens, path, [kept]))


def test_temporary_files_of_the_dead_are_removed(here, tokens):
    given = work(tokens, written(here / "a.jsonl"))
    folder = next(tokenized(given)).parent
    ours = folder / f"000009-000{tokenize.TEMPORARY}{tokenize.socket.gethostname()}-00ff"
    theirs, ancient = (folder / f"00000{i}-000{tokenize.TEMPORARY}elsewhere-00ff" for i in range(2))
    for path in (ours, theirs, ancient):
        path.touch()
    os.utime(ancient, (0, 0))
    gone = folder / f"000002-000{tokenize.TEMPORARY}elsewhere-00ff"
    gone.symlink_to("renamed")  # like one that its machine finishes between the listing and the look
    list(tokenized(given))
    assert not ours.exists() and not ancient.exists() and theirs.exists()


# --- the key


def test_the_key(here, tiny_folder, tokens, monkeypatch):
    path = written(here / "a.jsonl")
    base = work(tokens, path).folder
    assert work(tokens, path, workers=2, too_long="split", max_samples=3, eval=0.5).folder == base
    written(here / "b.jsonl", TEXTS[:-1])
    template = tokens.template()
    others = {
        "files": work(tokens, here / "b.jsonl"), "order": work(tokens, path, here / "b.jsonl"),
        "other order": work(tokens, here / "b.jsonl", path), "learnt": work(tokens, path, train_on="last"),
        "text rows": work(tokens, path, text_rows="line"), "cleaning": work(tokens, path, cleaning="x"),
        "template": work(Tokens(tokens.tokenizer, template + " "), path),
    }  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.add_tokens(["soup"])
    others["tokenizer"] = work(Tokens(tokenizer), path)
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.eos_token = "s"
    others["end of text"] = work(Tokens(tokenizer), path)
    monkeypatch.setattr(tokenize, "FORMAT", 99)
    others["format"] = work(tokens, path)
    assert len({base, *(other.folder for other in others.values())}) == 1 + len(others)


def test_the_date_is_in_the_key_where_the_template_asks_for_it(here, tokens):
    path = written(here / "a.jsonl")
    dated = '{{ strftime_now("%d %m") }}' + tokens.template()
    day = datetime.date(2024, 2, 29)

    def folder(template, today):
        return work(Tokens(tokens.tokenizer, template, today), path).folder

    assert folder(dated, day) == folder(dated, day) != folder(dated, datetime.date(2024, 3, 1)) != folder(dated, None)
    assert folder(None, day) == folder(None, None) == work(tokens, path).folder
    made = list(tokenized(work(Tokens(tokens.tokenizer, dated, day), path, workers=2)))  # workers have that date too
    assert ids(made) == alone(tokens, path)


def test_without_a_date_given_it_is_the_real_one(here, tokens, monkeypatch):
    path, dated = written(here / "a.jsonl"), Tokens(tokens.tokenizer, '{{ strftime_now("%d") }}' + tokens.template())
    today, plain = work(dated, path).folder, work(tokens, path).folder
    monkeypatch.setattr(
        tokenize, "datetime", SimpleNamespace(date=SimpleNamespace(today=lambda: datetime.date(1, 1, 1)))
    )
    assert work(dated, path).folder != today and work(tokens, path).folder == plain


def test_the_cache_is_where_it_was_asked_for(here, tokens, monkeypatch):
    path = written(here / "a.jsonl")
    assert work(tokens, path).folder.is_relative_to(here / "cache" / "tokens")
    assert work(tokens, path, cache=str(here / "own")).folder.is_relative_to(here / "own" / "tokens")
    monkeypatch.delenv("OPTRUSH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "xdg"))
    assert work(tokens, path).folder.is_relative_to(here / "xdg" / "optrush" / "tokens")


# --- what goes wrong


def test_a_full_disk(here, tokens, monkeypatch):
    path = written(here / "a.jsonl")
    (here / "full").mkdir()
    real = files.write_piece

    def write(file, data):
        real(file, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_piece", write)
    with pytest.raises(DataError) as caught:
        maker(tokens, here / "full")(Missing(next(jobs([path], "file")), 0, 0))
    assert caught.value.args == (
        f"to keep the tokenised data in {here / 'full'}", "No space left on device",
        "free space, or set another data.cache",
    )  # fmt: skip
    assert not list((here / "full").iterdir())


def test_a_cache_that_cannot_be_written(here, tokens):
    (here / "file").touch()
    with pytest.raises(DataError, match="File exists") as caught:
        list(tokenized(work(tokens, written(here / "a.jsonl"), cache=str(here / "file"))))
    assert "data.cache" in caught.value.do
    (here / "own").mkdir()
    (here / "own" / "tokens").touch()
    with pytest.raises(DataError, match="Not a directory") as caught:
        list(tokenized(work(tokens, here / "a.jsonl", cache=str(here / "own"))))
    assert "data.cache" in caught.value.do


def test_a_damaged_file_is_named_whichever_worker_meets_it(here, tokens):
    path = written(here / "a.jsonl")
    (here / "b.jsonl.gz").write_bytes(b"no gzip at all" * 100)
    with pytest.raises(DataError, match=r"b\.jsonl\.gz"):
        list(tokenized(work(tokens, path, here / "b.jsonl.gz", workers=2)))


def test_a_worker_that_dies(here, tokens, monkeypatch, capfd):
    given = work(tokens, written(here / "a.jsonl"), workers=2)
    with monkeypatch.context() as patch:
        patch.setattr(pool, "_serve", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(DataError, match=r"was killed by signal 9 \(out of memory\?\)") as caught:
            list(tokenized(given))
    assert "a.jsonl from row 1 on" in caught.value.asked and "data.workers: 1" in caught.value.do
    with monkeypatch.context() as patch:
        patch.setattr(pool, "_serve", lambda *_: exec("raise SystemExit('these are its words')"))
        with pytest.raises(DataError, match="ended with code 1"):
            list(tokenized(given))
    assert "these are its words" in capfd.readouterr().err
    assert ids(tokenized(given)) == alone(tokens, given.files[0])


def test_progress_within_a_job(here, tokens, monkeypatch):
    """Where jobs begin tells how large a row is, so the time left is known before one is done."""
    path = written(here / "a.jsonl", ["soup"] * 900)
    told = Progress(lambda line: None, "tokenising", path.stat().st_size)
    assert told.of_row == 0 and len(list(told.sized(jobs([path], "file")))) > 9
    assert told.of_row == path.stat().st_size / 900
    said, clock = [], iter([0.5, 3.0, 14.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    told.begun, told.next, told.say, told.total = 0.0, 1.0, said.append, 10 * told.of_row
    told.done(0, 4 * told.of_row, fresh=False)  # of an earlier run
    told.done(3)
    told.done(3, 6 * told.of_row)
    assert [line.partition(" a second")[2] for line in said] == [", 70%, 3 s left", ", 100%, 0 s left"]


def test_cores_follow_the_container_s_share(here, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(tokenize, "CPU_SHARE", here / "cpu.max")
    for text, cores in ((None, 64), ("max 100000", 64), ("250000 100000", 3), ("5000 100000", 1), ("", 64)):
        if text is not None:
            (here / "cpu.max").write_text(text)
        assert tokenize.cores() == cores


# --- one at a time


HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_others_wait_and_say_so(here, tokens, monkeypatch):
    monkeypatch.setattr(tokenize, "QUIET_S", 0.0)
    said, given = [], work(tokens, written(here / "a.jsonl"))
    given.folder.mkdir(parents=True)
    command = [sys.executable, "-c", HOLD, str(given.folder / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:

        def say(text):
            said.append(text)
            process.stdin.close()  # the other's work is over

        assert process.stdout.readline() == b"held\n"
        assert ids(tokenized(replace(given, say=say))) == alone(tokens, given.files[0])
    assert said.count("waiting for another process to tokenise the same data") == 1


def test_who_waited_uses_what_the_other_made(here, tokens, monkeypatch):
    given = work(tokens, written(here / "a.jsonl"), workers=2)
    made = tokenized(given)
    first = next(made)  # holds the lock from here on
    no_workers(monkeypatch)
    found, seen = [], threading.Event()
    monkeypatch.setattr(tokenize, "QUIET_S", 0.0)
    other = threading.Thread(target=lambda: found.extend(tokenized(replace(given, say=lambda _: seen.set()))))
    other.start()  # the lock is of the open file, so a thread waits for it as another process would
    assert seen.wait(240)
    mine = [first, *made]
    other.join(240)
    assert found == mine


# --- what is said


def test_progress(monkeypatch):
    """A line after two seconds, and every five from then on."""
    clock = iter([0.0, 1.0, 2.0, 6.5, 7.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    said = []
    told = Progress(said.append, "tokenising", 1000)
    for _ in range(4):
        told.done(300, 100.0)
    assert said == [
        "tokenising: 600 rows, 300 a second, 20%, 8 s left", "tokenising: 1,200 rows, 171 a second, 40%, 10 s left",
    ]  # fmt: skip
    clock = iter([0.0, 9.0])
    told = Progress(said.append, "cleaning", 1.0)
    told.share(0.5, 90)
    assert said[-1] == "cleaning: 90 rows, 10 a second, 50%, 9 s left" and all(re.search("[0-9]", s) for s in said)
