"""Cut the experts of a decoder over the ranks of one axis: rows go to the ranks of their experts, and results back.

Each rank has count / n experts of every layer, as the rows of DTensors, which say where they lie in the whole:
sharding, checkpoints and the weight map read that. Routers, and all else, are whole on every rank. A rank has rows of
its own; each goes, once for each of its experts, to that expert's rank, with the weight of the expert's product, and
comes back as the product. So the gradient of an expert is complete where the expert is, of the rows of all n ranks.

The ranks first exchange how many rows each has for each expert. Those counts are read on the host, once a layer and
forward pass: the collectives of rows, and their memory, need numbers. Nothing is dropped and nothing padded.

The collectives are operators of their own, so that a compiler takes them into its graphs; the number of rows that
arrive is unknown to it.

Source: Lepikhin et al., https://arxiv.org/abs/2006.16668; without dropping, Gale et al.,
https://arxiv.org/abs/2211.15841.
Legend: n ranks of the axis, N experts, S rows that a rank sends, M rows that it gets, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from optrush.models.decoder import Decoder
from optrush.models.experts import Experts
from optrush.models.tensor_parallel import piece

CUT = ("gate_up", "down", "gate_up_bias", "down_bias")  # and adapters of these: what an expert has for itself


def split_experts(model: Decoder, mesh: DeviceMesh) -> int:
    """Cut a decoder on the meta device over a mesh of one axis; return the number of layers that changed."""
    dispatch = Exchange(mesh.get_group().group_name, mesh.size())
    changed = 0
    for experts in (m for m in model.modules() if isinstance(m, Experts)):
        for name in CUT:
            _split(experts, name, mesh)
        if experts.adapter is not None:
            for name in dict(experts.adapter.named_parameters()):
                _split(experts.adapter, name, mesh)
        experts.dispatch, experts.piece = dispatch, piece
        changed += 1
    return changed


def _split(module: nn.Module, name: str, mesh: DeviceMesh) -> None:
    p = getattr(module, name)
    if p is None and name.endswith("bias"):
        return
    assert p.is_meta and len(p) % mesh.size() == 0, f"{name}: {len(p)} experts over {mesh.size()} ranks"
    local = torch.empty((len(p) // mesh.size(), *p.shape[1:]), dtype=p.dtype, device="meta")
    placed = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    setattr(module, name, nn.Parameter(placed, requires_grad=p.requires_grad))


@dataclass(frozen=True)
class Exchange:
    """Multiply rows by experts of all ranks of a group; fills the slot `Experts.dispatch`."""

    group: str
    ranks: int

    def __call__(self, experts: Experts, rows: Tensor, weight: Tensor, ordered: Tensor, ends: Tensor) -> Tensor:
        sizes, numbers, order, inverse, here = places(ends, self.ranks, self.group)
        rows = send(rows, order, inverse, sizes, self.group)
        weight = send(weight, order, inverse, sizes, self.group)
        y = experts.multiply(rows, weight, numbers, here)
        out: Tensor = send_back(y, order, inverse, sizes, len(ordered), self.group)
        return out


def _group(name: Any) -> dist.ProcessGroup:
    """Return the process group of a name, by which operators get it."""
    found: dist.ProcessGroup = _resolve_process_group(name)
    return found


@torch.library.custom_op("optrush::expert_places", mutates_args=())
def places(ends: Tensor, ranks: int, group: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Exchange how many rows each rank has for each expert.

    Args:
        ends: (N,) int32, of this rank's rows in the order of all experts.

    Returns:
        sizes (2, n) int64 on the host: rows to and from each rank; numbers (M,) of the experts here, 0 to N/n - 1, in
        their order; order (M,) of the rows that arrive, and its inverse; ends (N/n,) int32 of rows in that order.
    """
    counts = torch.diff(ends.long(), prepend=ends.new_zeros(1).long())  # (N,)
    others = torch.empty_like(counts)  # (n N/n,): of each rank, its rows for each of the experts here
    dist.all_to_all_single(others, counts, group=_group(group))
    sizes = torch.stack((counts, others)).view(2, ranks, -1).sum(-1).cpu()
    each = others.view(ranks, -1)
    experts = torch.arange(each.shape[1], device=ends.device).repeat(ranks)
    arriving = torch.repeat_interleave(experts, others, output_size=int(sizes[1].sum()))
    numbers, order = torch.sort(arriving, stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return sizes, numbers, order, inverse, each.sum(0).cumsum(0).int()


@places.register_fake
def _(ends: Tensor, ranks: int, group: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    arriving = torch.library.get_ctx().new_dynamic_size()
    sizes = torch.empty(2, ranks, dtype=torch.int64, device="cpu")
    numbers, order, inverse = (ends.new_empty(arriving, dtype=torch.int64) for _ in range(3))
    return sizes, numbers, order, inverse, ends.new_empty(len(ends) // ranks)


@torch.library.custom_op("optrush::expert_send", mutates_args=())
def send(x: Tensor, order: Tensor, inverse: Tensor, sizes: Tensor, group: str) -> Tensor:
    """x (S, C) in the order of all experts -> (M, C), the rows for the experts here in their order."""
    there, here = sizes.tolist()
    out = x.new_empty(len(order), x.shape[1])
    dist.all_to_all_single(out, x.contiguous(), here, there, group=_group(group))
    return out[order]


@send.register_fake
def _(x: Tensor, order: Tensor, inverse: Tensor, sizes: Tensor, group: str) -> Tensor:
    return x.new_empty(order.shape[0], x.shape[1])


@torch.library.custom_op("optrush::expert_send_back", mutates_args=())
def send_back(y: Tensor, order: Tensor, inverse: Tensor, sizes: Tensor, rows: int, group: str) -> Tensor:
    """Invert `send`: y (M, C) -> (rows, C), in the order of all experts on the rank that sent them."""
    there, here = sizes.tolist()
    out = y.new_empty(rows, y.shape[1])
    dist.all_to_all_single(out, y[inverse], there, here, group=_group(group))
    return out


@send_back.register_fake
def _(y: Tensor, order: Tensor, inverse: Tensor, sizes: Tensor, rows: int, group: str) -> Tensor:
    return y.new_empty(rows, y.shape[1])


def _keep_send(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, order, inverse, sizes, ctx.group = inputs
    ctx.rows = x.shape[0]
    ctx.save_for_backward(order, inverse, sizes)


def _send_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return send_back(grad, *ctx.saved_tensors, ctx.rows, ctx.group), None, None, None, None


def _keep_send_back(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, order, inverse, sizes, _, ctx.group = inputs
    ctx.save_for_backward(order, inverse, sizes)


def _send_back_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return send(grad, *ctx.saved_tensors, ctx.group), None, None, None, None, None


send.register_autograd(_send_gradient, setup_context=_keep_send)
send_back.register_autograd(_send_back_gradient, setup_context=_keep_send_back)
