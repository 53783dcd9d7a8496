"""Compare a linear head's logits with another model's, one chunk of rows at a time: loss and gradients.

Legend: n rows of a chunk, D width, V the smaller vocabulary of the two models. With y the head's logits and t
the teacher's, p and q their softmax at temperature T, a row's loss is

    (1 - alpha) T^2 KL + alpha (logsumexp(y) - y[label])
    forward KL = sum of q (log q - log p), gradient for y: (p - q) / T
    reverse KL = sum of p (log p - log q), gradient for y: p (log p - log q - KL) / T

Rows labelled -100 have 0 loss and no gradient. T^2 keeps gradients at one scale as T grows. If only a teacher's k
likeliest tokens were stored, all others form one class (the ghost token of Anshumann et al., arXiv:2503.16870).
Source: Hinton et al., https://arxiv.org/abs/1503.02531; the reverse: Gu et al., https://arxiv.org/abs/2306.08543.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from optrush.data.batch import IGNORE
from optrush.kernels import widen
from optrush.kernels.cross_entropy import chunked_cross_entropy


class Blend(NamedTuple):
    """The settings of a row's loss."""

    temperature: float
    alpha: float
    reverse: bool


class Likeliest(NamedTuple):
    """The teacher's k likeliest tokens of each row, among the first `vocab` ones, at the temperature of the loss."""

    ids: Tensor  # (n, k) integers
    log_p: Tensor  # (n, k + 1) log-probabilities; the last is for all other tokens together
    vocab: int


def likeliest(logits: Tensor, k: int, temperature: float, dtype: torch.dtype) -> Likeliest:
    """Return the k likeliest tokens of logits (n, V), with log-probabilities in `dtype`, which may be narrower."""
    scaled = widen(logits) / temperature
    top, ids = scaled.topk(k, -1)
    others = torch.logsumexp(scaled.scatter(1, ids, -torch.inf), -1, keepdim=True)
    log_p = torch.cat((top, others), -1) - torch.logsumexp(scaled, -1, keepdim=True)
    return Likeliest(ids, log_p.clamp_min(torch.finfo(dtype).min).to(dtype), logits.shape[1])


def divergence_rows(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, factors: Tensor, scale: float,
    softcap: float | None, theirs: Tensor | Likeliest, blend: Blend,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the losses of some rows, and the gradient of sum(factors * losses) for hidden @ weight.T + bias.

    Args:
        hidden: (n, D), already in weight's type.
        factors: (n,) float32.
        theirs: the teacher's logits (n, V or more), or its likeliest tokens at this temperature.

    Returns:
        (n,) losses and (n, V) gradient like `chunk_loss`; (n,) divergences and next-token losses, 0 where ignored.
    """
    T, alpha, reverse = blend
    learnt = labels != IGNORE
    z = F.linear(hidden.masked_fill(~learnt[:, None], 0), weight, bias)
    y = widen(z) * scale
    slope: Tensor | float = scale
    if softcap is not None:
        t = torch.tanh(y / softcap)
        y, slope = t * softcap, (1 - t * t) * scale
    lse = torch.logsumexp(y, -1)
    index = labels.clamp_min(0)[:, None]
    next_token = torch.where(learnt, lse - y.gather(1, index).squeeze(1), 0)
    known = theirs.vocab if isinstance(theirs, Likeliest) else theirs.shape[1]
    V = min(y.shape[1], known)  # further rows of an embedding have no token
    log_p = torch.log_softmax(y[:, :V] / T, -1)
    if isinstance(theirs, Likeliest):
        log_q = completed(theirs, log_p)
    else:
        log_q = torch.log_softmax(widen(theirs[:, :V]) / T, -1)
    p, q = log_p.exp(), log_q.exp()
    if reverse:
        gap = log_p - log_q
        kl = (p * gap).sum(-1)
        slopes = p * (gap - kl[:, None])
    else:
        kl = (q * (log_q - log_p)).sum(-1)
        slopes = p - q
    kl = torch.where(learnt, kl, 0)
    gradient = F.pad(slopes * ((1 - alpha) * T), (0, y.shape[1] - V))
    hit = torch.arange(y.shape[1], device=labels.device) == index
    gradient = gradient + alpha * (torch.exp(y - lse[:, None]) - hit.to(y.dtype))
    gradient = gradient * torch.where(learnt, factors, 0)[:, None] * slope
    return (1 - alpha) * T * T * kl + alpha * next_token, gradient.to(hidden.dtype), kl, next_token


def completed(theirs: Likeliest, log_p: Tensor) -> Tensor:
    """Return the teacher's log-probabilities (n, V); tokens that were not stored get the model's own proportions.

    Its divergence from the model then equals the divergence over the k tokens and one class of all others, and so does
    the gradient: within that class the model's probabilities are only scaled together.
    """
    ids = theirs.ids.long()
    log_q = torch.log_softmax(widen(theirs.log_p), -1)  # rounded when stored: now they sum to 1 again
    others = torch.logsumexp(log_p.scatter(1, ids, -torch.inf), -1)
    return (log_p + (log_q[:, -1] - others)[:, None]).scatter(1, ids, log_q[:, :-1])


class Lesson:
    """The teacher's side of a batch during the loss: hidden states (N, its D), or stored tokens."""

    hidden: Tensor | None = None
    stored: Likeliest | None = None  # of N tokens

    def part(self, first: int, last: int, logits: Callable[[Tensor], Tensor] | None) -> Tensor | Likeliest:
        """Return the teacher's input of `divergence_rows` for the tokens [first, last).

        Args:
            logits: a loaded teacher's function, hidden states (n, D) -> (n, V).
        """
        if logits is not None:
            assert self.hidden is not None
            return logits(self.hidden[first:last])
        assert self.stored is not None
        ids, log_p, vocab = self.stored
        return Likeliest(ids[first:last], log_p[first:last], vocab)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A head's kernel with a teacher: at most `chunk` rows of logits of each model at once."""

    logits: Callable[[Tensor], Tensor] | None  # the teacher's, hidden states (n, D) -> (n, V); None: stored
    lesson: Lesson
    blend: Blend
    metrics: Mapping[str, Tensor]  # `kl` and `next_token_loss`: running sums
    chunk: int
    options: dict[str, Any] | None = field(default=None, hash=False)  # torch.compile's; None runs eagerly

    def compiled(self, options: dict[str, Any]) -> Compared:
        return replace(self, options=options)

    @cached_property
    def _rows(self) -> Callable[..., Any]:
        if self.options is None:
            return divergence_rows
        compiled: Callable[..., Any] = torch.compile(
            divergence_rows, fullgraph=True, dynamic=False, options=self.options
        )
        return compiled

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
        done = 0

        def rows(h: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
            nonlocal done  # chunks arrive in order
            theirs = self.lesson.part(done, done + len(h), self.logits)
            done += len(h)
            losses, gradient, kl, next_token = self._rows(h, *inputs, theirs, self.blend)
            self.metrics["kl"].add_(kl.detach().sum())
            self.metrics["next_token_loss"].add_(next_token.detach().sum())
            return losses, gradient

        return chunked_cross_entropy(hidden, weight, labels, chunk=self.chunk, inner=rows, whole=False, **kwargs)
