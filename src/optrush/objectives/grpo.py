"""Group relative policy optimization: raise the likelihood of better-than-average answers to a prompt.

G answers per prompt are sampled and rewarded; an answer's advantage A is its reward minus its group's mean (with
`divide_by_spread`, divided by the group's spread). With log p of an answer's tokens now, and log q at sampling:

    r = exp(log p - log q)              per token, or (`ratio: sequence`) exp of the mean over an answer's tokens
    clip     -min(r A, clip(r, 1 - low, 1 + high) A)
    cispo    -min(r, 1 + high) A log p, in which the ratio has no gradient
    + beta (exp(d) - d - 1),  d = log p of the model before training - log p        if beta is not 0

A step's loss is the sum over its tokens, weighted by `normalise`: the mean over all tokens of the step (`tokens`), the
mean over answers of the mean over tokens (`sequences`), or the mean over answers of the sum over tokens divided by
`max_new` (`constant`).
Sources: Shao et al., https://arxiv.org/abs/2402.03300; tokens, the upper clip: Yu et al. (DAPO),
https://arxiv.org/abs/2503.14476; no spread, the constant: Liu et al. (Dr. GRPO), https://arxiv.org/abs/2503.20783;
sequence: Zheng et al. (GSPO), https://arxiv.org/abs/2507.18071; cispo: MiniMax, https://arxiv.org/abs/2506.13585; the
estimate of the divergence: Schulman, http://joschu.net/blog/kl-approx.html.

Shapes: B rows, T tokens per row. In `Batch.extra`, each (B, T) float32 and 0 at non-targets: `advantages`,
`weights`, `sampled` (log q by the sampler), `old` (log q by this loss, for several updates per answer; if absent, this
is the first update and q is p) and `reference`. `answers` (B, T) int64 numbers a row's answers from 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from optrush.config import Grpo
from optrush.data.batch import IGNORE, Batch

if TYPE_CHECKING:
    from collections.abc import Callable

SPREAD = 1e-4  # added to the standard deviation, like in TRL and the authors' code


def score(head: nn.Module, settings: Grpo, figures: Mapping[str, Tensor], hidden: Tensor, batch: Batch) -> Tensor:
    """Return the summed loss of the batch's tokens: hidden (B, T, D) -> () float32.

    An evaluation batch has `rewards`: its loss is their negative sum.

    Args:
        figures: a () tensor per name of SAMPLED, to which the batch's sum is added.
    """
    if "rewards" in batch.extra:
        return -batch.extra["rewards"].sum() + 0 * hidden.sum()
    log_p = token_log_probabilities(head, settings, hidden, batch)
    learnt = batch.labels != IGNORE
    if "advantages" not in batch.extra:  # a preflight batch: only memory matters
        return -log_p.sum()
    extra = batch.extra
    advantages, weights = extra["advantages"], extra["weights"]
    old = extra.get("old", log_p.detach())
    ratio = torch.where(learnt, log_p - old, 0)
    if settings.ratio == "sequence":
        ratio = _mean_of_answers(ratio, extra["answers"])
    ratio = ratio.exp()
    low, high = settings.clip
    if settings.loss == "cispo":
        losses = -ratio.detach().clamp(max=1 + high) * advantages * log_p
        outside = ratio > 1 + high
    else:
        bounded = ratio.clamp(1 - low, 1 + high)
        losses = -torch.minimum(ratio * advantages, bounded * advantages)
        outside = bounded * advantages < ratio * advantages
    if "reference" in extra:
        d = torch.where(learnt, extra["reference"] - log_p, 0)
        divergence = d.exp() - d - 1
        losses = losses + settings.beta * divergence
        figures["kl"] += torch.where(learnt, divergence.detach(), 0).sum()
    with torch.no_grad():
        apart = torch.where(learnt, (log_p - extra["sampled"]).abs(), 0)
        figures["ratio"] += torch.where(learnt, ratio, 0).sum()
        figures["clipped"] += (outside & learnt).sum()
        figures["logp_difference_mean"] += apart.sum()
        largest = figures["logp_difference_max"]
        largest.copy_(torch.maximum(largest, apart.max()))
    return torch.where(learnt, weights * losses, 0).sum()


def token_log_probabilities(head: nn.Module, settings: Grpo, hidden: Tensor, batch: Batch) -> Tensor:
    """Return log p of each target at the sampling temperature: hidden (B, T, D) -> (B, T), 0 at non-targets."""
    losses: Tensor = head(hidden / settings.temperature if settings.temperature != 1 else hidden, batch.labels, "token")
    return -losses


def _mean_of_answers(values: Tensor, answers: Tensor) -> Tensor:
    """Return the mean of `values` (B, T) over each answer, at all of its tokens; 0 elsewhere. answers: (B, T)."""
    size = answers.shape[1] + 1
    sums = values.new_zeros(len(values), size).scatter_add(1, answers, values)
    counts = values.new_zeros(len(values), size).scatter_add(1, answers, (answers > 0).to(values.dtype))
    return (sums / counts.clamp_min(1)).gather(1, answers) * (answers > 0)


def advantages_of(rewards: Sequence[float | None], settings: Grpo) -> list[float]:
    """Return the advantages of a group's answers; 0 for an unknown reward, or if all are equal."""
    known = [r for r in rewards if r is not None]
    if len(set(known)) < 2:  # the rounded mean could differ from equal rewards
        return [0.0] * len(rewards)
    spread = float(np.std(known, ddof=1)) + SPREAD if settings.divide_by_spread else 1.0
    mean = float(np.mean(known))
    return [0.0 if r is None else (r - mean) / spread for r in rewards]


def token_weight(settings: Grpo, length: int, terms: int, tokens: int, answers: int) -> float:
    """Return the weight of each token of an answer; the sum over the step is divided by `terms`.

    Args:
        terms: target tokens in the step's rows.
        tokens, answers: counts of the step, including dropped answers, which have no effect on the gradient.
    """
    if settings.normalise == "tokens":
        return terms / tokens
    return terms / answers / (length if settings.normalise == "sequences" else settings.max_new)


def loss_near_base(
    plain: Callable[[Batch], Tensor], model: Any, settings: Grpo, untrained: Callable[[], AbstractContextManager[None]],
    batch: Batch,
) -> Tensor:  # fmt: skip
    """Return `plain` of the batch with the log-probabilities of the model before training, with adapters disabled."""
    if "advantages" not in batch.extra:
        return plain(batch)
    training = model.training
    model.eval()
    with torch.no_grad(), untrained():
        hidden = model(batch.tokens, batch.positions, batch.documents)
        reference = token_log_probabilities(model.head, settings, hidden, batch)
    model.train(training)
    return plain(replace(batch, extra={**batch.extra, "reference": reference}))
