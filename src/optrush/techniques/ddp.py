"""Data parallelism: every rank holds the whole model; gradients are summed in buckets during the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from optrush.planner.ledger import Line, Rule, WorkItem, add, like, tagged
from optrush.technique import SUMMED, Environment, Numerics, Part, Requirement, Technique

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from optrush.trainer.distributed import World
    from optrush.trainer.trainer import TrainedParam, Trainer


@dataclass(frozen=True)
class Ddp(Technique):
    """Sums gradients over the data axis, once per window, in the order of the backward pass.

    Source: Li et al., https://arxiv.org/abs/2006.15704
    Memory: the whole model, gradients and states on each rank; buckets hold the gradients themselves.
    Work: 2*(n-1)/n times the gradients' bytes over the link, overlapped with the last backward pass.
    Differs from the source: gradients are summed, not averaged (the divisor is the target tokens of all ranks), and the
        parameters keep their names and their module.
    """

    bucket_mib: Annotated[int, Field(ge=1)] = 25

    name = "ddp"
    summary = "data parallelism: the whole model on each rank, gradients summed in buckets"
    source = "https://arxiv.org/abs/2006.15704"
    numerics = Numerics.SAME_MATHS
    proof = "tests/golden/test_golden.py"
    claims = frozenset({Part.DATA})

    def needs(self, env: Environment) -> Iterator[Requirement]:
        do = "start it with --ranks 2 or torchrun, or leave ddp out"
        yield Requirement(env.gradient_ranks > 1, "`ddp` shares the work of several ranks", env.alone, do)

    def predict(self, env: Environment) -> Iterator[Rule]:
        n, room = env.gradient_ranks, self.bucket_mib << 20
        yield add(Line("buckets", "gradients copied into the all-reduce bucket", room, "byte", "backward"))
        reason = "a gradient larger than a bucket is copied alone: the embedding's"
        yield like("gradients.embedding", Line("bucket of the embedding", reason, 1.0, "gradient", "end"))
        reason, held = "2 (n-1)/n of the gradients' bytes to other ranks", 1 / env.axes.get("tp", 1)
        hosts, entering = env.over_hosts(*SUMMED)
        work = WorkItem("reduce", reason, "step", unit="link", values=2 * (n - 1) / n * held, role="gradient")
        work = replace(work, entering=2 * entering * held, steps=2 * (hosts - 1) * env.blocks, of=("reduce",))
        yield like(tagged("gradients"), work)

    def wrap_step(self, trainer: Trainer) -> int:
        buckets = Buckets(trainer.trained, trainer.world, self.bucket_mib << 20)
        inner, discard = trainer.grad_sync, trainer.zero_grad

        @contextmanager
        def syncing(last: bool) -> Iterator[None]:
            buckets.armed = last
            with inner(last):
                yield
            if last:
                buckets.finish()

        def forget() -> None:
            buckets.reset()
            discard()

        trainer.grad_sync, trainer.zero_grad = syncing, forget
        return len(buckets.members) or 1  # no bucket: every gradient is on one rank only


class Buckets:
    """Gradients flattened into buckets, last parameter first; each is summed as soon as it and all before it are full.

    The order of the collectives is fixed, independent of the order of gradients, so that ranks never disagree. The
    parameters of a bucket are on the same ranks; a gradient that is on one rank only is in no bucket.
    """

    def __init__(self, trained: list[TrainedParam], world: World, most_bytes: int) -> None:
        self.members: list[list[torch.nn.Parameter]] = []
        self.groups: list[Any] = []  # one per bucket
        room = 0
        for t in reversed(trained):
            size, ranks = t.local.nbytes, world.summed(t.parameter)
            if ranks is None or ranks.size() == 1:
                continue
            group = ranks.get_group()
            if size > room or self.members[-1][0].dtype != t.parameter.dtype or self.groups[-1] is not group:
                self.members.append([])
                self.groups.append(group)
                room = most_bytes
            self.members[-1].append(t.parameter)
            room -= size
        for number, bucket in enumerate(self.members):
            for p in bucket:
                p.register_post_accumulate_grad_hook(self._hook(number))  # type: ignore[no-untyped-call]
        self.reset()

    def reset(self) -> None:
        self.armed = False
        self.missing = [len(b) for b in self.members]
        self.launched: list[tuple[Any, Tensor]] = []

    def _hook(self, number: int) -> Callable[[Tensor], None]:
        def ready(_: Tensor) -> None:
            if self.armed:
                self.missing[number] -= 1
                while len(self.launched) < len(self.members) and self.missing[len(self.launched)] == 0:
                    self._launch()

        return ready

    def _launch(self) -> None:
        """Start the all-reduce of the next bucket; make its gradients views of the flat tensor."""
        import torch
        import torch.distributed as dist

        from optrush.trainer.distributed import like as sharded_like
        from optrush.trainer.distributed import local

        bucket = self.members[len(self.launched)]
        grads = [local(torch.zeros_like(p) if p.grad is None else p.grad) for p in bucket]
        flat = torch.cat([g.reshape(-1) for g in grads])
        work = dist.all_reduce(flat, group=self.groups[len(self.launched)], async_op=True)
        at = 0
        for p, g in zip(bucket, grads, strict=True):  # the bucket becomes the gradients: nothing is copied back
            p.grad = sharded_like(p, flat[at : at + g.numel()].view_as(g))
            at += g.numel()
        self.launched.append((work, flat))

    def finish(self) -> None:
        while len(self.launched) < len(self.members):  # a parameter had no gradient in this window
            self._launch()
        for work, _ in self.launched:
            work.wait()
        self.reset()
