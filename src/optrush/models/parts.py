"""Describe parts of a model's shape that only some families have. Pure Python.

Legend: as in `models/shapes.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class ExpertsShape:
    """The routed experts that some layers have in place of one feed-forward part, and how a token chooses among them.

    The probability of an expert is the softmax of all router logits; a token takes the `active` most probable ones.
    """

    layers: tuple[int, ...]  # that have experts; the others are dense
    count: int  # N
    active: int  # k, of a token
    ff_width: int  # F of one expert
    normalised: bool  # the weights of a token's experts sum to 1
    balance: float  # factor of the load-balancing loss; 0: the model is trained without
    biases: bool = False  # of the router and of both matrices of an expert
    sigmoid: bool = False  # scores of experts are sigmoids, chosen with a bias that is not trained
    scale: float = 1.0  # of the weights
    groups: int = 1  # of experts, of which a token takes experts from `active_groups`: by the best of each, or best two
    active_groups: int = 1
    shared_gate: bool = False  # what every token passes is gated by a sigmoid
    beside: bool = False  # a dense part has norms of its own, and the router scales what it reads and gives
    shared_width: int = 0  # feed-forward width of what every token passes besides; 0: none
    scaled_input: bool = False  # the weights, sigmoids of a token's highest logits, scale what enters its experts
    clamp: tuple[float, float] | None = None  # gain and limit of a clamped activation; None: silu(gate) * up


@dataclass(frozen=True)
class LatentShape:
    """Queries, keys and values through latents; what each is for is in models/latent_attention.py."""

    q_rank: int | None  # None: queries by one product
    kv_rank: int  # C
    plain: int  # values of a query and key that are not rotated
    rotated: int  # R, of the keys the same for all heads
    value: int  # W
    interleaved: bool  # rotated values are neighbouring pairs
    scale: float  # of the scores, besides E^-0.5


@dataclass(frozen=True)
class DeltaShape:
    """Layers of a gated delta rule in place of attention; what each size is for is in models/delta_rule.py."""

    layers: tuple[int, ...]
    key_heads: int  # K
    heads: int  # H, a multiple of K
    key: int  # E
    value: int  # W
    taps: int  # tokens of the convolution
    by_key_head: bool  # rows of the first products are those of a key head at a time

    @property
    def channels(self) -> int:
        """Number of channels of the convolution."""
        return 2 * self.key_heads * self.key + self.heads * self.value


@dataclass(frozen=True)
class ChunkShape:
    """Layers that attend within chunks of a document, and layers without rotary embedding, as Llama 4 has them.

    Rotated values are neighbouring pairs.
    """

    size: int  # tokens of a chunk
    layers: tuple[int, ...]  # that attend within chunks
    unrotated: tuple[int, ...]  # layers without rotary embedding
    temperature: tuple[int, float] | None  # of unrotated layers' queries: tokens a step, and its factor
    normed: bool  # queries and keys of rotated layers, by a norm without weights


@dataclass(frozen=True)
class ByLayer:
    """What layers of one model have of different sizes; `ModelShape.at` gives the shape of each."""

    wide: tuple[int, ...]  # layers whose heads are of another width than the others'
    head_width: int
    kv_heads: int  # of these layers
    key_is_value: bool  # of these layers: one product gives keys and values
    sources: tuple[int | None, ...]  # of each layer: the earlier one whose keys and values it reads; None: its own
    ff_factor: int  # of the feed-forward width of layers that read another's keys and values
    input_width: int  # P: values of a token that each layer gets in addition to the stream; 0: none
    input_words: int  # rows of their embedding


@dataclass(frozen=True)
class Multipliers:
    """Constants of a model's config.json by which values are multiplied."""

    embedding: float = 1.0
    scores: float = 1.0  # besides E^-0.5
    residual: float = 1.0  # of what attention and feed-forward part add to the stream
    logits: float = 1.0


class LinearShape(NamedTuple):
    """A linear of our decoder, in the layers that have it."""

    module: str  # its name within a block: "latent.q_a"
    inputs: int
    pieces: dict[str, int]  # rows of each, by its published name; of dense parts beside experts that begins as "dense."
    layers: tuple[int, ...]
    bias: bool = False
    joined: tuple[int, ...] = ()  # rows of each piece, where one published tensor has several

    @property
    def outputs(self) -> int:
        """Number of its rows."""
        return sum(self.pieces.values())

    @property
    def weights(self) -> int:
        """Number of weights in all layers."""
        return self.inputs * self.outputs * len(self.layers)
