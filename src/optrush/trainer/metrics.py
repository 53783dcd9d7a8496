"""Measure and write metrics.jsonl: the only definition of tokens, target tokens, tokens/s, MFU, peak bytes, seconds.

Training never waits for the device: a logged step's figures, and whether an update was skipped, are copied to pinned
memory and read on arrival, so a line may be written a step or two later. Evaluations, checkpoints and the last step
wait for them. Ranks agree on stopping through the host (`trainer.all_reduce_int`).

tokens, target_tokens: of the logged step, all ranks, without padding.
loss, and the objective's other metrics (`trainer.metrics`): means over the logged step's terms (target tokens, or
    pairs), all ranks.
step_s, data_wait_s: mean over the steps since the last line, from step end to step end on the
    device. tokens_per_s, mfu: real tokens since the last line, over that time.
    MFU = ModelShape.flops (6 x matrix parameters + causal attention by document) / datasheet bf16 peak.
start_s, steps_s, end_s: seconds of a finished run: from its command to step 0; of the steps with data waits; of saves,
evaluations and the model, until the report is drawn.
peak_bytes: rank 0's peak so far: allocated by torch on CUDA, resident set of the process on CPU.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from optrush import files
from optrush.data.batch import Batch
from optrush.errors import RunError

if TYPE_CHECKING:
    from optrush.trainer.trainer import Trainer


STEADY = (10, 60.0)  # steps and seconds after which shares of time are known
Beside = Literal["saving", "evaluation", "data"]
"""Time of a run outside its steps."""

Moment = float | torch.cuda.Event
"""An event after the work queued on a device so far; on a CPU the clock."""


class _Noted(NamedTuple):
    """A line with pending figures."""

    step: int
    steps: int  # since the previous line, like the tokens, FLOPs of a rank, and seconds
    tokens: int
    flop: float
    counts: dict[str, float]
    memory: dict[str, Any]
    wait_s: float
    aside_s: float
    begin: Moment
    end: Moment
    values: Tensor  # loss, rate, norm, skipped, and the means of the figures; on the host once `end` has passed


class Meter:
    """Counts and times the steps of one run; only rank 0 writes. `say` prints a line."""

    def __init__(
        self,
        trainer: Trainer,
        path: Path | None,
        total_steps: int,
        say: Callable[[dict[str, Any]], None],
        skips: tuple[int, int] = (0, 0),
    ) -> None:
        """`skips`: updates skipped before a resume, and consecutively until then."""
        self.trainer, self.path, self.total_steps, self.say = trainer, path, total_steps, say
        self.device = trainer.world.device
        self.skipped = torch.tensor(skips[0], device=self.device)
        self.bad: list[tuple[int, tuple[int, ...]]] = [(0, ())] * skips[1]  # consecutive: step, this rank's samples
        self.watched: deque[tuple[int, tuple[int, ...], Tensor, torch.cuda.Event | None]] = deque()
        self.noted: deque[_Noted] = deque()
        self.failure: RunError | None = None
        self.evals: list[float] = []
        self.judged: Callable[[int, float], None] = lambda step, loss: None  # on every rank
        self.explained: Callable[..., dict[str, str]] = lambda *_: {}  # text about long times outside the steps
        self.last = 0  # the last step that was counted
        self.all_tokens = 0  # up to the last line, of all ranks, padding excluded
        self.unwritten = ""
        self._begin(_now(self.device))
        self.begin_steps()

    def begin_steps(self, done: int = 0) -> None:
        """Start timing the steps after `done`, and separately saving, evaluation and data waits."""
        self.done, self.told, self.started = done, set[str](), time.monotonic()
        self.beside: dict[str, tuple[float, int]] = dict.fromkeys(get_args(Beside), (0.0, 0))  # seconds, times

    def _begin(self, now: Moment) -> None:
        self.steps, self.tokens, self.attended, self.left_out = 0, 0, 0, 0  # left_out: updates without a target
        self.wait_s, self.aside_s, self.since = 0.0, 0.0, now

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure the time spent waiting for data."""
        start = time.perf_counter()
        yield
        self.wait_s += self._add("data", time.perf_counter() - start)

    def tick(self, step: int, batches: list[Batch], loss: Tensor, norm: Tensor, skipped: Tensor) -> None:
        """Count update `step`, watch for failing updates, and queue a line when the step logs."""
        self.steps, self.last = self.steps + 1, step
        self.tokens += sum(b.n_tokens for b in batches)
        self.attended += sum(b.attended for b in batches)
        self.skipped += skipped
        self._watch(step, batches, skipped)
        if step % self.trainer.config.train.steps_a_line(self.total_steps) == 0 or step == self.total_steps:
            self._note(step, batches, loss, norm)
        self._drain(wait=step == self.total_steps)

    def _note(self, step: int, batches: list[Batch], loss: Tensor, norm: Tensor) -> None:
        """Queue a line: host values now, device values when their copy arrives."""
        total = self.trainer.all_reduce_int
        tokens, attended = total(self.tokens), total(self.attended)
        self.all_tokens += tokens
        sums = {"tokens": sum(b.n_tokens for b in batches), "target_tokens": sum(b.n_targets for b in batches)}
        counts: dict[str, float] = {name: total(n) for name, n in sums.items()}
        counts |= self.trainer.host_figures | ({"updates_left_out": self.left_out} if self.left_out else {})
        figures = self._figures(sum(b.n_terms for b in batches))
        values = torch.stack([t.double() for t in (loss, self.trainer.lr, norm, self.skipped, *figures)])
        if self.device.type == "cuda":
            values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
        now = _now(self.device)
        flop = self.trainer.model.flops(tokens, attended) / self.trainer.world.ranks
        waits = self.wait_s, self.aside_s
        self.noted.append(
            _Noted(step, self.steps, tokens, flop, counts, self.memory(), *waits, self.since, now, values)
        )
        self._begin(now)

    def _figures(self, terms: float) -> list[Tensor]:
        """Return the means of the objective's other metrics over the terms of all ranks; `terms`: this rank's.

        For names that end with `_max`: the maximum over all ranks.
        """
        if not self.trainer.metrics:
            return []
        sums = self.trainer.all_reduce(torch.stack(list(self.trainer.metrics.values())))
        means = sums / (self.trainer.all_reduce_terms(terms) or 1)
        figures = dict(zip(self.trainer.metrics, means.unbind(), strict=True))
        for name in (name for name in figures if name.endswith("_max")):
            figures[name] = self.trainer.all_reduce_max(self.trainer.metrics[name].clone())
        return list(figures.values())

    def _drain(self, *, wait: bool) -> None:
        self._read_flags(wait=wait)
        peak = self.trainer.env.device.peak_flop_s
        while self.noted and (wait or _passed(self.noted[0].end)):
            n = self.noted.popleft()
            seconds = _between(n.begin, n.end) - n.aside_s  # may wait for `end`
            loss, lr, norm, skipped, *means = n.values.tolist()
            figures = dict(zip(self.trainer.metrics, map(_finite, means), strict=True))
            self.write({
                "step": n.step, "loss": _finite(loss), "lr": lr, "grad_norm": _finite(norm), **n.counts, **figures,
                "step_s": seconds / n.steps, "tokens_per_s": n.tokens / seconds,
                "mfu": None if peak is None else n.flop / seconds / peak,
                **n.memory, "data_wait_s": n.wait_s / n.steps, "skipped": int(skipped),
            })  # fmt: skip

    def evaluated(self, step: int, loss: float, targets: int, figures: Mapping[str, float] = {}) -> None:
        """Write a line for an evaluation."""
        self._drain(wait=True)  # in their order
        self.evals.append(loss)
        means = {f"eval_{name}": _finite(value) for name, value in figures.items()}
        self.write({"step": step, "eval_loss": _finite(loss), "eval_target_tokens": targets, **means})
        self.judged(step, loss)

    @contextmanager
    def aside(self, what: Beside) -> Iterator[None]:
        """Exclude evaluation or saving from the time of the steps; a save within an evaluation counts as a save."""
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize()  # finish the preceding steps first
        start, others = time.perf_counter(), self.aside_s
        yield
        if cuda:
            torch.cuda.synchronize()
        self.aside_s += self._add(what, time.perf_counter() - start - (self.aside_s - others))

    def _add(self, what: Beside, seconds: float) -> float:
        total, times = self.beside[what]
        self.beside[what] = (total + seconds, times + 1)
        return seconds

    def note_beside(self, ended: bool = False) -> None:
        """Note once each item that takes a large share of the time outside the steps."""
        steps, seconds = self.last - self.done, time.monotonic() - self.started
        if not ended and (steps < STEADY[0] or seconds < STEADY[1]):
            return
        for what, text in self.explained(self.trainer.config, self.beside, steps, seconds).items():
            if what not in self.told:
                self.told.add(what)
                self.write({"step": self.last, "beside_steps": text})

    def end_steps(self) -> None:
        """Stop the clock of the steps, after the last evaluation and save."""
        self.ended = time.monotonic()
        self.note_beside(ended=True)

    def note_times(self, begun: float) -> None:
        """Note the seconds of start, steps and end of a run started at `begun`, split like the plan's."""
        if not self.last:  # the run was complete before
            return
        start, aside = self.started - begun, self.beside["saving"][0] + self.beside["evaluation"][0]
        steps = self.ended - self.started - aside
        seconds = {"start_s": start, "steps_s": steps, "end_s": time.monotonic() - begun - start - steps}
        resumed = {"resumed_at": self.done} if self.done else {}
        where = {"device": self.trainer.env.device.name, "ranks": self.trainer.world.ranks}
        seconds = {name: round(s, 3) for name, s in seconds.items()}
        self.write({"step": self.last, **seconds, **resumed, **where, "ended": time.strftime("%Y-%m-%d %H:%M")})

    def skips(self) -> tuple[int, int]:
        """Return the skipped updates, in total and in a row up to now; waits for the device."""
        self._drain(wait=True)
        return int(self.skipped.item()), len(self.bad)

    def memory(self) -> dict[str, Any]:
        peak = peak_memory(self.device)
        return {**peak, "peak_bytes": peak["peak_bytes"] + self.trainer.outside_bytes}

    def write(self, line: dict[str, Any]) -> None:
        """Append a line; while the disk is full, lines are queued and training continues."""
        if self.path is None:
            return
        waiting = bool(self.unwritten)
        self.unwritten += json.dumps(line, allow_nan=False) + "\n"
        with files.open_to_append(self.path) as file:
            try:
                files.append_whole(file, self.unwritten.encode())
                self.unwritten = ""
            except OSError as error:
                if not waiting:
                    self.say({"step": line["step"], "metrics_wait": str(error)})
        self.say(line)

    def _watch(self, step: int, batches: list[Batch], skipped: Tensor) -> None:
        event = None
        if self.device.type == "cuda":
            host = torch.empty((), dtype=torch.bool, pin_memory=True)
            host.copy_(skipped, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            skipped = host
        self.watched.append((step, tuple(s for b in batches for s in b.samples), skipped, event))
        self._read_flags(wait=False)

    def _read_flags(self, *, wait: bool) -> None:
        """Count consecutive skipped updates, for steps whose flag has arrived."""
        while self.watched:
            step, samples, flag, event = self.watched[0]
            if event is not None and not event.query():  # type: ignore[no-untyped-call]
                if not wait:
                    return
                event.synchronize()
            self.watched.popleft()
            self.bad = [*self.bad, (step, samples)] if flag.item() else []
            if len(self.bad) >= self.trainer.max_skipped_updates and self.failure is None:
                steps = ", ".join(str(s) for s, _ in self.bad[-3:])
                named = "; ".join(f"step {s}: {_first_samples(x)}" for s, x in self.bad[-3:])
                found = f"not finite, skipped at steps {steps}; samples of rank {self.trainer.world.rank}: {named}"
                do = "lower optim.lr, or look at the rows: optrush data show CONFIG (no weight was changed)"
                self.failure = RunError(f"{len(self.bad)} updates in a row", found, do)
                self.trainer.stop.told = 2


def _now(device: torch.device) -> Moment:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _passed(moment: Moment) -> bool:
    return isinstance(moment, float) or bool(moment.query())  # type: ignore[no-untyped-call]


def _between(begin: Moment, end: Moment) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        assert isinstance(begin, float) and isinstance(end, float)
        return end - begin
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def peak_memory(device: torch.device) -> dict[str, Any]:
    """Return the peak memory of this process, and which memory it is."""
    if device.type == "cuda":
        return {"peak_bytes": torch.cuda.max_memory_allocated(), "memory_kind": "cuda_allocated"}
    return {"peak_bytes": resident(), "memory_kind": "rss"}


def resident() -> int:
    """Return the peak resident bytes of this process on the host."""
    # Not getrusage: its peak starts at the parent's, perhaps a larger process.
    most = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert most is not None, "Linux counts every process's peak"
    return int(most[1]) * 1024


def _first_samples(samples: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, samples[:8]))
    return shown + (f" and {len(samples) - 8} more" if len(samples) > 8 else "")


def _finite(value: float) -> float | None:
    """Return None for a number that is not finite: JSON has no NaN."""
    return value if math.isfinite(value) else None
