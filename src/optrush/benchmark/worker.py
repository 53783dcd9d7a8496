"""Measure one rung once, in a separate process: `python -m optrush.benchmark.worker REQUEST.json RESULT.json`.

resolve -> build -> copy the initial state to the host -> the proof: a few training steps on the same documents in every
rung -> restore the initial state -> warm up and time, through the real training loop -> RESULT.json -> a few more steps
under the profiler -> RESULT.json again, with their parts.
Nothing is written to the run's output. A failure is a result too; a process killed before it leaves no result.
"""

from __future__ import annotations

import base64
import hashlib
import heapq
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optrush.benchmark.peer import training_facts
from optrush.benchmark.record import Keep, answer_request, describe_error
from optrush.config import Config, parse_config
from optrush.data import sampler
from optrush.data.batch import Batch
from optrush.data.dataset import read_sources
from optrush.data.sampler import close_workers_after
from optrush.data.samples import SampleChunk
from optrush.data.schema import Document
from optrush.data.tokenizer import open_tokens
from optrush.decide import Decided, decide
from optrush.models.hf import HFModel
from optrush.planner.cost import PARTS
from optrush.report.bench import GAPS
from optrush.technique import Part
from optrush.trainer import distributed, dpo_reference
from optrush.trainer.build import build
from optrush.trainer.metrics import Meter, resident
from optrush.trainer.run import batches, preflight
from optrush.trainer.trainer import RunPlan, TrainedParam, Trainer, set_step, train

UNPROVED = "no proof: not requested at this length"
ENDED = "the process ended under the profiler"
PROFILED, PROFILED_S = 3, 1.0  # limits of profiled steps and seconds, after one extra step
SKETCH_WIDTH = 4093  # a prime: spreads the values of a matrix column over many sums
SKETCH_PIECE = 1024 * SKETCH_WIDTH  # values at a time


def answer_bench_request() -> None:
    """Answer one request; the exit code is 0 if the answer has figures."""

    def answer(request: dict[str, Any], keep: Keep) -> dict[str, Any]:
        config, baseline = (parse_config(request[key], key, own=True) for key in ("run", "baseline"))
        steps, documents = request["proof"]["steps"], request["proof"]["documents"]
        with distributed.leaving():
            rehearse = request.get("rehearse", False)
            return measure(config, baseline, request["warmup"], steps, documents, keep, rehearse=rehearse)

    answer_request(answer)


def measure(
    config: Config,
    baseline: Config,
    warmup: int,
    proof_steps: int,
    proof_documents: int,
    keep: Keep = lambda result: None,
    *,
    rehearse: bool = False,
) -> dict[str, Any]:
    """Return the result of one rung.

    Args:
        config: the rung; its `train.steps` are the warm-up and the timed steps.
        baseline: the rung with the proof's documents.
        proof_steps: 0: no proof.
        keep: stores the result before the profiler runs, which can kill a process.
        rehearse: run the largest step and an evaluation first, like a run; then no evaluation.

    Raises:
        UserError: the rung cannot be built, or its largest step does not fit in memory.
    """
    resolved = decide(config)
    trainer = build(resolved)
    marks = RegionMarks(trainer)
    dpo_reference.fill_reference(trainer, resolved)
    plan = RunPlan(trainer, trainer.stream.plan(None, config.train.steps))
    if rehearse:
        if (refusal := preflight(trainer, plan)) is not None:
            raise refusal
        trainer.evaluation = None
    proof: dict[str, Any] = {"losses": [], "grad_norms": [], "note": UNPROVED}
    window: list[Batch] = []
    documents = first_documents(trainer, resolved, baseline, proof_documents) if proof_steps else []
    fills: list[float] = []
    trainer.batches = _count_fill(batches(trainer, plan), fills)
    with close_workers_after(trainer.batches):
        if documents:
            window, proof["note"] = proof_window(trainer, documents, most=plan.length.widest)
        initial = InitialState(trainer) if window else None
        if initial is not None:
            proof |= proof_losses(trainer, window, proof_steps)
            initial.restore()
        if trainer.world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()  # the proof can have more micro-batches than a step of the rung
        meter = loop(trainer, plan)
    memory = _most({**meter.memory(), "host_peak_bytes": resident()})
    if initial is not None:  # repeat the proof's first step: a technique could behave differently only during the proof
        initial.restore()
        proof["again"] = proof_losses(trainer, window, 1)
    timed = [line for line in meter.lines if line["step"] > warmup]
    seconds = [line["step_s"] for line in timed]
    mfu = [line["mfu"] for line in timed if line["mfu"] is not None]
    states = (s for by_name in trainer.optimizer.state().values() for s in by_name.values())
    count, weights = sum(t.parameter.numel() for t in trainer.trained), [t.local for t in trainer.trained]
    result = {
        "proof": proof,
        "step_s": seconds,
        "tokens_per_s": [line["tokens_per_s"] for line in timed],
        "losses": [line["loss"] for line in meter.lines],
        "grad_norms": [line["grad_norm"] for line in meter.lines],
        "mfu": statistics.median(mfu) if mfu else None,
        "targets_per_s": statistics.median(
            line["tokens_per_s"] * line["target_tokens"] / max(1, line["tokens"]) for line in timed
        ),
        "fill": statistics.mean(fills[warmup:]),
        "data_wait": statistics.median(line["data_wait_s"] / line["step_s"] for line in timed),
        **memory,
        "micro_tokens": trainer.env.micro_rows * trainer.env.seq,
        "seen": training_facts(count, weights, states),
        "device": trainer.env.device.name,
        "changed": trainer.describe(),
        "environment": versions(),
    }
    if not warmup:  # these were first steps, which compile
        return result
    if trainer.world.rank == 0:
        keep({**result, "parts_note": ENDED})
    return {**result, **_profile(trainer, marks, plan, statistics.median(seconds))}


def _most(figures: dict[str, Any]) -> dict[str, Any]:
    """Return the maximum of each number over all ranks."""
    told = [json.loads(text) for text in distributed.gather(json.dumps(figures))]
    return {k: max(other[k] for other in told) if isinstance(v, int | float) else v for k, v in figures.items()}


def versions() -> dict[str, str]:
    """Return the versions of torch and CUDA, and torch's number of threads, for a result."""
    cuda = {"cuda": torch.version.cuda} if torch.version.cuda else {}
    return {"torch": torch.__version__, "threads": str(torch.get_num_threads()), **cuda}


# --- the training loop of a run, without its files


class MetricLines(Meter):
    """A meter that stores its lines instead of writing them."""

    def __init__(self, trainer: Trainer, steps: int) -> None:
        super().__init__(trainer, None, steps, lambda _: None)
        self.lines: list[dict[str, Any]] = []

    def write(self, line: dict[str, Any]) -> None:
        self.lines.append(line)


def loop(trainer: Trainer, plan: RunPlan) -> MetricLines:
    """Train on `trainer.batches` like a run; return the lines of its metrics."""
    meter = MetricLines(trainer, plan.total)
    trainer.set_step = partial(set_step, trainer, steps=plan.total)
    train(trainer, meter, plan, lambda _: None)
    if meter.failure is not None:
        raise meter.failure
    return meter


def _count_fill(steps: Iterator[list[Batch]], fills: list[float]) -> Iterator[list[Batch]]:
    """Yield the steps unchanged, and append the fraction of filled slots of each."""
    for step in steps:
        fills.append(sum(b.n_tokens for b in step) / sum(b.tokens.numel() for b in step))
        yield step


def _profile(trainer: Trainer, marks: RegionMarks, plan: RunPlan, step_s: float) -> dict[str, Any]:
    """Return the seconds of a step by part, or why they are missing; call it after all other measurements."""
    steps = max(1, min(PROFILED, plan.total - 1, int(PROFILED_S / float(distributed.from_first(str(step_s))))))
    short = RunPlan(trainer, plan.length._replace(steps=1 + steps))
    try:
        trainer.batches = batches(trainer, short)
        with close_workers_after(trainer.batches), marks.watching() as spans:
            loop(trainer, short)
        within, seen = steady(spans)
        if seen != steps:
            return {"parts_note": f"the profiler saw {seen} whole steps of {steps}"}
        return {"parts_s": {part: total / steps for part, total in part_seconds(within).items()}}
    except Exception as error:  # the rung's figures do not depend on it
        return {"parts_note": describe_error(error)}


class InitialState:
    """A trainer's state before the proof, on the host; timing starts from it."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.weights = [t.local.to("cpu", copy=True) for t in trainer.trained]
        self.techniques = {name: state.save() for name, state in trainer.state.items()}
        states = [s for by_name in trainer.optimizer.state().values() for s in by_name.values()]
        assert not any(bool(s.any()) for s in states), "an optimizer's states begin at zero"

    @torch.no_grad()
    def restore(self) -> None:
        """Restore weights and the state of techniques, and set the optimizer's states to zero."""
        for t, saved in zip(self.trainer.trained, self.weights, strict=True):
            t.local.copy_(saved)
        for states in self.trainer.optimizer.state().values():
            for state in states.values():
                state.zero_()
        for name, saved_state in self.techniques.items():
            self.trainer.state[name].load(saved_state)


# --- the proof


def first_documents(trainer: Trainer, resolved: Decided, baseline: Config, count: int) -> list[tuple[int, Document]]:
    """Return the baseline's first documents by sample index; read them again only if the rung's differ."""
    config, source = trainer.config, trainer.stream.source
    same = ("data", "objective", "batch", "seed")
    if not trainer.layout.uncut or any(getattr(config, name) != getattr(baseline, name) for name in same):
        weight = trainer.model.embedding.weight
        assert isinstance(weight, Tensor)
        source = read_sources(baseline, open_tokens(baseline, resolved.folder), weight.shape[0]).train
    order = sampler.epoch_order(source.spans, baseline.seed, 0)[:count].tolist()
    return [(n, document) for n, sample in source.read(order).samples for document in sample]


def proof_window(
    trainer: Trainer, documents: Sequence[tuple[int, Document]], most: int
) -> tuple[list[Batch], str | None]:
    """Return the proof's micro-batches; or none, and why these documents cannot prove the rung."""
    if any(t.local.is_meta for t in trainer.trained):
        return [], "no proof: an engine keeps the weights and cannot restore them for timing"
    longest = int(DocumentList(documents, trainer.stream.source.parts).lengths().max())
    if longest > trainer.env.seq:
        return [], f"no proof: the baseline's documents have up to {longest} tokens, a row here has {trainer.env.seq}"
    if trainer.stream.stored is not None:
        return [], "no proof: the stored teacher tokens belong to the run's own rows"
    settings = trainer.model.config.to_dict() if isinstance(trainer.model, HFModel) else {}  # ours has no dropout
    drops = [k for k, v in settings.items() if "drop" in k and isinstance(v, float) and v > 0]
    if drops:
        reason = f"the model drops values at random ({', '.join(drops)}), so two layouts differ randomly"
        return [], f"no proof: {reason}"
    window = lay_out(trainer, documents, most)
    if len(window) > 1 and Part.UPDATE in trainer.env.claimed:
        many = f"the baseline's documents take {len(window)} micro-batches"
        return [], f"no proof: {many}, and this rung updates after each"
    return window, None


def lay_out(trainer: Trainer, documents: Sequence[tuple[int, Document]], most: int) -> list[Batch]:
    """Return the documents in whole micro-batches of the rung's own layout, padded with empty rows.

    Args:
        most: documents that fit in a row of the rung, so that compiled code gets the same shapes.
    """
    rows, ranks = trainer.env.micro_rows, trainer.world.data_ranks
    source = DocumentList(documents, trainer.stream.source.parts)
    stream = sampler.Stream(source, trainer.layout, T=trainer.env.seq, rows=rows * ranks, seed=0, shuffle=False)
    stream.reader = trainer.stream.reader
    if trainer.stream.reference is not None:
        stream.reference = dpo_reference.compute_reference(trainer, source, "pairs of the proof")
    plan = stream.plan(epochs=1)
    plan = plan._replace(widest=max(most, plan.widest))
    multiple = trainer.env.accumulation if Part.PP in trainer.env.claimed else 1  # stages take turns with whole windows
    share = {"rank": trainer.world.data_rank, "ranks": ranks, "micro_rows": rows}
    steps = -(-plan.steps // multiple) * multiple  # rows beyond the end are empty
    return [b for k in range(steps) for b in stream.batches(k, plan, **share)]


@dataclass(frozen=True)
class DocumentList:
    """A source of documents in memory; the two of a pair are consecutive."""

    numbered: Sequence[tuple[int, Document]]
    parts: int = 1
    fingerprint: str = ""
    tokenized: bool = True

    @property
    def spans(self) -> tuple[tuple[int, float], ...]:
        return ((len(self), 1.0),)

    def __len__(self) -> int:
        return len(self.numbered) // self.parts

    def lengths(self) -> np.ndarray:
        return np.array([sum(map(len, self.documents(i))) for i in range(len(self))])

    def targets(self) -> np.ndarray:
        return np.array([sum(int(d.targets.sum()) for d in self.documents(i)) for i in range(len(self))])

    def documents(self, i: int) -> tuple[Document, ...]:
        return tuple(document for _, document in self.numbered[i * self.parts : (i + 1) * self.parts])

    def read(self, numbers: Sequence[int]) -> SampleChunk:
        return SampleChunk([(n, self.documents(n)) for n in numbers], len(numbers))


def proof_losses(trainer: Trainer, window: list[Batch], steps: int) -> dict[str, Any]:
    """Return losses and gradient norms of steps on one window at a constant rate, and the first gradient's sketch.

    A skipped update changes only the loss scale: its step is repeated.
    """
    gradient: dict[str, str] | None = None
    losses: list[float | None] = []
    norms: list[float | None] = []
    terms = trainer.all_reduce_terms(sum(b.n_terms for b in window))
    for n in range(1, steps + 1):
        for _ in range(trainer.max_skipped_updates):
            set_step(trainer, n, steps)
            trainer.lr.fill_(trainer.config.optim.lr)
            loss = trainer.forward_backward(window, terms)
            if n == 1:
                gradient = sketch(trainer)
            norm, skipped = trainer.optimizer_step()
            if not skipped.item():
                break
        for value, values in ((loss.item(), losses), (norm.item(), norms)):
            values.append(value if math.isfinite(value) else None)
    return {"losses": losses, "grad_norms": norms, "gradient": gradient}


@torch.no_grad()
def sketch(trainer: Trainer) -> dict[str, str]:
    """Return SKETCH_WIDTH sums in place of a gradient's billions of values, for results.cosine to estimate angles.

    A value's index, shifted by a number for its tensor, modulo the width selects its sum; it is added with a random
    sign. Such sums preserve inner products on average; the squared distance of two gradients is estimated within about
    2 %, the root of 2 / SKETCH_WIDTH, or about 6 % if a few values dominate it. Source: Alon, Matias and Szegedy,
    https://doi.org/10.1006/jcss.1997.1545.

    Names and layout are those of an export, so that a fused parameter compares with its separate tensors. Signs depend
    on the device and on torch: sketches compare within one ladder. After an update in the backward pass there is no
    gradient left.

    Returns:
        {"of": a digest of the tensors' names, the device and torch, "sums": (SKETCH_WIDTH,) float32, in base64}.
    """
    sums = torch.zeros(SKETCH_WIDTH, dtype=torch.float64, device=trainer.world.device)
    names = [trainer.env.device.name, torch.__version__]
    for t in trainer.trained:
        for name, values in exported_gradients(trainer, t):
            names.append(name)
            seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")
            generator = torch.Generator(values.device).manual_seed(seed)
            for piece in torch.split(values.flatten(), SKETCH_PIECE):
                heads = torch.randint(0, 2, piece.shape, generator=generator, device=piece.device, dtype=torch.int8)
                signed = torch.where(heads.bool(), piece, -piece).float()
                padded = F.pad(signed, (0, -len(piece) % SKETCH_WIDTH)).view(-1, SKETCH_WIDTH)
                sums += padded.sum(0).roll(seed % SKETCH_WIDTH)
    digest = hashlib.blake2b("\n".join(sorted(names)).encode(), digest_size=8).hexdigest()
    return {"of": digest, "sums": base64.b64encode(sums.float().cpu().numpy().tobytes()).decode()}


def exported_gradients(trainer: Trainer, t: TrainedParam) -> Iterator[tuple[str, Tensor]]:
    """Yield the gradient of a parameter under its exported names; unchanged without such names."""
    grad = t.whole_grad
    if grad is not None and t.name in trainer.weight_map.entries:
        yield from trainer.weight_map.split(t.name, grad)
    elif grad is not None:
        yield t.name, grad


# --- the parts of a step
#
# The loop's own steps run under torch's profiler, after every other measurement. Head and update are recognized by
# place: marks in the device's queue show their beginning and end. Everything else is recognized by the name of the
# kernel, or on a CPU of the operator. A matmul with an epilogue (an activation, a sum) counts as a product; so do the
# matmuls of attention that stores all scores, because their names are the same: then attention has no time.

# An operator on one number puts a mark into the queue, and into a CUDA graph during its capture; training uses none of
# these operators, so the name is enough. (region, 1 at its beginning, -1 at its end); and the end of a step.
MARKS = {"asinh": ("head", 1), "acosh": ("head", -1), "atanh": ("optimizer", 1), "acos": ("optimizer", -1)}
STEP = "asin"
MARK = re.compile(rf"\b({'|'.join((*MARKS, STEP))})_")
FUSED = re.compile(r"^triton_(poi|red|per|for)_")  # the compiler's kernels, named after their fused operators
ATTENTION = re.compile(r"attention|attn|flash|fmha|sdpa", re.IGNORECASE)
PRODUCT = re.compile(
    r"gemm|nvjet|xmma|cublas|split_?k|triton_(tem|mm)|(::|_)(add|b|baddb|scaled_|int_)?mm\b|::(matmul|linear)",
    re.IGNORECASE,
)
COPY = re.compile(r"^Mem(cpy|set)")


class ProfiledSpan(NamedTuple):
    """The execution of a kernel or an operator, in microseconds."""

    start: float
    end: float
    name: str


class RegionMarks:
    """Wraps the trainer's head and update permanently; they put marks while profiled or captured into a CUDA graph."""

    def __init__(self, trainer: Trainer) -> None:
        self.watched = False
        self.cuda = trainer.world.device.type == "cuda"
        self.place = torch.zeros(1, device=trainer.world.device)
        trainer.model.head.register_forward_pre_hook(lambda *_: self.put("asinh"))
        trainer.model.head.register_forward_hook(self._backward)
        trainer.optimizer_step = self._around(trainer.optimizer_step, ends=STEP)
        trainer.optimizer.step = self._around(trainer.optimizer.step)  # type: ignore[method-assign]

    def put(self, name: str) -> None:
        """Put an operator's mark into the device's queue."""
        if self.watched or (self.cuda and torch.cuda.is_current_stream_capturing()):
            with torch.no_grad():
                getattr(self.place, f"{name}_")()

    def _around(self, function: Callable[..., Any], ends: str = "") -> Callable[..., Any]:
        def marked(*args: Any, **kwargs: Any) -> Any:
            self.put("atanh")
            result = function(*args, **kwargs)
            self.put("acos")
            if ends:
                self.put(ends)
            return result

        return marked

    def _backward(self, head: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        self.put("acosh")
        hidden: Tensor = args[0]
        if out.requires_grad and hidden.requires_grad:
            out.register_hook(lambda _: self.put("asinh"))  # type: ignore[no-untyped-call]
            hidden.register_hook(lambda _: self.put("acosh"))  # type: ignore[no-untyped-call]

    @contextmanager
    def watching(self) -> Iterator[list[ProfiledSpan]]:
        """Profile the body; the list is filled at its end."""
        kinds = torch.profiler.ProfilerActivity
        spans: list[ProfiledSpan] = []
        self.watched = True
        try:
            with torch.profiler.profile(activities=[kinds.CUDA if self.cuda else kinds.CPU]) as profile:
                yield spans
                if self.cuda:
                    torch.cuda.synchronize()
        finally:
            self.watched = False
        kind = "CUDA" if self.cuda else "CPU"
        events = (e for e in profile.events() or [] if str(e.device_type).endswith(kind))
        spans += sorted((ProfiledSpan(e.time_range.start, e.time_range.end, e.name) for e in events), key=_outer_first)


def steady(spans: Sequence[ProfiledSpan]) -> tuple[Sequence[ProfiledSpan], int]:
    """Return the kernels between the ends of the first and the last step, and the number of steps.

    The first step is left out because the profiler starts in it: it has gaps of 15 to 27 ms at any step length,
    probably the profiler's (docs/log: one H200).
    """
    ends = [s.end for s in spans if (mark := MARK.search(s.name)) and mark[1] == STEP]
    if not ends:
        return [], 0
    within = (s for s in spans if s.end >= ends[0] and s.start <= ends[-1])
    clipped = (s._replace(start=max(s.start, ends[0]), end=min(s.end, ends[-1])) for s in within)
    return sorted(clipped, key=_outer_first), len(ends) - 1


def _outer_first(span: ProfiledSpan) -> tuple[float, float]:
    return span.start, -span.end


def part_seconds(spans: Sequence[ProfiledSpan]) -> dict[str, float]:
    """Return the seconds of each part, and of the gaps between the first and the last span.

    A moment belongs to the running span that began last: on a CPU the innermost operator, on a GPU the later of two
    streams. A copy counts only while nothing computes.
    """
    waiting = list(_parts(spans))
    points = sorted({t for s in spans for t in (s.start, s.end)})
    running: list[tuple[bool, float, int, float, str]] = []
    totals, next_ = dict.fromkeys((*PARTS, GAPS), 0.0), 0
    for now, then in pairwise(points):
        while next_ < len(waiting) and waiting[next_][0] <= now:
            start, end, part, copies = waiting[next_]
            heapq.heappush(running, (copies, -start, -next_, end, part))
            next_ += 1
        while running and running[0][3] <= now:
            heapq.heappop(running)
        totals[running[0][4] if running else GAPS] += (then - now) / 1e6
    return totals


def _parts(spans: Iterable[ProfiledSpan]) -> Iterator[tuple[float, float, str, bool]]:
    """Yield (start, end, part, whether it only copies) in order of start, without the marks."""
    depth = {"optimizer": 0, "head": 0}  # the first wins: an update can run inside the head's backward pass
    for start, end, name in spans:
        if mark := MARK.search(name):
            if mark[1] != STEP:
                region, change = MARKS[mark[1]]
                depth[region] += change
            continue
        inside = next((region for region, n in depth.items() if n > 0), None)
        yield start, end, inside or part_of(name), COPY.match(name) is not None


def part_of(name: str) -> str:
    """Return the part of a kernel or operator outside head and update."""
    if FUSED.match(name):
        return "elementwise"
    if ATTENTION.search(name):
        return "attention"
    return "products" if PRODUCT.search(name) else "elementwise"


if __name__ == "__main__":
    answer_bench_request()
