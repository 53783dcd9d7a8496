"""A tokenised document. Without torch, which those who only make documents need not load."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Document:
    """Token ids and which of them are learnt; `targets[0]` is always False, for nothing predicts a first token."""

    ids: np.ndarray  # (n,) int32
    targets: np.ndarray  # (n,) bool

    def __len__(self) -> int:
        return len(self.ids)
