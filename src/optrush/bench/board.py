"""What people see of a climb, on standard error: a bar on a terminal, a line a process, and the table at the end."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from optrush.bench.record import Record
from optrush.console import err

GIB = 2**30
FULL = 0.995  # share of real tokens in the slots from which on nobody asks for it


class Board:
    """Told by `climb` how far it is; use it as a context, so that the bar is taken down."""

    def __init__(self) -> None:
        columns = (SpinnerColumn(), MofNCompleteColumn(), BarColumn(20), TextColumn("{task.description}", markup=False))
        self.progress = Progress(*columns, console=err, transient=True) if sys.stderr.isatty() else None
        self.task = None if self.progress is None else self.progress.add_task("", total=None)
        self.here, self.left = "", ""

    def __enter__(self) -> Board:
        if self.progress is not None:
            self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.progress is not None:
            self.progress.stop()

    def says(self, text: str) -> None:
        err.print(text, markup=False)

    def begins(self, rung: int, of: int, name: str, repeat: int, repeats: int) -> None:
        self.here = f"rung {rung}/{of} {name}, repeat {repeat}/{repeats}"
        if self.progress is not None and self.task is not None:
            done = (repeat - 1) * of + rung - 1
            self.progress.update(self.task, total=of * repeats, completed=done, description=self.here + self.left)

    def ends(self, result: Mapping[str, Any], left_s: float) -> None:
        self.left = f"  ETA {left_s:.0f} s" if left_s > 0 else ""
        if "error" in result:
            said = "failed: " + result["error"].replace("\n", "; ")
        else:
            said = f"{median(result['tokens_per_s']):,.0f} tok/s, {result['peak_bytes'] / GIB:.1f} GiB"
        err.print(f"{self.here}: {said}{self.left}", markup=False)


def show(records: Sequence[Record]) -> None:
    """The table: each rung's figures, and against the rung it came from; below it why a rung is red."""
    table = Table(box=None, pad_edge=False)
    table.add_column("rung")
    loose = any(r.fill is not None and r.fill < FULL for r in records)
    for heading in ("tokens/s", "x since", "peak GiB", "predicted", *(("real slots",) if loose else ())):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    speeds = {r.rung: r.tokens_per_s for r in records}
    for r in records:
        before = speeds.get(r.since or "")
        table.add_row(
            Text(r.rung),
            f"{r.tokens_per_s:,.0f}" if r.tokens_per_s else "-",
            f"{r.tokens_per_s / before:.2f}" if r.tokens_per_s and before else "",
            f"{r.peak_bytes / GIB:.2f}" if r.peak_bytes else "-",
            f"{r.predicted_peak_bytes / GIB:.2f}" if r.predicted_peak_bytes else "-",
            *((f"{r.fill:.1%}" if r.fill is not None else "-",) if loose else ()),
            r.verdict,
        )
    err.print(table)
    for r in records:
        if "no proof: " in r.changes:
            err.print(f"{r.rung}: {r.changes[r.changes.index('no proof: ') :]}", markup=False)
        for reason in r.red:
            err.print(f"{r.rung}: {' '.join(reason.split())}", markup=False)
