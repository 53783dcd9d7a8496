"""Micro-batches that give way: halved where memory runs out, tokens a step unchanged."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optrush.technique import Numerics, Part, Setup, Technique

if TYPE_CHECKING:
    from torch import Tensor

    from optrush.data.batch import Batch
    from optrush.trainer.trainer import Job

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
    def variants(cls, setup: Setup) -> Iterator[dict[str, Any]]:
        yield from ()  # a search finds its micro-batches itself

    def finish(self, job: Job) -> int:
        halving = Halving(job)
        job.smaller = halving.smaller
        if job.world.ranks > 1 or ONCE & job.setup.owned:
            why = "several ranks wait for each other" if job.world.ranks > 1 else "it is not run as often as one likes"
            job.notes.append(f"out of memory after step 0 ends the run, resumably: in the middle of a window {why}")
            return 1
        halving.around()
        return 3


class Halving:
    """`job.gradients` and `job.losses` in micro-batches of at most `job.setup.micro_rows`, which shrink on need."""

    def __init__(self, job: Job) -> None:
        self.job, self.gradients, self.losses = job, job.gradients, job.losses

    def around(self) -> None:
        self.job.gradients, self.job.losses = self._gradients, self._losses

    def smaller(self) -> int | None:
        """The next size: at most half the rows, dividing a rank's rows of a step."""
        setup = self.job.setup
        share = setup.rows // setup.ranks
        return max((n for n in range(1, setup.micro_rows // 2 + 1) if share % n == 0), default=None)

    def _gradients(self, batches: list[Batch], terms: int | Tensor) -> Tensor:
        while True:
            said = ""
            try:
                return self.gradients(self._cut(batches), terms)
            except (RuntimeError, MemoryError) as error:
                said = self._judged(error)
            self._shrink(said)  # out here, where the error no longer holds what the window had made

    def _losses(self, batches: list[Batch]) -> Tensor:
        figures = {name: figure.clone() for name, figure in self.job.figures.items()}  # an evaluation adds up in them
        while True:
            said = ""
            try:
                return self.losses(self._cut(batches))
            except (RuntimeError, MemoryError) as error:
                said = self._judged(error)
            for name, figure in self.job.figures.items():
                figure.copy_(figures[name])
            self._shrink(said)

    def _cut(self, batches: list[Batch]) -> list[Batch]:
        return [part for b in batches for part in b.parts(self.job.setup.micro_rows)]

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

        job, rows = self.job, self.smaller()
        assert rows is not None
        job.discard()
        gc.collect()
        if job.world.device.type == "cuda":
            torch.cuda.empty_cache()  # else what is free lies in pieces of the larger size
        job.setup = dataclasses.replace(job.setup, micro_rows=rows)
        tokens = rows * job.setup.seq
        batch = job.run.batch.model_copy(update={"micro_tokens": tokens})
        job.run = job.run.model_copy(update={"batch": batch})
        job.told({"micro_tokens": tokens, "after": said})
