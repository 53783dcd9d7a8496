"""Muon: step the blocks' matrices along their orthogonalized momentum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from optrush.errors import NeedsError
from optrush.models.shapes import ModelShape
from optrush.planner.ledger import Rule, WorkItem, add
from optrush.planner.optimizer import OptimizerSpec, States
from optrush.technique import Environment, Numerics, Part, Requirement, Technique, Trainer

ROOM = 1 << 25  # elements updated at a time: their temporaries are small next to a model


@dataclass(frozen=True)
class Muon(Technique):
    """Steps each matrix of the blocks along its orthogonalized momentum; everything else uses AdamW.

    Query, key, value, gate and up are orthogonalized separately, even if one tensor stores several. The step is as
    large as AdamW's: `optim.lr` and `optim.weight_decay` serve both parts.

    Source: https://kellerjordan.github.io/posts/muon/ (Jordan et al.)
    Memory: one value per parameter of the blocks' matrices instead of two; temporaries of 33 million elements.
    Work: 10 r (2 r c + r^2) FLOP per step for each matrix of r <= c rows and columns, whatever the tokens.
    Differs from the source: the step's size is 0.2 sqrt(max(rows, columns)) (https://arxiv.org/abs/2502.16982).
    """

    momentum: Annotated[float, Field(gt=0, lt=1)] = 0.95
    iterations: Annotated[int, Field(ge=1)] = 5

    name = "muon"
    summary = "orthogonalized momentum for the blocks' matrices, AdamW for the rest"
    source = "https://kellerjordan.github.io/posts/muon/"
    numerics = Numerics.DIFFERENT_MATHS
    claims = frozenset({Part.OPTIMIZER})
    searched = False  # changes the weights

    def needs(self, env: Environment) -> Iterator[Requirement]:
        yield env.needs_dense("`muon`")
        yield from env.needs_own_matrices(self.name, "the blocks'")
        do = "take ddp instead, or another optimizer: fused-adamw"
        found = "a technique that shards them over the ranks"
        yield Requirement(not env.sharded, "`muon` orthogonalizes whole matrices", found, do)
        yield env.needs_no_kahan(self.name)

    def optimizer_spec(self, env: Environment) -> OptimizerSpec:
        reason = "momenta, and steps before and after the matmuls, one operator at a time"
        steps = WorkItem("update.steps", reason, "step", values=30.0, role="wide")
        workspace = {}
        if env.shape is not None:  # float32 steps, orthogonalization in bfloat16, on a CPU in float32
            width = 3.0 if env.device.kind == "cuda" else 5.0
            workspace = {"blocks": width * elements_at_once(env.shape, alone=Part.UPDATE in env.claimed)}
        reason = "one momentum per parameter; equal shapes are stepped together"
        return OptimizerSpec(reason, {"blocks": States(1.0)}, loop=False, work={"blocks": steps}, workspace=workspace)

    def predict(self, env: Environment) -> Iterator[Rule]:
        """Yield FLOPs and temporaries; nothing for a model through transformers, whose sizes are unknown here."""
        yield from super().predict(env)
        if (s := env.shape) is not None:
            flop = s.layers * sum(2.0 * r * r * (2 * c + r) for r, c in map(sorted, pieces(s))) * self.iterations
            reason = f"{self.iterations} iterations of three matmuls per matrix"
            launches = 35 * 4 * s.layers
            yield add(WorkItem("update.orthogonal", reason, "step", flop=flop, launches=launches, of=("update",)))

    def optimizer(self, trainer: Trainer) -> int:
        import torch

        from optrush.optim.muon import Muon as Optimizer
        from optrush.optim.muon import Pieces

        names = {t.name: t for t in trainer.trained}
        matrices = {}
        for name, linear in trainer.model.linears():
            if (t := names.get(f"{name}.weight")) is not None:
                matrices[t.name] = Pieces(linear.groups, tuple(rows for _, rows in linear.output_splits))
        if not matrices:
            held = f"no trained linear in the blocks of this {trainer.hf['model_type']} model"
            do = "take --with fused-adamw or --with adam8bit instead"
            raise NeedsError("`muon` orthogonalizes the blocks' matrices", held, do)
        if any(t.local.dtype == torch.bfloat16 for t in trainer.trained):
            self.demand_triton(trainer.env.device)
        options = {"matrices": matrices, "momentum": self.momentum, "iterations": self.iterations, "room": ROOM}
        self.set_optimizer(trainer, Optimizer, **options)
        rest = len(trainer.trained) - len(matrices)
        trainer.notes.append(f"muon steps {len(matrices)} matrices, AdamW the other {rest} parameters")
        return len(matrices)


def pieces(s: ModelShape) -> list[tuple[int, int]]:
    """Rows and columns of the separate matrices of one block."""
    return [(rows, linear.inputs) for linear in s.linears.values() for rows in linear.joined or linear.pieces.values()]


def elements_at_once(s: ModelShape, alone: bool) -> int:
    """Return the most elements updated together: all layers' matrices of a shape, as many as fit in ROOM, or one."""
    stored = [linear.inputs * linear.outputs for linear in s.linears.values()]
    return max(n * (1 if alone else min(s.layers, max(1, ROOM // n))) for n in stored)
