"""The live state of a run: callables that techniques replace or wrap, slots they fill, and the contract of each.

Read this file, then step.py (the default callables), then train.py (the loop that calls them).
Shapes: B rows, T tokens a row, D width (docs/notation.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn

from optrush import sharded
from optrush.config import Run
from optrush.data.batch import Batch
from optrush.data.packing import Layout, Padded
from optrush.data.sampler import Evaluation, Live, Loading, Stream
from optrush.data.sources import Sources
from optrush.distributed import World
from optrush.kernels.adamw import Rounding
from optrush.models.weights import Recipe
from optrush.optim.adamw import Make, Optimizer, whole
from optrush.technique import Edit, Setup

if TYPE_CHECKING:
    from optrush.models.decoder import Decoder
    from optrush.models.hf import Adapter

__all__ = ["Batch", "Job", "State", "Trained"]


@dataclass(frozen=True)
class Trained:
    """One trained parameter: canonical name, local tensor and placement, fixed once at assembly.

    After assembly nobody asks the model for its parameters: sharding leaves gathered tensors there.
    """

    name: str
    parameter: nn.Parameter  # may be a DTensor
    decays: bool  # weight decay applies: matrices, not norms or biases

    @property
    def local(self) -> Tensor:
        """This rank's piece, the very storage."""
        return sharded.local(self.parameter.detach())

    @property
    def grad(self) -> Tensor | None:
        """This rank's piece of the gradient."""
        g = self.parameter.grad
        return None if g is None else sharded.local(g)

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        return tuple(self.parameter.shape)

    @property
    def offset(self) -> tuple[int, ...]:
        """Where in the whole this rank's piece begins."""
        return sharded.offset(self.parameter)

    @property
    def cut(self) -> bool:
        """Whether this rank holds a slice only (else the whole, the same on every rank)."""
        p = self.parameter
        return sharded.is_sharded(p) and any(how.is_shard() for how in p.placements)


class State(Protocol):
    """What a technique must keep over a kill, beside parameters and optimizer states: JSON, equal on every rank."""

    def save(self) -> dict[str, Any]: ...
    def load(self, saved: dict[str, Any]) -> None: ...


@dataclass
class Job:
    """Assembled by assemble.py, driven by train.py."""

    run: Run
    setup: Setup
    world: World
    hf: dict[str, Any]  # config.json as edited
    model: Decoder | Adapter
    recipe: Recipe

    # data
    layout: Layout = field(default_factory=Padded)  # how samples become rows
    loading: Loading = field(default_factory=Loading)  # who makes batches ready
    stream: Stream | Live = None  # type: ignore[assignment]
    evaluation: Evaluation | None = None
    """This rank's held-out batches, the same number on every rank; None: the run holds nothing out."""

    # callables
    batches: Iterator[list[Batch]] = field(default_factory=lambda: iter(()))
    """An item is all of this rank's micro-batches of one step: the same number on every rank, possibly empty ones."""
    score: Callable[[Tensor, Batch], Tensor] = None  # type: ignore[assignment]
    """The objective: hidden (B, T, D) -> () float32, a sum over the batch's own terms; unscaled, undivided, local.
    It adds what else it knows of them to `figures`."""
    loss: Callable[[Batch], Tensor] = None  # type: ignore[assignment]
    """() float32: default is the score of the model's hidden states. Gradient mode is the caller's."""
    gradients: Callable[[list[Batch], int | Tensor], Tensor] = None  # type: ignore[assignment]
    """The window: afterwards each trained local gradient is scale * d(sum of all ranks' losses)/dw / terms, summed
    over the data axes. Clears first, may be called again. Returns () float32: the mean loss over the data axes.
    terms: on the host, or () float32 on the device and at least 1."""
    losses: Callable[[list[Batch]], Tensor] = None  # type: ignore[assignment]
    """() float32: sum of losses over the data axes; no gradient, eval mode; weights are left as between steps."""
    update: Callable[[], tuple[Tensor, Tensor]] = None  # type: ignore[assignment]
    """(norm before clipping (), skipped () bool), on the device: unscale, guard, clip, step, free."""
    begin: Callable[[int], None] = None  # type: ignore[assignment]
    """Before step n (from 1): learning rate and random state are functions of it."""

    # slots
    smaller: Callable[[], int | None] = lambda: None
    """Rows of the micro-batch to take after one that did not fit; None: there is none, or nobody may choose it."""
    told: Callable[[dict[str, Any]], None] = lambda what: None
    """What happens to the run while it trains: a line of metrics.jsonl, and for people."""
    untrained: Callable[[], AbstractContextManager[None]] | None = None
    """Within it the model is what it was before training (adapters are off); None: nobody can undo the training."""
    syncing: Callable[[bool], AbstractContextManager[None]] = lambda last: nullcontext()
    """Around one micro-batch's forward and backward; `last` is where gradients are summed over the data axes."""
    discard: Callable[[], None] = None  # type: ignore[assignment]
    """Forgets all gradients, half-summed ones too; raises where it cannot."""
    total: Callable[[int], int] = None  # type: ignore[assignment]
    """Sum of a host integer over the data axes; carries the stop flag along."""
    share: Callable[[Tensor], Tensor] = None  # type: ignore[assignment]
    """Sum of a device tensor over the data axes."""
    norm: Callable[[], Tensor] = None  # type: ignore[assignment]
    """() float32: the norm of all gradients as they are (scaled), over every axis a gradient is cut on."""
    scale: Tensor = None  # type: ignore[assignment]  # () float32, the loss scale
    lr: Tensor = None  # type: ignore[assignment]  # () float32
    rounding: Rounding = "nearest"  # of updated bfloat16 weights; set in `adapt`, done by the optimizer
    housing: Callable[[Sequence[Trained], Make], Optimizer] = whole
    """Makes an optimizer over parameters, its states where they are kept; set before `optimizer`, called there."""
    optimizer: Optimizer = None  # type: ignore[assignment]
    compile_options: dict[str, Any] = field(default_factory=dict)  # torch.compile's, of whatever is compiled
    recorded_bytes: int = 0  # that a recorded window holds on the device, beside what torch counts as allocated
    precision: torch.dtype | None = None  # of products; realised by autocast, or by the owner of the data axis
    autocast: bool = False  # precision is still to be realised by autocast
    finite: Tensor = None  # type: ignore[assignment]  # () bool, the window's loss was finite; set by gradients
    figures: dict[str, Tensor] = field(default_factory=dict)
    """What the score says beside the loss, by the names of metrics.jsonl: () float32 on the device, sums over this
    rank's terms since the window began (gradients clears them) or the evaluation did."""
    patience: int = 3  # skipped updates in a row that end the run

    # descriptions
    roots: list[nn.Module] = field(default_factory=list)  # what we call ourselves, and so what is sharded
    trained: list[Trained] = field(default_factory=list)
    fingerprints: dict[str, str] = field(default_factory=dict)  # what a resumed run must find unchanged
    tokenizer: Any = None  # transformers' tokenizer; None for random tokens on a shape
    sources: Sources = None  # type: ignore[assignment]  # what was read, set aside and cleaned away
    state: dict[str, State] = field(default_factory=dict)
    edits: list[Edit] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stopping: Literal[0, 1, 2] = 0  # this rank wants to stop: 1 told to, 2 the run has failed
    stopped: Literal[0, 1, 2] = 0  # what all ranks agreed on: the step under way is the last

    def describe(self) -> str:
        """What was changed, by whom and by which kernel, and what was left as it is, with the reason."""
        lines = [str(edit) for edit in self.edits]
        lines += [f"{'note':<10} {n}" for n in self.notes]
        return "\n".join(lines) or "nothing changed: the baseline"
