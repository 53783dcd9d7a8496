"""The best of very many combinations without trying them all: one choice changed at a time, until none betters it.

Options that go together double the combinations each, so that soon no plan can try them all. Most of them are good, or
not, whatever the others are; there one change at a time finds the same (tests/unit/test_ascent.py compares). Where two
changes gain together what each alone would lose, it may stop short. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Chosen = tuple[T | None, ...]  # one option of each group
Groups = Sequence[Sequence[T | None]]
Clash = Callable[[Any, Any], bool]  # two options that cannot stand together: who comes puts the other out
Worth = tuple[float, ...]  # whether it is good for anything, then what is larger is better; compared in order
Value = Callable[[Chosen[T]], Worth | None]  # of a combination; None: it is not possible


def climb(
    begins: Sequence[tuple[T | None, ...]], groups: Sequence[Sequence[T | None]], clash: Clash, value: Value[T]
) -> Chosen[T]:
    """The best combination that is found, climbing from each beginning.

    `value` has then been asked of every single change of it; and, of every option that none of these is good for
    anything with, of the best that a climb with it finds: so that what is said of it is not said of one change alone.

    Args:
        value: remembers what it was asked.
    """
    best = max((_ascend(b, groups, clash, value) for b in begins), key=lambda c: value(c) or (-1.0,))
    for place, group in enumerate(groups):
        for option in group:
            held = [[option] if i == place else g for i, g in enumerate(groups)]
            around = [best, *_changes(best, place, [option], clash, value)]
            if not any((w := value(c)) and w[0] for c in around if c[place] == option):
                other = _ascend(_put(best, place, option, clash), held, clash, value)
                if (value(other) or (-1.0,)) > (value(best) or (-1.0,)):
                    return climb([other], groups, clash, value)
    return best


def _ascend(begin: Chosen[T], groups: Groups[T], clash: Clash, value: Value[T]) -> Chosen[T]:
    """A combination that no single change betters; `begin` need not be possible."""
    here, best = begin, value(begin)
    place, calm = 0, 0
    while calm < len(groups):  # groups in a row that bettered nothing
        found = [
            (w, there)
            for there in _changes(here, place, groups[place], clash, value)
            if (w := value(there)) and all(o in group for o, group in zip(there, groups))
        ]
        top = max(found, key=lambda f: f[0], default=None)
        calm += 1
        if top is not None and (best is None or top[0] > best):
            (best, here), calm = top, 0
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
    """With another option of the group; where that is not possible, with one of the others left out as well."""
    for option in group:
        if option == here[place]:
            continue
        there = _put(here, place, option, clash)
        if value(there) is not None:
            yield there
            continue
        for i, o in enumerate(there):
            if i != place and o is not None:
                yield (*there[:i], None, *there[i + 1 :])
