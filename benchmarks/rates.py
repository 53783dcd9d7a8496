"""Compare the race of learning rates of `optrush tune --lr` with a grid of the same rates.

usage: rates.py CONFIG [--seeds N] [--jobs N] [--set KEY=VALUE]... [--with NAME]... [--without NAME]...

Of each seed of weights and data's order: each rate is trained to the end once, with its held-out loss where a race
stops too, in one process on one device, up to `--jobs` seeds at a time. The race is played from those losses: its legs
go on from stored states, bit for bit (tests/bench/test_trial.py). On a GPU, with a folder that has a tokenizer:

    rates.py rates.yaml --jobs 3 --set model.path=null --set model.shape=qwen2.5-0.5b --set model.tokenizer=FOLDER
        --set batch.seq=1024 --set batch.tokens=1024 --set batch.micro_tokens=1024 --set optim.lr=3e-4
        --set train.steps=256 --with bf16

A JSON line a seed on standard output (`legs`: rate, step and held-out loss of each leg of the race, the winner's last;
`grid`: rate and held-out loss, null where the run diverged; its seconds), and last a summary:

    within  held-out loss of the rate that the race picked, trained to the end, over the least of the grid, less one
    cost    steps of the race over those of the grid
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from optrush.benchmark import record, trial, tune
from optrush.config import Config, dump_config, parse_config
from optrush.decide import decide


def compare(config: Config) -> dict[str, Any]:
    """Train each rate of a configuration to the end, and play the race from that."""
    request = tune.trial_request(decide(config).config, "lr")
    rates: list[float] = request["rates"]
    trainer, plan = trial.assemble(parse_config(request["run"], "run", own=True))
    states = trial.States(trainer, Path(tempfile.mkdtemp()) / "states")
    states.save("begin")
    steps, start = plan.total, time.monotonic()
    stops = [round(share * steps) for share in trial.STOPS]
    losses: dict[tuple[float, int], float] = {}
    for rate in rates:
        states.restore("begin")
        for done, stop in itertools.pairwise((0, *stops, steps)):
            losses[rate, stop] = trial.train_leg(trainer, plan, rate, done, stop, steps)
    return {"seed": config.seed, **played(rates, stops, steps, losses), "grid_s": time.monotonic() - start}


def played(
    rates: Sequence[float], stops: Sequence[int], steps: int, losses: dict[tuple[float, int], float]
) -> dict[str, Any]:
    """Play the race from the held-out losses by rate and step; return its legs beside the grid."""
    legs = trial.race(rates, stops, lambda rate, done, stop: losses[rate, stop])
    ends = ((rate, losses[rate, steps]) for rate in rates)
    grid: list[list[float | None]] = [[rate, loss if math.isfinite(loss) else None] for rate, loss in ends]
    return {"legs": legs, "steps": steps, "grid": grid, **judged(legs, grid, steps)}


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
