"""Send FSDP's gathers and reductions as int8 codes, through its hooks for collectives.

FSDP concatenates the shards of a block's parameters and sends them as one tensor. Here shards of matrices become codes
with one float32 scale per 256 values of a matrix (kernels/int8.py). Others are sent unchanged: in one block with a
norm's weights of 1, a matrix's weights below 0.004 would become 0. One message holds scales, codes, and the rest.

Every rank decodes every shard, including its own, so that all multiply by the same weights. The trained shards stay
exact. Gradients go to the rank that sums them in float32, all at once: each is rounded once.

Source: Wang et al., ZeRO++, https://arxiv.org/abs/2306.10209
Differs from the source: no second copy of the weights within a host, and 8-bit gradients instead of 4-bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optrush.kernels.int8 import block_count, dequantize_blocks, quantize_blocks

ALIGNED = 16  # bytes, for a message
gather_bytes: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13 renamed it


@dataclass(frozen=True)
class Shard:
    """A rank's shard of one parameter, as sent by FSDP."""

    values: int  # including the last rank's padding
    dtype: torch.dtype
    is_matrix: bool


@dataclass(frozen=True)
class _Span:
    """The byte range of a shard in FSDP's message."""

    first: int
    last: int
    shard: Shard
    dtype: torch.dtype

    def of(self, data: Tensor) -> Tensor:
        """Return its values in data (bytes,), as a copy if not aligned."""
        part = data[self.first : self.last]
        aligned = part.data_ptr() % self.dtype.itemsize == 0
        return (part if aligned else part.clone()).view(self.dtype)


def shards_of(block: nn.Module, matrices: set[nn.Parameter], ranks: int, *, trained: bool = False) -> list[Shard]:
    """Return the shards of a block that FSDP sharded, in its order: submodules first.

    Args:
        trained: only shards with gradients.
    """
    parameters = dict.fromkeys(p for module in _inner_first(block) for p in module.parameters(recurse=False))
    return [
        Shard(-(-p.shape[0] // ranks) * (p.numel() // p.shape[0]), p.dtype, p in matrices)
        for p in parameters
        if p.requires_grad or not trained
    ]


def _inner_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _inner_first(child)
    yield module


class Message:
    """The encoded bytes of shards."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = shards

    def spans(self, sent: Tensor) -> list[_Span]:
        """Return the ranges of shards in one rank's part of FSDP's message, of one dtype or as bytes of several."""
        spans, at = [], 0
        for shard in self.shards:
            dtype = shard.dtype if sent.dtype == torch.uint8 else sent.dtype
            spans.append(_Span(at, at := at + shard.values * dtype.itemsize, shard, dtype))
        assert at == sent.nbytes, f"fsdp sends {sent.nbytes} bytes for shards of {at}"
        return spans

    def pack(self, sent: Tensor) -> Tensor:
        """Return the message (bytes,) of one rank's part."""
        data, scales, codes, rest = sent.view(torch.uint8), [], [], []
        for span in self.spans(sent):
            if span.shard.is_matrix:
                code, scale = quantize_blocks(span.of(data))
                codes.append(code.view(torch.uint8))
                scales.append(scale.view(torch.uint8))
            else:
                rest.append(data[span.first : span.last])
        size = sum(len(t) for t in (*scales, *codes, *rest))
        return torch.cat([*scales, *codes, *rest, data.new_zeros(-size % ALIGNED)])

    def unpack(self, message: Tensor, out: Tensor) -> None:
        """Write one rank's part of FSDP's received tensor."""
        data, spans = out.view(torch.uint8), self.spans(out)
        matrices = [span.shard.values for span in spans if span.shard.is_matrix]
        scale, code = 0, 4 * sum(block_count(n) for n in matrices)
        rest = code + sum(matrices)
        for span in spans:
            if not span.shard.is_matrix:
                data[span.first : span.last] = message[rest : (rest := rest + span.last - span.first)]
                continue
            n = span.shard.values
            scales = message[scale : (scale := scale + 4 * block_count(n))].view(torch.float32)
            codes = message[code : (code := code + n)].view(torch.int8)
            values = dequantize_blocks(codes, scales, span.of(data))
            if values.data_ptr() != data.data_ptr() + span.first:  # it was not aligned
                data[span.first : span.last] = values.view(torch.uint8)


class _Room:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer to send or receive."""
        return torch.empty(*size, dtype=dtype, device=device)


class PackedGather(_Room):
    """FSDP's all-gather of one block (`FSDPModule.set_custom_all_gather`)."""

    exact = False  # gather unencoded, in an evaluation

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.message = Message(shards)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        if self.exact:
            gather_bytes(output_tensor, input_tensor, group=group)
            return
        mine, ranks = self.message.pack(input_tensor), dist.get_world_size(group)
        theirs = mine.new_empty(ranks * len(mine))
        gather_bytes(theirs, mine, group=group)
        for message, out in zip(theirs.view(ranks, -1), output_tensor.view(ranks, -1), strict=True):
            self.message.unpack(message, out)


class PackedReduceScatter(_Room):
    """FSDP's reduce-scatter of one block (`FSDPModule.set_custom_reduce_scatter`), a sum."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.message = Message(shards)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        assert op == dist.ReduceOp.SUM
        ranks = dist.get_world_size(group)
        mine = torch.stack([self.message.pack(part) for part in input_tensor.view(ranks, -1)])
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine, group=group)
        total = torch.zeros_like(output_tensor, dtype=torch.float32)
        part = torch.empty_like(output_tensor)
        for message in theirs:
            self.message.unpack(message, part)
            total += part
        output_tensor.copy_(total)
