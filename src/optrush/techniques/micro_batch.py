"""Micro-batches that give way: halved where memory runs out, tokens a step unchanged."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optrush.technique import Environment, Numerics, Part, Technique

if TYPE_CHECKING:
    from torch import Tensor

    from optrush.data.batch import Batch
    from optrush.trainer.trainer import Trainer

# Whose owner has changed what a second try of the same window would begin with.
ONCE = frozenset({Part.UPDATE, Part.CAPTURE})


@dataclass(frozen=True)
class MicroBatch(Technique):
    """Takes a window again in smaller micro-batches when it ran out of memory; `batch.micro_tokens: auto` brings it in.

    Before step 0 on any number of ranks. Later in a run of one process, where the step is not lost; several ranks
    wait for each other in the middle of a window, so there the run ends, and goes on from its last checkpoint.

    Source: https://arxiv.org/abs/1811.06965
    Memory: of half the rows, half of what is saved for the backward pass and of what lies at the head.
    Work: unchanged FLOPs; more operators to start, and for smaller products a lower rate.
    Differs from the source: micro-batches are sized by a prediction and by what was found to fit, not given.
    """

    name = "micro-batch"
    summary = "micro-batches halved where memory runs out; `batch.micro_tokens: auto` finds their size"
    source = "https://arxiv.org/abs/1811.06965"
    numerics = Numerics.SAME_MATHS
    proof = "tests/techniques/test_micro_batch.py"
    verified_on = ("cpu", "gpu")
    claims = frozenset({Part.MICRO_BATCH})

    @classmethod
    def variants(cls, env: Environment) -> Iterator[dict[str, Any]]:
        yield from ()  # a search finds its micro-batches itself

    def wrap_window(self, trainer: Trainer) -> int:
        halving = Halving(trainer)
        trainer.shrink_micro_batch = halving.smaller
        if trainer.world.ranks > 1 or ONCE & trainer.env.claimed:
            why = (
                "several ranks wait for each other"
                if trainer.world.ranks > 1
                else "it is not run as often as one likes"
            )
            trainer.notes.append(f"out of memory after step 0 ends the run, resumably: in the middle of a window {why}")
            return 1
        halving.around()
        return 3


class Halving:
    """`job.gradients` and `job.losses` in micro-batches of at most `job.setup.micro_rows`, which shrink on need."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.gradients, self.losses = trainer, trainer.forward_backward, trainer.eval_loss

    def around(self) -> None:
        self.trainer.forward_backward, self.trainer.eval_loss = self._gradients, self._losses

    def smaller(self) -> int | None:
        """The next size: at most half the rows, dividing a rank's rows of a step."""
        env = self.trainer.env
        share = env.rows // env.ranks
        return max((n for n in range(1, env.micro_rows // 2 + 1) if share % n == 0), default=None)

    def _gradients(self, batches: list[Batch], terms: int | Tensor) -> Tensor:
        while True:
            said = ""
            try:
                return self.gradients(self._cut(batches), terms)
            except (RuntimeError, MemoryError) as error:
                said = self._judged(error)
            self._shrink(said)  # out here, where the error no longer holds what the window had made

    def _losses(self, batches: list[Batch]) -> Tensor:
        figures = {
            name: figure.clone() for name, figure in self.trainer.metrics.items()
        }  # an evaluation adds up in them
        while True:
            said = ""
            try:
                return self.losses(self._cut(batches))
            except (RuntimeError, MemoryError) as error:
                said = self._judged(error)
            for name, figure in self.trainer.metrics.items():
                figure.copy_(figures[name])
            self._shrink(said)

    def _cut(self, batches: list[Batch]) -> list[Batch]:
        return [part for b in batches for part in b.parts(self.trainer.env.micro_rows)]

    def _judged(self, error: BaseException) -> str:
        """What ran out of memory; any other error, or one that no smaller micro-batch mends, goes on its way."""
        from optrush.trainer.trainer import exhausted

        if not exhausted(error) or self.smaller() is None:
            raise error
        return next(iter(str(error).splitlines()), "") or type(error).__name__

    def _shrink(self, said: str) -> None:
        """From here on smaller micro-batches, said in the run's configuration and to people."""
        import gc

        import torch

        trainer, rows = self.trainer, self.smaller()
        assert rows is not None
        trainer.zero_grad()
        gc.collect()
        if trainer.world.device.type == "cuda":
            torch.cuda.empty_cache()  # else what is free lies in pieces of the larger size
        trainer.env = dataclasses.replace(trainer.env, micro_rows=rows)
        tokens = rows * trainer.env.seq
        batch = trainer.config.batch.model_copy(update={"micro_tokens": tokens})
        trainer.config = trainer.config.model_copy(update={"batch": batch})
        trainer.log_event({"micro_tokens": tokens, "after": said})
