"""Describe parts of a model's shape that only some families have. Pure Python.

Legend: see `models/shapes.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class ExpertsShape:
    """The routed experts of some layers, instead of one feed-forward part, and their routing.

    The probability of an expert is the softmax of all router logits; a token takes the `active` most probable experts.
    """

    layers: tuple[int, ...]  # layers with experts; the others are dense
    count: int  # N
    active: int  # k, per token
    ff_width: int  # F of one expert
    normalised: bool  # the weights of a token's experts sum to 1
    balance: float  # factor of the load-balancing loss; 0: no such loss
    biases: bool = False  # of the router and of an expert's matrices
    sigmoid: bool = False  # scores are sigmoids; the choice adds an untrained bias
    scale: float = 1.0  # of the weights
    groups: int = 1  # groups of experts; `active_groups` are eligible, by their best or best two experts
    active_groups: int = 1
    shared_gate: bool = False  # the shared experts are gated by a sigmoid
    beside: bool = False  # a dense part has separate norms, and the router scales its input and output
    shared_width: int = 0  # feed-forward width of the shared experts; 0: none
    scaled_input: bool = False  # the weights (sigmoids of a token's highest logits) scale its experts' inputs
    clamp: tuple[float, float] | None = None  # gain and limit of a clamped activation; None: silu(gate) * up


@dataclass(frozen=True)
class LatentShape:
    """Queries, keys and values through latents; models/latent_attention.py explains the sizes."""

    q_rank: int | None  # None: queries by one matmul
    kv_rank: int  # C
    plain: int  # unrotated values per query and key
    rotated: int  # R; for keys shared by all heads
    value: int  # W
    interleaved: bool  # rotated values are neighbouring pairs
    scale: float  # of the scores, in addition to E^-0.5


@dataclass(frozen=True)
class DeltaShape:
    """Layers with a gated delta rule instead of attention; models/delta_rule.py explains the sizes."""

    layers: tuple[int, ...]
    key_heads: int  # K
    heads: int  # H, a multiple of K
    key: int  # E
    value: int  # W
    taps: int  # tokens of the convolution
    by_key_head: bool  # rows of the first matmuls are grouped by key head

    @property
    def channels(self) -> int:
        """Number of channels of the convolution."""
        return 2 * self.key_heads * self.key + self.heads * self.value


@dataclass(frozen=True)
class ChunkShape:
    """Layers that attend within chunks of a document, and layers without rotary embedding, as in Llama 4.

    Rotated values are neighbouring pairs.
    """

    size: int  # tokens per chunk
    layers: tuple[int, ...]  # layers that attend within chunks
    unrotated: tuple[int, ...]  # layers without rotary embedding
    temperature: tuple[int, float] | None  # of unrotated layers' queries: tokens per step, and its factor
    normed: bool  # queries and keys of rotated layers have a norm without weights


@dataclass(frozen=True)
class ByLayer:
    """Parts with different sizes between a model's layers; `ModelShape.at` returns the shape of each layer."""

    wide: tuple[int, ...]  # layers whose heads have another width
    head_width: int
    kv_heads: int  # of these layers
    key_is_value: bool  # of these layers: one matmul for keys and values
    sources: tuple[int | None, ...]  # per layer: the earlier layer whose keys and values it reads; None: its own
    ff_factor: int  # of the feed-forward width of layers that read an earlier layer's keys and values
    input_width: int  # P: values per token and layer in addition to the stream; 0: none
    input_words: int  # rows of the embedding of these inputs


@dataclass(frozen=True)
class Multipliers:
    """Constant factors in a model's config.json."""

    embedding: float = 1.0
    scores: float = 1.0  # in addition to E^-0.5
    residual: float = 1.0  # of the outputs of attention and feed-forward part
    logits: float = 1.0


class LinearShape(NamedTuple):
    """A linear of our decoder, in the layers that have it."""

    module: str  # its name in a block: "latent.q_a"
    inputs: int
    pieces: dict[str, int]  # rows by published name, with the prefix "dense." for dense parts next to experts
    layers: tuple[int, ...]
    bias: bool = False
    joined: tuple[int, ...] = ()  # rows of each piece, if one published tensor has several

    @property
    def outputs(self) -> int:
        """Number of its rows."""
        return sum(self.pieces.values())

    @property
    def weights(self) -> int:
        """Number of weights in all layers."""
        return self.inputs * self.outputs * len(self.layers)
