"""R1, R5, R6, R9: runs that are killed, told to stop, short of disk, or gone on with on other ranks."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from meshes import further
from optrush.trainer.checkpoint import find_checkpoints, verify

from harness import LONG, ended, told
from runs import (
    at_step,
    begun,
    begun_on,
    configuration,
    each_step,
    figures,
    held,
    lines,
    recording,
    said,
    signalled,
    together,
    trained,
    trained_on,
    wait_for,
    weights,
)

SAVE_EVERY, STEPS = 3, 12
TECHNIQUES = ({"packing": {}}, {"packing": {}, "ddp": {}}, {"packing": {}, "fsdp": {}})
ALONE, DDP, FSDP = TECHNIQUES


def samples(path):
    found: dict[int, Counter[int]] = {}
    for line in path.read_text().splitlines():
        n, taken = json.loads(line)
        found.setdefault(n, Counter()).update(taken)
    return found


def exported(output):
    return (output / "model" / "model.safetensors").read_bytes()


def test_killed_at_random_moments(home):
    """R1: kill -9, in some runs twice, and the same command again; what it leaves is what the untouched run left."""
    reached = []
    moments = random.Random(0).choices(range(STEPS), k=30) if LONG else (0, 6)
    for seed, first in enumerate(moments):
        rng = random.Random(seed)
        output = home / f"killed-{seed}"
        workers = {"loader": {"workers": 2}} if LONG and seed % 2 else {}
        config = configuration(home, output, **{"with": ALONE | workers})
        for logged in [first, rng.randrange(STEPS)][: 1 + (seed % 3 == 0)]:
            pid = begun(config, "--resume", "auto", before=held(logged + 2, home / "never"))
            if logged:  # else: while it is being assembled
                wait_for(output, logged)
            time.sleep(rng.random() * 0.1)
            os.kill(pid, signal.SIGKILL)
            code = ended(pid)
            assert code == -9 or (code == 0 and logged + 2 > STEPS), said(config)
            done = figures(output, torn=True)[-1]["step"] if (output / "metrics.jsonl").exists() else 0
            saved = verify(find_checkpoints(output)[0]).step if find_checkpoints(output) else 0
            assert done - saved <= SAVE_EVERY
            reached.append(done)
        assert trained(config, "--resume", "auto") == 0, said(config)
        assert figures(output) == figures(home / "reference")
        assert weights(output) == weights(home / "reference")
        assert exported(output) == exported(home / "reference")
    assert len(set(reached)) > (5 if LONG else 1), "the kills should fall on different steps"
    told("R1", len(moments), f"{len(reached)} kills, after steps 0 to {max(reached)}: every loss and weight equal")


EVEN = """
def even(answer, *others):
    return sum(word[1:].isdigit() and int(word[1:]) % 2 == 0 for word in answer.split()) / 8
"""


def test_killed_while_answers_are_sampled(home):
    """R1 where a step samples its rows: the same answers, losses and weights as of the run that nothing happened to."""
    (home / "even.py").write_text(EVEN)
    rows = [{"prompt": f"w{i} w{i + 1}", "completion": f" w{i + 2}"} for i in range(40)]
    (home / "sums.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    given = {
        "objective": "grpo", "data": {"path": str(home / "sums.jsonl")}, "batch": {"seq": 64},
        "grpo": {"rewards": [f"{home / 'even.py'}:even"], "prompts": 3, "group": 4, "max_new": 8, "truncated": "keep"},
    }  # fmt: skip
    reference = configuration(home, home / "sampled", **given)
    assert trained(reference) == 0, said(reference)
    answers = (home / "sampled" / "answers.jsonl").read_bytes()
    for first in random.Random(1).choices(range(STEPS), k=12) if LONG else (6,):
        output = home / f"sampled-{first}"
        config = configuration(home, output, **given)
        pid = begun(config, before=held(first + 2, home / "never"))
        wait_for(output, first or 1)
        os.kill(pid, signal.SIGKILL)
        assert ended(pid) in (-9, 0), said(config)
        assert trained(config, "--resume", "auto") == 0, said(config)
        assert figures(output) == figures(home / "sampled") and any(f["loss"] for f in figures(output))
        assert weights(output) == weights(home / "sampled")
        assert (output / "answers.jsonl").read_bytes() == answers


@pytest.mark.slow
def test_killed_on_two_ranks(home):
    """R1 on two ranks: the whole group killed, restarted with the same command."""
    config = configuration(home, home / "fsdp", **{"with": FSDP})
    assert trained_on(2, config) == [0, 0], said(config)
    kills = 2 if LONG else 1
    for seed in range(kills):
        rng = random.Random(seed)
        output = home / f"killed-fsdp-{seed}"
        config = configuration(home, output, **{"with": FSDP})
        pids = begun_on(2, config, "--resume", "auto", before=held(STEPS, home / "never"))
        wait_for(output, rng.randrange(2, STEPS))
        time.sleep(rng.random() * 0.1)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert [ended(pid) for pid in pids] == [-9, -9]
        assert trained_on(2, config, "--resume", "auto") == [0, 0], said(config)
        assert figures(output) == figures(home / "fsdp")
        assert weights(output) == weights(home / "fsdp")
    told("R1", kills, "two ranks under fsdp")


@pytest.mark.parametrize("number", further([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], 1))
def test_told_to_stop(home, number):
    """R5: saves after the step under way, or the next; exit 143; says how to go on, and goes on to the same end."""
    output = home / f"stopped-{number.name}"
    config = configuration(home, output)
    assert trained(config, before=signalled(5, number)) == 143, said(config)
    saved = verify(find_checkpoints(output)[0]).step
    assert saved in (5, 6) and figures(output)[-1]["step"] == saved
    assert "--resume auto" in said(config)
    assert trained(config, "--resume", "auto") == 0
    assert figures(output) == figures(home / "reference") and weights(output) == weights(home / "reference")
    told("R5", 1, f"{number.name} after step 4, saved step {saved}")


def test_one_rank_told_to_stop(home):
    """R5: one rank hears it, all save the same step."""
    output = home / "stopped-one"
    config = configuration(home, output, **{"with": DDP})
    before = together(recording(home / "one.samples"), signalled(5, signal.SIGTERM, rank=1))
    assert trained_on(2, config, before=before) == [143, 143], said(config)
    assert verify(find_checkpoints(output)[0]).step in (5, 6) and set(samples(home / "one.samples")) <= set(range(1, 7))
    assert trained_on(2, config, "--resume", "auto") == [0, 0]
    told("R5", 1, "SIGTERM to one rank of two")


def test_told_twice(home):
    """R5: the second Ctrl-C does not wait for the step; nothing that was saved suffers."""
    output = home / "twice"
    config = configuration(home, output)
    on = home / "twice.on"
    before = together(signalled(4, signal.SIGINT), signalled(4, signal.SIGINT), at_step(4, on.touch))
    assert trained(config, before=before) == 130, said(config)
    assert not on.exists() and figures(output)[-1]["step"] == 3
    assert verify(find_checkpoints(output)[0]).step == 3
    assert trained(config, "--resume", "auto") == 0
    assert figures(output) == figures(home / "reference")


@pytest.fixture
def little_disk(tmp_path):
    """A file system of 8 MiB."""
    point = tmp_path / "disk"
    point.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", point], capture_output=True)
    if mount.returncode:
        pytest.skip("this user may not mount a file system")
    yield point
    subprocess.run(["umount", "-l", point], check=True)


def test_a_really_full_disk(home, little_disk):
    """R6, real: nothing is left from step 5 on, not even for the metrics; the space is back at step 8."""
    output = little_disk / "run"
    config = configuration(home, output, train__keep=1)
    config = Path(shutil.move(config, home / "full-really.yaml"))  # what it prints goes to another disk, as it would

    def fill(n):
        filler = little_disk / "filler"
        if n == 5:
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        elif n == 8:
            filler.unlink()

    assert trained(config, before=each_step(fill)) == 0, said(config)
    failed = [m for m in lines(output) if "save_failed" in m]
    assert [m["step"] for m in failed] == [6] and "No space left" in failed[0]["save_failed"]
    assert [p.name for p in find_checkpoints(output)] == ["step-000012"]
    assert figures(output) == figures(home / "reference") and weights(output) == weights(home / "reference")
    told("R6", 1, "a tmpfs of 8 MiB, full from step 5 to 7")


def test_a_quota(home):
    """R6: from step 5 to 7 no file may grow by more than 100 bytes; a line that was half written is written again."""
    output = home / "quota"
    config = configuration(home, output)

    def limit(n):
        most = resource.RLIM_INFINITY
        if 5 <= n < 8:
            most = (output / "metrics.jsonl").stat().st_size + 100
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

    assert trained(config, before=each_step(limit)) == 0, said(config)
    assert [m["step"] for m in lines(output) if "save_failed" in m] == [6] and "File too large" in said(config)
    assert [p.name for p in find_checkpoints(output)] == ["step-000012", "step-000009"]
    assert not [p for p in (output / "checkpoints").iterdir() if ".tmp-" in p.name]
    assert figures(output) == figures(home / "reference") and weights(output) == weights(home / "reference")


def test_on_other_ranks(home):
    """R9: 2 (fsdp) -> 1 -> 2 (ddp), and in the long form -> 4 (fsdp) -> 1.

    The same samples at each step, the same losses to 1e-6.
    """
    output = home / "ranks"
    record = home / "ranks.samples"
    stops = [(2, FSDP, 3), (1, ALONE, 6), (2, DDP, STEPS)]
    if LONG:
        stops = [(2, FSDP, 2), (1, ALONE, 4), (2, DDP, 6), (4, FSDP, 8), (1, ALONE, STEPS)]
    at = []
    for n, techniques, until in stops:
        config = configuration(home, output, **{"with": techniques})
        before = recording(record)
        if until < STEPS:
            before = together(before, signalled(until, signal.SIGTERM))
        flags = ("--resume", "auto")
        codes = trained_on(n, config, *flags, before=before) if n > 1 else [trained(config, *flags, before=before)]
        assert set(codes) == {143 if until < STEPS else 0}, said(config)
        at.append(verify(find_checkpoints(output)[0]).step)
    reference = figures(home / "reference")
    worst = max(abs(a["loss"] - b["loss"]) for a, b in zip(figures(output), reference, strict=True))
    assert worst <= 1e-6
    exact = ("step", "tokens", "target_tokens", "lr")
    assert [[m[k] for k in exact] for m in figures(output)] == [[m[k] for k in exact] for m in reference]
    assert samples(record) == samples(home / "reference.samples")
    told("R9", len(stops), f"changed ranks after steps {at[:-1]}; losses differ by {worst:.1e} at most")
