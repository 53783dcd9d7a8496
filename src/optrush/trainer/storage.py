"""Write tensors to disk as safetensors, and find which box of a tensor a rank holds.

A kill may come between any two calls that change the disk. They are few, each a function here: a test replaces them
one by one and kills the process there.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import torch
from torch import Tensor

from optrush.trainer.distributed import is_sharded

if TYPE_CHECKING:
    from optrush.trainer.trainer import TrainedParam, Trainer

Ints = tuple[int, ...]
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip


def write(file: IO[bytes], data: bytes | memoryview) -> None:
    file.write(data)


def sync(descriptor: int) -> None:
    os.fsync(descriptor)


def rename(old: Path, new: Path) -> None:
    os.rename(old, new)


def unlink(path: Path) -> None:
    path.unlink()


def rmdir(path: Path) -> None:
    path.rmdir()


def mkdir(path: Path) -> None:
    path.mkdir()


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable: a rename is not, until its folder was synced."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a folder and its contents; links are removed, never followed."""
    for at, folders, files in os.walk(path, topdown=False):
        for name in files + [f for f in folders if (Path(at) / f).is_symlink()]:
            unlink(Path(at) / name)
        for name in [f for f in folders if (Path(at) / f).is_dir()]:
            rmdir(Path(at) / name)
    rmdir(path)


def write_file(path: Path, pieces: Iterator[bytes | memoryview]) -> tuple[str, int]:
    """Write a new file, durable on return; return (sha256, size) of the given bytes, not of what is on the disk."""
    sha, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for data in pieces:
            write(file, data)
            sha.update(data)
            size += len(data)
        file.flush()
        sync(file.fileno())
    return sha.hexdigest(), size


def write_tensors(path: Path, tensors: Sequence[tuple[str, Tensor]]) -> tuple[str, int]:
    """Write a safetensors file, one tensor in host memory at a time; return (sha256, size).

    The library's own writer needs all bytes at once and does not sync. The format is 8 bytes with the header's
    length, a JSON header and the raw little-endian tensors; wide elements first, so that each is aligned.
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
            yield t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data

    return write_file(path, pieces())


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Slice:
    """This rank's part of one saved tensor: a box of the whole, and whether this rank saves it."""

    name: str
    local: Tensor  # the very storage: loading copies into it
    whole: Ints
    offset: Ints
    saves: bool

    @property
    def shape(self) -> Ints:
        return tuple(self.local.shape)


def slices(trainer: Trainer) -> list[Slice]:
    """Return parameters as `param/<name>` and optimizer states as `state/<state>/<name>`, as this rank holds them."""
    states = {} if trainer.optimizer is None else trainer.optimizer.state()
    found = []
    for t in trainer.trained:
        local, whole, offset, first = t.local, *_box(t, trainer.world.data_rank)
        # Of equal copies the first rank saves one; an empty shard of something larger has no bytes to save.
        saves = first and (local.numel() > 0 or tuple(local.shape) == whole)
        found.append(Slice(f"param/{t.name}", local, whole, offset, saves))
        for kind, state in states.get(t.name, {}).items():
            name, shape = f"state/{kind}/{t.name}", tuple(state.shape)
            if shape == tuple(local.shape):
                found.append(Slice(name, state, whole, offset, saves))
            elif not shape:  # one value, the same on every rank
                found.append(Slice(name, state, (), (), first and not any(offset)))
            else:  # blocks inside rows: cut where the parameter's rows are
                assert shape[0] == local.shape[0] and tuple(local.shape[1:]) == whole[1:], (
                    f"{name}: cut unlike its rows"
                )
                flat = (0,) * (len(shape) - 1)
                found.append(Slice(name, state, (whole[0], *shape[1:]), (offset[0], *flat), saves))
    return found


def _box(t: TrainedParam, data_rank: int) -> tuple[Ints, Ints, bool]:
    """(whole shape, offset of this rank's box, whether this rank is the first of those that hold the same box)."""
    p = t.parameter
    if not is_sharded(p):
        return tuple(p.shape), (0,) * p.dim(), data_rank == 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    assert shape == tuple(t.local.shape), f"{t.name}: holds {tuple(t.local.shape)} where its placement says {shape}"
    where = p.device_mesh.get_coordinate()
    assert where is not None, f"{t.name}: this rank is not on its mesh"
    return tuple(p.shape), offset, all(c == 0 for c, how in zip(where, p.placements) if how.is_replicate())


def overlap(a_offset: Ints, a_shape: Ints, b_offset: Ints, b_shape: Ints) -> list[tuple[int, int]] | None:
    """Return the box that two boxes share, as (first, end) a dimension of the whole tensor; None if there is none."""
    shared = [(max(p, q), min(p + n, q + m)) for p, n, q, m in zip(a_offset, a_shape, b_offset, b_shape, strict=True)]
    return None if any(first >= end for first, end in shared) else shared
