"""Gather FSDP's weights by the copy engines of NVIDIA GPUs, over NVLink or PCI Express, without their multiprocessors.

NCCL's kernels take multiprocessors from the products that run beside them. Here every rank writes its shard into memory
that the others can read (torch's symmetric memory), and reads theirs by plain copies. Two barriers surround the copies:
the shards are complete before, and no shard is overwritten before all have read it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class CopyGather:
    """FSDP's all-gather (`FSDPModule.set_custom_all_gather`); one object for all groups, which share its buffers.

    A buffer is free when the gathered tensor in it is gone: FSDP keeps it until the weights were copied out of it, and
    makes the stream of the next gather wait for that. Every rank gathers in the same order, so all take the same one.

    Args:
        count: is told the bytes of each new buffer, which torch's allocator does not count.
    """

    def __init__(self, group: dist.ProcessGroup, count: Callable[[int], None]) -> None:
        self.group, self.count = group, count
        self.buffers: dict[int, list[_Buffer]] = {}  # by bytes
        self.held: dict[int, _Buffer] = {}  # by the address of the gathered tensor

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return room for the gathered shards, the same buffer on every rank."""
        many = math.prod(int(n) for n in size) * dtype.itemsize
        made = self.buffers.setdefault(many, [])
        buffer = next((b for b in made if b.is_free), None)
        if buffer is None:
            made.append(buffer := _Buffer(many, self.group, device))
            self.count(many)
        out = buffer.bytes.view(dtype)
        buffer.lent = weakref.ref(out)
        self.held[out.data_ptr()] = buffer
        return out

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill the room, in which this rank's shard stands already, in the order of the current stream."""
        shared = self.held[output_tensor.data_ptr()].shared
        rows = output_tensor.view(torch.uint8).view(shared.world_size, -1)
        shared.barrier(channel=0)
        for step in range(1, shared.world_size):  # each rank reads from another one at a time
            peer = (shared.rank + step) % shared.world_size
            theirs: Tensor = shared.get_buffer(peer, rows.shape, torch.uint8)
            rows[peer].copy_(theirs[peer])
        shared.barrier(channel=0)


class _Buffer:
    """Memory that all ranks can read."""

    def __init__(self, many: int, group: dist.ProcessGroup, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self.bytes = symmetric.empty(many, dtype=torch.uint8, device=device)
        self.shared: Any = symmetric.rendezvous(self.bytes, group)
        self.lent: weakref.ref[Tensor] | None = None

    @property
    def is_free(self) -> bool:
        return self.lent is None or self.lent() is None
