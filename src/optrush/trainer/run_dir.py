"""Check, claim and lock a run folder, truncate its metrics on resuming, and track the best checkpoint."""

from __future__ import annotations

import fcntl
import glob
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from optrush import files
from optrush.config import SECTIONS, Config, Data, StopAfter
from optrush.data import readers
from optrush.data.tokenize import cache_root
from optrush.errors import CheckpointError, ConfigError, DataError
from optrush.files import read_file, read_text
from optrush.launch import launched
from optrush.trainer.checkpoint import FOLDER, Manifest, find_checkpoints, remove_leftovers, verify
from optrush.trainer.distributed import agree, from_first

RUN, METRICS, LOCK, SAMPLES = "run.yaml", "metrics.jsonl", ".lock", "samples.json"
# written under a temporary name, then renamed
_WHOLE = (
    RUN, METRICS, SAMPLES, "report.html", "cleaning.html", "cleaning.json", "model", "model.old", "adapter",
    "adapter.old",
)  # fmt: skip
TRACKER = "tracker"  # files of tracking libraries
DATA = "data.json"  # a record of the data read by the run, to show changes
KNOWN = frozenset(
    {RUN, METRICS, LOCK, FOLDER, DATA, f"{DATA}.tmp", "model", "adapter", "loss.png", "report.html", "quarantine.jsonl"}
    | {SAMPLES, "answers.jsonl", "rollout", "cleaning.html", "cleaning.json", "tensorboard", TRACKER, "tracker.json"}
    | {"tracker.json.tmp"}
    | {f"{name}.tmp" for name in _WHOLE}  # leftovers of a kill
)


_BESIDE = re.compile(
    r"\.(log|out|err|ya?ml)$|^(wandb|logs)$|^\.(nfs|snapshot|ipynb_)"
)  # the user's logs and settings: not removed
_ANYWHERE = {"lost+found", ".gitignore", ".gitkeep", ".DS_Store"}  # allowed in a folder that counts as empty

OCCUPIED = "the folder has a run"


def check_local(asked: str, place: Path | str) -> None:
    """Raise ConfigError for a remote address: runs and exports write to local folders."""
    if re.match(r"[A-Za-z][\w+.-]+:/", str(place)):
        do = "use a local folder, and train.copy_to for the address"
        raise ConfigError(asked, "an address of a remote store", do)


def check_free(output: Path | str, clean: bool, resume: Literal["auto"] | Path | None) -> None:
    """Check that a run may start in `output`; write nothing.

    Raises:
        ConfigError: it is not writable, has a run that is neither resumed nor replaced, or has only other files; a link
            leads out of it; `clean` is set and there are other files, too.
    """
    path = Path(output)
    asked = f"`output: {output}`"
    try:
        existing = next(p for p in (path, *path.absolute().parents) if _exists(p))
    except OSError as error:
        raise ConfigError(asked, f"{error.strerror}", "use another `output`") from None
    if not existing.is_dir():
        raise ConfigError(asked, f"{existing} is not a folder", "use another `output`")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(asked, f"{existing} cannot be written to", "change its permissions, or use another `output`")
    if existing != path:
        return
    names = {p.name for p in path.iterdir()} - {LOCK}
    if clean:
        _check_clean(path, names)
        return
    files.refuse_links(path, asked, KNOWN, {TRACKER})
    if not (RUN in names and names & {METRICS, FOLDER}) and (
        foreign := sorted(name for name in names - KNOWN - _ANYWHERE if not _BESIDE.search(name))
    ):
        found = f"`{foreign[0]}` is in the folder, and optrush did not write it"
        raise ConfigError(asked, found, "name a separate folder, such as `output: runs/first`")
    if resume is None and "model" in names and not names & {RUN, METRICS}:
        raise ConfigError(asked, "the folder has a `model`, which this run would overwrite", "use another `output`")
    if resume is None and (names & {RUN, METRICS} or find_checkpoints(path)):
        do = "continue it: --resume auto; or replace it: `train.overwrite: true`; or another `output`"
        raise ConfigError(asked, OCCUPIED, do)


def check_inputs(output: Path | str, clean: bool, reads: Iterable[Path | str | None]) -> None:
    """Check that the run does not overwrite or delete its inputs, or write into a folder of its data.

    Args:
        reads: files, folders and patterns; missing ones (such as hub ids) are skipped.

    Raises:
        ConfigError: an input is inside the output, or the reverse.
    """
    root = Path(output).resolve()
    for name in (str(r) for r in reads if r is not None):
        pattern = glob.has_magic(name) and not Path(name).exists()
        for path in map(Path, glob.glob(name, recursive=True) if pattern else [name]):
            place = path.resolve()
            inside = place.relative_to(root).parts if place.is_relative_to(root) else None
            written = inside is not None and (clean or (inside[0] in KNOWN if inside else place.is_dir()))
            if path.exists() and written:
                found = f"this run reads {place} and would write to it"
                raise ConfigError(f"`output: {output}`", found, "use another `output`")


SMALL_FILES_bytes = 1 << 20  # for metrics, curves, pages and tokenizer


def saved_copies(config: Config, steps: int) -> tuple[int, int]:
    """Return the maximum number of saves of a run, and of checkpoints on disk at once."""
    every, keep, tried = config.train.save_every, config.train.keep, config.train.eval_cadence(steps)
    period = steps if every is None else _period(every, steps)
    saved = {*range(period, steps + 1, period), steps}
    evaluated = set() if tried is None else set(range(_period(tried, steps), steps, _period(tried, steps)))
    keeps = config.train.best and (every is not None or config.train.stop_after is not None)
    best = bool(evaluated and keeps and config.data.eval is not None)
    saves = len(saved | evaluated if best else saved)
    return saves, min(saves, keep + 1 + best)  # the new one is completed before an old one is removed


def _period(every: float, steps: int) -> int:
    return max(1, round(every * steps)) if every < 1 else int(every)


def free_space(output: Path | str) -> tuple[Path, int]:
    """Return the output's nearest existing folder, and the free bytes of its disk."""
    path = Path(output).absolute()
    folder = next(p for p in (path, *path.parents) if p.is_dir())
    return folder, shutil.disk_usage(folder).free


def check_space(config: Config, steps: int, clean: bool, checkpoint_bytes: int, model_bytes: int) -> None:
    """Check that the disk has room for checkpoints and export; write nothing.

    Args:
        steps: of the full run.
        clean: the output folder is emptied first.
        checkpoint_bytes, model_bytes: of one checkpoint, and of the exported model (0: not exported).

    Raises:
        ConfigError: the disk is too full.
    """
    output, (_, copies) = Path(config.output), saved_copies(config, steps)
    folder, free = free_space(output)
    going = output if clean else output / FOLDER
    held = sum(p.lstat().st_size for p in going.rglob("*") if p.is_file()) if going.is_dir() else 0
    needed = copies * checkpoint_bytes + model_bytes + SMALL_FILES_bytes - held
    if free < needed:
        parts = f"{copies} x {checkpoint_bytes / 2**20:,.1f} MiB of checkpoints"
        parts += f", {model_bytes / 2**20:,.1f} MiB of model/" if model_bytes else ""
        found = f"{free / 2**20:,.1f} MiB free in {folder}, {needed / 2**20:,.1f} MiB needed ({parts})"
        raise ConfigError(f"`output: {output}`", found, "free space, lower train.keep, or use another `output`")


def _exists(path: Path) -> bool:
    """Return whether a path or link exists; raise an error for a too long name or a folder without access."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def prepare_folder(output: Path | str, clean: bool) -> None:
    """Create the folder, and empty it if `clean` is set. One process calls it, with the lock if there is one.

    Raises:
        ConfigError: see `check_free`; its rule for emptying is checked again.
    """
    path = Path(output)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"`output: {output}`", f"{error.strerror}", "use another `output`") from None
    if clean:
        names = {p.name for p in path.iterdir()} - {LOCK}
        _check_clean(path, names)
        for name in sorted(names, key=lambda n: n == RUN):  # the files that identify a run folder last
            entry = path / name
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    remove_leftovers(path / FOLDER)


def _check_clean(path: Path, names: set[str]) -> None:
    if not names:
        return
    asked = f"`train.overwrite: true` in {path}"
    if foreign := sorted(names - KNOWN):
        found = f"`{foreign[0]}` is in the folder, and optrush did not write it"
        raise ConfigError(asked, found, "move it away, or use another `output`")
    if RUN not in names or not names & {METRICS, FOLDER}:
        found = f"no {RUN} with {METRICS} or {FOLDER}: it may not be a run folder"
        raise ConfigError(asked, found, "empty it yourself, or use another `output`")


@contextmanager
def lock(output: Path | str) -> Iterator[None]:
    """Lock a folder for one run. The kernel releases the lock when the process ends.

    Rank 0 takes it for all; the folder must exist.

    Raises:
        ConfigError: on every rank; another run is using it, or it is not writable.
    """
    descriptor, error = None, None
    if launched()[0] == 0:
        try:
            descriptor = os.open(Path(output) / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            error = ConfigError(f"`output: {output}`", "another run is using it", "wait, or use another `output`")
        except OSError as e:
            error = ConfigError(f"`output: {output}`", f"{LOCK}: {e.strerror}", "use another `output`")
    try:
        agree(error)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def write_data_record(output: Path, config: Config, fingerprint: str) -> None:
    """Write a record of a run's training and evaluation files, unless it exists for the same data.

    Args:
        fingerprint: of the data.
    """
    try:
        if files.parse_json(read_file(output / DATA))["fingerprint"] == fingerprint:
            return
    except (OSError, ValueError, KeyError, TypeError):  # missing, from an earlier version, or damaged
        pass
    if record := _data_record(config):
        files.write_whole(output / DATA, json.dumps({"fingerprint": fingerprint, "files": record}) + "\n")


def write_samples(output: Path, samples: Sequence[Mapping[str, Any]]) -> None:
    """Write the samples for the run's page, if any."""
    if samples:
        files.write_whole(output / SAMPLES, json.dumps({"samples": samples}) + "\n")


def _data_record(config: Config) -> list[dict[str, Any]]:
    return readers.record_files(config.data.read_paths, cache_root(config.data.cache))


def data_changes(output: Path, config: Config, before: Mapping[str, Any]) -> str | None:
    """Return the changes of the data since the run wrote its record; None if unknown.

    Args:
        before: the configuration of the checkpoint.
    """
    given = before.get("data")
    if not isinstance(given, Mapping):  # damaged
        return None
    given = {key: value for key, value in given.items() if key in Data.model_fields}
    try:
        old = Data.model_validate(given).model_dump(mode="json")  # an earlier version had fewer keys: use defaults
    except ValidationError:  # values that are no longer valid
        old = {**Data().model_dump(mode="json"), **given}
    new = config.data.model_dump(mode="json")
    keys = {key: (old[key], value) for key, value in new.items() if key not in ("cache", "workers")}
    said = [f"`data.{key}` was {a} and is {b}" for key, (a, b) in keys.items() if a != b]
    if "seed" in before and before["seed"] != config.seed:  # the seed draws held-out rows and `max_samples`
        said.append(f"`seed` was {before['seed']} and is {config.seed}")
    try:
        record = files.parse_json(read_file(output / DATA))
        return "; ".join([*readers.record_changes(record["files"], _data_record(config)), *said])
    except (OSError, ValueError, KeyError, TypeError, DataError):  # from an earlier version, or damaged
        return "; ".join(said) or None


def resume_line(output: Path) -> str:
    """Return how to resume a run that ended early."""
    saved = find_checkpoints(output)
    return f"resume from {saved[0].name} with: --resume auto" if saved else "nothing is saved yet; start again"


def truncate_to_step(metrics: Path, step: int) -> int:
    """Keep the complete lines of steps up to `step`; return the number of removed lines.

    A kill during a write leaves a partial line. The old file stays until the new one is on disk.
    """
    if not metrics.exists():
        return 0
    lines = read_file(metrics).splitlines(keepends=True)
    kept = [line for line in lines if _within(line, step)]
    if len(kept) < len(lines):
        files.write_whole(metrics, kept)
        files.sync_folder(metrics.parent)
    return len(lines) - len(kept)


def _within(line: bytes, step: int) -> bool:
    if not line.endswith(b"\n"):
        return False
    try:
        entry = files.parse_json(line)
    except ValueError:
        return False
    return isinstance(entry, dict) and isinstance(entry.get("step"), int) and entry["step"] <= step


# --- The checkpoint with the best held-out loss.
#
# A committed checkpoint never changes, so the mark is a separate file, `checkpoints/best.json`, written after the
# checkpoint; a kill in between is harmless: metrics.jsonl has the losses.


POINTER = "best.json"


@dataclass(frozen=True)
class Best:
    """Number of updates, and the held-out loss after them."""

    step: int
    eval_loss: float


class BestCheckpoint:
    """Tracks the best checkpoint of a run, equally on every rank."""

    def __init__(self, output: Path, best: Best | None = None) -> None:
        self.output, self.best = output, best
        self.waiting: dict[int, Best] = {}  # by step: evaluated, not saved yet

    def is_best(self, step: int, loss: float) -> bool:
        """Return whether this is the best loss so far; rank 0 decides, because the last bit may differ."""
        known = [*([] if self.best is None else [self.best]), *self.waiting.values()]
        better = math.isfinite(loss) and all(loss < best.eval_loss for best in known)
        better = from_first(json.dumps(better)) == "true"
        if better:
            self.waiting[step] = Best(step, loss)
        return better

    def protected_step(self, step: int) -> int | None:
        """Return the checkpoint to spare when `step` is saved."""
        if step in self.waiting:
            return step
        return None if self.best is None else self.best.step

    def saved(self, step: int) -> None:
        """Note that the checkpoint of `step` is saved."""
        if step in self.waiting:
            self.best = self.waiting.pop(step)
            if launched()[0] == 0:
                _point(self.output, self.best)

    def not_saved(self, step: int) -> None:
        """Note that the checkpoint of `step` could not be saved."""
        self.waiting.pop(step, None)


class Patience:
    """Counts consecutive evaluations without an improvement, for `train.stop_after`; rank 0's losses decide."""

    def __init__(self, rule: StopAfter, losses: Iterable[float | None] = ()) -> None:
        self.rule, self.least, self.since = rule, math.inf, 0
        for loss in losses:
            self.add(math.nan if loss is None else loss)

    def add(self, loss: float) -> None:
        """Count an evaluation of this run, or of the part before its resume."""
        self.since = 0 if loss < self.least - self.rule.min_delta else self.since + 1
        self.least = min(self.least, loss) if math.isfinite(loss) else self.least

    @property
    def exhausted(self) -> bool:
        """Return whether the run ends; the same on every rank."""
        return from_first(json.dumps(self.since >= self.rule.evals)) == "true"


def held_out_losses(output: Path) -> list[float | None]:
    """Return the held-out losses of a run so far, from rank 0's metrics.jsonl, on every rank."""
    evals = []
    if launched()[0] == 0:
        lines = (files.parse_json(line) for line in read_text(output / METRICS).splitlines())
        evals = [line["eval_loss"] for line in lines if "eval_loss" in line]
    losses: list[float | None] = json.loads(from_first(json.dumps(evals)))
    return losses


def comparable(config: Config, fingerprints: Mapping[str, str], before: Manifest) -> bool:
    """Return whether a checkpoint's held-out loss is comparable with the run's: same loss, same data."""
    now = config.model_dump(mode="json", by_alias=True)
    alike = all(before.config.get(key) == now[key] for key in ("objective", *SECTIONS))
    return alike and all(before.fingerprints.get(k) == fingerprints.get(k) for k in ("data", "template", "tokenizer"))


def recall(output: Path, done: int, alike: Callable[[Manifest], bool]) -> tuple[Best | None, list[tuple[Path, str]]]:
    """Return the best intact checkpoint so far, and better but damaged checkpoints with reasons.

    Every rank calls it, after metrics.jsonl was truncated; rank 0 reads.

    Args:
        alike: whether a checkpoint's loss is comparable with the run's.
    """
    report = json.dumps(_recall(output, done, alike) if launched()[0] == 0 else None)
    step, loss, damaged = json.loads(from_first(report))
    best = None if step is None else Best(step, loss)
    if launched()[0] == 0:
        _point(output, best)
    return best, [(Path(path), reason) for path, reason in damaged]


def _recall(
    output: Path, done: int, alike: Callable[[Manifest], bool]
) -> tuple[int | None, float | None, list[tuple[str, str]]]:
    """Return step and loss of the best intact checkpoint up to step `done`, or None twice, and better, damaged ones."""
    losses = dict(_pointed(output))
    for line in read_text(output / METRICS).splitlines():
        entry = files.parse_json(line)
        if entry.get("eval_loss") is not None:
            losses[entry["step"]] = entry["eval_loss"]
    damaged: list[tuple[str, str]] = []
    for step in sorted((s for s in losses if s <= done), key=lambda s: (losses[s], s)):
        path = output / FOLDER / f"step-{step:06d}"
        if not path.is_dir():
            continue
        try:
            if alike(verify(path)):
                return step, losses[step], damaged
        except CheckpointError as error:
            damaged.append((str(path), error.found))
    return None, None, damaged


def _point(output: Path, best: Best | None) -> None:
    path = output / FOLDER / POINTER
    with suppress(OSError):  # disk full: metrics.jsonl has the loss
        if best is None:
            path.unlink(missing_ok=True)
        else:
            files.write_whole(path, json.dumps({"step": best.step, "eval_loss": best.eval_loss}) + "\n")


def _pointed(output: Path) -> list[tuple[int, float]]:
    try:
        best = files.parse_json(read_text(output / FOLDER / POINTER))
        return [(int(best["step"]), float(best["eval_loss"]))]
    except (OSError, ValueError, KeyError, TypeError):
        return []
