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

from optrush import console
from optrush.config import Config, dump_config
from optrush.data import sampler, tokenize
from optrush.data.batch import Batch
from optrush.data.sampler import ROOM, reading
from optrush.data.schema import Document
from optrush.errors import CheckpointError, ConfigError, NeedsError, RunError, UserError
from optrush.export import write_model
from optrush.hardware import GIB
from optrush.objectives import unit
from optrush.report import data
from optrush.report.bench import write_run
from optrush.resolve import ResolvedConfig, resized
from optrush.technique import Part
from optrush.trainer import checkpoint, distributed, dpo_reference, metrics, run_dir, storage, trackers
from optrush.trainer.build import ProcessGroup, build, join_ranks
from optrush.trainer.distributed import local
from optrush.trainer.metrics import Board, Meter
from optrush.trainer.reporting import Reporter, reporting
from optrush.trainer.run_dir import Keeper, comparable, recall
from optrush.trainer.trainer import Plan, Trainer, evaluate, exhausted, set_step, train

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


def rehearse(trainer: Trainer, plan: Plan) -> UserError | None:
    """Plays the largest step, and changes nothing.

    Returns:
        None if all ranks had memory enough; else what to tell the user, on every rank. The job is then of no use.

    Raises:
        RunError: a rank ran out of memory and another waits for it in a collective.
    """
    if plan.done >= plan.total:
        return None

    def play() -> None:
        with _unchanged(trainer):
            _play(trainer, plan)

    refusal = guarded(trainer, play)
    if refusal is None and trainer.world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # the run's peak is its own steps'
    return refusal


def guarded(trainer: Trainer, work: Callable[[], None]) -> UserError | None:
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
    return _refusal(trainer, said) if said else None


def release(trainer: Trainer) -> None:
    """Gives back the memory of a job that did not fit, whoever still refers to it."""
    held = [*trainer.model.parameters(), *trainer.model.buffers()]
    held += [state for states in trainer.optimizer.state().values() for state in states.values()]
    for t in held:
        storage = local(t).untyped_storage()
        if storage.resizable():
            storage.resize_(0)
    del held
    if empty := getattr(trainer.optimizer, "release", None):  # memory of another kind than torch's
        empty()
    for parameter in trainer.model.parameters():
        parameter.grad = None
    gc.collect()
    if trainer.world.device.type == "cuda":
        torch.cuda.empty_cache()


def _play(trainer: Trainer, plan: Plan) -> None:
    for window in _windows(trainer, plan):
        trainer.scale.fill_(math.inf)
        terms = sum(b.n_terms for b in window) * trainer.world.data_ranks
        trainer.forward_backward(window, max(1, terms))
        trainer.optimizer_step()
    if trainer.evaluation is not None:
        trainer.eval_loss([next(iter(trainer.evaluation))])
    if largest := max(storage.slices(trainer), key=lambda s: s.local.nbytes, default=None):
        largest.local.detach().cpu()  # a save has one tensor on the host at a time
    if trainer.world.device.type == "cuda":
        torch.cuda.synchronize()


def _windows(trainer: Trainer, plan: Plan) -> Iterator[list[Batch]]:
    """The steps that are played, on the host."""
    env, rows = trainer.env, trainer.stream
    if not rows.tokenized and Part.CAPTURE in env.claimed:
        # How many documents a row has room for shows when rows are read: what is recorded now would never come again.
        trainer.notes.append(
            "the largest step is not rehearsed: a window is recorded, of rows that nobody has read yet"
        )
        return
    yield [worst(trainer, plan)] * min(2, env.accumulation)
    if not rows.tokenized:
        return  # its first step is there when a whole window of rows has been read
    world = trainer.world
    yield rows.batches(plan.done, plan.length, rank=world.data_rank, ranks=world.data_ranks, micro_rows=env.micro_rows)


def worst(trainer: Trainer, plan: Plan) -> Batch:
    """A micro-batch that takes the most memory of all that can come: full rows of one document, of the run's shapes."""
    rows, env = trainer.stream, trainer.env
    width = env.seq
    if rows.layout.pad_to_longest and rows.tokenized:
        width = min(width, int(rows.source.lengths().max()))
    weight = trainer.model.embedding.weight
    assert isinstance(weight, Tensor)
    ids = np.random.default_rng(0).integers(weight.shape[0], size=(env.micro_rows, width), dtype=np.int32)
    cut = [np.array_split(row, rows.source.parts) for row in ids]
    documents = [[(0, Document(part, np.ones(len(part), bool))) for part in parts] for parts in cut]
    # A live stream's room for documents grows with what it meets.
    widest = plan.length.widest or (ROOM if rows.layout.isolated else 2)
    (batch,) = sampler.micro_batches(rows, documents, widest, rank=0, ranks=1, micro_rows=env.micro_rows)
    return batch


@contextmanager
def _unchanged(trainer: Trainer) -> Iterator[None]:
    """Puts back what a skipped update, a forward pass or an evaluation touches. After an error the job is lost."""
    cuda = trainer.world.device.type == "cuda"
    random, on_device = torch.get_rng_state(), torch.cuda.get_rng_state() if cuda else None
    scale, rate, finite, training = (
        trainer.scale.clone(),
        trainer.lr.clone(),
        trainer.loss_is_finite,
        trainer.model.training,
    )
    buffers = [(b, b.detach().clone()) for b in trainer.model.buffers()]
    kept = {name: copy.deepcopy(state.save()) for name, state in trainer.state.items()}
    yield
    for name, state in trainer.state.items():
        state.load(kept[name])
    with torch.no_grad():
        for b, before in buffers:
            b.copy_(before)
    trainer.scale.copy_(scale)
    trainer.lr.copy_(rate)
    trainer.loss_is_finite = finite
    trainer.model.train(training)
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


def _refusal(trainer: Trainer, said: str) -> UserError:
    rows, T = trainer.env.micro_rows, trainer.env.seq
    ways = []
    share = trainer.env.rows // trainer.env.ranks
    if rows > 1 and Part.UPDATE in trainer.env.claimed:  # whose owner wants a step in one micro-batch
        ways.append(f"take batch.tokens: {rows // 2 * trainer.env.ranks * T}, and batch.micro_tokens with it")
    elif rows > 1:
        fewer = max(n for n in range(1, rows // 2 + 1) if share % n == 0)
        ways.append(f"take batch.micro_tokens: {fewer * T}, or auto")
    if Part.ACTIVATION_CHECKPOINTING not in trainer.env.claimed:
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
    prepared: ResolvedConfig,
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
    config = prepared.config
    output = Path(config.output)
    clean = config.train.clean and resume is None  # the same command goes on where it began afresh
    look(prepared, resume)
    started = join_ranks(prepared)  # ranks must talk to agree on a checkpoint
    with ExitStack() as stack:
        reporter = stack.enter_context(reporting(absolute(config)))
        manifest, passed = checkpoint.choose(output, resume)
        date = None if manifest is None else manifest.fingerprints.get("date")
        today = None if date is None else datetime.date.fromisoformat(date)
        least = min(int(rows) for rows in distributed.gather(str(prepared.env.micro_rows)))  # hosts may differ
        prepared = resized(prepared, least) if least < prepared.env.micro_rows else prepared
        trainer, plan = fitting(prepared, started, manifest, allow, today)
        config, main = trainer.config, trainer.world.rank == 0
        first(main, output, lambda: output.mkdir(parents=True, exist_ok=True))
        stack.enter_context(run_dir.lock(output))

        def claim() -> None:
            look(prepared, resume)  # another run may have ended here since
            run_dir.claim(output, clean)
            run_dir.cut_back(output / "metrics.jsonl", -1 if manifest is None else plan.done)
            (output / "metrics.jsonl").touch()
            run_dir.put(output / "run.yaml", dump_config(absolute(config)))
            if manifest is None or trainer.stream.tokenized:  # a stream meets earlier bad rows no more
                (output / QUARANTINE).unlink(missing_ok=True)
                tokenize.append_bad_rows(output / QUARANTINE, trainer.sources.refused)
            if not trainer.stream.tokenized:
                trainer.stream.aside = output / QUARANTINE
            if trainer.sources.cleaned is not None:
                data.write_cleaning_page(trainer.sources.cleaned, output)

        first(main, output, claim)
        if main:
            console.err.print(trainer.describe(), markup=False)
        stack.enter_context(stopping(trainer))
        say = stack.enter_context(showing(trainer, plan, reporter)) if main else None
        return _drive(prepared, trainer, plan, manifest, passed, say, reporter)


@contextmanager
def showing(trainer: Trainer, plan: Plan, reporter: Reporter | None) -> Iterator[Say]:
    """Who is told each line of metrics.jsonl: people, TensorBoard, and by the file itself the tracker."""
    board = Board(Path(trainer.config.output), plan.done)
    try:
        with console.Bar(plan.total, plan.done) as bar:

            def say(line: dict[str, Any]) -> None:
                bar.say(line)
                board.write(line)
                if reporter is not None and (trouble := reporter.news()) is not None:
                    trainer.log_event({"tracker": trouble})

            yield say
    finally:
        board.close()
        if reporter is not None and reporter.following and sys.exc_info()[0] is not KeyboardInterrupt:  # at once
            console.say(reporter.end())


def fitting(
    prepared: ResolvedConfig,
    started: ProcessGroup,
    manifest: checkpoint.Manifest | None,
    allow: frozenset[str],
    today: datetime.date | None,
    refer: Callable[[Trainer, ResolvedConfig], None] = dpo_reference.fill,
) -> tuple[Trainer, Plan]:
    """The job, rehearsed, where the run stands; assembled anew with smaller micro-batches for as long as it must be.

    Raises:
        UserError: it does not fit, or whatever assembly and restoring raise.
    """
    config = prepared.config
    while True:
        trainer = build(prepared, started, progress=console.say, today=today)
        plan = Plan(
            trainer, trainer.stream.plan(None if config.train.steps else config.train.epochs, config.train.steps)
        )
        refusal: UserError | None = None
        if config.dpo is not None:  # of the weights that no checkpoint has changed yet
            refusal = guarded(trainer, partial(refer, trainer, prepared))
        if manifest is not None and refusal is None:
            checkpoint.restore(trainer, manifest, trainer.fingerprints, allow)
            position = trainer.stream.seek(manifest.step, manifest.position)
            checkpoint.check_plan(manifest, plan.total, position, allow)
            plan = Plan(trainer, plan.length, manifest.step)
        trainer.log_event = lambda what: console.say(", ".join(f"{key} {value}" for key, value in what.items()))
        refusal = refusal or rehearse(trainer, plan)
        if refusal is None:
            return trainer, plan
        refusal.everywhere = True
        rows = trainer.shrink_micro_batch()
        if rows is None:
            raise refusal
        try:
            prepared = resized(prepared, rows)
        except UserError:  # some technique cannot have smaller ones: then what does not fit is what must be said
            raise refusal from None
        trainer.log_event({"micro_tokens": rows * trainer.env.seq, "after": refusal.found})
        release(trainer)


def _drive(
    prepared: ResolvedConfig,
    trainer: Trainer,
    plan: Plan,
    manifest: checkpoint.Manifest | None,
    passed: list[tuple[Path, str]],
    say: Say | None,
    reporter: Reporter | None,
) -> Outcome:
    """The loop with everything in place; every rank is here. `say` is the first rank's."""
    output = Path(trainer.config.output)
    skips = (0, 0) if manifest is None else (manifest.skipped, manifest.skipped_in_a_row)
    run_id = checkpoint.fresh_id() if manifest is None else manifest.run_id
    meter = Meter(trainer, output / "metrics.jsonl" if say else None, plan.total, say or _silent, skips)
    keeper, damaged = keeping(trainer, plan)
    passed = [*passed, *damaged]
    if passed and manifest is not None:
        over = [{"checkpoint": path.name, "reason": why} for path, why in passed]
        meter.write({"step": manifest.step, "passed_over": over})
    if manifest is not None and (changed := changes(manifest.config, trainer.config)):
        meter.write({"step": manifest.step, "changed": changed})
    trainer.set_step = partial(set_step, trainer, steps=plan.total)
    trainer.log_event = lambda what: meter.write({"step": meter.last, **what})
    trainer.batches = batches(trainer, plan)
    if reporter is not None:
        reporter.follow(run_id, plan.done, trainer.fingerprints)

    unsaved: dict[int, str] = {}

    def save(n: int) -> None:
        skips = meter.skips()
        if meter.failure is not None:
            return  # a failed run leaves its last good checkpoint the newest
        meta = checkpoint.Meta(run_id, trainer.stream.position(n), *skips, trainer.fingerprints)
        try:
            checkpoint.save(trainer, n, meta, None if keeper is None else keeper.spared(n))
        except checkpoint.SaveFailed as error:  # training goes on: the last good checkpoint is as it was
            unsaved[n] = str(error)
            meter.write({"step": n, "save_failed": str(error)})
        else:
            if keeper is not None:
                keeper.saved(n)

    def judged(n: int, loss: float) -> None:
        if keeper is not None and keeper.judge(n, loss) and not plan.saves(n):
            save(n)

    with reading(trainer.batches):
        if trainer.evaluation is not None and plan.done == 0:
            with meter.aside():
                meter.evaluated(0, *evaluate(trainer))
        meter.judged = judged
        try:
            train(trainer, meter, plan, save)
        except (RuntimeError, MemoryError) as error:
            if not exhausted(error):
                raise
            raise RunError(late(trainer, meter.last + 1, error)) from error
    meter.skips()  # waits for the flags of the last steps, so that every rank sees the same failure
    if meter.failure is not None:
        raise meter.failure
    if trainer.stopped:
        if meter.last in unsaved:
            raise RunError(f"stopped, but the last save failed: {unsaved[meter.last]}")
        if reporter is not None:
            reporter.status = "stopped"
        if say is not None:
            console.err.print(f"stopped and saved; go on with: --resume auto (output {output})", markup=False)
        return Outcome(RESUMABLE, output)
    deliver(trainer, plan.total, prepared.folder, keeper)
    if reporter is not None:
        reporter.status = "finished"
    if say is not None:
        metrics.plot(output / "metrics.jsonl", output / "loss.png", unit(trainer.config))
        write_run(output, trainer.world.ranks)
    return Outcome(0, output, tuple(meter.evals) if plan.done == 0 else tuple(meter.evals[-1:]))


def keeping(trainer: Trainer, plan: Plan) -> tuple[Keeper | None, list[tuple[Path, str]]]:
    """Who keeps the best checkpoint, if the run has one; and better ones that are damaged."""
    if trainer.evaluation is None or trainer.config.train.save_every is None or not trainer.config.train.best:
        return None, []
    output = Path(trainer.config.output)
    best, damaged = recall(output, plan.done, partial(comparable, trainer.config, trainer.fingerprints))
    return Keeper(output, best), damaged


def deliver(trainer: Trainer, steps: int, source: Path | None, keeper: Keeper | None) -> None:
    """`model/`, with the weights of the best checkpoint where there is one.

    Raises:
        RunError: that checkpoint is damaged, or `model/` cannot be written.
    """
    best = None if keeper is None else keeper.best
    if not trainer.config.train.export:
        return
    if best is not None and best.step != steps:
        try:
            checkpoint.put_back(trainer, best.step)
        except CheckpointError as error:
            do = "--resume auto exports the next best"
            raise RunError(f"the best checkpoint, of step {best.step}, is damaged: {error.found}; {do}") from None
    write_model(trainer, Path(trainer.config.output), steps if best is None else best.step, source)
    if best is not None:
        console.say(f"best eval_loss {best.eval_loss:.4f} at step {best.step}, exported")


def late(trainer: Trainer, n: int, error: BaseException) -> str:
    """What to say of a lack of memory that the rehearsal did not meet."""
    rows, T = trainer.env.micro_rows, trainer.env.seq
    found = next(iter(str(error).splitlines()), "") or type(error).__name__
    halves = rows > 1 and rows % 2 == 0 and Part.UPDATE not in trainer.env.claimed  # whose owner wants a step in one
    fewer = f" --set batch.micro_tokens={rows // 2 * T}" if halves else ""
    saved = checkpoint.find(Path(trainer.config.output))
    do = f"go on from {saved[0].name} with: --resume auto" if saved else "nothing is saved yet; begin again"
    return f"out of memory in step {n}: {found}; {do}{fewer}"


def look(prepared: ResolvedConfig, resume: Literal["auto"] | Path | None) -> None:
    """Whether the run may write where it wants to; looks only.

    Raises:
        UserError: see `trackers` and `runfolder`.
    """
    config = prepared.config
    trackers.check(config)
    clean = config.train.clean and resume is None
    held = config.data.eval if isinstance(config.data.eval, str) else None
    inputs = [o.path for o in config.data.origins]
    run_dir.keep_apart(config.output, clean, (prepared.folder, *inputs, held, config.model.chat_template))
    inside = resume is not None and (resume == "auto" or resume.resolve().is_relative_to(Path(config.output).resolve()))
    run_dir.prepare(config.output, clean, resume if inside else None)


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


def changes(before: dict[str, Any], now: Config) -> dict[str, str]:
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


def batches(trainer: Trainer, plan: Plan) -> Iterator[list[Batch]]:
    """This rank's micro-batches, step by step, from where the run stands."""
    rank, ranks = trainer.world.data_rank, trainer.world.data_ranks
    return trainer.stream.run(
        plan.length, plan.done, rank=rank, ranks=ranks, micro_rows=trainer.env.micro_rows, loading=trainer.loading
    )


@contextmanager
def stopping(trainer: Trainer) -> Iterator[None]:
    """SIGTERM, SIGINT and SIGUSR1 ask all ranks to save after the step under way; a second Ctrl-C leaves at once."""

    def asked(number: int, _: object) -> None:
        if number == signal.SIGINT and trainer.stopping:
            raise KeyboardInterrupt
        trainer.stopping = max(trainer.stopping, 1)

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.signal(n, asked) for n in numbers]
    try:
        yield
    finally:
        for n, handler in zip(numbers, before):
            signal.signal(n, handler)


def absolute(config: Config) -> Config:
    """The run with every path absolute, so that its run.yaml means the same from anywhere."""

    def full(path: str | None) -> str | None:
        if path is None or not (Path(path).exists() or glob.has_magic(path)):
            return path  # a hub id, or nothing that is there
        return str(Path(path).resolve())

    d = config.data
    whole = d.path if isinstance(d.path, tuple) else full(d.path)
    if isinstance(whole, tuple):
        whole = tuple(o.model_copy(update={"path": full(o.path)}) for o in d.origins)
    clean = d.clean and d.clean.model_copy(update={"decontaminate": full(d.clean.decontaminate)})
    held = full(d.eval) if isinstance(d.eval, str) else d.eval
    data = d.model_copy(update={"path": whole, "eval": held, "clean": clean, "cache": full(d.cache)})
    path = config.model.path if config.model.path == "tiny" else full(config.model.path)
    template = config.model.chat_template  # a folder of that name is none: `chatml` may be meant
    template = full(template) if template is not None and Path(template).is_file() else template
    model = config.model.model_copy(
        update={"path": path, "chat_template": template, "tokenizer": full(config.model.tokenizer)}
    )
    return config.model_copy(
        update={
            "data": data,
            "model": model,
            "output": str(Path(config.output).resolve()),
            "train": config.train.model_copy(update={"clean": False}),  # run again, it must not empty itself
        }
    )
