"""Tokenised once: the shards of some data, made where they are missing, by as many processes as there are cores.

A shard is committed when it is whole (shard.py), so whoever comes after a kill goes on where the dead one stopped.
Where the files, the tokenizer, its template or a setting that changes ids or masks differ, so does the key, which is
the folder's name. T, and what is done with documents longer than T, is a view on the shards and not part of it.

One process of a machine tokenises, under a lock that dies with it; the others wait for the lock. No collective runs
meanwhile: a rank that tokenises for an hour makes no other rank time out.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optrush import __version__, errors
from optrush.config import Run
from optrush.data import files, shard, worker
from optrush.data.read import PARQUET, Chunk, chunks, form
from optrush.data.tokenising import Job, Kept, identity, no_room, shards
from optrush.errors import DataError
from optrush.objectives import learnt

if TYPE_CHECKING:
    from optrush.data.chat import Tokens

CHUNK_bytes = 16 << 20  # of a job; data smaller than this stays in memory
PACKED = 4  # times its bytes is the text of a compressed file, about
AHEAD = 2  # jobs a worker has waiting, so that it never does
QUIET_S, EVERY_S = 2.0, 5.0  # what is over sooner is not told; how often the rest is
POLL_S = 0.2
# The interpreter of a worker must not find torch: importing it takes longer and more memory than tokenising.
WORKER = (
    "import sys; sys.modules['torch'] = None; sys.argv[1] in sys.path or sys.path.insert(0, sys.argv[1]); "
    "from optrush.data.worker import main; main()"
)
# One thread each. In a pool of one the tokenizer is a third faster than without a pool (measured, tokenizers 0.23).
ALONE = {
    "TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1",
    "TRANSFORMERS_VERBOSITY": "error", "CUDA_VISIBLE_DEVICES": "",
}  # fmt: skip

Say = Callable[[str], None]
Made = Path | shard.Shard  # a shard on the disk, or one that was never written


def silent(_: str) -> None:
    """Says nothing."""


@dataclass(frozen=True)
class Work:
    """What is tokenised, and how."""

    run: Run
    tokens: Tokens
    files: tuple[Path, ...]
    kept: Kept = None  # by file
    cleaning: str = ""  # names `kept`: a digest
    say: Say = silent

    @property
    def folder(self) -> Path:
        """Where its shards lie."""
        said = {
            "format": shard.FORMAT, "files": files.fingerprint(self.files, root(self.run.data.cache)),
            "tokens": identity(self.tokens), "train_on": learnt(self.run), "text_rows": self.run.data.text_rows,
            "cleaning": self.cleaning,
            "made_by": [__version__, *map(version, ("tokenizers", "transformers", "jinja2"))],
        }  # fmt: skip
        return root(self.run.data.cache) / "tokens" / hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]


def root(cache: str | None) -> Path:
    """The folder for what is made of data: the one given, `$OPTRUSH_CACHE`, or one in the user's cache."""
    if cache is not None or "OPTRUSH_CACHE" in os.environ:
        return Path(cache or os.environ["OPTRUSH_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "optrush"


def tokenised(work: Work, most: int | None = None) -> Generator[Made]:
    """The shards of the data in order, each as soon as it is there; whoever has seen enough closes the iterator.

    Args:
        most: rows that are needed, so that of small data no more are tokenised.

    Raises:
        DataError: a file cannot be read, or its shards not be written.
    """
    told = Telling(work.say, "tokenising", sum(path.stat().st_size for path in work.files))
    if small(work.files):
        data = work.run.data
        for job in jobs(work.files, data.text_rows):
            yield from shards(job, work.tokens, learnt(work.run), data.text_rows, work.kept, most=most, told=told.done)
        return
    marks = [files.mark(path) for path in work.files]
    folder = work.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise no_room(folder, error) from None
    store = Store(folder)
    number = yield from store.ready(0)
    if number == store.jobs:
        return
    with alone(folder, work.say):
        shard.sweep(folder)
        store.refresh()  # others may have worked meanwhile
        number = yield from store.ready(number)
        if number != store.jobs:
            for paths in made(work, store, told, number, marks):
                yield from paths


def small(paths: Sequence[Path]) -> bool:
    """Whether the data fits into one chunk, and so into memory."""
    return sum(path.stat().st_size * (1 if plain(path) else PACKED) for path in paths) < CHUNK_bytes


def plain(path: Path) -> bool:
    """Whether the file's bytes are its text."""
    suffix, packing = form(path) or ("", "")
    return not packing and suffix != PARQUET


class Store:
    """What lies in a folder of shards."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sound: set[Path] = set()  # read and found intact
        self.refresh()

    def refresh(self) -> None:
        """Looks again. What is damaged counts as missing; made again it gets the same name."""
        paths = sorted(self.folder.glob("*.safetensors"))
        fresh = [path for path in paths if path not in self._sound]
        with ThreadPoolExecutor(cores()) as pool:  # hashing leaves Python's lock alone
            sound = dict(zip(fresh, pool.map(shard.intact, fresh)))
        self._sound |= {path for path, ok in sound.items() if ok}
        self.jobs = next((int(path.name.split("-")[1]) for path in self.folder.glob("complete-*")), None)
        self.begun: dict[int, list[Path]] = {}  # the shards of each job from its first on, without a gap
        for path in paths:
            job, piece = map(int, path.name.split("-")[:2])
            if path in self._sound and piece == len(self.begun.setdefault(job, [])):
                self.begun[job].append(path)
        self.whole = {job: held for job, held in self.begun.items() if held and shard.mapped(held[-1]).last}

    def ready(self, number: int) -> Generator[Path, None, int]:
        """The shards of the jobs from `number` on, up to one of which some are missing; its number."""
        while number in self.whole:
            yield from self.whole[number]
            number += 1
        return number

    def close(self, jobs: int) -> None:
        """Notes that there are no more jobs than these."""
        shard.sync_folder(self.folder)
        (self.folder / f"complete-{jobs}").touch()
        shard.sync_folder(self.folder)


def jobs(paths: Sequence[Path], text_rows: str) -> Iterator[Job]:
    """The data in jobs of about CHUNK_bytes, from the files alone: a part of a large file, or several small ones."""
    number, held, size = 0, list[tuple[int, Chunk]](), 0.0
    whole: float
    for file, path in enumerate(paths):
        whole, parts = path.stat().st_size, chunks(path, CHUNK_bytes, text_rows)
        if path.suffix.lower() == PARQUET:  # its parts are row groups: cheap to list, and not counted in bytes
            listed = list(parts)
            whole, parts = whole / len(listed), iter(listed)
        for chunk in parts:
            part = chunk.end - chunk.start if plain(path) and chunk.end is not None else whole
            if held and size + part > CHUNK_bytes:
                yield Job(number, tuple(held), size)
                number, held, size = number + 1, [], 0.0
            held.append((file, chunk))
            size += part
    if held:
        yield Job(number, tuple(held), size)


def made(work: Work, store: Store, told: Telling, first: int, marks: Sequence[list[int]]) -> Iterator[list[Path]]:
    """The shards of each job from `first` on, in order, made by worker processes where they are missing.

    Args:
        marks: of each file before its contents were hashed: one that changes meanwhile belongs to another folder.
    """
    waiting: deque[tuple[Job, Future[tuple[list[Path], int]] | None]] = deque()
    most = work.run.data.workers or cores()
    todo, number = jobs(work.files, work.run.data.text_rows), 0
    with Workers(work, store, min(most, 1 + int(told.total) // CHUNK_bytes), marks) as workers:
        while True:
            while len(waiting) < AHEAD * most and (job := next(todo, None)) is not None:
                number += 1
                if job.number >= first:
                    waiting.append((job, None if job.number in store.whole else workers.start(job)))
            if not waiting:
                break
            job, future = waiting.popleft()
            paths, rows = (store.whole[job.number], 0) if future is None else future.result()
            told.done(rows, job.size_bytes, fresh=future is not None)
            yield paths
    store.close(number)


class Workers:
    """Worker processes, each of which does one job after another."""

    def __init__(self, work: Work, store: Store, count: int, marks: Sequence[list[int]]) -> None:
        self.store = store
        self._marks = marks
        data = work.run.data
        self._order = worker.order(work.tokens, work.kept, learnt(work.run), data.text_rows, store.folder)
        self._count = count
        self._pool = ThreadPoolExecutor(count)  # a thread waits for each
        self._processes: list[subprocess.Popen[str]] = []
        self._idle: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()

    def __enter__(self) -> Workers:
        command = [sys.executable, "-P", "-c", WORKER, str(Path(errors.__file__).parents[1])]
        for _ in range(self._count):
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **ALONE}, encoding="utf-8"
            )
            self._processes.append(process)
            self._idle.put(process)
            _tell(process, self._order)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        self._pool.shutdown(cancel_futures=True)
        for process in self._processes:
            process.communicate()
        shard.sweep(self.store.folder)  # what they were about to write

    def start(self, job: Job) -> Future[tuple[list[Path], int]]:
        """Makes what is missing of a job: the paths of all its shards, and the rows that were read for it."""
        return self._pool.submit(self._make, job)

    def _make(self, job: Job) -> tuple[list[Path], int]:
        there = self.store.begun.get(job.number, [])
        skip = sum(made.rows + made.cleaned for made in map(shard.mapped, there))
        chunks = [(file, str(chunk.file), chunk.first, chunk.start, chunk.end) for file, chunk in job.chunks]
        marks = [self._marks[file] for file, _ in job.chunks]
        process = self._idle.get()
        _tell(process, {"number": job.number, "chunks": chunks, "skip": skip, "piece": len(there), "marks": marks})
        assert process.stdout is not None
        line = process.stdout.readline()
        self._idle.put(process)  # a dead one too: whoever gets it sees that, and nobody waits for ever
        if not line:
            raise _died(job, process.wait())
        answer = json.loads(line)
        if "error" in answer:
            kind, *said = answer["error"]
            raise getattr(errors, kind)(*said)
        return [*there, *(self.store.folder / name for name in answer["names"])], answer["rows"]


def _tell(process: subprocess.Popen[str], what: dict[str, Any]) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # who reads its answer sees that it is dead
        process.stdin.write(json.dumps(what) + "\n")
        process.stdin.flush()


def _died(job: Job, code: int) -> DataError:
    by = f"was killed by signal {-code}" if code < 0 else f"ended with code {code} (what it said stands above)"
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    at = f"{job.chunks[0][1].file} from row {job.chunks[0][1].first} on"
    do = "start again: what is done is kept; `data.workers: 1` needs the least memory"
    return DataError(f"to tokenise {at}", f"the process that did it {by}{hint}", do)


class Telling:
    """Says how far some work is, unless it is over soon."""

    def __init__(self, say: Say, what: str, total: float) -> None:
        self.say, self.what, self.total = say, what, total
        self.rows, self.passed, self.fresh = 0, 0.0, 0.0
        self.begun = self.last = time.monotonic()

    def done(self, rows: int, size: float = 0.0, fresh: bool = True) -> None:
        """So many rows more, and so much of the total; `fresh`: it took time."""
        self.rows += rows
        self.passed += size
        self.fresh += size if fresh else 0.0
        now = time.monotonic()
        if now - self.begun < QUIET_S or now - self.last < EVERY_S:
            return
        self.last = now
        text = f"{self.what}: {self.rows:,} rows, {self.rows / (now - self.begun):,.0f} a second"
        if self.fresh:
            left = (self.total - self.passed) / self.fresh * (now - self.begun)
            text += f", {self.passed / self.total:.0%}, {left:.0f} s left"
        self.say(text)

    def share(self, share: float, rows: int) -> None:
        """The same of the whole work up to now."""
        self.done(rows - self.rows, share * self.total - self.passed)


@contextmanager
def alone(folder: Path, say: Say) -> Iterator[None]:
    """Holds the folder's lock, which no other process of this machine holds then; dies with this process."""
    begun = time.monotonic()
    told = False
    try:
        with (folder / "lock").open("a") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not told and time.monotonic() - begun > QUIET_S:
                        told = True
                        say("waiting for another process that tokenises the same data")
                    time.sleep(POLL_S)
            yield
    except OSError as error:
        raise no_room(folder, error) from error


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0))
