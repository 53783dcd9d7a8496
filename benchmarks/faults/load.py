"""Measure what large inputs cost: `python benchmarks/faults/load.py [PART ...]`.

Each part is a run or a command in a process of its own; the memory is the largest resident set that the kernel or a
look every fifth of a second saw. Prints one JSON line: {fault, n, pass, figure}.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "faults")]
MIB = 1 << 20
WORDS = [f"w{n}" for n in range(250)]
GROWTH_MIB = 64  # what ten times the rows may add: one bit and eight bytes a row, and the noise of an allocator


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "optrush", *arguments]


def resident(pid: int) -> int:
    """Return the bytes of a process in memory, 0 after its end.

    Without pages of mapped files, of the token cache for example: the kernel drops them where memory is short.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    anonymous = ("RssAnon:", "RssShmem:")
    return sum(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(anonymous))


def watched(arguments: list[str], folder: Path) -> tuple[int, list[tuple[float, int]], str]:
    """Run a command; return its exit code, (seconds, resident bytes) while it ran, and what it printed."""
    with (folder / "out.txt").open("w+") as out:
        begun, seen = time.monotonic(), []
        process = subprocess.Popen(arguments, cwd=folder, stdout=out, stderr=subprocess.STDOUT)
        while process.poll() is None:
            seen.append((time.monotonic() - begun, resident(process.pid)))
            time.sleep(0.2)
        out.seek(0)
        return process.returncode, seen, out.read()


def config(folder: Path, **changes: Any) -> Path:
    """Write the configuration of a tiny run on folder/data.jsonl."""
    tree: dict[str, Any] = {
        "model": str(next(up for up in folder.parents if (up / "model").is_dir()) / "model"),
        "objective": "pretrain",
        "data": {"path": "data.jsonl", "cache": "cache"},
        "batch": {"seq": 64, "tokens": 256, "micro_tokens": 256},
        "optim": {"lr": 1e-3},
        "train": {"steps": 5, "log_every": 1},
        "output": "run",
        "with": {"packing": {}},
    }
    for key, value in changes.items():
        part, _, name = key.rpartition("__")
        (tree[part] if part else tree)[name] = value
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    return folder / "run.yaml"


def rows(path: Path, n: int, words: int) -> None:
    rng = random.Random(0)
    with path.open("w") as file:
        for _ in range(n):
            file.write(json.dumps({"text": " ".join(rng.choices(WORDS, k=words))}) + "\n")


def peaks(folder: Path, *sizes: tuple[int, int]) -> tuple[list[int], list[float]]:
    """Train on data of (rows, words a row) each, in turn; return the peaks of memory in bytes and the seconds."""
    found, seconds = [], []
    for n, words in sizes:
        inside = folder / f"{n}x{words}"
        inside.mkdir()
        rows(inside / "data.jsonl", n, words)
        code, seen, said = watched(command("train", str(config(inside, data__too_long="split"))), inside)
        assert code == 0, said
        found.append(max(size for _, size in seen))
        seconds.append(seen[-1][0])
        (inside / "data.jsonl").unlink()
    return found, seconds


def many_rows(folder: Path) -> tuple[bool, str]:
    (few, many), (_, s) = peaks(folder, (200_000, 6), (2_000_000, 6))
    return many - few <= GROWTH_MIB * MIB, f"2M rows: {(many - few) / MIB:+.0f} MiB beside 200,000, {s:.0f} s"


def large_file(folder: Path) -> tuple[bool, str]:
    (few, many), (_, s) = peaks(folder, (50_000, 440), (500_000, 440))
    return many - few <= GROWTH_MIB * MIB, f"a file of 1 GB: {(many - few) / MIB:+.0f} MiB beside 0.1 GB, {s:.0f} s"


def many_files(folder: Path) -> tuple[bool, str]:
    (folder / "data").mkdir()
    for n in range(10_000):
        (folder / "data" / f"{n:05}.jsonl").write_text(json.dumps({"text": f"w{n % 250} w1 w2"}) + "\n")
    code, seen, said = watched(command("train", str(config(folder, data__path="data"))), folder)
    assert code == 0, said
    return seen[-1][0] < 60, f"10,000 files: {seen[-1][0]:.0f} s, {max(s for _, s in seen) / MIB:.0f} MiB"


def long_row(folder: Path) -> tuple[bool, str]:
    """A row of 50 MB is refused by file and line, as any above 32 MiB."""
    with (folder / "data.jsonl").open("w") as file:
        file.write(json.dumps({"text": "w1 w2"}) + "\n" + json.dumps({"text": "w1 " * (50 * MIB // 3)}) + "\n")
    code, seen, said = watched(command("train", str(config(folder))), folder)
    ok = code == 2 and "data.jsonl:2" in said and "32 MiB" in said and "Traceback" not in said
    return ok, f"a row of 50 MB: refused, exit {code}, {max(s for _, s in seen) / MIB:.0f} MiB"


def many_steps(folder: Path) -> tuple[bool, str]:
    """5,000 steps: the memory from step 500 to the last, without the export and the report that follow."""
    rows(folder / "data.jsonl", 2000, 20)
    arguments, metrics = command("train", str(config(folder, train__steps=5000))), folder / "run" / "metrics.jsonl"
    with (folder / "out.txt").open("w") as out:
        process = subprocess.Popen(arguments, cwd=folder, stdout=out, stderr=subprocess.STDOUT)
    seen: list[tuple[int, int]] = []  # (steps logged, resident bytes)
    while process.poll() is None:
        now = resident(process.pid)
        logged = metrics.read_text().count('"loss"') if metrics.exists() else 0
        seen.append((logged, now))
        time.sleep(0.3)
    assert process.returncode == 0, (folder / "out.txt").read_text()
    first = max(size for n, size in seen if n <= 500)
    last = max(size for n, size in seen if 500 < n < 5000)
    growth = last / first - 1
    return growth <= 0.02, f"5,000 steps: {growth:+.1%} of {first / MIB:.0f} MiB from step 500 on"


def long_report(folder: Path) -> tuple[bool, str]:
    """The page of 20,000 logged steps, made from the lines of a run of 20 steps, repeated."""
    rows(folder / "data.jsonl", 2000, 20)
    code, _, said = watched(command("train", str(config(folder, train__steps=20))), folder)
    assert code == 0, said
    metrics = folder / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    one = next(m for m in lines if m.get("step") == 10 and "loss" in m)
    head, tail = [m for m in lines if m.get("step", 0) <= 10], [m for m in lines if m.get("step", 0) > 10]
    rng = random.Random(0)
    body = [{**one, "step": n, "loss": 9 - n / 3000 + rng.random()} for n in range(11, 19_990)]
    tail = [{**m, "step": m["step"] + 19_980} if "step" in m else m for m in tail]
    metrics.write_text("".join(json.dumps(m) + "\n" for m in (*head, *body, *tail)))
    script = "import sys, time; from pathlib import Path; from optrush.report.bench import write_run as w"
    timed = f"{script}; b = time.monotonic(); w(Path('run')); print(time.monotonic() - b)"
    done = subprocess.run([sys.executable, "-c", timed], cwd=folder, capture_output=True, text=True, check=True)
    size = (folder / "run" / "report.html").stat().st_size
    s = float(done.stdout)
    return size <= 2 * MIB and s <= 2, f"a report of 20,000 steps: {size / MIB:.2f} MiB in {s:.1f} s"


def many_checkpoints(folder: Path) -> tuple[bool, str]:
    """200 checkpoints: how long going on from the last of them takes to its first step."""
    rows(folder / "data.jsonl", 2000, 20)
    run = config(folder, train__steps=200, train__save_every=1, train__keep=200)
    code, _, said = watched(command("train", str(run)), folder)
    assert code == 0, said
    kept = len(list((folder / "run" / "checkpoints").glob("step-*")))
    more = ("--resume", "auto", "--set", "train.steps=201")
    code, seen, said = watched(command("train", str(run), *more), folder)
    assert code == 0, said
    return kept == 200 and seen[-1][0] < 60, f"{kept} checkpoints: gone on and ended in {seen[-1][0]:.0f} s"


PARTS: dict[str, Callable[[Path], tuple[bool, str]]] = {
    "rows": many_rows, "file": large_file, "files": many_files, "row": long_row,
    "steps": many_steps, "report": long_report, "checkpoints": many_checkpoints,
}  # fmt: skip


def main() -> None:
    from runs import write_model

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="*", choices=[[], *PARTS], help="all, if none is named")
    asked = parser.parse_args().part or list(PARTS)
    passed, figures = 0, []
    with tempfile.TemporaryDirectory() as box:
        write_model(Path(box) / "model")
        for name in asked:
            (folder := Path(box) / name).mkdir()
            try:
                ok, figure = PARTS[name](folder)
            except (AssertionError, subprocess.CalledProcessError) as error:
                ok, figure = False, f"{name}: {str(error).strip().splitlines()[-1] if str(error).strip() else error!r}"
            print(f"{'held' if ok else 'NOT HELD'}: {figure}", file=sys.stderr, flush=True)
            passed += ok
            figures.append(figure)
    print(json.dumps({"fault": "load", "n": len(asked), "pass": passed, "figure": "; ".join(figures)}))


if __name__ == "__main__":
    main()
