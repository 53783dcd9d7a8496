"""AdamW whose two moments take a byte each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from optrush.planner.ledger import Rule, WorkItem, like, live
from optrush.technique import Environment, Numerics, Part, Requirement, Technique, Trainer


@dataclass(frozen=True)
class Adam8bit(Technique):
    """Keeps mean and root mean square as 8-bit codes with a float32 scale for every 256 values of a row.

    One kernel decodes a block, updates it in float32, encodes it to the nearest codes and writes the weight as the run
    rounds weights. Vectors, and matrices under 4096 elements, keep float32 moments.

    Source: Dettmers et al., https://arxiv.org/abs/2110.02861
    Memory: 2.03 bytes a parameter of states instead of 8, or of 4 under bf16.
    Work: as the fused update, with 4 bytes of states read and written instead of 16; but 230 instructions a value.
    Differs from the source: the second moment's code is of its root; blocks of 256 within rows, not 2048 across them;
        every matrix has codes, embeddings too.
    """

    name = "adam8bit"
    summary = "AdamW with 8-bit moments, all parameters in one kernel, no host read"
    source = "https://arxiv.org/abs/2110.02861"
    numerics = Numerics.DIFFERENT_MATHS
    claims = frozenset({Part.OPTIMIZER})
    searched = False
    last_resort = True

    def needs(self, env: Environment) -> Iterator[Requirement]:
        yield env.needs_no_kahan(self.name)
        yield env.needs_whole_rows(self.name)

    def quality(self, env: Environment) -> str:
        return "8-bit moments"

    def predict(self, env: Environment) -> Iterator[Rule]:
        yield live("states.*", "a byte for each moment, and a float32 scale for 256 of them", role="code")
        yield live("update.loop", "one kernel makes no temporaries", gone=True)
        yield live("update", "weights and gradients only", times=3 / 7)
        why = "codes read and written: 230 instructions a value, as long as 25 bytes take (an H200; others assumed)"
        yield like("states.*", WorkItem("update.codes", why, "step", values=12.5, role="code"))

    def optimizer(self, trainer: Trainer) -> int:
        from optrush.optim.adam8bit import Adam8bit as Optimizer

        self.demand_triton(trainer.env.device)
        return self.set_optimizer(trainer, Optimizer)
