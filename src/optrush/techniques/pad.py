"""One document a row, padded to the longest of its micro-batch: the baseline of batching."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from optrush.planner.ledger import Rule, live
from optrush.technique import Environment, Numerics, Part, Technique, Trainer


@dataclass(frozen=True)
class Pad(Technique):
    """Cuts each micro-batch to its longest document (a multiple of 64), instead of padding every row to T.

    Source: Vaswani et al. 2017, section 5.1, and every trainer since: https://arxiv.org/abs/1706.03762
    Memory: at most that of B x T slots, in the micro-batch that has a document of T tokens.
    Work: B x longest slots a micro-batch; the share of real tokens is mean length / E[longest of B].
    """

    name = "pad"
    summary = "one document a row, padded to the longest of the micro-batch"
    source = "https://arxiv.org/abs/1706.03762"
    numerics = Numerics.SAME_MATHS
    proof = "tests/techniques/test_layouts.py"
    verified_on = ("cpu",)
    claims = frozenset({Part.BATCH_LAYOUT, Part.ROW_WIDTH})
    searched = False  # whatever fills rows is faster

    def predict(self, env: Environment) -> Iterator[Rule]:
        B = env.micro_rows
        yield live("padding", "up to the longest of a micro-batch, for lengths spread evenly", times=(B - 1) / B)

    def data(self, trainer: Trainer) -> int:
        from optrush.data.packing import Fitted

        trainer.layout = Fitted()
        return 1
