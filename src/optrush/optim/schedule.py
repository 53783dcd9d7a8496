"""Learning rate as a pure function of the step, so that a resumed run has the same rates."""

from __future__ import annotations

import math

from optrush.config import Optim


def warmup_steps(optim: Optim, steps: int) -> int:
    """Return the number of warm-up steps: `optim.warmup` below 1 is a fraction of the run (rounded up), else steps."""
    return math.ceil(optim.warmup * steps) if optim.warmup < 1 else int(optim.warmup)


def learning_rate(optim: Optim, step: int, steps: int) -> float:
    """Return the rate of update `step` (1 ... steps): a linear warm-up that ends at the full rate, then the schedule.

    Decaying schedules reach `optim.min_lr_ratio` of the full rate at step steps + 1, so that no update has a rate of
    zero. With `optim.restarts`, cosine repeats in periods of equal length. `wsd` keeps the full rate until the decay,
    whose length is `optim.decay`: a fraction of the run below 1, else steps.

    Source of wsd: Hu et al., MiniCPM, https://arxiv.org/abs/2404.06395
    """
    warm = warmup_steps(optim, steps)
    if step <= warm:
        return optim.lr * step / warm
    begin = warm
    if optim.schedule == "wsd":
        begin = max(warm, steps - (math.ceil(optim.decay * steps) if optim.decay < 1 else int(optim.decay)))
    progress = max(0.0, (step - 1 - begin) / max(1, steps - begin))
    if optim.schedule == "constant":
        return optim.lr
    progress = progress * (optim.restarts + 1) % 1 if optim.schedule == "cosine" else progress
    left = 0.5 * (1 + math.cos(math.pi * progress)) if optim.schedule == "cosine" else 1 - progress
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * left)
