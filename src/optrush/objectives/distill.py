"""Distillation: learn another model's next-token probabilities, not only the actual token.

The head's kernel computes the loss (kernels/distillation.py), comparing logits a chunk at a time. This module provides
the teacher's input: one forward pass of the frozen teacher on the same batch, or its stored tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from optrush.config import Distill
from optrush.data.batch import Batch
from optrush.kernels.distillation import Lesson, Likeliest


def score(head: nn.Module, settings: Distill, metrics: Mapping[str, Tensor], hidden: Tensor, batch: Batch) -> Tensor:
    """Return the summed loss of the batch's targets: hidden (B, T, D) -> () float32.

    The head's kernel adds to `metrics`.
    """
    loss: Tensor = head(hidden, batch.labels)
    return loss


def loss_with_teacher(plain: Callable[[Batch], Tensor], teacher: nn.Module, lesson: Lesson, batch: Batch) -> Tensor:
    """Return `plain(batch)`, with the teacher's hidden states in `lesson` during the call."""
    with torch.no_grad():
        lesson.hidden = teacher(batch.tokens, batch.positions, batch.documents).flatten(0, 1)
    try:
        return plain(batch)
    finally:
        lesson.hidden = None


def loss_with_stored(plain: Callable[[Batch], Tensor], vocab: int, lesson: Lesson, batch: Batch) -> Tensor:
    """Return `plain(batch)`, with the stored teacher tokens in `lesson` during the call.

    Args:
        vocab: number of tokens over which the stored probabilities sum to 1.
    """
    ids, log_p = (batch.extra[f"teacher_{name}"].flatten(0, 1) for name in ("ids", "log_p"))
    lesson.stored = Likeliest(ids, log_p, vocab)
    try:
        return plain(batch)
    finally:
        lesson.stored = None
