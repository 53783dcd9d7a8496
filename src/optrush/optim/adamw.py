"""AdamW over local tensors: the same mathematics on one rank and on a shard, states under canonical names.

Source: Loshchilov and Hutter, https://arxiv.org/abs/1711.05101. Weights are updated by torch's functional AdamW, which
takes tensors (no DTensor) and so works with every sharding; or by kernels/adamw.py, if bfloat16 weights are not
rounded to nearest, or if one launch on a GPU updates all parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from optrush.config import Optim
from optrush.kernels import adamw as kernel
from optrush.kernels.adamw import Rounding, write_stochastic


class LocalParam(Protocol):
    """An optimizer's interface to a trained parameter (such as `trainer.TrainedParam`): this rank's shard."""

    @property
    def name(self) -> str: ...
    @property
    def decays(self) -> bool: ...
    @property
    def local(self) -> Tensor: ...
    @property
    def grad(self) -> Tensor | None: ...
    @property
    def full_shape(self) -> tuple[int, ...]: ...
    @property
    def offset(self) -> tuple[int, ...]: ...


class Optimizer(Protocol):
    """The trainer's and the checkpoints' interface. State tensors have the parameter's shape, or a single value."""

    reads_host: bool  # each step synchronizes with the device, which describe() reports
    rounding: Rounding  # of bfloat16 weights; must equal the trainer's

    def step(self, lr: Tensor, grad_scale: Tensor, found_inf: Tensor, only: Sequence[int] | None = None) -> None:
        """Update once with the gradients divided by `grad_scale`; skip the update if `found_inf` is 1.

        Args:
            only: indices of trained parameters, ascending; None: all with a gradient.
        """
        ...

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return canonical name -> state name -> local tensor, not copied: loading a checkpoint writes into it."""
        ...


class PageableOptimizer(Optimizer, Protocol):
    """An optimizer with states allocated by a `StateAllocator`."""

    def param_state(self, i: int) -> Mapping[str, Tensor]:
        """Return state name -> local tensor of the i-th parameter."""
        ...


StateAllocator = Callable[[LocalParam, Sequence[int], torch.dtype], Tensor]
"""(parameter, shape, dtype) -> zeros on its device; dimension 0 is the parameter's, or the number of its rows."""


class OptimizerFactory(Protocol):
    """Build an optimizer over parameters."""

    def __call__(
        self, trained: Sequence[LocalParam], *, state_allocator: StateAllocator = ...
    ) -> PageableOptimizer: ...


def allocate_state(t: LocalParam, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a state of zeros on the parameter's device, for the whole run."""
    return torch.zeros(tuple(shape), dtype=dtype, device=t.local.device)


def build_optimizer(trained: Sequence[LocalParam], factory: OptimizerFactory) -> Optimizer:
    """Return one optimizer over all parameters, with its states on the device."""
    return factory(trained)


def param_table(trained: Sequence[LocalParam], optim: Optim, seed: int) -> kernel.ParamTable:
    """Return the table of parameters, on the device of the first one, with counts of zero."""
    device = trained[0].local.device
    decays = [optim.weight_decay if t.decays else 0.0 for t in trained]
    return kernel.ParamTable(
        counts=torch.zeros(len(trained), dtype=torch.float32, device=device),
        decays=torch.tensor(decays, dtype=torch.float64, device=device),
        words=torch.tensor([kernel.key_words(seed, t.name) for t in trained], dtype=torch.int64, device=device),
        spans=[kernel.shard_span(t.full_shape, t.local.shape, t.offset) for t in trained],
    )


class AdamW:
    """Decoupled weight decay; norms and biases never decay (`TrainedParam.decays`).

    Memory: 8 bytes per parameter (two moments in the weight's dtype: 4 bytes in pure bf16, 6 with `kahan`), one count
        per tensor.
    fused: one kernel for all parameters, which unscales, skips and steps without a device synchronization. Otherwise a
        loop over parameters: torch's, the baseline, which reads rate, scale and flag on the host; or, for bfloat16
        weights that are not rounded to nearest, one launch of our kernel per parameter, without a synchronization.
    """

    def __init__(
        self, trained: Sequence[LocalParam], optim: Optim, *, fused: bool, rounding: Rounding = "nearest",
        seed: int = 0, state_allocator: StateAllocator = allocate_state, launch: bool = False,
    ) -> None:  # fmt: skip
        """launch: also update float32 weights by our kernel; torch's writes all gradients once more."""
        self.trained, self.optim, self.fused, self.rounding = list(trained), optim, fused, rounding
        self.allocate = state_allocator
        local = [t.local for t in self.trained]
        self.mean, self.square = (self._states_like(range(len(local))) for _ in range(2))
        # Parameters that our kernel updates, by dtype.
        at: dict[torch.dtype, list[int]] = {}
        for i, w in enumerate(local):
            narrow = w.dtype == torch.bfloat16 and (rounding != "nearest" or (fused and w.is_cuda))
            if narrow or (launch and w.dtype == torch.float32):
                at.setdefault(w.dtype, []).append(i)
        self.reads_host = not fused and sum(map(len, at.values())) < len(local)
        # torch's loop reads each count on the host, like its own optimizer.
        self.count = [torch.zeros((), dtype=torch.float32, device=w.device if fused else "cpu") for w in local]
        self.remainders: dict[int, Tensor] = {}
        self.groups = [(indices, self._group(indices, seed)) for indices in at.values()]

    def _states_like(self, at: Iterable[int]) -> list[Tensor]:
        """Return a state for each of these parameters, in its shape and dtype."""
        return [self.allocate(self.trained[i], self.trained[i].local.shape, self.trained[i].local.dtype) for i in at]

    def _group(self, at: list[int], seed: int) -> kernel.GroupUpdate:
        """Return the update of these parameters, which have the same dtype."""
        trained = [self.trained[i] for i in at]
        rounding: Rounding = self.rounding if trained[0].local.dtype == torch.bfloat16 else "nearest"
        if rounding == "kahan":
            self.remainders = dict(zip(at, self._states_like(at)))
        group = kernel.AdamWGroup(
            weights=[t.local for t in trained], means=[self.mean[i] for i in at], squares=[self.square[i] for i in at],
            remainders=[self.remainders[i] for i in at] if rounding == "kahan" else None,
            params=param_table(trained, self.optim, seed), betas=self.optim.betas,
            eps=torch.tensor(self.optim.eps).item(), rounding=rounding,
        )  # fmt: skip
        for i, count in zip(at, group.params.counts):
            self.count[i] = count  # a view: the group counts
        if not group.params.counts.is_cuda:
            return kernel.ReferenceUpdate(group)
        from optrush.kernels.adamw_triton import AdamWLauncher

        return AdamWLauncher(group)

    def step(self, lr: Tensor, grad_scale: Tensor, found_inf: Tensor, only: Sequence[int] | None = None) -> None:
        chosen = range(len(self.trained)) if only is None else only
        grads = {i: g for i in chosen if (g := self.trained[i].grad) is not None}
        for at, update in self.groups:
            present = [k for k, i in enumerate(at) if i in grads]
            for first, last in kernel.contiguous_ranges(present) if self.fused else [(k, k + 1) for k in present]:
                part = [grads.pop(i).contiguous() for i in at[first:last]]
                update(part, lr, grad_scale.float(), found_inf.bool(), first)
        if self.fused:
            self._torch_step(grads, lr, grad_scale.float(), found_inf.float())
        elif grads and not found_inf.item():
            torch._foreach_div_(list(grads.values()), grad_scale.item())
            self._torch_step(grads, lr.item(), None, None)

    def _torch_step(
        self, grads: Mapping[int, Tensor], lr: float | Tensor, grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """Update parameters by torch's AdamW; `grads`: index -> gradient. None: already unscaled, and finite."""
        o = self.optim
        for decays in (True, False):
            at = [i for i in grads if self.trained[i].decays == decays]
            if not at:
                continue
            with torch.no_grad():
                torch_adamw(
                    [self.trained[i].local for i in at], [grads[i] for i in at], [self.mean[i] for i in at],
                    [self.square[i] for i in at], [], [self.count[i] for i in at], foreach=False, fused=self.fused,
                    grad_scale=grad_scale, found_inf=found_inf, amsgrad=False, beta1=o.betas[0], beta2=o.betas[1],
                    lr=lr, weight_decay=o.weight_decay if decays else 0.0, eps=o.eps, maximize=False,
                )  # fmt: skip

    def state(self) -> dict[str, dict[str, Tensor]]:
        return {t.name: self.param_state(i) for i, t in enumerate(self.trained)}

    def param_state(self, i: int) -> dict[str, Tensor]:
        states = {"mean": self.mean[i], "square": self.square[i], "count": self.count[i]}
        if i in self.remainders:
            states["compensation"] = self.remainders[i]
        return states


def write_rounded(
    target: Tensor, value: Tensor, found_inf: Tensor, key: Tensor, shift: int = 0, first: int = 0, *, rounding: str
) -> None:
    """Write like `write_stochastic`, by a kernel on a GPU; or rounded to nearest."""
    if rounding == "nearest" or target.dtype == torch.float32:
        target.copy_(torch.where(found_inf, target, value.view_as(target).to(target.dtype)))
    elif target.is_cuda:
        from optrush.kernels.adamw_triton import launch_stochastic  # a CPU build of torch has no triton

        launch_stochastic(target, value, found_inf, key, shift, first)
    else:
        write_stochastic(target, value, found_inf, key, shift, first)


class MatrixOptimizer:
    """Base of matrix optimizers, which use AdamW for all other parameters; without Kahan rounding."""

    reads_host = False

    def __init__(
        self, trained: Sequence[LocalParam], optim: Optim, matrices: Collection[int], rounding: Rounding, seed: int
    ) -> None:
        """matrices: indices of the parameters that the subclass updates."""
        assert rounding != "kahan"
        self.trained, self.optim = list(trained), optim
        self.rounding: Rounding = rounding
        rest = [i for i in range(len(self.trained)) if i not in matrices]
        self.rest = {i: k for k, i in enumerate(rest)}
        self.adamw = AdamW([self.trained[i] for i in rest], optim, fused=True, rounding=rounding, seed=seed)
        self.write = partial(write_rounded, rounding=rounding)

    def step_rest(self, lr: Tensor, grad_scale: Tensor, found_inf: Tensor, chosen: Iterable[int]) -> None:
        """Update the chosen parameters that the subclass does not update, by AdamW."""
        if rest := [self.rest[i] for i in chosen if i in self.rest]:
            self.adamw.step(lr, grad_scale, found_inf, only=rest)

    def matrix_state(self, i: int) -> dict[str, Tensor]:
        """Return the states of the i-th parameter, which the subclass updates."""
        raise AssertionError("implemented by the optimizer")

    def state(self) -> dict[str, dict[str, Tensor]]:
        return {
            t.name: self.adamw.param_state(self.rest[i]) if i in self.rest else self.matrix_state(i)
            for i, t in enumerate(self.trained)
        }
