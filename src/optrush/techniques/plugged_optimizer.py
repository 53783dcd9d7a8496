"""A user's optimizer: a class of torch.optim, of a file, or of a package."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from optrush.planner.optimizer import OptimizerSpec, States
from optrush.technique import Environment, Numerics, Part, Requirement, Technique, Trainer


@dataclass(frozen=True)
class PluggedOptimizer(Technique):
    """Steps the weights with a given optimizer: an entry point, `FILE.py:NAME` or `MODULE:NAME`.

    use: `torch.optim:Adagrad`, `lion.py:Lion`, or an entry point of the group `optrush.optimizers`.
    options: its keywords. Learning rate and weight decay are the run's.
    states: values that it keeps per trained value, for the plan.

    Source: https://docs.pytorch.org/docs/stable/optim.html
    Memory: `states` values per parameter, in the weights' dtype; a copy of each parameter's gradient.
    Work: one operator at a time, unless the class has its own kernels; each step reads the device.
    """

    use: str | None = None
    options: dict[str, Any] | None = field(default=None, hash=False)
    states: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 2.0

    name = "own-optimizer"
    summary = "your own optimizer: a class of torch.optim, a file or a package"
    source = "https://docs.pytorch.org/docs/stable/optim.html"
    numerics = Numerics.DIFFERENT_MATHS
    verified_on = ("cpu",)
    claims = frozenset({Part.OPTIMIZER})
    searched = False  # changes the weights
    sample = {"use": "torch.optim:Adagrad", "states": 1.0}  # noqa: RUF012

    def needs(self, env: Environment) -> Iterator[Requirement]:
        do = "name one: --with own-optimizer:use=torch.optim:Adagrad, or use=FILE.py:NAME"
        yield Requirement(bool(self.use), "`own-optimizer`", "no `use`, which names the optimizer", do)
        yield env.needs_no_kahan(self.name)
        found, do = "a technique that keeps them elsewhere", "leave one of the two out"
        yield Requirement(Part.STATES not in env.claimed, "`own-optimizer` keeps its own states", found, do)

    def optimizer_spec(self, env: Environment) -> OptimizerSpec:
        return OptimizerSpec(f"states of {self.use}, {self.states:g} per weight", {"*": States(self.states)})

    def optimizer(self, trainer: Trainer) -> int:
        from optrush.objectives.plugged import find, source_of
        from optrush.optim.plugged import plugged_optimizer

        what, made = f"the optimizer `{self.use}`", find("optimizer", self.use or "")
        trained, optim = trainer.trained, trainer.config.optim
        trainer.optimizer = plugged_optimizer(what, made, self.options or {}, trained, optim)
        used = f"{source_of('optimizer', self.use or '')} {self.options or {}}"
        trainer.fingerprints["optimizer"] = hashlib.sha256(used.encode()).hexdigest()
        weights = sum(t.local.numel() for t in trained)
        kept = sum(s.numel() for states in trainer.optimizer.state().values() for s in states.values() if s.dim())
        if weights and abs(kept / weights - self.states) > 0.1:
            fact = f"it keeps {kept / weights:.3g} values per weight, and the plan counts {self.states:g}"
            trainer.notes.append(f"{what}: {fact}: write `states: {kept / weights:.3g}`")
        return 1
