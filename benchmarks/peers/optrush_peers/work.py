"""What every system of this package shares: its requirements, and the work that is handed to it.

A system builds its own model and loop as its makers recommend, and reports every step to `Work`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from optrush.benchmark.peer import Peer, training_facts
from optrush.config import Config
from optrush.hardware import Device
from optrush.technique import Requirement, library

if TYPE_CHECKING:
    from torch import Tensor

    from optrush.models.shapes import ModelShape

Weights = Literal["float32", "bfloat16"]
Adapter = Literal["lora", "qlora"]
# Of every linear of the blocks, as `lora` adapts them.
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class System(Peer):
    """Base class of every system here."""

    worker: ClassVar[str] = "optrush_peers.worker"
    libraries: ClassVar[tuple[str, ...]]  # distributions, in addition to torch
    shares: ClassVar[bool] = False  # the rows of a step among ranks
    first: ClassVar[str | None] = None  # a module that must be imported before torch and transformers

    weights: Weights = "float32"  # of parameters, gradients and optimizer states

    def needs(self, config: Config, device: Device) -> Iterator[Requirement]:
        """Yield what must hold for the run; imports nothing of the system."""
        asked = f"the system `{self.name}`"
        for name in self.required:
            installed = library(name) is not None
            yield Requirement(installed, asked, f"{name} is not installed", f"python -m pip install {name}")
        streamed = "its number of rows is unknown"
        yield Requirement(not config.data.stream, f"{asked} on `data.stream`", streamed, "set data.stream: false")

    def needs_ranks(self, config: Config, ranks: int) -> Iterator[Requirement]:
        """Yield that each rank has one micro-batch a step, and that the system can share a step."""
        if not self.shares:
            yield from super().needs_ranks(config, ranks)
        b, asked = config.batch, f"the system `{self.name}`"
        found = f"`batch.tokens: {b.tokens}`, `batch.micro_tokens: {b.micro_tokens}`"
        micro, do = b.micro_tokens or b.seq, "set both to the same number"
        if ranks > 1:
            found, do = f"{found}, {ranks} ranks", f"set batch.micro_tokens: {b.tokens // ranks // b.seq * b.seq}"
        met = isinstance(micro, int) and micro * ranks == b.tokens
        yield Requirement(met, f"{asked}, one micro-batch a step", found, do)

    def needs_cuda(self, device: Device) -> Requirement:
        """The requirement of a CUDA device."""
        met = device.kind == "cuda"
        found = device.name if met else "a CPU only"
        return Requirement(met, f"the system `{self.name}` needs a CUDA device", found, "leave the rung out")

    @property
    def required(self) -> tuple[str, ...]:
        """The distributions that these options need."""
        return self.libraries

    def train(self, work: Work) -> None:
        """Train `work.batches`, one a step, and report each to `work`."""
        raise AssertionError("each system defines it")

    def flops(self, shape: ModelShape, batch: Rows, trained: int) -> int:
        """Return the training FLOPs of one step's rows; trained: number of trained values."""
        return shape.flops(batch.n_tokens, batch.attended)


class Adapting(System):
    """A system that can train adapters on every linear of the blocks, instead of the weights."""

    adapter: Adapter | None = None
    rank: int = 16

    def flops(self, shape: ModelShape, batch: Rows, trained: int) -> int:
        """Return the training FLOPs: a frozen weight has no gradient, so 4 FLOPs a token instead of 6."""
        full = super().flops(shape, batch, trained)
        return full if self.adapter is None else full - (2 * shape.matrix_parameters - 6 * trained) * batch.n_tokens


@dataclass(frozen=True)
class Rows:
    """One step's rows on the host, padded to the longest of them. W: its width."""

    ids: Tensor  # (B, W) int64
    labels: Tensor  # (B, W) int64, the ids where they are learnt, else -100; not shifted, as transformers takes them
    mask: Tensor | None  # (B, W) int64, 1 at real tokens; None: every slot is one
    n_tokens: int
    n_targets: int
    attended: int  # sum of squared lengths


@dataclass
class Work:
    """The load of a run and its clock: a system calls `begin` once, `step` after each update, `record` at the end."""

    config: Config
    hf: dict[str, Any]  # config.json
    folder: Path  # config.json, safetensors and a tokenizer
    scratch: Path  # an empty folder, deleted afterwards
    batches: list[Rows]  # of all ranks
    device: str  # "cuda" or "cpu"
    rank: int = 0
    ranks: int = 1
    marks: list[Any] = field(default_factory=list)  # before the first step and after each: seconds, or CUDA events
    losses: list[Tensor] = field(default_factory=list)  # () each, on the device
    seen: dict[str, str] = field(default_factory=dict)

    @property
    def seconds(self) -> list[float]:
        """Seconds of each step, from the end of one to the end of the next on the device, as our own meter counts."""
        if self.device != "cuda":
            return [b - a for a, b in itertools.pairwise(self.marks)]
        self.marks[-1].synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(self.marks)]

    @property
    def own_rows(self) -> int:
        """Return a rank's rows of a step."""
        return len(self.batches[0].ids) // self.ranks

    def begin(self) -> None:
        """Start the clock and the count of peak memory, before the first step."""
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self._mark()

    def step(self, loss: Tensor) -> None:
        """Record the end of an update, without a wait for the device.

        Args:
            loss: mean over the targets of this rank's rows, ().
        """
        self.losses.append(loss.detach().clone())
        self._mark()

    def _mark(self) -> None:
        import torch

        if self.device != "cuda":
            self.marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self.marks.append(event)

    def record(self, parameters: Iterable[Tensor], states: Iterable[object]) -> None:
        """Record what was trained, and in which precision."""
        trained = list(parameters)
        self.seen = training_facts(sum(p.numel() for p in trained), trained, states)
