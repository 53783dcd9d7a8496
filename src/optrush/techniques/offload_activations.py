"""Activations in host memory between forward and backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from optrush.errors import NeedsError
from optrush.planner.ledger import Rule, live, tagged
from optrush.technique import Environment, Numerics, Part, Requirement, Technique, Trainer

if TYPE_CHECKING:
    from optrush.models.activation_offload import Lane


@dataclass(frozen=True)
class OffloadActivations(Technique):
    """Moves saved activations to pinned host memory on a separate stream, and back one block ahead of use.

    With recompute only the inputs of blocks move. Those of the last `keep` blocks, needed first, stay on the device.

    Source: https://github.com/pytorch/torchtune/blob/main/torchtune/training/_activation_offloading.py
    Memory: on the device the activations of keep + 1 blocks, two at least; the other blocks' in pinned host memory.
    Work: each offloaded byte crosses the link to the host twice, overlapped with computation.
    Differs from the source: whole storages instead of tensors, a block at a time, in pages of pinned memory kept
        for the whole run; nothing is recorded on streams, the caller's stream waits before memory is freed.
    """

    keep: Annotated[int, Field(ge=0)] = 1

    name = "offload-activations"
    summary = "saved activations of all but the last blocks wait in pinned host memory"
    source = "https://github.com/pytorch/torchtune/blob/main/torchtune/training/_activation_offloading.py"
    numerics = Numerics.EXACT
    claims = frozenset({Part.ACTIVATION_STORAGE})
    searched = False  # for rows that do not fit otherwise
    last_resort = True

    def needs(self, env: Environment) -> Iterator[Requirement]:
        yield env.needs_gpu(self.name)
        found, do = (
            f"the model has {env.blocks} blocks, so none would be moved",
            f"take keep from 0 to {env.blocks - 1}",
        )
        yield Requirement(self.keep < env.blocks, f"`offload-activations:keep={self.keep}`", found, do)
        asked = "`offload-activations` hooks saved activations"
        found = "compiled blocks of a transformers model, whose hooks run inside the graph"
        do = "take model.implementation: native, or leave compile out"
        yield Requirement(env.native or Part.COMPILED not in env.claimed, asked, found, do)
        asked = "`offload-activations` copies during a step"
        found = "a technique that records the step: the two together are not tested"
        yield Requirement(Part.CAPTURE not in env.claimed, asked, found, "take one of the two")

    def predict(self, env: Environment) -> Iterator[Rule]:
        reason = f"of {self.keep} blocks, and of one in transit; the others are on the host"
        yield live(tagged("saved"), reason, blocks_on_device=self.keep)
        yield live("input", reason, blocks_on_device=self.keep)
        if Part.COMPILED in env.claimed:  # autocast's copies stay; a compiled block saves them like any tensor
            yield live(tagged("casts", "blocks"), reason, blocks_on_device=self.keep)

    def lane(self, trainer: Trainer) -> Lane:
        """Return the copier."""
        from optrush.models.activation_offload import Streams

        return Streams(trainer.world.device)

    def wrap_step(self, trainer: Trainer) -> int:
        import torch
        from torch import nn

        from optrush.models.activation_offload import Offload

        _check(trainer)
        blocks, inner = trainer.model.blocks, trainer.model.block_call
        offload = Offload(self.lane(trainer), len(blocks), self.keep, take=trainer.host_memory.take)
        numbers = {id(block): int(name) for name, block in blocks.items()}

        def through(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return inner(call, *args, **kwargs)
            block = call if isinstance(call, nn.Module) else call.__self__  # type: ignore[attr-defined]
            with offload.block(numbers[id(block)], (args[1:], kwargs)):
                return inner(call, *args, **kwargs)

        trainer.model.block_call = through
        return len(blocks) - self.keep


def _check(trainer: Trainer) -> None:
    """Raise NeedsError if the model is one graph, or if blocks save outputs outside autograd's hooks."""
    if trainer.model._compiled_call_impl is not None:
        asked, found = "`offload-activations` moves one block at a time", "the model compiled as one graph"
        raise NeedsError(asked, found, "take compile:scope=blocks")
    for block in trainer.model.blocks.values():
        if getattr(block, "keeps_outputs", False) and block._compiled_call_impl is None:
            asked, found = (
                "`offload-activations` moves autograd's saved tensors",
                "uncompiled blocks that save operator outputs separately",
            )
            raise NeedsError(asked, found, "add --with compile, or take recompute instead")
