"""Run a trainer's steps with DeepSpeed's engine: ZeRO, stages 1 to 3.

The engine owns gradients and their reduction, float32 weights and states, and the update. It flattens the weights, and
a rank's part of a flat tensor is not a box of a weight. So checkpoints gather one tensor at a time, and each rank saves
rows of it: the files are like any other run's, and resume under any mesh.

The engine's forward pass must be called, with the loss inside: stage 3 counts a window's micro-batches there. With
direct calls of the modules only the last micro-batch's gradients would remain, without an error.

Source: DeepSpeed 0.19 (https://github.com/deepspeedai/DeepSpeed), its public functions where they exist.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from optrush.data.batch import Batch
from optrush.trainer.trainer import Storage, TrainedParam, Trainer, begin_window

if TYPE_CHECKING:
    from optrush.kernels.adamw import Rounding
    from optrush.trainer.checkpoint import Slice

MOMENTS = {"mean": "exp_avg", "square": "exp_avg_sq"}  # our names of AdamW's states -> torch's
COUNT = "count"  # of updates: torch's "step", one per flat tensor


@dataclass(frozen=True)
class ZeroParam(TrainedParam):
    """A parameter with float32 values and states in the engine; a rank reads and saves some of its rows."""

    engine: Engine

    @property
    def local(self) -> Tensor:
        """Return this rank's rows, on the meta device: `Engine.read` reads them, `Engine.filling` sets them."""
        first, end = self._rows
        return torch.empty((end - first, *self.full_shape[1:]), dtype=torch.float32, device="meta")

    @property
    def grad(self) -> Tensor | None:
        return None

    @property
    def whole(self) -> Tensor:
        return self.engine.read_whole(self)

    @property
    def whole_grad(self) -> Tensor | None:
        return self.engine.read_gradient(self)

    @property
    def full_shape(self) -> tuple[int, ...]:
        return tuple(getattr(self.parameter, "ds_shape", self.parameter.shape))

    @property
    def offset(self) -> tuple[int, ...]:
        return (self._rows[0], *(0 for _ in self.full_shape[1:]))

    @property
    def cut_over(self) -> frozenset[str]:
        return frozenset({"dp"})

    @property
    def _rows(self) -> tuple[int, int]:
        world, rows = self.engine.trainer.world, self.full_shape[0]
        per_rank = -(-rows // world.ranks)
        return min(rows, world.rank * per_rank), min(rows, (world.rank + 1) * per_rank)


class LossModule(nn.Module):
    """The module that the engine calls: micro-batch -> loss, with model and head inside."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.model = trainer.model
        self.loss: Callable[[Batch], Tensor] = lambda batch: trainer.loss(batch)  # resolved at call time

    def forward(self, batch: Batch) -> Tensor:
        return self.loss(batch)


def quiet() -> None:
    """Limit DeepSpeed's log on standard output to errors: the run itself logs skipped updates."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


@dataclass(frozen=True)
class ModuleByModule(Storage):
    """Weights filled module by module, so that only one module at a time is unsharded or in float32."""

    config: Mapping[str, Any] | None  # DeepSpeed's, to shard them (stage 3); None: replicated
    half: torch.dtype | None
    """The dtype for float32 weights. If a trained one loses precision, its values are kept on the host
    until the engine has float32 weights."""

    def materialise(self, trainer: Trainer) -> None:
        """Allocate, fill and shard the modules one by one."""
        model, device = trainer.model, trainer.world.device
        names = {id(p): name for name, p in model.named_parameters()}  # the first of tied parameters
        for path, module in list(model.named_modules()):
            full = {n: f"{path}.{n}" if path else n for n, _ in module.named_parameters(recurse=False)}
            owned = [n for n, p in module.named_parameters(recurse=False) if names.get(id(p)) == full[n]]
            if not owned:
                continue  # tied: filled with its owner
            for p in module.parameters(recurse=False) if self.half is not None else ():
                p.data = p.data.to(self.half)
            module.to_empty(device=device, recurse=False)
            for n in owned:
                _fill(trainer, full[n], module.get_parameter(n))
            if self.config is not None:
                _partition([module.get_parameter(n) for n in owned], self.config)
        model.tie()
        model.restore_buffers(device)


@torch.no_grad()
def _fill(trainer: Trainer, name: str, p: nn.Parameter) -> None:
    """Fill a full parameter; store in its `LOST` the values that its dtype cannot represent."""
    start = (0,) * p.dim()
    if not p.requires_grad or p.dtype == torch.float32:
        trainer.weight_map.fill(name, p.detach(), start)
        return
    exact = torch.empty_like(p, dtype=torch.float32)
    trainer.weight_map.fill(name, exact, start)
    p.copy_(exact)
    if not torch.equal(p.float(), exact):
        setattr(p, LOST, exact.cpu())


LOST = "float32_values"  # attribute of a parameter until the engine starts


def _partition(parameters: list[Any], config: Mapping[str, Any]) -> None:
    """Shard parameters over the ranks like the engine."""
    from deepspeed import zero
    from deepspeed.utils import groups

    holder = nn.Module()
    for i, p in enumerate(parameters):
        holder.register_parameter(str(i), p)
    several = config["zero_optimization"]["zero_hpz_partition_size"] > 1
    group = groups._get_zero_param_intra_parallel_group() if several else None  # created once per process
    zero.Init(
        module=holder, config_dict_or_path=dict(config), dtype=parameters[0].dtype, zero_param_parallel_group=group
    )


class Engine(Storage):
    """Runs a trainer's windows and updates, and reads and writes the engine's tensors; acts as an `Optimizer`."""

    reads_host = True
    rounding: Rounding = "nearest"
    adamw: torch.optim.AdamW
    engine: Any  # DeepSpeed's engine
    zero: Any  # DeepSpeed's optimizer

    def __init__(self, trainer: Trainer, config: Mapping[str, Any]) -> None:
        """config: DeepSpeed's."""
        self.trainer, self.config, self.stage = trainer, dict(config), int(config["zero_optimization"]["stage"])
        self.open = False  # a window is running
        self.trained = [ZeroParam(t.name, t.parameter, t.decays, self) for t in trainer.trained]
        self.by_name = {t.name: t for t in self.trained}
        self.by_id = {id(t.parameter): t for t in self.trained}

    def train(self, offload: bool) -> None:
        """Start DeepSpeed's engine; replace the callables for windows, updates, saves and exports.

        Args:
            offload: states are in host memory.
        """
        trainer, optim = self.trainer, self.trainer.config.optim
        groups = [
            {"params": [t.parameter for t in self.trained if t.decays == decays], "weight_decay": decay}
            for decays, decay in ((True, optim.weight_decay), (False, 0.0))
        ]
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=0.0, betas=optim.betas, eps=optim.eps, fused=True
        )
        self._start(self.adamw)
        self._make_states(torch.device("cpu") if offload else trainer.world.device)
        for t in self.trained:
            if (exact := t.parameter.__dict__.pop(LOST, None)) is not None:
                self.write(t, None, exact)
        trainer.trained = [*self.trained]
        trainer.optimizer = self
        trainer.forward_backward = self.forward_backward
        trainer.optimizer_step, trainer.zero_grad = self.optimizer_step, self.zero_grad
        trainer.storage = self

    def evaluate(self) -> None:
        """Start DeepSpeed's engine without an optimizer; replace the evaluation."""
        for t in self.trained:
            t.parameter.__dict__.pop(LOST, None)
        self._start(None)

    def _start(self, optimizer: torch.optim.Optimizer | None) -> None:
        import deepspeed

        self.engine, self.zero, _, _ = deepspeed.initialize(
            model=LossModule(self.trainer), optimizer=optimizer, config=self.config, dist_init_required=False
        )
        self.trainer.eval_loss = self.eval_loss

    def _make_states(self, device: torch.device) -> None:
        """Allocate the states before torch's first update, so that a checkpoint can be loaded."""
        for flat in self._flat():
            self.adamw.state[flat] = {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                **{name: torch.zeros_like(flat) for name in MOMENTS.values()},
            }
        if self.stage < 3:
            self.zero._lazy_init_hp_params_optimizer_state()

    def _flat(self) -> list[Tensor]:
        """Return this rank's flat float32 weights."""
        zero = self.zero
        return list(zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups)

    # The window and the update.

    def forward_backward(self, batches: list[Batch], terms: float | Tensor) -> Tensor:
        """Run a window; see `trainer.forward_backward`.

        A non-finite loss makes all gradients non-finite, so that the engine skips the update.
        """
        trainer, engine = self.trainer, self.engine
        terms = begin_window(trainer, terms)
        if not engine.training:
            engine.train()
        device = trainer.world.device
        total, mean = torch.zeros((), device=device), torch.zeros((), device=device)
        factor = trainer.scale * (trainer.world.ranks / terms)  # the engine averages over ranks, the contract sums
        self.open = True
        for i, host in enumerate(batches):
            last = i == len(batches) - 1
            engine.set_gradient_accumulation_boundary(last)
            micro = engine(trainer.place(host))
            total += micro.detach()
            if last:
                mean = trainer.all_reduce(total.clone()) / terms
                trainer.loss_is_finite = torch.isfinite(mean)
                factor = torch.where(trainer.loss_is_finite, factor, torch.nan)
            with torch.autograd.set_multithreading_enabled(False):
                engine.backward(micro * factor, scale_wrt_gas=False)
        self.open = False
        return mean

    @torch.no_grad()
    def eval_loss(self, batches: list[Batch]) -> Tensor:
        """Evaluate; see `trainer.eval_loss`."""
        self.engine.eval()
        total = torch.zeros((), device=self.trainer.world.device)
        for batch in batches:
            total += self.engine(self.trainer.place(batch))
        return self.trainer.all_reduce(total)

    def optimizer_step(self) -> tuple[Tensor, Tensor]:
        """Update (see `trainer.optimizer_step`): the engine computes the norm, skips, clips and steps."""
        engine, lr, device = self.engine, float(self.trainer.lr), self.trainer.world.device
        for group in (*self.adamw.param_groups, *self.zero.param_groups):
            group["lr"] = lr
        before = engine.skipped_steps
        engine.step()
        skipped = engine.skipped_steps > before
        norm = torch.inf if skipped else engine.get_global_grad_norm()
        return torch.as_tensor(norm, dtype=torch.float32, device=device), torch.tensor(skipped, device=device)

    def zero_grad(self) -> None:
        """Drop the gradients of a window without an update: the engine would add to them."""
        # Partial sums are also in the engine's buckets and hooks.
        assert not self.open, "an aborted window cannot be repeated under deepspeed: resume from a checkpoint"
        self.zero.zero_grad(set_to_none=True)
        if self.stage < 3:
            self.zero.micro_step_id = -1  # the value after an update
            for kept in (self.zero.all_grad_tensors, self.zero.averaged_gradients):
                kept.update(dict.fromkeys(kept))

    def step(self, *_: Any, **__: Any) -> None:
        """Raise: the engine updates in `optimizer_step`."""
        raise AssertionError("deepspeed updates all weights at once, from its own gradients")

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the states by canonical name and state name, on the meta device, like `ZeroParam.local`."""
        states = {}
        for t in self.trained:
            count = torch.empty((), dtype=torch.float32, device="meta")
            states[t.name] = {**dict.fromkeys(MOMENTS, t.local), COUNT: count}
        return states

    # The engine's tensors, gathered one at a time.

    def read_whole(self, t: ZeroParam, state: str | None = None) -> Tensor:
        """Return the full float32 values or a state of a parameter, on the device; every rank calls it."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if state is None:
            values = safe_get_full_fp32_param(t.parameter)
        elif state == COUNT:
            values = self.adamw.state[self._flat()[0]]["step"].clone()
        else:
            values = safe_get_full_optimizer_state(t.parameter, MOMENTS[state])
        assert isinstance(values, Tensor), f"{t.name} is trained"
        return values.detach()

    def read_gradient(self, t: ZeroParam) -> Tensor:
        """Return the full gradient of a parameter, between a window and its update; every rank calls it."""
        from deepspeed.utils import safe_get_full_grad

        gradient = safe_get_full_grad(t.parameter) if self.stage == 3 else t.parameter.get_full_hp_grad()  # type: ignore[attr-defined]
        assert isinstance(gradient, Tensor), f"{t.name} is trained"
        return gradient.detach().float()

    @torch.no_grad()
    def write(self, t: ZeroParam, state: str | None, whole: Tensor) -> None:
        """Set this rank's part of the float32 values or of a state, and of the weights in compute dtype."""
        from deepspeed.utils import (
            safe_set_full_fp32_param,
            safe_set_full_optimizer_state,
            safe_set_local_fp32_param,
            safe_set_local_optimizer_state,
        )

        if state == COUNT:
            for flat in self._flat():
                self.adamw.state[flat]["step"].copy_(whole)
            return
        p: Any = t.parameter
        whole = whole.to(self.trainer.world.device)
        if self.stage < 3:
            if state is None:
                safe_set_full_fp32_param(p, whole)
                p.data.copy_(whole)
            else:
                safe_set_full_optimizer_state(p, whole, MOMENTS[state])
            return
        part = self._part(p, whole)
        if state is not None:
            safe_set_local_optimizer_state(p, part, MOMENTS[state])
            return
        safe_set_local_fp32_param(p, part)
        p.ds_tensor.data.copy_(part)
        p.ds_secondary_tensor = None  # rebuilt from the first at the next gather
        if p.data.numel() == whole.numel():  # small ones are replicated
            p.data.copy_(whole)

    def _part(self, p: Any, full: Tensor) -> Tensor:
        """Return this rank's part of a full parameter, padded by the engine to equal parts."""
        size, flat = p.ds_tensor.numel(), full.flatten()
        first = min(len(flat), size * self.trainer.world.rank)
        part = flat[first : first + size]
        return torch.cat((part, part.new_zeros(size - len(part))))

    # Checkpoints and exports.

    def read(self, mine: list[Slice]) -> list[Slice]:
        """Return the slices with their values, on the host; every rank calls it, in the same order."""
        return [replace(s, local=self._read_rows(s)) for s in mine]

    def _read_rows(self, s: Slice) -> Tensor:
        full = self.read_whole(*self._named(s.name))
        box = tuple(slice(first, first + n) for first, n in zip(s.offset, s.shape, strict=True))
        return full[box].to("cpu", copy=True)

    @contextmanager
    def filling(self, s: Slice) -> Iterator[Slice]:
        """Yield a slice's full tensor, on the host, for a checkpoint to fill; keep this rank's part."""
        full = torch.empty(s.whole, dtype=s.local.dtype)
        yield replace(s, local=full, offset=(0,) * len(s.whole))
        self.write(*self._named(s.name), full)

    def _named(self, name: str) -> tuple[ZeroParam, str | None]:
        """Return the parameter of a checkpoint's tensor, and the name of the state if it is one."""
        kind, _, rest = name.partition("/")
        if kind == "param":
            return self.by_name[rest], None
        state, _, owner = rest.partition("/")
        return self.by_name[owner], state

    @contextmanager
    def gathered(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Context manager with full parameters, trained ones in float32; every rank calls it."""
        from deepspeed import zero

        distinct = list(dict.fromkeys(parameters))
        trained = [p for p in distinct if id(p) in self.by_id]
        frozen = [p for p in distinct if id(p) not in self.by_id]
        with zero.GatheredParameters(frozen, enabled=self.stage == 3 and bool(frozen)):
            kept = [p.data for p in trained]
            for p in trained:
                p.data = self.read_whole(self.by_id[id(p)])
            yield
            for p, data in zip(trained, kept, strict=True):
                p.data = data
