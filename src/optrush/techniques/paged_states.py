"""Optimizer states in host memory, with one piece on the device at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from optrush.errors import NeedsError
from optrush.planner.optimizer import OptimizerSpec
from optrush.technique import Environment, Numerics, Part, Requirement, Technique, Trainer

if TYPE_CHECKING:
    from optrush.optim.paged import Bus

PIECE = 1 << 23  # weights whose states are copied at once: 64 MiB at 8 bytes, enough for the link's full rate (assumed)
LEAST = 1 << 16  # weights of a parameter; states of smaller ones stay on the device


@dataclass(frozen=True)
class PagedStates(Technique):
    """Keeps states in pinned host memory; the update fetches one piece while it updates the one before.

    The AdamW of the run (the baseline's, one kernel, or 8- or 4-bit moments) steps pieces of parameters like shards. A
    piece is sent back while the next arrives. Counts and states of small parameters stay on the device.

    Source: https://arxiv.org/abs/2305.14314 (Dettmers et al., QLoRA: paged optimizers)
    Memory: on the device the states of two pieces of 8 Mi weights; all states in pinned host memory.
    Work: each byte of states crosses the link to the host twice per step, there and back; one kernel per piece.
    Differs from the source: copies ahead of use instead of unified memory that moves on a page fault; always, not only
        when memory runs out.
    """

    name = "paged-states"
    summary = "optimizer states in pinned host memory, two pieces at a time on the device"
    source = "https://arxiv.org/abs/2305.14314"
    numerics = Numerics.EXACT
    claims = frozenset({Part.STATES})
    searched = False  # for runs that do not fit otherwise
    last_resort = True

    @classmethod
    def variants(cls, env: Environment) -> Iterator[dict[str, Any]]:
        if Part.ADAPTERS not in env.claimed:  # states of adapters are smaller than the pieces in transfer
            yield from super().variants(env)

    def needs(self, env: Environment) -> Iterator[Requirement]:
        yield env.needs_gpu(self.name)

    def optimizer_spec(self, env: Environment) -> OptimizerSpec:
        return OptimizerSpec("on the host", resident=2 * PIECE)

    def buses(self, trainer: Trainer) -> tuple[Bus, Bus]:
        """Return the copiers to the device and from it."""
        from optrush.optim.paged import Registered

        return Registered(trainer.world.device), Registered(trainer.world.device)

    def peft(self, trainer: Trainer) -> int:
        from optrush.optim.paged import Paged

        inward, outward = self.buses(trainer)
        trainer.optimizer_factory = partial(
            Paged, inward=inward, outward=outward, room_bytes=trainer.host_memory.left_bytes, piece=PIECE, least=LEAST
        )
        return 0  # the count is of paged parameters

    def optimizer(self, trainer: Trainer) -> int:
        if Part.OPTIMIZER in trainer.env.claimed:
            return 0
        from optrush.optim.adamw import AdamW

        self.set_optimizer(trainer, AdamW, fused=False)
        return 0

    def wrap_step(self, trainer: Trainer) -> int:
        from optrush.optim.paged import Paged
        from optrush.optim.rates import ScaledRates

        if trainer.optimizer is None:  # an evaluation
            return 0
        optimizer = trainer.optimizer.inner if isinstance(trainer.optimizer, ScaledRates) else trainer.optimizer
        if not isinstance(optimizer, Paged):
            found = f"{type(optimizer).__name__} keeps its states where it creates them"
            do = "take fused-adamw, adam8bit or adam4bit, or leave paged-states out"
            raise NeedsError("`paged-states` keeps an optimizer's states", found, do)
        trainer.host_memory.take(sum(page.nbytes for page in optimizer.pages))
        return len(optimizer.pairs)
