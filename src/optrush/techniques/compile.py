"""torch.compile, one block at a time and the loss, with fixed shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from optrush.technique import Numerics, Technique

if TYPE_CHECKING:
    from optrush.job import Job


@dataclass(frozen=True)
class Compile(Technique):
    """Compiles each block in place, and the head's kernel as far as it allows.

    Equal blocks share one compilation, so it costs one block's time, not the model's.

    Source: Ansel et al., https://doi.org/10.1145/3620665.3640366
    Memory: what elementwise operators between products saved is recomputed in their fused backward.
    Work: unchanged FLOPs; elementwise operators read and write memory once a fused group.
    """

    mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"

    name = "compile"
    summary = "torch.compile, a block at a time and the loss, fixed shapes"
    source = "https://doi.org/10.1145/3620665.3640366"
    numerics = Numerics.SAME_MATHS
    proof = "tests/techniques/test_compile.py"
    verified_on = ("cpu", "gpu")

    def compile(self, job: Job) -> int:
        for block in job.model.blocks.values():
            block.compile(fullgraph=job.setup.native, dynamic=False, mode=self.mode)
        head = job.model.head
        head.nll = head.nll.compiled(self.mode)
        return len(job.model.blocks) + 1
