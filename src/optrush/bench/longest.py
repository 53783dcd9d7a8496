"""The longest row that trains: lengths are tried one by one, each in a fresh process with one row a step. Pure.

The rung is first measured and proved at the shortest length, as any rung is. Then lengths are tried without a proof,
which at such lengths would take longer than the training: from the plan's prediction, next to it and ever farther, or
doubling where there is none; up while they train, down where memory ends, until the shortest that failed is near the
longest that trained. So where the plan is right two are enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import Any

from optrush.bench.written import Longest
from optrush.errors import UserError

GRAIN = 1024  # lengths are multiples of it, or of what the shortest is a multiple of
FARTHEST = 4.0  # from a length to the next
MEMORY = ("out of memory", "killed by signal 9")  # how a result says that memory ended, on the device or the host


def search(
    span: Longest, guess: int | None, first: dict[str, Any], attempt: Callable[[int], dict[str, Any]]
) -> dict[str, Any]:
    """The result of the longest row that trained, with the proof of the shortest, and what was tried.

    Args:
        guess: where to begin; None: nothing is predicted.
        first: the result at `span.from_`, with its proof.
        attempt: one process at a length.
    """
    best, reached, tries = first, span.from_, [_try(span.from_, first)]
    if "error" in first:
        return {**first, "tries": tries}
    asking, ended = lengths(span, guess), None
    seq = next(asking, None)
    while seq is not None and ended is None:
        result = attempt(seq)
        tries.append(_try(seq, result))
        trained = tries[-1]["error"] is None
        if trained:
            best, reached = result, seq
        elif not str(tries[-1]["error"]).startswith(MEMORY):
            ended = f"the search ended at rows of {seq:,} tokens: {tries[-1]['error']}"
        try:
            seq = asking.send(trained)
        except StopIteration:
            seq = None
    return {**best, "proof": first["proof"], "longest_seq": reached, "tries": tries, "ended": ended}


def lengths(span: Longest, guess: int | None) -> Generator[int, bool]:
    """Lengths to try, sent whether each trained; `span.from_` has."""
    grain = math.gcd(span.from_, GRAIN)
    low, high, stride = span.from_, 0, 2.0 if guess is None else span.factor  # high 0: none has failed

    def whole(length: float) -> int:
        return int(length) // grain * grain

    top = max(low, whole(span.to))
    wanted = min(top, whole(guess or 0))
    while True:
        if high == 0:
            if low >= top:
                return
            seq = wanted if wanted > low else min(top, max(low + grain, whole(low * stride)))
            if wanted <= low:
                stride = min(stride * stride, FARTHEST)
        else:
            if high <= max(low * span.factor, low + grain):
                return
            seq = min(high - grain, max(low + grain, whole(max(math.sqrt(low * high), high / stride) + grain - 1)))
            stride = min(stride * stride, FARTHEST)
        if (yield seq):
            low = seq
        else:
            high = seq


def guess(span: Longest, fits: Callable[[int], bool | None]) -> int | None:
    """The longest row that the plan says fits; None: it says nothing.

    Args:
        fits: what it says of a length.
    """
    grain = math.gcd(span.from_, GRAIN)
    low, high = span.from_ // grain, span.to // grain
    try:
        if fits(low * grain) is None:
            return None
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle * grain) else (low, middle - 1)
    except UserError:
        return None
    return low * grain


def _try(seq: int, result: dict[str, Any]) -> dict[str, Any]:
    error = result.get("error")
    if error is None and None in result["losses"]:
        error = "a loss was not finite"
    return {
        "seq": seq, "error": error, "peak_bytes": result.get("peak_bytes"),
        "host_peak_bytes": result.get("host_peak_bytes"), "seconds": result.get("seconds"),
    }  # fmt: skip
