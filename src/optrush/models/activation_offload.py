"""Offload saved activations to host memory during the forward pass, and prefetch them in the backward pass.

Autograd hooks receive each tensor that a block saves. Its storage is copied to pages of pinned memory as soon as the
block has run, and freed on the device after the next block: if the copy is not complete by then, the device waits. When
a block's backward pass begins, the preceding block's storages start to be copied to the device. At any time two blocks
are on the device, one in use and one in transfer.

Not moved: parameters and views or casts of them, the arguments that all blocks share (angles, masks), storages below
`least` bytes, and the last `keep` blocks, which are needed first. A storage that is saved several times, or by several
views, is moved once.

Device memory is allocated and freed only on the caller's stream, which waits for the copy before it frees; a copy runs
on its own stream and waits for the caller's earlier work. The allocator can therefore reuse the memory at once
(`record_stream` would delay that until the host polls an event).
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from optrush.hardware import GIB

PAGE_BYTES = 16 << 20  # large enough for the link's full rate, small enough to waste little
LEAST_BYTES = 1 << 20
ALIGNED = 512
# A view or a cast of a parameter stays in memory anyway: with the parameter, or in autocast's cache until the loss.
FORMS = frozenset(
    {"TBackward0", "TransposeBackward0", "ViewBackward0", "ToCopyBackward0", "_ToTorchTensorBackward"}  # of a DTensor
)

Pair = tuple[Tensor, Tensor]  # to, from: bytes


class Lane(Protocol):
    """Ordered copies in parallel with the computation."""

    kind: str  # of the device

    def copy(self, pairs: Sequence[Pair]) -> Any:
        """Start copies after all work that the caller has started; return a mark for `wait`."""

    def wait(self, mark: Any) -> None:
        """Make later work of the caller wait for these copies."""

    def page(self, size: int) -> Tensor:
        """Allocate (size,) uint8 of host memory."""


class Streams:
    """A second stream of a CUDA device, and pinned memory."""

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
    """Host memory in equal pages, allocated once and reused in every step.

    Args:
        size: bytes per page.
        take: called with the bytes of the next allocation; raises MemoryError if they are too many.
    """

    def __init__(self, lane: Lane, size: int, take: Callable[[int], None] = lambda size: None) -> None:
        self.lane, self.size, self.take_bytes = lane, size, take
        self.free: list[Tensor] = []
        self.allocated = 0  # pages

    def take(self) -> Tensor:
        """Return a page; raise MemoryError if the host has no memory left."""
        if self.free:
            return self.free.pop()
        self.take_bytes(self.size)
        try:
            page = self.lane.page(self.size)
        except RuntimeError:
            taken = self.allocated * self.size / GIB
            raise MemoryError(f"{taken:.1f} GiB of host memory in use, and no more available") from None
        self.allocated += 1
        return page


class BlockStore:
    """The storages saved by one pass through one block, packed in host pages."""

    def __init__(self, pages: Pages, before: BlockStore | None, shared: frozenset[int], moves: bool) -> None:
        self.pages, self.shared, self.moves = pages, shared, moves
        self.before = None if before is None else weakref.ref(before)
        self.storages: dict[int, weakref.ref[SavedStorage]] = {}  # by storage address, while the block runs
        self.in_backward = False
        self._taken: list[Tensor] = []
        self._used = pages.size  # of the last page
        weakref.finalize(self, pages.free.extend, self._taken)

    def alive(self) -> list[SavedStorage]:
        """Return the storages that are still referenced."""
        return [saved_storage for ref in self.storages.values() if (saved_storage := ref()) is not None]

    def reserve(self, size: int) -> list[Tensor]:
        """Reserve bytes on the host; return them as slices of pages."""
        slices = []
        while size:
            if self._used >= self.pages.size:
                self._taken.append(self.pages.take())
                self._used = 0
            part = min(size, self.pages.size - self._used)
            slices.append(self._taken[-1][self._used : self._used + part])
            self._used += -(-part // ALIGNED) * ALIGNED
            size -= part
        return slices


class SavedStorage:
    """A storage that a block saved: on the device, on the host, or both."""

    def __init__(self, store: BlockStore, t: Tensor) -> None:
        self.store, self.device_of = store, t.device
        content = torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
        self.device: Tensor | None = content  # (bytes,)
        self.size = content.numel()
        self.first, self.version = t.detach(), t._version
        self.host: list[Tensor] = []

    def to_host(self) -> Iterator[Pair]:
        """Yield the copies to the host."""
        assert self.device is not None
        assert self.first._version == self.version, "a block wrote into a tensor that it had saved"
        del self.first  # a reference to the storage
        self.host = self.store.reserve(self.size)
        yield from zip(self.host, torch.split(self.device, [h.numel() for h in self.host]), strict=True)

    def to_device(self) -> Iterator[Pair]:
        """Yield the copies to the device."""
        self.device = torch.empty(self.size, dtype=torch.uint8, device=self.device_of)
        yield from zip(torch.split(self.device, [h.numel() for h in self.host]), self.host, strict=True)


class OnDevice(NamedTuple):
    """Autograd's stored form of a tensor that stays on the device."""

    store: BlockStore
    tensor: Tensor


class Moved(NamedTuple):
    """Autograd's stored form of a moved tensor: its storage, type, and arguments of `Tensor.set_`."""

    storage: SavedStorage
    dtype: torch.dtype
    view: tuple[int, torch.Size, tuple[int, ...]]


class Offload:
    """Offloads the saved tensors of `blocks` blocks, except the last `keep`.

    Args:
        page: bytes per page.
        least: bytes of the smallest storage that is moved.
        take: see `Pages`.
    """

    def __init__(
        self, lane: Lane, blocks: int, keep: int, *, page: int = PAGE_BYTES, least: int = LEAST_BYTES,
        take: Callable[[int], None] = lambda size: None,
    ) -> None:  # fmt: skip
        self.lane, self.blocks, self.keep, self.least = lane, blocks, keep, least
        self.pages = Pages(lane, page, take)
        self.moved_bytes = 0  # to the host, since the start
        self._last: weakref.ref[BlockStore] | None = None  # of the previous block
        # Copies for which the caller's stream has not yet waited, with the device memory that they read or write.
        self._leaving: tuple[Any, list[SavedStorage]] | None = None
        self._coming: dict[BlockStore, tuple[Any, list[Tensor]]] = {}

    @contextmanager
    def block(self, number: int, shared: Any) -> Iterator[None]:
        """Offload within a block's forward pass; `shared`: the arguments of all blocks except hidden states."""
        if number == 0:
            self._settle()
        before = None if number == 0 or self._last is None else self._last()
        store = BlockStore(self.pages, before, frozenset(_storages(shared)), number < self.blocks - self.keep)
        self._last = weakref.ref(store)
        with torch.autograd.graph.saved_tensors_hooks(partial(self._pack, store), self._unpack):
            yield
        self._send(store)
        if number == self.blocks - 1:
            self._forget()

    def _pack(self, store: BlockStore, t: Tensor) -> OnDevice | Moved:
        if not store.moves or not self._movable(store, t):
            return OnDevice(store, t.detach())  # an output would refer to its own autograd node
        at = t.untyped_storage().data_ptr()
        saved_storage = store.storages[at]() if at in store.storages else None
        if saved_storage is None:
            saved_storage = SavedStorage(store, t)
            store.storages[at] = weakref.ref(saved_storage)
        return Moved(saved_storage, t.dtype, (int(t.storage_offset()), t.shape, t.stride()))

    def _movable(self, store: BlockStore, t: Tensor) -> bool:
        if type(t) is not Tensor or t.device.type != self.lane.kind or t.layout is not torch.strided:
            return False
        storage = t.untyped_storage()
        large = storage.nbytes() >= self.least
        return large and storage.data_ptr() not in store.shared and not of_parameter(t)

    def _send(self, store: BlockStore) -> None:
        """Start copying a block's storages to the host, and free the previous block's."""
        storages = store.alive()
        store.storages = {i: weakref.ref(s) for i, s in enumerate(storages)}
        leaving = (self.lane.copy([pair for p in storages for pair in p.to_host()]), storages) if storages else None
        self.moved_bytes += sum(p.size for p in storages)
        self._forget()
        self._leaving = leaving

    def _forget(self) -> None:
        """Free device storages that have been copied to the host."""
        if self._leaving is not None:
            mark, storages = self._leaving
            self.lane.wait(mark)
            for saved_storage in storages:
                saved_storage.device = None
            self._leaving = None

    def _settle(self) -> None:
        """Wait for copies left by an exception, before a new pass."""
        self._forget()
        for mark, _ in self._coming.values():
            self.lane.wait(mark)
        self._coming.clear()

    def _unpack(self, saved: OnDevice | Moved) -> Tensor:
        store = saved.store if isinstance(saved, OnDevice) else saved.storage.store
        if not store.in_backward:
            store.in_backward = True
            self._fetch(store)
            self._arrive(store)
            if store.before is not None and (before := store.before()) is not None:
                self._fetch(before)
        if isinstance(saved, OnDevice):
            return saved.tensor
        assert saved.storage.device is not None
        view = torch.empty(0, dtype=saved.dtype, device=saved.storage.device_of)
        return view.set_(saved.storage.device.untyped_storage(), *saved.view)

    def _fetch(self, store: BlockStore) -> None:
        """Start copying storages that are only on the host."""
        storages = [p for p in store.alive() if p.device is None]
        if storages:
            mark = self.lane.copy([pair for p in storages for pair in p.to_device()])
            self._coming[store] = (mark, [p.device for p in storages if p.device is not None])

    def _arrive(self, store: BlockStore) -> None:
        if store in self._coming:
            self.lane.wait(self._coming.pop(store)[0])


def of_parameter(t: Tensor) -> bool:
    """Return whether a tensor is a parameter, or a view or cast of one."""
    if isinstance(t, nn.Parameter) or isinstance(t._base, nn.Parameter):
        return True
    node = t.grad_fn
    while node is not None and node.name() in FORMS:
        node = node.next_functions[0][0]
    return node is not None and "AccumulateGrad" in node.name()


def _storages(value: Any) -> Iterator[int]:
    """Yield the storages of all tensors in tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        if value.layout is torch.strided:
            yield value.untyped_storage().data_ptr()
    elif isinstance(value, list | tuple):
        yield from (s for item in value for s in _storages(item))
    elif isinstance(value, dict):
        yield from _storages(list(value.values()))
    elif dataclasses.is_dataclass(value):
        yield from _storages(list(vars(value).values()))
