"""Copy a run's folder to an fsspec store (s3://, gs://, hf://, ...), and fetch it back: `train.copy_to`.

A copied checkpoint is complete once it has its manifest, copied last. Only then are dropped checkpoints removed.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

from optrush import console
from optrush.config import Config, scrubbed
from optrush.data.hub import open_store
from optrush.errors import ConfigError, RunError, UserError, one_line
from optrush.files import parse_json, read_file
from optrush.trainer.checkpoint import FOLDER, MANIFEST, find_checkpoints
from optrush.trainer.run_dir import KNOWN, LOCK, RUN

LATE = ("model", "adapter")  # folders written at the end of a run


class Store:
    """The remote store of one run's copies."""

    def __init__(self, config: Config) -> None:
        """Open the store. Raises UserError: the address has no scheme, or its library is missing."""
        address = config.train.copy_to
        assert address is not None
        self.asked = f"`train.copy_to: {scrubbed(address)}`"
        if "://" not in address:
            raise ConfigError(self.asked, "no address", "write an address such as s3://bucket/run, or remove the key")
        self.output = Path(config.output)
        self.files, root = open_store(self.asked, address)
        self.root = root.rstrip("/")

    def steps(self) -> dict[str, list[str]]:
        """Return the files of each complete remote checkpoint, by folder name."""
        by_step = dict[str, list[str]]()
        for name in self.names(FOLDER):
            step, _, file = name.removeprefix(f"{FOLDER}/").partition("/")
            if file:
                by_step.setdefault(step, []).append(name)
        return {step: names for step, names in by_step.items() if f"{FOLDER}/{step}/{MANIFEST}" in names}

    def names(self, folder: str = "") -> list[str]:
        """Return the run's remote files, by their paths in its folder."""
        self.files.invalidate_cache()
        place = f"{self.root}/{folder}".rstrip("/")
        paths = self.files.find(place) if self.files.exists(place) else []
        names = (os.path.relpath(name, self.root) for name in paths)
        return [name for name in names if name.split("/")[0] in KNOWN]

    def put(self, name: str) -> None:
        """Copy a file of the run folder."""
        target = f"{self.root}/{name}"
        self.files.makedirs(os.path.dirname(target), exist_ok=True)
        self.files.put_file(str(self.output / name), target)

    def put_checkpoint(self, folder: Path) -> None:
        """Copy a checkpoint, its manifest last; remove remote checkpoints that the run dropped."""
        files = sorted((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.name == MANIFEST)
        for file in files:
            self.put(str(file.relative_to(self.output)))
        held = {p.name for p in find_checkpoints(self.output)}
        for step in self.steps().keys() - held:
            self.files.rm(f"{self.root}/{FOLDER}/{step}", recursive=True)

    def put_rest(self, late: bool) -> None:
        """Copy the files other than checkpoints; with `late` also the exported model."""
        for file in sorted(p for p in self.output.rglob("*") if p.is_file() and not p.is_symlink()):
            first, *more = file.relative_to(self.output).parts
            if first == LOCK or ".tmp" in first or (first == FOLDER and len(more) > 1) or (first in LATE and not late):
                continue
            self.put(str(file.relative_to(self.output)))


class Copier:
    """Copies checkpoints in a thread during the run, and the rest of the folder at its end (rank 0).

    A failure during the run is logged, and the next checkpoint retries; a failure at the end is an error, after the run
    is complete on this machine.
    """

    def __init__(self, store: Store, anew: bool) -> None:
        """anew: remove the copies of an earlier run."""
        self.store, self.anew = store, anew
        self.queue = SimpleQueue[Path | None]()
        self.copied = set[str]()
        self.thread = threading.Thread(target=self._work, name="copies", daemon=True)

    def begin(self) -> None:
        """Copy the configuration; raise ConfigError if the store is not writable."""
        with _reported(self.store):
            for name in self.store.names() if self.anew else ():
                self.store.files.rm(f"{self.store.root}/{name}")
            self.store.put(RUN)

    def __enter__(self) -> Copier:
        self.thread.start()
        return self

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Do nothing."""

    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Do nothing."""

    def save(self, step: int, checkpoint: Path) -> None:
        """Queue a checkpoint for copying."""
        self.queue.put(checkpoint)

    def _work(self) -> None:
        while (folder := self.queue.get()) is not None:
            try:
                self._copy(folder)
            except FileNotFoundError:  # replaced by a newer one
                continue
            except Exception as error:  # from the store's library
                again = "training continues; the next checkpoint retries"
                console.say(f"{self.store.asked}: {folder.name} was not copied ({_reason(error)}); {again}")

    def _copy(self, last: Path | None, late: bool = False) -> None:
        for folder in find_checkpoints(self.store.output)[::-1] if last is None or late else [last]:
            if folder.name not in self.copied:
                self.store.put_checkpoint(folder)
                self.copied.add(folder.name)
        self.store.put_rest(late)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is KeyboardInterrupt:  # a second Ctrl-C: leave at once
            return
        self.queue.put(None)
        console.say(f"copying to {self.store.asked.split(': ', 1)[1].rstrip('`')}")
        self.thread.join()
        try:
            self._copy(None, late=True)
        except Exception as error:  # from the store's library
            do = f"the run is complete on this machine: copy {self.store.output} yourself"
            if kind is None:
                raise RunError(self.store.asked, _reason(error), do) from error
            console.say(f"{self.store.asked}: {_reason(error)}; {do}")


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {scrubbed(one_line(str(error)))}"


def copier(config: Config, resume: Literal["auto"] | Path | None) -> Copier | None:
    """Return the copier of a run, if `train.copy_to` is set."""
    return None if config.train.copy_to is None else Copier(Store(config), resume is None and config.train.overwrite)


def check_copies(config: Config, resume: Literal["auto"] | Path | None) -> None:
    """Check that the store has no other run's copies; write nothing.

    Raises:
        UserError: it has other copies, or it cannot be read.
    """
    if config.train.copy_to is None:
        return
    store = Store(config)
    with _reported(store):
        taken, steps = store.files.exists(f"{store.root}/{RUN}"), sorted(store.steps())
        theirs = store.files.cat_file(f"{store.root}/{FOLDER}/{steps[-1]}/{MANIFEST}") if steps else b""
    manifests = (read_file(c / MANIFEST) for c in find_checkpoints(config.output)[:1])
    if resume is None and taken and not config.train.overwrite:
        do = "resume with --resume auto, use another address, or set train.overwrite: true"
        raise ConfigError(store.asked, "the address already has a run", do)
    if resume is not None and theirs and any(_run(text) != _run(theirs) for text in manifests):
        raise ConfigError(store.asked, "the address has another run", "use another address")


def _run(manifest: bytes) -> object:
    try:
        return parse_json(manifest)["run_id"]
    except (ValueError, KeyError, TypeError):  # a damaged manifest counts as this run's
        return None


def fetch_copies(config: Config, ranks: int, resume: Literal["auto"] | Path) -> None:
    """Fetch a run's copies into an output folder without checkpoints, for `--resume auto`.

    Args:
        ranks: processes that call it; several fetch nothing.
        resume: the checkpoint to resume; a folder needs no copies.

    Raises:
        UserError: the store cannot be read, or several processes would write the folder at once.
    """
    if config.train.copy_to is None or resume != "auto" or find_checkpoints(config.output):
        return
    store = Store(config)
    with _reported(store):
        steps = store.steps()
        if not steps:
            return
        if ranks > 1:
            found = f"copies of a run, but {config.output} has none, and there are {ranks} processes"
            do = f"fetch them first: optrush train CONFIG --resume auto --dry-run, or copy them to {config.output}"
            raise ConfigError(store.asked, found, do)
        console.say(f"fetching {len(steps)} checkpoint{'s' * (len(steps) > 1)} of {store.asked}")
        for name in store.names():
            if name.split("/")[0] not in (FOLDER, *LATE) or name.count("/") == 1:
                _get(store, name, store.output / name)
        for step, names in steps.items():
            half = store.output / FOLDER / f"{step}.tmp-copy"
            shutil.rmtree(half, ignore_errors=True)
            for name in names:
                _get(store, name, half / Path(name).name)
            os.rename(half, store.output / FOLDER / step)


def _get(store: Store, name: str, target: Path) -> None:
    if not target.resolve().is_relative_to(store.output.resolve()):
        raise ConfigError(store.asked, f"a file named {name}", "use the address of a copied run")
    target.parent.mkdir(parents=True, exist_ok=True)
    store.files.get_file(f"{store.root}/{name}", str(target))


@contextmanager
def _reported(store: Store) -> Iterator[None]:
    """Convert an error of the store's library to a ConfigError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise ConfigError(store.asked, _reason(error), "check the address, the network and your permissions") from error
