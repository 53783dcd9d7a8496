"""NEFTune: noise on the embeddings while training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from optrush.planner.ledger import Rule, WorkItem, add
from optrush.technique import Environment, Numerics, Part, Requirement, Technique, Trainer

if TYPE_CHECKING:
    from torch import Tensor, nn

    from optrush.data.batch import Documents


@dataclass(frozen=True)
class Neftune(Technique):
    """Adds uniform noise up to alpha / sqrt(n D) to each embedding in training, n the tokens of its document.

    Source: Jain et al. 2023, https://arxiv.org/abs/2310.05914
    Memory: 8 bytes per value of the embeddings while the noise is drawn; nothing is saved.
    Work: 3 values read and written for each value of the embeddings.
    Differs from the source: n counts the tokens of a document, also if a row holds several.
    """

    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 5.0

    name = "neftune"
    summary = "adds noise to the embeddings in training"
    source = "https://arxiv.org/abs/2310.05914"
    numerics = Numerics.DIFFERENT_MATHS
    verified_on = ("cpu",)
    searched = False  # changes the loss
    draws = True

    def needs(self, env: Environment) -> Iterator[Requirement]:
        asked, do = "`neftune` counts the tokens of whole documents", "leave one of the two out"
        met = not {Part.CP, Part.PP} & env.claimed
        yield Requirement(met, asked, "a technique that shards tokens or layers over ranks", do)
        found = "a technique that records the step: a replay may repeat the noise"
        yield Requirement(Part.CAPTURE not in env.claimed, "`neftune` draws noise in each step", found, do)

    def predict(self, env: Environment) -> Iterator[Rule]:
        if env.shape is not None:
            reason = "noise drawn, and added to the embeddings"
            yield add(WorkItem("forward.noise", reason, "token", values=3 * env.shape.width, role="wide"))

    def model(self, trainer: Trainer) -> int:
        noise = _Noise(self.alpha, trainer.world.at("tp"))
        trainer.model.register_forward_pre_hook(noise.enter)
        trainer.model.embedding.register_forward_hook(noise.add)
        return 1


class _Noise:
    """Two hooks: on the model, which receives the documents, and on its embedding, which receives only tokens."""

    documents: Documents

    def __init__(self, alpha: float, at: int) -> None:
        """at: this rank's index among ranks that can share the embedded tokens."""
        self.alpha, self.at, self.training = alpha, at, False

    def enter(self, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.documents, self.training = inputs[2], model.training

    def add(self, _: nn.Module, inputs: tuple[Any, ...], embedded: Tensor) -> Tensor | None:
        """Return embedded (B, T, D) with noise, drawn in float32 from the generator that each step seeds.

        Ranks that share tokens draw the same noise for whole rows, and each adds its part of T.
        """
        import torch

        if not self.training:
            return None
        ids = self.documents.ids.long()  # (B, T)
        tokens = torch.zeros_like(ids).scatter_add_(1, ids, torch.ones_like(ids)).gather(1, ids)
        size = self.alpha / (tokens * embedded.shape[-1]).float().sqrt()  # (B, T)
        noise = (torch.rand(*ids.shape, embedded.shape[-1], device=embedded.device) * 2 - 1) * size[..., None]
        here = embedded.shape[1]
        local = noise.narrow(1, self.at * here if here < ids.shape[1] else 0, here)
        return embedded + local.to(embedded.dtype)
