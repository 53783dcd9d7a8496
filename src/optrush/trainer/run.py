"""One training run from start to finish: the folder, resuming, signals, the loop, the exported model.

Nothing is written before everything that can be refused was refused: the folder is claimed after assembly.
"""

from __future__ import annotations

import copy
import datetime
import gc
import glob
import math
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from optrush import config, console
from optrush.data import sampler, tokenize
from optrush.data.batch import Batch
from optrush.data.sampler import ROOM, Live, reading
from optrush.data.schema import Document
from optrush.errors import CheckpointError, ConfigError, NeedsError, RunError, UserError
from optrush.export import write_model
from optrush.hardware import GIB
from optrush.objectives import unit
from optrush.report import data
from optrush.report.bench import write_run
from optrush.resolve import Prepared, resized
from optrush.technique import Part
from optrush.trainer import checkpoint, distributed, dpo_reference, metrics, run_dir, storage, trackers, trainer
from optrush.trainer.build import Started, assemble, start
from optrush.trainer.distributed import local
from optrush.trainer.metrics import Board, Meter
from optrush.trainer.reporting import Reporter, reporting
from optrush.trainer.run_dir import Keeper, comparable, recall
from optrush.trainer.trainer import Job, Plan, evaluate, exhausted, train

# --- Before step 0: the largest step, an evaluation and what a save copies, once, so that nothing runs out of memory
# late.
#
# What compiles, compiles here, and what is recorded is recorded, so that the first step's time is a step's. Nothing of
# the run changes: the loss scale is infinite, so that no gradient is finite and every update is skipped, as a bad one
# is; loss scale, random state, buffers and what techniques keep are put back, and the data is read beside its stream.
# Only the update's own temporaries are not seen, where the optimizer asks on the host whether it may step.
#
# Largest: a full micro-batch whose every row is one document of T tokens (of pairs, two of T / 2), all learnt (of a
# layout whose width follows its rows: as long as the longest), twice where gradients accumulate; then the first step as
# it is.


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
    if largest := max(storage.slices(job), key=lambda s: s.local.nbytes, default=None):
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


RESUMABLE = 143
QUARANTINE = "quarantine.jsonl"
Say = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Outcome:
    """How a run ended: 0 done, 143 stopped by a signal and resumable."""

    code: int
    output: Path
    evals: tuple[float, ...] = ()  # held-out losses of the whole run, in order


def fit(
    prepared: Prepared,
    resume: Literal["auto"] | Path | None = None,
    allow: frozenset[str] = frozenset(),
) -> Outcome:
    """Trains as `prepared` says.

    Args:
        resume: "auto" goes on from the newest intact checkpoint, a folder from that one, None begins.
        allow: fields whose fingerprint may have changed since the checkpoint.

    Raises:
        UserError: something must be changed; the output folder is as it was.
        RunError: updates that were not finite, three in a row.
    """
    run = prepared.run
    output = Path(run.output)
    clean = run.train.clean and resume is None  # the same command goes on where it began afresh
    look(prepared, resume)
    started = start(prepared)  # ranks must talk to agree on a checkpoint
    with ExitStack() as stack:
        reporter = stack.enter_context(reporting(absolute(run)))
        manifest, passed = checkpoint.choose(output, resume)
        date = None if manifest is None else manifest.fingerprints.get("date")
        today = None if date is None else datetime.date.fromisoformat(date)
        least = min(int(rows) for rows in distributed.gather(str(prepared.setup.micro_rows)))  # hosts may differ
        prepared = resized(prepared, least) if least < prepared.setup.micro_rows else prepared
        job, plan = fitting(prepared, started, manifest, allow, today)
        run, main = job.run, job.world.rank == 0
        first(main, output, lambda: output.mkdir(parents=True, exist_ok=True))
        stack.enter_context(run_dir.lock(output))

        def claim() -> None:
            look(prepared, resume)  # another run may have ended here since
            run_dir.claim(output, clean)
            run_dir.cut_back(output / "metrics.jsonl", -1 if manifest is None else plan.done)
            (output / "metrics.jsonl").touch()
            run_dir.put(output / "run.yaml", config.dump(absolute(run)))
            if manifest is None or not isinstance(job.stream, Live):  # a stream meets earlier bad rows no more
                (output / QUARANTINE).unlink(missing_ok=True)
                tokenize.append(output / QUARANTINE, job.sources.refused)
            if isinstance(job.stream, Live):
                job.stream.aside = output / QUARANTINE
            if job.sources.cleaned is not None:
                data.write_cleaning_page(job.sources.cleaned, output)

        first(main, output, claim)
        if main:
            console.err.print(job.describe(), markup=False)
        stack.enter_context(stopping(job))
        say = stack.enter_context(showing(job, plan, reporter)) if main else None
        return _drive(prepared, job, plan, manifest, passed, say, reporter)


@contextmanager
def showing(job: Job, plan: Plan, reporter: Reporter | None) -> Iterator[Say]:
    """Who is told each line of metrics.jsonl: people, TensorBoard, and by the file itself the tracker."""
    board = Board(Path(job.run.output), plan.done)
    try:
        with console.Bar(plan.total, plan.done) as bar:

            def say(line: dict[str, Any]) -> None:
                bar.say(line)
                board.write(line)
                if reporter is not None and (trouble := reporter.news()) is not None:
                    job.told({"tracker": trouble})

            yield say
    finally:
        board.close()
        if reporter is not None and reporter.following and sys.exc_info()[0] is not KeyboardInterrupt:  # at once
            console.say(reporter.end())


def fitting(
    prepared: Prepared,
    started: Started,
    manifest: checkpoint.Manifest | None,
    allow: frozenset[str],
    today: datetime.date | None,
    refer: Callable[[Job, Prepared], None] = dpo_reference.fill,
) -> tuple[Job, Plan]:
    """The job, rehearsed, where the run stands; assembled anew with smaller micro-batches for as long as it must be.

    Raises:
        UserError: it does not fit, or whatever assembly and restoring raise.
    """
    run = prepared.run
    while True:
        job = assemble(prepared, started, progress=console.say, today=today)
        plan = Plan(job, job.stream.plan(None if run.train.steps else run.train.epochs, run.train.steps))
        refusal: UserError | None = None
        if run.dpo is not None:  # of the weights that no checkpoint has changed yet
            refusal = guarded(job, partial(refer, job, prepared))
        if manifest is not None and refusal is None:
            checkpoint.restore(job, manifest, job.fingerprints, allow)
            position = job.stream.seek(manifest.step, manifest.position)
            checkpoint.check_plan(manifest, plan.total, position, allow)
            plan = Plan(job, plan.length, manifest.step)
        job.told = lambda what: console.say(", ".join(f"{key} {value}" for key, value in what.items()))
        refusal = refusal or rehearse(job, plan)
        if refusal is None:
            return job, plan
        refusal.everywhere = True
        rows = job.smaller()
        if rows is None:
            raise refusal
        try:
            prepared = resized(prepared, rows)
        except UserError:  # some technique cannot have smaller ones: then what does not fit is what must be said
            raise refusal from None
        job.told({"micro_tokens": rows * job.setup.seq, "after": refusal.found})
        release(job)


def _drive(
    prepared: Prepared,
    job: Job,
    plan: Plan,
    manifest: checkpoint.Manifest | None,
    passed: list[tuple[Path, str]],
    say: Say | None,
    reporter: Reporter | None,
) -> Outcome:
    """The loop with everything in place; every rank is here. `say` is the first rank's."""
    output = Path(job.run.output)
    skips = (0, 0) if manifest is None else (manifest.skipped, manifest.skipped_in_a_row)
    run_id = checkpoint.fresh_id() if manifest is None else manifest.run_id
    meter = Meter(job, output / "metrics.jsonl" if say else None, plan.total, say or _silent, skips)
    keeper, damaged = keeping(job, plan)
    passed = [*passed, *damaged]
    if passed and manifest is not None:
        over = [{"checkpoint": path.name, "reason": why} for path, why in passed]
        meter.write({"step": manifest.step, "passed_over": over})
    if manifest is not None and (changed := changes(manifest.config, job.run)):
        meter.write({"step": manifest.step, "changed": changed})
    job.begin = partial(trainer.begin, job, steps=plan.total)
    job.told = lambda what: meter.write({"step": meter.last, **what})
    job.batches = batches(job, plan)
    if reporter is not None:
        reporter.follow(run_id, plan.done, job.fingerprints)

    unsaved: dict[int, str] = {}

    def save(n: int) -> None:
        skips = meter.skips()
        if meter.failure is not None:
            return  # a failed run leaves its last good checkpoint the newest
        meta = checkpoint.Meta(run_id, job.stream.position(n), *skips, job.fingerprints)
        try:
            checkpoint.save(job, n, meta, None if keeper is None else keeper.spared(n))
        except checkpoint.SaveFailed as error:  # training goes on: the last good checkpoint is as it was
            unsaved[n] = str(error)
            meter.write({"step": n, "save_failed": str(error)})
        else:
            if keeper is not None:
                keeper.saved(n)

    def judged(n: int, loss: float) -> None:
        if keeper is not None and keeper.judge(n, loss) and not plan.saves(n):
            save(n)

    with reading(job.batches):
        if job.evaluation is not None and plan.done == 0:
            with meter.aside():
                meter.evaluated(0, *evaluate(job))
        meter.judged = judged
        try:
            train(job, meter, plan, save)
        except (RuntimeError, MemoryError) as error:
            if not trainer.exhausted(error):
                raise
            raise RunError(late(job, meter.last + 1, error)) from error
    meter.skips()  # waits for the flags of the last steps, so that every rank sees the same failure
    if meter.failure is not None:
        raise meter.failure
    if job.stopped:
        if meter.last in unsaved:
            raise RunError(f"stopped, but the last save failed: {unsaved[meter.last]}")
        if reporter is not None:
            reporter.status = "stopped"
        if say is not None:
            console.err.print(f"stopped and saved; go on with: --resume auto (output {output})", markup=False)
        return Outcome(RESUMABLE, output)
    deliver(job, plan.total, prepared.folder, keeper)
    if reporter is not None:
        reporter.status = "finished"
    if say is not None:
        metrics.plot(output / "metrics.jsonl", output / "loss.png", unit(job.run))
        write_run(output, job.world.ranks)
    return Outcome(0, output, tuple(meter.evals) if plan.done == 0 else tuple(meter.evals[-1:]))


def keeping(job: Job, plan: Plan) -> tuple[Keeper | None, list[tuple[Path, str]]]:
    """Who keeps the best checkpoint, if the run has one; and better ones that are damaged."""
    if job.evaluation is None or job.run.train.save_every is None or not job.run.train.best:
        return None, []
    output = Path(job.run.output)
    best, damaged = recall(output, plan.done, partial(comparable, job.run, job.fingerprints))
    return Keeper(output, best), damaged


def deliver(job: Job, steps: int, source: Path | None, keeper: Keeper | None) -> None:
    """`model/`, with the weights of the best checkpoint where there is one.

    Raises:
        RunError: that checkpoint is damaged, or `model/` cannot be written.
    """
    best = None if keeper is None else keeper.best
    if not job.run.train.export:
        return
    if best is not None and best.step != steps:
        try:
            checkpoint.put_back(job, best.step)
        except CheckpointError as error:
            do = "--resume auto exports the next best"
            raise RunError(f"the best checkpoint, of step {best.step}, is damaged: {error.found}; {do}") from None
    write_model(job, Path(job.run.output), steps if best is None else best.step, source)
    if best is not None:
        console.say(f"best eval_loss {best.eval_loss:.4f} at step {best.step}, exported")


def late(job: Job, n: int, error: BaseException) -> str:
    """What to say of a lack of memory that the rehearsal did not meet."""
    rows, T = job.setup.micro_rows, job.setup.seq
    found = next(iter(str(error).splitlines()), "") or type(error).__name__
    halves = rows > 1 and rows % 2 == 0 and Part.UPDATE not in job.setup.owned  # whose owner wants a step in one
    fewer = f" --set batch.micro_tokens={rows // 2 * T}" if halves else ""
    saved = checkpoint.find(Path(job.run.output))
    do = f"go on from {saved[0].name} with: --resume auto" if saved else "nothing is saved yet; begin again"
    return f"out of memory in step {n}: {found}; {do}{fewer}"


def look(prepared: Prepared, resume: Literal["auto"] | Path | None) -> None:
    """Whether the run may write where it wants to; looks only.

    Raises:
        UserError: see `trackers` and `runfolder`.
    """
    run = prepared.run
    trackers.check(run)
    clean = run.train.clean and resume is None
    held = run.data.eval if isinstance(run.data.eval, str) else None
    inputs = [o.path for o in run.data.origins]
    run_dir.keep_apart(run.output, clean, (prepared.folder, *inputs, held, run.model.chat_template))
    inside = resume is not None and (resume == "auto" or resume.resolve().is_relative_to(Path(run.output).resolve()))
    run_dir.prepare(run.output, clean, resume if inside else None)


def first(main: bool, output: Path, work: Callable[[], object]) -> None:
    """Rank 0's work on the folder; what it cannot do, none goes on without."""
    error: UserError | None = None
    if main:
        try:
            work()
        except UserError as e:
            error = e
        except OSError as e:
            error = ConfigError(f"`output: {output}`", f"{e.strerror}: {e.filename}", "mend that, or take another")
    distributed.agree(error)


def changes(before: dict[str, Any], now: config.Run) -> dict[str, str]:
    """What a resumed run does otherwise than the one that was saved, by key; said, for the loss curve will show it."""

    def flat(tree: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
        for key, value in tree.items():
            if isinstance(value, dict) and value:
                yield from flat(value, f"{path}{key}.")
            else:
                yield path + key, value

    old, new = dict(flat(before)), dict(flat(now.model_dump(mode="json", by_alias=True)))
    keys = [k for k in {**old, **new} if k.startswith(("optim.", "dpo.", "train.steps", "train.epochs", "with."))]
    return {k: f"{old.get(k)} -> {new.get(k)}" for k in keys if old.get(k) != new.get(k)}


def _silent(_: dict[str, Any]) -> None:
    """What ranks other than the first show."""


def batches(job: Job, plan: Plan) -> Iterator[list[Batch]]:
    """This rank's micro-batches, step by step, from where the run stands."""
    rank, ranks = job.world.data_rank, job.world.data_ranks
    return job.stream.run(
        plan.length, plan.done, rank=rank, ranks=ranks, micro_rows=job.setup.micro_rows, loading=job.loading
    )


@contextmanager
def stopping(job: Job) -> Iterator[None]:
    """SIGTERM, SIGINT and SIGUSR1 ask all ranks to save after the step under way; a second Ctrl-C leaves at once."""

    def asked(number: int, _: object) -> None:
        if number == signal.SIGINT and job.stopping:
            raise KeyboardInterrupt
        job.stopping = max(job.stopping, 1)

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.signal(n, asked) for n in numbers]
    try:
        yield
    finally:
        for n, handler in zip(numbers, before):
            signal.signal(n, handler)


def absolute(run: config.Run) -> config.Run:
    """The run with every path absolute, so that its run.yaml means the same from anywhere."""

    def full(path: str | None) -> str | None:
        if path is None or not (Path(path).exists() or glob.has_magic(path)):
            return path  # a hub id, or nothing that is there
        return str(Path(path).resolve())

    d = run.data
    whole = d.path if isinstance(d.path, tuple) else full(d.path)
    if isinstance(whole, tuple):
        whole = tuple(o.model_copy(update={"path": full(o.path)}) for o in d.origins)
    clean = d.clean and d.clean.model_copy(update={"decontaminate": full(d.clean.decontaminate)})
    held = full(d.eval) if isinstance(d.eval, str) else d.eval
    data = d.model_copy(update={"path": whole, "eval": held, "clean": clean, "cache": full(d.cache)})
    path = run.model.path if run.model.path == "tiny" else full(run.model.path)
    template = run.model.chat_template  # a folder of that name is none: `chatml` may be meant
    template = full(template) if template is not None and Path(template).is_file() else template
    model = run.model.model_copy(
        update={"path": path, "chat_template": template, "tokenizer": full(run.model.tokenizer)}
    )
    return run.model_copy(
        update={
            "data": data,
            "model": model,
            "output": str(Path(run.output).resolve()),
            "train": run.train.model_copy(update={"clean": False}),  # run again, it must not empty itself
        }
    )
