"""What travels from disk to gradient: a document, a row of documents, a batch of rows.

Shapes: B rows of a micro-batch, T tokens a row, N documents a batch (docs/notation.md).
A row has exactly T slots, so that compiled code sees one shape; what no document fills is padding, and padding is a
document of its own (it attends to itself alone and is never a target), so that no kernel needs a special case.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

IGNORE = -100  # a label that is not learnt
LONGEST_BUCKET = 64  # Documents.longest is rounded up to a multiple of this: few distinct values, few recompilations


@dataclass(frozen=True)
class Document:
    """Token ids and which of them are learnt; `targets[0]` is always False, for nothing predicts a first token."""

    ids: np.ndarray  # (n,) int32
    targets: np.ndarray  # (n,) bool

    def __len__(self) -> int:
        return len(self.ids)


class Documents(NamedTuple):
    """Where the documents of B whole rows lie. A NamedTuple: compilers and checkpointing look through it."""

    starts: Tensor  # (N+1,) int32: cumulative lengths over the B*T slots, padded with B*T to a fixed N
    ids: Tensor  # (B, T) int32: number of the document within its row
    longest: int  # on the host: the longest document, rounded up to a bucket, at most T
    single: bool  # on the host: every row begins one document and nothing but padding follows it


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank."""

    tokens: Tensor  # (B, T) int64
    labels: Tensor  # (B, T) int64: already shifted, label t belongs to token t; IGNORE = not learnt
    positions: Tensor  # (B, T) int32: restart with each document
    documents: Documents
    n_terms: int  # the objective's divisor: target tokens (pairs, for preferences)
    n_targets: int  # target tokens
    n_tokens: int  # real tokens, padding excluded
    attended: int  # sum of squared document lengths: what causal attention costs
    samples: tuple[int, ...]  # global sample indices

    def to(self, device: torch.device) -> Batch:
        """The batch on a device; from pinned memory, without waiting where the device allows it."""
        if device.type == "cpu":
            return self

        def move(t: Tensor) -> Tensor:
            return t.pin_memory().to(device, non_blocking=True)

        d = self.documents
        return Batch(
            move(self.tokens), move(self.labels), move(self.positions),
            Documents(move(d.starts), move(d.ids), d.longest, d.single),
            self.n_terms, self.n_targets, self.n_tokens, self.attended, self.samples,
        )  # fmt: skip


def collate(rows: list[list[tuple[int, Document]]], T: int, *, single: bool, most: int) -> Batch:
    """Rows of (sample index, document) into one Batch on the host.

    Args:
        rows: B rows; each holds documents whose lengths sum to at most T (none: the row is padding).
        T: tokens a row.
        single: every row holds at most one document (see `Documents.single`).
        most: most documents a batch can hold, padding counted: fixes the length of `starts`.
    """
    B = len(rows)
    tokens = np.zeros((B, T), np.int64)
    labels = np.full((B, T), IGNORE, np.int64)
    positions = np.zeros((B, T), np.int32)
    ids = np.zeros((B, T), np.int32)
    lengths: list[int] = []
    samples: list[int] = []
    real, attended, longest = 0, 0, 1
    for b, row in enumerate(rows):
        at = 0
        for number, (sample, document) in enumerate(row):
            n = len(document)
            assert 0 < n <= T - at, "a row was filled past its end"
            tokens[b, at : at + n] = document.ids
            labels[b, at : at + n - 1] = np.where(document.targets[1:], document.ids[1:], IGNORE)
            positions[b, at : at + n] = np.arange(n)
            ids[b, at : at + n] = number
            lengths.append(n)
            samples.append(sample)
            at, real, attended, longest = at + n, real + n, attended + n * n, max(longest, n)
        if at < T:
            positions[b, at:] = np.arange(T - at)
            ids[b, at:] = len(row)
            lengths.append(T - at)
            longest = max(longest, T - at)
    assert len(lengths) <= most, "more documents than the batch has room for"
    starts = np.full(most + 1, B * T, np.int32)
    starts[0] = 0
    starts[1 : len(lengths) + 1] = np.cumsum(lengths)
    learnt = int((labels != IGNORE).sum())
    bucket = min(T, -(-longest // LONGEST_BUCKET) * LONGEST_BUCKET)
    return Batch(
        torch.from_numpy(tokens), torch.from_numpy(labels), torch.from_numpy(positions),
        Documents(torch.from_numpy(starts), torch.from_numpy(ids), bucket, single),
        learnt, learnt, real, attended, tuple(samples),
    )  # fmt: skip
