"""Layouts of documents in rows: four kinds of one technique, each with its layout of data/packing.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from pydantic import Field

from optrush.errors import ConfigError
from optrush.planner.ledger import Rule, live
from optrush.technique import Environment, Numerics, Part, Requirement, Technique, Trainer

Window = Annotated[int, Field(ge=1)]  # samples laid out together


class LayoutTechnique(Technique):
    """Base: a layout of rows, with the layout's fields as options."""

    numerics = Numerics.SAME_MATHS
    proof = "tests/techniques/test_layouts.py"
    verified_on: ClassVar[tuple[str, ...]] = ("cpu",)
    claims = frozenset({Part.BATCH_LAYOUT})
    searched = False  # packing fills rows better
    padding: ClassVar[tuple[float, str]]  # (share that remains of the padding with one document per row, reason)

    def predict(self, env: Environment) -> Iterator[Rule]:
        share, reason = self.padding
        yield live("padding", reason, times=share)

    def data(self, trainer: Trainer) -> int:
        from optrush.data.packing import LAYOUTS

        trainer.layout = replace(LAYOUTS[self.name], **vars(self))
        return 1


@dataclass(frozen=True)
class Pad(LayoutTechnique):
    """Shortens each micro-batch to its longest document (a multiple of 64), instead of padding every row to T.

    Source: Vaswani et al. 2017, section 5.1, and every trainer since: https://arxiv.org/abs/1706.03762
    Memory: at most that of B x T slots, in the micro-batch with a document of T tokens.
    Work: B x longest slots per micro-batch; the share of real tokens is mean length / E[longest of B].
    """

    name = "pad"
    summary = "one document per row, padded to the longest of the micro-batch"
    source = "https://arxiv.org/abs/1706.03762"
    claims = frozenset({Part.BATCH_LAYOUT, Part.ROW_WIDTH})

    def predict(self, env: Environment) -> Iterator[Rule]:
        B = env.micro_rows
        yield live("padding", "up to the longest of a micro-batch, for lengths spread evenly", times=(B - 1) / B)


@dataclass(frozen=True)
class SortByLength(LayoutTechnique):
    """Sorts a window of the epoch's random order by length, splits it into steps, and shuffles the steps.

    Source: Khomenko et al. 2016, https://arxiv.org/abs/1708.05604 ("bucketing")
    Memory: at most that of B x T slots, in the micro-batches of the longest documents.
    Work: B x longest slots per micro-batch, nearly all real: neighbours in the sorted window differ little.
    Differs from the source: whole steps are similar in length, not only micro-batches, so that ranks wait less for each
        other; the loss varies more from step to step.
    """

    window: Window = 65536

    name = "sort-by-length"
    summary = "one document per row; documents of similar length share a step"
    source = "https://arxiv.org/abs/1708.05604"
    claims = frozenset({Part.BATCH_LAYOUT, Part.ROW_WIDTH})
    padding = (0.1, "documents of a micro-batch have similar lengths")


@dataclass(frozen=True)
class Wrap(LayoutTechnique):
    """Concatenates the documents of a window and splits them into rows of T; a token attends to its row's earlier ones.

    Documents end with their own end-of-text or end-of-turn token, which separates them. A row that starts inside a
    document repeats its last `overlap` tokens as context without learning them; with 1, every target is learned once.

    Source: Brown et al. 2020, section 2.1 and appendix B, https://arxiv.org/abs/2005.14165
    Memory: unchanged for the same rows x T.
    Work: every slot except the overlap is real; attention runs over whole rows: T per token instead of the document's
        length.
    Differs from the source: the overlap, which is the usual stride for documents longer than a row.
    """

    overlap: Annotated[int, Field(ge=0)] = 1
    window: Window = 65536

    name = "wrap"
    summary = "documents concatenated and split into full rows; they see each other"
    source = "https://arxiv.org/abs/2005.14165"
    numerics = Numerics.DIFFERENT_MATHS
    padding = (0.02, "rows are full, except the overlap")

    def needs(self, env: Environment) -> Iterator[Requirement]:
        do = f"take fewer than {env.seq}, or a longer batch.seq"
        yield Requirement(self.overlap < env.seq, f"`wrap: overlap {self.overlap}`", f"rows of {env.seq} tokens", do)

    def data(self, trainer: Trainer) -> int:
        how = trainer.config.data.too_long
        if how in ("drop", "truncate"):
            found = "rows that split documents themselves: no document is too long"
            raise ConfigError(f"`wrap` with `data.too_long: {how}`", found, "leave data.too_long out, or take packing")
        return super().data(trainer)


@dataclass(frozen=True)
class Packing(LayoutTechnique):
    """Fills rows with whole documents, best fit over a window of the epoch; positions restart with each document.

    Source: Krell et al., https://arxiv.org/abs/2107.02027
    Memory: unchanged for the same rows x T.
    Work: a step of R rows computes R*T token slots either way; the share of real tokens rises from mean length / T to
        nearly 1. Attention falls with the sum of squared lengths if the kernel takes the documents.
    Differs from the source: best fit decreasing on counts of lengths, within windows of the epoch's random order; the
        rows of a window are shuffled, so that position in the epoch does not depend on length.
    """

    window: Window = 65536

    name = "packing"
    summary = "several documents per row, isolated, positions restarted"
    source = "https://arxiv.org/abs/2107.02027"
    proof = "tests/golden/test_golden.py"
    verified_on = ("cpu", "gpu")
    claims = frozenset({Part.BATCH_LAYOUT, Part.PACKED_ROWS})
    searched = True
    padding = (0.02, "rows hold several documents and little padding")

    def needs(self, env: Environment) -> Iterator[Requirement]:
        found = "a model that cannot isolate documents of a row"
        yield Requirement(env.shape is None or env.shape.separates, "`packing`", found, "leave packing out")
