"""One rung, once, in a process of its own: `python -m optrush.bench.worker REQUEST.json RESULT.json`.

prepare -> assemble -> keep the initial state on the host -> the proof: a few training steps on documents that are the
same in every rung -> restore the initial state -> warm up and time, through the real training loop -> RESULT.json ->
a few more steps under the profiler -> RESULT.json again, with their parts.
Nothing is written to the run's output. A failure is a result too; a process that is killed before leaves none.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from optrush.bench import profile
from optrush.bench.peer import facts
from optrush.bench.record import put
from optrush.config import Config, parse_config
from optrush.data import sampler
from optrush.data.batch import Batch
from optrush.data.chat_template import open_tokens
from optrush.data.dataset import Streamed
from optrush.data.sampler import reading
from optrush.data.schema import Document
from optrush.data.sources import read_sources
from optrush.errors import RunError, UserError
from optrush.launch import die_with_parent
from optrush.models.hf import HFModel
from optrush.resolve import ResolvedConfig, resolve
from optrush.technique import Part
from optrush.trainer import dpo_reference
from optrush.trainer.build import build
from optrush.trainer.metrics import Meter, resident
from optrush.trainer.run import batches
from optrush.trainer.trainer import Plan, TrainedParam, Trainer, exhausted, set_step, train

# --- Some thousand numbers in place of a gradient of billions, which tell the angle between two gradients.
#
# Each value, with a sign drawn at random, is added to those whose place, shifted by a number of its tensor's own, has
# the same remainder by WIDTH. Such sums keep inner products on average; the square of the distance between two
# gradients is told within some 2 %, the root of 2 / WIDTH, or some 6 where a few values make most of it. Source: Alon,
# Matias and Szegedy, https://doi.org/10.1006/jcss.1997.1545.
#
# Names and layout are those of an export, so that a fused parameter compares with the tensors that it is made of. Signs
# depend on the device and on torch: sketches compare within one climb.


WIDTH = 4093  # a prime: the values of one column of a matrix fall into many sums
PIECE = 1024 * WIDTH  # values at a time


@torch.no_grad()
def sketch(trainer: Trainer) -> dict[str, str]:
    """Of the gradients that lie there; an update in the backward pass has left none.

    Returns:
        {"of": a digest of the tensors' names, the device and torch, "sums": (WIDTH,) float32, in base64}; stats.cosine
        reads it.
    """
    sums = torch.zeros(WIDTH, dtype=torch.float64, device=trainer.world.device)
    names = [trainer.env.device.name, torch.__version__]
    for t in trainer.trained:
        for name, values in tensors(trainer, t):
            names.append(name)
            seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")
            generator = torch.Generator(values.device).manual_seed(seed)
            for piece in torch.split(values.flatten(), PIECE):
                heads = torch.randint(0, 2, piece.shape, generator=generator, device=piece.device, dtype=torch.int8)
                signed = torch.where(heads.bool(), piece, -piece).float()
                sums += F.pad(signed, (0, -len(piece) % WIDTH)).view(-1, WIDTH).sum(0).roll(seed % WIDTH)
    digest = hashlib.blake2b("\n".join(sorted(names)).encode(), digest_size=8).hexdigest()
    return {"of": digest, "sums": base64.b64encode(sums.float().cpu().numpy().tobytes()).decode()}


def tensors(trainer: Trainer, t: TrainedParam) -> Iterator[tuple[str, Tensor]]:
    """The gradient of a parameter as an export would write it; of one that no export has, as it is."""
    if t.grad is not None and t.name in trainer.weight_map.entries:
        yield from trainer.weight_map.split(t.name, t.grad)
    elif t.grad is not None:
        yield t.name, t.grad


UNASKED = "no proof: none was asked for at this length"
ENDED = "the process ended under the profiler"
Keep = Callable[[dict[str, Any]], None]
PROFILED, PROFILED_S = 3, 1.0  # steps at most, and seconds of steps: of which the parts are told, after another one


class Start:
    """The state a job begins with, on the host: what the proof changes, timing must not begin with."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.weights = [t.local.to("cpu", copy=True) for t in trainer.trained]
        self.techniques = {name: state.save() for name, state in trainer.state.items()}
        states = [s for by_name in trainer.optimizer.state().values() for s in by_name.values()]
        assert not any(bool(s.any()) for s in states), "an optimizer's states begin at zero"

    @torch.no_grad()
    def restore(self) -> None:
        """Weights as they were, the optimizer's states zero, as at assembly, and what techniques keep."""
        for t, saved in zip(self.trainer.trained, self.weights, strict=True):
            t.local.copy_(saved)
        for states in self.trainer.optimizer.state().values():
            for state in states.values():
                state.zero_()
        for name, kept in self.techniques.items():
            self.trainer.state[name].load(kept)


class Lines(Meter):
    """The meter, its lines kept instead of written."""

    lines: list[dict[str, Any]]

    def write(self, line: dict[str, Any]) -> None:
        self.lines.append(line)


def measure(
    config: Config,
    baseline: Config,
    warmup: int,
    proof_steps: int,
    proof_documents: int,
    keep: Keep = lambda found: None,
) -> dict[str, Any]:
    """Everything one process finds out about one rung.

    Args:
        run: the rung; its `train.steps` are the warm-up and the timed steps.
        baseline: the rung whose documents the proof takes.
        proof_steps: 0: no proof is asked for.
        keep: told of all figures before a profiler is let near them.
    """
    prepared = resolve(config)
    trainer = build(prepared)
    marks = profile.Marks(trainer)
    dpo_reference.fill_reference(trainer, prepared)
    plan = Plan(trainer, trainer.stream.plan(None, config.train.steps))
    documents: list[tuple[int, Document]] = []
    proof: dict[str, Any] = {"losses": [], "grad_norms": [], "note": UNASKED}
    if proof_steps:
        documents = first_documents(trainer, prepared, baseline, proof_documents)
        proof["note"] = obstacle(trainer, documents)
    start = Start(trainer) if proof["note"] is None else None
    fills: list[float] = []
    trainer.batches = filled(batches(trainer, plan), fills)
    with reading(trainer.batches):
        if start is not None:
            laid = lay(trainer, documents, most=plan.length.widest)
            if len(laid) > 1 and Part.UPDATE in trainer.env.claimed:
                many = f"the baseline's documents take {len(laid)} micro-batches"
                proof["note"] = f"no proof: {many}, and this rung updates in each"
                start = None
            else:
                proof |= prove(trainer, laid, proof_steps)
                start.restore()
        if trainer.world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()  # the proof may have had more micro-batches than a step of the rung
        meter = loop(trainer, plan)
    timed = [line for line in meter.lines if line["step"] > warmup]
    memory = {**meter.memory(), "host_peak_bytes": resident()}
    if start is not None:  # who behaves while he is watched is watched once more
        start.restore()
        proof["again"] = prove(trainer, laid, 1)
    seconds = [line["step_s"] for line in timed]
    shares = [line["mfu"] for line in timed if line["mfu"] is not None]
    found = {
        "proof": proof,
        "step_s": seconds,
        "tokens_per_s": [line["tokens_per_s"] for line in timed],
        "losses": [line["loss"] for line in meter.lines],
        "grad_norms": [line["grad_norm"] for line in meter.lines],
        "mfu": statistics.median(shares) if shares else None,
        "targets_per_s": statistics.median(
            line["tokens_per_s"] * line["target_tokens"] / max(1, line["tokens"]) for line in timed
        ),
        "fill": statistics.mean(fills[warmup:]),
        "data_wait": statistics.median(line["data_wait_s"] / line["step_s"] for line in timed),
        **memory,
        "micro_tokens": trainer.env.micro_rows * trainer.env.seq,
        "seen": seen(trainer),
        "device": trainer.env.device.name,
        "changed": trainer.describe(),
        "environment": {
            "torch": torch.__version__,
            "threads": str(torch.get_num_threads()),
            **({"cuda": torch.version.cuda} if torch.version.cuda else {}),
        },
    }
    if not warmup:  # then these were first steps, which compile
        return found
    keep({**found, "parts_note": ENDED})
    return {**found, **profiled(trainer, marks, plan, statistics.median(seconds))}


def loop(trainer: Trainer, plan: Plan) -> Lines:
    """Trains as a run does, on `job.batches`; the lines that it would have written."""
    meter = Lines(trainer, None, plan.total, lambda _: None)
    meter.lines = []
    trainer.set_step = partial(set_step, trainer, steps=plan.total)
    train(trainer, meter, plan, lambda _: None)
    if meter.failure is not None:
        raise meter.failure
    return meter


def profiled(trainer: Trainer, marks: profile.Marks, plan: Plan, step_s: float) -> dict[str, Any]:
    """Seconds of a step by part, under the profiler; or why there are none. All other figures have been taken."""
    steps = max(1, min(PROFILED, plan.total - 1, int(PROFILED_S / step_s)))
    short = Plan(trainer, plan.length._replace(steps=1 + steps))
    try:
        trainer.batches = batches(trainer, short)
        with reading(trainer.batches), marks.watching() as spans:
            loop(trainer, short)
        held, seen = profile.steady(spans)
        if seen != steps:
            return {"parts_note": f"the profiler saw {seen} whole steps of {steps}"}
        return {"parts_s": {part: whole / steps for part, whole in profile.seconds(held).items()}}
    except Exception as error:  # whatever it is, the rung's figures do not depend on it
        return {"parts_note": explain(error)}


def seen(trainer: Trainer) -> dict[str, str]:
    """What is trained and in which precision, in the words that another system's rung has."""
    states = (s for by_name in trainer.optimizer.state().values() for s in by_name.values())
    return facts(sum(t.parameter.numel() for t in trainer.trained), [t.local for t in trainer.trained], states)


def filled(steps: Iterator[list[Batch]], fills: list[float]) -> Iterator[list[Batch]]:
    """The same steps; notes of each which share of its slots holds a token."""
    for held in steps:
        fills.append(sum(b.n_tokens for b in held) / sum(b.tokens.numel() for b in held))
        yield held


# --- the proof


def first_documents(
    trainer: Trainer, prepared: ResolvedConfig, baseline: Config, count: int
) -> list[tuple[int, Document]]:
    """The first documents that the baseline trains on, by sample index: read again only where the rung reads others."""
    config, source = trainer.config, trainer.stream.source
    same = ("data", "objective", "batch", "seed")
    if not trainer.layout.uncut or any(getattr(config, name) != getattr(baseline, name) for name in same):
        weight = trainer.model.embedding.weight
        assert isinstance(weight, Tensor)
        source = read_sources(baseline, open_tokens(baseline, prepared.folder), weight.shape[0]).train
    order = sampler.epoch_order(source.spans, baseline.seed, 0)[:count].tolist()
    rows = source.read(order) if isinstance(source, Streamed) else [[source.documents(n)] for n in order]
    return [(n, document) for n, samples in zip(order, rows) for sample in samples for document in sample]


def obstacle(trainer: Trainer, documents: Sequence[tuple[int, Document]]) -> str | None:
    """Why these documents cannot prove anything of this rung, if so."""
    longest = int(Few(documents, trainer.stream.source.parts).lengths().max())
    if longest > trainer.env.seq:
        return f"no proof: the baseline's documents have up to {longest} tokens, a row here {trainer.env.seq}"
    settings = trainer.model.config.to_dict() if isinstance(trainer.model, HFModel) else {}  # our decoder drops nothing
    drops = [k for k, v in settings.items() if "drop" in k and isinstance(v, float) and v > 0]
    if drops:
        return f"no proof: the model drops values at random ({', '.join(drops)}), so that two layouts differ by chance"
    return None


def lay(trainer: Trainer, documents: Sequence[tuple[int, Document]], most: int) -> list[Batch]:
    """The documents in whole micro-batches of the rung, by its own layout; empty rows fill the last one up.

    Args:
        most: documents that a row of the rung has room for: with it, compiled code sees the same shapes.
    """
    rows = trainer.env.micro_rows
    source = Few(documents, trainer.stream.source.parts)
    laid = sampler.Stream(source, trainer.layout, T=trainer.env.seq, rows=rows, seed=0, shuffle=False)
    if trainer.stream.reference is not None:
        laid.reference = dpo_reference.passed(trainer, source, "pairs of the proof")
    plan = laid.plan(epochs=1)
    plan = plan._replace(widest=max(most, plan.widest))
    return [b for k in range(plan.steps) for b in laid.batches(k, plan, rank=0, ranks=1, micro_rows=rows)]


@dataclass(frozen=True)
class Few:
    """Documents at hand as a source; those of a pair lie beside each other."""

    held: Sequence[tuple[int, Document]]
    parts: int = 1
    fingerprint: str = ""

    @property
    def spans(self) -> tuple[tuple[int, float], ...]:
        return ((len(self), 1.0),)

    def __len__(self) -> int:
        return len(self.held) // self.parts

    def lengths(self) -> np.ndarray:
        return np.array([sum(map(len, self.documents(i))) for i in range(len(self))])

    def targets(self) -> np.ndarray:
        return np.array([sum(int(d.targets.sum()) for d in self.documents(i)) for i in range(len(self))])

    def documents(self, i: int) -> tuple[Document, ...]:
        return tuple(document for _, document in self.held[i * self.parts : (i + 1) * self.parts])


def prove(trainer: Trainer, batches: list[Batch], steps: int) -> dict[str, Any]:
    """Loss and gradient norm of training steps on one and the same window, at a constant rate, and the first gradient.

    A skipped update has changed the loss scale at most: the step is taken again.
    """
    gradient: dict[str, str] | None = None
    losses: list[float | None] = []
    norms: list[float | None] = []
    terms = trainer.all_reduce_int(sum(b.n_terms for b in batches))
    for n in range(1, steps + 1):
        for _ in range(trainer.max_skipped_updates):
            set_step(trainer, n, steps)
            trainer.lr.fill_(trainer.config.optim.lr)
            loss = trainer.forward_backward(batches, terms)
            if n == 1:
                gradient = sketch(trainer)
            norm, skipped = trainer.optimizer_step()
            if not skipped.item():
                break
        for value, kept in ((loss.item(), losses), (norm.item(), norms)):
            kept.append(value if math.isfinite(value) else None)
    return {"losses": losses, "grad_norms": norms, "gradient": gradient}


# --- the process


def main() -> None:
    """Answers one request; the exit code is 0 where the answer has figures."""
    request = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    die_with_parent(request["parent"])
    begun = time.monotonic()
    found: dict[str, Any]

    def keep(found: dict[str, Any]) -> None:
        put(Path(sys.argv[2]), json.dumps({**found, "seconds": time.monotonic() - begun}, allow_nan=False))

    try:
        config, baseline = (parse_config(request[key], key) for key in ("run", "baseline"))
        steps, documents = request["proof"]["steps"], request["proof"]["documents"]
        found = measure(config, baseline, request["warmup"], steps, documents, keep)
    except UserError as error:
        found = {"error": str(error), "refused": [error.asked, error.found, error.do]}
    except RunError as error:
        found = {"error": str(error)}
    except Exception as error:  # a rung may fail in any way, and the ladder goes on
        found = {"error": explain(error), "traceback": traceback.format_exc()}
    keep(found)
    sys.exit("error" in found)


def explain(error: Exception) -> str:
    """An unexpected error in a line, and where it came from."""
    text = next(iter(str(error).splitlines()), "")
    if exhausted(error):
        return f"out of memory: {text or type(error).__name__}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text} ({Path(last.filename).name}:{last.lineno})"


if __name__ == "__main__":
    main()
