"""Some thousand numbers in place of a gradient of billions, which tell the angle between two gradients.

Each value, with a sign drawn at random, is added to those whose place, shifted by a number of its tensor's own, has the
same remainder by WIDTH. Such sums keep inner products on average; the square of the distance between two gradients is
told within some 2 %, the root of 2 / WIDTH, or some 6 where a few values make most of it.
Source: Alon, Matias and Szegedy, https://doi.org/10.1006/jcss.1997.1545.

Names and layout are those of an export, so that a fused parameter compares with the tensors that it is made of. Signs
depend on the device and on torch: sketches compare within one climb.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from optrush.trainer.trainer import Job, Trained

WIDTH = 4093  # a prime: the values of one column of a matrix fall into many sums
PIECE = 1024 * WIDTH  # values at a time


@torch.no_grad()
def sketch(job: Job) -> dict[str, str]:
    """Of the gradients that lie there; an update in the backward pass has left none.

    Returns:
        {"of": a digest of the tensors' names, the device and torch, "sums": (WIDTH,) float32, in base64}; stats.cosine
        reads it.
    """
    sums = torch.zeros(WIDTH, dtype=torch.float64, device=job.world.device)
    names = [job.setup.device.name, torch.__version__]
    for t in job.trained:
        for name, values in tensors(job, t):
            names.append(name)
            seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")
            generator = torch.Generator(values.device).manual_seed(seed)
            for piece in torch.split(values.flatten(), PIECE):
                heads = torch.randint(0, 2, piece.shape, generator=generator, device=piece.device, dtype=torch.int8)
                signed = torch.where(heads.bool(), piece, -piece).float()
                sums += F.pad(signed, (0, -len(piece) % WIDTH)).view(-1, WIDTH).sum(0).roll(seed % WIDTH)
    digest = hashlib.blake2b("\n".join(sorted(names)).encode(), digest_size=8).hexdigest()
    return {"of": digest, "sums": base64.b64encode(sums.float().cpu().numpy().tobytes()).decode()}


def tensors(job: Job, t: Trained) -> Iterator[tuple[str, Tensor]]:
    """The gradient of a parameter as an export would write it; of one that no export has, as it is."""
    if t.grad is not None and t.name in job.recipe.entries:
        yield from job.recipe.split(t.name, t.grad)
    elif t.grad is not None:
        yield t.name, t.grad
