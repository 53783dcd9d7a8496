"""Read regular files, and write so that a kill at any moment leaves whole files: write, sync, rename, in this order.

A kill can come between any two calls that change the disk. Each is a function here, so that a test can make it fail or
kill the process there.
"""

from __future__ import annotations

import csv
import errno
import hashlib
import json
import os
import shlex
import stat
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any

from optrush.errors import ConfigError, NotRegularError

MOST_READ_bytes = 1 << 30  # limit for reading a whole file
KINDS = {
    stat.S_IFIFO: "a named pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}  # fmt: skip


SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}  # of tables


def separator(head: str, usual: str) -> str:
    """Return a table's column separator: another mark if it splits the header and the first row."""

    def cells(mark: str, rows: int) -> list[int]:
        try:
            read = csv.reader(head.splitlines(True), delimiter=mark, strict=True)
            return [len(row) for row in islice(read, rows)]
        except csv.Error:
            return []

    splitting = {mark: cells(mark, 2) for mark in SEPARATORS if mark != usual and cells(usual, 1) == [1]}
    return next((mark for mark, many in splitting.items() if len(many) == 2 and many[0] == many[1] > 1), usual)


def open_file(path: Path | str, buffering: int = -1) -> Any:
    """Open a regular file for reading. Every file is opened here, except by libraries (`regular`).

    The kernel's own files (/proc) claim to be regular and empty; reading them may block.

    Raises:
        OSError: it is missing or cannot be read; NotRegularError, a UserError too: a pipe, device, socket or folder.
    """
    return open(path, "rb", buffering, opener=_opener)


def _opener(path: str, ways: int) -> int:
    """Return a descriptor of a file, for `open`; raise NotRegularError if it is not a regular file."""
    descriptor = os.open(path, ways | os.O_NOCTTY | os.O_NONBLOCK)
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise NotRegularError(f"{path}", f"{KINDS.get(stat.S_IFMT(info.st_mode), 'no file')}, not a regular file")
        try:
            held = b"" if info.st_size else os.pread(descriptor, 1, 0)
        except OSError:  # it would block, or cannot seek
            held = b"?"
        if held and not os.fstat(descriptor).st_size:  # else it has grown since
            raise NotRegularError(f"{path}", "a file of the kernel, not a regular file")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def regular(path: Path) -> Path:
    """Return the path of a regular file, for a library to open; raises like `open_file`."""
    open_file(path).close()
    return path


def read_file(path: Path | str) -> bytes:
    """Return the bytes of a regular file; raises like `open_file`, and above MOST_READ_bytes."""
    with open_file(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > MOST_READ_bytes:
            raise NotRegularError(f"{path}", f"{size:,} bytes; the limit is {MOST_READ_bytes:,}", "use a smaller file")
        held: bytes = file.read()
    return held


def read_text(path: Path | str, encoding: str = "utf-8", errors: str = "strict") -> str:
    """Return the text of a regular file with newlines; raises like `read_file`, and UnicodeDecodeError."""
    return read_file(path).decode(encoding, errors).replace("\r\n", "\n").replace("\r", "\n")


def config_text(path: Path) -> str:
    """Return the text of a configuration file; raises ConfigError: missing, not a regular file, data, or not UTF-8."""
    if path.suffix.lower() in (".jsonl", ".ndjson", ".parquet", ".csv", ".tsv") and path.is_file():
        do = f"write a configuration for it: optrush init --model MODEL --data {shlex.quote(str(path))}"
        raise ConfigError(f"the configuration {path}", "a data file, not YAML", do)
    try:
        return read_text(path)
    except (FileNotFoundError, NotADirectoryError, NotRegularError) as error:
        found = error.strerror if path.exists() and not path.is_dir() else "no such file"
        raise ConfigError(f"the configuration {path}", f"{found}", "name a YAML file; examples/ has some") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}", f"not UTF-8: {error.reason}", "save it as UTF-8") from None


def write_piece(file: IO[bytes], data: Any) -> None:
    """Write bytes or a buffer of them to a file."""
    file.write(data)


def sync_file(descriptor: int) -> None:
    """Sync a file or folder to disk."""
    os.fsync(descriptor)


def rename_file(old: Path, new: Path) -> None:
    """Rename a file, over an existing one if there is one, or a folder."""
    os.rename(old, new)


def remove_file(path: Path) -> None:
    path.unlink()


def remove_folder(path: Path) -> None:
    path.rmdir()


def make_folder(path: Path) -> None:
    path.mkdir()


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable: a rename is durable only after its folder is synced."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync_file(descriptor)
    finally:
        os.close(descriptor)


def remove_tree(path: Path) -> None:
    """Remove a folder and its contents; links are removed, never followed."""
    for at, folders, names in os.walk(path, topdown=False):
        for name in names + [f for f in folders if (Path(at) / f).is_symlink()]:
            remove_file(Path(at) / name)
        for name in [f for f in folders if (Path(at) / f).is_dir()]:
            remove_folder(Path(at) / name)
    remove_folder(path)


def write_new(path: Path, pieces: Iterable[Any]) -> tuple[str, int]:
    """Write and sync a new file; return (sha256, size) of the given bytes, not of the bytes on disk."""
    sha, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for data in pieces:
            write_piece(file, data)
            sha.update(data)
            size += len(data)
        file.flush()
        sync_file(file.fileno())
    return sha.hexdigest(), size


def write_whole(path: Path, pieces: Iterable[Any] | str | bytes, temporary: Path | None = None) -> None:
    """Write a file under a temporary name, sync it and rename it: after a kill, `path` is the old file or the new one.

    Args:
        pieces: text, bytes, or several buffers to concatenate.
        temporary: a temporary name, unique if several processes can write the file; default: `path` with `.tmp`.

    Raises:
        OSError: the disk is full, or the folder is not writable; the temporary file is removed.
    """
    new = temporary or path.with_name(path.name + ".tmp")
    try:
        new.unlink(missing_ok=True)  # left by a killed process, or a link: never write through it
        with new.open("xb") as file:
            content = pieces.encode() if isinstance(pieces, str) else pieces
            for data in [content] if isinstance(content, bytes) else content:
                write_piece(file, data)
            file.flush()
            sync_file(file.fileno())
        rename_file(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text; ValueError for anything else, deep nesting included."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def open_to_append(path: Path) -> IO[bytes]:
    """Open or create a file for unbuffered appending, never through a symbolic link.

    Raises:
        OSError: it is a symbolic link (ELOOP), not a regular file, or not writable.
    """
    ways = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    if path.exists() and not path.is_symlink():
        regular(path)
    return open(os.open(path, ways, 0o644), "ab", buffering=0)


def append_whole(file: IO[bytes], data: bytes) -> None:
    """Append all of the data to an unbuffered file, or nothing; OSError if the disk is full."""
    size = file.tell()
    try:
        if file.write(data) < len(data):  # the disk is full
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        file.truncate(size)
        raise


def refuse_links(folder: Path, asked: str, names: Iterable[str], foreign: Collection[str] = ()) -> None:
    """Raise ConfigError if a written name, or a file below it, is a symbolic link out of the folder.

    The folder itself can be a link, and links within it can point to each other.

    Args:
        names: files and folders of `folder`; others are not examined.
        foreign: names written by other programs, which may contain links.
    """
    real = folder.resolve()
    for path in _below(real, names, foreign):
        if path.is_symlink() and not path.resolve().is_relative_to(real):
            found = f"{folder / path.relative_to(real)} is a symbolic link to {os.readlink(path)}, out of the folder"
            raise ConfigError(asked, found, "remove the link, or name its target instead")


def check_model_files(folder: Path, patterns: Iterable[str]) -> None:
    """Check that a downloaded folder has only regular files and no links out of it.

    Exports would copy a linked file from elsewhere; weights are not copied and may be links. A hub's cache links to the
    files in its `blobs`.

    Raises:
        ConfigError: a file is not regular, or links out of the folder.
    """
    root = folder.resolve()
    root = next((above.parent for above in root.parents if above.name == "snapshots"), root)
    paths = {path for pattern in patterns for path in folder.glob(pattern) if not path.is_dir()}
    for path in sorted(paths):
        if not (place := path.resolve()).is_relative_to(root) and path.suffix != ".safetensors":
            reason = f"a link to {place}, out of the folder {folder}"
            raise ConfigError(f"{path}", reason, f"copy the file: cp --remove-destination {place} {path}")
        if path.exists():
            regular(path)


def _below(folder: Path, names: Iterable[str], foreign: Collection[str]) -> Iterator[Path]:
    for name in sorted(names):
        yield folder / name
        for at, folders, files in os.walk(folder / name) if name not in foreign else ():
            yield from (Path(at) / each for each in (*folders, *files))
