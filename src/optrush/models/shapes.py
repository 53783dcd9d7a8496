"""Read the sizes of a model from a Hugging Face config.json; count its parameters and FLOPs. Pure Python.

Legend: T row length, D width, F feed-forward width, H heads, K key/value heads, E head width, V vocabulary, L layers,
N experts. The planner needs this module on a machine without torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from optrush.errors import ConfigError, NeedsError, one_line
from optrush.models.config_json import EXPERTS, is_readable
from optrush.models.families import (
    FAMILIES,
    GELU,
    MIXTURES,
    ROPE_KINDS,
    UNSEPARATED,
    ExpertsSpec,
    FamilySpec,
    Switch,
    limits,
)
from optrush.models.parts import ByLayer, ChunkShape, DeltaShape, ExpertsShape, LatentShape, LinearShape, Multipliers
from optrush.models.published import SHAPES as SHAPES
from optrush.models.rope_config import (
    RopeShape,
    read_rope,
    rope_by_kind,
    rope_kind,
    rope_obstacle,
    rope_settings,
    rotary_part,
)
from optrush.models.text_part import OTHER_MEDIA, as_text, is_multimodal, nested_obstacle, text_config

HF = Mapping[str, Any]  # a config.json
LOAD_FIGURES = ("expert_busiest", "expert_entropy")  # metrics of a model with experts


def _others(layers: tuple[int, ...], excluded: tuple[int, ...]) -> tuple[int, ...]:
    dropped = frozenset(excluded)
    return tuple(i for i in layers if i not in dropped) if excluded else layers


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder of a family that our own decoder supports."""

    family: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    ff_width: int
    vocab: int
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    norm_eps: float
    rope: RopeShape
    window: int | None  # the sliding window of some layers; None: every layer attends to all earlier tokens
    window_layers: tuple[int, ...] = ()  # layers with the window
    sinks: bool = False  # a learned logit per head in the sum of every softmax, for no token
    rotated: int | None = None  # rotated values per head; None: all of them
    whole_qk_norm: bool = False  # one norm over all heads of a token, instead of one per head
    experts: ExpertsShape | None = None
    latent: LatentShape | None = None
    delta: DeltaShape | None = None
    chunks: ChunkShape | None = None
    gated: bool = False  # attention's output is gated by sigmoids from the query matmul
    centred: bool = False  # norms multiply by 1 + weight
    norms: str = "before"  # "before" attention and feed-forward part, "after", "around" (both), "beside": one for both
    norm: str = "rms"  # "rms", "layer", or "layer, bias"
    gelu: bool = False  # the gate's activation is tanh-approximated gelu; else silu
    gateless: bool = False  # the feed-forward part has no gate
    multipliers: Multipliers = field(default_factory=Multipliers)
    softcap: float | None = None  # bound of the logits by a tanh
    score_cap: float | None = None  # bound of attention's scores by a tanh
    local_rope: RopeShape | None = None  # of layers with a window; None: the same
    unrotated: tuple[int, ...] = ()  # layers without rotary embedding
    pairs: bool = False  # rotated values are neighbouring pairs
    by_layer: ByLayer | None = None  # None: all layers have these sizes
    value_norm: bool = False  # values pass a norm without weights
    layer_scalar: bool = False  # a constant multiplies a block's output
    parts: str = "qkv"  # a layer's first linear computes "qkv", "qk" (keys are values) or "q"

    @classmethod
    def read(cls, hf: HF) -> ModelShape:
        """Read the shape from a config.json.

        Raises:
            NeedsError: our decoder does not support it (foreign kind, family, RoPE type...).
            ConfigError: a size is missing or not divisible.
        """
        refuse_foreign(hf)
        if (obstacle := native_obstacle(hf)) is not None:
            do = f"set `implementation: transformers`, or use a model of type {', '.join(FAMILIES)} "
            do += f"with a RoPE type among {', '.join(ROPE_KINDS)}"
            raise NeedsError(f"a model of type {hf.get('model_type')!r} in our own decoder", obstacle, do)
        hf = as_text(hf)
        family = str(hf["model_type"])
        spec = FAMILIES[family]
        full = {**spec.defaults, **{k: v for k, v in hf.items() if v is not None or k != "rope_parameters"}}
        width, heads = _size(full, "hidden_size"), _size(full, "num_attention_heads")
        kv_heads = heads if full["num_key_value_heads"] is None else _size(full, "num_key_value_heads")
        latent = _latent(full, spec) if spec.latent else None
        head_width = full["head_dim"] or width // heads
        if latent is not None:
            kv_heads, head_width = heads, latent.plain + latent.rotated
        elif heads % kv_heads or head_width % 2 or (full["head_dim"] is None and width % heads):
            found = f"hidden_size {width}, num_attention_heads {heads}, num_key_value_heads {kv_heads}, "
            found += f"head_dim {full['head_dim']}"
            do = "heads must be a multiple of key/value heads, head_dim even, and hidden_size a multiple of heads"
            raise ConfigError(f"a {family} model from config.json", found, do)
        part = rotary_part(full) if spec.partial_rotary else 1.0
        rotated = None if part == 1 else int(head_width * part)
        window, window_layers = _window(full, spec)
        text, local = rope_by_kind(full, spec)
        by_layer = _by_layer(full, window_layers) if spec.by_layer else None
        turned = latent.rotated if latent else rotated or (by_layer.head_width if by_layer else int(head_width))
        return cls(
            family=family, layers=_size(full, "num_hidden_layers"), width=width, heads=heads, kv_heads=int(kv_heads),
            head_width=int(head_width), ff_width=_size(full, spec.ff_width), vocab=_size(full, "vocab_size"),
            tied=bool(full.get("tie_word_embeddings", False)), qkv_bias=_is_on(spec.qkv_bias, full),
            o_bias=_is_on(spec.o_bias, full), mlp_bias=_is_on(spec.mlp_bias, full),
            qk_norm=_is_on(spec.qk_norm, full), whole_qk_norm=spec.whole_qk_norm, centred=spec.centred,
            gated=spec.gated, sinks=spec.sinks, norm_eps=float(full.get(spec.norm_eps, 1e-6)),
            rope=read_rope(text, turned), rotated=rotated,
            window=window, window_layers=window_layers, experts=_experts(hf, full, spec), latent=latent,
            delta=_delta(full, spec) if spec.delta else None, chunks=_chunks(full) if spec.chunks else None,
            norms=spec.norms, norm=spec.norm, gelu=spec.activation == GELU, gateless=spec.gateless,
            multipliers=_multipliers(full, spec, int(head_width)),
            softcap=_cap(full, "final_logit_softcapping") if spec.softcap else None,
            score_cap=_cap(full, "attn_logit_softcapping") if spec.score_cap else None,
            unrotated=_unrotated(full, spec, window_layers),
            local_rope=None if local is None else read_rope(local, int(head_width)), pairs=spec.pairs,
            by_layer=by_layer, value_norm=spec.value_norm, layer_scalar=spec.layer_scalar,
        )  # fmt: skip

    def at(self, layer: int) -> ModelShape:
        """Return the shape of a model whose layers all equal this one."""
        if (b := self.by_layer) is None:
            return self
        E, K, parts = self.head_width, self.kv_heads, "qkv"
        if layer in b.wide:
            E, K, parts = b.head_width, b.kv_heads, "qk" if b.key_is_value else "qkv"
        reads = b.sources[layer] is not None
        scores = self.multipliers.scores * (E / self.head_width) ** 0.5
        return replace(
            self, head_width=E, kv_heads=K, parts="q" if reads else parts, by_layer=None,
            multipliers=replace(self.multipliers, scores=scores),
            ff_width=self.ff_width * (b.ff_factor if reads else 1),
        )  # fmt: skip

    @cached_property
    def kinds(self) -> dict[ModelShape, tuple[int, ...]]:
        """The layers by kind, as a shape whose layers all have this kind."""
        layers_of = dict[ModelShape, tuple[int, ...]]()
        for layer in range(self.layers if self.by_layer else 1):
            layers_of[self.at(layer)] = (*layers_of.get(self.at(layer), ()), layer)
        return layers_of if self.by_layer else {self: tuple(range(self.layers))}

    def _by(self, size: Callable[[ModelShape], Any]) -> Iterator[tuple[str, ModelShape, tuple[int, ...]]]:
        """Yield the groups of layers with equal sizes: the suffix of linear names, a layer's shape, the layers."""
        groups = dict[Any, list[tuple[ModelShape, tuple[int, ...]]]]()
        for item in self.kinds.items():
            groups.setdefault(size(item[0]), []).append(item)
        for key, members in groups.items():
            suffix = "" if key == next(iter(groups)) else f"_{'_'.join(map(str, key))}"
            yield suffix, members[0][0], tuple(sorted(i for _, layers in members for i in layers))

    def _mean(self, value: Callable[[ModelShape], float]) -> float:
        return sum(value(s) * len(layers) for s, layers in self.kinds.items()) / self.layers

    @property
    def separates(self) -> bool:
        """Whether documents of one row can be separated."""
        return self.family not in UNSEPARATED

    @property
    def mixture(self) -> ExpertsShape | None:
        """The experts that adapters may adapt."""
        return self.experts

    @property
    def rotated_width(self) -> int:
        """Number of rotated values per head."""
        if self.latent is not None:
            return self.latent.rotated
        if self.by_layer is not None:
            return self.by_layer.head_width
        return self.head_width if self.rotated is None else self.rotated

    @property
    def block_norms(self) -> tuple[str, ...]:
        """The norms of D values in a block."""
        names = ("norm1", "norm2", "leaving1", "leaving2")
        return names[: {"beside": 1, "around": 4}.get(self.norms, 2)]

    @property
    def stream_line(self) -> str:
        """The ledger's line of the stream of D values that a block's linears write: its middle, if any."""
        return "input" if self.norms == "beside" else "saved.middle"

    @property
    def norm_width(self) -> int:
        """Number of values of a norm over D values: its weight, and its bias if any."""
        return self.width * (2 if self.norm == "layer, bias" else 1)

    @property
    def other_order(self) -> str | None:
        """How blocks differ from norms before each part and an unscaled residual; None: they do not."""
        if self.norms == "beside":
            return "one norm for attention and feed-forward part"
        if self.norms != "before":
            return f"norms {self.norms} attention and feed-forward part"
        return None if self.multipliers.residual == 1 else "a residual multiplier"

    @property
    def other_blocks(self) -> str | None:
        """What the blocks have instead of matrices that every technique for our decoder supports; None: nothing."""
        return "experts" if self.experts is not None else self.other_attention

    @property
    def other_attention(self) -> str | None:
        """What the blocks have instead of the usual attention; None: nothing."""
        latent, delta = "latent attention", "layers of a delta rule"
        if self.by_layer is not None:
            return "heads, keys and values that differ between layers"
        if self.chunks is not None:
            return "layers without rotary embedding"
        return latent if self.latent is not None else delta if self.delta is not None else None

    @property
    def attention_layers(self) -> int:
        """Number of layers with attention."""
        return self.layers - (0 if self.delta is None else len(self.delta.layers))

    @property
    def attended_width(self) -> int:
        """Number of values per token in attention's output, over all heads; a mean if layers differ."""
        if self.by_layer is not None:
            return round(self._mean(lambda s: s.attended_width))
        return self.heads * (self.head_width if self.latent is None else self.latent.value)

    @property
    def queries(self) -> float:
        """Number of values in a token's queries, over all heads; a mean if layers differ."""
        return self._mean(lambda s: s.heads * s.head_width)

    @property
    def repeated(self) -> float:
        """Number of values added to repeat a token's keys for each query head; a mean if layers differ."""
        return self._mean(lambda s: (s.heads - s.kv_heads) * s.head_width)

    @property
    def key_width(self) -> float:
        """Number of values in a token's keys or values, over all heads: the mean of the two, and of all layers."""
        if self.by_layer is not None:
            return self._mean(lambda s: s.key_width)
        if self.latent is None:
            return 0 if self.parts == "q" else self.kv_heads * self.head_width
        return (self.kv_heads * self.head_width + self.attended_width) / 2

    @cached_property
    def linears(self) -> dict[str, LinearShape]:
        """The linears of the blocks by name: "qkv", "o", "gate_up", "down"; other attention has others.

        Excludes experts and their routers. Includes shared experts as `shared_gate_up`, and the feed-forward part of
        layers without experts as `dense_gate_up`.
        """
        return dict(self._linears())

    def _linears(self) -> Iterator[tuple[str, LinearShape]]:
        """Yield the name and shape of each of the `linears`, attention before feed-forward parts."""
        D, q, s, d, P = self.width, self.heads * self.head_width, self.latent, self.delta, self.input_width
        every, mixed = tuple(range(self.layers)), () if d is None else d.layers
        attending = _others(every, mixed)
        for end, kind, layers in () if s else self._by(lambda s: (s.parts, s.head_width, s.kv_heads)):
            q, kv = kind.heads * kind.head_width, kind.kv_heads * kind.head_width
            rows = {f"{part}_proj": q * (1 + self.gated) if part == "q" else kv for part in kind.parts}
            yield f"qkv{end}", self._pieces(LinearShape("qkv", D, rows, _others(layers, mixed), self.qkv_bias))
        if s is not None:
            plain, rank = (D, "q_proj", q, False), s.q_rank
            queries = {"q": plain} if rank is None else {
                "q_a": (D, "q_a_proj", rank, self.qkv_bias), "q_b": (rank, "q_b_proj", q, False),
            }  # fmt: skip
            kv_a = (D, "kv_a_proj_with_mqa", s.kv_rank + s.rotated, self.qkv_bias)
            both = (s.kv_rank, "kv_b_proj", self.heads * (s.plain + s.value), False)
            for name, (inputs, piece, outputs, bias) in {**queries, "kv_a": kv_a, "kv_b": both}.items():
                yield name, LinearShape(f"latent.{name}", inputs, {piece: outputs}, attending, bias)
        for end, kind, layers in self._by(lambda s: (s.attended_width,)):
            attending = _others(layers, mixed)
            yield f"o{end}", LinearShape("o", kind.attended_width, {"o_proj": D}, attending, self.o_bias)
        if P:
            yield "input_gate", LinearShape("input_gate", D, {"per_layer_input_gate": P}, every)
            yield "input_out", LinearShape("input_out", P, {"per_layer_projection": D}, every)
        if d is not None:
            z = d.heads * d.value
            rows = {"qkv": d.channels, "z": z, "b": d.heads, "a": d.heads}
            rows = {"qkvz": d.channels + z, "ba": 2 * d.heads} if d.by_key_head else rows
            sizes = {f"in_proj_{part}": (D, outputs) for part, outputs in rows.items()} | {"out_proj": (z, D)}
            for name, (width, outputs) in sizes.items():
                yield name, LinearShape(f"delta.{name}", width, {name: outputs}, mixed)
        sparse = () if self.experts is None else self.experts.layers
        shared = 0 if self.experts is None else self.experts.shared_width
        of, before = ("", "") if self.experts is None else ("dense_", "dense.")
        names, parts = FAMILIES[self.family].names, [("shared_", "", shared, sparse)]
        parts += [(of, end, kind.ff_width, _others(on, sparse)) for end, kind, on in self._by(lambda s: (s.ff_width,))]
        for name, end, F, layers in parts:
            if F and layers:
                up, out = (f"{before}{path.rpartition('.')[2]}" for path in (names["gate_up"][-1], names["down"][0]))
                pieces = {up: F} if self.gateless else {f"{before}gate_proj": F, f"{before}up_proj": F}
                yield f"{name}gate_up{end}", self._pieces(LinearShape("gate_up", D, pieces, layers, self.mlp_bias))
                yield f"{name}down{end}", LinearShape("down", F, {out: D}, layers, self.mlp_bias)

    def _pieces(self, linear: LinearShape) -> LinearShape:
        """Return a linear with its family's names: unchanged, or all its pieces as one."""
        (first, *others), rows = FAMILIES[self.family].names[linear.module], tuple(linear.pieces.values())
        return (
            linear
            if others or len(rows) == 1
            else linear._replace(pieces={first.rpartition(".")[2]: sum(rows)}, joined=rows)
        )

    @property
    def joined(self) -> frozenset[str]:
        """The linears whose pieces are all in one published tensor."""
        return frozenset(name for name, linear in self.linears.items() if linear.joined)

    @property
    def active_width(self) -> float:
        """The feed-forward width per token, a mean over the layers: F, or k F with experts."""
        e = self.experts
        if self.by_layer is not None:
            return self._mean(lambda s: s.active_width)
        if e is None:
            return self.ff_width
        sparse = e.active * e.ff_width + e.shared_width
        return (len(e.layers) * sparse + (self.layers - len(e.layers)) * self.ff_width) / self.layers

    @property
    def fed(self) -> float:
        """Number of values per token in the output of a feed-forward part's first matmul."""
        return self.active_width * (1 if self.gateless else 2)

    @property
    def matrix_parameters(self) -> int:
        """Number of weights in a token's matmuls: N_mm = N_lin + D V; the input embedding is a lookup.

        With experts it counts only those that a token is routed to, and the router.
        """
        return self._matrices(False) + self.width * (self.vocab + self.layers * self.input_width)

    @property
    def block_matrices(self) -> int:
        """Number of weights of all matrices of the blocks, including experts that a token does not reach."""
        return self._matrices(True)

    def _matrices(self, every: bool) -> int:
        D, e = self.width, self.experts
        matrices = sum(linear.weights for linear in self.linears.values())
        if e is None:
            return matrices
        layer = 3 * D * e.ff_width * (e.count if every else e.active) + D * e.count + (D if e.shared_gate else 0)
        return matrices + len(e.layers) * layer

    def named_parameters(self) -> Iterator[tuple[str, int]]:
        """Yield our decoder's name and number of values of each trained parameter, without a tied head."""
        yield "embedding.weight", self.vocab * self.width
        for layer in range(self.layers):
            yield from ((f"blocks.{layer}.{name}", values) for name, values in self._of_layer(layer))
        yield from self._norm("norm")
        if self.input_width:
            yield from self._inputs()
        if not self.tied:
            yield "head.weight", self.vocab * self.width

    def _inputs(self) -> Iterator[tuple[str, int]]:
        b, columns = self.by_layer, self.layers * self.input_width
        yield "inputs.embedding.weight", 0 if b is None else b.input_words * columns
        yield from (("inputs.project.weight", self.width * columns), ("inputs.norm.weight", self.input_width))

    @property
    def input_width(self) -> int:
        """Number of values per token that each layer gets in addition to the stream."""
        return 0 if self.by_layer is None else self.by_layer.input_width

    @property
    def input_parameters(self) -> int:
        """Number of parameters that compute these values for all layers."""
        return sum(n for _, n in self._inputs()) if self.input_width else 0

    def _norm(self, name: str) -> Iterator[tuple[str, int]]:
        yield f"{name}.weight", self.width
        if self.norm == "layer, bias":
            yield f"{name}.bias", self.width

    def _of_layer(self, layer: int) -> Iterator[tuple[str, int]]:
        """Yield the name within its block and number of values of each trained parameter of a layer."""
        D, d, e, s = self.width, self.delta, self.experts, self.at(layer)
        E = s.head_width
        mixed = d is not None and layer in d.layers
        yield from (item for name in self.block_norms for item in self._norm(name))
        for linear in self.linears.values():
            if layer in linear.layers:
                yield f"{linear.module}.weight", linear.inputs * linear.outputs
                if linear.bias:
                    yield f"{linear.module}.bias", linear.outputs
        if self.sinks:
            yield "sinks", self.heads
        if d is not None and mixed:
            yield from (("delta.conv1d.weight", d.channels * d.taps), ("delta.norm.weight", d.value))
            yield from (("delta.dt_bias", d.heads), ("delta.A_log", d.heads))
        elif self.latent is not None:
            yield "latent.kv_a_norm.weight", self.latent.kv_rank
            if self.latent.q_rank is not None:
                yield "latent.q_a_norm.weight", self.latent.q_rank
        if self.input_width:
            yield "leaving3.weight", D
        if self.qk_norm and not mixed:
            yield "q_norm.weight", self.heads * E if self.whole_qk_norm else E
        if self.qk_norm and not mixed and s.parts != "q":
            yield "k_norm.weight", self.kv_heads * E if self.whole_qk_norm else E
        if e is not None and layer in e.layers:
            yield "experts.router", e.count * D
            for name, rows, columns in (("gate_up", 2 * e.ff_width, D), ("down", D, e.ff_width)):
                yield f"experts.{name}", e.count * rows * columns
                if e.biases:
                    yield f"experts.{name}_bias", e.count * rows
            if e.biases:
                yield "experts.router_bias", e.count
            if e.beside:
                yield from (("experts.router_scale", D), ("experts.expert_scale", e.count))
                yield from ((f"{name}.weight", D) for name in ("dense_leaving", "experts_norm", "experts_leaving"))
            if e.shared_gate and e.shared_width:
                yield "shared_gate.weight", D

    @cached_property
    def _kinds(self) -> Counter[int]:
        """The first layer of each kind, which has the same parameters as the others, and their number."""
        ways = {linear.layers for linear in self.linears.values()} - {tuple(range(self.layers))}
        members = [frozenset(layers) for layers in ways]
        first: dict[tuple[bool, ...], int] = {}
        if not members:
            return Counter({0: self.layers})
        return Counter(first.setdefault(tuple(n in of for of in members), n) for n in range(self.layers))

    def _sum(self, counted: Callable[[str], bool]) -> int:
        layers = ((f".{name}", n * count) for layer, count in self._kinds.items() for name, n in self._of_layer(layer))
        return sum(n for name, n in layers if counted(name))

    @cached_property
    def parameters(self) -> int:
        """Number of all parameters, counting a tied head once."""
        return self._sum(lambda _: True) + self.outer_parameters

    @property
    def outer_parameters(self) -> int:
        """Number of parameters outside the blocks: embeddings, the last norm, and an untied head."""
        return self.vocab * self.width * (1 if self.tied else 2) + self.norm_width + self.input_parameters

    @property
    def block_parameters(self) -> int:
        """Number of parameters of all blocks."""
        return self.parameters - self.outer_parameters

    @cached_property
    def expert_parameters(self) -> int:
        """Number of parameters of all experts, without their routers."""
        return self._sum(lambda name: name.startswith(".experts.") and ".router" not in name)

    def flops(self, tokens: int, attended: int) -> int:
        """Return the FLOPs of a step's forward and backward pass: 6 N_mm per token, and causal attention.

        Args:
            tokens: real tokens.
            attended: sum of squared document lengths; half of these products are above the diagonal and not counted.
        """
        products = self.queries + self.attended_width  # multiply-adds per query and token: with keys, and with values
        flop = 6 * self.matrix_parameters * tokens + round(3 * attended * products * self.attention_layers)
        if (d := self.delta) is not None:  # the state is read, corrected and read again; plus the convolution
            flop += 6 * tokens * len(d.layers) * (3 * d.heads * d.key * d.value + d.taps * d.channels)
        return flop


def _is_on(switch: Switch, full: HF) -> bool:
    """Return whether a switch of a family is on, possibly decided by a key of config.json."""
    return bool(full.get(switch, False)) if isinstance(switch, str) else switch


def _size(hf: HF, key: str) -> int:
    value = hf.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError("a model from config.json", f"{key} is {value!r}", f"give {key} a positive whole number")
    return value


def _cap(full: HF, key: str) -> float | None:
    """Read a bound by a tanh; None or 0: no bound."""
    if not (value := full.get(key)):
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ConfigError("a model from config.json", f"{key} is {value!r}", f"give {key} a positive number, or null")
    return float(value)


def _delta(full: HF, spec: FamilySpec) -> DeltaShape:
    """Read the delta-rule layers: all but every fourth, unless listed."""
    L, every = _size(full, "num_hidden_layers"), _size(full, "full_attention_interval")
    kinds = full.get("layer_types") or ["linear_attention" if (i + 1) % every else "full_attention" for i in range(L)]
    heads, key_heads = _size(full, "linear_num_value_heads"), _size(full, "linear_num_key_heads")
    if heads % key_heads:
        found = f"linear_num_value_heads {heads}, linear_num_key_heads {key_heads}"
        raise ConfigError("a delta rule from config.json", found, "the first must be a multiple of the second")
    return DeltaShape(
        layers=tuple(i for i, kind in zip(range(L), kinds, strict=False) if kind == "linear_attention"),
        key_heads=key_heads, heads=heads, key=_size(full, "linear_key_head_dim"),
        value=_size(full, "linear_value_head_dim"), taps=_size(full, "linear_conv_kernel_dim"),
        by_key_head=spec.by_key_head,
    )  # fmt: skip


def _by_layer(full: HF, windowed: tuple[int, ...]) -> ByLayer:
    """Read the sizes of layers that differ: layers without a window have different heads."""
    L, keys = _size(full, "num_hidden_layers"), ("head_dim", "num_key_value_heads")
    wide, asked = _others(tuple(range(L)), windowed), "layers of different sizes from config.json"
    given, same = full.get("per_layer_config"), bool(full.get("attention_k_eq_v"))
    if given is None:
        few = full.get("num_global_key_value_heads") if same else None
        given = {i: {"head_dim": full["global_head_dim"], **({keys[1]: few} if few else {})} for i in wide}
    given = {str(layer): sizes_of for layer, sizes_of in given.items()} if isinstance(given, Mapping) else {"": given}
    wrong = (i not in map(str, wide) or not isinstance(o, Mapping) or {*o} - {*keys} for i, o in given.items())
    other = any(wrong)
    sizes = set() if other else {tuple(_size({**full, **given.get(str(i), {})}, k) for k in keys) for i in wide}
    if other or len(sizes) > 1:
        do = "give all layers of full attention the same head_dim and num_key_value_heads, and others none"
        raise ConfigError(asked, f"per_layer_config {one_line(repr(given), 80)}", do)
    E, K = sizes.pop() if sizes else (_size(full, "head_dim"), _size(full, "num_key_value_heads"))
    if E % 2 or _size(full, "num_attention_heads") % K:
        found = f"{full['num_attention_heads']} heads of {E} values, and {K} key/value heads"
        raise ConfigError(asked, found, "give an even head width, and key/value heads that divide the heads")
    own_keys = L - int(full.get("num_kv_shared_layers") or 0)
    last = {i in wide: i for i in range(own_keys)}
    lacking = own_keys < 1 or not {i in wide for i in range(L)} <= {*last}
    if lacking or own_keys > L:
        do = "lower it: one layer of each attention kind must come before them"
        raise ConfigError(asked, f"num_kv_shared_layers {full['num_kv_shared_layers']}, of {L} layers", do)
    return ByLayer(
        wide=wide, head_width=E, kv_heads=K, key_is_value=same,
        sources=tuple(None if i < own_keys else last[i in wide] for i in range(L)),
        ff_factor=2 if full.get("use_double_wide_mlp") else 1,
        input_width=_size(full, "hidden_size_per_layer_input") if full.get("hidden_size_per_layer_input") else 0,
        input_words=_size(full, "vocab_size_per_layer_input"),
    )  # fmt: skip


def _latent(full: HF, spec: FamilySpec) -> LatentShape:
    """Read the sizes of latent attention; with YaRN, scores have the square of its factor for all values of a head."""
    rope, rank = rope_settings(full), full["q_lora_rank"]
    factor, by = float(rope.get("factor") or 1.0), float(rope.get("mscale_all_dim") or 0.0)
    grown = rope_kind(full) != "default" and by and factor > 1
    rotated = _size(full, "qk_rope_head_dim")
    if rotated % 2:
        do = "give qk_rope_head_dim an even number"
        raise ConfigError("rotary embedding from config.json", f"qk_rope_head_dim {rotated}", do)
    return LatentShape(
        q_rank=None if rank is None else _size(full, "q_lora_rank"), kv_rank=_size(full, "kv_lora_rank"),
        plain=_size(full, "qk_nope_head_dim"), rotated=rotated, value=_size(full, "v_head_dim"),
        interleaved=_is_on(spec.interleaved, full),
        scale=(0.1 * by * math.log(factor) + 1.0) ** 2 if grown else 1.0,
    )  # fmt: skip


def _chunks(full: HF) -> ChunkShape:
    """Read the layers that attend within chunks, and those without rotary embedding: every fourth, unless listed."""
    L, every = _size(full, "num_hidden_layers"), _size(full, "no_rope_layer_interval")
    rotated = full.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(L)]
    kinds = full.get("layer_types") or ["chunked_attention" if yes else "full_attention" for yes in rotated]
    for key, given in (("no_rope_layers", rotated), ("layer_types", kinds)):
        if len(given) < L:
            found = f"{len(given)} values in {key}, and {L} layers"
            raise ConfigError("layers of attention from config.json", found, f"give {key} a value for each layer")
    grows = None
    if full["attn_temperature_tuning"]:
        if full["attn_scale"] is None:
            raise ConfigError("a model from config.json", "attn_scale is None", "give attn_scale a finite number")
        grows = (_size(full, "floor_scale"), float(full["attn_scale"]))
    return ChunkShape(
        size=_size(full, "attention_chunk_size"),
        layers=tuple(i for i in range(L) if kinds[i] == "chunked_attention"),
        unrotated=tuple(i for i in range(L) if not rotated[i]), temperature=grows, normed=bool(full["use_qk_norm"]),
    )  # fmt: skip


def _experts(hf: HF, full: HF, spec: FamilySpec) -> ExpertsShape | None:
    """Read the experts of a family with experts, in layers `decoder_sparse_step` apart except `mlp_only_layers`."""
    key, e = next((key for given in (hf, full) for key in EXPERTS if given.get(key) is not None), ""), spec.experts
    if e is None or (e.switch and not full.get(e.switch)) or not (e.switch or full.get(key)):
        return None
    count, active, layers = _size(full, key or "num_experts"), _size(full, e.active), _expert_layers(full, e)
    if active > count:
        found = f"{key} {count}, {e.active} {active}"
        raise ConfigError("experts from config.json", found, f"give {e.active} at most the number of experts")
    if e.beside and full.get("num_kv_shared_layers"):
        do = "set enable_moe_block to false, or num_kv_shared_layers to 0"
        raise ConfigError("experts from config.json", "layers that also reuse other layers' keys and values", do)
    if e.router == "logits" and not layers:
        return None
    groups = 1 if full.get("topk_method") == "greedy" else int(full.get("n_group") or 1)
    sigmoid = e.router == "sigmoid"
    if count % groups or (sigmoid and count // groups < 2):
        do = "give n_group a divisor with two experts or more in a group"
        raise ConfigError("experts from config.json", f"{key} {count}, n_group {groups}", do)
    balanced = full.get("output_router_logits") and e.router == "softmax"  # by a loss in transformers
    return ExpertsShape(
        layers=layers, count=count, active=active, ff_width=_size(full, e.width),
        normalised=bool(full.get("norm_topk_prob", False)),
        balance=float(full["router_aux_loss_coef"]) if balanced else 0.0, biases=e.biases, sigmoid=sigmoid,
        scale=float(full.get("routed_scaling_factor") or 1.0), groups=groups,
        active_groups=int(full.get("topk_group") or 1),
        shared_width=int(full.get("shared_expert_intermediate_size") or 0)
        or (_size(full, spec.ff_width) if e.beside else int(full.get("n_shared_experts") or 0) * _size(full, e.width)),
        beside=e.beside,
        shared_gate=e.shared_gate, scaled_input=e.router == "logits",
        clamp=(float(full["swiglu_alpha"]), float(full["swiglu_limit"])) if "swiglu_limit" in full else None,
    )  # fmt: skip


def _expert_layers(full: HF, e: ExpertsSpec) -> tuple[int, ...]:
    """Return the layers with experts, by the family's keys for this."""
    layers, kinds = range(_size(full, "num_hidden_layers")), full.get("mlp_layer_types")
    if (listed := full.get(e.listed)) is not None:
        return tuple(i for i in layers if i in listed)
    dense = {*(full.get("mlp_only_layers") or ()), *(i for i, kind in enumerate(kinds or ()) if kind == "dense")}
    step = full.get(e.step) or 1
    first = int(full.get("first_k_dense_replace") or 0) if kinds is None else 0
    return tuple(i for i in layers if i not in dense and (i + 1) % step == 0 and i >= first)


def _multipliers(full: HF, spec: FamilySpec, head_width: int) -> Multipliers:
    """Read the constants of a family; scores have a factor in addition to E^-0.5."""
    factors: dict[str, float] = {}
    for name, (key, power) in spec.multipliers.items():
        if not isinstance(value := full.get(key), int | float) or isinstance(value, bool) or not value > 0:
            raise ConfigError("a model from config.json", f"{key} is {value!r}", f"give {key} a positive number")
        factors[name] = float(value) ** power
    scores = factors.get("scores", head_width**-0.5) * head_width**0.5
    return Multipliers(**{**factors, "scores": 1.0 if math.isclose(scores, 1) else scores})


def _unrotated(full: HF, spec: FamilySpec, windowed: tuple[int, ...]) -> tuple[int, ...]:
    """Return the layers without rotary embedding."""
    L = _size(full, "num_hidden_layers")
    if spec.unrotated in ("full", "unwindowed"):
        rotated_all = spec.unrotated == "full" and full.get("sliding_window") is None
        return () if rotated_all else _others(tuple(range(L)), windowed)
    if spec.unrotated == "none":
        return ()
    every = 0 if full.get("no_rope_layers") else _size(full, "no_rope_layer_interval")
    rotated = full.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(L)]
    if len(rotated) < L:
        found = f"{len(rotated)} values in no_rope_layers, and {L} layers"
        raise ConfigError("layers of attention from config.json", found, "give no_rope_layers a value for each layer")
    return tuple(i for i in range(L) if not rotated[i])


def _window(full: HF, spec: FamilySpec) -> tuple[int | None, tuple[int, ...]]:
    """Return the sliding window, and the layers that use it."""
    window, layers, rule = full.get("sliding_window"), range(_size(full, "num_hidden_layers")), spec.window
    switched_off = rule in ("switched", "upper") and not full.get("use_sliding_window", False)
    if rule == "none" or window is None or switched_off:
        return None, ()
    kinds = full.get("layer_types") if rule in ("upper", "alternate", "pattern") else None
    if not kinds and rule == "pattern":
        slides = tuple(i for i in layers if (i + 1) % _size(full, "sliding_window_pattern"))
    elif kinds:
        if len(kinds) < len(layers):
            found = f"{len(kinds)} values in layer_types, and {len(layers)} layers"
            raise ConfigError("layers of attention from config.json", found, "give layer_types a value for each layer")
        slides = tuple(i for i, kind in zip(layers, kinds, strict=False) if kind == "sliding_attention")
    else:
        begin, step = int(full["max_window_layers"]) if rule == "upper" else 0, 2 if rule == "alternate" else 1
        slides = tuple(layers[begin::step])
    slides = _others(slides, tuple(layers[-1:])) if spec.by_layer else slides  # like transformers, whatever is listed
    return (int(window), slides) if slides else (None, ())


def native_obstacle(hf: HF) -> str | None:
    """Return the reason why our own decoder does not support this config.json; None: it does.

    Raises:
        NeedsError: a RoPE type in one of our families that transformers does not support either.
    """
    if is_multimodal(hf) and (obstacle := nested_obstacle(hf)) is not None:
        return obstacle
    hf = as_text(hf)
    family = hf.get("model_type")
    spec = FAMILIES.get(str(family))
    if spec is None:
        return f"model_type {family!r}, where our decoder has {', '.join(FAMILIES)}"
    if (obstacle := rope_obstacle(hf, spec)) is not None:
        return obstacle
    if spec.by_layer and not all(isinstance(value, Mapping) for value in rope_settings(hf).values()):
        return "the same RoPE parameters for all layers; our decoder reads a mapping per layer kind"
    for key, allowed, instead in limits(str(family)):
        unread = key == "first_k_dense_replace" and hf.get("mlp_layer_types")
        if key in hf and hf[key] not in allowed and not unread:
            return f"{key} {hf[key]!r}, {instead}"
    if spec.latent and hf.get("num_key_value_heads") not in (None, hf.get("num_attention_heads")):
        return f"num_key_value_heads {hf['num_key_value_heads']}, not num_attention_heads, with latent attention"
    odd = sorted(set(hf.get("layer_types") or ()) - {"full_attention", spec.other_layers})
    return f"layer types {', '.join(map(repr, odd))}" if odd else None


def sdpa_obstacle(hf: HF) -> str | None:
    """Return the reason why transformers' model of a config.json cannot run sdpa; None: it can, or torch is missing."""
    cap = text_config(hf).get("attn_logit_softcapping")
    if cap is not None:
        return f"attn_logit_softcapping {cap}, which sdpa ignores"
    try:
        from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

        classes: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if is_multimodal(hf) else MODEL_FOR_CAUSAL_LM_MAPPING
        model: Any = classes[CONFIG_MAPPING[str(hf.get("model_type"))]]
    except (ImportError, KeyError):
        return None
    return None if model._supports_sdpa else f"a model of type {hf['model_type']!r}, without sdpa in transformers"


def refuse_balance(text: HF) -> None:
    """Raise NeedsError if transformers would add a router balance loss, which only our decoder supports."""
    factor = next((text[key] for key in ("router_aux_loss_coef", "aux_loss_alpha") if text.get(key)), None)
    if text.get("output_router_logits") and factor is not None:
        asked = f"to train a model of type {text.get('model_type')!r} through transformers"
        found = f"output_router_logits true: a balance loss of the router, times {factor}, which optrush does not apply"
        raise NeedsError(asked, found, 'set "output_router_logits": false in config.json: train without that loss')


def refuse_foreign(hf: HF) -> None:
    """Raise NeedsError for a model without an unquantized causal language model that is trained on text.

    For an image-text model this is its language model.
    """
    kind, multimodal, text = str(hf.get("model_type", "")), is_multimodal(hf), as_text(hf)
    asked = f"to train a model of type {kind!r}"
    dense = "use a text-only causal language model (architecture ...ForCausalLM)"
    spec = FAMILIES.get(str(text.get("model_type")))
    found = next((f"{key} = {text[key]}" for key in EXPERTS if text.get(key) not in (None, 0, 1)), None)
    if found is not None and spec is not None and spec.experts is None:
        do = f"use a dense model, or one of type {', '.join(MIXTURES)}"
        raise NeedsError(asked, f"a mixture of experts ({found}), but this type's class is dense", do)
    if spec is None:
        refuse_balance(text)
    for key in OTHER_MEDIA if not multimodal else ():
        if hf.get(key) not in (None, {}):
            raise NeedsError(asked, f"a model of more than text ({key} in config.json)", dense)
    names = hf.get("architectures") or ()
    if hf.get("is_encoder_decoder"):
        raise NeedsError(asked, "an encoder-decoder (is_encoder_decoder is true)", dense)
    ends = ("ForCausalLM", "LMHeadModel", *(("ForConditionalGeneration",) if multimodal else ()))
    for name in names:
        if not str(name).endswith(ends):
            raise NeedsError(asked, f"architecture {name}, which is not a causal language model", dense)
    given = [part.get("quantization_config") for part in (hf, text)]
    config = next((settings for settings in given if settings is not None), None)
    packed = isinstance(config, dict) and config.get("quant_method") == "mxfp4"
    readable = is_readable(config) and not multimodal and spec is not None
    if config is not None and not readable and not (packed and spec is not None and spec.mxfp4):
        method = (
            str(config.get("quant_method", "unnamed")) if isinstance(config, dict) else f"not a mapping, {config!r}"
        )
        method += f", {config['bits']} bits" if isinstance(config, dict) and "bits" in config else ""
        do = "start from the unquantised checkpoint; --with nf4 or int8 quantises it while loading"
        do = "add --with nf4 --with lora" if method == "bitsandbytes" and not multimodal else do
        raise NeedsError(asked, f"weights quantised on disk (quantization_config, method {method})", do)
