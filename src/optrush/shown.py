"""What of a text from outside may reach a terminal or a page: what a model, a file or a server says. Pure."""

from __future__ import annotations

import unicodedata

JOINERS = "\u200c\u200d"  # of letters and of emoji: no control of a terminal


def shown(text: str) -> str:
    """A text as it may be shown: no escape sequence, nothing that turns the writing."""
    return "".join(
        c if c.isprintable() or c in "\n\t" + JOINERS or unicodedata.category(c) == "Zs" else "\ufffd" for c in text
    )
