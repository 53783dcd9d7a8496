"""Copy a tokenizer's files next to trained weights, unchanged except for added tokens and the run's chat template.

Programs read different files: transformers 5 tokenizer.json, its earlier versions and llama.cpp's converter also
tokenizer.model, vocab.json, merges.txt and added_tokens.json. transformers 5 writes only the first; therefore the files
are copied, and edited as JSON if training changed an entry.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from optrush.files import parse_json, read_file

ENGINE, SETTINGS, SPECIAL, ADDED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
)  # fmt: skip
TEMPLATE = "chat_template.jinja"
OTHER_TEMPLATES = ("chat_template.json", "additional_chat_templates/*.jinja")
PATTERNS = (
    ENGINE, SETTINGS, SPECIAL, ADDED, "vocab.json", "vocab.txt", "merges.txt", "*.model", "*.model.v*", "*.tiktoken",
    "tekken.json", TEMPLATE, *OTHER_TEMPLATES,
)  # fmt: skip
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")  # for images
WAYS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # fields of an added token besides its text

# Limits of a tokenizer; published ones have files of 40 MiB, 300,000 tokens, and parts that preserve a text's length.
MOST_FILE_bytes, MOST_ID, MOST_GROWTH, MOST_ITEMS = 128 << 20, (1 << 22) - 1, 64, 1000
MOST_TEXT_chars = {"prepend": 1000, "precompiled_charsmap": 4 << 20, "": 1 << 14}  # by key
LIGHT_bytes, LIGHT_PARTS = 48 << 20, 4  # up to these, checks of sizes suffice without a trial process
READER_bytes, READER_s = 1 << 30, 20  # the trial process's memory, plus 40 times its files', and processor time
PROBE = "".join(map(chr, [*range(32, 127), *range(160, 256), *range(0x4E00, 0x4E10)])) + "a" * 1000 + " \n" * 50

Entry = dict[str, Any]  # an added token in the format of tokenizer_config.json


def tokenizer_files(folder: Path) -> list[str]:
    """Return the names of a folder's tokenizer files, relative to it."""
    names = (path.relative_to(folder).as_posix() for path in [*folder.glob("*"), *folder.glob("*/*")] if path.is_file())
    return sorted(name for name in names if any(fnmatch(name, pattern) for pattern in PATTERNS))


def check_sizes(folder: Path) -> bool:
    """Check ids and lengths in a folder's tokenizer files before a library allocates memory by them.

    Returns:
        Whether the sizes are too large to trust, so that `try_reading` is needed.

    Raises:
        ValueError: a size beyond every published tokenizer's, or invalid JSON.
    """
    sizes = {name: (folder / name).stat().st_size for name in tokenizer_files(folder)}
    for name, size in sizes.items():
        if size > MOST_FILE_bytes:
            raise ValueError(f"{name} has {size:,} bytes; the limit is {MOST_FILE_bytes:,}")
    return sum(sizes.values()) > LIGHT_bytes or _check_entries(folder)


def _check_entries(folder: Path) -> bool:
    """Return whether normalization may make texts too long; raise ValueError for a size or id beyond its limit."""
    decoder = read_object(folder / SETTINGS).get("added_tokens_decoder")
    tables: list[Any] = [read_object(folder / ADDED), read_object(folder / "vocab.json")]
    tables += [{i: int(i) for i in decoder if i.isdecimal()}] if isinstance(decoder, dict) else []
    times, unproven = 1.0, 0  # growth of a text by replacements; parts of unknown growth
    left: list[tuple[str, Any]] = [("", read_object(folder / ENGINE))]
    while left:
        key, value = left.pop()
        if key == "vocab":
            tables.append(value)
        elif isinstance(value, str):
            if len(value) > (most := MOST_TEXT_chars.get(key, MOST_TEXT_chars[""])):
                raise ValueError(f"{len(value):,} characters under {key!r}; the limit is {most:,}")
        elif isinstance(value, dict | list) and key != "merges":
            if len(value) > MOST_ITEMS and key != "added_tokens":
                raise ValueError(f"{len(value):,} entries under {key!r}; the limit is {MOST_ITEMS:,}")
            if isinstance(value, dict) and value.get("type") in ("Replace", "Precompiled"):
                pattern = value.get("pattern")
                literal = pattern.get("String") if isinstance(pattern, dict) else None
                times *= max(1, len(str(value.get("content"))) / (len(literal) if literal else 1))
                unproven += 0 if literal else LIGHT_PARTS + 1 if value["type"] == "Precompiled" else 1
            left += value.items() if isinstance(value, dict) else [(key, each) for each in value]
        elif key in ("id", "ids", "sep", "cls"):
            tables.append({key: value})
    if times > MOST_GROWTH:
        raise ValueError(f"its replacements make a text {times:,.0f} times as long; the limit is {MOST_GROWTH}")
    for token, i in (pair for table in tables if isinstance(table, dict) for pair in table.items()):
        if isinstance(i, int) and i > MOST_ID:
            raise ValueError(f"the id {i:,} of {token[:60]!r}; the limit is {MOST_ID:,}")
    return unproven > LIGHT_PARTS


def try_reading(folder: Path, _: object = None) -> str:
    """Load a tokenizer and encode a probe text in this process, whose memory and time are limited from now on.

    Returns a message about what is too large; "": nothing, or the files do not load, which is reported elsewhere.
    """
    from tokenizers import Tokenizer

    most_bytes = READER_bytes + 40 * sum((folder / name).stat().st_size for name in tokenizer_files(folder))
    most_bytes += int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()  # its initial size

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # output of a library's abort
    for limit, most in ((resource.RLIMIT_AS, most_bytes), (resource.RLIMIT_CPU, READER_s), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    try:
        _check_entries(folder)
        engine = Tokenizer.from_file(str(folder / ENGINE))
        engine.no_truncation()
        engine.no_padding()
        made = len(engine.encode(PROBE).ids)
    except MemoryError:
        raise
    except ValueError as error:
        return f"{error}"
    except Exception:
        return ""
    return f"it makes {made:,} tokens of {len(PROBE):,} characters" if made > MOST_GROWTH * len(PROBE) else ""


def copy_processor(source: Path, target: Path) -> None:
    """Copy a folder's image processor files, if any."""
    for name in PROCESSORS:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def copy_tokenizer(
    source: Path, target: Path, tokenizer: Any = None, added: Sequence[str] = (), template: str | None = None
) -> None:
    """Copy the tokenizer files of a folder, with added tokens and another chat template.

    Args:
        target: an existing folder.
        tokenizer: transformers' tokenizer with `added`; None without added tokens.
        added: special tokens that the run added or made special.
        template: the run's chat template in place of the folder's; None: the folder's.

    Raises:
        OSError: a file cannot be read or written.
    """
    names = tokenizer_files(source)
    for name in names:
        if template is None or not any(fnmatch(name, pattern) for pattern in OTHER_TEMPLATES):
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, target / name)
    if added:
        _add(target, names, _entries(target, tokenizer, added))
    if template is not None:
        (target / TEMPLATE).write_text(template, encoding="utf-8", newline="")
        if "chat_template" in (settings := read_object(target / SETTINGS)):
            _write(target / SETTINGS, settings, {**settings, "chat_template": template})


def _entries(target: Path, tokenizer: Any, added: Sequence[str]) -> dict[int, Entry]:
    """Return the tokens to write by id: the run's, and those that transformers adds on loading.

    The latter have ids before the run's (Gemma's mask, Qwen's end of text). Readers number tokens consecutively: with a
    gap in the list, the run's tokens would get other ids.
    """
    engine, settings = read_object(target / ENGINE), read_object(target / SETTINGS)
    words = (engine.get("model") or {}).get("vocab") or ()
    known = {*words} if isinstance(words, dict) else {word for word, _ in words}
    known |= {token["content"] for token in engine.get("added_tokens") or ()} | read_object(target / ADDED).keys()
    known |= {token["content"] for token in (settings.get("added_tokens_decoder") or {}).values()}
    entries: dict[int, Entry] = {}
    for i, token in tokenizer.added_tokens_decoder.items():
        if str(token) in added or (engine and str(token) not in known):
            entries[i] = {"content": str(token), **{way: getattr(token, way) for way in WAYS}}
    return entries


def _add(target: Path, names: Sequence[str], entries: Mapping[int, Entry]) -> None:
    """Add tokens to each file that lists added tokens, by id."""
    engine, settings = read_object(target / ENGINE), read_object(target / SETTINGS)
    if engine:
        listed = {token["id"]: token for token in engine.get("added_tokens") or ()}
        listed |= {i: {"id": i, **entry} for i, entry in entries.items()}
        _write(target / ENGINE, engine, {**engine, "added_tokens": [listed[i] for i in sorted(listed)]})
    if "added_tokens_decoder" in settings:
        decoder = {**settings["added_tokens_decoder"], **{str(i): entry for i, entry in entries.items()}}
        _write(target / SETTINGS, settings, {**settings, "added_tokens_decoder": decoder})
    # llama.cpp's converter reads tokenizer.model, and later tokens from the decoder above or from this list.
    if ADDED in names or ("added_tokens_decoder" not in settings and any(name.endswith(".model") for name in names)):
        ids = read_object(target / ADDED)
        _write(target / ADDED, ids, {**ids, **{entry["content"]: i for i, entry in entries.items()}})
    if not engine and "added_tokens_decoder" not in settings:
        special = read_object(target / SPECIAL)
        more = list(special.get("additional_special_tokens") or ())
        contents = {token["content"] if isinstance(token, dict) else token for token in more}
        more += [entry["content"] for entry in entries.values() if entry["content"] not in contents]
        _write(target / SPECIAL, special, {**special, "additional_special_tokens": more})


def read_object(path: Path) -> dict[str, Any]:
    """Return a file's JSON object; empty if it is missing or not an object."""
    value = parse_json(read_file(path)) if path.is_file() else None
    return value if isinstance(value, dict) else {}


def _write(path: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Write a JSON object if it differs from the one read."""
    if new != old:
        path.write_text(json.dumps(new, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
