"""Run one training: resolved configuration -> build -> resume -> preflight -> loop -> save -> export.

Nothing is written before all checks have passed: the output folder is claimed after the preflight. Read `run` first;
the functions that it calls follow in the order of their calls.
"""

from __future__ import annotations

import copy
import gc
import glob
import itertools
import math
import os
import shlex
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from optrush import console, files
from optrush.config import SECTIONS, Cleaning, Config, Origin, Plugin, RewardRule, dump_config
from optrush.data import preview, sampler, tokenize
from optrush.data.batch import INVENTED, Batch
from optrush.data.sampler import ROOM, close_workers_after
from optrush.data.samples import Dataset
from optrush.data.schema import Document
from optrush.decide import Decided, changed, resized
from optrush.errors import (
    CheckpointError,
    ConfigError,
    NeedsError,
    RunError,
    UserError,
    exhausted,
    first_line,
    reason,
    write_remedy,
)
from optrush.exporting import publish, write_model
from optrush.files import read_text
from optrush.hardware import GIB
from optrush.launch import stop_numbers, unjoinable
from optrush.objectives import plugged
from optrush.report import data
from optrush.report.bench import write_run
from optrush.report.run import beside_steps, load_run, off_plan
from optrush.technique import Part
from optrush.trainer import checkpoint, copies, distributed, dpo_reference, run_dir
from optrush.trainer.build import ProcessGroup, build, join_ranks
from optrush.trainer.distributed import local
from optrush.trainer.metrics import Meter
from optrush.trainer.run_dir import BestCheckpoint
from optrush.trainer.trackers import Reporter, check_tracker, flat, open_reporter
from optrush.trainer.trainer import RunPlan, Trainer, evaluate, idle_settings, set_step, train

RESUMABLE = 143  # exit code
QUARANTINE = "quarantine.jsonl"


class Listener(Protocol):
    """A receiver of a run's reports on rank 0 (`optrush.api.Callback`)."""

    def step(self, step: int, metrics: Mapping[str, Any]) -> None: ...
    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None: ...
    def save(self, step: int, checkpoint: Path) -> None: ...


@dataclass(frozen=True)
class RunRequest:
    """The training to run, and how to start.

    resume: "auto" continues from the newest intact checkpoint, a folder from that checkpoint, None starts over.
    allow_change: fields whose fingerprint may have changed since the checkpoint.
    callbacks: called on rank 0. begun: start time of the command or the call.
    """

    resolved: Decided
    resume: Literal["auto"] | Path | None = None
    allow_change: frozenset[str] = frozenset()
    callbacks: tuple[Listener, ...] = ()
    begun: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Outcome:
    """How a run ended: code 0 done, 143 stopped by a signal and resumable."""

    code: int
    output: Path
    evals: tuple[float, ...] = ()  # held-out losses of the full run, in order
    seconds: float = 0.0  # since the start of the run, including loading
    tokens: int = 0  # trained on by all ranks in this process' run, without padding

    def closing_lines(self, pairs: bool, scores: bool = False) -> list[str]:
        """Return the text of a finished run: duration, tokens, held-out loss, paths, next command.

        Args:
            pairs: the loss is not a likelihood, so there is no perplexity.
            scores: the model scores texts and does not generate.
        """
        lines = [f"done in {console.duration(self.seconds)}, {console.count(self.tokens)} tokens"]
        if self.evals:
            losses = " -> ".join(f"{loss:.4f}" for loss in dict.fromkeys((self.evals[0], self.evals[-1])))
            lines.append(f"held-out loss {losses}" + ("" if pairs else f", perplexity {perplexity(self.evals[-1])}"))
        lines.append(f"report    {self.output / 'report.html'}")
        if (self.output / "model").is_dir():
            lines.append(f"model     {self.output / 'model'}")
            lines += [] if scores else [f"next      optrush chat {shlex.quote(str(self.output))}"]
        return lines


def perplexity(loss: float) -> str:
    """Format exp(loss), the perplexity of a loss in nats per token."""
    return f"{math.exp(loss):.4g}" if loss < 700 else "beyond 1e304"


def run(request: RunRequest) -> Outcome:
    """Train as requested; every rank calls it.

    Raises:
        UserError: something must be changed; the output folder is untouched.
        RunError: three updates in a row were not finite, or a step ran out of memory.
    """
    config, output = request.resolved.config, Path(request.resolved.config.output)
    check_run_output(request.resolved, request.resume)
    group = join_ranks(request.resolved)  # needed to agree on a checkpoint
    distributed.resume_with(partial(run_dir.resume_line, output))
    with ExitStack() as stack:
        reporter = stack.enter_context(open_reporter(absolute(config)))
        manifest, passed = checkpoint.choose(output, request.resume)
        trainer, plan = build_to_fit(request, group, manifest)
        check_stop(plan)
        saver = checkpoint.Saver(trainer)
        main = trainer.world.rank == 0
        saved = sum(distributed.host_sum([sum(s.local.nbytes for s in checkpoint.slices(trainer) if s.saves)]))
        on_rank0(main, output, lambda: check_disk(request, trainer, plan, saved))
        fresh = not output.exists()
        on_rank0(main, output, lambda: output.mkdir(parents=True, exist_ok=True))
        with undone(output if main and fresh else None) as locked:
            stack.enter_context(run_dir.lock(output))
            locked.set()
            on_rank0(main, output, lambda: claim_output(request, trainer, plan, manifest))
        copier = copies.copier(config, request.resume) if main else None
        on_rank0(main, output, copier.begin if copier is not None else list)
        if copier is not None:
            stack.enter_context(copier)
        if main:
            begins = request.resume == "auto" and manifest is None
            ended = f"all {plan.total} steps are done; to train more, raise train.steps or train.epochs"
            begun = "no checkpoint to resume from: step 1" * begins or ended * (plan.done == plan.total)
            trainer.notes += filter(None, [unjoinable(), begun])
            trainer.notes += idle_settings(config, plan.total, trainer.evaluation is not None)
            console.err.print("\n".join([*request.resolved.lines(), trainer.describe()]), markup=False)
        stack.enter_context(stop_signals(trainer))
        bar = stack.enter_context(console.Bar(plan.total, plan.done)) if main else None
        listeners = request.callbacks if copier is None else (*request.callbacks, copier)
        session = stack.enter_context(Session(trainer, plan, manifest, passed, saver, reporter, bar, listeners))
        with distributed.reported(), close_workers_after(trainer.batches), session.out_of_memory_reported():
            session.evaluate_untrained()
            train(trainer, session.meter, plan, session.save)
        session.check_ended_well()
        if trainer.stop.agreed:
            return session.stopped()
        distributed.record_operation("the export")
        export_best(trainer, session.meter.last or plan.done, request.resolved.folder, session.best)
        return replace(session.finished(request.begun), seconds=time.monotonic() - request.begun)


# --- Checks before anything is built


def check_run_output(resolved: Decided, resume: Literal["auto"] | Path | None) -> None:
    """Check that the run can report to its tracker and write to its output folder; write nothing.

    Raises:
        UserError: from `check_tracker`, `run_dir.check_inputs` or `run_dir.check_free`.
    """
    config = resolved.config
    if isinstance(resume, Path) and not resume.exists():
        raise ConfigError(f"the checkpoint {resume}", "no such folder", "resume from the newest one: --resume auto")
    run_dir.check_local(f"`output: {config.output}`", config.output)
    check_tracker(config)
    copies.check_copies(config, resume)
    clean = config.train.overwrite and resume is None  # a resume never empties the folder
    run_dir.check_inputs(config.output, clean, (resolved.folder, *_inputs(config)))
    if lies_in := next((o.path for o in config.data.origins if _contains(o.path, config.output)), None):
        found = f"it is inside {lies_in}: the run's files would be read as data"
        raise ConfigError(f"`output: {config.output}`", found, "use another `output`, or name the data files")
    inside = resume is not None and (resume == "auto" or resume.resolve().is_relative_to(Path(config.output).resolve()))
    run_dir.check_free(config.output, clean, resume if inside else None)


def _inputs(config: Config) -> Iterator[str | None]:
    """Yield the paths that a run of the configuration reads."""
    d, m = config.data, config.model
    yield from (origin.path for origin in d.origins)
    yield from (m.path, m.tokenizer, m.chat_template, d.eval if isinstance(d.eval, str) else None)
    yield None if d.clean is None else d.clean.decontaminate
    for options in config.with_.values():  # folders of adapters
        yield from (value for value in options.values() if isinstance(value, str) and Path(value).exists())


def _contains(path: str, output: str) -> bool:
    """Return whether a data source is a folder that contains the output."""
    return Path(path).is_dir() and Path(output).resolve().is_relative_to(Path(path).resolve())


def on_rank0(main: bool, output: Path, work: Callable[[], object]) -> None:
    """Do rank 0's work on the folder; raise its errors on every rank."""
    error: UserError | None = None
    if main:
        try:
            work()
        except UserError as e:
            error = e
        except OSError as e:
            folder, free = run_dir.free_space(output)
            found = f"{e.strerror}: {e.filename or output} ({free:,} bytes free in {folder})"
            error = ConfigError(f"`output: {output}`", found, "fix this, or use another `output`")
    distributed.agree(error)


@contextmanager
def undone(folder: Path | None) -> Iterator[threading.Event]:
    """Remove a folder created by a run that cannot start; its content only under the run's lock."""
    locked = threading.Event()
    try:
        yield locked
    except UserError:
        if folder is not None and locked.is_set():
            shutil.rmtree(folder, ignore_errors=True)
        elif folder is not None:
            with suppress(OSError):
                folder.rmdir()
        raise


def check_disk(request: RunRequest, trainer: Trainer, plan: RunPlan, saved: int) -> None:
    """Check that the disk has room for the run's files, by their known sizes.

    Args:
        saved: bytes of a checkpoint, over all ranks.
    """
    config = trainer.config
    weight = trainer.model.embedding.weight
    assert isinstance(weight, Tensor)
    numbers = sum(math.prod(entry.shape) for entry in trainer.weight_map.entries.values())
    exported = numbers * weight.element_size() if config.train.export else 0
    run_dir.check_space(config, plan.total, config.train.overwrite and request.resume is None, saved, exported)


def claim_output(request: RunRequest, trainer: Trainer, plan: RunPlan, manifest: checkpoint.Manifest | None) -> None:
    """Claim the folder for this run: empty it if `train.overwrite` is set, truncate metrics.jsonl, write run.yaml."""
    # The preflight may have halved the micro-batch.
    trainer.config = changed(trainer.config, {"batch.micro_tokens": trainer.env.micro_rows * trainer.env.seq})
    config, output = trainer.config, Path(trainer.config.output)
    check_run_output(request.resolved, request.resume)  # again: another run may have finished here meanwhile
    run_dir.prepare_folder(output, config.train.overwrite and request.resume is None)
    run_dir.truncate_to_step(output / "metrics.jsonl", -1 if manifest is None else plan.done)
    files.open_to_append(output / "metrics.jsonl").close()
    reasons = "".join(f"# {line}\n" for line in request.resolved.lines())
    if not reasons and manifest is not None and (output / "run.yaml").is_file():  # decided at its start
        before = read_text(output / "run.yaml").splitlines(keepends=True)
        reasons = "".join(itertools.takewhile(lambda line: line.startswith("#"), before))
    files.write_whole(output / "run.yaml", reasons + dump_config(absolute(config)))
    run_dir.write_data_record(output, config, trainer.fingerprints["data"])
    run_dir.write_samples(output, _seen_samples(trainer))
    if manifest is None or trainer.stream.tokenized:  # a stream does not read earlier bad rows again
        (output / QUARANTINE).unlink(missing_ok=True)
        tokenize.append_bad_rows(output / QUARANTINE, trainer.sources.refused)
    if isinstance(trainer.stream, sampler.LiveStream):
        trainer.stream.aside = output / QUARANTINE
    if trainer.sources.cleaned is not None:
        data.write_cleaning_page(trainer.sources.cleaned, output)


def absolute(config: Config) -> Config:
    """Return the configuration with absolute paths, so that its run.yaml works from any folder."""

    def full(path: str | None) -> str | None:
        if path is None or "://" in path or not (Path(path).exists() or glob.has_magic(path)):
            return path  # a hub id, an address, or a missing path
        return str(Path(path).resolve())

    d, m = config.data, config.model
    source = d.path if isinstance(d.path, tuple) else full(d.path)
    if isinstance(source, tuple):
        source = tuple(Origin(path=full(o.path) or o.path, weight=o.weight) for o in d.origins)
    clean = d.clean and Cleaning(**{**dict(d.clean), "decontaminate": full(d.clean.decontaminate)})
    held_out = full(d.eval) if isinstance(d.eval, str) else d.eval
    template = m.chat_template  # not a folder: the name may mean `chatml`
    template = full(template) if template is not None and Path(template).is_file() else template
    path = m.path if m.path == "tiny" else full(m.path)
    loss = config.loss and Plugin(use=plugged.absolute_name(config.loss.use), options=config.loss.options)
    rules = () if config.grpo is None else config.grpo.rewards
    rewards = tuple(RewardRule(**{**dict(rule), "use": plugged.absolute_name(rule.use)}) for rule in rules)
    with_ = {n: {**o, "use": plugged.absolute_name(o["use"])} if "use" in o else o for n, o in config.with_.items()}
    shared = config.rollout and config.rollout.folder
    return changed(config, {
        "loss": loss, "with": with_, **({"grpo.rewards": rewards} if rewards else {}),
        **({"rollout.folder": str(Path(shared).resolve())} if shared else {}),
        "data.path": source, "data.eval": held_out, "data.clean": clean, "data.cache": full(d.cache),
        "model.path": path, "model.chat_template": template, "model.tokenizer": full(m.tokenizer),
        "train.overwrite": False,  # a second run must not empty the folder
        "output": str(Path(config.output).resolve()),
    })  # fmt: skip


# --- Build, restore, preflight; with smaller micro-batches until it fits


def build_to_fit(
    request: RunRequest,
    group: ProcessGroup,
    manifest: checkpoint.Manifest | None,
    fill_reference: Callable[[Trainer, Decided], None] = dpo_reference.fill_reference,
    first_steps: int | None = None,
) -> tuple[Trainer, RunPlan]:
    """Build the trainer, restore the checkpoint, run the preflight; retry with smaller micro-batches if needed.

    Args:
        first_steps: see `build`.

    Raises:
        UserError: it does not fit, or building or restoring failed.
    """
    today = checkpoint.first_date(manifest)
    resolved = request.resolved
    rows = min(int(n) for n in distributed.gather(str(resolved.env.micro_rows)))  # hosts may differ
    resolved = resized(resolved, rows) if rows < resolved.env.micro_rows else resolved
    length = resolved.config.train
    while True:
        trainer = build(resolved, group, progress=console.say, today=today, first_steps=first_steps)
        trainer.publish = partial(publish, trainer, resolved.folder)
        plan = RunPlan(trainer, trainer.stream.plan(None if length.steps else length.epochs, length.steps))
        refusal: UserError | None = None
        if resolved.config.referenced is not None:  # uses the weights before a checkpoint is restored
            refusal = run_guarded(trainer, partial(fill_reference, trainer, resolved))
        if manifest is not None and refusal is None:
            changed = partial(run_dir.data_changes, manifest.path.parent.parent, trainer.config, manifest.config)
            checkpoint.restore(trainer, manifest, trainer.fingerprints, request.allow_change, changed)
            position = trainer.stream.seek(manifest.step, manifest.position)
            if lost := checkpoint.check_plan(manifest, plan.total, position, request.allow_change):
                trainer.notes.append(lost)
            plan = RunPlan(trainer, plan.length, manifest.step)
        trainer.log_event = lambda what: console.say(", ".join(f"{key} {value}" for key, value in what.items()))
        refusal = refusal or preflight(trainer, plan)
        if refusal is None:
            return trainer, plan
        refusal.everywhere = True
        smaller = trainer.env.fewer_rows if Part.MICRO_BATCH in trainer.env.claimed else None
        if smaller is None:
            raise refusal
        try:
            resolved = resized(resolved, smaller)
        except UserError:  # a technique forbids smaller ones: report that it does not fit
            raise refusal from None
        trainer.log_event({"micro_tokens": smaller * trainer.env.seq, "after": refusal.found})
        release_memory(trainer)


# Preflight: the largest step, one evaluation and a save's copies, once before step 0, so that nothing runs out of
# memory late, and compilation and capture come before the first timed step. The run is unchanged: the loss scale is
# infinite, so every update is skipped; loss scale, random state, buffers and the state of techniques are restored, and
# the data is read outside its stream. Not covered: temporaries of an update whose optimizer decides on the host whether
# to step.
#
# Largest: a full micro-batch of rows with one document of T tokens (for pairs, two of T / 2), all targets (if the width
# follows the rows: the longest), twice with gradient accumulation; then the real first step.

PREFLIGHT_S = 120.0  # for a rank that has not reported its result


def preflight(trainer: Trainer, plan: RunPlan) -> UserError | None:
    """Run the largest step without changing the run.

    Returns:
        None if all ranks had enough memory; else the error to raise, on every rank. The trainer is then unusable.

    Raises:
        RunError: a rank ran out of memory while another waits for it in a collective.
    """
    if plan.done >= plan.total:
        return None
    distributed.record_operation("the trial of the largest step")
    console.loading("running the largest step once: checks memory and compiles")

    def work() -> None:
        with _state_restored(trainer):
            _largest_step(trainer, plan)

    refusal = run_guarded(trainer, work)
    if refusal is None and trainer.world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # the run's peak counts only its own steps
    return refusal


def run_guarded(trainer: Trainer, work: Callable[[], None]) -> UserError | None:
    """Run the work of all ranks before step 0; return and raise like `preflight`."""
    failure = ""
    try:
        work()
    except (RuntimeError, MemoryError) as error:
        if not exhausted(error):
            raise
        failure = _allocator_message(error)
    # From here on nothing references the failed step's tensors.
    failures = distributed.exchange(failure, PREFLIGHT_S)
    if failures is None:
        found, do = failure or "another rank does not answer", "look for its error above, then start again"
        raise RunError("the trial of the largest step", found, do)
    failure = next(filter(None, failures), "")
    return _out_of_memory(trainer, failure) if failure else None


def _largest_step(trainer: Trainer, plan: RunPlan) -> None:
    for window in _preflight_windows(trainer, plan):
        trainer.scale.fill_(math.inf)
        terms = sum(b.n_terms for b in window) * trainer.world.data_ranks
        trainer.forward_backward(window, max(1, terms))
        trainer.optimizer_step()
    if trainer.evaluation is not None and trainer.evaluation.figures is None:  # otherwise it would sample all answers
        trainer.eval_loss([next(iter(trainer.evaluation))])
    if largest := max(checkpoint.slices(trainer), key=lambda s: math.prod(s.whole), default=None):
        trainer.storage.read([largest])[0].local.detach().cpu()  # a save copies one tensor to the host at a time
    if trainer.world.device.type == "cuda":
        torch.cuda.synchronize()


def _preflight_windows(trainer: Trainer, plan: RunPlan) -> Iterator[list[Batch]]:
    env, rows, world = trainer.env, trainer.stream, trainer.world
    if not rows.tokenized and Part.CAPTURE in env.claimed:
        # The documents per row are unknown until rows are read: this capture would never be replayed.
        trainer.notes.append("memory is not checked before step 1: data.stream has not read the rows to record")
        return
    count = env.accumulation if "pp" in env.axes else min(2, env.accumulation)  # a pipeline has several in flight
    yield [largest_batch(trainer, plan)] * count
    if rows.tokenized:  # a stream has no first step before it reads a window
        rank, ranks = world.data_rank, world.data_ranks
        if first := rows.batches(plan.done, plan.length, rank=rank, ranks=ranks, micro_rows=env.micro_rows):
            yield first


def largest_batch(trainer: Trainer, plan: RunPlan) -> Batch:
    """Build the micro-batch with the highest possible memory: full rows of one document each."""
    rows, env = trainer.stream, trainer.env
    width = env.seq
    if rows.layout.pad_to_longest and rows.tokenized:
        width = min(width, int(rows.source.lengths().max()))
    ids = np.random.default_rng(0).integers(trainer.ids, size=(env.micro_rows, width), dtype=np.int32)
    parts = [np.array_split(row, rows.source.parts) for row in ids]
    documents = [[(INVENTED, Document(part, np.ones(len(part), bool))) for part in row] for row in parts]
    # A live stream's room for documents grows with the rows that it reads.
    room = plan.length.widest or (ROOM if rows.layout.isolated else 2)
    (batch,) = sampler.micro_batches(rows, documents, room, rank=0, ranks=1, micro_rows=env.micro_rows)
    return batch


@contextmanager
def _state_restored(trainer: Trainer) -> Iterator[None]:
    """Undo the changes of a skipped update, a forward pass or an evaluation. After an error the trainer is unusable."""
    cuda = trainer.world.device.type == "cuda"
    random, cuda_random = torch.get_rng_state(), torch.cuda.get_rng_state() if cuda else None
    scale, lr, finite = trainer.scale.clone(), trainer.lr.clone(), trainer.loss_is_finite
    training = trainer.model.training
    buffers = [(b, b.detach().clone()) for b in trainer.model.buffers()]
    states = {name: copy.deepcopy(state.save()) for name, state in trainer.state.items()}
    yield
    for name, state in trainer.state.items():
        state.load(states[name])
    with torch.no_grad():
        for b, before in buffers:
            b.copy_(before)
    trainer.scale.copy_(scale)
    trainer.lr.copy_(lr)
    trainer.loss_is_finite = finite
    trainer.model.train(training)
    torch.set_rng_state(random)
    if cuda_random is not None:
        torch.cuda.set_rng_state(cuda_random)


def _allocator_message(error: BaseException) -> str:
    text = first_line(error)
    text = text.partition(" Of the allocated")[0].rstrip(".")
    if torch.cuda.is_available():
        text += f"; torch had allocated up to {torch.cuda.max_memory_allocated() / GIB:.2f} GiB"
    return text


def _out_of_memory(trainer: Trainer, failure: str) -> UserError:
    env, rows, T = trainer.env, trainer.env.micro_rows, trainer.env.seq
    ways = []
    if rows > 1 and Part.UPDATE in env.claimed:  # its owner requires one micro-batch per step
        ways.append(f"set batch.tokens: {rows // 2 * env.data_ranks * T} and lower batch.micro_tokens with it")
    elif rows > 1:
        ways.append(f"set batch.micro_tokens: {(env.fewer_rows or 1) * T}, or auto")
    if Part.ACTIVATION_CHECKPOINTING not in env.claimed:
        ways.append("--with recompute")
    if rows == 1:
        ways.append("shorter rows (batch.seq), or a smaller model")
    asked = f"micro-batches of {rows} row{'s' * (rows > 1)} of {T} tokens"
    return NeedsError(asked, f"out of memory, before step 0: {failure}", "; or ".join(ways))


def release_memory(trainer: Trainer) -> None:
    """Free the memory of a trainer that did not fit, despite remaining references."""
    tensors = [*trainer.model.parameters(), *trainer.model.buffers()]
    tensors += [state for states in trainer.optimizer.state().values() for state in states.values()]
    for t in tensors:
        memory = local(t).untyped_storage()
        if memory.resizable():
            memory.resize_(0)
    del tensors
    if free := getattr(trainer.optimizer, "release", None):  # memory not managed by torch
        free()
    for parameter in trainer.model.parameters():
        parameter.grad = None
    gc.collect()
    if trainer.world.device.type == "cuda":
        torch.cuda.empty_cache()


# --- The loop with its logging, reporting and checkpoints


class Session:
    """Metrics lines, reporters and checkpoints around the loop of one run. Exiting it ends the reporters."""

    def __init__(
        self, trainer: Trainer, plan: RunPlan, manifest: checkpoint.Manifest | None, passed: list[tuple[Path, str]],
        saver: checkpoint.Saver, tracker: Reporter | None, bar: console.Bar | None,
        callbacks: tuple[Listener, ...] = (),
    ) -> None:  # fmt: skip
        """Log the changes since the checkpoint, and start reporting.

        Args:
            passed: damaged checkpoints that were skipped, with reasons.
            tracker, bar: only on rank 0; a tracker only if configured.
        """
        self.trainer, self.plan, self.bar, self.output = trainer, plan, bar, Path(trainer.config.output)
        self.saver, saver.settled = saver, self._settled
        self.callbacks = () if bar is None else callbacks
        self.run_id = checkpoint.fresh_id() if manifest is None else manifest.run_id
        self.unsaved: dict[int, str] = {}  # steps whose checkpoint could not be saved, with reasons
        self.reporters = [] if tracker is None else [tracker]
        skips = (0, 0) if manifest is None else (manifest.skipped, manifest.skipped_in_a_row)
        path = None if bar is None else self.output / "metrics.jsonl"
        self.meter = Meter(trainer, path, plan.total, self._show, skips)
        self.meter.explained = beside_steps
        self.best, damaged = find_best(trainer, plan)
        self.patience = find_patience(trainer, plan, manifest)
        if (passed := [*passed, *damaged]) and manifest is not None:
            over = [{"checkpoint": path.name, "reason": reason} for path, reason in passed]
            self.meter.write({"step": manifest.step, "passed_over": over})
        if manifest is not None and (changed := changes(manifest.config, trainer.config)):
            self.meter.write({"step": manifest.step, "changed": changed})
        trainer.set_step = self._begin_step
        trainer.log_event = lambda what: self.meter.write({"step": self.meter.last, **what})
        trainer.stream.report = lambda line: trainer.log_event({"data": line})
        trainer.batches = batches(trainer, plan)

    def __enter__(self) -> Session:
        if self.bar is not None:
            board = Reporter(None, self.output, self.trainer.config)
            board.connect()
            self.reporters.append(board)
        for reporter in self.reporters:
            reporter.follow(self.run_id, self.plan.done, self.trainer.fingerprints)
        return self

    def evaluate_untrained(self) -> None:
        """Evaluate before the first step of a new run."""
        if self.trainer.evaluation is not None and self.plan.done == 0:
            distributed.record_operation("the evaluation before step 1")
            with self.meter.aside("evaluation"):
                self.meter.evaluated(0, *evaluate(self.trainer))
            if self.patience is not None:
                self.patience.add(self.meter.evals[-1])
        self.meter.judged = self._evaluated
        self.meter.begin_steps(self.plan.done)

    def save(self, step: int) -> None:
        """Save a checkpoint; if the disk fails, training continues with the last good checkpoint kept.

        With `train.save: async` a thread writes.
        """
        skips = self.meter.skips()
        if self.meter.failure is not None:
            return  # a failed run leaves its last good checkpoint the newest
        position = self.trainer.stream.position(step)
        meta = checkpoint.Meta(self.run_id, position, *skips, self.trainer.fingerprints)
        self.saver.settle(wait=True)  # it determines the best checkpoint, which is not pruned
        self.saver.save(step, meta, None if self.best is None else self.best.protected_step(step))

    def _settled(self, step: int, failure: checkpoint.SaveFailed | None) -> None:
        """Record the result of a step's save."""
        if failure is not None:
            self.unsaved[step] = str(failure)
            self.meter.write({"step": step, "save_failed": str(failure)})
        if self.best is not None:
            (self.best.saved if failure is None else self.best.not_saved)(step)
        for callback in self.callbacks if failure is None else ():
            callback.save(step, self.output / checkpoint.FOLDER / f"step-{step:06d}")

    def _begin_step(self, step: int) -> None:
        self.saver.settle()
        self.meter.note_beside()
        set_step(self.trainer, step, self.plan.total)

    def _evaluated(self, step: int, loss: float) -> None:
        """Save a step with a new best held-out loss, even if no save is due; end the run if it is over."""
        if self.patience is not None:
            self.patience.add(loss)
            self.trainer.stop.complete = self.patience.exhausted
            if self.trainer.stop.complete and step < self.plan.total:
                done, least = self.patience.since, self.patience.least
                text = f"{done} evaluation{'s' * (done > 1)} without a held-out loss below {least:.4f}"
                self.meter.write({"step": step, "stopped_early": text})
        if self.best is not None and self.best.is_best(step, loss) and not self.plan.saves(step):
            distributed.record_operation("saving the best checkpoint", step)
            with self.meter.aside("saving"):
                self.save(step)

    def _show(self, line: dict[str, Any]) -> None:
        """Print a line of metrics.jsonl, and log a reporter's first failure."""
        if self.bar is not None:
            self.bar.say(line)
        for callback in self.callbacks:
            if "eval_loss" in line:
                callback.evaluation(line["step"], line)
            elif "loss" in line:
                callback.step(line["step"], line)
        for reporter in self.reporters:
            if trouble := reporter.put(line):
                self.trainer.log_event({"tensorboard" if reporter.options is None else "tracker": trouble})

    @contextmanager
    def out_of_memory_reported(self) -> Iterator[None]:
        """Convert an allocator's error to a RunError with the step and a remedy."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not exhausted(error):
                raise
            raise out_of_memory_in(self.trainer, self.meter.last + 1, error) from error

    def check_ended_well(self) -> None:
        """Raise RunError after non-finite updates, or if a stop could not save its checkpoint."""
        distributed.record_operation("the last save", self.meter.last)
        self.meter.end_steps()
        self.saver.settle(wait=True)
        self.meter.skips()  # waits for the last steps' flags, so that every rank has the same failure
        if self.meter.failure is not None:
            raise self.meter.failure
        if self.trainer.stop.agreed and self.meter.last in self.unsaved:
            found = self.unsaved[self.meter.last]
            do = f"{write_remedy(found)}; {run_dir.resume_line(self.output)}"
            raise RunError("the save when the run was stopped", found, do)

    def stopped(self) -> Outcome:
        """Return the outcome of a run that a signal stopped."""
        for reporter in self.reporters:
            reporter.status = "stopped"
        if self.bar is not None:
            saved = "and saved; resume with: --resume auto" if self.meter.last else "before the first step"
            console.err.print(f"stopped {saved} (output {self.output})", markup=False)
        return Outcome(RESUMABLE, self.output)

    def finished(self, begun: float) -> Outcome:
        """Draw the loss curve and the report, and return the outcome of a complete run."""
        for reporter in self.reporters:
            reporter.status = "finished"
        self.meter.note_times(begun)
        if self.bar is not None:
            try:
                run = load_run(self.output)
                if (off := off_plan(run, self.trainer.world.ranks)) and not any(
                    ": off plan: " in note for note in run.notes
                ):
                    self.meter.write({"step": self.meter.last or self.plan.done, "off_plan": off})
                write_run(self.output, self.trainer.world.ranks)
            except Exception as error:  # a failed report must not fail the run
                do = f"{'free space, then run' if isinstance(error, OSError) else 'run'}: optrush report {self.output}"
                found = error.strerror if isinstance(error, OSError) else reason(error)
                console.say(f"the run finished, but the report was not written ({found}); {do}")
        evals = tuple(self.meter.evals)
        evals = evals if self.plan.done == 0 else evals[-1:]
        return Outcome(0, self.output, evals, tokens=self.meter.all_tokens)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and (self.trainer.world.ranks > 1 or kind is KeyboardInterrupt):
            self.saver.give_up()  # the other ranks are about to exit, too
        elif kind is not None:
            with suppress(RunError):  # an error is already being raised
                self.saver.settle(wait=True)
        for reporter in self.reporters if kind is not KeyboardInterrupt else ():  # a second Ctrl-C: leave at once
            outcome = reporter.end()
            if reporter.options is not None or reporter.error:
                console.say(outcome)


def find_best(trainer: Trainer, plan: RunPlan) -> tuple[BestCheckpoint | None, list[tuple[Path, str]]]:
    """Return the best checkpoint's record, if any, and better but damaged checkpoints with reasons."""
    train = trainer.config.train
    if trainer.evaluation is None or not train.best or (train.save_every is None and train.stop_after is None):
        return None, []
    output = Path(trainer.config.output)
    comparable = partial(run_dir.comparable, trainer.config, trainer.fingerprints)
    best, damaged = run_dir.recall(output, plan.done, comparable)
    return BestCheckpoint(output, best), damaged


def _seen_samples(trainer: Trainer) -> list[dict[str, Any]]:
    """Return the first samples with images, if any."""
    source = trainer.sources.train
    if getattr(trainer.model, "tower", None) is None or not isinstance(source, Dataset):
        return []
    return preview.seen_samples(source, trainer.tokenizer, trainer.env.seq)


def find_patience(trainer: Trainer, plan: RunPlan, manifest: checkpoint.Manifest | None) -> run_dir.Patience | None:
    """Return the state of `train.stop_after` from the evaluations so far, and end a run that is over.

    Raises:
        ConfigError: the run has too few evaluations to stop early.
    """
    rule = trainer.config.train.stop_after
    if rule is None:
        return None
    alike = manifest is not None and run_dir.comparable(trainer.config, trainer.fingerprints, manifest)
    patience = run_dir.Patience(rule, run_dir.held_out_losses(Path(trainer.config.output)) if alike else ())
    trainer.stop.complete = plan.done > 0 and patience.exhausted
    return patience


def check_stop(plan: RunPlan) -> None:
    """Raise ConfigError if `train.stop_after` could not end the run before its last step."""
    rule = plan.trainer.config.train.stop_after
    evals = 0 if rule is None else sum(map(plan.evaluates, range(1, plan.total + 1)))
    if rule is not None and evals <= rule.evals:
        found = f"{evals} evaluation{'s' * (evals != 1)} in {plan.total} steps, the last after the last step"
        do = "evaluate more often (train.eval_every), or remove train.stop_after"
        refusal = ConfigError(f"`train.stop_after: {rule.evals}`", found, do)
        refusal.everywhere = True
        raise refusal


def batches(trainer: Trainer, plan: RunPlan) -> Iterator[list[Batch]]:
    """Iterate over this rank's micro-batches, step by step, from the step after `plan.done`."""
    world, micro_rows = trainer.world, trainer.env.micro_rows
    return trainer.stream.run(
        plan.length, plan.done, rank=world.data_rank, ranks=world.data_ranks, micro_rows=micro_rows,
        loading=replace(trainer.loading, stopping=lambda: trainer.stop.told == 1),
    )  # fmt: skip


def changes(before: dict[str, Any], config: Config) -> dict[str, str]:
    """Return the keys that change the loss curve and differ from the saved run's, as "old -> new"."""
    old, new = dict(flat(before)), dict(flat(config.model_dump(mode="json", by_alias=True)))
    told = ("optim.", *(f"{name}." for name in SECTIONS), "train.steps", "train.epochs", "with.")
    keys = [k for k in {**old, **new} if k.startswith(told)]
    return {k: f"{old.get(k)} -> {new.get(k)}" for k in keys if old.get(k) != new.get(k)}


def out_of_memory_in(trainer: Trainer, step: int, error: BaseException) -> RunError:
    """Return the error for running out of memory after the preflight."""
    rows, T = trainer.env.micro_rows, trainer.env.seq
    found = first_line(error)
    # The owner of UPDATE requires one micro-batch per step.
    halves = rows > 1 and rows % 2 == 0 and Part.UPDATE not in trainer.env.claimed
    fewer = f" --set batch.micro_tokens={rows // 2 * T}" if halves else ""
    rank = "" if trainer.world.ranks == 1 else f", on rank {trainer.world.rank} of {trainer.world.ranks}"
    asked = f"micro-batches of {rows} row{'s' * (rows > 1)} of {T} tokens{rank}"
    do = run_dir.resume_line(Path(trainer.config.output)) + fewer
    return RunError(asked, f"out of memory in step {step}: {found}", do)


@contextmanager
def stop_signals(trainer: Trainer) -> Iterator[None]:
    """Make SIGTERM, SIGINT, SIGUSR1 and SIGHUP stop all ranks after a save of the current step.

    A second Ctrl-C stops immediately. After SIGHUP nothing is written to the closed terminal.
    """
    terminals = [fd for fd in (1, 2) if os.isatty(fd)]

    def handle(number: int, _: object) -> None:
        if number == signal.SIGINT and trainer.stop.told:
            raise KeyboardInterrupt
        if number == signal.SIGHUP:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for fd in terminals:
                os.dup2(nowhere, fd)
            os.close(nowhere)
        trainer.stop.told = max(trainer.stop.told, 1)

    numbers = stop_numbers()
    before = [signal.signal(n, handle) for n in numbers]
    try:
        yield
    finally:
        for n, handler in zip(numbers, before):
            signal.signal(n, handler)


def export_best(trainer: Trainer, steps: int, source: Path | None, best: BestCheckpoint | None) -> None:
    """Write `model/`, with the weights of the best checkpoint if there is one.

    Raises:
        RunError: that checkpoint is damaged, or `model/` cannot be written.
    """
    if not trainer.config.train.export:
        return
    chosen = None if best is None else best.best
    if chosen is not None and chosen.step != steps:
        try:
            checkpoint.put_back(trainer, chosen.step)
        except CheckpointError as error:
            asked, found = f"the best checkpoint, of step {chosen.step}", f"it is damaged: {error.found}"
            raise RunError(asked, found, "export the next best: --resume auto") from None
    else:
        trainer.put_averages()
    write_model(trainer, Path(trainer.config.output), steps if chosen is None else chosen.step, source)
    if chosen is not None:
        console.say(f"best eval_loss {chosen.eval_loss:.4f} at step {chosen.step}, exported")
