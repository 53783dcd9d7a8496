"""Shard a decoder over the ranks of one axis: heads, feed-forward width and vocabulary, with the collectives.

A weight becomes a DTensor, which records its shard's position in the full weight for sharding, checkpoints and the
weight map. Matmuls get the local shard, so every kernel runs unchanged. qkv and gate_up are sharded by rows, in full
key/value heads and gate/up pairs (the layout of `models/decoder.py`); o and down by columns; embedding and head by rows
of the vocabulary. Norms and adapters are replicated; each rank has a part of their gradients.

Between a column-sharded matmul and the next row-sharded one, every rank has the full stream, or, with `sequence`, a
shard along T: one gather before, one reduce-scatter after, the same bytes as an all-reduce, and the norms' work and
memory are sharded too.

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
    """The ranks that shard a model's matrices, and this rank's position among them."""

    mesh: DeviceMesh  # of one axis
    sequence: bool  # the stream between matmuls is sharded along T

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

        The backward pass sums the gradients of the ranks.
        """
        x = x.to(compute_dtype(x))  # cast before the gather: fewer bytes
        if not self.sequence:
            out: Tensor = _Copy.apply(x, self.group)  # type: ignore[no-untyped-call]
            return out
        if torch.compiler.is_compiling():  # the compiler supports these
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
    """Return this rank's shard; its gradient flows into the full tensor."""
    return t.to_local() if isinstance(t, DTensor) else t


def split_model(model: Decoder, axis: Axis) -> int:
    """Shard a decoder on the meta device; return the number of changed modules.

    Raises:
        NeedsError: one of its adapters cannot be sharded.
    """
    blocks = cast("Iterator[Block]", iter(model.blocks.values()))
    changed = 0
    for block in blocks:
        for linear, dim in ((block.qkv, 0), (block.o, 1), (block.gate_up, 0), (block.down, 1)):
            _split_linear(linear, dim, axis)
            changed += 1
        if block.mlp is swiglu.mlp_fused_down:  # it reads the weight, but its output must be summed
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
        if (reason := adapter.unsplittable) is not None:
            raise NeedsError("adapters of linears that are sharded over ranks", reason, "remove that")
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
        """tokens (B, T) -> (B, T/n, D), or (B, T, D) without `sequence`."""
        weight = piece(self.embedding.weight)
        index = tokens - self.axis.rank * len(weight)
        local = (index >= 0) & (index < len(weight))
        return self.axis.leave(F.embedding(index.where(local, 0), weight) * local[..., None])


def vocabulary(model: Decoder, axis: Axis) -> VocabularyPart:
    """Return the position of this rank's rows of the head."""
    weight = model.head.weight
    return VocabularyPart(axis.group, axis.rank * (weight.shape[0] // axis.ranks))


def partial_gradients(model: Decoder, axis: Axis) -> set[str]:
    """Return the names of replicated parameters with partial gradients on each rank.

    Query and key norms get gradients from the rank's heads, adapters from its rows or columns; with `sequence` all
    other parameters get them from the rank's tokens.
    """
    names = set()
    for name, p in model.named_parameters():
        if isinstance(p, DTensor) and "tp" in (p.device_mesh.mesh_dim_names or ()):
            continue
        own_heads = name.endswith(("q_norm.weight", "k_norm.weight"))
        if axis.sequence or own_heads or ".adapter." in name:
            names.add(name)
    return names


# --- Collectives with their gradients. torch's functional ones return an asynchronous tensor of a special type, which
# loses the hooks of sharding when a compiled block takes it.


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


def _function(collective: Collective, gradient: Collective) -> type[torch.autograd.Function]:
    """Return the autograd function with this collective and its gradient."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
            ctx.group = group
            return collective(x, group)

        @staticmethod
        def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor, None]:
            return gradient(incoming[0], ctx.group), None

    return Function


_Gather, _Scatter = _function(_gathered, _scattered), _function(_scattered, _gathered)
_Copy, _Sum = _function(_same, _summed), _function(_summed, _same)
