"""What cleaning did, for people and for programs: why a row was taken, examples, histograms, the record of it all."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from optrush import __version__
from optrush.data import rows
from optrush.data.cleaning.contamination import Evaluation
from optrush.data.cleaning.filters import items, said, same, title
from optrush.data.cleaning.table import BAD, STAYS, Table

FORMAT = 1  # of the record
EXAMPLES = 10  # of each filter
SHOWN = 280  # characters of an example
BINS = 60  # of a histogram, about
LIBRARIES = ("numpy", "py3langid", "rensa", "tokenizers")


class Account:
    """Words and figures of a table whose filters are applied."""

    def __init__(self, table: Table, evaluation: Evaluation | None) -> None:
        self.table, self.evaluation = table, evaluation

    def reason(self, i: int, found: Callable[[], Mapping[str, Any]]) -> str:
        """Why row i was taken.

        Args:
            found: gives the row as it stands in its file; asked only where the reason names a part of it.
        """
        table = self.table
        step = table.steps[int(table.taken[i]) - 1]
        settings, columns = table.settings, table.columns
        if step.kind in ("chars", "tokens"):
            name = "characters" if step.kind == "chars" else "tokens"
            return f"{columns[step.kind][i]:,} {name}; {said(getattr(settings, step.kind))}"
        if step.kind == "count":
            asked, n = settings.items[step.at], int(columns[f"items{step.at}"][i])
            assert asked.bounds is not None
            held = f"no {asked.field}" if n < 0 else f"{n:,} {title(asked)}"
            return f"{held}; {said(asked.bounds)}"
        if step.kind == "rare":
            asked, row = settings.items[step.at], found()
            different = list(dict.fromkeys(map(same, items(asked, row, self._text(i, row)) or ())))
            item, n = different[int(table.of[i])], int(table.share[i])
            return f"{shortened(item, 80)!r} is in {n:,} row{'s' * (n != 1)}; at least {asked.rarest:,}"
        if step.kind == "repeated":
            share = columns["repeated"][i]
            return f"{share:.1%} of its characters are in repeated lines; at most {settings.repeated_lines:.4g}"
        if step.kind == "language":
            return f"its language is {columns['language'][i].decode()}"
        if step.kind == "exact":
            return f"the same text as {table.where(int(table.of[i]))}"
        if step.kind == "near":
            return f"similarity {table.share[i]:.3f} with {table.where(int(table.of[i]))}"
        assert self.evaluation is not None
        where = self.evaluation.places[int(columns["contaminated"][i]) - 1]
        passage = self.evaluation.passage(rows.parse(table.where(i), dict(found())))
        return f"shares words with {where}: {shortened(passage, 120)!r}"

    def _text(self, i: int, found: Mapping[str, Any]) -> str:
        return rows.text(rows.parse(self.table.where(i), dict(found)))

    def filters(self) -> list[dict[str, Any]]:
        """Of each filter how many rows it took, how many were left, and the first of them."""
        table = self.table
        counts = np.bincount(table.taken, minlength=BAD + 1)
        left = len(table) - int(counts[BAD])
        firsts = {n: np.flatnonzero(table.taken == n)[:EXAMPLES].tolist() for n in range(1, len(table.steps) + 1)}
        examples: dict[int, dict[str, Any]] = {}
        for i, found in table.reread(sorted(i for first in firsts.values() for i in first)):
            where = table.where(i)
            reason = self.reason(i, partial(dict, found))
            examples[i] = {
                "file": str(where.file), "line": where.line, "reason": reason,
                "text": shortened(self._text(i, found), SHOWN),
            }  # fmt: skip
        made = []
        for number, step in enumerate(table.steps, 1):
            taken = int(counts[number])
            left -= taken
            shown = [examples[i] for i in firsts[number]]
            made.append({"name": step.name, "label": step.label, "taken": taken, "left": left, "examples": shown})
        return made

    def histograms(self) -> list[dict[str, Any]]:
        """Characters, and tokens and items where a filter looks at them: of the rows it looked at and of what stays."""
        table, settings = self.table, self.table.settings
        stays = table.taken == STAYS
        made = [_histogram("characters", table.columns["chars"], table.taken != BAD, stays, settings.chars)]
        for number, step in enumerate(table.steps, 1):
            looked = (table.taken == STAYS) | (table.taken >= number) & (table.taken != BAD)
            if step.kind == "tokens":
                made.append(_histogram("tokens", table.columns["tokens"], looked, stays, settings.tokens))
            elif step.kind == "count" or (step.kind == "rare" and settings.items[step.at].bounds is None):
                asked = settings.items[step.at]
                counted = np.maximum(table.columns[f"items{step.at}"], 0)
                made.append(_histogram(f"number of {title(asked)}", counted, looked, stays, asked.bounds))
        return made

    def record(self, files: Sequence[Path], evaluation: Sequence[Path], **asked: Any) -> dict[str, Any]:
        """The record of a cleaning: what it was asked, from what, and what it did. Holds no time and no date.

        Args:
            asked: further settings that the result depends on.
        """
        table = self.table
        bad, kept = len(table.bad), int(np.count_nonzero(table.taken == STAYS))
        settings = table.settings.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        first = [{"file": str(w.file), "line": w.line, "reason": why} for _, w, why in table.bad[:EXAMPLES]]
        return {
            "format": FORMAT,
            "settings": settings,
            **asked,
            "versions": {"optrush": __version__, **_versions()},
            "inputs": list(map(_named, files)),
            "evaluation": list(map(_named, evaluation)),
            "rows": len(table),
            "bad": {"rows": bad, "examples": first},
            "kept": {"rows": kept, "sha256": hashlib.sha256(np.packbits(table.taken == STAYS).tobytes()).hexdigest()},
            "filters": self.filters(),
            "histograms": self.histograms(),
        }


def shortened(text: str, most: int) -> str:
    """The text's beginning in one line."""
    line = " ".join(text[: 2 * most].split())
    return line if len(line) <= most and len(text) <= 2 * most else line[: most - 1] + "…"


def sha256(file: Path) -> str:
    """Of a file's bytes."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _named(file: Path) -> dict[str, Any]:
    return {"file": str(file), "bytes": file.stat().st_size, "sha256": sha256(file)}


def _versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _histogram(
    name: str, values: np.ndarray, before: np.ndarray, after: np.ndarray, bounds: Sequence[float | None] | None
) -> dict[str, Any]:
    """Counts between equal steps of a round width; the last step holds all that lies above (one row in 200, about)."""
    looked = np.sort(values[before])
    if not len(looked):
        return {"name": name, "edges": [0, 1], "before": [0], "after": [0], "bounds": bounds, "longest": 0}
    low, high = int(looked[0]), int(looked[math.ceil(0.995 * (len(looked) - 1))])
    raw = max(1.0, (high - low + 1) / BINS)
    base = 10 ** math.floor(math.log10(raw))
    width = next(base * m for m in (1, 2, 5, 10) if base * m >= raw)
    edges = list(range(low // width * width, high + width + 1, width))
    counted = [
        np.bincount(np.minimum((values[mask] - edges[0]) // width, len(edges) - 2), minlength=len(edges) - 1).tolist()
        for mask in (before, after)
    ]
    return {
        "name": name, "edges": edges, "before": counted[0], "after": counted[1],
        "bounds": bounds and list(bounds), "longest": int(looked[-1]),
    }  # fmt: skip
