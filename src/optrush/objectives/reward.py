"""Reward modelling: score the chosen answer higher than the rejected one.

With the score r of a document, the model's score head at its last token:

    -log s(r_chosen - r_rejected - margin) + center (r_chosen + r_rejected)^2

s is the logistic function. Source: Ouyang et al., https://arxiv.org/abs/2203.02155, section 3.5; the margin: Touvron et
al., https://arxiv.org/abs/2307.09288, section 3.2.2; the centering: Eisenstein et al.,
https://arxiv.org/abs/2312.09244, section 2.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optrush.config import Reward
from optrush.data.batch import Batch
from optrush.models.score import ScoreHead
from optrush.objectives.pairs import add_rewards


def score(head: nn.Module, settings: Reward, metrics: Mapping[str, Tensor], hidden: Tensor, batch: Batch) -> Tensor:
    """Return the summed loss of the batch's pairs: hidden (B, T, D) -> () float32.

    metrics: a () tensor per name of FIGURES, to which the batch's sum is added.
    """
    assert isinstance(head, ScoreHead)
    rewards = last_scores(head(hidden, batch.labels, reduce="token"), head.pad, batch)  # (B, P, 2)
    add_rewards(metrics, rewards, batch)
    chosen, rejected = rewards.unbind(-1)  # (B, P)
    losses = -F.logsigmoid(chosen - rejected - settings.margin) + settings.center * (chosen + rejected).square()
    return torch.where(batch.extra["pairs"], losses, 0).sum()


def last_scores(scores: Tensor, pad: int | None, batch: Batch) -> Tensor:
    """Return the score of each document's last token that is not `pad`: (B, T) -> (B, P, 2), 0 if absent."""
    B, P = batch.extra["pairs"].shape
    counted = torch.ones_like(batch.tokens, dtype=torch.bool) if pad is None else batch.tokens.ne(pad)
    if batch.documents.filled is not None:
        counted = counted & batch.documents.filled
    places = torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
    slots = batch.documents.ids.long().clamp(max=2 * P - 1)
    last = torch.zeros(B, 2 * P, dtype=torch.long, device=scores.device)
    last = last.scatter_reduce(1, slots, torch.where(counted, places, 0), "amax")  # (B, 2 P)
    return torch.where(batch.extra["pairs"][..., None], scores.gather(1, last).view(B, P, 2), 0)
