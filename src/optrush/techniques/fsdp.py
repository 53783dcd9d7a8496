"""Fully sharded data parallelism (FSDP2): shard parameters, gradients and optimizer states over the data axis."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from optrush.planner.ledger import Line, Match, Role, Rule, Tag, WorkItem, add, cut, like, live, tagged
from optrush.technique import SUMMED, Environment, Numerics, Part, Requirement, Technique, Trainer

if TYPE_CHECKING:
    from torch import Tensor, nn

# FSDP2's Python time per gather of a group, and per reduction, in launches of plain operators (fitted to micro-batches
# of one row: benchmarks/results/2xh200-cells.jsonl, 4xh200-cells.jsonl).
HOOKS, REDUCTION = 80.0, 30.0


@dataclass(frozen=True)
class Fsdp(Technique):
    """Gathers a block's weights before it runs, frees them after (stage 3) or keeps them to the backward pass (2).

    The head is gathered once per call, whatever the number of loss chunks; a tied head shares its embedding's group.
    sync `last` reduces gradients once per window, and holds whole gradients until then; `each` after every micro-batch.
    With `replicate: N` the model is sharded over 1/N of the ranks and held N times (hybrid sharding): gathers stay
    within a group of neighbouring ranks, and only gradients, reduced there first, cross between groups.

    Source: Zhao et al., https://arxiv.org/abs/2304.11277; stages as in ZeRO, https://arxiv.org/abs/1910.02054
    Memory: 16/n bytes per parameter on n ranks of a group; gathered: two blocks (stage 3) or the whole model (stage 2),
        and the embedding and head; whole gradients while accumulating with sync `last`.
    Work: parameters gathered twice (stage 3) or once (stage 2) per micro-batch, gradients reduced once per sync.
    Differs from the source: gradients are summed, not averaged; the divisor is the target tokens of all ranks.
    """

    stage: Literal[2, 3] = 3
    sync: Literal["last", "each"] = "last"
    replicate: Annotated[int, Field(ge=1)] = 1

    name = "fsdp"
    summary = "parameters, gradients and states sharded over the ranks (FSDP2, ZeRO stage 2 or 3)"
    source = "https://arxiv.org/abs/2304.11277"
    numerics = Numerics.SAME_MATHS
    proof = "tests/golden/test_golden.py"
    claims = frozenset({Part.DATA})
    shards = frozenset({"dp"})

    def axes(self) -> dict[str, int]:
        return {"rep": self.replicate}

    def needs(self, env: Environment) -> Iterator[Requirement]:
        do = "start it with --ranks 2 or torchrun, or leave fsdp out"
        yield Requirement(env.gradient_ranks > 1, "`fsdp` shards the model over several ranks", env.alone, do)
        asked = f"`fsdp: replicate: {self.replicate}` shards the model over the ranks of a group"
        found = f"{env.gradient_ranks} ranks in {self.replicate} groups"
        do = f"take {2 * self.replicate} ranks or another multiple of that, a smaller replicate, or ddp"
        met = env.gradient_ranks % self.replicate == 0 and env.gradient_ranks > self.replicate
        yield Requirement(met, asked, found, do)
        met, found = self.sync == "last" or Part.PP not in env.claimed, "a technique that reduces once per window"
        yield Requirement(met, "`fsdp: sync: each`", found, "leave sync out")

    @classmethod
    def variants(cls, env: Environment) -> Iterator[dict[str, Any]]:
        hosts = env.device.hosts
        for many in (n for n in range(1, hosts + 1) if hosts % n == 0 and n < max(env.ranks, 2)):
            replicas = {} if many == 1 else {"replicate": many}  # gathers stay within fewer hosts
            yield replicas
            yield {"stage": 2, **replicas}
            if env.scarce and env.rows > env.ranks:  # else gradients stay whole until the last micro-batch
                yield {"sync": "each", **replicas}

    def predict(self, env: Environment) -> Iterator[Rule]:
        """Yield shards, whole blocks while they run, and communication."""
        n, L = env.gradient_ranks // self.replicate, env.blocks
        blocks = min(L, 2) if self.stage == 3 and Part.PP not in env.claimed else L
        gathering = "a block's weights are whole while it runs, and the next block's ahead of it"
        freed = self.stage == 3  # after the forward pass, and again after the backward pass
        # A block kept after the forward pass is resharded after its backward pass.
        during: tuple[str, ...] = ("forward", "backward") if freed else ("forward", "head", "backward, last")
        if Part.PP in env.claimed and not freed:  # another micro-batch may still need it
            during = ()
        shared = 1 - env.blocks_alone
        yield cut("weights.blocks", "dp", n * env.blocks_held, gathering, gathered=blocks * shared, during=during)
        ends = "embedding and head are whole while they are used"
        yield cut(tagged("weights", no=("blocks", "embedding")), "dp", n, ends, gathered=1)
        tied = env.shape is None or env.shape.tied
        # While a block runs forward, an untied embedding is already resharded, and the head not yet gathered.
        during = ("backward, embedding",) if freed and not tied else ()
        yield cut("weights.embedding", "dp", n, ends, gathered=1, during=during)
        held = 1 / env.axes.get("tp", 1)  # a rank's share of its group's values
        if not tied:  # a tied head is gathered with the embedding, before activations exist
            reason = "the head's gather buffer, kept until the next gather"
            arriving = Line("head.arriving", reason, 0.5 * held, "product", "head", of=("loss",))
            yield like(tagged("weights", no=("blocks",)), arriving)
        reduced = env.accumulation == 1 or self.sync == "each"
        cuts: list[tuple[Tag, str, float]] = [("states", "a rank updates its share", 0)]
        cuts += [("gradients", "reduced as soon as a block has made them", 1)] if reduced else []
        for kind, reason, gathered in cuts:  # experts may be sharded over some of the n ranks already
            yield cut(tagged(kind, "blocks"), "dp", n * env.blocks_held, reason, gathered=gathered * shared)
            yield cut(tagged(kind, no=("blocks",)), "dp", n, reason, gathered=gathered)
        yield live(tagged("casts"), "the gathered weights are cast, without copies", gone=True)
        yield cut("update.loop", "dp", n, "of a rank's share")
        yield live(tagged("update"), "a rank updates its share", times=1 / n)
        share = (n - 1) / n
        times = 2 if self.stage == 3 else 1
        reason = f"weights gathered {'twice' if times == 2 else 'once'} per micro-batch"
        quantized = any(linear.weight == "quantized" for linear in env.spec.linears.values())
        stored: Role = "stored" if quantized else "product"
        hosts, entering = env.over_hosts("dp", "ep", "cp")
        parts: list[tuple[Match | str, str, Role]] = [
            ("weights.blocks", "gather.blocks", stored),
            (tagged("weights", no=("blocks",)), "gather.ends", "product"),
        ]
        moved = "gathered shards copied to the weights, and a shard to the send buffer"
        for match, name, role in parts:
            steps = times * (hosts - 1) * (L if name == "gather.blocks" else 2)
            work = WorkItem(name, reason, "micro", unit="link", values=times * share * held, role=role, of=("gather",))
            yield like(match, replace(work, entering=times * entering * held, steps=steps))
            again = 2.0 * times * (1 + 1 / n) * held
            copied = WorkItem(f"{name}.copied", moved, "micro", values=again, role=role, of=("gather",))
            yield like(match, copied)
        reason = "hooks around a gather: shards sent, copied, made parameters, and sharded again"
        groups = L + 2.0
        # Twice: the hooks also run before a backward pass, even if nothing is left to gather.
        launches = HOOKS * 2 * groups
        yield add(WorkItem("gather.launches", reason, "micro", launches=launches, of=("gather", "launches")))
        per: Literal["micro", "step"] = "micro" if self.sync == "each" else "step"
        reason, launches = "hooks around a reduction", REDUCTION * groups
        yield add(WorkItem("gather.reduce.launches", reason, per, launches=launches, of=("gather", "launches")))
        work = WorkItem("reduce", "gradients reduced", per, unit="link", values=share * held, role="gradient")
        work = replace(work, entering=entering * held, steps=(hosts - 1) * L, of=("reduce",))
        yield like(tagged("gradients"), work)
        if self.replicate > 1:
            reason, each = "a rank's share of them, summed over the groups", 2 / n * held
            hosts, entering = env.over_hosts("rep")
            values = each * (1 - 1 / self.replicate)
            work = WorkItem("reduce.replicas", reason, per, unit="link", values=values, role="gradient", of=("reduce",))
            yield like(tagged("gradients"), replace(work, entering=each * entering, steps=2 * (hosts - 1) * L))

    def shard(self, trainer: Trainer) -> int:
        import torch
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        from optrush.models.layers import uncast

        assert trainer.world.mesh is not None
        policy = MixedPrecisionPolicy()
        if trainer.autocast:  # the gathered weights are cast once, instead of at every use
            policy = MixedPrecisionPolicy(param_dtype=trainer.precision, reduce_dtype=torch.float32)
            trainer.autocast = False  # FSDP casts the inputs of blocks
        cut: dict[str, Any] = {"mesh": trainer.world.shards(), "mp_policy": policy}
        model = trainer.model
        for block in model.blocks.values():
            ignored = {*uncast(block), *self._shard_cut(trainer, block, cut)}
            fully_shard(block, reshard_after_forward=self.stage == 3, ignored_params=ignored, **cut)
        if model.ties:  # one parameter must be in one group
            fully_shard([model.embedding, model.head], reshard_after_forward=False, **cut)
        else:
            for module in dict.fromkeys((model.embedding, model.head)):
                if module.weight is not None:  # a pipeline stage may have none
                    fully_shard(module, reshard_after_forward=self.stage == 3 and module is not model.head, **cut)
        if (inputs := getattr(model, "inputs", None)) is not None:
            fully_shard(inputs, reshard_after_forward=self.stage == 3, **cut)
        for root in trainer.roots:
            if not isinstance(root, FSDPModule):
                fully_shard(root, reshard_after_forward=False, **cut)
        modules = (m for root in trainer.roots for m in root.modules() if isinstance(m, FSDPModule))
        groups = list(dict.fromkeys(modules))
        for m in groups:
            m.set_gradient_divide_factor(1.0)  # the contract: collectives sum
            # Avoid the scaled sum that FSDP uses for this factor on NCCL: gloo has no such sum, and with bfloat16
            # weights it gave a gradient norm of 0.0, a plain sum the right one (two H200, torch 2.11; inferred cause).
            m.set_force_sum_reduction_for_comms(True)
        self._slots(trainer, groups)
        return len(groups)

    def _shard_cut(self, trainer: Trainer, block: nn.Module, cut: dict[str, Any]) -> set[nn.Parameter]:
        """Shard modules with parameters that are already sharded over some data axes over the remaining axes.

        Their other parameters (routers of experts) stay whole on every rank, because FSDP shards a module over one
        mesh. If no other rank has the same parameters, nothing is left to shard, and FSDP would only copy them at each
        gather, unless it casts them. Their routers are then sharded with the block.

        Returns:
            The parameters that stay unchanged.
        """
        from torch.distributed.fsdp import fully_shard

        from optrush.trainer.distributed import cut_axes

        outer_axes: dict[nn.Module, set[str]] = {}
        for module in block.modules():  # outer modules come first
            axes = {axis for p in module.parameters(recurse=False) for axis in cut_axes(p)} & set(SUMMED)
            if axes and not any(module in outer.modules() for outer in outer_axes):
                outer_axes[module] = axes
        alone = set()
        for module, axes in outer_axes.items():
            mesh = trainer.world.shards(*axes)
            assert mesh is not None
            if mesh.size() == 1 and cut["mp_policy"].param_dtype is None:
                alone |= {p for p in module.parameters() if cut_axes(p) & axes}
                continue
            rest = {p for p in module.parameters() if not cut_axes(p) & axes}
            fully_shard(module, reshard_after_forward=self.stage == 3, **cut | {"mesh": mesh, "ignored_params": rest})
        return alone

    def _slots(self, trainer: Trainer, groups: list[Any]) -> None:
        """Replace four functions of the trainer by functions that synchronize, reshard or gather `groups`."""
        from optrush.trainer.distributed import sum_together

        inner, discard, losses = trainer.grad_sync, trainer.zero_grad, trainer.eval_loss
        everyone = trainer.world.flat(*SUMMED)
        assert everyone is not None
        window = {"open": False}  # from the first unreduced micro-batch to the reduced one

        @contextmanager
        def syncing(last: bool) -> Iterator[None]:
            reduce = last or self.sync == "each"
            for m in groups:
                m.set_requires_gradient_sync(reduce, recurse=False)
            window["open"] = True
            with inner(last):
                yield
            if last:
                unsharded = [t.grad for t in trainer.trained if not t.is_sharded and t.grad is not None]
                sum_together(unsharded, everyone.get_group())
            window["open"] = not last

        def forget() -> None:
            # Half-summed gradients of an open window are in FSDP's own buffers, which clearing .grad does not reach.
            assert not window["open"], "an interrupted window cannot be repeated under fsdp: resume from a checkpoint"
            discard()

        def resharded(batches: Any) -> Tensor:
            total = losses(batches)
            for m in groups:
                m.reshard()
            return total

        @contextmanager
        def gathered() -> Iterator[None]:
            for m in groups:
                m.unshard()
            try:
                yield
            finally:
                for m in groups:
                    m.reshard()

        trainer.grad_sync, trainer.zero_grad, trainer.eval_loss = syncing, forget, resharded
        trainer.whole_weights = gathered
