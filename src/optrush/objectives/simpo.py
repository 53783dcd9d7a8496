"""Simple preference optimization: raise the chosen answer's mean log-probability over the rejected one's by a margin.

With the mean log p of a document's targets, and no reference:

    -log s(beta (log p_chosen - log p_rejected) - gamma)         beta log p is called its reward

s is the logistic function. Source: Meng et al., https://arxiv.org/abs/2405.14734, equation 6.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optrush.config import Simpo
from optrush.data.batch import Batch
from optrush.objectives.pairs import add_rewards, log_probabilities, target_counts


def score(head: nn.Module, settings: Simpo, figures: Mapping[str, Tensor], hidden: Tensor, batch: Batch) -> Tensor:
    """Return the summed loss of the batch's pairs: hidden (B, T, D) -> () float32.

    figures: a () tensor per name of FIGURES, to which the batch's sum is added.
    """
    rewards = settings.beta * log_probabilities(head, hidden, batch) / target_counts(batch)  # (B, P, 2)
    add_rewards(figures, rewards, batch)
    chosen, rejected = rewards.unbind(-1)  # (B, P)
    losses = -F.logsigmoid(chosen - rejected - settings.gamma)
    return torch.where(batch.extra["pairs"], losses, 0).sum()
