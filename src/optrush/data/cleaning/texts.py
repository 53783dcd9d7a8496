"""What texts are compared by: normal form, words, runs of words as numbers, repeated lines.

Words are letters and digits in a row, case-folded; in scripts that set no spaces each letter is a word. A run of n
words is one 64-bit hash: a polynomial of the words' own hashes, mixed. The same text gives the same numbers anywhere.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from optrush.data import rows
from optrush.data.rows import Chat, Completion, Pair, Row

# Thai, Lao, Burmese, Khmer; kana; Han. Of a clause without spaces one changed letter would change "the word".
SPACELESS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
WORD = re.compile(rf"[{SPACELESS}]|[^\W{SPACELESS}]+")
MOST_KNOWN = 1 << 18  # words whose hashes a process keeps
LONG_chars = 1 << 20  # of a longer text no list of words is made: it would take many times its bytes

SHARED = ("system", "developer")  # roles whose texts many rows share by design

_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class _Hashes(dict[str, int]):
    """A word's 64-bit hash, kept for the next time."""

    def __missing__(self, word: str) -> int:
        if len(self) >= MOST_KNOWN:
            self.clear()
        found = hashlib.blake2b(word.encode(), digest_size=8).digest()
        self[word] = number = int.from_bytes(found, "little")
        return number


_hashes = _Hashes()


def hashed(words: Iterable[str]) -> np.ndarray:
    """The words' hashes, (n,) uint64."""
    return np.fromiter(map(_hashes.__getitem__, words), np.uint64)


def digest(text: str) -> bytes:
    """16 bytes that two texts share if they are equal in Unicode's normal form C with white space collapsed."""
    return hashlib.blake2b(" ".join(unicodedata.normalize("NFC", text).split()).encode(), digest_size=16).digest()


def words(text: str) -> Iterable[str]:
    """The text's words, in normal form C and case-folded."""
    folded = unicodedata.normalize("NFC", text).casefold()
    if len(folded) < LONG_chars:
        return WORD.findall(folded)
    return (found.group() for found in WORD.finditer(folded))


def hashed_words(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of all texts' words one after another, (W,) uint64, and how many words each text has, (N,) int64."""
    found = [hashed(words(text)) for text in texts]
    return np.concatenate([np.zeros(0, np.uint64), *found]), np.array([len(f) for f in found], np.int64)


def runs(hashes: np.ndarray, lengths: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of every n words in a row, text after text, (R,) uint64, and how many each text has, (N,) int64.

    A text of fewer than n words has one run, the whole of it; a text without words has none.

    Args:
        hashes, lengths: as `hashed_words` gives them.
    """
    held = np.where(lengths > 0, np.maximum(lengths, n), 0)
    begins = np.cumsum(held) - held
    padded = np.zeros(int(held.sum()), np.uint64)
    padded[stretches(begins, lengths)] = hashes
    counts = np.where(held > 0, held - n + 1, 0)
    at = stretches(begins, counts)
    found = np.zeros(len(at), np.uint64)
    for k in range(n):
        found = found * _FACTOR + padded[at + k]
    return mixed(found), counts


def stretches(begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The positions begins[i] to begins[i] + lengths[i] - 1 of all i, one after another, int64."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    at: np.ndarray = np.arange(total) + np.repeat(begins - (ends - lengths), lengths)
    return at


def mixed(x: np.ndarray) -> np.ndarray:
    """Spreads every bit over all: the finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return x


def shingles(hashes: np.ndarray, lengths: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Each text's set of runs, ascending, the sets one after another, (S,) uint32, and their sizes, (N,) int64.

    Of a hash 32 bits are kept: two texts of 10,000 words share about 0.02 runs by chance.
    """
    found, counts = runs(hashes, lengths, n)
    text = np.repeat(np.arange(len(lengths), dtype=np.uint64), counts)
    keys = np.sort((text << np.uint64(32)) | (found >> np.uint64(32)))
    keys = keys[np.append(True, keys[1:] != keys[:-1])[: len(keys)]]
    sizes = np.bincount((keys >> np.uint64(32)).astype(np.int64), minlength=len(lengths))
    return keys.astype(np.uint32), sizes


def repeated_share(text: str) -> float:
    """The share of a text's characters that stand in lines which came before in it; blank lines do not count.

    Source: the duplicate line character fraction of Gopher (Rae et al. 2021, https://arxiv.org/abs/2112.11446, A1.1).
    """
    lines = [line for line in map(str.strip, text.split("\n")) if line]
    every = sum(map(len, lines))
    return (every - sum(map(len, set(lines)))) / every if every else 0.0


def spoken(row: Row) -> str:
    """A row's text without what many rows share by design: system prompts and the tools on offer."""
    if isinstance(row, Pair):
        return rows.text(Pair(_without(row.chosen), _without(row.rejected)))
    return rows.text(_without(row) if isinstance(row, Chat | Completion) else row)


def _without(row: Chat | Completion) -> Chat | Completion:
    if isinstance(row, Completion):
        return row
    left = tuple(m for m in row.messages if m.role not in SHARED)
    prompt = sum(m.role not in SHARED for m in row.messages[: row.prompt])
    return replace(row, messages=left, tools=(), prompt=prompt)
