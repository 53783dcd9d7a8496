"""Write files whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

# Each call that changes the disk is a function, so that a test can fail or kill the process there.


def write_piece(file: IO[bytes], data: Any) -> None:
    """Write bytes or a buffer of them to a file."""
    file.write(data)


def sync_file(descriptor: int) -> None:
    """Make what was written durable."""
    os.fsync(descriptor)


def rename_file(old: Path, new: Path) -> None:
    """Rename a file over another one."""
    os.rename(old, new)


def write_whole(path: Path, pieces: Iterable[Any] | str | bytes, temporary: Path | None = None) -> None:
    """Write a file under a temporary name, sync it and rename it: after a kill, `path` is the old file or the new one.

    Args:
        pieces: a text, bytes, or several buffers that are written one after the other.
        temporary: the temporary name, unique where several processes may write the file; else `path` with `.tmp`.

    Raises:
        OSError: the disk is full, or the folder is not writable; the temporary file is removed.
    """
    new = temporary or path.with_name(path.name + ".tmp")
    try:
        with new.open("wb") as file:
            whole = pieces.encode() if isinstance(pieces, str) else pieces
            for data in [whole] if isinstance(whole, bytes) else whole:
                write_piece(file, data)
            file.flush()
            sync_file(file.fileno())
        rename_file(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync_file(descriptor)
    finally:
        os.close(descriptor)
