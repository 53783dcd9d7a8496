"""Low-rank adapters of a linear (LoRA, with rsLoRA's scaling and DoRA's magnitudes): W x + s B A x.

The matrices A (rank x width) of a fused linear's chosen pieces are stacked, so one matmul computes all of A x. B is in
the linear's order of rows and is padded with zeros to one column per row of A, so one matmul adds all of B A x. Matmuls
are in the dtype of the linear's output; the parameters are float32, or bfloat16 with `Settings.narrow`.

DoRA scales each row of the sum to a learned length: m (W + s B A) x / |W + s B A|. The lengths are constants for the
gradient (section 4.3 of the paper), computed without the sum: |w + s b A|^2 = |w|^2 + 2 s b.(A w) + s^2 b A A^T b.

Source: https://arxiv.org/abs/2106.09685 (LoRA), https://arxiv.org/abs/2312.03732 (rsLoRA),
https://arxiv.org/abs/2402.09353 (DoRA). The initial values are PEFT's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optrush.hardware import TILE, tiles
from optrush.kernels import compute_dtype, rms_norm, rope
from optrush.kernels.attention import flash4
from optrush.kernels.lora_matmul import (
    ALIGNED,
    MatmulBackend,
    Padding,
    concat_padded,
    low_rank,
    low_rank_gradients,
    with_padding,
)  # fmt: skip
from optrush.kernels.swiglu_quack import gated_matmul, gated_matmul_backward
from optrush.models.decoder import Block, Linear
from optrush.models.weights import Initializer, Shape, WeightMap, seeded_generator
from optrush.peft.adapter import AdapterToggle, LinearAdapter, fill_constant, fill_from
from optrush.peft.decomposed import Decomposed
from optrush.peft.quantized import PackedLayout, unpacked

# --- A frozen linear with a low-rank sum as one function, W x + U A x, forward and backward.
#
# Saved for the backward pass: the input, A x, the small matrices, and the stored form of the weight, but no dequantized
# weight.
#
# Legend: r rows of A; U is B with its factor.


def weight_of(
    layout: PackedLayout | None, parts: Sequence[Tensor], use: str, narrow: Tensor, dim: int, room: Padding
) -> Tensor:
    """Return a dense weight; if `room` requires it, with padding for `narrow` below (dim 0) or to the right (1).

    Args:
        layout: None: `parts` is the dense weight, already padded.
        use: like in `quantized.dequantize_linear`.
    """
    if layout is None:
        return parts[0]
    many = tiles(narrow.shape[dim]) if room.weight else 0
    if not many:
        return unpacked(parts, layout, narrow.dtype, use)
    wide = unpacked(parts, layout, narrow.dtype, use, (0, many) if dim else (many, TILE))
    return wide[:, :-many] if dim else wide[:-many, :-TILE]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        """Arguments: x (N, D), A (r, D), U (rows, r), bias (rows,) or None, all of one dtype; backend; padding; weight.

        Not named, like in `quantized._Product`. The weight is its layout and its parts, and has no gradient.
        """
        x, a, u, bias, by, room, layout, *parts = given
        ctx.layout, ctx.by, ctx.room = layout, by, room
        with torch.autocast(x.device.type, enabled=False):
            weight = weight_of(layout, parts, "forward", u, 1, room)
            y, z = low_rank(x, weight.t(), a.t(), u.t(), by, bias, padded=room.weight, padded_x=room.x)
        ctx.save_for_backward(x, z, a, u, *parts)
        return y

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        x, z, a, u, *parts = ctx.saved_tensors  # read once, as torch's checkpoints require
        grad, d_x, d_bias = incoming[0], None, None  # (N, rows)
        with torch.autocast(grad.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                weight = weight_of(ctx.layout, parts, "backward", a, 0, ctx.room)
                d_x, d_z = low_rank(grad, weight, u, a, ctx.by, padded=ctx.room.weight, padded_x=ctx.room.grad)
            else:
                d_z = grad @ u  # (N, r)
            if ctx.needs_input_grad[3]:
                d_bias = grad.sum(0)
            d_a, d_u = d_z.t() @ x, grad.t() @ z
        return d_x, d_a, d_u, d_bias, None, None, None, *[None] * len(parts)


@dataclass(frozen=True)
class Settings:
    """The options of all adapters of a model."""

    rank: int
    alpha: float
    dropout: float
    rslora: bool
    dora: bool
    narrow: bool = False  # bfloat16 parameters

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.narrow else torch.float32

    @property
    def scaling(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    def fields(self) -> dict[str, Any]:
        """Return the fields of PEFT's adapter_config.json."""
        alpha = int(self.alpha) if self.alpha == int(self.alpha) else self.alpha  # like PEFT
        return {
            "peft_type": "LORA", "r": self.rank, "lora_alpha": alpha, "lora_dropout": self.dropout,
            "use_rslora": self.rslora, "use_dora": self.dora, "bias": "none", "fan_in_fan_out": False,
            "init_lora_weights": True, "rank_pattern": {}, "alpha_pattern": {},
        }  # fmt: skip


class Lora(LinearAdapter):
    """A LoRA or DoRA adapter. Legend: r rank, n chosen pieces, D the linear's width."""

    def __init__(
        self, linear: Linear, modules: Sequence[str], names: Collection[str], switch: AdapterToggle, settings: Settings,
        quack: bool = False, split: Decomposed | None = None,
    ) -> None:  # fmt: skip
        """Build the parameters.

        Args:
            quack: multiply by the frozen weight with QuACK's kernels, if its sizes allow.
            split: source of the initial adapter, if the frozen weight is the published one minus that adapter.
        """
        super().__init__(linear, modules, names, switch)
        self.s, n = settings, len(self.hf)
        self.first = split
        self.by: MatmulBackend = "quack" if quack and self.width % ALIGNED == self.rows % ALIGNED == 0 else "cublas"
        at: dict[str, Any] = {"device": torch.device("meta"), "dtype": settings.dtype}
        self.a = nn.Parameter(torch.empty(n * settings.rank, self.width, **at))  # (n r, D)
        self.b = nn.Parameter(torch.empty(self.chosen_rows, settings.rank, **at))  # (chosen rows, r)
        self.magnitude = nn.Parameter(torch.empty(self.chosen_rows, **at)) if settings.dora else None
        if settings.dora:
            self.unsplittable = "dora=true, which needs norms of whole weight rows"
        elif settings.dropout:
            self.unsplittable = f"dropout={settings.dropout:g}, which would be drawn alike for each rank's columns"
        self._dense, stored = linear.dequantized, linear.quantized
        # Decided here, because torch 2.11 cannot compile a comparison of methods; in a tuple, so that the module is not
        # registered as a submodule here.
        held = stored is not None and linear.matmul == stored.product
        self._stored, self._matrix = (stored if held else None,), linear.matmul is F.linear

    def adapted(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Implement `LinearAdapter.adapted`, as one function if only U A x is added to a frozen matrix's output."""
        dtype = compute_dtype(x)
        low_rank, base = self.low_rank(dtype), self._base(weight, dtype)
        if low_rank is not None and base is not None:
            bias = None if bias is None else bias.to(dtype)
            flat = x.to(dtype).flatten(0, -2)
            out: Tensor = _Linear.apply(flat, *low_rank, bias, self.by, self.room, *base)  # type: ignore[no-untyped-call]
            return out.view(*x.shape[:-1], -1)
        y = self.inner(x, weight, None if self.s.dora else bias)
        low = F.dropout(x.to(y.dtype), self.s.dropout, self.training) if self.s.dropout else x.to(y.dtype)
        h = F.linear(low, self.part(self.a, 1, 1).to(y.dtype)).flatten(0, -2)  # (N, n r)
        out = torch.addmm(
            y.flatten(0, -2), h, self.up(self.part(self.b, 0, 0).to(y.dtype)).t(), alpha=self.s.scaling
        )  # (N, rows)
        if self.magnitude is not None:
            dense = self._dense(y.dtype) if weight is None else weight.to(y.dtype)
            out = (out * self.spread(self.magnitude / self.pick(self.lengths(dense)))).to(y.dtype)
            out = out if bias is None else out + bias.to(y.dtype)
        return out.view(y.shape)

    def low_rank(self, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        if self.s.dora or self.s.dropout:
            return None
        a, b = self.part(self.a, 1, 1), self.part(self.b, 0, 0)
        return a.to(dtype), (self.up(b) * self.s.scaling).to(dtype)  # rounded once

    def _base(self, weight: Tensor | None, dtype: torch.dtype) -> tuple[Any, ...] | None:
        """Return layout and parts of the frozen matrix if the inner matmul does nothing else; None otherwise."""
        (stored,) = self._stored
        if stored is not None:
            return stored.layout, *stored.parts()
        if weight is None or weight.requires_grad or not self._matrix:
            return None
        # Cast outside the Function, in autograd's graph: activation offloading recognizes a parameter's copy by it.
        return None, weight.to(dtype)

    def up(self, b: Tensor) -> Tensor:
        """Return B as one matrix (rows, n r), which maps all of A x to all rows."""
        r, n = self.s.rank, len(self.hf)
        if len(self.sizes) == 1:
            return b
        parts, j, laid = self.split_pieces(b), 0, []
        for rows, yes in zip(self.sizes, self.chosen, strict=True):
            if yes:
                laid.append(F.pad(parts[j], (j * r, (n - 1 - j) * r)))
                j += 1
            else:
                laid.append(b.new_zeros(parts[0].shape[0], rows, n * r))
        return torch.cat(laid, 1).flatten(0, 1)

    @torch.no_grad()
    def lengths(self, dense: Tensor) -> Tensor:
        """Return the length of each row of W + s B A for a weight (rows, D): (rows,), at least float32."""
        wide, s = torch.promote_types(dense.dtype, torch.float32), self.s.scaling
        with torch.autocast(dense.device.type, enabled=False):
            a, up = self.a.to(wide), self.up(self.b.to(wide))
            crossed = (dense @ self.a.to(dense.dtype).t()).to(wide)  # (rows, n r)
            squares: Tensor = torch.linalg.vector_norm(dense, dim=1, dtype=wide).square()
            longer: Tensor = (up * (2 * s * crossed + s * s * (up @ (a @ a.t())))).sum(1)
            return (squares + longer).sqrt()

    @torch.no_grad()
    def merge(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        total = weight + self.s.scaling * (self.up(self.b.float()) @ self.a.float())
        if self.magnitude is not None:
            total *= self.spread(self.magnitude.float() / self.pick(self.lengths(weight)))[:, None]
        return total, bias

    def published(self, whole: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for key, tensors in (
            ("lora_A.weight", torch.split(whole["a"], self.s.rank)),
            ("lora_B.weight", [p.flatten(0, 1) for p in self.split_pieces(whole["b"])]),
            ("lora_magnitude_vector", map(torch.flatten, self.split_pieces(whole["magnitude"])) if self.s.dora else ()),
        ):
            yield from ((f"{module}.{key}", t) for module, t in zip(self.hf, tensors, strict=False))

    def taken(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        def of(key: str) -> list[Tensor]:
            return [tensors[f"{module}.{key}"] for module in self.hf]

        ours = {"a": torch.cat(of("lora_A.weight")), "b": self.join_pieces(of("lora_B.weight"))}
        return ours | ({"magnitude": self.join_pieces(of("lora_magnitude_vector"))} if self.s.dora else {})

    def exported(self, whole: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield like `published`, but relative to the published weight: with an initial adapter B0 A0, B A - B0 A0.

        That is an adapter of twice the rank, [B, -B0] [A; A0], as in PEFT's conversion.
        """
        for key, t in self.published(whole):
            module, _, which = key.removesuffix(".weight").rpartition(".")
            if self.first is None:
                yield key, t
            else:
                a, b = self.first.found[f"{module}.weight"]
                yield key, torch.cat((t, a)) if which == "lora_A" else torch.cat((t, -b), 1)

    def settings(self) -> dict[str, Any]:
        times = 1 if self.first is None else 2
        wide = self.s.alpha * (times**0.5 if self.s.rslora else times)  # the same factor at that rank
        return replace(self.s, rank=times * self.s.rank, alpha=wide).fields()

    def fillers(self, name: str, linear: Linear, recipe: WeightMap, seed: int) -> Iterator[tuple[str, Initializer]]:
        """Yield the initial values of the parameters; name: the linear's."""
        if self.first is not None:
            shapes = {hf: shape for hf, shape in recipe.entries[f"{name}.weight"].hf_shapes() if hf in self.first.names}
            yield "a", partial(self._fill_first, self.first, shapes, "a")
            yield "b", partial(self._fill_first, self.first, shapes, "b")
            return
        yield "a", partial(self._fill_a, seed)
        yield "b", partial(fill_constant, 0.0)
        if self.magnitude is not None:
            held = torch.float32 if linear.quantized is not None else linear.weight.dtype
            yield "magnitude", partial(self._fill_magnitude, recipe, f"{name}.weight", held)

    def _fill_first(
        self, split: Decomposed, shapes: Mapping[str, Shape], which: str, local: Tensor, offset: Shape
    ) -> None:
        pairs = [split.first(hf, shape, local.device) for hf, shape in shapes.items()]
        full = torch.cat([a for a, _ in pairs]) if which == "a" else self.join_pieces([b for _, b in pairs])
        fill_from(full, local, offset)

    def _fill_a(self, seed: int, local: Tensor, offset: Shape) -> None:
        """Fill like kaiming_uniform_ with a = sqrt(5), each piece with a seed from its name, independent of fusing."""
        parts, bound = [], self.width**-0.5
        for module in self.hf:
            full = torch.empty(self.s.rank, self.width, device=local.device)
            generator = seeded_generator(seed, f"{module}.lora_A", local.device)
            parts.append(full.uniform_(-bound, bound, generator=generator))
        rows, columns = (slice(o, o + n) for o, n in zip(offset, local.shape, strict=True))
        local.copy_(torch.cat(parts)[rows, columns])

    def _fill_magnitude(self, recipe: WeightMap, weight: str, dtype: torch.dtype, local: Tensor, offset: Shape) -> None:
        """Fill with the lengths of the rows of the weight in `dtype`; of a quantized weight, dequantized."""
        each, group = sum(self.chosen_sizes), sum(self.sizes)
        first, last = offset[0] // each, -(-(offset[0] + len(local)) // each)  # groups that hold these rows
        rows = torch.empty((last - first) * group, self.width, device=local.device, dtype=dtype)
        recipe.fill(weight, rows, (first * group, 0))
        lengths = torch.linalg.vector_norm(self.pick(rows), dim=1, dtype=torch.float32)
        local.copy_(lengths[offset[0] - first * each :][: len(local)])


# --- The feed-forward part of frozen linears, with the activation and the adapters inside its matmuls.
#
# A low-rank sum adds columns to a matmul: W x + U (A x) is [W | U] by [x | A x]. So the matmul of gate and up, with
# their activation in its epilogue, also adds the adapter. The matmul for the activation's gradient sums over the down
# matmul and its adapter. Adapters read and write narrow matrices only.
#
# Saved for the backward pass: gate and up, A x of each adapter, the small matrices, and the input if gate_up has an
# adapter. Not saved: the activation, concatenated matrices, dequantized weights.
#
# Legend: r rows of the A of one linear, 0 without an active adapter; U is B with its factor.


def fits(linear: nn.Module) -> bool:
    """Return whether a linear is a frozen matrix, dense or quantized, with a low-rank adapter or none."""
    if type(linear) is not Linear or linear.bias is not None:
        return False
    product, adapter = linear.matmul, linear.adapter
    if adapter is not None:
        if product != adapter.product or adapter.low_rank(torch.float32) is None:
            return False
        product = adapter.inner
    if linear.quantized is not None:
        return product == linear.quantized.product
    return product is F.linear and not linear.weight.requires_grad


def feed(x: Tensor, h: Tensor, gate_up: Linear, down: Linear) -> Tensor:
    """Implement `swiglu.Mlp` for linears that `fits` accepts."""
    h = h.to(compute_dtype(h))
    small = (*_low(h, gate_up), *_low(h, down))
    (layout1, *parts1), (layout2, *parts2) = _weight(gate_up, h.dtype), _weight(down, h.dtype)
    rooms = [Padding() if linear.adapter is None else linear.adapter.room for linear in (gate_up, down)]
    out: Tensor = _Feed.apply(x, h, *small, layout1, layout2, *rooms, *parts1, *parts2)  # type: ignore[no-untyped-call]
    return out


def _low(h: Tensor, linear: Linear) -> tuple[Tensor, Tensor]:
    """Return A (r, width) and U (rows, r) of the active adapter, in h's dtype; r = 0 without one."""
    if linear.adapter is not None and linear.adapter.switch.on:
        low = linear.adapter.low_rank(h.dtype)
        assert low is not None
        return low
    return h.new_empty(0, linear.in_features), h.new_empty(linear.out_features, 0)


def _weight(linear: Linear, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the layout of the weight, None if it is dense, and its parts."""
    if linear.quantized is not None:
        return linear.quantized.layout, *linear.quantized.parts()
    return None, linear.weight.to(dtype)  # cast outside the Function, like in `Lora._base`


class _Feed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        """Arguments: x, h (..., D), a1 (r, D), u1 (2 F, r), a2 (r, F), u2 (D, r), both layouts, both rooms, all parts.

        Not named, like in `quantized._Product`. Returns (..., D).
        """
        x, h, a1, u1, a2, u2, layout1, layout2, room1, room2, *parts = given
        ctx.layouts, ctx.rooms, rows, use = (layout1, layout2), (room1, room2), h.flatten(0, -2), "forward"
        with torch.autocast(h.device.type, enabled=False):
            first, second = _split(layout1, parts)
            z1 = rows @ a1.t()  # (N, r)
            upper, many = weight_of(layout1, first, use, u1, 1, room1), tiles(len(a2)) * room2.weight
            pairs, product = gated_matmul(rows, upper, z1, u1, room1.x, room1.weight, many)
            lower = weight_of(layout2, second, use, u2, 1, room2)
            padded = {"padded": room2.weight, "padded_x": True}
            out, z2 = low_rank(product, lower.t(), a2.t(), u2.t(), "quack", **padded)  # (N, D), (N, r)
        ctx.save_for_backward(h if len(a1) else None, z1, z2, pairs, a1, u1, a2, u2, *parts)
        total: Tensor = x + out.view_as(x)  # inside the matmul it costs as much on 8B (docs/log)
        return total

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        h, z1, z2, pairs, a1, u1, a2, u2, *parts = ctx.saved_tensors  # read once, as torch's checkpoints require
        (layout1, layout2), (room1, room2) = ctx.layouts, ctx.rooms
        grad, use, d_h = incoming[0].flatten(0, -2).to(pairs.dtype), "backward", None  # (N, D)
        with torch.autocast(grad.device.type, enabled=False):
            first, second = _split(layout1, parts)
            d_z2 = grad @ u2  # (N, r)
            down, wide = weight_of(layout2, second, use, a2, 0, room2), concat_padded(grad, d_z2, 1)
            d_pairs, product = gated_matmul_backward(wide, down, pairs, a2, room2.weight)  # (N, 2 F), (N, F)
            del down, wide
            d_a2, d_u2, d_u1 = d_z2.t() @ product, grad.t() @ z2, d_pairs.t() @ z1
            if ctx.needs_input_grad[1]:  # (N, D), (N, r)
                upper = weight_of(layout1, first, use, u1, 1, room1)
                if len(a1) and room1.weight:
                    d_h, d_z1 = low_rank_gradients(d_pairs, upper, u1, a1)
                else:
                    d_h, d_z1 = low_rank(d_pairs, upper, u1, a1, "quack")
            else:
                d_z1 = d_pairs @ u1
            d_a1 = None if h is None else d_z1.t() @ h.flatten(0, -2)
        d_h = None if d_h is None else d_h.view(incoming[0].shape)
        return incoming[0], d_h, d_a1, d_u1, d_a2, d_u2, *[None] * (4 + len(parts))


def _split(layout: PackedLayout | None, parts: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return the parts of the first and the second weight; layout: of the first."""
    n = 1 if layout is None else layout.parts
    return parts[:n], parts[n:]


# --- Padding in a block for its adapters' small matrices: after frozen weights, and after the inputs of matmuls.
#
# Used if QuACK multiplies (`adapter.by`). Dense weights are copied with padding; quantized ones are dequantized with
# it. Our kernels write their outputs with padding; outputs of other kernels are copied.


def make_room(block: Block, *, whole: bool = True) -> int:
    """Add padding to a block; return the number of changed slots and dense weights.

    Weights must be allocated; whole: not sharded.
    """
    linears = block.qkv, block.o, *((block.gate_up, block.down) if hasattr(block, "gate_up") else ())
    qkv, o, gate_up, _ = columns = [*(_columns(linear, whole) for linear in linears), 0, 0][:4]  # or experts alone
    changed = 0
    before, after = (n is not None and n.impl is rms_norm.fused_add_rms_norm for n in (block.norm1, block.norm2))
    attends, turns = block.attention is flash4, block.split_and_rope is rope.fused_split_and_rotate
    if before and qkv:
        block.norm1.impl = partial(rms_norm.fused_add_rms_norm, padding=qkv)
        changed += 1
    if after and (gate_up or o):
        block.norm2.impl = partial(rms_norm.fused_add_rms_norm, padding=gate_up, grad_padding=o)
        changed += 1
    if attends and o:
        block.attention = partial(flash4, padding=o)
        changed += 1
    if turns and qkv:
        block.split_and_rope = partial(rope.fused_split_and_rotate, grad_padding=qkv)
        changed += 1
    # The gradient of gate and up needs no padding: its matmul also computes d_z (kernels/lora_matmul.py).
    rooms = Padding(True, before, turns), Padding(True, attends, after), Padding(True, after), Padding(True, True)
    for linear, many, room in zip(linears, columns, rooms, strict=False):
        if many:
            changed += pad_weight(linear, many, room, below=linear is not getattr(block, "gate_up", None))
    return changed


def pad_weight(linear: Linear, many: int, room: Padding, *, below: bool = True) -> bool:
    """Set the padding of a linear with an adapter, and pad its weight if dense; return whether it is dense."""
    assert linear.adapter is not None
    linear.adapter.room = room
    if linear.quantized is None:
        linear.weight.data = with_padding(linear.weight.data, many if below else 0, many)
    return linear.quantized is None


def _columns(linear: Linear, unsharded: bool) -> int:
    """Return the rows of A, rounded up to tiles, if QuACK multiplies by weight and adapter at once; else 0."""
    adapter = linear.adapter
    if not isinstance(adapter, Lora) or adapter.by != "quack" or linear.bias is not None:
        return 0
    low = adapter.low_rank(torch.float32)
    return 0 if low is None or not (unsharded or linear.quantized is not None) else tiles(len(low[0]))
