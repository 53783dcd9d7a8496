"""Several documents in a row, isolated from each other, instead of one document and padding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from optrush.planner.ledger import Rule, live
from optrush.technique import Environment, Numerics, Part, Technique, Trainer


@dataclass(frozen=True)
class Packing(Technique):
    """Fills rows with whole documents, best fit over a window of the epoch; positions restart with each document.

    Source: Krell et al., https://arxiv.org/abs/2107.02027
    Memory: unchanged for the same rows x T.
    Work: a step of R rows does R*T token slots either way; real tokens in them rise from the mean length / T to
        nearly 1. Attention falls with the sum of squared lengths where the kernel takes the documents.
    Differs from the source: best fit decreasing on counts of lengths, within windows of the epoch's random order; the
        rows of a window are shuffled, so that no length has its place in the epoch.
    """

    window: Annotated[int, Field(ge=1)] = 65536

    name = "packing"
    summary = "several documents a row, isolated, positions restarted"
    source = "https://arxiv.org/abs/2107.02027"
    numerics = Numerics.SAME_MATHS
    proof = "tests/golden/test_golden.py"
    claims = frozenset({Part.BATCH_LAYOUT, Part.PACKED_ROWS})

    def predict(self, env: Environment) -> Iterator[Rule]:
        yield live("padding", "rows hold several documents, and little else", times=0.02)

    def data(self, trainer: Trainer) -> int:
        from optrush.data.packing import Packed

        trainer.layout = Packed(self.window)
        return 1
