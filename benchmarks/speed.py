"""Speed and peak memory of one configuration, without saving anything: one JSON line on standard output.

usage: [torchrun ...] speed.py CONFIG [--set KEY=VALUE]... [--with NAME]... [--without NAME]...

Takes every second of the run but its first third (warm-up, compilation); `train.log_every` sets how often the device is
waited for. Random tokens, never constant ones: products on constant data run faster than on real data.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
from functools import partial
from pathlib import Path

import torch

from optrush.config import parse_config
from optrush.decide import decide
from optrush.technique import package_digest
from optrush.trainer import distributed
from optrush.trainer.build import build
from optrush.trainer.metrics import Meter
from optrush.trainer.run import batches
from optrush.trainer.trainer import RunPlan, set_step, train


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    for flag in ("set", "with", "without"):
        parser.add_argument(f"--{flag}", action="append", default=[], dest=f"{flag}_")
    a = parser.parse_args()
    config = parse_config(a.config.read_text(), str(a.config), a.set_, a.with_, a.without_)
    with distributed.leaving():
        decided = decide(config)
        config, trainer = decided.config, build(decided)
        plan = RunPlan(
            trainer, trainer.stream.plan(None if config.train.steps else config.train.epochs, config.train.steps)
        )
        trainer.set_step = partial(set_step, trainer, steps=plan.total)
        trainer.batches = batches(trainer, plan)
        lines: list[dict[str, float]] = []
        with tempfile.TemporaryDirectory() as folder:
            train(
                trainer, Meter(trainer, Path(folder) / "metrics.jsonl", plan.total, lines.append), plan, lambda _: None
            )
    if trainer.world.rank:
        return
    timed = [m for m in lines if "loss" in m and m["step"] > plan.total // 3]
    speeds = sorted(m["tokens_per_s"] for m in timed)
    print(
        json.dumps(
            {
                "with": config.with_,
                "seq": config.batch.seq,
                "micro_tokens": config.batch.micro_tokens,
                "tokens_per_s": round(statistics.median(speeds)),
                "spread": [round(speeds[0]), round(speeds[-1])],
                "mfu": timed[0]["mfu"] and round(statistics.median(m["mfu"] for m in timed), 4),
                "peak_gib": round(max(m["peak_bytes"] for m in timed) / 2**30, 2),
                "step_s": round(statistics.median(m["step_s"] for m in timed), 4),
                "data_wait_s": round(statistics.median(m["data_wait_s"] for m in timed), 5),
                "losses": [m["loss"] for m in lines if "loss" in m],
                "torch": torch.__version__,
                "grad_norms": [m["grad_norm"] for m in lines if "loss" in m],
                "ranks": trainer.world.ranks,
                "device": trainer.env.device.name,
                "source": package_digest(),
                "python": platform.python_version(),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
