"""Cleaned once: which rows `data.clean` keeps, remembered beside the tokenised data under a key of its own."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from optrush.config import Run
from optrush.data import files
from optrush.data.cache import Say, Telling, alone, root, small
from optrush.data.chat import Tokens
from optrush.data.clean import clean
from optrush.data.tokenising import identity, no_room
from optrush.data.worker import load, save

FORMAT = 1


class Kept(NamedTuple):
    """Which rows stay, by file; a digest that names them; what cleaning.json holds."""

    rows: list[np.ndarray]
    key: str
    record: dict[str, Any]


def kept(run: Run, tokens: Tokens, paths: Sequence[Path], say: Say) -> Kept:
    """Cleans, or finds what an earlier run found. One process of a machine cleans; small data is cleaned by each.

    Raises:
        UserError: as `clean`.
    """
    data, settings = run.data, run.data.clean
    assert settings is not None
    told = Telling(say, "cleaning", 1.0)

    def now() -> tuple[list[np.ndarray], dict[str, Any]]:
        found = clean(
            paths, settings, tokens=tokens, text_rows=data.text_rows, bad_rows=data.bad_rows,
            most_bad=data.most_bad, workers=data.workers, progress=told.share, cache=root(data.cache),
        )  # fmt: skip
        return [found.kept[path] for path in paths], found.record

    evaluation = [] if settings.decontaminate is None else files.find(settings.decontaminate, root(data.cache))
    said = [
        FORMAT, settings.model_dump(mode="json"), data.text_rows, data.bad_rows, data.most_bad,
        [str(path) for path in paths], files.fingerprint([*paths, *evaluation], root(data.cache)),
        settings.tokens and identity(tokens),
    ]  # fmt: skip
    key = hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]
    if small(paths):
        rows, record = now()
        return Kept(rows, key, record)
    folder = root(data.cache) / "cleaned" / key
    record_file, rows_file = folder / "cleaning.json", folder / "kept.npz"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with alone(folder, say):
            if not record_file.exists():  # written last
                rows, record = now()
                save(rows_file, rows)
                temporary = record_file.with_suffix(f".{os.getpid()}")
                temporary.write_text(json.dumps(record))
                os.replace(temporary, record_file)
    except OSError as error:
        raise no_room(folder, error) from error
    return Kept(load(rows_file), key, json.loads(record_file.read_text()))
