"""Cleaning at a million rows: how many of the planted faults are found, how many good rows go, seconds and memory.

usage: cleaning.py [--rows N] [--seed S] [--folder DIR]   prints one JSON line, a record

Makes N recipes (structured rows of about 600 characters) of which 2 % each have one fault: too short, too long, too
few or too many ingredients, an ingredient that no other row has, the text of an earlier row exactly (spaces and line
ends aside), the text of an earlier row with 1 to 3 words changed. Then `optrush data clean` runs on them as a user
would start it. A fault is found if the filter meant for it took the row. Memory is the resident set of the command and
all its processes together, sampled ten times a second; pages that they share are counted in each.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from recipes import AROMAS, DISHES, FATS, FINISHES, JOKES, LIQUIDS, MAINS, MOODS, SPICES, VEGETABLES

FAULTS = {  # and the filter that is to find each
    "short": "chars", "long": "chars", "few": "items[0].bounds", "many": "items[0].bounds",
    "rare": "items[0].rarest", "exact": "exact_duplicates", "near": "near_duplicates",
}  # fmt: skip
SHARE = 0.02  # of the rows, of each fault
SETTINGS = (
    "chars=[250,2500]",
    "items=[{field: ingredients, bounds: [4,24], rarest: 5}]",
    "exact_duplicates=true",
    "near_duplicates=0.6",
)
FOODS = (*MAINS, *VEGETABLES, *AROMAS, *LIQUIDS, *FATS)
SYLLABLES = ("ba", "dri", "fo", "gu", "ke", "lo", "mi", "nar", "pel", "qua", "ro", "sti", "tu", "vem", "wox", "zil")
EARLIER = 50_000  # rows that a duplicate is drawn from


def recipes(n: int, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """n rows, each with its fault or `good`."""
    random = Random(f"cleaning {seed}")
    earlier: list[dict[str, Any]] = []
    for i in range(n):
        fault = random.choices(("good", *FAULTS), (1 - SHARE * len(FAULTS), *[SHARE] * len(FAULTS)))[0]
        if fault in ("exact", "near") and earlier:
            row = dict(random.choice(earlier))
            row["text"] = (_spaced if fault == "exact" else _changed)(random, row["text"])
        else:
            fault = "good" if fault in ("exact", "near") else fault
            row = _recipe(random, fault)
            if fault == "good":  # a sample of all good rows so far
                if len(earlier) < EARLIER:
                    earlier.append(row)
                elif (at := random.randrange(i)) < EARLIER:
                    earlier[at] = row
        yield fault, {"id": i, **row}


def _recipe(random: Random, fault: str) -> dict[str, Any]:
    count = {"few": random.randint(1, 3), "many": random.randint(25, 30)}.get(fault, random.randint(6, 12))
    foods = [food.name for food in random.sample(FOODS, min(count, len(FOODS)))]
    if fault == "rare":
        foods[random.randrange(count)] = "".join(random.choices(SYLLABLES, k=6)) + " root"
    if fault == "short":
        return {"ingredients": foods, "text": f"{random.choice(MOODS)} {foods[0]} for {random.randint(1, 99)}."}
    dish = random.choice(DISHES)
    lines = [f"{random.choice(MOODS)} {foods[0]} {dish.name} number {random.randrange(10**9)}"]
    while len(lines) < 4 or sum(map(len, lines)) < random.randint(400, 560):
        lines.append(_step(random, foods, dish.vessel))
    if fault == "long":
        lines += [_step(random, foods, dish.vessel) for _ in range(50)]
    lines.append(f"Finish with {random.choice(FINISHES)}. {random.choice(JOKES)}")
    return {"ingredients": foods, "text": "\n".join(lines)}


def _step(random: Random, foods: list[str], vessel: str) -> str:
    a, b, minutes = random.choice(foods), random.choice(foods), random.randint(2, 90)
    verb = random.choice(("Fry", "Braise", "Roast", "Steam", "Toss", "Simmer", "Grill", "Poach", "Whisk", "Fold"))
    how = random.choice(("gently", "briskly", "slowly", "with care", "under a lid", "without haste", "over embers"))
    spice = random.choice(SPICES)
    return random.choice((
        f"{verb} the {a} {how} with {spice} for {minutes} minutes, then add {random.randint(5, 900)} g of {b}.",
        f"Meanwhile {verb.lower()} {random.randint(5, 900)} g of {a} in the {vessel} and season it with {spice}.",
        f"After {minutes} minutes the {b} goes in; {verb.lower()} {how}, and taste for {spice}.",
    ))  # fmt: skip


def _spaced(random: Random, text: str) -> str:
    """The same words with other white space."""
    return random.choice(
        (text.replace("\n", "\r\n"), text.replace(". ", ".  ") + "\n", text.replace("\n", "\n\n"), text)
    )


def _changed(random: Random, text: str) -> str:
    words = text.split(" ")
    for at in random.sample(range(len(words)), random.randint(1, 3)):
        words[at] = random.choice(("perhaps", "fresh", "42", "soft", "bright", "never", "cold"))
    return " ".join(words)


def make(path: Path, n: int, seed: int) -> list[str]:
    """Writes the rows; returns each one's fault."""
    faults = []
    with path.open("w", encoding="utf-8") as file:
        for fault, row in recipes(n, seed):
            faults.append(fault)
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return faults


def resident_bytes(root: int) -> int:
    """The resident memory of a process and all its descendants."""
    children = collections.defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            children[parent].append(int(entry.name))
    total, waiting = 0, [root]
    while waiting:
        process = waiting.pop()
        waiting += children[process]
        try:
            total += int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            continue
    return total


def clean(rows: Path, out: Path) -> tuple[float, int]:
    """Runs the command; returns its seconds and the most memory it held."""
    sets = [part for s in SETTINGS for part in ("--set", f"data.clean.{s}")]
    command = [sys.executable, "-m", "optrush", "data", "clean", str(rows), "--out", str(out), *sets]
    begun, most = time.monotonic(), 0
    process = subprocess.Popen(command)
    while process.poll() is None:
        most = max(most, resident_bytes(process.pid))
        time.sleep(0.1)
    if process.returncode:
        raise SystemExit(f"it failed with code {process.returncode}")
    return time.monotonic() - begun, most


def judged(faults: list[str], out: Path) -> dict[str, Any]:
    """The share of each fault that its filter found, and of the good rows that went."""
    taken: dict[int, str] = {}
    with (out / "removed.jsonl").open() as file:
        for line in file:
            row = json.loads(line)
            taken[row["line"]] = row["filter"]
    planted, found, good = collections.Counter(faults), collections.Counter[str](), collections.Counter[str]()
    for number, fault in enumerate(faults, 1):
        if fault == "good":
            good[taken.get(number, "")] += 1
        elif taken.get(number) == FAULTS[fault]:
            found[fault] += 1
    lost = sum(n for name, n in good.items() if name)
    return {
        "planted": {fault: planted[fault] for fault in FAULTS},
        "found": {fault: round(found[fault] / planted[fault], 5) for fault in FAULTS},
        "good_rows": planted["good"],
        "good_rows_taken": round(lost / planted["good"], 6),
        "good_rows_taken_by": {name: n for name, n in sorted(good.items()) if name},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        rows, out = Path(name) / "recipes.jsonl", Path(name) / "cleaned"
        begun = time.monotonic()
        faults = make(rows, asked.rows, asked.seed)
        made_s, size, load = time.monotonic() - begun, rows.stat().st_size, os.getloadavg()
        seconds, most = clean(rows, out)
        record = json.loads((out / "cleaning.json").read_text())
        result = {
            "rows": asked.rows, "seed": asked.seed, "bytes": size, "made_s": round(made_s, 1),
            "clean_s": round(seconds, 1), "peak_bytes": most, **judged(faults, out),
            "good_chars_mean": _chars(rows, faults),
            "settings": record["settings"], "versions": record["versions"], "python": platform.python_version(),
            "cores": len(os.sched_getaffinity(0)), "processor": _processor(),
            "load_before_and_after": [load, os.getloadavg()],
        }  # fmt: skip
    print(json.dumps(result))


def _chars(rows: Path, faults: list[str]) -> float:
    """The mean length of the good rows' texts."""
    with rows.open() as file:
        found = [len(json.loads(line)["text"]) for line, fault in zip(file, faults) if fault == "good"]
    return round(sum(found) / len(found), 1)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
