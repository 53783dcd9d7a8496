"""Search the best combination of options, one per group, by hill climbing: one change at a time. Pure.

The number of combinations grows exponentially with the options. Most options are good or bad whatever the others are;
for those, changing one at a time finds the optimum (compared in tests/unit/test_search_climb.py). If two changes gain
only together, it may stop at a local optimum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Chosen = tuple[T | None, ...]  # one option of each group
Groups = Sequence[Sequence[T | None]]
Clash = Callable[[Any, Any], bool]  # whether adding the first option requires dropping the second
Score = tuple[float, ...]  # whether it is usable, then values to maximize; compared in order
Value = Callable[[Chosen[T]], Score | None]  # score of a combination; None: it is not possible
IMPOSSIBLE: Score = (-1.0,)  # less than any score


def climb(
    begins: Iterable[Chosen[T]], groups: Groups[T], clash: Clash, value: Value[T], whole: bool = True
) -> Chosen[T]:
    """Return the best combination reached by climbing from each beginning.

    Every single change of it has then been evaluated. If an option is usable in none of these, the best combination
    that a climb with this option reaches is evaluated too, so that a report on it rests on more than one change.

    Args:
        value: caches its results.
        whole: also climb with each option that is not in the best combination.
    """
    best = max((ascend(b, groups, clash, value) for b in begins), key=lambda c: value(c) or IMPOSSIBLE)
    if not whole:
        return best
    for place, group in enumerate(groups):
        for option in group:
            around = [best, *_changes(best, place, [option], clash, value)]
            if not any((w := value(c)) and w[0] for c in around if c[place] == option):
                fixed = [[option] if i == place else g for i, g in enumerate(groups)]
                other = ascend(_put(best, place, option, clash), fixed, clash, value)
                if (value(other) or IMPOSSIBLE) > (value(best) or IMPOSSIBLE):
                    return climb([other], groups, clash, value)
    return best


def ascend(begin: Chosen[T], groups: Groups[T], clash: Clash, value: Value[T]) -> Chosen[T]:
    """Return a combination that no single change improves; `begin` need not be possible."""
    here, best = begin, value(begin)
    place, unchanged = 0, 0
    while unchanged < len(groups):  # consecutive groups without an improvement
        scored = [
            (score, changed)
            for changed in _changes(here, place, groups[place], clash, value)
            if (score := value(changed)) and all(o in group for o, group in zip(changed, groups))
        ]
        top = max(scored, key=lambda s: s[0], default=None)
        unchanged += 1
        if top is not None and (best is None or top[0] > best):
            (best, here), unchanged = top, 0
        place = (place + 1) % len(groups)
    return here


def _put(here: Chosen[T], place: int, option: T | None, clash: Clash) -> Chosen[T]:
    return tuple(
        option if i == place else None if option is not None and o is not None and clash(option, o) else o
        for i, o in enumerate(here)
    )


def _changes(
    here: Chosen[T], place: int, group: Sequence[T | None], clash: Clash, value: Value[T]
) -> Iterator[Chosen[T]]:
    """Yield combinations with another option of the group; if one is not possible, also without one of the others."""
    for option in group:
        if option == here[place]:
            continue
        changed = _put(here, place, option, clash)
        if value(changed) is not None:
            yield changed
            continue
        for i, o in enumerate(changed):
            if i != place and o is not None:
                yield (*changed[:i], None, *changed[i + 1 :])
