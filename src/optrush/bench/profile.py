"""Split the time of a step into parts: the loop's own steps under torch's profiler, after every other measurement.

Head and update are recognized by place: marks in the device's queue show where they begin and end. Everything else is
recognized by the name of the kernel, on a CPU of the operator. A product with an epilogue (an activation, a sum) counts
as a product; so do the products of attention that stores all scores, because their names are the same: then no
time is attention's.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from optrush.planner.cost import PARTS
from optrush.report.bench import GAPS
from optrush.trainer.trainer import Trainer

# An operator on one number puts a mark into the queue, and into a CUDA graph during its capture; training uses none of
# these operators, so the name is enough. (region, 1 where it begins, -1 where it ends); and the end of a step.
MARKS = {"asinh": ("head", 1), "acosh": ("head", -1), "atanh": ("optimizer", 1), "acos": ("optimizer", -1)}
STEP = "asin"
MARK = re.compile(rf"\b({'|'.join((*MARKS, STEP))})_")
FUSED = re.compile(r"^triton_(poi|red|per|for)_")  # the compiler's, named after the operators that they fuse
ATTENTION = re.compile(r"attention|attn|flash|fmha|sdpa", re.IGNORECASE)
PRODUCT = re.compile(
    r"gemm|nvjet|xmma|cublas|split_?k|triton_(tem|mm)|(::|_)(add|b|baddb|scaled_|int_)?mm\b|::(matmul|linear)",
    re.IGNORECASE,
)
COPY = re.compile(r"^Mem(cpy|set)")


class ProfiledSpan(NamedTuple):
    """The run of a kernel or an operator, in microseconds."""

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
        """Put the mark of that operator into the device's queue."""
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
    """Return what ran between the end of the first step and that of the last, and the number of steps between.

    The first step is left out because the profiler starts in it: it has gaps of 15 to 27 ms, at any length of a step,
    which are likely the profiler's (docs/log: one H200).
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
    """Return seconds by part, and of the gaps between the first span and the last.

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
    """Yield (start, end, part, whether it only copies) in the order of their start, without the marks."""
    depth = {"optimizer": 0, "head": 0}  # the first wins: an update may run inside the head's backward pass
    for start, end, name in spans:
        if mark := MARK.search(name):
            if mark[1] != STEP:
                region, change = MARKS[mark[1]]
                depth[region] += change
            continue
        inside = next((region for region, n in depth.items() if n > 0), None)
        yield start, end, inside or part_of(name), COPY.match(name) is not None


def part_of(name: str) -> str:
    """Return the part to which a kernel or operator outside head and update belongs."""
    if FUSED.match(name):
        return "elementwise"
    if ATTENTION.search(name):
        return "attention"
    return "products" if PRODUCT.search(name) else "elementwise"
