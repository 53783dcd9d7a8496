"""Compressed files as streams of bytes, with every cut or foreign end found.

The readers of the standard library and of zstandard take, one here and one there, a truncated stream or a damaged
second one for the end of the file, which loses rows without a sign. Here only the end of a whole stream is an end.
"""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from optrush.errors import NeedsError

PACKED = (".gz", ".bz2", ".xz", ".zst")
PIECE_bytes = 2**20
TAKEN_bytes = 2**10  # packed bytes unpacked at once: even zstd makes at most 32 MiB of these


class Damaged(Exception):
    """A file that cannot be read on, and why."""


def opened(path: Path, packing: str) -> io.BufferedReader[Any]:
    """The bytes of a file, unpacked where `packing` (a suffix of PACKED) says so; reading them may raise Damaged."""
    if not packing:
        return io.BufferedReader(io.FileIO(path), PIECE_bytes)
    new, errors = _unpacker(path, packing)
    return io.BufferedReader(_Unpacked(io.FileIO(path), new, errors), PIECE_bytes)


def _unpacker(path: Path, packing: str) -> tuple[Callable[[], Any], tuple[type[Exception], ...]]:
    """What makes a decompressor of one stream, and what that raises."""
    if packing == ".gz":
        return lambda: zlib.decompressobj(zlib.MAX_WBITS | 16), (zlib.error,)
    if packing == ".bz2":
        return bz2.BZ2Decompressor, (OSError, ValueError)
    if packing == ".xz":
        return lzma.LZMADecompressor, (lzma.LZMAError,)
    try:
        import zstandard
    except ImportError:
        do = "install it: python -m pip install 'optrush[zstd]'"
        raise NeedsError(f"data from {path}", "no library zstandard, which unpacks it", do) from None
    return zstandard.ZstdDecompressor().decompressobj, (zstandard.ZstdError,)


class _Unpacked(io.RawIOBase):
    """The bytes inside a packed file; streams that follow one another are read as one."""

    def __init__(self, file: io.FileIO, new: Callable[[], Any], errors: tuple[type[Exception], ...]) -> None:
        self.file, self.new, self.errors = io.BufferedReader(file, PIECE_bytes), new, errors
        self.stream: Any = None
        self.rest = b""  # packed bytes that the stream has not seen
        self.ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self.ready:
            if (self.stream is None or self.stream.eof) and not self._next():
                return 0
            self.ready = memoryview(self._more())
        n = min(len(buffer), len(self.ready))
        buffer[:n], self.ready = self.ready[:n], self.ready[n:]
        return n

    def _next(self) -> bool:
        """Begins the next stream, if there is one; gzip and xz may be padded with zeros."""
        rest = b"" if self.stream is None else self.stream.unused_data.lstrip(b"\0")
        while not rest:
            taken = self.file.read(TAKEN_bytes)
            if not taken:
                return False
            rest = taken.lstrip(b"\0")
        self.stream, self.rest = self.new(), rest
        return True

    def _more(self) -> bytes:
        bounded = hasattr(self.stream, "needs_input")  # bz2 and xz: those can make gigabytes of a few bytes
        taken = b""
        if not bounded or self.stream.needs_input:
            taken, self.rest = self.rest or self.file.read(TAKEN_bytes), b""
            if not taken:
                raise Damaged("cut off: the file ends inside the compressed data")
        try:
            made: bytes = self.stream.decompress(taken, PIECE_bytes) if bounded else self.stream.decompress(taken)
        except self.errors as error:
            raise Damaged(f"damaged compressed data: {error}") from error
        return made
