"""R16 and what stands around a run's folder: one run at a time, no run overwritten, nobody's files deleted."""

import json
import os
import random
import signal

import pytest

from optrush import files
from optrush.errors import ConfigError
from optrush.trainer.run_dir import KNOWN, check_free, lock, prepare_folder, truncate_to_step

from harness import ended, fork, ranks, run, small_job, told, wait_until


def a_run(folder):
    (folder / "checkpoints" / "step-000002").mkdir(parents=True)
    (folder / "model").mkdir()
    for name in ("run.yaml", "metrics.jsonl", "report.html", ".lock", "model/config.json", "checkpoints/step-000002/x"):
        (folder / name).write_text("{}")
    return folder


def found(folder):
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


def test_a_second_run_in_one_folder(tmp_path):
    ready = tmp_path / "ready"

    def hold():
        with lock(tmp_path):
            ready.write_text("")
            signal.pause()

    pid = fork(hold)
    wait_until(ready.exists, "the folder is locked")
    with pytest.raises(ConfigError, match="another run is using it"), lock(tmp_path):
        pass
    os.kill(pid, signal.SIGKILL)
    assert ended(pid) == -9
    with lock(tmp_path):  # a killed run leaves no lock behind
        pass
    told("R16", 1, "second run refused; after kill -9 the folder is free")


def test_ranks_share_one_lock_and_one_refusal(tmp_path):
    def work():
        small_job(tmp_path)
        try:
            with lock(tmp_path):
                return "mine"
        except ConfigError as error:
            return error.found

    assert ranks(2, work) == ["mine"] * 2
    with lock(tmp_path):
        assert ranks(2, work) == ["another run is using it"] * 2


def test_where_a_run_may_begin(tmp_path):
    check_free(tmp_path / "new" / "deep", False, None)
    check_free(tmp_path / "new" / "deep", True, None)
    check_free(tmp_path / "ünï côde" / ("x" * 200), False, None)
    prepare_folder(tmp_path / "ünï côde" / ("x" * 200), False)
    assert not (tmp_path / "new").exists(), "looking writes nothing"
    folder = a_run(tmp_path / "run")
    before = found(folder)
    with pytest.raises(ConfigError) as error:
        check_free(folder, False, None)
    assert "--resume auto" in error.value.do and "train.overwrite" in error.value.do
    check_free(folder, False, "auto")
    check_free(folder, False, folder / "checkpoints" / "step-000002")
    check_free(folder, True, None)
    assert found(folder) == before
    for name in ("run.yaml", "metrics.jsonl", "checkpoints/step-000002"):
        other = tmp_path / name.replace("/", "-")
        (other / name).parent.mkdir(parents=True)
        (other / name).mkdir() if "step" in name else (other / name).write_text("")
        with pytest.raises(ConfigError, match="the folder has a run"):
            check_free(other, False, None)


@pytest.mark.parametrize("resume", [None, "auto"])
@pytest.mark.parametrize(("names", "free"), [
    ((), True), ((".lock",), True), (("lost+found", ".gitkeep"), True), (("tensorboard",), True),
    (("train.log", "mine.yaml", ".nfs0001", "slurm-1.out"), True), (("train.log", "a.py"), False),
    (("thesis.tex",), False), (("first/run.yaml",), False), ((".bashrc",), False), (("run.yaml", "setup.py"), False),
    (("checkpoints/notes", "a.py"), False), (("data.json", "train.jsonl"), False),
])  # fmt: skip
def test_among_other_files(names, free, resume, tmp_path):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    if free:
        check_free(tmp_path, False, resume)
        return
    with pytest.raises(ConfigError, match="is in the folder, and optrush did not write it") as error:
        check_free(tmp_path, False, resume)
    assert error.value.do == "name a separate folder, such as `output: runs/first`"


@pytest.mark.parametrize("output", ["/", ".", "..", "/etc", "../project"])
def test_the_place_of_other_files(output, tmp_path, monkeypatch):
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "setup.py").write_text("")
    monkeypatch.chdir(tmp_path / "project")
    with pytest.raises(ConfigError, match=r"is in the folder|cannot be written"):
        check_free(output, False, None)


def test_a_run_with_other_files_goes_on(tmp_path):
    (a_run(tmp_path / "run") / "notes.txt").write_text("")
    check_free(tmp_path / "run", False, "auto")
    with pytest.raises(ConfigError, match="the folder has a run"):
        check_free(tmp_path / "run", False, None)


def test_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is not a folder"):
        check_free(tmp_path / "file", False, None)
    with pytest.raises(ConfigError, match="is not a folder"):
        check_free(tmp_path / "file" / "deeper", False, None)
    with pytest.raises(ConfigError, match="File name too long"):
        prepare_folder(tmp_path / ("x" * 300), False)
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    tmp_path.chmod(0o755)

    def as_nobody():
        for up in (tmp_path, *tmp_path.parents):
            if not up.stat().st_mode & 0o001 and up.stat().st_uid == os.getuid():
                up.chmod(up.stat().st_mode | 0o055)
        if os.getuid() == 0:  # root may write everywhere
            os.setuid(65534)
        for folder in (closed, closed / "new"):
            with pytest.raises(ConfigError, match="cannot be written to"):
                check_free(folder, False, None)
        with pytest.raises(ConfigError, match="Permission denied"), lock(closed):
            pass

    assert run(as_nobody) == 0


def test_emptying_takes_a_runs_things_only(tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("")
    folder = a_run(tmp_path / "run")
    (folder / "report.html").unlink()
    (folder / "report.html").symlink_to(precious / "thesis.tex")
    (folder / "checkpoints" / "step-000009").symlink_to(precious)
    (folder / "quarantine.jsonl").symlink_to(precious)
    prepare_folder(folder, True)
    assert found(folder) == {".lock"} and found(precious) == {"thesis.tex"}
    prepare_folder(folder, True)  # empty already
    for change in ("foreign", "no run.yaml"):
        folder = a_run(tmp_path / change)
        if change == "foreign":
            (folder / "notes.txt").write_text("")
        else:
            (folder / "run.yaml").unlink()
        before = found(folder)
        for ask in (check_free, lambda *a: prepare_folder(*a[:2])):
            with pytest.raises(ConfigError):
                ask(folder, True, None)
        assert found(folder) == before
    assert {"run.yaml", "metrics.jsonl", "checkpoints", "model", "report.html", "quarantine.jsonl"} <= KNOWN


def test_half_saves_are_removed_at_the_start(tmp_path):
    (tmp_path / "checkpoints" / "step-000002.tmp-0a1b").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-000002.tmp-0a1b" / "rank-0.safetensors").write_text("half")
    (tmp_path / "checkpoints" / "my.tmp-notes").mkdir()
    prepare_folder(tmp_path, False)
    assert found(tmp_path) == {"checkpoints", "checkpoints/my.tmp-notes"}


def test_metrics_are_cut_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert truncate_to_step(path, 3) == 0
    lines = [json.dumps({"step": n, "loss": 1 / n}) + "\n" for n in range(1, 6)]
    evaluated = json.dumps({"step": 2, "eval_loss": 1.0}) + "\n"
    whole = "".join(lines[:2]) + evaluated + "".join(lines[2:])
    path.write_text(whole)
    assert truncate_to_step(path, 5) == 0 and path.read_text() == whole
    assert truncate_to_step(path, 2) == 3 and path.read_text() == "".join(lines[:2]) + evaluated
    assert truncate_to_step(path, 0) == 3 and path.read_text() == ""
    rng = random.Random(0)
    for _ in range(50):  # torn anywhere in its last line
        torn = whole[: len(whole) - rng.randrange(1, len(lines[-1]))]
        path.write_text(torn)
        assert truncate_to_step(path, 9) == 1 and path.read_text() == whole[: -len(lines[-1])]
    path.write_text("\xff[]\n7\n{}\n" + whole, encoding="latin-1")
    assert truncate_to_step(path, 9) == 3 and path.read_text() == whole


def test_metrics_are_whole_whenever_the_cut_is_killed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = "".join(json.dumps({"step": n}) + "\n" for n in range(1, 9))
    for name in ("write_piece", "sync_file", "rename_file"):
        path.write_text(whole)

        def die(*args):
            os.kill(os.getpid(), signal.SIGKILL)

        def work(name=name):
            setattr(files, name, die)
            truncate_to_step(path, 4)

        assert run(work) == -9
        assert path.read_text() == whole
        assert truncate_to_step(path, 4) == 4 and not (tmp_path / "metrics.jsonl.tmp").exists()
