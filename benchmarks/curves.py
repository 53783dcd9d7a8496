"""Compare loss curves with and without a technique that changes the numbers, over seeds.

usage: curves.py CONFIG --with NAME [--seeds N] [--jobs N] [--set KEY=VALUE]... [--write]

Trains CONFIG from the weights and in the order of each seed, as it is and with NAME, each run in a process of its own,
up to `--jobs` at a time for nothing is timed, and keeps nothing of the runs. `--write` makes CONFIG's data first:
`data.path` and `data.eval`, recipes of two seeds, so that all runs are evaluated on the same documents. A JSON line a
run on standard output (`losses`: mean training loss of every tenth of it; `held_out`: after it; both null where a run
diverged), and last

    difference  held-out loss with NAME less that without, a number a seed; and their mean
    scatter     standard deviation of the held-out loss without it, over seeds: what another start changes
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import recipes

from optrush.benchmark import record
from optrush.benchmark.worker import MetricLines
from optrush.config import Config, dump_config, parse_config
from optrush.data.sampler import close_workers_after
from optrush.decide import decide
from optrush.trainer.build import build
from optrush.trainer.run import batches
from optrush.trainer.trainer import RunPlan, evaluate, set_step, train

POINTS = 10
CONVERSATIONS, HELD = 20_000, 400


def curve(config: Config) -> dict[str, Any]:
    """Train one run and return its losses."""
    trainer = build(decide(config))
    plan = RunPlan(
        trainer, trainer.stream.plan(None if config.train.steps else config.train.epochs, config.train.steps)
    )
    trainer.batches = batches(trainer, plan)
    trainer.set_step = partial(set_step, trainer, steps=plan.total)
    meter = MetricLines(trainer, plan.total)
    evaluation, trainer.evaluation = trainer.evaluation, None  # evaluated once, at the end
    with close_workers_after(trainer.batches):
        train(trainer, meter, plan, lambda _: None)
    losses = [line["loss"] for line in meter.lines]
    sound = meter.failure is None and len(losses) == plan.total and None not in losses
    size = plan.total // POINTS
    points = [losses[k * size : (k + 1) * size] for k in range(POINTS)] if sound else []
    trainer.evaluation = evaluation
    end = evaluate(trainer).loss if sound else math.nan
    return {
        "losses": [statistics.mean(each) for each in points] or None,
        "held_out": end if math.isfinite(end) else None,
        "failure": None if meter.failure is None else str(meter.failure),
    }


def curve_process(config: Config) -> dict[str, Any]:
    """Run `curve` in a process of its own; its errors go to standard error.

    Raises:
        RuntimeError: it ended with an error.
    """
    done = subprocess.run(
        [sys.executable, __file__, "--answer", dump_config(config)], stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise RuntimeError(f"the run of seed {config.seed} ended with exit code {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    if sys.argv[1:2] == ["--answer"]:
        print(json.dumps(curve(parse_config(sys.argv[2], "run"))))
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("--with", required=True, dest="technique")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], dest="sets")
    parser.add_argument("--write", action="store_true")
    a = parser.parse_args()
    plain = parse_config(a.config.read_text(), str(a.config), sets=a.sets)
    given = parse_config(a.config.read_text(), str(a.config), sets=a.sets, withs=[a.technique])
    if given.with_ == plain.with_ or a.seeds < 2 or a.jobs < 1:
        sys.exit("wanted: a technique that CONFIG has not, 2 seeds or more, and 1 job or more")
    if plain.train.log_every != 1 or (plain.train.steps or 1) % POINTS:
        sys.exit(f"wanted: log_every: 1, and steps in {POINTS} parts")
    if not isinstance(plain.data.eval, str) or not isinstance(plain.data.path, str) or plain.dpo is not None:
        sys.exit("wanted: one file as data.path, one as data.eval, and no dpo")
    files = (plain.data.path, CONVERSATIONS, 0), (plain.data.eval, HELD, 1)
    if a.write:
        if any(Path(name).exists() for name, *_ in files) or plain.data.path == plain.data.eval:
            sys.exit(f"--write makes {plain.data.path} and {plain.data.eval}: two files that are not there yet")
        for name, count, seed in files:
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_bytes(recipes.chats(count, seed))
    pairs = list(itertools.product(range(a.seeds), (False, True)))
    found: dict[tuple[int, bool], float | None] = {}
    with ThreadPoolExecutor(a.jobs) as pool:
        runs = ((given if there else plain).model_copy(update={"seed": seed}) for seed, there in pairs)
        for (seed, there), made in zip(pairs, pool.map(curve_process, runs), strict=True):
            found[seed, there] = made["held_out"]
            print(json.dumps({"seed": seed, "with": a.technique if there else None, **made}), flush=True)
    if None in found.values():
        sys.exit("a run diverged: there is nothing to compare")
    ends = {key: value for key, value in found.items() if value is not None}
    differences = [ends[seed, True] - ends[seed, False] for seed in range(a.seeds)]
    summary = {
        "technique": a.technique, "config": str(a.config), "set": a.sets, "steps": plain.train.steps,
        "difference": differences, "mean": statistics.mean(differences),
        "scatter": statistics.stdev(ends[seed, False] for seed in range(a.seeds)),
        "environment": record.machine(), "source": record.source(),
    }  # fmt: skip
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
