"""AdamW with two moments of a byte each, or half a byte."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from optrush.planner.ledger import Role, WorkItem
from optrush.planner.optimizer import OptimizerSpec, States
from optrush.technique import Environment, Numerics, Part, Requirement, Technique, Trainer


class AdamInBits(Technique):
    """Base: moments stored as codes, decoded and encoded in the update kernel."""

    numerics = Numerics.DIFFERENT_MATHS
    claims = frozenset({Part.OPTIMIZER})
    searched = False
    last_resort = True
    bits: ClassVar[Literal[8, 4]]
    role: ClassVar[Role]  # role of the codes with their scales
    kept: ClassVar[str]
    codes: ClassVar[tuple[float, str]]  # (values moved in the time of reading and writing the codes, reason)

    def needs(self, env: Environment) -> Iterator[Requirement]:
        yield env.needs_no_kahan(self.name)
        yield env.needs_whole_rows(self.name)

    def quality(self, env: Environment) -> str:
        return f"{self.bits}-bit moments"

    def optimizer_spec(self, env: Environment) -> OptimizerSpec:
        values, reason = self.codes
        codes = WorkItem("update.codes", f"codes read and written: {reason}", "step", values=values, role=self.role)
        states = {"*": States(role=self.role)}
        return OptimizerSpec(self.kept, states, loop=False, moved=3.0, work={"*": codes})  # weights and gradients

    def optimizer(self, trainer: Trainer) -> int:
        from optrush.optim import adam8bit

        self.demand_triton(trainer.env.device)
        return self.set_optimizer(trainer, adam8bit.Adam8bit if self.bits == 8 else adam8bit.Adam4bit)


@dataclass(frozen=True)
class Adam8bit(AdamInBits):
    """Stores mean and root mean square as 8-bit codes with a float32 scale per 256 values of a row.

    One kernel decodes a block, updates it in float32, encodes it to the nearest codes and writes the weight with the
    run's rounding. Vectors, and matrices under 4096 elements, keep float32 moments.

    Source: Dettmers et al., https://arxiv.org/abs/2110.02861
    Memory: 2.03 bytes of states per parameter instead of 8, or of 4 under bf16.
    Work: like the fused update, with 4 bytes of states read and written instead of 16, and 230 instructions per value.
    Differs from the source: encodes the root of the second moment; blocks of 256 within rows, not 2048 across them;
        every matrix has codes, embeddings too.
    """

    name = "adam8bit"
    summary = "AdamW with 8-bit moments in one kernel, without a host synchronization"
    source = "https://arxiv.org/abs/2110.02861"
    bits = 8
    role = "code"
    kept = "one byte per moment, and a float32 scale per 256 of them"
    codes = (25.0, "decode and encode: 230 instructions per value, the time of moving 25 bytes (on an H200)")


@dataclass(frozen=True)
class Adam4bit(AdamInBits):
    """Stores mean and root mean square as 4-bit codes, two per byte, with a float32 scale per 128 values of a row.

    Kernel and rounding of weights are those of the 8-bit AdamW. Vectors, and matrices under 4096 elements, keep float32
    moments. The rounding error of a mean would have moved the weight in later steps, and moves it at once.

    Source: https://arxiv.org/abs/2309.01507 (Li et al.)
    Memory: 1.06 bytes of states per parameter instead of 8, or of 4 under bf16.
    Work: like the fused update, with 2.1 bytes of states read and written instead of 16.
    Differs from the source: applies the rounding error, which the source discards; encodes the root of the second
        moment, scaled per block (the source uses the smaller of a row's and a column's maximum, which a shard lacks);
        every matrix has codes, embeddings too.
    """

    name = "adam4bit"
    summary = "AdamW with 4-bit moments in one kernel, without a host synchronization"
    source = "https://arxiv.org/abs/2309.01507"
    bits = 4
    role = "nibble"
    kept = "half a byte per moment, and a float32 scale per 128 of them"
    codes = (38.0, "decode and encode: 180 instructions per value, the time of moving 20 bytes (not measured)")
