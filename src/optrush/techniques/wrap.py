"""All documents in one line of tokens, cut into full rows: no padding, and no boundaries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from optrush.errors import ConfigError
from optrush.planner.ledger import Rule, live
from optrush.technique import Environment, Numerics, Part, Requirement, Technique, Trainer


@dataclass(frozen=True)
class Wrap(Technique):
    """Concatenates the documents of a window and cuts rows of T tokens; a token attends to all before it in its row.

    Documents end with their own end-of-text or end-of-turn token, which separates them. A row that begins inside a
    document repeats its last `overlap` tokens as context, not learnt again; with 1, every target is learnt once.

    Source: Brown et al. 2020, section 2.1 and appendix B, https://arxiv.org/abs/2005.14165
    Memory: unchanged for the same rows x T.
    Work: every slot is real, but for what `overlap` repeats; attention runs over whole rows: T per token instead of
        the document's length.
    Differs from the source: the overlap, which is the usual stride for documents longer than a row.
    """

    overlap: Annotated[int, Field(ge=0)] = 1
    window: Annotated[int, Field(ge=1)] = 65536

    name = "wrap"
    summary = "documents one after the other, cut into full rows; they see each other"
    source = "https://arxiv.org/abs/2005.14165"
    numerics = Numerics.DIFFERENT_MATHS
    proof = "tests/techniques/test_layouts.py"
    verified_on = ("cpu",)
    claims = frozenset({Part.BATCH_LAYOUT})
    searched = False  # packing fills rows as well, and keeps documents whole

    def needs(self, env: Environment) -> Iterator[Requirement]:
        do = f"take fewer than {env.seq}, or a longer batch.seq"
        yield Requirement(self.overlap < env.seq, f"`wrap: overlap {self.overlap}`", f"rows of {env.seq} tokens", do)

    def predict(self, env: Environment) -> Iterator[Rule]:
        yield live("padding", "rows are full, but for what overlap repeats", times=0.02)

    def data(self, trainer: Trainer) -> int:
        from optrush.data.packing import Wrapped

        how = trainer.config.data.too_long
        if how in ("drop", "truncate"):
            found = "rows that cut documents themselves: none is too long"
            raise ConfigError(f"`wrap` with `data.too_long: {how}`", found, "leave data.too_long out, or take packing")
        trainer.layout = Wrapped(self.overlap, self.window)
        return 1
