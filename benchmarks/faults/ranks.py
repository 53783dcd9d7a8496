"""Hold a run of two processes to what it must survive: a launcher told to stop, a rank that dies, a rank that stops.

    python benchmarks/faults/ranks.py R7 [--moments 20] [--folder DIR]

Each fault prints one JSON line {"fault", "n", "pass", "figure"}. The runs are those of tests/faults: a random model of
two layers, in processes of their own, started by `--ranks 2` or by torchrun with restarts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "tests/faults")]

from optrush.trainer.checkpoint import find_checkpoints, verify  # noqa: E402

from runs import configuration, figures, weights, write_data, write_model  # noqa: E402

PATH = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
LAUNCHERS = ("--ranks", "torchrun")
TECHNIQUES = ("ddp", "fsdp")
STEPS, SAVE_EVERY = 40, 5
TIMEOUT_S = 5
LIMIT_S = 240.0  # for a whole run: beyond it counts as hung


def start(config: Path, launcher: str, *flags: str, noting: Path | None = None) -> subprocess.Popen[bytes]:
    """Start a run on two ranks in a session of its own; its output goes next to the configuration.

    Args:
        noting: the folder of the script that torchrun starts instead of the module.
    """
    what = ["-m", "optrush"] if noting is None else [str(noting / "noting.py")]
    own = [sys.executable, *what, "train", str(config), "--resume", "auto", *flags]
    if launcher == "--ranks":
        command = [*own, "--ranks", "2"]
    else:
        options = ["--nnodes", "1", "--nproc-per-node", "2", "--max-restarts", "3", "--rdzv-backend", "c10d"]
        options += ["--rdzv-endpoint", "127.0.0.1:0"]
        command = [sys.executable, "-m", "torch.distributed.run", *options, *own[1:]]
    environment = {**os.environ, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"}
    with config.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)


def ranks_of(launcher: int) -> dict[int, int]:
    """Return the process id of each rank that a launcher has started and that is alive."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                status = (entry / "stat").read_text().rpartition(")")[2].split()
                variables = (entry / "environ").read_bytes().split(b"\0")
                if int(status[1]) == launcher and status[0] != "Z":
                    found |= {int(v[5:]): int(entry.name) for v in variables if v.startswith(b"RANK=")}
    return found


def wait_for(check: Callable[[], Any], limit_s: float) -> Any:
    """Return what `check` returns once it is true; None after `limit_s` seconds."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if found := check():
            return found
        time.sleep(0.01)
    return None


def logged(output: Path) -> int:
    """Return the last step in metrics.jsonl; 0 without one."""
    with suppress(OSError, IndexError):
        return int(figures(output, torn=True)[-1]["step"])
    return 0


def finish(process: subprocess.Popen[bytes], limit_s: float = LIMIT_S) -> int | None:
    """Return the exit code of a launcher; None if it hangs, and then end all of its session's processes."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        for pid in [*ranks_of(process.pid).values(), process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        return None


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep so many processes busy next to the block."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def home(folder: Path) -> None:
    """Write the model and the data of all runs."""
    if not (folder / "data.jsonl").exists():
        write_model(folder / "model")
        write_data(folder / "data.jsonl")


def small(folder: Path, output: Path, technique: str, **changes: Any) -> Path:
    """Write the configuration of a run of STEPS steps."""
    train = {"steps": STEPS, "log_every": 1, "save_every": SAVE_EVERY}
    techniques: dict[str, Any] = {"packing": {}, technique: {}} if technique else {"packing": {}}
    return configuration(folder, output, **{"train": train, "with": techniques, **changes})


def a_rank_dies(folder: Path, moments: int) -> dict[str, Any]:
    """R7: kill -9 of either rank at random moments, under either launcher, every other time on a loaded machine."""
    home(folder)
    references = {}
    for technique in TECHNIQUES:
        config = small(folder, folder / f"reference-{technique}", technique)
        assert finish(start(config, "--ranks")) == 0, config.with_suffix(".log").read_text()
        references[technique] = (figures(config.with_suffix("")), weights(config.with_suffix("")))
    rng, passed, slowest, notes = random.Random(7), 0, 0.0, []
    for moment in range(moments):
        launcher, technique = LAUNCHERS[moment % 2], TECHNIQUES[moment // 2 % 2]
        load, victim, after = moment // 4 % 2 * 6, rng.randrange(2), rng.randrange(-4, STEPS - 3)
        output = folder / f"dies-{moment}"
        config = small(folder, output, technique)
        with busy(load):
            process = start(config, launcher)
            if after < 0:  # while it is built
                wait_for(lambda p=process.pid: len(ranks_of(p)) == 2, 60)
                time.sleep(rng.random() * (4 + load))
            else:
                wait_for(lambda at=output, step=after: logged(at) >= step, 120)
                time.sleep(rng.random() * 0.05)
            alive, begin = ranks_of(process.pid), time.monotonic()
            if victim in alive:
                os.kill(alive[victim], signal.SIGKILL)
            code = finish(process)
            slowest = max(slowest, time.monotonic() - begin)
            again = code
            if code == 1 and launcher == "--ranks":
                again = finish(start(config, launcher))
        same = again == 0 and (figures(output), weights(output)) == references[technique]
        passed += same
        note = f"{launcher} {technique} rank {victim} at step {after}, {load} busy: code {code}, then {again}"
        print(
            f"{moment}: {note}, {time.monotonic() - begin:.1f} s, {'equal' if same else 'NOT EQUAL'}",
            file=sys.stderr,
            flush=True,
        )
        notes += [] if same else [note]
    figure = f"all ended or went on, the slowest {slowest:.0f} s after the kill; losses and weights equal to the bit"
    return {"fault": "R7", "n": moments, "pass": passed, "figure": "; ".join(notes) or figure}


def a_rank_stops(folder: Path, moments: int) -> dict[str, Any]:
    """R8: SIGSTOP of either rank at random moments, under either launcher: how long until no rank is left."""
    home(folder)
    rng, passed, slowest, notes = random.Random(8), 0, 0.0, []
    for moment in range(moments):
        launcher, technique = LAUNCHERS[moment % 2], TECHNIQUES[moment // 2 % 2]
        victim, after = moment // 4 % 2, rng.randrange(1, STEPS - 5)
        output = folder / f"stops-{moment}"
        config = small(folder, output, technique)
        process = start(config, launcher, "--set", f"train.timeout={TIMEOUT_S}")
        wait_for(lambda at=output, step=after: logged(at) >= step, 120)
        alive, begin = ranks_of(process.pid), time.monotonic()
        os.kill(alive[victim], signal.SIGSTOP)
        pids = set(alive.values())
        gone = wait_for(lambda p=process.pid, pids=pids: not pids & set(ranks_of(p).values()), 60)
        seconds = time.monotonic() - begin
        code = finish(process)  # torchrun starts the ranks again, and they go on
        text = config.with_suffix(".log").read_text()
        named = f"rank {victim} did not answer" in text and "Traceback" not in text.split("asked: ")[-1]
        held = bool(gone) and seconds <= TIMEOUT_S + 5 and named and code == (1 if launcher == "--ranks" else 0)
        passed += held
        slowest = max(slowest, seconds)
        note = f"{launcher} {technique} rank {victim} at step {after}: {seconds:.1f} s, code {code}, named: {named}"
        print(f"{moment}: {note}", file=sys.stderr, flush=True)
        notes += [] if held else [note]
    figure = f"no rank was left {slowest:.1f} s after the stop, at most, with train.timeout: {TIMEOUT_S}"
    return {"fault": "R8", "n": moments, "pass": passed, "figure": "; ".join(notes) or figure}


# What torchrun starts in the place of `-m optrush`: it notes the exit code, which torchrun keeps to itself.
NOTING = """
import os, runpy
def noted(code):
    with open(os.environ["CODES"], "a") as file:
        file.write(f"{os.environ['RANK']} {code}\\n")
    leave(code)
leave, os._exit = os._exit, noted
code = 0
try:
    runpy.run_module("optrush", run_name="__main__", alter_sys=True)
except SystemExit as leaving:
    code = leaving.code
noted(code)
"""


def torchrun_is_told(folder: Path, moments: int) -> dict[str, Any]:
    """R5: SIGTERM to torchrun: all ranks save the same step and exit with 143, and go on to the same end."""
    home(folder)
    (folder / "noting.py").write_text(NOTING)
    rng, passed, steps, notes = random.Random(5), 0, list[int](), list[str]()
    for moment in range(moments):
        technique, output, codes = TECHNIQUES[moment % 2], folder / f"told-{moment}", folder / f"codes-{moment}"
        config = small(folder, output, technique)
        os.environ["CODES"] = str(codes)
        process = start(config, "torchrun", "--set", f"train.save={('sync', 'async')[moment // 2 % 2]}", noting=folder)
        at = rng.randrange(1, STEPS - 15)
        wait_for(lambda at_least=at, there=output: logged(there) >= at_least, 120)
        process.terminate()
        finish(process)
        found = sorted(codes.read_text().split("\n")[:-1])
        saved = verify(find_checkpoints(output)[0]).step
        whole = logged(output) == saved < STEPS and finish(start(config, "torchrun")) == 0 and logged(output) == STEPS
        held = found == ["0 143", "1 143"] and whole
        passed += held
        steps.append(saved)
        note = f"{technique} told at step {at}, saved {saved}, ranks and codes {found}, went on: {whole}"
        print(f"{moment}: {note}", file=sys.stderr, flush=True)
        notes += [] if held else [note]
    figure = f"SIGTERM to torchrun: all ranks save steps {steps} and exit with 143"
    return {"fault": "R5", "n": moments, "pass": passed, "figure": "; ".join(notes) or figure}


FAULTS = {"R5": torchrun_is_told, "R7": a_rank_dies, "R8": a_rank_stops}


def main() -> None:
    """Run the named fault and print its line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("fault", choices=FAULTS)
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(FAULTS[given.fault](given.folder or Path(folder), given.moments)))


if __name__ == "__main__":
    main()
