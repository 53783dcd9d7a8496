"""Checkpoints by themselves: a job of four parameters, every disk call, every byte, every cutting."""

import errno
import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from optrush import files
from optrush.errors import CheckpointError
from optrush.trainer.checkpoint import (
    SaveFailed,
    choose,
    encode_manifest,
    find_checkpoints,
    manifest_digest,
    restore,
    save,
    verify,
)

from harness import DISK, LONG, advance, holds, killing, leftovers, meta, ranks, run, saved, small_job, told


def test_what_is_saved_is_what_comes_back(tmp_path):
    saved(tmp_path)
    assert [p.name for p in find_checkpoints(tmp_path)] == ["step-000006", "step-000004"]
    manifest, passed = choose(tmp_path, "auto")
    assert manifest is not None and not passed
    assert (manifest.step, manifest.position, manifest.skipped, manifest.run_id) == (6, 60, 6, "00ff")
    assert manifest.config["train"]["keep"] == 2 and manifest.versions["torch"] == torch.__version__
    job = small_job(tmp_path)
    restore(job, manifest, {})
    assert holds(job, 6)
    library = load_file(manifest.path / "rank-0.safetensors")
    assert torch.equal(library["param/norm"], job.trained[1].local)
    assert library["param/norm"].dtype == torch.bfloat16 and library["state/count/one"].shape == ()


def test_nothing_there_begins_at_the_start(tmp_path):
    assert choose(tmp_path, "auto") == (None, [])
    assert choose(tmp_path / "nowhere", "auto") == (None, [])
    (tmp_path / "checkpoints" / "step-000002.tmp-ab").mkdir(parents=True)  # killed in its first save
    assert choose(tmp_path, "auto") == (None, [])
    saved(tmp_path)
    assert choose(tmp_path, None) == (None, [])


def test_killed_at_every_call_of_a_save(tmp_path):
    """R2: calls of files.py, pruning included: before it, and halfway through and right after each write; every eighth
    one, in the long form all.

    After any other call the disk is as before the next one.
    """
    steps = (2, 4)
    calls, every = 0, 1 if LONG else 8
    for how in ("before", "half", "after"):
        at = 1 - every
        while True:
            at += every
            output = tmp_path / f"{how}-{at}"
            output.mkdir()

            def work(output=output, at=at, how=how):
                job = small_job(output, keep=1)
                killing(at, how, DISK if how == "before" else ("write_piece",))
                for step in steps:
                    advance(job, step)
                    save(job, step, meta(step))
                    (output / "done").write_text(str(step))

            code = run(work)
            if code == 0:
                break
            assert code == -9
            calls += 1
            done = int((output / "done").read_text()) if (output / "done").exists() else 0
            manifest, passed = choose(output, "auto")
            assert passed == [], "a kill must not damage what has its final name"
            for path in find_checkpoints(output):
                verify(path)  # pruning must not leave half a folder under its name
            step = 0 if manifest is None else manifest.step
            assert step in (done, done + 2), f"killed {how} call {at}: at step {step}, {done} was saved"
            job = small_job(output, keep=1)
            if manifest is not None:
                restore(job, manifest, {})
                assert holds(job, step)
            for after in range(step + 2, 6, 2):
                advance(job, after)
                save(job, after, meta(after))
            if step == 4:
                save(job, 4, meta(4))
            assert [p.name for p in find_checkpoints(output)] == ["step-000004"] and leftovers(output) == []
            verify(output / "checkpoints" / "step-000004")
            shutil.rmtree(output)
    assert calls > 100 // every
    told("R2", calls, "every call of two saves with pruning, before, halfway and after it")


def test_everything_is_synced_before_it_gets_its_name(tmp_path, monkeypatch):
    """A power cut loses what was not synced; the order of the calls is all that protects from it."""
    events: list[str] = []
    for name in DISK:
        real = getattr(files, name)

        def call(*args, name=name, real=real):
            what = args[0]
            target = os.readlink(f"/proc/self/fd/{what}") if name == "sync_file" else str(getattr(what, "name", what))
            events.append(f"{name} {Path(target).name.split('.tmp')[0]}")
            real(*args)

        monkeypatch.setattr(files, name, call)
    saved(tmp_path, (2,))
    writes = [i for i, e in enumerate(events) if e.startswith("write_piece rank-0")]
    order = [
        "make_folder checkpoints", f"sync_file {tmp_path.name}", "make_folder step-000002",
        "sync_file rank-0.safetensors", "write_piece manifest.json", "sync_file manifest.json",
        "sync_file step-000002", "rename_file step-000002", "sync_file checkpoints",
    ]  # fmt: skip
    at = [events.index(e) for e in order]
    assert at == sorted(at) and max(writes) < at[3] and len(writes) == 1 + 4 * 4
    events.clear()
    saved(tmp_path, (4,), keep=1)
    at = events.index("rename_file step-000004")
    committed = ["rename_file step-000004", "sync_file checkpoints"]
    assert events[at : at + 4] == [*committed, "rename_file step-000002", "sync_file checkpoints"]


MUTATIONS = ("flip", "zero", "cut", "delete", "swap", "stale", "empty", "manifest")


def mutate(kind, folder, other, rng):
    """Damages the checkpoint in `folder`; returns the name of the file that is to be named."""
    name = rng.choice(sorted(p.name for p in folder.glob("*.safetensors")))
    file = folder / name
    data = bytearray(file.read_bytes())
    if kind == "flip":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "zero":
        at = rng.randrange(len(data))
        old = bytes(data[at : at + 4096])
        data[at : at + 4096] = bytes(len(old))
        if data == file.read_bytes():
            data[at] = 1
    elif kind == "cut":
        del data[rng.randrange(len(data)) :]
    elif kind == "delete":
        name = rng.choice([name, "manifest.json"])
        (folder / name).unlink()
        return name
    elif kind == "swap":
        data = bytearray((other / name).read_bytes())
        (other / name).write_bytes(file.read_bytes())
    else:
        name = "manifest.json"
        file = folder / name
        data = bytearray(file.read_bytes())
        if kind == "stale":
            data = bytearray((other / name).read_bytes())
        elif kind == "empty":
            data = bytearray(rng.choice([b"", b"\n", b"{}", b"null"]))
        else:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    assert data != file.read_bytes()
    file.write_bytes(data)
    return name


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory):
    """Three checkpoints of two ranks."""
    output = tmp_path_factory.mktemp("three")

    def work():
        job = small_job(output, "rows", keep=3)
        for step in (2, 4, 6):
            advance(job, step)
            save(job, step, meta(step))

    ranks(2, work)
    return output


@pytest.mark.parametrize("kind", MUTATIONS)
def test_damage_is_found_named_and_passed_over(kind, three_steps, tmp_path):
    """R3: 13 mutations of each of 8 kinds, 38 in the long form."""
    job = small_job(tmp_path)
    for seed in range(38 if LONG else 13):
        output = tmp_path / str(seed)
        shutil.copytree(three_steps, output)
        newest, other = find_checkpoints(output)[:2]
        name = mutate(kind, newest, other, random.Random(f"{kind} {seed}"))
        with pytest.raises(CheckpointError) as error:
            verify(newest)
        assert name in error.value.found and str(newest) in error.value.asked
        with pytest.raises(CheckpointError):
            choose(output, newest)
        manifest, passed = choose(output, "auto")
        damaged = [newest, other] if kind == "swap" else [newest]
        assert [p for p, _ in passed] == damaged and all(name in why for _, why in passed)
        assert manifest is not None and manifest.step == 6 - 2 * len(damaged)
        restore(job, manifest, {})
        assert holds(job, manifest.step)
    told("R3", 38 if LONG else 13, kind)


def test_damage_in_the_blanks_of_a_manifest(three_steps, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(three_steps, output)
    file = find_checkpoints(output)[0] / "manifest.json"
    text = file.read_bytes()
    for damaged in (text.replace(b"\n", b"\r", 1), text + b" ", text.replace(b": ", b":\t", 1), text[:-1]):
        assert json.loads(damaged) == json.loads(text)
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"manifest\.json does not match its digest"):
            verify(file.parent)


def test_no_intact_one_never_starts_afresh(three_steps, tmp_path):
    """R4."""
    output = tmp_path / "run"
    shutil.copytree(three_steps, output)
    for path in find_checkpoints(output):
        (path / "rank-1.safetensors").unlink()
    with pytest.raises(CheckpointError) as error:
        choose(output, "auto")
    assert "step-000002: rank-1.safetensors does not exist" in error.value.found and "train.overwrite" in error.value.do
    with pytest.raises(CheckpointError, match="does not exist"):
        choose(output, output / "checkpoints" / "step-000008")


def test_going_back_behind_a_damaged_one(three_steps, tmp_path):
    """The step that was damaged is saved again under its name, and what lay in the abandoned future goes."""
    output = tmp_path / "run"
    shutil.copytree(three_steps, output)
    for path in find_checkpoints(output)[:2]:
        (path / "manifest.json").unlink()
    job = small_job(output, keep=2)
    manifest, passed = choose(output, "auto")
    assert manifest is not None and manifest.step == 2 and len(passed) == 2
    restore(job, manifest, {})
    advance(job, 4)
    save(job, 4, meta(4))
    assert [p.name for p in find_checkpoints(output)] == ["step-000004", "step-000002"] and leftovers(output) == []
    assert verify(find_checkpoints(output)[0]).step == 4


def test_saving_the_same_state_again_touches_nothing(tmp_path):
    job = saved(tmp_path)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    save(job, 6, meta(6))
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()} == before


def test_a_forged_manifest_leads_nowhere_else(tmp_path):
    saved(tmp_path)
    path = find_checkpoints(tmp_path)[0]
    (path / "manifest.json").unlink()
    shutil.copy(find_checkpoints(tmp_path)[1] / "manifest.json", path)
    for change in (
        {"files": {"../../secret": {"sha256": "0" * 64, "bytes": 1}}}, {"step": 7}, {"format": 2}, {"surplus": 1},
        {"position": "1"}, {"tensors": {"a": {"dtype": "F32", "shape": [4], "pieces": []}}},
    ):  # fmt: skip
        body = json.loads((find_checkpoints(tmp_path)[1] / "manifest.json").read_text()) | {"step": 6} | change
        (path / "manifest.json").write_bytes(encode_manifest(body | {"digest": manifest_digest(body)}))
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            verify(path)


def test_disk_full_at_every_write(tmp_path, monkeypatch):
    """R6: the half save goes, the last good one stays, and the next save works."""
    job = saved(tmp_path, (2,))
    real = {name: getattr(files, name) for name in DISK}
    failed: list[str] = []
    for name in DISK:
        for at in range(1, 100):
            calls = {"n": 0}

            def full(*args, name=name, at=at, calls=calls):
                calls["n"] += 1
                if calls["n"] == at:
                    if name == "write_piece":
                        args[0].write(args[1][: len(args[1]) // 2])
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                real[name](*args)

            monkeypatch.setattr(files, name, full)
            advance(job, 4)
            try:
                save(job, 4, meta(4))
            except SaveFailed as error:
                failed.append(str(error))
            else:
                break
            finally:
                monkeypatch.setattr(files, name, real[name])
            manifest, passed = choose(tmp_path, "auto")
            assert manifest is not None and passed == []
            if manifest.step == 2:
                assert leftovers(tmp_path) == []
            save(job, 4, meta(4))
            assert verify(find_checkpoints(tmp_path)[0]).step == 4 and leftovers(tmp_path) == []
            shutil.rmtree(tmp_path)
            tmp_path.mkdir()
            job = saved(tmp_path, (2,))
        save(job, 4, meta(4))
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        job = saved(tmp_path, (2,))
    assert len(failed) > 20 and all("No space left" in text for text in failed)
    told("R6", len(failed), "each call that changes the disk failed once")
