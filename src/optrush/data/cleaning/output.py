"""What `optrush data clean` writes: the rows that stay, what was taken and why, the bad rows, and the record.

All of it is written into a folder of another name, which gets its own when it is whole: a kill leaves nothing half done
under a final name.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from optrush.data.clean import WORK, Cleaned
from optrush.data.cleaning.account import sha256
from optrush.data.cleaning.table import BAD, STAYS, Table, changed, stamp
from optrush.data.compressed import opened
from optrush.data.formats import lines
from optrush.data.read import LINES, attempts, form
from optrush.data.strict import decode
from optrush.errors import ConfigError, DataError

ROWS, REMOVED, QUARANTINE, RECORD, PAGE = (
    "rows.jsonl", "removed.jsonl", "quarantine.jsonl", "cleaning.json", "cleaning.html",
)  # fmt: skip
OURS = frozenset({ROWS, REMOVED, QUARANTINE, RECORD, PAGE})


def write_rows(cleaned: Cleaned, folder: Path) -> dict[str, Any]:
    """Writes the rows that stay, what was taken, and bad rows if there are any; the record with their digests.

    Rows of JSON Lines files are copied byte for byte, others written as JSON (a number that is none becomes null).

    Raises:
        DataError: a file is not what it was when it was measured.
    """
    table = cleaned.account.table
    with (folder / ROWS).open("wb") as rows, (folder / REMOVED).open("wb") as removed:
        for i, raw, found in _all(table):
            taken = table.taken[i]
            if taken == STAYS:
                rows.write(raw if raw.endswith(b"\n") else raw + b"\n")
            elif taken != BAD:
                where = table.where(i)
                reason = cleaned.account.reason(i, found)
                name = table.steps[taken - 1].name
                removed.write(_line({"file": str(where.file), "line": where.line, "filter": name, "reason": reason}))
    if table.bad:
        with (folder / QUARANTINE).open("wb") as bad:
            bad.writelines(_line({"file": str(w.file), "line": w.line, "reason": why}) for _, w, why in table.bad)
    names = [name for name in (ROWS, REMOVED, QUARANTINE) if (folder / name).exists()]
    made = {name: {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)} for name in names}
    return {**cleaned.record, "output": made}


def _all(table: Table) -> Iterator[tuple[int, bytes, Callable[[], dict[str, Any]]]]:
    """Every row: its number, its line of JSON (none if it is bad), and a function that gives it as it was read."""
    for file, parts in groupby(range(len(table.parts)), lambda k: table.parts[k].file):
        held = list(parts)
        begin, end = table.begins[held[0]], table.begins[held[-1] + 1]
        i = begin
        for raw, found in _of(file, table.text_rows):
            if i < end:
                yield i, raw, found
            i += 1
        if i != end or table.stamps[file] != stamp(file):
            raise changed(file)


def _of(file: Path, text_rows: str) -> Iterator[tuple[bytes, Callable[[], dict[str, Any]]]]:
    known = form(file)
    assert known is not None
    suffix, packing = known
    if suffix in LINES:
        with opened(file, packing) as whole:
            for raw in lines(whole):
                yield raw or b"", partial(decode, raw or b"")
        return
    for _, found in attempts(file, text_rows):
        good = {} if isinstance(found, DataError) else found
        yield _line(good), partial(dict, good)


def _line(values: dict[str, Any]) -> bytes:
    try:
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
    except ValueError:  # a number of Parquet that JSON has not: the missing one of many writers
        text = json.dumps(_finite(values), ensure_ascii=False)
    return text.encode() + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def folder_for(out: Path, reads: Sequence[Path]) -> Iterator[Path]:
    """A folder to write into, which becomes `out` at the end, in the place of an earlier cleaning; nothing on an error.

    Raises:
        ConfigError: `out` is no folder of a cleaning, or holds what is read; it cannot be made; another one writes it.
    """
    asked = f"--out {out}"
    if out.name in ("", ".."):
        raise ConfigError(asked, "no name of its own", "name a new folder")
    new, old = out.with_name(out.name + ".tmp"), out.with_name(out.name + ".old.tmp")
    for path in (out, new, old):
        _check_ours(asked, path)
    if inside := [r for r in reads if r.resolve().is_relative_to(out.resolve())]:
        raise ConfigError(asked, f"{inside[0]}, which is read, lies there", "take another folder")
    try:
        new.mkdir(parents=True, exist_ok=True)
        lock = os.open(new, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(asked, f"{error.strerror}", "name a folder that can be made") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for left in new.iterdir():  # by a run that was killed
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        try:
            yield new
            if out.exists():
                shutil.rmtree(old, ignore_errors=True)
                out.rename(old)
            new.rename(out)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        shutil.rmtree(old, ignore_errors=True)
    except BlockingIOError:
        raise ConfigError(asked, "another cleaning is at work there", "wait for it, or take another folder") from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        do = "free some (cleaning takes about a kilobyte a row while it works), or take another folder"
        raise ConfigError(asked, "no space left there", do) from None
    finally:
        os.close(lock)


def _check_ours(asked: str, path: Path) -> None:
    if not os.path.lexists(path):
        return
    if not path.is_dir():
        raise ConfigError(asked, f"{path} is no folder", "take another folder")
    names = {p.name for p in path.iterdir() if not p.name.startswith(WORK)}
    if foreign := sorted(names - OURS):
        raise ConfigError(asked, f"`{foreign[0]}` lies in {path}, which no cleaning wrote", "take another folder")
