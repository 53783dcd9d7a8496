"""Shard a decoder's experts over the ranks of one axis: rows go to their experts' ranks, and results back.

Each rank has count / n experts of every layer, as DTensor rows, which record their position in the full tensor for
sharding, checkpoints and the weight map. Everything else, routers included, is replicated. Each rank has its own batch
rows; each row goes, once per chosen expert, to that expert's rank, together with its weight, and comes back as the
expert's output. So an expert's gradient is complete on its rank and includes the rows of all n ranks.

The ranks first exchange their row counts per expert. The host reads these counts, once per layer and micro-batch: the
collectives of rows, and their memory, need numbers. Nothing is dropped or padded.

The collectives are custom operators, so that a compiler includes them in its graphs; the number of arriving rows is
unknown to it.

Recomputation. A forward pass that is recomputed inside a backward pass has the same routing: it reuses the places of
the first pass (`_LAST`), without exchanging or reading counts. It does not send results back either: only later layers
would read them, and a block ends with a sum, which saves nothing. Rows are sent again, since keeping them would take k
D values per token and layer.

Source: Lepikhin et al., https://arxiv.org/abs/2006.16668; without dropping, Gale et al.,
https://arxiv.org/abs/2211.15841.
Legend: n ranks of the axis, N experts, S rows that a rank sends, M rows that it receives, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from optrush.models.decoder import Decoder
from optrush.models.experts import Experts
from optrush.models.tensor_parallel import piece

CUT = ("gate_up", "down", "gate_up_bias", "down_bias")  # and their adapters: the per-expert parameters


def split_experts(model: Decoder, mesh: DeviceMesh) -> int:
    """Shard a decoder on the meta device over a one-axis mesh; return the number of changed layers."""
    dispatch = Exchange(mesh.get_group().group_name, mesh.size())
    changed = 0
    for layer, experts in enumerate(m for m in model.modules() if isinstance(m, Experts)):
        experts.number = torch.tensor(layer, device="cpu")
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
        sizes, numbers, order, inverse, local_ends = places(ends, self.ranks, self.group, experts.number)
        rows = send(rows, order, inverse, sizes, self.group)
        weight = send(weight, order, inverse, sizes, self.group)
        y = experts.multiply(rows, weight, numbers, local_ends)
        out: Tensor = send_back(y, order, inverse, sizes, len(ordered), self.group, True)
        return out


def _runs_again() -> bool:
    """Return whether the current forward pass is a checkpoint's recomputation inside a backward pass."""
    return torch._C._current_graph_task_id() != -1


def _group(name: Any) -> dist.ProcessGroup:
    """Return the process group by name, for operators."""
    group: dist.ProcessGroup = _resolve_process_group(name)
    return group


class _Exchanged(NamedTuple):
    """A layer's exchanged counts (n, N/n) of rows by rank and local expert; sizes: see `places`."""

    ends: Tensor  # of the counted rows
    counts: Tensor
    sizes: Tensor


_LAST: dict[tuple[str, int], _Exchanged] = {}  # in the last forward pass, by group and layer


@torch.library.custom_op("optrush::expert_places", mutates_args=())
def places(ends: Tensor, ranks: int, group: str, layer: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Exchange how many rows each rank has for each expert, except in a recomputation.

    Args:
        ends: (N,) int32, of this rank's rows in the order of all experts.
        layer: its number () on the host; an int would be a constant that gives each layer its own graph.

    Returns:
        sizes (2, n) int64 on the host: rows to and from each rank; numbers (M,) of the local experts, 0 to N/n - 1,
        ascending; order (M,) of the arriving rows, and its inverse; ends (N/n,) int32 of rows in that order.
    """
    key = (group, int(layer))
    if _runs_again():
        torch._assert_async((_LAST[key].ends == ends).all(), "experts: a recomputed layer chose other experts")
    else:
        counts = torch.diff(ends.long(), prepend=ends.new_zeros(1).long())  # (N,)
        others = torch.empty_like(counts)  # (n N/n,): by rank, its rows for each local expert
        dist.all_to_all_single(others, counts, group=_group(group))
        sizes = torch.stack((counts, others)).view(2, ranks, -1).sum(-1).cpu()
        _LAST[key] = _Exchanged(ends.clone(), others.view(ranks, -1), sizes)
    last = _LAST[key]
    return last.sizes.clone(), *_order(last.counts, int(last.sizes[1].sum()))


def _order(counts: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return numbers, order, inverse and ends like `places`, from counts (n, N/n) of rows by rank and expert.

    Rows arrive in runs, by rank and then by expert; reordering runs needs no sort.
    """
    ranks, local = counts.shape
    by_expert = counts.t().flatten()  # lengths of the runs by expert, then by rank
    run = torch.arange(ranks * local, device=counts.device)
    rows_range = torch.arange(rows, device=counts.device)

    def moved(lengths: Tensor, starts: Tensor) -> Tensor:
        """Return the places of rows in consecutive runs of these lengths, with the runs at the given starts."""
        shift = starts - (lengths.cumsum(0) - lengths)
        return rows_range + torch.repeat_interleave(shift, lengths, output_size=rows)

    arriving = (counts.flatten().cumsum(0) - counts.flatten()).view(ranks, local)
    ordered = (by_expert.cumsum(0) - by_expert).view(local, ranks)
    numbers = torch.repeat_interleave(run // ranks, by_expert, output_size=rows)
    order, inverse = moved(by_expert, arriving.t().flatten()), moved(counts.flatten(), ordered.t().flatten())
    return numbers, order, inverse, counts.sum(0).cumsum(0).int()


@places.register_fake
def _(ends: Tensor, ranks: int, group: str, layer: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    arriving = torch.library.get_ctx().new_dynamic_size()
    sizes = torch.empty(2, ranks, dtype=torch.int64, device="cpu")
    numbers, order, inverse = (ends.new_empty(arriving, dtype=torch.int64) for _ in range(3))
    return sizes, numbers, order, inverse, ends.new_empty(len(ends) // ranks)


@torch.library.custom_op("optrush::expert_send", mutates_args=())
def send(x: Tensor, order: Tensor, inverse: Tensor, sizes: Tensor, group: str) -> Tensor:
    """Send x (S, C), in the order of all experts; return (M, C), the rows of the local experts in their order."""
    sent, received = sizes.tolist()
    out = x.new_empty(len(order), x.shape[1])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=_group(group))
    return out[order]


@send.register_fake
def _(x: Tensor, order: Tensor, inverse: Tensor, sizes: Tensor, group: str) -> Tensor:
    return x.new_empty(order.shape[0], x.shape[1])


@torch.library.custom_op("optrush::expert_send_back", mutates_args=())
def send_back(
    y: Tensor, order: Tensor, inverse: Tensor, sizes: Tensor, rows: int, group: str, ends: bool
) -> Tensor:  # fmt: skip
    """Invert `send`: y (M, C) -> (rows, C), in the order of all experts on the rank that sent them.

    Args:
        ends: no saved tensor depends on the result, so a recomputation returns zeros.
    """
    if ends and _runs_again():
        return y.new_zeros(rows, y.shape[1])
    sent, received = sizes.tolist()
    out = y.new_empty(rows, y.shape[1])
    dist.all_to_all_single(out, y[inverse], sent, received, group=_group(group))
    return out


@send_back.register_fake
def _(
    y: Tensor, order: Tensor, inverse: Tensor, sizes: Tensor, rows: int, group: str, ends: bool
) -> Tensor:  # fmt: skip
    return y.new_empty(rows, y.shape[1])


def _keep_send(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, order, inverse, sizes, ctx.group = inputs
    ctx.rows = x.shape[0]
    ctx.save_for_backward(order, inverse, sizes)


def _send_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return send_back(grad, *ctx.saved_tensors, ctx.rows, ctx.group, False), None, None, None, None


def _keep_send_back(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, order, inverse, sizes, _, ctx.group, _ = inputs
    ctx.save_for_backward(order, inverse, sizes)


def _send_back_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return send(grad, *ctx.saved_tensors, ctx.group), None, None, None, None, None, None


send.register_autograd(_send_gradient, setup_context=_keep_send)
send_back.register_autograd(_send_back_gradient, setup_context=_keep_send_back)
