"""A reward of one's own for rule-grpo-cpu.yaml: how much of an answer is plain text."""

from __future__ import annotations

from typing import Any


def plain_text(answer: str, reference: str, row: dict[str, Any]) -> float:
    """Return the share of characters that are letters or spaces; an empty answer has none."""
    return sum(c.isalpha() or c == " " for c in answer) / len(answer) if answer else 0.0
