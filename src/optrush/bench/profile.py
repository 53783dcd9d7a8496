"""Where the time of a step goes, by part: the loop's own steps under torch's profiler, after all else is measured.

What a moment belongs to is told by place for the head and the update: marks lie in the device's queue where they begin
and end. All else is told by the name of the kernel, on a CPU of the operator. A product that does more at its end (an
activation, a sum) is a product; products of attention that holds whole scores are called products too, for nothing
tells them apart: then no moment is attention's.
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

# An operator on one number puts a mark into the queue, and into a graph that is being recorded: one that no training
# uses, so that its name is enough. (region, whether it begins); and the end of a step.
MARKS = {"asinh": ("head", 1), "acosh": ("head", -1), "atanh": ("optimizer", 1), "acos": ("optimizer", -1)}
STEP = "asin"
MARK = re.compile(rf"\b({'|'.join((*MARKS, STEP))})_")
FUSED = re.compile(r"^triton_(poi|red|per|for)_")  # the compiler's, named after whatever operator they came from
ATTENTION = re.compile(r"attention|attn|flash|fmha|sdpa", re.IGNORECASE)
PRODUCT = re.compile(
    r"gemm|nvjet|xmma|cublas|split_?k|triton_(tem|mm)|(::|_)(add|b|baddb|scaled_|int_)?mm\b|::(matmul|linear)",
    re.IGNORECASE,
)
COPY = re.compile(r"^Mem(cpy|set)")


class Span(NamedTuple):
    """A kernel or an operator while it ran, in microseconds."""

    start: float
    end: float
    name: str


class Marks:
    """Wraps the job's head and update for good; they leave marks while they are watched or recorded."""

    def __init__(self, trainer: Trainer) -> None:
        self.watched = False
        self.cuda = trainer.world.device.type == "cuda"
        self.place = torch.zeros(1, device=trainer.world.device)
        trainer.model.head.register_forward_pre_hook(lambda *_: self.put("asinh"))
        trainer.model.head.register_forward_hook(self._backward)
        trainer.optimizer_step = self._around(trainer.optimizer_step, ends=STEP)
        trainer.optimizer.step = self._around(trainer.optimizer.step)  # type: ignore[method-assign]

    def put(self, name: str) -> None:
        if self.watched or (self.cuda and torch.cuda.is_current_stream_capturing()):
            with torch.no_grad():
                getattr(self.place, f"{name}_")()

    def _around(self, function: Callable[..., Any], ends: str = "") -> Callable[..., Any]:
        def marked(*args: Any, **kwargs: Any) -> Any:
            self.put("atanh")
            found = function(*args, **kwargs)
            self.put("acos")
            if ends:
                self.put(ends)
            return found

        return marked

    def _backward(self, head: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        self.put("acosh")
        hidden: Tensor = args[0]
        if out.requires_grad and hidden.requires_grad:
            out.register_hook(lambda _: self.put("asinh"))  # type: ignore[no-untyped-call]
            hidden.register_hook(lambda _: self.put("acosh"))  # type: ignore[no-untyped-call]

    @contextmanager
    def watching(self) -> Iterator[list[Span]]:
        """Profiles what is done inside; the list is filled at the end."""
        kinds = torch.profiler.ProfilerActivity
        spans: list[Span] = []
        self.watched = True
        try:
            with torch.profiler.profile(activities=[kinds.CUDA if self.cuda else kinds.CPU]) as profile:
                yield spans
                if self.cuda:
                    torch.cuda.synchronize()
        finally:
            self.watched = False
        kind = "CUDA" if self.cuda else "CPU"
        held = (e for e in profile.events() or [] if str(e.device_type).endswith(kind))
        found = (Span(e.time_range.start, e.time_range.end, e.name) for e in held)
        spans += sorted(found, key=lambda s: (s.start, -s.end))  # of two that begin at once the outer one first


def steady(spans: Sequence[Span]) -> tuple[Sequence[Span], int]:
    """What ran between the end of the first step and that of the last, and how many steps these are.

    The profiler begins in the first, which is left out: gaps of 15 to 27 ms beside steps of any length are likely its
    own (docs/log: one H200).
    """
    ends = [s.end for s in spans if (mark := MARK.search(s.name)) and mark[1] == STEP]
    if not ends:
        return [], 0
    within = (s for s in spans if s.end >= ends[0] and s.start <= ends[-1])
    clipped = (s._replace(start=max(s.start, ends[0]), end=min(s.end, ends[-1])) for s in within)
    return sorted(clipped, key=lambda s: (s.start, -s.end)), len(ends) - 1


def seconds(spans: Sequence[Span]) -> dict[str, float]:
    """Seconds by part, and of gaps between the first and the last.

    A moment belongs to that of the running spans which began last: on a CPU the innermost operator, on a GPU the later
    of two streams. Copies yield to what computes beside them.
    """
    waiting = list(_told(spans))
    points = sorted({t for s in spans for t in (s.start, s.end)})
    running: list[tuple[bool, float, int, float, str]] = []
    found, next_ = dict.fromkeys((*PARTS, GAPS), 0.0), 0
    for now, then in pairwise(points):
        while next_ < len(waiting) and waiting[next_][0] <= now:
            start, end, part, copies = waiting[next_]
            heapq.heappush(running, (copies, -start, -next_, end, part))
            next_ += 1
        while running and running[0][3] <= now:
            heapq.heappop(running)
        found[running[0][4] if running else GAPS] += (then - now) / 1e6
    return found


def _told(spans: Iterable[Span]) -> Iterator[tuple[float, float, str, bool]]:
    """(start, end, part, whether it only copies), in the order of their start; marks are gone."""
    depth = {"optimizer": 0, "head": 0}  # the first wins: an update may lie in the head's backward pass
    for start, end, name in spans:
        if mark := MARK.search(name):
            if mark[1] != STEP:
                region, change = MARKS[mark[1]]
                depth[region] += change
            continue
        inside = next((region for region, n in depth.items() if n > 0), None)
        yield start, end, inside or called(name), COPY.match(name) is not None


def called(name: str) -> str:
    """The part that a kernel or operator outside head and update is of."""
    if FUSED.match(name):
        return "elementwise"
    if ATTENTION.search(name):
        return "attention"
    return "products" if PRODUCT.search(name) else "elementwise"
