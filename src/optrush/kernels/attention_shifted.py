"""Shifted sparse attention (S2-Attn): tokens read within groups of the row, half of the heads within shifted groups.

    heads of the first half    token t reads s of its document, not later, if t // G = s // G
    heads of the second half   the same, if (t + G/2) // G = (s + G/2) // G

So a row of T tokens becomes T / G rows of G tokens, for any function of `kernels.attention` that reads `Documents.ids`,
and costs T G scores instead of T T. Information passes between groups through the other half of the heads. The shifted
groups at both ends of a row have G/2 tokens each: they share one row of G, as two documents.

Source: Chen et al., LongLoRA, https://arxiv.org/abs/2309.12307
Differs from the source: no token reads another document, and with shifted heads the row's start does not read its end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optrush.data.batch import Documents
from optrush.kernels.attention import Attend


def shifted(attend: Attend, q: Tensor, k: Tensor, v: Tensor, documents: Documents, group: int) -> Tensor:
    """q (B, T, H, E), k and v (B, T, K, E) -> (B, T, H, E); K even, or 1; T a multiple of `group`, which is even."""
    (q1, q2), (k1, k2), (v1, v2) = (x.chunk(2, 2) if x.shape[2] > 1 else (x, x) for x in (q, k, v))
    first = _grouped(attend, q1, k1, v1, documents, group, 0)
    second = _grouped(attend, q2, k2, v2, documents, group, group // 2)
    return torch.cat((first, second), 2)


def _grouped(attend: Attend, q: Tensor, k: Tensor, v: Tensor, documents: Documents, group: int, shift: int) -> Tensor:
    """Attend within groups that start `shift` tokens later."""
    B, T = q.shape[:2]
    ids = documents.ids
    if shift:
        q, k, v = (x.roll(-shift, 1) for x in (q, k, v))
        ids = torch.cat((ids[:, shift:], ids[:, :shift] + T), 1)  # the row's start becomes a document at its end
    rows = documents._replace(ids=ids.reshape(-1, group), single=documents.single and not shift)
    q, k, v = (x.reshape(-1, group, *x.shape[2:]) for x in (q, k, v))
    out = attend(q, k, v, rows).reshape(B, T, *q.shape[2:])
    return out.roll(shift, 1) if shift else out
