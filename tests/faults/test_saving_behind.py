"""R11: checkpoints that a thread writes while the training goes on (`train.save: async`)."""

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from optrush import files, hardware
from optrush.errors import RunError
from optrush.trainer import checkpoint, run
from optrush.trainer.checkpoint import Saver, choose, find_checkpoints, restore, verify
from optrush.trainer.run_dir import Best, BestCheckpoint

from harness import DISK, GUARD_S, LONG, advance, ended, holds, killing, leftovers, meta, small_job, told
from harness import run as forked
from runs import (
    begun,
    begun_on,
    configuration,
    each_step,
    figures,
    held,
    lines,
    said,
    signalled,
    together,
    trained,
    trained_on,
    wait_for,
    weights,
)

BEHIND = {"steps": 12, "log_every": 1, "save_every": 3, "save": "async"}
ALONE: dict[str, Any] = {"packing": {}}


def behind(home, name, **changes):
    """The configuration of a run that saves in a thread, and its folder."""
    return configuration(home, home / name, **{"train": BEHIND, **changes}), home / name


def slow_disk(seconds, rank=None):
    """Each sync lasts a while, on one rank or on all."""

    def before():
        real = files.sync_file

        def slow(descriptor):
            if rank in (None, os.environ.get("RANK")):
                time.sleep(seconds)
            real(descriptor)

        files.sync_file = slow

    return before


def saver_of(job):
    job.config = job.config.model_copy(update={"train": job.config.train.model_copy(update={"save": "async"})})
    return Saver(job)


def test_killed_at_every_call(tmp_path):
    """Committed means loadable, whatever the loop does to the tensors; every eighth call, in the long form all."""
    steps, calls, every = (2, 4), 0, 1 if LONG else 8
    for how in ("before", "half", "after"):
        at = 1
        while True:
            output = tmp_path / f"{how}-{at}"
            output.mkdir()

            def work(output=output, at=at, how=how):
                job = small_job(output, keep=1)
                saver = saver_of(job)
                saver.settled = lambda step, failure: (output / "done").write_text(f"{step if failure is None else 0}")
                killing(at, how, DISK if how == "before" else ("write_piece",))
                for step in steps:
                    advance(job, step)
                    saver.save(step, meta(step))
                    advance(job, step + 1)  # the loop goes on
                saver.settle(wait=True)

            code = forked(work)
            assert code in (0, -9)
            if code == 0:
                break
            calls += 1
            done = int((output / "done").read_text()) if (output / "done").exists() else 0
            manifest, passed = choose(output, "auto")
            assert passed == [], "a kill must not damage what has its final name"
            for path in find_checkpoints(output):
                verify(path)
            step = 0 if manifest is None else manifest.step
            assert step in (done, done + 2), f"killed {how} call {at}: at step {step}, {done} was saved"
            job = small_job(output, keep=1)
            if manifest is not None:
                restore(job, manifest, {})
                assert holds(job, step)
            advance(job, 4)
            checkpoint.save(job, 4, meta(4))
            assert [p.name for p in find_checkpoints(output)] == ["step-000004"] and leftovers(output) == []
            shutil.rmtree(output)
            at += every
    assert calls > 100 // every
    told("R11", calls, "kill -9 at every call of two saves, before, halfway and after it")


def test_its_bytes_are_those_of_a_save_in_the_loop(tmp_path):
    job = small_job(tmp_path / "behind", keep=2)
    saver, results = saver_of(job), []
    saver.settled = lambda step, failure: results.append((step, failure))
    page = saver.host.page.data_ptr() if saver.host else None
    for step in (2, 4):
        advance(job, step)
        saver.save(step, meta(step))
        advance(job, step + 1)
    saver.settle(wait=True)
    assert results == [(2, None), (4, None)] and saver.host is not None and saver.host.page.data_ptr() == page
    other = small_job(tmp_path / "loop", keep=2)
    for step in (2, 4):
        advance(other, step)
        checkpoint.save(other, step, meta(step))
    for one, two in zip(find_checkpoints(tmp_path / "behind"), find_checkpoints(tmp_path / "loop"), strict=True):
        assert (one / "rank-0.safetensors").read_bytes() == (two / "rank-0.safetensors").read_bytes()
        mine, its = ({**json.loads((p / "manifest.json").read_bytes()), "digest": ""} for p in (one, two))
        for body in (mine, its):
            body["config"] = {**body["config"], "output": "", "train": {**body["config"]["train"], "save": ""}}
        assert mine == its


def test_the_loop_goes_on_one_save_is_under_way_and_the_end_waits(home):
    """The disk stands still until the loop has taken two more steps; the next save begins after this one's end."""
    config, output = behind(home, "waits")
    events = home / "waits.events"

    def before():
        begin, write, real = run.set_step, checkpoint._write, files.sync_file
        at = {"step": 0, "saving": 0}

        def stepped(job, n, steps):
            at["step"] = n
            begin(job, n, steps)

        def stuck(descriptor):
            until = time.monotonic() + GUARD_S / 2
            while at["saving"] and at["step"] < min(12, at["saving"] + 2):
                assert time.monotonic() < until, "the loop waits for the disk"
                time.sleep(0.005)
            real(descriptor)

        def written(snapshot, *rest):
            at["saving"] = snapshot.step
            note(f"begin {snapshot.step}")
            final = write(snapshot, *rest)
            note(f"end {snapshot.step}")
            at["saving"] = 0
            return final

        def note(what):
            with events.open("a") as file:
                file.write(f"{what}\n")

        run.set_step, checkpoint._write, files.sync_file = stepped, written, stuck

    assert trained(config, before=before) == 0, said(config)
    assert events.read_text().split("\n")[:-1] == [f"{what} {n}" for n in (3, 6, 9, 12) for what in ("begin", "end")]
    assert figures(output) == figures(home / "reference") and weights(output) == weights(home / "reference")
    assert [p.name for p in find_checkpoints(output)] == ["step-000012", "step-000009"] and leftovers(output) == []


def test_killed_at_random_moments(home):
    """On a slow disk: at most the save under way is lost, and the same command repeats its steps to the bit."""
    for seed in range(20 if LONG else 1):
        rng = random.Random(seed)
        config, output = behind(home, f"behind-{seed}")
        pid = begun(config, "--resume", "auto", before=slow_disk(0.02))
        wait_for(output, rng.randrange(3, 12))
        time.sleep(rng.random() * 0.1)
        os.kill(pid, signal.SIGKILL)
        assert ended(pid) in (-9, 0)
        for path in find_checkpoints(output):
            verify(path)
        newest = verify(find_checkpoints(output)[0]).step if find_checkpoints(output) else 0
        assert figures(output, torn=True)[-1]["step"] - newest <= 2 * 3
        assert trained(config, "--resume", "auto") == 0, said(config)
        assert figures(output) == figures(home / "reference") and weights(output) == weights(home / "reference")
    told("R11", 20 if LONG else 1, "kills on a slow disk: every loss and weight equal")


@pytest.mark.parametrize("technique", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_two_ranks(home, technique):
    """Each writes its part in its thread, one of them slowly; killed, they go on to the bits of a save in the loop."""
    techniques = {"with": {"packing": {}, technique: {}}}
    reference = configuration(home, home / f"{technique}-loop", **techniques)
    assert trained_on(2, reference) == [0, 0], said(reference)
    config, output = behind(home, f"behind-{technique}", **techniques)
    pids = begun_on(2, config, before=together(slow_disk(0.05, rank="1"), held(10, home / "never")))
    wait_for(output, 8)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert [ended(pid) for pid in pids] == [-9, -9]
    assert find_checkpoints(output)
    assert trained_on(2, config, "--resume", "auto", before=slow_disk(0.02, rank="1")) == [0, 0], said(config)
    assert figures(output) == figures(home / f"{technique}-loop")
    assert weights(output) == weights(home / f"{technique}-loop") and leftovers(output) == []
    told("R11", 1, f"killed under {technique}, one of two disks slow")


@pytest.mark.skipif(not LONG, reason="a figure, for `make faults`")
@pytest.mark.parametrize("technique", ["", "ddp", "fsdp"])
def test_the_loop_is_hardly_held_up(home, technique):
    """The loop's wait at a save, as a share of the time that the disk takes for it; less than 5 %."""
    train = {**BEHIND, "steps": 60, "save_every": 20}
    techniques = {"packing": {}, **({technique: {}} if technique else {})}
    config, _ = behind(home, f"figure-{technique}", train=train, **{"with": techniques})
    record = home / f"figure-{technique}.jsonl"

    def before():
        slow_disk(0.25)()
        each_step(lambda n: time.sleep(0.1))()
        save, write = Saver.save, checkpoint._write

        def note(what, step, since):
            line = {"rank": os.environ.get("RANK", "0"), "step": step, what: time.monotonic() - since}
            with record.open("a") as file:
                file.write(json.dumps(line) + "\n")

        def saving(self, step, *rest):
            begin = time.monotonic()
            save(self, step, *rest)
            note("stall", step, begin)

        def writing(snapshot, *rest):
            begin = time.monotonic()
            final = write(snapshot, *rest)
            note("length", snapshot.step, begin)
            return final

        Saver.save, checkpoint._write = saving, writing

    codes = trained_on(2, config, before=before) if technique else [trained(config, before=before)]
    assert set(codes) == {0}, said(config)
    found: dict[tuple[str, int], dict[str, float]] = {}
    for line in map(json.loads, record.read_text().splitlines()):
        found.setdefault((line["rank"], line["step"]), {}).update(line)
    assert len(found) == 3 * len(codes)
    worst = max(save["stall"] / save["length"] for save in found.values())
    assert worst <= 0.05, found
    length = max(save["length"] for save in found.values())
    told("R11", len(found), f"{technique or 'alone'}: held up for {worst:.1%} of a save of {length:.1f} s at most")


def test_told_to_stop_on_a_slow_disk(home):
    """The save under way and the one of the stop are both complete when the run has ended."""
    config, output = behind(home, "stopped", train={**BEHIND, "steps": 400, "keep": 3})
    assert trained(config, before=together(slow_disk(0.1), signalled(5, signal.SIGTERM))) == 143, said(config)
    saved = [verify(path).step for path in find_checkpoints(output)]
    assert saved[0] == figures(output)[-1]["step"] and 3 in saved and leftovers(output) == []


def test_a_failing_disk_is_said_and_the_run_goes_on(home):
    config, output = behind(home, "failing", train={**BEHIND, "eval_every": 3}, data__eval=0.1)

    def before():
        real = files.write_piece

        def fail(file, data):
            if "step-000006" in str(getattr(file, "name", "")):
                raise OSError(28, "No space left on device")
            real(file, data)

        files.write_piece = fail

    assert trained(config, before=before) == 0, said(config)
    failed = [m for m in lines(output) if "save_failed" in m]
    assert [m["step"] for m in failed] == [6] and "No space left" in failed[0]["save_failed"]
    assert verify(find_checkpoints(output)[0]).step == 12 and leftovers(output) == []


def test_another_error_of_the_thread_ends_the_run(home):
    config, output = behind(home, "broken", train={**BEHIND, "steps": 400})

    def before():
        real = checkpoint._table

        def broken(reports):
            if (output / "checkpoints" / "step-000006").exists():
                raise ValueError("no such table")
            return real(reports)

        checkpoint._table = broken

    assert trained(config, before=before) == 1
    text = said(config)
    assert "asked: the checkpoint of step 9\nfound: ValueError: no such table\ndo:    resume from the last" in text
    assert "Traceback" not in text and [p.name for p in find_checkpoints(output)] == ["step-000006", "step-000003"]


def test_given_up(tmp_path, monkeypatch):
    """After the tensor that is being written, no other is; the half save goes at the next start."""
    job = small_job(tmp_path)
    saver = saver_of(job)
    written: list[int] = []
    real: Callable[[Any, Any], None] = files.write_piece

    def give_up(file, data):
        written.append(len(data))
        saver.cancelled.set()
        real(file, data)

    monkeypatch.setattr(files, "write_piece", give_up)
    advance(job, 2)
    saver.save(2, meta(2))
    saver.give_up()
    assert saver.thread is not None and not saver.thread.is_alive()
    assert len(written) == 1 and find_checkpoints(tmp_path) == []


def test_no_host_memory_for_the_copy(home):
    config, output = behind(home, "no-room")

    def before():
        hardware.HostMemory.of = classmethod(lambda cls, ranks: cls(1000))

    assert trained(config, before=before) == 2
    assert "asked: `train.save: async`: 0.0 GiB of host memory to copy the saved tensors" in said(config)
    assert not output.exists()


def test_a_save_that_lasts_longer_than_the_timeout(home):
    """Writing has a limit of its own: no rank waits for another's disk in a collective."""
    train = {**BEHIND, "steps": 2, "save": "sync", "timeout": 2}
    config, output = behind(home, "long", train=train, **{"with": {"packing": {}, "ddp": {}}})

    def before():
        real, slept = files.write_piece, []

        def slow(file, data):
            if "step-000002" in str(getattr(file, "name", "")) and not slept:
                slept.append(time.sleep(3.0))
            real(file, data)

        files.write_piece = slow

    assert trained_on(2, config, before=before) == [0, 0], said(config)
    assert verify(find_checkpoints(output)[0]).step == 2


def test_a_rank_that_never_writes_its_part(monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoint, "exchange", lambda *_: None)
    with pytest.raises(RunError) as error:
        checkpoint.save(small_job(tmp_path), 2, meta(2))
    assert "found: a rank did not finish within 3600 s\ndo:    check the disks" in str(error.value)


def test_the_best_is_known_while_it_is_saved(tmp_path):
    """A loss is compared with that of a save under way; one that failed is forgotten."""
    (tmp_path / "checkpoints").mkdir()
    best = BestCheckpoint(tmp_path)
    assert best.is_best(2, 3.0) and best.protected_step(2) == 2
    assert not best.is_best(4, 3.5) and best.is_best(6, 2.0)
    best.saved(2)
    assert best.best == Best(2, 3.0) and best.protected_step(8) == 2 and best.protected_step(6) == 6
    best.not_saved(6)
    assert best.is_best(8, 2.5) and best.best == Best(2, 3.0)
    best.saved(8)
    assert best.best == Best(8, 2.5)
