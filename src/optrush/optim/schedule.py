"""Learning rate as a pure function of the step, so that a resumed run has the same rates."""

from __future__ import annotations

import math

from optrush.config import Optim


def warmup_steps(optim: Optim, steps: int) -> int:
    """Return the steps of the warm-up: `optim.warmup` below 1 is a fraction of the run (rounded up), else steps."""
    return math.ceil(optim.warmup * steps) if optim.warmup < 1 else int(optim.warmup)


def learning_rate(optim: Optim, step: int, steps: int) -> float:
    """Return the rate of update `step` (1 ... steps): a linear warm-up that ends at the full rate, then the schedule.

    Decaying schedules would reach zero at step steps + 1, so that no update is wasted on a rate of zero.
    """
    warm = warmup_steps(optim, steps)
    if step <= warm:
        return optim.lr * step / warm
    progress = (step - 1 - warm) / max(1, steps - warm)
    if optim.schedule == "cosine":
        return optim.lr * 0.5 * (1 + math.cos(math.pi * progress))
    if optim.schedule == "linear":
        return optim.lr * (1 - progress)
    return optim.lr
