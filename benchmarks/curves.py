"""Whether a technique that changes the numbers learns as well: loss curves with and without it, over seeds.

usage: curves.py CONFIG --with NAME [--seeds N] [--set KEY=VALUE]... [--conversations FILE N]

Trains CONFIG from the weights and in the order of each seed, first as it is, then with NAME; keeps nothing of
the runs. One JSON line on standard output:

    curves   name of the run -> mean training loss of every tenth of it, last the held-out loss
    apart    furthest that the two runs of one seed are from each other, over all points and seeds
    scatter  furthest that two seeds are from each other, both as CONFIG is
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
from functools import partial
from pathlib import Path

import torch

from optrush import config, step
from optrush.assemble import assemble
from optrush.bench import environment
from optrush.bench.worker import Lines
from optrush.data import recipes
from optrush.data.loader import reading
from optrush.fit import batches
from optrush.prepare import prepare
from optrush.train import Plan, evaluate, train

POINTS = 10


def curve(run: config.Run) -> list[float]:
    """Mean training loss by tenths of the run, and the held-out loss after it."""
    job = assemble(prepare(run))
    plan = Plan(job, job.stream.plan(None if run.train.steps else run.train.epochs, run.train.steps))
    job.batches = batches(job, plan)
    job.begin = partial(step.begin, job, steps=plan.total)
    meter = Lines(job, None, plan.total, lambda _: None)
    meter.lines = []
    held = job.evaluation
    job.evaluation = None  # asked once, at the end
    with reading(job.batches):
        train(job, meter, plan, lambda _: None)
    losses = [line["loss"] for line in meter.lines]
    size = len(losses) // POINTS
    points = [statistics.mean(losses[k * size : (k + 1) * size]) for k in range(POINTS)]
    if held is not None:
        job.evaluation = held
        points.append(evaluate(job).loss)
    return points


def furthest(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("--with", required=True, dest="technique")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], dest="sets")
    parser.add_argument("--conversations", nargs=2, metavar=("FILE", "N"))
    a = parser.parse_args()
    if a.conversations:
        recipes.write(Path(a.conversations[0]), int(a.conversations[1]), seed=0)
    curves: dict[str, list[float]] = {}
    for seed, withs in itertools.product(range(a.seeds), ([], [a.technique])):
        sets = [*a.sets, f"seed={seed}"]
        run = config.parse(a.config.read_text(), str(a.config), sets=sets, withs=withs)
        curves[" ".join([f"seed {seed}", *withs])] = curve(run)
        gc.collect()
        torch._dynamo.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    plain = [curves[f"seed {k}"] for k in range(a.seeds)]
    changed = [curves[f"seed {k} {a.technique}"] for k in range(a.seeds)]
    print(
        json.dumps(
            {
                "technique": a.technique,
                "config": str(a.config),
                "steps": run.train.steps,
                "curves": curves,
                "apart": max(map(furthest, plain, changed)),
                "scatter": max((furthest(x, y) for x, y in itertools.combinations(plain, 2)), default=None),
                "environment": environment.machine(),
                "source": environment.source(),
            }
        )
    )


if __name__ == "__main__":
    main()
