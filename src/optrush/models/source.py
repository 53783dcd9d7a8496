"""Locate a model's files: a folder, a hub id, the built-in tiny model, or a named shape without files. Pure."""

from __future__ import annotations

import copy
import difflib
import json
import os
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from optrush.config import Config, nearest
from optrush.errors import ConfigError, first_line
from optrush.files import check_model_files, parse_json, read_file
from optrush.models.config_json import read_config_json
from optrush.models.shapes import SHAPES
from optrush.tokenizer_files import PATTERNS

CONFIG = ["config.json"]  # patterns of files to download from the hub
TOKENIZER = ["*.json", *PATTERNS]
WEIGHTS = ["*.safetensors", *TOKENIZER]
FILES = [*WEIGHTS, "README.md"]  # files to read or copy
GENERATION = "generation_config.json"


def locate(config: Config, weights: bool = True) -> tuple[Path | None, dict[str, Any]]:
    """Return the model's folder (None: a shape with random weights) and its config.json.

    Args:
        weights: False downloads only config.json from the hub, and the tokenizer if tokens are added; nothing for a
            widely used model, since its sizes are stored here.

    Raises:
        ConfigError: no such folder, shape or hub id; no config.json; not JSON.
    """
    m = config.model
    if (m.path is None) == (m.shape is None):
        raise ConfigError("one of `model.path` and `model.shape`", "both" if m.path else "neither", "give exactly one")
    if m.shape is not None:
        known = {**SHAPES, **_published()}
        if m.shape not in known:
            raise ConfigError(f"`model.shape: {m.shape}`", "no such shape", nearest(m.shape, known, "docs/models.md"))
        return None, copy.deepcopy(known[m.shape])
    assert m.path is not None
    if m.revision is not None and (m.path == "tiny" or Path(m.path).is_dir()):
        found = f"{m.path}, which is not a hub id"
        raise ConfigError(f"`model.revision: {m.revision}`", found, "remove it, or name the model by its hub id")
    if not weights and not m.add_tokens and m.path in _published() and not Path(m.path).exists():
        return None, copy.deepcopy(_published()[m.path])
    folder = _tiny() if m.path == "tiny" else Path(m.path)
    if not folder.is_dir():
        folder = _download(m.path, WEIGHTS if weights else TOKENIZER if m.add_tokens else CONFIG, m.revision)
    check_model_files(folder, FILES)
    file = folder / "config.json"
    if not file.is_file():
        if (folder / "adapter_config.json").is_file():
            do = "name the run's `model`, which contains it, or merge it with `optrush export RUN --out DIR`"
            raise ConfigError(f"the model {folder}", "an adapter, without the weights of its base", do)
        exported = folder / "model"
        do = f"name {exported}" if (exported / "config.json").is_file() else "name a Hugging Face model's folder"
        raise ConfigError(f"the model {folder}", "a folder without config.json", do)
    return folder, read_config_json(file)


@cache
def _published() -> dict[str, dict[str, Any]]:
    """Return the sizes and flags of widely used models by hub id, so that a plan needs no network."""
    models: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "models.json").read_text("utf-8"))
    return models


def known_config(path: str | None) -> dict[str, Any] | None:
    """Return the config.json of a folder or a widely used model, without a network; None: not available."""
    file = Path(path or "") / "config.json"
    if path and file.is_file():
        return read_config_json(file)
    return copy.deepcopy(_published().get(path or ""))


def shapes_of(model_type: str) -> dict[str, dict[str, Any]]:
    """Return the named shapes of a family; widely used models if it has none."""
    for known in (SHAPES, _published()):
        if shapes := {name: hf for name, hf in known.items() if hf["model_type"] == model_type}:
            return shapes
    return {}


def _tiny() -> Path:
    """Return the built-in model's folder, written at first use."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "optrush"
    folder = cache / "tiny-1"
    if not folder.is_dir():
        from optrush.models import tiny  # imports torch

        cache.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix="tiny-", dir=cache))
        tiny.write_tiny(fresh)
        try:
            fresh.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was first
                raise
    return folder


def _download(name: str, patterns: list[str], revision: str | None = None) -> Path:
    """Download a model by its hub id: matching files, never its code or its pickles."""
    asked = f"the model {name}"
    if name.count("/") != 1 or name.startswith((".", "/", "~", "shape:")):
        shape = name.removeprefix("shape:")  # the form of `optrush init --model`
        like = "" if "/" in name else _stored_like(name)
        do = f"name a Hugging Face model's folder, a hub id{f' such as `{like}`' * ('/' in like)}, or `tiny`"
        if shape != name or shape in SHAPES:
            do = f"for random weights write `model: {{shape: {shape}}}`; else {do}"
        raise ConfigError(asked, "no such folder", do)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except GatedRepoError:
        do = f"accept them at https://huggingface.co/{name} and set HF_TOKEN"
        raise ConfigError(asked, "this token has not accepted its owner's terms", do) from None
    except (RepositoryNotFoundError, HFValidationError):
        found = "no such folder, and no such model on the hub, or a private one"
        raise ConfigError(asked, found, "check the name, or set HF_TOKEN to your access token") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        found = f"no such folder, not in the cache, and the hub cannot be reached: {first_line(error)}"
        do = f"check the name and the network; or run `hf download {name}` on a connected machine, and name the folder"
        do += " (a plan only needs its config.json)"
        if (meant := _stored_like(name)) and meant != name:
            what = f"the hub id `{meant}`" if meant in _published() else f"`optrush plan shape:{meant}`"
            do = f"did you mean {what}, whose shape is built in? Else {do}"
        elif near := difflib.get_close_matches(name, _published(), 3, 0.6):
            do += f"; built-in shapes: {', '.join(near)} and others (docs/models.md)"
        raise ConfigError(asked, found, do) from None


def _stored_like(name: str) -> str:
    """Return the widely used model or shape with a similar name and the same numbers; empty: none."""
    last = {known.rpartition("/")[2].lower(): known for known in (*SHAPES, *_published())}
    wanted = name.rpartition("/")[2].lower()
    close = difflib.get_close_matches(wanted, last, 5, 0.85)
    same = [c for c in close if re.findall(r"\d+", c) == re.findall(r"\d+", wanted)]
    words = re.findall(r"[a-z]+", wanted)  # a different word means a different model
    alike = (c for c in same if all(difflib.get_close_matches(w, words, 1) for w in re.findall(r"[a-z]{2,}", c)))
    return next((last[c] for c in alike), "")


def read_generation(folder: Path) -> dict[str, Any]:
    """Return a folder's generation_config.json; an empty object if there is none.

    Raises:
        ConfigError: it is not a JSON object.
    """
    file = folder / GENERATION
    if not file.is_file():
        return {}
    try:
        settings = parse_json(read_file(file))
    except ValueError as error:
        raise ConfigError(f"{file}", f"not JSON: {error}", "download the model again") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{file}", "not a JSON object", "download the model again")
    return settings


def check_positions(hf: dict[str, Any], length: int, asked: str) -> None:
    """Raise ConfigError for rows longer than the positions in a model's config.json."""
    positions = hf.get("max_position_embeddings") or hf.get("n_positions")
    if positions is not None and length > positions:
        raise ConfigError(asked, f"a model of {positions} positions", f"set data.too_long and batch.seq: {positions}")


# --- `model.add_tokens`: an embedding's rows after special tokens were added to the tokenizer
#
# The ids come from the tokenizer itself, so that the plan, the data and the model agree. Rows beyond the tokenizer's
# length, which many published embeddings have, are used first; then the embedding grows.

MULTIPLE = 128  # a grown vocabulary is a multiple of it: matmuls then have no partial tile


class Growth(NamedTuple):
    """Changes of embedding and head for new tokens: rows [first, last) become the mean of the rows before `first`."""

    tokens: tuple[str, ...]  # not in the tokenizer before
    known: tuple[str, ...]  # already in the tokenizer: unchanged
    rows: int  # of the published embedding
    first: int
    last: int
    vocab: int  # rows after the change
    length: int = 0  # of the tokenizer with the new tokens: further rows have no token

    @property
    def note(self) -> str:
        """A sentence for the log."""
        if not self.tokens:
            return f"model.add_tokens: the tokenizer has {', '.join(self.known)} already"
        held = f"; the tokenizer has {', '.join(self.known)}" if self.known else ""
        rows = f"the embedding grows from {self.rows} rows to {self.vocab}, a multiple of {MULTIPLE}"
        spare = f"the embedding has rows for them ({self.rows})"
        grown = rows if self.vocab > self.rows else spare
        return f"model.add_tokens: {', '.join(self.tokens)}: {grown}; new rows are the mean of the {self.first}{held}"


def grow(config: Config, folder: Path | None, hf: dict[str, Any]) -> Growth | None:
    """Return the changes for `model.add_tokens`; None: no changes.

    Raises:
        ConfigError: there is no tokenizer, or no vocab_size; a token cannot be added.
        NeedsError: the tokenizer cannot be opened.
    """
    tokens = config.model.add_tokens
    if not tokens:
        return None
    folder = folder if config.model.tokenizer is None else Path(config.model.tokenizer)
    if folder is None:
        do = "set model.tokenizer to a folder that has one"
        raise ConfigError("`model.add_tokens`", f"`model.shape: {config.model.shape}` has no tokenizer", do)
    rows = hf.get("vocab_size")
    if not isinstance(rows, int):
        raise ConfigError("`model.add_tokens`", "config.json has no vocab_size", "use another model")
    start, fresh = _added(folder, tokens)
    known = tuple(token for token in tokens if token not in fresh)
    if not fresh:
        return Growth((), known, rows, rows, rows, rows, start)
    end = start + len(fresh)
    vocab = rows if end <= rows else -(-end // MULTIPLE) * MULTIPLE
    return Growth(fresh, known, rows, min(start, rows), end if end <= rows else vocab, vocab, end)


@cache
def _added(folder: Path, tokens: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
    """Return the first new token's id (the tokenizer's length if none is new), and the new tokens by id.

    The ids are consecutive.

    Cached, because a plan repeats the call.
    """
    from optrush.data.tokenizer import add_tokens, open_tokenizer

    tokenizer = open_tokenizer(folder)
    fresh = add_tokens(tokenizer, tokens)
    ids = [tokenizer.convert_tokens_to_ids(token) for token in fresh]
    assert ids == list(range(ids[0], ids[0] + len(ids))) if ids else True, "a tokenizer numbers new tokens in turn"
    return (ids[0] if ids else len(tokenizer)), fresh
