"""`model.add_tokens`: how many rows an embedding must have once its tokenizer has got special tokens. Pure.

The tokenizer itself says which ids they get, so that the plan, the data and the model cannot disagree. Rows beyond the
tokenizer's length, which many published embeddings have, are taken first; only then does the embedding grow.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from optrush.config import Run
from optrush.errors import ConfigError

MULTIPLE = 128  # a grown vocabulary is a multiple of it: products then have no ragged tile


class Growth(NamedTuple):
    """What new tokens ask of embedding and head: the rows [first, last) become the mean of those before `first`."""

    tokens: tuple[str, ...]  # that the tokenizer did not have
    known: tuple[str, ...]  # that it had: nothing changes for them
    rows: int  # of the published embedding
    first: int
    last: int
    vocab: int  # rows from now on

    @property
    def note(self) -> str:
        """What was done, for people."""
        if not self.tokens:
            return f"model.add_tokens: the tokenizer has {', '.join(self.known)} already"
        held = f"; the tokenizer has {', '.join(self.known)}" if self.known else ""
        rows = f"the embedding grows from {self.rows} rows to {self.vocab}, a multiple of {MULTIPLE}"
        spare = f"the embedding has rows for them ({self.rows})"
        grown = rows if self.vocab > self.rows else spare
        return f"model.add_tokens: {', '.join(self.tokens)}: {grown}; new rows are the mean of the {self.first}{held}"


def grow(run: Run, folder: Path | None, hf: dict[str, Any]) -> Growth | None:
    """What `model.add_tokens` asks for; None: nothing is asked.

    Raises:
        ConfigError: there is no tokenizer to give them to, or no size to grow; a token that cannot be one.
        NeedsError: the tokenizer cannot be opened.
    """
    asked = run.model.add_tokens
    if not asked:
        return None
    folder = folder if run.model.tokenizer is None else Path(run.model.tokenizer)
    if folder is None:
        do = "name a folder that has one: model.tokenizer"
        raise ConfigError("`model.add_tokens`", f"`model.shape: {run.model.shape}` has no tokenizer", do)
    rows = hf.get("vocab_size")
    if not isinstance(rows, int):
        raise ConfigError("`model.add_tokens`", "config.json has no vocab_size to raise", "name another model")
    start, fresh = _added(folder, asked)
    known = tuple(token for token in asked if token not in fresh)
    if not fresh:
        return Growth((), known, rows, rows, rows, rows)
    end = start + len(fresh)
    vocab = rows if end <= rows else -(-end // MULTIPLE) * MULTIPLE
    return Growth(fresh, known, rows, min(start, rows), end if end <= rows else vocab, vocab)


@cache
def _added(folder: Path, tokens: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
    """The first new token's id, and the new tokens in the order of their ids, which follow each other.

    Kept, for a plan asks of one folder many times.
    """
    from optrush.data.tokenizer import add_tokens, open_tokenizer  # which brings transformers along

    tokenizer = open_tokenizer(folder)
    fresh = add_tokens(tokenizer, tokens)
    ids = [tokenizer.convert_tokens_to_ids(token) for token in fresh]
    assert ids == list(range(ids[0], ids[0] + len(ids))) if ids else True, "a tokenizer numbers new tokens in turn"
    return (ids[0] if ids else 0), fresh
