"""Causal attention within each document of a row. Every function here has one signature:

    attend(q (B, T, H, E), k (B, T, K, E), v (B, T, K, E), documents) -> (B, T, H, E), in q's type

with scores scaled by E^-0.5, and query head h reading key/value head h // (H / K).

    masked   plain torch, float32 softmax, whole (B, H, T, T) scores: the reference
    sdpa     torch's fused attention; one document a row: causal without a mask, else a boolean mask
    varlen   torch's variable-length flash attention over documents.starts; CUDA, bfloat16 or float16
    cudnn    torch's fused attention held to cuDNN's kernel; CUDA, one document a row
    fa4      flash-attn-4 (kernels/flash4.py); Hopper and later, bfloat16 or float16

Isolation. No value of one document reaches another's outputs: what a mask hides has probability exactly 0, so changed
values of document A leave every bit of B. But 0 * NaN is NaN: in p @ v, and in the backward in ds @ k and ds^T @ q. So
`masked` and `sdpa` replace tokens that are not finite by zeros before they mix anything, and afterwards make the
outputs that may see them (same document, not earlier) NaN: a bad value stays with its own document, and is never
hidden from that document's loss. With one document a row, rows never meet and nothing of this is needed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from optrush.data.batch import Documents
from optrush.errors import NeedsError
from optrush.kernels.flash4 import flash4

Attend = Callable[[Tensor, Tensor, Tensor, Documents], Tensor]


def visible(documents: Documents) -> Tensor:
    """(B, T, T) bool: token t (second axis) may read token s (third): same document, and not later."""
    ids = documents.ids
    return (ids[:, :, None] == ids[:, None, :]).tril()


def masked(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    """The reference: whole scores, float32 softmax. Saves (B, H, T, T) probabilities; any device and float type."""
    seen = visible(documents)
    return _isolated(_masked, q, k, v, seen)


def sdpa(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    """torch's scaled_dot_product_attention. Without a mask where rows hold one document: what lies behind it is
    padding, which a causal row never reads. Saves no scores; on CUDA, except in bf16, k and v for each query head."""
    if documents.single:
        if not _groups(q):
            k, v = spread(k, q.shape[2]), spread(v, q.shape[2])
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        grouped = k.shape[1] != q.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)
    return _isolated(_sdpa, q, k, v, visible(documents))


def _groups(q: Tensor) -> bool:
    """Whether a kernel of torch groups query heads without whole scores. On CUDA only flash attention does; fp16 is for
    devices that are too old for it.
    """
    return not q.is_cuda or q.dtype == torch.bfloat16


def varlen(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    """Flash attention over the documents as they lie, no mask, work linear in the sum of squared lengths.

    Raises:
        NeedsError: not on CUDA, or neither bfloat16 nor float16.
    """
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16):
        raise NeedsError(
            "variable-length attention",
            f"{q.dtype} on {q.device.type}",
            "use bfloat16 or float16 on a CUDA device, or sdpa attention",
        )
    from optrush.kernels.varlen import attend  # torch's own loads its compiler: a second that others need not wait

    return attend(q, k, v, documents)


def cudnn(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    """cuDNN's fused attention, for rows of one document.

    Raises:
        NeedsError: several documents a row.
        RuntimeError: torch's, where cuDNN has no kernel for these shapes, type or device.
    """
    if not documents.single:
        raise NeedsError(
            "cuDNN attention", "rows of several documents", "use varlen or sdpa attention, or one document a row"
        )
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    # The operator itself: the dispatcher is not asked, so nothing else can run in its place.
    out = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)[0]
    assert isinstance(out, Tensor)
    return out.transpose(1, 2)


ATTENTIONS: dict[str, Attend] = {"masked": masked, "sdpa": sdpa, "varlen": varlen, "cudnn": cudnn, "fa4": flash4}


def _isolated(
    inner: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, seen: Tensor
) -> Tensor:
    """`inner` on finite values only, and NaN again wherever a value that was not finite is seen."""
    bad = ~(_finite(q) & _finite(k) & _finite(v))  # (B, T)
    hole = bad[:, :, None, None]
    out = inner(q.masked_fill(hole, 0), k.masked_fill(hole, 0), v.masked_fill(hole, 0), seen)
    tainted = (seen & bad[:, None, :]).any(-1)  # (B, T)
    return out.masked_fill(tainted[:, :, None, None], float("nan"))


def _finite(x: Tensor) -> Tensor:
    return torch.isfinite(x).flatten(2).all(-1)


def _masked(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    H, E = q.shape[2:]
    q = q.transpose(1, 2)  # (B, H, T, E)
    k, v = spread(k, H).transpose(1, 2), spread(v, H).transpose(1, 2)
    scores = (q @ k.transpose(2, 3)) * E**-0.5  # (B, H, T, T)
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    p = torch.softmax(scores, -1, dtype=torch.promote_types(q.dtype, torch.float32)).to(v.dtype)
    return (p @ v).transpose(1, 2)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    # Heads are spread by hand: with a mask, only torch's slowest kernel groups them itself.
    k, v = spread(k, q.shape[2]), spread(v, q.shape[2])
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None]).transpose(1, 2)


def spread(x: Tensor, H: int) -> Tensor:
    """(B, T, K, E) -> (B, T, H, E): each key/value head for its H / K query heads."""
    return x if x.shape[2] == H else x.repeat_interleave(H // x.shape[2], dim=2)
