"""Choose the starts of a search, and the axes of ranks that it climbs over. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations
from typing import TypeAlias

from optrush.technique import SAME_ROWS, Part, Technique

Options: TypeAlias = Sequence[Technique | None]  # options of one technique; None: without it
Chosen: TypeAlias = tuple[Technique | None, ...]  # one option per group


def by_axes(options: list[Options]) -> Iterator[list[list[Options]]]:
    """Yield the options without axes that share rows, then with one such axis at a time, then with all of them."""

    def only(*kept: int) -> list[Options]:
        return [[None] if i in sharing and i not in kept else group for i, group in enumerate(options)]

    sharing = [i for i, group in enumerate(options) if group[0] is None and any(t and shares_rows(t) for t in group)]
    if sharing:
        yield [only()]
        yield [only(i) for i in sharing]
    yield [options]


def with_axis_owners(start: Chosen, options: list[Options]) -> Chosen:
    """Return a start completed with the first technique that divides the run over each axis.

    Ranks that share rows need an owner of the data axis too: two changes that gain only together. The owner chosen is
    the one that shards the model, because memory is short in such runs.
    """
    data = [i for i, group in enumerate(options) if any(t and Part.DATA in t.claims and t.shards for t in group)]
    taken = any(t is not None and Part.DATA in t.claims for t in start)
    added = [i for i, group in enumerate(options) if any(t and shares_rows(t) for t in group)]
    added += data[:1] if added and not taken else []
    return tuple(next(filter(None, options[i]), None) if i in added and t is None else t for i, t in enumerate(start))


def repaired_start(start: Chosen, options: list[Options], possible: Callable[[Chosen], bool]) -> Chosen:
    """Return a start with up to three more techniques, if it is not possible and no single one makes it so.

    8-bit matmuls over several ranks need a precision, a compiler and an owner of the data axis.
    """
    first = [(i, t) for i, group in enumerate(options) if start[i] is None and (t := next(filter(None, group), None))]

    def put(more: Iterable[tuple[int, Technique]]) -> Chosen:
        chosen = dict(more)
        return tuple(chosen.get(i, t) for i, t in enumerate(start))

    if possible(start) or any(possible(put([option])) for option in first):
        return start
    return next(filter(possible, (put(more) for n in (2, 3) for more in combinations(first, n))), start)


def with_all(start: Chosen, options: list[Options], possible: Callable[[Chosen], bool]) -> Chosen:
    """Return a start with a technique of every group that is compatible with those before it.

    Some gain only together: with whole scores of long rows, packing seems not to pay.
    """
    here = start
    for place, group in [*enumerate(options)] * 2:  # several ranks need an owner first
        for t in group if here[place] is None else ():
            fuller: Chosen = (*here[:place], t, *here[place + 1 :])
            if t is not None and not clash([[o] for o in fuller if o]) and possible(fuller):
                here = fuller
                break
    return here


def clash(groups: Iterable[Options]) -> bool:
    """Return whether two techniques claim the same part of a run, whatever their options."""
    claims = [frozenset.intersection(*(t.claims for t in group if t is not None)) for group in groups]
    return sum(map(len, claims)) > len(frozenset().union(*claims))


def shares_rows(t: Technique) -> bool:
    """Return whether a technique divides the ranks over an axis that shares rows."""
    return any(axis in SAME_ROWS for axis in t.axes())
