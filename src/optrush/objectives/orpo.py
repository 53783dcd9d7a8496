"""Odds-ratio preference optimization: learn the chosen answer, and raise its odds over those of the rejected one.

With the mean log p of a document's targets, log odds = log p - log(1 - p), and no reference:

    -log p_chosen - beta log s(log odds_chosen - log odds_rejected)         beta log p is called its reward

s is the logistic function. Source: Hong et al., https://arxiv.org/abs/2403.07691, equations 2 to 7; beta is its lambda.
Differs from TRL: the first term is the mean over the chosen answer of each pair, like in the paper. TRL takes the mean
over all tokens of a micro-batch, including prompts, which depends on the micro-batch size.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optrush.config import Orpo
from optrush.data.batch import Batch
from optrush.objectives.pairs import add_rewards, log_probabilities, target_counts


def score(head: nn.Module, settings: Orpo, figures: Mapping[str, Tensor], hidden: Tensor, batch: Batch) -> Tensor:
    """Return the summed loss of the batch's pairs: hidden (B, T, D) -> () float32.

    figures: a () tensor per name of FIGURES, to which the batch's sum is added.
    """
    present = batch.extra["pairs"]
    means = log_probabilities(head, hidden, batch) / target_counts(batch)  # (B, P, 2)
    add_rewards(figures, settings.beta * means, batch)
    # A mean of 0 (no pair, or a memorised answer) has infinite odds and an infinite gradient.
    least = torch.finfo(means.dtype).eps / 2
    means = torch.where(present[..., None], means, -1).clamp(max=-least)
    odds = means - torch.log(-torch.expm1(means))
    chosen, rejected = odds.unbind(-1)  # (B, P)
    losses = -means[..., 0] - settings.beta * F.logsigmoid(chosen - rejected)
    return torch.where(present, losses, 0).sum()
