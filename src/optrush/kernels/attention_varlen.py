"""torch's variable-length flash attention. Importing it loads torch's compiler (a second), so import it where it runs.

Sinks. A logit c per head that adds to the sum of every softmax, and belongs to no token, scales the attention's output.
With L, the logarithm of the sum of the other exponentials, and M = log(exp(L) + exp(c)), outputs are exp(L - M) times
the outputs without it. The kernel's backward recomputes probabilities as exp(score - L), and their gradients from the
outputs. Given M and the scaled outputs, it is the backward with the sink; the gradient of c is -exp(c - M) times the
sum of outputs times their gradients.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from optrush.data.batch import Documents

# torch 2.11 needs as many key/value heads as query heads, later versions group them. Checked at import: inspecting a
# signature inside a compiled block would break its graph.
GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters


def attend(q: Tensor, k: Tensor, v: Tensor, documents: Documents, window: int | None = None) -> Tensor:
    """q (B, T, H, E), k and v (B, T, K, E) -> (B, T, H, E); K < H needs `GROUPS`. CUDA, bfloat16 or float16."""
    return _attend(q, k, v, documents.starts, documents.starts, documents.longest, window)


def attend_from(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    """Compute `attend` of the last t queries of each row's first s tokens: q (B, t, H, E), k and v (B, s, K, E).

    Per document there are then fewer queries than keys (the kernel aligns them at the end), or neither.
    """
    T, s, t = documents.ids.shape[1], k.shape[1], q.shape[1]
    row, at = documents.starts // T, documents.starts % T  # per boundary
    queries = row * t + at.clamp(s - t, s) - (s - t)
    keys = row * s + at.clamp(max=s)
    return _attend(q, k, v, queries.int(), keys.int(), documents.longest)


def attend_all(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Tensor:
    """Attend in both directions within documents: q, k, v (N, H, E), starts (documents + 1,) int32 -> (N, H, E)."""
    q, k, v = (x.contiguous() for x in (q, k, v))
    out = varlen_attn(q, k, v, starts, starts, longest, longest, window_size=(-1, -1))
    assert isinstance(out, Tensor)
    return out


def _attend(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, longest: int, window: int | None = None
) -> Tensor:
    B, T, H, E = q.shape
    options: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}  # before; nothing after
    if k.shape[2] != H:
        options["enable_gqa"] = True
    most = min(longest, T), min(longest, k.shape[1])
    q, k, v = (x.reshape(x.shape[0] * x.shape[1], -1, E) for x in (q, k, v))
    out = varlen_attn(q, k, v, queries, keys, *most, **options)
    assert isinstance(out, Tensor)
    return out.view(B, T, H, E)


# --- with sinks


def attend_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, documents: Documents, window: int | None = None
) -> Tensor:
    """Compute `attend` with sinks (H,), a logit per head without a token; k and v have as many heads as q."""
    B, T, H, E = q.shape
    q, k, v = (x.reshape(B * T, -1, E) for x in (q, k, v))
    left = -1 if window is None else window - 1
    out: Tensor = _attend_with_sinks(q, k, v, sinks, documents.starts, min(documents.longest, T), left)[0]
    return out.view(B, T, H, E)


def include_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Scale out (N, H, E) and increase lse (H, N) float32, both computed without sinks (H,), to include them."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return (out * torch.exp(lse - total).t()[..., None]).to(out.dtype), total


def sinks_gradient(d_out: Tensor, out: Tensor, total: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient (H,) of sinks; out and total are the results of `include_sinks`."""
    product = (d_out * out).sum(-1, dtype=total.dtype)  # (N, H)
    return -(torch.exp(sinks.to(total.dtype)[:, None] - total) * product.t()).sum(1).to(sinks.dtype)


@torch.library.custom_op("optrush::attend_with_sinks", mutates_args=())
def _attend_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, starts: Tensor, longest: int, left: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v (N, H, E) -> outputs, the log-sum-exp (H, N) with sinks, and a state for torch's backward."""
    out, lse, state, _, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, starts, starts, longest, longest, 0.0, left < 0, return_debug_mask=False,
        window_size_left=left, window_size_right=0,
    )  # fmt: skip
    return *include_sinks(out, lse, sinks), state


@_attend_with_sinks.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, starts: Tensor, longest: int, left: int
) -> tuple[Tensor, Tensor, Tensor]:
    total = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    return torch.empty_like(q), total, torch.empty(2, dtype=torch.uint64, device=q.device)


@torch.library.custom_op("optrush::attend_with_sinks_backward", mutates_args=())
def _backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, starts: Tensor, out: Tensor, total: Tensor,
    state: Tensor, longest: int, left: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        d_out, q, k, v, out, total, starts, starts, longest, longest, 0.0, left < 0, state, state.new_empty(0),
        window_size_left=left, window_size_right=0,
    )  # fmt: skip
    return dq, dk, dv, sinks_gradient(d_out, out, total, sinks)


@_backward.register_fake
def _(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, starts: Tensor, out: Tensor, total: Tensor,
    state: Tensor, longest: int, left: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv, d_sinks = (torch.empty_like(x) for x in (q, k, v, sinks))
    return dq, dk, dv, d_sinks


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.longest, ctx.left = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx: Any, d_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(d_out.contiguous(), *ctx.saved_tensors, ctx.longest, ctx.left), None, None, None


_attend_with_sinks.register_autograd(_differentiate, setup_context=_keep)
