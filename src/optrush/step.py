"""The default gradients, losses and update: what a step is when no technique has replaced it.

Each takes the job first; assembly binds it. Contracts in job.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optrush.data.batch import Batch
from optrush.job import Job
from optrush.optim.schedule import learning_rate

NO_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def exhausted(error: BaseException) -> bool:
    """Whether an error is a lack of memory, as the allocators of a GPU and a CPU, and CUDA's libraries, say it."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in NO_MEMORY)
    )


def begin(job: Job, step: int, steps: int) -> None:
    """Learning rate and random state of step `step` of `steps`: functions of it, so that a resumed run repeats them."""
    job.lr.fill_(learning_rate(job.run.optim, step, steps))
    torch.manual_seed(job.run.seed * 1_000_003 + step * 1009 + job.world.data_rank)


def loss(job: Job, batch: Batch) -> Tensor:
    return job.score(job.model(batch.tokens, batch.positions, batch.documents), batch)


def gradients(job: Job, batches: list[Batch], terms: int | Tensor) -> Tensor:
    """One micro-batch after the other; their losses are added up and divided by `terms`."""
    job.discard()
    for figure in job.figures.values():
        figure.zero_()
    if not isinstance(terms, Tensor):  # filled in on the device: copying a number there would wait for it
        terms = torch.full((), max(terms, 1), dtype=torch.float32, device=job.world.device)
    if not job.model.training:  # asked first, for it walks thousands of modules
        job.model.train()
    total = torch.zeros((), device=job.world.device)
    for i, host in enumerate(batches):
        batch = host.to(job.world.device)
        with job.syncing(i == len(batches) - 1):
            micro = job.loss(batch)
            # Not in a thread of autograd's: much of a backward pass is Python, which would take turns with itself.
            with torch.autograd.set_multithreading_enabled(False):
                (micro * (job.scale / terms)).backward()  # type: ignore[no-untyped-call]
        total += micro.detach()
    mean = job.share(total) / terms
    job.finite = torch.isfinite(mean)
    return mean


@torch.no_grad()
def losses(job: Job, batches: list[Batch]) -> Tensor:
    job.model.eval()
    total = torch.zeros((), device=job.world.device)
    for batch in batches:
        total += job.loss(batch.to(job.world.device))
    return job.share(total)


def update(job: Job) -> tuple[Tensor, Tensor]:
    norm = job.norm() / job.scale
    skipped = ~(torch.isfinite(norm) & job.finite)
    clip = job.run.optim.clip
    shrink = torch.ones_like(norm) if clip is None else torch.clamp(clip / (norm + 1e-6), max=1.0)
    # Where the norm is not finite the divisor is not either, but then nothing is stepped.
    job.optimizer.step(job.lr, job.scale / shrink, skipped)
    job.discard()
    return norm, skipped


def discard(job: Job) -> None:
    for t in job.trained:
        t.parameter.grad = None


@torch.no_grad()
def norm(job: Job) -> Tensor:
    """Root of the summed squares: whole gradients count once, slices are summed over the mesh."""
    device = job.world.device
    squares = {True: torch.zeros((), device=device), False: torch.zeros((), device=device)}
    for cut in squares:
        grads = [t.grad for t in job.trained if t.cut == cut and t.grad is not None and t.grad.numel()]
        if grads and device.type == "cuda":
            squares[cut] += torch.stack(torch._foreach_norm(grads, 2, torch.float32)).square().sum()
        elif grads:
            # On CPU that sum runs over a whole matrix in one float32, 1e-5 off; row by row it is exact to 1e-7.
            rows = [torch.linalg.vector_norm(g, dim=-1, dtype=torch.float32) for g in grads]
            squares[cut] += torch.stack([r.double().square().sum() for r in rows]).sum().float()
    if any(t.cut for t in job.trained):
        squares[True] = job.share(squares[True])
    return (squares[True] + squares[False]).sqrt()
