"""Negative log-likelihood of labels under a linear head: whole logits, and logits a chunk of rows at a time.

Legend: N rows (tokens), D width, V vocabulary. With z = hidden @ weight.T + bias and y = softcap * tanh(scale * z /
softcap) (y = scale * z without a softcap), a row's loss is logsumexp(y) - y[label]. Rows labelled -100 give exactly 0
and no gradient, whatever their hidden values are. All of it happens in float32 after the matrix product (float64 where
the inputs are float64); under autocast the product takes autocast's type.

`nll` holds (N, V) logits: in float32 one for the backward pass, and three in it. `chunked_nll` holds (chunk, V).
Source: the idea of making the gradients in the forward pass is of Liger Kernel (arXiv:2410.10989) and Cut Your Losses
(arXiv:2411.09009). Differs from the source: dW is summed in float32, a token reduction rebuilds logits in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from optrush.data.batch import IGNORE
from optrush.errors import NeedsError

Reduce = Literal["sum", "token"]
Inner = Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor, float, float | None], tuple[Tensor, Tensor]]


def nll(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    part: object | None = None,
    weights: Tensor | None = None,
    reduce: Reduce = "sum",
) -> Tensor:
    """The plain reference: every logit at once.

    Args:
        hidden: (N, D) of a floating type.
        weight: (V, D) of the same type, unless autocast decides.
        labels: (N,) int64, already shifted; -100 is not learnt.
        bias: (V,) or None.
        scale: multiplies the logits.
        softcap: bounds the logits by a tanh, after the scale.
        part: must be None: this kernel wants the whole vocabulary.
        weights: (N,) float factors of the rows, constants (no gradient reaches them).
        reduce: 'sum' or 'token'.

    Returns:
        float32 (), the sum of the rows' losses; with reduce='token' (N,).

    Raises:
        NeedsError: `part` is given.
    """
    _refuse(part)
    losses = _losses(hidden, weight, bias, labels, weights, scale, softcap)
    return losses.sum() if reduce == "sum" else losses


def chunked_nll(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    part: object | None = None,
    weights: Tensor | None = None,
    reduce: Reduce = "sum",
    chunk: int = 2048,
    inner: Inner | None = None,
) -> Tensor:
    """`nll` without ever holding more than (chunk, V) logits; arguments, shapes and errors as there.

    With reduce='sum' the gradients are made in the forward pass and kept for the backward: (N, D) in hidden's type and
    (V, D) in weight's, whose sum over chunks is in float32. They are scaled by the incoming gradient in place, so a
    second backward through the same graph raises. With reduce='token' each row's factor is known only in the backward,
    which rebuilds the logits from hidden and weight.

    Args:
        chunk: most rows at a time; rows are dealt evenly, so that no small last chunk costs a shape of its own.
        inner: replaces `rows`, e.g. by torch.compile of it.
    """
    _refuse(part)
    weights = None if weights is None else weights.detach()
    learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weight, bias))
    if not learns:
        pieces = [
            _losses(hidden[a:b], weight, bias, labels[a:b], None if weights is None else weights[a:b], scale, softcap)
            for a, b in _spans(len(hidden), chunk)
        ]
        losses = torch.cat(pieces) if pieces else _losses(hidden, weight, bias, labels, weights, scale, softcap)
        return losses.sum() if reduce == "sum" else losses
    kernel = _Summed if reduce == "sum" else _ByToken
    dtype = _compute_dtype(hidden)
    result: Tensor = kernel.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, labels, weights, (scale, softcap), chunk, inner or rows, dtype
    )
    return result


def rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    factors: Tensor,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Losses of some rows and the gradient of sum(factors * losses) with respect to hidden @ weight.T + bias.

    Args:
        hidden: (n, D), already in weight's type.
        factors: (n,) float32.

    Returns:
        (n,) float32 losses without the factors, 0 where ignored; (n, V) gradient in hidden's type.
    """
    learnt = labels != IGNORE
    z = F.linear(hidden.masked_fill(~learnt[:, None], 0), weight, bias)  # (n, V)
    y = z.to(_wide(z.dtype)) * scale
    slope: Tensor | float = scale
    if softcap is not None:
        t = torch.tanh(y / softcap)
        y, slope = t * softcap, (1 - t * t) * scale
    lse = torch.logsumexp(y, -1)
    index = labels.clamp_min(0)[:, None]
    losses = torch.where(learnt, lse - y.gather(1, index).squeeze(1), 0)
    hit = torch.arange(weight.shape[0], device=labels.device) == index  # (n, V): a comparison fuses, a scatter does not
    gradient = (torch.exp(y - lse[:, None]) - hit.to(y.dtype)) * torch.where(learnt, factors, 0)[:, None] * slope
    return losses, gradient.to(hidden.dtype)


def _losses(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    weights: Tensor | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    learnt = labels != IGNORE
    # An ignored row's hidden values become 0: in the backward 0 * NaN would reach the weight's gradient.
    y = F.linear(hidden.masked_fill(~learnt[:, None], 0), weight, bias)
    y = y.to(_wide(y.dtype))  # one name for all of them: what another one held would stay until the loss is made
    if scale != 1.0:
        y = y * scale
    if softcap is not None:
        y = torch.tanh(y / softcap) * softcap
    # torch's own keeps one (N, V) for the backward and needs three there; logsumexp and a gather would need five.
    losses = F.cross_entropy(y, labels, ignore_index=IGNORE, reduction="none")  # (N,), 0 where ignored
    return losses if weights is None else losses * torch.where(learnt, weights.detach(), 0)


class _Summed(torch.autograd.Function):
    """Sum of losses; all gradients are made while the chunk's logits exist."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        weights: Tensor | None,
        shape: tuple[float, float | None],
        chunk: int,
        inner: Inner,
        dtype: torch.dtype,
    ) -> Tensor:
        h_needs, w_needs, b_needs = ctx.needs_input_grad[:3]
        wide = _wide(dtype)
        w, b = weight.to(dtype), None if bias is None else bias.to(dtype)
        factors = _factors(labels, weights, wide)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        dh = torch.zeros_like(hidden) if h_needs else None
        dw = torch.zeros(weight.shape, dtype=wide, device=weight.device) if w_needs else None
        db = torch.zeros(weight.shape[0], dtype=wide, device=weight.device) if b_needs else None
        with torch.autocast(hidden.device.type, enabled=False):
            for first, last in _spans(len(hidden), chunk):
                h = hidden[first:last].to(dtype)
                losses, dz = inner(h, w, b, labels[first:last], factors[first:last], *shape)
                total += torch.where(labels[first:last] != IGNORE, losses * factors[first:last], 0).sum()
                _collect(dz, h, w, labels, (first, last), dh, dw, db)
        # Cast now: between here and the backward the activations are at their peak.
        ctx.made = (dh, None if dw is None else dw.to(weight.dtype), None if bias is None or db is None else
                    db.to(bias.dtype))  # fmt: skip
        return total

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.made is None:
            raise RuntimeError("chunked_nll(reduce='sum') gives its gradients once: they were scaled in place")
        made, ctx.made = ctx.made, None
        dh, dw, db = (None if t is None else t.mul_(incoming[0]) for t in made)
        return dh, dw, db, None, None, None, None, None, None


class _ByToken(torch.autograd.Function):
    """Losses by row; the backward rebuilds each chunk's logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        weights: Tensor | None,
        shape: tuple[float, float | None],
        chunk: int,
        inner: Inner,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, labels, weights)
        ctx.rest = (shape, chunk, inner, dtype)
        w, b = weight.to(dtype), None if bias is None else bias.to(dtype)
        out = torch.empty(len(hidden), dtype=_wide(dtype), device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for first, last in _spans(len(hidden), chunk):
                part = None if weights is None else weights[first:last]
                out[first:last] = _losses(hidden[first:last].to(dtype), w, b, labels[first:last], part, *shape)
        return out

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, weights = ctx.saved_tensors
        shape, chunk, inner, dtype = ctx.rest
        h_needs, w_needs, b_needs = ctx.needs_input_grad[:3]
        wide = _wide(dtype)
        w, b = weight.to(dtype), None if bias is None else bias.to(dtype)
        factors = _factors(labels, weights, wide) * incoming[0]
        dh = torch.zeros_like(hidden) if h_needs else None
        dw = torch.zeros(weight.shape, dtype=wide, device=weight.device) if w_needs else None
        db = torch.zeros(weight.shape[0], dtype=wide, device=weight.device) if b_needs else None
        with torch.autocast(hidden.device.type, enabled=False):
            for first, last in _spans(len(hidden), chunk):
                h = hidden[first:last].to(dtype)
                _, dz = inner(h, w, b, labels[first:last], factors[first:last], *shape)
                _collect(dz, h, w, labels, (first, last), dh, dw, db)
        dw = None if dw is None else dw.to(weight.dtype)
        db = None if db is None else db.to(bias.dtype)
        return dh, dw, db, None, None, None, None, None, None


def _collect(
    dz: Tensor,
    h: Tensor,
    w: Tensor,
    labels: Tensor,
    span: tuple[int, int],
    dh: Tensor | None,
    dw: Tensor | None,
    db: Tensor | None,
) -> None:
    """Add one chunk's (n, V) gradient of the logits to those of hidden, weight and bias, in place."""
    learnt = (labels[span[0] : span[1]] != IGNORE)[:, None]
    if dh is not None:
        dh[span[0] : span[1]] = torch.where(learnt, dz @ w, 0)
    if dw is not None:
        h = h.masked_fill(~learnt, 0)
        if dz.dtype != dw.dtype and dz.is_cuda:  # tensor cores sum in float32: keep that sum, do not round each chunk
            torch.addmm(dw, dz.t(), h, out_dtype=dw.dtype, out=dw)
        else:
            dw += dz.t() @ h
    if db is not None:
        db += dz.sum(0, dtype=db.dtype)


def _factors(labels: Tensor, weights: Tensor | None, wide: torch.dtype) -> Tensor:
    """(N,): the rows' weights, 0 where ignored (whatever the weight there is)."""
    learnt = (labels != IGNORE).to(wide)
    return learnt if weights is None else torch.where(labels != IGNORE, weights.to(wide), 0)


def _spans(n: int, chunk: int) -> Iterator[tuple[int, int]]:
    if n == 0:
        return
    size = -(-n // -(-n // chunk))
    for first in range(0, n, size):
        yield first, min(first + size, n)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """The type of the matrix products: autocast's where it is on, else hidden's."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _refuse(part: object | None) -> None:
    if part is not None:
        raise NeedsError(
            "a head whose vocabulary is cut over ranks",
            "a loss kernel that wants the whole vocabulary",
            "use a kernel that takes a vocabulary part, or leave the head whole",
        )
