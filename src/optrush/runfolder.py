"""A run's folder: whether a run may begin there, emptying it, one run at a time, and metrics cut back on resuming."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from optrush import shards
from optrush.distributed import agree
from optrush.errors import ConfigError
from optrush.launch import launched
from optrush.manifest import FOLDER, LEFT, find

RUN, METRICS, LOCK = "run.yaml", "metrics.jsonl", ".lock"
_CUT = METRICS + ".tmp"
# written beside, then renamed
_WHOLE = (RUN, "report.html", "cleaning.html", "cleaning.json", "model", "model.old", "adapter", "adapter.old")
KNOWN = frozenset(
    {RUN, METRICS, LOCK, _CUT, FOLDER, "model", "adapter", "loss.png", "report.html", "quarantine.jsonl"}
    | {"cleaning.html", "cleaning.json", "tensorboard", "tracker", "tracker.json", "tracker.json.tmp"}
    | {f"{name}.tmp" for name in _WHOLE}  # what a kill leaves
)


def prepare(output: Path | str, clean: bool, resume: Literal["auto"] | Path | None) -> None:
    """Whether a run may begin in `output`; looks only, writes nothing.

    Raises:
        ConfigError: it cannot be written, it holds a run that nobody asked to resume or to replace, or `clean` is
            asked for where other things lie too.
    """
    path = Path(output)
    asked = f"`output: {output}`"
    try:
        existing = next(p for p in (path, *path.absolute().parents) if _lies(p))
    except OSError as error:
        raise ConfigError(asked, f"{error.strerror}", "take another `output`") from None
    if not existing.is_dir():
        raise ConfigError(asked, f"{existing} is no folder", "take another `output`")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(asked, f"{existing} cannot be written to", "change its permissions, or take another `output`")
    if existing != path:
        return
    names = {p.name for p in path.iterdir()} - {LOCK}
    if clean:
        _check_clean(path, names)
    elif resume is None and "model" in names and not names & {RUN, METRICS}:
        raise ConfigError(asked, "a `model` lies there, which this run would replace", "take another `output`")
    elif resume is None and (names & {RUN, METRICS} or find(path)):
        raise ConfigError(
            asked,
            "a run lies there",
            "continue it: --resume auto; or replace it: `train.clean: true`; or another `output`",
        )


def put(path: Path, text: str) -> None:
    """Writes a small file whole or not at all."""
    new = path.with_name(path.name + ".tmp")
    new.unlink(missing_ok=True)
    shards.write_file(new, iter([text.encode()]))
    shards.rename(new, path)


def keep_apart(output: Path | str, clean: bool, reads: Iterable[Path | str | None]) -> None:
    """Refuses a run that would write over what it reads, or empty it away.

    Raises:
        ConfigError: a model or data file lies where the run writes.
    """
    own = Path(output).resolve()
    for path in (Path(r).resolve() for r in reads if r is not None):
        inside = path == own / "model" or (clean and path.is_relative_to(own))
        if path.exists() and inside:
            raise ConfigError(
                f"`output: {output}`", f"{path}, which this run reads, lies where it writes", "take another `output`"
            )


def _lies(path: Path) -> bool:
    """Like lexists, but a name that is too long or lies behind a closed door is an error, not an absence."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def claim(output: Path | str, clean: bool) -> None:
    """Makes the folder; empties it where `clean` asks for it. One process calls it, holding the lock if there is one.

    Raises:
        ConfigError: see `prepare`, whose rule for emptying is asked again here, in the moment it matters.
    """
    path = Path(output)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"`output: {output}`", f"{error.strerror}", "take another `output`") from None
    if clean:
        names = {p.name for p in path.iterdir()} - {LOCK}
        _check_clean(path, names)
        for name in sorted(names, key=lambda n: n == RUN):  # what shows that it is a run's folder goes last
            entry = path / name
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    for left in (path / FOLDER).glob("*.tmp-*"):
        if LEFT.match(left.name):
            shards.remove(left)


def _check_clean(path: Path, names: set[str]) -> None:
    if not names:
        return
    asked = f"`train.clean: true` in {path}"
    if foreign := sorted(names - KNOWN):
        raise ConfigError(
            asked, f"`{foreign[0]}` lies there, which is no run's", "move it away, or take another `output`"
        )
    if RUN not in names or not names & {METRICS, FOLDER}:
        found = f"no {RUN} with {METRICS} or {FOLDER}: it may be no run's folder"
        raise ConfigError(asked, found, "empty it yourself, or take another")


@contextmanager
def lock(output: Path | str) -> Iterator[None]:
    """One run at a time in a folder. The kernel drops the lock when the process ends, however it ends.

    Rank 0 takes it for all; the folder must exist.

    Raises:
        ConfigError: on every rank; another run is at work there, or the folder cannot be written to.
    """
    descriptor, error = None, None
    if launched()[0] == 0:
        try:
            descriptor = os.open(Path(output) / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            error = ConfigError(f"`output: {output}`", "another run is at work there", "wait for it, or take another")
        except OSError as e:
            error = ConfigError(f"`output: {output}`", f"{LOCK}: {e.strerror}", "take another `output`")
    try:
        agree(error)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def cut_back(metrics: Path, step: int) -> int:
    """Leaves the whole lines of steps up to `step`, as if nothing had happened after; returns how many went.

    A line is torn when the run was killed while it wrote it. The old file stays until the new one is on the disk.
    """
    if not metrics.exists():
        return 0
    lines = metrics.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if _within(line, step)]
    if len(kept) < len(lines):
        new = metrics.with_name(_CUT)
        new.unlink(missing_ok=True)
        shards.write_file(new, iter([b"".join(kept)]))
        shards.rename(new, metrics)
        shards.sync_folder(metrics.parent)
    return len(lines) - len(kept)


def _within(line: bytes, step: int) -> bool:
    if not line.endswith(b"\n"):
        return False
    try:
        found = json.loads(line)
    except ValueError:
        return False
    return isinstance(found, dict) and isinstance(found.get("step"), int) and found["step"] <= step
