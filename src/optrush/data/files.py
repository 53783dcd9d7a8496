"""From what `data.path` says to files: one, a folder's, a glob's, or a data set of the hub written once as Parquet.

What is left out is left out by a rule that is said (hidden names, unknown suffixes beside known ones, in a folder what
tells about a data set); a choice that would read rows twice, or documents and rows as one, is refused.
"""

from __future__ import annotations

import difflib
import errno
import glob
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from optrush.data.compressed import PACKED
from optrush.data.read import KNOWN, TEXT, form
from optrush.errors import DataError, NeedsError

HUB = "hub:"
HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(\w[\w.]*))?")
NAMED = 5  # files that an error message names
# What lies in the folder of a cloned or saved data set beside the data.
ABOUT = frozenset({
    "README.md", "LICENSE.md", "LICENSE.txt", "dataset_info.json", "dataset_infos.json", "dataset_dict.json",
    "state.json",
})  # fmt: skip
SETTLED_ns = 2 * 10**9  # a file changed so lately could change again within one tick of its clock


def find(path: str, cache: Path | None = None) -> list[Path]:
    """The data files that a path names, sorted.

    Args:
        path: a file; a folder (all data files in it and its folders, but hidden ones and those of ABOUT); a glob; or a
            data set of the hub, `org/name` where no such path exists, or `hub:org/name[:split]` (else its split
            `train`).
        cache: the folder for data sets of the hub; one that lies there is not asked for again.

    Raises:
        DataError: nothing is there, nothing known, or files that do not go together; no such data set or no network.
        NeedsError: a hub id without the `datasets` library.
    """
    asked = f"training data from {path}"
    try:
        return _find(path, asked, cache)
    except OSError as error:
        found = f"{error.strerror or error}: {error.filename or path}"
        raise DataError(asked, found, "check the path and its rights") from error


def _find(path: str, asked: str, cache: Path | None) -> list[Path]:
    if path.startswith(HUB):
        return [_from_hub(path.removeprefix(HUB), cache)]
    place = Path(os.path.expanduser(path))
    if place.is_file():
        return _together(asked, [place], "")
    if place.is_dir():
        return _together(asked, _data(sorted(_inside(place))), "an empty folder")
    if glob.has_magic(path):
        found = [Path(name) for name in sorted(glob.glob(str(place), recursive=True))]
        return _together(asked, [file for file in found if not file.is_dir()], "nothing that matches")
    if HUB_ID.fullmatch(path) and form(place) is None and not place.parent.is_dir():
        return [_from_hub(path, cache)]
    near = os.listdir(place.parent) if place.parent.is_dir() else []
    close = difflib.get_close_matches(place.name, near, 1)
    raise DataError(asked, "no such file", "check the path" + (f": did you mean {close[0]}?" if close else ""))


def about(path: str) -> list[str]:
    """The names in a folder that are left out because they tell about the data and are none."""
    place = Path(os.path.expanduser(path))
    found = list(_inside(place)) if place.is_dir() else []
    return sorted({file.name for file in set(found) - set(_data(found))})


def _data(found: list[Path]) -> list[Path]:
    """The files of a folder without those of ABOUT."""
    return [file for file in found if file.name not in ABOUT]


def _inside(folder: Path) -> Iterator[Path]:
    """The files in a folder and its folders, but the hidden ones; each folder once, whatever links lead there."""

    def refuse(error: OSError) -> None:
        raise error

    seen = {os.path.realpath(folder)}
    for at, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        inner = {name: os.path.realpath(os.path.join(at, name)) for name in sorted(folders) if name[0] != "."}
        folders[:] = [name for name, real in inner.items() if real not in seen]
        seen.update(inner.values())
        yield from (Path(at, name) for name in names if name[0] != ".")


def _together(asked: str, files: list[Path], nothing: str) -> list[Path]:
    """The files of known kinds, if they can be one corpus."""
    if not files:
        raise DataError(asked, nothing, "name a data file, a folder of some, or a glob")
    known = {file: format_ for file in files if (format_ := form(file))}
    if not known:
        do = f"name them by what they hold: {', '.join(KNOWN)}, or one of the text kinds with {', '.join(PACKED)}"
        raise DataError(asked, f"no known kind of data: {_named(files)}", do)
    texts = [file for file, (suffix, _) in known.items() if suffix in TEXT]
    if texts and len(texts) < len(known):
        rows = [file for file in known if file not in texts]
        found = f"files of rows ({_named(rows)}) and files of plain text ({_named(texts)})"
        do = "name one kind with a glob, such as folder/*.jsonl, or each as a source of its own"
        raise DataError(asked, found, do)
    plain: dict[Path, Path] = {}
    for file, (_, packing) in known.items():
        inner = file.with_suffix("") if packing else file
        if inner in plain:
            found = f"{plain[inner].name} and {file.name}: the same rows twice?"
            raise DataError(asked, found, "take one of them away")
        plain[inner] = file
    return list(known)


def _named(files: list[Path]) -> str:
    more = len(files) - NAMED
    return ", ".join(file.name for file in files[:NAMED]) + (f" and {more} more" if more > 0 else "")


def _from_hub(name: str, cache: Path | None) -> Path:
    """A data set of the hub as a Parquet file, fetched unless it lies in the cache; no code of its repository runs."""
    asked = f"the data set {name} from the hub"
    match = HUB_ID.fullmatch(name)
    if match is None:
        raise DataError(asked, "no name of a data set", "write hub:organisation/name or hub:organisation/name:split")
    repository, split = match[1], match[2] or "train"
    if cache is None:
        raise DataError(asked, "no folder to keep it in", "name one (data.cache)")
    file = cache / "hub" / f"{repository.replace('/', '--')}--{split}.parquet"
    if file.exists():
        return file
    try:
        import datasets
    except ImportError:
        do = "install it: python -m pip install 'optrush[datasets]'"
        raise NeedsError(asked, "no library datasets, which fetches it", do) from None
    if int(datasets.__version__.partition(".")[0]) < 4:
        do = "install a newer one: python -m pip install 'optrush[datasets]'"
        raise NeedsError(asked, f"datasets {datasets.__version__}, which may run code of a repository", do)
    if Path(repository).exists():  # the library would read that instead
        raise DataError(asked, f"a folder {repository} on this machine", "give its path without hub:, or rename it")
    with tempfile.TemporaryDirectory(dir=_made(file.parent)) as fresh:
        try:
            datasets.load_dataset(repository, split=split).to_parquet(part := os.path.join(fresh, file.name))
        except Exception as error:  # whatever it and the libraries below it raise
            found = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise DataError(asked, found, "check the name, the split and the network") from error
        os.replace(part, file)
    return file


def fingerprint(files: Path | Iterable[Path], cache: Path | None = None) -> str:
    """SHA-256 over the contents and formats of files in their order, wherever they lie and whatever they are called.

    Args:
        cache: a folder that keeps the hash of each file by its path, size, time of change and inode, so that a file
            that did not change is not read again.
    """
    memory = cache / "fingerprints.json" if cache else None
    known = _remembered(memory)
    whole, fresh = hashlib.sha256(), False
    for file in [files] if isinstance(files, Path) else files:
        try:
            key, now = os.path.realpath(file), mark(file)
            if known.get(key, [])[:-1] != now:
                with file.open("rb") as opened:
                    known[key] = [*now, hashlib.file_digest(opened, "sha256").hexdigest()]
                if mark(file) != now:
                    raise changed(file)
                fresh = True
        except OSError as error:
            do = "check the file and its rights"
            raise DataError(f"training data from {file}", error.strerror or str(error), do) from error
        whole.update(f"{form(file)} {known[key][-1]}\n".encode())
    if memory and fresh:
        settled = time.time_ns() - SETTLED_ns
        kept = {key: entry for key, entry in known.items() if int(entry[1]) < settled}
        with tempfile.NamedTemporaryFile("w", dir=_made(memory.parent), delete=False) as part:
            json.dump(kept, part)
        os.replace(part.name, memory)
    return whole.hexdigest()


def changed(file: Path) -> DataError:
    """The error of a file that is not what it was when its contents were hashed."""
    return DataError(f"to read {file}", "it changed meanwhile", "wait until it is complete, and start again")


def mark(file: Path) -> list[int]:
    """What changes whenever the file does."""
    found = file.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ino, found.st_ctime_ns]  # the last nobody can set back


def _remembered(memory: Path | None) -> dict[str, list[int | str]]:
    """What the cache holds; a damaged file of it is as good as none."""
    try:
        found = json.loads(memory.read_bytes()) if memory else {}
        return {
            key: entry for key, entry in found.items() if [type(part) for part in entry] == [int, int, int, int, str]
        }
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, "no right to write there")
    except OSError as error:
        do = "name another (data.cache)"
        raise DataError(f"the cache folder {folder}", error.strerror or str(error), do) from error
    return folder
