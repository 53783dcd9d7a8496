"""Split weights into initial adapters and a frozen remainder: PiSSA and OLoRA.

PiSSA takes the r largest singular values of W = U S V: A = (S_r / s)^1/2 V_r and B = U_r (S_r / s)^1/2, with s the
adapter's factor. OLoRA takes the first r columns of Q and rows of R in W = Q R: A = R_r and B = Q_r. The frozen weight
is W - s B A, so the first step computes the original model.

Source: https://arxiv.org/abs/2404.02948 (PiSSA), https://arxiv.org/abs/2406.01775 (OLoRA); the factors are PEFT's.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import torch
from torch import Tensor

from optrush.models.weights import Shape, WeightSource, seeded_generator
from optrush.peft.ledger import SPLITS


class Decomposed:
    """A weight source that returns W - s B A for chosen matrices, with any sharding.

    The initial A and B stay on the host, 4 bytes per value: the published adapter contains them.
    """

    def __init__(
        self, source: WeightSource, method: str, rank: int, scaling: float, modules: Collection[str], seed: int
    ) -> None:
        """modules: Hugging Face modules whose weights are split."""
        assert re.fullmatch(SPLITS, method), method
        self.source, self.method, self.rank, self.scaling, self.seed = source, method, rank, scaling, seed
        self.names = {f"{module}.weight" for module in modules}
        self.found: dict[str, tuple[Tensor, Tensor]] = {}  # by name

    def rows(self, name: str, first: int, last: int, shape: Shape, device: torch.device) -> Tensor:
        values = self.source.rows(name, first, last, shape, device)
        if name not in self.names:
            return values
        a, b = (t.to(device) for t in self.first(name, shape, device))
        return torch.addmm(values.to(device, a.dtype), b[first:last], a, alpha=-self.scaling)

    def first(self, name: str, shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the initial A (r, width) and B (rows, r) of a weight, on the host; `device` computes them once."""
        if name not in self.found:
            weight = self.source.rows(name, 0, shape[0], shape, device).to(device)
            seed = seeded_generator(self.seed, f"{name}.{self.method}", torch.device("cpu")).initial_seed()
            a, b = decompose(weight, self.method, self.rank, self.scaling, seed)
            self.found[name] = a.cpu(), b.cpu()
        return self.found[name]


@torch.no_grad()
def decompose(weight: Tensor, method: str, rank: int, scaling: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return the initial A (r, width) and B (rows, r) of a weight, at least in float32.

    Args:
        method: olora; pissa; or pissa_niter_N, with N iterations from a random subspace drawn with `seed`.
    """
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    if method == "olora":
        q, r = torch.linalg.qr(weight)
        return r[:rank].contiguous(), q[:, :rank].contiguous()
    if method == "pissa":
        u, s, v = torch.linalg.svd(weight, full_matrices=False)
        u, s, v = u[:, :rank], s[:rank], v[:rank]
    else:
        with torch.random.fork_rng([weight.device] if weight.is_cuda else []):
            torch.manual_seed(seed)
            u, s, columns = torch.svd_lowrank(weight, rank, int(method.rpartition("_")[2]))
        v = columns.t()
    root = (s / scaling).sqrt()
    return root[:, None] * v, u * root
