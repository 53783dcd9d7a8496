"""Build the lines and the work of blocks of transformers' models, from the figures of a trace. Pure.

The lines have the tags of our own decoder's, so that the rules of techniques match them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from optrush.models.traced import TracedShape
from optrush.planner import ledger
from optrush.planner.ledger import Line, Role, Tag

# Operators move bytes at half of a copy's rate: the factor between a Llama block's traced values and our own ledger's,
# which was fitted to measured steps.
UNEVEN = 2.0
# Time of a grouped matmul over that of a single one with the same FLOPs (planner.baseline).
GROUPED = 1.2
REASONS = {
    "attended": "what attention gives, kept by it or for the output product",
    "entering": "what enters products, kept for the weights' gradients",
    "weighed": "what norms multiply by their weights",
    "outputs": "what products give",
    "made": "what other operators keep",
    "rest": "copies of what operators keep, in the type in which they compute",
    "scores": "probabilities and what they are made of, H T",
    "spread": "keys and values repeated for each query head",
}


def saved_lines(s: TracedShape, T: int) -> Iterator[Line]:
    """Yield the traced lines that the blocks save for the backward pass."""
    yield ledger.entering(s.layers, s.width)
    for line in s.saved:
        reason, tags = f"traced: {REASONS[line.name.partition('.')[0]]}", cast("tuple[Tag, ...]", line.tags)
        held = ".held" if "scores" in tags else ""
        values = line.values * (T if line.squared else 1)
        yield ledger.saved(f"{line.name}{held}", reason, values, s.layers, *tags, role=cast("Role", line.role))
    reason = "in a traced model a part of the other lines"
    others: dict[str, Tag] = {"normalised": "normalised", "middle": "stream", "middle.wide": "stream"}
    for name, tag in others.items():
        yield ledger.saved(name, reason, 0.0, s.layers, tag)


def matrices(s: TracedShape) -> dict[str, float]:
    """Return the weights of each kind of linear in all blocks, and of other matmuls."""
    known = {name: float(linear.weights) for name, linear in s.linears.items()}
    others = max(0.0, s.matrices - s.stacked - sum(known.values()))
    return {**known, "others": others, **({"experts": GROUPED * s.routed} if s.routed else {})}
