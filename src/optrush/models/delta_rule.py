"""Mix a document's tokens by a state that each token updates: the gated delta rule, linear in length.

    S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q      S (E, W) per head, zero before a document

with queries and keys of length 1, queries scaled by E^-0.5. Before the rule, queries, keys and values pass a causal
convolution over the last few tokens of each channel; after it every head is normalized and gated.

    plain   chunks of 64 tokens, in float32: within a chunk one triangular system, across chunks the state
    fla     the package flash-linear-attention (its chunk_gated_delta_rule); CUDA

Isolation. A product of two tokens of different documents has the factor 0, and decays are summed only over the
document's values, so another document does not change a bit. A non-finite token is replaced by zeros, since 0 * NaN is
NaN, and the outputs that may read it (same document, not earlier) are set to NaN.

Source: Yang et al., https://arxiv.org/abs/2412.06464 (gated delta rule); Yang et al., https://arxiv.org/abs/2406.06484
(chunks); the layer is Qwen3-Next's.
Legend: B rows, T tokens, H value heads, K key heads, E width of a key, W width of a value, C tokens per chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optrush.data.batch import Documents
from optrush.errors import NeedsError
from optrush.kernels import widen
from optrush.kernels.attention import repeat_heads
from optrush.kernels.rms_norm import unit
from optrush.models.layers import Linear
from optrush.models.shapes import ModelShape

CHUNK = 64
Rule = Callable[..., Tensor]
"""(q and k (B, T, K, E), v (B, T, H, W), g and beta (B, T, H), documents) -> (B, T, H, W), in v's type"""


def plain(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, documents: Documents) -> Tensor:
    """Compute the rule with torch operators, at least in float32."""
    with torch.autocast(v.device.type, enabled=False):
        bad = ~torch.stack([torch.isfinite(x).flatten(2).all(-1) for x in (q, k, v, g, beta)]).all(0)  # (B, T)
        hole = bad[:, :, None]
        ids = documents.ids
        q, k = (_unit(widen(x).masked_fill(hole[..., None], 0)) for x in (q, k))
        out = _chunks(
            repeat_heads(q * q.shape[-1] ** -0.5, v.shape[2]), repeat_heads(k, v.shape[2]),
            widen(v).masked_fill(hole[..., None], 0), widen(g).masked_fill(hole, 0), widen(beta).masked_fill(hole, 0),
            ids,
        )  # fmt: skip
        return out.masked_fill(_since(bad, ids)[:, :, None, None], float("nan")).to(v.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def _since(bad: Tensor, ids: Tensor) -> Tensor:
    """Return (B, T) bool: whether this token or an earlier one of its document is bad."""
    count = bad.int().cumsum(1)
    places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    begins = F.pad(ids[:, 1:] != ids[:, :-1], (1, 0), value=True)
    first = places.masked_fill(~begins, 0).cummax(1)[0]
    return count > (count - bad.int()).gather(1, first)


def _chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, ids: Tensor) -> Tensor:
    """Compute the rule for finite values: all (B, T, H, ...), ids (B, T) -> (B, T, H, W)."""
    T = v.shape[1]
    n = -(-T // CHUNK)

    def cut(x: Tensor) -> Tensor:
        """(B, T, H, ...) -> (B, H, n, C, ...), padded with zeros."""
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, n * CHUNK - T))
        return x.view(x.shape[0], n, CHUNK, *x.shape[2:]).transpose(1, 3).transpose(2, 3).contiguous()

    q, k, v, g, beta = (cut(x) for x in (q, k, v, g, beta))
    ids = F.pad(ids, (0, n * CHUNK - T), value=-1).view(-1, 1, n, CHUNK)  # (B, 1, n, C)
    visible = (ids[..., :, None] == ids[..., None, :]).tril()  # (B, 1, n, C, C): same document, not later
    before = F.pad(ids[:, :, :-1, -1:], (0, 0, 1, 0), value=-2)  # the last document of the previous chunk
    continues = (ids == before)[..., None]  # (B, 1, n, C, 1)
    # Sum the values between two tokens; a difference of cumulative sums would lose small values next to large ones.
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).tril(-1)
    decay = g[..., None].masked_fill(~later, 0).cumsum(-2)  # (B, H, n, C, C)
    between = decay.masked_fill(~visible, float("-inf")).exp()
    since = g.cumsum(-1).exp()[..., None] * continues
    weighed = k * beta[..., None]
    system = ((weighed @ k.transpose(-1, -2)) * between).tril(-1)
    system = system + torch.eye(CHUNK, dtype=system.dtype, device=system.device)
    both = torch.cat((v * beta[..., None], weighed * since), -1)
    solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    new, read = torch.split(solved, [v.shape[-1], k.shape[-1]], -1)
    within = (q @ k.transpose(-1, -2)) * between
    query, left = q * since, k * between[..., -1, :, None]  # reads the old state; enters the new state
    kept = since[..., -1:, :]
    state = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1])
    outputs = []
    for i in range(n):
        fresh = new[:, :, i] - read[:, :, i] @ state
        outputs.append(query[:, :, i] @ state + within[:, :, i] @ fresh)
        state = state * kept[:, :, i] + left[:, :, i].transpose(-1, -2) @ fresh
    return torch.stack(outputs, 2).flatten(2, 3)[:, :, :T].transpose(1, 2)


@cache
def _package() -> Any:
    return import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule


def fla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, documents: Documents) -> Tensor:
    """Compute the rule by flash-linear-attention, over all documents of all rows as one row.

    Raises:
        NeedsError: not on CUDA.
    """
    if not v.is_cuda:
        raise NeedsError("flash-linear-attention", f"tensors on {v.device.type}", "use attention:delta=plain")
    B, T, H = g.shape
    q, k = (repeat_heads(x, H).reshape(1, B * T, H, -1) for x in (q, k))
    v, g, beta = v.reshape(1, B * T, H, -1), g.reshape(1, B * T, H), beta.reshape(1, B * T, H)
    # A compiler cannot trace into the package and would break the graph; it keeps a custom operator as one node.
    compute = _operator if torch.compiler.is_compiling() else _by_package
    return compute(q, k, v, g, beta, documents.starts).view(B, T, H, -1)


def _by_package(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: Tensor) -> Tensor:
    """Call the package's autograd.Function: only that has gradients inside an operator."""
    out: Tensor = _package()(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True, cu_seqlens=_lengths(starts))[0]
    return out


_last: list[tuple[tuple[int, int, int], Tensor, Tensor]] = []  # one entry: the current batch


def _lengths(starts: Tensor) -> Tensor:
    """Return the cumulative lengths without their padding, the same tensor for all layers.

    The package reads them on the host once per tensor, and removing the padding also reads them.
    """
    key = (starts.data_ptr(), starts._version, len(starts))
    if not _last or _last[0][0] != key:
        _last[:] = [(key, starts, torch.unique(starts).long())]  # keeping `starts` keeps its address from being reused
    return _last[0][2]


@torch.library.custom_op("optrush::delta_rule", mutates_args=())
def _operator(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: Tensor) -> Tensor:
    return _by_package(q, k, v, g, beta, starts).contiguous()


@_operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: Tensor) -> Tensor:
    return v.new_empty(v.shape)


@torch.library.custom_op("optrush::delta_rule_backward", mutates_args=())
def _backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients, recomputing the forward pass: the package's saved tensors are not operator outputs."""
    with torch.enable_grad():
        q, k, v, g, beta = (x.detach().requires_grad_() for x in (q, k, v, g, beta))
        out = _by_package(q, k, v, g, beta, starts)
    gradients = torch.autograd.grad(out, (q, k, v, g, beta), d_out)
    dq, dk, dv, dg, db = (x.contiguous() for x in gradients)
    return dq, dk, dv, dg, db


@_backward.register_fake
def _(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dg, db = (x.new_empty(x.shape) for x in (q, k, v, g, beta))
    return dq, dk, dv, dg, db


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(d_out.contiguous(), *ctx.saved_tensors), None


_operator.register_autograd(_differentiate, setup_context=_save)

RULES: dict[str, Rule] = {"plain": plain, "fla": fla}


def causal_convolution(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """Convolve each channel of x (B, T, channels) with weight (channels, 1, n) over a document's last n tokens."""
    taps, out = weight.squeeze(1), x * weight[:, 0, -1]
    for back in range(1, taps.shape[1]):
        earlier = F.pad(x, (0, 0, back, 0))[:, : x.shape[1]]
        same = F.pad(ids, (back, 0), value=-1)[:, : x.shape[1]] == ids
        out = out + earlier.masked_fill(~same[..., None], 0) * taps[:, -1 - back]
    return out


class DeltaRule(nn.Module):
    """A layer's token mixing instead of attention. Parameters have their published names.

    Slots: `rule`, a function of `RULES`.
    """

    in_proj_qkvz: Linear  # with in_proj_ba, grouped by key head; or four linears
    in_proj_ba: Linear
    in_proj_qkv: Linear
    in_proj_z: Linear
    in_proj_b: Linear
    in_proj_a: Linear
    out_proj: Linear

    def __init__(self, shape: ModelShape, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        assert shape.delta is not None
        self.shape, self.eps = shape.delta, shape.norm_eps
        at: dict[str, Any] = {"device": device, "dtype": dtype}
        for name, linear in shape.linears.items():
            if linear.module.startswith("delta."):
                setattr(self, name, Linear(linear.inputs, tuple(linear.pieces.items()), bias=False, **at))
        self.conv1d = Convolution(shape.delta.channels, shape.delta.taps, **at)
        self.dt_bias = nn.Parameter(torch.empty(shape.delta.heads, **at))
        self.A_log = nn.Parameter(torch.empty(shape.delta.heads, **at))
        self.norm = GatedNorm(shape.delta.value, shape.norm_eps, **at)
        self.rule: Rule = plain

    def forward(self, h: Tensor, documents: Documents) -> Tensor:
        """h (B, T, D) -> (B, T, D)."""
        s, at = self.shape, h.shape[:2]
        qkv, z, b, a = self._by_key_head(h) if s.by_key_head else self._apart(h)
        mixed = F.silu(causal_convolution(qkv, self.conv1d.weight, documents.ids))
        q, k, v = torch.split(mixed, [s.key_heads * s.key, s.key_heads * s.key, s.heads * s.value], -1)
        q, k, v = (x.reshape(*at, -1, width) for x, width in ((q, s.key), (k, s.key), (v, s.value)))
        g = -widen(self.A_log).exp() * F.softplus(widen(a) + widen(self.dt_bias))
        out = self.norm(self.rule(q, k, v, g, b.sigmoid(), documents), z.reshape(*at, -1, s.value))
        mixed_out: Tensor = self.out_proj(out.flatten(2))
        return mixed_out

    def _apart(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.in_proj_qkv(h), self.in_proj_z(h), self.in_proj_b(h), self.in_proj_a(h)

    def _by_key_head(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        s, at = self.shape, (*h.shape[:2], self.shape.key_heads, -1)
        group = s.heads // s.key_heads
        parts = torch.split(self.in_proj_qkvz(h).view(at), [s.key, s.key, group * s.value, group * s.value], -1)
        q, k, v, z = (x.flatten(2) for x in parts)
        b, a = (x.flatten(2) for x in torch.split(self.in_proj_ba(h).view(at), [group, group], -1))
        return torch.cat((q, k, v), -1), z, b, a


def rules(model: nn.Module) -> list[str]:
    """Return the names of the functions that a model's delta rules call."""
    used = {module.rule for module in model.modules() if isinstance(module, DeltaRule)}
    return sorted(name for name, rule in RULES.items() if rule in used)


class Convolution(nn.Module):
    """The weight of a convolution, one row of taps per channel."""

    def __init__(self, channels: int, taps: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps, device=device, dtype=dtype))


class GatedNorm(nn.Module):
    """A norm of each head, times silu of its gate."""

    def __init__(self, width: int, eps: float, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, device=device, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x and gate (B, T, H, W) -> (B, T, H, W)."""
        return (self.weight * unit(x, self.eps).to(x.dtype) * F.silu(widen(gate))).to(x.dtype)
