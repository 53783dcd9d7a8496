"""Collate rows of documents into the batches that a model gets.

Shapes: B rows of a micro-batch, T tokens per row, N documents per batch (docs/notation.md).
A row has exactly T slots, so that compiled code gets one shape. Empty slots are padding, which is a separate document:
it attends only to itself and is never a target, so that no kernel needs a special case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from optrush.data.images import ImageReader
from optrush.data.schema import Document
from optrush.data.stored_tokens import StoredTokens

IGNORE = -100  # label of non-targets
INVENTED = -1  # sample number of padding
SHORTEST = 64  # Documents.longest is rounded up to a power of two from here on: few values, few compilations


class Documents(NamedTuple):
    """Boundaries of the documents of B whole rows. A NamedTuple: compilers and checkpointing unpack it."""

    starts: Tensor  # (N+1,) int32: cumulative lengths over the B*T slots, padded with B*T to a fixed N
    ids: Tensor  # (B, T) int32: number of the document within its row
    longest: int  # on the host: the longest document, rounded up to a power of two, at most T
    single: bool  # on the host: every row has one document, then padding
    filled: Tensor | None = None  # (B, T) bool: slots with a token; None: all
    mutual: Tensor | None = None  # (B, T) int32: image (from 1) with bidirectional attention; 0: none

    def in_chunks(self, size: int, positions: Tensor) -> Documents:
        """Return boundaries that split each document into chunks of `size` tokens.

        positions: (B, T), which restart with each document.
        """
        if self.longest <= size:
            return self
        begins = positions % size == 0
        room = len(self.starts) - 1 + positions.numel() // size  # at most one partial chunk per document
        numbers = torch.arange(1, room + 2, device=positions.device)
        starts = torch.searchsorted(begins.flatten().cumsum(0), numbers, out_int32=True)
        return self._replace(starts=starts, ids=begins.cumsum(1, dtype=self.ids.dtype), longest=size, single=False)


class Images(NamedTuple):
    """The images of B rows, in order; P patches, S placeholders."""

    colours: Tensor  # (P, values) uint8: colour values of each patch
    slots: Tensor  # (S,) int64: slot of each placeholder, among the B*T
    axes: Tensor  # (B, T, 3) int32: positions in time, height and width, which restart with each document; or (B, T, 0)
    rows: tuple[tuple[int, int, int], ...]  # on the host: images, patches and placeholders of each row
    grids: tuple[tuple[int, int], ...]  # on the host: patches of each image in height and width
    # (3, 256) float32, on the host: the base image processor's value for each colour value. Not a tensor:
    # sharding casts input tensors.
    levels: np.ndarray

    def of(self, first: int, last: int) -> Images | None:
        """Return the images of rows [first, last), or None."""
        (i, p, s), (j, q, e) = (map(sum, zip((0, 0, 0), *self.rows[:n])) for n in (first, last))
        slots = self.slots[s:e] - first * self.axes.shape[1]
        axes, rows = self.axes[first:last], self.rows[first:last]
        return None if i == j else Images(self.colours[p:q], slots, axes, rows, self.grids[i:j], self.levels)

    def each(self, move: Callable[[Any], Any]) -> Images:
        """Return the images with a function applied to each tensor."""
        tensors = {name: move(getattr(self, name)) for name in ("colours", "slots", "axes")}
        return self._replace(**tensors)

    def patches(self, first: int, last: int, frames: int) -> Tensor:
        """Return the patches [first, last) with the base image processor's values, (P, values) float32."""
        colours = self.colours[first:last].view(last - first, 3, 1, -1).int()
        colours += 256 * torch.arange(3, device=colours.device, dtype=torch.int32)[:, None, None]
        levels = torch.from_numpy(self.levels.reshape(-1)).to(colours.device)
        made = levels.index_select(0, colours.flatten()).view_as(colours)
        return made.expand(-1, -1, frames, -1).reshape(last - first, -1)


class RowCounts(NamedTuple):
    """Counts of one row, on the host, that are not in the batch's tensors."""

    tokens: int  # real tokens
    attended: int  # sum of squared document lengths
    samples: tuple[int, ...]  # global sample indices


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank."""

    tokens: Tensor  # (B, T) int64
    labels: Tensor  # (B, T) int64: already shifted, label t belongs to token t; IGNORE = not a target
    positions: Tensor  # (B, T) int32: restart with each document
    documents: Documents
    n_terms: float  # the objective's divisor: target tokens, or the sum of their weights (for preferences, pairs)
    n_targets: int  # target tokens
    n_tokens: int  # real tokens, padding excluded
    attended: int  # sum of squared document lengths: cost of attention
    samples: tuple[int, ...]  # global sample indices
    rows: tuple[RowCounts, ...]  # the last three, per row
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors of pairs, up to P per row. Pair p is its row's documents 2p (chosen) and 2p + 1 (rejected).
    pairs (B, P) bool: whether the pair exists.
    desirable (B, P) bool: whether its first document is a good answer; false for answers labelled bad.
    reference (B, P, 2) float32: precomputed log-probabilities of its documents under the reference model.
    weights (B, T) float32: of the targets in the loss; absent: all 1.
    From a stored teacher, at each target (arbitrary elsewhere):
    teacher_ids (B, T, k) int32: its likeliest tokens.
    teacher_log_p (B, T, k + 1): their log-probabilities, and the total of all others."""
    images: Images | None = None

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The positional arguments of the model's forward."""
        given = (self.tokens, self.positions, self.documents)
        return given if self.images is None else (*given, self.images)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return arrays for rebuilding it in another process: torch would send each tensor as an open file."""
        return _rebuilt, (vars(self._each(Tensor.numpy)),)

    def parts(self, most: int) -> list[Batch]:
        """Split a batch on the host into parts of at most `most` rows, in order."""
        B = len(self.rows)
        return [self] if most >= B else [self._part(first, min(B, first + most)) for first in range(0, B, most)]

    def _part(self, first: int, last: int) -> Batch:
        """Return the rows [first, last) as views, except `starts`. `longest` stays: it is a bound, and another value
        would cause a recompilation."""
        B, T = self.tokens.shape
        starts, room = self.documents.starts, len(self.documents.starts) - 1
        inside = starts[(starts >= first * T) & (starts < last * T)] - first * T  # a row's start is a document's start
        fixed = starts.new_full((max(len(inside), -(-room * (last - first) // B)) + 1,), (last - first) * T)
        fixed[: len(inside)] = inside
        labels = self.labels[first:last]
        learnt = int((labels != IGNORE).sum())
        held = self.rows[first:last]
        extra = {name: t[first:last] for name, t in self.extra.items()}
        return Batch(
            self.tokens[first:last], labels, self.positions[first:last],
            self.documents._replace(
                starts=fixed, ids=self.documents.ids[first:last],
                filled=None if self.documents.filled is None else self.documents.filled[first:last],
                mutual=None if self.documents.mutual is None else self.documents.mutual[first:last],
            ),
            _terms(learnt, extra), learnt, sum(r.tokens for r in held), sum(r.attended for r in held),
            tuple(s for r in held for s in r.samples), held, extra,
            None if self.images is None else self.images.of(first, last),
        )  # fmt: skip

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device; asynchronously from pinned memory if possible."""
        if device.type == "cpu" or self.tokens.device == device:
            return self
        return self._each(lambda t: t.pin_memory().to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory; torch's loader calls this method."""
        return self._each(lambda t: t.pin_memory())

    def _each(self, move: Callable[[Any], Any]) -> Batch:
        d = self.documents
        filled, mutual = (None if t is None else move(t) for t in (d.filled, d.mutual))
        documents = d._replace(starts=move(d.starts), ids=move(d.ids), filled=filled, mutual=mutual)
        moved: dict[str, Any] = {name: move(getattr(self, name)) for name in ("tokens", "labels", "positions")}
        moved["images"] = None if self.images is None else self.images.each(move)
        return replace(self, documents=documents, extra={n: move(t) for n, t in self.extra.items()}, **moved)


def _rebuilt(values: dict[str, Any]) -> Batch:
    return Batch(**values)._each(torch.from_numpy)


def collate(
    rows: Sequence[Sequence[tuple[int, Document]]],
    T: int,
    *,
    single: bool,
    most: int,
    isolated: bool = True,
    parts: int = 1,
    reference: np.ndarray | None = None,
    stored: StoredTokens | None = None,
    reader: ImageReader | None = None,
) -> Batch:
    """Collate rows of (sample index, document) into one Batch on the host.

    Args:
        rows: B rows of documents with a total of at most T tokens (no document: padding).
        T: tokens per row.
        single: every row has at most one document (`Documents.single`).
        most: maximum documents per batch, padding counted; fixes the length of `starts`.
        isolated: False joins a row's documents: positions continue, and each attends to earlier ones.
        parts: documents per sample: 1, for pairs 2.
        reference: (samples, 2) float32 for pairs with a known reference.
        stored: a teacher's likeliest tokens of each target.
        reader: of the images of documents.
    """
    B = len(rows)
    tokens = np.zeros((B, T), np.int64)
    labels = np.full((B, T), IGNORE, np.int64)
    positions = np.zeros((B, T), np.int32)
    ids = np.zeros((B, T), np.int32)
    lengths: list[int] = []
    counts: list[RowCounts] = []
    longest = 1
    for b, row in enumerate(rows):
        at, spans = 0, []
        for _, document in row:
            n = len(document)
            assert 0 < n <= T - at, "a row was filled past its end"
            tokens[b, at : at + n] = document.ids
            labels[b, at : at + n - 1] = np.where(document.targets[1:], document.ids[1:], IGNORE)
            spans.append(n)
            at += n
        if not isolated and row:
            spans = [at]
        counts.append(RowCounts(at, sum(n * n for n in spans), tuple(sample for sample, _ in row[::parts])))
        if at < T:
            spans.append(T - at)
        ends = np.cumsum(spans)
        ids[b] = np.repeat(np.arange(len(spans)), spans)
        positions[b] = np.arange(T) - np.repeat(ends - spans, spans)
        lengths += spans
        longest = max(longest, *spans)
    assert len(lengths) <= most, "more documents than the batch has room for"
    starts = np.full(most + 1, B * T, np.int32)
    starts[0] = 0
    starts[1 : len(lengths) + 1] = np.cumsum(lengths)
    filled = np.arange(T) < np.array([[c.tokens] for c in counts])
    learnt = int((labels != IGNORE).sum())
    weights = _weights(rows, T)
    extra = _pairs(rows, [c.samples for c in counts], most // max(1, B) // parts, reference) if parts > 1 else weights
    if stored is not None:
        extra |= _taught(labels, [c.samples for c in counts], stored)
    bucket = min(T, max(SHORTEST, 1 << (longest - 1).bit_length()))
    images, mutual = _images(rows, positions, reader)
    return Batch(
        torch.from_numpy(tokens), torch.from_numpy(labels), torch.from_numpy(positions),
        Documents(torch.from_numpy(starts), torch.from_numpy(ids), bucket, single, torch.from_numpy(filled), mutual),
        _terms(learnt, extra), learnt, sum(c.tokens for c in counts), sum(c.attended for c in counts),
        tuple(s for c in counts for s in c.samples), tuple(counts), extra, images,
    )  # fmt: skip


def _images(
    rows: Sequence[Sequence[tuple[int, Document]]], positions: np.ndarray, reader: ImageReader | None
) -> tuple[Images | None, Tensor | None]:
    """Return the images of the rows' documents, or None, and `Documents.mutual`.

    A text token has the same position on all axes. An image starts at the next position: time is constant, height and
    width count its rows and columns. After it positions continue from the largest. Source: arXiv:2409.12191.
    """
    turned, T = reader is not None and reader.spec.axes != "one", positions.shape[1]
    axes, mutual = np.repeat(positions[..., None], 3 * turned, 2), np.zeros_like(positions)
    patches, slots = list[np.ndarray](), list[np.ndarray]()
    grids, counts = list[tuple[int, int]](), list[tuple[int, int, int]]()
    for b, row in enumerate(rows):
        at, before = 0, (len(grids), sum(map(len, patches)), sum(map(len, slots)))
        for _, document in row:
            for image in document.images:
                assert reader is not None
                first, end, stop = at + image.at, at + image.at + image.tokens, at + len(document)
                if turned:
                    high, wide = (n // reader.sizes.merge for n in image.grid)
                    place = int(axes[b, first, 0])  # position of a text token
                    laid = [k.reshape(-1) for k in np.indices((high, wide), np.int32)]
                    axes[b, first:end] = place + np.stack([np.zeros_like(laid[0]), *laid], 1)
                    axes[b, end:stop] += max(high, wide) - image.tokens
                patches.append(reader.colours(image))
                grids.append(image.grid)
                places = first + np.flatnonzero(document.ids[image.at : image.at + image.tokens] == reader.token)
                mutual[b, places] = len(grids)
                slots.append(b * T + places)
            at += len(document)
        counts.append((len(grids) - before[0], sum(map(len, patches)) - before[1], sum(map(len, slots)) - before[2]))
    if reader is None or not grids:
        return None, None
    colours, held = torch.from_numpy(np.concatenate(patches)), torch.from_numpy(np.concatenate(slots))
    made = Images(colours, held, torch.from_numpy(axes), tuple(counts), tuple(grids), reader.levels)
    return made, torch.from_numpy(mutual) if reader.mutual else None


def _pairs(
    rows: Sequence[Sequence[tuple[int, Document]]],
    numbers: Sequence[Sequence[int]],
    P: int,
    reference: np.ndarray | None,
) -> dict[str, Tensor]:
    """Return `pairs`, `desirable` and, if not None, `reference` of `Batch.extra`; numbers: sample indices per row."""
    present, good = np.zeros((len(rows), P), bool), np.ones((len(rows), P), bool)
    known = np.zeros((len(rows), P, 2), np.float32)
    for b, (row, samples) in enumerate(zip(rows, numbers, strict=True)):
        present[b, : len(samples)] = True
        good[b, : len(samples)] = [document.desirable for _, document in row[::2]]
        if reference is not None:
            known[b, : len(samples)] = reference[list(samples)]
    tensors = {"pairs": torch.from_numpy(present), "desirable": torch.from_numpy(good)}
    return tensors if reference is None else tensors | {"reference": torch.from_numpy(known)}


def _weights(rows: Sequence[Sequence[tuple[int, Document]]], T: int) -> dict[str, Tensor]:
    """Return target weights, 0 elsewhere, as `weights` (B, T) at their labels' slots; {}: all 1."""
    if all(document.weights is None for row in rows for _, document in row):
        return {}
    weights = np.zeros((len(rows), T), np.float32)
    for b, row in enumerate(rows):
        at = 0
        for _, document in row:
            n = len(document)
            values = 1.0 if document.weights is None else document.weights[1:]
            weights[b, at : at + n - 1] = np.where(document.targets[1:], values, 0)
            at += n
    return {"weights": torch.from_numpy(weights)}


def _terms(learnt: int, extra: Mapping[str, Tensor]) -> float:
    """Return the objective's divisor: the number of pairs if there are any, else of target tokens, or their weights."""
    if "weights" in extra:
        return float(extra["weights"].double().sum())
    return int(extra["pairs"].sum()) if "pairs" in extra else learnt


def _taught(labels: np.ndarray, numbers: Sequence[Sequence[int]], stored: StoredTokens) -> dict[str, Tensor]:
    """Return the teacher's tensors for the targets; a sample's records are in the order of its targets."""
    taught = np.zeros(labels.shape, stored.record)
    taught["ids"] = np.arange(stored.k)  # at non-targets: any distinct tokens
    for b, samples in enumerate(numbers):
        records = [stored.find(sample) for sample in samples if sample != INVENTED]
        if records:
            taught[b, labels[b] != IGNORE] = np.concatenate(records)
    return {f"teacher_{name}": torch.from_numpy(np.ascontiguousarray(taught[name])) for name in ("ids", "log_p")}
