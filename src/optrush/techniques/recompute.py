"""Activation checkpointing: forget what a block saved, and run it again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from optrush.planner.ledger import Rule, live
from optrush.technique import Environment, Numerics, Part, Requirement, Technique

if TYPE_CHECKING:
    from optrush.trainer.trainer import Trainer


@dataclass(frozen=True)
class Recompute(Technique):
    """Every n-th block keeps its input only.

    Source: Chen et al., https://arxiv.org/abs/1604.06174
    Memory: of every n-th block B*T*D values instead of all its activations, and one live block in the backward pass.
        Compiled under autocast, of the casts of the chosen blocks' weights one block's.
    Work: one more forward pass of every n-th block.
    """

    every: Annotated[int, Field(ge=1)] = 1

    name = "recompute"
    summary = "activation checkpointing of every n-th block"
    source = "https://arxiv.org/abs/1604.06174"
    numerics = Numerics.EXACT
    proof = "tests/techniques/test_recompute.py"
    verified_on = ("cpu", "gpu")
    claims = frozenset({Part.ACTIVATION_CHECKPOINTING})

    def needs(self, env: Environment) -> Iterator[Requirement]:
        yield Requirement(
            self.every <= env.blocks,
            f"`recompute:every={self.every}`",
            f"the model has {env.blocks} blocks, so none would be recomputed",
            f"take every from 1 to {env.blocks}",
        )

    def predict(self, env: Environment) -> Iterator[Rule]:
        share = env.blocks // self.every / env.blocks
        yield live("saved.*", "kept by one block at a time, while it runs again", recomputed=share)
        if Part.COMPILED in env.claimed:  # else autocast keeps them until the micro-batch ends
            yield live("casts.blocks*", "compiled blocks cast their weights again", recomputed=share)
        yield live("forward.*", "the forward pass of these blocks runs twice", times=1 + share)

    @classmethod
    def variants(cls, env: Environment) -> Iterator[dict[str, Any]]:
        yield {}
        yield {"every": 2}

    def recompute(self, trainer: Trainer) -> int:
        from torch import nn
        from torch.utils.checkpoint import checkpoint

        through, chosen = trainer.model.block_call, 0
        for name, block in trainer.model.blocks.items():
            again = (int(name) + 1) % self.every == 0
            # Said by the block itself: of a set of blocks a compiler does not see that it holds one and not the other.
            block.runs_again = again  # type: ignore[assignment]
            chosen += again

        def recomputed(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            # A block, or a block's own forward. Asked this way, because getattr(call, "__self__", call) of a forward
            # is the forward again where torch 2.11 compiles it: nothing would be recomputed, and nothing would say so.
            block = call if isinstance(call, nn.Module) else call.__self__  # type: ignore[attr-defined]
            if not block.runs_again:
                return through(call, *args, **kwargs)

            # All but the hidden states is enclosed: what is given as an argument, a compiler looks at field by field,
            # and it would compile again for every value of `Documents.longest`. The hidden states are not: what is
            # enclosed stays on the device, wherever saved tensors are moved meanwhile.
            states, *rest = args

            def run(states: Any) -> Any:
                return through(call, states, *rest, **kwargs)

            return checkpoint(run, states, use_reentrant=False)

        trainer.model.block_call = recomputed
        return chosen
