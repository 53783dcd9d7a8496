"""What another system is to a ladder: its options, what it needs, and the work it is given. Pure.

A rung with `peer:` is trained by somebody else: the same shape from the same initial weights, the same documents in the
same order, T and rows as they are, in a process of its own (peer_worker.py). One file a system under peers/: it builds
its own model and loop as its makers recommend, and tells `Work` of every step.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from optrush.config import Config
from optrush.hardware import Device
from optrush.technique import Requirement, library

if TYPE_CHECKING:
    from torch import Tensor

    from optrush.models.shapes import ModelShape

Weights = Literal["float32", "bfloat16"]
Adapter = Literal["lora", "qlora"]
LITTLE = 1e-3  # a type that so few of the values have is no other precision: see `facts`
UNCOMPARED = "not compared"
# Of every linear of the blocks, as `lora` adapts them.
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Peer(BaseModel):
    """Base of every system; the fields of a subclass are its options."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: ClassVar[str]
    libraries: ClassVar[tuple[str, ...]]  # distributions, beside torch
    first: ClassVar[str | None] = None  # a module that must be imported before torch and transformers
    begins_alike: ClassVar[bool] = True  # from the same weights as we; else its losses cannot be held against ours

    weights: Weights = "float32"  # of parameters, gradients and optimizer states

    @property
    def title(self) -> str:
        """Its name and its options, for people."""
        raise AssertionError("each system says it")

    def needs(self, config: Config, device: Device) -> Iterator[Requirement]:
        """What must hold for its run; may import nothing."""
        for name in self.required:
            found = f"{name} is not installed"
            yield Requirement(
                library(name) is not None, f"the system `{self.name}`", found, f"python -m pip install {name}"
            )
        b = config.batch
        found = f"`batch.tokens: {b.tokens}`, `batch.micro_tokens: {b.micro_tokens}`"
        asked, do = f"the system `{self.name}`, one micro-batch a step", "set both to the same number"
        yield Requirement((b.micro_tokens or b.seq) == b.tokens, asked, found, do)
        asked = f"the system `{self.name}` on `data.stream`"
        yield Requirement(not config.data.stream, asked, "nobody has counted its rows", "set data.stream: false")

    @property
    def required(self) -> tuple[str, ...]:
        """The distributions that these options need."""
        return self.libraries

    def train(self, work: Work) -> None:
        """Trains `work.batches`, one a step, and tells `work` of each."""
        raise AssertionError("each system does it")

    def flops(self, shape: ModelShape, batch: Rows, trained: int) -> int:
        """Training FLOPs of one step's rows; trained: values that are trained."""
        return shape.flops(batch.n_tokens, batch.attended)


class Adapting(Peer):
    """A system that can train adapters on every linear of the blocks, instead of the weights."""

    adapter: Adapter | None = None
    rank: int = 16

    def flops(self, shape: ModelShape, batch: Rows, trained: int) -> int:
        """A frozen weight has no gradient of its own: 4 FLOPs a token instead of 6."""
        whole = super().flops(shape, batch, trained)
        return whole if self.adapter is None else whole - (2 * shape.matrix_parameters - 6 * trained) * batch.n_tokens


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
    """What a system is given, and what it tells: `begin` once, `step` after each update, `sees` at the end."""

    config: Config
    hf: dict[str, Any]  # config.json
    folder: Path  # config.json, safetensors and a tokenizer
    scratch: Path  # an empty folder, gone afterwards
    batches: list[Rows]
    device: str  # "cuda" or "cpu"
    marks: list[Any] = field(default_factory=list)  # before the first step and after each: seconds, or CUDA events
    losses: list[Tensor] = field(default_factory=list)  # () each, on the device
    seen: dict[str, str] = field(default_factory=dict)

    @property
    def seconds(self) -> list[float]:
        """Of each step, from the end of one to the end of the next on the device, as our own meter counts."""
        if self.device != "cuda":
            return [b - a for a, b in itertools.pairwise(self.marks)]
        self.marks[-1].synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(self.marks)]

    def begin(self) -> None:
        """Before the first step; from here memory and time count."""
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self._mark()

    def step(self, loss: Tensor) -> None:
        """After an update; waits for nothing.

        Args:
            loss: mean over the step's targets, ().
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

    def sees(self, parameters: Iterable[Tensor], states: Iterable[object]) -> None:
        """What was trained, and in which precision."""
        trained = list(parameters)
        self.seen = facts(sum(p.numel() for p in trained), trained, states)


def facts(count: int, weights: Iterable[Any], states: Iterable[Any]) -> dict[str, str]:
    """What two systems must have in common, in words; and, UNCOMPARED, types that hardly any value has.

    Args:
        count: trained values.
        states: of the optimizer, the scales of codes too; single values (counts of steps) say nothing and are left out.
    """
    found, few = {"trained parameters": f"{count:,}"}, list[str]()
    for name, tensors in (("weights", weights), ("optimizer states", states)):
        values = Counter[str]()
        for t in tensors:
            if getattr(t, "ndim", 0) > 0:
                values[str(t.dtype).removeprefix("torch.")] += t.numel()
        most = {dtype for dtype, n in values.items() if n >= LITTLE * values.total()}
        found[name] = ", ".join(sorted(most))
        few += [f"{n:,} {dtype} {name}" for dtype, n in sorted(values.items()) if dtype not in most]
    return {**found, **({UNCOMPARED: ", ".join(few)} if few else {})}
