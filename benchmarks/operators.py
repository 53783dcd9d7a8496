"""What single operators cost on a hot GPU, in time, power and energy: where power bounds a step, time alone misleads.

usage: operators.py GROUP... [--seconds S] [--rounds R] [--rest S] [--rows N] [--only PATTERN]... [--jobs J]

    head       linear and cross-entropy, forward and backward; its first product tile by tile
    feed       the gated product and its backward pass, tile by tile, and what these kernels replace
    products   each linear, forward and both gradients: cuBLAS, and QuACK tile by tile
    attention  causal rows, forward and backward
    memory     a copy of 1 GiB

--rest lets the device idle so long before each round, and heats nothing before: figures of a cool device, at clocks
that no training keeps, as libraries publish them. --rows gives head, feed and products other rows; --only keeps
operators in whose `case operator impl` the regular expression is found; J processes compile. A line about the machine,
then one an operator as soon as it is known (benchmarks/README.md).
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from optrush.benchmark import record
from optrush.data.batch import IGNORE, Documents
from optrush.kernels import cross_entropy, linear_cross_entropy, swiglu, swiglu_quack
from optrush.kernels.attention import ATTENTIONS
from optrush.kernels.cross_entropy import liger
from optrush.models.shapes import SHAPES, ModelShape
from optrush.planner.calibrate import HEAD_TOKENS
from optrush.planner.cost import linears
from optrush.technique import library

FED = (("llama-3.2-1b", 32768), ("llama-3.1-8b", 4096), ("llama-3.1-8b", 16384))  # model, rows
ATTENDED = (("llama-3.2-1b", 16, 2048), ("llama-3.2-1b", 8, 4096), ("llama-3.2-1b", 4, 8192), ("llama-3.1-8b", 4, 4096))
CHUNKS, COPIED_BYTES = (4096, 8192), 1 << 30  # rows of the loss
SCALES = {"weight": 0.02, "grad": 1e-3}  # of random values; 1 of others
# QuACK's kernels: the tile, whether two groups of warps share or alternate, the cluster, and the order of the tiles.
TILES = [f"{tile}-cooperative" for tile in ("128x256", "256x128", "256x192", "128x224")]
TILES += [f"{tile}-pingpong" for tile in ("128x128", "128x160", "128x192", "192x128")]
FED_BY = ["-".join(("quack", *k)) for k in itertools.product(TILES, ("2x1", "1x2", "1x1"), ("fixed", "dynamic"))]
MULTIPLIED_BY = [k for k in FED_BY if "-2x1-" in k and "x160-" not in k and "x224-" not in k]
POLL_S, PATIENCE_S = 0.004, 240.0  # between two looks at the counters; for a kernel's process
HEAT_S = 5.0  # of products before anything is timed: clocks and temperature settle

Call = Callable[..., object]
Values = Callable[..., Tensor]  # random tensors by name and shape, which the operators of a case share
Figures = dict[str, Any]


def drawn(name: str, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16).mul_(SCALES.get(name, 1.0))


@dataclass(frozen=True, eq=False)
class Operator:
    """One thing to measure: a function of operands. `kernel` names what QuACK must compile for it."""

    operator: str
    impl: str
    case: str | None
    shape: Mapping[str, int]
    operands: Callable[[Values], tuple[Any, ...]]
    function: Call
    flop: float = 0.0
    moved_bytes: float = 0.0  # read and written, where that is the work
    kernel: str = ""

    @property
    def name(self) -> str:
        return " ".join(part for part in (self.case, self.operator, self.impl) if part)


def quack(function: str, kernel: str, *operands: Tensor) -> Any:
    """A product by one kernel: the library does not look for the best."""
    from quack import gemm_interface
    from quack.gemm_config import GemmConfig

    _, tile, how, cluster, order = kernel.split("-")
    (m, n), (a, b) = (map(int, size.split("x")) for size in (tile, cluster))
    sizes = {"tile_m": m, "tile_n": n, "pingpong": how == "pingpong", "cluster_m": a, "cluster_n": b}
    config = GemmConfig(**sizes, is_dynamic_persistent=False, device_capacity=9)
    options: Figures = {"config": config, "dynamic_scheduler": order == "dynamic"}
    if function != "gemm_tuned":
        return getattr(gemm_interface, function)(*operands, activation="swiglu", **options)
    left, right = operands
    return gemm_interface.gemm_tuned.fn(left, right, left.new_empty(left.shape[0], right.shape[1]), **options)


def head(rows: int, V: int, D: int) -> Iterator[Operator]:
    """The sum of the losses, and its gradients."""
    pair = lambda values: (values("x", rows, D).requires_grad_(), values("weight", V, D).requires_grad_())
    operands = lambda values: (*pair(values), torch.randint(V, (rows,)))

    def made(impl: str, loss: Callable[..., Tensor], kernel: str = "") -> Operator:
        shape, work = {"rows": rows, "V": V, "D": D}, 6.0 * rows * V * D
        both = lambda hidden, weight, labels: torch.autograd.grad(loss(hidden, weight, labels), (hidden, weight))
        return Operator("loss", impl, f"head-{D}", shape, operands, both, work, kernel=kernel)

    def library(*operands: Tensor) -> Any:
        from quack.linear_cross_entropy import scaled_exp_linear_cross_entropy

        return scaled_exp_linear_cross_entropy(*operands, rows, IGNORE, "sum")

    def first(*operands: Tensor) -> Tensor:
        from optrush.kernels.linear_cross_entropy_quack import exp_logits_product

        return exp_logits_product(*operands)

    for chunk in CHUNKS:
        yield made(f"chunked-{chunk}", cross_entropy.Chunked(chunk=chunk))
        yield made(f"chunked-compiled-{chunk}", cross_entropy.Chunked(chunk=chunk).compiled("default"))
        yield made(f"quack-{chunk}", partial(linear_cross_entropy.quack, chunk=chunk), "loss")
    yield made("liger", partial(liger, chunk=0))
    yield made("quack-library", library, "library")
    of_first = lambda values: (values("x", rows, D), values("weight", V, D), torch.zeros(rows), values("e", rows, V))
    sizes = {"rows": rows, "V": V, "D": D}
    yield Operator("exponents", "quack", f"head-{D}", sizes, of_first, first, 2.0 * rows * V * D, kernel="exponents")


def feed(case: str, shape: ModelShape, rows: int) -> Iterator[Operator]:
    """Gate and up with their activation; and the gradients of gate and up, with the activation again."""
    D, width, sizes = shape.width, shape.ff_width, {"rows": rows, "D": shape.width, "F": shape.ff_width}
    there = lambda values: (values("x", rows, D), values("weight", 2 * width, D).t())
    back = lambda values: (values("grad", rows, D), values("weight", D, width), values("pairs", rows, 2 * width))
    impls: list[tuple[str, Call, Call]] = [
        ("cublas-triton", lambda x, w: swiglu.swiglu(x @ w), lambda g, w, pairs: swiglu.swiglu_backward(pairs, g @ w)),
        ("optrush", lambda x, w: swiglu_quack.gated_matmul(x, w.t()), swiglu_quack.gated_matmul_backward),
        *((k, partial(quack, "gemm_gated", k), partial(quack, "gemm_dgated", k)) for k in FED_BY),
    ]
    for impl, forward, backward in impls:
        first, second = ("" if impl == "cublas-triton" else f"{way} {impl}" for way in ("gated", "dgated"))
        yield Operator("gated forward", impl, case, sizes, there, forward, 4.0 * rows * D * width, kernel=first)
        yield Operator("gated backward", impl, case, sizes, back, backward, 2.0 * rows * D * width, kernel=second)


def products(case: str, shape: ModelShape, rows: int) -> Iterator[Operator]:
    """Each linear and both its gradients; the head on the rows of one chunk."""
    for (part, (outputs, inputs)), way in itertools.product(linears(shape).items(), ("forward", "input", "weight")):
        M = min(rows, HEAD_TOKENS) if part == "head" else rows
        sizes, pair = {"rows": M, "inputs": inputs, "outputs": outputs}, partial(factors, way, M, inputs, outputs)
        said: Figures = {"case": case, "shape": sizes, "operands": pair, "flop": 2.0 * M * inputs * outputs}
        yield Operator(f"{part} {way}", "cublas", function=torch.mm, **said)
        for kernel in MULTIPLIED_BY:
            one = partial(quack, "gemm_tuned", kernel)
            yield Operator(f"{part} {way}", kernel, function=one, kernel=f"{way} {kernel}", **said)


def factors(way: str, rows: int, inputs: int, outputs: int, values: Values) -> tuple[Tensor, Tensor]:
    """The two matrices, as they are stored in training."""
    x, weight, grad = values("x", rows, inputs), values("weight", outputs, inputs), values("grad", rows, outputs)
    return {"forward": (x, weight.t()), "input": (grad, weight), "weight": (grad.t(), x)}[way]


def attention(case: str, shape: ModelShape, B: int, T: int) -> Iterator[Operator]:
    H, K, E = shape.heads, shape.kv_heads, shape.head_width

    def there(values: Values) -> tuple[Any, ...]:
        q, k, v = (values(name, B, T, heads, E).requires_grad_() for name, heads in zip("qkv", (H, K, K)))
        starts, ids = torch.arange(B + 1, dtype=torch.int32) * T, torch.zeros(B, T, dtype=torch.int32)
        return q, k, v, Documents(starts, ids, T, single=True)

    def back(impl: str, values: Values) -> tuple[Any, ...]:
        operands = there(values)
        return ATTENTIONS[impl](*operands), operands[:3], values("grad", B, T, H, E)

    again = partial(torch.autograd.grad, retain_graph=True)
    sizes, work = {"B": B, "T": T, "H": H, "K": K, "E": E}, 2.0 * B * T * T * H * E  # half of the pairs are masked
    for impl in ("fa4", "cudnn", "varlen"):
        yield Operator("attention forward", impl, case, sizes, there, ATTENTIONS[impl], work)
        yield Operator("attention backward", impl, case, sizes, partial(back, impl), again, 2 * work)


def cases(rows: int | None = None) -> dict[str, list[Iterable[Operator]]]:
    """Of each group, the operators that are measured in turn together."""
    shapes = {model: ModelShape.read(SHAPES[model]) for model, _ in FED}
    fed = dict.fromkeys((model, rows or own) for model, own in FED)
    pair = lambda values: (values("target", COPIED_BYTES // 2), values("source", COPIED_BYTES // 2))
    copy = Operator("copy", "torch", None, {"bytes": COPIED_BYTES}, pair, Tensor.copy_, moved_bytes=2.0 * COPIED_BYTES)
    return {
        "head": [head(rows or HEAD_TOKENS, shape.vocab, shape.width) for shape in shapes.values()],
        "feed": [feed(f"{model}-{M}", shapes[model], M) for model, M in fed],
        "products": [products(f"{model}-{M}", shapes[model], M) for model, M in fed],
        "attention": [attention(f"{model}-{B}x{T}", shapes[model], B, T) for model, B, T in ATTENDED],
        "memory": [[copy]],
    }


class Gauge:
    """The first device that torch sees, and what its driver says of it."""

    device = torch.device("cuda", 0)
    now, sync = staticmethod(time.perf_counter), staticmethod(torch.cuda.synchronize)

    def __init__(self) -> None:
        self.driver, self.handle = None, ctypes.c_void_p()
        try:
            driver = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        # By its UUID: the driver's numbers know nothing of CUDA_VISIBLE_DEVICES.
        uuid = f"GPU-{torch.cuda.get_device_properties(self.device).uuid}".encode()
        if driver.nvmlInit_v2() == 0 and driver.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(self.handle)) == 0:
            self.driver = driver

    def ask(self, name: str, value: Any, *before: object) -> int | None:
        """A figure of the driver; None where it has none."""
        function = getattr(self.driver, name, lambda *_: 1)
        return int(value.value) if function(self.handle, *before, ctypes.byref(value)) == 0 else None

    def read(self) -> Figures:
        """What the device has used until now, and how it runs."""
        mj = self.ask("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong())
        mhz = self.ask("nvmlDeviceGetClockInfo", ctypes.c_uint(), 1)  # NVML_CLOCK_SM
        why = self.ask("nvmlDeviceGetCurrentClocksEventReasons", ctypes.c_ulonglong())
        capped = None if why is None else why & 4 != 0  # nvmlClocksEventReasonSwPowerCap
        return {"at_s": self.now(), "mj": mj, "sm_mhz": mhz, "capped": capped}

    def ready(self, operator: Operator, values: Values) -> Call:
        """The operator as a call, called once: that compiles."""
        with self.device:
            call = partial(operator.function, *operator.operands(values))
        call()
        self.sync()
        return call


def heat(gauge: Gauge, seconds: float = HEAT_S) -> None:
    """Loads the device, which idles while kernels are compiled."""
    with gauge.device:
        left, right = drawn("left", 8192, 8192), drawn("right", 8192, 8192)
    begun = gauge.now()
    while gauge.now() - begun < seconds:
        torch.mm(left, right)
        gauge.sync()


def power(samples: Sequence[Figures]) -> float | None:
    """Watts from the first to the last move of the counter, which moves in coarse steps; None without two."""
    known = [(s["at_s"], s["mj"] / 1e3) for s in samples if s["mj"] is not None]
    moved = [after for before, after in itertools.pairwise(known) if after[1] != before[1]]
    return (moved[-1][1] - moved[0][1]) / (moved[-1][0] - moved[0][0]) if len(moved) > 1 else None


def measure(call: Call, seconds: float, gauge: Gauge) -> Figures:
    """One round of one operator; the clock and the cap are those just before its end."""
    samples, over = list[Figures](), threading.Event()

    def watch() -> None:
        while not over.wait(POLL_S):
            samples.append(gauge.read())

    def repeat(times: float) -> float:
        """Seconds of a call."""
        count, begun = max(1, round(times)), gauge.now()
        for _ in range(count):
            call()
        gauge.sync()
        return (gauge.now() - begun) / count

    each = repeat(seconds / 3 / repeat(3))
    watching = threading.Thread(target=watch)
    watching.start()
    try:
        each = repeat(seconds / each)
    finally:
        over.set()
        watching.join()
    last = samples[-1] if samples else {}
    return {"ms": each * 1e3, "watts": power(samples), "sm_mhz": last.get("sm_mhz"), "capped": last.get("capped")}


def summary(operator: Operator, rounds: Sequence[Figures]) -> Figures:
    """Medians over the rounds, and whether power capped one of them."""
    known = {field: [r[field] for r in rounds if r[field] is not None] for field in rounds[0]}
    ms, watts, mhz = (statistics.median(known[field] or [None]) for field in ("ms", "watts", "sm_mhz"))
    joules, gb = None if watts is None else watts * ms / 1e3, operator.moved_bytes / 1e9
    rate = {"gb_s": gb / ms * 1e3, "joules_gb": joules and joules / gb} if gb else {"tflops": operator.flop / ms / 1e9}
    figures = {"ms": ms, "spread": (max(known["ms"]) - min(known["ms"])) / ms, **rate, "joules": joules, "watts": watts}
    return {**figures, "sm_mhz": mhz, "capped": any(known["capped"]) if known["capped"] else None}


def run(
    case: Sequence[Operator], gauge: Gauge, seconds: float, rounds: int, rest: float, broken: Mapping[str, str]
) -> int:
    """Measures operators in turn, and returns how many; what one of them raises is its line, and ends it alone."""

    def say(o: Operator, more: Figures) -> None:
        print(json.dumps({"operator": o.operator, "impl": o.impl, "case": o.case, "shape": o.shape} | more), flush=True)

    torch.manual_seed(0)
    values, calls = cache(drawn), dict[Operator, Call]()
    found: dict[Operator, list[Figures]] = {o: [] for o in case}
    for number in range(rounds + 1):
        for o in list(found):
            try:
                if o.kernel in broken:
                    raise RuntimeError(broken[o.kernel])
                if number == 0:
                    calls[o] = gauge.ready(o, values)
                else:
                    time.sleep(rest)
                    found[o].append(measure(calls[o], seconds, gauge))
            except Exception as error:
                del found[o]
                say(o, {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]})
            else:
                if number == rounds:
                    say(o, {**summary(o, found[o]), "rounds": rounds, "seconds": seconds, "rest": rest})
    return len(found)


def compiled(operators: Iterable[Operator], arguments: Sequence[str], jobs: int) -> dict[str, str]:
    """Runs an operator of each kernel in a process of its own: what is wrong, by kernel. Good ones stay on disk."""
    firsts = {o.kernel: [sys.executable, *arguments, "--try", o.name] for o in reversed([*operators]) if o.kernel}

    def wrong(command: list[str]) -> str | None:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        except subprocess.TimeoutExpired:
            return f"not done in {PATIENCE_S:.0f} s"
        said = done.stderr.strip().rpartition("\n")[2]
        return f"exit status {done.returncode}: {said}" if done.returncode else None

    with ThreadPoolExecutor(jobs) as pool:
        return {kernel: said for kernel, said in zip(firsts, pool.map(wrong, firsts.values())) if said}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("groups", nargs="+", choices=list(cases()), metavar="GROUP")
    for flag, default in (("seconds", 0.6), ("rounds", 2), ("jobs", max(1, (os.cpu_count() or 1) - 2))):
        parser.add_argument(f"--{flag}", type=type(default), default=default)
    parser.add_argument("--rest", type=float, default=0.0)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--try", dest="alone", help=argparse.SUPPRESS)  # what a kernel's process runs
    a = parser.parse_args()
    if a.rest < 0 or not all(figure > 0 for figure in (a.seconds, a.rounds, a.jobs, 1 if a.rows is None else a.rows)):
        sys.exit("wanted: more than 0 of each, and --rest of 0 at least")
    try:
        only = [re.compile(pattern) for pattern in a.only]
    except re.error as error:
        sys.exit(f"wanted: regular expressions after --only; {error}")
    asked = [[o for o in case if all(t.search(o.name) for t in only)] for g in a.groups for case in cases(a.rows)[g]]
    if not any(asked):
        sys.exit(f"wanted: an operator of {' '.join(a.groups)} with {' and '.join(a.only)} in its name")
    if not torch.cuda.is_available():
        sys.exit("operators.py measures a GPU's time and energy, and there is no GPU")
    gauge = Gauge()
    if a.alone:
        gauge.ready(next(o for case in asked for o in case if o.name == a.alone), drawn)
        return
    packages = {name: library(name) for name in ("quack-kernels", "flash-attn-4", "liger-kernel")}
    first = {"device": torch.cuda.get_device_name(gauge.device), "command": sys.argv[1:], "packages": packages}
    print(json.dumps({**first, "environment": record.machine(), "source": record.source()}), flush=True)
    broken = compiled(itertools.chain(*asked), sys.argv, a.jobs)
    if not a.rest:
        heat(gauge)
    measured = 0
    for case in asked:
        measured += run(case, gauge, a.seconds, a.rounds, a.rest, broken)
        torch.cuda.empty_cache()
    if not measured:
        sys.exit("no operator could be measured: each line says why")


if __name__ == "__main__":
    main()
