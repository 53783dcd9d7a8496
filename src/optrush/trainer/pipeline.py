"""Run a window of micro-batches through the stages of a pipeline, by the schedules of torch.distributed.pipelining.

A rank holds some blocks of the model under their own names; the first stage also the embedding, the last the norm and
the head. Stages exchange hidden states and their gradients. Every rank reads the rest of a micro-batch (positions,
documents, labels) itself, so torch passes each stage only the micro-batch's number.

`trainer.loss` runs once per stage and micro-batch: the model's forward pass is then the stage's, and the objective is
applied only on the last stage. So wrappers of either, such as autocast, need not know stages.

Source: the schedules are torch's (1F1B and interleaved: https://arxiv.org/abs/2104.04473; ZB-V:
https://arxiv.org/abs/2401.10241).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from optrush.data.batch import Batch, Documents
from optrush.models.decoder import Decoder
from optrush.trainer.trainer import Trainer, begin_window


class Stage(nn.Module):
    """Consecutive blocks of a decoder, with the modules before the first and after the last.

    The root of sharding. The decoder owns the same modules, and names them.
    """

    run: Callable[[Stage, Tensor, int], Tensor]

    def __init__(self, model: Decoder, number: int, blocks: range) -> None:
        super().__init__()
        self.number, self.first, self.last = number, blocks.start == 0, blocks.stop == len(model.blocks)
        self.blocks = nn.ModuleDict({str(n): model.blocks[str(n)] for n in blocks})
        self.embedding = model.embedding if self.first else None
        self.norm = model.norm if self.last else None
        self.head = model.head if self.last else None

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        """Return the next stage's input (B, T, D), or the last stage's loss (1,).

        x: hidden states; unused in the first stage. number (1,): the micro-batch's, on the host.
        """
        return self.run(self, x, int(number))


def split_model(model: Decoder, mine: Mapping[int, range]) -> list[Stage]:
    """Keep this rank's stages of a decoder on the meta device, and record the other ranks' linears.

    Args:
        mine: the blocks of each stage by its number.
    """
    parts = [Stage(model, number, blocks) for number, blocks in mine.items()]
    kept = {name for part in parts for name in part.blocks}
    model.elsewhere = {name: m for name, m in model.linears() if name.split(".")[1] not in kept}
    for name in [name for name in model.blocks if name not in kept]:
        del model.blocks[name]
    tied, first, last = bool(model.ties), any(p.first for p in parts), any(p.last for p in parts)
    if not (first and last):
        model.ties = ()
    if not first and last and tied:
        model.embedding = model.head  # type: ignore[assignment]  # the weight keeps its name
    elif not first:
        model.embedding.weight = None  # type: ignore[assignment]
    if not last:
        model.norm.weight = None  # type: ignore[assignment]
        model.head.weight = model.head.bias = None  # type: ignore[assignment]
    return parts


class PairedStage(PipelineStage):
    """A stage that exchanges tensors with each neighbouring rank over that pair's own process group.

    Operations of one group run in the order of their calls. In a group of the whole pipeline, a stage's output would
    wait for a tensor that was requested earlier from another rank.
    """

    pairs: Mapping[frozenset[int], dist.ProcessGroup]

    def get_fwd_recv_ops(self, *args: Any) -> list[dist.P2POp]:
        return self._paired(super().get_fwd_recv_ops(*args))

    def get_bwd_recv_ops(self, *args: Any) -> list[dist.P2POp]:
        return self._paired(super().get_bwd_recv_ops(*args))

    def get_fwd_send_ops(self, *args: Any) -> list[dist.P2POp]:
        return self._paired(super().get_fwd_send_ops(*args))

    def get_bwd_send_ops(self, *args: Any) -> list[dist.P2POp]:
        return self._paired(super().get_bwd_send_ops(*args))

    def _paired(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        me = dist.get_rank()
        return [dist.P2POp(op.op, op.tensor, op.peer, self.pairs[frozenset({me, op.peer})], op.tag) for op in ops]


class Pipeline:
    """Implements `trainer.forward_backward` and `trainer.eval_loss` of a rank."""

    def __init__(self, trainer: Trainer, parts: list[Stage], stages: int, schedule: str, evaluation: str) -> None:
        """schedule, evaluation: names of torch's schedules, for training and for forward passes."""
        assert trainer.world.mesh is not None
        self.trainer, self.parts, self.stages = trainer, parts, stages
        self.names = {True: schedule, False: evaluation}
        self.group = trainer.world.mesh.get_group("pp")
        self.made: dict[tuple[Any, ...], Any] = {}  # torch's schedules
        self.batches: list[Batch] = []  # of the window, on the device
        self.stage, self.x = parts[0], torch.empty(0)  # the current ones
        self.factor: Tensor | None = None  # of a loss: scale / number of targets
        self.total = torch.empty(0)
        self.tied = ""  # the name of a parameter that the first and the last stage hold
        self.score = trainer.loss_from_hidden
        for part in parts:
            part.run = self._run
        trainer.model.forward = self._states  # type: ignore[method-assign]
        trainer.loss_from_hidden = self._score

    def tie(self, name: str) -> None:
        """Tie a parameter of the first and the last stage; the first counts and saves it."""
        if any(part.first or part.last for part in self.parts):
            self.tied = name
        if not any(part.first for part in self.parts):
            self.trainer.counted_elsewhere = frozenset({name})

    # One stage and one micro-batch.

    def _run(self, stage: Stage, x: Tensor, number: int) -> Tensor:
        self.stage, self.x = stage, x
        out = self.trainer.loss(self.batches[number])
        if not stage.last:
            return out
        self.total += out.detach()
        return (out if self.factor is None else out * self.factor).view(1)

    def _states(self, tokens: Tensor, positions: Tensor, documents: Documents) -> Tensor:
        stage, model = self.stage, self.trainer.model
        assert isinstance(model, Decoder)
        x = model.embed(tokens) if stage.first else self.x
        x = model.through(x, positions, documents, stage.blocks.values())
        return model.norm(x) if stage.last else x

    def _score(self, hidden: Tensor, batch: Batch) -> Tensor:
        return self.score(hidden, batch) if self.stage.last else hidden

    # A window.

    def forward_backward(self, batches: list[Batch], terms: float | Tensor) -> Tensor:
        """Run a window; see `trainer.forward_backward`."""
        trainer = self.trainer
        terms = begin_window(trainer, terms)
        self.factor = trainer.scale / terms
        with trainer.grad_sync(False):  # the schedule orders the backward passes
            total = self._window(batches, True)
        with trainer.grad_sync(True):
            pass
        self._sum_tied()
        mean = trainer.all_reduce(total) / terms
        trainer.loss_is_finite = torch.isfinite(mean)
        return mean

    @torch.no_grad()
    def eval_loss(self, batches: list[Batch]) -> Tensor:
        """Evaluate; see `trainer.eval_loss`."""
        self.trainer.model.eval()
        self.factor = None
        return self.trainer.all_reduce(self._window(batches, False))

    def _window(self, batches: list[Batch], learns: bool) -> Tensor:
        """Return the sum of the losses of all micro-batches, on every stage."""
        device = self.trainer.world.device
        self.batches = [self.trainer.place(batch) for batch in batches]
        self.total = torch.zeros((), device=device)
        B, T = self.batches[0].tokens.shape
        schedule = self._schedule(len(batches), B, T, learns)
        numbers = torch.arange(len(batches))
        first, last = any(p.first for p in self.parts), any(p.last for p in self.parts)
        inputs = (torch.zeros(len(batches), device=device),) if first else ()
        target = {"target": numbers} if last else {}
        # Not in a thread of autograd's: see `trainer.forward_backward`.
        with torch.autograd.set_multithreading_enabled(False):
            (schedule.step if learns else schedule.eval)(*inputs, number=numbers, return_outputs=False, **target)
        self.batches, self.x = [], torch.empty(0)
        dist.all_reduce(self.total, group=self.group)
        return self.total

    def _schedule(self, count: int, B: int, T: int, learns: bool) -> Any:
        """Return torch's schedule for this number and shape of micro-batches; it has the receive buffers."""
        key = count, B, T, learns
        if key not in self.made:
            trainer, model = self.trainer, self.trainer.model
            assert isinstance(model, Decoder)
            shape, dtype = (B, T // model.stream_ranks, model.shape.width), stream_dtype(trainer)
            states = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
            number = torch.empty(1, device="meta", requires_grad=True)
            stages = [
                PairedStage(
                    part, part.number, self.stages, trainer.world.device, group=self.group,
                    input_args=number.detach() if part.first else states, output_args=number if part.last else states,
                )
                for part in self.parts
            ]  # fmt: skip
            for stage in stages:
                stage.pairs = trainer.world.pairs
            kind = schedules.get_schedule_class(self.names[learns])
            single = len(stages) == 1
            made: Any = kind(stages[0] if single else stages, count, loss_fn=_loss, scale_grads=False)
            if not learns and not single:  # otherwise an evaluation of adjacent stages requests gradients
                for action in ("FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "REDUCE_GRAD"):
                    made.register_custom_function(getattr(schedules, action), _nothing)
            self.made[key] = made
        return self.made[key]

    def _sum_tied(self) -> None:
        """Sum the gradients of the two copies of a weight in the first and the last stage."""
        ranks = dist.get_process_group_ranks(self.group)
        other = ranks[-1] if dist.get_rank(self.group) == 0 else ranks[0]
        for mine in [t.grad for t in self.trainer.trained if t.name == self.tied and t.grad is not None]:
            theirs = torch.empty_like(mine)
            ops = [dist.P2POp(dist.isend, mine, other, self.group), dist.P2POp(dist.irecv, theirs, other, self.group)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            mine += theirs


def stream_dtype(trainer: Trainer) -> torch.dtype:
    """Return the dtype between blocks of our decoder."""
    # Without autocast the owner of the data axis casts block inputs to the matmul dtype.
    if trainer.precision is not None and (trainer.env.spec.narrow_stream or not trainer.autocast):
        return trainer.precision
    return next(iter(trainer.model.blocks.values())).get_parameter("norm1.weight").dtype


def _nothing(action: Any, context: Any) -> None:
    """Replace the backward pass in an evaluation, which receives nothing."""
    context.schedule_ref.bwd_recv_ops.pop((action.stage_index, action.microbatch_index), None)


def _loss(loss: Tensor, _: Tensor) -> Tensor:
    return loss.sum()
