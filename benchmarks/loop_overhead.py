"""What the loop costs: optrush's train() against a bare PyTorch loop of the same model, interleaved, on this machine.

usage: loop_overhead.py [PAIRS]   prints one JSON line: the median over pairs of (ours / bare), and all ratios.

Both take the same batches, model, AdamW kernel and clipping; optrush logs every 10 steps, the bare loop never.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from optrush.config import parse_config
from optrush.decide import decide
from optrush.trainer.build import build
from optrush.trainer.metrics import Meter
from optrush.trainer.run import batches
from optrush.trainer.trainer import RunPlan, Trainer, set_step, train

STEPS = 20
CONFIG = """
model: tiny
objective: pretrain
data: {random: 64}
batch: {seq: 128, tokens: 1024, micro_tokens: 512}
optim: {lr: 1e-4, schedule: constant, warmup: 0}
train: {steps: 20, log_every: 10}
output: unused
with: {fused-adamw: {}, attention: {impl: sdpa}}
"""


def ours(trainer: Trainer, folder: Path) -> float:
    plan = RunPlan(trainer, trainer.stream.plan(None, STEPS))
    trainer.set_step = partial(set_step, trainer, steps=STEPS)
    trainer.batches = batches(trainer, plan)
    meter = Meter(trainer, folder / "metrics.jsonl", STEPS, lambda _: None)
    start = time.perf_counter()
    train(trainer, meter, plan, lambda _: None)
    return time.perf_counter() - start


def bare(trainer: Trainer) -> float:
    model, plan = trainer.model, trainer.stream.plan(None, STEPS)
    parameters = [t.parameter for t in trainer.trained]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    start = time.perf_counter()
    for k in range(STEPS):
        for batch in trainer.stream.batches(k, plan, rank=0, ranks=1, micro_rows=trainer.env.micro_rows):
            hidden = model(batch.tokens, batch.positions, batch.documents)
            (model.head(hidden, batch.labels) / 1016).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return time.perf_counter() - start


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    trainer = build(decide(parse_config(CONFIG, "loop_overhead")))
    with tempfile.TemporaryDirectory() as folder:
        ours(trainer, Path(folder)), bare(trainer)  # warm-up
        ratios = [ours(trainer, Path(folder)) / bare(trainer) for _ in range(pairs)]
    print(json.dumps({"ratio": round(statistics.median(ratios), 4), "ratios": [round(r, 3) for r in sorted(ratios)]}))


if __name__ == "__main__":
    main()
