"""AdamW whose two moments take a byte each, or half a byte."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from optrush.planner.ledger import Role, WorkItem
from optrush.planner.optimizer import OptimizerSpec, States
from optrush.technique import Environment, Numerics, Part, Requirement, Technique, Trainer


class AdamInBits(Technique):
    """Base: moments in codes, decoded and encoded in the kernel of the update."""

    numerics = Numerics.DIFFERENT_MATHS
    claims = frozenset({Part.OPTIMIZER})
    searched = False
    last_resort = True
    bits: ClassVar[Literal[8, 4]]
    role: ClassVar[Role]  # of its codes with their scales
    kept: ClassVar[str]
    codes: ClassVar[tuple[float, str]]  # reading and writing them: values moved in the same time, and why

    def needs(self, env: Environment) -> Iterator[Requirement]:
        yield env.needs_no_kahan(self.name)
        yield env.needs_whole_rows(self.name)

    def quality(self, env: Environment) -> str:
        return f"{self.bits}-bit moments"

    def optimizer_spec(self, env: Environment) -> OptimizerSpec:
        values, why = self.codes
        codes = WorkItem("update.codes", f"codes read and written: {why}", "step", values=values, role=self.role)
        states = {"*": States(role=self.role)}
        return OptimizerSpec(self.kept, states, loop=False, moved=3.0, work={"*": codes})  # weights and gradients

    def optimizer(self, trainer: Trainer) -> int:
        from optrush.optim import adam8bit

        self.demand_triton(trainer.env.device)
        return self.set_optimizer(trainer, adam8bit.Adam8bit if self.bits == 8 else adam8bit.Adam4bit)


@dataclass(frozen=True)
class Adam8bit(AdamInBits):
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
    summary = "AdamW with 8-bit moments, all parameters in one kernel, no wait for the GPU"
    source = "https://arxiv.org/abs/2110.02861"
    bits = 8
    role = "code"
    kept = "a byte for each moment, and a float32 scale for 256 of them"
    codes = (25.0, "230 instructions a value, as long as 25 bytes take (an H200; others assumed)")


@dataclass(frozen=True)
class Adam4bit(AdamInBits):
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
    summary = "AdamW with 4-bit moments, all parameters in one kernel, no wait for the GPU"
    source = "https://arxiv.org/abs/2309.01507"
    bits = 4
    role = "nibble"
    kept = "half a byte for each moment, and a float32 scale for 128 of them"
    codes = (38.0, "180 instructions a value, as long as 20 bytes take (by adam8bit's; not measured)")
