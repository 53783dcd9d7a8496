"""Frozen weights in 4 or 8 bits, dequantized for each matmul: modules, matmuls, filling.

`linear.quantized` holds, for each piece of a linear (q, k, v; gate, up), the quantized parts of its published tensor as
plain frozen parameters, e.g. `blocks.0.qkv.quantized.q.codes`. They are bytes viewed as a 16-bit float dtype, because
FSDP2 before torch 2.13 does not gather integer parameters, and its policy would cast float32 scales. It never casts the
matmul dtype, so the bytes are viewed as that (bfloat16 if it is float32). Any sharding is correct, because only
gathered tensors are decoded.

The dense weight of a linear exists only during its matmul: in the forward pass, and again in the backward pass for the
gradient of the input. It is not saved in between, and neither is the input: a frozen weight has no gradient.

The experts of a layer are stored as two matrices, gate_up and down, each with all experts stacked
(`blocks.0.experts.quantized.down.experts.codes`). Their rows are in our order, so the bytes differ from those of the
published tensors, and the scales have one offset for all experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optrush.errors import NeedsError
from optrush.kernels import compute_dtype, int8, mxfp4, nf4
from optrush.models.decoder import Decoder, Linear
from optrush.models.experts import Grouped, StackedMatrices, grouped_matmul
from optrush.models.hf import HFModel
from optrush.models.layers import Pieces
from optrush.models.weights import Mxfp4Folder, PackedFolder, Shape, WeightEntry, WeightMap, WeightSource, WithNewTokens

JOINED = "joined"  # the role of a tensor with all pieces
DENSE_values = 1 << 26  # maximum number of dense values of experts during quantization


@dataclass(frozen=True)
class Form:
    """A quantized form of matrices: the parts of a matrix and their bytes."""

    bits: int  # 4: kernels/nf4.py, 8: kernels/int8.py
    double: bool = False  # scales of 4-bit weights are also quantized
    floats: bool = False  # 4 bits: kernels/mxfp4.py; loaded from checkpoints, never quantized here

    @property
    def kind(self) -> str:
        return "int8" if self.bits == 8 else "mxfp4" if self.floats else "nf4"

    def sizes(self, rows: int, width: int) -> dict[str, int]:
        """Return the bytes of each part."""
        if self.floats:
            return mxfp4.mxfp4_bytes(rows, width)
        return nf4.nf4_bytes(rows, width, self.double) if self.bits == 4 else int8.int8_bytes(rows, width)

    def quantize(self, values: Tensor) -> dict[str, Tensor]:
        return self.quantize_in_turn([values])

    def quantize_in_turn(self, matrices: Iterable[Tensor]) -> dict[str, Tensor]:
        """Return the parts of the stacked matrices; only one matrix is dense at a time."""
        if self.bits == 4:
            return nf4.quantize_nf4(matrices, self.double)
        made = [int8.quantize_int8(values) for values in matrices]
        return {name: torch.cat([parts[name] for parts in made]) for name in made[0]}


class PackedLayout(NamedTuple):
    """The composition of a dense weight: constants of a compiled graph."""

    kind: str  # `Form.kind`
    parts: int  # number of parts of all pieces
    rows: tuple[int, ...]  # rows per group of each piece
    groups: int
    width: int


class Stack(NamedTuple):
    """The stacked matrices of a layer's experts, described like a linear."""

    output_splits: Pieces
    groups: int
    in_features: int


class QuantizedLinear(nn.Module):
    """The quantized weight of a linear, or the quantized matrices of a layer's experts."""

    def __init__(self, linear: Linear | Stack, form: Form, carrier: torch.dtype, joined: bool = False) -> None:
        """joined: one tensor has all pieces stacked, like the published one."""
        super().__init__()
        rows_of = tuple(rows for _, rows in linear.output_splits)
        for role, rows in ((JOINED, sum(rows_of)),) if joined else linear.output_splits:
            piece = nn.Module()
            for name, size in form.sizes(linear.groups * rows, linear.in_features).items():
                held = torch.empty(-(-size // 2), dtype=carrier, device="meta")
                piece.register_parameter(name, nn.Parameter(held, requires_grad=False))
            self.add_module(role, piece)
        self.layout = PackedLayout(form.kind, len(self.parts()), rows_of, linear.groups, linear.in_features)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the dense weight (rows, width), in the linear's order of rows."""
        return unpacked(self.parts(), self.layout, dtype, "export")

    def parts(self) -> list[Tensor]:
        """Return the stored parts, by attribute access: some sharding gathers a parameter on access."""
        return [getattr(piece, name) for piece in self.children() for name in piece._parameters]

    def product(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Implement the linear's `matmul`; under autocast in autocast's dtype."""
        dtype = compute_dtype(x)
        bias = None if bias is None else bias.to(dtype)
        y: Tensor = _Product.apply(x.to(dtype), bias, None, None, self.layout, *self.parts())  # type: ignore[no-untyped-call]
        return y

    def grouped_product(self, x: Tensor, ends: Tensor, grouped: Grouped = grouped_matmul) -> Tensor:
        """Return the groups of rows x (rows, width), which end at `ends` (N,), times their experts' matrices."""
        y: Tensor = _Product.apply(x, None, ends, grouped, self.layout, *self.parts())  # type: ignore[no-untyped-call]
        return y


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        """Arguments: x, bias or None, ends of groups of rows or None, their matmul or None, the layout, the parts.

        Not named: without gradients, torch.compile omits `ctx` if a call has as many arguments as there are names.
        """
        x, bias, ends, grouped, layout, *parts = given
        ctx.layout, ctx.grouped = layout, grouped
        ctx.save_for_backward(ends, *parts)
        weight = unpacked(parts, layout, x.dtype, "forward")
        if ends is None:
            return F.linear(x, weight, bias)
        y: Tensor = grouped(x, weight.view(len(ends), -1, layout.width).mT, ends)
        return y

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        grad, dx, db = incoming[0], None, None  # (..., rows)
        ends, *parts = ctx.saved_tensors  # read once, as torch's checkpoints require
        if ctx.needs_input_grad[0]:
            weight = unpacked(parts, ctx.layout, grad.dtype, "backward")
            if ends is None:
                dx = grad @ weight
            else:
                dx = ctx.grouped(grad.contiguous(), weight.view(len(ends), -1, ctx.layout.width), ends)
        if ctx.needs_input_grad[1]:
            db = grad.flatten(0, -2).sum(0)
        return dx, db, None, None, None, *[None] * len(parts)


def unpacked(
    parts: Sequence[Tensor], layout: PackedLayout, dtype: torch.dtype, use: str, room: tuple[int, int] = (0, 0)
) -> Tensor:
    """Return the result of `dequantize_linear` for a layout."""
    made: Tensor = dequantize_linear(
        [*parts], layout.kind, [*layout.rows], layout.groups, layout.width, dtype, use, [*room]
    )
    return made


@torch.library.custom_op("optrush::dense", mutates_args=())
def dequantize_linear(
    parts: Sequence[Tensor], kind: str, rows: Sequence[int], groups: int, width: int, dtype: torch.dtype, use: str,
    room: Sequence[int],
) -> Tensor:  # fmt: skip
    """Return the dense weight (rows, width) of a linear. One operator, so that a compiler saves no intermediates.

    Args:
        parts: of each piece in turn, or of one stacked tensor; bytes viewed as any dtype.
        kind: `Form.kind`.
        rows: rows per group of each piece.
        use: the purpose; a compiler would merge two equal calls and keep the weight in between.
        room: number of rows and columns after the weight, filled by the caller.
    """
    many = groups * sum(rows)
    out = torch.empty(many + room[0], width + room[1], dtype=dtype, device=parts[0].device)
    pieces = torch.split(out[:many].view(groups, -1, out.shape[1])[..., :width], list(rows), 1)
    each, held = len(parts) // len(rows), [p.detach().view(torch.uint8) for p in parts]
    if len(parts) >= 2 * len(rows):  # every form has two parts or more
        for i, target in enumerate(pieces):
            _dequantize(held[each * i : each * (i + 1)], kind, target)
        return out
    ends = list(accumulate((groups * n for n in rows), initial=0))
    if all(end * width % (nf4.BLOCK * nf4.NESTED) == 0 for end in ends) and kind != "mxfp4":
        for target, first, last in zip(pieces, ends, ends[1:], strict=False):
            _dequantize(_cut(held, kind, first * width, last * width, width), kind, target)
        return out
    stacked = out.new_empty(many, width)
    _dequantize(held, kind, stacked)
    for target, first, last in zip(pieces, ends, ends[1:], strict=False):
        target.copy_(stacked[first:last].view(target.shape))
    return out


def _dequantize(parts: Sequence[Tensor], kind: str, out: Tensor) -> None:
    """Dequantize one tensor into `out`, from its parts as bytes."""
    first, *rest = parts
    if kind == "mxfp4":
        mxfp4.dequantize_mxfp4((first, *rest), out)
    elif kind == "int8":
        int8.dequantize_int8((first.view(torch.int8), rest[0].view(torch.float32)), out)
    else:  # the last part is float32: the scales, or with double quantization the scales of their codes
        nf4.dequantize_nf4((first, *rest[:-1], rest[-1].view(torch.float32)), out)


def _cut(parts: Sequence[Tensor], kind: str, first: int, last: int, width: int) -> list[Tensor]:
    """Return the parts for the values [first, last) of a tensor; both are at boundaries of scale blocks."""
    codes, *scales = parts
    if kind == "int8":
        return [codes[first:last], scales[0][4 * first // width : 4 * last // width]]
    of, each = nf4.BLOCK, 4 if len(scales) == 1 else 1
    cut = [codes[first // 2 : last // 2], scales[0][each * first // of : each * last // of]]
    if len(scales) > 1:  # the offset of all scales comes last
        of *= nf4.NESTED
        cut.append(torch.cat((scales[1][4 * first // of : 4 * last // of], scales[1][-4:])))
    return cut


@dequantize_linear.register_fake
def _(
    parts: Sequence[Tensor], kind: str, rows: Sequence[int], groups: int, width: int, dtype: torch.dtype, use: str,
    room: Sequence[int],
) -> Tensor:  # fmt: skip
    return parts[0].new_empty((groups * sum(rows) + room[0], width + room[1]), dtype=dtype)


def quantize_model(
    model: Decoder | HFModel,
    recipe: WeightMap,
    form: Form,
    precision: torch.dtype | None,
    of_experts: Form | None = None,
) -> int:
    """Quantize the weights of the blocks' linears and experts, on the meta device; return the number of modules.

    Args:
        recipe: of the dense weights; gets the fillers of the quantized ones.
        precision: the matmul dtype, if it differs from the weights'.
        of_experts: the experts' form, if different.
    """
    of_experts = of_experts or form
    reader = _Reader(recipe, form)
    _check_packed(model, recipe, reader.source, form)
    carrier = torch.float16 if precision == torch.float16 else torch.bfloat16
    linears = list(model.linears())
    for name, linear in linears:
        entry = recipe.entries[f"{name}.weight"]
        stored = QuantizedLinear(linear, form, carrier, bool(entry.joined))
        for (role, _), (hf, shape) in zip(stored.named_children(), entry.hf_shapes(), strict=True):
            for part in form.sizes(*shape):
                read = partial(reader.read, hf, shape)
                recipe.fillers[f"{name}.quantized.{role}.{part}"] = partial(reader.part, hf, read, part)
        recipe.fillers[f"{name}.weight"] = partial(reader.weight, entry, stored.layout)
        linear.weight = None  # type: ignore[assignment]
        linear.quantized, linear.matmul = stored, stored.product
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, StackedMatrices)]
    for name, experts in layers:
        _check_stacked(name, experts, form)
        held = nn.ModuleDict()
        for kind, (N, rows, width) in experts.sizes.items():
            held[kind] = QuantizedLinear(Stack((("experts", N * rows),), 1, width), of_experts, carrier)
            key, read = f"{name}.{kind}", partial(reader.read_experts, recipe.entries[f"{name}.{kind}"], of_experts)
            for part in of_experts.sizes(N * rows, width):
                recipe.fillers[f"{name}.quantized.{kind}.experts.{part}"] = partial(reader.part, key, read, part)
            setattr(experts, kind, None)
        experts.quantized = held  # type: ignore[assignment]
    return len(linears) + len(layers)


def _check_packed(model: Decoder | HFModel, recipe: WeightMap, source: WeightSource, form: Form) -> None:
    """Raise NeedsError for packed tensors that are not weights of the blocks' linears, or have another form."""
    if not isinstance(source, PackedFolder):
        return
    linears = {hf for name, _ in model.linears() for hf, _ in recipe.entries[f"{name}.weight"].pieces}
    for name in sorted(set(source.states) - linears):
        found = "not a weight of a block's linear; only those load in 4 bits"
        raise NeedsError(f"the packed tensor {name}", found, "start from the unquantised checkpoint")
    scales = {True: "quantised scales", False: "float32 scales"}
    for name, state in source.states.items():
        double = "nested_offset" in state
        if form != Form(4, double):
            asked = f"{name} in {form.bits} bits" + (f" with {scales[form.double]}" if form.bits == 4 else "")
            do = f"use --with nf4:double={str(double).lower()}, or start from the unquantised checkpoint"
            raise NeedsError(asked, f"it is packed in 4 bits with {scales[double]}", do)


def _check_stacked(name: str, experts: StackedMatrices, form: Form) -> None:
    """Raise NeedsError for experts that cannot be quantized."""
    asked, odd = f"{name} in {form.bits} bits", [size for size in experts.sizes.values() if math.prod(size[1:]) % 64]
    if experts.transposed:
        found, do = (
            "experts stored as (experts, width, rows); scales belong to rows",
            "train LoRA over bf16 weights",
        )
        raise NeedsError(asked, found, f"turn nf4 or int8 off: {do}")
    if form.bits == 4 and odd:
        found = f"experts of {odd[0][1]} x {odd[0][2]} values, not multiples of 64, the block size of NF4"
        raise NeedsError(asked, found, "take --with int8 instead")


class _Reader:
    """Fill parts of quantized tensors. Holds one tensor at a time, and reads all of it even for a small shard, because
    the offset of its scales is a mean over the full tensor."""

    def __init__(self, recipe: WeightMap, form: Form) -> None:
        self.source = recipe.source.source if isinstance(recipe.source, WithNewTokens) else recipe.source
        self.form = form
        self.name, self.parts = "", dict[str, Tensor]()

    def part(
        self, name: str, read: Callable[[torch.device], dict[str, Tensor]], part: str, local: Tensor, offset: Shape
    ) -> None:
        """Fill one part of the tensor `name`, whose parts `read` returns."""
        if self.name != name:
            self.parts = {}  # freed before the next tensor is read
            self.name, self.parts = name, read(local.device)
        values, held = self.parts[part][2 * offset[0] :][: 2 * local.numel()], local.view(torch.uint8)
        held[: values.numel()].copy_(values)
        held[values.numel() :].zero_()  # if the number of bytes is odd
        if part == list(self.parts)[-1]:  # parts are filled in this order
            self.name, self.parts = "", {}

    def weight(self, entry: WeightEntry, layout: PackedLayout, local: Tensor, offset: Shape) -> None:
        """Fill with the dequantized weight, for measurements."""
        parts = [p for hf, shape in entry.hf_shapes() for p in self.read(hf, shape, local.device).values()]
        rectangle = tuple(slice(o, o + n) for o, n in zip(offset, local.shape, strict=True))
        local.copy_(unpacked(parts, layout, torch.float32, "fill")[rectangle])

    def read(self, hf: str, shape: Shape, device: torch.device) -> dict[str, Tensor]:
        """Return the parts of a published tensor, as bytes."""
        if isinstance(self.source, PackedFolder) and hf in self.source.states:
            parts = self.source.parts(hf)
        else:
            parts = self.form.quantize(self.source.rows(hf, 0, shape[0], shape, device).to(device))
        return _bytes(parts, device)

    def read_experts(self, entry: WeightEntry, form: Form, device: torch.device) -> dict[str, Tensor]:
        """Return the parts of one matrix of all experts; only a few experts are dense at a time."""
        if form.floats:
            name = entry.pieces[0][0]
            if not isinstance(self.source, Mxfp4Folder) or name not in self.source.packed:
                raise NeedsError("`nf4:experts=mxfp4`", f"{name} is dense in the checkpoint", "remove experts=mxfp4")
            return _bytes(self.source.parts(name), device)
        N, rows, width = entry.shape
        few = max(1, DENSE_values // (rows * width))
        spans = [(n, min(n + few, N)) for n in range(0, N, few)]
        dense = (entry.rows(self.source, *span, device).to(device).flatten(0, 1) for span in spans)
        return _bytes(form.quantize_in_turn(dense), device)


def _bytes(parts: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: value.to(device).flatten().view(torch.uint8) for name, value in parts.items()}
