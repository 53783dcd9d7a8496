"""Tokenising that is killed at any moment, or finds the disk full: what is done stays, and nothing is done twice."""

import errno
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from optrush import files
from optrush.config import parse_config
from optrush.data import tokenize
from optrush.data.chat_template import Tokens
from optrush.data.schema import NO_RULES
from optrush.data.tokenize import Missing, TokenizeWork, jobs, tokenized
from optrush.errors import DataError

from harness import run, told, wait_until
from trials import alive

KILLS = 3
SMALL_bytes = 20_000  # of a job

TEXT = "{model: tiny, objective: sft, data: {path: x, workers: 2}, output: o}"
# What a rank does, in a process that can be killed with all of its workers; without torch it begins sooner. After so
# many shards it takes no more, and its workers come to a stop a few jobs later.
RANK = f"""
import sys; sys.modules["torch"] = None; sys.path.insert(0, sys.argv[1])
from pathlib import Path
from transformers import PreTrainedTokenizerFast
from optrush.config import parse_config
from optrush.data import tokenize
from optrush.data.chat_template import Tokens
tokenize.CHUNK_bytes = {SMALL_bytes}
tokens = Tokens(PreTrainedTokenizerFast.from_pretrained(sys.argv[2]))
work = tokenize.TokenizeWork(parse_config({TEXT!r}, "x"), tokens, (Path(sys.argv[3]),))
for n, path in enumerate(tokenize.tokenized(work), 1):
    print(path.name, flush=True)
    if n == int(sys.argv[4]):
        sys.stdin.read()
"""


def given(model, path):
    return TokenizeWork(parse_config(TEXT, "x"), Tokens(AutoTokenizer.from_pretrained(model)), (path,))


@pytest.fixture
def model(tiny_folder):
    return tiny_folder


@pytest.fixture
def path(tmp_path, monkeypatch):
    """Half a MB of rows, no two of them alike."""
    monkeypatch.setattr(tokenize, "CHUNK_bytes", SMALL_bytes)
    monkeypatch.setenv("OPTRUSH_CACHE", str(tmp_path / "cache"))
    chance = random.Random(0)
    words = ["stir", "soup", "simmer", "salt", "leek", "and", "then", "wait"]
    rows = [" ".join(chance.choices(words, k=chance.randint(5, 400))) for _ in range(500)]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return file


def rank(model, path, most=0):
    command = [sys.executable, "-c", RANK, str(Path(tokenize.__file__).parents[2]), str(model), str(path), str(most)]
    return subprocess.Popen(command, start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def shards(folder):
    """The committed shards, each with what would change if it were made again."""
    return {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in folder.glob("*.safetensors")}


def reference(model, path):
    """The names, which hold the digests, of what one process makes without being disturbed."""
    work = given(model, path)
    made = [s for job in jobs(work.files, "file") for s in tokenize.shards(work.parsed(job), work.tokens, "assistant")]
    return [tokenize.shard_digest(s) for s in made]


def digests(names):
    return [name.removesuffix(".safetensors").split("-")[2] for name in names]


def test_killed_at_any_moment(model, path):
    """All processes at once, as when a machine goes down; each start goes on where the last one was stopped."""
    chance, folder, kept, survived = random.Random(1), given(model, path).folder, dict[str, tuple[int, int]](), 0
    for i in range(KILLS):
        process = rank(model, path, len(kept) + 2)
        assert process.stdout is not None
        for _ in range(1 if i % 3 == 1 else len(kept) + 1):  # before anything new is there, or at work
            process.stdout.readline()
        time.sleep(chance.random() * 0.1)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        now = shards(folder)
        assert kept.items() <= now.items(), "a finished shard was made again"
        assert all(tokenize.intact(folder / name) for name in now)
        survived, kept = survived + (len(now) > len(kept)), now
    want = reference(model, path)
    assert survived > 1 and len(kept) < len(want), "the kills came too early or too late"
    process = rank(model, path)
    names = process.communicate()[0].decode().split()
    assert process.returncode == 0 and digests(names) == want
    assert kept.items() <= shards(folder).items() and set(names) == set(shards(folder))
    assert not list(folder.glob(f"*{tokenize.TEMPORARY}*"))
    told("tokenising is killed", KILLS, {"shards": len(names)})


@pytest.mark.parametrize("call", ["write_piece", "sync_file", "rename_file"])
@pytest.mark.parametrize("when", ["before", "half", "after"])
def test_killed_at_every_call_that_changes_the_disk(model, path, call, when, monkeypatch):
    """One process, no workers: a job of three shards, killed at each such call of the second."""
    work, folder = given(model, path), path.parent / "shards"
    folder.mkdir()
    monkeypatch.setattr(tokenize, "SHARD_tok", 2000)
    monkeypatch.setattr(tokenize, "BATCH_rows", 4)
    job = next(jobs(work.files, "file"))
    whole = [tokenize.shard_digest(s) for s in tokenize.shards(work.parsed(job), work.tokens, "assistant")]
    make = tokenize.ShardMaker(work.tokens, "assistant", "file", None, NO_RULES, folder)
    assert len(whole) > 2
    real: Callable[..., Any] = getattr(files, call)

    def end(*args):
        if not list(folder.glob("*.safetensors")):
            return real(*args)
        if when == "half" and call == "write_piece":
            data = bytes(args[1])
            real(args[0], data[: len(data) // 2])
            args[0].flush()
        elif when == "after":
            real(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    def dying():
        setattr(files, call, end)
        make(Missing(job, 0, 0))

    assert run(dying) == -signal.SIGKILL
    store = tokenize.ShardStore(folder)
    done, kept = store.begun[0], shards(folder)
    assert len(done) == (2 if (call, when) == ("rename_file", "after") else 1) and 0 not in store.whole
    skip = sum(tokenize.open_shard(p).rows for p in done)
    names, _ = make(Missing(job, skip, len(done)))
    assert digests([p.name for p in done] + names) == whole and kept.items() <= shards(folder).items()


def test_workers_end_with_the_process_that_started_them(model, path):
    """Killed alone, it leaves nobody behind who goes on, and no lock: the next one begins at once."""
    process = rank(model, path, 1)
    assert process.stdout is not None
    process.stdout.readline()
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert workers
    process.kill()
    process.communicate()
    wait_until(lambda: not any(alive(int(pid)) for pid in workers), "no worker lives on")
    kept = shards(given(model, path).folder)
    list(tokenized(given(model, path)))
    assert kept.items() <= shards(given(model, path).folder).items()
    told("the process that tokenises is killed, its workers not", 1, {"workers": len(workers)})


def test_the_disk_is_full(model, path):
    """A limit on the size of files stands for the disk: the same call fails, in the worker, with another number."""

    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        work = given(model, path)
        with pytest.raises(DataError) as caught:
            list(tokenized(work))
        assert caught.value.found == os.strerror(errno.EFBIG) and "data.cache" in caught.value.do
        assert not list(work.folder.glob("*.safetensors")) + list(work.folder.glob(f"*{tokenize.TEMPORARY}*"))

    assert run(limited) == 0
    assert list(tokenized(given(model, path)))
