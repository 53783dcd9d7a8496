"""Define the record of a teacher's likeliest tokens for one target, and find the records of a sample.

A record has the ids of k tokens, their log-probabilities, and finally that of all other tokens together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


def record_type(k: int, width_bytes: int) -> np.dtype:
    """Return the dtype of a record, with log-probabilities in float32 (4 bytes) or float16 (2)."""
    return np.dtype([("ids", "<i4", (k,)), ("log_p", f"<f{width_bytes}", (k + 1,))])


@dataclass(frozen=True)
class StoredTokens:
    """The records of samples, by sample number."""

    record: np.dtype
    find: Callable[[int], np.ndarray]  # the number of a sample -> (its targets,) records

    @property
    def k(self) -> int:
        """Return the number of tokens per record."""
        return int(self.record["ids"].shape[0])
