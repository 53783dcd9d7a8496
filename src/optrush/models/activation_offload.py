"""What blocks save for the backward pass, in host memory meanwhile: out beside the forward pass, back ahead of use.

The hooks of autograd see each tensor that a block saves. Its storage goes to pages of pinned memory as soon as the
block has run, and is forgotten on the device when the next block has run too: by then it has been copied, or the device
waits. When the backward pass of a block begins, the storage of the block before it is sent for. So at any time two
blocks lie on the device, one in use and one on its way.

Stays on the device: parameters and what is only another form of one, what all blocks are given (angles, masks), tensors
below `least` bytes, and all of the last `keep` blocks, which are needed first. A storage that is saved several times,
or by several views, is moved once.

Two streams: the caller's, and one for copies. Memory of the device is allocated and freed on the caller's stream only:
before it is freed that stream has waited for the copy, and a copy waits for what the caller's stream did before. So the
allocator may reuse it at once (`record_stream` would hold it until the host notices).
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from optrush.errors import NeedsError

PAGE_BYTES = 16 << 20  # large enough for the link's full rate, small enough to waste little
LEAST_BYTES = 1 << 20
ALIGNED = 512
# A view or a cast of a parameter is kept anyway: by the parameter, or by autocast until the loss is there.
FORMS = frozenset({"TBackward0", "TransposeBackward0", "ViewBackward0", "ToCopyBackward0"})

Pair = tuple[Tensor, Tensor]  # to, from: bytes


class Lane(Protocol):
    """Copies beside the computation, one after the other."""

    kind: str  # of the device

    def copy(self, pairs: Sequence[Pair]) -> Any:
        """Starts copies that see all that the caller has started; returns what `wait` takes."""

    def wait(self, mark: Any) -> None:
        """What the caller starts from now on happens after these copies."""

    def page(self, size: int) -> Tensor:
        """(size,) uint8 of host memory."""


class Streams:
    """A stream of a CUDA device beside the current one, and pinned memory."""

    kind = "cuda"

    def __init__(self, device: torch.device) -> None:
        self.stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, pairs: Sequence[Pair]) -> Any:
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            for to, of in pairs:
                to.copy_(of, non_blocking=True)
            return self.stream.record_event()

    def wait(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.stream.device).wait_event(mark)

    def page(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class Pages:
    """Host memory in equal pages, taken once and used again from step to step."""

    def __init__(self, lane: Lane, size: int) -> None:
        self.lane, self.size = lane, size
        self.free: list[Tensor] = []
        self.made = 0

    def take(self) -> Tensor:
        """A page.

        Raises:
            NeedsError: the host has no more.
        """
        if self.free:
            return self.free.pop()
        try:
            page = self.lane.page(self.size)
        except RuntimeError:
            found = f"{self.made * self.size / 2**30:.1f} GiB are taken, and the machine gives no more"
            do = "take a smaller batch.micro_tokens, a larger keep, or add --with recompute"
            raise NeedsError("pinned host memory for activations", found, do) from None
        self.made += 1
        return page


class Shelf:
    """Where the storages of one pass through one block lie on the host: one after the other, over pages."""

    def __init__(self, pages: Pages, before: Shelf | None, given: frozenset[int], moves: bool) -> None:
        self.pages, self.given, self.moves = pages, given, moves
        self.before = None if before is None else weakref.ref(before)
        self.pieces: dict[int, weakref.ref[Piece]] = {}  # by storage, while the block runs
        self.begun = False  # its backward pass
        self._taken: list[Tensor] = []
        self._used = pages.size  # of the last page
        weakref.finalize(self, pages.free.extend, self._taken)

    def alive(self) -> list[Piece]:
        """Storages that something still waits for."""
        return [piece for ref in self.pieces.values() if (piece := ref()) is not None]

    def place(self, size: int) -> list[Tensor]:
        """Room for so many bytes, in pieces of pages."""
        found = []
        while size:
            if self._used >= self.pages.size:
                self._taken.append(self.pages.take())
                self._used = 0
            part = min(size, self.pages.size - self._used)
            found.append(self._taken[-1][self._used : self._used + part])
            self._used += -(-part // ALIGNED) * ALIGNED
            size -= part
        return found


class Piece:
    """One storage that a block saved: on the device, on the host, or both."""

    def __init__(self, shelf: Shelf, t: Tensor) -> None:
        self.shelf, self.where = shelf, t.device
        whole = torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
        self.device: Tensor | None = whole  # (bytes,)
        self.size = whole.numel()
        self.first, self.version = t.detach(), t._version
        self.host: list[Tensor] = []

    def out(self) -> Iterator[Pair]:
        """Copies to the host."""
        assert self.device is not None
        assert self.first._version == self.version, "a block wrote into a tensor that it had saved"
        del self.first  # it holds the storage
        self.host = self.shelf.place(self.size)
        yield from zip(self.host, torch.split(self.device, [h.numel() for h in self.host]), strict=True)

    def back(self) -> Iterator[Pair]:
        """Copies to the device."""
        self.device = torch.empty(self.size, dtype=torch.uint8, device=self.where)
        yield from zip(torch.split(self.device, [h.numel() for h in self.host]), self.host, strict=True)


class Kept(NamedTuple):
    """What autograd holds of a tensor that stays."""

    shelf: Shelf
    tensor: Tensor


class Moved(NamedTuple):
    """What autograd holds of a tensor that is moved: which storage, and how the tensor lies in it."""

    piece: Piece
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class Offload:
    """Moves what `blocks` blocks save, all but the last `keep`.

    Args:
        page: bytes of a page.
        least: bytes of the smallest storage that is moved.
    """

    def __init__(self, lane: Lane, blocks: int, keep: int, *, page: int = PAGE_BYTES, least: int = LEAST_BYTES) -> None:
        self.lane, self.blocks, self.keep, self.least = lane, blocks, keep, least
        self.pages = Pages(lane, page)
        self.moved_bytes = 0  # to the host, since the beginning
        self._last: weakref.ref[Shelf] | None = None  # of the block before
        # Copies that the caller's stream has not waited for, with the device's memory that they read or write.
        self._leaving: tuple[Any, list[Piece]] | None = None
        self._coming: dict[Shelf, tuple[Any, list[Tensor]]] = {}

    @contextmanager
    def block(self, number: int, given: Any) -> Iterator[None]:
        """Around the forward pass of a block. given: what all blocks are given, beside their hidden states."""
        if number == 0:
            self._settle()
        before = None if number == 0 or self._last is None else self._last()
        shelf = Shelf(self.pages, before, frozenset(_storages(given)), number < self.blocks - self.keep)
        self._last = weakref.ref(shelf)
        with torch.autograd.graph.saved_tensors_hooks(partial(self._pack, shelf), self._unpack):
            yield
        self._send(shelf)
        if number == self.blocks - 1:
            self._forget()

    def _pack(self, shelf: Shelf, t: Tensor) -> Kept | Moved:
        if not shelf.moves or not self._worth(shelf, t):
            return Kept(shelf, t.detach())  # an output would hold the node that holds it
        storage = t.untyped_storage()
        ref = shelf.pieces.get(storage.data_ptr())
        piece = None if ref is None else ref()
        if piece is None:
            piece = Piece(shelf, t)
            shelf.pieces[storage.data_ptr()] = weakref.ref(piece)
        return Moved(piece, t.dtype, t.shape, t.stride(), int(t.storage_offset()))

    def _worth(self, shelf: Shelf, t: Tensor) -> bool:
        if type(t) is not Tensor or t.device.type != self.lane.kind or t.layout is not torch.strided:
            return False
        storage = t.untyped_storage()
        if storage.nbytes() < self.least or storage.data_ptr() in shelf.given:
            return False
        return not _of_parameter(t)

    def _send(self, shelf: Shelf) -> None:
        """At the end of a block: its storages leave, and the ones of the block before have left."""
        pieces = shelf.alive()
        shelf.pieces = {i: weakref.ref(piece) for i, piece in enumerate(pieces)}
        leaving = (self.lane.copy([pair for p in pieces for pair in p.out()]), pieces) if pieces else None
        self.moved_bytes += sum(p.size for p in pieces)
        self._forget()
        self._leaving = leaving

    def _forget(self) -> None:
        """What has left is no longer held on the device."""
        if self._leaving is not None:
            mark, pieces = self._leaving
            self.lane.wait(mark)
            for piece in pieces:
                piece.device = None
            self._leaving = None

    def _settle(self) -> None:
        """Before a new pass: nothing is on its way that an exception left there."""
        self._forget()
        for mark, _ in self._coming.values():
            self.lane.wait(mark)
        self._coming.clear()

    def _unpack(self, held: Kept | Moved) -> Tensor:
        shelf = held.shelf if isinstance(held, Kept) else held.piece.shelf
        if not shelf.begun:
            shelf.begun = True
            self._fetch(shelf)
            self._arrive(shelf)
            if shelf.before is not None and (before := shelf.before()) is not None:
                self._fetch(before)
        if isinstance(held, Kept):
            return held.tensor
        assert held.piece.device is not None
        whole = torch.empty(0, dtype=held.dtype, device=held.piece.where)
        return whole.set_(held.piece.device.untyped_storage(), held.offset, held.shape, held.stride)

    def _fetch(self, shelf: Shelf) -> None:
        """Sends for what lies on the host alone."""
        pieces = [p for p in shelf.alive() if p.device is None]
        if pieces:
            mark = self.lane.copy([pair for p in pieces for pair in p.back()])
            self._coming[shelf] = (mark, [p.device for p in pieces if p.device is not None])

    def _arrive(self, shelf: Shelf) -> None:
        if shelf in self._coming:
            self.lane.wait(self._coming.pop(shelf)[0])


def _of_parameter(t: Tensor) -> bool:
    """A parameter, a view of one, or a cast of one."""
    if isinstance(t, nn.Parameter) or isinstance(t._base, nn.Parameter):
        return True
    node = t.grad_fn
    while node is not None and node.name() in FORMS:
        node = node.next_functions[0][0]
    return node is not None and "AccumulateGrad" in node.name()


def _storages(given: Any) -> Iterator[int]:
    """Of all tensors in arguments: tuples, lists, mappings, dataclasses."""
    if isinstance(given, Tensor):
        if given.layout is torch.strided:
            yield given.untyped_storage().data_ptr()
    elif isinstance(given, dict):
        yield from (s for each in given.values() for s in _storages(each))
    elif isinstance(given, list | tuple):
        yield from (s for each in given for s in _storages(each))
    elif dataclasses.is_dataclass(given):
        yield from _storages(list(vars(given).values()))
