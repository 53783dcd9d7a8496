"""Read the sizes of a transformers model: a block of each kind is traced, and the result is cached on disk.

The second time torch is not imported: the cache folder has the result under a digest of config.json and the versions of
torch and transformers. Pure, except for the trace itself (models/trace.py), which is imported when needed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from optrush.errors import NeedsError, UserError
from optrush.files import parse_json, read_text, write_whole
from optrush.models.parts import ExpertsShape, LinearShape
from optrush.models.rope_config import RopeShape
from optrush.models.shapes import HF, ModelShape, native_obstacle, refuse_foreign

FORMAT = 6  # version of the file and of the trace's contents


class NoPlan(NeedsError):
    """The sizes of a model's blocks are unknown; it can still be trained."""


class SavedShape(NamedTuple):
    """Values that all blocks together keep per token for the backward pass."""

    name: str
    values: float  # per token; if `squared`, per token and token of its row
    role: str  # a role of planner.ledger
    tags: tuple[str, ...]
    squared: bool = False


@dataclass(frozen=True)
class TracedShape(ModelShape):
    """The sizes of a transformers decoder, by its class, and the results of a trace of its blocks."""

    digest: str = ""
    all_parameters: int = 0
    parameters_of_blocks: int = 0
    matrices: int = 0  # weights of the blocks' matrices
    stacked: int = 0  # of these, the experts' weights
    routed: int = 0  # of these, the weights of a token's experts
    largest: int = 0  # values of the largest parameter
    adaptable: ExpertsShape | None = None  # experts that adapters may adapt
    largest_stack: int = 0  # weights of the largest matrix of all experts of a layer
    groups: tuple[tuple[str, LinearShape], ...] = ()  # linears by common input
    saved: tuple[SavedShape, ...] = ()
    query_width: int = 0  # heads times head width, summed over the blocks
    moved: float = 0.0  # values that all blocks' operators read and write per token, except matmuls
    launches: float = 0.0  # operators of a forward pass through all blocks, including views
    softcap: bool = False  # of the logits
    sdpa_obstacle: str | None = None  # reason why it cannot run sdpa

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def linears(self) -> dict[str, LinearShape]:
        """The linears of the blocks, by the first name of those with a common input."""
        return dict(self.groups)

    @property
    def parameters(self) -> int:
        """Number of all parameters, counting a tied head once."""
        return self.all_parameters

    @property
    def block_parameters(self) -> int:
        """Number of parameters of all blocks."""
        return self.parameters_of_blocks

    @property
    def attention_layers(self) -> int:
        """Number of layers with attention, a mean if their widths differ."""
        return round(self.query_width / max(1, self.heads * self.head_width))

    def _matrices(self, every: bool) -> int:
        return self.matrices if every else self.matrices - self.stacked + self.routed

    @property
    def mixture(self) -> ExpertsShape | None:
        """The experts that adapters may adapt: pairs of stacked matrices, equal in all layers with experts."""
        return self.adaptable

    @property
    def expert_parameters(self) -> int:
        """Number of weights of the matrices of all experts."""
        return self.stacked

    def named_parameters(self) -> Iterator[tuple[str, int]]:
        """Yield nothing: parameters have transformers' names."""
        yield from ()


def shape_of(hf: HF) -> ModelShape:
    """Return the shape of our own decoder, or transformers' if ours does not support the model.

    Raises:
        NeedsError: neither is known.
        ConfigError: a size is missing or not divisible.
    """
    return ModelShape.read(hf) if native_obstacle(hf) is None else read_traced(hf)


def find_traced(hf: HF) -> TracedShape | None:
    """Return the shape of a model that runs through transformers; None: it has no plan, see `read_traced`."""
    try:
        return read_traced(hf)
    except NeedsError:
        return None


def read_traced(hf: HF) -> TracedShape:
    """Return the shape of a model that runs through transformers.

    Raises:
        NoPlan: its class cannot be built or traced, or torch is not installed.
        NeedsError: it cannot be trained.
    """
    refuse_foreign(hf)
    return _read(json.dumps(dict(hf), sort_keys=True, default=str))


@lru_cache(64)
def _read(text: str) -> TracedShape:
    """Return the shape traced from a model's config.json, or its stored trace; raise NoPlan if tracing fails."""
    hf = json.loads(text)
    versions = [_version(name) for name in ("torch", "transformers")]
    asked = f"a plan for a model of type {hf.get('model_type')!r}"
    digest = hashlib.sha256(json.dumps([FORMAT, text, versions]).encode()).hexdigest()[:24]
    file = _folder() / f"{digest}.json"
    if file.is_file():
        with suppress(UserError, OSError, ValueError, KeyError, TypeError):  # damaged: traced again
            return _parsed(parse_json(read_text(file)), digest)
    if None in versions:
        found = "torch or transformers is not installed, and its class must be built once"
        raise NoPlan(asked, found, "python -m pip install torch transformers")
    from optrush.models.trace import trace_model

    try:
        fields = trace_model(hf)
    except NeedsError as error:
        raise NoPlan(asked, error.found, error.do) from None
    with suppress(OSError):  # a cache that cannot be written only costs time
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(fields), file.with_suffix(f".{os.getpid()}.tmp"))
    return _parsed(fields, digest)


def stored_values(folder: Path | None, hf: HF) -> int:
    """Return the number of values in a folder's weight files, by their sizes; 0: no such files."""
    width = 4 if "32" in str(hf.get("dtype") or hf.get("torch_dtype")) else 2
    files = () if folder is None else [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    return sum(file.stat().st_size for file in files if file.is_file()) // width


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _folder() -> Path:
    cache = os.environ.get("OPTRUSH_CACHE")
    root = Path(cache) if cache else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "optrush"
    return root / "traces"


def _parsed(read: dict[str, Any], digest: str) -> TracedShape:
    more: dict[str, Any] = {
        "window_layers": tuple(read["window_layers"]),
        "saved": tuple(SavedShape(n, v, role, tuple(tags), sq) for n, v, role, tags, sq in read["saved"]),
        "groups": tuple(
            (name, LinearShape(module, inputs, pieces, tuple(layers), bias))
            for name, module, inputs, pieces, layers, bias in read["groups"]
        ),
    }
    if (e := read["adaptable"]) is not None:
        layers, count, active, width = e
        more["adaptable"] = ExpertsShape(tuple(layers), count, active, width, False, 0.0)
    unread = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias", "qk_norm"), False)
    return TracedShape(**{**read, **more, **unread}, norm_eps=1e-6, rope=RopeShape(), digest=digest)
