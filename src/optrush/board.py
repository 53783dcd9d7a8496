"""TensorBoard's files of a run: every figure of metrics.jsonl, under its own name, at its own step.

A line is on the disk before the next one comes, so a kill loses none; on resuming, `purge_step` hides what came after
the checkpoint. A full disk ends the writing, not the run: at the end the files are made anew from metrics.jsonl.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = "tensorboard"


class Board:
    """Of the first rank; `done` are the steps that were completed before."""

    def __init__(self, output: Path, done: int) -> None:
        self.folder, self.metrics = output / FOLDER, output / "metrics.jsonl"
        self.broken = False
        try:
            self._open(done + 1 if done else 0)
        except OSError:
            self.broken = True

    def _open(self, purge_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # which takes a second

        self.writer = SummaryWriter(str(self.folder), purge_step=purge_step)

    def write(self, line: dict[str, Any]) -> None:
        """The numbers of a metrics line."""
        if self.broken:
            return
        try:
            for name, value in line.items():
                if name != "step" and isinstance(value, int | float):
                    self.writer.add_scalar(name, value, line["step"])
            self.writer.flush()
        except OSError:  # the meter says so: its own line waits, too
            self.broken = True

    def close(self) -> None:
        try:
            if self.broken:
                self.broken = False
                self._open(0)
                for text in self.metrics.read_text().splitlines():
                    self.write(json.loads(text))
            self.writer.close()
        except OSError:  # still no space; metrics.jsonl has every figure
            self.broken = True
