"""Download data into the cache: hub data sets as Parquet, by the library `datasets`; other addresses by fsspec."""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from optrush.config import scrubbed
from optrush.errors import DataError, NeedsError, UserError, first_line, one_line


def fetch(asked: str, repository: str, configuration: str | None, split: str, cache: Path | None) -> Path:
    """Return a data set as a Parquet file, downloaded unless cached; code of its repository does not run.

    Raises:
        DataError: no cache, no such data set, or no network.
        NeedsError: the library `datasets` is missing, or old enough to run such code.
    """
    if cache is None:
        raise DataError(asked, "no cache folder", "set data.cache")
    parts = (*repository.split("/"), *filter(None, [configuration]), quote(split, safe=""))
    file = cache / "hub" / f"{'--'.join(parts)}.parquet"
    if file.exists():
        return file
    install = "python -m pip install 'optrush[datasets]'"
    try:
        import datasets
    except ImportError:
        raise NeedsError(asked, "the library datasets is not installed", f"install it: {install}") from None
    if int(datasets.__version__.partition(".")[0]) < 4:
        found = f"datasets {datasets.__version__}, which may run a repository's code"
        raise NeedsError(asked, found, f"install a newer one: {install}")
    if Path(repository).exists():  # the library would read that instead
        raise DataError(asked, f"a folder {repository} exists on this machine", "write it without hub:, or rename it")
    with tempfile.TemporaryDirectory(dir=cache_folder(file.parent)) as fresh:
        try:
            rows = datasets.load_dataset(repository, configuration, split=split)
            rows.to_parquet(part := os.path.join(fresh, file.name))
        except Exception as error:  # from the library and its dependencies
            found = f"{type(error).__name__}: {first_line(error)}"
            raise DataError(asked, found, "check the name, the split and the network") from error
        os.replace(part, file)
    return file


# Libraries that fsspec needs for each protocol.
LIBRARIES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub", "az": "adlfs",
             "abfs": "adlfs", "http": "aiohttp", "https": "aiohttp"}  # fmt: skip


def open_store(asked: str, url: str) -> tuple[Any, str]:
    """Return the file system of an address, and the path in it.

    Raises:
        DataError: an unknown protocol.
        NeedsError: the library for the protocol is missing.
    """
    kind = url.partition("://")[0]
    try:
        import fsspec

        store, root = fsspec.core.url_to_fs(url)
    except ImportError:
        library = LIBRARIES.get(kind, "fsspec")
        found = f"the library {library}, which reads {kind}://, is not installed"
        raise NeedsError(asked, found, f"install it: python -m pip install {library}") from None
    except ValueError as error:
        do = f"use one of {', '.join(f'{known}://' for known in ('s3', 'gs', 'hf', 'file'))}, or a local path"
        raise DataError(asked, one_line(str(error)), do) from None
    return store, root


def fetch_remote(asked: str, url: str, cache: Path | None) -> Path:
    """Return the cached copy of an address: a file, or a folder with its files or matches.

    The key of a copy is the address and the store's metadata of each file (size, time or tag): a changed file is
    downloaded again.

    Raises:
        DataError: no cache, no such file, or access denied.
        NeedsError: the library for the protocol is missing.
    """
    if cache is None:
        raise DataError(asked, "no cache folder", "set data.cache")
    store, root = open_store(asked, url)
    try:
        alone = not glob.has_magic(root) and store.isfile(root)
        names = [root] if alone else sorted(store.glob(root) if glob.has_magic(root) else store.find(root))
        names = [name for name in names if alone or store.isfile(name)]
        base = os.path.commonpath([os.path.dirname(name) for name in names]) if names else ""
        places = {name: os.path.relpath(name, base or os.curdir) for name in names}
        marks = [f"{name} {store.ukey(name)}" for name in names]
        if not names or any(place.startswith("..") for place in places.values()):
            raise FileNotFoundError("no such file")
        folder = cache / "remote" / hashlib.sha256("\n".join([url, *marks]).encode()).hexdigest()[:32]
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=cache_folder(folder.parent)) as fresh:
                for name, place in places.items():
                    local = Path(fresh, "whole", place)
                    local.parent.mkdir(parents=True, exist_ok=True)
                    store.get_file(name, str(local))
                with suppress(OSError):  # another process was faster
                    os.rename(Path(fresh, "whole"), folder)
    except FileNotFoundError:
        raise DataError(asked, "no such file", "check the address") from None
    except UserError:
        raise
    except Exception as error:  # from the store's library
        found = f"{type(error).__name__}: {scrubbed(one_line(str(error)))}"
        raise DataError(asked, found, "check the address, the network and your permissions") from error
    return folder / places[root] if alone else folder


def cache_folder(folder: Path) -> Path:
    """Create a cache folder and return it. Raises DataError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, "no permission to write")
    except OSError as error:
        raise DataError(f"the cache folder {folder}", error.strerror or str(error), "set another data.cache") from error
    return folder
