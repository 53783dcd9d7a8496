"""Collect a view of the data: samples as text pieces with loss mask, lengths, the fill of each layout.

These are facts for JSON, the terminal and the page; nothing is printed here. A mask shifted by a token, or a missing
end of turn, trains a wrong model silently. Therefore the text is decoded token by token from the ids that training
receives, not taken from the row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from optrush.data.images import SeenImage
from optrush.data.packing import LAYOUTS, survey
from optrush.data.samples import Mismatched
from optrush.data.schema import Document

if TYPE_CHECKING:
    from optrush.config import Config
    from optrush.data.samples import Dataset

Pictures = Callable[[SeenImage], str]

OPEN, CLOSE = "⟦", "⟧"  # around targets
OPEN_SPECIAL, CLOSE_SPECIAL = "⟪", "⟫"  # around a special token
BORDER = "╎"  # between tokens
MARKS = OPEN + CLOSE + OPEN_SPECIAL + CLOSE_SPECIAL + BORDER
HEAD_tok, TAIL_tok = 768, 256  # decoded at the start and end of a long document
CONTEXT_tok = 4  # decoded before a token: many tokenizers drop a leading space
CHARACTER_tok = 8  # maximum tokens per character (4 bytes, with a margin)
SEEN, LOOKED_AT, MOST_IMAGES = 3, 200, 24  # samples on a run's page; samples searched for images; images per page
BINS = 40  # approximate number of bins in the histogram
WIDE = 20  # longest / shortest: above this ratio, bins grow with length


@dataclass(frozen=True)
class TextPiece:
    """The text of consecutive tokens."""

    text: str
    learnt: bool
    special: bool = False
    ids: tuple[int, ...] = ()
    image: str = ""  # a thumbnail, as a data: address


def token_pieces(
    tokenizer: Any, document: Document, first: int, last: int, special: frozenset[int] = frozenset(),
    pictures: Pictures = lambda _: "",
) -> Iterator[TextPiece]:  # fmt: skip
    """Yield the tokens [first, last) with their text; the tokens of a character or image form one piece.

    Args:
        pictures: returns the `TextPiece.image` of an image.
    """
    for image in document.images:
        begin, end = max(first, image.at), min(last, image.at + image.tokens)
        if begin < end:
            yield from _text_pieces(tokenizer, document, first, begin, special)
            width, height = image.size
            text = f"image {width} x {height}, {image.tokens} tokens"
            yield TextPiece(text, False, True, tuple(document.ids[begin:end].tolist()), pictures(image))
            first = end
    yield from _text_pieces(tokenizer, document, first, last, special)


def _text_pieces(
    tokenizer: Any, document: Document, first: int, last: int, special: frozenset[int]
) -> Iterator[TextPiece]:
    """Yield the tokens [first, last), outside images, with their text; a character's tokens form one piece."""
    ids, learnt = document.ids[:last].tolist(), document.targets[:last].tolist()

    def text(a: int, b: int) -> str:
        return str(tokenizer.decode(ids[a:b], skip_special_tokens=False, clean_up_tokenization_spaces=False))

    begun, done = max(0, first - CONTEXT_tok), first
    before = text(begun, done)
    for end in range(first + 1, last + 1):
        decoded = text(begun, end)
        halved = decoded.endswith("\ufffd") and end < last and end - done < CHARACTER_tok
        if halved and learnt[end] == learnt[done] and not {ids[end], ids[done]} & special:
            continue
        added = decoded[len(before) :] if decoded.startswith(before) else text(done, end)
        yield TextPiece(added, learnt[done], ids[done] in special, tuple(ids[done:end]))
        begun, done = done, end
        before = text(begun, done)


def visible(c: str, marks: str = MARKS) -> str:
    """Return a character of the data for a terminal; control characters and `marks` are escaped."""
    if c == "\n":
        return "↵\n"
    if c == " " or (c.isprintable() and c not in marks):
        return c
    return c.encode("unicode_escape").decode()


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids of special tokens, and of added tokens other than white space."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if str(token).replace("▁", " ").strip()}
    return frozenset(added | set(tokenizer.all_special_ids))


def describe_sample(
    tokenizer: Any, documents: Sequence[Document], special: frozenset[int], judged: bool = False,
    pictures: Pictures = lambda _: "",
) -> list[dict[str, Any]]:  # fmt: skip
    """Return a sample's documents; for long ones only start and end.

    Args:
        judged: the first is a good or bad answer, the second its mismatched document; else two documents are a pair.
    """
    names = ("chosen", "rejected") if len(documents) == 2 else ("document",)
    if judged:
        names = ("good answer" if documents[0].desirable else "bad answer", "mismatched")
    shown = []
    for name, document in zip(names, documents, strict=True):
        n = len(document)
        head, tail = (n, n) if n <= HEAD_tok + TAIL_tok else (HEAD_tok, n - TAIL_tok)
        pieces, end = (
            [
                {key: value for key, value in asdict(piece).items() if key != "image" or value}
                for piece in token_pieces(tokenizer, document, first, last, special, pictures)
            ]
            for first, last in ((0, head), (tail, n))
        )
        facts = {"name": name, "tokens": n, "targets": int(document.targets.sum())}
        shown.append({**facts, "pieces": pieces, "left_out": tail - head, "end": end})
    return shown


def describe_samples(
    source: Dataset, tokenizer: Any, found: Iterable[tuple[int, Sequence[Document]]], T: int,
    pictures: Pictures = lambda _: "",
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield each sample (number, documents) with its location, and whether it is longer than a row."""
    special = special_ids(tokenizer)
    for i, documents in found:
        where = source.where(i)
        if not where.file.exists():  # a built-in sample's temporary file
            where = where._replace(file=Path(where.file.name))
        longer = sum(map(len, documents)) > T
        described = describe_sample(tokenizer, documents, special, isinstance(source, Mismatched), pictures)
        yield {"sample": i, "where": str(where), "longer": longer, "documents": described}


def describe_rows(
    source: Dataset, tokenizer: Any, found: Iterable[tuple[int, Sequence[tuple[int, Document]]]], T: int,
    pictures: Pictures = lambda _: "",
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield each row (number, documents) with its samples, which may be pieces."""
    for number, row in found:
        parts = [(row[k][0], [d for _, d in row[k : k + source.parts]]) for k in range(0, len(row), source.parts)]
        described = list(describe_samples(source, tokenizer, parts, T, pictures))
        yield {"row": number, "tokens": sum(len(d) for _, d in row), "samples": described}


def seen_samples(source: Dataset, tokenizer: Any, T: int) -> list[dict[str, Any]]:
    """Return the first samples with images, at most `SEEN`, with thumbnails."""
    from optrush.data.images import thumbnails

    samples = ((i, source.documents(i)) for i in range(min(len(source), LOOKED_AT)))
    with_images = [(i, documents) for i, documents in samples if any(d.images for d in documents)][:SEEN]
    return list(describe_samples(source, tokenizer, with_images, T, thumbnails(MOST_IMAGES)))


def length_summary(lengths: np.ndarray, targets: np.ndarray, T: int) -> dict[str, Any]:
    """Return the distribution of uncut sample lengths (N,), and the share of targets."""
    low, high = int(lengths.min()), int(lengths.max())
    growing = high > WIDE * low
    scale = np.geomspace if growing else np.linspace
    edges = np.unique(np.rint(scale(low, high + 1, BINS + 1))).astype(np.int64)
    counts, _ = np.histogram(lengths, edges)
    return {
        "samples": len(lengths),
        "tokens": int(lengths.sum()),
        "learnt": float(targets.sum() / lengths.sum()),
        "min": low,
        "median": float(np.median(lengths)),
        "mean": float(lengths.mean()),
        "p95": int(np.percentile(lengths, 95, method="inverted_cdf")),
        "max": high,
        "longer_than_seq": int((lengths > T).sum()),
        "histogram": {"edges": edges.tolist(), "counts": counts.tolist(), "logarithmic": growing},
    }


def fills(lengths: np.ndarray, T: int, rows: int, micro_rows: int, config: Config) -> list[dict[str, Any]]:
    """Return each layout's fill, planned samples per second, and whether the run uses it.

    The lengths (N,) are tokens per uncut sample; `rows` is per step, `micro_rows` per micro-batch.
    """
    cut = cut_lengths(lengths, T, config.data.too_long)
    results = {}
    for samples in (lengths, cut) if lengths.max() > T and len(cut) else (lengths,):
        for s in survey(samples, T, rows, micro_rows, config.seed):
            if s.name not in results or LAYOUTS[s.name].uncut:
                speed = len(samples) / max(s.seconds, 1e-9)
                results[s.name] = {**asdict(s), "samples_per_s": speed, "chosen": s.name in config.with_}
    return list(results.values())


def cut_lengths(lengths: np.ndarray, T: int, how: str) -> np.ndarray:
    """Return the lengths of the samples after cutting, for layouts that do not cut; `error` counts as `truncate`."""
    if how == "drop":
        return np.asarray(lengths[lengths <= T])
    if how != "split":
        return np.asarray(np.minimum(lengths, T))
    rest = lengths % T
    return np.concatenate([np.full(int((lengths // T).sum()), T), rest[rest > 0]])
