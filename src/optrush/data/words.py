"""Text to token ids word by word: what the `tokenizers` library makes of it, in a fraction of its time.

A byte-level BPE cuts a text into words by a regular expression and looks at each word alone. The library spends most of
its time on the cutting and on what it notes of each word. Here Python's own `re` cuts, and what a word becomes is asked
of the library once and remembered.

Two engines of regular expressions agree on the structure of an expression (alternatives in order, greedy repeats, looks
ahead), but not on what a letter is. So of each class in it (`\\p{L}`, `[^\\s\\d]`, a letter in either case) the library
is asked which characters belong there. Nothing is believed: an expression with anything else in it, a tokenizer that
does more than cut, and a text with characters that were not asked about are left to the library; a sample of texts must
come out equal at the beginning, and one of each batch later (chat.py).
"""

from __future__ import annotations

import json
import random
import re
import unicodedata
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ENOUGH_WORDS = 100_000  # to know whether they come again
MOST_WORDS, LONGEST_WORD_chars = 1 << 17, 64  # that are remembered: some 30 MB
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # that the library has built in
FIRST_PICTURE, LAST_PICTURE = 0x1F300, 0x1FAFF  # emoji; of the characters behind the first 65,536 only these are asked
SAMPLES, SAMPLE_chars = 24, 160
ATOM = re.compile(
    r"""(?P<set>\[\^?(?:\\[pP]\{\^?\w+\}|\\[^pP]|[^\[\]\\&]|&(?!&))+\] | \\[pP]\{\^?\w+\} | \\[sSrnt] | \\[^\w])
      | (?P<fold>\(\?i:)
      | (?P<open>\(\?[:!=] | \((?!\?))
      | (?P<close>\))
      | (?P<more>[?*+][?+]? | \{\d+(?:,\d*)?\}(?![?*+]) | \|)
      | (?P<plain>[^\\\[\](){}?*+|^$.])""",
    re.VERBOSE,
)


class Unknown(Exception):
    """The library must do it itself; why."""


class Words:
    """The ids that a byte-level BPE makes of texts; Unknown where they cannot be told without the library.

    Args:
        engine: the tokenizer, of which the model is known to be a byte-level BPE of all bytes (chat.py).
    """

    def __init__(self, engine: Tokenizer) -> None:
        self._composes = engine.normalizer is not None  # then it is NFC, alone
        if engine.encode_special_tokens or engine.model.dropout:
            raise Unknown("it does not do the same at all times")
        tokens = engine.get_added_tokens_decoder()
        if any(token.lstrip or token.rstrip or token.single_word for token in tokens.values()):
            raise Unknown("a token's neighbours decide about it")
        if not all(unicodedata.is_normalized("NFC", token.content) for token in tokens.values()):
            raise Unknown("a token that is not composed")
        # The library looks for tokens that it does not normalise first, and takes the longest at each place.
        kinds = [[t.content for t in tokens.values() if t.normalized == normalized] for normalized in (False, True)]
        self._marks = [re.compile(f"({_either(kind)})") for kind in kinds if kind]
        self._cuts = _cuts(engine.pre_tokenizer)
        self._around = _around(engine)
        self._known = _Known(engine, {token.content: i for i, token in tokens.items()})
        self._rare = _rare()
        self._asked = 0  # words
        for text in _samples(list(tokens.values())[:8]):
            ids, cut = self.ids(text, special=False), engine.pre_tokenizer.pre_tokenize_str(text)
            if ids is None:
                continue
            if any(match.end() == match.start() for way in self._cuts for match in way.finditer(text)):
                raise Unknown("an expression that matches nothing at some places")
            same = [text[a:b] for _, (a, b) in cut] == self._plain(text)  # ids alone seldom tell where a cut was
            if not same or ids.tolist() != engine.encode(text, add_special_tokens=False).ids:
                raise Unknown("a sample of texts comes out otherwise")
        self._asked = self._known.missed = 0

    def ids(self, text: str, special: bool) -> np.ndarray | None:
        """(n,) int32; None where the library must tell.

        Args:
            special: whether the tokens that the tokenizer writes around a text belong to it.
        """
        if special and self._around is None:
            return None
        composed = text.isascii() or not self._composes or unicodedata.is_normalized("NFC", text)
        if not composed or not (text.isascii() or self._rare.search(text) is None):
            return None
        words = self._words(text)
        self._asked += len(words)
        found = bytearray().join(map(self._known.__getitem__, words))
        if special and self._around is not None:
            before, after = self._around
            found = bytearray().join((before, found, after))
        return np.frombuffer(found, np.int32)

    @property
    def wasteful(self) -> bool:
        """Whether words seldom come again in these texts: then the library alone takes less time."""
        return self._asked > ENOUGH_WORDS and self._known.missed * 4 > self._asked

    def _words(self, text: str) -> list[str]:
        """The words and the added tokens of a text in order."""
        if not self._marks:
            return self._plain(text)
        words: list[str] = []
        first, *second = self._marks
        for n, part in enumerate(first.split(text)):
            if n % 2:
                words.append(part)
            elif second:
                for k, inner in enumerate(second[0].split(part)):
                    words += [inner] if k % 2 else self._plain(inner)
            else:
                words += self._plain(part)
        return words

    def _plain(self, text: str) -> list[str]:
        """The words of a text without added tokens."""
        if len(self._cuts) == 1:  # as below, but faster, where the matches are all of the text
            words = self._cuts[0].findall(text)
            if sum(map(len, words)) == len(text):
                return words
        words = [text] if text else []
        for cut in self._cuts:  # what a cut does not match stays a word
            words = [word for part in words for word in cut.split(part) if word]
        return words


class _Known(dict[str, bytes]):
    """What words and added tokens become: the bytes of their ids (int32), asked of the library when first seen."""

    def __init__(self, engine: Tokenizer, added: dict[str, int]) -> None:
        from tokenizers import pre_tokenizers

        self._model = engine.model
        self._spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
        self._added = {content: _bytes([i]) for content, i in added.items()}
        self.missed = 0  # words that the library was asked for
        super().__init__(self._added)

    def __missing__(self, word: str) -> bytes:
        if not word:
            return b""
        self.missed += 1
        ((spelled, _),) = self._spelled(word)
        made = _bytes([token.id for token in self._model.tokenize(spelled)])
        if len(word) <= LONGEST_WORD_chars:
            if len(self) >= MOST_WORDS:
                self.clear()
                self.update(self._added)
            self[word] = made
        return made


def _bytes(ids: list[int]) -> bytes:
    return np.array(ids, np.int32).tobytes()


def _either(texts: list[str]) -> str:
    """An expression for any of the texts, the longest at each place."""
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))


def _cuts(part: Any) -> list[re.Pattern[str]]:
    """How a pre-tokenizer cuts, step after step: expressions of one group each; Unknown where it does anything else."""
    state = json.loads(part.__getstate__())
    steps = state["pretokenizers"] if state["type"] == "Sequence" else [state]
    cuts: list[re.Pattern[str]] = []
    for n, step in enumerate(steps):
        kind = step.pop("type")
        if kind == "ByteLevel" and n == len(steps) - 1 and not step["add_prefix_space"]:
            cuts += [_translated(GPT2)] if step["use_regex"] else []
            return cuts
        if kind == "Digits":
            cuts.append(re.compile(f"({_digits()}{'' if step['individual_digits'] else '+'})"))
        elif kind == "Split" and step["behavior"] == "Isolated" and not step["invert"] and "Regex" in step["pattern"]:
            cuts.append(_translated(step["pattern"]["Regex"]))
        else:
            break
    raise Unknown("it does more than cut")


def _around(engine: Tokenizer) -> tuple[bytes, bytes] | None:
    """The ids that the tokenizer writes before and behind a text; None where that cannot be told."""
    found = set()
    for text in ("a", "b, 1"):
        plain, whole = engine.encode(text, add_special_tokens=False).ids, engine.encode(text).ids
        at = [i for i in range(len(whole)) if whole[i : i + len(plain)] == plain]
        if len(at) != 1:
            return None
        found.add((_bytes(whole[: at[0]]), _bytes(whole[at[0] + len(plain) :])))
    return found.pop() if len(found) == 1 else None


# --- what the library's regular expressions mean


@cache
def _translated(source: str) -> re.Pattern[str]:
    """An expression of the library as one of Python with one group around it; Unknown where that cannot be."""
    parts, folds, run, at = list[str](), [False], "", 0
    while at < len(source):
        match = ATOM.match(source, at)
        if match is None:
            raise Unknown(f"{source[at:]} in its expression")
        at, kind, text = match.end(), match.lastgroup, match[0]
        run = run + text if kind == "plain" and folds[-1] else ""
        if kind == "set" and not folds[-1]:
            text = _asked(text)
        elif kind == "set":
            raise Unknown("a class in either case")
        elif kind == "plain":
            text = _asked(f"(?i:{re.escape(text)})") if folds[-1] else re.escape(text)
            if len(run) > 1 and _folded(run):
                raise Unknown(f"{run} in either case, which one character can be")
        elif kind == "close" and len(folds) > 1:
            folds.pop()
        elif kind in ("open", "fold"):
            folds.append(folds[-1] or kind == "fold")
            text = "(?:" if text in ("(", "(?i:") else text
        parts.append(text)
    try:
        made = re.compile(f"({''.join(parts)})")
    except re.error as error:
        raise Unknown(str(error)) from None
    if made.match("") is not None:
        raise Unknown("an expression that matches nothing")
    return made


@cache
def _every() -> tuple[str, str]:
    """The characters that are asked about, of the first 65,536 and behind; those that a text can hold and that have a
    meaning (an unknown one could compose with its neighbours)."""
    from_to = (range(0x10000), range(FIRST_PICTURE, LAST_PICTURE + 1))
    low, pictures = ("".join(c for c in map(chr, of) if unicodedata.category(c) not in ("Cn", "Cs")) for of in from_to)
    return low, pictures


@cache
def _rare() -> re.Pattern[str]:
    """A character that was not asked about."""
    return re.compile(f"[^{_ranges(''.join(_every()))}]")


@cache
def _asked(atom: str) -> str:
    """A class of Python's with the characters that an expression for one character matches in the library."""
    from tokenizers import Regex, pre_tokenizers

    low, pictures = _every()
    try:
        left = pre_tokenizers.Split(Regex(f"(?:{atom})+"), "removed").pre_tokenize_str(low + pictures)
    except Exception as error:  # whatever the library says of an expression
        raise Unknown(str(error)) from None
    without = set("".join(piece for piece, _ in left))
    return _class([c for c in low if c not in without], [c for c in pictures if c not in without])


@cache
def _digits() -> str:
    """A class of the characters that the library takes for digits."""
    from tokenizers import pre_tokenizers

    low, pictures = _every()
    pieces = pre_tokenizers.Digits(individual_digits=False).pre_tokenize_str(f"a{'a'.join(low + pictures)}a")
    digits = "".join(piece for piece, _ in pieces if "a" not in piece)
    return _class([c for c in low if c in digits], [c for c in pictures if c in digits])


def _class(low: list[str], pictures: list[str]) -> str:
    # Python looks up the first 65,536 characters in a table, and goes through ranges behind them one by one: there may
    # be one such range.
    if len(pictures) not in (0, len(_every()[1])) or not low + pictures:
        raise Unknown("a class that tells emoji apart, or an empty one")
    more = f"\\U{FIRST_PICTURE:08x}-\\U{LAST_PICTURE:08x}" if pictures else ""
    return f"[{_ranges(''.join(low))}{more}]"


def _ranges(characters: str) -> str:
    """Rising characters as the ranges of a class."""
    codes = np.array([ord(c) for c in characters], np.int64)
    edges = np.flatnonzero(np.diff(codes) != 1)
    first, last = codes[np.r_[0, edges + 1][: len(codes)]], codes[np.r_[edges, len(codes) - 1][: len(codes)]]
    return "".join(f"\\U{a:08x}-\\U{b:08x}" for a, b in zip(first.tolist(), last.tolist(), strict=True))


def _folded(run: str) -> bool:
    """Whether one character can be equal to some letters but for their case, as ß is to ss."""
    return any(character.casefold().endswith(run[-2:].casefold()) for character in _several())


@cache
def _several() -> tuple[str, ...]:
    """The characters that are several when their case is taken off."""
    return tuple(c for c in _every()[0] if len(c.casefold()) > 1)


def _samples(tokens: list[Any]) -> Iterator[str]:
    """Texts of all that makes a difference: letters, digits, marks, white space, tokens, in the oddest orders."""
    draw, (low, pictures) = random.Random(0), _every()
    pools = [list(group) for _, group in groupby(sorted(low, key=unicodedata.category), unicodedata.category)]
    ascii_ = [chr(c) for c in range(128)]
    usual = [*"aeinst  \n.,", "'s", "'LL", "'Re", " the", "\r\n", "   ", "12", "\t", "\u2019s", "é"]
    usual += [token.content for token in tokens]
    for n in range(SAMPLES):
        pool = (usual, ascii_, usual + ascii_ + list(pictures))[n % 3]
        found = [draw.choice(draw.choice(pools) if n % 4 == 3 else pool) for _ in range(SAMPLE_chars)]
        yield unicodedata.normalize("NFC", "".join(found))
