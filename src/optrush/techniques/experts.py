"""Expert parallelism: ranks share the experts of each layer, and send tokens to the ranks of their experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from optrush.models.shapes import ModelShape
from optrush.planner.ledger import WAYS, Line, Rule, Tag, WorkItem, add, cut, live, saved, tagged
from optrush.technique import Environment, Numerics, Part, Requirement, Technique, Trainer

ELSE = "leave experts out"


@dataclass(frozen=True)
class ExpertParallel(Technique):
    """Gives each of `size` ranks 1 / size of the experts of each layer; each keeps its own rows.

    These are data ranks, or with `over: context` the ranks that share a row, so that no further ranks are needed.
    Rows are sent to the ranks of their experts and back, without dropping or padding. Gradients of experts are summed
    over the ranks with the same experts and other tokens, all others over all ranks with other tokens.

    Source: Lepikhin et al., https://arxiv.org/abs/2006.16668; without dropping: Gale et al.,
        https://arxiv.org/abs/2211.15841
    Memory: weights, gradients and states of experts / size; rows in transit, k D per token each way; experts save
        activations of the received rows: as many as without it if routing is even, else up to size times as many.
    Work: 2 k D (n-1)/n values per token and layer over the link in each pass, for which matmuls wait, and half of that
        in a recomputed forward pass; the host reads the row counts once per layer and micro-batch.
    Differs from the source: no limit on rows per expert; the balance loss is that of a rank's own micro-batch.
    """

    size: Annotated[int, Field(ge=2)] = 2
    over: Literal["data", "context"] = "data"

    name = "experts"
    summary = "expert parallelism: each layer's experts sharded over ranks, tokens sent to them and back"
    source = "https://arxiv.org/abs/2006.16668"
    numerics = Numerics.SAME_MATHS
    claims = frozenset({Part.EP})
    searched = False  # the user decides: its cost depends on how even routing is, which the plan does not know

    def axes(self) -> dict[str, int]:
        return {"ep": self.size} if self.over == "data" else {}

    def needs(self, env: Environment) -> Iterator[Requirement]:
        n, asked = self.size, "`experts` shards the experts of our own decoder"
        yield env.needs_mesh(self.name, f"`experts: size: {n}` shards experts over {n} ranks")
        if self.over == "context":
            found = f"`context: size: {env.axes['cp']}`" if "cp" in env.axes else "no context"
            do = f"take --with context:size={n}, or over: data"
            yield Requirement(env.axes.get("cp") == n, f"`experts: over: context` with `size: {n}`", found, do)
        yield Requirement(env.native, asked, "the model runs through transformers", ELSE)
        if env.shape is None:
            return
        count = 0 if env.shape.experts is None else env.shape.experts.count
        yield Requirement(count > 0, asked, "a model without experts", ELSE)
        do = f"take a size that divides, or {ELSE}"
        yield Requirement(
            count % n == 0, f"`experts: size: {n}` gives each rank the same number", f"{count} experts", do
        )
        found = "quantized experts, stored as one block of bytes"
        dense = all(linear.weight == "dense" for linear in env.spec.linears.values())
        yield Requirement(dense, asked, found, f"take lora without nf4 and int8, or {ELSE}")
        if "dp" in env.sharded:
            ranks = max(n, env.gradient_ranks // env.axes.get("rep", 1))
            asked = f"data sharding splits the {count // n} experts of a rank over {ranks // n} ranks"
            found, do = f"{count} experts for {ranks} ranks", f"take ddp, fsdp with more replicas, or {ELSE}"
            yield Requirement(count % ranks == 0, asked, found, do)

    def predict(self, env: Environment) -> Iterator[Rule]:
        """Yield a rank's experts, rows in transit and communication. Routing is assumed to be even."""
        s, n = env.shape, self.size
        if s is None or s.experts is None:
            return
        e, L, sparse, axis = s.experts, env.blocks, len(s.experts.layers), env.expert_axis
        reason = f"a rank has {e.count // n} of {e.count} experts of a layer"
        for kind in ("weights", "gradients", "states"):
            yield cut(f"{kind}.blocks", axis, 1 / env.blocks_held, reason)
        mine = s.expert_parameters * (1 - 1 / n)  # experts of other ranks
        yield cut("casts.blocks", axis, s.block_matrices / (s.block_matrices - mine), reason)
        yield live("casts", reason, times=1 - mine / (s.block_matrices + s.width * s.vocab))
        if "dp" not in env.sharded:  # else they are counted in a rank's share
            largest, outer = 2 * e.count * s.width * e.ff_width, s.vocab * s.width
            yield cut("update.loop", axis, max(outer, largest) / max(outer, largest / n), reason)
            yield live(tagged("update"), reason, times=1 - mine / s.parameters)
        yield from _fewer(env, s, n)
        k, D = e.active, s.width
        places, share = "the order of received rows, and their weights, 5 k", sparse / L
        rows = "rows before reordering by expert, k D"
        yield add(
            Line("working.arriving", rows, share * k * D, "product", "forward", True),
            Line("feed.arriving", "and their gradients", share * k * D, "product", "backward", True, side="feed"),
            saved("arriving", places, sparse * 5 * k, L, "experts", role="wide"),
        )
        if "dp" in env.sharded and not env.blocks_alone:
            reason = "experts are a group of their own in each layer"
            yield live("gather.launches", reason, times=1 + sparse / (L + 2))
            yield live("gather.reduce.launches", reason, times=1 + sparse / (L + 2))
        reason = "row counts, read by the host in each layer before the exchange, once per micro-batch"
        yield add(WorkItem("counts.reads", reason, "micro", reads=float(sparse)))
        hosts, entering = env.over_hosts(axis)
        for way in WAYS:
            # Twice the moved bytes, as in the baseline, for gathered rows.
            order, moved = "received rows reordered by local expert, and back", 8.0 * k * D * sparse
            yield add(WorkItem(f"{way}.rows.arriving", order, "token", values=moved, role="product", of=(way,)))
        sent: tuple[tuple[str, tuple[Tag, ...], int, str], ...] = (
            ("forward.rows.links", ("forward", "exchange"), 1, "rows to the ranks of their experts"),
            ("returned.links", ("exchange",), 1, "results of the forward pass back, not sent when recomputed"),
            ("backward.rows.links", ("backward", "exchange"), 2,
             "gradients of results to the ranks of their experts, of rows back"),
        )  # fmt: skip
        for name, of, times, reason in sent:
            each = 1.0 * times * k * D * sparse
            yield add(
                WorkItem(
                    name, reason, "token", unit="link", values=each * (n - 1) / n, role="product", of=of,
                    awaited=True, entering=each * n / hosts * entering, steps=2.0 * times * sparse * (hosts - 1),
                )
            )  # fmt: skip

    def split(self, trainer: Trainer) -> int:
        from optrush.models.decoder import Decoder
        from optrush.models.expert_parallel import split_experts

        assert isinstance(trainer.model, Decoder), "needs admits no other"
        assert trainer.world.mesh is not None, "needs admits no run of one process"
        return split_experts(trainer.model, trainer.world.mesh[trainer.env.expert_axis])


def _fewer(env: Environment, s: ModelShape, n: int) -> Iterator[Rule]:
    """Yield how much less the data axes communicate; they count all parameters on all ranks."""
    reason = "a rank's experts, over the ranks with the same ones"

    def less(values: float, ranks: int, part: float) -> float:
        """Return the share of the communication that remains; a collective over n ranks costs 1 + `part` / n."""
        every, same = 1 + part / ranks, 0 if env.blocks_alone else 1 + part / (ranks / n)
        return ((values - s.expert_parameters) * every + s.expert_parameters / n * same) / (values * every)

    if "dp" in env.sharded:
        group = env.gradient_ranks // env.axes.get("rep", 1)
        yield live("gather.blocks", reason, times=less(s.block_parameters, group, -1))
        yield live("gather.blocks.copied", reason, times=less(s.block_parameters, group, 1))
    else:
        group = env.gradient_ranks
    if Part.ADAPTERS not in env.claimed:
        yield live("reduce", reason, times=less(s.parameters, group, -1))
