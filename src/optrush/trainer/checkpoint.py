"""Save and load checkpoints that a kill at any moment cannot damage: commit, manifest, verification, resharding.

`<output>/checkpoints/step-000012/` holds `rank-0.safetensors`, ... and `manifest.json`. It is committed when it has
that name, for the name is given last: every rank writes, syncs and hashes into `step-000012.tmp-<nonce>/`, rank 0 adds
the manifest, syncs, renames, syncs the parent, and only then prunes. A folder is renamed away before it is emptied.
So a name without `.tmp-` means that the whole was on the disk once; the hashes show whether it still is.

Each rank saves the boxes it holds, and loads the overlaps of whatever boxes were saved: the number of ranks and how
the weights are sharded may differ from run to run. No pickle anywhere: safetensors and JSON.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open

import optrush
from optrush.config import nearest
from optrush.errors import CheckpointError
from optrush.launch import launched
from optrush.technique import library
from optrush.trainer import storage
from optrush.trainer.distributed import agree, from_first, gather

if TYPE_CHECKING:
    from optrush.trainer.trainer import Trainer


# --- A checkpoint's manifest: what was saved, under which bytes, and whether those bytes are still there.
#
# The manifest carries the hash of every file, and its own: it must be, byte for byte, the one text that its content is
# written as. So a flipped bit anywhere is found, in blanks too, and a manifest of another step by its folder's name.


FORMAT: Literal[1] = 1
FOLDER, MANIFEST = "checkpoints", "manifest.json"
COMMITTED = re.compile(r"step-(\d{6,})\Z")
LEFT = re.compile(r"step-\d{6,}\.tmp-[0-9a-f]+\Z")
_SHARD = re.compile(r"rank-\d+\.safetensors\Z")  # a manifest's names lead nowhere else


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Piece(_Strict):
    """A box of a tensor, and the file that holds it under the tensor's name."""

    file: str
    offset: list[int]
    shape: list[int]


class Entry(_Strict):
    dtype: str
    shape: list[int]
    pieces: list[Piece]


class File(_Strict):
    sha256: str
    bytes: int


class Manifest(_Strict):
    """manifest.json as it was written; `path` is the folder it was read from."""

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


def find(output: Path | str) -> list[Path]:
    """The committed checkpoints of a run's folder, newest first; whether they are intact is another question."""
    folder = Path(output) / FOLDER
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if COMMITTED.match(p.name) and p.is_dir()), key=step_of, reverse=True)


def step_of(path: Path) -> int:
    match = COMMITTED.match(path.name)
    assert match is not None, f"{path} is no committed checkpoint"
    return int(match[1])


def verify(path: Path) -> Manifest:
    """The manifest of an intact checkpoint: every byte of every file was read and hashed.

    Raises:
        CheckpointError: naming the file, and what is wrong with it.
    """
    try:
        text = (path / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise damaged(path, MANIFEST if path.is_dir() else path.name, "does not exist") from None
    except OSError as error:
        raise damaged(path, MANIFEST, f"cannot be read: {error.strerror}") from None
    manifest = parse(path, text)
    for name, file in manifest.files.items():
        shard = path / name
        try:
            size = shard.stat().st_size
            if size != file.bytes:
                raise damaged(path, name, f"has {size} bytes, {file.bytes} were written")
            if storage.sha256(shard) != file.sha256:
                raise damaged(path, name, "holds other bytes than were written (its sha256 differs)")
        except FileNotFoundError:
            raise damaged(path, name, "does not exist") from None
        except OSError as error:
            raise damaged(path, name, f"cannot be read: {error.strerror}") from None
    return manifest


def parse(path: Path, text: bytes) -> Manifest:
    """The manifest in `text`, read from folder `path`.

    Raises:
        CheckpointError: it is damaged, of another format, or of another checkpoint.
    """
    try:
        body = json.loads(text)
    except ValueError:
        raise damaged(path, MANIFEST, "is no JSON" if text.strip() else "is empty") from None
    if not isinstance(body, dict) or "digest" not in body:
        raise damaged(path, MANIFEST, "has no digest")
    if body.get("format") != FORMAT:
        raise damaged(path, MANIFEST, f"has format {body.get('format')!r}; this version reads {FORMAT}")
    if body["digest"] != digest(body) or encode(body) != text:
        raise damaged(path, MANIFEST, "holds other bytes than were written (its digest differs)")
    try:
        manifest = Manifest(path=path, **body)
    except ValidationError as error:
        raise damaged(path, MANIFEST, f"is no manifest: {error.errors()[0]['loc']}") from None
    if path.name != f"step-{manifest.step:06d}":
        raise damaged(path, MANIFEST, f"is the one of step {manifest.step}")
    for name in manifest.files:
        if not _SHARD.match(name):
            raise damaged(path, MANIFEST, f"names the file {name!r}, which is no rank's")
    for name, entry in manifest.tensors.items():
        if wrong := uncovered(entry):
            raise damaged(path, MANIFEST, f"{name}: {wrong}")
    return manifest


def uncovered(entry: Entry) -> str | None:
    """What is wrong with a tensor's pieces: together they must be the whole, and no two may overlap."""
    boxes = [(tuple(p.offset), tuple(p.shape)) for p in entry.pieces]
    for i, (offset, shape) in enumerate(boxes):
        if len(shape) != len(entry.shape) or any(o < 0 or o + n > w for o, n, w in zip(offset, shape, entry.shape)):
            return f"a piece of {shape} at {offset} does not lie within {tuple(entry.shape)}"
        if any(storage.overlap(offset, shape, *other) is not None for other in boxes[:i]):
            return "two pieces overlap"
    held = sum(_volume(shape) for _, shape in boxes)
    return None if held == _volume(entry.shape) else f"{held} of {_volume(entry.shape)} numbers were saved"


def _volume(shape: Iterable[int]) -> int:
    return int(torch.Size(shape).numel())


def damaged(path: Path, file: str, what: str) -> CheckpointError:
    others = "resume from an intact one: --resume auto finds the newest"
    return CheckpointError(f"the checkpoint {path}", f"{file} {what}", others)


def encode(body: Mapping[str, Any]) -> bytes:
    return (json.dumps(body, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def text_of(manifest: Manifest) -> bytes:
    return encode(manifest.model_dump(mode="json"))


def digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(encode({k: v for k, v in body.items() if k != "digest"})).hexdigest()


__all__ = [
    "Manifest",
    "Meta",
    "SaveFailed",
    "agree",
    "check_plan",
    "choose",
    "find",
    "fresh_id",
    "load_parameters",
    "put_back",
    "restore",
    "save",
    "verify",
]


class SaveFailed(OSError):
    """A save did not come about, on any rank; training can go on, and the last good checkpoint is as it was."""


@dataclass(frozen=True)
class Meta:
    """What a checkpoint stores of the loop, without tensors; equal on every rank."""

    run_id: str
    position: int  # where in the data the next step begins (data/stream.py)
    skipped: int = 0  # updates skipped so far
    skipped_in_a_row: int = 0
    fingerprints: Mapping[str, str] = field(default_factory=dict)  # of config, tokenizer, template, data, ...


def fresh_id() -> str:
    """Return a new run's id, the same on every rank."""
    return from_first(secrets.token_hex(8))


# Saving


def save(trainer: Trainer, step: int, meta: Meta, spared: int | None = None) -> Path:
    """Write and commit a checkpoint after `step` updates; every rank calls it.

    Saving the same state again leaves the committed folder alone. The checkpoint of the step `spared` is not pruned.

    Raises:
        SaveFailed: on every rank, whichever rank's disk failed; the half save is gone.
    """
    first = trainer.world.rank == 0
    folder = Path(trainer.config.output) / FOLDER
    final = folder / f"step-{step:06d}"
    half = folder / f"{final.name}.tmp-{from_first(secrets.token_hex(4))}"
    _attempt(lambda: _begin(folder, half) if first else None, half)
    reports = _attempt(lambda: _write_own(trainer, half), half)
    _attempt(lambda: _commit(trainer, step, meta, reports, half, final) if first else None, half)
    _attempt(lambda: _prune(folder, step, trainer.config.train.keep, spared) if first else None, half)
    return final


def _begin(folder: Path, half: Path) -> None:
    for made in (folder.parent, folder):
        if not made.is_dir():
            storage.mkdir(made)
            storage.sync_folder(made.parent)
    for left in folder.iterdir():
        if LEFT.match(left.name):
            storage.remove(left)
    storage.mkdir(half)


def _write_own(trainer: Trainer, half: Path) -> dict[str, Any]:
    """This rank's file; return a report of its contents for rank 0. A rank that has nothing to save writes no file."""
    mine = [s for s in storage.slices(trainer) if s.saves]
    if not mine:
        return {}
    name = f"rank-{trainer.world.rank}.safetensors"
    sha, size = storage.write_tensors(half / name, [(s.name, s.local) for s in mine])
    pieces = [[s.name, storage.DTYPES[s.local.dtype], s.whole, s.offset, s.shape] for s in mine]
    return {"file": name, "sha256": sha, "bytes": size, "pieces": pieces}


def _commit(trainer: Trainer, step: int, meta: Meta, reports: list[Any], half: Path, final: Path) -> None:
    body: dict[str, Any] = {
        "format": FORMAT,
        "step": step,
        "run_id": meta.run_id,
        "position": meta.position,
        "skipped": meta.skipped,
        "skipped_in_a_row": meta.skipped_in_a_row,
        "ranks": trainer.world.ranks,
        "state": {name: state.save() for name, state in trainer.state.items()},
        "versions": {
            "optrush": optrush.__version__,
            "torch": torch.__version__,
            "transformers": library("transformers"),
        },
        "config": trainer.config.model_dump(mode="json", by_alias=True),
        "fingerprints": dict(meta.fingerprints),
        "files": {r["file"]: {"sha256": r["sha256"], "bytes": r["bytes"]} for r in reports if r},
        "tensors": _table(reports),
    }
    body["digest"] = digest(body)
    text = encode(body)
    for name, file in body["files"].items():
        if (half / name).stat().st_size != file["bytes"]:  # raises, too, where the ranks share no disk
            raise OSError(f"{half / name} is not as long as what was written")
    storage.write_file(half / MANIFEST, iter([text]))
    storage.sync_folder(half)
    if final.is_dir():
        if _is(final, text):
            storage.remove(half)
            return
        # The run went back behind this step, past a damaged checkpoint or by --resume FOLDER; the one it went back to
        # still exists if a kill comes between the next two lines.
        storage.rename(final, half.with_name(half.name + "0"))
    storage.rename(half, final)
    storage.sync_folder(final.parent)


def _is(path: Path, text: bytes) -> bool:
    """Whether this very checkpoint is committed there already, and intact."""
    try:
        return text_of(verify(path)) == text
    except CheckpointError:
        return False


def _table(reports: Iterable[Any]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for report in filter(None, reports):
        for name, dtype, whole, offset, shape in report["pieces"]:
            entry = table.setdefault(name, {"dtype": dtype, "shape": whole, "pieces": []})
            assert (entry["dtype"], entry["shape"]) == (dtype, whole), f"{name}: the ranks disagree about it"
            entry["pieces"].append({"file": report["file"], "offset": offset, "shape": shape})
    for name, entry in table.items():
        wrong = uncovered(Entry.model_validate(entry))
        assert wrong is None, f"{name}: {wrong}"
    return table


def _prune(folder: Path, step: int, keep: int, spared: int | None = None) -> None:
    """Keeps the newest and the spared; what is newer than the step just saved is of a future that the run has left."""
    committed = find(folder.parent)
    kept = [c for c in committed if step_of(c) <= step][:keep]
    for old in reversed([c for c in committed if c not in kept and step_of(c) != spared]):
        storage.rename(old, old.with_name(f"{old.name}.tmp-{secrets.token_hex(4)}"))
    storage.sync_folder(folder)
    for left in list(folder.iterdir()):
        if LEFT.match(left.name):
            storage.remove(left)


# Resuming


def choose(output: Path | str, resume: Literal["auto"] | Path | None) -> tuple[Manifest | None, list[tuple[Path, str]]]:
    """Return the manifest of an intact checkpoint to resume (None: from the start), and those passed over, with why.

    Rank 0 reads and decides for all.

    Raises:
        CheckpointError: on every rank; the given path is damaged, or there are checkpoints and none is intact.
    """
    if resume is None:
        return None, []
    assert dist.is_initialized() or launched()[1] == 1, "ranks that cannot talk cannot agree on a checkpoint"
    answer = json.loads(from_first(json.dumps(_decide(Path(output), resume) if launched()[0] == 0 else {})))
    if answer["error"] is not None:
        raise CheckpointError(*answer["error"])
    manifest = None if answer["path"] is None else parse(Path(answer["path"]), answer["text"].encode())
    return manifest, [(Path(p), why) for p, why in answer["passed"]]


def _decide(output: Path, resume: Literal["auto"] | Path) -> dict[str, Any]:
    candidates = find(output) if resume == "auto" else [Path(resume).resolve()]
    answer: dict[str, Any] = {"error": None, "path": None, "text": "", "passed": []}
    for path in candidates:
        try:
            answer["text"] = text_of(verify(path)).decode()
        except CheckpointError as error:
            if resume != "auto":
                return answer | {"error": error.args}
            answer["passed"].append([str(path), error.found])
        else:
            return answer | {"path": str(path)}
    if candidates:
        why = "; ".join(f"{Path(path).name}: {found}" for path, found in answer["passed"])
        todo = "to start afresh set `train.clean: true` without --resume, or take another `output`"
        answer["error"] = [f"--resume auto in {output}", f"no checkpoint is intact: {why}", todo]
    return answer


def restore(
    trainer: Trainer, found: Manifest | Path, fingerprints: Mapping[str, str], allow: frozenset[str] = frozenset()
) -> Manifest:
    """Fill parameters, optimizer states and `trainer.state` from a checkpoint of any sharding.

    Args:
        found: what `choose` returned (verified), or a folder (verified here).
        fingerprints: of this run; each must be as it was, unless `allow` names it.

    Raises:
        CheckpointError: on every rank; the checkpoint is damaged, of another run's making, or holds other tensors.
    """
    manifest = found if isinstance(found, Manifest) else choose(found.parent.parent, found)[0]
    assert manifest is not None, "a folder was asked for"
    error: CheckpointError | None = None
    try:
        _check_fingerprints(manifest, fingerprints, allow)
        _check_names(manifest, "state", set(manifest.state), set(trainer.state))
        _load(trainer, manifest)
    except CheckpointError as e:
        error = e
    agree(error)
    for name, state in trainer.state.items():
        state.load(manifest.state[name])
    return manifest


def put_back(trainer: Trainer, step: int) -> None:
    """Restore the trained parameters after `step` updates, and nothing else; every rank calls it.

    Raises:
        CheckpointError: on every rank; that checkpoint of the run is damaged.
    """
    manifest, _ = choose(trainer.config.output, Path(trainer.config.output) / FOLDER / f"step-{step:06d}")
    assert manifest is not None, "a folder was given"
    load_parameters(trainer, manifest)


def load_parameters(trainer: Trainer, manifest: Manifest) -> None:
    """Fill the trained parameters, and nothing else, from a checkpoint of any number of ranks; every rank calls it.

    Raises:
        CheckpointError: on every rank; it has other parameters, or a file cannot be read.
    """
    error: CheckpointError | None = None
    try:
        _load(trainer, manifest, "param/")
    except CheckpointError as e:
        error = e
    agree(error)


def check_plan(manifest: Manifest, steps: int, position: int, allow: frozenset[str] = frozenset()) -> None:
    """Check that the run, as it is configured now, continues with the first row after the checkpoint.

    Args:
        steps: of the whole run.
        position: where the step after the checkpoint's begins now.
        allow: with "data" or "order" in it, samples may be lost or repeated.

    Raises:
        CheckpointError: samples would be lost or repeated, or the run ends before the checkpoint.
    """
    asked, n = f"to resume {manifest.path}", manifest.step
    if n > steps:
        found = f"this run has {steps} steps, the checkpoint is of step {n}"
        raise CheckpointError(asked, found, "raise `train.steps` or `train.epochs`")
    if position != manifest.position and not allow & {"data", "order"}:
        found = f"step {n + 1} would begin at row {position}, not {manifest.position}"
        do = "bring back `batch`, `seed` and what fills rows, or accept lost or repeated samples: --allow-change order"
        raise CheckpointError(asked, found, do)


def _check_fingerprints(manifest: Manifest, now: Mapping[str, str], allow: frozenset[str]) -> None:
    then = manifest.fingerprints
    for name in sorted(allow):
        if name not in {*then, *now}:
            raise CheckpointError(f"--allow-change {name}", "no such field", nearest(name, {*then, *now}))
    for name in sorted({*then, *now} - allow):
        if then.get(name) != now.get(name):
            raise CheckpointError(
                f"to resume {manifest.path}",
                f"`{name}` was {then.get(name, 'absent')} and is {now.get(name, 'absent')}",
                f"bring back the old one, or accept the change: --allow-change {name}",
            )


def _check_names(manifest: Manifest, what: str, saved: set[str], wanted: set[str]) -> None:
    for wrong, how in ((wanted - saved, "is missing"), (saved - wanted, "is there, and this run has none")):
        if wrong:
            name = min(wrong)
            where = manifest.tensors[name].pieces[0].file if name in manifest.tensors else MANIFEST
            raise _foreign(manifest, f"{where}: the {what} `{name}` {how}")


def _foreign(manifest: Manifest, found: str) -> CheckpointError:
    todo = "resume with the techniques and the model it was saved with, or start afresh in another `output`"
    return CheckpointError(f"to resume {manifest.path}", found, todo)


@torch.no_grad()
def _load(trainer: Trainer, manifest: Manifest, kind: str = "") -> None:
    """Fills the tensors whose names begin with `kind`."""
    mine = [s for s in storage.slices(trainer) if s.name.startswith(kind)]
    saved = {name for name in manifest.tensors if name.startswith(kind)}
    _check_names(manifest, "tensor", saved, {s.name for s in mine})
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for s in mine:
            entry = manifest.tensors[s.name]
            file = entry.pieces[0].file
            if (tuple(entry.shape), entry.dtype) != (s.whole, storage.DTYPES[s.local.dtype]):
                was = f"{tuple(entry.shape)} {entry.dtype}"
                is_ = f"{s.whole} {storage.DTYPES[s.local.dtype]}"
                raise _foreign(manifest, f"{file}: the tensor `{s.name}` is {was}, this run needs {is_}")
            for piece in entry.pieces:
                shared = storage.overlap(s.offset, s.shape, tuple(piece.offset), tuple(piece.shape))
                if shared is None:
                    continue
                try:
                    if piece.file not in files:
                        files[piece.file] = stack.enter_context(safe_open(manifest.path / piece.file, "pt"))
                    _copy(files[piece.file], s, piece, shared)
                except (OSError, SafetensorError) as error:
                    raise damaged(manifest.path, piece.file, f"cannot be read: {error}") from None


def _copy(file: Any, s: storage.Slice, piece: Piece, shared: list[tuple[int, int]]) -> None:
    """The shared box, from the file into this rank's storage."""
    if not shared:  # one value
        s.local.copy_(file.get_tensor(s.name))
        return
    there = tuple(slice(a - o, b - o) for (a, b), o in zip(shared, piece.offset))
    here = tuple(slice(a - o, b - o) for (a, b), o in zip(shared, s.offset))
    s.local[here].copy_(file.get_slice(s.name)[there])


# Among ranks: results as JSON through the CPU group. Without a group, there is one rank.


def _attempt(work: Callable[[], Any], half: Path) -> list[Any]:
    """Do this rank's part of a save and return every rank's result; a failure of one is a failure of all."""
    answer: dict[str, Any]
    try:
        answer = {"came to": work()}
    except OSError as error:
        answer = {"failed": str(error)}
    answers = [json.loads(a) for a in gather(json.dumps(answer))]
    failed = [f"rank {rank}: {a['failed']}" for rank, a in enumerate(answers) if "failed" in a]
    if failed:
        if launched()[0] == 0 and half.is_dir():
            with suppress(OSError):  # what cannot be removed now is removed at the next start or save
                storage.remove(half)
        raise SaveFailed("; ".join(failed))
    return [a["came to"] for a in answers]
