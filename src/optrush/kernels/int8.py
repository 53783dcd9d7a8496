"""8-bit weights: each row as integers from -127 to 127 and one float32 scale, the row's largest magnitude.

    codes   int8 (rows, width)       round(value * (127 / scale)), ties to even; rows below 2^-119 have zeros
    scales  float32 (rows,)

    value = code * scale * (1 / 127), each operation rounded to float32, then once to the output's type

Only the weight has 8 bits: matmuls run in their input's type. dequantize_triton.py is bit-identical.

Source: Dettmers et al., https://arxiv.org/abs/2208.07339, vector-wise quantization of weights; the bytes equal those of
    bitsandbytes 0.50 (https://github.com/bitsandbytes-foundation/bitsandbytes).
Differs from the source: inputs are not quantized, so outliers need no separate treatment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

MOST = 127.0
PART = 1 / MOST
LEAST = 2.0**-119  # least scale: below it 127 / scale overflows, and values become 0


def int8_bytes(rows: int, width: int) -> dict[str, int]:
    """Return the bytes of each part of a quantized tensor."""
    return {"codes": rows * width, "scales": 4 * rows}


def quantize_int8(values: Tensor) -> dict[str, Tensor]:
    """Quantize a matrix of any floating type; return its parts."""
    wide = values.float()
    scales = wide.abs().amax(1)
    factor = (MOST / scales).masked_fill_(scales < LEAST, 0.0)
    return {"codes": (wide * factor[:, None]).round_().to(torch.int8), "scales": scales}


def dequantize_int8(parts: Mapping[str, Tensor] | Sequence[Tensor], out: Tensor) -> None:
    """Dequantize the flat parts of `quantize_int8`, possibly longer than needed, into `out` of any floating type.

    out: (rows, width) or (groups, rows per group, width); contiguous rows.
    """
    codes, scales = parts.values() if isinstance(parts, Mapping) else parts
    if out.is_cuda:
        from optrush.kernels.dequantize_triton import launch_int8

        launch_int8(codes, scales, out)
        return
    width = out.shape[-1]
    rows = out.numel() // width
    values = codes.reshape(-1)[: rows * width].view(rows, width) * scales[:rows, None] * PART
    out.copy_(values.view(out.shape))


# --- Flat values in blocks of 256 with one scale each, for saved or sent tensors.


BLOCK = 256  # values per scale
CHUNK = 1 << 24  # values at a time; their float32 copies are scratch memory


def quantize_blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize values (n,) of any floating type to codes (n,) and scales (ceil(n / 256),)."""
    codes = torch.empty(len(values), dtype=torch.int8, device=values.device)
    scales = torch.empty(block_count(len(values)), dtype=torch.float32, device=values.device)
    for part, blocks, width in _pieces(len(values)):
        parts = quantize_int8(values[part].view(-1, width))
        codes[part], scales[blocks] = parts["codes"].view(-1), parts["scales"]
    return codes, scales


def dequantize_blocks(codes: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """Dequantize the output of `quantize_blocks` into out (n,) of any floating dtype; return it."""
    for part, blocks, width in _pieces(len(out)):
        dequantize_int8((codes[part], scales[blocks]), out[part].view(-1, width))
    return out


def block_count(n: int) -> int:
    """Return the number of scales for n values."""
    return -(-n // BLOCK)


def _pieces(n: int) -> Iterator[tuple[slice, slice, int]]:
    """Split n values into chunks of full blocks, and the rest: (values, scales, values per block)."""
    full = n // BLOCK * BLOCK
    for first in range(0, full, CHUNK):
        last = min(first + CHUNK, full)
        yield slice(first, last), slice(first // BLOCK, last // BLOCK), BLOCK
    if full < n:
        yield slice(full, n), slice(full // BLOCK, None), n - full
