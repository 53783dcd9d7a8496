"""R7, R8, R12: ranks that die, stop, hang or run out of memory; data workers that stop; a terminal that closes."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from meshes import further
from optrush.data import sampler
from optrush.errors import RunError
from optrush.launch import NOT_SHARED, process_stat, unjoinable
from optrush.trainer import build, distributed, peers, run, trainer
from optrush.trainer.checkpoint import find_checkpoints, verify

from harness import ended, launch_env, told, wait_until
from runs import (
    at_step,
    begun,
    begun_on,
    command,
    configuration,
    figures,
    fork,
    held,
    said,
    signalled,
    together,
    trained,
    trained_on,
    wait_for,
    weights,
)

TIMEOUT_S = 2  # train.timeout
DDP: dict[str, Any] = {"packing": {}, "ddp": {}}
FSDP: dict[str, Any] = {"packing": {}, "fsdp": {}}


def met():
    """A `before` with which each rank has read a beat of the others when step 4 begins: fast steps lie between two."""

    def known():
        watch = distributed._watch
        return watch is not None and all(text for text, _ in watch.beats.values())

    return at_step(4, lambda: wait_until(known, "the others' beats are read"))


def refusal(config):
    """The three lines of the one error in a run's output."""
    text = said(config)
    assert "Traceback" not in text and text.count("asked: ") == 1, text
    # torch's own warnings in C++ may follow: a forked child has it loaded, and the level of its log is read at import.
    return text[text.index("asked: ") :].splitlines()[:3]


@pytest.mark.parametrize("victim", further([1, 0], 1))
def test_a_rank_that_dies_is_named(home, victim):
    config = configuration(home, home / f"dies-{victim}", **{"with": DDP})
    codes = trained_on(2, config, before=together(met(), signalled(5, signal.SIGKILL, rank=victim)))
    assert codes[1 - victim] == 1 and codes[victim] == -9
    asked, found, do = refusal(config)
    assert re.fullmatch(r"asked: step [45], .*, on 2 ranks", asked)
    assert found.startswith(f"found: rank {victim} ended, and rank {1 - victim} waited for it; rank {victim}, process ")
    assert re.fullmatch(r"do:    resume from step-000003 with: --resume auto", do)


@pytest.mark.parametrize("victim", further([0, 1], 1))
def test_a_stopped_rank_is_named_within_the_timeout(home, victim):
    """All ranks end, the stopped one too, whichever holds the store."""
    config = configuration(home, home / f"stops-{victim}", **{"with": FSDP})
    before = together(met(), signalled(5, signal.SIGSTOP, rank=victim))
    codes = trained_on(2, config, "--set", f"train.timeout={TIMEOUT_S}", before=before)
    assert codes[1 - victim] == 1 and codes[victim] == -9
    asked, found, do = refusal(config)
    assert re.fullmatch(r"asked: step [45], .*, on 2 ranks", asked)
    said_ = f"rank {victim} did not answer rank {1 - victim} for {TIMEOUT_S} s (train.timeout)"
    assert said_ in found and "is stopped" in found
    assert "--resume auto" in do


def test_a_rank_that_hangs_is_named_with_what_it_does(home):
    """Its process is alive, and its beat comes."""
    config = configuration(home, home / "hangs", **{"with": DDP})
    before = together(met(), at_step(5, threading.Event().wait, rank=1))
    first, second = begun_on(2, config, "--set", f"train.timeout={TIMEOUT_S}", before=before)
    assert ended(first) == 1
    os.kill(second, signal.SIGKILL)  # as its launcher would
    ended(second)
    asked, found, _ = refusal(config)
    assert asked == "asked: step 5, the forward and backward passes, on 2 ranks"
    assert f"rank 1 did not answer rank 0 for {TIMEOUT_S} s" in found
    assert "was last seen in step 5, the sum of the targets" in found


def stopped_in(module, name, victim, after=False):
    """A `before` with which one rank stops when it calls a function, or when the function has returned."""

    def before():
        real = getattr(module, name)

        def call(*args, **named):
            stop = os.environ["RANK"] == str(victim)
            if stop and not after:
                os.kill(os.getpid(), signal.SIGSTOP)
            result = real(*args, **named)
            if stop and after:
                os.kill(os.getpid(), signal.SIGSTOP)
            return result

        setattr(module, name, call)

    return before


STARTS = {
    "store": (peers, "_peek", 1, False), "met, the store's": (distributed, "agree_on_prefix", 0, True),
    "met": (distributed, "agree_on_prefix", 1, True), "group": (dist, "init_process_group", 0, True),
    "watch": (distributed, "Watch", 1, False),
}  # fmt: skip


@pytest.mark.parametrize("at", further(list(STARTS), 2))
def test_a_rank_that_stops_at_the_start(home, at):
    """The timeout holds from the first greeting on, whichever rank has the store; the stopped process is ended."""
    module, name, victim, after = STARTS[at]
    config = configuration(home, home / f"start-{at[:4]}-{victim}", **{"with": DDP})
    began = time.monotonic()
    codes = trained_on(2, config, "--set", "train.timeout=2", before=stopped_in(module, name, victim, after))
    assert time.monotonic() - began < 2 + 8  # of the 60 s that a rank gets to import its libraries
    assert codes[1 - victim] == 1 and codes[victim] == -9
    asked, found, do = refusal(config)
    assert asked.startswith("asked: ") and asked.endswith(", on 2 ranks")
    assert found.startswith(f"found: rank {victim} did not answer") and "2 s (train.timeout)" in found
    assert f"; rank {victim}, process " in found and found.endswith(
        "is stopped, last seen in the start, meeting the others"
    )
    assert do in ("do:    restart with: --resume auto", "do:    nothing is saved yet; start again")


def test_ranks_that_have_not_met_are_found_by_their_launcher(monkeypatch):
    """A rank that stops while it imports has left no greeting; other runs' processes are not its."""
    meeting = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    waits = [sys.executable, "-c", "import time; time.sleep(60)"]
    told_ = [{**meeting, "RANK": "2"}, {**meeting, "RANK": "3", "MASTER_PORT": "2"}, {"RANK": "1"}]
    others = [subprocess.Popen(waits, env=env) for env in told_]
    try:
        for name, value in meeting.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(os, "getppid", os.getpid)
        wait_until(lambda: peers._siblings(()), "the rank is found")
        assert {r: beat.pid for r, beat in peers._siblings(()).items()} == {2: others[0].pid}
        others[0].send_signal(signal.SIGSTOP)
        wait_until(lambda: peers._siblings(())[2].state() == "stopped", "it is stopped")
        assert not peers._siblings({2})
    finally:
        for other in others:
            other.kill()
            other.wait()


def test_one_rank_without_a_beat_hides_no_other():
    store = dist.HashStore()
    store.set("beat/1", json.dumps([1, peers.HOST, os.getpid(), process_stat(os.getpid())[1], 0, "the start"]))
    watch = peers.Watch(store, store, 0, 3, 60.0, {2: peers.Beat("b", 7, 8, 0, "the start, meeting the others")})
    try:
        wait_until(lambda: watch.beats[1][0], "the beat of rank 1 is read")
        beat = watch._beat_of(2)
        assert beat is not None and "process 7 on b, was last seen in the start, meeting the others" in beat.place(2)
    finally:
        watch.close()


@pytest.mark.parametrize(
    ("name", "doing"), further([("save", "step 6, saving a checkpoint"), ("evaluate", "step 6, the evaluation")], 1)
)
def test_what_takes_long_is_named_at_once(home, name, doing):
    """A rank that stops as soon as it evaluates or saves was last seen there, not in the update before it."""
    config = configuration(
        home, home / f"doing-{name}", train__eval_every=6, train__save_every=6, data__eval=0.1, **{"with": DDP}
    )
    stop = stopped_in(run.Session, "save", 1) if name == "save" else at_step(6, stopped_in(trainer, "evaluate", 1))
    codes = trained_on(2, config, "--set", "train.timeout=2", before=together(met(), stop))
    assert codes == [1, -9]
    assert refusal(config)[1].endswith(f"is stopped, last seen in {doing}")


def test_a_collective_that_failed_is_explained_once(monkeypatch):
    """What names a missing rank goes up unchanged, and nothing more is asked of a store that may be that rank's."""
    monkeypatch.setattr(peers, "LATE_S", 0.2)
    asked: list[str] = []

    class Stopped:
        def set(self, key: str, value: str) -> None:
            asked.append(key)

    watch = peers.Watch(dist.HashStore(), Stopped(), 1, 2, 60.0)  # type: ignore[arg-type]
    try:
        reason = watch.explain(RuntimeError("NCCL communicator was aborted"))
        assert isinstance(reason, RunError) and "rank 0 did not answer rank 1" in str(reason)
        assert watch.explain(reason) is reason and not asked
    finally:
        watch.close()


def test_a_collective_that_cannot_work_says_why(monkeypatch):
    """All ranks are there and answer: the error of the library is the reason."""
    monkeypatch.setattr(peers, "NAMING_S", 0.2)
    store = dist.HashStore()
    watch = peers.Watch(store, store, 1, 2, 60.0)
    try:
        reason = watch.explain(RuntimeError("NCCL error: invalid usage.\n Duplicate GPU detected"))
        assert "found: rank 1: NCCL error: invalid usage. Duplicate GPU detected" in str(reason)
    finally:
        watch.close()


@pytest.mark.parametrize(
    ("shared", "again", "noted"),
    [({}, "host-b, and here if it ends: ", False), ({"TORCHELASTIC_USE_AGENT_STORE": "True"}, "every host: ", True)],
)
def test_a_rank_of_another_host_is_missing(monkeypatch, shared, again, noted):
    """The error says where torchrun is to be started; a run that no host can join again has said so before."""
    monkeypatch.setattr(peers, "LATE_S", 0.2)
    agent = {"TORCHELASTIC_RUN_ID": "r", "TORCHELASTIC_MAX_RESTARTS": "3", "GROUP_WORLD_SIZE": "2", **shared}
    for name, value in agent.items():
        monkeypatch.setenv(name, value)
    assert unjoinable().endswith(f"and {NOT_SHARED} in its environment") == noted
    store = dist.HashStore()
    store.set("beat/1", json.dumps([1, "host-b pid:[1]", 7, 8, 5, "the update"]))
    watch = peers.Watch(store, store, 0, 2, 60.0)
    try:
        reason = str(watch.explain(RuntimeError("gloo: Connection reset by peer")))
        assert f"do:    restart torchrun on {again}restart with: --resume auto" in reason
    finally:
        watch.close()


def test_restarted_over_the_store_of_those_before(home):
    """torchrun starts its ranks again with the store in which the addresses of the dead ones are."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    assert trained_on(2, configuration(home, home / "ddp", **{"with": DDP})) == [0, 0]
    config = configuration(home, home / "restarted", **{"with": DDP})
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
    for kill in (4, 9, None):
        envs = [{**env, **agent} for env in launch_env(2)]
        before = None if kill is None else signalled(kill, signal.SIGKILL, rank=kill % 2)
        pids = [begun(config, "--resume", "auto", before=before, env=env) for env in envs]
        assert sorted(ended(pid) for pid in pids) == ([0, 0] if kill is None else [-9, 1]), said(config)
    assert figures(config.with_suffix("")) == figures(home / "ddp")
    assert weights(config.with_suffix("")) == weights(home / "ddp")
    told("R7", 2, "restarted over the same store; every loss and weight equal")


def test_ranks_meet_over_old_keys():
    store, names = dist.HashStore(), []
    for _ in range(3):
        found: dict[int, str] = {}
        threads = [
            threading.Thread(target=lambda r=r, found=found: found.update({r: peers.agree_on_prefix(store, r, 3, 30)}))
            for r in (2, 0, 1)
        ]
        for thread in threads:
            thread.start()
            time.sleep(0.05)  # the last comes late, and its key of the start before lies there
        for thread in threads:
            thread.join()
        assert len(found) == 3 and len(set(found.values())) == 1
        names.append(found[0])
    assert len(set(names)) == 3
    with pytest.raises(RunError, match=r"found: ranks 1, 2 did not connect within 0\.2 s"):
        peers.agree_on_prefix(store, 0, 3, 0.2)


@pytest.mark.slow
def test_the_launcher_says_which_signal_ended_a_rank(home):
    config = configuration(home, home / "launched", train__steps=400, train__save_every=5, **{"with": DDP})
    launcher = fork(lambda: command("train", str(config), "--ranks", "2"), {}, config.with_suffix(".log"))
    wait_for(config.with_suffix(""), 6)
    children = [int(p) for p in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]
    (second,) = [p for p in children if b"RANK=1" in Path(f"/proc/{p}/environ").read_bytes().split(b"\0")]
    os.kill(second, signal.SIGKILL)
    assert ended(launcher) == 1
    asked, found, do = refusal(config)
    assert asked == "asked: `--ranks 2`"
    assert found == "found: rank 1 was killed by SIGKILL, as the kernel does when memory runs out"
    assert re.fullmatch(r"do:    resume from step-\d{6} with: --resume auto", do)


@pytest.mark.parametrize("victim", further([0, 1], 1))
def test_out_of_memory_on_one_rank(home, victim):
    """One message, of the rank that it happened on; all ranks end with the same code."""

    def before():
        gradients, at = build.forward_backward, {"n": 0}

        def greedy(job, batches, terms):
            at["n"] += 1
            if at["n"] == 7 and os.environ["RANK"] == str(victim):  # the rehearsal takes two
                raise MemoryError("no memory for 9 GiB")
            return gradients(job, batches, terms)

        build.forward_backward = greedy

    config = configuration(home, home / f"memory-{victim}", **{"with": DDP})
    assert trained_on(2, config, before=before) == [1, 1]
    asked, found, do = refusal(config)
    assert asked == f"asked: micro-batches of 2 rows of 64 tokens, on rank {victim} of 2"
    assert found == "found: out of memory in step 5: no memory for 9 GiB"
    assert do == "do:    resume from step-000003 with: --resume auto --set batch.micro_tokens=64"


def test_a_terminal_that_closes(home):
    """SIGHUP saves, though nothing can be written to the terminal any more; data workers leave it to the trainer."""
    techniques = {"packing": {}, "loader": {"workers": 1}}
    config = configuration(home, home / "hangup", **{"with": techniques})
    ours, theirs = pty.openpty()
    closed = home / "hangup.closed"

    def on_terminal():
        for fd in (1, 2):
            os.dup2(theirs, fd)
        os.close(ours)
        sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1)
        hangup = at_step(7, lambda: os.killpg(0, signal.SIGHUP))  # a step or two are logged before it comes
        together(held(5, closed), hangup)()

    pid = begun(config, before=on_terminal)
    os.close(theirs)
    wait_for(config.with_suffix(""), 4)
    os.close(ours)
    closed.touch()
    assert ended(pid) == 143, said(config)
    saved = verify(find_checkpoints(config.with_suffix(""))[0]).step
    assert saved in (7, 8) and figures(config.with_suffix(""))[-1]["step"] == saved


def test_a_hangup_that_is_ignored(home):
    """As `nohup` sets it."""
    config = configuration(home, home / "nohup")

    def ignore():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signalled(5, signal.SIGHUP)()

    assert trained(config, before=ignore) == 0


@pytest.mark.parametrize("streams", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_stopped_data_worker(home, streams):
    """It is reported, the run goes on with it, and a signal saves the step before the batch that does not come."""
    output = home / f"worker-{streams}"
    techniques = {"packing": {"window": 64}, "loader": {"workers": 1, "prefetch": 1}}
    data = {"path": str(home / "data.jsonl"), "stream": streams}
    config = configuration(home, output, data=data, train__steps=16, **{"with": techniques})
    pid = begun(config, before=together(stopping(4), stopping(10)))
    worker = stopped(config, 4)
    os.kill(worker, signal.SIGCONT)
    assert stopped(config, 10) == worker
    os.kill(pid, signal.SIGTERM)
    assert ended(pid) == 143, said(config)
    assert verify(find_checkpoints(output)[0]).step == figures(output)[-1]["step"] >= 10
    with pytest.raises(FileNotFoundError):
        process_stat(worker)
    assert trained(config, "--resume", "auto") == 0


def stopping(step, rank=None):
    """A `before` with which a run's one data worker is stopped ahead of a step, and reported when its batch is late."""

    def stop():
        ((worker,),) = (items.workers for items in sampler._pools)
        print(f"stopped ahead of step {step}: {worker.pid}", flush=True)
        os.kill(worker.pid, signal.SIGSTOP)

    def before():
        sampler.LATE_S, sampler.REPEAT_S, sampler.GIVING_UP_S = 0.5, 0.5, 0.5
        at_step(step, stop, rank)()

    return before


def stopped(config, step):
    """The data worker that was stopped ahead of a step, once the run has reported it."""

    def reported():
        return re.search(rf"stopped ahead of step {step}: (\d+)\n(?s:.*)\(process \1\) is stopped", said(config))

    wait_until(reported, "the stopped worker is reported")
    found = reported()
    assert found is not None
    return int(found[1])


def test_one_rank_without_a_batch(home):
    """The others stop before the same step."""
    output = home / "starved"
    techniques = {**DDP, "loader": {"workers": 1, "prefetch": 1}}
    config = configuration(home, output, **{"with": techniques})
    pids = begun_on(2, config, before=stopping(4, rank=1))
    stopped(config, 4)
    os.kill(pids[1], signal.SIGTERM)
    assert [ended(pid) for pid in pids] == [143, 143], said(config)
    assert verify(find_checkpoints(output)[0]).step == figures(output)[-1]["step"]
