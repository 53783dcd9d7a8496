"""Batches prepared by worker processes while the device computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from optrush.technique import Environment, Numerics, Requirement, Technique, Trainer


@dataclass(frozen=True)
class Loader(Technique):
    """Worker processes gather (or tokenize) and pack batches ahead; page-locked memory lets a GPU fetch them.

    `pinned` unset means: on a GPU. The batches and their order do not depend on it.

    Source: torch.utils.data, https://docs.pytorch.org/docs/stable/data.html#multi-process-data-loading
    Memory: workers x prefetch steps of batches on the host, about 24 bytes per slot.
    Work: none on the device; host work between two steps now overlaps with them.
    """

    workers: Annotated[int, Field(ge=1)] = 2
    prefetch: Annotated[int, Field(ge=1)] = 2
    pinned: bool | None = None

    name = "loader"
    summary = "worker processes prepare batches ahead, in page-locked memory"
    source = "https://docs.pytorch.org/docs/stable/data.html#multi-process-data-loading"
    numerics = Numerics.EXACT
    searched = False  # the plan does not model the host's work

    def needs(self, env: Environment) -> Iterator[Requirement]:
        if self.pinned:
            yield env.needs_gpu("loader: pinned")

    def data(self, trainer: Trainer) -> int:
        from optrush.data.sampler import Loading

        pinned = trainer.env.device.kind == "cuda" if self.pinned is None else self.pinned
        trainer.loading = Loading(self.workers, self.prefetch, pinned)
        return 1
