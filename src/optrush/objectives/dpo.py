"""Direct preference optimization: raise the likelihood of the chosen answer over the rejected one.

With log-probabilities summed over a document's targets, and the untrained model as the reference:

    r(document) = log p(document) - log p_reference(document)         beta * r is called its reward
    sigmoid   -(1 - e) log s(beta (r_chosen - r_rejected)) - e log s(-beta (r_chosen - r_rejected))
    ipo       (r_chosen / n_chosen - r_rejected / n_rejected - 1 / (2 beta))^2, n: targets of the document

s is the logistic function, e the assumed share of swapped pairs (`label_smoothing`).
Source: Rafailov et al., https://arxiv.org/abs/2305.18290; the smoothing: Mitchell, https://ericmitchell.ai/cdpo.pdf;
ipo: Azar et al., https://arxiv.org/abs/2310.12036, with the means over targets that its authors used.

Shapes: B rows, T tokens per row, at most P pairs per row; pair p of a row is its documents 2p and 2p + 1. No function
synchronizes with the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optrush.config import Dpo, Kto
from optrush.data.batch import Batch
from optrush.errors import NeedsError
from optrush.objectives.pairs import add_rewards, log_probabilities, target_counts

Untrained = Callable[[], AbstractContextManager[None]]


def score(head: nn.Module, settings: Dpo, figures: Mapping[str, Tensor], hidden: Tensor, batch: Batch) -> Tensor:
    """Return the summed loss of the batch's pairs: hidden (B, T, D) -> () float32.

    figures: a () tensor per name of FIGURES, to which the batch's sum is added.
    """
    ratios = log_probabilities(head, hidden, batch) - batch.extra["reference"]  # (B, P, 2)
    chosen, rejected = ratios.unbind(-1)  # (B, P)
    if settings.loss == "ipo":
        targets = target_counts(batch)
        means = ratios / targets
        losses = (means[..., 0] - means[..., 1] - 1 / (2 * settings.beta)).square()
    else:
        z, e = settings.beta * (chosen - rejected), settings.label_smoothing
        losses = -(1 - e) * F.logsigmoid(z) - e * F.logsigmoid(-z)
    add_rewards(figures, settings.beta * ratios, batch)
    return torch.where(batch.extra["pairs"], losses, 0).sum()


def by_adapter(settings: Dpo | Kto, untrained: Untrained | None) -> bool:
    """Return whether the reference is the model with adapters disabled, run in every step.

    Raises:
        NeedsError: the configuration requires this, but there is no adapter to disable.
    """
    if settings.reference == "adapter" and untrained is None:
        found = "no adapter to disable: whole weights are trained, or the adapter uses save or init"
        name = type(settings).__name__.lower()
        do = f"remove save and init, or set {name}.reference: precomputed"
        raise NeedsError(f"`{name}.reference: adapter`", found, do)
    return settings.reference != "precomputed" and untrained is not None


def loss_with_reference(
    plain: Callable[[Batch], Tensor], model: nn.Module, untrained: Untrained, batch: Batch
) -> Tensor:
    """Return `plain` of the batch with its reference, from a forward pass of the untrained model without dropout."""
    head, training = model.head, model.training
    assert isinstance(head, nn.Module)
    model.eval()
    with torch.no_grad(), untrained():
        hidden = model(batch.tokens, batch.positions, batch.documents)
        reference = log_probabilities(head, hidden, batch)
    model.train(training)
    return plain(replace(batch, extra={**batch.extra, "reference": reference}))
