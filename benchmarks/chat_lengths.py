"""Texts with the lengths of chats, and a tokenizer whose tokens are words: for benchmarks/chat-lengths.yaml.

usage: chat_lengths.py FOLDER     writes FOLDER/texts.jsonl and FOLDER/tokenizer

Lengths are log-normal (median 400 tokens, sigma 1), at most 4096 with the end-of-text token; the words are random. All
from seed 0, so that the file is the same everywhere.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from optrush_peers.weights import SPECIAL, name_tokens

TEXTS, MEDIAN, SIGMA, LONGEST, VOCABULARY = 4096, 400, 1.0, 4096, 128256


def lengths(count: int = TEXTS) -> np.ndarray:
    """(count,) tokens of each text, the end-of-text token included."""
    drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN), SIGMA, count)
    return np.clip(drawn.round(), 2, LONGEST).astype(np.int64)


def write(folder: Path, count: int = TEXTS, vocabulary: int = VOCABULARY) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name_tokens(vocabulary, folder / "tokenizer")
    random = np.random.default_rng(1)
    with (folder / "texts.jsonl").open("w") as file:
        for length in lengths(count):
            words = random.integers(len(SPECIAL), vocabulary, length - 1)  # the last token is the end of the text
            file.write(json.dumps({"text": " ".join(f"t{w}" for w in words)}) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
