"""Cross-entropy of labels under a linear head, with all logits at once or the logits of one chunk of rows at a time.

Legend: N rows (tokens), D width, V vocabulary. With z = hidden @ weight.T + bias and y = softcap * tanh(scale * z /
softcap) (y = scale * z without a softcap), a row's loss is logsumexp(y) - y[label]. Rows labelled -100 have exactly 0
loss and no gradient, whatever their hidden values. All is float32 after the matmul (float64 for float64).

`cross_entropy` stores (N, V) float32 logits: one tensor for the backward pass, three during it. `chunked_cross_entropy`
stores (chunk, V). The classes fill the head's `nll` slot: one function with its settings.
Source: gradients in the forward pass as in Liger Kernel (arXiv:2410.10989) and Cut Your Losses (arXiv:2411.09009).
Differs from the source: dW is summed in float32; with a token reduction, the backward recomputes the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from optrush.data.batch import IGNORE
from optrush.errors import NeedsError
from optrush.kernels import compute_dtype, widen

Reduce = Literal["sum", "token"]
ChunkLoss = Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor, float, float | None], tuple[Tensor, Tensor]]


# --- The head's callables.


class LossKernel(Protocol):
    """A loss of the head; `cross_entropy` documents arguments and result."""

    def __call__(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None, scale: float,
        softcap: float | None, reduce: Reduce,
    ) -> Tensor: ...  # fmt: skip

    def compiled(self, options: dict[str, Any]) -> LossKernel:
        """Return the same kernel, compiled as far as possible, with options of torch.compile."""
        ...


@dataclass(frozen=True, kw_only=True)
class _Kernel:
    options: dict[str, Any] | None = field(default=None, hash=False)  # torch.compile's; None runs eagerly

    def compiled(self, options: dict[str, Any]) -> Self:
        return replace(self, options=options)

    def _body(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if self.options is None:
            return function
        compiled: Callable[..., Any] = torch.compile(function, fullgraph=True, dynamic=False, options=self.options)
        return compiled


@dataclass(frozen=True, kw_only=True)
class Whole(_Kernel):
    """Compute all logits at once: the baseline. Compiled in one piece."""

    @cached_property
    def _function(self) -> Callable[..., Tensor]:
        return self._body(cross_entropy)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._function(*args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class Chunked(_Kernel):
    """Compute at most `chunk` rows of logits at once. Compiled inside a chunk; the loop over chunks stays in Python."""

    chunk: int = 4096

    @cached_property
    def _inner(self) -> Callable[..., Any]:
        return self._body(chunk_loss)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return chunked_cross_entropy(*args, chunk=self.chunk, inner=self._inner, **kwargs)


@dataclass(frozen=True, kw_only=True)
class Scores(_Kernel):
    """Return scores instead of a loss: matmul with a weight of one row, (N,), in at least float32 at any precision."""

    @cached_property
    def _function(self) -> Callable[..., Tensor]:
        return self._body(scores)

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
        return self._function(hidden, weight)


def scores(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden (N, D), weight (1, D) -> (N,)."""
    with torch.autocast(hidden.device.type, enabled=False):
        return widen(hidden) @ widen(weight)[0]


@dataclass(frozen=True)
class VocabularyPart:
    """This rank's rows of the vocabulary of a sharded head; all ranks of the group have equally many."""

    group: torch.distributed.ProcessGroup
    first: int


@dataclass(frozen=True, kw_only=True)
class AcrossRanks(_Kernel):
    """A head sharded by rows of the vocabulary: each rank computes the logits and gradients of its weight.

    Two numbers per row cross the ranks: the maximum, then the sum of exponentials with the label's logit. The caller
    sums the ranks' gradients of the hidden states. Not compiled: the collectives stay in Python.
    """

    part: VocabularyPart
    chunk: int | None = None  # None: all rows at once

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
        inner = partial(chunk_loss_across, self.part)
        weight = weight.to_local() if isinstance(weight, torch.distributed.tensor.DTensor) else weight
        return chunked_cross_entropy(
            hidden, weight, labels, chunk=self.chunk or max(1, len(hidden)), inner=inner, whole=False, **kwargs
        )


def across_ranks(kernel: LossKernel, part: VocabularyPart) -> AcrossRanks:
    """Return the kernel's loss for a head sharded by rows of the vocabulary; NeedsError: a package's loss has none."""
    if isinstance(kernel, Package):
        asked, found = f"{kernel.function.__name__}'s loss kernel", "a vocabulary sharded over ranks"
        raise NeedsError(asked, found, "use fused-loss:impl=chunked")
    return AcrossRanks(part=part, chunk=kernel.chunk if isinstance(kernel, Chunked) else None)


@dataclass(frozen=True, kw_only=True)
class Package(_Kernel):
    """Compute a package's loss sum and gradients in training; `Chunked` computes losses by token, which packages lack,
    and evaluation, which needs no gradients."""

    function: Callable[[Tensor, Tensor, Tensor, int], Tensor]  # (hidden, weight, labels, chunk) -> sum of losses
    chunk: int = 4096

    @cached_property
    def _evaluation(self) -> Chunked:
        return Chunked(options=self.options, chunk=self.chunk)

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
        learns = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
        if not learns or kwargs["reduce"] != "sum":
            return self._evaluation(hidden, weight, labels, **kwargs)
        return self.function(hidden, weight, labels, self.chunk)


def liger(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """Compute linear layer and cross-entropy by Liger's Triton kernel, with the gradients in the forward pass.

    hidden (N, D), weight (V, D), labels (N,) int64 -> () float32, the sum over labels that are not -100. Liger chooses
    chunks of about N * D / V rows: `chunk` is ignored. Sums are in float32. No bias, scale or softcap.
    Source: https://github.com/linkedin/Liger-Kernel, Hsu et al., https://arxiv.org/abs/2410.10989.
    """
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Function

    total = Function.apply(hidden, weight, labels, None, None, IGNORE, 0.0, 0.0, "sum", None, False, torch.float32)[0]
    assert isinstance(total, Tensor)
    return total


# --- The functions.


def cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, scale: float = 1.0,
    softcap: float | None = None, reduce: Reduce = "sum",
) -> Tensor:  # fmt: skip
    """Compute every logit at once: the plain reference.

    Args:
        hidden: (N, D) of a floating type.
        weight: (V, D) of the same type, unless autocast decides.
        labels: (N,) int64, already shifted; -100 is ignored.
        bias: (V,) or None.
        scale: factor of the logits.
        softcap: bound of the logits by a tanh, after the scale.

    Returns:
        float32 (), the sum of the rows' losses; with reduce='token' (N,).
    """
    losses = _losses(hidden, weight, bias, labels, scale, softcap)
    return losses.sum() if reduce == "sum" else losses


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, scale: float = 1.0,
    softcap: float | None = None, reduce: Reduce = "sum", chunk: int = 2048, inner: ChunkLoss | None = None,
    whole: bool = True,
) -> Tensor:  # fmt: skip
    """Compute `cross_entropy` with at most (chunk, V) logits at once; same arguments, shapes and errors.

    With reduce='sum' the forward computes the gradients and saves them for the backward: (N, D) in hidden's type and
    (V, D) in weight's type, summed over chunks in float32. The incoming gradient scales them in place, so a second
    backward through the same graph raises. With reduce='token' the rows' factors are known only in the backward, which
    recomputes the logits from hidden and weight.

    Args:
        chunk: maximum number of rows at a time; chunks have equal sizes, to avoid another shape for a small last chunk.
        inner: replaces `chunk_loss`, e.g. by torch.compile of it.
        whole: False if only `inner` can compute the losses (sharded vocabulary, another loss), also without gradients.
    """
    learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weight, bias))
    settings = _Settings(scale, softcap, chunk, inner or chunk_loss, compute_dtype(hidden), whole)
    if learns and reduce == "sum":
        total: Tensor = _Summed.apply(hidden, weight, bias, labels, settings)  # type: ignore[no-untyped-call]
        return total
    losses: Tensor = _ByToken.apply(hidden, weight, bias, labels, settings)  # type: ignore[no-untyped-call]
    return losses.sum() if reduce == "sum" else losses


def chunk_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, factors: Tensor, scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the losses of some rows, and the gradient of sum(factors * losses) for hidden @ weight.T + bias.

    Args:
        hidden: (n, D), already in weight's type.
        factors: (n,) float32.

    Returns:
        (n,) float32 losses without the factors, 0 where ignored; (n, V) gradient in hidden's type.
    """
    learnt = labels != IGNORE
    z = F.linear(hidden.masked_fill(~learnt[:, None], 0), weight, bias)  # (n, V)
    y = widen(z) * scale
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


def chunk_loss_across(
    part: VocabularyPart, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, factors: Tensor,
    scale: float, softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `chunk_loss` of a vocabulary sharded over ranks: full losses, the gradient of this rank's logits."""
    learnt = labels != IGNORE
    z = F.linear(hidden.masked_fill(~learnt[:, None], 0), weight, bias)  # (n, V / ranks)
    y = widen(z) * scale
    slope: Tensor | float = scale
    if softcap is not None:
        t = torch.tanh(y / softcap)
        y, slope = t * softcap, (1 - t * t) * scale
    most = y.amax(-1)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group=part.group)
    index = labels - part.first
    local = learnt & (index >= 0) & (index < len(weight))
    index = index.where(local, 0)[:, None]
    e = torch.exp(y - most[:, None])
    sums = torch.stack((e.sum(-1), torch.where(local, (y - most[:, None]).gather(1, index).squeeze(1), 0)))
    torch.distributed.all_reduce(sums, group=part.group)
    losses = torch.where(learnt, sums[0].log() - sums[1], 0)
    hit = (torch.arange(len(weight), device=labels.device) == index) & local[:, None]
    gradient = (e / sums[0][:, None] - hit.to(y.dtype)) * torch.where(learnt, factors, 0)[:, None] * slope
    return losses, gradient.to(hidden.dtype)


def _losses(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, scale: float, softcap: float | None
) -> Tensor:
    # An ignored row's hidden values become 0: in the backward 0 * NaN would reach the weight's gradient.
    y = F.linear(hidden.masked_fill((labels == IGNORE)[:, None], 0), weight, bias)
    y = widen(y)  # reuse one name: a second would keep its tensor alive until the loss
    if scale != 1.0:
        y = y * scale
    if softcap is not None:
        y = torch.tanh(y / softcap) * softcap
    # torch's function saves one (N, V) for the backward and needs three there; logsumexp and a gather would need five.
    return F.cross_entropy(y, labels, ignore_index=IGNORE, reduction="none")  # (N,), 0 where ignored


class _Settings(NamedTuple):
    scale: float
    softcap: float | None
    chunk: int
    inner: ChunkLoss
    dtype: torch.dtype  # of the matmuls
    whole: bool = True  # False: only `inner` can compute the losses

    def losses(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
        if self.whole:
            return _losses(hidden, weight, bias, labels, self.scale, self.softcap)
        return self.inner(hidden, weight, bias, labels, labels.to(hidden.dtype), self.scale, self.softcap)[0]


class _Summed(torch.autograd.Function):
    """Sum the losses; compute all gradients while the chunk's logits exist."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        hidden, weight, bias, labels, settings = inputs
        wide = _wide(settings.dtype)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        # Cast now: activations are at their peak between here and the backward.
        factors = (labels != IGNORE).to(wide)
        ctx.gradients = _gradients(ctx.needs_input_grad, hidden, weight, bias, labels, factors, settings, total)
        return total

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("chunked_cross_entropy(reduce='sum') scales its gradients in place: one backward only")
        gradients, ctx.gradients = ctx.gradients, None
        return *(None if t is None else t.mul_(incoming[0]) for t in gradients), None, None


class _ByToken(torch.autograd.Function):
    """Compute losses by row; the backward recomputes each chunk's logits."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        hidden, weight, bias, labels, settings = inputs
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.settings, dtype = settings, settings.dtype
        w, b = weight.to(dtype), None if bias is None else bias.to(dtype)
        out = torch.empty(len(hidden), dtype=_wide(dtype), device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for first, last in _chunks(len(hidden), settings.chunk):
                h = hidden[first:last].to(dtype)
                out[first:last] = settings.losses(h, w, b, labels[first:last])
        return out

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels = ctx.saved_tensors
        factors = torch.where(labels != IGNORE, incoming[0], 0)
        gradients = _gradients(ctx.needs_input_grad, hidden, weight, bias, labels, factors, ctx.settings)
        return *gradients, None, None


def _gradients(
    needs: tuple[bool, ...], hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, factors: Tensor,
    settings: _Settings, total: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Compute the gradients of sum(factors * losses) by chunks, for hidden, weight, bias; add the losses to `total`."""
    wide, dtype = _wide(settings.dtype), settings.dtype
    w, b = weight.to(dtype), None if bias is None else bias.to(dtype)
    dh = torch.zeros_like(hidden) if needs[0] else None
    dw = torch.zeros(weight.shape, dtype=wide, device=weight.device) if needs[1] else None
    db = torch.zeros(weight.shape[0], dtype=wide, device=weight.device) if needs[2] else None
    with torch.autocast(hidden.device.type, enabled=False):
        for first, last in _chunks(len(hidden), settings.chunk):
            h, part, rows = hidden[first:last].to(dtype), labels[first:last], factors[first:last]
            losses, dz = settings.inner(h, w, b, part, rows, settings.scale, settings.softcap)
            learnt = part != IGNORE
            if total is not None:
                total += losses.sum()
            if dh is not None:
                dh[first:last] = torch.where(learnt[:, None], dz @ w, 0)
            if dw is not None:
                h = h.masked_fill(~learnt[:, None], 0)
                if dz.dtype != dw.dtype and dz.is_cuda:  # tensor cores sum in float32: no rounding of each chunk
                    torch.addmm(dw, dz.t(), h, out_dtype=dw.dtype, out=dw)
                else:
                    dw += dz.t() @ h
            if db is not None:
                db += dz.sum(0, dtype=db.dtype)
    return dh, None if dw is None else dw.to(weight.dtype), None if bias is None or db is None else db.to(bias.dtype)


def _chunks(n: int, chunk: int) -> Iterator[tuple[int, int]]:
    if n == 0:
        return
    size = -(-n // -(-n // chunk))
    for first in range(0, n, size):
        yield first, min(first + size, n)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
