"""Route each token to a few of many experts, and run each expert on its tokens.

    route       the published routers: a token's experts and their weights, in float32
    Experts     the module that replaces a dense feed-forward part
    grouped_matmul  the matmul of each group of rows with its matrix

Rows are sorted by expert, so that each matmul is one matrix by one run of rows. Sorting and its inverse are
permutations with exact gradients: no sum depends on a device's order of additions. The weight of an expert multiplies
the input of its down matmul (F values instead of D) and a bias after it; in Llama 4 the expert's input.

Isolation. A token's result depends only on that token: on the CPU every matmul has a multiple of `TILE` rows, so that
the number of other tokens at an expert does not change a bit of it.

Source: Shazeer et al. 2017 (arXiv:1701.06538); the load-balancing loss is Fedus et al. 2021 (arXiv:2101.03961), over
    all layers at once like transformers.
Differs from transformers: router logits, weights and their sums are float32 also with narrower matmuls; the loss
ignores padding.

Legend: S tokens, N experts, k experts per token, F their feed-forward width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optrush.kernels import compute_dtype, widen
from optrush.kernels.rms_norm import unit
from optrush.models.parts import ExpertsShape
from optrush.models.shapes import LOAD_FIGURES, ModelShape

if TYPE_CHECKING:
    from optrush.peft.experts import ExpertsLora
    from optrush.peft.quantized import QuantizedLinear

TILE = 16  # rows; with fewer, a library may use another kernel, which rounds differently

# --- the grouped matmul


@torch.library.custom_op("optrush::grouped_matmul", mutates_args=())
def grouped_matmul(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x (rows, C) in groups, weight (N, C, R), ends (N,) int32 of the groups -> (rows, R).

    On CUDA in bfloat16 torch's grouped matmul, which reads `ends` on the device. Otherwise one matmul per group, and
    the host reads `ends`.
    """
    if x.is_cuda and x.dtype == torch.bfloat16 and len(x):
        out: Tensor = torch._grouped_mm(x, weight, offs=ends)
        return out
    return _group_by_group(x, weight, ends)


@grouped_matmul.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@torch.library.custom_op("optrush::grouped_matmul_weight", mutates_args=())
def _weight_gradient(x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    """x (rows, C), gradient (rows, R) of the output -> gradient of the weight (N, C, R)."""
    if x.is_cuda and x.dtype == torch.bfloat16 and len(x):
        out: Tensor = torch._grouped_mm(x.t(), grad, offs=ends)
        return out
    gradient, first = x.new_zeros(len(ends), x.shape[1], grad.shape[1]), 0
    for group, last in enumerate(ends.tolist()):
        if last > first:
            gradient[group] = x[first:last].t() @ grad[first:last]
        first = last
    return gradient


@_weight_gradient.register_fake
def _(x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[1], grad.shape[1])


def _group_by_group(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Compute the reference of `grouped_matmul`: plain matmuls of groups padded to full tiles."""
    out, first = x.new_empty(x.shape[0], weight.shape[2]), 0
    for group, last in enumerate(ends.tolist()):
        if last > first:
            padded = F.pad(x[first:last], (0, 0, 0, (first - last) % TILE))
            out[first:last] = (padded @ weight[group])[: last - first]
        first = last
    return out


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ends = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, ends)  # not needed for a frozen weight


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, ends = ctx.saved_tensors
    grad = grad.contiguous()
    d_x = grouped_matmul(grad, weight.mT, ends) if ctx.needs_input_grad[0] else None
    if not ctx.needs_input_grad[1]:
        return d_x, None, None
    # In the weight's memory layout: autograd would copy any other, 1.2 GB per layer of 30B-A3B.
    transposed = weight.stride(2) > weight.stride(1)
    return d_x, _weight_gradient(grad, x, ends).mT if transposed else _weight_gradient(x, grad, ends), None


grouped_matmul.register_autograd(_gradients, setup_context=_keep)

Grouped = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Signature of `grouped_matmul`."""


# --- routing


def route(logits: Tensor, e: ExpertsShape) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights (S, k) and numbers (S, k) of each token's experts, and all probabilities (S, N).

    With groups of experts, only groups with the highest single probabilities are eligible (DeepSeek-V2,
    arXiv:2405.04434, section 2.2.2).

    Args:
        logits: (S, N) float32.
    """
    probabilities = torch.softmax(logits, -1)
    choice = probabilities
    if e.groups > 1:
        grouped = probabilities.view(len(probabilities), e.groups, -1)
        choice = _of_groups(grouped, grouped.detach().amax(-1), e.active_groups, 0.0)
    weights, chosen = torch.topk(choice, e.active, dim=-1)
    if e.normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights if e.scale == 1 else weights * e.scale, chosen, probabilities


def _of_groups(grouped: Tensor, scores: Tensor, active: int, other: float) -> Tensor:
    """Return choices (S, N) of (S, groups, N / groups): `other` outside the groups with the highest scores."""
    best = scores.topk(active, dim=-1)[1]
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True)
    return grouped.masked_fill(~kept[..., None], other).flatten(1)


def route_by_sigmoid(logits: Tensor, correction: Tensor, e: ExpertsShape) -> tuple[Tensor, Tensor, Tensor]:
    """Return like `route`, with sigmoid scores and a per-expert bias that corrects the choice, not the weights.

    Source: DeepSeek-V3 (arXiv:2412.19437), section 2.1.2; eligible groups have the highest sums of their two best
        scores. The probabilities are the scores divided by their sum.
    """
    scores = logits.sigmoid()
    choice = scores.detach() + correction
    if e.groups > 1:
        grouped = choice.view(len(choice), e.groups, -1)
        choice = _of_groups(grouped, grouped.topk(2, dim=-1)[0].sum(-1), e.active_groups, float("-inf"))
    chosen = torch.topk(choice, e.active, dim=-1)[1]
    weights = scores.gather(1, chosen)
    if e.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * e.scale, chosen, scores / scores.sum(-1, keepdim=True)


def route_by_logits(logits: Tensor, e: ExpertsShape) -> tuple[Tensor, Tensor, Tensor]:
    """Return like `route`, with the sigmoids of the highest logits as weights (Llama 4).

    Chosen by logits, since sigmoids of large logits are equal.
    """
    highest, chosen = torch.topk(logits, e.active, dim=-1)
    scores = logits.sigmoid()
    return highest.sigmoid(), chosen, scores / scores.sum(-1, keepdim=True)


class _Scatter(torch.autograd.Function):
    """Copy tokens to rows in the order of their experts: x (S, D) -> (S k, D)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x[order // k]

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return _sums(incoming[0], inverse, ctx.k), None, None, None


class _Gather(torch.autograd.Function):
    """Sum the k rows of each token, from the order of their experts: y (S k, D) -> (S, D)."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.k = k
        return _sums(y, inverse, k)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor, None, None, None]:
        (order,) = ctx.saved_tensors
        return incoming[0][order // ctx.k], None, None, None


def _sums(y: Tensor, inverse: Tensor, k: int) -> Tensor:
    wide = torch.promote_types(y.dtype, torch.float32)
    return y[inverse].view(-1, k, y.shape[1]).sum(1, dtype=wide).to(y.dtype)


def gate_pairs(pairs: Tensor) -> Tensor:
    """pairs (rows, 2 F), gate and up alternating -> silu(gate) * up (rows, F)."""
    gate, up = pairs.view(*pairs.shape[:-1], pairs.shape[-1] // 2, 2).unbind(-1)
    return F.silu(gate) * up


def gelu_pairs(pairs: Tensor) -> Tensor:
    """pairs (rows, 2 F), gate and up alternating -> gelu(gate) * up (rows, F), approximated by tanh."""
    gate, up = pairs.view(*pairs.shape[:-1], pairs.shape[-1] // 2, 2).unbind(-1)
    return F.gelu(gate, approximate="tanh") * up


def gate_clamped_pairs(gain: float, limit: float, pairs: Tensor) -> Tensor:
    """pairs (rows, 2 F) -> gate sigmoid(gain gate) (up + 1) (rows, F), both clamped to the limit (gpt-oss)."""
    gate, up = pairs.view(*pairs.shape[:-1], pairs.shape[-1] // 2, 2).unbind(-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gain * gate) * (up + 1)


class _Rows(torch.autograd.Function):
    """Select rows of a bias (N, R) by expert (rows,); the gradient is a matmul: a fixed order of sums."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, numbers: Tensor) -> Tensor:
        ctx.save_for_backward(numbers)
        ctx.count = len(bias)
        return bias[numbers]

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, None]:
        (numbers,) = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, None
        one_hot = F.one_hot(numbers, ctx.count).to(incoming[0].dtype)
        return one_hot.t() @ incoming[0], None


class StackedMatrices(nn.Module):
    """The matrices of a layer's experts, one parameter per kind in `sizes`, or their quantized form.

    Quantized weights replace the parameters, which are then None. Slots: `grouped`, the matmul of groups of rows, also
    for adapters and quantized weights; `piece`, this rank's part of a parameter.
    """

    adapter: ExpertsLora | None
    quantized: Mapping[str, QuantizedLinear] | None  # an nn.ModuleDict
    sizes: Mapping[str, tuple[int, int, int]]  # (N, rows, width), or if transposed (N, width, rows)
    transposed = False
    count: int  # N
    active: int  # k, per token; 0: no token was routed yet

    def __init__(self) -> None:
        super().__init__()
        self.adapter = self.quantized = None
        self.grouped: Grouped = grouped_matmul
        self.piece: Callable[[Tensor], Tensor] = return_whole_parameter

    @property
    def weights(self) -> int:
        """Number of weights of all experts, without biases."""
        return sum(math.prod(size) for size in self.sizes.values())

    def dense(self, kind: str, dtype: torch.dtype) -> Tensor:
        """Return the matrices of that name, in the shapes of `sizes`, from any storage form."""
        if self.quantized is None:
            return self.get_parameter(kind).to(dtype)
        return self.quantized[kind].dense(dtype).view(self.sizes[kind])

    def _product(self, kind: str, x: Tensor, ends: Tensor) -> Tensor:
        """Multiply groups of rows x (rows, width) by the matrices of that name, with their adapters."""
        if self.quantized is not None:
            y: Tensor = self.quantized[kind].grouped_product(x, ends, self.grouped)
        else:
            weight = self.piece(self.get_parameter(kind)).to(x.dtype)
            y = self.grouped(x, weight if self.transposed else weight.mT, ends)
        return y if self.adapter is None else self.adapter.added(kind, y, x, ends, self.piece, self.grouped)

    def _rows(self, bias: Tensor, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        rows: Tensor = _Rows.apply(self.piece(bias).to(dtype), numbers)  # type: ignore[no-untyped-call]
        return rows


class Experts(StackedMatrices):
    """Routed experts: the sum of `down(weight * silu(gate) * up)` over a token's experts, in some families with biases.

    Rows of gate and up alternate, like in the dense part. Slots: `feed`, from tokens and their experts to sums; it
    calls `dispatch`, which multiplies rows by their experts; `activation`, pairs (rows, 2 F) -> (rows, F).
    """

    uncast = ("correction",)
    gate_up: nn.Parameter | None  # (N, 2 F, D)
    down: nn.Parameter | None  # (N, D, F)
    router_bias: nn.Parameter | None  # (N,)
    gate_up_bias: nn.Parameter | None  # (N, 2 F)
    down_bias: nn.Parameter | None  # (N, D)
    number: Tensor  # () int64, the layer's number, on the host: for a stateful dispatch

    def __init__(self, shape: ModelShape, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        assert shape.experts is not None
        self.shape = e = shape.experts
        self.count, self.active = e.count, e.active
        at: dict[str, Any] = {"device": device, "dtype": dtype}
        self.router = nn.Parameter(torch.empty(e.count, shape.width, **at))
        self.sizes = {"gate_up": (e.count, 2 * e.ff_width, shape.width), "down": (e.count, shape.width, e.ff_width)}
        for kind, size in self.sizes.items():
            self.register_parameter(kind, nn.Parameter(torch.empty(size, **at)))
        for name, rows in (("router", ()), ("gate_up", (2 * e.ff_width,)), ("down", (shape.width,))):
            bias = nn.Parameter(torch.empty((e.count, *rows), **at)) if e.biases else None
            self.register_parameter(f"{name}_bias", bias)
        self.eps, beside = shape.norm_eps, e.beside
        self.router_scale = nn.Parameter(torch.empty(shape.width, **at)) if beside else None
        self.expert_scale = nn.Parameter(torch.empty(e.count, **at)) if beside else None
        # Not trained by gradients, and always float32.
        fixed = torch.empty(e.count, device=device, dtype=torch.float32) if e.sigmoid else None
        self.correction = None if fixed is None else nn.Parameter(fixed, requires_grad=False)
        clamped = None if e.clamp is None else partial(gate_clamped_pairs, *e.clamp)
        self.activation: Callable[[Tensor], Tensor] = clamped or (gelu_pairs if shape.gelu else gate_pairs)
        self.feed: Feed = feed_sorted
        self.dispatch: Dispatch = multiply_here

    def forward(self, h: Tensor, filled: Tensor | None, stream: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """h (B, T, D), filled (B, T) bool -> (B, T, D), and (2, N) float32 over the filled tokens: each expert's
        number of tokens, and sum of probabilities.

        stream: (B, T, D), the router's input instead of h, with its own norm.
        """
        e, x, dtype = self.shape, h.flatten(0, 1), compute_dtype(h)
        with torch.autocast(h.device.type, enabled=False):
            router_bias = None if self.router_bias is None else widen(self.router_bias)
            read = widen(x)
            if stream is not None and self.router_scale is not None:
                read = unit(stream.flatten(0, 1), self.eps) * widen(self.router_scale) * read.shape[1] ** -0.5
            logits = F.linear(read, widen(self.router), router_bias)
            if self.correction is not None:
                weights, chosen, probabilities = route_by_sigmoid(logits, self.correction, e)
            else:
                weights, chosen, probabilities = (route_by_logits if e.scaled_input else route)(logits, e)
            weights = weights if self.expert_scale is None else weights * widen(self.expert_scale)[chosen]
            out = self.feed(self, x.to(dtype), weights, places_of(chosen, e.count))
            # Probabilities without a backward pass would keep the tensors that recomputation creates for them.
            probabilities = probabilities if e.balance else probabilities.detach()
            return out.view(h.shape), _load(chosen, probabilities, filled)

    def multiply(self, rows: Tensor, weight: Tensor, ordered: Tensor, ends: Tensor) -> Tensor:
        """Run rows (S, D) through the local experts; see `Dispatch`."""
        if self.shape.scaled_input:  # here, no expert has a bias
            product = self.activation(self._product("gate_up", (rows * weight).to(rows.dtype), ends))
            return self._product("down", product.to(rows.dtype), ends)
        pairs = self._product("gate_up", rows, ends)
        pairs = pairs if self.gate_up_bias is None else pairs + self._rows(self.gate_up_bias, ordered, rows.dtype)
        product = (self.activation(pairs) * weight).to(rows.dtype)
        y = self._product("down", product, ends)
        if self.down_bias is None:
            return y
        return (y + weight * self._rows(self.down_bias, ordered, rows.dtype)).to(rows.dtype)


class Places(NamedTuple):
    """The places of S tokens in the order of their experts, k rows each."""

    order: Tensor  # (S k,) by row, its index among all tokens' choices: token * k + choice
    inverse: Tensor  # (S k,) by choice, its row
    ordered: Tensor  # (S k,) numbers of the rows' experts
    ends: Tensor  # (N,) int32 of the experts' rows


def places_of(chosen: Tensor, count: int) -> Places:
    """Return the places of tokens with the experts `chosen` (S, k), out of `count`."""
    ordered, order = torch.sort(chosen.flatten(), stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    numbers = torch.arange(count, device=order.device)
    return Places(order, inverse, ordered, torch.searchsorted(ordered, numbers, right=True).int())


Feed = Callable[[Experts, Tensor, Tensor, Places], Tensor]
"""(experts, tokens (S, D), float32 weights (S, k) of their experts, places of their rows) -> weighted sums (S, D)"""


def feed_sorted(experts: Experts, x: Tensor, weights: Tensor, places: Places) -> Tensor:
    """The default of the `feed` slot: copy rows to the order of their experts, multiply, and sum."""
    order, inverse, ordered, ends = places
    k = weights.shape[1]
    rows: Tensor = _Scatter.apply(x, order, inverse, k)  # type: ignore[no-untyped-call]
    y = experts.dispatch(experts, rows, weights.flatten()[order][:, None], ordered, ends)
    out: Tensor = _Gather.apply(y, order, inverse, k)  # type: ignore[no-untyped-call]
    return out


Dispatch = Callable[[Experts, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(experts, rows (S, D) in the order of their experts, float32 weights (S, 1) of their outputs, numbers (S,) of the
experts, ends (N,) int32 of their rows) -> (S, D)"""


def multiply_here(experts: Experts, rows: Tensor, weight: Tensor, ordered: Tensor, ends: Tensor) -> Tensor:
    """The default of the `dispatch` slot: every expert is on this rank."""
    return experts.multiply(rows, weight, ordered, ends)


def return_whole_parameter(parameter: Tensor) -> Tensor:
    """The default of the `piece` slot."""
    return parameter


class TheirExperts(StackedMatrices):
    """The experts of one layer of a transformers model; replaces the original module.

    Parameters keep their names and layout; router, activation and a norm after each expert are the model's own. The
    matmuls are `grouped_matmul`: on the CPU a token's result does not depend on other tokens, and frozen matrices save
    no input; unlike transformers' `batched_mm` it never copies a matrix per row.
    """

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.theirs = (theirs,)  # for its activation; in a tuple it is no submodule, whose parameters would count twice
        self.kinds = ("gate_up_proj" if theirs.has_gate else "up_proj", "down_proj")
        self.transposed, self.active = theirs.is_transposed, 0  # active: experts of a token, known at the first call
        self._parameters, theirs._parameters = theirs._parameters, {}  # otherwise `theirs` would keep values in memory
        self._buffers.update(theirs._buffers)
        self._modules.update(theirs._modules)
        self.sizes = {kind: cast("tuple[int, int, int]", tuple(self.get_parameter(kind).shape)) for kind in self.kinds}
        self.count = self.num_experts = self.sizes["down_proj"][0]

    def is_pair(self, width: int) -> bool:
        """Return whether an expert is (2 F, D) and (D, F) for this width D."""
        first, (_, rows, inner) = self.sizes[self.kinds[0]], self.sizes["down_proj"]
        return not self.transposed and first[1:] == (2 * inner, width) and rows == width

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states (..., D), top_k_index and top_k_weights (S, k) -> (..., D)."""
        x, chosen = hidden_states.flatten(0, -2), top_k_index.flatten(0, -2)
        dtype, theirs, k = compute_dtype(x), self.theirs[0], chosen.shape[1]
        self.active = self.active or k
        if self.quantized is None and not torch.is_autocast_enabled(x.device.type):
            dtype = self.get_parameter("down_proj").dtype
        with torch.autocast(x.device.type, enabled=False):
            order, inverse, ordered, ends = places_of(chosen, self.count)
            rows: Tensor = _Scatter.apply(x.to(dtype), order, inverse, k)  # type: ignore[no-untyped-call]
            rows = self._linear(self.kinds[0], rows, ordered, ends)
            rows = theirs._apply_gate(rows) if theirs.has_gate else theirs.act_fn(rows)
            rows = self._linear("down_proj", rows.to(dtype), ordered, ends)
            if theirs.has_post_expert_norm:
                rows = self.get_submodule("post_expert_norm")(rows)
            rows = rows * top_k_weights.flatten()[order][:, None]
            out: Tensor = _Gather.apply(rows, order, inverse, k)  # type: ignore[no-untyped-call]
        return out.to(hidden_states.dtype).view(hidden_states.shape)

    def _linear(self, kind: str, x: Tensor, ordered: Tensor, ends: Tensor) -> Tensor:
        y, bias = self._product(kind, x, ends), self._parameters.get(f"{kind}_bias")
        return y if bias is None else y + self._rows(bias, ordered, y.dtype)


def take_experts(model: nn.Module) -> int:
    """Replace every module with transformers' experts interface by `TheirExperts`; return the number of layers."""
    layers = [(name, m) for name, m in model.named_modules() if hasattr(m, "has_post_expert_norm")]
    for name, module in layers:
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, TheirExperts(module))
    return len(layers)


def _load(chosen: Tensor, probabilities: Tensor, filled: Tensor | None) -> Tensor:
    """Return (2, N) float32 over the filled tokens: each expert's number of tokens, and sum of probabilities."""
    S, k = chosen.shape
    included = probabilities.new_ones(S) if filled is None else filled.flatten().to(probabilities.dtype)
    counts = probabilities.new_zeros(probabilities.shape[1])
    counts = counts.scatter_add(0, chosen.flatten(), included[:, None].expand(S, k).flatten())
    return torch.stack((counts, included @ probabilities))


# --- balance


def balance_loss(load: Tensor, active: int) -> Tensor:
    """Return the load-balancing loss () for the loads (L, 2, N) of all layers: k if the load is balanced.

    N times the sum over experts of an expert's share of tokens times its mean probability.
    """
    counts, probabilities = load.sum(0).unbind()
    tokens = (counts.sum() / active).clamp_min(1.0)  # of all layers
    return load.shape[2] * (counts * probabilities).sum() / tokens.square()


def load_figures(load: Tensor) -> dict[str, Tensor]:
    """Return metrics of the loads (L, 2, N), means over the layers: the share of the busiest expert, and the entropy of
    the shares relative to the largest (1: all experts have equally many tokens)."""
    shares = load[:, 0] / load[:, 0].sum(-1, keepdim=True).clamp_min(1.0)
    entropy = torch.special.entr(shares).sum(-1).mean() / math.log(max(2, load.shape[2]))
    return dict(zip(LOAD_FIGURES, (shares.amax(-1).mean(), entropy), strict=True))
