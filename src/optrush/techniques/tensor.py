"""Tensor parallelism: shard the matrices of blocks, embedding and head over ranks that work on the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from optrush.planner import ledger
from optrush.planner.ledger import COLLECTIVE_LAUNCHES, WAYS, Rule, WorkItem, add, cut, like, live, tagged
from optrush.technique import Environment, Numerics, Part, Requirement, Technique, Trainer

if TYPE_CHECKING:
    import torch

    from optrush.data.batch import Batch
    from optrush.models.shapes import ModelShape
    from optrush.models.tensor_parallel import Axis

ELSE = "leave tensor out"


@dataclass(frozen=True)
class TensorParallel(Technique):
    """Gives each of `size` ranks whole heads, a share of the feed-forward width and a share of the vocabulary.

    sequence: between the matmuls each rank holds T / size tokens of the stream, so norms are sharded too.

    Source: Shoeybi et al., https://arxiv.org/abs/1909.08053; sequence: Korthikanti et al.,
        https://arxiv.org/abs/2205.05198
    Memory: weights, gradients and states of matrices / size; heads, gate and up, logits / size; with sequence also the
        stream and the norms' activations; inputs of qkv and gate_up are saved whole.
    Work: matrix FLOPs / size; a gather and a reduce-scatter around attention and around the feed-forward part, in both
        passes: 8 B T D (n-1)/n values per block over the link, for which the matmuls wait.
    Differs from the source: the gathered stream is saved for the backward pass, not gathered again; adapters are whole
        on every rank.
    """

    size: Annotated[int, Field(ge=2)] = 2
    sequence: bool = True

    name = "tensor"
    summary = "tensor parallelism: matrices sharded over ranks with the same rows, residual stream along T"
    source = "https://arxiv.org/abs/1909.08053"
    numerics = Numerics.SAME_MATHS
    claims = frozenset({Part.TP})
    shards = frozenset({"tp"})
    searched = False  # for runs that do not fit otherwise, or with fewer rows per step than ranks

    def axes(self) -> dict[str, int]:
        return {"tp": self.size}

    def needs(self, env: Environment) -> Iterator[Requirement]:
        n, s = self.size, env.shape
        yield env.needs_mesh(self.name, f"`tensor: size: {n}` shards the model over {n} ranks")
        yield Requirement(env.native, "`tensor` shards our own decoder", "the model runs through transformers", ELSE)
        yield env.needs_dense("`tensor` shards the matmuls of a block")
        sinks = s is not None and s.sinks
        yield Requirement(not sinks, "`tensor` shards attention heads", "attention sinks, one per head", ELSE)
        across = s is not None and s.whole_qk_norm
        found = "norms of queries and keys across all heads"
        yield Requirement(not across, "`tensor` shards attention heads", found, ELSE)
        uneven = "" if s is None else next((f"{many:,} {what}" for what, many in _sizes(s) if many % n), "")
        asked = f"`tensor: size: {n}` gives each rank an equal share"
        yield Requirement(not uneven, asked, uneven, f"take a size that divides, or {ELSE}")
        asked, found = "`tensor` with sequence shards rows over ranks", f"`batch.seq: {env.seq}`, not a multiple of {n}"
        met, do = not self.sequence or env.seq % n == 0, f"take a multiple of {n}, or sequence: false"
        yield Requirement(met, asked, found, do)
        snug = Part.ROW_WIDTH in env.claimed and Part.COMPILED not in env.claimed
        found, do = "a technique that gives each micro-batch its own width", "take packing, or sequence: false"
        yield Requirement(not (self.sequence and snug), asked, found, do)
        linears = env.spec.linears.values()
        asked = "`tensor` shards dense matrices"
        found, do = "quantized weights, in blocks that sharding would split", f"leave the quantization out, or {ELSE}"
        yield Requirement(all(linear.weight == "dense" for linear in linears), asked, found, do)
        found, do = "float8 matmuls, scaled by the maximum of a whole matrix", f"take amp or bf16, or {ELSE}"
        yield Requirement(all(linear.matmul != "float8" for linear in linears), asked, found, do)
        found = "fused-kernels:mlp=quack, which needs whole matrices"
        yield Requirement(env.spec.mlp != "quack", asked, found, f"take mlp=triton, or {ELSE}")
        found, do = "an objective that compares pairs", f"take ddp or fsdp for it, and {ELSE}"
        yield Requirement(not env.paired, "`tensor` sums losses", found, do)

    @classmethod
    def variants(cls, env: Environment) -> Iterator[dict[str, Any]]:
        yield from ({"size": n} for n in env.shared_row_sizes)

    def predict(self, env: Environment) -> Iterator[Rule]:
        """Yield a rank's shards, and the stream's communication, for which the matmuls wait."""
        n, L, D = self.size, env.blocks, 0 if env.shape is None else env.shape.width

        for part in (tagged("blocks"), tagged("embedding"), tagged("head")):  # adapters are whole on every rank
            yield cut(part, "tp", n, "a rank holds its rows or columns")
        yield cut("update.loop", "tp", n, "of a rank's rows")
        yield cut(tagged("tied"), "tp", n, "a rank's rows of the vocabulary")
        yield cut(tagged("heads"), "tp", n, "a rank's own heads")
        if env.shape is not None and env.shape.qk_norm:
            for name in ("entering", "scales of", "widened", "normalised"):
                yield cut(f"saved.{name} heads", "tp", n, "a rank's own heads")
        yield cut(tagged("mlp"), "tp", n, "a rank's share of the width")
        yield cut(tagged("vocabulary"), "tp", n, "a rank's share of the vocabulary")
        yield from _loss(env)
        if self.sequence:
            yield cut(tagged("stream"), "tp", n, "a rank's share of the tokens")
        for way in WAYS:  # the host launches the same number of kernels
            cut_too = tagged(way, no=("launches",), but=f"{way}.links")
            yield live(cut_too, "only the rows or columns of this rank", times=1 / n)
        yield live(tagged("loss"), "only the vocabulary of this rank", times=1 / n)
        yield live(tagged("update"), "a rank updates its share", times=1 / n)
        hosts, entering = env.over_hosts("tp")
        reason = "the residual stream, gathered and reduced around attention and MLP"
        for way, ends in zip(WAYS, (0, 4), strict=True):  # the ends' communication is never repeated
            calls = 4 * L + ends
            # Without sequence, one all-reduce instead of a gather and a scatter.
            started = COLLECTIVE_LAUNCHES * calls / (1 if self.sequence else 2)
            yield add(
                WorkItem(f"{way}.links", reason, "token", unit="link", values=calls * D * (n - 1) / n, role="product",
                         of=(way, "exchange"), awaited=True, entering=calls * D * entering,
                         steps=calls * (hosts - 1.0)),
                ledger.launched(way, "links.launches", "the host starts collectives", started, "exchange"),
            )  # fmt: skip

    def split(self, trainer: Trainer) -> int:
        from optrush.models.decoder import Decoder
        from optrush.models.tensor_parallel import split_model

        assert isinstance(trainer.model, Decoder), "needs admits no other"
        return split_model(trainer.model, self._axis(trainer))

    def loss(self, trainer: Trainer) -> int:
        """Shard the chosen loss kernel over the vocabulary; the owner of the head runs before."""
        from optrush.kernels.cross_entropy import across_ranks
        from optrush.models.decoder import Decoder
        from optrush.models.tensor_parallel import vocabulary

        model = trainer.model
        assert isinstance(model, Decoder), "needs admits no other"
        if model.head.weight is not None:  # a pipeline stage may have none
            model.head.nll = across_ranks(model.head.nll, vocabulary(model, self._axis(trainer)))
        return 1

    def wrap_window(self, trainer: Trainer) -> int:
        """Sum the gradients of replicated parameters over the ranks, once per window."""
        from optrush.models.decoder import Decoder
        from optrush.models.tensor_parallel import partial_gradients
        from optrush.trainer.distributed import sum_together

        axis, model, inner = self._axis(trainer), trainer.model, trainer.forward_backward
        assert isinstance(model, Decoder), "needs admits no other"
        names = partial_gradients(model, axis)
        partial = [t for t in trainer.trained if t.name in names]

        def forward_backward(batches: list[Batch], terms: float | torch.Tensor) -> torch.Tensor:
            mean = inner(batches, terms)
            sum_together([t.grad for t in partial if t.grad is not None], axis.group)  # norms': small
            return mean

        trainer.forward_backward = forward_backward
        return len(partial)

    def _axis(self, trainer: Trainer) -> Axis:
        from optrush.models.tensor_parallel import Axis

        assert trainer.world.mesh is not None, "needs admits no run of one process"
        return Axis(trainer.world.mesh["tp"], self.sequence)


def _loss(env: Environment) -> Iterator[Rule]:
    """Yield memory and traffic of the loss over a sharded vocabulary; it communicates, so it is not compiled."""
    if env.teacher is not None or env.scored:
        return
    yield live(tagged("loss", "fusable"), "of another loss", gone=True)
    reason = "logits, exponentials and three terms of their gradient in float32, and a mask, at once, 5.25 V"
    # Without one of a chunk's two gradients in the matmul dtype, which does not exist yet.
    values = 4.75 if Part.HEAD in env.claimed else 5.25
    yield like("head.logits", ledger.at_head("logits.across", reason, values, "wide", "logits"))
    reason = "operators of a chunk, one at a time, in addition to those of a compiled one"
    yield like("head.logits", WorkItem("head.across", reason, "token", values=20.0, role="wide", of=("loss",)))
    if Part.HEAD not in env.claimed and Part.ADAPTERS not in env.claimed:
        yield ledger.head_gradient()


def _sizes(s: ModelShape) -> tuple[tuple[str, int], ...]:
    """Return the sharded parts, and their size."""
    heads, pairs, words = "key/value heads", "gate/up pairs", "entries of the vocabulary"
    return (heads, s.kv_heads), (pairs, s.ff_width), (words, s.vocab)
