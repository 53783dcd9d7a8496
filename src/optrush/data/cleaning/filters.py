"""The filters of a configuration one after another, what each is called, and what a row holds that they look at."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from optrush.config import Bounds, Cleaning, Items
from optrush.errors import ConfigError

Columns = Mapping[str, np.ndarray]  # what was measured, one entry a row
WHOLE = "text"  # as a field: all of the row's text


class Step(NamedTuple):
    """One filter: its name in records, what it does (`kind`), for people (`label`), and for items which of them."""

    name: str
    kind: str
    label: str
    at: int = 0


def steps(settings: Cleaning) -> list[Step]:
    """The filters that are asked for, in the order in which they are applied."""

    def named() -> Iterator[Step]:
        if settings.chars is not None:
            yield Step("chars", "chars", f"characters: {said(settings.chars)}")
        if settings.tokens is not None:
            yield Step("tokens", "tokens", f"tokens: {said(settings.tokens)}")
        for i, items in enumerate(settings.items):
            if items.bounds is not None:
                yield Step(f"items[{i}].bounds", "count", f"number of {title(items)}: {said(items.bounds)}", i)
            if items.rarest is not None:
                yield Step(f"items[{i}].rarest", "rare", f"{title(items)} in at least {items.rarest:,} rows", i)
        if settings.repeated_lines is not None:
            yield Step("repeated_lines", "repeated", f"in repeated lines: at most {settings.repeated_lines:.4g}")
        if settings.language:
            yield Step("language", "language", f"language: {', '.join(settings.language)}")
        if settings.exact_duplicates:
            yield Step("exact_duplicates", "exact", "exact duplicates")
        if settings.near_duplicates is not None:
            yield Step("near_duplicates", "near", f"near duplicates: similarity from {settings.near_duplicates:.4g}")
        if settings.decontaminate is not None:
            yield Step("decontaminate", "contaminated", f"text shared with {settings.decontaminate}")

    return list(named())


def title(items: Items) -> str:
    """What is counted, for people."""
    return items.field if items.pattern is None else f"/{items.pattern}/ in {items.field}"


def said(bounds: Bounds) -> str:
    """Bounds in words."""
    least, most = bounds
    low, high = (
        f"at least {least:,.10g}" if least is not None else "",
        f"at most {most:,.10g}" if most is not None else "",
    )
    return ", ".join(filter(None, (low, high))) or "any"


def outside(step: Step, settings: Cleaning, columns: Columns) -> np.ndarray:
    """The rows that a filter takes for their own sake, whatever other rows hold; (N,) bool, none for other filters."""
    if step.kind in ("chars", "tokens"):
        return _beyond(columns[step.kind], getattr(settings, step.kind))
    if step.kind == "count":
        bounds = settings.items[step.at].bounds
        assert bounds is not None
        return _beyond(np.maximum(columns[f"items{step.at}"], 0), bounds)
    if step.kind == "repeated":
        assert settings.repeated_lines is not None
        return np.asarray(columns["repeated"] > settings.repeated_lines)
    if step.kind == "language":
        codes = np.array([b"", *(code.encode() for code in settings.language)])
        return ~np.isin(columns["language"], codes)
    if step.kind == "contaminated":
        return columns["contaminated"] > 0
    return np.zeros(len(columns["chars"]), bool)


def _beyond(values: np.ndarray, bounds: Bounds) -> np.ndarray:
    least, most = bounds
    taken = np.zeros(len(values), bool)
    if least is not None:
        taken |= values < least
    if most is not None:
        taken |= values > most
    return taken


def items(asked: Items, row: Mapping[str, Any], text: str) -> list[str] | None:
    """The row's items as they stand; None where it has no such field.

    A field of a list of objects means that field of each. Entries that are no text count as their JSON says them; an
    empty one is none.
    """
    if asked.field == WHOLE:
        entries: list[Any] = [text]
    else:
        found = _at(row, asked.field.split("."))
        if found is None:
            return None
        entries = found
    texts = [entry if isinstance(entry, str) else _json(entry) for entry in entries]
    if asked.pattern is not None:
        pattern = re.compile(asked.pattern, re.MULTILINE)
        texts = [m[1] if pattern.groups else m[0] for t in texts for m in pattern.finditer(t)]
    return [t for t in texts if t and t.strip()]


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _at(found: Any, keys: list[str]) -> list[Any] | None:
    """What stands under the keys, as a list; None where nothing does."""
    for i, key in enumerate(keys):
        if isinstance(found, list):
            parts = [part for entry in found if (part := _at(entry, keys[i:])) is not None]
            return [entry for part in parts for entry in part] if parts else None
        if not isinstance(found, dict) or found.get(key) is None:
            return None
        found = found[key]
    return found if isinstance(found, list) else [found]


def same(item: str) -> str:
    """What two items are compared by."""
    return item.strip().casefold()


def check(settings: Cleaning) -> None:
    """Refuses settings that cannot be meant.

    Raises:
        ConfigError: bounds the wrong way round, a pattern that is none, items that are not said, nothing to do.
    """
    bounded = [("chars", settings.chars), ("tokens", settings.tokens)]
    bounded += [(f"items[{i}].bounds", one.bounds) for i, one in enumerate(settings.items)]
    for name, bounds in bounded:
        if bounds is None:
            continue
        least, most = bounds
        if (least is None and most is None) or (least is not None and most is not None and least > most):
            do = "give [least, most]; null for none of one side"
            raise ConfigError(f"`data.clean.{name}: {list(bounds)}`", "no row can be meant by that", do)
    for i, one in enumerate(settings.items):
        name = f"`data.clean.items[{i}]`"
        if one.bounds is None and one.rarest is None:
            raise ConfigError(name, "neither `bounds` nor `rarest`", "say what is asked of the items")
        if one.field == WHOLE and one.pattern is None:
            do = 'say what an item of the text is, `pattern: "^- (.+)$"`, or name another `field`'
            raise ConfigError(name, "the whole text as one item", do)
        if one.pattern is not None:
            try:
                re.compile(one.pattern)
            except re.error as error:
                asked = f"`data.clean.items[{i}].pattern: {one.pattern}`"
                raise ConfigError(asked, f"not a regular expression: {error}", "mend it; in YAML quote it") from None
    if not steps(settings):
        do = "name a filter: data.clean.chars, tokens, items, repeated_lines, language, exact_duplicates, ..."
        raise ConfigError("`data.clean`", "no filter is asked for", do)
