"""What techniques that change the maths owe: a held-out loss near float32's, and weights that move at small rates."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from optrush.trainer.trainer import evaluate

from golden import make_golden
from golden.make_golden import T
from trials import assembled, golden_run, steps

STEPS = 40
SEEDS = (1, 2, 3)


def documents(box: Path, words: tuple[int, int] = (10, 22)) -> list[str]:
    """Settings for documents that count on from a random word in strides of 1 to 3: learnt within a few steps."""
    train, held = (box / f"{name}-{words[0]}.jsonl" for name in ("train", "held"))
    for path, n in ((train, 400), (held, 60)):
        if not path.exists():
            draw = np.random.RandomState(n)
            lines = []
            for _ in range(n):
                at, stride, length = draw.randint(0, 73), draw.randint(1, 4), draw.randint(*words)
                lines.append(json.dumps({"text": " ".join(f"w{(at + stride * i) % 73}" for i in range(length))}))
            path.write_text("\n".join(lines))
    return [f"data.path={train}", f"data.eval={held}"]


def small(box: Path, words: tuple[int, int] = (10, 22)) -> list[str]:
    """The same, and one layer of the golden model: half of its time."""
    if not (box / "one-layer").exists():
        make_golden.write_model(box / "one-layer", tied=False, num_hidden_layers=1)
    return [f"model.path={box}/one-layer", *documents(box, words)]


def held_out(
    box: Path, seed: int, sets: tuple[str, ...] = (), *, n: int = STEPS, rows: int = 8, **with_: Any
) -> tuple[float, float]:
    """Held-out loss before and after n steps."""
    own = [f"seed={seed}", f"train.steps={n}", "optim.lr=1e-2", f"batch.tokens={T * rows}"]
    own += [f"batch.micro_tokens={T * rows}", *sets]
    job = assembled(golden_run(box, packed=True, sets=[*small(box), *own], **with_))
    first = evaluate(job)[0]
    list(steps(job, n))
    return first, evaluate(job)[0]


@cache
def float32(box: Path, seed: int, sets: tuple[str, ...] = ()) -> tuple[float, float]:
    return held_out(box, seed, sets)


def worse(
    box: Path, sets: tuple[str, ...] = (), *, base: dict[str, Any] | None = None, learnt: float = 0.6, **with_: Any
) -> list[float]:
    """By how much the held-out loss exceeds that of the base (float32 without techniques), in nats, for each seed."""
    before = [held_out(box, seed, sets, **base) if base is not None else float32(box, seed) for seed in SEEDS]
    assert all(last < learnt * first for first, last in before), "it learns"
    ours = [held_out(box, seed, sets, **(base or {}), **with_) for seed in SEEDS]
    print("base", before, with_, ours)
    return [b[1] - a[1] for a, b in zip(before, ours)]


@dataclass
class Path100:
    """100 steps at a rate of 1e-5, from weights as large as a language model's."""

    still: float  # share of the matrices' weights that never moved, of those that ever had a gradient
    way: Tensor  # what they moved by, all weights in one vector of float64


@cache
def travelled(box: Path, *names: str, rounding: str | None = None) -> Path100:
    """How weights move where updates are small; what rounding keeps aside is part of a weight."""
    sets = ["train.steps=100", "optim.lr=1e-5", "optim.warmup=0", "optim.schedule=constant", "optim.weight_decay=0"]
    sets += [f"batch.tokens={T * 4}", f"batch.micro_tokens={T * 4}", *small(box)]
    with_: dict[str, dict[str, Any]] = {name: {} for name in names}
    if rounding is not None:
        with_["bf16"] = {"rounding": rounding}
    job = assembled(golden_run(box, packed=True, sets=sets, **with_))
    for t in job.trained:
        if t.decays:  # matrices; the golden model's are larger
            t.local.mul_(0.02 / t.local.float().std())

    def now() -> list[Tensor]:
        kept = job.optimizer.state()
        found = [t.local.double() + kept[t.name].get("compensation", torch.zeros(())).double() for t in job.trained]
        return [w.clone() for w in found]

    start = before = now()
    moved = [torch.zeros_like(w, dtype=torch.bool) for w in start]
    learnt = [torch.zeros_like(w, dtype=torch.bool) for w in start]
    update = job.optimizer_step

    def watched() -> Any:
        for flags, t in zip(learnt, job.trained):
            flags |= t.grad != 0
        return update()

    job.optimizer_step = watched
    for _ in steps(job, 100):
        after = now()
        for flags, a, b in zip(moved, before, after):
            flags |= a != b
        before = after
    # Norms begin at 1, where a unit of bfloat16 is 400 to 800 times the rate: float32's would stand still there too.
    still = torch.cat([(~m)[was] for t, m, was in zip(job.trained, moved, learnt) if t.decays])
    way = torch.cat([(b - a).flatten() for a, b in zip(start, before)])
    return Path100(still.double().mean().item(), way)
