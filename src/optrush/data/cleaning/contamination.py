"""Rows that share text with what a model will be judged by.

A row is taken if it holds WORDS words in a row that a text of the evaluation file holds too, or all of a text that is
shorter than that and nothing else. Source: the 13-gram overlap of Brown et al. 2020 (https://arxiv.org/abs/2005.14165,
appendix C). Differs from the source: the whole row goes, not the passage with 200 characters around it; and what was
not written for the row (system prompts, tools) is not compared, because rows and evaluation may share it by design. A
paraphrase or a translation is not found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from optrush.data import rows
from optrush.data.cleaning.texts import hashed_words, runs, spoken, words
from optrush.data.read import read
from optrush.data.rows import Row, Where

WORDS = 13
BATCH = 1024


@dataclass(frozen=True)
class Evaluation:
    """The runs of all evaluation texts.

    hashes: (R,) uint64, ascending. owners: (R,) int32, which text each is from. places: where each text stands.
    """

    hashes: np.ndarray
    owners: np.ndarray
    places: Sequence[Where]

    def shared(self, hashes: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """For each row the number (from 1) of a text that it shares a run with, or 0; (N,) int32.

        Args:
            hashes, lengths: the words of the rows' texts, as `hashed_words` gives them.
        """
        found, counts = runs(hashes, lengths, WORDS)
        owners = self._owners(found)
        shared = np.zeros(len(lengths), np.int32)
        at = np.flatnonzero(owners)[::-1]  # backwards, so that a row's first run has the last word
        shared[np.repeat(np.arange(len(lengths)), counts)[at]] = owners[at]
        return shared

    def passage(self, row: Row) -> str:
        """The first words that a contaminated row shares."""
        text = spoken(row)
        found, _ = runs(*hashed_words([text]), WORDS)
        first = int(np.flatnonzero(self._owners(found))[0])
        return " ".join(islice(words(text), first, first + WORDS))

    def _owners(self, found: np.ndarray) -> np.ndarray:
        if not len(self.hashes):
            return np.zeros(len(found), np.int32)
        at = np.minimum(np.searchsorted(self.hashes, found), len(self.hashes) - 1)
        return np.where(self.hashes[at] == found, self.owners[at] + 1, 0).astype(np.int32)


def read_evaluation(files: Sequence[Path], text_rows: str) -> Evaluation:
    """The runs of all rows of the evaluation files.

    Raises:
        DataError: at the first row that is none.
    """
    places: list[Where] = []
    held: list[tuple[np.ndarray, np.ndarray]] = []
    found = (pair for file in files for pair in read(file, text_rows))
    while batch := list(islice(found, BATCH)):
        hashes, counts = runs(*hashed_words([spoken(rows.parse(where, row)) for where, row in batch]), WORDS)
        held.append((hashes, np.repeat(np.arange(len(places), len(places) + len(batch), dtype=np.int32), counts)))
        places += [where for where, _ in batch]
    hashes = np.concatenate([np.zeros(0, np.uint64), *(h for h, _ in held)])
    owners = np.concatenate([np.zeros(0, np.int32), *(o for _, o in held)])
    hashes, first = np.unique(hashes, return_index=True)
    return Evaluation(hashes, owners[first], places)
