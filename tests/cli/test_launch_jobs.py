"""Job files: the Slurm script run with stand-ins for srun and scontrol; the others read; what is refused."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from optrush.launch import NOT_SHARED, _wait

from clirun import metrics

CONFIG = """\
  # a first line that is further in than the others
model: tiny
objective: pretrain
data: {random: 64}
batch: {seq: 32, tokens: 128, micro_tokens: 64}
train: {steps: 12, log_every: 1}
with: {ddp: {}}
output: Run_1
"""
# Starts the tasks of one host as srun does, sends USR1 once in the first job, and returns the largest exit code.
SRUN = f"""#!{sys.executable}
import os, pathlib, signal, subprocess, sys, time
tasks = [subprocess.Popen(sys.argv[1:], env={{**os.environ, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i),
         "SLURM_NTASKS": "2"}}) for i in range(2)]
log = pathlib.Path("Run_1/metrics.jsonl")
if not pathlib.Path("again").exists():
    while "step" not in (log.read_text() if log.exists() else ""):
        time.sleep(0.05)
    for task in tasks:
        task.send_signal(signal.SIGUSR1)
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = "#!/bin/bash\nif [ $1 = requeue ]; then echo $2 > again; else echo 127.0.0.1; fi\n"


@pytest.fixture
def launch(write, call):
    """`optrush launch` of a small run on two ranks."""
    write(CONFIG)
    return lambda *flags: call("launch", "run.yaml", *flags)


@pytest.mark.slow
def test_a_slurm_job_saves_before_its_end_and_goes_on(launch, tmp_path):
    done = launch("--slurm", "--hardware", "2xh100", "--set", "train.steps=40", "--time", "1:00:00")
    assert done == (0, "sbatch job.slurm\n", "")
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "here", "OMP_NUM_THREADS": "1"}

    def submit():
        return subprocess.run(["bash", "job.slurm"], env=env, capture_output=True, timeout=120, check=False).returncode

    assert submit() == 143
    assert (tmp_path / "again").read_text() == "7\n"
    assert submit() == 0
    steps = [row["step"] for row in metrics(tmp_path / "Run_1") if "loss" in row]
    assert max(steps) == 40 and len(steps) == len(set(steps)), steps


def test_a_slurm_job_is_sent_a_signal_and_queued_again(launch):
    assert launch("--slurm", "--hardware", "2xh100", "--time", "1:00:00").code == 0
    script = Path("job.slurm").read_text()
    assert "USR1" in script and "scontrol requeue" in script and "--time=1:00:00" in script
    assert subprocess.run(["bash", "-n", "job.slurm"], check=False).returncode == 0


def test_a_kubernetes_job_carries_the_configuration(launch):
    flags = ("--hardware", "2x8xh100:infiniband", "--image", "a/b:1", "--volume", "shared")
    changes = ("--set", "batch.tokens=1024", "--setup", "ulimit -l unlimited")
    assert launch("--kubernetes", *flags, *changes).code == 0
    carried, service, job = yaml.safe_load_all(Path("job.yaml").read_text())
    assert carried["data"]["run.yaml"] == CONFIG
    assert service["spec"]["selector"]["job-name"] == job["metadata"]["name"] == "run-1"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    spec = job["spec"]["template"]["spec"]
    script = spec["containers"][0]["args"][0]
    assert script.startswith("ulimit -l unlimited\n") and "\nexec torchrun --nnodes 2 --nproc-per-node 8 " in script
    assert f"\nexport {NOT_SHARED}\n" in script  # it runs on two hosts in tests/faults/test_hosts.py
    assert "-m optrush train /config/run.yaml --set batch.tokens=1024 --resume auto" in script
    assert subprocess.run(["bash", "-n", "-c", script], check=False).returncode == 0


@pytest.mark.parametrize(("hardware", "hosts", "run"), [
    ("1xh100", "1", "exec python3 -m optrush train run.yaml --without ddp --resume auto\n"),
    ("8xa100-80", "1", "exec python3 -m optrush train run.yaml --set batch.tokens=1024 --resume auto --ranks 8\n"),
    ("2x8xh100:ethernet", "2", f"export {NOT_SHARED}"),
])  # fmt: skip
def test_a_skypilot_task(launch, hardware, hosts, run):
    change = ("--without", "ddp") if hardware == "1xh100" else ("--set", "batch.tokens=1024")
    task = yaml.safe_load(launch("--skypilot", "--hardware", hardware, *change, "--out", "-").out)
    assert run in task["run"] and task["num_nodes"] == int(hosts)
    assert task["resources"]["accelerators"] == {"1xh100": "H100:1", "2x8xh100:ethernet": "H100:8"}.get(
        hardware, "A100-80GB:8"
    )


@pytest.mark.parametrize(("flags", "found"), [
    ((), "no scheduler"), (("--slurm", "--skypilot"), "--slurm and --skypilot"),
    (("--slurm", "--image", "x"), "--image x"), (("--kubernetes", "--volume", "v"), "no --image"),
    (("--kubernetes", "--image", "x"), "no --volume"), (("--slurm", "--time", "soon"), "not a time of Slurm"),
    (("--slurm", "--partition", "a b\n#SBATCH"), "characters"), (("--slurm", "--setup", "a\nb"), "several lines"),
    (("--slurm", "--hardware", "cpu"), "no GPU"), (("--slurm", "--hardware", "2xh100", "--without", "ddp"), "ddp"),
    (("--slurm", "--hardware", "2xh100", "--set", "model={shape: llama-3.1-70b}"), "GiB"),
])  # fmt: skip
def test_what_cannot_be_launched(launch, flags, found):
    done = launch(*flags)
    assert done.code == 2 and found in done.err and len(done.err.splitlines()) == 3, done.err
    assert not Path("job.slurm").exists()


@pytest.mark.parametrize(
    ("folder", "name"), [("runs/2024", "run-2024"), ("runs/on", "run-on"), ("runs/1e3.b", "run-1e3-b"), ("a b", "a-b")]
)
def test_names_are_text_that_begins_with_a_letter(launch, folder, name):
    flags = ("--hardware", "2xh100", "--volume", "7", "--set", f"output={folder}", "--out", "-")
    _, service, job = yaml.safe_load_all(launch("--kubernetes", "--image", "x", *flags).out)
    claim = job["spec"]["template"]["spec"]["volumes"][1]["persistentVolumeClaim"]["claimName"]
    assert (service["metadata"]["name"], claim) == (name, "7")
    task = yaml.safe_load(launch("--skypilot", *flags).out)
    assert (task["name"], task["volumes"]["/data"]) == (name, "7")


def test_a_file_is_not_overwritten(launch):
    Path("job.slurm").write_text("mine")
    assert "it exists" in launch("--slurm", "--hardware", "2xh100").err
    assert Path("job.slurm").read_text() == "mine"


@pytest.mark.parametrize(("grace_s", "stopped"), [(0.2, False), (60.0, True)], ids=["late", "stopped"])
def test_what_remains_after_a_failure_is_killed(monkeypatch, grace_s, stopped):
    """A rank that runs on, after some seconds; one that was stopped, at once."""
    monkeypatch.setattr("optrush.launch.FAILED_GRACE_S", grace_s)
    processes = [subprocess.Popen(["sleep", "30"]), subprocess.Popen(["false"])]
    if stopped:
        processes[0].send_signal(signal.SIGSTOP)
    began = time.monotonic()
    assert _wait(processes) is None, "the failed rank was not killed by a signal"
    assert [p.returncode for p in processes] == [-signal.SIGKILL, 1] and time.monotonic() - began < 20
