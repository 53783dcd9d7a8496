"""Pipeline parallelism: ranks hold consecutive blocks; micro-batches pass through them in sequence."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Annotated, Literal

from pydantic import Field

from optrush.planner.ledger import WAYS, Line, Match, Rule, WorkItem, add, cut, live, tagged
from optrush.technique import Environment, Numerics, Part, Requirement, Technique, Trainer

ELSE = "leave pipeline out"
# Most NCCL channels of a transfer: a waiting one occupies as many multiprocessors (benchmarks/results/2xh200-pipeline).
CHANNELS = "NCCL_MAX_P2P_NCHANNELS", "4"
# torch.distributed.pipelining's schedules for training, and for forward passes, which may be fewer than the stages.
CLASSES = {
    "1f1b": ("1F1B", "GPipe"),
    "interleaved": ("Interleaved1F1B", "Interleaved1F1B"),
    "zero-bubble": ("ZBVZeroBubble", "ZBVZeroBubble"),
}


@dataclass(frozen=True)
class Pipeline(Technique):
    """Gives each of `size` ranks some of the blocks; the first has the embedding, the last the norm and the head.

    Blocks are split by the FLOPs of the head and of a block, so that the largest work of a rank is minimal.
    1f1b: one stage per rank; each alternates one forward and one backward pass as soon as it can.
    interleaved: two stages per rank, each half as long, so that the first pass reaches the last rank sooner.
    zero-bubble: two stages per rank, arranged as a V; weight gradients are computed when a rank would wait.

    Source: Narayanan et al., https://arxiv.org/abs/2104.04473; zero-bubble: Qi et al.,
        https://arxiv.org/abs/2401.10241; the engine is torch.distributed.pipelining
    Memory: weights, gradients and states of a rank's blocks; their activations for all micro-batches in flight, on the
        first rank `size`; receive buffers for every micro-batch of a window.
    Work: that of a rank's blocks; B T D values per micro-batch to the next stage and as many back; idle time, (p - 1)
        of m + p - 1 micro-batches' time with m micro-batches per step on p ranks.
    Differs from the source: documents of packed rows are isolated on every stage; a tied head is a copy of the
        embedding on the last rank, and their gradients are summed.
    """

    size: Annotated[int, Field(ge=2)] = 2
    schedule: Literal["1f1b", "interleaved", "zero-bubble"] = "1f1b"

    name = "pipeline"
    summary = "pipeline parallelism: blocks split over ranks, micro-batches in turn"
    source = "https://arxiv.org/abs/2104.04473"
    numerics = Numerics.SAME_MATHS
    claims = frozenset({Part.PP})
    searched = False

    @property
    def each(self) -> int:
        """Return the stages of a rank."""
        return 1 if self.schedule == "1f1b" else 2

    def axes(self) -> dict[str, int]:
        return {"pp": self.size}

    def mine(self, rank: int) -> tuple[int, ...]:
        """Return the numbers of a rank's stages."""
        if self.schedule == "zero-bubble":
            return rank, 2 * self.size - 1 - rank
        return tuple(range(rank, self.size * self.each, self.size))

    def stages(self, env: Environment) -> list[range]:
        """Return the blocks of each stage; they depend only on model, row length and options."""
        counts = _balanced(self, env.blocks, head_in_blocks(env))
        return [range(*ends) for ends in pairwise(accumulate(counts, initial=0))]

    def needs(self, env: Environment) -> Iterator[Requirement]:
        n, stages = self.size, self.size * self.each
        yield env.needs_mesh(self.name, f"`pipeline: size: {n}` shards the model over {n} ranks")
        found = "the model runs through transformers"
        yield Requirement(env.native, "`pipeline` splits our own decoder into stages", found, ELSE)
        yield env.needs_dense("`pipeline` sends hidden states from stage to stage")
        do = f"take a smaller size, or {ELSE}"
        asked = f"`pipeline: schedule: {self.schedule}` needs at least one block for each of {stages} stages"
        yield Requirement(env.blocks >= stages, asked, f"{env.blocks} blocks", do)
        found = "an objective that compares pairs"
        yield Requirement(not env.paired, "`pipeline` sums losses", found, f"take ddp or fsdp for it, and {ELSE}")
        snug = Part.ROW_WIDTH in env.claimed and Part.COMPILED not in env.claimed
        found, do = "a technique that gives each micro-batch its own width", f"take packing in its place, or {ELSE}"
        yield Requirement(not snug, "`pipeline` sends hidden states of one shape", found, do)
        if env.data_ranks:  # else the ranks are too few for the mesh
            yield self._filled(env)
        found, do = "a technique that moves or rounds a micro-batch's saved activations", f"take recompute, or {ELSE}"
        met = Part.ACTIVATION_STORAGE not in env.claimed
        yield Requirement(met, "`pipeline` runs several micro-batches at once", found, do)
        if self.schedule == "zero-bubble":
            yield from self._zero_bubble(env)

    def in_flight(self, rank: int, accumulation: int) -> float:
        """Return the number of micro-batches whose activations a rank holds at once, counted over all its blocks."""
        n, m = self.size, accumulation
        if self.schedule == "interleaved":  # counted in its two stages
            rounds = max(1, m // n)
            return min(2 * m, m // rounds + 2 * (n - 1 - rank) + 1) / 2
        return min(m, n - rank if self.schedule == "1f1b" else n)

    def bubble(self, accumulation: int, others: float = 1.0) -> float:
        """Return the share of a window in which a rank waits for others.

        A stage's backward pass takes as long as two forward passes; under zero-bubble each half takes as long as one.

        Args:
            others: mean time of a micro-batch on other ranks over that on this one.
        """
        work = {"1f1b": 1, "interleaved": 2, "zero-bubble": 6}[self.schedule] * accumulation
        idle = self.size - 1
        if self.schedule == "zero-bubble":  # it fills with 2 p - 1 micro-batches
            idle += max(0, 2 * self.size - 1 - accumulation)
        return others * idle / (work + others * idle)

    def predict(self, env: Environment) -> Iterator[Rule]:
        """Yield memory, work, communication and idle time of the pipeline's rank `env.pp_rank`."""
        L, m, rank, stages = env.blocks, env.accumulation, env.pp_rank, self.stages(env)
        numbers = self.mine(rank)
        held = sum(len(stages[number]) for number in numbers)
        begins, ends = 0 in numbers, len(stages) - 1 in numbers
        yield cut(tagged("per-block"), "pp", L / held, f"a rank holds {held} of {L} blocks")
        flight = self.in_flight(rank, m)
        reason = f"{flight:g} micro-batches are in flight"
        yield live(tagged("per-block"), reason, in_flight=flight)
        for way in WAYS:
            yield live(tagged(way), "of a rank's blocks", times=held / L)
        yield from self._ends(env, begins, ends, held / L)
        if env.shape is None:
            return
        D = env.shape.width
        receives, sends = len(numbers) - begins, len(numbers) - ends
        reason = "receive buffers for every micro-batch of a window, D each way"
        yield add(
            Line("received", reason, m * D * (receives + sends), "residual", "always", True),
            Line("window", "tokens, labels, positions, documents of the other micro-batches", 28 * (m - 1), "byte",
                 "always", True),
            WorkItem("sent.forward", "hidden states to the next stage", "token", unit="link", values=D * sends,
                     role="residual", awaited=True),
            WorkItem("sent.backward", "their gradients to the stage before", "token", unit="link", values=D * receives,
                     role="residual", awaited=True),
        )  # fmt: skip
        head = head_in_blocks(env)
        load = held + head * ends
        share = self.bubble(m, (L + head - load) / (self.size - 1) / load)
        reason = f"{share:.0%} of a window's time: {self.size} ranks, {m} micro-batches, {self.schedule}"
        yield add(WorkItem("bubble", reason, "micro", waiting=share))

    def _ends(self, env: Environment, begins: bool, ends: bool, share: float) -> Iterator[Rule]:
        """Yield the parts that only the first or last stage has, and a rank's share of the update."""
        tied, elsewhere = env.shape is not None and env.shape.tied, "on another rank"
        if not ends:
            yield live(tagged("loss"), elsewhere, gone=True)
            yield live(tagged("norm"), elsewhere, gone=True)
            yield live(tagged("head"), elsewhere, gone=True)
        if not (begins or (ends and tied)):
            yield live(tagged("embedding"), elsewhere, gone=True)
        if not (begins and ends):
            yield live(tagged("tied"), "the two gradients are on different ranks", gone=True)
        s = env.shape
        if s is not None:
            outside = s.vocab * s.width
            blocks = s.parameters - outside * (1 if tied else 2)
            share = (share * blocks + outside * (begins + (ends and not (tied and begins)))) / s.parameters
        held: list[Match | str] = [tagged("update"), "casts"]
        held += [tagged("reduce")] if Part.DATA in env.claimed else []
        held += [tagged("gather")] if "dp" in env.sharded else []
        for match in held:
            yield live(match, "of a rank's parameters", times=share)

    def _filled(self, env: Environment) -> Requirement:
        """Return the requirement on the number of micro-batches for the schedule."""
        n, m = self.size, env.accumulation
        rounds = 1 if self.schedule != "interleaved" else max(1, m // n)
        met = m >= n and m % rounds == 0
        near = max(n, m // n * n)
        tokens = near * env.micro_rows * env.data_ranks * env.seq
        asked = f"`pipeline: size: {n}` needs at least {n} micro-batches per step"
        if self.schedule == "interleaved":
            asked = f"`pipeline: schedule: interleaved` needs a step's micro-batches in equal rounds of {n} or more"
        do = f"set batch.tokens to {tokens}, or another batch.micro_tokens, or {ELSE}"
        return Requirement(met, asked, f"{m} micro-batch{'es' * (m != 1)} per step", do)

    def _zero_bubble(self, env: Environment) -> Iterator[Requirement]:
        asked, do = "`pipeline: schedule: zero-bubble` splits backward passes", "take schedule: interleaved"
        found = "a loss kernel that computes its gradients once, for one pass"
        chunked = Part.HEAD in env.claimed or Part.TP in env.claimed  # the loss is computed in chunks
        yield Requirement(not chunked, asked, found, do)
        found = "a technique that shards weights over data ranks: split backward passes miss some gradients"
        yield Requirement("dp" not in env.sharded, asked, found, f"{do}, or ddp")
        found = "compiled blocks, whose backward passes cannot be split"
        yield Requirement(Part.COMPILED not in env.claimed, asked, found, do)

    def process(self, env: Environment) -> int:
        name, value = CHANNELS
        if env.device.kind != "cuda" or "cp" in env.axes or name in os.environ:  # a ring's transfers fill the links
            return 0
        os.environ[name] = value
        return 1

    def split(self, trainer: Trainer) -> int:
        from optrush.models.decoder import Decoder
        from optrush.trainer import pipeline

        model, world = trainer.model, trainer.world
        assert isinstance(model, Decoder), "needs admits no other"
        stages = self.stages(trainer.env)
        mine = {number: stages[number] for number in self.mine(world.at("pp"))}
        tied = bool(model.ties) and self.schedule != "zero-bubble"  # its rank 0 has both ends
        parts = pipeline.split_model(model, mine)
        run = pipeline.Pipeline(trainer, parts, len(stages), *CLASSES[self.schedule])
        if tied:
            run.tie("embedding.weight")
        trainer.roots = [*parts]
        trainer.forward_backward, trainer.eval_loss = run.forward_backward, run.eval_loss
        return len(parts)


def head_in_blocks(env: Environment) -> float:
    """Return the FLOPs of the head's matmul over those of a block: its matmuls, and attention at this length."""
    s = env.shape
    if s is None or env.scored:
        return 0.0
    head = s.width * s.vocab  # multiplications per token, like the values below
    attention = env.seq / 2 * (s.heads * s.head_width + s.attended_width) * s.attention_layers
    return s.layers * head / (s.matrix_parameters - head + attention)


@lru_cache(256)  # a search repeats it for each of its sets
def _balanced(t: Pipeline, blocks: int, head: float) -> tuple[int, ...]:
    """Return the number of blocks of each stage, at least 1.

    Minimize the largest work of a rank, where the head counts as `head` blocks of the last stage; then the most blocks
    that a rank saves over all micro-batches in flight; then the larger of a rank's two stages.
    """
    n, each, last = t.size, t.each, t.size * t.each - 1
    rank = next(r for r in range(n) if last in t.mine(r))
    possible = range(each, blocks - each * (n - 1) + 1)  # blocks of the rank with the head
    largest = min(max(k + head, -(-(blocks - k) // (n - 1))) for k in possible)
    most = [int(largest)] * n
    most[rank] = max(k for k in possible if k + head <= largest)
    held = [each] * n
    for _ in range(blocks - each * n):
        able = (r for r in range(n) if held[r] < most[r])
        held[min(able, key=lambda r: ((held[r] + 1) * t.in_flight(r, 2 * n), -r))] += 1
    counts = [0] * (last + 1)
    for r, total in enumerate(held):
        first, *second = t.mine(r)
        later = head * (r == rank)
        counts[first] = min(range(1, total), key=lambda k: max(k, total - k + later)) if second else total
        for number in second:
            counts[number] = total - counts[first]
    return tuple(counts)
