"""The checkpoint with the best held-out loss: which it is, kept over kills, and the file that says so.

A committed checkpoint is never touched again, so the mark is a file beside them, `checkpoints/best.json`. It is written
after the checkpoint; a kill between the two is no harm, for metrics.jsonl has the losses.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from optrush.config import Run
from optrush.distributed import from_first
from optrush.errors import CheckpointError
from optrush.launch import launched
from optrush.manifest import FOLDER, Manifest, verify
from optrush.runfolder import METRICS, put

POINTER = "best.json"


@dataclass(frozen=True)
class Best:
    """Updates done, and the held-out loss after them."""

    step: int
    eval_loss: float


class Keeper:
    """What a run knows of its best checkpoint, the same on every rank."""

    def __init__(self, output: Path, best: Best | None = None) -> None:
        self.output, self.best = output, best
        self.waiting: Best | None = None  # evaluated, not saved yet

    def judge(self, step: int, loss: float) -> bool:
        """Whether this is the best so far, and so to be saved; rank 0's word, for the last bit may differ."""
        better = math.isfinite(loss) and (self.best is None or loss < self.best.eval_loss)
        self.waiting = Best(step, loss) if from_first(json.dumps(better)) == "true" else None
        return self.waiting is not None

    def spared(self, step: int) -> int | None:
        """Which checkpoint is not pruned when that of `step` is saved."""
        if self.waiting is not None and self.waiting.step == step:
            return step
        return None if self.best is None else self.best.step

    def saved(self, step: int) -> None:
        """The checkpoint of `step` is there."""
        if self.waiting is None or self.waiting.step != step:
            return
        self.best, self.waiting = self.waiting, None
        if launched()[0] == 0:
            _point(self.output, self.best)


def comparable(run: Run, fingerprints: Mapping[str, str], before: Manifest) -> bool:
    """Whether the held-out loss of a checkpoint measures what the run's own do: one loss, of the same data."""
    now = run.model_dump(mode="json", by_alias=True)
    alike = all(before.config.get(key) == now[key] for key in ("objective", "dpo"))
    return alike and all(before.fingerprints.get(k) == fingerprints.get(k) for k in ("data", "template", "tokenizer"))


def recall(output: Path, done: int, alike: Callable[[Manifest], bool]) -> tuple[Best | None, list[tuple[Path, str]]]:
    """The best checkpoint of the steps done, as the folder shows it, and better ones that are damaged, with why.

    Every rank calls it, after metrics.jsonl was cut back; rank 0 reads.

    Args:
        alike: whether a checkpoint's loss compares with the run's own.
    """
    step, loss, damaged = json.loads(
        from_first(json.dumps(_recall(output, done, alike) if launched()[0] == 0 else None))
    )
    best = None if step is None else Best(step, loss)
    if launched()[0] == 0:
        _point(output, best)
    return best, [(Path(path), why) for path, why in damaged]


def _recall(
    output: Path, done: int, alike: Callable[[Manifest], bool]
) -> tuple[int | None, float | None, list[tuple[str, str]]]:
    losses = dict(_pointed(output))
    for line in (output / METRICS).read_text().splitlines():
        found = json.loads(line)
        if found.get("eval_loss") is not None:
            losses[found["step"]] = found["eval_loss"]
    damaged: list[tuple[str, str]] = []
    for step in sorted((s for s in losses if s <= done), key=lambda s: (losses[s], s)):
        path = output / FOLDER / f"step-{step:06d}"
        if not path.is_dir():
            continue
        try:
            if alike(verify(path)):
                return step, losses[step], damaged
        except CheckpointError as error:
            damaged.append((str(path), error.found))
    return None, None, damaged


def _point(output: Path, best: Best | None) -> None:
    path = output / FOLDER / POINTER
    with suppress(OSError):  # no space for it: metrics.jsonl has the loss
        if best is None:
            path.unlink(missing_ok=True)
        else:
            put(path, json.dumps({"step": best.step, "eval_loss": best.eval_loss}) + "\n")


def _pointed(output: Path) -> list[tuple[int, float]]:
    """What best.json says, if it can be read."""
    try:
        found = json.loads((output / FOLDER / POINTER).read_text())
        return [(int(found["step"]), float(found["eval_loss"]))]
    except (OSError, ValueError, KeyError, TypeError):
        return []
