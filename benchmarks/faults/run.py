"""Run the faults that optrush is made to survive, and print one JSON line each: `make faults`.

A fault is tests of tests/faults, in their long form (OPTRUSH_FAULTS=long), programs beside this one, or both, each in a
process of its own. `--write` keeps the lines in benchmarks/results/faults.jsonl, the source of docs/reliability.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks" / "results" / "faults.jsonl"
FAULTS, HERE = "tests/faults", "benchmarks/faults"
LIMIT_S = 1800
# Fault: (what happens, the tests that try it, and the programs with their arguments).
TRIED: dict[str, tuple[str, tuple[str, ...]]] = {
    "R1": ("kill -9 at random moments, then the same command again", (
        f"{FAULTS}/test_kill.py::test_killed_at_random_moments", f"{FAULTS}/test_kill.py::test_killed_on_two_ranks",
    )),
    "R2": ("kill -9 at every write of a save", (f"{FAULTS}/test_checkpoint.py::test_killed_at_every_call_of_a_save",)),
    "R3": ("damaged bytes of a checkpoint", (
        f"{FAULTS}/test_checkpoint.py::test_damage_is_found_named_and_passed_over",
        f"{FAULTS}/test_refusals.py::test_a_damaged_newest_one_is_passed_over_aloud",
    )),
    "R4": ("no checkpoint is intact", (
        f"{FAULTS}/test_checkpoint.py::test_no_intact_one_never_starts_afresh",
        f"{FAULTS}/test_refusals.py::test_no_intact_one",
    )),
    "R5": ("SIGTERM, SIGINT, SIGUSR1, SIGHUP, Ctrl-C twice; to one rank of two, to torchrun", (
        f"{FAULTS}/test_kill.py::test_told_to_stop", f"{FAULTS}/test_kill.py::test_one_rank_told_to_stop",
        f"{FAULTS}/test_kill.py::test_told_twice", f"{FAULTS}/test_rank_faults.py::test_a_terminal_that_closes",
        f"{HERE}/ranks.py R5 --moments 4",
    )),
    "R6": ("a full disk", (
        f"{FAULTS}/test_checkpoint.py::test_disk_full_at_every_write", f"{FAULTS}/test_kill.py::test_a_quota",
        f"{FAULTS}/test_kill.py::test_a_really_full_disk",
    )),
    "R7": ("kill -9 of one rank of two", (f"{HERE}/ranks.py R7",)),
    "R8": ("a rank that hangs", (f"{HERE}/ranks.py R8",)),
    "R9": ("going on with other numbers of ranks, in another mesh", (
        f"{FAULTS}/test_kill.py::test_on_other_ranks",
        f"{FAULTS}/test_resharding.py::test_any_cutting_loads_into_any_other",
        "tests/techniques/test_mesh.py::test_any_mesh_goes_on_in_any_other",
    )),
    "R10": ("losses and gradients that are not finite", (f"{FAULTS}/test_bad_updates.py",)),
    "R11": ("saving in the background: kill -9 at every write, a slow disk, a failing one", (
        f"{FAULTS}/test_saving_behind.py",
    )),
    "R12": ("out of memory on one rank of two", (f"{FAULTS}/test_rank_faults.py::test_out_of_memory_on_one_rank",)),
    "R13": ("a worker that reads data is killed, stopped, or raises", (
        "tests/unit/test_stream.py::test_a_killed_worker_is_an_error_at_once",
        "tests/unit/test_stream.py::test_any_index_any_ranks_any_workers", f"{FAULTS}/test_tokenising.py",
        f"{FAULTS}/test_rank_faults.py::test_a_stopped_data_worker",
        f"{FAULTS}/test_rank_faults.py::test_one_rank_without_a_batch",
    )),
    "R14": ("bad rows: first, in the middle, last", (f"{FAULTS}/test_bad_rows.py",)),
    "R15": ("another model, tokenizer, template or data at resume", (
        f"{FAULTS}/test_refusals.py::test_another_model_or_data_at_resume",
        f"{FAULTS}/test_resharding.py::test_fingerprints",
    )),
    "R16": ("two runs in one folder, folders nobody can write to, long and odd names", (
        f"{FAULTS}/test_refusals.py::test_two_runs_in_one_folder",
        f"{FAULTS}/test_refusals.py::test_where_nothing_can_be_written", f"{FAULTS}/test_runfolder.py",
    )),
    "R17": ("many steps of sharded ranks: losses, and memory", (
        "tests/techniques/test_mesh.py::test_many_steps_are_those_of_ddp_and_leak_nothing",
    )),
    "R18": ("two hosts: one lost, the cable slow or cut", (f"{FAULTS}/test_hosts.py",)),
    "load": ("2M rows, a file of 1 GB, 10,000 files, 5,000 steps, 20,000 logged steps, 200 checkpoints", (
        f"{HERE}/load.py",
    )),
    "security": ("hostile configurations, models, templates and rows", (f"{HERE}/security.py",)),
    "fuzz": ("random input to each reader", (f"{HERE}/fuzz.py",)),
}  # fmt: skip


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[line.index('{"fault"') :]) for line in text.splitlines() if '{"fault"' in line]


def tried(fault: str) -> dict[str, Any]:
    """Try a fault; return its line: what was tried how often (n, or the number of tests), and how often it held."""
    what = TRIED[fault][1]
    tests = [one for one in what if not one.startswith(HERE)]
    pytest = ["-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "--tb=short", *tests]
    programs = [shlex.split(one) for one in what if one.startswith(HERE)]
    env = {**os.environ, "OPTRUSH_FAULTS": "long", "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    begun, said, code = time.monotonic(), "", 0
    for arguments in ([pytest] if tests else []) + programs:
        try:
            done = subprocess.run(
                [sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S
            )
            said, code = said + done.stdout, code or done.returncode
        except subprocess.TimeoutExpired as over:
            said, code = said + (over.stdout or b"").decode(), -1
    found = lines(said)
    if code:
        print(said[-4000:], file=sys.stderr)
    passed, n = sum(one["pass"] for one in found), sum(one["n"] for one in found)
    n += bool(tests) and code != 0  # a test that fails prints no line
    if not found:
        n, passed = (1, 0) if code else (len(what), len(what))
    figure = "; ".join(dict.fromkeys(str(one["figure"]) for one in found)) or "as asked"
    return {"fault": fault, "n": n, "pass": passed, "figure": figure, "seconds": round(time.monotonic() - begun)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fault", nargs="*", choices=[[], *TRIED], help="all, if none is named")
    parser.add_argument("--write", action="store_true", help="keep the lines in benchmarks/results/faults.jsonl")
    options = parser.parse_args()
    held = True
    for fault in options.fault or TRIED:
        line = tried(fault)
        print(json.dumps(line), flush=True)
        held &= line["pass"] == line["n"]
        if options.write:
            kept = {one["fault"]: one for one in lines(RECORD.read_text())} if RECORD.exists() else {}
            kept[fault] = line
            RECORD.write_text("".join(json.dumps(kept[name]) + "\n" for name in TRIED if name in kept))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
