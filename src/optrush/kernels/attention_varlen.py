"""torch's variable-length flash attention. It loads torch's compiler, which takes a second: import it where it runs."""

from __future__ import annotations

import inspect
from typing import Any

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

    A document has then fewer queries than keys, of which the kernel takes them to be the last, or none of either.
    """
    T, s, t = documents.ids.shape[1], k.shape[1], q.shape[1]
    row, at = documents.starts // T, documents.starts % T  # of each boundary
    queries = row * t + at.clamp(s - t, s) - (s - t)
    keys = row * s + at.clamp(max=s)
    return _attend(q, k, v, queries.int(), keys.int(), documents.longest)


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
