"""Hold the live state of a run, the default step and the training loop.

First the contracts: callables that techniques replace or wrap, and slots that they fill. Then each callable's default.
Then the loop that calls them.
Shapes: B rows, T tokens per row, D width (docs/notation.md).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from optrush.config import Config
from optrush.data import sampler
from optrush.data.batch import Batch
from optrush.data.dataset import Sources
from optrush.data.packing import Padded, RowLayout
from optrush.data.sampler import Evaluation, Loading, NoBatch, Stream
from optrush.hardware import HostMemory
from optrush.kernels.adamw import Rounding
from optrush.launch import launched
from optrush.models.experts import balance_loss, load_figures
from optrush.models.weights import WeightMap
from optrush.optim.adamw import Optimizer, OptimizerFactory, build_optimizer
from optrush.optim.schedule import learning_rate
from optrush.technique import Edit, Environment
from optrush.trainer import distributed
from optrush.trainer.distributed import World, record_operation
from optrush.trainer.metrics import Meter

if TYPE_CHECKING:
    from optrush.models.decoder import Decoder
    from optrush.models.hf import HFModel
    from optrush.trainer.checkpoint import Slice


@dataclass(frozen=True)
class TrainedParam:
    """One trained parameter: canonical name, local tensor and placement, fixed once at assembly.

    After `build` only this list is used: sharding leaves gathered tensors in the model.
    """

    name: str
    parameter: nn.Parameter  # may be a DTensor
    decays: bool  # weight decay applies: matrices, not norms or biases

    @property
    def local(self) -> Tensor:
        """Return this rank's shard, which shares storage."""
        return distributed.local(self.parameter.detach())

    @property
    def grad(self) -> Tensor | None:
        """Return this rank's shard of the gradient."""
        g = self.parameter.grad
        return None if g is None else distributed.local(g)

    @property
    def whole_grad(self) -> Tensor | None:
        """Return the full gradient; if it is sharded, every rank must call it."""
        g = self.parameter.grad
        return None if g is None else distributed.gathered(g)

    @property
    def whole(self) -> Tensor:
        """Return the full parameter; if it is sharded, every rank must call it."""
        return distributed.gathered(self.parameter.detach())

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Return the shape of the full parameter."""
        return tuple(self.parameter.shape)

    @property
    def offset(self) -> tuple[int, ...]:
        """Return the offset of this rank's shard in the full tensor."""
        return distributed.offset(self.parameter)

    @property
    def is_sharded(self) -> bool:
        """Return whether this rank has only a shard (else the full parameter, equal on every rank)."""
        return bool(self.cut_over)

    @property
    def cut_over(self) -> frozenset[str]:
        """Return the mesh axes over which it is sharded."""
        return frozenset(distributed.cut_axes(self.parameter))


class State(Protocol):
    """State of a technique in checkpoints, next to parameters and optimizer states: JSON, equal on every rank."""

    def save(self) -> dict[str, Any]: ...
    def load(self, saved: dict[str, Any]) -> None: ...


class Storage:
    """Allocates the weights, and reads and writes values outside the model's tensors; here there are none.

    Every rank calls each method, in the same order.
    """

    def materialise(self, trainer: Trainer) -> None:
        """Allocate this rank's shards, redo ties, and fill the weights from the weight map; before, all are on meta."""
        model = trainer.model
        for root in trainer.roots:
            root.to_empty(device=trainer.world.device)
        model.tie()  # allocation split tied tensors, unless sharding keeps them tied
        model.restore_buffers(trainer.world.device)
        with torch.no_grad():
            for name, p in model.named_parameters():
                trainer.weight_map.fill(name, distributed.local(p.detach()), distributed.offset(p))

    def read(self, mine: list[Slice]) -> list[Slice]:
        """Return this rank's slices with their values, before a save."""
        return mine

    def filling(self, s: Slice) -> AbstractContextManager[Slice]:
        """Yield a tensor for a checkpoint to fill instead of one of this rank's slices."""
        return nullcontext(s)

    def gathered(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
        """Context manager with full parameters, with the values for an export."""
        return nullcontext()


@dataclass
class Stop:
    """Reasons why the current step is the last."""

    told: Literal[0, 1, 2] = 0  # this rank must stop: 1 by a signal, 2 after a failure
    agreed: Literal[0, 1, 2] = 0  # the same, over all ranks
    starved: bool = False  # a stopping rank has no batch: abandon the current step
    complete: bool = False  # on every rank: `train.stop_after` ended the run


def host_memory() -> HostMemory:
    """Return this process' share of its host's memory."""
    return HostMemory.of(int(os.environ.get("LOCAL_WORLD_SIZE", launched()[1])))


@dataclass
class Trainer:
    """Built by `build`, driven by `train`."""

    config: Config
    env: Environment
    world: World
    hf: dict[str, Any]  # the edited config.json
    model: Decoder | HFModel
    weight_map: WeightMap

    # data
    layout: RowLayout = field(default_factory=Padded)  # how samples become rows
    loading: Loading = field(default_factory=Loading)  # how batches are prepared
    stream: Stream = None  # type: ignore[assignment]
    evaluation: Evaluation | None = None
    """This rank's held-out batches, the same number on every rank; None: no held-out data."""

    # callables
    place: Callable[[Batch], Batch] = None  # type: ignore[assignment]
    """Host micro-batch -> this rank's part on the device; called by the runner of a window."""
    batches: Iterator[list[Batch]] = field(default_factory=lambda: iter(()))
    """An item: all of this rank's micro-batches of one step, the same number on every rank, possibly empty."""
    loss_from_hidden: Callable[[Tensor, Batch], Tensor] = None  # type: ignore[assignment]
    """The objective: hidden (B, T, D) -> () float32, a sum over the batch's own terms; unscaled, undivided, local.
    It adds its other metrics to `metrics`."""
    loss: Callable[[Batch], Tensor] = None  # type: ignore[assignment]
    """() float32: default is `loss_from_hidden` of the model's output. The caller sets the gradient mode."""
    forward_backward: Callable[[list[Batch], float | Tensor], Tensor] = None  # type: ignore[assignment]
    """The window: afterwards each trained local gradient is scale * d(sum of all ranks' losses)/dw / terms, summed
    over the data axes. Clears gradients first, may be called again. Returns () float32: the mean loss over the data
    axes. terms: on the host, or () float32 on the device and above 0."""
    eval_loss: Callable[[list[Batch]], Tensor] = None  # type: ignore[assignment]
    """() float32: sum of losses over the data axes; no gradient, eval mode; leaves weights as between steps."""
    optimizer_step: Callable[[], tuple[Tensor, Tensor]] = None  # type: ignore[assignment]
    """(norm before clipping (), skipped () bool), on the device: unscale, guard, clip, step, free."""
    set_step: Callable[[int], None] = None  # type: ignore[assignment]
    """Before step n (from 1): learning rate and random state are functions of it."""

    # slots
    log_event: Callable[[dict[str, Any]], None] = lambda what: None
    """Logs an event of the run: a line of metrics.jsonl and of the screen."""
    adapters_disabled: Callable[[], AbstractContextManager[None]] | None = None
    """A `with` block that disables the adapters; None if the base model cannot be restored."""
    whole_weights: Callable[[], AbstractContextManager[None]] = nullcontext
    """A `with` block with full weights on every rank, kept across passes; all ranks enter it."""
    publish: Callable[[Path], bool] | None = None
    """Writes the trained weights to a folder for another program, on every rank; returns whether they are adapters.
    None outside a run."""
    evaluated_weights: Callable[[], AbstractContextManager[None]] = nullcontext
    """A `with` block with the weights to evaluate, such as averages."""
    grad_sync: Callable[[bool], AbstractContextManager[None]] = lambda last: nullcontext()
    """Wraps one micro-batch's forward and backward; with `last` gradients are summed over the data axes."""
    zero_grad: Callable[[], None] = None  # type: ignore[assignment]
    """Drops all gradients, partly summed ones too; raises if it cannot."""
    exported: str = "param/"
    """Prefix of a checkpoint's tensors that an export writes; a parameter's name follows.
    Other prefixes, such as `state/X/`, are averages; `state/X_begun/NAME` is 0 before their first update."""
    put_averages: Callable[[], None] = lambda: None
    """Sets the parameters to the exported values after training."""
    storage: Storage = field(default_factory=Storage)
    """Allocates the weights, and reads and writes their values and the optimizer's states."""
    scale: Tensor = None  # type: ignore[assignment]  # () float32, the loss scale
    lr: Tensor = None  # type: ignore[assignment]  # () float32
    optimizer_factory: Callable[[Sequence[TrainedParam], OptimizerFactory], Optimizer] = build_optimizer
    """Creates an optimizer over parameters, with its states in place; set before `optimizer`, called there."""
    optimizer: Optimizer = None  # type: ignore[assignment]
    outside_bytes: int = 0  # on the device, but not allocated by torch
    host_memory: HostMemory = field(default_factory=host_memory)  # shared by all users of host memory
    precision: torch.dtype | None = None  # dtype of matmuls; set by autocast, or by the owner of the data axis
    autocast: bool = False  # autocast must apply the precision
    loss_is_finite: Tensor = None  # type: ignore[assignment]  # () bool, the window's loss was finite; set by forward_backward
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """The objective's other metrics, by the names of metrics.jsonl: () float32 on the device, sums over this
    rank's terms since the window began (forward_backward clears them) or the evaluation did."""
    host_figures: dict[str, float] = field(default_factory=dict)
    """Further metrics of the current step from the host, over all ranks: part of a logged step's line."""
    max_skipped_updates: int = 3  # consecutive skipped updates that end the run

    # descriptions
    roots: list[nn.Module] = field(default_factory=list)  # modules that the loop calls: the roots of sharding
    trained: list[TrainedParam] = field(default_factory=list)
    counted_elsewhere: frozenset[str] = frozenset()  # names in `trained` that another pipeline stage counts
    vocab: int = 0  # V, rows of the embedding on any rank
    ids: int = 0  # tokens with an embedding in the teacher, too
    fingerprints: dict[str, str] = field(default_factory=dict)  # must be unchanged in a resumed run
    tokenizer: Any = None  # transformers' tokenizer; None for random tokens on a shape
    sources: Sources = None  # type: ignore[assignment]  # the data read, held out and removed by cleaning
    state: dict[str, State] = field(default_factory=dict)
    applied: list[Edit] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stop: Stop = field(default_factory=Stop)

    @property
    def rounding(self) -> Rounding:
        """How the optimizer rounds updated bfloat16 weights."""
        return self.env.spec.rounding

    def counts(self, t: TrainedParam) -> bool:
        """Return whether this rank is the first with this shard."""
        mesh = self.world.mesh
        if mesh is None:
            return True
        if t.name in self.counted_elsewhere:
            return False
        copies = set(mesh.mesh_dim_names or ()) - {"pp"}  # axes with equal copies; pipeline stages differ
        return not any(self.world.at(axis) for axis in copies - t.cut_over)

    def all_reduce(self, t: Tensor) -> Tensor:
        """Sum a device tensor over the data axes, in place; return it."""
        if (group := self.world.summing) is not None:
            torch.distributed.all_reduce(t, group=group)
        return t

    def all_reduce_max(self, t: Tensor) -> Tensor:
        """Reduce a device tensor to its maximum over the data axes, in place; return it."""
        if (group := self.world.summing) is not None:
            torch.distributed.all_reduce(t, torch.distributed.ReduceOp.MAX, group=group)
        return t

    def all_reduce_int(self, n: int) -> int:
        """Return the sum of a host integer over the data axes; also agrees on stopping."""
        stop = self.stop
        flags = [stop.told == 1, stop.told == 2, stop.starved]
        n, told, failed, starved = distributed.host_sum([n * self.world.first, *flags])
        stop.starved = starved > 0
        stop.agreed = 2 if failed else 1 if told else stop.agreed
        return n

    def all_reduce_terms(self, n: float) -> float:
        """Return the sum of a divisor over the data axes, equal on every rank: weights are summed in units of 2^-20."""
        integer, part = divmod(self.all_reduce_int(round(n * 2**20)), 2**20)
        return integer + part / 2**20 if part else integer

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """Return () float32, the norm of all (scaled) gradients over all axes of the mesh.

        The root of the summed squares: one rank counts for equal copies, and all ranks' sums are added.
        """
        device = self.world.device
        total = torch.zeros((), device=device)
        grads = [t.grad for t in self.trained if t.grad is not None and t.grad.numel() and self.counts(t)]
        if grads and device.type == "cuda":
            total += torch.stack(torch._foreach_norm(grads, 2, torch.float32)).square().sum()
        elif grads:
            # On CPU one float32 sum over a full matrix is off by 1e-5; row by row it is exact to 1e-7.
            rows = [torch.linalg.vector_norm(g, dim=-1, dtype=torch.float32) for g in grads]
            total += torch.stack([r.double().square().sum() for r in rows]).sum().float()
        if self.world.mesh is not None:
            torch.distributed.all_reduce(total)
        return total.sqrt()

    def describe(self) -> str:
        """Return the changes by technique and kernel, and the unchanged parts with reasons."""
        lines = [str(edit) for edit in self.applied]
        lines += [f"{'note':<10} {n}" for n in self.notes]
        return "\n".join(lines) or "nothing changed: the baseline"


# --- The default callables of a step, unless a technique replaces them. `build` binds the trainer.


FEW = 5  # updates: shorter runs learn little
FEW_FROM_RANDOM, ENOUGH = 30, 100  # the same for random weights; enough for a small model


def set_step(trainer: Trainer, step: int, steps: int) -> None:
    """Set learning rate and random state of step `step` of `steps`; a resumed run repeats them."""
    trainer.lr.fill_(learning_rate(trainer.config.optim, step, steps))
    # Equal along tp, where ranks drop the same values; different along cp (tokens) and pp (blocks).
    world = trainer.world
    number = world.data_rank + world.data_ranks * (world.at("cp") + world.along("cp") * world.at("pp"))
    torch.manual_seed(trainer.config.seed * 1_000_003 + step * 1009 + number)


def loss(trainer: Trainer, batch: Batch) -> Tensor:
    """Return the sum of a micro-batch's losses: its terms and the experts' balance loss."""
    hidden = trainer.model(*batch.inputs)
    total = trainer.loss_from_hidden(hidden, batch)
    shape = trainer.env.shape
    if shape is None or shape.experts is None:
        return total
    load, sharing = trainer.model.load, trainer.world.along("cp")  # ranks that shard these rows' tokens
    assert isinstance(load, Tensor)
    load = trainer.world.sum_along("cp", load)
    for name, value in load_figures(load.detach()).items():
        trainer.metrics[name] += value * batch.n_terms / sharing
    if not (shape.experts.balance and torch.is_grad_enabled()):
        return total
    penalty = shape.experts.balance * batch.n_terms * balance_loss(load, shape.experts.active)
    if sharing > 1:  # each has the full value and a part of the gradient
        penalty = penalty + penalty.detach() * (1 / sharing - 1)
    return total + penalty


def begin_window(trainer: Trainer, terms: float | Tensor) -> Tensor:
    """Clear gradients and metrics, set the training mode; return the number of terms () float32 on the device."""
    trainer.zero_grad()
    for figure in trainer.metrics.values():
        figure.zero_()
    if not trainer.model.training:  # train() walks thousands of modules
        trainer.model.train()
    if isinstance(terms, Tensor):
        return terms
    # Filled on the device: copying a number to it would synchronize.
    return torch.full((), terms or 1.0, dtype=torch.float32, device=trainer.world.device)


def forward_backward(trainer: Trainer, batches: list[Batch], terms: float | Tensor) -> Tensor:
    """Accumulate the gradients of the micro-batches; return the sum of their losses divided by `terms`."""
    terms = begin_window(trainer, terms)
    total = torch.zeros((), device=trainer.world.device)
    for i, host in enumerate(batches):
        batch = trainer.place(host)
        with trainer.grad_sync(i == len(batches) - 1):
            micro = trainer.loss(batch)
            # Not in autograd's thread: much of a backward pass is Python and would contend for the GIL.
            with torch.autograd.set_multithreading_enabled(False):
                (micro * (trainer.scale / terms)).backward()  # type: ignore[no-untyped-call]
        total += micro.detach()
    mean = trainer.all_reduce(total) / terms
    trainer.loss_is_finite = torch.isfinite(mean)
    return mean


@torch.no_grad()
def eval_loss(trainer: Trainer, batches: list[Batch]) -> Tensor:
    trainer.model.eval()
    total = torch.zeros((), device=trainer.world.device)
    for batch in batches:
        total += trainer.loss(trainer.place(batch))
    return trainer.all_reduce(total)


def optimizer_step(trainer: Trainer) -> tuple[Tensor, Tensor]:
    norm = trainer.grad_norm() / trainer.scale
    skipped = ~(torch.isfinite(norm) & trainer.loss_is_finite)
    clip = trainer.config.optim.clip
    shrink = torch.ones_like(norm) if clip is None else torch.clamp(clip / (norm + 1e-6), max=1.0)
    # If the norm is not finite, the divisor is not either, but then the step is skipped.
    trainer.optimizer.step(trainer.lr, trainer.scale / shrink, skipped)
    trainer.zero_grad()
    return norm, skipped


def zero_grad(trainer: Trainer) -> None:
    for t in trainer.trained:
        t.parameter.grad = None


# --- The loop: when to evaluate, when to save, when to stop.
#
# No technique's name appears here: techniques replaced the trainer's callables before step 0.


@dataclass(frozen=True)
class RunPlan:
    """The steps of a run, and the actions after each."""

    trainer: Trainer
    length: sampler.StreamPlan
    done: int = 0  # steps completed before

    @property
    def total(self) -> int:
        return self.length.steps

    @property
    def steps(self) -> Iterator[int]:
        """Yield step numbers from 1; end early, at the same step on all ranks, once they agreed to stop."""
        for n in range(self.done + 1, self.total + 1):
            if self.trainer.stop.complete:
                return
            yield n
            if self.trainer.stop.agreed:
                return

    def evaluates(self, step: int) -> bool:
        if self.trainer.evaluation is None:
            return False
        return step == self.total or _due(step, self.trainer.config.train.eval_cadence(self.total), self.total)

    def saves(self, step: int) -> bool:
        if self.trainer.stop.agreed:
            return self.trainer.stop.agreed == 1  # a failed run leaves its last good checkpoint the newest
        last = step == self.total or self.trainer.stop.complete
        return last or _due(step, self.trainer.config.train.save_every, self.total)


def idle_settings(config: Config, steps: int, held_out: bool) -> Iterator[str]:
    """Yield settings with no effect, or less than expected, in a run of this many steps."""
    length, warmup = config.train, config.optim.warmup
    if warmup > max(1, steps):
        yield f"optim.warmup: {warmup:g} steps, in a run of {steps}: the learning rate never reaches optim.lr"
    if "decay" in config.optim.model_fields_set and config.optim.schedule != "wsd":
        yield f"optim.decay does nothing: only wsd uses it, and optim.schedule is {config.optim.schedule}"
    if config.optim.restarts and config.optim.schedule != "cosine":
        yield f"optim.restarts does nothing: only cosine uses it, and optim.schedule is {config.optim.schedule}"
    if config.optim.min_lr_ratio and config.optim.schedule == "constant":
        yield "optim.min_lr_ratio does nothing: optim.schedule is constant"
    if length.eval_every is not None and not held_out:
        yield "train.eval_every does nothing: no data is held out; add data.eval, for example data.eval: 0.1"
    if length.steps is not None and length.epochs != 1.0:
        yield f"train.epochs does nothing: train.steps sets the length, {steps} steps"
    random = config.model.shape is not None or config.model.path == "tiny"
    if length.steps is None and steps < (FEW_FROM_RANDOM if random else FEW):
        size, key = (
            (config.batch.tokens, "batch.tokens") if config.grpo is None else (config.grpo.prompts, "grpo.prompts")
        )
        of = f"{size} {key.partition('.')[2]}"
        more = f" ({math.ceil(length.epochs * ENOUGH / max(1, steps))} for {ENOUGH} from random weights)" * random
        yield f"only {steps} update{'s' * (steps > 1)} of {of}: lower {key}, or raise train.epochs{more}"


def train(trainer: Trainer, meter: Meter, plan: RunPlan, save: Callable[[int], None]) -> None:
    """Run the steps of the plan; evaluate and save when due."""
    for step in plan.steps:  # ends early, at the same step on all ranks
        record_operation("reading data", step, at_once=False)
        batches: list[Batch] = []
        try:
            with meter.waiting():
                batches = next(trainer.batches)  # this rank's micro-batches of one step
        except NoBatch:
            trainer.stop.starved = True
        record_operation("the sum of the targets", step, at_once=False)
        terms = trainer.all_reduce_terms(sum(b.n_terms for b in batches))  # over the data axes; a host number
        if trainer.stop.starved:  # a stopping rank has no batch: the previous step is the last on all ranks
            if step - 1 > plan.done:
                save(step - 1)
            return
        trainer.set_step(step)  # learning rate and random state are functions of the step
        if terms:
            record_operation("the forward and backward passes", step, at_once=False)
            loss = trainer.forward_backward(batches, terms)  # forward, backward, reduction
            record_operation("the update", step, at_once=False)
            norm, skipped = trainer.optimizer_step()  # unscale, guard, clip, step, free
        else:  # no targets on any rank: an update would still decay weights and moments
            for figure in trainer.metrics.values():
                figure.zero_()
            loss, norm, skipped = (*trainer.lr.new_zeros(2).unbind(), trainer.lr.new_zeros((), dtype=torch.bool))
            meter.left_out += 1
        meter.tick(step, batches, loss, norm, skipped)  # reads the device only when this step logs
        if plan.evaluates(step):
            record_operation("the evaluation", step)
            with meter.aside("evaluation"):
                meter.evaluated(step, *evaluate(trainer))
        if plan.saves(step):
            record_operation("saving a checkpoint", step)
            with meter.aside("saving"):
                save(step)


class Evaluated(NamedTuple):
    """The result of an evaluation, over all ranks."""

    loss: float  # mean over the held-out terms: target tokens, or pairs
    targets: int
    figures: dict[str, float]  # means over the terms of the objective's other metrics


def evaluate(trainer: Trainer) -> Evaluated:
    """Evaluate in one pass over the held-out documents."""
    assert trainer.evaluation is not None
    for figure in trainer.metrics.values():
        figure.zero_()
    loss, terms, targets = 0.0, 0.0, 0
    with trainer.evaluated_weights():  # the batches, too: an evaluation may sample them
        for batch in trainer.evaluation:
            loss += trainer.eval_loss([batch]).item()
            terms += batch.n_terms
            targets += batch.n_targets
    terms, targets = trainer.all_reduce_terms(terms), trainer.all_reduce_int(targets)
    figures = {name: trainer.all_reduce(figure.clone()).item() / terms for name, figure in trainer.metrics.items()}
    if trainer.evaluation.figures is not None:
        figures = dict(trainer.evaluation.figures)
    return Evaluated(loss / terms, targets, figures)


def _due(step: int, every: float | None, total: int) -> bool:
    """Return whether a cadence (below 1: a fraction of the run; else steps) falls on this step."""
    if every is None:
        return False
    return step % (max(1, round(every * total)) if every < 1 else int(every)) == 0
