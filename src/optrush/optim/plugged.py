"""Step this rank's shards with a user's optimizer: a torch.optim class, or one like ours."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from optrush.config import Optim
from optrush.errors import NeedsError
from optrush.kernels.adamw import Rounding
from optrush.objectives.plugged import blamed, call_plugin
from optrush.optim.adamw import LocalParam, Optimizer

# Elementwise classes of torch: the update of a shard is the same as in the full matrix.
ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD")


def plugged_optimizer(
    what: str, made: Callable[..., Any], options: Mapping[str, Any], trained: Sequence[LocalParam], optim: Optim
) -> Optimizer:
    """Return an optimizer over parameters: `made(groups, lr=...)` for a torch class, else `made(trained, optim)`.

    Raises:
        UserError: it cannot be built, or does not support these options or shards.
    """
    if inspect.isclass(made) and issubclass(made, torch.optim.Optimizer):
        return TorchOptimizer(what, made, options, trained, optim)
    inner = call_plugin(what, made, options, trained, optim)
    if missing := [name for name in ("step", "state") if not callable(getattr(inner, name, None))]:
        do = "name a subclass of torch.optim.Optimizer, or a class with step and state (docs/optimizer.md)"
        raise NeedsError(what, f"{type(inner).__name__} has no {' and no '.join(missing)}", do)
    return BlamedOptimizer(what, inner)


class BlamedOptimizer:
    """A user's optimizer with our interface, whose errors name it."""

    def __init__(self, what: str, inner: Any) -> None:
        self.what, self.inner = what, inner
        self.reads_host: bool = getattr(inner, "reads_host", True)
        self.rounding: Rounding = getattr(inner, "rounding", "nearest")

    def step(self, lr: Tensor, grad_scale: Tensor, found_inf: Tensor, only: Sequence[int] | None = None) -> None:
        with blamed(self.what):
            self.inner.step(lr, grad_scale, found_inf, **({} if only is None else {"only": only}))

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        with blamed(self.what):
            states: Mapping[str, Mapping[str, Tensor]] = self.inner.state()
            return states


class TorchOptimizer:
    """A torch.optim.Optimizer over this rank's shards. The run sets its learning rate; each step reads the device.

    States created in the first step must exist before a checkpoint is loaded: a step with a gradient of zeros creates
    them, one parameter at a time. `updates` counts a parameter's steps; before the first one these states are dropped,
    so that the class starts as usual. Numbers among the states are saved as tensors.
    """

    reads_host = True
    rounding: Rounding = "nearest"

    def __init__(
        self, what: str, made: type[torch.optim.Optimizer], options: Mapping[str, Any], trained: Sequence[LocalParam],
        optim: Optim,
    ) -> None:  # fmt: skip
        self.what, self.trained = what, trained
        _check(what, made, options, trained)
        takes = inspect.signature(made).parameters
        self.parameters = [nn.Parameter(t.local) for t in trained]
        groups = []
        for decays in (True, False):
            held = [p for p, t in zip(self.parameters, trained, strict=True) if t.decays is decays and p.numel()]
            decay = {"weight_decay": optim.weight_decay if decays else 0.0} if "weight_decay" in takes else {}
            groups += [{"params": held, **decay}] if held else []
        given = {**({"lr": optim.lr} if "lr" in takes else {}), **options}
        self.inner: torch.optim.Optimizer = call_plugin(what, made, given, groups)
        self.made = {i: dict(self.inner.state[p]) for i, p in enumerate(self.parameters) if p in self.inner.state}
        self.initial = {i: {k: _copy(v) for k, v in s.items()} for i, s in self.made.items()}
        self.facts = self._facts()
        self.saved: list[dict[str, Tensor]] = [{} for _ in trained]
        for i, p in enumerate(self.parameters):
            if p.numel():
                before = p.detach().clone()
                p.grad = torch.zeros_like(p)
                self._step_inner()
                p.data.copy_(before)
                p.grad = None
            self._save(i, torch.zeros((), device=p.device))
            for state in self.saved[i].values():  # not read before the first step
                state.zero_()

    def step(self, lr: Tensor, grad_scale: Tensor, found_inf: Tensor, only: Sequence[int] | None = None) -> None:
        """Update once; see `Optimizer.step`."""
        if found_inf.item():
            return
        for group in self.inner.param_groups:
            group["lr"] = lr.item()
        stepped = []
        for i in range(len(self.trained)) if only is None else only:
            p, grad = self.parameters[i], self.trained[i].grad
            if grad is None or not p.numel():
                continue
            p.grad = (grad / grad_scale).to(p.dtype)
            self._restore(i, p)
            stepped.append(i)
        self._step_inner()
        for i in stepped:
            self.parameters[i].grad = None
            self._save(i, self.saved[i]["updates"] + 1)

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {t.name: saved for t, saved in zip(self.trained, self.saved, strict=True)}

    def _step_inner(self) -> None:
        with blamed(self.what):
            self.inner.step()
        changed = [key for key, value in self._facts().items() if value != self.facts.get(key)]
        if changed:
            found = f"it keeps `{changed[0][1]}` in a parameter group and changes it: checkpoints do not save that"
            raise NeedsError(self.what, found, "keep it as a tensor in self.state[p]")

    def _facts(self) -> dict[tuple[int, str], Any]:
        """Return the numbers and strings in the parameter groups, except the rate."""
        return {
            (n, key): value
            for n, group in enumerate(self.inner.param_groups)
            for key, value in group.items()
            if key != "lr" and isinstance(value, int | float | str)
        }

    def _restore(self, i: int, p: nn.Parameter) -> None:
        """Set the class's states: the saved ones, or before the first step its initial ones."""
        if not self.saved[i]["updates"].item():
            self.inner.state.pop(p, None)
            if i in self.initial:
                self.inner.state[p] = {k: _copy(v) for k, v in self.initial[i].items()}
            return
        held = self.inner.state[p]
        for key, value in held.items():
            if isinstance(value, int | float):
                held[key] = type(value)(self.saved[i][key].item())

    def _save(self, i: int, updates: Tensor) -> None:
        """Store each state as one tensor, which checkpoints read and fill."""
        saved, held = self.saved[i], self.inner.state.get(self.parameters[i], {})
        for key, value in {**held, "updates": updates}.items():
            if value is None:
                continue
            if not isinstance(value, Tensor | int | float):
                found = f"its state `{key}` is a {type(value).__name__}, which checkpoints do not save"
                raise NeedsError(self.what, found, f"keep it as a tensor: self.state[p]['{key}'] = torch.tensor(...)")
            if not _savable(self.trained[i], value):
                found = f"its state `{key}` of {self.trained[i].name} has other rows than this rank's piece"
                raise NeedsError(self.what, found, "use ddp, where each rank has whole parameters")
            new = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
            if key not in saved:
                saved[key] = new.detach()
            elif saved[key] is not value:
                saved[key].copy_(new)
            if isinstance(value, Tensor) and key in held:
                held[key] = saved[key]


def _check(
    what: str, made: type[torch.optim.Optimizer], options: Mapping[str, Any], trained: Sequence[LocalParam]
) -> None:
    """Raise NeedsError for options that the run sets, and for shards if the class may need full matrices."""
    for key in {"lr", "weight_decay"} & options.keys():
        raise NeedsError(what, f"its option `{key}`, which the run sets", f"write `optim.{key}`")
    ours = made.__module__.startswith("torch.optim") and made.__name__ in ELEMENTWISE
    cut = next((t for t in trained if tuple(t.local.shape) != tuple(t.full_shape)), None)
    if cut is not None and not (ours or getattr(made, "elementwise", False)):
        found = f"this rank holds {tuple(cut.local.shape)} of the {tuple(cut.full_shape)} of {cut.name}"
        do = "use ddp, or set `elementwise = True` in the class if it updates each value separately"
        raise NeedsError(what, found, do)


def _savable(t: LocalParam, state: Any) -> bool:
    """Return whether a checkpoint can save a state: it has the shard's shape, its rows, or no dimensions."""
    full, local, shape = tuple(t.full_shape), tuple(t.local.shape), tuple(getattr(state, "shape", ()))
    return local == full or shape in ((), local) or (shape[0] == local[0] and local[1:] == full[1:])


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
