"""Fetch data sets of the hub, by the library `datasets`, into a cache of Parquet files."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from urllib.parse import quote

from optrush.errors import DataError, NeedsError, first_line


def fetch(asked: str, repository: str, configuration: str | None, split: str, cache: Path | None) -> Path:
    """Return a data set as a Parquet file, fetched unless it is cached; no code of its repository runs.

    Raises:
        DataError: no cache, no such data set, or no network.
        NeedsError: no library `datasets`, or one that may run such code.
    """
    if cache is None:
        raise DataError(asked, "no folder to keep it in", "name one (data.cache)")
    parts = (*repository.split("/"), *filter(None, [configuration]), quote(split, safe=""))
    file = cache / "hub" / f"{'--'.join(parts)}.parquet"
    if file.exists():
        return file
    install = "python -m pip install 'optrush[datasets]'"
    try:
        import datasets
    except ImportError:
        raise NeedsError(asked, "no library datasets, which fetches it", f"install it: {install}") from None
    if int(datasets.__version__.partition(".")[0]) < 4:
        found = f"datasets {datasets.__version__}, which may run code of a repository"
        raise NeedsError(asked, found, f"install a newer one: {install}")
    if Path(repository).exists():  # the library would read that instead
        raise DataError(asked, f"a folder {repository} on this machine", "give its path without hub:, or rename it")
    with tempfile.TemporaryDirectory(dir=cache_folder(file.parent)) as fresh:
        try:
            rows = datasets.load_dataset(repository, configuration, split=split)
            rows.to_parquet(part := os.path.join(fresh, file.name))
        except Exception as error:  # of the library, and of those below it
            found = f"{type(error).__name__}: {first_line(error)}"
            raise DataError(asked, found, "check the name, the split and the network") from error
        os.replace(part, file)
    return file


def cache_folder(folder: Path) -> Path:
    """Make a folder of the cache, and return it. Raises DataError where that is impossible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, "no right to write there")
    except OSError as error:
        do = "name another (data.cache)"
        raise DataError(f"the cache folder {folder}", error.strerror or str(error), do) from error
    return folder
