"""Context parallelism: ranks share the tokens of a row, so that longer rows fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from optrush.planner import ledger
from optrush.planner.ledger import WAYS, Line, Role, Rule, Way, WorkItem, add, cut, live, saved, tagged
from optrush.technique import Environment, Numerics, Part, Requirement, Technique

if TYPE_CHECKING:
    from optrush.data.batch import Batch
    from optrush.trainer.trainer import Trainer

FROM = ("masked", "sdpa", "varlen")  # kernels that accept an offset of the queries in a row (kernels/attention.py)
MULTIPLE = 8  # flash attention's head width is a multiple of it


@dataclass(frozen=True)
class Context(Technique):
    """Shards every micro-batch's rows at the model's input; only attention communicates.

    ulysses: exchanges tokens for heads around the attention kernel, which gets whole rows of fewer heads.
    gather: gathers keys and values of whole rows, with a kernel that accepts an offset of its queries.
    ring: passes keys and values from rank to rank, for rows of one document; nothing is whole on any rank.

    Source: Jacobs et al., https://arxiv.org/abs/2309.14509 (ulysses); Llama 3, https://arxiv.org/abs/2407.21783
        (gather); Liu et al., https://arxiv.org/abs/2310.01889 (ring)
    Memory: everything that grows with the tokens / n; gather: also whole keys and values, 2*K*E per token and block.
    Work: / n. Communication for each of a rank's tokens and each block, forward and again backward: ulysses
        2*(H+K)*E*(n-1)/n values, gather 2*K*E*(n-1), ring the same, and its gradients in float32.
    Differs from the source: documents of packed rows are isolated; under gather and ring a rank has a chunk from each
        end of a row, so that causal work is even; ring needs no masks. ddp or fsdp shares the weights, over these
        ranks too.
    """

    size: Annotated[int, Field(ge=2)] = 2
    kind: Literal["ulysses", "gather", "ring"] = "ulysses"

    name = "context"
    summary = "context parallelism: the tokens of a row sharded over ranks (ulysses, gathered keys, ring)"
    source = "https://arxiv.org/abs/2309.14509"
    numerics = Numerics.SAME_MATHS
    claims = frozenset({Part.CP})
    searched = False  # for runs that do not fit otherwise, or with fewer rows per step than ranks

    def axes(self) -> dict[str, int]:
        return {"cp": self.size}

    def needs(self, env: Environment) -> Iterator[Requirement]:
        n, each = self.size, self.size if self.kind == "ulysses" else 2 * self.size
        yield env.needs_mesh(self.name, f"`context: size: {n}` shards the tokens of a row")
        found, do = f"`batch.seq: {env.seq}`", f"take a multiple of {each}"
        yield Requirement(env.seq % each == 0, f"`context` cuts rows into {each} equal chunks", found, do)
        found, do = (
            "the model runs through transformers, whose attention would use only a rank's own tokens",
            "take another model",
        )
        yield Requirement(env.native, "`context` exchanges heads or keys in our own decoder", found, do)
        yield env.needs_dense("`context` shards the tokens of a block", or_experts=True)
        s = env.shape
        if s is not None:
            found = (
                "attention sinks in the model" if s.sinks else f"a sliding window of {s.window} tokens in some layers"
            )
            found = found if s.score_cap is None else "capped attention scores (attn_logit_softcapping)"
            met = not s.sinks and s.score_cap is None and (s.window is None or s.window >= env.seq)
            yield Requirement(met, "`context` attends to all earlier tokens of a document", found, do)
            found = f"RoPE type {s.rope.kind!r}, whose angles depend on the length of a document"
            yield Requirement(not s.rope.by_length, "`context` gives each rank its positions", found, do)
        found = "pairs, whose losses cover whole documents"
        yield Requirement(not env.paired, "`context` sums losses token by token", found, "leave context out")
        fixed = Part.ROW_WIDTH not in env.claimed or Part.COMPILED in env.claimed
        found, do = "a technique that gives each micro-batch its own width", "take packing in its place"
        yield Requirement(fixed, "`context` cuts rows of one width", found, do)
        yield from {"ulysses": self._ulysses, "gather": self._gather, "ring": self._ring}[self.kind](env)

    def _ulysses(self, env: Environment) -> Iterator[Requirement]:
        if env.shape is None:
            return
        tp, n = env.axes.get("tp", 1), self.size
        heads, keys = env.shape.heads // tp, env.shape.kv_heads // tp
        met = heads % n == 0 and (keys % n == 0 or n % keys == 0)
        found = f"{heads} query heads, {keys} key and value heads" + (f", on each of {tp} ranks" if tp > 1 else "")
        asked = f"`context: size: {n}` gives each rank its heads"
        yield Requirement(met, asked, found, "take a size that divides them, or kind: gather")

    def _gather(self, env: Environment) -> Iterator[Requirement]:
        asked, found = (
            "`context:kind=gather` attends from part of a row's queries",
            f"attention:impl={env.spec.attention}",
        )
        yield Requirement(env.spec.attention in FROM, asked, found, f"take one of {', '.join(FROM)}, or kind=ulysses")

    def _ring(self, env: Environment) -> Iterator[Requirement]:
        asked = "`context:kind=ring`"
        met, found = Part.PACKED_ROWS not in env.claimed, "a technique puts several documents into a row"
        yield Requirement(met, f"{asked} needs rows of one document", found, "take kind=gather or ulysses")
        met, found = Part.ATTENTION not in env.claimed, "a technique that chooses another kernel"
        yield Requirement(met, f"{asked} computes attention itself", found, "leave attention out, or take kind=ulysses")
        met, found = Part.COMPILED not in env.claimed, "a technique that compiles a block as one graph"
        yield Requirement(met, f"{asked} communicates inside a block", found, "take kind=ulysses or gather")
        if env.device.kind == "cuda":
            yield env.needs_half(f"{asked} needs matmuls in bf16 or fp16", "take kind=ulysses")
        width = env.shape.head_width if env.shape is not None else 0
        do = "take kind=ulysses or gather"
        yield Requirement(width % MULTIPLE == 0, f"{asked} needs head widths divisible by {MULTIPLE}", f"{width}", do)

    @classmethod
    def variants(cls, env: Environment) -> Iterator[dict[str, Any]]:
        for n in env.shared_row_sizes:
            yield {"size": n}
            if any(not need.met for need in cls(n)._ulysses(env)):
                yield {"size": n, "kind": "gather"}

    def predict(self, env: Environment) -> Iterator[Rule]:
        """Yield a rank's share of memory and work that grow with the tokens, its whole tensors, and the communication.

        Values are per token of all n ranks; each rank has 1/n of them.
        """
        n = self.size
        reason = f"a rank has 1/{n} of the tokens"
        yield cut(tagged("per-token"), "cp", n, reason)
        yield live(tagged("per-token"), reason, times=1 / n)
        if env.shape is None:
            return
        s = env.shape
        q, kv = s.heads * s.head_width, s.kv_heads * s.head_width
        if self.kind == "ulysses":
            keys = max(kv, n * s.head_width)
            each = 2 * (q + keys)
            reason = "heads sent and received, 2 (2 H + 2 K) E, when the feed-forward part is done"
            yield add(Line("exchange", reason, 2 * each, "product", "backward", True, side="scores", of=("heads",)))
            if keys > kv:
                reason, values = "keys and values repeated for more ranks, 2 (n - K) E", 2 * (keys - kv) * env.blocks
                yield add(saved("repeated", reason, values, env.blocks, "heads"))
            reason, hosts = "heads to other ranks, and back", env.over_hosts("cp")[0]
            yield from _exchange(env, reason, each * (n - 1) / n, each * n / hosts, awaited=True)
            yield from _started(env, 2)
        elif self.kind == "gather":
            yield from self._whole_rows(env, q, kv)
            yield from _exchange(env, "keys and values of the other ranks", 2 * kv * (n - 1), 2 * kv * n, awaited=True)
            yield from _started(env, 1)
        else:
            older = env.device.capability >= (9, 0)
            yield live(tagged("scores"), "the kernel keeps no scores: they stay on the chip", gone=True)
            yield live("saved.spread", "heads are repeated while they are read", gone=True)
            reason, unit = "the half behind the diagonal is skipped", "flash2" if older else "attention"
            yield live(tagged("attention"), reason, times=0.5, unit=unit)
            reason = "keys and values held and in transit, and their gradients, 8 K E"
            yield add(Line("ring", reason, 8 * kv, "wide", "backward", True, of=("heads",)))
            yield from _exchange(env, "keys and values to the next rank", 2 * kv * (n - 1), 2 * kv * n)
            yield from _started(env, n - 1)
            reason, values = "and their gradients, back", 2 * kv * n * env.blocks
            yield add(_link(env, "backward", "exchange.gradients", reason, values, values, "wide"))

    def _whole_rows(self, env: Environment, q: int, kv: int) -> Iterator[Rule]:
        n, L = self.size, env.blocks

        reason = "keys and values of the other ranks, 2 K E (n - 1)"
        yield add(saved("whole keys", reason, L * 2 * kv * (n - 1), L, "heads"))
        if env.spec.attention in ("masked", "sdpa") and q > kv:
            reason = "and repeated for each query head, 2 (H - K) E (n - 1)"
            yield add(saved("whole spread", reason, L * 2 * (q - kv) * (n - 1), L, "heads"))
        if env.spec.attention == "sdpa" and Part.PACKED_ROWS not in env.claimed:
            yield add(saved("whole mask", "the mask of a rank's queries, T a slot", L * env.seq, L, "mask"))

    def split(self, trainer: Trainer) -> int:
        from optrush.kernels import attention, context_parallel
        from optrush.models.decoder import Block

        world = trainer.world
        assert world.mesh is not None
        group = world.mesh["cp"].get_group()
        share = context_parallel.Share(group, self.size, world.at("cp"), both_ends=self.kind != "ulysses")
        for block in trainer.model.blocks.values():
            assert isinstance(block, Block)
            if self.kind == "ulysses":
                block.attention = context_parallel.ulysses(block.attention, share)
            elif self.kind == "gather":
                chosen = attention.FROM[trainer.env.spec.attention]
                block.attention = context_parallel.gather(chosen, share)
            else:
                block.attention = context_parallel.ring(share)
        if self.kind == "ring":
            trainer.model.supports_packing = False  # evaluation must not pack either
            trainer.notes.append("context: evaluation uses one document per row (ring)")
        inner, part = trainer.place, share.cut

        def place(batch: Batch) -> Batch:
            tokens, labels, positions = (part(t) for t in (batch.tokens, batch.labels, batch.positions))
            documents = batch.documents
            if documents.filled is not None:  # of a rank's own tokens, for experts; the rest is of whole rows
                documents = documents._replace(filled=part(documents.filled))
            extra = {name: part(t) if name == "weights" else t for name, t in batch.extra.items()}
            local = replace(batch, tokens=tokens, labels=labels, positions=positions)
            return inner(replace(local, documents=documents, extra=extra))

        trainer.place = place
        return len(trainer.model.blocks)


def _exchange(env: Environment, reason: str, values: float, sent: float, awaited: bool = False) -> Iterator[Rule]:
    """Yield each block's communication per token, forward and backward."""
    values, sent = values * env.blocks, sent * env.blocks
    yield add(*(_link(env, way, "exchange", reason, values, sent, awaited=awaited) for way in WAYS))


def _started(env: Environment, calls: int) -> Iterator[Rule]:
    """Yield the host's launch time for this number of collectives per block, each way."""
    launches = ledger.COLLECTIVE_LAUNCHES * calls * env.blocks
    for way in WAYS:
        yield add(ledger.launched(way, "exchange.launches", "the host starts collectives", launches, "exchange"))


def _link(
    env: Environment, way: Way, name: str, reason: str, values: float, sent: float, role: Role = "product",
    awaited: bool = False,
) -> WorkItem:  # fmt: skip
    """Return the link's work for a token's values; if ranks span several hosts, `sent` values enter one."""
    hosts, entering = env.over_hosts("cp")
    return WorkItem(
        f"{way}.{name}", reason, "token", unit="link", values=values, role=role, of=(way, "exchange"), awaited=awaited,
        entering=sent * entering, steps=2.0 * (hosts - 1) * env.blocks,
    )  # fmt: skip
