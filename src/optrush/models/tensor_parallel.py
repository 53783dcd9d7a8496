"""Shard a decoder over the ranks of one axis: heads, feed-forward width and vocabulary, with the collectives.

A weight becomes a DTensor, which says where this rank's piece lies in the whole: sharding, checkpoints and the weight
map read that. Products get the piece itself, so that every kernel runs as it is. qkv and gate_up are cut by rows, into
whole key/value heads and whole gate/up pairs (the layout of `models/decoder.py`); o and down by columns; embedding and
head by rows of the vocabulary. Norms and adapters are whole on every rank, which has a part of their gradients.

Between a product cut by columns and the next one cut by rows the stream is whole on every rank, or, with `sequence`,
cut along T: one gather before, one reduce-scatter after, the same bytes as a sum over the ranks, and the norms' work
and memory are cut too.

Source: Shoeybi et al., https://arxiv.org/abs/1909.08053; Korthikanti et al., https://arxiv.org/abs/2205.05198.
Legend: B rows, T tokens, D width, n ranks of the axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from optrush.errors import NeedsError
from optrush.kernels import compute_dtype, swiglu
from optrush.kernels.cross_entropy import VocabularyPart
from optrush.models.decoder import Block, Decoder, Linear, Product


@dataclass(frozen=True)
class Axis:
    """The ranks that share a model's matrices, and this rank's place among them."""

    mesh: DeviceMesh  # of one axis
    sequence: bool  # the stream between products is cut along T

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()

    @property
    def ranks(self) -> int:
        return int(self.mesh.size())

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank()

    def enter(self, x: Tensor) -> Tensor:
        """Gather the stream for row-sharded matmuls: (B, T/n, D) -> (B, T, D), in the matmul dtype.

        The gradients of the ranks are summed on the way back.
        """
        x = x.to(compute_dtype(x))  # before the gather: fewer bytes
        if not self.sequence:
            out: Tensor = _Copy.apply(x, self.group)  # type: ignore[no-untyped-call]
            return out
        if torch.compiler.is_compiling():  # the compiler knows these
            from torch.distributed._functional_collectives import all_gather_tensor_autograd

            out = all_gather_tensor_autograd(x.contiguous(), gather_dim=1, group=self.group)
            return out
        out = _Gather.apply(x, self.group)  # type: ignore[no-untyped-call]
        return out

    def leave(self, x: Tensor) -> Tensor:
        """Sum the ranks' partial outputs (B, T, D) and shard along T: (B, T/n, D)."""
        if self.sequence and torch.compiler.is_compiling():
            from torch.distributed._functional_collectives import reduce_scatter_tensor_autograd

            out: Tensor = reduce_scatter_tensor_autograd(x.contiguous(), "sum", scatter_dim=1, group=self.group)
            return out
        out = (_Scatter if self.sequence else _Sum).apply(x, self.group)  # type: ignore[no-untyped-call]
        return out


def piece(t: Tensor) -> Tensor:
    """Return this rank's piece; its gradient is one of the whole."""
    return t.to_local() if isinstance(t, DTensor) else t


def split_model(model: Decoder, axis: Axis) -> int:
    """Cut a decoder on the meta device; return the number of modules that changed.

    Raises:
        NeedsError: an adapter of it cannot be cut.
    """
    blocks = cast("Iterator[Block]", iter(model.blocks.values()))
    changed = 0
    for block in blocks:
        for linear, dim in ((block.qkv, 0), (block.o, 1), (block.gate_up, 0), (block.down, 1)):
            _split_linear(linear, dim, axis)
            changed += 1
        if block.mlp is swiglu.mlp_fused_down:  # it reads the weight, and its product must be summed
            block.mlp = swiglu.mlp_fused_activation
    tied = model.head.weight is model.embedding.weight
    _split(model.embedding, "weight", 0, axis)
    model.embedding.forward = Lookup(model.embedding, axis)  # type: ignore[method-assign,assignment]
    if tied:
        assert isinstance(model.embedding.weight, nn.Parameter)
        model.head.weight = model.embedding.weight
    else:
        _split(model.head, "weight", 0, axis)
    model.head.enter = axis.enter
    model.stream_ranks = axis.ranks if axis.sequence else 1
    return changed + 2


def _split(module: nn.Module, name: str, dim: int, axis: Axis) -> None:
    p = getattr(module, name)
    assert p.is_meta and p.shape[dim] % axis.ranks == 0, f"{name}: {tuple(p.shape)} over {axis.ranks} ranks"
    shape = [n // axis.ranks if d == dim else n for d, n in enumerate(p.shape)]
    local = torch.empty(shape, dtype=p.dtype, device="meta")
    placed = DTensor.from_local(local, axis.mesh, [Shard(dim)], run_check=False)
    setattr(module, name, nn.Parameter(placed, requires_grad=p.requires_grad))


def _split_linear(linear: Linear, dim: int, axis: Axis) -> None:
    adapter = linear.adapter
    if adapter is not None:
        if (why := adapter.unsplittable) is not None:
            raise NeedsError("adapters of linears that are sharded over ranks", why, "remove that")
        adapter.split = dim, axis.rank, axis.ranks
    _split(linear, "weight", dim, axis)
    if dim == 0 and linear.bias is not None:
        _split(linear, "bias", 0, axis)
    linear.matmul = ByRows(linear.matmul, axis) if dim == 0 else ByColumns(linear.matmul, axis)


@dataclass(frozen=True)
class ByRows:
    """The matmul of a row-sharded linear: the stream is gathered first."""

    inner: Product
    axis: Axis

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.inner(self.axis.enter(x), piece(weight), None if bias is None else piece(bias))


@dataclass(frozen=True)
class ByColumns:
    """The matmul of a column-sharded linear: the ranks' outputs are summed, and the bias is added once."""

    inner: Product
    axis: Axis

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = self.axis.leave(self.inner(x, piece(weight), None))
        return y if bias is None else y + bias.to(y.dtype)


@dataclass(frozen=True)
class Lookup:
    """The forward pass of an embedding sharded over the vocabulary."""

    embedding: nn.Embedding
    axis: Axis

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens (B, T) -> (B, T/n, D), or whole without `sequence`."""
        weight = piece(self.embedding.weight)
        own = tokens - self.axis.rank * len(weight)
        here = (own >= 0) & (own < len(weight))
        return self.axis.leave(F.embedding(own.where(here, 0), weight) * here[..., None])


def vocabulary(model: Decoder, axis: Axis) -> VocabularyPart:
    """Return the place of this rank's rows of the head."""
    weight = model.head.weight
    return VocabularyPart(axis.group, axis.rank * (weight.shape[0] // axis.ranks))


def partial_gradients(model: Decoder, axis: Axis) -> set[str]:
    """Return the names of whole parameters with partial gradients on each rank.

    Those of the query and key norms come from a rank's own heads, those of adapters from its own rows or columns; with
    `sequence` all others come from a rank's own tokens.
    """
    found = set()
    for name, p in model.named_parameters():
        if isinstance(p, DTensor) and "tp" in (p.device_mesh.mesh_dim_names or ()):
            continue
        own_heads = name.endswith(("q_norm.weight", "k_norm.weight"))
        if axis.sequence or own_heads or ".adapter." in name:
            found.add(name)
    return found


# --- Collectives with their gradients. Not torch's functional ones: those return a tensor that is still on its way, of
# a type of its own, which loses the hooks of sharding where a compiled block takes it.


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(B, T/n, D) -> (B, T, D)."""
    n, (B, t, D) = dist.get_world_size(group), x.shape
    out = x.new_empty(n * B, t, D)
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out.view(n, B, t, D).transpose(0, 1).reshape(B, n * t, D)


def _scattered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(B, T, D) -> (B, T/n, D), summed over the ranks."""
    n, (B, T, D) = dist.get_world_size(group), x.shape
    parts = x.reshape(B, n, T // n, D).transpose(0, 1).contiguous()
    out = x.new_empty(B, T // n, D)
    dist.reduce_scatter_tensor(out, parts.view(n * B, T // n, D), group=group)
    return out


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


def _same(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.view_as(x)


Collective = Callable[[Tensor, dist.ProcessGroup], Tensor]


def _function(there: Collective, back: Collective) -> type[torch.autograd.Function]:
    """Return the function whose gradient takes the way back."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
            ctx.group = group
            return there(x, group)

        @staticmethod
        def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor, None]:
            return back(incoming[0], ctx.group), None

    return Function


_Gather, _Scatter = _function(_gathered, _scattered), _function(_scattered, _gathered)
_Copy, _Sum = _function(_same, _summed), _function(_summed, _same)
