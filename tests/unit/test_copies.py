"""Copies of a run in a store: whole, in order, fetched back, and never over another run's."""

import json

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from optrush import train
from optrush.config import parse_config
from optrush.errors import ConfigError, RunError, UserError
from optrush.trainer.copies import Copier, Store, check_copies

RUN = """
model: tiny
objective: sft
data: {{sample: recipes, max_samples: 8, too_long: drop}}
batch: {{seq: 256, tokens: 256}}
train: {{steps: {steps}, save_every: 1, export: false, copy_to: "{address}"}}
output: {output}
with: {{packing: {{}}, attention: {{}}, fused-adamw: {{}}}}
"""


@pytest.fixture(autouse=True)
def store():
    """An empty store in memory."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    return fsspec.filesystem("memory")


def config(output, steps=3, address="memory://runs/a"):
    return parse_config(RUN.format(steps=steps, output=output, address=address), "case")


def names(store):
    return {name.removeprefix("/runs/a/") for name in store.find("/runs/a")}


def last(output):
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [m for m in map(json.loads, lines) if "loss" in m][-1]


def test_a_run_is_fetched_back_and_goes_on(tmp_path, store):
    """On another machine, whose folder is empty, it ends as the run that was never interrupted."""
    train(config(tmp_path / "whole", address="memory://runs/whole"))
    train(config(tmp_path / "first", steps=2))
    found = names(store)
    assert {"run.yaml", "metrics.jsonl", "checkpoints/step-000002/manifest.json"} <= found and ".lock" not in found
    train(config(tmp_path / "second"), resume="auto")
    assert [last(tmp_path / name)["loss"] for name in ("second", "whole")] == [last(tmp_path / "whole")["loss"]] * 2
    held = {name.split("/")[1] for name in names(store) if name.startswith("checkpoints/step")}
    assert held == {"step-000002", "step-000003"}, "what the run dropped is dropped there"


def test_a_manifest_goes_last_and_half_a_checkpoint_is_none(tmp_path, store, monkeypatch):
    put, order = Store.put, list[str]()
    monkeypatch.setattr(Store, "put", lambda self, name: (order.append(name), put(self, name))[1])
    train(config(tmp_path / "a", steps=1))
    saved = [name for name in order if "step-000001" in name]
    assert len(saved) > 1 and saved[-1].endswith("manifest.json")
    store.rm("/runs/a/checkpoints/step-000001/manifest.json")
    assert Store(config(tmp_path / "b")).steps() == {}


def test_a_store_that_fails_at_the_end_is_an_error_of_a_whole_run(tmp_path, monkeypatch):
    def put(self, *_, **__):
        raise OSError("no room there")

    monkeypatch.setattr(Copier, "begin", lambda self: None)
    monkeypatch.setattr(MemoryFileSystem, "put_file", put)
    with pytest.raises(RunError, match="no room there") as error:
        train(config(tmp_path / "a", steps=1))
    assert "yourself" in error.value.text
    assert (tmp_path / "a" / "checkpoints" / "step-000001" / "manifest.json").is_file()


@pytest.mark.parametrize(("address", "found"), [
    ("runs/a", "no address"), ("nowhere://a", "nowhere"), ("s3://bucket/a", "s3"),
    ("memory://runs/a", "the address already has a run"),
])  # fmt: skip
def test_what_cannot_be_copied_to_is_refused(tmp_path, store, address, found):
    store.pipe_file("/runs/a/run.yaml", b"model: tiny")
    with pytest.raises(UserError, match=found):
        check_copies(config(tmp_path / "a", address=address), None)


def test_the_copies_of_another_run_are_left_alone(tmp_path, store):
    train(config(tmp_path / "a", steps=1))
    train(config(tmp_path / "b", steps=1, address="memory://runs/b"))
    with pytest.raises(ConfigError, match="the address has another run"):
        train(config(tmp_path / "b", steps=2), resume="auto")
    with pytest.raises(ConfigError, match="the address already has a run"):
        train(config(tmp_path / "c", steps=1))


def test_what_is_no_run_there_stays(tmp_path, store):
    """Beside a run's copies, as in a bucket's root: it is neither removed with them nor fetched."""
    store.pipe_file("/runs/a/thesis.pdf", b"years")
    train(config(tmp_path / "a", steps=2))
    again = config(tmp_path / "b", steps=1)
    again = again.model_copy(update={"train": again.train.model_copy(update={"overwrite": True})})
    train(again)
    assert store.cat_file("/runs/a/thesis.pdf") == b"years"
    assert not any("step-000002" in name for name in names(store))
    train(config(tmp_path / "c", steps=2), resume="auto")
    assert (tmp_path / "c" / "checkpoints" / "step-000002").is_dir() and not (tmp_path / "c" / "thesis.pdf").exists()
