"""AdamW over plain local tensors: the same maths on one rank and on a shard, states under canonical names.

Source: Loshchilov and Hutter, https://arxiv.org/abs/1711.05101; the kernels are torch's own functional AdamW, which
takes tensors (no DTensor) and so serves every sharding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from optrush.config import Optim


class Learnt(Protocol):
    """What an optimizer needs of a trained parameter (`job.Trained` is one)."""

    @property
    def name(self) -> str: ...
    @property
    def decays(self) -> bool: ...
    @property
    def local(self) -> Tensor: ...
    @property
    def grad(self) -> Tensor | None: ...


class Optimizer(Protocol):
    """What `update` calls and checkpoints read. State tensors are shaped like the parameter, or one value."""

    reads_host: bool  # it reads the device in each step (and says so in describe())

    def step(self, lr: Tensor, grad_scale: Tensor, found_inf: Tensor) -> None:
        """One update with gradients divided by `grad_scale`; nothing at all changes where `found_inf` is 1."""
        ...

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """parameter's canonical name -> state's name -> local tensor, the very storage (loading copies into it)."""
        ...


class AdamW:
    """Decoupled weight decay; norms and biases never decay (`Trained.decays`).

    Memory: 8 bytes a parameter (two moments in the weight's dtype: 4 bytes in pure bf16), one count a parameter.
    fused: one kernel for all parameters, which unscales, skips and steps without a host read. Otherwise torch's loop
        over parameters, the baseline: it reads rate, scale and flag on the host.
    """

    def __init__(self, trained: Sequence[Learnt], optim: Optim, *, fused: bool) -> None:
        self.trained, self.optim, self.fused = list(trained), optim, fused
        self.reads_host = not fused
        self.mean = [torch.zeros_like(t.local) for t in self.trained]
        self.square = [torch.zeros_like(t.local) for t in self.trained]
        self.count = [torch.zeros((), dtype=torch.float32, device=t.local.device) for t in self.trained]

    def step(self, lr: Tensor, grad_scale: Tensor, found_inf: Tensor) -> None:
        if self.fused:
            self._groups(lr, grad_scale.float(), found_inf.float())
        elif not found_inf.item():
            grads = [t.grad for t in self.trained if t.grad is not None]
            torch._foreach_div_(grads, grad_scale.item())
            self._groups(lr.item(), None, None)

    def _groups(self, lr: float | Tensor, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        o = self.optim
        for decays in (True, False):
            at = [i for i, t in enumerate(self.trained) if t.decays == decays and t.grad is not None]
            if not at:
                continue
            with torch.no_grad():
                torch_adamw(
                    [self.trained[i].local for i in at],
                    [g for i in at if (g := self.trained[i].grad) is not None],
                    [self.mean[i] for i in at],
                    [self.square[i] for i in at],
                    [],
                    [self.count[i] for i in at],
                    foreach=False, fused=self.fused, grad_scale=grad_scale, found_inf=found_inf,
                    amsgrad=False, beta1=o.betas[0], beta2=o.betas[1], lr=lr,
                    weight_decay=o.weight_decay if decays else 0.0, eps=o.eps, maximize=False,
                )  # fmt: skip

    def state(self) -> dict[str, dict[str, Tensor]]:
        rows = zip(self.trained, self.mean, self.square, self.count)
        return {t.name: {"mean": m, "square": s, "count": c} for t, m, s, c in rows}
