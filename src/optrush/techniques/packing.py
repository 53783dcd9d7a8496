"""Several documents in a row, isolated from each other, instead of one document and padding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optrush.ledger import Rule, live
from optrush.technique import Numerics, Part, Setup, Technique

if TYPE_CHECKING:
    from optrush.job import Job


@dataclass(frozen=True)
class Packing(Technique):
    """Fills each step's rows with whole documents, in order, best fit first; positions restart with each document.

    Source: Krell et al., https://arxiv.org/abs/2107.02027
    Memory: unchanged for the same rows x T.
    Work: a step of R rows does R*T token slots either way; real tokens in them rise from the mean length / T to
        nearly 1. Attention falls with the sum of squared lengths where the kernel knows the documents.
    Differs from the source: best fit over one step in the epoch's random order, no sorting over the corpus, so that
        the order stays random and its state stays one index.
    """

    name = "packing"
    summary = "several documents a row, isolated, positions restarted"
    source = "https://arxiv.org/abs/2107.02027"
    numerics = Numerics.SAME_MATHS
    proof = "tests/golden/test_golden.py"
    verified_on = ("cpu", "gpu")
    claims = frozenset({Part.ROWS})

    def predict(self, setup: Setup) -> Iterator[Rule]:
        yield live("padding", "rows hold several documents, and little else", times=0.1)

    def data(self, job: Job) -> int:
        from optrush.data import pack

        job.fill = pack.best_fit
        return 1
