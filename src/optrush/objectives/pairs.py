"""Sum log-probabilities and targets per document for preference objectives; add up the rewards.

Shapes: B rows, T tokens per row, at most P pairs per row; pair p of a row is its documents 2p and 2p + 1. No function
synchronizes with the device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from optrush.data.batch import IGNORE, Batch
from optrush.objectives import FIGURES


def log_probabilities(head: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
    """Return log-probabilities summed over each document's targets: hidden (B, T, D) -> (B, P, 2) float32, 0 if absent.

    Calls the head and never reads its weight: with sharding, only its forward has the full weight.
    """
    losses: Tensor = head(hidden, batch.labels, reduce="token")  # (B, T)
    return by_document(-losses, batch)


def by_document(values: Tensor, batch: Batch) -> Tensor:
    """Return the sums over documents: (B, T) -> (B, P, 2). Padding, the last document of a row, must be 0."""
    B, P = batch.extra["pairs"].shape
    slots = batch.documents.ids.long().clamp(max=2 * P - 1)
    return values.new_zeros(B, 2 * P).scatter_add(1, slots, values).view(B, P, 2)


def target_counts(batch: Batch) -> Tensor:
    """Return the number of targets of each pair's documents: (B, P, 2) float32, at least 1, for divisions."""
    return by_document((batch.labels != IGNORE).float(), batch).clamp_min(1)


def add_rewards(figures: Mapping[str, Tensor], rewards: Tensor, batch: Batch) -> None:
    """Add the sums over the batch's pairs to `figures`, a () tensor per name of FIGURES: rewards (B, P, 2)."""
    first, second = rewards.detach().unbind(-1)  # (B, P)
    values_of = (first, second, first > second, first - second)
    for name, values in zip(FIGURES, values_of, strict=True):
        figures[name].add_(torch.where(batch.extra["pairs"], values, 0).sum())
