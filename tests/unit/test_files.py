"""Which files a path names, and a hash that knows whether they changed."""

import hashlib
import json
import os
import sys
import time
import types
from pathlib import Path

import pytest

from optrush.data import readers
from optrush.data.readers import files_fingerprint, find_files, read_rows
from optrush.errors import DataError, NeedsError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'{{"text": "{name}"}}\n')


def refused(path, cache=None, kind=DataError):
    with pytest.raises(kind) as caught:
        find_files(str(path), cache)
    assert "\n" not in caught.value.found + caught.value.do
    return caught.value


# --- files, folders, globs


def test_a_file_a_folder_and_a_glob(folder):
    names = ("data/b.jsonl", "data/a.parquet", "data/deep/c.json.gz", "data/deep/D.CSV")
    make(folder, *names, "data/notes.bin", "data/.hidden.jsonl", "data/.git/x.jsonl", "data/deep/no_suffix")
    assert find_files("data/b.jsonl") == [Path("data/b.jsonl")]
    assert find_files(str(folder / "data")) == sorted(folder / name for name in names)
    assert find_files("data/*") == [Path("data/a.parquet"), Path("data/b.jsonl")]
    assert find_files("data/**/*.[jg]*") == [Path("data/b.jsonl"), Path("data/deep/c.json.gz")]
    make(folder, "odd[1].jsonl")
    assert find_files("odd[1].jsonl") == [Path("odd[1].jsonl")], "a name that exists is no pattern"


def test_what_tells_about_a_data_set_is_left_out_of_its_folder(folder):
    extra = ("README.md", "LICENSE.txt", "LICENSE", ".gitattributes", "train/dataset_info.json", "train/state.json")
    make(folder, *(f"data/{name}" for name in extra))
    assert refused("data").found == "no known kind of data: LICENSE", "alone they are no data either"
    make(folder, "data/train/a.jsonl", "data/train/info.json")
    assert find_files("data") == [Path("data/train/a.jsonl"), Path("data/train/info.json")]
    assert readers.description_files("data") == ["LICENSE.txt", "README.md", "dataset_info.json", "state.json"]
    assert find_files("data/*.md") == find_files("data/README.md") == [Path("data/README.md")], "asked for by name"
    assert (
        readers.description_files("data/README.md")
        == readers.description_files("data/*.md")
        == readers.description_files("nowhere")
        == []
    )


def test_home_is_understood(folder, monkeypatch):
    make(folder, "a.jsonl")
    monkeypatch.setenv("HOME", str(folder))
    assert find_files("~/a.jsonl") == find_files("~/*.jsonl") == find_files("~") == [folder / "a.jsonl"]


def test_links_are_followed_and_circles_end(folder):
    make(folder, "data/a.jsonl", "other/b.jsonl")
    (folder / "data/more").symlink_to(folder / "other")
    (folder / "other/back").symlink_to(folder / "data")
    assert find_files("data") == [Path("data/a.jsonl"), Path("data/more/b.jsonl")]


def test_nothing_is_there(folder):
    make(folder, "data/train.jsonl")
    (folder / "empty").mkdir()
    error = refused("data/trian.jsonl")
    assert error.found == "no such file" and error.do == "check the path: did you mean train.jsonl?"
    assert refused("nowhere/train.jsonl").do == "check the path"
    assert refused("empty").found == "an empty folder"
    assert refused("~nobody-of-that-name/a.jsonl").found == "no such file"
    assert refused("a" * 300 + ".jsonl").found.startswith("File name too long")
    assert refused("data/*.csv").found == refused("dat*").found == "no match"


def test_unknown_kinds_are_named_where_nothing_else_is(folder):
    make(folder, *(f"data/{i}.bin" for i in range(7)))
    for path in ("data", "data/*"):
        assert refused(path).found == "no known kind of data: 0.bin, 1.bin, 2.bin, 3.bin, 4.bin and 2 more"
    assert ".parquet" in refused("data/3.bin").do


@pytest.mark.parametrize(("names", "found"), [
    (("NOTES.md", "a.jsonl"), "files of rows (a.jsonl) and files of plain text (NOTES.md)"),
    (("a.jsonl", "a.jsonl.gz"), "a.jsonl and a.jsonl.gz: the same rows twice?"),
    (("a.csv.xz", "a.csv.zst"), "a.csv.xz and a.csv.zst: the same rows twice?"),
])  # fmt: skip
def test_files_that_do_not_go_together(folder, names, found):
    make(folder, *(f"data/{name}" for name in names))
    assert refused("data").found == refused("data/*").found == found


def test_a_folder_that_cannot_be_listed_is_an_error(folder, monkeypatch):
    make(folder, "data/a.jsonl")
    scan = os.scandir

    def deny(path):
        if str(path).endswith("shut"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    (folder / "data/shut").mkdir()
    monkeypatch.setattr(os, "scandir", deny)
    error = refused("data")
    assert error.found == "Permission denied: data/shut" and "permissions" in error.do


# --- the hub


class Hub:
    """Stands for the `datasets` library: one data set, and what asking for another raises."""

    def __init__(self, version="5.2.0"):
        self.asked = []
        self.module = types.ModuleType("datasets")
        self.module.__version__ = version
        self.module.load_dataset = self.load

    def load(self, name, configuration, split):
        self.asked.append((name, configuration, split))
        if name != "org/name":
            raise ConnectionError("no route\nto the hub")
        return self

    def to_parquet(self, path):
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"text": [f"{self.asked[-1][2]} of the hub"]}), path)


@pytest.fixture
def hub(monkeypatch):
    made = Hub()
    monkeypatch.setitem(sys.modules, "datasets", made.module)
    return made


def test_a_data_set_of_the_hub_is_fetched_once(folder, hub):
    cache = folder / "cache"
    for path, split in (
        ("org/name", "train"), ("hub:org/name:test", "test"), ("hub:org/name", "train"), ("hub:org/name/en", "train"),
        ("hub:org/name/20231101.en:train[:20%]", "train[:20%]"), ("hub:org/name:train[10:-10]", "train[10:-10]"),
        ("hub:org/name/20231101.en:train[:20%]", "train[:20%]"),
    ):  # fmt: skip
        (file,) = find_files(path, cache)
        assert [row for _, row in read_rows(file)] == [{"text": f"{split} of the hub"}]
    assert [(configuration, split) for _, configuration, split in hub.asked] == [
        (None, "train"), (None, "test"), ("en", "train"), ("20231101.en", "train[:20%]"), (None, "train[10:-10]"),
    ]  # fmt: skip
    assert sorted(path.name for path in (cache / "hub").iterdir()) == [
        "org--name--20231101.en--train%5B%3A20%25%5D.parquet", "org--name--en--train.parquet",
        "org--name--test.parquet", "org--name--train%5B10%3A-10%5D.parquet", "org--name--train.parquet",
    ]  # fmt: skip


def test_what_lies_here_is_not_asked_of_the_hub(folder, hub):
    make(folder, "org/name/a.jsonl")
    assert find_files("org/name", folder / "cache") == [Path("org/name/a.jsonl")]
    assert "a folder org/name exists on this machine" in refused("hub:org/name", folder / "cache").found
    assert refused("org/nama", folder / "cache").found == "no such file"
    assert refused("data/train.jsonl", folder / "cache").found == "no such file"
    assert refused("data/raw/train", folder / "cache").found == "no such file"
    assert hub.asked == []


def test_a_data_set_that_cannot_be_fetched(folder, hub, monkeypatch):
    cache = folder / "cache"
    error = refused("no/such", cache)
    assert error.found == "ConnectionError: no route" and "the network" in error.do
    assert list((cache / "hub").iterdir()) == []
    for name in ("hub:name", "hub:../name", "hub:a/b/c/d", "hub:org/name:a b", "hub:a/b:train[", "hub:"):
        assert refused(name, cache).found == "not a data set name"
    assert "data.cache" in refused("org/name").do
    (folder / "file").touch()
    assert "the cache folder" in refused("org/name", folder / "file").asked
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert refused("org/name", folder / "cache").found == "no permission to write"


def test_the_hub_without_its_library_or_with_an_old_one(folder, monkeypatch):
    for module, found in (
        (None, "the library datasets"),
        (Hub("3.6.0").module, "datasets 3.6.0, which may run a repository's code"),
    ):
        monkeypatch.setitem(sys.modules, "datasets", module)
        error = refused("org/name", folder, NeedsError)
        assert found in error.found and "python -m pip install 'optrush[datasets]'" in error.do


# --- the fingerprint


def test_a_fingerprint_is_of_contents_formats_and_order_alone(folder):
    make(folder, "a.jsonl", "b.jsonl")
    for name in ("far/away.jsonl", "a.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes((folder / "a.jsonl").read_bytes())
    a, b, away, text = (Path(name) for name in ("a.jsonl", "b.jsonl", "far/away.jsonl", "a.txt"))
    assert files_fingerprint([a]) == files_fingerprint(a) == files_fingerprint([away])
    assert len({files_fingerprint(these) for these in ([a], [b], [text], [a, b], [b, a], [a, a], [])}) == 7
    with pytest.raises(DataError) as caught:
        files_fingerprint([Path("none.jsonl")])
    assert caught.value.found == "No such file or directory" and "none.jsonl" in caught.value.asked


def test_an_unchanged_file_is_hashed_once(folder, monkeypatch):
    make(folder, "a.jsonl", "b.jsonl")
    a, b, cache = folder / "a.jsonl", folder / "b.jsonl", folder / "cache"
    hashed, digest = [], hashlib.file_digest

    def count(file, name):
        hashed.append(Path(file.name).name)
        return digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", count)
    files_fingerprint([a], cache)
    files_fingerprint([a], cache)
    assert hashed == ["a.jsonl"] * 2, "what has just changed may do so again within its time stamp"
    long_ago = time.time_ns() - 10**10
    for path in (a, b):
        os.utime(path, ns=(long_ago, long_ago))
    del hashed[:]
    first = files_fingerprint([a, b], cache)
    assert (
        files_fingerprint([a, b], cache) == first == files_fingerprint([a, b]) and hashed == ["a.jsonl", "b.jsonl"] * 2
    )
    del hashed[:]
    a.write_text("other")
    os.utime(a, ns=(long_ago + 1, long_ago + 1))
    assert files_fingerprint([a, b], cache) != first and hashed == ["a.jsonl"]
    for damage in ("{", "[]", '{"x": 1}', json.dumps({str(a): [1, "x", 2, "y"]})):
        (cache / "fingerprints.json").write_text(damage)
        assert files_fingerprint([a, b], cache) == files_fingerprint([a, b])
    assert [path.name for path in cache.iterdir()] == ["fingerprints.json"]


def test_a_file_that_grows_meanwhile_has_no_fingerprint(folder, monkeypatch):
    make(folder, "a.jsonl")
    marks = iter([[1, 1, 1], [2, 1, 1]])
    monkeypatch.setattr(readers, "file_state", lambda file: next(marks))
    with pytest.raises(DataError) as caught:
        files_fingerprint([folder / "a.jsonl"])
    assert "changed during reading" in caught.value.found
