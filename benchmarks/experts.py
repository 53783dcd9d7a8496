"""What the products of routed experts cost on one GPU, by every kernel there is for them: a layer of Qwen3-30B-A3B.

usage: experts.py [--tokens N]... [--only PATTERN]... [--repeats R] [--limit S] [--device cpu]

    forward  gate and up, the activation, down, of rows in the order of their experts
    inputs   the gradient of those rows, from that of the results and saved gate and up
    weights  the gradients of both matrices
    layer    from tokens to tokens where each one's experts are given (order, gather, products, weighted sum), and the
             gradients of tokens, matrices and weights; `layer forward`: the first alone

Kernels: `experts`, as models/experts.py has it; `experts fused`, with fused-kernels; `experts quack`, its mlp=quack,
whose tiles are fixed; `experts compiled`; `group by group`, the reference of the tests; `quack`, whose epilogues
activate; `sonic`, the package sonic-moe. `torch bare` and `quack bare` are torch._grouped_mm and QuACK without the
activation: a bound, which `share`, of the best kernel's rate, leaves out. `quack`, `quack bare` and SonicMoE take the
fastest of TILES for balanced routing; skewed routing is by Zipf's law, some experts have no row. `difference` from
float32 is the largest as a part of the largest value. One JSON line for each `routing what kernel` in which all of
--only are found; what is missing, fails or would begin after --limit seconds says so there. Repeats are in turn, `ms`
is their median. --device cpu rehearses, at small shapes (benchmarks/README.md).
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optrush.kernels.experts_quack import feed_quack
from optrush.kernels.swiglu import fused_activation
from optrush.models import experts
from optrush.models.shapes import SHAPES, ModelShape
from optrush.technique import library

SMALL = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 32}
# QuACK's tiles: rows, columns, whether two groups of warps take turns, and the cluster.
TILES = ((128, 192, True, 2, 1), (128, 128, True, 2, 1), (128, 256, False, 2, 1), (256, 128, False, 2, 1))
SKEW, EMPTY = 1.0, 16  # the power of Zipf's law; of so many experts one has no token
MS, BEGUN = 20.0, time.perf_counter()  # of one repeat
PACKAGES = {name: library(name) for name in ("torch", "triton", "quack-kernels", "nvidia-cutlass-dsl", "sonic-moe")}

Results = tuple[Tensor, ...]
Run = Callable[[], Results]
Product = Callable[[Tensor, Tensor, Any], Tensor]
Lines = dict[tuple[str, str], dict[str, Any]]


def chosen(routing: str, T: int, N: int, k: int) -> Tensor:
    """Numbers (T, k) of each token's experts."""
    if routing == "balanced":
        return (torch.arange(T * k).view(T, k) % N)[torch.randperm(T)]
    scores = -SKEW * torch.arange(1.0, N + 1).log()
    scores[N - N // EMPTY :] = -torch.inf
    return torch.randperm(N)[(scores - torch.empty(T, N).exponential_().log()).topk(k)[1]]  # without replacement


def case(shape: ModelShape, T: int, routing: str, device: str) -> SimpleNamespace:
    """Operands in bfloat16, and what they give, in float32."""
    torch.manual_seed(0)
    e = shape.experts
    assert e is not None
    N, k, D, width = e.count, e.active, shape.width, e.ff_width
    c = SimpleNamespace(shape=shape, routing=routing, chosen=chosen(routing, T, N, k).to(device))
    sizes = {"x": (1.0, T, D), "d_out": (0.01, T, D), "gate_up": (0.03, N, 2 * width, D), "down": (0.03, N, D, width)}
    for name, (scale, *size) in sizes.items():
        setattr(c, name, torch.randn(*size, device=device).mul_(scale).bfloat16())
    c.scores = torch.rand(T, k, device=device).softmax(-1)
    ordered, order = c.chosen.flatten().sort(stable=True)
    c.ends = torch.searchsorted(ordered, torch.arange(N, device=device), right=True).int()
    c.bounds = F.pad(c.ends, (1, 0))
    c.counts = c.bounds.diff().tolist()
    x, gate_up, down, scores = (t.float().requires_grad_() for t in (c.x, c.gate_up, c.down, c.scores))
    by_group = lambda t, weight: torch.cat([rows @ w.T for rows, w in zip(t.split(c.counts), weight)])
    rows = x[order // k]
    pairs = by_group(rows, gate_up)
    product = experts.gate_pairs(pairs)
    y = by_group(product, down)
    out = torch.zeros_like(x).index_add(0, order // k, y * scores.flatten()[order][:, None])
    of = (x, gate_up, down, scores, rows, pairs, product, y)
    *layer, d_rows, d_pairs, d_product, d_y = torch.autograd.grad(out, of, c.d_out.float())
    kept = {"rows": rows, "pairs": pairs, "product": product, "d_pairs": d_pairs, "d_y": d_y}
    for name, t in kept.items():
        setattr(c, name, t.detach().bfloat16())
    c.leaves = tuple(nn.Parameter(t) for t in (c.x, c.gate_up, c.down, c.scores))
    c.bare = {"forward": (pairs.detach(), y.detach()), "inputs": (d_product, d_rows), "weights": layer[1:3]}
    c.want = {"forward": c.bare["forward"][1:], "inputs": (d_rows,), "weights": layer[1:3]}
    c.want |= {"layer forward": (out.detach(),), "layer": (out.detach(), *layer)}
    return c


# --- kernels: of a case, calls by what they give


def grouped(product: Product, of_weight: Product, activation: Any, c: Any) -> dict[str, Run]:
    """Of product(x, weight (N, C, R), c) and of_weight(d_y, x, c) -> (N, R, C); without an activation: bare."""
    first, second = partial(product, c.rows, c.gate_up.mT, c), lambda x: product(x, c.down.mT, c)
    d_first, d_second = partial(product, c.d_y, c.down, c), lambda d_pairs: product(d_pairs, c.gate_up, c)
    weights = lambda: (of_weight(c.d_pairs, c.rows, c), of_weight(c.d_y, c.product, c))
    forward, inputs = lambda: (first(), second(c.product)), lambda: (d_first(), d_second(c.d_pairs))
    if activation is not None:
        pairs = c.pairs.detach().requires_grad_()
        active = activation(pairs)
        d_active = lambda d_product: torch.autograd.grad(active, pairs, d_product, retain_graph=True)[0]
        forward, inputs = lambda: (second(activation(first())),), lambda: (d_second(d_active(d_first())),)
    return {"forward": forward, "inputs": inputs, "weights": weights}


def one_by_one(d_y: Tensor, x: Tensor, c: Any) -> Tensor:
    return torch.stack([left.T @ right for left, right in zip(d_y.split(c.counts), x.split(c.counts))])


def quack(c: Any) -> dict[str, Run]:
    options = {"activation": "swiglu", "cu_seqlens_m": c.bounds, "dynamic_scheduler": False}
    gated = lambda: gemm_interface().gemm_gated(c.rows, c.gate_up.mT, **options)[1]
    d_gated = lambda: gemm_interface().gemm_dgated(c.d_y, c.down, c.pairs, **options)[0]
    forward, inputs = lambda: (QUACK[0](gated(), c.down.mT, c),), lambda: (QUACK[0](d_gated(), c.gate_up, c),)
    return grouped(*QUACK, None, c) | {"forward": forward, "inputs": inputs}


@cache
def gemm_interface() -> Any:
    """QuACK's functions, which look for the best of TILES rather than of all, and not for a second at each."""
    from quack import autotuner, gemm_interface
    from quack.gemm_config import GemmConfig
    from quack.gemm_runtime import autotune

    names = ("tile_m", "tile_n", "pingpong", "cluster_m", "cluster_n")
    configs = [GemmConfig(**dict(zip(names, tile)), is_dynamic_persistent=False) for tile in TILES]
    gemm_interface.gemm_tuned.configs = [autotuner.AutotuneConfig(config=config) for config in configs]
    autotune.get_all_configs = lambda **_: configs

    def few(*_: object) -> int:
        raise MemoryError("copies of operands, without which triton's own timer serves")

    autotuner._pick_l2_rotate_count = few
    return gemm_interface


def layer(tokens: Callable[[], Tensor], c: Any) -> dict[str, Run]:
    gradients = lambda out: (out, *torch.autograd.grad(out, c.leaves, c.d_out))
    return {"layer forward": torch.no_grad()(lambda: (tokens(),)), "layer": lambda: gradients(tokens())}


def own(
    activation: Callable[[Tensor], Tensor], c: Any, feed: experts.Feed = experts.feed_sorted
) -> Callable[[], Tensor]:
    """What `Experts.forward` does with a router's choice."""
    module = experts.Experts(c.shape, device=torch.device("meta"), dtype=torch.bfloat16)
    x, module.gate_up, module.down, scores = c.leaves
    module.activation, module.feed = activation, feed

    def tokens() -> Tensor:
        ordered, order = torch.sort(c.chosen.flatten(), stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        ends = torch.searchsorted(ordered, torch.arange(len(c.counts), device=x.device), right=True).int()
        return module.feed(module, x, scores, experts.Places(order, inverse, ordered, ends))

    return tokens


def sonic(c: Any) -> Callable[[], Tensor]:
    """SonicMoE's layer behind its router (sonicmoe/functional/__init__.py)."""
    from sonicmoe import functional
    from sonicmoe.enums import ActivationType

    gemm_interface()
    (T, k), N, (x, gate_up, down, scores) = c.chosen.shape, len(c.counts), c.leaves
    narrow, sizes = c.chosen.int(), (N, N + 1, T * k, T * k, T * k)

    def tokens() -> Tensor:
        made = [torch.empty(size, dtype=torch.int32, device=x.device) for size in sizes]
        functional.TC_topk_router_metadata_triton(narrow, N, *made)
        _, bounds, *moved = made
        tail = (*moved, None, False, ActivationType.SWIGLU)
        first, second = gate_up.permute(1, 2, 0), down.permute(1, 2, 0)
        a, pairs = functional._UpProjection.apply(x, first, None, bounds, T * k, k, *tail, False, False)
        return functional._DownProjection.apply(a, pairs, second, None, scores, bounds, T, k, *tail)

    return tokens


def both(activation: Callable[[Tensor], Tensor], c: Any) -> dict[str, Run]:
    return grouped(*OWN, activation, c) | layer(own(activation, c), c)


def compiled(c: Any) -> dict[str, Run]:
    torch.compiler.reset()
    return layer(torch.compile(own(experts.gate_pairs, c), dynamic=False), c)


OWN = (lambda x, w, c: experts.grouped_matmul(x, w, c.ends), lambda d, x, c: experts._weight_gradient(x, d, c.ends).mT)
TORCH = (lambda x, w, c: torch._grouped_mm(x, w, offs=c.ends), lambda d, x, c: torch._grouped_mm(d.T, x, offs=c.ends))
QUACK = (
    lambda x, w, c: gemm_interface().gemm(x, w, cu_seqlens_m=c.bounds),
    lambda d, x, c: gemm_interface().gemm(d.T, x, cu_seqlens_k=c.bounds),
)
PLAIN = (lambda x, w, c: experts._group_by_group(x, w, c.ends), one_by_one)
WHAT = ("forward", "inputs", "weights", "layer forward", "layer")
KERNELS: dict[str, tuple[str | None, tuple[str, ...], Callable[[Any], dict[str, Run]]]] = {  # with what must be there
    "experts": (None, WHAT, partial(both, experts.gate_pairs)),
    "experts fused": (None, WHAT, partial(both, fused_activation)),
    "group by group": (None, WHAT[:3], partial(grouped, *PLAIN, experts.gate_pairs)),
    "torch bare": (None, WHAT[:3], partial(grouped, *TORCH, None)),
    "quack bare": ("quack.gemm_interface", WHAT[:3], partial(grouped, *QUACK, None)),
    "quack": ("quack.gemm_interface", WHAT[:3], quack),
    "experts quack": ("quack.gemm_interface", WHAT[3:], lambda c: layer(own(experts.gate_pairs, c, feed_quack), c)),
    "experts compiled": ("triton", WHAT[4:], compiled),
    "sonic": ("sonicmoe", WHAT[3:], lambda c: layer(sonic(c), c)),
}


def missing(module: str | None, device: str) -> str | None:
    if module is None or device == "cpu":
        return None if module is None else "needs a GPU"
    try:
        importlib.import_module(module)
    except Exception as error:
        return brief(error)
    return None


def brief(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def timed(run: Run, times: int, device: str) -> float:
    """Milliseconds of a call."""
    if device == "cpu":
        begun = time.perf_counter()
        for _ in range(times):
            run()
        return (time.perf_counter() - begun) * 1e3 / times
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / times


def difference(run: Run, want: Results) -> float:
    """The largest from float32, as a part of the largest value; what is never written is NaN, as far as may be."""
    for t in want:
        torch.full(t.shape, torch.nan, dtype=torch.bfloat16, device=t.device)
    largest = [(a.detach().float() - b).abs().max() / b.abs().max() for a, b in zip(run(), want, strict=True)]
    return float(torch.stack(largest).nan_to_num(1e9, 1e9).max())


def measure(c: Any, asked: list[re.Pattern[str]], repeats: int, limit: float) -> Lines:
    """What one case found, by what and kernel; an error ends a kernel's part alone."""
    found, runs, spent = Lines(), dict[tuple[str, str], tuple[Run, int]](), dict[tuple[str, str], list[float]]()
    device = c.x.device.type
    for kernel, (module, whats, make) in KERNELS.items():
        made: dict[str, Run] = {}
        for what in whats:
            if not all(only.search(f"{c.routing} {what} {kernel}") for only in asked):
                continue
            line = found[what, kernel] = dict[str, Any]()
            print(f"{time.perf_counter() - BEGUN:.0f} s: {c.routing} {what} {kernel}", file=sys.stderr, flush=True)
            try:
                if why := missing(module, device):
                    line["missing"] = why
                elif time.perf_counter() - BEGUN > limit:
                    line["late"] = f"not begun within {limit:g} s"
                else:
                    made = made or make(c)
                    want = (c.bare if kernel.endswith("bare") else c.want)[what]
                    line["difference"] = difference(made[what], want)
                    once = timed(made[what], 2, device)
                    runs[what, kernel], spent[what, kernel] = (made[what], max(1, round(MS / once))), []
            except Exception as error:
                line["error"] = brief(error)
    for key, (run, times) in [*runs.items()] * repeats:
        try:
            spent[key].append(timed(run, times, device))
        except Exception as error:
            found[key]["error"] = brief(error)
    for key, ms in ((key, statistics.median(times)) for key, times in spent.items() if "error" not in found[key]):
        found[key] |= {"ms": ms, "spread": (max(spent[key]) - min(spent[key])) / ms}
        found[key]["tflops"] = (18 if key[0] == "layer" else 6) * len(c.rows) * c.down[0].numel() / ms / 1e9
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, action="append")
    parser.add_argument("--only", action="append", default=[], type=re.compile)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit", type=float, default=130.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    a = parser.parse_args()
    small = SMALL if a.device == "cpu" else {}
    if a.device == "cuda" and not torch.cuda.is_available():
        sys.exit("experts.py measures a GPU, and there is none: --device cpu rehearses")
    if a.repeats < 1 or min(a.tokens or [1]) < 1:
        sys.exit("wanted: 1 token and 1 repeat at least")
    os.environ.setdefault("QUACK_COMPILE_WORKERS", str(max(2, (os.cpu_count() or 1) - 2)))
    name = torch.cuda.get_device_name() if a.device == "cuda" else "cpu"
    shape = ModelShape.read({**SHAPES["qwen3-30b-a3b"], **small})
    for T, routing in itertools.product(a.tokens or ([64] if small else [4096, 16384]), ("balanced", "skewed")):
        c = case(shape, T, routing, a.device)
        sizes = {"tokens": T, "experts": len(c.counts), "k": c.chosen.shape[1], "D": shape.width, "F": c.down.shape[2]}
        sizes |= {"busiest": max(c.counts), "empty": c.counts.count(0)}
        found = measure(c, a.only, a.repeats, a.limit)
        for (what, kernel), line in sorted(found.items(), key=lambda item: WHAT.index(item[0][0])):
            rates = [found[key].get("tflops", 0.0) for key in found if key[0] == what and not key[1].endswith("bare")]
            share = {"share": line["tflops"] / max(rates)} if "tflops" in line and any(rates) else {}
            where = {"shape": sizes, "routing": routing, "what": what, "kernel": kernel}
            print(json.dumps(where | line | share | {"device": name, "packages": PACKAGES}), flush=True)


if __name__ == "__main__":
    main()
