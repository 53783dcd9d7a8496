"""Max-autotune: the compiler times several kernels for each operator, and takes the fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optrush.technique import Environment, Numerics, Part, Technique

if TYPE_CHECKING:
    from optrush.trainer.trainer import Trainer


@dataclass(frozen=True)
class MaxAutotune(Technique):
    """Compiles whatever is compiled with generated products tried beside the library's.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.compile.html (mode "max-autotune-no-cudagraphs")
    Memory: unchanged while training; while compiling, inputs and outputs of the operator that is timed.
    Work: unchanged FLOPs; the first step compiles and times every candidate.
    Differs from the source: never records CUDA graphs, which is a technique of its own; launch settings are chosen
        among a few, not searched by steps of one setting at a time, for which every kernel is compiled over and over.
    """

    name = "max-autotune"
    summary = "the compiler times several kernels for each product and takes the fastest"
    source = "https://docs.pytorch.org/docs/stable/generated/torch.compile.html"
    numerics = Numerics.SAME_MATHS
    proof = "tests/techniques/test_max_autotune.py"
    verified_on = ("cpu",)
    wants = frozenset({Part.COMPILED})

    @classmethod
    def variants(cls, setup: Environment) -> Iterator[dict[str, Any]]:
        yield from ()  # which kernels win is known on the machine only: the plan predicts nothing of it

    def model(self, trainer: Trainer) -> int:
        trainer.compile_options = {"max_autotune": True}  # the compile stage reads them
        trainer.notes.append("max-autotune: the first steps compile and time every candidate: minutes, on a GPU many")
        return 1
