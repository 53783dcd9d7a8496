"""Activation checkpointing: drop a block's saved tensors, and recompute it in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from optrush.planner.ledger import Rule, live, tagged
from optrush.technique import Environment, Numerics, Part, Requirement, Technique, Trainer


@dataclass(frozen=True)
class Recompute(Technique):
    """Saves only the input of every n-th block, and recomputes the block in the backward pass.

    Source: Chen et al., https://arxiv.org/abs/1604.06174
    Memory: B*T*D values per n-th block instead of all its activations, and one live block in the backward pass.
        Compiled under autocast, the cast weights of one of these blocks at a time.
    Work: one more forward pass of every n-th block.
    """

    every: Annotated[int, Field(ge=1)] = 1

    name = "recompute"
    summary = "activation checkpointing of every n-th block"
    source = "https://arxiv.org/abs/1604.06174"
    numerics = Numerics.EXACT
    claims = frozenset({Part.ACTIVATION_CHECKPOINTING})

    def needs(self, env: Environment) -> Iterator[Requirement]:
        found = f"the model has {env.blocks} blocks, so none would be recomputed"
        do = f"take every from 1 to {env.blocks}"
        yield Requirement(self.every <= env.blocks, f"`recompute:every={self.every}`", found, do)

    def predict(self, env: Environment) -> Iterator[Rule]:
        share = env.blocks // self.every / env.blocks
        yield live(tagged("saved"), "saved by one block at a time, while it is recomputed", recomputed=share)
        if Part.COMPILED in env.claimed:  # else autocast keeps them until the micro-batch ends
            yield live(tagged("casts", "blocks"), "compiled blocks cast their weights again", recomputed=share)
        yield live(tagged("forward"), "the forward pass of these blocks runs twice", times=1 + share)

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
            # An attribute of the block: a compiler does not guard on membership in a set of blocks.
            block.runs_again = again  # type: ignore[assignment]
            chosen += again

        def recomputed(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            """Call a block, or its forward; recompute it in the backward pass if it was chosen."""
            # A block, or its forward. Not getattr(call, "__self__", call): compiled by torch 2.11, it returns the
            # forward itself, and nothing would be recomputed, silently.
            block = call if isinstance(call, nn.Module) else call.__self__  # type: ignore[attr-defined]
            if not block.runs_again:
                return through(call, *args, **kwargs)
            # Only the hidden states are an argument: a compiler guards on every field of arguments, and would recompile
            # for every value of `Documents.longest`. The hidden states are not captured, because captured tensors stay
            # on the device even if saved tensors are offloaded.
            states, *rest = args

            def run(states: Any) -> Any:
                return through(call, states, *rest, **kwargs)

            return checkpoint(run, states, use_reentrant=False)

        trainer.model.block_call = recomputed
        return chosen
