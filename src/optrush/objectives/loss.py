"""The next-token loss that pretrain and sft share: they differ in which tokens are targets, not in the score."""

from __future__ import annotations

from torch import Tensor, nn

from optrush.data.batch import Batch


def next_token(head: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
    """Summed negative log-likelihood of the batch's targets: hidden (B, T, D) -> () float32.

    The head is called, never its weight read: under sharding only its forward sees the whole weight.
    """
    nll: Tensor = head(hidden, batch.labels)
    return nll
