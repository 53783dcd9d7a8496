"""CUDA graphs: record the forward and backward passes of a window once, and replay them with one call per step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from optrush.errors import NeedsError, first_line
from optrush.planner.ledger import Line, Rule, WorkItem, add, live, tagged
from optrush.technique import Environment, Numerics, Part, Requirement, Technique, Trainer

if TYPE_CHECKING:
    from torch import Tensor

    from optrush.data.batch import Batch

Recorder = Callable[[Callable[[], None], Callable[[], None]], tuple[Callable[[], None], int]]
WARM_UP = 3  # windows before the recording: compilers, kernel choices and workspaces settle in them
# Parts whose owner cannot be recorded, the reason, and the fix.
ONE = "leave one of the two out"
APART = (
    (Part.DATA, "a technique that sums gradients over several ranks", "take one rank, or leave cuda-graphs out"),
    *(
        (part, "a technique that shards the model or its rows over several ranks", "take one rank, or leave it out")
        for part in (Part.TP, Part.CP, Part.PP)
    ),
    (Part.ACTIVATION_STORAGE, "a technique that moves or rounds saved activations", ONE),
    (Part.UPDATE, "a technique that updates inside the window", ONE),
    (
        Part.ACTIVATION_CHECKPOINTING,
        "a technique that recomputes blocks, and reads the random state of their first run",
        ONE,
    ),
)


@dataclass(frozen=True)
class CudaGraphs(Technique):
    """Records all micro-batches of the first full window; later ones are copied into place and replayed.

    The update runs outside, so every optimizer works. Windows of other shapes and evaluations run without the graph;
    the second full window in a row of another shape is recorded anew.

    Source: https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs/
    Memory: a window's peak stays reserved between windows, gradients included; evaluation and the update's temporaries
        are added. 28 bytes per slot of the window for its batches.
    Work: unchanged FLOPs; the host launches one graph and 10 copies per micro-batch instead of every kernel.
    Differs from the source: one graph of the whole window, not one of each forward and backward pass.
    """

    name = "cuda-graphs"
    summary = "records all kernels of a window once and launches them with one call"
    source = "https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs/"
    numerics = Numerics.EXACT
    claims = frozenset({Part.CAPTURE})

    @classmethod
    def variants(cls, env: Environment) -> Iterator[dict[str, Any]]:
        """Yield the defaults for runs in which recorded windows were compared: losses that read only their rows."""
        if env.images is None and env.teacher is None and env.rollout is None:
            yield {}

    def needs(self, env: Environment) -> Iterator[Requirement]:
        yield env.needs_dense("`cuda-graphs`")
        yield env.needs_gpu(self.name)
        do = "take model.implementation: native, or leave cuda-graphs out"
        found = "the model runs through transformers, whose code may synchronize with the GPU"
        yield Requirement(env.native, "`cuda-graphs` records our own decoder", found, do)
        fixed = Part.ROW_WIDTH not in env.claimed or Part.COMPILED in env.claimed
        found, do = "a technique that gives each micro-batch its own width", "take packing, or leave cuda-graphs out"
        yield Requirement(fixed, "`cuda-graphs` records one shape", found, do)
        for part, found, do in APART:
            yield Requirement(part not in env.claimed, "`cuda-graphs` records a window on one device", found, do)

    def predict(self, env: Environment) -> Iterator[Rule]:
        n = env.accumulation
        yield live(tagged("launches"), "launched as one graph", gone=True)
        yield add(
            WorkItem("window", "one graph, and copies of its batches", "step", launches=1 + 10 * n),
            Line("window.batches", "copies of the window's batches, at fixed places", 28 * n, "byte", "always", True),
        )

    def wrap_window(self, trainer: Trainer) -> int:
        trainer.forward_backward = Window(trainer, recorded)
        return 1


class Window:
    """`trainer.forward_backward`, recorded at the first window of the run's full shape.

    A recording holds addresses: of the batches and the divisor (here), of weights, loss scale and gradients. Host
    values are constants in it, so `longest` is T, the bound of every batch.
    """

    inputs: list[Batch]
    terms: Tensor  # () float32
    mean: Tensor  # () float32
    finite: Tensor  # () bool
    grads: list[Tensor | None]

    def __init__(self, trainer: Trainer, record: Recorder) -> None:
        """record: calls the first function several times, and the second, which frees its results, after each call but
        the last; returns a function that replays it in the same memory, and the bytes reserved for that."""
        self.trainer, self.record, self.plain = trainer, record, trainer.forward_backward
        self.replay: Callable[[], None] | None = None
        self.others = 0  # consecutive whole windows that the recording cannot replay

    def __call__(self, batches: list[Batch], terms: float | Tensor) -> Tensor:
        """Return the window's loss, replayed if the batches match the recording; record again after two that do not."""
        if not self._whole(batches):
            return self.plain(batches, terms)
        alike = self.replay is None or all(map(_alike, self.inputs, batches))
        self.others = 0 if alike else self.others + 1
        if self.others == 1:
            return self.plain(batches, terms)
        if self.others == 2:  # the shape of batches changed for good
            self.replay, self.others = None, 0
        if self.replay is None:
            self._begin(batches, terms)
            self.replay, self.trainer.outside_bytes = self.record(self._run, self._forget)
            self.weights = self._places()
        assert self.weights == self._places(), "weights have moved since the window was recorded"
        self._fill(batches, terms)
        self.replay()
        for t, grad in zip(self.trainer.trained, self.grads, strict=True):  # the update dropped them
            t.parameter.grad = grad
        self.trainer.loss_is_finite = self.finite
        return self.mean.clone()

    def _whole(self, batches: list[Batch]) -> bool:
        env = self.trainer.env
        shapes = {tuple(b.tokens.shape) for b in batches}
        return len(batches) == env.accumulation and shapes == {(env.micro_rows, env.seq)}

    def _begin(self, batches: list[Batch], terms: float | Tensor) -> None:
        import torch

        device, T = self.trainer.world.device, self.trainer.env.seq
        self.inputs = []
        for host in batches:
            batch = host.to(device)
            copied = batch._each(torch.Tensor.clone)  # loaders own their tensors
            self.inputs.append(replace(copied, documents=copied.documents._replace(longest=T)))
        self.terms = torch.ones((), device=device)
        self._fill(batches, terms)

    def _fill(self, batches: list[Batch], terms: float | Tensor) -> None:
        """Copy a window into the recording's inputs, without waiting for the device."""
        device = self.trainer.world.device
        for ours, host in zip(self.inputs, batches, strict=True):
            for to, new in zip(tensors(ours), tensors(host.to(device)), strict=True):
                to.copy_(new)
        if isinstance(terms, int | float):
            self.terms.fill_(terms or 1)
        else:
            self.terms.copy_(terms)

    def _run(self) -> None:
        """Run the window on the inputs; the results are referenced here, so that their memory is not reused."""
        self.mean = self.plain(self.inputs, self.terms)
        self.finite = self.trainer.loss_is_finite
        self.grads = [t.parameter.grad for t in self.trainer.trained]

    def _forget(self) -> None:
        self.trainer.zero_grad()
        self.grads = []

    def _places(self) -> list[int]:
        return [t.parameter.data_ptr() for t in self.trainer.trained]


def tensors(batch: Batch) -> list[Tensor]:
    """Return the tensors of a batch."""
    held: list[Tensor] = []

    def take(t: Tensor) -> Tensor:
        held.append(t)
        return t

    batch._each(take)
    return held


def _alike(ours: Batch, other: Batch) -> bool:
    """Return whether a batch can be copied over another: equal shapes and recorded host values."""
    same = [t.shape for t in tensors(ours)] == [t.shape for t in tensors(other)]
    return same and ours.documents.single == other.documents.single


def recorded(function: Callable[[], None], forget: Callable[[], None]) -> tuple[Callable[[], None], int]:
    """Record a function's kernels, after warming up on a separate stream, as torch requires.

    A window updates no weight, and the random state is restored, so the run is unchanged. But torch's peak is reset,
    because it counts a replay's temporary memory as free.

    Returns:
        the function that replays it, and the peak bytes of its temporaries.

    Raises:
        NeedsError: the function cannot be recorded.
    """
    import torch

    random = torch.cuda.get_rng_state()
    side, here = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
    side.wait_stream(here)
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            function()
            forget()
    here.wait_stream(side)
    torch.cuda.set_rng_state(random)
    graph = torch.cuda.CUDAGraph()
    # thread_local: other threads may call CUDA meanwhile (a loader pins memory).
    torch.cuda.reset_peak_memory_stats()
    capture(function, torch.cuda.graph(graph, capture_error_mode="thread_local"))
    held = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return graph.replay, held


def capture(function: Callable[[], None], recording: AbstractContextManager[Any]) -> None:
    """Call a function while its kernels are recorded.

    Raises:
        NeedsError: the device refused; out-of-memory errors are re-raised unchanged.
    """
    import torch

    try:
        with recording:
            function()
    except RuntimeError as error:
        first: BaseException = error  # ending the recording fails too, and its error would hide the first
        while first.__context__ is not None:
            first = first.__context__
        if isinstance(first, torch.OutOfMemoryError):
            raise first from None
        found = first_line(first)
        raise NeedsError("`cuda-graphs` records a window", found, "leave it out: --without cuda-graphs") from error
