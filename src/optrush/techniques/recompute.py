"""Activation checkpointing: forget what a block saved, and run it again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from optrush.technique import Need, Numerics, Part, Setup, Technique

if TYPE_CHECKING:
    from optrush.job import Job


@dataclass(frozen=True)
class Recompute(Technique):
    """Every n-th block keeps its input only.

    Source: Chen et al., https://arxiv.org/abs/1604.06174
    Memory: of every n-th block B*T*D values instead of all its activations, and one live block in the backward pass.
    Work: one more forward pass of every n-th block.
    """

    every: Annotated[int, Field(ge=1)] = 1

    name = "recompute"
    summary = "activation checkpointing of every n-th block"
    source = "https://arxiv.org/abs/1604.06174"
    numerics = Numerics.EXACT
    proof = "tests/techniques/test_recompute.py"
    verified_on = ("cpu", "gpu")
    claims = frozenset({Part.SAVED})

    def needs(self, setup: Setup) -> Iterator[Need]:
        yield Need(
            self.every <= setup.blocks,
            f"`recompute:every={self.every}`",
            f"the model has {setup.blocks} blocks, so none would be recomputed",
            f"take every from 1 to {setup.blocks}",
        )

    def recompute(self, job: Job) -> int:
        from torch.utils.checkpoint import checkpoint

        through = job.model.through
        chosen = {block for name, block in job.model.blocks.items() if (int(name) + 1) % self.every == 0}

        def recomputed(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            block = getattr(call, "__self__", call)  # a block, or a block's own forward
            if block not in chosen:
                return through(call, *args, **kwargs)
            return checkpoint(through, call, *args, use_reentrant=False, **kwargs)

        job.model.through = recomputed
        return len(chosen)
