"""Compare the race of learning rates of `optrush tune --lr` with a grid of the same rates.

usage: rates.py CONFIG [--seeds N] [--jobs N] [--set KEY=VALUE]... [--with NAME]... [--without NAME]...

Of each seed of weights and data's order: the race over the whole of `train.steps`, then each of its rates trained to
the end, in one process on one device, up to `--jobs` seeds at a time. On a GPU, with
a folder that has a tokenizer (not tried yet):

    rates.py rates.yaml --set model.path=null --set model.shape=qwen2.5-0.5b --set model.tokenizer=FOLDER
        --set batch.seq=1024 --set batch.tokens=4096 --set batch.micro_tokens=4096 --set optim.lr=3e-4 --with bf16

A JSON line a seed on standard output (`legs`: rate, step and held-out loss of each leg of the race, the winner's last;
`grid`: rate and held-out loss, null where the run diverged; seconds of both), and last a summary:

    within  held-out loss of the rate that the race picked, trained to the end, over the least of the grid, less one
    cost    steps of the race over those of the grid
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from optrush.bench import record, trial, tune
from optrush.config import Config, dump_config, parse_config
from optrush.resolve import resolve


def compare(config: Config) -> dict[str, Any]:
    """Race the rates of a configuration, then train each to the end."""
    request = tune.trial_request(resolve(config).config, "lr")
    rates: list[float] = request["rates"]
    trainer, plan = trial.assemble(parse_config(request["run"], "run", own=True))
    begin = trial.Snapshot(trainer)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        progress = trial.Progress(trainer, Path(folder), {})
        found = trial.rate_race(trainer, plan, rates, start + 1e6, progress)
    raced = time.monotonic()
    grid: list[list[float | None]] = []
    for rate in rates:
        begin.restore()
        loss = trial.train_leg(trainer, plan, rate, 0, found["steps"], found["steps"])
        grid.append([rate, loss if math.isfinite(loss) else None])
    seconds = {"race_s": raced - start, "grid_s": time.monotonic() - raced}
    return {"seed": config.seed, **found, "grid": grid, **seconds, **judged(found["legs"], grid, found["steps"])}


def judged(legs: list[dict[str, Any]], grid: list[list[float | None]], steps: int) -> dict[str, float | None]:
    """Return how far the picked rate is from the grid's best, and the share of its steps."""
    losses = {rate: loss for rate, loss in grid if loss is not None}
    picked = losses.get(legs[-1]["rate"])
    done: dict[float, int] = {}
    for leg in legs:
        done[leg["rate"]] = max(leg["step"], done.get(leg["rate"], 0))
    within = None if picked is None else picked / min(losses.values()) - 1
    return {"picked": legs[-1]["rate"], "within": within, "cost": sum(done.values()) / (steps * len(grid))}


def compare_process(config: Config) -> dict[str, Any]:
    """Run `compare` in a process of its own; its errors go to standard error.

    Raises:
        RuntimeError: it ended with an error.
    """
    done = subprocess.run(
        [sys.executable, __file__, "--answer", dump_config(config)], stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise RuntimeError(f"the process of seed {config.seed} ended with exit code {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    if sys.argv[1:2] == ["--answer"]:
        print(json.dumps(compare(parse_config(sys.argv[2], "run", own=True))))
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    for name in ("set", "with", "without"):
        parser.add_argument(f"--{name}", action="append", default=[], dest=f"{name}s")
    a = parser.parse_args()
    config = parse_config(a.config.read_text(), str(a.config), a.sets, a.withs, a.withouts)
    found = []
    with ThreadPoolExecutor(a.jobs) as pool:
        for made in pool.map(compare_process, (config.model_copy(update={"seed": n}) for n in range(a.seeds))):
            found.append(made)
            print(json.dumps(made), flush=True)
    summary = {
        "config": str(a.config), "set": a.sets, "with": a.withs, "without": a.withouts, "steps": found[0]["steps"],
        "within": [one["within"] for one in found], "cost": [one["cost"] for one in found],
        "device": device(), "environment": record.machine(), "source": record.source(),
    }  # fmt: skip
    print(json.dumps(summary))


def device() -> str:
    """Return the name of the device that ran."""
    from optrush import hardware

    return hardware.first_device().name


if __name__ == "__main__":
    main()
