"""Define the record of a teacher's likeliest tokens of one target, and find the records of a sample.

A record has the numbers of k tokens, their log-probabilities, and last that of all others together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


def record_type(k: int, width_bytes: int) -> np.dtype:
    """Return the type of a record, with log-probabilities in float32 (4 bytes) or float16 (2)."""
    return np.dtype([("ids", "<i4", (k,)), ("log_p", f"<f{width_bytes}", (k + 1,))])


@dataclass(frozen=True)
class StoredTokens:
    """The records of samples by their number."""

    record: np.dtype
    find: Callable[[int], np.ndarray]  # the number of a sample -> (its targets,) records

    @property
    def k(self) -> int:
        """Return how many tokens a record has."""
        return int(self.record["ids"].shape[0])
