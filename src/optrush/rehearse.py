"""Before step 0: the largest step, an evaluation and what a save copies, once, so that nothing runs out of memory late.

What compiles, compiles here, and what is recorded is recorded, so that the first step's time is a step's. Nothing of
the run changes: the loss scale is infinite, so that no gradient is finite and every update is skipped, as a bad one
is; loss scale, random state, buffers and what techniques keep are put back, and the data is read beside its stream.
Only the update's own temporaries are not seen, where the optimizer asks on the host whether it may step.

Largest: a full micro-batch whose every row is one document of T tokens (of pairs, two of T / 2), all learnt (of a
layout whose width follows its rows: as long as the longest), twice where gradients accumulate; then the first step as
it is.
"""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from optrush import distributed, shards
from optrush.data import sampler
from optrush.data.sampler import ROOM, Live
from optrush.data.schema import Document
from optrush.errors import NeedsError, RunError, UserError
from optrush.hardware import GIB
from optrush.job import Batch, Job
from optrush.sharded import local
from optrush.step import exhausted
from optrush.technique import Part
from optrush.train import Plan

PATIENCE_S = 120.0  # for a rank that has not said how its rehearsal went


def rehearse(job: Job, plan: Plan) -> UserError | None:
    """Plays the largest step, and changes nothing.

    Returns:
        None if all ranks had memory enough; else what to tell the user, on every rank. The job is then of no use.

    Raises:
        RunError: a rank ran out of memory and another waits for it in a collective.
    """
    if plan.done >= plan.total:
        return None

    def play() -> None:
        with _unchanged(job):
            _play(job, plan)

    refusal = guarded(job, play)
    if refusal is None and job.world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # the run's peak is its own steps'
    return refusal


def guarded(job: Job, work: Callable[[], None]) -> UserError | None:
    """Does work of all ranks before step 0; returns and raises as `rehearse`."""
    said = ""
    try:
        work()
    except (RuntimeError, MemoryError) as error:
        if not exhausted(error):
            raise
        said = _said(error)
    # From here on nothing holds the failed step's tensors.
    words = distributed.words(said, PATIENCE_S)
    if words is None:
        raise RunError(f"{said or 'another rank does not answer'}, in the rehearsal; the ranks wait for each other")
    said = next((word for word in words if word), "")
    return _refusal(job, said) if said else None


def release(job: Job) -> None:
    """Gives back the memory of a job that did not fit, whoever still refers to it."""
    held = [*job.model.parameters(), *job.model.buffers()]
    held += [state for states in job.optimizer.state().values() for state in states.values()]
    for t in held:
        storage = local(t).untyped_storage()
        if storage.resizable():
            storage.resize_(0)
    del held
    if empty := getattr(job.optimizer, "release", None):  # memory of another kind than torch's
        empty()
    for parameter in job.model.parameters():
        parameter.grad = None
    gc.collect()
    if job.world.device.type == "cuda":
        torch.cuda.empty_cache()


def _play(job: Job, plan: Plan) -> None:
    for window in _windows(job, plan):
        job.scale.fill_(math.inf)
        terms = sum(b.n_terms for b in window) * job.world.data_ranks
        job.gradients(window, max(1, terms))
        job.update()
    if job.evaluation is not None:
        job.losses([next(iter(job.evaluation))])
    if largest := max(shards.slices(job), key=lambda s: s.local.nbytes, default=None):
        largest.local.detach().cpu()  # a save has one tensor on the host at a time
    if job.world.device.type == "cuda":
        torch.cuda.synchronize()


def _windows(job: Job, plan: Plan) -> Iterator[list[Batch]]:
    """The steps that are played, on the host."""
    setup, rows = job.setup, job.stream
    if isinstance(rows, Live) and Part.CAPTURE in setup.owned:
        # How many documents a row has room for shows when rows are read: what is recorded now would never come again.
        job.notes.append("the largest step is not rehearsed: a window is recorded, of rows that nobody has read yet")
        return
    yield [worst(job, plan)] * min(2, setup.accumulation)
    if isinstance(rows, Live):
        return  # its first step is there when a whole window of rows has been read
    world = job.world
    yield rows.batches(
        plan.done, plan.length, rank=world.data_rank, ranks=world.data_ranks, micro_rows=setup.micro_rows
    )


def worst(job: Job, plan: Plan) -> Batch:
    """A micro-batch that takes the most memory of all that can come: full rows of one document, of the run's shapes."""
    rows, setup = job.stream, job.setup
    width = setup.seq
    if rows.layout.snug and not isinstance(rows, Live):
        width = min(width, int(rows.source.lengths().max()))
    weight = job.model.embedding.weight
    assert isinstance(weight, Tensor)
    ids = np.random.default_rng(0).integers(weight.shape[0], size=(setup.micro_rows, width), dtype=np.int32)
    cut = [np.array_split(row, rows.source.parts) for row in ids]
    documents = [[(0, Document(part, np.ones(len(part), bool))) for part in parts] for parts in cut]
    # A live stream's room for documents grows with what it meets.
    widest = plan.length.widest or (ROOM if rows.layout.isolated else 2)
    (batch,) = sampler.batches(rows, documents, widest, rank=0, ranks=1, micro_rows=setup.micro_rows)
    return batch


@contextmanager
def _unchanged(job: Job) -> Iterator[None]:
    """Puts back what a skipped update, a forward pass or an evaluation touches. After an error the job is lost."""
    cuda = job.world.device.type == "cuda"
    random, on_device = torch.get_rng_state(), torch.cuda.get_rng_state() if cuda else None
    scale, rate, finite, training = job.scale.clone(), job.lr.clone(), job.finite, job.model.training
    buffers = [(b, b.detach().clone()) for b in job.model.buffers()]
    kept = {name: copy.deepcopy(state.save()) for name, state in job.state.items()}
    yield
    for name, state in job.state.items():
        state.load(kept[name])
    with torch.no_grad():
        for b, before in buffers:
            b.copy_(before)
    job.scale.copy_(scale)
    job.lr.copy_(rate)
    job.finite = finite
    job.model.train(training)
    torch.set_rng_state(random)
    if on_device is not None:
        torch.cuda.set_rng_state(on_device)


def _said(error: BaseException) -> str:
    """What the allocator said, without its advice."""
    text = next(iter(str(error).splitlines()), "") or type(error).__name__
    text = text.partition(" Of the allocated")[0].rstrip(".")
    if torch.cuda.is_available():
        text += f"; torch had allocated up to {torch.cuda.max_memory_allocated() / GIB:.2f} GiB"
    return text


def _refusal(job: Job, said: str) -> UserError:
    rows, T = job.setup.micro_rows, job.setup.seq
    ways = []
    share = job.setup.rows // job.setup.ranks
    if rows > 1 and Part.UPDATE in job.setup.owned:  # whose owner wants a step in one micro-batch
        ways.append(f"take batch.tokens: {rows // 2 * job.setup.ranks * T}, and batch.micro_tokens with it")
    elif rows > 1:
        fewer = max(n for n in range(1, rows // 2 + 1) if share % n == 0)
        ways.append(f"take batch.micro_tokens: {fewer * T}, or auto")
    if Part.SAVED not in job.setup.owned:
        ways.append("--with recompute")
    if rows == 1:
        ways.append("shorter rows (batch.seq), or a smaller model")
    asked = f"steps of {rows} row{'s' * (rows > 1)} of {T} tokens a micro-batch"
    return NeedsError(asked, f"out of memory, before step 0: {said}", "; or ".join(ways))
