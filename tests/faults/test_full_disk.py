"""R6, on a real file system of a few MiB: too small before the start, full before it, full from some step on."""

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from test_best import scalars, shown

from optrush.trainer import trackers

from harness import told
from runs import at_step, configuration, each_step, lines, said, together, trained


@pytest.fixture
def disk(tmp_path, request):
    """A file system of as many MiB as the test's parameter says, else 8."""
    point = tmp_path / "disk"
    point.mkdir()
    size = f"size={getattr(request, 'param', 8)}m"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", point], capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    yield point
    subprocess.run(["umount", "-l", point], check=True)


def fill(disk):
    with suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


def filling(disk, step):
    """A `before` with which the disk is full from a step on, and the end waits less for room."""
    return together(
        lambda: (setattr(trackers, "PATIENCE_S", 0.5), setattr(trackers, "EVERY_S", 0.1)),
        at_step(step, lambda: fill(disk)),
    )


def on(disk, home, name, steps=12):
    """A run whose output lies on the small disk; its configuration does not."""
    return configuration(home, home / name, output=str(disk / "run"), train__steps=steps)


@pytest.mark.parametrize("disk", [3], indirect=True)
def test_too_small(home, disk):
    """Refused before step 0 by the sizes of the checkpoints and of the model; nothing is written."""
    config = on(disk, home, "small")
    assert trained(config) == 2
    for part in ("found: 3.0 MiB free in", "5.1 MiB needed (3 x 1.2 MiB of checkpoints, 0.4 MiB of model/)"):
        assert part in said(config), said(config)
    assert list(disk.iterdir()) == []
    told("R6", 1, "a tmpfs of 3 MiB")


def test_full_before_the_start(home, disk):
    fill(disk)
    config = on(disk, home, "full")
    assert trained(config) == 2
    assert f"found: 0.0 MiB free in {disk}, 5.1 MiB needed" in said(config)
    assert [p.name for p in disk.iterdir()] == ["filler"]


@pytest.mark.parametrize("failing", ["run.yaml", ".lock"])
def test_a_failure_after_the_check(home, disk, failing):
    """As under a quota: the path and the free bytes are named, and the folder that was made is gone."""
    config = on(disk, home, f"quota-{failing}")

    def refuse():
        real, opened = os.rename, os.open

        def rename(old, new):
            if Path(new).name == failing:
                raise OSError(122, "Disk quota exceeded")
            real(old, new)

        def open_(path, *rest):
            if str(path).endswith(failing):
                raise OSError(122, "Disk quota exceeded")
            return opened(path, *rest)

        os.rename = rename  # type: ignore[assignment]
        if failing == ".lock":
            os.open = open_  # type: ignore[assignment]

    assert trained(config, before=refuse) == 2, said(config)
    assert "Disk quota exceeded" in said(config) and "None" not in said(config), said(config)
    assert list(disk.iterdir()) == [], said(config)


def test_full_for_good(home, disk):
    """Training goes on to its end, and does not repeat what it lost; the last good checkpoint is whole, exit code 1."""
    config = on(disk, home, "for-good", steps=20)
    assert trained(config, before=filling(disk, 10)) == 1
    text = said(config)
    assert "Traceback" not in text, text
    assert "step 20/20" in text and "resume from step-000009 with: --resume auto" in text
    # what a failed save took away is free for a moment: a waiting line may find room there, and wait again later
    assert text.count("TensorBoard: ") <= 1 and text.count("tensorboard OSError") <= 3
    assert 1 <= text.count("metrics_wait") <= 3
    (disk / "filler").unlink()
    assert trained(config, "--resume", "auto") == 0, said(config)
    assert scalars(disk / "run") == shown(disk / "run")


def test_nothing_was_ever_saved(home, disk):
    """The error does not promise a checkpoint, and going on says that it begins."""
    config = on(disk, home, "never", steps=4)
    assert trained(config, before=filling(disk, 1)) == 1
    assert "nothing is saved yet; start again" in said(config) and "--resume auto" not in said(config)
    (disk / "filler").unlink()
    assert trained(config, "--resume", "auto") == 0, said(config)
    assert "no checkpoint to resume from: step 1" in said(config)


def test_room_comes_back(home, disk):
    """TensorBoard's file, the metrics and the saves go on where they stopped."""
    config = on(disk, home, "room-back", steps=30)

    def change(n):
        if n == 10:
            fill(disk)
        elif n == 20:
            (disk / "filler").unlink()

    assert trained(config, before=each_step(change)) == 0, said(config)
    output = disk / "run"
    assert [m["step"] for m in lines(output) if "loss" in m] == list(range(1, 31))
    assert [m["step"] for m in lines(output) if "save_failed" in m] == [12, 15, 18]
    assert scalars(output) == shown(output)


def test_the_log_is_on_the_full_disk(home, disk):
    """What is printed is lost there; the training is not."""
    config = on(disk, home, "log", steps=24)
    (disk / "log").touch()
    config.with_suffix(".log").symlink_to(disk / "log")
    done = home / "done"

    def change(n):
        if n == 5:
            fill(disk)
        elif n == 23:
            (disk / "filler").unlink()
            done.touch()

    assert trained(config, before=each_step(change)) == 0
    assert done.exists() and lines(disk / "run")[-1]["step"] == 24
    shutil.copy(disk / "log", home / "log.txt")
    assert "Traceback" not in (home / "log.txt").read_text()
