"""Measure the rates of this machine's first device at the shapes of a model, under load.

It measures matmuls of the linears (forward, and both of the backward pass), causal attention, copies, the link to the
host, the host's launch time per operator, and, with several ranks, collectives between them. Each round measures all
shapes, so that all have the same history of heat and clocks; a shape's rate is the median over the rounds. Values are
random: a matmul of constants draws less power and runs faster than any training.
"""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from optrush.config import Config
from optrush.errors import ConfigError, NeedsError, exhausted
from optrush.hardware import GIB, Device
from optrush.models.shapes import ModelShape
from optrush.models.source import locate
from optrush.planner.calibration import (
    AttentionRate,
    Calibration,
    LinkRate,
    ProductRate,
    device_name,
    driver,
    torch_version,
)  # fmt: skip
from optrush.planner.cost import linears

ROUNDS = 3
WARM_S = 0.1  # share of the time before the rounds, in which clocks and temperature settle
LONGER = 4  # attention without scores is also measured at rows longer by this factor, because its rate grows
HEAD_TOKENS = 8192  # at most, because the head's loss processes the logits in chunks
ROOM = 0.4  # share of the free memory for the operands
PERIOD = 4_194_301  # random values, a prime: repeated to fill the operands, they never align with a row
FIRST = 16  # tokens of a shape's first size
COPY_BYTES = {"cuda": 256 << 20, "cpu": 32 << 20}
# (model, tokens per row, tokens per micro-batch) measured without a CONFIG; a model small enough to train on a CPU.
MODELS: dict[str, tuple[tuple[Any, int, int], ...]] = {
    "cuda": (({"shape": "llama-3.2-1b"}, 2048, 16384), ({"shape": "llama-3.1-8b"}, 4096, 16384)),
    "cpu": (("tiny", 256, 1024),),
}

# torch 2.13 renamed both.
gather_whole: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_sum: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Report = Callable[[int, int, str], None]  # steps done, all steps, current measurement
Call = Callable[[], object]


class Load(NamedTuple):
    """A model's shape and the rows of its training."""

    name: str
    shape: ModelShape
    seq: int
    tokens: int  # per micro-batch


@dataclass
class Trial:
    """One measurement: work of a size, and a function that prepares a call for it."""

    name: str
    fields: dict[str, Any]  # of its ProductRate or AttentionRate, without size and rate
    kind: type[ProductRate] | type[AttentionRate]
    sized: str  # the field that contains the size
    size: int  # at most; reduced to fit memory and time
    flop: float  # per unit of the size
    make: Callable[[int], Call]
    rates: list[float] = field(default_factory=list)  # one per round

    @property
    def values(self) -> int:
        """Number of values of all operands."""
        w = self.fields
        if self.kind is ProductRate:
            return int(self.size * (w["inputs"] + w["outputs"]) + w["inputs"] * w["outputs"])
        return int(2 * self.size * w["seq"] * w["head_width"] * (w["heads"] + w["kv_heads"]))

    def result(self) -> ProductRate | AttentionRate:
        """Return the median rate, as a record of the calibration."""
        middle = statistics.median(self.rates)
        spread = (max(self.rates) - min(self.rates)) / middle
        return self.kind(**{**self.fields, self.sized: self.size}, flop_s=middle, spread=spread)


class Bench:
    """The device, with pools of random values; operands are slices of them."""

    def __init__(self, device: Device) -> None:
        self.device, self.cuda = device, device.kind == "cuda"
        if self.cuda and not torch.cuda.is_available():
            found = f"torch {torch.__version__}, which finds no CUDA device"
            raise NeedsError(f"rates of {device.name}", found, "install the build of torch for CUDA")
        self.place = torch.device("cuda", 0) if self.cuda else torch.device("cpu")
        self.half = torch.bfloat16 if not self.cuda or device.capability >= (8, 0) else torch.float16
        # dtypes for which torch's attention stores no scores; for others a row of 4 T has sixteen times the scores.
        self.scoreless = {torch.bfloat16} if self.cuda else {torch.bfloat16, torch.float32}
        free = torch.cuda.mem_get_info()[0] if self.cuda else device.memory_bytes or GIB
        self.room = ROOM * free / (1 if self.cuda else 4)
        self.pools: dict[torch.dtype, Tensor] = {}

    def fill(self, dtype: torch.dtype, values: int) -> None:
        """Draw the pool of a dtype; `cut` returns slices of it."""
        generator = torch.Generator(self.place).manual_seed(0)
        drawn = torch.randn(min(PERIOD, values), device=self.place, generator=generator).to(dtype)
        self.pools = {dtype: drawn.repeat(-(-values // len(drawn)))[:values]}

    def cut(self, dtype: torch.dtype, *shapes: tuple[int, ...]) -> Iterator[Tensor]:
        """Yield operands of these shapes, consecutive slices of the pool."""
        begin = 0
        for shape in shapes:
            size = torch.Size(shape).numel()
            yield self.pools[dtype][begin : begin + size].view(shape)
            begin += size

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def seconds(self, call: Call, enough: float) -> float:
        """Return the mean seconds of a call, over as many calls as fit into `enough` seconds, at least one."""
        begun, calls, more = time.perf_counter(), 0, 1
        while True:
            for _ in range(more):
                call()
            self.sync()
            calls += more
            spent = time.perf_counter() - begun
            if spent >= enough:
                return spent / calls
            more = min(2 * more, max(1, int((enough - spent) / spent * calls)))


def measure_rates(
    loads: Sequence[Load], device: Device, seconds: float, report: Report = lambda *_: None
) -> Calibration:
    """Measure a device in about `seconds`, or longer if a single pass over all shapes takes longer.

    Args:
        device: from `hardware.first_device`.
        report: called before each measurement.

    Raises:
        NeedsError: torch does not find the device, or a shape does not fit into its memory.
    """
    try:
        return _measured(Bench(device), loads, seconds, report)
    except (MemoryError, RuntimeError) as error:
        if not exhausted(error):
            raise
        found = "its memory is full: another process uses it, or attention in float32 holds whole scores"
        do = "end what else runs there, or calibrate with a CONFIG of shorter rows"
        raise NeedsError(f"rates of {device.name}", found, do) from error


def _measured(bench: Bench, loads: Sequence[Load], seconds: float, report: Report) -> Calibration:
    """Measure matmuls, attention, copies and launches in about `seconds`; report progress by calling `report`."""
    results: list[ProductRate | AttentionRate] = []
    parts = [(dtype, list(_trials(bench, loads, dtype))) for dtype in (bench.half, torch.float32)]
    count = sum(len(trials) for _, trials in parts)
    slice_s = seconds * (1 - WARM_S) / (count * ROUNDS + 4)
    steps, done = count * (ROUNDS + 1) + 4, 0
    begun = time.perf_counter()
    for part, (dtype, trials) in enumerate(parts, 1):
        bench.fill(dtype, _held(bench, trials))
        for trial in trials:
            report(done, steps, trial.name)
            _fit(bench, trial, slice_s)
            done += 1
        warm = max(trials, key=lambda t: t.flop * t.size)
        bench.seconds(warm.make(warm.size), seconds * WARM_S / len(parts))
        for number in range(ROUNDS):
            if number > 1 and time.perf_counter() - begun > seconds * part / len(parts):
                done += len(trials)  # time is up: two rounds must suffice
                continue
            for trial in trials:
                report(done, steps, trial.name)
                took = bench.seconds(trial.make(trial.size), slice_s)
                trial.rates.append(trial.flop * trial.size / took)
                done += 1
        results += [t.result() for t in trials]
    bench.pools.clear()
    report(done, steps, "copies")
    source = torch.randn(COPY_BYTES[bench.place.type] // 4, device=bench.place)
    target = torch.empty_like(source)
    copy_s = _middle(bench, lambda: target.copy_(source), slice_s)
    up, down = _linked(bench, slice_s)
    report(steps - 1, steps, "launches")
    # A small operator that autograd records, as in a forward pass.
    x, y = torch.randn(256, device=bench.place, requires_grad=True), torch.randn(256, device=bench.place)
    return Calibration(
        device=device_name(bench.device),
        torch=torch_version(),
        driver=driver() if bench.cuda else None,
        date=datetime.datetime.now().astimezone().isoformat("T", "seconds"),
        seconds=seconds,
        threads=torch.get_num_threads(),
        float32=torch.get_float32_matmul_precision(),
        products=tuple(f for f in results if isinstance(f, ProductRate)),
        attention=tuple(f for f in results if isinstance(f, AttentionRate)),
        copy_bytes_s=2 * source.nbytes / copy_s,  # read and written
        to_device_bytes_s=up,
        from_device_bytes_s=down,
        launch_s=_middle(bench, lambda: x * y, slice_s),
    )


def loads(config: Config | None, device: Device) -> list[Load]:
    """Return the shapes to measure: those of a run, or the device's defaults.

    Raises:
        UserError: the planner does not support the model, or the micro-batch is not a number yet.
    """
    if config is not None:
        return [_load(config)]
    trees = [
        {"model": model, "batch": {"seq": seq, "tokens": tokens, "micro_tokens": tokens}}
        for model, seq, tokens in MODELS[device.kind]
    ]
    rest = {"objective": "pretrain", "data": {"random": 8}, "output": "unused"}
    return [_load(Config.model_validate(tree | rest)) for tree in trees]


def _load(config: Config) -> Load:
    tokens = config.batch.micro_tokens or config.batch.seq
    if not isinstance(tokens, int):
        do = "give a number: --set batch.micro_tokens=16384"
        raise ConfigError(f"`batch.micro_tokens: {tokens}`", "it is found with these rates", do)
    shape = ModelShape.read(locate(config, weights=False)[1])
    return Load(str(config.model.shape or config.model.path), shape, config.batch.seq, tokens)


# --- matmuls and attention


def _trials(bench: Bench, loads: Sequence[Load], dtype: torch.dtype) -> Iterator[Trial]:
    """Yield a trial for each shape and direction, without duplicates between models."""
    seen: set[tuple[object, ...]] = set()
    name = str(dtype).removeprefix("torch.")
    for load in loads:
        for part, (outputs, inputs) in linears(load.shape).items():
            most = min(load.tokens, HEAD_TOKENS) if part == "head" else load.tokens
            fields: dict[str, Any] = {"part": part, "dtype": name, "inputs": inputs, "outputs": outputs}
            for direction in ("forward", "input", "weight"):
                if (inputs, outputs, direction) in seen:
                    continue
                seen.add((inputs, outputs, direction))
                make = _product(bench, dtype, direction, inputs, outputs)
                flop = 2.0 * inputs * outputs
                title = f"{load.name} {part}, {direction}, {name}"
                yield Trial(title, {**fields, "direction": direction}, ProductRate, "tokens", most, flop, make)
        s, heads = load.shape, {f: getattr(load.shape, f) for f in ("heads", "kv_heads", "head_width")}
        longer = dtype in bench.scoreless
        for T in dict.fromkeys((load.seq, max(load.seq, min(LONGER * load.seq, load.tokens)) if longer else load.seq)):
            fields = {"dtype": name, "seq": T, **heads}
            for times, direction in enumerate(("forward", "backward"), 1):
                if (*fields.values(), direction) in seen:
                    continue
                seen.add((*fields.values(), direction))
                flop = 2.0 * times * T**2 * s.heads * s.head_width
                title = f"{load.name} attention, T={T}, {direction}, {name}"
                make = _attended(bench, dtype, direction, s, T)
                most = max(1, load.tokens // T)
                yield Trial(title, {**fields, "direction": direction}, AttentionRate, "rows", most, flop, make)


def _product(bench: Bench, dtype: torch.dtype, direction: str, inputs: int, outputs: int) -> Callable[[int], Call]:
    """Prepare a matmul with the operand strides of autograd."""

    def make(tokens: int) -> Call:
        x, w, y = bench.cut(dtype, (tokens, inputs), (outputs, inputs), (tokens, outputs))
        if direction == "forward":
            return lambda: F.linear(x, w)
        if direction == "input":
            return lambda: y @ w
        return lambda: y.t() @ x

    return make


def _attended(bench: Bench, dtype: torch.dtype, direction: str, s: ModelShape, T: int) -> Callable[[int], Call]:
    """Prepare torch's attention for whole causal rows of T. The output's gradient is random too."""

    def make(rows: int) -> Call:
        q_shape, k_shape = (rows, s.heads, T, s.head_width), (rows, s.kv_heads, T, s.head_width)
        q, k, v, g = bench.cut(dtype, q_shape, k_shape, k_shape, q_shape)
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))

        def forward() -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        if direction == "forward":
            return forward
        out = forward()
        return lambda: torch.autograd.grad(out, (q, k, v), g, retain_graph=True)

    return make


def _held(bench: Bench, trials: Sequence[Trial]) -> int:
    """Reduce sizes until each trial fits into the device's memory; return the pool size in values for all of them."""
    most = bench.room / (4 if trials[0].fields["dtype"] == "float32" else 2)
    for trial in trials:
        while trial.size > 1 and trial.values > most:
            trial.size //= 2
        if trial.values > most:
            found = f"{bench.room / GIB:.1f} GiB may be used on this device"
            raise NeedsError(f"the rate of {trial.name}", found, "free memory, or calibrate with a smaller CONFIG")
    return max(t.values for t in trials)


def _fit(bench: Bench, trial: Trial, slice_s: float) -> None:
    """Reduce the size to the largest whose call takes at most `slice_s`. The first calls load the kernels."""
    size = min(FIRST if trial.kind is ProductRate else 1, trial.size)
    while True:
        call = trial.make(size)
        call()
        bench.sync()
        took = min(bench.seconds(call, 0.0), bench.seconds(call, 0.0))
        larger = min(4 * size, trial.size)
        if larger == size or took * larger / size > slice_s:
            break
        size = larger
    trial.size = size


# --- bytes and the host


def _linked(bench: Bench, enough: float) -> tuple[float | None, float | None]:
    """Return bytes/s from and to pinned host memory, one direction at a time; None on a CPU."""
    if not bench.cuda:
        return None, None
    host = torch.randn(COPY_BYTES["cuda"] // 4).pin_memory()
    here = torch.empty_like(host, device=bench.place)
    up = _middle(bench, lambda: here.copy_(host, non_blocking=True), enough)
    down = _middle(bench, lambda: host.copy_(here, non_blocking=True), enough)
    return host.nbytes / up, host.nbytes / down


def measure_links(device: Device, rank: int, ranks: int, seconds: float) -> tuple[LinkRate, ...]:
    """Measure collectives between ranks of this machine; every rank calls it, and a launcher has set the environment.

    Raises:
        NeedsError: there are fewer devices than ranks.
    """
    cuda = device.kind == "cuda"
    if cuda and torch.cuda.device_count() < ranks:
        found = f"{torch.cuda.device_count()} devices"
        raise NeedsError(f"links between {ranks} ranks", found, "use at most that many --ranks")
    place = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=ranks)
    try:
        return tuple(collectives(ranks, place, seconds / (2 * ROUNDS * 3)))
    finally:
        dist.destroy_process_group()


def collectives(ranks: int, place: torch.device, slice_s: float) -> Iterator[LinkRate]:
    """Yield the rates of collectives of the default group, each measured for about twice its rounds of a slice."""
    values = COPY_BYTES[place.type] // 4 // ranks * ranks
    full, part = torch.randn(values, device=place), torch.randn(values // ranks, device=place)
    few, fewer = torch.zeros(ranks, device=place), torch.zeros(1, device=place)
    calls: dict[Any, tuple[float, Callable[[Tensor, Tensor], Any]]] = {
        "all-reduce": (2.0, lambda a, _: dist.all_reduce(a)),
        "all-gather": (1.0, lambda a, b: gather_whole(a, b)),
        "reduce-scatter": (1.0, lambda a, b: scatter_sum(b, a)),
    }
    for operation, (times, call) in calls.items():
        latency = statistics.median(_together(place, partial(call, few, fewer), slice_s))
        full.mul_(1e-3)  # sums of sums stay finite
        rounds = _together(place, partial(call, full, part), slice_s)
        took = statistics.median(rounds)
        sent = times * full.nbytes * (ranks - 1) / ranks
        spread = (max(rounds) - min(rounds)) / took
        yield LinkRate(operation, ranks, full.nbytes, sent / took, latency, spread)


def _together(place: torch.device, call: Call, slice_s: float) -> list[float]:
    """Return the mean seconds of a call in each round, over as many calls as rank 0 fits into a slice."""

    def timed(calls: int) -> float:
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        if place.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - begun) / calls

    timed(1)  # connects the ranks
    calls = torch.tensor([min(1000, max(1, int(slice_s / timed(1))))], device=place)
    dist.broadcast(calls, 0)
    return [timed(int(calls)) for _ in range(ROUNDS)]


def _middle(bench: Bench, call: Call, enough: float) -> float:
    """Return the median of the seconds over the rounds, after a first call that is not counted."""
    call()
    bench.sync()
    return statistics.median(bench.seconds(call, enough / ROUNDS) for _ in range(ROUNDS))
