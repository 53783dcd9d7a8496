"""APOLLO: full-parameter training whose optimizer keeps a sketch of each row instead of two moments a parameter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from optrush.models.shapes import ModelShape
from optrush.planner.ledger import Line, Rule, WorkItem, add
from optrush.planner.optimizer import OptimizerSpec, States
from optrush.technique import Environment, Numerics, Part, Requirement, Technique, Trainer

LAUNCHES = 340  # for all matrices together: powers by squaring
ROOM = 1 << 24  # elements of a matrix that are updated at a time: their temporaries are small next to a model


@dataclass(frozen=True)
class Apollo(Technique):
    """Steps each row of a matrix along its own gradient, by the length that AdamW has on a random sketch of it.

    The sketch is `rank` values a row. Every matrix of more than `rank` columns, embeddings too; the rest by AdamW.

    Source: https://arxiv.org/abs/2412.05270 (Zhu et al.)
    Memory: 8 rank / C bytes a parameter of states in rows of C, whatever the weights' type; no momentum.
    Work: 2 rank FLOP a parameter for the sketch; gradients and weights read twice and once, weights written.
    Differs from the source: one length for each row of a fixed sketch by signs, whichever side is longer; embeddings
        and head too; sqrt(C / rank) is counted in; no limit on how fast a norm grows, since the length is AdamW's.
    """

    rank: Annotated[int, Field(ge=1)] = 64

    name = "apollo"
    summary = "scales each gradient row to AdamW's step, estimated by random projection; almost no states"
    source = "https://arxiv.org/abs/2412.05270"
    numerics = Numerics.DIFFERENT_MATHS
    proof = "tests/plugins/test_apollo.py"
    claims = frozenset({Part.OPTIMIZER})
    searched = False  # another path of the weights, and another learning rate

    def needs(self, env: Environment) -> Iterator[Requirement]:
        yield env.needs_dense("`apollo`")
        yield from env.needs_own_matrices(self.name, "the model's")
        yield env.needs_no_kahan(self.name)
        yield env.needs_whole_rows(self.name)

    def optimizer_spec(self, env: Environment) -> OptimizerSpec:
        """Of a model through transformers the rows are not known here: its states are left as AdamW's, too large."""
        why = "gradients once more, and steps one operator at a time"
        steps = WorkItem("update.steps", why, "step", values=15.0, role="wide")
        states, workspace = {}, {}
        if (s := env.shape) is not None:
            kept = s.layers * sum(2.0 * rows * min(columns, self.rank) for rows, columns in matrices(s))
            states["blocks"] = States(kept / s.block_parameters, "wide")
            for part in ends(s):
                states[part] = States(2.0 * min(s.width, self.rank) / s.width, "wide")
            largest = 3.0 * min(ROOM, s.vocab * s.width)  # float32 copies of the rows under way
            workspace = {"blocks": largest, "embedding": largest}
        why = "two moments of a sketch of each row, and some rows at a time"
        return OptimizerSpec(why, states, loop=False, moved=3.0, work={"*": steps}, workspace=workspace)

    def predict(self, env: Environment) -> Iterator[Rule]:
        yield from super().predict(env)
        if (s := env.shape) is None:
            return
        stored = [(s.layers * rows, columns) for rows, columns in matrices(s)] + [(s.vocab, s.width)] * len(ends(s))
        vectors = s.parameters - s.width - sum(rows * columns for rows, columns in stored)
        why = "AdamW: two moments each"
        yield add(Line("states.vectors of blocks", why, 2.0 * vectors, "state", "always", of=("states",)))
        flop = sum(2.0 * rows * columns * self.rank for rows, columns in stored if columns > self.rank)
        launches = LAUNCHES + 40 * (4 * s.layers + 1)
        why = "gradients times signs"
        yield add(WorkItem("update.sketch", why, "step", flop=flop, launches=launches, of=("update",)))

    def optimizer(self, trainer: Trainer) -> int:
        import torch

        from optrush_apollo.optimizer import Apollo as Optimizer

        if any(t.local.dtype == torch.bfloat16 for t in trainer.trained):
            self.demand_triton(trainer.env.device)
        self.set_optimizer(trainer, Optimizer, rank=self.rank, room=ROOM)
        assert isinstance(trainer.optimizer, Optimizer)
        sketched = len(trainer.optimizer.sketched)
        rest = len(trainer.trained) - sketched
        trainer.notes.append(f"apollo sketches {sketched} matrices, AdamW steps the other {rest} parameters")
        return sketched


def matrices(s: ModelShape) -> list[tuple[int, int]]:
    """Rows and columns of the matrices of one block, as they are stored."""
    D, F, q, kv = s.width, s.ff_width, s.heads * s.head_width, s.kv_heads * s.head_width
    return [(q + 2 * kv, D), (D, q), (2 * F, D), (D, F)]


def ends(s: ModelShape) -> tuple[str, ...]:
    """Return the parts outside the blocks that have matrices."""
    return ("embedding",) if s.tied else ("embedding", "head")
