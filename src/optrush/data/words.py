"""Encode texts word by word, as byte-level tokenizers do: a word's ids are looked up, and made once by the engine.

Such an engine splits a text at its added tokens, splits the rest by regular expressions, and merges the bytes of each
word alone. So a word has the same ids everywhere. Python's own expressions split here; that takes a quarter of the
engine's time. Only texts of CHARACTERS are split so: all versions of Unicode agree on their classes. Any other text is
left to the engine, and so is a tokenizer with rules that are not known here. Both are compared on random texts before
the first use, and on the first texts of the data.
"""

from __future__ import annotations

import random
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHARACTERS = "\t\n\r" + "".join(map(chr, (*range(32, 127), *range(160, 256)))) + "–—‘’“”•…€−"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # ByteLevel's own rule
MOST_WORDS, LONGEST_WORD = 1 << 17, 64  # in memory; characters of one
FIRST_TEXTS = 64  # of the data, that are compared with the engine
PROBES, PROBE_chars = 1000, 24
# The characters that texts of a byte-level vocabulary have in place of bytes: printable ones stand for themselves.
PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
BYTES = dict(zip([b for b in range(256) if b not in PRINTABLE], range(256, 512)))

Split = Callable[[str], Iterable[str]]


def byte_level(text: str) -> str:
    """Return a text as a byte-level vocabulary writes it: a character for each byte."""
    return text.encode().decode("latin-1").translate(BYTES)


class _Ids(dict[str, Sequence[int]]):
    """The ids of each word, and of each added token."""

    def __init__(self, engine: Tokenizer, added: dict[str, Sequence[int]]) -> None:
        super().__init__(added)
        self._added, self._model = added, engine.model

    def __missing__(self, word: str) -> Sequence[int]:
        ids = tuple([token.id for token in self._model.tokenize(byte_level(word))])
        if len(word) <= LONGEST_WORD:
            if len(self) >= MOST_WORDS:
                self.clear()
                self.update(self._added)
            self[word] = ids
        return ids


class Words:
    """The words of an engine. `source` is the engine's JSON; raises ValueError for rules that are not known here."""

    def __init__(self, engine: Tokenizer, source: dict[str, Any]) -> None:
        model, normalizer = source["model"], source["normalizer"] or {"type": "NFC"}  # which changes no CHARACTERS
        known = model["type"] == "BPE" and not model["dropout"] and normalizer["type"] == "NFC"
        added = [token for token in source["added_tokens"] if token["content"]]
        swallowing = any(token[way] for token in added for way in ("lstrip", "rstrip", "single_word"))
        if not known or swallowing or len({token["normalized"] for token in added}) > 1 or engine.encode_special_tokens:
            raise ValueError("other rules")
        longest = sorted((token["content"] for token in added), key=lambda text: (-len(text), text))
        self._engine, self._added = engine, re.compile(f"({'|'.join(map(re.escape, longest)) or '(?!)'})")
        self._other = re.compile(f"[^{re.escape(CHARACTERS)}]")
        self._ids = _Ids(engine, {token["content"]: (token["id"],) for token in added})
        first, *self._further = [_splitter(rule) for rule in _rules(source["pre_tokenizer"] or {})]
        self._split = self._split_further if self._further else first
        self._first = first
        self._unsure = FIRST_TEXTS
        draw = random.Random(0)
        often = [*"aB1 \n' .é,", *"stremvldTL", *longest[:8]]
        for _ in range(PROBES):
            text = "".join(draw.choices([*CHARACTERS, *often * 16], k=draw.randint(1, PROBE_chars)))
            pieces = engine.pre_tokenizer.pre_tokenize_str(text)
            if [a for a, _ in pieces] != [byte_level(word) for word in self._split(text)]:
                raise ValueError(f"other words of {text!r}")
            if engine.encode(text, add_special_tokens=False).ids != self._encode(text):
                raise ValueError(f"other ids of {text!r}")

    def encode(self, text: str) -> list[int] | None:
        """Return a text's ids without special tokens around it; None: the engine must encode it."""
        if self._unsure < 0 or self._other.search(text):
            return None
        ids = self._encode(text)
        if self._unsure:
            self._unsure -= 1
            if ids != self._engine.encode(text, add_special_tokens=False).ids:
                self._unsure = -1
                return None
        return ids

    def _encode(self, text: str) -> list[int]:
        words = list[str]()
        for n, part in enumerate(self._added.split(text)):
            words += [part] if n % 2 else self._split(part)
        return list(chain.from_iterable(map(self._ids.__getitem__, words)))

    def _split_further(self, text: str) -> Iterable[str]:
        words = self._first(text)
        for split in self._further:
            words = chain.from_iterable(map(split, words))
        return words


def _rules(source: dict[str, Any]) -> list[str]:
    """Return the expressions that split a text, one after the other; raises ValueError for other ways of splitting."""
    *steps, last = source.get("pretokenizers", [source])
    if last.get("type") != "ByteLevel" or last["add_prefix_space"] or not (steps or last["use_regex"]):
        raise ValueError("not a byte-level tokenizer, or without words")
    rules = [GPT2] if last["use_regex"] else []
    for step in reversed(steps):
        if step["type"] == "Digits":
            rules.insert(0, r"\p{N}" if step["individual_digits"] else r"\p{N}+")
        elif step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            rules.insert(0, step["pattern"].get("Regex") or re.escape(step["pattern"]["String"]))
        else:
            raise ValueError(f"a rule {step}")
    return rules


def _splitter(rule: str) -> Split:
    """Return a function that splits a text into matches of the rule and the text between them."""
    inside, parts = False, list[str]()
    if "&&" in rule or re.search(r"\[\^?\[|\[:", rule):
        raise ValueError("classes in a class")
    if re.search(r"\{[\d,]+\}[+?]", rule):  # a repeated count there, of a possessive or lazy one here
        raise ValueError("a count with a sign")
    for match in re.finditer(r"\\([pP])\{(\w+)\}|\\.|.", rule, re.DOTALL):
        text = match[0]
        if match[1]:
            kind = match[1] == "p"
            if not re.fullmatch("[A-Z][a-z]?", match[2]):
                raise ValueError(f"a class {text}")
            of = [c for c in CHARACTERS if unicodedata.category(c).startswith(match[2]) is kind]
            text = re.escape("".join(of)) if inside else f"[{re.escape(''.join(of))}]" if of else "(?!)"
        else:
            inside = text == "[" or (inside and text != "]")
        parts.append(text)
    try:
        found = re.compile(f"({''.join(parts)})")
    except (re.error, FutureWarning) as error:
        raise ValueError(f"a rule {rule}") from error
    if found.groups > 1:
        raise ValueError("a group")
    # There is no text between matches if the rule takes any character, tried at each.
    whole = all(sum(map(len, found.findall(a + b))) == 2 for a, b in pairwise(CHARACTERS + CHARACTERS[::-1]))
    return found.findall if whole else lambda text: filter(None, found.split(text))


# --- Facts about tokens in an engine's JSON.

LOSS = 1 << 40  # the width in bytes of the token that stands for bytes without one
WRITTEN = "LNPS"  # classes of characters that say something: letters, numbers, punctuation, symbols


def widths(source: dict[str, Any]) -> np.ndarray | None:
    """Return how many bytes of a text each token covers, (V,); None if tokens are not made of its own bytes.

    Texts are then tokenised without offsets, which takes a quarter less time. `source` is the engine's JSON.
    """
    *splits, level = (source["pre_tokenizer"] or {}).get("pretokenizers", [source["pre_tokenizer"] or {"type": ""}])
    plain = level["type"] == "ByteLevel" and not level["add_prefix_space"]
    plain &= all(s["type"] in ("Split", "Digits") for s in splits) and source["model"]["type"] == "BPE"
    words = source["model"]["vocab"] if plain and composes(source) is not None else {}
    if not words:
        return None
    found = np.zeros(1 + max([*words.values(), *(token["id"] for token in source["added_tokens"])]), np.int64)
    found[list(words.values())] = list(map(len, words))  # a character a byte
    for token in source["added_tokens"]:
        found[token["id"]] = len(token["content"].encode())
    unknown = unknown_id(source)
    if unknown is not None and unknown >= 0:
        found[unknown] = LOSS  # so that the widths of a text with a lost byte never sum up to its length
    return found


class Held(dict[str, bool]):
    """Whether an engine that leaves characters out has tokens for one, or it is none that is written."""

    def __init__(self, engine: Tokenizer, by_bytes: bool) -> None:
        super().__init__()
        self._engine, self._by_bytes = engine, by_bytes

    def __missing__(self, char: str) -> bool:
        text = char if self._engine.normalizer is None else self._engine.normalizer.normalize_str(char)
        pieces = byte_level(text) if self._by_bytes else text
        self[char] = unicodedata.category(char)[0] not in WRITTEN or all(map(self._known, pieces))
        return self[char]

    def _known(self, piece: str) -> bool:
        return self._engine.token_to_id(piece) is not None


def unknown_id(source: dict[str, Any]) -> int | None:
    """Return the id that stands for characters without a token, -1 if they vanish; None: each has tokens, of its bytes.

    `source` is the engine's JSON.
    """
    from tokenizers import pre_tokenizers

    model, steps = source["model"], (source["pre_tokenizer"] or {})
    vocab = model["vocab"]
    ids: dict[str, int] = vocab if isinstance(vocab, dict) else {piece: i for i, (piece, _) in enumerate(vocab)}
    if any(step.get("type") == "ByteLevel" for step in steps.get("pretokenizers", [steps])):
        whole = ids.keys() >= set(pre_tokenizers.ByteLevel.alphabet())
    else:
        whole = bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in ids for byte in range(256))
    unknown = model["unk_id"] if model.get("unk_id") is not None else ids.get(model.get("unk_token") or "", -1)
    return None if whole else int(unknown)


def composes(source: dict[str, Any]) -> bool | None:
    """Return whether an engine writes characters in their composed form (NFC) first; None if it changes others."""
    return {None: False, "NFC": True}.get((source["normalizer"] or {"type": None})["type"])
