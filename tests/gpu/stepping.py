"""A run of short conversations, and its steps, which may have to pass without waiting for the device."""

import torch

from optrush.trainer.trainer import Trainer

BASE = """
model: tiny
objective: sft
data: {sample: recipes, max_samples: 60, too_long: split}
batch: {seq: 512, tokens: 4096, micro_tokens: 4096}
optim: {lr: 1e-3, schedule: constant, warmup: 0, clip: null}
train: {steps: 6}
with: {}
output: unused
"""


def steps(trainer: Trainer, n: int, waits: bool = True) -> list[tuple[float, float, bool]]:
    plan, found = trainer.stream.plan(None, 6), []
    for k in range(n):
        batches = trainer.stream.batches(k, plan, rank=0, ranks=1, micro_rows=trainer.env.micro_rows)
        torch.cuda.set_sync_debug_mode("error" if k >= 2 and not waits else "default")
        try:
            trainer.set_step(k + 1)
            loss = trainer.forward_backward(batches, sum(b.n_terms for b in batches))
            norm, skipped = trainer.optimizer_step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found.append((loss.item(), norm.item(), bool(skipped.item())))
    return found
