"""Which rows stay: the filters of `data.clean`, applied to files of any size, and an account of what was taken.

Every row is measured once, in worker processes; then the filters are applied in their order to the figures that came
back. What a filter counts over rows (how many hold an item, which came first) it counts over the rows that the filters
before it have left. Memory grows by about a hundred bytes a row, not with the rows' bytes; what else is compared lies
in files. The result does not depend on the number of processes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from optrush.config import Cleaning, nearest
from optrush.data.cleaning import contamination, filters
from optrush.data.cleaning.account import Account
from optrush.data.cleaning.measure import Task
from optrush.data.cleaning.table import BAD, STAYS, Table, stamp
from optrush.data.cleaning.workers import measured
from optrush.data.files import find
from optrush.data.read import Chunk, chunks
from optrush.data.rows import bad_row
from optrush.errors import ConfigError, DataError, NeedsError

if TYPE_CHECKING:
    from optrush.data.chat import Tokens

Progress = Callable[[float, int], None]  # the share of the work that is done, the rows read so far
WORK = "optrush-clean-"  # how the names of temporary folders begin


@dataclass(frozen=True)
class Cleaned:
    """What cleaning found.

    Attributes:
        kept: of each file (rows,) bool: row k of a part stands at `part.first - 1 + k`. A bad row is kept: whoever
            reads it next must refuse it again, and say so.
        record: what was asked and done, as in cleaning.json; holds no time, and is the same for the same input.
        account: why each row was taken.
    """

    kept: dict[Path, np.ndarray]
    record: dict[str, Any]
    account: Account

    def summary(self) -> str:
        """The counts in a line."""
        taken = [f"{f['name']} {f['taken']:,}" for f in self.record["filters"] if f["taken"]]
        said = f"{self.record['kept']['rows']:,} of {self.record['rows']:,} rows stay"
        bad = [f"bad {self.record['bad']['rows']:,}"] if self.record["bad"]["rows"] else []
        return said + (f"; taken by {', '.join(taken + bad)}" if taken or bad else "")


def clean(
    files: Sequence[Path],
    settings: Cleaning,
    *,
    tokens: Tokens | None,
    text_rows: str = "file",
    bad_rows: Literal["error", "quarantine"] = "error",
    most_bad: float = 0.01,
    workers: int | None = None,
    progress: Progress | None = None,
    folder: Path | None = None,
    cache: Path | None = None,
) -> Cleaned:
    """Which rows of the files stay.

    Args:
        files: in the order in which of two equal rows the first stays.
        tokens: the tokenizer; needed where `settings.tokens` is.
        bad_rows: what is done about a row that cannot be read: `error` raises at the first, `quarantine` counts them.
        most_bad: the share of the rows that may be bad, with `quarantine`.
        workers: processes; None: one a core.
        folder: where temporary files lie, about a kilobyte a row; None: the system's place for them.
        cache: where a data set of the hub lies, if one is decontaminated against.

    Raises:
        ConfigError: settings that cannot be meant.
        DataError: a bad row, too many of them, a field that no row has, nothing left.
        NeedsError: a library that a filter needs is missing.
        RunError: a worker was killed.
    """
    filters.check(settings)
    _check_libraries(settings)
    tokenizer = None
    if settings.tokens is not None:
        if tokens is None:
            do = "name the model whose tokenizer counts: `model: DIR`"
            raise ConfigError("`data.clean.tokens`", "no tokenizer", do)
        tokenizer = tokens.tokenizer.backend_tokenizer.to_str()
    judging = [] if settings.decontaminate is None else find(settings.decontaminate, cache)
    evaluation = contamination.read_evaluation(judging, text_rows) if judging else None
    parts = [part for file in files for part in chunks(file, text_rows=text_rows)]
    with tempfile.TemporaryDirectory(prefix=WORK, dir=folder) as name:
        task = Task(settings, text_rows, tokenizer, evaluation, Path(name))
        table = Table(settings, task.folder, text_rows)
        table.stamps = {file: stamp(file) for file in files}
        tell = progress or (lambda share, rows: None)
        sizes = [_size(part) for part in parts]
        reading = 0.75 if settings.near_duplicates is not None else 0.95  # of the work, about
        done = 0.0
        for part, size, found in zip(parts, sizes, measured(task, parts, workers or len(os.sched_getaffinity(0)))):
            table.add(part, found)
            if table.bad and bad_rows == "error":
                raise bad_row(*table.bad[0][1:])
            done += size
            tell(reading * done / sum(sizes), len(table))
        if len(table.bad) > most_bad * len(table):
            from optrush.data import quarantine, shard

            refused = [shard.Refused(where, bad_row(where, why)) for _, where, why in table.bad]
            quarantine.check(refused, len(table), most_bad)
        for share in table.apply():
            tell(reading + (1 - reading) * share, len(table))
    account = Account(table, evaluation)
    asked = {"text_rows": text_rows, "bad_rows": bad_rows, "most_bad": most_bad}
    if tokenizer is not None:
        asked["tokenizer"] = hashlib.sha256(tokenizer.encode()).hexdigest()
    cleaned = Cleaned(_kept(table), account.record(files, judging, **asked), account)
    if not cleaned.record["kept"]["rows"]:
        do = "loosen the filter that took most, or look at the rows: `optrush data clean` shows examples"
        raise DataError(f"rows that stay of {_named(files)}", f"none: {cleaned.summary()}", do)
    return cleaned


def _check_libraries(settings: Cleaning) -> None:
    if settings.near_duplicates is not None and importlib.util.find_spec("rensa") is None:
        do = "python -m pip install 'optrush[dedup]'"
        raise NeedsError("`data.clean.near_duplicates`", "the library rensa is not installed", do)
    if not settings.language:
        return
    if importlib.util.find_spec("py3langid") is None:
        do = "python -m pip install 'optrush[language]'"
        raise NeedsError("`data.clean.language`", "the library py3langid is not installed", do)
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    known = LanguageIdentifier.from_model_file(MODEL_FILE).labels
    for code in settings.language:
        if code not in known:
            raise ConfigError(f"`data.clean.language: {code}`", "no code of a known language", nearest(code, known))


def _size(part: Chunk) -> int:
    """What a part costs, against other parts: bytes, or row groups of a Parquet file."""
    return max(1, part.file.stat().st_size if part.end is None else part.end - part.start)


def _kept(table: Table) -> dict[Path, np.ndarray]:
    found: dict[Path, np.ndarray] = {}
    stays = (table.taken == STAYS) | (table.taken == BAD)
    for part, begin, end in zip(table.parts, table.begins, table.begins[1:]):
        before = found.get(part.file, np.zeros(0, bool))
        gap = np.zeros(part.first - 1 - len(before), bool)  # lines that are no rows
        found[part.file] = np.concatenate([before, gap, stays[begin:end]])
    return found


def _named(files: Sequence[Path]) -> str:
    return ", ".join(map(str, files[:3])) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
