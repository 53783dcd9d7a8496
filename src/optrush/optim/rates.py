"""Step some parameters at a multiple of the learning rate, with any optimizer: LoRA+'s B matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from optrush.optim.adamw import LocalParam, Optimizer


class ScaledRates:
    """An optimizer that steps an inner one twice: some parameters at the rate, others at `ratio` times the rate.

    Source: Hayou et al., https://arxiv.org/abs/2402.12354
    """

    def __init__(
        self, inner: Optimizer, trained: Sequence[LocalParam], ratio: float, faster: Callable[[LocalParam], bool]
    ) -> None:
        self.inner, self.ratio = inner, ratio
        self.reads_host, self.rounding = inner.reads_host, inner.rounding
        self.faster = [faster(t) for t in trained]

    def step(self, lr: Tensor, grad_scale: Tensor, found_inf: Tensor, only: Sequence[int] | None = None) -> None:
        chosen = range(len(self.faster)) if only is None else only
        for fast, rate in ((False, lr), (True, lr * self.ratio)):
            if part := [i for i in chosen if self.faster[i] is fast]:
                self.inner.step(rate, grad_scale, found_inf, only=part)

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        return self.inner.state()

    def release(self) -> None:
        """Free the inner optimizer's memory outside torch."""
        if free := getattr(self.inner, "release", None):
            free()
