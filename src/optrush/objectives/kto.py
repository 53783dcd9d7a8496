"""Kahneman-Tversky optimization: learn from single answers labelled good or bad, without pairs.

With log-probabilities summed over a document's targets, and the untrained model as the reference:

    r(document) = log p(document) - log p_reference(document)         beta * r is called its reward
    z           = max(0, mean of r over mismatched documents), no gradient: the divergence from the reference
    good        w_good (1 - s(beta (r - z)))
    bad         w_bad (1 - s(beta (z - r)))

s is the logistic function. A mismatched document is a prompt with another row's answer (data/samples.py); the mean is
over one rank's micro-batch.
Source: Ethayarajh et al., https://arxiv.org/abs/2402.01306, equations 7 and 8.
Differs from TRL: the mismatched answer comes from anywhere in the data, in TRL from the same micro-batch; z is not
averaged over ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from optrush.config import Kto
from optrush.data.batch import Batch
from optrush.objectives.pairs import log_probabilities


def score(head: nn.Module, settings: Kto, metrics: Mapping[str, Tensor], hidden: Tensor, batch: Batch) -> Tensor:
    """Return the summed loss of the batch's answers: hidden (B, T, D) -> () float32.

    metrics: a () tensor per name of JUDGEMENTS, to which the batch's sum is added.
    """
    present, good = batch.extra["pairs"], batch.extra["desirable"]  # (B, P)
    ratios = log_probabilities(head, hidden, batch) - batch.extra["reference"]  # (B, P, 2)
    answers, mismatched = ratios.unbind(-1)  # (B, P)
    many = present.sum()
    z = (torch.where(present, mismatched.detach(), 0).sum() / many.clamp_min(1)).clamp_min(0)
    gain = settings.beta * torch.where(good, answers - z, z - answers)
    weights = torch.where(good, settings.desirable_weight, settings.undesirable_weight)
    for name, values in (("reward_accuracy", gain.detach() > 0), ("reward_margin", gain.detach())):
        metrics[name].add_(torch.where(present, values, 0).sum())
    metrics["kl"].add_(z * many)
    return torch.where(present, weights * torch.sigmoid(-gain), 0).sum()
