"""Ours against other systems: ratios from the records of one climb. Pure; a ratio above 1 is in our favour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optrush.bench.figures import Rung, ratio


@dataclass(frozen=True)
class Versus:
    """Another system's rung beside ours, measured in turn with it on the same load."""

    case: str
    ours: Rung
    theirs: Rung

    @property
    def faster(self) -> float | None:
        """Our tokens/s over theirs."""
        return ratio(self.ours.speed, self.theirs.speed)

    @property
    def learns_faster(self) -> float | None:
        """Our target tokens/s over theirs: where rows hold padding or what is not learnt, the figure that counts."""
        return ratio(self.ours.targets, self.theirs.targets)

    @property
    def smaller(self) -> float | None:
        """Their peak over ours."""
        return ratio(self.theirs.peak, self.ours.peak)


def versus(shown: Sequence[Rung]) -> list[Versus]:
    """Each rung of another system that has figures, beside the rung of ours that it names."""
    ours = {r.name: r for r in shown if not r.peer and r.mode == "cumulative"}
    pairs = [(r, ours.get(r.since)) for r in shown if r.peer and not r.failed]
    return [Versus(r.case, own, r) for r, own in pairs if own is not None and not own.failed]


def said(pairs: Sequence[Versus]) -> str:
    """The ratios in a sentence: the least of each case."""
    least: dict[str, Versus] = {}
    for pair in pairs:
        if pair.faster is None or pair.theirs.red or pair.ours.red:
            continue  # not the same work, or work that is wrong
        if pair.case not in least or pair.faster < (least[pair.case].faster or 0):
            least[pair.case] = pair
    told = [f"{case}: ×{pair.faster:.2f} the tokens/s of “{pair.theirs.name}”" for case, pair in least.items()]
    return f"Ours against the fastest other system: {'; '.join(told)}." if told else ""
