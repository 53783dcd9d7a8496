"""Fully sharded data parallelism (FSDP2): parameters, gradients and optimizer states are cut over the data axis."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from optrush.planner.ledger import Rule, WorkItem, cut, like, live
from optrush.technique import Environment, Numerics, Part, Requirement, Technique, Trainer

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Fsdp(Technique):
    """Gathers a block's weights before it runs, frees them after (stage 3) or keeps them to the backward pass (2).

    The head is gathered once a call, however many chunks its loss has; a tied head shares its embedding's group.
    sync `last` sums gradients once a window, and holds whole gradients until then; `each` after every micro-batch.

    Source: Zhao et al., https://arxiv.org/abs/2304.11277; stages as in ZeRO, https://arxiv.org/abs/1910.02054
    Memory: 16/n bytes a parameter on n ranks; gathered: two blocks (stage 3) or the whole model (stage 2), and the
        embedding and head; whole gradients while accumulating with sync `last`.
    Work: parameters gathered twice (stage 3) or once (stage 2) a micro-batch, gradients reduced once a sync.
    Differs from the source: gradients are summed, not averaged; the divisor is the number of targets of all ranks.
    """

    stage: Literal[2, 3] = 3
    sync: Literal["last", "each"] = "last"

    name = "fsdp"
    summary = "parameters, gradients and states cut over the ranks (FSDP2, ZeRO stage 2 or 3)"
    source = "https://arxiv.org/abs/2304.11277"
    numerics = Numerics.SAME_MATHS
    proof = "tests/golden/test_golden.py"
    claims = frozenset({Part.DATA, Part.PARAM_SHARDING})

    def needs(self, env: Environment) -> Iterator[Requirement]:
        do = "start it with --ranks 2 or torchrun, or leave fsdp out"
        yield Requirement(env.ranks > 1, "`fsdp` cuts the model over several ranks", "one rank", do)

    @classmethod
    def variants(cls, env: Environment) -> Iterator[dict[str, Any]]:
        yield {}
        yield {"stage": 2}

    def predict(self, env: Environment) -> Iterator[Rule]:
        """Yield shares of everything, whole blocks while they run, and what the link carries."""
        n, L = env.ranks, env.blocks
        blocks = min(L, 2) if self.stage == 3 else L
        whole = "a block's weights are whole while it runs, and the next block's ahead of it"
        yield cut("weights.blocks", "dp", n, whole, gathered=blocks)
        yield cut("weights.[!b]*", "dp", n, "embedding and head are whole while they are used", gathered=1)
        yield cut("states.*", "dp", n, "a rank updates its share")
        if env.accumulation == 1 or self.sync == "each":
            yield cut("gradients.*", "dp", n, "reduced as soon as a block has made them", gathered=1)
        yield live("casts.*", "the gathered weights are cast, no copies beside them", gone=True)
        yield cut("update.loop", "dp", n, "of a rank's share")
        yield live("update*", "a rank updates its share", times=1 / n)
        yield live("norm", "of a rank's share", times=1 / n)
        share = (n - 1) / n
        times = 2 if self.stage == 3 else 1
        why = f"weights gathered {'twice' if times == 2 else 'once'} a micro-batch"
        yield like("weights.*", WorkItem("gather", why, "micro", unit="link", values=times * share, role="product"))
        per: Literal["micro", "step"] = "micro" if self.sync == "each" else "step"
        yield like(
            "gradients.*", WorkItem("reduce", "gradients reduced", per, unit="link", values=share, role="gradient")
        )

    def shard(self, trainer: Trainer) -> int:
        import torch
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        assert trainer.world.mesh is not None
        policy = MixedPrecisionPolicy()
        if trainer.autocast:  # the gathered weights are cast once, instead of at every use
            policy = MixedPrecisionPolicy(param_dtype=trainer.precision, reduce_dtype=torch.float32)
            trainer.autocast = False
        cut: dict[str, Any] = {"mesh": trainer.world.mesh["dp"], "mp_policy": policy}
        model = trainer.model
        for block in model.blocks.values():
            fully_shard(block, reshard_after_forward=self.stage == 3, **cut)
        if model.ties:  # one parameter must be in one group
            fully_shard([model.embedding, model.head], reshard_after_forward=False, **cut)
        else:
            fully_shard(model.embedding, reshard_after_forward=self.stage == 3, **cut)
            fully_shard(model.head, reshard_after_forward=False, **cut)
        for root in trainer.fsdp_roots:
            if not isinstance(root, FSDPModule):
                fully_shard(root, reshard_after_forward=False, **cut)
        found = (m for root in trainer.fsdp_roots for m in root.modules() if isinstance(m, FSDPModule))
        groups = list(dict.fromkeys(found))
        for m in groups:
            m.set_gradient_divide_factor(1.0)  # the contract: collectives sum
            # Not the scaled sum, which FSDP takes for this factor on NCCL: gloo has none, and with bfloat16 weights the
            # gradient norm was 0.0 with it and right without (two H200, torch 2.11; the cause is inferred).
            m.set_force_sum_reduction_for_comms(True)
        self._slots(trainer, groups)
        return len(groups)

    def _slots(self, trainer: Trainer, groups: list[Any]) -> None:
        inner, discard, losses = trainer.grad_sync, trainer.zero_grad, trainer.eval_loss
        window = {"open": False}  # between a micro-batch that was not reduced and the one that is

        @contextmanager
        def syncing(last: bool) -> Iterator[None]:
            reduce = last or self.sync == "each"
            for m in groups:
                m.set_requires_gradient_sync(reduce, recurse=False)
            window["open"] = True
            with inner(last):
                yield
            window["open"] = not last

        def forget() -> None:
            # Half-summed gradients of an open window are in FSDP's own buffers, which clearing .grad does not reach.
            assert not window["open"], "a window cut short cannot be taken again under fsdp: resume from a checkpoint"
            discard()

        def resharded(batches: Any) -> Tensor:
            total = losses(batches)
            for m in groups:
                m.reshard()
            return total

        trainer.grad_sync, trainer.zero_grad, trainer.eval_loss = syncing, forget, resharded
