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


def attend(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    """q (B, T, H, E), k and v (B, T, K, E) -> (B, T, H, E); K < H needs `GROUPS`. CUDA, bfloat16 or float16."""
    B, T, H, E = q.shape
    options: dict[str, Any] = {"window_size": (-1, 0)}  # everything before, nothing after
    if k.shape[2] != H:
        options["enable_gqa"] = True
    starts, longest = documents.starts, documents.longest
    out = varlen_attn(
        q.reshape(B * T, H, E), k.reshape(B * T, -1, E), v.reshape(B * T, -1, E),
        starts, starts, longest, longest, **options,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out.view(B, T, H, E)
