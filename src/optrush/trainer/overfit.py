"""`optrush train --overfit N`: the first N batches again and again, until the model knows them by heart.

A model that cannot learn one batch will not learn a data set, and the reason is then easy to find: nothing changes from
step to step but the weights. It is assembled as a run is, trains by the run's own callables at the run's own learning
rate (constant after the warm-up), and writes no file of the run. How low the loss can get is computed first: where the
same beginning goes on in two ways, no model can know which.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from typing import Any

import torch

from optrush import console
from optrush.config import Dpo
from optrush.data.batch import IGNORE, Batch
from optrush.data.sampler import reading
from optrush.errors import ConfigError
from optrush.resolve import ResolvedConfig
from optrush.trainer import distributed, dpo_reference
from optrush.trainer.build import join_ranks
from optrush.trainer.run import batches, fitting
from optrush.trainer.trainer import Trainer, set_step

STEPS = 200  # at most, unless told otherwise
NEAR = 0.05  # a loss that counts as zero, in nats a target
CLOSE = 1.01  # times the lowest possible loss counts as reaching it
SAMPLE = 65536  # values of each parameter that are watched
UNMOVED, FEW, JUMPS, FLAT = 0.9, 1e-3, 0.3, 0.02  # shares: see `diagnose`
SHOWN_chars = 60  # of the text before a contradiction
EVERY = 10  # steps from line to line

Windows = list[list[Batch]]  # of each step, this rank's micro-batches


@dataclass(frozen=True)
class Floor:
    """The lowest mean loss that any model can have on the batches, and the worst of what keeps it from zero."""

    loss: float = 0.0
    example: str = ""
    do: str = "take one of the two out, or say in the prompt which is meant"


@dataclass(frozen=True)
class Seen:
    """What the steps showed."""

    losses: list[float]  # mean of each pass over the batches, in training mode
    before: float  # the same of the whole pass in evaluation mode (no dropout): with the first weights
    after: float  # and with the last
    norms: list[float]  # of the gradient, a step
    floor: Floor
    unmoved: float  # share of the watched weights that are bit by bit what they were
    trained: float  # share of the parameters that are trained
    rounds: bool  # bfloat16 weights are rounded to the nearest
    lr: float
    steps: int

    @property
    def target(self) -> float:
        return max(NEAR, CLOSE * self.floor.loss)


@dataclass(frozen=True)
class Verdict:
    """What `--overfit` answers; `cause` is None where the batches were learnt."""

    reached: bool
    cause: str | None
    found: str
    do: str
    batches: int
    terms: int  # target tokens, or pairs
    steps: int
    first_loss: float | None
    loss: float | None  # None: not finite
    floor: float
    target: float
    unmoved: float
    lr: float
    seconds: float

    def text(self) -> str:
        """For people."""
        first, last = ("not finite" if x is None else f"{x:.4f}" for x in (self.first_loss, self.loss))
        what = f"{self.batches} batch{'es' * (self.batches != 1)}, {self.terms} terms of the loss"
        lines = [f"{what}: loss {first} -> {last} in {self.steps} steps, {self.seconds:.0f} s"]
        lines += [f"found: {self.found}"] if self.found else []
        lines += [f"do:    {self.do}"] if self.do else []
        return "\n".join(lines)


def overfit(prepared: ResolvedConfig, count: int, most: int = STEPS) -> Verdict:
    """Trains on the run's first `count` batches for at most `most` steps; writes nothing.

    Raises:
        UserError: what a run would refuse; more batches than the run or the steps have.
    """
    if 2 * count > most:
        do = f"take fewer, or --overfit-steps {10 * count}"
        raise ConfigError(f"--overfit {count}", f"{most} steps, which see each batch less than twice", do)
    begun, optim = time.monotonic(), prepared.config.optim
    warmup = optim.warmup if optim.warmup < 1 else 0.03  # so many steps of a whole run are too many of this one
    flat = optim.model_copy(update={"schedule": "constant", "warmup": warmup})
    prepared = dataclasses.replace(prepared, config=prepared.config.model_copy(update={"optim": flat}))
    trainer, plan = fitting(prepared, join_ranks(prepared), None, frozenset(), None, dpo_reference.blank)
    if plan.total < count:
        raise ConfigError(f"--overfit {count}", f"a run of {plan.total} steps", f"take --overfit {plan.total} at most")
    source = batches(trainer, plan)
    with reading(source):
        windows = list(islice(source, count))
    windows = dpo_reference.beside(trainer, windows)
    terms = [trainer.all_reduce_int(sum(b.n_terms for b in window)) for window in windows]
    if trainer.world.rank == 0:
        console.say(trainer.describe())
    if sum(terms) == 0:
        found = "no token of these batches is learnt: there is nothing whose loss could fall"
        do = "look at the rows: optrush data show; longer rows (batch.seq), or another data.train_on"
        nothing = Seen([], math.nan, math.nan, [], Floor(), 1.0, 1.0, False, optim.lr, 0)
        return _verdict(nothing, ("no targets", found, do), count, 0, begun)
    seen = _train(trainer, windows, terms, most)
    ends = None if min(seen.losses[-1], seen.after) <= seen.target else diagnose(seen)
    return _verdict(seen, ends, count, sum(terms), begun)


def _train(trainer: Trainer, windows: Windows, terms: list[int], most: int) -> Seen:
    """The steps; every rank takes the same, for all that decides is the same on each."""
    floor, watched = _floor(trainer, windows), _watched(trainer)
    target = max(NEAR, CLOSE * floor.loss)
    trainer.set_step = partial(set_step, trainer, steps=most)
    before = _calm(trainer, windows, terms)
    losses, norms, bad, n = list[float](), list[float](), 0, 0
    while n + len(windows) <= most and bad < trainer.max_skipped_updates:
        total = 0.0
        for window, count in zip(windows, terms, strict=True):
            n += 1
            trainer.set_step(n)
            loss = trainer.forward_backward(window, count).item()
            norm, skipped = trainer.optimizer_step()
            bad = bad + 1 if bool(skipped) else 0
            total += loss * count
            norms.append(norm.item())
            if n % EVERY == 0 or n == 1:
                console.say(f"step {n}/{most}  loss {loss:.4f}  lr {trainer.lr.item():.2e}  norm {norms[-1]:.3g}")
        losses.append(total / sum(terms))
        if losses[-1] <= target:
            break
    same, of = distributed.host_sum([_same(watched), sum(len(values) for _, values in watched)])
    whole = sum(p.numel() for p in trainer.model.parameters())
    rounds = trainer.rounding == "nearest" and any(t.local.dtype == torch.bfloat16 for t in trainer.trained)
    return Seen(
        losses, before, _calm(trainer, windows, terms), norms, floor, same / max(1, of),
        sum(math.prod(t.full_shape) for t in trainer.trained) / whole, rounds, trainer.config.optim.lr, n,
    )  # fmt: skip


def _calm(trainer: Trainer, windows: Windows, terms: list[int]) -> float:
    """The mean loss in evaluation mode."""
    return sum(trainer.eval_loss(window).item() for window in windows) / sum(terms)


def _watched(trainer: Trainer) -> list[tuple[Any, torch.Tensor]]:
    """Trained parameters and values of them now; without the embedding, most of whose rows no batch has."""
    inner = [t for t in trainer.trained if t.parameter is not trainer.model.embedding.weight] or trainer.trained
    return [(t, _values(t.local)) for t in inner]


def _values(local: torch.Tensor) -> torch.Tensor:
    return local.reshape(-1)[:: max(1, local.numel() // SAMPLE)].clone()


def _same(watched: list[tuple[Any, torch.Tensor]]) -> int:
    return sum(int((_values(t.local) == values).sum()) for t, values in watched)


def _floor(trainer: Trainer, windows: Windows) -> Floor:
    """What is left of the loss for a model that knows these batches by heart.

    Tokens: of targets that follow the same beginning of a document, the entropy. Pairs: see `_floor_of_pairs`.
    """
    if trainer.config.dpo is not None:
        return _floor_of_pairs(trainer.config.dpo, _answers(windows), trainer.tokenizer)
    own = _follows(windows)
    everyone = _everyone({h: counts for h, (counts, _) in own.items()})
    rest = {h: _entropy(list(c.values())) for h, c in everyone.items() if len(c) > 1}
    if not rest:
        return Floor()
    worst = max(rest, key=lambda h: rest[h])
    mine = _example(trainer.tokenizer, own[worst][1], everyone[worst]) if worst in own else ""
    example = next(text for text in distributed.gather(mine) if text)
    return Floor(sum(rest.values()) / sum(c.total() for c in everyone.values()), example)


def _everyone(own: dict[int, Counter[int]]) -> dict[int, Counter[int]]:
    """These counts of all ranks together."""
    everyone: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for text in distributed.gather(json.dumps([(h, list(c.items())) for h, c in own.items()])):
        for h, counts in json.loads(text):
            everyone[h].update(dict(counts))
    return everyone


def _floor_of_pairs(settings: Dpo, own: dict[int, tuple[Counter[int], list[list[int]]]], tokenizer: Any) -> Floor:
    """Of n pairs of the same two documents, m of them the other way round, the loss that is left at the best margin.

    sigmoid: n times the entropy of a label that is 1 in (n - m) (1 - e) + m e of n cases, e the `label_smoothing`.
    ipo: m (n - m) / (n beta^2), for its margin z must be 1 / (2 beta) and -1 / (2 beta) at once.
    """
    e, everyone = settings.label_smoothing, _everyone({h: counts for h, (counts, _) in own.items()})

    def left(counts: Counter[int]) -> float:
        n, m = counts.total(), counts[1]
        if settings.loss == "ipo":
            return m * (n - m) / (n * settings.beta**2)
        return _entropy([x for x in ((n - m) * (1 - e) + m * e, m * (1 - e) + (n - m) * e) if x])

    floor = sum(map(left, everyone.values())) / max(1, sum(c.total() for c in everyone.values()))
    both = [h for h, counts in everyone.items() if len(counts) > 1]
    if not both:
        smooth = f"label_smoothing {e} takes so many pairs to be the wrong way round" if floor else ""
        return Floor(floor, smooth, "take a smaller dpo.label_smoothing, or let it go on: --overfit-steps")
    worst = max(both, key=lambda h: left(everyone[h]))
    ends = [f"...{tokenizer.decode(ids)[-SHOWN_chars:]}" for ids in own[worst][1]] if worst in own else []
    example = next(t for t in distributed.gather(f"{ends[0]!r} and {ends[1]!r}" if ends else "") if t)
    counts = everyone[worst]
    found = f"{example} are each chosen over the other ({counts[0]} x and {counts[1]} x)"
    return Floor(floor, found, "take one of the two pairs out, or say in the prompt which answer is meant")


def _answers(windows: Windows) -> dict[int, tuple[Counter[int], list[list[int]]]]:
    """By a number that stands for two documents in one order: how often that one (0) or the other (1) is chosen, and
    the tokens of the two."""
    found: dict[int, tuple[Counter[int], list[list[int]]]] = {}
    for batch in (b for window in windows for b in window):
        for b, p in batch.extra["pairs"].nonzero().tolist():
            ids = batch.documents.ids[b]
            two = [batch.tokens[b][ids == 2 * p + side].tolist() for side in (0, 1)]
            swapped = two[1] < two[0]
            ordered = two[::-1] if swapped else two
            h = hash(tuple(map(tuple, ordered)))
            found.setdefault(h, (Counter(), ordered))[0][int(swapped)] += 1
    return found


def _follows(windows: Windows) -> dict[int, tuple[Counter[int], list[int]]]:
    """By a number that stands for the beginning of a document: the targets that follow it, and its tokens."""
    found: dict[int, tuple[Counter[int], list[int]]] = {}
    for batch in (b for window in windows for b in window):
        for tokens, labels, ids in zip(batch.tokens.tolist(), batch.labels.tolist(), batch.documents.ids.tolist()):
            h, begins, before = 0, 0, -1
            for t, (token, label, document) in enumerate(zip(tokens, labels, ids)):
                if document != before:
                    h, begins, before = 0, t, document
                h = hash((h, token))
                if label != IGNORE:
                    if h not in found:
                        found[h] = (Counter(), tokens[max(begins, t - SHOWN_chars) : t + 1])
                    found[h][0][label] += 1
    return found


def _entropy(counts: Sequence[float]) -> float:
    """Summed over the targets, in nats."""
    whole = sum(counts)
    return -sum(n * math.log(n / whole) for n in counts)


def _example(tokenizer: Any, beginning: list[int], follows: Counter[int]) -> str:
    if tokenizer is None:
        return f"after {beginning[-8:]} follow {', '.join(f'{token} ({n} x)' for token, n in follows.most_common(3))}"
    ways = ", ".join(f"{tokenizer.decode([token])!r} ({n} x)" for token, n in follows.most_common(3))
    return f"after {'...' + tokenizer.decode(beginning)[-SHOWN_chars:]!r} follow {ways}"


def diagnose(seen: Seen) -> tuple[str, str, str]:
    """Why the loss is not near zero: (cause, what was found, what to do)."""
    losses, lr = seen.losses, seen.lr
    said = f"{losses[0]:.4f} -> {losses[-1]:.4f}"
    if not math.isfinite(seen.before):
        do = "look for values that are not finite in the model's weights, or take another precision"
        return "not finite", f"the loss is {seen.before} before any weight has changed", do
    if not math.isfinite(losses[-1]) or not math.isfinite(seen.after) or not math.isfinite(seen.norms[-1]):
        found = f"loss or gradient are not finite after {seen.steps} steps; they were before the first"
        return "lr too large", found, f"--set optim.lr={lr / 10:g}"
    if max(seen.norms) == 0:
        do = "look which parameters are trained, and whether the model's weights are all zero"
        return "no gradient", "the gradient is zero in every step: no weight that is trained changes the loss", do
    if seen.unmoved > UNMOVED:
        why = "bfloat16 rounds updates of this size away" if seen.rounds else f"lr {lr:g} is too small for their type"
        do = f"--with bf16:rounding=stochastic, or --set optim.lr={lr * 10:g}" if seen.rounds else "raise optim.lr"
        return "weights do not move", f"{seen.unmoved:.0%} of the weights are exactly what they were: {why}", do
    floor = seen.floor
    if floor.loss > NEAR and seen.after < 1.2 * floor.loss + NEAR:
        found = f"the data contradicts itself; no model gets below {floor.loss:.4f}: {floor.example}"
        return "contradictory targets", found, floor.do
    ups = sum(max(0.0, b - a) for a, b in pairwise(losses))
    downs = sum(max(0.0, a - b) for a, b in pairwise(losses))
    if seen.after > seen.before or ups > JUMPS * (ups + downs):
        return "lr too large", f"the loss jumps: {said}, in between {max(losses):.4f}", f"--set optim.lr={lr / 10:g}"
    if seen.trained < FEW:
        found = f"only {seen.trained:.3%} of the parameters are trained: {said}"
        return "few parameters", found, f"train more of them, or --set optim.lr={lr * 10:g}"
    late = losses[max(0, min(len(losses) * 3 // 4, len(losses) - 2))] - losses[-1]
    if late > FLAT * (losses[0] - losses[-1]):
        do = f"--set optim.lr={lr * 10:g}; or if it is nearly there, --overfit-steps {2 * seen.steps}"
        return "lr too small", f"the loss falls steadily, {said}, and too slowly", do
    found = f"the loss has stopped falling: {said}; the lowest possible is {floor.loss:.4f}"
    return "stuck", found, f"look at the rows (optrush data show); then another lr, {lr / 10:g} or {lr * 10:g}"


def _verdict(seen: Seen, ends: tuple[str, str, str] | None, count: int, terms: int, begun: float) -> Verdict:
    cause, found, do = ends or (None, "", "")
    loss = seen.losses[-1] if seen.losses else math.nan
    if ends is None:
        found = "the model learns what it is shown"
        if loss > seen.target:
            found += (
                f": {seen.after:.4f} in evaluation, if {loss:.4f} in the last step, for dropout stays on in training"
            )
            loss = seen.after
        if seen.floor.loss > NEAR:
            found += f"; the loss cannot be lower: {seen.floor.example}"
    return Verdict(
        reached=ends is None, cause=cause, found=found, do=do, batches=count, terms=terms, steps=seen.steps,
        first_loss=seen.before if math.isfinite(seen.before) else None, loss=loss if math.isfinite(loss) else None,
        floor=seen.floor.loss, target=seen.target, unmoved=seen.unmoved, lr=seen.lr,
        seconds=time.monotonic() - begun,
    )  # fmt: skip
