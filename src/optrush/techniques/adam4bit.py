"""AdamW whose two moments take half a byte each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from optrush.planner.ledger import Rule, WorkItem, like, live
from optrush.technique import Environment, Numerics, Part, Requirement, Technique, Trainer


@dataclass(frozen=True)
class Adam4bit(Technique):
    """Keeps mean and root mean square as 4-bit codes, two a byte, with a float32 scale for every 128 values of a row.

    The kernel and the rounding of weights are the 8-bit AdamW's. Vectors, and matrices under 4096 elements, keep
    float32 moments. What a mean loses to its code would have moved the weight in later steps, and moves it at once.

    Source: https://arxiv.org/abs/2309.01507 (Li et al.)
    Memory: 1.06 bytes a parameter of states instead of 8, or of 4 under bf16.
    Work: as the fused update, with 2.1 bytes of states read and written instead of 16.
    Differs from the source: there what codes take is lost; the second moment's code is of its root, and its scale its
        block's own, where the source takes the smaller of a row's and a column's largest, for which a cut row would
        need the others; every matrix has codes, embeddings too.
    """

    name = "adam4bit"
    summary = "AdamW with 4-bit moments, all parameters in one kernel, no host read"
    source = "https://arxiv.org/abs/2309.01507"
    numerics = Numerics.DIFFERENT_MATHS
    claims = frozenset({Part.OPTIMIZER})
    searched = False
    last_resort = True

    def needs(self, env: Environment) -> Iterator[Requirement]:
        yield env.needs_no_kahan(self.name)
        yield env.needs_whole_rows(self.name)

    def quality(self, env: Environment) -> str:
        return "4-bit moments"

    def predict(self, env: Environment) -> Iterator[Rule]:
        yield live("states.*", "half a byte for each moment, and a float32 scale for 128 of them", role="nibble")
        yield live("update.loop", "one kernel makes no temporaries", gone=True)
        yield live("update", "weights and gradients only", times=3 / 7)
        why = "codes read and written: 180 instructions a value, as long as 20 bytes take (by adam8bit's; not measured)"
        yield like("states.*", WorkItem("update.codes", why, "step", values=19.0, role="nibble"))

    def optimizer(self, trainer: Trainer) -> int:
        from optrush.optim.adam8bit import Adam4bit as Optimizer

        self.demand_triton(trainer.env.device)
        return self.set_optimizer(trainer, Optimizer)
