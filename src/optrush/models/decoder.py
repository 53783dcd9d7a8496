"""One decoder for the Llama-shaped families of `models/families.py`: dense or with experts, with latent attention,
delta-rule layers, layers that attend within chunks, or layers without rotary embedding.

Legend, used everywhere: B rows, T tokens per row, D width, F feed-forward width, H heads, K key/value heads, E head
width, V vocabulary, L layers.

Differs from the published models only in the layout of two weights. The query, key and value rows of one key/value head
are adjacent (K, H/K + 2, E), and gate and up rows alternate (F, 2): sharding the first dimension gives every rank
complete heads and gate/up pairs. A linear lists its pieces (`output_splits`) for export, adapters, and optimizers of
single matrices.

The padding id is an ordinary token: transformers gives its embedding row no gradient if pad_token_id is set. Here it is
trained like any other token, since padding is never a target and never read.

Built on the meta device and without buffers, so allocating memory loses nothing. Techniques change it by its slots
(`block_call`, `block.split_and_rope`, `block.attention`, `block.mlp`, `norm.impl`, `linear.matmul`, `head.enter`,
`head.nll`, `experts.activation`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optrush.data.batch import Documents, Images
from optrush.errors import NeedsError
from optrush.kernels import attention, rope, swiglu, widen
from optrush.kernels.cross_entropy import LossKernel, Reduce, Whole
from optrush.models.delta_rule import RULES, DeltaRule
from optrush.models.experts import Experts, StackedMatrices
from optrush.models.latent_attention import LatentAttention
from optrush.models.layers import LayerInputs, Pieces, UnitNorm, WholeNorm, norm_class
from optrush.models.layers import Linear as Linear
from optrush.models.layers import Product as Product
from optrush.models.rope_angles import angles, frequencies, query_scales
from optrush.models.rope_config import RopeShape
from optrush.models.shapes import ModelShape

if TYPE_CHECKING:
    from optrush.models.vision import Laid, Tower


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the function: the default of the `block_call` slot."""
    return function(*args, **kwargs)


def unchanged(hidden: Tensor) -> Tensor:
    """Return the hidden states: the default of the `head.enter` slot."""
    return hidden


class Block(nn.Module):
    """One layer: attention and a gated feed-forward, each after a norm and added to the residual.

    A layer may read the keys and values of an earlier one, its `source`, whose block returns them last.
    A delta-rule layer has `delta` instead of attention.
    A layer with low-rank attention has `latent` instead of `qkv`, and values of another width than E.
    A layer with experts has `experts` instead of `gate_up` and `down`; if it has all, the latter are shared experts.
    """

    q_norm: nn.Module | None
    k_norm: nn.Module | None

    def __init__(self, shape: ModelShape, layer: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        s = shape.at(layer)
        at: dict[str, Any] = {"device": device, "dtype": dtype}
        D, E, F_, P = s.width, s.head_width, s.ff_width, shape.input_width
        self.parts, sources = s.parts, () if shape.by_layer is None else shape.by_layer.sources
        self.source, self.lends = sources[layer] if sources else None, layer in sources
        qkv: Pieces = (("q", s.heads // s.kv_heads * E * (1 + s.gated)), *((part, E) for part in s.parts[1:]))
        plain = norm_class(s.norm, s.centred)
        self.norm1 = plain(D, s.norm_eps, **at)
        self.latent = self.delta = self.q_norm = self.k_norm = None
        self.gated = s.gated
        if s.delta is not None and layer in s.delta.layers:
            self.delta = DeltaRule(s, **at)
        elif s.latent is not None:
            self.latent = LatentAttention(s, **at)
        else:
            self.qkv = Linear(D, qkv, groups=s.kv_heads, bias=s.qkv_bias, **at)
        if s.qk_norm and self.delta is None:
            norm, widths = (WholeNorm, (s.heads * E, s.kv_heads * E)) if s.whole_qk_norm else (plain, (E, E))
            self.q_norm = norm(widths[0], s.norm_eps, **at)
            self.k_norm = None if s.parts == "q" else norm(widths[1], s.norm_eps, **at)
        self.v_norm = UnitNorm(s.norm_eps) if s.value_norm else None
        if self.delta is None:
            self.o = Linear(s.attended_width, (("o", D),), bias=s.o_bias, **at)
        self.window = s.window if layer in s.window_layers else None
        self.sinks = nn.Parameter(torch.empty(s.heads, **at)) if s.sinks else None
        self.cap = s.score_cap
        self.norm2: Any = None if s.norms == "beside" else plain(D, s.norm_eps, **at)
        self.order, self.residual, self.query = s.norms, s.multipliers.residual, s.multipliers.scores
        if s.norms == "around":
            self.leaving1, self.leaving2 = plain(D, s.norm_eps, **at), plain(D, s.norm_eps, **at)
        self.experts = None
        if s.experts is not None and layer in s.experts.layers:
            self.experts = Experts(s, **at)
            F_ = s.experts.shared_width
        if F_:
            pairs: Pieces = (("up", 1),) if s.gateless else (("gate", 1), ("up", 1))
            self.gate_up = Linear(D, pairs, groups=F_, bias=s.mlp_bias, **at)
            self.down = Linear(F_, (("down", D),), bias=s.mlp_bias, **at)
        self.shared = self.experts is not None and F_ > 0  # a dense part in addition to the experts
        if self.experts is not None and self.experts.shape.beside:
            self.dense_leaving, self.experts_norm, self.experts_leaving = (plain(D, s.norm_eps, **at) for _ in range(3))
        self.shared_gate = None
        if self.shared and s.experts is not None and s.experts.shared_gate:
            self.shared_gate = Linear(D, (("shared_gate", 1),), bias=False, **at)
        self.input_gate = None
        if P:
            self.input_gate = Linear(D, (("input_gate", P),), bias=False, **at)
            self.input_out = Linear(P, (("input_out", D),), bias=False, **at)
            self.leaving3 = plain(D, s.norm_eps, **at)
        fixed = torch.empty(1, **at) if s.layer_scalar else None
        self.layer_scalar = None if fixed is None else nn.Parameter(fixed, requires_grad=False)  # as published
        self.head_width = E
        self.group = s.heads // s.kv_heads  # query heads per key/value head
        self.split_and_rope: rope.SplitAndRotate = rope.split_and_rotate_pairs if s.pairs else rope.split_and_rotate
        self.rotated, self.chunk = True, None  # tokens per chunk of its attention
        if (chunks := s.chunks) is not None:
            self.rotated, self.chunk = layer not in chunks.unrotated, chunks.size if layer in chunks.layers else None
            self.split_and_rope = self.split_and_rope if self.rotated else rope.split_and_scale
            if chunks.normed and self.rotated:  # before the rotation, which preserves lengths
                self.q_norm, self.k_norm = UnitNorm(s.norm_eps), UnitNorm(s.norm_eps)
        if layer in s.unrotated:
            self.split_and_rope = rope.split_heads
        self.local = s.local_rope is not None and self.window is not None  # it uses the windowed layers' rotation
        self.attention: attention.Attend = attention.masked
        self.mlp: swiglu.Mlp = swiglu.gelu_mlp if s.gelu else swiglu.gated_mlp
        self.mlp = swiglu.plain_mlp if s.gateless else self.mlp

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, documents: Documents, given: Tensor | None = None, *lent: Tensor
    ) -> Tensor | tuple[Tensor, ...]:
        """x (B, T, D), cos and sin (B, T, 1, E) -> (B, T, D), and with experts their load (`Experts.forward`).

        given: (B, T, P), this layer's output of `LayerInputs`. lent: keys and values returned by `source`.
        Without a rotation cos and sin are (B, T, 1, 1), the factor of the queries.
        """
        if self.order != "before" or self.residual != 1:
            return self._in_order(x, cos, sin, documents, given, [*lent])
        x, h = self.norm1.add_and_norm(x)
        x, h = self.norm2.add_and_norm(x, self._mix(h, cos, sin, documents))
        if self.experts is not None:
            y, load = self.experts(h, documents.filled)
            if self.shared_gate is not None:
                shared = self.mlp(torch.zeros_like(x), h, self.gate_up, self.down)
                return x + y + torch.sigmoid(self.shared_gate(h)) * shared, load
            x = x + y if not self.shared else self.mlp(x + y, h, self.gate_up, self.down)
            return x, load
        return self.mlp(x, h, self.gate_up, self.down)

    def _in_order(
        self, x: Tensor, cos: Tensor, sin: Tensor, documents: Documents, given: Tensor | None, lent: list[Tensor]
    ) -> Tensor | tuple[Tensor, ...]:
        """Return the output of `forward` for a block with other norm placement, or a residual multiplier."""
        if self.order == "beside":
            h = self.norm1(x)
            return x + self._mix(h, cos, sin, documents) + self.mlp(None, h, self.gate_up, self.down)
        before, after = self.order != "after", {"after": (self.norm1, self.norm2)}.get(self.order)
        if self.order == "around":
            after = self.leaving1, self.leaving2
        mixed = self._mix(self.norm1(x) if before else x, cos, sin, documents, lent)
        x = x + (mixed if after is None else after[0](mixed)) * self.residual
        fed = self.mlp(None, self.norm2(x) if before else x, self.gate_up, self.down)
        load: list[Tensor] = []
        if self.experts is not None:
            routed, *load = self.experts(self.experts_norm(x), documents.filled, x)
            fed = self.dense_leaving(fed) + self.experts_leaving(routed)
        x = x + (fed if after is None else after[1](fed)) * self.residual
        if self.input_gate is not None and given is not None:
            x = x + self.leaving3(self.input_out(F.gelu(self.input_gate(x), approximate="tanh") * given))
        x = x if self.layer_scalar is None else x * self.layer_scalar.to(x.dtype)
        lent = lent if self.lends else []
        return (x, *load, *lent) if load or lent else x

    def _mix(
        self, h: Tensor, cos: Tensor, sin: Tensor, documents: Documents, lent: list[Tensor] | None = None
    ) -> Tensor:
        """Mix the tokens of each document: h (B, T, D) -> (B, T, D).

        lent: see `_own_heads`.
        """
        if self.delta is not None:
            mixed: Tensor = self.delta(h, documents)
            return mixed
        if self.gated:
            qkv = self.qkv(h).unflatten(-1, (-1, 2 * self.group + 2, self.head_width))
            q, gate = qkv[:, :, :, :-2].unflatten(3, (-1, 2)).unbind(4)  # (B, T, K, H/K, E) each
            qkv = torch.cat((q, qkv[:, :, :, -2:]), 3)
            q, k, v = self.split_and_rope(qkv, cos, sin, self.q_norm, self.k_norm)
            attended = self.attention(q, k, v, documents, **self._masks(documents))
            attended = attended * torch.sigmoid(gate.flatten(2, 3))
        else:
            q, k, v = (
                self._heads(h, cos, sin) if lent is None or self.v_norm is None else self._own_heads(h, cos, sin, lent)
            )
            attended = self.attention(q, k, v, documents, **self._masks(documents))
        out: Tensor = self.o(attended.flatten(2))
        return out

    def _heads(self, h: Tensor, cos: Tensor, sin: Tensor) -> rope.Heads:
        """Return queries (B, T, H, E), keys and values (B, T, K, E) of h (B, T, D), after the rotation, if any."""
        if self.latent is not None:
            heads: rope.Heads = self.latent(h, cos, sin)
            return heads
        qkv = self.qkv(h).unflatten(-1, (-1, self.group + 2, self.head_width))  # (B, T, K, H/K + 2, E)
        q, k, v = self.split_and_rope(qkv, cos, sin, self.q_norm, self.k_norm)
        return (q if self.query == 1 else q * self.query), k, v

    def _own_heads(self, h: Tensor, cos: Tensor, sin: Tensor, lent: list[Tensor]) -> rope.Heads:
        """Return the same as `_heads`; keys and values may share one matmul, or come from another layer.

        lent: keys and values of `source`; without a source, this layer's are written there.
        """
        assert self.q_norm is not None and self.v_norm is not None
        qkv = self.qkv(h).unflatten(-1, (-1, self.group + len(self.parts) - 1, self.head_width))
        q = rope.rotate(self.q_norm(qkv[:, :, :, : self.group].flatten(2, 3)), cos, sin)
        if self.k_norm is not None:
            k = rope.rotate(self.k_norm(qkv[:, :, :, self.group]), cos, sin)
            lent[:] = k.to(qkv.dtype), self.v_norm(qkv[:, :, :, -1])
        return q.to(qkv.dtype) * self.query, lent[0], lent[1]

    def _masks(self, documents: Documents) -> dict[str, Any]:
        """Return attention's extra arguments; no window if it is as long as the rows."""
        options: dict[str, Any] = {}
        if self.window is not None and self.window < documents.ids.shape[1]:
            options["window"] = self.window
        if self.sinks is not None:
            options["sinks"] = self.sinks
        if self.cap is not None:
            options["cap"] = self.cap
        return options


class Head(nn.Module):
    """The output layer with its loss. Call it instead of reading its weight: sharding gathers the weight in a call."""

    bias: nn.Parameter | None  # (V,)
    scores = False  # one score per token instead of logits

    def __init__(self, weight: Tensor, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        assert isinstance(weight, nn.Parameter)
        self.weight = weight  # (V, D)
        self.register_parameter("bias", bias)
        self.scale = 1.0
        self.softcap: float | None = None
        self.nll: LossKernel = Whole()
        self.enter: Callable[[Tensor], Tensor] = unchanged

    def forward(self, hidden: Tensor, labels: Tensor, reduce: Reduce = "sum") -> Tensor:
        """hidden (B, T, D), or the input of `enter`; labels (B, T) -> float32 () or, by token, (B, T)."""
        losses = self.nll(
            self.enter(hidden).flatten(0, 1), self.weight, labels.flatten(), bias=self.bias, scale=self.scale,
            softcap=self.softcap, reduce=reduce,
        )  # fmt: skip
        return losses if reduce == "sum" else losses.view(labels.shape)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (..., D) -> (..., V), at least float32. Reads the weight: unsharded heads only."""
        y = widen(F.linear(hidden, self.weight, self.bias))
        y = y if self.scale == 1 else y * self.scale  # the multiplication copies all logits
        return y if self.softcap is None else torch.tanh(y / self.softcap) * self.softcap


class Decoder(nn.Module):
    """Embedding, blocks and the last norm; the head is a submodule that the objective calls."""

    supports_packing = True  # documents of one row do not attend to each other
    frozen_flops = 0  # cached result of `frozen_flops()`, which walks all modules; `flops` runs per row

    def __init__(self, shape: ModelShape, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        at: dict[str, Any] = {"device": device, "dtype": dtype}
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.width, **at)
        self.blocks = nn.ModuleDict({str(i): Block(shape, i, **at) for i in range(shape.layers)})
        self.norm = norm_class(shape.norm, shape.centred)(shape.width, shape.norm_eps, **at)
        self.inputs = LayerInputs(shape, **at) if shape.input_width else None
        weight = self.embedding.weight
        self.head = Head(weight if shape.tied else nn.Parameter(torch.empty(shape.vocab, shape.width, **at)))
        self.head.scale, self.head.softcap = shape.multipliers.logits, shape.softcap
        self.ties: tuple[tuple[str, str], ...] = (("head.weight", "embedding.weight"),) if shape.tied else ()
        self.tied = shape.tied  # on whichever rank they are
        self.block_call: Callable[..., Any] = call
        self.stream_ranks = 1  # that shard T of the hidden states between blocks
        self.elsewhere: dict[str, Linear] = {}  # other ranks' blocks, on the meta device, by name
        # Of a base that reads images. A trained tower is the submodule `visual`, too.
        self.tower: Tower | None = None
        self.load: Tensor | None = None  # of the last forward pass, layers with experts: (L, 2, N)
        # Cached per device, outside the parameters and buffers: computed on the host like the published models (a
        # device's pow differs in the last bit), and a copy in every step would prevent a graph capture.
        self._frequencies: dict[tuple[torch.device, RopeShape], Tensor] = {}

    def forward(self, tokens: Tensor, positions: Tensor, documents: Documents, images: Images | None = None) -> Tensor:
        """tokens and positions (B, T) -> hidden states after the last norm (B, T, D)."""
        x, laid = self.embed(tokens), None
        if images is not None:
            assert self.tower is not None
            laid = self.tower(images)
            x = laid.embed(x)
        elif self.tower is not None and self.tower.trained and torch.is_grad_enabled():
            x = x + self.tower.nothing().to(x.dtype)  # so that all its gradients exist on every rank
        slots = () if images is None or self.tower is None else (images.slots, self.tower.pad)
        given = None if self.inputs is None else self.inputs(tokens, x, *slots)
        hidden: Tensor = self.norm(self.through(x, positions, documents, self.blocks.values(), given, laid))
        return hidden

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens (B, T) -> input of the first block (B, T, D)."""
        x: Tensor = self.embedding(tokens)
        factor = self.shape.multipliers.embedding
        return x if factor == 1 else x * torch.tensor(factor).to(x.dtype).item()  # rounded as published

    def through(
        self, x: Tensor, positions: Tensor, documents: Documents, blocks: Iterable[nn.Module],
        given: Tensor | None = None, laid: Laid | None = None,
    ) -> Tensor:  # fmt: skip
        """Run hidden states x (B, T, D) through some of the blocks; with images, through all.

        given: (B, T, L, P), the output of `LayerInputs`.
        """
        loads, chunks = [], self.shape.chunks
        lent: dict[int, Sequence[Tensor]] = {}
        # Pairs are rotated in float32, as published.
        wide = torch.promote_types(x.dtype, torch.float32) if self.shape.pairs else x.dtype
        turned = positions if laid is None or laid.positions is None else laid.positions
        rotation = self.angles(turned, wide)
        local = None if (r := self.shape.local_rope) is None else self.angles(positions, x.dtype, r)
        scale, within = None, documents
        unwindowed = documents  # for layers without a window
        if self.tower is not None and self.tower.mutual == "windowed":
            unwindowed = documents._replace(mutual=None)
        if chunks is not None:
            scale, within = query_scales(chunks.temperature, positions), documents.in_chunks(chunks.size, positions)
        for number, block in enumerate(blocks):
            cos, sin = local if local and block.local else rotation if block.rotated else (scale, scale)
            source, extras = cast("int | None", block.source), cast("list[Tensor | None]", [])
            if self.shape.by_layer is not None:
                extras = [None if given is None else given[:, :, number], *(() if source is None else lent[source])]
            output = self.block_call(
                block,
                x,
                cos,
                sin,
                within if block.chunk is not None else unwindowed if block.window is None else documents,
                *extras,
            )
            x, *rest = output if isinstance(output, tuple) else (output,)
            loads += [rest.pop(0)] if block.experts is not None else []
            lent[number] = rest
            x = x if laid is None else laid.after(number, x)
        if loads:
            self.load = torch.stack(loads)
        return x

    def angles(self, positions: Tensor, dtype: torch.dtype, rope: RopeShape | None = None) -> tuple[Tensor, Tensor]:
        """positions (B, T), or by pair (B, T, E/2) -> cos and sin (B, T, 1, E), in float32 until the last cast."""
        device, rope = positions.device, rope or self.shape.rope
        if (device, rope) not in self._frequencies:
            width = self.shape.head_width if rope == self.shape.local_rope else self.shape.rotated_width
            self._frequencies[device, rope] = frequencies(rope, width).to(device)
        angle = angles(rope, self._frequencies[device, rope], positions)
        angle = torch.cat((angle, angle), -1)[:, :, None]
        return (angle.cos() * rope.scale).to(dtype), (angle.sin() * rope.scale).to(dtype)

    def linears(self) -> Iterator[tuple[str, Linear]]:
        """Yield all linears of the blocks with their names, e.g. 'blocks.0.qkv'; the head is not included."""
        for name, module in self.named_modules():
            if isinstance(module, Linear):
                yield name, module

    def set_attention(self, name: str) -> int:
        """Put a function of `kernels.attention` into every block; return the number of blocks.

        Raises NeedsError: no such function, or no support for the model's score cap or bidirectional image tokens.
        """
        if name not in attention.ATTENTIONS:
            raise NeedsError(f"attention {name!r}", f"known: {', '.join(attention.ATTENTIONS)}", "choose one of them")
        if (cap := self.shape.score_cap) is not None and name != "masked":
            found = f"attn_logit_softcapping {cap:g}, which its kernel does not support"
            raise NeedsError(f"attention {name!r}", found, "use masked attention")
        if self.tower is not None and self.tower.mutual != "none" and name not in ("masked", "sdpa"):
            found = "bidirectional attention between image tokens"
            raise NeedsError(f"attention {name!r}", found, "use --with attention:impl=sdpa")
        for block in self.blocks.values():
            assert isinstance(block, Block)
            block.attention = attention.ATTENTIONS[name]
        return len(self.blocks)

    def set_rule(self, name: str) -> int:
        """Put a function of `models.delta_rule` into every block with a delta rule; return their number."""
        blocks = [m for m in self.modules() if isinstance(m, DeltaRule)]
        for block in blocks:
            block.rule = RULES[name]
        return len(blocks)

    def flops(self, tokens: int, attended: int) -> int:
        """Return training FLOPs: `ModelShape.flops` minus `frozen_flops` for weights that are not trained."""
        return self.shape.flops(tokens, attended) - self.frozen_flops * tokens

    def tie(self) -> None:
        """Restore every alias in `ties`: allocating memory gives each its own parameter."""
        redo_ties(self, self.ties)

    def restore_buffers(self, device: torch.device) -> None:
        """Restore the buffers of a trained tower, the only part with buffers."""
        if self.tower is not None:
            self.tower.restore_buffers(device)


def frozen_flops(model: Any) -> int:
    """Return the FLOPs per token saved by frozen or adapted linears, out of 6 per matrix weight.

    A frozen weight has no gradient: 4 instead of 6; an adapter's weights count 6 (docs/notation.md). Below the first
    block with a trained parameter there are no gradients at all, if the embedding is frozen: 2.
    """
    dense = isinstance(model, Decoder) and model.head.scores  # `ModelShape.flops` counts a head of V rows
    flop = 6 * (model.shape.vocab - 1) * model.shape.width if dense else 0
    flop += 0 if model.head.weight is None or model.head.weight.requires_grad else 2 * model.head.weight.numel()
    below = _without_backward(model)
    if (inputs := getattr(model, "inputs", None)) is not None and not inputs.project.weight.requires_grad:
        flop += (2 if model.embedding.weight.requires_grad else 4) * inputs.project.weight.numel()
    for experts in (m for m in model.modules() if isinstance(m, StackedMatrices)):
        active, saved = experts.active / experts.count, 4 if experts in below else 2
        if isinstance(experts, Experts) and not experts.router.requires_grad:
            flop += saved * experts.router.numel()
        for kind, size in experts.sizes.items():
            if experts.quantized is not None or not experts.get_parameter(kind).requires_grad:
                flop += round(saved * math.prod(size) * active)
        if experts.adapter is not None:
            flop -= round(6 * active * sum(p.numel() for p in experts.adapter.parameters()))
    for _, linear in model.linears():
        if linear.quantized is not None or not linear.weight.requires_grad:
            flop += (4 if linear in below else 2) * linear.in_features * linear.out_features
        if linear.adapter is not None:
            flop -= 6 * sum(p.numel() for p in linear.adapter.parameters() if p.dim() > 1)
    return flop


def _without_backward(model: Any) -> set[nn.Module]:
    """Return the modules without a backward pass: the first blocks, while they and the embedding are frozen."""
    frozen = set[nn.Module]()
    inputs = getattr(model, "inputs", None)
    for part in (model.embedding, *([] if inputs is None else [inputs]), *model.blocks.values()):
        if any(p.requires_grad for p in part.parameters()):
            break
        frozen.update(part.modules())
    return frozen


def redo_ties(model: nn.Module, ties: tuple[tuple[str, str], ...]) -> None:
    """Set each alias of (alias, name) to the parameter of that name."""
    for alias, name in ties:
        owner, _, last = alias.rpartition(".")
        setattr(model.get_submodule(owner), last, model.get_parameter(name))
