"""How many bytes torch holds during the steps of a job, counted on a machine without a GPU.

`track` counts them by a dispatch mode, which sees every operator, in forward, in backward, in the optimizer and inside
autograd functions: it adds a storage when it first appears and takes it away when it dies, and says at the peak what
was alive. `supposed` assembles a job of any size without bytes, so that published shapes are tracked in seconds.
`allocated` asks the CPU allocator itself. It needs the bytes, and sees what the mode cannot: compiled code, and what a
kernel allocates for itself. Where both see everything they agree (tests/unit/test_memory_tracker.py).

They count what `torch.cuda.max_memory_allocated` counts, less the allocator's rounding, the libraries' workspaces
(cuBLAS: 32 MiB on Hopper for each of the two threads that multiply), and what kernels allocate for themselves, but for
those of INSIDE and, where the tracker is told to count as on CUDA, of INSIDE_CUDA.
"""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from optrush.config import Config
from optrush.kernels import adamw
from optrush.models.hf import HFModel, _opened
from optrush.models.shapes import native_obstacle
from optrush.models.weights import RandomInit, WeightEntry, WeightMap, native_entries
from optrush.planner import baseline, search
from optrush.technique import Technique
from optrush.techniques import ALL, fused_loss
from optrush.trainer import build as assemble
from optrush.trainer.trainer import Storage, Trainer

from trials import assembled, build_decoder

aten = torch.ops.aten
PHASES = ("forward", "head", "backward", "update", "between")


@dataclass(frozen=True)
class Piece:
    """One storage: how it began."""

    bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    op: str  # the operator that made it; "weight", "state" or "buffer" for what was there before
    phase: str


Live = list[tuple[int, tuple[int, ...], torch.dtype, str, int]]  # (bytes of all, shape, dtype, operator, how many)


@dataclass(frozen=True)
class Measured:
    """What the steps held at most."""

    peak: int
    phase: str  # one of PHASES, in which the peak lay
    live: Live  # at the peak, largest first; sums to `peak`
    peaks: dict[str, int]  # of each phase

    def __str__(self) -> str:
        rows = [f"{self.peak} bytes in {self.phase}; by phase {self.peaks}"]
        rows += [f"{b:>14} = {count:>3} x {shape} {str(dtype)[6:]} {op}" for b, shape, dtype, op, count in self.live]
        return "\n".join(rows)


def _bytes(t: Any) -> int:
    return int(t.numel() * t.element_size())


# What a kernel allocates and frees by itself: bytes from its arguments. The same on CPU and on CUDA.
INSIDE: dict[Any, Callable[..., int]] = {
    aten.logsumexp.default: lambda x, *_: _bytes(x),  # exp(x - max)
}
INSIDE_CUDA: dict[Any, Callable[..., int]] = {
    aten._softmax_backward_data.default: lambda grad, *_: 2 * _bytes(grad),  # grad * output; the result
}
# Operators that make nothing, which FakeTensorMode would run on real zeros.
WRITES = (aten._fused_adamw_.default, aten._fused_adamw_.tensor_lr)
# While a dispatch mode is active, autograd writes nothing in place. Left: what it calls then, right: what it calls
# without one, where nobody else holds the first tensor. So the tracker writes in place there.
IN_PLACE = {aten.add.Tensor: aten.add_.Tensor, aten.scatter_add.default: aten.scatter_add_.default}
ALONE, ALONE_STORAGE = 4, 2  # the counts of owners, asked from a dispatch mode, where autograd is the only one


def _sole(args: Any) -> bool:
    """Whether autograd would write into the first tensor: nobody else holds it or its storage, and it is dense."""
    a, b = args[0], args[-1]
    storage = a.untyped_storage()
    if not isinstance(b, Tensor) or a.dtype != b.dtype or storage.nbytes() != _bytes(a) or 0 in a.stride():
        return False
    return bool(a._use_count() <= ALONE and torch._C._storage_Use_Count(storage._cdata) <= ALONE_STORAGE)


class Tracker(TorchDispatchMode):
    """Counts the bytes of storages while they live.

    Args:
        supposed: answers whoever asks for the value of a tensor without bytes (flags and rates: nothing is wrong).
        cuda: counts what CUDA's kernels allocate for themselves, wherever the tensors are.
    """

    def __init__(self, supposed: bool = False, cuda: bool = False) -> None:
        super().__init__()
        self.supposed, self.inside = supposed, {**INSIDE, **(INSIDE_CUDA if cuda else {})}
        self.current, self.peak, self.phase = 0, 0, "between"
        self.peaks: dict[str, int] = defaultdict(int)
        self.pieces: dict[int, Piece] = {}  # alive now, by storage
        self._references: dict[int, weakref.ref[Any]] = {}
        self._at_peak: tuple[str, list[Piece]] = ("between", [])
        self._fresh: list[Piece] | None = None  # the peak has not been written down: with these passing pieces

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.supposed and func is aten._local_scalar_dense.default:
            return {torch.bool: False, torch.float32: 1.0}.get(args[0].dtype, 0)
        if self.supposed and func in WRITES:
            return None
        if self.phase == "backward" and func in IN_PLACE and not torch.is_grad_enabled() and _sole(args):
            IN_PLACE[func](*args, **kwargs)
            return args[0]
        if func in self.inside:
            self._passing(self.inside[func](*args), str(func))
        out = func(*args, **kwargs)
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self.hold(t, str(func))
        return out

    def hold(self, t: Tensor, op: str) -> None:
        """Count a tensor's storage from now on, unless it is counted already."""
        if t.layout is not torch.strided:
            return
        storage = t.untyped_storage()
        key = storage._cdata
        if key in self._references and self._references[key]() is not None:
            return
        piece = Piece(storage.nbytes(), tuple(t.shape), t.dtype, op, self.phase)
        self._references[key] = weakref.ref(storage, lambda _, key=key: self._drop(key))
        self.pieces[key] = piece
        self.current += piece.bytes
        self._reached([])

    def mark(self, phase: str) -> None:
        """From here on we are in `phase`."""
        self.phase = phase
        self._reached([])

    def measured(self) -> Measured:
        """What was seen so far."""
        self._write_down()
        phase, pieces = self._at_peak
        count: dict[tuple[Any, ...], int] = defaultdict(int)
        for p in pieces:
            count[p.bytes, p.shape, p.dtype, p.op] += 1
        live = [(b * n, shape, dtype, op, n) for (b, shape, dtype, op), n in count.items()]
        return Measured(self.peak, phase, sorted(live, key=lambda row: -row[0]), dict(self.peaks))

    def _passing(self, extra: int, op: str) -> None:
        """A kernel's own bytes, gone when it returns."""
        self.current += extra
        self._reached([Piece(extra, (extra,), torch.uint8, f"inside {op}", self.phase)])
        self._write_down()
        self.current -= extra

    def _reached(self, passing: list[Piece]) -> None:
        self.peaks[self.phase] = max(self.peaks[self.phase], self.current)
        if self.current > self.peak:
            self.peak, self._fresh = self.current, passing
            self._fresh_phase = self.phase

    def _write_down(self) -> None:
        if self._fresh is not None:
            self._at_peak, self._fresh = (self._fresh_phase, [*self.pieces.values(), *self._fresh]), None

    def _drop(self, key: int) -> None:
        self._write_down()  # of all that a peak holds, nothing has died before
        self.current -= self.pieces.pop(key).bytes
        del self._references[key]


def track(trainer: Trainer, n: int = 2, *, supposed: bool = False, cuda: bool = False) -> Measured:
    """The most that is held over `n` steps of a job of one process, beginning with its first; nothing compiled.

    Args:
        supposed: the job is of `supposed`.
        cuda: as of Tracker.
    """
    tracker = Tracker(supposed, cuda)
    known(tracker, trainer)
    with phases(tracker.mark, trainer), tracker:
        steps(trainer, n)
    return tracker.measured()


def allocated(trainer: Trainer, n: int = 1) -> dict[str, int]:
    """The most that the CPU allocator has given out in each phase of `n` steps, after a first that compiles."""
    steps(trainer, 1)
    there = Tracker()
    known(there, trainer)
    marks: list[tuple[int, str]] = []

    def mark(phase: str) -> None:
        marks.append((time.time_ns(), phase))

    with phases(mark, trainer), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        steps(trainer, n)
    assert seen.profiler is not None
    events = seen.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    peaks: dict[str, int] = defaultdict(int)
    current, phase, at = there.current, "between", 0
    for when, change in changes:
        while at < len(marks) and marks[at][0] <= when:
            phase, at = marks[at][1], at + 1
        current += change
        peaks[phase] = max(peaks[phase], current)
    return dict(peaks)


def steps(trainer: Trainer, n: int) -> None:
    """The first `n` steps, as the loop takes them."""
    for k in range(1, n + 1):
        batches = next(trainer.batches)
        trainer.set_step(k)
        trainer.forward_backward(batches, trainer.all_reduce_terms(sum(b.n_terms for b in batches)))
        trainer.optimizer_step()


def known(tracker: Tracker, trainer: Trainer) -> None:
    """Count what a job holds before its first step."""
    for t in trainer.trained:
        tracker.hold(t.parameter, "weight")
    for root in trainer.roots:
        for held in [*root.parameters(), *root.buffers()]:
            tracker.hold(held, "buffer")
    for states in trainer.optimizer.state().values():
        for state in states.values():
            tracker.hold(state, "state")


@contextmanager
def phases(mark: Callable[[str], None], trainer: Trainer) -> Iterator[None]:
    """Calls `mark` with one of PHASES where a step enters it; the job's callables are put back at the end."""
    loss, score, update = trainer.loss, trainer.loss_from_hidden, trainer.optimizer_step

    def marked_loss(batch: Any) -> Tensor:
        mark("forward")
        out = loss(batch)
        mark("backward")
        return out

    def marked_score(hidden: Tensor, batch: Any) -> Tensor:
        mark("head")
        return score(hidden, batch)

    def marked_update() -> tuple[Tensor, Tensor]:
        mark("update")
        out = update()
        mark("between")
        return out

    trainer.loss, trainer.loss_from_hidden, trainer.optimizer_step = marked_loss, marked_score, marked_update
    try:
        yield
    finally:
        trainer.loss, trainer.loss_from_hidden, trainer.optimizer_step = loss, score, update


def check_prediction(config: Config, rel: float = 0.05, classes: Sequence[type[Technique]] = ALL) -> Measured:
    """Check the plan's peak on an H200 against a step's on tensors without bytes, and return what that held."""
    peak = search.predict(config, "h200", classes=classes).peak_bytes
    said = peak - baseline.CUBLAS_BYTES  # the one line that only a GPU has
    with supposed(config, classes) as job:
        found = track(job, 1, supposed=True)
    assert said == pytest.approx(found.peak, rel=rel), str(found)
    return found


@contextmanager
def supposed(run: Any, classes: Sequence[type[Technique]] = ALL, *, kernels: bool = True) -> Iterator[Trainer]:
    """A job whose tensors have shapes and no bytes, valid inside the context: any model, in seconds.

    No value is ever made: weights are not drawn, the wrapper is taken without its probe, and transformers is told
    that rows hold one document each unless the run packs.

    Args:
        kernels: rounded updates allocate nothing, as those of a GPU; else what a CPU's loop allocates.
    """
    materialise = Storage.materialise
    with ExitStack() as stack:

        def without_bytes(storage: Storage, trainer: Trainer) -> None:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            materialise(storage, trainer)

        stack.enter_context(mock.patch.object(assemble, "load", _unfilled))
        stack.enter_context(mock.patch.object(Storage, "materialise", without_bytes))
        stack.enter_context(mock.patch("torch.nn.Module.to_empty", _to_empty))
        stack.enter_context(mock.patch.dict(fused_loss.LOGITS, {"cpu": fused_loss.LOGITS["cuda"]}))
        if kernels:
            stack.enter_context(mock.patch.object(adamw.ReferenceUpdate, "__call__", return_value=None))
        if "packing" not in run.with_:  # it reads the positions' values to find that out
            single = mock.patch("transformers.masking_utils.find_packed_sequence_indices", return_value=None)
            stack.enter_context(single)
        yield assembled(run, classes)


def _unfilled(folder: Any, hf: Any, implementation: Any, dtype: torch.dtype, seed: int, growth: Any = None) -> Any:
    """As `optrush.models.hf.load`, with a recipe that fills nothing."""
    if implementation == "transformers" or native_obstacle(hf) is not None:
        with torch.device("meta"):
            model: Any = HFModel(_opened(None, hf, dtype))
        model.to_meta()
        model.restore_buffers = lambda device: _to_empty(model, device=device, buffers=True)
        entries = {n: WeightEntry(tuple(p.shape), ((n, p.shape[0]),)) for n, p in model.named_parameters()}
        return model, Unfilled(entries, RandomInit(seed, 0.02, {}))
    model = build_decoder(hf, dtype)
    return model, Unfilled(native_entries(model), RandomInit(seed, 0.02, {}))


class Unfilled(WeightMap):
    """Knows where all values would be from, and fills nothing."""

    def fill(self, name: str, local: Tensor, offset: tuple[int, ...]) -> None:
        pass


def _to_empty(module: nn.Module, *, device: torch.device, buffers: bool = False) -> None:
    """As torch's, for a mode in which a parameter of the meta device cannot become another."""
    for part in module.modules():
        held: Any = part._buffers if buffers else part._parameters
        for name, t in held.items():
            if t is not None:
                empty = torch.empty(t.shape, dtype=t.dtype, device=device)
                held[name] = empty if buffers else nn.Parameter(empty, t.requires_grad)
