"""Orthogonalize matrices approximately by Newton-Schulz iterations: products only, many matrices at once.

Each iteration applies the odd polynomial A s + B s^3 + C s^5 to every singular value s and leaves the singular vectors
unchanged. With these coefficients five iterations bring all values that are not tiny near 1 (0.68 to 1.13), where they
oscillate: the coefficients trade convergence for a steep start, which is enough for the singular values of an update.

Source: Jordan et al., https://kellerjordan.github.io/posts/muon/ (the coefficients are theirs).
"""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
LEAST_NORM = 1e-7  # of a matrix; below it the result is scaled down instead of amplifying noise


def orthogonal(x: Tensor, iterations: int = 5) -> Tensor:
    """Return every matrix of (n, R, C) with its singular values near 1, in x's dtype.

    Work: 2 r (2 r c + r^2) FLOP an iteration and matrix, r the smaller and c the larger side.
    """
    a, b, c = COEFFICIENTS
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x  # (n, r, c)
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=wide)  # (n, 1, 1)
    x = x / norm.clamp(min=LEAST_NORM).to(x.dtype)  # no singular value above about 1
    for _ in range(iterations):
        gram = x @ x.mT  # (n, r, r)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # (n, r, r)
        x = torch.baddbmm(x, polynomial, x, beta=a)  # (n, r, c)
    return x.mT if tall else x
