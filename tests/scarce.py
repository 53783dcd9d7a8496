"""A technique that plays a lack of memory: the loss of a large micro-batch fails as torch's allocator fails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from optrush.data.batch import Batch
from optrush.technique import Numerics, Technique
from optrush.techniques import ALL
from optrush.trainer.trainer import Trainer

SAID = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.00 GiB"


@dataclass(frozen=True)
class Scarce(Technique):
    """Micro-batches of more than `rows` rows fail, in training or in evaluation, after so many calls went well."""

    rows: int = 1
    after: int = 0
    evaluating: bool = False

    name: ClassVar[str] = "scarce"
    summary = source = proof = "a toy"
    numerics = Numerics.EXACT
    verified_on = ("cpu",)
    calls: ClassVar[list[int]] = []  # rows of every micro-batch that was asked for

    def wrap_step(self, trainer: Trainer) -> int:
        inner, seen = trainer.loss, [0]
        self.calls.clear()

        def loss(batch: Batch) -> torch.Tensor:
            seen[0] += 1
            self.calls.append(len(batch.tokens))
            if seen[0] > self.after and torch.is_grad_enabled() != self.evaluating and len(batch.tokens) > self.rows:
                raise torch.OutOfMemoryError(SAID + ". Of the allocated memory 13.00 GiB is allocated by PyTorch")
            return inner(batch)

        trainer.loss = loss
        return 1


CLASSES = (*ALL, Scarce)
