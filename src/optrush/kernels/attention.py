"""Compute causal attention within each document of a row. All functions have one signature:

    attend(q (B, T, H, E), k (B, T, K, E), v (B, T, K, E), documents) -> (B, T, H, E), in q's type

with scores scaled by E^-0.5; query head h reads key/value head h // (H / K). `masked`, `sdpa` and `varlen` accept
values of another width than E; the output has the width of the values. Some take two more arguments: `window`, the
number of tokens that a token reads including itself (Mistral 7B, arXiv:2310.06825); and `sinks` (H,), a logit per head
that adds to the softmax's sum and has no value (arXiv:2309.17453; learned in gpt-oss). `masked` alone takes `cap`, a
bound of the scores by a tanh (Gemma 2, arXiv:2408.00118).

    masked   plain torch, float32 softmax, full (B, H, T, T) scores: the reference; windows and sinks
    sdpa     torch's fused attention; one document per row: causal without a mask, else a boolean mask; windows by the
             mask, sinks by one more key
    varlen   torch's variable-length flash attention over documents.starts; CUDA, bfloat16 or float16; windows, sinks
    cudnn    torch's fused attention by cuDNN's kernel only; CUDA, one document per row
    fa4      flash-attn-4; Hopper and later, bfloat16 or float16; windows, sinks

Isolation. No value of a document reaches the outputs of another document: a masked token has probability exactly 0, so
changed values of document A do not change a bit of B. But 0 * NaN is NaN: in p @ v, and in the backward in ds @ k and
ds^T @ q. So `masked` and `sdpa` replace tokens that are not finite by zeros before any matmul, and then set the outputs
that may read them (same document, not earlier) to NaN: a bad value stays in its document, and always reaches that
document's loss. With one document per row, rows are independent and this is not needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from optrush.data.batch import Documents
from optrush.errors import NeedsError
from optrush.kernels.lora_matmul import empty_padded

# --- FlashAttention 4 for Hopper and later, as two custom operators: a compiled block stays one graph.
#
# Source: https://github.com/Dao-AILab/flash-attention (flash_attn/cute), Zadouri et al.,
# https://arxiv.org/abs/2603.05451, without the package's hooks into torch, which affect the whole process.
#
# bfloat16 or float16 on CUDA, capability 9.0 and up; key/value heads are not expanded. Rows of one document are passed
# as dense rows, packed rows with documents.starts. Saves q, k, v, the output and one float32 number per row and head.
# The backward adds with atomics, in a fixed order under torch's deterministic algorithms.


WIDE = 128  # values per head
FLASH = 256  # the largest head of flash attention


def flash4(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, *, window: int | None = None, sinks: Tensor | None = None,
    padding: int = 0,
) -> Tensor:  # fmt: skip
    """Compute causal attention within each document; padding: columns (lora_matmul.py) after a token's heads.

    Raises:
        NeedsError: not on CUDA, or neither bfloat16 nor float16.
    """
    _demand_cuda("flash-attn-4", q)
    B, T, H, E = q.shape
    if documents.single:
        out: Tensor = _forward(q, k, v, sinks, None, T, window, padding)[0]
        return out
    # The longest document only bounds the launch: pass T for all batches, so that another length does not recompile.
    q, k, v = (x.reshape(B * T, -1, E) for x in (q, k, v))
    out = _forward(q, k, v, sinks, documents.starts, T, window, padding)[0]
    return out.view(B, T, H, E)


def _demand_cuda(kernel: str, q: Tensor) -> None:
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16):
        do = "use bfloat16 or float16 on a CUDA device, or sdpa attention"
        raise NeedsError(kernel, f"{q.dtype} on {q.device.type}", do)


@cache
def _package() -> ModuleType:
    """Import the package's functions, with its disk cache of compiled kernels, which is off by default."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    return import_module("flash_attn.cute.interface")


@torch.library.custom_op("optrush::flash4", mutates_args=(), device_types="cuda")
def _forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, starts: Tensor | None, longest: int, window: int | None,
    padding: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output like q, padded, and each row's float32 log-sum-exp including its sink.

    The log-sum-exp is (B, H, T) for dense rows, (H, B*T) with starts.
    """
    most = None if starts is None else longest
    # The query heads of one key/value head in one tile, or each in its own tile. On an H200, with four of them, the
    # latter is 5 % faster for dense rows at E = 128; at 64, and with packed rows, it is 7 to 16 % slower (docs/log).
    apart = starts is None and q.shape[-1] >= WIDE
    out, lse, *_ = _package()._flash_attn_fwd(
        q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=most, max_seqlen_k=most, causal=True,
        return_lse=True, out=_empty(q, padding), pack_gqa=False if apart else None, learnable_sink=sinks,
        window_size_left=_left(window),
    )  # fmt: skip
    return out, lse


def _left(window: int | None) -> int | None:
    """Return the number of earlier tokens that a token reads; None: all."""
    return None if window is None else window - 1


@_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, starts: Tensor | None, longest: int, window: int | None,
    padding: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    shape = (q.shape[0], q.shape[2], q.shape[1]) if starts is None else (q.shape[1], q.shape[0])
    return _empty(q, padding), q.new_empty(shape, dtype=torch.float32)


def _empty(q: Tensor, padding: int) -> Tensor:
    """Allocate the output."""
    *tokens, H, E = q.shape
    return empty_padded(q, *tokens, H * E, columns=padding).view(q.shape)


@torch.library.custom_op("optrush::flash4_backward", mutates_args=(), device_types="cuda")
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor,
    starts: Tensor | None, longest: int, window: int | None, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v and sinks; the last is empty without sinks."""
    most = None if starts is None else longest
    dq, dk, dv, *rest = _package()._flash_attn_bwd(
        q, k, v, out, grad.contiguous(), lse, causal=True, cu_seqlens_q=starts, cu_seqlens_k=starts,
        max_seqlen_q=most, max_seqlen_k=most, deterministic=deterministic, learnable_sink=sinks,
        window_size_left=_left(window),
    )  # fmt: skip
    return dq, dk, dv, rest[0] if sinks is not None else q.new_empty(0)


@_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor,
    starts: Tensor | None, longest: int, window: int | None, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv, q.new_empty(0) if sinks is None else torch.empty_like(sinks)


def _setup_context(
    ctx: torch.autograd.function.FunctionCtx, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]
) -> None:
    q, k, v, sinks, starts, longest, window, _ = inputs
    ctx.save_for_backward(q, k, v, sinks, *output, starts)  # type: ignore[arg-type]
    ctx.longest, ctx.window = longest, window  # type: ignore[attr-defined]
    ctx.set_materialize_grads(False)


def _gradients(ctx: torch.autograd.function.FunctionCtx, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, out, lse, starts = ctx.saved_tensors  # type: ignore[attr-defined]
    ordered = torch.are_deterministic_algorithms_enabled()
    longest, window = ctx.longest, ctx.window  # type: ignore[attr-defined]
    *heads, sunk = _backward(grad, q, k, v, sinks, out, lse, starts, longest, window, ordered)
    return (*heads, None if sinks is None else sunk, None, None, None, None)


_forward.register_autograd(_gradients, setup_context=_setup_context)


Attend = Callable[..., Tensor]


def visible_tokens(documents: Documents, window: int | None = None) -> Tensor:
    """Return (B, T, T) bool: token t (second axis) may read s (third): same document, not later, within the window.

    Within an image whose placeholders read each other (`Documents.mutual`), t reads later tokens, too.
    """
    ids, images = documents.ids, documents.mutual
    same = ids[:, :, None] == ids[:, None, :]
    seen = same.tril()
    if images is not None:
        seen = seen | (same & (images[:, :, None] == images[:, None, :]) & (images > 0)[:, None])
    return seen if window is None else seen.triu(1 - window)


def masked(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, *, window: int | None = None, sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:  # fmt: skip
    """Compute the reference: full scores, float32 softmax. Saves (B, H, T, T) probabilities; any device, float type."""
    return _isolated(partial(_masked, sinks=sinks, cap=cap), q, k, v, visible_tokens(documents, window))


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, *, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Compute torch's scaled_dot_product_attention, without a mask for rows of one document.

    Such a row has only padding after the document, and causal tokens never read it. Saves no scores; on CUDA, except in
    bf16, saves k and v per query head.
    """
    if documents.single and (window is not None or sinks is not None or documents.mutual is not None):
        return _sdpa(q, k, v, visible_tokens(documents, window), sinks)
    if documents.single:
        if not _groups(q):
            k, v = repeat_heads(k, q.shape[2]), repeat_heads(v, q.shape[2])
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        grouped = k.shape[1] != q.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)
    return _isolated(partial(_sdpa, sinks=sinks), q, k, v, visible_tokens(documents, window))


def _groups(q: Tensor) -> bool:
    """Return whether torch groups query heads without full scores: on CUDA only flash attention, so not in fp16."""
    return not q.is_cuda or (q.dtype == torch.bfloat16 and q.shape[-1] <= FLASH)


def varlen(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, *, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Compute flash attention over the packed documents, without a mask; work grows with the sum of squared lengths.

    Heads wider than 256 run in `sdpa` (Gemma 4 has both kinds).

    Raises:
        NeedsError: not on CUDA, or neither bfloat16 nor float16.
    """
    if q.shape[-1] > FLASH:
        return sdpa(q, k, v, documents, window=window, sinks=sinks)
    _demand_cuda("variable-length attention", q)
    from optrush.kernels.attention_varlen import GROUPS, attend, attend_with_sinks

    if not GROUPS or sinks is not None:
        k, v = repeat_heads(k, q.shape[2]), repeat_heads(v, q.shape[2])
    if sinks is not None:  # only families with equally wide keys and values have sinks
        return attend_with_sinks(q, k, v, sinks, documents, window)
    if (width := v.shape[-1]) != q.shape[-1]:  # flash attention has one width: pad with zeros
        wide = max(width, q.shape[-1])
        q = q * (wide / q.shape[-1]) ** 0.5  # the kernel scales by the width it sees
        q, k, v = (F.pad(x, (0, wide - x.shape[-1])) for x in (q, k, v))
        return attend(q, k, v, documents, window)[..., :width]
    return attend(q, k, v, documents, window)


def cudnn(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    """Compute cuDNN's fused attention for rows of one document.

    Raises:
        NeedsError: several documents per row.
        RuntimeError: by torch, if cuDNN has no kernel for these shapes, type or device.
    """
    if not documents.single:
        do = "use varlen or sdpa attention, or one document per row"
        raise NeedsError("cuDNN attention", "rows of several documents", do)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    # The operator itself, not the dispatcher: no other kernel can run instead.
    out = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)[0]
    assert isinstance(out, Tensor)
    return out.transpose(1, 2)


ATTENTIONS: dict[str, Attend] = {"masked": masked, "sdpa": sdpa, "varlen": varlen, "cudnn": cudnn, "fa4": flash4}


def _isolated(
    inner: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, visible: Tensor
) -> Tensor:
    """Run `inner` on finite values only; set outputs that read a non-finite value to NaN."""
    first = k.shape[1] - q.shape[1]  # the queries belong to the last keys
    bad = ~(_finite(k) & _finite(v)) | F.pad(~_finite(q), (first, 0))  # per key, (B, T)
    hole = bad[:, :, None, None]
    out = inner(q.masked_fill(hole[:, first:], 0), k.masked_fill(hole, 0), v.masked_fill(hole, 0), visible)
    tainted = (visible & bad[:, None, :]).any(-1)  # per query
    return out.masked_fill(tainted[:, :, None, None], float("nan"))


# --- Some queries of each row: (q (B, t, H, E), k (B, s, K, E), v, documents of the full rows) -> (B, t, H, E).
#
# The queries are the last t of the row's first s tokens.

AttendFrom = Attend


def visible_from(q: Tensor, k: Tensor, documents: Documents) -> Tensor:
    """Return (B, t, s) bool: `visible_tokens` for these queries and keys."""
    s, first = k.shape[1], k.shape[1] - q.shape[1]
    ids = documents.ids
    return (ids[:, first:s, None] == ids[:, None, :s]).tril(first)


def masked_from(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    """Compute `masked` for some queries."""
    return _isolated(_masked, q, k, v, visible_from(q, k, documents))


def sdpa_from(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    """Compute `sdpa` for some queries, always with a mask."""
    return _isolated(_sdpa, q, k, v, visible_from(q, k, documents))


def varlen_from(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    """Compute `varlen` for some queries, with its errors."""
    _demand_cuda("variable-length attention", q)
    from optrush.kernels.attention_varlen import GROUPS, attend_from

    if not GROUPS:
        k, v = repeat_heads(k, q.shape[2]), repeat_heads(v, q.shape[2])
    return attend_from(q, k, v, documents)


FROM: dict[str, AttendFrom] = {"masked": masked_from, "sdpa": sdpa_from, "varlen": varlen_from}


def _finite(x: Tensor) -> Tensor:
    return torch.isfinite(x).flatten(2).all(-1)


def _masked(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, sinks: Tensor | None = None, cap: float | None = None
) -> Tensor:
    """Return attention with a float32 softmax over visible (B, t, s) keys; sinks: (H,) scores without a value."""
    H, E = q.shape[2:]
    q = q.transpose(1, 2)  # (B, H, T, E)
    k, v = repeat_heads(k, H).transpose(1, 2), repeat_heads(v, H).transpose(1, 2)
    scores = (q @ k.transpose(2, 3)) * E**-0.5  # (B, H, T, T)
    scores = scores if cap is None else torch.tanh(scores / cap) * cap
    scores = scores.masked_fill(~visible[:, None], float("-inf"))
    wide = torch.promote_types(q.dtype, torch.float32)
    if sinks is not None:
        sunk = sinks.to(wide)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores.to(wide), sunk), -1)
    p = torch.softmax(scores, -1, dtype=wide).to(v.dtype)[..., : k.shape[2]]
    return (p @ v).transpose(1, 2)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, sinks: Tensor | None = None) -> Tensor:
    # Repeat the heads: with a mask, only torch's slowest kernel groups them itself.
    k, v = repeat_heads(k, q.shape[2]), repeat_heads(v, q.shape[2])
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    mask = visible[:, None]
    if sinks is not None:  # one more key and value of zeros; its mask value is its score
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, float("-inf"))
        bias = bias.expand(-1, q.shape[1], -1, -1)
        mask = torch.cat((bias, sinks.to(q.dtype)[:, None, None].expand(*bias.shape[:3], 1)), -1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def repeat_heads(x: Tensor, H: int) -> Tensor:
    """Repeat each key/value head for its H / K query heads: (B, T, K, E) -> (B, T, H, E)."""
    return x if x.shape[2] == H else x.repeat_interleave(H // x.shape[2], dim=2)
