"""A checkpoint's manifest: what was saved, under which bytes, and whether those bytes are still there.

The manifest carries the hash of every file, and its own: it must be, byte for byte, the one text that its content is
written as. So a flipped bit anywhere is found, in blanks too, and a manifest of another step by its folder's name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from optrush import shards
from optrush.errors import CheckpointError

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
            if shards.sha256(shard) != file.sha256:
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
        if any(shards.overlap(offset, shape, *other) is not None for other in boxes[:i]):
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
