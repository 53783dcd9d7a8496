"""4-bit NormalFloat weights, bytewise equal to bitsandbytes': quantization, and dequantization in plain torch.

A tensor is flattened and split into blocks of 64 values; the last may be shorter, and a block may cross a row. A value
is one of 16 fixed numbers times its block's scale, the largest magnitude in the block.

    codes    uint8 (ceil(n / 2),)        two values per byte, the first in the high four bits
    absmax   float32 (blocks,)           the scales; or, quantized once more ("double"),
             uint8 (blocks,)             codes of the 8-bit dynamic map, of scale minus offset
    nested   float32 (ceil(blocks / 256) + 1,)
                                         double only: a scale per 256 of these codes, then the offset, which is
                                         the mean of all scales

So 4 + 8 / 64 + 32 / (64 * 256) = 4.127 bits per value, or 4.5 without double. Arithmetic is float32 with every
operation rounded, and one rounding to the output's type: dequantize_triton.py is bit-identical.

Source: Dettmers et al., https://arxiv.org/abs/2305.14314; numbers and layout follow bitsandbytes 0.50
    (https://github.com/bitsandbytes-foundation/bitsandbytes); the bytes are equal on the same kind of device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

BLOCK, NESTED = 64, 256
CHUNK = 1 << 22  # values in float32 at a time during quantization
LEAST = 1e-38  # for the reciprocal of a block of zeros
STEPS = 65535.0  # over [-1, 1], for `_encode8`
VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@cache
def table(device: torch.device) -> Tensor:
    """Return (16,) float32: the value of each code."""
    return torch.tensor(VALUES, device=device)


@cache
def dynamic_map(device: torch.device) -> Tensor:
    """Return (256,) float32, ascending: the value of each 8-bit code.

    Seven decades, decade i in 2^i equal parts on each side of zero, a part's value its middle; and 0 and 1.
    Source: Dettmers, https://arxiv.org/abs/1511.04561.
    """
    levels = [0.0, 1.0]
    for i in range(7):
        borders = torch.linspace(0.1, 1, 2**i + 1, dtype=torch.float32, device="cpu")
        middles = (10.0 ** (i - 6)) * ((borders[:-1] + borders[1:]) / 2)
        levels += [*middles.tolist(), *(-middles).tolist()]
    return torch.tensor(sorted(levels), device=device)


def nf4_bytes(rows: int, width: int, double: bool) -> dict[str, int]:
    """Return the bytes of each part of a quantized tensor."""
    blocks = math.ceil(rows * width / BLOCK)
    codes = math.ceil(rows * width / 2)
    if not double:
        return {"codes": codes, "absmax": 4 * blocks}
    return {"codes": codes, "absmax": blocks, "nested": 4 * (math.ceil(blocks / NESTED) + 1)}


def quantize_nf4(pieces: Iterable[Tensor], double: bool) -> dict[str, Tensor]:
    """Quantize a tensor given in pieces of any floating type and shape, one at a time in memory; return its parts.

    All pieces but the last must have full blocks.
    """
    flats = (piece.reshape(-1) for piece in pieces)
    encoded = [_encode4(flat[at : at + CHUNK].float()) for flat in flats for at in range(0, flat.numel(), CHUNK)]
    codes, absmax = (torch.cat(parts) for parts in zip(*encoded))
    if not double:
        return {"codes": codes, "absmax": absmax}
    offset = absmax.mean()
    small, nested = _encode8(absmax - offset)
    return {"codes": codes, "absmax": small, "nested": torch.cat((nested, offset[None]))}


def _encode4(flat: Tensor) -> tuple[Tensor, Tensor]:
    """Return packed codes and scales of (n,) float32: the nearest code, the lower of two equally near."""
    blocks = _rows(flat, BLOCK)
    absmax = blocks.abs().amax(1)  # (blocks,)
    if flat.numel() % BLOCK:
        absmax[-1:].clamp_min_(LEAST)  # bitsandbytes does this for a short block only
    scaled = (blocks * (1.0 / absmax.clamp_min(LEAST))[:, None]).clamp_(-1, 1)
    codes = torch.bucketize(scaled, _middles(table(flat.device)), out_int32=True).to(torch.uint8).view(-1)
    packed = codes[::2] << 4 | codes[1::2]
    if flat.numel() % 2:
        packed[flat.numel() // 2] = packed[flat.numel() // 2] & 0xF0 | 7  # a zero beyond the end
    return packed[: -(-flat.numel() // 2)], absmax


def _encode8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes of the dynamic map for (n,) float32, and the scales of blocks of 256."""
    blocks = _rows(x, NESTED)
    absmax = blocks.abs().amax(1)
    scaled = blocks * (1.0 / absmax.clamp_min(LEAST))[:, None]
    if not x.is_cuda:  # on a CPU bitsandbytes first rounds to 65536 levels, on a GPU it does not
        scaled = ((scaled + 1) * 0.5 * STEPS + 0.5).floor_() / STEPS * 2 - 1
    codes = torch.bucketize(scaled, _middles(dynamic_map(x.device)), out_int32=True)
    codes = codes.masked_fill_((absmax == 0)[:, None], 0)
    return codes.view(-1)[: x.numel()].to(torch.uint8), absmax


def _rows(flat: Tensor, size: int) -> Tensor:
    """Reshape (n,) to (ceil(n / size), size), padded with zeros."""
    return torch.nn.functional.pad(flat, (0, -flat.numel() % size)).view(-1, size)


def _middles(rising: Tensor) -> Tensor:
    return (rising[:-1] + rising[1:]) / 2


def dequantize_nf4(parts: Mapping[str, Tensor] | Sequence[Tensor], out: Tensor) -> None:
    """Dequantize the parts of `quantize_nf4`, possibly longer than needed, into `out` of any floating type.

    out: as many values as the tensor; contiguous in its last dimension.
    """
    codes, absmax, *rest = parts.values() if isinstance(parts, Mapping) else parts
    nested = rest[0] if rest else None
    if out.is_cuda:
        from optrush.kernels.dequantize_triton import launch_nf4

        launch_nf4(codes, absmax, nested, out, table(out.device), dynamic_map(out.device))
        return
    n = out.numel()
    pairs = torch.cartesian_prod(table(out.device), table(out.device))  # (256, 2)
    values = pairs[codes[: -(-n // 2)].int()].view(-1)[:n]  # (n,)
    if nested is not None:
        block_scale = nested[:-1].repeat_interleave(NESTED)[: absmax.numel()]
        absmax = dynamic_map(absmax.device)[absmax.int()] * block_scale + nested[-1]
    value_scale = absmax[: -(-n // BLOCK)].repeat_interleave(BLOCK)[:n]
    out.copy_((values * value_scale).view(out.shape))
