"""One document a row, steps made of documents of like length: little padding without packing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from optrush.planner.ledger import Rule, live
from optrush.technique import Environment, Numerics, Part, Technique, Trainer


@dataclass(frozen=True)
class SortByLength(Technique):
    """Sorts a window of the epoch's random order by length, cuts it into steps, and shuffles the steps.

    Source: Khomenko et al. 2016, https://arxiv.org/abs/1708.05604 ("bucketing")
    Memory: at most that of B x T slots, in the micro-batches of the longest documents.
    Work: B x longest slots a micro-batch, of which nearly all are real: neighbours in the sorted window differ little.
    Differs from the source: whole steps are alike in length, not only micro-batches, so that ranks wait less for each
        other; the loss of neighbouring steps varies more for it.
    """

    window: Annotated[int, Field(ge=1)] = 65536

    name = "sort-by-length"
    summary = "one document a row, documents of like length share a step"
    source = "https://arxiv.org/abs/1708.05604"
    numerics = Numerics.SAME_MATHS
    proof = "tests/techniques/test_layouts.py"
    verified_on = ("cpu",)
    claims = frozenset({Part.BATCH_LAYOUT, Part.ROW_WIDTH})
    searched = False  # packing fills rows better, and keeps the order random

    def predict(self, env: Environment) -> Iterator[Rule]:
        yield live("padding", "documents of a micro-batch are nearly as long as each other", times=0.1)

    def data(self, trainer: Trainer) -> int:
        from optrush.data.packing import Sorted

        trainer.layout = Sorted(self.window)
        return 1
