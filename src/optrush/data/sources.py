"""From a run's `data:` to documents: files, the recipes sample or random tokens, and what is held out of them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from optrush.config import Run
from optrush.data import recipes
from optrush.data.chat import Tokens
from optrush.data.corpus import Corpus, Random, Source, load, split
from optrush.errors import DataError
from optrush.objectives import learnt

SAMPLE_ROWS = 1000  # conversations of a sample, unless data.max_samples says otherwise
RANDOM_DOCUMENTS = 4096  # of `data.random: true`


@dataclass(frozen=True)
class Sources:
    train: Source
    held_out: Source | None
    fingerprint: str
    summary: str  # counts, for people
    too_long: int = 0  # rows longer than T, of what is evaluated (of all, where nothing is held out)


def read_sources(
    run: Run, tokens: Tokens | None, vocab: int, progress: Callable[[int], None] | None = None, data: str | None = None
) -> Sources:
    """Reads and tokenises.

    Args:
        tokens: the tokenizer; None only for random tokens.
        data: a file to read as the held-out part instead of what the run says (`optrush eval --data`).

    Raises:
        DataError: with file and line.
    """
    d = run.data
    T = run.batch.seq
    if d.random is not None and data is None:
        n = RANDOM_DOCUMENTS if d.random is True else d.random
        n = min(n, d.max_samples or n)
        train = Random(n, T, vocab, run.seed)
        held = Random(max(1, round(n * d.eval)), T, vocab, run.seed + 1) if isinstance(d.eval, float) else None
        return Sources(train, held, train.fingerprint, f"{n} documents of {T} random tokens")
    assert tokens is not None

    def read(path: Path, most: int | None) -> Corpus:
        corpus = load(
            [path], tokens, train_on=learnt(run), T=T, too_long=d.too_long, max_samples=most, progress=progress
        )
        highest = max(int(document.ids.max()) for document in corpus.documents)
        if highest >= vocab:
            do = "use the tokenizer that belongs to the model"
            raise DataError(f"to embed the tokens of {path}", f"token {highest}, and a model of {vocab} tokens", do)
        return corpus

    if data is not None:
        only = read(Path(data), None)
        return Sources(only, only, only.fingerprint, describe(only), only.counts.too_long)
    if d.sample is not None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{d.sample}.jsonl"
            recipes.write(path, d.max_samples or SAMPLE_ROWS, run.seed)
            corpus = read(path, None)
    else:
        assert d.path is not None
        corpus = read(Path(d.path), d.max_samples)
    if d.eval is None:
        return Sources(corpus, None, corpus.fingerprint, describe(corpus), corpus.counts.too_long)
    if isinstance(d.eval, str):
        if not Path(d.eval).exists():
            raise DataError(f"`data.eval: {d.eval}`", "no such file", "give a JSONL file, or a fraction such as 0.1")
        held_out, train_part = read(Path(d.eval), None), corpus
    else:
        train_part, held_out = split(corpus, d.eval, run.seed)
    said = f"{describe(train_part)}; held out: {describe(held_out)}"
    return Sources(train_part, held_out, train_part.fingerprint + held_out.fingerprint, said, held_out.counts.too_long)


def describe(corpus: Corpus) -> str:
    """The counts of a corpus in a line, what was cut or left out included."""
    c = corpus.counts
    text = f"{c.documents} documents, {c.tokens} tokens, {c.targets} targets"
    if c.too_long:
        text += f" ({c.too_long} rows too long, {c.dropped} pieces dropped, {c.targets_lost} targets lost)"
    return text
