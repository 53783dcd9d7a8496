"""Micro-batches that are halved when memory runs out, with unchanged tokens per step."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optrush.errors import exhausted, first_line
from optrush.technique import Numerics, Part, Technique, Trainer

if TYPE_CHECKING:
    from torch import Tensor

    from optrush.data.batch import Batch

# Parts whose owner changes state within a window, so that it cannot be repeated.
ONCE = frozenset({Part.UPDATE, Part.CAPTURE})


@dataclass(frozen=True)
class MicroBatch(Technique):
    """Repeats a window in smaller micro-batches if it ran out of memory; `batch.micro_tokens: auto` adds it.

    Before step 0 on any number of ranks. Later only in a run of one process, which loses no step; several ranks wait
    for each other in the middle of a window, so the run ends there, and can resume from its last checkpoint.

    Source: https://arxiv.org/abs/1811.06965
    Memory: with half the rows, half of the saved activations and of the head's memory.
    Work: unchanged FLOPs; more operators to launch, and a lower rate for smaller matmuls.
    Differs from the source: the size of micro-batches is predicted and tested, not given.
    """

    name = "micro-batch"
    summary = "halves micro-batches if memory runs out; `batch.micro_tokens: auto` finds their size"
    source = "https://arxiv.org/abs/1811.06965"
    numerics = Numerics.SAME_MATHS
    claims = frozenset({Part.MICRO_BATCH})
    searched = False  # a search chooses micro-batches itself

    def wrap_window(self, trainer: Trainer) -> int:
        if trainer.world.ranks > 1 or ONCE & trainer.env.claimed:
            several = trainer.world.ranks > 1
            msg = "several ranks wait for each other" if several else "it cannot be repeated"
            trainer.notes.append(f"out of memory after step 0 ends the run, resumably: in the middle of a window {msg}")
            return 1
        Halving(trainer).around()
        return 3


class Halving:
    """Runs `forward_backward` and `eval_loss` in at most `env.micro_rows` rows, halved if memory runs out."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.gradients, self.losses = trainer, trainer.forward_backward, trainer.eval_loss

    def around(self) -> None:
        self.trainer.forward_backward, self.trainer.eval_loss = self._gradients, self._losses

    def _gradients(self, batches: list[Batch], terms: float | Tensor) -> Tensor:
        while True:
            try:
                return self.gradients(self._cut(batches), terms)
            except (RuntimeError, MemoryError) as error:
                reason = self._exhausted(error)
            self._shrink(reason)  # here the error no longer references the window's tensors

    def _losses(self, batches: list[Batch]) -> Tensor:
        sums = {name: metric.clone() for name, metric in self.trainer.metrics.items()}  # evaluation adds to them
        while True:
            try:
                return self.losses(self._cut(batches))
            except (RuntimeError, MemoryError) as error:
                reason = self._exhausted(error)
            for name, metric in self.trainer.metrics.items():
                metric.copy_(sums[name])
            self._shrink(reason)

    def _cut(self, batches: list[Batch]) -> list[Batch]:
        return [part for b in batches for part in b.parts(self.trainer.env.micro_rows)]

    def _exhausted(self, error: BaseException) -> str:
        """Return the out-of-memory message; raise any other error, or one that smaller micro-batches cannot avoid."""
        if not exhausted(error) or self.trainer.env.fewer_rows is None:
            raise error
        return first_line(error)

    def _shrink(self, reason: str) -> None:
        """Use smaller micro-batches from now on; record it in the run's configuration and as a logged event."""
        import gc

        import torch

        trainer, rows = self.trainer, self.trainer.env.fewer_rows
        assert rows is not None
        trainer.zero_grad()
        gc.collect()
        if trainer.world.device.type == "cuda":
            torch.cuda.empty_cache()  # else free memory stays split into the larger size
        trainer.env = dataclasses.replace(trainer.env, micro_rows=rows)
        tokens = rows * trainer.env.seq
        trainer.log_event({"micro_tokens": tokens, "after": reason})
