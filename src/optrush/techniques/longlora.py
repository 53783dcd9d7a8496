"""LongLoRA's shifted sparse attention, in training only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from optrush.planner.ledger import Line, Rule, add, live, saved, tagged
from optrush.technique import Environment, Numerics, Part, Requirement, Technique, Trainer

if TYPE_CHECKING:
    from torch import Tensor

KERNELS = ("masked", "sdpa")  # kernels that take the document ids of each row
ELSE = "leave longlora out"


@dataclass(frozen=True)
class LongLora(Technique):
    """Lets each token attend within a group of G tokens in training, half of the heads shifted by G/2.

    Evaluations are dense. group: G, a divisor of T; by default T / 4, as in the source. The source also trains
    embedding and norms: lora:save=[embed_tokens,norm,input_layernorm,post_attention_layernorm].

    Source: Chen et al., https://arxiv.org/abs/2309.12307
    Memory: saved scores (per token and head) or masks (per slot) take G values instead of T; half of the queries, keys
        and values, and of the output, are saved once more.
    Work: G scores per token and head instead of T; half of queries, keys and values moved there and back.
    Differs from the source: documents of a row are isolated, and so are the start and the end of a row.
    """

    group: Annotated[int, Field(ge=2)] | None = None

    name = "longlora"
    summary = "shifted sparse attention: tokens attend within groups, half of the heads to shifted groups"
    source = "https://arxiv.org/abs/2309.12307"
    numerics = Numerics.DIFFERENT_MATHS
    verified_on = ("cpu",)
    searched = False  # changes the computed values

    def size(self, env: Environment) -> int:
        """Return G."""
        return self.group or env.seq // 4

    def needs(self, env: Environment) -> Iterator[Requirement]:
        """Yield requirements of groups, kernels, axes, objective and model."""
        G, asked = self.size(env), "`longlora`"
        met = G > 0 and G % 2 == 0 and env.seq % G == 0 and env.seq > G
        do = "take a group that is even, divides batch.seq and is smaller"
        yield Requirement(met, f"{asked} splits rows of {env.seq} tokens", f"groups of {G}", do)
        found = "the model runs through transformers"
        yield Requirement(env.native, f"{asked} wraps the attention of our own blocks", found, ELSE)
        found, do = f"attention:impl={env.spec.attention}, which takes documents by their lengths", "take impl=sdpa"
        yield Requirement(env.spec.attention in KERNELS, f"{asked} splits rows into groups", found, do)
        found = "a technique that shards rows or heads"
        met = not {Part.CP, Part.TP} & env.claimed
        yield Requirement(met, f"{asked} needs whole rows and all heads", found, ELSE)
        found = "an objective that compares with a model with dense attention"
        yield Requirement(not (env.paired or env.reference), f"{asked} is dense in evaluation", found, ELSE)
        if env.shape is None:
            return
        s = env.shape
        found = f"{s.heads} heads, and {s.kv_heads} key and value heads"
        met = s.heads % 2 == 0 and (s.kv_heads % 2 == 0 or s.kv_heads == 1)
        yield Requirement(met, f"{asked} shifts half of the heads", found, ELSE)
        other = s.latent or s.delta or s.sinks or s.chunks or s.score_cap or s.window is not None
        found = "latent attention, a delta rule, sinks, windows, chunks or capped scores in the model"
        yield Requirement(not other, f"{asked} needs plain causal attention", found, ELSE)

    def quality(self, env: Environment) -> str:
        return "sparse attention"

    def predict(self, env: Environment) -> Iterator[Rule]:
        """Yield scores and masks of G instead of T, and the extra tensors of the shifted heads."""
        G, L = self.size(env), env.blocks
        share, packed = G / env.seq, Part.PACKED_ROWS in env.claimed
        for work in (tagged("attention"), tagged("scores", no=("heads",))):
            yield live(work, f"within groups of {G} tokens", times=share)
        if env.shape is None:
            return
        s = env.shape
        q, kv = s.heads * s.head_width, s.kv_heads * s.head_width
        masked = "masked" in env.spec.attention
        if masked:
            yield live(tagged("heads", "scores"), f"within groups of {G} tokens", gone=True)
            reason, scores = f"probabilities within groups of {G} tokens, H G, in float32", s.heads * G
            yield add(
                saved("shifted.scores", reason, L * scores, L, "heads", role="wide"),
                saved("shifted.scores.cast", reason, L * scores, L, "heads", role="narrowing"),
                Line("working.shifted", reason, 3 * scores, "wide", "backward", True, side="scores", of=("heads",)),
            )
        else:
            if packed:
                yield live("saved.mask", f"within groups of {G} tokens", gone=True)
            reason, many = f"masks within groups of {G} tokens, G per slot", 2 if packed else 1
            yield add(saved("shifted.mask", reason, L * G * many, L, "mask"))
            if q > kv and not packed:
                reason = "keys and values of the shifted heads repeated for each query head, H - K"
                yield add(saved("shifted.spread", reason, L * (q - kv), L, "heads"))
        reason = "half of the heads in the order of their groups, and the output of both halves"
        yield add(saved("shifted.heads", reason, L * ((q + 2 * kv) / 2 + q), L, "heads"))

    def model(self, trainer: Trainer) -> int:
        """Wrap the attention of all blocks."""
        from optrush.kernels.attention_shifted import shifted
        from optrush.models.decoder import Decoder

        model, group = trainer.model, self.size(trainer.env)
        assert isinstance(model, Decoder)
        blocks = list(model.blocks.values())
        inner: Any = blocks[0].attention

        def attend(q: Tensor, k: Tensor, v: Tensor, documents: Any) -> Tensor:
            """Attend in groups; one function for all blocks, because a compiler builds one graph per function."""
            if not model.training:
                dense: Tensor = inner(q, k, v, documents)
                return dense
            return shifted(inner, q, k, v, documents, group)

        for block in blocks:
            block.attention = attend  # type: ignore[assignment]
        trainer.notes.append(f"longlora: groups of {group} tokens in training; evaluations are dense")
        return len(blocks)
