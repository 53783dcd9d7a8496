"""AdamW over plain local tensors: the same maths on one rank and on a shard, states under canonical names.

Source: Loshchilov and Hutter, https://arxiv.org/abs/1711.05101. Weights go through torch's own functional AdamW, which
takes tensors (no DTensor) and so serves every sharding; or through kernels/adamw_update.py, where bfloat16 ones are
rounded other than to the nearest, or all are updated in one launch on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from optrush.config import Optim
from optrush.kernels import adamw as kernel
from optrush.kernels.adamw import Rounding


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
    @property
    def full_shape(self) -> tuple[int, ...]: ...
    @property
    def offset(self) -> tuple[int, ...]: ...


class Zeros(Protocol):
    """Where optimizers get memory for the states of a parameter."""

    def __call__(self, t: Learnt, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeros on the parameter's device; the first dimension is the parameter's, or of all its rows."""
        ...


def zeros_beside(t: Learnt, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """On the device, for good."""
    return torch.zeros(tuple(shape), dtype=dtype, device=t.local.device)


class Optimizer(Protocol):
    """What `update` calls and checkpoints read. State tensors are shaped like the parameter, or one value."""

    reads_host: bool  # it reads the device in each step (and says so in describe())
    rounding: Rounding  # how it rounds bfloat16 weights: what the job asks for, or the run is refused

    def step(self, lr: Tensor, grad_scale: Tensor, found_inf: Tensor, only: Sequence[int] | None = None) -> None:
        """One update with gradients divided by `grad_scale`; nothing at all changes where `found_inf` is 1.

        Args:
            only: these of the trained parameters, by ascending index; None: all that have a gradient.
        """
        ...

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """parameter's canonical name -> state's name -> local tensor, the very storage (loading copies into it)."""
        ...


class Housed(Optimizer, Protocol):
    """An optimizer whose states may lie anywhere: it asks `Zeros` for them, and has them by the parameter's index."""

    def held(self, i: int) -> Mapping[str, Tensor]:
        """state's name -> local tensor, of the i-th parameter."""
        ...


class Make(Protocol):
    """What makes an optimizer over parameters, its states where `zeros` gives them memory."""

    def __call__(self, trained: Sequence[Learnt], *, zeros: Zeros) -> Housed: ...


def whole(trained: Sequence[Learnt], make: Make) -> Optimizer:
    """One optimizer over all, its states on the device."""
    return make(trained, zeros=zeros_beside)


class AdamW:
    """Decoupled weight decay; norms and biases never decay (`Trained.decays`).

    Memory: 8 bytes a parameter (two moments in the weight's dtype: 4 bytes in pure bf16, 6 with `kahan`), one count a
        parameter.
    fused: one kernel for all parameters, which unscales, skips and steps without a host read. Otherwise a loop over
        parameters: torch's, the baseline, which reads rate, scale and flag on the host; or, of bfloat16 weights that
        are not rounded to the nearest, one launch of our kernel for each, which reads nothing there.
    """

    def __init__(
        self,
        trained: Sequence[Learnt],
        optim: Optim,
        *,
        fused: bool,
        rounding: Rounding = "nearest",
        seed: int = 0,
        zeros: Zeros = zeros_beside,
        launch: bool = False,
    ) -> None:
        """launch: float32 weights by our kernel, too; torch's writes all gradients once more."""
        self.trained, self.optim, self.fused, self.rounding, self.zeros = list(trained), optim, fused, rounding, zeros
        local = [t.local for t in self.trained]
        self.mean, self.square = (self._beside(range(len(local))) for _ in range(2))
        # The parameters that torch's AdamW does not serve, by dtype; what updates them.
        at: dict[torch.dtype, list[int]] = {}
        for i, w in enumerate(local):
            narrow = w.dtype == torch.bfloat16 and (rounding != "nearest" or (fused and w.is_cuda))
            if narrow or (launch and w.dtype == torch.float32):
                at.setdefault(w.dtype, []).append(i)
        self.reads_host = not fused and sum(map(len, at.values())) < len(local)
        # torch's loop reads each count on the host, where its own optimizer keeps them, too.
        self.count = [torch.zeros((), dtype=torch.float32, device=w.device if fused else "cpu") for w in local]
        self.remainders: dict[int, Tensor] = {}
        self.groups = [(mine, self._group(mine, seed)) for mine in at.values()]

    def _beside(self, at: Iterable[int]) -> list[Tensor]:
        """A state shaped like each of these parameters."""
        return [self.zeros(self.trained[i], self.trained[i].local.shape, self.trained[i].local.dtype) for i in at]

    def _group(self, at: list[int], seed: int) -> kernel.Update:
        """What updates these parameters, all of one dtype."""
        mine = [self.trained[i] for i in at]
        device, dtype = mine[0].local.device, mine[0].local.dtype
        rounding: Rounding = self.rounding if dtype == torch.bfloat16 else "nearest"
        if rounding == "kahan":
            self.remainders = dict(zip(at, self._beside(at)))
        decays = [self.optim.weight_decay if t.decays else 0.0 for t in mine]
        words = [kernel.key_words(seed, t.name) for t in mine]
        group = kernel.Group(
            weights=[t.local for t in mine],
            means=[self.mean[i] for i in at],
            squares=[self.square[i] for i in at],
            counts=torch.zeros(len(at), dtype=torch.float32, device=device),
            remainders=[self.remainders[i] for i in at] if rounding == "kahan" else None,
            decays=torch.tensor(decays, dtype=torch.float64, device=device),
            words=torch.tensor(words, dtype=torch.int64, device=device),
            spans=[kernel.span(t.full_shape, t.local.shape, t.offset) for t in mine],
            betas=self.optim.betas,
            eps=torch.tensor(self.optim.eps).item(),
            rounding=rounding,
        )
        for i, count in zip(at, group.counts):
            self.count[i] = count  # a view: the group counts
        if device.type != "cuda":
            return kernel.Loop(group)
        from optrush.kernels.adamw_triton import Launcher

        return Launcher(group)

    def step(self, lr: Tensor, grad_scale: Tensor, found_inf: Tensor, only: Sequence[int] | None = None) -> None:
        chosen = range(len(self.trained)) if only is None else only
        grads = {i: g for i in chosen if (g := self.trained[i].grad) is not None}
        for at, update in self.groups:
            mine = [k for k, i in enumerate(at) if i in grads]
            for first, last in kernel.runs(mine) if self.fused else [(k, k + 1) for k in mine]:
                here = [grads.pop(i).contiguous() for i in at[first:last]]
                update(here, lr, grad_scale.float(), found_inf.bool(), first)
        if self.fused:
            self._groups(grads, lr, grad_scale.float(), found_inf.float())
        elif grads and not found_inf.item():
            torch._foreach_div_(list(grads.values()), grad_scale.item())
            self._groups(grads, lr.item(), None, None)

    def _groups(
        self, grads: Mapping[int, Tensor], lr: float | Tensor, grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        o = self.optim
        for decays in (True, False):
            at = [i for i in grads if self.trained[i].decays == decays]
            if not at:
                continue
            with torch.no_grad():
                torch_adamw(
                    [self.trained[i].local for i in at],
                    [grads[i] for i in at],
                    [self.mean[i] for i in at],
                    [self.square[i] for i in at],
                    [],
                    [self.count[i] for i in at],
                    foreach=False, fused=self.fused, grad_scale=grad_scale, found_inf=found_inf,
                    amsgrad=False, beta1=o.betas[0], beta2=o.betas[1], lr=lr,
                    weight_decay=o.weight_decay if decays else 0.0, eps=o.eps, maximize=False,
                )  # fmt: skip

    def state(self) -> dict[str, dict[str, Tensor]]:
        return {t.name: self.held(i) for i, t in enumerate(self.trained)}

    def held(self, i: int) -> dict[str, Tensor]:
        found = {"mean": self.mean[i], "square": self.square[i], "count": self.count[i]}
        if i in self.remainders:
            found["compensation"] = self.remainders[i]
        return found
