"""One training run from start to finish: the folder, resuming, signals, the loop, the exported model.

Nothing is written before everything that can be refused was refused: the folder is claimed after assembly.
"""

from __future__ import annotations

import datetime
import glob
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from optrush import (
    checkpoint,
    clean_page,
    config,
    console,
    curves,
    distributed,
    reference,
    rehearse,
    runfolder,
    step,
    trackers,
)
from optrush.assemble import Started, assemble, start
from optrush.bench.report import write_run
from optrush.best import Keeper, comparable, recall
from optrush.board import Board
from optrush.data import tokenize
from optrush.data.sampler import Live, reading
from optrush.errors import CheckpointError, ConfigError, RunError, UserError
from optrush.export import write_model
from optrush.job import Batch, Job
from optrush.meter import Meter
from optrush.objectives import unit
from optrush.reporting import Reporter, reporting
from optrush.resolve import Prepared, resized
from optrush.technique import Part
from optrush.train import Plan, evaluate, train

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
        stack.enter_context(runfolder.lock(output))

        def claim() -> None:
            look(prepared, resume)  # another run may have ended here since
            runfolder.claim(output, clean)
            runfolder.cut_back(output / "metrics.jsonl", -1 if manifest is None else plan.done)
            (output / "metrics.jsonl").touch()
            runfolder.put(output / "run.yaml", config.dump(absolute(run)))
            if manifest is None or not isinstance(job.stream, Live):  # a stream meets earlier bad rows no more
                (output / QUARANTINE).unlink(missing_ok=True)
                tokenize.append(output / QUARANTINE, job.sources.refused)
            if isinstance(job.stream, Live):
                job.stream.aside = output / QUARANTINE
            if job.sources.cleaned is not None:
                clean_page.write(job.sources.cleaned, output)

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
    refer: Callable[[Job, Prepared], None] = reference.fill,
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
            refusal = rehearse.guarded(job, partial(refer, job, prepared))
        if manifest is not None and refusal is None:
            checkpoint.restore(job, manifest, job.fingerprints, allow)
            position = job.stream.seek(manifest.step, manifest.position)
            checkpoint.check_plan(manifest, plan.total, position, allow)
            plan = Plan(job, plan.length, manifest.step)
        job.told = lambda what: console.say(", ".join(f"{key} {value}" for key, value in what.items()))
        refusal = refusal or rehearse.rehearse(job, plan)
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
        rehearse.release(job)


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
    job.begin = partial(step.begin, job, steps=plan.total)
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
            if not step.exhausted(error):
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
        curves.plot(output / "metrics.jsonl", output / "loss.png", unit(job.run))
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
    runfolder.keep_apart(run.output, clean, (prepared.folder, *inputs, held, run.model.chat_template))
    inside = resume is not None and (resume == "auto" or resume.resolve().is_relative_to(Path(run.output).resolve()))
    runfolder.prepare(run.output, clean, resume if inside else None)


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
