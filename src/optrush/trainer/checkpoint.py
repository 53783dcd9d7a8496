"""Save and load checkpoints that no kill can damage: commit, manifest, verification, resharding.

`<output>/checkpoints/step-000012/` holds `rank-0.safetensors`, ... and `manifest.json`. It is committed once it has
this name. The rename comes last: every rank writes, syncs and hashes in `step-000012.tmp-<nonce>/`; rank 0 adds the
manifest, syncs, renames, syncs the parent, and only then prunes. A folder is renamed before it is emptied. So a name
without `.tmp-` means that all files were once on disk; the hashes show whether they still are.

Each rank saves its boxes and loads the overlaps with the saved boxes: the number of ranks and the sharding may differ
between runs. No pickle: only safetensors and JSON.
"""

from __future__ import annotations

import copy
import datetime
import hashlib
import json
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

import optrush
from optrush import files
from optrush.config import nearest
from optrush.errors import CheckpointError, NeedsError, RunError, first_line
from optrush.files import open_file, read_file
from optrush.hardware import GIB
from optrush.launch import launched
from optrush.optim.paged import Registered
from optrush.technique import library
from optrush.trainer.distributed import agree, exchange, from_first, gather

if TYPE_CHECKING:
    from optrush.trainer.trainer import Trainer

# --- The manifest: the saved tensors, their files, and the files' hashes.
#
# It has the hash of every file and its own: it must equal, byte for byte, the serialization of its content. So any
# flipped bit is detected, and a manifest of another step by its folder's name.

FORMAT: Literal[1] = 1
FOLDER, MANIFEST = "checkpoints", "manifest.json"
COMMITTED = re.compile(r"step-(\d{6,})\Z")
LEFT = re.compile(r"step-\d{6,}\.tmp-[0-9a-f]+\Z")
_SHARD = re.compile(r"rank-\d+\.safetensors\Z")  # a manifest cannot name other files


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class SavedBox(_Strict):
    """A box of a tensor, and the file that stores it under the tensor's name."""

    file: str
    offset: list[int]
    shape: list[int]


class Entry(_Strict):
    dtype: str
    shape: list[int]
    pieces: list[SavedBox]


class File(_Strict):
    sha256: str
    bytes: int


class Manifest(_Strict):
    """The content of manifest.json; `path` is its folder."""

    path: Path = Field(exclude=True)
    format: Literal[1]
    step: int
    run_id: str
    position: int
    skipped: int
    skipped_in_a_row: int
    ranks: int
    state: dict[str, dict[str, Any]]
    versions: dict[str, str | None]
    config: dict[str, Any]
    fingerprints: dict[str, str]
    files: dict[str, File]
    tensors: dict[str, Entry]
    digest: str


def find_checkpoints(output: Path | str) -> list[Path]:
    """Return the committed checkpoints of a run folder, newest first; they may be damaged."""
    folder = Path(output) / FOLDER
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if COMMITTED.match(p.name) and p.is_dir()), key=step_of, reverse=True)


def step_of(path: Path) -> int:
    match = COMMITTED.match(path.name)
    assert match is not None, f"{path} is no committed checkpoint"
    return int(match[1])


def verify(path: Path) -> Manifest:
    """Return a checkpoint's manifest after hashing every byte of every file.

    Raises:
        CheckpointError: naming the damaged file and the damage.
    """
    name = MANIFEST
    try:
        manifest = parse_manifest(path, read_file(path / MANIFEST))
        for name, written in manifest.files.items():
            size = (path / name).stat().st_size
            if size != written.bytes:
                raise damaged(path, name, f"has {size} bytes, {written.bytes} were written")
            with open_file(path / name) as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != written.sha256:
                    raise damaged(path, name, "does not match its sha256")
    except FileNotFoundError:
        raise damaged(path, name if path.is_dir() else path.name, "does not exist") from None
    except OSError as error:
        raise damaged(path, name, f"cannot be read: {error.strerror}") from None
    return manifest


def parse_manifest(path: Path, text: bytes) -> Manifest:
    """Parse the manifest in `text`, read from folder `path`.

    Raises:
        CheckpointError: it is damaged, or belongs to another format or checkpoint.
    """
    try:
        body = files.parse_json(text)
    except ValueError:
        raise damaged(path, MANIFEST, "is not JSON" if text.strip() else "is empty") from None
    if not isinstance(body, dict) or "digest" not in body:
        raise damaged(path, MANIFEST, "has no digest")
    if body.get("format") != FORMAT:
        raise damaged(path, MANIFEST, f"has format {body.get('format')!r}; this version reads {FORMAT}")
    if body["digest"] != manifest_digest(body) or encode_manifest(body) != text:
        raise damaged(path, MANIFEST, "does not match its digest")
    try:
        manifest = Manifest(path=path, **body)
    except ValidationError as error:
        raise damaged(path, MANIFEST, f"is not a manifest: {error.errors()[0]['loc']}") from None
    if path.name != f"step-{manifest.step:06d}":
        raise damaged(path, MANIFEST, f"belongs to step {manifest.step}")
    for name in manifest.files:
        if not _SHARD.match(name):
            raise damaged(path, MANIFEST, f"names the file {name!r}, which belongs to no rank")
    for name, entry in manifest.tensors.items():
        if wrong := uncovered(entry):
            raise damaged(path, MANIFEST, f"{name}: {wrong}")
    return manifest


def uncovered(entry: Entry) -> str | None:
    """Return an error if a tensor's pieces overlap or do not cover all of it; else None."""
    boxes = [(tuple(p.offset), tuple(p.shape)) for p in entry.pieces]
    for i, (offset, shape) in enumerate(boxes):
        if len(shape) != len(entry.shape) or any(o < 0 or o + n > w for o, n, w in zip(offset, shape, entry.shape)):
            return f"a piece of {shape} at {offset} is outside {tuple(entry.shape)}"
        if any(overlap(offset, shape, *other) is not None for other in boxes[:i]):
            return "two pieces overlap"
    saved, total = sum(torch.Size(shape).numel() for _, shape in boxes), torch.Size(entry.shape).numel()
    return None if saved == total else f"{saved} of {total} values were saved"


def damaged(path: Path, file: str, what: str) -> CheckpointError:
    others = "resume from an intact one: --resume auto finds the newest"
    return CheckpointError(f"the checkpoint {path}", f"{file} {what}", others)


def encode_manifest(body: Mapping[str, Any]) -> bytes:
    return (json.dumps(body, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def text_of(manifest: Manifest) -> bytes:
    return encode_manifest(manifest.model_dump(mode="json"))


def manifest_digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(encode_manifest({k: v for k, v in body.items() if k != "digest"})).hexdigest()


# --- This rank's box of each tensor

Ints = tuple[int, ...]
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Slice:
    """This rank's box of one saved tensor, and whether this rank saves it."""

    name: str
    local: Tensor  # shares storage: loading copies into it
    whole: Ints
    offset: Ints
    saves: bool

    @property
    def shape(self) -> Ints:
        return tuple(self.local.shape)


def slices(trainer: Trainer) -> list[Slice]:
    """Return this rank's parameters as `param/<name>` and optimizer states as `state/<state>/<name>`."""
    states = {} if trainer.optimizer is None else trainer.optimizer.state()
    boxes = []
    for t in trainer.trained:
        local, full, offset, first = t.local, t.full_shape, t.offset, trainer.counts(t)
        # The first rank saves one of equal copies; an empty shard has no bytes to save.
        saves = first and (local.numel() > 0 or tuple(local.shape) == full)
        boxes.append(Slice(f"param/{t.name}", local, full, offset, saves))
        for kind, state in states.get(t.name, {}).items():
            name, shape = f"state/{kind}/{t.name}", tuple(state.shape)
            if shape == tuple(local.shape):
                boxes.append(Slice(name, state, full, offset, saves))
            elif not shape or (tuple(local.shape) == full and shape[0] != local.shape[0]):  # equal on every rank
                boxes.append(Slice(name, state, shape, (0,) * len(shape), first and not any(offset)))
            else:  # blocks inside rows: sharded like the parameter's rows
                sharded_alike = shape[0] == local.shape[0] and tuple(local.shape[1:]) == full[1:]
                assert sharded_alike, f"{name}: sharded unlike its rows"
                flat = (0,) * (len(shape) - 1)
                boxes.append(Slice(name, state, (full[0], *shape[1:]), (offset[0], *flat), saves))
    return boxes


def overlap(a_offset: Ints, a_shape: Ints, b_offset: Ints, b_shape: Ints) -> list[tuple[int, int]] | None:
    """Return the overlap of two boxes as (first, end) per dimension of the full tensor; None if empty."""
    shared = [(max(p, q), min(p + n, q + m)) for p, n, q, m in zip(a_offset, a_shape, b_offset, b_shape, strict=True)]
    return None if any(first >= end for first, end in shared) else shared


# --- Saving


class SaveFailed(OSError):
    """A save failed on all ranks; training can continue, and the last good checkpoint is unchanged."""


@dataclass(frozen=True)
class Meta:
    """The loop state in a checkpoint, without tensors; equal on every rank."""

    run_id: str
    position: int  # position in the data of the next step (data/sampler.py)
    skipped: int = 0  # updates skipped so far
    skipped_in_a_row: int = 0
    fingerprints: Mapping[str, str] = field(default_factory=dict)  # of config, tokenizer, template, data, ...


def fresh_id() -> str:
    """Return a new run's id, the same on every rank."""
    return from_first(secrets.token_hex(8))


@dataclass(frozen=True)
class Snapshot:
    """The input of a save: this rank's tensors or copies, and the manifest without its file entries."""

    folder: Path
    step: int
    rank: int
    mine: Sequence[Slice]
    body: Mapping[str, Any]
    keep: int
    spared: int | None  # the checkpoint of this step is not pruned
    copied: Callable[[], None] = lambda: None  # waits until the copies are complete


def save(trainer: Trainer, step: int, meta: Meta, spared: int | None = None) -> Path:
    """Write and commit a checkpoint after `step` updates; every rank calls it.

    Saving the same state again keeps the committed folder. The checkpoint of step `spared` is not pruned.

    Raises:
        SaveFailed: on every rank, if any rank's disk failed; the partial save is removed.
    """
    return _write(_snapshot(trainer, step, meta, spared))


def _snapshot(trainer: Trainer, step: int, meta: Meta, spared: int | None) -> Snapshot:
    """Return this rank's tensors to save and the manifest's values after `step` updates."""
    body: dict[str, Any] = {
        "format": FORMAT,
        "step": step,
        "run_id": meta.run_id,
        "position": meta.position,
        "skipped": meta.skipped,
        "skipped_in_a_row": meta.skipped_in_a_row,
        "ranks": trainer.world.ranks,
        "state": copy.deepcopy({name: state.save() for name, state in trainer.state.items()}),
        "versions": {
            "optrush": optrush.__version__, "torch": torch.__version__, "transformers": library("transformers"),
        },
        "config": trainer.config.model_dump(mode="json", by_alias=True),
        "fingerprints": dict(meta.fingerprints),
    }  # fmt: skip
    folder, mine = Path(trainer.config.output) / FOLDER, [s for s in trainer.storage.read(slices(trainer)) if s.saves]
    return Snapshot(folder, step, trainer.world.rank, mine, body, trainer.config.train.keep, spared)


def _write(snapshot: Snapshot, cancelled: Callable[[], bool] = lambda: False) -> Path:
    """Write and commit a snapshot; raises like `save`. Any thread may call it: it uses no collective."""
    folder, step, first = snapshot.folder, snapshot.step, snapshot.rank == 0
    final = folder / f"step-{step:06d}"
    half = folder / f"{final.name}.tmp-{secrets.token_hex(4)}"  # all ranks use rank 0's

    def attempt(work: Callable[[], Any], all_ranks: bool = False) -> list[Any]:
        return _attempt(work if first or all_ranks else lambda: None, half, cancelled)

    half = folder / attempt(lambda: _begin(folder, half))[0]
    reports = attempt(lambda: _write_own(snapshot, half, cancelled), all_ranks=True)
    attempt(lambda: _commit(snapshot, reports, half, final))
    attempt(lambda: _prune(folder, step, snapshot.keep, snapshot.spared))
    return final


LIMIT_S = 3600.0  # for another rank's part of a save; `train.timeout` does not limit writing


def _attempt(work: Callable[[], Any], half: Path, cancelled: Callable[[], bool]) -> list[Any]:
    """Do this rank's part of a save and return every rank's result; if one rank fails, all fail."""
    answer: dict[str, Any]
    try:
        answer = {"came to": work()}
    except OSError as error:
        answer = {"failed": str(error)}
    texts = exchange(json.dumps(answer), LIMIT_S, "save", cancelled)
    if texts is None:
        found = "it was cancelled" if cancelled() else f"a rank did not finish within {LIMIT_S:g} s"
        raise RunError(f"the checkpoint {half}", found, "check the disks, then resume: --resume auto")
    answers = [json.loads(text) for text in texts]
    failed = [f"rank {rank}: {a['failed']}" for rank, a in enumerate(answers) if "failed" in a]
    if failed:
        if launched()[0] == 0 and half.is_dir():
            with suppress(OSError):  # the next start or save removes the rest
                files.remove_tree(half)
        raise SaveFailed("; ".join(failed))
    return [a["came to"] for a in answers]


def _begin(folder: Path, half: Path) -> str:
    for made in (folder.parent, folder):
        if not made.is_dir():
            files.make_folder(made)
            files.sync_folder(made.parent)
    remove_leftovers(folder)
    files.make_folder(half)
    return half.name


def remove_leftovers(folder: Path) -> None:
    """Remove the leftovers of killed saves from the checkpoints folder."""
    for left in list(folder.glob("*.tmp-*")):
        if LEFT.match(left.name):
            files.remove_tree(left)


def _write_own(snapshot: Snapshot, half: Path, cancelled: Callable[[], bool]) -> dict[str, Any]:
    """Write this rank's file, if it has tensors to save; return a report of its contents for rank 0."""
    snapshot.copied()
    if not snapshot.mine:
        return {}
    name = f"rank-{snapshot.rank}.safetensors"
    sha, size = write_tensors(half / name, [(s.name, s.local) for s in snapshot.mine], cancelled)
    pieces = [[s.name, DTYPES[s.local.dtype], s.whole, s.offset, s.shape] for s in snapshot.mine]
    return {"file": name, "sha256": sha, "bytes": size, "pieces": pieces}


def write_tensors(
    path: Path, tensors: Sequence[tuple[str, Tensor]], cancelled: Callable[[], bool] = lambda: False
) -> tuple[str, int]:
    """Write a safetensors file, one tensor in host memory at a time; return (sha256, size).

    The library's writer needs all bytes at once and does not sync. The format is 8 bytes with the header's length, a
    JSON header and the raw little-endian tensors; wide elements first, to align each tensor.
    """
    tensors = sorted(tensors, key=lambda pair: -pair[1].element_size())
    header: dict[str, object] = {}
    at = 0
    for name, t in tensors:
        header[name] = {"dtype": DTYPES[t.dtype], "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
        at += t.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)

    def pieces() -> Iterator[bytes | memoryview]:
        yield len(head).to_bytes(8, "little") + head
        for _, t in tensors:
            if cancelled():
                raise OSError("it was cancelled")
            yield t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data

    return files.write_new(path, pieces())


def _commit(snapshot: Snapshot, reports: list[Any], half: Path, final: Path) -> None:
    """Write the manifest from every rank's report, and rename `half` to `final`; keep an equal intact `final`."""
    body: dict[str, Any] = {
        **snapshot.body,
        "files": {r["file"]: {"sha256": r["sha256"], "bytes": r["bytes"]} for r in reports if r},
        "tensors": _table(reports),
    }
    body["digest"] = manifest_digest(body)
    text = encode_manifest(body)
    for name, file in body["files"].items():
        if (half / name).stat().st_size != file["bytes"]:  # also raises if the ranks share no disk
            raise OSError(f"{half / name} has another length than was written")
    files.write_new(half / MANIFEST, [text])
    files.sync_folder(half)
    if final.is_dir():
        with suppress(CheckpointError):  # damaged: replace it
            if text_of(verify(final)) == text:
                files.remove_tree(half)
                return
        # The run resumed from an earlier step, because of damage or --resume FOLDER; if a kill comes between the next
        # two lines, that checkpoint still exists.
        files.rename_file(final, half.with_name(half.name + "0"))
    files.rename_file(half, final)
    files.sync_folder(final.parent)


def _table(reports: Iterable[Any]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for report in filter(None, reports):
        for name, dtype, full, offset, shape in report["pieces"]:
            entry = table.setdefault(name, {"dtype": dtype, "shape": full, "pieces": []})
            assert (entry["dtype"], entry["shape"]) == (dtype, full), f"{name}: the ranks disagree about it"
            entry["pieces"].append({"file": report["file"], "offset": offset, "shape": shape})
    for name, entry in table.items():
        wrong = uncovered(Entry.model_validate(entry))
        assert wrong is None, f"{name}: {wrong}"
    return table


def _prune(folder: Path, step: int, keep: int, spared: int | None) -> None:
    """Keep the newest and the spared checkpoints; remove checkpoints of later steps, from before a rollback."""
    committed = find_checkpoints(folder.parent)
    kept = [c for c in committed if step_of(c) <= step][:keep]
    for old in reversed([c for c in committed if c not in kept and step_of(c) != spared]):
        files.rename_file(old, old.with_name(f"{old.name}.tmp-{secrets.token_hex(4)}"))
    files.sync_folder(folder)
    remove_leftovers(folder)


# --- Saving during training


class HostCopy:
    """Host memory for this rank's saved tensors, allocated once; pinned for GPU tensors."""

    def __init__(self, trainer: Trainer) -> None:
        """Allocate it, or raise NeedsError."""
        self.device = trainer.world.device
        size = sum(s.local.nbytes for s in slices(trainer) if s.saves)
        left = trainer.host_memory.left_bytes
        if left is not None and size > left:
            raise _no_room(size, f"it has {left / GIB:.1f} GiB left for each process")
        trainer.host_memory.take(size)
        try:
            pinned = self.device.type == "cuda" and size > 0
            self.page = Registered(self.device).page(size) if pinned else torch.empty(size, dtype=torch.uint8)
        except (RuntimeError, OSError) as error:
            raise _no_room(size, first_line(error)) from None

    @torch.no_grad()
    def of(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with copies of its tensors; `copied` waits for pending copies."""
        mine, end = [], 0
        for s in sorted(snapshot.mine, key=lambda s: -s.local.element_size()):  # to align each tensor
            begin, end = end, end + s.local.nbytes
            mine.append(replace(s, local=self.page[begin:end].view(s.local.dtype).view(s.shape)))
            mine[-1].local.copy_(s.local, non_blocking=True)  # in stream order: before the next update
        if self.device.type != "cuda":
            return replace(snapshot, mine=mine)
        done = torch.cuda.current_stream(self.device).record_event()
        return replace(snapshot, mine=mine, copied=done.synchronize)


def _no_room(size: int, found: str) -> NeedsError:
    asked = f"`train.save: async`: {size / GIB:.1f} GiB of host memory to copy the saved tensors"
    do = "set train.save: sync, run fewer processes per machine, or use a smaller model"
    return NeedsError(asked, f"not enough memory: {found}", do)


class Saver:
    """Saves the checkpoints of a run: in the loop, or in a background thread (`train.save`).

    One save runs at a time. The thread calls no collective: only training may order them.
    """

    def __init__(self, trainer: Trainer) -> None:
        """Allocate the host memory for a thread's copies; every rank calls it.

        Raises:
            NeedsError: on every rank, if a machine has too little memory.
        """
        self.trainer, self.host, refusal = trainer, None, None
        try:
            if trainer.config.train.save == "async":
                self.host = HostCopy(trainer)
        except NeedsError as error:
            refusal = error
        agree(refusal)
        self.settled: Callable[[int, SaveFailed | None], None] = lambda step, failure: None
        self.thread: threading.Thread | None = None
        self.step, self.failure = 0, list[BaseException]()  # for the thread
        self.cancelled = threading.Event()

    def save(self, step: int, meta: Meta, spared: int | None = None) -> None:
        """Start a save after the running one. `settled` gets the result; for a thread, in `settle`."""
        self.settle(wait=True)
        snapshot, failure = _snapshot(self.trainer, step, meta, spared), None
        if self.host is None:
            try:
                _write(snapshot)
            except SaveFailed as error:
                failure = error
            self.settled(step, failure)
            return
        self.step, self.failure = step, []
        self.thread = threading.Thread(target=self._write, args=[self.host.of(snapshot)], daemon=True)
        self.thread.start()

    def _write(self, snapshot: Snapshot) -> None:
        try:
            _write(snapshot, self.cancelled.is_set)
        except Exception as error:
            self.failure.append(error)  # raised in the loop

    def settle(self, wait: bool = False) -> None:
        """Pass the result of a finished thread to `settled`.

        Raises:
            RunError: the save failed for another reason than the disk.
        """
        if self.thread is None or (self.thread.is_alive() and not wait):
            return
        self.thread.join()
        self.thread, failure = None, next(iter(self.failure), None)
        if failure is None or isinstance(failure, SaveFailed):
            self.settled(self.step, failure)
        elif isinstance(failure, RunError):
            raise failure
        else:
            asked, found = f"the checkpoint of step {self.step}", f"{type(failure).__name__}: {failure}"
            raise RunError(asked, found, "resume from the last checkpoint with: --resume auto") from failure

    def give_up(self) -> None:
        """Cancel the running save; the next start removes its partial files."""
        self.cancelled.set()
        if self.thread is not None:
            self.thread.join(GIVING_UP_S)


GIVING_UP_S = 5.0  # to finish the current tensor


# --- Resuming


def choose(output: Path | str, resume: Literal["auto"] | Path | None) -> tuple[Manifest | None, list[tuple[Path, str]]]:
    """Return the manifest to resume from (None: from the start), and the skipped checkpoints with reasons.

    Rank 0 reads and decides for all.

    Raises:
        CheckpointError: on every rank; the given path is damaged, or all checkpoints are.
    """
    if resume is None:
        return None, []
    assert dist.is_initialized() or launched()[1] == 1, "ranks agree on a checkpoint in a process group"
    answer = json.loads(from_first(json.dumps(_decide(Path(output), resume) if launched()[0] == 0 else {})))
    if answer["error"] is not None:
        raise CheckpointError(*answer["error"])
    manifest = None if answer["path"] is None else parse_manifest(Path(answer["path"]), answer["text"].encode())
    return manifest, [(Path(p), reason) for p, reason in answer["passed"]]


def first_date(manifest: Manifest | None) -> datetime.date | None:
    """Return the date for a run's chat template, from its first start; None if it uses none.

    Raises:
        CheckpointError: the manifest has an invalid date.
    """
    date = None if manifest is None else manifest.fingerprints.get("date")
    if manifest is None or date is None:
        return None
    try:
        return datetime.date.fromisoformat(date)
    except ValueError:
        raise damaged(manifest.path, MANIFEST, f"has the date {date!r}") from None


def _decide(output: Path, resume: Literal["auto"] | Path) -> dict[str, Any]:
    """Return path and manifest text of the newest intact checkpoint or the given one, or an error, as JSON values."""
    candidates = find_checkpoints(output) if resume == "auto" else [Path(resume).resolve()]
    answer: dict[str, Any] = {"error": None, "path": None, "text": "", "passed": []}
    for path in candidates:
        try:
            return answer | {"path": str(path), "text": text_of(verify(path)).decode()}
        except CheckpointError as error:
            if resume != "auto":
                return answer | {"error": error.args}
            answer["passed"].append([str(path), error.found])
    if candidates:
        reasons = "; ".join(f"{Path(path).name}: {found}" for path, found in answer["passed"])
        todo = "to start over set `train.overwrite: true` without --resume, or use another `output`"
        answer["error"] = [f"--resume auto in {output}", f"no checkpoint is intact: {reasons}", todo]
    return answer


def restore(
    trainer: Trainer, found: Manifest | Path, fingerprints: Mapping[str, str], allow: frozenset[str] = frozenset(),
    data_changes: Callable[[], str | None] = str,
) -> Manifest:  # fmt: skip
    """Fill parameters, optimizer states and `trainer.state` from a checkpoint of any sharding.

    Args:
        found: the result of `choose` (verified), or a folder (verified here).
        fingerprints: of this run; each must be unchanged, unless `allow` names it.
        data_changes: returns a description of the data's changes.

    Raises:
        CheckpointError: on every rank; the checkpoint is damaged, from another run, or has other tensors.
    """
    manifest = found if isinstance(found, Manifest) else choose(found.parent.parent, found)[0]
    assert manifest is not None, "a folder has a manifest, or choose raises"

    names = _names_everywhere(trainer)

    def fill() -> None:
        _check_fingerprints(manifest, fingerprints, allow, data_changes)
        _check_names(manifest, "state", set(manifest.state), set(trainer.state))
        _load(trainer, manifest, names)

    _agreed(fill)
    for name, state in trainer.state.items():
        state.load(manifest.state[name])
    return manifest


def put_back(trainer: Trainer, step: int) -> None:
    """Restore only the trained parameters after `step` updates; every rank calls it.

    Raises:
        CheckpointError: on every rank; that checkpoint is damaged.
    """
    manifest, _ = choose(trainer.config.output, Path(trainer.config.output) / FOLDER / f"step-{step:06d}")
    assert manifest is not None, "a folder has a manifest, or choose raises"
    load_parameters(trainer, manifest)


def load_parameters(trainer: Trainer, manifest: Manifest) -> None:
    """Fill only the trained parameters, from a checkpoint of any number of ranks; every rank calls it.

    Raises:
        CheckpointError: on every rank; it has other parameters, or a file cannot be read.
    """
    names = _names_everywhere(trainer)
    _agreed(lambda: _load(trainer, manifest, names, "param/"))
    if trainer.exported != "param/":
        _agreed(lambda: _load_averages(trainer, manifest, names))


def _load_averages(trainer: Trainer, manifest: Manifest, names: set[str]) -> None:
    """Fill the trained parameters from their exported averages, if an update was averaged."""
    begun = next((name for name in manifest.tensors if name.startswith(f"{trainer.exported[:-1]}_begun/")), None)
    if begun is None:
        raise _foreign(manifest, f"it has no averages ({trainer.exported})")
    with safe_open(manifest.path / manifest.tensors[begun].pieces[0].file, "pt") as file:
        if file.get_tensor(begun).item():
            _load(trainer, manifest, names, "param/", trainer.exported)


def _agreed(work: Callable[[], None]) -> None:
    """Do this rank's part; raise the first rank's CheckpointError on every rank."""
    error: CheckpointError | None = None
    try:
        work()
    except CheckpointError as e:
        error = e
    agree(error)


def check_plan(manifest: Manifest, steps: int, position: int, allow: frozenset[str] = frozenset()) -> str | None:
    """Check that the run continues with the first row after the checkpoint.

    Returns:
        The lost or repeated rows, if allowed; else None.

    Args:
        steps: of the full run.
        position: start of the step after the checkpoint.
        allow: if it has "data" or "order", samples may be lost or repeated.

    Raises:
        CheckpointError: samples would be lost or repeated, or the run would end before or right after the
            checkpoint.
    """
    asked, n = f"to resume {manifest.path}", manifest.step
    if n > steps:
        found = f"this run has {steps} steps, the checkpoint was saved after step {n}"
        raise CheckpointError(asked, found, "raise `train.steps` or `train.epochs`")
    if position == manifest.position:
        return None
    found = f"step {n + 1} would begin at row {position}, the checkpoint ended before row {manifest.position}"
    if not allow & {"data", "order"}:
        do = "restore `batch`, `seed` and the row layout, or accept lost or repeated rows: --allow-change order"
        raise CheckpointError(asked, found, do)
    rows = abs(position - manifest.position)
    what = f"{rows} row{'s' * (rows != 1)} of this run's size {'lost' if position > manifest.position else 'repeated'}"
    if n == steps and position > manifest.position:
        found = f"{found}, and this run has {steps} steps: it would end immediately, {what}"
        raise CheckpointError(asked, found, "raise `train.steps` or `train.epochs`, or restore `batch`")
    return f"step {n + 1} begins at row {position}, the checkpoint ended before row {manifest.position}: {what}"


def _check_fingerprints(
    manifest: Manifest, now: Mapping[str, str], allow: frozenset[str], data_changes: Callable[[], str | None]
) -> None:
    """Raise CheckpointError for a changed fingerprint outside `allow`, or for an unknown name in `allow`."""
    then = manifest.fingerprints
    for name in sorted(allow):
        if name not in {*then, *now}:
            raise CheckpointError(f"--allow-change {name}", "no such field", nearest(name, {*then, *now}))
    causes = {name for name in ("tokenizer", "template") if then.get(name) != now.get(name)}  # these also change `data`
    for name in [*sorted(causes - allow), *sorted({*then, *now} - allow - causes)]:
        if then.get(name) != now.get(name):
            old, new = (digests.get(name, "absent") for digests in (then, now))
            found = f"`{name}` was {_DIGEST.sub(_short, old)} and is {_DIGEST.sub(_short, new)}"
            if name in causes:
                what = "chat template" if name == "template" else "tokenizer.json or tokenizer_config.json"
                found = f"the model's {what} changed: the same rows have other tokens ({found})"
            elif name == "data" and (changes := data_changes()):
                found = f"`data` changed: {changes}"
            elif name == "data" and causes and changes is not None:
                continue  # the same rows; the tokenizer's change is accepted
            do = f"restore the old value, or accept the change: --allow-change {name}"
            raise CheckpointError(f"to resume {manifest.path}", found, do)


_DIGEST = re.compile(r"[0-9a-f]{64}")


def _short(digest: re.Match[str]) -> str:
    return f"{digest[0][:12]}..."


def _check_names(manifest: Manifest, what: str, saved: set[str], wanted: set[str]) -> None:
    for wrong, how in ((wanted - saved, "is missing"), (saved - wanted, "is not in this run")):
        if wrong:
            name = min(wrong)
            where = manifest.tensors[name].pieces[0].file if name in manifest.tensors else MANIFEST
            raise _foreign(manifest, f"{where}: the {what} `{name}` {how}")


def _foreign(manifest: Manifest, found: str) -> CheckpointError:
    todo = "resume with the techniques and the model it was saved with, or start over in another `output`"
    return CheckpointError(f"to resume {manifest.path}", found, todo)


def _names_everywhere(trainer: Trainer) -> set[str]:
    """Return the tensor names over all ranks: pipeline stages have different parameters."""
    held = gather(json.dumps([s.name for s in slices(trainer)]))
    return {name for names in held for name in json.loads(names)}


@torch.no_grad()
def _load(trainer: Trainer, manifest: Manifest, names: set[str], kind: str = "", saved_as: str = "") -> None:
    """Fill the tensors named `kind`... from those saved as `saved_as`... (float32 averages)."""
    mine = [s for s in slices(trainer) if s.name.startswith(kind)]
    saved = {name for name in manifest.tensors if name.startswith(kind)}
    _check_names(manifest, "tensor", saved, {name for name in names if name.startswith(kind)})
    with ExitStack() as stack:
        opened: dict[str, Any] = {}
        for s in mine:
            s = s if saved_as in ("", kind) else replace(s, name=saved_as + s.name.removeprefix(kind))
            entry = manifest.tensors[s.name]
            dtype = DTYPES[s.local.dtype] if saved_as in ("", kind) else entry.dtype
            if (tuple(entry.shape), entry.dtype) != (s.whole, dtype):
                found = f"is {tuple(entry.shape)} {entry.dtype}, this run needs {s.whole} {dtype}"
                raise _foreign(manifest, f"{entry.pieces[0].file}: the tensor `{s.name}` {found}")
            with trainer.storage.filling(s) as box:
                for piece in entry.pieces:
                    shared = overlap(box.offset, box.shape, tuple(piece.offset), tuple(piece.shape))
                    if shared is None:
                        continue
                    try:
                        if piece.file not in opened:
                            opened[piece.file] = stack.enter_context(safe_open(manifest.path / piece.file, "pt"))
                        _copy(opened[piece.file], box, piece, shared)
                    except (OSError, SafetensorError) as error:
                        raise damaged(manifest.path, piece.file, f"cannot be read: {error}") from None


def _copy(file: Any, s: Slice, piece: SavedBox, shared: list[tuple[int, int]]) -> None:
    if not shared:  # a scalar
        s.local.copy_(file.get_tensor(s.name))
        return
    source = tuple(slice(a - o, b - o) for (a, b), o in zip(shared, piece.offset))
    target = tuple(slice(a - o, b - o) for (a, b), o in zip(shared, s.offset))
    s.local[target].copy_(file.get_slice(s.name)[source])
