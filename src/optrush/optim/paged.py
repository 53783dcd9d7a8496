"""Optimizer states in host memory, streamed through the device in pieces, prefetched one piece ahead of the update.

The optimizer is unaware of this. It updates rows of parameters like shards (same name, same full shape, their offset),
so results are bitwise those of the unpaged optimizer. Its state allocator returns memory in one of two slots on the
device: piece k uses slot k % 2 alone. Then the optimizer steps one piece at a time:

    the caller's stream   update k - 1            | update k                | update k + 1
    inward                  states k to slot k % 2  | states k + 1 ...
    outward                                         | states k - 1 back to the host | ...

Parameter rows have state rows: on the host they form one tensor per state, which checkpoints read and write. States
without dimensions (counts), and the states of small parameters, stay on the device.

A slot is filled after the copies that read it, because the caller's stream has waited for them, and read after the
copies that fill it. A skipped update copies the states back unchanged.
"""

from __future__ import annotations

import itertools
import math
import mmap
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from optrush.errors import NeedsError, first_line
from optrush.models.activation_offload import ALIGNED, Lane, Pair, Streams
from optrush.optim.adamw import LocalParam, OptimizerFactory, StateAllocator, allocate_state

ROWS = 16  # rows are split at multiples of this, for alignment
EVEN = 32  # rows whose number of weights is a multiple of this are aligned for states of any size


class Bus(Lane, Protocol):
    """Copies in one direction, concurrent with computation and with copies in the other direction."""

    def settle(self, mark: Any) -> None:
        """Block the host until these copies are done, so that it can read the results."""


class Registered(Streams):
    """A CUDA stream with pinned memory of the exact size, which torch would round up to a power of two."""

    def page(self, size: int) -> Tensor:
        page = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        runtime, address = torch.cuda.cudart(), page.data_ptr()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(int(runtime.cudaHostRegister(address, size, 0)))
        weakref.finalize(page, runtime.cudaHostUnregister, address).atexit = False
        return page

    def settle(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()


@dataclass(frozen=True)
class ParamRows:
    """A range of a parameter's rows, updated like a shard."""

    of: LocalParam
    rows: slice
    name: str
    decays: bool
    full_shape: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def local(self) -> Tensor:
        return self.of.local[self.rows]

    @property
    def grad(self) -> Tensor | None:
        return None if (grad := self.of.grad) is None else grad[self.rows]


class Paged:
    """An optimizer with states on the host.

    Memory: on the device two slots, each as large as the states of `piece` weights; on the host all states.
    """

    def __init__(
        self, trained: Sequence[LocalParam], factory: OptimizerFactory, inward: Bus, outward: Bus, *, piece: int,
        least: int, room_bytes: int | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            room_bytes: limit of this process's host memory; None: unknown.
            piece: number of weights whose states are copied together.
            least: parameters with fewer weights keep their states on the device.
        """
        self.trained, self.inward, self.outward = list(trained), inward, outward
        cut = [list(_rows(t, piece, least)) for t in self.trained]
        self.rows = [r for rows in cut for r in rows]
        ends = itertools.accumulate(map(len, cut))
        self.of = [range(end - len(rows), end) for rows, end in zip(cut, ends)]  # rows of each parameter
        self.piece = _pieces(self.rows, piece)
        self.inner = factory(self.rows, state_allocator=self._slot_allocator(factory))
        self.reads_host, self.rounding = self.inner.reads_host, self.inner.rounding
        self.left: list[Any] = [None, None]  # marks of the last copies out of each slot
        self._allocate_host(room_bytes)

    def _slot_allocator(self, factory: OptimizerFactory) -> StateAllocator:
        """Return the allocator of the slots, whose sizes come from building an optimizer per piece."""
        where = {id(self.rows[i]): k for i, k in self.piece.items()}
        taken = [0] * len({*where.values()})  # bytes of its slot, by piece

        def counted(t: LocalParam, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            taken[where[id(t)]] += _aligned(shape, dtype)
            return allocate_state(t, shape, dtype)

        for _, at in itertools.groupby(self.piece, self.piece.__getitem__):
            factory([self.rows[i] for i in at], state_allocator=counted)
        sizes, device = (max(taken[0::2], default=0), max(taken[1::2], default=0)), self.trained[0].local.device
        self.slots = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        taken = [0] * len(taken)

        def in_slot(t: LocalParam, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            if (k := where.get(id(t))) is None:
                return allocate_state(t, shape, dtype)
            begin = taken[k]
            taken[k] += _aligned(shape, dtype)
            return self.slots[k % 2][begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).view(*shape)

        return in_slot

    def _allocate_host(self, room_bytes: int | None) -> None:
        """Allocate host memory for all states in slots, and pair both for the copies."""
        states = [self.inner.param_state(i) for i in range(len(self.rows))]
        self.host: list[dict[str, Tensor]] = []  # of each parameter
        self.pairs: dict[int, list[Pair]] = {i: [] for i in self.piece}  # on the device, on the host
        self.counts: tuple[list[Tensor], list[Tensor]] = ([], [])  # of a parameter's later rows, and of its first
        self.pages: list[Tensor] = []  # not views: the bus may unpin memory when these are freed
        needed = sum(s.nbytes for i in self.piece for s in states[i].values() if s.dim())
        if room_bytes is not None and needed > room_bytes:
            raise _refusal(needed, f"it has {room_bytes / 2**30:.1f} GiB for each process")
        for t, rows in zip(self.trained, self.of):
            self.host.append({})
            for name, state in states[rows[0]].items():
                if rows[0] not in self.piece or not state.dim():
                    self.host[-1][name] = state
                    self.counts[0].extend(states[i][name] for i in rows[1:])
                    self.counts[1].extend([state] * (len(rows) - 1))
                else:
                    shape = (t.local.shape[0], *state.shape[1:])
                    try:
                        self.pages.append(self.outward.page(math.prod(shape) * state.itemsize))
                    except (RuntimeError, OSError) as error:
                        raise _refusal(needed, first_line(error)) from None
                    self.host[-1][name] = self.pages[-1].view(state.dtype).view(shape)
                    parts = torch.split(self.host[-1][name], [states[i][name].shape[0] for i in rows])
                    for i, part in zip(rows, parts, strict=True):
                        slot = self.slots[self.piece[i] % 2]
                        assert states[i][name].untyped_storage().data_ptr() == slot.data_ptr(), f"{t.name}: {name}"
                        self.pairs[i].append((states[i][name], part))

    def step(self, lr: Tensor, grad_scale: Tensor, found_inf: Tensor, only: Sequence[int] | None = None) -> None:
        """Implement `Optimizer`, piece by piece; the next piece is prefetched before a piece is updated."""
        chosen = range(len(self.trained)) if only is None else only
        rows = [i for t in chosen for i in self.of[t] if self.trained[t].grad is not None]
        if self.counts[0]:  # loading a checkpoint writes only the first count of a parameter
            torch._foreach_copy_(*self.counts)
        if staying := [i for i in rows if i not in self.piece]:
            self.inner.step(lr, grad_scale, found_inf, only=staying)
        turns: dict[int, list[int]] = {}
        for i in rows:
            if i in self.piece:
                turns.setdefault(self.piece[i], []).append(i)
        coming: dict[int, Any] = {}
        for k, following in itertools.zip_longest(turns, list(turns)[1:]):
            if k not in coming:
                coming[k] = self._prefetch(k, turns[k])
            if following is not None and (following - k) % 2:  # in the other slot
                coming[following] = self._prefetch(following, turns[following])
            self.inward.wait(coming.pop(k))
            self.inner.step(lr, grad_scale, found_inf, only=turns[k])
            self.left[k % 2] = self.outward.copy([(host, device) for i in turns[k] for device, host in self.pairs[i]])

    def _prefetch(self, k: int, rows: Sequence[int]) -> Any:
        """Start copies into a slot after its pending reads."""
        if self.left[k % 2] is not None:
            self.outward.wait(self.left[k % 2])
        return self.inward.copy([pair for i in rows for pair in self.pairs[i]])

    def release(self) -> None:
        """Free host memory and slots; the states are lost."""
        self.state()  # waits for the copies
        self.pairs, self.host, self.slots, self.pages = {}, [], [], []

    def state(self) -> dict[str, dict[str, Tensor]]:
        for mark in self.left:
            if mark is not None:
                self.outward.settle(mark)
        return {t.name: dict(states) for t, states in zip(self.trained, self.host, strict=True)}


def _rows(t: LocalParam, piece: int, least: int) -> Iterator[LocalParam]:
    """Yield a parameter as ranges of rows of about `piece` weights at most; a small parameter as it is."""
    size, shape = t.local.numel(), t.local.shape
    if size < least or not size or not shape:
        yield t
        return
    step = 1 if size // shape[0] % EVEN == 0 else ROWS
    at_once = max(step, piece * shape[0] // size // step * step)
    for first in range(0, shape[0], at_once):
        offset = (t.offset[0] + first, *t.offset[1:])
        yield ParamRows(t, slice(first, min(first + at_once, shape[0])), t.name, t.decays, t.full_shape, offset)


def _pieces(rows: Sequence[LocalParam], piece: int) -> dict[int, int]:
    """Return the piece of each paged row range; neighbors share a piece of up to `piece` weights."""
    pieces: dict[int, int] = {}
    k, filled = -1, math.inf
    for i, r in enumerate(rows):
        if isinstance(r, ParamRows):
            size = r.local.numel()
            if filled + size > piece:
                k, filled = k + 1, 0
            filled += size
            pieces[i] = k
    return pieces


def _aligned(shape: Sequence[int], dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED


def _refusal(needed: int, found: str) -> NeedsError:
    asked = f"{needed / 2**30:.1f} GiB of pinned host memory for optimizer states"
    do = "use smaller states (adam8bit, adam4bit), fewer processes on this machine, or a smaller model"
    return NeedsError(asked, f"not enough memory: {found}", do)
