"""Some thousand numbers in place of a gradient of billions, which tell the angle between two gradients.

Each value, with a sign drawn at random, is added to those whose place has the same remainder by WIDTH. Such sums keep
inner products on average; the square of the distance between two gradients is told within some 2 %, the root of
2 / WIDTH. Source: Alon, Matias and Szegedy, https://doi.org/10.1006/jcss.1997.1545.

Names and layout are those of an export, so that a fused parameter compares with the tensors that it is made of. Signs
depend on the name and on the kind of device: sketches compare within one climb.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from optrush.job import Job

WIDTH = 4093  # a prime: the values of one column of a matrix fall into many sums
PIECE = 1024 * WIDTH  # values at a time


@torch.no_grad()
def sketch(job: Job) -> dict[str, str] | None:
    """Of the gradients that lie there; None where a parameter has none, for its update took it in the backward pass.

    Returns:
        {"of": a digest of the tensors' names, "sums": (WIDTH,) float32, in base64}; stats.cosine reads it.
    """
    sums = torch.zeros(WIDTH, dtype=torch.float64, device=job.world.device)
    names = []
    for t in job.trained:
        if t.grad is None:
            return None
        for name, values in _tensors(job, t.name, t.grad):
            names.append(name)
            seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")
            generator = torch.Generator(values.device).manual_seed(seed)
            for piece in torch.split(values.flatten(), PIECE):
                heads = torch.randint(0, 2, piece.shape, generator=generator, device=piece.device, dtype=torch.int8)
                signed = torch.where(heads.bool(), piece, -piece).float()
                sums += F.pad(signed, (0, -len(piece) % WIDTH)).view(-1, WIDTH).sum(0)
    digest = hashlib.blake2b("\n".join(sorted(names)).encode(), digest_size=8).hexdigest()
    return {"of": digest, "sums": base64.b64encode(sums.float().cpu().numpy().tobytes()).decode()}


def _tensors(job: Job, name: str, grad: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The gradient of a parameter as an export would write it; of one that no export has, as it is."""
    return job.recipe.split(name, grad) if name in job.recipe.entries else iter([(name, grad)])
