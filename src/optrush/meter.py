"""The only definition of tokens, target tokens, tokens/s, MFU, peak bytes and step seconds; writes metrics.jsonl.

The device is read only when a step logs. Whether an update was skipped is read sooner, but never waited for: a copy to
pinned memory is looked at once it has arrived, and all ranks agree on stopping through the host (`job.total`).

tokens, target_tokens: of the logged step, all ranks, padding excluded.
step_s, data_wait_s: mean over the steps since the last line. tokens_per_s, mfu: real tokens since the last line, over
    that time. MFU = ModelShape.flops (6 x matrix parameters + causal attention by document) / datasheet bf16 peak.
peak_bytes: rank 0's most, so far: allocated by torch on CUDA, resident set of the process on CPU.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optrush.data.batch import Batch
from optrush.errors import RunError
from optrush.job import Job


class Meter:
    """One a run. `say` shows a line to people; only rank 0 writes."""

    def __init__(
        self,
        job: Job,
        path: Path | None,
        total_steps: int,
        say: Callable[[dict[str, Any]], None],
        skips: tuple[int, int] = (0, 0),
    ) -> None:
        """`skips`: updates skipped before, and in a row up to now, when a run goes on."""
        self.job, self.path, self.total_steps, self.say = job, path, total_steps, say
        self.device = job.world.device
        self.skipped = torch.tensor(skips[0], device=self.device)
        self.bad: list[tuple[int, tuple[int, ...]]] = [(0, ())] * skips[1]  # in a row: step, this rank's samples
        self.watched: deque[tuple[int, tuple[int, ...], Tensor, torch.cuda.Event | None]] = deque()
        self.failure: RunError | None = None
        self.evals: list[float] = []
        self.last = 0  # the last step that was counted
        self.unwritten = ""
        self._begin()

    def _begin(self) -> None:
        self.steps, self.tokens, self.attended = 0, 0, 0
        self.wait_s, self.since = 0.0, time.perf_counter()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what waits for data."""
        start = time.perf_counter()
        yield
        self.wait_s += time.perf_counter() - start

    def tick(self, step: int, batches: list[Batch], loss: Tensor, norm: Tensor, skipped: Tensor) -> None:
        """After update `step`: counts, watches for failing updates, and writes a line when the step logs."""
        self.steps, self.last = self.steps + 1, step
        self.tokens += sum(b.n_tokens for b in batches)
        self.attended += sum(b.attended for b in batches)
        self.skipped += skipped
        self._watch(step, batches, skipped)
        if step % self.job.run.train.log_every == 0 or step == self.total_steps:
            self._line(step, batches, loss, norm)

    def _line(self, step: int, batches: list[Batch], loss: Tensor, norm: Tensor) -> None:
        self._look(wait=True)
        value = loss.item()  # waits for the device: from here the clock is honest
        seconds = time.perf_counter() - self.since
        total = self.job.total
        tokens = total(self.tokens)
        flop_s = self.job.model.flops(tokens, total(self.attended)) / seconds / self.job.world.ranks
        peak = self.job.setup.device.peak_flop_s
        line: dict[str, Any] = {
            "step": step,
            "loss": _finite(value),
            "lr": self.job.lr.item(),
            "grad_norm": _finite(norm.item()),
            "tokens": total(sum(b.n_tokens for b in batches)),
            "target_tokens": total(sum(b.n_targets for b in batches)),
            "step_s": seconds / self.steps,
            "tokens_per_s": tokens / seconds,
            "mfu": None if peak is None else flop_s / peak,
            **self.memory(),
            "data_wait_s": self.wait_s / self.steps,
            "skipped": int(self.skipped.item()),
        }
        self.write(line)
        self._begin()

    def evaluated(self, step: int, loss: float, targets: int) -> None:
        """A line for an evaluation; its time is no step's."""
        self.evals.append(loss)
        self.write({"step": step, "eval_loss": _finite(loss), "eval_target_tokens": targets})

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Around what is not training (evaluation, saving): its time counts for no step."""
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.since += time.perf_counter() - start

    def skips(self) -> tuple[int, int]:
        """Updates skipped so far, and in a row up to now; waits for the device."""
        self._look(wait=True)
        return int(self.skipped.item()), len(self.bad)

    def memory(self) -> dict[str, Any]:
        if self.device.type == "cuda":
            return {"peak_bytes": torch.cuda.max_memory_allocated(), "memory_kind": "cuda_allocated"}
        # Not getrusage: its peak begins at the parent's, which may be a larger process.
        peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
        assert peak is not None, "Linux counts every process's peak"
        return {"peak_bytes": int(peak[1]) * 1024, "memory_kind": "rss"}

    def write(self, line: dict[str, Any]) -> None:
        """Appends a line; while the disk is full, lines wait here for the next one, and training goes on."""
        if self.path is None:
            return
        self.unwritten += json.dumps(line, allow_nan=False) + "\n"
        with self.path.open("ab", buffering=0) as file:
            whole = file.tell()
            try:
                if file.write(self.unwritten.encode()) == len(self.unwritten.encode()):
                    self.unwritten = ""
                else:
                    file.truncate(whole)
            except OSError as error:
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
        self._look(wait=False)

    def _look(self, *, wait: bool) -> None:
        """Counts skipped updates in a row, of the steps whose flag has arrived."""
        while self.watched:
            step, samples, flag, event = self.watched[0]
            if event is not None and not event.query():  # type: ignore[no-untyped-call]
                if not wait:
                    return
                event.synchronize()
            self.watched.popleft()
            self.bad = [*self.bad, (step, samples)] if flag.item() else []
            if len(self.bad) >= self.job.patience and self.failure is None:
                steps = ", ".join(str(s) for s, _ in self.bad[-3:])
                named = "; ".join(f"step {s}: {_few(x)}" for s, x in self.bad[-3:])
                self.failure = RunError(
                    f"{len(self.bad)} updates in a row were not finite and were skipped, the last at steps {steps}; "
                    f"the weights are as before them. Samples of rank {self.job.world.rank}: {named}"
                )
                self.job.stopping = 2


def _few(samples: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, samples[:8]))
    return shown + (f" and {len(samples) - 8} more" if len(samples) > 8 else "")


def _finite(value: float) -> float | None:
    """JSON has no NaN; null says that the figure was not finite."""
    return value if math.isfinite(value) else None
