"""What can stand in the head's `nll` slot: the loss kernels with their settings. Each knows how to compile itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from optrush.data.batch import IGNORE
from optrush.errors import NeedsError
from optrush.kernels import cross_entropy, linear_cross_entropy
from optrush.kernels.cross_entropy import Reduce


class Nll(Protocol):
    """The slot: see `cross_entropy.nll` for what a call means."""

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        *,
        bias: Tensor | None,
        scale: float,
        softcap: float | None,
        part: object | None,
        weights: Tensor | None,
        reduce: Reduce,
    ) -> Tensor: ...

    def compiled(self, options: dict[str, Any]) -> Nll:
        """The same kernel, compiled as far as it can be, with options of torch.compile."""
        ...


@dataclass(frozen=True)
class _Kernel:
    options: dict[str, Any] | None = field(default=None, hash=False)  # torch.compile's; None runs eagerly

    def compiled(self, options: dict[str, Any]) -> Self:
        return replace(self, options=options)

    def _body(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if self.options is None:
            return function
        compiled: Callable[..., Any] = torch.compile(function, fullgraph=True, dynamic=False, options=self.options)
        return compiled


@dataclass(frozen=True)
class Whole(_Kernel):
    """All logits at once: the baseline. Compiled as a whole."""

    @cached_property
    def _function(self) -> Callable[..., Tensor]:
        return self._body(cross_entropy.nll)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._function(*args, **kwargs)


@dataclass(frozen=True)
class Chunked(_Kernel):
    """At most `chunk` rows of logits at once. Compiled inside a chunk; the loop over chunks stays in Python."""

    chunk: int = 4096

    @cached_property
    def _inner(self) -> Callable[..., Any]:
        return self._body(cross_entropy.rows)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return cross_entropy.chunked_nll(*args, chunk=self.chunk, inner=self._inner, **kwargs)


@dataclass(frozen=True)
class Package(_Kernel):
    """A sum with its gradients in training; evaluation, which makes no gradients, as `Chunked`."""

    function: Callable[[Tensor, Tensor, Tensor, int], Tensor] = (
        linear_cross_entropy.quack
    )  # hidden, weight, labels, chunk
    chunk: int = 4096

    @cached_property
    def _evaluation(self) -> Chunked:
        return Chunked(self.options, self.chunk)

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
        if not (torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)):
            return self._evaluation(hidden, weight, labels, **kwargs)
        if kwargs["reduce"] != "sum" or kwargs["weights"] is not None:
            found = "an objective that weighs tokens or wants their losses one by one"
            raise NeedsError(f"{self.function.__name__}'s loss kernel", found, "take fused-loss:impl=chunked")
        return self.function(hidden, weight, labels, self.chunk)


# --- Linear layer and cross-entropy by Liger's Triton kernel: the gradients are made in the forward pass.


def liger(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """hidden (N, D), weight (V, D), labels (N,) int64 -> () float32, the sum over labels that are not -100.

    It cuts the rows itself, into about N * D / V: `chunk` is not asked. Sums are in float32. No bias, scale, softcap or
    row weights.
    Source: https://github.com/linkedin/Liger-Kernel, Hsu et al., https://arxiv.org/abs/2410.10989.
    """
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Function

    total = Function.apply(hidden, weight, labels, None, None, IGNORE, 0.0, 0.0, "sum", None, False, torch.float32)[0]
    assert isinstance(total, Tensor)
    return total
