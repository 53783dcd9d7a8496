"""Where a step's time goes on a GPU, kernel by kernel, and how long the device idles: one JSON line on standard output.

usage: kernels.py CONFIG [--steps N] [--set KEY=VALUE]... [--with NAME]... [--without NAME]...

Warms up, times N steps as they are, runs N more one by one, then runs N and one more before them under torch's
profiler, which records the device alone.

    first_step_s  from the start of the process to the end of the first step, compilation included
    step_s        seconds of a step, one after the other without waiting for the device between them
    host_s        median seconds in which the host asks for one step of an idle device. Where it is longer than step_s
                  the device waits; but it contains waiting, too, where a step has more than the 1000 or so kernels
                  that a device queues
    busy_s        seconds of a step, under the profiler, in which at least one kernel or copy ran
    span_s        of a step, there
    idle          1 - busy_s / span_s
    launches      kernels and copies a step
    parts_s       seconds of a step, under the profiler, by part, and gaps: as in a record of a ladder
    kernels       name, milliseconds a step, times a step; the longest first
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from optrush.benchmark import record, worker
from optrush.config import Config, Training, parse_config
from optrush.data.sampler import close_workers_after
from optrush.decide import decide
from optrush.report.bench import GAPS
from optrush.trainer.build import build
from optrush.trainer.run import batches
from optrush.trainer.trainer import RunPlan, Trainer, set_step

WARM_UP = 6  # steps: compilation, allocation, clocks
SHOWN, LETTERS = 60, 240  # kernels of the record, and of a name


def age() -> float:
    """Seconds since this process began."""
    began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return float(Path("/proc/uptime").read_text().split()[0]) - began


def one(trainer: Trainer, number: int) -> None:
    """A step, as the loop does it."""
    held = next(trainer.batches)
    terms = trainer.all_reduce_terms(sum(b.n_terms for b in held))
    trainer.set_step(number)
    trainer.forward_backward(held, terms)
    trainer.optimizer_step()


def measure(config: Config, steps: int) -> dict[str, Any]:
    total = WARM_UP + 3 * steps + 1
    config = config.model_copy(update={"train": Training(steps=total, log_every=1)})
    trainer = build(decide(config))
    marks = worker.RegionMarks(trainer)
    plan = RunPlan(trainer, trainer.stream.plan(None, total))
    trainer.batches = batches(trainer, plan)
    trainer.set_step = partial(set_step, trainer, steps=total)
    with close_workers_after(trainer.batches):
        one(trainer, 1)
        torch.cuda.synchronize()
        first = age()
        for n in range(WARM_UP - 1):
            one(trainer, 2 + n)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for n in range(steps):
            one(trainer, WARM_UP + 1 + n)
        torch.cuda.synchronize()
        each = (time.perf_counter() - start) / steps
        asked = []
        for n in range(steps):
            start = time.perf_counter()
            one(trainer, WARM_UP + steps + 1 + n)
            asked.append(time.perf_counter() - start)
            torch.cuda.synchronize()
        with marks.watching() as spans:
            for n in range(steps + 1):
                one(trainer, WARM_UP + 2 * steps + 1 + n)
    held, seen = worker.steady(spans)
    assert seen == steps, f"the profiler saw {seen} whole steps of {steps}"
    told = {part: whole / steps for part, whole in worker.part_seconds(held).items()}
    span = sum(told.values())
    busy = span - told[GAPS]
    events = [e for e in held if not worker.MARK.search(e.name)]
    times: dict[str, list[float]] = defaultdict(list)
    for e in events:
        times[re.sub(r"\s+", " ", e.name)].append((e.end - e.start) / 1e3)
    longest = sorted(times.items(), key=lambda item: -sum(item[1]))[:SHOWN]
    return {
        "device": trainer.env.device.name,
        "with": config.with_,
        "seq": config.batch.seq,
        "tokens": config.batch.tokens,
        "steps": steps,
        "first_step_s": round(first, 1),
        "step_s": each,
        "host_s": statistics.median(asked),
        "busy_s": busy,
        "span_s": span,
        "idle": 1 - busy / span,
        "launches": len(events) / steps,
        "parts_s": told,
        "kernels": [[name[:LETTERS], round(sum(ms) / steps, 4), len(ms) / steps] for name, ms in longest],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    for flag in ("set", "with", "without"):
        parser.add_argument(f"--{flag}", action="append", default=[], dest=f"{flag}_")
    a = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("kernels.py counts a GPU's kernels, and there is no GPU")
    config = parse_config(a.config.read_text(), str(a.config), a.set_, a.with_, a.without_)
    print(json.dumps(measure(config, a.steps) | {"environment": record.machine(), "source": record.source()}))


if __name__ == "__main__":
    main()
