"""Where a model's files are: a folder, a hub id, the built-in tiny model, or a named shape without files. Pure."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from optrush.config import Config, nearest
from optrush.errors import ConfigError
from optrush.models.shapes import SHAPES

CONFIG = ["config.json"]  # what is downloaded of a hub's model
TOKENIZER = ["*.json", "*.jinja", "*.model"]
WEIGHTS = ["*.safetensors", *TOKENIZER]


def locate(run: Config, weights: bool = True) -> tuple[Path | None, dict[str, Any]]:
    """The model's folder (None: a shape with random weights) and its config.json.

    Args:
        weights: False downloads no more of a hub's model than its config.json, and the tokenizer where it changes.

    Raises:
        ConfigError: no such folder, shape or hub id; no config.json; not JSON.
    """
    m = run.model
    if (m.path is None) == (m.shape is None):
        found = "both" if m.path else "neither"
        raise ConfigError("one of `model.path` and `model.shape`", found, "give exactly one")
    if m.shape is not None:
        if m.shape not in SHAPES:
            raise ConfigError(f"`model.shape: {m.shape}`", "no such shape", nearest(m.shape, SHAPES))
        return None, copy.deepcopy(SHAPES[m.shape])
    assert m.path is not None
    folder = _tiny() if m.path == "tiny" else Path(m.path)
    if not folder.is_dir():
        folder = _download(m.path, WEIGHTS if weights else TOKENIZER if m.add_tokens else CONFIG)
    config = folder / "config.json"
    if not config.is_file():
        raise ConfigError(f"the model {folder}", "a folder without config.json", "name a Hugging Face model's folder")
    try:
        hf = json.loads(config.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{config}", f"not JSON: {error}", "download the model again") from None
    if not isinstance(hf, dict):
        raise ConfigError(f"{config}", "no JSON object", "download the model again")
    return folder, hf


def _tiny() -> Path:
    """The built-in model's folder, written at first use."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "optrush"
    folder = cache / "tiny-1"
    if not folder.is_dir():
        from optrush.models import tiny  # brings torch along

        cache.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix="tiny-", dir=cache))
        tiny.write(fresh)
        try:
            fresh.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first
                raise
    return folder


def _download(name: str, wanted: list[str]) -> Path:
    """A model by its hub id: its weights, configuration and tokenizer; never its code or its pickles."""
    asked = f"the model {name}"
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ConfigError(asked, "no such folder", "name a Hugging Face model's folder, a hub id, or `tiny`")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        found = f"no such folder, and the hub did not give it: {type(error).__name__}"
        raise ConfigError(asked, found, "check the name and the network, or name a folder") from None


def check_positions(hf: dict[str, Any], length: int, asked: str) -> None:
    """Refuses what is longer than the positions a model was made for (its config.json says how many)."""
    positions = hf.get("max_position_embeddings") or hf.get("n_positions")
    if positions is not None and length > positions:
        raise ConfigError(asked, f"a model of {positions} positions", f"set data.too_long and batch.seq: {positions}")


# --- `model.add_tokens`: how many rows an embedding must have once its tokenizer has got special tokens. Pure.
#
# The tokenizer itself says which ids they get, so that the plan, the data and the model cannot disagree. Rows beyond
# the tokenizer's length, which many published embeddings have, are taken first; only then does the embedding grow.


MULTIPLE = 128  # a grown vocabulary is a multiple of it: products then have no ragged tile


class Growth(NamedTuple):
    """What new tokens ask of embedding and head: the rows [first, last) become the mean of those before `first`."""

    tokens: tuple[str, ...]  # that the tokenizer did not have
    known: tuple[str, ...]  # that it had: nothing changes for them
    rows: int  # of the published embedding
    first: int
    last: int
    vocab: int  # rows from now on

    @property
    def note(self) -> str:
        """What was done, for people."""
        if not self.tokens:
            return f"model.add_tokens: the tokenizer has {', '.join(self.known)} already"
        held = f"; the tokenizer has {', '.join(self.known)}" if self.known else ""
        rows = f"the embedding grows from {self.rows} rows to {self.vocab}, a multiple of {MULTIPLE}"
        spare = f"the embedding has rows for them ({self.rows})"
        grown = rows if self.vocab > self.rows else spare
        return f"model.add_tokens: {', '.join(self.tokens)}: {grown}; new rows are the mean of the {self.first}{held}"


def grow(config: Config, folder: Path | None, hf: dict[str, Any]) -> Growth | None:
    """What `model.add_tokens` asks for; None: nothing is asked.

    Raises:
        ConfigError: there is no tokenizer to give them to, or no size to grow; a token that cannot be one.
        NeedsError: the tokenizer cannot be opened.
    """
    asked = config.model.add_tokens
    if not asked:
        return None
    folder = folder if config.model.tokenizer is None else Path(config.model.tokenizer)
    if folder is None:
        do = "name a folder that has one: model.tokenizer"
        raise ConfigError("`model.add_tokens`", f"`model.shape: {config.model.shape}` has no tokenizer", do)
    rows = hf.get("vocab_size")
    if not isinstance(rows, int):
        raise ConfigError("`model.add_tokens`", "config.json has no vocab_size to raise", "name another model")
    start, fresh = _added(folder, asked)
    known = tuple(token for token in asked if token not in fresh)
    if not fresh:
        return Growth((), known, rows, rows, rows, rows)
    end = start + len(fresh)
    vocab = rows if end <= rows else -(-end // MULTIPLE) * MULTIPLE
    return Growth(fresh, known, rows, min(start, rows), end if end <= rows else vocab, vocab)


@cache
def _added(folder: Path, tokens: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
    """The first new token's id, and the new tokens in the order of their ids, which follow each other.

    Kept, for a plan asks of one folder many times.
    """
    from optrush.data.chat_template import add_tokens, open_tokenizer

    tokenizer = open_tokenizer(folder)
    fresh = add_tokens(tokenizer, tokens)
    ids = [tokenizer.convert_tokens_to_ids(token) for token in fresh]
    assert ids == list(range(ids[0], ids[0] + len(ids))) if ids else True, "a tokenizer numbers new tokens in turn"
    return (ids[0] if ids else 0), fresh
