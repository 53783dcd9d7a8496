"""Simulates a smaller card: limits the process to its memory."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from optrush.hardware import CONTEXT_BYTES
from optrush.technique import Environment, Numerics, Part, Requirement, Technique

if TYPE_CHECKING:
    from optrush.hardware import Device


@dataclass(frozen=True)
class MemoryCap(Technique):
    """Caps torch's allocator, so that a run fails here if it would fail on a smaller card; the plan uses that size.

    The memory of a CUDA process outside torch's allocator is subtracted from the cap, as in the plan. Exactly one of
    the options must be set.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.set_per_process_memory_fraction.html
    Memory: at most `mib`, or `fraction` of the card, less 800 MiB for the CUDA context.
    Work: unchanged; near the cap the allocator frees and allocates again, which waits for the device.
    """

    fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    mib: Annotated[int, Field(ge=1)] | None = None

    name = "memory-cap"
    sample = {"fraction": 0.5}  # noqa: RUF012
    summary = "limits memory to that of a smaller card, to rehearse a run for it"
    source = "https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.set_per_process_memory_fraction.html"
    numerics = Numerics.EXACT
    claims = frozenset({Part.MEMORY})
    searched = False

    def needs(self, env: Environment) -> Iterator[Requirement]:
        yield env.needs_gpu(self.name)
        sizes = {"fraction": self.fraction, "mib": self.mib}
        given = [f"`{name}: {value}`" for name, value in sizes.items() if value is not None]
        found = " and ".join(given) or "neither `fraction` nor `mib`"
        do = "give exactly one: --with memory-cap:mib=24000"
        yield Requirement(len(given) == 1, "`memory-cap` needs a size", found, do)
        size_bytes, memory_bytes = self._bytes(env.device), env.device.memory_bytes
        if size_bytes is None or memory_bytes is None:
            return
        asked = f"`memory-cap` of {size_bytes >> 20} MiB"
        found = f"{env.device.name} has {memory_bytes >> 20} MiB"
        yield Requirement(size_bytes <= memory_bytes, asked, found, "take less, or leave memory-cap out")
        found = f"{CONTEXT_BYTES >> 20} MiB are for the CUDA context"
        yield Requirement(size_bytes > CONTEXT_BYTES, asked, found, "take more")

    def card(self, device: Device) -> Device:
        size_bytes = self._bytes(device)
        return device if size_bytes is None else dataclasses.replace(device, memory_bytes=size_bytes)

    def process(self, env: Environment) -> int:
        import torch

        size_bytes = env.device.memory_bytes  # already limited to the run's share
        assert size_bytes is not None
        at = int(os.environ.get("LOCAL_RANK", "0"))
        total_bytes = torch.cuda.get_device_properties(at).total_memory
        torch.cuda.set_per_process_memory_fraction((size_bytes - CONTEXT_BYTES) / total_bytes, at)
        return 1

    def _bytes(self, device: Device) -> int | None:
        """Return the memory of the smaller card; None without a size, or if the device's memory is unknown."""
        if self.mib is not None:
            return self.mib << 20
        if self.fraction is None or device.memory_bytes is None:
            return None
        return int(self.fraction * device.memory_bytes)
