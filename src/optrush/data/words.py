"""Encode texts word by word, like byte-level tokenizers: a word's ids are looked up, and computed once by the engine.

Such an engine splits a text at added tokens, splits the rest by regular expressions, and merges the bytes of each word
independently. So a word has the same ids everywhere. Here Python's `re` does the splitting, in a quarter of the
engine's time. It handles only texts of CHARACTERS, on whose classes all versions of Unicode agree. The engine encodes
all other texts, and every text if the tokenizer has unsupported rules. The results are compared with the engine's on
random texts before the first use, and on the first texts of the data.
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
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # ByteLevel's default rule
MOST_WORDS, LONGEST_WORD = 1 << 17, 64  # number of words in memory; characters per word
FIRST_TEXTS = 64  # texts of the data that are compared with the engine
PROBES, PROBE_chars = 1000, 24
# The characters that replace bytes in a byte-level vocabulary: printable ones stay.
PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
BYTES = dict(zip([b for b in range(256) if b not in PRINTABLE], range(256, 512)))

Split = Callable[[str], Iterable[str]]


def byte_level(text: str) -> str:
    """Return a text in the alphabet of a byte-level vocabulary: one character per byte."""
    return text.encode().decode("latin-1").translate(BYTES)


class _Ids(dict[str, Sequence[int]]):
    """The ids of each word and each added token."""

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
    """The words of an engine. `source` is the engine's JSON; raises ValueError for unsupported rules."""

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
        """Return a text's ids, without special tokens around it; None if the engine must encode it."""
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
    """Return the expressions that split a text, in order; raises ValueError for other kinds of splitting."""
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
    """Return a function that splits a text into the matches of a rule and the text between them."""
    inside, parts = False, list[str]()
    if "&&" in rule or re.search(r"\[\^?\[|\[:", rule):
        raise ValueError("classes in a class")
    if re.search(r"\{[\d,]+\}[+?]", rule):  # a repeated count in the engine, a possessive or lazy one in `re`
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
        pattern = re.compile(f"({''.join(parts)})")
    except (re.error, FutureWarning) as error:
        raise ValueError(f"a rule {rule}") from error
    if pattern.groups > 1:
        raise ValueError("a group")
    # If the rule matches every character, checked for each, no text is left between matches.
    complete = all(sum(map(len, pattern.findall(a + b))) == 2 for a, b in pairwise(CHARACTERS + CHARACTERS[::-1]))
    return pattern.findall if complete else lambda text: filter(None, pattern.split(text))


# --- Facts about tokens in an engine's JSON.

LOSS = 1 << 40  # the width in bytes of the unknown token
WRITTEN = "LNPS"  # classes of visible characters: letters, numbers, punctuation, symbols


def widths(source: dict[str, Any]) -> np.ndarray | None:
    """Return the number of bytes of text that each token covers, (V,); None if tokens do not consist of its bytes.

    With these, texts are tokenized without offsets, which saves a quarter of the time. `source` is the engine's JSON.
    """
    *splits, level = (source["pre_tokenizer"] or {}).get("pretokenizers", [source["pre_tokenizer"] or {"type": ""}])
    plain = level["type"] == "ByteLevel" and not level["add_prefix_space"]
    plain &= all(s["type"] in ("Split", "Digits") for s in splits) and source["model"]["type"] == "BPE"
    words = source["model"]["vocab"] if plain and composes(source) is not None else {}
    if not words:
        return None
    result = np.zeros(1 + max([*words.values(), *(token["id"] for token in source["added_tokens"])]), np.int64)
    result[list(words.values())] = list(map(len, words))  # one character per byte
    for token in source["added_tokens"]:
        result[token["id"]] = len(token["content"].encode())
    unknown = unknown_id(source)
    if unknown is not None and unknown >= 0:
        result[unknown] = LOSS  # so that the widths never add up to the length of a text with a lost byte
    return result


class Held(dict[str, bool]):
    """Whether an engine that drops characters has tokens for a character, or the character is invisible."""

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
    """Return the id for characters without a token, -1 if they are dropped; None if bytes encode every character.

    `source` is the engine's JSON.
    """
    from tokenizers import pre_tokenizers

    model, steps = source["model"], (source["pre_tokenizer"] or {})
    vocab = model["vocab"]
    ids: dict[str, int] = vocab if isinstance(vocab, dict) else {piece: i for i, (piece, _) in enumerate(vocab)}
    if any(step.get("type") == "ByteLevel" for step in steps.get("pretokenizers", [steps])):
        complete = ids.keys() >= set(pre_tokenizers.ByteLevel.alphabet())
    else:
        complete = bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in ids for byte in range(256))
    unknown = model["unk_id"] if model.get("unk_id") is not None else ids.get(model.get("unk_token") or "", -1)
    return None if complete else int(unknown)


def composes(source: dict[str, Any]) -> bool | None:
    """Return whether an engine normalizes texts to their composed form (NFC); None if it normalizes otherwise."""
    return {None: False, "NFC": True}.get((source["normalizer"] or {"type": None})["type"])
