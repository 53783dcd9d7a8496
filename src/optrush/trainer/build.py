"""Prepared -> Job: mesh, model on the meta device, stages in order, materialise, refuse what changed nothing.

data, model ... shard      stages on a model without bytes
materialise  allocate this rank's slices, redo ties, fill them by recipe; `job.trained` is fixed
optimizer, drive, finish   stages on a model with bytes
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optrush.data import sampler
from optrush.data.chat_template import Tokens, open_tokens
from optrush.data.dataset import Streamed
from optrush.data.sampler import flow
from optrush.data.sources import Sources, read_sources
from optrush.errors import ConfigError, NeedsError, NoEffectError, UserError
from optrush.models.decoder import spared
from optrush.models.load import load
from optrush.models.weights import fingerprint, refuse_frozen
from optrush.objectives import FIGURES, check_layout, dpo
from optrush.objectives.loss import next_token
from optrush.optim.adamw import AdamW
from optrush.resolve import Prepared
from optrush.technique import Edit
from optrush.trainer import distributed, trainer
from optrush.trainer.distributed import World
from optrush.trainer.trainer import Job, Trained


@dataclass(frozen=True)
class Started:
    """This process after the process stage, among its peers: ranks can talk."""

    device: torch.device
    edits: tuple[Edit, ...]  # of the process stage


def start(prepared: Prepared) -> Started:
    """The process stage, then the process group."""
    edits = [Edit.of("process", t, n) for t in prepared.techniques if (n := t.process(prepared.setup))]
    return Started(distributed.join(prepared.setup.device.kind), tuple(edits))


def assemble(
    prepared: Prepared,
    started: Started | None = None,
    *,
    training: bool = True,
    data: str | None = None,
    progress: Callable[[str], None] | None = None,
    today: datetime.date | None = None,
) -> Job:
    """Builds the job: everything before step 0 but resuming. What one rank cannot build, none does.

    Args:
        started: what `start` returned, where ranks had to talk before.
        training: False leaves out the optimizer, and what only it shows (`optrush eval`).
        data: a file to evaluate on instead of what the run holds out.
        progress: told a line now and then, of what takes long.
        today: the date that a chat template sees who asks for it: a resumed run's is the one it began with.
    """
    started = started or start(prepared)
    world = distributed.lay(prepared.setup.axes, started.device)
    error: UserError | None = None
    try:
        job = _assemble(prepared, started, world, training, data, progress, today)
    except UserError as e:
        error = e
    distributed.meet()  # one machine may have tokenised for an hour
    distributed.agree(error)
    distributed.same(job.fingerprints)
    return job


def _assemble(
    prepared: Prepared,
    started: Started,
    world: World,
    training: bool,
    data: str | None,
    progress: Callable[[str], None] | None,
    today: datetime.date | None,
) -> Job:
    """No rank waits for another in here: an error of one must not leave the others in a collective."""
    run, setup, hf, techniques = prepared.run, prepared.setup, prepared.hf, prepared.techniques
    tokens = open_tokens(run, prepared.folder, today)
    dtype, growth = getattr(torch, run.model.dtype), prepared.growth
    model, recipe = load(prepared.folder, hf, run.model.implementation, dtype, run.seed, growth)
    assert isinstance(model.embedding.weight, Tensor)
    vocab = model.embedding.weight.shape[0]
    job = Job(run, setup, world, hf, model, recipe)
    job.edits = [*prepared.edits, *started.edits]
    job.roots = [model]
    job.tokenizer = None if tokens is None else tokens.tokenizer
    if run.batch.seq > (hf.get("max_position_embeddings") or run.batch.seq):
        made = hf["max_position_embeddings"]
        job.notes.append(f"rows of {run.batch.seq} tokens, where the model was made for {made} positions")
    if growth is not None:
        job.notes.append(growth.note)
    _defaults(job)

    def stage(name: str) -> None:
        for t in techniques:
            if count := getattr(t, name)(job):
                job.edits.append(Edit.of(name, t, count))

    stage("data")
    check_layout(run, job.layout)
    sources = read_sources(run, tokens, vocab, progress, data, cut=job.layout.whole or not training)
    job.sources = sources
    held_out = sources.held_out or (None if training else sources.train)
    if isinstance(held_out, Streamed):
        do = "leave data.stream out (--set data.stream=false), or give a data.eval"
        raise ConfigError("to evaluate on `data.path`", "`data.stream`: nobody has counted its rows", do)
    job.notes.append(f"data: {sources.summary}")
    job.fingerprints = fingerprints(job, tokens, sources, today)
    job.stream = flow(sources.train, job.layout, T=setup.seq, rows=setup.rows, seed=run.seed, cost=model.flops)
    for name in ("model", "adapt", "split", "loss", "recompute", "compile", "shard"):
        stage(name)
        if name == "adapt" and run.dpo is not None and dpo.by_adapter(run.dpo, job.untrained):
            assert job.untrained is not None
            job.loss = partial(dpo.loss, job.loss, job.model, job.untrained)
    if growth is not None and training:
        refuse_frozen(model, recipe, growth)
    if held_out is not None:
        job.evaluation = sampler.evaluation(
            held_out,
            T=setup.seq,
            micro_rows=setup.micro_rows,
            rank=world.data_rank,
            ranks=world.data_ranks,
            packed=model.isolates,
        )
    if run.dpo is not None or not all(p.requires_grad for p in model.parameters()):
        job.fingerprints["base"] = fingerprint(prepared.folder, run.seed)
    materialise(job)
    if training:
        stage("optimizer")
        if job.optimizer is None:
            job.optimizer = AdamW(job.trained, run.optim, fused=False, rounding=job.rounding, seed=run.seed)
        check_rounding(job)
        if job.optimizer.reads_host:
            job.notes.append("the optimizer reads the device in each step")
        stage("drive")
        stage("finish")
        effective = {e.technique for e in job.edits}
        for t in techniques:
            if t.name not in effective:
                raise NoEffectError(f"`{t.name}`", "it changed nothing here", f"leave it out: --without {t.name}")
    else:
        stage("drive")
    return job


def _defaults(job: Job) -> None:
    """Puts the default callables and slots in place: step.py, bound to the job."""
    device, mesh = job.world.device, job.world.mesh
    group = None if mesh is None else mesh["dp"].get_group()

    def share(t: Tensor) -> Tensor:
        if group is not None:
            dist.all_reduce(t, group=group)
        return t

    def total(n: int) -> int:
        n, told, failed = distributed.host_sum([n, job.stopping == 1, job.stopping == 2])
        job.stopped = 2 if failed else 1 if told else job.stopped
        return n

    job.score = partial(next_token, job.model.head)
    if job.run.dpo is not None:
        job.figures = {name: torch.zeros((), device=device) for name in FIGURES}
        job.score = partial(dpo.score, job.model.head, job.run.dpo, job.figures)
    job.loss = partial(trainer.loss, job)
    job.gradients = partial(trainer.gradients, job)
    job.losses = partial(trainer.losses, job)
    job.update = partial(trainer.update, job)
    job.discard = partial(trainer.discard, job)
    job.norm = partial(trainer.norm, job)
    job.total, job.share = total, share
    job.scale = torch.ones((), device=device)
    job.lr = torch.zeros((), device=device)
    job.finite = torch.ones((), dtype=torch.bool, device=device)


def materialise(job: Job) -> None:
    """Gives the model its bytes: allocates this rank's slices, redoes ties, fills by recipe, fixes `job.trained`."""
    model = job.model
    for root in job.roots:
        root.to_empty(device=job.world.device)
    model.tie()  # allocation made two tensors of one, unless sharding holds them together
    model.restore_buffers(job.world.device)
    with torch.no_grad():
        for name, p in model.named_parameters():
            job.recipe.fill(name, *placed(p))
    job.recipe.release()
    job.trained = [Trained(name, p, decays=p.dim() > 1) for name, p in model.named_parameters() if p.requires_grad]
    model.spare = spared(model)


def placed(p: nn.Parameter) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's piece of a parameter, and where it begins in the whole."""
    return distributed.local(p.detach()), distributed.offset(p)


def check_rounding(job: Job) -> None:
    """Refuses an optimizer that rounds bfloat16 weights otherwise than the job says, and notes what is lost.

    Raises:
        NeedsError: in its three lines.
    """
    done = getattr(job.optimizer, "rounding", "nearest")
    if done != job.rounding:
        found = f"the optimizer {type(job.optimizer).__name__} rounds to the {done}" if done == "nearest" else done
        do = "take another optimizer, or another rounding (--with bf16:rounding=nearest)"
        raise NeedsError(f"bfloat16 weights with {job.rounding} rounding", found, do)
    if done == "nearest" and any(t.local.dtype == torch.bfloat16 for t in job.trained):
        job.notes.append("bfloat16 weights are rounded to the nearest: at small learning rates most never move")


def fingerprints(job: Job, tokens: Tokens | None, sources: Sources, today: datetime.date | None) -> dict[str, str]:
    """What a resumed run must find unchanged, and every rank equal, by field."""

    def digest(value: object) -> str:
        return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()

    order = f"seed {job.run.seed}, {job.setup.rows} rows of {job.setup.seq} tokens a step, {job.layout}"
    found = {"config": digest(job.hf), "data": sources.fingerprint, "order": order}
    if tokens is not None:
        found["tokenizer"] = digest(tokens.tokenizer.backend_tokenizer.to_str())
        template = getattr(tokens.tokenizer, "chat_template", None)
        found["template"] = digest(template)
        if "strftime_now" in str(template):  # such a template writes the date into every conversation
            found["date"] = (today or datetime.date.today()).isoformat()
    return found
