"""Bad rows that are set aside instead of stopping the run: each one named, and never more than the run allows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from optrush.data.shard import Refused
from optrush.errors import DataError

EARLY_rows = 10_000  # read before the rate is looked at for the first time, unless the data has fewer
NAMED = 3


def check(refused: Sequence[Refused], rows: int, most: float) -> None:
    """Raises DataError if more than the share `most` of so many rows are bad."""
    if len(refused) <= most * rows:
        return
    named = "; ".join(f"{where}: {error.found}" for where, error in refused[:NAMED])
    raise DataError(
        f"at most {most:.4g} of the rows bad (data.most_bad)",
        f"{len(refused):,} of {rows:,}: {named}",
        "mend the file, or raise data.most_bad",
    )


def append(path: Path, refused: Iterable[Refused]) -> None:
    """Adds a line of JSON a row to a file (quarantine.jsonl); several processes may."""
    lines = [
        json.dumps({"file": str(where.file), "line": where.line, "reason": error.found}, ensure_ascii=False) + "\n"
        for where, error in refused
    ]
    if lines:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            for line in lines:  # whole lines: what two processes write at once does not mix
                os.write(descriptor, line.encode("utf-8", "backslashreplace"))
        finally:
            os.close(descriptor)
