"""Build the lines and the work of blocks of transformers' models, of which a trace has the figures. Pure.

The lines have the tags of our own decoder's, so that the rules of techniques find them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from optrush.models.traced import TracedShape
from optrush.planner import ledger
from optrush.planner.ledger import Line, Role, Tag

# Operators read and write at half of a copy's rate: what takes a Llama's block from its traced values to those of our
# own ledger, which was fitted to measured steps.
UNEVEN = 2.0
# A product of groups of rows takes as long as this many times its FLOPs in one product (planner.baseline).
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
    """Yield what the blocks keep for the backward pass, as traced."""
    yield ledger.entering(s.layers, s.width)
    for line in s.saved:
        why, tags = f"traced: {REASONS[line.name.partition('.')[0]]}", cast("tuple[Tag, ...]", line.tags)
        held = ".held" if "scores" in tags else ""
        values = line.values * (T if line.squared else 1)
        yield ledger.saved(f"{line.name}{held}", why, values, s.layers, *tags, role=cast("Role", line.role))
    why = "in a traced model a part of the other lines"
    others: dict[str, Tag] = {"normalised": "normalised", "middle": "stream", "middle.wide": "stream"}
    for name, tag in others.items():
        yield ledger.saved(name, why, 0.0, s.layers, tag)


def matrices(s: TracedShape) -> dict[str, float]:
    """Return the weights of each kind of linear in all blocks, and of what else multiplies."""
    known = {name: float(linear.weights) for name, linear in s.linears.items()}
    others = max(0.0, s.matrices - s.stacked - sum(known.values()))
    return {**known, "others": others, **({"experts": GROUPED * s.routed} if s.routed else {})}
