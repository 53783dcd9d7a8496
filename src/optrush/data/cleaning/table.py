"""All rows as columns of figures, and the filters applied to them in their order."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from optrush.config import Cleaning
from optrush.data.cleaning import duplicates
from optrush.data.cleaning.filters import Step, outside, steps
from optrush.data.cleaning.measure import Measured
from optrush.data.read import Chunk, attempts
from optrush.data.rows import Where
from optrush.errors import DataError

STAYS, BAD = 0, 255  # of `taken`; between them lie the filters' numbers, from 1
BLOCK = 1 << 16  # rows whose keys or items are read at once


class Table:
    """The rows of all files, one after another: row i of N is the i-th that was added.

    taken: (N,) uint8, which filter took each row.
    of: (N,) int64, for a duplicate the row that stays, for a rare item its place among the row's different ones.
    share: (N,) float64, for a near duplicate the similarity, for a rare item how many rows hold it.
    columns: what was measured.
    """

    def __init__(self, settings: Cleaning, folder: Path, text_rows: str) -> None:
        self.settings, self.folder, self.text_rows = settings, folder, text_rows
        self.steps: Sequence[Step] = steps(settings)
        self.parts: list[Chunk] = []
        self.stamps: dict[Path, tuple[int, int]] = {}  # of the files, when they were first read
        self.begins = [0]  # the first row of each part, and N
        self.bad: list[tuple[int, Where, str]] = []  # bad rows and why
        self.columns: dict[str, np.ndarray] = {}
        self._added: defaultdict[str, list[np.ndarray]] = defaultdict(list)

    def add(self, part: Chunk, measured: Measured) -> None:
        """The next part's rows."""
        begin = self.begins[-1]
        self.bad += [(begin + place, Where(part.file, line), why) for place, line, why in measured.bad]
        for name, values in measured.columns.items():
            self._added[name].append(values)
        for name, path in measured.files.items():
            with path.open("rb") as new, (self.folder / name).open("ab") as whole:
                shutil.copyfileobj(new, whole, 1 << 20)
            path.unlink()
        self.parts.append(part)
        self.begins.append(begin + len(measured.columns.get("line", ())))

    def __len__(self) -> int:
        return self.begins[-1]

    def apply(self) -> Iterator[float]:
        """Applies the filters, and hands over the share of the work that is done."""
        for name in list(self._added):
            self.columns[name] = np.concatenate(self._added.pop(name))
        n = len(self)
        self.taken = np.zeros(n, np.uint8)
        self.taken[[i for i, _, _ in self.bad]] = BAD
        self.of, self.share = np.zeros(n, np.int64), np.zeros(n)
        for number, step in enumerate(self.steps, 1):
            alive = self.taken == STAYS
            if step.kind in ("count", "rare"):
                self._check_field(step, alive)
            if step.kind == "rare":
                self._rare(step, alive, number)
            elif step.kind == "exact":
                again, first = duplicates.exact(self.columns["digest"], alive)
                self.taken[again], self.of[again] = number, first
            elif step.kind == "near":
                yield from self._near(alive, number)
            else:
                self.taken[alive & outside(step, self.settings, self.columns)] = number
        yield 1.0

    def _check_field(self, step: Step, alive: np.ndarray) -> None:
        asked = self.settings.items[step.at]
        if alive.any() and (self.columns[f"items{step.at}"][alive] < 0).all():
            _, found = next(self.reread([int(np.flatnonzero(alive)[0])]))
            known = ", ".join(list(found)[:8])
            name = f"`data.clean.items[{step.at}].field: {asked.field}`"
            raise DataError(name, f"no row has it; the first one has {known}", "name a key of the rows, dotted")

    def _rare(self, step: Step, alive: np.ndarray, number: int) -> None:
        """Takes rows with an item that fewer rows have than are asked for; each row counts once for an item."""
        least = self.settings.items[step.at].rarest
        assert least is not None
        sizes = self.columns[f"different{step.at}"].astype(np.int64)
        known, counts = np.zeros(0, np.uint64), np.zeros(0, np.int64)
        pending: list[np.ndarray] = []
        held = 0
        for begin, end, found in self._blocks(f"items{step.at}", sizes):
            pending.append(found[np.repeat(alive[begin:end], sizes[begin:end])])
            held += len(pending[-1])
            if held > len(known) + BLOCK or end == len(self):  # merged seldom enough to cost little
                new, more = np.unique(np.concatenate(pending), return_counts=True)
                known, place = np.unique(np.concatenate([known, new]), return_inverse=True)
                counts = np.bincount(place, np.concatenate([counts, more]), len(known)).astype(np.int64)
                pending, held = [], 0
        for begin, end, found in self._blocks(f"items{step.at}", sizes):
            here = np.flatnonzero(alive[begin:end] & (sizes[begin:end] > 0))
            every = np.full(len(found), least, np.int64)
            mine = np.repeat(alive[begin:end], sizes[begin:end])
            every[mine] = counts[np.searchsorted(known, found[mine])]
            starts = (np.cumsum(sizes[begin:end]) - sizes[begin:end])[here]
            lowest = np.minimum.reduceat(every, starts) if len(here) else np.zeros(0, np.int64)
            for k in np.flatnonzero(lowest < least).tolist():
                i, start = begin + int(here[k]), int(starts[k])
                self.taken[i], self.share[i] = number, lowest[k]
                self.of[i] = int(np.argmin(every[start : start + sizes[i]]))

    def _near(self, alive: np.ndarray, number: int) -> Iterator[float]:
        """Takes near duplicates; hands over the share that is done."""
        threshold = self.settings.near_duplicates
        assert threshold is not None
        sizes = self.columns["shingles"]
        rows = np.flatnonzero((sizes > 0) & alive)
        if not len(rows):
            return
        chosen = alive[sizes > 0]  # of the rows whose keys were written
        count, _ = duplicates.banding(threshold)
        groups = duplicates.Groups(len(rows), self.folder)
        for begin in range(0, count, duplicates.BANDS):
            held = []
            with (self.folder / "bands").open("rb") as file:
                for at in range(0, len(chosen), BLOCK):
                    block = np.fromfile(file, np.uint32, BLOCK * count).reshape(-1, count)
                    held.append(block[chosen[at : at + BLOCK], begin : begin + duplicates.BANDS])
            for keys in np.concatenate(held).T:
                groups.add(keys)
            yield 0.5 * begin / count
        sets = duplicates.Sets(self.folder / "shingles", sizes)
        for i, like, share in duplicates.near(groups, sets, rows, threshold):
            self.taken[i], self.of[i], self.share[i] = number, like, share
            yield 0.5 + 0.5 * i / len(self)

    def _blocks(self, name: str, sizes: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
        """(first row, end, their values) of some rows at a time, from a file of uint64."""
        with (self.folder / name).open("rb") as file:
            for begin in range(0, len(sizes), BLOCK):
                end = min(len(sizes), begin + BLOCK)
                yield begin, end, np.fromfile(file, np.uint64, int(sizes[begin:end].sum()))

    # --- places and rows

    def part(self, i: int) -> int:
        """Which part row i lies in."""
        return int(np.searchsorted(self.begins, i, "right")) - 1

    def where(self, i: int) -> Where:
        """The place of row i."""
        return Where(self.parts[self.part(i)].file, int(self.columns["line"][i]))

    def reread(self, wanted: Sequence[int]) -> Iterator[tuple[int, dict[str, Any]]]:
        """These good rows as they stand in their files; ascending."""
        left = list(wanted)[::-1]
        while left:
            part = self.part(left[-1])
            for i, (_, found) in enumerate(attempts(self.parts[part], self.text_rows), self.begins[part]):
                if i == left[-1]:
                    if isinstance(found, DataError):
                        raise changed(self.parts[part].file)
                    yield left.pop(), found
                    if not left or left[-1] >= self.begins[part + 1]:
                        break
            else:
                raise changed(self.parts[part].file)


def changed(file: Path) -> DataError:
    """The error of a file that is not what it was when it was measured."""
    return DataError(f"to clean {file}", "it changed while it was read", "clean it again once nobody writes it")


def stamp(file: Path) -> tuple[int, int]:
    """What changes when a file is written: its size and the time."""
    found = file.stat()
    return found.st_size, found.st_mtime_ns
