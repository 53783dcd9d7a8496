"""Is this what one wants to train on? Looked at before step 0 in the first rows; each doubt is an error that shows one.

Each of these trains without a sign and shows only in the model: it learns nothing, never stops, expects two
begin-of-text tokens, or answers a first question otherwise than it was taught.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np

from optrush.data.chat import Tokens, answers
from optrush.data.document import Document
from optrush.data.mask import MEND_EARLIER
from optrush.data.rows import Chat, Pair, Row, Text, Where
from optrush.errors import DataError

SAMPLES = 200  # rows that are looked at
HEAD, TAIL = 60, 30  # tokens of a sample that are shown, from its beginning and its end
SHOWN = 100  # characters of a difference that are shown

Samples = Sequence[tuple[Where, Row]]
Made = Sequence[Sequence[Document]]  # the documents of each sample


def probe(
    samples: Samples,
    documents: Made,
    tokens: Tokens,
    train_on: str,
    *,
    rows: int,
    truncated: int,
    most_truncated: float,
) -> None:
    """Raises DataError at the first doubt.

    Args:
        samples: the first rows as they were read, about SAMPLES of them.
        documents: what the run learns from each sample, after cutting to T; nothing where it was dropped or refused.
        train_on: `assistant`, `last` or `all`.
        rows: of the whole corpus.
        truncated: of those, how many lost their end (`data.too_long: truncate`).
        most_truncated: the largest share of such rows (`data.most_truncated`).
    """
    assert len(samples) == len(documents)
    if not samples:
        return
    whole = [() if isinstance(made, DataError) else made for made in tokens.batch(samples, train_on)]
    _learns(samples, documents, whole, tokens)
    _one_bos(samples, documents, tokens)
    if train_on == "assistant":
        _steady(samples, whole, tokens)
    _complete(samples, documents, whole, tokens, (rows, truncated, most_truncated))
    _stops(samples, documents, whole if train_on != "all" else _answered(samples, tokens), tokens)


def _learns(samples: Samples, documents: Made, whole: Made, tokens: Tokens) -> None:
    if not any(document.targets.any() for made in documents for document in made):
        raise DataError(
            f"to learn from the first {len(samples)} rows",
            f"not one token of them would be learnt; the first, {_show(tokens, samples[0], documents[0] or whole[0])}",
            "raise batch.seq if answers are cut off, or choose what is learnt (data.train_on)",
        )


def _one_bos(samples: Samples, documents: Made, tokens: Tokens) -> None:
    bos = tokens.tokenizer.bos_token_id
    for sample, made in zip(samples, documents, strict=True):
        for document in made:
            if bos is not None and document.ids[:2].tolist() == [bos, bos]:
                asked = f"to begin a document with one {tokens.tokenizer.bos_token}"
                writer = "chat template" if any(_chats(sample[1])) else "tokenizer"
                do = f"take one out of the rows' text or the template: the {writer} writes one by itself"
                raise DataError(asked, f"two of them; {_show(tokens, sample, [document])}", do)


def _steady(samples: Samples, whole: Made, tokens: Tokens) -> None:
    for (where, row), made in zip(samples, whole, strict=True):
        for chat in _chats(row) if made else ():
            turns = answers(chat, "assistant")
            masker = tokens.masker(chat, turns, where)
            masker.spans()
            for i in turns:
                if changed := masker.changes(i):
                    alone, here = (_visible(text)[:SHOWN] for text in changed)
                    raise DataError(
                        f"to learn every answer of the conversation at {where} (data.train_on: assistant)",
                        f"later turns change how the template writes messages[{i}]: '{alone}' becomes '{here}'",
                        MEND_EARLIER,
                    )


def _complete(samples: Samples, documents: Made, whole: Made, tokens: Tokens, counts: tuple[int, int, float]) -> None:
    rows, truncated, most = counts
    if not rows or truncated / rows <= most:
        return
    short = (n for n, made in enumerate(documents) if sum(map(len, made)) < sum(map(len, whole[n])))
    n = next(short, None)
    one = "" if n is None else f"; one, {_show(tokens, samples[n], documents[n] or whole[n])}"
    raise DataError(
        f"at most {most:.1%} of the rows without their end (data.most_truncated)",
        f"{truncated} of {rows} rows ({truncated / rows:.1%}) are longer than batch.seq and truncated{one}",
        "raise batch.seq, or choose data.too_long: drop or split",
    )


def _stops(samples: Samples, documents: Made, whole: Made, tokens: Tokens) -> None:
    trained = {int(i) for made in documents for document in made for i in document.ids[document.targets]}
    for n, made in enumerate(whole):
        if isinstance(samples[n][1], Text):
            continue
        for document in made:
            ends = document.targets & ~np.append(document.targets[1:], False)  # the last token of each answer
            for stop in sorted(set(document.ids[ends].tolist()) - trained):
                one = _show(tokens, samples[n], documents[n] or made)
                raise DataError(
                    f"to learn to stop with {tokens.tokenizer.convert_ids_to_tokens(stop)}, as answers end",
                    f"it is learnt in none of the first {len(samples)} rows; one, {one}",
                    "raise batch.seq, so that answers are not cut off, or choose data.too_long: drop",
                )


def _answered(samples: Samples, tokens: Tokens) -> Made:
    """The samples as if only their last answers were learnt; nothing where those cannot be told."""
    return [() if isinstance(made, DataError) else made for made in tokens.batch(samples, "last")]


def _chats(row: Row) -> Iterator[Chat]:
    for part in (row.chosen, row.rejected) if isinstance(row, Pair) else (row,):
        if isinstance(part, Chat):
            yield part


def _show(tokens: Tokens, sample: tuple[Where, Row], documents: Sequence[Document]) -> str:
    """A row's place and its first and last tokens as text, in one line."""
    if not documents:
        return f"at {sample[0]}"
    ids = documents[0].ids.tolist()
    parts = [ids] if len(ids) <= HEAD + TAIL else [ids[:HEAD], ids[-TAIL:]]
    texts = [cast(str, tokens.tokenizer.decode(part, clean_up_tokenization_spaces=False)) for part in parts]
    return f"at {sample[0]}: '{' ... '.join(map(_visible, texts))}'"


def _visible(text: str) -> str:
    """The text with its control characters written out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
