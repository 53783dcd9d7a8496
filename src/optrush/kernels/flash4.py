"""FlashAttention 4 for Hopper and later as two operators of our own, so that a compiled block stays one graph.

    attend(q (B, T, H, E), k (B, T, K, E), v (B, T, K, E), documents) -> (B, T, H, E), in q's type

Source: https://github.com/Dao-AILab/flash-attention (flash_attn/cute), Zadouri et al., https://arxiv.org/abs/2603.05451.
The package's own functions are called, none of its hooks into torch: those change the whole process.

bfloat16 or float16 on CUDA, capability 9.0 and up; grouped heads are read as they are. Rows of one document go in as
dense rows; packed ones as documents.starts. Saves q, k, v, the output and a float32 number a row and head. The backward
adds with atomics, in order where torch is told to be deterministic. Checked against `attention.masked` in tests/gpu.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from optrush.data.batch import Documents
from optrush.errors import NeedsError
from optrush.kernels.room import empty_with_room

WIDE = 128  # values a head


def flash4(q: Tensor, k: Tensor, v: Tensor, documents: Documents, *, room: int = 0) -> Tensor:
    """Causal attention within each document; room: columns that are left (kernels/room.py) beside a token's heads.

    Raises:
        NeedsError: not on CUDA, or neither bfloat16 nor float16.
    """
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16):
        found, do = f"{q.dtype} on {q.device.type}", "use bfloat16 or float16 on a CUDA device, or sdpa attention"
        raise NeedsError("flash-attn-4", found, do)
    B, T, H, E = q.shape
    if documents.single:
        out: Tensor = _forward(q, k, v, None, T, room)[0]
        return out
    # The longest document only bounds the launch: T for all batches, so that no other length compiles anything anew.
    q, k, v = (x.reshape(B * T, -1, E) for x in (q, k, v))
    out = _forward(q, k, v, documents.starts, T, room)[0]
    return out.view(B, T, H, E)


@cache
def _package() -> ModuleType:
    """The package's functions. They keep on the disk what they compile, as QuACK does; by default it is forgotten."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    return import_module("flash_attn.cute.interface")


@torch.library.custom_op("optrush::flash4", mutates_args=(), device_types="cuda")
def _forward(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, longest: int, room: int) -> tuple[Tensor, Tensor]:
    """Output like q, with room, and the logarithm of each row's sum: (B, H, T) dense, (H, B*T) with starts; float32."""
    most = None if starts is None else longest
    # The query heads of one key/value head in one tile, or each in its own. On an H200, with four of them, the latter
    # is 5 % faster for dense rows at E = 128; at 64, and where rows are packed, it is 7 to 16 % slower (LOG.md).
    apart = starts is None and q.shape[-1] >= WIDE
    out, lse, *_ = _package()._flash_attn_fwd(
        q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=most, max_seqlen_k=most, causal=True,
        return_lse=True, out=_empty(q, room), pack_gqa=False if apart else None,
    )  # fmt: skip
    return out, lse


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, longest: int, room: int) -> tuple[Tensor, Tensor]:
    shape = (q.shape[0], q.shape[2], q.shape[1]) if starts is None else (q.shape[1], q.shape[0])
    return _empty(q, room), q.new_empty(shape, dtype=torch.float32)


def _empty(q: Tensor, room: int) -> Tensor:
    """For the output."""
    *tokens, H, E = q.shape
    return empty_with_room(q, *tokens, H * E, columns=room).view(q.shape)


@torch.library.custom_op("optrush::flash4_backward", mutates_args=(), device_types="cuda")
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, starts: Tensor | None, longest: int,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    most = None if starts is None else longest
    dq, dk, dv = _package()._flash_attn_bwd(
        q, k, v, out, grad.contiguous(), lse, causal=True, cu_seqlens_q=starts, cu_seqlens_k=starts,
        max_seqlen_q=most, max_seqlen_k=most, deterministic=deterministic,
    )  # fmt: skip
    return dq, dk, dv


@_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, starts: Tensor | None, longest: int,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, starts, longest, _ = inputs
    ctx.save_for_backward(q, k, v, *output, starts)  # type: ignore[arg-type]
    ctx.longest = longest  # type: ignore[attr-defined]
    ctx.set_materialize_grads(False)


def _gradients(ctx: torch.autograd.function.FunctionCtx, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, starts = ctx.saved_tensors  # type: ignore[attr-defined]
    ordered = torch.are_deterministic_algorithms_enabled()
    longest: int = ctx.longest  # type: ignore[attr-defined]
    return (*_backward(grad, q, k, v, out, lse, starts, longest, ordered), None, None, None)


_forward.register_autograd(_gradients, setup_context=_keep)
